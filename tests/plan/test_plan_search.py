"""The search over layouts: against every layout estimated one by one, against simulations, against partition."""

from collections import Counter
from dataclasses import replace
from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from chimera.errors import ChimeraError, ConfigError, InfeasibleError, UsageError
from chimera.ir.memory import peak_activations
from chimera.plan.cutting import cut_by_cost, equal_cut
from chimera.plan.hardware import Cluster
from chimera.plan.hardware_file import read_device, read_software
from chimera.plan.layout import RECOMPUTES, Layout
from chimera.plan.partition import partition
from chimera.plan.planning import plan
from chimera.plan.search.bounded import prices_by_routes
from chimera.plan.search.bounds import placed, tight
from chimera.plan.search.model_pricing import ModelPricing
from chimera.plan.search.paths import counted_path
from chimera.plan.search.searching import search_layouts
from chimera.plan.search.skeleton import _HOP, _RATIOS, _costs, skeleton, traits
from chimera.plan.search.space import SearchSpace, grids
from chimera.plan.search.variants import variants
from chimera.plan.shape import ModelShape
from chimera.simulate import simulate

SMALL = ModelShape(family="gpt", hidden=1024, layers=12, heads=16, vocab=50257, seq=1024)


def cluster_of(count, **memory):
    return Cluster.of(replace(read_device("a100-80"), **memory), count)


def pricing_of(shape, cluster, software="chimera"):
    return ModelPricing(shape, cluster, read_software(software))


@given(blocks=st.integers(1, 24), stages=st.integers(1, 6), embedding=st.floats(0, 1.5), head=st.floats(0, 1.5))
@settings(max_examples=60, deadline=None)
def test_blocks_dealt_one_by_one_are_cut_as_well_as_can_be(blocks, stages, embedding, head):
    """The heaviest stage is as light as that of the general cut, wherever that leaves every stage a block."""
    stages = min(stages, blocks)
    costs = [1.0] * blocks
    costs[0] += embedding
    costs[-1] += head
    best = partition(costs, stages)
    heaviest = max(sum(c for c, s in zip(costs, best, strict=True) if s == stage) for stage in range(stages))
    cut = cut_by_cost(blocks, [(stage,) for stage in range(stages)], embedding=embedding, head=head)
    loads = [float(n) for n in cut]
    loads[0] += embedding
    loads[-1] += head
    assert sum(cut) == blocks
    assert min(cut) >= 1
    assert max(loads) == pytest.approx(heaviest)


def test_a_cut_balances_ranks_rather_than_stages():
    """Blocks that are over go to the ranks that have least, over all the stages they hold."""
    loop, line = [(0,), (1,), (2,)] * 2, [(0,), (1,), (2,)]
    assert cut_by_cost(8, loop, embedding=0.1, head=2.0) == (1, 2, 1, 2, 1, 1)
    assert cut_by_cost(8, [*line, *line[::-1]], embedding=0.1, head=2.0) == (1, 2, 2, 1, 1, 1)
    assert cut_by_cost(9, [(0, 3), (1, 2), (1, 2), (0, 3)], embedding=0.0, head=1.0) == (3, 3, 2, 1)


def test_an_equal_cut_is_one_that_divides():
    """Stages that do not divide the blocks have no equal cut."""
    assert equal_cut(12, 4) == (3, 3, 3, 3)
    assert equal_cut(12, 5) is None


@pytest.mark.parametrize("ranks", [2, 4])
def test_a_path_is_as_long_as_the_simulated_step(ranks):
    """For every variant the counted path, priced with the simulated costs, is the makespan."""
    for variant in variants(ranks, 16, names=SearchSpace.all_schedules()):
        schedule = variant.build(ranks, 2 * ranks)
        costs = _costs(schedule.num_stages, (1.0, 1.5, 0.75))
        timeline = simulate(schedule, costs)
        counts, hops = counted_path(schedule, timeline, _HOP)
        times = np.array([costs.forward_s, *costs.split_backward()])
        assert (counts * times).sum() + hops * _HOP == pytest.approx(timeline.makespan), variant


