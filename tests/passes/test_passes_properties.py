"""The proof against an interpreter that moves messages through first-in-first-out channels, on random schedules."""

import random
from collections import defaultdict, deque

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from chimera.errors import ScheduleError
from chimera.ir.action import COMPUTATIONS, RECEIVES, SENDS, Action, Kind, Overlap, flatten
from chimera.ir.checks import check, violations
from chimera.ir.checks_messages import Routing
from chimera.ir.rows import Rows
from chimera.ir.schedule import Placement, Schedule
from chimera.passes.communication import add_communication
from chimera.passes.derived import compute_only, without_reductions
from chimera.passes.lower import lower
from chimera.passes.reductions import REDUCTION_MODES
from chimera.passes.waits import waits
from chimera.schedules.registry import build_schedule

FORWARD, BACKWARD = "activation", "gradient"


class Interpreter:
    """Runs a lowered schedule with real (named) data: the n-th SEND of a channel fills its n-th posted RECV."""

    def __init__(self, schedule):
        self.schedule = schedule
        self.made = [set() for _ in schedule.actions]  # what exists on each rank: (what, into stage, micro-batch)
        self.posted = defaultdict(deque)  # channel → names of posted receives not filled yet
        self.sent = set()
        self.swapped = False

    def run(self):
        """Return whether every rank comes to its end with every computation having had its own data."""
        cursors = [0] * len(self.schedule.actions)
        moved = True
        while moved:
            moved = False
            for rank, program in enumerate(self.schedule.actions):
                while cursors[rank] < len(program) and self.step(rank, program[cursors[rank]]):
                    cursors[rank] += 1
                    moved = True
        finished = all(c == len(p) for c, p in zip(cursors, self.schedule.actions, strict=True))
        return finished and not self.swapped and not any(self.posted.values())

    def step(self, rank, instruction):
        parts = list(flatten([instruction]))
        if not all(self.ready(rank, part) for part in parts):
            return False
        for part in parts:
            self.finish(rank, part)
        return True

    def channel(self, action, stage, other):
        route = self.schedule.microbatch_to_route[action.microbatch]
        ranks = self.schedule.placement.routes[route]
        return ranks[stage], ranks[other], route

    def ready(self, rank, action):
        kind, stage, microbatch = action
        here, last = self.made[rank], self.schedule.num_stages - 1
        if kind in SENDS:
            what, target = (FORWARD, stage + 1) if kind is Kind.SEND_F else (BACKWARD, stage - 1)
            return (what, target, microbatch) in here and bool(self.posted[self.channel(action, stage, target)])
        if kind is Kind.F:
            return stage == 0 or (FORWARD, stage, microbatch) in here
        if kind in {Kind.B, Kind.I}:
            ran = ("ran", stage, microbatch) in here
            return ran and (stage == last or (BACKWARD, stage, microbatch) in here)
        if kind is Kind.W:
            return ("input", stage, microbatch) in here
        return True

    def finish(self, rank, action):
        kind, stage, microbatch = action
        if kind in RECEIVES:
            what, source = (FORWARD, stage - 1) if kind is Kind.RECV_F else (BACKWARD, stage + 1)
            self.posted[self.channel(action, source, stage)].append((what, stage, microbatch))
        elif kind in SENDS:
            what, target = (FORWARD, stage + 1) if kind is Kind.SEND_F else (BACKWARD, stage - 1)
            channel = self.channel(action, stage, target)
            expected = self.posted[channel].popleft()
            self.swapped |= expected != (what, target, microbatch)
            self.made[channel[1]].add(expected)
        elif kind in COMPUTATIONS:
            done = {Kind.F: "ran", Kind.B: "input", Kind.I: "input", Kind.W: "weight"}[kind]
            self.made[rank].add((done, stage, microbatch))
            what, target = {Kind.F: (FORWARD, stage + 1), Kind.W: (None, stage)}.get(kind, (BACKWARD, stage - 1))
            self.made[rank].add((what, target, microbatch))


def random_schedule(seed, *, pairs=False):
    """Draw a placement and an order in which some single worker could run everything, so that nothing is stuck."""
    draw = random.Random(seed)
    ranks, stages, count = draw.randint(1, 4), draw.randint(1, 5), draw.randint(1, 5)
    routes = tuple(tuple(draw.randrange(ranks) for _ in range(stages)) for _ in range(draw.randint(1, 3)))
    route = tuple(draw.randrange(len(routes)) for _ in range(count))
    waiting = {
        (microbatch, stage): deque([Kind.F, *draw.choice([[Kind.B], [Kind.I, Kind.W]])])
        for microbatch in range(count)
        for stage in range(stages)
    }
    done = set()

    def may_run(microbatch, stage):
        kind = waiting[microbatch, stage][0]
        if kind is Kind.F:
            return stage == 0 or (microbatch, stage - 1, "F") in done
        return kind is Kind.W or stage == stages - 1 or (microbatch, stage + 1, "B") in done

    programs = [[] for _ in range(ranks)]
    eagerness = draw.choice([1, 5])
    while waiting:
        able = sorted(key for key in waiting if may_run(*key))
        weights = [eagerness if waiting[key][0] is not Kind.F else 1 for key in able]
        microbatch, stage = draw.choices(able, weights)[0]
        kind = waiting[microbatch, stage].popleft()
        if not waiting[microbatch, stage]:
            del waiting[microbatch, stage]
        done.add((microbatch, stage, {Kind.F: "F", Kind.W: "W"}.get(kind, "B")))
        programs[routes[route[microbatch]][stage]].append(Action(kind, stage, microbatch))
    if pairs:
        programs = [paired(program, draw) for program in programs]
    return Schedule(f"random {seed}", Placement(ranks, routes), route, tuple(map(tuple, programs)))


