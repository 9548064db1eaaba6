"""A run's weights from and to transformers' files, without any rank holding the whole model.

Each rank reads what it updates, rows or columns where tensor-parallel ranks share a parameter, and writes one file of
the parameters that it would save in a checkpoint. Names and files are ``chimera.models``' business.
"""

from pathlib import Path

import torch

from chimera.models.config import TransformerConfig
from chimera.models.huggingface import HuggingFaceWeights, finish_huggingface, write_huggingface
from chimera.runtime.pipeline import Pipeline

__all__ = ["export_weights", "import_weights"]


def import_weights(pipe: Pipeline, source: Path | str, model: TransformerConfig) -> None:
    """Put transformers' weights into the pipeline; a collective.

    Args:
        pipe: of the model.
        source: a folder of safetensors files, or one such file.
        model: sizes.

    Raises:
        CheckpointError: the weights are not those of such a model, or a file is damaged.
        ConfigError: transformers has no such model.
    """
    weights = HuggingFaceWeights(source, model)
    for portion in pipe.portions():
        here = weights.part(portion.name, portion.sharding, portion.sharding.part_shape(portion.shape))
        with torch.no_grad():
            portion.parameter.copy_(portion.stretch(here))
    pipe.publish_weights()


def export_weights(pipe: Pipeline, folder: Path | str, model: TransformerConfig) -> None:
    """Write the weights as transformers reads them, a file per rank that has some, and ``config.json``; a collective.

    Raises:
        ConfigError: transformers has no such model.
    """
    groups = pipe.groups
    ours = pipe.collected(lambda portion: portion)
    writes = torch.zeros(groups.size, dtype=torch.float64)
    writes[groups.rank] = float(bool(ours))
    writers = groups.sum_everywhere(writes)
    count, number = int(writers.sum()), int(writers[: groups.rank].sum())
    if ours:
        write_huggingface(folder, ours, model, number=number, count=count)
    groups.sum_everywhere(writes)  # all files are there
    if groups.rank == 0:
        finish_huggingface(folder, model, count=count)
