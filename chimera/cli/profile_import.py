"""``chimera profile import``: exports of NVIDIA's nsys as the same timeline, tables and figures that a profile has."""

import re
import statistics
import sys
from pathlib import Path
from typing import Annotated, Final

from tyro.conf import Positional, arg

from chimera.cli.facts import counted
from chimera.cli.options import Flag
from chimera.cli.profile_report import print_ranks
from chimera.cli.terminal import console, print_table, print_wrapped
from chimera.errors import UsageError
from chimera.ir.action import Kind
from chimera.ir.costs_file import write_costs
from chimera.plot import plot_timeline
from chimera.simulate import rank_use
from chimera.timeline import write_timeline, write_trace
from chimera.timeline.costs import stage_costs
from chimera.timeline.kinds import times_of_kinds
from chimera.timeline.nsys import NsysExport, read_nsys
from chimera.timeline.nsys_steps import NsysSteps, steps_of

__all__ = ["profile_import"]

_NODE: Final = re.compile(r"_node\d+.*")
_Files = Annotated[tuple[Path, ...], Positional, arg(metavar="FILE.sqlite...", help_behavior_hint="")]
_Out = Annotated[Path | None, arg(constructor=Path, metavar="FOLDER", help_behavior_hint="")]


def profile_import(
    files: _Files,
    *,
    out: _Out = None,
    any_thread: Flag = False,
    pipeline: int = 0,
) -> None:
    """Read what NVIDIA's nsys recorded of a run, one SQLite export per node, as timeline, trace and tables.

    Reads runs that 'chimera profile CONFIG --nsys' made, and those of Chimera's published code. An action lasts from
    the start of its first kernel to the end of its last.

    Example:
        chimera profile import profiles/bert-tiny_node0.sqlite profiles/bert-tiny_node1.sqlite

    Args:
        files: exports (nsys export --type sqlite), one per node
        out: folder for the results (default: the files' common name, beside them)
        any_thread: count kernels that other threads of an action's process launch meanwhile, as torch's own thread for
            backwards does in code that leaves it on
        pipeline: which replica of the pipeline, where there are several
    """
    if not files:
        raise UsageError("profile import needs a file, as in: chimera profile import profiles/bert-tiny_node0.sqlite")
    names = sorted({_NODE.sub("", path.stem) for path in files})
    if len(names) > 1:
        raise UsageError(f"the files are of different runs: {', '.join(names)}; give those of one")
    exports = [read_nsys(path, any_thread=any_thread) for path in files]
    found = steps_of(exports, name=names[0], pipeline=pipeline)
    folder = out or files[0].parent / names[0]
    _write(found, folder)
    _print(found, exports, folder)


def _write(found: NsysSteps, folder: Path) -> None:
    timeline = found.timelines[_median(found)]
    title = f"{timeline.name}, by nsys, step {_median(found) + 1} of {len(found.timelines)}"
    plot_timeline([(title, timeline)], [folder / "timeline.pdf", folder / "timeline.png"], messages=True)
    write_trace(timeline, folder / "trace.json", memory=False)
    write_timeline(timeline, folder / "timeline.json")
    if found.schedule is not None:
        try:
            costs = stage_costs(found.timelines, num_stages=found.schedule.num_stages)
        except UsageError as error:
            print(f"no costs file: {error}", file=sys.stderr)
        else:
            write_costs(costs, folder / "costs.json")


def _print(found: NsysSteps, exports: list[NsysExport], folder: Path) -> None:
    out = console()
    timeline = found.timelines[_median(found)]
    makespans = [each.makespan for each in found.timelines]
    out.print(timeline.name, style="bold")
    print_wrapped(
        out,
        f"{counted(len(makespans), 'step')} of {counted(timeline.num_ranks, 'rank')}: {timeline.makespan * 1e3:.2f} ms "
        f"in the median ({min(makespans) * 1e3:.2f} to {max(makespans) * 1e3:.2f}), idle "
        f"{timeline.bubble_fraction:.1%}."
        + (f" The files hold {found.pipelines} pipelines; --pipeline shows another." if found.pipelines > 1 else ""),
    )
    out.print()
    if found.schedule is not None:
        print_ranks(out, rank_use(found.schedule, timeline))
    else:
        print_wrapped(
            out, "Some rank's actions are missing, so why ranks are idle cannot be told; give every node's file."
        )
    out.print()
    rows = [
        [each.kind.name, str(each.number), f"{each.measured * 1e3:.3f}", f"{each.spread * 1e3:.3f}"]
        for each in times_of_kinds(timeline, found.timelines)
        if each.kind in Kind
    ]
    print_table(out, ("action", "number", "mean\nms", "standard\ndeviation"), rows)
    out.print()
    kinds = sorted({kind for export in exports for kind in export.device_s})
    totals = (f"{kind} {sum(e.device_s.get(kind, 0.0) for e in exports) * 1e3:,.1f} ms" for kind in kinds)
    print_wrapped(out, f"Activity of all devices over the whole recording: {', '.join(totals)}.")
    if found.idle_ranges:
        print_wrapped(
            out,
            f"{counted(found.idle_ranges, 'action')} launched nothing and has no span"
            if found.idle_ranges == 1
            else f"{found.idle_ranges} actions launched nothing and have no span",
        )
    print_wrapped(out, f"Files in {folder}.")


def _median(found: NsysSteps) -> int:
    """Return the number of the step whose makespan is the median."""
    makespans = [timeline.makespan for timeline in found.timelines]
    return makespans.index(statistics.median_low(makespans))
