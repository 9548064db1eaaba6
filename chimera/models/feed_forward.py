"""The feed-forward part of a block, with or without a gate, cut over tensor-parallel ranks.

Knows each architecture's activation by name, and no norms and no residuals.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Final, Literal

from torch import Tensor, nn
from torch.nn import functional

from chimera.models.config import TransformerConfig
from chimera.tensor.dropout import dropout
from chimera.tensor.parallel import TensorParallel
from chimera.tensor.parallel_linear import ColumnParallelLinear, RowParallelLinear
from chimera.tensor.sharding import even_segments

__all__ = ["Activation", "FeedForward"]

Activation = Literal["gelu", "gelu-tanh", "relu", "silu"]
"""The exact GELU, GPT-2's approximation of it, and two more."""

_FUNCTIONS: Final[Mapping[Activation, Callable[[Tensor], Tensor]]] = {
    "gelu": functional.gelu,
    "gelu-tanh": partial(functional.gelu, approximate="tanh"),
    "relu": functional.relu,
    "silu": functional.silu,
}


class FeedForward(nn.Module):
    """Two linear layers with an activation between them, ``[…, h]`` to ``[…, h]``.

    Args:
        config: Sizes.
        parallel: The ranks that share it.
        activation: Between the two.
        gated: Whether the first layer makes a second output, which the activated one is multiplied by (Shazeer 2020,
            arXiv 2002.05202). Rows of ``expand`` are those that are activated, then the others.
        bias: Whether the layers have biases.
        dropout: Probability on what the second layer takes.
    """

    def __init__(
        self,
        config: TransformerConfig,
        parallel: TensorParallel,
        *,
        activation: Activation,
        gated: bool = False,
        bias: bool = True,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        self.parallel = parallel
        self.activation = _FUNCTIONS[activation]
        self.gated = gated
        self.dropout = dropout
        width = config.feed_forward_size
        outputs = even_segments([width] * (2 if gated else 1), parallel)
        self.expand = ColumnParallelLinear(config.hidden_size, outputs, parallel, bias=bias)
        self.contract = RowParallelLinear(width, config.hidden_size, parallel, bias=bias)

    def forward(self, hidden: Tensor) -> Tensor:
        """Transform each position by itself."""
        expanded = self.expand(hidden)
        if self.gated:
            activated, other = expanded.chunk(2, -1)
            inner = self.activation(activated) * other
        else:
            inner = self.activation(expanded)
        inner = dropout(inner, self.dropout, training=self.training, part=self.parallel.part_along(2))
        return self.contract(inner)  # type: ignore[no-any-return]
