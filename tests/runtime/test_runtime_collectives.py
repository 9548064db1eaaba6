"""Between a rank's first forward and its last backward nothing is exchanged but messages and gradients."""

import pytest
from runtime_cases import cut_layers, make_loss, make_schedule, microbatches

from chimera.ir.action import BACKWARDS, Kind, flatten
from chimera.runtime.pipeline import Pipeline
from chimera.tensor.communicator import Communicator
from chimera.tensor.parallel import TensorParallel


def collectives_between(group, p, t, *, shard):
    """Train two steps; return the collectives that this rank starts in between, by what they are and for whom."""
    parallel = TensorParallel.join(group, t, timeout_s=60.0)
    layers, loss = cut_layers("bert-cut", parallel=parallel), make_loss("bert-cut", parallel)
    schedule = make_schedule("chimera-1-concatenate", p, p)
    pipe = Pipeline(
        layers, schedule, loss, group, tensor=parallel, reduce="eager", shard_optimizer=shard, timeout_s=60.0
    )
    program = pipe.schedule.actions[pipe.groups.pipeline_rank]
    kinds = [{action.kind for action in flatten([instruction])} for instruction in program]
    first = next(n for n, at in enumerate(kinds) if Kind.F in at)
    last = max(n for n, at in enumerate(kinds) if at & BACKWARDS)
    owners = {id(parallel.communicator): "tensor"}
    owners |= {
        id(communicator): "gradients" for communicator in (*pipe.groups.stages.values(), *pipe.groups.tied.values())
    }
    found, start = set(), Communicator._start

    def counting(self, what, *arguments):
        position = pipe._running._executor.position
        if position is not None and first <= position <= last:
            found.add((what, owners.get(id(self), "others")))
        return start(self, what, *arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Communicator, "_start", counting)
        for step in range(2):
            pipe.step(*microbatches("bert-cut", step, range(p)))
            pipe.publish_weights()
    pipe.close()
    return found


@pytest.mark.parametrize("shard", [False, True])
def test_only_gradients_are_summed_between_forwards_and_backwards(ranks, shard):
    """One pipeline of two ranks, two copies of each stage: their reductions, nothing for shapes, counts or the norm."""
    found = set().union(*ranks.run(2, collectives_between, 2, 1, shard=shard))
    assert found == {("summing over", "gradients")}


def test_tensor_parallelism_adds_its_own(ranks):
    """With two ranks that share each layer, their sums and maxima are there too, and nothing else."""
    found = set().union(*ranks.run(4, collectives_between, 2, 2, shard=False))
    assert {owner for _, owner in found} == {"gradients", "tensor"}
    assert {what for what, owner in found if owner == "gradients"} == {"summing over"}
