"""What must come out, in float64, by the documentation: who holds which expert, which rows arrive where, and all sums.

Nothing here calls moecomm but `Placement.slots_of`, which docs/placement.md names as the specification of balanced
rounds.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import torch

import moecomm

from .case import Case, Inputs, Step, draw_placement, expert_weights, inputs

EPS = {"bfloat16": 2.0**-8, "float16": 2.0**-11, "float32": 2.0**-23}
INNER = 32  # of layers


@dataclass
class State:
    """What all ranks know at a step; each rank has its own, and all are alike.

    Attributes:
        case: of the sequence.
        members: numbers in the case of the ranks of the Buffer, in its order.
        alive: members that can open a Buffer.
        held: the expert in each slot of each rank.
        masked: ranks of the Buffer.
        choice: of replicas; None: no placement.
        opened: how often all ranks have opened Buffers, or taken others in.
        lost: whether experts may have no slot.
        known_domains: whether the ranks of domains are those of the opening.
        gone: members that have closed their Buffer, or ended, since the others have it.
    """

    case: Case
    members: list[int]
    alive: set[int]
    held: list[list[int]] = field(default_factory=list)
    masked: set[int] = field(default_factory=set)
    choice: str | None = None
    opened: int = 0
    released: bool = False
    lost: bool = False
    known_domains: bool = True
    gone: set[int] = field(default_factory=set)

    @classmethod
    def of(cls, case: Case) -> State:
        """Return the state before the first step."""
        state = cls(case, list(range(case.ranks)), set(range(case.ranks)))
        state.open(sorted(state.alive))
        return state

    def __getattr__(self, name: str) -> Any:
        return self.__dict__["case"].sizes[name]

    def open(self, members: list[int], seed: int | None = None) -> None:
        """Open a Buffer, or grow to one, of these members."""
        given = self.case.sizes.get("placement")
        self.members, self.opened, self.masked, self.released = members, self.opened + 1, set(), False
        self.lost, self.known_domains, self.gone = False, True, set()
        if given is None:
            self.choice, self.held = None, even(self.num_experts, len(members))
        else:
            self.choice = given["choice"]
            seed = given["seed"] if seed is None else seed
            self.held = draw_placement(seed, len(members), self.num_experts, given["spare"])

    def shrink(self, gone: set[int], keep_ids: bool) -> None:
        """Go on without members that are gone."""
        left = [rank for rank, member in enumerate(self.members) if member not in gone]
        keeps = keep_ids or self.choice is not None
        self.held = [self.held[rank] for rank in left] if keeps else even(self.num_experts, len(left))
        self.members, self.masked = [self.members[rank] for rank in left], set()
        self.lost = keeps and bool(set(range(self.num_experts)) - {e for mine in self.held for e in mine})
        self.released, self.known_domains = False, self.known_domains and not gone

    @property
    def there(self) -> list[int]:
        """Return the ranks that take part."""
        return [rank for rank in range(len(self.members)) if rank not in self.masked]

    @property
    def slots(self) -> int:
        """Return the number by which slots of ranks are apart."""
        return max(map(len, self.held))

    @property
    def several_domains(self) -> bool:
        """Return whether rows may cross domains."""
        return bool(self.case.sizes.get("domain_ranks"))

    def inputs(self, step: Step, rank: int) -> Inputs:
        """Return what a rank of the Buffer passes."""
        routing, sizes = step.options.get("routing", "distinct"), self.case.sizes
        return inputs(
            step.seed,
            self.members[rank],
            routing,
            sizes["hidden"],
            sizes["num_experts"],
            sizes["topk"],
            sizes["max_tokens"],
            sizes["dtype"],
        )

    def placement(self) -> moecomm.Placement:
        """Return the placement that the Buffer has."""
        return moecomm.Placement(self.held, num_experts=self.num_experts, slots=self.slots, choice=self.choice)  # type: ignore[arg-type]

    def present(self) -> dict[int, list[int]]:
        """Return the slots of each expert that there is, ascending."""
        found: dict[int, list[int]] = {}
        for rank in self.there:
            for nth, expert in enumerate(self.held[rank]):
                if expert >= 0:
                    found.setdefault(expert, []).append(rank * self.slots + nth)
        return found

    def slots_of(self, ids: list[torch.Tensor]) -> list[torch.Tensor] | None:
        """Return the slot of each entry of each rank, -1 for none; None: the documentation leaves it open."""
        slots_of, slots = self.present(), self.slots
        if self.choice == "balanced":
            if any(len(where) > 1 for where in slots_of.values()):
                return None if self.masked or self.lost else self._balanced(ids)
        elif self.choice == "nearest" and self.several_domains and not self.known_domains:
            return None
        found = []
        for rank, mine in enumerate(ids):
            out = torch.full(mine.shape, -1, dtype=torch.int64)
            for t, row in enumerate(mine.tolist()):
                for k, expert in enumerate(row):
                    where = slots_of.get(expert, [])
                    if self.choice == "nearest":
                        where = self._nearest(where, rank, slots)
                    if where:
                        out[t, k] = where[(t + k) % len(where)]
            found.append(out)
        return found

    def _nearest(self, where: list[int], rank: int, slots: int) -> list[int]:
        domain = self.case.sizes.get("domain_ranks") or len(self.members)
        own = [s for s in where if s // slots == rank]
        beside = [s for s in where if s // slots // domain == rank // domain]
        return own or beside or where

    def _balanced(self, ids: list[torch.Tensor]) -> list[torch.Tensor]:
        counts = torch.stack([torch.bincount(i[i >= 0].long().flatten(), minlength=self.num_experts) for i in ids])
        placement = self.placement()
        return [placement.slots_of(mine, rank, counts=counts) for rank, mine in enumerate(ids)]


def even(experts: int, ranks: int) -> list[list[int]]:
    """Return who holds which expert where nobody says: E/R in a row, the first E % R ranks one more."""
    sizes = [experts // ranks + (rank < experts % ranks) for rank in range(ranks)]
    return [list(range(sum(sizes[:rank]), sum(sizes[: rank + 1]))) for rank in range(ranks)]


@dataclass
class Round:
    """One dispatch, as the model has it.

    Attributes:
        sent: what each rank passed; ranks that take no part have passed nothing.
        ids: int64, -1 where no slot holds the expert.
        slots: of each entry; None: the documentation leaves the replica open.
        held: the experts of the slots at that time.
        there: ranks that took part.
    """

    sent: list[Inputs]
    ids: list[torch.Tensor]
    slots: list[torch.Tensor] | None
    held: list[list[int]]
    stride: int
    there: list[int]

    @classmethod
    def of(cls, state: State, step: Step, chunks: bool = False) -> Round:
        """Return the dispatch of a step.  `chunks`: it may go in several rounds."""
        sent, there = [state.inputs(step, rank) for rank in range(len(state.members))], state.there
        present = set(state.present())
        ids = []
        for rank, one in enumerate(sent):
            mine = one.ids.long().clone()
            mine[~torch.isin(mine, torch.tensor(sorted(present) or [-1]))] = -1
            ids.append(mine if rank in there else mine[:0])
        sent = [
            one if rank in there else Inputs(one.x[:0], one.ids[:0], None if one.weights is None else one.weights[:0])
            for rank, one in enumerate(sent)
        ]
        slots = state.slots_of(ids)
        if chunks and state.choice == "balanced":
            slots = None  # each of the rounds has counts of its own
        return cls(sent, ids, slots, [list(mine) for mine in state.held], state.slots, there)

    def groups(self, rank: int) -> list[list[tuple[int, int, int]]] | None:
        """Return (source rank, token, k) of the rows of each slot of a rank, in their order."""
        if self.slots is None:
            return None
        groups: list[list[tuple[int, int, int]]] = [[] for _ in self.held[rank]]
        for source, slots in enumerate(self.slots):
            for t, row in enumerate(slots.tolist()):
                for k, slot in enumerate(row):
                    if slot >= 0 and slot // self.stride == rank:
                        groups[slot % self.stride].append((source, t, k))
        return groups

    def flat(self, rank: int) -> list[tuple[int, int]] | None:
        """Return (source rank, token) of each flat row of a rank."""
        if self.slots is None:
            return None
        return [
            (source, t)
            for source, slots in enumerate(self.slots)
            for t, row in enumerate(slots.tolist())
            if any(slot >= 0 and slot // self.stride == rank for slot in row)
        ]


def factor(expert: int) -> float:
    """Return what an expert of a test multiplies its rows with."""
    return 0.5 + expert * 7 % 11 / 4


@dataclass
class Sum:
    """A result `[T, H]` in float64, and how much each element may be off."""

    want: torch.Tensor
    bound: torch.Tensor

    def check(self, what: str, got: torch.Tensor) -> None:
        """Raise AssertionError unless it is within the bound."""
        assert got.shape == self.want.shape, f"{what}: shape {tuple(got.shape)}, not {tuple(self.want.shape)}"
        wrong = ~((got.detach().double() - self.want).abs() <= self.bound)
        if bool(wrong.any()):
            at = tuple(wrong.nonzero()[0].tolist())
            rows = sorted({place[0] for place in wrong.nonzero().tolist()})
            raise AssertionError(
                f"{what}: {int(wrong.sum())} of {wrong.numel()} elements are wrong, in rows {rows[:8]}; first at {at}: "
                f"{float(got[at])} for {float(self.want[at])} +- {float(self.bound[at])}"
            )


def sum_of(
    mine: Inputs,
    ids: torch.Tensor,
    weights: torch.Tensor,
    wire: str | None,
    dtype: str,
    bias: torch.Tensor | None = None,
    rows: torch.Tensor | None = None,
) -> Sum:
    """Return what a combine returns to a rank, whose experts multiply rows with `factor`.

    Args:
        mine: of the rank.
        ids: `[T, K]`, -1 for experts that are not there.
        weights: float64 `[T, K]`.
        wire: of the combine.
        dtype: of the experts' rows and of the result.
        bias: added.
        rows: in place of `mine.x`.
    """
    x = (mine.x if rows is None else rows).double()
    factors = torch.tensor([[factor(e) if e >= 0 else 0.0 for e in row] for row in ids.tolist()]).double()
    each = (factors.reshape(ids.shape) * weights)[:, :, None] * x[:, None]  # [T, K, H]
    want, size = each.sum(dim=1), each.abs().sum(dim=1)
    loss = 3 * EPS[dtype] + 2.0**-18
    bound = loss * size + 1e-6
    widest = each.abs().amax(dim=2).sum(dim=1, keepdim=True) if x.shape[1] else size
    if wire == "fp8":
        bound = bound + size / 15 + widest * 2.0**-17
    if wire == "int8":
        bound = bound + widest / 240
    if bias is not None:
        want = want + bias.double()
        bound = bound + EPS[dtype] * bias.double().abs()
    return Sum(want, bound)


ACTIVATIONS = ("swiglu", "geglu", "geglu_tanh", "swigluoai", "swiglustep")


def activated(kind: str, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """Return the activation of a layer, as Buffer.moe documents it."""
    if kind == "swiglu":
        return gate * torch.sigmoid(gate) * up
    if kind == "geglu":
        return gate * 0.5 * (1 + torch.erf(gate / math.sqrt(2))) * up
    if kind == "geglu_tanh":
        return gate * 0.5 * (1 + torch.tanh(math.sqrt(2 / math.pi) * (gate + 0.044715 * gate**3))) * up
    up = up.clamp(-7.0, 7.0)
    if kind == "swiglustep":
        return (gate * torch.sigmoid(gate)).clamp(max=7.0) * up
    gate = gate.clamp(max=7.0)
    return (up + 1) * gate * torch.sigmoid(1.702 * gate)


def layer_of(
    mine: Inputs,
    ids: torch.Tensor,
    version: int,
    dtype: str,
    activation: str = "swiglu",
    biases: bool = False,
    tensors: dict[int, tuple[torch.Tensor, ...]] | None = None,
    x: torch.Tensor | None = None,
    weights: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return what a layer returns to a rank, in float64, with gradients if its arguments have them."""
    x = mine.x.double() if x is None else x
    weights = mine.used_weights if weights is None else weights
    out = torch.zeros_like(x)
    for expert in sorted(set(ids.flatten().tolist()) - {-1}):
        if tensors is None:
            w13, w2, b13, b2 = (w.double() for w in expert_weights(expert, version, x.shape[1], INNER, dtype))
        else:
            w13, w2, b13, b2 = tensors[expert]
        t, k = (ids == expert).nonzero(as_tuple=True)
        hidden = x[t] @ w13.T + (b13 if biases else 0)
        rows = activated(activation, *hidden.chunk(2, dim=1)) @ w2.T + (b2 if biases else 0)
        out = out.index_add(0, t, weights[t, k][:, None] * rows)
    return out


def near(want: torch.Tensor, dtype: str, loss: float | None = None) -> Sum:
    """Return a result of matrix products, whose rows may be off by a part of their largest element."""
    loss = {"bfloat16": 0.04, "float16": 0.008, "float32": 1e-4}[dtype] if loss is None else loss
    most = want.abs().amax(dim=-1, keepdim=True) if want.numel() else want
    return Sum(want, (loss * (most + (want.abs().max() if want.numel() else 0)) + 1e-5).expand_as(want))
