"""Handles: used twice, kept for long, copied, outlived by nothing; and what is said when they can't be used."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import moecomm
from moecomm import ops
from moecomm.backends import host
from moecomm.base.protocol import LAYOUTS
from tests.little_room import fixed_windows
from tests.ops.ranks import Case, case

from ..backends.conftest import all_ranks


def layer(buffer: moecomm.Buffer, x: torch.Tensor, idx: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    routed = ops.dispatch(buffer, x, idx, weights)
    return ops.combine(torch.tanh(routed.x), routed.handle)


def expected(c: Case, rank: int, layers: int = 1) -> tuple[torch.Tensor, ...]:
    """Output and gradients of its sum, for `layers` layers one on the other."""
    x, weights = (t[rank].clone().requires_grad_() for t in (c.x, c.topk_weights))
    out = x
    for _ in range(layers):
        out = torch.tanh(out) * torch.where(c.topk_idx[rank] >= 0, weights, 0.0).sum(dim=1, keepdim=True)
    return (out, *torch.autograd.grad(out.sum(), (x, weights)))


def assert_close(got: tuple[torch.Tensor, ...], want: tuple[torch.Tensor, ...]) -> None:
    for mine, theirs in zip(got, want, strict=True):
        # Sums of at most H = 24 terms below 4 in size; some roundings each.
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=24 * 4 * 4 * 2**-24)


@pytest.mark.parametrize("reentrant", [False, True])
def test_recomputed_activations(reentrant: bool) -> None:
    c = case(2, seed=1)

    def body(group: Any) -> tuple[torch.Tensor, ...]:
        with c.buffer(group) as buffer:
            x, weights = (t[group.rank].clone().requires_grad_() for t in (c.x, c.topk_weights))
            out = x
            for _ in range(2):
                out = checkpoint(layer, buffer, out, c.topk_idx[group.rank], weights, use_reentrant=reentrant)
            out.sum().backward()
            return out.detach(), x.grad, weights.grad

    for rank, got in enumerate(all_ranks(2, body)):
        assert_close(got, expected(c, rank, layers=2))


def test_saved_tensors_may_go_elsewhere_and_come_back() -> None:
    """As with activations that are offloaded: memory of a handle is then not where the dispatch had it."""
    c = case(2, seed=2)

    def body(group: Any) -> tuple[torch.Tensor, ...]:
        with c.buffer(group) as buffer:
            x, weights = (t[group.rank].clone().requires_grad_() for t in (c.x, c.topk_weights))
            with torch.autograd.graph.saved_tensors_hooks(lambda t: t.clone(), lambda t: t.clone()):
                out = layer(buffer, x, c.topk_idx[group.rank], weights)
            gc.collect()
            layer(buffer, -c.x[group.rank], c.topk_idx[group.rank].flip(1), c.topk_weights[group.rank])
            out.sum().backward()
            return out.detach(), x.grad, weights.grad

    for rank, got in enumerate(all_ranks(2, body)):
        assert_close(got, expected(c, rank))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_copied_handle_serves_combines_and_repeats(layout: str) -> None:
    c = case(3, seed=1, exact=True)

    def body(group: Any) -> None:
        rank = group.rank
        with c.buffer(group) as buffer:
            routed = ops.dispatch(buffer, c.x[rank], c.topk_idx[rank], c.topk_weights[rank], layout=layout)
            handle = routed.handle._replace(memory=routed.handle.memory.clone())
            assert torch.equal(ops.dispatch_again(c.x[rank], handle), routed.x)
            for y in (routed.x, routed.x.clone()):  # in the window, and not
                assert torch.equal(ops.combine(y, handle), ops.combine(y, routed.handle))

    all_ranks(3, body)


def test_a_copied_handle_is_still_of_its_dispatch() -> None:
    c = case(2, seed=1, exact=True)

    def body(group: Any) -> tuple[str, int]:
        rank = group.rank
        with c.buffer(group) as buffer:
            given = (c.x[rank], c.topk_idx[rank], c.topk_weights[rank])
            first, second = (ops.dispatch(buffer, *given) for _ in range(2))
            want = ops.combine(first.x, first.handle)
            copies = [here.handle._replace(memory=here.handle.memory.clone()) for here in (first, second)]
            with pytest.raises(moecomm.Mismatch, match="that of the dispatch of round 2") as raised:
                ops.combine(first.x, copies[rank])
            buffer.rounds.recovered()  # as if the ranks had agreed where they are
            assert torch.equal(ops.combine(first.x, copies[0] if rank == 0 else first.handle), want)
            return raised.value.field, raised.value.rank

    assert all_ranks(2, body) == [("handle", 1), ("handle", 0)]


def test_backward_passes_in_another_order_are_told() -> None:
    """Two layers are alike: each rank would else take the gradients of one for those of the other."""
    c = case(2, seed=1)

    def body(group: Any) -> str:
        rank = group.rank
        with c.buffer(group) as buffer:
            x = c.x[rank].clone().requires_grad_()
            outs = [layer(buffer, x, c.topk_idx[rank], c.topk_weights[rank]) for _ in range(2)]
            with pytest.raises(moecomm.Mismatch) as raised:
                outs[rank].sum().backward()
            return raised.value.field

    assert all_ranks(2, body) == ["handle"] * 2


def test_one_handle_twice_and_a_repeat_of_it_have_gradients() -> None:
    c = case(2, seed=4, exact=True)

    def body(group: Any) -> tuple[torch.Tensor, ...]:
        with c.buffer(group) as buffer:
            x, other = c.x[group.rank].clone().requires_grad_(), (c.x[group.rank] + 1).requires_grad_()
            weights = c.topk_weights[group.rank].clone().requires_grad_()
            routed = ops.dispatch(buffer, x, c.topk_idx[group.rank], weights)
            rows = ops.dispatch_again(other, routed.handle)
            out = ops.combine(routed.x * 2, routed.handle) + 5 * ops.combine(rows, routed.handle, weighted=False)
            out = out + ops.combine(rows * 3, routed.handle)
            return (out.detach(), *torch.autograd.grad(out.sum(), (x, other, weights)))

    for rank, got in enumerate(all_ranks(2, body)):
        x, other = c.x[rank].clone().requires_grad_(), (c.x[rank] + 1).requires_grad_()
        weights, on = c.topk_weights[rank].clone().requires_grad_(), c.topk_idx[rank] >= 0
        weight = torch.where(on, weights, 0.0).sum(dim=1, keepdim=True)
        out = 2 * weight * x + 5 * on.sum(dim=1, keepdim=True) * other + 3 * weight * other
        for mine, want in zip(got, (out, *torch.autograd.grad(out.sum(), (x, other, weights))), strict=True):
            assert torch.equal(mine, want)


def test_nothing_is_freed_before_the_backward_pass_and_everything_after_it() -> None:
    """Many layers over one window, more than it has room for: outputs then move out of it."""
    c, layers = case(2, seed=1), 12

    def body(group: Any) -> tuple[Any, ...]:
        with c.buffer(group, window_bytes=1 << 16) as buffer:
            in_window: list[bool] = []

            def note(_: Any, args: tuple[torch.Tensor, ...]) -> None:
                in_window.append(buffer.rounds.session.context.in_heap(args[0].data_ptr()))

            experts = torch.nn.Tanh()
            experts.register_forward_pre_hook(note)
            for _ in range(3):
                x, weights = (t[group.rank].clone().requires_grad_() for t in (c.x, c.topk_weights))
                out = x
                for _ in range(layers):
                    routed = ops.dispatch(buffer, out, c.topk_idx[group.rank], weights)
                    out = ops.combine(experts(routed.x), routed.handle)
                del routed
                result = (out.detach(), *torch.autograd.grad(out.sum(), (x, weights)))
                del out
            gc.collect()
            return result, in_window, buffer.rounds.memory.used

    with fixed_windows():
        found = all_ranks(2, body)
    for rank, (result, in_window, used) in enumerate(found):
        assert_close(result, expected(c, rank, layers=layers))
        assert in_window[0] and not in_window[layers - 1]
        assert in_window == in_window[:layers] * 3, "not all memory came back after a backward pass"
        assert used == 0, f"rank {rank}: {used} bytes are still held"


def test_copies_of_tables_have_the_tokens_that_were_forwarded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several dispatches of one size: each has tables of its own, also of the tokens that cross between domains."""
    monkeypatch.setattr(host, "direct_bytes", lambda *_: 0)  # all tokens go by way of a forwarder

    def body(group: Any) -> None:
        with moecomm.Buffer(
            group, hidden=64, num_experts=8, topk=2, max_tokens=16, backend="host", domain_ranks=2
        ) as buffer:
            g, kept = torch.Generator().manual_seed(group.rank), []
            for _ in range(3):
                x, ids = torch.randn(16, 64, generator=g).bfloat16(), torch.rand(16, 8, generator=g).topk(2).indices
                kept.append((x, ops.dispatch(buffer, x, ids, torch.full((16, 2), 0.5))))
            for x, routed in [*kept[1:], kept[0]]:
                handle = routed.handle._replace(memory=routed.handle.memory.clone())
                assert torch.equal(ops.combine(routed.x, handle), x)

    all_ranks(4, body)


