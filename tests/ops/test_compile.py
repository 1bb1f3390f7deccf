"""Operators in graphs: what torch checks of any operator, and torch.compile without a break."""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

import moecomm
from moecomm import _native, ops
from moecomm.base import known
from moecomm.base.protocol import LAYOUTS
from moecomm.rounds import plans
from moecomm.rounds.memory import WindowMemory
from tests.ops.ranks import case

from ..backends.conftest import all_ranks
from ..few import few

pytestmark = pytest.mark.usefixtures("fresh_compiler")


@pytest.fixture
def _clean_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two runs of an operator are compared byte by byte: what nothing writes must not be what another run left."""
    allocate, windows = WindowMemory.allocate, {}

    def zeroed(self: WindowMemory, *sizes: int) -> Any:
        blocks = allocate(self, *sizes)
        for block in blocks:
            capsule = block.tensor(windows["base"] + block.offset, (block.nbytes,), 1, 8, 1, 0, None)
            ctypes.memset(torch.utils.dlpack.from_dlpack(capsule).data_ptr(), 0, block.nbytes)
        return blocks

    monkeypatch.setattr(WindowMemory, "allocate", zeroed)
    opened = moecomm.Buffer.__init__

    def init(self: moecomm.Buffer, *args: Any, **settings: Any) -> None:
        opened(self, *args, **settings)
        windows["base"] = self.rounds.session.context.peers[self.rank]
        nothing = SimpleNamespace(dispatch=lambda *_: (None, False), combine=lambda *_: (None, False))
        self.rounds.known_calls = cast("_native.KnownCalls", nothing)  # it would take memory natively

    monkeypatch.setattr(moecomm.Buffer, "__init__", init)


@pytest.fixture
def _same_round(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor may handles differ by the round that their dispatch was."""
    dispatch = ops.rounds.run_dispatch

    def forgets(rounds: Any, *given: Any, **others: Any) -> Any:
        routed = dispatch(rounds, *given, **others)
        sent = routed.handle.args.route.sent
        ctypes.c_uint32.from_address(sent + 8 * rounds.num_ranks).value = 0  # round_of in csrc/protocol/args.h
        return routed

    monkeypatch.setattr(ops.rounds, "run_dispatch", forgets)


@pytest.mark.usefixtures("_clean_memory", "_same_round")
@pytest.mark.parametrize("layout", LAYOUTS)
def test_torch_finds_nothing_wrong_with_the_operators(layout: str) -> None:
    c = case(1, seed=1)
    operators, (x, idx, weights) = torch.ops.moecomm, (c.x[0], c.topk_idx[0], c.topk_weights[0])
    room = 8 if layout == "batched" else 26  # less than the worst case, 9 and 27
    with c.buffer(None, window_bytes=1 << 22) as buffer:
        here = (buffer.name, layout)
        wanted = x.clone().requires_grad_(), idx, weights.clone().requires_grad_()
        torch.library.opcheck(operators.dispatch.default, (*wanted, *here, 4, -1, True))
        torch.library.opcheck(operators.dispatch.default, (x, idx, None, *here, 1, room, True))
        routed = ops.dispatch(buffer, x, idx, weights, layout=layout)
        handle = routed.handle
        rows, memory = handle.max_rows, handle.memory
        again = (x.clone().requires_grad_(), memory, *here, rows, True)
        torch.library.opcheck(operators.dispatch_again.default, again)
        y = torch.randn(routed.x.shape, requires_grad=True)
        row_weights = None if handle.row_weights is None else handle.row_weights.detach().requires_grad_()
        combine = operators.combine.default
        graph = torch.empty(0, requires_grad=True)
        torch.library.opcheck(combine, (y, row_weights, memory, *here, rows, len(x), None, True, None, graph, True))
        torch.library.opcheck(combine, (y.detach(), None, memory, *here, rows, len(x), "float32", False))
        if layout != "flat":
            torch.library.opcheck(
                combine, (y, row_weights, memory, *here, rows, len(x), "rows", True, None, graph, True)
            )
        grads = torch.randn((rows, c.topk) if layout == "flat" else routed.x.shape[:-1])
        for weight_grads in (grads, None):
            call = (y.detach(), weight_grads, memory, *here, rows, len(x))
            torch.library.opcheck(operators.dispatch_backward.default, call)
        cast = {"quantize": "mxfp8", "scale_format": "fp32", "grad_wire": torch.float32}
        torch.library.opcheck(operators.dispatch.default, (*wanted, *here, 4, -1, True), cast)
        given = (x, idx, None, *here, 1, room, True)
        for name in ("int8_group", "fp8_tensor"):
            cast = {"quantize": name, "dequantize": False}
            cast["global_scale"] = torch.ones(1) if name == "fp8_tensor" else None
            torch.library.opcheck(operators.dispatch.default, given, cast)
        torch.library.opcheck(operators.dispatch_again.default, again, {"quantize": "int8_token"})
        call = (y, row_weights, memory, *here, rows, len(x), None, True)
        torch.library.opcheck(combine, call, {"gradients": True, "grad_wire": "fp8"})


