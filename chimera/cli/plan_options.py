"""Options that the planner's commands share: the cluster, one layout, the choices given instead of searched."""

from dataclasses import dataclass, replace
from typing import Annotated, TypeVar

from tyro.conf import OmitArgPrefixes, arg

from chimera.cli.options import Flag
from chimera.cli.schedule_build import bytes_or_units
from chimera.errors import UsageError
from chimera.plan.divisors import nearest_multiple
from chimera.plan.export import SYSTEMS
from chimera.plan.hardware import Cluster
from chimera.plan.hardware_file import read_device
from chimera.plan.layout import Layout, Recompute
from chimera.plan.search.space import SearchSpace
from chimera.plan.shape import require_size

__all__ = ["ClusterOptions", "LayoutOptions", "MachineOptions", "SpaceOptions", "software_option"]

_Count = Annotated[int | None, arg(constructor=int, metavar="N", help_behavior_hint="")]
_Amount = Annotated[str | None, arg(constructor=str, metavar="X", help_behavior_hint="")]
_Name = Annotated[str | None, arg(constructor=str, metavar="NAME", help_behavior_hint="")]
_Rate = Annotated[float | None, arg(constructor=float, metavar="X", help_behavior_hint="")]
_Sizes = Annotated[tuple[int, ...] | None, arg(metavar="N...", help_behavior_hint="")]
_Names = Annotated[tuple[str, ...] | None, arg(metavar="NAME...", help_behavior_hint="")]
_Modes = Annotated[tuple[Recompute, ...] | None, arg(metavar="MODE...", help_behavior_hint="")]
_Switch = Annotated[bool | None, arg(metavar="True|False", help_behavior_hint="")]

software_option = Annotated[str, arg(metavar="NAME|FILE")]

_Value = TypeVar("_Value")


@dataclass(frozen=True, kw_only=True)
class _Machine:
    """What the machines are like."""

    device: Annotated[str, arg(metavar="NAME|FILE")] = "a100-80"
    """a device's name, or a FILE.json"""
    memory: _Amount = None
    """memory of a device, as 40GiB (default: the device's)"""
    nodes_of: _Count = None
    """devices of one node (default: as many as the device's own link joins)"""
    network: _Rate = None
    """GB/s that all devices of a node together send to other nodes (default: the device's usual machine)"""
    adapters: _Count = None
    """network adapters of a node; fewer than its devices where they share them (default: the device's usual machine)"""

    def of(self, devices: int) -> Cluster:
        """Return a cluster of such machines.

        Raises:
            UsageError: an unknown device, an amount that is no memory, or nodes that are not whole.
        """
        device = read_device(self.device)
        if self.memory is not None:
            device = replace(device, memory_bytes=_bytes(self.memory))
        return Cluster.of(
            device,
            devices,
            node_size=self.nodes_of,
            network_bytes_per_s=None if self.network is None else self.network * 1e9,
            adapters=self.adapters,
        )


@dataclass(frozen=True, kw_only=True)
class _Cluster(_Machine):
    """Where the model runs."""

    gpus: Annotated[int, arg(metavar="N")]
    """devices"""

    def resolve(self) -> Cluster:
        """Return the cluster; see ``of``."""
        return self.of(self.gpus)


@dataclass(frozen=True, slots=True)
class _Layout:
    """How the model is spread."""

    tensor: Annotated[int, arg(metavar="N")] = 1
    """t, ranks that share each layer"""
    pipeline: Annotated[int, arg(metavar="N")] = 1
    """p, ranks of a pipeline"""
    data: _Count = None
    """d, replicas of the pipeline (default: what --gpus leaves, or 1)"""
    microbatch: Annotated[int, arg(metavar="N")] = 1
    """b, sequences of a micro-batch"""
    global_batch: _Count = None
    """sequences of a step (default: two micro-batches per pipeline rank and replica)"""
    schedule: Annotated[str, arg(metavar="NAME")] = "1f1b"
    """a schedule's name"""
    chunks: _Count = None
    """v, model chunks per rank"""
    pairs: _Count = None
    """f, pairs of opposite pipelines"""
    waves: _Count = None
    """w, for schedules in waves"""
    unit: _Name = None
    """how Chimera makes steps of more than p micro-batches: concatenate, double or halve"""
    cut: _Sizes = None
    """blocks of each stage (default: as equal as can be)"""
    recompute: Recompute = "none"
    """what the backward runs again"""
    sequence_parallel: Flag = False
    """tensor-parallel ranks also share what lies between their products"""
    sharded: Flag = False
    """replicas share the optimizer states"""

    def resolve(self, gpus: int | None) -> Layout:
        """Return the layout on so many devices; on as many as its sizes make where None.

        Raises:
            UsageError: sizes that do not divide the devices or the batch; the message gives the nearest.
            ConfigError: a size below 1.
        """
        for name in ("tensor", "pipeline", "data", "microbatch", "global_batch"):
            if getattr(self, name) is not None:
                require_size(name, getattr(self, name))
        if gpus is not None:
            require_size("gpus", gpus)
        size = self.tensor * self.pipeline
        if self.data is None and gpus is not None and gpus % size:
            raise UsageError(
                f"--gpus {gpus} is no multiple of --tensor × --pipeline = {size}; try --gpus "
                f"{' or '.join(map(str, nearest_multiple(gpus, size)))}"
            )
        data = self.data or (gpus or size) // size
        return Layout(
            tensor=self.tensor,
            pipeline=self.pipeline,
            data=data,
            microbatch=self.microbatch,
            microbatches=self._microbatches(self.microbatch * data),
            schedule=self.schedule,
            chunks=self.chunks,
            pairs=self.pairs,
            waves=self.waves,
            unit=self.unit,
            cut=self.cut,
            recompute=self.recompute,
            sequence_parallel=self.sequence_parallel,
            sharded=self.sharded,
        )

    def _microbatches(self, share: int) -> int:
        if self.global_batch is None:
            return 2 * self.pipeline
        if self.global_batch % share:
            near = " or ".join(map(str, nearest_multiple(self.global_batch, share)))
            raise UsageError(
                f"--global-batch {self.global_batch} is no multiple of --microbatch × --data = {share}; try {near}"
            )
        return self.global_batch // share


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
        """Return the space; exporting leaves what is not given to what the other system has."""
        space = SearchSpace(
            schedules=self.schedules,
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
        if export is None:
            return space
        system = SYSTEMS[export]
        return replace(
            space,
            schedules=space.schedules or tuple(system.schedules),
            recompute=space.recompute or system.recompute,
            sequence_parallel=space.sequence_parallel or system.sequence_parallel,
            uneven=space.uneven or system.uneven,
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
MachineOptions = OmitArgPrefixes[_Machine]
LayoutOptions = OmitArgPrefixes[_Layout]
SpaceOptions = OmitArgPrefixes[_Space]
