"""The search for the planner's constants: ten of the device and at most two of each code base, varied together.

No table's error should be far above its goal. The method is the simplex of Nelder and Mead (1965), restarted from its
best point; intervals come from refits to resampled rows. Everything is seeded: the same rows give the same constants.
Which rows, and where the result goes, is the caller's choice.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from chimera.plan.fit_columns import RowColumns

__all__ = [
    "DEVICE_STARTS",
    "SOFTWARE_STARTS",
    "Choice",
    "Fitted",
    "Goal",
    "fit_constants",
    "measured_update_s",
    "simplex",
]

_Array = NDArray[np.float64]

DEVICE_STARTS: Final[Mapping[str, tuple[float, str]]] = {
    "matrix_efficiency": (0.86, "share of the peak rate of products"),
    "attention_slowdown": (2.4, "ratio to other products of the same shape"),
    "memory_efficiency": (0.93, "share of the peak rate of memory"),
    "launch_s": (42e-6, "s per operation"),
    "collective_s": (80e-6, "s per collective"),
    "collective_of_four_s": (20e-6, "s per collective of a group of three to seven"),
    "network_efficiency": (0.92, "share of the rate of the network"),
    "shared_network_efficiency": (0.5, "share of that rate where groups share adapters"),
    "hop_s": (0.9e-3, "s per message"),
    "optimizer_bytes": (40.0, "bytes per parameter and update, at the peak rate of memory"),
}
"""Where the search for each constant of a device starts, and the constant's unit."""

_MOST: Final = {"matrix_efficiency": 0.95, "memory_efficiency": 0.95, "network_efficiency": 0.98}
"""What no device reaches; a fit that would go beyond pays for it."""

SOFTWARE_STARTS: Final[Mapping[str, tuple[float, str]]] = {
    "matrix_factor": (1.0, "ratio to the device's products"),
    "hop_factor": (2.0, "messages that one message holds up the pipeline"),
    "unaligned_penalty": (2.4, "ratio of products with an odd width to aligned ones"),
}
"""The same for the constants of a code base."""


@dataclass(frozen=True, slots=True, eq=False)
class Goal:
    """What the errors of some rows have to stay under, in percent; no bound where infinite."""

    rows: NDArray[np.intp]
    mean: float
    median: float
    maximum: float
    eighth_decile: float = np.inf

    def cost(self, ratio: _Array) -> float:
        """Return how far predicted over measured times (of all rows) are off.

        A figure costs more above six tenths of its bound, and much more near it: better two well below than one far
        below and one missed.
        """
        own = 100 * np.abs(ratio[self.rows] - 1)
        figures = [
            (1.5, float(own.mean()) / self.mean),
            (0.6, float(np.median(own)) / self.median),
            (0.5, float(own.max()) / self.maximum),
            (1.0, float(np.quantile(own, 0.8)) / self.eighth_decile),
        ]
        return sum(
            weight * (8 * max(0.0, share - 0.6) ** 2 + 60 * max(0.0, share - 0.93) ** 2 + 0.25 * share)
            for weight, share in figures
        )


@dataclass(frozen=True, slots=True, eq=False)
class Choice:
    """That of rows which a user would choose among, the one predicted fastest was measured nearly fastest.

    Attributes:
        rows: of one model and number of devices.
        seconds: measured, of these rows.
        tolerance: by which share the choice may be slower than the fastest.
    """

    rows: NDArray[np.intp]
    seconds: _Array
    tolerance: float

    def cost(self, ratio: _Array) -> float:
        """Return by how much some slower row is predicted faster than every one near the fastest, weighted."""
        predicted = ratio[self.rows] * self.seconds
        near = self.seconds <= (1 + self.tolerance) * self.seconds.min()
        if near.all():
            return 0.0
        return 30 * max(0.0, float(np.log(predicted[near].min() / predicted[~near].min())) + _CLEARLY)


_CLEARLY: Final = 0.004
"""By how much, as a logarithm, the right row has to be predicted faster."""


@dataclass(frozen=True, slots=True)
class Fitted:
    """Constants as found: of the device, and of each code base by its key."""

    device: Mapping[str, float]
    software: Mapping[str, Mapping[str, float]]


