"""A moment, as what runs can tell it: the host's clock, or an event on a CUDA stream."""

import torch

__all__ = ["Mark", "mark_on_stream"]

Mark = float | torch.cuda.Event
"""Seconds on the host's clock, or an event that a stream will pass."""


def mark_on_stream() -> torch.cuda.Event:
    """Return an event that the current stream passes once it has done what was asked of it so far."""
    event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    event.record()
    return event
