"""The families of models that can be trained: for each its options, layers, loss, samples and the costs of its layers.

A new family is a new row; nothing else under ``train`` or ``cli`` names one.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Final, Protocol

from torch import Tensor, nn

from chimera.data import DataConfig
from chimera.data.config import SampleKind
from chimera.models import (
    BertConfig,
    BertPretrainingLoss,
    GptConfig,
    IctConfig,
    IctLoss,
    LanguageModelLoss,
    LlamaConfig,
    T5Config,
    bert_layers,
    gpt_layers,
    ict_layers,
    llama_layers,
    t5_layers,
)
from chimera.models.config import TransformerConfig
from chimera.models.losses import Term
from chimera.tensor.parallel import ALONE, TensorParallel
from chimera.tensor.vocabulary import Vocabulary
from chimera.train.layer_costs import (
    bert_layer_costs,
    gpt_layer_costs,
    ict_layer_costs,
    llama_layer_costs,
    t5_layer_costs,
)

__all__ = ["FAMILIES", "Loss", "ModelFamily", "family_of", "layers_of"]


class Loss(Protocol):
    """A loss with named terms.

    Attributes:
        fields: of the micro-batch that it takes.
        terms: names of the terms; the first one is what a reader looks at.
        told_right: the term whose right answers ``num_right`` counts; None where it counts none.
    """

    fields: ClassVar[tuple[str, ...]]
    terms: ClassVar[tuple[str, ...]]
    told_right: ClassVar[str | None]

    def __call__(self, output: Any, target: Mapping[str, Tensor]) -> dict[str, Term]:
        """Return each term's sum and count."""

    def counts(self, target: Mapping[str, Tensor]) -> dict[str, int]:
        """Return each term's count."""

    def num_right(self, output: Any, target: Mapping[str, Tensor]) -> int:
        """Return how many answers of the term ``told_right`` are right."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFamily:
    """One row of the table.

    Attributes:
        title: as it is written.
        config: the class of the ``[model]`` section.
        layers: from configuration and tensor-parallel ranks to the list of layers.
        loss: from the division of the vocabulary to the loss.
        samples: the kind of samples it learns from.
        costs: from the configuration of model and data to the cost of each layer.
    """

    title: str
    config: type[TransformerConfig]
    layers: Callable[[Any, TensorParallel], list[nn.Module]]
    loss: Callable[[Vocabulary], Loss]
    samples: SampleKind
    costs: Callable[[Any, DataConfig], tuple[float, ...]]


FAMILIES: Final[Mapping[str, ModelFamily]] = {
    "bert": ModelFamily(
        title="BERT",
        config=BertConfig,
        layers=bert_layers,
        loss=BertPretrainingLoss,
        samples="bert",
        costs=bert_layer_costs,
    ),
    "gpt": ModelFamily(
        title="GPT",
        config=GptConfig,
        layers=gpt_layers,
        loss=LanguageModelLoss,
        samples="gpt",
        costs=gpt_layer_costs,
    ),
    "llama": ModelFamily(
        title="Llama",
        config=LlamaConfig,
        layers=llama_layers,
        loss=LanguageModelLoss,
        samples="gpt",
        costs=llama_layer_costs,
    ),
    "t5": ModelFamily(
        title="T5",
        config=T5Config,
        layers=t5_layers,
        loss=LanguageModelLoss,
        samples="t5",
        costs=t5_layer_costs,
    ),
    "ict": ModelFamily(
        title="ICT bi-encoder",
        config=IctConfig,
        layers=ict_layers,
        loss=lambda _: IctLoss(),
        samples="ict",
        costs=ict_layer_costs,
    ),
}
"""By the value of ``[model] family``."""


def family_of(model: TransformerConfig) -> ModelFamily:
    """Return the row of a model."""
    return FAMILIES[model.family]


def layers_of(model: TransformerConfig, parallel: TensorParallel = ALONE) -> Sequence[nn.Module]:
    """Return the layers of a model, or this rank's share of them.

    Raises:
        ConfigError: the ranks cannot share them equally.
    """
    return family_of(model).layers(model, parallel)
