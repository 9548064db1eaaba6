"""What single operations take on a device: matrix products by shape, memory-bound work, collectives, messages.

Each is a ceiling of the device times an efficiency that was fitted. Numbers and columns of numbers are taken alike.
Nothing here knows a transformer.
"""

from typing import Final, NamedTuple

import numpy as np

from chimera.plan.dims import Number
from chimera.plan.hardware import Cluster

__all__ = [
    "Rates",
    "alignment",
    "all_reduce_s",
    "host_bound",
    "memory_s",
    "network_share",
    "product_s",
    "rates_of",
    "waiting_s",
]

_TILES: Final = ((256, 128), (128, 256), (128, 128), (128, 64), (64, 64))
"""Parts of its output that a product is cut into, one for a multiprocessor at a time; the library takes the best."""

_TILE_LOADING: Final = 10.0
"""Rows and columns whose loading costs as much as computing with one: why small tiles reach less. Not fitted."""

_RAMP: Final = 10.0
"""Depth that the fill and drain of a tile's product cost as much as, where a device's file has none. Not fitted."""

_KERNEL_S: Final = 4e-6
"""From the start of one kernel to that of the next on an accelerator, if neither has work. Not fitted."""

_HOST_SMOOTHING: Final = 4.0
"""Host and device overlap, so the slower of the two counts; this exponent smooths the corner. Not fitted."""


class Rates(NamedTuple):
    """The ceilings of a cluster, and its constants, as the formulas take them; numbers or columns.

    Attributes:
        matrix_flops_per_s: peak of matrix products in the format of the run.
        memory_bytes_per_s: peak of device memory.
        multiprocessors: of the device.
        node_size: devices of a node.
        node_bytes_per_s: what one device can send to others of its node.
        node_latency_s: of one step of a collective within a node.
        network_bytes_per_s: what one device can send to other nodes while all of its node do.
        network_latency_s: of one step of a collective between nodes.
        shares_network: 1 where several devices of a node share one network adapter, else 0.
        message_bytes_per_s: what the messages of one stage reach, where the code base takes it as given; else 0.
        element_bytes: of one number of a weight, activation or gradient.
        matrix_efficiency: share of the peak that a large product reaches.
        matrix_ramp: depth that the fill and drain of a tile's product cost as much as.
        attention_slowdown: of the products of scores and values against others of their shape.
        memory_efficiency: share of the peak that memory-bound work reaches.
        launch_s: host time of one operation.
        collective_s: of one tensor-parallel collective beyond its steps: ranks waiting for each other.
        collective_of_four_s: the same in groups of three to seven, which were measured to wait less.
        network_efficiency: share of the network's rate that messages and collectives reach.
        shared_network_efficiency: share of that which several groups in a node reach where they share adapters.
        hop_s: of one message between pipeline ranks beyond its transfer.
        optimizer_bytes: that the update of one parameter would move at the peak rate of memory.
    """

    matrix_flops_per_s: Number
    memory_bytes_per_s: Number
    multiprocessors: Number
    node_size: Number
    node_bytes_per_s: Number
    node_latency_s: Number
    network_bytes_per_s: Number
    network_latency_s: Number
    shares_network: Number
    message_bytes_per_s: Number
    element_bytes: Number
    matrix_efficiency: Number
    matrix_ramp: Number
    attention_slowdown: Number
    memory_efficiency: Number
    launch_s: Number
    collective_s: Number
    collective_of_four_s: Number
    network_efficiency: Number
    shared_network_efficiency: Number
    hop_s: Number
    optimizer_bytes: Number

    @property
    def memory_rate(self) -> Number:
        """Bytes per second that memory-bound work reaches."""
        return self.memory_bytes_per_s * self.memory_efficiency

    @property
    def network_rate(self) -> Number:
        """Bytes per second that one device reaches across the network while all of its node send."""
        return self.network_bytes_per_s * self.network_efficiency


def product_s(rates: Rates, rows: Number, columns: Number, depth: Number, *, batch: Number = 1.0) -> Number:
    """Return the time of ``batch`` products of [rows, depth] with [depth, columns].

    Tiles are whole, and so are the waves in which the multiprocessors take them: what is left over of the last tile or
    wave is lost. Of the tile shapes the best counts. Moving the operands once from and to memory is the other bound.
    """
    per_wave = rates.multiprocessors * 2 / (rates.matrix_flops_per_s * rates.matrix_efficiency)
    compute: Number = np.inf
    for high, wide in _TILES:
        tiles = batch * np.ceil(rows / high) * np.ceil(columns / wide)
        waves = np.ceil(tiles / rates.multiprocessors)
        loading = high * wide * (1 + _TILE_LOADING * (1 / high + 1 / wide))
        compute = np.minimum(compute, waves * loading)
    compute = compute * per_wave * (depth + rates.matrix_ramp)
    moved = rates.element_bytes * batch * (rows * depth + columns * depth + rows * columns)
    time: Number = np.maximum(compute, moved / rates.memory_rate) + _KERNEL_S
    return time


