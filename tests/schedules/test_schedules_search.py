"""The list scheduler reaches the figures it is held to, never beats its bound, and never breaks its cap."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from chimera.errors import InfeasibleError, UsageError
from chimera.ir.checks import check
from chimera.ir.costs import Costs, StageCosts
from chimera.ir.memory import peak_activations
from chimera.ir.schedule import Placement
from chimera.passes.lower import lower
from chimera.schedules import build_schedule
from chimera.schedules.search.bounds import lower_bound
from chimera.schedules.search.chimera_zb import chimera_zb
from chimera.schedules.search.placements import dealt, place
from chimera.schedules.search.problem import Problem
from chimera.schedules.search.published import published
from chimera.schedules.search.searching import search
from chimera.simulate import simulate


def problem_of(name, ranks, microbatches, limit, costs=None, **options):
    """Return the problem of a placement by name."""
    placement = place(name, ranks, **options)
    routes = dealt(microbatches, len(placement.routes))
    return Problem(placement, routes, Costs(forward=1, backward=2) if costs is None else costs, limit)


def proved(problem, found):
    """Check what a search found: complete, ordered, within the cap, lowered, timed, and not below the bound."""
    check(found.schedule, memory_limit=problem.memory_limit)
    check(lower(found.schedule))
    timeline = simulate(found.schedule, problem.costs)
    value = timeline.makespan if found.objective == "makespan" else timeline.span
    assert found.value == value
    assert value >= found.bound.value * (1 - 1e-9)
    return value


@pytest.mark.parametrize(
    ("name", "pairs", "ranks", "microbatches", "makespan"),
    [
        ("bidirectional", 1, 4, 4, 13),
        ("bidirectional", 1, 8, 8, 27),
        ("bidirectional", 1, 8, 16, 51),
        ("bidirectional", 1, 8, 32, 99),
        ("bidirectional", 1, 8, 128, 387),
        ("bidirectional", 2, 8, 32, 97),
        ("vee", None, 8, 8, 27.5),
        ("vee", None, 8, 32, 99.5),
        ("linear", None, 8, 8, 31),
        ("linear", None, 8, 24, 79),
    ],
)
def test_reaches_the_known_figures(name, pairs, ranks, microbatches, makespan):
    """At F = I = W = 1 and p micro-batches per rank, the makespans of the list scheduler's first results."""
    problem = problem_of(name, ranks, microbatches, ranks, pairs=pairs)
    found = search(problem)
    assert proved(problem, found) == makespan
    assert (found.gap, found.origin) == (0, "list scheduling")


def test_reaches_the_span_of_zb_h2():
    """With memory for 2p − 1 micro-batches no rank of the linear placement idles between its first and last action."""
    problem = problem_of("linear", 8, 24, 15)
    found = search(problem, objective="span")
    assert proved(problem, found) == 72


@pytest.mark.parametrize("pairs", [1, 2, 4])
def test_chimera_zb_meets_the_placements_bound(pairs):
    """chimera-zb takes 3m + p/(2f) − 1 for m a multiple of p, holding no more than Chimera may."""
    for microbatches in (8, 16, 32):
        schedule = chimera_zb(8, microbatches, pairs)
        check(schedule, memory_limit=8)
        assert simulate(schedule, Costs(forward=1, backward=2)).makespan == 3 * microbatches + 8 / (2 * pairs) - 1
        assert schedule.name == "chimera-zb"
        assert schedule.placement == build_schedule("chimera", ranks=8, microbatches=8, pairs=pairs).placement


@pytest.mark.parametrize("ranks", range(2, 17, 2))
def test_chimera_zb_holds_for_every_size(ranks):
    """Any even p and any m give a proved schedule, at its lower bound from p micro-batches on."""
    for microbatches in sorted({1, 2, ranks - 1, ranks, ranks + 1, 2 * ranks + 3}):
        schedule = chimera_zb(ranks, microbatches)
        check(schedule, memory_limit=ranks)
        check(lower(schedule))
        bound = lower_bound(Problem.uniform(schedule.placement, schedule.microbatch_to_route, ranks)).value
        makespan = simulate(schedule, Costs(forward=1, backward=2)).makespan
        assert makespan >= bound
        assert microbatches < ranks or microbatches % 2 or makespan == 3 * microbatches + ranks / 2 - 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"ranks": 5, "microbatches": 8}, r"chimera-zb: got --ranks 5; needed: an even number.*try --ranks 4 or 6"),
        ({"ranks": 8, "microbatches": 8, "pairs": 3}, r"chimera-zb: got --pairs 3.*try --pairs 2 or 4"),
        ({"ranks": 8, "microbatches": 0}, r"chimera-zb: got --microbatches 0.*try --microbatches 1"),
    ],
)
def test_chimera_zb_refuses_what_the_placement_cannot_take(options, message):
    """The message has the schedule's own name and the nearest sizes."""
    with pytest.raises(UsageError, match=message):
        chimera_zb(**options)


