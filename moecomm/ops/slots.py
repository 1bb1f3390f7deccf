"""Weights of the slots of a placement, copied from the ranks that own the experts; gradients take the way back.

The owner of an expert does not depend on the placement: rank r owns the experts that it would hold without one.  So
parameters, optimizers and checkpoints are those of a layer without a placement, and every slot is a copy.

Ranks exchange weights and gradients over a Window, which layers of the same shapes share, and which ends with the
Buffer.  A rank writes what others need into its own memory there, and reads theirs after a barrier.  A second barrier
lets the next exchange write.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch

from moecomm.base import tangents
from moecomm.base.experts import experts_of, owners_of
from moecomm.base.placement import NONE
from moecomm.errors import BadInput, Unsupported
from moecomm.membership.suspension import agreement, refuse_capture
from moecomm.ranks.settings import compare
from moecomm.rounds import names
from moecomm.rounds.rounds import Rounds
from moecomm.window import Window

_ALIGNMENT = 256  # bytes; of a tensor in the window
_Kinds = tuple[tuple[torch.Size, torch.dtype], ...]  # shape and dtype of each tensor of an expert


class _Exchange(NamedTuple):
    """A Window with room for a rank's slots, `[slots, ...]` of each tensor one after the other.

    Owned experts have room there, too: all slots together are at least as many as the experts.

    Attributes:
        window: of all ranks.
        slots: of a rank.
        kinds: of the tensors.
        done: the end of the last exchange, on GPUs.
    """

    window: Window
    slots: int
    kinds: _Kinds
    done: torch.cuda.Event | None

    def of(self, rank: int) -> list[torch.Tensor]:
        """Return a rank's tensors."""
        found, at = [], 0
        for shape, dtype in self.kinds:
            found.append(self.window.tensor((self.slots, *shape), dtype, rank=rank, offset=at))
            at += _room(self.slots, shape, dtype)
        return found

    @contextmanager
    def in_turn(self) -> Iterator[None]:
        """Order an exchange behind the last one, also where the caller has changed streams."""
        if self.done is None:
            yield
            return
        stream = torch.cuda.current_stream(self.window.device)
        stream.wait_event(self.done)
        yield
        self.done.record(stream)


@torch.library.custom_op("moecomm::slot_weights", mutates_args=())
def slot_weights(owned: Sequence[torch.Tensor], buffer: str) -> tuple[list[torch.Tensor], torch.Tensor]:
    """Operator of moecomm.ops.slot_weights.  It also returns the expert of each slot, int64 `[R, slots]` on the CPU.

    The backward pass reads them there: the Buffer may have another placement by then.
    """
    tangents.refuse("moecomm::slot_weights", *owned)
    rounds = names.find(buffer)
    mine = _check(rounds, owned)
    assert rounds.placement is not None
    experts, me = rounds.placement.experts, rounds.rank
    exchange = _exchange_of(rounds, owned)
    found = [weight.new_empty(exchange.slots, *weight.shape[1:]) for weight in owned]
    with exchange.in_turn():
        elsewhere = {expert for rank, held in enumerate(experts.tolist()) if rank != me for expert in held}
        for part, weight in zip(exchange.of(me), owned, strict=True):
            for expert in elsewhere.intersection(mine):
                part[expert - mine.start].copy_(weight[expert - mine.start])
        exchange.window.barrier()
        for first, count, owner, row in _runs(experts[me], rounds.placement.num_experts, rounds.num_ranks):
            filled = [weight[first : first + count] for weight in found]
            if owner == NONE:
                for weight in filled:
                    weight.zero_()
                continue
            for weight, source in zip(filled, owned if owner == me else exchange.of(owner), strict=True):
                weight.copy_(source[row : row + count])
        exchange.window.barrier()
    return found, experts.clone()


