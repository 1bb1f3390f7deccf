"""python -m tests.overlap.many CASES [--first SEED] [--json FILE]: random calls of the fused operators by CPU ranks.

Each operator, and each of the products in FP8, makes CASES calls on 1 to 8 ranks, and every result has the bits of the
reference.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import torch

from moecomm import overlap
from moecomm.overlap.sizes import FP8
from moecomm_bench import results

from .cases import MOST_RANKS, OPERATORS, PRODUCTS, on_ranks, random_case, same

DRAWN_AT_ONCE = 100
KINDS: list[tuple[str, torch.dtype | None]] = [
    *((name, None) for name in OPERATORS),
    *((name, FP8) for name in PRODUCTS),
]


def run_cases(operator: str, ranks: int, seeds: range, dtype: torch.dtype | None = None) -> None:
    """Run cases on one Workspace."""
    cases = [random_case(operator, ranks, seed, dtype=dtype) for seed in seeds]
    wanted = [case.want() for case in cases]

    def body(workspace: overlap.Workspace) -> list[str]:
        wrong = []
        for seed, case, want in zip(seeds, cases, wanted, strict=True):
            if not same(case.run(workspace), want[workspace.rank], case.dtype):
                wrong.append(f"{operator} on rank {workspace.rank} of {ranks}, seed {seed}")
        return wrong

    assert on_ranks(ranks, body) == [[]] * ranks


def run_many(operator: str, dtype: torch.dtype | None, seeds: range) -> None:
    """Run cases, an equal number on each number of ranks."""
    each = len(seeds) // MOST_RANKS
    for ranks in range(1, MOST_RANKS + 1):
        begin = seeds.start + (ranks - 1) * each
        for first in range(begin, begin + each, DRAWN_AT_ONCE):
            run_cases(operator, ranks, range(first, min(first + DRAWN_AT_ONCE, begin + each)), dtype)


def main() -> None:
    parser = argparse.ArgumentParser("python -m tests.overlap.many", description=__doc__)
    parser.add_argument("cases", type=int, help=f"of an operator; a multiple of {MOST_RANKS}")
    parser.add_argument("--first", type=int, default=0, help="seed of the first case")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    rows: list[dict[str, Any]] = []
    for operator, dtype in KINDS:
        begin = time.monotonic()
        run_many(operator, dtype, range(given.first, given.first + given.cases))
        kind = operator.replace("_", " ") + (" in FP8" if dtype is FP8 else "")
        rows.append({"kind": kind, "random_cases": given.cases, "ended": "passed", "seconds": time.monotonic() - begin})
        print(json.dumps(rows[-1]), flush=True)
    if given.json:
        results.write(given.json, {"how": "tests/overlap/many.py: bits of the float64 reference", "rows": rows})


if __name__ == "__main__":
    main()
