"""The CSV form of torch.distributed.pipelining: a row per rank, a cell per action, compute-only or with communication.

It carries one route and whole micro-batches, so other schedules are refused by name. What torch writes and we do not
run (UNSHARD, RESHARD, WAIT_…) is left out with a note; sends, receives and reductions stay only if they pass the proof.
"""

import re
from dataclasses import replace

from chimera.errors import FormatError
from chimera.ir.action import BACKWARDS, COMMUNICATIONS, Instruction, Kind, flatten, parse_instruction
from chimera.ir.checks import violations
from chimera.ir.collector import collector_paused
from chimera.ir.inferred import inferred_schedule
from chimera.ir.schedule import Schedule

__all__ = ["from_csv", "to_csv"]

_NEVER_SHARDED = "parameters here are never sharded between steps"
_WAITED_FOR = "the end of a send or of a reduction is waited for here where it is needed"
_LEFT_OUT = {
    "UNSHARD": _NEVER_SHARDED,
    "RESHARD": _NEVER_SHARDED,
    "WAIT_REDUCE_GRAD": _WAITED_FOR,
    "WAIT_SEND_F": _WAITED_FOR,
    "WAIT_SEND_B": _WAITED_FOR,
}
_SHARDING = re.compile(r"\d{1,9}(?:(UNSHARD|RESHARD|WAIT_REDUCE_GRAD)|(WAIT_SEND_[FB])\d{1,9})", re.ASCII)


def from_csv(text: str, name: str = "csv") -> tuple[Schedule, tuple[str, ...]]:
    """Read a schedule, and notes that say what of the file is not in it.

    Stages live on the rank whose row names them. Empty cells (idle slots) and blank lines at the end mean nothing.

    Raises:
        FormatError: a cell is no action, or the rows are no schedule of one route.
    """
    notes: list[str] = []
    with collector_paused():
        programs, left_out = _cells(text)
        schedule = inferred_schedule(name, programs)
    for operation, count in left_out.items():
        if count:
            notes.append(f"{count} {operation} left out: {_LEFT_OUT[operation]}")
    proved, note = _with_sound_communication(schedule)
    return proved, (*notes, *note)


def to_csv(schedule: Schedule) -> str:
    """Write a schedule's rows.

    Raises:
        FormatError: the form cannot carry it; the JSON form can.
    """
    use_json = "write it as JSON instead (--format json)"
    if len(schedule.placement.routes) > 1:
        raise FormatError(
            f"schedule {schedule.name!r} has {len(schedule.placement.routes)} routes, the CSV form carries one: "
            f"{use_json}"
        )
    if schedule.microbatch_share != 1:
        raise FormatError(
            f"schedule {schedule.name!r} cuts micro-batches to a share of {schedule.microbatch_share:g}, which the CSV "
            f"form cannot say: {use_json}"
        )
    for rank, program in enumerate(schedule.actions):
        if not program:
            raise FormatError(
                f"rank {rank} of {schedule.name!r} has no action, which the CSV form cannot say: {use_json}"
            )
        for position, action in enumerate(flatten(program)):
            if action.kind is Kind.STEP:
                raise FormatError(
                    f"rank {rank}, position {position}: {action} is no operation of torch.distributed.pipelining: "
                    f"{use_json}"
                )
    return "".join(",".join(map(str, program)) + "\n" for program in schedule.actions)


def _cells(text: str) -> tuple[list[tuple[Instruction, ...]], dict[str, int]]:
    left_out = dict.fromkeys(_LEFT_OUT, 0)
    programs = []
    for row, line in enumerate(text.rstrip().split("\n")):
        program: list[Instruction] = []
        for column, cell in enumerate(line.split(",")):
            token = cell.strip()
            if not token:
                continue
            if ("SHARD" in token or "WAIT" in token) and (match := _SHARDING.fullmatch(token)):
                left_out[match[1] or match[2]] += 1
            else:
                program.append(parse_instruction(token, f"row {row}, column {column}"))
        programs.append(tuple(program))
    return programs, left_out


def _with_sound_communication(schedule: Schedule) -> tuple[Schedule, tuple[str, ...]]:
    """Keep as much of the communication as is proved; a schedule that is wrong without any is returned as it is."""
    messages, reductions = COMMUNICATIONS, frozenset({Kind.REDUCE_GRAD})
    present = {action.kind for program in schedule.actions for action in flatten(program)}
    if not present & (messages | reductions):
        return schedule, ()
    forward_only = not present & BACKWARDS
    first = violations(schedule, forward_only=forward_only)
    if not first:
        return schedule, ()
    for dropped, what in ((messages, "sends and receives"), (messages | reductions, "sends, receives and reductions")):
        kept, count = _without(schedule, dropped)
        if count and not violations(kept, forward_only=forward_only):
            return kept, (f"{count} {what} dropped, to be placed again: they fail the proof ({first[0]})",)
    return schedule, ()


def _without(schedule: Schedule, kinds: frozenset[Kind]) -> tuple[Schedule, int]:
    programs = tuple(tuple(i for i in program if i[0] not in kinds) for program in schedule.actions)
    count = sum(map(len, schedule.actions)) - sum(map(len, programs))
    return replace(schedule, actions=programs), count
