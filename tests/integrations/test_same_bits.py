"""A trainer and an engine compute the same bits: another number of ranks, other batches, replicas, moved weights."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch

import moecomm
from moecomm import Placement, nn
from moecomm.transfer import WeightTransfer
from tests.backends.conftest import all_ranks
from tests.integrations import vllm_stub as stub

HIDDEN, INNER, EXPERTS, TOPK, TOKENS, TRAINERS = 64, 24, 8, 3, 7, 4
SHAPES = {"w13": (2 * INNER, HIDDEN), "w2": (HIDDEN, INNER)}
ENGINES = {
    "two ranks": [[0, 1, 2, 3], [4, 5, 6, 7]],
    "two ranks, replicas": [[3, 1, 0, 2, 7], [4, 5, 6, 7, 0]],
    "one rank": [[0, 1, 2, 3, 4, 5, 6, 7]],
    "one rank, replicas": [[7, 0, 1, 2, 3, 4, 5, 6, 7, 7]],
}


def row_by_row(x: torch.Tensor, w13: torch.Tensor, w2: torch.Tensor) -> torch.Tensor:
    """Products whose bits depend on the row alone; those of torch on CPUs may depend on the number of rows."""
    found = [x[:0]]
    for row in x:
        gate, up = (w13 @ row).chunk(2)
        found.append((w2 @ (torch.nn.functional.silu(gate) * up))[None])
    return torch.cat(found)


class RowByRow(nn.Experts):
    def forward(self, x: torch.Tensor, tokens_per_expert: torch.Tensor, buffer: Any = None) -> torch.Tensor:
        counts = tokens_per_expert.tolist()
        groups = x[: sum(counts)].split(counts)
        parts = [row_by_row(rows, self.w13[slot], self.w2[slot]) for slot, rows in enumerate(groups)]
        return torch.cat([*parts, torch.zeros_like(x[sum(counts) :])])


def trained(group: Any, transfer: WeightTransfer, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    """Train for a step over four ranks, send the weights, and return tokens, ids, weights and results of the next."""
    sizes: dict[str, Any] = {"hidden": HIDDEN, "intermediate": INNER, "num_experts": EXPERTS, "topk": TOPK}
    layer = nn.ExpertParallel(group, **sizes, max_tokens=16, gate=None, wire="rows", dtype=dtype, backend="host")
    layer.experts = RowByRow(range(2 * group.rank, 2 * group.rank + 2), HIDDEN, INNER, dtype=dtype)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.5)
    g = torch.Generator().manual_seed(group.rank)
    x = torch.randn(TOKENS + group.rank, HIDDEN, generator=g).to(dtype)
    ids = torch.rand(len(x), EXPERTS, generator=g).argsort(dim=1)[:, :TOPK].contiguous()
    weights = torch.rand(len(x), TOPK, generator=g)
    layer(x, ids, weights).float().square().mean().backward()
    optimizer.step()
    transfer.stage({"w13": layer.experts.w13, "w2": layer.experts.w2})
    with torch.no_grad():
        return x, ids, weights, layer(x, ids, weights)


def served(group: Any, transfer: WeightTransfer, held: list[list[int]], given: Any, dtype: torch.dtype) -> torch.Tensor:
    """Run the tokens of this rank through vLLM's batched format, in batches of another size; return the results."""
    from moecomm.integrations.vllm.batched import BatchedPrepareAndFinalize
    from moecomm.integrations.vllm.managers import BatchedManager

    logical, slots = torch.tensor(held), len(held[0])
    w = {name: torch.zeros(slots, *shape, dtype=dtype) for name, shape in SHAPES.items()}
    transfer.stage()
    transfer.commit(w)
    x, ids, weights = (tensor[group.rank :: group.ranks].contiguous() for tensor in given())
    placed = Placement(logical, choice="token")
    manager = BatchedManager(group, None)
    steps = BatchedPrepareAndFinalize(
        manager.get_handle({"max_num_tokens_per_dp_rank": 16}), max_tokens_per_rank=16, num_dispatchers=group.ranks
    )
    outs = []
    for at in range(0, 40, 5):  # batches end on all ranks at once
        some = slice(at, at + 5)
        physical = placed.slots_of(ids[some], group.rank)
        about = (logical.numel(), None, False, stub.quant_config(), False)
        rows, _, meta, _, _ = steps.prepare(x[some], weights[some], physical, *about)
        y = torch.full_like(rows, torch.nan)
        for slot, count in enumerate(meta.expert_num_tokens.tolist()):
            y[slot, :count] = row_by_row(rows[slot, :count], w["w13"][slot], w["w2"][slot])
        out = torch.empty_like(x[some])
        steps.finalize(out, y, weights[some], physical, False, stub.TopKWeightAndReduceDelegate())
        outs.append(out)
    manager.destroy()
    return torch.cat(outs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("engine", ENGINES)
def test_an_engine_gives_the_bits_of_the_trainer(
    batches: Any, monkeypatch: pytest.MonkeyPatch, engine: str, dtype: torch.dtype
) -> None:
    monkeypatch.setattr(sys.modules["vllm.envs"], "VLLM_BATCH_INVARIANT", True)
    held = ENGINES[engine]
    count = TRAINERS + len(held)
    trainers, engines = moecomm.local_ranks(TRAINERS), moecomm.local_ranks(len(held))
    none: list[list[int]] = [[]]
    source = Placement([[0, 1], [2, 3], [4, 5], [6, 7], *none * len(held)])
    target = Placement([*none * TRAINERS, *held])
    everybody: list[Any] = [None] * TRAINERS
    order = torch.randperm(4 * TOKENS + 6, generator=torch.Generator().manual_seed(1))

    def given() -> tuple[torch.Tensor, ...]:
        return tuple(torch.cat(parts)[order] for parts in list(zip(*everybody, strict=True))[:3])

    def body(group: Any) -> Any:
        about: dict[str, Any] = {"source": source, "target": target, "dtype": dtype, "backend": "host"}
        with WeightTransfer(group, SHAPES, **about) as transfer:
            if group.rank < TRAINERS:
                everybody[group.rank] = trained(trainers[group.rank], transfer, dtype)
                group.all_gather(b"")
                return None
            mine = engines[group.rank - TRAINERS]

            def arrived() -> tuple[torch.Tensor, ...]:
                group.all_gather(b"")  # all trainers have their results
                return given()

            return served(mine, transfer, held, arrived, dtype)

    _, _, _, _, *outs = all_ranks(count, body)
    wanted = torch.cat([found[3] for found in everybody])[order]
    for rank, out in enumerate(outs):
        assert torch.equal(out, wanted[rank :: len(held)]) and out.isfinite().all() and out.any()
