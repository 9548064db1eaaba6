"""``chimera train``: a configuration, a few of its options set otherwise, and a view of the run while it goes on.

The options of a configuration file become options of the command, with the help text that their dataclasses have. On a
terminal a bar shows rate and time left; elsewhere there is a line now and then.
"""

import dataclasses
import inspect
import json as json_form
import os
import re
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Annotated, Any, Final, Self

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from tyro.conf import Positional, arg

from chimera.cli.account import account, tracker_lines
from chimera.cli.dry_run import print_dry_run, print_dry_run_json
from chimera.cli.options import Flag
from chimera.cli.profile_report import print_profile, profile_as_dict
from chimera.cli.terminal import console
from chimera.cli.training import PRELOAD, check_run, run_joined, run_local
from chimera.errors import RunError, UsageError
from chimera.ir.versions import updates_of_microbatches
from chimera.launch import allocated_nodes, place_from_environment, warm_up
from chimera.models import count_parameters
from chimera.plan.layout_string import layout_of_cut
from chimera.train.config import TrainConfig
from chimera.train.config_file import SECTIONS, load_config, section_classes, section_types, type_text
from chimera.train.events import Event, Restarted, Saved, Started, TrackerFailed, TrainingResult
from chimera.train.families import family_of, layers_of
from chimera.train.folder import newest_checkpoint
from chimera.train.layout import Layout, layout_of, predicted_bubble
from chimera.train.metrics import EvaluationMetrics, StepMetrics
from chimera.train.profile_result import ProfileResult

__all__ = [
    "Overrides",
    "TrainingView",
    "after_interrupt",
    "given_overrides",
    "print_result",
    "run_and_show",
    "summary",
    "train_command",
    "train_here",
]

_OVER_WORDS: Final = ("mlm", "lm")
"""Loss terms over the words of the vocabulary, which compare with their entropy."""
_LINES_OF_A_RUN: Final = 20
"""About so many lines of steps where there is no terminal."""


@cache
def _overrides_of(section: str) -> type[Any]:
    """Return a dataclass with an optional text for each option of a section, and the section's own help."""
    help_of: dict[str, str] = {}
    fields: dict[str, list[dataclasses.Field[Any]]] = {}
    for class_ in section_classes(section):
        help_of |= _attribute_help(class_)
        for option in dataclasses.fields(class_):
            fields.setdefault(option.name, []).append(option)
    options = [
        (
            name,
            Annotated[
                str | None,
                arg(
                    constructor=str,
                    metavar=type_text(section, name),
                    help=help_of[name],
                    help_behavior_hint=_default_hint(found),
                ),
            ],
            dataclasses.field(default=None),
        )
        for name, found in fields.items()
    ]
    made: type[Any] = dataclasses.make_dataclass(
        f"{section.title()}Overrides",
        options,
        frozen=True,
        namespace={"__doc__": f"The section [{section}] of the file.", "__module__": __name__},
    )
    return made


def _attribute_help(type_: type[Any]) -> dict[str, str]:
    """Return what the docstrings of a dataclass and its bases say of each attribute, in one line."""
    found: dict[str, str] = {}
    for base in reversed(type_.__mro__):
        text = inspect.cleandoc(base.__doc__ or "").partition("Attributes:\n")[2].partition("\n\n")[0]
        for match in re.finditer(r"^    (\w+(?:, \w+)*): (.*(?:\n {8}.*)*)", text, flags=re.MULTILINE):
            found |= dict.fromkeys(match[1].split(", "), re.sub(r"\s+", " ", match[2]).replace("``", ""))
    return found


def _default_hint(options: "Sequence[dataclasses.Field[Any]]") -> str:
    """Return the default of an option, which families may have different ones of."""
    defaults = dict.fromkeys(option.default for option in options)
    if len(defaults) > 1:
        return "(default: by family)"
    (default,) = defaults
    if default is dataclasses.MISSING or default is None:
        return ""
    return f"(default: {str(default).lower() if isinstance(default, bool) else default})"


