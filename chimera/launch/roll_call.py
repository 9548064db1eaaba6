"""The roll call of a job: all ranks are here, and none of an earlier attempt is taken for one of this.

A launcher that restarts ranks may keep its store, with everything that the earlier ranks left in it. So the first rank
answers each of the others by a word that only a living rank has just made up, and gives all of them one prefix for the
keys of this attempt.
"""

import secrets
import time
from datetime import timedelta

from torch.distributed.distributed_c10d import Store

from chimera.errors import RunError

__all__ = ["call_roll"]

_NAP_S = 0.01


def call_roll(store: Store, rank: int, size: int, *, host: str, timeout_s: float) -> str:
    """Wait until every rank has called this, and return what keys of this attempt begin with, equal on all ranks.

    Args:
        store: of the job, perhaps one that earlier attempts used.
        rank: of the caller.
        size: ranks of the job.
        host: what this rank's host is called.
        timeout_s: how long to wait for the others.

    Raises:
        RunError: on the first rank, naming those that did not come within the time-out.
        RuntimeError: on another, the first rank did not answer, or the store is gone.
    """
    if rank == 0:
        return _call(store, size, host, timeout_s)
    word = secrets.token_hex(8)
    store.set(f"roll/here/{rank}", f"{word} {host}")
    answer = f"roll/answer/{word}"
    store.wait([answer], timedelta(seconds=timeout_s))
    attempt = store.get(answer).decode()
    store.set(f"roll/{attempt}/{rank}", "")
    return attempt


def _call(store: Store, size: int, host: str, timeout_s: float) -> str:
    attempt = secrets.token_hex(8)
    deadline = time.monotonic() + timeout_s
    hosts = {0: host}
    missing = list(range(1, size))
    answered: set[str] = set()
    while missing:
        for rank in missing:
            if not store.check([f"roll/here/{rank}"]):
                continue
            word, _, hosts[rank] = store.get(f"roll/here/{rank}").decode().partition(" ")
            if word not in answered:
                store.set(f"roll/answer/{word}", attempt)
                answered.add(word)
        missing = [rank for rank in missing if not store.check([f"roll/{attempt}/{rank}"])]
        if missing and time.monotonic() > deadline:
            raise RunError(_absent(missing, size, hosts, timeout_s))
        if missing:
            time.sleep(_NAP_S)
    return attempt


def _absent(missing: list[int], size: int, hosts: dict[int, str], timeout_s: float) -> str:
    ranks = f"rank{'s' if len(missing) > 1 else ''} {', '.join(map(str, missing))} of {size}"
    here = ", ".join(f"{rank} on {host}" for rank, host in sorted(hosts.items()) if rank not in missing)
    return (
        f"{ranks} did not join the job within {timeout_s:g} s; those that did: {here}. See whether the others have "
        "started and reach this host, and raise --runtime.timeout-s if they are slow to"
    )
