"""Checkpoints on disk: named tensors and a description, complete or not there at all.

``step-00000300/`` holds safetensors files, written by ``torch.distributed.checkpoint``, and ``checkpoint.json``, which
is written last. The folder gets its name when everything in it is on the disk, so a process killed at any moment leaves
the checkpoints before it as they were. Reading runs no pickled code. What the tensors mean is ``state``'s business.
"""

import json
import os
import shutil
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from chimera.errors import CheckpointError, FormatError
from chimera.ir.files import check_keys, read_json_object
from chimera.runtime.groups import Groups
from chimera.train.folder import MARKER, checkpoint_path, checkpoint_steps

__all__ = [
    "Checkpoint",
    "building_checkpoint",
    "latest_checkpoint",
    "load_tensors",
    "read_checkpoint",
    "save_checkpoint",
]

_FORMAT: Final = "chimera-checkpoint"
_VERSION: Final = 2


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A complete checkpoint.

    Attributes:
        path: its folder.
        step: steps done.
        description: what was given to ``save_checkpoint``.
    """

    path: Path
    step: int
    description: Mapping[str, Any]


def latest_checkpoint(folder: Path) -> Checkpoint | None:
    """Return the newest complete checkpoint in ``folder``, or None.

    Raises:
        CheckpointError: it is damaged.
    """
    paths = list(checkpoint_steps(folder).values())
    return read_checkpoint(paths[-1]) if paths else None


def read_checkpoint(path: Path) -> Checkpoint:
    """Read a checkpoint's description and see that its files are whole.

    Raises:
        CheckpointError: it has no description, or a file is missing or of another size.
    """
    try:
        data = read_json_object(path / MARKER, format_name=_FORMAT, version=_VERSION)
        check_keys(data, required={"step", "files", "description"}, optional=set(), where=str(path / MARKER))
    except FormatError as error:
        raise CheckpointError(
            f"{error}; the checkpoint {path} cannot be used, delete it to go on from another"
        ) from None
    for name, size in data["files"].items():
        found = (path / name).stat().st_size if (path / name).is_file() else None
        if found != size:
            got = "is missing" if found is None else f"has {found} bytes, {size} were written"
            raise CheckpointError(
                f"{path / name} {got}; the checkpoint is damaged, delete {path} to go on from another"
            )
    return Checkpoint(path, int(data["step"]), data["description"])


def save_checkpoint(
    folder: Path, step: int, tensors: Mapping[str, Tensor], description: Mapping[str, Any], groups: Groups, *, keep: int
) -> Path:
    """Save together with all ranks of ``groups``, then delete all but the ``keep`` newest; a collective.

    Args:
        folder: where checkpoints are; one file system for all ranks.
        step: steps done.
        tensors: what this rank saves; over all ranks, each name once.
        description: JSON.
        groups: this rank's place.
        keep: checkpoints that stay, this one included.

    Raises:
        CheckpointError: some rank could not write; no checkpoint has changed.
    """
    final = checkpoint_path(folder, step)
    building = _building_of(final)
    file = f"shard-00001-model-{groups.rank + 1:05d}-of-{groups.size:05d}.safetensors"
    written = [0.0] * groups.size
    written[groups.rank] = float(bool(tensors))
    written = groups.sum_everywhere(torch.tensor(written, dtype=torch.float64)).tolist()

    def clear() -> None:
        shutil.rmtree(building, ignore_errors=True)
        building.mkdir(parents=True)

    def complete() -> None:
        found = len(list(building.iterdir()))
        if found != sum(written):
            raise CheckpointError(
                f"{sum(written):.0f} ranks wrote, {found} files are here; train.out must be a folder that all "
                "hosts share"
            )
        _publish(building, final, step, description)
        for old in list(checkpoint_steps(folder).values())[:-keep]:
            # Without its marker it is no checkpoint any more, however far the deletion gets.
            (old / MARKER).unlink()
            shutil.rmtree(old)

    try:
        _agreed(groups, final, clear if groups.rank == 0 else None)
        _agreed(groups, final, (lambda: _write_tensors(building, file, tensors, groups)) if tensors else None)
        _agreed(groups, final, complete if groups.rank == 0 else None)
    finally:
        if groups.rank == 0:
            shutil.rmtree(building, ignore_errors=True)
    return final


@contextmanager
def building_checkpoint(folder: Path, step: int, description: Mapping[str, Any]) -> Iterator[Path]:
    """Yield an empty folder to write safetensors files into; afterwards it is the checkpoint of ``step``.

    For a process on its own; after an exception nothing of it is left.
    """
    final = checkpoint_path(folder, step)
    building = _building_of(final)
    shutil.rmtree(building, ignore_errors=True)
    building.mkdir(parents=True)
    try:
        yield building
        for path in building.iterdir():
            with path.open("rb+") as file:
                os.fsync(file.fileno())
        _publish(building, final, step, description)
    finally:
        shutil.rmtree(building, ignore_errors=True)


def load_tensors(path: Path, wanted: Callable[[str], bool]) -> dict[str, Tensor]:
    """Return the tensors of a checkpoint whose names are ``wanted``, on the CPU.

    Raises:
        CheckpointError: a file cannot be read.
    """
    try:
        with _on_its_own():
            reader = HuggingFaceStorageReader(str(path))
            stored: dict[str, Any] = reader.read_metadata().state_dict_metadata
            tensors = {
                name: torch.empty(entry.size, dtype=entry.properties.dtype)
                for name, entry in stored.items()
                if wanted(name)
            }
            if tensors:
                load(tensors, storage_reader=HuggingFaceStorageReader(str(path)), no_dist=True)
    except Exception as error:
        raise CheckpointError(f"{path} cannot be read: {error}; delete it to go on from another checkpoint") from error
    return tensors


def _building_of(final: Path) -> Path:
    return final.with_name(f".saving-{final.name}")


def _publish(building: Path, final: Path, step: int, description: Mapping[str, Any]) -> None:
    """Describe what has been built, bring it to the disk, and give it its name."""
    files = {path.name: path.stat().st_size for path in sorted(building.iterdir())}
    marker = {"format": _FORMAT, "version": _VERSION, "step": step, "files": files, "description": description}
    _write_synced(building / MARKER, json.dumps(marker, indent=1))
    _sync_folder(building)
    shutil.rmtree(final, ignore_errors=True)  # of this step, and damaged: a complete one is not saved again
    building.rename(final)
    _sync_folder(final.parent)


def _write_tensors(folder: Path, file: str, tensors: Mapping[str, Tensor], groups: Groups) -> None:
    # Every rank writes for itself: the collective form of ``dcp.save`` exchanges pickled plans to find out who writes
    # what, which the caller knows. The writer names a file by the numbers it is given; the last one is the highest.
    numbers = {**dict.fromkeys(tensors, groups.rank + 1), "": groups.size}
    writer = HuggingFaceStorageWriter(str(folder), fqn_to_index_mapping=numbers, save_distributed=True)
    with _on_its_own():
        save(dict(tensors), storage_writer=writer, no_dist=True)
    assert (folder / file).is_file(), f"{file} is what the writer calls its file"


@contextmanager
def _on_its_own() -> Iterator[None]:
    """Keep torch from warning that it works without a process group, which is what is asked of it."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled", category=UserWarning)
        yield


def _agreed(groups: Groups, path: Path, action: Callable[[], None] | None) -> None:
    """Do ``action`` where there is one, and raise on every rank if it failed on any."""
    error: Exception | None = None
    if action is not None:
        try:
            action()
        except Exception as caught:  # noqa: BLE001 - raised below, once all ranks know
            error = caught
    failed = groups.sum_everywhere(torch.tensor([float(error is not None)], dtype=torch.float64))
    if error is not None:
        raise CheckpointError(
            f"rank {groups.rank} could not save {path}: {error}; earlier checkpoints are as they were"
        )
    if failed:
        raise CheckpointError(f"{path} was not saved, another rank failed; earlier checkpoints are as they were")


def _write_synced(path: Path, text: str) -> None:
    with path.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def _sync_folder(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
