"""The list scheduler's loop, in the subset of Python that numba compiles: flat columns in, one order per rank out.

Time goes forward from decision to decision. A rank that is free takes, among the computations whose inputs are there
(or will be within its rule's patience), the one of the highest score; scores are a rule's weights on kind, stage and
age. Within a lane, which is one stage of one route, micro-batches keep their order, so that lanes are queues.

A forward is admitted under the memory cap such that no order can get stuck. Either it leaves room for every later lane
of the rank (then the lane furthest ahead can always go on), or, where the cap is too small for that, a micro-batch
enters its route only when what it will hold on every rank is free and kept for it.
"""

import heapq
from typing import Any, Final, NamedTuple

__all__ = [
    "NEVER",
    "NOISE_SIZE",
    "WHOLE_PATH",
    "Instance",
    "Progress",
    "admits",
    "advance",
    "arrive",
    "choose",
    "run",
    "start",
]

NEVER: Final = 1e300
"""A time at which nothing happens."""

_FORWARD: Final = 0
_WHOLE: Final = 1
_INPUT: Final = 2
_WEIGHT: Final = 3

_PATIENCE: Final = 9
_PENALTY: Final = 10
_SPLIT: Final = 11
WHOLE_PATH: Final = 12
_DEPTH: Final = 13
_SLOPE: Final = 14
_NOISE: Final = 15
_NOISE_TABLE: Final = 16
NOISE_SIZE: Final = 61
"""Places in a rule; its members and their meaning stand in ``search.rules``."""


class Instance(NamedTuple):
    """What is to be scheduled, in flat columns. A lane is ``route · num_stages + stage``."""

    lanes: Any  # lanes of each rank, rank after rank
    lane_offsets: Any  # [rank + 1] into lanes
    rank: Any  # [lane]
    stage: Any  # [lane]
    count: Any  # [lane]: micro-batches of its route
    first: Any  # [lane]: into columns with one place per lane and micro-batch
    age: Any  # [lane's place]: order of its micro-batch in the step, from 0 to 1
    duration: Any  # [4 · num_stages]: F, B, I, W of each stage
    send_forward: Any  # [lane]: time of the message to the next stage, 0 on the same rank
    send_backward: Any  # [lane]: time of the message to the stage before
    size: Any  # [lane]: memory that one micro-batch holds
    size_after_input: Any  # [lane]: memory that it holds from its I to its W
    reserve: Any  # [lane]: memory that must stay free for the lanes after it
    cap: Any  # [rank]
    route_need: Any  # [route · num_ranks + rank]: memory of one micro-batch of the route
    num_stages: int
    num_ranks: int
    tolerance: float
    memory_tolerance: float


class Progress(NamedTuple):
    """What has been decided so far; all written in place."""

    forward_ready: Any  # [place]: when the forward's input is there, NEVER while unknown
    gradient_ready: Any  # [place]
    forwards: Any  # [lane]: forwards started
    gradients: Any  # [lane]
    weights: Any  # [lane]
    held: Any  # [rank]: memory
    promised: Any  # [rank]: memory kept for micro-batches on their way, where routes are entered as a whole
    begun_at: Any  # [rank]: start of its first computation, NEVER before
    free_at: Any  # [rank]: end of its last computation
    wake: Any  # [rank]: when it decides next
    order_kind: Any  # [row], rank after rank
    order_lane: Any
    order_index: Any
    order_next: Any  # [rank]: next row


