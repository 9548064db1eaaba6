"""Measures runtimes against each other on the virtual device: who adds least to a schedule's own time.

Contenders run alternately in the same processes, so that whatever else the machine does meets them all. Ours is a
``Pipeline``; torch.distributed.pipelining is built here from the same layers, the same loss and the same micro-batches.
"""

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch.distributed import pipelining

from chimera.ir.costs import Costs
from chimera.ir.schedule import Schedule
from chimera.runtime.pipeline import Pipeline
from chimera.runtime.virtual import VirtualLayer, VirtualLoss, oversleep_s, virtual_batch, virtual_layers

__all__ = ["Contender", "Measurement", "measure", "ours", "torch_counterparts", "torchs"]


@dataclass(frozen=True, slots=True)
class Contender:
    """Something that runs a step of ``num_microbatches`` through the group.

    Attributes:
        name: shown in the table.
        num_computations: forwards and backwards of one rank in one step, for the time per pair.
        step: runs one.
    """

    name: str
    num_computations: int
    step: Callable[[], object]


@dataclass(frozen=True, slots=True)
class Measurement:
    """The runs of one contender.

    Attributes:
        step_s: seconds of each run, the slowest rank's.
        cpu_s: CPU seconds of each run, all ranks and all their threads together.
    """

    step_s: tuple[float, ...]
    cpu_s: tuple[float, ...]

    @property
    def median_s(self) -> float:
        """The median run."""
        return statistics.median(self.step_s)

    @property
    def median_cpu_s(self) -> float:
        """The median CPU time."""
        return statistics.median(self.cpu_s)


def measure(contenders: Sequence[Contender], runs: int) -> dict[str, Measurement]:
    """Run every contender once to warm up, then ``runs`` times in turn; a collective over the default group."""
    steps: dict[str, list[tuple[float, float]]] = {contender.name: [] for contender in contenders}
    for run in range(runs + 1):
        for contender in contenders:
            dist.all_reduce(torch.zeros(1), dist.ReduceOp.SUM)
            cpu, start = time.process_time(), time.perf_counter()
            contender.step()
            took = torch.tensor([time.perf_counter() - start], dtype=torch.float64)
            spent = torch.tensor([time.process_time() - cpu], dtype=torch.float64)
            dist.all_reduce(took, dist.ReduceOp.MAX)
            dist.all_reduce(spent, dist.ReduceOp.SUM)
            if run:
                steps[contender.name].append((float(took), float(spent)))
    return {
        name: Measurement(tuple(took for took, _ in rows), tuple(spent for _, spent in rows))
        for name, rows in steps.items()
    }


def ours(
    name: str, schedule: Schedule, costs: Costs, message_bytes: int, backend: Literal["auto", "gloo"] = "auto"
) -> Contender:
    """Return our runtime with ``schedule``, waiting as long as ``costs`` say, in seconds."""
    layers = virtual_layers(costs.resolve(schedule), schedule.num_microbatches)
    pipe = Pipeline(
        layers, schedule, VirtualLoss(len(layers)), dist.group.WORLD, backend=None if backend == "auto" else backend
    )
    inputs, targets = virtual_batch(schedule.num_microbatches, message_bytes)
    return Contender(
        name,
        2 * schedule.num_microbatches * schedule.num_stages // schedule.num_ranks,
        lambda: pipe.step(inputs, targets),
    )


@dataclass(frozen=True, slots=True)
class _TorchSchedule:
    """One schedule of torch.distributed.pipelining: its class, and how it places stages.

    ``chunks`` None takes as many as ours; ``vee`` puts stages p…2p - 1 on the ranks in reverse.
    """

    schedule: Any
    chunks: int | None = None
    vee: bool = False

    def stages_of(self, rank: int, ranks: int, chunks: int) -> list[int]:
        """Return the stages on ``rank``."""
        if self.vee:
            return [rank, 2 * ranks - 1 - rank]
        return list(range(rank, ranks * chunks, ranks))


