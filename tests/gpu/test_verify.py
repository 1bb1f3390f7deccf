"""Verified rounds of GPU ranks: corrupt rows are named, others are not, also in a graph that is captured."""

from __future__ import annotations

import random
from typing import Any
from unittest import mock

import pytest
import torch

import moecomm
from moecomm import _native
from moecomm.combine import verify as combine_verify
from moecomm.dispatch import outputs, row_hash, verify
from moecomm.dispatch.row_hash import hash_rows
from moecomm.testing import LocalBuffers, check_case, random_case

from .. import flips

pytestmark = [pytest.mark.gpu1, pytest.mark.timeout(300)]
SIZES: dict[str, Any] = {"hidden": 144, "num_experts": 14, "topk": 6, "max_tokens": 50, "dtype": torch.bfloat16}
HOW: dict[str, Any] = {"backend": "lsa", "device": 0, "timeout_s": 20, "verify_every": 1}
CASES, FLIPS, TOKENS = 60, 50, 2000
DOMAIN_RANKS = 2, 4


@pytest.mark.parametrize("domain_ranks", DOMAIN_RANKS)
def test_verified_rounds_match_the_reference(domain_ranks: int) -> None:
    with LocalBuffers(4, **SIZES, domain_ranks=domain_ranks, **HOW) as ranks:
        for seed in range(CASES):
            check_case(ranks, random_case(seed, ranks=4, **SIZES, few_kernels=True))
        ranks.check()


def test_hashes_depend_on_no_other_stream() -> None:
    """Not on the first one of such rows, nor on a graph that has been captured and not replayed."""
    for columns, captured in ((774, False), (776, True)):
        rows = torch.randn(5, columns, device="cuda")
        want = row_hash._by_words([row_hash._words(rows.cpu())])  # CPU ranks have another hash
        torch.cuda.synchronize()
        first, second = torch.cuda.Stream(), torch.cuda.Stream()  # type: ignore[no-untyped-call]
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=first) if captured else torch.cuda.stream(first):
            torch.cuda._sleep(1 << 28)  # type: ignore[no-untyped-call]
            kept = hash_rows(rows, None)
        with torch.cuda.stream(second):
            assert torch.equal(hash_rows(rows, None).cpu(), want)
        if captured:
            graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(kept.cpu(), want)


@pytest.mark.parametrize("domain_ranks", DOMAIN_RANKS)
@pytest.mark.parametrize("quantize", [None, "fp8"])
def test_flipped_bits_are_found_and_named(quantize: str | None, domain_ranks: int) -> None:
    draw = random.Random(1)
    with LocalBuffers(4, **SIZES, domain_ranks=domain_ranks, **HOW) as ranks:
        for number in range(FLIPS):
            how = {"layout": ("flat", "expert", "batched")[number % 3], "quantize": quantize, "sync": False}
            calls = [
                {
                    "x": torch.randn(30, 144, device="cuda").bfloat16(),
                    "topk_idx": torch.rand(30, 14, device="cuda").argsort(dim=1)[:, :6],
                    **how,
                }
                for _ in ranks.buffers
            ]
            made: list[flips.Row] = []
            with flips.flipping(draw.randrange(4), draw, made):
                ranks.dispatch(calls)
            for buffer in ranks.buffers:
                with pytest.raises(moecomm.CorruptRow) as caught:
                    buffer.check()
                found = caught.value
                row = flips.Row(found.op, found.source, found.destination, found.token_rank, found.token)
                assert [row] == made
            ranks.dispatch(calls)
            ranks.check()


