"""``Pipeline``: a model as a list of layers, run by any proved schedule on the ranks of a group.

It cuts the layers over the stages, proves and lowers the schedule, makes replicas equal, and then trains or evaluates a
batch per call. It reduces gradients; the optimizer's step is the caller's, by asynchronous schedules within a hook.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from chimera.errors import UsageError
from chimera.ir.action import Kind
from chimera.ir.schedule import Schedule
from chimera.ir.timeline import Timeline
from chimera.passes.derived import forward_only, without_reductions
from chimera.passes.lower import lower
from chimera.passes.reductions import ReductionMode
from chimera.plan.buffers import DEFAULT_BUCKET_BYTES
from chimera.plan.partition import partition
from chimera.runtime.ablation import ABLATIONS, Ablation
from chimera.runtime.accounting import LossAccount
from chimera.runtime.actions import Actions
from chimera.runtime.channels import Channels, Spec
from chimera.runtime.executor import Executor, Observer
from chimera.runtime.groups import Groups
from chimera.runtime.holdings import holdings
from chimera.runtime.loss import LossFunction, num_samples
from chimera.runtime.microbatches import cut_both
from chimera.runtime.overlap import runs_together
from chimera.runtime.portions import Portions
from chimera.runtime.recorder import GatherTimes, Recorder
from chimera.runtime.reduction import Reduction
from chimera.runtime.run import Run
from chimera.runtime.runnable import channels_of, check_cut, check_shares, check_updates, prepare_recompute, runnable
from chimera.runtime.running import Running
from chimera.runtime.shapes import Shapes
from chimera.runtime.shares import Shares
from chimera.runtime.stage import Stage
from chimera.runtime.updates import UpdateHook, Updates
from chimera.runtime.watch import Watch
from chimera.runtime.weights import Weights, tied_groups
from chimera.tensor.parallel import ALONE, TensorParallel
from chimera.tensor.portion import Portion
from chimera.tensor.randomness import Keys
from chimera.tensor.recompute import RecomputeMode
from chimera.tensor.sharding import sharding_of

__all__ = ["Pipeline"]


class Pipeline:
    """Trains ``layers`` by ``schedule``.

    Args:
        layers: the whole model, on every rank; called in order, each on the previous one's tensors and the micro-batch
            fields named in its ``fields`` attribute. On the meta device, a rank allocates only its own.
        schedule: any schedule; it is proved and, if it holds computations only, lowered.
        loss_fn: ``loss_fn(output, target)`` returns a mean, or terms as {name: (sum, count)}.
        group: p · d ranks, pipeline outermost; None for a process on its own. All ranks of one pipeline pass the same
            inputs and targets, each data-parallel replica its own share. With tensor parallelism t · d · p ranks, of
            which adjacent ones share their layers; see ``RankGrid``.
        tensor: the ranks that share each layer with this one, which ``layers`` were built for. What passes from stage
            to stage is the same on all t of them, of which each then sends 1/t; or, where they divide the sequence,
            their part of it.
        layer_to_stage: the stage of each layer; by default counts that differ by at most one.
        recompute: what is computed again in the backward instead of kept: "none"; "selective", the cores of attention;
            or "full", whole layers, of which only the inputs are kept.
        recompute_layers: how many layers are computed again at once under "full".
        reduce: where gradient reductions start: "end", "eager" or "eager-opt".
        seed: of initial weights (layers on the meta device) and dropout.
        device: where this rank's layers live; the CPU by default.
        backend: "gloo" or "nccl"; by default nccl where every rank has a CUDA device of its own, and otherwise gloo,
            with messages between the ranks of one host through memory that they share.
        update: called on every STEP of an asynchronous schedule, with the stage's parameters and gradients, to change
            the parameters in place; needed by such a schedule, refused by others, after whose step the caller updates.
        dtype: type of weights and computation; None keeps the layers' own. Where it is narrower than fp32,
            ``optimizer_parameters`` holds the weights in fp32.
        shard_optimizer: whether the replicas of a stage (routes · d) each update a part of its weights, so that no
            optimizer state is kept twice. ``optimizer_parameters`` are then this rank's parts.
        bucket_bytes: gradients that are summed at once, while later ones are still being computed.
        ablate: what is replaced by a single byte, to see what its transfer costs: "p2p", messages between stages;
            "allreduce", gradients and updated weights between replicas; or "all". Nothing is learned then.
        record_details: whether timelines also say when messages arrived that travel by themselves, and on CUDA what
            memory was allocated after each computation.
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
        tensor: TensorParallel = ALONE,
        layer_to_stage: Sequence[int] | None = None,
        recompute: RecomputeMode = "none",
        recompute_layers: int = 1,
        reduce: ReductionMode = "eager-opt",
        seed: int = 0,
        device: torch.device | None = None,
        backend: str | None = None,
        dtype: torch.dtype | None = None,
        update: UpdateHook | None = None,
        shard_optimizer: bool = False,
        bucket_bytes: int = DEFAULT_BUCKET_BYTES,
        ablate: Ablation = "none",
        record_details: bool = False,
        timeout_s: float = 600.0,
    ) -> None:
        placement = schedule.placement
        if layer_to_stage is None:
            layer_to_stage = partition([1.0] * len(layers), placement.num_stages)
        check_shares(layers, tensor)
        prepare_recompute(layers, recompute, recompute_layers)
        cut_into = tuple(layer_to_stage)
        check_cut(cut_into, len(layers), placement.num_stages)
        by_stage = [[layers[n] for n, at in enumerate(cut_into) if at == s] for s in range(placement.num_stages)]
        self.schedule = runnable(
            schedule,
            reduce,
            together=lambda pair: runs_together(by_stage[pair.forward.stage], by_stage[pair.backward.stage]),
        )
        tied = tied_groups(layers, cut_into)
        check_updates(self.schedule, tied, has_hook=update is not None, sharded=shard_optimizer)
        self.groups = groups = Groups.create(
            group,
            placement,
            tensor=tensor,
            tied_stages=[shared.stages for shared in tied],
            tied_partial=[sharding_of(shared.parameter).partial for shared in tied],
            channels=channels_of(placement),
            device=device,
            backend=backend,
            timeout_s=timeout_s,
        )
        self.step_number = 0
        self.layer_to_stage = cut_into
        self._seed = seed
        self._weights = Weights(layers, cut_into, tied, placement, groups, seed=seed, dtype=dtype)
        table = self.schedule.table
        stages = {
            stage: Stage(
                self._weights.layers_of(stage),
                cut_into.index(stage),
                recompute_every=recompute_layers if recompute == "full" else None,
                split_backward=bool((table.kind == Kind.I).any()),
                overlapped=stage in table.stage[table.paired],
            )
            for stage in groups.stages
        }
        held = holdings(self._weights, tied, placement, groups)
        without_messages, without_sums = ABLATIONS[ablate]
        self._reduction = Reduction(
            held, groups, sharded=shard_optimizer, bucket_bytes=bucket_bytes, one_byte=without_sums
        )
        self._portions = Portions(self._weights, held, self._reduction, groups)
        self._publish_due = False
        self._updates = (
            None if update is None else Updates(self.schedule, groups, self._weights, self._reduction, update)
        )
        self._recorder = Recorder(groups, details=record_details)
        executor = Executor()
        self._channels = Channels(
            groups, one_byte=without_messages, mark=self._recorder.mark if record_details else None
        )
        shares = Shares(tensor, one_byte=without_messages)
        self._shapes = Shapes(
            stages, placement.routes, groups, shares=shares, with_output=not hasattr(loss_fn, "counts")
        )
        self._account = LossAccount(self.schedule, groups, loss_fn)
        self._actions = Actions(
            schedule=self.schedule,
            groups=groups,
            channels=self._channels,
            shares=shares,
            stages=stages,
            reduction=self._reduction,
            portions=self._portions,
            recorder=self._recorder,
            executor=executor,
            loss_fn=loss_fn,
            updates=self._updates,
        )
        self._earlier_runs = self.schedule if self._updates else without_reductions(self.schedule)
        self._evaluations: dict[int, Schedule] = {}
        self._running = Running(self.schedule, groups, executor, self._actions)

    # Training and evaluation

    def step(
        self,
        inputs: Any,
        targets: Any,
        *,
        last: bool = True,
        counts: Mapping[str, float] | None = None,
        microbatch_indices: Sequence[int] | None = None,
        loss_scale: float = 1.0,
    ) -> torch.Tensor:
        """Run forward and backward of one batch and, with ``last``, reduce the gradients.

        An asynchronous schedule makes its updates meanwhile, each by the gradient of its own micro-batches' loss over
        their own counts, and leaves no gradient; it neither accumulates nor takes ``counts``.

        Args:
            inputs: cut along dim 0 into the schedule's micro-batches; or a list with one entry each.
            targets: likewise.
            last: False accumulates: the gradients of this run are kept for the next one's.
            counts: each loss term's count over all runs of this step on this replica (over samples, for a mean).
                Without it, gradients of earlier runs are weighed anew when later ones come, which needs terms whose
                counts grow in proportion.
            microbatch_indices: the numbers of these micro-batches in the global batch, which key their dropout; by
                default (run · d + data_rank) · m + index.
            loss_scale: what gradients come out multiplied by, so that small ones are not lost in fp16; the loss is as
                without it.

        Returns:
            The loss of the step so far, Σ sum / count over all micro-batches, runs and replicas; equal on every rank.
            ``terms`` holds it by name.

        Raises:
            StalledError: another rank died, or kept this one waiting for longer than the time-out.
        """
        if self._updates is not None and (not last or counts is not None):
            option = "last=False" if not last else "counts="
            raise UsageError(
                f"{option} is for gradients that accumulate over several runs, but schedule {self.schedule.name!r} "
                "updates the weights within each; leave it out, or take more micro-batches to each update"
            )
        groups, m = self.groups, self.schedule.num_microbatches
        batches, goals = cut_both(inputs, targets, m, self.groups.device)
        if microbatch_indices is None:
            first = (self._account.runs * groups.data_size + groups.data_rank) * m
            microbatch_indices = range(first, first + m)
        elif len(microbatch_indices) != m:
            raise UsageError(f"microbatch_indices has {len(microbatch_indices)} numbers; needed: one for each of {m}")
        keys = Keys.of_step(
            seed=self._seed, step=self.step_number, microbatches=microbatch_indices, device=groups.device
        )
        schedule = self.schedule if last else self._earlier_runs
        with self._running.watched(f"step {self.step_number}", schedule):
            self._publish_if_due()
            specs = self._shapes.agree(batches, schedule.microbatch_to_route)
            run = self._begin(batches, goals, specs, keys, counts)
            run.loss_scale = loss_scale
            self._running.execute(run, self._actions.training)
            loss = self._account.total(run.sums(), last=last)
        self.step_number += last
        if last and self._updates is None:
            self._portions.attach()
            self._publish_due = True
        return loss

    def evaluate(self, inputs: Any, targets: Any) -> torch.Tensor:
        """Return the loss of a batch, forward only and in evaluation mode; ``terms`` holds it by name.

        A list runs one micro-batch per entry, any number of them; a tensor is cut into the schedule's number, or into
        single samples where it holds fewer.
        """
        whole = not isinstance(inputs, Sequence)
        m = min(self.schedule.num_microbatches, num_samples(inputs)) if whole else len(inputs)
        batches, goals = cut_both(inputs, targets, m, self.groups.device)
        schedule = self._evaluation(m)
        with self._running.watched("evaluation", schedule), self._weights.evaluation_mode(), torch.no_grad():
            self._publish_if_due()
            specs = self._shapes.agree(batches, schedule.microbatch_to_route)
            run = Run(batches, goals, specs, None, schedule.microbatch_to_route, (), ())
            self._running.execute(run, self._actions.evaluation)
            return self._account.evaluation_total(run.sums(), first_route=schedule.microbatch_to_route[0])

    @property
    def watch(self) -> Watch:
        """What publishes this rank's position to the others."""
        return self._running.watch

    @property
    def updates_per_step(self) -> int:
        """Updates that a step makes by itself; 0 where the caller makes them."""
        return 0 if self._updates is None else self._updates.per_step

    @property
    def terms(self) -> Mapping[str, float]:
        """The latest loss by term: sum / count."""
        return self._account.terms

    @property
    def observer(self) -> Observer | None:
        """What gives the context that each instruction is run in; None for none."""
        return self._running.observer

    @observer.setter
    def observer(self, observer: Observer | None) -> None:
        self._running.observer = observer

    def timeline(self) -> Timeline:
        """Return the measured timeline of the latest step or evaluation, of this replica's ranks. A collective."""
        return self.timelines()[self.groups.rank % self.groups.grid.width]

    def timelines(self) -> tuple[Timeline, ...]:
        """Return the timelines of all pipelines, each beginning with its first rank in the world. A collective."""
        return self._recorder.timelines(self._running.schedule)

    def gather_times(self) -> GatherTimes:
        """Return how long the weights of the latest step were gathered under sharding, and waited for. A collective."""
        return self._recorder.gather_times()

    def message_bytes(self) -> list[int]:
        """Return the bytes that a rank sends in the largest message forward over each boundary so far. A collective."""
        return self._shapes.message_bytes(self.schedule.num_stages)

    def recording(self) -> tuple[int, float]:
        """Return how many spans this rank recorded in the latest step, and the seconds that one takes."""
        return self._recorder.num_events, self._recorder.event_s()

    # Parameters and gradients

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield this rank's parameters, each once, named as ``nn.Sequential(*layers)`` names them.

        Their ``grad`` is the reduced gradient. With sharded optimizer states no rank has that as a whole, and they have
        none between steps; see ``portions``.
        """
        self._portions.wait()
        return self._weights.named_parameters()

    def optimizer_parameters(self) -> list[tuple[str, nn.Parameter]]:
        """Return what an optimizer updates on this rank, gradients attached; see ``portions``."""
        return [(portion.name, portion.parameter) for portion in self._portions.portions()]

    def portions(self) -> list[Portion]:
        """Return what an optimizer updates on this rank, in the order of the model, gradients attached.

        They are the parameters, or their full-precision originals; with sharded optimizer states, stretches of either.
        """
        return self._portions.portions()

    def sum_over_portions(self, parameters: Sequence[nn.Parameter], values: torch.Tensor) -> torch.Tensor:
        """Add up what the ranks say of their portions of the same parameter; a collective.

        Args:
            parameters: of portions of this rank.
            values: ``[quantities, parameters]`` in fp64, with equally many quantities on every rank.

        Returns:
            The same shape: for each portion the sums over all portions of its parameter.
        """
        with self._running.watched("sums over portions"):
            return self._portions.sum_over_portions(parameters, values)

    def collected(self, of_portion: Callable[[nn.Parameter], torch.Tensor | None]) -> dict[str, torch.Tensor]:
        """Return by name the tensors of whole parameters that this rank saves; a collective.

        Args:
            of_portion: a tensor in the shape of the portion's parameter, such as that itself or a moment of it; None
                for one that does not train and has none.
        """
        with self._running.watched("bringing portions together"):
            return self._portions.collected(of_portion)

    def publish_weights(self) -> None:
        """Start bringing updated weights to where they compute: into their narrower type, to the other replicas.

        The next step or evaluation does it where the caller did not; done right after the update it goes on meanwhile,
        and a stage's first forward waits for it.
        """
        start = self._recorder.mark()
        self._recorder.gathering(start, self._portions.publish())
        self._publish_due = False

    def gradient_norm(self) -> float:
        """Return the 2-norm of the whole model's gradient; tied and replicated parameters count once. A collective."""
        self._require_gradients("gradient_norm")
        with self._running.watched("gradient norm"):
            return self._portions.gradient_norm()

    def scale_gradients(self, factor: float) -> None:
        """Multiply every gradient on this rank by ``factor``."""
        self._require_gradients("scale_gradients")
        self._reduction.scale(factor)

    def close(self) -> None:
        """Stop the threads that publish this rank's position and wait for its messages."""
        self._channels.close()
        self.watch.close()

    # Parts

    def _begin(
        self,
        batches: Sequence[Any],
        goals: Sequence[Any],
        specs: Sequence[dict[int, Spec]],
        keys: Sequence[Keys],
        counts: Mapping[str, float] | None,
    ) -> Run:
        """Count the losses of a run, and make gradients and weights ready for it."""
        routes = self.schedule.microbatch_to_route
        if self._updates is not None:
            update_of = self._updates.of_microbatch
            totals = self._account.count_updates(goals, specs, update_of)
            self._reduction.begin(accumulate=False)
            self._updates.begin(self.step_number)
            return Run(batches, goals, specs, keys, routes, update_of, totals)
        total, factor = self._account.count(goals, specs, counts)
        self._reduction.begin(accumulate=self._account.runs > 0, factor=factor)
        return Run(batches, goals, specs, keys, routes, (0,) * len(batches), (total,))

    def _require_gradients(self, method: str) -> None:
        if self._updates is not None:
            raise UsageError(
                f"{method}() has no gradient to work on: schedule {self.schedule.name!r} has used each in its update; "
                "ask in the hook given as update= instead"
            )

    def _publish_if_due(self) -> None:
        if self._publish_due:
            self.publish_weights()

    def _evaluation(self, m: int) -> Schedule:
        if m not in self._evaluations:
            self._evaluations[m] = lower(forward_only(self.schedule, m), reduce=None)
        return self._evaluations[m]
