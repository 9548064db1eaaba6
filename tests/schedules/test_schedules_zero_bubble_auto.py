"""The zero-bubble schedules made for costs reach the published rates, keep their limit, and beat those made by hand."""

import csv
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from schedules_oracle import assert_complete

from chimera.cli.main import main
from chimera.errors import InfeasibleError, UsageError
from chimera.ir.checks import check
from chimera.ir.costs import Costs, StageCosts
from chimera.ir.memory import peak_activations
from chimera.ir.schedule import Schedule
from chimera.schedules import build_schedule, zb_1p, zb_2p, zb_h1, zb_h2
from chimera.simulate import simulate

TABLE = Path(__file__).parents[3] / "shared" / "tables" / "zero_bubble_iclr24.csv"
# The share of its activations that a block needs for W, 32h/(34h + 5as): hidden size, heads, tokens of the models.
SHARES = {
    model: 32 * h / (34 * h + 5 * a * s) for model, h, a, s in (("1.5B", 2304, 24, 1024), ("6.2B", 4096, 32, 1024))
}


def published_rows():
    """Return the paper's settings, none where its table is not at hand."""
    if not TABLE.is_file():
        return []
    with TABLE.open(encoding="utf-8") as file:
        return list(csv.DictReader(file))


def times(row, held=1.0):
    """Return the costs of a setting."""
    f, i, w, c = (float(row[key]) for key in ("forward_ms", "input_grad_ms", "weight_grad_ms", "p2p_ms"))
    return Costs(forward=f, backward=i + w, input_grad=i, weight_grad=w, p2p=c, held_for_weight_grad=held)


@pytest.mark.skipif(not TABLE.is_file(), reason="the published table is not part of the package")
@pytest.mark.parametrize("row", published_rows(), ids=lambda row: f"{row['model']}-{row['num_microbatches']}")
def test_published_bubble_rates(row):
    """ZB-2p's rate is at or below the published one at 2p of the paper's memory; ZB-1p's is no more than ZB-H1's."""
    p, m = int(row["pp"]), int(row["num_microbatches"])
    costs = times(row, SHARES[row["model"]])
    for build, limit, published in ((zb_2p, 2 * p, row["bubble_zb_2p"]), (zb_1p, p, row["bubble_zb_h1"])):
        schedule = build(p, m, costs)
        check(schedule)
        timeline = simulate(schedule, costs)
        work = m * (costs.forward + costs.backward)
        assert round(1 - work / timeline.span, 4) <= float(published)
        assert max(timeline.peak_activations) <= limit + 1e-6


@pytest.mark.skipif(not TABLE.is_file(), reason="the published table is not part of the package")
def test_all_activations_until_w_leave_a_bubble():
    """Where all is held until W, ZB-2p meets what the last rank's W's allow: (p−1)(F + I + 2c) − (2p−1)W of bubble."""
    row = published_rows()[0]
    costs = times(row)
    schedule = zb_2p(8, 24, costs)
    check(schedule, memory_limit=16)
    input_grad, weight_grad = costs.split_backward()
    bubble = 7 * (costs.forward + input_grad + 2 * costs.p2p) - 15 * weight_grad
    work = 24 * (costs.forward + costs.backward)
    assert simulate(schedule, costs).span == pytest.approx(work + bubble)


@given(
    st.integers(1, 5),
    st.integers(1, 9),
    st.tuples(*[st.floats(0.1, 3.0)] * 3),
    st.sampled_from([0.0, 0.05, 0.5]),
    st.sampled_from([0.2, 1.0]),
)
@settings(max_examples=12, deadline=None)
def test_never_worse_than_those_made_by_hand(ranks, microbatches, parts, hop, held):
    """For any times zb-1p takes no longer than ZB-H1, zb-2p no longer than ZB-H2, each within its memory."""
    f, i, w = parts
    costs = Costs(forward=f, backward=i + w, input_grad=i, weight_grad=w, p2p=hop, held_for_weight_grad=held)
    for build, by_hand, limit in ((zb_1p, zb_h1, ranks), (zb_2p, zb_h2, 2 * ranks)):
        schedule = build(ranks, microbatches, costs)
        assert_complete(schedule)
        check(schedule)
        timeline = simulate(schedule, costs)
        assert timeline.span <= simulate(by_hand(ranks, microbatches), costs).span * (1 + 1e-9)
        assert max(timeline.peak_activations) <= limit + 1e-6


