"""Rows of ranks by the choice of replicas: python bench/balanced_rounds.py.

CPU ranks dispatch tokens that `moecomm.routing.synthesize` draws by Zipf's law.  Experts are placed by a plan for other
tokens of the same law ("known"); or half of the tokens of a round have other favorites ("changed").  A figure is the
rows of the busiest rank over the mean, of one round; the mean and the most of all rounds are kept.
"""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any, get_args

import torch

from moecomm import Placement
from moecomm.balance import plan
from moecomm.base.choices import ReplicaChoice
from moecomm.router import MODELS
from moecomm.routing import synthesize
from moecomm.testing import LocalBuffers
from moecomm_bench.results import write

RESULT = Path(__file__).parent / "results" / "balanced-rounds-cpu.json"
MODEL, RANKS, TOKENS, ROUNDS = "deepseek-v3", 64, 512, 4  # tokens of a rank
ZIPF = (0.1, 0.4, 0.7)
SLOTS = (288, 320, 384)


def drawn(zipf: float, tokens: int, favorites: int) -> torch.Tensor:
    """Return ids [tokens, topk]."""
    return torch.as_tensor(synthesize(MODEL, tokens, zipf=zipf, seed=favorites).topk_idx).long()


def busiest(rows: list[int]) -> float:
    """Return the most over the mean."""
    return max(rows) / statistics.mean(rows)


def rounds(placement: Placement | None, ids: list[torch.Tensor]) -> dict[str, float]:
    """Return the figures of a placement; `ids`: [RANKS * TOKENS, topk] of each round."""
    model = MODELS[MODEL]
    sizes: dict[str, Any] = {"hidden": 16, "num_experts": model.num_experts, "topk": model.topk, "max_tokens": TOKENS}
    with LocalBuffers(ranks=RANKS, **sizes, backend="host", timeout_s=60, placement=placement) as ranks:
        found = []
        for of_round in ids:
            calls = [{"x": torch.zeros(TOKENS, 16).bfloat16(), "topk_idx": own} for own in of_round.split(TOKENS)]
            found.append(busiest([int(routed.tokens_per_expert.sum()) for routed in ranks.dispatch(calls)]))
    return {"mean": statistics.mean(found), "most": max(found)}


def measured(zipf: float, slots: int, changed: bool) -> dict[str, Any]:
    """Return the figures of a law, a number of slots, and favorites that are known or not."""
    count = RANKS * TOKENS
    all_ids = drawn(zipf, count * (ROUNDS + 1), 0)
    load = torch.bincount(all_ids[:count].flatten(), minlength=MODELS[MODEL].num_experts)[None]
    ids = list(all_ids[count:].split(count))
    if changed:
        others = drawn(zipf, count * ROUNDS, 1).split(count)
        ids = [
            torch.where(torch.arange(count)[:, None] % 2 == 0, one, other)
            for one, other in zip(ids, others, strict=True)
        ]
    made = plan(load, ranks=RANKS, slots=slots, policy="spread")
    row: dict[str, Any] = {"zipf": zipf, "slots": slots, "favorites": "changed" if changed else "known"}
    row["none"] = rounds(None, ids)
    for choice in get_args(ReplicaChoice):
        row[choice] = rounds(made.placement(0, choice=choice), ids)
    return row


def main() -> None:
    """Measure, print, and write the result."""
    torch.set_num_threads(1)
    rows = []
    for slots in SLOTS:
        for changed in (False, True):
            for zipf in ZIPF:
                rows.append(measured(zipf, slots, changed))
                print(rows[-1], flush=True)
    case = {"model": MODEL, "ranks": RANKS, "tokens": TOKENS, "rounds": ROUNDS, "policy": "spread"}
    print(write(RESULT, {"case": case, "rows": rows}))


if __name__ == "__main__":
    main()
