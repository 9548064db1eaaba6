"""What actions cost: ``Costs`` in units of 1/p of the model, ``StageCosts`` per stage in seconds and bytes.

Both resolve, for one schedule, to the same arrays per kind and stage, which is all the simulator sees. Nothing here
knows an order of actions, and no cost depends on when or where an action runs. Files are read in ``ir.costs_file``.
"""

import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from chimera.errors import UsageError
from chimera.ir.action import Kind
from chimera.ir.files import shown
from chimera.ir.schedule import Schedule

__all__ = [
    "MODEL_UNIT",
    "PER_BOUNDARY_FIELDS",
    "PER_STAGE_FIELDS",
    "SECOND",
    "Costs",
    "PairTime",
    "ResolvedCosts",
    "StageCosts",
]

MODEL_UNIT: Final = "model unit"
"""The unit of ``Costs``: the time that 1/p of the model takes for one micro-batch, when that is called 1."""

SECOND: Final = "s"
"""The unit of ``StageCosts`` and of recorded timelines."""


PER_STAGE_FIELDS: Final = (
    "forward_s",
    "backward_s",
    "input_grad_s",
    "weight_grad_s",
    "activation_bytes",
    "weight_bytes",
    "gradient_bytes",
    "reduce_s",
    "held_for_weight_grad",
)
"""The fields of ``StageCosts`` that hold one number per stage."""

PER_BOUNDARY_FIELDS: Final = ("message_bytes", "message_s")
"""The fields of ``StageCosts`` that hold one number per boundary between stages."""


@dataclass(frozen=True, slots=True, eq=False)
class ResolvedCosts:
    """Times and memory of one schedule's actions, in arrays.

    Attributes:
        unit: of all times here, ``MODEL_UNIT`` or ``SECOND``.
        duration: [kind, stage]; a SEND holds the time of the message that leaves the stage, a RECV that of the
            message that arrives, REDUCE_GRAD the stage's gradient reduction; STEP is free.
        pair: time of an overlapped pair by (stage of the forward, stage of the backward, kind of the backward); a
            pair that is absent takes the sum of its two.
        activations: [stage], what one micro-batch holds from its forward to its last backward, in units of 1/p of
            the model for one whole micro-batch.
        activation_bytes: [stage], the same in bytes, where known.
        resident_bytes: [stage], weights and gradients, where known.
        weight_bytes: [stage], one version of the weights, where known.
        held_for_weight_grad: [stage], the share of its activations that a split backward holds from I to W; all of it
            without.
    """

    unit: str
    duration: NDArray[np.float64]
    pair: Mapping[tuple[int, int, Kind], float]
    activations: NDArray[np.float64]
    activation_bytes: NDArray[np.float64] | None = None
    resident_bytes: NDArray[np.float64] | None = None
    weight_bytes: NDArray[np.float64] | None = None
    held_for_weight_grad: NDArray[np.float64] | None = None