@slot_weights.register_fake
def _(owned: Sequence[torch.Tensor], buffer: str) -> tuple[list[torch.Tensor], torch.Tensor]:
    rounds = names.find(buffer)
    slots = len(rounds.local_experts)
    experts = torch.empty((rounds.num_ranks, slots), dtype=torch.int64, device="cpu")
    return [weight.new_empty(slots, *weight.shape[1:]) for weight in owned], experts


@torch.library.custom_op("moecomm::slot_gradients", mutates_args=())
def slot_gradients(grads: Sequence[torch.Tensor], experts: torch.Tensor, buffer: str) -> list[torch.Tensor]:
    """Add the gradients of each expert's slots, in the order of slots, at its owner.

    Args:
        grads: `[slots, ...]` of each tensor.
        experts: of the slots, as slot_weights() returned them.
        buffer: name of the Buffer.

    Returns:
        `[E/R, ...]` of each tensor: sums in float32 or a wider dtype, rounded once.
    """
    rounds = names.find(buffer)
    me, mine, exchange = rounds.rank, _owned(rounds), _exchange_of(rounds, grads)
    found = [grad.new_zeros(len(mine), *grad.shape[1:]) for grad in grads]
    given = [slot for slot, expert in enumerate(experts[me].tolist()) if expert != NONE and expert not in mine]
    held = {expert - mine.start: (experts.flatten() == expert).nonzero().flatten().tolist() for expert in mine}
    _add_slots(exchange, grads, given, held, found)
    return found


