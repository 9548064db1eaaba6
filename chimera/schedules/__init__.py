"""Floor 2: one pure function per published schedule, and the registry that finds them by name."""

from chimera.schedules.chimera import chimera
from chimera.schedules.gpipe import gpipe
from chimera.schedules.interleaved import interleaved
from chimera.schedules.one_f_one_b import one_f_one_b
from chimera.schedules.registry import SCHEDULES, ScheduleFamily, build_schedule

__all__ = [
    "SCHEDULES",
    "ScheduleFamily",
    "build_schedule",
    "chimera",
    "gpipe",
    "interleaved",
    "one_f_one_b",
]
