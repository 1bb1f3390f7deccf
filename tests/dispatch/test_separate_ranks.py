"""Attention on some ranks and experts on others: ranks without experts, ranks without tokens, any ratio."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

import moecomm
from moecomm import Placement, nn
from moecomm.base.placement import unchecked
from moecomm.errors import TooManyRows
from moecomm.ranks.settings import Settings
from moecomm.testing import LocalBuffers, check_case, random_case
from moecomm.testing.cases import placed, without_tokens

from ..backends.conftest import run_ranks
from ..few import few
from ..ops.plain import formula

HIDDEN, INNER, EXPERTS = 16, 8, 8
SIZES: dict[str, Any] = {"hidden": HIDDEN, "num_experts": EXPERTS, "topk": 2, "max_tokens": 12, "timeout_s": 20}


def apart(attention: int, experts: int, **options: Any) -> Placement:
    """The placement whose last ranks hold the experts."""
    return Placement([[]] * attention + [list(range(rank, EXPERTS, experts)) for rank in range(experts)], **options)


def tokens(rank: int, attention: int, count: int = 12) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Tokens, ids and weights of a rank: none on ranks of experts."""
    g = torch.Generator().manual_seed(rank)
    ids = torch.rand(count, EXPERTS, generator=g).argsort(dim=1)[:, :2].contiguous()
    x, weights = torch.randn(count, HIDDEN, generator=g), torch.rand(count, 2, generator=g)
    here = count if rank < attention else 0
    return x[:here], ids[:here], weights[:here]


RATIOS = [(1, 1), (3, 1), (1, 3), (4, 4), (5, 3)]


