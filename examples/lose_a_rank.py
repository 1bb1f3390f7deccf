"""Serve on when a rank is lost: the others leave it out, agree on the next step, and share its experts.

    moecomm launch --ranks 4 examples/lose_a_rank.py

One rank kills itself in the middle.  Under torchrun its agent would then end the others; see docs/launchers.md.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys

import torch
import torch.distributed as dist
from launched import group, torchrun

import moecomm

HIDDEN, EXPERTS, TOPK, TOKENS = 64, 8, 2, 16


def serve(buffer: moecomm.Buffer, step: int, number: int) -> None:
    """Make one step with the tokens of rank `number`, which are the same if it is repeated."""
    generator = torch.Generator().manual_seed(1000 * step + number)
    x = torch.randn(TOKENS, HIDDEN, generator=generator).to(buffer.device)
    topk_idx = torch.rand(TOKENS, EXPERTS, generator=generator).topk(TOPK).indices.to(buffer.device)
    routed = buffer.dispatch(x, topk_idx, layout="expert", sync=True)
    y, start = torch.empty_like(routed.x), 0
    for expert, count in zip(buffer.local_experts, routed.tokens_per_expert.tolist(), strict=True):
        y[start : start + count] = routed.x[start : start + count] * (expert + 1)
        start += count
    out = buffer.combine(y, routed.handle)
    torch.testing.assert_close(out, x * (topk_idx + 1).sum(dim=1, keepdim=True))


def next_step(buffer: moecomm.Buffer, step: int) -> int:
    """Return the least `step` of all ranks, which may have failed one call apart: each sends its own to every rank."""
    ranks = buffer.num_ranks
    first = [rank * (EXPERTS // ranks) + min(rank, EXPERTS % ranks) for rank in range(ranks)]  # expert of each rank
    topk_idx = torch.tensor([[expert] + [-1] * (TOPK - 1) for expert in first], device=buffer.device)
    x = torch.full((ranks, HIDDEN), float(step), device=buffer.device)
    return int(buffer.dispatch(x, topk_idx, layout="expert", sync=True).x[:, 0].min())


def say(line: str) -> None:
    """Print a line in one write, which those of other ranks cannot part."""
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def main() -> int:
    """Serve all steps; return 0."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--lose", type=int, default=2, help="rank that kills itself; -1: none")
    parser.add_argument("--at", type=int, default=20, help="step before which it does")
    args = parser.parse_args()
    if not torchrun():
        raise SystemExit("start it with moecomm launch --ranks 4")
    with group() as ranks:
        number, step, agreed = dist.get_rank(), 0, True
        sizes = {"hidden": HIDDEN, "num_experts": EXPERTS, "topk": TOPK, "max_tokens": TOKENS}
        with moecomm.Buffer(ranks, **sizes, dtype=torch.float32) as buffer:
            while step < args.steps:
                if (number, step) == (args.lose, args.at):
                    os.kill(os.getpid(), signal.SIGKILL)
                try:
                    if not agreed:
                        step, agreed = next_step(buffer, step), True
                    serve(buffer, step, number)
                    step += 1
                except moecomm.RoundFailed as error:
                    found, agreed = buffer.shrink(), False
                    say(f"rank {number}: {type(error).__name__}; without {found.lost}, on {buffer.num_ranks} ranks")
            say(f"rank {number}: served {step} steps, at last on {buffer.num_ranks} ranks")
    return 0


if __name__ == "__main__":
    sys.exit(main())
