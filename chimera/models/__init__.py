"""Transformers as lists of layers, which a pipeline cuts over its stages, with their losses and weight names."""

from chimera.models.bert import BertConfig, BertPretrainingLoss, bert_layers
from chimera.models.counting import count_parameters
from chimera.models.gpt import GptConfig, gpt_layers
from chimera.models.ict import IctConfig, IctLoss, ict_layers
from chimera.models.llama import LlamaConfig, llama_layers
from chimera.models.losses import LanguageModelLoss
from chimera.models.t5 import T5Config, t5_layers

__all__ = [
    "BertConfig",
    "BertPretrainingLoss",
    "GptConfig",
    "IctConfig",
    "IctLoss",
    "LanguageModelLoss",
    "LlamaConfig",
    "T5Config",
    "bert_layers",
    "count_parameters",
    "gpt_layers",
    "ict_layers",
    "llama_layers",
    "t5_layers",
]
