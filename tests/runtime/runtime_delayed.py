"""The serial oracle of asynchronous schedules: the papers' update rules in one process, with all weights remembered.

PipeDream (SOSP'19): update j is micro-batch j's; on stage s of p it is computed on the weights after
max(0, j − (p − 1 − s)) updates. PipeDream-2BW (ICML'21): update g is group g's, on those after max(0, g − 1) updates.
Written without any schedule and without the runtime.
"""

import torch
from runtime_cases import SEED, make_loss, microbatch
from runtime_oracle import terms_of
from torch.func import functional_call

from chimera.tensor.randomness import Purpose, mix

OPTIMIZERS = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=2e-2, momentum=0.9),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=1e-2, eps=1e-6),
}


def version_of(rule, stage, p, j, each):
    """Return after how many updates of a stage the weights are that micro-batch ``j`` takes there."""
    return max(0, j - (p - 1 - stage)) if rule == "pipedream" else max(0, j // each - 1)


class DelayedTraining:
    """Layers in one process, whose every update is computed on weights of long ago.

    Attributes:
        weights: for each layer, its weights after each update of the current step: [layer][update] → name → tensor.
    """

    def __init__(self, layers, layer_to_stage, optimizer, model):
        self.layers, self.stage_of, self.model = layers, layer_to_stage, model
        stages = range(max(layer_to_stage) + 1)
        held = {
            s: [p for n, layer in enumerate(layers) if layer_to_stage[n] == s for p in layer.parameters()]
            for s in stages
        }
        self.optimizers = [OPTIMIZERS[optimizer](parameters) for parameters in held.values() if parameters]

    def step(self, step, rule, m, each, replicas=1):
        """Make all updates of one program, and return its loss."""
        p, updates = max(self.stage_of) + 1, m // each
        self.weights = [[self._leaves(layer)] for layer in self.layers]
        sums, counts = {}, {}
        for update in range(updates):
            total, of_update = {}, {}
            for replica in range(replicas):
                for j in range(update * each, (update + 1) * each):
                    number = replica * m + j
                    terms = self._forward(step, number, [version_of(rule, s, p, j, each) for s in range(p)])
                    for name, (value, count) in terms.items():
                        total[name] = total.get(name, 0.0) + value
                        of_update[name] = of_update.get(name, 0.0) + float(count)
            loss = sum(value / of_update[name] for name, value in total.items() if of_update[name])
            self._update(loss)
            for name, value in total.items():
                sums[name] = sums.get(name, 0.0) + value.item()
                counts[name] = counts.get(name, 0.0) + of_update[name]
        return sum(value / counts[name] for name, value in sums.items() if counts[name])

    def _forward(self, step, number, versions):
        inputs, target = microbatch(self.model, step, number)
        tensors = () if isinstance(inputs, dict) else (inputs,)
        for n, layer in enumerate(self.layers):
            torch.manual_seed(mix(Purpose.FORWARD, SEED, step, number, n))
            named = {field: inputs[field] for field in getattr(layer, "fields", ())}
            output = functional_call(layer, self.weights[n][versions[self.stage_of[n]]], tensors, named)
            tensors = output if isinstance(output, tuple) else (output,)
        return terms_of(make_loss(self.model), tensors if len(tensors) > 1 else tensors[0], target)

    def _update(self, loss):
        """Sum the gradient of every version into the newest weights', and step."""
        leaves = [leaf for layer in self.weights for version in layer for leaf in version.values()]
        gradients = iter(torch.autograd.grad(loss, leaves, allow_unused=True))
        for n, layer in enumerate(self.layers):
            parameters = dict(layer.named_parameters())
            for parameter in parameters.values():
                parameter.grad = torch.zeros_like(parameter)
            for version in self.weights[n]:
                for name in version:
                    gradient = next(gradients)
                    if gradient is not None:
                        parameters[name].grad += gradient
        for optimizer in self.optimizers:
            optimizer.step()
        for n, layer in enumerate(self.layers):
            self.weights[n].append(self._leaves(layer))

    @staticmethod
    def _leaves(layer):
        return {name: p.detach().clone().requires_grad_() for name, p in layer.named_parameters()}
