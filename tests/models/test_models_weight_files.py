"""Weights in folders of safetensors files: each rank reads its own part, and writes its own file."""

import json
import struct

import pytest
import torch
from models_peers import CONFIGS, import_transformers, make_batch, make_layers, peer, run, their_logits
from safetensors.torch import save_file
from torch import nn

from chimera.errors import CheckpointError
from chimera.models.huggingface import (
    HuggingFaceWeights,
    finish_huggingface,
    from_huggingface,
    to_huggingface,
    write_huggingface,
)
from chimera.models.weight_files import FolderWeights, StateWeights
from chimera.tensor.parallel import TensorParallel
from chimera.tensor.sharding import WHOLE, sharding_of


@pytest.fixture(autouse=True)
def _one_thread_and_a_fixed_seed():
    torch.set_num_threads(1)
    torch.manual_seed(0)


def named(config):
    return {name: tensor.detach() for name, tensor in nn.Sequential(*make_layers(config)).named_parameters()}


def write_by_stages(folder, config, count):
    """Write every ``count``-th parameter to a file of its own, as stages would, and the index."""
    ours = named(config)
    for number in range(count):
        write_huggingface(folder, dict(list(ours.items())[number::count]), config, number=number, count=count)
    finish_huggingface(folder, config, count=count)
    return ours


@pytest.mark.parametrize("name", CONFIGS)
def test_what_ranks_write_is_read_back_bit_by_bit(tmp_path, name):
    """Three files with an index give every parameter back, tied ones under each of their names."""
    config = CONFIGS[name]
    ours = write_by_stages(tmp_path, config, 3)
    weights = HuggingFaceWeights(tmp_path, config)
    model = nn.Sequential(*make_layers(config))
    for parameter_name, tensor in model.state_dict().items():
        weights.part(parameter_name, WHOLE, tensor.shape)
    assert all(torch.equal(weights.part(n, WHOLE, tensor.shape), tensor) for n, tensor in ours.items())


def padding(sharding, part):
    """Return how many elements of a rank's part stand for nothing in the whole."""
    if not sharding.is_cut:
        return 0
    return part.numel() - part.numel() // part.shape[sharding.dim] * sum(piece.length for piece in sharding.pieces)


@pytest.mark.parametrize("name", ["bert", "gpt-untied", "llama-3", "t5", "t5-1.1"])
def test_each_rank_reads_its_part_alone(tmp_path, name, monkeypatch):
    """Two ranks' parts make the whole, and no more is read than the parts have."""
    config = CONFIGS[name]
    ours = write_by_stages(tmp_path, config, 2)
    num_read = 0
    read = FolderWeights.read

    def counted(self, *arguments):
        nonlocal num_read
        part = read(self, *arguments)
        num_read += part.numel()
        return part

    monkeypatch.setattr(FolderWeights, "read", counted)
    weights = HuggingFaceWeights(tmp_path, config)
    parts, num_here = {}, 0
    for rank in range(2):
        with torch.device("meta"):
            layers = nn.Sequential(*make_layers(config, parallel=TensorParallel(rank, 2)))
        for parameter_name, parameter in layers.named_parameters():
            sharding = sharding_of(parameter)
            part = weights.part(parameter_name, sharding, parameter.shape)
            assert part.shape == parameter.shape
            parts.setdefault(parameter_name, []).append((sharding, part))
            num_here += part.numel() - padding(sharding, part)
    assert num_read == num_here
    for parameter_name, (first, second) in parts.items():
        assert torch.equal(first[0].join([first[1], second[1]]), ours[parameter_name]), parameter_name


@pytest.mark.parametrize("name", ["bert", "gpt", "llama-3-tied", "llama-3", "t5"])
def test_transformers_opens_what_was_written(tmp_path, name):
    """from_pretrained takes the folder, config.json included, and computes the same logits."""
    transformers = import_transformers()
    config = CONFIGS[name]
    layers = nn.Sequential(*make_layers(config)).eval()
    with torch.no_grad():
        for parameter in layers.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.1)
    ours = {n: tensor.detach() for n, tensor in layers.named_parameters()}
    write_huggingface(tmp_path, ours, config)
    finish_huggingface(tmp_path, config)
    model = type(peer(transformers, config)).from_pretrained(tmp_path).eval()
    batch = make_batch(config)
    with torch.no_grad():
        expected, got = their_logits(model, batch), run(layers, batch)
    torch.testing.assert_close(got, expected, rtol=0, atol=1e-5 * expected.abs().max().clamp_min(1.0).item())


def test_what_transformers_writes_is_read(tmp_path):
    """save_pretrained's folder, cut into several files, is read to the same weights."""
    transformers = import_transformers()
    for name in ("gpt", "llama-3", "t5"):
        config = CONFIGS[name]
        model = peer(transformers, config)
        model.save_pretrained(tmp_path / name, max_shard_size="20KB")
        assert (tmp_path / name / "model.safetensors.index.json").is_file()
        weights = HuggingFaceWeights(tmp_path / name, config)
        for parameter_name, tensor in from_huggingface(model.state_dict(), config).items():
            assert torch.equal(weights.part(parameter_name, WHOLE, tensor.shape), tensor)