_OPTIONS: Final = {"reduce": "--reduce-time"}
"""Options that are not called as their field."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Costs:
    """Uniform costs. One unit of time is 1/p of the model for one micro-batch: a stage of S stages costs p/S of it.

    A schedule whose micro-batches are parts of whole ones (backward halving) pays that share of every computation and
    of every message's size; latency and gradient reduction do not shrink with the micro-batch.

    Attributes:
        forward: time of F.
        backward: time of B, the whole backward.
        input_grad: time of I; without it what ``weight_grad`` leaves of ``backward``, or half.
        weight_grad: time of W; without it what ``input_grad`` leaves of ``backward``, or half.
        overlap: time of an F and a B run together as a pair; without it, and for an F with an I, the sum of the two.
        p2p: latency of one hop between ranks.
        message_size: size of one whole micro-batch's message, in any unit that ``bandwidth`` uses.
        bandwidth: size per unit of time; a message takes p2p + message_size / bandwidth.
        reduce: time to reduce the gradients of 1/p of the model.
        held_for_weight_grad: share of a micro-batch's activations that a split backward holds from I to W, from 0 to 1:
            what the weights' gradients need. In a transformer block with explicit attention scores it is
            32h/(34h + 5as), Zero Bubble, ICLR 2024 (arXiv 2401.10241), §2.3.

    >>> costs = Costs(forward=1, backward=2, p2p=0.1).resolve(
    ...     Schedule.from_text(["0F0 2F0 2B0 0B0", "1F0 3F0 3B0 1B0"], routes=[[0, 1, 0, 1]])
    ... )
    >>> costs.duration[Kind.B].tolist(), costs.duration[Kind.SEND_F].tolist()
    ([1.0, 1.0, 1.0, 1.0], [0.1, 0.1, 0.1, 0.0])
    """

    forward: float = 1.0
    backward: float = 2.0
    input_grad: float | None = None
    weight_grad: float | None = None
    overlap: float | None = None
    p2p: float = 0.0
    message_size: float = 0.0
    bandwidth: float = math.inf
    reduce: float = 0.0
    held_for_weight_grad: float = 1.0

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if value is not None and field.name != "bandwidth":
                _check_quantity(value, _OPTIONS.get(field.name, f"--{field.name.replace('_', '-')}"))
        _check_share(self.held_for_weight_grad, "--held-for-weight-grad")
        if not self.bandwidth > 0:
            raise UsageError(f"--bandwidth {self.bandwidth}: needed: more than 0, or leave it out for messages of p2p")
        for name, part in (("input-grad", self.input_grad), ("weight-grad", self.weight_grad)):
            if part is not None and None in (self.input_grad, self.weight_grad) and part > self.backward:
                raise UsageError(
                    f"--{name} {part} is more than --backward {self.backward}, of which it is a part; "
                    "lower it, raise --backward, or give both --input-grad and --weight-grad"
                )

    def split_backward(self) -> tuple[float, float]:
        """Return the times of I and W."""
        input_grad, weight_grad = _split(self.backward, self.input_grad, self.weight_grad)
        return float(input_grad), float(weight_grad)

    def resolve(self, schedule: Schedule) -> ResolvedCosts:
        """Return the costs of ``schedule``'s actions, in model units."""
        num_stages = schedule.num_stages
        stage_share = schedule.num_ranks / num_stages
        part = stage_share * schedule.microbatch_share
        input_grad, weight_grad = self.split_backward()
        duration = np.zeros((len(Kind), num_stages))
        for kind, time in (
            (Kind.F, self.forward),
            (Kind.B, self.backward),
            (Kind.I, input_grad),
            (Kind.W, weight_grad),
        ):
            duration[kind] = time * part
        duration[Kind.REDUCE_GRAD] = self.reduce * stage_share
        message = self.p2p + schedule.microbatch_share * self.message_size / self.bandwidth
        _fill_messages(duration, np.full(num_stages - 1, message))
        pairs = {} if self.overlap is None else dict.fromkeys(_pairs_with_b(schedule), self.overlap * part)
        held = None if self.held_for_weight_grad == 1 else np.full(num_stages, float(self.held_for_weight_grad))
        return ResolvedCosts(MODEL_UNIT, duration, pairs, _unit_activations(schedule), held_for_weight_grad=held)


