"""Rows that moecomm itself makes for a combine on GPUs: in the window where peers read them, with the same results."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import moecomm
from moecomm.base.choices import Layout
from moecomm.combine import in_window
from moecomm.testing import LocalBuffers, random_layer

from ..combine import test_in_window as on_host
from ..combine.test_in_window import LAYOUTS_AND_WIRES, check_rows_in_fp8, check_rows_in_use, inside

pytestmark = [pytest.mark.gpu1, pytest.mark.timeout(600)]
SIZES: dict[str, Any] = {
    "ranks": 2,
    "hidden": 512,
    "intermediate": 136,
    "num_experts": 16,
    "topk": 8,
    "max_tokens": 520,
    "dtype": torch.bfloat16,
}
BUFFER = {name: size for name, size in SIZES.items() if name != "intermediate"}
made = on_host.made


@pytest.mark.parametrize("wire", [None, "rows"])
def test_experts_of_a_layer_write_where_peers_read(
    wire: Any, made: list[torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows that are added up first lie outside."""
    with LocalBuffers(**BUFFER, backend="lsa", device=0, timeout_s=20) as ranks:
        for seed in range(6):
            case = random_layer(seed, **SIZES)
            case.wire = wire
            calls = [{**case.call(rank, "cuda"), "fused": False} for rank in range(2)]
            outs = ranks.moe(calls)
            ranks.check()
            assert all(each == (wire == "rows") for each in inside(ranks.buffers, made))
            with monkeypatch.context() as outside:
                outside.setattr(in_window, "for_call", lambda *about: None)
                again = ranks.moe(calls)
            ranks.check()
            assert not any(inside(ranks.buffers, made))
            for rank, (out, same) in enumerate(zip(outs, again, strict=True)):
                case.check(rank, out)
                assert torch.equal(out, same)


def test_a_graph_of_such_layers_replays(made: list[torch.Tensor]) -> None:
    """Two layers share memory in a graph, and eager ones beside it have other memory or come before the replay."""
    g = torch.Generator().manual_seed(0)
    sizes: dict[str, Any] = {name: BUFFER[name] for name in ("hidden", "num_experts", "topk", "max_tokens", "dtype")}
    with moecomm.Buffer("self", **sizes, device="cuda") as buffer:
        x = torch.randn(64, 512, generator=g).bfloat16().cuda()
        ids, weights = torch.rand(64, 16, generator=g).topk(8).indices.cuda(), torch.rand(64, 8, generator=g).cuda()
        w13 = (torch.randn(16, 272, 512, generator=g) / 16).bfloat16().cuda()
        w2 = (torch.randn(16, 512, 136, generator=g) / 12).bfloat16().cuda()

        def layers() -> torch.Tensor:
            first = buffer.moe(x, ids, weights, w13, w2, wire="rows", fused=False)
            return buffer.moe(first, ids, weights, w13, w2, wire="rows", fused=False)

        layers()  # compiles
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = layers()
        assert all(inside([buffer], made))
        for power in range(3):
            x.copy_(torch.randn(64, 512, generator=g) * 2.0**power)
            out.fill_(torch.nan)
            wanted = layers()
            graph.replay()
            assert torch.equal(out, wanted) and torch.equal(layers(), wanted)
        buffer.check()


@pytest.mark.parametrize(("layout", "wire"), LAYOUTS_AND_WIRES)
def test_rows_in_fp8_are_dequantized_where_peers_read(
    layout: Layout, wire: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(in_window, "_LEAST", 0)
    check_rows_in_fp8(layout, wire, "cuda")


@pytest.mark.parametrize("layout", ["expert", "batched"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_only_rows_in_use_are_copied_there(layout: Layout, dtype: torch.dtype) -> None:
    check_rows_in_use(layout, dtype, "cuda")
