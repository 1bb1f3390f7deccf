"""Placement of experts on ranks by their load: plans with replicas of hot experts, and the copies from one to another.

A plan says which expert is in each *slot*, a place for the weights of one expert.  Slots (physical experts) are
numbered from rank 0 on.  Tables are named and shaped as EPLB's (github.com/deepseek-ai/EPLB), and as vLLM and SGLang
hold them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch._subclasses.fake_tensor import FakeTensor

from moecomm import _native
from moecomm.base.choices import ReplicaChoice
from moecomm.base.experts import experts_of
from moecomm.base.placement import Placement, candidates
from moecomm.base.replicas import shares
from moecomm.base.validation import check_dense, check_integer, check_name, check_same_device, is_integer
from moecomm.errors import BadInput

__all__ = ["Move", "Plan", "moves", "plan"]

Policy = Literal["eplb", "spread"]
Choice = Literal["even", "nearest"]
POLICIES: tuple[Policy, ...] = ("eplb", "spread")
Taken = Literal["even", "nearest", "balanced"]  # how replicas are, by which loads are predicted
CHOICES: tuple[Choice, ...] = ("even", "nearest")
TAKEN: tuple[Taken, ...] = ("even", "nearest", "balanced")
_PARTS = 1 << 30  # of a layer's load, as whole numbers
MOST_RANKS, MOST_SLOTS = 1 << 12, 1 << 16


@dataclass(frozen=True, eq=False)
class Plan:
    """The experts of all slots, in each layer.

    L layers, E experts, P slots (at most 2^16), R ranks (at most 4096).  Tensors are copied to the CPU, as int64.

    Attributes:
        log2phy: `[L, E, X]`, the slots of each expert, in any order; padded by -1.
        logcnt: `[L, E]`, how many slots an expert has.
        phy2log: `[L, P]`, the expert of each slot.
        slots: the number of slots of each rank; 0 is allowed.
        nodes: of ranks, R / nodes consecutive ones on each: NVLink domains, or what else is fast inside.

    Raises:
        BadInput: an expert without a slot, tables that disagree, or other sizes than these.
    """

    log2phy: torch.Tensor
    logcnt: torch.Tensor
    phy2log: torch.Tensor
    slots: tuple[int, ...]
    nodes: int = 1

    def __post_init__(self) -> None:
        for name, axes in (("log2phy", "[L, E, X]"), ("logcnt", "[L, E]"), ("phy2log", "[L, P]")):
            object.__setattr__(self, name, _table(name, getattr(self, name), axes))
        if is_integer(self.slots):
            raise BadInput("slots", self.slots, "the number of slots of each rank")
        object.__setattr__(self, "slots", _slots(self.slots, None, 0))
        if sum(self.slots) != self.phy2log.shape[1]:
            raise BadInput("slots", f"{sum(self.slots)} in all", f"{self.phy2log.shape[1]}, as phy2log")
        _check_nodes(self.nodes, self.ranks)
        layers, experts, width = self.log2phy.shape
        if self.logcnt.shape != (layers, experts):
            raise BadInput("logcnt", tuple(self.logcnt.shape), f"[{layers}, {experts}], as log2phy")
        if len(self.phy2log) != layers:
            raise BadInput("phy2log", f"{len(self.phy2log)} layers", f"{layers}, as log2phy")
        _check_experts(self.phy2log, experts)
        count = _counted(self.phy2log, experts)
        if not torch.equal(count, self.logcnt):
            raise BadInput("logcnt", _differing(self.logcnt, count), "the number of slots of each expert in phy2log")
        held = torch.arange(width) < count.unsqueeze(-1)
        of_slot = self.phy2log.unsqueeze(1).expand(-1, experts, -1)
        named = self.log2phy.clamp(0, self.phy2log.shape[1] - 1)
        agree = (named == self.log2phy) & (of_slot.gather(2, named) == torch.arange(experts).unsqueeze(-1))
        ordered = torch.where(held, self.log2phy, torch.arange(width) - width).sort(dim=-1).values
        distinct = (ordered[..., 1:] != ordered[..., :-1]).all() if width > 1 else torch.tensor(True)
        if width < count.max() or not torch.where(held, agree, self.log2phy == -1).all() or not distinct:
            raise BadInput("log2phy", "other slots", "the slots of each expert in phy2log, then -1")

    @classmethod
    def from_phy2log(
        cls,
        phy2log: torch.Tensor,
        *,
        ranks: int | None = None,
        slots: Sequence[int] | None = None,
        num_experts: int | None = None,
        nodes: int = 1,
    ) -> Plan:
        """Make the plan of `phy2log` alone.  An expert's slots are in rising order.

        Args:
            phy2log: `[L, P]`, or `[P]` for one layer; of any integer type.
            ranks: which share the slots; the first P % ranks have one more than the others.
            slots: instead: the number of slots of each rank.
            num_experts: E.  None: one more than the largest expert, for each has a slot.
            nodes: see Plan.

        Raises:
            BadInput: see Plan.
        """
        table = _table("phy2log", phy2log[None] if _has_dims(phy2log, 1) else phy2log, "[L, P]")
        of_ranks = _slots(slots, ranks, table.shape[1])
        if num_experts is None:
            num_experts = int(table.max()) + 1
        check_integer("num_experts", num_experts, 1, MOST_SLOTS)
        _check_experts(table, num_experts)
        order = table.sort(dim=1, stable=True)
        return cls._of(table, order.values, order.indices, num_experts, of_ranks, nodes)

    @classmethod
    def _of(
        cls,
        phy2log: torch.Tensor,
        expert: torch.Tensor,
        slot: torch.Tensor,
        experts: int,
        slots: tuple[int, ...],
        nodes: int,
    ) -> Plan:
        """Make a plan; `expert` and `slot` [L, P] list the slots of each expert in the order of log2phy."""
        count = _counted(phy2log, experts)
        width = int(count.max())
        begin = count.cumsum(1) - count
        replica = torch.arange(phy2log.shape[1]) - begin.gather(1, expert)
        log2phy = torch.full((len(phy2log), experts * width), -1)
        log2phy.scatter_(1, expert * width + replica, slot)
        return cls(log2phy.view(-1, experts, width), count, phy2log, slots, nodes)

    @property
    def ranks(self) -> int:
        """R."""
        return len(self.slots)

    @property
    def num_experts(self) -> int:
        """E."""
        return self.logcnt.shape[1]

    def rank_of_slot(self) -> torch.Tensor:
        """Return the rank of each slot: int64 `[P]`."""
        return torch.arange(self.ranks).repeat_interleave(torch.tensor(self.slots))

    def placement(self, layer: int = 0, *, choice: ReplicaChoice = "token") -> Placement:
        """Return the placement of a layer for a Buffer, whose ranks all have as many slots as the one with most.

        Args:
            layer: its number.
            choice: see Placement.

        Raises:
            BadInput: no such layer.
        """
        check_integer("layer", layer, 0, len(self.phy2log) - 1)
        experts = [part.tolist() for part in torch.split(self.phy2log[layer], list(self.slots))]
        return Placement(experts, num_experts=self.logcnt.shape[1], choice=choice)

    def rank_loads(self, load: torch.Tensor, choice: Taken = "even") -> torch.Tensor:
        """Predict the load of each rank: float64 `[L, R]`, in the unit of `load`.

        Args:
            load: of experts, `[L, E]`, or `[E]` for all layers: tokens, or anything in proportion.
            choice: how tokens choose among the replicas of an expert.  "even": replicas share its load evenly.
                "nearest": a token takes a replica on the node of its rank, evenly if there are several, and any replica
                if there is none; all nodes send equally many tokens.  "balanced": as a Buffer with that choice divides
                tokens in a round with this load.

        Raises:
            BadInput: a load of another shape, one that is negative or not finite, or an unknown choice.
        """
        of_experts = _load(load, self.phy2log.shape[0], self.num_experts)
        check_name("choice", choice, TAKEN)
        if choice == "balanced":
            return torch.stack([self._balanced(layer, load) for layer, load in enumerate(of_experts)])
        of_slots = of_experts.gather(1, self.phy2log) * self._shares(choice)
        return torch.zeros(len(of_slots), self.ranks, dtype=torch.float64).index_add_(1, self.rank_of_slot(), of_slots)

    def predicted(self, load: torch.Tensor, choice: Taken = "even") -> torch.Tensor:
        """Predict the load of the busiest rank over the mean of those that have slots: float64 `[L]`; 1 without load.

        Arguments and errors are those of rank_loads().
        """
        loads = self.rank_loads(load, choice)
        mean = loads.sum(1) / sum(count > 0 for count in self.slots)
        return torch.where(mean > 0, loads.amax(1) / mean, 1.0)

    def crossing(self, load: torch.Tensor) -> torch.Tensor:
        """Predict the share of the load that leaves the node of its tokens under "nearest": float64 `[L]`.

        Arguments and errors are those of rank_loads().
        """
        of_experts = _load(load, self.phy2log.shape[0], self.num_experts)
        away = (self._on_nodes() == 0).double().mean(2)
        return (of_experts * away).sum(1) / of_experts.sum(1).clamp(min=torch.finfo(torch.float64).tiny)

    def _balanced(self, layer: int, load: torch.Tensor) -> torch.Tensor:
        """Return the loads of ranks in a layer: float64 [R]."""
        placement, unit = self.placement(layer, choice="balanced"), float(load.sum()) / _PARTS
        slots = candidates(placement, 0)
        parts = (load / unit if unit > 0 else load).round().long().tolist()
        given = torch.tensor([share for one in shares(parts, slots, self.ranks, placement.slots) for share in one])
        ranks = torch.tensor([slot // placement.slots for one in slots for slot in one])
        return torch.zeros(self.ranks, dtype=torch.float64).index_add_(0, ranks, given.double() * unit)

    def _on_nodes(self) -> torch.Tensor:
        """Return the number of replicas of each expert on each node: [L, E, nodes]."""
        layers, experts = self.logcnt.shape
        node = self.rank_of_slot() // (self.ranks // self.nodes)
        counts = torch.zeros(layers, experts * self.nodes, dtype=torch.int64)
        counts.scatter_add_(1, self.phy2log * self.nodes + node, torch.ones_like(self.phy2log))
        return counts.view(layers, experts, self.nodes)

    def _shares(self, choice: Choice) -> torch.Tensor:
        """Return the share of its expert's load that each slot has: float64 [L, P]."""
        evenly = 1 / self.logcnt.gather(1, self.phy2log).double()
        if choice == "even":
            return evenly
        on_nodes = self._on_nodes()
        node = self.rank_of_slot() // (self.ranks // self.nodes)
        of_slot = on_nodes.gather(1, self.phy2log.unsqueeze(-1).expand(-1, -1, self.nodes))
        here = of_slot.gather(2, node.expand(len(of_slot), -1).unsqueeze(-1)).squeeze(-1)
        without = (of_slot == 0).sum(2)
        return (1 / here.double() + without * evenly) / self.nodes


