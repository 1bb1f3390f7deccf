"""The same calls where they are for, by two processes with a GPU each; and with CPU tensors, to test the test."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any
from unittest.mock import patch

import pytest
import torch

from moecomm.compat.deep_ep import Buffer, BufferAllocator, Config, ElasticBuffer, EPBuffer, HybridEPBuffer
from tests.conftest import Ranks

from . import oracle
from .test_low_latency import FORMATS, HIDDEN, TOKENS, check_arrival, check_nvfp4_arrival


def everything(rank: int, group: Any, kind: str) -> str:
    """Returns a line to show: what ran."""
    device = torch.device(kind, rank) if kind == "cuda" else torch.device(kind)
    if kind == "cuda":
        torch.cuda.set_device(device)
    cases = [oracle.random_case(seed, ranks=2, hidden=HIDDEN, most=TOKENS, topk=2) for seed in range(4)]
    for case in cases:  # deep_ep does not take an expert twice, and ours is tested elsewhere
        for ids in case.topk_idx:
            ids[:, 1] = torch.where(ids[:, 1] == ids[:, 0], -1, ids[:, 1])
    buffer = Buffer(group)
    for case in cases:
        normal(buffer, case, rank, device)
        low_latency(buffer, case, rank, device)
    buffer.destroy()
    buffer = ElasticBuffer(group, num_max_tokens_per_rank=TOKENS)
    for case in cases:
        elastic(buffer, case, rank, device)
    buffer.destroy()
    buffer = EPBuffer(group, num_max_tokens_per_rank=TOKENS)
    for case in cases:
        elastic(buffer, case, rank, device)
        deferred(buffer, case, rank, device)
    buffer.destroy()
    redundant(group, rank, device)
    for case in cases:
        hybrid(HybridEPBuffer(group, HIDDEN, TOKENS, case.local_experts), case, rank, device)
    return f"{len(cases)} cases on {device}"


def on(device: torch.device, case: oracle.Case, rank: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return case.x[rank].to(device), case.topk_idx[rank].to(device), case.topk_weights[rank].to(device)


def normal(buffer: Buffer, case: oracle.Case, rank: int, device: torch.device) -> None:
    x, idx, weights = on(device, case, rank)
    want = oracle.normal(case)[rank]
    *layout, event = buffer.get_dispatch_layout(idx, case.num_experts, buffer.capture(), True, True)
    names = ("num_tokens_per_rank", "num_tokens_per_rdma_rank", "num_tokens_per_expert", "is_token_in_rank")
    given = dict(zip(names, layout, strict=True))
    for name in ("num_tokens_per_rank", "num_tokens_per_expert", "is_token_in_rank"):
        assert torch.equal(given[name].cpu(), getattr(want, name)), name
    for worst in (0, 40):
        recv_x, recv_idx, recv_weights, counts, handle, event = buffer.dispatch(
            x,
            topk_idx=idx,
            topk_weights=weights,
            config=Config(8),
            num_worst_tokens=worst,
            previous_event=event,
            async_finish=True,
            **given,
        )
        event.current_stream_wait()
        rows = len(want.src)
        assert counts == ([] if worst else want.num_recv_tokens_per_expert)
        assert len(recv_x) == (worst or rows)
        assert torch.equal(recv_x[:rows].cpu(), oracle.rows(case, want.src))
        assert recv_idx[:rows].tolist() == want.recv_topk_idx and (recv_idx[rows:] == -1).all()
        torch.testing.assert_close(recv_weights[:rows].tolist(), want.recv_topk_weights)
        rank_prefix, src, is_in_rank = (item.cpu() for item in handle if item is not None)
        assert rank_prefix[:, rank].tolist() == want.rank_prefix
        assert src[:rows].tolist() == [token for _, token in want.src]
        assert torch.equal(is_in_rank, want.is_token_in_rank)
        again, *_ = buffer.dispatch(x * 2, handle=handle)
        assert torch.equal(again[:rows], recv_x[:rows] * 2)
        combined, returned, _ = buffer.combine(recv_x, handle, topk_weights=recv_weights, bias=(x, x))
        times = want.is_token_in_rank.sum(1, keepdim=True) + 2
        torch.testing.assert_close(combined.cpu().float(), times * case.x[rank].float(), rtol=2**-7, atol=0)
        assert torch.equal(returned, torch.where(idx >= 0, weights, 0.0))


def low_latency(buffer: Buffer, case: oracle.Case, rank: int, device: torch.device) -> None:
    x, idx, weights = on(device, case, rank)
    total = torch.where(idx >= 0, weights, 0.0).sum(1, keepdim=True) * x.float()
    for use_fp8, round_scale, use_ue8m0 in FORMATS:
        for hook in (False, True):
            stats = torch.zeros(case.local_experts, dtype=torch.int32, device=device)
            recv_x, count, handle, _, receive = buffer.low_latency_dispatch(
                x,
                idx,
                TOKENS,
                case.num_experts,
                stats,
                use_fp8=use_fp8,
                round_scale=round_scale,
                use_ue8m0=use_ue8m0,
                return_recv_hook=hook,
            )
            if receive is not None:
                receive()
            assert torch.equal(stats, count)
            arrived = tuple(to_cpu(t) for t in recv_x) if use_fp8 else to_cpu(recv_x)
            items = tuple(item.cpu() if isinstance(item, torch.Tensor) else item for item in handle)
            check_arrival(case, rank, arrived, count.cpu(), items, (use_fp8, round_scale, use_ue8m0))
            if not use_fp8:
                for _ in range(2):
                    buffer.get_next_low_latency_combine_buffer(handle).copy_(recv_x)
                    for zero_copy in (False, True):
                        combined, _, _ = buffer.low_latency_combine(recv_x, idx, weights, handle, zero_copy=zero_copy)
                        torch.testing.assert_close(combined.float(), total, rtol=2**-8, atol=1e-5)

    factor = torch.tensor(300.0)
    for hook in (False, True):
        how: dict[str, Any] = {"use_fp8": False, "use_nvfp4": True, "x_global_scale": factor.to(device)}
        recv_x, count, handle, _, receive = buffer.low_latency_dispatch(
            x, idx, TOKENS, case.num_experts, return_recv_hook=hook, **how
        )
        if receive is not None:
            receive()
        items = tuple(item.cpu() if isinstance(item, torch.Tensor) else item for item in handle)
        y = check_nvfp4_arrival(case, rank, tuple(to_cpu(t) for t in recv_x), count.cpu(), items, factor)
        combined, _, _ = buffer.low_latency_combine(y.to(device), idx, weights, handle)
        torch.testing.assert_close(combined.float(), total, rtol=2**-8, atol=1e-5)


def to_cpu(tensor: torch.Tensor) -> torch.Tensor:
    """With its strides: a plain copy keeps those of dense tensors only, and scales are dense here."""
    copy = tensor.cpu()
    assert copy.stride() == tensor.stride()
    return copy


def elastic(buffer: ElasticBuffer | EPBuffer, case: oracle.Case, rank: int, device: torch.device) -> None:
    x, idx, weights = on(device, case, rank)
    flat, expanded = oracle.normal(case)[rank], oracle.expanded(case, 8)[rank]
    for expand in (False, True):
        src = [o[:2] if o else None for o in expanded.rows] if expand else flat.src
        for sync in (True, False):
            recv_x, _, recv_weights, handle, event = buffer.dispatch(
                x,
                idx,
                weights,
                num_experts=case.num_experts,
                expert_alignment=8,
                previous_event=buffer.capture(),
                async_with_compute_stream=True,
                allocate_on_comm_stream=True,
                do_expand=expand,
                do_zero_padding=expand,
                do_cpu_sync=sync,
            )
            event.current_stream_wait()
            for row, origin in zip(recv_x.cpu(), src, strict=sync):
                assert torch.equal(row, case.x[origin[0]][origin[1]] if origin else torch.zeros_like(row))
            assert handle.psum_num_recv_tokens_per_scaleup_rank.tolist() == flat.rank_prefix
            assert handle.num_unaligned_recv_tokens_per_expert.tolist() == expanded.counts
            if expand:
                assert handle.recv_src_metadata[: len(expanded.slots), 2:].tolist() == expanded.slots
            again, _, new_weights, _, _ = buffer.dispatch(x, topk_weights=weights * 2, handle=handle, do_expand=expand)
            assert torch.equal(
                again[: len(src)][[o is not None for o in src]].cpu(), oracle.rows(case, [o for o in src if o])
            )
            assert torch.equal(new_weights[: len(src)], recv_weights[: len(src)] * 2)
            combined, returned, _ = buffer.combine(recv_x, handle, topk_weights=recv_weights)
            times = (case.topk_idx[rank] >= 0) if expand else flat.is_token_in_rank
            exact = times.sum(1, keepdim=True) * case.x[rank].float()
            torch.testing.assert_close(combined.cpu().float(), exact, rtol=2**-7, atol=0)
            assert torch.equal(returned, torch.where(idx >= 0, weights, 0.0))


def deferred(buffer: EPBuffer, case: oracle.Case, rank: int, device: torch.device) -> None:
    x, idx, weights = on(device, case, rank)
    how = {"async_with_compute_stream": True, "defer_epilogue": True}
    event = buffer.dispatch(x, idx, weights, num_experts=case.num_experts, **how)
    recv_x, recv_idx, _, handle = event.wait()
    want = oracle.normal(case)[rank]
    assert torch.equal(recv_x.cpu(), oracle.rows(case, want.src)) and recv_idx.tolist() == want.recv_topk_idx
    combined, none = buffer.combine(recv_x, handle, **how).wait()
    exact = want.is_token_in_rank.sum(1, keepdim=True) * case.x[rank].float()
    torch.testing.assert_close(combined.cpu().float(), exact, rtol=2**-7, atol=0)
    assert none is None


def redundant(group: Any, rank: int, device: torch.device) -> None:
    """Rank 0 has experts 2, none and 3 of rank 1 in its slots, rank 1 has experts 1, 0 and 1 of rank 0."""
    plan, n = BufferAllocator(), 3088
    weights, grads = plan.allocate((3, n), torch.bfloat16), plan.allocate((3, n), torch.float32)
    with patch.dict(os.environ, {"MOECOMM_BACKEND": "host"} if device.type == "cpu" else {}):
        buffer = EPBuffer(group, lb_allocation_plan_or_num_bytes=plan)
    assert weights.device == grads.device == device
    mapping = torch.tensor([[2, -1, 3], [1, 0, 1]], dtype=torch.int32)
    g = torch.Generator().manual_seed(0)
    all_weights, all_grads = torch.randn(4, n, generator=g).bfloat16(), torch.randn(4, n, generator=g)
    of_slots = torch.randn(2, 3, n, generator=g)
    mine = slice(2 * rank, 2 * rank + 2)
    for where in (device, torch.device("cpu")):
        weights.fill_(7)
        own = all_weights[mine].to(device)
        buffer.lb_prefetch_weights(weights, own, mapping.to(where), previous_event=buffer.capture()).wait()
        for slot, expert in enumerate(mapping[rank].tolist()):
            assert torch.equal(
                weights[slot].cpu(), all_weights[expert] if expert >= 0 else torch.full((n,), 7).bfloat16()
            )
        grads.copy_(of_slots[rank])
        sums, want = all_grads[mine].to(device), all_grads[mine].clone()
        buffer.lb_reduce_grads(grads, sums, mapping.to(where)).wait()
        for source, row in enumerate(mapping.tolist()):
            for slot, expert in enumerate(row):
                if expert >= 0 and expert // 2 == rank:
                    want[expert % 2] += of_slots[source, slot]
        assert torch.equal(sums.cpu(), want) and torch.equal(grads.cpu(), of_slots[rank])
    buffer.destroy()


def hybrid(buffer: HybridEPBuffer, case: oracle.Case, rank: int, device: torch.device) -> None:
    x, idx, weights = on(device, case, rank)
    dense = torch.zeros(len(x), case.num_experts + 1, device=device)
    dense.scatter_(1, torch.where(idx >= 0, idx, case.num_experts), weights + 0.1)
    probs = dense[:, : case.num_experts].contiguous()
    want = oracle.expanded(case, 8)[rank]
    for fixed in ({}, {"num_permuted_tokens": 200, "non_blocking": True}):
        hidden, recv_probs, _, counts, handle = buffer.dispatch_with_permute(
            hidden=x, routing_map=probs > 0, probs=probs, pad_multiple=8, **fixed
        )
        assert counts.device.type == (device.type if fixed else "cpu")
        assert counts.tolist() == [-(-n // 8) * 8 for n in want.counts]
        for row, origin in zip(hidden.cpu(), want.rows, strict=not fixed):
            assert torch.equal(row, case.x[origin[0]][origin[1]] if origin else torch.zeros_like(row))
        combined, returned = buffer.combine_with_unpermute(
            hidden=hidden, probs=recv_probs, handle=handle, pad_multiple=8
        )
        exact = (case.topk_idx[rank] >= 0).sum(1, keepdim=True) * case.x[rank].float()
        torch.testing.assert_close(combined.cpu().float(), exact, rtol=2**-7, atol=0)
        assert torch.equal(returned, probs)


def masks(rank: int, group: Any, kind: str) -> str:
    """The last rank is masked, and taken in again, as test_low_latency.py has it."""
    device = torch.device(kind, rank) if kind == "cuda" else torch.device(kind)
    if kind == "cuda":
        torch.cuda.set_device(device)
    count = group.size()
    last = count - 1
    case = oracle.random_case(0, ranks=count, hidden=HIDDEN, most=TOKENS)
    buffer = Buffer(group, low_latency_mode=True, enable_shrink=True)
    status = torch.full((count,), 5, dtype=torch.int32, device=device)

    def exact_round(masked: bool) -> None:
        x, idx, _ = on(device, case, rank)
        recv_x, _, handle, _, _ = buffer.low_latency_dispatch(x, idx, TOKENS, case.num_experts, use_fp8=False)
        out, *_ = buffer.low_latency_combine(recv_x, idx, torch.ones(idx.shape, device=device), handle)
        buffer.low_latency_query_mask_buffer(status)
        assert status.tolist() == [0] * last + [int(masked)]
        there = (idx >= 0) & (status[idx.clamp(min=0) // case.local_experts] == 0)
        assert torch.equal(out, (x.float() * there.sum(dim=1, keepdim=True)).bfloat16())

    def idle() -> None:
        """Wait until no rank is in a round."""
        if kind == "cuda":
            torch.cuda.synchronize()
        group.barrier().wait()

    exact_round(masked=False)
    idle()
    if rank != last:
        buffer.low_latency_update_mask_buffer(last, True)
        buffer.low_latency_update_mask_buffer(last, True)  # changes nothing
        for _ in range(3):
            exact_round(masked=True)
    idle()
    buffer.low_latency_update_mask_buffer(last, False)
    exact_round(masked=False)
    if rank != last:
        idle()
        buffer.low_latency_update_mask_buffer(last, True)
        exact_round(masked=True)
    else:
        idle()
    idle()
    buffer.low_latency_clean_mask_buffer()
    exact_round(masked=False)
    buffer.destroy()
    return f"masks on {device}"


def waits(rank: int, group: Any, kind: str) -> str:
    """Rank 1 is late in each call; waits for it are added to rank 0's statistics, also by a graph."""
    device = torch.device(kind, rank) if kind == "cuda" else torch.device(kind)
    if kind == "cuda":
        torch.cuda.set_device(device)
    case = oracle.random_case(0, ranks=2, hidden=HIDDEN, most=TOKENS)
    x, idx, weights = on(device, case, rank)
    buffer = Buffer(group, low_latency_mode=True)
    dispatched, combined = (torch.zeros(2, dtype=torch.int64, device=device) for _ in range(2))

    def pair() -> None:
        recv_x, _, handle, _, _ = buffer.low_latency_dispatch(
            x, idx, TOKENS, case.num_experts, dispatch_wait_recv_cost_stats=dispatched, use_fp8=False
        )
        buffer.low_latency_combine(recv_x, idx, weights, handle, combine_wait_recv_cost_stats=combined)

    def is_late(call: Callable[[], None]) -> None:
        if kind == "cuda":
            torch.cuda.synchronize()
        dispatched.zero_()
        group.barrier().wait()
        if rank == 1:
            time.sleep(0.3)
        call()
        assert (combined >= 0).all() and int(dispatched[rank]) == 0
        assert rank == 1 or int(dispatched[1]) > 100_000_000  # ns

    pair()
    is_late(pair)
    if kind == "cuda":
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            pair()
        is_late(graph.replay)
        is_late(graph.replay)
    group.barrier().wait()
    buffer.destroy()
    return f"waits on {device}"


