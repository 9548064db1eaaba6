"""``chimera plan memory``: one layout's memory, a row per rank, and over time as a figure.

The figures are ``chimera.plan``'s estimate; this module only sets them out.
"""

import json as json_form
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

from tyro.conf import Positional, arg

from chimera.cli.options import FileOption, Flag
from chimera.cli.plan_options import ClusterOptions, LayoutOptions, software_option
from chimera.cli.terminal import console, print_table, print_wrapped
from chimera.plan.estimate import Estimate, RankMemory
from chimera.plan.estimating import estimate
from chimera.plan.hardware_file import read_software
from chimera.plan.model_file import read_model
from chimera.plan.planning import DEFAULT_SOFTWARE
from chimera.plot.memory import plot_memory

__all__ = ["plan_memory"]

_Count = Annotated[int | None, arg(constructor=int, metavar="N", help_behavior_hint="")]
_ModelFile = Annotated[Path, Positional, arg(metavar="CONFIG|CONFIG.JSON", help_behavior_hint="")]
_GIB = 2**30
_PARTS = ("weights", "gradients", "optimizer", "activations", "working", "buffers", "margin")
_LEGEND = (
    "GiB of one device at its peak. Activations: as many micro-batches as the schedule holds. Working: what one layer "
    "needs besides. Buffers: messages. Margin: fragmentation, and the device's own context."
)


def plan_memory(
    config: _ModelFile,
    cluster: ClusterOptions,
    spread: LayoutOptions,
    *,
    seq: _Count = None,
    software: software_option = DEFAULT_SOFTWARE,
    json: Flag = False,
    out: FileOption = None,
) -> None:
    """Show what every pipeline rank of one layout holds, by what it is for; over time with --out.

    Example:
        chimera plan memory config.json --gpus 32 --tensor 4 --pipeline 8 --microbatch 1 --out memory.png

    Args:
        config: a configuration (TOML), or a model's config.json
        cluster: where the model runs
        spread: how
        seq: tokens of a sequence (default: the file's)
        software: a code base's name, or a FILE.json
        json: print a JSON document instead
        out: also draw memory over a step into FILE (.pdf, .png or .svg)
    """
    where = cluster.resolve()
    layout = spread.resolve(where.num_devices)
    made = estimate(read_model(config, seq=seq), layout, where, read_software(software))
    if out is not None:
        plot_memory(made, out)
        print(f"wrote {out}", file=sys.stderr)
    if json:
        print(json_form.dumps(_as_dict(made), indent=1))
    else:
        _print(made)


def _print(made: Estimate) -> None:
    out, layout = console(), made.layout
    out.print(
        f"{made.shape.family}, {made.shape.num_blocks} blocks of {made.shape.hidden:,}: t = {layout.tensor}, "
        f"p = {layout.pipeline}, d = {layout.data}, b = {layout.microbatch}, m = {layout.microbatches}, "
        f"{layout.schedule}, recompute {layout.recompute}",
        style="bold",
    )
    print_table(out, ("rank", *_PARTS, "GiB in all"), [_row(rank, each) for rank, each in enumerate(made.memory)])
    out.print()
    print_wrapped(out, _LEGEND)
    room = made.cluster.device.memory_bytes
    words = "fits" if made.fits else "does not fit"
    print_wrapped(
        out, f"It {words}: {made.peak_bytes / _GIB:.1f} of {room / _GIB:.1f} GiB on the rank that holds most."
    )


def _row(rank: int, memory: RankMemory) -> tuple[str, ...]:
    return (str(rank), *(f"{getattr(memory, part) / _GIB:.2f}" for part in _PARTS), f"{memory.total / _GIB:.2f}")


def _as_dict(made: Estimate) -> dict[str, object]:
    return {
        "layout": asdict(made.layout),
        "fits": made.fits,
        "memory_bytes": made.cluster.device.memory_bytes,
        "peak_bytes": made.peak_bytes,
        "bytes_per_rank": [{**asdict(memory), "total": memory.total} for memory in made.memory],
    }