@pytest.mark.parametrize(("layout", "wire"), [("flat", None), ("expert", "exact"), ("expert", None), ("batched", None)])
@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("domain_ranks", DOMAIN_RANKS)
def test_rows_that_are_not_added_as_they_were_sent_are_named(
    layout: Any, wire: Any, in_place: bool, domain_ranks: int
) -> None:
    """A hash changes after the kernel: of a row that one rank has stored for another.  Few rows need no forwarder."""
    draw, send = random.Random(2), combine_verify.DeviceCheck._send
    # The flips are of whole rows, because torch loads another kernel for other addresses, and loading one may wait for
    # ranks that wait for each other.
    for dtype in (torch.int16, torch.int64):
        torch.zeros(144, dtype=dtype, device="cuda").bitwise_xor_(torch.zeros(144, dtype=dtype, device="cuda"))
    with LocalBuffers(4, **SIZES, domain_ranks=domain_ranks, **HOW) as ranks:
        calls = [
            {
                "x": torch.randn(30, 144, device="cuda").bfloat16(),
                "topk_idx": torch.rand(30, 14, device="cuda").argsort(dim=1)[:, :6],
                "layout": layout,
                "sync": False,
            }
            for _ in ranks.buffers
        ]
        for number in range(FLIPS):
            routed, sender = ranks.dispatch(calls), number % 4
            src, in_use = verify.table_of_rows(routed[sender].handle)
            row = draw.choice((in_use & (src[:, 0] != sender)).nonzero().flatten().tolist())
            rank, token = src[row].tolist()
            made = [flips.Row("combine", sender, rank, rank, token)]
            hashes = torch.zeros(SIZES["max_tokens"], dtype=torch.int64, device="cuda")
            hashes[token] = 1 << draw.randrange(63)
            words = torch.zeros(144, dtype=torch.int16, device="cuda")
            words[draw.randrange(144)] = 1 << draw.randrange(15)

            def change_and_send(
                check: combine_verify.DeviceCheck, at: Any = (sender, row, rank, hashes, words)
            ) -> None:
                sender, row, rank, hashes, words = at
                if check._rounds.rank == sender and check._y is None:
                    check._staged[rank].bitwise_xor_(hashes)
                elif check._rounds.rank == sender:
                    check._y.view(torch.int16)[row].bitwise_xor_(words)
                send(check)

            ys = []
            for buffer, here in zip(ranks.buffers, routed, strict=True):
                y = buffer.empty(here.handle, torch.bfloat16) if in_place else torch.empty_like(here.x)
                ys.append({"y": y.copy_(here.x), "handle": here.handle, "wire": wire})
            with mock.patch.object(combine_verify.DeviceCheck, "_send", change_and_send):
                ranks.combine(ys)
            for buffer in ranks.buffers:
                with pytest.raises(moecomm.CorruptRow) as caught:
                    buffer.check()
                found = caught.value
                assert [flips.Row(found.op, found.source, found.destination, found.token_rank, found.token)] == made
            ranks.combine(ys)
            ranks.check()


def test_sums_of_a_domain_that_are_not_added_as_they_were_sent_are_named() -> None:
    """A hash changes after the kernel: of a sum that a forwarder has put."""
    compare, draw = combine_verify.DeviceCheck._compare, random.Random(3)
    with LocalBuffers(4, **SIZES | {"max_tokens": TOKENS}, domain_ranks=2, **HOW) as ranks:
        calls = [
            {
                "x": torch.randn(TOKENS, 144, device="cuda").bfloat16(),
                "topk_idx": torch.rand(TOKENS, 14, device="cuda").argsort(dim=1)[:, :6],
                "layout": "expert",
                "sync": False,
            }
            for _ in ranks.buffers
        ]
        assert not _native.goes_direct(ranks.buffers[0].rounds.session.context.shape, TOKENS)
        for rank in range(4):
            routed, token, domain = ranks.dispatch(calls), draw.randrange(TOKENS), 1 - rank // 2
            flip = torch.zeros(TOKENS, 8, dtype=torch.int64, device="cuda")
            flip[token, 4 + domain] = 1 << draw.randrange(63)

            def change_and_compare(check: combine_verify.DeviceCheck, at: Any = (rank, flip)) -> None:
                if check._rounds.rank == at[0]:
                    check._added.bitwise_xor_(at[1])
                compare(check)

            ys = [{"y": torch.empty_like(here.x).copy_(here.x), "handle": here.handle} for here in routed]
            with mock.patch.object(combine_verify.DeviceCheck, "_compare", change_and_compare):
                ranks.combine(ys)
            for buffer in ranks.buffers:
                with pytest.raises(moecomm.CorruptRow) as caught:
                    buffer.check()
                found, forwarder = caught.value, 2 * domain + rank % 2
                named = (found.source, found.destination, found.token_rank, found.token)
                assert named == (forwarder, rank, rank, token)
            ranks.combine(ys)
            ranks.check()


def test_replays_are_verified() -> None:
    """A captured operation flips the bit, where a tensor says so."""
    flip = torch.zeros((), dtype=torch.int16, device="cuda")
    compare = verify.DispatchCheck._compare

    def flip_and_compare(check: verify.DispatchCheck) -> None:
        rows = outputs.x(check._routed).view(torch.int16)
        rows[3, 17] ^= flip
        compare(check)

    sizes = {**SIZES, "num_experts": 8, "topk": 2}
    with moecomm.Buffer("self", **sizes, **HOW) as buffer:
        x = torch.randn(30, 144, device="cuda").bfloat16()
        ids = torch.rand(30, 8, device="cuda").argsort(dim=1)[:, :2]
        with mock.patch.object(verify.DispatchCheck, "_compare", flip_and_compare):
            buffer.dispatch(x, ids, layout="flat")
            buffer.check()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                routed = buffer.dispatch(x, ids, layout="flat")
        for value in (0, 1, 0, 64):
            flip.fill_(value)
            graph.replay()
            if value == 0:
                buffer.check()
                continue
            with pytest.raises(moecomm.CorruptRow, match=r"dispatch, round .*: the row of token 3 of rank 0"):
                buffer.check()
        assert routed.x is not None