def test_outputs_outlive_the_buffer_and_its_handle_says_closed() -> None:
    c = case(1)
    buffer = c.buffer(None)
    x = c.drawn(torch.Size([5, c.hidden]), 1)
    idx = torch.zeros(5, c.topk, dtype=torch.int32)
    routed = ops.dispatch(buffer.name, x.requires_grad_(), idx)
    out = ops.combine(routed.x, routed.handle)
    buffer.close()
    assert torch.equal(routed.x[:15:3], x)  # three rows a token, of one expert
    for call in (
        lambda: ops.combine(routed.x, routed.handle),
        lambda: ops.dispatch_again(x, routed.handle),
        lambda: ops.dispatch(routed.handle.buffer, x, idx),
        lambda: out.sum().backward(),
    ):
        with pytest.raises(moecomm.Closed):
            call()
    gone = weakref.ref(buffer)
    del buffer
    gc.collect()
    assert gone() is None, "operators keep a Buffer alive"
    with pytest.raises(moecomm.Closed):
        ops.combine(routed.x, routed.handle)


@pytest.mark.parametrize(
    ("argument", "change"),
    [
        ("buffer", {"buffer": "mine"}),
        ("handle", {"layout": "flat"}),
        ("handle", {"num_tokens": 4}),
        ("handle", {"memory": torch.zeros(8, dtype=torch.uint8)}),
        ("row_weights", {"row_weights": torch.zeros(3)}),
        ("handle", {"graph": torch.zeros(3)}),
        ("handle", {"graph": torch.zeros(0, dtype=torch.float64)}),
        *(
            ("handle", {name: None})
            for name in ("memory", "buffer", "layout", "num_tokens", "max_rows", "zero_padding")
        ),
        *(("handle", {name: []}) for name in ops.Handle._fields),
    ],
)
def test_a_handle_that_is_none_is_named(argument: str, change: dict[str, Any]) -> None:
    c = case(1)
    with c.buffer(None) as buffer:
        routed = ops.dispatch(buffer, torch.zeros(5, c.hidden), torch.zeros(5, c.topk, dtype=torch.int64))
        handle = routed.handle._replace(**change)
        with pytest.raises(moecomm.BadInput) as caught:
            ops.combine(routed.x, handle)
        assert caught.value.argument == argument
        if argument != "row_weights":  # of which a repeat has no use
            with pytest.raises(moecomm.BadInput) as caught:
                ops.dispatch_again(torch.zeros(handle.num_tokens or 5, c.hidden), handle)
            assert caught.value.argument == argument