def test_equal_calls_give_equal_schedules():
    """The search depends on the question, the seed and the effort, and on nothing else; compiled code agrees."""
    costs = Costs(forward=1, backward=2.1, p2p=0.13, input_grad=1.2, weight_grad=1.1)
    problem = problem_of("vee", 4, 9, 3.0, costs)
    results = [search(problem, seed=3, effort=30_000, compiled=compiled).schedule for compiled in (False, False, True)]
    assert results[0].actions == results[1].actions == results[2].actions
    assert chimera_zb(6, 9).actions == chimera_zb(6, 9).actions


@st.composite
def problems(draw):
    """Draw a placement, uneven costs and a cap at or above the least."""
    name = draw(st.sampled_from(["linear", "looped", "vee", "bidirectional", "own"]))
    ranks = draw(st.sampled_from([2, 4, 6] if name == "bidirectional" else [1, 2, 3, 4, 5]))
    options = {"chunks": draw(st.integers(1, 3))} if name in {"looped", "vee"} else {}
    if name == "own":
        # Any map of stages to ranks, on several routes.
        stages = draw(st.integers(1, 4))
        ranked = st.tuples(*[st.integers(0, ranks - 1)] * stages)
        placement = Placement(ranks, tuple(draw(st.lists(ranked, min_size=1, max_size=3))))
    else:
        placement = place(name, ranks, **options)
    stages = placement.num_stages
    microbatches = draw(st.integers(1, 9))
    times = st.lists(st.floats(0.0, 3.0), min_size=stages, max_size=stages)
    costs = StageCosts(
        forward_s=draw(times),
        backward_s=draw(times),
        input_grad_s=draw(times),
        weight_grad_s=draw(times),
        latency_s=draw(st.sampled_from([0.0, 0.1, 1.0])),
    )
    routes = dealt(microbatches, len(placement.routes))
    least = Problem(placement, routes, costs).route_need[: max(routes) + 1].max()
    limit = draw(st.sampled_from([None, least, 1.5 * least, 3 * least]))
    return Problem(placement, routes, costs, limit)


@given(problems(), st.sampled_from(["makespan", "span"]))
@settings(max_examples=120, deadline=None)
def test_any_answer_is_proved(problem, objective):
    """Whatever the placement, the times and the cap: complete, in order, within the cap, never below the bound."""
    proved(problem, search(problem, objective=objective, effort=0))


@given(problems(), st.randoms(use_true_random=False))
@settings(max_examples=60, deadline=None)
def test_the_bound_holds_for_orders_that_no_rule_makes(problem, random):
    """Random legal orders, without a cap, take no less than the bound on either clock."""
    free = Problem(problem.placement, problem.microbatch_to_route, problem.costs)
    schedule = random_order(free, random)
    timeline = simulate(schedule, free.costs)
    for objective, value in (("makespan", timeline.makespan), ("span", timeline.span)):
        assert value >= lower_bound(free, objective).value * (1 - 1e-9)
    limit = max(peak_activations(schedule))
    capped = Problem(problem.placement, problem.microbatch_to_route, problem.costs, limit)
    assert timeline.makespan >= lower_bound(capped).value * (1 - 1e-9)


def random_order(problem, random):
    """Return a schedule that runs, step by step, any computation whose needs are met, split or whole."""
    programs = [[] for _ in range(problem.num_ranks)]
    last = problem.num_stages - 1
    open_ = [("F", 0, j) for j in range(len(problem.microbatch_to_route))]
    while open_:
        kind, stage, microbatch = open_.pop(random.randrange(len(open_)))
        if kind == "G":
            kind = random.choice("BI")
        rank = problem.placement.routes[problem.microbatch_to_route[microbatch]][stage]
        programs[rank].append(f"{stage}{kind}{microbatch}")
        if kind == "F":
            open_.append(("F", stage + 1, microbatch) if stage < last else ("G", stage, microbatch))
        elif kind in "BI" and stage > 0:
            open_.append(("G", stage - 1, microbatch))
        if kind == "I":
            open_.append(("W", stage, microbatch))
    empty = problem.schedule("random", ((),) * problem.num_ranks)
    return empty.from_text(
        list(map(" ".join, programs)),
        routes=problem.placement.routes,
        microbatch_to_route=problem.microbatch_to_route,
    )


@pytest.mark.parametrize(
    ("name", "limit", "options", "least"),
    [
        ("linear", 0.5, {}, "1"),
        ("vee", 0.9, {}, "1"),
        ("vee", 0.4, {"chunks": 4}, "1"),
        ("bidirectional", 0.99, {}, "1"),
    ],
)
def test_a_cap_below_any_order_is_infeasible(name, limit, options, least):
    """The message says the least that any order holds, and at that cap there is an order."""
    with pytest.raises(InfeasibleError, match=rf"no order holds less than {least} .*at least --memory-limit {least}"):
        problem_of(name, 4, 6, limit, **options)
    problem = problem_of(name, 4, 6, 1.0, **options)
    proved(problem, search(problem, effort=0))
    assert max(peak_activations(search(problem, effort=0).schedule)) == 1


