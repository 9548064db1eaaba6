"""The arithmetic of the loss over a step: counts before the first backward, the total on every rank at the end.

Terms are known by names that the first holder of the last stage tells once. Everything here is a small sum over ranks;
what a term means is the loss function's business.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from chimera.errors import UsageError
from chimera.ir.schedule import Schedule
from chimera.runtime.channels import Spec
from chimera.runtime.groups import Groups
from chimera.runtime.loss import Counts, LossFunction, count_terms
from chimera.runtime.shapes import share_json

__all__ = ["LossAccount"]


class LossAccount:
    """Counts and sums of the current step, over its micro-batches, runs and replicas.

    Attributes:
        runs: runs of the current step so far.
        terms: the latest total by term, sum / count.
    """

    def __init__(self, schedule: Schedule, groups: Groups, loss_fn: LossFunction) -> None:
        self.runs = 0
        self.terms: dict[str, float] = {}
        self._schedule = schedule
        self._groups = groups
        self._loss_fn = loss_fn
        self._last = schedule.num_stages - 1
        self._names: list[str] | None = None
        self._counts: Counts = {}
        self._sums: dict[str, float] = {}
        # The first holder of the last stage on the route of micro-batch 0, which always has one to speak for.
        self._speaker = schedule.placement.routes[schedule.microbatch_to_route[0]][-1] * groups.data_size

    def count(
        self, targets: Sequence[Any], outputs: Sequence[Mapping[int, Spec]], given: Mapping[str, float] | None
    ) -> tuple[Counts, float]:
        """Return the step's counts, and the factor by which gradients of its earlier runs are to be weighed anew.

        Args:
            targets: one per micro-batch of this run.
            outputs: one per micro-batch: the shapes that stages give.
            given: the counts of the whole step on this replica, where the caller knows them.

        Raises:
            UsageError: ``given`` names other terms, or earlier runs cannot be weighed anew.
        """
        mine: Counts = {}
        for microbatch, target in enumerate(targets):
            if self._schedule.rank_of(self._last, microbatch) == self._groups.pipeline_rank:
                shape = _without_storage(outputs[microbatch].get(self._last, ()))
                for name, count in count_terms(self._loss_fn, shape, target).items():
                    mine[name] = mine.get(name, 0.0) + count
        names = self._agreed_names(mine)
        if given is not None and set(given) != set(names):
            raise UsageError(f"counts= names {', '.join(given)}; needed: exactly the loss terms {', '.join(names)}")
        if given is not None:
            # Said once per replica.
            speaks = self._groups.world_rank(0) + self._speaker == self._groups.rank
            mine = {name: float(given[name]) if speaks else 0.0 for name in names}
        counted = self._groups.sum_everywhere(torch.tensor([mine.get(n, 0.0) for n in names], dtype=torch.float64))
        totals = dict(zip(names, counted.tolist(), strict=True))
        if given is None:
            totals = {name: self._counts.get(name, 0.0) + count for name, count in totals.items()}
        factor = _common_ratio(self._counts, totals) if self.runs else 1.0
        self._counts = totals
        return totals, factor

    def total(self, sums: Mapping[str, tuple[float, float]], *, last: bool) -> torch.Tensor:
        """Add this run's sums of all ranks and return the step's loss so far."""
        names = self._agreed_names(sums)
        run = self._sum_over_ranks(names, sums, column=0)
        self._sums = {name: self._sums.get(name, 0.0) + value for name, value in zip(names, run, strict=True)}
        loss = self._settle(self._sums, self._counts)
        self.runs += 1
        if last:
            self.runs, self._counts, self._sums = 0, {}, {}
        return loss

    def evaluation_total(self, sums: Mapping[str, tuple[float, float]]) -> torch.Tensor:
        """Return the loss of an evaluation, whose counts come with its sums."""
        names = self._agreed_names(sums)
        totals, counts = (self._sum_over_ranks(names, sums, column=column) for column in (0, 1))
        return self._settle(dict(zip(names, totals, strict=True)), dict(zip(names, counts, strict=True)))

    def _sum_over_ranks(
        self, names: Sequence[str], sums: Mapping[str, tuple[float, float]], *, column: int
    ) -> list[float]:
        mine = torch.tensor([sums[name][column] if name in sums else 0.0 for name in names], dtype=torch.float64)
        total: list[float] = self._groups.sum_everywhere(mine).tolist()
        return total

    def _settle(self, sums: Mapping[str, float], counts: Mapping[str, float]) -> torch.Tensor:
        self.terms = {name: total / counts[name] if counts[name] else 0.0 for name, total in sums.items()}
        return torch.tensor(sum(self.terms.values()), dtype=torch.float64)

    def _agreed_names(self, mine: Mapping[str, Any]) -> list[str]:
        if self._names is None:
            self._names = list(share_json(self._groups, list(mine), root=self._speaker))
        return self._names


def _common_ratio(before: Counts, after: Counts) -> float:
    """Return the factor by which every term's 1 / count shrinks from one run of a step to the next."""
    ratios = {name: before[name] / count for name, count in after.items() if count}
    ratio = next(iter(ratios.values()), 1.0)
    if any(not math.isclose(other, ratio, rel_tol=1e-12) for other in ratios.values()):
        raise UsageError(
            f"the counts of the loss terms grew unevenly over accumulation runs (from {before} to {after}), so the "
            "gradients of earlier runs cannot be weighed anew; pass counts= of the whole step to every run"
        )
    return ratio


def _without_storage(spec: Spec) -> Any:
    """Return tensors of these shapes that take no memory: counting only looks at shapes."""
    tensors = tuple(torch.zeros((), dtype=dtype).expand(shape) for shape, dtype in spec)
    return tensors[0] if len(tensors) == 1 else tensors
