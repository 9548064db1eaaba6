"""Chimera: one schedule object to plan, prove, run and see.

The names below are the public API. What needs torch is loaded when it is first used, so that planning and simulating
do without.
"""

from typing import TYPE_CHECKING, Any

from chimera.ir.costs import Costs, StageCosts
from chimera.ir.schedule import Placement, Schedule
from chimera.ir.timeline import Timeline
from chimera.plan import plan
from chimera.schedules import build_schedule

# Not lazily: the packages of the same names would take the functions' places as soon as anything imports them.
from chimera.simulate import simulate

if TYPE_CHECKING:
    from chimera.runtime.pipeline import Pipeline

__version__ = "0.1.0"

__all__ = [
    "Costs",
    "Pipeline",
    "Placement",
    "Schedule",
    "StageCosts",
    "Timeline",
    "build_schedule",
    "plan",
    "simulate",
]


def __getattr__(name: str) -> Any:
    if name == "Pipeline":
        from chimera.runtime.pipeline import Pipeline

        return Pipeline
    raise AttributeError(f"module 'chimera' has no attribute {name!r}")
