"""Looped breadth-first, GEMS, Hanayo and BitPipe: placements, times and memory."""

from fractions import Fraction

import pytest
from schedules_oracle import assert_complete, run

from chimera.ir.checks import check
from chimera.schedules import bitpipe, chimera, gems, gpipe, hanayo, interleaved, looped_bfs

SMALL = [1, 2, 3, 5, 6]


@pytest.mark.parametrize("build", [looped_bfs, gems, hanayo, bitpipe])
@pytest.mark.parametrize("ranks", SMALL)
def test_any_number_of_microbatches(build, ranks):
    """Each is complete, proved and runs to its end; BitPipe takes even numbers of ranks only."""
    if build is bitpipe and ranks % 2:
        return
    for m in range(1, 2 * ranks + 3):
        for option in [()] if build is gems else [(1,), (2,), (3,)]:
            schedule = build(ranks, m, *option)
            assert_complete(schedule)
            check(schedule, memory_limit=float(max(run(schedule).peaks)))


@pytest.mark.parametrize("ranks", SMALL)
@pytest.mark.parametrize("chunks", [1, 2, 3])
def test_looped_breadth_first(ranks, chunks):
    """The bubble is (p−1)/(v·m+p−1) of the total for m ≥ p, fewer run v times p; every rank holds m."""
    for m in (1, 2, ranks, ranks + 1, 3 * ranks):
        for backward in (1, 2):
            result = run(looped_bfs(ranks, m, chunks), 1, backward)
            turns = (chunks - 1) * max(m, ranks) + m + ranks - 1
            assert result.makespan == Fraction((1 + backward) * turns, chunks)
            assert result.peaks == [m] * ranks
            if m >= ranks:
                assert result.of_total == Fraction(ranks - 1, chunks * m + ranks - 1)
                assert result.of_ideal == Fraction(ranks - 1, chunks * m)


def test_looped_breadth_first_is_gpipe_on_the_looped_placement():
    """With one chunk it is GPipe; its placement is that of interleaved."""
    assert looped_bfs(4, 6, 1).actions == gpipe(4, 6).actions
    assert looped_bfs(4, 6, 3).placement == interleaved(4, 6, 3).placement


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 8])
@pytest.mark.parametrize(("forward", "backward"), [(1, 1), (1, 2), (2, 3)])
def test_gems(ranks, forward, backward):
    """The step takes m·p·B + p·F + (m−1)·F at one micro-batch's activations, on two copies of the weights."""
    for m in (1, 2, 7, 12):
        schedule = gems(ranks, m)
        result = run(schedule, forward, backward)
        assert result.makespan == m * ranks * backward + (ranks + m - 1) * forward
        assert result.peaks == [1] * ranks
    assert schedule.placement.routes == (tuple(range(ranks)), tuple(reversed(range(ranks))))


def test_gems_tends_to_the_papers_bubble():
    """With B = 2F and many micro-batches the share of the total is near (p−1)/(p+½)."""
    for ranks in (2, 4, 8):
        assert float(run(gems(ranks, 400)).of_total) == pytest.approx((ranks - 1) / (ranks + 0.5), abs=2e-3)


@pytest.mark.parametrize("ranks", SMALL)
@pytest.mark.parametrize("waves", [1, 2, 3])
@pytest.mark.parametrize("units", [1, 2, 3])
def test_hanayo(ranks, waves, units):
    """(p−1)/(2wm+p−1) of the total for F = B; for B = 2F 3m + (p−1)(m/p+1)/w; at most p micro-batches held."""
    m = units * ranks
    schedule = hanayo(ranks, m, waves)
    assert run(schedule, 1, 1).of_total == Fraction(ranks - 1, 2 * waves * m + ranks - 1)
    assert run(schedule).makespan == 3 * m + Fraction((ranks - 1) * (units + 1), waves)
    assert max(run(schedule).peaks) == ranks
    assert max(run(hanayo(ranks, m + 1, waves)).peaks) == min(m + 1, ranks)


@pytest.mark.parametrize("ranks", [2, 4, 6, 8])
@pytest.mark.parametrize("waves", [1, 2, 3])
@pytest.mark.parametrize("units", [1, 2, 3])
def test_bitpipe(ranks, waves, units):
    """(p−2)/(4wm+p−2) of the total for F = B; for B = 2F 3m + (p−2)(m/p+1)/(2w); at most p micro-batches held."""
    m = units * ranks
    schedule = bitpipe(ranks, m, waves)
    assert run(schedule, 1, 1).of_total == Fraction(ranks - 2, 4 * waves * m + ranks - 2)
    assert run(schedule).makespan == 3 * m + Fraction((ranks - 2) * (units + 1), 2 * waves)
    assert run(schedule).makespan <= run(chimera(ranks, m)).makespan
    assert max(run(schedule).peaks) == ranks


def test_wave_placements():
    """Stages go down the ranks and up again; BitPipe's second route mirrors its first."""
    assert hanayo(3, 1, 2).placement.routes == ((0, 1, 2, 2, 1, 0, 0, 1, 2, 2, 1, 0),)
    assert bitpipe(4, 1).placement.routes == ((0, 1, 2, 3, 3, 2, 1, 0), (3, 2, 1, 0, 0, 1, 2, 3))


def test_a_small_step_of_bitpipe_uses_both_directions():
    """Micro-batches are dealt to the two routes evenly, in a partial unit too."""
    assert bitpipe(8, 3).microbatch_to_route == (0, 0, 1)
    assert bitpipe(4, 6).microbatch_to_route == (0, 0, 1, 1, 0, 1)
