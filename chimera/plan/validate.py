"""Predictions against measurements: the published tables of the package by name.

Every figure goes the way that a user's does: through ``estimate`` or ``simulate``, with the constants that the package
ships. Each table's own comparison stands in a module of its kind; measured tables by path are ``validate_steps``'s.
"""

from collections.abc import Callable, Mapping
from typing import Final

from chimera.errors import UsageError, nearest_names
from chimera.plan.comparison import TableResult
from chimera.plan.validate_chimera import chimera_choice, chimera_speedups
from chimera.plan.validate_memory import korthikanti_memory
from chimera.plan.validate_steps import validate_steps
from chimera.plan.validate_zero_bubble import zero_bubble_rates, zero_bubble_times

__all__ = ["VALIDATIONS", "validate"]


def validate(table: str) -> TableResult:
    """Compare one published table.

    Raises:
        UsageError: there is no such table.
    """
    if table not in VALIDATIONS:
        raise UsageError(
            f"--table {table}: no such table{nearest_names(table, VALIDATIONS)}; known: {', '.join(VALIDATIONS)}"
        )
    return VALIDATIONS[table]()


VALIDATIONS: Final[Mapping[str, Callable[[], TableResult]]] = {
    "megatron": lambda: validate_steps("megatron", "step times, Narayanan et al. 2021, table 1"),
    "korthikanti": lambda: validate_steps("korthikanti", "step times, Korthikanti et al. 2022, table 5"),
    "korthikanti-memory": korthikanti_memory,
    "zero-bubble": zero_bubble_rates,
    "zero-bubble-times": zero_bubble_times,
    "chimera-fig13": chimera_choice,
    "chimera-speedups": chimera_speedups,
}
"""Every comparison with a published table, by name."""
