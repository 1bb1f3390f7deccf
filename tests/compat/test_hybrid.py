"""HybridEPBuffer: what Megatron's dispatcher calls, field by field, against the oracle."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import moecomm
from moecomm import formats
from moecomm.compat.deep_ep import HybridEPBuffer
from moecomm.ranks.rendezvous import Alone

from ..backends.conftest import all_ranks
from . import oracle
from .test_no_kernels import Computed

HIDDEN, TOKENS = 256, 12


def mapped(case: oracle.Case) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Rewrites the case without an expert twice in a row, ids ascending; returns routing maps and dense probs."""
    maps, probs = [], []
    for rank in range(case.ranks):
        ids, weights = case.topk_idx[rank], case.topk_weights[rank]
        dense = torch.zeros(len(ids), case.num_experts)
        for token, row in enumerate(ids.tolist()):
            for k, e in enumerate(row):
                if e >= 0:
                    dense[token, e] = weights[token, k] + 0.1
        maps.append(dense > 0)
        probs.append(dense)
        picked = [row.nonzero().flatten().tolist() for row in dense]
        topk = ids.shape[1]
        case.topk_idx[rank] = torch.tensor([p + [-1] * (topk - len(p)) for p in picked]).view(-1, topk).long()
        case.topk_weights[rank] = torch.tensor(
            [[float(dense[t, e]) for e in p] + [0.0] * (topk - len(p)) for t, p in enumerate(picked)]
        ).view(-1, topk)
    return maps, probs