class Move(NamedTuple):
    """A copy of an expert's weights.

    Attributes:
        layer, expert: whose weights.
        source: a slot that holds them before any copy is made.
        destination: the slot they go to.
    """

    layer: int
    expert: int
    source: int
    destination: int


def plan(
    load: torch.Tensor,
    *,
    ranks: int | None = None,
    slots: int | Sequence[int] | None = None,
    nodes: int | None = None,
    groups: int | None = None,
    policy: Policy = "eplb",
    choice: Choice = "even",
    previous: Plan | None = None,
    max_moves: int | None = None,
    max_bytes: int | None = None,
    expert_bytes: int | None = None,
) -> Plan:
    """Plan which experts have replicas, and the slot of each, so that the load of ranks is even.

    Policies:

    - "eplb": EPLB's greedy plan: `phy2log` and `logcnt` of its `rebalance_experts`, and in `log2phy` the same slots of
      each expert, in another order.  The next replica goes to the expert with the largest load of a replica, and
      replicas are packed to ranks, the heaviest first, each to the lightest rank with a free slot.  An expert may have
      two replicas on a rank.
    - "spread": the same number of replicas in most cases, but no rank has two of an expert, unless it has more slots
      than there are experts.  Replicas are spread over nodes.  Then experts are exchanged while that takes load off
      the busiest rank.

    Groups: if `nodes` divides `groups`, both policies place the experts of a group, and all replicas of them, on one
    node, for gates that choose a few groups for each token.  Otherwise "eplb" takes no notice of nodes.

    From a previous plan: without a budget, the plan is made anew and its ranks and slots are renumbered (nodes as well,
    and ranks inside nodes) so that the fewest experts move.  With a budget, each layer either keeps the slots of
    `previous` and exchanges single experts, or takes its part of the new plan.  Copies go where a copy takes most off
    the load of a layer's busiest rank.  That load does not grow in any layer.  What is left of the budget removes
    second replicas on a rank, where this does not raise it either.

    Args:
        load: of experts, `[L, E]`, or `[E]` for one layer: tokens, or anything in proportion that is 0 or more.
        ranks: number of ranks, a multiple of `nodes`.  With `previous`, this, `slots` and `nodes` are its own.
        slots: P, physical experts in all: the first P % ranks ranks have one more than the others.  Or the number of
            each rank, in a list; 0 is allowed.  None: E.
        nodes: of ranks, R / nodes consecutive ones on each.  None: 1.
        groups: of consecutive experts, E / groups in each.
        policy: "eplb" or "spread".  With a budget: of the new plan that layers may take.
        choice: the choice among replicas that "spread" and budgeted plans are for: see Plan.rank_loads.
        previous: the present plan.
        max_moves: budget: experts that may be copied to another slot, in all layers.
        max_bytes: the same in bytes, with `expert_bytes`, the bytes of the weights of one expert in one layer.

    Returns:
        A plan of the same number of slots.  The same arguments give the same plan.

    Raises:
        BadInput: fewer slots than experts, in all or on a node that groups are packed to; numbers that do not divide
            as they should; a budget without `previous`; a load that is negative or not finite.
    """
    check_name("policy", policy, POLICIES)
    check_name("choice", choice, CHOICES)
    given = _load(load[None] if _has_dims(load, 1) else load, None, None)
    layers, experts = given.shape
    if previous is not None:
        of_ranks, nodes = _as_before(previous, given, ranks, slots, nodes)
    else:
        nodes = 1 if nodes is None else nodes
        of_ranks = _slots(slots, ranks, experts)
        _check_nodes(nodes, len(of_ranks))
    if sum(of_ranks) < experts:
        raise BadInput("slots", sum(of_ranks), f"at least {experts}, one for each expert")
    pinned = _is_pinned(groups, experts, of_ranks, nodes)
    budget = _budget(previous, max_moves, max_bytes, expert_bytes)
    balance = _native.Balance(layers, experts, list(of_ranks), nodes, pinned, choice == "nearest")
    if policy == "eplb":
        made = _eplb(given.float(), of_ranks, nodes, groups if pinned else None)
    else:
        made = _spread(balance, given, of_ranks, nodes, groups if pinned else None)
    if previous is None:
        return made
    anew = made.phy2log.clone()
    balance.keep_slots(previous.phy2log.data_ptr(), True, anew.data_ptr())
    if budget is not None:
        anew = _within(budget, balance, given, previous, anew, choice)
    return Plan.from_phy2log(anew, slots=of_ranks, num_experts=experts, nodes=nodes)


