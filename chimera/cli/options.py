"""Options that several commands share: which schedule is meant, and what its actions cost.

A schedule is named by NAME with its sizes, or by a FILE that carries them. Options that were not given are None, so
that one given beside a file, or to a schedule that does not take it, is refused rather than dropped.
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Annotated

from tyro.conf import FlagCreatePairsOff, OmitArgPrefixes, Positional, arg

from chimera.errors import UsageError, nearest_names
from chimera.ir.action import Kind
from chimera.ir.costs import Costs, StageCosts
from chimera.ir.costs_file import read_costs
from chimera.ir.schedule import Schedule
from chimera.ir.schedule_file import read_schedule
from chimera.passes.lower import lower
from chimera.passes.reductions import ReductionMode, places_reductions
from chimera.schedules import SCHEDULES, build_schedule
from chimera.schedules.building import as_option
from chimera.schedules.chimera import Unit

__all__ = [
    "CostChoice",
    "CostOptions",
    "FileOption",
    "Flag",
    "Quantity",
    "ReduceOption",
    "ScheduleName",
    "SizeOptions",
    "Sizes",
    "costs_to_build",
    "load_schedule",
    "refuse_second_reductions",
    "sizes_for",
    "with_reductions",
]

ScheduleName = Annotated[str, Positional, arg(metavar="NAME|FILE", help_behavior_hint="")]
Flag = Annotated[bool, FlagCreatePairsOff, arg(help_behavior_hint="")]
FileOption = Annotated[Path | None, arg(constructor=Path, metavar="FILE", help_behavior_hint="")]
ReduceOption = Annotated[
    ReductionMode | None, arg(constructor=ReductionMode, metavar="{end,eager,eager-opt}", help_behavior_hint="")
]
Quantity = Annotated[float | None, arg(constructor=float, metavar="X", help_behavior_hint="")]
_Count = Annotated[int | None, arg(constructor=int, metavar="N", help_behavior_hint="")]
_UnitOption = Annotated[Unit | None, arg(constructor=Unit, metavar="{concatenate,double,halve}", help_behavior_hint="")]


@dataclass(frozen=True, slots=True)
class Sizes:
    """The sizes of a schedule given by NAME; a FILE has its own."""

    ranks: _Count = None
    """pipeline ranks p"""
    microbatches: _Count = None
    """micro-batches m of one step"""
    chunks: _Count = None
    """model chunks v per rank (interleaved, interleaved-zb, looped-bfs)"""
    pairs: _Count = None
    """pairs f of opposite pipelines (chimera)"""
    unit: _UnitOption = None
    """how a step of more than p micro-batches is made (chimera)"""
    waves: _Count = None
    """times w that a route goes down the ranks and up again (hanayo, bitpipe)"""
    updates: _Count = None
    """updates k of all micro-batches (pipedream-2bw)"""
    memory_limit: Quantity = None
    """most activations per rank, in units of 1/p of the model for one micro-batch (zb-1p, zb-2p; default: p, 2p)"""


@dataclass(frozen=True, slots=True)
class CostChoice:
    """Times in units of 1/p of the model for one micro-batch, or a FILE with seconds and bytes."""

    forward: Quantity = None
    """time of a forward (default: 1)"""
    backward: Quantity = None
    """time of a whole backward (default: the sum of its parts where both are given, or 2)"""
    input_grad: Quantity = None
    """time of I, a split backward's gradient of the input (default: what W leaves, or half)"""
    weight_grad: Quantity = None
    """time of W, a split backward's gradient of the weights (default: what I leaves, or half)"""
    overlap: Quantity = None
    """time of a forward and a whole backward that run together as a pair (default: their sum)"""
    p2p: Quantity = None
    """time of a message between ranks (default: 0)"""
    reduce_time: Quantity = None
    """time to reduce the gradients of 1/p of the model (default: 0)"""
    held_for_weight_grad: Quantity = None
    """share of a micro-batch's activations that is held from I to W (default: 1, all)"""
    costs: FileOption = None
    """a costs file: times per stage and kind"""

    def given(self) -> list[str]:
        """Return the options that were given, as they are spelled."""
        return [as_option(field.name) for field in fields(self) if getattr(self, field.name) is not None]

    def resolve(self) -> Costs | StageCosts:
        """Return the costs that were given, or the default ones."""
        given = {
            name: value
            for name, value in (
                ("forward", self.forward),
                ("backward", self.backward),
                ("input_grad", self.input_grad),
                ("weight_grad", self.weight_grad),
                ("overlap", self.overlap),
                ("p2p", self.p2p),
                ("reduce", self.reduce_time),
                ("held_for_weight_grad", self.held_for_weight_grad),
            )
            if value is not None
        }
        if self.costs is None:
            if self.backward is None and self.input_grad is not None and self.weight_grad is not None:
                # Without this a whole backward would take 2 whatever its parts take.
                given["backward"] = self.input_grad + self.weight_grad
            return Costs(**given)
        if given:
            raise UsageError(
                f"{self.given()[0]} and --costs {self.costs} were both given; the file holds all costs: leave out one "
                "of them"
            )
        return read_costs(self.costs)


