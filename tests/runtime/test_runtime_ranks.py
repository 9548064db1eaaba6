"""The pool of rank processes that other tests rely on: lazy, honest about failures, and gone when closed."""

import os
import time
import warnings
from importlib.util import find_spec

import pytest
import torch
import torch.distributed as dist
from ranks import PRELOADED, RankError, Ranks


@pytest.fixture(scope="module")
def pool():
    pool = Ranks(2)
    yield pool
    pool.close()


def add_up(group, *, start):
    total = torch.tensor([start + group.rank()])
    dist.all_reduce(total, group=group)
    return group.rank(), group.size(), total.item(), torch.get_num_threads()


def fail_on_rank_1(group):
    if group.rank() == 1:
        raise ValueError("rank 1 says no")
    dist.barrier(group=group)


def sleep(group):
    time.sleep(60)


def die(group):
    os._exit(3)


def warn(group):
    warnings.warn("careful", stacklevel=1)


def is_alive(process_id):
    try:
        os.kill(process_id, 0)
    except ProcessLookupError:
        return False
    return True


def test_nothing_starts_before_the_first_call():
    """A pool that nobody asks has no processes, and closing it is no error."""
    idle = Ranks(2)
    assert idle.process_ids() == []
    idle.close()


def test_what_is_loaded_ahead_is_there():
    """The server of processes passes over a module that it does not find, and ranks would take seconds more each."""
    assert [name for name in PRELOADED if find_spec(name) is None] == []


def test_functions_run_on_as_many_ranks_as_asked_for(pool):
    """Results come in rank order, from a group of exactly these ranks, in the same processes each time."""
    assert pool.run(2, add_up, start=3) == [(0, 2, 7, 1), (1, 2, 7, 1)]
    processes = pool.process_ids()
    assert pool.run(1, add_up, start=3) == [(0, 1, 3, 1)]
    assert pool.run(2, add_up, start=0) == [(0, 2, 1, 1), (1, 2, 1, 1)]
    assert pool.process_ids() == processes


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (fail_on_rank_1, r"(?s)rank 1:.*ValueError: rank 1 says no"),
        (sleep, r"no answer within 0.5 s from rank 0, 1"),
        (die, r"rank 0:\nthe process died"),
        (warn, r"UserWarning: careful"),
    ],
)
def test_a_failure_is_told_and_forgotten(pool, function, message):
    """The remote traceback is in the error; no process survives it, and the next call finds new ones."""
    before = [*pool.run(2, add_up, start=0), *pool.process_ids()][2:]
    with pytest.raises(RankError, match=message):
        pool.run(2, function, timeout_s=0.5 if function is sleep else 20.0)
    assert pool.process_ids() == []
    assert [process for process in before if is_alive(process)] == []
    assert pool.run(2, add_up, start=3)[0] == (0, 2, 7, 1)


def test_closing_ends_every_process():
    """No process is left when the pool is closed."""
    own = Ranks(2)
    own.run(2, add_up, start=0)
    processes = own.process_ids()
    assert all(is_alive(process) for process in processes)
    own.close()
    assert not any(is_alive(process) for process in processes)
