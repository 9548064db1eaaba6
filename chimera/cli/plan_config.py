"""The first plan as a configuration that ``chimera train`` accepts, made of the file the plan was asked for.

The text is read back by ``train``'s own reader before it is given, so that what is written can be run. Sizes that the
runtime has no option for are refused by name.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from chimera.errors import ConfigError
from chimera.plan.layout import Layout
from chimera.plan.layout_string import layout_of_cut
from chimera.plan.model_file import read_document
from chimera.plan.plans import Plans
from chimera.plan.shape import ModelShape

__all__ = ["ready_config"]

_STEPS = 10_000
"""Of a run whose length no configuration gives."""


def ready_config(found: Plans, source: Path, order: Path | None) -> tuple[str, list[str]]:
    """Return the configuration's text, and what is to be said about it.

    Args:
        found: plans of the model in ``source``.
        source: a configuration, whose other options are kept, or a model's config.json.
        order: where the first plan's own order will be written, if it has one.

    Raises:
        ConfigError: ``train`` cannot run the model or the layout.
    """
    # Reading a configuration needs train's types, which load torch; planning does without.
    from chimera.train.config_file import SECTIONS, make_config, section_types, to_toml

    document: dict[str, dict[str, Any]] = {name: {} for name in SECTIONS}
    if source.suffix == ".toml":
        document |= {name: dict(values) for name, values in read_document(source).items()}
    else:
        document |= _from_shape(found.shape)
    layout, notes = found.best.layout, []
    cut = _cut(found)
    if layout.cut is not None and cut is None:
        notes.append("'chimera train' cuts a model of two kinds of blocks by its own estimate, not by the plan's cut")
    known = {name: set(section_types(name)) for name in SECTIONS}
    for section, key, value in _choices(layout, order, cut):
        if value is None:
            document[section].pop(key, None)
        elif key in known[section]:
            document[section][key] = value
        elif value:
            raise ConfigError(
                f"--out: 'chimera train' has no option {section}.{key} for {key} = {value}; plan again with "
                f"--{'tensor 1' if key in {'tensor', 'sequence'} else 'sharded False'}"
            )
    mode = layout.recompute
    if "recompute" in known["schedule"]:
        document["schedule"]["recompute"] = _recompute(mode, section_types("schedule")["recompute"])
    document["train"]["accumulation_runs"] = 1
    document["train"]["evaluation_samples"] = _whole(
        int(document["train"].get("evaluation_samples", 256)), layout.microbatch * layout.data
    )
    return to_toml(make_config(document, where=str(source))), notes


def _cut(found: Plans) -> str | None:
    """Return the first plan's cut as train has it: by count, as a layout string, or None for train's own."""
    layout = found.best.layout
    if found.shape.family == "t5":
        return None
    if layout.cut is None:
        return "count" if layout.pipeline > 1 else None
    blocks = [stage for stage, count in enumerate(layout.cut) for _ in range(count)]
    return layout_of_cut((0, *blocks, len(layout.cut) - 1), [len(blocks)])


def _choices(layout: Layout, order: Path | None, cut: str | None) -> list[tuple[str, str, Any]]:
    """Return what the plan decides, as (section, key, value)."""
    sizes: Mapping[str, Any] = {
        "microbatches": layout.microbatches,
        "chunks": layout.chunks,
        "pairs": layout.pairs,
        "waves": layout.waves,
        "unit": layout.unit,
        "updates": None,
        "memory_limit": None,
        "costs": None,
    }
    if order is not None:
        sizes = dict.fromkeys(sizes)
    return [
        ("schedule", "name", layout.schedule if order is None else str(order)),
        *(("schedule", key, value) for key, value in sizes.items()),
        ("parallel", "tensor", layout.tensor if layout.tensor > 1 else None),
        ("parallel", "sequence", layout.sequence_parallel),
        ("parallel", "shard_optimizer", layout.sharded),
        ("parallel", "pipeline", layout.pipeline),
        ("parallel", "data", layout.data),
        ("parallel", "cut", cut),
        ("train", "microbatch_size", layout.microbatch),
    ]


def _recompute(mode: str, type_: Any) -> Any:
    """Return a recompute mode as train's option has it: by name, or on and off."""
    if type_ is not bool:
        return mode
    if mode == "selective":
        raise ConfigError("--out: 'chimera train' recomputes all or nothing; plan again with --recompute none full")
    return mode == "full"


def _whole(samples: int, share: int) -> int:
    """Return so many samples, rounded up to whole micro-batches of all replicas."""
    return -(-samples // share) * share


def _from_shape(shape: ModelShape) -> dict[str, dict[str, Any]]:
    model: dict[str, Any] = {
        "family": shape.family,
        "vocab_size": shape.vocab,
        "hidden_size": shape.hidden,
        "num_layers": shape.encoder_layers or shape.layers,
        "num_heads": shape.heads,
        "intermediate_size": shape.ffn_width,
        "max_positions": shape.num_positions or None,
        "tied_decoder": shape.tied,
    }
    if shape.family == "llama":
        model["num_key_value_heads"] = shape.kv_heads
    if shape.family != "t5" and shape.head_width * shape.heads != shape.hidden:
        raise ConfigError(
            f"--out: heads of {shape.head_width} in a model of {shape.hidden}: 'chimera train' divides the width of a "
            f"{shape.family} model by its {shape.heads} heads; leave out --out"
        )
    if shape.family == "t5":
        model |= {"num_decoder_layers": shape.layers, "key_value_size": shape.head_size, "gated": shape.gated}
    return {
        "model": {key: value for key, value in model.items() if value is not None},
        "data": {"sequence_length": shape.seq},
        "train": {"steps": _STEPS, "out": "runs/planned"},
    }
