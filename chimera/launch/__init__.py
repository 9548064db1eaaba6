"""Floor 6: starts the ranks of a job on this host, or joins those that another launcher started. Knows no training."""

from chimera.launch.connect import Job, connected, joined
from chimera.launch.environment import place_from_environment
from chimera.launch.interfaces import find_interface, interface_towards, loopback
from chimera.launch.local import run_local, warm_up
from chimera.launch.parent import end_with_parent
from chimera.launch.place import Place, use_cores
from chimera.launch.processes import Tell
from chimera.launch.slurm_step import allocated_nodes
from chimera.launch.store import Endpoint, StoreFile, hold_store

__all__ = [
    "Endpoint",
    "Job",
    "Place",
    "StoreFile",
    "Tell",
    "allocated_nodes",
    "connected",
    "end_with_parent",
    "find_interface",
    "hold_store",
    "interface_towards",
    "joined",
    "loopback",
    "place_from_environment",
    "run_local",
    "use_cores",
    "warm_up",
]
