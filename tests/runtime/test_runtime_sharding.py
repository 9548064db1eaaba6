"""Sharded optimizer states and buckets: what each replica keeps, that nothing else changes, and when sums begin."""

import gc

import pytest
import torch
from runtime_cases import SEED, hashable, make_layers, make_loss, make_schedule, microbatches, snapshot
from torch import nn
from torch.nn import functional

from chimera.errors import UsageError
from chimera.plan.buffers import state_bytes
from chimera.runtime.pipeline import Pipeline
from chimera.tensor.communicator import Communicator

WIDTH = 256
LAYERS_PER_STAGE = 2


@pytest.fixture(autouse=True)
def _one_thread():
    torch.set_num_threads(1)


def adamw(pipe):
    return torch.optim.AdamW([{"params": [p for _, p in pipe.optimizer_parameters()]}], lr=1e-2)


# What is kept


def live_bytes():
    """Return the bytes of every tensor storage that anything in this process refers to, each once."""
    gc.collect()
    storages = {}
    for found in gc.get_objects():
        # A meta or a fake tensor (a compiler's, of an earlier test) has no bytes. Those of type uint8 are messages: as
        # many slots as have been under way at once, which is a matter of time.
        real = type(found) in (torch.Tensor, nn.Parameter) and not found.is_meta
        if real and found.dtype is not torch.uint8:
            storage = found.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


def bytes_kept(group, schedule, p, *, shard, dtype):
    """Train one step; return the bytes that stay, the elements of the first moment, and the number of parameters."""
    before = live_bytes()
    with torch.device("meta"):
        layers = [nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS_PER_STAGE * p)]
    pipe = Pipeline(
        layers,
        make_schedule(schedule, p, p),
        functional.mse_loss,
        group,
        dtype=getattr(torch, dtype),
        shard_optimizer=shard,
        timeout_s=20.0,
    )
    optimizer = adamw(pipe)
    inputs = torch.ones(p, WIDTH, dtype=getattr(torch, dtype))
    pipe.step(inputs, inputs)
    optimizer.step()
    pipe.publish_weights()
    names = [name for name, _ in pipe.named_parameters()]
    del inputs
    pipe.close()
    kept = live_bytes() - before
    moments = sum(state["exp_avg"].numel() for state in optimizer.state.values())
    return kept, moments, len(names)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("shard", [False, True])
@pytest.mark.parametrize(("schedule", "p", "d"), [("1f1b", 2, 2), ("chimera-1-concatenate", 2, 2), ("1f1b", 4, 1)])
def test_a_rank_keeps_the_bytes_that_were_estimated(ranks, schedule, p, d, *, shard, dtype):
    """Every storage alive after a step, counted once, is within 2% of the estimate."""
    routes = 2 if "chimera" in schedule else 1
    of_stage = state_bytes(
        [WIDTH * WIDTH, WIDTH] * LAYERS_PER_STAGE,
        replicas=routes * d,
        sharded=shard,
        width=getattr(torch, dtype).itemsize,
        moments=2,
    )
    for kept, _, parameters in ranks.run(p * d, bytes_kept, schedule, p, shard=shard, dtype=dtype):
        assert parameters == 2 * LAYERS_PER_STAGE * routes
        assert kept == pytest.approx(routes * of_stage.total, rel=0.02)


@pytest.mark.parametrize("d", [1, 2])
def test_chimeras_second_copy_costs_no_optimizer_memory(ranks, d):
    """Sharded, its ranks keep together exactly 1F1B's moments, each as much to 2%; unsharded, 2 · d times as much."""

    def moments(schedule, *, shard):
        return [kept[1] for kept in ranks.run(4 * d, bytes_kept, schedule, 4, shard=shard, dtype="float32")]

    linear, both = moments("1f1b", shard=True), moments("chimera-1-concatenate", shard=True)
    assert sum(linear) == sum(both) == LAYERS_PER_STAGE * 4 * WIDTH * (WIDTH + 1)
    assert both == pytest.approx(linear, rel=0.02)
    assert sum(moments("chimera-1-concatenate", shard=False)) == 2 * d * sum(both)


# That nothing else changes


