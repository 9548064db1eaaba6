"""Gradient reduction: one flat buffer per stage replica, one bucket per tied group, started by ``REDUCE_GRAD``.

A stage's buffer is summed over all its replicas (routes × d). A parameter that several stages share is in no stage's
buffer: it is a bucket of its own, summed over the replicas of all its holders, started by the last ``REDUCE_GRAD``
among its holders on this rank. The seeds of the backward already hold 1 / count, so a plain sum is the gradient.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from chimera.ir.schedule import Placement
from chimera.runtime.groups import Groups
from chimera.runtime.weights import Weights
from chimera.tensor.communicator import Communicator, Pending
from chimera.tensor.gradient_buffer import GradientBuffer

__all__ = ["Bucket", "Reduction"]


@dataclass(slots=True)
class Bucket:
    """A buffer, the group it is summed over, and the stages whose last ``REDUCE_GRAD`` starts it.

    ``counted`` is true on the one rank whose copy enters the gradient norm.
    """

    buffer: GradientBuffer
    group: Communicator | None
    stages: frozenset[int]
    counted: bool
    sums: list[tuple[Pending, torch.Tensor, torch.Tensor]] = field(default_factory=list)


class Reduction:
    """All buckets of one rank.

    Args:
        weights: this rank's parameters.
        tied_stages: for each tied group of the model, the stages that hold it.
        placement: where the stages live; the first replica of each is the one that counts.
        groups: communicators of stages and tied groups.
    """

    def __init__(
        self, weights: Weights, tied_stages: Sequence[Sequence[int]], placement: Placement, groups: Groups
    ) -> None:
        self._groups = groups
        self._reduced: set[int] = set()
        self.buckets: list[Bucket] = []
        for stage, group in groups.stages.items():
            counted = groups.data_rank == 0 and placement.ranks_of(stage)[0] == groups.pipeline_rank
            buffer = GradientBuffer(weights.untied(stage))
            self.buckets.append(Bucket(buffer, group, frozenset({stage}), counted))
        for number, group in groups.tied.items():
            first = min(rank for stage in tied_stages[number] for rank in placement.ranks_of(stage))
            counted = groups.data_rank == 0 and first == groups.pipeline_rank
            here = frozenset(tied_stages[number]) & set(groups.stages)
            self.buckets.append(Bucket(GradientBuffer([weights.tied[number]]), group, here, counted))

    def attach(self) -> None:
        """Point every parameter's ``grad`` at its place in a buffer."""
        for bucket in self.buckets:
            bucket.buffer.attach()

    def begin(self, *, accumulate: bool, factor: float = 1.0) -> None:
        """Make the buffers ready for a run: from zero, or from ``factor`` times what earlier runs left."""
        self._reduced.clear()
        self.attach()
        for bucket in self.buckets:
            if not accumulate:
                bucket.buffer.zero()
            elif factor != 1.0:
                bucket.buffer.scale(factor)

    def scale(self, factor: float) -> None:
        """Multiply all gradients by ``factor``."""
        for bucket in self.buckets:
            bucket.buffer.scale(factor)

    def start(self, stage: int) -> None:
        """Start summing the buckets for which ``stage`` was the last to finish here."""
        self._reduced.add(stage)
        for bucket in self.buckets:
            if stage in bucket.stages and bucket.stages <= self._reduced and bucket.group is not None:
                for flat in bucket.buffer.flats:
                    wire = flat.cpu() if self._groups.staged_on_cpu else flat
                    bucket.sums.append((bucket.group.all_reduce(wire), wire, flat))

    def finish(self) -> None:
        """Wait until every started sum is there."""
        for bucket in self.buckets:
            for work, wire, flat in bucket.sums:
                work.wait()
                if wire is not flat:
                    flat.copy_(wire)
            bucket.sums.clear()

    def gradient_norm(self) -> float:
        """Return the 2-norm of the whole model's gradient, each parameter counted once; a collective."""
        squared = sum(bucket.buffer.squared_norm() for bucket in self.buckets if bucket.counted)
        return float(self._groups.sum_everywhere(torch.tensor([squared], dtype=torch.float64)).sqrt())
