"""What the runtime's tests run: models, micro-batches that all differ, schedules by name, and one rank of a run.

Everything is a pure function of names and numbers, so that the ranks and the serial oracle build the same from plain
arguments. Functions whose first argument is ``group`` run on a rank of the pool.
"""

import functools
from itertools import pairwise

import numpy as np
import torch
from torch import nn
from torch.nn import functional

from chimera.ir.text_form import from_text
from chimera.models.bert import BertConfig, BertPretrainingLoss, bert_layers
from chimera.models.gpt import GptConfig, gpt_layers
from chimera.models.ict import IctConfig, IctLoss, ict_layers
from chimera.models.llama import LlamaConfig, llama_layers
from chimera.models.losses import LanguageModelLoss
from chimera.models.t5 import T5Config, t5_layers
from chimera.runtime.pipeline import Pipeline
from chimera.schedules import build_schedule
from chimera.tensor.parallel import ALONE, TensorParallel
from chimera.tensor.sharding import sharding_of
from chimera.tensor.vocabulary import Vocabulary

SEED = 11
NUM_LAYERS = 9
IGNORED = -100
# The gradient of attention's key bias is 0 but for rounding, of about 1e-17. A default epsilon of 1e-8 would turn that
# into steps of 1e-9 learning rates, which differ between any two orders of summation.
ADAMW = {"lr": 1e-2, "eps": 1e-6}
# Small, so that every stage has several buckets, and some parameter is larger than one.
BUCKET_BYTES = 400

# Hand-written schedules, each with its own number of ranks and micro-batches.
TEXTS = {
    # A V: stages 1 and 2 hand over on one rank, stages 0 and 3 share the other.
    "text-v": """
        routes: 0 1 1 0
        0F0 0F1 3F0 3B0 0F2 3F1 3B1 0B0 3F2 3B2 0B1 0B2
        1F0 2F0 1F1 2F1 2B0 1B0 1F2 2F2 2B1 1B1 2B2 1B2
    """,
    # Two routes in opposite directions with unequal shares; the first one starts on the last rank.
    "text-crossed": """
        routes: 1 0 | 0 1
        microbatches: 0 1 1
        0F1 1F0 1B0 0F2 0B1 0B2
        0F0 1F1 1B1 1F2 1B2 0B0
    """,
    # Micro-batch 0 follows the second route.
    "text-late": """
        routes: 0 1 | 1 0
        microbatches: 1 0
        0F1 1F0 1B0 0B1
        0F0 1F1 1B1 0B0
    """,
    # One copy of stage 0, two of each other stage.
    "text-forked": """
        routes: 0 1 2 | 0 2 1
        microbatches: 0 1 0 1
        0F0 0F1 0F2 0F3 0B0 0B1 0B2 0B3
        1F0 2F1 2B1 1F2 2F3 2B3 1B0 1B2
        1F1 2F0 2B0 1F3 2F2 2B2 1B1 1B3
    """,
    # Lowered by hand, backwards in an order of their own.
    "text-lowered": """
        routes: 0 1
        0F0 0SEND_F0 0F1 0SEND_F1 0F2 0SEND_F2 0RECV_B2 0B2 0RECV_B0 0B0 0RECV_B1 0B1 0REDUCE_GRAD
        1RECV_F0 1F0 1RECV_F1 1F1 1RECV_F2 1F2 1B2 1SEND_B2 1B0 1SEND_B0 1B1 1SEND_B1 1REDUCE_GRAD
    """,
    # The first stage on the last rank.
    "text-back": """
        routes: 1 0
        1F0 1B0 1F1 1B1
        0F0 0F1 0B0 0B1
    """,
    # Pairs of a forward and a backward.
    "text-pairs": """
        routes: 0 1
        0F0 0F1 (0F2;0B0)OVERLAP_F_B (0F3;0B1)OVERLAP_F_B 0B2 0B3
        1F0 (1F1;1B0)OVERLAP_F_B (1F2;1B1)OVERLAP_F_B (1F3;1B2)OVERLAP_F_B 1B3
    """,
    # Pairs of two stages of a V, with B and with I, beside single ones.
    "text-pairs-split": """
        routes: 0 1 1 0
        0F0 0F1 3F0 (0F2;3I0)OVERLAP_F_B 3W0 3F1 3B1 3F2 (0F3;3B2)OVERLAP_F_B 0I0 0W0 0B1 0B2 3F3 3I3 3W3 0B3
        1F0 2F0 1F1 2F1 2B0 (1F2;2B1)OVERLAP_F_B 1B0 (2F2;1I1)OVERLAP_F_B 1W1 2B2 1B2 1F3 2F3 2I3 1B3 2W3
    """,
}


