"""A small network that uses every tensor-parallel layer, and one rank of its training."""

import torch
from torch import nn

from chimera.tensor.dropout import Part, dropout
from chimera.tensor.linear import WeightProducts, started_ahead
from chimera.tensor.parallel import TensorParallel
from chimera.tensor.parallel_linear import ColumnParallelLinear, RowParallelLinear
from chimera.tensor.sharding import Sharding, draw_normal, even_segments, mark, sharding_of
from chimera.tensor.vocabulary import Vocabulary, VocabularyEmbedding, vocabulary_cross_entropy

BATCH, LENGTH, WIDTH, INNER = 2, 8, 6, 12


class Network(nn.Module):
    """Words to the sum of losses: embedding, norm, a gated branch with dropout, decoder."""

    def __init__(self, parallel, num_words):
        super().__init__()
        self.parallel = parallel
        self.vocabulary = Vocabulary(num_words, parallel)
        self.word = VocabularyEmbedding(self.vocabulary, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.expand = ColumnParallelLinear(WIDTH, even_segments([INNER, INNER], parallel), parallel)
        self.contract = RowParallelLinear(INNER, WIDTH, parallel)
        self.decoder = ColumnParallelLinear(WIDTH, self.vocabulary.segments, parallel)
        for parameter in self.norm.parameters():
            mark(parameter, Sharding.copied(parallel, partial=parallel.divides_sequence))
        self.double()
        torch.manual_seed(5)
        for parameter in self.parameters():
            draw_normal(parameter, std=0.5)

    def forward(self, words, labels):
        torch.manual_seed(7)
        hidden = self.word(words)
        gate, value = self.expand(self.norm(hidden)).chunk(2, -1)
        inner = self.drop(torch.tanh(gate) * value, dim=2)
        branch = self.contract(inner)
        hidden = hidden + (self.drop(branch, dim=1) if self.parallel.sequence else self.drop(branch, dim=None))
        logits = self.decoder(hidden)
        return vocabulary_cross_entropy(logits.flatten(0, 1), labels.flatten(), self.vocabulary).sum()

    def drop(self, values, dim):
        part = None if dim is None else Part(dim, self.parallel.rank, self.parallel.size)
        return dropout(values, 0.3, training=True, part=part)


def batch(num_words):
    """Return words and labels of which every rank has some, the first and the last word among them."""
    generator = torch.Generator().manual_seed(3)
    words, labels = torch.randint(num_words, (2, BATCH, LENGTH), generator=generator)
    words[0, :2] = labels[1, :2] = torch.tensor([0, num_words - 1])
    return words, labels


def loss_and_gradients(group, num_words, t, *, sequence=False, mode="whole", float8=False):
    """Return the loss, and every parameter and its gradient whole, computed on t ranks in one of three ways.

    ``mode`` is "whole" (autograd adds the gradients), "fused" (layers add their products themselves) or "split" (they
    wait until all other gradients are there). With ``float8`` linear layers multiply in that, and all else is fp32.
    """
    parallel = TensorParallel.join(group, t, sequence=sequence, timeout_s=30.0)
    network = Network(parallel, num_words)
    if float8:
        network.float()
        for layer in (network.expand, network.contract, network.decoder):
            layer.float8 = parallel
    products = WeightProducts(split=mode == "split")
    if mode != "whole":
        products.serve([network])
        for parameter in network.parameters():
            parameter.grad = torch.zeros_like(parameter)
    loss = network(*batch(num_words))
    if mode == "split":
        with products.queued() as queue:
            loss.backward()
        assert len(queue) == 3
        for work in started_ahead(queue):
            work.add()
    else:
        loss.backward()
    found = {"loss": loss.item()}
    for name, parameter in network.named_parameters():
        sharding = sharding_of(parameter)
        gradient = parallel.start_sum(parameter.grad).wait() if sharding.partial else parameter.grad
        for kind, tensor in (("weight", parameter), ("gradient", gradient)):
            parts = [tensor.detach()] * t
            if t > 1:
                parts = parallel.start_gather(tensor.detach().unsqueeze(0), 0).wait().unbind()
            assert sharding.is_cut or all(torch.equal(part, parts[0]) for part in parts)
            found[f"{kind} {name}"] = sharding.join(parts).numpy()
    return found
