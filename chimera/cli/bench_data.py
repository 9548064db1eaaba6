"""``chimera bench data``: how fast text becomes tokens and tokens become samples here, beside what they are held to.

Rates of two things measured one after the other in the same process are set against each other; a rate on its own says
more about the machine.
"""

import json as json_form
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

import numpy as np
import torch

from chimera.cli.options import Flag
from chimera.cli.terminal import console, print_table, print_wrapped
from chimera.data import GptSamples, IndexedDataset, Samples, bundled_corpus_path, train_wordpiece
from chimera.data.bert_samples import BertSamples
from chimera.data.corpus import decompress, parse_segmented_text, read_bytes
from chimera.data.indexed_documents import open_parts
from chimera.data.packing import pack, shuffled
from chimera.data.prepare import build_dataset, usable_cores
from chimera.data.text.options import TextOptions
from chimera.data.tokenizer import in_batches
from chimera.errors import UsageError

__all__ = ["DataRates", "bench_data", "bert_large_flops", "bert_large_samples_per_s"]

_VOCAB_SIZE: Final = 4096
_TRAINING_SENTENCES: Final = 20_000
_SAMPLES: Final = 2000
_H200_FLOPS: Final = 989.5e12  # dense bf16, NVIDIA's data sheet
_LAYERS, _HIDDEN, _WORDS = 24, 1024, 30522


@dataclass(frozen=True, slots=True)
class DataRates:
    """What was measured.

    Attributes:
        workers: processes that tokenised.
        library_tokens_per_s: of the tokenizers library alone, on its own threads, a thousand sentences at a time.
        build_tokens_per_s: from text on disk to a dataset on disk.
        build_ratio: the second by the first.
        sequence_length: tokens of a sample.
        bert_samples_per_s, gpt_samples_per_s: of one core.
        h200_samples_per_s: what bert-large trains on one H200 at its peak.
        bert_ratio, gpt_ratio: samples made by samples consumed.
        index_sequences: sequences of the index.
        index_s: seconds to shuffle and pack them on one core.
    """

    workers: int
    library_tokens_per_s: float
    build_tokens_per_s: float
    build_ratio: float
    sequence_length: int
    bert_samples_per_s: float
    gpt_samples_per_s: float
    h200_samples_per_s: float
    bert_ratio: float
    gpt_ratio: float
    index_sequences: int
    index_s: float


def bench_data(
    *, sequence_length: int = 512, index_sequences: int = 10_000_000, workers: int | None = None, json: Flag = False
) -> None:
    """Measure tokenising and writing, making samples, and building an index, on the text that comes with chimera.

    Tokenising is set against the tokenizers library's own rate on the same text and cores; samples against what
    bert-large consumes on one H200.

    Example:
        chimera bench data --index-sequences 100000000

    Args:
        sequence_length: tokens of a sample
        index_sequences: sequences of the index to build
        workers: processes that tokenise (default: one per core)
        json: print a JSON document instead
    """
    if index_sequences < 1:
        raise UsageError(f"--index-sequences {index_sequences}; needed: 1 or more")
    torch.set_num_threads(1)
    rates = _measure(sequence_length, index_sequences, workers or usable_cores())
    if json:
        print(json_form.dumps(asdict(rates), indent=1))
        return
    out = console()
    rows = [
        _row(
            "tokenise and write, tokens/s", rates.build_tokens_per_s, "tokenizers library", rates.library_tokens_per_s
        ),
        _row("BERT samples/s, one core", rates.bert_samples_per_s, "bert-large, one H200", rates.h200_samples_per_s),
        _row("GPT samples/s, one core", rates.gpt_samples_per_s, "bert-large, one H200", rates.h200_samples_per_s),
    ]
    print_table(out, ["", "here", "beside", "its rate", "ratio"], rows)
    out.print()
    print_wrapped(
        out,
        f"An index of {rates.index_sequences:,} sequences, shuffled and packed on one core: {rates.index_s:.1f} s. "
        f"An H200 at its peak of {_H200_FLOPS / 1e12:.0f} TFLOP/s trains {rates.h200_samples_per_s:,.0f} sequences of "
        f"{rates.sequence_length} tokens a second, {bert_large_flops(rates.sequence_length) / 1e12:.2f} TFLOP each.",
    )


