"""A training run that takes a second: a little corpus, a configuration for it, and the processes of a command."""

import os
import random
import re
import signal
import subprocess
import threading
import time
from pathlib import Path

from chimera.cli.main import main
from chimera.train.config_file import make_config

__all__ = [
    "Command",
    "Running",
    "await_checkpoint",
    "children",
    "living",
    "ranks_below",
    "small_config",
    "small_document",
    "small_overrides",
    "write_corpus",
]

BEGIN_S = 120.0
WORDS = re.findall(
    r"\w+",
    "the a of and to in he she it was said that not with his her for on at by but had they be as all so there when "
    "river mountain whale captain letter garden morning window silver journey kingdom servant daughter answer evening",
)


def write_corpus(path):
    """Write 40 documents of six sentences each and return the path."""
    draw = random.Random(0)
    sentences = [" ".join(draw.choices(WORDS, k=draw.randint(4, 9))) for _ in range(240)]
    path.write_text("\n\n".join("\n".join(sentences[i : i + 6]) for i in range(0, 240, 6)) + "\n", encoding="utf-8")
    return path


def small_document(folder):
    """Return the sections of a run of two ranks in ``folder``, whose corpus is written there."""
    corpus = folder / "corpus.txt"
    if not corpus.exists():
        write_corpus(corpus)
    return {
        "model": {"hidden_size": 16, "num_layers": 2, "num_heads": 2, "max_positions": 16},
        "data": {
            "corpus": str(corpus),
            "vocab_size": 100,
            "sequence_length": 16,
            "heldout_fraction": 0.2,
            "cache_dir": str(folder / "cache"),
        },
        "optimizer": {"learning_rate": 0.01},
        "learning_rate": {"total_steps": 20, "warmup_steps": 2},
        "schedule": {"name": "chimera", "microbatches": 4},
        "parallel": {"pipeline": 2},
        "train": {
            "steps": 4,
            "microbatch_size": 2,
            "evaluation_interval": 2,
            "evaluation_samples": 8,
            "checkpoint_interval": 2,
            "out": str(folder / "run"),
        },
        "runtime": {"timeout_s": 20, "device": "cpu"},
        "metrics": {"tensorboard": False},
    }


def small_config(folder, **overrides):
    """Return the configuration of a small run; ``train__steps=2`` sets ``train.steps``."""
    texts = {name.replace("__", "."): str(value) for name, value in overrides.items()}
    return make_config(small_document(folder), texts)


def small_overrides(folder):
    """Return the small run as words of the command line, to stand behind any configuration file."""
    return [
        word
        for section, options in small_document(folder).items()
        for option, value in options.items()
        for word in (f"--{section}.{option}", str(value).lower() if isinstance(value, bool) else str(value))
    ]


class Command(subprocess.Popen):
    """A command whose output is read as text; where its block fails, it is killed instead of waited for."""

    def __init__(self, words, **options):
        super().__init__(words, **{"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True} | options)

    def __exit__(self, kind, *error):
        if kind is not None:
            self.kill()
        super().__exit__(kind, *error)


class Running:
    """A command in a thread of this process, once its run has saved a checkpoint; its ranks are processes.

    Args:
        words: of the command.
        run: the folder of its run.

    Attributes:
        ranks: their process numbers, in order.
        code: of the command, once it has ended.
    """

    def __init__(self, words, run):
        self.ranks, self.code = [], None
        self._words, self._run = words, run
        self._thread = threading.Thread(target=self._call)

    def __enter__(self):
        before = ranks_below(os.getpid())
        self._thread.start()
        await_checkpoint(self._run, self._thread.is_alive)
        self.ranks = [number for number in ranks_below(os.getpid()) if number not in before]
        return self

    def __exit__(self, *_):
        for number in living(self.ranks):
            os.kill(number, signal.SIGKILL)
        self._thread.join()

    def end(self, within_s):
        """Wait for the command's end."""
        self._thread.join(within_s)
        assert not self._thread.is_alive(), "the run went on"

    def _call(self):
        self.code = main(self._words)


def await_checkpoint(run, goes_on):
    """Wait until the run in a folder has saved a checkpoint, or no longer ``goes_on()``."""
    deadline = time.monotonic() + BEGIN_S
    while not list(run.glob("checkpoints/step-*/checkpoint.json")):
        assert goes_on(), "the run has ended"
        assert time.monotonic() < deadline, "the run did not begin"
        time.sleep(0.01)


def ranks_below(process_id):
    """Return the ranks that a command has started: the processes forked by its server, in the order of their start."""
    return sorted(rank for child in children(process_id) for rank in children(child))


def living(process_ids):
    """Return those of the processes that still run."""
    return [number for number in process_ids if _state(number) not in {None, "Z", "X"}]


def children(process_id):
    """Return the processes that this one has started."""
    numbers = [int(path.name) for path in Path("/proc").iterdir() if path.name.isdigit()]
    return [number for number in numbers if _fields(number)[1:2] == [str(process_id)]]


def _state(process_id):
    fields = _fields(process_id)
    return fields[0] if fields else None


def _fields(process_id):
    try:
        return Path(f"/proc/{process_id}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []
