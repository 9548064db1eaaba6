"""Predictions against measurements: the published tables of the package, and measured tables given by path.

Every figure goes the way that a user's does: through ``estimate`` or ``simulate``, with the constants that the package
ships. ``left_out`` tells the same errors for constants that were fitted without the table, since unseen runs are what
users have.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib import resources
from pathlib import Path
from statistics import fmean, median
from typing import Any, Final

from chimera.errors import UsageError, nearest_names
from chimera.ir.costs import StageCosts
from chimera.plan.closed import model_times
from chimera.plan.dims import dims_of
from chimera.plan.estimating import estimate
from chimera.plan.hardware import Cluster, Device
from chimera.plan.hardware_file import read_device, read_software
from chimera.plan.kernels import rates_of
from chimera.plan.layers import LayerTimes, Sharing
from chimera.plan.shape import ModelShape
from chimera.plan.software import Software
from chimera.plan.tables import (
    FOUR_ADAPTERS,
    Machine,
    MeasuredRow,
    inconsistent,
    measured_table,
    published_table,
    read_columns,
)
from chimera.plan.validate_chimera import PUBLISHED_CHOICES, figure_13, speedups
from chimera.schedules import build_schedule
from chimera.simulate import simulate

__all__ = ["VALIDATIONS", "Comparison", "Constants", "Errors", "TableResult", "cluster_of", "validate", "validate_file"]


@dataclass(frozen=True, slots=True)
class Comparison:
    """One figure: what was predicted and what was published or measured, in the unit of its table."""

    label: str
    predicted: float
    published: float

    @property
    def error_pct(self) -> float:
        """Predicted over published, less 1, in percent."""
        return 100 * (self.predicted / self.published - 1)


@dataclass(frozen=True, slots=True)
class Errors:
    """Mean, median and maximum of the size of some errors, in percent."""

    rows: int
    mean_pct: float
    median_pct: float
    max_pct: float

    @classmethod
    def of(cls, compared: Sequence[Comparison]) -> "Errors":
        """Sum up comparisons."""
        sizes = [abs(row.error_pct) for row in compared]
        return cls(len(sizes), fmean(sizes), median(sizes), max(sizes))


@dataclass(frozen=True, slots=True)
class TableResult:
    """One table.

    Attributes:
        table: its name.
        title: what it holds and where it comes from.
        unit: of the figures.
        rows: all of them.
        parts: errors of parts of the rows that are told apart.
        left_out: errors with constants fitted without this table; None where no constant was fitted on it.
    """

    table: str
    title: str
    unit: str
    rows: tuple[Comparison, ...]
    parts: Mapping[str, Errors]
    left_out: Errors | None

    @property
    def errors(self) -> Errors:
        """Errors of all rows."""
        return Errors.of(self.rows)


@dataclass(frozen=True, slots=True)
class Constants:
    """Constants in place of those in the device's and the code bases' files."""

    device: Mapping[str, float]
    software: Mapping[str, Mapping[str, float]]

    def on_device(self, device: Device) -> Device:
        """Return the device with these constants."""
        return replace(
            device,
            constants={
                name: replace(fitted, value=self.device.get(name, fitted.value))
                for name, fitted in device.constants.items()
            },
        )

    def on_software(self, software: Software) -> Software:
        """Return the code base with these constants."""
        own = self.software.get(software.name, {})
        return replace(
            software,
            constants={
                name: replace(fitted, value=own.get(name, fitted.value)) for name, fitted in software.constants.items()
            },
        )


def cluster_of(device: Device, machine: Machine, num_devices: int) -> Cluster:
    """Return the cluster on which a row of a table was measured."""
    return Cluster.of(
        device,
        num_devices,
        node_size=min(machine.node_size, num_devices),
        network_bytes_per_s=machine.network_bytes_per_s,
        adapters=machine.adapters,
    )


def validate(table: str) -> TableResult:
    """Compare one published table.

    Raises:
        UsageError: there is no such table.
    """
    if table not in VALIDATIONS:
        raise UsageError(
            f"--table {table}: no such table{nearest_names(table, VALIDATIONS)}; known: {', '.join(VALIDATIONS)}"
        )
    return VALIDATIONS[table]()


def validate_file(path: str | Path) -> TableResult:
    """Compare measured runs in a CSV file; see ``tables.measured_table`` for its columns.

    Raises:
        FormatError: the file is no such table.
    """
    rows = measured_table(path)
    doubtful = frozenset() if rows[0].software == "single-node" else inconsistent(rows)
    one_node = rows[0].software == "single-node"
    compared = _steps(rows, None)
    left_out = _left_out("single-node" if one_node else "multi-node", rows)
    parts = {}
    if doubtful:
        sure = [row for index, row in enumerate(compared) if index not in doubtful]
        parts["consistent"] = Errors.of(sure)
        eight = [
            row
            for index, row in enumerate(compared)
            if index not in doubtful and rows[index].layout.tensor == FOUR_ADAPTERS.node_size
        ]
        if eight:
            parts["consistent, t = 8"] = Errors.of(eight)
        parts["contradicting another row"] = Errors.of([compared[index] for index in sorted(doubtful)])
    title = f"step times of {len(rows)} measured runs, {Path(path).name}"
    return TableResult(Path(path).stem, title, "s", compared, parts, left_out)


def _validate_steps(table: str, title: str) -> TableResult:
    rows = published_table(table)
    return TableResult(table, title, "s", _steps(rows, None), {}, _left_out(table, rows))


def _steps(rows: Sequence[MeasuredRow], constants: Constants | None) -> tuple[Comparison, ...]:
    compared = []
    for row in rows:
        device, software = read_device(row.machine.device), read_software(row.software)
        if constants is not None:
            device, software = constants.on_device(device), constants.on_software(software)
        cluster = cluster_of(device, row.machine, row.layout.num_devices)
        predicted = estimate(row.shape, row.layout, cluster, software).step_s
        compared.append(Comparison(row.label, predicted, row.seconds))
    return tuple(compared)


def _left_out(table: str, rows: Sequence[MeasuredRow]) -> Errors | None:
    constants = _constants_without(table)
    return None if constants is None else Errors.of(_steps(rows, constants))


def _constants_without(table: str) -> Constants | None:
    """Return the constants that were fitted without a table, as the fit has written them."""
    text = (resources.files("chimera.plan") / "tables" / "left_out.json").read_text(encoding="utf-8")
    found: dict[str, Any] = json.loads(text)
    return Constants(**found[table]) if table in found else None


def _korthikanti_memory() -> TableResult:
    """Parameters with optimizer states on a rank between the ends, activations at the peak of the first rank."""
    rows = []
    device = read_device("a100-80")
    for made, printed in zip(
        [row for row in published_table("korthikanti") if row.layout.recompute == "selective"],
        read_columns("korthikanti"),
        strict=True,
    ):
        cluster = cluster_of(device, made.machine, made.layout.num_devices)
        software = read_software(made.software)
        held = estimate(made.shape, made.layout, cluster, software)
        middle = held.memory[len(held.memory) // 2]
        states = middle.weights + middle.gradients + middle.optimizer
        rows.append(Comparison(f"{printed['params_b']}B states", states / _GIB, float(printed["param_optimizer_gib"])))
        for layout, column, name in (
            (replace(made.layout, recompute="none", sequence_parallel=False), "activations_none_gib", "none"),
            (made.layout, "activations_seqpar_selective_gib", "selective"),
        ):
            predicted = estimate(made.shape, layout, cluster, software).memory[0].activations
            label = f"{printed['params_b']}B activations, {name}"
            rows.append(Comparison(label, predicted / _GIB, float(printed[column])))
    title = "memory per device, Korthikanti et al. 2022, figures 1 and 7"
    return TableResult("korthikanti-memory", title, "GiB", tuple(rows), {}, None)


_GIB: Final = 2**30

_ZERO_BUBBLE_SHAPES: Final = {
    "1.5B": (ModelShape(family="gpt", hidden=2304, layers=22, heads=24, vocab=50257, seq=1024), 6, 3),
    "6.2B": (ModelShape(family="gpt", hidden=4096, layers=30, heads=32, vocab=50257, seq=1024), 3, 4),
}
"""Model, micro-batch size and chunks per rank (Qi et al. 2024, table 3); each end has a block less for what it does."""


def _zero_bubble_rates() -> TableResult:
    """Bubble rates from the published times of F, I, W and a hop, simulated, on the span's clock."""
    rows = []
    for printed in read_columns("zero-bubble"):
        p, m = int(printed["pp"]), int(printed["num_microbatches"])
        chunks = _ZERO_BUBBLE_SHAPES[printed["model"]][2]
        for name, column in (
            ("1f1b", "bubble_1f1b"),
            ("interleaved", "bubble_interleaved"),
            ("zb-h1", "bubble_zb_h1"),
            ("zb-h2", "bubble_zb_h2"),
        ):
            v = chunks if name == "interleaved" else 1
            schedule = build_schedule(name, ranks=p, microbatches=m, chunks=v if v > 1 else None)
            forward, inward, weight = (
                float(printed[key]) / 1e3 / v for key in ("forward_ms", "input_grad_ms", "weight_grad_ms")
            )
            costs = StageCosts(
                forward_s=[forward] * p * v,
                backward_s=[inward + weight] * p * v,
                weight_grad_s=[weight] * p * v,
                latency_s=float(printed["p2p_ms"]) / 1e3,
            )
            span = simulate(schedule, costs).span
            rate = 1 - m * v * (forward + inward + weight) / span
            rows.append(Comparison(f"{printed['model']} m={m} {name}", rate, float(printed[column])))
    return TableResult(
        "zero-bubble", "bubble rates of a step, Qi et al. 2024, table 5", "of the step", tuple(rows), {}, None
    )


