"""The cases of the parity tests: the full legal products of all choices, and a selection that covers every pair."""

from functools import cache
from itertools import combinations, product
from operator import itemgetter

import numpy as np
from runtime_cases import CUT_MODELS, SPLIT, TEXTS, make_schedule

from chimera.errors import UsageError

AXES = {
    "schedule": [
        "gpipe",
        "1f1b",
        "interleaved",
        *(f"chimera-{pairs}-{unit}" for pairs in (1, 2) for unit in ("concatenate", "double", "halve")),
        *SPLIT,
        *TEXTS,
    ],
    "p": [1, 2, 3, 4],
    "d": [1, 2],
    "m": ["1", "3", "p", "2p+1", "own"],
    "recompute": ["none", "full"],
    "model": ["mlp", "tuple", "bert"],
    "reduce": ["end", "eager", "eager-opt"],
    "shard": [False, True],
}
RANKS_OF_TEXT = dict.fromkeys(TEXTS, 2) | {"text-forked": 3}


def is_legal(case):
    """Whether a schedule exists for these sizes, and no other case is the same under another name."""
    schedule, p = case["schedule"], case["p"]
    if case["shard"] and not has_replicas(case):
        return False
    if schedule in TEXTS:
        # A text brings its sizes; one that is lowered brings its reductions too.
        placed = schedule != "text-lowered" or case["reduce"] == "end"
        return case["m"] == "own" and p == RANKS_OF_TEXT[schedule] and placed
    if case["m"] == "own" or p == 3:
        return False
    if p == 1 and case["m"] not in {"1", "3"}:
        return False
    try:
        make_schedule(schedule, p, sized(case)["m"])
    except UsageError:
        return False
    return True


def has_replicas(case):
    """Whether any stage is on more than one rank, so that there is something to shard."""
    several_routes = case["schedule"].startswith(("chimera", "bitpipe", "dualpipe")) and case["p"] > 1
    return case["d"] > 1 or several_routes or case["schedule"] in {"text-crossed", "text-late", "text-forked"}


def every_case():
    """Return all legal combinations."""
    cases = [dict(zip(AXES, values, strict=True)) for values in product(*AXES.values())]
    return [case for case in cases if is_legal(case)]


def full_product():
    """Return all legal combinations of all axes but ``reduce``, which takes turns."""
    cases = [case for case in every_case() if case["reduce"] == AXES["reduce"][0]]
    for index, case in enumerate(cases):
        if case["schedule"] != "text-lowered":
            case["reduce"] = AXES["reduce"][index % 3]
    return cases


# Models that tensor-parallel ranks share: every kind of schedule, every way to recompute.
CUT_AXES = {
    "model": list(CUT_MODELS),
    "schedule": ["gpipe", "1f1b", "interleaved", "chimera-1-concatenate", "chimera-2-concatenate", "zb-h1", "zb-v"],
    "p": [1, 2, 4],
    "d": [1, 2, 4],
    "t": [1, 2, 4],
    "sequence": [False, True],
    "m": ["p", "3"],
    "recompute": ["none", "selective", "full", "full-2"],
    "shard": [False, True],
}
MOST_RANKS = 8


def every_cut_case():
    """Return all legal combinations on at most eight ranks; where reductions start takes turns."""
    cases = []
    for values in product(*CUT_AXES.values()):
        case = dict(zip(CUT_AXES, values, strict=True))
        fits = case["p"] * case["d"] * case["t"] <= MOST_RANKS and (case["t"] > 1 or not case["sequence"])
        if fits and is_legal(case):
            cases.append(case | {"reduce": AXES["reduce"][len(cases) % 3]})
    return cases


# The selection that the suite runs: both products joined, where a schedule stands for others of its kind.
KINDS = {
    "gpipe": ("gpipe",),
    "1f1b": ("1f1b",),
    "interleaved": ("interleaved",),
    "chimera-1": ("chimera-1-concatenate", "chimera-1-double", "chimera-1-halve"),
    "chimera-2": ("chimera-2-concatenate", "chimera-2-double", "chimera-2-halve"),
    "split": (*SPLIT, "dualpipe"),
    "text": tuple(TEXTS),
}
JOINT_MODELS = ["mlp", "tuple", *CUT_MODELS]
"""BERT is among those that ranks share."""