_TORCH = {
    "gpipe": _TorchSchedule(pipelining.ScheduleGPipe, chunks=1),
    "1f1b": _TorchSchedule(pipelining.Schedule1F1B, chunks=1),
    "interleaved": _TorchSchedule(pipelining.ScheduleInterleaved1F1B),
    "looped-bfs": _TorchSchedule(pipelining.ScheduleLoopedBFS),
    "interleaved-zb": _TorchSchedule(pipelining.ScheduleInterleavedZeroBubble),
    "zb-v": _TorchSchedule(pipelining.ScheduleZBVZeroBubble, chunks=2, vee=True),
    "dualpipev": _TorchSchedule(pipelining.ScheduleDualPipeV, chunks=2, vee=True),
}
_PLAIN = ("gpipe", "1f1b", "interleaved", "looped-bfs")


def torch_counterparts(name: str, *, splits: bool, ranks: int, microbatches: int) -> tuple[str, ...]:
    """Return torch's schedule of the same name, or where it has none all it offers at these sizes.

    Those that split the backward stand against ours that do: ``splits``.
    """
    if name in _TORCH:
        return (name,)
    offered = tuple(_TORCH) if splits else _PLAIN
    return tuple(other for other in offered if other != "dualpipev" or microbatches >= 2 * ranks)


class _GraphSplitLayer(VirtualLayer):
    """Waits for I where autograd goes on to the input, and for W where it goes to the weight, as torch splits them."""

    def forward(self, tensor: torch.Tensor) -> torch.Tensor:
        self._wait(self.forward_s)
        inputs, weight = tensor.view_as(tensor), self.weight * 1
        out = inputs + weight
        of_inputs = self.backward_s - self.weight_grad_s if inputs.requires_grad else 0.0

        def to_inputs(gradient: torch.Tensor) -> torch.Tensor:
            self._wait(of_inputs)
            # Torch sends it as it is, and refuses the loss's expanded one.
            return gradient.contiguous()

        if inputs.requires_grad:
            inputs.register_hook(to_inputs)  # type: ignore[no-untyped-call]
        if weight.requires_grad:
            weight.register_hook(lambda _: self._wait(self.backward_s - of_inputs))  # type: ignore[no-untyped-call]
        return out


def torchs(name: str, *, ranks: int, microbatches: int, chunks: int, costs: Costs, message_bytes: int) -> Contender:
    """Return torch.distributed.pipelining with its schedule ``name``, over the default group."""
    offered = _TORCH[name]
    rank = dist.get_rank()
    chunks = offered.chunks or chunks
    stages = ranks * chunks
    numbers = offered.stages_of(rank, ranks, chunks)
    loss = VirtualLoss(stages)
    splits = name not in _PLAIN

    def loss_fn(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return loss(output, target[0])["virtual"][0]

    extra = oversleep_s()
    message = torch.empty(1, max(1, message_bytes // 4))
    own = [
        pipelining.PipelineStage(
            (_GraphSplitLayer if splits else VirtualLayer)(
                stage,
                forward_s=costs.forward / chunks,
                backward_s=costs.backward / chunks,
                weight_grad_s=costs.split_backward()[1] / chunks,
                total=1.0,
                oversleep_s=extra,
            ),
            stage,
            stages,
            torch.device("cpu"),
            # Shapes said ahead: torch would otherwise run the layers on made-up values, which they refuse.
            input_args=message.clone().requires_grad_(stage > 0),
            output_args=message.clone().requires_grad_(),
            output_grads=None if stage == stages - 1 else message,
            input_grads=message if stage else None,
        )
        for stage in numbers
    ]
    options: dict[str, Any] = {"loss_fn": loss_fn, "scale_grads": False}
    schedule = offered.schedule(own[0] if offered.chunks == 1 else own, microbatches, **options)
    inputs, targets = (torch.cat(parts) for parts in virtual_batch(microbatches, message_bytes))
    targets = targets.view(microbatches, 1)
    first, last = 0 in numbers, stages - 1 in numbers

    def step() -> None:
        arguments = (inputs,) if first else ()
        keywords = {"target": targets, "losses": []} if last else {}
        schedule.step(*arguments, **keywords)
        for stage in own:
            stage.submod.zero_grad()

    return Contender(f"torch {name}", 2 * microbatches * chunks, step)
