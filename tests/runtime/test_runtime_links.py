"""The ends of channels: what is sent arrives whole and in order, and a peer that is gone is noticed."""

import time
from datetime import timedelta
from pathlib import Path
from threading import Timer

import numpy as np
import pytest
import torch
from torch.distributed.distributed_c10d import PrefixStore, _get_default_store

from chimera.errors import StalledError
from chimera.ir.schedule import Placement
from chimera.runtime import groups as groups_module
from chimera.runtime import shared_memory
from chimera.runtime.groups import Groups
from chimera.runtime.links import CommunicatorLink
from chimera.runtime.shared_memory import Receiver, Sender

THERE, BACK = (0, 1, 0), (1, 0, 0)
ROUTES = Placement(2, ((0, 1), (1, 0)))
needs_shared_memory = pytest.mark.skipif(
    shared_memory.host_identity() is None, reason="shared memory channels need Linux"
)


def ends(group, backend=None, timeout_s=20.0):
    """Return this rank's ends of both channels of two ranks."""
    groups = Groups.create(group, ROUTES, channels=[THERE, BACK], backend=backend, timeout_s=timeout_s)
    mine = (THERE, BACK) if group.rank() == 0 else (BACK, THERE)
    return groups, *(groups.channels[channel] for channel in mine)


def messages():
    """Messages of many sizes and types, one without elements among them, and one larger than any before."""
    sizes = [(3,), (), (64, 1000), (0, 4), (5, 7), (1,), (300, 1000), (2, 2)]
    types = [torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.bool, torch.float16, torch.uint8]
    return [
        (torch.arange(int(np.prod(size))) + number).reshape(size).to(types[number % len(types)])
        for number, size in enumerate(sizes * 4)
    ]


def exchange(group, backend, claim_order):
    """Send all messages both ways before any is awaited, then wait in an order of the receiver's own."""
    _, sender, receiver = ends(group, backend)
    sent = messages()
    buffers = [torch.empty_like(tensor) for tensor in sent]
    arriving = [receiver.receive(buffer) for buffer in buffers]
    leaving = [sender.send(tensor) for tensor in sent]
    for number in sorted(range(len(sent)), key=lambda n: (n % claim_order, n)):
        arriving[number].wait()
    for transfer in leaving:
        transfer.wait()
    return [
        type(sender).__name__,
        [bool(torch.equal(got, due)) for got, due in zip(buffers, sent, strict=True)],
    ]


@pytest.mark.parametrize(
    ("backend", "claim_order", "kind"),
    [
        pytest.param(None, 1, "Sender", marks=needs_shared_memory),
        pytest.param(None, 3, "Sender", marks=needs_shared_memory),
        ("gloo", 1, "CommunicatorLink"),
    ],
)
def test_messages_arrive_whole_and_in_order(ranks, backend, claim_order, kind):
    """Each receive gets the message of its number, whatever the sizes and the order in which they are awaited."""
    for name, arrived in ranks.run(2, exchange, backend, claim_order):
        assert name == kind
        assert arrived == [True] * len(messages())


def run_ahead(group, count):
    """Rank 0 sends ``count`` messages before rank 1 takes the first; then one at a time."""
    _, sender, receiver = ends(group)
    token, got = torch.zeros(1), torch.empty(100)
    seen = []
    if group.rank() == 0:
        for number in range(count):
            sender.send(torch.full((100,), float(number))).wait()
        sender.send(token)
        receiver.receive(token).wait()
        slots_ahead = len(sender._slots)
        for number in range(count):
            sender.send(torch.full((100,), float(number))).wait()
            receiver.receive(token).wait()
        return slots_ahead, len(sender._slots), seen
    transfers = [receiver.receive(torch.empty(100)) for _ in range(count)]
    receiver.receive(token).wait()
    for transfer in transfers:
        transfer.wait()
        seen.append(float(transfer.tensor[0]))
    sender.send(token)
    for _ in range(count):
        receiver.receive(got).wait()
        seen.append(float(got[-1]))
        sender.send(token)
    return 0, 0, seen


@needs_shared_memory
def test_a_sender_never_waits_and_slots_are_used_again(ranks):
    """A thousand messages go before one is taken, each in a slot; as many more need no new slot."""
    (ahead, after, _), (_, _, seen) = ranks.run(2, run_ahead, 1000)
    assert seen == [float(number) for number in (*range(1000), *range(1000))]
    assert ahead == 1001
    assert after == ahead


