"""Times of layers from a recorded run: from its costs per stage, or from the time of its steps.

Stages between the ends consist of blocks alone, so they tell a block's time; what the first and the last take beyond
their blocks is the embedding's and the head's. A run with fewer than three stages, or with nothing but the time of its
steps, tells by how much all layers differ from the model. The times hold for the run's t, b and recomputation.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any, ClassVar, Final

from chimera.errors import FormatError, UsageError
from chimera.ir.costs import StageCosts
from chimera.ir.files import read_text
from chimera.plan.closed import ModelTimes
from chimera.plan.dims import Number
from chimera.plan.estimating import estimate
from chimera.plan.hardware import Cluster
from chimera.plan.layers import LayerTimes
from chimera.plan.layout import Layout, Recompute
from chimera.plan.shape import ModelShape
from chimera.plan.software import Software
from chimera.plan.stages import StagedLayout

__all__ = ["RecordedRun", "layers_of_stages", "layers_of_steps", "recorded_step_s"]

_WARM: Final = 2
"""Steps of a run that are left out where it has more: they allocate and compile."""

_ROUNDS: Final = 20
_CLOSE: Final = 1e-6


@dataclass(frozen=True, slots=True)
class RecordedRun:
    """Times of the layers of one run.

    Attributes:
        name: of the file they come from.
        seq: tokens of its sequences.
        tensor: t.
        sequence_parallel: whether its tensor-parallel ranks shared what lies between their products.
        microbatch: b.
        mode: what its backward ran again.
        layers: times for one micro-batch.
    """

    name: str
    seq: int
    tensor: int
    sequence_parallel: bool
    microbatch: int
    mode: Recompute
    layers: ModelTimes
    option: ClassVar[str] = "--costs"

    @property
    def sizes(self) -> tuple[int, ...]:
        """Micro-batch sizes b."""
        return (self.microbatch,)

    @property
    def recompute(self) -> tuple[Recompute, ...]:
        """What a backward may run again."""
        return (self.mode,)

    def in_place_of(self, modelled: ModelTimes, *, microbatch: Number, recomputes: Number) -> ModelTimes:  # noqa: ARG002 - those of the run are the only ones
        """Return the recorded times."""
        return self.layers


def layers_of_stages(costs: StageCosts, blocks: Sequence[int], modelled: ModelTimes) -> ModelTimes:
    """Return the times of a block, the embedding and the head that make up the stages of a recorded run.

    Args:
        costs: of its stages.
        blocks: of each stage; all are alike.
        modelled: times of the same layers, which divide a backward that was not split, and few stages into layers.

    Raises:
        UsageError: the costs are of another number of stages.
    """
    if len(costs.forward_s) != len(blocks):
        raise UsageError(
            f"--costs holds times of {len(costs.forward_s)} stages, the layout has {len(blocks)}; needed: the costs of "
            "a run of this layout"
        )
    (block,), embedding, head = modelled
    share = float(block.weight_grad_s / block.backward_s)
    weight = costs.weight_grad_s
    weights = [share * time for time in costs.backward_s] if weight is None else list(weight)
    inputs = [whole - later for whole, later in zip(costs.backward_s, weights, strict=True)]
    kinds = [
        _of_kind(list(times), blocks, [float(layer[kind]) for layer in (block, embedding, head)])
        for kind, times in enumerate((costs.forward_s, inputs, weights))
    ]
    made = [LayerTimes(ahead, back, later, 0.0) for ahead, back, later in zip(*kinds, strict=True)]
    return ModelTimes((made[0]._replace(collective_s=float(block.collective_s)),), made[1], made[2])


def layers_of_steps(
    step_s: float, shape: ModelShape, layout: Layout, cluster: Cluster, software: Software
) -> ModelTimes:
    """Return modelled times of layers, all times the factor that makes the estimate of a run as long as its steps.

    Args:
        step_s: measured, of a step.
        shape: the model.
        layout: of the run.
        cluster: where it ran.
        software: the code base that ran it.

    Raises:
        UsageError: reduction and update alone are estimated to take as long.
    """
    modelled = StagedLayout.of(shape, layout, cluster, software, None).times
    factor = 1.0
    for _ in range(_ROUNDS):
        made = estimate(shape, layout, cluster, software, layer_times=_scaled(modelled, factor), compiled=True)
        left = step_s - (made.step_s - made.pipeline_s)
        if left <= 0:
            raise UsageError(
                f"the recorded steps take {step_s:.4g} s, and reduction and update alone are estimated at "
                f"{step_s - left:.4g} s; give the device and the network that the run had with --device and --network"
            )
        factor *= left / made.pipeline_s
        if abs(left / made.pipeline_s - 1) < _CLOSE:
            break
    return _scaled(modelled, factor)


def recorded_step_s(path: Path) -> float:
    """Return the median time of a step from the ``metrics.jsonl`` of a run, its first steps left out.

    Raises:
        FormatError: a line is no JSON object, or has no time; the message names it.
    """
    times = []
    for number, line in enumerate(read_text(path, "metrics of a run").splitlines(), 1):
        try:
            row: dict[str, Any] = json.loads(line)
            time = float(row["step_s"])
        except (ValueError, KeyError, TypeError) as error:
            raise FormatError(f"{path}, line {number}: needed: a JSON object with step_s, a number") from error
        if not 0 < time < float("inf"):
            raise FormatError(f"{path}, line {number}: step_s is {time}; needed: a time above 0")
        times.append(time)
    if not times:
        raise FormatError(f"{path} holds no step; needed: a line for each")
    return median(times[_WARM:] or times)


def _of_kind(times: list[float], blocks: Sequence[int], modelled: list[float]) -> tuple[float, float, float]:
    """Return the time of a block, the embedding and the head, of F, I or W."""
    between, middle = times[1:-1], sum(blocks[1:-1])
    if middle:
        block = sum(between) / middle
        first, last = (max(times[stage] - blocks[stage] * block, 0.0) for stage in (0, -1))
        return block, first, last
    block, embedding, head = modelled
    ratio = sum(times) / (sum(blocks) * block + embedding + head)
    return ratio * block, ratio * embedding, ratio * head


def _scaled(modelled: ModelTimes, factor: float) -> ModelTimes:
    def layer(times: LayerTimes) -> LayerTimes:
        return LayerTimes(*(factor * float(time) for time in times))

    return ModelTimes(tuple(map(layer, modelled.blocks)), layer(modelled.embedding), layer(modelled.head))
