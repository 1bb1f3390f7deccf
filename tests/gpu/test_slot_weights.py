"""Weights of slots between GPUs: copies of the owners', gradients in the order of slots, errors, layers that train."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import moecomm
from moecomm import ops
from moecomm.base.experts import experts_of
from moecomm.nn import ExpertParallel
from moecomm.testing.cases import random_placement

from ..conftest import Ranks, gpu_count

pytestmark = pytest.mark.gpu2
HIDDEN, INNER, EXPERTS, SLOTS, TOKENS, TOPK = 512, 256, 16, 12, 64, 4
SIZES: dict[str, Any] = {"hidden": HIDDEN, "num_experts": EXPERTS, "topk": TOPK, "max_tokens": TOKENS}


def _exchanges(rank: int, group: Any) -> None:
    """On changing streams, under changing placements: each exchange waits for the last one."""
    number = group.size()
    drawn = {"ranks": number, "num_experts": EXPERTS, "slots": SLOTS}
    mine, here = (experts_of(rank, total, number) for total in (EXPERTS, number * SLOTS))
    g = torch.Generator().manual_seed(0)
    with moecomm.Buffer(group, **SIZES, timeout_s=20, placement=random_placement(0, **drawn)) as buffer:
        for seed in range(6):
            placement = random_placement(seed, **drawn)
            buffer.set_placement(placement)
            whole = torch.randn(EXPERTS, INNER, HIDDEN, generator=g).bfloat16().cuda()
            grads = torch.randn(number * SLOTS, INNER, HIDDEN, generator=g).bfloat16().cuda()
            torch.cuda.synchronize()
            with torch.cuda.stream(torch.cuda.Stream()):
                owned = whole[mine.start : mine.stop].clone().requires_grad_()
                (copies,) = ops.slot_weights(buffer, [owned])
                copies.backward(grads[here.start : here.stop])
            torch.cuda.synchronize()
            for slot, expert in enumerate(buffer.local_experts):
                assert torch.equal(copies[slot], whole[expert] if expert >= 0 else torch.zeros_like(whole[0]))
            assert owned.grad is not None
            for expert in mine:
                first, *others = placement.slots_by_expert[expert]
                total = grads[first].float()
                for slot in others:
                    total = total + grads[slot]
                assert torch.equal(owned.grad[expert - mine.start], total.bfloat16()), f"expert {expert}"
        buffer.check()


def _refuses(rank: int, group: Any) -> None:
    """Weights that rank 1 refuses, or has of another shape, raise on it at once and on the others in check()."""
    number = group.size()
    placement = random_placement(0, ranks=number, num_experts=EXPERTS, slots=SLOTS)
    mine = experts_of(rank, EXPERTS, number)
    whole = torch.arange(EXPERTS * HIDDEN).view(EXPERTS, HIDDEN).float().cuda()
    owned, other = whole[mine.start : mine.stop], {1: whole, 2: whole[mine.start : mine.stop, :8].contiguous()}
    with moecomm.Buffer(group, **SIZES, timeout_s=20, placement=placement) as buffer:
        ops.slot_weights(buffer, [owned])
        for nth, error in ((1, moecomm.BadInput), (2, moecomm.Mismatch)):
            if rank == 1:
                with pytest.raises(error, match="weights"):
                    ops.slot_weights(buffer, [other[nth]])
            else:
                ops.slot_weights(buffer, [owned])
                with pytest.raises(error, match=r"weights.*rank 1"):
                    buffer.check()
            (copies,) = ops.slot_weights(buffer, [owned])
            buffer.check()
            for slot, expert in enumerate(buffer.local_experts):
                assert torch.equal(copies[slot], whole[expert] if expert >= 0 else torch.zeros_like(whole[0]))


def _trains(rank: int, group: Any) -> None:
    """Losses and weights near those without a placement, which changes on the way."""
    drawn = {"ranks": group.size(), "num_experts": EXPERTS, "slots": SLOTS}
    found = []
    for placed in (False, True):
        about = {"placement": random_placement(0, **drawn)} if placed else {}
        layer = ExpertParallel(
            group, intermediate=INNER, **SIZES, gate=None, dtype=torch.bfloat16, device="cuda", **about
        )
        optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
        g = torch.Generator().manual_seed(100 + rank)
        losses = []
        for step in range(4):
            x = torch.randn(TOKENS, HIDDEN, generator=g).bfloat16().cuda()
            ids = torch.rand(TOKENS, EXPERTS, generator=g).argsort(dim=1)[:, :TOPK].contiguous().cuda()
            loss = (layer(x, ids, torch.rand(TOKENS, TOPK, generator=g).cuda()).float() - 1).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.detach())
            if placed:
                layer.open().set_placement(random_placement(step + 1, **drawn))
        found.append([torch.stack(losses), *(param.detach().float() for param in layer.parameters())])
        if placed:
            graph = torch.cuda.graph(torch.cuda.CUDAGraph())
            with pytest.raises(moecomm.BadInput, match="slot_weights: got a call during a capture"), graph:
                ops.slot_weights(layer.open(), [param.detach() for param in layer.parameters()])
        layer.open().check()
    for got, want in zip(*found, strict=True):
        torch.testing.assert_close(got, want, rtol=2**-5, atol=2**-5)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("body", [_exchanges, _refuses, _trains])
def test_slots_of_gpus(gpu_ranks: Ranks, body: Any) -> None:
    gpu_ranks.run(gpu_count(), body)
