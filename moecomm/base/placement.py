"""Placement: which rank holds which experts, and which replica of an expert a token goes to."""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Collection, Iterable, Sequence
from functools import cached_property
from itertools import chain, islice
from typing import Any, get_args

import torch

from moecomm.base.arrays import as_tensor, check_tensor
from moecomm.base.choices import ReplicaChoice
from moecomm.base.protocol import MOST_REPLICAS, MOST_SLOTS
from moecomm.base.replicas import balanced, copies
from moecomm.base.validation import check_integer, check_name, is_integer
from moecomm.errors import BadInput

Table = tuple[int, list[int]]  # see table()
NONE = -1  # in the place of an expert: the slot is empty; of a slot: there is none
_SOME_SLOTS = f"1 to {MOST_SLOTS - 1} slots"


class Placement:
    """The experts that each rank holds, in slots.  An expert in several slots has replicas.  It does not change.

    Ranks have equally many slots, and an empty one costs a rank nothing but its counts of 0.  Slots are numbered over
    all ranks: slot `s` is the `s % slots`-th of rank `s // slots`.  Plans call this number a physical expert.

    Args:
        experts: for each rank the experts of its slots, in order: ids of callers, or -1 for an empty slot.
            Lists, which may be empty, and are filled up with empty slots; or integers `[ranks, slots]`.
        num_experts: of callers; each has a slot at least.  Default: one more than the largest id.
        slots: of a rank; default: those of the longest list.
        choice: the replica of an expert for the k-th entry of token t.  "token": number t + k modulo the number of
            replicas, in the order of slots.  "nearest": likewise, among those on the token's own rank, else in its
            domain, else all.  "balanced": each round divides the entries of an expert among its replicas so that ranks
            get equally many rows, as far as the placement allows, by the counts of all ranks in that round.

    Attributes:
        ranks: their number.
        slots: of a rank.
        num_experts, choice: see Args.
        held: for each rank the experts of its slots, -1 where one is empty: tuples of whole numbers.

    Raises:
        BadInput: an id that isn't one, an expert without a slot, or too many.
        AttributeError: an attribute is set.
    """

    ranks: int
    slots: int
    num_experts: int
    choice: ReplicaChoice
    held: tuple[tuple[int, ...], ...]

    def __init__(
        self,
        experts: Any,
        *,
        num_experts: int | None = None,
        slots: int | None = None,
        choice: ReplicaChoice = "nearest",
    ) -> None:
        lists = _lists(experts)
        longest = max((len(one) for one in lists), default=0)
        most = max((id_ for one in lists for id_ in one), default=NONE)
        num_experts = most + 1 if num_experts is None else num_experts
        slots = max(longest, 1) if slots is None else slots
        check_integer("slots", slots, max(longest, 1), MOST_SLOTS)
        check_integer("num_experts", num_experts, 1, MOST_SLOTS)
        check_name("choice", choice, get_args(ReplicaChoice))
        if len(lists) < 1 or len(lists) * slots >= MOST_SLOTS:
            raise BadInput("experts", f"{len(lists)} ranks with {slots} slots", _SOME_SLOTS)
        if min((id_ for one in lists for id_ in one), default=0) < NONE or most >= num_experts:
            raise BadInput("experts", f"an id beyond -1 to {num_experts - 1}", "ids of experts, or -1")
        held = tuple((*one, *(NONE,) * (slots - len(one))) for one in lists)
        vars(self).update(ranks=len(lists), slots=slots, num_experts=num_experts, choice=choice, held=held)
        if missing := set(range(num_experts)).difference(*lists):
            raise BadInput("experts", f"no slot for expert {min(missing)}", "a slot for each expert")
        if (most := max(len(found) for found in self.slots_by_expert)) >= MOST_REPLICAS:
            raise BadInput("experts", f"{most} slots of one expert", f"fewer than {MOST_REPLICAS}")

    @classmethod
    def of_plan(
        cls, phy2log: Any, ranks: int, *, num_experts: int | None = None, choice: ReplicaChoice = "nearest"
    ) -> Placement:
        """Make the placement of a layer of a plan, as EPLB gives it.

        Args:
            phy2log: `[P]`: the expert of each slot, a P / ranks-th of them for each rank.
            ranks: their number.
            num_experts, choice: see Placement.
        """
        flat, _ = as_tensor("phy2log", torch.as_tensor(phy2log) if isinstance(phy2log, (list, tuple)) else phy2log)
        check_integer("ranks", ranks, 1)
        if flat.ndim != 1 or len(flat) % ranks:
            raise BadInput("phy2log", f"shape {tuple(flat.shape)}", f"[P], a multiple of {ranks} ranks")
        return cls(flat.view(ranks, -1).tolist(), num_experts=num_experts, choice=choice)

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(f"a Placement does not change: make another one to set {name!r}")

    @property
    def experts(self) -> torch.Tensor:
        """The experts of all slots, int64 `[ranks, slots]`, -1 where one is empty: a tensor of its own each time."""
        return torch.tensor(self.held, dtype=torch.int64).view(self.ranks, self.slots)

    @property
    def log2phy(self) -> torch.Tensor:
        """The slots of each expert, int64 `[num_experts, most replicas]`, ascending, filled up by -1."""
        found = self.slots_by_expert
        width = max(map(len, found))
        return torch.tensor([one + [NONE] * (width - len(one)) for one in found])

    @property
    def logcnt(self) -> torch.Tensor:
        """The number of slots of each expert, int64 `[num_experts]`."""
        return torch.tensor([len(one) for one in self.slots_by_expert])

    def slots_of(
        self, topk_idx: Any, rank: int, domain_ranks: int | None = None, *, counts: Any = None
    ) -> torch.Tensor:
        """Return the slot of each entry of a rank: the specification of the choice.

        Args:
            topk_idx: `[T, K]` int64 or int32, of experts; -1 picks none.
            rank: whose tokens these are.
            domain_ranks: ranks of a domain; None: all.
            counts: of "balanced": int64 `[ranks, num_experts]`, the entries of each rank in this round, of each expert.

        Returns:
            Numbers of slots, -1 for no expert, or one that has no slot; `ranks * slots` for what is no id.

        Raises:
            BadInput: what does not fit.
        """
        ids, _ = as_tensor("topk_idx", topk_idx)
        check_tensor("topk_idx", ids, device=ids.device, dtypes=(torch.int64, torch.int32), shape=(None, None))
        check_integer("rank", rank, 0, self.ranks - 1)
        if domain_ranks is not None:
            check_integer("domain_ranks", domain_ranks, 1, self.ranks)
        if (counts is not None) != (self.choice == "balanced"):
            raise BadInput(
                "counts", "None" if counts is None else "some", 'those of all ranks with "balanced", or None'
            )
        if counts is not None:
            counts, _ = as_tensor("counts", counts)
            shape = (self.ranks, self.num_experts)
            check_tensor("counts", counts, device=counts.device, dtypes=(torch.int64,), shape=shape)
        return slots_of(self, ids, rank, domain_ranks, counts=counts)

    def by_expert(self, numbers: Any) -> torch.Tensor:
        """Return numbers of slots, such as JobStats.rows_per_expert, summed for each expert.

        Args:
            numbers: int64 `[ranks * slots]`.

        Returns:
            `[num_experts]`.

        Raises:
            BadInput: another number of slots, or another dtype.
        """
        rows, _ = as_tensor("numbers", numbers)
        check_tensor("numbers", rows, device=rows.device, dtypes=(torch.int64,), shape=(self.ranks * self.slots,))
        slots = self.experts.flatten().to(rows.device)
        sums = rows.new_zeros(self.num_experts + 1)  # the last one is of empty slots
        return sums.index_add_(0, slots % (self.num_experts + 1), rows)[: self.num_experts]

    @cached_property
    def digest(self) -> int:
        """A number of 63 bits by which ranks compare placements."""
        words = (self.num_experts, self.ranks, self.slots, get_args(ReplicaChoice).index(self.choice))
        data = repr((words, self.held)).encode()
        return int.from_bytes(hashlib.sha256(data).digest()[:8], "little") >> 1

    @cached_property
    def slots_by_expert(self) -> list[list[int]]:
        """The slots of each expert, ascending."""
        found: list[list[int]] = [[] for _ in range(self.num_experts)]
        for slot, expert in enumerate(chain.from_iterable(self.held)):
            if expert != NONE:
                found[expert].append(slot)
        return found

    def __repr__(self) -> str:
        about = f"{self.num_experts} experts in {self.ranks} x {self.slots} slots, choice={self.choice!r}"
        return f"Placement({about})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Placement) and self.digest == other.digest

    def __hash__(self) -> int:
        return self.digest


