"""BERT weights under transformers' names (``BertForPreTraining``), read and written.

One table says which of their tensors, joined along the first axis, make one of ours; both directions follow it. Works
on tensors already in memory: knows no files. Refuses a tensor it has no place for and a place it has no tensor for.
"""

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor, nn

from chimera.errors import CheckpointError
from chimera.models.bert import BertConfig, bert_layers

__all__ = ["bert_from_huggingface", "bert_to_huggingface"]

_DECODER_WEIGHT = "cls.predictions.decoder.weight"
_DECODER_BIAS = "cls.predictions.decoder.bias"  # the one transformers computes with
_DECODER_BIAS_TWIN = "cls.predictions.bias"  # the same tensor in a tied model, the only name of it in older files
_WORD_WEIGHT = "bert.embeddings.word_embeddings.weight"
_POSITION_IDS = "bert.embeddings.position_ids"  # 0, 1, 2, …; older versions saved this buffer
_TIE_HINT = "; if the decoder's weight is the word embedding's, set [model] tied_decoder = true"


def bert_from_huggingface(state: Mapping[str, Tensor], config: BertConfig) -> dict[str, Tensor]:
    """Rename transformers' weights to ours.

    Accepts ``LayerNorm.gamma`` and ``beta``, names without the prefix ``bert.``, a saved ``position_ids`` buffer, and a
    missing decoder weight where ``config.tied_decoder`` says that it is the word embedding's. An untied model of
    transformers holds a ``cls.predictions.bias`` that it never reads; it is not read here either if the decoder has its
    own.

    Args:
        state: State dict of a ``BertForPreTraining``; not changed.
        config: The model to fill.

    Returns:
        What ``nn.Sequential(*bert_layers(config)).load_state_dict`` takes; a tied weight stands under both its names.

    Raises:
        CheckpointError: Names that are missing, unknown or double, shapes that are not the config's, or two different
            tensors for one tied weight.
    """
    theirs = _with_standard_names(state)
    if config.tied_decoder:
        _tie(theirs, _DECODER_WEIGHT, _WORD_WEIGHT)
        _tie(theirs, _DECODER_BIAS_TWIN, _DECODER_BIAS)
    elif _DECODER_BIAS_TWIN in theirs:
        theirs.setdefault(_DECODER_BIAS, theirs[_DECODER_BIAS_TWIN])
    theirs.pop(_DECODER_BIAS_TWIN, None)
    table = _sources(config)
    _require_same_names(theirs, {name for sources in table.values() for name in sources})
    ours = {name: _join([theirs[source] for source in sources]) for name, sources in table.items()}
    _require_shapes(ours, config)
    return ours


def bert_to_huggingface(state: Mapping[str, Tensor], config: BertConfig) -> dict[str, Tensor]:
    """Rename our weights to transformers'.

    Args:
        state: Weights under our names; a tied decoder weight may be absent. Not changed.
        config: The model they belong to.

    Returns:
        The state dict of a ``BertForPreTraining``. Tensors are views of those given, and what is tied there is one
        tensor under two names.

    Raises:
        CheckpointError: Names that are missing or unknown, shapes that are not the config's, or two different tensors
            for one tied weight.
    """
    table = _sources(config)
    ours = dict(state)
    if config.tied_decoder:
        _tie(ours, f"{config.num_layers + 1}.decoder.weight", "0.word.weight")
    _require_same_names(ours, table)
    _require_shapes(ours, config)
    theirs = {
        source: part
        for name, sources in table.items()
        for source, part in zip(sources, _split(ours[name], len(sources)), strict=True)
    }
    theirs[_DECODER_BIAS_TWIN] = theirs[_DECODER_BIAS]
    return theirs


