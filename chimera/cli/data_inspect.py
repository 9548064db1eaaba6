"""``chimera data inspect``: what is in an indexed dataset."""

import json as json_form
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, Final

import numpy as np
from numpy.typing import NDArray
from tyro.conf import Positional, arg

from chimera.cli.options import FileOption, Flag
from chimera.cli.terminal import console, print_wrapped
from chimera.data.indexed import IndexedDataset
from chimera.data.indexed.dataset import blocks
from chimera.data.indexed.layout import data_path, index_path
from chimera.data.prepare import tokenizer_path
from chimera.data.text_tokenizer import TextTokenizer
from chimera.data.tokenizer_files import read_tokenizer
from chimera.errors import UsageError

__all__ = ["DatasetFacts", "data_inspect", "dataset_facts"]

_SHOWN_TOKENS: Final = 64
_Prefix = Annotated[Path, Positional, arg(metavar="DATASET", help_behavior_hint="")]


@dataclass(frozen=True, slots=True)
class DatasetFacts:
    """What ``--json`` prints; lengths are in tokens, of sequences."""

    index: str
    token_type: str
    documents: int
    empty_documents: int
    sequences: int
    tokens: int
    shortest: int
    mean: float
    longest: int
    highest_id: int
    spare_bytes: int
    multimodal: bool
    first: list[list[int]]
    first_text: list[str] | None


def data_inspect(dataset: _Prefix, *, samples: int = 3, tokenizer: FileOption = None, json: Flag = False) -> None:
    """Prove an indexed dataset, and say what is in it: counts, lengths, and its first sequences as text.

    Example:
        chimera data inspect data/wiki

    Args:
        dataset: common part of the names of the .bin and .idx files
        samples: sequences to show
        tokenizer: a tokenizer's file (default: DATASET.tokenizer.json, where it is)
        json: print a JSON document instead
    """
    if samples < 0:
        raise UsageError(f"--samples {samples}; needed: 0 or more")
    opened = IndexedDataset(dataset)
    beside = tokenizer_path(opened.prefix)
    path = tokenizer or (beside if beside.is_file() else None)
    facts = dataset_facts(opened, samples, None if path is None else read_tokenizer(path))
    if json:
        print(json_form.dumps(asdict(facts), indent=1, ensure_ascii=False))
        return
    _print(facts, opened)


def dataset_facts(dataset: IndexedDataset, samples: int, tokenizer: TextTokenizer | None) -> DatasetFacts:
    """Count and measure a dataset; its tokens are read once, in blocks.

    Raises:
        UsageError: the tokenizer has fewer tokens than the dataset's ids.
    """
    lengths = dataset.lengths
    starts = dataset.document_starts
    highest = _highest(dataset.tokens)
    whole = np.issubdtype(dataset.tokens.dtype, np.integer)
    if tokenizer is not None and highest >= tokenizer.size:
        raise UsageError(
            f"{data_path(dataset.prefix)} has the id {highest}, {tokenizer.name} only ids below {tokenizer.size}; give "
            "the dataset's own --tokenizer"
        )
    first = [dataset[index][:_SHOWN_TOKENS].tolist() for index in range(min(samples, len(dataset)))] if whole else []
    return DatasetFacts(
        index=str(index_path(dataset.prefix)),
        token_type=str(dataset.tokens.dtype),
        documents=dataset.num_documents,
        empty_documents=sum(
            int((starts[a : b + 1][1:] == starts[a : b + 1][:-1]).sum()) for a, b in blocks(dataset.num_documents)
        ),
        sequences=len(dataset),
        tokens=len(dataset.tokens),
        shortest=int(lengths.min(initial=np.iinfo(np.int32).max)) if len(lengths) else 0,
        mean=round(len(dataset.tokens) / len(lengths), 2) if len(lengths) else 0.0,
        longest=int(lengths.max(initial=0)),
        highest_id=highest,
        spare_bytes=dataset.num_spare_bytes,
        multimodal=dataset.modes is not None,
        first=first,
        first_text=None if tokenizer is None else [tokenizer.decode(ids) for ids in first],
    )


def _highest(tokens: NDArray[Any]) -> int:
    return max((int(tokens[first:last].max()) for first, last in blocks(len(tokens))), default=-1)


def _print(facts: DatasetFacts, dataset: IndexedDataset) -> None:
    out = console()
    rows = [
        ("documents", f"{facts.documents:,}", f"{facts.empty_documents:,} of them empty"),
        (
            "sequences",
            f"{facts.sequences:,}",
            f"{facts.shortest:,} to {facts.longest:,} tokens, {facts.mean} on average",
        ),
        ("tokens", f"{facts.tokens:,}", f"{facts.token_type}, the highest id is {facts.highest_id:,}"),
    ]
    out.print(f"{facts.index}: index and data agree")
    width = max(len(number) for _, number, _ in rows)
    for name, amount, note in rows:
        out.print(f"  {name:9}  {amount:>{width}}  {note}")
    if facts.multimodal:
        out.print("  a mode per sequence: a multimodal set")
    if facts.spare_bytes:
        print_wrapped(out, f"{facts.spare_bytes:,} bytes of the data file lie behind the last sequence", "  ")
    for number, ids in enumerate(facts.first):
        more = " …" if len(dataset[number]) > len(ids) else ""
        text = " ".join(map(str, ids)) if facts.first_text is None else repr(facts.first_text[number])
        out.print()
        print_wrapped(out, f"{text}{more}", "     ", f"{number:3}  ")
    if facts.first_text is None and facts.first:
        out.print()
        print_wrapped(out, "Give --tokenizer to see text in place of ids.")