@pytest.mark.parametrize("name", ["1f1b", "gpipe", "interleaved", "chimera", "zb-h1", "zb-v", "hanayo", "dualpipe"])
def test_a_folded_skeleton_is_that_of_the_whole_step(name):
    """The paths of a step of many micro-batches are no longer than the whole step and nearly as long; peaks are equal.

    Where costs do not suit a split backward the steady state drifts, so that a path may miss a little.
    """
    ranks, many = 4, 44
    for variant in variants(ranks, 16, names=(name,)):
        folded, schedule = skeleton(variant, ranks, many), variant.build(ranks, many)
        for path, hops, ratio in zip(folded.paths, folded.hops, _RATIOS, strict=True):
            costs = _costs(schedule.num_stages, ratio)
            length = (path * np.array([costs.forward_s, *costs.split_backward()])).sum() + hops * _HOP
            makespan = simulate(schedule, costs).makespan
            assert 0.98 * makespan < length <= makespan * (1 + 1e-9), variant
        peaks = np.array(peak_activations(schedule)) * schedule.num_stages / ranks
        assert folded.peak_stages == pytest.approx(peaks), variant


def layouts_of(grid, blocks):
    """Yield every layout of a grid that can be built, with its place."""
    for v, b, s in product(*map(range, grid.shape)):
        known = traits(grid.variants[v], grid.pipeline)
        if known.num_stages > blocks or (grid.switches[s].sharded and known.routes * grid.data == 1):
            continue
        cut = equal_cut(blocks, known.num_stages)
        if grid.switches[s].equal and cut is not None:
            yield (v, b, s), grid.layout((v, b, s), None)


def test_bounds_are_below_the_estimates_and_near_them():
    """No estimate is faster or smaller than its bounds; the cuts' bound misses little of a step, the skeleton's less.

    Of few micro-batches a searched order splits backwards that it keeps whole where there are more.
    """
    cluster = cluster_of(4)
    pricing = pricing_of(SMALL, cluster)
    space = SearchSpace(tensor=(1,), pipeline=(4,), microbatch=(2, 16), recompute=("none", "full"))
    shares = []
    for grid in grids(SMALL, cluster, global_batch=32, space=space, rejected=Counter()):
        known = [traits(variant, grid.pipeline) for variant in grid.variants]
        prices = prices_by_routes(pricing, grid, known)
        for (v, b, s), layout in layouts_of(grid, SMALL.num_blocks):
            try:
                estimate = pricing.estimate(layout)
            except UsageError:  # a schedule that cannot take so few micro-batches
                continue
            cut = np.array([equal_cut(SMALL.num_blocks, known[v].num_stages)])
            found = skeleton(grid.variants[v], grid.pipeline, layout.microbatches)
            one = prices[known[v].routes].at(b, [s])
            chunks = layout.chunks or 1
            bound = tight(found, known[v], one, cut, chunks=chunks)
            least = placed(known[v], one, cut, chunks=chunks, microbatches=layout.microbatches)
            time = max(bound.time_s[0], least[0])
            assert time <= estimate.step_s * (1 + 1e-9), layout
            assert bound.memory_bytes[0] <= estimate.peak_bytes, layout
            shares.append((least[0] / estimate.step_s, time / estimate.step_s))
    assert len(shares) > 40
    assert (np.median(shares, axis=0) > (0.85, 0.95)).all()


