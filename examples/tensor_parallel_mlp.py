"""Training of a tensor-parallel MLP on 4 CPU ranks, and again on one.

    python examples/tensor_parallel_mlp.py

Rows of tokens are spread over the ranks outside of the MLP, columns of the inner layer inside of it. The first product
gathers the rows, and the second adds up what the ranks computed and returns each its rows. The backward pass does the
same the other way round.

Weights are float32, and cast to bfloat16 for products. A rank's part of the output is rounded to bfloat16 before the
parts are added, so the losses of both runs agree to the precision of bfloat16.
"""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist
from torch.nn.functional import gelu
from two_runs import train_twice

from moecomm import overlap

TOKENS, HIDDEN, INNER = 64, 32, 128
CLOSE = 2.0**-7  # relative difference of losses: the spacing of bfloat16


class Mlp(torch.nn.Module):
    """Rank r's columns of an MLP of INNER columns."""

    def __init__(self, workspace: overlap.Workspace) -> None:
        super().__init__()
        self.workspace = workspace
        generator = torch.Generator().manual_seed(0)
        w1 = torch.randn(INNER, HIDDEN, generator=generator) / HIDDEN**0.5
        w2 = torch.randn(HIDDEN, INNER, generator=generator) / INNER**0.5
        rank, ranks = workspace.rank, workspace.num_ranks
        self.w1 = torch.nn.Parameter(w1.chunk(ranks)[rank].clone())
        self.w2 = torch.nn.Parameter(w2.chunk(ranks, dim=1)[rank].clone())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map this rank's rows `[TOKENS / ranks, HIDDEN]` of bfloat16 to rows of the output."""
        inner = overlap.all_gather_matmul(x, self.w1.bfloat16(), self.workspace)
        return overlap.matmul_reduce_scatter(gelu(inner), self.w2.bfloat16(), self.workspace)


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw tokens and what a fixed function makes of them, both `[TOKENS, HIDDEN]`."""
    x = torch.randn(TOKENS, HIDDEN, generator=torch.Generator().manual_seed(step + 1)).bfloat16()
    return x, (x.float() * 2).sin() + x.float().roll(1, dims=1)


def train(group: dist.ProcessGroup, steps: int) -> list[float]:
    """Train on one rank; returns the loss of every step, which is the mean over the tokens of all ranks."""
    torch.set_num_threads(1)
    losses = []
    with overlap.Workspace(group, 1 << 20, backend="host") as workspace:
        mlp = Mlp(workspace)
        optimizer = torch.optim.Adam(mlp.parameters(), lr=3e-3)
        for step in range(steps):
            x, target = (rows.chunk(workspace.num_ranks)[workspace.rank] for rows in batch(step))
            loss = (mlp(x).float() - target).square().sum() / (TOKENS * HIDDEN)
            loss.backward()  # of the sum of all ranks' losses: no gradient needs another exchange
            optimizer.step()
            optimizer.zero_grad()
            total = loss.detach()
            dist.all_reduce(total, group=group)
            losses.append(float(total))
    return losses


def main() -> int:
    """Train on several ranks and on one; returns the exit code."""
    several, one = train_twice("tensor_parallel_mlp:train", "squared error")
    difference = max(abs(a - b) / b for a, b in zip(several, one, strict=True))
    print(f"largest relative difference: {difference:.5f}")
    return 0 if difference < CLOSE else 1


if __name__ == "__main__":
    sys.exit(main())
