"""What a profile found, as a page, a JSON document, and the files of its folder.

Everything said here is worked out elsewhere (``simulate.utilisation``, ``timeline.kinds``); this module only shows it.
"""

import io
import json
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

from rich.console import Console

from chimera.cli.facts import counted
from chimera.cli.terminal import print_table, print_wrapped
from chimera.errors import ConfigError
from chimera.ir.costs_file import write_costs
from chimera.ir.files import replacing
from chimera.ir.schedule_file import write_schedule
from chimera.ir.timeline import Timeline
from chimera.plot import plot_timeline
from chimera.simulate import Cause, RankUse, rank_use, slowest_rank
from chimera.timeline import KindTimes, times_of_kinds, write_timeline, write_trace
from chimera.train.profile_result import ProfileResult

__all__ = ["check_profile_folder", "print_kinds", "print_profile", "print_ranks", "profile_as_dict", "write_profile"]

_FILES: Final = (
    "timeline",
    "trace",
    "predicted.json",
    "schedule.json",
    "costs.json",
    "profile.",
    "torch_profiler_rank",
    "memory_rank",
)
"""What the names of a profile's files begin with."""
_MIB: Final = 2**20
_HEADINGS: Final = {
    Cause.WARM_UP: "warm-up",
    Cause.WAITING: "waiting",
    Cause.COMMUNICATION: "message",
    Cause.REDUCTION: "reduction",
    Cause.DRAIN: "drain",
    Cause.OVERHEAD: "overhead",
}
_NOT_TRAINING: Final = (
    "These steps were no training: a profile keeps no weights and saves no checkpoint, and steps with volume left out "
    "compute on zeros."
)


def check_profile_folder(folder: Path) -> None:
    """See that a profile may be written to ``folder``: it is free, or holds an earlier profile, which is replaced.

    Raises:
        ConfigError: it holds something else.
    """
    own = (*_FILES, f"{folder.name}_node")
    foreign = [path.name for path in folder.iterdir() if not path.name.startswith(own)] if folder.is_dir() else []
    if foreign or (folder.exists() and not folder.is_dir()):
        raise ConfigError(
            f"{folder} holds something other than a profile{f' ({foreign[0]})' if foreign else ''}; set profile.out to "
            "another folder"
        )


# Files


def write_profile(found: ProfileResult) -> None:
    """Write everything into the profile's folder, each file whole or not at all."""
    out = found.out
    for pipeline, timeline in enumerate(found.median):
        suffix = f"_pipeline{pipeline}" if len(found.median) > 1 else ""
        plot_timeline(
            [
                (f"measured, step {found.median_step + 1} of {len(found.step_s)}{_of(pipeline, found)}", timeline),
                (f"predicted{_from(found)}", found.predicted),
            ],
            [out / f"timeline{suffix}.pdf", out / f"timeline{suffix}.png"],
            memory=not found.virtual,
            messages=True,
        )
        write_trace(timeline, out / f"trace{suffix}.json")
        write_timeline(timeline, out / f"timeline{suffix}.json")
    write_timeline(found.predicted, out / "predicted.json")
    write_schedule(found.schedule, out / "schedule.json")
    write_costs(found.costs, out / "costs.json")
    with replacing(out / "profile.txt") as temporary:
        temporary.write_text(_text(found), encoding="utf-8")
    with replacing(out / "profile.json") as temporary:
        temporary.write_text(json.dumps(profile_as_dict(found), indent=1) + "\n", encoding="utf-8")


def _text(found: ProfileResult) -> str:
    buffer = io.StringIO()
    print_profile(Console(file=buffer, highlight=False, markup=False, emoji=False, soft_wrap=True, width=100), found)
    return buffer.getvalue()


# The page


def print_profile(out: Console, found: ProfileResult) -> None:
    """Print what was found."""
    out.print(found.name, style="bold")
    print_wrapped(out, " ".join(_in_words(found)))
    for pipeline, timeline in enumerate(found.median):
        out.print()
        if len(found.median) > 1:
            out.print(f"Pipeline {pipeline}", style="bold")
        print_ranks(out, rank_use(found.schedule, timeline))
    out.print()
    print_kinds(out, _kinds(found), "Predicted against measured, over all steps:")
    if found.channels:
        out.print()
        _print_channels(out, found)
    if found.ablated:
        out.print()
        _print_ablation(out, found)
    out.print()
    print_wrapped(
        out,
        f"Recording {counted(found.recording.events, 'event')} of a step at {found.recording.event_s * 1e6:.2f} µs "
        f"each takes {found.overhead:.3%} of it. {_NOT_TRAINING}",
    )
    print_wrapped(out, f"Files in {found.out}.")


def _in_words(found: ProfileResult) -> Iterator[str]:
    makespans = [step[0].makespan for step in found.timelines]
    timeline = found.median[0]
    yield (
        f"{counted(len(makespans), 'step')} on {found.device}: through the pipeline {_ms(timeline.makespan)} ms in the "
        f"median ({_ms(min(makespans))} to {_ms(max(makespans))}, standard deviation "
        f"{_ms(statistics.pstdev(makespans))}), idle {timeline.bubble_fraction:.1%}."
    )
    whole = statistics.median(found.step_s)
    runs = f" of {found.runs} runs, of which timelines show the last" if found.runs > 1 else ""
    yield f"A whole step{runs}, with data, loss and update: {_ms(whole)} ms."
    yield f"Predicted{_from(found)}: {_ms(found.predicted.makespan)} ms, {found.error:+.1%}."


def _from(found: ProfileResult) -> str:
    return " from the measured costs" if found.predicted_from is None else f" from {Path(found.predicted_from).name}"


