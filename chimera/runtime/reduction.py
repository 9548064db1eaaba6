"""Gradient reduction of one rank: which buffers there are, and which of them an action or a backward starts.

A stage's gradients are summed over all its replicas (routes × d). A parameter that several stages share is in no buffer
of a stage: it is a buffer of its own, summed over the replicas of all its holders, started by the last ``REDUCE_GRAD``
among its holders on this rank. The seeds of the backward already hold 1 / count, so a plain sum is the gradient.

A stage whose parameters are of two types, or held by two groups of ranks, has several buffers. All their buckets start
in one order on every rank, whatever order their gradients arrive in there.
"""

from collections.abc import Iterable, Mapping, Sequence

from torch import nn

from chimera.runtime.ablation import OneByteCommunicator
from chimera.runtime.buckets import Gradients, Replicas
from chimera.runtime.groups import Groups
from chimera.runtime.holdings import Holding
from chimera.tensor.communicator import Pending
from chimera.tensor.gradient_buffer import of_one_type

__all__ = ["Reduction"]


class _Turns:
    """The buckets of buffers that are complete with the same ``REDUCE_GRAD``, in the order in which they start.

    A backward completes the gradients of the last parameters first, so a bucket's turn goes by its first parameter.

    Args:
        gradients: the buffers.
        place: where each parameter stands among those of the stage, by its identity.
    """

    def __init__(self, gradients: Iterable[Gradients], place: Mapping[int, int]) -> None:
        turns = [(place[id(parameter)], buffer) for buffer in gradients for parameter in buffer.completing]
        self._turns = [buffer for _, buffer in sorted(turns, key=lambda turn: turn[0], reverse=True)]
        self._next = 0

    def begin(self) -> None:
        """Begin a run: no bucket has started."""
        self._next = 0

    def start(self, *, complete_only: bool = False) -> None:
        """Start the buckets that are left, or only those up to the first whose gradients have not all arrived."""
        while self._next < len(self._turns) and (self._turns[self._next].next_is_complete or not complete_only):
            self._turns[self._next].start_next()
            self._next += 1


class Reduction:
    """All gradients of one rank.

    Args:
        held: this rank's parameters, by who holds them.
        groups: this rank's place.
        sharded: whether each holder gets its part of the sums only.
        bucket_bytes: gradients that one collective sums.
        one_byte: whether a single byte travels in place of gradients and weights, and every replica keeps its own.

    Attributes:
        gradients: one per holding and type of parameters, stages first.
    """

    def __init__(
        self, held: Sequence[Holding], groups: Groups, *, sharded: bool, bucket_bytes: int, one_byte: bool = False
    ) -> None:
        self._reduced: set[int] = set()
        self.gradients: list[Gradients] = []
        self._of_stage: dict[int, list[Gradients]] = {stage: [] for stage in groups.stages}
        of_tied: list[Gradients] = []
        for holding in held:
            group = None if holding.group is None else OneByteCommunicator(holding.group) if one_byte else holding.group
            of_holding = [
                Gradients(
                    alike,
                    stages=holding.stages,
                    replicas=None if group is None else Replicas(group, groups.rank, on_cpu=groups.staged_on_cpu),
                    sharded=sharded,
                    counted=holding.first or (sharded and group is not None),
                    bucket_bytes=bucket_bytes,
                )
                for alike in of_one_type(holding.parameters)
            ]
            self.gradients += of_holding
            if holding.tied:
                of_tied += of_holding
            else:
                (stage,) = holding.stages
                self._of_stage[stage] += of_holding
        place = {id(p): at for holding in held for p, at in zip(holding.parameters, holding.places, strict=True)}
        self._turns = {stage: _Turns(of_stage, place) for stage, of_stage in self._of_stage.items()}
        self._tied = {gradients: _Turns([gradients], place) for gradients in of_tied}
        self._untied = {
            id(parameter): (gradients, self._turns[stage])
            for stage, of_stage in self._of_stage.items()
            for gradients in of_stage
            for parameter in gradients.parameters
        }

    def attach(self) -> None:
        """Point every parameter's ``grad`` at its place, but where only a part of the sum is there."""
        for gradients in self.gradients:
            if not gradients.sharded:
                gradients.buffer.attach()

    def begin(self, *, accumulate: bool, factor: float = 1.0) -> None:
        """Make the buffers ready for a run: from zero, or from ``factor`` times what earlier runs left."""
        self._reduced.clear()
        for turns in (*self._turns.values(), *self._tied.values()):
            turns.begin()
        for gradients in self.gradients:
            gradients.begin()
            if not accumulate:
                gradients.buffer.flat.zero_()
            elif factor != 1.0:
                gradients.buffer.flat.mul_(factor)

    def exchanges(self, stage: int) -> bool:
        """Whether gradients of a stage's own parameters are summed with those of other ranks."""
        return any(gradients.replicas is not None for gradients in self._of_stage[stage])

    def arrived(self, parameter: nn.Parameter) -> None:
        """Note that a gradient is complete, in the backward directly before the ``REDUCE_GRAD`` of its stage.

        What the stage shares with others waits for that action.
        """
        if id(parameter) in self._untied:
            gradients, turns = self._untied[id(parameter)]
            gradients.arrived(parameter)
            turns.start(complete_only=True)

    def start(self, stage: int) -> list[Pending]:
        """Start what is complete with ``stage`` and not started yet; return what of that is under way."""
        self._reduced.add(stage)
        self._turns[stage].start()
        tied = [gradients for gradients in self._tied if stage in gradients.stages <= self._reduced]
        for gradients in tied:
            self._tied[gradients].start()
        return [pending for gradients in (*self._of_stage[stage], *tied) for pending in gradients.under_way]

    def finish(self, stage: int | None = None) -> None:
        """Wait until every started sum is there; with ``stage``, those of its own parameters."""
        for gradients in self.gradients if stage is None else self._of_stage[stage]:
            gradients.finish()

    def zero(self, stage: int) -> None:
        """Set the gradients of a stage's own parameters to zero, and begin new ones."""
        self._turns[stage].begin()
        for gradients in self._of_stage[stage]:
            gradients.begin()
            gradients.buffer.flat.zero_()

    def scale(self, factor: float) -> None:
        """Multiply all gradients by ``factor``."""
        for gradients in self.gradients:
            for part in gradients.own:
                part.mul_(factor)
