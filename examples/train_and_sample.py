"""Reinforcement learning on trainer ranks and engine ranks: the engine samples, the trainer learns from that.

    python examples/train_and_sample.py

Ranks 0 and 1 train, ranks 2 and 3 sample, in another placement with replicas of two experts. Before each batch,
moecomm.transfer brings all weights to the engine, whose ranks switch together: experts by one transfer, and all other
weights, which every rank has, by another.

The trainer computes the logits of sampled tokens again. They equal those of the engine bit for bit, for three reasons:

- The weights are the same: they are verified on arrival, and all engine ranks switch at once.
- `wire="rows"` adds the outputs of a token's experts in one order, whatever the ranks, the batch or the placement.
- Products are computed row by row: with more rows, torch may add in another order.

A token is rewarded if it is the successor, by number, of the token before it.
"""

from __future__ import annotations

import argparse
import sys
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.functional import log_softmax, silu

import moecomm
from moecomm import ops
from moecomm.tools.launch import launch
from moecomm.transfer import WeightTransfer

VOCABULARY, HIDDEN, INNER, EXPERTS, TOPK = 16, 16, 16, 6, 2
SEQUENCES, LENGTH = 8, 6  # of an engine rank, in a step
TRAINERS, ENGINES = [0, 1], [2, 3]
TRAINED, SAMPLED = [[0, 1, 2], [3, 4, 5]], [[0, 1, 2, 3], [4, 5, 0, 3]]  # experts of trainer and of engine ranks
SHAPES = {"w13": (2 * INNER, HIDDEN), "w2": (HIDDEN, INNER)}
DENSE = {"embedding": (VOCABULARY, HIDDEN), "gate": (EXPERTS, HIDDEN), "head": (VOCABULARY, HIDDEN)}
Weights = dict[str, torch.Tensor]


def drawn(shapes: dict[str, tuple[int, ...]], *seed: int) -> Weights:
    """Draw tensors that are the same on all ranks."""
    generator = torch.Generator().manual_seed(hash(seed) % 2**31)
    return {name: torch.randn(shape, generator=generator) / shape[-1] ** 0.5 for name, shape in shapes.items()}


