"""A dispatch of row descriptors (csrc/dispatch/descriptors.cuh) on CPUs: one an entry, among the rows of its expert."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import moecomm
from moecomm.base.experts import experts_of, owners_of
from moecomm.dispatch import PublishedOffsets
from moecomm.dispatch.plan import DESCRIPTOR_BYTES
from moecomm.dispatch.routed import Routed
from moecomm.testing import LocalBuffers
from moecomm.testing import ranks as local
from moecomm.testing.prepare import prepare_dispatch

from ..fused.test_pipeline import at
from .machine import Call, Machine

RANKS, HIDDEN, EXPERTS, TOPK, MANY, FEW = 3, 64, 13, 3, 1500, 900  # tokens of a Buffer; of few ids are told
SOURCE, SAME, UNIT = 48, 36, 16  # of RowDescriptor (csrc/protocol/row_descriptor.h)


@pytest.fixture(params=[FEW, MANY], ids=["few", "many"])
def most(request: pytest.FixtureRequest) -> int:
    """Tokens."""
    return int(request.param)


@pytest.fixture
def ranks(most: int, machine: Machine, monkeypatch: pytest.MonkeyPatch) -> Iterator[LocalBuffers]:
    monkeypatch.setattr(local, "_native", SimpleNamespace(host_run_all=machine.run_all))
    sizes = {"hidden": HIDDEN, "num_experts": EXPERTS, "topk": TOPK, "max_tokens": most}
    with LocalBuffers(RANKS, **sizes, backend="host", timeout_s=20) as buffers:
        yield buffers
        machine.forget()


def told(rank: int) -> PublishedOffsets:
    """Return made-up offsets of a rank: nothing lies there, nothing looks there."""
    return PublishedOffsets(rows=1024 * (rank + 1), pitch=16 * (9 + rank), result_rows=(1 << 40) + (rank << 32))


def routing(tokens: int, rank: int, dtype: torch.dtype) -> torch.Tensor:
    g = torch.Generator().manual_seed(100 * tokens + rank)
    ids = torch.rand(tokens, EXPERTS, generator=g).argsort(dim=1)[:, :TOPK]
    ids[torch.rand(tokens, TOPK, generator=g) < 0.2] = -1
    return ids.to(dtype)


def calls_of(ids: list[torch.Tensor]) -> list[dict[str, Any]]:
    x = [torch.empty(len(of), HIDDEN, dtype=torch.bfloat16) for of in ids]
    fixed = {"layout": "expert", "sync": False}
    return [{"x": x[r], "topk_idx": ids[r], "descriptors": told(r), **fixed} for r in range(RANKS)]


def dispatch(ranks: LocalBuffers, ids: list[torch.Tensor]) -> list[Routed]:
    return ranks.dispatch(calls_of(ids))


def check(ranks: LocalBuffers, ids: list[torch.Tensor], arrived: list[Routed]) -> None:
    ids_are_published = ranks.buffers[0].max_tokens == FEW
    for rank, (buffer, routed) in enumerate(zip(ranks.buffers, arrived, strict=True)):
        args, end = routed.handle.args, 0
        window = buffer.rounds.session.context.peers[rank]
        rows = at(window + args.out_x, (args.max_rows, DESCRIPTOR_BYTES // 8), torch.int64)
        first: dict[tuple[int, int], int] = {}  # row of a token, by its source rank
        for nth, expert in enumerate(experts_of(rank, EXPERTS, RANKS)):
            wanted = set()
            for source, (of, descriptors) in enumerate((of, told(source)) for source, of in enumerate(ids)):
                for token, k in (of == expert).nonzero().tolist():
                    result_rows = descriptors.result_rows + (token * TOPK + k) * 2 * HIDDEN
                    wanted.add((descriptors.rows + token * descriptors.pitch, source << SOURCE | result_rows))
            begin, end = end, end + int(routed.tokens_per_expert[nth])
            assert end - begin == len(wanted)
            found = [(word % (1 << SAME) * UNIT, where, (word >> SAME) - 1) for word, where in rows[begin:end].tolist()]
            assert {row[:2] for row in found} == wanted, (rank, expert)
            for row, (offset, where, same) in enumerate(found, begin):
                earlier = first.setdefault((where >> SOURCE, offset), row)
                assert same == (earlier if earlier < row and not ids_are_published else -1), (rank, expert)
        assert int(at(args.num_rows, (1,), torch.int32)) == end
        owners = at(args.route.token_owner, (len(ids[rank]), TOPK), torch.int32)
        assert torch.equal(owners, owners_of(ids[rank], EXPERTS, RANKS).int())


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
@pytest.mark.parametrize("all_of_them", [False, True])
def test_a_row_descriptor_for_every_entry(
    all_of_them: bool, dtype: torch.dtype, most: int, ranks: LocalBuffers
) -> None:
    """Each block counts all of few tokens, and its own of many."""
    tokens = (most, 1, most - 100) if all_of_them else (20, 0, 7)
    for _ in range(2):
        ids = [routing(count, rank, dtype) for rank, count in enumerate(tokens)]
        arrived = dispatch(ranks, ids)
        ranks.check()
        check(ranks, ids, arrived)


@pytest.mark.parametrize("all_of_them", [False, True])
def test_a_bad_id_is_told_and_the_next_round_is_right(all_of_them: bool, most: int, ranks: LocalBuffers) -> None:
    tokens = most if all_of_them else 20
    ids: list[Any] = [routing(tokens, rank, torch.int64) for rank in range(RANKS)]
    bad = [of.clone() for of in ids]
    bad[1][tokens // 2, 1] = EXPERTS
    arrived = [prepare_dispatch(b, **call) for b, call in zip(ranks.buffers, calls_of(bad), strict=True)]
    local._native.host_run_all([routed.args for routed in arrived])  # without its end, which raises
    for buffer, routed in zip(ranks.buffers, arrived, strict=True):
        with pytest.raises(moecomm.BadInput, match="topk_idx"):
            buffer.check()
        assert not routed.tokens_per_expert.any()
        assert not at(routed.handle.args.num_rows, (1,), torch.int32).any()
    check(ranks, ids, dispatch(ranks, ids))


@pytest.mark.parametrize("max_rows", [0, 1, 20])
def test_the_row_that_kernels_clamp_to_lies_in_the_block(ranks: LocalBuffers, max_rows: int) -> None:
    """Ids that change between counts and row descriptors have no row of their own: row_inside() takes max_rows - 1."""
    ids = [routing(20, rank, torch.int64) for rank in range(RANKS)]
    for buffer, call in zip(ranks.buffers, calls_of(ids), strict=True):
        here = prepare_dispatch(buffer, **call, max_rows=max_rows)
        assert here.args.out_x + (max_rows - 1) * here.args.row_bytes >= here.payload.offset


def test_row_descriptors_are_there_when_their_dispatch_ends(machine: Machine, ranks: LocalBuffers) -> None:
    """A rank whose dispatch has ended sends the place of its row descriptors to itself, in rows of 8 descriptors."""
    tokens = 24
    for turn in range(20):
        ids = [routing(5 + 7 * ((rank + turn) % RANKS), rank, torch.int64) for rank in range(RANKS)]
        to_itself = [torch.full((tokens, TOPK), -1) for _ in range(RANKS)]
        first, then = [], []
        for rank, buffer in enumerate(ranks.buffers):
            x = torch.empty(len(ids[rank]), HIDDEN, dtype=torch.bfloat16)
            first.append(prepare_dispatch(buffer, x, ids[rank], sync=False, descriptors=told(rank)))
            there = at(
                buffer.rounds.session.context.peers[rank] + first[-1].args.out_x, (tokens, HIDDEN), torch.bfloat16
            )
            there.fill_(turn)
            to_itself[rank][:, 0] = experts_of(rank, EXPERTS, RANKS).start
            then.append(prepare_dispatch(buffer, there, to_itself[rank], layout="flat", sync=False))
        machine.run([Call(routed.args, machine.sizes) for routed in (*first, *then)], RANKS)
        ranks.check()
        for rank, buffer in enumerate(ranks.buffers):
            window = buffer.rounds.session.context.peers[rank]
            there, sent = (
                at(window + routed.args.out_x, (tokens, HIDDEN), torch.int16) for routed in (first[rank], then[rank])
            )
            assert torch.equal(sent, there), (turn, rank)
