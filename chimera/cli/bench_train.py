"""``chimera bench train``: how long a training step of one process takes here, beside transformers' modules.

Both sides have the same sizes, inputs, labels, loss and optimizer, and take turns step by step, so that what else goes
on here slows both. On a GPU it measures the share of the peak that a stack of GPT blocks reaches in bf16 instead.
"""

import json as json_form
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from importlib import import_module
from typing import Annotated, Any, Final, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional
from tyro.conf import arg

from chimera.cli.options import Flag
from chimera.cli.terminal import console, print_table, print_wrapped
from chimera.errors import UsageError
from chimera.models import BertConfig, GptConfig
from chimera.models.config import TransformerConfig
from chimera.models.gpt import GptBlock
from chimera.models.huggingface_models import huggingface_settings
from chimera.models.losses import IGNORED_LABEL
from chimera.plan.hardware_file import read_device
from chimera.runtime.pipeline import Pipeline
from chimera.schedules import build_schedule
from chimera.tensor.vocabulary import Vocabulary
from chimera.train.families import family_of, layers_of

__all__ = ["BlockRow", "TrainRow", "bench_train", "measure_blocks", "measure_model"]

_MASKED: Final = 0.15
_WARM_UP: Final = 2
_DEVICES: Final = {"H200": "h200", "H100": "h100", "A100": "a100-80", "B200": "b200"}
"""Hardware files, which say what the peak is, by a part of the device's name."""

_Step = Callable[[], None]


@dataclass(frozen=True, slots=True)
class TrainRow:
    """One model's figures.

    Attributes:
        model: its shape.
        ours_s, transformers_s: median step.
        ratio: speed of ours over theirs; above 1, ours is faster.
        runs: steps of each.
    """

    model: str
    ours_s: float
    transformers_s: float
    ratio: float
    runs: int


@dataclass(frozen=True, slots=True)
class BlockRow:
    """A stack of blocks on a GPU.

    Attributes:
        device: its name.
        tflops: model FLOP/s reached, in 10¹² (72·l·s·h²·(1 + s/6h) per sequence, recompute not counted).
        utilisation: as a share of the device's peak; None where that is not known here.
        step_s: median forward and backward.
    """

    device: str
    tflops: float
    utilisation: float | None
    step_s: float


def bench_train(
    *,
    model: Annotated[Literal["gpt2", "bert", "both"], arg(help_behavior_hint="(default: both)")] = "both",
    samples: int = 1,
    length: int = 128,
    dropout: float = 0.0,
    runs: int = 5,
    threads: int | None = None,
    json: Flag = False,
) -> None:
    """Time a training step of GPT-2 124M and BERT-base shapes on one process, ours and transformers' by turns.

    Ours runs through the pipeline with one rank, as training does. Where there is a GPU, a stack of eight GPT blocks of
    width 4,096 is measured in bf16 on 4,096 tokens instead.

    Example:
        chimera bench train --model gpt2 --length 64 --runs 3

    Args:
        model: which of the two
        samples: in a step
        length: tokens of a sample
        dropout: probability everywhere, on both sides
        runs: measured steps of each side; medians are printed
        threads: of torch; as many as there are cores where not given
        json: print a JSON document instead
    """
    if min(samples, runs) < 1 or not 2 <= length <= 512 or not 0.0 <= dropout < 1.0:
        raise UsageError("--samples and --runs have to be at least 1, --length in 2…512, --dropout in [0, 1)")
    if threads is not None:
        torch.set_num_threads(threads)
    rows: list[Any]
    if torch.cuda.is_available():
        rows = [measure_blocks(torch.device("cuda", torch.cuda.current_device()), runs=runs)]
    else:
        names = ["gpt2", "bert"] if model == "both" else [model]
        shape = {"samples": samples, "length": length, "runs": runs}
        rows = [measure_model(name, _config(name, dropout), **shape) for name in names]
    if json:
        print(json_form.dumps([asdict(row) for row in rows], indent=1))
        return
    out = console()
    print_table(out, *_table(rows))
    print_wrapped(out, _LEGEND[type(rows[0])])


def measure_blocks(
    device: torch.device, *, runs: int, width: int = 4096, tokens: int = 4096, num_layers: int = 8
) -> BlockRow:
    """Time forward and backward of GPT blocks in bf16 on one sequence."""
    config = GptConfig(
        vocab_size=128, hidden_size=width, num_layers=num_layers, num_heads=width // 128, max_positions=tokens
    )
    with device:
        blocks = nn.Sequential(*(GptBlock(config) for _ in range(num_layers))).to(torch.bfloat16).eval()
        hidden = torch.randn(1, tokens, width, dtype=torch.bfloat16, requires_grad=True)

    def step() -> None:
        blocks(hidden).sum().backward()
        torch.cuda.synchronize(device)

    for _ in range(_WARM_UP):
        step()
    step_s = statistics.median(_timed(step) for _ in range(runs))
    flops = 72 * num_layers * tokens * width**2 * (1 + tokens / (6 * width))
    name = torch.cuda.get_device_name(device)
    known = next((file for part, file in _DEVICES.items() if part in name), None)
    peak = None if known is None else read_device(known).matrix_flops_per_s["bf16"]
    reached = flops / step_s
    return BlockRow(name, reached / 1e12, None if peak is None else reached / peak, step_s)


