"""Which module may import which: the floors of docs/architecture.md, read off the source."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import chimera

PACKAGE = Path(chimera.__file__).parent
FLOORS = {
    "errors": -1,  # below everything, ir included
    "ir": 0,
    "simulate": 1,
    "timeline": 1,
    "schedules": 2,
    "passes": 2,
    "plan": 3,
    "tensor": 4,
    "runtime": 5,
    "models": 5,
    "data": 5,
    "train": 6,
    "tasks": 6,
    "launch": 6,
    "cli": 7,
    "plot": 7,
    "view": 7,
    "__init__": 8,
    "__main__": 8,
}
SEEN_BY_COMMANDS = {"plot", "view"}  # on the commands' own floor, called by them
OPTIONAL = {"ortools", "datasets", "mlflow", "pyarrow", "ray", "sentencex", "streaming", "wandb", "zstandard"}  # extras
LAZY = {"numba", "matplotlib", "mpl_toolkits", "rich"} | OPTIONAL  # may be imported where they are used
TORCH_FREE_UP_TO = 3
MODULES = sorted(PACKAGE.rglob("*.py"))


def folder_of(path):
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imports(path):
    """Yield (imported module, whether inside a function) for every import statement of a file."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    inner = {
        id(node)
        for function in ast.walk(tree)
        if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        for node in ast.walk(function)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name, id(node) in inner
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import; name the module in full"
            yield node.module, id(node) in inner
            if node.module == "chimera":
                for alias in node.names:
                    yield f"chimera.{alias.name}", id(node) in inner


def test_every_folder_has_a_floor():
    """A new folder in the package takes its place in the table of floors."""
    assert {folder_of(path) for path in MODULES} <= set(FLOORS)


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_go_downward(path):
    """A module imports its own folder and lower floors; commands may also call figures."""
    own = folder_of(path)
    for name, _ in imports(path):
        if not name.startswith("chimera."):
            continue
        other = name.split(".")[1]
        if other not in FLOORS:  # a public name of the package itself
            assert FLOORS[own] >= FLOORS["cli"], f"{path} imports {name} from the top of the package"
        elif other != own and not (own == "cli" and other in SEEN_BY_COMMANDS):
            assert FLOORS[other] < FLOORS[own], f"{path} (floor {FLOORS[own]}) imports {name} (floor {FLOORS[other]})"


@pytest.mark.parametrize(
    "path",
    [path for path in MODULES if FLOORS[folder_of(path)] < FLOORS["cli"]],
    ids=lambda path: str(path.relative_to(PACKAGE)),
)
def test_imports_stand_at_the_top(path):
    """Below the commands, only heavy packages, and modules that stand for one, are imported inside a function."""
    hidden = [name for name, inside in imports(path) if inside and name.split(".")[0] not in LAZY]
    assert [name for name in hidden if not stands_for_a_heavy_package(name)] == []


def stands_for_a_heavy_package(name):
    """Return whether a module of ours brings in a heavy package at its top, and so has to be imported late itself."""
    path = PACKAGE.parent.joinpath(*name.split(".")).with_suffix(".py")
    return path.exists() and any(
        not inside and (other.split(".")[0] in LAZY or stands_for_a_heavy_package(other))
        for other, inside in imports(path)
    )


@pytest.mark.parametrize(
    "path",
    [path for path in MODULES if FLOORS[folder_of(path)] <= TORCH_FREE_UP_TO],
    ids=lambda path: str(path.relative_to(PACKAGE)),
)
def test_lower_floors_do_not_name_torch(path):
    """Nothing on floors 0 to 3 imports torch, inside a function or out."""
    assert [name for name, _ in imports(path) if name.split(".")[0] == "torch"] == []


def test_lower_floors_load_without_torch():
    """Loading every module of floors 0 to 3, and what dispatches the commands, brings in no torch."""
    lower = [path for path in MODULES if FLOORS[folder_of(path)] <= TORCH_FREE_UP_TO]
    names = [".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts) for path in lower]
    names = [name.removesuffix(".__init__") for name in names] + ["chimera.cli.main", "chimera.cli.commands"]
    code = (
        "import importlib, sys\n"
        f"for name in {names!r}:\n    importlib.import_module(name)\n"
        "print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_all_names_what_is_public(path):
    """``__all__`` lists every public function, class and constant that a module defines, sorted by ruff's rule."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    defined, exported, imported = set(), None, set()
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            defined.add(node.name)
        elif isinstance(node, ast.ImportFrom | ast.Import):
            imported |= {(alias.asname or alias.name).split(".")[0] for alias in node.names}
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names = {name.id for target in targets for name in ast.walk(target) if isinstance(name, ast.Name)}
            if names == {"__all__"}:
                exported = set(ast.literal_eval(node.value))
            defined |= names
    public = {name for name in defined if not name.startswith("_")}
    if exported is None:
        assert public == set(), f"{path} defines {sorted(public)} and has no __all__"
        return
    lazily = path == PACKAGE / "__init__.py"  # its names load on first use
    assert public <= exported, f"missing from __all__: {sorted(public - exported)}"
    assert lazily or exported <= public | imported | {"__version__"}, f"unknown: {sorted(exported - public - imported)}"
