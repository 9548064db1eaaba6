"""Floor 3: what a layout costs before it runs, and the best of all layouts. Imports no torch."""

from chimera.plan.hardware import Cluster, Device
from chimera.plan.hardware_file import known_devices, read_device
from chimera.plan.planning import plan
from chimera.plan.plans import Plan, Plans
from chimera.plan.search.space import SearchSpace
from chimera.plan.shape import ModelShape

__all__ = ["Cluster", "Device", "ModelShape", "Plan", "Plans", "SearchSpace", "known_devices", "plan", "read_device"]