def _lists(experts: Any) -> list[list[int]]:
    """Return the experts of each rank as lists.  Raises BadInput."""
    want = "for each rank a list of experts"
    if isinstance(experts, torch.Tensor) or hasattr(experts, "__array__"):
        tensor, _ = as_tensor("experts", experts)
        check_tensor("experts", tensor, device=tensor.device, dtypes=(torch.int64, torch.int32), shape=(None, None))
        if max(len(tensor), tensor.numel()) >= MOST_SLOTS:
            raise BadInput("experts", f"shape {tuple(tensor.shape)}", _SOME_SLOTS)
        found: list[list[int]] = tensor.tolist()
        return found
    if isinstance(experts, (str, bytes, dict)) or not isinstance(experts, Iterable):
        raise BadInput("experts", type(experts).__name__, want)
    lists: list[list[int]] = []
    left = MOST_SLOTS - 1
    for one in islice(experts, MOST_SLOTS):
        if not isinstance(one, Iterable) or isinstance(one, (str, bytes)):
            raise BadInput("experts", "something else", want)
        some = list(islice(one, left + 1))  # what is too long, or has no end, is not read
        left -= max(1, len(some))
        if left < 0:
            raise BadInput("experts", f"{MOST_SLOTS} slots or more", _SOME_SLOTS)
        if not all(map(is_integer, some)):
            raise BadInput("experts", "something else", want)
        lists.append(list(map(int, some)))
    return lists


