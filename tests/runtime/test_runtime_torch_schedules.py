"""Schedules in torch's CSV form, both ways: torch runs ours to our losses and gradients, and its own pass the proof."""

import pytest
import torch
from torch import nn
from torch.distributed.pipelining import PipelineStage, schedules
from torch.nn import functional

from chimera.ir.action import Kind
from chimera.ir.checks import violations
from chimera.ir.csv_form import from_csv, to_csv
from chimera.ir.schedule_file import read_schedule, write_schedule
from chimera.passes.derived import compute_only
from chimera.passes.lower import lower
from chimera.runtime.pipeline import Pipeline
from chimera.schedules import build_schedule

WIDTH = 6
MICROBATCHES = 4
STEPS = 3
RATE = 0.2
FORMATS = {False: "compute_only", True: "compute_comms"}
VEES = ("ScheduleZBVZeroBubble", "ScheduleDualPipeV")
"""Torch's schedules on a V of stages; its others loop."""


@pytest.fixture(autouse=True)
def _one_thread():
    torch.set_num_threads(1)


def stages(count):
    """Build ``count`` stages of two layers with the same weights wherever it is called."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()).double() for _ in range(count)]


def batch(step):
    """Return inputs and targets of a step, three samples to a micro-batch."""
    generator = torch.Generator().manual_seed(step)
    shape = (2, 3 * MICROBATCHES, WIDTH)
    return torch.randn(shape, generator=generator, dtype=torch.float64).unbind()


def gradients(modules):
    """Return the gradients of stages {number: module} as lists by their names in the whole model."""
    return {
        f"{number}.{name}": parameter.grad.tolist()
        for number, module in modules.items()
        for name, parameter in module.named_parameters()
    }


def run_in_torch(group, path, num_stages, own, *, lowered):
    """Train by the file in torch; return the losses that the rank of the last stage sees, and the last gradients."""
    whole = stages(num_stages)
    modules = {number: whole[number] for number in own[group.rank()]}
    parts = [
        PipelineStage(module, number, num_stages, torch.device("cpu"), group=group)
        for number, module in modules.items()
    ]
    runtime = schedules._PipelineScheduleRuntime(parts, MICROBATCHES, functional.mse_loss)
    runtime._load_csv(path, format=FORMATS[lowered])
    losses = []
    for step in range(STEPS):
        inputs, target = batch(step)
        for module in modules.values():
            module.zero_grad()
        each = []
        first, last = 0 in modules, num_stages - 1 in modules
        runtime.step(*[inputs] * first, **({"target": target, "losses": each} if last else {}), return_outputs=False)
        losses.append(torch.stack(each).mean().item() if last else None)
        update(parameter for module in modules.values() for parameter in module.parameters())
    return losses, gradients(modules)


def run_here(group, path):
    """Train by the file in a ``Pipeline``; return the losses and the last gradients."""
    schedule, _ = read_schedule(path)
    pipe = Pipeline(stages(schedule.num_stages), schedule, functional.mse_loss, group, timeout_s=20.0)
    losses = []
    for step in range(STEPS):
        losses.append(pipe.step(*batch(step)).item())
        update(parameter for _, parameter in pipe.optimizer_parameters())
    found = {name: parameter.grad.tolist() for name, parameter in pipe.named_parameters()}
    pipe.close()
    return losses, found


def update(parameters):
    with torch.no_grad():
        for parameter in parameters:
            parameter.sub_(RATE * parameter.grad)


def in_one_process(num_stages):
    """Return losses and the last gradients of the whole model on whole batches."""
    modules = stages(num_stages)
    model = nn.Sequential(*modules)
    losses = []
    for step in range(STEPS):
        inputs, target = batch(step)
        model.zero_grad()
        loss = functional.mse_loss(model(inputs), target)
        loss.backward()
        losses.append(loss.item())
        update(model.parameters())
    return losses, gradients(dict(enumerate(modules)))


@pytest.mark.parametrize("lowered", [False, True], ids=["compute-only", "lowered"])
@pytest.mark.parametrize("name", ["1f1b", "interleaved", "zb-h1", "zb-v", "interleaved-zb"])
def test_torch_runs_our_schedules_to_the_same_losses(ranks, tmp_path, name, lowered):
    """A file that we export trains in torch as it trains here, and both as one process: losses and gradients."""
    schedule = build_schedule(name, ranks=2, microbatches=MICROBATCHES)
    path = tmp_path / "schedule.csv"
    if lowered and hasattr(schedules, "WAIT_REDUCE_GRAD"):
        pytest.skip("this torch wants waits for its reductions in the lowered form, for which we have no action")
    write_schedule(lower(schedule) if lowered else schedule, path)
    again, notes = read_schedule(path)
    assert (again.is_lowered, notes) == (lowered, ())
    num_stages = schedule.num_stages
    own = [list(schedule.placement.stages_on(rank)) for rank in range(2)]
    losses, expected = in_one_process(num_stages)
    assert len(set(losses)) == STEPS
    in_torch = ranks.run(2, run_in_torch, str(path), num_stages, own, lowered=lowered)
    here = ranks.run(2, run_here, str(path))
    last = schedule.rank_of(num_stages - 1, 0)
    assert in_torch[last][0] == pytest.approx(losses, rel=1e-12)
    for found in (in_torch, here):
        assert set().union(*(each for _, each in found)) == set(expected)
        for _, each in found:
            for key, gradient in each.items():
                torch.testing.assert_close(gradient, expected[key], rtol=1e-10, atol=1e-13)
    for mine, _ in here:
        assert mine == pytest.approx(in_torch[last][0], rel=1e-12)


def dump(group, name, chunks, microbatches, paths):
    """Let torch make one of its schedules, and its first rank write it in both forms."""
    ranks = group.size()
    rank = group.rank()
    numbers = (rank, 2 * ranks - 1 - rank) if name in VEES else range(rank, ranks * chunks, ranks)
    parts = [
        PipelineStage(nn.Identity(), number, ranks * chunks, torch.device("cpu"), group=group) for number in numbers
    ]
    made = getattr(schedules, name)(parts, microbatches, functional.mse_loss)
    if rank == 0:
        for path, form in zip(paths, FORMATS.values(), strict=True):
            made._dump_csv(path, format=form)


@pytest.mark.parametrize(
    ("name", "chunks", "kinds"),
    [
        ("ScheduleLoopedBFS", 2, "FB"),
        ("ScheduleInterleaved1F1B", 2, "FB"),
        ("ScheduleInterleaved1F1B", 1, "FB"),
        ("ScheduleInterleavedZeroBubble", 2, "FBIW"),
        ("ScheduleZBVZeroBubble", 2, "FBIW"),
        ("ScheduleDualPipeV", 2, "FBIW"),
    ],
)
def test_torchs_own_schedules_pass_the_proof(ranks, tmp_path, name, chunks, kinds):
    """What torch writes of its multi-stage schedules, in either form, is read here as a whole step and proved.

    Its single-stage classes (GPipe, 1F1B) write no file; interleaved with one stage per rank is 1F1B.
    """
    p, m = 4, 8
    paths = [tmp_path / f"{form}.csv" for form in FORMATS.values()]
    ranks.run(p, dump, name, chunks, m, list(map(str, paths)))
    bare, lowered = (read_schedule(path) for path in paths)
    schedule, notes = bare
    assert notes == ()
    assert (schedule.num_ranks, schedule.num_stages, schedule.num_microbatches) == (p, p * chunks, m)
    assert violations(schedule) == []
    present = {Kind(kind).name for kind in schedule.table.kind.tolist()}
    assert present <= set(kinds)
    assert {"F", *kinds[2:]} <= present
    assert schedule.table.paired.any() == (name == "ScheduleDualPipeV")
    route = (*range(p), *reversed(range(p))) if name in VEES else tuple(range(p)) * chunks
    assert schedule.placement.routes == (route,)
    # With its messages too: the same computations, and what is kept of the messages is proved.
    again, _ = lowered
    assert compute_only(again).actions == schedule.actions
    assert violations(again) == []
    # And back: what we write of it is what torch wrote, less its idle slots.
    assert from_csv(to_csv(schedule), schedule.name)[0] == schedule
