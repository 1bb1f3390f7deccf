"""The bits of a token on a GPU, alone and among others, and of layers whose rows travel unsummed."""

from __future__ import annotations

from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch

import moecomm
from moecomm import _native
from moecomm.backends import host, lsa
from moecomm.backends.lsa_kernels import combine_spec
from moecomm.base import packets
from moecomm.base.protocol import LAYOUTS
from moecomm.gpu import jit
from moecomm.testing import LocalBuffers, ranks

from ..device.test_kernels_of_gpu_tests import on_a_gpu
from ..test_batch_invariance import (
    EXPERTS,
    HIDDEN,
    HOST,
    SIZES,
    batches,
    check_everything,
    check_other_tokens,
    tokens,
)

pytestmark = [pytest.mark.gpu1, pytest.mark.timeout(900)]
GPU: dict[str, Any] = {"backend": "lsa", "device": 0, "timeout_s": 20}
INNER = 136
CASES: list[tuple[str, str | None, tuple[Any, ...]]] = [
    ("expert", None, (None, "exact", "fp8", "rows")),
    ("batched", "fp8", ("int8", "rows")),
    ("flat", None, (None, "fp8")),
]
ACROSS = [("expert", (None, "exact")), ("flat", ("int8",))]
UNSUMMED = [("expert", torch.bfloat16), ("batched", torch.float32)]
COUNTS = (1, 2, 4)


_room = packets.room


def packet_room(ranks: int, max_tokens: int, row: int) -> int:
    """In place of moecomm.base.packets.room: some ranks have too many tokens for packets."""
    return _room(ranks, 10, row)


def launched() -> set[jit.KernelSpec]:
    """Return the kernels of the rounds of these tests: prepared as for a GPU, and run by CPU ranks."""
    specs: set[jit.KernelSpec] = set()

    def run_all(given: list[Any]) -> None:
        for args in given:
            is_dispatch = isinstance(args, _native.DispatchArgs)
            specs.add(on_a_gpu(args, LAYOUTS[args.layout]) if is_dispatch else combine_spec(args))
        _native.host_run_all(given)

    with (
        patch.object(host, "packet_bytes", packet_room),
        patch.object(ranks, "_native", SimpleNamespace(host_run_all=run_all)),
    ):
        for layout, quantize, wires in CASES:
            check_other_tokens(layout, quantize, HOST, wires)
        with patch.object(host, "direct_bytes", lambda *_: 32 << 10):
            for layout, wires in ACROSS:
                check_other_tokens(layout, None, HOST, wires, domain_ranks=2)
        for layout, dtype in UNSUMMED:
            check_everything(layout, dtype, HOST, COUNTS)
    return specs


@pytest.fixture(scope="module", autouse=True)
def compiled() -> None:
    """Compile on all cores: virtual ranks would, one kernel after the other."""
    with ProcessPoolExecutor(mp_context=get_context("spawn")) as pool:
        list(pool.map(jit.compile, launched()))


@pytest.fixture(autouse=True)
def few_packets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packets, "room", packet_room)


@pytest.mark.parametrize(("layout", "quantize", "wires"), CASES)
def test_other_tokens_change_nothing(layout: str, quantize: str | None, wires: Any) -> None:
    check_other_tokens(layout, quantize, GPU, wires)


@pytest.mark.parametrize(("layout", "wires"), ACROSS)
def test_other_tokens_change_nothing_across_domains(layout: str, wires: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of few tokens go direct."""
    monkeypatch.setattr(lsa, "direct_bytes", lambda *_: 32 << 10)
    check_other_tokens(layout, None, GPU, wires, domain_ranks=2)


@pytest.mark.parametrize(("layout", "dtype"), UNSUMMED)
def test_nothing_changes_a_token_whose_rows_travel_unsummed(layout: str, dtype: torch.dtype) -> None:
    check_everything(layout, dtype, GPU, COUNTS)


def test_verified_rows_travel_unsummed() -> None:
    check_everything("expert", torch.bfloat16, {**GPU, "verify_every": 1}, (1, 4))


def test_a_graph_replays_with_rows_outside_of_the_window() -> None:
    """A captured copy takes them there."""
    with moecomm.Buffer("self", **SIZES, device="cuda") as buffer:
        x, ids, weights = (tensor.cuda() for tensor in tokens(24, 0))
        routed = buffer.dispatch(x, ids, weights, sync=True)
        y, out = torch.empty_like(routed.x), torch.empty_like(x)

        def step() -> None:
            buffer.combine(y, routed.handle, wire="rows", out=out)

        y.copy_(routed.x)
        step()  # compiles
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            step()
        for power in range(3):
            y.copy_(routed.x * 2.0**power)
            out.fill_(torch.nan)
            graph.replay()
            assert torch.equal(out, buffer.combine(y.clone(), routed.handle, wire="rows"))
        buffer.check()


def test_operators_have_the_bits_of_a_buffer() -> None:
    """Weights of operators are no tensors of the window: they are brought there."""
    with moecomm.Buffer("self", **SIZES, device="cuda") as buffer:
        x, ids, weights = (tensor.cuda() for tensor in tokens(24, 0))
        routed = buffer.dispatch(x, ids, weights, sync=True)
        wanted = buffer.combine(routed.x, routed.handle, wire="rows")
        sent = moecomm.ops.dispatch(buffer, x, ids, weights)
        assert torch.equal(moecomm.ops.combine(sent.x.clone(), sent.handle, wire="rows"), wanted)


@pytest.mark.parametrize("fused", [False, True], ids=["unfused", "fused"])
def test_nothing_changes_a_token_of_a_layer(fused: bool) -> None:
    """Layers of moecomm's GEMMs, with a row an expert and with a hundred, on 1, 2 and 4 ranks."""
    g = torch.Generator().manual_seed(0)
    w13 = (torch.randn(EXPERTS, 2 * INNER, HIDDEN, generator=g) / 16).bfloat16().cuda()
    w2 = (torch.randn(EXPERTS, HIDDEN, INNER, generator=g) / 12).bfloat16().cuda()
    token, found = tokens(8, 1), []
    for count in (1, 2, 4):
        given = [([token], 0)] if count == 1 else batches(token, count)
        with LocalBuffers(count, **SIZES, **GPU) as buffers:
            for batch, first in given:
                calls = []
                for buffer, (x, ids, weights) in zip(buffers.buffers, batch, strict=True):
                    mine = slice(buffer.local_experts[0], buffer.local_experts[-1] + 1)
                    how: dict[str, Any] = {"x": x.cuda(), "topk_idx": ids.cuda(), "topk_weights": weights.cuda()}
                    calls.append({**how, "w13": w13[mine], "w2": w2[mine], "wire": "rows", "fused": fused})
                outs = buffers.moe(calls)
                buffers.check()
                found.append(outs[min(1, count - 1)][first : first + 8].cpu())
    assert all(torch.equal(out, found[0]) for out in found) and bool(found[0].any())
