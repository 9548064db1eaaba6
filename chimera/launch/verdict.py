"""What is known of each rank of a job, and which of all its troubles was the cause.

When one rank fails the others notice it, each in its own way; only one of the errors is worth a user's time. Here it is
chosen, however the ranks were started and heard. Nothing in this module knows processes, hosts or torch.
"""

import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from chimera.errors import ChimeraError, RunError, StalledError
from chimera.launch.place import Place

__all__ = ["Main", "RankState", "Tell", "cause_of", "is_report", "outcome_of"]

Tell = Callable[[Any], None]
"""Sends a picklable message to the parent. A text says what the rank is at, and is kept for a report of its death."""
Main = Callable[[Place, Tell], Any]


@dataclass(slots=True)
class RankState:
    """What is known of one rank.

    Attributes:
        rank: its number.
        activity: what it said last that it is at.
        result: what it returned, once it has finished.
        error: what it raised.
        death: how it ended without a word, as the rest of a sentence; None where it did not.
    """

    rank: int
    activity: str = "starting"
    result: Any = None
    finished: bool = False
    error: BaseException | None = None
    death: str | None = None

    @property
    def failed(self) -> bool:
        """Whether it has ended otherwise than by returning."""
        return self.error is not None or self.death is not None

    def hear(self, kind: str, content: Any) -> Any | None:
        """Take in one message of the rank, and give back what is meant for whoever watches the job."""
        if kind == "result":
            self.result, self.finished = content, True
        elif kind == "error":
            self.error = content
        elif isinstance(content, str):
            self.activity = content
        else:
            return content
        return None


def outcome_of(main: Main, place: Place, tell: Tell) -> tuple[str, Any]:
    """Call ``main`` on its rank and return its last message: ("result", value) or ("error", exception)."""
    try:
        return "result", main(place, tell)
    except ChimeraError as error:
        return "error", error
    except Exception as error:  # noqa: BLE001 - whatever it is, the parent raises it
        return "error", _sendable(error, f"on rank {place.rank}:\n{traceback.format_exc()}")


def cause_of(ranks: Sequence[RankState]) -> BaseException:
    """Return the error to raise: a death before what its peers noticed, an error of its own before a stall."""
    errors = [rank.error for rank in ranks if rank.error is not None]
    # Of several ranks that waited in vain, one has gathered what all were doing; its report has the most lines.
    stalled = max((e for e in errors if isinstance(e, StalledError)), key=lambda e: str(e).count("\n"), default=None)
    said = [] if stalled is None else [str(stalled)]
    if stalled is None or not is_report(stalled):
        said += ["what every rank was doing:", *(f"  rank {rank.rank}: {rank.activity}" for rank in ranks)]
    deaths = [f"rank {rank.rank} {rank.death}" for rank in ranks if rank.death is not None]
    if deaths:
        return RunError("\n".join([*deaths, *said]))
    own = next((error for error in errors if not isinstance(error, StalledError)), None)
    return StalledError("\n".join(said)) if own is None else own


def is_report(error: BaseException | None) -> bool:
    """Return whether this is the error of the rank that has gathered what all were doing."""
    return isinstance(error, StalledError) and "\n" in str(error)


def _sendable(error: Exception, note: str) -> Exception:
    """Return ``error`` with a note, or its text where its class may not survive the way to another process."""
    if type(error).__module__ != "builtins":
        error = RuntimeError(f"{type(error).__qualname__}: {error}")
    error.add_note(note)
    return error
