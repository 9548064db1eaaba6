"""Devices, links and clusters: ceilings as their makers publish them, and the constants fitted to measured runs.

A device is one file in ``hardware/``, units in its keys, its sources cited; a user adds one by writing one. It knows
no models and no times: what a kernel takes on a device is ``kernels``' business.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Literal, get_args

from chimera.errors import ConfigError

__all__ = [
    "DEVICE_CONSTANTS",
    "DTYPES",
    "DTYPE_BYTES",
    "FURTHER_CONSTANTS",
    "Cluster",
    "Constant",
    "Device",
    "Dtype",
    "Link",
]

Dtype = Literal["fp16", "bf16", "fp32"]
DTYPES: Final[tuple[str, ...]] = get_args(Dtype)
_MOST_DEVICES: Final = 10_000_000
"""More than any cluster has: their divisors are tried one by one."""

DTYPE_BYTES: Final[Mapping[str, int]] = {"fp16": 2, "bf16": 2, "fp32": 4}

DEVICE_CONSTANTS: Final = (
    "matrix_efficiency",
    "attention_slowdown",
    "memory_efficiency",
    "launch_s",
    "collective_s",
    "network_efficiency",
    "shared_network_efficiency",
    "hop_s",
    "optimizer_bytes",
)
"""Numbers that every device has; ``kernels.Rates`` says what they are."""

FURTHER_CONSTANTS: Final = ("collective_of_four_s", "matrix_ramp")
"""Numbers that a device may have; without, the first is its ``collective_s`` and the second assumed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Constant:
    """One number fitted to data.

    Attributes:
        value: of the number.
        unit: of the value.
        low: lower end of its 90 % interval.
        high: upper end.
        fitted_on: the tables, with their number of rows, that it was fitted on; or why it was taken over.
    """

    value: float
    unit: str
    low: float
    high: float
    fitted_on: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """One tier of links.

    Attributes:
        name: such as "NVLink 3".
        devices: how many devices it joins; None for as many as there are.
        bytes_per_s: what one device can send, and receive at the same time.
        latency_s: of one message.
    """

    name: str
    devices: int | None
    bytes_per_s: float
    latency_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """One kind of device with the links that its usual machine has.

    Attributes:
        name: its key, as in ``--device``.
        title: its name in print.
        memory_bytes: that a program can use.
        memory_bytes_per_s: peak rate of its memory.
        cache_bytes: of its last cache.
        multiprocessors: units that work on one tile of a product each.
        matrix_flops_per_s: peak of dense products by number format, accumulation in fp32.
        vector_flops_per_s: peak outside matrix units, fp32.
        links: tiers, the innermost first; rates and latencies are those that collectives reach.
        adapters_per_node: network adapters of its usual machine; fewer than its devices if they share them.
        constants: fitted or measured numbers by name: those of ``DEVICE_CONSTANTS``, perhaps of ``FURTHER_CONSTANTS``.
        sources: where each figure comes from.
    """

    name: str
    title: str
    memory_bytes: int
    memory_bytes_per_s: float
    cache_bytes: int
    multiprocessors: int
    matrix_flops_per_s: Mapping[str, float]
    vector_flops_per_s: float
    links: tuple[Link, ...]
    adapters_per_node: int
    constants: Mapping[str, Constant]
    sources: tuple[str, ...]

    @property
    def devices_per_node(self) -> int:
        """Devices that the innermost link joins."""
        return self.links[0].devices or 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """Equal devices in equal nodes.

    Attributes:
        device: of all nodes.
        num_devices: n.
        node_size: devices of one node.
        node_link: between the devices of a node.
        network_link: between nodes; its rate is what one device gets when all of its node send at once.
        adapters: network adapters of one node; fewer than its devices if they share them.

    Raises:
        ConfigError: the devices do not make whole nodes.
    """

    device: Device
    num_devices: int
    node_size: int
    node_link: Link
    network_link: Link
    adapters: int

    def __post_init__(self) -> None:
        for option, value in (("gpus", self.num_devices), ("nodes-of", self.node_size)):
            if not 1 <= value <= _MOST_DEVICES:
                raise ConfigError(f"--{option} {value}: needed: a whole number from 1 to {_MOST_DEVICES:,}")
        if self.adapters < 1:
            raise ConfigError(f"--adapters {self.adapters}: needed: at least 1 of each node")
        if self.num_devices > self.node_size and self.num_devices % self.node_size:
            lower = self.num_devices // self.node_size * self.node_size
            raise ConfigError(
                f"--gpus {self.num_devices} is not a whole number of nodes of {self.node_size}; "
                f"try --gpus {lower} or {lower + self.node_size}, or another --nodes-of"
            )

    @classmethod
    def of(
        cls,
        device: Device,
        num_devices: int,
        *,
        node_size: int | None = None,
        network_bytes_per_s: float | None = None,
        adapters: int | None = None,
    ) -> "Cluster":
        """Build the cluster of a device's usual machines, with other nodes or another network where given.

        Args:
            device: of all nodes.
            num_devices: n.
            node_size: devices of one node; as many as the device's innermost link joins where not given.
            network_bytes_per_s: what all devices of one node together can send to other nodes.
            adapters: network adapters of one node; as many as in the usual machine where not given.

        Raises:
            ConfigError: the devices do not make whole nodes, or the node is larger than its link can join.
        """
        node_link, *outer = device.links
        size = min(device.devices_per_node, max(num_devices, 1)) if node_size is None else node_size
        if node_link.devices is not None and size > node_link.devices:
            raise ConfigError(
                f"--nodes-of {size}: {node_link.name} of {device.name} joins at most {node_link.devices} devices"
            )
        network = outer[-1] if outer else node_link
        if network_bytes_per_s is not None:
            if not (network_bytes_per_s > 0 and math.isfinite(network_bytes_per_s)):
                raise ConfigError(
                    f"--network {network_bytes_per_s / 1e9:g}: needed: GB/s of a node to others, more than 0 and finite"
                )
            network = Link(
                name=network.name,
                devices=None,
                bytes_per_s=network_bytes_per_s / max(size, 1),
                latency_s=network.latency_s,
            )
        return cls(
            device=device,
            num_devices=num_devices,
            node_size=size,
            node_link=node_link,
            network_link=network,
            adapters=min(size, device.adapters_per_node) if adapters is None else adapters,
        )

    @property
    def num_nodes(self) -> int:
        """Nodes; 1 where a part of one is used."""
        return -(-self.num_devices // self.node_size)
