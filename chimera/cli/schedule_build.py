"""``chimera schedule build auto``: asks ``schedules.search`` for an order, proves it, and says how good it is.

It searches nothing itself: it reads placement, costs and memory limit into a problem, and prints what was found beside
what no order can beat.
"""

import json as json_form
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from tyro.conf import OmitArgPrefixes, Positional, arg

from chimera.cli.facts import counted, number, sizes_text, step_facts, units_text
from chimera.cli.options import CostOptions, FileOption, Flag
from chimera.cli.terminal import console, print_wrapped
from chimera.errors import UsageError, nearest_names
from chimera.ir.action import Kind
from chimera.ir.checks import check, violations
from chimera.ir.costs import Costs, StageCosts
from chimera.ir.schedule import Schedule
from chimera.ir.schedule_file import read_schedule, write_schedule
from chimera.passes.derived import compute_only
from chimera.schedules.search.bounds import Objective
from chimera.schedules.search.exact import closed
from chimera.schedules.search.placements import PLACEMENTS, dealt, place
from chimera.schedules.search.problem import Problem
from chimera.schedules.search.published import published
from chimera.schedules.search.searching import DEFAULT_EFFORT, Found, search

__all__ = ["PlacementSizes", "bytes_or_units", "schedule_build"]

_Count = Annotated[int | None, arg(constructor=int, metavar="N", help_behavior_hint="")]
_Number = Annotated[int, arg(metavar="N")]
_PlacementOption = Annotated[
    str | None, arg(constructor=str, metavar=f"{{{','.join(PLACEMENTS)}}}|FILE", help_behavior_hint="")
]
_LimitOption = Annotated[str | None, arg(constructor=str, metavar="X", help_behavior_hint="")]
_What = Annotated[str, Positional, arg(metavar="auto", help_behavior_hint="")]

_BYTES = {"B": 1, "kB": 10**3, "MB": 10**6, "GB": 10**9, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}


@dataclass(frozen=True, slots=True)
class PlacementSizes:
    """Where stages live, and how many micro-batches there are."""

    placement: _PlacementOption = None
    """where each stage lives; a schedule FILE gives its own routes"""
    ranks: _Count = None
    """pipeline ranks p"""
    microbatches: _Count = None
    """micro-batches m of one step"""
    chunks: _Count = None
    """model chunks v per rank (looped, vee; default: 2)"""
    pairs: _Count = None
    """pairs f of opposite pipelines (bidirectional; default: 1)"""


def schedule_build(
    name: _What,
    sizes: OmitArgPrefixes[PlacementSizes],
    costs: CostOptions,
    *,
    memory_limit: _LimitOption = None,
    objective: Objective = "makespan",
    seed: _Number = 0,
    effort: _Number = DEFAULT_EFFORT,
    exact: Flag = False,
    json: Flag = False,
    out: FileOption = None,
) -> None:
    """Search the order of a placement's computations that takes least, under a memory limit; whole or split backward.

    Prints what no order can beat beside it. The same question, seed and effort give the same schedule.

    Example:
        chimera schedule build auto --placement bidirectional --ranks 8 --microbatches 32 --memory-limit 8 --out a.json

    Args:
        name: auto
        sizes: of the pipeline; a FILE has its own
        costs: in units of 1/p of the model for one micro-batch, or a FILE in seconds and bytes
        memory_limit: most activations per rank, in units of 1/p of the model for one micro-batch; or most bytes, as \
in 40GiB, with a costs file that knows them
        objective: first start to last end over all ranks, or the longest over ranks of its own
        seed: of the rules that are tried once the fixed ones are through
        effort: computations to put in order, over all rules that are tried
        exact: small problems: let an exact solver close the gap, or state it (extra 'solve')
        json: print a JSON document instead
        out: write the schedule into FILE (.json, .csv or .txt)
    """
    if name != "auto":
        raise UsageError(
            f"'chimera schedule build' got {name!r}{nearest_names(name, ['auto'])}; needed: auto; a published schedule "
            f"is written by 'chimera schedule export {name}'"
        )
    if effort < 0 or seed < 0:
        raise UsageError(f"got --seed {seed} and --effort {effort}; needed: whole numbers of at least 0")
    problem, given = _question(sizes, _times(costs), memory_limit)
    found = search(problem, objective=objective, seed=seed, effort=effort, alternatives=_alternatives(problem, given))
    if exact and found.gap:
        found = closed(problem, found, seed=seed)
    check(found.schedule)
    assert problem.is_answered_by(found.schedule), "the schedule found is not of the problem, or over its limit"
    if out is not None:
        write_schedule(found.schedule, out)
        print(f"wrote {out}", file=sys.stderr)
    if json:
        print(json_form.dumps(_as_dict(problem, found), indent=1, ensure_ascii=False))
    else:
        _print(problem, found)


