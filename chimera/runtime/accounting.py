"""The arithmetic of the loss over a step: counts before the first backward, the total on every rank at the end.

Terms are known by names that the first holder of the last stage tells once. Everything here is a small sum over ranks;
what a term means is the loss function's business.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
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
        self._speaker = self._end_of(schedule.microbatch_to_route[0])

    def _end_of(self, route: int) -> int:
        """Return the world rank at the end of a route, the first of all replicas and tensor-parallel ranks."""
        return self._schedule.placement.routes[route][-1] * self._groups.grid.width

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
        everything = range(len(targets))
        names = self._agreed_names(lambda: self._counts_of(targets, outputs, everything), self._speaker)
        if given is not None and set(given) != set(names):
            raise UsageError(f"counts= names {', '.join(given)}; needed: exactly the loss terms {', '.join(names)}")
        totals: Counts = {}
        if self._last in self._groups.stages:
            mine = self._counts_of(targets, outputs, everything) if given is None else self._said_once(given)
            counted = self._sum_over_last_stage([mine.get(name, 0.0) for name in names])
            before = self._counts if given is None else {}
            totals = {name: before.get(name, 0.0) + count for name, count in zip(names, counted, strict=True)}
        # Only a later run of a step needs anything from elsewhere.
        factor = self._factor(names, self._counts, totals) if self.runs else 1.0
        self._counts = totals
        return totals, factor

    def count_updates(
        self, targets: Sequence[Any], outputs: Sequence[Mapping[int, Spec]], update_of: Sequence[int]
    ) -> list[Counts]:
        """Return the counts of each update of an asynchronous schedule, which divide the losses it is made of.

        Args:
            targets: one per micro-batch.
            outputs: one per micro-batch: the shapes that stages give.
            update_of: one per micro-batch: its update.
        """
        parts = [[m for m, update in enumerate(update_of) if update == number] for number in range(max(update_of) + 1)]
        names = self._agreed_names(lambda: self._counts_of(targets, outputs, range(len(targets))), self._speaker)
        totals: list[Counts] = [{} for _ in parts]
        if self._last in self._groups.stages:
            mine = [self._counts_of(targets, outputs, part) for part in parts]
            counted = self._sum_over_last_stage([counts.get(name, 0.0) for counts in mine for name in names])
            rows = [counted[first : first + len(names)] for first in range(0, len(counted), len(names))]
            totals = [dict(zip(names, row, strict=True)) for row in rows]
        self._counts = {name: sum(counts.get(name, 0.0) for counts in totals) for name in names}
        return totals

    def _factor(self, names: Sequence[str], before: Counts, after: Counts) -> float:
        """Return how gradients of earlier runs are weighed anew, or refuse, on every rank alike."""
        told = self._from_speaker([counts.get(name, 0.0) for counts in (before, after) for name in names])
        told_before, told_after = told[: len(names)], told[len(names) :]
        return _common_ratio(dict(zip(names, told_before, strict=True)), dict(zip(names, told_after, strict=True)))

    def _counts_of(
        self, targets: Sequence[Any], outputs: Sequence[Mapping[int, Spec]], microbatches: Iterable[int]
    ) -> Counts:
        """Return the counts of those of the micro-batches whose last stage is here."""
        mine: Counts = {}
        for microbatch in microbatches:
            if self._schedule.rank_of(self._last, microbatch) == self._groups.pipeline_rank:
                shape = _without_storage(outputs[microbatch].get(self._last, ()))
                for name, count in count_terms(self._loss_fn, shape, targets[microbatch]).items():
                    mine[name] = mine.get(name, 0.0) + count
        return mine

    def _said_once(self, given: Mapping[str, float]) -> Counts:
        """Return what the caller said of the whole replica on one of the last stage's holders, zeros on the others."""
        speaks = self._groups.pipeline_rank == self._groups.grid.place(self._speaker).pipeline
        return {name: float(count) if speaks else 0.0 for name, count in given.items()}

    def total(self, sums: Mapping[str, tuple[float, float]], *, last: bool) -> torch.Tensor:
        """Add this run's sums of all ranks and return the step's loss so far."""
        names = self._agreed_names(lambda: sums, self._speaker)
        if self._last in self._groups.stages:
            run = self._sum_over_last_stage([sums[name][0] if name in sums else 0.0 for name in names])
            self._sums = {name: self._sums.get(name, 0.0) + value for name, value in zip(names, run, strict=True)}
        loss = self._settle(names, self._sums, self._counts)
        self.runs += 1
        if last:
            self.runs, self._counts, self._sums = 0, {}, {}
        return loss

    def evaluation_total(self, sums: Mapping[str, tuple[float, float]], *, first_route: int) -> torch.Tensor:
        """Return the loss of an evaluation, whose counts come with its sums and micro-batch 0 by ``first_route``."""
        names = self._agreed_names(lambda: sums, self._end_of(first_route))
        totals: list[float] = []
        if self._last in self._groups.stages:
            seen = [sums.get(name, (0.0, 0.0)) for name in names]
            totals = self._sum_over_last_stage([total for total, _ in seen] + [count for _, count in seen])
        return self._settle(
            names,
            dict(zip(names, totals, strict=False)),
            dict(zip(names, totals[len(names) :], strict=False)),
        )

    def _sum_over_last_stage(self, values: Sequence[float]) -> list[float]:
        """Sum over the holders of the last stage, all routes and replicas of it; only they call this."""
        wire = torch.tensor(values, dtype=torch.float64)
        holders = self._groups.stages[self._last]
        if holders is not None:
            wire = wire if self._groups.staged_on_cpu else wire.to(self._groups.device)
            holders.all_reduce(wire).wait()
        summed: list[float] = wire.tolist()
        return summed

    def _from_speaker(self, values: Sequence[float]) -> list[float]:
        """Return the speaker's values on every rank."""
        wire = torch.tensor(values, dtype=torch.float64)
        if self._groups.control is not None:
            self._groups.control.broadcast(wire, self._speaker).wait()
        told: list[float] = wire.tolist()
        return told

    def _settle(self, names: Sequence[str], sums: Mapping[str, float], counts: Mapping[str, float]) -> torch.Tensor:
        """Tell every rank the terms, which the last stage's holders know."""
        told = self._from_speaker([sums[name] / counts[name] if counts.get(name) else 0.0 for name in names])
        self.terms = dict(zip(names, told, strict=True))
        return torch.tensor(sum(told), dtype=torch.float64)

    def _agreed_names(self, mine: Callable[[], Mapping[str, Any]], root: int) -> list[str]:
        """Return the names of the loss terms, asked once, of a rank where a micro-batch ends."""
        if self._names is None:
            self._names = list(share_json(self._groups, list(mine()), root=root))
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
