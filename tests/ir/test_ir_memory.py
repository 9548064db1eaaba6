"""Activations held, in units of 1/p of the model for one whole micro-batch."""

import pytest

from chimera.errors import UsageError
from chimera.ir.memory import over_limit, peak_activations
from chimera.ir.schedule import Schedule


@pytest.mark.parametrize(
    ("rows", "routes", "expected"),
    [
        (["0F0 0F1 0B0 0B1", "1F0 1B0 1F1 1B1"], [[0, 1]], (2.0, 1.0)),
        (["0F0 0F1 0I0 0I1 0W0 0W1", "1F0 1I0 1F1 1W0 1I1 1W1"], [[0, 1]], (2.0, 2.0)),
        (["0F0 3F0 3B0 0B0", "1F0 2F0 2B0 1B0"], [[0, 1, 1, 0]], (1.0, 1.0)),
        (["0F0 0B0 0F1 0B1", "1F0 1B0 1F1 1B1", "2F0 2B0 2F1 2B1"], [[0, 1, 2]], (1.0, 1.0, 1.0)),
        (["0F0 (0F1;0B0)OVERLAP_F_B 0B1"], [[0]], (2.0,)),
        (["0F0 0F1", "1F0 1F1", ""], [[0, 1]], (1.5, 1.5, 0.0)),
    ],
)
def test_an_activation_is_held_from_its_forward_to_its_last_use(rows, routes, expected):
    """Held until B, or W of a split backward; a stage of S on p ranks counts p/S; a pair needs both at once.

    Without a backward a forward holds it only while it runs.
    """
    assert peak_activations(Schedule.from_text(rows, routes=routes)) == expected


def test_half_micro_batches_hold_half():
    """The schedule's share of a micro-batch scales what is held."""
    whole = Schedule.from_text(["0F0 0F1 0B0 0B1"], routes=[[0]])
    half = Schedule(whole.name, whole.placement, whole.microbatch_to_route, whole.actions, 0.5)
    assert (peak_activations(whole), peak_activations(half)) == ((2.0,), (1.0,))


@pytest.mark.parametrize("limit", [0.0, -1.0, float("nan")])
def test_a_limit_that_nothing_can_be_held_against_is_refused(limit):
    """A limit of zero or less, or none that is a number, is a wrong option and not a broken schedule."""
    with pytest.raises(UsageError, match=f"--memory-limit {limit:g}: needed: a number above 0"):
        over_limit(Schedule.from_text(["0F0 0B0"], routes=[[0]]), limit)
