"""Plans of moecomm.balance: python bench/balance.py.

Loads are counts of tokens that `moecomm.routing.synthesize` draws by Zipf's law, each layer with an order of popularity
of its own.  Later loads count other tokens, a quarter of which are drawn by another order.  Ratios are those of the
busiest rank to the mean, predicted from the counts, and means over layers; times are medians of the CPU time of the
calling thread.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch

from moecomm.balance import Plan, moves, plan
from moecomm.router import MODELS
from moecomm.routing import synthesize
from moecomm_bench.results import write

RESULT = Path(__file__).parent / "results" / "balance-cpu.json"
TOKENS = 8192  # of each layer
REPEATS = 5
BUDGETS = (2, 8, 32)  # copies a layer


class Case(NamedTuple):
    """A model on ranks with an eighth more slots than it has experts."""

    model: str
    layers: int
    ranks: int
    nodes: int


CASES = (Case("deepseek-v3", 58, 32, 4), Case("qwen3-235b", 94, 16, 2))


def counts(model: str, layers: int, tokens: int, zipf: float, seed: int) -> torch.Tensor:
    """Return the tokens of each expert, [layers, experts]."""
    experts = MODELS[model].num_experts
    drawn = (
        synthesize(model, tokens, zipf=zipf, seed=seed + layer).topk_idx.flatten().long() for layer in range(layers)
    )
    return torch.stack([torch.bincount(ids, minlength=experts) for ids in drawn])


def later(model: str, layers: int, zipf: float) -> torch.Tensor:
    """Return counts of tokens of which a quarter have other favorites."""
    same = counts(model, layers, TOKENS, zipf, 0) * 3
    return (same + counts(model, layers, TOKENS, zipf, 10_000)) / 4


def milliseconds(call: Callable[[], object]) -> float:
    """Return the median CPU time of a call."""
    times = []
    for _ in range(REPEATS):
        begin = time.thread_time()
        call()
        times.append(1e3 * (time.thread_time() - begin))
    return statistics.median(times)


def measured(case: Case, zipf: float) -> dict[str, Any]:
    """Return the figures of one model and exponent."""
    load = counts(case.model, case.layers, TOKENS, zipf, 0)
    changed = later(case.model, case.layers, zipf)
    experts = load.shape[1]
    sizes: dict[str, Any] = {"ranks": case.ranks, "slots": experts * 9 // 8, "nodes": case.nodes}
    ways: dict[str, dict[str, Any]] = {
        "eplb": {"policy": "eplb"},
        "spread": {"policy": "spread"},
        "nearest": {"policy": "spread", "choice": "nearest"},
    }
    plans = {name: plan(load, **sizes, **way) for name, way in ways.items()}
    none = Plan.from_phy2log(torch.arange(experts).repeat(case.layers, 1), ranks=case.ranks)

    def of(made: Plan, load: torch.Tensor, choice: Any = "even") -> float:
        return float(made.predicted(load, choice).mean())

    row: dict[str, Any] = {**case._asdict(), "experts": experts, "slots": sizes["slots"], "zipf": zipf}
    row["none"] = of(none, load)
    for name, way in ways.items():
        row[name] = {
            "even": of(plans[name], load),
            "nearest": of(plans[name], load, "nearest"),
            "crossing": float(plans[name].crossing(load).mean()),
            "ms": milliseconds(lambda way=way: plan(load, **sizes, **way)),  # type: ignore[misc]
        }
    present = plans["spread"]
    row["kept"] = of(present, changed)
    row["budgets"] = []
    for copies in BUDGETS:
        within: dict[str, Any] = {"previous": present, "policy": "spread", "max_moves": copies * case.layers}
        made = plan(changed, **within)
        row["budgets"].append(
            {
                "copies": copies,
                "made": len(moves(present, made)) / case.layers,
                "even": of(made, changed),
                "ms": milliseconds(lambda within=within: plan(changed, **within)),  # type: ignore[misc]
            }
        )
    anew = plan(changed, **sizes)
    renumbered = plan(changed, previous=present, policy="spread")
    row["anew"] = {"even": of(anew, changed), "made": len(moves(present, anew)) / case.layers}
    row["renumbered"] = {"even": of(renumbered, changed), "made": len(moves(present, renumbered)) / case.layers}
    return row


def main() -> None:
    """Measure, print, and write bench/results/balance-cpu.json."""
    torch.set_num_threads(1)
    rows = []
    for case in CASES:
        for zipf in (0.8, 1.2):
            rows.append(measured(case, zipf))
            print(rows[-1], flush=True)
    print(write(RESULT, {"case": {"tokens": TOKENS, "repeats": REPEATS}, "rows": rows}))


if __name__ == "__main__":
    main()
