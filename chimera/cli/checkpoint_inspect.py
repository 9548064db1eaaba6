"""``chimera checkpoint inspect``: what is in a checkpoint, or in all those of a run, and whether it is whole."""

import json as json_form
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

from rich.console import Console
from tyro.conf import Positional, arg

from chimera.cli.options import Flag
from chimera.cli.terminal import console, print_table, print_wrapped
from chimera.errors import CheckpointError, UsageError
from chimera.train.checkpoint import Checkpoint, read_checkpoint
from chimera.train.config import TrainConfig
from chimera.train.families import family_of
from chimera.train.folder import CHECKPOINTS, MARKER, checkpoint_steps
from chimera.train.state import MODEL
from chimera.train.stored import StoredTensor, config_of, faults, stored_tensors

__all__ = ["checkpoint_inspect", "find_checkpoint"]


@dataclass(frozen=True, slots=True)
class _Found:
    """A checkpoint as it was found: what it says of itself, its tensors, and what is wrong with it."""

    path: Path
    checkpoint: Checkpoint | None
    config: TrainConfig | None
    tensors: dict[str, StoredTensor]
    faults: list[str]


def checkpoint_inspect(
    path: Annotated[Path, Positional, arg(metavar="RUN|CHECKPOINT", help_behavior_hint="")],
    *,
    tensors: Flag = False,
    json: Flag = False,
) -> None:
    """Show what is in a checkpoint: step, layout, sizes, tensors, and whether it is whole.

    Only the heads of its files are read. A checkpoint is whole when its files have the sizes that were written, and
    every parameter of its model and every moment of its optimizer is there in its shape. Of a run all are shown.

    Example:
        chimera checkpoint inspect runs/bert-tiny

    Args:
        path: the folder of a run, or of one checkpoint in it
        tensors: list every tensor with its shape, type and file
        json: print the same as a JSON document

    Raises:
        CheckpointError: one of them is not whole; what is wrong with each has been printed.
    """
    found = [_look_at(each) for each in _checkpoints(path)]
    if json:
        print(json_form.dumps([_as_dict(each, tensors=tensors) for each in found], indent=1))
    else:
        out = console()
        for number, each in enumerate(found):
            if number:
                out.print()
            _print(out, each, tensors=tensors)
    broken = [str(each.path) for each in found if each.faults]
    if broken:
        raise CheckpointError(f"not whole: {', '.join(broken)}")


def find_checkpoint(path: Path) -> Path:
    """Return the checkpoint at ``path``, or the newest one where that is the folder of a run.

    Raises:
        UsageError: it is neither.
    """
    return _checkpoints(path)[-1]


def _checkpoints(path: Path) -> list[Path]:
    if (path / MARKER).is_file():
        return [path]
    steps = checkpoint_steps(path / CHECKPOINTS)
    if steps:
        return list(steps.values())
    what = "does not exist" if not path.exists() else f"has neither {MARKER} nor complete checkpoints in {CHECKPOINTS}/"
    raise UsageError(f"{path} {what}; give the folder of a run, as in runs/bert-tiny, or of one checkpoint in it")


def _look_at(path: Path) -> _Found:
    """Read a checkpoint as far as it can be read."""
    checkpoint: Checkpoint | None = None
    config: TrainConfig | None = None
    tensors: dict[str, StoredTensor] = {}
    try:
        checkpoint = read_checkpoint(path)
        tensors = stored_tensors(checkpoint)
        config = config_of(checkpoint)
        found = faults(checkpoint, tensors, config)
    except CheckpointError as error:
        found = [str(error)]
    return _Found(path, checkpoint, config, tensors, found)


