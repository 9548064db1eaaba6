"""The colours of actions, one set for terminal grid and figures: hue by route, lightness by kind and chunk.

Forwards are light and backwards dark, so that the two can be told apart in grey; nothing relies on hue alone.
"""

import colorsys
from collections import defaultdict
from typing import Final, NamedTuple

from chimera.ir.action import Action, Instruction, Kind, Overlap, flatten
from chimera.ir.table import NO_MICROBATCH
from chimera.ir.timeline import Timeline

__all__ = ["REDUCTION", "Paint", "Painter"]


class Paint(NamedTuple):
    """Colours as ``#rrggbb``: of a bar or cell, and of the text on it."""

    fill: str
    text: str


_HUES: Final = (0.585, 0.075, 0.40, 0.79)
"""Blue, orange, green, violet; further routes follow by golden angle."""

_LIGHTNESS_AND_SATURATION: Final = {
    Kind.F: (0.80, 0.72),
    Kind.B: (0.47, 0.58),
    Kind.I: (0.60, 0.55),
    Kind.W: (0.68, 0.18),
}
_CHUNK_RANGE: Final = 0.12
"""How much darker a rank's last chunk is than its first."""

REDUCTION: Final = Paint("#b5305c", "#ffffff")
_OTHER: Final = Paint("#7a7a7a", "#ffffff")


class Painter:
    """Gives each action of one timeline its colours."""

    def __init__(self, timeline: Timeline) -> None:
        self._routes = timeline.microbatch_to_route
        stages: defaultdict[tuple[int, int], set[int]] = defaultdict(set)
        table = timeline.table
        for rank in range(timeline.num_ranks):
            rows = timeline.rows(rank)
            for stage, microbatch in set(zip(table.stage[rows].tolist(), table.microbatch[rows].tolist(), strict=True)):
                if microbatch != NO_MICROBATCH:
                    stages[rank, self.route_of(microbatch)].add(stage)
        self._chunks = {key: sorted(held) for key, held in stages.items()}

    def paint(self, rank: int, instruction: Instruction) -> Paint:
        """Return the colours of an instruction on ``rank``; a pair is given by its backward."""
        action = instruction.backward if isinstance(instruction, Overlap) else instruction
        if action.kind is Kind.REDUCE_GRAD:
            return REDUCTION
        if action.kind not in _LIGHTNESS_AND_SATURATION or action.microbatch is None:
            return _OTHER
        route = self.route_of(action.microbatch)
        lightness, saturation = _LIGHTNESS_AND_SATURATION[action.kind]
        lightness -= _CHUNK_RANGE * self._chunk_share(rank, route, action)
        hue = _HUES[route] if route < len(_HUES) else (_HUES[0] + route * 0.381966) % 1.0
        red, green, blue = colorsys.hls_to_rgb(hue, lightness, saturation)
        dark = 0.299 * red + 0.587 * green + 0.114 * blue < 0.55
        fill = "#" + "".join(f"{round(255 * part):02x}" for part in (red, green, blue))
        return Paint(fill, "#ffffff" if dark else "#1a1a1a")

    def parts(self, rank: int, instruction: Instruction) -> list[Paint]:
        """Return the colours of the one or two actions of an instruction."""
        return [self.paint(rank, action) for action in flatten([instruction])]

    @property
    def has_chunks(self) -> bool:
        """Whether some rank holds several stages of one route."""
        return any(len(held) > 1 for held in self._chunks.values())

    def is_first_chunk(self, rank: int, action: Action) -> bool:
        """Whether the action's stage is the first of those that ``rank`` holds on its route."""
        assert action.microbatch is not None, f"{action} has no micro-batch, so no route"
        return self._chunk_share(rank, self.route_of(action.microbatch), action) == 0

    def route_of(self, microbatch: int) -> int:
        """Return the route of a micro-batch."""
        return self._routes[microbatch] if 0 <= microbatch < len(self._routes) else 0

    def _chunk_share(self, rank: int, route: int, action: Action) -> float:
        held = self._chunks.get((rank, route), [action.stage])
        return held.index(action.stage) / (len(held) - 1) if len(held) > 1 else 0.0
