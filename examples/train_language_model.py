"""Training of a language model with mixture-of-experts layers on 4 ranks, and again on one, with bit-identical losses.

    python examples/train_language_model.py
    torchrun --nproc-per-node 4 examples/train_language_model.py

Started by itself, the program launches its ranks. Under torchrun (1, 2 or 4 processes) it uses those processes, and
rank 0 then trains alone.

The model has two layers, each with causal attention and 8 experts of which a token takes 2. It trains on the bytes of
the manual that comes with Python. A step's batch has four shards. Each of 4 ranks has one shard and two experts; a
single rank has all of them.

Both runs give the same bits for three reasons:

- Embeddings, attention and gates work on one shard at a time in either run, and their gradients are added shard by
  shard, in one order.
- An expert sees the same rows in the same order (by source rank, then token) on any rank, so it computes the same sums.
- With topk = 2, combine adds two numbers for a token, and the sum of two numbers does not depend on their order.

So the bound on the difference is 0.
"""

from __future__ import annotations

import argparse
import sys
from itertools import chain
from pydoc_data.topics import topics
from typing import Any

import torch
import torch.distributed as dist
from launched import group as launched_group
from launched import torchrun
from torch.nn.functional import cross_entropy, rms_norm, scaled_dot_product_attention
from torch.nn.utils import parameters_to_vector

from moecomm.nn import ExpertParallel, Gate
from moecomm.router import Gating
from moecomm.tools.launch import launch

SHARDS, SEQUENCES, LENGTH = 4, 4, 32  # of a batch, of a shard, of a sequence in bytes
VOCABULARY, HIDDEN, INTERMEDIATE, HEADS = 256, 64, 64, 4
LAYERS, EXPERTS, TOPK = 2, 8, 2