# Schedules with I and W in place of B, or with both; on one route and on two, with one stage per rank and with more.
SPLIT = ("zb-h1", "interleaved-zb", "zb-v", "v-half", "bitpipe")


@functools.cache
def make_schedule(name, ranks, microbatches):
    """Build a schedule from a name such as ``1f1b``, ``chimera-2-halve`` (pairs, unit) or ``text-v``."""
    if name in TEXTS:
        return from_text(TEXTS[name], name)
    if name.startswith("chimera-") and name != "chimera-zb":
        _, pairs, unit = name.split("-")
        return build_schedule("chimera", ranks=ranks, microbatches=microbatches, pairs=int(pairs), unit=unit)
    chunks = {"chunks": 2} if name == "interleaved" else {}
    return build_schedule(name, ranks=ranks, microbatches=microbatches, **chunks)


# Models


class Split(nn.Module):
    """First layer of the tuple model: features to a float, an integer and another float tensor."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(5, 6)

    def forward(self, features):
        hidden = self.linear(features)
        return hidden, (features[..., 0] > 0).long(), torch.sigmoid(features[..., :1])


class Mix(nn.Module):
    """Uses all three tensors of the tuple and changes each."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.table = nn.Embedding(4, 6)

    def forward(self, hidden, index, gate):
        mixed = functional.dropout(torch.tanh(self.linear(hidden)), 0.2, self.training) + self.table(index) * gate
        return mixed, (index + 1) % 4, torch.sigmoid(hidden[..., 1:2] + gate)


class PairedMix(Mix):
    """A ``Mix`` whose class runs a forward and a backward together: half the one within the middle of the other.

    ``together`` counts how often it has, in this process.
    """

    together = 0

    def forward(self, hidden, index, gate):
        return self.second(self.linear(hidden), hidden, index, gate)

    def second(self, inner, hidden, index, gate):
        mixed = functional.dropout(torch.tanh(inner), 0.2, self.training) + self.table(index) * gate
        mixed.inner = inner
        return mixed, (index + 1) % 4, torch.sigmoid(hidden[..., 1:2] + gate)

    @classmethod
    def overlapped_forward_backward(cls, forward, backward):
        cls.together += 1
        graph, given = torch.is_grad_enabled(), []
        inner = forward.layer.linear(forward.inputs[0])

        def in_the_middle(gradient):
            with torch.set_grad_enabled(graph):
                given.append(forward.layer.second(inner, *forward.inputs))

        hook = backward.outputs[0].inner.register_hook(in_the_middle)
        backward.run()
        hook.remove()
        return given.pop()


class Rotate(nn.Module):
    """Has no parameters, and hands an input through."""

    def forward(self, hidden, index, gate):
        return hidden.roll(1, -1), index, gate


class Join(nn.Module):
    """Last layer of the tuple model: logits of four classes, and one value per position."""

    def __init__(self):
        super().__init__()
        self.classes = nn.Linear(6, 4)
        self.value = nn.Linear(6, 1)

    def forward(self, hidden, index, gate):
        return self.classes(hidden), self.value(hidden)[..., 0] * gate[..., 0] + index


def tuple_loss(output, target):
    """Cross-entropy over labelled positions and absolute error over weighted ones: counts differ between terms."""
    logits, value = output
    labels, weight = target["labels"], target["weight"]
    classes = functional.cross_entropy(logits.flatten(0, -2), labels.flatten(), ignore_index=IGNORED, reduction="sum")
    return {
        "class": (classes, int((labels != IGNORED).sum())),
        "value": (((value - target["value"]).abs() * weight).sum(), float(weight.sum())),
    }


