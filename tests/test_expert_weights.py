"""Weights of slots: they follow placements, while layers go on."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

import moecomm
from moecomm import ExpertWeights, Placement
from moecomm.errors import BadInput
from moecomm.testing.cases import random_placement
from moecomm.weights import step

from .backends.conftest import run_ranks
from .few import few
from .ops.plain import formula

RANKS, HIDDEN, INNER, EXPERTS, SLOTS, TOKENS = 3, 16, 8, 7, 5, 9
SIZES: dict[str, Any] = {"hidden": HIDDEN, "num_experts": EXPERTS, "topk": 2, "max_tokens": TOKENS, "timeout_s": 20}


def drawn(seed: int) -> Placement:
    return random_placement(seed, ranks=RANKS, num_experts=EXPERTS, slots=SLOTS)


@pytest.mark.parametrize("seed", few(range(12), 2))
def test_layers_go_on_while_experts_move(seed: int) -> None:
    """Between any prefetch and its commit, and after it, each layer gives the sums of the whole model."""
    g = torch.Generator().manual_seed(seed)
    w13, w2 = torch.randn(EXPERTS, 2 * INNER, HIDDEN, generator=g), torch.randn(EXPERTS, HIDDEN, INNER, generator=g)
    scales = torch.randn(EXPERTS, 3, generator=g).bfloat16()

    def body(group: Any) -> int:
        mine = torch.Generator().manual_seed(100 + group.rank)
        x = torch.randn(TOKENS, HIDDEN, generator=mine)
        ids = torch.rand(TOKENS, EXPERTS, generator=mine).argsort(dim=1)[:, :2].contiguous()
        routing = torch.rand(TOKENS, 2, generator=mine)
        want = formula(x.double(), ids, routing.double(), w13.double(), w2.double())
        commits = 0
        with moecomm.Buffer(group, **SIZES, dtype=torch.float32, backend="host", placement=drawn(seed)) as buffer:
            shapes = {"w13": (2 * INNER, HIDDEN), "w2": (HIDDEN, INNER), "scales": (3,)}
            kinds = {"w13": torch.float32, "w2": torch.float32, "scales": torch.bfloat16}
            weights = ExpertWeights(buffer, shapes, dtype=kinds)

            def check() -> None:
                out = buffer.moe(x, ids, routing, weights["w13"], weights["w2"])
                torch.testing.assert_close(out.double(), want, rtol=1e-4, atol=1e-4)

            held = torch.tensor(list(buffer.local_experts))
            for name, whole in (("w13", w13), ("w2", w2), ("scales", scales)):
                weights[name][held >= 0] = whole[held[held >= 0]]
            for target in (drawn(seed + 50), drawn(seed + 51)):
                while weights.prefetch(target) != buffer.placement:
                    check()
                    weights.commit()
                    check()
                    commits += 1
                    held = torch.tensor(list(buffer.local_experts))
                    assert torch.equal(weights["scales"][held >= 0], scales[held[held >= 0]])
            weights.close()
            return commits

    commits = run_ranks(RANKS, body)
    assert len(set(commits)) == 1 and commits[0] >= 1


def test_steps_lose_no_expert_and_come_to_an_end() -> None:
    reached, of = 0, 300
    for seed in range(of):
        rng = random.Random(seed)
        slots = rng.randint(4, 6)
        sizes = {"ranks": rng.randint(2, 5), "num_experts": 8, "slots": slots}
        at, target = (random_placement(2 * seed + nth, **sizes) for nth in range(2))
        seen = [at]
        while (following := step(at, target)) != at:
            assert following.logcnt.min() >= 1
            for before, after in zip(at.experts.flatten().tolist(), following.experts.flatten().tolist(), strict=True):
                assert after == before or before == -1 or after == -1, "a slot in use is not written"
            at = following
            seen.append(at)
            assert len(seen) < 20
        sorted_rows = [[sorted(row) for row in one.experts.tolist()] for one in (at, target)]
        reached += sorted_rows[0] == sorted_rows[1]
    assert reached > of // 2  # the others have too few empty slots


def test_what_cannot_be_moved() -> None:
    sizes = {**SIZES, "dtype": torch.float32, "backend": "host"}
    with moecomm.Buffer("self", **sizes) as buffer, pytest.raises(BadInput, match="placement"):
        ExpertWeights(buffer, {"w": (2,)})
    with moecomm.Buffer("self", **sizes, placement=Placement([range(EXPERTS)])) as buffer:
        for shapes, dtype in (({}, torch.float32), ({"w": 3}, torch.float32), ({"w": (2,)}, torch.complex64)):
            with pytest.raises(BadInput, match=r"shapes|dtype"):
                ExpertWeights(buffer, shapes, dtype=dtype)  # type: ignore[arg-type]
        weights = ExpertWeights(buffer, {"w": (2,)})
        with pytest.raises(BadInput, match="prefetch"):
            weights.commit()
        for target in (Placement([[0, 1]]), Placement([range(EXPERTS)] * 2), None):
            with pytest.raises(BadInput, match="target"):
                weights.prefetch(target)  # type: ignore[arg-type]
        buffer.shrink()
        with pytest.raises(BadInput, match="shrunk"):
            weights.prefetch(Placement([range(EXPERTS)]))
        weights.close()