def test_without_costs_there_is_no_bubble_left():
    """At F = I = W zb-1p takes ZB-H1's span and zb-2p none but the work, for m ≥ 2p."""
    assert [simulate(build(8, 24)).span for build in (zb_1p, zb_2p)] == [79, 72]
    assert max(peak_activations(zb_2p(8, 24, memory_limit=11))) <= 11


def test_uneven_stages_in_seconds():
    """Costs per stage are taken, and those of another number of stages refused."""
    costs = StageCosts(forward_s=[1, 1, 1, 2], backward_s=[2, 2, 2, 4], latency_s=0.1)
    spans = [simulate(schedule, costs).span for schedule in (zb_2p(4, 12, costs), zb_h2(4, 12))]
    assert 12 * 6 <= spans[0] <= spans[1]
    with pytest.raises(UsageError, match="gives 4 stages, schedule 'search' has 8"):
        zb_2p(8, 12, costs)


def test_what_w_does_not_need_is_let_go_at_i():
    """A quarter held from I to W: after two forwards and an I there is room for three quarters."""
    schedule = Schedule.from_text(["0F0 0F1 0I0 0F2 0I1 0I2 0W0 0W1 0W2"], routes=[[0]])
    kept = simulate(schedule, Costs(held_for_weight_grad=0.25))
    assert (simulate(schedule).peak_activations, kept.peak_activations) == ((3,), (2.25,))
    assert kept.memory(0).values.tolist() == [1, 2, 2.25, 1.5, 0.75, 0.5, 0.25, 0]


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"memory_limit": 0.5}, InfeasibleError, "at least --memory-limit 1"),
        ({"memory_limit": 0.0}, UsageError, "--memory-limit 0: needed"),
        ({"costs": Costs(), "pairs": 2}, UsageError, "zb-2p takes no --pairs"),
    ],
)
def test_refuses_with_the_reason(options, error, message):
    """A limit below any order names the least; other options are refused by name."""
    with pytest.raises(error, match=message):
        build_schedule("zb-2p", ranks=4, microbatches=8, **options)
    with pytest.raises(UsageError, match="1f1b takes no --memory-limit, got 4"):
        build_schedule("1f1b", ranks=4, microbatches=8, memory_limit=4)


SIZES = ["--ranks", "4", "--microbatches", "8"]
UNEVEN = ["--forward", "2", "--input-grad", "2", "--weight-grad", "1"]


def test_commands_make_the_order_for_their_costs(capsys, tmp_path):
    """Each command hands its costs on; what is exported and proved is what is simulated."""
    path = tmp_path / "made.json"
    assert main(["schedule", "export", "zb-2p", *SIZES, *UNEVEN, "--out", str(path)]) == 0
    assert main(["schedule", "check", "zb-2p", *SIZES, *UNEVEN, "--memory-limit", "8"]) == 0
    pages = []
    for name in (["zb-2p", *SIZES], [str(path)]):
        capsys.readouterr()
        assert main(["simulate", *name, *UNEVEN]) == 0
        pages.append(capsys.readouterr().out)
    assert pages[0] == pages[1]
    assert main(["schedule", "compare", "zb-h1", "zb-1p", *SIZES, *UNEVEN, "--memory-limit", "4"]) == 0


def test_a_whole_backward_takes_what_its_parts_take(capsys):
    """Where I and W are given and B is not, B is their sum, not the default."""
    costs = ["--forward", "4", "--input-grad", "4", "--weight-grad", "3"]
    assert main(["schedule", "show", "1f1b", *SIZES, *costs]) == 0
    assert "makespan 121," in capsys.readouterr().out  # (m + p − 1)(F + I + W)


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (["export", "1f1b", *SIZES, "--forward", "2"], 2, "--forward changes nothing here: 1f1b is not made for"),
        (["check", "1f1b", *SIZES, "--costs", "c.json"], 2, "take one that is: zb-1p, zb-2p"),
        (["show", "1f1b", *SIZES, "--memory-limit", "4"], 2, "1f1b takes no --memory-limit"),
        (["show", "zb-1p", *SIZES, "--memory-limit", "0.25"], 3, "at least --memory-limit 1"),
        (["show", "zb-1p", *SIZES, "--held-for-weight-grad", "1.5"], 2, "needed: a share from 0 to 1"),
    ],
)
def test_commands_refuse_what_changes_nothing(capsys, words, code, message):
    """A cost or limit that a schedule is not made for is refused, not dropped."""
    assert main(["schedule", *words]) == code
    assert message in " ".join(capsys.readouterr().err.split())