def _config(name: str, dropout: float) -> TransformerConfig:
    sizes = {"hidden_size": 768, "num_layers": 12, "num_heads": 12, "dropout": dropout, "attention_dropout": dropout}
    if name == "gpt2":
        return GptConfig(vocab_size=50257, **sizes)  # type: ignore[arg-type]
    return BertConfig(vocab_size=30522, **sizes)  # type: ignore[arg-type]


def measure_model(name: str, config: TransformerConfig, *, samples: int, length: int, runs: int) -> TrainRow:
    """Time steps of a GPT or a BERT, ours and transformers' by turns.

    Raises:
        UsageError: transformers is not installed.
    """
    batch = _batch(config, samples, length)
    ours, theirs = _our_step(config, batch), _their_step(config, batch)
    for _ in range(_WARM_UP):
        ours()
        theirs()
    times = [(_timed(ours), _timed(theirs)) for _ in range(runs)]
    ours_s, theirs_s = (statistics.median(side) for side in zip(*times, strict=True))
    return TrainRow(name, ours_s, theirs_s, theirs_s / ours_s, runs)


def _batch(config: TransformerConfig, samples: int, length: int) -> dict[str, Tensor]:
    ids, labels = torch.randint(config.vocab_size, (2, samples, length))
    if isinstance(config, GptConfig):
        return {"input_ids": ids, "labels": labels}
    masked = labels.masked_fill(torch.rand(labels.shape) > _MASKED, IGNORED_LABEL)
    masked[:, 0] = labels[:, 0]
    return {
        "input_ids": ids,
        "token_type_ids": torch.zeros_like(ids),
        "attention_mask": torch.ones_like(ids),
        "mlm_labels": masked,
        "nsp_labels": torch.zeros(samples, dtype=torch.int64),
    }


def _our_step(config: TransformerConfig, batch: dict[str, Tensor]) -> _Step:
    with torch.device("meta"):
        layers = layers_of(config)
    loss = family_of(config).loss(Vocabulary(config.vocab_size))
    pipe = Pipeline(layers, build_schedule("gpipe", ranks=1, microbatches=1), loss)
    optimizer = torch.optim.AdamW([parameter for _, parameter in pipe.optimizer_parameters()], lr=1e-4, fused=True)

    def step() -> None:
        pipe.step([batch], [batch])
        optimizer.step()
        pipe.publish_weights()

    return step


def _their_step(config: TransformerConfig, batch: dict[str, Tensor]) -> _Step:
    try:
        transformers: Any = import_module("transformers")
    except ImportError:
        raise UsageError(
            "bench train compares with transformers, which is not installed; install the dependency group parity"
        ) from None
    settings = huggingface_settings(config)
    made = transformers.AutoConfig.for_model(settings.pop("model_type"), **settings)
    is_gpt = isinstance(config, GptConfig)
    model = (transformers.GPT2LMHeadModel if is_gpt else transformers.BertForPreTraining)(made).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)

    def step() -> None:
        optimizer.zero_grad()
        if is_gpt:
            logits = model(batch["input_ids"], use_cache=False).logits
            loss = functional.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())
        else:
            fields = {name: batch[name] for name in ("input_ids", "token_type_ids", "attention_mask")}
            loss = model(**fields, labels=batch["mlm_labels"], next_sentence_label=batch["nsp_labels"]).loss
        torch.autograd.backward(loss)
        optimizer.step()

    return step


def _timed(step: _Step) -> float:
    began = time.perf_counter()
    step()
    return time.perf_counter() - began


_LEGEND: Final[dict[type, str]] = {
    TrainRow: "Medians of steps by turns; ratio is transformers' time over ours: above 1, ours is faster.",
    BlockRow: "Model FLOP/s of forward and backward; the share is of the device's dense bf16 peak.",
}


def _table(rows: list[Any]) -> tuple[list[str], list[list[str]]]:
    if isinstance(rows[0], TrainRow):
        headings = ["model", "ours s", "transformers s", "ratio", "steps"]
        return headings, [
            [row.model, f"{row.ours_s:.3f}", f"{row.transformers_s:.3f}", f"{row.ratio:.3f}", str(row.runs)]
            for row in rows
        ]
    shares = ["-" if row.utilisation is None else f"{row.utilisation:.1%}" for row in rows]
    return ["device", "TFLOP/s", "of peak", "step s"], [
        [row.device, f"{row.tflops:.1f}", share, f"{row.step_s:.4f}"] for row, share in zip(rows, shares, strict=True)
    ]