class PairTime(NamedTuple):
    """Seconds of a forward and a backward (``kind`` B or I) run together, for one whole micro-batch each."""

    forward: int
    backward: int
    kind: Kind
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class StageCosts:
    """Costs per stage, in seconds and bytes, for one whole micro-batch.

    Attributes:
        forward_s: [stage], F.
        backward_s: [stage], B.
        input_grad_s: [stage], I; where not given what W leaves of B, or half.
        weight_grad_s: [stage], W; where not given what I leaves of B, or half.
        activation_bytes: [stage], held from F to B or W.
        weight_bytes: [stage].
        gradient_bytes: [stage].
        message_bytes: [boundary], the tensors between stage i and stage i + 1, the same size in both directions.
        message_s: [boundary], time of such a message where it was measured, links being of several kinds; it stands in
            for latency and bytes over bandwidth.
        latency_s: of one message between two ranks.
        bandwidth_bytes_per_s: of the link between two ranks; needed with ``message_bytes``.
        reduce_s: [stage], reduction of the stage's gradients over its replicas.
        held_for_weight_grad: [stage], the share of its activations held from I to W, from 0 to 1; all of it without.
        overlap_s: times of overlapped pairs; a pair without one takes the sum of its two.
    """

    forward_s: Sequence[float]
    backward_s: Sequence[float]
    input_grad_s: Sequence[float] | None = None
    weight_grad_s: Sequence[float] | None = None
    activation_bytes: Sequence[float] | None = None
    weight_bytes: Sequence[float] | None = None
    gradient_bytes: Sequence[float] | None = None
    message_bytes: Sequence[float] | None = None
    message_s: Sequence[float] | None = None
    latency_s: float = 0.0
    bandwidth_bytes_per_s: float | None = None
    reduce_s: Sequence[float] | None = None
    held_for_weight_grad: Sequence[float] | None = None
    overlap_s: Sequence[PairTime] = ()

    def __post_init__(self) -> None:
        num_stages = len(self.forward_s)
        if num_stages == 0:
            raise UsageError("--costs: forward_s has no stage; needed: one time per stage")
        for name in PER_STAGE_FIELDS:
            _check_column(getattr(self, name), f"--costs: {name}", num_stages, "stage")
        for name in PER_BOUNDARY_FIELDS:
            _check_column(getattr(self, name), f"--costs: {name}", num_stages - 1, "boundary")
        _check_quantity(self.latency_s, "--costs: latency_s")
        if self.bandwidth_bytes_per_s is not None:
            _check_quantity(self.bandwidth_bytes_per_s, "--costs: bandwidth_bytes_per_s")
            if self.bandwidth_bytes_per_s == 0:
                raise UsageError("--costs: bandwidth_bytes_per_s is 0; needed: more than 0")
        elif self.message_bytes is not None and self.message_s is None:
            raise UsageError(
                "--costs: message_bytes is given without bandwidth_bytes_per_s; needed: both or neither, or message_s"
            )
        for stage, share in enumerate(self.held_for_weight_grad or ()):
            _check_share(share, f"--costs: held_for_weight_grad[{stage}]")
        self._check_split()
        for pair in self.overlap_s:
            self._check_pair(pair)

    def _check_split(self) -> None:
        """Refuse a part of the backward that leaves less than nothing for the other part."""
        for known, other in (("input_grad_s", "weight_grad_s"), ("weight_grad_s", "input_grad_s")):
            part = getattr(self, known)
            if part is None or getattr(self, other) is not None:
                continue
            for stage, (whole, time) in enumerate(zip(self.backward_s, part, strict=True)):
                if time > whole:
                    raise UsageError(
                        f"--costs: {known}[{stage}] is {time}, more than backward_s[{stage}] = {whole}, of which it is "
                        f"a part; needed: {other} as well, or a smaller {known}"
                    )

    def _check_pair(self, pair: PairTime) -> None:
        if not (0 <= pair.forward < self.num_stages and 0 <= pair.backward < self.num_stages):
            raise UsageError(
                f"--costs: overlap_s pairs stages {pair.forward} and {pair.backward}; "
                f"needed: stages in 0…{self.num_stages - 1}"
            )
        if pair.kind not in {Kind.B, Kind.I}:
            raise UsageError(f"--costs: overlap_s pairs a forward with {pair.kind.name}; needed: B or I")
        _check_quantity(pair.seconds, f"--costs: overlap_s of stages {pair.forward} and {pair.backward}")

    @property
    def num_stages(self) -> int:
        """Stages these costs are for."""
        return len(self.forward_s)

    def resolve(self, schedule: Schedule) -> ResolvedCosts:
        """Return the costs of ``schedule``'s actions, in seconds.

        Raises:
            UsageError: the schedule has another number of stages.
        """
        if self.num_stages != schedule.num_stages:
            raise UsageError(
                f"--costs gives {self.num_stages} stages, schedule {schedule.name!r} has {schedule.num_stages}; "
                "needed: costs of every stage of the schedule, no more"
            )
        share = schedule.microbatch_share
        backward = np.asarray(self.backward_s, np.float64)
        input_grad, weight_grad = self.split_backward()
        duration = np.zeros((len(Kind), self.num_stages))
        duration[Kind.F] = np.multiply(self.forward_s, share)
        duration[Kind.B] = backward * share
        duration[Kind.I] = input_grad * share
        duration[Kind.W] = weight_grad * share
        if self.reduce_s is not None:
            duration[Kind.REDUCE_GRAD] = self.reduce_s
        message = np.full(self.num_stages - 1, self.latency_s)
        if self.message_bytes is not None and self.bandwidth_bytes_per_s is not None:
            message += np.multiply(self.message_bytes, share) / self.bandwidth_bytes_per_s
        if self.message_s is not None:
            message = np.multiply(self.message_s, share)
        _fill_messages(duration, message)
        return ResolvedCosts(
            unit=SECOND,
            duration=duration,
            pair={(pair.forward, pair.backward, pair.kind): pair.seconds * share for pair in self.overlap_s},
            activations=_unit_activations(schedule),
            activation_bytes=None if self.activation_bytes is None else np.multiply(self.activation_bytes, share),
            resident_bytes=self._resident_bytes(),
            weight_bytes=None if self.weight_bytes is None else np.asarray(self.weight_bytes, np.float64),
            held_for_weight_grad=None
            if self.held_for_weight_grad is None
            else np.asarray(self.held_for_weight_grad, np.float64),
        )

    def split_backward(self) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Return the seconds of I and W per stage."""
        return _split(self.backward_s, self.input_grad_s, self.weight_grad_s)

    def _resident_bytes(self) -> NDArray[np.float64] | None:
        known = [np.asarray(b, np.float64) for b in (self.weight_bytes, self.gradient_bytes) if b is not None]
        return sum(known[1:], known[0]) if known else None


def _split(
    backward: float | Sequence[float],
    input_grad: float | Sequence[float] | None,
    weight_grad: float | Sequence[float] | None,
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return the times of I and W; one that is not given is what the other leaves of B, or half."""
    whole = np.asarray(backward, np.float64)
    weight = None if weight_grad is None else np.asarray(weight_grad, np.float64)
    if input_grad is not None:
        inward = np.asarray(input_grad, np.float64)
    else:
        inward = whole / 2 if weight is None else whole - weight
    return inward, whole - inward if weight is None else weight


