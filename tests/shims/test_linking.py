"""Kernels that know NCCL and NVSHMEM through csrc/shims/shims.h alone are linked for sm_90a, without a GPU."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest

from moecomm import shims
from moecomm.backends import between_rounds
from moecomm.errors import Unsupported
from moecomm.gpu import jit, linking
from moecomm_bench import kernels
from tests.gpu import compile_rounds
from tests.shims import cubin

core = pytest.importorskip("cuda.core", reason="kernels are compiled through cuda-core")

HERE = Path(__file__).parent
HEADERS = HERE.parent.parent / "csrc"
SPEC = jit.KernelSpec("combine", ranks=4, experts=256, topk=8, hidden=7168, layout=1, type=0)
KERNELS = {"gin": "put_signal_gin.cu", "gin_proxy": "put_signal_gin.cu", "nvshmem": "put_signal_nvshmem.cu"}


@lru_cache(maxsize=8)
def link(source: str, transport: str) -> tuple[cubin.Cubin, str]:
    try:
        linking.inputs(transport, "sm_90a")
    except Unsupported as error:
        pytest.skip(str(error))
    content, log = linking.build(source, transport, "sm_90a", HEADERS, core)
    return cubin.read(content), log


def prototypes(prefix: str) -> dict[str, tuple[str, list[str]]]:
    """Return what shims.h declares with names that begin so: the type of the result and those of the arguments."""
    text = re.sub(r"//.*", "", (HEADERS / "shims" / "shims.h").read_text())
    found = re.findall(rf"__device__ (\w+\*?) ({prefix}\w+)\(([^)]*)\)", text)
    return {
        name: (result, [re.sub(r"\s*\b\w+$", "", " ".join(arg.split())) for arg in args.split(",") if arg])
        for result, name, args in found
    }


def calls_everything(functions: dict[str, tuple[str, list[str]]]) -> str:
    """A kernel that calls them all, with arguments that no compiler knows."""
    lines = []
    for name, (result, types) in functions.items():
        call = f"{name}({', '.join(f'({kind})words[{index}]' for index, kind in enumerate(types))})"
        lines.append(f"    {call};" if result == "void" else f"    words[0] = words[0] + (u64){call};")
    body = "\n".join(lines)
    return (
        '#include "shims/shims.h"\nusing namespace moecomm;\n'
        f'extern "C" __global__ void everything(volatile u64* words) {{\n{body}\n}}\n'
    )


@pytest.mark.parametrize("transport", KERNELS)
def test_a_kernel_that_puts_signals_and_waits(transport: str, directory: Path) -> None:
    found, _ = link((HERE / KERNELS[transport]).read_text(), transport)
    # Nothing is undefined: printf is the driver's own, and NVSHMEM prints where a queue fails.
    assert found.undefined == (set() if transport != "nvshmem" else {"vprintf"})
    assert "put_signal" in found.text and not any(name.startswith("moecomm_") for name in found.defined)
    # Nothing of ours traps, nor of NCCL; NVSHMEM's own functions, behind operations that we never ask for.
    assert {name for name in found.traps() if transport != "nvshmem" or "nvshmemi_transfer_" not in name} == set()
    # The wait is ours: whoever gives up leaves a record.
    assert any("report_failure" in name for name in found.defined | set(found.text))
    if transport == "nvshmem":  # what nvshmemx_cumodule_init looks for
        assert {"nvshmemi_device_state_d", "nvshmemi_ibgda_device_state_d", "nvshmemi_device_lib_version_d"} <= (
            found.defined
        )


@pytest.mark.parametrize("transport", ["gin_proxy", "nvshmem"])
def test_a_kernel_over_all_that_a_transport_offers(transport: str, directory: Path) -> None:
    name = linking.TRANSPORTS[transport]
    before = linking.included(transport) + f"#define TRANSPORT {name}\n"
    found, log = link(before + (HERE / "transport.cu").read_text(), transport)
    assert found.undefined <= {"vprintf"} and "transport" in found.text and "warning" not in log
    assert {name for name in found.traps() if "nvshmemi_transfer_" not in name} == set()


@pytest.mark.parametrize("transport", ["gin_proxy", "nvshmem"])
def test_the_benchmark_and_who_leaves_put_through_it(transport: str, directory: Path) -> None:
    between = between_rounds.leave_kernel(transport), between_rounds.quiesce_kernel(transport)
    for kernel in (*kernels.putting(transport).values(), *between):
        found, _ = link(kernel.source, transport)
        assert found.undefined <= {"vprintf"} and "moecomm_plain" in found.text


@pytest.mark.long
@pytest.mark.parametrize("transport", ["gin", "gin_proxy", "nvshmem"])
def test_rounds_between_domains_link(transport: str, directory: Path) -> None:
    """A dispatch and a combine of DeepSeek-V3.  gin has the code of a NIC that GPUs post to (GDAKI) beside the proxy's,
    and nvshmem that of IBGDA.
    """
    kernels = {spec.op: spec for spec in compile_rounds.kernels(4, transport, 4096)}
    assert set(kernels) == {"dispatch", "combine"}
    for op, spec in kernels.items():
        found, _ = link(jit.source(spec), transport)
        assert found.undefined <= {"vprintf"} and f"moecomm_{op}" in found.text
        if transport == "nvshmem":
            assert "nvshmemi_ibgda_device_state_d" in found.defined
        if transport == "gin":
            proxy, _ = link(jit.source(replace(spec, transport="gin_proxy")), "gin_proxy")
            with_nic, without = (sum(map(len, one.text.values())) for one in (found, proxy))
            assert with_nic - without > 32 << 10, "no code of a NIC"


@pytest.mark.parametrize("transport", ["gin", "gin_proxy", "nvshmem"])
def test_whatever_is_declared_is_defined(transport: str, directory: Path) -> None:
    functions = prototypes(f"moecomm_{transport.removesuffix('_proxy')}_")
    assert len(functions) >= 18
    found, log = link(calls_everything(functions), transport)
    assert found.undefined <= {"vprintf"} and "everything" in found.text
    assert transport == "nvshmem" or found.traps() == set()
    assert "warning" not in log


def test_a_kernel_for_the_proxy_alone_is_smaller(directory: Path) -> None:
    source = (HERE / KERNELS["gin"]).read_text()
    every, proxy = (link(source, name)[0] for name in ("gin", "gin_proxy"))
    assert len(proxy.text["put_signal"]) < 0.5 * len(every.text["put_signal"])


def test_traps_are_found() -> None:
    """The test of tests: a kernel that traps, and one that does not."""
    for body, traps in (('asm volatile("trap;");', {"k"}), ("*p = 1;", set())):
        options = core.ProgramOptions(std="c++20", arch="sm_90a")
        source = f'extern "C" __global__ void k(int* p) {{ if (*p == 7) {{ {body} }} }}'
        content = bytes(core.Program(source, "c++", options).compile("cubin").code)
        assert cubin.read(content).traps() == traps


def test_an_nvlink_kernel_is_linked_with_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Neither compiling it nor its place in the cache depends on shims."""

    def never(*_: Any) -> Any:
        raise AssertionError("an lsa kernel asked for a shim")

    for name in ("build", "digest", "inputs"):
        monkeypatch.setattr(linking, name, never)
    monkeypatch.setattr(shims, "find", never)
    monkeypatch.setenv("MOECOMM_CACHE_DIR", str(tmp_path / "kernels"))
    monkeypatch.setattr(jit, "build", lambda *_: (b"cubin", ""))
    assert jit.compile(SPEC) == b"cubin"
    assert "Lsa>(args)" in jit.source(SPEC) and "shims" not in jit.source(SPEC)
