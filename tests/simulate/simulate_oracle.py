"""An independent simulator for tests: relaxation over dictionaries, no kernel, no columns; and random schedules."""

import random

from chimera.ir.action import Action, Kind, Overlap, flatten
from chimera.ir.schedule import Placement, Schedule


def relax(schedule, *, forward, backward, input_grad, weight_grad, message, reduce=0.0):
    """Return {(rank, position): (start, end)} of computations and reductions, by sweeping until nothing changes.

    ``message`` is [stage] of the message that leaves each stage, the other arguments one time for every stage.
    """
    time = {Kind.F: forward, Kind.B: backward, Kind.I: input_grad, Kind.W: weight_grad}
    made: dict[tuple[str, int, int], float] = {}
    spans: dict[tuple[int, int], tuple[float, float]] = {}
    changed = True
    while changed:
        changed = False
        clocks, reaches = {}, {}
        for rank, program in enumerate(schedule.actions):
            clock = 0.0
            for position, instruction in enumerate(program):
                actions = list(flatten([instruction]))
                if actions[0].kind is Kind.REDUCE_GRAD:
                    reaches[rank, actions[0].stage] = (position, clock)
                    continue
                if actions[0].kind not in time:
                    continue
                ready = [clock]
                for kind, stage, microbatch in actions:
                    for wanted, where in _wanted(kind, stage, schedule.num_stages):
                        if (wanted, where, microbatch) not in made:
                            ready.append(float("inf"))
                            continue
                        there = schedule.rank_of(where, microbatch)
                        hop = 0.0 if there == rank else message[where]
                        ready.append(made[wanted, where, microbatch] + hop)
                start = max(ready)
                clock = end = start + sum(time[action.kind] for action in actions)
                if start == float("inf"):
                    break
                if spans.get((rank, position)) != (start, end):
                    spans[rank, position] = (start, end)
                    changed = True
                for kind, stage, microbatch in actions:
                    made["F" if kind is Kind.F else "W" if kind is Kind.W else "G", stage, microbatch] = end
            clocks[rank] = clock
    free = dict.fromkeys(range(schedule.num_ranks), 0.0)
    order = {
        rank: [a.stage for a in flatten(program) if a.kind is Kind.REDUCE_GRAD]
        for rank, program in enumerate(schedule.actions)
    }
    while any(order.values()):
        stage = next(
            stages[0]
            for stages in order.values()
            if stages and all(order[r] and order[r][0] == stages[0] for r in schedule.placement.ranks_of(stages[0]))
        )
        holders = schedule.placement.ranks_of(stage)
        start = max(max(reaches[r, stage][1], free[r]) for r in holders)
        for rank in holders:
            order[rank].pop(0)
            free[rank] = start + reduce
            spans[rank, reaches[rank, stage][0]] = (start, start + reduce)
    return spans


def _wanted(kind, stage, num_stages):
    if kind is Kind.F:
        return [("F", stage - 1)] if stage else []
    if kind is Kind.W:
        return [("G", stage)]
    return [("F", stage)] + ([("G", stage + 1)] if stage + 1 < num_stages else [])


def random_schedule(seed: int) -> Schedule:
    """Return a valid schedule in no sensible order: a random linear extension, dealt out to a random placement."""
    rng = random.Random(seed)
    num_ranks, num_stages, num_microbatches = rng.randint(1, 4), rng.randint(1, 6), rng.randint(1, 6)
    routes = tuple(tuple(rng.randrange(num_ranks) for _ in range(num_stages)) for _ in range(rng.randint(1, 3)))
    microbatch_to_route = tuple(rng.randrange(len(routes)) for _ in range(num_microbatches))
    split = {(s, m): rng.random() < 0.5 for s in range(num_stages) for m in range(num_microbatches)}
    todo = [Action(Kind.F, s, m) for s, m in split]
    for (s, m), is_split in split.items():
        todo += [Action(Kind.I, s, m), Action(Kind.W, s, m)] if is_split else [Action(Kind.B, s, m)]
    done = set()
    programs = [[] for _ in range(num_ranks)]
    while todo:
        able = [
            a
            for a in todo
            if all((wanted, where, a.microbatch) in done for wanted, where in _wanted(a.kind, a.stage, num_stages))
        ]
        action = rng.choice(able)
        todo.remove(action)
        done.add(
            ("F" if action.kind is Kind.F else "W" if action.kind is Kind.W else "G", action.stage, action.microbatch)
        )
        programs[routes[microbatch_to_route[action.microbatch]][action.stage]].append(action)
    placement = Placement(num_ranks, routes)
    for stage in rng.sample(range(num_stages), num_stages):
        for rank in placement.ranks_of(stage):
            programs[rank].append(Action(Kind.REDUCE_GRAD, stage, None))
    return Schedule(f"random {seed}", placement, microbatch_to_route, tuple(map(tuple, programs)))


def pair_up(schedule: Schedule) -> Schedule:
    """Return the schedule with every F that directly precedes a B or I of another micro-batch made a pair."""
    programs = []
    for program in schedule.actions:
        paired, left = [], list(program)
        while left:
            first = left.pop(0)
            if (
                first.kind is Kind.F
                and left
                and left[0].kind in {Kind.B, Kind.I}
                and left[0].microbatch != first.microbatch
            ):
                paired.append(Overlap(first, left.pop(0)))
            else:
                paired.append(first)
        programs.append(tuple(paired))
    return Schedule(schedule.name, schedule.placement, schedule.microbatch_to_route, tuple(programs))
