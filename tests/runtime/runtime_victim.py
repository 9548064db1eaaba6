"""A program that runs jobs in which one rank dies or stalls, with a process for every rank.

Each line of its input is a job, a JSON object of what ``run_job`` takes. It trains on ``world`` ranks; in step 2, in
its forward of micro-batch 1, the rank ``victim`` meets its ``fate``. ``host``, a rank or -1 for the starting process,
hosts the store. The job has a session of its own, whose number is printed first. Each rank's words go to
``folder/rank.err``; how each one ended, and how long after the victim's fate, is printed as JSON. Jobs and ranks are
forked from one process only to import torch once.
"""

import json
import os
import signal
import socket
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional

from chimera.runtime.pipeline import Pipeline
from chimera.schedules import build_schedule

PIPELINE_RANKS = 4
NUM_MICROBATCHES = 4
LOOPBACK = "127.0.0.1"
FATES = ("kill", "stop", "sleep")


class Fateful(nn.Module):
    """A layer that meets its fate, if it has one, in its forward of micro-batch 1 of step 2."""

    def __init__(self, fate):
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.calls, self.fate = 0, fate

    def forward(self, hidden):
        if self.fate is not None and self.calls == 2 * NUM_MICROBATCHES + 1:
            self.fate()
        self.calls += torch.is_grad_enabled()  # finding out shapes is no call
        return self.linear(hidden)


def fate_of(folder, name):
    def meet():
        # Long enough for the rank to have said where it is.
        time.sleep(1.2)
        (folder / "fate").write_text(str(time.monotonic()))
        if name == "sleep":
            time.sleep(600)
        os.kill(os.getpid(), {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}[name])

    return meet


def make_store(listener, *, hosts):
    port = listener.getsockname()[1]
    if hosts:
        return dist.TCPStore(
            LOOPBACK, port, None, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach()
        )
    return dist.TCPStore(LOOPBACK, port, None, is_master=False, wait_for_workers=False)


def train(rank, world, store, *, fate, timeout_s):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world)
    layers = [Fateful(fate) for _ in range(PIPELINE_RANKS)]
    schedule = build_schedule("1f1b", ranks=PIPELINE_RANKS, microbatches=NUM_MICROBATCHES)
    pipe = Pipeline(layers, schedule, functional.mse_loss, dist.group.WORLD, timeout_s=timeout_s)
    for _ in range(4):
        pipe.step(torch.ones(8, 3), torch.ones(8, 3))
    pipe.close()


def fork(folder, rank, work):
    """Run ``work`` in a process whose words go to a file; it ends as any Python program ends."""
    process_id = os.fork()
    if process_id:
        return process_id
    with (folder / f"{rank}.err").open("w") as words:
        os.dup2(words.fileno(), 2)
    work()
    sys.exit()


def run_job(*, folder, world, victim, fate, timeout_s, host):
    folder = Path(folder)
    meet = fate_of(folder, fate)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    listener = socket.create_server((LOOPBACK, 0))
    ranks = {}
    for rank in range(world):

        def work(rank=rank):
            store = make_store(listener, hosts=rank == host)
            train(rank, world, store, fate=meet if rank == victim else None, timeout_s=timeout_s)

        ranks[fork(folder, rank, work)] = rank
    store = make_store(listener, hosts=True) if host < 0 else None
    waited_for = {process_id for process_id, rank in ranks.items() if rank != victim}
    ended = {}
    while waited_for:
        process_id, status = os.wait()
        waited_for.discard(process_id)
        ended[ranks[process_id]] = os.waitstatus_to_exitcode(status), time.monotonic()
    if victim not in ended:
        (process_id,) = (process_id for process_id, rank in ranks.items() if rank == victim)
        os.kill(process_id, signal.SIGKILL)
        os.waitpid(process_id, 0)
    met = float((folder / "fate").read_text())
    print(json.dumps({rank: (code, moment - met) for rank, (code, moment) in ended.items()}), flush=True)
    del store


def main():
    for line in sys.stdin:
        process_id = os.fork()
        if process_id:
            os.waitpid(process_id, 0)
            continue
        os.setsid()
        print(os.getpid(), flush=True)
        run_job(**json.loads(line))
        sys.exit()


if __name__ == "__main__":
    main()