def add_copies(rounds: Rounds, grads: list[torch.Tensor], sources: torch.Tensor) -> list[torch.Tensor]:
    """Add the gradients of copies for a round to those of the slots that were copied, in the order of slots.

    Args:
        grads: `[slots, ...]` of each tensor.
        sources: the slot of which each slot is a copy, or -1; see moecomm.fused.copies.

    Returns:
        `[slots, ...]` of each tensor: sums in float32 or a wider dtype, rounded once; 0 for copies.
    """
    me, slots = rounds.rank, sources.shape[1]
    held: dict[int, list[int]] = {}  # by slot that was copied: that and its copies
    for slot, source in enumerate(sources.flatten().tolist()):
        if source != NONE:
            held.setdefault(source, [source]).append(slot)
    if not held:
        return grads
    found, copied = [grad.clone() for grad in grads], (sources[me] != NONE).nonzero().flatten().tolist()
    mine = {source % slots: sorted(one) for source, one in held.items() if source // slots == me}
    _add_slots(_exchange_of(rounds, grads), grads, copied, mine, found)
    for grad in found:
        grad[copied] = 0
    return found


def _add_slots(
    exchange: _Exchange,
    grads: Sequence[torch.Tensor],
    given: list[int],
    held: dict[int, list[int]],
    found: list[torch.Tensor],
) -> None:
    """Add gradients of slots of all ranks.  Collective.

    Args:
        exchange: for tensors as `grads`.
        grads: `[slots, ...]` of each tensor.
        given: slots of this rank that others add.
        held: by row of `found`, the slots of all ranks to add, in this order.
        found: written, a tensor for each of `grads`.
    """
    me = exchange.window.rank
    with exchange.in_turn():
        for slot in given:
            for part, grad in zip(exchange.of(me), grads, strict=True):
                part[slot].copy_(grad[slot])
        exchange.window.barrier()
        of_ranks = [grads if rank == me else exchange.of(rank) for rank in range(exchange.window.num_ranks)]
        for row, slots in held.items():
            for nth, total in enumerate(found):
                terms = [of_ranks[slot // exchange.slots][nth][slot % exchange.slots] for slot in slots]
                if terms:
                    total[row].copy_(_sum(terms))
        exchange.window.barrier()


@slot_gradients.register_fake
def _(grads: Sequence[torch.Tensor], experts: torch.Tensor, buffer: str) -> list[torch.Tensor]:
    rounds = names.find(buffer)
    mine = _owned(rounds)
    return [grad.new_empty(len(mine), *grad.shape[1:]) for grad in grads]


def _sum(terms: list[torch.Tensor]) -> torch.Tensor:
    """Add in this order, in float32 or the wider dtype of the terms."""
    if len(terms) == 1:
        return terms[0]
    total = terms[0].to(torch.promote_types(terms[0].dtype, torch.float32), copy=True)
    for term in terms[1:]:
        total += term
    return total


def _owned(rounds: Rounds) -> range:
    """Return the experts that this rank owns."""
    assert rounds.placement is not None
    return experts_of(rounds.rank, rounds.placement.num_experts, rounds.num_ranks)


def _check(rounds: Rounds, owned: Sequence[torch.Tensor]) -> range:
    """Return the experts that this rank owns.  Raises BadInput, Unsupported."""
    if rounds.placement is None:
        raise BadInput("buffer", "one without a placement", "a Buffer that was opened with a placement")
    refuse_capture(rounds, "slot_weights")  # a graph would go on to copy by the placement of its capture
    if rounds.masked:
        raise Unsupported(f"weights of slots beside masked ranks {sorted(rounds.masked)}, which own experts")
    mine = _owned(rounds)
    if not owned:
        raise BadInput("weights", "none", "one or more")
    for weight in owned:
        if weight.ndim == 0 or len(weight) != len(mine) or weight.device != rounds.device:
            got = f"{tuple(weight.shape)} on {weight.device}"
            raise BadInput("weights", got, f"[{len(mine)}, ...] on {rounds.device}: the experts that this rank owns")
    return mine


def _room(slots: int, shape: torch.Size, dtype: torch.dtype) -> int:
    return -(-slots * math.prod(shape) * dtype.itemsize // _ALIGNMENT) * _ALIGNMENT


def _exchange_of(rounds: Rounds, tensors: Sequence[torch.Tensor]) -> _Exchange:
    """Return the exchange for tensors of these shapes.  Opens it, collectively, at the first use.

    Raises:
        Mismatch: ranks have tensors of different shapes or dtypes.
        As Window.
    """
    kinds = tuple((tensor.shape[1:], tensor.dtype) for tensor in tensors)
    opened: dict[_Kinds, _Exchange] = rounds.exchanges
    if kinds not in opened:
        digest = int.from_bytes(hashlib.sha256(repr(kinds).encode()).digest()[:7], "little")
        mine = ", ".join(f"{dtype} {('E/R', *shape)}" for shape, dtype in kinds)
        with agreement(rounds, "slot_weights") as ranks:
            shown = {digest: mine}
            compare(ranks, {"weights": digest}, rounds.settings.backend, lambda _, other: shown.get(other, "others"))
            ranks.settle()
        slots = len(rounds.local_experts)
        about: dict[str, Any] = {"backend": rounds.settings.backend, "device": rounds.device}
        nbytes = sum(_room(slots, *kind) for kind in kinds)
        window = Window(rounds.members.group, nbytes, **about, timeout_s=rounds.members.timeout_s)
        done = torch.cuda.Event() if rounds.device.type == "cuda" else None  # type: ignore[no-untyped-call]
        opened[kinds] = _Exchange(window, slots, kinds, done)
    return opened[kinds]


def _runs(experts: torch.Tensor, num_experts: int, ranks: int) -> Iterator[tuple[int, int, int, int]]:
    """Yield slots that one copy fills: the first, how many, the owner of their experts, and the row of the first there.

    Args:
        experts: `[slots]` of a rank.  The owner of empty slots is NONE.
        num_experts, ranks: of the placement.
    """
    owners = owners_of(experts, num_experts, ranks).tolist()
    rows = [
        slot if owner == NONE else expert - experts_of(owner, num_experts, ranks).start
        for slot, (expert, owner) in enumerate(zip(experts.tolist(), owners, strict=True))
    ]
    first = 0
    for slot in range(1, len(owners) + 1):
        if slot == len(owners) or owners[slot] != owners[first] or rows[slot] - rows[first] != slot - first:
            yield first, slot - first, owners[first], rows[first]
            first = slot
