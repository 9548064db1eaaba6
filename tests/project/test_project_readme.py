"""The README: its commands run, its table is the registry's, its Python works, its picture is what it says."""

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from chimera.cli.main import main
from chimera.schedules import SCHEDULES
from chimera.schedules.building import as_option

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
SCHEDULE_FILES = (ROOT / "docs" / "schedule-files.md").read_text(encoding="utf-8")
NEED_NO_TRAINING = ("schedule ", "simulate ", "--")


def blocks(text, language):
    """Return the contents of a document's code blocks in one language."""
    return re.findall(rf"^```{language}\n(.*?)^```$", text, flags=re.MULTILINE | re.DOTALL)


def commands(text):
    """Return the words of each chimera command in a document's shell blocks that trains nothing."""
    lines = [line.removeprefix("uv run ") for block in blocks(text, "bash") for line in block.splitlines()]
    found = [line.removeprefix("chimera ") for line in lines if line.startswith("chimera ")]
    return [shlex.split(line) for line in found if line.startswith(NEED_NO_TRAINING)]


@pytest.mark.parametrize("text", [README, SCHEDULE_FILES], ids=["README.md", "schedule-files.md"])
def test_commands_run_one_after_another(tmp_path, monkeypatch, capsys, text):
    """Every schedule command of the document works in an empty folder, in the order in which they stand."""
    monkeypatch.chdir(tmp_path)
    assert len(commands(text)) >= 3
    for words in commands(text):
        assert main(words) == 0, f"{words}: {capsys.readouterr().err}"


def test_the_two_commands_come_first():
    """The README's first two shell blocks are a command each: the demonstration, then the test suite."""
    first, second = blocks(README, "bash")[:2]
    assert first == "pip install uv && uv run chimera demo\n"
    assert second == "pip install uv && uv run pytest\n"


def test_the_table_is_the_registrys():
    """The README's table has a row per schedule of the registry, with the registry's words."""
    rows = re.findall(r"^\| `(.+?)` \| (.+?) \| (.+?) \| (.+?) \|$", README, flags=re.MULTILINE)
    assert rows == [
        (
            name,
            family.summary,
            family.requires,
            ", ".join(f"`{as_option(option)}`" for option in family.options) or "none",
        )
        for name, family in SCHEDULES.items()
    ]


def test_the_python_example_runs():
    """The README's first Python runs as it stands, with warnings as errors."""
    example, _ = blocks(README, "python")
    done = subprocess.run([sys.executable, "-W", "error", "-c", example], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_the_training_script_runs_under_torchrun(tmp_path):
    """The README's second Python trains as it stands on four ranks under torchrun, each with the same loss."""
    _, example = blocks(README, "python")
    script = tmp_path / "train.py"
    script.write_text(example + "print(f'loss {float(loss):.3f}')\n", encoding="utf-8")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4", str(script)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=100)
    assert done.returncode == 0, done.stderr
    losses = re.findall(r"loss (\d+\.\d{3})", done.stdout)
    assert (len(losses), len(set(losses))) == (4, 1)


def test_the_picture_is_there_and_small():
    """The README's picture is a PNG of less than 200 kB."""
    (name,) = re.findall(r"!\[[^\]]*\]\((.+?)\)", README)
    content = (ROOT / name).read_bytes()
    assert content[:4] == b"\x89PNG"
    assert len(content) < 200_000


@pytest.mark.parametrize("form", ["json", "text"])
def test_examples_of_schedule_files_are_proved(tmp_path, capsys, form):
    """The hand-written schedule of docs/schedule-files.md reads and is proved in both forms."""
    if form == "json":
        (example,) = (block for block in blocks(SCHEDULE_FILES, "json") if '"chimera-schedule"' in block)
    else:
        (example,) = (block for block in blocks(SCHEDULE_FILES, "") if block.startswith("name:"))
    path = tmp_path / f"example.{'json' if form == 'json' else 'txt'}"
    path.write_text(example, encoding="utf-8")
    assert main(["schedule", "check", str(path), "--lowered"]) == 0
    assert capsys.readouterr().out.startswith("by hand, 2 ranks, 2 micro-batches, 2 stages, 2 routes: proved\n")


def test_the_example_of_a_costs_file_is_read(tmp_path, capsys):
    """The costs file of docs/schedule-files.md serves a schedule of two stages."""
    (example,) = (block for block in blocks(SCHEDULE_FILES, "json") if '"chimera-costs"' in block)
    path = tmp_path / "costs.json"
    path.write_text(example, encoding="utf-8")
    assert main(["simulate", "1f1b", "--ranks", "2", "--microbatches", "4", "--costs", str(path)]) == 0
    assert "Times in seconds" in capsys.readouterr().out