def moves(before: Plan, after: Plan) -> list[Move]:
    """List the copies that make `after` of `before`, by layer and destination.

    A source is on the rank of the destination if that has the expert, else on its node, else anywhere.  Of several, the
    rank that sends the fewest copies of this layer is taken, then the one that sends the fewest of all layers.

    A slot may be the source of one copy and the destination of another: read all sources before they are overwritten,
    for example into spare slots.

    Raises:
        BadInput: plans of different layers, experts, slots or nodes.
    """
    _check_plan("before", before)
    _check_plan("after", after)
    if _sizes(before) != _sizes(after):
        raise BadInput("after", _sizes(after), f"{_sizes(before)}, as before (layers, experts, slots, nodes)")
    rank = before.rank_of_slot().tolist()
    width = before.ranks // before.nodes
    sent = [0] * before.ranks
    found: list[Move] = []
    changed = before.phy2log != after.phy2log
    for layer in changed.any(1).nonzero().flatten().tolist():
        of_layer = [0] * before.ranks
        held, experts = before.log2phy[layer].tolist(), after.phy2log[layer].tolist()
        for slot in changed[layer].nonzero().flatten().tolist():
            here = rank[slot]
            *_, source = min(
                (rank[s] != here, rank[s] // width != here // width, of_layer[rank[s]], sent[rank[s]], s)
                for s in held[experts[slot]]
                if s >= 0
            )
            if rank[source] != here:
                of_layer[rank[source]] += 1
                sent[rank[source]] += 1
            found.append(Move(layer, experts[slot], source, slot))
    return found


def _read(argument: str, tensor: Any, dtype: torch.dtype) -> torch.Tensor:
    """Return a contiguous copy on the CPU.  Raises BadInput for anything but a dense tensor with memory."""
    check_dense(argument, tensor)
    check_same_device(**{argument: tensor})
    if isinstance(tensor, FakeTensor):
        raise BadInput(argument, "a FakeTensor", "one with memory")
    return torch.empty(tensor.shape, dtype=dtype).copy_(tensor.detach())


def _has_dims(tensor: Any, dims: int) -> bool:
    return isinstance(tensor, torch.Tensor) and tensor.ndim == dims


def _table(argument: str, tensor: torch.Tensor, axes: str) -> torch.Tensor:
    """Return an int64 copy on the CPU."""
    check_dense(argument, tensor)
    is_number = not (tensor.is_floating_point() or tensor.is_complex() or tensor.dtype is torch.bool)
    if tensor.ndim != axes.count(",") + 1 or not tensor.numel() or not is_number:
        raise BadInput(argument, f"{tensor.dtype} {tuple(tensor.shape)}", f"integers {axes}")
    return _read(argument, tensor, torch.int64)


def _check_experts(phy2log: torch.Tensor, experts: int) -> None:
    """Raise BadInput unless each expert, and nothing else, has a slot in each layer."""
    if phy2log.min() < 0 or phy2log.max() >= experts:
        raise BadInput("phy2log", f"{int(phy2log.min())} to {int(phy2log.max())}", f"experts, 0 to {experts - 1}")
    missing = (_counted(phy2log, experts) == 0).nonzero()
    if len(missing):
        layer, expert = missing[0].tolist()
        raise BadInput("phy2log", f"no slot of expert {expert} in layer {layer}", "a slot for each expert")


def _counted(phy2log: torch.Tensor, experts: int) -> torch.Tensor:
    zeros = torch.zeros(len(phy2log), experts, dtype=torch.int64)
    return zeros.scatter_add_(1, phy2log, torch.ones_like(phy2log))


def _differing(got: torch.Tensor, want: torch.Tensor) -> str:
    layer, expert = (got != want).nonzero()[0].tolist()
    return f"{int(got[layer, expert])} for expert {expert} of layer {layer}, which has {int(want[layer, expert])}"


def _load(load: torch.Tensor, layers: int | None, experts: int | None) -> torch.Tensor:
    """Return the load as float64 [L, E] on the CPU.  `layers`, `experts`: None for any number.  Raises BadInput."""
    check_dense("load", load)
    shaped = load.expand(layers, -1) if layers is not None and load.ndim == 1 else load
    wanted = [size if size is not None else fill for size, fill in ((layers, "L"), (experts, "E"))]
    fits = shaped.ndim == 2 and shaped.numel() > 0
    fits = fits and all(want in (None, size) for size, want in zip(shaped.shape, (layers, experts), strict=True))
    if not fits or load.is_complex() or load.dtype is torch.bool:
        raise BadInput("load", f"{load.dtype} {tuple(load.shape)}", f"numbers [{wanted[0]}, {wanted[1]}]")
    of_experts = _read("load", shaped, torch.float64)
    if not (of_experts.isfinite() & (of_experts >= 0)).all():
        raise BadInput("load", "negative or not finite numbers", "0 or more")
    return of_experts


def _slots(slots: int | Sequence[int] | None, ranks: int | None, default: int) -> tuple[int, ...]:
    """Return the number of slots of each rank."""
    if slots is None or is_integer(slots):
        total = default if slots is None else slots
        check_integer("ranks", ranks, 1, MOST_RANKS)
        check_integer("slots", total, 1, MOST_SLOTS)
        return tuple(len(experts_of(rank, int(total), int(ranks))) for rank in range(int(ranks)))  # type: ignore[arg-type]
    if not isinstance(slots, (list, tuple)) or not 1 <= len(slots) <= MOST_RANKS:
        raise BadInput("slots", repr(slots), f"a number, or those of 1 to {MOST_RANKS} ranks in a list")
    for count in slots:
        check_integer("slots", count, 0, MOST_SLOTS)
    if not 1 <= sum(slots) <= MOST_SLOTS:
        raise BadInput("slots", f"{sum(slots)} in all", f"1 to {MOST_SLOTS}")
    if ranks is not None:
        check_integer("ranks", ranks, 1, MOST_RANKS)
        if len(slots) != ranks:
            raise BadInput("slots", f"{len(slots)} numbers", f"one for each of {ranks} ranks")
    return tuple(map(int, slots))


def _check_nodes(nodes: int, ranks: int) -> None:
    check_integer("nodes", nodes, 1)
    if ranks % nodes:
        raise BadInput("nodes", nodes, f"a divisor of {ranks} ranks")


def _check_plan(argument: str, value: object) -> None:
    if not isinstance(value, Plan):
        raise BadInput(argument, type(value).__name__, "a Plan")


def _sizes(plan: Plan) -> tuple[int, int, tuple[int, ...], int]:
    return len(plan.phy2log), plan.num_experts, plan.slots, plan.nodes


def _as_before(
    previous: Plan, load: torch.Tensor, ranks: int | None, slots: int | Sequence[int] | None, nodes: int | None
) -> tuple[tuple[int, ...], int]:
    """Return slots and nodes of the previous plan.  Raises BadInput if others are asked for."""
    _check_plan("previous", previous)
    if load.shape != previous.logcnt.shape:
        raise BadInput("load", tuple(load.shape), f"{tuple(previous.logcnt.shape)}, as previous")
    if ranks is not None:
        check_integer("ranks", ranks, previous.ranks, previous.ranks)
    if slots is not None and _slots(slots, previous.ranks, 0) != previous.slots:
        raise BadInput("slots", slots, f"{list(previous.slots)}, as previous")
    if nodes is not None:
        check_integer("nodes", nodes, previous.nodes, previous.nodes)
    return previous.slots, previous.nodes


def _is_pinned(groups: int | None, experts: int, slots: tuple[int, ...], nodes: int) -> bool:
    """Return whether groups of experts are packed to nodes."""
    if groups is None:
        return False
    check_integer("groups", groups, 1)
    if experts % groups:
        raise BadInput("groups", groups, f"a divisor of {experts} experts")
    if groups % nodes:
        return False
    for node, count in enumerate(_of_nodes(slots, nodes)):
        if sum(count) < experts // nodes:
            raise BadInput("slots", f"{sum(count)} on node {node}", f"at least {experts // nodes}, for its groups")
    return True


def _of_nodes(slots: tuple[int, ...], nodes: int) -> list[tuple[int, ...]]:
    """Return the slots of the ranks of each node."""
    width = len(slots) // nodes
    return [slots[node * width : (node + 1) * width] for node in range(nodes)]


def _budget(previous: Plan | None, moves: int | None, most: int | None, expert: int | None) -> int | None:
    """Return the number of copies that may be made; None: any."""
    if moves is not None:
        check_integer("max_moves", moves, 0)
    if most is not None:
        check_integer("max_bytes", most, 0)
        check_integer("expert_bytes", expert, 1)
    elif expert is not None:
        raise BadInput("expert_bytes", expert, "max_bytes beside it")
    budgets = [moves, None if most is None or expert is None else most // expert]
    given = [budget for budget in budgets if budget is not None]
    if given and previous is None:
        raise BadInput("max_moves" if moves is not None else "max_bytes", given[0], "previous beside it")
    return min(given, default=None)


def _packed(load: torch.Tensor, capacity: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the pack of each item, and its place there, both int64 [rows, items]; `load` is float32."""
    load = load.contiguous()
    pack, place = (torch.empty(load.shape, dtype=torch.int64) for _ in range(2))
    rows, items = load.shape
    _native.pack_items(load.data_ptr(), rows, items, list(capacity), pack.data_ptr(), place.data_ptr())
    return pack, place


def _group_order(load: torch.Tensor, groups: int, nodes: int) -> torch.Tensor:
    """Pack groups to nodes.  Returns the experts by node, then by place of their group there: int64 [L, E]."""
    size = load.shape[1] // groups
    node, place = _packed(load.view(len(load), groups, size).sum(-1), [groups // nodes] * nodes)
    first = (node * (groups // nodes) + place) * size
    return (first.unsqueeze(-1) + torch.arange(size)).flatten(1).argsort(dim=1)


def _eplb(load: torch.Tensor, slots: tuple[int, ...], nodes: int, groups: int | None) -> Plan:
    """Return EPLB's plan; `load` is float32 [L, E].  Without groups it is that of one node."""
    layers, experts = load.shape
    packed = 1 if groups is None else nodes
    inside = experts // packed
    order = _group_order(load, groups or 1, packed)
    of_order = load.gather(1, order)
    # Physical experts of nodes: a number that is in order of the expert, then of its replica, and the slot.
    parts: list[tuple[torch.Tensor, torch.Tensor]] = []
    most = sum(slots)  # replicas
    first = 0
    for node, capacity in enumerate(_of_nodes(slots, packed)):
        here = of_order[:, node * inside : (node + 1) * inside].contiguous()
        total = sum(capacity)
        expert, replica = (torch.empty(layers, total, dtype=torch.int64) for _ in range(2))
        count = torch.empty(layers, inside, dtype=torch.int64)
        _native.replicate_experts(
            here.data_ptr(), layers, inside, total, expert.data_ptr(), replica.data_ptr(), count.data_ptr()
        )
        rank, place = _packed((here / count).gather(1, expert), capacity)
        begin = torch.tensor((0, *capacity)).cumsum(0)
        logical = order[:, node * inside : (node + 1) * inside].gather(1, expert)
        parts.append((logical * most + replica, first + begin[rank] + place))
        first += total
    key = torch.cat([part[0] for part in parts], 1)
    by_expert = key.argsort(dim=1)
    expert = key.gather(1, by_expert) // most
    slot = torch.cat([part[1] for part in parts], 1).gather(1, by_expert)
    phy2log = torch.empty_like(slot).scatter_(1, slot, expert)
    return Plan._of(phy2log, expert, slot, experts, slots, nodes)


def _spread(
    balance: _native.Balance, load: torch.Tensor, slots: tuple[int, ...], nodes: int, groups: int | None
) -> Plan:
    layers, experts = load.shape
    home = None
    if groups is not None:
        order = _group_order(load.float(), groups, nodes)
        home = torch.empty_like(order).scatter_(
            1, order, (torch.arange(experts) // (experts // nodes)).expand_as(order)
        )
    phy2log = torch.empty(layers, sum(slots), dtype=torch.int64)
    balance.spread(load.data_ptr(), 0 if home is None else home.data_ptr(), phy2log.data_ptr())
    return Plan.from_phy2log(phy2log, slots=slots, num_experts=experts, nodes=nodes)


class _Option(NamedTuple):
    """A placement of a layer that can be chosen."""

    copies: int
    most: float  # load of a rank
    steps: int | None  # of the improvement of the previous plan; None: the new plan


def _within(
    budget: int, balance: _native.Balance, load: torch.Tensor, previous: Plan, anew: torch.Tensor, choice: Choice
) -> torch.Tensor:
    """Return phy2log with at most `budget` slots of other experts than in `previous`."""
    improved = previous.phy2log.clone()
    steps = balance.improve(load.data_ptr(), budget, improved.data_ptr())
    new_plan = Plan.from_phy2log(anew, slots=previous.slots, num_experts=previous.num_experts, nodes=previous.nodes)
    new_most = new_plan.rank_loads(load, choice).amax(1).tolist()
    new_copies = (anew != previous.phy2log).sum(1).tolist()
    options = [
        [
            _Option(0, most, 0),
            *(_Option(copies, after, taken + 1) for taken, (_, _, copies, after) in enumerate(of_layer)),
            _Option(new_copies[layer], new_most[layer], None),
        ]
        for layer, (of_layer, most) in enumerate(
            zip(steps, previous.rank_loads(load, choice).amax(1).tolist(), strict=True)
        )
    ]
    chosen = _chosen(budget, options)
    left = budget - sum(option.copies for option in chosen)
    found = previous.phy2log.clone()
    for layer, option in enumerate(chosen):
        if option.steps is None:
            found[layer] = anew[layer]
            continue
        for taken in steps[layer][: option.steps]:
            found[layer, taken[0]] = torch.tensor(taken[1])
    for layer in sorted(range(len(chosen)), key=lambda layer: -chosen[layer].most):
        if left > 0:
            left -= balance.remove_duplicates(load.data_ptr(), left, found.data_ptr(), layer)
    balance.keep_slots(previous.phy2log.data_ptr(), False, found.data_ptr())
    return found


def _chosen(budget: int, options: list[list[_Option]]) -> list[_Option]:
    """Choose an option of each layer, of which the first is to leave it as it is.

    Only options on the lower convex hull are steps from one to the next, so steps of a layer take less and less off per
    copy.  Those of all layers are taken in that order.  Copies that are left go to the layers with the largest loads.
    """
    chosen = [of_layer[0] for of_layer in options]
    taken: list[tuple[float, int, _Option]] = []
    for layer, of_layer in enumerate(options):
        at = of_layer[0]
        while better := [option for option in of_layer if option.most < at.most and option.copies > at.copies]:
            following = max(
                better, key=lambda option: ((at.most - option.most) / (option.copies - at.copies), -option.copies)
            )
            taken.append(((at.most - following.most) / (following.copies - at.copies), layer, following))
            at = following
    left, full = budget, set()
    for _, layer, option in sorted(taken, key=lambda step: (-step[0], step[1], step[2].copies)):
        more = option.copies - chosen[layer].copies
        if layer in full or more > left:
            full.add(layer)
            continue
        chosen[layer], left = option, left - more
    for layer in sorted(range(len(options)), key=lambda layer: -chosen[layer].most):
        at = chosen[layer]
        best = min(
            (option for option in options[layer] if option.copies <= at.copies + left),
            key=lambda option: (option.most, option.copies),
        )
        if best.most < at.most:
            chosen[layer], left = best, left - (best.copies - at.copies)
    return chosen
