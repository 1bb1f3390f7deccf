"""Handles are bytes, which may be any: they become a named error on every rank, and never an address."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import moecomm
from moecomm import ops
from moecomm.base.arrays import window_tensor
from moecomm.base.protocol import LAYOUTS
from moecomm.ops.handles import Routes
from tests.ops.ranks import case

from ..backends.conftest import all_ranks

RANKS, OTHER = 3, 1  # who has a handle that is none


def flipped(memory: torch.Tensor, at: int, bit: int = 0) -> torch.Tensor:
    changed = memory.clone()
    changed[at] ^= 1 << bit
    return changed


def changes(memory: torch.Tensor, route: Any, layout: str, seed: int) -> Iterator[tuple[str, torch.Tensor]]:
    """Tables that no dispatch has left so.  `route`: where they lie, of the dispatch that wrote `memory`."""
    g = torch.Generator().manual_seed(seed)
    yield "zeros", torch.zeros_like(memory)
    yield "ones", torch.full_like(memory, 255)
    yield "random", torch.randint(0, 256, memory.shape, dtype=torch.uint8, generator=g)
    yield "half", torch.cat([memory[: len(memory) // 2], torch.zeros_like(memory[len(memory) // 2 :])])
    yield "moved", memory.roll(4)
    tables = [
        "token_rows",
        "token_owner",
        "token_slot",
        "sent",
        "ranges",
        "src",
        *(["rows"] if layout != "flat" else []),
    ]
    for table in tables:
        at = getattr(route, table) - memory.data_ptr()
        for bit in (0, 30):
            yield f"{table}, bit {bit}", flipped(memory, at + bit // 8, bit % 8)
    for word in range(2):
        changed = memory.clone()
        at = route.sent - memory.data_ptr() + 4 * word
        changed[at : at + 4] = 0
        yield f"word {word} of sent", changed


CALLS: dict[str, Callable[[Any, ops.Handle, torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "combine": lambda buffer, handle, rows, x: ops.combine(rows, handle),
    "combine in the window": lambda buffer, handle, rows, x: ops.combine(_in_window(buffer, rows), handle),
    "dispatch_again": lambda buffer, handle, rows, x: ops.dispatch_again(x, handle),
}


def _in_window(buffer: moecomm.Buffer, rows: torch.Tensor) -> torch.Tensor:
    block = buffer.rounds.memory.rows(rows.nbytes)
    address = buffer.rounds.session.context.peers[buffer.rank] + block.offset
    here = window_tensor(block, address, tuple(rows.shape), rows.dtype, rows.device, buffer.rounds.session.owner)
    return here.copy_(rows)


@pytest.mark.parametrize("domain_ranks", [None, 1])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_rank_hears_of_it_and_goes_on(layout: str, domain_ranks: int | None) -> None:
    c = case(RANKS, seed=1, exact=True)

    def body(group: Any) -> list[str]:
        rank, heard = group.rank, []
        with c.buffer(group, domain_ranks=domain_ranks, timeout_s=60) as buffer:
            routed = ops.dispatch(buffer, c.x[rank], c.topk_idx[rank], c.topk_weights[rank], layout=layout)
            handle, x = routed.handle, c.x[rank]
            route = next(iter(buffer.rounds.part(Routes).by_kind.values())).args.route
            assert 0 <= route.sent - handle.memory.data_ptr() < len(handle.memory)
            want = {name: call(buffer, handle, routed.x, x) for name, call in CALLS.items()}
            for what, memory in changes(handle.memory, route, layout, seed=3):
                for name, call in CALLS.items():
                    given = handle._replace(memory=memory) if rank == OTHER else handle
                    with pytest.raises(moecomm.BadInput) as caught:
                        call(buffer, given, routed.x, x)
                    heard.append(f"{what}, {name}: {caught.value}")
                    assert (caught.value.argument, caught.value.rank) == ("handle", OTHER), heard[-1]
                assert torch.equal(CALLS["combine"](buffer, handle, routed.x, x), want["combine"]), what
            for name, call in CALLS.items():
                assert torch.equal(call(buffer, handle, routed.x, x), want[name])
        return heard

    first, *others = all_ranks(RANKS, body)
    assert first and all(heard == first for heard in others)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_any_bit_matters_or_is_not_read(layout: str) -> None:
    c = case(1, seed=1, exact=True)
    g = torch.Generator().manual_seed(5)
    with c.buffer(None) as buffer:
        routed = ops.dispatch(buffer, c.x[0], c.topk_idx[0], c.topk_weights[0], layout=layout)
        want, refused = ops.combine(routed.x, routed.handle), 0
        for at, bit in torch.stack(
            [torch.randint(0, n, (400,), generator=g) for n in (routed.handle.memory.numel(), 8)], 1
        ):
            changed = routed.handle._replace(memory=flipped(routed.handle.memory, int(at), int(bit)))
            try:
                out = ops.combine(routed.x, changed)
            except moecomm.BadInput:
                refused += 1
                continue
            assert torch.equal(out, want)
        assert 20 < refused < 380


def test_a_backward_pass_with_a_changed_handle() -> None:
    c = case(RANKS, seed=1)

    def body(group: Any) -> str:
        rank = group.rank
        with c.buffer(group, timeout_s=60) as buffer:
            x = c.x[rank].clone().requires_grad_()

            def pack(t: torch.Tensor) -> torch.Tensor:
                return t.zero_() if rank == OTHER and t.dtype is torch.uint8 else t

            with torch.autograd.graph.saved_tensors_hooks(lambda t: t.clone(), pack):
                routed = ops.dispatch(buffer, x, c.topk_idx[rank], c.topk_weights[rank])
            with pytest.raises(moecomm.BadInput, match="handle") as caught:
                routed.x.sum().backward()
            return str(caught.value)

    assert len(set(all_ranks(RANKS, body))) == 1


def test_memory_that_is_not_there_any_more() -> None:
    c = case(1, seed=1)
    with c.buffer(None) as buffer:
        routed = ops.dispatch(buffer, c.x[0], c.topk_idx[0], c.topk_weights[0])
        want = ops.combine(routed.x, routed.handle)
        size = routed.handle.memory.numel()
        for left in (0, size - 1):
            memory = routed.handle.memory.clone()
            memory.untyped_storage().resize_(left)
            with pytest.raises(moecomm.BadInput, match="handle: got a storage"):
                ops.combine(routed.x, routed.handle._replace(memory=memory))
        apart = torch.zeros(size + 16, dtype=torch.uint8)[4 : size + 4].copy_(routed.handle.memory)
        with pytest.raises(moecomm.BadInput, match="handle: got a copy at"):
            ops.combine(routed.x, routed.handle._replace(memory=apart))
        assert torch.equal(ops.combine(routed.x, routed.handle), want)


def test_tables_of_other_sizes_or_of_another_buffer() -> None:
    c = case(1, seed=1)
    with c.buffer(None) as buffer, c.buffer(None) as other:
        call = {"x": c.x[0], "topk_idx": c.topk_idx[0], "topk_weights": c.topk_weights[0]}
        routed = ops.dispatch(buffer, **call)
        want = ops.combine(routed.x, routed.handle)
        fewer = ops.dispatch(buffer, **{name: tensor[:2] for name, tensor in call.items()})
        there = ops.dispatch(other, **call)
        for memory in (fewer.handle.memory, there.handle.memory):
            assert memory.shape == routed.handle.memory.shape
            with pytest.raises(moecomm.BadInput, match="handle"):
                ops.combine(routed.x, routed.handle._replace(memory=memory))
        assert torch.equal(ops.combine(routed.x, routed.handle), want)


def test_a_written_output_that_is_a_table() -> None:
    """`src` of a Buffer's dispatch lies in its handle."""
    c = case(1, seed=1)
    with c.buffer(None) as buffer:
        routed = buffer.dispatch(c.x[0], c.topk_idx[0], c.topk_weights[0], layout="expert")
        y, kept = routed.x.clone(), routed.src.clone()
        want = buffer.combine(y, routed.handle)
        routed.src[0, 1] = 1 << 30
        with pytest.raises(moecomm.BadInput, match="handle"):
            buffer.combine(y, routed.handle)
        routed.src.copy_(kept)
        assert torch.equal(buffer.combine(y, routed.handle), want)