SizeOptions = OmitArgPrefixes[Sizes]
CostOptions = OmitArgPrefixes[CostChoice]


def sizes_for(names: Sequence[str], sizes: Sizes) -> list[Sizes]:
    """Return, for each name, the sizes that it takes; a file takes none.

    Raises:
        UsageError: a size is given that no name takes.
    """
    taken: dict[str, set[str]] = {}
    for name in names:
        family = SCHEDULES.get(name)
        taken[name] = {"ranks", "microbatches", *family.options} if family else set()
    for field in fields(sizes):
        if getattr(sizes, field.name) is not None and not any(field.name in takes for takes in taken.values()):
            raise UsageError(f"none of {', '.join(names)} takes {as_option(field.name)}; leave it out")
    return [
        replace(sizes, **{field.name: None for field in fields(sizes) if field.name not in taken[name]})
        for name in names
    ]


def load_schedule(name: str, sizes: Sizes, costs: Costs | StageCosts | None = None) -> Schedule:
    """Build the schedule called ``name``, for ``costs`` if it is made for some, or read it from the file of that name.

    What a file's form could not carry is said on stderr.

    Raises:
        UsageError: neither a schedule nor a file is called so; a size is missing, or given beside a file.
        FormatError: the file is not a schedule.
    """
    given = {field.name: value for field in fields(sizes) if (value := getattr(sizes, field.name)) is not None}
    if name in SCHEDULES:
        missing = [f"--{size}" for size in ("ranks", "microbatches") if size not in given]
        if missing:
            raise UsageError(f"{name} needs {' and '.join(missing)}, as in: {name} --ranks 8 --microbatches 8")
        return build_schedule(name, **given, costs=costs if SCHEDULES[name].takes_costs else None)
    path = Path(name)
    if not path.is_file() and (path.suffix or len(path.parts) > 1):
        raise UsageError(f"there is no file {name!r}; the schedules are: {', '.join(SCHEDULES)}")
    if not path.is_file():
        raise UsageError(
            f"{name!r} is neither a schedule{nearest_names(name, SCHEDULES)} nor a file; "
            f"the schedules are: {', '.join(SCHEDULES)}"
        )
    if given:
        raise UsageError(
            f"{name} is a file, which has its own sizes; {as_option(next(iter(given)))} cannot change them: leave it "
            "out"
        )
    schedule, notes = read_schedule(path)
    for note in notes:
        print(f"{path}: {note}", file=sys.stderr)
    return schedule


def costs_to_build(name: str, choice: CostChoice) -> Costs | StageCosts | None:
    """Return the costs that a schedule is made for, where a command needs costs for nothing else.

    Raises:
        UsageError: a cost was given that changes nothing.
    """
    if name in SCHEDULES and SCHEDULES[name].takes_costs:
        return choice.resolve()
    if given := choice.given():
        takers = ", ".join(family.name for family in SCHEDULES.values() if family.takes_costs)
        raise UsageError(
            f"{given[0]} changes nothing here: {name} is not made for given costs; leave it out, or take one that is: "
            f"{takers}"
        )
    return None


def with_reductions(schedule: Schedule, costs: Costs | StageCosts, reduce: ReductionMode | None) -> Schedule:
    """Lower a schedule whose gradient reductions take time or were asked for; leave any other as it is.

    Without a reduction in the program its time would be dropped in silence.

    Raises:
        UsageError: a place for reductions was given, but the schedule has its own.
    """
    refuse_second_reductions(schedule, reduce)
    takes_time = bool(costs.resolve(schedule).duration[Kind.REDUCE_GRAD].any())
    if places_reductions(schedule) or not (takes_time or reduce):
        return schedule
    return lower(schedule, reduce=reduce or "end")


def refuse_second_reductions(schedule: Schedule, reduce: ReductionMode | None) -> None:
    """Refuse ``--reduce`` for a schedule that says itself where reductions start.

    Raises:
        UsageError: it does, and ``reduce`` was given.
    """
    if reduce is not None and places_reductions(schedule):
        raise UsageError(f"{schedule.name!r} places its reductions itself; leave out --reduce {reduce}")