def _print(out: Console, found: _Found, *, tensors: bool) -> None:
    state = "whole" if not found.faults else "not whole"
    step = "" if found.checkpoint is None else f" step {found.checkpoint.step:,},"
    out.print(f"{found.path}:{step} {state}", style="green" if not found.faults else "bold red")
    for fault in found.faults:
        print_wrapped(out, fault, indent=" " * 14, first="  wrong       ")
    if found.checkpoint is not None:
        for name, fact in _facts(found, found.checkpoint).items():
            out.print(f"  {name:10}  {fact}")
    if tensors and found.tensors:
        out.print()
        rows = [
            (each.name, " × ".join(map(str, each.shape)) or "1", each.dtype, f"{each.num_bytes:,}", each.file.name)
            for each in found.tensors.values()
        ]
        print_table(out, ("tensor", "shape", "type", "bytes", "file"), rows)


def _facts(found: _Found, checkpoint: Checkpoint) -> dict[str, str]:
    facts: dict[str, str] = {}
    if found.config is not None:
        config, model, parallel = found.config, found.config.model, found.config.parallel
        facts["model"] = (
            f"{family_of(model).title}, {model.num_layers} layers, hidden size {model.hidden_size}, "
            f"trained in {config.train.dtype}"
        )
        facts["layout"] = (
            f"{config.schedule.name}; {config.world_size} = {parallel.pipeline} pipeline x {parallel.data} data x "
            f"{parallel.tensor} tensor ranks{', optimizer sharded' if parallel.shard_optimizer else ''}; it fits any "
            f"other with {checkpoint.description['global_batch']} samples a step"
        )
        updates = checkpoint.description["progress"]["updates"]
        facts["optimizer"] = f"{config.optimizer.name} after {updates:,} updates"
    files = sorted({each.file for each in found.tensors.values()})
    for part, held in _parts(found.tensors).items():
        numbers = sum(each.num_elements for each in held)
        types = ", ".join(dict.fromkeys(each.dtype for each in held))
        facts[part] = f"{numbers:,} values in {len(held):,} tensors, {types}, {_size(sum(e.num_bytes for e in held))}"
    facts["files"] = (
        f"{len(files)}, {_size(sum(file.stat().st_size for file in files))}, written {_written(checkpoint.path)}"
    )
    return facts


def _parts(tensors: dict[str, StoredTensor]) -> dict[str, list[StoredTensor]]:
    """Return the tensors by what they are: weights, or a moment's name."""
    parts: dict[str, list[StoredTensor]] = {}
    for each in tensors.values():
        first, second = (*each.name.split(".", 2), "")[:2]
        parts.setdefault("weights" if first == MODEL else second, []).append(each)
    return {"weights": parts.pop("weights", []), **parts}


def _written(path: Path) -> str:
    return datetime.fromtimestamp((path / MARKER).stat().st_mtime, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")


def _size(num_bytes: int) -> str:
    """Return bytes in the unit that suits them.

    >>> _size(900), _size(5_000), _size(3 * 2**30)
    ('900 bytes', '4.9 KiB', '3.0 GiB')
    """
    size, unit = float(num_bytes), "bytes"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if size < 1024:
            break
        size, unit = size / 1024, larger
    return f"{num_bytes} bytes" if unit == "bytes" else f"{size:,.1f} {unit}"


def _as_dict(found: _Found, *, tensors: bool) -> dict[str, Any]:
    checkpoint = found.checkpoint
    parts = {
        part: {
            "tensors": len(held),
            "values": sum(each.num_elements for each in held),
            "bytes": sum(each.num_bytes for each in held),
        }
        for part, held in _parts(found.tensors).items()
    }
    document: dict[str, Any] = {
        "path": str(found.path),
        "whole": not found.faults,
        "faults": found.faults,
        "step": None if checkpoint is None else checkpoint.step,
        "description": None if checkpoint is None else dict(checkpoint.description),
        "parts": parts,
    }
    if tensors:
        document["tensors"] = [
            {"name": e.name, "shape": list(e.shape), "dtype": e.dtype, "bytes": e.num_bytes, "file": e.file.name}
            for e in found.tensors.values()
        ]
    return document
