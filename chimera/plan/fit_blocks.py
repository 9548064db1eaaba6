"""Fitting a device to measured times of single transformer blocks, forward and backward, by micro-batch size.

A table of blocks says nothing of links, so three constants come from it: the efficiencies of products and of memory,
and the time of a launch. The table's form is ``gpu,model,seq,micro_batch,forward_ms,backward_ms``, further columns
allowed.
"""

import csv
import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final, NamedTuple

import numpy as np

from chimera.errors import FormatError
from chimera.ir.files import read_text
from chimera.plan.dims import columns, dims_of
from chimera.plan.fit import DEVICE_STARTS, simplex
from chimera.plan.kernels import Rates
from chimera.plan.layers import LayerTimes, Sharing, block_times
from chimera.plan.shape import ModelShape

__all__ = ["BLOCK_CONSTANTS", "MODELS", "BlockRow", "block_table", "fit_blocks", "predicted_blocks"]

BLOCK_CONSTANTS: Final = ("matrix_efficiency", "memory_efficiency", "launch_s")
"""The constants that a table of blocks decides."""

MODELS: Final[Mapping[str, tuple[int, int]]] = {
    "bert-base": (768, 12),
    "bert-large": (1024, 16),
    "opt-125m": (768, 12),
    "opt-350m": (1024, 16),
}
"""Width and heads of the models whose block is that of GPT and BERT."""


class BlockRow(NamedTuple):
    """One measured block: seconds of forward and backward for one micro-batch."""

    gpu: str
    model: str
    shape: ModelShape
    microbatch: int
    forward_s: float
    backward_s: float


def block_table(path: str | Path) -> tuple[BlockRow, ...]:
    """Read the rows of the known models.

    Raises:
        FormatError: a column is missing, or a value in it is no number.
    """
    rows = []
    for number, line in enumerate(csv.DictReader(io.StringIO(read_text(path, "table of blocks"))), 2):
        try:
            if line["model"] not in MODELS:
                continue
            hidden, heads = MODELS[line["model"]]
            shape = ModelShape(family="gpt", hidden=hidden, layers=1, heads=heads, vocab=1, seq=int(line["seq"]))
            forward, backward = float(line["forward_ms"]) / 1e3, float(line["backward_ms"]) / 1e3
            rows.append(BlockRow(line["gpu"], line["model"], shape, int(line["micro_batch"]), forward, backward))
        except (KeyError, TypeError, ValueError) as error:
            raise FormatError(
                f"{path}, line {number}: {error}; needed: columns gpu, model, seq, micro_batch, forward_ms, backward_ms"
            ) from error
    if not rows:
        raise FormatError(f"{path}: holds none of {', '.join(MODELS)}; needed: at least one row")
    return tuple(rows)


def predicted_blocks(rows: Sequence[BlockRow], rates: Rates) -> LayerTimes:
    """Return the modelled times of all rows, in columns."""
    dims = columns([dims_of(row.shape)[0] for row in rows])
    microbatch = np.array([float(row.microbatch) for row in rows])
    return block_times(rates, dims, Sharing(microbatch, 1.0, np.zeros(len(rows)), np.zeros(len(rows))))


def fit_blocks(rows: Sequence[BlockRow], rates: Rates) -> dict[str, float]:
    """Return the constants with the least mean error (in logarithms) of forward and backward.

    Args:
        rows: of one device.
        rates: of that device, in the number format of the rows.
    """
    forward = np.array([row.forward_s for row in rows])
    backward = np.array([row.backward_s for row in rows])
    origin = np.array([DEVICE_STARTS[name][0] for name in BLOCK_CONSTANTS])

    def constants(point: np.ndarray) -> dict[str, float]:
        return dict(zip(BLOCK_CONSTANTS, (origin * np.exp(point)).tolist(), strict=True))

    def cost(point: np.ndarray) -> float:
        times = predicted_blocks(rows, rates._replace(**constants(point)))
        error = np.abs(np.log(times.forward_s / forward)) + np.abs(np.log(times.backward_s / backward))
        beyond = np.maximum(point - np.log(0.95 / origin), 0.0)[:2]
        return float(error.mean()) + 100 * float((beyond**2).sum())

    point = np.zeros(len(origin))
    for _ in range(3):
        point = simplex(cost, point, size=0.3, steps=300)
    return constants(point)
