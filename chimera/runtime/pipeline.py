"""``Pipeline``: a model as a list of layers, run by any proved schedule on the ranks of a group.

It cuts the layers over the stages, proves and lowers the schedule, makes replicas equal, and then trains or evaluates a
batch per call. It reduces gradients; the optimizer's step is the caller's.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import nn

from chimera.errors import StalledError, UsageError
from chimera.ir.action import Action, Kind
from chimera.ir.schedule import Schedule
from chimera.ir.timeline import Timeline
from chimera.passes.derived import forward_only, without_reductions
from chimera.passes.lower import lower
from chimera.passes.reductions import ReductionMode
from chimera.plan.partition import partition
from chimera.runtime.accounting import LossAccount
from chimera.runtime.actions import Actions, Run
from chimera.runtime.channels import Channels
from chimera.runtime.executor import Executor, Handlers
from chimera.runtime.failure import stalled
from chimera.runtime.groups import Groups
from chimera.runtime.loss import LossFunction, num_samples
from chimera.runtime.microbatches import cut, to_device
from chimera.runtime.recorder import Recorder
from chimera.runtime.reduction import Reduction
from chimera.runtime.runnable import channels_of, check_cut, runnable
from chimera.runtime.shapes import Shapes
from chimera.runtime.stage import Stage
from chimera.runtime.watch import Watch
from chimera.runtime.weights import Weights, tied_groups
from chimera.tensor.randomness import Keys, preserved_generators

__all__ = ["Pipeline"]


class Pipeline:
    """Trains ``layers`` by ``schedule``.

    Args:
        layers: the whole model, on every rank; called in order, each on the previous one's tensors and the micro-batch
            fields named in its ``fields`` attribute. On the meta device, a rank allocates only its own.
        schedule: any schedule; it is proved and, if it holds computations only, lowered.
        loss_fn: ``loss_fn(output, target)`` returns a mean, or terms as {name: (sum, count)}.
        group: p · d ranks, pipeline outermost; None for a process on its own. All ranks of one pipeline pass the same
            inputs and targets, each data-parallel replica its own share.
        layer_to_stage: the stage of each layer; by default counts that differ by at most one.
        recompute: keep only each stage's inputs between forward and backward.
        reduce: where gradient reductions start: "end", "eager" or "eager-opt".
        seed: of initial weights (layers on the meta device) and dropout.
        device: where this rank's layers live; the CPU by default.
        backend: "gloo" or "nccl"; by default nccl where every rank has a CUDA device of its own, and otherwise gloo,
            with messages between the ranks of one host through memory that they share.
        dtype: type of weights and computation; None keeps the layers' own. Where it is narrower than fp32,
            ``optimizer_parameters`` holds the weights in fp32, and ``publish_weights`` copies an update back.
        timeout_s: how long a rank waits for another before it gives up.

    Attributes:
        schedule: the lowered schedule that runs.
        step_number: steps done; part of every random key.

    Raises:
        ScheduleError: the schedule is not complete, ordered and free of deadlock.
        UsageError: a world size, layer count or option that does not fit; the nearest legal values are named.
    """

    def __init__(
        self,
        layers: Sequence[nn.Module],
        schedule: Schedule,
        loss_fn: LossFunction,
        group: "torch.distributed.ProcessGroup | None" = None,
        *,
        layer_to_stage: Sequence[int] | None = None,
        recompute: bool = False,
        reduce: ReductionMode = "eager-opt",
        seed: int = 0,
        device: torch.device | None = None,
        backend: str | None = None,
        dtype: torch.dtype | None = None,
        timeout_s: float = 600.0,
    ) -> None:
        self.schedule = runnable(schedule, reduce)
        placement = self.schedule.placement
        if layer_to_stage is None:
            layer_to_stage = partition([1.0] * len(layers), placement.num_stages)
        cut_into = tuple(layer_to_stage)
        check_cut(cut_into, len(layers), placement.num_stages)
        tied = tied_groups(layers, cut_into)
        self.groups = groups = Groups.create(
            group,
            placement,
            tied_stages=[shared.stages for shared in tied],
            channels=channels_of(placement),
            device=device,
            backend=backend,
            timeout_s=timeout_s,
        )
        self.step_number = 0
        self.layer_to_stage = cut_into
        self._seed = seed
        self._weights = Weights(layers, cut_into, tied, placement, groups, seed=seed, dtype=dtype)
        stages = {
            stage: Stage(
                self._weights.layers_of(stage),
                cut_into.index(stage),
                recompute=recompute,
                split_backward=bool((self.schedule.table.kind == Kind.I).any()),
            )
            for stage in groups.stages
        }
        self._reduction = Reduction(self._weights, [shared.stages for shared in tied], placement, groups)
        self._recorder = Recorder(groups)
        self._executor = Executor()
        self._shapes = Shapes(stages, placement.routes, groups, with_output=not hasattr(loss_fn, "counts"))
        self._account = LossAccount(self.schedule, groups, loss_fn)
        self._actions = Actions(
            schedule=self.schedule,
            groups=groups,
            channels=Channels(groups),
            stages=stages,
            reduction=self._reduction,
            recorder=self._recorder,
            executor=self._executor,
            loss_fn=loss_fn,
        )
        self._earlier_runs = without_reductions(self.schedule)
        self._evaluations: dict[int, Schedule] = {}
        self._running = self.schedule
        self.watch = (
            Watch(
                groups.store,
                groups.rank,
                groups.size,
                here=self._here,
                end_waits=groups.abort,
            )
            if groups.store is not None
            else None
        )

    # Training and evaluation

    def step(
        self,
        inputs: Any,
        targets: Any,
        *,
        last: bool = True,
        counts: Mapping[str, float] | None = None,
        microbatch_indices: Sequence[int] | None = None,
    ) -> torch.Tensor:
        """Run forward and backward of one batch and, with ``last``, reduce the gradients.

        Args:
            inputs: cut along dim 0 into the schedule's micro-batches; or a list with one entry each.
            targets: likewise.
            last: False accumulates: the gradients of this run are kept for the next one's.
            counts: each loss term's count over all runs of this step on this replica (over samples, for a mean).
                Without it, gradients of earlier runs are weighed anew when later ones come, which needs terms whose
                counts grow in proportion.
            microbatch_indices: the numbers of these micro-batches in the global batch, which key their dropout; by
                default (run · d + data_rank) · m + index.

        Returns:
            The loss of the step so far, Σ sum / count over all micro-batches, runs and replicas; equal on every rank.
            ``terms`` holds it by name.

        Raises:
            StalledError: another rank died, or kept this one waiting for longer than the time-out.
        """
        groups, m = self.groups, self.schedule.num_microbatches
        batches, goals = self._cut(inputs, targets, m)
        if microbatch_indices is None:
            first = (self._account.runs * groups.data_size + groups.data_rank) * m
            microbatch_indices = range(first, first + m)
        elif len(microbatch_indices) != m:
            raise UsageError(f"microbatch_indices has {len(microbatch_indices)} numbers; needed: one for each of {m}")
        keys = Keys.of_step(
            seed=self._seed, step=self.step_number, microbatches=microbatch_indices, device=groups.device
        )
        schedule = self.schedule if last else self._earlier_runs
        with self._watched(f"step {self.step_number}", schedule):
            specs = self._shapes.agree(batches, schedule.microbatch_to_route)
            totals, factor = self._account.count(goals, specs, counts)
            self._reduction.begin(accumulate=self._account.runs > 0, factor=factor)
            run = Run(batches, goals, specs, keys, schedule.microbatch_to_route, totals)
            self._execute(run, schedule, self._actions.training)
            loss = self._account.total(run.sums(), last=last)
        self.step_number += last
        return loss

    def evaluate(self, inputs: Any, targets: Any) -> torch.Tensor:
        """Return the loss of a batch, forward only and in evaluation mode; ``terms`` holds it by name.

        A list runs one micro-batch per entry, any number of them; a tensor is cut into the schedule's number, or into
        single samples where it holds fewer.
        """
        whole = not isinstance(inputs, Sequence)
        m = min(self.schedule.num_microbatches, num_samples(inputs)) if whole else len(inputs)
        batches, goals = self._cut(inputs, targets, m)
        schedule = self._evaluation(m)
        with self._watched("evaluation", schedule), self._evaluation_mode(), torch.no_grad():
            specs = self._shapes.agree(batches, schedule.microbatch_to_route)
            run = Run(batches, goals, specs, None, schedule.microbatch_to_route, {})
            self._execute(run, schedule, self._actions.evaluation)
            return self._account.evaluation_total(run.sums(), first_route=schedule.microbatch_to_route[0])

    @property
    def terms(self) -> Mapping[str, float]:
        """The latest loss by term: sum / count."""
        return self._account.terms

    def timeline(self) -> Timeline:
        """Return the measured timeline of the latest step or evaluation, of this replica's ranks. A collective."""
        return self._recorder.timeline(self._running)

    # Parameters and gradients

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield this rank's parameters, each once, named as ``nn.Sequential(*layers)`` names them."""
        return self._weights.named_parameters()

    def optimizer_parameters(self) -> list[tuple[str, nn.Parameter]]:
        """Return what an optimizer updates: the parameters, or their full-precision originals, gradients attached."""
        self._reduction.attach()
        return self._weights.optimizer_parameters()

    def publish_weights(self) -> None:
        """Copy updated full-precision weights into the ones that compute; nothing to do where they are the same."""
        self._weights.publish()

    def gradient_norm(self) -> float:
        """Return the 2-norm of the whole model's gradient; tied and replicated parameters count once. A collective."""
        with self._watched("gradient norm", self._running):
            return self._reduction.gradient_norm()

    def scale_gradients(self, factor: float) -> None:
        """Multiply every gradient on this rank by ``factor``."""
        self._reduction.scale(factor)

    def close(self) -> None:
        """Stop the thread that publishes this rank's position."""
        if self.watch is not None:
            self.watch.close()

    # Parts

    def _cut(self, inputs: Any, targets: Any, m: int) -> tuple[list[Any], list[Any]]:
        device = self.groups.device
        given_whole = not (isinstance(inputs, Sequence) or isinstance(targets, Sequence))
        if given_whole and num_samples(inputs) != num_samples(targets):
            raise UsageError(
                f"inputs have {num_samples(inputs)} samples along dim 0, targets {num_samples(targets)}; needed: as "
                "many, since both are cut alike; or lists with one entry per micro-batch"
            )
        batches, goals = cut(inputs, m, "inputs"), cut(targets, m, "targets")
        return [to_device(batch, device) for batch in batches], [to_device(goal, device) for goal in goals]

    def _evaluation(self, m: int) -> Schedule:
        if m not in self._evaluations:
            self._evaluations[m] = lower(forward_only(self.schedule, m), reduce=None)
        return self._evaluations[m]

    def _execute(self, run: Run, schedule: Schedule, handlers: Handlers) -> None:
        """Run this rank's program, and wait for what it leaves under way."""
        self._actions.begin(run)
        # No pair is left in it.
        program = cast("tuple[Action, ...]", schedule.actions[self.groups.pipeline_rank])
        self._executor.run(program, handlers)
        if self.watch is not None:
            self.watch.activity += ", waiting for reductions and sends under way"
        self._actions.finish()

    def _here(self) -> tuple[int | None, str | None]:
        """Return this rank's place in its program and the action there; asked from another thread."""
        position, program = self._executor.position, self._running.actions[self.groups.pipeline_rank]
        if position is None or position >= len(program):
            return None, None
        return position, str(program[position])

    @contextmanager
    def _evaluation_mode(self) -> Iterator[None]:
        modes = [(module, module.training) for layer in self._weights.layers.values() for module in layer.modules()]
        for module, _ in modes:
            module.training = False
        try:
            yield
        finally:
            for module, training in modes:
                module.training = training

    @contextmanager
    def _watched(self, activity: str, schedule: Schedule) -> Iterator[None]:
        """Say what this rank does meanwhile, leave the caller's random streams alone, and report a lost peer."""
        self._running = schedule
        if self.watch is not None:
            self.watch.activity = activity
        try:
            with preserved_generators(self.groups.device):
                yield
        except StalledError as error:
            raise stalled(str(error), self.groups, self.watch, schedule) from error
        if self.watch is not None:
            self.watch.activity = "between steps"
