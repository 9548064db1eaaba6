"""Schedule and costs to timeline: durations, messages, reductions, the cause of each idle gap, the critical path."""

from chimera.simulate.explain import Cause, Gap, critical_path, gaps, idle_by_cause
from chimera.simulate.simulator import simulate
from chimera.simulate.utilisation import RankUse, rank_use, slowest_rank

__all__ = [
    "Cause",
    "Gap",
    "RankUse",
    "critical_path",
    "gaps",
    "idle_by_cause",
    "rank_use",
    "simulate",
    "slowest_rank",
]
