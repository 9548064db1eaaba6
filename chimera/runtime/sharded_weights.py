"""Weights of which each replica updates its own part, so that optimizer states are nowhere kept twice.

All replicas (routes × d) of a stage hold its weights, in a flat buffer laid out like the gradients'. Replica i updates
the i-th part of each bucket, and the updated parts are gathered while other stages already compute (ZeRO stage 1;
Rajbhandari et al., SC'20). So Chimera's second copy of a stage costs no optimizer memory. How gradients are summed is
others' business.
"""

from collections.abc import Iterator, Mapping

import torch
from torch import nn

from chimera.runtime.buckets import Gradients, Replicas, Transfer
from chimera.tensor.communicator import Pending

__all__ = ["ShardedWeights"]


class ShardedWeights:
    """The weights of one ``Gradients``, moved into a flat buffer.

    Args:
        gradients: sharded ones.
        originals: full-precision weights by the identity of the narrower parameter. Those of this object's parameters
            are taken out, as only a part of them is kept.

    Attributes:
        portions: by identity of a parameter: what this rank updates of it, with its gradient, and where that begins in
            the flattened parameter. A parameter of which nothing is updated here is left out.
    """

    def __init__(self, gradients: Gradients, replicas: Replicas, originals: dict[int, nn.Parameter]) -> None:
        self.parameters = gradients.parameters
        self._layout = gradients.layout
        self._replicas = replicas
        self._gradients = gradients.buffer.flat
        self._flat = self._flattened()
        self._main = self._originals_here(originals) if id(self.parameters[0]) in originals else None
        self._gathers: list[Transfer] = []
        self.portions = {
            id(parameter): (self._portion(number), self._stretch(number)[0])
            for number, parameter in enumerate(self.parameters)
            if range(*self._stretch(number))
        }

    def attach(self) -> None:
        """Point every portion's ``grad`` at its place in the buffer, whatever an optimizer made of it."""
        for number, parameter in enumerate(self.parameters):
            if id(parameter) in self.portions:
                self.portions[id(parameter)][0].grad = self._gradients[self._places(number)]

    @torch.no_grad()
    def publish(self) -> list[Pending]:
        """Start gathering what the replicas have updated, and return what is under way."""
        self.wait()
        for bucket, (begin, end) in enumerate(self._layout.buckets):
            first, last = self._layout.shard(bucket, self._replicas.index)
            if self._main is not None:
                place = self._in_main(bucket)
                self._flat[first:last] = self._main[place : place + last - first]
            self._gathers.append(self._gathered(self._flat[begin:end], slice(first - begin, last - begin)))
        return [transfer.pending for transfer in self._gathers]

    @property
    def under_way(self) -> bool:
        """Whether gathered weights are still to be waited for."""
        return bool(self._gathers)

    @torch.no_grad()
    def wait(self) -> None:
        """Wait until the gathered weights are there."""
        for transfer in self._gathers:
            transfer.finish()
        self._gathers.clear()

    @torch.no_grad()
    def together(self, parts: Mapping[int, torch.Tensor]) -> Iterator[tuple[nn.Parameter, torch.Tensor]]:
        """Bring tensors together of which every replica has its part, bucket by bucket; a collective.

        Args:
            parts: for each portion here, by the identity of its parameter, a tensor of the portion's shape, of the type
                gradients have.

        Yields:
            Each parameter, and the whole tensor in its shape: a view that lasts until the next one is asked for.
        """
        inside: dict[int, list[int]] = {}
        for number in range(len(self.parameters)):
            inside.setdefault(self._layout.bucket_of(number), []).append(number)
        for bucket, (begin, end) in enumerate(self._layout.buckets):
            whole = self._gradients.new_zeros(end - begin)
            for number in inside[bucket]:
                if (part := parts.get(id(self.parameters[number]))) is not None:
                    places = self._places(number)
                    whole[places.start - begin : places.stop - begin] = part.reshape(-1)
            mine = slice(*(place - begin for place in self._layout.shard(bucket, self._replicas.index)))
            self._gathered(whole, mine).finish()
            for number in inside[bucket]:
                parameter, place = self.parameters[number], self._layout.offsets[number] - begin
                yield parameter, whole[place : place + parameter.numel()].view(parameter.shape)

    def _gathered(self, flat: torch.Tensor, mine: slice) -> Transfer:
        """Start filling a bucket from every replica's part of it."""
        wire = self._replicas.wire(flat)
        return Transfer(self._replicas.communicator.all_gather(wire, wire[mine]), wire, flat)

    @torch.no_grad()
    def _flattened(self) -> torch.Tensor:
        """Move the weights into one flat buffer."""
        flat = self.parameters[0].new_zeros(self._layout.size)
        for parameter, offset in zip(self.parameters, self._layout.offsets, strict=True):
            place = flat[offset : offset + parameter.numel()].view(parameter.shape)
            place.copy_(parameter)
            parameter.data = place
        return flat

    @torch.no_grad()
    def _originals_here(self, originals: dict[int, nn.Parameter]) -> torch.Tensor:
        """Return this rank's part of the full-precision weights, bucket after bucket."""
        main = self._gradients.new_zeros(self._layout.size // self._layout.shards)
        for number, parameter in enumerate(self.parameters):
            begin, end = self._stretch(number)
            original = originals.pop(id(parameter)).reshape(-1)
            main[self._places_in_main(number)] = original[begin:end]
        return main

    def _portion(self, number: int) -> nn.Parameter:
        """Make what the optimizer updates of a parameter: a view of where it is kept."""
        if self._main is None:
            return nn.Parameter(self._flat[self._places(number)])
        return nn.Parameter(self._main[self._places_in_main(number)])

    def _places(self, number: int) -> slice:
        """Return where this rank's part of a parameter is in the flat buffers."""
        begin, end = self._stretch(number)
        return slice(self._layout.offsets[number] + begin, self._layout.offsets[number] + end)

    def _stretch(self, number: int) -> tuple[int, int]:
        """Return (begin, end) of what this rank updates of a parameter, in elements of the parameter."""
        return self._layout.portion(number, self._replicas.index)

    def _places_in_main(self, number: int) -> slice:
        begin, end = self._stretch(number)
        bucket = self._layout.bucket_of(number)
        first, _ = self._layout.shard(bucket, self._replicas.index)
        place = self._in_main(bucket) + (self._layout.offsets[number] + begin - first if begin < end else 0)
        return slice(place, place + end - begin)

    def _in_main(self, bucket: int) -> int:
        """Return where a bucket's part begins in the full-precision weights kept here."""
        return self._layout.buckets[bucket][0] // self._layout.shards
