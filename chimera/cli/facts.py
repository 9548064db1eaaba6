"""Sizes and counts of a schedule, in the words that several commands print. It judges and times nothing."""

import numpy as np

from chimera.ir.checks_messages import Routing
from chimera.ir.costs import MODEL_UNIT, Costs, StageCosts
from chimera.ir.rows import Rows
from chimera.ir.schedule import Schedule
from chimera.ir.timeline import Timeline
from chimera.ir.versions import weight_versions

__all__ = [
    "bytes_per_rank",
    "counted",
    "messages_per_rank",
    "num_channels",
    "number",
    "sizes_text",
    "step_facts",
    "units_text",
    "weight_copies",
]


def counted(count: int, noun: str) -> str:
    """Write a number with its noun in the right number.

    >>> counted(1, "rank"), counted(2048, "micro-batch")
    ('1 rank', '2,048 micro-batches')
    """
    plural = noun if count == 1 else f"{noun}es" if noun.endswith(("ch", "s")) else f"{noun}s"
    return f"{count:,} {plural}"


def number(value: float) -> str:
    """Write a time or an amount with up to four significant digits, more only for the digits before the point.

    >>> number(36.0), number(27.5), number(2 / 3), number(123456.7), number(0.00012)
    ('36', '27.5', '0.6667', '123,457', '0.00012')
    """
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def sizes_text(schedule: Schedule) -> str:
    """Say how large a schedule is.

    >>> sizes_text(Schedule.from_text(["0F0 0B0", "1F0 1B0"], routes=[[0, 1]]))
    '2 ranks, 1 micro-batch, 2 stages, 1 route'
    """
    sizes = (
        (schedule.num_ranks, "rank"),
        (schedule.num_microbatches, "micro-batch"),
        (schedule.num_stages, "stage"),
        (len(schedule.placement.routes), "route"),
    )
    return ", ".join(counted(count, noun) for count, noun in sizes)


def units_text(unit: str) -> str:
    """Say in which units a timeline's times and activations are.

    >>> units_text("s")
    'Times in seconds, activations in units of 1/p of the model for one micro-batch.'
    """
    activations = "activations in units of 1/p of the model for one micro-batch."
    return f"Times and {activations}" if unit == MODEL_UNIT else f"Times in seconds, {activations}"


def step_facts(schedule: Schedule, timeline: Timeline) -> dict[str, object]:
    """Return sizes and times of one step, under the names that every JSON output gives them."""
    return {
        "ranks": schedule.num_ranks,
        "microbatches": schedule.num_microbatches,
        "stages": schedule.num_stages,
        "unit": timeline.unit,
        "makespan": timeline.makespan,
        "span": timeline.span,
        "bubble_of_total": timeline.bubble_fraction,
        "bubble_of_ideal": timeline.bubble_over_ideal,
    }


def weight_copies(schedule: Schedule) -> float:
    """Return the most weights a rank holds, all versions of an asynchronous schedule, in units of 1/p of the model.

    >>> weight_copies(Schedule.from_text(["0F0 0B0", "1F0 1B0"], routes=[[0, 1], [1, 0]]))
    2.0
    """
    held = max(sum(versions.values()) for versions in weight_versions(schedule))
    return held * schedule.num_ranks / schedule.num_stages


def messages_per_rank(schedule: Schedule) -> tuple[int, ...]:
    """Return the messages each rank sends in a step, whether or not the schedule is lowered.

    >>> messages_per_rank(Schedule.from_text(["0F0 0B0", "1F0 1B0"], routes=[[0, 1]]))
    (1, 1)
    """
    rows = Rows.of(schedule)
    sent = np.bincount(rows.rank[Routing.of(rows).producer], minlength=schedule.num_ranks)
    return tuple(sent.tolist())


def bytes_per_rank(schedule: Schedule, costs: Costs | StageCosts) -> tuple[float, ...] | None:
    """Return the bytes each rank sends in a step; None where the costs know of no bytes.

    >>> schedule = Schedule.from_text(["0F0 0F1 0B0 0B1", "1F0 1B0 1F1 1B1"], routes=[[0, 1]])
    >>> costs = StageCosts(forward_s=[1, 1], backward_s=[2, 2], message_bytes=[500], bandwidth_bytes_per_s=1e9)
    >>> bytes_per_rank(schedule, costs), bytes_per_rank(schedule, Costs())
    ((1000.0, 1000.0), None)
    """
    if isinstance(costs, Costs) or costs.message_bytes is None:
        return None
    rows = Rows.of(schedule)
    messages = Routing.of(rows)
    # An activation comes to its stage over the boundary before it, a gradient over the one behind it.
    boundary = messages.stage - messages.forward
    size = np.asarray(costs.message_bytes, np.float64)[boundary] * schedule.microbatch_share
    sent = np.bincount(rows.rank[messages.producer], weights=size, minlength=schedule.num_ranks)
    return tuple(sent.tolist())


def num_channels(schedule: Schedule) -> int:
    """Return the directed (source, destination, route) edges that messages take, each of which keeps its order.

    >>> num_channels(Schedule.from_text(["0F0 0B0", "1F0 1B0"], routes=[[0, 1]]))
    2
    """
    return len(np.unique(Routing.of(Rows.of(schedule)).channel))
