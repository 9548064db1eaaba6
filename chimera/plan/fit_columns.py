"""Measured rows in columns, and the time that the planner's formulas give for all of them at once.

The constants to be fitted are arguments here; how they are found is ``fit``'s business.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from chimera.plan.activations import RECOMPUTE_CODES
from chimera.plan.closed import ModelTimes, RankLoad, closed_step, model_times
from chimera.plan.dims import Dims, columns, dims_of
from chimera.plan.kernels import Rates
from chimera.plan.layers import LayerTimes, Sharing
from chimera.plan.parameters import block_parameters, embedding_parameters
from chimera.plan.software import Software
from chimera.plan.step import Grid
from chimera.plan.tables import MeasuredRow

__all__ = ["RowColumns", "row_columns"]

_Array = NDArray[np.float64]


@dataclass(frozen=True, slots=True, eq=False)
class RowColumns:
    """Measured rows in columns; layers are worked out once per distinct row of ``dims`` and ``sharing``.

    Attributes:
        dims: [distinct], widths.
        sharing: [distinct], without the constants of the code base.
        vocab: [distinct], padded.
        distinct: [row], index of each row's distinct widths and sharing.
        microbatch: [row].
        grid: [row].
        microbatches: [row].
        chunks: [row].
        blocks: [row], on the busiest rank.
        parameters: [row], of the busiest device.
        tied: [row], parameters of the tied matrix on one device.
        rates: [row], without constants: the network differs between tables.
        seconds: [row], measured.
        software: [row], index into ``names``.
        names: keys of the code bases.
        reduced_bytes: [row].
    """

    dims: Dims
    sharing: Sharing
    vocab: _Array
    distinct: NDArray[np.intp]
    microbatch: _Array
    grid: Grid
    microbatches: _Array
    chunks: _Array
    blocks: _Array
    parameters: _Array
    tied: _Array
    rates: Rates
    seconds: _Array
    software: NDArray[np.intp]
    names: tuple[str, ...]
    reduced_bytes: _Array

    def predict(self, device: Mapping[str, float], software: Mapping[str, Mapping[str, float]]) -> _Array:
        """Return the predicted seconds of each row under the given constants."""
        rates = self.rates._replace(**device)
        factor, penalty, hop = (
            np.array([software[name].get(constant, 1.0) for name in self.names])
            for constant in ("matrix_factor", "unaligned_penalty", "hop_factor")
        )
        first = _first_of(self.distinct)
        layer_rates = Rates(*(_at(value, first) for value in rates))
        code_base = self.software[first]
        sharing = self.sharing._replace(matrix_factor=factor[code_base], unaligned_penalty=penalty[code_base])
        times = model_times(layer_rates, (self.dims,), sharing, vocab=self.vocab)
        stacks = (Dims(*(_at(value, self.distinct) for value in self.dims)),)
        load = RankLoad(
            share=self.blocks,
            microbatches=self.microbatches,
            chunks=self.chunks,
            parameters=self.parameters,
            tied=self.tied,
            reduced_bytes=self.reduced_bytes,
            hop_factor=hop[self.software],
        )
        steps = closed_step(
            rates,
            stacks,
            ModelTimes(
                tuple(_spread(block, self.distinct) for block in times.blocks),
                _spread(times.embedding, self.distinct),
                _spread(times.head, self.distinct),
            ),
            microbatch=self.microbatch,
            grid=self.grid,
            load=load,
        )
        return np.asarray(steps.total_s, np.float64)


def row_columns(rows: Sequence[MeasuredRow], rates: Sequence[Rates], software: Mapping[str, Software]) -> RowColumns:
    """Put rows into columns.

    Args:
        rows: of GPT models under 1F1B, interleaved or not.
        rates: of each row's cluster; their constants are replaced in every prediction.
        software: the code bases that the rows name.
    """
    names = tuple(dict.fromkeys(row.software for row in rows))
    vocabs = [software[row.software].vocab(row.shape.vocab, row.layout.tensor) for row in rows]
    keys = [
        (
            row.shape.hidden,
            row.shape.heads,
            row.shape.seq,
            row.layout.tensor,
            row.layout.microbatch,
            row.layout.recompute,
            row.layout.sequence_parallel,
            row.software,
            vocab,
        )
        for row, vocab in zip(rows, vocabs, strict=True)
    ]
    order = {key: index for index, key in enumerate(dict.fromkeys(keys))}
    distinct = np.array([order[key] for key in keys], np.intp)
    first = _first_of(distinct)
    stacks = [dims_of(row.shape)[0] for row in rows]
    blocks = [float(block_parameters(dims).per_rank(row.layout.tensor)) for dims, row in zip(stacks, rows, strict=True)]
    share = np.array([1.0 / row.layout.pipeline for row in rows])
    words = np.array(
        [
            float(embedding_parameters(row.shape, vocab=vocab).sharded) / row.layout.tensor
            for row, vocab in zip(rows, vocabs, strict=True)
        ]
    )
    layers = np.array([row.shape.layers for row in rows], np.float64)
    return RowColumns(
        dims=columns([stacks[i]._replace(blocks=1.0) for i in first]),
        sharing=Sharing(
            microbatch=np.array([float(rows[i].layout.microbatch) for i in first]),
            tensor=np.array([float(rows[i].layout.tensor) for i in first]),
            sequence_parallel=np.array([float(rows[i].layout.sequence_parallel) for i in first]),
            recompute=np.array([float(RECOMPUTE_CODES[rows[i].layout.recompute]) for i in first]),
            accumulated_bytes=np.array([software[rows[i].software].accumulated_bytes for i in first]),
        ),
        vocab=np.array([float(vocabs[i]) for i in first]),
        distinct=distinct,
        microbatch=np.array([float(row.layout.microbatch) for row in rows]),
        grid=Grid(
            tensor=np.array([float(row.layout.tensor) for row in rows]),
            pipeline=np.array([float(row.layout.pipeline) for row in rows]),
            data=np.array([float(row.layout.data) for row in rows]),
        ),
        microbatches=np.array([float(row.layout.microbatches) for row in rows]),
        chunks=np.array([float(row.layout.chunks or 1) for row in rows]),
        blocks=share * layers,
        parameters=np.array(blocks) * layers * share + words,
        tied=words,
        rates=Rates(*(np.array(column, np.float64) for column in zip(*rates, strict=True))),
        seconds=np.array([row.seconds for row in rows]),
        software=np.array([names.index(row.software) for row in rows], np.intp),
        names=names,
        reduced_bytes=np.array([software[row.software].reduced_bytes for row in rows]),
    )


def _first_of(distinct: NDArray[np.intp]) -> NDArray[np.intp]:
    """Return the first row of each distinct index."""
    return np.unique(distinct, return_index=True)[1]


def _spread(times: LayerTimes, distinct: NDArray[np.intp]) -> LayerTimes:
    return LayerTimes(*(np.asarray(column)[distinct] for column in times))


def _at(column: object, rows: NDArray[np.intp]) -> _Array:
    """Return a column at some rows; a single number stays one."""
    values = np.asarray(column, np.float64)
    return values[rows] if values.ndim else values
