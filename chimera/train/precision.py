"""The types a run computes in: what ``train.dtype`` means to torch, and which linear layers multiply in float8.

On a rank of its own they are torchao's, which compilers fuse with what stands around them. Where ranks share layers,
our own make the same products, with scales that these ranks agree on (``tensor.float8``). Gradients, and the weights
that are updated, are in fp32 whatever stands here; the runtime sees to that.
"""

from collections.abc import Sequence
from typing import Any, Final

import torch
from torch import nn

from chimera.errors import ConfigError
from chimera.tensor.linear import Linear
from chimera.tensor.parallel import ALONE, TensorParallel
from chimera.tensor.sharding import sharding_of
from chimera.train.config import Dtype

try:
    from torchao.float8 import convert_to_float8_training
except ImportError:
    # The extra "float8" is not there; ``to_float8`` says so to who asks for it.
    convert_to_float8_training = None

__all__ = ["in_precision", "to_float8", "torch_dtype"]

_TYPES: Final[dict[Dtype, torch.dtype | None]] = {
    "fp32": None,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp8": torch.bfloat16,
}
_FLOAT8_CAPABILITY: Final = (8, 9)
"""The first NVIDIA devices that multiply in float8 (Ada, then Hopper)."""
_FLOAT8_MULTIPLE: Final = 16
"""Widths have to be multiples of so much for those products."""


def torch_dtype(dtype: Dtype) -> torch.dtype | None:
    """Return the type of weights and activations; None leaves the layers' own, fp32."""
    return _TYPES[dtype]


def in_precision(
    layers: Sequence[nn.Module], dtype: Dtype, device: torch.device, parallel: TensorParallel = ALONE
) -> list[nn.Module]:
    """Return the layers of a model as ``dtype`` has them compute on ``device``, beside the type of their weights.

    Args:
        layers: built for ``parallel``, the ranks that share them.
        dtype: of the run.
        device: of this rank.
        parallel: all of these ranks call this with equal arguments.

    Raises:
        ConfigError: float8 without its extra, on a device without it, or for a model that it does not fit.
    """
    if dtype != "fp8":
        return list(layers)
    _require_float8(device, by_torchao=parallel.size == 1)
    return to_float8(layers, parallel)


def to_float8(layers: Sequence[nn.Module], parallel: TensorParallel = ALONE, **options: Any) -> list[nn.Module]:
    """Return the layers with every linear layer that float8 fits multiplying in it, forward and backward.

    Weights keep their names and stay in the type the run computes in; each product scales its two matrices by their
    largest element (Micikevicius et al. 2022, arXiv 2209.05433). Layers whose whole widths are not multiples of 16 are
    left as they are, so which ones these are depends on no layout. A schedule with split backwards runs, but torchao's
    layers compute all of their gradients at I.

    Args:
        layers: of the model, changed in place.
        parallel: the ranks that share them.
        options: for ``convert_to_float8_training`` of torchao, on a rank of its own.

    Raises:
        ConfigError: nothing in the model fits.
    """
    fitting = [module for layer in layers for module in layer.modules() if _fits_float8(module)]
    if not fitting:
        raise ConfigError(
            f'[train] dtype = "fp8": no linear layer has two widths that are multiples of {_FLOAT8_MULTIPLE}; choose '
            "such widths, or set [train] dtype to bf16"
        )
    if parallel.size > 1:
        for module in fitting:
            assert isinstance(module, Linear), "layers that ranks can share are ours"
            module.float8 = parallel
        return list(layers)
    assert convert_to_float8_training is not None, "asked for before"
    return [
        convert_to_float8_training(layer, module_filter_fn=lambda module, _: _fits_float8(module), **options)
        for layer in layers
    ]


def _require_float8(device: torch.device, *, by_torchao: bool) -> None:
    """Refuse float8 where the extra or the device is missing, naming which and what to take instead."""
    instead = "or set [train] dtype to bf16"
    if by_torchao and convert_to_float8_training is None:
        raise ConfigError(
            '[train] dtype = "fp8" needs torchao, which is not installed; install chimera-pipeline[float8], ' + instead
        )
    capability = torch.cuda.get_device_capability(device) if device.type == "cuda" else None
    if capability is None or capability < _FLOAT8_CAPABILITY:
        got = device.type.upper() if capability is None else f"compute capability {capability[0]}.{capability[1]}"
        raise ConfigError(
            f'[train] dtype = "fp8" needs a CUDA device of compute capability {_FLOAT8_CAPABILITY[0]}.'
            f"{_FLOAT8_CAPABILITY[1]} or later, this rank has {got}; run on such a device, {instead}"
        )


def _fits_float8(module: nn.Module) -> bool:
    if not isinstance(module, nn.Linear):
        return False
    whole = sharding_of(module.weight).whole_shape(module.weight.shape)
    return all(width % _FLOAT8_MULTIPLE == 0 for width in whole)
