"""The exact solver closes small cases, states the gap of others, and refuses what it cannot take."""

import sys

import pytest

from chimera.errors import UsageError
from chimera.ir.checks import check
from chimera.ir.costs import Costs
from chimera.schedules.search.exact import closed
from chimera.schedules.search.placements import dealt, place
from chimera.schedules.search.problem import Problem
from chimera.schedules.search.searching import search
from chimera.simulate import simulate


def problem_of(name, ranks, microbatches, limit, costs=None):
    placement = place(name, ranks)
    routes = dealt(microbatches, len(placement.routes))
    return Problem(placement, routes, Costs() if costs is None else costs, limit)


def test_proves_a_case_that_the_bound_leaves_open():
    """A linear pipeline with room for three of eight micro-batches takes 31; the bound alone says 27."""
    pytest.importorskip("ortools")
    problem = problem_of("linear", 4, 8, 3)
    found = search(problem, effort=0)
    assert found.bound.value == 27
    result = closed(problem, found, limit=5)
    check(result.schedule, memory_limit=3)
    assert (result.value, result.bound.value, result.gap) == (31, 31, 0)
    assert "exact solver" in result.bound.reason


def test_finds_what_no_rule_does():
    """Three micro-batches on two ranks in both directions take 9; a whole backward below I + W is a choice too."""
    pytest.importorskip("ortools")
    problem = problem_of("bidirectional", 2, 3, 2)
    result = closed(problem, search(problem, effort=0), limit=5)
    check(result.schedule, memory_limit=2)
    assert simulate(result.schedule, problem.costs).makespan == 9 == result.bound.value
    cheap = problem_of("linear", 2, 2, 2, Costs(forward=1, backward=1.5, input_grad=1, weight_grad=1))
    result = closed(cheap, search(cheap, effort=0), limit=5)
    assert result.gap == 0
    assert simulate(result.schedule, cheap.costs).makespan == result.value


def test_states_the_gap_it_leaves():
    """Without time the answer is the search's, and its gap stays."""
    pytest.importorskip("ortools")
    problem = problem_of("vee", 4, 8, 2)
    found = search(problem, effort=0)
    result = closed(problem, found, limit=0.01)
    assert (result.schedule.actions, result.gap) == (found.schedule.actions, found.gap)
    assert result.gap > 0


@pytest.mark.parametrize(
    ("problem", "message"),
    [
        (problem_of("vee", 8, 64, 3), r"--exact: got 3072 computations; needed: at most 1000"),
        (problem_of("vee", 4, 8, 2, Costs(forward=1, backward=3.14159265)), r"--exact: the times are not multiples"),
        (problem_of("vee", 4, 8, 2, Costs(forward=0)), r"--exact: a computation takes no time"),
    ],
)
def test_refuses_what_it_cannot_take(problem, message):
    """Too many computations, times without a common step and empty computations are named."""
    pytest.importorskip("ortools")
    with pytest.raises(UsageError, match=message):
        closed(problem, search(problem, effort=0))


def test_names_the_extra_that_is_missing(monkeypatch):
    """Without ortools the message says which extra to install."""
    for module in ("ortools", "ortools.sat.python"):
        monkeypatch.setitem(sys.modules, module, None)
    problem = problem_of("linear", 4, 8, 3)
    with pytest.raises(UsageError, match=r"pip install 'chimera-pipeline\[solve\]'"):
        closed(problem, search(problem, effort=0))
