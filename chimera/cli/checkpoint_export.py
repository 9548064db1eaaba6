"""``chimera checkpoint export``: the weights of a checkpoint as a folder that transformers opens."""

from pathlib import Path
from typing import Annotated, Literal

from tyro.conf import Positional, arg

from chimera.cli.checkpoint_inspect import find_checkpoint
from chimera.cli.weight_files import bytes_of_a_file, file_progress
from chimera.train.checkpoint import read_checkpoint
from chimera.train.conversion import EXPORT_TYPES, export_checkpoint
from chimera.train.families import family_of

__all__ = ["checkpoint_export"]


def checkpoint_export(
    path: Annotated[Path, Positional, arg(metavar="RUN|CHECKPOINT", help_behavior_hint="")],
    *,
    out: Annotated[Path, arg(metavar="DIR", help_behavior_hint="")],
    dtype: Literal["fp32", "bf16", "fp16"] = "fp32",
    file_gib: float = 2.0,
) -> None:
    """Write the weights of a checkpoint in transformers' layout: safetensors files, their index and config.json.

    File by file, so that a model of any size needs the memory of about two of its files. Of a run the newest checkpoint
    is taken. The folder appears when it is complete; 'train.weights' of a configuration takes it too.

    Example:
        chimera checkpoint export runs/bert-tiny --out bert-tiny-hf

    Args:
        path: the folder of a run, or of one checkpoint in it
        out: the folder to write; it must not exist
        dtype: number format of the weights written
        file_gib: most GiB of one file
    """
    file_bytes = bytes_of_a_file(file_gib)
    checkpoint = read_checkpoint(find_checkpoint(path))
    model = export_checkpoint(checkpoint, out, dtype=EXPORT_TYPES[dtype], file_bytes=file_bytes, report=file_progress)
    print(f"{family_of(model).title} of step {checkpoint.step:,} in {dtype}: {out}")
