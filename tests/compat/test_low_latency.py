"""Low-latency dispatch and combine of the deep_ep Buffer, field by field, against the oracle."""

from __future__ import annotations

import contextlib
import threading
import time
from typing import Any

import pytest
import torch

import moecomm
from moecomm import formats
from moecomm.compat.deep_ep import Buffer, low_latency

from ..backends.conftest import all_ranks
from ..little_room import fixed_windows
from . import oracle

HIDDEN, TOKENS = 1024, 12  # a multiple of 512, as packed scales want; the most a rank has
FORMATS = [(False, False, False), (True, False, False), (True, True, False), (True, True, True)]


def unpacked(scales: torch.Tensor, use_ue8m0: bool) -> torch.Tensor:
    """float32 [rows, H / 128] of what a rank got: four exponents an int32, the first in the lowest byte."""
    if not use_ue8m0:
        return scales
    exponents = torch.stack([(scales >> shift) & 0xFF for shift in (0, 8, 16, 24)], dim=-1).flatten(1)
    return torch.exp2(exponents.float() - 127)


def check_arrival(case: oracle.Case, rank: int, recv_x: Any, count: torch.Tensor, handle: Any, options: Any) -> None:
    use_fp8, round_scale, use_ue8m0 = options
    want, local, rows = oracle.low_latency(case)[rank], case.local_experts, case.ranks * TOKENS
    recv_x, scales = recv_x if use_fp8 else (recv_x, None)
    assert recv_x.shape == (local, rows, HIDDEN)
    assert recv_x.dtype is (torch.float8_e4m3fn if use_fp8 else torch.bfloat16)
    assert count.dtype is torch.int32 and count.tolist() == [want.count(e) for e in range(local)]
    assert isinstance(handle, tuple)
    src_info, layout_range, tokens, hidden, num_experts = handle
    assert (tokens, hidden, num_experts) == (TOKENS, HIDDEN, case.num_experts)
    assert src_info.shape == (local, rows) and src_info.dtype is torch.int32
    assert layout_range.shape == (local, case.ranks) and layout_range.dtype is torch.int64
    if scales is not None:
        assert scales.shape == (local, rows, HIDDEN // (512 if use_ue8m0 else 128))
        assert scales.dtype is (torch.int32 if use_ue8m0 else torch.float32)
        assert scales.stride(1) == 1, "a column is contiguous"
    for expert in range(local):
        begin = 0
        for source in range(case.ranks):
            packed = int(layout_range[expert, source])
            assert (packed >> 32, packed & 0xFFFFFFFF) == (begin, len(want.src[expert][source]))
            here = slice(begin, begin + len(want.src[expert][source]))
            begin = here.stop
            assert sorted(src_info[expert, here].tolist()) == sorted(want.src[expert][source])
            sent = case.x[source][src_info[expert, here].long()]
            if scales is None:
                assert torch.equal(recv_x[expert, here], sent)
                continue
            q, s = oracle.cast_to_fp8(sent, round_scale)
            assert torch.equal(unpacked(scales[expert, here], use_ue8m0), s)
            far = (recv_x[expert, here].float() - q.float()).abs() > q.float().abs() / 8  # one step of e4m3
            assert not far.any()


@pytest.mark.parametrize("hook", [False, True])
@pytest.mark.parametrize("options", FORMATS)
def test_every_field(options: tuple[bool, bool, bool], hook: bool) -> None:
    for seed in range(3):
        case = oracle.random_case(seed, ranks=2 + seed, hidden=HIDDEN, most=TOKENS)
        all_ranks(case.ranks, lambda group, case=case, seed=seed: one_round(group, case, options, hook, seed % 2 == 1))


def in_block(row: int, group: int, hidden: int) -> int:
    """Where the branch's kernel stores the scale of a row and a group of 16 columns."""
    return row // 128 * 512 * -(-hidden // 64) + group // 4 * 512 + row % 32 * 16 + row % 128 // 32 * 4 + group % 4


@pytest.mark.parametrize("hook", [False, True])
@pytest.mark.parametrize("hidden", [1024, 208])  # 208: blocks with columns that no row has, and rows padded on the way
def test_nvfp4(hidden: int, hook: bool) -> None:
    for seed in range(3):
        case = oracle.random_case(seed, ranks=2 + seed, hidden=hidden, most=TOKENS + 40)
        all_ranks(case.ranks, lambda group, case=case: nvfp4_round(group, case, hook))


def nvfp4_round(group: Any, case: oracle.Case, hook: bool) -> None:
    buffer, rank, most = Buffer(group, low_latency_mode=True), group.rank, TOKENS + 40
    x, ids, weights = case.x[rank], case.topk_idx[rank], case.topk_weights[rank]
    stats = torch.full((case.local_experts,), 7, dtype=torch.int32)
    for factor in (torch.tensor(300.0), torch.full((case.local_experts,), 41.0)):  # as documented; as vLLM gives it
        recv_x, count, handle, event, receive = buffer.low_latency_dispatch(
            x,
            ids,
            most,
            case.num_experts,
            stats,
            use_fp8=False,
            use_nvfp4=True,
            x_global_scale=factor,
            async_finish=not hook,
            return_recv_hook=hook,
        )
        receive() if hook else event.current_stream_wait()
        y = check_nvfp4_arrival(case, rank, recv_x, count, handle, factor)
        combined, *_ = buffer.low_latency_combine(y, ids, weights, handle)
        total = torch.where(ids >= 0, weights, 0.0).sum(1, keepdim=True) * x.float()
        torch.testing.assert_close(combined.float(), total, rtol=2**-8, atol=1e-5)
    assert torch.equal(stats, 7 + 2 * count)
    buffer.destroy()


def test_ranks_that_ask_for_different_formats_are_told() -> None:
    def body(group: Any) -> None:
        buffer, x, ids = Buffer(group), torch.ones(2, 128, dtype=torch.bfloat16), torch.tensor([[0], [1]])
        options: dict[str, Any] = {"use_fp8": True} if group.rank else {"use_fp8": False, "use_nvfp4": True}
        with pytest.raises(moecomm.Mismatch, match=r"nvfp4.*fp8|fp8.*nvfp4"):
            buffer.low_latency_dispatch(x, ids, 4, 2, x_global_scale=torch.ones(1), **options)

    all_ranks(2, body)


def check_nvfp4_arrival(
    case: oracle.Case, rank: int, recv_x: Any, count: torch.Tensor, handle: Any, factor: torch.Tensor
) -> torch.Tensor:
    """Return the bfloat16 rows that were sent, `[experts, rows, hidden]`."""
    want, local, hidden, rows = oracle.low_latency(case)[rank], case.local_experts, handle[3], case.ranks * handle[2]
    values, scales = recv_x
    assert values.shape == (rows, hidden // 2, local) and values.dtype is torch.uint8
    assert scales.shape == (32, 4, -(-rows // 128), 4, -(-hidden // 64), local)
    assert scales.dtype is torch.float8_e4m3fn and scales.permute(5, 2, 4, 0, 1, 3).is_contiguous()
    stored = scales.permute(5, 2, 4, 0, 1, 3).reshape(local, -1).view(torch.uint8)
    y = torch.zeros(local, rows, hidden, dtype=torch.bfloat16)
    for expert in range(local):
        assert int(count[expert]) == want.count(expert)
        for row in range(int(count[expert])):
            source = next(r for r in reversed(range(case.ranks)) if int(handle[1][expert, r]) >> 32 <= row)
            y[expert, row] = case.x[source][handle[0][expert, row]]
            sent, factors = formats.quantize(y[expert, row : row + 1], "nvfp4", global_scale=factor.reshape(-1)[:1])
            assert factors is not None and torch.equal(values[row, :, expert], sent[0])
            places = [in_block(row, group, hidden) for group in range(hidden // 16)]
            assert torch.equal(stored[expert, places], factors[0].view(torch.uint8))
    return y


def test_weights_go_ahead_of_a_combine_that_does_not_take_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(low_latency, "takes_weights", lambda buffer: False)
    for early in (False, True):
        case = oracle.random_case(7, ranks=3, hidden=HIDDEN, most=TOKENS)
        all_ranks(3, lambda group, case=case, early=early: one_round(group, case, FORMATS[0], False, early))


def one_round(group: Any, case: oracle.Case, options: Any, hook: bool, early: bool) -> None:
    """`early`: the weights are given to dispatch too."""
    buffer = Buffer(group, low_latency_mode=True)
    rank = buffer.rank
    x, idx, weights = case.x[rank], case.topk_idx[rank], case.topk_weights[rank]
    use_fp8, round_scale, use_ue8m0 = options
    stats = torch.full((case.local_experts,), 7, dtype=torch.int32)
    for times in (1, 2):
        recv_x, count, handle, event, receive = buffer.low_latency_dispatch(
            x,
            idx,
            TOKENS,
            case.num_experts,
            cumulative_local_expert_recv_stats=stats,
            use_fp8=use_fp8,
            round_scale=round_scale,
            use_ue8m0=use_ue8m0,
            async_finish=not hook,
            return_recv_hook=hook,
            topk_weights=weights if early else None,
        )
        assert (receive is not None) == hook
        receive() if hook else event.current_stream_wait()
        check_arrival(case, rank, recv_x, count, handle, options)
        assert torch.equal(stats, 7 + times * count)
    y = torch.zeros(count.shape[0], case.ranks * TOKENS, HIDDEN, dtype=torch.bfloat16)
    for expert, n in enumerate(count.tolist()):
        for row in range(n):
            source = next(r for r in reversed(range(case.ranks)) if int(handle[1][expert, r]) >> 32 <= row)
            y[expert, row] = case.x[source][handle[0][expert, row]]
    total = torch.where(idx >= 0, weights, 0.0).sum(1, keepdim=True) * x.float()
    for zero_copy in (False, True):
        if zero_copy:
            buffer.get_next_low_latency_combine_buffer(handle)[:, :, :] = y
        out = torch.empty_like(x) if rank else None  # each rank as it likes
        given = weights if early and not zero_copy else weights.clone()
        combined, event, receive = buffer.low_latency_combine(
            torch.empty_like(y) if zero_copy else y,
            idx,
            given,
            handle,
            zero_copy=zero_copy,
            async_finish=not hook,
            return_recv_hook=hook,
            out=out,
        )
        receive() if hook else event.current_stream_wait()
        assert combined is out or out is None
        torch.testing.assert_close(combined.float(), total, rtol=2**-8, atol=1e-5)
    twice, *_ = buffer.low_latency_combine(y, idx, weights * 2, handle)
    torch.testing.assert_close(twice.float(), 2 * total, rtol=2**-8, atol=1e-5)
    once, *_ = buffer.low_latency_combine(y, idx, weights, handle)  # those that the dispatch carried, if it did
    torch.testing.assert_close(once.float(), total, rtol=2**-8, atol=1e-5)
    buffer.destroy()


@pytest.mark.parametrize("in_a_round", [False, True])
@pytest.mark.parametrize("early", [False, True])
def test_a_combine_leaves_out_what_its_own_ids_do(
    monkeypatch: pytest.MonkeyPatch, early: bool, in_a_round: bool
) -> None:
    """`early`: the dispatch was given the weights; `in_a_round`: they can't travel with a combine.

    The tensor of the dispatch is not read again, or it is named.
    """
    if in_a_round:
        monkeypatch.setattr(low_latency, "takes_weights", lambda buffer: False)
    case = oracle.random_case(7, ranks=3, hidden=HIDDEN, most=TOKENS, topk=4)

    def body(group: Any) -> int:
        buffer = Buffer(group)
        x, ids, weights = (of[buffer.rank].clone() for of in (case.x, case.topk_idx, case.topk_weights))
        y, _, handle, *_ = buffer.low_latency_dispatch(
            x, ids, TOKENS, case.num_experts, use_fp8=False, topk_weights=weights if early else None
        )
        left_out = ids.clone()
        left_out[::2, 0] = -1
        left_out[1::3] = -1
        before = weights.clone()
        for given in (left_out, ids, left_out.int(), ids.clone()):
            combined, _, _ = buffer.low_latency_combine(y, given, weights, handle)
            total = torch.where(given >= 0, weights, 0.0).sum(1, keepdim=True) * x.float()
            torch.testing.assert_close(combined.float(), total, rtol=2**-8, atol=1e-5)
        assert torch.equal(weights, before)
        changed = int((left_out != ids).sum())
        total = torch.where(ids >= 0, weights, 0.0).sum(1, keepdim=True) * x.float()
        ids.copy_(ids.flip(0))
        if early and in_a_round:  # the round of the weights would read it
            with pytest.raises(moecomm.BadInput, match="has changed"):
                buffer.low_latency_combine(y, ids, weights, handle)
            return changed
        combined, _, _ = buffer.low_latency_combine(y, ids, weights, handle)
        torch.testing.assert_close(combined.float(), total, rtol=2**-8, atol=1e-5)
        return changed

    assert sum(all_ranks(3, body)) > 9


def test_any_number_of_results_may_be_alive() -> None:
    def body(group: Any) -> None:
        buffer, x = Buffer(group), torch.ones(64, 4096, dtype=torch.bfloat16)
        ids = torch.arange(2 * 64).view(64, 2) % 4

        def dispatch() -> torch.Tensor:
            recv_x: torch.Tensor = buffer.low_latency_dispatch(x, ids, 64, 4, use_fp8=False)[0]
            return recv_x

        alive = [dispatch() for _ in range(3)]
        with pytest.warns(UserWarning, match="window_bytes=") if group.rank == 0 else contextlib.nullcontext():
            alive += [dispatch() for _ in range(6)]
        assert all((y[:, 0] == 1).all() for y in alive)

    with fixed_windows():
        all_ranks(2, body)


def test_two_dispatches_whose_hooks_come_late() -> None:
    """Two micro-batches, one Buffer: the second dispatch ends the first, and its hook then has nothing to do."""
    cases = [oracle.random_case(seed, ranks=2, hidden=HIDDEN, most=TOKENS, topk=2) for seed in (1, 2)]
    for case in cases:
        case.num_experts = 2
        case.topk_idx = [ids.clamp(max=1) for ids in case.topk_idx]

    def body(group: Any) -> None:
        buffer = Buffer(group)
        begun = [
            buffer.low_latency_dispatch(
                c.x[buffer.rank], c.topk_idx[buffer.rank], TOKENS, 2, use_fp8=False, return_recv_hook=True
            )
            for c in cases
        ]
        for case, (recv_x, count, handle, _, hook) in zip(cases, begun, strict=True):
            hook()
            hook()
            check_arrival(case, buffer.rank, recv_x, count, handle, (False, False, False))
        for case, (recv_x, _, handle, _, _) in reversed(list(zip(cases, begun, strict=True))):
            idx, weights = case.topk_idx[buffer.rank], case.topk_weights[buffer.rank]
            combined, _, _ = buffer.low_latency_combine(recv_x, idx, weights, handle)
            total = torch.where(idx >= 0, weights, 0.0).sum(1, keepdim=True) * case.x[buffer.rank].float()
            torch.testing.assert_close(combined.float(), total, rtol=2**-8, atol=1e-5)

    all_ranks(2, body)


def test_a_late_hook_waits_for_the_stream_that_has_received(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second dispatch receives the rows of the first on its stream; the first hook may be called on another one."""

    class Mark:
        """An event; a rank is a thread, whose current stream has the number `on.stream`."""

        def __init__(self) -> None:
            self.stream = on.stream

        def current_stream_wait(self) -> None:
            on.waits.append((on.stream, self.stream))

    on = threading.local()
    monkeypatch.setattr(low_latency, "EventHandle", Mark)

    def body(group: Any) -> None:
        buffer, x, ids = Buffer(group), torch.ones(2, HIDDEN, dtype=torch.bfloat16), torch.tensor([[0], [1]])
        hooks, on.waits = [], []
        for on.stream in (1, 2):
            *_, hook = buffer.low_latency_dispatch(x, ids, TOKENS, 2, return_recv_hook=True)
            hooks.append(hook)
        on.stream = 3
        for hook in hooks:
            hook()
        assert on.waits == [(3, 2)], "the second hook has received by itself"
        on.stream = 4
        hooks[0]()
        assert on.waits == [(3, 2), (4, 2)]
        buffer.destroy()

    all_ranks(2, body)


def test_normal_and_low_latency_calls_take_turns_on_one_buffer() -> None:
    case = oracle.random_case(4, ranks=2, hidden=HIDDEN, most=TOKENS)
    wants = oracle.normal(case)

    def body(group: Any) -> None:
        buffer = Buffer(group, low_latency_mode=True)
        rank = buffer.rank
        for _ in range(2):
            buffer.clean_low_latency_buffer(TOKENS, HIDDEN, case.num_experts)
            recv_x, count, handle, _, _ = buffer.low_latency_dispatch(
                case.x[rank], case.topk_idx[rank], TOKENS, case.num_experts, use_fp8=False
            )
            check_arrival(case, rank, recv_x, count, handle, (False, False, False))
            flat, *_ = buffer.dispatch(
                case.x[rank],
                topk_idx=case.topk_idx[rank],
                num_tokens_per_expert=wants[rank].num_tokens_per_expert,
            )
            assert torch.equal(flat, oracle.rows(case, wants[rank].src))

    all_ranks(2, body)


def test_cleaning_receives_what_a_hook_has_not() -> None:
    """It dispatches.  CPU ranks receive at once where they mask, so the hook of GPU ranks is set by hand."""

    def body(group: Any) -> None:
        buffer, called = Buffer(group, enable_shrink=True), []
        buffer.low_latency_dispatch(torch.zeros(1, 128).bfloat16(), torch.zeros(1, 1, dtype=torch.int64), 4, 2)
        (opened,) = buffer._pool.low_latency()
        buffer._pool.receiving[id(opened)] = lambda: called.append(True)
        buffer.clean_low_latency_buffer(4, 128, 2)
        assert called == [True]

    all_ranks(2, body)


def test_no_rank_is_masked() -> None:
    def body(group: Any) -> None:
        buffer = Buffer(group, enable_shrink=True)
        status = torch.full((2,), 5, dtype=torch.int32)
        buffer.low_latency_update_mask_buffer(1, False)
        buffer.low_latency_query_mask_buffer(status)
        assert status.tolist() == [0, 0]
        buffer.low_latency_clean_mask_buffer()
        buffer.get_local_buffer_tensor(torch.int8, use_rdma_buffer=True).zero_()
        with pytest.raises(moecomm.BadInput):
            buffer.low_latency_query_mask_buffer(torch.zeros(3, dtype=torch.int32))

    all_ranks(2, body)


def test_ranks_that_disagree_on_the_most_tokens_are_told() -> None:
    def body(group: Any) -> None:
        buffer = Buffer(group)
        x, idx = torch.zeros(1, 128, dtype=torch.bfloat16), torch.zeros(1, 1, dtype=torch.int64)
        with pytest.raises(moecomm.Mismatch, match=r"max_dispatch_tokens_per_rank=[45].*per_rank=[45]"):
            buffer.low_latency_dispatch(x, idx, 4 + buffer.rank, 2)

    all_ranks(2, body)


def test_no_window_of_new_sizes_is_opened_while_a_rank_is_masked() -> None:
    idle = threading.Barrier(2)

    def body(group: Any) -> None:
        buffer = Buffer(group, enable_shrink=True)
        x, idx = torch.zeros(1, 128, dtype=torch.bfloat16), torch.zeros(1, 1, dtype=torch.int64)
        buffer.low_latency_dispatch(x, idx, 4, 2)
        idle.wait(30)
        if buffer.rank == 0:
            buffer.low_latency_update_mask_buffer(1, True)
            with pytest.raises(moecomm.Unsupported, match="while ranks are masked"):
                buffer.low_latency_dispatch(x, idx, 5, 2)
        idle.wait(30)

    all_ranks(2, body)


def test_masked_ranks_have_no_part_until_they_are_taken_in_again() -> None:
    case = oracle.random_case(0, ranks=3, hidden=HIDDEN, most=TOKENS)
    idle = threading.Barrier(3)

    def exact_round(buffer: Buffer, rank: int) -> None:
        x, ids = case.x[rank], case.topk_idx[rank]
        recv_x, _, handle, _, _ = buffer.low_latency_dispatch(x, ids, TOKENS, case.num_experts, use_fp8=False)
        out, *_ = buffer.low_latency_combine(recv_x, ids, torch.ones(ids.shape), handle)
        status = torch.zeros(3, dtype=torch.int32)
        buffer.low_latency_query_mask_buffer(status)
        there = (ids >= 0) & (status[ids.clamp(min=0) // case.local_experts] == 0)
        assert torch.equal(out, (x.float() * there.sum(dim=1, keepdim=True)).bfloat16())

    def body(group: Any) -> None:
        rank, buffer = group.rank, Buffer(group, enable_shrink=True)
        with pytest.raises(moecomm.Unsupported, match="before the first"):
            buffer.low_latency_update_mask_buffer(2, True)
        exact_round(buffer, rank)
        idle.wait(30)  # rank 2 may still be in the round that the others have ended
        if rank != 2:
            buffer.low_latency_update_mask_buffer(2, True)
            buffer.low_latency_update_mask_buffer(2, True)  # changes nothing
            status = torch.zeros(3, dtype=torch.int32)
            buffer.low_latency_query_mask_buffer(status)
            assert status.tolist() == [0, 0, 1]
            exact_round(buffer, rank)
        idle.wait(30)
        buffer.low_latency_update_mask_buffer(2, False)
        exact_round(buffer, rank)
        idle.wait(30)
        if rank != 1:
            buffer.low_latency_update_mask_buffer(1, True)
        idle.wait(30)
        if rank == 0:
            buffer.low_latency_update_mask_buffer(2, True)
        idle.wait(30)
        for _ in range(2):  # the second time no rank is masked
            buffer.low_latency_clean_mask_buffer()
            exact_round(buffer, rank)

    all_ranks(3, body)


@pytest.mark.parametrize("lost_in", ["dispatch", "combine"])
def test_a_call_that_loses_a_rank_is_repeated_with_all_that_the_caller_gave(lost_in: str) -> None:
    """Each rank has waited for the other in the repeat, or the other for it."""
    gone, waited = threading.Event(), torch.zeros(3, 3, dtype=torch.int64)
    x, ids, weights = torch.ones(4, 128).bfloat16(), torch.arange(8).view(4, 2) % 6, torch.ones(4, 2)

    def body(group: Any) -> None:
        rank, buffer = group.rank, Buffer(group, 0, 1 << 20, low_latency_mode=True, enable_shrink=True)
        received = torch.zeros(2, dtype=torch.int32)
        rows, _, handle, _, _ = buffer.low_latency_dispatch(x, ids, 4, 6, use_fp8=False)
        if lost_in == "dispatch":
            buffer.low_latency_combine(rows, ids, weights, handle)
        if rank == 2:
            for one in buffer._pool.low_latency():
                one.close()
            gone.set()
            return
        assert gone.wait(60)
        if rank == 1:
            time.sleep(0.05)  # the other waits for this one
        if lost_in == "dispatch":
            stats = {"cumulative_local_expert_recv_stats": received, "dispatch_wait_recv_cost_stats": waited[rank]}
            rows, *_ = buffer.low_latency_dispatch(x, ids, 4, 6, use_fp8=False, **stats)
            assert received.sum() > 0 and rows.shape[0] == 2
        else:
            out = torch.empty(4, 128).bfloat16()
            got, *_ = buffer.low_latency_combine(
                rows, ids, weights, handle, out=out, combine_wait_recv_cost_stats=waited[rank]
            )
            assert got is out
            assert torch.equal(out, x * (ids < 4).sum(dim=1, keepdim=True))

    all_ranks(3, body)
    assert waited.sum() > 0
