"""Corpora, tokenizers, BERT samples and micro-batches.

``build_data(DataConfig())`` is the whole way from text to samples; the modules below it are the steps. Formats and
rules are described in ``docs/data.md``.
"""

from chimera.data.bert_samples import IGNORED_LABEL, BertSamples
from chimera.data.build import PretrainingData, build_data
from chimera.data.config import DataConfig
from chimera.data.corpus import bundled_corpus_path, read_segmented_text, split_documents
from chimera.data.source import Microbatch, MicrobatchSource, evaluation_microbatches
from chimera.data.tokenizer import Vocabulary, WordPiece, train_wordpiece
from chimera.data.tokens import TokenizedDocuments, tokenize_documents
from chimera.data.unigram import unigram_cross_entropy, unigram_entropy

__all__ = [
    "IGNORED_LABEL",
    "BertSamples",
    "DataConfig",
    "Microbatch",
    "MicrobatchSource",
    "PretrainingData",
    "TokenizedDocuments",
    "Vocabulary",
    "WordPiece",
    "build_data",
    "bundled_corpus_path",
    "evaluation_microbatches",
    "read_segmented_text",
    "split_documents",
    "tokenize_documents",
    "train_wordpiece",
    "unigram_cross_entropy",
    "unigram_entropy",
]
