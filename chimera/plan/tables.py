"""Measured runs as rows: the published tables of the package, and any table of the same columns given by path.

A row is a model, a layout, a machine, a code base and the time that was measured. What a table does not print (the
vocabulary, the sequence length, the network) is stated here once, with where it comes from. Judges no prediction.
"""

import csv
import io
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources
from itertools import permutations
from pathlib import Path
from typing import Final, NamedTuple

from chimera.errors import ConfigError, FormatError, UsageError, nearest_names
from chimera.plan.csv_rows import Row, read_rows
from chimera.plan.layout import Layout, Recompute
from chimera.plan.shape import ModelShape

__all__ = [
    "FOUR_ADAPTERS",
    "SELENE",
    "TABLES",
    "Machine",
    "MeasuredRow",
    "inconsistent",
    "measured_table",
    "published_table",
    "read_columns",
]


class Machine(NamedTuple):
    """The cluster of a table: a device, how many make a node, what a node's network carries."""

    device: str
    node_size: int
    network_bytes_per_s: float
    adapters: int


SELENE: Final = Machine("a100-80", 8, 200e9, 8)
"""8 × A100-80GB with 8 × 200 Gb/s InfiniBand (Narayanan et al. 2021, §5; Korthikanti et al. 2022, §6)."""

FOUR_ADAPTERS: Final = Machine("a100-80", 8, 100e9, 4)
"""8 × A100 with 800 Gb/s between nodes (the measured multi-node runs), which is 4 × 200 Gb/s."""

_GPT3_VOCAB: Final = 51200
_GPT2_VOCAB: Final = 50257


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredRow:
    """One measured step.

    Attributes:
        label: what tells it apart within its table.
        shape: the model.
        layout: how it was spread.
        machine: where.
        software: key of the code base.
        seconds: measured, of one step.
        where: file and line that it was read from; None for a published row.
    """

    label: str
    shape: ModelShape
    layout: Layout
    machine: Machine
    software: str
    seconds: float
    where: str | None = None


TABLES: Final = ("megatron", "korthikanti", "zero-bubble")
"""Published tables of step times in the package."""

_FILES: Final = {
    "megatron": "megatron_sc21_table1.csv",
    "korthikanti": "korthikanti2022.csv",
    "zero-bubble": "zero_bubble_iclr24.csv",
}


def read_columns(table: str) -> list[dict[str, str]]:
    """Return the rows of a published table as they were printed.

    Raises:
        UsageError: the package has no table of this name.
    """
    if table not in _FILES:
        raise UsageError(f"no table is named {table!r}{nearest_names(table, TABLES)}; known: {', '.join(TABLES)}")
    text = (resources.files("chimera.plan") / "tables" / _FILES[table]).read_text(encoding="utf-8")
    return list(csv.DictReader(io.StringIO(text)))


def published_table(table: str) -> tuple[MeasuredRow, ...]:
    """Return the step times of a published table.

    Raises:
        UsageError: the package has no table of step times of this name.
    """
    rows = read_columns(table)
    if table == "megatron":
        return tuple(_megatron_row(row) for row in rows)
    if table == "korthikanti":
        return tuple(made for row in rows for made in _korthikanti_rows(row))
    raise UsageError(f"{table!r} holds no times of whole steps; needed: megatron or korthikanti")


def _megatron_row(row: Mapping[str, str]) -> MeasuredRow:
    """Narayanan et al. 2021, table 1: GPT, sequences of 2,048, full recomputation."""
    chunks = int(row["chunks"])
    return MeasuredRow(
        label=f"{row['params_b']}B",
        shape=_gpt(row, vocab=_GPT3_VOCAB, seq=2048),
        layout=Layout(
            tensor=int(row["tp"]),
            pipeline=int(row["pp"]),
            data=int(row["dp"]),
            microbatch=int(row["micro_batch"]),
            microbatches=int(row["num_microbatches"]),
            schedule="interleaved" if chunks > 1 else "1f1b",
            chunks=chunks if chunks > 1 else None,
            recompute="full",
        ),
        machine=SELENE,
        software="megatron-2021",
        seconds=float(row["iteration_s"]),
    )