@pytest.mark.parametrize("by_map", [True, False])
@pytest.mark.parametrize("blocking", [True, False])
@pytest.mark.parametrize("seed", range(4))
def test_every_field(seed: int, blocking: bool, by_map: bool) -> None:
    case = oracle.random_case(seed, ranks=1 + seed % 4, most=TOKENS)
    maps, probs = mapped(case)
    pad = [None, 8, 16][seed % 3]
    wants = oracle.expanded(case, pad or 1)
    room = 400

    def body(group: Any) -> None:
        buffer = HybridEPBuffer(
            group=group,
            hidden_dim=HIDDEN,
            max_num_of_tokens_per_rank=TOKENS,
            num_local_experts=case.local_experts,
            use_fp8=False,
            num_sms_dispatch_api=16,
        )
        rank, want = buffer.rank, wants[buffer.rank]
        x = case.x[rank]
        routing = (
            {"routing_map": maps[rank], "probs": probs[rank]}
            if by_map
            else {
                "topk_idx": case.topk_idx[rank],
                "topk_weights": case.topk_weights[rank],
                "num_of_experts": case.num_experts,
            }
        )
        shape = {} if blocking else {"num_permuted_tokens": room, "non_blocking": True}
        hidden, weights, scales, counts, handle = buffer.dispatch_with_permute(
            hidden=x,
            scaling_factor=None,
            num_of_experts_per_rank=case.local_experts,
            pad_multiple=pad,
            **routing,
            **shape,
        )
        assert scales is None and hidden.shape == (len(want.rows) if blocking else room, HIDDEN)
        assert counts.dtype is torch.int64 and counts.device.type == "cpu"
        assert counts.tolist() == [-(-n // (pad or 1)) * (pad or 1) for n in want.counts]

        def check(hidden: torch.Tensor, weights: torch.Tensor | None, times: float) -> None:
            for row, origin in enumerate(want.rows):
                if origin is None:
                    assert (hidden[row] == 0).all() and (weights is None or weights[row] == 0)
                    continue
                source, token, k = origin
                assert torch.equal(hidden[row], case.x[source][token] * times)
                assert weights is None or weights[row] == case.topk_weights[source][token, k]

        check(hidden, weights, 1)
        again, nothing, _, same_counts, same = buffer.dispatch_with_permute(
            hidden=x * 2, scaling_factor=None, handle=handle, pad_multiple=pad, num_permuted_tokens=len(hidden)
        )
        assert nothing is None and same is handle and torch.equal(same_counts, counts)
        check(again, None, 2)

        combined, returned = buffer.combine_with_unpermute(hidden=hidden, handle=handle, pad_multiple=pad)
        picked = (case.topk_idx[rank] >= 0).sum(1, keepdim=True)
        assert returned is None
        torch.testing.assert_close(combined.float(), picked * x.float(), rtol=2**-7, atol=1e-5)
        _, returned = buffer.combine_with_unpermute(hidden=hidden, probs=weights, handle=handle, pad_multiple=pad)
        assert torch.equal(returned, probs[rank])

    all_ranks(case.ranks, body)


@pytest.mark.parametrize("by_map", [True, False])
@pytest.mark.parametrize("known", [False, True])
@pytest.mark.parametrize("seed", range(4))
def test_rows_without_a_permutation(seed: int, known: bool, by_map: bool) -> None:
    """As the reference of deep_ep's tests: rows of the tokens that have an expert here, in the order of all ranks'."""
    case = oracle.random_case(seed, ranks=1 + seed % 4, most=TOKENS)
    maps, probs = mapped(case)
    fp8 = [oracle.cast_to_fp8(x, round_scale=False) for x in case.x]
    whole = torch.cat(maps)

    def body(group: Any) -> None:
        buffer = HybridEPBuffer(group, HIDDEN, TOKENS if known else TOKENS // 2, case.local_experts)  # else it grows
        rank = buffer.rank
        mine = slice(rank * case.local_experts, (rank + 1) * case.local_experts)
        here = whole[:, mine].any(dim=1)
        ids, weights = case.topk_idx[rank], case.topk_weights[rank]
        by_ids = {"topk_idx": ids, "topk_weights": weights, "num_of_experts": case.num_experts}
        routing: dict[str, Any] = {"routing_map": maps[rank], "probs": probs[rank]} if by_map else by_ids
        shape = {"num_dispatched_tokens": int(here.sum())} if known else {}
        x, found, scales, handle = buffer.dispatch(case.x[rank], **routing, **shape)
        assert torch.equal(x, torch.cat(case.x)[here]) and scales is None
        dense = torch.zeros(len(x), case.num_experts)
        dense[:, mine] = torch.cat(probs)[here][:, mine]
        assert found is not None and torch.equal(found, dense)
        maps_of_kernels, (count, chosen, tokens, config) = handle[:3], handle[3:]
        assert maps_of_kernels == (None, None, None) and tokens == len(ids) and config is buffer.config
        assert int(count) == len(x) and torch.equal(chosen, whole[here][:, mine])

        times = chosen.sum(dim=1, keepdim=True)
        combined, back = buffer.combine((x * times).bfloat16(), found, handle)
        assert back is not None and torch.equal(back, probs[rank])
        picked = (ids >= 0).sum(1, keepdim=True)
        torch.testing.assert_close(combined.float(), picked * case.x[rank].float(), rtol=2**-7, atol=1e-5)
        assert buffer.combine(x, handle=handle)[1] is None

        again, nothing, _, same = buffer.dispatch(case.x[rank] * 2, handle=handle)
        assert nothing is None and same is handle and torch.equal(again, x * 2)
        del routing["probs" if by_map else "topk_weights"]
        values, none, scales, _ = buffer.dispatch(fp8[rank][0].view(torch.uint8), fp8[rank][1], **routing, **shape)
        assert none is None and scales is not None and values.dtype is torch.uint8
        assert torch.equal(values, torch.cat([q for q, _ in fp8])[here].view(torch.uint8))
        assert torch.equal(scales, torch.cat([scale for _, scale in fp8])[here])
        buffer._pool.close()

    all_ranks(case.ranks, body)


def test_a_handle_is_of_the_call_that_made_it() -> None:
    def body(group: Any) -> None:
        buffer, x, ids = HybridEPBuffer(group, HIDDEN, 2, 2), torch.ones(2, HIDDEN).bfloat16(), torch.tensor([[0], [1]])
        rows, _, _, handle = buffer.dispatch(x, topk_idx=ids, num_of_experts=2)
        permuted, _, _, _, other = buffer.dispatch_with_permute(hidden=x, topk_idx=ids, num_of_experts=2)
        with pytest.raises(moecomm.BadInput, match="that dispatch returned"):
            buffer.combine(rows, handle=other)  # type: ignore[arg-type]
        with pytest.raises(moecomm.BadInput, match="that dispatch_with_permute returned"):
            buffer.combine_with_unpermute(hidden=permuted, handle=handle)  # type: ignore[arg-type]
        with pytest.raises(moecomm.BadInput, match="probs"):
            buffer.combine(rows, torch.ones(2, 3), handle)
        with pytest.raises(moecomm.TooManyRows):
            buffer.dispatch(x, topk_idx=ids, num_of_experts=2, num_dispatched_tokens=1)

    all_ranks(1, body)


def test_scales_travel() -> None:
    """Beside rows in FP8, and in bytes, as deep_ep's own are."""
    case = oracle.random_case(3, ranks=2, most=TOKENS, topk=1)
    maps, _ = mapped(case)
    fp8 = [oracle.cast_to_fp8(x, round_scale=False) for x in case.x]
    wants = oracle.expanded(case, 4)

    def body(group: Any) -> None:
        buffer = HybridEPBuffer(group, HIDDEN, TOKENS, case.local_experts, use_fp8=True)
        values, scales = fp8[buffer.rank]
        for dtype, room in ((dtype, room) for dtype in (values.dtype, torch.uint8) for room in (None, 3 * TOKENS, 999)):
            sent: dict[str, Any] = {"hidden": values.view(dtype), "scaling_factor": scales, "pad_multiple": 4}
            hidden, probs, factors, _, handle = buffer.dispatch_with_permute(
                routing_map=maps[buffer.rank], num_permuted_tokens=room, **sent
            )
            again, *_ = buffer.dispatch_with_permute(handle=handle, **sent)
            assert probs is None and hidden.dtype is again.dtype is dtype and factors is not None
            for row, origin in enumerate(wants[buffer.rank].rows):
                if origin is None:
                    assert (hidden[row].float() == 0).all() and (factors[row] == 0).all()
                    continue
                want = fp8[origin[0]][0][origin[1]].view(torch.uint8)
                assert torch.equal(hidden[row].view(torch.uint8), want)
                assert torch.equal(again[row].view(torch.uint8), want)
                assert torch.equal(factors[row], fp8[origin[0]][1][origin[1]])

    all_ranks(2, body)


@pytest.mark.parametrize("as_floats", [False, True])
@pytest.mark.parametrize("hidden", [256, 160])  # 160: scales that are no whole words
def test_mxfp8_rows_travel_with_a_scale_for_32_columns(hidden: int, as_floats: bool) -> None:
    """Linear on the way and after.  `as_floats`: four scales in a float32, as deep_ep's own signature has them."""
    if as_floats and hidden % 128:
        pytest.skip("no whole number of float32")
    case = oracle.random_case(3, ranks=2, hidden=hidden, most=TOKENS, topk=1)
    maps, _ = mapped(case)
    sent = [formats.quantize(x, "mxfp8") for x in case.x]
    wants = oracle.expanded(case, 32)

    def body(group: Any) -> None:
        buffer = HybridEPBuffer(group, hidden, TOKENS, case.local_experts, use_fp8=True)
        values, given = sent[buffer.rank]
        assert given is not None
        kinds = [torch.float32] if as_floats else [torch.float8_e8m0fnu, torch.uint8]
        for dtype, rows_as in [(dtype, rows) for dtype in kinds for rows in (torch.uint8, torch.float8_e4m3fn)]:
            scales = given.view(dtype)
            for room in (None, 256):
                x, _, sf, _, handle = buffer.dispatch_with_permute(
                    hidden=values.view(rows_as),
                    scaling_factor=scales,
                    routing_map=maps[buffer.rank],
                    pad_multiple=32,
                    num_permuted_tokens=room,
                )
                again, _, sf_again, *_ = buffer.dispatch_with_permute(
                    hidden=values.view(rows_as), scaling_factor=scales, handle=handle, pad_multiple=32
                )
                assert x.dtype is again.dtype is rows_as and sf.dtype is sf_again.dtype is dtype
                for found, factors in ((x, sf), (again, sf_again)):
                    for row, origin in enumerate(wants[buffer.rank].rows):
                        want = [torch.zeros(hidden, dtype=torch.uint8), torch.zeros(hidden // 32, dtype=torch.uint8)]
                        if origin is not None:
                            want = [part[origin[1]].view(torch.uint8) for part in sent[origin[0]]]
                        assert torch.equal(found[row].view(torch.uint8), want[0])
                        assert torch.equal(factors[row].view(torch.uint8), want[1])
                y = torch.zeros(len(x), hidden, dtype=torch.bfloat16)
                for row, origin in enumerate(wants[buffer.rank].rows):
                    if origin is not None:
                        y[row] = case.x[origin[0]][origin[1]]
                out, _ = buffer.combine_with_unpermute(hidden=y, handle=handle, pad_multiple=32)
                picks = maps[buffer.rank].sum(dim=1, keepdim=True)
                assert torch.equal(out, (case.x[buffer.rank].float() * picks).bfloat16())

    all_ranks(2, body)


def routed(rank: int, picks: list[int], num_experts: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows, and a map that gives token t picks[t] experts, other ones for each token."""
    map_ = torch.zeros(len(picks), num_experts, dtype=torch.bool)
    for token, count in enumerate(picks):
        map_[token, (torch.arange(count) * 3 + token + rank) % num_experts] = True
    assert map_.sum(dim=1).tolist() == picks
    x = torch.arange(len(picks) * 16).view(-1, 16) % 97 + 100.0 * rank + 1
    return x.bfloat16(), map_


def there_and_back(buffer: HybridEPBuffer, rank: int, all_picks: list[list[int]], **options: Any) -> None:
    """A dispatch and a combine, each checked row by row: what everybody sent is drawn anew."""
    num_experts = 8 if max(map(max, [p or [0] for p in all_picks])) <= 8 else 40
    sent = [routed(r, picks, num_experts) for r, picks in enumerate(all_picks)]
    x, map_ = sent[rank]
    probs = map_ * (x[:, :1].float() + torch.arange(num_experts))
    hidden, weights, _, counts, handle = buffer.dispatch_with_permute(
        hidden=x, routing_map=map_, probs=probs, num_of_experts_per_rank=num_experts // len(sent), **options
    )
    mine = range(rank * (num_experts // len(sent)), (rank + 1) * (num_experts // len(sent)))
    want = [(their_x[t], float(their_x[t, 0]) + e) for e in mine for their_x, m in sent for t in m[:, e].nonzero()]
    assert int(counts.sum()) == len(want)
    for row, (rows, prob) in enumerate(want):
        assert torch.equal(hidden[row], rows[0]) and weights is not None and weights[row] == prob
    assert len(hidden) == options.get("num_permuted_tokens", len(want))
    combined, returned = buffer.combine_with_unpermute(hidden=hidden, probs=weights, handle=handle)
    close = (combined.float() - x.float() * map_.sum(dim=1, keepdim=True)).abs() <= 2.0**-7 * combined.float().abs()
    assert close.all() and torch.equal(returned, probs)


# Picks of the tokens of two ranks, call by call: none at all at first; then more on one rank, the other, and both.
GROWING = [
    [[], []],
    [[1], [1, 0]],
    [[1, 1], [2, 3]],
    [[8] * 5, [1]],
    [[2] * 3, [2] * 300],
    [[4, 1], [8] * 700],
]


def test_a_token_may_have_more_experts_than_any_before() -> None:
    def body(group: Any) -> None:
        buffer = HybridEPBuffer(group, 16, 8, 4)
        for all_picks in GROWING:
            there_and_back(buffer, buffer.rank, all_picks)
        assert buffer.config.max_num_of_tokens_per_rank == 700

    all_ranks(2, body)


def test_without_a_wait_there_is_room_for_all_experts_from_the_first_call() -> None:
    def body(group: Any) -> None:
        buffer = HybridEPBuffer(group, 16, 8, 4)
        for all_picks in GROWING[:4]:
            with Computed() as seen:
                x, map_ = routed(buffer.rank, all_picks[buffer.rank], 8)
                buffer.dispatch_with_permute(hidden=x, routing_map=map_, num_permuted_tokens=50, non_blocking=True)
            assert "sort" in seen.names and "_local_scalar_dense" not in seen.names, "the host reads nothing"
            # Other rows on each rank, and both kinds of calls in turns.
            there_and_back(buffer, buffer.rank, all_picks, num_permuted_tokens=60 - buffer.rank, non_blocking=True)
            there_and_back(buffer, buffer.rank, all_picks)

    all_ranks(2, body)


def test_layers_without_a_wait_may_keep_their_rounds_until_the_backward_pass() -> None:
    """Thirty of them, in a window that is for far fewer rows than as many experts a token would make."""

    def body(group: Any) -> None:
        buffer = HybridEPBuffer(group, 256, 1000, 32)
        x, map_ = routed(buffer.rank, [2] * 1000, 64)
        x = x.repeat(1, 16)
        kept = []
        for layer in range(30):
            hidden, *_, handle = buffer.dispatch_with_permute(
                hidden=x + layer, routing_map=map_, num_permuted_tokens=2100, non_blocking=True
            )
            kept.append((hidden, handle))
        for layer, (hidden, handle) in reversed(list(enumerate(kept))):
            combined, _ = buffer.combine_with_unpermute(hidden=hidden, handle=handle)
            assert torch.equal(combined, (x + layer) * 2)
        opened = max(buffer._pool.opened.values(), key=lambda opened: opened.hidden)  # the other one is for counts
        assert opened.rounds.settings.window_bytes < opened.rounds.settings.round_bytes("expert")

    all_ranks(2, body)


def test_more_experts_for_a_token_than_there_can_be_are_named_on_all_ranks() -> None:
    def body(group: Any) -> None:
        first, later = HybridEPBuffer(group, 16, 8, 20), HybridEPBuffer(group, 16, 8, 20)
        there_and_back(later, later.rank, [[9], [1]])
        for buffer in (first, later):
            x, map_ = routed(buffer.rank, [[33], [1]][buffer.rank], 40)
            with pytest.raises(moecomm.BadInput, match="33 experts") as error:
                buffer.dispatch_with_permute(hidden=x, routing_map=map_)
            assert error.value.argument == "routing_map"
            there_and_back(buffer, buffer.rank, [[3], [32]])

    all_ranks(2, body)


@pytest.mark.parametrize("non_blocking", [False, True])
def test_ranks_may_expect_other_numbers_of_tokens(non_blocking: bool) -> None:
    """As Megatron does, which makes the buffer with the tokens of its own first call."""

    def body(group: Any) -> None:
        mine = [5, 200][group.rank]
        buffer = HybridEPBuffer(group, 16, mine, 4)
        options = {"num_permuted_tokens": 500, "non_blocking": True} if non_blocking else {}
        there_and_back(buffer, group.rank, [[2] * 5, [2] * 200], **options)
        there_and_back(buffer, group.rank, [[2] * 200, [2] * 5], **options)
        assert buffer.config.max_num_of_tokens_per_rank == 200

    all_ranks(2, body)


def test_bad_use_is_named() -> None:
    buffer = HybridEPBuffer(Alone(), 16, 8, 2)
    x, map_ = torch.zeros(3, 16, dtype=torch.bfloat16), torch.eye(2, dtype=torch.bool)[[0, 1, 0]]
    hidden, *_, handle = buffer.dispatch_with_permute(hidden=x, routing_map=map_)
    for call in (
        lambda: HybridEPBuffer(None, 16, 8, 2),
        lambda: buffer.dispatch_with_permute(hidden=x),
        lambda: buffer.dispatch_with_permute(hidden=x, routing_map=map_.int()),
        lambda: buffer.dispatch_with_permute(hidden=x, routing_map=map_, non_blocking=True),
        lambda: buffer.dispatch_with_permute(hidden=x, handle=handle, num_permuted_tokens=7),
        lambda: buffer.dispatch_with_permute(hidden=x, handle=(1,)),
        lambda: buffer.combine_with_unpermute(hidden=hidden),
        lambda: HybridEPBuffer(Alone(), 16, 8, 2).combine_with_unpermute(hidden=hidden, handle=handle),
    ):
        with pytest.raises(moecomm.BadInput):
            call()
    named = buffer.dispatch_with_permute
    ids = torch.zeros(3, 1, dtype=torch.int64)
    for argument, call in (
        ("hidden", lambda: named(hidden=None, routing_map=map_)),
        ("hidden", lambda: named(hidden=x[0], routing_map=map_)),
        ("hidden", lambda: buffer.combine_with_unpermute(hidden=None, handle=handle)),
        ("routing_map", lambda: named(hidden=x, routing_map=map_.tolist())),
        ("routing_map", lambda: named(hidden=x, routing_map=map_[:2])),
        ("routing_map", lambda: named(hidden=x, routing_map=map_.to("meta"))),
        ("routing_map", lambda: named(hidden=x.to("meta"), routing_map=map_.to("meta"))),
        ("probs", lambda: named(hidden=x, routing_map=map_, probs=torch.ones(3, 1))),
        ("probs", lambda: named(hidden=x, routing_map=map_, probs=torch.ones(3, 2, device="meta"))),
        ("probs", lambda: named(hidden=x, routing_map=map_, probs=[1.0])),
        ("topk_idx", lambda: named(hidden=x, topk_idx=ids[:, 0], num_of_experts=2)),
        ("topk_idx", lambda: named(hidden=x, topk_idx=ids.tolist(), num_of_experts=2)),
        ("num_of_experts_per_rank", lambda: named(hidden=x, routing_map=map_, num_of_experts_per_rank=7)),
        ("num_of_experts_per_rank", lambda: named(hidden=x, topk_idx=ids, num_of_experts=2, num_of_experts_per_rank=1)),
    ):
        with pytest.raises(moecomm.BadInput) as error:
            call()
        assert error.value.argument == argument
    again, *_ = buffer.dispatch_with_permute(hidden=x, routing_map=map_)
    assert torch.equal(again, hidden)


@pytest.mark.parametrize("pad", [None, 16])
def test_a_rank_with_more_tokens_than_at_first_takes_all_to_a_larger_buffer(pad: int | None) -> None:
    """Also where it pads: it asks the ranks that wait in a dispatch with their own alignment."""

    def body(group: Any) -> list[bool]:
        buffer = HybridEPBuffer(group=group, hidden_dim=8, max_num_of_tokens_per_rank=2, num_local_experts=2)
        same = []
        for tokens in (2, 2 + 400 * buffer.rank, 3):
            x = torch.arange(8.0 * tokens).view(tokens, 8) % 64
            ids = torch.arange(2 * tokens).view(tokens, 2) % 4
            rows, _, _, counts, handle = buffer.dispatch_with_permute(
                hidden=x, topk_idx=ids, num_of_experts=4, pad_multiple=pad
            )
            assert int(counts.sum()) == len(rows)
            combined, _ = buffer.combine_with_unpermute(hidden=rows, handle=handle, pad_multiple=pad)
            same.append(torch.equal(combined, 2 * x))
        return same

    assert all_ranks(2, body) == [[True] * 3] * 2


def test_a_configuration_makes_room_for_more_tokens() -> None:
    """Beside num_permuted_tokens nothing waits, and tokens are limited to those of the configuration."""
    x, ids = torch.ones(40, HIDDEN).bfloat16(), torch.arange(80).view(40, 2) % 4

    def body(group: Any) -> None:
        buffer = HybridEPBuffer(group, HIDDEN, 16, 2)
        buffer.empty_jit_cache()
        for tokens in (16, 40):
            config = buffer.update_template_config(HIDDEN, tokens, 2, pad_multiple=8, num_of_stages_dispatch_api=3)
            assert (
                config.max_num_of_tokens_per_rank == buffer.config.max_num_of_tokens_per_rank == -(-tokens // 16) * 16
            )
            assert (config.pad_multiple, config.num_of_stages_dispatch_api) == (8, 3)
            routing = {"topk_idx": ids[:tokens], "topk_weights": torch.ones(tokens, 2), "num_of_experts": 4}
            rows, *_, handle = buffer.dispatch_with_permute(
                hidden=x[:tokens], **routing, num_permuted_tokens=400, non_blocking=True
            )
            out, _ = buffer.combine_with_unpermute(hidden=rows, handle=handle)
            assert torch.equal(out, 2 * x[:tokens])
        with pytest.raises(moecomm.BadInput, match="num_of_tokens_per_rank"):
            buffer.update_template_config(num_of_tokens_per_rank=-1)

    all_ranks(2, body)
