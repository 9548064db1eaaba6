"""DualPipe and DualPipeV: the published counts, both figures of a pair, memory, and what is refused."""

from collections import Counter

import pytest
from schedules_oracle import assert_complete, run

from chimera.errors import UsageError
from chimera.ir.action import Kind, Overlap
from chimera.ir.checks import check
from chimera.ir.costs import Costs
from chimera.schedules import dualpipe, dualpipev
from chimera.simulate import simulate


@pytest.mark.parametrize("build", [dualpipe, dualpipev])
@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 6, 8])
def test_complete_and_proved(build, ranks):
    """Each is complete and proved within p + 1 (DualPipe) or p + ½ (DualPipeV) micro-batches."""
    if build is dualpipe and ranks % 2:
        return
    for m in (2 * ranks, 2 * ranks + 2, 3 * ranks + ranks % 2, 5 * ranks + ranks % 2):
        schedule = build(ranks, m)
        assert_complete(schedule)
        held = ranks + (1 if build is dualpipe else 0.5)
        check(schedule, memory_limit=held)
        assert run(schedule).peaks == [held] * ranks


def turns(program, near: frozenset[int]) -> list[str]:
    """Write each instruction as kinds and directions: 0 where its stage is in ``near``, else 1."""
    return [
        "".join(f"{action.kind.name}{int(action.stage not in near)}" for action in parts)
        for instruction in program
        for parts in [instruction if isinstance(instruction, Overlap) else [instruction]]
    ]


def counted(r: int, p: int, m: int) -> list[str]:
    """Return the turns of a rank from the published counts, with the second half of the last backwards split."""
    middle = r == p // 2 - 1
    steady = ["F0B1", "F1B0"] * (m // 2 - p + r + 1)
    if middle:
        steady = ["F0", "B1", *steady[1:]]
    last = ["B1", "B0"] * (r + 1)
    return [
        *["F0"] * (2 * (p // 2 - r - 1)),
        *["F0", "F1"] * (r + 1),
        *["I1", "W1", "F1"] * (p // 2 - r - 1),
        *steady,
        *["B1", "F1B0"] * (p // 2 - r - 1),
        *last[: r + 1],
        *[turn.replace("B", "I") for turn in last[r + 1 :]],
    ]


@pytest.mark.parametrize(("p", "m"), [(2, 4), (4, 8), (8, 20), (12, 24)])
def test_published_counts(p, m):
    """Every rank takes the published turns as often as published, mirrored between the halves of the ranks."""
    schedule = dualpipe(p, m)
    for rank, program in enumerate(schedule.actions):
        r = min(rank, p - 1 - rank)
        # Only r < p/2 is near a direction's start; of its two stages that is the smaller one.
        got = turns(program, frozenset({r}))
        expected = counted(r, p, m)
        assert got[: len(expected)] == expected
        rest = [turn[0] for turn in got[len(expected) :]]
        assert rest == ["W", "I"] * (p // 2 - r - 1) + ["W"] * (r + 1)


@pytest.mark.parametrize(("m", "together", "apart"), [(16, 54, 51), (20, 66, 63), (32, 102, 99)])
def test_both_figures_of_a_pair(m, together, apart):
    """At p = 8 and F = I = W = 1 the makespan is m·3 + 6 with indivisible pairs, m·3 + 3 with F, then B."""
    schedule = dualpipe(8, m)
    assert simulate(schedule, Costs(), pairs_together=True).makespan == together
    assert simulate(schedule, Costs(), pairs_together=False).makespan == apart == run(schedule).makespan


@pytest.mark.parametrize(("f", "i", "w"), [(1, 1, 1), (2, 2, 1), (5, 5, 3)])
@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_bubble(ranks, f, i, w):
    """The bubble is (p/2−1)(F&B + B − 3W), and DualPipeV's has p − 1 in place of p − 2."""
    costs = Costs(forward=f, backward=i + w, input_grad=i, weight_grad=w)
    each = (f + i + w) + (i + w) - 3 * w
    for m in (2 * ranks, 4 * ranks):
        bubble = simulate(dualpipe(ranks, m), costs).makespan - m * (f + i + w)
        assert bubble == pytest.approx((ranks - 2) / 2 * each)
        for p in (ranks - 1, ranks):
            folded = simulate(dualpipev(p, m), costs).makespan - m * (f + i + w)
            assert folded == pytest.approx((p - 1) / 2 * each)


def test_dualpipev_is_dualpipe_cut_in_half():
    """DualPipeV's programs are those of the first half of DualPipe's ranks, with the other way's stages folded in."""
    p, n = 4, 10
    whole, folded = dualpipe(2 * p, 2 * n), dualpipev(p, n)
    for rank in range(p):
        assert turns(folded.actions[rank], frozenset(range(p))) == turns(whole.actions[rank], frozenset(range(p)))


def test_placements_and_directions():
    """DualPipe's halves of the micro-batches go down and up; DualPipeV has one route, a V."""
    assert dualpipe(4, 8).placement.routes == ((0, 1, 2, 3), (3, 2, 1, 0))
    assert dualpipe(4, 8).microbatch_to_route == (0, 0, 0, 0, 1, 1, 1, 1)
    assert dualpipev(3, 6).placement.routes == ((0, 1, 2, 2, 1, 0),)
    pairs = Counter(type(instruction) is Overlap for program in dualpipe(4, 8).actions for instruction in program)
    assert pairs[True] > 0
    assert all(o.backward.kind is Kind.B for row in dualpipe(4, 8).actions for o in row if isinstance(o, Overlap))


@pytest.mark.parametrize(
    ("build", "ranks", "m", "needed", "legal"),
    [
        (dualpipe, 8, 15, "an even number of at least 2·ranks = 16", "16"),
        (dualpipe, 8, 1, "an even number of at least 2·ranks = 16", "16"),
        (dualpipe, 8, 17, "an even number of at least 2·ranks = 16", "16 or 18"),
        (dualpipe, 2, 7, "an even number of at least 2·ranks = 4", "6 or 8"),
        (dualpipev, 3, 5, "at least 2·ranks = 6", "6"),
    ],
)
def test_too_few_or_odd(build, ranks, m, needed, legal):
    """Too few micro-batches, or an odd number for two directions, are refused with the nearest that work."""
    with pytest.raises(UsageError) as caught:
        build(ranks, m)
    assert str(caught.value) == (
        f"{build.__name__}: got --microbatches {m} with --ranks {ranks}; needed: {needed}; try --microbatches {legal}"
    )
