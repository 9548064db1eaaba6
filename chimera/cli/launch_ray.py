"""``chimera launch ray``: a run on the nodes of a Ray cluster, which is started here where none is named.

The options of a configuration file stand behind it, as they do behind ``chimera train``, and the view of the run is the
same. What Ray is asked for is ``chimera.launch.ray``'s business.
"""

import os
import re
import shlex
import sys
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any, Final

from rich.console import Console
from tyro.conf import Positional, arg

from chimera.cli.options import Flag
from chimera.cli.overrides import Overrides, given_overrides
from chimera.cli.terminal import console
from chimera.cli.train import after_interrupt, print_result
from chimera.cli.training import check_run
from chimera.cli.training_view import TrainingView, summary
from chimera.errors import ConfigError, RunError, UsageError
from chimera.launch.interfaces import find_interface
from chimera.launch.ray.cluster import OwnCluster, environment_for, own_cluster, start_cluster, stop_cluster
from chimera.launch.ray.joining import require_cluster
from chimera.launch.ray.placement import Seat
from chimera.train.config import TrainConfig
from chimera.train.config_file import load_config
from chimera.train.layout import layout_of

__all__ = ["launch_ray"]

_NAME: Final = re.compile(r"[A-Za-z_]\w*")


def launch_ray(
    config: Annotated[Path | None, Positional, arg(metavar="CONFIG", help_behavior_hint="")] = None,
    *,
    overrides: Annotated[Overrides, arg(name="")],
    workers: Annotated[int | None, arg(metavar="N", help_behavior_hint="")] = None,
    address: Annotated[str | None, arg(metavar="HOST:PORT", help_behavior_hint="")] = None,
    cpus_per_rank: Annotated[float, arg(metavar="X")] = 1.0,
    before: Annotated[tuple[str, ...], arg(metavar="COMMAND...", help_behavior_hint="")] = (),
    env: Annotated[tuple[str, ...], arg(metavar="NAME[=VALUE]...", help_behavior_hint="")] = (),
    working_dir: Annotated[Path | None, arg(metavar="FOLDER", help_behavior_hint="")] = None,
    restarts: Annotated[int, arg(metavar="N")] = 3,
    wait_s: Annotated[float, arg(metavar="S")] = 10.0,
    resume: Flag = False,
    down: Flag = False,
) -> None:
    """Train on the nodes of a Ray cluster; without an address, on one that is started here and stays for the next run.

    Ray ships this code to every node and gives each rank a process there; ranks that share layers share a node. When a
    process or a node is lost, all ranks start again from the last checkpoint. Nodes work in the folder that the command
    is given in, which they have to share, as they do the run's folder.

    A cluster started here listens on the loopback interface, or on --runtime.interface if that is given, and asks for a
    token. --down stops it, and no other.

    Example:
        chimera launch ray configs/bert-tiny.toml --workers 2
        chimera launch ray configs/bert-base.toml --address 10.0.0.1:6379 --before "nvidia-smi -pm 1"
        chimera launch ray --down

    Args:
        config: a configuration file, such as configs/bert-tiny.toml
        overrides: options of the file, set otherwise
        workers: ranks; has to be what the configuration makes (t · d · p), and is by default
        address: head of a running cluster, of which this host is a node; RAY_ADDRESS by default
        cpus_per_rank: cores that Ray counts for each rank, and threads that it gives it; 0.5 has two ranks share one
        before: commands, each quoted, to run once on each node before ranks start; no shell reads them, so for one
            write "bash -c '...'"
        env: variables of ranks and commands, with this host's value or the one given
        working_dir: folder that Ray copies to each node, without what git ignores, to work in there in place of this
            one; train.out then has to be absolute
        restarts: how often to start the ranks again
        wait_s: seconds to wait until the cluster has room for all ranks
        resume: go on from the newest checkpoint of the run in train.out
        down: stop the cluster that was started here
    """
    if find_spec("ray") is None:
        raise UsageError(
            "chimera launch ray needs the package ray, which is not installed; needed: the extra 'ray', as in: "
            "pip install 'chimera-pipeline[ray]'"
        )
    out = console()
    # Named, because what is stdout while Ray runs is Ray's.
    out.file = sys.stdout
    if down:
        if config is not None:
            raise UsageError(f"--down stops the cluster that was started here and trains nothing; leave out {config}")
        _say_down(out)
        return
    if config is None:
        raise UsageError("chimera launch ray needs a configuration file, such as configs/bert-tiny.toml, or --down")
    settings = load_config(config, given_overrides(overrides))
    layout = layout_of(settings)
    _check(
        settings,
        workers=workers,
        cpus_per_rank=cpus_per_rank,
        restarts=restarts,
        wait_s=wait_s,
        working_dir=working_dir,
    )
    commands, environ = _commands(before), _variables(env)
    check_run(settings, resume=resume)
    where, own = _cluster(out, settings, address)
    out.print("\n".join(summary(settings, layout)))
    # Ray reads its environment when it is imported, which happens here and not before.
    os.environ.update(environment_for(where, own))
    from chimera.cli.ray_training import RayOptions, run_on_ray

    view = _View(out, settings, restarts)
    options = RayOptions(
        address=where,
        cpus_per_rank=cpus_per_rank,
        before=commands,
        environ=environ,
        working_dir=working_dir,
        folder=Path.cwd(),
        room_s=wait_s,
        restarts=restarts,
    )
    try:
        with view:
            result = run_on_ray(settings, options, view, resume=resume)
    except KeyboardInterrupt:
        raise RunError(f"interrupted after step {view.step}; {after_interrupt(settings)}") from None
    print_result(out, result)
    if own is not None:
        out.print(f"the Ray cluster at {own.address} stays for the next run; 'chimera launch ray --down' stops it")