def bert_config():
    return BertConfig(
        vocab_size=19,
        hidden_size=8,
        num_layers=NUM_LAYERS - 2,
        num_heads=2,
        intermediate_size=12,
        max_positions=10,
        dropout=0.1,
        attention_dropout=0.2,
        initializer_range=0.3,
    )


# Models that tensor-parallel ranks share, drawn by the runtime. Over two ranks their 300 words are 256 and 44, over
# four 128, 128, 44 and none.
CUT_WORDS = 300
_CUT_SIZES = {
    "vocab_size": CUT_WORDS,
    "hidden_size": 8,
    "num_heads": 4,
    "intermediate_size": 12,
    "max_positions": 10,
    "dropout": 0.1,
    "attention_dropout": 0.2,
}


def cut_models():
    """Return for each model that two and four ranks can share how it is built, and its sizes."""
    sizes = {**_CUT_SIZES, "num_layers": NUM_LAYERS - 2, "initializer_range": 0.3}
    return {
        "bert-cut": (bert_layers, BertConfig(**sizes)),
        "gpt-cut": (gpt_layers, GptConfig(**sizes)),
        # Two query heads for each of four key-value heads, of which four ranks have one each.
        "llama-cut": (llama_layers, LlamaConfig(**sizes | {"num_heads": 8, "hidden_size": 16}, num_key_value_heads=4)),
        # Both stacks' biases are shared by several stages, and the words by three layers.
        "t5-cut": (
            t5_layers,
            T5Config(**_CUT_SIZES, num_layers=3, num_decoder_layers=3, relative_buckets=4, relative_max_distance=6),
        ),
        "ict-cut": (ict_layers, IctConfig(**_CUT_SIZES, num_layers=3, initializer_range=0.3)),
    }


CUT_MODELS = ("bert-cut", "gpt-cut", "llama-cut", "t5-cut", "ict-cut")


def cut_config(model):
    """Return the sizes of a model that two and four ranks can share."""
    return cut_models()[model][1]


def cut_layers(model, dtype=torch.float64, parallel=ALONE, device="meta"):
    """Build this rank's share of every layer of a model that ranks share."""
    build, config = cut_models()[model]
    with torch.device(device):
        return [layer.to(dtype) for layer in build(config, parallel)]


def make_layers(model, dtype=torch.float64):
    """Build the layers of a model with the same weights wherever it is called."""
    if model in CUT_MODELS:
        return cut_layers(model, dtype)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(SEED)
        if model == "mlp":
            widths = [5, 7, 4, 6, 8, 5, 7, 6, 4, 3]
            steps = [[nn.Linear(a, b), nn.Dropout(0.2), nn.Tanh()] for a, b in pairwise(widths)]
            steps[4].append(nn.LayerNorm(widths[5]))
            layers = [nn.Sequential(*step) for step in steps[:-1]] + [steps[-1][0]]
        elif model == "tuple":
            layers = [Split(), Mix(), Mix(), Rotate(), *(Mix() for _ in range(4)), Join()]
        elif model == "paired":
            layers = [Split(), PairedMix(), PairedMix(), Rotate(), *(PairedMix() for _ in range(4)), Join()]
        else:
            layers = bert_layers(bert_config())
    assert len(layers) == NUM_LAYERS
    return [layer.to(dtype) for layer in layers]


def make_loss(model, parallel=ALONE):
    if model in CUT_MODELS:
        if model == "ict-cut":
            return IctLoss()
        return (BertPretrainingLoss if model == "bert-cut" else LanguageModelLoss)(Vocabulary(CUT_WORDS, parallel))
    return {"mlp": functional.mse_loss, "tuple": tuple_loss, "paired": tuple_loss, "bert": BertPretrainingLoss()}[model]


# Micro-batches: every one has other values, lengths and numbers of labels.


