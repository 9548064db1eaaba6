"""One attempt at a job on a Ray cluster: its ranks placed, started, heard and ended.

A rank is lost with its process, with Ray's daemon on its node, or with the node. Ray itself takes half a minute to miss
a daemon, and a minute to miss its own head, so both are asked here every two seconds.
"""

import socket
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Final, Protocol, Self

import ray
from ray.exceptions import RayActorError, RayError, RuntimeEnvSetupError
from ray.util import placement_group, placement_group_table, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from chimera.errors import RunError
from chimera.launch.place import Place
from chimera.launch.ray.placement import Node, Seat, room_text, seat_ranks
from chimera.launch.ray.worker import LINE, PROCESS, Preparation, RankWorker
from chimera.launch.store import Endpoint
from chimera.launch.verdict import Main, RankState, cause_of, is_report

__all__ = ["Attempt", "LostError", "RayJob", "Shown"]

_HEAR_S: Final = 2.0
_ANSWER_S: Final = 2.0
_LAST_WORDS_S: Final = 3.5
"""How long ranks may go on after the first failure: a survivor gathers for 1.5 s what every rank was doing."""
_END_S: Final = 10.0


class LostError(RunError):
    """A failure that starting again cannot mend: no cluster, no room there, or a node that is not as it has to be."""


class Shown(Protocol):
    """Whoever shows a job to its user."""

    def message(self, rank: int, message: Any) -> None:
        """Show what a rank reports."""

    def line(self, source: str, line: str) -> None:
        """Show a line that a rank or a command printed."""

    def placed(self, seats: Sequence[Seat]) -> None:
        """Show where ranks are about to start."""

    def restart(self, cause: BaseException, number: int) -> None:
        """Show why ranks are started again, the ``number``-th time, from 1."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RayJob:
    """What a job asks of a cluster.

    Attributes:
        size: ranks.
        tensor: adjacent ones that have to share a node.
        cpus: for each rank; a part of one is possible.
        gpu: whether each rank takes one; None takes them where the cluster has any.
        preparation: of each node, before its first rank starts there.
        room_s: how long to wait until the cluster has room.
        max_restarts: how often ranks are started again after a failure.
        port: of the job's store on this host; 0 takes any that is free.
        interface: that the store listens on; by default the one of this host's node.
    """

    size: int
    tensor: int
    cpus: float
    gpu: bool | None
    preparation: Preparation
    room_s: float
    max_restarts: int
    port: int = 0
    interface: str | None = None

    def rank_needs(self, nodes: Sequence[Node]) -> Mapping[str, float]:
        """Return what each rank takes of a cluster of ``nodes``, by Ray's names."""
        gpu = any(node.gpus for node in nodes if node.alive) if self.gpu is None else self.gpu
        return {"CPU": self.cpus} | ({"GPU": 1.0} if gpu else {})


@dataclass(slots=True)
class _Rank:
    """One rank's process on the cluster, and what is known of it."""

    seat: Seat
    worker: Any
    state: RankState
    process: tuple[int, str] | None = None