Overrides: Any = dataclasses.make_dataclass(
    "Overrides",
    [(name, _overrides_of(name), dataclasses.field(default_factory=_overrides_of(name))) for name in SECTIONS],
    frozen=True,
)
"""Options of ``chimera train`` that stand in for those of the file."""


def train_command(
    config: Annotated[Path, Positional, arg(metavar="CONFIG", help_behavior_hint="")],
    overrides: Annotated[Overrides, arg(name="")],
    *,
    resume: Flag = False,
    dry_run: Flag = False,
    json: Flag = False,
) -> None:
    """Train a model: on processes of this host, or as one rank of a job that torchrun started.

    Any option of the file can be set otherwise behind it; "none" stands for no value. Figures of each step go to
    metrics.jsonl in the run's folder, beside checkpoints, a TensorBoard log, the measured timeline of the last step and
    run.json, the record of the run. 'chimera top' shows what its ranks are at.

    Example:
        chimera train configs/bert-tiny.toml --train.steps 100 --schedule.name 1f1b

    Args:
        config: a configuration file, such as configs/bert-tiny.toml
        overrides: options of the file, set otherwise
        resume: go on from the newest checkpoint of the run in train.out
        dry_run: say which ranks there would be, and what each would hold and keep in memory; start nothing
        json: with --dry-run, as JSON
    """
    settings = load_config(config, given_overrides(overrides))
    layout = layout_of(settings)
    if json and not dry_run:
        raise UsageError("--json says what a dry run found; add --dry-run, or leave --json out")
    if dry_run:
        _say_dry_run(settings, layout, json=json)
        return
    run_and_show(settings, resume=resume)


def run_and_show(config: TrainConfig, *, resume: bool = False, json: bool = False) -> None:
    """Train or profile, here or as one rank of a job that is there already, and show it meanwhile and at its end.

    With ``json`` a profile is printed as a JSON document, and all else goes to stderr.
    """
    place = place_from_environment(os.environ, folder=Path(config.train.out))
    if place is None:
        _say_idle_nodes(config)
        train_here(config, resume=resume, json=json)
    else:
        _show(config, partial(run_joined, config, place, resume=resume), silent=place.rank > 0, json=json)


def train_here(config: TrainConfig, *, resume: bool, restarts: int = 0, json: bool = False) -> None:
    """Train or profile on processes of this host and show it.

    Args:
        config: the run.
        resume: go on from the newest checkpoint of the run.
        restarts: how often to do so after a rank died or stalled.
        json: see ``run_and_show``.

    Raises:
        ChimeraError: whatever is wrong.
    """
    check_run(config, resume=resume)
    warm_up(PRELOAD)
    run = partial(run_local, config, resume=resume, restarts=restarts, on_failure=_say_failure)
    _show(config, run, json=json)


def _show(
    config: TrainConfig,
    run: Callable[..., TrainingResult | ProfileResult | None],
    *,
    silent: bool = False,
    json: bool = False,
) -> None:
    """Call ``run`` and show its events and what it came to; a silent one says nothing before that."""
    view = TrainingView(console(on_stderr=json), config)
    if not silent:
        view.out.print("\n".join(summary(config, layout_of(config))))
    try:
        with view:
            result = run(on_event=view.show)
    except KeyboardInterrupt:
        raise RunError(f"interrupted after step {view.step}; {after_interrupt(config)}") from None
    if isinstance(result, ProfileResult) and json:
        print(json_form.dumps(profile_as_dict(result), indent=1))
    elif result is not None:
        print_result(view.out, result)


def print_result(out: Console, result: TrainingResult | ProfileResult) -> None:
    """Print what a run or a profile came to."""
    if isinstance(result, ProfileResult):
        out.print()
        print_profile(out, result)
    else:
        out.print("\n".join(_outcome(result)))


def _say_failure(error: RunError) -> None:
    print(f"error: {error}", file=sys.stderr)


def _say_dry_run(config: TrainConfig, layout: Layout, *, json: bool) -> None:
    if json:
        print_dry_run_json(config, layout)
        return
    out = console()
    out.print("\n".join(summary(config, layout)))
    print_dry_run(out, config, layout)


