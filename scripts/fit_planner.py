"""Fits the planner's constants to measured runs and writes them into the files of devices and code bases.

    python scripts/fit_planner.py --data FOLDER

FOLDER holds a100_multi_node_measured.csv, a100_single_node_measured.csv and block_times.csv, which are not part of this
repository. The published tables are the package's own. Takes about a quarter of an hour on one core; the same data give
the same constants.
"""

import argparse
import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from chimera.ir.files import replacing
from chimera.plan.comparison import cluster_of
from chimera.plan.fit import (
    DEVICE_STARTS,
    SOFTWARE_STARTS,
    Choice,
    Fitted,
    Goal,
    fit_constants,
    measured_update_s,
)
from chimera.plan.fit_blocks import BLOCK_CONSTANTS, block_table, fit_blocks
from chimera.plan.fit_columns import RowColumns, row_columns
from chimera.plan.hardware import Cluster, Constant, Device
from chimera.plan.hardware_file import (
    known_devices,
    read_device,
    read_software,
    write_device,
    write_software,
)
from chimera.plan.kernels import rates_of
from chimera.plan.tables import MeasuredRow, inconsistent, measured_table, published_table

ROOT = Path(__file__).parents[1]
VARIED = {
    "megatron-2021": ("matrix_factor",),
    "megatron-2022": ("matrix_factor",),
    "megatron-deepspeed": ("matrix_factor", "hop_factor"),
    "single-node": ("matrix_factor", "unaligned_penalty"),
}
OF_TABLE = {
    "megatron": "megatron-2021",
    "korthikanti": "megatron-2022",
    "multi-node": "megatron-deepspeed",
    "single-node": "single-node",
}
UNSEEN = ("zero-bubble", "chimera")
PROFILED = "single-node"
"""Its times are sums of profiled kernels, without noise: what an update takes can be read off them."""
MOST_RUNS = "megatron-deepspeed"
"""Has 88 measured runs on clusters; code bases that were not measured take its matrix factor."""
RESAMPLES = 8


