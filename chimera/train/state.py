"""What a run has to remember: weights, the optimizer's moments, and the options that its next step depends on.

Names carry global layer numbers and say nothing of ranks. Every parameter is saved once and whole, by one of the ranks
that hold its layer's stage, and each rank takes from it what it updates; so a checkpoint fits any layout. A micro-batch
is a function of the step, so there is no loader state, and random numbers are keyed by the step, so there is no
generator's.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor, nn

from chimera.errors import CheckpointError
from chimera.runtime.pipeline import Pipeline
from chimera.tensor.portion import Portion
from chimera.train.checkpoint import Checkpoint, load_tensors
from chimera.train.config import TrainConfig
from chimera.train.config_file import SECTIONS
from chimera.train.layout import Layout
from chimera.train.loss_scale import LossScale
from chimera.train.updating import Progress, Updating

__all__ = ["MODEL", "OPTIMIZER", "describe", "owned_state", "require_same", "restore"]

MODEL: Final = "model"
OPTIMIZER: Final = "optimizer"
"""What the names of stored tensors begin with: the former before a parameter's, the latter before a moment's."""
_FREE: Final = frozenset(
    f"train.{option}"
    for option in (
        "steps",
        "out",
        "evaluation_interval",
        "evaluation_samples",
        "checkpoint_interval",
        "keep_checkpoints",
        "accumulation_runs",
    )
) | {"data.cache_dir", "data.workers"}
_FREE_SECTIONS: Final = frozenset({"runtime", "metrics", "profile"})
_LAYOUT: Final = frozenset({"schedule", "parallel"})
"""Sections by which a step does not change, but by those of an asynchronous schedule."""
_SAMPLES: Final = "samples of a step"


def describe(config: TrainConfig, layout: Layout, progress: Progress) -> dict[str, Any]:
    """Return what a checkpoint says of the run it belongs to and how far that is, as JSON."""
    return {
        "config": {section: _as_json(asdict(getattr(config, section))) for section in SECTIONS},
        "asynchronous": layout.schedule.is_asynchronous,
        "global_batch": layout.global_batch,
        "progress": asdict(progress),
    }


def require_same(checkpoint: Checkpoint, config: TrainConfig, layout: Layout) -> None:
    """Refuse a checkpoint whose run would go on otherwise under ``config``.

    Another layout is none: a synchronous step does not depend on it but by rounding.

    Raises:
        CheckpointError: naming every option that differs, with both values.
    """
    was = _flat(checkpoint.description["config"]) | {_SAMPLES: checkpoint.description["global_batch"]}
    now = _flat({section: _as_json(asdict(getattr(config, section))) for section in SECTIONS})
    now[_SAMPLES] = layout.global_batch
    asynchronous = layout.schedule.is_asynchronous or checkpoint.description["asynchronous"]
    free = _FREE_SECTIONS if asynchronous else _FREE_SECTIONS | _LAYOUT
    different = [
        f"{option} was {was.get(option, 'not there')!r}, is {now.get(option, 'not there')!r}"
        for option in dict.fromkeys((*now, *was))
        if was.get(option) != now.get(option) and option not in _FREE and option.split(".")[0] not in free
    ]
    if different:
        raise CheckpointError(
            f"{checkpoint.path} belongs to another run: {'; '.join(different)}; set these back to go on with it, or "
            "start anew with another --train.out"
        )


def owned_state(pipe: Pipeline, updating: Updating) -> dict[str, Tensor]:
    """Return the tensors that this rank saves; a collective."""
    state = {f"{MODEL}.{name}": tensor for name, tensor in pipe.collected(lambda portion: portion).items()}
    # Before the first update there are none.
    for moment in updating.moments if updating.progress.updates else ():
        of_portion = partial(_moment_of, updating, moment)
        state |= {f"{OPTIMIZER}.{moment}.{name}": tensor for name, tensor in pipe.collected(of_portion).items()}
    return state


def restore(pipe: Pipeline, updating: Updating, checkpoint: Checkpoint) -> None:
    """Put the state of ``checkpoint`` into the pipeline and the optimizer.

    Raises:
        CheckpointError: a parameter or a moment is missing or of another shape.
    """
    progress = checkpoint.description["progress"]
    updating.progress = Progress(int(progress["updates"]), LossScale(**progress["loss_scale"]))
    portions = pipe.portions()
    names = {portion.name for portion in portions}
    tensors = load_tensors(checkpoint.path, lambda name: _parameter_of(name) in names)
    for portion in portions:
        with torch.no_grad():
            portion.parameter.copy_(_part(tensors, f"{MODEL}.{portion.name}", portion, checkpoint))
    _restore_optimizers(updating, portions, tensors, checkpoint)
    pipe.publish_weights()
    pipe.step_number = checkpoint.step


def _restore_optimizers(
    updating: Updating, portions: Sequence[Portion], tensors: Mapping[str, Tensor], checkpoint: Checkpoint
) -> None:
    updates = updating.progress.updates
    if not updates:
        return
    of_parameter: dict[int, dict[str, Tensor]] = {}
    for portion in portions:
        moments = {
            moment: _part(tensors, f"{OPTIMIZER}.{moment}.{portion.name}", portion, checkpoint).clone()
            for moment in updating.moments
            if portion.parameter.requires_grad
        }
        of_parameter[id(portion.parameter)] = moments | {"step": torch.tensor(float(updates))}
    for optimizer in updating.optimizers:
        ordered = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        state = {number: of_parameter[id(parameter)] for number, parameter in enumerate(ordered)}
        optimizer.load_state_dict({"state": state, "param_groups": optimizer.state_dict()["param_groups"]})


def _moment_of(updating: Updating, moment: str, portion: nn.Parameter) -> Tensor | None:
    """Return a moment of a portion, None where it does not train."""
    known = (optimizer.state[portion] for optimizer in updating.optimizers if portion in optimizer.state)
    return next((state[moment] for state in known), None)


def _part(tensors: Mapping[str, Tensor], name: str, portion: Portion, checkpoint: Checkpoint) -> Tensor:
    """Return what a portion has of a stored tensor."""
    stored = tensors.get(name)
    if stored is None or stored.shape != portion.shape:
        got = "is missing" if stored is None else f"has the shape {list(stored.shape)}"
        raise CheckpointError(
            f"{checkpoint.path}: {name} {got}; needed: {list(portion.shape)}; it was saved by another model"
        )
    return portion.of(stored)


def _parameter_of(name: str) -> str:
    """Return the parameter that a stored tensor belongs to: the name from its layer's number on.

    >>> _parameter_of("model.3.norm.weight"), _parameter_of("optimizer.exp_avg.3.norm.weight")
    ('3.norm.weight', '3.norm.weight')
    """
    return name.split(".", 1 if name.startswith(f"{MODEL}.") else 2)[-1]


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
