"""The cut of a model into stages, by number of blocks and as Megatron-LM writes it: ``Et*3|(tt|)*29,m|L``.

``E`` is the embedding, ``t`` a transformer block, ``m`` a block that predicts further words, ``L`` the head with its
loss; ``|`` ends a stage, ``*n`` repeats what stands before it, a letter or a parenthesis, and commas only please the
eye. Source: Megatron-LM, ``--pipeline-model-parallel-layout``. A model of two stacks has an ``E`` before each, since
what stands between them embeds the second one's words. Which layers a model has is not known here.
"""

import re
from collections.abc import Sequence
from itertools import groupby

from chimera.errors import UsageError
from chimera.plan.partition import partition

__all__ = ["cut_by_count", "cut_from_layout", "format_layout", "layout_of_cut", "parse_layout"]

_SYMBOL = re.compile(r"[EtmL|()]|\*\d+|[,\s]")
_MOST_LAYERS = 100_000
"""More layers than any model has: a longer repetition is a typing error, and would fill the memory."""


def parse_layout(text: str) -> tuple[str, ...]:
    """Return the letters of each stage.

    >>> parse_layout("Et*2|(tt|)*2,t|L")
    ('Ett', 'tt', 'tt', 't', 'L')

    Raises:
        UsageError: text that is not of this form, naming the place, or a stage without layers.
    """
    # What stands in the parentheses that are open, outermost first, as a list of pieces each.
    open_groups: list[list[str]] = [[]]
    position = 0
    while position < len(text):
        found = _SYMBOL.match(text, position)
        if found is None:
            raise _wrong(text, position, "needed: the letters E, t, m and L, |, parentheses, and * with a number")
        symbol = found.group()
        if symbol == "(":
            open_groups.append([])
        elif symbol == ")":
            if len(open_groups) == 1:
                raise _wrong(text, position, "this parenthesis was never opened")
            open_groups[-2].append("".join(open_groups.pop()))
        elif symbol[0] == "*":
            pieces = open_groups[-1]
            if not pieces:
                raise _wrong(text, position, "nothing stands before it that it could repeat")
            times = int(symbol[1:])
            if times < 1 or times * len(pieces[-1]) > _MOST_LAYERS:
                raise _wrong(text, position, f"needed: a number from 1, and at most {_MOST_LAYERS:,} layers")
            pieces[-1] *= times
        elif symbol in "EtmL|":
            open_groups[-1].append(symbol)
        position = found.end()
    if len(open_groups) > 1:
        raise _wrong(text, len(text), "a parenthesis is still open")
    stages = tuple("".join(open_groups[0]).split("|"))
    if "" in stages:
        raise UsageError(
            f"layout {text!r}: stage {stages.index('')} of {len(stages)} has no layers; every | ends a stage, so two "
            "in a row, or one at either end, leave one empty"
        )
    return stages


def format_layout(stages: Sequence[str]) -> str:
    """Return the short form of stages, given as their letters; ``parse_layout`` reads it back.

    >>> format_layout(["Ettt", *["tt"] * 29, "m", "L"])
    'Et*3|(tt|)*29,m|L'
    """
    written = ""
    for stage, same in groupby(stages[:-1]):
        times = len(list(same))
        ended = _letters(stage) + "|"
        # A parenthesis takes five signs more than the stage itself.
        written += f"({ended})*{times}," if times * len(ended) > len(ended) + len("()*,") + 1 else ended * times
    return written + _letters(stages[-1])


def cut_from_layout(text: str, stacks: Sequence[int]) -> tuple[int, ...]:
    """Return the stage of each layer of a model of stacks of blocks, each behind an embedding, and a head.

    >>> cut_from_layout("Et|tt|L", [3]), cut_from_layout("EtE|t|tL", [1, 2])
    ((0, 0, 1, 1, 2), (0, 0, 0, 1, 2, 2))

    Args:
        text: the layout.
        stacks: the number of blocks of each stack.

    Raises:
        UsageError: the layout has other layers, or in another order; or text that ``parse_layout`` refuses.
    """
    stages = parse_layout(text)
    got, needed = "".join(stages), _letters_of(stacks)
    if "m" in got:
        raise UsageError(
            f"layout {text!r} has blocks m, which predict further words; this model has none: leave it out"
        )
    if got != needed:
        raise UsageError(
            f"layout {text!r} has {got.count('E')} E, {got.count('t')} t and {got.count('L')} L; needed, in this "
            f"order: {_described(stacks)}"
        )
    return tuple(number for number, stage in enumerate(stages) for _ in stage)


def cut_by_count(stacks: Sequence[int], num_stages: int) -> tuple[int, ...]:
    """Return the cut with numbers of blocks that differ by at most one.

    Each embedding goes with the first block behind it, the head with the last one.

    >>> cut_by_count([5], 2), cut_by_count([2, 2], 2)
    ((0, 0, 0, 0, 1, 1, 1), (0, 0, 0, 1, 1, 1, 1))

    Raises:
        UsageError: more stages than blocks.
    """
    of_block = iter(partition([1.0] * sum(stacks), num_stages))
    cut: list[int] = []
    for blocks in stacks:
        stages = [next(of_block) for _ in range(blocks)]
        cut += [stages[0], *stages]
    return (*cut, num_stages - 1)


def layout_of_cut(layer_to_stage: Sequence[int], stacks: Sequence[int]) -> str:
    """Return the layout of a model of which each layer's stage is given.

    >>> layout_of_cut((0, 0, 1, 1, 2), [3]), layout_of_cut((0, 0, 0, 1, 2, 2), [1, 2])
    ('Et|tt|L', 'EtE|t|tL')
    """
    stages = [""] * (layer_to_stage[-1] + 1)
    for letter, stage in zip(_letters_of(stacks), layer_to_stage, strict=True):
        stages[stage] += letter
    return format_layout(stages)


def _letters_of(stacks: Sequence[int]) -> str:
    return "".join("E" + "t" * blocks for blocks in stacks) + "L"


def _described(stacks: Sequence[int]) -> str:
    """Say which layers a model has.

    >>> _described([3]), _described([2, 4])
    ('one E, the 3 t of the model, one L', 'one E, the 2 t of the first stack, one E, the 4 t of the second, one L')
    """
    if len(stacks) == 1:
        return f"one E, the {stacks[0]} t of the model, one L"
    first, second = stacks
    return f"one E, the {first} t of the first stack, one E, the {second} t of the second, one L"


def _letters(stage: str) -> str:
    """Return a stage with runs of more than two letters shortened."""
    runs = ((letter, len(list(same))) for letter, same in groupby(stage))
    return "".join(f"{letter}*{times}" if times > len("tt") else letter * times for letter, times in runs)


def _wrong(text: str, position: int, why: str) -> UsageError:
    return UsageError(f"layout {text!r}, character {position + 1}: got {text[position : position + 1]!r}; {why}")
