"""``chimera plan``: the best layouts of a model on a cluster, why the first is first, and files to run it.

The search and its reasons are ``chimera.plan``'s; here options become values, and plans a page, a JSON document or
files.
"""

import json as json_form
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any, Literal

from tyro.conf import Positional, arg

from chimera.cli.facts import counted
from chimera.cli.options import FileOption, Flag
from chimera.cli.plan_config import ready_config
from chimera.cli.plan_options import ClusterOptions, SpaceOptions, software_option
from chimera.cli.plan_recorded import recorded_run
from chimera.cli.terminal import console, print_table, print_wrapped
from chimera.errors import UsageError
from chimera.ir.files import replacing
from chimera.ir.schedule_file import write_schedule
from chimera.plan.block_times import read_block_times
from chimera.plan.explain import changes, differences, limits
from chimera.plan.export import export as exported
from chimera.plan.hardware_file import read_software
from chimera.plan.measured import MeasuredTimes
from chimera.plan.model_file import batch_of, read_model
from chimera.plan.planning import DEFAULT_SOFTWARE, plan
from chimera.plan.plans import Plan, Plans
from chimera.plan.search.variants import Variant

__all__ = ["plan_command"]

_Count = Annotated[int | None, arg(constructor=int, metavar="N", help_behavior_hint="")]
_Amount = Annotated[float | None, arg(constructor=float, metavar="X", help_behavior_hint="")]
_Name = Annotated[str | None, arg(constructor=str, metavar="NAME", help_behavior_hint="")]
_System = Literal["megatron", "torchtitan", "nanotron"]
_ModelFile = Annotated[Path, Positional, arg(metavar="CONFIG|CONFIG.JSON", help_behavior_hint="")]
_GIB = 2**30
_PER_DEVICE = 2
"""Sequences of a step per device, where no batch is given."""

_HEADINGS = (
    "schedule",
    "t",
    "p",
    "d",
    "b",
    "m",
    "recompute",
    "seq.\npar.",
    "shard",
    "step s",
    "tokens/s",
    "TFLOP/s\nper GPU",
    "MFU",
    "bubble",
    "GiB\npeak",
    "GiB\nsent",
)
_LEGEND = (
    "t tensor, p pipeline, d data parallel, b sequences of a micro-batch, m micro-batches; TFLOP/s and MFU count the "
    "model's operations, not what is run again; bubble: idle time of the pipeline's part; peak: on the rank that holds "
    "most; sent: messages of a step by the rank that sends most. * in a new order of the schedule's computations; ~ "
    "with different numbers of blocks."
)


