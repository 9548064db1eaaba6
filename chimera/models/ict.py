"""The inverse cloze task's two encoders as one list of layers: a BERT for queries, another for blocks of text.

Lee et al. 2019 (arXiv 1906.00300): a query is to find the block it was taken from, among those of its own micro-batch,
by the product of two vectors, each the first position of an encoder's output. The query's vector travels through the
block's encoder, so the two stand one behind the other in a pipeline. The negatives of a query are the other blocks of
its micro-batch: a larger micro-batch is a harder task, and the loss of another micro-batch size is another loss. Knows
nothing of stages.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from chimera.errors import ConfigError
from chimera.models.bert import BertBlock, BertConfig, BertEmbeddings
from chimera.models.config import Family
from chimera.models.losses import Term, cross_entropy_term
from chimera.models.transformer import Spec
from chimera.tensor.parallel import ALONE, TensorParallel
from chimera.tensor.regions import gather_from_sequence_region

__all__ = [
    "IctBlock",
    "IctBridge",
    "IctConfig",
    "IctHead",
    "IctLoss",
    "IctQueryBlock",
    "IctQueryEmbeddings",
    "ict_layers",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class IctConfig(BertConfig):
    """Sizes of each of the two encoders; see ``BertConfig``. There is no decoder, and nothing to tie to it."""

    family: Family = "ict"
    tied_decoder: bool = False

    def __post_init__(self) -> None:
        BertConfig.__post_init__(self)  # zero-argument super() fails in a dataclass with slots
        if self.tied_decoder:
            raise ConfigError('[model] tied_decoder = true has no meaning for family = "ict"; leave it out')

    @property
    def stacks(self) -> tuple[int, ...]:
        """Blocks of the two encoders."""
        return self.num_layers, self.num_layers


def ict_layers(config: IctConfig, parallel: TensorParallel = ALONE) -> list[nn.Module]:
    """Build query embeddings and blocks, the bridge to the other encoder, its blocks, and the head.

    Where tensor-parallel ranks share a layer, it is this rank's share.

    Raises:
        ConfigError: The ranks cannot share the layers equally.
    """
    return [
        IctQueryEmbeddings(config, parallel),
        *(IctQueryBlock(config, parallel) for _ in range(config.num_layers)),
        IctBridge(config, parallel),
        *(IctBlock(config, parallel) for _ in range(config.num_layers)),
        IctHead(config, parallel),
    ]


class IctQueryEmbeddings(BertEmbeddings):
    """Embeddings of the queries."""

    fields: ClassVar[tuple[str, ...]] = ("query_ids",)

    def forward(self, query_ids: Tensor) -> Tensor:  # type: ignore[override]
        """Embed ``[b, query s]`` token ids as ``[b, query s, h]``, or this rank's part of the sequence."""
        return BertEmbeddings.forward(self, query_ids)


class IctQueryBlock(BertBlock):
    """One block of the queries' encoder."""

    fields: ClassVar[tuple[str, ...]] = ("query_attention_mask",)

    def forward(self, hidden: Tensor, query_attention_mask: Tensor | None = None) -> Tensor:
        """Map ``[b, query s, h]``, or this rank's part, to as much; the mask is 1 at real tokens."""
        return BertBlock.forward(self, hidden, query_attention_mask)


class IctBridge(BertEmbeddings):
    """The end of the queries' encoder, and embeddings of the blocks of text."""

    fields: ClassVar[tuple[str, ...]] = ("block_ids",)

    def forward(self, hidden: Tensor, block_ids: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        """Return the embedded ``[b, s]`` token ids, or this rank's part, and the queries' vectors ``[b, h]``."""
        query = gather_from_sequence_region(hidden, self.parallel)[:, 0]
        return BertEmbeddings.forward(self, block_ids), query


class IctBlock(BertBlock):
    """One block of the encoder of blocks of text, which hands the queries' vectors on."""

    fields: ClassVar[tuple[str, ...]] = ("block_attention_mask",)

    def forward(  # type: ignore[override]
        self, hidden: Tensor, query: Tensor, block_attention_mask: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Map ``[b, s, h]``, or this rank's part, to as much; the mask is 1 at real tokens."""
        return BertBlock.forward(self, hidden, block_attention_mask), query


class IctHead(nn.Module):
    """Both encoders' vectors, to be multiplied; it has no parameters.

    Queries are divided by √h, so that products do not grow with the width.
    """

    def __init__(self, config: IctConfig, parallel: TensorParallel = ALONE) -> None:
        super().__init__()
        self.parallel = parallel
        self.scale = 1.0 / math.sqrt(config.hidden_size)

    def forward(self, hidden: Tensor, query: Tensor) -> tuple[Tensor, Tensor]:
        """Return the vectors of queries and of blocks, ``[b, h]`` each."""
        return query * self.scale, gather_from_sequence_region(hidden, self.parallel)[:, 0]

    def output_spec(self, inputs: tuple[Spec, ...]) -> tuple[Spec, ...]:
        """Return the shapes and types of what comes out."""
        return (inputs[1], inputs[1])


class IctLoss:
    """Cross-entropy of the right block among those of the micro-batch, as the term ``retrieval``.

    Attributes:
        fields: of the micro-batch that it takes.
        terms: names of the terms.
        told_right: the term whose right answers ``num_right`` counts.
    """

    fields: ClassVar[tuple[str, ...]] = ("query_ids",)
    terms: ClassVar[tuple[str, ...]] = ("retrieval",)
    told_right: ClassVar[str | None] = "retrieval"

    def __call__(self, output: tuple[Tensor, Tensor], target: Mapping[str, Tensor]) -> dict[str, Term]:
        """Return ``{"retrieval": (sum, samples)}`` for what ``IctHead`` returns."""
        scores = output[0] @ output[1].T
        assert len(target["query_ids"]) == len(scores), "one query per sample"
        return {"retrieval": cross_entropy_term(scores, torch.arange(len(scores), device=scores.device))}

    def counts(self, target: Mapping[str, Tensor]) -> dict[str, int]:
        """Return the count of the term: samples."""
        return {"retrieval": len(target["query_ids"])}

    def num_right(self, output: tuple[Tensor, Tensor], target: Mapping[str, Tensor]) -> int:
        """Return how many queries score their own block highest."""
        scores = output[0] @ output[1].T
        assert len(target["query_ids"]) == len(scores), "one query per sample"
        return int((scores.argmax(-1) == torch.arange(len(scores), device=scores.device)).sum())
