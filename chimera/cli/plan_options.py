"""Options that the planner's commands share: the cluster, and the choices that are given instead of searched."""

from dataclasses import dataclass, replace
from typing import Annotated, TypeVar

from tyro.conf import OmitArgPrefixes, arg

from chimera.cli.schedule_build import bytes_or_units
from chimera.errors import UsageError
from chimera.plan.hardware import Cluster
from chimera.plan.hardware_file import read_device
from chimera.plan.layout import Recompute
from chimera.plan.search.space import SearchSpace

__all__ = ["ClusterOptions", "SpaceOptions", "software_option"]

_Count = Annotated[int | None, arg(constructor=int, metavar="N", help_behavior_hint="")]
_Amount = Annotated[str | None, arg(constructor=str, metavar="X", help_behavior_hint="")]
_Rate = Annotated[float | None, arg(constructor=float, metavar="X", help_behavior_hint="")]
_Sizes = Annotated[tuple[int, ...] | None, arg(metavar="N...", help_behavior_hint="")]
_Names = Annotated[tuple[str, ...] | None, arg(metavar="NAME...", help_behavior_hint="")]
_Modes = Annotated[tuple[Recompute, ...] | None, arg(metavar="MODE...", help_behavior_hint="")]
_Switch = Annotated[bool | None, arg(metavar="True|False", help_behavior_hint="")]

software_option = Annotated[str, arg(metavar="NAME|FILE")]

_Value = TypeVar("_Value")
_EXPORTED = {
    "megatron": ("1f1b", "interleaved"),
    "torchtitan": ("gpipe", "1f1b", "interleaved", "looped-bfs", "interleaved-zb", "zb-v", "dualpipev"),
    "nanotron": ("1f1b", "gpipe"),
}


@dataclass(frozen=True, slots=True)
class _Cluster:
    """Where the model runs."""

    gpus: Annotated[int, arg(metavar="N")]
    """devices"""
    device: Annotated[str, arg(metavar="NAME|FILE")] = "a100-80"
    """a device's name, or a FILE.json"""
    memory: _Amount = None
    """memory of a device, as 40GiB (default: the device's)"""
    nodes_of: _Count = None
    """devices of one node (default: as many as the device's own link joins)"""
    network: _Rate = None
    """GB/s that all devices of a node together send to other nodes (default: the device's usual machine)"""

    def resolve(self) -> Cluster:
        """Return the cluster.

        Raises:
            UsageError: an unknown device, an amount that is no memory, or nodes that are not whole.
        """
        device = read_device(self.device)
        if self.memory is not None:
            device = replace(device, memory_bytes=_bytes(self.memory))
        return Cluster.of(
            device,
            self.gpus,
            node_size=self.nodes_of,
            network_bytes_per_s=None if self.network is None else self.network * 1e9,
        )


@dataclass(frozen=True, slots=True)
class _Space:
    """Choices that are given instead of searched."""

    schedules: _Names = None
    """names of schedules (default: all synchronous ones)"""
    tensor: _Sizes = None
    """values of t"""
    pipeline: _Sizes = None
    """values of p"""
    data: _Sizes = None
    """values of d"""
    microbatch: _Sizes = None
    """values of b"""
    chunks: _Sizes = None
    """values of v, for schedules that take it"""
    pairs: _Sizes = None
    """values of f, for schedules that take it"""
    recompute: _Modes = None
    """what the backward may run again: none, selective, full"""
    sequence_parallel: _Switch = None
    """whether tensor-parallel ranks share what lies between their products"""
    sharded: _Switch = None
    """whether replicas share the optimizer states"""
    uneven: _Switch = None
    """whether stages may have different numbers of blocks"""

    def resolve(self, export: str | None) -> SearchSpace:
        """Return the space; exporting narrows the schedules to those that the other system has."""
        schedules = self.schedules
        if export is not None and schedules is None:
            schedules = _EXPORTED[export]
        return SearchSpace(
            schedules=schedules,
            tensor=self.tensor,
            pipeline=self.pipeline,
            data=self.data,
            microbatch=self.microbatch,
            chunks=self.chunks,
            pairs=self.pairs,
            recompute=self.recompute,
            sequence_parallel=_only(self.sequence_parallel),
            sharded=_only(self.sharded),
            # An uneven cut may be left out; an equal one may not divide.
            uneven=None if self.uneven is not False else (False,),
        )


def _bytes(text: str) -> int:
    try:
        _, size = bytes_or_units(text)
    except UsageError:
        size = None
    if size is None or size < 1:
        raise UsageError(f"--memory {text}: needed: a number of bytes with its unit, as 40GiB or 80GB")
    return int(size)


def _only(value: _Value | None) -> tuple[_Value, ...] | None:
    return None if value is None else (value,)


ClusterOptions = OmitArgPrefixes[_Cluster]
SpaceOptions = OmitArgPrefixes[_Space]
