"""Transformers as lists of layers, which a pipeline cuts over its stages, with their losses and weight names."""

from chimera.models.bert import BertConfig, BertPretrainingLoss, bert_layers
from chimera.models.counting import count_parameters
from chimera.models.gpt import GptConfig, GptLoss, gpt_layers

__all__ = [
    "BertConfig",
    "BertPretrainingLoss",
    "GptConfig",
    "GptLoss",
    "bert_layers",
    "count_parameters",
    "gpt_layers",
]
