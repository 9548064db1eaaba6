"""What this machine can do, measured, as a device file the planner reads: products, memory, launches, updates.

Each figure is the median of repeated runs. Peaks are the best rates that were seen, so that the fitted efficiencies say
how far other shapes fall below them; the model that is fitted is the planner's own (``plan.kernels``). Nothing here
knows a transformer or a layout.
"""

import math
import os
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Final

import numpy as np
import torch

from chimera.errors import UsageError
from chimera.plan.hardware import DTYPE_BYTES, DTYPES, Cluster, Constant, Device, Link
from chimera.plan.kernels import product_s, rates_of
from chimera.train.link_times import LinkTimes

__all__ = ["Calibration", "Product", "calibrate"]

_SHAPES: Final = ((128, 128, 128), (512, 512, 512), (512, 2048, 512), (2048, 512, 512), (512, 512, 4096), (1024,) * 3)
"""Rows, columns and depth of products: small, square, wide, tall, deep."""

_HEADS: Final = (16, 128, 64)
"""Of the attention product that is timed: heads, tokens, width."""

_Times = dict[str, dict[tuple[int, int, int], float]]
"""Seconds of products by format and shape."""

_TYPES: Final = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
_REPEATS: Final = 7
_LEAST_S: Final = 2e-3
"""Calls are repeated until a run takes as long, so that the clock's own time plays no part."""

_COPY_BYTES: Final = 64 * 2**20
_PARAMETERS: Final = 4_000_000
_EFFICIENCIES: Final = np.linspace(0.3, 1.0, 29)
_RAMPS: Final = (1.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0, 512.0)


@dataclass(frozen=True, slots=True)
class Product:
    """One timed matrix product, and what the calibrated model says of it."""

    dtype: str
    rows: int
    columns: int
    depth: int
    measured_s: float
    modelled_s: float

    @property
    def flops_per_s(self) -> float:
        """Rate that was measured."""
        return 2 * self.rows * self.columns * self.depth / self.measured_s


@dataclass(frozen=True, slots=True)
class Calibration:
    """The device, and the products that it was fitted on."""

    device: Device
    products: tuple[Product, ...]

    @property
    def median_error(self) -> float:
        """Of the modelled products, as a share."""
        return statistics.median(abs(each.modelled_s / each.measured_s - 1) for each in self.products)


def calibrate(links: LinkTimes, *, ranks: int, threads: int = 1, name: str = "this-machine") -> Calibration:
    """Measure one device of this machine.

    Args:
        links: as measured between ``ranks`` processes.
        ranks: processes that share the machine.
        threads: CPU threads of a device that is a CPU.
        name: of the device.

    Raises:
        UsageError: fewer than 1 thread.
    """
    if threads < 1:
        raise UsageError(f"--threads {threads}: needed: at least 1")
    torch.set_num_threads(threads)
    where = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    times = {
        dtype: {shape: _median_of(_product(_TYPES[dtype], shape, where), where) for shape in _shapes(dtype, where)}
        for dtype in DTYPES
    }
    memory = _copy_rate(where)
    bare = _device(name, where, times, memory=memory, links=links, ranks=ranks)
    fitted = _with_fitted_products(bare, times, where)
    return Calibration(fitted, tuple(_modelled(fitted, times)))


def _shapes(dtype: str, where: torch.device) -> tuple[tuple[int, int, int], ...]:
    """Return the shapes to time; of fp16 on a CPU, which computes it element by element, the smallest alone."""
    return _SHAPES[:1] if dtype == "fp16" and where.type == "cpu" else _SHAPES


def _device(
    name: str,
    where: torch.device,
    times: _Times,
    *,
    memory: float,
    links: LinkTimes,
    ranks: int,
) -> Device:
    """Return the device with everything but the constants of products."""
    peak = {dtype: max(2 * math.prod(shape) / s for shape, s in rows.items()) for dtype, rows in times.items()}
    link = Link(
        name="between processes of one machine", devices=ranks, bytes_per_s=links.bytes_per_s, latency_s=links.step_s
    )
    launch = _median_of(_small_operation(where), where, synchronous=False)
    one = {"network_efficiency": 1.0, "shared_network_efficiency": 1.0, "memory_efficiency": 1.0}
    measured = {
        "launch_s": (launch, "s per operation"),
        "hop_s": (links.hop_s, "s per message"),
        "collective_s": (links.collective_s, "s per collective"),
        "optimizer_bytes": (_update_s(where) * memory / _PARAMETERS, "bytes per parameter"),
        "matrix_efficiency": (1.0, "share of the peak rate of products"),
        "matrix_ramp": (1.0, "depth of a product"),
        "attention_slowdown": (1.0, "ratio to other products of the same shape"),
    }
    constants = {key: _constant(value, "share", "nothing: the peaks are measured rates") for key, value in one.items()}
    constants |= {key: _constant(value, unit, "micro-benchmarks") for key, (value, unit) in measured.items()}
    return Device(
        name=name,
        title=_title(where),
        memory_bytes=_memory_bytes(where),
        memory_bytes_per_s=memory,
        cache_bytes=_cache_bytes(where),
        multiprocessors=_multiprocessors(where),
        matrix_flops_per_s=peak,
        vector_flops_per_s=peak["fp32"],
        links=(link, replace(link, name="between machines: not measured, as within one", devices=None)),
        adapters_per_node=1,
        constants=constants,
        sources=("chimera profile --calibrate, on the machine itself",),
    )


