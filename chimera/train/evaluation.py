"""The held-out measurement: the same samples every time, forward only, each data-parallel replica on its share.

Besides the losses it counts how many answers are right (of next sentences, of retrieved blocks), which a loss alone
does not say.
"""

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from chimera.data import Microbatch, Samples, evaluation_microbatches
from chimera.models.losses import Term
from chimera.runtime.pipeline import Pipeline
from chimera.train.families import Loss
from chimera.train.metrics import EvaluationMetrics

__all__ = ["CountingLoss", "evaluate", "heldout_share"]


class CountingLoss:
    """A family's loss, which on the way notes how many answers were right since ``restart``, if the family says.

    Args:
        loss: of the family.

    Attributes:
        fields, terms: of the family's loss.
        told_right: the term whose answers are counted; None for none.
        right, asked: what this rank has seen.
    """

    def __init__(self, loss: Loss) -> None:
        self._loss = loss
        self.fields, self.terms, self.told_right = loss.fields, loss.terms, loss.told_right
        self.restart()

    def restart(self) -> None:
        """Count from zero."""
        self.right = 0
        self.asked = 0

    def __call__(self, output: Any, target: Mapping[str, Tensor]) -> dict[str, Term]:
        """Return the loss terms."""
        # Counting makes the host wait for the device, so it is left to evaluation, which has no graph.
        if self.told_right is not None and not torch.is_grad_enabled():
            self.right += self._loss.num_right(output, target)
            self.asked += self.counts(target)[self.told_right]
        return self._loss(output, target)

    def counts(self, target: Mapping[str, Tensor]) -> dict[str, int]:
        """Return the count of each term."""
        return self._loss.counts(target)


def heldout_share(
    samples: Samples,
    *,
    num_samples: int,
    microbatch_size: int,
    replica: int,
    replicas: int,
    fields: Collection[str] | None = None,
) -> tuple[Microbatch, ...]:
    """Return one replica's micro-batches of the first ``num_samples``, of which every replica has equally many.

    Only ``fields`` are made; all where not given.
    """
    total = num_samples // microbatch_size
    if total == 0:
        return ()
    everything = evaluation_microbatches(
        samples, microbatch_size=microbatch_size, num_microbatches=total, fields=fields
    )
    share = total // replicas
    return everything[replica * share : (replica + 1) * share]


def evaluate(pipe: Pipeline, loss: CountingLoss, microbatches: Sequence[Microbatch], *, step: int) -> EvaluationMetrics:
    """Measure the present weights on this replica's micro-batches; a collective, with the same result on every rank."""
    loss.restart()
    pipe.evaluate(list(microbatches), list(microbatches))
    counted = torch.tensor([float(loss.right), float(loss.asked)], dtype=torch.float64)
    if pipe.groups.tensor.rank:
        counted.zero_()  # ranks that share their layers have seen the same
    right, asked = pipe.groups.sum_everywhere(counted).tolist()
    return EvaluationMetrics(
        step=step,
        terms=dict(pipe.terms),
        told_right=loss.told_right,
        accuracy=right / asked if asked else None,
        answers=int(asked) if asked else None,
    )
