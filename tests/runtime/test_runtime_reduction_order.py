"""All ranks start a stage's reductions in one order, whatever order its gradients arrive in on each of them."""

import numpy as np
import pytest
import torch
from runtime_cases import snapshot
from torch import nn

from chimera.runtime.pipeline import Pipeline
from chimera.schedules import build_schedule


def narrow_and_wide():
    """Return layers of parameters of two types, by turns, that take buckets of equal size."""
    return [nn.Linear(4, 4, bias=False).to(torch.float64 if n % 2 else torch.float32) for n in range(6)]


def reduce_against_the_order(group, *, shard):
    """Let the gradients of one type arrive first on one rank and last on the other; return the sums by name.

    Half the gradients arrive inside the backward, the others are left to the ``REDUCE_GRAD``.
    """
    torch.manual_seed(0)
    pipe = Pipeline(
        narrow_and_wide(),
        build_schedule("gpipe", ranks=1, microbatches=1),
        nn.functional.mse_loss,
        group,
        shard_optimizer=shard,
        bucket_bytes=128,
    )
    reduction = pipe._reduction
    reduction.begin(accumulate=False)
    parameters = [parameter for _, parameter in pipe.named_parameters()]
    for number, parameter in enumerate(parameters):
        parameter.grad.fill_(10.0 ** (number - 3) * (1 + group.rank()))
    first_type = (torch.float32, torch.float64)[group.rank()]
    arriving = sorted(range(len(parameters)), key=lambda n: (parameters[n].dtype is not first_type, -n))
    for number in arriving[: 2 + 2 * group.rank()]:
        reduction.arrived(parameters[number])
    reduction.start(0)
    reduction.finish()
    if shard:
        found = pipe.collected(lambda portion: portion.grad)
    else:
        found = {name: parameter.grad for name, parameter in pipe.named_parameters()}
    pipe.close()
    return snapshot(found)


@pytest.mark.parametrize("shard", [False, True])
def test_buffers_of_two_types_are_summed_in_one_order(ranks, shard):
    """fp32 gradients arrive first on one rank and fp64 ones on the other: each sum is of the same parameter's."""
    sums = {}
    for found in ranks.run(2, reduce_against_the_order, shard=shard):
        sums |= found
    assert len(sums) == 6
    for name, total in sums.items():
        np.testing.assert_allclose(total, 3 * 10.0 ** (int(name.split(".")[0]) - 3), rtol=1e-6)
