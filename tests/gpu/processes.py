"""Programs with a hard limit, and the GPUs that they see."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO, NoReturn

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


_running: set[subprocess.Popen[bytes]] = set()
_starting = threading.RLock()  # reentrant: a signal may come while the main thread holds it


@contextmanager
def started(
    command: Sequence[str], out: BinaryIO, *, env: Mapping[str, str] | None = None, cwd: Path = ROOT
) -> Iterator[subprocess.Popen[bytes]]:
    """A process with its output in `out`, ended afterwards with all that it has started. Raises OSError."""
    with _starting:
        process = subprocess.Popen(
            command, cwd=cwd, env=env, stdout=out, stderr=subprocess.STDOUT, start_new_session=True
        )
        _running.add(process)
    try:
        yield process
    finally:
        _kill(process)
        process.wait()
        _running.discard(process)


def run(
    command: Sequence[str], out: BinaryIO, limit_s: float, *, env: Mapping[str, str], cwd: Path = ROOT
) -> int | None:
    """Run a command; return its exit status, or None where it reached the limit. See `started`."""
    with started(command, out, env=env, cwd=cwd) as process:
        try:
            return process.wait(limit_s)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGABRT)
            with suppress(subprocess.TimeoutExpired):
                process.wait(GRACE_S)
            return None


def end_with_children() -> None:
    """End all that is started here when a signal ends this process: it would keep the GPUs."""
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, _end)


def _end(number: int, frame: object) -> NoReturn:
    with _starting:
        for process in _running:
            _kill(process)
        os._exit(128 + number)


def _kill(process: subprocess.Popen[bytes]) -> None:
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def all_gpus() -> list[str | None]:
    """Return GPUs as CUDA_VISIBLE_DEVICES names them; without any, one that is none."""
    if visible := os.environ.get("CUDA_VISIBLE_DEVICES"):
        return list(visible.split(","))
    import torch

    return [str(gpu) for gpu in range(torch.cuda.device_count())] or [None]