def test_names_and_buffers_of_older_files_are_read():
    """GPT-2 without prefix and with masks, Llama's saved frequencies, T5's unused bias: all give the same weights."""
    for name, buffer in (
        ("gpt", "h.0.attn.bias"),
        ("gpt", "h.2.attn.masked_bias"),
        ("llama-2", "model.layers.1.self_attn.rotary_emb.inv_freq"),
        ("t5", "decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight"),
    ):
        config = CONFIGS[name]
        state = {}
        weight_files_state = named(config)
        for their_name, tensor in _renamed(weight_files_state, config).items():
            state[their_name.removeprefix("transformer.")] = tensor
        got = from_huggingface(state | {buffer: torch.zeros(3)}, config)
        assert all(torch.equal(got[n], tensor) for n, tensor in weight_files_state.items())


def _renamed(ours, config):

    return to_huggingface(ours, config)


def save_one(folder, **tensors):
    folder.mkdir(exist_ok=True)
    save_file(tensors, folder / "model.safetensors")


def index_of(folder, **files):
    folder.mkdir(exist_ok=True)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}), encoding="utf-8")


@pytest.mark.parametrize("outside", ["../other.safetensors", "/etc/passwd", "a\\b", ".."])
def test_an_index_stays_in_its_folder(tmp_path, outside):
    """A file elsewhere is refused by name before anything is opened."""
    index_of(tmp_path, wte=outside)
    with pytest.raises(CheckpointError, match="names files outside its folder"):
        FolderWeights(tmp_path)


def test_an_index_that_promises_too_much_is_refused(tmp_path):
    """A tensor that its file does not have is named."""
    save_one(tmp_path, first=torch.zeros(2))
    index_of(tmp_path, first="model.safetensors", second="model.safetensors")
    with pytest.raises(CheckpointError, match=r"second is in model\.safetensors, which does not have it"):
        FolderWeights(tmp_path)


def header_file(path, text, data=b""):
    path.write_bytes(struct.pack("<Q", len(text)) + text.encode() + data)


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        (b"", "cannot be read"),
        (struct.pack("<Q", 200_000_000) + b"{}", "header of 200000000 bytes"),
        (struct.pack("<Q", 7) + b"nothing", "cannot be read"),
        (struct.pack("<Q", 2) + b"[]", "cannot be read"),
    ],
)
def test_a_file_that_is_none_is_refused(tmp_path, content, complaint):
    """Empty, huge or other headers are refused by name, without reading on."""
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(CheckpointError, match=complaint):
        FolderWeights(tmp_path)


def test_a_name_that_stands_twice_is_refused(tmp_path):
    """Duplicate keys of a header would leave it to the reader which one counts."""
    entry = '{"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}'
    header_file(tmp_path / "model.safetensors", f'{{"a": {entry}, "a": {entry}}}', b"\0" * 4)
    with pytest.raises(CheckpointError, match="'a' stands there twice"):
        FolderWeights(tmp_path)


def test_a_file_cut_short_is_refused_when_read(tmp_path):
    """A header whose data is not all there does not read as zeros."""
    save_one(tmp_path, a=torch.ones(100))
    path = tmp_path / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-50])
    with pytest.raises(CheckpointError, match="cannot be read as a safetensors file"):
        FolderWeights(tmp_path).read("a", ())


def test_a_folder_without_weights_says_what_is_read(tmp_path):
    """Pickled weights are not read; the message says what to do."""
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(CheckpointError, match="save them as safetensors first"):
        FolderWeights(tmp_path)


def test_a_parameter_nobody_wrote_is_named(tmp_path):
    """Two files that leave one parameter out make no model."""
    config = CONFIGS["llama-2"]
    ours = named(config)
    del ours["2.attention_norm.weight"]
    for number in range(2):
        write_huggingface(tmp_path, dict(list(ours.items())[number::2]), config, number=number, count=2)
    with pytest.raises(CheckpointError, match=r"nobody wrote model\.layers\.1\.input_layernorm\.weight"):
        finish_huggingface(tmp_path, config, count=2)


def test_one_parameter_in_two_files_is_refused(tmp_path):
    """Which of the two counts would be anybody's guess."""
    config = CONFIGS["llama-2"]
    for number in range(2):
        write_huggingface(tmp_path, named(config), config, number=number, count=2)
    with pytest.raises(CheckpointError, match="is both in model-00001-of-00002"):
        finish_huggingface(tmp_path, config, count=2)


def test_state_dicts_read_like_files():
    """A part of a tensor in memory is a view of it."""
    tensor = torch.arange(6).view(3, 2)
    source = StateWeights({"a": tensor})
    assert source.read("a", ()) is tensor
    assert torch.equal(source.read("a", (slice(1, 3), slice(1, 2))), torch.tensor([[3], [5]]))
