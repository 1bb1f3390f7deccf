"""Windows in Triton: the example compiles for sm_90 without a GPU, with the orders that it wants."""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path

import pytest
import torch

import moecomm

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="wants triton")
sys.path.append(str(Path(__file__).parents[2] / "examples"))


def test_the_ring_compiles_with_release_and_acquire() -> None:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource
    from window_ring_triton import ring

    signature = {"handle": "*i64", "columns": "i32", "before": "i64", "block": "constexpr"}
    source = ASTSource(fn=ring, signature=signature, constexprs={"block": 1024})
    ptx = triton.compile(source, target=GPUTarget("cuda", 90, 32)).asm["ptx"]
    assert re.search(r"red[\w.]*sys[\w.]*release[\w.]*add", ptx) and re.search(r"exch", ptx)
    assert re.search(r"ld[\w.]*sys[\w.]*acquire", ptx) and "globaltimer" in ptx and "trap;" not in ptx


def test_the_handle_has_the_fields_that_the_functions_read() -> None:
    import moecomm.triton as mt

    with moecomm.Window("self", 4096, backend="host") as window:
        words = mt.handle(window)
        assert words.dtype == torch.int64 and words.numpy().tobytes() == window.handle
        native = window._opened.handle
        found = [int(words[which.value]) for which in (mt._ABORT_HOST, mt._TIMEOUT, mt._ABORT, mt._LEFT, mt._SIGNALS)]
        assert found == [native.abort_host, native.timeout_ns, native.abort, native.left, native.signals]
        assert int(words[mt._RANKS.value]) == 1 << 32  # rank 0 of 1
