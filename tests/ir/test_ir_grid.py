"""The order grid with its marks and its window."""

from chimera.ir.grid import grid_text
from chimera.ir.schedule import Schedule


def test_small_schedules_are_drawn_whole():
    """Without marks there is a column per position and a row per rank."""
    schedule = Schedule.from_text(["0F0 0B0", "1F0"], routes=[[0, 1]])
    assert grid_text(schedule) == "position  0    1\nrank 0    0F0  0B0\nrank 1    1F0"


def test_marks_stand_behind_their_cells_and_behind_the_end():
    """A mark behind a program's last instruction shows where something is missing."""
    schedule = Schedule.from_text(["0F0 0B0", "1F0"], routes=[[0, 1]])
    assert grid_text(schedule, [(0, 1), (1, 1)], label="<-- stuck") == (
        "position  0    1\nrank 0    0F0  0B0 <-- stuck\nrank 1    1F0  <-- stuck"
    )


def test_long_programs_show_what_is_near_the_marks():
    """Positions and ranks far from every mark give way to an ellipsis."""
    rows = [" ".join(f"{rank}F{i}" for i in range(30)) for rank in range(5)]
    schedule = Schedule.from_text(rows, routes=[range(5)])
    assert grid_text(schedule, [(2, 10), (2, 28)], max_ranks=4) == (
        "position  …  7    8    9    10            11    12    13    …  25    26    27    28             29\n"
        "…\n"
        "rank 1    …  1F7  1F8  1F9  1F10          1F11  1F12  1F13  …  1F25  1F26  1F27  1F28           1F29\n"
        "rank 2    …  2F7  2F8  2F9  2F10 <-- HERE  2F11  2F12  2F13  …  2F25  2F26  2F27  2F28 <-- HERE  2F29\n"
        "rank 3    …  3F7  3F8  3F9  3F10          3F11  3F12  3F13  …  3F25  3F26  3F27  3F28           3F29\n"
        "…"
    ).replace("10            11", "10             11").replace("F10          ", "F10           ")


def test_long_programs_without_marks_show_their_beginning():
    """With nothing to point at, the first positions are shown."""
    schedule = Schedule.from_text([" ".join(f"0F{i}" for i in range(9))], routes=[[0]])
    assert grid_text(schedule, max_positions=3) == "position  0    1    2    …\nrank 0    0F0  0F1  0F2  …"
