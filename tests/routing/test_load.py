"""The load of experts and ranks, against counting; and routing that is drawn from Zipf's law."""

from __future__ import annotations

import math
from collections import Counter

import pytest
import torch

from moecomm.base.experts import experts_of
from moecomm.router import MODELS
from moecomm.routing import Recorded, loads, synthesize
from moecomm.routing.recorded import SYNTHETIC


def test_loads_are_what_counting_finds() -> None:
    """10 experts on 1, 3, 4 and 10 ranks, of which there are none on 16; uneven shares as in a Buffer."""
    generator = torch.Generator().manual_seed(3)
    ids = torch.randint(-1, 10, (50, 3), generator=generator).clamp(max=7).to(torch.int16)
    records = torch.tensor([[0, 0, 20], [1, 0, 5], [0, 1, 25]], dtype=torch.int32)
    found = loads(Recorded(10, 3, ("a", "b"), records, ids), (1, 3, 4, 10, 16))
    parts = {"": ids, "a": torch.cat([ids[:20], ids[25:]]), "b": ids[20:25]}
    assert [(load.layer, load.calls) for load in found] == [("", 3), ("a", 2), ("b", 1)]
    for load in found:
        chosen = [expert for token in parts[load.layer].tolist() for expert in token if expert >= 0]
        counts = Counter(chosen)
        assert (load.tokens, load.rows) == (len(parts[load.layer]), len(chosen))
        assert load.busiest_expert == pytest.approx(max(counts.values()) * 10 / len(chosen))
        shares = [count / len(chosen) for count in counts.values()]
        assert load.entropy == pytest.approx(-sum(share * math.log2(share) for share in shares), abs=1e-5)
        assert set(load.busiest_rank) == {1, 3, 4, 10}
        for ranks, busiest in load.busiest_rank.items():
            by_rank = [sum(counts[expert] for expert in experts_of(rank, 10, ranks)) for rank in range(ranks)]
            assert busiest == pytest.approx(max(by_rank) * ranks / len(chosen))


def test_even_load_and_none() -> None:
    even = Recorded(8, 1, ("a",), torch.tensor([[0, 0, 8]]).int(), torch.arange(8).view(8, 1).short())
    (load,) = loads(even)
    assert (load.busiest_expert, load.busiest_rank, load.entropy) == (1, {4: 1, 8: 1}, 3)
    (empty,) = loads(Recorded(8, 1, (), torch.empty(0, 3).int(), torch.empty(0, 1).short()))
    assert (empty.layer, empty.tokens, empty.busiest_expert, empty.entropy) == ("", 0, 0, 0)


@pytest.mark.parametrize("zipf", [0, 0.8, 1.5])
def test_the_first_expert_of_a_token_follows_zipf(zipf: float) -> None:
    """Each expert within 5 standard deviations of its probability; the second of a token likewise, given the first."""
    tokens, model = 200_000, MODELS["mixtral-8x7b"]
    found = synthesize(model.name, tokens, zipf=zipf, seed=7)
    assert (found.experts, found.topk, found.source, found.model) == (8, 2, SYNTHETIC, model.name)
    assert found.notes["zipf"] == f"{zipf:g}" and found.notes["seed"] == "7"
    assert found.tokens == tokens and bool((found.topk_idx[:, 0] != found.topk_idx[:, 1]).all())
    weights = [rank**-zipf for rank in range(1, 9)]
    popular = torch.bincount(found.topk_idx[:, 0].long(), minlength=8)
    order = popular.argsort(descending=True).tolist()
    for rank, expert in enumerate(order):
        share = weights[rank] / sum(weights)
        assert abs(int(popular[expert]) - tokens * share) < 5 * math.sqrt(tokens * share * (1 - share))
    first = found.topk_idx[:, 0] == order[0]
    second = torch.bincount(found.topk_idx[first, 1].long(), minlength=8)
    for rank, expert in enumerate(order[1:], 1):
        share, count = weights[rank] / sum(weights[1:]), int(first.sum())
        assert abs(int(second[expert]) - count * share) < 5 * math.sqrt(count * share * (1 - share))


def test_a_draw_is_the_same_in_every_run_and_in_any_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    from moecomm.routing import synthetic

    def drawn(tokens: int, seed: int) -> list[list[int]]:
        return list(synthesize("qwen3-30b-a3b", tokens, zipf=1, seed=seed).topk_idx.tolist())

    whole = drawn(100, 1)
    assert drawn(100, 1) == whole and drawn(100, 2) != whole and drawn(60, 1) == whole[:60]
    monkeypatch.setattr(synthetic, "_AT_ONCE", 128 * 32)
    assert drawn(100, 1) == whole


def test_a_larger_exponent_is_less_even() -> None:
    found = [loads(synthesize("deepseek-v3", 4096, zipf=zipf))[0] for zipf in (0, 0.6, 1.2, 3)]
    busiest, entropy = [load.busiest_expert for load in found], [load.entropy for load in found]
    assert busiest == sorted(busiest) and entropy == sorted(entropy, reverse=True)
    assert busiest[0] < 1.5 and entropy[0] > 7.9
