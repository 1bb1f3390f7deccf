"""python -m tests.gpu.kills KILLS [--json FILE]: killed processes of GPU ranks, and how soon the others go on.

Rank 1 is killed at a random moment between its rounds, or in one.  The others raise PeerLost, then mask() it or
shrink(), in turn, and make 100 exact rounds.  Kernels for the ranks that shrink() leaves are compiled before the kill.
Times are of the slowest rank: from the kill until it raises, those of mask() and shrink(), and of the first round
after them.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import torch

import moecomm
from moecomm.base.experts import experts_of
from moecomm_bench import results

from ..conftest import Ranks
from ..percentiles import percentiles

SIZES: dict[str, Any] = {"hidden": 1024, "num_experts": 8, "topk": 2, "max_tokens": 64}
CALLS = ("mask", "shrink")
EXACT, LATEST_S = 100, 0.05


def tokens_of(rank: int, device: torch.device, count: int = SIZES["max_tokens"]) -> dict[str, torch.Tensor]:
    """Tokens, ids and weights of which all sums are exact."""
    g = torch.Generator().manual_seed(rank)
    x = torch.randint(-8, 9, (count, SIZES["hidden"]), generator=g).bfloat16()
    ids = torch.rand(count, SIZES["num_experts"], generator=g).argsort(dim=1)[:, : SIZES["topk"]]
    weights = torch.randint(1, 9, ids.shape, generator=g) / 8
    return {"x": x.to(device), "topk_idx": ids.to(device), "topk_weights": weights.to(device)}


def sums_of(given: dict[str, torch.Tensor], gone: range = range(0)) -> torch.Tensor:
    """Return the sums of a round whose experts return their rows as they are, and some of which are not there."""
    ids, weights = given["topk_idx"], given["topk_weights"]
    there = (ids < gone.start) | (ids >= gone.stop)
    return (given["x"].float() * (weights * there).sum(dim=1, keepdim=True)).bfloat16()


def exact_round(buffer: moecomm.Buffer, given: dict[str, torch.Tensor], want: torch.Tensor) -> None:
    """Make a round, and compare it."""
    routed = buffer.dispatch(**given, sync=True)
    out = buffer.combine(routed.x, routed.handle, wire="exact")
    buffer.check()
    assert torch.equal(out, want)


def kill_this(killed: Path) -> None:
    """End this process, and leave the time on the clock of the host."""
    killed.write_text(str(time.monotonic()))
    os.kill(os.getpid(), signal.SIGKILL)


def survive(rank: int, group: Any, call: str, seed: int, killed: Path) -> dict[str, float]:
    """Return the times of a rank that is left."""
    if torch.cuda.is_available():
        torch.cuda.set_device(rank)
    buffer = moecomm.Buffer(group, **SIZES, timeout_s=5)
    given = tokens_of(rank, buffer.device)
    want = sums_of(given)
    for _ in range(3):
        exact_round(buffer, given, want)
    if rank == 0:
        buffer.compile_for(group.size() - 1)
    if rank == 1:
        after_s = random.Random(seed).uniform(0, LATEST_S)
        threading.Timer(after_s, kill_this, (killed,)).start()
    try:
        while True:
            exact_round(buffer, given, want)
    except moecomm.PeerLost as error:
        noticed, lost = time.monotonic(), error.peer
    assert lost == 1
    if call == "mask":
        assert buffer.mask() == (1,)
        want = sums_of(given, experts_of(1, SIZES["num_experts"], group.size()))
    else:
        assert buffer.shrink().lost == (1,)
    gone_on = time.monotonic()
    exact_round(buffer, given, want)
    first_round = time.monotonic()
    for _ in range(EXACT):
        exact_round(buffer, given, want)
    buffer.close()
    steps = {
        "noticed": noticed - float(killed.read_text()),
        call: gone_on - noticed,
        f"first_round_after_{call}": first_round - gone_on,
    }
    return {f"{step}_ms": 1e3 * seconds for step, seconds in steps.items()}


def kill_one(ranks: Ranks, count: int, call: str, seed: int, folder: Path) -> dict[str, float]:
    """Run a job of `count` ranks of which one is killed; return times of the slowest rank."""
    ranks.start(count, survive, call, seed, folder / f"killed-{seed}")
    found = ranks.results(count - 1, timeout_s=60)
    for result in found.values():
        if isinstance(result, BaseException):
            raise result
    return {key: max(one[key] for one in found.values()) for key in found[0]}


def main() -> None:
    parser = argparse.ArgumentParser("python -m tests.gpu.kills", description=__doc__)
    parser.add_argument("kills", type=int)
    parser.add_argument("--ranks", type=int, default=torch.cuda.device_count() or 4)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    times: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        ranks = Ranks(Path(folder), "spawn")
        for seed in range(given.kills):
            for key, ms in kill_one(ranks, given.ranks, CALLS[seed % len(CALLS)], seed, Path(folder)).items():
                times.setdefault(key, []).append(ms)
            row: dict[str, Any] = {"kind": "killed GPU ranks, masked or left out, and exact rounds", "kills": seed + 1}
            row |= {key: percentiles(each) for key, each in times.items()}
            if given.json:  # after each kill: a time limit may end the run
                results.write(given.json, {"rows": [row]})
    print(json.dumps(row, indent=1))


if __name__ == "__main__":
    main()