def product(rows: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """Return rows @ w.T, computed row by row."""
    return torch.stack([w @ row for row in rows]) if len(rows) else rows @ w.T


def logits_of(buffer: moecomm.Buffer, tokens: torch.Tensor, experts: Weights, dense: Weights) -> torch.Tensor:
    """Return the logits of the token after each one, `[tokens, VOCABULARY]`.  All ranks of the Buffer call it."""
    x = dense["embedding"][tokens]
    chances, ids = product(x, dense["gate"]).softmax(dim=1).topk(TOPK)
    routed = ops.dispatch(buffer, x, ids, chances)
    counts = routed.tokens_per_expert.tolist()
    parts = []
    for slot, rows in enumerate(routed.x[: sum(counts)].split(counts)):
        gate, up = product(rows, experts["w13"][slot]).chunk(2, dim=1)
        parts.append(product(silu(gate) * up, experts["w2"][slot]))
    y = torch.cat([*parts, routed.x[sum(counts) :]])
    return product(x + ops.combine(y, routed.handle, wire="rows"), dense["head"])


@torch.no_grad()
def sample(buffer: moecomm.Buffer, experts: Weights, dense: Weights, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return tokens `[SEQUENCES, LENGTH + 1]` and the logits from which each but the first was drawn."""
    generator = torch.Generator().manual_seed(seed)
    text = torch.randint(VOCABULARY, (SEQUENCES, 1), generator=generator)
    said = []
    for _ in range(LENGTH):
        said.append(logits_of(buffer, text[:, -1], experts, dense))
        text = torch.cat((text, said[-1].softmax(dim=1).multinomial(1, generator=generator)), dim=1)
    return text, torch.stack(said, dim=1)


def rewards(text: torch.Tensor) -> torch.Tensor:
    """Return 1 for each token that is the successor of the one before it, else 0."""
    return (text[:, 1:] == (text[:, :-1] + 1) % VOCABULARY).float()


def gathered(
    group: dist.ProcessGroup, mine: torch.Tensor | None, shape: tuple[int, ...], dtype: torch.dtype
) -> list[torch.Tensor]:
    """Return the tensors of all engine ranks, on every rank; trainers pass None."""
    everybody = [torch.empty(shape, dtype=dtype) for _ in range(group.size())]
    dist.all_gather(everybody, torch.zeros(shape, dtype=dtype) if mine is None else mine, group=group)
    return [everybody[rank] for rank in ENGINES]


def run(group: dist.ProcessGroup, steps: int) -> dict[str, Any]:
    """Train or sample on one rank; return the mean reward of each step, and whether all its logits were equal."""
    torch.set_num_threads(1)
    trains = group.rank() in TRAINERS
    groups = [dist.new_group(ranks) for ranks in (TRAINERS, ENGINES)]
    none: list[list[int]] = [[], []]
    source, target = (moecomm.Placement(held) for held in (TRAINED + none, none + SAMPLED))
    whole = {"source": moecomm.Placement([[0], [0], [], []]), "target": moecomm.Placement([[], [], [0], [0]])}
    own = TRAINED if trains else SAMPLED
    sizes: dict[str, Any] = {"hidden": HIDDEN, "num_experts": EXPERTS, "topk": TOPK, "dtype": torch.float32}
    sizes |= {"max_tokens": SEQUENCES * LENGTH, "placement": moecomm.Placement(own), "backend": "host"}
    about: dict[str, Any] = {"dtype": torch.float32, "backend": "host"}
    with (
        moecomm.Buffer(groups[0 if trains else 1], **sizes) as buffer,
        WeightTransfer(group, SHAPES, source=source, target=target, **about) as of_experts,
        WeightTransfer(group, DENSE, **whole, **about) as of_dense,
    ):
        held = own[buffer.rank]
        if not trains:  # zeros until the first weights arrive
            experts = {name: torch.zeros(len(held), *shape) for name, shape in SHAPES.items()}
            dense = {name: torch.zeros(shape) for name, shape in DENSE.items()}
        else:
            each = [drawn(SHAPES, 1, expert) for expert in held]
            experts = {name: torch.stack([one[name] for one in each]).requires_grad_() for name in SHAPES}
            dense = {name: tensor.requires_grad_() for name, tensor in drawn(DENSE, 2).items()}
            optimizer = torch.optim.Adam([*experts.values(), *dense.values()], lr=0.03)
        means, same = [], True
        for step in range(steps):
            of_experts.stage(experts if trains else None)
            of_dense.stage({name: tensor[None] for name, tensor in dense.items()} if trains else None)
            if not trains:
                of_experts.commit(experts, also={of_dense: {name: tensor[None] for name, tensor in dense.items()}})
            mine = None if trains else sample(buffer, experts, dense, 2 * step + buffer.rank)
            texts = gathered(group, mine and mine[0], (SEQUENCES, LENGTH + 1), torch.int64)
            said = gathered(group, mine and mine[1], (SEQUENCES, LENGTH, VOCABULARY), torch.float32)
            means.append(float(rewards(torch.cat(texts)).mean()))
            if not trains:
                continue
            text, sampled = texts[buffer.rank], said[buffer.rank]
            found = logits_of(buffer, text[:, :-1].flatten(), experts, dense).view(sampled.shape)
            same = same and torch.equal(found, sampled)
            chosen = log_softmax(found, dim=2).gather(2, text[:, 1:, None]).squeeze(2)
            loss = -(chosen * (rewards(text) - means[-1])).mean() / len(TRAINERS)
            optimizer.zero_grad()
            loss.backward()
            for tensor in dense.values():
                dist.all_reduce(tensor.grad, group=groups[0])
            optimizer.step()
    return {"rewards": means, "same": same}


def main() -> int:
    """Train; return 1 if a logit of trainer and engine differs, else 0."""
    parser = argparse.ArgumentParser(description="Train and sample on separate ranks.")
    parser.add_argument("--steps", type=int, default=60, help="Steps of training.")
    options = parser.parse_args()
    found = launch("train_and_sample:run", {"steps": options.steps}, len(TRAINERS) + len(ENGINES))
    print("step   mean reward")
    means = found[0]["rewards"]
    for step in [*range(0, len(means), max(1, len(means) // 6)), len(means) - 1]:
        print(f"{step:4d}   {means[step]:.3f}")
    same = all(one["same"] for one in found)
    print(f"logits of trainer and engine: {'equal to the bit' if same else 'different'}")
    return 0 if same else 1


if __name__ == "__main__":
    sys.exit(main())
