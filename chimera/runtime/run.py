"""``Run``: one pass over a set of micro-batches, with what its losses are divided by and what they have come to.

It knows no stages, messages or schedules; actions read their micro-batch here and leave their loss terms.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from chimera.runtime.channels import Spec
from chimera.runtime.loss import Counts, Terms
from chimera.tensor.randomness import Keys

__all__ = ["Run"]


@dataclass(slots=True)
class Run:
    """One pass over a set of micro-batches.

    Attributes:
        batches, targets: the micro-batches.
        specs: for each micro-batch, what stages give: stage → spec.
        keys: for each micro-batch, its random keys; None in evaluation.
        route_of: for each micro-batch, its route.
        update_of: for each micro-batch, the update that its gradients are part of; all 0 where the caller steps.
        counts: for each update, the count of each loss term, known before the first backward.
        loss_scale: what gradients are multiplied by.
        seen: the loss terms seen here so far: name → sums and counts of single micro-batches.
    """

    batches: Sequence[Any]
    targets: Sequence[Any]
    specs: Sequence[dict[int, Spec]]
    keys: Sequence[Keys] | None
    route_of: Sequence[int]
    update_of: Sequence[int]
    counts: Sequence[Counts]
    loss_scale: float = 1.0
    seen: dict[str, tuple[list[torch.Tensor], list[float]]] = field(default_factory=dict)
    _seeds: dict[tuple[int, str], torch.Tensor] = field(default_factory=dict)

    def add(self, terms: Terms) -> None:
        """Add one micro-batch's loss terms."""
        for name, (total, count) in terms.items():
            sums, counts = self.seen.setdefault(name, ([], []))
            sums.append(total.detach())
            counts.append(count)

    def counts_for(self, microbatch: int) -> Counts:
        """Return the counts by which a micro-batch's loss is divided: those of its update."""
        return self.counts[self.update_of[microbatch]]

    def seed(self, microbatch: int, name: str, total: torch.Tensor) -> torch.Tensor:
        """Return ``loss_scale`` / count of a term, as the tensor its backward starts from."""
        key = self.update_of[microbatch], name
        found = self._seeds.get(key)
        if found is None or found.dtype is not total.dtype:
            found = self._seeds[key] = total.new_tensor(self.loss_scale / self.counts_for(microbatch)[name])
        return found

    def sums(self) -> dict[str, tuple[float, float]]:
        """Return each loss term's sum and count over the micro-batches seen here."""
        return {
            name: (float(torch.stack(sums).sum(dtype=torch.float64)), sum(counts))
            for name, (sums, counts) in self.seen.items()
        }