def alignment(width: Number, penalty: Number) -> Number:
    """Return how much slower a product of 16-bit numbers is for ``width``: ``penalty`` if odd, its root if even.

    Rows that are not a multiple of 16 bytes apart cannot be loaded in whole vectors.
    """
    slower: Number = np.where(width % 8 == 0, 1.0, np.where(width % 2 == 0, np.sqrt(penalty), penalty))
    return slower


def memory_s(rates: Rates, moved_bytes: Number, kernels: float) -> Number:
    """Return the time of ``kernels`` memory-bound operations that move ``moved_bytes`` together."""
    return moved_bytes / rates.memory_rate + kernels * _KERNEL_S


def host_bound(rates: Rates, device_s: Number, operations: Number) -> Number:
    """Return the time of ``operations`` that take ``device_s`` if the host can launch them fast enough."""
    host = operations * rates.launch_s
    time: Number = (device_s**_HOST_SMOOTHING + host**_HOST_SMOOTHING) ** (1 / _HOST_SMOOTHING)
    return time


def waiting_s(rates: Rates, members: Number) -> Number:
    """Return how long the members of a tensor-parallel group wait for each other at each of its collectives."""
    n = np.asarray(members)
    several = np.where((n > 2) & (n < 8), rates.collective_of_four_s, rates.collective_s)
    time: Number = np.where(n > 1, several, 0.0)
    return time


def network_share(rates: Rates, ranks_apart: Number) -> Number:
    """Return the share of the network's rate that is left where several groups of a node send side by side.

    Args:
        rates: of the cluster.
        ranks_apart: distance of neighbouring members in devices; groups lie side by side where it is more than 1.
    """
    groups = np.minimum(ranks_apart, rates.node_size)
    shared = (rates.shares_network > 0) & (groups > 1) & (rates.node_size >= 2 * groups)
    share: Number = np.where(shared, rates.shared_network_efficiency, 1.0)
    return share


def all_reduce_s(rates: Rates, size_bytes: Number, members: Number, *, ranks_apart: Number = 1.0) -> Number:
    """Return the time of a ring all-reduce, or of a reduce-scatter and an all-gather of the same size.

    ``2 (n−1)/n`` times the size passes each member in ``2 (n−1)`` steps (Thakur et al. 2005).

    Args:
        rates: of the cluster.
        size_bytes: of what each member has.
        members: n.
        ranks_apart: distance of neighbouring members in devices: 1 for a tensor-parallel group, t for the replicas of
            a stage. As many rings work beside each other in every node.
    """
    rings = np.minimum(ranks_apart, rates.node_size)
    in_node = np.maximum(1.0, np.floor(rates.node_size / rings))
    crosses = members * ranks_apart > rates.node_size
    rate = rates.network_rate * np.minimum(members, in_node) * network_share(rates, ranks_apart)
    rate = np.where(crosses, np.minimum(rate, rates.node_bytes_per_s), rates.node_bytes_per_s)
    latency = np.where(crosses, rates.network_latency_s, rates.node_latency_s)
    steps = 2 * (members - 1)
    time: Number = np.where(members > 1, steps / members * size_bytes / rate + steps * latency, 0.0)
    return time


def rates_of(cluster: Cluster, dtype: str, element_bytes: float, *, message_bytes_per_s: float = 0.0) -> Rates:
    """Return the ceilings and constants of a cluster for products in ``dtype``; see ``Rates`` for the others."""
    device = cluster.device
    constant = {name: fitted.value for name, fitted in device.constants.items()}
    return Rates(
        matrix_flops_per_s=device.matrix_flops_per_s[dtype],
        memory_bytes_per_s=device.memory_bytes_per_s,
        multiprocessors=float(device.multiprocessors),
        node_size=float(cluster.node_size),
        node_bytes_per_s=cluster.node_link.bytes_per_s,
        node_latency_s=cluster.node_link.latency_s,
        network_bytes_per_s=cluster.network_link.bytes_per_s,
        network_latency_s=cluster.network_link.latency_s,
        shares_network=float(cluster.adapters < cluster.node_size),
        message_bytes_per_s=message_bytes_per_s,
        element_bytes=element_bytes,
        matrix_efficiency=constant["matrix_efficiency"],
        matrix_ramp=constant.get("matrix_ramp", _RAMP),
        attention_slowdown=constant["attention_slowdown"],
        memory_efficiency=constant["memory_efficiency"],
        launch_s=constant["launch_s"],
        collective_s=constant["collective_s"],
        collective_of_four_s=constant.get("collective_of_four_s", constant["collective_s"]),
        network_efficiency=constant["network_efficiency"],
        shared_network_efficiency=constant["shared_network_efficiency"],
        hop_s=constant["hop_s"],
        optimizer_bytes=constant["optimizer_bytes"],
    )
