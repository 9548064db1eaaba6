"""Which of our models transformers has: their layers, the names of their weights there, and their ``config.json``."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from torch import nn

from chimera.errors import ConfigError
from chimera.models.bert import BertConfig, bert_layers
from chimera.models.config import TransformerConfig
from chimera.models.gpt import GptConfig, gpt_layers
from chimera.models.llama import LlamaConfig, llama_layers
from chimera.models.t5 import T5Config, t5_layers
from chimera.models.weight_names import NameTable, bert_names, gpt_names, llama_names, t5_names

__all__ = ["HuggingFaceModel", "huggingface_model", "huggingface_settings"]


@dataclass(frozen=True, slots=True)
class HuggingFaceModel:
    """One row of the table.

    Attributes:
        layers: from the configuration to the list of layers.
        names: from the configuration to the names of the weights.
        settings: from the configuration to the options that only this model has.
    """

    layers: Callable[[Any], list[nn.Module]]
    names: Callable[[Any], NameTable]
    settings: Callable[[Any], dict[str, Any]]


def huggingface_model(config: TransformerConfig) -> HuggingFaceModel:
    """Return the row of a model.

    Raises:
        ConfigError: transformers has no such model.
    """
    row = _MODELS.get(type(config))
    if row is None:
        raise ConfigError(
            f"transformers has no model of the kind {type(config).__name__}; its weights are in this project's own "
            "checkpoints alone"
        )
    return row


def huggingface_settings(config: TransformerConfig) -> dict[str, Any]:
    """Return the options of transformers' model, by its names.

    Raises:
        ConfigError: transformers has no such model.
    """
    shared = {
        "vocab_size": config.vocab_size,
        "initializer_range": config.initializer_range,
        "tie_word_embeddings": config.tied_decoder,
    }
    return shared | huggingface_model(config).settings(config)


def _bert(config: BertConfig) -> dict[str, Any]:
    return {
        "model_type": "bert",
        "hidden_size": config.hidden_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "intermediate_size": config.feed_forward_size,
        "max_position_embeddings": config.max_positions,
        "type_vocab_size": config.type_vocab_size,
        "hidden_act": "gelu",
        "hidden_dropout_prob": config.dropout,
        "attention_probs_dropout_prob": config.attention_dropout,
        "layer_norm_eps": config.layer_norm_eps,
    }


def _gpt(config: GptConfig) -> dict[str, Any]:
    return {
        "model_type": "gpt2",
        "n_embd": config.hidden_size,
        "n_layer": config.num_layers,
        "n_head": config.num_heads,
        "n_inner": config.feed_forward_size,
        "n_positions": config.max_positions,
        "activation_function": "gelu_new",
        "embd_pdrop": config.dropout,
        "resid_pdrop": config.dropout,
        "attn_pdrop": config.attention_dropout,
        "layer_norm_epsilon": config.layer_norm_eps,
    }


def _llama(config: LlamaConfig) -> dict[str, Any]:
    settings = {
        "model_type": "llama",
        "hidden_size": config.hidden_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.key_value_heads,
        "intermediate_size": config.feed_forward_size,
        "max_position_embeddings": config.max_positions,
        "hidden_act": "silu",
        "attention_dropout": config.attention_dropout,
        "rms_norm_eps": config.layer_norm_eps,
        "rope_theta": config.rope_theta,
    }
    if config.rope_factor is not None:
        settings["rope_scaling"] = {
            "rope_type": "llama3",
            "factor": config.rope_factor,
            "low_freq_factor": config.rope_low_frequency_factor,
            "high_freq_factor": config.rope_high_frequency_factor,
            "original_max_position_embeddings": config.rope_original_positions,
        }
    return settings


def _t5(config: T5Config) -> dict[str, Any]:
    return {
        "model_type": "t5",
        "d_model": config.hidden_size,
        "d_kv": config.head_size,
        "d_ff": config.feed_forward_size,
        "num_layers": config.num_layers,
        "num_decoder_layers": config.num_decoder_blocks,
        "num_heads": config.num_heads,
        "relative_attention_num_buckets": config.relative_buckets,
        "relative_attention_max_distance": config.relative_max_distance,
        "feed_forward_proj": "gated-gelu" if config.gated else "relu",
        "dropout_rate": config.dropout,
        "layer_norm_epsilon": config.layer_norm_eps,
        "initializer_factor": config.initializer_range,
    }


_MODELS: Final[Mapping[type[TransformerConfig], HuggingFaceModel]] = {
    BertConfig: HuggingFaceModel(bert_layers, bert_names, _bert),
    GptConfig: HuggingFaceModel(gpt_layers, gpt_names, _gpt),
    LlamaConfig: HuggingFaceModel(llama_layers, llama_names, _llama),
    T5Config: HuggingFaceModel(t5_layers, t5_names, _t5),
}
