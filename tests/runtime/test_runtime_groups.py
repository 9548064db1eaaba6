"""The communicators of a run: which ranks share which, and that none is dropped while others connect."""

import threading
import weakref

import pytest
from runtime_cases import make_layers, make_loss, make_schedule
from torch import nn
from torch.nn import functional

from chimera.runtime import groups as groups_module
from chimera.runtime.pipeline import Pipeline
from chimera.tensor.communicator import Communicator


class Remembered(Communicator):
    """A communicator that is told of, but not held, by its class."""

    made = ()

    def __init__(self, *args):
        super().__init__(*args)
        type(self).made = (*type(self).made, weakref.ref(self))


def members(group, schedule, p):
    """Make a pipeline; return the members of every communicator that this rank made, None for one that is gone."""
    Remembered.made = ()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(groups_module, "Communicator", Remembered)
        pipe = Pipeline(
            make_layers("bert"), make_schedule(schedule, p, 4), make_loss("bert"), group, backend="gloo", timeout_s=20.0
        )
    made = [reference() for reference in Remembered.made]
    pipe.close()
    return [None if communicator is None else list(communicator.ranks) for communicator in made]


@pytest.mark.parametrize(
    ("schedule", "p", "d", "expected"),
    [
        # Control and stage; the tied decoder is a parameter of the one stage.
        ("1f1b", 1, 2, [[[0, 1], [0, 1]]] * 2),
        # Control, tied, messages: no stage has a second replica.
        ("1f1b", 2, 1, [[[0, 1], [0, 1], [0, 1]]] * 2),
        # Control, stage, tied, messages of one replica.
        (
            "1f1b",
            2,
            2,
            [[[0, 1, 2, 3], stage, [0, 1, 2, 3], ends] for stage in ([0, 1], [2, 3]) for ends in ([0, 2], [1, 3])],
        ),
        # Control, both stages, tied, messages.
        ("chimera-1-concatenate", 2, 1, [[[0, 1]] * 5] * 2),
    ],
)
def test_communicators_join_the_ranks_that_need_them_and_stay(ranks, schedule, p, d, expected):
    """Every communicator that is made is held: one dropped at once would close connections still being made."""
    assert ranks.run(p * d, members, schedule, p) == expected


def test_a_process_on_its_own_has_no_communicator():
    """One rank needs nobody: no group, no store, no thread that watches."""
    layers, schedule = [nn.Linear(2, 2), nn.Linear(2, 2)], make_schedule("interleaved", 1, 2)
    pipe = Pipeline(layers, schedule, functional.mse_loss)
    groups = pipe.groups
    assert groups.control is None
    assert groups.stages == {0: None, 1: None}
    assert groups.channels == {}
    assert groups.store is None
    assert not [thread for thread in threading.enumerate() if thread.name == "chimera-watch"]
