"""The placements that a search is asked for by name: linear, looped, vee, bidirectional.

It knows where stages live, and deals micro-batches to routes; it knows no order.
"""

from typing import Final, Literal

from chimera.errors import UsageError, nearest_names
from chimera.ir.schedule import Placement
from chimera.schedules.building import linear, require_counts
from chimera.schedules.chimera import chimera

__all__ = ["PLACEMENTS", "PlacementName", "dealt", "place"]

PlacementName = Literal["linear", "looped", "vee", "bidirectional"]
PLACEMENTS: Final[tuple[PlacementName, ...]] = ("linear", "looped", "vee", "bidirectional")


def place(name: str, ranks: int, *, chunks: int | None = None, pairs: int | None = None) -> Placement:
    """Return a placement by name.

    ``linear`` has one stage per rank; ``looped`` puts stage s of p·v on rank s mod p, v = ``chunks``; ``vee`` runs down
    and up the ranks in turn, v = ``chunks`` times (2 is ZB-V's V, 4 a W); ``bidirectional`` is Chimera's with f =
    ``pairs``.

    >>> place("vee", 3).routes, place("looped", 2, chunks=3).routes
    (((0, 1, 2, 2, 1, 0),), ((0, 1, 0, 1, 0, 1),))
    >>> place("bidirectional", 4).routes
    ((0, 1, 2, 3), (3, 2, 1, 0))

    Raises:
        UsageError: the name is unknown, or the placement does not take an option or a value.
    """
    if name not in PLACEMENTS:
        raise UsageError(
            f"--placement {name}: needed: {', '.join(PLACEMENTS)} or a schedule file{nearest_names(name, PLACEMENTS)}"
        )
    require_counts(name, ranks=ranks)
    if pairs is not None and name != "bidirectional":
        raise UsageError(f"--placement {name} takes no --pairs, got {pairs}; leave it out, or take bidirectional")
    if chunks is not None and name not in {"looped", "vee"}:
        raise UsageError(f"--placement {name} takes no --chunks, got {chunks}; leave it out, or take looped or vee")
    if name == "bidirectional":
        return chimera(ranks, 1, pairs=1 if pairs is None else pairs).placement
    if name == "linear":
        return linear(ranks)
    chunks = 2 if chunks is None else chunks
    require_counts(name, chunks=chunks)
    if name == "looped":
        return linear(ranks, chunks)
    down = tuple(range(ranks))
    return Placement(ranks, (sum((down[:: -1 if chunk % 2 else 1] for chunk in range(chunks)), ()),))


def dealt(microbatches: int, num_routes: int) -> tuple[int, ...]:
    """Deal micro-batches to routes in turn.

    >>> dealt(5, 2)
    (0, 1, 0, 1, 0)
    """
    require_counts("search", microbatches=microbatches)
    return tuple(microbatch % num_routes for microbatch in range(microbatches))