@dataclass(slots=True)
class Attempt:
    """The ranks of one attempt; they have their places within the context, and none runs after it.

    Attributes:
        seats: of all ranks, in their order.
    """

    _job: RayJob
    _shown: Shown
    seats: list[Seat] = field(default_factory=list)
    _needs: Mapping[str, float] = field(default_factory=dict)
    _group: Any = None
    _ranks: list[_Rank] = field(default_factory=list)
    _answers: dict[Any, _Rank] = field(default_factory=dict)
    """Those that are waited for, the longest-asked first."""
    _looked: float = 0.0
    _head_lost: bool = False

    def __enter__(self) -> Self:
        """Take room on the cluster, one bundle for each group of tensor-parallel ranks.

        Raises:
            LostError: there is none.
        """
        job = self._job
        self._needs = job.rank_needs(_nodes())
        bundle = {name: job.tensor * number for name, number in self._needs.items()}
        self._group = placement_group([bundle] * (job.size // job.tensor), strategy="PACK")
        try:
            if not self._group.wait(job.room_s):
                raise LostError(_no_room(job, bundle, _nodes()))
            nodes = {node.name: node for node in _nodes()}
            placed = placement_group_table(self._group)["bundles_to_node_id"]
            self.seats = seat_ranks([nodes[placed[number]] for number in range(len(placed))], job.tensor)
        except BaseException:
            remove_placement_group(self._group)
            raise
        return self

    def __exit__(self, *_: object) -> None:
        """End every process that still runs, a stopped one too; files are never half-written, so it may be sudden."""
        answers = [rank.worker.hear.remote(0.0) for rank in self._ranks]
        if self._head_lost:
            for rank in self._ranks:
                rank.worker.leave.remote()
            ray.wait(answers, num_returns=len(answers), timeout=_ANSWER_S)
            return
        with suppress(RayError):
            for rank in self._ranks:
                ray.kill(rank.worker)
            if answers:
                ray.wait(answers, num_returns=len(answers), timeout=_END_S)
            remove_placement_group(self._group)

    def start(self, main: Main, store: Endpoint, restarts: int) -> None:
        """Start every rank.

        Args:
            main: what they do.
            store: where they meet.
            restarts: how often they were started before.
        """
        spans_hosts = any(seat.node.address != store.host for seat in self.seats)
        needs, preparation = self._needs, self._job.preparation
        worker_class = ray.remote(max_restarts=0)(RankWorker)
        for seat in self.seats:
            worker = worker_class.options(
                num_cpus=needs["CPU"],
                num_gpus=needs.get("GPU", 0.0),
                scheduling_strategy=PlacementGroupSchedulingStrategy(self._group, seat.bundle),
            ).remote(dict(preparation.environ), preparation.folder)
            place = Place(
                seat.rank,
                self._job.size,
                seat.local_rank,
                seat.local_size,
                store=store,
                spans_hosts=spans_hosts,
                restarts=restarts,
                host=seat.node.address,
                cores=max(1, int(needs["CPU"])),
                size_option="--workers",
            )
            worker.start.remote(main, place)
            rank = _Rank(seat, worker, RankState(seat.rank))
            self._ranks.append(rank)
            self._ask(rank)

    def watch(self) -> list[Any]:
        """Hear the ranks until all have returned, and return their results.

        Raises:
            BaseException: the cause, when one has failed.
        """
        while self._answers and not self._failed:
            self._listen(_HEAR_S)
            if time.monotonic() - self._looked > _HEAR_S:
                self._look()
        if self._failed:
            self._hear_out()
            raise cause_of([rank.state for rank in self._ranks])
        return [rank.state.result for rank in self._ranks]

    @property
    def _failed(self) -> bool:
        return any(rank.state.failed for rank in self._ranks)

    def _ask(self, rank: _Rank) -> None:
        self._answers[rank.worker.hear.remote(_HEAR_S)] = rank

    def _listen(self, timeout_s: float) -> None:
        """Take in the first answer that comes, and ask that rank again unless it has said its last."""
        ready, _ = ray.wait(list(self._answers), num_returns=1, timeout=max(0.0, timeout_s))
        for answer in ready:
            rank = self._answers.pop(answer)
            try:
                said = ray.get(answer)
            except RayActorError as error:
                rank.state.death = _death(rank, error)
                continue
            except RuntimeEnvSetupError as error:
                raise LostError(f"Ray could not ship the code to {rank.seat.node.address}: {error}") from error
            for kind, content in said:
                self._take_in(rank, kind, content)
            if not rank.state.finished and rank.state.error is None:
                # Behind the others, so that a rank with much to say does not keep them from being heard.
                self._ask(rank)

    def _take_in(self, rank: _Rank, kind: str, content: Any) -> None:
        if kind == PROCESS:
            rank.process = content
        elif kind == LINE:
            self._shown.line(f"rank {rank.seat.rank}", content)
        elif (message := rank.state.hear(kind, content)) is not None:
            self._shown.message(rank.seat.rank, message)

    def _look(self) -> None:
        """See whether the head and the daemons of all nodes still listen."""
        self._looked = time.monotonic()
        head = ray.get_runtime_context().gcs_address
        host, _, port = head.rpartition(":")
        if not _listens(host.strip("[]"), int(port)):
            self._head_lost = True
            raise LostError(
                f"the head of the Ray cluster, {head}, was lost, and all ranks with it; start a cluster again, and go "
                "on by --resume"
            )
        answering = {seat.node: True for seat in self.seats}
        for node in answering:
            answering[node] = _listens(node.address, node.port)
        for rank in self._answers.values():
            if not answering[rank.seat.node]:
                rank.state.death = f"was lost with its node {rank.seat.node.address}, where Ray's daemon has ended"

    def _hear_out(self) -> None:
        """Listen until one rank has told what all were doing, every rank has ended, or time is up."""
        deadline = time.monotonic() + _LAST_WORDS_S
        while self._answers and not any(is_report(rank.state.error) for rank in self._ranks):
            left = deadline - time.monotonic()
            if left <= 0:
                break
            self._listen(left)
        # Ranks notice a lost peer sooner than Ray does.
        self._look()


def _nodes() -> list[Node]:
    return [
        Node(
            name=found["NodeID"],
            address=found["NodeManagerAddress"],
            port=found["NodeManagerPort"],
            cpus=found["Resources"].get("CPU", 0.0),
            gpus=found["Resources"].get("GPU", 0.0),
            alive=found["Alive"],
        )
        for found in ray.nodes()
    ]


def _listens(host: str, port: int) -> bool:
    with suppress(OSError), socket.create_connection((host, port), _ANSWER_S):
        return True
    return False


def _no_room(job: RayJob, bundle: Mapping[str, float], nodes: Sequence[Node]) -> str:
    needed = " and ".join(f"{number:g} {name}" for name, number in bundle.items())
    groups = job.size // job.tensor
    what = f"{groups} ranks" if job.tensor == 1 else f"{groups} groups of {job.tensor} tensor-parallel ranks"
    free = ray.available_resources()
    offered = ", ".join(f"{free.get(name, 0.0):g} {name}" for name in bundle)
    return (
        f"the cluster had no room for {what} within {job.room_s:g} s: each needs {needed} on one node; there is "
        f"{room_text(nodes)}, of which {offered} are free. Add nodes, wait longer (--wait-s), or have ranks share "
        "cores (--cpus-per-rank 0.5)"
    )


def _death(rank: _Rank, error: RayActorError) -> str:
    """Return how a rank ended, as the rest of a sentence."""
    address = rank.seat.node.address
    if not _listens(address, rank.seat.node.port):
        return f"was lost with its node {address}, where Ray's daemon has ended"
    if rank.process is None:
        return f"did not start on {address}: {' '.join(str(error).split())}"
    number, log = rank.process
    reason = str(error)
    # Ray's words for a process that was killed or crashed are a page long, and know no more than that.
    why = "killed, out of memory or crashed" if "End of file" in reason else " ".join(reason.split())
    return f"ended before it was done: its process {number} on {address} is gone ({why}); what it printed is in {log}"
