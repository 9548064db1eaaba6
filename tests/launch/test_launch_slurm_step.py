"""What SLURM's variables say of a rank's place, taken from real tasks, shells and batch scripts."""

from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chimera.errors import UsageError
from chimera.launch import Place, StoreFile
from chimera.launch.slurm_step import allocated_nodes, parse_node_list, parse_tasks_per_node, place_in_step

# Of the last task of "srun --nodes=2 --ntasks=4", as SLURM 22.05 sets them.
TASK = {
    "SLURMD_NODENAME": "n2",
    "SLURM_CPUS_ON_NODE": "1",
    "SLURM_JOB_ID": "17",
    "SLURM_JOB_NUM_NODES": "2",
    "SLURM_LAUNCH_NODE_IPADDR": "10.0.0.7",
    "SLURM_LOCALID": "0",
    "SLURM_NNODES": "2",
    "SLURM_NODEID": "1",
    "SLURM_NODELIST": "n[1-2]",
    "SLURM_NTASKS": "4",
    "SLURM_PROCID": "3",
    "SLURM_SRUN_COMM_HOST": "10.0.0.7",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NODELIST": "n[1-2]",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_STEP_TASKS_PER_NODE": "3,1",
    "SLURM_TASKS_PER_NODE": "3,1",
}
BATCH = {name: value for name, value in TASK.items() if "STEP" not in name} | {"SLURM_PROCID": "0"}
SALLOC = {name: BATCH[name] for name in ("SLURM_JOB_ID", "SLURM_NNODES", "SLURM_NODELIST", "SLURM_NTASKS")}
PTY = TASK | {"SLURM_PTY_PORT": "34573", "SLURM_PROCID": "0"}


def place(environ, *, on_terminal=False):
    return place_in_step(environ, folder=Path("runs/a"), on_terminal=on_terminal)


def test_a_task_of_a_step():
    """Rank, size and place on the node are what the variables say, however many tasks the other nodes have."""
    assert place(TASK) == Place(
        rank=3,
        size=4,
        local_rank=0,
        local_size=1,
        store=StoreFile(Path("runs/a/.store-17.0.0.json"), towards="10.0.0.7"),
        holds_store=False,
        spans_hosts=True,
        host="n2",
        cores=1,
        size_option="srun --ntasks={}",
        ends_with_parent=True,
    )
    first = place(TASK | {"SLURM_PROCID": "0", "SLURM_NODEID": "0", "SLURM_CPUS_PER_TASK": "4"})
    assert (first.local_size, first.holds_store, first.host, first.cores) == (3, True, "n1", 4)


def test_a_job_that_slurm_started_again():
    """A requeued job says how often, and its ranks meet by a file of another name."""
    again = place(TASK | {"SLURM_RESTART_COUNT": "2"})
    assert (again.restarts, again.store.path.name) == (2, ".store-17.0.2.json")


@pytest.mark.parametrize(
    ("environ", "on_terminal"),
    [({}, False), (BATCH, False), (SALLOC, True), (PTY, True), (TASK | {"SLURM_STEP_NUM_TASKS": "1"}, False)],
    ids=["none", "batch", "salloc", "pty", "one-task"],
)
def test_no_task_among_several(environ, on_terminal):
    """A batch script, a shell in an allocation and a step of one task are no ranks of a job."""
    assert place(environ, on_terminal=on_terminal) is None


def test_a_step_started_from_the_shell_of_a_step():
    """A variable that a task inherits from the shell that started its step does not make it a shell."""
    assert place(PTY).rank == 0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"SLURM_PROCID": ""}, r"task of SLURM's step 17.0, but SLURM_PROCID is not set; start the ranks by srun"),
        ({"SLURM_STEP_NUM_TASKS": "", "SLURM_NTASKS": ""}, r"but SLURM_STEP_NUM_TASKS is not set"),
        ({"SLURM_STEP_NODELIST": "", "SLURM_NODELIST": ""}, r"but SLURM_STEP_NODELIST is not set"),
        ({"SLURM_STEP_NODELIST": "n[1-"}, r"SLURM_STEP_NODELIST is 'n\[1-', which cannot be parsed: .*character 2;"),
        ({"SLURM_STEP_NODELIST": "n[2-1]"}, r"cannot be parsed: the range 2-1 in \[2-1\] has no nodes"),
        ({"SLURM_STEP_TASKS_PER_NODE": "2(x"}, r"cannot be parsed: '2\(x' is no number of tasks, such as 2 or 2\(x3\)"),
        ({"SLURM_STEP_TASKS_PER_NODE": "4"}, r"contradict each other: 4 tasks, SLURM_STEP_TASKS_PER_NODE '4',"),
        ({"SLURM_STEP_TASKS_PER_NODE": "3,2"}, r"contradict each other"),
        ({"SLURM_LOCALID": "1"}, r"contradict each other: .* task 1 of node 1"),
        ({"SLURM_PROCID": "three"}, r"variable SLURM_PROCID is 'three'; needed: a whole number"),
        ({"SLURM_HET_SIZE": "2"}, r"heterogeneous job of 2 components, .*srun --het-group=0"),
    ],
)
def test_variables_that_make_no_place_are_named(change, message):
    """What is missing, unreadable or contradictory is named, with what to do."""
    with pytest.raises(UsageError, match=message):
        place(TASK | change)


@pytest.mark.parametrize(
    ("text", "nodes"),
    [
        ("login", ["login"]),
        ("n[1-3]", ["n1", "n2", "n3"]),
        ("n[8-11]", ["n8", "n9", "n10", "n11"]),
        ("n[008-010,12]", ["n008", "n009", "n010", "n12"]),
        ("a1,b[2,4]-ib,c", ["a1", "b2-ib", "b4-ib", "c"]),
        ("r[0-1]c[1-2]n[07]", ["r0c1n07", "r0c2n07", "r1c1n07", "r1c2n07"]),
    ],
)
def test_node_lists(text, nodes):
    """Ranges, zeros in front, several dimensions and lists are written out in their order, numbers as numbers."""
    assert parse_node_list(text) == nodes


@pytest.mark.parametrize(
    "text", ["", ",", "n1,", ",n1", "n[", "n]", "n[]", "n[1-2", "n[a]", "n[1-2-3]", "n 1", "n[[1]]", "n[1-99999999999]"]
)
def test_what_is_no_node_list(text):
    """Anything else is refused, however many nodes it claims to have."""
    with pytest.raises(ValueError, match=r"."):
        parse_node_list(text)


@given(st.text(alphabet="n0123[](),-x ", max_size=30))
def test_no_text_is_more_than_refused(text):
    """Every text is read or refused by a ValueError."""
    for parse in (parse_node_list, parse_tasks_per_node):
        with suppress(ValueError):
            assert parse(text)


def test_tasks_per_node():
    """Counts with repeats are written out."""
    assert parse_tasks_per_node("2(x3),1") == [2, 2, 2, 1]


def test_nodes_of_an_allocation():
    """A shell in an allocation knows its nodes; elsewhere there are none."""
    assert [allocated_nodes(environ) for environ in ({}, SALLOC, BATCH)] == [0, 2, 2]
