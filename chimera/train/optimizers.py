"""Optimizers for training: their options, LAMB, and the rule which parameters are decayed.

Knows parameters and their gradients on one rank. Does not know the schedule of the learning rate, which is written into
the groups' ``lr`` before each step, nor the global gradient norm: gradients arrive clipped, by whoever can sum the norm
over all ranks.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields
from typing import Any, Literal, cast, get_args, overload

import torch
from torch import (
    Tensor,
    _foreach_add_,
    _foreach_addcmul_,
    _foreach_div,
    _foreach_div_,
    _foreach_lerp_,
    _foreach_mul_,
    _foreach_norm,
    _foreach_sqrt,
    nn,
)
from torch.optim import SGD, AdamW, Optimizer

from chimera.errors import ConfigError, UsageError, nearest_names

__all__ = ["Lamb", "OptimizerConfig", "OptimizerName", "build_optimizer"]

OptimizerName = Literal["adamw", "lamb", "sgd"]


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerConfig:
    """Options of the ``[optimizer]`` section. The defaults are BERT's (Devlin et al. 2019, appendix A.2).

    Attributes:
        name: ``adamw``, ``lamb`` or ``sgd``.
        learning_rate: Peak learning rate; the schedule multiplies it.
        betas: Decay rates of the two moments (adamw and lamb).
        eps: Added to the root of the second moment (adamw and lamb).
        weight_decay: Decay of all but norms and biases: decoupled from the gradient for adamw and lamb, part of the
            gradient for sgd.
        momentum: Momentum of sgd.
        clip_norm: Largest global gradient norm, which the training loop enforces; None never clips.

    Raises:
        ConfigError: A value out of range, or an option the named optimizer does not have.
    """

    name: OptimizerName = "adamw"
    learning_rate: float = 1e-4
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-6
    weight_decay: float = 0.01
    momentum: float = 0.0
    clip_norm: float | None = 1.0

    def __post_init__(self) -> None:
        names = get_args(OptimizerName)
        if self.name not in names:
            raise ConfigError(
                f"[optimizer] name = {self.name!r} is unknown{nearest_names(self.name, names)}; "
                f"choose one of {', '.join(names)}"
            )
        for option in ("learning_rate", "eps", "clip_norm"):
            value = getattr(self, option)
            if value is not None and not 0.0 < value < math.inf:
                hint = "; leave it out for no clipping" if option == "clip_norm" else ""
                raise ConfigError(f"[optimizer] {option} = {value!r} must be a finite number above 0{hint}")
        if not 0.0 <= self.weight_decay < math.inf:
            raise ConfigError(f"[optimizer] weight_decay = {self.weight_decay!r} must be 0 or a finite number above 0")
        if len(self.betas) != 2 or not all(0.0 <= beta < 1.0 for beta in self.betas):
            raise ConfigError(f"[optimizer] betas = {self.betas!r} must be two numbers in [0, 1), such as (0.9, 0.999)")
        if not 0.0 <= self.momentum < 1.0:
            raise ConfigError(f"[optimizer] momentum = {self.momentum!r} must be a number in [0, 1)")
        self._refuse_foreign_options()

    def _refuse_foreign_options(self) -> None:
        foreign = ("betas", "eps") if self.name == "sgd" else ("momentum",)
        defaults = {field.name: field.default for field in fields(self)}
        for option in foreign:
            if getattr(self, option) != defaults[option]:
                raise ConfigError(
                    f"[optimizer] {option} = {getattr(self, option)!r} has no meaning for name = {self.name!r}; "
                    f"leave it out or choose {'adamw or lamb' if self.name == 'sgd' else 'sgd'}"
                )


def build_optimizer(config: OptimizerConfig, named_parameters: Iterable[tuple[str, nn.Parameter]]) -> Optimizer:
    """Build the optimizer of this rank's parameters.

    It has two groups on every rank, either of which may be empty: parameters of two or more dimensions, decayed, and
    norms and biases, which are neither decayed nor (by LAMB, as in its authors' code) scaled by a trust ratio.

    Args:
        config: Options.
        named_parameters: Each parameter once, with its global name; fp32 or fp64.

    Raises:
        UsageError: A parameter of another type, or given twice.
    """
    parameters = list(named_parameters)
    _require_unique(parameters)
    for name, parameter in parameters:
        _require_wide(parameter, name)
    matrices = [parameter for _, parameter in parameters if parameter.ndim > 1]
    vectors = [parameter for _, parameter in parameters if parameter.ndim <= 1]
    groups: list[dict[str, Any]] = [
        {"params": matrices, "weight_decay": config.weight_decay},
        {"params": vectors, "weight_decay": 0.0},
    ]
    match config.name:
        case "sgd":
            return SGD(groups, lr=config.learning_rate, momentum=config.momentum)
        case "lamb":
            groups[1]["use_trust_ratio"] = False
            return Lamb(groups, lr=config.learning_rate, betas=config.betas, eps=config.eps)
        case "adamw":
            fused = all(parameter.device.type in {"cpu", "cuda"} for _, parameter in parameters)
            return AdamW(groups, lr=config.learning_rate, betas=config.betas, eps=config.eps, fused=fused)


class Lamb(Optimizer):
    """Layer-wise adaptive moments for large batches (You et al., ICLR 2020, arXiv 1904.00962, algorithm 2).

    With the bias-corrected moments m̂ and v̂ of Adam, ``u = m̂ / (√v̂ + eps) + weight_decay · w`` and
    ``w ← w − lr · (‖w‖ / ‖u‖) · u``, norms taken over one parameter at a time. The trust ratio ‖w‖ / ‖u‖ is 1 where
    either norm is 0, and in groups with ``use_trust_ratio`` false. Moments have the parameter's type. A parameter
    without a gradient is left as it is.

    Args:
        params: Parameters or groups of them, fp32 or fp64; groups may set any of the options.
        lr: Learning rate.
        betas: Decay rates of the two moments.
        eps: Added to the root of the second moment.
        weight_decay: Decoupled decay.
        use_trust_ratio: Whether to scale the step by the trust ratio.

    Raises:
        UsageError: A parameter of another type.
    """

    def __init__(
        self,
        params: Iterable[Tensor] | Iterable[dict[str, Any]],
        lr: float = 1e-3,
        *,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.01,
        use_trust_ratio: bool = True,
    ) -> None:
        options = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "use_trust_ratio": use_trust_ratio,
        }
        super().__init__(cast("Iterable[Tensor]", params), options)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group; see ``torch.optim.Optimizer.add_param_group``."""
        super().add_param_group(param_group)
        for parameter in self.param_groups[-1]["params"]:
            _require_wide(parameter, f"of shape {list(parameter.shape)}")

    @overload
    def step(self, closure: None = None) -> None: ...

    @overload
    def step(self, closure: Callable[[], float]) -> float: ...

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Update all parameters that have a gradient; ``closure``, if given, computes the gradients and the loss."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            alike: dict[tuple[torch.device, torch.dtype], list[Tensor]] = defaultdict(list)
            for parameter in group["params"]:
                if parameter.grad is not None:
                    alike[parameter.device, parameter.dtype].append(parameter)
            for parameters in alike.values():
                self._update(parameters, group)
        return loss

    def _update(self, parameters: list[Tensor], group: dict[str, Any]) -> None:
        """Update parameters of one group, device and type together."""
        direction = self._adam_direction(parameters, betas=group["betas"], eps=group["eps"])
        if group["weight_decay"] != 0.0:
            _foreach_add_(direction, parameters, alpha=group["weight_decay"])
        if group["use_trust_ratio"]:
            _foreach_mul_(direction, _trust_ratios(parameters, direction))
        _foreach_add_(parameters, direction, alpha=-group["lr"])

    def _adam_direction(self, parameters: list[Tensor], *, betas: tuple[float, float], eps: float) -> list[Tensor]:
        """Advance the moments and return m̂ / (√v̂ + eps) for each parameter."""
        states = [self._state_of(parameter) for parameter in parameters]
        gradients = [cast("Tensor", parameter.grad) for parameter in parameters]
        first = [state["exp_avg"] for state in states]
        second = [state["exp_avg_sq"] for state in states]
        steps = [state["step"] for state in states]
        _foreach_add_(steps, 1.0)
        _foreach_lerp_(first, gradients, 1.0 - betas[0])
        _foreach_mul_(second, betas[1])
        _foreach_addcmul_(second, gradients, gradients, 1.0 - betas[1])
        root = list(_foreach_sqrt(second))
        _foreach_div_(root, [math.sqrt(1.0 - betas[1] ** step.item()) for step in steps])
        _foreach_add_(root, eps)
        direction = list(_foreach_div(first, root))
        _foreach_div_(direction, [1.0 - betas[0] ** step.item() for step in steps])
        return direction

    def _state_of(self, parameter: Tensor) -> dict[str, Tensor]:
        state: dict[str, Tensor] = self.state[parameter]
        if not state:
            state["step"] = torch.zeros((), dtype=torch.float32, device="cpu")  # read by the host at every step
            state["exp_avg"] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
            state["exp_avg_sq"] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
        return state


def _trust_ratios(parameters: list[Tensor], direction: list[Tensor]) -> list[Tensor]:
    """Return ‖w‖ / ‖u‖ per parameter, 1 where either is 0, without waiting for the device."""
    weights = torch.stack(list(_foreach_norm(parameters)))
    updates = torch.stack(list(_foreach_norm(direction)))
    usable = (weights > 0.0) & (updates > 0.0)
    return list(torch.where(usable, weights / updates, 1.0).unbind())


def _require_wide(parameter: Tensor, name: str) -> None:
    if parameter.dtype not in {torch.float32, torch.float64}:
        raise UsageError(
            f"parameter {name} is {parameter.dtype}; an update is often smaller than such a weight's rounding. "
            "Give the optimizer fp32 main weights and copy them to the model after each step"
        )


def _require_unique(parameters: list[tuple[str, nn.Parameter]]) -> None:
    names: dict[int, str] = {}
    for name, parameter in parameters:
        if id(parameter) in names:
            raise UsageError(
                f"{names[id(parameter)]} and {name} are one parameter; give a tied parameter to the optimizer once"
            )
        names[id(parameter)] = name
