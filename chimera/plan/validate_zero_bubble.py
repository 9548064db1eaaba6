"""Zero Bubble's figures (Qi et al. 2024): bubble rates from its own times, and the times of stages from the model."""

from typing import Final

from chimera.ir.costs import StageCosts
from chimera.plan.closed import model_times
from chimera.plan.comparison import Comparison, TableResult, cluster_of
from chimera.plan.dims import dims_of
from chimera.plan.hardware_file import read_device, read_software
from chimera.plan.layers import LayerTimes, Sharing
from chimera.plan.shape import ModelShape
from chimera.plan.tables import SELENE, read_columns
from chimera.schedules import build_schedule
from chimera.simulate import simulate

__all__ = ["zero_bubble_rates", "zero_bubble_times"]

_ZERO_BUBBLE_SHAPES: Final = {
    "1.5B": (ModelShape(family="gpt", hidden=2304, layers=22, heads=24, vocab=50257, seq=1024), 6, 3),
    "6.2B": (ModelShape(family="gpt", hidden=4096, layers=30, heads=32, vocab=50257, seq=1024), 3, 4),
}
"""Model, micro-batch size and chunks per rank (Qi et al. 2024, table 3); each end has a block less for what it does."""


def zero_bubble_rates() -> TableResult:
    """Compare bubble rates from the published times of F, I, W and a hop, simulated, on the span's clock."""
    rows = []
    for printed in read_columns("zero-bubble"):
        p, m = int(printed["pp"]), int(printed["num_microbatches"])
        chunks = _ZERO_BUBBLE_SHAPES[printed["model"]][2]
        for name, column in (
            ("1f1b", "bubble_1f1b"),
            ("interleaved", "bubble_interleaved"),
            ("zb-h1", "bubble_zb_h1"),
            ("zb-h2", "bubble_zb_h2"),
        ):
            v = chunks if name == "interleaved" else 1
            schedule = build_schedule(name, ranks=p, microbatches=m, chunks=v if v > 1 else None)
            forward, inward, weight = (
                float(printed[key]) / 1e3 / v for key in ("forward_ms", "input_grad_ms", "weight_grad_ms")
            )
            costs = StageCosts(
                forward_s=[forward] * p * v,
                backward_s=[inward + weight] * p * v,
                weight_grad_s=[weight] * p * v,
                latency_s=float(printed["p2p_ms"]) / 1e3,
            )
            span = simulate(schedule, costs).span
            rate = 1 - m * v * (forward + inward + weight) / span
            rows.append(Comparison(f"{printed['model']} m={m} {name}", rate, float(printed[column])))
    return TableResult(
        "zero-bubble", "bubble rates of a step, Qi et al. 2024, table 5", "of the step", tuple(rows), {}, None
    )


def zero_bubble_times() -> TableResult:
    """Compare the mean F + I + W of a stage; no constant was fitted on these."""
    rows = []
    device, software = read_device("a100-80"), read_software("zero-bubble")
    for printed in read_columns("zero-bubble"):
        shape, microbatch, _ = _ZERO_BUBBLE_SHAPES[printed["model"]]
        cluster = cluster_of(device, SELENE, int(printed["pp"]))
        sharing = Sharing(
            float(microbatch),
            1.0,
            0.0,
            0.0,
            software.constant("matrix_factor"),
            accumulated_bytes=software.accumulated_bytes,
        )
        stacks = dims_of(shape)
        vocab = software.vocab(shape.vocab, 1)
        times = model_times(software.rates(cluster), stacks, sharing, vocab=float(vocab))
        whole: LayerTimes = times.all_blocks(stacks, 1.0)
        mean = float(whole.total_s + times.head.total_s + times.embedding.total_s) / int(printed["pp"])
        measured = sum(float(printed[key]) for key in ("forward_ms", "input_grad_ms", "weight_grad_ms"))
        rows.append(Comparison(f"{printed['model']} m={printed['num_microbatches']}", 1e3 * mean, measured))
    return TableResult(
        "zero-bubble-times", "F + I + W of a stage, Qi et al. 2024, table 8", "ms", tuple(rows), {}, None
    )
