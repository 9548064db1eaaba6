"""Schedule and costs to timeline: durations, messages, reductions, the cause of each idle gap, the critical path."""

from chimera.simulate.explain import Cause, Gap, critical_path, gaps, idle_by_cause
from chimera.simulate.simulator import simulate

__all__ = ["Cause", "Gap", "critical_path", "gaps", "idle_by_cause", "simulate"]