def _say_down(out: Console) -> None:
    stopped = stop_cluster()
    if stopped is None:
        out.print("no Ray cluster runs here that chimera launch ray has started, so nothing was stopped")
    else:
        out.print(f"stopped the Ray cluster at {stopped.address}")


def _check(
    config: TrainConfig,
    *,
    workers: int | None,
    cpus_per_rank: float,
    restarts: int,
    wait_s: float,
    working_dir: Path | None,
) -> None:
    """Refuse options that contradict the configuration or cannot be."""
    if workers not in {None, config.world_size}:
        parallel = config.parallel
        raise UsageError(
            f"--workers {workers}, but the configuration makes {config.world_size} ranks = {parallel.pipeline} "
            f"pipeline x {parallel.data} data x {parallel.tensor} tensor; set --workers to {config.world_size}, or "
            "--parallel.pipeline, --parallel.data and --parallel.tensor to numbers whose product it is"
        )
    if not cpus_per_rank > 0 or (cpus_per_rank > 1 and cpus_per_rank % 1):
        raise UsageError(f"--cpus-per-rank {cpus_per_rank:g}; needed: a whole number, or a part of 1")
    if restarts < 0:
        raise UsageError(f"--restarts {restarts}; needed: 0 or more")
    if not wait_s > 0:
        raise UsageError(f"--wait-s {wait_s:g}; needed: seconds above 0")
    if working_dir is None:
        return
    if not working_dir.is_dir():
        raise UsageError(f"--working-dir {working_dir} is no folder")
    if not Path(config.train.out).is_absolute():
        raise ConfigError(
            f"[train] out = {config.train.out!r} would be a folder inside each node's copy of --working-dir; set "
            f"--train.out to an absolute path that all nodes share, such as {Path(config.train.out).resolve()}"
        )


def _commands(texts: Sequence[str]) -> list[list[str]]:
    commands = []
    for text in texts:
        try:
            words = shlex.split(text)
        except ValueError as error:
            raise UsageError(f"--before {text!r} cannot be split into words: {error}") from error
        if not words:
            raise UsageError("--before is empty; give a program and its arguments")
        commands.append(words)
    return commands


def _variables(texts: Sequence[str]) -> Mapping[str, str]:
    """Return what --env asks for, by name."""
    environ = {}
    for text in texts:
        name, has_value, value = text.partition("=")
        if not _NAME.fullmatch(name):
            raise UsageError(f"--env {name!r}; needed: NAME or NAME=VALUE")
        if not has_value and name not in os.environ:
            raise UsageError(f"--env {name}: this host has no variable of that name; give its value as {name}=VALUE")
        environ[name] = value if has_value else os.environ[name]
    return environ


def _cluster(out: Console, config: TrainConfig, address: str | None) -> tuple[str, OwnCluster | None]:
    """Return the address of the cluster to use, and the cluster itself if it was started here, perhaps just now."""
    address = address or os.environ.get("RAY_ADDRESS")
    own, found = own_cluster(), "runs here already"
    if address is not None and (own is None or address != own.address):
        require_cluster(address)
        out.print(f"cluster   {address}")
        return address, None
    interface = config.runtime.interface
    if own is None:
        out.print("cluster   starting one on this host")
        own, found = start_cluster(interface), "started"
    elif interface is not None and find_interface(interface).address != own.host:
        raise UsageError(
            f"--runtime.interface {interface} has another address than the Ray cluster that runs here, {own.address}; "
            "stop that one by 'chimera launch ray --down', or leave --runtime.interface out"
        )
    out.print(f"cluster   {own.address}, {found}; token in {own.token}")
    return own.address, own


class _View(TrainingView):
    """The view of a run, with what concerns its ranks on other nodes."""

    def __init__(self, out: Console, config: TrainConfig, restarts: int) -> None:
        super().__init__(out, config)
        self._restarts = restarts

    def message(self, rank: int, message: Any) -> None:
        """Show an event of the first rank."""
        if rank == 0:
            self.show(message)

    def line(self, source: str, line: str) -> None:
        """Show a line that a rank or a command printed, behind whose it is."""
        self.out.print(f"{source} | {line}")

    def placed(self, seats: Sequence[Seat]) -> None:
        """Show which ranks are on which node."""
        of_node: dict[str, list[Seat]] = {}
        for seat in seats:
            of_node.setdefault(seat.node.name, []).append(seat)
        for here in of_node.values():
            first, last = here[0], here[-1]
            which = f"rank {first.rank}" if first is last else f"ranks {first.rank} to {last.rank}"
            self.out.print(f"node      {first.node.address}: {which}")

    def restart(self, cause: BaseException, number: int) -> None:
        """Show why all ranks are started again."""
        self.out.print(f"failed    {cause}\n          all ranks start again, {number} of {self._restarts} times")
