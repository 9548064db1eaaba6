"""What tensor-parallel ranks share: weights and masks that no layout changes, gradients, reloading, bytes, failures."""

import hashlib

import numpy as np
import pytest
import torch
from runtime_cases import (
    SEED,
    cut_config,
    cut_layers,
    make_loss,
    make_schedule,
    microbatches,
    relative_error,
    snapshot,
    train,
    wholes,
)
from runtime_oracle import serial_history

from chimera.errors import ConfigError, UsageError
from chimera.models.bert import BertConfig, bert_layers
from chimera.models.gpt import GptConfig, gpt_layers
from chimera.runtime.pipeline import Pipeline
from chimera.tensor import dropout as dropout_module
from chimera.tensor.parallel import TensorParallel
from chimera.tensor.sharding import sharding_of

ONE_STEP = {"reduce": "eager", "shard": False, "dtype": "float64"}


@pytest.fixture(autouse=True)
def _one_thread():
    torch.set_num_threads(1)


def build(group, model, *, schedule, p, m, t=1, sequence=False, **options):
    """Make the pipeline of this rank."""
    parallel = TensorParallel.join(group, t, sequence=sequence, timeout_s=30.0)
    layers, loss = cut_layers(model, torch.float64, parallel), make_loss(model, parallel)
    options = {"seed": SEED, "timeout_s": 30.0, **options}
    return Pipeline(layers, make_schedule(schedule, p, m), loss, group, tensor=parallel, **options)


# Weights and masks

LAYOUTS = [
    {"schedule": "gpipe", "p": 1, "d": 1, "m": 4},
    {"schedule": "1f1b", "p": 2, "d": 2, "m": 2},
    {"schedule": "gpipe", "p": 1, "d": 2, "m": 2, "t": 2, "sequence": True},
    {"schedule": "chimera-1-concatenate", "p": 2, "d": 1, "m": 4, "t": 2, "sequence": True, "recompute": "selective"},
    {"schedule": "zb-h1", "p": 2, "d": 1, "m": 4, "t": 4, "recompute": "full"},
    {"schedule": "interleaved", "p": 2, "d": 2, "m": 2, "t": 2},
]


def digest(array):
    return hashlib.sha256(array.tobytes() + repr((array.shape, array.dtype.str)).encode()).hexdigest()


def drawn(group, layout):
    """Return hashes of this rank's initial weights, by name, and of the masks of a step, by their keys; all whole."""
    layout = dict(layout)
    d, t = layout.pop("d"), layout.get("t", 1)
    pipe = build(group, "bert-cut", **layout)
    weights = snapshot(wholes(pipe, dict(pipe.named_parameters())))
    masks, draw = {}, dropout_module.keep_mask

    def keep_mask(shape, p, key, part=None):
        mask = draw(shape, p, key, part)
        whole = mask
        if part is not None:
            whole = pipe.groups.tensor.start_gather(mask.byte(), part.dim).wait().bool()
        masks[int(key)] = (mask.ndim, digest(whole.numpy()))
        return mask

    m = pipe.schedule.num_microbatches
    first = group.rank() // t % d * m
    batch = microbatches("bert-cut", 0, range(first, first + m))
    pipe.step(*batch)  # agrees on shapes, for which layers run without a key
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dropout_module, "keep_mask", keep_mask)
        pipe.step(*batch)
    pipe.close()
    return {name: digest(array) for name, array in weights.items()}, masks


def test_six_layouts_draw_the_same_weights_and_masks(ranks):
    """Every weight, and every mask of every micro-batch and layer, has one hash in all layouts.

    No two of attention's are alike; the others are so small that two may well keep everything.
    """
    found = []
    for layout in LAYOUTS:
        size = layout["p"] * layout["d"] * layout.get("t", 1)
        weights, masks = {}, {}
        for of_rank in ranks.run(size, drawn, layout):
            for known, part in zip((weights, masks), of_rank, strict=True):
                assert all(known.get(name, value) == value for name, value in part.items())
                known.update(part)
        found.append((weights, masks))
    first_weights, first_masks = found[0]
    # Embeddings, and three in each of seven blocks, for each of four micro-batches.
    assert len(first_masks) == 4 * (1 + 3 * 7)
    assert len({text for ndim, text in first_masks.values() if ndim == 4}) == 4 * 7
    for weights, masks in found[1:]:
        assert weights == first_weights
        assert masks == first_masks


# Gradients


@pytest.mark.parametrize("sequence", [False, True])
def test_final_norm_has_the_gradient_of_one_process(ranks, sequence):
    """Each rank saw half of the sequence, or all of it; both end with the whole gradient, bit for bit alike."""
    case = {**ONE_STEP, "model": "gpt-cut", "schedule": "1f1b", "p": 2, "d": 1, "m": 3, "recompute": "none"}
    histories = ranks.run(4, train, {**case, "t": 2, "sequence": sequence}, 1)
    (serial,) = serial_history("gpt-cut", 3, 1)
    for name in ("8.norm.weight", "8.norm.bias"):
        first, second = (step["gradients"][name] for (step,) in histories[2:])
        np.testing.assert_array_equal(first, second)
        assert relative_error(first, serial["gradients"][name]) < 1e-12


