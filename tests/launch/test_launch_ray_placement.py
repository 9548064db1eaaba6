"""Which rank goes to which node of a Ray cluster, by arithmetic alone."""

from chimera.launch.ray.placement import Node, room_text, seat_ranks


def node(address, port=1, **more):
    return Node(name=f"{address}:{port}", address=address, port=port, **more)


def test_nodes_are_numbered_as_numbers():
    """Nodes come in the order of their addresses as numbers, and of their ports where they share one."""
    nodes = [node("10.0.0.10"), node("10.0.0.9", 7), node("10.0.0.9", 12), node("fd00::1"), node("9.255.0.1")]
    assert [seat.node.name for seat in seat_ranks(nodes, tensor=1)] == [
        "9.255.0.1:1",
        "10.0.0.9:7",
        "10.0.0.9:12",
        "10.0.0.10:1",
        "fd00::1:1",
    ]


def test_ranks_that_share_layers_share_a_node():
    """The ranks of a bundle are adjacent, and each knows how many there are on its host."""
    far, near = node("10.0.0.2"), node("10.0.0.1")
    seats = seat_ranks([far, near, far], tensor=2)
    assert [(seat.rank, seat.bundle, seat.node.address, seat.local_rank, seat.local_size) for seat in seats] == [
        (0, 1, "10.0.0.1", 0, 2),
        (1, 1, "10.0.0.1", 1, 2),
        (2, 0, "10.0.0.2", 0, 4),
        (3, 0, "10.0.0.2", 1, 4),
        (4, 2, "10.0.0.2", 2, 4),
        (5, 2, "10.0.0.2", 3, 4),
    ]


def test_nodes_of_one_host_count_its_ranks_together():
    """Two nodes with one address are on one host, where ranks are numbered without a gap."""
    seats = seat_ranks([node("127.0.0.1", 2), node("127.0.0.1", 1)], tensor=1)
    assert [(seat.rank, seat.node.port, seat.local_rank, seat.local_size) for seat in seats] == [
        (0, 1, 0, 2),
        (1, 2, 1, 2),
    ]


def test_room_names_what_there_is_and_what_has_died():
    """Living nodes are named with what they offer, dead ones by address."""
    nodes = [node("10.0.0.10", cpus=1), node("10.0.0.9", cpus=4, gpus=1), node("10.0.0.11", alive=False)]
    assert room_text(nodes) == "2 nodes: 10.0.0.9 with 4 CPUs and 1 GPU, 10.0.0.10 with 1 CPU (10.0.0.11 died)"
    assert room_text([node("10.0.0.11", alive=False)]) == "no node (10.0.0.11 died)"
