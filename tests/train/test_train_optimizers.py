"""LAMB against a plain reference, the parameter groups, state dicts and refusals."""

import copy
import io

import pytest
import torch
from torch import nn

from chimera.errors import ConfigError, UsageError
from chimera.tensor.portion import Portion
from chimera.train.optimizers import Lamb, OptimizerConfig, build_optimizer

SHAPES = {"0.word.weight": (7, 5), "0.norm.weight": (5,), "1.qkv.weight": (15, 5), "1.qkv.bias": (15,)}


@pytest.fixture(autouse=True)
def _one_thread_and_a_fixed_seed():
    torch.set_num_threads(1)
    torch.manual_seed(0)


def parameters_of(dtype=torch.float64):
    return {name: nn.Parameter(torch.randn(shape, dtype=dtype)) for name, shape in SHAPES.items()}


def optimizer_of(config, parameters):
    """Build the optimizer of parameters that are all here as a whole."""
    return build_optimizer(config, [Portion.whole(name, parameter) for name, parameter in parameters.items()])


def gradients_for(parameters, steps):
    return [{name: torch.randn_like(parameter) for name, parameter in parameters.items()} for _ in range(steps)]


def train(optimizer, parameters, gradients):
    for step in gradients:
        for name, parameter in parameters.items():
            parameter.grad = step[name].clone()
        optimizer.step()


def reference_lamb(weight, gradients, *, lr, betas, eps, weight_decay, use_trust_ratio):
    """Algorithm 2 of arXiv 1904.00962 for one tensor, line by line."""
    weight = weight.detach().clone()
    first, second = torch.zeros_like(weight), torch.zeros_like(weight)
    for step, gradient in enumerate(gradients, start=1):
        first = betas[0] * first + (1 - betas[0]) * gradient
        second = betas[1] * second + (1 - betas[1]) * gradient**2
        direction = (first / (1 - betas[0] ** step)) / ((second / (1 - betas[1] ** step)).sqrt() + eps)
        direction = direction + weight_decay * weight
        ratio = 1.0
        if use_trust_ratio and weight.norm() > 0 and direction.norm() > 0:
            ratio = weight.norm() / direction.norm()
        weight = weight - lr * ratio * direction
    return weight


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_lamb_equals_a_plain_reference(dtype):
    """Matrices with decay and trust ratio, norms and biases without either, over five steps."""
    config = OptimizerConfig(name="lamb", learning_rate=0.02, betas=(0.8, 0.95), eps=1e-3, weight_decay=0.1)
    parameters = parameters_of(dtype)
    gradients = gradients_for(parameters, 5)
    expected = {
        name: reference_lamb(
            parameter,
            [step[name] for step in gradients],
            lr=0.02,
            betas=(0.8, 0.95),
            eps=1e-3,
            weight_decay=0.1 if parameter.ndim > 1 else 0.0,
            use_trust_ratio=parameter.ndim > 1,
        )
        for name, parameter in parameters.items()
    }
    train(optimizer_of(config, parameters), parameters, gradients)
    for name, parameter in parameters.items():
        torch.testing.assert_close(parameter.detach(), expected[name], msg=lambda text, name=name: f"{name}: {text}")


def test_lamb_takes_trust_ratio_one_where_a_norm_is_zero():
    """A weight of zeros moves by lr times Adam's direction; a zero direction leaves a weight as it is."""
    zeros, still = nn.Parameter(torch.zeros(3, 3)), nn.Parameter(torch.ones(3, 3))
    optimizer = Lamb([zeros, still], lr=0.5, eps=1e-12, weight_decay=0.0)
    zeros.grad, still.grad = torch.full((3, 3), -2.0), torch.zeros(3, 3)
    optimizer.step()
    torch.testing.assert_close(zeros.detach(), torch.full((3, 3), 0.5))
    assert torch.equal(still, torch.ones(3, 3))


