"""Your own layers, trained by Chimera's schedule on four ranks; the first and the last layer share a weight.

    python examples/train_own_layers.py
    torchrun --nproc-per-node 4 examples/train_own_layers.py

The model guesses the next character of this text from the eight before it.
"""

import os
from pathlib import Path

import torch
from torch import nn
from torch.nn.functional import cross_entropy

import chimera
from chimera.launch import Place, Tell, connected, place_from_environment, run_local

RANKS, STEPS, CONTEXT, HIDDEN = 4, 30, 8, 64


def make_layers(num_characters: int) -> list[nn.Module]:
    """Build the same layers on every rank; the head's weight is the embedding's."""
    torch.manual_seed(0)
    embedding, head = nn.Embedding(num_characters, HIDDEN), nn.Linear(HIDDEN, num_characters)
    head.weight = embedding.weight
    mixing = nn.Sequential(nn.Flatten(), nn.Linear(CONTEXT * HIDDEN, HIDDEN), nn.Tanh())
    blocks = [nn.Sequential(nn.Linear(HIDDEN, HIDDEN), nn.Tanh()) for _ in range(5)]
    return [embedding, mixing, *blocks, head]


def train(place: Place, _: Tell | None = None) -> float:
    """Train as one rank of a job and return the last loss."""
    text = Path(__file__).read_text(encoding="utf-8")
    characters = sorted(set(text))
    data = torch.tensor([characters.index(character) for character in text]).unfold(0, CONTEXT + 1, 1)
    schedule = chimera.build_schedule("chimera", ranks=RANKS, microbatches=8)
    with connected(place, timeout_s=60.0) as group:
        pipe = chimera.Pipeline(make_layers(len(characters)), schedule, cross_entropy, group)
        optimizer = torch.optim.Adam([parameter for _, parameter in pipe.named_parameters()], lr=3e-3)
        for step in range(1, STEPS + 1):
            batch = data[torch.randint(len(data), (256,), generator=torch.Generator().manual_seed(step))]
            loss = pipe.step(batch[:, :-1], batch[:, -1])
            optimizer.step()
            if place.rank == 0 and step in {1, STEPS}:
                print(f"step {step}: loss {loss:.3f}", flush=True)
        pipe.close()
    return float(loss)


if __name__ == "__main__":
    here = place_from_environment(os.environ)
    if here is None:
        run_local(train, RANKS, preload=["chimera.runtime.pipeline"])
    else:
        train(here)
