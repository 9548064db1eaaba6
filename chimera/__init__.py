"""Chimera: one schedule object to plan, prove, run and see.

The names below are the public API; each is loaded when it is first used, so that planning and simulating import no
torch.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from chimera.ir.costs import Costs, StageCosts
    from chimera.ir.schedule import Placement, Schedule
    from chimera.ir.timeline import Timeline
    from chimera.runtime.pipeline import Pipeline
    from chimera.schedules import build_schedule
    from chimera.simulate import simulate

__version__ = "0.1.0"

__all__ = ["Costs", "Pipeline", "Placement", "Schedule", "StageCosts", "Timeline", "build_schedule", "simulate"]

_HOMES = {
    "Costs": "chimera.ir.costs",
    "Pipeline": "chimera.runtime.pipeline",
    "Placement": "chimera.ir.schedule",
    "Schedule": "chimera.ir.schedule",
    "StageCosts": "chimera.ir.costs",
    "Timeline": "chimera.ir.timeline",
    "build_schedule": "chimera.schedules",
    "simulate": "chimera.simulate",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'chimera' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOMES])