def _of(pipeline: int, found: ProfileResult) -> str:
    return f", pipeline {pipeline}" if len(found.median) > 1 else ""


def print_ranks(out: Console, uses: Sequence[RankUse]) -> None:
    """Print where each rank's time goes, in ms, and which rank is slowest."""
    causes = [cause for cause in Cause if any(use.idle[cause] for use in uses)]
    columns: dict[str, list[str]] = {
        "rank": [str(use.rank) for use in uses],
        "busy\nms": [_ms(use.busy) for use in uses],
        "utili-\nsation": [f"{use.utilisation:.1%}" for use in uses],
        "idle\nms": [_ms(use.makespan - use.busy) for use in uses],
        **{_HEADINGS[cause]: [_ms(use.idle[cause]) for use in uses] for cause in causes},
        "comm.\nexposed": [_ms(use.exposed) for use in uses],
        "comm.\nhidden": [_ms(use.hidden) for use in uses],
    }
    if all(use.peak_bytes is not None for use in uses):
        columns["peak\nMiB"] = [f"{(use.peak_bytes or 0.0) / _MIB:,.1f}" for use in uses]
    print_table(out, list(columns), [list(row) for row in zip(*columns.values(), strict=True)])
    slowest = slowest_rank(uses)
    mean = statistics.fmean(use.busy for use in uses)
    print_wrapped(
        out,
        f"Rank {slowest.rank} computes longest, {slowest.busy / mean - 1:.1%} longer than the mean."
        if mean
        else "No rank computes anything.",
    )


def print_kinds(out: Console, kinds: Sequence[KindTimes], title: str) -> None:
    """Print predicted and measured times of each kind."""
    out.print(title, style="bold")
    rows = [
        [
            each.kind.name,
            str(each.number),
            f"{each.predicted * 1e3:.3f}",
            f"{each.measured * 1e3:.3f}",
            f"{each.spread * 1e3:.3f}",
            "–" if each.error is None else f"{each.error:+.1%}",
        ]
        for each in kinds
    ]
    print_table(out, ("action", "number", "predicted\nms", "measured\nmean ms", "standard\ndeviation", "error"), rows)


def _kinds(found: ProfileResult) -> tuple[KindTimes, ...]:
    return times_of_kinds(found.predicted, [timeline for step in found.timelines for timeline in step])


def _print_channels(out: Console, found: ProfileResult) -> None:
    rows = [
        [
            f"{each.ranks[0]} and {each.ranks[1]}",
            str(each.route),
            f"{each.num_bytes:,}",
            f"{each.message_s * 1e3:.3f}",
            f"{each.latency_s * 1e3:.3f}",
            f"{each.bytes_per_s / 1e9:,.3f}",
        ]
        for each in found.channels
    ]
    print_table(out, ("ranks", "route", "bytes", "message\nms", "latency\nms", "GB/s"), rows)


_WITHOUT: Final = {
    "p2p": "messages between stages",
    "allreduce": "gradients between replicas",
    "all": "both",
}


def _print_ablation(out: Console, found: ProfileResult) -> None:
    whole = statistics.median(found.step_s)
    out.print("A single byte in place of:", style="bold")
    rows = [["nothing", _ms(whole), "", ""]]
    for ablate, step_s in found.ablated.items():
        without = statistics.median(step_s)
        rows.append([_WITHOUT[ablate], _ms(without), _ms(whole - without), f"{1 - without / whole:.1%}"])
    print_table(out, ("", "step\nms", "its cost\nms", "share of\nthe step"), rows)


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.2f}" if abs(seconds) < 1 else f"{seconds * 1e3:.0f}"


# JSON


def profile_as_dict(found: ProfileResult) -> dict[str, Any]:
    """Return the figures as a JSON document; times in seconds, sizes in bytes."""
    whole = statistics.median(found.step_s)
    return {
        "format": "chimera-profile",
        "version": 1,
        "name": found.name,
        "training": False,
        "device": found.device,
        "steps": len(found.step_s),
        "runs_per_step": found.runs,
        "median_step": found.median_step,
        "step_s": list(found.step_s),
        "makespan_s": [[timeline.makespan for timeline in step] for step in found.timelines],
        "predicted": {
            "from": found.predicted_from or "measured costs",
            "makespan_s": found.predicted.makespan,
            "error": found.error,
            "bubble_fraction": found.predicted.bubble_fraction,
        },
        "pipelines": [_pipeline_as_dict(found, timeline) for timeline in found.median],
        "kinds": [each._asdict() | {"kind": each.kind.name, "error": each.error} for each in _kinds(found)],
        "channels": [asdict(each) | {"bytes_per_s": each.bytes_per_s} for each in found.channels],
        "ablated": {
            ablate: {
                "training": False,
                "step_s": list(step_s),
                "cost_s": whole - statistics.median(step_s),
                "share": 1.0 - statistics.median(step_s) / whole,
            }
            for ablate, step_s in found.ablated.items()
        },
        "recording": asdict(found.recording) | {"share": found.overhead},
    }


def _pipeline_as_dict(found: ProfileResult, timeline: Timeline) -> dict[str, Any]:
    uses = rank_use(found.schedule, timeline)
    return {
        "bubble_fraction": timeline.bubble_fraction,
        "slowest_rank": slowest_rank(uses).rank,
        "ranks": [
            {
                "rank": use.rank,
                "busy_s": use.busy,
                "utilisation": use.utilisation,
                "idle_s": {cause.value: seconds for cause, seconds in use.idle.items()},
                "communication_exposed_s": use.exposed,
                "communication_hidden_s": use.hidden,
                "peak_bytes": use.peak_bytes,
            }
            for use in uses
        ],
    }
