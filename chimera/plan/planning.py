"""``plan``: a model, a cluster and a global batch to the best layouts, or to why there is none."""

from dataclasses import replace
from typing import Any

from chimera.errors import InfeasibleError, UsageError
from chimera.plan.divisors import nearest_multiple
from chimera.plan.estimate import Estimate
from chimera.plan.hardware import Cluster
from chimera.plan.hardware_file import read_software
from chimera.plan.measured import MeasuredTimes
from chimera.plan.plans import Plan, Plans
from chimera.plan.search.model_pricing import ModelPricing
from chimera.plan.search.refine import refined
from chimera.plan.search.relax import relaxations
from chimera.plan.search.searching import Outcome, search_layouts
from chimera.plan.search.space import SearchSpace
from chimera.plan.shape import ModelShape, require_size
from chimera.plan.software import Software

__all__ = ["DEFAULT_SOFTWARE", "plan"]

DEFAULT_SOFTWARE = "chimera"
"""The code base whose habits and constants are taken where none is named."""

_GIB = 2**30


def plan(
    model: ModelShape,
    cluster: Cluster,
    *,
    global_batch: int,
    space: SearchSpace | None = None,
    software: Software | str = DEFAULT_SOFTWARE,
    measured: MeasuredTimes | None = None,
    top: int = 10,
    refine: bool = True,
) -> Plans:
    """Search the fastest layouts of a model on a cluster.

    Args:
        model: with the length of its sequences.
        cluster: all of whose devices are used.
        global_batch: sequences B of a step.
        space: choices that are given; everything is searched without.
        software: the code base, or its name.
        measured: times of the model's layers in place of modelled ones; narrows the search to what was measured.
        top: plans to return.
        refine: whether the list scheduler looks for a faster order for each of them.

    Raises:
        ConfigError: a batch or a number of plans that is none.
        InfeasibleError: no layout divides the batch, or none fits into memory; the message says the least excess and
            which choice to relax.
    """
    require_size("global_batch", global_batch)
    require_size("top", top)
    given = SearchSpace() if space is None else space
    code = read_software(software) if isinstance(software, str) else software
    if measured is not None:
        given = _measured_space(model, given, measured)
    pricing = ModelPricing(model, cluster, code, measured)
    outcome = search_layouts(model, cluster, pricing, global_batch=global_batch, space=given, top=top)
    if not outcome.best:
        raise InfeasibleError(_why_none(pricing, outcome, given, global_batch))
    plans = [
        refined(estimate) if refine else Plan(estimate=estimate, step_s=estimate.step_s) for estimate in outcome.best
    ]
    return Plans(
        shape=model,
        cluster=cluster,
        software=code,
        global_batch=global_batch,
        plans=tuple(sorted(plans, key=lambda each: each.step_s)),
        rejected={str(reason): count for reason, count in outcome.rejected.items()},
        num_bounded=outcome.num_bounded,
        num_simulated=outcome.num_simulated,
        measured=measured,
    )


def _measured_space(model: ModelShape, space: SearchSpace, measured: MeasuredTimes) -> SearchSpace:
    """Return the part of a space that was measured.

    Raises:
        UsageError: the model's blocks are of several kinds or the sequences of another length, or nothing is left.
    """
    if model.family == "t5" or model.seq != measured.seq:
        raise UsageError(
            f"{measured.option}: {measured.name} is one kind of block on {measured.seq} tokens, the model is "
            f"{model.family} on {model.seq}; try --seq {measured.seq}"
        )
    narrowed = {
        "tensor": _among(space.tensor, (measured.tensor,)),
        "microbatch": _among(space.microbatch, measured.sizes),
        "recompute": _among(space.recompute, measured.recompute),
        "sequence_parallel": _among(space.sequence_parallel, (measured.sequence_parallel,)),
    }
    if not all(narrowed.values()):
        sizes = " or ".join(map(str, measured.sizes))
        sequence = ", sequence parallel" if measured.sequence_parallel else ""
        raise UsageError(
            f"{measured.option}: {measured.name} was measured for t = {measured.tensor}{sequence}, b = {sizes}, "
            f"recompute {' or '.join(measured.recompute)}; "
            f"none of it is among the given {', '.join(name for name, left in narrowed.items() if not left)}"
        )
    return replace(
        space,
        tensor=narrowed["tensor"],
        microbatch=narrowed["microbatch"],
        recompute=narrowed["recompute"],
        sequence_parallel=narrowed["sequence_parallel"],
    )


def _among(given: tuple[Any, ...] | None, measured: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return the measured values of a choice that are given, all of them where none is."""
    return tuple(value for value in measured if given is None or value in given)


def _why_none(pricing: ModelPricing, outcome: Outcome, space: SearchSpace, global_batch: int) -> str:
    """Say why there is no plan, and what would give one."""
    if outcome.closest is None:
        return _why_nothing_divides(pricing, outcome, space, global_batch)
    closest: Estimate = outcome.closest
    device, layout = pricing.cluster.device, closest.layout
    worst = max(closest.memory, key=lambda memory: memory.total)
    parts = ", ".join(
        f"{name} {getattr(worst, name) / _GIB:.1f}" for name in ("weights", "gradients", "optimizer", "activations")
    )
    advice = relaxations(pricing, space, global_batch)
    return (
        f"no layout fits {device.title}: {device.memory_bytes / _GIB:.1f} GiB. The one that holds least (t = "
        f"{layout.tensor}, p = {layout.pipeline}, d = {layout.data}, b = {layout.microbatch}, {layout.schedule}, "
        f"recompute {layout.recompute}{', sharded' if layout.sharded else ''}) needs {worst.total / _GIB:.1f} GiB, "
        f"{(worst.total - device.memory_bytes) / _GIB:.1f} too much: {parts} GiB.\n  "
        + (f"It would fit with {'; or with '.join(advice)}." if advice else "No single choice relaxed makes it fit.")
    )


def _why_nothing_divides(pricing: ModelPricing, outcome: Outcome, space: SearchSpace, global_batch: int) -> str:
    reasons = ", ".join(f"{count:,} × {reason}" for reason, count in outcome.rejected.items())
    devices = pricing.cluster.num_devices
    if space.data:
        batches = {n for data in space.data for n in nearest_multiple(global_batch, data)}
    else:
        most = min(devices, pricing.cluster.node_size * pricing.shape.num_blocks)
        batches = set(nearest_multiple(global_batch, max(devices // most, 1)))
    advice = []
    if others := sorted(batches - {global_batch}):
        advice.append(f"try --global-batch {' or '.join(map(str, others))}")
    if space.given:
        given = ", ".join(f"--{name.replace('_', '-')}" for name in space.given)
        advice.append(f"leave out one of {given}" if len(space.given) > 1 else f"leave out {given}")
    return (
        f"no layout of {devices} devices divides --global-batch {global_batch} and the model "
        f"({reasons or 'no sizes are left'}); {', or '.join(advice) or 'try another number of --gpus'}"
    )
