"""What each rank of a run keeps for backwards at its schedule's peak, before any rank starts.

Every stage runs the forward of one micro-batch on tensors without storage, and what its graph would keep is counted:
the layers' own code decides, with the run's sizes, types and recompute. The schedule says how many micro-batches are
held at once. What a computation needs beyond that while it runs, and messages, are not counted.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from chimera.data import DataConfig
from chimera.data.t5_samples import span_lengths
from chimera.ir.action import Kind
from chimera.ir.memory import activation_changes
from chimera.ir.rows import code_mask
from chimera.ir.schedule import Schedule
from chimera.models.losses import IGNORED_LABEL
from chimera.runtime.halves import ForwardHalf, Piece
from chimera.runtime.runnable import prepare_recompute
from chimera.runtime.stage import Stage
from chimera.tensor.parallel import TensorParallel
from chimera.tensor.vocabulary import Vocabulary
from chimera.train.config import TrainConfig
from chimera.train.families import family_of, layers_of
from chimera.train.layout import Layout
from chimera.train.precision import torch_dtype

__all__ = ["StageActivations", "peak_activation_bytes", "stage_activations"]


@dataclass(frozen=True, slots=True)
class StageActivations:
    """Bytes that a stage keeps of one of the schedule's micro-batches, on one rank.

    Attributes:
        held: from its forward to its backward, or to its W where that is split.
        backward: more, while the backward runs: of the loss, and of layers that are computed again.
    """

    held: int
    backward: int


def peak_activation_bytes(config: TrainConfig, layout: Layout) -> tuple[int, ...]:
    """Return the bytes of activations that each pipeline rank keeps at the most, by the order of its program."""
    return _peaks(layout.schedule, stage_activations(config, layout))


def stage_activations(config: TrainConfig, layout: Layout) -> tuple[StageActivations, ...]:
    """Return what each stage keeps of a micro-batch."""
    parallel = TensorParallel(0, config.parallel.tensor, config.parallel.sequence)
    with torch.device("meta"):
        layers = layers_of(config.model, parallel)
    for layer in layers:
        layer.to(torch_dtype(config.train.dtype))
    recompute = config.schedule.recompute
    prepare_recompute(layers, recompute, config.schedule.recompute_layers)
    loss = family_of(config.model).loss(Vocabulary(config.model.vocab_size, parallel))
    names = {*loss.fields, *(name for layer in layers for name in getattr(layer, "fields", ()))}
    batch = {name: _field(name, layout.microbatch_size, config.data) for name in names}
    alike = _alike(layout.layer_to_stage, config.model.stacks)
    known: dict[int, tuple[tuple[Tensor, ...], StageActivations]] = {}
    found: list[StageActivations] = []
    tensors: tuple[Tensor, ...] = ()
    with _WithoutStorage():
        for number in range(layout.schedule.num_stages):
            if alike[number] not in known:
                stage = Stage(
                    [layer for layer, at in zip(layers, layout.layer_to_stage, strict=True) if at == number],
                    layout.layer_to_stage.index(number),
                    recompute_every=config.schedule.recompute_layers if recompute == "full" else None,
                )
                last = number + 1 == layout.schedule.num_stages
                known[number] = _run(stage, tensors, batch, loss if last else None)
            tensors, kept = known[alike[number]]
            found.append(kept)
    return tuple(found)


def _bytes_again(half: ForwardHalf, piece: Piece, kept: "_Kept") -> int:
    """Return what a piece keeps beside ``kept`` while it runs again, if it does."""
    if piece.outputs is not None:
        return 0
    made = _Kept(half.stage.layers, besides=kept)
    with made.counting():
        made.take(half.remade(piece).outputs or ())
    return made.bytes


def _alike(layer_to_stage: Sequence[int], stacks: Sequence[int]) -> list[int]:
    """Return for each stage the first one like it: those of as many blocks inside the same stack are alike.

    The first and the last block of a stack may differ from the others.

    >>> _alike([0, 0, 0, 1, 1, 2, 2, 3, 3, 3], [8])
    [0, 1, 1, 3]
    """
    inside = [(stack, 1 < n < blocks) for stack, blocks in enumerate(stacks) for n in range(blocks + 1)]
    first: dict[tuple[tuple[int, bool], ...], int] = {}
    found = []
    for number in range(layer_to_stage[-1] + 1):
        layers = [n for n, stage in enumerate(layer_to_stage) if stage == number]
        places = tuple(inside[n] if n < len(inside) else (len(stacks), False) for n in layers)
        equal = all(is_inside for _, is_inside in places)
        found.append(first.setdefault(places, number) if equal else number)
    return found


def _run(
    stage: Stage, inputs: tuple[Tensor, ...], batch: Mapping[str, Tensor], loss: Callable[[Any, Any], Any] | None
) -> tuple[tuple[Tensor, ...], StageActivations]:
    """Return what a stage gives for ``inputs``, and what it keeps meanwhile and in its backward."""
    kept = _Kept(stage.layers)
    with kept.counting():
        half = stage.begin_forward(0, tuple(tensor.detach() for tensor in inputs), batch, None)
        outputs = half.finish()
    for piece in half.pieces:
        kept.take(piece.inputs)
        kept.take(piece.outputs or ())
    held = kept.bytes
    # Of the pieces that run again one of each kind, since those of the same layers keep the same; the last one runs
    # beside the loss.
    kinds = {tuple(type(stage.layers[offset]) for offset in piece.offsets): piece for piece in half.pieces[:-1]}
    again = [_bytes_again(half, piece, kept) for piece in kinds.values()]
    at_the_end = _bytes_again(half, half.pieces[-1], kept)
    if loss is not None:
        of_loss = _Kept(stage.layers, besides=kept)
        with of_loss.counting():
            leaves = tuple(tensor.detach().requires_grad_(tensor.is_floating_point()) for tensor in outputs)
            loss(leaves[0] if len(leaves) == 1 else leaves, batch)
        at_the_end += of_loss.bytes
    return tuple(tensor.detach() for tensor in outputs), StageActivations(held, max(at_the_end, *again, 0))


class _Kept:
    """The storages that a backward needs, each once; those of weights are no activations.

    Args:
        layers: whose weights they are.
        besides: what is counted already.
    """

    def __init__(self, layers: Iterable[nn.Module], *, besides: "_Kept | None" = None) -> None:
        weights = [tensor for layer in layers for tensor in (*layer.parameters(), *layer.buffers())]
        self._known = {_identity(tensor) for tensor in weights} | (set(besides.storages) if besides else set())
        self.storages: dict[int, torch.UntypedStorage] = {}

    @property
    def bytes(self) -> int:
        """Of all of them."""
        return sum(storage.nbytes() for storage in self.storages.values())

    def take(self, tensors: Iterable[Tensor]) -> None:
        """Count tensors that are kept whether or not a graph needs them."""
        for tensor in tensors:
            self._saved(tensor)

    def counting(self) -> AbstractContextManager[None]:
        """Count what the graphs made inside the block keep."""
        return saved_tensors_hooks(self._saved, lambda tensor: tensor)

    def _saved(self, tensor: Tensor) -> Tensor:
        # The fields of a micro-batch have a storage: they are there anyway.
        if tensor.is_meta and _identity(tensor) not in self._known:
            self.storages[_identity(tensor)] = tensor.untyped_storage()
        return tensor


def _identity(tensor: Tensor) -> int:
    """Return what tells storages apart that have no address; one that is kept is not given to another."""
    return int(tensor.untyped_storage()._cdata)  # noqa: SLF001 - torch has no public name for it


class _WithoutStorage(TorchFunctionMode):
    """Runs on tensors without storage what torch would not, or not as a device does.

    The micro-batch has values, since some decide shapes; with other tensors it meets as if it had none. Attention keeps
    what fused kernels keep, no scores, where torch would take the plain one; biases that learn leave it no other.
    """

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        tensors = [value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)]
        if func is not Tensor.__getitem__ and any(tensor.is_meta for tensor in tensors):
            args = [value.to("meta") if isinstance(value, Tensor) else value for value in args]
            kwargs = {name: value.to("meta") if isinstance(value, Tensor) else value for name, value in kwargs.items()}
        mask = kwargs.get("attn_mask")
        if func is not functional.scaled_dot_product_attention or (mask is not None and mask.requires_grad):
            return func(*args, **kwargs)
        fused = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu  # noqa: SLF001 - it runs on any device
        output, _ = fused(*args, 0.0, kwargs.pop("is_causal", False), **kwargs)
        return output


def _field(name: str, samples: int, data: DataConfig) -> Tensor:
    """Return a field of a micro-batch in the shape that the run's samples have."""
    if name == "nsp_labels":
        return torch.zeros(samples, dtype=torch.int64)
    length = data.sequence_length
    if name.startswith("query"):
        length = data.query_length
    elif name.startswith("decoder") or (name == "labels" and data.samples == "t5"):
        _, noise, spans = span_lengths(length, data.mlm_probability, data.mean_span_length)
        length = noise + spans + 1
    values = torch.ones(samples, length, dtype=torch.int64)
    if name == "mlm_labels":
        values[:, max(1, round(data.mlm_probability * length)) :] = IGNORED_LABEL
    return values


def _peaks(schedule: Schedule, stages: Sequence[StageActivations]) -> tuple[int, ...]:
    """Return the most that each rank keeps, what its backwards need on top among it."""
    table = schedule.table
    held, backward = (
        np.array(column, np.int64) for column in zip(*((s.held, s.backward) for s in stages), strict=True)
    )
    change = activation_changes(table) * held[table.stage]
    needed = np.where(code_mask(table, Kind.B, Kind.I), backward[table.stage], np.maximum(change, 0))
    found = []
    for begin, end in pairwise(table.offsets.tolist()):
        before = np.cumsum(change[begin:end]) - change[begin:end]
        found.append(int((before + needed[begin:end]).max(initial=0)))
    return tuple(found)