def _say_idle_nodes(config: TrainConfig) -> None:
    """Say so where the ranks start on this host though the caller has several nodes of SLURM."""
    nodes = allocated_nodes(os.environ)
    if nodes > 1 and config.world_size > 1:
        print(
            f"this allocation has {nodes} nodes, and all {config.world_size} ranks start on this host; to use them "
            f"all: srun --nodes {nodes} --ntasks {config.world_size} chimera train …",
            file=sys.stderr,
        )


def summary(config: TrainConfig, layout: Layout) -> list[str]:
    """Return what a run is, in a few lines, before it starts."""
    model, schedule = config.model, layout.schedule
    with torch.device("meta"):
        parameters = count_parameters(layers_of(model))
    recompute = "" if config.schedule.recompute == "none" else f", {config.schedule.recompute} recompute"
    updates = f" in {max(updates_of_microbatches(schedule)) + 1} updates" if schedule.is_asynchronous else ""
    facts = {
        "model": f"{family_of(model).title}, {model.num_layers} layers, hidden size {model.hidden_size}, "
        f"{parameters:,} parameters, {config.train.dtype}",
        "ranks": _ranks(config),
        "schedule": f"{schedule.name}, {schedule.num_microbatches} micro-batches of {layout.microbatch_size} samples"
        f"{recompute}; stages {layout_of_cut(layout.layer_to_stage, model.stacks)}",
        "step": f"{layout.global_batch} samples of {config.data.sequence_length} tokens{updates}; idle share predicted "
        f"for equal stages {predicted_bubble(schedule):.1%}",
        "run": _run(config),
    }
    return [f"{name:9} {fact}" for name, fact in facts.items()]


def _run(config: TrainConfig) -> str:
    if config.profile.steps:
        return f"profile of {config.profile.steps} steps after {config.profile.warmup_steps}, {config.profile.out}"
    return f"{config.train.steps} steps, {config.train.out}"


def _ranks(config: TrainConfig) -> str:
    parallel = config.parallel
    factors = f"{parallel.pipeline} pipeline x {parallel.data} data"
    if parallel.tensor > 1:
        factors += f" x {parallel.tensor} tensor{', sequence divided' if parallel.sequence else ''}"
    return f"{config.world_size} = {factors}"


class TrainingView:
    """Shows a run as its events come: with a bar on a terminal, in lines elsewhere.

    Args:
        out: where to.
        config: of the run.

    Attributes:
        step: steps done, as far as is known.
    """

    def __init__(self, out: Console, config: TrainConfig) -> None:
        self.out = out
        self.step = 0
        self._steps = config.train.steps
        self._every = max(1, round(config.train.steps / _LINES_OF_A_RUN))
        self._began = time.monotonic()
        self._bar = (
            Progress(
                TextColumn("step"),
                MofNCompleteColumn(),
                BarColumn(),
                TextColumn("{task.fields[note]}"),
                TimeRemainingColumn(),
                console=out,
                transient=True,
            )
            if out.is_terminal
            else None
        )
        self._task = None if self._bar is None else self._bar.add_task("", total=self._steps, note="starting")

    def __enter__(self) -> Self:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def show(self, event: Event) -> None:
        """Show one event."""
        match event:
            case Started():
                self._start(event)
            case StepMetrics():
                self._show_step(event)
            case EvaluationMetrics():
                right = (
                    f", {event.told_right.upper()} right {event.accuracy:.1%}"
                    if event.told_right is not None and event.accuracy is not None
                    else ""
                )
                self.out.print(
                    f"step {event.step:>{len(str(self._steps))}}  held-out: {_terms_text(event.terms, ', ')}{right}"
                )
            case Restarted():
                self.out.print(_restart_text(event))
            case TrackerFailed():
                self.out.print(f"{event.name} failed, training goes on without it: {event.failure}", style="yellow")
            case Saved() if self._bar is None:
                self.out.print(f"saved {event.path}")
            case str() if self._bar is not None and self._task is not None and not self.step:
                self._bar.update(self._task, note=event)

    def _start(self, event: Started) -> None:
        self.step = event.step
        self.out.print(
            f"data      {event.num_train_tokens:,} word pieces to train on, vocabulary {event.vocabulary_size:,}, "
            f"unigram entropy {event.unigram_entropy:.4f} nats\n"
            f"started   after {time.monotonic() - self._began:.1f} s on {event.device}"
            + (f", from step {event.step}" if event.step else "")
        )
        if self._bar is not None and self._task is not None:
            self._bar.update(self._task, completed=event.step)

    def _show_step(self, event: StepMetrics) -> None:
        self.step = event.step
        if self._bar is not None and self._task is not None:
            note = f"{_terms_text(event.terms, '  ', digits=3)}  {event.tokens_per_s:,.0f} tokens/s"
            self._bar.update(self._task, completed=event.step, note=note)
        elif event.step % self._every == 0 or event.step == self._steps:
            self.out.print(
                f"step {event.step:>{len(str(self._steps))}}  {_terms_text(event.terms, ', ')}, "
                f"{_norm_text(event)}, {event.tokens_per_s:,.0f} tokens/s, "
                f"idle {event.bubble_fraction:.1%}"
            )


