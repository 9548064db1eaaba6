"""``chimera profile import``: from exports of nsys to the files and tables that a profile has."""

import sys
from pathlib import Path

import pytest

from chimera.cli.main import main
from chimera.ir.costs_file import read_costs
from chimera.timeline import read_timeline

sys.path.append(str(Path(__file__).parents[1] / "timeline"))

from nsys_files import Export

MAIN = 5 << 24


def write_rank(path, rank, programs):
    """Write one step of a rank whose actions, (text, ms), run one after another."""
    with Export(path) as export:
        export.range(f"rank {rank} of pipeline 0", 0, 900_000_000, MAIN)
        export.range("step 0", 0, 900_000_000, MAIN)
        at = 0
        for text, start, length in programs:
            at += 1_000_000
            export.range(text, at, at + 500_000, MAIN)
            export.launch(at + 10, int(start * 1e6), int((start + length) * 1e6), MAIN)


def test_two_nodes_become_one_profile(tmp_path, capsys):
    """The timeline of both, why each is idle, and costs that a simulation takes."""
    write_rank(tmp_path / "bert_node0.sqlite", 0, [("0F0", 20, 10), ("0B0", 70, 20)])
    write_rank(tmp_path / "bert_node1.sqlite", 1, [("1F0", 35, 10), ("1B0", 45, 20)])
    files = [str(tmp_path / f"bert_node{rank}.sqlite") for rank in range(2)]
    assert main(["profile", "import", *files]) == 0
    said = capsys.readouterr().out
    assert said.startswith("bert\n1 step of 2 ranks: 70.00 ms in the median")
    assert "Activity of all devices over the whole recording: kernel 60.0 ms." in said
    out = tmp_path / "bert"
    assert {path.name for path in out.iterdir()} == {
        "timeline.pdf",
        "timeline.png",
        "trace.json",
        "timeline.json",
        "costs.json",
    }
    assert read_timeline(out / "timeline.json").busy.tolist() == pytest.approx([0.03, 0.03])
    costs = read_costs(out / "costs.json")
    assert costs.forward_s == pytest.approx([0.01, 0.01])
    assert costs.backward_s == pytest.approx([0.02, 0.02])


@pytest.mark.parametrize(
    ("names", "message"),
    [
        ([], "profile import needs a file"),
        (["a_node0.sqlite", "b_node1.sqlite"], "the files are of different runs: a, b"),
        (["none_node0.sqlite"], "there is no such file"),
        (["text.sqlite"], "cannot be read as SQLite"),
    ],
)
def test_what_is_no_export_is_refused(tmp_path, names, message, capsys):
    """A line says what was given and what is needed, and nothing is written."""
    (tmp_path / "text.sqlite").write_text("no database" * 200, encoding="utf-8")
    assert main(["profile", "import", *(str(tmp_path / name) for name in names)]) == 2
    assert message in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["text.sqlite"]
