"""A layout in the words of other systems: Megatron-LM's flags and layout string, torchtitan's TOML, nanotron's YAML.

Names are those of Megatron-LM (``training/arguments.py``), of torchtitan 0.2 (``config/job_config.py``; later ones are
configured in Python) and of nanotron (``config/parallelism_config.py``, ``config/config.py``). What a system has no
word for is refused by name, so that nothing is exported that would run as something else.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

from chimera.errors import UsageError
from chimera.plan.layout import Layout, Recompute
from chimera.plan.layout_string import format_layout
from chimera.plan.shape import Family, ModelShape

__all__ = ["SYSTEMS", "System", "export"]


@dataclass(frozen=True, slots=True, kw_only=True)
class System:
    """What another system can run, and how it is told.

    Attributes:
        title: its name in print.
        families: models that it has.
        schedules: its name for each of our schedules.
        recompute: modes that it has.
        sequence_parallel: whether it may be off or on where t > 1.
        uneven: whether stages may have numbers of blocks of their own.
        write: gives the text.
    """

    title: str
    families: tuple[Family, ...]
    schedules: Mapping[str, str]
    recompute: tuple[Recompute, ...]
    sequence_parallel: tuple[bool, ...]
    uneven: tuple[bool, ...]
    write: Callable[[ModelShape, Layout], str]


def export(system: str, shape: ModelShape, layout: Layout) -> str:
    """Return a layout in the words of a system of ``SYSTEMS``.

    Raises:
        UsageError: the system has no word for the model, the schedule or a choice; the message names it.
    """
    known = SYSTEMS[system]
    if shape.family not in known.families:
        raise UsageError(f"{known.title} is not written for {shape.family} models, but for {', '.join(known.families)}")
    if layout.pipeline > 1 and layout.schedule not in known.schedules:
        raise UsageError(
            f"{known.title} has no schedule {layout.schedule!r}; it has {', '.join(known.schedules)}: plan again with "
            f"--schedules {' '.join(known.schedules)}"
        )
    if layout.recompute not in known.recompute:
        raise UsageError(
            f"{known.title} has no recompute mode {layout.recompute!r}; plan again with --recompute "
            f"{' '.join(known.recompute)}"
        )
    if layout.tensor > 1 and layout.sequence_parallel not in known.sequence_parallel:
        raise UsageError(
            f"{known.title} always has sequence parallelism beside tensor parallelism; plan again with "
            "--sequence-parallel True"
        )
    if layout.cut is not None and True not in known.uneven:
        raise UsageError(f"{known.title} cuts stages itself; plan again with --uneven False")
    return known.write(shape, layout)


def _megatron(shape: ModelShape, layout: Layout) -> str:
    """Return flags of Megatron-LM's pretraining scripts, one a line."""
    if layout.schedule == "interleaved" and layout.microbatches % layout.pipeline:
        raise UsageError(
            f"Megatron-LM interleaves whole groups of p micro-batches alone: m = {layout.microbatches} is no multiple "
            f"of p = {layout.pipeline}; plan again with another --global-batch or with --schedules 1f1b"
        )
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
        flags.append(("pipeline-model-parallel-layout", f'"{_layout_string(layout.cut)}"'))
    elif layout.chunks is not None and layout.chunks > 1:
        flags.append(("num-layers-per-virtual-pipeline-stage", shape.layers // (layout.pipeline * layout.chunks)))
    lines = [f"--{name} {value}" for name, value in flags]
    if shape.num_kv_heads != shape.heads:
        lines += ["--group-query-attention", f"--num-query-groups {shape.num_kv_heads}"]
    if shape.head_width * shape.heads != shape.hidden:
        lines.append(f"--kv-channels {shape.head_width}")
    if shape.gated:
        lines.append("--swiglu")
    if shape.family == "llama":
        lines += ["--normalization RMSNorm", "--position-embedding-type rope", "--disable-bias-linear"]
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


def _layout_string(cut: tuple[int, ...]) -> str:
    """Return Megatron-LM's layout string.

    >>> _layout_string((3, *[2] * 29, 1))
    'Et*3|(tt|)*29,tL'
    """
    stages = ["t" * blocks for blocks in cut]
    stages[0] = f"E{stages[0]}"
    stages[-1] += "L"
    return format_layout(stages)


def _torchtitan(shape: ModelShape, layout: Layout) -> str:
    """Return settings of torchtitan, as TOML."""
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
        f'pipeline_parallel_schedule = "{SYSTEMS["torchtitan"].schedules[layout.schedule]}"',
        f"pipeline_parallel_microbatch_size = {layout.microbatch}",
    ]
    if layout.pipeline > 1:
        lines.append(f"module_fqns_per_model_part = {_modules(shape, layout)}")
    return "\n".join([*lines, "", "[activation_checkpoint]", f'mode = "{layout.recompute}"', ""])


def _nanotron(shape: ModelShape, layout: Layout) -> str:
    """Return the parallelism and the batch of a nanotron configuration, as YAML."""
    engine = SYSTEMS["nanotron"].schedules[layout.schedule]
    return "\n".join(
        [
            "parallelism:",
            f"  dp: {layout.data}",
            f"  pp: {layout.pipeline}",
            f"  pp_engine: {engine}",
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


SYSTEMS: Final[Mapping[str, System]] = MappingProxyType(
    {
        "megatron": System(
            title="Megatron-LM",
            families=("gpt", "bert", "llama"),
            schedules={"1f1b": "1f1b", "interleaved": "interleaved"},
            recompute=("none", "selective", "full"),
            sequence_parallel=(False, True),
            uneven=(False, True),
            write=_megatron,
        ),
        "torchtitan": System(
            title="torchtitan",
            families=("llama",),
            # Its names are those of torch.distributed.pipelining.
            schedules={
                "gpipe": "GPipe",
                "1f1b": "1F1B",
                "interleaved": "Interleaved1F1B",
                "looped-bfs": "LoopedBFS",
                "interleaved-zb": "InterleavedZeroBubble",
                "zb-v": "ZBVZeroBubble",
                "dualpipev": "DualPipeV",
            },
            recompute=("none", "selective", "full"),
            sequence_parallel=(True,),
            uneven=(False, True),
            write=_torchtitan,
        ),
        "nanotron": System(
            title="nanotron",
            families=("llama",),
            schedules={"1f1b": "1f1b", "gpipe": "afab"},
            recompute=("none", "full"),
            sequence_parallel=(False, True),
            uneven=(False,),
            write=_nanotron,
        ),
    }
)
"""Systems that a plan is written for, by the name that ``--export`` takes."""
