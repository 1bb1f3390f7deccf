"""Cases as data: sizes, steps that all ranks make, and the tensors that each rank passes, all from seeds."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import torch

NEVER = 3.0e4  # in weights of slots that hold no expert: seen in any sum that it gets into


@dataclass(frozen=True)
class Step:
    """One call of all ranks.

    Attributes:
        call: names a class of `calls.CALLS`.
        seed: of its tensors.
        options: plain values.  Those that the state of the ranks does not allow are ignored.
        fault: what goes wrong, `(kind, member, what)`; None: nothing.  The member counts among those that take part.
        then: how ranks go on after a fault that ends their rounds: "shrink", "shrink, ids kept", "mask" or "reopen".
    """

    call: str
    seed: int = 0
    options: dict[str, Any] = field(default_factory=dict)
    fault: tuple[str, int, str] | None = None
    then: str = "reopen"


@dataclass(frozen=True)
class Case:
    """A sequence of steps.

    Attributes:
        seed: that it was drawn from.
        ranks: their number.
        sizes: arguments of the Buffer; dtypes by name, a placement as arguments of `draw_placement`.
        steps: of all ranks.
    """

    seed: int
    ranks: int
    sizes: dict[str, Any]
    steps: tuple[Step, ...]


@dataclass(frozen=True)
class Inputs:
    """What one rank passes to a round: rows of the Buffer's dtype, ids of experts, their weights or None."""

    x: torch.Tensor
    ids: torch.Tensor
    weights: torch.Tensor | None

    @property
    def used_weights(self) -> torch.Tensor:
        """Return float64 `[T, K]`: 1 where the rank passes none."""
        return torch.ones(self.ids.shape).double() if self.weights is None else self.weights.double()


ROUTINGS = ("distinct", "distinct", "some", "duplicates", "one expert", "none")


@lru_cache(1 << 14)
def inputs(seed: int, member: int, routing: str, hidden: int, experts: int, topk: int, most: int, dtype: str) -> Inputs:
    """Draw the tokens of a member in a step.

    Args:
        seed: of the step.
        member: the rank's number in the case.
        routing: one of ROUTINGS.
        hidden, experts, topk, most, dtype: sizes; no more than `most` tokens.
    """
    rng, g = random.Random(f"{seed} {member}"), torch.Generator().manual_seed(seed * 64 + member)
    tokens = rng.choice([0, 1, most, most, rng.randint(0, most)])
    ids = torch.randint(0, experts, (tokens, topk), generator=g)
    if routing in ("distinct", "some") and topk <= experts:
        ids = torch.rand(tokens, experts, generator=g).argsort(dim=1)[:, :topk].contiguous()
    if routing == "some":
        ids[torch.rand(ids.shape, generator=g) < 0.4] = -1
    if routing == "one expert":
        ids[:] = seed % experts
    if routing == "none":
        ids[:] = -1
    x = torch.randn(tokens, hidden, generator=g).to(getattr(torch, dtype))
    weights = torch.rand(tokens, topk, generator=g) + 0.1 if rng.random() < 0.8 else None
    return Inputs(x, ids.to(torch.int32 if seed % 3 == 0 else torch.int64), weights)


def draw_placement(seed: int, ranks: int, experts: int, spare: int, slots: int | None = None) -> list[list[int]]:
    """Draw who holds which expert, `[ranks][slots]`, -1 for an empty slot: with replicas where there is room.

    Args:
        seed: of the placement.
        ranks, experts: their numbers.
        spare: slots of a rank beyond those that there have to be.
        slots: of a rank, in place of what `spare` says.
    """
    rng = random.Random(f"placement {seed} {ranks} {experts}")
    slots = -(-experts // ranks) + spare if slots is None else slots
    held: list[list[int]] = [[] for _ in range(ranks)]
    for expert in rng.sample(range(experts), experts):
        held[rng.choice([rank for rank in range(ranks) if len(held[rank]) < slots])].append(expert)
    for mine in held:
        while len(mine) < slots:
            mine.append(rng.choice([-1, rng.randrange(experts)]))
        rng.shuffle(mine)
    return held


@lru_cache(1 << 12)
def expert_weights(expert: int, version: int, hidden: int, inner: int, dtype: str) -> tuple[torch.Tensor, ...]:
    """Draw w13 `[2 I, H]`, w2 `[H, I]`, and biases `[2 I]` and `[H]` of an expert; -1: of an empty slot."""
    shapes, kind = ((2 * inner, hidden), (hidden, inner), (2 * inner,), (hidden,)), getattr(torch, dtype)
    if expert < 0:
        return tuple(torch.full(shape, NEVER, dtype=kind) for shape in shapes)
    g = torch.Generator().manual_seed(version * 1000 + expert)
    scales = hidden**-0.5, inner**-0.5, 0.3, 0.3
    return tuple(
        (torch.randn(shape, generator=g) * scale).to(kind) for shape, scale in zip(shapes, scales, strict=True)
    )
