"""A pool of preloaded processes that tests borrow as the ranks of a group.

Starting Python, importing torch and connecting takes longer than most distributed tests, so it is done once: the
processes are forked from one that has imported everything, meet at a store on the loopback interface, and then run one
function after another. A function is sent by name, gets a group of exactly the ranks it was asked for, and returns
plain values or arrays. Any failure replaces the whole pool, so no test meets what another one left behind.

The module knows nothing of pipelines. Nothing starts before the first ``run``; ``close`` leaves no process behind.
"""

import gc
import importlib
import multiprocessing
import os
import sys
import time
import traceback
import warnings
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing import forkserver
from multiprocessing.connection import wait

import torch
import torch.distributed as dist

__all__ = ["PRELOADED", "RankError", "Ranks", "warm_up"]

PRELOADED = [
    "chimera.cli.bench_reduce",
    "chimera.cli.bench_runtime",
    "chimera.cli.contenders",
    "chimera.cli.profile_calibrate",
    "chimera.cli.training",
    "chimera.launch.connect",
    "chimera.models",
    "chimera.runtime.pipeline",
    "chimera.schedules",
    "chimera.train.loop",
    "chimera.train.measured_stages",
    "chimera.train.profiling",
    "numpy",
    "pytest",
    "torch",
    "torch._dynamo",
]
"""What any process needs that is forked here or by a command under test: there is one server to fork from."""
LOOPBACK = "127.0.0.1"
START_S = 60.0
GRACE_S = 3.0
"""How long the other ranks may take to end once one has failed; they often wait for the one that did."""


class RankError(AssertionError):
    """A function failed, or did not end, on some rank; the message holds every remote traceback."""


def warm_up():
    """Start the server that ranks are forked from, with all that any of them needs, and return at once."""
    multiprocessing.get_context("forkserver").set_forkserver_preload(PRELOADED)
    forkserver.ensure_running()


@dataclass(frozen=True)
class _Rank:
    process: multiprocessing.Process
    connection: multiprocessing.connection.Connection


class Ranks:
    """The pool: ``size`` processes, started by the first ``run`` and again after a failure."""

    def __init__(self, size=8):
        self.size = size
        self._ranks = []

    def run(self, n, function, *args, timeout_s=60.0, **options):
        """Call ``function(group, *args, **options)`` on ``n`` ranks at once; return their results in rank order.

        Args:
            n: how many of the pool's processes take part; ``group`` is the process group of these.
            function: a function at the top level of a module.
            *args: plain values or arrays, the same for every rank.
            **options: likewise.
            timeout_s: how long all of it may take.

        Raises:
            RankError: with the traceback of every rank that failed and the number of every one that did not end.
        """
        assert 1 <= n <= self.size, f"the pool has {self.size} ranks, asked for {n}"
        if not self._ranks:
            self._start()
        for rank in self._ranks:
            rank.connection.send((sys.path, n, (function.__module__, function.__qualname__), args, options))
        answers = self._collect(timeout_s)
        failed = {rank: text for rank, (good, text) in answers.items() if not good}
        missing = [rank for rank in range(self.size) if rank not in answers]
        if failed or missing:
            self.close(kill=True)
            texts = [f"rank {rank}:\n{text}" for rank, text in sorted(failed.items())]
            if missing:
                limit = f"{GRACE_S} s after the first failure" if failed else f"{timeout_s} s"
                texts.append(f"no answer within {limit} from rank {', '.join(map(str, missing))}")
            raise RankError(f"{function.__qualname__} failed on {n} ranks\n" + "\n".join(texts))
        return [answers[rank][1] for rank in range(n)]

    def process_ids(self):
        """Return the process number of every rank, none before the first ``run``."""
        return [rank.process.pid for rank in self._ranks]

    def close(self, *, kill=False):
        """End all processes; with ``kill`` at once, whatever they are doing."""
        for rank in self._ranks:
            rank.connection.close()
        deadline = time.monotonic() + 5.0
        for rank in self._ranks:
            if not kill:
                rank.process.join(max(0.0, deadline - time.monotonic()))
            rank.process.kill()
            rank.process.join()
            rank.process.close()
        self._ranks = []

    def _start(self):
        warm_up()
        context = multiprocessing.get_context("forkserver")
        for number in range(self.size):
            here, there = context.Pipe()
            process = context.Process(target=_serve, args=(number, self.size, there), daemon=True)
            process.start()
            there.close()
            self._ranks.append(_Rank(process, here))
        self._ranks[0].connection.send(None)
        port = self._answer_of(0)
        for rank in self._ranks[1:]:
            rank.connection.send(port)
        for number in range(self.size):
            self._answer_of(number)

    def _answer_of(self, number):
        connection = self._ranks[number].connection
        if not connection.poll(START_S):
            self.close(kill=True)
            raise RankError(f"rank {number} of the pool did not start within {START_S} s")
        return connection.recv()

    def _collect(self, timeout_s):
        waiting = {rank.connection: number for number, rank in enumerate(self._ranks)}
        answers = {}
        deadline = time.monotonic() + timeout_s
        while waiting and (ready := wait(waiting, max(0.0, deadline - time.monotonic()))):
            for connection in ready:
                number = waiting.pop(connection)
                try:
                    answers[number] = connection.recv()
                except EOFError:
                    answers[number] = False, "the process died\n"
                if not answers[number][0]:
                    deadline = min(deadline, time.monotonic() + GRACE_S)
        return answers


def _serve(rank, size, connection):
    """Join the pool's group, then answer one call after another until the other end of the connection is closed."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    port = connection.recv()
    store = dist.TCPStore(
        LOOPBACK, port or 0, None, is_master=port is None, timeout=timedelta(seconds=START_S), wait_for_workers=False
    )
    if port is None:
        connection.send(store.port)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=timedelta(seconds=START_S))
    connection.send("ready")
    gc.freeze()
    while True:
        try:
            connection.send(_answer(*connection.recv()))
        except (EOFError, ConnectionError):
            # Not through the destructors: they could wait for peers, and there is nothing to save.
            os._exit(0)


def _answer(path, n, function, args, options):
    try:
        sys.path[:] = path
        # All ranks of the pool make the group, so that each one has a name, and with it keys in the store, of its own.
        group = dist.new_group(range(n))
        if dist.get_rank() >= n:
            return True, None
        module, name = function
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            result = getattr(importlib.import_module(module), name)(group, *args, **options)
        dist.destroy_process_group(group)
    except BaseException:  # noqa: BLE001 - pytest's outcomes are no Exceptions
        return False, traceback.format_exc()
    finally:
        # Connections of a call go with the objects that hold them, now rather than some calls later.
        gc.collect()
    return True, result
