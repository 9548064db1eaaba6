"""Keyed randomness: the same (seed, step, micro-batch, layer) draws the same numbers whatever the layout.

A scope saves torch's default generators once and restores them at its end; inside it, ``Keys.layer`` seeds them for one
layer and one micro-batch. Initial weights and dropout therefore do not depend on where or when a layer runs, and
recomputation replays its masks exactly. The module knows nothing of stages.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import IntEnum

import torch

__all__ = ["Keys", "Purpose", "extend", "mix", "preserved_generators", "seed_generators"]

_MASK = (1 << 64) - 1


class Purpose(IntEnum):
    """Keeps streams that share a seed apart."""

    FORWARD = 0
    INITIAL_WEIGHTS = 1


def mix(*words: int) -> int:
    """Hash integers to 64 bits, one round of SplitMix64 (Steele et al., OOPSLA'14) per word.

    >>> mix(1, 2) == mix(1, 2), mix(1, 2) == mix(2, 1)
    (True, False)
    """
    return extend(0, *words)


def extend(state: int, *words: int) -> int:
    """Hash further integers into ``state``, what ``mix`` made of those before."""
    for word in words:
        state = (state + word + 0x9E3779B97F4A7C15) & _MASK
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _MASK
        state ^= state >> 31
    return state


def seed_generators(key: int, device: torch.device) -> None:
    """Seed the CPU's default generator, and the CUDA device's when ``device`` is one."""
    torch.default_generator.manual_seed(key)
    if device.type == "cuda":
        torch.cuda.default_generators[device.index].manual_seed(key)


@contextmanager
def preserved_generators(device: torch.device) -> Iterator[None]:
    """Restore the default generators at the end, so that a caller's own random stream is not disturbed."""
    cpu = torch.default_generator.get_state()
    cuda = torch.cuda.get_rng_state(device) if device.type == "cuda" else None
    try:
        yield
    finally:
        torch.default_generator.set_state(cpu)
        if cuda is not None:
            torch.cuda.set_rng_state(cuda, device)


@dataclass(frozen=True, slots=True)
class Keys:
    """The random keys of one micro-batch in one step; call ``layer`` right before running that layer."""

    prefix: int
    device: torch.device

    @classmethod
    def of_step(cls, *, seed: int, step: int, microbatches: Iterable[int], device: torch.device) -> list["Keys"]:
        """Return the keys of the micro-batches with these numbers in the global batch."""
        prefix = mix(Purpose.FORWARD, seed, step)
        return [cls(extend(prefix, microbatch), device) for microbatch in microbatches]

    def layer(self, layer: int) -> None:
        """Seed the default generators for the layer with this global number."""
        seed_generators(extend(self.prefix, layer), self.device)