# Sizes that cannot be shared


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"num_heads": 6, "hidden_size": 12},
            r"num_heads = 6 does not divide over \[parallel\] tensor = 4 .*1, 2, 3, 6",
        ),
        ({"intermediate_size": 10}, r"intermediate_size = 10 does not divide over \[parallel\] tensor = 4"),
    ],
)
@pytest.mark.parametrize(("config", "layers"), [(BertConfig, bert_layers), (GptConfig, gpt_layers)])
def test_heads_that_t_does_not_divide_are_refused(config, layers, options, message):
    """The option is named, with the numbers of ranks that would do."""
    sizes = {"vocab_size": 50, "hidden_size": 8, "num_layers": 1, "num_heads": 4} | options
    with pytest.raises(ConfigError, match=message), torch.device("meta"):
        layers(config(**sizes), TensorParallel(0, 4))


def test_layers_built_for_other_ranks_are_refused():
    """Shares of two ranks that no group is given for, and whole layers where one is."""
    schedule, loss = make_schedule("gpipe", 1, 1), make_loss("gpt-cut")
    with pytest.raises(UsageError, match=r"built for t = 2 tensor-parallel ranks, but tensor= has 1"):
        Pipeline(cut_layers("gpt-cut", parallel=TensorParallel(0, 2)), schedule, loss)
    with pytest.raises(UsageError, match=r"built for t = 1 tensor-parallel ranks, but tensor= has 2"):
        Pipeline(cut_layers("gpt-cut"), schedule, loss, tensor=TensorParallel(0, 2))


def odd_sequence(group):
    pipe = build(group, "gpt-cut", schedule="gpipe", p=1, m=1, t=2, sequence=True)
    ids = torch.zeros(1, 5, dtype=torch.int64)
    with pytest.raises(UsageError, match="the sequence length = 5 does not divide over t = 2"):
        pipe.step([{"input_ids": ids}], [{"labels": ids}])
    pipe.close()


def test_a_sequence_that_t_does_not_divide_is_refused(ranks):
    """Before anything is exchanged, on every rank."""
    ranks.run(2, odd_sequence)


def test_a_mode_of_recompute_without_use_is_refused():
    """What is unknown, and a core where no layer has one, are named."""
    layers, schedule = [torch.nn.Linear(2, 2)], make_schedule("gpipe", 1, 1)
    loss = torch.nn.functional.mse_loss
    with pytest.raises(UsageError, match="no layer has a core that can be recomputed"):
        Pipeline(layers, schedule, loss, recompute="selective")
    with pytest.raises(UsageError, match=r"recompute = 'ful' is unknown \(did you mean 'full'\?\)"):
        Pipeline(layers, schedule, loss, recompute="ful")
    with pytest.raises(UsageError, match="recompute_layers = 0; needed: at least 1"):
        Pipeline(layers, schedule, loss, recompute="full", recompute_layers=0)


# What is kept for the backward


def kept_bytes(recompute, every=1):
    """Return the bytes of the tensors that autograd saves in the forwards of one micro-batch."""
    config = cut_config("gpt-cut")
    layers = gpt_layers(config)
    pipe = Pipeline(
        layers, make_schedule("gpipe", 1, 1), make_loss("gpt-cut"), recompute=recompute, recompute_layers=every
    )
    stage = next(iter(pipe._actions._stages.values()))
    saved = {}

    def pack(tensor):
        saved[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    inputs, _ = microbatches("gpt-cut", 0, [1], torch.float32)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        stage.forward(0, (), inputs[0], None)
    parameters = {p.untyped_storage().data_ptr() for layer in stage.layers for p in layer.parameters()}
    return sum(size for pointer, size in saved.items() if pointer not in parameters)


def test_recompute_keeps_less():
    """Selective keeps no scores, full keeps no graph at all in the forward."""
    torch.manual_seed(0)
    none, selective, full = (kept_bytes(mode) for mode in ("none", "selective", "full"))
    assert 0 == full < selective < none


# Reloading


def collected_and_taken(group, t, sequence, shard):
    """Return the whole weights this rank saves, and whether each rank's portions are its parts of them."""
    pipe = build(group, "bert-cut", schedule="1f1b", p=2, m=2, t=t, sequence=sequence, shard_optimizer=shard)
    saved = snapshot(pipe.collected(lambda portion: portion))
    pipe.close()
    return saved


@pytest.mark.parametrize(("t", "sequence", "shard"), [(2, False, False), (2, True, True), (4, True, False)])
def test_weights_are_saved_whole_and_once(ranks, t, sequence, shard):
    """Over all ranks every parameter is there once, in the shape it has in the model, as one process draws it."""
    saved = ranks.run(2 * t, collected_and_taken, t, sequence, shard)
    names = [name for of_rank in saved for name in of_rank]
    assert len(names) == len(set(names))
    (alone,) = ranks.run(1, alone_whole)
    assert set(names) == set(alone)
    for of_rank in saved:
        for name, array in of_rank.items():
            np.testing.assert_array_equal(array, alone[name], err_msg=name)
    assert all(saved)


def alone_whole(group):
    pipe = build(group, "bert-cut", schedule="gpipe", p=1, m=2)
    return snapshot(dict(pipe.named_parameters()))


def test_a_portion_takes_its_part_of_what_is_stored():
    """A tensor of the whole model is cut as the parameter is, then as the optimizer's states are."""
    layers = cut_layers("bert-cut", torch.float64, TensorParallel(1, 2), device="cpu")
    parameter = layers[1].attention.qkv.weight
    sharding = sharding_of(parameter)
    whole = torch.arange(24.0 * 8).view(24, 8)
    taken = sharding.take(whole)
    assert taken[:, 0].tolist() == [whole[row, 0] for first in (0, 8, 16) for row in range(first + 4, first + 8)]
