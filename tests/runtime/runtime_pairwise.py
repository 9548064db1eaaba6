"""The cases of the parity tests: the full legal product of all choices, and a selection that covers every pair."""

from itertools import combinations, product

import numpy as np
from runtime_cases import SPLIT, TEXTS, make_schedule

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
    several_routes = case["schedule"].startswith(("chimera", "bitpipe")) and case["p"] > 1
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


def pairs_of(case):
    """Return every pair of choices that a case covers."""
    return list(combinations(case.items(), 2))


# Models that tensor-parallel ranks share: every kind of schedule, every way to recompute.
CUT_AXES = {
    "model": ["bert-cut", "gpt-cut", "llama-cut", "t5-cut", "ict-cut"],
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


def pairwise_cut_cases():
    """Return few cases that cover every pair of choices of the models that ranks share."""
    cases = [{axis: case[axis] for axis in CUT_AXES} for case in every_cut_case()]
    return [case | {"reduce": AXES["reduce"][number % 3]} for number, case in enumerate(covering(cases))]


def pairwise_cases():
    """Return few legal cases that cover every pair of choices that any legal case has."""
    return covering(every_case())


def covering(cases):
    """Return few of ``cases`` that cover every pair of choices that any of them has.

    Greedy: always the first of those that cover most pairs not covered yet.
    """
    numbers = {pair: i for i, pair in enumerate(dict.fromkeys(pair for case in cases for pair in pairs_of(case)))}
    covers = np.zeros((len(cases), len(numbers)), np.int32)
    for row, case in enumerate(cases):
        covers[row, [numbers[pair] for pair in pairs_of(case)]] = 1
    left = np.ones(len(numbers), np.int32)
    chosen = []
    while left.any():
        best = int(np.argmax(covers @ left))
        chosen.append(cases[best])
        left[covers[best] == 1] = 0
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
    if "t" in case:
        sizes += f"-t{case['t']}{'-sequence' if case['sequence'] else ''}"
    return f"{sizes}-{recompute}-{case['model']}-{case['reduce']}{shard}"