def paired(program, draw):
    """Join some neighbours F, B to pairs, whether that is sound or not."""
    joined = []
    for action in program:
        previous = joined[-1] if joined else None
        fits = isinstance(previous, Action) and previous.kind is Kind.F and action.kind in {Kind.B, Kind.I}
        if fits and draw.random() < 0.7:
            joined[-1] = Overlap(previous, action)
        else:
            joined.append(action)
    return joined


def shuffled_a_little(schedule, seed):
    """Move one instruction of one program to another place."""
    draw = random.Random(seed)
    programs = [list(program) for program in schedule.actions]
    program = draw.choice([p for p in programs if p])
    program.insert(draw.randrange(len(program)), program.pop(draw.randrange(len(program))))
    return Schedule(schedule.name, schedule.placement, schedule.microbatch_to_route, tuple(map(tuple, programs)), 1.0)


SEEDS = st.integers(0, 10**6)


@given(SEEDS, st.sampled_from([1, 2, 3, None]), st.sampled_from([*REDUCTION_MODES, None]))
@example(seed=3627, depth=1, reduce="eager")  # a reduction right before the consumer of a message
@settings(deadline=None)
def test_every_sound_schedule_is_lowered_and_runs(seed, depth, reduce):
    """Whatever the order and the routes: proved, lowered, and run to the end with nobody's data swapped."""
    schedule = random_schedule(seed)
    check(schedule)
    lowered = lower(schedule, reduce=reduce, receive_depth=depth)
    assert Interpreter(lowered).run()
    assert compute_only(lowered) == schedule
    assert without_reductions(lowered) == lower(schedule, reduce=None, receive_depth=depth)


@given(SEEDS, SEEDS)
@settings(deadline=None)
def test_the_proof_and_the_interpreter_agree_on_damaged_programs(seed, damage):
    """After one move in a lowered program, the proof holds exactly if it still runs to its end unswapped."""
    lowered = shuffled_a_little(add_communication(random_schedule(seed), receive_depth=1), damage)
    assert (violations(lowered) == []) is Interpreter(lowered).run()


@given(SEEDS)
@settings(deadline=None)
def test_pairs_are_proved_and_lowered_or_refused(seed):
    """Joined neighbours either pass and run, or are refused by an order or a cycle."""
    schedule = random_schedule(seed, pairs=True)
    found = violations(schedule)
    if found:
        assert {violation.rule for violation in found} <= {"order", "deadlock"}
        with pytest.raises(ScheduleError):
            lower(schedule)
    else:
        assert Interpreter(lower(schedule)).run()


@given(SEEDS, st.integers(1, 3))
@settings(deadline=None)
def test_waits_name_the_receives_of_each_computation(seed, depth):
    """The wait list holds, for each message, its receive's position at its consumer's, and nothing else."""
    schedule = random_schedule(seed)
    lowered = add_communication(schedule, receive_depth=depth)
    listed = waits(lowered)
    assert sum(len(w) for rank in listed for w in rank) == len(Routing.of(Rows.of(schedule)))
    for program, rank in zip(lowered.actions, listed, strict=True):
        for position, received in enumerate(rank):
            for receive in received:
                kind = {Kind.F: Kind.RECV_F}.get(program[position].kind, Kind.RECV_B)
                assert program[receive] == Action(kind, *program[position][1:])
                assert receive < position


@pytest.mark.parametrize("microbatches", [1, 3, 4, 9])
@pytest.mark.parametrize("reduce", REDUCTION_MODES)
@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("gpipe", {}),
        ("1f1b", {}),
        ("interleaved", {"chunks": 2}),
        ("chimera", {}),
        ("chimera", {"pairs": 2}),
        ("chimera", {"unit": "double"}),
        ("chimera", {"unit": "halve"}),
    ],
)
def test_the_published_schedules_run_lowered(name, options, reduce, microbatches):
    """Every schedule that is built is lowered in every mode and runs with nobody's data swapped."""
    schedule = build_schedule(name, ranks=4, microbatches=microbatches, **options)
    assert Interpreter(lower(schedule, reduce=reduce)).run()
