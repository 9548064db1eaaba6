"""Times of whole steps against measured ones: published tables, and any measured table given by path.

``left_out`` tells the same errors for constants that were fitted without the table, since unseen runs are what users
have. Of runs of one model, the choice among them is judged as well: how much slower than the best of them was measured
the one that is predicted fastest.
"""

import json
from collections.abc import Sequence
from importlib import resources
from pathlib import Path
from typing import Any

from chimera.errors import ChimeraError, FormatError
from chimera.plan.comparison import ChosenRun, Comparison, Constants, Errors, TableResult, cluster_of
from chimera.plan.estimate import Estimate
from chimera.plan.estimating import estimate
from chimera.plan.hardware_file import read_device, read_software
from chimera.plan.measured_layers import measured_ratios
from chimera.plan.stages import StagedLayout
from chimera.plan.tables import FOUR_ADAPTERS, MeasuredRow, inconsistent, measured_table, published_table

__all__ = ["validate_file", "validate_steps"]


def validate_steps(table: str, title: str) -> TableResult:
    """Compare a published table of step times."""
    rows = published_table(table)
    return TableResult(table, title, "s", _compared(rows, _estimates(rows)), {}, _left_out(table, rows))


def validate_file(path: str | Path) -> TableResult:
    """Compare measured runs in a CSV file; see ``tables.measured_table`` for its columns.

    Raises:
        FormatError: the file is no such table.
    """
    rows = measured_table(path)
    estimates = _estimates(rows)
    compared = _compared(rows, estimates)
    one_node = rows[0].software == "single-node"
    return TableResult(
        table=Path(path).stem,
        title=f"step times of {len(rows)} measured runs, {Path(path).name}",
        unit="s",
        rows=compared,
        parts=_with_measured_layers(rows, estimates) if one_node else _by_consistency(rows, compared),
        left_out=_left_out("single-node" if one_node else "multi-node", rows),
        choices=() if one_node else _choices(rows, compared),
    )


def _by_consistency(rows: tuple[MeasuredRow, ...], compared: Sequence[Comparison]) -> dict[str, Errors]:
    """Return the errors of the rows that contradict no other, of those within nodes, and of the others."""
    doubtful = inconsistent(rows)
    sure = [index for index in range(len(rows)) if index not in doubtful]
    eight = [index for index in sure if rows[index].layout.tensor == FOUR_ADAPTERS.node_size]
    groups = {"consistent": sure, "consistent, t = 8": eight, "contradicting another row": sorted(doubtful)}
    return {name: Errors.of([compared[index] for index in group]) for name, group in groups.items() if group}


def _with_measured_layers(rows: Sequence[MeasuredRow], estimates: Sequence[Estimate]) -> dict[str, Errors]:
    """Return the errors with times of layers measured on the runs without a pipeline, and those of the other runs."""
    modelled = [
        StagedLayout.of(row.shape, row.layout, made.cluster, read_software(row.software), None).times
        for row, made in zip(rows, estimates, strict=True)
    ]
    compared, unseen = [], []
    for index, ratios in measured_ratios(rows, estimates, modelled).items():
        row = rows[index]
        made = estimate(
            row.shape,
            row.layout,
            estimates[index].cluster,
            read_software(row.software),
            layer_times=ratios.on(modelled[index]),
        )
        compared.append(Comparison(row.label, ratios.step_s(row, made), row.seconds))
        if row.layout.pipeline > 1:
            unseen.append(compared[-1])
    groups = {"with measured layers": compared, "with measured layers, runs with a pipeline": unseen}
    return {name: Errors.of(group) for name, group in groups.items() if group}


def _choices(rows: tuple[MeasuredRow, ...], compared: Sequence[Comparison]) -> tuple[ChosenRun, ...]:
    """Return the choice among the runs of each model, over all of them and over those that contradict no other."""
    doubtful = inconsistent(rows)
    made = []
    for shape in dict.fromkeys(row.shape for row in rows):
        every = [index for index, row in enumerate(rows) if row.shape == shape]
        sure = [index for index in every if index not in doubtful]
        for among, indices in (("all", every), ("consistent", sure)):
            first = min(indices, key=lambda index: compared[index].predicted)
            best = min(indices, key=lambda index: rows[index].seconds)
            made.append(
                ChosenRun(
                    model=f"{shape.layers} blocks of {shape.hidden}",
                    among=among,
                    chosen=rows[first].label,
                    best=rows[best].label,
                    slower_pct=100 * (rows[first].seconds / rows[best].seconds - 1),
                )
            )
    return tuple(made)


def _estimates(rows: Sequence[MeasuredRow], constants: Constants | None = None) -> list[Estimate]:
    devices = {name: read_device(name) for name in {row.machine.device for row in rows}}
    codes = {name: read_software(name) for name in {row.software for row in rows}}
    if constants is not None:
        devices = {name: constants.on_device(device) for name, device in devices.items()}
        codes = {name: constants.on_software(code) for name, code in codes.items()}
    made = []
    for row in rows:
        try:
            cluster = cluster_of(devices[row.machine.device], row.machine, row.layout.num_devices)
            made.append(estimate(row.shape, row.layout, cluster, codes[row.software]))
        except ChimeraError as error:
            if row.where is None:
                raise
            raise FormatError(f"{row.where}: {error}") from error
    return made


def _compared(rows: Sequence[MeasuredRow], estimates: Sequence[Estimate]) -> tuple[Comparison, ...]:
    return tuple(Comparison(row.label, made.step_s, row.seconds) for row, made in zip(rows, estimates, strict=True))


def _left_out(table: str, rows: Sequence[MeasuredRow]) -> Errors | None:
    constants = _constants_without(table)
    return None if constants is None else Errors.of(_compared(rows, _estimates(rows, constants)))


def _constants_without(table: str) -> Constants | None:
    """Return the constants that were fitted without a table, as the fit has written them."""
    text = (resources.files("chimera.plan") / "tables" / "left_out.json").read_text(encoding="utf-8")
    found: dict[str, Any] = json.loads(text)
    return Constants(**found[table]) if table in found else None
