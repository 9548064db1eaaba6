"""A mark for tests of products in float8: torch 2.11 makes them on CUDA alone, 2.13 on the CPU too."""

import pytest
import torch

from chimera.tensor.float8 import product, scaled

__all__ = ["needs_float8_on_cpu"]


def _multiplies():
    ones = scaled(torch.ones(16, 16), torch.tensor(1.0), torch.float8_e4m3fn)
    try:
        product(ones, ones, torch.float32)
    except NotImplementedError:
        return False
    return True


needs_float8_on_cpu = pytest.mark.skipif(not _multiplies(), reason="needs a torch that multiplies in float8 on the CPU")
