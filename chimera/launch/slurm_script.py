"""The batch script of a job for SLURM: readable, and without a word that the shell or sbatch could take for another.

Values that become options of sbatch are checked against the letters that such values have; words that the shell sees
are quoted. Nothing is run here.
"""

import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from chimera.errors import UsageError

__all__ = ["SlurmJob", "batch_script"]

_WAIT_S: Final = 10
"""How long srun lets the other tasks go on once one has ended: they say what each was doing, and end by themselves."""
_VALUE: Final = re.compile(r"[A-Za-z0-9_.,:;/@%+=*&|\[\]()~-]+")
_MODULE: Final = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.+/-]*")
_VARIABLE: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_OPTION: Final = re.compile(r"[a-z][a-z0-9-]*")
_OURS: Final = frozenset(
    {"nodes", "ntasks", "ntasks-per-node", "job-name", "chdir", "output", "open-mode", "time", "partition", "account"}
    | {"gpus-per-task", "cpus-per-task", "wrap", "array", "parsable", "wait", "test-only"}
)
"""Options of sbatch that are set otherwise, or would make another job than one of these ranks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SlurmJob:
    """What is asked of SLURM.

    Attributes:
        name: of the job.
        nodes, tasks_per_node: the ranks are their product, one task each.
        log: of the job's output; ``%j`` in it stands for the job's number.
        folder: where the job runs.
        time, partition, account, gpus_per_task, cpus_per_task: as sbatch has them; None leaves them to SLURM.
        options: further ones of sbatch, NAME or NAME=VALUE.
        modules: environment modules to load.
        variables: environment variables to set, NAME=VALUE.
        before: commands to run once on each node first.

    Raises:
        UsageError: a value that sbatch or the shell could misread, or an option given twice.
    """

    name: str
    nodes: int
    tasks_per_node: int
    log: Path
    folder: Path
    time: str | None = None
    partition: str | None = None
    account: str | None = None
    gpus_per_task: int | None = None
    cpus_per_task: int | None = None
    options: Sequence[str] = ()
    modules: Sequence[str] = ()
    variables: Sequence[str] = ()
    before: Sequence[Sequence[str]] = ()

    def __post_init__(self) -> None:
        for option in ("nodes", "tasks_per_node", "gpus_per_task", "cpus_per_task"):
            value = getattr(self, option)
            if value is not None and value < 1:
                raise UsageError(f"{_spelled(option)} {value}: needed: at least 1")
        for option in ("name", "time", "partition", "account"):
            value = getattr(self, option)
            if value is not None:
                _require(
                    _VALUE, value, f"{_spelled(option)} {value!r}", "letters, digits and the signs that SLURM uses"
                )
        for path in (self.log, self.folder):
            # sbatch has placeholders of its own behind a percent sign.
            if re.search(r"[\x00-\x1f\"\\]", str(path)) or "%" in str(path.parent):
                raise UsageError(f"sbatch would misread the path {str(path)!r}; choose another --train.out")
        for module in self.modules:
            _require(_MODULE, module, f"--module {module!r}", "the name of a module, such as cuda/12.4")
        for variable in self.variables:
            name, equals, _ = variable.partition("=")
            if not equals or not _VARIABLE.fullmatch(name):
                raise UsageError(f"--env {variable!r}: needed: NAME=VALUE, as in NCCL_DEBUG=INFO")
        for option in self.options:
            name, equals, value = option.partition("=")
            if not _OPTION.fullmatch(name) or (equals and not _VALUE.fullmatch(value)):
                raise UsageError(f"--sbatch {option!r}: needed: NAME or NAME=VALUE of sbatch, as in qos=high")
            if name in _OURS:
                raise UsageError(f"--sbatch {option!r}: that one is set by other options of this command; leave it out")

    @property
    def size(self) -> int:
        """Tasks of the job."""
        return self.nodes * self.tasks_per_node


def batch_script(job: SlurmJob, command: Sequence[str]) -> str:
    r"""Return the script in which every task of ``job`` runs ``command``.

    >>> job = SlurmJob(name="bert", nodes=2, tasks_per_node=4, log=Path("runs/bert/slurm-%j.log"), folder=Path("/work"))
    >>> print(batch_script(job, ["chimera", "train", "bert.toml", "--train.out", "runs/it's"]))
    #!/bin/bash
    #SBATCH --job-name=bert
    #SBATCH --nodes=2
    #SBATCH --ntasks-per-node=4
    #SBATCH --chdir="/work"
    #SBATCH --output="runs/bert/slurm-%j.log"
    #SBATCH --open-mode=append
    set -euo pipefail
    <BLANKLINE>
    # One task per rank. Once one has ended, the others have 10 s to say what they were doing and to end.
    exec srun --nodes=2 --ntasks-per-node=4 --wait=10 \
        chimera train bert.toml \
        --train.out 'runs/it'"'"'s'
    <BLANKLINE>
    """
    blocks = [_directives(job), _environment(job), _preparation(job), _ranks(job, command)]
    return "\n\n".join("\n".join(block) for block in blocks if block) + "\n"


def _directives(job: SlurmJob) -> list[str]:
    values = {
        "job-name": job.name,
        "nodes": job.nodes,
        "ntasks-per-node": job.tasks_per_node,
        "cpus-per-task": job.cpus_per_task,
        "gpus-per-task": job.gpus_per_task,
        "time": job.time,
        "partition": job.partition,
        "account": job.account,
        "chdir": f'"{job.folder}"',
        "output": f'"{job.log}"',
        # A job that SLURM starts again after it lost a node goes on in the same file.
        "open-mode": "append",
    }
    lines = [f"#SBATCH --{name}={value}" for name, value in values.items() if value is not None]
    # Modules are functions of the login shell.
    shell = "#!/bin/bash -l" if job.modules else "#!/bin/bash"
    return [shell, *lines, *(f"#SBATCH --{option}" for option in job.options), "set -euo pipefail"]


def _environment(job: SlurmJob) -> list[str]:
    lines = [f"module load {shlex.join(job.modules)}"] if job.modules else []
    for variable in job.variables:
        name, _, value = variable.partition("=")
        lines.append(f"export {name}={shlex.quote(value)}")
    return lines


def _preparation(job: SlurmJob) -> list[str]:
    if not job.before:
        return []
    srun = f"srun --nodes={job.nodes} --ntasks-per-node=1 --ntasks={job.nodes} --kill-on-bad-exit=1"
    return [
        "# Once on each node, before the ranks start.",
        *(f"{srun} {shlex.join(command)}" for command in job.before),
    ]


def _ranks(job: SlurmJob, command: Sequence[str]) -> list[str]:
    # srun does not take the number of cores over from the script.
    cores = f" --cpus-per-task={job.cpus_per_task}" if job.cpus_per_task is not None else ""
    srun = f"exec srun --nodes={job.nodes} --ntasks-per-node={job.tasks_per_node}{cores} --wait={_WAIT_S}"
    return [
        f"# One task per rank. Once one has ended, the others have {_WAIT_S} s to say what they were doing and to end.",
        " \\\n    ".join([srun, *_lines_of(command)]),
    ]


def _lines_of(command: Sequence[str]) -> list[str]:
    """Return the command in lines, each option with its value on one of its own."""
    lines: list[list[str]] = [[]]
    for word in command:
        if word.startswith("--") and lines[0]:
            lines.append([])
        lines[-1].append(word)
    return [shlex.join(line) for line in lines]


def _require(pattern: re.Pattern[str], value: str, what: str, needed: str) -> None:
    if not pattern.fullmatch(value):
        raise UsageError(f"{what}: needed: {needed}")


def _spelled(option: str) -> str:
    return "--" + option.replace("_", "-")
