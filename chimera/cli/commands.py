"""The table of commands: the words that call one, where its function lives, and one line of help.

The table names functions as text, so that reading it imports nothing. A row stands here only while its command works.
"""

import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from chimera.errors import UsageError, nearest_names

__all__ = ["COMMANDS", "Command", "find_command", "overview"]


@dataclass(frozen=True, slots=True)
class Command:
    """``chimera <name>`` calls ``target``, written ``module:function``; ``summary`` is its line in the overview."""

    name: str
    target: str
    summary: str

    def load(self) -> Callable[..., None]:
        """Import the command's module and return its function, whose parameters are the command's options."""
        module, _, function = self.target.partition(":")
        loaded: Callable[..., None] = getattr(importlib.import_module(module), function)
        return loaded


COMMANDS = (
    Command("demo", "chimera.cli.demo:demo", "Train a small BERT here, and see what the schedule did."),
    Command("train", "chimera.cli.train:train_command", "Train a model by any schedule, or resume a run."),
    Command("top", "chimera.cli.top:top", "Watch what every rank of a run is at."),
    Command("launch local", "chimera.cli.launch_local:launch_local", "Train here, and go on when a process dies."),
    Command("launch slurm", "chimera.cli.launch_slurm:launch_slurm", "Train on the nodes of a SLURM cluster."),
    Command("launch ray", "chimera.cli.launch_ray:launch_ray", "Train on the nodes of a Ray cluster."),
    Command(
        "checkpoint inspect",
        "chimera.cli.checkpoint_inspect:checkpoint_inspect",
        "Show what is in a checkpoint, and whether it is whole.",
    ),
    Command(
        "checkpoint export",
        "chimera.cli.checkpoint_export:checkpoint_export",
        "Write weights as transformers reads them.",
    ),
    Command(
        "checkpoint import",
        "chimera.cli.checkpoint_import:checkpoint_import",
        "Begin a run from weights that transformers wrote.",
    ),
    Command("schedule list", "chimera.cli.schedule_list:schedule_list", "Name every schedule and what it takes."),
    Command("schedule show", "chimera.cli.schedule_show:schedule_show", "Draw a schedule in time, one row per rank."),
    Command("schedule check", "chimera.cli.schedule_check:schedule_check", "Prove a schedule, or point at its faults."),
    Command("schedule export", "chimera.cli.schedule_export:schedule_export", "Write a schedule as JSON, CSV or text."),
    Command("schedule compare", "chimera.cli.schedule_compare:schedule_compare", "Set schedules side by side."),
    Command("schedule explain", "chimera.cli.schedule_explain:schedule_explain", "Say what would remove idle time."),
    Command("schedule build", "chimera.cli.schedule_build:schedule_build", "Search the best order for a placement."),
    Command("simulate", "chimera.cli.simulate:simulate_command", "Predict time, memory and the cause of every gap."),
    Command("plan estimate", "chimera.cli.plan_estimate:plan_estimate", "Price one layout, in time and in memory."),
    Command("plan memory", "chimera.cli.plan_memory:plan_memory", "Show one layout's memory, per rank and over time."),
    Command("plan validate", "chimera.cli.plan_validate:plan_validate", "Hold predictions against published runs."),
    # Behind those whose first word it is: the first that fits is called.
    Command("plan", "chimera.cli.plan:plan_command", "Find the best layout of a model on a cluster."),
    Command("data wikipedia", "chimera.cli.data_wikipedia:data_wikipedia", "Turn a dump of Wikipedia into text."),
    Command("data tokenizer", "chimera.cli.data_tokenizer:data_tokenizer", "Train a tokenizer, or take one."),
    Command("data build", "chimera.cli.data_build:data_build", "Tokenise text into an indexed dataset."),
    Command("data merge", "chimera.cli.data_merge:data_merge", "Join indexed datasets."),
    Command(
        "data inspect", "chimera.cli.data_inspect:data_inspect", "Prove an indexed dataset, and show what is in it."
    ),
    Command(
        "profile import", "chimera.cli.profile_import:profile_import", "Read what NVIDIA's nsys recorded of a run."
    ),
    Command("profile", "chimera.cli.profile:profile", "Record a few steps of a run, or measure this machine."),
    Command("bench plan", "chimera.cli.bench_plan:bench_plan", "Time the planner's search, and show its errors."),
    Command("bench runtime", "chimera.cli.bench_runtime:bench_runtime", "Measure the runtime on the virtual device."),
    Command("bench reduce", "chimera.cli.bench_reduce:bench_reduce", "Measure where gradient reductions cost least."),
    Command("bench train", "chimera.cli.bench_train:bench_train", "Time a training step beside transformers."),
    Command("bench data", "chimera.cli.bench_data:bench_data", "Measure tokenising, samples and indices."),
    Command("bench simulate", "chimera.cli.bench_simulate:bench_simulate", "Time building, checking and simulating."),
)


