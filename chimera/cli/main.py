"""The ``chimera`` command: finds the command, gives it its options, and turns what goes wrong into a line and a code.

Exit codes: 0 done, 1 failed, 2 wrong usage or configuration, 3 infeasible. A user's mistake never shows a traceback;
``--debug``, anywhere on the line, shows it. What a command does is the command's business.
"""

import inspect
import os
import re
import shutil
import sys
import textwrap
from collections.abc import Callable, Sequence

import chimera
from chimera.cli.commands import find_command, overview
from chimera.errors import ChimeraError

__all__ = ["describe", "main"]

_HELP = ("--help", "-h")


def main(argv: Sequence[str] | None = None) -> int:
    """Run ``chimera`` with ``argv`` (without the program's name; the process's own by default).

    Returns:
        The exit code.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    debug = "--debug" in words
    words = [word for word in words if word != "--debug"]
    try:
        code = _run(words)
        sys.stdout.flush()
    except BrokenPipeError:
        # The reader of our output (head, less) has left. Python would complain again when it flushes at exit.
        _discard_stdout()
        return 1
    except KeyboardInterrupt:
        if debug:
            raise
        return _fail("interrupted", 1)
    except ChimeraError as error:
        if debug:
            raise
        return _fail(str(error), error.exit_code)
    except OSError as error:
        if debug:
            raise
        return _fail(f"{error.filename or type(error).__name__}: {error.strerror or error}", 1)
    except Exception as error:
        if debug:
            raise
        return _fail(f"{type(error).__name__}: {error}\n  This is a fault of chimera's; --debug shows where.", 1)
    return code


def _run(words: Sequence[str]) -> int:
    """Answer the words that concern no single command, or call the command that they name."""
    if not words:
        print(overview(), file=sys.stderr)
        return 2
    if words[0] == "--version":
        print(f"chimera {chimera.__version__}")
        return 0
    if words[-1] in _HELP and (text := overview(words[:-1])) is not None:
        print(text)
        return 0
    command, rest = find_command(words)
    # Parsing options costs a tenth of a second to import; the answers above do without.
    import tyro

    function = command.load()
    try:
        code = tyro.cli(function, prog=f"chimera {command.name}", description=describe(function), args=rest)
    except SystemExit as exit_:  # tyro ends so after --help (0) and after an option it cannot use (2)
        code = exit_.code
    return code if isinstance(code, int) else 0 if code is None else 1


def describe(function: Callable[..., object]) -> str:
    """Return a command's docstring up to its ``Args:``, wrapped to the terminal, for the top of its ``--help``.

    The lines are indented because tyro joins those that are not.
    """
    text = re.split(r"^(?:Args|Returns|Raises):$", inspect.getdoc(function) or "", maxsplit=1, flags=re.MULTILINE)[0]
    width = min(shutil.get_terminal_size().columns, 100)
    lines: list[str] = []
    for paragraph in text.strip().split("\n\n"):
        for part in re.sub(r"\n(?! )", " ", paragraph).split("\n"):
            indent = "  " + part[: len(part) - len(part.lstrip())]
            hanging = indent if indent == "  " else indent + "  "
            lines += textwrap.wrap(part.strip(), width, initial_indent=indent, subsequent_indent=hanging)
    return "\n".join(lines)


def _fail(message: str, code: int) -> int:
    text = f"error: {message}"
    print(_for_terminal(text) if sys.stderr.isatty() else text, file=sys.stderr)
    return code


def _for_terminal(text: str) -> str:
    """Wrap the sentences of a message to the terminal; lines of a table, with their gaps, stay as they are."""
    width = shutil.get_terminal_size().columns
    lines: list[str] = []
    for line in text.split("\n"):
        indent = " " * (len(line) - len(line.lstrip()) + 2)
        sentence = "  " not in line.strip()
        wrapped = textwrap.wrap(line, width, subsequent_indent=indent, break_on_hyphens=False, break_long_words=False)
        lines += wrapped if sentence and wrapped else [line]
    return "\n".join(lines)


def _discard_stdout() -> None:
    devnull = os.open(os.devnull, os.O_WRONLY)
    os.dup2(devnull, sys.stdout.fileno())
    os.close(devnull)