def layer(
    buffer: moecomm.Buffer, x: torch.Tensor, idx: torch.Tensor, weights: torch.Tensor, w: torch.Tensor, layout: str
) -> torch.Tensor:
    routed = ops.dispatch(buffer, x, idx, weights, layout=layout, max_rows=8 if layout == "batched" else 60)
    y = torch.tanh(routed.x @ w)
    if layout == "flat":
        assert routed.topk_weights is not None
        y = y * routed.topk_weights.sum(dim=1, keepdim=True)
    return ops.combine(y, routed.handle) + x


def run(
    function: Callable[..., torch.Tensor], buffer: moecomm.Buffer, c: Any, layout: str, tokens: int
) -> tuple[torch.Tensor, ...]:
    rank = buffer.rank
    x, weights = (t[rank][:tokens].clone().requires_grad_() for t in (c.x, c.topk_weights))
    w = torch.eye(c.hidden).requires_grad_()
    out = function(buffer, x, c.topk_idx[rank][:tokens], weights, w, layout)
    return (out.detach(), *torch.autograd.grad(out.square().sum(), (x, weights, w)))


@pytest.mark.parametrize(
    ("backend", "layout"),
    few(
        [("eager", "expert"), *(("aot_eager", layout) for layout in LAYOUTS)],
        ("aot_eager", "flat"),
        ("aot_eager", "batched"),
    ),
)
def test_a_compiled_layer_has_no_break_and_the_same_bits(layout: str, backend: str) -> None:
    c = case(1, seed=1)
    with c.buffer(None) as buffer:
        compiled = torch.compile(layer, fullgraph=True, backend=backend)
        for tokens in (9, 7, 1, 0):  # of any number: the first, then a symbol, then the special ones
            for got, want in zip(
                run(compiled, buffer, c, layout, tokens), run(layer, buffer, c, layout, tokens), strict=True
            ):
                assert torch.equal(got, want), f"{tokens} tokens"
        gc.collect()
        assert buffer.rounds.memory.used == 0


def test_a_compiled_layer_wants_no_hash(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which torch 2.11 can't trace."""
    c = case(1, seed=1)
    for module in (known, plans):
        monkeypatch.setattr(module, "hash", torch.compiler.disable(hash), raising=False)
    with c.buffer(None) as buffer:
        compiled = torch.compile(layer, fullgraph=True, backend="eager")
        for got, want in zip(run(compiled, buffer, c, "flat", 9), run(layer, buffer, c, "flat", 9), strict=True):
            assert torch.equal(got, want)


def test_room_for_rows_may_follow_from_the_number_of_tokens() -> None:
    """Which is a symbol from the second on."""
    c = case(1, seed=1)
    w13, w2 = (torch.ones(c.num_experts, *shape) for shape in ((8, c.hidden), (c.hidden, 4)))

    def both(buffer: moecomm.Buffer, x: torch.Tensor, idx: torch.Tensor) -> torch.Tensor:
        room = x.shape[0] * c.topk
        routed = ops.dispatch(buffer, x, idx, max_rows=room)
        return ops.combine(routed.x, routed.handle) + ops.moe(buffer, x, idx, None, w13, w2, max_rows=room)

    with c.buffer(None) as buffer:
        compiled = torch.compile(both, fullgraph=True, backend="aot_eager")
        for tokens in (9, 7, 5):
            given = buffer, c.x[0][:tokens], c.topk_idx[0][:tokens]
            assert torch.equal(compiled(*given), both(*given))


def test_ranks_with_other_numbers_of_tokens_compile_for_themselves() -> None:
    c = case(2, seed=1)

    def body(group: Any) -> None:
        with c.buffer(group) as buffer:
            compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
            for got, want in zip(
                run(compiled, buffer, c, "expert", 9), run(layer, buffer, c, "expert", 9), strict=True
            ):
                assert torch.equal(got, want)

    all_ranks(2, body)


def test_a_graph_of_a_closed_buffer_says_closed() -> None:
    c = case(1, seed=1)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    with c.buffer(None) as buffer:
        run(compiled, buffer, c, "expert", 9)
    with pytest.raises(moecomm.Closed):
        run(compiled, buffer, c, "expert", 9)
    with c.buffer(None) as another:
        run(compiled, another, c, "expert", 9)


def test_a_graph_keeps_the_rounds_of_rows_that_nothing_reads() -> None:
    """As on a rank whose experts got no token: its backward pass has the rounds of the other ranks."""

    def constant(buffer: moecomm.Buffer, x: torch.Tensor, idx: torch.Tensor) -> torch.Tensor:
        routed = ops.dispatch(buffer, x, idx, layout="flat")
        return ops.combine(torch.zeros_like(routed.x), routed.handle) + x

    c = case(1, seed=1)
    with c.buffer(None) as buffer:
        for function in (constant, torch.compile(constant, fullgraph=True, backend="aot_eager")):
            before, x = buffer.rounds.flight.rounds, c.x[0].clone().requires_grad_()
            function(buffer, x, c.topk_idx[0]).sum().backward()
            assert buffer.rounds.flight.rounds - before == 4
            assert torch.equal(x.grad, torch.ones_like(x))
