"""``chimera data tokenizer``: train a tokenizer, or write another maker's as a tokenizer.json."""

from pathlib import Path
from typing import Annotated, get_args

from tyro.conf import Positional, arg

from chimera.cli.data_build import FieldOption, FormOption, text_options
from chimera.cli.options import FileOption, Flag
from chimera.cli.terminal import console, print_wrapped
from chimera.data.text_tokenizer import TextTokenizer
from chimera.data.tokenizer_files import read_tokenizer
from chimera.data.tokenizer_training import TextFiles, TokenizerKind, train_tokenizer
from chimera.errors import UsageError, nearest_names
from chimera.ir.files import replacing

__all__ = ["data_tokenizer"]

_Files = Annotated[tuple[Path, ...], Positional, arg(metavar="FILE", help_behavior_hint="")]
_Kind = Annotated[
    TokenizerKind | None, arg(constructor=TokenizerKind, metavar="{wordpiece,bpe,unigram}", help_behavior_hint="")
]
_Count = Annotated[int | None, arg(constructor=int, metavar="N", help_behavior_hint="")]


def data_tokenizer(
    files: _Files = (),
    *,
    out: Path,
    kind: _Kind = None,
    vocab_size: _Count = None,
    take: FileOption = None,
    lowercase: Annotated[bool | None, arg(constructor=bool, help_behavior_hint="")] = None,
    form: FormOption = None,
    field: FieldOption = "text",
    overwrite: Flag = False,
) -> None:
    """Train a tokenizer on text, or take one from a file, and write it as a tokenizer.json.

    WordPiece comes with BERT's special tokens, BPE with GPT-2's, Unigram with T5's.

    Example:
        chimera data tokenizer wiki.txt --kind wordpiece --vocab-size 30522 --out tokenizer.json
        chimera data tokenizer --take gpt2/merges.txt --out tokenizer.json

    Args:
        files: text to train on, as for 'chimera data build'
        out: the tokenizer.json to write
        kind: what to train
        vocab_size: tokens of the vocabulary to train, special ones included
        take: a tokenizer.json, vocab.txt, merges.txt or SentencePiece model to take in place of training
        lowercase: whether WordPiece lower-cases text and strips accents (default: yes)
        form: of the text (default: by the files' names)
        field: name of the text in JSON lines or Parquet
        overwrite: replace a file of that name
    """
    if out.exists() and not overwrite:
        raise UsageError(f"{out} exists; give another name, or --overwrite to replace it")
    if take is not None:
        if files or kind or vocab_size:
            raise UsageError("--take takes a tokenizer as it is; leave out the text files, --kind and --vocab-size")
        tokenizer = read_tokenizer(take, lowercase=lowercase)
    else:
        tokenizer = _trained(files, kind, vocab_size, lowercase=lowercase, form=form, field=field)
    with replacing(out) as path:
        path.write_text(tokenizer.to_json(), encoding="utf-8")
    print_wrapped(console(), f"{out}: {tokenizer.size:,} tokens")


def _trained(
    files: tuple[Path, ...],
    kind: TokenizerKind | None,
    vocab_size: int | None,
    *,
    lowercase: bool | None,
    form: FormOption,
    field: str,
) -> TextTokenizer:
    kinds = get_args(TokenizerKind)
    if not files or kind is None or vocab_size is None:
        raise UsageError(
            "training needs text files, --kind and --vocab-size, as in: wiki.txt --kind wordpiece --vocab-size 30522; "
            "or give --take FILE"
        )
    if kind not in kinds:
        raise UsageError(f"--kind {kind} is unknown{nearest_names(kind, kinds)}; choose one of {', '.join(kinds)}")
    if vocab_size < 1:
        raise UsageError(f"--vocab-size {vocab_size}; needed: 1 or more, 30522 is BERT's")
    if lowercase is not None and kind != "wordpiece":
        raise UsageError("--lowercase is for WordPiece; BPE and Unigram keep the text as it is: leave it out")
    sentences = TextFiles(files, text_options(files, form, field, None, "en"))
    return train_tokenizer(sentences, kind=kind, vocab_size=vocab_size, lowercase=lowercase is not False)
