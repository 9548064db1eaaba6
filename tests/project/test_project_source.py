"""Strings and calls that have no place in the repository, and files that have to agree with one another."""

import ast
import os
import re
import subprocess
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SUFFIXES = {".py", ".md", ".toml", ".txt", ".json", ""}
FOLDERS = ("chimera", "tests", "configs", "docs", "examples", "scripts", "requirements", ".ci", "hardware")
BIG = 500_000
FILES = sorted(
    path
    for folder in FOLDERS
    for path in (ROOT / folder).rglob("*")
    if path.is_file() and path.suffix in SUFFIXES and "__pycache__" not in path.parts and path.stat().st_size < BIG
) + sorted(path for path in ROOT.glob("*") if path.is_file() and path.suffix in {".md", ".toml"})
PYTHON = [path for path in FILES if path.suffix == ".py"]

# Written in pieces so that this file passes its own test.
ABSOLUTE = re.compile(r"(?<![\w.>\"'`)/])/(?:root|home|Users|opt|mnt)/[\w.]")
UNFINISHED = re.compile(r"\b(?:TO" + r"DO|FIX" + r"ME|XX" + r"X)\b")


def test_no_file_names_a_place_on_one_machine():
    """No absolute path of somebody's machine stands in a text file."""
    found = [
        f"{path.relative_to(ROOT)}: {match[0]}"
        for path in FILES
        if (match := ABSOLUTE.search(path.read_text(encoding="utf-8", errors="replace")))
    ]
    assert found == []


def test_nothing_is_left_unfinished():
    """No note of work left over stands in code or documents."""
    found = [path for path in FILES if UNFINISHED.search(path.read_text(encoding="utf-8", errors="replace"))]
    assert found == []


@pytest.mark.parametrize("path", [p for p in PYTHON if "chimera" in p.parts], ids=lambda p: str(p.relative_to(ROOT)))
def test_no_input_is_ever_executed(path):
    """The package unpickles nothing, evaluates no text, starts no shell and raises no stub."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import | ast.ImportFrom):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else [node.module]
            assert not {"pickle", "marshal", "shelve", "dill"} & {name.split(".")[0] for name in names}
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            assert node.func.id not in {"eval", "exec", "compile", "__import__"}
        elif isinstance(node, ast.keyword) and node.arg in {"shell", "weights_only", "allow_pickle"}:
            safe = {"shell": False, "weights_only": True, "allow_pickle": False}[node.arg]
            assert isinstance(node.value, ast.Constant)
            assert node.value.value is safe
        elif isinstance(node, ast.Name):
            assert node.id != "Not" + "ImplementedError"


@pytest.mark.parametrize("name", ["scripts/check", "scripts/lint", "scripts/long", "scripts/test", ".ci/run"])
def test_scripts_are_executable_and_stop_at_an_error(name):
    """Every script of the developer interface can be called by its name, parses, and stops where a command fails."""
    path = ROOT / name
    assert os.access(path, os.X_OK)
    assert path.read_text(encoding="utf-8").startswith("#!/usr/bin/env bash\n")
    assert "\nset -euo pipefail\n" in path.read_text(encoding="utf-8")
    assert subprocess.run(["bash", "-n", path], check=False).returncode == 0


def test_every_requirement_has_a_tested_version_and_a_reason():
    """Each dependency in pyproject.toml is pinned for tests and explained in docs/dependencies.md, and none besides."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    lines = (ROOT / "requirements" / "tested.txt").read_text(encoding="utf-8").splitlines()
    tested = dict(line.split("==") for line in lines if line and not line.startswith("#"))
    groups = project["dependency-groups"]
    asked = [*project["project"]["dependencies"], *groups["dev"], *groups["parity"]]
    names = {re.match(r"[\w-]+", requirement)[0] for requirement in asked}
    reasons = (ROOT / "docs" / "dependencies.md").read_text(encoding="utf-8")
    explained = set(re.findall(r"^\| ([\w-]+)(?: ≥ [\d.]+)? \|", reasons, flags=re.MULTILINE)) - {"package", "---"}
    assert names <= set(tested)
    assert names - {"transformers"} == explained - {"transformers"}
    for requirement in project["project"]["dependencies"]:
        assert f"| {requirement.replace('>=', ' ≥ ')} |" in reasons


def test_tested_versions_are_plain():
    """The constraints file holds name==version lines only, in order: no addresses, no local builds."""
    lines = (ROOT / "requirements" / "tested.txt").read_text(encoding="utf-8").splitlines()
    pins = [line for line in lines if not line.startswith("#")]
    assert pins == sorted(pins, key=lambda line: line.split("=="))
    assert [line for line in pins if not re.fullmatch(r"[a-z0-9-]+==[0-9][0-9a-z.]*", line)] == []
