"""``chimera schedule list``: what the registry holds, for people or as JSON. It knows no schedule itself."""

import json as json_form

from chimera.cli.options import Flag
from chimera.cli.terminal import console, print_wrapped
from chimera.schedules import SCHEDULES, ScheduleFamily
from chimera.schedules.building import as_option

__all__ = ["schedule_list"]

_LEGEND = (
    "p is --ranks, m --microbatches, v --chunks, f --pairs, w --waves, k --updates. F and B are a forward and a "
    "backward, I and W the parts of a split one. Activations are in units of 1/p of the model for one micro-batch, per "
    "rank."
)


def schedule_list(*, json: Flag = False) -> None:
    """Name every schedule, what it takes, its idle share and its memory.

    Example:
        chimera schedule list

    Args:
        json: print a JSON list instead
    """
    if json:
        print(json_form.dumps([_as_dict(family) for family in SCHEDULES.values()], indent=1, ensure_ascii=False))
        return
    out = console()
    for family in SCHEDULES.values():
        out.print(family.name, style="bold")
        print_wrapped(out, family.summary, indent="  ")
        for label, text in _entries(family).items():
            print_wrapped(out, text, indent=" " * 11, first=f"  {label:8} ")
    out.print()
    print_wrapped(out, _LEGEND)


def _entries(family: ScheduleFamily) -> dict[str, str]:
    options = "".join(f" [{as_option(option)}]" for option in family.options)
    return {
        "options": f"--ranks --microbatches{options}",
        "takes": family.requires,
        "bubble": family.bubble,
        "memory": family.memory,
        "source": family.source,
    }


def _as_dict(family: ScheduleFamily) -> dict[str, object]:
    return {
        "name": family.name,
        "summary": family.summary,
        "options": ["ranks", "microbatches", *family.options],
        "requires": family.requires,
        "bubble": family.bubble,
        "memory": family.memory,
        "source": family.source,
    }
