"""Small models of every family, transformers' counterparts of them, and how either computes word logits."""

import importlib
import warnings

import pytest
import torch
from torch import nn

from chimera.models.bert import BertConfig, bert_layers
from chimera.models.gpt import GptConfig, gpt_layers
from chimera.models.huggingface_models import huggingface_settings
from chimera.models.llama import LlamaConfig, llama_layers
from chimera.models.t5 import T5Config, t5_layers

WORDS = 60
SIZES = {"vocab_size": WORDS, "hidden_size": 32, "num_heads": 4, "num_layers": 3, "intermediate_size": 48}
LLAMA_3 = {"rope_theta": 500.0, "rope_factor": 8.0, "rope_original_positions": 16, "num_key_value_heads": 2}
CONFIGS = {
    "bert": BertConfig(**SIZES, max_positions=20),
    "bert-untied": BertConfig(**SIZES, max_positions=20, tied_decoder=False),
    "gpt": GptConfig(**SIZES, max_positions=20),
    "gpt-untied": GptConfig(**SIZES, max_positions=20, tied_decoder=False),
    "llama-2": LlamaConfig(**SIZES, max_positions=40),
    "llama-3": LlamaConfig(**SIZES, max_positions=40, **LLAMA_3),
    "llama-3-tied": LlamaConfig(**SIZES, max_positions=40, **LLAMA_3, tied_decoder=True),
    "t5": T5Config(**SIZES, num_decoder_layers=2, relative_buckets=8, relative_max_distance=12),
    "t5-1.1": T5Config(**SIZES, key_value_size=12, gated=True, tied_decoder=False),
}
LAYERS = {BertConfig: bert_layers, GptConfig: gpt_layers, LlamaConfig: llama_layers, T5Config: t5_layers}


def import_transformers():
    """Return the package, or skip the test."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what transformers says about itself on import is not ours
        try:
            return importlib.import_module("transformers")
        except ModuleNotFoundError:
            pytest.skip("transformers is not installed (dependency group 'parity')")


def make_layers(config, **options):
    return LAYERS[type(config)](config, **options)


def make_batch(config, length=20):
    """Return the fields that a model of this family asks for, some of the last words being padding where it can be."""
    ids = torch.randint(1, WORDS, (4, length))
    batch = {"input_ids": ids}
    if isinstance(config, BertConfig | T5Config):
        batch["attention_mask"] = torch.ones_like(ids)
        batch["attention_mask"][1, 12:] = 0
    if isinstance(config, BertConfig):
        batch |= {"token_type_ids": torch.randint(2, ids.shape), "mlm_labels": None}
    if isinstance(config, T5Config):
        batch["decoder_input_ids"] = torch.randint(1, WORDS, (4, 14))
    return batch


def run(layers, batch):
    """Call the layers one after another, each on what the one before gave and the fields it names."""
    tensors = ()
    for layer in layers:
        output = layer(*tensors, **{name: batch[name] for name in getattr(layer, "fields", ())})
        tensors = output if isinstance(output, tuple) else (output,)
    return tensors[0]


def their_logits(model, batch):
    output = model(**{name: tensor for name, tensor in batch.items() if name != "mlm_labels"})
    return output.prediction_logits if hasattr(output, "prediction_logits") else output.logits


def peer(transformers, config):
    """Return transformers' model of these sizes with weights large enough that any mix-up shows."""
    settings = huggingface_settings(config)
    made = transformers.AutoConfig.for_model(settings.pop("model_type"), **settings)
    name = {
        BertConfig: "BertForPreTraining",
        GptConfig: "GPT2LMHeadModel",
        LlamaConfig: "LlamaForCausalLM",
        T5Config: "T5ForConditionalGeneration",
    }[type(config)]
    model = getattr(transformers, name)(made)
    if isinstance(config, T5Config) and not config.tied_decoder:
        # Newer versions tie the head whatever the settings say, which T5 1.1's own weights are not.
        model.lm_head.weight = nn.Parameter(torch.randn_like(model.lm_head.weight))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.2)
    return model.eval()