def admits(p: Instance, s: Progress, rule: Any, lane: int) -> bool:
    """Return whether the next forward of ``lane`` may take its memory now."""
    rank = p.rank[lane]
    depth = rule[_DEPTH] + rule[_SLOPE] * (p.num_stages - 1 - p.stage[lane])
    if s.forwards[lane] - s.gradients[lane] >= depth:
        return False
    if rule[WHOLE_PATH] == 0.0:
        return bool(s.held[rank] + p.size[lane] + p.reserve[lane] <= p.cap[rank] + p.memory_tolerance)
    if p.stage[lane] > 0:
        return True
    need = (lane // p.num_stages) * p.num_ranks
    for other in range(p.num_ranks):
        if s.promised[other] + p.route_need[need + other] > p.cap[other] + p.memory_tolerance:
            return False
    return True


def choose(p: Instance, s: Progress, rule: Any, rank: int, now: float) -> tuple[int, int, float, float]:
    """Return (lane, kind, start) of the best computation, kind -1 without one, and the next known arrival."""
    best_lane, best_kind, best_start, best = -1, -1, NEVER, -NEVER
    arrival = NEVER
    for at in range(p.lane_offsets[rank], p.lane_offsets[rank + 1]):
        lane = p.lanes[at]
        depth = p.stage[lane] / p.num_stages
        index = s.forwards[lane]
        if index < p.count[lane]:
            place = p.first[lane] + index
            ready = s.forward_ready[place]
            if ready <= now + p.tolerance + rule[_PATIENCE] and admits(p, s, rule, lane):
                late = max(ready - now, 0.0)
                noise = rule[_NOISE] * rule[_NOISE_TABLE + (3 * place) % NOISE_SIZE]
                score = noise + rule[0] + rule[3] * depth - rule[6] * p.age[place] - rule[_PENALTY] * late
                if score > best:
                    best_lane, best_kind, best_start, best = lane, _FORWARD, now + late, score
            if ready > now + p.tolerance:
                arrival = min(arrival, ready)
        index = s.gradients[lane]
        if index < s.forwards[lane]:
            place = p.first[lane] + index
            ready = s.gradient_ready[place]
            if ready <= now + p.tolerance + rule[_PATIENCE]:
                late = max(ready - now, 0.0)
                noise = rule[_NOISE] * rule[_NOISE_TABLE + (3 * place + 1) % NOISE_SIZE]
                score = noise + rule[1] + rule[4] * depth - rule[7] * p.age[place] - rule[_PENALTY] * late
                if score > best:
                    # Nobody waits for the gradient of the first stage's input.
                    whole = rule[_SPLIT] == 0.0 or (rule[_SPLIT] == 1.0 and p.stage[lane] == 0)
                    best_lane, best_kind, best_start, best = lane, _WHOLE if whole else _INPUT, now + late, score
            if ready > now + p.tolerance:
                arrival = min(arrival, ready)
        index = s.weights[lane]
        if index < s.gradients[lane]:
            place = p.first[lane] + index
            noise = rule[_NOISE] * rule[_NOISE_TABLE + (3 * place + 2) % NOISE_SIZE]
            score = noise + rule[2] + rule[5] * depth - rule[8] * p.age[place]
            if score > best:
                best_lane, best_kind, best_start, best = lane, _WEIGHT, now, score
    return best_lane, best_kind, best_start, arrival


def arrive(p: Instance, s: Progress, heap: Any, lane: int, time: float) -> None:
    """Have the rank of ``lane`` decide when an input arrives, if it would not before."""
    rank = p.rank[lane]
    at = max(time, s.free_at[rank])
    if at < s.wake[rank]:
        s.wake[rank] = at
        heapq.heappush(heap, (at, rank))


def start(p: Instance, s: Progress, rule: Any, heap: Any, lane: int, kind: int, begin: float) -> None:  # noqa: PLR0917 - numba takes no keyword-only arguments
    """Run one computation from ``begin``: write it down, and hand on what it makes."""
    rank, stage = p.rank[lane], p.stage[lane]
    end = begin + p.duration[kind * p.num_stages + stage]
    s.begun_at[rank] = min(s.begun_at[rank], begin)
    s.free_at[rank] = end
    index = s.forwards[lane] if kind == _FORWARD else s.weights[lane] if kind == _WEIGHT else s.gradients[lane]
    place = p.first[lane] + index
    row = s.order_next[rank]
    s.order_kind[row] = kind
    s.order_lane[row] = lane
    s.order_index[row] = index
    s.order_next[rank] = row + 1
    s.wake[rank] = end
    heapq.heappush(heap, (end, rank))
    if kind == _FORWARD:
        s.forwards[lane] += 1
        s.held[rank] += p.size[lane]
        if stage == 0 and rule[WHOLE_PATH] != 0.0:
            need = (lane // p.num_stages) * p.num_ranks
            for other in range(p.num_ranks):
                s.promised[other] += p.route_need[need + other]
        if stage + 1 < p.num_stages:
            time = end + p.send_forward[lane]
            s.forward_ready[p.first[lane + 1] + index] = time
            arrive(p, s, heap, lane + 1, time)
        else:
            s.gradient_ready[place] = end
        return
    if kind != _WEIGHT:
        s.gradients[lane] += 1
        if stage > 0:
            time = end + p.send_backward[lane]
            s.gradient_ready[p.first[lane - 1] + index] = time
            arrive(p, s, heap, lane - 1, time)
    if kind != _INPUT:
        s.weights[lane] += 1
    left = p.size_after_input[lane]
    freed = p.size[lane] if kind == _WHOLE else left if kind == _WEIGHT else p.size[lane] - left
    if freed > 0.0:
        s.held[rank] -= freed
        s.promised[rank] -= freed
        if rule[WHOLE_PATH] != 0.0:
            # A first stage elsewhere may have waited for this memory.
            for other in range(p.lane_offsets[p.num_ranks]):
                if p.stage[p.lanes[other]] == 0:
                    arrive(p, s, heap, p.lanes[other], end)


def advance(p: Instance, s: Progress, rule: Any, heap: Any, rank: int, now: float) -> None:  # noqa: PLR0917 - as above
    """Decide once for a free rank: start something, or sleep until something is known to arrive."""
    lane, kind, begin, arrival = choose(p, s, rule, rank, now)
    if kind >= 0:
        start(p, s, rule, heap, lane, kind, begin)
    else:
        s.wake[rank] = arrival
        if arrival < NEVER:
            heapq.heappush(heap, (arrival, rank))


def run(p: Instance, s: Progress, rule: Any) -> None:
    """Schedule everything by one rule."""
    heap = [(0.0, 0)]
    for rank in range(1, p.num_ranks):
        heapq.heappush(heap, (0.0, rank))
    while len(heap) > 0:
        now, rank = heapq.heappop(heap)
        if now == s.wake[rank]:
            advance(p, s, rule, heap, rank, now)