def microbatch(model, step, index, dtype=torch.float64):
    """Return inputs and target of micro-batch ``index`` (over all replicas) of a step."""
    generator = torch.Generator().manual_seed(1_000_003 * (step + 1) + index)

    def normal(*shape):
        return torch.randn(*shape, generator=generator, dtype=dtype)

    def integers(high, *shape):
        return torch.randint(high, shape, generator=generator)

    samples, length = 1 + (step + index) % 2, 4 + 3 * (index % 2)
    if model == "mlp":
        return normal(samples, 5), normal(samples, 3)
    if model in {"tuple", "paired"}:
        labels = integers(4, samples, length)
        # Every third micro-batch has no label at all.
        labels[torch.rand(labels.shape, generator=generator) < (0.5, 1.1, 0.2)[index % 3]] = IGNORED
        weight = torch.rand(samples, length, generator=generator, dtype=dtype)
        return normal(samples, length, 5), {"labels": labels, "weight": weight, "value": normal(samples, length)}
    if model == "ict-cut":
        lengths = (4, 8) if index % 2 else (8, 4)
        return ict_microbatch(integers, samples + 1, *lengths)
    if model == "t5-cut":
        return t5_microbatch(
            integers, generator, samples, 4 + 4 * (index % 2), 8 - 4 * (index % 2), empty=index % 3 == 1
        )
    if model in {"gpt-cut", "llama-cut"}:
        # Lengths that two and four ranks can divide.
        ids = integers(CUT_WORDS, samples, 4 + 4 * (index % 2) + 1)
        unlabelled = torch.rand(ids[:, 1:].shape, generator=generator) < (0.2, 1.1, 0.5)[index % 3]
        return {"input_ids": ids[:, :-1]}, {"labels": ids[:, 1:].masked_fill(unlabelled, IGNORED)}
    if model == "bert-cut":
        length, words = 4 + 4 * (index % 2), CUT_WORDS
    else:
        words = 19
    return bert_microbatch(integers, generator, samples, length, words, empty=index % 3 == 1)


def bert_microbatch(integers, generator, samples, length, words, *, empty):
    ids = integers(words, samples, length)
    mask = torch.ones_like(ids)
    mask[0, length - 2 :] = 0
    mlm_labels = ids.where(torch.rand(ids.shape, generator=generator) < 0.4, torch.tensor(IGNORED))
    if empty:
        mlm_labels[:] = IGNORED
    inputs = {
        "input_ids": integers(words, samples, length),
        "token_type_ids": integers(2, samples, length),
        "attention_mask": mask,
        "mlm_labels": mlm_labels,
    }
    return inputs, {"mlm_labels": mlm_labels, "nsp_labels": integers(2, samples)}


def t5_microbatch(integers, generator, samples, length, decoder_length, *, empty):
    ids = integers(CUT_WORDS, samples, length)
    mask = torch.ones_like(ids)
    mask[0, length - 2 :] = 0
    labels = integers(CUT_WORDS, samples, decoder_length)
    unlabelled = torch.rand(labels.shape, generator=generator) < (1.1 if empty else 0.3)
    inputs = {"input_ids": ids, "attention_mask": mask, "decoder_input_ids": labels.roll(1, 1)}
    return inputs, {"labels": labels.masked_fill(unlabelled, IGNORED)}


def ict_microbatch(integers, samples, query_length, length):
    inputs = {
        "query_ids": integers(CUT_WORDS, samples, query_length),
        "block_ids": integers(CUT_WORDS, samples, length),
    }
    for part, size in (("query", query_length), ("block", length)):
        mask = torch.ones(samples, size, dtype=torch.long)
        mask[0, size - 1 :] = 0
        inputs[f"{part}_attention_mask"] = mask
    return inputs, {"query_ids": inputs["query_ids"]}


def microbatches(model, step, indices, dtype=torch.float64):
    """Return the lists of inputs and of targets of several micro-batches."""
    pairs = [microbatch(model, step, index, dtype) for index in indices]
    return [inputs for inputs, _ in pairs], [target for _, target in pairs]


# One rank of a training run


