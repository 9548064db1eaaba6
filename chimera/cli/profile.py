"""``chimera profile``: records a few steps of a run, says where their time goes, and writes what was seen.

A profile is a run of ``chimera train`` with ``[profile]`` switched on; so it goes wherever a run goes. With
``--calibrate`` it is this machine that is measured, for the planner.
"""

import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Final, Literal

import torch
from tyro.conf import Positional, arg

from chimera.cli.nsys import is_under_nsys, run_under_nsys
from chimera.cli.options import Flag
from chimera.cli.overrides import Overrides, given_overrides
from chimera.cli.profile_calibrate import calibrate_here
from chimera.cli.train import run_and_show
from chimera.errors import UsageError
from chimera.launch import place_from_environment
from chimera.train.config_file import file_sets, load_config
from chimera.train.profile_result import profile_folder

__all__ = ["profile"]

_Count = Annotated[int | None, arg(constructor=int, metavar="N", help_behavior_hint="")]
_Config = Annotated[Path | None, Positional, arg(constructor=Path, metavar="CONFIG", help_behavior_hint="")]
_Nodes = Annotated[tuple[int, ...] | None, arg(metavar="N...", help_behavior_hint="")]
_Out = Annotated[Path | None, arg(constructor=Path, metavar="FILE", help_behavior_hint="")]
_Ablation = Annotated[
    Literal["p2p", "allreduce", "all"] | None,
    arg(constructor=Literal["p2p", "allreduce", "all"], metavar="{p2p,allreduce,all}", help_behavior_hint=""),
]
_STEPS: Final = 10
_DEVICE_FILE: Final = Path("this-machine.json")
_RANKS: Final = 2
_THREADS: Final = 1


def profile(
    overrides: Annotated[Overrides, arg(name="")],
    config: _Config = None,
    *,
    steps: _Count = None,
    ablate: _Ablation = None,
    nsys: Flag = False,
    nsys_nodes: _Nodes = None,
    json: Flag = False,
    calibrate: Flag = False,
    ranks: _Count = None,
    threads: _Count = None,
    out: _Out = None,
) -> None:
    """Record a few steps of a run on every rank: timeline, idle time and its causes, costs, prediction.

    Takes what 'chimera train' takes, on processes of this host or under torchrun, and trains nothing: no checkpoint is
    made, and the run's folder is not touched. Figures, trace, tables and a costs file go to a folder of their own below
    profile.out. With --calibrate instead of CONFIG, this machine is measured and written as a device for
    'chimera plan --device FILE'.

    Example:
        chimera profile configs/bert-tiny.toml --steps 10 --ablate all

    Args:
        config: a configuration file, as 'chimera train' takes it
        overrides: options of the file, set otherwise
        steps: steps to record (default: profile.steps of the file, or 10)
        ablate: also time steps in which a single byte stands in for messages between stages, for gradients, or for
            both, and say what each costs
        nsys: record under NVIDIA's nsys too, with each action as a range; 'chimera profile import' reads its exports
        nsys_nodes: nodes to put under nsys, by number (default: all)
        json: print a JSON document instead
        calibrate: measure matrix products, memory, messages and all-reduces of this machine
        ranks: processes between which --calibrate times messages (default: 2)
        threads: CPU threads of one device under --calibrate (default: 1)
        out: the device file that --calibrate writes (default: this-machine.json)
    """
    given = given_overrides(overrides)
    if calibrate:
        others = {"CONFIG": config, "--steps": steps, "--ablate": ablate, "--nsys": nsys or None, **given}
        for name, value in others.items():
            if value is not None:
                raise UsageError(
                    f"--calibrate measures this machine, to which {name} means nothing; leave one of them out"
                )
        calibrate_here(ranks=ranks or _RANKS, threads=threads or _THREADS, out=out or _DEVICE_FILE, json=json)
        return
    for name, value in (("--ranks", ranks), ("--threads", threads), ("--out", out)):
        if value is not None:
            raise UsageError(
                f"{name} is an option of --calibrate; add that or leave it out (profiles go below profile.out)"
            )
    if config is None:
        raise UsageError(
            "profile needs a configuration, as in: chimera profile configs/bert-tiny.toml; or --calibrate, which "
            "measures this machine"
        )
    if nsys_nodes is not None and not nsys:
        raise UsageError("--nsys-nodes says which nodes --nsys is for; add that, or leave it out")
    settings = load_config(config, _switched_on(given, config, steps, ablate, nsys=nsys))
    if nsys and not is_under_nsys(os.environ):
        run_under_nsys(
            profile_folder(settings, torch.device("cuda")),
            place_from_environment(os.environ),
            sys.argv[1:],
            nsys_nodes,
        )
    run_and_show(settings, json=json)


def _switched_on(
    given: Mapping[str, str], config: Path, steps: int | None, ablate: str | None, *, nsys: bool
) -> dict[str, str]:
    """Return the options with those that make a run a profile."""
    options = {**given, **({"profile.nvtx": "true"} if nsys else {})}
    for name, value in (("steps", steps), ("ablate", ablate)):
        if value is not None:
            if f"profile.{name}" in options:
                raise UsageError(f"--{name} and --profile.{name} are the same option; give one of them")
            options[f"profile.{name}"] = str(value)
    if "profile.steps" not in options and not file_sets(config, "profile", "steps"):
        options["profile.steps"] = str(_STEPS)
    return options
