"""Every family on transformers' weights: equal logits and gradients, and the way back bit by bit."""

import pytest
import torch
from models_peers import CONFIGS, import_transformers, make_batch, make_layers, peer, run, their_logits
from torch import nn

from chimera.models.huggingface import from_huggingface, to_huggingface


@pytest.fixture(autouse=True)
def _one_thread_and_a_fixed_seed():
    torch.set_num_threads(1)
    torch.manual_seed(0)


@pytest.fixture
def transformers():
    return import_transformers()


@pytest.mark.parametrize("name", CONFIGS)
def test_logits_equal_transformers(transformers, name):
    """On the same weights all word logits agree within 1e-5 of the largest."""
    config = CONFIGS[name]
    theirs, ours = peer(transformers, config), nn.Sequential(*make_layers(config)).eval()
    ours.load_state_dict(from_huggingface(theirs.state_dict(), config))
    batch = make_batch(config)
    with torch.no_grad():
        expected, got = their_logits(theirs, batch), run(ours, batch)
    assert expected.std((0, 1)).min() > 0.1, "positions look alike, which would hide differences"
    torch.testing.assert_close(got, expected, rtol=0, atol=1e-5 * expected.abs().max().clamp_min(1.0).item())


@pytest.mark.parametrize("name", ["gpt", "llama-3", "llama-3-tied", "t5", "t5-1.1"])
def test_gradients_equal_transformers(transformers, name):
    """One backward gives transformers' gradients within 1e-4 by norm, those of shared parameters summed."""
    config = CONFIGS[name]
    theirs, ours = peer(transformers, config), nn.Sequential(*make_layers(config)).eval()
    ours.load_state_dict(from_huggingface(theirs.state_dict(), config))
    batch = make_batch(config)
    weights = torch.randn(their_logits(theirs, batch).shape)
    (their_logits(theirs, batch) * weights).sum().backward()
    (run(ours, batch) * weights).sum().backward()
    gradients = {name: parameter.grad for name, parameter in theirs.named_parameters(remove_duplicate=False)}
    expected = from_huggingface(gradients, config)
    for parameter_name, parameter in ours.named_parameters():
        error = (parameter.grad - expected[parameter_name]).norm() / expected[parameter_name].norm().clamp_min(1e-3)
        assert error < 1e-4, parameter_name


@pytest.mark.parametrize("name", CONFIGS)
def test_transformers_takes_our_weights_back(transformers, name):
    """Written weights have transformers' names, load there, and read back bit by bit."""
    config = CONFIGS[name]
    state = nn.Sequential(*make_layers(config)).state_dict()
    written = to_huggingface(state, config)
    model = peer(transformers, config)
    assert set(written) == set(model.state_dict())
    model.load_state_dict(written)
    again = from_huggingface(model.state_dict(), config)
    assert {name: torch.equal(tensor, state[name]) for name, tensor in again.items()} == dict.fromkeys(state, True)
