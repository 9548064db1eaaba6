"""Linear layers cut over tensor-parallel ranks: by columns on the way in, by rows on the way out.

A column-parallel layer computes a part of its outputs on each rank from the whole input; a row-parallel one, behind it,
takes such a part and sums over the ranks (Shoeybi et al. 2019, section 3). Together they exchange once in the forward
and once in the backward; with a divided sequence, a gather and a reduce-scatter take the place of each sum (Korthikanti
et al. 2022, section 4.2.2). On a rank of its own both are ``Linear``. Knows no architecture.
"""

from collections.abc import Sequence

from torch import Tensor

from chimera.tensor.linear import Linear, shared_linear
from chimera.tensor.parallel import ALONE, TensorParallel
from chimera.tensor.regions import reduce_from_tensor_region, reduce_scatter_to_sequence_region
from chimera.tensor.sharding import Segment, Sharding, even_segments, mark

__all__ = ["ColumnParallelLinear", "RowParallelLinear"]


class ColumnParallelLinear(Linear):
    """The rows of ``weight`` that belong to this rank: from the whole input, its part of the outputs.

    Args:
        in_features: of the whole input.
        out_features: of all ranks together; or the segments of several outputs joined in one matrix, each of which is
            cut by itself, such as those of queries, keys and values.
        parallel: the ranks that share the layer.
        bias: whether there is one.
        divided: whether the input arrives divided along the sequence; by default if ``parallel`` divides it.

    Raises:
        UsageError: t does not divide an output.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int | Sequence[Segment],
        parallel: TensorParallel = ALONE,
        *,
        bias: bool = True,
        divided: bool = True,
    ) -> None:
        segments = even_segments([out_features], parallel) if isinstance(out_features, int) else out_features
        super().__init__(in_features, sum(segment.part for segment in segments), bias=bias)
        self.parallel = parallel if divided else parallel.undivided
        sharding = Sharding.cut(0, segments, parallel)
        for parameter in self.parameters():
            mark(parameter, sharding)

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 - as nn.Linear names it
        """Map ``[b, s, in]``, or this rank's part ``[b, s/t, in]``, to its part of the outputs, ``[b, s, out/t]``."""
        return shared_linear(input, self.weight, self.bias, self.products, self.parallel, float8=self.float8)


class RowParallelLinear(Linear):
    """The columns of ``weight`` that belong to this rank: from its part of the inputs, a summand of all outputs.

    Args:
        in_features: of all ranks together.
        out_features: of the output.
        parallel: the ranks that share the layer; where they divide the sequence, each gets its part of the output.
        bias: whether there is one; it is added once, after the sum.

    Raises:
        UsageError: t does not divide the inputs.
    """

    def __init__(
        self, in_features: int, out_features: int, parallel: TensorParallel = ALONE, *, bias: bool = True
    ) -> None:
        segments = even_segments([in_features], parallel)
        super().__init__(segments[0].part, out_features, bias=bias)
        self.parallel = parallel
        mark(self.weight, Sharding.cut(1, segments, parallel))
        if bias:
            mark(self.bias, Sharding.copied(parallel, partial=parallel.divides_sequence))

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 - as nn.Linear names it
        """Map this rank's part ``[b, s, in/t]`` to the whole output ``[b, s, out]``, or its part ``[b, s/t, out]``.

        Raises:
            UsageError: t does not divide s, along which the output is to be divided.
        """
        if self.parallel.size == 1:
            return super().forward(input)
        summand = shared_linear(input, self.weight, None, self.products, ALONE, float8=self.float8)
        if self.parallel.divides_sequence:
            output = reduce_scatter_to_sequence_region(summand, self.parallel)
        else:
            output = reduce_from_tensor_region(summand, self.parallel)
        return output if self.bias is None else output + self.bias
