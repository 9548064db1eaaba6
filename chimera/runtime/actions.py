"""What each kind of action does on a rank: the handlers of the executor, for training and for evaluation.

A computation takes what its dependencies left for it, from a message or from the stage next door on the same rank, and
leaves its result for the next. Losses are seeded with 1 / count here, where outputs meet targets.
"""

import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch

from chimera.errors import UsageError
from chimera.ir.action import Action, Instruction, Kind, Overlap
from chimera.ir.schedule import Schedule
from chimera.ir.timeline import Lane
from chimera.passes.reductions import before_reduction
from chimera.runtime.channels import Channels, Spec, Tensors
from chimera.runtime.executor import Executor, Handlers
from chimera.runtime.groups import Groups
from chimera.runtime.halves import BackwardHalf, ForwardHalf, floating
from chimera.runtime.loss import Counts, LossFunction, Terms, loss_terms
from chimera.runtime.marks import Mark
from chimera.runtime.overlap import run_together
from chimera.runtime.portions import Portions
from chimera.runtime.recorder import Ends, Recorder
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


class Actions:
    """The handlers of one rank.

    Args:
        schedule: gives the rank and route of every stage and micro-batch.
        groups, channels, stages, reduction, portions, recorder, executor: this rank's parts.
        loss_fn: applied to the last stage's output and the targets.
        updates: of an asynchronous schedule; None where the caller steps.
    """

    def __init__(
        self,
        *,
        schedule: Schedule,
        groups: Groups,
        channels: Channels,
        stages: Mapping[int, Stage],
        reduction: Reduction,
        portions: Portions,
        recorder: Recorder,
        executor: Executor,
        loss_fn: LossFunction,
        updates: Updates | None = None,
    ) -> None:
        self._me = groups.pipeline_rank
        self._routes = schedule.placement.routes
        self._last = schedule.num_stages - 1
        self._channels = channels
        self._stages = stages
        self._reduction = reduction
        self._portions = portions
        self._recorder = recorder
        self._executor = executor
        self._loss_fn = loss_fn
        self._updates = updates
        self.awaited: tuple[int, float] | None = None
        """The pipeline rank whose message is waited for, and since when on the monotonic clock."""
        self._before_reduction: frozenset[int] = frozenset()
        # For each stage whose reduction is under way, where it started, when, and the ends of its parts.
        self._reducing: dict[int, tuple[int, Mark, Ends]] = {}
        # What a computation left for a stage on this rank, and what waits to be sent, by the consumer it is for.
        self._here: dict[tuple[Kind, int, int], Tensors] = {}
        self._leaving: dict[tuple[Kind, int, int], Tensors] = {}
        # Where in the program each message was posted: the wait for it is recorded as that receive's.
        self._posted_at: dict[tuple[Kind, int, int], int] = {}
        communication: Handlers = {
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
            (Kind.F, Kind.B): self._together,
            (Kind.F, Kind.I): self._together_split,
            Kind.REDUCE_GRAD: self._reduce,
            **communication,
        }
        if updates is not None:
            self.training = {**updates.around(self.training), Kind.STEP: self._step}
        self.evaluation: Handlers = {Kind.F: self._evaluate, **communication}

    def begin(self, run: Run, program: Sequence[Instruction]) -> None:
        """Set the micro-batches the next program is about."""
        self.awaited = None
        self._run = run
        self._before_reduction = before_reduction(program)
        self._route_of = run.route_of
        self._recorder.begin()

    def finish(self) -> None:
        """Wait for what is in flight, and assert that nothing was left behind."""
        self._reduction.finish()
        for reduced in list(self._reducing):
            self._record_reduction(reduced)
        self._channels.drain()
        if self._updates is not None:
            self._updates.assert_empty()
        for stage in self._stages.values():
            stage.assert_empty()
        assert not self._here, f"results never used: {list(self._here)}"
        assert not self._leaving, f"results never sent: {list(self._leaving)}"

    # Computations

    def _forward(self, action: Action) -> None:
        inputs = self._inputs(action)
        start = self._recorder.mark()
        outputs = self._begun(action, inputs).finish()
        self._record(start)
        self._give_outputs(action, outputs)

    def _begun(self, action: Action, inputs: Tensors) -> ForwardHalf:
        """Return a forward of which nothing has run yet."""
        microbatch, run = _microbatch(action), self._run
        keys = run.keys[microbatch] if run.keys is not None else None
        return self._stages[action.stage].begin_forward(microbatch, inputs, run.batches[microbatch], keys)

    def _backward(self, action: Action) -> None:
        seeds = self._seeds(action)
        start = self._recorder.mark()
        with self._reducing_early(action):
            gradients = self._begun_back(action, seeds).finish()
        self._record(start)
        self._give_gradients(action, gradients)

    def _input_gradient(self, action: Action) -> None:
        with self._stages[action.stage].deferring(_microbatch(action)):
            self._backward(action)

    def _weight_gradient(self, action: Action) -> None:
        start = self._recorder.mark()
        with self._reducing_early(action):
            self._stages[action.stage].weight_gradient(_microbatch(action))
        self._record(start)

    def _begun_back(self, action: Action, seeds: Tensors) -> BackwardHalf:
        """Return a backward of which nothing has run yet, from the outputs' gradients or from the loss."""
        stage, microbatch = self._stages[action.stage], _microbatch(action)
        outputs = stage.outputs_for_backward(microbatch)
        if action.stage == self._last:
            return stage.begin_backward(microbatch, *self._seeded_loss(microbatch, outputs))
        return stage.begin_backward(microbatch, floating(outputs), seeds)

    def _together(self, pair: Overlap) -> None:
        """Run a forward and a backward by the layers' own form: both inputs first, both results at the end."""
        inputs, seeds = self._inputs(pair.forward), self._seeds(pair.backward)
        start = self._recorder.mark()
        # The backward first: under recompute it runs a forward of its own, whose random keys come before the other's.
        backward = self._begun_back(pair.backward, seeds)
        outputs, gradients = run_together(self._begun(pair.forward, inputs), backward, pair)
        self._record(start)
        self._give_outputs(pair.forward, outputs)
        self._give_gradients(pair.backward, gradients)

    def _together_split(self, pair: Overlap) -> None:
        with self._stages[pair.backward.stage].deferring(_microbatch(pair.backward)):
            self._together(pair)

    def _seeded_loss(self, microbatch: int, outputs: Tensors) -> tuple[Tensors, Tensors]:
        """Evaluate the loss; its terms' sums are the roots, 1 / count over the whole step their seeds."""
        terms = loss_terms(self._loss_fn, _unwrap(outputs), self._run.targets[microbatch])
        self._run.add(terms)
        counts = self._run.counts_for(microbatch)
        unknown = set(terms) - set(counts)
        if unknown:
            raise UsageError(
                f"loss_fn gave the term {', '.join(sorted(unknown))} for micro-batch {microbatch}, which its counts "
                f"did not name before (known: {', '.join(counts)}); a loss gives the same terms every time"
            )
        live = [(name, total) for name, (total, _) in terms.items() if counts[name]]
        return tuple(total for _, total in live), tuple(self._run.seed(microbatch, name, total) for name, total in live)

    def _evaluate(self, action: Action) -> None:
        stage, microbatch = action.stage, _microbatch(action)
        inputs = self._inputs(action)
        start = self._recorder.mark()
        outputs = self._stages[stage].run(inputs, self._run.batches[microbatch], None)
        if stage == self._last:
            self._run.add(loss_terms(self._loss_fn, _unwrap(outputs), self._run.targets[microbatch]))
        else:
            self._give(Kind.F, stage + 1, microbatch, outputs)
        self._record(start)

    def _reduce(self, action: Action) -> None:
        start = self._recorder.mark()
        ends = self._recorder.ends_of(self._reduction.start(action.stage))
        self._reducing[action.stage] = self._position, start, ends

    def _reducing_early(self, action: Action) -> AbstractContextManager[None]:
        """Start buckets inside the last backward of a stage, where its reduction would follow at once anyway."""
        if self._position not in self._before_reduction or not self._reduction.exchanges(action.stage):
            return nullcontext()
        return self._stages[action.stage].telling(self._reduction.arrived)

    def _step(self, action: Action) -> None:
        self._reduction.finish(action.stage)
        if action.stage in self._reducing:
            self._record_reduction(action.stage)
        assert self._updates is not None, "only asynchronous schedules have a STEP"
        start = self._recorder.mark()
        self._updates.step(action.stage)
        self._record(start)

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
        key = (kind, action.stage, microbatch)
        self._posted_at[key] = self._position
        self._channels.post(key, channel, spec)

    # Hand-over

    def _inputs(self, action: Action) -> Tensors:
        """Return what a forward takes from the stage before, once its weights are there too."""
        inputs = self._take(Kind.F, action.stage, action.stage - 1, _microbatch(action))
        if self._portions.gathers(action.stage):
            start = self._recorder.mark()
            self._portions.wait(action.stage)
            self._recorder.waited(start)
        return inputs

    def _seeds(self, action: Action) -> Tensors:
        """Return what a backward takes from the stage behind."""
        return self._take(Kind.B, action.stage, action.stage + 1, _microbatch(action))

    def _give_outputs(self, action: Action, outputs: Tensors) -> None:
        if action.stage != self._last:
            detached = tuple(tensor.detach() for tensor in outputs)
            self._give(Kind.F, action.stage + 1, _microbatch(action), detached)

    def _give_gradients(self, action: Action, gradients: Tensors) -> None:
        if action.stage:
            self._give(Kind.B, action.stage - 1, _microbatch(action), gradients)

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
        self.awaited = self._routes[self._route_of[microbatch]][producer], time.monotonic()
        tensors, arrived = self._channels.take(key)
        self.awaited = None
        self._recorder.received(self._posted_at.pop(key), start, self._recorder.mark(), arrived)
        return tensors

    def _record_reduction(self, stage: int) -> None:
        position, start, ends = self._reducing.pop(stage)
        self._recorder.add_until(position, Lane.REDUCE, start, ends)

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
