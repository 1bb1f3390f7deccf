"""The command line of programs that measure CPU ranks: --ranks, --tokens, --rounds; and their results."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from moecomm.router import MODELS
from moecomm.tools.launch import launch
from moecomm_bench.results import write

FOLDER = Path(__file__).parent / "results"


def measure(program: str, about: str, *, model: str, **default: int) -> tuple[list[Any], dict[str, Any]]:
    """Run PROGRAM.run_rank(group, tokens, hidden, experts, topk, rounds) on CPU ranks.

    Args:
        program: name of the module.
        about: shown by --help.
        model: a name of MODELS, which sets the sizes.
        default: ranks, tokens, rounds.

    Returns:
        The results by rank, and the case.
    """
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, value in default.items():
        parser.add_argument(f"--{name}", type=int, default=value, help="of each rank" if name == "tokens" else None)
    given = parser.parse_args()
    of = MODELS[model]
    job = {"tokens": given.tokens, "hidden": of.hidden, "experts": of.num_experts, "topk": of.topk}
    job["rounds"] = given.rounds
    return launch(f"{program}:run_rank", job, given.ranks), {"ranks": given.ranks, "dtype": "bfloat16", **job}


def keep(name: str, result: dict[str, Any]) -> None:
    """Write bench/results/NAME.json, and print its path."""
    print(write(FOLDER / f"{name}.json", result))
