"""A job of SLURM from outside: handed in, followed by its log, cancelled, and what became of it.

SLURM's own programs do the work; they are called by lists of words, and what they complain of is passed on.
"""

import re
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from chimera.errors import RunError, UsageError

__all__ = ["JobState", "cancel", "follow", "submit"]

_LOOK_S: Final = 1.0
_ANSWER_S: Final = 60.0
"""How long one of SLURM's programs may take."""
_SILENCE_S: Final = 600.0
"""How long SLURM may fail to answer before nobody asks any more."""
# A job that completes may be on its way back into the queue.
_GOES_ON: Final = frozenset(
    {"PENDING", "CONFIGURING", "RUNNING", "COMPLETING", "SUSPENDED", "STOPPED", "RESIZING", "REQUEUED", "SIGNALING",
     "STAGE_OUT", "SPECIAL_EXIT", "REQUEUE_HOLD", "REQUEUE_FED", "RESV_DEL_HOLD"}
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class JobState:
    """What SLURM says of a job.

    Attributes:
        name: of the state, such as PENDING or FAILED.
        reason: why it is in it, "None" for none.
        exit_code: of the batch script, or 128 and the number of the signal that ended it.
    """

    name: str
    reason: str
    exit_code: int

    @property
    def has_ended(self) -> bool:
        """Whether the job will do nothing more."""
        return self.name not in _GOES_ON


_UNKNOWN: Final = JobState("RUNNING", "None", 0)
"""What stands for a job of which there is nothing new to say."""


def submit(script: str) -> int:
    """Hand in a batch script and return the job's number.

    Raises:
        UsageError: this host has no sbatch.
        RunError: sbatch refused the job; its own words say why.
    """
    if shutil.which("sbatch") is None:
        raise UsageError(
            "sbatch is not on the PATH, so no job can be handed in here; do it on a host of a SLURM cluster, or print "
            "the script by --dry-run"
        )
    done = _run(["sbatch", "--parsable"], script)
    if done.returncode:
        raise RunError(f"sbatch refused the job: {_one_line(done.stderr)}")
    number = done.stdout.strip().partition(";")[0]
    if not number.isdecimal():
        raise RunError(f"sbatch answered {done.stdout.strip()!r}; needed: the number of a job")
    return int(number)


def cancel(job: int) -> None:
    """Cancel a job; one that has ended already stays as it is.

    Raises:
        RunError: SLURM refused.
    """
    done = _run(["scancel", str(job)])
    if done.returncode:
        raise RunError(f"scancel could not cancel job {job}: {_one_line(done.stderr)}; try again: scancel {job}")


def follow(job: int, log: Path, *, on_line: Callable[[str], None], on_wait: Callable[[JobState], None]) -> JobState:
    """Follow a job until it has ended and return how.

    Args:
        job: its number.
        log: the file that it writes, which may not be there yet.
        on_line: called with each line of it.
        on_wait: called when the job waits, once for each reason.

    Raises:
        RunError: SLURM has not answered for ten minutes.
    """
    lines = _Lines(log)
    for state in _states(job, log):
        for line in lines.read():
            on_line(line)
        if state.name == "PENDING":
            on_wait(state)
        if state.has_ended:
            for line in lines.rest():
                on_line(line)
            return state
        time.sleep(_LOOK_S)
    raise AssertionError("states come until one is the last")


def _states(job: int, log: Path) -> Iterator[JobState]:
    """Ask for a job's state again and again; one that waits comes once for each reason, and then as one that runs."""
    heard = time.monotonic()
    reason = "None"
    while True:
        answer = _state(job)
        now = time.monotonic()
        if isinstance(answer, str):
            if now - heard > _SILENCE_S:
                raise RunError(f"SLURM does not say what became of job {job}: {answer}; it may go on, see {log}")
            yield _UNKNOWN
            continue
        heard = now
        yield _UNKNOWN if answer.name == "PENDING" and answer.reason in {"None", reason} else answer
        reason = answer.reason


def _state(job: int) -> JobState | str:
    """Return the job's state, or why SLURM does not tell it."""
    try:
        done = _run(["scontrol", "--oneliner", "show", "job", str(job)])
    except RunError as error:
        return str(error)
    if done.returncode:
        return _one_line(done.stderr)
    fields = dict(re.findall(r"(?<!\S)(\w+)=(\S*)", done.stdout))
    code, _, signal = fields.get("ExitCode", "").partition(":")
    if "JobState" not in fields or not code.isdecimal():
        return f"scontrol answered {done.stdout.strip()[:200]!r}"
    exit_code = 128 + int(signal) if signal not in {"", "0"} else int(code)
    return JobState(fields["JobState"], fields.get("Reason", "None"), exit_code)


class _Lines:
    """Reads a file that somebody writes, line by line, from where the last call ended."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0
        self._half = b""

    def read(self) -> Iterator[str]:
        if not self._path.exists():
            return
        with self._path.open("rb") as file:
            file.seek(self._offset)
            *whole, self._half = (self._half + file.read()).split(b"\n")
            self._offset = file.tell()
        for line in whole:
            yield line.decode(errors="replace")

    def rest(self) -> Iterator[str]:
        yield from self.read()
        if self._half:
            yield self._half.decode(errors="replace")


def _run(command: Sequence[str], given: str = "") -> "subprocess.CompletedProcess[str]":
    try:
        return subprocess.run(command, input=given, capture_output=True, text=True, check=False, timeout=_ANSWER_S)
    except FileNotFoundError:
        raise UsageError(f"{command[0]} is not on the PATH; SLURM's programs are needed beside sbatch") from None
    except subprocess.TimeoutExpired:
        raise RunError(f"{command[0]} did not answer within {_ANSWER_S:g} s") from None


def _one_line(text: str) -> str:
    """Return what a program of SLURM complained of, without its name before each line."""
    lines = [re.sub(r"^\w+: (error: )?", "", line.strip()) for line in text.strip().splitlines()]
    return "; ".join(line for line in lines if line) or "without a word"
