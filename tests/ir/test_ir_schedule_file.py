"""Schedule files: choosing the form, whole writes, and reading at scale."""

import pytest

from chimera.errors import FormatError, UsageError
from chimera.ir.schedule import Schedule
from chimera.ir.schedule_file import format_schedule, read_schedule, write_schedule

STRAIGHT = Schedule.from_text(["0F0 0B0", "1F0 1B0"], routes=[[0, 1]], name="straight")


@pytest.mark.parametrize("name", ["straight.json", "straight.csv", "straight.txt", "STRAIGHT.JSON"])
def test_the_suffix_names_the_form(tmp_path, name):
    """Each form reads what it wrote; one without a name takes the file's."""
    path = tmp_path / "made" / name
    write_schedule(STRAIGHT, path)
    assert read_schedule(path) == (STRAIGHT, ())
    assert [file.name for file in path.parent.iterdir()] == [name]


def test_a_given_form_wins_over_the_suffix(tmp_path):
    """With a format, any file name will do."""
    path = tmp_path / "schedule.dat"
    write_schedule(STRAIGHT, path, format="csv")
    assert path.read_text(encoding="utf-8") == format_schedule(STRAIGHT, "csv") == "0F0,0B0\n1F0,1B0\n"
    assert read_schedule(path, format="csv")[0].actions == STRAIGHT.actions


def test_a_byte_order_mark_is_no_part_of_the_file(tmp_path):
    """Spreadsheets write one."""
    path = tmp_path / "marked.csv"
    path.write_bytes(b"\xef\xbb\xbf0F0,0B0\r\n1F0,1B0\r\n")
    assert read_schedule(path)[0].to_text() == ["0F0 0B0", "1F0 1B0"]


def test_a_file_that_cannot_be_read_is_named(tmp_path):
    """Missing, of no known form, not text, or damaged: the message begins with the path."""
    path = tmp_path / "no.json"
    with pytest.raises(FormatError, match=r"no\.json: cannot be read as a schedule file: .*No such file"):
        read_schedule(path)
    with pytest.raises(FormatError, match=r"suffix '\.yaml' names no form .* \.json \(json\), \.csv \(csv\), \.txt"):
        read_schedule(tmp_path / "a.yaml")
    path.write_bytes(b"{\xff")
    with pytest.raises(FormatError, match=r"no\.json: cannot be read as a schedule file: 'utf-8' codec .* position 1"):
        read_schedule(path)
    path.write_text("{}", encoding="utf-8")
    with pytest.raises(FormatError, match=r'no\.json: got "format": None; needed: "chimera-schedule"'):
        read_schedule(path)
    with pytest.raises(FormatError, match=r"cannot be read as a schedule file: .*Is a directory"):
        read_schedule(tmp_path, format="json")


def test_a_refused_write_leaves_the_old_file(tmp_path):
    """A schedule the form cannot carry does not touch what is there."""
    path = tmp_path / "old.csv"
    write_schedule(STRAIGHT, path)
    routes = Schedule.from_text(["0F0"], routes=[[0], [0]])
    with pytest.raises(FormatError, match="2 routes"):
        write_schedule(routes, path)
    assert read_schedule(path)[0].actions == STRAIGHT.actions
    with pytest.raises(UsageError, match="cannot be written"):
        write_schedule(STRAIGHT, path / "below.json")


@pytest.mark.parametrize("microbatches", [6_250, pytest.param(62_500, marks=pytest.mark.long)])
@pytest.mark.parametrize("suffix", ["json", "csv"])
def test_many_actions_are_read_as_written(tmp_path, suffix, microbatches):
    """A file of 50,000 actions, or of half a million, reads back whole."""
    rows = [" ".join(f"{s}{kind}{i}" for i in range(microbatches) for kind in "FB") for s in range(4)]
    schedule = Schedule.from_text(rows, routes=[range(4)], name="large")
    path = tmp_path / f"large.{suffix}"
    write_schedule(schedule, path)
    read, _ = read_schedule(path)
    assert read == schedule