def test_a_handle_of_the_buffer_is_none() -> None:
    c = case(1)
    with c.buffer(None) as buffer:
        x = torch.zeros(5, c.hidden)
        routed: Any = buffer.dispatch(x, torch.zeros(5, c.topk, dtype=torch.int64), layout="expert")
        for call in (ops.combine, ops.dispatch_again):
            with pytest.raises(
                moecomm.BadInput, match=r"handle: got one of Buffer\.dispatch; want the \.handle of what moecomm\.ops"
            ):
                call(x, routed.handle)


def test_bad_input_is_named_at_once_and_the_buffer_goes_on() -> None:
    c = case(1)
    with c.buffer(None) as buffer:
        x, idx = torch.ones(5, c.hidden), torch.zeros(5, c.topk, dtype=torch.int64)
        for wrong, match in (
            ((x.double(), idx), "x"),
            ((x, idx + 99), "topk_idx"),
            ((x, idx[:3]), "topk_idx"),
            ((x, idx.float()), "topk_idx"),  # weights in its place
            ((torch.ones(99, c.hidden), idx), "x"),
            ((x.tolist(), idx), "x"),
            ((x, None), "topk_idx"),
            ((x, idx, idx.tolist()), "topk_weights"),
        ):
            with pytest.raises(moecomm.BadInput, match=match):
                ops.dispatch(buffer, *wrong)
        with pytest.raises(moecomm.BadInput, match="layout"):
            ops.dispatch(buffer, x, idx, layout="rows")
        for rows in (2, -1):
            with pytest.raises(moecomm.BadInput, match="max_rows"):
                ops.dispatch(buffer, x, idx, max_rows=rows)
        with pytest.raises(moecomm.BadInput, match="num_sms"):
            ops.dispatch(buffer, x, idx, num_sms=1.5)
        with pytest.raises(moecomm.BadInput, match="buffer"):
            ops.dispatch(None, x, idx)
        routed = ops.dispatch(buffer, x, idx, max_rows=15)
        with pytest.raises(moecomm.BadInput, match="y"):
            ops.combine(None, routed.handle)
        with pytest.raises(moecomm.BadInput, match="x"):
            ops.dispatch_again(None, routed.handle)
        assert torch.equal(ops.combine(routed.x, routed.handle), 3 * x)


