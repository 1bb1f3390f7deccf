"""A trainer and vLLM's adapter compute the same bits with moecomm's kernels, in FP8 and bfloat16.

Four processes share the GPUs: one H200 is enough.
"""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch
import torch.distributed as dist

import moecomm
from moecomm import Placement, ops
from moecomm.fused import Fp8, grouped_gemm, quantize_weights
from tests.integrations import vllm_stub as stub
from tests.integrations.test_same_bits import ENGINES, EXPERTS, TOPK, TRAINERS, shuffled

HIDDEN, INNER, TOKENS, BATCH = 512, 256, 90, 16
LIMITS: dict[str, Any] = {"topk": TOPK, "timeout_s": 120}
Weights = tuple[torch.Tensor, torch.Tensor] | tuple[Fp8, Fp8]


def trained(rank: int, group: Any) -> tuple[torch.Tensor, ...]:
    """Train a step; return tokens, ids, routing weights, the trained experts, and results after it in both formats."""
    g = torch.Generator("cuda").manual_seed(rank)

    def drawn(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=g, device="cuda", dtype=torch.bfloat16)

    local = EXPERTS // TRAINERS
    w13 = (drawn(local, 2 * INNER, HIDDEN) * HIDDEN**-0.5).requires_grad_()
    w2 = (drawn(local, HIDDEN, INNER) * INNER**-0.5).requires_grad_()
    x = drawn(TOKENS, HIDDEN)
    ids = torch.rand(len(x), EXPERTS, generator=g, device="cuda").argsort(dim=1)[:, :TOPK].contiguous()
    weights = torch.rand(len(x), TOPK, generator=g, device="cuda")
    with moecomm.Buffer(group, hidden=HIDDEN, num_experts=EXPERTS, max_tokens=TOKENS, **LIMITS) as buffer:
        optimizer = torch.optim.SGD([w13, w2], lr=0.5)
        ops.moe(buffer, x, ids, weights, w13, w2, wire="rows").float().square().mean().backward()
        assert w13.grad is not None and w13.grad.any() and w2.grad is not None and w2.grad.any()
        optimizer.step()
        outs = [ops.moe(buffer, x, ids, weights, w13, w2, wire="rows").detach()]  # the forward pass of training
        both: list[Weights] = [(w13.detach(), w2.detach()), (quantize_weights(w13), quantize_weights(w2))]
        found = [
            [buffer.moe(x, ids, weights, *of, wire="rows", fused=fused) for fused in (False, True, None)] for of in both
        ]
        buffer.check()
    for one in (*outs, *found[0]):
        assert torch.equal(one, found[0][0])
    for one in found[1]:
        assert torch.equal(one, found[1][0])
    return x, ids, weights, w13.detach(), w2.detach(), found[0][0], found[1][0]


def of_all(group: Any, mine: torch.Tensor) -> torch.Tensor:
    """Return the tensors of all trainers, one behind the other."""
    parts = [torch.empty(mine.shape, dtype=mine.dtype) for _ in range(TRAINERS)]
    dist.all_gather(parts, mine.cpu(), group=group)
    return torch.cat(parts).cuda()


def products(rows: torch.Tensor, scales: torch.Tensor | None, counts: torch.Tensor, w: Weights) -> torch.Tensor:
    """The experts of an engine, over rows in the batched format."""
    w13, w2 = w
    how: dict[str, Any] = {"activation": "swiglu", "interleaved": False}
    if scales is None:
        return grouped_gemm(grouped_gemm(rows, w13, counts, **how), w2, counts)
    inner = grouped_gemm(Fp8(rows, scales.contiguous()), w13, counts, **how, quantize="fp8")
    return grouped_gemm(inner, w2, counts)


def served(group: Any, held: list[list[int]], given: list[torch.Tensor], w: Weights) -> torch.Tensor:
    """Run this rank's tokens through vLLM's batched format, in batches of another size, and return the results."""
    from moecomm.integrations.vllm.batched import BatchedPrepareAndFinalize
    from moecomm.integrations.vllm.managers import BatchedManager

    rank, ranks = dist.get_rank(group), len(held)
    logical, fp8 = torch.tensor(held), isinstance(w[0], Fp8)
    x, ids, weights = (tensor[rank::ranks].contiguous() for tensor in given)
    manager = BatchedManager(group, None)
    handle = manager.get_handle({"max_num_tokens_per_dp_rank": BATCH})
    steps = BatchedPrepareAndFinalize(handle, max_tokens_per_rank=BATCH, num_dispatchers=ranks, use_fp8_dispatch=fp8)
    placed, config, outs = Placement(logical, choice="token"), stub.quant_config(is_scale_swizzled=False), []
    for at in range(0, -(-TRAINERS * TOKENS // ranks), BATCH):  # batches end on all ranks at once
        some = slice(at, at + BATCH)
        physical = placed.slots_of(ids[some].cpu(), rank).cuda()
        about = (logical.numel(), None, False, config, False)
        rows, scales, meta, _, _ = steps.prepare(x[some], weights[some], physical, *about)
        y = products(rows, scales, meta.expert_num_tokens, w)
        out = torch.full_like(x[some], torch.nan)
        steps.finalize(out, y, weights[some], physical, False, stub.TopKWeightAndReduceDelegate())
        outs.append(out)
    torch.cuda.synchronize()
    manager.destroy()
    return torch.cat(outs)


def _trainer_and_engines(rank: int, group: Any) -> dict[str, bool]:
    sys.modules.update(stub.modules(stub.MicroBatches()))
    sys.modules["vllm.envs"].VLLM_BATCH_INVARIANT = True  # type: ignore[attr-defined]
    x, ids, weights, w13, w2, bf16, fp8 = (of_all(group, tensor) for tensor in trained(rank, group))
    same = {}
    for name, held in ENGINES.items():
        engine = dist.new_group(range(len(held)))
        if rank >= len(held):
            continue
        mine = torch.tensor(held[rank], device="cuda")
        of: tuple[Any, Any] = (w13[mine], w2[mine])
        forms = {"bfloat16": (of, bf16), "FP8": (tuple(quantize_weights(w) for w in of), fp8)}
        for form, (w, wanted) in forms.items():
            out = served(engine, held, [shuffled(tensor) for tensor in (x, ids, weights)], w)
            theirs = shuffled(wanted)[rank :: len(held)]
            same[f"{name}, {form}"] = torch.equal(out, theirs) and bool(out.isfinite().all() and out.any())
    return same


@pytest.mark.gpu1
@pytest.mark.timeout(300)
def test_an_engine_gives_the_bits_of_the_trainer(gpu_ranks: Any) -> None:
    gpu_ranks.start(TRAINERS, _trainer_and_engines)
    found = gpu_ranks.results(TRAINERS, timeout_s=280)
    assert found[0] == {f"{name}, {form}": True for name in ENGINES for form in ("bfloat16", "FP8")}
    for same in found.values():
        assert not isinstance(same, BaseException) and all(same.values()), same
