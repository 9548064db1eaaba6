"""The question of a search: a placement, micro-batches with their routes, times, memory per stage and a cap per rank.

It knows which caps no order can meet, and lays the question out in the flat columns of ``search.kernel``. It knows no
rule and no order.
"""

from collections import Counter
from dataclasses import dataclass
from functools import cached_property
from typing import Final

import numpy as np
from numpy.typing import NDArray

from chimera.errors import InfeasibleError, UsageError
from chimera.ir.action import Kind
from chimera.ir.costs import Costs, ResolvedCosts
from chimera.ir.memory import peaks
from chimera.ir.schedule import Placement, Schedule
from chimera.schedules.search.kernel import Instance
from chimera.simulate.simulator import CostModel

__all__ = ["KINDS", "Problem"]

KINDS: Final = (Kind.F, Kind.B, Kind.I, Kind.W)
"""The kinds that the search places, in the order of the kernel's codes."""

_RELATIVE_TOLERANCE: Final = 1e-9
"""Times that differ by less of the longest computation are one moment: sums of decimals are rounded."""

_MEMORY_TOLERANCE: Final = 1e-6
"""As for the proof of memory: a cap such as 7/3 is rounded, and so is a number of units of 1/3."""


@dataclass(frozen=True, eq=False)
class Problem:
    """What is to be ordered.

    Attributes:
        placement: the routes.
        microbatch_to_route: the route of each micro-batch; micro-batches of one route are alike.
        costs: of every computation and message.
        memory_limit: most activations per rank, in units of 1/p of the model for one micro-batch.
        memory_limit_bytes: most bytes per rank, weights and gradients included where the costs know them; in place
            of ``memory_limit``.
        microbatch_share: size of a micro-batch as a share of a whole one.
    """

    placement: Placement
    microbatch_to_route: tuple[int, ...]
    costs: CostModel
    memory_limit: float | None = None
    memory_limit_bytes: float | None = None
    microbatch_share: float = 1.0

    def __post_init__(self) -> None:
        if not self.microbatch_to_route:
            raise UsageError("search: got 0 micro-batches; needed: at least 1; try --microbatches 1")
        if self.memory_limit is not None and self.memory_limit_bytes is not None:
            raise UsageError("--memory-limit: got units and bytes; needed: one of them")
        for limit, unit in ((self.memory_limit, "units of 1/p of the model"), (self.memory_limit_bytes, "bytes")):
            if limit is not None and not limit > 0:  # written so that it holds for NaN
                raise UsageError(f"--memory-limit {limit:g}: needed: a number of {unit} above 0")
        if self.memory_limit_bytes is not None and self.resolved.activation_bytes is None:
            raise UsageError(
                "--memory-limit in bytes needs a costs file with activation_bytes; without, give it in units of 1/p "
                "of the model for one micro-batch"
            )
        self._refuse_infeasible()

    @property
    def num_ranks(self) -> int:
        """Pipeline ranks p."""
        return self.placement.num_ranks

    @property
    def num_stages(self) -> int:
        """Stages of a route."""
        return self.placement.num_stages

    @cached_property
    def resolved(self) -> ResolvedCosts:
        """Times and memory per stage."""
        return self.costs.resolve(self.schedule("search", ((),) * self.num_ranks))

    def schedule(self, name: str, actions: tuple[tuple[object, ...], ...]) -> Schedule:
        """Return a schedule of this placement and these micro-batches."""
        return Schedule(name, self.placement, self.microbatch_to_route, actions, self.microbatch_share)  # type: ignore[arg-type]  # the caller's actions

    @cached_property
    def per_route(self) -> NDArray[np.int64]:
        """[route]: its micro-batches."""
        count = Counter(self.microbatch_to_route)
        return np.array([count[route] for route in range(len(self.placement.routes))], np.int64)

    @cached_property
    def rank(self) -> NDArray[np.int64]:
        """[route, stage]: where it lives."""
        return np.array(self.placement.routes, np.int64)

    @cached_property
    def duration(self) -> NDArray[np.float64]:
        """[kind, stage], kinds as in ``KINDS``."""
        return self.resolved.duration[list(KINDS)]

    @cached_property
    def send_forward(self) -> NDArray[np.float64]:
        """[route, stage]: the message of a forward to the next stage; 0 on the same rank and for the last."""
        crosses: NDArray[np.float64] = np.zeros(self.rank.shape)
        crosses[:, :-1] = self.rank[:, 1:] != self.rank[:, :-1]
        crosses *= self.resolved.duration[Kind.SEND_F]
        return crosses

    @cached_property
    def send_backward(self) -> NDArray[np.float64]:
        """[route, stage]: the message of a gradient to the stage before; 0 on the same rank and for the first."""
        crosses: NDArray[np.float64] = np.zeros(self.rank.shape)
        crosses[:, 1:] = self.rank[:, 1:] != self.rank[:, :-1]
        crosses *= self.resolved.duration[Kind.SEND_B]
        return crosses

    @cached_property
    def size(self) -> NDArray[np.float64]:
        """[stage]: what one micro-batch holds, in the unit of the cap."""
        if self.memory_limit_bytes is not None and self.resolved.activation_bytes is not None:
            return self.resolved.activation_bytes
        return self.resolved.activations

    @cached_property
    def size_after_input(self) -> NDArray[np.float64]:
        """[stage]: what one micro-batch holds from its I to its W, in the unit of the cap."""
        held = self.resolved.held_for_weight_grad
        return self.size if held is None else self.size * held

    @cached_property
    def cap(self) -> NDArray[np.float64]:
        """[rank]: room for activations, infinite without a limit."""
        if self.memory_limit_bytes is not None:
            return self.memory_limit_bytes - self._resident
        return np.full(self.num_ranks, np.inf if self.memory_limit is None else self.memory_limit)

    @cached_property
    def memory_tolerance(self) -> float:
        """By how much a sum of sizes may lie above the cap through rounding."""
        return _MEMORY_TOLERANCE * float(self.size.max())

    @cached_property
    def route_need(self) -> NDArray[np.float64]:
        """[route, rank]: what one micro-batch holds at its last forward: all its stages on the rank."""
        need = np.zeros((len(self.rank), self.num_ranks))
        for route, ranks in enumerate(self.rank):
            np.add.at(need[route], ranks, self.size)
        return need

    def is_answered_by(self, schedule: Schedule) -> bool:
        """Return whether the schedule is synchronous, of the same placement and micro-batches, and within the cap."""
        same = (
            schedule.placement == self.placement
            and schedule.microbatch_share == self.microbatch_share
            and Counter(schedule.microbatch_to_route) == Counter(self.microbatch_to_route)
            and not (schedule.table.kind == Kind.STEP).any()
        )
        if not same:
            return False
        held = np.array(peaks(schedule.table, self.size, self.resolved.held_for_weight_grad))
        return bool((held <= self.cap + self.memory_tolerance).all())

    @cached_property
    def admits_by_lane(self) -> bool:
        """Whether every rank has room for one micro-batch on each of its stages, so that lanes never get stuck."""
        own = [sorted({int(self.stage_of(lane)) for lane in self._lanes_on(rank)}) for rank in range(self.num_ranks)]
        need = np.array([self.size[stages].sum() for stages in own])
        return bool((need <= self.cap + self.memory_tolerance).all())

    def stage_of(self, lane: int) -> int:
        """Return the stage of a lane."""
        return lane % self.num_stages

    @cached_property
    def _resident(self) -> NDArray[np.float64]:
        if self.resolved.resident_bytes is None:
            return np.zeros(self.num_ranks)
        stages = map(self.placement.stages_on, range(self.num_ranks))
        return np.array([self.resolved.resident_bytes[list(held)].sum() for held in stages])

    def _lanes_on(self, rank: int) -> list[int]:
        """Return the lanes of a rank that micro-batches go through."""
        used = (self.rank == rank) & (self.per_route > 0)[:, None]
        lanes: list[int] = np.flatnonzero(used.ravel()).tolist()
        return lanes

    def _refuse_infeasible(self) -> None:
        """Refuse a cap below what one micro-batch holds at its last forward, which no order avoids."""
        need = self.route_need[self.per_route > 0].max(axis=0)
        short = np.flatnonzero(need > self.cap + self.memory_tolerance)
        if not len(short):
            return
        in_bytes = self.memory_limit_bytes is not None
        least = need + (self._resident if in_bytes else 0.0)
        rank = int(least.argmax())
        limit = self.memory_limit_bytes if in_bytes else self.memory_limit
        unit = "bytes" if in_bytes else "units of 1/p of the model"
        resident = f", beside {self._resident[rank]:.10g} of weights and gradients" if in_bytes else ""
        raise InfeasibleError(
            f"--memory-limit {limit:.10g}: no order holds less than {least[rank]:.10g} {unit} on rank {rank}: all "
            f"stages there of one micro-batch, before its first backward{resident}; "
            f"needed: at least --memory-limit {least[rank]:.10g}{'B' if in_bytes else ''}, or smaller micro-batches"
        )

    def instance(self) -> Instance:
        """Lay the question out for the kernel."""
        num_routes = len(self.rank)
        lane_rank = self.rank.ravel()
        count = np.repeat(self.per_route, self.num_stages)
        lanes = [self._lanes_on(rank) for rank in range(self.num_ranks)]
        microbatch_to_route = np.array(self.microbatch_to_route)
        ages = np.arange(len(microbatch_to_route)) / len(microbatch_to_route)
        age = [np.tile(ages[microbatch_to_route == route], self.num_stages) for route in range(num_routes)]
        reserve = np.zeros(len(lane_rank))
        for own in lanes:
            for lane in own:
                later = {self.stage_of(other) for other in own if self.stage_of(other) > self.stage_of(lane)}
                reserve[lane] = self.size[sorted(later)].sum()
        return Instance(
            lanes=np.array([lane for own in lanes for lane in own], np.int64),
            lane_offsets=np.cumsum([0, *map(len, lanes)]),
            rank=lane_rank,
            stage=np.tile(np.arange(self.num_stages), num_routes),
            count=count,
            first=np.concatenate([[0], np.cumsum(count)[:-1]]),
            age=np.concatenate(age),
            duration=self.duration.ravel(),
            send_forward=self.send_forward.ravel(),
            send_backward=self.send_backward.ravel(),
            size=np.tile(self.size, num_routes),
            size_after_input=np.tile(self.size_after_input, num_routes),
            reserve=reserve,
            cap=self.cap,
            route_need=self.route_need.ravel(),
            num_stages=self.num_stages,
            num_ranks=self.num_ranks,
            tolerance=_RELATIVE_TOLERANCE * max(float(self.duration.max()), 1e-300),
            memory_tolerance=self.memory_tolerance,
        )

    @classmethod
    def uniform(cls, placement: Placement, microbatch_to_route: tuple[int, ...], memory_limit: float) -> "Problem":
        """Return the problem with F = I = W = 1 and no time for messages."""
        return cls(placement, microbatch_to_route, Costs(forward=1.0, backward=2.0), memory_limit)