def bytes_or_units(text: str) -> tuple[float | None, float | None]:
    """Read a memory limit: (units, None), or (None, bytes) where a unit of bytes follows the number.

    >>> bytes_or_units("8"), bytes_or_units("1.5GiB")
    ((8.0, None), (None, 1610612736.0))

    Raises:
        UsageError: it is neither.
    """
    match = re.fullmatch(r"([0-9]+\.?[0-9]*(?:[eE][+-]?[0-9]+)?)\s*([A-Za-z]*)", text.strip(), re.ASCII)
    if match is None or (match[2] and match[2] not in _BYTES):
        raise UsageError(
            f"--memory-limit {text!r}: needed: a number of units of 1/p of the model for one micro-batch, as in 8, or "
            f"of bytes, as in 40GiB ({', '.join(_BYTES)})"
        )
    amount = float(match[1])
    return (None, amount * _BYTES[match[2]]) if match[2] else (amount, None)


def _times(costs: CostOptions) -> Costs | StageCosts:
    """Return the costs; a reduction, which the search does not place, is refused or said."""
    model = costs.resolve()
    if isinstance(model, Costs) and model.reduce:
        raise UsageError(
            f"--reduce-time {model.reduce:g}: the search orders computations, not reductions; leave it out, and time "
            "the result with 'chimera simulate FILE --reduce-time'"
        )
    if isinstance(model, StageCosts):
        parts = (("reduce_s", model.reduce_s is not None), ("overlap_s", bool(model.overlap_s)))
        for part in (name for name, present in parts if present):
            print(f"{costs.costs}: {part} plays no part: the search orders single computations", file=sys.stderr)
    return model


def _question(
    sizes: PlacementSizes, costs: Costs | StageCosts, memory_limit: str | None
) -> tuple[Problem, Schedule | None]:
    """Return the problem, and the schedule of the file that gave its placement."""
    units, limit_bytes = (None, None) if memory_limit is None else bytes_or_units(memory_limit)
    if sizes.placement is None:
        raise UsageError(f"--placement is missing; needed: {', '.join(PLACEMENTS)} or a schedule file")
    path = Path(sizes.placement)
    if sizes.placement in PLACEMENTS or not (path.is_file() or path.suffix or len(path.parts) > 1):
        placement = place(
            sizes.placement,
            _required(sizes.ranks, "ranks", sizes.placement),
            chunks=sizes.chunks,
            pairs=sizes.pairs,
        )
        routes = dealt(_required(sizes.microbatches, "microbatches", sizes.placement), len(placement.routes))
        return Problem(placement, routes, costs, units, limit_bytes), None
    given = _read(path, sizes)
    routes = given.microbatch_to_route
    if sizes.microbatches is not None and sizes.microbatches != given.num_microbatches:
        routes = dealt(sizes.microbatches, len(given.placement.routes))
    return Problem(given.placement, routes, costs, units, limit_bytes, given.microbatch_share), given


def _required(value: int | None, option: str, placement: str) -> int:
    if value is None:
        raise UsageError(f"--placement {placement} needs --{option}, as in: --ranks 8 --microbatches 32")
    return value


