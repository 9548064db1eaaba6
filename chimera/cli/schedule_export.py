"""``chimera schedule export``: builds or reads, lowers if asked, and writes. The forms are ``ir.schedule_file``'s."""

import sys
from typing import Annotated

from tyro.conf import arg

from chimera.cli.options import (
    CostOptions,
    FileOption,
    Flag,
    ReduceOption,
    ScheduleName,
    SizeOptions,
    costs_to_build,
    load_schedule,
    refuse_second_reductions,
)
from chimera.errors import UsageError
from chimera.ir.action import COMMUNICATIONS, Kind
from chimera.ir.rows import code_mask
from chimera.ir.schedule import Schedule
from chimera.ir.schedule_file import FileFormat, format_schedule, write_schedule
from chimera.passes.derived import compute_only
from chimera.passes.lower import lower
from chimera.passes.reductions import ReductionMode

__all__ = ["schedule_export"]

_FormatOption = Annotated[
    FileFormat | None, arg(constructor=FileFormat, metavar="{json,csv,text}", help_behavior_hint="")
]


def schedule_export(
    name: ScheduleName,
    sizes: SizeOptions,
    costs: CostOptions,
    *,
    format: _FormatOption = None,  # noqa: A002 - the option's name
    lowered: Flag = False,
    reduce: ReduceOption = None,
    out: FileOption = None,
) -> None:
    """Write a schedule as JSON, as torch's CSV or as text: computations only, unless --lowered.

    Example:
        chimera schedule export chimera --ranks 4 --microbatches 4 --lowered --out chimera.json

    Args:
        name: a schedule's name, or a file
        sizes: of a schedule given by NAME; a FILE has its own
        costs: of a schedule that is made for costs (zb-1p, zb-2p)
        format: form of the output (default: that of the suffix of --out, else json)
        lowered: with sends, receives and gradient reductions, as it is run
        reduce: where gradient reductions start in the lowered program (default: end)
        out: write into FILE instead of printing
    """
    schedule = _program(load_schedule(name, sizes, costs_to_build(name, costs)), lowered=lowered, reduce=reduce)
    if out is None:
        sys.stdout.write(format_schedule(schedule, format or "json"))
        return
    write_schedule(schedule, out, format=format)
    print(f"wrote {out}", file=sys.stderr)


def _program(schedule: Schedule, *, lowered: bool, reduce: ReductionMode | None) -> Schedule:
    """Return the program to write, proved."""
    if not lowered:
        if reduce is not None:
            raise UsageError(f"--reduce {reduce} places reductions in the lowered program; add --lowered")
        if code_mask(schedule.table, *COMMUNICATIONS, Kind.REDUCE_GRAD).any():
            print("sends, receives and reductions are left out; --lowered keeps them", file=sys.stderr)
        return compute_only(schedule)
    refuse_second_reductions(schedule, reduce)
    return lower(schedule, reduce=reduce or "end")
