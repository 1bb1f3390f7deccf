"""Windows in Triton: the examples compile for sm_90 without a GPU, and Triton's interpreter runs them on CPU ranks."""

from __future__ import annotations

import importlib
import importlib.util
import os
import re
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import moecomm

from ..conftest import Ranks
from ..live import shorten
from .test_examples import heated, reference

HOST: dict[str, Any] = {"backend": "host", "timeout_s": 20.0}
pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="wants triton")
sys.path.append(str(Path(__file__).parents[2] / "examples"))


KERNELS: dict[str, tuple[str, dict[str, str], dict[str, int]]] = {
    "ring": ("window_ring_triton", {"columns": "i32", "before": "i64"}, {"block": 1024}),
    "heat": ("window_halo_triton", {"cells": "i32", "steps": "i32"}, {"block": 256}),
}


@pytest.mark.parametrize("entry", KERNELS)
def test_the_examples_compile_with_release_and_acquire(entry: str) -> None:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    module, numbers, constants = KERNELS[entry]
    signature = {"handle": "*i64", **numbers, **dict.fromkeys(constants, "constexpr")}
    kernel = getattr(importlib.import_module(module), entry)
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants)
    ptx = triton.compile(source, target=GPUTarget("cuda", 90, 32)).asm["ptx"]
    assert re.search(r"(?:red|atom)[\w.]*sys[\w.]*release[\w.]*add", ptx) and re.search(r"exch", ptx)
    assert re.search(r"ld[\w.]*sys[\w.]*acquire", ptx) and "globaltimer" in ptx and "trap;" not in ptx


def _interpreted(rank: int, group: Any) -> str:
    """Triton's interpreter has atomics of the CPU, but no clock: those of this process stand in."""
    os.environ["TRITON_INTERPRET"] = "1"  # read when a function is decorated
    import moecomm.triton as mt

    mt.globaltimer = time.monotonic_ns
    from window_halo_triton import spread
    from window_ring_triton import AllGather, ring

    ranks, cells, steps = group.size(), 300, 9
    found = spread(group, heated(rank, cells), steps, **HOST)
    torch.testing.assert_close(found, reference(ranks, cells, steps)[rank])
    gather = AllGather(group, 100, **HOST)
    for call in range(3):
        rows = gather(torch.full((100,), rank + 10.0 * call))
        assert rows[:, -1].tolist() == [other + 10.0 * call for other in range(ranks)]
    gather.window.close()
    with moecomm.Window(group, 1 << 12, **HOST) as window:
        shorten(window, 0.5)
        if rank == 0:  # the other one does not come
            ring[(1,)](mt.handle(window), 16, 0, 16)
            with pytest.raises(moecomm.Timeout) as caught:
                window.check()
            assert caught.value.peer == 1
        dist.barrier(group)
    return "done"


def test_the_examples_on_cpu_ranks(tmp_path: Path) -> None:
    ranks = Ranks(tmp_path, "spawn")
    try:
        assert ranks.run(2, _interpreted) == ["done"] * 2
    finally:
        ranks.stop()


def test_the_handle_has_the_fields_that_the_functions_read() -> None:
    import moecomm.triton as mt

    with moecomm.Window("self", 4096, backend="host") as window:
        words = mt.handle(window)
        assert words.dtype == torch.int64 and words.numpy().tobytes() == window.handle
        native = window._opened.handle
        fields = (mt._PEERS, mt._CONTROL, mt._ABORT_HOST, mt._TIMEOUT, mt._ABORT, mt._LEFT, mt._SIGNALS)
        found = [int(words[field.value]) for field in fields]
        assert found == [
            native.peers,
            native.control,
            native.abort_host,
            native.timeout_ns,
            native.abort,
            native.left,
            native.signals,
        ]
        assert int(words[mt._RANKS.value]) == 1 << 32  # rank 0 of 1
