"""What each kind of action does on a rank: the handlers of the executor, for training and for evaluation.

A computation takes what its dependencies left for it, from a message or from the stage next door on the same rank, and
leaves its result for the next. Losses are seeded with 1 / count here, where outputs meet targets.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch

from chimera.errors import UsageError
from chimera.ir.action import Action, Kind
from chimera.ir.schedule import Schedule
from chimera.ir.timeline import Lane
from chimera.passes.reductions import before_reduction
from chimera.runtime.channels import Channels, Spec, Tensors
from chimera.runtime.executor import Executor, Handlers
from chimera.runtime.groups import Groups
from chimera.runtime.loss import Counts, LossFunction, Terms, loss_terms
from chimera.runtime.recorder import Recorder
from chimera.runtime.reduction import Reduction
from chimera.runtime.shapes import gradient_spec
from chimera.runtime.stage import Stage
from chimera.runtime.updates import Updates
from chimera.tensor.randomness import Keys

__all__ = ["Actions", "Run"]


@dataclass(slots=True)
class Run:
    """One pass over a set of micro-batches.

    Attributes:
        batches, targets: the micro-batches.
        specs: for each micro-batch, what stages give: stage → spec.
        keys: for each micro-batch, its random keys; None in evaluation.
        route_of: for each micro-batch, its route.
        counts: the whole step's count of each loss term, known before the first backward.
        loss_scale: what gradients are multiplied by.
        seen: the loss terms seen here so far: name → sums and counts of single micro-batches.
    """

    batches: Sequence[Any]
    targets: Sequence[Any]
    specs: Sequence[dict[int, Spec]]
    keys: Sequence[Keys] | None
    route_of: Sequence[int]
    counts: Counts
    loss_scale: float = 1.0
    seen: dict[str, tuple[list[torch.Tensor], list[float]]] = field(default_factory=dict)
    _seeds: dict[str, torch.Tensor] = field(default_factory=dict)

    def add(self, terms: Terms) -> None:
        """Add one micro-batch's loss terms."""
        for name, (total, count) in terms.items():
            sums, counts = self.seen.setdefault(name, ([], []))
            sums.append(total.detach())
            counts.append(count)

    def seed(self, name: str, total: torch.Tensor) -> torch.Tensor:
        """Return ``loss_scale`` / count of a term, as the tensor its backward starts from."""
        found = self._seeds.get(name)
        if found is None or found.dtype is not total.dtype:
            found = self._seeds[name] = total.new_tensor(self.loss_scale / self.counts[name])
        return found

    def sums(self) -> dict[str, tuple[float, float]]:
        """Return each loss term's sum and count over the micro-batches seen here."""
        return {
            name: (float(torch.stack(sums).sum(dtype=torch.float64)), sum(counts))
            for name, (sums, counts) in self.seen.items()
        }


