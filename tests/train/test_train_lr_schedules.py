"""The factor of the learning rate: warm-up, each decay, the ends, and refusals."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chimera.errors import ConfigError
from chimera.train.lr_schedules import LearningRate, learning_rate_factor


def factors(steps, **options):
    config = LearningRate(**options)
    return [learning_rate_factor(config, step) for step in range(steps)]


def test_linear_decay_reaches_the_final_fraction_at_the_last_step_and_stays():
    """Warm-up over 2 steps, then a straight line from 1 to the fraction at total_steps."""
    got = factors(9, total_steps=6, warmup_steps=2, final_fraction=0.2)
    assert got == pytest.approx([0.5, 1.0, 1.0, 0.8, 0.6, 0.4, 0.2, 0.2, 0.2])


def test_cosine_decay_is_half_way_down_in_the_middle():
    """The cosine falls slowly, is half-way in the middle, and ends at the fraction."""
    got = factors(6, total_steps=4, decay="cosine", final_fraction=0.1)
    assert got == pytest.approx([1.0, 0.1 + 0.9 * 0.8535533905932737, 0.55, 0.1 + 0.9 * 0.1464466094067262, 0.1, 0.1])


def test_constant_stays_at_the_peak_for_ever():
    """After its warm-up a constant rate is 1, beyond total_steps too."""
    assert factors(6, total_steps=4, warmup_steps=2, decay="constant") == [0.5, 1.0, 1.0, 1.0, 1.0, 1.0]


def test_warm_up_stable_decay_falls_at_the_end_only():
    """Two steps up, at the peak until four steps before the end, then a straight line to the fraction."""
    got = factors(12, total_steps=10, warmup_steps=2, decay="wsd", decay_steps=4, final_fraction=0.2)
    assert got == pytest.approx([0.5, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 0.8, 0.6, 0.4, 0.2, 0.2])
    assert factors(31, total_steps=30, decay="wsd") == pytest.approx([1.0] * 28 + [2 / 3, 1 / 3, 0.0])


def test_phases_of_no_length_leave_the_others_as_they_are():
    """Without a fall the rate stays up to the end; without a stable phase wsd is linear; all of it may be empty."""
    assert factors(5, total_steps=4, decay="wsd", decay_steps=0) == [1.0, 1.0, 1.0, 1.0, 0.0]
    linear = factors(6, total_steps=5, warmup_steps=1)
    assert factors(6, total_steps=5, warmup_steps=1, decay="wsd", decay_steps=4) == linear
    assert factors(2, total_steps=0, decay="wsd", decay_steps=0) == [0.0, 0.0]


@pytest.mark.parametrize("decay", ["linear", "cosine", "constant", "wsd"])
def test_phases_of_no_length_divide_by_nothing(decay):
    """No warm-up starts at the peak; no decay goes from the warm-up to the final value at once."""
    final = 1.0 if decay == "constant" else 0.0
    assert factors(1, total_steps=5, decay=decay) == [1.0]
    assert factors(4, total_steps=2, warmup_steps=2, decay=decay) == [0.5, 1.0, final, final]
    assert factors(2, total_steps=0, decay=decay) == [final, final]


@given(
    warmup=st.integers(0, 20),
    rest=st.integers(0, 20),
    decay=st.sampled_from(["linear", "cosine", "wsd"]),
    final=st.floats(0.0, 1.0),
)
def test_factor_rises_to_one_then_never_rises(warmup, rest, decay, final):
    """It is above 0 from the first step, grows through the warm-up, and falls after it, never below the final value."""
    got = factors(warmup + rest + 3, total_steps=warmup + rest, warmup_steps=warmup, decay=decay, final_fraction=final)
    rising, falling = got[:warmup], got[warmup:]
    assert all(0.0 < value <= 1.0 for value in rising)
    assert rising == sorted(rising)
    assert not rising or rising[-1] == 1.0
    assert not rest or falling[0] == 1.0
    assert all(later <= earlier + 1e-12 for earlier, later in itertools.pairwise(falling))
    assert falling[rest:] == [final] * 3
    assert min(falling) >= final - 1e-12


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"decay": "cosin"}, r"decay = 'cosin' is unknown \(did you mean 'cosine'"),
        ({"decay_steps": 3}, r"decay_steps = 3 has no meaning for decay = 'linear'.*choose decay = \"wsd\""),
        ({"decay": "wsd", "decay_steps": 7, "warmup_steps": 4}, r"decay_steps = 7 must be in 0…6"),
        ({"warmup_steps": 11}, r"warmup_steps = 11 exceeds total_steps = 10"),
        ({"warmup_steps": -1}, r"warmup_steps = -1"),
        ({"total_steps": 1.5}, r"total_steps = 1.5 must be a whole number"),
        ({"final_fraction": 1.5}, r"final_fraction = 1.5"),
        ({"final_fraction": float("nan")}, r"final_fraction = nan"),
        ({"decay": "constant", "final_fraction": 0.5}, r"final_fraction = 0.5 contradicts decay = \"constant\""),
    ],
)
def test_a_schedule_that_makes_no_sense_is_refused_by_option(options, message):
    """Every wrong option is named with its section and value."""
    with pytest.raises(ConfigError, match=r"\[learning_rate\] " + message):
        LearningRate(**({"total_steps": 10} | options))