def _read(path: Path, sizes: PlacementSizes) -> Schedule:
    """Read the schedule whose placement is meant; sizes that it has itself are refused where they differ."""
    if not path.is_file():
        raise UsageError(f"--placement {path}: there is no such file; needed: {', '.join(PLACEMENTS)} or a file")
    schedule, notes = read_schedule(path)
    for note in notes:
        print(f"{path}: {note}", file=sys.stderr)
    for option in ("chunks", "pairs"):
        if getattr(sizes, option) is not None:
            raise UsageError(f"--placement {path} is a file, which has its own routes; leave out --{option}")
    if sizes.ranks is not None and sizes.ranks != schedule.num_ranks:
        raise UsageError(f"--placement {path} has {schedule.num_ranks} ranks, got --ranks {sizes.ranks}; leave it out")
    return schedule


def _alternatives(problem: Problem, given: Schedule | None) -> Iterator[Schedule]:
    """Yield the published schedules that answer the problem, and the file's own where it does and is right."""
    yield from published(problem)
    if given is not None:
        own = compute_only(given)
        if not violations(own) and problem.is_answered_by(own):
            yield own


def _as_dict(problem: Problem, found: Found) -> dict[str, Any]:
    return {
        "schedule": found.schedule.name,
        **step_facts(found.schedule, found.timeline),
        "objective": found.objective,
        "lower_bound": found.bound.value,
        "lower_bound_reason": found.bound.reason,
        "gap": found.gap,
        "memory_limit": problem.memory_limit,
        "memory_limit_bytes": problem.memory_limit_bytes,
        "peak_activations": list(found.timeline.peak_activations),
        "peak_bytes": None if found.timeline.peak_bytes is None else list(found.timeline.peak_bytes),
        "whole_backwards": int((found.schedule.table.kind == Kind.B).sum()),
        "split_backwards": int((found.schedule.table.kind == Kind.I).sum()),
        "found_by": found.origin,
        "rules_tried": found.num_rules,
        "searched": found.searched,
        "published": dict(found.alternatives),
    }


def _print(problem: Problem, found: Found) -> None:
    out = console()
    out.print(f"{found.schedule.name}, {sizes_text(found.schedule)}: proved", style="bold")
    for label, text in _lines(problem, found):
        print_wrapped(out, text, indent=" " * 15, first=f"  {label:12} ")
    out.print()
    print_wrapped(out, units_text(found.timeline.unit))


def _lines(problem: Problem, found: Found) -> Iterator[tuple[str, str]]:
    """Yield what is said of the result, line by line."""
    timeline = found.timeline
    yield "makespan", number(timeline.makespan)
    yield "span", number(timeline.span)
    total, ideal = timeline.bubble_fraction, timeline.bubble_over_ideal
    yield "bubble", f"{total:.2%} of total, {ideal:.2%} of ideal"
    yield "lower bound", f"{number(found.bound.value)} ({found.objective}): {found.bound.reason}"
    yield "gap", f"{found.gap:.2%} above the bound" if found.gap else f"none: no order has a shorter {found.objective}"
    peaks = timeline.peak_activations
    limit = "no limit" if problem.memory_limit is None else f"limit {number(problem.memory_limit)}"
    yield "activations", f"{number(min(peaks))} … {number(max(peaks))} at most per rank ({limit})"
    if timeline.peak_bytes is not None:
        limit = "no limit" if problem.memory_limit_bytes is None else f"limit {number(problem.memory_limit_bytes)}"
        yield "bytes", f"{number(min(timeline.peak_bytes))} … {number(max(timeline.peak_bytes))} per rank ({limit})"
    kinds = found.schedule.table.kind
    yield "backwards", f"{int((kinds == Kind.B).sum()):,} whole, {int((kinds == Kind.I).sum()):,} split"
    yield "found by", f"{found.origin}, after {counted(found.num_rules, 'rule')}"
    if found.alternatives:
        others = ", ".join(f"{name} {number(value)}" for name, value in found.alternatives)
        yield "others", f"list scheduling {number(found.searched)}, {others}"
