"""The figures of a run in MLflow (extra ``mlflow``): on the server that ``MLFLOW_TRACKING_URI`` names, else in a file.

The client is used without MLflow's fluent interface, which would add the command line and the user to a run by itself.
"""

import logging
import os
import time
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, ClassVar, Final, TypeVar

from chimera.train.tracking.record import RunRecord
from chimera.train.tracking.tracker import Row, figures

__all__ = ["MlFlow"]

_MOST_AT_ONCE: Final = 100
"""Of parameters or tags in one request; MLflow takes no more. Of metrics it takes 1,000."""
_LONGEST: Final = 5_000
"""Characters of a tag, the least that MLflow's stores take."""
_CUT: Final = " … (cut)"
_T = TypeVar("_T")


class MlFlow:
    """Logs rows to a run of the experiment ``project``, by default in ``mlflow.db`` of the run's folder."""

    name: ClassVar[str] = "mlflow"
    may_wait: ClassVar[bool] = True

    def __init__(self, folder: Path, project: str) -> None:
        self._folder = folder
        self._project = project
        self._client: Any = None
        self._run_id = ""

    def open(self, record: RunRecord) -> str:
        """Begin a run, or go on with the one of an earlier start; options become parameters, the origin tags."""
        from mlflow import MlflowClient

        # A new store tells of every table that it makes.
        for noisy in ("mlflow.store.db.utils", "alembic"):
            logging.getLogger(noisy).setLevel(logging.WARNING)
        here = f"sqlite:///{(self._folder / 'mlflow.db').absolute()}"
        self._client = MlflowClient(tracking_uri=os.environ.get("MLFLOW_TRACKING_URI") or here)
        known = record.trackers.get(self.name)
        if known is not None and known.reference is not None:
            self._run_id = known.reference
            self._client.update_run(self._run_id, status="RUNNING")
        else:
            found = self._client.get_experiment_by_name(self._project)
            experiment = found.experiment_id if found else self._client.create_experiment(self._project)
            self._run_id = self._client.create_run(experiment, run_name=record.name).info.run_id
            self._log_options(record)
        self._tag(_origin_tags(record))
        return self._run_id

    def add(self, rows: Sequence[Row]) -> None:
        """Log all figures of the rows, in as few requests as it takes."""
        from mlflow.entities import Metric

        now = time.time_ns() // 1_000_000
        metrics = [Metric(name, value, now, row.step) for row in rows for name, value in figures(row).items()]
        for some in _in_parts(metrics, 1_000):
            self._client.log_batch(self._run_id, metrics=some)

    def close(self, record: RunRecord) -> None:
        """Log what the run came to, and end it as it ended."""
        self._tag((f"run.{name}", str(value)) for name, value in record.summary().items())
        self._client.set_terminated(self._run_id, status="FINISHED" if record.last.end == "finished" else "FAILED")

    def _log_options(self, record: RunRecord) -> None:
        from mlflow.entities import Param

        options = [Param(f"{at}.{name}", str(value)) for at, of in record.config.items() for name, value in of.items()]
        for some in _in_parts(options, _MOST_AT_ONCE):
            self._client.log_batch(self._run_id, params=some)

    def _tag(self, tags: Iterable[tuple[str, str]]) -> None:
        from mlflow.entities import RunTag

        for some in _in_parts((RunTag(name, _cut(value)) for name, value in tags), _MOST_AT_ONCE):
            self._client.log_batch(self._run_id, tags=some)


def _origin_tags(record: RunRecord) -> Iterator[tuple[str, str]]:
    """Yield what the last start came from, under the names that MLflow itself has where it has one."""
    origin = record.last.origin
    yield "mlflow.source.name", " ".join(origin.command)
    if origin.commit is not None:
        yield "mlflow.source.git.commit", origin.commit
        yield "git.dirty", str(origin.dirty).lower()
    yield "hosts", ", ".join(dict.fromkeys(origin.hosts))
    yield "devices", ", ".join(dict.fromkeys(origin.devices))
    yield from ((f"version.{name}", version) for name, version in origin.versions.items())
    yield from ((f"environment.{name}", value) for name, value in origin.environment.items())


def _in_parts(items: Iterable[_T], size: int) -> Iterator[list[_T]]:
    remaining = iter(items)
    while part := list(islice(remaining, size)):
        yield part


def _cut(value: str) -> str:
    return value if len(value) <= _LONGEST else value[: _LONGEST - len(_CUT)] + _CUT