def _restart_text(event: Restarted) -> str:
    what = f"goes on from {event.checkpoint}" if event.checkpoint else "begins anew, for there is no checkpoint yet"
    return f"restart {event.restarts}  {what}"


def _terms_text(terms: Mapping[str, float], between: str, *, digits: int = 4) -> str:
    """Write loss terms.

    >>> _terms_text({"mlm": 7.25, "nsp": 0.5}, ", ")
    'MLM 7.2500, NSP 0.5000'
    """
    return between.join(f"{name.upper()} {value:.{digits}f}" for name, value in terms.items())


def _norm_text(event: StepMetrics) -> str:
    if event.grad_norm is None:
        return f"overflow at loss scale {event.loss_scale:g}, no update"
    return f"gradient norm {event.grad_norm:.3g}"


def given_overrides(overrides: Any) -> Mapping[str, str]:
    """Return the options of a configuration that were set on the command line, by section.key."""
    return {
        f"{section}.{name}": value
        for section in SECTIONS
        for name in section_types(section)
        if (value := getattr(getattr(overrides, section), name)) is not None
    }


def _outcome(result: TrainingResult) -> list[str]:
    """Return what a run came to, in a few lines."""
    lines = []
    if result.last is None:
        lines.append(f"all {result.steps} steps were done already; raise --train.steps to go on")
    if result.evaluations:
        first, last = result.evaluations[0], result.evaluations[-1]
        (name, before), (_, after) = first.first_term, last.first_term
        line = f"held-out {name.upper()} loss {before:.4f} at step {first.step}, {after:.4f} at step {last.step}"
        if name in _OVER_WORDS:
            below = result.unigram_entropy - after
            line += (
                f": {abs(below):.4f} nats {'below' if below > 0 else 'above'} the unigram entropy "
                f"{result.unigram_entropy:.4f}"
            )
        lines.append(line)
    if result.last is not None and result.last.gather_ms and result.last.gather_hidden_ms is not None:
        lines.append(
            f"updated weights were gathered for {result.last.gather_ms:.1f} ms of the last step, "
            f"{result.last.gather_hidden_ms:.1f} ms of it beside other work"
        )
    if result.record is not None:
        lines += [account(result.record), *tracker_lines(result.record)]
    lines.append(f"{result.steps} steps, {result.train_s:.1f} s of training; files in {result.out}")
    lines.append(f"newest checkpoint {result.checkpoint}")
    return lines


def after_interrupt(config: TrainConfig) -> str:
    """Say how an interrupted run can go on."""
    saved = newest_checkpoint(config.train.out)
    if saved is None:
        return "there is no checkpoint yet, so the run cannot be resumed"
    return f"the newest checkpoint is {saved}, --resume goes on from there"
