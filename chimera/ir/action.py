"""One step of one rank: the ``Action``, its kinds, the overlapped pair, and their strict text form.

An action knows what is done (kind), on which stage and for which micro-batch. It does not know its rank, its route or
its cost: those belong to the schedule and to the costs.
"""

import re
from collections.abc import Iterable, Iterator
from enum import IntEnum
from typing import NamedTuple

from chimera.errors import FormatError

__all__ = [
    "BACKWARDS",
    "COMMUNICATIONS",
    "COMPUTATIONS",
    "RECEIVES",
    "SENDS",
    "WHOLE_STAGE",
    "Action",
    "Instruction",
    "Kind",
    "Overlap",
    "flatten",
    "parse_instruction",
    "parse_program",
    "program_text",
]


class Kind(IntEnum):
    """What an action does; the value is its code in columnar form, the name its text."""

    F = 0
    B = 1
    I = 2  # noqa: E741 - the field's name for the gradient of the input
    W = 3
    SEND_F = 4
    RECV_F = 5
    SEND_B = 6
    RECV_B = 7
    REDUCE_GRAD = 8
    STEP = 9


COMPUTATIONS = frozenset({Kind.F, Kind.B, Kind.I, Kind.W})
BACKWARDS = frozenset({Kind.B, Kind.I, Kind.W})
SENDS = frozenset({Kind.SEND_F, Kind.SEND_B})
RECEIVES = frozenset({Kind.RECV_F, Kind.RECV_B})
COMMUNICATIONS = SENDS | RECEIVES
WHOLE_STAGE = frozenset({Kind.REDUCE_GRAD, Kind.STEP})
"""Kinds that concern a stage as a whole and carry no micro-batch."""


class Action(NamedTuple):
    """``kind`` on ``stage`` for ``microbatch`` (None for the kinds in ``WHOLE_STAGE``).

    >>> str(Action(Kind.F, 3, 0)), str(Action(Kind.REDUCE_GRAD, 2, None))
    ('3F0', '2REDUCE_GRAD')
    """

    kind: Kind
    stage: int
    microbatch: int | None

    def __str__(self) -> str:
        return f"{self.stage}{self.kind.name}{'' if self.microbatch is None else self.microbatch}"


class Overlap(NamedTuple):
    """A forward and a backward run together: ready when both are, both outputs at its end.

    >>> str(Overlap(Action(Kind.F, 0, 1), Action(Kind.B, 1, 0)))
    '(0F1;1B0)OVERLAP_F_B'
    """

    forward: Action
    backward: Action

    @property
    def kind(self) -> tuple[Kind, Kind]:
        """The kinds of the two, as what the pair does."""
        return self.forward.kind, self.backward.kind

    def __str__(self) -> str:
        return f"({self.forward};{self.backward})OVERLAP_F_B"

    @property
    def fault(self) -> str | None:
        """What is wrong with the pair, None if it is a forward with a B or an I."""
        if self.forward.kind is Kind.F and self.backward.kind in {Kind.B, Kind.I}:
            return None
        return f"pairs {self.forward} with {self.backward}; needed: an F, then a B or I"


Instruction = Action | Overlap


def flatten(program: Iterable[Instruction]) -> Iterator[Action]:
    """Yield the actions of a program, a pair as its forward and then its backward."""
    for instruction in program:
        if type(instruction) is Overlap:
            yield from instruction
        else:
            yield instruction  # type: ignore[misc]  # the other member of the union


_ACTION = re.compile(r"(\d{1,9})(SEND_F|RECV_F|SEND_B|RECV_B|REDUCE_GRAD|STEP|[FBIW])(\d{1,9})?", re.ASCII)
_OVERLAP = re.compile(r"\(([^;()]+);([^;()]+)\)OVERLAP_F_B", re.ASCII)


def parse_instruction(text: str, where: str = "") -> Instruction:
    """Read one instruction by a full match; ``where`` (row and column) is put into the error.

    >>> parse_instruction("1SEND_F3")
    Action(kind=<Kind.SEND_F: 4>, stage=1, microbatch=3)
    >>> parse_instruction("1F0junk", "row 0, column 2")
    Traceback (most recent call last):
    chimera.errors.FormatError: row 0, column 2: '1F0junk' is not an action; needed: stage, kind and micro-batch as in \
3F0, 1SEND_F3, 2REDUCE_GRAD or (0F1;1B0)OVERLAP_F_B

    Raises:
        FormatError: the text is anything but one whole instruction.
    """
    if match := _ACTION.fullmatch(text):
        stage, name, microbatch = match.groups()
        kind = Kind[name]
        if (microbatch is None) == (kind in WHOLE_STAGE):
            return Action(kind, int(stage), None if microbatch is None else int(microbatch))
    elif match := _OVERLAP.fullmatch(text):
        forward, backward = (parse_instruction(part, where) for part in match.groups())
        if isinstance(forward, Action) and isinstance(backward, Action):
            pair = Overlap(forward, backward)
            if pair.fault is None:
                return pair
            raise FormatError(f"{_prefix(where)}{text!r} {pair.fault}")
    raise FormatError(
        f"{_prefix(where)}{text!r} is not an action; needed: stage, kind and micro-batch as in "
        "3F0, 1SEND_F3, 2REDUCE_GRAD or (0F1;1B0)OVERLAP_F_B"
    )


def parse_program(text: str, row: int = 0, known: dict[str, Instruction] | None = None) -> tuple[Instruction, ...]:
    """Read one rank's instructions, separated by white space; ``known`` caches tokens over many rows.

    >>> program_text(parse_program("0F0 0F1 0B0 0B1"))
    '0F0 0F1 0B0 0B1'
    """
    known = {} if known is None else known
    program = []
    for column, token in enumerate(text.split()):
        instruction = known.get(token)
        if instruction is None:
            instruction = known[token] = parse_instruction(token, f"row {row}, column {column}")
        program.append(instruction)
    return tuple(program)


def program_text(program: Iterable[Instruction]) -> str:
    """Write one rank's instructions, separated by single spaces."""
    return " ".join(map(str, program))


def _prefix(where: str) -> str:
    return f"{where}: " if where else ""