def _sources(config: BertConfig) -> dict[str, tuple[str, ...]]:
    """Return for each of our names the names at transformers whose tensors, joined along axis 0, make it."""
    head = config.num_layers + 1
    modules = {
        "0.norm": "bert.embeddings.LayerNorm",
        f"{head}.pooler": "bert.pooler.dense",
        f"{head}.nsp": "cls.seq_relationship",
        f"{head}.transform": "cls.predictions.transform.dense",
        f"{head}.transform_norm": "cls.predictions.transform.LayerNorm",
    }
    table: dict[str, tuple[str, ...]] = {
        "0.word.weight": (_WORD_WEIGHT,),
        "0.position.weight": ("bert.embeddings.position_embeddings.weight",),
        "0.token_type.weight": ("bert.embeddings.token_type_embeddings.weight",),
        f"{head}.decoder.weight": (_DECODER_WEIGHT,),
        f"{head}.decoder.bias": (_DECODER_BIAS,),
    }
    for index in range(config.num_layers):
        ours, theirs = f"{index + 1}", f"bert.encoder.layer.{index}"
        modules[f"{ours}.attention.output"] = f"{theirs}.attention.output.dense"
        modules[f"{ours}.attention_norm"] = f"{theirs}.attention.output.LayerNorm"
        modules[f"{ours}.feed_forward.expand"] = f"{theirs}.intermediate.dense"
        modules[f"{ours}.feed_forward.contract"] = f"{theirs}.output.dense"
        modules[f"{ours}.feed_forward_norm"] = f"{theirs}.output.LayerNorm"
        for kind in ("weight", "bias"):
            table[f"{ours}.attention.qkv.{kind}"] = tuple(
                f"{theirs}.attention.self.{part}.{kind}" for part in ("query", "key", "value")
            )
    for ours, theirs in modules.items():
        table |= {f"{ours}.{kind}": (f"{theirs}.{kind}",) for kind in ("weight", "bias")}
    return table


def _with_standard_names(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    renamed: dict[str, Tensor] = {}
    for name, tensor in state.items():
        standard = name.replace("LayerNorm.gamma", "LayerNorm.weight").replace("LayerNorm.beta", "LayerNorm.bias")
        if not standard.startswith(("bert.", "cls.")):
            standard = f"bert.{standard}"
        if standard in renamed:
            raise CheckpointError(f"two tensors stand for {standard}, one of them named {name}; keep one")
        renamed[standard] = tensor
    renamed.pop(_POSITION_IDS, None)
    return renamed


def _join(parts: list[Tensor]) -> Tensor:
    """Join tensors along axis 0; one alone stays the tensor it is, so that what is tied remains so."""
    return torch.cat(parts) if len(parts) > 1 else parts[0]


def _split(joined: Tensor, count: int) -> tuple[Tensor, ...]:
    """Undo ``_join``."""
    return torch.chunk(joined, count) if count > 1 else (joined,)


def _tie(state: dict[str, Tensor], second: str, first: str) -> None:
    """Put one tensor under both names, of which either may be absent."""
    found = [state[name] for name in (first, second) if name in state]
    if len(found) == 2 and found[0] is not found[1] and not torch.equal(*found):
        raise CheckpointError(
            f"{first} and {second} differ, but a tied model has one tensor for both; "
            "if the decoder has its own, set [model] tied_decoder = false"
        )
    if found:
        state[first] = state[second] = found[0]


def _require_same_names(got: Iterable[str], needed: Iterable[str]) -> None:
    got, needed = set(got), set(needed)
    missing, unknown = sorted(needed - got), sorted(got - needed)
    complaints = []
    if missing:
        complaints.append(f"missing: {', '.join(missing)}{_TIE_HINT if _DECODER_WEIGHT in missing else ''}")
    if unknown:
        complaints.append(f"unknown: {', '.join(unknown)}")
    if complaints:
        raise CheckpointError(
            f"these are not the weights of this BERT; {'; '.join(complaints)}. "
            "Check [model] num_layers, and that the weights are a BertForPreTraining's, heads included"
        )


def _require_shapes(ours: Mapping[str, Tensor], config: BertConfig) -> None:
    with torch.device("meta"):
        expected = nn.Sequential(*bert_layers(config)).state_dict()
    wrong = [
        f"{name} is {list(tensor.shape)}, the config needs {list(expected[name].shape)}"
        for name, tensor in ours.items()
        if tensor.shape != expected[name].shape
    ]
    if wrong:
        raise CheckpointError(
            f"weights of another size: {'; '.join(wrong)}. Set the sizes of the [model] section to those of the weights"
        )
