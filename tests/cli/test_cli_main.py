"""The frame of the command: finding commands, exit codes, messages, what is loaded."""

import io
import re
import subprocess
import sys

import pytest

import chimera
import chimera.cli.main
from chimera.cli.commands import COMMANDS, Command, find_command
from chimera.cli.main import describe, main
from chimera.errors import ConfigError, InfeasibleError, RunError, UsageError

CHIMERA = [sys.executable, "-m", "chimera"]


def fails_with(error):
    """Return a stand-in for the table of commands whose command raises ``error``."""

    class Failing:
        name = "fail"

        @staticmethod
        def load():
            def fail() -> None:
                """Fail."""
                raise error

            return fail

    return lambda words: (Failing, list(words[1:]))


def test_version(capsys):
    """``--version`` prints the version alone."""
    assert main(["--version"]) == 0
    assert capsys.readouterr() == (f"chimera {chimera.__version__}\n", "")


def test_help_lists_every_command(capsys):
    """``--help`` names every command with one line about it, none wider than a terminal."""
    assert main(["--help"]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    assert [line for line in out.splitlines() if len(line) > 80] == []
    for command in COMMANDS:
        assert re.search(rf"^  {command.name} +{re.escape(command.summary)}$", out, flags=re.MULTILINE)


def test_nothing_asked_is_wrong_usage(capsys):
    """Without a command the overview goes to stderr and the exit code is 2."""
    assert main([]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("usage: chimera COMMAND [OPTIONS]\n")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["shedule"],
            "'shedule' is not a command (did you mean 'schedule' or 'simulate'?); 'chimera --help' lists them",
        ),
        (["zzz", "--help"], "'zzz' is not a command; 'chimera --help' lists them"),
        (
            ["schedule", "sho", "1f1b"],
            (
                "'chimera schedule' has no 'sho' (did you mean 'show'?); "
                "it has: list, show, check, export, compare, explain, build"
            ),
        ),
        (
            ["schedule"],
            (
                "'chimera schedule' needs one of: list, show, check, export, compare, explain, build; "
                "'chimera schedule --help' describes them"
            ),
        ),
    ],
)
def test_an_unknown_command_gets_the_nearest(capsys, words, message):
    """A misspelt command ends with code 2 and names the nearest one."""
    assert main(words) == 2
    assert capsys.readouterr() == ("", f"error: {message}\n")


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command.name)
def test_help_of_every_command_has_an_example(capsys, command):
    """``--help`` of a command says what it does and shows how it is called."""
    assert main([*command.name.split(), "--help"]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    assert out.startswith(f"usage: chimera {command.name} ")
    description = out.split("\n\n", 1)[1]
    assert re.search(rf"^ +chimera {command.name}\b", description, flags=re.MULTILINE)


@pytest.mark.parametrize(
    ("error", "code"),
    [(UsageError("no"), 2), (ConfigError("no"), 2), (InfeasibleError("no"), 3), (RunError("no"), 1)],
)
def test_errors_carry_their_exit_code(capsys, monkeypatch, error, code):
    """A known error ends as one line on stderr and its own exit code."""
    monkeypatch.setattr(chimera.cli.main, "find_command", fails_with(error))
    assert main(["fail"]) == code
    assert capsys.readouterr() == ("", "error: no\n")


def test_a_fault_of_ours_is_one_line(capsys, monkeypatch):
    """An unexpected exception names itself, says how to see more, and fails."""
    monkeypatch.setattr(chimera.cli.main, "find_command", fails_with(ZeroDivisionError("division by zero")))
    assert main(["fail"]) == 1
    assert capsys.readouterr() == (
        "",
        "error: ZeroDivisionError: division by zero\n  This is a fault of chimera's; --debug shows where.\n",
    )


def test_an_unwritable_file_is_named(capsys, monkeypatch):
    """A file that cannot be opened is the user's business: its name and the reason, no hint of a fault of ours."""
    error = FileNotFoundError(2, "No such file or directory", "no/such/place.json")
    monkeypatch.setattr(chimera.cli.main, "find_command", fails_with(error))
    assert main(["fail"]) == 1
    assert capsys.readouterr() == ("", "error: no/such/place.json: No such file or directory\n")


def test_an_interrupt_is_quiet(capsys, monkeypatch):
    """Control-C ends without a traceback."""
    monkeypatch.setattr(chimera.cli.main, "find_command", fails_with(KeyboardInterrupt()))
    assert main(["fail"]) == 1
    assert capsys.readouterr() == ("", "error: interrupted\n")


@pytest.mark.parametrize("error", [UsageError("no"), ZeroDivisionError("no"), OSError("no")])
def test_debug_lets_the_error_through(monkeypatch, error):
    """``--debug`` shows the traceback, that is: the exception is not caught."""
    monkeypatch.setattr(chimera.cli.main, "find_command", fails_with(error))
    with pytest.raises(type(error), match="no"):
        main(["fail", "--debug"])


def test_a_command_gives_its_own_exit_code(monkeypatch):
    """A command that returns a number or leaves by SystemExit ends with that code."""
    monkeypatch.setattr(chimera.cli.main, "find_command", fails_with(SystemExit(3)))
    assert main(["fail"]) == 3


def test_descriptions_are_wrapped_and_keep_examples(monkeypatch):
    """A docstring's paragraphs fit the terminal, indented lines stay lines, the Args stay out."""
    monkeypatch.setenv("COLUMNS", "40")

    def command() -> None:
        """Do a thing that takes rather more words than fit.

        Example:
            chimera thing --size 3

        Args:
            nothing: at all.
        """

    assert describe(command) == (
        "  Do a thing that takes rather more\n  words than fit.\n  Example:\n      chimera thing --size 3"
    )


def test_errors_are_wrapped_on_a_terminal(monkeypatch, capsys):
    """On a terminal the sentences of an error fit its width; lines of the grid, and all elsewhere, stay whole."""
    message = (
        "it needs 0F0, which stands at position 1 of the same rank; move it\nrank 0    1F0 <-- HERE  0F0  0B0  1B0"
    )
    monkeypatch.setenv("COLUMNS", "40")
    monkeypatch.setattr(chimera.cli.main, "find_command", fails_with(UsageError(message)))
    assert main(["fail"]) == 2
    assert capsys.readouterr().err == f"error: {message}\n"
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    assert main(["fail"]) == 2
    assert capsys.readouterr().err == (
        "error: it needs 0F0, which stands at\n  position 1 of the same rank; move it\n"
        "rank 0    1F0 <-- HERE  0F0  0B0  1B0\n"
    )


def test_a_row_of_the_table_loads_its_function():
    """The text ``module:function`` names a function; a longer name wins over nothing."""
    row = Command("x y", "chimera.cli.main:describe", "An example.")
    assert row.load() is describe
    assert find_command(["x", "y", "z"], [row]) == (row, ["z"])


def test_python_dash_m_is_the_command():
    """``python -m chimera`` answers as ``chimera`` does, with its exit code."""
    done = subprocess.run([*CHIMERA, "--version"], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, f"chimera {chimera.__version__}\n", "")
    done = subprocess.run([*CHIMERA, "shedule"], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (2, "")


def test_a_reader_that_leaves_is_no_error():
    """When the reader of stdout has gone, nothing is printed about it."""
    command = [*CHIMERA, "schedule", "export", "gpipe", "--ranks", "8", "--microbatches", "4096", "--format", "text"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        err = process.stderr.read()
    assert (process.returncode, err) == (1, b"")


def test_output_without_a_file_descriptor(monkeypatch):
    """Called from Python with stdout replaced by a buffer, the command writes there."""
    buffer = io.StringIO()
    monkeypatch.setattr(sys, "stdout", buffer)
    assert main(["--version"]) == 0
    assert buffer.getvalue() == f"chimera {chimera.__version__}\n"
