"""What is seen of a step from inside: ranges in order, and the bytes that forwards keep."""

import torch
from torch import nn

from chimera.ir.action import Action, Kind, parse_instruction
from chimera.train.observers import KeptBytes, named_ranges, ranged


def test_ranges_nest_and_are_named_by_the_action():
    """Another tool sees each action's text inside the step, also where the action fails."""
    seen = []
    observer = named_ranges(seen.append, lambda: seen.append("end"))
    with ranged("step 3", seen.append, lambda: seen.append("end")):
        for text in ("0F0", "(0F1;1B0)OVERLAP_F_B"):
            with observer(parse_instruction(text)):
                pass
    assert seen == ["step 3", "0F0", "end", "(0F1;1B0)OVERLAP_F_B", "end", "end"]


def test_what_a_forward_keeps_is_counted_once_and_without_parameters():
    """A linear layer keeps its input, and so does the next one; ReLU keeps its result, which is that input."""
    layers = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    kept = KeptBytes(layers.parameters())
    for rows in (3, 5):
        with kept(Action(Kind.F, 1, 0)):
            layers(torch.ones(rows, 4))
    with kept(Action(Kind.B, 0, 0)):
        layers(torch.ones(9, 4))
    assert kept.per_stage(2) == [0, 4 * (5 * 4 + 5 * 8)]