def candidates(
    placement: Placement, rank: int, domain_ranks: int | None = None, masked: Collection[int] = ()
) -> list[list[int]]:
    """Return for each expert the slots that entries of a rank may take, ascending.

    Args:
        placement: of the Buffer.
        rank: whose entries these are.
        domain_ranks: ranks of a domain; None: all.
        masked: ranks whose slots nobody takes.  An expert may be left with none.
    """
    slots, choice, domain = placement.slots, placement.choice, domain_ranks or placement.ranks
    away = [(one != rank) + (one // domain != rank // domain) for one in range(placement.ranks)]
    found = []
    for held in placement.slots_by_expert:
        some: list[int] = []
        for slot in held:
            here = slot // slots
            if here in masked:
                continue
            if choice == "nearest" and some and away[here] != away[some[0] // slots]:
                if away[here] < away[some[0] // slots]:
                    some = [slot]
            elif choice != "balanced" or not some or here != some[-1] // slots:
                some.append(slot)  # balanced: a further slot of the same rank would not spare it a row
        found.append(some)
    return found


def slots_of(
    placement: Placement,
    topk_idx: torch.Tensor,
    rank: int,
    domain_ranks: int | None = None,
    masked: Collection[int] = (),
    counts: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return what Placement.slots_of returns, after its checks.  `masked`: see candidates(); their counts are 0."""
    lists, ids = candidates(placement, rank, domain_ranks, masked), topk_idx.long()
    known = ids.clamp(0, placement.num_experts - 1)
    if counts is not None:
        found = balanced(ids, rank, counts, lists, placement.slots)
    else:
        width, device = max(1, *map(len, lists)), topk_idx.device
        slots = torch.tensor([one + [NONE] * (width - len(one)) for one in lists], device=device)
        replicas = torch.tensor([len(one) for one in lists], device=device)
        turn = torch.arange(ids.shape[0], device=device)[:, None] + torch.arange(ids.shape[1], device=device)
        found = slots[known, turn % replicas[known].clamp(min=1)]
    found = torch.where(known == ids, found, placement.ranks * placement.slots)
    return torch.where(ids == NONE, NONE, found).to(topk_idx.dtype)


def replicated(placement: Placement, counts: torch.Tensor, masked: Collection[int] = ()) -> Placement:
    """Return the placement of a round with balance="replicate": the specification of its copies.

    Args:
        placement: of the Buffer, whose choice is "balanced".
        counts: int64 `[ranks, num_experts]`, the entries of each rank in this round, of each expert.
        masked: ranks that take no part.
    """
    experts = placement.experts
    lists, free = candidates(placement, 0, masked=masked), empty(placement)
    for expert, slot in copies(counts.sum(0).tolist(), lists, free, placement.ranks, placement.slots):
        experts[slot // placement.slots, slot % placement.slots] = expert
    return unchecked(placement, experts.tolist(), placement.choice)


def empty(placement: Placement) -> list[int]:
    """Return the slots that hold no expert, ascending."""
    return [slot for slot, expert in enumerate(chain.from_iterable(placement.held)) if expert == NONE]


def table(
    placement: Placement,
    rank: int,
    domain_ranks: int | None,
    masked: Collection[int],
    reserved: Collection[int] = (),
) -> Table:
    """Return Placement::empty of csrc/protocol/placement.h for a rank, and the words behind that struct.

    Args:
        placement, rank, domain_ranks, masked: see candidates().
        reserved: empty slots that get no copies.
    """
    words, lists = [0] * placement.num_experts, list[int]()
    for expert, slots in enumerate(candidates(placement, rank, domain_ranks, masked)):
        at = slots[0] if len(slots) == 1 else placement.num_experts + len(lists)
        words[expert] = at * MOST_REPLICAS + len(slots)
        if len(slots) > 1:
            lists += slots
    free = [slot for slot in empty(placement) if slot not in reserved]
    return len(words + lists), [*words, *lists, len(free), *free]


def with_slots(placement: Placement, slots: int) -> Placement:
    """Return the placement with so many slots a rank.  Raises BadInput for too few."""
    how: dict[str, Any] = {"num_experts": placement.num_experts, "choice": placement.choice}
    return Placement(placement.held, slots=slots, **how)


def successor(argument: str, before: Placement, given: Any) -> Placement:
    """Return a placement that a Buffer may follow after `before`, with as many slots.

    Raises:
        BadInput: no Placement, other experts or ranks, more slots, or "balanced" on one side alone.
    """
    if not isinstance(given, Placement) or (given.ranks, given.num_experts) != (before.ranks, before.num_experts):
        want = f"a moecomm.Placement of {before.num_experts} experts on {before.ranks} ranks"
        raise BadInput(argument, repr(given), want)
    if "balanced" in {given.choice, before.choice} and given.choice != before.choice:
        raise BadInput(argument, repr(given), f"choice={before.choice!r}, as the Buffer was opened")
    return given if given.slots == before.slots else with_slots(given, before.slots)


def of_ranks(placement: Placement, ranks: Sequence[int]) -> Placement:
    """Return the placement of these ranks alone.  Experts that only other ranks hold lose their slots."""
    return unchecked(placement, [placement.held[rank] for rank in ranks], placement.choice)


def unchecked(placement: Placement, held: Iterable[Iterable[int]], choice: ReplicaChoice) -> Placement:
    """Return a placement of the same experts in other slots, for each rank as many, where some may have none."""
    found, lists = copy.copy(placement), tuple(map(tuple, held))
    vars(found).update(ranks=len(lists), held=lists, choice=choice)
    for name in ("digest", "slots_by_expert"):
        vars(found).pop(name, None)
    return found


def checked(given: Any) -> Placement | None:
    """Return a `placement` that a caller passed.  Raises BadInput."""
    if given is None or isinstance(given, Placement):
        return given
    raise BadInput("placement", type(given).__name__, "a moecomm.Placement, or None")
