"""Rows and records of a run that never was, for tests of what keeps them."""

from chimera.train.metrics import EvaluationMetrics, StepMetrics
from chimera.train.tracking.record import Origin, RunRecord, RunStart

__all__ = ["ORIGIN", "evaluation", "record_of", "step"]

ORIGIN = Origin(
    command=("chimera", "train", "run.toml"),
    folder="/data/project",
    commit="0123456789abcdef",
    dirty=True,
    versions={"python": "3.12.1", "torch": "2.13.0"},
    environment={"OMP_NUM_THREADS": "1"},
    hosts=("node1", "node1", "node2"),
    devices=("cpu", "cpu", "cpu"),
)


def step(number):
    """Return the row of a step, with figures that tell it from other rows."""
    return StepMetrics(
        step=number,
        loss=number + 0.5,
        terms={"mlm": number + 0.25, "nsp": 0.25},
        grad_norm=1.5,
        lr=1e-3,
        tokens_per_s=100.0,
        step_s=0.1,
        bubble_fraction=0.2,
        data_wait_s=0.01,
    )


def evaluation(number):
    """Return the row of an evaluation."""
    return EvaluationMetrics(step=number, terms={"mlm": 7.5, "nsp": 0.6}, told_right="nsp", accuracy=0.55, answers=64)


def record_of(*, from_step=0, trackers=None, **values):
    """Return the record of a run that starts from a step."""
    start = {"origin": ORIGIN, "started_s": 1000.0, "seen_s": 1100.0, "step": from_step, "carried_s": 0.0} | values
    return RunRecord(
        name="run",
        steps=10,
        config={"train": {"steps": 10, "out": "runs/a"}, "optimizer": {"betas": (0.9, 0.999)}},
        starts=(RunStart(from_step=from_step, **start),),
        trackers=trackers or {},
    )
