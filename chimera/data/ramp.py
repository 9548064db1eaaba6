"""Global batches that grow over the first steps of a run.

Knows the size of each step's batch and how many samples came before it, both as functions of the step's number. The
rule is Megatron-LM's ``--rampup-batch-size``: from a first size, by equal increments, over a number of samples.
"""

from dataclasses import dataclass

from chimera.errors import ConfigError

__all__ = ["NO_RAMP", "BatchRamp"]


@dataclass(frozen=True, slots=True)
class BatchRamp:
    """How a batch grows; the default does not.

    Attributes:
        start: samples of the first steps; 0 for no ramp.
        increment: samples that each growth adds.
        samples: samples over which the batch grows, in steps of equal shares.
    """

    start: int = 0
    increment: int = 0
    samples: int = 0

    def check(self, target: int, unit: int, what: str = "the micro-batch") -> None:
        """Refuse a ramp that does not lead to ``target`` in whole units of so many samples, named ``what``.

        Raises:
            ConfigError: naming the option.
        """
        if not self.start:
            return
        if not 0 < self.start < target or self.increment < 1 or self.samples < 1:
            raise ConfigError(
                f"the batch ramps from {self.start} by {self.increment} over {self.samples} samples to {target}; "
                "needed: a start below the global batch, and an increment and a number of samples of at least 1"
            )
        if (target - self.start) % self.increment:
            raise ConfigError(
                f"the batch ramps from {self.start} to {target}, which is no whole number of increments of "
                f"{self.increment}"
            )
        if self.start % unit or self.increment % unit:
            raise ConfigError(
                f"the batch ramps from {self.start} by {self.increment}; both must be multiples of {what} of {unit}"
            )

    def batch(self, step: int, target: int) -> int:
        """Return the samples of a step, counted from 0."""
        return self._walk(step, target)[1]

    def samples_before(self, step: int, target: int) -> int:
        """Return the samples of all earlier steps."""
        return self._walk(step, target)[0]

    def _walk(self, step: int, target: int) -> tuple[int, int]:
        """Return the samples before a step and in it, one growth at a time."""
        before, size = 0, self.start or target
        if not self.start:
            return step * target, target
        growths = (target - self.start) // self.increment
        for growth in range(1, growths + 1):
            # This size holds until the growth's share of the samples has been consumed.
            until = -(-growth * self.samples // growths)
            steps = max(0, -(-(until - before) // size))
            if step < steps:
                return before + step * size, size
            before, step, size = before + steps * size, step - steps, size + self.increment
        return before + step * size, size


NO_RAMP = BatchRamp()
