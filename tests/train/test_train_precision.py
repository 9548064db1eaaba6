"""What train.dtype means, and float8: refused without its extra or device, and what it turns into it."""

import pytest
import torch
from torch import nn

from chimera.errors import ConfigError
from chimera.runtime.pipeline import Pipeline
from chimera.schedules import build_schedule
from chimera.train import precision
from chimera.train.precision import in_precision, to_float8, torch_dtype

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _one_thread():
    torch.set_num_threads(1)


def test_types_are_torchs():
    """fp32 leaves the layers' own type; fp8 keeps its weights in bf16."""
    types = [torch_dtype(name) for name in ("fp32", "bf16", "fp16", "fp8")]
    assert types == [None, torch.bfloat16, torch.float16, torch.bfloat16]


def test_other_types_leave_the_layers_alone():
    """Only float8 changes a layer."""
    layers = [nn.Linear(16, 16)]
    assert in_precision(layers, "bf16", CPU) == layers


def test_float8_without_its_extra_is_refused(monkeypatch):
    """The error names the extra and bf16."""
    monkeypatch.setattr(precision, "convert_to_float8_training", None)
    with pytest.raises(ConfigError, match=r"needs torchao, .*install chimera-pipeline\[float8\], or set .* bf16"):
        in_precision([nn.Linear(16, 16)], "fp8", CPU)


def test_float8_without_such_a_device_is_refused(monkeypatch):
    """The error says what is needed, what there is, and what to take instead."""
    monkeypatch.setattr(precision, "convert_to_float8_training", object())
    with pytest.raises(ConfigError, match=r"compute capability 8.9 or later, this rank has CPU; .* bf16"):
        in_precision([nn.Linear(16, 16)], "fp8", CPU)


def test_float8_takes_the_layers_that_fit(monkeypatch):
    """Layers whose widths are multiples of 16 are handed over, others are not; none at all is refused."""
    offered = []

    def convert(layer, *, module_filter_fn):
        offered.extend(module for module in layer.modules() if module_filter_fn(module, ""))
        return layer

    monkeypatch.setattr(precision, "convert_to_float8_training", convert)
    fitting, odd = nn.Linear(32, 16), nn.Linear(16, 30)
    to_float8([nn.Sequential(fitting, nn.LayerNorm(16)), odd])
    assert offered == [fitting]
    with pytest.raises(ConfigError, match=r"no linear layer has two widths that are multiples of 16"):
        to_float8([odd])


def loss_and_gradient(layers):
    """Return the loss of one step in bf16, and the whole gradient."""
    pipe = Pipeline(
        layers, build_schedule("zb-h1", ranks=1, microbatches=2), nn.functional.mse_loss, dtype=torch.bfloat16
    )
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(64, 64, generator=generator).bfloat16()
    loss = pipe.step(inputs, inputs.flip(0))
    gradient = torch.cat([p.parameter.grad.flatten() for p in pipe.portions()])
    assert {portion.parameter.dtype for portion in pipe.portions()} == {torch.float32}
    return loss.item(), gradient, [name for name, _ in pipe.named_parameters()]


def some_layers():
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return [nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64)), nn.Linear(64, 64)]


def assert_near_bf16(device, **options):
    """Float8 gives the loss of bf16 to 2% and a gradient that points the same way, under the same names."""
    layers = [layer.to(device) for layer in to_float8(some_layers(), **options)]
    loss, gradient, names = loss_and_gradient(layers)
    expected_loss, expected, expected_names = loss_and_gradient([layer.to(device) for layer in some_layers()])
    assert names == expected_names
    assert loss == pytest.approx(expected_loss, rel=0.02)
    assert not torch.equal(gradient, expected)
    assert float(nn.functional.cosine_similarity(gradient, expected, dim=0)) > 0.98


def test_float8_trains_near_bf16():
    """With torchao's arithmetic in place of the device's, loss and gradient are near those of bf16."""
    float8 = pytest.importorskip("torchao.float8", reason="needs the extra float8")
    assert_near_bf16(CPU, config=float8.Float8LinearConfig(emulate=True))


@pytest.mark.gpu
def test_float8_trains_near_bf16_on_a_device_that_has_it():
    """The device's own products give the same."""
    pytest.importorskip("torchao.float8", reason="needs the extra float8")
    if not torch.cuda.is_available() or torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("needs a CUDA device of compute capability 8.9 or later")
    assert_near_bf16(torch.device("cuda"))
