"""A real piece of a dump of Wikipedia, as the gensim package ships it, and dumps that cannot be read."""

import bz2
import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest

from chimera.data.corpus import read_segmented_text
from chimera.data.wikipedia import dump, segment_wikipedia
from chimera.data.wikipedia.articles import prose
from chimera.data.wikipedia.dump import read_chunks
from chimera.errors import DataError, UsageError

ENGLISH = "enwiki-latest-pages-articles1.xml-p000000010p000030302-shortened.bz2"
UTF_16 = "bgwiki-latest-pages-articles-shortened.xml.bz2"
HEAD = '<mediawiki xml:lang="de">\n  <siteinfo>\n    <namespace key="10">Vorlage</namespace>\n  </siteinfo>\n'
PAGE = (
    "  <page>\n    <title>T{n}</title>\n    <ns>0</ns>\n    <id>{n}</id>\n    <revision>\n      <id>1</id>\n"
    "      <text>{text}</text>\n    </revision>\n  </page>\n"
)
PROSE = "Der Satz Nummer {n} hat genau so viele Wörter wie nötig. Hier ist noch einer."


def package_files(name):
    """The dump that the package ships, found without importing it."""
    for package in ("gensim", "sentencex", "wikiextractor"):
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"{package} is not installed")
    return Path(importlib.util.find_spec("gensim").origin).parent / "test" / "test_data" / name


def splitter(language):
    from chimera.data.text.sentences import sentence_splitter

    return sentence_splitter(language)


def small_dump(path, count=6, tail="</mediawiki>\n"):
    pages = "".join(PAGE.format(n=n, text=PROSE.format(n=n)) for n in range(count))
    path.write_bytes(bz2.compress((HEAD + pages + tail).encode()))
    return path


def test_a_real_dump_becomes_segmented_text(tmp_path):
    """A hundred articles of the English Wikipedia: prose, one sentence per line, nothing of titles, lists or markup."""
    made = segment_wikipedia(package_files(ENGLISH), tmp_path / "out", make_splitter=splitter, workers=2)
    documents = read_segmented_text(made.path)
    assert (made.num_articles, made.num_sentences) == (len(documents), sum(map(len, documents)))
    assert (len(documents), 16_000 < made.num_sentences < 19_000) == (102, True)
    text = made.path.read_text(encoding="utf-8")
    assert documents[0][0] == (
        "Anarchism is a political philosophy that advocates self-governed societies based on voluntary institutions."
    )
    assert not re.search(r"\[\[|\]\]|\{\{|\}\}|<ref|</|&lt;|&amp;|^[|]", text, re.MULTILINE)
    assert not re.search(r"^(Etymology|History|References|See also)\.?$", text, re.MULTILINE)
    assert not (tmp_path / "out" / "parts").exists()


def test_a_stopped_run_goes_on(tmp_path, monkeypatch):
    """Parts that are there are taken; the text is that of a run that was not stopped."""
    package_files(ENGLISH)
    monkeypatch.setattr(dump, "_READ_BYTES", 300)
    monkeypatch.setattr(dump, "_CHUNK_BYTES", 400)
    path = small_dump(tmp_path / "dump.xml.bz2")
    whole = segment_wikipedia(path, tmp_path / "whole", make_splitter=splitter)
    assert whole.num_chunks > 2

    class StopError(Exception):
        pass

    def stop(_):
        raise StopError

    with pytest.raises(StopError):
        segment_wikipedia(path, tmp_path / "stopped", make_splitter=splitter, report=stop)
    resumed = segment_wikipedia(path, tmp_path / "stopped", make_splitter=splitter, workers=2)
    assert resumed.num_reused >= 1
    assert resumed.path.read_bytes() == whole.path.read_bytes()
    assert len(read_segmented_text(resumed.path)) == 6


def test_parts_of_another_dump_are_not_mixed(tmp_path):
    """A folder of a run on another dump, and one that is finished, are refused by name."""
    package_files(ENGLISH)
    path = small_dump(tmp_path / "dump.xml.bz2")
    parts = tmp_path / "out" / "parts"
    parts.mkdir(parents=True)
    (parts / "source.json").write_text('{"dump": "other"}')
    with pytest.raises(UsageError, match="holds parts of another dump"):
        segment_wikipedia(path, tmp_path / "out", make_splitter=splitter)
    (tmp_path / "out" / "wikipedia.segmented.txt").write_text("")
    with pytest.raises(UsageError, match=r"wikipedia\.segmented\.txt exists"):
        segment_wikipedia(path, tmp_path / "out", make_splitter=splitter)