class Actions:
    """The handlers of one rank.

    Args:
        schedule: gives the rank and route of every stage and micro-batch.
        groups, channels, stages, reduction, updates, recorder, executor: this rank's parts.
        loss_fn: applied to the last stage's output and the targets.
    """

    def __init__(
        self,
        *,
        schedule: Schedule,
        groups: Groups,
        channels: Channels,
        stages: Mapping[int, Stage],
        reduction: Reduction,
        updates: Updates,
        recorder: Recorder,
        executor: Executor,
        loss_fn: LossFunction,
    ) -> None:
        self._me = groups.pipeline_rank
        self._routes = schedule.placement.routes
        self._last = schedule.num_stages - 1
        self._channels = channels
        self._stages = stages
        self._reduction = reduction
        self._updates = updates
        self._recorder = recorder
        self._executor = executor
        self._loss_fn = loss_fn
        self._before_reduction: frozenset[int] = frozenset()
        self._reductions_started: list[tuple[int, Any]] = []
        # What a computation left for a stage on this rank, and what waits to be sent, by the consumer it is for.
        self._here: dict[tuple[Kind, int, int], Tensors] = {}
        self._leaving: dict[tuple[Kind, int, int], Tensors] = {}
        communication = {
            Kind.SEND_F: self._send_forward,
            Kind.RECV_F: self._receive_forward,
            Kind.SEND_B: self._send_backward,
            Kind.RECV_B: self._receive_backward,
        }
        self.training: Handlers = {
            Kind.F: self._forward,
            Kind.B: self._backward,
            Kind.I: self._input_gradient,
            Kind.W: self._weight_gradient,
            Kind.REDUCE_GRAD: self._reduce,
            **communication,
        }
        self.evaluation: Handlers = {Kind.F: self._evaluate, **communication}

    def begin(self, run: Run, program: Sequence[Action]) -> None:
        """Set the micro-batches the next program is about."""
        self._run = run
        self._before_reduction = before_reduction(program)
        self._route_of = run.route_of
        self._recorder.begin()

    def finish(self) -> None:
        """Wait for what is in flight, and assert that nothing was left behind."""
        self._reduction.finish()
        for position, start in self._reductions_started:
            self._recorder.add(position, Lane.REDUCE, start, self._recorder.mark())
        self._reductions_started.clear()
        self._channels.drain()
        for stage in self._stages.values():
            stage.assert_empty()
        assert not self._here, f"results never used: {list(self._here)}"
        assert not self._leaving, f"results never sent: {list(self._leaving)}"

    # Computations

    def _forward(self, action: Action) -> None:
        stage, microbatch = action.stage, _microbatch(action)
        inputs = self._take(Kind.F, stage, stage - 1, microbatch)
        self._updates.wait(stage)
        start = self._recorder.mark()
        run = self._run
        keys = run.keys[microbatch] if run.keys is not None else None
        outputs = self._stages[stage].forward(microbatch, inputs, run.batches[microbatch], keys)
        self._record(start)
        if stage != self._last:
            self._give(Kind.F, stage + 1, microbatch, tuple(tensor.detach() for tensor in outputs))

    def _backward(self, action: Action) -> None:
        with self._reducing_early(action):
            self._send_back(action, self._stages[action.stage].backward)

    def _input_gradient(self, action: Action) -> None:
        self._send_back(action, self._stages[action.stage].input_gradient)

    def _weight_gradient(self, action: Action) -> None:
        start = self._recorder.mark()
        with self._reducing_early(action):
            self._stages[action.stage].weight_gradient(_microbatch(action))
        self._record(start)

    def _send_back(self, action: Action, backward: Callable[[int, Tensors, Tensors], Tensors]) -> None:
        """Take the gradient of the outputs, or evaluate the loss, and give the gradient of the inputs."""
        stage, microbatch = action.stage, _microbatch(action)
        seeds = self._take(Kind.B, stage, stage + 1, microbatch)
        start = self._recorder.mark()
        outputs = self._stages[stage].outputs_for_backward(microbatch)
        if stage == self._last:
            roots, seeds = self._seeded_loss(microbatch, outputs)
        else:
            roots = tuple(tensor for tensor in outputs if tensor.is_floating_point())
        gradients = backward(microbatch, roots, seeds)
        self._record(start)
        if stage:
            self._give(Kind.B, stage - 1, microbatch, gradients)

    def _seeded_loss(self, microbatch: int, outputs: Tensors) -> tuple[Tensors, Tensors]:
        """Evaluate the loss; its terms' sums are the roots, 1 / count over the whole step their seeds."""
        terms = loss_terms(self._loss_fn, _unwrap(outputs), self._run.targets[microbatch])
        self._run.add(terms)
        unknown = set(terms) - set(self._run.counts)
        if unknown:
            raise UsageError(
                f"loss_fn gave the term {', '.join(sorted(unknown))} for micro-batch {microbatch}, which its counts "
                f"did not name before (known: {', '.join(self._run.counts)}); a loss gives the same terms every time"
            )
        live = [(name, total) for name, (total, _) in terms.items() if self._run.counts[name]]
        return tuple(total for _, total in live), tuple(self._run.seed(name, total) for name, total in live)

    def _evaluate(self, action: Action) -> None:
        stage, microbatch = action.stage, _microbatch(action)
        inputs = self._take(Kind.F, stage, stage - 1, microbatch)
        self._updates.wait(stage)
        start = self._recorder.mark()
        outputs = self._stages[stage].run(inputs, self._run.batches[microbatch], None)
        if stage == self._last:
            self._run.add(loss_terms(self._loss_fn, _unwrap(outputs), self._run.targets[microbatch]))
        else:
            self._give(Kind.F, stage + 1, microbatch, outputs)
        self._record(start)

    def _reduce(self, action: Action) -> None:
        self._reductions_started.append((self._position, self._recorder.mark()))
        self._reduction.start(action.stage)

    def _reducing_early(self, action: Action) -> AbstractContextManager[None]:
        """Start buckets inside the last backward of a stage, where its reduction would follow at once anyway."""
        if self._position not in self._before_reduction:
            return nullcontext()
        return self._stages[action.stage].telling(self._reduction.arrived)

    # Messages: a send names the stage that gives, a receive the stage that takes.

    def _send_forward(self, action: Action) -> None:
        self._send(action, Kind.F, action.stage + 1)

    def _send_backward(self, action: Action) -> None:
        self._send(action, Kind.B, action.stage - 1)

    def _receive_forward(self, action: Action) -> None:
        microbatch = _microbatch(action)
        self._post(action, Kind.F, action.stage - 1, self._run.specs[microbatch][action.stage - 1])

    def _receive_backward(self, action: Action) -> None:
        microbatch = _microbatch(action)
        self._post(action, Kind.B, action.stage + 1, gradient_spec(self._run.specs[microbatch][action.stage]))

    def _send(self, action: Action, kind: Kind, consumer: int) -> None:
        microbatch = _microbatch(action)
        route = self._route_of[microbatch]
        start = self._recorder.mark()
        tensors = self._leaving.pop((kind, consumer, microbatch))
        self._channels.send((self._me, self._routes[route][consumer], route), tensors)
        self._recorder.add(self._position, Lane.SEND, start, self._recorder.mark())

    def _post(self, action: Action, kind: Kind, producer: int, spec: Spec) -> None:
        microbatch = _microbatch(action)
        route = self._route_of[microbatch]
        channel = (self._routes[route][producer], self._me, route)
        self._channels.post((kind, action.stage, microbatch), channel, spec)

    # Hand-over

    def _give(self, kind: Kind, consumer: int, microbatch: int, tensors: Tensors) -> None:
        near = self._routes[self._route_of[microbatch]][consumer] == self._me
        (self._here if near else self._leaving)[kind, consumer, microbatch] = tensors

    def _take(self, kind: Kind, stage: int, producer: int, microbatch: int) -> Tensors:
        """Return what ``producer`` left for ``stage``, waiting for its message where it is elsewhere."""
        if not 0 <= producer <= self._last:
            return ()
        key = (kind, stage, microbatch)
        if self._routes[self._route_of[microbatch]][producer] == self._me:
            return self._here.pop(key)
        start = self._recorder.mark()
        tensors = self._channels.take(key)
        self._recorder.add(self._position, Lane.RECEIVE, start, self._recorder.mark())
        return tensors

    def _record(self, start: Any) -> None:
        self._recorder.add(self._position, Lane.COMPUTE, start, self._recorder.mark())

    @property
    def _position(self) -> int:
        assert self._executor.position is not None, "handlers run inside a program"
        return self._executor.position


def _microbatch(action: Action) -> int:
    assert action.microbatch is not None, f"{action} has no micro-batch"
    return action.microbatch


def _unwrap(outputs: Tensors) -> Any:
    """Return a single output as a tensor, as the module gave it."""
    return outputs[0] if len(outputs) == 1 else outputs
