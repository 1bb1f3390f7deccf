"""ElasticBuffer, field by field, against the oracle."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

import moecomm
from moecomm.compat import deep_ep
from moecomm.compat.deep_ep import Buffer, ElasticBuffer, EPBuffer, EPHandle, EventHandle, EventOverlap

from ..backends.conftest import all_ranks
from . import oracle

TOKENS = 14  # num_max_tokens_per_rank; the cases have at most 12
HIDDEN = 256


def psum(counts: list[int]) -> list[int]:
    return list(itertools.accumulate(counts))


def aligned(counts: list[int], alignment: int) -> list[int]:
    return [-(-n // alignment) * alignment for n in counts]


# Classes, and options of their calls.  EPBuffer has the rounds of ElasticBuffer, and other parameters around them.
KINDS: dict[str, tuple[Any, dict[str, Any]]] = {
    "elastic": (ElasticBuffer, {}),
    "ep": (EPBuffer, {}),
    "ep deferred": (EPBuffer, {"defer_epilogue": True, "async_with_compute_stream": True}),
}
BY_KIND = [("elastic", seed) for seed in range(6)] + [
    (kind, seed) for kind in ("ep", "ep deferred") for seed in (1, 2, 3)
]


def results(outcome: Any) -> Any:
    """The results of a call and its event, whose wait returns them where the call is deferred."""
    return (*outcome.wait(), outcome) if isinstance(outcome, EventOverlap) else outcome


def check_common(handle: EPHandle, case: oracle.Case, rank: int, alignment: int, synced: bool) -> None:
    want = oracle.normal(case)[rank]
    assert (handle.num_experts, handle.expert_alignment) == (case.num_experts, alignment)
    assert handle.num_max_tokens_per_rank == TOKENS and handle.num_sms == 0
    assert torch.equal(handle.topk_idx, case.topk_idx[rank])
    assert handle.psum_num_recv_tokens_per_scaleup_rank.dtype is torch.int32
    assert handle.psum_num_recv_tokens_per_scaleup_rank.tolist() == want.rank_prefix
    list_ = aligned(want.num_recv_tokens_per_expert, alignment) if synced else []
    assert type(handle.num_recv_tokens_per_expert_list) is list and handle.num_recv_tokens_per_expert_list == list_
    assert handle.num_recv_tokens == (len(want.src) if synced else case.ranks * TOKENS)
    if synced:
        assert handle.num_expanded_tokens == sum(list_)
    assert handle.psum_num_recv_tokens_per_expert.dtype is torch.int32
    assert handle.token_metadata_at_forward is None and handle.channel_linked_list is None
    metadata, topk = handle.recv_src_metadata, case.topk_idx[0].shape[1]
    assert metadata.shape == (handle.num_recv_tokens, topk + 2) and metadata.dtype is torch.int32
    for (source, token), row, ids in zip(want.src, metadata.tolist(), want.recv_topk_idx, strict=False):
        first = next(k for k, e in enumerate(ids) if e >= 0)
        assert row[:2] == [source * TOKENS + token, source * topk + first]
    slots = handle.dst_buffer_slot_idx
    assert slots.shape == case.topk_idx[rank].shape and slots.dtype is torch.int32
    for token, ids in enumerate(case.topk_idx[rank].tolist()):
        before = want.is_token_in_rank[:token].sum(0).tolist()
        assert slots[token].tolist() == [-1 if e < 0 else before[case.owner(e)] for e in ids]


@pytest.mark.parametrize("synced", [True, False])
@pytest.mark.parametrize(("kind", "seed"), BY_KIND)
def test_without_expanding(kind: str, seed: int, synced: bool) -> None:
    cls, options = KINDS[kind]
    case = oracle.random_case(seed, ranks=1 + seed % 4)
    alignment = [1, 8][seed % 2]

    def body(group: Any) -> None:
        buffer = cls(group, num_max_tokens_per_rank=TOKENS, hidden=HIDDEN, num_topk=4)
        rank, want = buffer.rank_idx, oracle.normal(case)[buffer.rank_idx]
        x, rows = case.x[rank], len(want.src)
        stats = torch.full((case.local_experts,), 3, dtype=torch.int32)
        recv_x, idx, weights, handle, event = results(
            buffer.dispatch(
                x,
                case.topk_idx[rank],
                case.topk_weights[rank],
                cumulative_local_expert_recv_stats=stats,
                num_experts=case.num_experts,
                expert_alignment=alignment,
                do_cpu_sync=synced,
                **options,
            )
        )
        assert (event.event is None) == (not options)
        assert stats.tolist() == [3 + n for n in want.num_recv_tokens_per_expert]
        assert len(recv_x) == len(idx) == len(weights) == (rows if synced else case.ranks * TOKENS)
        assert torch.equal(recv_x[:rows], oracle.rows(case, want.src))
        assert idx[:rows].tolist() == want.recv_topk_idx and idx.dtype is torch.int64
        torch.testing.assert_close(weights[:rows].tolist(), want.recv_topk_weights)
        check_common(handle, case, rank, alignment, synced)
        assert handle.psum_num_recv_tokens_per_expert.tolist() == psum(
            aligned(want.num_recv_tokens_per_expert, alignment)
        )

        again, cached_idx, cached_weights, same, _ = results(buffer.dispatch(x * 2, handle=handle, **options))
        assert same is handle and cached_weights is None
        assert torch.equal(again[:rows], recv_x[:rows] * 2) and torch.equal(cached_idx[:rows], idx[:rows])
        _, _, cached_weights, _, _ = results(
            buffer.dispatch(x, topk_weights=case.topk_weights[rank] * 2, handle=handle, **options)
        )
        assert torch.equal(cached_weights[:rows], weights[:rows] * 2)

        combined, returned, _ = results(buffer.combine(recv_x, handle, topk_weights=weights, **options))
        times = want.is_token_in_rank.sum(1, keepdim=True)
        assert torch.equal(combined, (times * x.float()).bfloat16())
        assert torch.equal(returned, torch.where(case.topk_idx[rank] >= 0, case.topk_weights[rank], 0.0))
        bias = torch.ones_like(x)
        combined, returned, _ = results(buffer.combine(recv_x, handle, bias=(bias, bias), **options))
        assert returned is None and torch.equal(combined, (times * x.float() + 2).bfloat16())
        buffer.barrier()
        buffer.destroy()

    all_ranks(case.ranks, body)


@pytest.mark.parametrize("synced", [True, False])
@pytest.mark.parametrize(("kind", "seed"), BY_KIND)
def test_expanding(kind: str, seed: int, synced: bool) -> None:
    cls, options = KINDS[kind]
    case = oracle.random_case(seed, ranks=1 + seed % 4)
    # The same expert twice is what deep_ep does not take, and has no room for without a CPU sync.
    for ids in case.topk_idx:
        for row in ids:
            for k in range(1, len(row)):
                if row[k] in row[:k]:
                    row[k] = -1
    alignment = [1, 8, 128][seed % 3]
    wants, local = oracle.expanded(case, alignment), case.local_experts

    def body(group: Any) -> None:
        buffer = cls(group, num_max_tokens_per_rank=TOKENS, allow_multiple_reduction=seed % 2 == 0)
        rank, want = buffer.rank_idx, wants[buffer.rank_idx]
        x, idx, weights = case.x[rank], case.topk_idx[rank], case.topk_weights[rank]
        recv_x, recv_idx, recv_weights, handle, event = results(
            buffer.dispatch(
                x,
                topk_idx=idx,
                topk_weights=weights,
                num_experts=case.num_experts,
                expert_alignment=alignment,
                do_expand=True,
                do_zero_padding=True,
                do_cpu_sync=synced,
                **{"async_with_compute_stream": True, **options},
            )
        )
        event.current_stream_wait()
        most = case.ranks * TOKENS * min(idx.shape[1], local) + (alignment - 1) * local
        rows = len(want.rows) if synced else -(-most // alignment) * alignment
        assert recv_x.shape == (rows, HIDDEN) and recv_weights.shape == (rows,) and recv_idx is None
        check_common(handle, case, rank, alignment, synced)
        assert handle.num_expanded_tokens == rows
        assert handle.num_unaligned_recv_tokens_per_expert.tolist() == want.counts
        ends = psum(aligned(want.counts, alignment))
        unpadded = [end - -n % alignment for end, n in zip(ends, want.counts, strict=True)]
        assert handle.psum_num_recv_tokens_per_expert.tolist() == unpadded
        assert handle.recv_src_metadata[: len(want.slots), 2:].tolist() == want.slots

        def check(x: torch.Tensor, row_weights: torch.Tensor | None, times: float) -> None:
            for row, origin in enumerate(want.rows):
                if origin is None:
                    assert (x[row] == 0).all() and (row_weights is None or row_weights[row] == 0)
                else:
                    source, token, k = origin
                    assert torch.equal(x[row], case.x[source][token] * times)
                    assert row_weights is None or row_weights[row] == case.topk_weights[source][token, k] * times

        check(recv_x, recv_weights, 1)
        again, _, cached_weights, same, _ = results(
            buffer.dispatch(x * 2, handle=handle, do_expand=True, do_zero_padding=True, **options)
        )
        assert same is handle and cached_weights is None
        check(again, None, 2)
        again, _, cached_weights, _, _ = results(
            buffer.dispatch(
                x * 2, topk_weights=weights * 2, handle=handle, do_expand=True, do_zero_padding=True, **options
            )
        )
        check(again, cached_weights, 2)

        picked = (idx >= 0).sum(1, keepdim=True)
        combined, returned, _ = results(buffer.combine(recv_x, handle, topk_weights=recv_weights, **options))
        torch.testing.assert_close(combined.float(), picked * x.float(), rtol=2**-7, atol=1e-5)
        assert torch.equal(returned, torch.where(idx >= 0, weights, 0.0))

    all_ranks(case.ranks, body)


@pytest.mark.parametrize("by_column", [False, True])
@pytest.mark.parametrize("expand", [False, True])
@pytest.mark.parametrize(
    ("kind", "cls"),
    [("e4m3", ElasticBuffer), ("bytes", ElasticBuffer), ("e4m3", EPBuffer)],
    ids=["e4m3", "bytes", "ep"],
)
def test_scales_travel_in_rows_or_columns(expand: bool, by_column: bool, kind: str, cls: Any) -> None:
    case = oracle.random_case(3, ranks=3, topk=1)
    fp8 = [oracle.cast_to_fp8(x, round_scale=False) for x in case.x]
    rows = [q if kind == "e4m3" else q.view(torch.uint8) for q, _ in fp8]
    scales = [s if kind == "e4m3" else s.view(torch.int32) for _, s in fp8]

    def body(group: Any) -> None:
        buffer = cls(group, num_max_tokens_per_rank=TOKENS, use_fp8_dispatch=True)
        rank = buffer.rank_idx
        src = [o[:2] for o in oracle.expanded(case, 1)[rank].rows if o] if expand else oracle.normal(case)[rank].src
        options = {"do_expand": expand, "use_tma_aligned_col_major_sf": by_column}
        sent = (rows[rank], scales[rank])
        made = buffer.dispatch(sent, case.topk_idx[rank], num_experts=case.num_experts, **options)
        cached = buffer.dispatch(sent, handle=made[3], **options)
        for (recv_x, recv_sf), *_ in (made, cached):
            assert recv_x.dtype is rows[0].dtype and recv_sf.dtype is scales[0].dtype
            sent_rows = oracle.rows(case, src, [r.view(torch.uint8) for r in rows])
            assert torch.equal(recv_x.view(torch.uint8), sent_rows)
            assert torch.equal(recv_sf, oracle.rows(case, src, scales))
            if len(src) > 1:
                assert recv_sf.stride() == ((1, -(-len(src) // 4) * 4) if by_column else (HIDDEN // 128, 1))

    all_ranks(3, body)


def test_what_a_buffer_says_of_itself() -> None:
    def body(group: Any) -> None:
        buffer = ElasticBuffer(group, num_max_tokens_per_rank=128, hidden=7168, num_topk=8)
        hint = ElasticBuffer.get_buffer_size_hint(group, 128, 7168, 8)
        assert buffer.num_bytes == hint and hint % (2 << 20) == 0 and hint > 2 * 128 * 7168 * 2
        assert ElasticBuffer(group, num_bytes=5).num_bytes == 5
        assert buffer.get_physical_domain_size() == buffer.get_logical_domain_size() == (1, 2)
        assert deep_ep.get_physical_domain_size(group) == deep_ep.get_logical_domain_size(group) == (1, 2)
        assert (buffer.num_scaleout_ranks, buffer.num_scaleup_ranks) == (1, 2)
        assert (buffer.scaleout_rank_idx, buffer.scaleup_rank_idx) == (0, buffer.rank_idx)
        assert buffer.num_ranks == 2 and buffer.num_allocated_qps >= buffer.get_theoretical_num_qps(16) >= 1
        sms = buffer.get_theoretical_num_sms(256, 8)
        assert sms >= 4 and sms % 2 == 0
        assert ElasticBuffer(group, prefer_overlap_with_compute=False).get_theoretical_num_sms(256, 8) >= sms
        assert isinstance(buffer.capture(), EventHandle)

    all_ranks(2, body)


def test_a_handle_repeats_what_it_was_made_for() -> None:
    x, idx = torch.zeros(3, 16, dtype=torch.bfloat16), torch.tensor([[0], [1], [-1]])

    def body(group: Any) -> None:
        buffer = ElasticBuffer(group, num_max_tokens_per_rank=TOKENS)
        recv_x, _, _, handle, _ = buffer.dispatch(x, idx, num_experts=2)
        with pytest.raises(moecomm.Unsupported, match="do_expand"):
            buffer.dispatch(x, handle=handle, do_expand=True)
        for argument, wrong in {
            "num_experts": {"num_experts": 99},
            "expert_alignment": {"expert_alignment": 4},
            "num_max_tokens_per_rank": {"num_max_tokens_per_rank": 99},
            "handle": {"topk_idx": idx},
            "do_cpu_sync": {"do_cpu_sync": True},
            "do_zero_padding": {"do_zero_padding": True},
            "cumulative": {"cumulative_local_expert_recv_stats": idx},
        }.items():
            with pytest.raises(moecomm.BadInput, match=argument):
                buffer.dispatch(x, handle=handle, **wrong)
        for call in (
            lambda: buffer.dispatch(x, handle=(1,)),
            lambda: buffer.combine(recv_x, (1,)),
            lambda: ElasticBuffer(group).combine(recv_x, handle),
            lambda: ElasticBuffer(group).dispatch(x, idx, num_experts=2),
            lambda: buffer.dispatch(x, idx),
            lambda: buffer.dispatch(x, idx, num_experts=2, num_max_tokens_per_rank=1),
            lambda: buffer.dispatch(x, idx, num_experts=2, expert_alignment=0),
        ):
            with pytest.raises(moecomm.BadInput):
                call()
        buffer.destroy()
        with pytest.raises(moecomm.Closed):
            buffer.dispatch(x, handle=handle)

    all_ranks(1, body)


def test_the_bias_is_added_first_as_there() -> None:
    """The sum of two ranks cancels: a small bias that was added first is lost in it."""
    tiny = torch.full((2, 128), 2.0**-27).bfloat16()
    ids, x, weights = torch.tensor([[0, 2]] * 2), torch.ones(2, 128).bfloat16(), torch.ones(2, 2)

    def body(group: Any) -> None:
        sign = 1.0 - 2 * group.rank
        elastic = ElasticBuffer(group, num_max_tokens_per_rank=2, hidden=128, num_topk=2)
        rows, _, _, handle, _ = elastic.dispatch(x, topk_idx=ids, topk_weights=weights, num_experts=4)
        y = torch.full_like(rows, 1.375 * sign)
        normal = Buffer(group)
        counts = normal.get_dispatch_layout(ids, 4)[2]
        sent, *_, normal_handle, _ = normal.dispatch(
            x, topk_idx=ids, topk_weights=weights, num_tokens_per_expert=counts
        )
        for bias, want in ((tiny, 0.0), ((tiny, tiny), 0.0), (None, 0.0), ((tiny, torch.ones_like(tiny)), 1.0)):
            assert elastic.combine(y, handle, bias=bias)[0].eq(want).all()
            assert normal.combine(torch.full_like(sent, 1.375 * sign), normal_handle, bias=bias)[0].eq(want).all()
        elastic.destroy()
        normal.destroy()

    all_ranks(2, body)
