"""Split-backward schedules on the V placement: ZB-V by hand, V-Half and V-Min from repeated building blocks.

Every rank runs stage r on the way down and stage 2p − 1 − r on the way up, so the last stage's gradient starts on rank
0, beside the first stage. The module knows the orders at F = I = W; it refuses to know costs, messages and reductions.
"""

from collections import deque
from collections.abc import Iterator
from itertools import count
from typing import NamedTuple

from chimera.ir.action import Action, Kind
from chimera.ir.collector import collector_paused
from chimera.ir.dependencies import PHASES, Phase, needs
from chimera.ir.schedule import Placement, Schedule
from chimera.schedules.building import require_counts, wave_route

__all__ = ["v_half", "v_min", "zb_v"]


def zb_v(ranks: int, microbatches: int) -> Schedule:
    """Build ZB-V: no bubble at F = I = W within 1F1B's memory, on the V placement.

    >>> for row in zb_v(2, 3).to_text():
    ...     print(row)
    0F0 0F1 0F2 3F0 3I0 3W0 3F1 3I1 3W1 0I0 0W0 3F2 3I2 3W2 0I1 0W1 0I2 0W2
    1F0 2F0 1F1 2F1 2I0 2W0 1F2 1I0 1W0 2F2 2I1 2W1 1I1 2I2 1I2 1W1 2W2 1W2

    Bubble: none on the span's clock at F = I = W, for m ≥ 2p − 1; the makespan is (p−1)/2 of F longer, as the last
    rank starts so much later. Activations: at most p, in units of 1/p of the model for one micro-batch. Weights: 1.
    Works for any p and m ≥ 1; fewer than 2p − 1 micro-batches leave their places empty.

    Source: Qi et al., Zero Bubble Pipeline Parallelism, ICLR 2024 (arXiv 2401.10241), §6.

    Args:
        ranks: pipeline ranks p, two stages each.
        microbatches: micro-batches m per step.

    Raises:
        UsageError: a count is below 1.
    """
    require_counts("zb-v", ranks=ranks, microbatches=microbatches)
    places = max(microbatches, 2 * ranks - 1)
    with collector_paused():
        programs = []
        for rank in range(ranks):
            stages = (rank, 2 * ranks - 1 - rank)
            numbers = {(kind, chunk): count() for kind in Kind for chunk in (0, 1)}
            turns = ((kind, chunk, next(numbers[kind, chunk])) for kind, chunk in _zb_v_turns(ranks, rank, places))
            programs.append(
                tuple(Action(kind, stages[chunk], number) for kind, chunk, number in turns if number < microbatches)
            )
    return _on_the_v("zb-v", ranks, microbatches, tuple(programs))


_F0, _I0, _W0 = ((kind, 0) for kind in (Kind.F, Kind.I, Kind.W))
_F1, _I1, _W1 = ((kind, 1) for kind in (Kind.F, Kind.I, Kind.W))


def _zb_v_turns(ranks: int, rank: int, microbatches: int) -> Iterator[tuple[Kind, int]]:
    """Yield ZB-V's (kind, chunk) in the order of one rank, for at least 2p − 1 micro-batches."""
    behind = ranks - rank
    yield from [_F0] * (2 * behind - 1)
    yield from [_F1, _F0] * rank
    yield from [_F1, _I1, _W1] * behind
    # From here a forward of chunk 0 goes in with every backward of it, while there are any.
    steady = microbatches - (2 * behind - 1) - rank
    yield from [_F0, _I0, _W0, _F1, _I1, _W1] * steady
    yield from [_I0, _W0, _F1, _I1, _W1] * (behind - 1)
    yield from [_I0, _I1] * rank
    yield from [_I0, _W0] * behind
    yield from [_W1] * rank
    yield from [_W0] * rank


class _Block(NamedTuple):
    """The slots between one micro-batch's actions, from which a schedule is made by repeating them every six slots.

    Pairs hold chunk 0, which runs down the ranks, and chunk 1, which runs up; the gradients run the other way.
    """

    forward: tuple[int, int]
    """from rank to rank: δF⁰, δF¹"""
    backward: tuple[int, int]
    """from rank to rank: δB⁰, δB¹"""
    forward_turn: int
    """on the last rank, from F of chunk 0 to F of chunk 1"""
    loss_turn: int
    """on the first rank, from F of chunk 1 to I of chunk 1"""
    backward_turn: int
    """on the last rank, from I of chunk 1 to I of chunk 0"""

    def slots(self, ranks: int, rank: int) -> tuple[int, int, int, int]:
        """Return the slots of F and F, I and I of the chunks 0, 1, 1, 0 on ``rank``, counted from the first F."""
        last, behind = ranks - 1, ranks - 1 - rank
        turned = last * self.forward[0] + self.forward_turn
        loss = turned + last * self.forward[1] + self.loss_turn
        back = loss + last * self.backward[1] + self.backward_turn
        return (
            rank * self.forward[0],
            turned + behind * self.forward[1],
            loss + rank * self.backward[1],
            back + behind * self.backward[0],
        )


_INTERVAL = 6
"""Slots from one micro-batch to the next: two forwards, two I and two W on every rank."""


