"""``chimera data build``: text files to an indexed dataset."""

import json as json_form
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

from tyro.conf import Positional, arg

from chimera.cli.options import Flag
from chimera.cli.progress import byte_progress
from chimera.cli.terminal import console, print_wrapped
from chimera.data.indexed.layout import index_path
from chimera.data.prepare import build_dataset, usable_cores
from chimera.data.text.options import Sentences, TextForm, TextOptions, form_of
from chimera.data.tokenizer_files import read_tokenizer
from chimera.errors import UsageError

__all__ = ["BuiltDataset", "FieldOption", "FormOption", "data_build", "text_options"]

_Inputs = Annotated[tuple[Path, ...], Positional, arg(metavar="FILE", help_behavior_hint="")]
FormOption = Annotated[
    TextForm | None, arg(constructor=TextForm, metavar="{segmented,lines,json,parquet}", help_behavior_hint="")
]
FieldOption = Annotated[str, arg(metavar="NAME")]
_Sentences = Annotated[
    Sentences | None, arg(constructor=Sentences, metavar="{document,line,split}", help_behavior_hint="")
]
_Text = Annotated[str | None, arg(constructor=str, metavar="TEXT", help_behavior_hint="")]
_Count = Annotated[int | None, arg(constructor=int, metavar="N", help_behavior_hint="")]


@dataclass(frozen=True, slots=True)
class BuiltDataset:
    """What ``--json`` prints."""

    index: str
    documents: int
    empty_documents: int
    sequences: int
    empty_sequences_left_out: int
    tokens: int
    bytes_per_token: int
    text_bytes: int


def data_build(
    files: _Inputs,
    *,
    out: Path,
    tokenizer: Path,
    form: FormOption = None,
    field: FieldOption = "text",
    sentences: _Sentences = None,
    language: str = "en",
    end_token: _Text = None,
    lowercase: Annotated[bool | None, arg(constructor=bool, help_behavior_hint="")] = None,
    workers: _Count = None,
    overwrite: Flag = False,
    json: Flag = False,
) -> None:
    """Tokenise text into an indexed dataset, OUT.bin and OUT.idx, in the format of Megatron-LM.

    The files may be compressed by gzip, bzip2, xz or Zstandard. The dataset is the same for any number of workers, and
    appears when it is complete. OUT.tokenizer.json keeps the tokenizer.

    Example:
        chimera data build wiki.jsonl.zst --out data/wiki --tokenizer gpt2/merges.txt --end-token "<|endoftext|>"

    Args:
        files: text files of one form, in the order of their documents
        out: common part of the names of the dataset's files
        tokenizer: a tokenizer.json, vocab.txt, merges.txt, SentencePiece model, or the folder of one
        form: one sentence per line and a blank line after each document; a document per line; JSON lines; Parquet
            (default: by the files' names)
        field: name of the text in JSON lines or Parquet
        sentences: what becomes a sequence: whole documents, lines, or the sentences of each line (default: lines of
            segmented text, documents of anything else)
        language: of the text, for --sentences split
        end_token: token to append to each document (default: none)
        lowercase: whether to lower-case text, with a vocab.txt (default: yes)
        workers: processes that tokenise (default: one per core)
        overwrite: replace a dataset of that name
        json: print a JSON document instead
    """
    if workers is not None and workers < 1:
        raise UsageError(f"--workers {workers}; needed: 1 or more")
    options = text_options(files, form, field, sentences, language)
    loaded = read_tokenizer(tokenizer, lowercase=lowercase)
    end = None if end_token is None else loaded.id_of(end_token)
    with byte_progress("tokenising") as report:
        made = build_dataset(
            files,
            out,
            tokenizer=loaded,
            options=options,
            end_token=end,
            workers=workers or usable_cores(),
            overwrite=overwrite,
            report=lambda now: report(now.read_bytes, now.total_bytes),
        )
    dataset = made.dataset
    built = BuiltDataset(
        index=str(index_path(dataset.prefix)),
        documents=dataset.num_documents,
        empty_documents=made.num_empty_documents,
        sequences=len(dataset),
        empty_sequences_left_out=made.num_empty_sequences,
        tokens=len(dataset.tokens),
        bytes_per_token=dataset.tokens.itemsize,
        text_bytes=made.text_bytes,
    )
    if json:
        print(json_form.dumps(asdict(built), indent=1))
        return
    print_wrapped(
        console(),
        f"{built.index}: {built.documents:,} documents, {built.sequences:,} sequences, {built.tokens:,} tokens of "
        f"{built.bytes_per_token} bytes from {built.text_bytes:,} bytes of text",
    )
    if made.num_empty_documents:
        print(f"{made.num_empty_documents:,} documents have no token; they are kept, empty", file=sys.stderr)
    if made.num_empty_sequences:
        print(f"{made.num_empty_sequences:,} sequences had no token and are left out", file=sys.stderr)


def text_options(
    files: tuple[Path, ...], form: TextForm | None, field: str, sentences: Sentences | None, language: str
) -> TextOptions:
    """Return how files are read, with what their names say filled in.

    Raises:
        UsageError: files of several forms, or an option that the form does not have.
    """
    if not files:
        raise UsageError("no input; give one or more text files")
    forms = {path: form or form_of(path) for path in files}
    if len(set(forms.values())) > 1:
        described = ", ".join(f"{path} ({found})" for path, found in forms.items())
        raise UsageError(f"the files are of different forms: {described}; build a dataset of each and merge them")
    chosen = next(iter(forms.values()))
    if field != "text" and chosen not in {"json", "parquet"}:
        raise UsageError(f"--field {field} is for JSON lines and Parquet; {chosen} text has no fields: leave it out")
    if language != "en" and sentences != "split":
        raise UsageError(f"--language {language} is for --sentences split; add that, or leave it out")
    default: Sentences = "line" if chosen == "segmented" else "document"
    return TextOptions(form=chosen, field=field, sentences=sentences or default, language=language)
