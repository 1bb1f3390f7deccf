"""Normal dispatch and combine of the deep_ep Buffer, field by field, against the oracle."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import moecomm
from moecomm import formats
from moecomm.compat.deep_ep import Buffer, Config, EventHandle, EventOverlap

from ..backends.conftest import all_ranks
from . import oracle


def equal(got: torch.Tensor, want: Any, dtype: torch.dtype) -> None:
    assert got.dtype is dtype
    want = torch.as_tensor(want).to(dtype)
    assert torch.equal(got, want.reshape(got.shape) if want.numel() == 0 else want)


def layout_of(buffer: Buffer, case: oracle.Case) -> dict[str, Any]:
    names = ("num_tokens_per_rank", "num_tokens_per_rdma_rank", "num_tokens_per_expert", "is_token_in_rank")
    made = buffer.get_dispatch_layout(case.topk_idx[buffer.rank], case.num_experts)
    assert len(made) == 5
    return dict(zip(names, made[:4], strict=True))


@pytest.mark.parametrize("seed", range(12))
def test_every_field(seed: int) -> None:
    case = oracle.random_case(seed, ranks=1 + seed % 4)
    wants = oracle.normal(case)
    topk = case.topk_idx[0].shape[1]
    alignment = [1, 8][seed % 2]

    def body(group: Any) -> None:
        buffer = Buffer(group)
        rank = buffer.rank
        want, x = wants[rank], case.x[rank]
        given = layout_of(buffer, case)
        equal(given["num_tokens_per_rank"], want.num_tokens_per_rank, torch.int32)
        assert given["num_tokens_per_rdma_rank"] is None
        equal(given["num_tokens_per_expert"], want.num_tokens_per_expert, torch.int32)
        equal(given["is_token_in_rank"], want.is_token_in_rank, torch.bool)

        recv_x, idx, weights, counts, handle, event = buffer.dispatch(
            x,
            topk_idx=case.topk_idx[rank],
            topk_weights=case.topk_weights[rank],
            expert_alignment=alignment,
            config=Config(num_sms=8),
            **given,
        )
        assert isinstance(event, EventOverlap) and event.event is None
        equal(recv_x, oracle.rows(case, want.src), torch.bfloat16)
        assert recv_x.shape == (len(want.src), x.shape[1])
        equal(idx, want.recv_topk_idx, torch.int64)
        assert idx.shape == weights.shape == (len(want.src), topk)
        equal(weights, want.recv_topk_weights, torch.float32)
        assert type(counts) is list
        assert counts == [-(-n // alignment) * alignment for n in want.num_recv_tokens_per_expert]
        check_handle(handle, want, rank)

        again, *nothing, event = buffer.dispatch(x * 2, handle=handle)
        assert nothing == [None] * 4 and event.event is None
        assert torch.equal(again, recv_x * 2)

        y = recv_x * 0.5
        times, picked = want.is_token_in_rank.sum(1, keepdim=True), case.topk_idx[rank] >= 0
        for fill in (0.0, 4.0):  # beside -1, as deep_ep's own test has them: all of them are added
            combined, returned, _ = buffer.combine(y, handle, topk_weights=weights.masked_fill(idx < 0, fill))
            assert torch.equal(combined, (times * (x * 0.5).float()).bfloat16())
            want_weights = torch.where(picked, case.topk_weights[rank], 0.0) + fill * (times - picked.int())
            torch.testing.assert_close(returned, want_weights, rtol=2**-22, atol=0)
        bias = torch.randn(x.shape, generator=torch.Generator().manual_seed(rank)).bfloat16()
        exact = times * (x * 0.5).float() + bias.float()
        combined, returned, _ = buffer.combine(y, handle, bias=bias)
        assert returned is None and torch.equal(combined, exact.bfloat16())
        combined, _, _ = buffer.combine(y, handle, bias=(bias, bias))
        assert torch.equal(combined, (exact + bias.float()).bfloat16())
        buffer.destroy()

    all_ranks(case.ranks, body)


def check_handle(handle: Any, want: oracle.Normal, rank: int) -> None:
    """The tuple, item by item, in any order, and unpacked."""
    assert isinstance(handle, tuple) and len(handle) == 6
    equal(handle[3], [t for _, t in want.src], torch.int32)
    rank_prefix, *channels, src, is_in_rank, send_head = handle
    assert channels == [None, None] and send_head is None
    assert src is handle[3] is handle[-3] and handle[3:5] == (src, is_in_rank)
    ranks = len(want.rank_prefix)
    assert rank_prefix.shape == (ranks, ranks)
    equal(rank_prefix[:, rank], want.rank_prefix, torch.int32)
    assert (rank_prefix[:, [r for r in range(ranks) if r != rank]] == -1).all()
    equal(is_in_rank, want.is_token_in_rank, torch.bool)
    longer = handle + (7,)  # noqa: RUF005 - as callers may write it
    assert len(longer) == 7 and longer[3] is src and longer[6] == 7 and is_in_rank in handle and 7 not in handle
    with pytest.raises(IndexError):
        handle[6]


BYTES = (torch.int8, torch.uint8, torch.float8_e5m2, torch.float8_e4m3fn)


@pytest.mark.parametrize(
    ("dtype", "scale_dtype", "columns"),
    [(torch.float8_e4m3fn, torch.float32, 2), (torch.float8_e4m3fn, torch.int32, 2)]
    + [(dtype, torch.float32, 1) for dtype in BYTES],
)
def test_rows_of_bytes_travel_with_their_scales(dtype: torch.dtype, scale_dtype: torch.dtype, columns: int) -> None:
    """Scales of one rank lie by column."""
    case = oracle.random_case(3, ranks=3)
    wants = oracle.normal(case)
    values = [(10 * x).to(torch.int8).view(dtype) for x in case.x]
    scales = [x[:, :columns].float().view(scale_dtype) for x in case.x]

    def body(group: Any) -> None:
        buffer = Buffer(group)
        rank, want = buffer.rank, wants[buffer.rank]
        x = values[rank], scales[rank].T.contiguous().T if rank else scales[rank]
        given = {"topk_idx": case.topk_idx[rank], "topk_weights": case.topk_weights[rank], **layout_of(buffer, case)}
        arrived, *_, handle, _ = buffer.dispatch(x, **given)
        for rows, factors in (arrived, buffer.dispatch(x, handle=handle)[0]):
            assert rows.dtype is dtype
            sent = oracle.rows(case, want.src, [v.view(torch.uint8) for v in values])
            equal(rows.view(torch.uint8), sent, torch.uint8)
            equal(factors, oracle.rows(case, want.src, scales), scale_dtype)
        combined, _, _ = buffer.combine(oracle.rows(case, want.src), handle)
        assert torch.equal(combined, (want.is_token_in_rank.sum(1, keepdim=True) * case.x[rank].float()).bfloat16())

    all_ranks(3, body)


@pytest.mark.parametrize("worst", [False, True])
def test_nvfp4_rows_travel_in_three(worst: bool) -> None:
    """As in the branch hybrid-ep; without `worst` the second round has more tokens than the first Buffer takes."""
    then = 12 if worst else 900
    cases = [oracle.random_case(seed, ranks=3, most=most, topk=2) for seed, most in ((3, 12), (6, then))]
    for case in cases:
        case.num_experts = 3
        case.topk_idx = [ids.clamp(max=2) for ids in case.topk_idx]
    all_ranks(3, lambda group: nvfp4_rounds(Buffer(group), cases, worst))


def nvfp4_rounds(buffer: Buffer, cases: list[oracle.Case], worst: bool) -> None:
    rank = buffer.rank
    for case in cases:
        want = oracle.normal(case)[rank]
        sent = [formats.quantize(x, "nvfp4", global_scale=300.0) for x in case.x]
        values = [v.view(torch.int32) for v, _ in sent]
        scales = [s.view(torch.int32) for _, s in sent if s is not None]
        factors = [torch.full((len(x), 1), 300.0 + r) for r, x in enumerate(case.x)]
        x, more = (values[rank], scales[rank], factors[rank]), {"num_worst_tokens": 3 * 12} if worst else {}
        recv, idx, _, _, handle, _ = buffer.dispatch(x, topk_idx=case.topk_idx[rank], **layout_of(buffer, case), **more)
        for found in (recv, buffer.dispatch(x, handle=handle)[0]):
            for arrived, given in zip(found, (values, scales, factors), strict=True):
                equal(arrived[: len(want.src)], oracle.rows(case, want.src, given), given[0].dtype)
        assert idx is not None and idx[: len(want.src)].tolist() == want.recv_topk_idx
        y = torch.zeros(len(idx), case.x[0].shape[1], dtype=torch.bfloat16)
        y[: len(want.src)] = oracle.rows(case, want.src)
        combined, _, _ = buffer.combine(y, handle)
        assert torch.equal(combined, (want.is_token_in_rank.sum(1, keepdim=True) * case.x[rank].float()).bfloat16())


def test_without_topk_a_layout_says_where_tokens_go() -> None:
    case = oracle.random_case(5, ranks=4)
    wants = oracle.normal(case)

    def body(group: Any) -> None:
        buffer = Buffer(group)
        want = wants[buffer.rank]
        made = buffer.dispatch(case.x[buffer.rank], **layout_of(buffer, case), expert_alignment=4)
        recv_x, idx, weights, counts, handle, _ = made
        assert idx is None and weights is None
        equal(recv_x, oracle.rows(case, want.src), torch.bfloat16)
        assert counts == [-(-n // 4) * 4 for n in want.num_recv_tokens_per_expert]
        equal(handle[4], want.is_token_in_rank, torch.bool)
        combined, _, _ = buffer.combine(recv_x, handle)
        assert torch.equal(combined, (handle[4].sum(1, keepdim=True) * case.x[buffer.rank].float()).bfloat16())

    all_ranks(4, body)


def test_worst_tokens_give_a_fixed_shape_and_mark_what_is_unused() -> None:
    case = oracle.random_case(6, ranks=3)
    wants = oracle.normal(case)
    worst = 50

    def body(group: Any) -> None:
        buffer = Buffer(group)
        rank, want = buffer.rank, wants[buffer.rank]
        args = {"topk_idx": case.topk_idx[rank], "topk_weights": case.topk_weights[rank]}
        recv_x, idx, weights, counts, handle, _ = buffer.dispatch(
            case.x[rank], **args, **layout_of(buffer, case), num_worst_tokens=worst, config=Config(8)
        )
        rows = len(want.src)
        assert recv_x.shape[0] == idx.shape[0] == weights.shape[0] == len(handle[3]) == worst and counts == []
        equal(recv_x[:rows], oracle.rows(case, want.src), torch.bfloat16)
        equal(idx[:rows], want.recv_topk_idx, torch.int64)
        assert (idx[rows:] == -1).all()
        equal(weights[:rows], want.recv_topk_weights, torch.float32)
        equal(handle[0][:, rank], want.rank_prefix, torch.int32)
        equal(handle[3][:rows], [t for _, t in want.src], torch.int32)
        cached, *_ = buffer.dispatch(case.x[rank], handle=handle)
        assert cached.shape == recv_x.shape and torch.equal(cached[:rows], recv_x[:rows])
        combined, _, _ = buffer.combine(recv_x, handle)
        assert torch.equal(combined, (handle[4].sum(1, keepdim=True) * case.x[rank].float()).bfloat16())

    all_ranks(3, body)


def test_a_rank_with_more_tokens_than_before_makes_room_with_the_others() -> None:
    """By turns, and all at once; handles from before stay good."""
    sizes = [[3, 5, 2], [3, 300, 0], [3, 4, 700], [900, 1100, 1000], [1, 1, 1]]

    def body(group: Any) -> None:
        buffer = Buffer(group)
        rank, kept = buffer.rank, []
        for tokens in sizes:
            g = torch.Generator().manual_seed(rank)
            x = torch.randn(tokens[rank], 16, generator=g).bfloat16()
            idx = torch.rand(tokens[rank], 6, generator=g).argsort(1)[:, :2]
            expert = torch.zeros(6, dtype=torch.int32)
            recv_x, *_, handle, _ = buffer.dispatch(x, topk_idx=idx, num_tokens_per_expert=expert)
            kept.append((x, recv_x, handle))
        for x, recv_x, handle in kept:
            combined, _, _ = buffer.combine(recv_x, handle)
            assert torch.equal(combined, (handle[4].sum(1, keepdim=True) * x.float()).bfloat16())

    all_ranks(3, body)


def test_events_follow_the_current_stream() -> None:
    def body(group: Any) -> None:
        buffer = Buffer(group)
        case = oracle.random_case(1, ranks=2)
        event = buffer.capture()
        assert isinstance(event, EventOverlap) and isinstance(event.event, EventHandle)
        *layout, event = buffer.get_dispatch_layout(
            case.topk_idx[buffer.rank],
            case.num_experts,
            previous_event=event,
            async_finish=True,
            allocate_on_comm_stream=True,
        )
        recv_x, *_, handle, event = buffer.dispatch(
            case.x[buffer.rank],
            topk_idx=case.topk_idx[buffer.rank],
            num_tokens_per_expert=layout[2],
            previous_event=event,
            async_finish=True,
            allocate_on_comm_stream=True,
        )
        event.current_stream_wait()
        _, _, event = buffer.combine(recv_x, handle, previous_event=event.event, async_finish=True)
        with event(release_handle=True):
            pass
        assert event.event is None
        with pytest.raises(moecomm.BadInput):
            event.wait()

    all_ranks(2, body)
