"""Why a plan is as fast as it is: what its step goes for, what it does better than another, what each choice is worth.

Facts come from estimates; here they are subtracted from each other. What changing one choice costs is estimated anew.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Final, get_args

from chimera.errors import ChimeraError
from chimera.plan.divisors import divisors
from chimera.plan.estimate import Estimate
from chimera.plan.layout import Layout, Recompute
from chimera.plan.measured import MeasuredTimes
from chimera.plan.plans import Plan, Plans
from chimera.plan.search.model_pricing import ModelPricing

__all__ = ["Change", "changes", "differences", "limits", "parts_of_step"]


_EQUAL: Final = "equal cut"


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """One choice changed by one step.

    Attributes:
        choice: in words, as "t = 4".
        step_s: of a step then; None where it cannot be.
        why_not: why it cannot be.
    """

    choice: str
    step_s: float | None = None
    why_not: str | None = None


def parts_of_step(estimate: Estimate) -> Mapping[str, float]:
    """Return the seconds of a step by what the busiest rank does in them; together they are the step."""
    idle = estimate.pipeline_s - sum(estimate.compute_s.values())
    parts = {
        **estimate.compute_s,
        "idle in the pipeline": idle,
        "gradient reduction": estimate.reduce_s,
        "optimizer": estimate.optimizer_s,
    }
    return {name: time for name, time in parts.items() if time > 0}


def limits(estimate: Estimate) -> str:
    """Say what a step goes for beside the model's blocks, the largest first, and what memory leaves.

    What stands first is what a faster plan would have to reduce.
    """
    parts = parts_of_step(estimate)
    others = sorted(((time, name) for name, time in parts.items() if name != "blocks"), reverse=True)
    shares = ", ".join(
        f"{name} {time / estimate.step_s:.1%}" for time, name in others if time > 0.002 * estimate.step_s
    )
    full = estimate.peak_bytes / estimate.cluster.device.memory_bytes
    blocks = parts.get("blocks", 0.0) / estimate.step_s
    return (
        f"{blocks:.1%} of the step is the blocks' own work; the rest: {shares or 'nothing'}. Memory is {full:.0%} full."
    )


def differences(first: Plan, second: Plan) -> str:
    """Say by how much one plan beats another, and where it gains and loses.

    Gains and losses are of the busiest rank's time under the published orders.
    """
    one, other = parts_of_step(first.estimate), parts_of_step(second.estimate)
    gains = {name: other.get(name, 0.0) - one.get(name, 0.0) for name in {**one, **other}}
    notable = 0.002 * first.step_s
    words = [
        f"{_seconds(abs(gain))} {'less' if gain > 0 else 'more'} {'in ' if name in _PLURAL else ''}{name}"
        for name, gain in sorted(gains.items(), key=lambda each: -abs(each[1]))
        if abs(gain) > notable
    ]
    by = second.step_s / first.step_s - 1
    changed = ", ".join(_changed(first.layout, second.layout)) or "nothing"
    return (
        f"The first beats the second by {by:.1%} ({_seconds(second.step_s - first.step_s)} of a step): "
        f"{', '.join(words) or 'their parts hardly differ'}. They differ in {changed}."
    )


_PLURAL = {"blocks", "tensor-parallel collectives", "embedding and head", "hops between chunks"}


def changes(plans: Plans) -> Iterator[Change]:
    """Yield what each choice of the best plan, changed by one step, would make of it; the others stay.

    d follows t and p, and m follows d and b, so that devices and batch stay the same. Where the best plan's stages
    differ, other stages than its own are cut by cost again. All are in the published order of their schedules.
    """
    best = plans.best.layout
    pricing = ModelPricing(plans.shape, plans.cluster, plans.software, plans.measured)
    for words, layout in _neighbours(best, plans):
        if plans.measured is not None and layout is not None and not _was_measured(layout, plans.measured):
            yield Change(choice=words, why_not="was not measured")
        elif layout is None:
            yield Change(choice=words, why_not="does not divide")
        else:
            yield _changed_to(words, layout, pricing, recut=best.cut is not None and words != _EQUAL)


def _changed_to(words: str, layout: Layout, pricing: ModelPricing, *, recut: bool) -> Change:
    try:
        estimate = pricing.estimate(pricing.recut(layout) if recut and layout.cut is None else layout)
    except ChimeraError as error:
        return Change(choice=words, why_not=str(error).split(";")[0])
    if estimate.fits:
        return Change(choice=words, step_s=estimate.step_s)
    over = estimate.peak_bytes - pricing.cluster.device.memory_bytes
    return Change(choice=words, why_not=f"does not fit, {over / 2**30:.1f} GiB too much")


def _was_measured(layout: Layout, measured: MeasuredTimes) -> bool:
    return (
        layout.tensor == measured.tensor
        and layout.sequence_parallel == measured.sequence_parallel
        and layout.recompute in measured.recompute
        and layout.microbatch in measured.sizes
    )


def _neighbours(best: Layout, plans: Plans) -> Iterator[tuple[str, Layout | None]]:
    for tensor in _beside(best.tensor, divisors(plans.cluster.node_size)):
        data = best.num_devices // (tensor * best.pipeline)
        yield (
            f"t = {tensor}",
            _resized(best, plans, tensor=tensor, data=data, sequence_parallel=best.sequence_parallel and tensor > 1),
        )
    for pipeline in _beside(best.pipeline, divisors(best.num_devices // best.tensor)):
        data = best.num_devices // (best.tensor * pipeline)
        yield f"p = {pipeline}", _resized(best, plans, pipeline=pipeline, data=data)
    for size in _beside(best.microbatch, divisors(plans.global_batch // best.data)):
        yield f"b = {size}", _resized(best, plans, microbatch=size)
    if best.chunks is not None:
        for chunks in (best.chunks - 1, best.chunks + 1):
            yield f"v = {chunks}", replace(best, chunks=chunks, cut=None)
    if best.pairs is not None:
        for pairs in _beside(best.pairs, divisors(max(best.pipeline // 2, 1))):
            yield f"f = {pairs}", replace(best, pairs=pairs)
    if best.schedule != "1f1b" and best.pipeline > 1:
        plain = replace(best, schedule="1f1b", chunks=None, pairs=None, waves=None, unit=None, cut=None)
        yield "schedule 1f1b", plain
    for mode in get_args(Recompute):
        if mode != best.recompute:
            yield f"recompute {mode}", replace(best, recompute=mode)
    if best.tensor > 1:
        yield (
            _switched("sequence parallelism", on=best.sequence_parallel),
            replace(best, sequence_parallel=not best.sequence_parallel),
        )
    if best.data > 1 or best.pairs:
        yield _switched("sharded optimizer", on=best.sharded), replace(best, sharded=not best.sharded)
    if best.cut is not None:
        yield _EQUAL, replace(best, cut=None)


def _resized(best: Layout, plans: Plans, **sizes: int | bool) -> Layout | None:
    """Return the layout with other sizes and as many micro-batches as make the batch; None where they do not divide."""
    data, size = int(sizes.get("data", best.data)), int(sizes.get("microbatch", best.microbatch))
    count, rest = divmod(plans.global_batch, data * size) if data else (0, 1)
    tensor, pipeline = int(sizes.get("tensor", best.tensor)), int(sizes.get("pipeline", best.pipeline))
    if rest or not count or tensor * pipeline * data != best.num_devices:
        return None
    return replace(best, **sizes, microbatches=count, cut=None)  # type: ignore[arg-type]


def _beside(value: int, known: tuple[int, ...]) -> list[int]:
    """Return the numbers of ``known`` next to one that is among them."""
    place = known.index(value)
    return [known[i] for i in (place - 1, place + 1) if 0 <= i < len(known)]


def _switched(name: str, *, on: bool) -> str:
    return f"without {name}" if on else f"with {name}"


_WORDS = {
    "tensor": "t",
    "pipeline": "p",
    "data": "d",
    "microbatch": "b",
    "schedule": "schedule",
    "chunks": "v",
    "pairs": "f",
    "waves": "w",
    "unit": "unit",
    "recompute": "recompute",
    "sequence_parallel": "sequence parallelism",
    "sharded": "sharded optimizer",
    "cut": "cut",
}


def _changed(one: Layout, other: Layout) -> Iterator[str]:
    """Yield in words what two layouts differ in."""
    for name, word in _WORDS.items():
        mine, theirs = getattr(one, name), getattr(other, name)
        if mine != theirs:
            yield word if name in {"cut", "unit"} else f"{word} {_shown(mine)} against {_shown(theirs)}"


def _shown(value: object) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    return "none" if value is None else str(value)


def _seconds(time: float) -> str:
    return f"{time:.3g} s" if time >= 1 else f"{1e3 * time:.3g} ms"