def v_half(ranks: int, microbatches: int) -> Schedule:
    """Build V-Half: half of 1F1B's activations at half of its bubble.

    >>> for row in v_half(2, 3).to_text():
    ...     print(row)
    0F0 3F0 0F1 3I0 3W0 3F1 0F2 0I0 3I1 0W0 3W1 3F2 0I1 3I2 0W1 3W2 0I2 0W2
    1F0 2F0 1F1 2F1 2I0 1I0 2W0 1F2 1W0 2F2 2I1 1I1 2W1 1W1 2I2 1I2 2W2 1W2

    Bubble of the makespan at F = I = W, for m ≥ p: 3(p−1)/2 for an even p, and ½ less for an odd one above 1, in
    units of F; it is half of 1F1B's. Activations: at most ⌊(p+2)/2⌋, in units of 1/p of the model for one micro-batch.
    Weights: 1. Works for any p and m ≥ 1.

    Source: Qi et al., Pipeline Parallelism with Controllable Memory, NeurIPS 2024 (arXiv 2405.15362), §4. The W run in
    the slots in which nothing else can, or where the memory is full; where that is, is ours.

    Args:
        ranks: pipeline ranks p, two stages each.
        microbatches: micro-batches m per step.

    Raises:
        UsageError: a count is below 1.
    """
    block = _Block((2, 1), (1, 2), forward_turn=2, loss_turn=1 if ranks % 2 else 4, backward_turn=1)
    return _from_blocks("v-half", ranks, microbatches, block, most=(ranks + 2) // 2)


def v_min(ranks: int, microbatches: int) -> Schedule:
    """Build V-Min: a third of 1F1B's activations at two thirds of its bubble.

    >>> for row in v_min(2, 3).to_text():
    ...     print(row)
    0F0 3F0 3I0 0F1 3W0 0I0 0W0 3F1 3I1 0F2 3W1 0I1 0W1 3F2 3I2 3W2 0I2 0W2
    1F0 2F0 2I0 1I0 1F1 2F1 2W0 1W0 2I1 1I1 1F2 2F2 2W1 1W1 2I2 1I2 2W2 1W2

    Bubble of the makespan at F = I = W, for m ≥ p and p > 1: 2(p−1) − ½, or 2(p−1) + ½ where 3 divides p, in units of
    F; it is near two thirds of 1F1B's. With other costs every repetition has a bubble of its own, as there is no memory
    to spare. Activations: at most ⌊(p+4)/3⌋, in units of 1/p of the model for one micro-batch. Weights: 1. Works for
    any p and m ≥ 1.

    Source: Qi et al., Pipeline Parallelism with Controllable Memory, NeurIPS 2024 (arXiv 2405.15362), §4. The W run in
    the slots in which nothing else can, or where the memory is full; where that is, is ours.

    Args:
        ranks: pipeline ranks p, two stages each.
        microbatches: micro-batches m per step.

    Raises:
        UsageError: a count is below 1.
    """
    block = _Block((1, 1), (1, 1), forward_turn=1, loss_turn=1 if ranks % 3 else 3, backward_turn=1)
    return _from_blocks("v-min", ranks, microbatches, block, most=(ranks + 4) // 3)


def _from_blocks(name: str, ranks: int, microbatches: int, block: _Block, most: int) -> Schedule:
    """Repeat ``block`` for every micro-batch, then fill W in, holding at most ``most`` micro-batches on a rank."""
    require_counts(name, ranks=ranks, microbatches=microbatches)
    with collector_paused():
        orders = []
        for rank in range(ranks):
            down, up = rank, 2 * ranks - 1 - rank
            slots = block.slots(ranks, rank)
            parts = zip(slots, (Kind.F, Kind.F, Kind.I, Kind.I), (down, up, up, down), strict=True)
            timetable = [
                (slot + _INTERVAL * microbatch, Action(kind, stage, microbatch))
                for slot, kind, stage in parts
                for microbatch in range(microbatches)
            ]
            orders.append(deque(action for _, action in sorted(timetable)))
        programs = _with_weight_grads_where_idle(orders, 2 * ranks, most=2 * most)
    return _on_the_v(name, ranks, microbatches, programs)


def _with_weight_grads_where_idle(
    orders: list[deque[Action]], num_stages: int, most: int
) -> tuple[tuple[Action, ...], ...]:
    """Run F and I in the given orders in equal slots; a rank runs its oldest W when it cannot run the next of them.

    A forward that would make a rank hold more than ``most`` stages' activations cannot run.
    """
    programs: list[list[Action]] = [[] for _ in orders]
    waiting: list[deque[Action]] = [deque() for _ in orders]
    held = [0] * len(orders)
    done: set[tuple[Phase, int, int | None]] = set()
    needed = [_needed(order, num_stages) for order in orders]
    while any(orders) or any(waiting):
        slot: list[Action] = []
        for rank, order in enumerate(orders):
            free = bool(order) and (order[0].kind is Kind.I or held[rank] < most)
            if free and done.issuperset(needed[rank]):
                action = order.popleft()
                needed[rank] = _needed(order, num_stages)
                if action.kind is Kind.F:
                    held[rank] += 1
                else:
                    waiting[rank].append(Action(Kind.W, action.stage, action.microbatch))
            elif waiting[rank]:
                action = waiting[rank].popleft()
                held[rank] -= 1
            else:
                continue
            programs[rank].append(action)
            slot.append(action)
        assert slot, "a building block whose order needs more memory than its limit"
        done.update((PHASES[kind], stage, microbatch) for kind, stage, microbatch in slot)
    return tuple(map(tuple, programs))


def _needed(order: deque[Action], num_stages: int) -> list[tuple[Phase, int, int | None]]:
    """Return what the next of an order waits for; asked once for each action, however many slots it waits."""
    return [(*need, order[0].microbatch) for need in needs(order[0], num_stages)] if order else []


def _on_the_v(name: str, ranks: int, microbatches: int, programs: tuple[tuple[Action, ...], ...]) -> Schedule:
    return Schedule(name, Placement(ranks, (wave_route(ranks),)), (0,) * microbatches, programs)
