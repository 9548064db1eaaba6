"""Floor 6: starts the ranks of a job on this host, or joins those that another launcher started. Knows no training."""

from chimera.launch.environment import Place, connected, place_from_environment, use_cores
from chimera.launch.local import run_local, warm_up
from chimera.launch.processes import Tell

__all__ = ["Place", "Tell", "connected", "place_from_environment", "run_local", "use_cores", "warm_up"]
