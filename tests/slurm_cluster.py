"""A SLURM cluster of two nodes on this machine: its own munge, ports and folder, all on the loopback interface.

Both nodes run here, so what is tested is real: the batch script, srun's variables, the log, and how a job ends. It
needs root and the packages slurm-wlm and munge; who asks for it without them is told what is missing.
"""

import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from contextlib import ExitStack, contextmanager
from pathlib import Path

__all__ = ["missing", "parent_of", "processes_of", "running_cluster", "tasks_of"]

CONF = """ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
CommunicationParameters=NoInAddrAny,NoCtldInAddrAny
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
CredType=cred/munge
SlurmUser=root
SlurmdUser=root
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool/%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.%n.pid
SlurmdParameters=config_overrides
ProctrackType=proctrack/pgid
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SchedulerParameters=batch_sched_delay=0,bf_interval=1
KillWait=2
ReturnToService=2
MpiDefault=none
NodeName=n1 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[1]} CPUs=4 State=UNKNOWN
NodeName=n2 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[2]} CPUs=4 State=UNKNOWN
PartitionName=both Nodes=ALL Default=YES MaxTime=INFINITE State=UP OverSubscribe=YES
"""
START_S = 60.0


def missing():
    """Return what keeps a cluster from being started here, or None."""
    absent = [program for program in ("munged", "slurmctld", "slurmd", "sbatch") if _program(program) is None]
    if absent:
        return f"{', '.join(absent)} not installed (Debian: slurm-wlm, munge)"
    return None if os.geteuid() == 0 else "SLURM's daemons are started as root"


@contextmanager
def running_cluster(folder):
    """Start the cluster with its files in ``folder`` and yield the path of its slurm.conf; stop all of it after."""
    for name in ("state", "spool", "log"):
        (folder / name).mkdir()
    key = folder / "munge.key"
    key.write_bytes(os.urandom(128))
    key.chmod(0o400)
    # Munge wants no folder on the way to its socket to be writable by others.
    folder.chmod(0o755)
    conf = folder / "slurm.conf"
    conf.write_text(CONF.format(host=socket.gethostname().partition(".")[0], folder=folder, ports=_free_ports(3)))
    munged = [f"--{name}-file={folder}/munge.{name}" for name in ("key", "pid", "seed", "log")]
    daemons = [
        ["munged", "--foreground", "--force", f"--socket={folder}/munge.socket", *munged],
        ["slurmctld", "-D", "-f", str(conf)],
        ["slurmd", "-D", "-f", str(conf), "-N", "n1"],
        ["slurmd", "-D", "-f", str(conf), "-N", "n2"],
    ]
    with ExitStack() as stack:
        stack.callback(_end_steps, conf)
        for number, (program, *options) in enumerate(daemons):
            log = stack.enter_context((folder / "log" / f"{number}-{program}.log").open("w"))
            process = subprocess.Popen([_program(program), *options], stdout=log, stderr=log)
            stack.callback(_end, process)
            if program == "munged":
                _await((folder / "munge.socket").exists, folder)
        _await(lambda: _idle_nodes(conf) == ["n1", "n2"], folder)
        yield conf


def processes_of(job, program):
    """Return the variables of every process of a job that runs this program, by process number."""
    numbers = [int(path.name) for path in Path("/proc").iterdir() if path.name.isdigit()]
    found = {number: _environ(number) for number in numbers if _runs(number, program)}
    return {number: variables for number, variables in found.items() if variables.get("SLURM_JOB_ID") == str(job)}


def tasks_of(job):
    """Return the process numbers of a job's ranks, in their order."""
    python = Path(sys.executable).name
    found = {number: values for number, values in processes_of(job, python).items() if "SLURM_STEP_ID" in values}
    tasks = {number: values for number, values in found.items() if values["SLURM_TASK_PID"] == str(number)}
    return {int(values["SLURM_PROCID"]): number for number, values in tasks.items()}


def parent_of(number):
    """Return the process that started this one."""
    return int(Path(f"/proc/{number}/stat").read_text().rpartition(")")[2].split()[1])


def _end_steps(conf):
    """End the daemons of steps that wait for a program which a test has killed."""
    numbers = [int(path.name) for path in Path("/proc").iterdir() if path.name.isdigit()]
    for number in numbers:
        if _runs(number, "slurmstepd") and _environ(number).get("SLURM_CONF") == str(conf):
            os.kill(number, signal.SIGKILL)


def _runs(number, program):
    try:
        return Path(f"/proc/{number}/comm").read_text().strip() == program
    except OSError:
        return False


def _environ(number):
    try:
        entries = Path(f"/proc/{number}/environ").read_bytes().split(b"\0")
    except OSError:
        return {}
    return dict(entry.decode(errors="replace").partition("=")[::2] for entry in entries)


def _program(name):
    return shutil.which(name, path=f"{os.environ['PATH']}:/usr/sbin:/sbin")


def _free_ports(number):
    with ExitStack() as stack:
        servers = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(number)]
        return [server.getsockname()[1] for server in servers]


def _idle_nodes(conf):
    command = ["sinfo", "--noheader", "--Node", "--format=%N %T"]
    done = subprocess.run(
        command, env=os.environ | {"SLURM_CONF": str(conf)}, capture_output=True, text=True, check=False
    )
    return sorted(line.split()[0] for line in done.stdout.splitlines() if line.endswith(" idle"))


def _await(condition, folder):
    deadline = time.monotonic() + START_S
    while not condition():
        if time.monotonic() > deadline:
            logs = "\n".join(f"{path.name}:\n{path.read_text()[-2000:]}" for path in (folder / "log").iterdir())
            raise AssertionError(f"the cluster did not start within {START_S} s\n{logs}")
        time.sleep(0.1)


def _end(process):
    process.terminate()
    try:
        process.wait(10.0)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
