"""Rotary position embeddings: queries and keys turned by angles that grow with their positions.

The construction of Su et al. 2021 (arXiv 2104.09864, section 3.2) with the pairing of transformers' weights, where
element i turns with element i + size / 2; Meta's own files pair neighbours and are a permutation of rows away. Llama
3.1's stretching of low frequencies is here too. Angles are made anew in each forward, in fp32 at least: kept in a
buffer, they would be rounded with the weights to a narrower type.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["RotaryEmbedding", "RotaryScaling"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RotaryScaling:
    """How Llama 3.1 stretches low frequencies, so that longer sequences than those of pre-training fit.

    Wavelengths above ``original_positions / low_frequency_factor`` become ``factor`` times as long, those below
    ``original_positions / high_frequency_factor`` stay, and between the two the change is gradual.

    Attributes:
        factor: of the longest wavelengths.
        low_frequency_factor: original positions per wavelength where the full change begins.
        high_frequency_factor: original positions per wavelength where no change begins.
        original_positions: the longest sequence of pre-training, in tokens.
    """

    factor: float
    low_frequency_factor: float
    high_frequency_factor: float
    original_positions: int

    def stretched(self, frequencies: Tensor) -> Tensor:
        """Return the frequencies, in radians per position, after stretching."""
        per_wavelength = self.original_positions * frequencies / (2 * math.pi)
        width = self.high_frequency_factor - self.low_frequency_factor
        kept = ((per_wavelength - self.low_frequency_factor) / width).clamp(0.0, 1.0)
        return frequencies * (kept + (1.0 - kept) / self.factor)


@dataclass(frozen=True, slots=True, kw_only=True)
class RotaryEmbedding:
    """Turns queries and keys.

    Attributes:
        head_size: elements of a head, even.
        theta: the wavelength of pair i is 2π · theta^(2i / head_size) positions.
        scaling: None for none.
    """

    head_size: int
    theta: float
    scaling: RotaryScaling | None = None

    def turned(self, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
        """Return both turned by the angles of their positions, 0, 1, 2, ….

        Args:
            query: ``[b, heads, s, head_size]``.
            key: ``[b, any heads, s, head_size]``.
        """
        cosine, sine = self._factors(query.shape[-2], query)
        return _turn(query, cosine, sine), _turn(key, cosine, sine)

    def frequencies(self, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return the radians per position of each pair, ``[head_size / 2]``."""
        exponents = torch.arange(0, self.head_size, 2, dtype=dtype, device=device) / self.head_size
        frequencies = 1.0 / (self.theta**exponents)
        return frequencies if self.scaling is None else self.scaling.stretched(frequencies)

    def _factors(self, length: int, like: Tensor) -> tuple[Tensor, Tensor]:
        wide = torch.promote_types(like.dtype, torch.float32)
        positions = torch.arange(length, dtype=wide, device=like.device)
        angles = torch.outer(positions, self.frequencies(wide, like.device)).repeat(1, 2)
        return angles.cos().to(like.dtype), angles.sin().to(like.dtype)


def _turn(values: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    first, second = values.chunk(2, -1)
    return values * cosine + torch.cat((-second, first), -1) * sine
