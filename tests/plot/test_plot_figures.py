"""Figures: every format is written whole, says what it should, and refuses what it cannot draw."""

import re
import subprocess
import sys

import pytest

from chimera.errors import UsageError
from chimera.ir.costs import Costs, StageCosts
from chimera.ir.schedule import Schedule
from chimera.passes.lower import lower
from chimera.plot import plot_curve, plot_timeline
from chimera.plot import timeline as timeline_figure
from chimera.plot.figure import settings
from chimera.schedules import build_schedule
from chimera.simulate import simulate

CHIMERA = build_schedule("chimera", ranks=4, microbatches=4)
MAGIC = {".png": b"\x89PNG\r\n\x1a\n", ".pdf": b"%PDF-", ".svg": b"<?xml"}


def drawn(*timelines, memory=False, width_in=10.0):
    """Return the figure of (title, timeline) panels, unsaved."""
    with settings():
        return timeline_figure._draw(timelines, memory=memory, messages=False, width_in=width_in)


def texts(axes):
    """Return the micro-batch numbers written into a panel, by row."""
    rows = {}
    for text in axes.texts:
        x, y = text.get_position()
        rows.setdefault(round(y), []).append((x, text.get_text()))
    return {row: [word for _, word in sorted(words)] for row, words in sorted(rows.items())}


def test_one_figure_is_written_in_all_formats_and_nothing_else_is_left(tmp_path):
    """PDF, PNG and SVG of the same figure begin as their formats do."""
    paths = [tmp_path / f"figure{suffix}" for suffix in MAGIC]
    plot_timeline([("Chimera", simulate(CHIMERA))], paths, memory=True)
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["figure.pdf", "figure.png", "figure.svg"]
    for path in paths:
        assert path.read_bytes().startswith(MAGIC[path.suffix])


def test_the_same_timeline_is_the_same_file(tmp_path):
    """No date and no random name gets into a figure."""
    for name in ("a.svg", "b.svg"):
        plot_timeline([("Chimera", simulate(CHIMERA))], tmp_path / name)
    assert (tmp_path / "a.svg").read_bytes() == (tmp_path / "b.svg").read_bytes()


def test_a_panel_holds_one_bar_per_action_with_its_number_and_says_makespan_and_bubble():
    """Four ranks, eight bars each, in four colours; the numbers are in order of time."""
    figure = drawn(("Chimera", simulate(CHIMERA)))
    (axes,) = figure.axes
    assert axes.get_title(loc="left") == "Chimera   ·   makespan 16 model units, bubble 25.0%"
    assert sum(len(collection.get_paths()) for collection in axes.collections) == 32
    assert len(axes.collections) == 4
    assert texts(axes)[0] == list("01223301")
    assert axes.get_xlabel() == "time (model units)"
    assert [text.get_text() for text in figure.legends[0].texts] == [
        "forward, route 0",
        "forward, route 1",
        "backward, route 0",
        "backward, route 1",
    ]


def test_measured_stands_above_predicted_on_one_axis_in_milliseconds():
    """Two panels share their limits; times below a second are shown in milliseconds."""
    slow, fast = (simulate(CHIMERA, StageCosts(forward_s=[t] * 4, backward_s=[2 * t] * 4)) for t in (0.011, 0.010))
    figure = drawn(("measured", slow), ("predicted", fast), memory=True)
    measured, _, predicted, _ = figure.axes
    assert measured.get_title(loc="left") == "measured   ·   makespan 176 ms, bubble 25.0%"
    assert predicted.get_title(loc="left") == "predicted   ·   makespan 160 ms, bubble 25.0%"
    assert measured.get_xlim() == predicted.get_xlim() == (0.0, pytest.approx(176 * 1.005))


def test_memory_gives_the_peak_of_each_rank():
    """The outer ranks of Chimera hold three units, the inner ones four; in bytes the unit is MiB."""
    figure = drawn(("", simulate(CHIMERA)), memory=True)
    assert [text.get_text() for text in figure.axes[1].texts] == ["3", "4", "4", "3"]
    costs = StageCosts(forward_s=[1] * 4, backward_s=[2] * 4, activation_bytes=[2**20] * 4, weight_bytes=[2**21] * 4)
    figure = drawn(("", simulate(CHIMERA, costs)), memory=True)
    assert [text.get_text() for text in figure.axes[1].texts] == ["7", "8", "8", "7"]
    assert "(MiB)" in figure.axes[1].get_title(loc="left")