def test_the_search_finds_what_estimating_every_layout_finds():
    """The best three are those of all layouts of the space, estimated one by one."""
    cluster = cluster_of(4, memory_bytes=8 * 10**9)
    pricing = pricing_of(SMALL, cluster)
    space = SearchSpace(schedules=("1f1b", "interleaved", "chimera", "zb-v", "gpipe"), uneven=(False,))
    outcome = search_layouts(SMALL, cluster, pricing, global_batch=16, space=space, top=3)
    every = []
    for grid in grids(SMALL, cluster, global_batch=16, space=space, rejected=Counter()):
        for _, layout in layouts_of(grid, SMALL.num_blocks):
            try:
                estimate = pricing.estimate(layout)
            except ChimeraError:
                continue
            if estimate.fits:
                every.append(estimate.step_s)
    assert [one.step_s for one in outcome.best] == pytest.approx(sorted(set(every))[:3], rel=1e-9) or [
        one.step_s for one in outcome.best
    ] == pytest.approx(sorted(every)[:3], rel=1e-9)
    assert outcome.num_simulated < len(every) / 2


@pytest.mark.parametrize("name", ["interleaved", "zb-v", "chimera"])
def test_the_search_finds_the_best_uneven_cuts_too(name):
    """With a head as heavy as some blocks, no layout that the estimate would cut itself is faster than the answer."""
    shape = replace(SMALL, layers=14, vocab=250_000)
    cluster = cluster_of(4)
    pricing = pricing_of(shape, cluster)
    space = SearchSpace(schedules=(name,), pipeline=(4,), tensor=(1,), recompute=("none",))
    outcome = search_layouts(shape, cluster, pricing, global_batch=16, space=space, top=1)
    every = [
        pricing.estimate(grid.layout((v, b, s), None)).step_s
        for grid in grids(shape, cluster, global_batch=16, space=space, rejected=Counter())
        for v, b, s in product(*map(range, grid.shape))
        if traits(grid.variants[v], 4).num_stages <= 14
    ]
    assert outcome.best[0].step_s <= min(every) * (1 + 1e-9)


def test_the_layout_that_misses_least_is_near_the_mean_of_the_states():
    """Where nothing fits, what is named spreads weights and optimizer over all devices, not over two of them."""
    model = ModelShape(family="gpt", hidden=12288, layers=96, heads=96, vocab=50257, seq=2048)
    space = SearchSpace(recompute=("none",), schedules=("1f1b", "zb-v", "interleaved"))
    cluster = cluster_of(64, memory_bytes=20 * 10**9)
    outcome = search_layouts(model, cluster, pricing_of(model, cluster), global_batch=128, space=space, top=1)
    assert outcome.closest is not None
    assert outcome.closest.peak_bytes < 2 * 18 * 175e9 / 64


def test_choices_that_stand_alone_are_not_called_the_same_as_others():
    """Where only sharded layouts are asked for, one without replicas counts; a cut that cannot be equal is said so."""
    cluster = cluster_of(4)
    space = SearchSpace(schedules=("1f1b",), pipeline=(4,), tensor=(1,), sharded=(True,), microbatch=(1,))
    outcome = search_layouts(SMALL, cluster, pricing_of(SMALL, cluster), global_batch=8, space=space, top=1)
    assert outcome.best[0].layout.sharded
    with pytest.raises(InfeasibleError, match=r"with stages that cannot have equal.*leave out one of .*--uneven"):
        plan(replace(SMALL, layers=13), cluster, global_batch=8, space=replace(space, uneven=(False,)))


def test_every_layout_is_accounted_for():
    """What is shown and what is rejected, by reason, are all layouts of the space."""
    cluster = cluster_of(8)
    rejected: Counter = Counter()
    space = SearchSpace()
    total = sum(
        int(np.prod(grid.shape)) for grid in grids(SMALL, cluster, global_batch=64, space=space, rejected=rejected)
    ) + sum(rejected.values())
    outcome = search_layouts(SMALL, cluster, pricing_of(SMALL, cluster), global_batch=64, space=space, top=5)
    assert len(outcome.best) + sum(outcome.rejected.values()) == total
    assert len(outcome.best) == 5