@cache
def joint_cases():
    """Return all legal combinations of the choices of both products, those of little work first."""
    schedules = [(kind, schedule) for kind, names in KINDS.items() for schedule in names]
    built = [
        {"kind": kind, "schedule": schedule, "p": p, "m": m, "reduce": reduce}
        for (kind, schedule), p, m, reduce in product(schedules, AXES["p"], [*AXES["m"], "2p"], AXES["reduce"])
        # DualPipe wants an even number, which the others need not be asked for.
        if (m == "2p") == (schedule == "dualpipe")
        and is_legal({"schedule": schedule, "p": p, "m": m, "reduce": reduce, "shard": False})
    ]
    axes = {axis: CUT_AXES[axis] for axis in ("d", "t", "sequence", "recompute", "shard")} | {"model": JOINT_MODELS}
    placed = [dict(zip(axes, values, strict=True)) for values in product(*axes.values())]
    cases = [one | other for one, other in product(built, filter(is_legal_model, placed))]
    legal = [case for case in cases if num_ranks(case) <= MOST_RANKS and (has_replicas(case) or not case["shard"])]
    return sorted(legal, key=work_of)


def is_legal_model(case):
    """Whether the model can be shared, divided and recomputed like this."""
    if case["model"] not in CUT_MODELS and (case["t"] > 1 or case["recompute"] == "selective"):
        return False
    return case["t"] > 1 or not case["sequence"]


def num_ranks(case):
    """Return how many ranks a case runs on."""
    return case["p"] * case["d"] * case.get("t", 1)


def work_of(case):
    """Return what a case costs, roughly: its ranks, and the micro-batches that all of them run."""
    microbatches = make_schedule(case["schedule"], case["p"], sized(case)["m"]).num_microbatches
    return num_ranks(case) + microbatches * case["d"] * case["t"]


STEPS = 10
FEW_STEPS, MUCH_WORK = 4, 12
"""Steps of a case of much work, for which ranks that share cores take seconds each."""


def steps_of(case):
    """Return how many steps of a case the suite makes."""
    return FEW_STEPS if work_of(case) >= MUCH_WORK else STEPS


JOINT_PAIRS = [
    *combinations(("kind", "p", "m", "reduce", "d", "t", "sequence", "recompute", "shard", "model"), 2),
    ("kind", "schedule"),
]
"""Pairs of axes of which every legal pair of choices is covered; of a schedule's name only which it is."""


def pairs_of(cases):
    """Return every pair of choices that joint cases cover, as (axes, choices)."""
    return {(axes, choices) for axes in JOINT_PAIRS for choices in set(map(itemgetter(*axes), cases))}


@cache
def pairwise_cases():
    """Return few joint cases that cover every pair of choices that any of them has.

    Greedy: where most pairs of two axes are left, take the first of these, and of many cases that have it the one that
    covers most, where ten units of work weigh as much as a pair.
    """
    cases = joint_cases()
    work = np.array([work_of(case) for case in cases])
    values = {axis: list(dict.fromkeys(case[axis] for case in cases)) for axis in cases[0]}
    columns = {axis: np.array([values[axis].index(case[axis]) for case in cases]) for axis in values}
    left = {}
    for one, other in JOINT_PAIRS:
        left[one, other] = np.zeros((len(values[one]), len(values[other])), np.int64)
        left[one, other][columns[one], columns[other]] = 1
    chosen = []
    while any(table.any() for table in left.values()):
        one, other = max(left, key=lambda axes: left[axes].sum())
        first, second = np.argwhere(left[one, other])[0]
        rows = np.flatnonzero((columns[one] == first) & (columns[other] == second))
        rows = rows[:: -(-len(rows) // 1000)]
        covers = sum(table[columns[a][rows], columns[b][rows]] for (a, b), table in left.items())
        best = rows[np.argmax(covers - 0.1 * work[rows])]
        for (a, b), table in left.items():
            table[columns[a][best], columns[b][best]] = 0
        chosen.append(cases[best])
    return chosen


def sized(case):
    """Return the case with its number of micro-batches; None where the schedule's text says it."""
    number = {"1": 1, "3": 3, "p": case["p"], "2p": 2 * case["p"], "2p+1": 2 * case["p"] + 1, "own": None}
    return {**case, "m": number[case["m"]]}


def name_of(case):
    """Return a case as one word."""
    recompute = case["recompute"]
    shard = "-shard" if case["shard"] else ""
    sizes = f"{case['schedule']}-p{case['p']}-d{case['d']}-m{case['m']}"
    if case.get("t", 1) > 1:
        sizes += f"-t{case['t']}{'-sequence' if case['sequence'] else ''}"
    return f"{sizes}-{recompute}-{case['model']}-{case['reduce']}{shard}"
