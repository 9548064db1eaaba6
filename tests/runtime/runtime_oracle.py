"""The serial oracle: the same weights and micro-batches in one process, by a plain loop and plain autograd.

Written without any of the runtime; of the package it uses only the hash that says which key a layer's dropout has.
"""

import functools

import torch
from runtime_cases import ADAMW, CUT_MODELS, SEED, cut_layers, make_layers, make_loss, microbatch, snapshot
from torch import nn

from chimera.tensor.randomness import Purpose, mix


def run_layers(layers, inputs, key=None):
    """Call the layers one after another, each on the tensors of the one before and the fields it names.

    ``key`` is (step, number of the micro-batch in the global batch), or None to leave the generator alone.
    """
    tensors = () if isinstance(inputs, dict) else (inputs,)
    for number, layer in enumerate(layers):
        if key is not None:
            torch.manual_seed(mix(Purpose.FORWARD, SEED, *key, number))
        named = {field: inputs[field] for field in getattr(layer, "fields", ())}
        output = layer(*tensors, **named)
        tensors = output if isinstance(output, tuple) else (output,)
    return tensors if len(tensors) > 1 else tensors[0]


def terms_of(loss_fn, output, target):
    """Return the loss as terms; a mean is over the samples of its micro-batch."""
    value = loss_fn(output, target)
    return value if isinstance(value, dict) else {"loss": (value * len(target), len(target))}


def total_loss(layers, loss_fn, pairs, keys):
    """Return Σ over terms of (Σ sums) / (Σ counts) over all micro-batches, with its graph."""
    sums, counts = {}, {}
    for (inputs, target), key in zip(pairs, keys, strict=True):
        for name, (total, count) in terms_of(loss_fn, run_layers(layers, inputs, key), target).items():
            sums[name] = sums.get(name, 0.0) + total
            counts[name] = counts.get(name, 0.0) + float(count)
    return sum(total / counts[name] for name, total in sums.items() if counts[name])


def drawn_layers(model, dtype):
    """Build the layers; those of a model that ranks share with the weights that one rank draws, layer by layer."""
    if model not in CUT_MODELS:
        return make_layers(model, dtype)
    layers = cut_layers(model, dtype, device="cpu")
    for number, layer in reversed(list(enumerate(layers))):
        torch.manual_seed(mix(Purpose.INITIAL_WEIGHTS, SEED, number))
        if any(True for _ in layer.parameters()):
            layer.reset_parameters()
    return layers


@functools.cache
def serial_history(model, num_microbatches, steps, dtype=torch.float64):
    """Train in this process on ``num_microbatches`` (of all replicas) per step; see ``runtime_cases.train``."""
    with torch.random.fork_rng(devices=[]):
        layers, loss_fn = drawn_layers(model, dtype), make_loss(model)
        named = dict(nn.Sequential(*layers).named_parameters())
        optimizer = torch.optim.AdamW(named.values(), **ADAMW)
        history = []
        for step in range(steps):
            indices = range(num_microbatches)
            keys = [(step, index) for index in indices]
            pairs = [microbatch(model, step, index, dtype) for index in indices]
            for parameter in named.values():
                # Zero rather than None: what no label reaches still decays.
                parameter.grad = torch.zeros_like(parameter)
            loss = total_loss(layers, loss_fn, pairs, keys)
            loss.backward()
            norm = torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(p.grad) for p in named.values()]))
            gradients = snapshot({name: p.grad for name, p in named.items()})
            optimizer.step()
            history.append(
                {"loss": loss.item(), "norm": norm.item(), "gradients": gradients, "weights": snapshot(named)}
            )
    return history
