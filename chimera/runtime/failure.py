"""The last words of a job: the program's grid with a marker where each rank is, printed by one rank."""

from chimera.errors import StalledError
from chimera.ir.grid import grid_text
from chimera.ir.schedule import Schedule
from chimera.runtime.groups import Groups
from chimera.runtime.watch import Watch

__all__ = ["stalled"]


def stalled(cause: str, groups: Groups, watch: Watch, schedule: Schedule) -> StalledError:
    """Return the error of a rank whose peer died or stalled; on the first to notice, with what every rank was doing."""
    summary = f"rank {groups.rank} gave up: {cause}"
    try:
        if not watch.claim_report():
            return StalledError(summary)
        positions = watch.positions()
    except RuntimeError:
        return StalledError(f"{summary}\nthe job's store is gone too, so what the other ranks were doing is unknown")
    marks: set[tuple[int, int]] = set()
    lines = []
    for rank, found in enumerate(positions):
        pipeline_rank = groups.grid.place(rank).pipeline
        text = "never said anything" if found is None else found.activity
        if found is not None and found.position is not None:
            text += f", at action {found.position}: {found.action}"
            if found.awaited is not None and found.waited_s is not None:
                text += f", waiting for rank {found.awaited} for {found.waited_s:.1f} s"
            # A rank may still be in, or already be in, another program than this one.
            program = schedule.actions[pipeline_rank]
            if found.position < len(program) and str(program[found.position]) == found.action:
                marks.add((pipeline_rank, found.position))
        lines.append(f"  rank {rank}: {text}")
    return StalledError("\n".join([summary, grid_text(schedule, marks), "what every rank was doing:", *lines]))
