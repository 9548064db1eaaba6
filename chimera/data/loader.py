"""The micro-batches of one rank, made ahead by other processes.

Knows which micro-batches and which of their fields a rank needs, keeps some steps of them ready, and measures how long
the rank waited. A reader that fails or hangs is reported with its name, the step and the files that it reads. Refuses
to know what a step does. Nothing here is state of the run: a loader begins at any step.
"""

import time
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from typing import Any, Final, Self

from torch.utils import data as torch_data

from chimera.data.prepare import forkserver
from chimera.data.source import Microbatch, MicrobatchSource
from chimera.errors import DataError

__all__ = ["Loader"]

_STEPS_AHEAD: Final = 2  # per worker
_LOOK_EVERY_S: Final = 2.0  # a dead worker is found this soon


@dataclass(frozen=True, slots=True)
class _Failure:
    """What went wrong in a worker, as text: exceptions of libraries do not all survive the way back."""

    message: str


class Loader:
    """Gives the micro-batches of one step after another.

    Args:
        source: where they come from.
        replica: this rank's data-parallel replica, counted from 0; it takes its share of each step's micro-batches.
        replicas: of the pipeline.
        fields: those that this rank needs; without any, nothing is read.
        first_step: the first step that will be asked for, counted from 0.
        last_step: the end of the steps.
        workers: processes that work ahead; 0 makes each step's micro-batches when they are asked for.
        make_source: makes the source again in a worker, to which this function is sent: a source itself may hold more
            than should travel. Needed with workers.
        timeout_s: how long a step's micro-batches may take.
        name: of what is read, for messages.

    Attributes:
        waited_s: seconds that the latest ``next`` took.
    """

    def __init__(
        self,
        source: MicrobatchSource,
        *,
        replica: int = 0,
        replicas: int = 1,
        fields: Collection[str],
        first_step: int,
        last_step: int,
        workers: int = 0,
        make_source: Callable[[], MicrobatchSource] | None = None,
        timeout_s: float = 600.0,
        name: str = "data",
    ) -> None:
        self.waited_s = 0.0
        self._name = name
        self._timeout_s = timeout_s
        self._step = first_step
        share = (replica, replicas)
        self._batches: Iterator[Any]
        if workers and fields:
            assert make_source is not None, "workers make their own source"
            steps = _Steps(make_source, share, tuple(fields), name)
            loader: torch_data.DataLoader[Any] = torch_data.DataLoader(
                steps,
                batch_size=None,
                sampler=range(first_step, last_step),
                num_workers=workers,
                prefetch_factor=_STEPS_AHEAD,
                timeout=min(timeout_s, _LOOK_EVERY_S),
                # Forked from a server, which has no threads and holds none of this rank's connections.
                multiprocessing_context=forkserver(),
            )
            self._batches = iter(loader)
        else:
            self._batches = (_made(source, step, share, fields) for step in range(first_step, last_step))

    def __enter__(self) -> Self:
        """Return the loader."""
        return self

    def __exit__(self, *_: object) -> None:
        """End the workers."""
        self.close()

    def next(self) -> list[Microbatch]:
        """Return the micro-batches of the next step.

        Raises:
            DataError: a reader failed, died, or took longer than the time-out.
        """
        began = time.perf_counter()
        try:
            made = self._awaited(began + self._timeout_s)
        except RuntimeError as error:  # of torch: a worker died, or time is up
            raise DataError(
                f"reading {self._name} for step {self._step + 1}: {_first_line(error)}; a worker ran out of memory "
                f"or was killed, or the files' disk takes longer than {self._timeout_s:g} s: try data.workers 0, which "
                "reads in the rank itself"
            ) from None
        self.waited_s = time.perf_counter() - began
        if isinstance(made, _Failure):
            raise DataError(made.message)
        self._step += 1
        batches: list[Microbatch] = made
        return batches

    def _awaited(self, deadline: float) -> Any:
        """Wait for the workers; torch looks after them only between two time-outs."""
        while True:
            try:
                return next(self._batches)
            except RuntimeError as error:
                if "timed out" not in str(error) or time.perf_counter() >= deadline:
                    raise

    def close(self) -> None:
        """End the workers."""
        end = getattr(self._batches, "_shutdown_workers", None)
        if end is not None:
            end()


@dataclass(slots=True)
class _Steps(torch_data.Dataset[Any]):
    """What a worker makes: the micro-batches of a step, by its number."""

    make_source: Callable[[], MicrobatchSource]
    share: tuple[int, int]
    fields: tuple[str, ...]
    name: str
    source: MicrobatchSource | None = field(default=None, init=False)

    def __getitem__(self, step: int) -> "list[Microbatch] | _Failure":
        worker = torch_data.get_worker_info()
        assert worker is not None, "the rank itself reads without this"
        try:
            if self.source is None:
                self.source = self.make_source()
            return _made(self.source, step, self.share, self.fields)
        except Exception as error:  # noqa: BLE001, whatever it is has to be reported by the rank
            return _Failure(f"data worker {worker.id} reading {self.name} for step {step + 1}: {error}")


def _made(source: MicrobatchSource, step: int, share: tuple[int, int], fields: Collection[str]) -> list[Microbatch]:
    """One replica's micro-batches of a step."""
    replica, replicas = share
    size = source.microbatches_of(step) // replicas
    return [source.microbatch(step, index, fields) for index in range(replica * size, (replica + 1) * size)]


def _first_line(error: Exception) -> str:
    return str(error).strip().split("\n")[0]
