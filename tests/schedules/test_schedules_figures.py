"""Published makespans, bubbles and activations come out exactly."""

from fractions import Fraction

import pytest
from schedules_oracle import run

from chimera.ir.action import Action, Kind
from chimera.ir.schedule import Placement, Schedule
from chimera.schedules import chimera, gpipe, interleaved, one_f_one_b

MAKESPANS = [  # p, m, f, Chimera, 1F1B, ideal; F = 1, B = 2
    (4, 4, 1, 16, 21, 12),
    (6, 6, 1, 26, 33, 18),
    (8, 8, 1, 36, 45, 24),
    (8, 8, 2, 28, 45, 24),
    (8, 8, 4, 24, 45, 24),
    (16, 16, 2, 60, 93, 48),
    (8, 4, 1, 28, 33, 12),
    (4, 8, 1, 30, 33, 24),
    (8, 16, 1, 66, 69, 48),
    (8, 32, 1, 126, 117, 96),
]
EVEN_SHAPES = [(p, f) for p in (2, 4, 6, 8, 12, 16) for f in range(1, p // 2 + 1) if p // 2 % f == 0]


@pytest.mark.parametrize("figures", MAKESPANS)
def test_makespans_of_direct_concatenation(figures):
    """Chimera and 1F1B take the published times with B = 2F."""
    ranks, microbatches, pairs, expected, plain, ideal = figures
    result = run(chimera(ranks, microbatches, pairs))
    assert (result.makespan, result.ideal) == (expected, ideal)
    assert run(one_f_one_b(ranks, microbatches)).makespan == plain


def test_order_of_rank_0():
    """Rank 0 of the paper's figure: micro-batches 0 and 1 go down, 2 and 3 up."""
    schedule = chimera(4, 4)
    assert " ".join(f"{a.kind.name}{a.microbatch}" for a in schedule.actions[0]) == "F0 F1 F2 B2 F3 B3 B0 B1"
    assert schedule.microbatch_to_route == (0, 0, 1, 1)
    assert schedule.placement.routes == ((0, 1, 2, 3), (3, 2, 1, 0))


def test_placement_of_several_pairs():
    """Down route i has stage s on rank (s + i·p/f) mod p, and each up route mirrors its down route."""
    routes = chimera(8, 8, pairs=2).placement.routes
    assert routes[::2] == ((0, 1, 2, 3, 4, 5, 6, 7), (4, 5, 6, 7, 0, 1, 2, 3))
    assert routes[1::2] == ((7, 6, 5, 4, 3, 2, 1, 0), (3, 2, 1, 0, 7, 6, 5, 4))


@pytest.mark.parametrize(("ranks", "pairs"), [*EVEN_SHAPES, (32, 1), (32, 4), (32, 16)])
def test_the_slot_rule_has_no_conflict(ranks, pairs):
    """Each rank's program is its actions sorted by the paper's slots, and no slot is used twice."""
    units = 2
    schedule = chimera(ranks, units * ranks, pairs)
    slots: list[dict[int, Action]] = [{} for _ in range(ranks)]
    for microbatch, route in enumerate(schedule.microbatch_to_route):
        unit, within = divmod(microbatch, ranks)
        j = within % (ranks // (2 * pairs))
        for stage, rank in enumerate(schedule.placement.routes[route]):
            for kind, slot in ((Kind.F, stage + 2 * j), (Kind.B, 2 * ranks - 1 - stage + 2 * j)):
                assert slots[rank].setdefault(2 * ranks * unit + slot, Action(kind, stage, microbatch)).kind is kind
    for taken, program in zip(slots, schedule.actions, strict=True):
        assert len(taken) == len(program)
        assert tuple(taken[slot] for slot in sorted(taken)) == program


@pytest.mark.parametrize(("ranks", "pairs"), EVEN_SHAPES)
@pytest.mark.parametrize("units", [1, 2, 3])
def test_bubble_with_equal_forward_and_backward(ranks, pairs, units):
    """The share of the total is (p−2f)/(2fm+p−2f) for F = B, and concatenation adds no bubble."""
    m = units * ranks
    assert run(chimera(ranks, m, pairs), 1, 1).of_total == Fraction(
        ranks - 2 * pairs, 2 * pairs * m + ranks - 2 * pairs
    )


@pytest.mark.parametrize("ranks", [2, 4, 6, 8, 16])
def test_bubble_with_twice_the_backward(ranks):
    """The share of the total is (p−2)/(3m/2+p−2) for B = 2F, m = p and one pair."""
    assert run(chimera(ranks, ranks)).of_total == Fraction(2 * (ranks - 2), 3 * ranks + 2 * (ranks - 2))


@pytest.mark.parametrize(("ranks", "pairs"), EVEN_SHAPES)
def test_activations_of_chimera(ranks, pairs):
    """The ranks hold p − p/(2f) + 1 to p micro-batches, most in the middle; concatenation holds at most p."""
    peaks = run(chimera(ranks, ranks, pairs)).peaks
    assert (min(peaks), max(peaks)) == (ranks - ranks // (2 * pairs) + 1, ranks)
    assert peaks[ranks // (2 * pairs) - 1] == ranks
    assert max(run(chimera(ranks, 3 * ranks, pairs)).peaks) == ranks


def test_the_middle_ranks_hold_most():
    """Chimera's outermost ranks hold least, the reverse of 1F1B."""
    assert run(chimera(8, 8)).peaks == [5, 6, 7, 8, 8, 7, 6, 5]
    assert run(one_f_one_b(8, 8)).peaks == [8, 7, 6, 5, 4, 3, 2, 1]


def as_indivisible_pairs(schedule: Schedule) -> list[list[tuple[Kind, int, tuple[int, ...]]]]:
    """Return each rank's program as blocks (kind, stage, micro-batches): the two forwards of a pair are one block."""
    programs = []
    for program in schedule.actions:
        blocks: list[tuple[Kind, int, tuple[int, ...]]] = []
        for kind, stage, microbatch in program:
            if kind is Kind.F and microbatch % 2:
                assert blocks[-1] == (kind, stage, (microbatch - 1,)), "the forwards of a pair are neighbours"
                blocks[-1] = (kind, stage, (microbatch - 1, microbatch))
            else:
                blocks.append((kind, stage, (microbatch,)))
        programs.append(blocks)
    return programs


def makespan_in_blocks(schedule: Schedule) -> int:
    """Time the schedule with F = 1, B = 2, where both outputs of a pair of forwards come at its end."""
    ends: dict[tuple[Kind, int, int], int] = {}
    programs = as_indivisible_pairs(schedule)
    clocks = [0] * len(programs)
    last = schedule.num_stages - 1
    while any(programs):
        for rank, blocks in enumerate(programs):
            while blocks:
                kind, stage, members = blocks[0]
                keys = [(Kind.F, stage - 1, j) for j in members if stage] if kind is Kind.F else []
                if kind is Kind.B:
                    keys = [(Kind.F, stage, members[0]), *[(Kind.B, stage + 1, members[0])][: stage != last]]
                if not all(key in ends for key in keys):
                    break
                clocks[rank] = max([clocks[rank], *(ends[key] for key in keys)]) + 2
                ends.update(dict.fromkeys([(kind, stage, j) for j in members], clocks[rank]))
                blocks.pop(0)
    return max(clocks)


@pytest.mark.parametrize(
    ("ranks", "microbatches", "in_blocks", "in_actions"),
    [(4, 8, 28, 27), (4, 16, 52, 51), (4, 32, 100, 99), (8, 16, 60, 57), (8, 32, 108, 105)],
)
def test_forward_doubling_both_ways(ranks, microbatches, in_blocks, in_actions):
    """3m/2 + p − 2 slots when a pair of forwards is indivisible, 3m + 3p/2 − 3 when emitted as two forwards."""
    schedule = chimera(ranks, microbatches, unit="double")
    assert makespan_in_blocks(schedule) == in_blocks == 2 * (3 * microbatches // 2 + ranks - 2)
    assert run(schedule).makespan == in_actions == 3 * microbatches + 3 * ranks // 2 - 3


@pytest.mark.parametrize(("ranks", "pairs"), EVEN_SHAPES)
@pytest.mark.parametrize("units", [1, 3])
def test_doubling_with_several_pairs(ranks, pairs, units):
    """Several pairs leave (p/f − 2) slots of doubling idle, and no rank holds more than the 2p of a unit."""
    m = units * 2 * ranks
    schedule = chimera(ranks, m, pairs, "double")
    assert makespan_in_blocks(schedule) == 2 * (3 * m // 2 + ranks // pairs - 2)
    assert run(schedule).makespan == 3 * m + Fraction(3 * ranks, 2 * pairs) - 3
    assert max(run(schedule).peaks) == 2 * ranks


@pytest.mark.parametrize(("ranks", "pairs"), EVEN_SHAPES)
def test_halving_is_doubling_on_half_microbatches(ranks, pairs):
    """Halving has doubling's timetable at half the cost, and holds no more than the p of direct concatenation."""
    halved, doubled = chimera(ranks, ranks, pairs, "halve"), chimera(ranks, 2 * ranks, pairs, "double")
    assert (halved.actions, halved.microbatch_share) == (doubled.actions, 0.5)
    assert run(halved).makespan * 2 == run(doubled).makespan
    assert max(run(halved).peaks) == ranks
    assert run(halved).makespan < run(chimera(ranks, ranks, pairs)).makespan or ranks == 2 * pairs


@pytest.mark.parametrize("ranks", range(1, 9))
def test_gpipe_and_1f1b(ranks):
    """Bubble (p−1)/(m+p−1) of the total and (p−1)/m of the ideal; activations m and min(m, p − rank)."""
    for m in range(1, 2 * ranks + 2):
        for build, peaks in (
            (gpipe, [m] * ranks),
            (one_f_one_b, [min(m, ranks - rank) for rank in range(ranks)]),
        ):
            for costs in ((1, 2), (1, 1)):
                result = run(build(ranks, m), *costs)
                assert result.of_total == Fraction(ranks - 1, m + ranks - 1)
                assert result.of_ideal == Fraction(ranks - 1, m)
                assert result.peaks == peaks


@pytest.mark.parametrize("ranks", range(1, 9))
@pytest.mark.parametrize("chunks", [1, 2, 3, 4])
@pytest.mark.parametrize("backward", [1, 2])
def test_interleaved_bubble(ranks, chunks, backward):
    """The bubble is (p−1)/(v·m) of the ideal, also with up to p/2 micro-batches above a multiple of p."""
    for m in range(ranks, 4 * ranks + 1):
        if m % ranks <= ranks // 2:
            assert run(interleaved(ranks, m, chunks), 1, backward).of_ideal == Fraction(ranks - 1, chunks * m)


@pytest.mark.parametrize("ranks", range(1, 9))
@pytest.mark.parametrize("chunks", [2, 3, 4])
def test_interleaved_warmup_and_activations(ranks, chunks):
    """2(p − rank − 1) + (v − 1)p forwards, at most m·v, come before the first forward that a backward follows."""
    for m in (ranks, 2 * ranks, 3 * ranks):
        schedule = interleaved(ranks, m, chunks)
        for rank, program in enumerate(schedule.actions):
            warmup = min(2 * (ranks - rank - 1) + (chunks - 1) * ranks, m * chunks)
            ahead = next(place for place, action in enumerate(program) if action.kind is Kind.B)
            assert ahead == min(warmup + 1, m * chunks)
    peaks = run(interleaved(ranks, 2 * ranks, chunks)).peaks
    assert max(peaks) == peaks[0] == ranks + Fraction(ranks - 1, chunks)


@pytest.mark.parametrize("ranks", range(1, 9))
def test_one_chunk_is_1f1b(ranks):
    """With v = 1 the programs are exactly 1F1B's."""
    for m in range(1, 2 * ranks + 2):
        assert interleaved(ranks, m, 1).actions == one_f_one_b(ranks, m).actions


@pytest.mark.parametrize("ranks", range(2, 9))
@pytest.mark.parametrize("chunks", [2, 3, 4])
@pytest.mark.parametrize("backward", [1, 2])
def test_interleaved_never_disappoints(ranks, chunks, backward):
    """Any m takes no longer than m + 1, than the next multiple of p, and than 1F1B; its memory is bounded too."""
    runs = {m: run(interleaved(ranks, m, chunks), 1, backward) for m in range(1, 4 * ranks + 1)}
    for m, result in runs.items():
        whole = runs[-(-m // ranks) * ranks]
        assert m + 1 not in runs or result.makespan <= runs[m + 1].makespan
        assert result.makespan <= whole.makespan
        assert result.makespan <= (1 + backward) * (m + ranks - 1)
        larger = -(-(m % ranks) // (m // ranks)) if m >= ranks and m % ranks <= ranks // 2 else 0
        extra = Fraction((chunks - 1) * larger, chunks)
        assert max(result.peaks) <= max(whole.peaks) + extra


def test_looped_placement():
    """Stage s of an interleaved schedule is on rank s mod p."""
    assert interleaved(3, 3, 2).placement == Placement(3, ((0, 1, 2, 0, 1, 2),))