def odd_layers():
    """Layers with a tie over stages, one within a stage, a frozen parameter, two types, and one without parameters."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(SEED)
        layers = [nn.Embedding(7, 6), *(nn.Linear(6, 6) for _ in range(4)), nn.Identity(), nn.Linear(6, 7, bias=False)]
    layers[6].weight = layers[0].weight
    layers[2].weight = layers[1].weight
    layers[3].bias.requires_grad_(requires_grad=False)
    return layers


def token_loss(output, target):
    return functional.cross_entropy(output.flatten(0, -2), target.flatten())


def train_odd(group, schedule, p, *, shard, publish):
    """Train three steps of two runs each; return losses, norms, and the weights after each."""
    layer_to_stage = [0, 0, 0, 0, 0, 1, 1] if p == 2 else None
    pipe = Pipeline(
        odd_layers(),
        make_schedule(schedule, p, 2),
        token_loss,
        group,
        layer_to_stage=layer_to_stage,
        shard_optimizer=shard,
        bucket_bytes=100,
        timeout_s=20.0,
    )
    optimizer = adamw(pipe)
    d, history = group.size() // p, []
    for step in range(3):
        for run in range(2):
            generator = torch.Generator().manual_seed(10 * step + run + 100 * (group.rank() % d))
            tokens = torch.randint(7, (2, 4, 3), generator=generator)
            loss = pipe.step(tokens[0], tokens[1], last=run == 1)
        norm = pipe.gradient_norm()
        optimizer.step()
        if publish:
            pipe.publish_weights()
            pipe.publish_weights()
        history.append((loss.item(), norm))
    evaluated = pipe.evaluate(tokens[0], tokens[1]).item()
    pipe.close()
    weights = {name: hashable(array) for name, array in snapshot(dict(pipe.named_parameters())).items()}
    return history, evaluated, weights, [name for name, p in pipe.named_parameters() if p.grad is not None]


@pytest.mark.parametrize(("schedule", "p", "d"), [("1f1b", 2, 2), ("chimera-1-concatenate", 2, 1), ("1f1b", 1, 2)])
def test_two_replicas_train_to_the_same_bits_sharded_or_not(ranks, schedule, p, d):
    """A sum of two is the same in any order: losses and weights are, and publishing late or twice changes nothing.

    Norms are sums in another order. Sharded, no parameter keeps a gradient that is only a part of the sum.
    """
    plain = ranks.run(p * d, train_odd, schedule, p, shard=False, publish=True)
    for publish in (True, False):
        sharded = ranks.run(p * d, train_odd, schedule, p, shard=True, publish=publish)
        for (history, evaluated, weights, with_gradient), expected in zip(sharded, plain, strict=True):
            assert [loss for loss, _ in history] == [loss for loss, _ in expected[0]]
            assert [norm for _, norm in history] == pytest.approx([norm for _, norm in expected[0]], rel=1e-8)
            assert (evaluated, weights) == expected[1:3]
            assert expected[3] != []
            assert with_gradient == []


def portions_of(group, schedule, p):
    pipe = Pipeline(
        make_layers("bert"),
        make_schedule(schedule, p, p),
        make_loss("bert"),
        group,
        shard_optimizer=True,
        bucket_bytes=300,
        timeout_s=20.0,
    )
    found = [(portion.name, portion.start, portion.parameter.numel()) for portion in pipe.portions()]
    whole = snapshot(pipe.collected(lambda portion: portion))
    parts = pipe.portions()
    own = {name: array for name, array in snapshot(dict(pipe.named_parameters())).items() if name in whole}
    by_name = dict(pipe.named_parameters())
    same = [torch.equal(part.of(by_name[part.name]), part.parameter) for part in parts]
    pipe.close()
    return (
        found,
        {name: hashable(array) for name, array in whole.items()},
        {n: hashable(a) for n, a in own.items()},
        same,
    )


@pytest.mark.parametrize(
    ("schedule", "p", "d"), [("chimera-2-concatenate", 4, 1), ("1f1b", 2, 3), ("text-forked", 3, 2)]
)
def test_every_element_is_updated_and_saved_by_one_rank(ranks, schedule, p, d):
    """Portions cover each parameter once, and each parameter is brought together on one rank as it is everywhere."""
    results = ranks.run(p * d, portions_of, schedule, p)
    shapes = {name: parameter.shape for name, parameter in nn.Sequential(*make_layers("bert")).named_parameters()}
    pieces = sorted(piece for found, _, _, _ in results for piece in found)
    ends = dict.fromkeys(shapes, 0)
    for name, start, length in pieces:
        assert start == ends[name]
        ends[name] = start + length
    assert ends == {name: shape.numel() for name, shape in shapes.items()}
    saved = [name for _, whole, _, _ in results for name in whole]
    assert sorted(saved) == sorted(shapes)
    for _, whole, own, same in results:
        assert whole == own
        assert all(same)


# When sums begin


class Told(nn.Linear):
    """A layer that notes when its backward runs."""

    def __init__(self, number, notes):
        super().__init__(16, 16)
        self.number, self.notes = number, notes

    def forward(self, x):
        out = super().forward(x)
        if out.requires_grad:
            out.register_hook(lambda _: self.notes.append(f"B{self.number}"))
        return out


def order_of_events(group, m, bucket_bytes):
    """Return the order of backwards and of sums in a step of one stage of four layers."""
    notes = []
    pipe = Pipeline(
        [Told(number, notes) for number in range(4)],
        make_schedule("1f1b", 1, m),
        functional.mse_loss,
        group,
        bucket_bytes=bucket_bytes,
        timeout_s=20.0,
    )
    inputs = torch.ones(m, 16)
    with pytest.MonkeyPatch.context() as patch:
        whole = Communicator.all_reduce

        def all_reduce(self, tensor):
            if tensor.dtype is torch.float32:
                notes.append(f"sum of {tensor.numel()}")
            return whole(self, tensor)

        patch.setattr(Communicator, "all_reduce", all_reduce)
        pipe.step(inputs, inputs)
    pipe.close()
    return notes


def test_buckets_are_summed_while_earlier_layers_still_compute(ranks):
    """In the last micro-batch's backward each bucket starts when its layer is done; in the others none does."""
    one = 16 * 16 + 16
    results = ranks.run(2, order_of_events, 2, 4 * one)
    backwards = ["B3", "B2", "B1", "B0"]
    assert results[0] == results[1]
    assert results[0][:4] == backwards
    last = results[0][4:]
    assert [note for note in last if note[0] == "B"] == backwards
    assert last.index(f"sum of {one}") < last.index("B1")
    assert sum(int(note.split()[-1]) for note in last if note[0] == "s") == 4 * one
    assert ranks.run(2, order_of_events, 1, 10**6)[0] == [*backwards, f"sum of {4 * one}"]


