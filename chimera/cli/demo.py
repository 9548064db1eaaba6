"""``chimera demo``: trains a small BERT with Chimera on this machine and shows what the schedule did.

The same model takes a few steps by 1F1B beside it. Both are predicted from costs measured one rank at a time, and run
on the virtual device at that pace, since ranks that share cores cannot show a schedule's own shape. Everything here is
a call of what the other commands call too.
"""

import json
import os
import shutil
import time
from collections.abc import Mapping
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Final

from tyro.conf import arg

from chimera import launch
from chimera.cli.demo_summary import DemoSummary, ScheduleFigures, show_summary, summary_text
from chimera.cli.terminal import console
from chimera.cli.training import PRELOAD, run_local
from chimera.cli.training_view import TrainingView, summary
from chimera.data import DataConfig
from chimera.errors import UsageError
from chimera.ir.costs import StageCosts
from chimera.ir.costs_file import write_costs
from chimera.ir.schedule import Schedule
from chimera.ir.timeline import Timeline
from chimera.launch import Place, Tell
from chimera.models import BertConfig
from chimera.plot import plot_curve, plot_timeline
from chimera.simulate import simulate
from chimera.timeline import write_trace
from chimera.train.config import ParallelOptions, RunOptions, ScheduleOptions, TrainConfig
from chimera.train.events import TrainingResult
from chimera.train.layout import layout_of
from chimera.train.lr_schedules import LearningRate
from chimera.train.metrics import METRICS, read_rows
from chimera.train.optimizers import OptimizerConfig

__all__ = ["demo"]

_RANKS: Final = 4
_SEQUENCE_LENGTH: Final = 64
_MARKER: Final = "summary.json"
_STEPS_BY_1F1B: Final = 20
_MEASURED: Final = "chimera.train.measured_stages"


def demo(
    *,
    out: Annotated[Path, arg(metavar="FOLDER")] = Path("runs/demo"),
    steps: Annotated[int, arg(metavar="N")] = 600,
) -> None:
    """Train a small BERT with Chimera on 4 processes and the bundled text, and show what the schedule did.

    Takes under three minutes on two cores. Writes metrics, timelines (measured above predicted), a trace and a summary.

    Example:
        chimera demo

    Args:
        out: folder for the results; what an earlier demo left there is replaced
        steps: of training
    """
    began = time.monotonic()
    if steps < _STEPS_BY_1F1B:
        raise UsageError(f"--steps {steps}: needed: at least {_STEPS_BY_1F1B}, which 1F1B is compared over")
    _clear(out)
    launch.warm_up([*PRELOAD, _MEASURED])
    config = _config(out, steps)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    screen = console()
    screen.print("Training a small BERT with Chimera: two pipelines in opposite directions through the same ranks.")
    screen.print("\n".join(summary(config, layout_of(config))))
    with TrainingView(screen, config) as view:
        result = run_local(config, on_event=view.show)
    screen.print(f"\nThe first {_STEPS_BY_1F1B} steps again by 1F1B, with the same weights and the same text …")
    other = _by_1f1b(config)
    baseline = run_local(other)
    screen.print("Measuring what each stage costs, one at a time, and running both schedules at that pace …\n")
    costs: StageCosts = launch.run_local(partial(_costs_on_rank, config), 1, preload=[_MEASURED])[0]
    assert isinstance(result, TrainingResult), "no profile was asked for"
    assert isinstance(baseline, TrainingResult), "nor here"
    schedules = {"chimera": layout_of(config).schedule, "1f1b": layout_of(other).schedule}
    virtual = launch.run_local(
        partial(_virtual_on_rank, schedules, costs, _message_bytes(config)), _RANKS, preload=[_MEASURED]
    )[0]
    predicted = {name: simulate(schedule, costs) for name, schedule in schedules.items()}
    measured = {name: _timeline(run) for name, run in (("chimera", result), ("1f1b", baseline))}
    _write_figures(out, measured, virtual, predicted, result)
    write_costs(costs, out / "costs.json")
    write_trace(measured["chimera"], out / "trace.json")
    found = DemoSummary(
        vocabulary_size=config.model.vocab_size,
        unigram_entropy=result.unigram_entropy,
        heldout_mlm_before=result.evaluations[0].terms["mlm"],
        heldout_mlm_after=result.evaluations[-1].terms["mlm"],
        steps=steps,
        tokens=steps * layout_of(config).global_batch * _SEQUENCE_LENGTH,
        seconds=time.monotonic() - began,
        cores=cores,
        ranks=_RANKS,
        schedules={name: _figures(predicted[name], virtual[name], measured[name]) for name in schedules},
        compared_steps=_STEPS_BY_1F1B,
        largest_loss_difference=_loss_difference(out, out / "1f1b"),
    )
    (out / "summary.md").write_text("\n".join(summary_text(found, out)) + "\n", encoding="utf-8")
    (out / _MARKER).write_text(json.dumps(asdict(found), indent=1) + "\n", encoding="utf-8")
    show_summary(screen, found, out)


