"""Options of the ``[profile]`` section: whether a run is a profile, what is measured beside, where it is written."""

from dataclasses import dataclass
from typing import get_args

from chimera.errors import ConfigError
from chimera.runtime.ablation import Ablation

__all__ = ["ProfileOptions"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileOptions:
    """Options of the ``[profile]`` section.

    Attributes:
        steps: steps to record; any make the run a profile, which trains nothing and saves no checkpoint. 0 for none.
        warmup_steps: steps before them.
        out: folder in which the profile's own folder is made.
        ablate: whose volume is left out in further steps, to see what it costs: none, p2p (messages between stages),
            allreduce (gradients and weights between replicas), or all (each of them, and both).
        costs: path of a costs file that the step is predicted from; the measured costs without.
        virtual: whether computation is replaced by waits that take what costs say, while messages stay real.
        nvtx: whether ranges with each action's text are set for NVIDIA's tools; needs CUDA.
        torch_profiler: whether a further step is made under torch's profiler, whose trace is written for each rank.
        memory_snapshot: whether a further step is made with the allocator's history, written for each rank; needs CUDA.
    """

    steps: int = 0
    warmup_steps: int = 3
    out: str = "profiles"
    ablate: Ablation = "none"
    costs: str | None = None
    virtual: bool = False
    nvtx: bool = False
    torch_profiler: bool = False
    memory_snapshot: bool = False

    def __post_init__(self) -> None:
        for option, least in (("steps", 0), ("warmup_steps", 1)):
            if getattr(self, option) < least:
                raise ConfigError(
                    f"[profile] {option} = {getattr(self, option)} must be a whole number of at least {least}"
                )
        if self.ablate not in get_args(Ablation):
            raise ConfigError(f"[profile] ablate = {self.ablate!r} must be one of {', '.join(get_args(Ablation))}")
        if self.virtual and self.costs is None:
            raise ConfigError(
                "[profile] virtual = true waits as long as costs say; set costs to a costs file, such as that of an "
                "earlier profile"
            )
        if not self.out:
            raise ConfigError("[profile] out is empty; give a folder, such as profiles")
        if not self.steps:
            self._require_no_request()

    def _require_no_request(self) -> None:
        """Refuse what a run without a profile would leave out in silence."""
        switches = ("costs", "virtual", "nvtx", "torch_profiler", "memory_snapshot")
        asked = [name for name in switches if getattr(self, name)] + ["ablate"] * (self.ablate != "none")
        if asked:
            raise ConfigError(
                f"[profile] {asked[0]} is set, but steps = 0 makes no profile; set profile.steps to the steps to "
                "record, or take 'chimera profile'"
            )