def late_hooks(rank: int, group: Any, kind: str) -> str:
    """The second dispatch receives the rows of the first behind a long kernel; the first hook's stream waits."""
    device = torch.device(kind, rank) if kind == "cuda" else torch.device(kind)
    if kind == "cuda":
        torch.cuda.set_device(device)
    case = oracle.random_case(0, ranks=2, hidden=HIDDEN, most=TOKENS)
    x, idx, _ = on(device, case, rank)
    buffer = Buffer(group, low_latency_mode=True)
    buffer.low_latency_dispatch(x, idx, TOKENS, case.num_experts, round_scale=True)  # loads kernels
    for _ in range(3):
        stats = torch.zeros(case.local_experts, dtype=torch.int32, device=device)
        how: dict[str, Any] = {"round_scale": True, "return_recv_hook": True}
        *_, hook = buffer.low_latency_dispatch(x, idx, TOKENS, case.num_experts, stats, **how)
        if kind == "cuda":
            torch.cuda._sleep(200_000_000)  # type: ignore[no-untyped-call]
        _, count, _, _, second = buffer.low_latency_dispatch(x, idx, TOKENS, case.num_experts, **how)
        with torch.cuda.stream(torch.cuda.Stream(device)) if kind == "cuda" else nullcontext():
            hook()
            seen = stats.clone()
        second()
        if kind == "cuda":
            torch.cuda.synchronize()
        assert torch.equal(seen, count) and int(count.sum()) > 0
    buffer.destroy()
    return f"late hooks on {device}"


