"""The batch script: what sbatch and the shell read in it is what was asked for, whatever the words are."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from chimera.errors import UsageError
from chimera.launch.slurm_script import SlurmJob, batch_script


def job(**options):
    needed = {"name": "bert", "nodes": 2, "tasks_per_node": 4, "log": Path("out/slurm-%j.log"), "folder": Path("/work")}
    return SlurmJob(**needed | options)


def test_every_option_has_its_line():
    """The script asks for what was given, loads modules before it sets variables, and leaves out the rest."""
    script = batch_script(
        job(
            time="1-12:00:00",
            partition="gpu",
            account="a_1",
            gpus_per_task=1,
            cpus_per_task=8,
            options=["qos=high", "exclusive"],
            modules=["cuda/12.4", "gcc"],
            variables=["NCCL_DEBUG=INFO", "EMPTY="],
            before=[["nvidia-smi", "-pm", "1"]],
        ),
        ["chimera", "train", "bert.toml", "--train.steps", "5", "--resume"],
    )
    assert (
        script
        == """\
#!/bin/bash -l
#SBATCH --job-name=bert
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=4
#SBATCH --cpus-per-task=8
#SBATCH --gpus-per-task=1
#SBATCH --time=1-12:00:00
#SBATCH --partition=gpu
#SBATCH --account=a_1
#SBATCH --chdir="/work"
#SBATCH --output="out/slurm-%j.log"
#SBATCH --open-mode=append
#SBATCH --qos=high
#SBATCH --exclusive
set -euo pipefail

module load cuda/12.4 gcc
export NCCL_DEBUG=INFO
export EMPTY=''

# Once on each node, before the ranks start.
srun --nodes=2 --ntasks-per-node=1 --ntasks=2 --kill-on-bad-exit=1 nvidia-smi -pm 1

# One task per rank. Once one has ended, the others have 10 s to say what they were doing and to end.
exec srun --nodes=2 --ntasks-per-node=4 --cpus-per-task=8 --wait=10 \\
    chimera train bert.toml \\
    --train.steps 5 \\
    --resume
"""
    )


@pytest.fixture(scope="module")
def fake_srun(tmp_path_factory):
    """Give a folder with a program srun that prints its words and one variable, ended by zeros."""
    folder = tmp_path_factory.mktemp("bin")
    program = folder / "srun"
    program.write_text(f"""#!{shutil.which("bash")}\nprintf '%s\\0' "$WORD" "$@"\n""")
    program.chmod(0o755)
    return folder


WORD = st.text(st.characters(min_codepoint=1, max_codepoint=0x2FF, exclude_categories=["Cs"]), max_size=12)


@settings(max_examples=25, deadline=None)
@given(value=WORD, words=st.lists(WORD, min_size=1, max_size=4))
def test_the_shell_reads_the_words_as_they_were(fake_srun, value, words):
    """Quotes, dollars, newlines and whatever else is in a word or a variable's value reach srun unchanged."""
    script = batch_script(job(variables=[f"WORD={value}"]), ["chimera", *words])
    environ = {"PATH": f"{fake_srun}:{os.environ['PATH']}", "LC_ALL": "C.UTF-8"}
    done = subprocess.run(["bash"], input=script.encode(), env=environ, capture_output=True, check=True)
    got = done.stdout.decode().split("\0")[:-1]
    assert got == [value, "--nodes=2", "--ntasks-per-node=4", "--wait=10", "chimera", *words]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"nodes": 0}, r"--nodes 0: needed: at least 1"),
        ({"tasks_per_node": -1}, r"--tasks-per-node -1: needed: at least 1"),
        ({"partition": "gpu\n#SBATCH --uid=0"}, r"--partition 'gpu\\n#SBATCH --uid=0': needed: letters"),
        ({"time": "1 hour"}, r"--time '1 hour': needed"),
        ({"account": ""}, r"--account ''"),
        ({"modules": ["cuda; rm -r /"]}, r"--module 'cuda; rm -r /': needed: the name of a module, such as cuda/12.4"),
        ({"modules": ["-x"]}, r"--module '-x'"),
        ({"variables": ["DEBUG"]}, r"--env 'DEBUG': needed: NAME=VALUE"),
        ({"variables": ["A-B=1"]}, r"--env 'A-B=1'"),
        ({"options": ["--qos=high"]}, r"--sbatch '--qos=high': needed: NAME or NAME=VALUE of sbatch, as in qos=high"),
        ({"options": ["comment=a b"]}, r"--sbatch 'comment=a b'"),
        ({"options": ["nodes=3"]}, r"--sbatch 'nodes=3': that one is set by other options"),
        ({"log": Path("a%x/slurm-%j.log")}, r"would misread the path 'a%x/slurm-%j.log'; choose another --train.out"),
        ({"log": Path('a"b/slurm-%j.log')}, r"would misread the path 'a\"b/slurm-%j.log'; choose another --train.out"),
    ],
)
def test_a_value_that_could_be_misread_is_refused(options, message):
    """What sbatch or the shell could take for something else is named with its option."""
    with pytest.raises(UsageError, match=message):
        job(**options)