def snapshot(tensors):
    """Copy named tensors to arrays; what has no array type is widened."""
    wide = {name: t.detach().float() if t.dtype is torch.bfloat16 else t.detach() for name, t in tensors.items()}
    return {name: tensor.cpu().numpy().copy() for name, tensor in wide.items()}


def hashable(array):
    """Return what is equal only where shape, type and every bit are."""
    return array.shape, array.dtype.str, array.tobytes()


def reduced_gradients(pipe, *, shard):
    """Copy the whole gradients of this rank's parameters; sharded, each is brought together on one rank."""
    if shard:
        return snapshot(pipe.collected(lambda portion: portion.grad))
    return snapshot(wholes(pipe, {name: parameter.grad for name, parameter in pipe.named_parameters()}))


def wholes(pipe, tensors):
    """Return named tensors whole, joined from the parts of the ranks that share their layers; a collective of those."""
    shardings = {name: sharding_of(parameter) for name, parameter in pipe.named_parameters()}
    cut = {name: tensors[name].detach() for name, sharding in shardings.items() if sharding.is_cut}
    found = {name: tensors[name] for name in shardings}
    if cut:
        # All at once, for each gather waits for ranks that share cores.
        own = torch.cat([tensor.flatten() for tensor in cut.values()])
        ranks = pipe.groups.tensor.start_gather(own.unsqueeze(0), 0).wait().unbind()
        parts = zip(*(flat.split([tensor.numel() for tensor in cut.values()]) for flat in ranks), strict=True)
        for (name, tensor), each in zip(cut.items(), parts, strict=True):
            found[name] = shardings[name].join([part.view(tensor.shape) for part in each])
    return found


def train(group, case, steps):
    """Train ``steps`` steps on this rank; return per step loss, norm, gradients and weights after the update."""
    dtype = getattr(torch, case.get("dtype", "float64"))
    schedule = make_schedule(case["schedule"], case["p"], case["m"])
    m, d, t = schedule.num_microbatches, case["d"], case.get("t", 1)
    data_rank = group.rank() // t % d
    parallel = TensorParallel.join(group, t, sequence=case.get("sequence", False), timeout_s=60.0)
    model = case["model"]
    pipe = Pipeline(
        cut_layers(model, dtype, parallel) if model in CUT_MODELS else make_layers(model, dtype),
        schedule,
        make_loss(model, parallel),
        group,
        tensor=parallel,
        recompute=case["recompute"].partition("-")[0],
        recompute_layers=int(case["recompute"].partition("-")[2] or 1),
        reduce=case["reduce"],
        shard_optimizer=case.get("shard", False),
        bucket_bytes=BUCKET_BYTES,
        seed=SEED,
        backend=case.get("backend"),
        timeout_s=60.0,
    )
    # A group, since a bare list may not be empty; with few and small parameters a rank may be in charge of none.
    optimizer = torch.optim.AdamW([{"params": [p for _, p in pipe.optimizer_parameters()]}], **ADAMW)
    history = []
    for step in range(steps):
        inputs, targets = microbatches(case["model"], step, range(data_rank * m, (data_rank + 1) * m), dtype)
        loss = pipe.step(inputs, targets)
        norm = pipe.gradient_norm()
        gradients = reduced_gradients(pipe, shard=case.get("shard", False))
        optimizer.step()
        pipe.publish_weights()
        weights = snapshot(wholes(pipe, dict(pipe.named_parameters())))
        history.append({"loss": loss.item(), "norm": norm, "gradients": gradients, "weights": weights})
    pipe.close()
    return history


# Comparison


def relative_error(got, expected, floor=0.0):
    """Return ‖got − expected‖ / max(‖expected‖, floor)."""
    difference = np.linalg.norm(np.asarray(got, np.float64) - np.asarray(expected, np.float64))
    return float(difference / max(np.linalg.norm(expected), floor, np.finfo(float).tiny))


@functools.cache
def all_names(model):
    """Return the names of a model's parameters, tied ones once."""
    return frozenset(name for name, _ in nn.Sequential(*make_layers(model)).named_parameters())
