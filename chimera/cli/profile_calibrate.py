"""``chimera profile --calibrate``: measures this machine and writes what the planner needs to know of it.

The measurements are ``chimera.train.calibrate``'s; here they become a file and a table.
"""

import json as json_form
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

import torch

from chimera.cli.terminal import console, print_table, print_wrapped
from chimera.errors import UsageError
from chimera.launch.connect import connected
from chimera.launch.local import run_local
from chimera.launch.place import Place
from chimera.launch.processes import Tell
from chimera.plan.hardware_file import write_device
from chimera.train.calibrate import Calibration, calibrate
from chimera.train.link_times import LinkTimes, time_links

__all__ = ["calibrate_here"]

_TIMEOUT_S: Final = 60.0


def calibrate_here(*, ranks: int, threads: int, out: Path, json: bool) -> None:
    """Measure this machine, write the device file and print what was measured.

    Args:
        ranks: processes between which messages are timed.
        threads: CPU threads of one device, where the device is a CPU.
        out: the device file to write (.json).
        json: whether to print a JSON document.

    Raises:
        UsageError: an option that cannot be used.
    """
    if out.suffix != ".json":
        raise UsageError(f"--out {out}: needed: a file ending in .json")
    if ranks < 2:
        raise UsageError(f"--ranks {ranks}: needed: at least 2, between which messages can be timed")
    links = run_local(_Links(), ranks, preload=["chimera.cli.profile_calibrate"])[0]
    found = calibrate(links, ranks=ranks, threads=threads)
    write_device(found.device, out)
    print(f"wrote {out}", file=sys.stderr)
    if json:
        print(json_form.dumps(_as_dict(found), indent=1))
    else:
        _print(found, out)


@dataclass(frozen=True, slots=True)
class _Links:
    """What each rank runs."""

    def __call__(self, place: Place, tell: Tell) -> LinkTimes:
        """Time messages and all-reduces, the same on every rank."""
        tell("timing messages and all-reduces")
        torch.set_num_threads(1)
        with connected(place, timeout_s=_TIMEOUT_S):
            return time_links(place.rank, place.size)


def _print(found: Calibration, out_file: Path) -> None:
    out, device = console(), found.device
    out.print(f"{device.title}: {device.memory_bytes / 2**30:.1f} GiB", style="bold")
    out.print()
    headings = ("product", "format", "measured\nµs", "modelled\nµs", "GFLOP/s")
    rows = [
        (
            f"{each.rows} × {each.columns} × {each.depth}",
            each.dtype,
            f"{each.measured_s * 1e6:,.0f}",
            f"{each.modelled_s * 1e6:,.0f}",
            f"{each.flops_per_s / 1e9:,.1f}",
        )
        for each in found.products
    ]
    print_table(out, headings, rows)
    out.print()
    constant = {name: each.value for name, each in device.constants.items()}
    link = device.links[0]
    print_wrapped(
        out,
        f"Memory {device.memory_bytes_per_s / 1e9:,.1f} GB/s; launch {constant['launch_s'] * 1e6:.1f} µs; a message "
        f"{constant['hop_s'] * 1e6:,.0f} µs and {link.bytes_per_s / 1e9:,.2f} GB/s; an update moves "
        f"{constant['optimizer_bytes']:,.0f} bytes per parameter. The model misses the products by "
        f"{found.median_error:.0%} in the median. Plan with --device {out_file}.",
    )


def _as_dict(found: Calibration) -> dict[str, object]:
    return {
        "device": found.device.name,
        "median_error": found.median_error,
        "products": [asdict(each) for each in found.products],
        "constants": {name: each.value for name, each in found.device.constants.items()},
    }
