"""A layout in the words of other systems: Megatron-LM's flags and layout string, torchtitan's TOML, nanotron's YAML.

What a system has no word for is refused by name, so that nothing is exported that would run as something else.
"""

from collections.abc import Callable, Mapping
from itertools import groupby
from types import MappingProxyType
from typing import Final

from chimera.errors import UsageError
from chimera.plan.layout import Layout
from chimera.plan.shape import ModelShape

__all__ = ["EXPORTS", "megatron", "megatron_layout", "nanotron", "torchtitan"]


def megatron(shape: ModelShape, layout: Layout) -> str:
    """Return flags of Megatron-LM's pretraining scripts, one a line.

    Raises:
        UsageError: the schedule is none of Megatron-LM's.
    """
    _require(layout, "Megatron-LM", ("1f1b", "interleaved"))
    flags: list[tuple[str, object]] = [
        ("tensor-model-parallel-size", layout.tensor),
        ("pipeline-model-parallel-size", layout.pipeline),
        ("micro-batch-size", layout.microbatch),
        ("global-batch-size", layout.global_batch),
        ("num-layers", shape.layers),
        ("hidden-size", shape.hidden),
        ("ffn-hidden-size", shape.ffn_width),
        ("num-attention-heads", shape.heads),
        ("seq-length", shape.seq),
        ("max-position-embeddings", shape.num_positions or shape.seq),
    ]
    if layout.cut is not None:
        flags.append(("pipeline-model-parallel-layout", f'"{megatron_layout(layout.cut)}"'))
    elif layout.chunks is not None and layout.chunks > 1:
        flags.append(("num-layers-per-virtual-pipeline-stage", shape.layers // (layout.pipeline * layout.chunks)))
    lines = [f"--{name} {value}" for name, value in flags]
    if shape.num_kv_heads != shape.heads:
        lines += ["--group-query-attention", f"--num-query-groups {shape.num_kv_heads}"]
    if shape.gated:
        lines.append("--swiglu")
    if not shape.tied:
        lines.append("--untie-embeddings-and-output-weights")
    if layout.sequence_parallel:
        lines.append("--sequence-parallel")
    if layout.sharded:
        lines.append("--use-distributed-optimizer")
    if layout.recompute == "full":
        lines += ["--recompute-granularity full", "--recompute-method uniform", "--recompute-num-layers 1"]
    elif layout.recompute == "selective":
        lines.append("--recompute-granularity selective")
    return " \\\n".join(lines) + "\n"


def megatron_layout(cut: tuple[int, ...]) -> str:
    """Return Megatron-LM's layout string: E embedding, t block, L loss, a bar between stages.

    >>> megatron_layout((3, *[2] * 29, 1, 0))
    'Et*3|(tt|)*29,t|L'
    >>> megatron_layout((4, 4)), megatron_layout((5,))
    ('Et*4|t*4,L', 'Et*5,L')
    """
    stages = ["t" * n if n <= 2 else f"t*{n}" for n in cut]
    first = f"E{stages[0]}"
    if len(cut) == 1:
        return f"{first},L"
    middle = [
        f"({stage}|)*{count}," if count > 1 else f"{stage}|"
        for stage, group in groupby(stages[1:-1])
        for count in [len(list(group))]
    ]
    last = f"{stages[-1]},L" if stages[-1] else "L"
    return f"{first}|{''.join(middle)}{last}"


_TORCHTITAN: Final[Mapping[str, str]] = MappingProxyType(
    {
        "gpipe": "GPipe",
        "1f1b": "1F1B",
        "interleaved": "Interleaved1F1B",
        "looped-bfs": "LoopedBFS",
        "interleaved-zb": "InterleavedZeroBubble",
        "zb-v": "ZBVZeroBubble",
        "dualpipev": "DualPipeV",
    }
)
"""torchtitan's names, which are those of torch.distributed.pipelining."""


def torchtitan(shape: ModelShape, layout: Layout) -> str:
    """Return settings of torchtitan, as TOML.

    Raises:
        UsageError: the schedule is none of torch's.
    """
    _require(layout, "torchtitan", tuple(_TORCHTITAN))
    mode = {"none": "none", "selective": "selective", "full": "full"}[layout.recompute]
    lines = [
        "[training]",
        f"local_batch_size = {layout.global_batch // layout.data}",
        f"global_batch_size = {layout.global_batch}",
        f"seq_len = {shape.seq}",
        "",
        "[parallelism]",
        f"data_parallel_replicate_degree = {1 if layout.sharded else layout.data}",
        f"data_parallel_shard_degree = {layout.data if layout.sharded else 1}",
        f"tensor_parallel_degree = {layout.tensor}",
        f"pipeline_parallel_degree = {layout.pipeline}",
        f'pipeline_parallel_schedule = "{_TORCHTITAN[layout.schedule]}"',
        f"pipeline_parallel_microbatch_size = {layout.microbatch}",
    ]
    if layout.pipeline > 1:
        lines.append(f"module_fqns_per_model_part = {_modules(shape, layout)}")
    return "\n".join([*lines, "", "[activation_checkpoint]", f'mode = "{mode}"', ""])


def nanotron(shape: ModelShape, layout: Layout) -> str:
    """Return the parallelism and the batch of a nanotron configuration, as YAML.

    Raises:
        UsageError: the schedule is none of nanotron's.
    """
    engines = {"1f1b": "1f1b", "gpipe": "afab"}
    _require(layout, "nanotron", tuple(engines))
    return "\n".join(
        [
            "parallelism:",
            f"  dp: {layout.data}",
            f"  pp: {layout.pipeline}",
            f"  pp_engine: {engines[layout.schedule]}",
            f"  tp: {layout.tensor}",
            f"  tp_mode: {'REDUCE_SCATTER' if layout.sequence_parallel else 'ALL_REDUCE'}",
            f"  recompute_layer: {str(layout.recompute == 'full').lower()}",
            "optimizer:",
            f"  zero_stage: {int(layout.sharded)}",
            "tokens:",
            f"  batch_accumulation_per_replica: {layout.microbatches}",
            f"  micro_batch_size: {layout.microbatch}",
            f"  sequence_length: {shape.seq}",
            "",
        ]
    )


EXPORTS: Final[Mapping[str, Callable[[ModelShape, Layout], str]]] = MappingProxyType(
    {"megatron": megatron, "torchtitan": torchtitan, "nanotron": nanotron}
)


def _require(layout: Layout, system: str, schedules: tuple[str, ...]) -> None:
    if layout.pipeline > 1 and layout.schedule not in schedules:
        raise UsageError(
            f"{system} has no schedule {layout.schedule!r}; it has {', '.join(schedules)}: plan again with "
            f"--schedules {' '.join(schedules)}"
        )


def _modules(shape: ModelShape, layout: Layout) -> str:
    """Return the modules of every stage, by torchtitan's names."""
    stages = layout.pipeline * (layout.chunks or (2 if layout.schedule in {"zb-v", "dualpipev"} else 1))
    cut = layout.cut or (shape.num_blocks // stages,) * stages
    rows, layer = [], 0
    for stage, count in enumerate(cut):
        names = [f"layers.{layer + i}" for i in range(count)]
        layer += count
        if stage == 0:
            names.insert(0, "tok_embeddings")
        if stage == len(cut) - 1:
            names += ["norm", "output"]
        rows.append("[" + ", ".join(f'"{name}"' for name in names) + "]")
    return "[" + ", ".join(rows) + "]"
