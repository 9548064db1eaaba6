"""The priority rules of the list scheduler: a short list that is tried first, a grid, and seeded changes of a good one.

A rule is a handful of weights; which one is best depends on placement, costs and cap, so the search tries many. The
rules know no problem: stages count from 0 to 1 along a route, ages from 0 to 1 over the step, times in mean
computations.
"""

from collections.abc import Iterator
from dataclasses import astuple, dataclass, fields, replace
from itertools import product
from typing import Any

import numpy as np

from chimera.schedules.search.kernel import NOISE_SIZE

__all__ = ["FIRST", "Rule", "changed", "grid", "shaken"]

_SPLIT_ALL = 2.0
_SPLIT_BUT_FIRST = 1.0
_WHOLE = 0.0
_UNBOUNDED = 1e9


@dataclass(frozen=True, slots=True)
class Rule:
    """Weights of the score of a computation that could start; the highest score runs.

    Attributes:
        forward: of every F.
        gradient: of every I, or B.
        weight: of every W.
        forward_stage: of the stage of an F, so that above 0 the later stage goes first.
        gradient_stage: of the stage of an I or B.
        weight_stage: of the stage of a W.
        forward_age: against the micro-batch's place in the step, so that above 0 the earlier one goes first.
        gradient_age: the same for an I or B.
        weight_age: the same for a W.
        patience: how far ahead a computation whose input has not arrived is considered.
        penalty: against each unit of time that a rank would wait.
        split: 2 for I and W everywhere, 1 for B on the first stage, whose gradient nobody waits for, 0 for B.
        whole_path: 1 where a micro-batch enters its route only when its memory is free on every rank.
        depth: most micro-batches on the last stage between their F and their I.
        slope: by how much more on each stage before.
        noise: of a table of random numbers that sets single computations apart.
        table: that table, ``NOISE_SIZE`` numbers; empty where there is no noise.
    """

    forward: float = 20.0
    gradient: float = 30.0
    weight: float = 10.0
    forward_stage: float = 0.0
    gradient_stage: float = 0.0
    weight_stage: float = 0.0
    forward_age: float = 0.0
    gradient_age: float = 0.0
    weight_age: float = 0.5
    patience: float = 0.0
    penalty: float = 0.0
    split: float = _SPLIT_BUT_FIRST
    whole_path: float = 0.0
    depth: float = _UNBOUNDED
    slope: float = 0.0
    noise: float = 0.0
    table: tuple[float, ...] = ()

    def vector(self, mean_time: float) -> list[float]:
        """Return the rule as the kernel reads it, in the problem's unit of time."""
        scaled = replace(self, patience=self.patience * mean_time, penalty=self.penalty / mean_time)
        *weights, table = astuple(scaled)
        return [*map(float, weights), *(table or [0.0] * NOISE_SIZE)]


FIRST = (
    Rule(forward=10, weight=20, gradient_stage=1, forward_age=3),
    Rule(forward=30, gradient=20, gradient_stage=1, forward_age=3, patience=0.6, penalty=10, split=2, depth=1, slope=1),
    Rule(forward_stage=-1, gradient_stage=1, forward_age=3, depth=1, slope=1),
    Rule(forward_stage=1, gradient_stage=1, forward_age=3, patience=0.6, penalty=10, split=2, depth=1, slope=0.5),
    Rule(forward_stage=1, gradient_stage=-1, forward_age=3, split=2, whole_path=1, depth=1, slope=2 / 3),
    Rule(forward=30, gradient=20, forward_stage=1, gradient_stage=-1, depth=1, slope=1),
    Rule(forward_age=3, patience=0.6, penalty=10, depth=2, slope=1),
    Rule(forward=30, gradient=20, forward_stage=-1, gradient_stage=-1, forward_age=3, split=2, depth=1, slope=1),
    Rule(forward=30, gradient=20, forward_stage=-1, gradient_stage=1, forward_age=3, depth=2, slope=1),
    Rule(
        forward=30,
        gradient=20,
        forward_stage=-1,
        gradient_stage=-1,
        forward_age=3,
        patience=0.6,
        penalty=10,
        depth=1,
        slope=1,
    ),
    Rule(forward=30, gradient=20, gradient_stage=-1, split=2, whole_path=1, depth=2, slope=2 / 3),
    Rule(forward_stage=-1, gradient_stage=-1, forward_age=3, patience=0.6, penalty=10, split=2, depth=1, slope=0.5),
    Rule(
        forward=30, gradient=20, forward_stage=1, forward_age=3, patience=0.6, penalty=10, split=2, depth=2, slope=2 / 3
    ),
    Rule(forward_age=3, patience=0.6, penalty=10, split=2, whole_path=1, depth=1, slope=0.5),
    Rule(
        forward=10,
        weight=20,
        forward_stage=-1,
        forward_age=3,
        patience=0.6,
        penalty=10,
        split=2,
        whole_path=1,
        depth=2,
        slope=2 / 3,
    ),
    Rule(forward=30, gradient=20, forward_stage=-1, forward_age=3, depth=1, slope=1),
    Rule(forward_stage=1, gradient_stage=1, split=2, depth=2, slope=1),
    Rule(gradient_stage=1, forward_age=3, whole_path=1),
    Rule(
        forward=30, gradient=20, forward_stage=1, gradient_stage=1, patience=0.6, penalty=10, split=2, depth=2, slope=1
    ),
    Rule(forward=30, gradient=20, forward_stage=1, gradient_stage=-1, depth=2, slope=2 / 3),
    Rule(forward=30, gradient=20, forward_stage=-1, gradient_stage=1, forward_age=3, depth=1, slope=1),
    Rule(split=2, depth=2, slope=2),
    Rule(
        forward=14, gradient=40, forward_age=-3, gradient_age=20, weight_age=-9, patience=0.12, penalty=100, split=2,
        depth=5, slope=1.5,
    ),
)  # fmt: skip
"""Tried in this order before any other: together they hold the grid's best for 90 mixed cases, nearly.

The last two are for the span with memory to spare: as many forwards ahead as the limit allows, W's held back.
"""

