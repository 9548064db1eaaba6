"""How many parameters a list of layers has.

Works on layers of any device, the meta device included, so a model of any size is counted without its memory.
"""

from collections.abc import Iterable

from torch import nn

__all__ = ["count_parameters"]


def count_parameters(layers: Iterable[nn.Module]) -> int:
    """Return the number of parameters in ``layers``; one that several layers hold (a tied weight) counts once."""
    return sum(parameter.numel() for parameter in nn.ModuleList(layers).parameters())
