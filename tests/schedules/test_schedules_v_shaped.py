"""ZB-V, V-Half and V-Min: times, memory, and the rules of the building blocks."""

from collections import Counter
from fractions import Fraction

import pytest
from schedules_oracle import assert_complete, run

from chimera.ir.action import Kind
from chimera.ir.checks import check
from chimera.schedules import one_f_one_b, v_half, v_min, zb_v

LIMITS = {zb_v: lambda p: p, v_half: lambda p: (p + 2) // 2, v_min: lambda p: (p + 4) // 3}


@pytest.mark.parametrize("build", LIMITS)
@pytest.mark.parametrize("ranks", range(1, 9))
def test_any_number_of_microbatches_within_memory(build, ranks):
    """Each is complete and proved within its memory for any number of ranks and micro-batches."""
    for m in sorted({1, 2, 3, ranks, 2 * ranks - 1, 2 * ranks + 1}):
        schedule = build(ranks, m)
        assert_complete(schedule)
        check(schedule, memory_limit=min(m, LIMITS[build](ranks)))
    assert schedule.placement.routes == ((*range(ranks), *reversed(range(ranks))),)


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 7, 8, 12, 16])
def test_zb_v_has_no_bubble(ranks):
    """At F = I = W the span is 3m from m = 2p − 1 on, the makespan (p − 1)/2 more, and every rank holds p."""
    for m in (2 * ranks - 1, 2 * ranks, 3 * ranks + 1):
        result = run(zb_v(ranks, m))
        assert (result.span, result.makespan) == (3 * m, 3 * m + Fraction(ranks - 1, 2))
        assert result.peaks == [ranks] * ranks


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 7, 8, 12, 16])
def test_v_half_has_half_the_bubble(ranks):
    """At F = I = W the makespan is 3m + 3(p − 1)/2 at most, which is half of 1F1B's bubble, at ⌊(p+2)/2⌋ units."""
    for m in (ranks, ranks + 1, 3 * ranks):
        result = run(v_half(ranks, m))
        assert result.makespan == 3 * m + Fraction(3 * (ranks - 1) - (ranks % 2 and ranks > 1), 2)
        assert result.span <= result.makespan
        assert 2 * (result.makespan - 3 * m) <= run(one_f_one_b(ranks, m)).makespan - 3 * m
    assert max(result.peaks) == min(3 * ranks, (ranks + 2) // 2) if ranks > 1 else 1


@pytest.mark.parametrize("ranks", [2, 3, 4, 6, 7, 8, 12, 16])
def test_v_min_has_two_thirds_of_the_bubble(ranks):
    """At F = I = W the bubble is two thirds of 1F1B's, give or take ½, at ⌊(p+4)/3⌋ units."""
    for m in (ranks, ranks + 1, 3 * ranks):
        result = run(v_min(ranks, m))
        extra = Fraction(1, 2) if ranks % 3 == 0 else Fraction(-1, 2)
        assert result.makespan == 3 * m + 2 * (ranks - 1) + extra
        assert result.makespan - 3 * m - extra == Fraction(2, 3) * (run(one_f_one_b(ranks, m)).makespan - 3 * m)
    assert max(result.peaks) == (ranks + 4) // 3


def published_slots(build, p: int) -> list[tuple[int, int, int, int]]:
    """Return per rank the slots of F of chunk 0 and 1, then I of chunk 1 and 0, from the offsets of the paper."""
    if build is v_half:
        f0, f1, b0, b1, f_turn, loss, b_turn = 2, 1, 1, 2, 2, 1 if p % 2 else 4, 1
    else:
        f0, f1, b0, b1, f_turn, loss, b_turn = 1, 1, 1, 1, 1, 1 if p % 3 else 3, 1
    slots = []
    for rank in range(p):
        second = (p - 1) * f0 + f_turn + (p - 1 - rank) * f1
        first_loss = (p - 1) * f0 + f_turn + (p - 1) * f1 + loss
        back = first_loss + (p - 1) * b1 + b_turn + (p - 1 - rank) * b0
        slots.append((rank * f0, second, first_loss + rank * b1, back))
    return slots


@pytest.mark.parametrize("build", [v_half, v_min])
@pytest.mark.parametrize("ranks", range(2, 17))
def test_orders_repeat_the_published_block(build, ranks):
    """A rank's four slots differ modulo the interval of six, and its F and I are in the order of the slots."""
    m = 5
    for rank, (program, slots) in enumerate(zip(build(ranks, m).actions, published_slots(build, ranks), strict=True)):
        assert len({slot % 6 for slot in slots}) == 4
        up = 2 * ranks - 1 - rank
        expected = sorted(
            (slot + 6 * j, kind.name, stage, j)
            for slot, kind, stage in zip(slots, (Kind.F, Kind.F, Kind.I, Kind.I), (rank, up, up, rank), strict=True)
            for j in range(m)
        )
        got = [(a.kind.name, a.stage, a.microbatch) for a in program if a.kind is not Kind.W]
        assert got == [entry[1:] for entry in expected]


def steady_slots(schedule, rank: int) -> list[tuple[Kind, bool]]:
    """Return (kind, whether on the way up) of a rank's program in the middle, where every six actions repeat."""
    program = schedule.actions[rank]
    middle = len(program) // 2 // 6 * 6
    return [(a.kind, a.stage >= schedule.num_ranks) for a in program[middle : middle + 6]]


@pytest.mark.parametrize("build", LIMITS)
@pytest.mark.parametrize("ranks", [2, 5, 6, 9, 16])
def test_every_six_slots_hold_each_kind_once(build, ranks):
    """In the steady state six slots of a rank hold F, I and W of both its stages once each."""
    schedule = build(ranks, 8 * ranks)
    every = Counter((kind, up) for kind in (Kind.F, Kind.I, Kind.W) for up in (False, True))
    assert all(Counter(steady_slots(schedule, rank)) == every for rank in range(ranks))


@pytest.mark.parametrize("build", [zb_v, v_half])
def test_other_costs_run_too(build):
    """The orders are made at F = I = W; at others ZB-V and V-Half still never take longer than 1F1B."""
    for forward, backward, weight in ((2, 3, 1), (3, 7, 3), (1, 3, 2)):
        for ranks in (2, 4, 8):
            m = 4 * ranks
            assert run(build(ranks, m), forward, backward, weight).makespan <= (m + ranks - 1) * (forward + backward)


def test_v_min_needs_equal_costs():
    """V-Min has no memory to spare: at F = 2, I = 2, W = 1 it loses time in every repetition, and to 1F1B."""
    idle = [run(v_min(2, m), 2, 3, 1).makespan - 5 * m for m in (8, 16)]
    assert idle == [Fraction(21, 2), Fraction(37, 2)]
    assert idle[0] > run(one_f_one_b(2, 8), 2, 3).makespan - 5 * 8