def _zero_bubble_times() -> TableResult:
    """Mean F + I + W of a stage; no constant was fitted on these."""
    rows = []
    device, software = read_device("a100-80"), read_software("zero-bubble")
    for printed in read_columns("zero-bubble"):
        shape, microbatch, _ = _ZERO_BUBBLE_SHAPES[printed["model"]]
        cluster = cluster_of(device, Machine("a100-80", 8, 200e9, 8), int(printed["pp"]))
        sharing = Sharing(float(microbatch), 1.0, 0.0, 0.0, software.constant("matrix_factor"))
        stacks = dims_of(shape)
        vocab = software.vocab(shape.vocab, 1)
        times = model_times(rates_of(cluster, software.dtype, 2.0), stacks, sharing, vocab=float(vocab))
        whole: LayerTimes = times.all_blocks(stacks, 1.0)
        mean = float(whole.total_s + times.head.total_s + times.embedding.total_s) / int(printed["pp"])
        measured = sum(float(printed[key]) for key in ("forward_ms", "input_grad_ms", "weight_grad_ms"))
        rows.append(Comparison(f"{printed['model']} m={printed['num_microbatches']}", 1e3 * mean, measured))
    return TableResult(
        "zero-bubble-times", "F + I + W of a stage, Qi et al. 2024, table 8", "ms", tuple(rows), {}, Errors.of(rows)
    )


