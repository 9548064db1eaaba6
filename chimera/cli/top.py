"""``chimera top``: what every rank of a run is at, again and again, from the files in the run's folder.

It needs nothing of the job but that folder, so it works from any host that sees it, over any terminal, and on a job
that is gone. What the files mean is judged in ``chimera.train.job``; here they become lines.
"""

import json as json_form
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any, Final

from rich.console import Console
from tyro.conf import Positional, arg

from chimera.cli.account import account, duration, tracker_lines
from chimera.cli.options import Flag
from chimera.cli.terminal import console, print_wrapped, table_lines
from chimera.errors import FormatError, UsageError
from chimera.train.job import JobView, RankView, look_at
from chimera.train.tracking.record import RECORD, read_record

__all__ = ["top"]

_LINES_EVERY_S: Final = 10.0
_LEAST_WAIT_S: Final = 0.05
"""Shorter waits are not shown: every rank has them all the time."""
_LONGEST: Final = 60
_TROUBLE: Final = frozenset({"stalled", "silent", "dead", "failed", "unreadable"})
_STYLES: Final = {"running": "green", "finished": "green", "starting": "yellow", "stalled": "bold yellow"}


def top(
    run: Annotated[Path | None, Positional, arg(constructor=Path, metavar="RUN", help_behavior_hint="")] = None,
    *,
    once: Flag = False,
    json: Flag = False,
    interval: float = 1.0,
) -> None:
    """Show what every rank of a run is at: its action, step, times, idle share, whom it waits for, memory.

    It reads the files that the ranks keep in the run's folder, so it may run on any host that sees the folder. On a
    terminal the table is renewed until the job ends or Control-C; elsewhere a line is printed every ten seconds.

    Example:
        chimera top runs/bert-tiny --once

    Args:
        run: the run's folder, train.out of its configuration
        once: print one table and end
        json: print what is known as one JSON document and end
        interval: seconds between looks
    """
    if run is None or not run.is_dir():
        raise UsageError(_which_run(run))
    if not 0.1 <= interval <= 3600:
        raise UsageError(f"--interval {interval:g}: needed: 0.1 to 3600 seconds")
    view = _look(run)
    if json:
        print(json_form.dumps(_as_dict(run, view), indent=1))
        return
    out = console()
    if once or not view.goes_on:
        _print(out, run, view)
        return
    try:
        (_follow_live if out.is_terminal else _follow_in_lines)(out, run, interval)
    except KeyboardInterrupt:
        return  # how one leaves


def _look(run: Path) -> JobView:
    record = read_record(run)
    if record is None:
        raise UsageError(
            f"{run} has no {RECORD}, which a run writes when all of its ranks are ready, so none has begun there; "
            f"{_which_run(None)}"
        )
    return look_at(run, record, now_s=time.time())


def _which_run(given: Path | None) -> str:
    """Say what to type, with the runs that are near."""
    near = Path("runs")
    folders = sorted(near.iterdir()) if near.is_dir() else []
    known = [str(folder) for folder in folders if (folder / RECORD).is_file()]
    wrong = "" if given is None else f"{given} is no folder; "
    if not known:
        return f"{wrong}give the folder of a run, which its configuration calls train.out, as in: chimera top runs/NAME"
    return f"{wrong}give the folder of a run, as in: chimera top {known[0]}; runs here: {', '.join(known[:20])}"


# Following


def _follow_live(out: Console, run: Path, interval_s: float) -> None:
    from rich.live import Live
    from rich.text import Text

    view = _look(run)
    with Live(console=out, auto_refresh=False, transient=True) as live:
        while view.goes_on:
            lines = _lines(run, view, most=max(1, out.height - 6))
            live.update(Text("\n".join(line[: out.width] for line in lines)), refresh=True)
            time.sleep(interval_s)
            view = _look_again(run, view)
    _print(out, run, view)


def _follow_in_lines(out: Console, run: Path, interval_s: float) -> None:
    view = _look(run)
    said, due = "", 0.0
    while view.goes_on:
        line = _headline(run, view)
        # A change for the worse is not kept until the next line is due.
        key = f"{view.state}{view.reason and view.reason.rsplit(' for ', 1)[0]}"
        if time.monotonic() >= due or key != said:
            out.print(f"{time.strftime('%H:%M:%S')}  {line}")
            said, due = key, time.monotonic() + _LINES_EVERY_S
        time.sleep(interval_s)
        view = _look_again(run, view)
    _print(out, run, view)