class Dense(torch.nn.Module):
    """All parameters but those of the experts. Every shard has a replica."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)

        def drawn(rows: int, columns: int) -> torch.nn.Parameter:
            return torch.nn.Parameter(torch.randn(rows, columns, generator=generator) / columns**0.5)

        self.embedding, self.positions = drawn(VOCABULARY, HIDDEN), drawn(LENGTH, HIDDEN)
        self.qkv = torch.nn.ParameterList([drawn(3 * HIDDEN, HIDDEN) for _ in range(LAYERS)])
        self.out = torch.nn.ParameterList([drawn(HIDDEN, HIDDEN) for _ in range(LAYERS)])
        self.gates = torch.nn.ModuleList([Gate(Gating(HIDDEN, EXPERTS, TOPK), seed=n) for n in range(LAYERS)])

    def embed(self, text: torch.Tensor) -> torch.Tensor:
        """Embed bytes [sequences, length] as states [sequences * length, HIDDEN]."""
        return (self.embedding[text] + self.positions).flatten(0, 1)

    def attend(self, layer: int, states: torch.Tensor) -> torch.Tensor:
        """Return the states plus the output of attention layer `layer`."""
        x = rms_norm(states, (HIDDEN,)) @ self.qkv[layer].T
        q, k, v = x.view(SEQUENCES, LENGTH, 3, HEADS, HIDDEN // HEADS).permute(2, 0, 3, 1, 4)
        mixed = scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(states.shape)
        return states + mixed @ self.out[layer].T

    def loss(self, states: torch.Tensor, text: torch.Tensor) -> torch.Tensor:
        """Return the cross entropy of the next bytes, summed, in nats."""
        logits = rms_norm(states, (HIDDEN,)) @ self.embedding.T
        return cross_entropy(logits, text.flatten(), reduction="sum")


def forward(replicas: list[Dense], layers: list[ExpertParallel], batch: list[torch.Tensor]) -> list[torch.Tensor]:
    """Return the loss of each shard of this rank."""
    states = [dense.embed(text[:, :-1]) for dense, text in zip(replicas, batch, strict=True)]
    for n, layer in enumerate(layers):
        states = [dense.attend(n, x) for dense, x in zip(replicas, states, strict=True)]
        normed = [rms_norm(x, (HIDDEN,)) for x in states]
        routing = [dense.gates[n](x) for dense, x in zip(replicas, normed, strict=True)]
        topk_idx, topk_weights = (torch.cat(parts) for parts in zip(*routing, strict=True))
        out = layer(torch.cat(normed), topk_idx, topk_weights)
        states = [x + y for x, y in zip(states, out.split(SEQUENCES * LENGTH), strict=True)]
    return [dense.loss(x, text[:, 1:]) for dense, x, text in zip(replicas, states, batch, strict=True)]


def sum_over_shards(parts: list[torch.Tensor], group: dist.ProcessGroup) -> torch.Tensor:
    """Add the parts of all shards in shard order; an all-reduce would leave the order open."""
    mine = torch.stack(parts)
    everybody = [torch.empty_like(mine) for _ in range(group.size())]
    dist.all_gather(everybody, mine, group=group)
    first, *others = chain.from_iterable(everybody)
    for part in others:
        first = first + part
    return first


def shard_of(text: torch.Tensor, step: int, shard: int) -> torch.Tensor:
    """Draw sequences [SEQUENCES, LENGTH + 1] from the text; their last byte is only a target."""
    generator = torch.Generator().manual_seed(step * SHARDS + shard)
    begin = torch.randint(len(text) - LENGTH, (SEQUENCES, 1), generator=generator)
    return text[begin + torch.arange(LENGTH + 1)]


def train(group: dist.ProcessGroup, steps: int) -> list[float]:
    """Train on one rank; returns the loss of every step, in nats per byte."""
    torch.set_num_threads(1)  # equal in both runs, because threads split sums
    text = torch.frombuffer(bytearray("\n".join(map(topics.get, sorted(topics))).encode()), dtype=torch.uint8).long()
    per_rank = SHARDS // group.size()
    mine = range(group.rank() * per_rank, (group.rank() + 1) * per_rank)
    replicas = [Dense() for _ in mine]
    sizes: dict[str, Any] = {"hidden": HIDDEN, "intermediate": INTERMEDIATE, "num_experts": EXPERTS, "topk": TOPK}
    layers = [
        ExpertParallel(group, **sizes, max_tokens=per_rank * SEQUENCES * LENGTH, gate=None, seed=n, backend="host")
        for n in range(LAYERS)
    ]
    dense = [list(replica.parameters()) for replica in replicas]
    optimizer = torch.optim.Adam([*chain(*dense), *chain(*(layer.parameters() for layer in layers))], lr=3e-3)
    losses = []
    for step in range(steps):
        parts = forward(replicas, layers, [shard_of(text, step, shard) for shard in mine])
        (sum(parts) / (SHARDS * SEQUENCES * LENGTH)).backward()
        grad = sum_over_shards([parameters_to_vector(p.grad for p in replica) for replica in dense], group)
        for replica in dense:
            begin = 0
            for p in replica:
                p.grad.copy_(grad[begin : begin + p.numel()].view_as(p))
                begin += p.numel()
        optimizer.step()
        optimizer.zero_grad()
        total = sum_over_shards([part.detach() for part in parts], group)
        losses.append(float(total) / (SHARDS * SEQUENCES * LENGTH))
    return losses


def compare(several: list[float], one: list[float], ranks: int) -> int:
    """Print both curves and their largest difference; returns 1 if they differ, else 0."""
    print(f"step   {ranks} ranks    one rank   (nats a byte)")
    for step in [*range(0, len(one), max(1, len(one) // 10)), len(one) - 1]:
        print(f"{step:4d}  {several[step]:9.6f}  {one[step]:9.6f}")
    print(f"largest difference: {max(abs(a - b) for a, b in zip(several, one, strict=True))}")
    return 0 if several == one else 1


def under_torchrun(steps: int) -> int:
    """Train in the processes of torchrun: on all ranks, then on rank 0 alone."""
    with launched_group() as ranks:
        if SHARDS % ranks.size():
            raise SystemExit(f"torchrun: got {ranks.size()} processes; want 1, 2 or 4")
        several = train(ranks, steps)
        alone = dist.new_group([0])
        return compare(several, train(alone, steps), ranks.size()) if ranks.rank() == 0 else 0


def main() -> int:
    """Train on several ranks and on one; returns the exit code."""
    parser = argparse.ArgumentParser(description="Trains the same model on several ranks and on one.")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--ranks", type=int, default=4, choices=[1, 2, 4], help="Not under torchrun.")
    options = parser.parse_args()
    if options.steps < 1:
        parser.error(f"--steps: got {options.steps}; want 1 or more")
    if torchrun():
        return under_torchrun(options.steps)
    several, one = (launch("train_language_model:train", {"steps": options.steps}, n)[0] for n in (options.ranks, 1))
    return compare(several, one, options.ranks)


if __name__ == "__main__":
    sys.exit(main())