def _config(out: Path, steps: int) -> TrainConfig:
    return TrainConfig(
        model=BertConfig(
            vocab_size=4096,
            hidden_size=128,
            num_layers=3,
            num_heads=4,
            max_positions=_SEQUENCE_LENGTH,
            dropout=0.0,
            attention_dropout=0.0,
            # At the usual 0.02 a model as narrow as this one stays at the unigram entropy for hundreds of steps.
            initializer_range=0.04,
        ),
        data=DataConfig(vocab_size=4096, sequence_length=_SEQUENCE_LENGTH),
        optimizer=OptimizerConfig(name="adamw", learning_rate=2e-3, betas=(0.9, 0.98)),
        learning_rate=LearningRate(total_steps=steps, warmup_steps=max(1, steps // 16)),
        schedule=ScheduleOptions(name="chimera", microbatches=_RANKS),
        parallel=ParallelOptions(pipeline=_RANKS),
        train=RunOptions(
            steps=steps,
            microbatch_size=8,
            evaluation_interval=max(1, steps // 4),
            evaluation_samples=512,
            checkpoint_interval=steps,
            out=str(out),
        ),
    )


def _by_1f1b(config: TrainConfig) -> TrainConfig:
    return replace(
        config,
        schedule=ScheduleOptions(name="1f1b", microbatches=_RANKS),
        train=replace(
            config.train, steps=_STEPS_BY_1F1B, evaluation_samples=0, out=str(Path(config.train.out) / "1f1b")
        ),
    )


def _clear(out: Path) -> None:
    """Remove an earlier demo's folder; refuse any other that is in use."""
    if not out.exists():
        return
    if not out.is_dir() or (any(out.iterdir()) and not (out / _MARKER).exists() and not (out / METRICS).exists()):
        raise UsageError(f"--out {out} holds something other than an earlier demo; name a folder that is not there yet")
    shutil.rmtree(out)


def _message_bytes(config: TrainConfig) -> int:
    """Return the size of an activation: samples × positions × hidden size, in fp32."""
    return config.train.microbatch_size * _SEQUENCE_LENGTH * config.model.hidden_size * 4


def _costs_on_rank(config: TrainConfig, place: Place, tell: Tell) -> StageCosts:
    # Ranks are forked with this loaded; the process that starts them does without.
    from chimera.train.measured_stages import measure_stage_costs

    del place
    tell("measuring the stages")
    return measure_stage_costs(config)


def _virtual_on_rank(
    schedules: Mapping[str, Schedule], costs: StageCosts, message_bytes: int, place: Place, tell: Tell
) -> dict[str, Timeline]:
    from chimera.train.measured_stages import run_on_virtual_device

    with launch.connected(place, timeout_s=60.0) as group:
        timelines = {}
        for name, schedule in schedules.items():
            tell(f"{name} on the virtual device")
            timelines[name] = run_on_virtual_device(schedule, costs, group, message_bytes=message_bytes)
        return timelines


def _timeline(run: TrainingResult) -> Timeline:
    assert run.timeline is not None, "the run made its steps"
    return run.timeline


def _figures(predicted: Timeline, virtual: Timeline, measured: Timeline) -> ScheduleFigures:
    return ScheduleFigures(
        predicted_s=predicted.makespan,
        predicted_bubble=predicted.bubble_fraction,
        virtual_s=virtual.makespan,
        virtual_bubble=virtual.bubble_fraction,
        measured_s=measured.makespan,
        measured_bubble=measured.bubble_fraction,
    )


def _loss_difference(first: Path, second: Path) -> float:
    """Return the largest relative difference between two runs' training losses, over the steps that both made."""
    ours = {row["step"]: float(row["loss"]) for row in read_rows(first / METRICS)}
    theirs = {row["step"]: float(row["loss"]) for row in read_rows(second / METRICS)}
    return max(abs(ours[step] / theirs[step] - 1.0) for step in ours.keys() & theirs.keys())


def _write_figures(
    out: Path,
    measured: Mapping[str, Timeline],
    virtual: Mapping[str, Timeline],
    predicted: Mapping[str, Timeline],
    result: TrainingResult,
) -> None:
    panels = [
        ("chimera, measured on this machine", measured["chimera"]),
        ("chimera, measured on the virtual device", virtual["chimera"]),
        ("chimera, predicted", predicted["chimera"]),
        ("1f1b, measured on the virtual device", virtual["1f1b"]),
        ("1f1b, predicted", predicted["1f1b"]),
    ]
    plot_timeline(panels, [out / "timeline.pdf", out / "timeline.png"])
    rows = read_rows(out / METRICS)
    curves: dict[str, Any] = {
        "training": ([row["step"] for row in rows], [row["mlm_loss"] for row in rows]),
        "held out": (
            [row.step for row in result.evaluations],
            [row.terms["mlm"] for row in result.evaluations],
        ),
    }
    plot_curve(
        curves,
        [out / "loss.pdf", out / "loss.png"],
        title="Masked-word loss",
        x_label="step",
        y_label="nats per token",
        references={"unigram entropy": result.unigram_entropy},
    )