def test_chunks_are_dumps_of_whole_pages(tmp_path, monkeypatch):
    """For any size, the pages of all chunks are those of the dump, each behind the dump's head."""
    path = small_dump(tmp_path / "dump.xml.bz2", count=9)
    for size in (1, 500, 900, 10**6):
        monkeypatch.setattr(dump, "_READ_BYTES", 211)
        monkeypatch.setattr(dump, "_CHUNK_BYTES", size)
        chunks = list(read_chunks(path))
        assert all(chunk.content.startswith(HEAD.encode()) for chunk in chunks)
        assert all(chunk.content.rstrip().endswith(b"</mediawiki>") for chunk in chunks)
        titles = [title for chunk in chunks for title in re.findall(rb"<title>T(\d)</title>", chunk.content)]
        assert titles == [str(n).encode() for n in range(9)]
        assert {chunk.language for chunk in chunks} == {"de"}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (bz2.compress((HEAD + PAGE).encode())[:-9], "is compressed but damaged or cut short"),
        ((HEAD + PAGE).encode(), "ends without </mediawiki>: it is cut short"),
        (b"once upon a time", "is no dump of a wiki in UTF-8: it begins with b'once upon"),
        ((HEAD + "</mediawiki>").encode(), "is no dump of a wiki: it has no <page>"),
        ((HEAD + PAGE + "</mediawiki>").encode("utf-16"), "is no dump of a wiki in UTF-8"),
    ],
)
def test_what_is_no_dump_is_refused(tmp_path, content, message):
    """Named, before anything is extracted."""
    path = tmp_path / "dump.xml"
    path.write_bytes(content)
    with pytest.raises(DataError, match=rf"dump\.xml {message}"):
        list(read_chunks(path))


def test_a_real_dump_in_another_encoding_is_refused(tmp_path):
    """One that the package ships is UTF-16."""
    with pytest.raises(DataError, match="is no dump of a wiki in UTF-8"):
        segment_wikipedia(package_files(UTF_16), tmp_path, make_splitter=splitter)


def test_a_dump_without_a_head_is_read(tmp_path):
    """Exports of some pages name no namespaces; their articles are articles all the same."""
    package_files(ENGLISH)
    path = tmp_path / "dump.xml"
    path.write_text(f"<mediawiki>\n{PAGE.format(n=1, text=PROSE.format(n=1))}</mediawiki>\n", encoding="utf-8")
    made = segment_wikipedia(path, tmp_path / "out", make_splitter=splitter)
    assert made.path.read_text(encoding="utf-8") == PROSE.format(n=1).replace(". ", ".\n") + "\n\n"


def test_a_dump_without_prose_is_refused(tmp_path):
    """All articles filtered away: no text is written."""
    package_files(ENGLISH)
    path = tmp_path / "dump.xml"
    path.write_text(HEAD + PAGE.format(n=1, text="* a list\n* of items") + "</mediawiki>\n")
    with pytest.raises(DataError, match="has no article with prose"):
        segment_wikipedia(path, tmp_path / "out", make_splitter=splitter)
    assert not list((tmp_path / "out").glob("*.txt"))


def test_memory_does_not_grow_with_the_dump(tmp_path):
    """A hundred and twenty megabytes of pages pass through the cutting within 100 MB."""
    path = tmp_path / "dump.xml"
    page = PAGE.format(n=1, text="Wort " * 20_000)
    with path.open("w") as file:
        file.write(HEAD)
        for _ in range(1200):
            file.write(page)
        file.write("</mediawiki>")
    code = (
        "import resource, sys, pathlib\n"
        "from chimera.data.wikipedia.dump import read_chunks\n"
        "before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        "print(sum(chunk.content.count(b'<page>') for chunk in read_chunks(pathlib.Path(sys.argv[1]))))\n"
        "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100_000)\n"
    )
    done = subprocess.run([sys.executable, "-c", code, str(path)], capture_output=True, text=True, check=True)
    assert done.stdout == "1200\nTrue\n"


def test_lines_that_are_no_prose_are_dropped():
    """Headings, list items and tables go; what templates left is tidied; long paragraphs stay whole."""
    lines = [
        "Title",
        "External links.",
        "* an item of a list that is long enough to be a sentence of prose.",
        "| a cell of a table that is long enough to be a sentence, too.",
        "The role has been played in film by:",
        "Achilles (; , &quot;Akhilleus&quot;,) was a hero &amp; a warrior of the &lt;i&gt;Iliad&lt;/i&gt; .",
        "千代田区は東京都の特別区のひとつであり、日本の首都の中心である。",
    ]
    assert prose("\n".join(lines)) == [
        'Achilles ("Akhilleus") was a hero & a warrior of the Iliad.',
        "千代田区は東京都の特別区のひとつであり、日本の首都の中心である。",
    ]
