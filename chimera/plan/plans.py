"""The answer of a search: ranked plans, what was rejected and why, and the sums that people ask of a plan."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from chimera.ir.schedule import Schedule
from chimera.plan.estimate import Estimate
from chimera.plan.hardware import Cluster
from chimera.plan.layout import Layout
from chimera.plan.measured import MeasuredTimes
from chimera.plan.shape import ModelShape
from chimera.plan.software import Software

__all__ = ["Plan", "Plans"]

_DAY_S: Final = 86_400.0


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Plan:
    """One layout with what it is expected to cost.

    Attributes:
        estimate: with the published order of its schedule.
        step_s: of a step, with ``order`` where there is one.
        order: an order of the same computations that the list scheduler found to be faster.
    """

    estimate: Estimate
    step_s: float
    order: Schedule | None = None

    @property
    def layout(self) -> Layout:
        """How the model is spread."""
        return self.estimate.layout

    @property
    def tokens_per_s(self) -> float:
        """Tokens of all devices together."""
        return self.estimate.tokens_per_s * self.estimate.step_s / self.step_s

    @property
    def model_flops_per_s(self) -> float:
        """Per device, recomputation not counted."""
        return self.estimate.model_flops_per_s * self.estimate.step_s / self.step_s

    def model_flops_utilization(self, peak_flops_per_s: float) -> float:
        """Return the share of a device's peak that the model's own operations reach (MFU)."""
        return self.model_flops_per_s / peak_flops_per_s

    def days(self, tokens: float) -> float:
        """Return the days that so many tokens take."""
        return tokens / self.tokens_per_s / _DAY_S

    def price(self, tokens: float, per_device_hour: float) -> float:
        """Return what so many tokens cost, in the currency of ``per_device_hour``."""
        return self.days(tokens) * 24 * self.layout.num_devices * per_device_hour


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Plans:
    """Plans of one model on one cluster, the fastest first.

    Attributes:
        shape: the model.
        cluster: where it runs.
        software: the code base whose constants were taken.
        global_batch: sequences of a step.
        plans: that fit, the fastest first; at least one.
        rejected: how many layouts are not among them, by reason.
        measured: times of layers that were taken in place of modelled ones.
        num_bounded: layouts whose time and memory were bounded as arrays.
        num_simulated: layouts that were simulated.
    """

    shape: ModelShape
    cluster: Cluster
    software: Software
    global_batch: int
    plans: tuple[Plan, ...]
    rejected: Mapping[str, int]
    num_bounded: int
    num_simulated: int
    measured: MeasuredTimes | None = None

    @property
    def best(self) -> Plan:
        """The fastest."""
        return self.plans[0]

    @property
    def peak_flops_per_s(self) -> float:
        """Of a device, in the format of the products."""
        return self.cluster.device.matrix_flops_per_s[self.software.dtype]
