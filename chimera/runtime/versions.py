"""The weights that one stage keeps while updates go on: every backward takes the very ones that its forward took.

The modules' own parameters are the newest version, the one that updates change. A forward runs on copies of them,
leaves of autograd that share their storage: graphs hold the copies, and nobody writes to those. Before an update,
parameters whose copies are still needed move to storage of their own. So a version takes memory only once a newer one
differs from it, as many at a time as ``ir.versions`` counts; and gradients of every version sum into one buffer.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

from torch import nn

from chimera.ir.versions import Versions

__all__ = ["StageVersions"]


class StageVersions:
    """The versions of one stage's weights.

    Args:
        layers: the stage's layers.
        parameters: what updates change, of those layers; frozen ones have one version.
        taken: for each micro-batch that passes the stage on this rank, the version it takes.
    """

    def __init__(
        self, layers: Sequence[nn.Module], parameters: Sequence[nn.Parameter], taken: Mapping[int, int]
    ) -> None:
        self._parameters = tuple(parameters)
        number_of = {id(parameter): number for number, parameter in enumerate(parameters)}
        self._places = [
            (module, name, number_of[id(parameter)])
            for layer in layers
            for module in layer.modules()
            for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False)
            if id(parameter) in number_of
        ]
        self._taken = taken
        self._versions = Versions(())
        self._copies: dict[int, tuple[nn.Parameter, ...]] = {}

    def begin(self) -> None:
        """Call the weights as they are version 0, which a program begins with."""
        self._versions = Versions(self._taken.values())

    @contextmanager
    def installed(self, microbatch: int) -> Iterator[None]:
        """Give the layers, inside the block, the weights that a micro-batch takes."""
        self._install(self._copies_of(self._taken[microbatch]))
        try:
            yield
        finally:
            self._install(self._parameters)

    def release(self, microbatch: int) -> None:
        """End a micro-batch's use of its weights."""
        version = self._taken[microbatch]
        self._versions.release(version)
        if not self._versions.needs(version):
            self._copies.pop(version, None)

    def update(self, change: Callable[[], None]) -> None:
        """Have ``change`` make the next version of the parameters, in place."""
        newest = self._versions.newest
        if self._versions.needs(newest):
            self._copies_of(newest)
            for parameter in self._parameters:
                parameter.data = parameter.detach().clone()
        change()
        self._versions.update()

    def assert_empty(self) -> None:
        """Assert that every micro-batch went back."""
        assert not self._copies, f"weights kept behind the last backward: versions {sorted(self._copies)}"

    def _copies_of(self, version: int) -> tuple[nn.Parameter, ...]:
        if version not in self._copies:
            assert version == self._versions.newest, "older weights are kept from before the update"
            self._copies[version] = tuple(map(_sharing, self._parameters))
        return self._copies[version]

    def _install(self, parameters: Sequence[nn.Parameter]) -> None:
        for module, name, number in self._places:
            setattr(module, name, parameters[number])


def _sharing(parameter: nn.Parameter) -> nn.Parameter:
    """Return a leaf that shares storage and gradient, but not the count of writes by which autograd refuses a graph."""
    copy = nn.Parameter(parameter.data)
    assert parameter.grad is not None, "a trained parameter has its place in a gradient buffer"
    if parameter.grad.dtype is not copy.dtype:
        copy.grad_dtype = parameter.grad.dtype
    copy.grad = parameter.grad
    return copy
