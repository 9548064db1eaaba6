"""What each kind of action does on a rank: the handlers of the executor, for training and for evaluation.

A computation takes what its dependencies left for it, from a message or from the stage next door on the same rank, and
leaves its result for the next. Losses are seeded with 1 / count here, where outputs meet targets.
"""

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from chimera.errors import UsageError
from chimera.ir.action import Action, Instruction, Kind, Overlap
from chimera.ir.schedule import Schedule
from chimera.ir.timeline import Lane
from chimera.passes.reductions import before_reduction
from chimera.runtime.channels import Channels, Tensors
from chimera.runtime.executor import Executor, Handlers
from chimera.runtime.groups import Groups
from chimera.runtime.halves import BackwardHalf, ForwardHalf, floating
from chimera.runtime.handover import Handed, Handover, microbatch_of
from chimera.runtime.loss import LossFunction, loss_terms
from chimera.runtime.marks import Mark
from chimera.runtime.overlap import run_together
from chimera.runtime.portions import Portions
from chimera.runtime.recorder import Ends, Recorder
from chimera.runtime.reduction import Reduction
from chimera.runtime.run import Run
from chimera.runtime.shares import Shares
from chimera.runtime.stage import Stage
from chimera.runtime.updates import Updates

__all__ = ["Actions"]


class Actions:
    """The handlers of one rank.

    Args:
        schedule: gives the rank and route of every stage and micro-batch.
        groups, channels, shares, stages, reduction, portions, recorder, executor: this rank's parts.
        loss_fn: applied to the last stage's output and the targets.
        updates: of an asynchronous schedule; None where the caller steps.
    """

    def __init__(
        self,
        *,
        schedule: Schedule,
        groups: Groups,
        channels: Channels,
        shares: Shares,
        stages: Mapping[int, Stage],
        reduction: Reduction,
        portions: Portions,
        recorder: Recorder,
        executor: Executor,
        loss_fn: LossFunction,
        updates: Updates | None = None,
    ) -> None:
        self._last = schedule.num_stages - 1
        self._handover = Handover(schedule.placement, groups.pipeline_rank, channels, shares, recorder)
        self._stages = stages
        self._reduction = reduction
        self._portions = portions
        self._recorder = recorder
        self._executor = executor
        self._loss_fn = loss_fn
        self._updates = updates
        self._before_reduction: frozenset[int] = frozenset()
        # For each stage whose reduction is under way, where it started, when, and the ends of its parts.
        self._reducing: dict[int, tuple[int, Mark, Ends]] = {}
        communication: Handlers = {
            Kind.SEND_F: self._send,
            Kind.RECV_F: self._post,
            Kind.SEND_B: self._send,
            Kind.RECV_B: self._post,
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
        self._run = run
        self._before_reduction = before_reduction(program)
        self._handover.begin(run)
        self._recorder.begin()

    @property
    def awaited(self) -> tuple[int, float] | None:
        """The pipeline rank whose message is waited for, and since when on the monotonic clock."""
        return self._handover.awaited

    def finish(self) -> None:
        """Wait for what is in flight, and assert that nothing was left behind."""
        self._reduction.finish()
        for reduced in list(self._reducing):
            self._record_reduction(reduced)
        self._handover.finish()
        if self._updates is not None:
            self._updates.assert_empty()
        for stage in self._stages.values():
            stage.assert_empty()

    # Computations

    def _forward(self, action: Action) -> None:
        inputs = self._inputs(action)
        start = self._recorder.mark()
        outputs = self._begun(action, inputs).finish()
        self._record(start)
        self._give_outputs(action, outputs)

    def _begun(self, action: Action, inputs: Handed) -> ForwardHalf:
        """Return a forward of which nothing has run yet."""
        microbatch, run = microbatch_of(action), self._run
        keys = run.keys[microbatch] if run.keys is not None else None
        return self._stages[action.stage].begin_forward(microbatch, inputs.whole(), run.batches[microbatch], keys)

    def _backward(self, action: Action) -> None:
        seeds = self._seeds(action)
        start = self._recorder.mark()
        with self._reducing_early(action):
            gradients = self._begun_back(action, seeds).finish()
        self._record(start)
        self._give_gradients(action, gradients)

    def _input_gradient(self, action: Action) -> None:
        with self._stages[action.stage].deferring(microbatch_of(action)):
            self._backward(action)

    def _weight_gradient(self, action: Action) -> None:
        start = self._recorder.mark()
        with self._reducing_early(action):
            self._stages[action.stage].weight_gradient(microbatch_of(action))
        self._record(start)

    def _begun_back(self, action: Action, seeds: Handed) -> BackwardHalf:
        """Return a backward of which nothing has run yet, from the outputs' gradients or from the loss."""
        stage, microbatch = self._stages[action.stage], microbatch_of(action)
        outputs = stage.outputs_for_backward(microbatch)
        if action.stage == self._last:
            return stage.begin_backward(microbatch, *self._seeded_loss(microbatch, outputs))
        return stage.begin_backward(microbatch, floating(outputs), seeds.whole())

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
        with self._stages[pair.backward.stage].deferring(microbatch_of(pair.backward)):
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
        stage, microbatch = action.stage, microbatch_of(action)
        inputs = self._inputs(action)
        start = self._recorder.mark()
        outputs = self._stages[stage].run(inputs.whole(), self._run.batches[microbatch], None)
        if stage == self._last:
            self._run.add(loss_terms(self._loss_fn, _unwrap(outputs), self._run.targets[microbatch]))
        self._handover.give(Kind.F, stage + 1, microbatch, outputs)
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

    def _send(self, action: Action) -> None:
        self._handover.send(action, self._position)

    def _post(self, action: Action) -> None:
        self._handover.post(action, self._position)

    # Results

    def _inputs(self, action: Action) -> Handed:
        """Return what a forward takes from the stage before, once its weights are there too."""
        inputs = self._handover.take(Kind.F, action.stage, action.stage - 1, microbatch_of(action))
        if self._portions.gathers(action.stage):
            start = self._recorder.mark()
            self._portions.wait(action.stage)
            self._recorder.waited(start)
        return inputs

    def _seeds(self, action: Action) -> Handed:
        """Return what a backward takes from the stage behind."""
        return self._handover.take(Kind.B, action.stage, action.stage + 1, microbatch_of(action))

    def _give_outputs(self, action: Action, outputs: Tensors) -> None:
        detached = tuple(tensor.detach() for tensor in outputs)
        self._handover.give(Kind.F, action.stage + 1, microbatch_of(action), detached)

    def _give_gradients(self, action: Action, gradients: Tensors) -> None:
        self._handover.give(Kind.B, action.stage - 1, microbatch_of(action), gradients)

    def _record_reduction(self, stage: int) -> None:
        position, start, ends = self._reducing.pop(stage)
        self._recorder.add_until(position, Lane.REDUCE, start, ends)

    def _record(self, start: Any) -> None:
        self._recorder.add(self._position, Lane.COMPUTE, start, self._recorder.mark())

    @property
    def _position(self) -> int:
        assert self._executor.position is not None, "handlers run inside a program"
        return self._executor.position


def _unwrap(outputs: Tensors) -> Any:
    """Return a single output as a tensor, as the module gave it."""
    return outputs[0] if len(outputs) == 1 else outputs
