"""The package's own proof and simulator agree with the independent judge of these tests, and with the documentation."""

import re
from pathlib import Path

import pytest
from schedules_oracle import assert_complete, run

from chimera.errors import UsageError
from chimera.ir.checks import check
from chimera.ir.costs import Costs
from chimera.passes.lower import lower
from chimera.passes.reductions import REDUCTION_MODES
from chimera.schedules import SCHEDULES, build_schedule
from chimera.simulate import simulate

DOCUMENT = Path(__file__).parents[2] / "docs" / "schedules.md"
OPTIONS = [
    *[(name, {}) for name in ("gpipe", "1f1b", "gems", "zb-h1", "zb-h2", "zb-v", "v-half", "v-min", "pipedream")],
    *[(name, {"chunks": chunks}) for name in ("interleaved", "looped-bfs", "interleaved-zb") for chunks in (1, 2, 3)],
    *[(name, {"waves": waves}) for name in ("hanayo", "bitpipe") for waves in (1, 2)],
    *[
        ("chimera", {"pairs": pairs, "unit": unit})
        for pairs in (1, 2, 4)
        for unit in ("concatenate", "double", "halve")
    ],
]


@pytest.mark.parametrize(("name", "options"), OPTIONS)
@pytest.mark.parametrize("microbatches", [1, 3, 8, 13, 20])
def test_proved_and_timed_alike(name, options, microbatches):
    """Each schedule is proved, and both simulators give the same makespan, bubble and activations."""
    schedule = build_schedule(name, ranks=8, microbatches=microbatches, **options)
    expected = run(schedule)
    check(schedule, memory_limit=float(max(expected.peaks)))
    timeline = simulate(schedule, Costs(forward=1, backward=2))
    assert timeline.makespan == pytest.approx(float(expected.makespan))
    assert timeline.bubble_fraction == pytest.approx(float(expected.of_total))
    assert timeline.peak_activations == pytest.approx([float(peak) for peak in expected.peaks])


def numbers(label: str) -> list[float]:
    """Return a row of the documentation's table of interleaved schedules."""
    (line,) = re.findall(rf"^\| {label} \|(.*)\|$", DOCUMENT.read_text(encoding="utf-8"), re.MULTILINE)
    return [float(cell) for cell in line.split("|")]


def test_documented_interleaved_figures():
    """The table of interleaved figures in docs/schedules.md is what the schedules give."""
    microbatches = [int(number) for number in numbers("m")]
    runs = [run(build_schedule("interleaved", ranks=8, microbatches=m, chunks=4)) for m in microbatches]
    assert numbers("makespan") == [result.makespan for result in runs]
    assert numbers("most activations on a rank") == [max(result.peaks) for result in runs]
    plain = [run(build_schedule("1f1b", ranks=8, microbatches=m)) for m in microbatches]
    assert numbers("1F1B makespan") == [result.makespan for result in plain]


def test_documented_split_backward():
    """The table of split-backward schedules in docs/schedules.md is what the schedules give."""
    (header,) = re.findall(r"^\| schedule \|(.*)\|$", DOCUMENT.read_text(encoding="utf-8"), re.MULTILINE)
    runs = [run(build_schedule(name.strip(), ranks=8, microbatches=24)) for name in header.split("|")]
    assert numbers("makespan, F = I = W") == [result.makespan for result in runs]
    assert numbers("span, F = I = W") == [result.span for result in runs]
    assert numbers("activations, F = I = W") == [max(result.peaks) for result in runs]


def test_documented_pairs():
    """Both makespans of DualPipe in docs/schedules.md are what the simulator gives."""
    schedules = [build_schedule("dualpipe", ranks=8, microbatches=int(m)) for m in numbers("m in dualpipe")]
    assert numbers("makespan, pairs together") == [simulate(schedule).makespan for schedule in schedules]
    apart = [simulate(schedule, pairs_together=False).makespan for schedule in schedules]
    assert numbers("makespan, forward then backward") == apart


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize(("ranks", "microbatches"), [(2, 5), (3, 7), (4, 8), (4, 10), (6, 3), (6, 13)])
def test_every_family_works_or_is_refused_by_name(name, ranks, microbatches):
    """Every family is proved, lowered under each mode of reduction and as quick as before, or names what it needs."""
    try:
        schedule = build_schedule(name, ranks=ranks, microbatches=microbatches)
    except UsageError as error:
        refusal = str(error)
    else:
        refusal = None
    if refusal is not None:
        assert re.fullmatch(rf"{name}: got --.+; needed: .+; try --.+", refusal)
        return
    assert_complete(schedule)
    costs = Costs(p2p=0.25)
    expected = simulate(schedule, costs).makespan
    for mode in REDUCTION_MODES:
        assert simulate(lower(schedule, reduce=mode), costs).makespan == pytest.approx(expected)


@pytest.mark.parametrize(
    ("name", "volume"), [("1f1b", 1), ("zb-h1", 1), ("zb-h2", 1), ("zb-v", 2), ("v-half", 2), ("v-min", 2)]
)
def test_messages_of_split_backward(name, volume):
    """The V sends twice as many messages as one stage per rank: it goes down the ranks and up again."""
    lowered = lower(build_schedule(name, ranks=4, microbatches=8))
    assert " ".join(lowered.to_text()).count("SEND") == volume * 2 * 3 * 8


def test_documented_example(capsys):
    """The first example of docs/schedules.md prints what its comments say."""
    code, *_ = re.findall(r"```python\n(.*?)```", DOCUMENT.read_text(encoding="utf-8"), re.DOTALL)
    exec(code, {})  # noqa: S102 - our own documentation
    assert capsys.readouterr().out == "".join(f"{row}\n" for row in re.findall(r"^# (.*)$", code, re.MULTILINE))
