"""``chimera launch slurm``: hands a run in as a job of SLURM, and shows its log until it has ended.

What the job runs is ``srun chimera train``, which anybody may type instead.
"""

import re
import shlex
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Final

from tyro.conf import Positional, arg

from chimera.cli.options import Flag
from chimera.cli.overrides import Overrides, given_overrides
from chimera.cli.terminal import console
from chimera.cli.train import after_interrupt
from chimera.cli.training import check_run
from chimera.errors import RunError, UsageError
from chimera.ir.files import making_folder
from chimera.launch.slurm_job import JobState, cancel, follow, submit
from chimera.launch.slurm_script import SlurmJob, batch_script
from chimera.train.config import TrainConfig
from chimera.train.config_file import load_config
from chimera.train.layout import layout_of

__all__ = ["launch_slurm"]

_Text = Annotated[str | None, arg(constructor=str, help_behavior_hint="")]
_Count = Annotated[int | None, arg(constructor=int, metavar="N", help_behavior_hint="")]
_SCRIPT: Final = "slurm.sh"
_MOST_CAUSES: Final = 6
_CAUSE: Final = re.compile(r"((srun|slurmstepd)[^:]*: )?error: ")


def launch_slurm(
    config: Annotated[Path, Positional, arg(metavar="CONFIG", help_behavior_hint="")],
    overrides: Annotated[Overrides, arg(name="")],
    *,
    nodes: Annotated[int, arg(metavar="N", help_behavior_hint="")],
    tasks_per_node: Annotated[int, arg(metavar="K", help_behavior_hint="")],
    time: Annotated[_Text, arg(metavar="TIME")] = None,
    partition: Annotated[_Text, arg(metavar="NAME")] = None,
    account: Annotated[_Text, arg(metavar="NAME")] = None,
    gpus_per_task: _Count = None,
    cpus_per_task: _Count = None,
    sbatch: Annotated[tuple[str, ...], arg(metavar="NAME=VALUE", help_behavior_hint="")] = (),
    module: Annotated[tuple[str, ...], arg(metavar="NAME", help_behavior_hint="")] = (),
    env: Annotated[tuple[str, ...], arg(metavar="NAME=VALUE", help_behavior_hint="")] = (),
    before: Annotated[tuple[str, ...], arg(metavar="COMMAND", help_behavior_hint="")] = (),
    resume: Flag = False,
    dry_run: Flag = False,
    detach: Flag = False,
) -> int:
    """Train on the nodes of a SLURM cluster: one task per rank, in a job that is handed in and followed.

    The job's log is shown as it grows. Control-C cancels the job; the exit code is the job's. All nodes have to see the
    run's folder, the data and this installation under the same paths. A job that SLURM starts again, as after the loss
    of a node, goes on from the newest checkpoint.

    Example:
        chimera launch slurm configs/bert-tiny.toml --nodes 2 --tasks-per-node 2 --time 1:00:00 --partition gpu

    Args:
        config: a configuration file that all nodes see, such as configs/bert-tiny.toml
        overrides: options of the file, set otherwise
        nodes: hosts of the job
        tasks_per_node: ranks on each; with --nodes they are the ranks of the configuration
        time: limit of the job, such as 30 (minutes) or 1-12:00:00
        partition: of the cluster
        account: that is charged
        gpus_per_task: GPUs of each rank
        cpus_per_task: cores of each rank
        sbatch: further options of sbatch, such as qos=high or exclusive
        module: environment modules to load first
        env: environment variables to set
        before: a command with its arguments, quoted as one word, to run once on each node before the ranks start
        resume: go on from the newest checkpoint of the run in train.out
        dry_run: print the batch script and hand in nothing
        detach: hand the job in and return at once
    """
    given = given_overrides(overrides)
    settings = load_config(config, given)
    # What can be known here is, before anything is handed in.
    layout_of(settings)
    folder = Path(settings.train.out)
    job = SlurmJob(
        name=re.sub(r"[^A-Za-z0-9_.-]", "-", config.stem),
        nodes=nodes,
        tasks_per_node=tasks_per_node,
        log=folder / "slurm-%j.log",
        folder=Path.cwd(),
        time=time,
        partition=partition,
        account=account,
        gpus_per_task=gpus_per_task,
        cpus_per_task=cpus_per_task,
        options=sbatch,
        modules=module,
        variables=env,
        before=[_words(command) for command in before],
    )
    _require_size(job, settings)
    options = [word for name, value in given.items() for word in (f"--{name.replace('_', '-')}", value)]
    command = [sys.executable, "-m", "chimera", "train", str(config), *options, *(["--resume"] if resume else [])]
    script = batch_script(job, command)
    if dry_run:
        print(script, end="")
        return 0
    check_run(settings, resume=resume)
    with making_folder(folder):
        number = submit(script)
        (folder / _SCRIPT).write_text(script, encoding="utf-8")
    log = folder / f"slurm-{number}.log"
    console().print(f"job       {number} on {nodes} nodes, {job.size} tasks; log {log}, script {folder / _SCRIPT}")
    if detach:
        return 0
    return _follow(number, log, settings)


def _follow(number: int, log: Path, config: TrainConfig) -> int:
    """Show a job's log until its end and return its exit code; an interrupt cancels it."""
    out = console()
    causes: list[str] = []

    def show(line: str) -> None:
        out.print(line)
        if _CAUSE.match(line) and line not in causes:
            causes.append(line)

    def say(state: JobState) -> None:
        out.print(f"job       {number} waits: {state.reason}")

    try:
        ended = follow(number, log, on_line=show, on_wait=say)
    except KeyboardInterrupt:
        cancel(number)
        with suppress(RunError):
            follow(number, log, on_line=show, on_wait=say)
        raise RunError(f"job {number} is cancelled; {after_interrupt(config)}") from None
    if ended.name == "COMPLETED":
        return 0
    code = ended.exit_code or 1
    why = "" if ended.reason in {"None", ""} else f" ({ended.reason})"
    lines = [f"error: job {number} ended as {ended.name}{why} with exit code {code}; its log is {log}"]
    print("\n".join([*lines, *(f"  {cause}" for cause in causes[-_MOST_CAUSES:])]), file=sys.stderr)
    return code


def _require_size(job: SlurmJob, config: TrainConfig) -> None:
    size, parallel = config.world_size, config.parallel
    if job.size == size:
        return
    fitting = [f"--nodes {size // job.tasks_per_node}"] if size % job.tasks_per_node == 0 else []
    fitting += [f"--tasks-per-node {size // job.nodes}"] if size % job.nodes == 0 else []
    advice = " or ".join(fitting) or f"--nodes 1 --tasks-per-node {size}"
    raise UsageError(
        f"--nodes {job.nodes} with --tasks-per-node {job.tasks_per_node} makes {job.size} ranks, but the configuration "
        f"has {size} = {parallel.pipeline} pipeline x {parallel.data} data x {parallel.tensor} tensor; try {advice}, "
        "or set [parallel] otherwise"
    )


def _words(command: str) -> Sequence[str]:
    try:
        words = shlex.split(command)
    except ValueError as error:
        raise UsageError(f"--before {command!r} cannot be read as words: {error}; close its quotes") from None
    if not words:
        raise UsageError("--before is empty; give a command, or leave it out")
    return words
