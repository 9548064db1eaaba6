"""Gradient reduction of one rank: which buffers there are, and which of them an action or a backward starts.

A stage's gradients are summed over all its replicas (routes × d). A parameter that several stages share is in no buffer
of a stage: it is a buffer of its own, summed over the replicas of all its holders, started by the last ``REDUCE_GRAD``
among its holders on this rank. The seeds of the backward already hold 1 / count, so a plain sum is the gradient.
"""

from collections.abc import Sequence

from torch import nn

from chimera.ir.schedule import Placement
from chimera.runtime.buckets import Gradients, Replicas
from chimera.runtime.groups import Groups
from chimera.runtime.weights import Weights
from chimera.tensor.communicator import Communicator
from chimera.tensor.gradient_buffer import of_one_type

__all__ = ["Reduction"]


class Reduction:
    """All gradients of one rank.

    Args:
        weights: this rank's parameters.
        tied_stages: for each tied group of the model, the stages that hold it.
        placement: where the stages live; the first replica of each is the one that counts.
        groups: communicators of stages and tied groups.
        sharded: whether each replica gets its part of the sums only.
        bucket_bytes: gradients that one collective sums.

    Attributes:
        gradients: one per stage or tied group and type of parameters, stages first.
    """

    def __init__(
        self,
        weights: Weights,
        tied_stages: Sequence[Sequence[int]],
        placement: Placement,
        groups: Groups,
        *,
        sharded: bool,
        bucket_bytes: int,
    ) -> None:
        self._reduced: set[int] = set()
        first_replica = groups.data_rank == 0

        def gradients_of(
            parameters: Sequence[nn.Parameter], stages: frozenset[int], group: Communicator | None, first: int
        ) -> list[Gradients]:
            return [
                Gradients(
                    alike,
                    stages=stages,
                    replicas=None if group is None else Replicas(group, groups.rank, on_cpu=groups.staged_on_cpu),
                    sharded=sharded,
                    counted=first_replica and first == groups.pipeline_rank,
                    bucket_bytes=bucket_bytes,
                )
                for alike in of_one_type(parameters)
            ]

        of_stages = {
            stage: gradients_of(weights.untied(stage), frozenset({stage}), group, placement.ranks_of(stage)[0])
            for stage, group in groups.stages.items()
        }
        self.gradients: list[Gradients] = [gradients for alike in of_stages.values() for gradients in alike]
        for number, group in groups.tied.items():
            first = min(rank for stage in tied_stages[number] for rank in placement.ranks_of(stage))
            here = frozenset(tied_stages[number]) & set(groups.stages)
            self.gradients += gradients_of([weights.tied[number]], here, group, first)
        self._untied = {
            stage: {id(parameter): gradients for gradients in alike for parameter in gradients.parameters}
            for stage, alike in of_stages.items()
        }

    def attach(self) -> None:
        """Point every parameter's ``grad`` at its place, but where only a part of the sum is there."""
        for gradients in self.gradients:
            if not gradients.sharded:
                gradients.buffer.attach()

    def begin(self, *, accumulate: bool, factor: float = 1.0) -> None:
        """Make the buffers ready for a run: from zero, or from ``factor`` times what earlier runs left."""
        self._reduced.clear()
        for gradients in self.gradients:
            gradients.begin()
            if not accumulate:
                gradients.buffer.flat.zero_()
            elif factor != 1.0:
                gradients.buffer.flat.mul_(factor)

    def arrived(self, stage: int, parameter: nn.Parameter) -> None:
        """Note that a gradient of ``stage`` is complete, in the backward directly before its ``REDUCE_GRAD``.

        What the stage shares with others waits for that action.
        """
        gradients = self._untied[stage].get(id(parameter))
        if gradients is not None:
            gradients.arrived(parameter)

    def start(self, stage: int) -> None:
        """Start what is complete with ``stage`` and not started yet."""
        self._reduced.add(stage)
        for gradients in self.gradients:
            if stage in gradients.stages and gradients.stages <= self._reduced:
                gradients.start()

    def finish(self) -> None:
        """Wait until every started sum is there."""
        for gradients in self.gradients:
            gradients.finish()

    def scale(self, factor: float) -> None:
        """Multiply all gradients by ``factor``."""
        for gradients in self.gradients:
            for part in gradients.own:
                part.mul_(factor)
