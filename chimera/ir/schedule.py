"""The schedule as a value: where each stage lives, which way each micro-batch goes, and what each rank does in order.

Nothing here builds, checks, lowers or times a schedule; see ``schedules``, ``ir.checks``, ``passes`` and ``simulate``.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from chimera.errors import ScheduleError
from chimera.ir.action import COMMUNICATIONS, Instruction, Kind, flatten, parse_program
from chimera.ir.table import Table

__all__ = ["Placement", "Schedule"]


@dataclass(frozen=True, slots=True)
class Placement:
    """Routes through the ranks: ``routes[r][s]`` is the rank that runs stage ``s`` for micro-batches of route ``r``.

    Linear, looped and V placements have one route, Chimera's has two per pair of pipelines. Two routes that put the
    same stage on one rank share its weights there.
    """

    num_ranks: int
    routes: tuple[tuple[int, ...], ...]

    def __post_init__(self) -> None:
        if not self.routes or not self.routes[0]:
            raise ScheduleError("a placement needs at least one route with at least one stage")
        for route, ranks in enumerate(self.routes):
            if len(ranks) != self.num_stages:
                raise ScheduleError(
                    f"route {route} places {len(ranks)} stages, route 0 places {self.num_stages}; "
                    "every route must place every stage"
                )
            for stage, rank in enumerate(ranks):
                if not 0 <= rank < self.num_ranks:
                    raise ScheduleError(
                        f"route {route} puts stage {stage} on rank {rank}; needed: a rank in 0…{self.num_ranks - 1}"
                    )

    @property
    def num_stages(self) -> int:
        """Stages the model is cut into."""
        return len(self.routes[0])

    def stages_on(self, rank: int) -> tuple[int, ...]:
        """Return the stages whose weights ``rank`` holds, ascending."""
        return tuple(s for s in range(self.num_stages) if any(route[s] == rank for route in self.routes))

    def ranks_of(self, stage: int) -> tuple[int, ...]:
        """Return the ranks that hold a replica of ``stage``, ascending."""
        return tuple(sorted({route[stage] for route in self.routes}))


@dataclass(frozen=True)
class Schedule:
    """``actions[rank]`` in order, for micro-batches that each follow the route ``microbatch_to_route`` gives.

    ``microbatch_share`` is the size of one micro-batch of this schedule as a share of a whole one: 1, or ½ where
    backward halving cuts each in two. Costs and activation memory of an action are this share of the whole one's.

    ``microbatch_to_version``, of asynchronous schedules alone, gives for each micro-batch the number of updates whose
    weights it takes on every stage; None where each forward takes the newest weights that its stage has.
    """

    name: str
    placement: Placement
    microbatch_to_route: tuple[int, ...]
    actions: tuple[tuple[Instruction, ...], ...]
    microbatch_share: float = 1.0
    microbatch_to_version: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        if len(self.actions) != self.num_ranks:
            raise ScheduleError(
                f"{len(self.actions)} programs for {self.num_ranks} ranks; every rank needs one program"
            )
        num_routes = len(self.placement.routes)
        for microbatch, route in enumerate(self.microbatch_to_route):
            if not 0 <= route < num_routes:
                raise ScheduleError(
                    f"micro-batch {microbatch} follows route {route}; needed: a route in 0…{num_routes - 1}"
                )
        if not 0 < self.microbatch_share <= 1:
            raise ScheduleError(
                f"microbatch_share is {self.microbatch_share}; needed: the part of a whole one, above 0, at most 1"
            )
        versions = self.microbatch_to_version
        if versions is not None and (len(versions) != self.num_microbatches or min(versions, default=0) < 0):
            raise ScheduleError(
                f"microbatch_to_version is {list(versions)}; needed: for each of {self.num_microbatches} micro-batches "
                "the number of updates whose weights it takes, 0 or more"
            )

    @classmethod
    def from_text(
        cls,
        rows: Sequence[str],
        *,
        routes: Iterable[Sequence[int]],
        microbatch_to_route: Sequence[int] | None = None,
        name: str = "text",
    ) -> "Schedule":
        """Read one row of action text per rank; without ``microbatch_to_route`` all follow route 0.

        >>> Schedule.from_text(["0F0 0B0", "1F0 1B0"], routes=[[0, 1]]).num_microbatches
        1
        """
        known: dict[str, Instruction] = {}
        actions = tuple(parse_program(text, row, known) for row, text in enumerate(rows))
        if microbatch_to_route is None:
            present = [a.microbatch for program in actions for a in flatten(program) if a.microbatch is not None]
            microbatch_to_route = [0] * (max(present, default=-1) + 1)
        placement = Placement(len(actions), tuple(tuple(route) for route in routes))
        return cls(name, placement, tuple(microbatch_to_route), actions)

    @property
    def num_ranks(self) -> int:
        """Pipeline ranks, the papers' p or D."""
        return self.placement.num_ranks

    @property
    def num_stages(self) -> int:
        """Stages the model is cut into; p times the chunks per rank for looped placements."""
        return self.placement.num_stages

    @property
    def num_microbatches(self) -> int:
        """Micro-batches of one step, all routes together."""
        return len(self.microbatch_to_route)

    @cached_property
    def is_lowered(self) -> bool:
        """Whether the programs hold sends and receives."""
        return bool(np.isin(self.table.kind, list(COMMUNICATIONS)).any())

    @cached_property
    def is_asynchronous(self) -> bool:
        """Whether stages update their weights within the program, by STEP."""
        return bool((self.table.kind == Kind.STEP).any())

    @cached_property
    def table(self) -> Table:
        """The programs in columns, for checks and simulation at scale."""
        return Table.from_programs(self.actions)

    def with_table(self, table: Table) -> "Schedule":
        """Return the schedule with the programs that ``table`` holds in place of its own, and keep these columns."""
        schedule = replace(self, actions=table.to_programs())
        schedule.__dict__["table"] = table  # where cached_property would put it
        return schedule

    def rank_of(self, stage: int, microbatch: int) -> int:
        """Return the rank that computes ``stage`` for ``microbatch``."""
        return self.placement.routes[self.microbatch_to_route[microbatch]][stage]

    def to_text(self) -> list[str]:
        """Write one row of action text per rank."""
        return [" ".join(map(str, program)) for program in self.actions]
