"""Corpora, indexed datasets, tokenizers, samples and micro-batches.

``build_data(DataConfig())`` is the whole way from text to samples; the modules below it are the steps. Formats and
rules are described in ``docs/data.md``.
"""

from chimera.data.bert_samples import IGNORED_LABEL, BertSamples
from chimera.data.build import PretrainingData, build_data
from chimera.data.config import DataConfig
from chimera.data.corpus import bundled_corpus_path, read_segmented_text, split_documents
from chimera.data.gpt_samples import GptSamples
from chimera.data.ict_samples import IctSamples
from chimera.data.indexed import IndexedDataset, IndexedWriter, merge_datasets
from chimera.data.loader import Loader
from chimera.data.masking import Words
from chimera.data.prepare import build_dataset
from chimera.data.ramp import BatchRamp
from chimera.data.samples import BlendedSamples, Samples
from chimera.data.source import Microbatch, MicrobatchSource, evaluation_microbatches
from chimera.data.t5_samples import SpanVocabulary, T5Samples
from chimera.data.text_tokenizer import TextTokenizer
from chimera.data.tokenizer import Vocabulary, WordPiece, train_wordpiece
from chimera.data.tokenizer_files import read_tokenizer
from chimera.data.tokens import TokenizedDocuments, tokenize_documents
from chimera.data.unigram import token_counts, unigram_cross_entropy, unigram_entropy

__all__ = [
    "IGNORED_LABEL",
    "BatchRamp",
    "BertSamples",
    "BlendedSamples",
    "DataConfig",
    "GptSamples",
    "IctSamples",
    "IndexedDataset",
    "IndexedWriter",
    "Loader",
    "Microbatch",
    "MicrobatchSource",
    "PretrainingData",
    "Samples",
    "SpanVocabulary",
    "T5Samples",
    "TextTokenizer",
    "TokenizedDocuments",
    "Vocabulary",
    "WordPiece",
    "Words",
    "build_data",
    "build_dataset",
    "bundled_corpus_path",
    "evaluation_microbatches",
    "merge_datasets",
    "read_segmented_text",
    "read_tokenizer",
    "split_documents",
    "token_counts",
    "tokenize_documents",
    "train_wordpiece",
    "unigram_cross_entropy",
    "unigram_entropy",
]
