"""Training of a small recommendation model (DLRM) on 4 CPU ranks, and again on one, with bit-identical losses.

    python examples/dlrm.py

Embedding tables are spread over the ranks, and so is the batch. embedding_all_to_all looks up the whole batch in the
tables of a rank, and returns to each rank the samples that it has. All other parameters have a replica on every rank.

A step's batch has 4 shards. A rank computes one shard at a time, however many it has, and gradients of the replicas are
added shard by shard, so that both runs do the same operations in the same order.
"""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist
from torch.nn.functional import binary_cross_entropy_with_logits as cross_entropy
from two_runs import train_twice

from moecomm import overlap

SHARDS, SAMPLES, TABLES, ROWS, LOOKUPS, WIDTH, DENSE = 4, 32, 8, 40, 3, 8, 4


def replica() -> list[torch.Tensor]:
    """Draw the parameters that every rank has: layers below and above the interactions of features."""
    generator = torch.Generator().manual_seed(0)
    pairs = (TABLES + 1) * TABLES // 2
    sizes = [(WIDTH, DENSE), (32, WIDTH + pairs), (1, 32)]
    return [(torch.randn(n, k, generator=generator) / k**0.5).requires_grad_() for n, k in sizes]


def logits(parameters: list[torch.Tensor], dense: torch.Tensor, bags: torch.Tensor) -> torch.Tensor:
    """Compute the model above the tables for one shard: dense `[SAMPLES, DENSE]`, bags `[TABLES, SAMPLES, WIDTH]`."""
    below, above, last = parameters
    bottom = torch.relu(dense @ below.T)
    features = torch.cat([bottom.unsqueeze(1), bags.transpose(0, 1)], dim=1)
    first, second = torch.tril_indices(TABLES + 1, TABLES + 1, -1)
    products = (features @ features.mT)[:, first, second]
    return (torch.relu(torch.cat([bottom, products], dim=1) @ above.T) @ last.T).squeeze(1)


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Draw indices `[TABLES, samples, LOOKUPS]`, dense features, and clicks that depend on both."""
    generator, count = torch.Generator().manual_seed(step + 1), SHARDS * SAMPLES
    indices = torch.randint(-1, ROWS, (TABLES, count, LOOKUPS), generator=generator)
    dense = torch.randn(count, DENSE, generator=generator)
    clicks = (indices[0] % 2 == 0).sum(dim=1) + dense[:, 0] > LOOKUPS / 2
    return indices, dense, clicks.float()


def in_order(parts: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Add the parts `[shards here, ...]` of all shards, in the order of shards."""
    everybody = [torch.empty_like(parts) for _ in range(group.size())]
    dist.all_gather(everybody, parts, group=group)
    return sum(torch.cat(everybody).unbind(), torch.zeros(()))


def train(group: dist.ProcessGroup, steps: int) -> list[float]:
    """Train on one rank; returns the loss of every step."""
    torch.set_num_threads(1)
    rank, ranks, losses = group.rank(), group.size(), []
    mine, here = slice(rank * TABLES // ranks, (rank + 1) * TABLES // ranks), SHARDS // ranks
    tables = (torch.randn(TABLES, ROWS, WIDTH, generator=torch.Generator().manual_seed(1)) / 2)[mine].requires_grad_()
    parameters = replica()
    optimizer = torch.optim.Adam([tables, *parameters], lr=1e-2)
    with overlap.Workspace(group, 1 << 20, backend="host") as workspace:
        for step in range(steps):
            indices, dense, clicks = batch(step)
            bags = overlap.embedding_all_to_all(tables, indices[mine], workspace).flatten(0, 1)  # of all tables
            found: list[tuple[torch.Tensor, ...]] = []
            for shard, of_shard in enumerate(bags.detach().chunk(here, dim=1)):
                samples = slice((rank * here + shard) * SAMPLES, (rank * here + shard + 1) * SAMPLES)
                leaf = of_shard.requires_grad_()
                wrong = cross_entropy(logits(parameters, dense[samples], leaf), clicks[samples], reduction="sum")
                found.append((wrong.detach(), leaf, *torch.autograd.grad(wrong, [leaf, *parameters])))
            bags.backward(torch.cat([grads[2] for grads in found], dim=1))
            for parameter, grads in zip(parameters, list(zip(*found, strict=True))[3:], strict=True):
                parameter.grad = in_order(torch.stack(grads), group)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(float(in_order(torch.stack([wrong for wrong, *_ in found]), group)) / len(clicks))
    return losses


def main() -> int:
    """Train on several ranks and on one; returns the exit code."""
    several, one = train_twice("dlrm:train", "nats a sample")
    print(f"largest difference: {max(abs(a - b) for a, b in zip(several, one, strict=True))}")
    return 0 if several == one else 1


if __name__ == "__main__":
    sys.exit(main())