_CLASSES = ((20.0, 30.0, 10.0), (10.0, 30.0, 20.0), (30.0, 20.0, 10.0))
_DEPTHS = ((_UNBOUNDED, 0.0), (1.0, 1.0), (1.0, 2 / 3), (2.0, 2 / 3), (1.0, 0.5), (2.0, 1.0))
_AMPLITUDES = (1.0, 3.0, 8.0, 15.0)
_SIGNS = (0.0, 1.0, -1.0)


def grid() -> Iterator[Rule]:
    """Yield every combination of the coarse choices, those that differ most in turn."""
    choices = product(
        (0.0, 1.0), _SIGNS, _SIGNS, (3.0, 0.0), (_SPLIT_ALL, _SPLIT_BUT_FIRST, _WHOLE), ((0.0, 0.0), (0.6, 10.0)),
        _DEPTHS, _CLASSES,
    )  # fmt: skip
    rules = [
        Rule(
            *classes, forward_stage, gradient_stage, 0.0, age, 0.0, 0.5, *patience, split, whole_path, depth, slope
        )
        for whole_path, forward_stage, gradient_stage, age, split, patience, (depth, slope), classes in choices
    ]  # fmt: skip
    # A stride without a common divisor visits the whole grid and moves in all choices at once.
    stride = 1223
    return (rules[index * stride % len(rules)] for index in range(len(rules)))


def changed(rule: Rule, random: np.random.Generator) -> Rule:
    """Return a rule near ``rule``: some weights moved, and now and then another choice taken."""
    values: dict[str, Any] = {}
    for field in fields(rule):
        if field.name not in {"noise", "table"} and random.random() < 0.25:
            values[field.name] = _changed_value(field.name, getattr(rule, field.name), random)
    return replace(rule, **values)


def shaken(rule: Rule, random: np.random.Generator) -> Rule:
    """Return the rule with another table of noise, or with some numbers of its own table drawn again."""
    if not rule.table or random.random() < 0.3:
        return replace(
            rule, noise=float(random.choice(_AMPLITUDES)), table=tuple(random.normal(size=NOISE_SIZE).tolist())
        )
    table = list(rule.table)
    for place in random.integers(0, NOISE_SIZE, size=random.integers(1, 12)).tolist():
        table[place] = float(random.normal())
    noise = float(random.choice(_AMPLITUDES)) if random.random() < 0.2 else rule.noise
    return replace(rule, noise=noise, table=tuple(table))


def _changed_value(name: str, value: float, random: np.random.Generator) -> float:
    if name == "split":
        return float(random.integers(0, 3))
    if name == "whole_path":
        return float(random.integers(0, 2))
    if name == "depth":
        return _UNBOUNDED if random.random() < 0.3 else float(random.integers(1, 8))
    if name == "slope":
        return float(random.choice([0.0, 0.25, 1 / 3, 0.5, 2 / 3, 0.75, 1.0, 1.5]))
    if name in {"patience", "penalty"}:
        return float(abs(value + random.normal() * (0.5 if name == "patience" else 5.0)))
    return float(value + random.normal() * (8.0 if name in {"forward", "gradient", "weight"} else 2.0))
