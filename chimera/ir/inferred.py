"""The placement of programs that do not state one: each stage lives on the rank whose row names it, on one route.

Several routes cannot be inferred, so a stage named by two rows is refused. Numbers from a file are held against what
the file really lists before anything of their size is made.
"""

from collections.abc import Collection, Sequence

from chimera.errors import FormatError
from chimera.ir.action import Instruction, flatten
from chimera.ir.schedule import Placement, Schedule

__all__ = ["inferred_schedule", "require_all_numbers"]


def inferred_schedule(name: str, programs: Sequence[tuple[Instruction, ...]]) -> Schedule:
    """Return the schedule of one route whose stages live where the programs name them.

    Raises:
        FormatError: a row is empty, a stage stands on two rows, or a stage or micro-batch number is left out.
    """
    rank_of: dict[int, int] = {}
    microbatches: set[int] = set()
    for row, program in enumerate(programs):
        if not program:
            raise FormatError(f"row {row} has no action; every rank runs a stage, or use the JSON form")
        stages = set()
        for _, stage, microbatch in flatten(program):
            stages.add(stage)
            if microbatch is not None:
                microbatches.add(microbatch)
        for stage in sorted(stages):
            if rank_of.setdefault(stage, row) != row:
                raise FormatError(
                    f"stage {stage} stands on rows {rank_of[stage]} and {row}: this form carries one route, with each "
                    "stage on one rank; use the JSON form for several"
                )
    require_all_numbers(rank_of.keys(), "stage")
    require_all_numbers(microbatches, "micro-batch")
    route = tuple(rank_of[stage] for stage in range(len(rank_of)))
    return Schedule(name, Placement(len(programs), (route,)), (0,) * len(microbatches), tuple(programs))


def require_all_numbers(found: Collection[int], what: str) -> None:
    """Refuse numbers that are not 0, 1, … without a gap, naming the first that is missing."""
    if not found:
        raise FormatError(f"there is no {what}; needed: at least one action of one {what}")
    if len(found) != max(found) + 1:
        missing = next(n for n in range(len(found)) if n not in found)
        raise FormatError(f"there is a {what} {max(found)}, but {what} {missing} is on no row; add it or renumber")