def _look_again(run: Path, before: JobView) -> JobView:
    """Look once more; a file that cannot be read this time is no reason to stop looking."""
    try:
        return _look(run)
    except (FormatError, UsageError, OSError):
        return before


# Words


def _print(out: Console, run: Path, view: JobView) -> None:
    headline, *rest = _lines(run, view)
    out.print(headline, style=_STYLES.get(view.state, "bold red"))
    for line in rest:
        out.print(line)
    for line in tracker_lines(view.record):
        print_wrapped(out, line)
    if view.state in {"dead", "failed", "interrupted"}:
        # Brings in torch, which the rest does without.
        from chimera.train.folder import newest_checkpoint

        if newest_checkpoint(run) is not None:
            out.print(f"to go on from its newest checkpoint: chimera train {run / 'config.toml'} --resume")


def _lines(run: Path, view: JobView, *, most: int | None = None) -> list[str]:
    """Return the view as lines; of many ranks the ``most`` that need a look come first."""
    ranks: Sequence[RankView] = view.ranks
    if most is not None and len(ranks) > most:
        ranks = sorted(ranks, key=lambda each: (each.state not in _TROUBLE, each.rank))[: most - 1]
    headings, rows = _HEADINGS, [_row(each) for each in ranks]
    if not any(row[-1] for row in rows):
        headings, rows = headings[:-1], [row[:-1] for row in rows]
    head, body = table_lines(headings, rows, left=4)
    left_out = len(view.ranks) - len(ranks)
    more = [f"and {left_out} more; --once shows all"] if left_out else []
    return [_headline(run, view), account(view.record), "", *head, *body, *more]


def _headline(run: Path, view: JobView) -> str:
    rates = [each.status for each in view.ranks if each.status is not None and each.status.step_s is not None]
    text = f"{run}  {view.state}, step {view.step:,} of {view.record.steps:,}"
    if rates and view.goes_on:
        first = rates[0]
        text += f", {first.tokens_per_s or 0.0:,.0f} tokens/s"
        step_s = view.record.mean_step_s or first.step_s
        if view.state == "running" and step_s is not None:
            text += f", about {duration((view.record.steps - view.step) * step_s)} left"
    return text if view.reason is None else f"{text}: {_plain(view.reason, 200)}"


_HEADINGS: Final[tuple[str, ...]] = (
    *("rank", "host", "state", "at", "for", "waits for"),
    *("step", "step s", "tokens/s", "idle", "memory\nGiB", "GPU\nGiB"),
)


def _row(view: RankView) -> tuple[str, ...]:
    status = view.status
    if status is None:
        return (str(view.rank), "", view.state, _plain(view.note or "", _LONGEST), *[""] * 8)
    at = status.activity if status.action is None else f"{status.activity}: {status.action}"
    waits = ""
    if view.waits_for and view.waits_s is not None and view.waits_s >= _LEAST_WAIT_S:
        waits = f"{', '.join(map(str, view.waits_for[:4]))}{'…' * (len(view.waits_for) > 4)}, {view.waits_s:.1f} s"
    return (
        str(view.rank),
        _plain(status.host, 24),
        view.state,
        _plain(at, _LONGEST),
        f"{status.unchanged_s + view.silent_s:.1f} s",
        waits,
        f"{status.step:,}",
        "" if status.step_s is None else f"{status.step_s:.3f}",
        "" if status.tokens_per_s is None else f"{status.tokens_per_s:,.0f}",
        "" if status.idle_share is None else f"{status.idle_share:.1%}",
        f"{status.memory_bytes / 2**30:.2f}",
        "" if status.device_bytes is None else f"{status.device_bytes / 2**30:.2f}",
    )


def _plain(text: str, most: int) -> str:
    """Return a text from a file as one short line that commands no terminal."""
    line = "".join(character if character.isprintable() else "?" for character in text)
    return line if len(line) <= most else line[: most - 1] + "…"


def _as_dict(run: Path, view: JobView) -> dict[str, Any]:
    return {
        "run": str(run),
        "state": view.state,
        "reason": view.reason,
        "step": view.step,
        "steps": view.record.steps,
        "summary": view.record.summary(),
        "trackers": {name: asdict(each) for name, each in view.record.trackers.items()},
        "ranks": [asdict(each) for each in view.ranks],
    }
