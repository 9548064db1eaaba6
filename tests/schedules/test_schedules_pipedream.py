"""PipeDream and PipeDream-2BW: where the updates stand, and which versions of the weights are needed."""

from fractions import Fraction

import pytest
from schedules_oracle import assert_complete, run

from chimera.errors import UsageError
from chimera.ir.action import Kind
from chimera.ir.checks import check
from chimera.ir.versions import weight_versions
from chimera.passes.lower import lower
from chimera.schedules import one_f_one_b, pipedream, pipedream_2bw
from chimera.simulate import simulate


def found(program) -> dict[int, int]:
    """Return after how many updates each forward of a rank stands."""
    updates, versions = 0, {}
    for action in program:
        updates += action.kind is Kind.STEP
        if action.kind is Kind.F:
            versions[action.microbatch] = updates
    return versions


@pytest.mark.parametrize("build", [pipedream, pipedream_2bw])
@pytest.mark.parametrize("ranks", range(1, 6))
def test_complete_proved_and_lowered(build, ranks):
    """Each is complete, proved and can be lowered, and takes as long as 1F1B for all its micro-batches."""
    for m in range(1, 3 * ranks + 1):
        schedule = build(ranks, m)
        assert_complete(schedule)
        check(schedule, memory_limit=min(m, ranks))
        check(lower(schedule))
        assert run(schedule).of_total == Fraction(ranks - 1, m + ranks - 1)
        assert run(schedule).peaks == [min(m, ranks - rank) for rank in range(ranks)]
        assert simulate(schedule).makespan == 3 * (m + ranks - 1)


@pytest.mark.parametrize("build", [pipedream, pipedream_2bw])
def test_without_updates_it_is_1f1b(build):
    """What is left without reductions and updates is 1F1B."""
    for program, plain in zip(build(4, 12).actions, one_f_one_b(4, 12).actions, strict=True):
        assert tuple(action for action in program if action.microbatch is not None) == plain


@pytest.mark.parametrize("ranks", [1, 2, 4, 6])
def test_pipedream_updates_after_every_backward(ranks):
    """Micro-batch j on rank r finds the weights after max(0, j − (p − r − 1)) updates."""
    for rank, program in enumerate(pipedream(ranks, 10).actions):
        assert found(program) == {j: max(0, j - (ranks - rank - 1)) for j in range(10)}
        kinds = [action.kind for action in program]
        assert kinds.count(Kind.STEP) == kinds.count(Kind.REDUCE_GRAD) == 10


@pytest.mark.parametrize(("ranks", "each", "updates"), [(1, 1, 4), (2, 2, 3), (4, 4, 3), (4, 6, 2), (3, 5, 4)])
def test_two_versions_suffice(ranks, each, updates):
    """A group's first forwards stand after g − 1 updates at least, and no backward of it after more than g."""
    schedule = pipedream_2bw(ranks, each * updates, updates)
    assert schedule.microbatch_to_version == tuple(max(0, j // each - 1) for j in range(each * updates))
    for program in schedule.actions:
        assert [action.kind for action in program].count(Kind.STEP) == updates
        assert program[-1].kind is Kind.STEP
        for j, version in found(program).items():
            assert max(0, j // each - 1) <= version <= j // each
        done = 0
        for action in program:
            done += action.kind is Kind.STEP
            assert action.kind is not Kind.B or done == action.microbatch // each


def test_versions_of_the_weights():
    """PipeDream needs p − rank versions, 2BW two, or one if it updates but once, 1F1B one."""
    assert weight_versions(pipedream(4, 12)) == ({0: 4}, {1: 3}, {2: 2}, {3: 1})
    assert weight_versions(pipedream_2bw(4, 12)) == ({0: 2}, {1: 2}, {2: 2}, {3: 2})
    assert weight_versions(pipedream_2bw(4, 12, 1)) == ({0: 1}, {1: 1}, {2: 1}, {3: 1})
    assert weight_versions(one_f_one_b(3, 12)) == ({0: 1}, {1: 1}, {2: 1})


@pytest.mark.parametrize("ranks", range(1, 7))
def test_pipedream_needs_fewer_versions_in_a_short_program(ranks):
    """The first p − rank micro-batches share a version, so all p − rank differ only from m = 2(p − rank) − 2 on."""
    for m in range(1, 14):
        for rank, versions in enumerate(weight_versions(pipedream(ranks, m))):
            depth = ranks - rank
            assert versions[rank] == min(depth, max(2, m - depth + 2), m), (rank, m)


def test_updates_by_default():
    """Without a number there are as many updates as leave p micro-batches to each, or one."""
    taken = {m: str(pipedream_2bw(4, m).to_text()).count("3STEP") for m in (3, 4, 8, 9, 12, 13)}
    assert taken == {3: 1, 4: 1, 8: 2, 9: 1, 12: 3, 13: 1}


@pytest.mark.parametrize(("m", "updates", "legal"), [(12, 2, None), (12, 4, "3"), (12, 5, "3"), (16, 3, "2 or 4")])
def test_updates_that_do_not_fit(m, updates, legal):
    """A number of updates that does not divide m, or leaves less than p to each, is refused with the nearest."""
    if legal is None:
        assert pipedream_2bw(4, m, updates).num_microbatches == m
        return
    with pytest.raises(UsageError) as caught:
        pipedream_2bw(4, m, updates)
    assert str(caught.value) == (
        f"pipedream-2bw: got --updates {updates} with --microbatches {m} and --ranks 4; needed: a divisor of the "
        f"micro-batches that leaves at least ranks to each update; try --updates {legal}"
    )
