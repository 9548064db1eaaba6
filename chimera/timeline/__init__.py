"""What is done with a timeline besides plotting: trace and JSON files, the diff of two, the text grid, its colours."""

from chimera.timeline.diff import TimelineDiff, diff
from chimera.timeline.file import read_timeline, write_timeline
from chimera.timeline.grid import Grid, draw_grid
from chimera.timeline.kinds import KindTimes, times_of_kinds
from chimera.timeline.trace import write_trace

__all__ = [
    "Grid",
    "KindTimes",
    "TimelineDiff",
    "diff",
    "draw_grid",
    "read_timeline",
    "times_of_kinds",
    "write_timeline",
    "write_trace",
]