def _pairs_with_b(schedule: Schedule) -> list[tuple[int, int, Kind]]:
    """Return the stages of each pair of an F and a B."""
    table = schedule.table
    backward = np.flatnonzero(table.paired & (table.kind == Kind.B))
    return [
        (f, b, Kind.B) for f, b in zip(table.stage[backward - 1].tolist(), table.stage[backward].tolist(), strict=True)
    ]


def _unit_activations(schedule: Schedule) -> NDArray[np.float64]:
    share = schedule.num_ranks / schedule.num_stages * schedule.microbatch_share
    return np.full(schedule.num_stages, share)


def _fill_messages(duration: NDArray[np.float64], boundary: NDArray[np.float64]) -> None:
    """Write the time of the message at each boundary into both its ends, in both directions."""
    duration[Kind.SEND_F, :-1] = duration[Kind.RECV_B, :-1] = boundary
    duration[Kind.SEND_B, 1:] = duration[Kind.RECV_F, 1:] = boundary


def _check_column(values: Sequence[float] | None, what: str, length: int, entry: str) -> None:
    if values is None:
        return
    if len(values) != length:
        raise UsageError(f"{what} has {len(values)} numbers; needed: {length}, one per {entry}")
    for index, value in enumerate(values):
        _check_quantity(value, f"{what}[{index}]")


def _check_quantity(value: float, what: str) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float, np.number)):
        raise UsageError(f"{what} {shown(value)}: needed: a number")
    # Compared with the largest float, because an integer from a file may be too large to become one.
    if not 0 <= value <= sys.float_info.max:
        raise UsageError(f"{what} {shown(value)}: needed: a finite number that is not negative")


def _check_share(value: float, what: str) -> None:
    if value > 1:
        raise UsageError(f"{what} {shown(value)}: needed: a share from 0 to 1")
