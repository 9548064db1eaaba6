"""Optimizers for training: their options, LAMB, and the rule which parameters are decayed.

Knows parameters and their gradients on one rank. Does not know the schedule of the learning rate, which is written into
the groups' ``lr`` before each step, nor the global gradient norm: gradients arrive clipped, by whoever can sum the norm
over all ranks.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
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
from chimera.tensor.portion import Portion

__all__ = ["Lamb", "OptimizerConfig", "OptimizerName", "Sums", "build_optimizer"]

OptimizerName = Literal["adamw", "lamb", "sgd"]

Sums = Callable[[Sequence[nn.Parameter], Tensor], Tensor]
"""Adds up quantities ``[k, n]`` of n portions over the ranks that hold the others of the same parameters; a collective,
called as often on every rank."""


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
        nesterov: Whether sgd looks ahead along its momentum.
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
    nesterov: bool = False
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
        if self.nesterov and self.name == "sgd" and not self.momentum:
            raise ConfigError("[optimizer] nesterov = true needs a momentum above 0; set momentum, such as 0.9")
        self._refuse_foreign_options()

    @property
    def moments(self) -> tuple[str, ...]:
        """The tensors that the optimizer keeps for each parameter, by their key in its state."""
        if self.name == "sgd":
            return ("momentum_buffer",) if self.momentum else ()
        return ("exp_avg", "exp_avg_sq")

    def _refuse_foreign_options(self) -> None:
        foreign = ("betas", "eps") if self.name == "sgd" else ("momentum", "nesterov")
        defaults = {field.name: field.default for field in fields(self)}
        for option in foreign:
            if getattr(self, option) != defaults[option]:
                raise ConfigError(
                    f"[optimizer] {option} = {getattr(self, option)!r} has no meaning for name = {self.name!r}; "
                    f"leave it out or choose {'adamw or lamb' if self.name == 'sgd' else 'sgd'}"
                )


def build_optimizer(config: OptimizerConfig, portions: Iterable[Portion], *, sums: Sums | None = None) -> Optimizer:
    """Build the optimizer of this rank's portions.

    It has two groups on every rank, either of which may be empty: parameters of two or more dimensions, decayed, and
    norms and biases, which are neither decayed nor (by LAMB, as in its authors' code) scaled by a trust ratio.

    Args:
        config: Options.
        portions: What this rank updates, in fp32 or fp64.
        sums: How LAMB gets the norm of a parameter of which this rank has a portion; None where it has all.

    Raises:
        UsageError: A parameter of another type, or given twice.
    """
    portions = list(portions)
    _require_unique(portions)
    for portion in portions:
        _require_wide(portion.parameter, portion.name)
    groups: list[dict[str, Any]] = [
        {"params": [p.parameter for p in portions if len(p.shape) > 1], "weight_decay": config.weight_decay},
        {"params": [p.parameter for p in portions if len(p.shape) <= 1], "weight_decay": 0.0},
    ]
    fused = all(portion.parameter.device.type in {"cpu", "cuda"} for portion in portions)
    match config.name:
        case "sgd":
            return SGD(groups, lr=config.learning_rate, momentum=config.momentum, nesterov=config.nesterov, fused=fused)
        case "lamb":
            groups[1]["use_trust_ratio"] = False
            return Lamb(groups, lr=config.learning_rate, betas=config.betas, eps=config.eps, sums=sums)
        case "adamw":
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
        sums: Adds up squared norms over the ranks that hold other portions of the same parameters; called once a step.

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
        sums: Sums | None = None,
    ) -> None:
        self._sums = sums
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
        alike = [(group, parameters) for group in self.param_groups for parameters in _with_gradient(group["params"])]
        directions = [self._direction(parameters, group) for group, parameters in alike]
        # All groups at once: a rank without a matrix still takes part in the sums.
        ratios = self._trust_ratios(
            [
                pair
                for (group, parameters), direction in zip(alike, directions, strict=True)
                if group["use_trust_ratio"]
                for pair in zip(parameters, direction, strict=True)
            ]
        )
        for (group, parameters), direction in zip(alike, directions, strict=True):
            if group["use_trust_ratio"]:
                _foreach_mul_(direction, [ratios[parameter].to(parameter.dtype) for parameter in parameters])
            _foreach_add_(parameters, direction, alpha=-group["lr"])
        return loss

    def _direction(self, parameters: list[Tensor], group: dict[str, Any]) -> list[Tensor]:
        """Return u of parameters of one group, device and type."""
        direction = self._adam_direction(parameters, betas=group["betas"], eps=group["eps"])
        if group["weight_decay"] != 0.0:
            _foreach_add_(direction, parameters, alpha=group["weight_decay"])
        return direction

    def _trust_ratios(self, pairs: list[tuple[Tensor, Tensor]]) -> dict[Tensor, Tensor]:
        """Return ‖w‖ / ‖u‖ by parameter for (w, u), 1 where either is 0, without waiting for the device."""
        parameters = [weight for weight, _ in pairs]
        squares = torch.zeros(2, 0, dtype=torch.float64)
        if pairs:
            norms = [_foreach_norm(side, 2, dtype=torch.float64) for side in map(list, zip(*pairs, strict=True))]
            squares = torch.stack([torch.stack(list(side)) for side in norms]).square()
        if self._sums is not None:
            squares = self._sums(cast("list[nn.Parameter]", parameters), squares)
        weights, updates = squares.sqrt().unbind()
        usable = (weights > 0.0) & (updates > 0.0)
        ratios = torch.where(usable, weights / updates, 1.0).unbind()
        return dict(zip(parameters, ratios, strict=True))

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


def _with_gradient(parameters: Iterable[Tensor]) -> list[list[Tensor]]:
    """Return the parameters that have a gradient, those of one device and type together."""
    alike: dict[tuple[torch.device, torch.dtype], list[Tensor]] = defaultdict(list)
    for parameter in parameters:
        if parameter.grad is not None:
            alike[parameter.device, parameter.dtype].append(parameter)
    return list(alike.values())


def _require_wide(parameter: Tensor, name: str) -> None:
    if parameter.dtype not in {torch.float32, torch.float64}:
        raise UsageError(
            f"parameter {name} is {parameter.dtype}; an update is often smaller than such a weight's rounding. "
            "Give the optimizer fp32 main weights and copy them to the model after each step"
        )


def _require_unique(portions: Sequence[Portion]) -> None:
    names: dict[int, str] = {}
    for portion in portions:
        if (first := names.setdefault(id(portion.parameter), portion.name)) is not portion.name:
            raise UsageError(
                f"{first} and {portion.name} are one parameter; give a tied parameter to the optimizer once"
            )