class Nested(nn.Module):
    """Uses its weight in a backward of its own inside the backward, and again outside."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(16))

    def forward(self, x):
        if not torch.is_grad_enabled():
            return x * self.weight**3
        inner = torch.utils.checkpoint.checkpoint(lambda y: y * self.weight, x * self.weight, use_reentrant=True)
        return inner * self.weight


def run_nested(group):
    layers = [nn.Linear(16, 16), Nested()]
    pipe = Pipeline(layers, make_schedule("1f1b", 1, 1), functional.mse_loss, group, bucket_bytes=1, timeout_s=20.0)
    with pytest.raises(UsageError, match=r"second gradient in one backward.*use_reentrant=False"):
        pipe.step(torch.ones(1, 16), torch.ones(1, 16))
    pipe.close()
    return True


def test_a_gradient_that_comes_twice_is_refused(ranks):
    """A nested backward adds to a gradient whose sum has begun: an error says how to do without, not a wrong sum."""
    assert ranks.run(2, run_nested) == [True, True]


def train_split(group, schedule, p, bucket_bytes):
    """Train two steps in fp64; return what is brought together of the gradient."""
    pipe = Pipeline(
        make_layers("bert"),
        make_schedule(schedule, p, 2 * p),
        make_loss("bert"),
        group,
        seed=SEED,
        reduce="eager",
        bucket_bytes=bucket_bytes,
        shard_optimizer=True,
        timeout_s=20.0,
    )
    optimizer = adamw(pipe)
    m = pipe.schedule.num_microbatches
    first = m * (group.rank() % (group.size() // p))
    for step in range(2):
        pipe.step(*microbatches("bert", step, range(first, first + m)))
        optimizer.step()
    gradients = snapshot(pipe.collected(lambda portion: portion.grad))
    pipe.close()
    return {name: hashable(array) for name, array in gradients.items()}


@pytest.mark.parametrize("schedule", ["zb-h1", "1f1b"])
def test_the_size_of_buckets_changes_no_bit_between_two_replicas(ranks, schedule):
    """Gradients that are summed at W or inside B, in few or many buckets, are the same."""
    few, many = (ranks.run(4, train_split, schedule, 2, size) for size in (10**6, 64))

    def gathered(results):
        return {name: array for result in results for name, array in result.items()}

    assert gathered(few) == gathered(many)