def wait_for_nothing(group, why):
    """Rank 1 waits for a message that does not come; return what it was told and how long it waited."""
    groups, sender, receiver = ends(group, timeout_s=1.0 if why == "time-out" else 20.0)
    if group.rank() == 0:
        if why == "size":
            sender.send(torch.zeros(3))
        if why != "dead":
            group.barrier().wait()
        return None
    awaited = receiver.receive(torch.empty(4))
    if why == "abort":
        Timer(0.3, groups.abort).start()
    start = time.monotonic()
    with pytest.raises(StalledError) as caught:
        awaited.wait()
    waited = time.monotonic() - start
    if why != "dead":
        group.barrier().wait()
    return str(caught.value), waited


@needs_shared_memory
@pytest.mark.parametrize(
    ("why", "told"),
    [
        ("time-out", "receiving from rank 0 failed: no message within 1 s"),
        ("dead", "receiving from rank 0 failed: it has closed the channel"),
        ("abort", "receiving from rank 0 failed: another rank has reported a failure"),
        ("size", "receiving from rank 0 failed: it sent 12 bytes where 16 were due"),
    ],
)
def test_a_message_that_does_not_come_is_reported(ranks, why, told):
    """The wait ends by the time-out, at once when the sender's end is gone or a failure reported, and says which."""
    _, (message, waited) = ranks.run(2, wait_for_nothing, why)
    assert message == told
    assert waited < 15.0


def send_to_nobody(group):
    """Rank 1 drops its ends; rank 0 sends until it hears of it."""
    groups, sender, receiver = ends(group)
    if group.rank() == 1:
        groups.channels.clear()
        del sender, receiver
        group.barrier().wait()
        return None
    group.barrier().wait()
    with pytest.raises(StalledError, match="sending to rank 1 failed: it has closed the channel"):
        sender.send(torch.zeros(3))
    return True


@needs_shared_memory
def test_a_send_to_a_rank_that_is_gone_fails(ranks):
    """Its end of the pipe is closed, which the next send meets."""
    assert ranks.run(2, send_to_nobody) == [True, None]


def kinds_of_links(group, hosts):
    """Return the kind of each channel's end, where the ranks say that they are on these hosts."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(groups_module.shared_memory, "host_identity", lambda: hosts[group.rank()])
        placement = Placement(3, ((0, 1, 2),))
        channels = [(0, 1, 0), (1, 0, 0), (1, 2, 0), (2, 1, 0)]
        groups = Groups.create(group, placement, channels=channels, timeout_s=20.0)
    return {channel: type(link) for channel, link in groups.channels.items()}


@needs_shared_memory
def test_only_ranks_of_one_host_share_memory(ranks):
    """Ranks 0 and 1 share a host; from 1 to 2 messages go over the communicator, as where no memory can be shared."""
    first, second, third = ranks.run(3, kinds_of_links, ["a", "a", "b"])
    assert first == {(0, 1, 0): Sender, (1, 0, 0): Receiver}
    assert second == {(0, 1, 0): Receiver, (1, 0, 0): Sender, (1, 2, 0): CommunicatorLink, (2, 1, 0): CommunicatorLink}
    assert third == {(1, 2, 0): CommunicatorLink, (2, 1, 0): CommunicatorLink}
    for links in ranks.run(3, kinds_of_links, [None, None, None]):
        assert set(links.values()) == {CommunicatorLink}


def leftover_descriptors(group):
    """Return how many descriptors a run of channels leaves open once it is dropped."""
    store = PrefixStore("leftover", _get_default_store())
    before = len(list(Path("/proc/self/fd").iterdir()))
    channels = {THERE: 1 - group.rank()}, {BACK: 1 - group.rank()}
    sending, receiving = channels if group.rank() == 0 else ({BACK: 0}, {THERE: 0})
    made = shared_memory.connect(sending, receiving, rank=group.rank(), store=store, timeout=timedelta(seconds=20))
    during = len(list(Path("/proc/self/fd").iterdir()))
    del made
    return during - before, len(list(Path("/proc/self/fd").iterdir())) - before


@needs_shared_memory
def test_dropped_channels_leave_nothing_open(ranks):
    """A sender holds its file and the pipe's end, a receiver likewise; neither the listener nor anything else stays."""
    assert ranks.run(2, leftover_descriptors) == [(4, 0), (4, 0)]