def _with_fitted_products(device: Device, times: _Times, where: torch.device) -> Device:
    """Return the device with the efficiency and the ramp that fit its products best, and attention's slowdown."""

    def error(constants: tuple[float, float]) -> float:
        tried = _with(device, matrix_efficiency=constants[0], matrix_ramp=constants[1])
        return statistics.median(abs(math.log(each.modelled_s / each.measured_s)) for each in _modelled(tried, times))

    efficiency, ramp = min(product(_EFFICIENCIES.tolist(), _RAMPS), key=error)
    fitted = _with(device, matrix_efficiency=efficiency, matrix_ramp=ramp)
    heads, tokens, width = _HEADS
    rates = rates_of(Cluster.of(fitted, 1), "fp32", 4.0)
    modelled = float(product_s(rates, tokens, tokens, width, batch=heads))
    return _with(fitted, attention_slowdown=max(_median_of(_attention(where), where) / modelled, 0.1))


def _with(device: Device, **values: float) -> Device:
    constants = {
        key: replace(each, value=values[key], low=values[key], high=values[key]) if key in values else each
        for key, each in device.constants.items()
    }
    return replace(device, constants=constants)


def _modelled(device: Device, times: _Times) -> list[Product]:
    cluster, found = Cluster.of(device, 1), []
    for dtype, rows in times.items():
        rates = rates_of(cluster, dtype, float(DTYPE_BYTES[dtype]))
        for (height, width, depth), measured in rows.items():
            modelled = float(product_s(rates, float(height), float(width), float(depth)))
            found.append(Product(dtype, height, width, depth, measured, modelled))
    return found


def _product(dtype: torch.dtype, shape: Sequence[int], where: torch.device) -> Callable[[], object]:
    rows, columns, depth = shape
    left = torch.randn(rows, depth, device=where).to(dtype)
    right = torch.randn(depth, columns, device=where).to(dtype)
    return lambda: left @ right


def _attention(where: torch.device) -> Callable[[], object]:
    heads, tokens, width = _HEADS
    queries, keys = (torch.randn(heads, tokens, width, device=where) for _ in range(2))
    return lambda: queries @ keys.transpose(1, 2)


def _small_operation(where: torch.device) -> Callable[[], object]:
    one = torch.zeros(8, device=where)
    return lambda: one.add_(1.0)


def _copy_rate(where: torch.device) -> float:
    """Return the bytes per second that a copy reads and writes."""
    source = torch.zeros(_COPY_BYTES // 4, device=where)
    target = torch.empty_like(source)
    return 2 * _COPY_BYTES / _median_of(lambda: target.copy_(source), where)


def _update_s(where: torch.device) -> float:
    """Return the time of an AdamW step."""
    weights = torch.nn.Parameter(torch.zeros(_PARAMETERS, device=where))
    weights.grad = torch.ones_like(weights)
    return _median_of(torch.optim.AdamW([weights]).step, where)


def _median_of(call: Callable[[], object], where: torch.device, *, synchronous: bool = True) -> float:
    """Return the median time of a call; without ``synchronous`` the time that the host takes to launch it."""

    def run(count: int) -> float:
        _wait(where)
        begin = time.perf_counter()
        for _ in range(count):
            call()
        if synchronous:
            _wait(where)
        return time.perf_counter() - begin

    run(2)
    count = max(1, math.ceil(_LEAST_S / max(run(1), 1e-7)))
    return statistics.median(run(count) / count for _ in range(_REPEATS))


def _wait(where: torch.device) -> None:
    if where.type == "cuda":
        torch.cuda.synchronize(where)


def _constant(value: float, unit: str, fitted_on: str) -> Constant:
    return Constant(value=value, unit=unit, low=value, high=value, fitted_on=fitted_on)


def _title(where: torch.device) -> str:
    return torch.cuda.get_device_name(where) if where.type == "cuda" else f"CPU, {torch.get_num_threads()} threads"


def _memory_bytes(where: torch.device) -> int:
    if where.type == "cuda":
        return int(torch.cuda.get_device_properties(where).total_memory)
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _cache_bytes(where: torch.device) -> int:
    if where.type == "cuda":
        return int(torch.cuda.get_device_properties(where).L2_cache_size)
    return 2**20


def _multiprocessors(where: torch.device) -> int:
    """Return the units that work on one tile each; the threads of a CPU share a tile's work."""
    return int(torch.cuda.get_device_properties(where).multi_processor_count) if where.type == "cuda" else 1
