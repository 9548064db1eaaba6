"""The figures of a run as TensorBoard's event files, with the record of the run as texts."""

from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar, Final

from torch.utils.tensorboard import SummaryWriter

from chimera.train.tracking.record import RunRecord
from chimera.train.tracking.tracker import Row, figures

__all__ = ["TensorBoard"]

_FOLDER: Final = "tensorboard"


class TensorBoard:
    """Writes rows into ``tensorboard/`` of the run's folder."""

    name: ClassVar[str] = "tensorboard"
    may_wait: ClassVar[bool] = False

    def __init__(self, folder: Path) -> None:
        self._folder = folder / _FOLDER
        self._writer: SummaryWriter | None = None

    def open(self, record: RunRecord) -> None:
        """Begin a file of events; those of steps that are made again are taken as gone."""
        start = record.last
        self._writer = SummaryWriter(str(self._folder), purge_step=start.from_step + 1 if start.from_step else None)
        options = {f"{section}.{name}": value for section, of in record.config.items() for name, value in of.items()}
        origin = start.origin
        facts = {
            "command": " ".join(origin.command),
            "commit": f"{origin.commit or 'unknown'}{', with changes' if origin.dirty else ''}",
            "hosts": ", ".join(dict.fromkeys(origin.hosts)),
            **origin.versions,
        }
        self._writer.add_text("config", _table(options), start.from_step)
        self._writer.add_text("run", _table(facts), start.from_step)

    def add(self, rows: Sequence[Row]) -> None:
        """Write each figure as a scalar of its step."""
        assert self._writer is not None, "opened before"
        for row in rows:
            for name, value in figures(row).items():
                self._writer.add_scalar(name, value, row.step)

    def close(self, record: RunRecord) -> None:
        """Write what the run came to, and close the file."""
        assert self._writer is not None, "opened before"
        self._writer.add_text("outcome", _table(record.summary()), record.last.step)
        self._writer.close()


def _table(facts: "dict[str, object] | dict[str, str] | dict[str, float | int | str]") -> str:
    """Return a table in Markdown, which is how TensorBoard shows texts."""
    rows = [f"| {name} | {str(value).replace('|', chr(92) + '|')} |" for name, value in facts.items()]
    return "\n".join(["| | |", "|---|---|", *rows])
