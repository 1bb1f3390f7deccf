"""Kernels with spans compile for sm_90a, and without a trace kernels are what they would be if there were no spans."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest
import torch

from moecomm.fused import compute, kernels, schedules
from moecomm.gpu import jit, loader, span_ring
from moecomm.gpu.cubin import executable_sections, lacks_descriptor
from moecomm.gpu.plain_kernel import PlainKernel
from moecomm.observe.tracing.files import CLOCK

from ..compiled import Kernel, check_kernel
from ..few import few
from .test_compile import SPECS

BF16, FP8 = torch.bfloat16, torch.float8_e4m3fn
KERNELS: dict[str, Kernel] = {
    **{
        name: SPECS[name]
        for name in ("dispatch", "dispatch few tokens", "dispatch of row descriptors", "dispatch ends")
    },
    **{name: SPECS[name] for name in ("combine", "combine few tokens", "combine in place", "combine across domains")},
    "publish": kernels.publish_kernel(BF16, FP8, 7168),
    "layer": compute.layer_kernel(BF16, True, schedules.schedule_of_both(BF16, 256, 2048), 7168),
    "FP8 layer": compute.layer_kernel(FP8, True, schedules.schedule_of_both(FP8, 256, 2048), 7168, BF16),
    **{
        f"packed layer {name}": compute.layer_kernel(FP8, True, schedules.PACKED_SCHEDULES[name], 7168, BF16)
        for name in ("64x3c1", "128x3c1r")
    },
    "sum": kernels.reduce_kernel(BF16, 7168, 8),
}


CLOCKS = {"globaltimer": CLOCK}


def built(kernel: Kernel, definition: str = "") -> tuple[bytes, str]:
    pytest.importorskip("cuda.core", reason="kernels are compiled through cuda-core")
    source = kernel.source if isinstance(kernel, PlainKernel) else jit.source(kernel)
    return loader.build(definition + source, kernel.transport, "sm_90a")


def code(kernel: Kernel) -> list[bytes]:
    return sorted(executable_sections(built(kernel)[0]))


@pytest.fixture
def without_spans(tmp_path: Path) -> Path:
    """A copy of csrc from which all spans are taken out."""
    copy = tmp_path / "csrc"
    shutil.copytree(loader.headers(), copy)
    found = 0
    for path in copy.rglob("*.cuh"):
        text, spans = re.subn(r"^ *MOECOMM_(LAYER_)?SPAN\(.*\);\n", "", path.read_text(), flags=re.MULTILINE)
        text = re.sub(r'#include "trace.cuh"\n', "", text)
        found += spans
        path.write_text(text)
    (copy / "device" / "trace.cuh").unlink()
    assert found >= 20
    return copy


@pytest.mark.parametrize("name", few(KERNELS, "dispatch few tokens", "sum"))
def test_without_a_trace_a_kernel_has_the_code_that_it_would_have_without_spans(
    name: str, without_spans: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = code(KERNELS[name])
    monkeypatch.setattr(loader, "headers", lambda: without_spans)
    assert code(KERNELS[name]) == here


@pytest.mark.parametrize("name", few(KERNELS, "dispatch few tokens", "sum"))
def test_a_traced_kernel_has_a_ring_and_fits(name: str) -> None:
    cubin, log = built(KERNELS[name], span_ring.DEFINITION)
    assert span_ring.SYMBOL.encode() in cubin
    assert span_ring.SYMBOL.encode() not in built(KERNELS[name])[0]
    assert not lacks_descriptor(cubin)
    # A span keeps its begin in registers: a kernel that uses all of them spills a few words, and no more.
    assert max(map(int, re.findall(r"(\d+) bytes spill stores", log))) <= 64


@pytest.mark.compiled(CLOCKS)
@pytest.mark.parametrize("name", CLOCKS)
def test_the_kernel_that_stores_the_time_compiles(name: str) -> None:
    check_kernel(CLOCKS[name])


def test_only_a_traced_kernel_is_compiled_with_the_definition() -> None:
    spec = SPECS["dispatch"]
    assert "MOECOMM_TRACE" not in jit.source(spec)
    traced = jit.source(jit.KernelSpec(**{**vars(spec), "traced": True}))
    assert traced == span_ring.DEFINITION + jit.source(spec)