def main() -> None:
    """Fit all, fit without each table, and write."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--data", type=Path, required=True, help="folder of the measured tables")
    folder = parser.parse_args().data
    tables = {
        "megatron": published_table("megatron"),
        "korthikanti": published_table("korthikanti"),
        "multi-node": measured_table(folder / "a100_multi_node_measured.csv"),
        "single-node": measured_table(folder / "a100_single_node_measured.csv"),
    }
    device = with_start(read_device("a100-80"))
    best = fit(tables, device, restarts=5)
    print(f"all tables: {best}", flush=True)
    intervals = resampled(tables, device, best)
    write_a100(device, best, intervals, tables)
    left_out = {}
    for table in tables:
        rest = {name: rows for name, rows in tables.items() if name != table}
        # From the usual start, so that nothing is remembered of the table.
        found = fit(rest, device)
        left_out[table] = {"device": rounded(found.device), "software": with_unseen(found, OF_TABLE[table])}
        print(f"without {table}: {left_out[table]}", flush=True)
    with replacing(ROOT / "chimera" / "plan" / "tables" / "left_out.json") as temporary:
        temporary.write_text(json.dumps(left_out, indent=1) + "\n", encoding="utf-8")
    write_block_devices(folder / "block_times.csv")
    take_over()


def with_start(device: Device) -> Device:
    """Return the device with constants that a fit may start from; a fit replaces their values."""
    return replace(
        device,
        constants={
            name: Constant(value=value, unit=unit, low=value, high=value, fitted_on="the start of a fit")
            for name, (value, unit) in DEVICE_STARTS.items()
        },
    )


def in_columns(tables: Mapping[str, Sequence[MeasuredRow]], device: Device) -> RowColumns:
    """Put all tables into columns, one below the other."""
    rows = [row for table in tables.values() for row in table]
    software = {name: read_software(name) for name in VARIED}
    rates = [software[row.software].rates(cluster_of(device, row.machine, row.layout.num_devices)) for row in rows]
    return row_columns(rows, rates, software)


def goals_of(tables: Mapping[str, Sequence[MeasuredRow]]) -> list[Goal | Choice]:
    """Return what the errors of each table have to stay under, in percent: mean, median, maximum; and the choices.

    Among the runs of each model on many nodes the fastest should be predicted fastest, or one within 5 %; among the
    consistent ones, and among all but those of 18.4B, where a run that contradicts another one is in the way: no model
    that is smooth in b has t = 8, d = 32, b = 16 slower than b = 8.
    """
    goals: list[Goal | Choice] = []
    first = 0
    for name, rows in tables.items():
        own = np.arange(first, first + len(rows))
        first += len(rows)
        if name == "megatron":
            goals.append(Goal(own, 2.5, 2.0, 6.5))
        elif name == "korthikanti":
            goals.append(Goal(own, 2.0, 1.5, 5.0))
        elif name == "single-node":
            goals.append(Goal(own, 5.5, 3.0, 30.0))
        else:
            doubtful = inconsistent(tuple(rows))
            sure = [index for index in range(len(rows)) if index not in doubtful]
            eight = [index for index in sure if rows[index].layout.tensor == 8]
            goals.append(Goal(own, 7.5, 4.0, np.inf, 10.0))
            goals.append(Goal(own[sure], 4.5, 3.0, 20.0))
            goals.append(Goal(own[eight], 2.5, 2.0, 7.0))
            for hidden in sorted({row.shape.hidden for row in rows}):
                for among in (sure, range(len(rows))):
                    if among is sure or hidden != _CONTRADICTED:
                        runs = [index for index in among if rows[index].shape.hidden == hidden]
                        seconds = np.array([rows[index].seconds for index in runs])
                        goals.append(Choice(own[runs], seconds, 0.05))
    return goals


_CONTRADICTED = 6144


def fit(
    tables: Mapping[str, Sequence[MeasuredRow]],
    device: Device,
    *,
    start: Fitted | None = None,
    goals: Sequence[Goal | Choice] | None = None,
    steps: int = 3000,
    restarts: int = 4,
) -> Fitted:
    """Fit the constants to some tables."""
    columns = in_columns(tables, device)
    held = {}
    if PROFILED in tables:
        held["optimizer_bytes"] = device.memory_bytes_per_s * measured_update_s(columns, OF_TABLE[PROFILED])
    return fit_constants(
        columns,
        goals_of(tables) if goals is None else goals,
        varied={name: VARIED[name] for name in columns.names},
        held=held,
        start=start,
        steps=steps,
        restarts=restarts,
    )


def resampled(
    tables: Mapping[str, Sequence[MeasuredRow]], device: Device, best: Fitted
) -> dict[tuple[str, str], tuple[float, float]]:
    """Return the 90 % interval of every constant, from refits to rows drawn again with replacement."""
    draws = np.random.default_rng(0)
    found: dict[tuple[str, str], list[float]] = {}
    for _ in range(RESAMPLES):
        goals = [
            replace(goal, rows=draws.choice(goal.rows, len(goal.rows))) if isinstance(goal, Goal) else goal
            for goal in goals_of(tables)
        ]
        again = fit(tables, device, start=best, goals=goals, steps=400, restarts=1)
        for name, value in again.device.items():
            found.setdefault(("device", name), []).append(value)
        for base, constants in again.software.items():
            for name, value in constants.items():
                found.setdefault((base, name), []).append(value)
    return {key: (float(np.quantile(v, 0.05)), float(np.quantile(v, 0.95))) for key, v in found.items()}


def write_a100(
    device: Device,
    best: Fitted,
    intervals: Mapping[tuple[str, str], tuple[float, float]],
    tables: Mapping[str, Sequence[MeasuredRow]],
) -> None:
    """Write the constants into the A100's file and those of the code bases."""
    fitted_on = ", ".join(f"{name} ({len(rows)} rows)" for name, rows in tables.items())
    constants = {
        name: Constant(
            value=figure(value),
            unit=DEVICE_STARTS[name][1],
            low=figure(min(value, intervals["device", name][0])),
            high=figure(max(value, intervals["device", name][1])),
            fitted_on=fitted_on,
        )
        for name, value in best.device.items()
    }
    write_device(replace(device, constants=constants), ROOT / "hardware" / "a100-80.json")
    for table, base in OF_TABLE.items():
        found = {
            name: Constant(
                value=figure(value),
                unit=SOFTWARE_STARTS[name][1],
                low=figure(min(value, intervals[base, name][0])),
                high=figure(max(value, intervals[base, name][1])),
                fitted_on=f"{table} ({len(tables[table])} rows)",
            )
            for name, value in best.software[base].items()
        }
        write_base(base, found)
    factor = figure(best.software[MOST_RUNS]["matrix_factor"])
    for base in UNSEEN:
        taken = Constant(
            value=factor,
            unit=SOFTWARE_STARTS["matrix_factor"][1],
            low=factor,
            high=factor,
            fitted_on=f"not measured here: taken over from {MOST_RUNS}",
        )
        write_base(base, {"matrix_factor": taken})