def plan_command(
    config: _ModelFile,
    cluster: ClusterOptions,
    space: SpaceOptions,
    *,
    seq: _Count = None,
    global_batch: _Count = None,
    tokens: _Amount = None,
    price: _Amount = None,
    top: int = 10,
    refine: bool = True,
    software: software_option = DEFAULT_SOFTWARE,
    block_times: FileOption = None,
    block_profile: _Name = None,
    costs: FileOption = None,
    export: _System | None = None,
    out: FileOption = None,
    json: Flag = False,
) -> None:
    """Find the best layout of a model on a cluster: t, p, d, b, schedule, recomputation, sharding, cut.

    Reads a configuration (TOML) or a config.json of transformers (gpt2, bert, t5, llama). Choices that are given are
    not searched.

    Example:
        chimera plan config.json --gpus 64 --device a100-80 --global-batch 256 --tokens 300e9 --price 2

    Args:
        config: a configuration, or a model's config.json
        cluster: where the model runs
        space: choices that are given instead of searched
        seq: tokens of a sequence (default: the file's)
        global_batch: sequences of a step (default: the configuration's, or 2 per device)
        tokens: tokens to train on, as 300e9: prints days
        price: of a device for an hour: prints the cost of --tokens
        top: plans to print
        refine: let the list scheduler look for a faster order of each
        software: a code base's name, or a FILE.json
        block_times: a CSV FILE of measured blocks in place of modelled ones: gpu, model, seq, micro_batch, forward_ms,
            backward_ms
        block_profile: which of its profiles, as gpu/model
        costs: times of the run of CONFIG in place of modelled ones: a costs FILE (seconds per stage, as 'chimera
            simulate' takes), or its metrics.jsonl
        export: print the first plan for another system instead, which narrows the search to its schedules
        out: write a configuration that 'chimera train' accepts into FILE.toml
        json: print a JSON document instead
    """
    if price is not None and tokens is None:
        raise UsageError("--price needs --tokens, how many tokens to pay for, as in --tokens 300e9")
    for name, value in (("tokens", tokens), ("price", price), ("global-batch", global_batch)):
        if value is not None and not 0 < value < float("inf"):
            raise UsageError(f"--{name} {value}: needed: a finite number above 0")
    if out is not None and out.suffix != ".toml":
        raise UsageError(f"--out {out}: needed: a file ending in .toml")
    if block_profile is not None and block_times is None:
        raise UsageError("--block-profile names a profile of --block-times FILE, which is not given")
    if costs is not None and block_times is not None:
        raise UsageError("--costs and --block-times both give times of blocks; needed: one of them")
    shape = read_model(config, seq=seq)
    where = cluster.resolve()
    code = read_software(software)
    measured: MeasuredTimes | None = None
    if block_times is not None:
        measured = read_block_times(block_times, block_profile)
    elif costs is not None:
        measured = recorded_run(costs, config, shape, where, code)
    batch = global_batch or batch_of(config) or _PER_DEVICE * where.num_devices
    found = plan(
        shape,
        where,
        global_batch=batch,
        space=space.resolve(export),
        software=code,
        measured=measured,
        top=top,
        refine=refine and export is None,  # others have no order but the published one
    )
    if out is not None:
        _write(found, config, out)
    if export is not None:
        print(_exported(export, found), end="")
    elif json:
        print(json_form.dumps(_as_dict(found, tokens, price), indent=1, ensure_ascii=False))
    else:
        _print(found, tokens, price)


def _write(found: Plans, config: Path, out: Path) -> None:
    """Write the first plan as a configuration, with its order as a file beside it where it has one."""
    order = out.with_suffix(".schedule.json") if found.best.order is not None else None
    text, notes = ready_config(found, config, order)
    if found.best.order is not None and order is not None:
        write_schedule(found.best.order, order)
        print(f"wrote {order}", file=sys.stderr)
    with replacing(out) as temporary:
        temporary.write_text(text, encoding="utf-8")
    for note in notes:
        print(note, file=sys.stderr)
    print(f"wrote {out}", file=sys.stderr)


def _exported(system: str, found: Plans) -> str:
    """Return the first plan that a system can run, in its words; on stderr stands which it is, if not the fastest."""
    refusals = []
    for number, each in enumerate(found.plans, 1):
        try:
            text = exported(system, found.shape, each.layout)
        except UsageError as error:
            refusals.append(str(error))
            continue
        if number > 1:
            slower = each.step_s / found.best.step_s - 1
            print(f"this is plan {number}, {slower:.1%} slower than the first: {refusals[0]}", file=sys.stderr)
        return text
    raise UsageError(refusals[0])