@pytest.mark.parametrize("ratio", RATIOS)
@pytest.mark.parametrize("idle", few((False, True), True))
def test_rounds_match_the_reference(ratio: tuple[int, int], idle: bool) -> None:
    """All layouts, options and payloads, in halves, too; `idle`: ranks of experts have no tokens."""
    attention, experts = ratio
    ranks = attention + experts
    sizes: dict[str, Any] = {"hidden": 32, "num_experts": EXPERTS, "topk": 3, "max_tokens": 17, "dtype": torch.bfloat16}
    domains = {"domain_ranks": ranks // 2} if ranks == 8 else {}
    with LocalBuffers(**sizes, **domains, ranks=ranks, backend="host", placement=apart(*ratio)) as buffers:
        for seed in range(12):
            case = placed(random_case(seed, ranks=ranks, **sizes))
            check_case(buffers, without_tokens(case, range(attention, ranks)) if idle else case)


@pytest.mark.parametrize("layout", ["flat", "expert", "batched"])
def test_room_is_where_experts_are(layout: str) -> None:
    """Rows of even routing: those of all tokens on the ranks with experts, and one of each group on the others."""
    sizes = (10, 16, EXPERTS, 2, 4096, torch.bfloat16, "host", None)
    settings = Settings(*sizes, capacity_factor=1.0).placed(apart(8, 2))
    groups = 4 if layout == "batched" else 1
    assert [settings.capacity_rows(layout, rank=rank) for rank in range(8)] == [groups] * 8
    even = -(-10 * 4096 * 2 // (EXPERTS if layout == "batched" else 2)) * groups
    assert [settings.capacity_rows(layout, rank=rank) for rank in (8, 9)] == [even] * 2
    assert settings.heap_parts(settings.default_heap())[1] >= even * 32  # bytes of rows

    def body(group: Any) -> int:
        attention = group.rank < 8
        with moecomm.Buffer(group, **SIZES, backend="host", placement=apart(8, 2)) as buffer:
            x, ids, weights = tokens(group.rank, 8)
            routed = buffer.dispatch(x.bfloat16(), ids, weights, layout=layout, sync=False)
            assert (routed.x.numel() == groups * HIDDEN) == attention
            assert buffer.local_experts == ((-1, -1, -1, -1) if attention else tuple(range(group.rank - 8, EXPERTS, 2)))
            return int(routed.num_rows)

    found = run_ranks(10, body)
    assert found[:8] == [0] * 8 and all(rows > 0 for rows in found[8:])


def test_ranks_expect_the_tokens_of_others() -> None:
    """Blocks and schedules on ranks without tokens are those of full rounds; elsewhere those of the own tokens."""
    settings = Settings(5, 16, EXPERTS, 2, 96, torch.bfloat16, "host", None)
    assert settings.expected_tokens(0) == 0 and settings.expected_rows(48) == 48 * 2 * 5 // EXPERTS
    settings = settings.placed(apart(4, 1))
    assert settings.expected_tokens(0) == 96 and settings.expected_tokens(5) == 5
    assert settings.expected_rows(0) == 96 * 2 * 4 // EXPERTS


@pytest.mark.parametrize("ratio", RATIOS)
def test_layers(ratio: tuple[int, int]) -> None:
    """Layers and operators with gradients give the sums of one process; gradients of experts are where these are."""
    attention, experts = ratio
    whole = nn.Experts(range(EXPERTS), HIDDEN, INNER, seed=3, dtype=torch.float32)
    w13, w2 = whole.w13.detach(), whole.w2.detach()
    given = [tokens(rank, attention) for rank in range(attention)]
    leaf13, leaf = w13.double().requires_grad_(), [x.double().requires_grad_() for x, _, _ in given]
    want = [
        formula(x, ids, weights.double(), leaf13, w2.double()) for x, (_, ids, weights) in zip(leaf, given, strict=True)
    ]
    sum(out.square().sum() for out in want).backward()  # type: ignore[union-attr]
    assert leaf13.grad is not None

    def body(group: Any) -> None:
        x, ids, weights = tokens(group.rank, attention)
        sizes = {**SIZES, "dtype": torch.float32}
        with moecomm.Buffer(group, **sizes, backend="host", placement=apart(*ratio)) as buffer:
            held = torch.tensor(list(buffer.local_experts))
            here13, here2 = w13[held.clamp(min=0)].clone().requires_grad_(), w2[held.clamp(min=0)]
            with torch.no_grad():
                plain = buffer.moe(x, ids, weights, here13.detach(), here2)
            mine = x.clone().requires_grad_()
            out = moecomm.ops.moe(buffer, mine, ids, weights, here13, here2)
            out.square().sum().backward()
            assert torch.equal(plain, out.detach())
            assert mine.grad is not None and here13.grad is not None
            if group.rank < attention:
                torch.testing.assert_close(out.detach().double(), want[group.rank].detach(), rtol=1e-4, atol=1e-4)
                torch.testing.assert_close(mine.grad.double(), leaf[group.rank].grad, rtol=1e-3, atol=1e-3)
                assert not here13.grad.any()
            else:
                found, due = here13.grad.double()[held >= 0], leaf13.grad[held[held >= 0]]
                torch.testing.assert_close(found, due, rtol=1e-3, atol=1e-3)

    assert run_ranks(attention + experts, body) == [None] * (attention + experts)


def test_two_micro_batches() -> None:
    """One is on its way to the experts while rows of the other return."""

    def body(group: Any) -> None:
        attends = group.rank < 3
        with moecomm.Buffer(group, **SIZES, backend="host", placement=apart(3, 2)) as buffer:

            def begun(step: int) -> tuple[Any, torch.Tensor]:
                x, ids, weights = tokens(group.rank + 10 * step, 3 + 10 * step if attends else 0)
                return buffer.dispatch_begin(x.bfloat16(), ids, weights), x.bfloat16() * weights.sum(1, keepdim=True)

            routed, want = begun(0)
            for step in range(1, 8):
                buffer.dispatch_end(routed)
                (before, due), (routed, want) = (routed, want), begun(step)
                out = buffer.combine(before.x, before.handle)
                torch.testing.assert_close(out.float(), due.float(), rtol=2**-6, atol=2**-6)
                assert len(out) == (12 if attends else 0)
            buffer.dispatch_end(routed)

    assert run_ranks(5, body) == [None] * 5


@pytest.mark.parametrize("masked", [0, 3])
def test_masked_ranks(masked: int) -> None:
    """An attention rank goes with its tokens; an expert rank leaves its experts to their replicas."""
    held = [[], [], [], [0, 1, 2, 3], [4, 5, 6, 7], [0, 1, 2, 3]]

    def body(group: Any) -> list[int]:
        x, ids, weights = tokens(group.rank, 3)
        with moecomm.Buffer(group, **SIZES, backend="host", placement=Placement(held, choice="token")) as buffer:
            if group.rank == masked:
                return []
            buffer.mask([masked])
            routed = buffer.dispatch(x.bfloat16(), ids, weights)
            out = buffer.combine(routed.x, routed.handle)
            want = x.bfloat16() * weights.sum(1, keepdim=True)
            torch.testing.assert_close(out.float(), want.float(), rtol=2**-6, atol=2**-6)
            return routed.tokens_per_expert.tolist()

    found = run_ranks(6, body)
    assert sum(map(sum, found)) == (2 if masked == 0 else 3) * 12 * 2


def test_rows_without_room_are_dropped() -> None:
    def body(group: Any) -> tuple[int, int]:
        x, ids, weights = tokens(group.rank, 3)
        with moecomm.Buffer(group, **SIZES, backend="host", capacity_factor=0.5, placement=apart(3, 2)) as buffer:
            routed = buffer.dispatch(x.bfloat16(), ids, weights, overflow="drop")
            assert routed.dropped is not None
            return int(routed.dropped), int(routed.tokens_per_expert.sum())

    found = run_ranks(5, body)
    assert 0 < sum(dropped for dropped, _ in found) < 3 * 12 * 2
    assert sum(map(sum, found)) == 3 * 12 * 2


def test_a_rank_gets_its_first_experts() -> None:
    """It makes room for them from then on, and keeps the room when they leave; a handle of before stays valid."""

    def body(group: Any) -> list[int]:
        x, ids, weights = tokens(group.rank, 3)
        x = x.bfloat16()
        found = []
        with moecomm.Buffer(group, **SIZES, backend="host", placement=apart(3, 2)) as buffer:
            before = buffer.dispatch(x, ids, weights, sync=False)
            for held in ([[0], [], [], [2, 4, 6], [1, 3, 5, 7]], [[], [], [], [0, 2, 4, 6], [1, 3, 5, 7]]):
                buffer.set_placement(Placement(held))
                routed = buffer.dispatch(x, ids, weights, sync=False)
                found.append(len(routed.x))
                out = buffer.combine(routed.x, routed.handle)
                torch.testing.assert_close(out, buffer.combine(before.x, before.handle), rtol=2**-6, atol=2**-6)
        return found

    found = run_ranks(5, body)
    assert found[0] == [5 * 12 * 2] * 2 and found[1] == [1, 1]


def test_no_room_is_said() -> None:
    """A caller that names too few rows for the experts of its rank hears of it, on all ranks."""

    def body(group: Any) -> None:
        x, ids, weights = tokens(group.rank, 2)
        with moecomm.Buffer(group, **SIZES, backend="host", placement=apart(2, 1)) as buffer:
            with pytest.raises(TooManyRows):
                buffer.dispatch(x.bfloat16(), ids, weights, max_rows=0)
            buffer.dispatch(x.bfloat16(), ids, weights, max_rows=0 if group.rank < 2 else 2 * 12 * 2)

    assert run_ranks(3, body) == [None] * 3


def test_settings_of_ranks_whose_experts_are_all_lost() -> None:
    """Sizes stay valid, as after shrink() without the last rank that held an expert."""
    lost = apart(2, 1)
    placement = unchecked(lost, [[-1] * lost.slots] * 3, lost.choice)
    settings = replace(Settings(3, 16, EXPERTS, 2, 8, torch.bfloat16, "host", None), placement=placement)
    assert settings.capacity_rows("expert") == 1 and settings.default_heap() > 0
    assert settings.expected_rows(8) == 8 * 2 * 3
