"""``chimera simulate``: the page, the JSON document, the files."""

import json

import pytest

from chimera.cli.main import main
from chimera.ir.costs import StageCosts
from chimera.ir.costs_file import write_costs

SIZES = ["--ranks", "4", "--microbatches", "4"]


def test_the_page(capsys):
    """The page gives both clocks, both shares, memory, the critical path, and where each rank's time goes."""
    assert main(["simulate", "chimera", *SIZES]) == 0
    assert capsys.readouterr() == (
        (
            "chimera, 4 ranks, 4 micro-batches, 4 stages, 2 routes\n"
            "  makespan      16, first start to last end over all ranks\n"
            "  span          16, the longest of a rank's own first start to last end\n"
            "  bubble        25.0% of total, 33.3% of ideal\n"
            "  activations   3 to 4 at the peak of a rank\n"
            "  critical path 4 forwards (4) + 6 backwards (12) = 16, from 0F0 on rank 0 to 0B1 on rank 0\n"
            "\n"
            "                                             peak\n"
            "rank  busy  idle  warm-up  waiting  drain  activ.\n"
            "0       12     4        0        4      0       3\n"
            "1       12     4        1        1      2       4\n"
            "2       12     4        1        1      2       4\n"
            "3       12     4        0        4      0       3\n"
            "\n"
            "Times and activations in units of 1/p of the model for one micro-batch.\n"
        ),
        "",
    )


def test_json_holds_every_figure(capsys):
    """``--json`` prints one document with the figures of the step and of each rank."""
    assert main(["simulate", "1f1b", *SIZES, "--p2p", "0.5", "--json"]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    document = json.loads(out)
    assert (document["schedule"], document["ranks"], document["unit"]) == ("1f1b", 4, "model unit")
    assert document["busy"] == [12.0] * 4
    assert document["peak_activations"] == [4.0, 3.0, 2.0, 1.0]
    assert document["peak_bytes"] is None
    idle = [sum(column) for column in zip(*document["idle"].values(), strict=True)]
    assert idle == pytest.approx([document["makespan"] - 12.0] * 4, abs=1e-9)
    path = document["critical_path"]
    assert (path[0]["action"], path[0]["start"], path[-1]["end"]) == ("0F0", 0.0, document["makespan"])


def test_pairs_have_two_makespans(capsys):
    """A schedule with overlapped pairs is timed with pairs as one, and with the forward before the backward."""
    sizes = ["--ranks", "8", "--microbatches", "20"]
    assert main(["simulate", "dualpipe", *sizes]) == 0
    page = capsys.readouterr().out
    assert "  makespan      66, first start" in page
    assert "  pairs apart   makespan 63, if each pair runs its forward, then its backward\n" in page
    assert main(["simulate", "dualpipe", *sizes, "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert (document["makespan"], document["makespan_pairs_apart"]) == (66.0, 63.0)
    assert main(["simulate", "dualpipe", *sizes, "--overlap", "3.5", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert (document["makespan"], document["makespan_pairs_apart"]) == (73.0, 63.0)
    assert main(["simulate", "1f1b", *SIZES, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["makespan_pairs_apart"] is None


def test_parts_of_the_backward_have_their_own_times(capsys):
    """``--input-grad`` and ``--weight-grad`` time I and W, alone or both, and are refused beside a costs file."""
    for given, makespan in (
        ([], 4 * 3 + 3),
        (["--weight-grad", "0.5"], 4 * 3 + 3 * 2),
        (["--input-grad", "1", "--weight-grad", "0.5"], 4 * 2.5 + 3 * 1.5),
    ):
        assert main(["simulate", "zb-h1", *SIZES, *given, "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["makespan"] == makespan
    assert main(["simulate", "zb-h1", *SIZES, "--input-grad", "1", "--costs", "costs.json"]) == 2
    assert "--input-grad and --costs costs.json were both given" in capsys.readouterr().err


def test_reductions_take_their_time(capsys):
    """A reduction time is never dropped: the program gets its reductions, at the end unless told otherwise."""
    assert main(["simulate", "1f1b", *SIZES, "--json"]) == 0
    without = json.loads(capsys.readouterr().out)["makespan"]
    assert main(["simulate", "1f1b", *SIZES, "--reduce-time", "2", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["makespan"] == without + 2.0
    assert document["idle"]["gradient reduction"] == [2.0] * 4


def test_costs_from_a_file(capsys, tmp_path):
    """A costs file gives seconds and bytes, and the page shows memory."""
    path = tmp_path / "costs.json"
    costs = StageCosts(forward_s=[0.01, 0.02], backward_s=[0.02, 0.04], activation_bytes=[2**30, 2**29])
    write_costs(costs, path)
    words = ["1f1b", "--ranks", "2", "--microbatches", "2", "--costs", str(path)]
    assert main(["simulate", *words, "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert (document["unit"], document["makespan"]) == ("s", pytest.approx(0.15, abs=1e-12))
    assert document["peak_bytes"] == [2**31, 2**29]
    assert main(["simulate", *words]) == 0
    page = capsys.readouterr().out
    assert "  memory        0.50 to 2.00 GiB at the peak of a rank\n" in page
    assert page.endswith("Times in seconds, activations in units of 1/p of the model for one micro-batch.\n")


def test_files_are_written_beside_the_page(capsys, tmp_path):
    """``--trace`` and ``--out`` write a trace and a figure, said on stderr; stdout holds the document alone."""
    trace, figure = tmp_path / "trace.json", tmp_path / "figure.svg"
    assert main(["simulate", "gpipe", *SIZES, "--json", "--trace", str(trace), "--out", str(figure)]) == 0
    out, err = capsys.readouterr()
    assert json.loads(out)["makespan"] == 21.0
    assert err == f"wrote {figure}\nwrote {trace}\n"
    events = json.loads(trace.read_text(encoding="utf-8"))["traceEvents"]
    assert sum(event["ph"] == "X" for event in events) == 32
    assert figure.stat().st_size > 1000


def test_a_figure_of_no_known_form_is_refused_before_anything_is_printed(capsys, tmp_path):
    """An unknown suffix ends with code 2, an empty stdout and no file."""
    assert main(["simulate", "gpipe", *SIZES, "--out", str(tmp_path / "figure.doc")]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert "'.doc'" in err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("option", ["--forward", "--backward", "--p2p", "--reduce-time"])
def test_a_negative_cost_is_refused(capsys, option):
    """A cost below zero ends with code 2 and names its option."""
    assert main(["simulate", "gpipe", *SIZES, f"{option}=-1"]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert f"{option} -1" in err


def test_a_place_for_reductions_that_the_schedule_has_already(capsys, tmp_path):
    """``--reduce`` on a file that places its reductions is refused."""
    path = tmp_path / "lowered.json"
    assert main(["schedule", "export", "1f1b", *SIZES, "--lowered", "--out", str(path)]) == 0
    assert main(["simulate", str(path), "--reduce", "eager"]) == 2
    assert capsys.readouterr().err.endswith("error: '1f1b' places its reductions itself; leave out --reduce eager\n")
