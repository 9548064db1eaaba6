"""``chimera data merge``: several indexed datasets as one."""

import shutil
import sys
from pathlib import Path
from typing import Annotated

from tyro.conf import Positional, arg

from chimera.cli.options import Flag
from chimera.cli.terminal import console, print_wrapped
from chimera.data.indexed import merge_datasets
from chimera.data.indexed.layout import dataset_prefix, index_path
from chimera.data.prepare import tokenizer_path

__all__ = ["data_merge"]

_Prefixes = Annotated[tuple[Path, ...], Positional, arg(metavar="DATASET", help_behavior_hint="")]


def data_merge(datasets: _Prefixes, *, out: Path, overwrite: Flag = False) -> None:
    """Join indexed datasets in the order given, in constant memory whatever their size.

    Example:
        chimera data merge data/part-0 data/part-1 --out data/whole

    Args:
        datasets: common parts of the names of .bin and .idx files
        out: likewise, of the dataset to write
        overwrite: replace a dataset of that name
    """
    merged = merge_datasets(datasets, out, overwrite=overwrite)
    _keep_tokenizer([dataset_prefix(path) for path in datasets], merged.prefix)
    print_wrapped(
        console(),
        f"{index_path(merged.prefix)}: {merged.num_documents:,} documents, {len(merged):,} sequences, "
        f"{len(merged.tokens):,} tokens",
    )


def _keep_tokenizer(prefixes: list[Path], out: Path) -> None:
    """Copy the datasets' tokenizer where all have the same."""
    files = [tokenizer_path(prefix) for prefix in prefixes]
    target = tokenizer_path(out)
    if all(path.is_file() for path in files) and len({path.read_bytes() for path in files}) == 1:
        if target not in files:
            shutil.copyfile(files[0], target)
        return
    target.unlink(missing_ok=True)
    print(
        f"the datasets do not all have the same tokenizer.json beside them, so {target} is not written", file=sys.stderr
    )
