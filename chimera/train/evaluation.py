"""The held-out measurement: the same samples every time, forward only, each data-parallel replica on its share.

Besides the two losses it counts how many next sentences are told right, which a loss alone does not say.
"""

from collections.abc import Collection, Mapping, Sequence

import torch
from torch import Tensor

from chimera.data import Microbatch, Samples, evaluation_microbatches
from chimera.models import BertPretrainingLoss
from chimera.models.losses import IGNORED_LABEL, Term
from chimera.runtime.pipeline import Pipeline
from chimera.tensor.vocabulary import Vocabulary
from chimera.train.metrics import EvaluationMetrics

__all__ = ["CountingLoss", "evaluate", "heldout_share"]


class CountingLoss(BertPretrainingLoss):
    """BERT's loss, which on the way notes how many next sentences were told right since ``restart``.

    Attributes:
        right, pairs: what this rank has seen.
    """

    def __init__(self, vocabulary: Vocabulary | None = None) -> None:
        super().__init__(vocabulary)
        self.restart()

    def restart(self) -> None:
        """Count from zero."""
        self.right = 0
        self.pairs = 0

    def __call__(self, output: tuple[Tensor, Tensor], target: Mapping[str, Tensor]) -> dict[str, Term]:
        """Return the loss terms, see ``BertPretrainingLoss``."""
        # Counting makes the host wait for the device, so it is left to evaluation, which has no graph.
        if not torch.is_grad_enabled():
            labels = target["nsp_labels"]
            self.right += int((output[1].argmax(-1) == labels).sum())
            self.pairs += int((labels != IGNORED_LABEL).sum())
        return super().__call__(output, target)


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
    counted = torch.tensor([float(loss.right), float(loss.pairs)], dtype=torch.float64)
    if pipe.groups.tensor.rank:
        counted.zero_()  # ranks that share their layers have seen the same
    right, pairs = pipe.groups.sum_everywhere(counted).tolist()
    return EvaluationMetrics(
        step=step,
        heldout_mlm_loss=pipe.terms["mlm"],
        heldout_nsp_loss=pipe.terms["nsp"],
        heldout_nsp_accuracy=right / pairs,
        heldout_pairs=int(pairs),
    )
