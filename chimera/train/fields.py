"""Which fields of a micro-batch a rank needs: those that its stages' layers and, with the last stage, its loss take."""

from collections.abc import Collection, Sequence
from typing import Any, Protocol

from torch import nn

__all__ = ["needed_fields"]


class _TakesFields(Protocol):
    @property
    def fields(self) -> tuple[str, ...]: ...


def needed_fields(
    layers: Sequence[nn.Module], layer_to_stage: Sequence[int], stages: Collection[int], loss: _TakesFields
) -> frozenset[str]:
    """Return the names.

    Args:
        layers: the whole model; a layer names what it takes in its attribute ``fields``.
        layer_to_stage: the stage of each layer.
        stages: those that this rank holds.
        loss: named likewise; the last stage needs what it takes.
    """
    found: set[str] = set()
    for layer, stage in zip(layers, layer_to_stage, strict=True):
        if stage in stages:
            names: Any = getattr(layer, "fields", ())
            found.update(names)
    if max(layer_to_stage) in stages:
        found.update(loss.fields)
    return frozenset(found)
