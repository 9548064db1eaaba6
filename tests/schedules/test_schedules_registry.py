"""The registry finds schedules by name, refuses what they cannot take, and is what the documentation says."""

import gc
from pathlib import Path

import pytest

from chimera.errors import UsageError
from chimera.schedules import SCHEDULES, ScheduleFamily, build_schedule, chimera, interleaved

DOCUMENT = Path(__file__).parents[2] / "docs" / "schedules.md"


def row(family: ScheduleFamily) -> str:
    """Return the family's row of the table in docs/schedules.md."""
    options = ", ".join(f"`{option}`" for option in family.options) or "none"
    cells = (f"`{family.name}`", family.summary, family.requires, options, family.bubble, family.memory, family.source)
    return f"| {' | '.join(cells)} |"


def refusal(name: str, **options) -> str:
    with pytest.raises(UsageError) as caught:
        build_schedule(name, **{"ranks": 8, "microbatches": 8, **options})
    return str(caught.value)


@pytest.mark.parametrize("name", SCHEDULES)
def test_documentation_has_every_family(name):
    """docs/schedules.md holds the row of each family, word for word."""
    assert row(SCHEDULES[name]) in DOCUMENT.read_text(encoding="utf-8").splitlines()


@pytest.mark.parametrize("name", SCHEDULES)
def test_families_build_under_their_name(name):
    """A schedule carries the name of its family and the counts asked for."""
    schedule = build_schedule(name, ranks=4, microbatches=8)
    assert (SCHEDULES[name].name, schedule.name) == (name, name)
    assert (schedule.num_ranks, schedule.num_microbatches) == (4, 8)
    assert all((SCHEDULES[name].summary, SCHEDULES[name].source, SCHEDULES[name].requires))


def test_options_reach_the_functions():
    """Chunks, pairs and unit are passed on; what is left out takes the function's default."""
    assert build_schedule("interleaved", ranks=4, microbatches=8, chunks=3) == interleaved(4, 8, 3)
    assert build_schedule("interleaved", ranks=4, microbatches=8) == interleaved(4, 8, 2)
    assert build_schedule("chimera", ranks=8, microbatches=8, pairs=2, unit="halve") == chimera(8, 8, 2, "halve")


def test_registry_cannot_be_changed():
    """The mapping of schedules is read-only."""
    with pytest.raises(TypeError):
        SCHEDULES["mine"] = SCHEDULES["gpipe"]  # type: ignore[index]


def test_unknown_name():
    """An unknown schedule names the nearest and all known ones."""
    assert refusal("chimra") == (
        f"no schedule is named 'chimra' (did you mean 'chimera' or 'chimera-zb'?); known: {', '.join(SCHEDULES)}"
    )
    assert [*SCHEDULES][:4] == ["gpipe", "1f1b", "interleaved", "chimera"]


@pytest.mark.parametrize(
    ("name", "option", "value", "takers"),
    [
        ("gpipe", "chunks", 2, "interleaved, looped-bfs, interleaved-zb"),
        ("gems", "waves", 1, "hanayo, bitpipe"),
        ("pipedream", "updates", 1, "pipedream-2bw"),
        ("1f1b", "pairs", 1, "chimera, chimera-zb"),
        ("interleaved", "unit", "double", "chimera"),
        ("chimera", "chunks", 1, "interleaved, looped-bfs, interleaved-zb"),
    ],
)
def test_an_option_not_taken_is_refused(name, option, value, takers):
    """An option that a family does not take is refused by name, with those that take it, even at a neutral value."""
    assert refusal(name, **{option: value}) == (
        f"{name} takes no --{option}, got {value}; leave it out, or choose a schedule that takes it: {takers}"
    )


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("gpipe", {"ranks": 0}),
        ("1f1b", {"microbatches": 0}),
        ("interleaved", {"chunks": 0}),
        ("interleaved", {"ranks": -2}),
        ("chimera", {"pairs": 0}),
        ("chimera", {"microbatches": -1}),
        ("chimera", {"microbatches": 2.0}),
        ("looped-bfs", {"chunks": 0}),
        ("interleaved-zb", {"chunks": 0}),
        ("hanayo", {"waves": 0}),
        ("bitpipe", {"waves": -1}),
        ("dualpipe", {"ranks": 0}),
        ("dualpipev", {"microbatches": 0}),
        ("v-min", {"ranks": 0}),
        ("pipedream-2bw", {"updates": 0}),
    ],
)
def test_counts_below_one(name, options):
    """Counts below 1, or no whole numbers, are refused with the option and the least value."""
    ((option, value),) = options.items()
    assert refusal(name, **options) == (
        f"{name}: got --{option} {value}; needed: a whole number of at least 1; try --{option} 1"
    )


@pytest.mark.parametrize("name", ["chimera", "bitpipe", "dualpipe"])
@pytest.mark.parametrize(("ranks", "legal"), [(1, "2"), (3, "2 or 4"), (7, "6 or 8"), (101, "100 or 102")])
def test_odd_ranks(name, ranks, legal):
    """Schedules whose two directions mirror each other refuse an odd number of ranks with the nearest even ones."""
    message = refusal(name, ranks=ranks, microbatches=2 * ranks)
    assert message.startswith(f"{name}: got --ranks {ranks}; needed: an even number")
    assert message.endswith(f"; try --ranks {legal}")


@pytest.mark.parametrize(
    ("ranks", "pairs", "legal"), [(8, 3, "2 or 4"), (8, 5, "4"), (12, 4, "3 or 6"), (2, 2, "1"), (14, 3, "1 or 7")]
)
def test_pairs_that_do_not_divide(ranks, pairs, legal):
    """Chimera refuses a number of pairs that does not divide p/2, with the nearest divisors."""
    assert refusal("chimera", ranks=ranks, pairs=pairs) == (
        f"chimera: got --pairs {pairs} with --ranks {ranks}; needed: a divisor of ranks/2 = {ranks // 2}; "
        f"try --pairs {legal}"
    )


def test_unknown_unit():
    """An unknown unit is refused with the three that exist."""
    assert refusal("chimera", unit="doubling") == (
        "chimera: got --unit 'doubling'; needed: concatenate, double or halve (did you mean 'double'?)"
    )


def test_half_a_million_actions_are_built_at_once():
    """64 ranks × 1,024 micro-batches × 4 chunks are all there, and garbage collection is back on."""
    assert gc.isenabled()
    schedule = interleaved(64, 1024, 4)
    assert sum(map(len, schedule.actions)) == 524_288
    assert gc.isenabled()
