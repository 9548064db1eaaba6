"""Which rank sits where on a Ray cluster: whole tensor-parallel groups on one node, ranks in the order of addresses.

Ray decides which bundle of a placement group goes to which node. Given that, the rest is arithmetic, and stands here;
nothing in this module knows Ray.
"""

import ipaddress
from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["Node", "Seat", "room_text", "seat_ranks"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """A node of the cluster.

    Attributes:
        name: Ray's own, in hexadecimal digits.
        address: numeric; nodes of a test may share one.
        port: of its daemon, which tells such nodes apart.
        cpus, gpus: that it offers in all.
        alive: whether Ray counts on it.
    """

    name: str
    address: str
    port: int
    cpus: float = 0.0
    gpus: float = 0.0
    alive: bool = True

    @property
    def order(self) -> tuple[int, int, int]:
        """Sorts nodes by their addresses as numbers, so that 10.0.0.9 comes before 10.0.0.10."""
        address = ipaddress.ip_address(self.address)
        return address.version, int(address), self.port


@dataclass(frozen=True, slots=True)
class Seat:
    """Where one rank goes.

    Attributes:
        rank: in the world.
        bundle: of the placement group, that of its tensor-parallel group.
        node: that the bundle is on.
        local_rank, local_size: among the ranks of the same host.
    """

    rank: int
    bundle: int
    node: Node
    local_rank: int
    local_size: int


def seat_ranks(bundles: Sequence[Node], tensor: int) -> list[Seat]:
    """Number ``tensor`` ranks in each bundle, node by node.

    Args:
        bundles: the node of each bundle.
        tensor: ranks of a bundle, which share each layer and are adjacent.

    >>> nodes = [Node(name=name, address=f"10.0.0.{n}", port=1) for name, n in (("a", 10), ("b", 9), ("c", 10))]
    >>> [(seat.rank, seat.bundle, seat.node.address, seat.local_rank) for seat in seat_ranks(nodes, tensor=2)]
    ... # doctest: +NORMALIZE_WHITESPACE
    [(0, 1, '10.0.0.9', 0), (1, 1, '10.0.0.9', 1),
     (2, 0, '10.0.0.10', 0), (3, 0, '10.0.0.10', 1), (4, 2, '10.0.0.10', 2), (5, 2, '10.0.0.10', 3)]
    """
    order = sorted(range(len(bundles)), key=lambda bundle: (bundles[bundle].order, bundle))
    per_host: dict[str, int] = {}
    for node in bundles:
        per_host[node.address] = per_host.get(node.address, 0) + tensor
    seated: dict[str, int] = {}
    seats: list[Seat] = []
    for bundle in order:
        node = bundles[bundle]
        for _ in range(tensor):
            local_rank = seated.get(node.address, 0)
            seated[node.address] = local_rank + 1
            seats.append(Seat(len(seats), bundle, node, local_rank, per_host[node.address]))
    return seats


def room_text(nodes: Sequence[Node]) -> str:
    """Write what the living nodes offer, and which have died.

    >>> room_text([Node(name="a", address="10.0.0.1", port=1, cpus=8, gpus=2)])
    '1 node: 10.0.0.1 with 8 CPUs and 2 GPUs'
    """
    living = sorted((node for node in nodes if node.alive), key=lambda node: node.order)
    parts = [
        f"{node.address} with {_count(node.cpus, 'CPU')}" + (f" and {_count(node.gpus, 'GPU')}" if node.gpus else "")
        for node in living
    ]
    dead = sorted((node for node in nodes if not node.alive), key=lambda node: node.order)
    text = f"{_count(len(living), 'node')}: {', '.join(parts)}" if living else "no node"
    return text + (f" ({', '.join(node.address for node in dead)} died)" if dead else "")


def _count(number: float, what: str) -> str:
    return f"{number:g} {what}{'' if number == 1 else 's'}"
