"""Real processes of a gloo group: the forward and backward that training frameworks build on Buffer; lifetimes."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import torch

from moecomm.compat import install_as_deep_ep
from moecomm.compat.deep_ep import Buffer
from moecomm.ranks.rendezvous import Alone
from tests.conftest import Ranks

HIDDEN, EXPERTS, TOPK = 64, 4, 2


def inputs(rank: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    g = torch.Generator().manual_seed(rank)
    tokens = 5 + 3 * rank
    return (
        torch.randn(tokens, HIDDEN, generator=g),
        torch.rand(tokens, EXPERTS, generator=g).argsort(1)[:, :TOPK],
        torch.rand(tokens, TOPK, generator=g),
        torch.randn(tokens, HIDDEN, generator=g),
    )


def train(rank: int, group: Any) -> None:
    """y and its gradients, where expert e multiplies by e + 1, are those of one rank alone; by deep_ep's own calls."""
    install_as_deep_ep()
    from deep_ep import Buffer
    from deep_ep.utils import EventHandle, EventOverlap

    assert Buffer.get_dispatch_config(2).get_nvl_buffer_size_hint(HIDDEN * 4, 2) > 0
    buffer = Buffer(group, int(1e6), 0)

    class Dispatch(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor, idx: torch.Tensor, weights: torch.Tensor) -> Any:
            to_rank, to_rdma_rank, to_expert, is_in_rank, event = buffer.get_dispatch_layout(
                idx, EXPERTS, previous_event=EventOverlap(EventHandle()), async_finish=True
            )
            recv_x, recv_idx, recv_weights, counts, handle, event = buffer.dispatch(
                x,
                topk_idx=idx,
                topk_weights=weights,
                num_tokens_per_rank=to_rank,
                num_tokens_per_rdma_rank=to_rdma_rank,
                is_token_in_rank=is_in_rank,
                num_tokens_per_expert=to_expert,
                previous_event=event,
                async_finish=True,
                allocate_on_comm_stream=True,
            )
            event.current_stream_wait()
            ctx.handle = handle
            return recv_x, recv_idx, recv_weights, torch.tensor(counts), handle

        @staticmethod
        def backward(ctx: Any, grad_x: torch.Tensor, _: Any, grad_weights: torch.Tensor, *rest: Any) -> Any:
            grad, grad_weights, _ = buffer.combine(grad_x.contiguous(), ctx.handle, topk_weights=grad_weights.float())
            return grad, None, grad_weights

    class Combine(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, y: torch.Tensor, handle: Any) -> torch.Tensor:
            ctx.handle = handle
            return buffer.combine(y, handle=handle)[0]

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> Any:
            return buffer.dispatch(grad.contiguous(), handle=ctx.handle)[0], None

    x, idx, weights, grad = inputs(rank)
    x.requires_grad_()
    weights.requires_grad_()
    recv_x, recv_idx, recv_weights, counts, handle = Dispatch.apply(x, idx, weights)
    assert counts.sum() == (recv_idx >= 0).sum()
    expert = recv_idx + 1 + rank * (EXPERTS // 2)
    factor = torch.where(recv_idx >= 0, expert * recv_weights, 0.0).sum(1, keepdim=True)
    y = Combine.apply(recv_x * factor, handle)
    y.backward(grad)
    buffer.destroy()
    alone_x, _, alone_weights, _ = inputs(rank)
    alone_x.requires_grad_()
    alone_weights.requires_grad_()
    want = alone_x * (alone_weights * (idx + 1)).sum(1, keepdim=True)
    want.backward(grad)
    torch.testing.assert_close(y, want)
    torch.testing.assert_close(x.grad, alone_x.grad)
    torch.testing.assert_close(weights.grad, alone_weights.grad)


def test_gradients_of_tokens_and_weights(ranks: Ranks) -> None:
    ranks.run(2, train)


def test_a_buffer_that_is_forgotten_gives_its_memory_back() -> None:
    """vLLM keeps them in a dictionary of weak references, by their keyword arguments."""
    buffer = Buffer(
        group=Alone(),
        num_nvl_bytes=1 << 20,
        num_rdma_bytes=0,
        low_latency_mode=False,
        num_qps_per_rank=1,
        explicitly_destroy=True,
    )
    kept = weakref.WeakValueDictionary({"buffer": buffer})
    recv_x, *_, handle, _ = buffer.dispatch(
        torch.ones(2, 8), topk_idx=torch.zeros(2, 1).long(), num_tokens_per_expert=torch.zeros(1, dtype=torch.int32)
    )
    native = weakref.ref(handle.native.rounds)
    del buffer, handle
    gc.collect()
    assert len(kept) == 0 and native() is None
    assert (recv_x == 1).all(), "outputs that are still referenced stay valid"
