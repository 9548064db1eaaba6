"""The values of a comparison with measurements: predicted beside published figures, and their errors summed up."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean, median

from chimera.plan.hardware import Cluster, Device
from chimera.plan.software import Software
from chimera.plan.tables import Machine

__all__ = ["ChosenRun", "Comparison", "Constants", "Errors", "TableResult", "cluster_of"]


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
class ChosenRun:
    """The run that is predicted fastest, of measured runs of one model.

    Attributes:
        model: its size.
        among: which runs: all, or those that contradict no other.
        chosen: label of the run predicted fastest.
        best: label of the run measured fastest.
        slower_pct: by how much the chosen one was measured slower, in percent.
    """

    model: str
    among: str
    chosen: str
    best: str
    slower_pct: float


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
        choices: among the runs of each model.
    """

    table: str
    title: str
    unit: str
    rows: tuple[Comparison, ...]
    parts: Mapping[str, Errors]
    left_out: Errors | None
    choices: tuple[ChosenRun, ...] = ()

    @property
    def errors(self) -> Errors:
        """Errors of all rows."""
        return Errors.of(self.rows)

    @property
    def errors_left_out(self) -> Errors:
        """Errors without the table in the fit: those of all rows where no constant was fitted on it."""
        return self.errors if self.left_out is None else self.left_out


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
