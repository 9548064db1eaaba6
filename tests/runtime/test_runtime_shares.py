"""Tensor-parallel ranks send a share each of a message that all of them have, and join it bit for bit."""

import pytest
import torch
from runtime_cases import SEED, cut_config, cut_layers, make_loss, make_schedule, microbatch, microbatches, snapshot

from chimera.errors import RunError
from chimera.runtime.pipeline import Pipeline
from chimera.runtime.shares import Shares
from chimera.runtime.stage import spec_of
from chimera.tensor.parallel import TensorParallel


def message():
    """Return tensors of many types and sizes, most of which three ranks do not divide."""
    generator = torch.Generator().manual_seed(0)
    wide = torch.randn(2, 5, generator=generator, dtype=torch.float64)
    return (
        wide,
        wide.t(),  # not contiguous
        wide.half(),
        wide.bfloat16(),
        wide.sum(),
        wide[:0],
        wide[:1, :2].float() * float("nan"),
        wide > 0,
        torch.arange(12),
        torch.arange(4, dtype=torch.uint8),
    )


def joined(group):
    """Divide and join the message; return what this rank sent, by type and size, and whether all came out the same."""
    tensor = TensorParallel.join(group, group.size(), timeout_s=20.0)
    whole, shares = message(), Shares(tensor)
    mine = shares.divide(whole, "of all types")
    assert spec_of(mine) == shares.spec(spec_of(whole))
    back = shares.join(mine, spec_of(whole))
    same = spec_of(back) == spec_of(whole) and all(
        torch.equal(got.contiguous().view(-1).view(torch.uint8), sent.reshape(-1).view(torch.uint8))
        for got, sent in zip(back, whole, strict=True)
    )
    return [(str(share.dtype).removeprefix("torch."), len(share)) for share in mine], same


def test_shares_make_the_same_bits_again(ranks):
    """Whatever a tensor's type, size and layout; shares are equal, the last one padded."""
    floats = [("float64", 4), ("float64", 4), ("float16", 4), ("bfloat16", 4), ("float64", 1), ("float64", 0)]
    sent = [*floats, ("float32", 1), ("bool", 4), ("int64", 4), ("uint8", 2)]
    assert ranks.run(3, joined) == [(sent, True)] * 3


def joined_from_a_byte(group):
    """Join shares where messages are a single byte; return the sums and shapes that come out."""
    shares = Shares(TensorParallel.join(group, group.size(), timeout_s=20.0), one_byte=True)
    back = shares.join(shares.divide(message(), "of all types"), spec_of(message()))
    return spec_of(back) == spec_of(message()), {tensor.double().sum().item() for tensor in back}


def test_a_byte_in_place_of_messages_joins_to_zeros(ranks):
    """Of the right types and shapes."""
    assert ranks.run(2, joined_from_a_byte) == [(True, {0.0})] * 2


def refused(group):
    """Return what a rank is told of messages that differ between the ranks: in a few values, and in size."""
    shares, rank = Shares(TensorParallel.join(group, group.size(), timeout_s=20.0)), group.rank()
    told = []
    for tensor in (torch.ones(5000).index_fill(0, torch.arange(0, 5000, 50), 1 + rank), torch.ones(3, 2 + rank)):
        with pytest.raises(RunError) as error:
            shares.divide((torch.ones(2), tensor), "F from stage 0 to stage 1")
        told.append(str(error.value))
    # Equal but for rounding, and not a number anywhere, are let pass.
    shares.divide((torch.ones(3) * (1 + 1e-6 * rank),), "rounded")
    shares.divide((torch.full((3,), float("nan")),), "nan")
    return told


def test_ranks_that_hand_over_different_tensors_are_refused(ranks):
    """On all of them alike, with the message and the tensor; shares of different tensors would make none."""
    for rank, told in enumerate(ranks.run(2, refused)):
        for text, shape in zip(told, ([5000], [3, 2 + rank]), strict=True):
            assert text.startswith(
                f"tensor 1 of the message F from stage 0 to stage 1, {shape} here, differs between the 2 ranks"
            )


def test_divided_sequences_are_sent_as_they_are():
    """Ranks have a part each; so has a rank of its own, of everything."""
    whole = message()
    for tensor in (TensorParallel(), TensorParallel(1, 2, sequence=True)):
        shares = Shares(tensor)
        assert shares.spec(spec_of(whole)) == spec_of(whole)
        assert shares.divide(whole, "parts") is whole
        assert shares.join(whole, spec_of(whole)) is whole