def test_a_cap_in_bytes_counts_weights_and_uneven_stages():
    """Bytes per stage and resident weights bound what is held; too few bytes name the least and its rank."""
    costs = StageCosts(
        forward_s=[1, 1, 1, 2],
        backward_s=[2, 2, 2, 4],
        activation_bytes=[300, 100, 100, 200],
        weight_bytes=[50, 10, 10, 70],
    )
    placement = place("linear", 4)
    problem = Problem(placement, dealt(8, 1), costs, memory_limit_bytes=700)
    found = search(problem, effort=0)
    check(found.schedule)
    assert max(found.timeline.peak_bytes) <= 700
    assert found.timeline.peak_bytes[0] == 650
    with pytest.raises(InfeasibleError, match=r"less than 350 bytes on rank 0.*at least --memory-limit 350B"):
        Problem(placement, dealt(8, 1), costs, memory_limit_bytes=300)
    with pytest.raises(UsageError, match="activation_bytes"):
        Problem(placement, dealt(8, 1), Costs(), memory_limit_bytes=300)


def test_chooses_the_whole_backward_where_a_split_costs_more():
    """Where I and W take more than B, the answer uses B where a split gains nothing."""
    costs = Costs(forward=1, backward=2, input_grad=1.5, weight_grad=1.5)
    problem = problem_of("linear", 4, 16, 4, costs)
    found = search(problem, effort=20_000)
    assert proved(problem, found) <= simulate(build_schedule("1f1b", ranks=4, microbatches=16), costs).makespan
    counts = np.bincount(found.schedule.table.kind, minlength=4)
    assert counts[1] > counts[2] == counts[3]


def test_a_published_schedule_stands_in_where_it_is_better():
    """An alternative that beats the search is returned under the search's name, and both values are kept."""
    costs = Costs(forward=1, backward=2)
    problem = problem_of("linear", 4, 8, 4, Costs(forward=1, backward=2, input_grad=3, weight_grad=3))
    names = [schedule.name for schedule in published(problem_of("linear", 4, 8, 4, costs))]
    assert "1f1b" in names
    found = search(problem, effort=0, alternatives=published(problem))
    best = min(value for _, value in found.alternatives)
    assert found.value == min(best, found.searched)
    check(found.schedule, memory_limit=4)


PLACEMENTS = ("linear", "looped", "vee", "bidirectional")


def worse_than_published(name, ranks, microbatches, limit):
    """Return the published schedules of the same placement and memory that beat the answer on either clock."""
    problem = problem_of(name, ranks, microbatches, limit)
    beaten = []
    for objective in ("makespan", "span"):
        found = search(problem, objective=objective, effort=0, alternatives=published(problem), compiled=False)
        for schedule in published(problem):
            timeline = simulate(schedule, problem.costs)
            value = timeline.makespan if objective == "makespan" else timeline.span
            if value < found.value * (1 - 1e-9):
                beaten.append((schedule.name, objective, value, found.value))
    return beaten


@pytest.mark.parametrize("name", PLACEMENTS)
@pytest.mark.parametrize(("ranks", "microbatches"), [(2, 3), (4, 4), (4, 13), (6, 12)])
def test_is_never_worse_than_the_best_published(name, ranks, microbatches):
    """For the same placement and memory, no schedule of the registry beats the answer, on either clock."""
    for limit in (ranks / 2 + 1, ranks, 2 * ranks):
        assert worse_than_published(name, ranks, microbatches, limit) == []


@pytest.mark.long
@pytest.mark.parametrize("name", PLACEMENTS)
@pytest.mark.parametrize("ranks", range(2, 17))
def test_is_never_worse_than_the_best_published_of_any_size(name, ranks):
    """The same for every p in 2…16 and m in p…4p at p micro-batches per rank."""
    if name == "bidirectional" and ranks % 2:
        pytest.skip("the two directions need an even number of ranks")
    for microbatches in range(ranks, 4 * ranks + 1):
        assert worse_than_published(name, ranks, microbatches, ranks) == []


def test_a_v_of_sixteen_ranks_meets_its_bound():
    """The V placement at p = 16, m = 128: makespan 391.5."""
    problem = problem_of("vee", 16, 128, 16)
    found = search(problem)
    assert proved(problem, found) == 3 * 128 + 7.5


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("veee", {}, r"--placement veee.*did you mean 'vee'"),
        ("linear", {"chunks": 2}, r"takes no --chunks, got 2"),
        ("vee", {"pairs": 2}, r"takes no --pairs, got 2"),
        ("looped", {"chunks": 0}, r"--chunks 0.*try --chunks 1"),
    ],
)
def test_placements_refuse_what_they_do_not_take(name, options, message):
    """An option of another placement is refused, not dropped."""
    with pytest.raises(UsageError, match=message):
        place(name, 4, **options)
