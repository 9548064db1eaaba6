"""Products in float8: what torchao's are on one rank, and the same on ranks that have parts of the matrices."""

import numpy as np
import pytest
import torch
from float8_on_cpu import needs_float8_on_cpu
from tensor_network import loss_and_gradients

from chimera.tensor.float8 import product, scaled
from chimera.tensor.linear import Linear
from chimera.tensor.parallel import ALONE

NUM_WORDS = 300
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2


@pytest.fixture(autouse=True)
def _one_thread():
    torch.set_num_threads(1)


def normal(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def test_a_matrix_is_scaled_to_the_largest_number():
    """The largest element is exact, others are rounded to three bits, and larger ones than told of saturate."""
    matrix = scaled(torch.tensor([[0.5, -2.0], [0.3, 0.0]]), torch.tensor(2.0), E4M3)
    assert matrix.elements.float().tolist() == [[112.0, -448.0], [64.0, 0.0]]
    assert matrix.factor.item() == pytest.approx(2 / 448)
    assert scaled(torch.tensor([[7.0, -9.0]]), torch.tensor(2.0), E4M3).elements.float().tolist() == [[448.0, -448.0]]
    zeros = scaled(torch.zeros(2, 3, 4), torch.tensor(0.0), E5M2)
    assert zeros.elements.float().tolist() == [[0.0] * 4] * 6
    assert zeros.factor.isfinite()


@needs_float8_on_cpu
@pytest.mark.parametrize("types", [(E4M3, E4M3), (E5M2, E4M3)])
@pytest.mark.parametrize(("rows", "inner", "columns"), [(5, 7, 3), (32, 48, 16), (1, 300, 20)])
def test_products_of_any_size_are_those_of_the_numbers(types, rows, inner, columns):
    """Summed in fp32, whatever devices ask sizes to be multiples of; transposed ones too."""
    assert_products(types, normal(rows, inner), normal(columns, inner, seed=1))


@pytest.mark.gpu
@pytest.mark.parametrize("types", [(E4M3, E4M3), (E5M2, E4M3)])
def test_a_device_that_has_float8_multiplies_the_same(types):
    """Of sizes that it would not take as they are."""
    if not torch.cuda.is_available() or torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("needs a CUDA device of compute capability 8.9 or later")
    assert_products(types, normal(5, 7).cuda(), normal(3, 7, seed=1).cuda())


def assert_products(types, left, right):
    a, b = (scaled(m, m.abs().amax(), dtype) for m, dtype in zip((left, right), types, strict=True))
    expected = (a.elements.double() * a.factor) @ (b.elements.double() * b.factor).T
    torch.testing.assert_close(product(a, b.T, torch.float32).double(), expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(product(b, a.T, torch.float32).double(), expected.T, rtol=1e-5, atol=1e-5)


@needs_float8_on_cpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_layer_of_one_rank_computes_what_torchaos_does(dtype):
    """Output and all gradients, of sizes that torchao takes."""
    float8 = pytest.importorskip("torchao.float8", reason="needs the extra float8")
    ours = Linear(32, 48).to(dtype)
    theirs = torch.nn.Sequential(torch.nn.Linear(32, 48).to(dtype))
    theirs[0].load_state_dict(ours.state_dict())
    ours.float8 = ALONE
    float8.convert_to_float8_training(theirs, config=float8.Float8LinearConfig(emulate=True))
    found = []
    for layer in (ours, theirs):
        inputs = normal(4, 8, 32).to(dtype).requires_grad_()
        output = layer(inputs)
        output.backward(normal(4, 8, 48, seed=1).to(dtype))
        found.append((output, inputs.grad, *(parameter.grad for parameter in layer.parameters())))
    for one, other in zip(*found, strict=True):
        # Of the same numbers, in another order of sums.
        torch.testing.assert_close(one, other, rtol=1e-2 if dtype is torch.bfloat16 else 1e-5, atol=1e-5)


@needs_float8_on_cpu
@pytest.mark.parametrize("mode", ["whole", "fused", "split"])
@pytest.mark.parametrize(("t", "sequence"), [(2, False), (2, True), (4, True)])
def test_cut_layers_round_as_whole_ones(ranks, t, sequence, mode):
    """Loss and gradients equal those of one rank far closer than float8 rounds: all scales are agreed on."""
    expected = loss_and_gradients(None, NUM_WORDS, 1, float8=True)
    for found in ranks.run(t, loss_and_gradients, NUM_WORDS, t, sequence=sequence, mode=mode, float8=True):
        assert found.keys() == expected.keys()
        for name, value in expected.items():
            np.testing.assert_allclose(found[name], value, rtol=1e-4, atol=1e-5 * np.abs(value).max(), err_msg=name)


@needs_float8_on_cpu
def test_float8_rounds_by_more_than_that():
    """The network's gradients in float8 and in fp64 differ by percents, so the tolerance above can tell."""
    narrow, wide = (loss_and_gradients(None, NUM_WORDS, 1, float8=float8) for float8 in (True, False))
    for name, value in wide.items():
        if name.startswith("gradient"):
            assert np.linalg.norm(narrow[name] - value) > 1e-3 * np.linalg.norm(value), name