class CountingLink:
    """Counts the bytes that are sent through another link."""

    def __init__(self, link, counted):
        self.link = link
        self.counted = counted
        self.in_background = link.in_background

    def send(self, tensor):
        self.counted.append(tensor.numel() * tensor.element_size())
        return self.link.send(tensor)

    def receive(self, tensor):
        return self.link.receive(tensor)


def one_step(
    group, model, schedule, p, *, dtype="float64", recompute="none", sequence=False, divides=True, ablate="none"
):
    """Make a step; return the bytes of each message sent, those that are told of, loss and gradients."""
    t = group.size() // p
    parallel = TensorParallel.join(group, t, sequence=sequence, timeout_s=20.0)
    schedule = make_schedule(schedule, p, 2)
    layers = cut_layers(model, torch.float32 if dtype == "bfloat16" else getattr(torch, dtype), parallel)
    pipe = Pipeline(
        layers,
        schedule,
        make_loss(model, parallel),
        group,
        tensor=parallel,
        dtype=getattr(torch, dtype),
        recompute=recompute,
        ablate=ablate,
        seed=SEED,
        timeout_s=20.0,
    )
    if not divides:
        pipe._shapes._shares._count = 1
    sent = []
    for channel, link in pipe._channels._links.items():
        pipe._channels._links[channel] = CountingLink(link, sent)
    loss = pipe.step(*microbatches(model, 0, range(schedule.num_microbatches)))
    told = pipe.message_bytes()
    pipe.close()
    gradients = snapshot({name: parameter.grad for name, parameter in pipe.optimizer_parameters()})
    return sent, told, loss.item(), {name: array.tobytes() for name, array in gradients.items()}


@pytest.mark.parametrize(
    ("model", "tensors", "t", "sequence"),
    [("t5-cut", 2, 2, False), ("gpt-cut", 1, 4, False), ("gpt-cut", 1, 2, True)],
)
def test_a_rank_sends_one_of_t_parts_both_ways(ranks, model, tensors, t, sequence):
    """Activations and gradients, T5's encoder result among them; what a profile is told is what is sent."""
    whole = ranks.run(2, one_step, model, "1f1b", 2)
    found = ranks.run(2 * t, one_step, model, "1f1b", 2, sequence=sequence)
    for rank, (sent, told, *_) in enumerate(found):
        assert sent
        assert [t * size for size in sent] == whole[rank // t][0]
        assert [t * size for size in told] == whole[rank // t][1]
    activations, (told,), *_ = found[0]
    messages = [sum(activations[n : n + tensors]) for n in range(0, len(activations), tensors)]
    assert max(messages) == told
    # b · s · h elements in fp64, as the planner prices them; behind T5's encoder its result too.
    fields = [inputs for inputs, _ in (microbatch(model, 0, index) for index in range(2))]
    tokens = [sum(ids.numel() for name, ids in of.items() if name.endswith("input_ids")) for of in fields]
    assert messages == [number * cut_config(model).hidden_size * 8 // t for number in tokens]


@pytest.mark.parametrize(
    ("schedule", "model", "recompute"), [("chimera-1-concatenate", "t5-cut", "full"), ("zb-h1", "gpt-cut", "none")]
)
def test_divided_messages_change_no_bit_of_a_step(ranks, schedule, model, recompute):
    """In bf16 losses and gradients are those of messages that every rank sends whole."""
    options = {"dtype": "bfloat16", "recompute": recompute}
    divided = ranks.run(4, one_step, model, schedule, 2, **options)
    whole = ranks.run(4, one_step, model, schedule, 2, divides=False, **options)
    assert [found[2:] for found in divided] == [found[2:] for found in whole]
    assert [2 * sum(found[0]) for found in divided] == [sum(found[0]) for found in whole]


def test_without_messages_a_step_ends_and_nothing_comes_back(ranks):
    """A byte in place of each share, and of each gather: the first stage's blocks get gradients of zeros."""
    for rank, (_, _, _, gradients) in enumerate(ranks.run(4, one_step, "bert-cut", "1f1b", 2, ablate="p2p")):
        zeros = {not any(array) for name, array in gradients.items() if name.endswith("contract.bias")}
        assert zeros == {rank < 2}
