"""A group of ranks that can send to each other and sum together, over gloo or NCCL.

Peers are named by their rank in the world. Every wait has the group's time-out, and a failed one, whatever the backend
raised, is a ``StalledError``: a peer died or did not answer in time.
"""

from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store

from chimera.errors import StalledError

__all__ = ["Communicator", "Pending", "default_backend", "own_store"]

_NEVER_SENT = 1 << 20
"""A tag without a sender: routes and the control group's few uses are numbered from 0."""


def own_store(world: "dist.ProcessGroup | None") -> Store | None:
    """Return the store of ``world`` under a prefix that no earlier or later call gets; all its ranks call this."""
    if world is None:
        return None
    store = world.get_group_store()
    # Each rank counts its own calls, and all make the same calls: equal numbers without a message.
    return PrefixStore(f"chimera/{store.add(f'chimera/runs/{world.rank()}', 1)}", store)


def default_backend(store: Store | None, rank: int, size: int, device: torch.device) -> str:
    """Choose NCCL where all ranks have a CUDA device each; it refuses two ranks on one device."""
    if device.type != "cuda" or store is None or not dist.is_nccl_available():
        return "gloo"
    uuid = str(torch.cuda.get_device_properties(device).uuid)
    store.set(f"device/{rank}", uuid)
    devices = [store.get(f"device/{other}") for other in range(size)]
    return "nccl" if len(set(devices)) == size else "gloo"


class Pending:
    """An operation under way."""

    __slots__ = ("_members", "_timeout", "_what", "_work")

    def __init__(self, work: Any, timeout: timedelta, what: str, members: int | Sequence[int]) -> None:
        self._work = work
        self._timeout = timeout
        self._what = what
        self._members = members

    def when_done(self, call: Callable[[], None]) -> bool:
        """Call ``call`` at the end: from another thread on gloo, on a stream that has waited for it on NCCL.

        Returns:
            False where the operation cannot tell, as gloo's reduce-scatter.
        """
        try:
            future = self._work.get_future()
        except RuntimeError:
            return False
        future.add_done_callback(lambda _: call())
        return True

    def wait(self) -> None:
        """Wait for the end: on gloo the host waits, on NCCL the current stream.

        Raises:
            StalledError: the peer died, or did not take part within the time-out.
        """
        try:
            self._work.wait(self._timeout)
        except RuntimeError as error:
            raise _lost(self._what, self._members, error) from error


class Communicator:
    """One communicator of torch.distributed, made from a store without entering any global registry.

    Args:
        backend: "gloo" or "nccl".
        store: a store whose prefix no other communicator uses.
        ranks: the members' world ranks, ascending.
        rank: this rank's world rank, among them.
        timeout: how long an operation waits for its peers.
    """

    def __init__(self, backend: str, store: Store, ranks: Sequence[int], rank: int, timeout: timedelta) -> None:
        self.backend = backend
        self.ranks = tuple(ranks)
        self._index = {world_rank: index for index, world_rank in enumerate(ranks)}
        self._timeout = timeout
        self._group: Any
        try:
            if backend == "nccl":
                options = dist.ProcessGroupNCCL.Options()
                options._timeout = timeout  # noqa: SLF001 - torch offers no other way to set it
                self._group = dist.ProcessGroupNCCL(store, self._index[rank], len(ranks), options)
            else:
                self._group = dist.ProcessGroupGloo(store, self._index[rank], len(ranks), timeout)
        except RuntimeError as error:
            raise _lost("connecting", ranks, error) from error

    def send(self, tensor: torch.Tensor, peer: int, tag: int) -> Pending:
        """Start sending a contiguous tensor."""
        return self._start("sending to", peer, self._group.send, [tensor], self._index[peer], tag)

    def receive(self, tensor: torch.Tensor, peer: int, tag: int) -> Pending:
        """Start receiving into a contiguous tensor."""
        return self._start("receiving from", peer, self._group.recv, [tensor], self._index[peer], tag)

    def all_reduce(self, tensor: torch.Tensor) -> Pending:
        """Start summing over all members, in place."""
        return self._start("summing over", self.ranks, self._group.allreduce, [tensor])

    def maximum(self, tensor: torch.Tensor) -> Pending:
        """Start taking the largest of all members' values, in place."""
        options = dist.AllreduceOptions()
        options.reduceOp = dist.ReduceOp.MAX  # type: ignore[assignment]
        return self._start("a maximum over", self.ranks, self._group.allreduce, [tensor], options)

    def all_gather(self, output: torch.Tensor, tensor: torch.Tensor) -> Pending:
        """Start writing every member's contiguous ``tensor`` to ``output``, one after another in rank order."""
        gather = self._group._allgather_base  # noqa: SLF001 - the form that takes one output
        return self._start("gathering from", self.ranks, gather, output.view(-1), tensor.view(-1))

    def reduce_scatter(self, output: torch.Tensor, tensor: torch.Tensor) -> Pending:
        """Start summing the contiguous ``tensor`` over all members; each gets its part, by rank, in ``output``."""
        scatter = self._group._reduce_scatter_base  # noqa: SLF001 - the form that takes one input
        return self._start("summing over", self.ranks, scatter, output.view(-1), tensor.view(-1))

    def broadcast(self, tensor: torch.Tensor, root: int) -> Pending:
        """Start copying the tensor of ``root`` to all members."""
        return self._start("a broadcast from", root, self._group.broadcast, tensor, self._index[root])

    def gather(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """Return the tensors of all members, in rank order; all have one shape."""
        outputs = [torch.empty_like(tensor) for _ in self.ranks]
        self._start("gathering from", self.ranks, self._group.allgather, [outputs], [tensor]).wait()
        return outputs

    def abort(self) -> None:
        """Make every operation under way here fail at once; called from another thread than the one that waits."""
        if self.backend == "nccl":
            self._group.abort()
            return
        # Gloo has no abort of its own, but a receive that times out closes all connections of its group. The one to a
        # dead peer fails without doing so, hence all peers.
        for index in self._index.values():
            if index != self._group.rank():
                with suppress(RuntimeError):
                    self._group.recv([torch.empty(1)], index, _NEVER_SENT).wait(timedelta(milliseconds=1))

    def _start(
        self, what: str, members: int | Sequence[int], operation: Callable[..., Any], *arguments: object
    ) -> Pending:
        try:
            return Pending(operation(*arguments), self._timeout, what, members)
        except RuntimeError as error:
            raise _lost(what, members, error) from error


def _lost(what: str, members: int | Sequence[int], error: RuntimeError) -> StalledError:
    who = f"rank {members}" if isinstance(members, int) else f"ranks {', '.join(map(str, members))}"
    reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
    return StalledError(f"{what} {who} failed: {reason}")
