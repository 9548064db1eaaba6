"""How transformers names the weights of each architecture, as tables that both directions follow.

A table says which of their tensors, joined along the first axis, make one of our parameters, what else they call a
tensor, and which of their buffers mean nothing. Knows names and no tensors, no files and no ranks.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from chimera.models.bert import BertConfig
from chimera.models.gpt import GptConfig
from chimera.models.llama import LlamaConfig
from chimera.models.t5 import T5Config

__all__ = ["NameTable", "Origin", "bert_names", "gpt_names", "llama_names", "t5_names"]

_BOTH: Final = ("weight", "bias")


@dataclass(frozen=True, slots=True)
class Origin:
    """Where one of our parameters comes from.

    Attributes:
        names: of the tensors that make it, joined along its first axis.
        transposed: whether each of them is stored in × out, where ours are out × in.
    """

    names: tuple[str, ...]
    transposed: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class NameTable:
    """The names of one model's weights.

    Attributes:
        model: the class of transformers that has them.
        origins: by our name; what several of our layers share stands there once, under its first name.
        ties: our further names of shared parameters, each with the first one.
        twins: their further names of tensors in ``origins``, each with the one there; either may be absent.
        stand_ins: names in ``origins`` that may be absent, each with the one that then takes its place.
        ignored: a pattern of names that hold nothing to learn.
        prefix: what all names begin with but those of ``heads``; files of the model without heads leave it out.
        heads: how the other names begin.
        renamed: older parts of names, each with the present one.
    """

    model: str
    origins: Mapping[str, Origin]
    ties: Mapping[str, str] = field(default_factory=dict)
    twins: Mapping[str, str] = field(default_factory=dict)
    stand_ins: Mapping[str, str] = field(default_factory=dict)
    ignored: str = r"(?!)"
    prefix: str = ""
    heads: tuple[str, ...] = ()
    renamed: tuple[tuple[str, str], ...] = ()

    def standard(self, name: str) -> str | None:
        """Return the present name of a tensor in a file, or None if it is to be ignored."""
        for old, new in self.renamed:
            name = name.replace(old, new)
        if not name.startswith((self.prefix, *self.heads)):
            name = self.prefix + name
        return None if re.fullmatch(self.ignored, name) else name

    @property
    def their_names(self) -> frozenset[str]:
        """The names of all tensors that are needed."""
        return frozenset(name for origin in self.origins.values() for name in origin.names)


def bert_names(config: BertConfig) -> NameTable:
    """Name the weights of ``BertForPreTraining``.

    An untied model of transformers holds a ``cls.predictions.bias`` that it never reads; older files have no other.
    """
    head = config.num_layers + 1
    word, decoder = "bert.embeddings.word_embeddings.weight", "cls.predictions.decoder.weight"
    bias, decoder_bias = "cls.predictions.bias", "cls.predictions.decoder.bias"
    modules = {
        "0.norm": "bert.embeddings.LayerNorm",
        f"{head}.pooler": "bert.pooler.dense",
        f"{head}.nsp": "cls.seq_relationship",
        f"{head}.transform": "cls.predictions.transform.dense",
        f"{head}.transform_norm": "cls.predictions.transform.LayerNorm",
    }
    origins = {
        "0.word.weight": Origin((word,)),
        "0.position.weight": Origin(("bert.embeddings.position_embeddings.weight",)),
        "0.token_type.weight": Origin(("bert.embeddings.token_type_embeddings.weight",)),
        f"{head}.decoder.bias": Origin((bias if config.tied_decoder else decoder_bias,)),
    }
    for index in range(config.num_layers):
        ours, theirs = f"{index + 1}", f"bert.encoder.layer.{index}"
        modules |= {
            f"{ours}.attention.output": f"{theirs}.attention.output.dense",
            f"{ours}.attention_norm": f"{theirs}.attention.output.LayerNorm",
            f"{ours}.feed_forward.expand": f"{theirs}.intermediate.dense",
            f"{ours}.feed_forward.contract": f"{theirs}.output.dense",
            f"{ours}.feed_forward_norm": f"{theirs}.output.LayerNorm",
        }
        for kind in _BOTH:
            parts = (f"{theirs}.attention.self.{part}.{kind}" for part in ("query", "key", "value"))
            origins[f"{ours}.attention.qkv.{kind}"] = Origin(tuple(parts))
    for ours, theirs in modules.items():
        origins |= {f"{ours}.{kind}": Origin((f"{theirs}.{kind}",)) for kind in _BOTH}
    ours = f"{head}.decoder.weight"
    if not config.tied_decoder:
        origins[ours] = Origin((decoder,))
    return NameTable(
        model="BertForPreTraining",
        origins=origins,
        ties={ours: "0.word.weight"} if config.tied_decoder else {},
        twins={decoder: word, decoder_bias: bias} if config.tied_decoder else {},
        stand_ins={} if config.tied_decoder else {decoder_bias: bias},
        ignored=r"bert\.embeddings\.position_ids",
        prefix="bert.",
        heads=("cls.",),
        renamed=(("LayerNorm.gamma", "LayerNorm.weight"), ("LayerNorm.beta", "LayerNorm.bias")),
    )


def gpt_names(config: GptConfig) -> NameTable:
    """Name the weights of ``GPT2LMHeadModel``, whose linear layers are stored in × out."""
    head = config.num_layers + 1
    origins = {
        "0.word.weight": Origin(("transformer.wte.weight",)),
        "0.position.weight": Origin(("transformer.wpe.weight",)),
    }
    for kind in _BOTH:
        origins[f"{head}.norm.{kind}"] = Origin((f"transformer.ln_f.{kind}",))
        for index in range(config.num_layers):
            ours, theirs = f"{index + 1}", f"transformer.h.{index}"
            origins |= {
                f"{ours}.attention_norm.{kind}": Origin((f"{theirs}.ln_1.{kind}",)),
                f"{ours}.feed_forward_norm.{kind}": Origin((f"{theirs}.ln_2.{kind}",)),
            }
            linear = {
                "attention.qkv": "attn.c_attn",
                "attention.output": "attn.c_proj",
                "feed_forward.expand": "mlp.c_fc",
                "feed_forward.contract": "mlp.c_proj",
            }
            for ours_of, theirs_of in linear.items():
                origin = Origin((f"{theirs}.{theirs_of}.{kind}",), transposed=kind == "weight")
                origins[f"{ours}.{ours_of}.{kind}"] = origin
    decoder = _Decoder.of(head, "transformer.wte.weight", tied=config.tied_decoder)
    return NameTable(
        model="GPT2LMHeadModel",
        origins={**origins, **decoder.origins},
        ties=decoder.ties,
        twins=decoder.twins,
        ignored=r"transformer\.h\.\d+\.attn\.(bias|masked_bias)",
        prefix="transformer.",
        heads=("lm_head.",),
    )


def llama_names(config: LlamaConfig) -> NameTable:
    """Name the weights of ``LlamaForCausalLM``."""
    head, word = config.num_layers + 1, "model.embed_tokens.weight"
    origins = {"0.word.weight": Origin((word,)), f"{head}.norm.weight": Origin(("model.norm.weight",))}
    for index in range(config.num_layers):
        theirs = f"model.layers.{index}"
        parts = {
            "attention.qkv": [f"self_attn.{part}_proj" for part in ("q", "k", "v")],
            "attention.output": ["self_attn.o_proj"],
            "attention_norm": ["input_layernorm"],
            "feed_forward.expand": ["mlp.gate_proj", "mlp.up_proj"],
            "feed_forward.contract": ["mlp.down_proj"],
            "feed_forward_norm": ["post_attention_layernorm"],
        }
        for ours, names in parts.items():
            origins[f"{index + 1}.{ours}.weight"] = Origin(tuple(f"{theirs}.{name}.weight" for name in names))
    decoder = _Decoder.of(head, word, tied=config.tied_decoder)
    return NameTable(
        model="LlamaForCausalLM",
        origins={**origins, **decoder.origins},
        ties=decoder.ties,
        twins=decoder.twins,
        ignored=r".*rotary_emb\.inv_freq",
        prefix="model.",
        heads=("lm_head.",),
    )


def t5_names(config: T5Config) -> NameTable:
    """Name the weights of ``T5ForConditionalGeneration``."""
    word, bridge = "shared.weight", config.num_layers + 1
    first_decoder, head = bridge + 1, bridge + 1 + config.num_decoder_blocks
    origins = {
        "0.word.weight": Origin((word,)),
        f"{bridge}.norm.weight": Origin(("encoder.final_layer_norm.weight",)),
        f"{head}.norm.weight": Origin(("decoder.final_layer_norm.weight",)),
    }
    ties = {f"{bridge}.word.weight": "0.word.weight"}
    for stack, first, last in (("encoder", 1, bridge), ("decoder", first_decoder, head)):
        bias = f"{first}.relative_bias.weight"
        origins[bias] = Origin((f"{stack}.block.0.layer.0.SelfAttention.relative_attention_bias.weight",))
        for number in range(first, last):
            theirs = f"{stack}.block.{number - first}.layer"
            parts = _t5_block(config, crosses=stack == "decoder")
            for ours, names in parts.items():
                origins[f"{number}.{ours}.weight"] = Origin(tuple(f"{theirs}.{name}.weight" for name in names))
            if number > first:
                ties[f"{number}.relative_bias.weight"] = bias
    decoder = _Decoder.of(head, word, tied=config.tied_decoder)
    return NameTable(
        model="T5ForConditionalGeneration",
        origins={**origins, **decoder.origins},
        ties={**ties, **decoder.ties},
        twins={**{f"{stack}.embed_tokens.weight": word for stack in ("encoder", "decoder")}, **decoder.twins},
        ignored=r"decoder\.block\.0\.layer\.1\.EncDecAttention\.relative_attention_bias\.weight",
    )


def _t5_block(config: T5Config, *, crosses: bool) -> dict[str, list[str]]:
    """Return the parts of one block; the feed-forward is the last of its sub-layers."""
    of_self, last = "0.SelfAttention", 2 if crosses else 1
    expand = ["wi_0", "wi_1"] if config.gated else ["wi"]
    parts = {
        "attention.qkv": [f"{of_self}.{part}" for part in ("q", "k", "v")],
        "attention.output": [f"{of_self}.o"],
        "attention_norm": ["0.layer_norm"],
        "feed_forward.expand": [f"{last}.DenseReluDense.{name}" for name in expand],
        "feed_forward.contract": [f"{last}.DenseReluDense.wo"],
        "feed_forward_norm": [f"{last}.layer_norm"],
    }
    if crosses:
        of_memory = "1.EncDecAttention"
        parts |= {
            "cross_attention.query": [f"{of_memory}.q"],
            "cross_attention.key_value": [f"{of_memory}.k", f"{of_memory}.v"],
            "cross_attention.output": [f"{of_memory}.o"],
            "cross_attention_norm": ["1.layer_norm"],
        }
    return parts


@dataclass(frozen=True, slots=True)
class _Decoder:
    """What a table says of the decoder's weight: ``lm_head.weight``, or the word embedding under another name."""

    origins: Mapping[str, Origin]
    ties: Mapping[str, str]
    twins: Mapping[str, str]

    @classmethod
    def of(cls, head: int, word: str, *, tied: bool) -> "_Decoder":
        ours, theirs = f"{head}.decoder.weight", "lm_head.weight"
        return cls({}, {ours: "0.word.weight"}, {theirs: word}) if tied else cls({ours: Origin((theirs,))}, {}, {})
