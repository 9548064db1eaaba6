"""Agreement on the shapes of messages, once per route and micro-batch signature, before the step that needs them.

The stages of a route tell each other in order what they will send. A module with ``output_spec(input_spec)`` answers by
arithmetic; otherwise the stage is run once, without gradients, on zeros, and everything that run touched (generators,
module buffers) is put back. What is agreed is kept for the life of the pipeline.
"""

import json
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from chimera.runtime.channels import Spec, TensorSpec
from chimera.runtime.groups import Groups
from chimera.runtime.microbatches import Signature, signature
from chimera.runtime.shares import Shares
from chimera.runtime.stage import Stage, spec_of
from chimera.tensor.randomness import preserved_generators

__all__ = ["Shapes", "exchange_json", "gather_json", "gradient_spec", "share_json"]

_TAG = 1
"""Tag of agreement messages on the control group, apart from nothing else that is sent point to point there."""


def gradient_spec(spec: Spec) -> Spec:
    """Return the part of a message for which a gradient comes back: its floating tensors."""
    return tuple(tensor for tensor in spec if tensor.dtype.is_floating_point)


class Shapes:
    """What each stage receives and gives, by route and signature of the micro-batch.

    Args:
        stages: the stages on this rank.
        routes: the schedule's routes, stage → pipeline rank.
        groups: this rank's place and control group.
        shares: what each tensor-parallel rank sends of a message.
        with_output: whether the last stage's output is asked for too.
    """

    def __init__(
        self,
        stages: dict[int, Stage],
        routes: Sequence[Sequence[int]],
        groups: Groups,
        *,
        shares: Shares,
        with_output: bool,
    ) -> None:
        self._stages = stages
        self._routes = routes
        self._groups = groups
        self._shares = shares
        self._with_output = with_output
        self._outputs: dict[tuple[int, Signature], dict[int, Spec]] = {}

    def agree(self, microbatches: Sequence[Any], route_of: Sequence[int]) -> list[dict[int, Spec]]:
        """Return for each micro-batch what stages give: stage → spec, for this rank's stages and those before them."""
        agreed = []
        for microbatch, route in zip(microbatches, route_of, strict=True):
            key = (route, signature(microbatch))
            if key not in self._outputs:
                self._outputs[key] = self._walk(self._routes[route], microbatch)
            agreed.append(self._outputs[key])
        return agreed

    def message_bytes(self, num_stages: int) -> list[int]:
        """Return the bytes that a rank sends in the largest forward message at each boundary; a collective."""
        mine = torch.zeros(num_stages - 1, dtype=torch.int64)
        for outputs in self._outputs.values():
            for stage, spec in outputs.items():
                if stage < num_stages - 1:
                    size = sum(math.prod(shape) * dtype.itemsize for shape, dtype in self._shares.spec(spec))
                    mine[stage] = max(int(mine[stage]), size)
        sizes: list[int] = torch.stack(self._groups.gather(mine)).amax(0).tolist()
        return sizes

    def _walk(self, ranks: Sequence[int], microbatch: Any) -> dict[int, Spec]:
        """Pass the specs down one route; every rank takes part for the stages it holds there."""
        outputs: dict[int, Spec] = {}
        me = self._groups.pipeline_rank
        for stage, rank in enumerate(ranks):
            if rank != me:
                continue
            if stage and ranks[stage - 1] != me:
                outputs[stage - 1] = _spec_from_json(exchange_json(self._groups, source=ranks[stage - 1]))
            last = stage + 1 == len(ranks)
            if not last or self._with_output:
                outputs[stage] = self._outputs_of(stage, outputs.get(stage - 1, ()), microbatch)
            if not last and ranks[stage + 1] != me:
                exchange_json(self._groups, destination=ranks[stage + 1], value=_spec_to_json(outputs[stage]))
        return outputs

    def _outputs_of(self, stage: int, inputs: Spec, microbatch: Any) -> Spec:
        layers = self._stages[stage].layers
        rules: list[Callable[[Spec], Spec] | None] = [getattr(layer, "output_spec", None) for layer in layers]
        if stage and all(rules):
            spec = inputs
            for rule in rules:
                assert rule is not None, "checked by all()"
                spec = rule(spec)
            return spec
        zeros = tuple(torch.zeros(shape, dtype=dtype, device=self._groups.device) for shape, dtype in inputs)
        buffers = [buffer for layer in layers for buffer in layer.buffers()]
        kept = [buffer.clone() for buffer in buffers]
        with torch.no_grad(), preserved_generators(self._groups.device):
            spec = spec_of(self._stages[stage].run(zeros, microbatch, None))
            for buffer, old in zip(buffers, kept, strict=True):
                buffer.copy_(old)
        return spec


def exchange_json(
    groups: Groups, *, source: int | None = None, destination: int | None = None, value: Any = None
) -> Any:
    """Send ``value`` to, or receive a value from, another rank of this pipeline over the control group, as JSON."""
    assert groups.control is not None, "ranks that differ share a control group"
    if destination is not None:
        payload = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
        peer = groups.world_rank(destination)
        for tensor in (torch.tensor([payload.numel()]), payload):
            groups.control.send(tensor, peer, _TAG).wait()
        return None
    assert source is not None, "one of source and destination is given"
    peer = groups.world_rank(source)
    length = torch.zeros(1, dtype=torch.int64)
    groups.control.receive(length, peer, _TAG).wait()
    payload = torch.empty(int(length), dtype=torch.uint8)
    groups.control.receive(payload, peer, _TAG).wait()
    return json.loads(payload.numpy().tobytes())


def share_json(groups: Groups, value: Any, *, root: int) -> Any:
    """Return the value of world rank ``root`` on every rank."""
    if groups.control is None:
        return value
    payload = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
    length = torch.tensor([payload.numel()])
    groups.control.broadcast(length, root).wait()
    if groups.rank != root:
        payload = torch.empty(int(length), dtype=torch.uint8)
    groups.control.broadcast(payload, root).wait()
    return json.loads(payload.numpy().tobytes())


def gather_json(groups: Groups, value: Any) -> list[Any]:
    """Return the value of every rank, in rank order, on every rank."""
    if groups.control is None:
        return [value]
    payload = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
    lengths = [int(length) for length in groups.gather(torch.tensor([payload.numel()]))]
    padded = torch.zeros(max(lengths), dtype=torch.uint8)
    padded[: payload.numel()] = payload
    gathered = zip(groups.gather(padded), lengths, strict=True)
    return [json.loads(found[:length].numpy().tobytes()) for found, length in gathered]


def _spec_to_json(spec: Spec) -> list[tuple[list[int], str]]:
    return [(list(shape), str(dtype).removeprefix("torch.")) for shape, dtype in spec]


def _spec_from_json(value: list[tuple[list[int], str]]) -> Spec:
    return tuple(TensorSpec(tuple(shape), getattr(torch, dtype)) for shape, dtype in value)
