"""The schedule commands: what they print, and what they say to a misuse."""

import json
import re
import subprocess
import sys

import pytest

from chimera.cli.main import main
from chimera.ir.schedule_file import read_schedule
from chimera.schedules import SCHEDULES, build_schedule

SIZES = ["--ranks", "4", "--microbatches", "4"]


@pytest.fixture(autouse=True)
def _plain_output(monkeypatch):
    """Make no test depend on the terminal it runs in."""
    for name in ("FORCE_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def broken(tmp_path):
    """Give a file with a schedule that lacks a backward."""
    path = tmp_path / "broken.txt"
    path.write_text('name: "broken"\nroutes: 0 1\nmicrobatches: 0\n0F0 0B0\n1F0\n', encoding="utf-8")
    return path


def test_show_draws_the_papers_figure(capsys):
    """``show`` draws Chimera for four ranks as the paper does, with its figures beneath."""
    assert main(["schedule", "show", "chimera", *SIZES]) == 0
    assert capsys.readouterr() == (
        (
            "chimera, 4 ranks, 4 micro-batches, 4 stages, 2 routes\n"
            "        0         5         10        15\n"
            "rank 0  0 1 · 2 2<< 3 3<< · 0<< · · 1<<\n"
            "rank 1  · 0 2 1 3 · 2<< 0<< 3<< 1<< · ·\n"
            "rank 2  · 2 0 3 1 · 0<< 2<< 1<< 3<< · ·\n"
            "rank 3  2 3 · 0 0<< 1 1<< · 2<< · · 3<<\n"
            "3 forward, 3< backward, · idle; one column of 2 characters is 1 model unit\n"
            "makespan 16, bubble 25.0% of total, 33.3% of ideal, peak activations 3…4\n"
        ),
        "",
    )


def test_show_takes_costs_and_a_width(capsys):
    """Other costs change the drawing; what does not fit the width is left out and said."""
    assert main(["schedule", "show", "gpipe", "--ranks", "2", "--microbatches", "2", "--backward", "1"]) == 0
    assert "rank 0  0  1  ·  ·  0< 1<\n" in capsys.readouterr().out
    assert main(["schedule", "show", "gpipe", *SIZES, "--columns", "20"]) == 0
    assert "cut at slot" in capsys.readouterr().out


@pytest.mark.parametrize("suffix", ["svg", "png", "pdf"])
def test_show_draws_a_figure(capsys, tmp_path, suffix):
    """``--out`` writes a figure of the form its suffix names, and prints nothing else."""
    path = tmp_path / f"figure.{suffix}"
    assert main(["schedule", "show", "1f1b", *SIZES, "--out", str(path)]) == 0
    assert capsys.readouterr() == ("", f"wrote {path}\n")
    assert path.read_bytes()[:5] in {b"<?xml", b"\x89PNG\r", b"%PDF-"}


def test_check_says_what_was_proved(capsys):
    """``check`` says in words, with counts, what holds of the schedule."""
    assert main(["schedule", "check", "chimera", *SIZES, "--memory-limit", "4"]) == 0
    assert capsys.readouterr() == (
        (
            "chimera, 4 ranks, 4 micro-batches, 4 stages, 2 routes: proved\n"
            "  complete    16 forwards, 16 backwards, each once, on the rank that its route names\n"
            "  in order    each forward before its backward on every rank\n"
            "  messages    the schedule has none; --lowered adds them and proves their order\n"
            "  not stuck   all 4 programs run to their end\n"
            "  memory      at most 4 units of activations on a rank (limit 4)\n"
        ),
        "",
    )


def test_check_proves_the_lowered_program(capsys):
    """With ``--lowered`` messages and reductions are counted and proved too."""
    assert main(["schedule", "check", "chimera", *SIZES, "--lowered"]) == 0
    assert capsys.readouterr().out.splitlines()[3:] == [
        "  messages    24 sends, each with its receive, in the same order at both ends of 12 channels",
        "  reductions  8 reductions, of every replica's gradients, in the same order on ranks that share them",
        "  collectives none of 8 reductions between a rank's first forward and its last backward, and no",
        "              other collective; layers that ranks share add their own inside F and B",
        "  not stuck   all 4 programs run to their end",
        "  memory      at most 4 units of activations on a rank (no limit given)",
    ]


def test_check_counts_what_stands_between_forwards_and_backwards(capsys):
    """As JSON the counts of each kind are there; of collectives only reductions, where the paper has them start."""
    assert main(["schedule", "check", "chimera", *SIZES, "--lowered", "--reduce", "eager", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["proved"], found["lowered"], found["actions"]["REDUCE_GRAD"]) == (True, True, 8)
    # Each rank reduces its first replica before the last backward of the second (SC'21, section 3.2).
    assert found["collectives_between"] == {"REDUCE_GRAD": 4}
    counts = found["between_first_forward_and_last_backward"]
    # Two of the 24 messages carry the last backward of a middle rank.
    assert (counts["F"], counts["B"], counts["SEND_F"], counts["SEND_B"]) == (16, 16, 12, 10)


def test_check_places_reductions_in_a_lowered_program_only(capsys):
    """Without ``--lowered`` there is no program to place them in."""
    assert main(["schedule", "check", "1f1b", *SIZES, "--reduce", "eager"]) == 2
    assert "--reduce eager places reductions in the lowered program; add --lowered" in capsys.readouterr().err


def test_check_points_at_the_fault(capsys, broken):
    """A schedule with a fault ends with code 2, naming rank, position and action, with the grid, on stderr."""
    assert main(["schedule", "check", str(broken)]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("error: schedule 'broken' has 1 violation:\n  rank 1, position 1, 1B0: ")
    assert err.endswith("position  0    1\nrank 0    0F0  0B0\nrank 1    1F0  <-- HERE\n")


def test_check_refuses_what_is_over_the_limit(capsys):
    """A memory limit that the schedule breaks is a violation."""
    assert main(["schedule", "check", "gpipe", *SIZES, "--memory-limit", "3.5"]) == 2
    assert "over the limit of 3.5" in capsys.readouterr().err


def test_export_prints_text(capsys):
    """``export`` prints computations only."""
    assert main(["schedule", "export", "1f1b", "--ranks", "2", "--microbatches", "3", "--format", "csv"]) == 0
    assert capsys.readouterr() == ("0F0,0F1,0B0,0F2,0B1,0B2\n1F0,1B0,1F1,1B1,1F2,1B2\n", "")


def test_export_prints_json_alone(capsys):
    """The default output is one JSON document of the documented form."""
    assert main(["schedule", "export", "chimera", *SIZES]) == 0
    out, err = capsys.readouterr()
    document = json.loads(out)
    assert err == ""
    assert (document["format"], document["version"], document["num_ranks"]) == ("chimera-schedule", 1, 4)
    assert document["pipelines"] == [{"stage_to_rank": [0, 1, 2, 3]}, {"stage_to_rank": [3, 2, 1, 0]}]
    assert [action["kind"] for action in document["programs"][0]] == ["F", "F", "F", "B", "F", "B", "B", "B"]


@pytest.mark.parametrize("form", ["json", "text"])
def test_a_lowered_export_reads_back_and_is_proved(capsys, tmp_path, form):
    """What ``export --lowered`` writes is a file in place of NAME, with its sends and reductions."""
    path = tmp_path / f"schedule.{'txt' if form == 'text' else form}"
    words = ["chimera", *SIZES, "--lowered", "--reduce", "eager", "--out", str(path)]
    assert main(["schedule", "export", *words]) == 0
    assert capsys.readouterr() == ("", f"wrote {path}\n")
    schedule, notes = read_schedule(path)
    assert (schedule.is_lowered, notes) == (True, ())
    assert main(["schedule", "check", str(path)]) == 0
    assert "24 sends" in capsys.readouterr().out
    assert main(["schedule", "export", str(path), "--format", "json"]) == 0
    out, err = capsys.readouterr()
    assert err == "sends, receives and reductions are left out; --lowered keeps them\n"
    kinds = {action["kind"] for program in json.loads(out)["programs"] for action in program}
    assert kinds == {"F", "B"}


def test_export_of_several_routes_as_csv_is_refused(capsys, tmp_path):
    """CSV carries one route: Chimera is refused by name, JSON is suggested and no file appears."""
    path = tmp_path / "chimera.csv"
    assert main(["schedule", "export", "chimera", *SIZES, "--out", str(path)]) == 2
    assert "'chimera' has 2 routes" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_compare_is_one_table(capsys):
    """``compare`` prints a row per schedule with the published figures for p = m = 8."""
    words = ["gpipe", "1f1b", "interleaved", "chimera", "--ranks", "8", "--microbatches", "8", "--chunks", "2"]
    assert main(["schedule", "compare", *words]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    assert out.splitlines()[:6] == [
        "                             bubble,  bubble,    peak  weight  messages",
        "schedule     makespan  span    total    ideal  activ.  copies  per rank  sync",
        "gpipe              45    45    46.7%    87.5%     8…8       1        16   yes",
        "1f1b               45    45    46.7%    87.5%     1…8       1        16   yes",
        "interleaved      34.5  34.5    30.4%    43.8%   4.5…8       1        32   yes",
        "chimera            36    36    33.3%    50.0%     5…8       2        16   yes",
    ]


def test_compare_as_json(capsys):
    """``compare --json`` prints one JSON list with the same figures, unrounded."""
    assert main(["schedule", "compare", "1f1b", "chimera", "--json", *SIZES]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    one, both = json.loads(out)
    assert (one["schedule"], one["makespan"], one["messages_per_rank"], one["synchronous"]) == ("1f1b", 21.0, 8, True)
    assert (both["schedule"], both["makespan"], both["weight_copies"]) == ("chimera", 16.0, 2.0)
    assert both["bubble_of_total"] == pytest.approx(0.25, abs=1e-12)


def test_compare_counts_the_bytes_that_a_costs_file_knows(capsys, tmp_path):
    """With sizes of messages the busiest rank's bytes are in the table and the list; without, no column is empty."""
    costs = tmp_path / "costs.json"
    document = {"format": "chimera-costs", "version": 1, "forward_s": [0.01] * 4, "backward_s": [0.02] * 4}
    document |= {"message_bytes": [2**20, 3 * 2**20, 2**21], "bandwidth_bytes_per_s": 1e9}
    costs.write_text(json.dumps(document), encoding="utf-8")
    words = ["schedule", "compare", "1f1b", "chimera", "--costs", str(costs), *SIZES]
    assert main([*words, "--json"]) == 0
    one, both = json.loads(capsys.readouterr().out)
    # 1F1B: rank 2 sends four activations over the last boundary, and four gradients over the middle one.
    assert (one["bytes_per_rank"], one["messages_per_rank"]) == ((4 * 2 + 4 * 3) * 2**20, 8)
    # Chimera: a rank in the middle sends half of what both of its stages send there.
    assert both["bytes_per_rank"] == (2 * 3 + 2 * 1 + 2 * 2 + 2 * 3) * 2**20
    assert main(words) == 0
    head, second, *rows = capsys.readouterr().out.splitlines()
    assert (head.split()[-1], second.split()[-1]) == ("MiB", "sent")
    assert [row.split()[-1] for row in rows[:2]] == ["20", "18"]
    assert main(["schedule", "compare", "1f1b", *SIZES, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)[0]["bytes_per_rank"] is None


def test_check_says_what_holds_of_updates(capsys):
    """The updates of an asynchronous schedule and the versions of its weights are among what is proved."""
    assert main(["schedule", "check", "pipedream-2bw", "--ranks", "4", "--microbatches", "12"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "updates 3 of every stage, each micro-batch's gradients in the same one on all of them" in said
    assert "(no limit given), and 2 versions of a stage's weights" in said


def test_compare_counts_versions_of_the_weights(capsys):
    """An asynchronous schedule is said to be one, and each version of its weights counts as a copy."""
    words = ["pipedream", "pipedream-2bw", "zb-v", "--ranks", "4", "--microbatches", "8", "--updates", "2", "--json"]
    assert main(["schedule", "compare", *words]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [(row["weight_copies"], row["synchronous"]) for row in rows] == [(4.0, False), (2.0, False), (1.0, True)]


def test_waves_reach_the_schedule(capsys):
    """``--waves`` sets the number of stages, and is refused where no schedule takes it."""
    assert main(["schedule", "show", "hanayo", "--ranks", "2", "--microbatches", "2", "--waves", "2"]) == 0
    assert capsys.readouterr().out.startswith("hanayo, 2 ranks, 2 micro-batches, 8 stages, 1 route\n")
    assert main(["schedule", "show", "gems", "--ranks", "2", "--microbatches", "2", "--waves", "2"]) == 2
    assert "gems takes no --waves, got 2" in capsys.readouterr().err


def test_compare_draws_one_figure_with_the_files_it_is_given(capsys, tmp_path):
    """Names and files stand side by side in one figure."""
    path = tmp_path / "hand.txt"
    path.write_text('name: "hand"\nroutes: 0 1\nmicrobatches: 0\n0F0 0B0\n1F0 1B0\n', encoding="utf-8")
    figure = tmp_path / "both.svg"
    assert main(["schedule", "compare", "1f1b", str(path), *SIZES, "--out", str(figure)]) == 0
    out, err = capsys.readouterr()
    assert err == f"wrote {figure}\n"
    assert out.splitlines()[3].split()[1:3] == ["6", "6"]
    # One panel of each timeline and one of its memory beneath.
    assert re.findall(r"<!-- (\S+) .*·", figure.read_text(encoding="utf-8")) == ["1f1b", "memory", str(path), "memory"]


def test_list_holds_the_registry(capsys):
    """``list`` describes every schedule of the registry; with ``--json`` as one document."""
    assert main(["schedule", "list"]) == 0
    text, _ = capsys.readouterr()
    assert [line for line in text.splitlines() if line and not line.startswith(" ")][: len(SCHEDULES)] == [*SCHEDULES]
    assert [line for line in text.splitlines() if len(line) > 100] == []
    assert main(["schedule", "list", "--json"]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    assert [(entry["name"], entry["options"]) for entry in json.loads(out)] == [
        (name, ["ranks", "microbatches", *family.options]) for name, family in SCHEDULES.items()
    ]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["show", "1f1b"], "1f1b needs --ranks and --microbatches, as in: 1f1b --ranks 8 --microbatches 8"),
        (["check", "1f1b", "--ranks", "8"], "1f1b needs --microbatches, as in: 1f1b --ranks 8 --microbatches 8"),
        (
            ["show", "chimaera", *SIZES],
            "'chimaera' is neither a schedule (did you mean 'chimera' or 'chimera-zb'?) nor a file; the schedules are: "
            + ", ".join(SCHEDULES),
        ),
        (
            ["show", "chimera", "--ranks", "7", "--microbatches", "7"],
            (
                "chimera: got --ranks 7; needed: an even number, as the two directions meet between two ranks; "
                "try --ranks 6 or 8"
            ),
        ),
        (
            ["compare", "gpipe", "1f1b", *SIZES, "--pairs", "2"],
            "none of gpipe, 1f1b takes --pairs; leave it out",
        ),
        (
            ["check", "lost/hand.json"],
            "there is no file 'lost/hand.json'; the schedules are: " + ", ".join(SCHEDULES),
        ),
        (["compare"], "compare needs a schedule; try: compare gpipe 1f1b chimera --ranks 8 --microbatches 8"),
        (
            ["show", "1f1b", *SIZES, "--forward", "1", "--costs", "costs.json"],
            "--forward and --costs costs.json were both given; the file holds all costs: leave out one of them",
        ),
        (
            ["export", "1f1b", *SIZES, "--reduce", "eager"],
            "--reduce eager places reductions in the lowered program; add --lowered",
        ),
        (["show", "1f1b", *SIZES, "--columns", "0"], "--columns 0: needed: at least 1"),
    ],
)
def test_misuse_says_what_to_do(capsys, words, message):
    """A misuse ends with code 2 and a message that names the option and what to do."""
    assert main(["schedule", *words]) == 2
    assert capsys.readouterr() == ("", f"error: {message}\n")


def test_a_file_has_its_own_sizes(capsys, broken):
    """Sizes beside a file are refused, not ignored."""
    assert main(["schedule", "check", str(broken), "--ranks", "2"]) == 2
    assert capsys.readouterr() == (
        "",
        f"error: {broken} is a file, which has its own sizes; --ranks cannot change them: leave it out\n",
    )


def test_an_option_that_the_schedule_does_not_take(capsys):
    """An option of another schedule is refused, naming those that take it."""
    assert main(["schedule", "show", "gpipe", *SIZES, "--chunks", "2"]) == 2
    assert capsys.readouterr().err.startswith("error: gpipe takes no --chunks, got 2; ")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--ranks", "many"], "--ranks"),
        (["--unit", "triple"], "invalid choice 'triple'"),
        (["--rank", "4"], "--ranks"),
    ],
)
def test_an_option_that_cannot_be_read(capsys, words, said):
    """A value of the wrong type, an unknown choice and a misspelt option end with code 2 and a hint on stderr."""
    assert main(["schedule", "show", "chimera", *words]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert said in err


def test_notes_on_a_file_go_to_stderr(capsys, tmp_path):
    """What a CSV file holds beyond its schedule is said on stderr, and the output stays clean."""
    path = tmp_path / "torch.csv"
    path.write_text("0UNSHARD,0F0,0B0,0RESHARD\n1F0,1B0\n", encoding="utf-8")
    assert main(["schedule", "export", str(path), "--format", "csv"]) == 0
    out, err = capsys.readouterr()
    assert out == "0F0,0B0\n1F0,1B0\n"
    assert [line.split(" left out")[0] for line in err.splitlines()] == [f"{path}: 1 UNSHARD", f"{path}: 1 RESHARD"]


@pytest.mark.parametrize(
    "words",
    [
        ["schedule", "show", "chimera", "--ranks", "8", "--microbatches", "8"],
        ["schedule", "compare", "gpipe", "chimera", "--ranks", "8", "--microbatches", "8"],
        ["simulate", "1f1b", "--ranks", "8", "--microbatches", "8", "--json"],
        ["schedule", "list"],
        ["--help"],
        ["schedule", "export", "--help"],
    ],
    ids=" ".join,
)
def test_nothing_heavy_is_loaded(words):
    """Commands on schedules load no torch, numba or matplotlib."""
    code = (
        "import sys\nfrom chimera.cli.main import main\n"
        f"code = main({words!r})\n"
        "print(code, sorted({'torch', 'numba', 'matplotlib'} & set(sys.modules)), file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stderr == "0 []\n"


def test_the_registry_builds_what_the_command_exports(capsys):
    """The command adds nothing to the schedule that the registry builds."""
    assert main(["schedule", "export", "interleaved", *SIZES, "--chunks", "2", "--format", "csv"]) == 0
    expected = build_schedule("interleaved", ranks=4, microbatches=4, chunks=2)
    assert capsys.readouterr().out == "".join(row.replace(" ", ",") + "\n" for row in expected.to_text())
