"""Keyed randomness: what decides a draw, and that a caller's own stream is left alone."""

from itertools import product

import pytest
import torch
from torch.nn import functional

from chimera.tensor.randomness import Keys, Purpose, mix, preserved_generators, seed_generators

CPU = torch.device("cpu")


def draw(*, seed=0, step=0, microbatch=0, layer=0):
    with preserved_generators(CPU):
        (keys,) = Keys.of_step(seed=seed, step=step, microbatches=[microbatch], device=CPU)
        keys.layer(layer)
        return torch.rand(4).tolist()


def test_the_same_key_draws_the_same_numbers():
    """Whatever was drawn before, and among whichever other micro-batches the key was made."""
    first = draw(seed=3, step=1, microbatch=4, layer=2)
    torch.rand(7)
    assert draw(seed=3, step=1, microbatch=4, layer=2) == first
    with preserved_generators(CPU):
        keys = Keys.of_step(seed=3, step=1, microbatches=range(9), device=CPU)[4]
        keys.layer(0)
        keys.layer(2)
        assert torch.rand(4).tolist() == first


@pytest.mark.parametrize("part", ["seed", "step", "microbatch", "layer"])
def test_every_part_of_the_key_matters(part):
    """A draw changes with seed, step, micro-batch and layer."""
    assert draw(**{part: 1}) != draw()


def test_parts_of_the_key_do_not_stand_in_for_one_another():
    """No two of 4^4 keys are equal, not even where their numbers add up to the same."""
    keys = {mix(Purpose.FORWARD, *words) for words in product(range(4), repeat=4)}
    assert len(keys) == 4**4
    assert all(0 <= key < 2**64 for key in keys)
    assert not keys & {mix(Purpose.INITIAL_WEIGHTS, *words) for words in product(range(4), repeat=4)}


def test_a_hash_is_stable():
    """One word gives the first output of SplitMix64 with that seed, as published; more words go on from there."""
    assert mix(0) == 0xE220A8397B1DCDAF
    assert mix(1234567) == 6457827717110365317
    assert mix(1, 2, 3) == 0x6AE515C1C0AC7E37


def test_keys_take_numbers_beyond_64_bits_and_negative_ones():
    """Words are taken modulo 2^64."""
    assert mix(2**64 + 5) == mix(5)
    assert mix(-1) == mix(2**64 - 1)


def test_masks_of_neighbouring_keys_are_independent():
    """Dropout masks of neighbouring micro-batches agree as often as chance has it."""

    def mask(microbatch):
        with preserved_generators(CPU):
            Keys.of_step(seed=0, step=0, microbatches=[microbatch], device=CPU)[0].layer(0)
            return functional.dropout(torch.ones(20_000), 0.5) > 0

    # 20,000 coins: a share of 0.5 with a standard error of 0.0035.
    for other in range(1, 9):
        assert (mask(0) == mask(other)).double().mean().item() == pytest.approx(0.5, abs=0.018)


def test_generators_are_restored_even_after_an_error():
    """The state of the default generator is the caller's again however the scope ends."""
    torch.manual_seed(8)
    state = torch.get_rng_state()

    def spoil():
        with preserved_generators(CPU):
            seed_generators(1, CPU)
            raise KeyError

    with pytest.raises(KeyError):
        spoil()
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.gpu
def test_cuda_draws_are_keyed_and_the_stream_is_restored():
    """On a device, keys seed its generator and the scope restores it."""
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    device = torch.device("cuda", torch.cuda.current_device())
    torch.cuda.manual_seed(8)
    state = torch.cuda.get_rng_state(device)
    drawn = []
    for _ in range(2):
        with preserved_generators(device):
            Keys.of_step(seed=0, step=0, microbatches=[3], device=device)[0].layer(1)
            drawn.append(torch.rand(4, device=device).tolist())
    assert drawn[0] == drawn[1]
    assert torch.equal(torch.cuda.get_rng_state(device), state)