def fit_constants(
    columns: RowColumns,
    goals: Sequence[Goal | Choice],
    *,
    varied: Mapping[str, Sequence[str]],
    held: Mapping[str, float] | None = None,
    start: Fitted | None = None,
    steps: int = 3000,
    restarts: int = 3,
) -> Fitted:
    """Return the constants that bring the errors nearest to their goals.

    Args:
        columns: the rows.
        goals: each of some of them.
        varied: the constants of each code base that are fitted; the others are 1.
        held: constants of the device that are known and stay.
        start: where to start; at the usual values without.
        steps: of each search.
        restarts: searches, each from the best point of the one before.
    """
    held = held or {}
    names = [("device", name) for name in DEVICE_STARTS if name not in held]
    names += [(base, name) for base, constants in varied.items() for name in constants]
    origin = np.array(
        [DEVICE_STARTS[name][0] if base == "device" else SOFTWARE_STARTS[name][0] for base, name in names]
    )

    def fitted(point: _Array) -> Fitted:
        values = origin * np.exp(point)
        software: dict[str, dict[str, float]] = {base: {} for base in columns.names}
        device = dict(held)
        for (base, name), value in zip(names, values.tolist(), strict=True):
            if base == "device":
                device[name] = value
            else:
                software[base][name] = value
        return Fitted(device, software)

    most = np.array([_MOST.get(name, 1e300) for _, name in names])

    def cost(point: _Array) -> float:
        constants = fitted(point)
        ratio = columns.predict(constants.device, constants.software) / columns.seconds
        ratio = np.clip(ratio, 0.1, 10.0)
        # Constants stay near where physics puts them as long as no row says otherwise.
        beyond = np.maximum(np.log(origin * np.exp(point) / most), 0.0)
        pull = _PULL * float((point**2).sum()) + _WALL * float((beyond**2).sum())
        return sum(goal.cost(ratio) for goal in goals) + pull

    point = np.zeros(len(names))
    if start is not None:
        known = [start.device[name] if base == "device" else start.software[base][name] for base, name in names]
        point = np.log(np.array(known) / origin)
    for restart in range(restarts):
        point = simplex(cost, point, size=max(0.3 / 2**restart, 0.07), steps=steps)
    return fitted(point)


_PULL: Final = 3e-3
_WALL: Final = 1e4


def measured_update_s(columns: RowColumns, software: str) -> float:
    """Return the seconds that the update of one parameter takes, by runs with neither pipeline nor replicas.

    Such a step is m times the blocks and the ends, and the update once; runs of one width, t and b that differ in depth
    and m alone tell the three apart.

    Args:
        columns: the rows.
        software: the code base whose runs are looked at.
    """
    alone = (np.asarray(columns.grid.pipeline) == 1) & (np.asarray(columns.grid.data) == 1)
    rows = np.flatnonzero(alone & (columns.software == columns.names.index(software)))
    kinds = columns.distinct[rows][:, None] == np.unique(columns.distinct[rows])
    m = columns.microbatches[rows][:, None]
    terms = np.hstack([kinds * m * columns.blocks[rows][:, None], kinds * m, columns.parameters[rows][:, None]])
    # All terms divided by the times, so that short steps count as much as long ones.
    weighted = terms / columns.seconds[rows][:, None]
    scale = weighted.max(axis=0)
    found = np.linalg.lstsq(weighted / scale, np.ones(len(rows)), rcond=None)[0] / scale
    return float(found[-1])


def simplex(cost: Callable[[_Array], float], start: _Array, *, size: float, steps: int) -> _Array:
    """Return the point of least cost that a simplex of edge ``size`` at ``start`` finds in at most ``steps`` moves.

    Reflection, expansion, contraction and shrinkage with the usual coefficients 1, 2, ½, ½ (Nelder and Mead 1965).
    """
    points = [start, *(start + size * axis for axis in np.eye(len(start)))]
    costs = [cost(point) for point in points]
    for _ in range(steps):
        order = np.argsort(costs, kind="stable")
        points, costs = [points[i] for i in order], [costs[i] for i in order]
        if costs[-1] - costs[0] < _FLAT:
            break
        centre = np.mean(points[:-1], axis=0)
        towards = centre - points[-1]
        reflected = centre + towards
        reflected_cost = cost(reflected)
        if reflected_cost < costs[0]:
            expanded = centre + 2 * towards
            expanded_cost = cost(expanded)
            better = expanded_cost < reflected_cost
            points[-1], costs[-1] = (expanded, expanded_cost) if better else (reflected, reflected_cost)
        elif reflected_cost < costs[-2]:
            points[-1], costs[-1] = reflected, reflected_cost
        else:
            nearer = reflected if reflected_cost < costs[-1] else points[-1]
            contracted = (centre + nearer) / 2
            contracted_cost = cost(contracted)
            if contracted_cost < min(reflected_cost, costs[-1]):
                points[-1], costs[-1] = contracted, contracted_cost
            else:
                points = [points[0], *((points[0] + point) / 2 for point in points[1:])]
                costs = [costs[0], *(cost(point) for point in points[1:])]
    return points[int(np.argmin(costs))]


_FLAT: Final = 1e-7