def _print(found: Plans, tokens: float | None, price: float | None) -> None:
    out, best = console(), found.best
    shape, cluster = found.shape, found.cluster
    out.print(
        f"{shape.family}, {counted(shape.num_blocks, 'block')} of {shape.hidden:,}, {shape.seq:,} tokens, on "
        f"{cluster.num_devices:,} × {cluster.device.title} in nodes of {cluster.node_size}; "
        f"{counted(found.global_batch, 'sequence')} a step",
        style="bold",
    )
    out.print()
    print_table(out, _HEADINGS, [_row(found, each) for each in found.plans])
    out.print()
    print_wrapped(out, _LEGEND)
    out.print()
    if len(found.plans) > 1:
        print_wrapped(out, differences(best, found.plans[1]))
    print_wrapped(out, limits(best.estimate))
    out.print()
    before = f", in published orders ({best.estimate.step_s:.4g} s)" if best.order is not None else ""
    out.print(f"One choice changed in the first plan, the others kept{before}:", style="bold")
    print_table(out, ("choice", "step"), [_change_row(found, choice) for choice in changes(found)])
    out.print()
    if tokens is not None:
        text = f"{tokens:.3g} tokens take {_days(best.days(tokens))}"
        if price is not None:
            text += f" and cost {best.price(tokens, price):,.0f} at {price:g} per device and hour"
        print_wrapped(out, f"{text}.")
    rejected = "; ".join(f"{count:,} {reason}" for reason, count in found.rejected.items())
    print_wrapped(
        out,
        f"{found.num_bounded:,} layouts were bounded and {found.num_simulated:,} simulated. Not shown: {rejected}.",
    )


def _days(days: float) -> str:
    return f"{days:,.1f} days" if days >= 1 else f"{24 * days:,.1f} hours"


def _row(found: Plans, each: Plan) -> Sequence[str]:
    layout, estimate = each.layout, each.estimate
    marks = ("*" if each.order else "") + ("~" if layout.cut else "")
    return (
        f"{_title(each)}{' ' + marks if marks else ''}",
        *(str(size) for size in (layout.tensor, layout.pipeline, layout.data, layout.microbatch, layout.microbatches)),
        layout.recompute,
        "yes" if layout.sequence_parallel else "no",
        "yes" if layout.sharded else "no",
        f"{each.step_s:.4g}",
        f"{each.tokens_per_s:,.0f}",
        f"{each.model_flops_per_s / 1e12:.1f}",
        f"{each.model_flops_utilization(found.peak_flops_per_s):.1%}",
        f"{estimate.bubble_fraction:.1%}",
        f"{estimate.peak_bytes / _GIB:.1f}",
        f"{estimate.message_bytes / _GIB:.2f}",
    )


def _title(each: Plan) -> str:
    layout = each.layout
    return Variant(
        schedule=layout.schedule, chunks=layout.chunks, pairs=layout.pairs, waves=layout.waves, unit=layout.unit
    ).title


def _change_row(found: Plans, change: Any) -> Sequence[str]:
    if change.step_s is None:
        return (change.choice, change.why_not)
    more = change.step_s / found.best.estimate.step_s - 1
    return (change.choice, f"{change.step_s:.4g} s, {more:+.1%}")


def _as_dict(found: Plans, tokens: float | None, price: float | None) -> dict[str, object]:
    return {
        "model": asdict(found.shape),
        "device": found.cluster.device.name,
        "gpus": found.cluster.num_devices,
        "nodes_of": found.cluster.node_size,
        "global_batch": found.global_batch,
        "software": found.software.name,
        "plans": [_plan_as_dict(found, each, tokens, price) for each in found.plans],
        "why_first": differences(found.best, found.plans[1]) if len(found.plans) > 1 else None,
        "limits": limits(found.best.estimate),
        "changes": [asdict(change) for change in changes(found)],
        "rejected": dict(found.rejected),
        "bounded": found.num_bounded,
        "simulated": found.num_simulated,
    }


def _plan_as_dict(found: Plans, each: Plan, tokens: float | None, price: float | None) -> dict[str, object]:
    estimate = each.estimate
    facts: dict[str, object] = {
        "layout": asdict(each.layout),
        "step_s": each.step_s,
        "published_order_step_s": estimate.step_s,
        "ordered_anew": each.order is not None,
        "tokens_per_s": each.tokens_per_s,
        "model_flops_per_s_per_device": each.model_flops_per_s,
        "model_flops_utilization": each.model_flops_utilization(found.peak_flops_per_s),
        "bubble_fraction": estimate.bubble_fraction,
        "peak_bytes": estimate.peak_bytes,
        "message_bytes": estimate.message_bytes,
    }
    if tokens is not None:
        facts["days"] = each.days(tokens)
        facts["price"] = None if price is None else each.price(tokens, price)
    return facts