def test_a_new_order_is_faster_runs_the_same_work_and_fits():
    """The list scheduler's order has the same computations, keeps to the memory and shortens the step."""
    found = plan(SMALL, cluster_of(4), global_batch=8, space=SearchSpace(pipeline=(4,), schedules=("1f1b",)), top=3)
    ordered = [each for each in found.plans if each.order is not None]
    assert ordered
    for each in ordered:
        assert each.step_s < each.estimate.step_s
        assert each.order.num_microbatches == each.layout.microbatches
        assert each.order.placement == each.estimate.schedule.placement


def test_nothing_fits_is_said_with_the_excess_and_what_to_relax():
    """A model too large for the cluster is infeasible; the message counts the bytes and names the devices it takes."""
    with pytest.raises(InfeasibleError, match=r"(?s)no layout fits .*GiB, [0-9.]+ too much: .*fit with --gpus 16"):
        plan(
            ModelShape(family="gpt", hidden=8192, layers=48, heads=64, vocab=50257, seq=2048),
            cluster_of(8),
            global_batch=64,
        )


def test_a_given_choice_that_keeps_everything_out_is_named():
    """Where a choice that was given is all that does not fit, the message says to leave it to the search."""
    with pytest.raises(InfeasibleError, match=r"--recompute left to the search"):
        plan(
            ModelShape(family="gpt", hidden=4096, layers=16, heads=32, vocab=50257, seq=8192),
            cluster_of(8, memory_bytes=18 * 10**9),
            global_batch=8,
            space=SearchSpace(recompute=("none",)),
            software="megatron-2022",
        )


def test_a_batch_that_nothing_divides_is_answered_with_the_nearest():
    """Replicas that do not divide the batch are answered with the batches that they divide."""
    with pytest.raises(InfeasibleError, match=r"--global-batch 7 .* try --global-batch 4 or 8"):
        plan(SMALL, cluster_of(8), global_batch=7, space=SearchSpace(data=(4,)))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"schedules": ("1f1",)}, r"--schedules 1f1: unknown \(did you mean '1f1b'"),
        ({"schedules": ("pipedream",)}, r"--schedules pipedream: steps within itself"),
        ({"recompute": ("fully",)}, r"--recompute fully: unknown \(did you mean 'full'"),
        ({"tensor": (0,)}, r"--tensor \(0,\): needed: whole numbers of at least 1"),
    ],
)
def test_a_choice_that_does_not_exist_is_refused(options, message):
    """Unknown schedules and modes are answered with the nearest ones."""
    with pytest.raises(ConfigError, match=message):
        SearchSpace(**options)


def test_a_batch_below_one_is_refused():
    """There is no step of no sequences."""
    with pytest.raises(ConfigError, match=r"--global-batch 0"):
        plan(SMALL, cluster_of(8), global_batch=0)


def test_a_schedule_made_for_costs_is_refused_by_name():
    """The orders that refine the best plans stand for it, and the message says so."""
    with pytest.raises(ConfigError, match="--schedules zb-2p: is made for given costs"):
        SearchSpace(schedules=("zb-2p",))


def test_an_asynchronous_layout_is_never_proposed():
    """All synchronous schedules of the registry are tried, and no other."""
    names = SearchSpace.all_schedules()
    assert {"1f1b", "chimera-zb", "zb-v", "dualpipe"} <= set(names)
    assert not {"pipedream", "pipedream-2bw"} & set(names)


def test_switches_that_change_nothing_are_left_out():
    """Without tensor parallelism there is no sequence parallelism, on one device nothing to shard or to cut."""
    (grid,) = grids(SMALL, cluster_of(1), global_batch=2, space=SearchSpace(), rejected=Counter())
    assert len(grid.switches) == len(RECOMPUTES)
    assert [variant.schedule for variant in grid.variants] == ["1f1b"]
    layout = grid.layout((0, 0, 0), None)
    assert layout == Layout(microbatches=2)
