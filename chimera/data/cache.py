"""Tokenised corpora on disk.

Knows how a tokenizer and the corpus it made are stored as one file under a name that stands for all their inputs, and
how many processes at once may ask for it: one makes it, the others wait, and a reader sees a complete file or none.
Refuses to know what the inputs are. A file is an uncompressed ``.npz`` without pickled objects.
"""

import hashlib
import json
import os
import tempfile
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from chimera.data.index_cache import locked
from chimera.data.text_tokenizer import TextTokenizer
from chimera.data.tokens import TokenizedDocuments
from chimera.errors import DataError

__all__ = ["TokenizedCorpus", "cached_corpus"]


@dataclass(frozen=True, slots=True, eq=False)
class TokenizedCorpus:
    """A corpus, the tokenizer that made it, and how many sentences gave no token and are not in it."""

    documents: TokenizedDocuments
    tokenizer: TextTokenizer
    num_empty_sentences: int


def cached_corpus(
    folder: Path, inputs: Mapping[str, str | int | float | bool | None], make: Callable[[], TokenizedCorpus]
) -> TokenizedCorpus:
    """Load what ``make`` made of these inputs before, or make and keep it.

    Raises:
        DataError: the folder cannot be written, or the file in it is damaged.
    """
    digest = hashlib.sha256(json.dumps(inputs, sort_keys=True).encode()).hexdigest()
    path = folder / f"tokens-{digest[:24]}.npz"
    if path.exists():
        return _load(path)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with locked(path.with_suffix(".lock")):
            if not path.exists():
                _save(make(), path)
    except OSError as error:
        raise DataError(
            f"tokenised corpus cannot be kept in {folder}: {error.strerror or error}; "
            "set data.cache_dir to a folder that can be written"
        ) from error
    return _load(path)


def _save(corpus: TokenizedCorpus, path: Path) -> None:
    """Write under another name, then rename: complete or absent, whoever else writes."""
    with tempfile.NamedTemporaryFile(dir=path.parent, suffix=".tmp", delete=False) as file:
        try:
            np.savez(
                file,
                tokens=corpus.documents.tokens,
                sentence_bounds=np.append(corpus.documents.sentence_starts, len(corpus.documents.tokens)),
                document_starts=corpus.documents.document_starts,
                tokenizer=np.frombuffer(corpus.tokenizer.to_json().encode(), dtype=np.uint8),
                num_empty_sentences=np.array(corpus.num_empty_sentences),
            )
            file.flush()
            os.fsync(file.fileno())
            Path(file.name).replace(path)
        except BaseException:
            Path(file.name).unlink(missing_ok=True)
            raise


def _load(path: Path) -> TokenizedCorpus:
    try:
        with path.open("rb") as file, np.load(file, allow_pickle=False) as arrays:
            documents = TokenizedDocuments.contiguous(
                arrays["tokens"], arrays["sentence_bounds"], arrays["document_starts"]
            )
            tokenizer = TextTokenizer.from_json(arrays["tokenizer"].tobytes().decode(), name=str(path))
            return TokenizedCorpus(documents, tokenizer, int(arrays["num_empty_sentences"]))
    except (OSError, EOFError, ValueError, KeyError, zipfile.BadZipFile, DataError) as error:
        raise DataError(
            f"tokenised corpus {path} is damaged ({error}); delete the file, it will be made again"
        ) from error