def bert_large_flops(sequence_length: int) -> float:
    """Return the operations of one sequence's forward and backward: 72·l·s·h²·(1 + s/6h + V/12hl).

    The formula is that of Korthikanti et al. 2022, appendix A, without recompute; bert-large has l = 24, h = 1024 and
    V = 30,522. All positions are decoded, which overstates what BERT's masked positions take.

    >>> round(bert_large_flops(512) / 1e12, 3)
    1.107
    """
    s, h, layers = sequence_length, _HIDDEN, _LAYERS
    return 72.0 * layers * s * h * h * (1 + s / (6 * h) + _WORDS / (12 * h * layers))


def bert_large_samples_per_s(sequence_length: int) -> float:
    """Return the sequences that one H200 would train a second if it ran at its peak, which no run does."""
    return _H200_FLOPS / bert_large_flops(sequence_length)


def _measure(sequence_length: int, index_sequences: int, workers: int) -> DataRates:
    path = bundled_corpus_path()
    text = decompress(read_bytes(path), name=str(path))
    sentences = [s for document in parse_segmented_text(text, name=str(path)) for s in document]
    tokenizer = train_wordpiece(sentences[:_TRAINING_SENTENCES], vocab_size=_VOCAB_SIZE)
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "text.txt"
        source.write_bytes(text)

        def build() -> None:
            build_dataset(
                [source],
                Path(folder) / "set",
                tokenizer=tokenizer,
                options=TextOptions(),
                workers=workers,
                overwrite=True,
            )

        build()  # the first one starts the server that processes are forked from
        build_s = _seconds(build)
        library_s = _seconds(lambda: [tokenizer.encode(some) for some in in_batches(sentences)])
        dataset = IndexedDataset(Path(folder) / "set")
        num_tokens = len(dataset.tokens)
        (part,) = open_parts(dataset, (1.0,), seed=0, cache_dir=Path(folder))
        bert = BertSamples(part.documents, sequence_length=sequence_length, seed=0, vocabulary=tokenizer.vocabulary)
        gpt = GptSamples(part.documents, sequence_length=sequence_length, seed=0)
        bert_rate, gpt_rate = _rate(bert), _rate(gpt)
    h200 = bert_large_samples_per_s(sequence_length)
    return DataRates(
        workers=workers,
        library_tokens_per_s=num_tokens / library_s,
        build_tokens_per_s=num_tokens / build_s,
        build_ratio=library_s / build_s,
        sequence_length=sequence_length,
        bert_samples_per_s=bert_rate,
        gpt_samples_per_s=gpt_rate,
        h200_samples_per_s=h200,
        bert_ratio=bert_rate / h200,
        gpt_ratio=gpt_rate / h200,
        index_sequences=index_sequences,
        index_s=_index_seconds(index_sequences, sequence_length),
    )


def _index_seconds(count: int, sequence_length: int) -> float:
    """Time the index of documents of a hundred tokens, after one that loads the compiled code."""

    def build(size: int) -> None:
        lengths = np.full(size, 100, np.int64)
        pack(
            lengths,
            shuffled(size, 1),
            max(1, (100 * size - 1) // sequence_length),
            min(sequence_length, 100 * size - 1),
        )

    build(1000)
    return _seconds(lambda: build(count))


def _rate(samples: Samples) -> float:
    samples[0]
    return _SAMPLES / _seconds(lambda: [samples[index] for index in range(_SAMPLES)])


def _seconds(call: Callable[[], object]) -> float:
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


def _row(name: str, here: float, beside: str, its: float) -> list[str]:
    return [name, f"{here:,.0f}", beside, f"{its:,.0f}", f"{here / its:.2f}"]
