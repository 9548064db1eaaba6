"""``chimera plan estimate``: what one layout of one model costs, in time and in memory.

The figures come from ``chimera.plan``; here options become values, and an estimate a page or a JSON document.
"""

import json as json_form
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

from tyro.conf import arg

from chimera.cli.options import FileOption, Flag
from chimera.cli.plan_options import LayoutOptions, MachineOptions, software_option
from chimera.cli.terminal import console, print_table, print_wrapped
from chimera.errors import UsageError
from chimera.ir.costs_file import read_costs
from chimera.plan.closed import ModelTimes
from chimera.plan.estimate import Estimate
from chimera.plan.estimating import estimate
from chimera.plan.hardware import Cluster
from chimera.plan.hardware_file import read_software
from chimera.plan.layout import Layout
from chimera.plan.planning import DEFAULT_SOFTWARE
from chimera.plan.recorded import layers_of_stages
from chimera.plan.shape import Family, ModelShape
from chimera.plan.software import Software
from chimera.plan.stages import StagedLayout

__all__ = ["plan_estimate"]

_Count = Annotated[int | None, arg(constructor=int, metavar="N", help_behavior_hint="")]
_GIB = 2**30


def plan_estimate(
    spread: LayoutOptions,
    machine: MachineOptions,
    *,
    hidden: int,
    layers: int,
    heads: int,
    seq: int,
    vocab: int = 51200,
    family: Family = "gpt",
    kv_heads: _Count = None,
    ffn: _Count = None,
    gated: Flag = False,
    untied: Flag = False,
    encoder_layers: int = 0,
    gpus: _Count = None,
    software: software_option = DEFAULT_SOFTWARE,
    costs: FileOption = None,
    json: Flag = False,
) -> None:
    """Estimate the time and memory of one step of one layout.

    Example:
        chimera plan estimate --hidden 12288 --layers 96 --heads 96 --seq 2048 --tensor 8 --pipeline 8
            --microbatch 1 --global-batch 64 --schedule interleaved --chunks 3 --recompute full

    Args:
        spread: how the model runs
        machine: what it runs on
        hidden: width h of the model
        layers: blocks; for t5 those of the decoder
        heads: attention heads
        seq: tokens of a sequence
        vocab: words, before any padding
        family: what blocks and head are like
        kv_heads: heads of keys and values (default: as many as heads)
        ffn: width of the feed-forward layer (default: 4 × hidden)
        gated: the feed-forward layer has a gate
        untied: the head has a matrix of its own
        encoder_layers: blocks of a t5 encoder
        gpus: devices (default: tensor × pipeline × data)
        software: a code base's name, or a FILE.json
        costs: a costs FILE of a run of this layout (seconds per stage) in place of modelled times
        json: print a JSON document instead
    """
    shape = ModelShape(
        family=family,
        hidden=hidden,
        layers=layers,
        heads=heads,
        vocab=vocab,
        seq=seq,
        kv_heads=kv_heads,
        ffn=ffn,
        gated=gated,
        tied=not untied,
        encoder_layers=encoder_layers,
    )
    layout = spread.resolve(gpus)
    count = layout.num_devices if gpus is None else gpus
    cluster = machine.of(count)
    code = read_software(software)
    made = estimate(
        shape,
        layout,
        cluster,
        code,
        layer_times=None if costs is None else _recorded(costs, shape, layout, cluster, code),
    )
    if json:
        print(json_form.dumps(_as_dict(made, software), indent=1))
    else:
        _print_page(made, software)
    if not made.fits:
        over = made.peak_bytes - cluster.device.memory_bytes
        print(
            f"the layout does not fit: it needs {made.peak_bytes / _GIB:.1f} GiB on a device of "
            f"{cluster.device.memory_bytes / _GIB:.1f} GiB, {over / _GIB:.1f} GiB too much; try --recompute full, "
            "--sequence-parallel, --sharded, a smaller --microbatch, or more --tensor or --pipeline ranks",
            file=sys.stderr,
        )


def _recorded(costs: Path, shape: ModelShape, layout: Layout, cluster: Cluster, software: Software) -> ModelTimes:
    """Return the times of layers in a costs file of the same layout."""
    if shape.family == "t5":
        raise UsageError("--costs: a model of family t5 has two kinds of blocks, which stages do not tell apart")
    parts = StagedLayout.of(shape, layout, cluster, software, None)
    return layers_of_stages(read_costs(costs), [sum(blocks) for blocks in parts.per_stage], parts.times)


def _as_dict(made: Estimate, software: str) -> dict[str, object]:
    return {
        "layout": asdict(made.layout),
        "device": made.cluster.device.name,
        "software": software,
        "step_s": made.step_s,
        "pipeline_s": made.pipeline_s,
        "reduce_s": made.reduce_s,
        "optimizer_s": made.optimizer_s,
        "bubble_fraction": made.bubble_fraction,
        "compute_s": dict(made.compute_s),
        "tokens_per_s": made.tokens_per_s,
        "model_flops_per_s_per_device": made.model_flops_per_s,
        "hardware_flops_per_s_per_device": made.hardware_flops_per_s,
        "fits": made.fits,
        "memory_bytes": made.cluster.device.memory_bytes,
        "peak_bytes": made.peak_bytes,
        "bytes_per_rank": [{**asdict(memory), "total": memory.total} for memory in made.memory],
        "message_bytes": made.message_bytes,
    }


def _print_page(made: Estimate, software: str) -> None:
    out, layout = console(), made.layout
    peak = made.cluster.device.matrix_flops_per_s[read_software(software).dtype]
    out.print(
        f"{made.shape.family}, {made.shape.num_blocks} blocks of {made.shape.hidden}, on {layout.num_devices} × "
        f"{made.cluster.device.title}: t = {layout.tensor}, p = {layout.pipeline}, d = {layout.data}, "
        f"b = {layout.microbatch}, m = {layout.microbatches}, {layout.schedule}",
        style="bold",
    )
    facts = {
        "step": f"{_seconds(made.step_s)}: pipeline {_seconds(made.pipeline_s)}, "
        f"reduction {_seconds(made.reduce_s)}, update {_seconds(made.optimizer_s)}",
        "bubble": f"{made.bubble_fraction:.1%} of the pipeline's time",
        "busiest rank": ", ".join(f"{name} {_seconds(time)}" for name, time in made.compute_s.items() if time > 0),
        "speed": f"{made.tokens_per_s:,.0f} tokens/s; {made.model_flops_per_s / 1e12:.1f} TFLOP/s per device, "
        f"{made.model_flops_per_s / peak:.1%} of peak ({made.hardware_flops_per_s / 1e12:.1f} with recomputation)",
        "memory": f"{made.peak_bytes / _GIB:.1f} of {made.cluster.device.memory_bytes / _GIB:.1f} GiB "
        "on the rank that holds most",
    }
    for label, text in facts.items():
        print_wrapped(out, text, indent=" " * 16, first=f"  {label:13} ")
    out.print()
    parts = list(asdict(made.memory[0]))
    shown = sorted({0, len(made.memory) // 2, len(made.memory) - 1})
    headings = ["rank", *parts, "GiB in all"]
    rows = [
        [
            str(rank),
            *(f"{getattr(made.memory[rank], part) / _GIB:.2f}" for part in parts),
            f"{made.memory[rank].total / _GIB:.2f}",
        ]
        for rank in shown
    ]
    print_table(out, headings, rows)


def _seconds(time: float) -> str:
    return f"{time:.3g} s" if time >= 1 else f"{1e3 * time:.3g} ms"
