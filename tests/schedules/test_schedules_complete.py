"""Every schedule is complete and runs to its end, for every small case of its options."""

import pytest
from schedules_oracle import assert_complete, run

from chimera.ir.action import Action
from chimera.schedules import chimera, gpipe, interleaved, one_f_one_b


def divisors(n: int) -> list[int]:
    return [k for k in range(1, n + 1) if n % k == 0]


@pytest.mark.parametrize("build", [gpipe, one_f_one_b])
@pytest.mark.parametrize("ranks", range(1, 9))
def test_one_stage_per_rank(build, ranks):
    """GPipe and 1F1B work for any number of ranks and micro-batches."""
    for microbatches in range(1, 3 * ranks + 2):
        schedule = build(ranks, microbatches)
        assert_complete(schedule)
        assert run(schedule).makespan == 3 * (microbatches + ranks - 1)


@pytest.mark.parametrize("ranks", range(1, 9))
@pytest.mark.parametrize("chunks", range(1, 5))
def test_interleaved_takes_any_number_of_microbatches(ranks, chunks):
    """Interleaved schedules are complete whether or not the ranks divide the micro-batches."""
    for microbatches in range(1, 3 * ranks + 2):
        schedule = interleaved(ranks, microbatches, chunks)
        assert_complete(schedule)
        run(schedule)


@pytest.mark.parametrize("unit", ["concatenate", "double", "halve"])
@pytest.mark.parametrize(("ranks", "pairs"), [(p, f) for p in (2, 4, 6, 8, 10, 12, 16) for f in divisors(p // 2)])
def test_chimera_takes_any_number_of_microbatches(ranks, pairs, unit):
    """Chimera is complete for every number of pairs, every unit and a partial last one."""
    last = 3 * ranks + 1
    for microbatches in (
        range(1, last + 1) if ranks <= 8 else (1, 2, 3, ranks - 1, ranks, ranks + 1, 2 * ranks + 3, last)
    ):
        schedule = chimera(ranks, microbatches, pairs, unit)
        assert_complete(schedule)
        run(schedule)
        assert schedule.num_microbatches * schedule.microbatch_share == microbatches


@pytest.mark.parametrize("microbatches", range(1, 9))
def test_a_small_step_uses_every_route_it_reaches(microbatches):
    """Fewer micro-batches than ranks spread over the routes, at most one apart."""
    for pairs in (1, 2, 4):
        taken = chimera(8, microbatches, pairs).microbatch_to_route
        counts = [taken.count(route) for route in range(2 * pairs)]
        assert max(counts) - min(counts) <= 1
        assert sum(counts) == microbatches


def test_programs_hold_plain_actions():
    """Programs are tuples of actions and schedules are values: equal arguments give equal schedules."""
    for schedule in (gpipe(4, 3), one_f_one_b(4, 3), interleaved(4, 3, 2), chimera(4, 3)):
        assert all(type(program) is tuple for program in schedule.actions)
        assert all(type(action) is Action for program in schedule.actions for action in program)
    assert chimera(8, 11, 2) == chimera(8, 11, 2)
