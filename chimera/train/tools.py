"""Other tools beside a profile's recorder: torch's profiler and the CUDA allocator's history, one further step each.

They slow a step down, so no time of such a step is used. Each rank writes its own file. NVIDIA's ranges are
``train.observers``' matter.
"""

from pathlib import Path

import torch
from torch.autograd.profiler import record_function
from torch.profiler import ProfilerActivity

from chimera.errors import ConfigError
from chimera.ir.files import replacing
from chimera.train.profile_options import ProfileOptions
from chimera.train.stepping import Steps

__all__ = ["require_tools", "snapshot_memory", "trace_with_torch"]


def require_tools(options: ProfileOptions, device: torch.device) -> None:
    """Refuse what this device has no tool for.

    Raises:
        ConfigError: the option, and what it needs.
    """
    for option in ("nvtx", "memory_snapshot"):
        if getattr(options, option) and device.type != "cuda":
            raise ConfigError(
                f"[profile] {option} = true needs a CUDA device, and the ranks compute on {device.type}; leave it out, "
                "or set runtime.device to cuda where there is one"
            )
    if options.virtual and device.type == "cuda":
        raise ConfigError("[profile] virtual = true waits on the CPU; set runtime.device to cpu")


def trace_with_torch(steps: Steps, folder: Path) -> Path:
    """Make a step under torch's profiler, actions as ranges, and write this rank's trace; return its path."""
    on_cuda = steps.pipe.groups.device.type == "cuda"
    activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * on_cuda
    steps.pipe.observer = lambda instruction: record_function(str(instruction))
    try:
        with torch.profiler.profile(activities=activities) as profiler:
            steps.make()
    finally:
        steps.pipe.observer = None
    path = folder / f"torch_profiler_rank{steps.pipe.groups.rank}.json"
    with replacing(path) as temporary:
        profiler.export_chrome_trace(str(temporary))
    return path


def snapshot_memory(steps: Steps, folder: Path) -> Path:
    """Make a step with the history of allocations kept, and write it as https://pytorch.org/memory_viz takes it."""
    memory = torch.cuda.memory
    memory._record_memory_history()  # noqa: SLF001 - torch documents it under this name
    try:
        steps.make()
        path = folder / f"memory_rank{steps.pipe.groups.rank}.pickle"
        with replacing(path) as temporary:
            memory._dump_snapshot(str(temporary))  # type: ignore[no-untyped-call]  # noqa: SLF001
    finally:
        memory._record_memory_history(enabled=None)  # noqa: SLF001
    return path