PARTS = [late_hooks, waits, masks]


def said(part: Callable[..., str], device: str) -> str:
    return f"{part.__name__.replace('_', ' ')} on {device}"


@pytest.mark.parametrize(("part", "count"), [*((part, 2) for part in PARTS), (masks, 3)])
def test_parts_on_cpus(ranks: Ranks, part: Callable[..., str], count: int) -> None:
    assert ranks.run(count, part, "cpu") == [said(part, "cpu")] * count


@pytest.mark.gpu2
@pytest.mark.timeout(600)
@pytest.mark.parametrize("part", PARTS)
def test_parts_on_gpus(gpu_ranks: Ranks, part: Callable[..., str]) -> None:
    gpu_ranks.start(2, part, "cuda")
    assert gpu_ranks.results(2, timeout_s=500) == {rank: said(part, f"cuda:{rank}") for rank in range(2)}


def test_on_cpus(ranks: Ranks) -> None:
    ranks.run(2, everything, "cpu")


@pytest.mark.gpu2
@pytest.mark.timeout(900)
def test_on_gpus(gpu_ranks: Ranks) -> None:
    """Some tens of kernels are compiled, where they are not kept from before."""
    gpu_ranks.start(2, everything, "cuda")
    assert gpu_ranks.results(2, timeout_s=800) == {rank: f"4 cases on cuda:{rank}" for rank in range(2)}