def test_second_order_says_that_there_is_none() -> None:
    c = case(1)
    with c.buffer(None) as buffer:
        x = torch.ones(5, c.hidden, requires_grad=True)
        out = ops.dispatch(buffer, x, torch.zeros(5, c.topk, dtype=torch.int64)).x.square().sum()
        (grad,) = torch.autograd.grad(out, x, create_graph=True)
        with pytest.raises(moecomm.Unsupported, match="differentiated again"):
            grad.sum().backward()


def test_rows_that_did_not_come_disturb_no_sum() -> None:
    """Gradients of weights summed over all rows, where rows past the last hold what earlier rounds left."""
    c = case(1, seed=1)
    x, idx = c.x[0], c.topk_idx[0]
    with c.buffer(None) as buffer:
        dirt = torch.full((c.max_tokens, c.hidden), torch.nan)
        for _ in range(4):
            ops.dispatch(buffer, dirt, torch.zeros(len(dirt), c.topk, dtype=torch.int64))
        weight = torch.eye(c.hidden, requires_grad=True)
        routed = ops.dispatch(buffer, x, idx, c.topk_weights[0], expert_alignment=8)
        ops.combine(routed.x @ weight, routed.handle).sum().backward()
    total = torch.where(idx >= 0, c.topk_weights[0], 0.0).sum(dim=1, keepdim=True)
    torch.testing.assert_close(weight.grad, (x * total).sum(dim=0).unsqueeze(1).expand(-1, c.hidden))


def _given_a_dtensor(rank: int, group: Any) -> dict[str, str]:
    """The error of each call of an operator or a Buffer whose tensors are right but for one, a DTensor."""
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor, Replicate

    mesh, c, found = DeviceMesh.from_group(group, "cpu"), case(1, seed=1), {}
    x, idx, weights = c.x[0], c.topk_idx[0], c.topk_weights[0]
    with c.buffer(group) as buffer:
        routed, native = ops.dispatch(buffer, x, idx, weights), buffer.dispatch(x, idx, weights)
        (memory, row_weights, *fields), y = routed.handle, routed.x
        sent = {"x": x, "topk_idx": idx, "topk_weights": weights}
        experts = {"w13": torch.ones(c.num_experts, 32, c.hidden), "w2": torch.ones(c.num_experts, c.hidden, 16)}
        bias = torch.ones_like(x)

        def handle_of(memory: torch.Tensor, row_weights: torch.Tensor) -> ops.Handle:
            return ops.Handle(memory, row_weights, *fields)

        calls: dict[str, tuple[Any, dict[str, torch.Tensor]]] = {
            "ops.dispatch": (lambda **t: ops.dispatch(buffer, **t), sent),
            "ops.dispatch_again": (
                lambda x, handle: ops.dispatch_again(x, handle_of(handle, row_weights)),
                {"x": x, "handle": memory},
            ),
            "ops.combine": (
                lambda y, handle, row_weights: ops.combine(y, handle_of(handle, row_weights)),
                {"y": y, "handle": memory, "row_weights": row_weights},
            ),
            "ops.moe": (lambda **t: ops.moe(buffer, **t), {**sent, **experts, "bias": bias}),
            "dispatch": (buffer.dispatch, sent),
            "combine": (lambda **t: buffer.combine(handle=native.handle, **t), {"y": native.x, "bias": bias}),
            "moe": (buffer.moe, {**sent, **experts}),
        }
        for name, (call, tensors) in calls.items():
            for argument, tensor in tensors.items():
                with pytest.raises(moecomm.BadInput) as raised:
                    call(**{**tensors, argument: DTensor.from_local(tensor, mesh, [Replicate()], run_check=False)})
                assert raised.value.argument == argument, (name, argument, raised.value)
                found[f"{name}({argument})"] = str(raised.value.got)
            call(**tensors)
    return found


def test_a_dtensor_is_named(ranks: Any) -> None:
    (found,) = ranks.run(1, _given_a_dtensor)
    assert len(found) == 24
    assert {got for name, got in found.items() if name.startswith("ops.")} == {"a DTensor"}