def _korthikanti_rows(row: Mapping[str, str]) -> list[MeasuredRow]:
    """Korthikanti et al. 2022, table 5: full recomputation against selective with sequence parallelism."""
    chunks, microbatch = int(row["chunks"]), int(row["micro_batch"])
    modes: tuple[tuple[Recompute, bool, str], ...] = (
        ("full", False, "full_recompute_s"),
        ("selective", True, "seqpar_selective_s"),
    )
    return [
        MeasuredRow(
            label=f"{row['params_b']}B {recompute}",
            shape=_gpt(row, vocab=_GPT3_VOCAB, seq=2048),
            layout=Layout(
                tensor=int(row["tp"]),
                pipeline=int(row["pp"]),
                microbatch=microbatch,
                microbatches=int(row["global_batch"]) // microbatch,
                schedule="interleaved" if chunks > 1 else "1f1b",
                chunks=chunks if chunks > 1 else None,
                recompute=recompute,
                sequence_parallel=sequence_parallel,
            ),
            machine=SELENE,
            software="megatron-2022",
            seconds=float(row[column]),
        )
        for recompute, sequence_parallel, column in modes
    ]


def _gpt(row: Mapping[str, str], *, vocab: int, seq: int) -> ModelShape:
    return ModelShape(
        family="gpt",
        hidden=int(row["hidden"]),
        layers=int(row["layers"]),
        heads=int(row["heads"]),
        vocab=vocab,
        seq=seq,
    )


_MEASURED_COLUMNS: Final = (
    "gpus",
    "global_batch",
    "micro_batch",
    "hidden",
    "heads",
    "layers",
    "seq",
    "tp",
    "dp",
    "pp",
    "iteration_ms",
)


def measured_table(path: str | Path) -> tuple[MeasuredRow, ...]:
    """Read measured runs of GPT-2's vocabulary, one a line, from a CSV file.

    Rows of more than one node are taken as runs with full recomputation and a padded vocabulary, of one node as runs
    without either: so the two public sets were run.

    Raises:
        FormatError: the file is no such table; the message names the line.
    """
    rows = read_rows(path, _MEASURED_COLUMNS, "table of measured runs")
    one_node = max(row.count("gpus") for row in rows) <= FOUR_ADAPTERS.node_size
    return tuple(_measured_row(row, one_node=one_node) for row in rows)


def _measured_row(row: Row, *, one_node: bool) -> MeasuredRow:
    size = {name: row.count(name) for name in _MEASURED_COLUMNS[:-1]}
    try:
        shape = ModelShape(
            family="gpt",
            hidden=size["hidden"],
            layers=size["layers"],
            heads=size["heads"],
            vocab=_GPT2_VOCAB,
            seq=size["seq"],
        )
        share = size["micro_batch"] * size["dp"]
        if size["global_batch"] % share:
            raise FormatError(f"global_batch {size['global_batch']} is no multiple of micro_batch · dp = {share}")
        layout = Layout(
            tensor=size["tp"],
            pipeline=size["pp"],
            data=size["dp"],
            microbatch=size["micro_batch"],
            microbatches=size["global_batch"] // share,
            recompute="none" if one_node else "full",
        )
        if layout.num_devices != size["gpus"]:
            raise FormatError(f"tp · dp · pp is {layout.num_devices}, gpus is {size['gpus']}")
    except (ConfigError, FormatError) as error:
        raise FormatError(f"{row.where}: {error}") from error
    return MeasuredRow(
        label=f"h{size['hidden']} t{layout.tensor} p{layout.pipeline} d{layout.data} b{layout.microbatch}",
        shape=shape,
        layout=layout,
        machine=FOUR_ADAPTERS,
        software="single-node" if one_node else "megatron-deepspeed",
        seconds=row.number("iteration_ms") / 1e3,
        where=row.where,
    )


def inconsistent(rows: tuple[MeasuredRow, ...], *, low: float = 0.87, high: float = 1.05) -> frozenset[int]:
    """Return the rows that contradict another one of the same layout, by a check that knows no model.

    Two runs that differ in the size of their micro-batches alone should take almost the same time once the bubble is
    taken out, the larger micro-batches a little less. Where the larger takes more than ``high`` or less than ``low``
    times the smaller, the slower of the two is named.
    """
    alike: dict[tuple[object, ...], list[int]] = {}
    for index, row in enumerate(rows):
        alike.setdefault(_without_microbatch(row), []).append(index)
    found = set()
    for i, j in (pair for group in alike.values() for pair in permutations(group, 2)):
        if rows[i].layout.microbatch < rows[j].layout.microbatch:
            ratio = _without_bubble(rows[j]) / _without_bubble(rows[i])
            if ratio > high:
                found.add(j)
            elif ratio < low:
                found.add(i)
    return frozenset(found)


def _without_microbatch(row: MeasuredRow) -> tuple[object, ...]:
    return row.shape, row.layout.tensor, row.layout.pipeline, row.layout.data, row.layout.global_batch


def _without_bubble(row: MeasuredRow) -> float:
    m = row.layout.microbatches
    return row.seconds * m / (m + row.layout.pipeline - 1)
