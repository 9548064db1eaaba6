"""A run as it is shown: what it is before it starts, its events while it goes on, and what it came to.

On a terminal a bar shows rate and time left; elsewhere there is a line now and then.
"""

import time
from collections.abc import Mapping
from typing import Final, Self

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from chimera.cli.account import account, tracker_lines
from chimera.ir.versions import updates_of_microbatches
from chimera.models import count_parameters
from chimera.plan.layout_string import layout_of_cut
from chimera.train.config import TrainConfig
from chimera.train.events import Event, Restarted, Saved, Started, TrackerFailed, TrainingResult
from chimera.train.families import family_of, layers_of
from chimera.train.layout import Layout, predicted_bubble
from chimera.train.metrics import EvaluationMetrics, StepMetrics

__all__ = ["TrainingView", "outcome", "summary"]

_OVER_WORDS: Final = ("mlm", "lm")
"""Loss terms over the words of the vocabulary, which compare with their entropy."""
_LINES_OF_A_RUN: Final = 20
"""About so many lines of steps where there is no terminal."""


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


def outcome(result: TrainingResult) -> list[str]:
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