def write_base(base: str, constants: Mapping[str, Constant]) -> None:
    """Write a code base's constants into its file."""
    write_software(
        replace(read_software(base), constants=constants), ROOT / "chimera" / "plan" / "codebases" / f"{base}.json"
    )


def with_unseen(found: Fitted, base: str) -> dict[str, dict[str, float]]:
    """Return the code bases' constants with those of one that was left out, as every unmeasured one has them.

    They are those of the code base with most runs on clusters, 1 for one that it does not have.
    """
    software = {name: rounded(constants) for name, constants in found.software.items()}
    measured = [name for name in (MOST_RUNS, *software) if name in software and name != "single-node"]
    taken = software[measured[0]]
    return {**software, base: {name: taken.get(name, 1.0) for name in VARIED[base]}}


def write_block_devices(path: Path) -> None:
    """Fit the devices of a table of blocks; what it does not decide is taken over from the A100."""
    table = block_table(path)
    source = read_device("a100-80").constants
    for name, gpu in (("p100-16", "p100"), ("v100-32", "v100"), ("rtx-3090", "rtx3090")):
        device = read_device(name)
        device = replace(device, constants=taken_over(source))
        rows = [row for row in table if row.gpu == gpu]
        rates = rates_of(Cluster.of(device, 1), "fp32", 4.0)
        found = fit_blocks(rows, rates)
        draws = np.random.default_rng(0)
        again = [fit_blocks([rows[i] for i in draws.choice(len(rows), len(rows))], rates) for _ in range(RESAMPLES)]
        constants = dict(device.constants)
        for constant in BLOCK_CONSTANTS:
            spread = [one[constant] for one in again]
            constants[constant] = Constant(
                value=figure(found[constant]),
                unit=DEVICE_STARTS[constant][1],
                low=figure(min(found[constant], *spread)),
                high=figure(max(found[constant], *spread)),
                fitted_on=f"measured times of {len(rows)} transformer blocks in fp32, forward and backward",
            )
        write_device(replace(device, constants=constants), ROOT / "hardware" / f"{name}.json")


def take_over() -> None:
    """Give the devices that nothing was measured on the A100's constants."""
    source = read_device("a100-80").constants
    for name in known_devices():
        if name not in {"a100-80", "p100-16", "v100-32", "rtx-3090"}:
            write_device(replace(read_device(name), constants=taken_over(source)), ROOT / "hardware" / f"{name}.json")


def taken_over(source: Mapping[str, Constant]) -> dict[str, Constant]:
    """Return constants of the A100, marked as such."""
    return {name: replace(one, fitted_on="not measured here: taken over from a100-80") for name, one in source.items()}


def rounded(constants: Mapping[str, float]) -> dict[str, float]:
    """Return constants with four significant digits."""
    return {name: figure(value) for name, value in constants.items()}


def figure(value: float) -> float:
    """Return a number with four significant digits."""
    return float(f"{value:.4g}")


if __name__ == "__main__":
    main()
