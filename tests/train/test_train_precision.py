"""What train.dtype means, and float8: refused without its extra or device, and what it turns into it."""

import numpy as np
import pytest
import torch
from float8_on_cpu import needs_float8_on_cpu
from torch import nn

from chimera.errors import ConfigError
from chimera.models.bert import BertConfig, BertPretrainingLoss, bert_layers
from chimera.runtime.pipeline import Pipeline
from chimera.schedules import build_schedule
from chimera.tensor.linear import Linear
from chimera.tensor.parallel import ALONE, TensorParallel
from chimera.tensor.sharding import sharding_of
from chimera.tensor.vocabulary import Vocabulary
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


def test_float8_of_shared_layers_needs_the_device_alone(monkeypatch):
    """Their products are torch's own, so torchao is not asked for."""
    monkeypatch.setattr(precision, "convert_to_float8_training", None)
    with pytest.raises(ConfigError, match=r"compute capability 8.9 or later, this rank has CPU"):
        in_precision([nn.Linear(16, 16)], "fp8", CPU, TensorParallel(0, 2))


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


BERT = BertConfig(
    vocab_size=320,
    hidden_size=32,
    num_layers=2,
    num_heads=4,
    intermediate_size=48,
    max_positions=16,
    dropout=0.1,
    attention_dropout=0.0,
    initializer_range=0.2,
)


def multiplies_in_float8(layers):
    return [name for name, module in nn.Sequential(*layers).named_modules() if getattr(module, "float8", None)]


def test_the_same_layers_multiply_in_float8_on_ranks_that_share_them():
    """By their whole widths, though parts of 24 and of 80 rows are no multiples of 16; scores of two classes stay."""
    with torch.device("meta"):
        layers = bert_layers(BERT, TensorParallel(1, 2))
        alone = bert_layers(BERT)
    assert to_float8(layers, TensorParallel(1, 2)) == layers
    fitting = [name for name, module in nn.Sequential(*alone).named_modules() if precision._fits_float8(module)]
    assert multiplies_in_float8(layers) == fitting
    assert [name for name in fitting if not name[2:].startswith(("attention", "feed_forward"))] == [
        "3.pooler",
        "3.transform",
        "3.decoder",
    ]


def bert_step(group, t, schedule, p, *, sequence=False, dtype=None):
    """Make a step of BERT in float8 on t · p ranks; return the loss and the whole gradients of this rank's stages."""
    parallel = TensorParallel.join(group, t, sequence=sequence, timeout_s=20.0)
    with torch.device("meta"):
        layers = bert_layers(BERT, parallel)
    if t > 1:
        to_float8(layers, parallel)
    for layer in layers if t == 1 else ():
        for module in layer.modules():
            if isinstance(module, Linear) and module.out_features != 2:
                module.float8 = ALONE
    pipe = Pipeline(
        layers,
        build_schedule(schedule, ranks=p, microbatches=2),
        BertPretrainingLoss(Vocabulary(BERT.vocab_size, parallel)),
        group,
        tensor=parallel,
        dtype=dtype,
        seed=3,
        timeout_s=20.0,
    )
    generator = torch.Generator().manual_seed(1)
    ids, labels = torch.randint(BERT.vocab_size, (2, 4, 8), generator=generator)
    inputs = {"input_ids": ids, "token_type_ids": ids % 2, "attention_mask": torch.ones_like(ids), "mlm_labels": labels}
    loss = pipe.step(inputs, {"mlm_labels": labels, "nsp_labels": torch.tensor([0, 1, 1, 0])})
    found = {}
    for (name, main), (_, parameter) in zip(pipe.optimizer_parameters(), pipe.named_parameters(), strict=True):
        sharding, gradient = sharding_of(parameter), main.grad
        if sharding.is_cut:
            gradient = sharding.join(parallel.start_gather(gradient[None], 0).wait().unbind())
        found[name] = gradient.numpy().copy()
    pipe.close()
    return loss.item(), found


@needs_float8_on_cpu
@pytest.mark.parametrize(
    ("t", "p", "schedule", "sequence"), [(2, 2, "zb-h1", True), (2, 2, "chimera", False), (4, 1, "1f1b", True)]
)
def test_float8_on_ranks_that_share_layers_equals_one_rank(ranks, t, p, schedule, sequence):
    """In fp32 otherwise, loss and gradients of a step are those of one process, far closer than float8 rounds."""
    loss, expected = bert_step(None, 1, "1f1b", 1)
    found = ranks.run(t * p, bert_step, t, schedule, p, sequence=sequence)
    assert {name for _, gradients in found for name in gradients} == set(expected)
    whole = np.linalg.norm([np.linalg.norm(gradient) for gradient in expected.values()])
    errors = []
    for got, gradients in found:
        assert got == pytest.approx(loss, rel=1e-5)
        for name, gradient in gradients.items():
            errors.append((np.linalg.norm(gradient - expected[name]) / whole, name))
    assert max(errors)[0] < 1e-5, max(errors)


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
