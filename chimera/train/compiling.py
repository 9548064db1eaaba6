"""``train.compile``: every block of a model compiled by itself, so that any cut into stages and any schedule takes it.

Embeddings and heads stay as they are: they run once, and their shapes change with the number of labels. Masks of
dropout are left out of what is compiled, so they are those of any other run with the same seed.
"""

import shutil
from collections.abc import Sequence

import torch
from torch import nn

from chimera.errors import ConfigError
from chimera.models.transformer import TransformerBlock

__all__ = ["compile_blocks", "require_compiler"]


def compile_blocks(layers: Sequence[nn.Module], *, backend: str = "inductor") -> int:
    """Have each block compiled when it first runs, and return how many there are.

    Args:
        layers: of a model.
        backend: of ``torch.compile``.
    """
    blocks = [layer for layer in layers if isinstance(layer, TransformerBlock)]
    for block in blocks:
        block.compile(backend=backend)
    return len(blocks)


def require_compiler(device: torch.device) -> None:
    """Refuse to compile for the CPU without a C++ compiler.

    Raises:
        ConfigError: there is none.
    """
    if device.type == "cpu" and shutil.which("c++") is None and shutil.which("g++") is None:
        raise ConfigError(
            "train.compile = true generates C++ for the CPU, and there is no compiler named c++ or g++; install one, "
            "or set train.compile to false"
        )