def _chimera_choice() -> TableResult:
    """What the paper's choice costs against the one that is cheapest here: no error where they are the same."""
    rows = []
    for model, choice in PUBLISHED_CHOICES.items():
        steps = {layout: made.step_s for layout, made in figure_13(model).items()}
        best = min(steps, key=lambda layout: steps[layout])
        rows.append(Comparison(f"{model}: published {choice}, here {best}", steps[best], steps[choice]))
    title = "step of the best layout (d, p, b) against that of the paper's choice, Li and Hoefler 2021, figure 13"
    return TableResult("chimera-fig13", title, "s", tuple(rows), {}, Errors.of(rows))


def _chimera_speedups() -> TableResult:
    rows = tuple(Comparison(f"over {name}", *pair) for name, pair in speedups().items())
    title = "Chimera's speed-ups, GPT-2 on 2,048 nodes, Li and Hoefler 2021, §4.4: a trend"
    return TableResult("chimera-speedups", title, "times", rows, {}, Errors.of(rows))


VALIDATIONS: Final[Mapping[str, Callable[[], TableResult]]] = {
    "megatron": lambda: _validate_steps("megatron", "step times, Narayanan et al. 2021, table 1"),
    "korthikanti": lambda: _validate_steps("korthikanti", "step times, Korthikanti et al. 2022, table 5"),
    "korthikanti-memory": _korthikanti_memory,
    "zero-bubble": _zero_bubble_rates,
    "zero-bubble-times": _zero_bubble_times,
    "chimera-fig13": _chimera_choice,
    "chimera-speedups": _chimera_speedups,
}
"""Every comparison with a published table, by name."""
