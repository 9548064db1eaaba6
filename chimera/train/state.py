"""What a run has to remember: weights, the optimizer's moments, and the options that its next step depends on.

Names carry global layer numbers and say nothing of ranks. Every parameter is saved once, by one of the ranks that hold
its layer's stage, and read by all of them. A micro-batch is a function of the step, so there is no loader state,
and random numbers are keyed by the step, so there is no generator's.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from chimera.errors import CheckpointError
from chimera.runtime.pipeline import Pipeline
from chimera.train.checkpoint import Checkpoint, load_tensors
from chimera.train.config import TrainConfig
from chimera.train.config_file import SECTIONS
from chimera.train.layout import Layout

__all__ = ["describe", "owned_state", "require_same", "restore"]

_MODEL: Final = "model"
_OPTIMIZER: Final = "optimizer"
_FREE: Final = frozenset(
    f"train.{option}"
    for option in (
        "steps",
        "out",
        "evaluation_interval",
        "evaluation_samples",
        "checkpoint_interval",
        "keep_checkpoints",
    )
) | {"data.cache_dir"}
_FREE_SECTIONS: Final = frozenset({"runtime", "metrics"})


def describe(config: TrainConfig, layout: Layout) -> dict[str, Any]:
    """Return what a checkpoint says of the run it belongs to, as JSON."""
    return {
        "config": {section: _as_json(asdict(getattr(config, section))) for section in SECTIONS},
        "layout": {
            "routes": _as_json(layout.schedule.placement.routes),
            "layer_to_stage": _as_json(layout.layer_to_stage),
            "microbatches": layout.microbatches_per_run,
        },
    }


def require_same(checkpoint: Checkpoint, config: TrainConfig, layout: Layout) -> None:
    """Refuse a checkpoint whose run would go on otherwise under ``config``.

    Raises:
        CheckpointError: naming every option that differs, with both values.
    """
    was, now = (_flat(description) for description in (checkpoint.description, describe(config, layout)))
    options = {name.removeprefix("config."): name for name in (*now, *was)}
    different = [
        f"{option} was {was.get(name, 'not there')!r}, is {now.get(name, 'not there')!r}"
        for option, name in options.items()
        if was.get(name) != now.get(name) and option not in _FREE and option.split(".")[0] not in _FREE_SECTIONS
    ]
    if different:
        raise CheckpointError(
            f"{checkpoint.path} belongs to another run: {'; '.join(different)}; set these back to go on with it, or "
            "start anew with another --train.out"
        )


def owned_state(pipe: Pipeline, optimizers: Sequence[Optimizer]) -> dict[str, Tensor]:
    """Return the tensors that this rank saves: its parameters, and what is known of each by one of the optimizers."""
    groups, placement = pipe.groups, pipe.schedule.placement
    state: dict[str, Tensor] = {}
    known = {id(parameter): kept for optimizer in optimizers for parameter, kept in optimizer.state.items()}
    for name, parameter in pipe.optimizer_parameters():
        stage = pipe.layer_to_stage[int(name.split(".")[0])]
        holders = placement.ranks_of(stage)
        # The stages take turns, so that Chimera's two replicas share the writing.
        if groups.data_rank == 0 and groups.pipeline_rank == holders[stage % len(holders)]:
            state[f"{_MODEL}.{name}"] = parameter.detach()
            for key, value in known.get(id(parameter), {}).items():
                if isinstance(value, Tensor):
                    state[f"{_OPTIMIZER}.{key}.{name}"] = value
    return state


def restore(pipe: Pipeline, optimizers: Sequence[Optimizer], checkpoint: Checkpoint) -> None:
    """Put the state of ``checkpoint`` into the pipeline and the optimizers.

    Raises:
        CheckpointError: a parameter is missing or of another shape.
    """
    parameters = dict(pipe.optimizer_parameters())
    tensors = load_tensors(checkpoint.path, lambda name: _parameter_of(name) in parameters)
    for name, parameter in parameters.items():
        stored = tensors.get(f"{_MODEL}.{name}")
        if stored is None or stored.shape != parameter.shape:
            got = "is missing" if stored is None else f"has the shape {list(stored.shape)}"
            raise CheckpointError(
                f"{checkpoint.path}: {name} {got}; needed: {list(parameter.shape)}; it was saved by another model"
            )
        with torch.no_grad():
            parameter.copy_(stored)
    for optimizer in optimizers:
        _restore_optimizer(optimizer, parameters, tensors)
    pipe.publish_weights()
    pipe.step_number = checkpoint.step


def _restore_optimizer(
    optimizer: Optimizer, parameters: Mapping[str, nn.Parameter], tensors: Mapping[str, Tensor]
) -> None:
    of_parameter: dict[int, dict[str, Tensor]] = {id(parameter): {} for parameter in parameters.values()}
    for name, tensor in tensors.items():
        kind, _, rest = name.partition(".")
        if kind == _OPTIMIZER:
            of_parameter[id(parameters[_parameter_of(name)])][rest.partition(".")[0]] = tensor
    ordered = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    state = {number: of_parameter[id(parameter)] for number, parameter in enumerate(ordered)}
    optimizer.load_state_dict({"state": state, "param_groups": optimizer.state_dict()["param_groups"]})


def _parameter_of(name: str) -> str:
    """Return the parameter that a stored tensor belongs to: the name from its layer's number on.

    >>> _parameter_of("model.3.norm.weight"), _parameter_of("optimizer.exp_avg.3.norm.weight")
    ('3.norm.weight', '3.norm.weight')
    """
    return name.split(".", 1 if name.startswith(f"{_MODEL}.") else 2)[-1]


def _flat(description: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in description.items():
        flat |= _flat(value, f"{prefix}{name}.") if isinstance(value, Mapping) else {f"{prefix}{name}": value}
    return flat


def _as_json(value: Any) -> Any:
    """Return tuples as the lists that they are read back as."""
    if isinstance(value, Mapping):
        return {name: _as_json(inner) for name, inner in value.items()}
    return [_as_json(inner) for inner in value] if isinstance(value, tuple) else value
