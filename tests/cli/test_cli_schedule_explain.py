"""``chimera schedule explain``: the causes of idle time, and changes whose effect was simulated."""

import json

import pytest

from chimera.cli.main import main
from chimera.cli.remedies import Family, family_of
from chimera.ir.costs import Costs
from chimera.ir.schedule_file import read_schedule
from chimera.schedules import build_schedule
from chimera.simulate import simulate

HAND = """name: "hand"
routes: 0 1
microbatches: 0 0 0
0F0 0B0 0F1 0B1 0F2 0B2
1F0 1B0 1F1 1B1 1F2 1B2
"""


@pytest.fixture(autouse=True)
def _plain_output(monkeypatch):
    """Make no test depend on the terminal it runs in."""
    for name in ("FORCE_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def hand(tmp_path):
    """Give a file with an order of nobody: one micro-batch after another."""
    path = tmp_path / "hand.txt"
    path.write_text(HAND, encoding="utf-8")
    return path


def explained(capsys, *words):
    """Return the JSON document of an explanation."""
    assert main(["schedule", "explain", *map(str, words), "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def tried(document):
    """Return what each change gives, by its name: idle share, makespan, peak."""
    return {
        each["change"]: (each["bubble_of_total"], each["makespan"], each["most_peak_activations"])
        for each in document["remedies"]
    }


def test_the_page(capsys):
    """The page has the causes of each rank, then what helps, the best first, each with the words that make it."""
    assert main(["schedule", "explain", "1f1b", "--ranks", "4", "--microbatches", "4"]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    assert max(map(len, out.splitlines())) <= 100
    assert out == (
        "1f1b, 4 ranks, 4 micro-batches, 4 stages, 1 route\n"
        "  makespan      21\n"
        "  idle          42.9% of total: warm-up 17%, waiting 50%, drain 33%\n"
        "  critical path 7 forwards (7) + 7 backwards (14) = 21, from 0F0 on rank 0 to 0B3 on rank 0\n"
        "\n"
        "        on\n"
        "rank  path  idle  warm-up  waiting  drain  waits most for\n"
        "0        3     9        0        9      0  B on rank 1: 9\n"
        "1        3     9        1        6      2  B on rank 2: 6\n"
        "2        3     9        2        3      4  B on rank 3: 3\n"
        "3       12     9        3        0      6               -\n"
        "\n"
        "                                         peak\n"
        "what would remove it   idle  makespan  activ.\n"
        "now                   42.9%        21       4\n"
        "fewer stages          20.0%        30       4\n"
        "split backward        20.0%        15       4\n"
        "more micro-batches    27.3%        33       4\n"
        "more chunks per rank  27.3%      16.5       4\n"
        "  fewer stages: 1f1b --ranks 2 --microbatches 4\n"
        "  split backward: build auto --placement linear --ranks 4 --microbatches 4 --memory-limit 4\n"
        "  more micro-batches: 1f1b --ranks 4 --microbatches 8\n"
        "  more chunks per rank: interleaved --ranks 4 --microbatches 4 --chunks 2\n"
        "  no help: split backward and more memory (idle 20.0%)\n"
        "\n"
        "Times and activations in units of 1/p of the model for one micro-batch.\n"
    )


def test_every_change_is_what_its_words_give(capsys):
    """What is said of a change is what ``simulate`` says of the schedule that its words name."""
    document = explained(capsys, "interleaved", "--ranks", "4", "--microbatches", "8", "--p2p", "0.25")
    checked = 0
    for each in document["remedies"]:
        words = each["schedule"].split()
        if words[0] == "build" or "--ranks 4" not in each["schedule"]:
            continue
        assert main(["simulate", *words, "--p2p", "0.25", "--json"]) == 0
        again = json.loads(capsys.readouterr().out)
        assert again["makespan"] == pytest.approx(each["makespan"])
        assert again["bubble_of_total"] == pytest.approx(each["bubble_of_total"])
        assert each["gain"] == pytest.approx(document["bubble_of_total"] - each["bubble_of_total"])
        checked += 1
    assert checked >= 2


def test_words_of_a_search_find_the_order(capsys, tmp_path):
    """The words of a searched change, given to ``schedule``, find an order at least as good, within its memory."""
    document = explained(capsys, "v-min", "--ranks", "4", "--microbatches", "8")
    (more,) = [each for each in document["remedies"] if each["change"] == "more memory"]
    assert more["gain"] > 0.05
    assert more["most_peak_activations"] > document["most_peak_activations"]
    path = tmp_path / "found.json"
    assert main(["schedule", *more["schedule"].split(), "--out", str(path)]) == 0
    found, _ = read_schedule(path)
    timeline = simulate(found, Costs())
    assert timeline.makespan <= more["makespan"] * (1 + 1e-9)
    assert max(timeline.peak_activations) <= 2 * document["most_peak_activations"]


def test_fewer_ranks_keep_the_units_and_the_messages(capsys):
    """On half the ranks a stage takes twice the time and holds twice as much, while a message takes what it did."""
    document = explained(capsys, "gpipe", "--ranks", "2", "--microbatches", "3", "--p2p", "0.5")
    assert tried(document)["fewer stages"] == pytest.approx((0.0, 18.0, 6.0))
    document = explained(capsys, "gpipe", "--ranks", "4", "--microbatches", "3", "--p2p", "0.5")
    # Four slots each way of two units and four, and a message of half a unit each way.
    assert tried(document)["fewer stages"][1] == pytest.approx(4 * 2 + 4 * 4 + 2 * 0.5)


def test_causes_fill_the_idle_time(capsys):
    """The causes of a rank add up to its idle time, waiting and messages to what it waits for, the path to the step."""
    words = ["zb-h1", "--ranks", "4", "--microbatches", "6", "--p2p", "0.5", "--reduce-time", "2"]
    document = explained(capsys, *words)
    idle = sum(sum(rank["idle"].values()) for rank in document["per_rank"])
    assert idle == pytest.approx(document["bubble_of_total"] * 4 * document["makespan"])
    for rank in document["per_rank"]:
        awaited = sum(each["time"] for each in rank["waits_for"])
        assert awaited == pytest.approx(rank["idle"]["waiting"] + rank["idle"]["communication"])
    work = [span for span in document["critical_path"] if "SEND" not in span["action"]]
    assert len(work) < len(document["critical_path"])
    on_path = sum(rank["on_critical_path"] for rank in document["per_rank"])
    assert on_path == pytest.approx(sum(span["end"] - span["start"] for span in work))
    assert document["critical_path"][0]["start"] == 0.0
    assert document["critical_path"][-1]["end"] == document["makespan"]


def test_an_order_of_no_family_is_searched(capsys, hand):
    """A hand-written order gets what the search finds on its placement; fewer ranks are said to be unknown."""
    document = explained(capsys, hand)
    assert document["bubble_of_total"] == pytest.approx(0.5)
    assert tried(document)["split backward and more memory"] == pytest.approx((0.1, 10.0, 2.0))
    assert "split backward" in tried(document)
    assert [each["change"] for each in document["cannot_be_tried"]] == ["fewer stages"]


def test_a_file_of_a_known_order_is_recognised(capsys, tmp_path):
    """An exported schedule is explained as by its name; an option is recognised too."""
    path = tmp_path / "known.json"
    words = ["interleaved", "--ranks", "2", "--microbatches", "4", "--chunks", "3"]
    assert main(["schedule", "export", *words, "--lowered", "--out", str(path)]) == 0
    capsys.readouterr()
    assert tried(explained(capsys, path)) == tried(explained(capsys, *words))
    schedule = build_schedule("interleaved", ranks=2, microbatches=4, chunks=3)
    assert family_of(schedule, Costs()) == Family("interleaved", {"chunks": 3})


def test_an_asynchronous_schedule_is_not_searched(capsys):
    """Updates within the step are no work of the search, which is said; sizes are tried."""
    document = explained(capsys, "pipedream", "--ranks", "2", "--microbatches", "4")
    assert list(tried(document)) == ["more micro-batches", "fewer stages"]
    assert [each["change"] for each in document["cannot_be_tried"]] == ["another order"]


def test_what_a_costs_file_does_not_know_is_said(capsys, tmp_path):
    """Costs of two stages tell nothing of one or four: these changes are given with the reason."""
    costs = tmp_path / "costs.json"
    costs.write_text(
        json.dumps({"format": "chimera-costs", "version": 1, "forward_s": [0.1, 0.3], "backward_s": [0.2, 0.6]}),
        encoding="utf-8",
    )
    document = explained(capsys, "1f1b", "--ranks", "2", "--microbatches", "4", "--costs", costs)
    assert document["unit"] == "s"
    reasons = {each["change"]: each["reason"] for each in document["cannot_be_tried"]}
    assert list(reasons) == ["fewer stages", "more chunks per rank"]
    assert reasons["fewer stages"].startswith("--costs gives 2 stages, schedule '1f1b' has 1")
    assert tried(document)["more micro-batches"][0] < document["bubble_of_total"]


def test_no_idle_time_needs_no_change(capsys):
    """One rank is never idle, and nothing is tried."""
    document = explained(capsys, "1f1b", "--ranks", "1", "--microbatches", "4")
    assert (document["bubble_of_total"], document["remedies"], document["cannot_be_tried"]) == (0.0, [], [])
