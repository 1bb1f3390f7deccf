"""The benchmark's kernels compile for sm_90a, without a GPU, within a multiprocessor; their structs are as packed."""

from __future__ import annotations

import ctypes
import re
from pathlib import Path

import pytest

from moecomm.gpu import loader
from moecomm_bench import ceiling, decode, gather_kernels, kernels, latency, overlap, start

from ..compiled import check_compiled, check_kernel, functions_of
from ..few import few
from ..window.test_compile import compiled

pytest.importorskip("cuda.core", reason="kernels are compiled through cuda-core")

ALL = {**kernels.ALL_TO_ALL, **kernels.PING_PONG, "hold": kernels.HOLD[4], "delay": kernels.DELAY, **kernels.START}


@pytest.mark.compiled(ALL)
@pytest.mark.parametrize("name", few(ALL, "TMA", "start", "delay"))
def test_compiles_within_a_multiprocessor(name: str) -> None:
    check_kernel(ALL[name], calls=True)


def test_kernels_of_the_all_gather_study_need_only_the_headers_of_a_user() -> None:
    assert bytes(gather_kernels.cubin().code).startswith(b"\x7fELF")
    text = gather_kernels.SOURCE.read_text()
    assert re.findall(r"#include (.*)", text) == ["<moecomm/window.cuh>"]
    threads, blocks, tile = gather_kernels.THREADS, gather_kernels.BLOCKS_OF_SM, gather_kernels.TILE
    assert f"kThreads = {threads}, kBlocks = {blocks}, kTile = {tile};" in text
    found = compiled(text)
    check_compiled(found, threads * blocks)
    code = "".join(functions_of(found))
    assert "HMMA" not in code and "GMMA" not in code, "scalar"


def test_a_ring_is_what_the_kernels_count_on() -> None:
    """The names are those of csrc/bench; the blocks hold as many warps as there are rings."""
    text = "".join((loader.headers() / "bench" / f"{name}.cuh").read_text() for name in ("all_to_all", "ping_pong"))
    assert re.search(rf"kPiece = {kernels.PIECE}, kSlots = {kernels._SLOTS}, kMovers = 6;", text)
    assert re.search(rf"kPutPiece = {kernels.PIECE}, kPutSlots = {kernels._SLOTS};", text)
    for kernel in ALL.values():
        assert kernel.rings in (0, kernel.threads // 32)


def test_structs_are_packed_as_the_kernels_read_them() -> None:
    """Sizes are those that the headers assert, and fields come in their order there."""
    structs = {
        ("all_to_all", "AllToAllArgs"): ceiling._CeilingArgs,
        ("ping_pong", "PingPongArgs"): latency._PingPongArgs,
        ("sleep", "HoldArgs"): overlap._HoldArgs,
        ("start", "StartArgs"): start._StartArgs,
        ("sleep", "DelayArgs"): decode._DelayArgs,
    }
    for (header, name), packed in structs.items():
        text = (loader.headers() / "bench" / f"{header}.cuh").read_text()
        body = re.search(rf"struct {name} \{{(.*?)\n\}};", text, re.DOTALL)
        asserted = re.search(rf"static_assert\(sizeof\({name}\) == (.*?),", text)
        assert body and asserted
        fields = re.sub(r"//.*|\[kMaxRanks\]", "", body[1])
        names = [name.strip() for line in re.findall(r"[ui]\d+ ([^;]+);", fields) for name in line.split(",")]
        assert [name for name, *_ in packed._fields_] == names
        assert ctypes.sizeof(packed) == eval(asserted[1], {"kMaxRanks": 64})


def test_headers_are_those_of_this_repository_or_the_package() -> None:
    assert (loader.headers() / "bench" / "all_to_all.cuh").is_file()
    assert isinstance(loader.headers(), Path)
