"""Where a run comes from: its command, its code, its versions, its hosts and the variables that steer it.

Everything is found out here and masked here, so nobody else holds the bare words. What cannot be found out is None or
left out; a missing git, say, is no reason not to train.
"""

import os
import platform
import socket
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Final

import numpy as np
import torch

import chimera
from chimera.runtime.groups import Groups
from chimera.runtime.shapes import gather_json
from chimera.train.tracking.command import Command
from chimera.train.tracking.masking import Masker
from chimera.train.tracking.record import Origin

__all__ = ["find_origin", "steering_variables"]

_STEERING: Final = (
    *("CHIMERA_", "CUBLAS_", "CUDA_", "CUDNN_", "GLOO_", "HF_", "KMP_", "MKL_", "MLFLOW_", "NCCL_", "NVIDIA_", "OMP_"),
    *("PYTORCH_", "RAY_", "SLURM_", "TORCH", "TOKENIZERS_", "UCX_", "WANDB_"),
)
_SINGLE: Final = frozenset(
    {"RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "PYTHONHASHSEED"}
)
_GIT_TIMEOUT_S: Final = 5.0


def find_origin(command: Command, groups: Groups, device: torch.device, masker: Masker) -> Origin:
    """Return where this start comes from, as the first rank has it; a collective."""
    here = gather_json(groups, [socket.gethostname(), _device_name(device)])
    commit, dirty = _git_state(Path.cwd()) if groups.rank == 0 else (None, None)
    return Origin(
        command=masker.command(command.words),
        folder=masker.text(str(Path.cwd())),
        commit=commit,
        dirty=dirty,
        versions=_versions(),
        environment=masker.variables(steering_variables(os.environ)),
        hosts=tuple(host for host, _ in here),
        devices=tuple(name for _, name in here),
    )


def steering_variables(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that change how a run behaves, by name, sorted.

    >>> steering_variables({"OMP_NUM_THREADS": "2", "HOME": "/root", "RANK": "0"})
    {'OMP_NUM_THREADS': '2', 'RANK': '0'}
    """
    return {name: environ[name] for name in sorted(environ) if name in _SINGLE or name.startswith(_STEERING)}


def _versions() -> dict[str, str]:
    found = {
        "python": platform.python_version(),
        "chimera": chimera.__version__,
        "torch": torch.__version__,
        "numpy": np.__version__,
        "system": platform.platform(),
    }
    if torch.version.cuda is not None:
        found["cuda"] = torch.version.cuda
    if torch.cuda.is_available():
        found["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]
    return found


def _device_name(device: torch.device) -> str:
    return f"{device} {torch.cuda.get_device_name(device)}" if device.type == "cuda" else str(device)


def _git_state(folder: Path) -> tuple[str | None, bool | None]:
    """Return the commit of the repository that ``folder`` is in, and whether its tracked files differ from it."""
    commit = _git(folder, "rev-parse", "--verify", "HEAD")
    if commit is None:
        return None, None
    changes = _git(folder, "status", "--porcelain", "--untracked-files=no")
    return commit.strip(), None if changes is None else bool(changes.strip())


def _git(folder: Path, *words: str) -> str | None:
    try:
        done = subprocess.run(
            ["git", "-C", str(folder), *words],  # noqa: S607 - the user's own git, wherever it is
            capture_output=True,
            text=True,
            check=False,
            timeout=_GIT_TIMEOUT_S,
            # It must neither ask for anything nor write: a lock on the index could stop somebody's commit.
            stdin=subprocess.DEVNULL,
            env={**os.environ, "GIT_OPTIONAL_LOCKS": "0", "GIT_TERMINAL_PROMPT": "0"},
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout if done.returncode == 0 else None
