"""The prices of choices from the planner's formulas of layers, collectives and memory, many choices at once."""

from dataclasses import dataclass
from typing import Final

import numpy as np

from chimera.plan.activations import block_activation_bytes
from chimera.plan.closed import message_bytes, model_times
from chimera.plan.dims import dims_of
from chimera.plan.hardware import Cluster
from chimera.plan.kernels import rates_of
from chimera.plan.layers import LayerTimes, Sharing
from chimera.plan.parameters import LayerParameters, block_parameters, embedding_parameters, head_parameters
from chimera.plan.search.pricing import Choices, Floats, Prices
from chimera.plan.shape import ModelShape
from chimera.plan.software import Software
from chimera.plan.step import Grid, gather_s, hop_times, update_s

__all__ = ["ModelPrices"]

_OPTIMIZER_BYTES: Final = 12.0
"""Of one parameter: its fp32 copy and two moments of Adam."""


@dataclass(frozen=True, slots=True)
class ModelPrices:
    """A model on a cluster, run by a code base."""

    shape: ModelShape
    cluster: Cluster
    software: Software

    def __call__(self, choices: Choices) -> Prices:
        """Return the prices of choices; of unlike blocks (T5) those of the mean block."""
        software, shape = self.software, self.shape
        element = 4.0 if software.dtype == "fp32" else 2.0
        rates, stacks = rates_of(self.cluster, software.dtype, element), dims_of(shape)
        microbatch, tensor = choices.microbatch.astype(np.float64), choices.tensor.astype(np.float64)
        sharing = Sharing(
            microbatch=microbatch,
            tensor=tensor,
            sequence_parallel=choices.sequence_parallel.astype(np.float64),
            recompute=choices.recompute,
            matrix_factor=software.constant("matrix_factor"),
        )
        vocab = _vocab(shape, software, tensor)
        times = model_times(
            rates,
            stacks,
            sharing,
            vocab=vocab,
            fused_attention=software.fused_attention,
            transform=shape.family == "bert",
        )
        size = np.broadcast_shapes(*(column.shape for column in _columns(choices)))
        grid = Grid(tensor, choices.pipeline, choices.data, 1.0, 1.0, 1.0)
        latency, rate = hop_times(rates, grid)
        hop = np.where(choices.pipeline > 1, latency + message_bytes(rates, stacks, microbatch) / rate, 0.0)
        replicas = (choices.data * choices.routes).astype(np.float64)
        state = element + software.gradient_bytes + _OPTIMIZER_BYTES / np.where(choices.sharded, replicas, 1.0)
        block, embedding, head = self._parameters(choices)
        per_rank = (shape.num_blocks * block + embedding + head) / choices.pipeline * choices.routes
        updated = update_s(rates, per_rank / np.where(choices.sharded, replicas, 1.0))
        gathered = gather_s(rates, grid, element * per_rank, replicas=replicas)
        kept = sum(
            stack.blocks
            * block_activation_bytes(
                stack,
                microbatch=microbatch,
                tensor=tensor,
                sequence_parallel=choices.sequence_parallel,
                recompute=choices.recompute,
                element_bytes=element,
                fused_attention=software.fused_attention,
            )
            for stack in stacks
        )

        def over(values: object) -> Floats:
            return np.broadcast_to(np.asarray(values, np.float64), size)

        def kinds(layer: LayerTimes, share: float = 1.0) -> Floats:
            parts = (layer.forward_s, layer.input_grad_s, layer.weight_grad_s)
            return np.stack([over(part * share) for part in parts])

        return Prices(
            block_s=kinds(times.all_blocks(stacks, 1.0 / shape.num_blocks)),
            embedding_s=kinds(times.embedding),
            head_s=kinds(times.head),
            hop_s=over(hop),
            tail_s=over(updated + np.where(choices.sharded, gathered, 0.0)),
            block_bytes=over(kept / shape.num_blocks),
            block_state_bytes=over(block * state),
            embedding_state_bytes=over(embedding * state),
            head_state_bytes=over(head * state),
            usable_bytes=over(self.cluster.device.memory_bytes),
        )

    def _parameters(self, choices: Choices) -> tuple[Floats, Floats, Floats]:
        """Return the parameters of a block, the embedding and the head on one device."""
        tensor = choices.tensor.astype(np.float64)
        stacks = dims_of(self.shape)
        blocks = sum(stack.blocks * block_parameters(stack).per_rank(tensor) for stack in stacks)
        embedding, head = embedding_parameters(self.shape), head_parameters(self.shape)
        if self.shape.tied:
            words = LayerParameters(self.shape.vocab * self.shape.hidden, 0.0).per_rank(tensor)
            copy = np.where(choices.pipeline > 1, words, 0.0)
        else:
            copy = 0.0 * tensor
        return blocks / self.shape.num_blocks, embedding.per_rank(tensor), head.per_rank(tensor) + copy


def _vocab(shape: ModelShape, software: Software, tensor: Floats) -> Floats:
    """Return the rows of the word embedding, padding included."""
    if software.vocab_multiple is None:
        return shape.vocab // tensor * tensor
    step = software.vocab_multiple * tensor
    return np.ceil(shape.vocab / step) * step


def _columns(choices: Choices) -> list["np.ndarray[tuple[int, ...], np.dtype[np.int64]]"]:
    return [getattr(choices, name) for name in Choices.__slots__]
