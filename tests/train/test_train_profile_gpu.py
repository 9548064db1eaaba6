"""A profile on a CUDA device: ranges for NVIDIA's tools, the allocator's history, memory as it was allocated."""

import pytest
import torch
from small_runs import small_config

from chimera.cli.training import run_local

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def test_every_tool_of_a_cuda_device_is_used(tmp_path):
    """Timelines hold the allocator's curves, and each rank leaves its history."""
    options = {"steps": 2, "out": tmp_path / "profiles", "nvtx": "true", "memory_snapshot": "true"}
    config = small_config(
        tmp_path, runtime__device="cuda", **{f"profile__{name}": value for name, value in options.items()}
    )
    found = run_local(config)
    assert found.out.name == "run_chimera_2stages_2gpus_microbs2_acc1"
    assert all(peak > 0 for peak in found.median[0].peak_bytes)
    assert found.median[0].recorded_memory is not None
    assert {path.name for path in found.out.glob("memory_rank*")} == {"memory_rank0.pickle", "memory_rank1.pickle"}
