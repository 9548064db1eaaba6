"""How text is read: the form of the file, and what makes a sequence."""

from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal, get_args

from chimera.errors import UsageError, nearest_names

__all__ = ["Sentences", "TextForm", "TextOptions", "form_of"]

TextForm = Literal["segmented", "lines", "json", "parquet"]
Sentences = Literal["document", "line", "split"]

_COMPRESSIONS: Final = {".gz", ".bz2", ".xz", ".zst"}
_FORMS: Final[dict[str, TextForm]] = {
    ".jsonl": "json",
    ".json": "json",
    ".ndjson": "json",
    ".parquet": "parquet",
    ".txt": "segmented",
    ".text": "segmented",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class TextOptions:
    """How documents and their sequences are found.

    Attributes:
        form: "segmented" has one sentence per line and a blank line after each document, "lines" one document per
            line, "json" one object per line, "parquet" one row per document.
        field: name of the text in a JSON object or of a Parquet column.
        sentences: what of a document becomes a sequence: the whole "document", each "line", or each sentence that the
            splitter finds ("split"). Segmented text has its sentences already.
        language: of the sentence splitter, as ISO 639-1 names it.
    """

    form: TextForm = "segmented"
    field: str = "text"
    sentences: Sentences = "line"
    language: str = "en"

    def __post_init__(self) -> None:
        """Refuse unknown choices, and a second division of segmented text."""
        for option, choices in (("form", get_args(TextForm)), ("sentences", get_args(Sentences))):
            value = getattr(self, option)
            if value not in choices:
                raise UsageError(
                    f"--{option} {value} is unknown{nearest_names(value, choices)}; choose {', '.join(choices)}"
                )
        if self.form == "segmented" and self.sentences == "split":
            raise UsageError(
                "segmented text has one sentence per line already; leave out --sentences split, or say with "
                "--form lines that each line is a document"
            )


def form_of(path: Path) -> TextForm:
    """Tell the form by the name, an ending of compression apart.

    >>> form_of(Path("wiki.jsonl.zst")), form_of(Path("wiki.txt"))
    ('json', 'segmented')

    Raises:
        UsageError: the name says nothing.
    """
    suffixes = [suffix for suffix in path.suffixes if suffix not in _COMPRESSIONS]
    form = _FORMS.get(suffixes[-1]) if suffixes else None
    if form is None:
        raise UsageError(
            f"{path}: its name does not tell the form of text; give --form, one of {', '.join(get_args(TextForm))}"
        )
    return form