def test_pairs_reductions_and_chunks_are_explained_in_the_legend():
    """A pair shows both halves with their numbers; what is drawn is in the legend."""
    rows = ["0F0 (0F1;0B0)OVERLAP_F_B 0B1", "1F0 1B0 1F1 1B1"]
    figure = drawn(("", simulate(lower(Schedule.from_text(rows, routes=[[0, 1]])), Costs(reduce=1))), width_in=8)
    assert sorted(texts(figure.axes[0])[0]) == ["0", "0", "1", "1"]
    assert [text.get_text() for text in figure.legends[0].texts] == ["forward", "backward", "gradient reduction"]
    looped = build_schedule("interleaved", ranks=2, microbatches=4, chunks=2)
    figure = drawn(("", simulate(looped)), width_in=8)
    assert [text.get_text() for text in figure.legends[0].texts][-1] == "darker: a later chunk of the rank"


def test_numbers_are_left_out_where_they_would_be_dust():
    """A thousand bars on a narrow page have no numbers, and the figure is still drawn."""
    figure = drawn(("", simulate(build_schedule("1f1b", ranks=4, microbatches=500))), width_in=6)
    assert texts(figure.axes[0]) == {}
    assert sum(len(collection.get_paths()) for collection in figure.axes[0].collections) == 4000


@pytest.mark.parametrize(
    ("timelines", "path", "message"),
    [
        ([], "a.png", "no timeline to draw"),
        (["units"], "a.jpeg", "--out a.jpeg: the suffix '.jpeg' names no format; needed: .pdf, .png or .svg"),
        (["units"], [], "no path for the figure"),
        (["units", "seconds"], "a.png", "timelines in model unit and s cannot share one time axis"),
    ],
)
def test_what_cannot_be_drawn_is_refused_before_anything_is_written(tmp_path, monkeypatch, timelines, path, message):
    """No file appears."""
    monkeypatch.chdir(tmp_path)
    known = {
        "units": simulate(CHIMERA),
        "seconds": simulate(CHIMERA, StageCosts(forward_s=[1] * 4, backward_s=[2] * 4)),
    }
    with pytest.raises(UsageError, match=re.escape(message)):
        plot_timeline([(name, known[name]) for name in timelines], path)
    assert list(tmp_path.iterdir()) == []


def test_a_curve_is_drawn_with_its_reference_line(tmp_path):
    """Loss against step and the entropy of the unigram distribution."""
    plot_curve(
        {"held-out": ([0, 10, 20], [8.2, 7.0, 5.5])},
        [tmp_path / "curve.png", tmp_path / "curve.svg"],
        title="loss",
        references={"unigram entropy": 6.11},
    )
    assert (tmp_path / "curve.png").read_bytes().startswith(MAGIC[".png"])
    with pytest.raises(UsageError, match="curve 'held-out' has 2 steps and 1 values"):
        plot_curve({"held-out": ([0, 1], [8.0])}, tmp_path / "bad.png")
    with pytest.raises(UsageError, match="no curve to draw"):
        plot_curve({}, tmp_path / "bad.png")
    assert not (tmp_path / "bad.png").exists()


def test_drawing_leaves_no_global_figure_and_no_setting_behind(tmp_path):
    """The module pyplot is never imported, and matplotlib's settings are as before."""
    code = (
        "import sys, matplotlib\n"
        "def rc(): return {key: matplotlib.rcParams[key] for key in matplotlib.rcParams if key != 'backend'}\n"
        "before = rc()\n"
        "from chimera.plot import plot_curve\n"
        f"plot_curve({{'x': ([0, 1], [1, 2])}}, {str(tmp_path / 'a.png')!r})\n"
        "print('matplotlib.pyplot' in sys.modules, before == rc())\n"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout == "False True\n"
