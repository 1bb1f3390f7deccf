"""Programs under a hard limit, and the GPUs that they see."""

from __future__ import annotations

import os
import signal
import subprocess
from contextlib import suppress
from pathlib import Path

ROOT = Path(__file__).parents[2]
ENVIRONMENT = {
    "PYTHONPATH": str(ROOT),
    "PYTHONFAULTHANDLER": "1",
    "CUDA_DEVICE_MAX_CONNECTIONS": "32",
    # Multicast stays off.
    "NCCL_NVLS_ENABLE": "0",
    "NVSHMEM_DISABLE_NVLS": "1",
    "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
}
GRACE_S = 5  # to say where threads were


def wait(process: subprocess.Popen[bytes], limit_s: float) -> int | None:
    """Return the exit status of the leader of a session; None where it had to be ended, with all that it started."""
    try:
        return process.wait(limit_s)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGABRT)
        with suppress(subprocess.TimeoutExpired):
            process.wait(GRACE_S)
        return None
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def all_gpus() -> list[str | None]:
    """Return GPUs as CUDA_VISIBLE_DEVICES names them; without any, one that is none."""
    if visible := os.environ.get("CUDA_VISIBLE_DEVICES"):
        return list(visible.split(","))
    import torch

    return [str(gpu) for gpu in range(torch.cuda.device_count())] or [None]
