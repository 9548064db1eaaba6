"""``chimera train``: a configuration, a few of its options set otherwise, and the run shown while it goes on."""

import json as json_form
import os
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Annotated

from rich.console import Console
from tyro.conf import Positional, arg

from chimera.cli.dry_run import print_dry_run, print_dry_run_json
from chimera.cli.options import Flag
from chimera.cli.overrides import Overrides, given_overrides
from chimera.cli.profile_report import print_profile, profile_as_dict
from chimera.cli.terminal import console
from chimera.cli.training import PRELOAD, check_run, run_joined, run_local
from chimera.cli.training_view import TrainingView, outcome, summary
from chimera.errors import RunError, UsageError
from chimera.launch import allocated_nodes, place_from_environment, warm_up
from chimera.train.config import TrainConfig
from chimera.train.config_file import load_config
from chimera.train.events import TrainingResult
from chimera.train.folder import newest_checkpoint
from chimera.train.layout import Layout, layout_of
from chimera.train.profile_result import ProfileResult

__all__ = ["after_interrupt", "print_result", "run_and_show", "train_command", "train_here"]


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
        out.print("\n".join(outcome(result)))


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


def after_interrupt(config: TrainConfig) -> str:
    """Say how an interrupted run can go on."""
    saved = newest_checkpoint(config.train.out)
    if saved is None:
        return "there is no checkpoint yet, so the run cannot be resumed"
    return f"the newest checkpoint is {saved}, --resume goes on from there"