def find_command(words: Sequence[str], commands: Sequence[Command] = COMMANDS) -> tuple[Command, list[str]]:
    """Return the command that ``words`` begin with, and the words that follow it.

    >>> command, rest = find_command(["schedule", "show", "1f1b", "--ranks", "4"])
    >>> command.name, rest
    ('schedule show', ['1f1b', '--ranks', '4'])

    Raises:
        UsageError: no command begins so; the message names the nearest.
    """
    for command in commands:
        parts = command.name.split()
        if list(words[: len(parts)]) == parts:
            return command, list(words[len(parts) :])
    group = _group_of(words, commands)
    if group is None:
        first = {command.name.split()[0] for command in commands}
        raise UsageError(
            f"{words[0]!r} is not a command{nearest_names(words[0], sorted(first))}; 'chimera --help' lists them"
        )
    prefix = f"{group} "
    known = [command.name.removeprefix(prefix) for command in commands if command.name.startswith(prefix)]
    if len(words) == 1 or words[1].startswith("-"):
        raise UsageError(f"'chimera {group}' needs one of: {', '.join(known)}; 'chimera {group} --help' describes them")
    raise UsageError(
        f"'chimera {group}' has no {words[1]!r}{nearest_names(words[1], known)}; it has: {', '.join(known)}"
    )


def overview(words: Sequence[str] = (), commands: Sequence[Command] = COMMANDS) -> str | None:
    """Return the help text of ``chimera`` or of the group that ``words`` name; None if they name a command or nothing.

    >>> print(overview(["schedule"], [c for c in COMMANDS if c.name == "schedule show"]))
    usage: chimera schedule COMMAND [OPTIONS]
    <BLANKLINE>
      schedule show  Draw a schedule in time, one row per rank.
    <BLANKLINE>
    'chimera COMMAND --help' gives a command's options and an example.
    """
    group = _group_of(words, commands)
    if words and (group is None or len(words) > 1 or any(c.name == group for c in commands)):
        return None
    shown = [c for c in commands if not words or c.name.startswith(f"{group} ")]
    width = max(len(c.name) for c in shown)
    lines = [f"usage: chimera {f'{group} ' if words else ''}COMMAND [OPTIONS]", ""]
    if not words:
        lines += ["Plan, prove, run and see pipeline-parallel schedules.", ""]
    lines += [f"  {c.name:{width}}  {c.summary}" for c in shown]
    lines += ["", "'chimera COMMAND --help' gives a command's options and an example."]
    if not words:
        lines += ["'chimera --version' prints the version; '--debug' shows an error's traceback."]
    return "\n".join(lines)


def _group_of(words: Sequence[str], commands: Sequence[Command]) -> str | None:
    """Return the first word where it begins commands of two words."""
    return words[0] if words and any(c.name.startswith(f"{words[0]} ") for c in commands) else None
