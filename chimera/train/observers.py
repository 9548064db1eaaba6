"""What can be seen of a step from inside its instructions: ranges in other tools' traces, and what autograd keeps.

Each gives a context for one instruction, as ``Pipeline.observer`` takes it.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch.autograd import graph

from chimera.ir.action import Action, Instruction, Kind

__all__ = ["KeptBytes", "named_ranges", "ranged"]

_Push = Callable[[str], Any]
_Pop = Callable[[], Any]


def ranged(name: str, push: _Push, pop: _Pop) -> AbstractContextManager[None]:
    """Return a context that is one range of a tool with ``push(name)`` and ``pop()``, such as ``torch.cuda.nvtx``."""

    @contextmanager
    def inside() -> Iterator[None]:
        push(name)
        try:
            yield
        finally:
            pop()

    return inside()


def named_ranges(push: _Push, pop: _Pop) -> Callable[[Instruction], AbstractContextManager[None]]:
    """Return an observer that makes each instruction a range with its text."""
    return lambda instruction: ranged(str(instruction), push, pop)


class KeptBytes:
    """Counts what the forwards of each stage keep for their backwards, each storage once; parameters are left out.

    Forwards of pairs are passed over: what runs beside them cannot be told apart.

    Args:
        parameters: of this rank.

    Attributes:
        of_stage: for each stage, the bytes of the micro-batch that kept most.
    """

    def __init__(self, parameters: Iterable[torch.Tensor]) -> None:
        self._parameters = {parameter.untyped_storage().data_ptr() for parameter in parameters}
        self.of_stage: dict[int, int] = defaultdict(int)

    @contextmanager
    def __call__(self, instruction: Instruction) -> Iterator[None]:
        """Count what is saved inside, if it is a forward."""
        if not isinstance(instruction, Action) or instruction.kind is not Kind.F:
            yield
            return
        storages: dict[int, int] = {}

        def pack(tensor: torch.Tensor) -> torch.Tensor:
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in self._parameters:
                storages[storage.data_ptr()] = storage.nbytes()
            return tensor

        with graph.saved_tensors_hooks(pack, _as_it_is):
            yield
        stage = instruction.stage
        self.of_stage[stage] = max(self.of_stage[stage], sum(storages.values()))

    def per_stage(self, num_stages: int) -> Sequence[int]:
        """Return the bytes by stage, 0 where none is on this rank."""
        return [self.of_stage.get(stage, 0) for stage in range(num_stages)]


def _as_it_is(tensor: torch.Tensor) -> torch.Tensor:
    return tensor