def test_lamb_leaves_a_parameter_without_gradient_alone():
    """No gradient means no update, no decay and no state."""
    moved, left = nn.Parameter(torch.ones(2, 2)), nn.Parameter(torch.ones(2, 2))
    optimizer = Lamb([moved, left], weight_decay=0.5)
    moved.grad = torch.ones(2, 2)
    optimizer.step()
    assert torch.equal(left, torch.ones(2, 2))
    assert left not in optimizer.state
    assert not torch.equal(moved, torch.ones(2, 2))


def test_lamb_returns_the_loss_of_its_closure():
    """The closure runs with gradients enabled and its loss comes back."""
    weight = nn.Parameter(torch.ones(2, 2))
    optimizer = Lamb([weight])

    def closure():
        loss = (weight**2).sum()
        loss.backward()
        return loss.item()

    assert optimizer.step(closure) == 4.0
    assert (weight < 1.0).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_adamw_decays_matrices_only(dtype):
    """It equals torch's plain AdamW with decay on the matrices and none on norms and biases."""
    config = OptimizerConfig(learning_rate=0.02, weight_decay=0.3)
    parameters = parameters_of(dtype)
    gradients = gradients_for(parameters, 5)
    plain = copy.deepcopy(parameters)
    for name, parameter in plain.items():
        decay = 0.3 if parameter.ndim > 1 else 0.0
        alone = torch.optim.AdamW(
            [parameter], lr=0.02, eps=1e-6, weight_decay=decay, betas=(0.9, 0.999), foreach=False, fused=False
        )
        train(alone, {name: parameter}, gradients)
    train(optimizer_of(config, parameters), parameters, gradients)
    for name, parameter in parameters.items():
        torch.testing.assert_close(parameter, plain[name])


def test_sgd_steps_along_the_gradient():
    """One step subtracts lr · (gradient + decay · weight) from a matrix and lr · gradient from a bias."""
    parameters = parameters_of()
    before = copy.deepcopy(parameters)
    (gradients,) = gradients_for(parameters, 1)
    config = OptimizerConfig(name="sgd", learning_rate=0.1, weight_decay=0.2)
    train(optimizer_of(config, parameters), parameters, [gradients])
    for name, parameter in parameters.items():
        decay = 0.2 * before[name] if parameter.ndim > 1 else 0.0
        torch.testing.assert_close(parameter.detach(), (before[name] - 0.1 * (gradients[name] + decay)).detach())


@pytest.mark.parametrize("nesterov", [False, True])
def test_sgd_follows_its_momentum(nesterov):
    """Over five steps it equals v = momentum · v + g, w = w − lr · v, or − lr · (g + momentum · v) looking ahead."""
    parameters = parameters_of()
    gradients = gradients_for(parameters, 5)
    expected = {}
    for name, parameter in parameters.items():
        weight, velocity = parameter.detach().clone(), torch.zeros_like(parameter)
        for step in gradients:
            velocity = 0.9 * velocity + step[name]
            weight = weight - 0.1 * (step[name] + 0.9 * velocity if nesterov else velocity)
        expected[name] = weight
    config = OptimizerConfig(name="sgd", learning_rate=0.1, weight_decay=0.0, momentum=0.9, nesterov=nesterov)
    train(optimizer_of(config, parameters), parameters, gradients)
    for name, parameter in parameters.items():
        torch.testing.assert_close(parameter.detach(), expected[name].detach())


@pytest.mark.parametrize("name", ["adamw", "lamb", "sgd"])
def test_the_moments_are_named(name):
    """What an optimizer keeps for a parameter goes by the names that checkpoints use."""
    config = OptimizerConfig(name=name, **({"momentum": 0.9} if name == "sgd" else {}))
    parameters = parameters_of()
    optimizer = optimizer_of(config, parameters)
    train(optimizer, parameters, gradients_for(parameters, 1))
    kept = {key for state in optimizer.state.values() for key, value in state.items() if value.ndim}
    assert kept == set(config.moments)


