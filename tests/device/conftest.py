"""The compiler of kernels, on all cores."""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor

import pytest


@pytest.fixture(scope="module")
def compilers() -> Iterator[ProcessPoolExecutor]:
    """Processes for jit.build: one program of NVRTC uses one core.  What is not begun at the end is dropped."""
    with ProcessPoolExecutor(os.cpu_count()) as pool:
        yield pool
        pool.shutdown(cancel_futures=True)
