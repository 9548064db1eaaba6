"""The documents: links that lead somewhere, commands that work, tables that are true."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SKIPPED = {".venv", ".git", "runs", "build", "dist"}
DOCUMENTS = sorted(
    path for path in ROOT.rglob("*.md") if not SKIPPED & set(path.relative_to(ROOT).parts) and ".cache" not in str(path)
)
LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)\)")


def heading_anchors(text):
    """Return the anchors that a document's headings make, as GitHub writes them."""
    headings = re.findall(r"^#+ (.+)$", text, flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_somewhere(path):
    """Every relative link in a document names a file of the repository and, if any, a heading in it."""
    for target in LINK.findall(path.read_text(encoding="utf-8")):
        if target.startswith(("https://", "http://", "mailto:")):
            continue
        name, _, anchor = target.partition("#")
        linked = path.parent / name if name else path
        assert linked.exists(), f"{path}: {target} leads nowhere"
        if anchor:
            assert anchor in heading_anchors(linked.read_text(encoding="utf-8")), f"{path}: {target} has no heading"


def test_the_changelog_begins_with_what_is_unreleased():
    """The changelog keeps to its format: a heading for each release, changes sorted by kind."""
    text = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    releases = re.findall(r"^## \[(.+?)\]", text, flags=re.MULTILINE)
    kinds = set(re.findall(r"^### (.+)$", text, flags=re.MULTILINE))
    assert releases[0] == "Unreleased"
    assert kinds <= {"Added", "Changed", "Deprecated", "Removed", "Fixed", "Security"}
