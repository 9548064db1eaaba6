"""Arrays made once for everyone: races, damage, other settings, and folders that cannot be written."""

import json
import threading
from pathlib import Path

import numpy as np
import pytest

from chimera.data import index_cache
from chimera.data.index_cache import cached_arrays
from chimera.data.prepare import forkserver
from chimera.errors import DataError

INPUTS = {"version": 1, "seed": 3}


def make_slowly(folder, calls, barrier):
    """Ask for arrays at the same moment as three others, and note whether this process made them."""

    def make():
        with calls.get_lock():
            calls.value += 1
        return {"numbers": np.arange(100_000)}

    barrier.wait()
    arrays = cached_arrays(Path(folder), "index", INPUTS, make)
    assert int(arrays["numbers"].sum()) == 4_999_950_000


def test_four_processes_make_them_once(tmp_path):
    """All ask at once: one makes the arrays, all get them, and nothing else is left in the folder."""
    context = forkserver()
    calls, barrier = context.Value("i", 0), context.Barrier(4)
    processes = [context.Process(target=make_slowly, args=(str(tmp_path), calls, barrier)) for _ in range(4)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
    assert [process.exitcode for process in processes] == [0] * 4
    assert calls.value == 1
    assert len([path for path in tmp_path.iterdir() if path.suffix != ".lock"]) == 1


def test_two_nodes_without_a_common_lock_agree(tmp_path, monkeypatch):
    """Where locks do not reach, both make the arrays; one folder stays, and both read the same."""
    monkeypatch.setattr(index_cache.fcntl, "flock", lambda *_: None)
    barrier = threading.Barrier(2)
    found = []

    def node(number):
        def make():
            barrier.wait(20)  # both are past the look for the folder
            return {"numbers": np.arange(10)}

        found.append(cached_arrays(tmp_path, "index", INPUTS, make)["numbers"].tolist())
        return number

    threads = [threading.Thread(target=node, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert found == [list(range(10))] * 2
    assert len([path for path in tmp_path.iterdir() if path.suffix != ".lock"]) == 1


def folder_in(tmp_path):
    return next(path for path in tmp_path.iterdir() if path.is_dir())


def test_arrays_are_mapped_and_other_inputs_are_apart(tmp_path):
    """The second time nothing is made; another input gives other arrays."""
    first = cached_arrays(tmp_path, "index", INPUTS, lambda: {"a": np.zeros(3)})["a"]
    assert isinstance(first, np.memmap)
    assert cached_arrays(tmp_path, "index", INPUTS, lambda: 1 / 0)["a"].tolist() == [0, 0, 0]
    assert cached_arrays(tmp_path, "index", {**INPUTS, "seed": 4}, lambda: {"a": np.ones(1)})["a"].tolist() == [1]


def test_a_failure_leaves_nothing(tmp_path):
    """What making them raises comes out, and the next one makes them anew."""
    with pytest.raises(ZeroDivisionError):
        cached_arrays(tmp_path, "index", INPUTS, lambda: {"a": np.zeros(int(1 / 0))})
    assert [path.suffix for path in tmp_path.iterdir()] == [".lock"]
    assert cached_arrays(tmp_path, "index", INPUTS, lambda: {"a": np.zeros(1)})["a"].tolist() == [0]


def test_a_damaged_folder_is_named(tmp_path):
    """A file cut short, or inputs that are not those of the name: delete it, it will be made again."""
    cached_arrays(tmp_path, "index", INPUTS, lambda: {"a": np.zeros(1000)})
    file = folder_in(tmp_path) / "a.npy"
    content = file.read_bytes()
    file.write_bytes(content[:50])
    with pytest.raises(DataError, match=r"index-\w+ is damaged .*delete the folder"):
        cached_arrays(tmp_path, "index", INPUTS, dict)
    file.write_bytes(content)
    (folder_in(tmp_path) / "inputs.json").write_text(json.dumps({"seed": 9}))
    with pytest.raises(DataError, match="was made with other settings than its name says; delete the folder"):
        cached_arrays(tmp_path, "index", INPUTS, dict)


def test_a_folder_that_cannot_be_made_is_named(tmp_path):
    """A file where the folder should be: the option is in the message."""
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match=r"index cannot be kept in .*file: .*set data\.cache_dir"):
        cached_arrays(tmp_path / "file", "index", INPUTS, lambda: {"a": np.zeros(1)})