@pytest.mark.parametrize("name", ["adamw", "lamb", "sgd"])
def test_groups_are_the_same_two_on_every_rank(name):
    """Decayed matrices come first, norms and biases second, and a rank without one kind has an empty group."""
    config = OptimizerConfig(name=name, learning_rate=0.5, weight_decay=0.2)
    parameters = parameters_of()
    groups = optimizer_of(config, parameters).param_groups
    assert [[tuple(parameter.shape) for parameter in group["params"]] for group in groups] == [
        [(7, 5), (15, 5)],
        [(5,), (15,)],
    ]
    assert [(group["weight_decay"], group["lr"]) for group in groups] == [(0.2, 0.5), (0.0, 0.5)]
    lonely = {"0.norm.weight": nn.Parameter(torch.ones(5))}
    optimizer = optimizer_of(config, lonely)
    assert [len(group["params"]) for group in optimizer.param_groups] == [0, 1]
    train(optimizer, lonely, gradients_for(lonely, 1))
    assert (lonely["0.norm.weight"] != 1.0).all()


@pytest.mark.parametrize("name", ["adamw", "lamb", "sgd"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_saved_state_continues_bitwise(name, dtype):
    """Three steps, a save, a load into a fresh optimizer and three more equal six steps in a row."""
    config = OptimizerConfig(name=name, **({"momentum": 0.9} if name == "sgd" else {}))
    parameters = parameters_of(dtype)
    gradients = gradients_for(parameters, 6)
    unbroken = copy.deepcopy(parameters)
    train(optimizer_of(config, unbroken), unbroken, gradients)
    first = optimizer_of(config, parameters)
    train(first, parameters, gradients[:3])
    file = io.BytesIO()
    torch.save(first.state_dict(), file)
    second = optimizer_of(config, parameters)
    file.seek(0)
    second.load_state_dict(torch.load(file, weights_only=True))
    train(second, parameters, gradients[3:])
    assert {key: torch.equal(parameters[key], unbroken[key]) for key in SHAPES} == dict.fromkeys(SHAPES, True)


@pytest.mark.parametrize("name", ["adamw", "lamb", "sgd"])
def test_half_precision_weights_are_refused(name):
    """The error names the parameter and asks for fp32 main weights."""
    parameters = parameters_of(torch.bfloat16)
    with pytest.raises(UsageError, match=r"0\.word\.weight is torch\.bfloat16.*fp32 main weights"):
        optimizer_of(OptimizerConfig(name=name), parameters)
    with pytest.raises(UsageError, match=r"of shape \[7, 5\] is torch\.bfloat16"):
        Lamb(list(parameters.values()))


def test_a_tied_parameter_given_twice_is_refused():
    """Both names of the parameter stand in the error."""
    weight = nn.Parameter(torch.ones(2, 2))
    with pytest.raises(UsageError, match=r"0\.word\.weight and 3\.decoder\.weight are one parameter"):
        optimizer_of(OptimizerConfig(), {"0.word.weight": weight, "3.decoder.weight": weight})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"name": "lam"}, r"name = 'lam' is unknown \(did you mean 'lamb'"),
        ({"learning_rate": 0.0}, r"learning_rate = 0.0"),
        ({"learning_rate": float("inf")}, r"learning_rate = inf"),
        ({"betas": (0.9, 1.0)}, r"betas = \(0.9, 1.0\)"),
        ({"betas": (0.9,)}, r"betas = \(0.9,\)"),
        ({"eps": -1e-6}, r"eps = -1e-06"),
        ({"weight_decay": -0.1}, r"weight_decay = -0.1"),
        ({"clip_norm": 0.0}, r"clip_norm = 0.0 .*leave it out for no clipping"),
        ({"momentum": 0.9}, r"momentum = 0.9 has no meaning for name = 'adamw'.*choose sgd"),
        ({"nesterov": True}, r"nesterov = True has no meaning for name = 'adamw'.*choose sgd"),
        ({"name": "sgd", "nesterov": True}, r"nesterov = true needs a momentum above 0"),
        ({"name": "sgd", "momentum": 1.0}, r"momentum = 1.0 must be"),
        ({"name": "sgd", "eps": 1e-3}, r"eps = 0.001 has no meaning for name = 'sgd'.*adamw or lamb"),
    ],
)
def test_a_wrong_option_is_refused_by_name(options, message):
    """Every wrong option is named with its section and value."""
    with pytest.raises(ConfigError, match=r"\[optimizer\] " + message):
        OptimizerConfig(**options)
