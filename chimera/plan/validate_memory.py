"""Memory of a device against Korthikanti et al. 2022, figures 1 and 7."""

from dataclasses import replace
from typing import Final

from chimera.plan.comparison import Comparison, TableResult, cluster_of
from chimera.plan.estimating import estimate
from chimera.plan.hardware_file import read_device, read_software
from chimera.plan.tables import published_table, read_columns

__all__ = ["korthikanti_memory"]

_GIB: Final = 2**30


def korthikanti_memory() -> TableResult:
    """Compare parameters and optimizer states of a rank between the ends, and activations of the first at its peak."""
    rows = []
    device = read_device("a100-80")
    for made, printed in zip(
        [row for row in published_table("korthikanti") if row.layout.recompute == "selective"],
        read_columns("korthikanti"),
        strict=True,
    ):
        cluster = cluster_of(device, made.machine, made.layout.num_devices)
        software = read_software(made.software)
        held = estimate(made.shape, made.layout, cluster, software)
        middle = held.memory[len(held.memory) // 2]
        states = middle.weights + middle.gradients + middle.optimizer
        rows.append(Comparison(f"{printed['params_b']}B states", states / _GIB, float(printed["param_optimizer_gib"])))
        for layout, column, name in (
            (replace(made.layout, recompute="none", sequence_parallel=False), "activations_none_gib", "none"),
            (made.layout, "activations_seqpar_selective_gib", "selective"),
        ):
            predicted = estimate(made.shape, layout, cluster, software).memory[0].activations
            label = f"{printed['params_b']}B activations, {name}"
            rows.append(Comparison(label, predicted / _GIB, float(printed[column])))
    title = "memory per device, Korthikanti et al. 2022, figures 1 and 7"
    return TableResult("korthikanti-memory", title, "GiB", tuple(rows), {}, None)
