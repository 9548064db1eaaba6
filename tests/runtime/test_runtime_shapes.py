"""Agreement on the shapes of messages: once for each kind of micro-batch, leaving nothing behind."""

import pytest
import torch
from runtime_cases import make_schedule
from torch import nn
from torch.nn import functional

from chimera.runtime.channels import TensorSpec
from chimera.runtime.pipeline import Pipeline
from chimera.runtime.shapes import gradient_spec


class Counting(nn.Module):
    """Counts the forwards that find out shapes: they alone run without gradients in training."""

    def __init__(self, width):
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.dry_runs = 0

    def forward(self, hidden):
        self.dry_runs += not torch.is_grad_enabled()
        return self.linear(hidden)


class Telling(Counting):
    """Tells its output's shape by arithmetic."""

    def output_spec(self, spec):
        return spec


def count_dry_runs(group, layers, schedule):
    pipe = Pipeline(layers, make_schedule(schedule, group.size(), 4), functional.mse_loss, group, timeout_s=20.0)
    mine = list(pipe._weights.layers.values())
    counted = []
    # Equal micro-batches; the same again; one of another length among them; the same again, the other way round.
    for lengths in ((2, 2, 2, 2), (2, 2, 2, 2), (2, 3, 2, 2), (3, 2, 3, 2)):
        batch = [torch.ones(length, 3) for length in lengths]
        pipe.step(batch, batch)
        counted.append([layer.dry_runs for layer in mine])
    pipe.close()
    return counted


def with_counters(group, schedule):
    return count_dry_runs(group, [Counting(3), Counting(3)], schedule)


def with_specs(group, schedule):
    return count_dry_runs(group, [Telling(3), Telling(3)], schedule)


def test_shapes_are_agreed_once_for_each_kind_of_micro_batch(ranks):
    """A second step of equal shapes asks nobody; another length is asked about once."""
    assert ranks.run(2, with_counters, "1f1b") == [[[1], [1], [2], [2]]] * 2


def test_shapes_are_agreed_once_for_each_route(ranks):
    """Where two routes have their own copies of a stage, each finds out on its own, when it first meets a kind."""
    first, second = ranks.run(2, with_counters, "chimera-1-concatenate")
    # Micro-batches take turns: number 1 goes up, from rank 1 to rank 0, and is the first of length 3.
    assert first == [[1, 1], [1, 1], [1, 2], [2, 2]]
    assert second == [[1, 1], [1, 1], [2, 1], [2, 2]]


def test_a_layer_that_tells_its_shape_is_not_run(ranks):
    """``output_spec`` answers for a later stage; the first one, which takes the batch, is run."""
    first, second = ranks.run(2, with_specs, "1f1b")
    assert first[-1] == [2]
    assert second[-1] == [0]


def normalise(group):
    """Train two steps with BatchNorm; return its buffers, and the generator's draw after the first agreement."""
    torch.manual_seed(0)
    layers = [nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Dropout(0.5), nn.Linear(3, 3)]
    pipe = Pipeline(layers, make_schedule("1f1b", 2, 2), functional.mse_loss, group, timeout_s=20.0)
    batch = torch.arange(24.0).view(8, 3)
    pipe.step(batch, batch)
    pipe.step(batch, batch)
    pipe.close()
    norm = layers[1]
    return norm.running_mean.tolist(), norm.num_batches_tracked.item(), torch.rand(1).item()


def test_finding_out_shapes_leaves_no_trace(ranks):
    """Running statistics saw the four micro-batches of two steps and no zeros; the generator did not move."""
    (mean, tracked, drawn), _ = ranks.run(2, normalise)
    torch.manual_seed(0)
    linear, norm = nn.Linear(3, 3), nn.BatchNorm1d(3)
    nn.Linear(3, 3)
    expected = torch.rand(1).item()
    for micro_batch in torch.arange(24.0).view(8, 3).tensor_split(2) * 2:
        norm(linear(micro_batch))
    assert tracked == 4
    torch.testing.assert_close(torch.tensor(mean), norm.running_mean)
    assert drawn == expected


class Give(nn.Module):
    """Gives tensors of many types and sizes, with a gradient for the floating ones."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))

    def forward(self, x):
        scaled = x * self.weight
        wide = torch.arange(6).view(2, 3).t()  # not contiguous
        return (
            scaled.t(),
            scaled.double(),
            scaled.half(),
            scaled.bfloat16(),
            scaled.sum(),
            scaled[:0],
            x > 1,
            wide,
            wide.int(),
            wide.to(torch.uint8),
        )


class Take(nn.Module):
    """Uses every floating tensor but the empty one, and keeps what else came, last."""

    def forward(self, *tensors):
        (*floating, empty), integers = tensors[:6], tensors[6:]
        total = floating[-1]
        self.sizes = tuple(total.shape), tuple(empty.shape)
        self.integers = [(str(tensor.dtype), tensor.tolist()) for tensor in integers]
        return torch.stack([tensor.float().sum() for tensor in floating]).sum()[None, None]


def pass_everything(group, recompute):
    options = {"timeout_s": 20.0, "recompute": recompute}
    layers = [Give(), Take()]
    pipe = Pipeline(layers, make_schedule("1f1b", 2, 2), functional.l1_loss, group, **options)
    x = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    # Two micro-batches of equal values: the mean is one's loss.
    loss = pipe.step([x, x], [torch.zeros(1, 1)] * 2)
    pipe.close()
    took = (layers[1].sizes, layers[1].integers) if group.rank() == 1 else None
    return loss.item(), [p.grad.tolist() for _, p in pipe.named_parameters()], took


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_tensors_of_any_type_and_size_pass_between_stages(ranks, recompute):
    """Floats of four widths, integers, flags, a scalar, an empty one, and ones that are not contiguous."""
    first, second = ranks.run(2, pass_everything, recompute)
    assert first == (50.0, [[20.0, 30.0]], None)
    wide = [[0, 3], [1, 4], [2, 5]]
    integers = [("torch.bool", [[False, True], [True, True]])]
    integers += [(f"torch.{dtype}", wide) for dtype in ("int64", "int32", "uint8")]
    assert second == (50.0, [], (((), (0, 2)), integers))


def test_gradients_come_back_for_floating_tensors_only():
    """The spec of a message back leaves integers out and keeps the order."""
    floating, whole = TensorSpec((2,), torch.float32), TensorSpec((3,), torch.int64)
    assert gradient_spec((whole, floating, whole)) == (floating,)
