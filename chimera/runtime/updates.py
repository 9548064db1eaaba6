"""The updates of an asynchronous schedule: ``STEP`` calls a hook, micro-batches keep the weights that they began on.

Gradients of older weights change the newest (Narayanan et al., PipeDream, SOSP'19, section 3.3). Which weights a
micro-batch takes, and which update it is part of, is read off the schedule in ``ir.versions``. What the hook makes of a
gradient is its own business.
"""

from collections.abc import Callable
from dataclasses import dataclass

from torch import nn

from chimera.ir.action import Action, Kind
from chimera.ir.schedule import Schedule
from chimera.ir.versions import forward_versions, updates_of_microbatches
from chimera.runtime.executor import Handlers
from chimera.runtime.groups import Groups
from chimera.runtime.reduction import Reduction
from chimera.runtime.versions import StageVersions
from chimera.runtime.weights import Weights

__all__ = ["Update", "UpdateHook", "Updates"]


@dataclass(frozen=True, slots=True)
class Update:
    """One update of one stage, as its hook is told.

    Attributes:
        stage: the stage.
        number: its updates before this one, over all steps.
        parameters: what to change in place, by name as ``Pipeline.optimizer_parameters`` gives them, each with this
            update's reduced gradient; the same objects every time.
    """

    stage: int
    number: int
    parameters: tuple[tuple[str, nn.Parameter], ...]


UpdateHook = Callable[[Update], None]


class Updates:
    """The updates of one rank.

    Args:
        schedule: asynchronous and proved.
        groups, weights, reduction: this rank's parts.
        hook: called on every STEP of a stage that has parameters to train.

    Attributes:
        of_microbatch: for each micro-batch, the update that its gradients are part of.
        per_step: updates of one program.
    """

    def __init__(
        self, schedule: Schedule, groups: Groups, weights: Weights, reduction: Reduction, hook: UpdateHook
    ) -> None:
        self.of_microbatch = updates_of_microbatches(schedule)
        self.per_step = max(self.of_microbatch) + 1
        self._weights = weights
        self._reduction = reduction
        self._hook = hook
        self._number: dict[int, int] = {}
        taken = forward_versions(schedule).tolist()
        self._versions = {
            stage: StageVersions(
                weights.layers_of(stage),
                [parameter for _, parameter in weights.named_parameters(stage) if parameter.requires_grad],
                {m: v for m, v in enumerate(taken[stage]) if schedule.rank_of(stage, m) == groups.pipeline_rank},
            )
            for stage in groups.stages
        }

    def begin(self, step_number: int) -> None:
        """Begin a program, on the weights as they are; gradients have to be attached."""
        for stage, versions in self._versions.items():
            self._number[stage] = step_number * self.per_step
            versions.begin()

    def around(self, handlers: Handlers) -> Handlers:
        """Return the handlers, with those of computations run on the weights of their micro-batch."""
        last = {Kind.B: True, Kind.I: False, Kind.W: True, Kind.F: False}
        return {
            **handlers,
            **{kind: self._on_its_weights(handlers[kind], is_last=is_last) for kind, is_last in last.items()},
        }

    def _on_its_weights(self, handle: Callable[[Action], None], *, is_last: bool) -> Callable[[Action], None]:
        def run(action: Action) -> None:
            assert action.microbatch is not None, f"{action} has no micro-batch"
            versions = self._versions[action.stage]
            with versions.installed(action.microbatch):
                handle(action)
            if is_last:
                versions.release(action.microbatch)

        return run

    def step(self, stage: int) -> None:
        """Update a stage by the gradients it has, and begin new ones."""
        self._versions[stage].update(lambda: self._update(stage))
        self._number[stage] += 1

    def _update(self, stage: int) -> None:
        self._reduction.attach()
        pairs = self._weights.optimizer_parameters(stage)
        trained = tuple((name, parameter) for name, parameter in pairs if parameter.requires_grad)
        if trained:
            self._hook(Update(stage, self._number[stage], trained))
            self._weights.publish(stage)
        self._reduction.zero(stage)
        # Whatever the hook made of them: an optimizer's zero_grad takes them away.
        self._reduction.attach()

    def assert_empty(self) -> None:
        """Assert that no weights but the newest are kept."""
        for versions in self._versions.values():
            versions.assert_empty()
