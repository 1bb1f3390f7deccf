"""Weights of the slots of a placement, copied from the ranks that own the experts; gradients take the way back.

The owner of an expert does not depend on the placement: rank r owns the experts that it would hold without one.  So
parameters, optimizers and checkpoints are those of a layer without a placement, and every slot is a copy.  The ranks
that are left after a loss own all experts, too.  An expert that was lost has an owner and no slot: its weights are not
read, and its gradients are 0, until set_placement() gives it a slot.

Layers of the same shapes share a Window, which ends with the Buffer, or with a release of its memory.  A rank writes
what others need into its own memory there, and reads theirs after a barrier.  A second barrier lets the next exchange
write.

Both are barriers of the first Window, whatever the shapes: ranks that pass other shapes join the same barriers.  A rank
that refuses its arguments joins them, too, so none waits for it.  Any other error of one rank ends in a Timeout.
"""

from __future__ import annotations

import functools
import hashlib
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from itertools import groupby
from typing import NoReturn

import torch

from moecomm.base import tangents
from moecomm.base.experts import experts_of, most_experts, owners_of
from moecomm.base.placement import NONE
from moecomm.errors import BadInput, MemoryReleased, Mismatch, MoecommError, Unsupported
from moecomm.membership.suspension import agreement, refuse_capture
from moecomm.rounds import names
from moecomm.rounds.rounds import Part, Rounds
from moecomm.weights.exchange import Exchange

_REFUSED = -1  # in the place of a digest: a rank's arguments can't be used
_Kinds = tuple[tuple[torch.Size, torch.dtype], ...]  # shape and dtype of each tensor of an expert
_Read = Callable[[int], Sequence[torch.Tensor]]


class Exchanges(Part):
    """Exchanges of a Buffer by the kinds of their tensors, and the barriers of all of them.

    Each rank posts a digest of its kinds.  CPU ranks compare digests in each exchange.  GPUs do it later, so that no
    host waits for its device.

    Args:
        first: with room for the digests of all ranks behind its tensors.
    """

    ends_with_memory = True

    def __init__(self, first: Exchange) -> None:
        self.by_kinds: dict[_Kinds, Exchange] = {}
        self._window = window = first.window
        ranks, at = range(window.num_ranks), first.nbytes
        with torch.inference_mode(False):  # else they could be written in that mode alone
            self._digests = window.tensor((len(ranks),), torch.int64, offset=at)
            mine = at + 8 * window.rank
            self._places = [window.tensor((1,), torch.int64, rank=rank, offset=mine) for rank in ranks]
        self._texts: dict[int, str] = {}  # of the kinds that this rank has passed, by their digests
        self._posted: int | None = None  # what all ranks have of this one
        # GPUs: digests of all ranks in pinned memory, the end of their copy, and the digest of this rank.
        self._pending: deque[tuple[torch.Tensor, torch.cuda.Event, int]] = deque()
        self._done: torch.cuda.Event | None = None  # the end of the last exchange, on GPUs
        if window.device.type == "cuda":
            self._done = torch.cuda.Event()  # type: ignore[no-untyped-call]

    @contextmanager
    def reading(
        self, kinds: _Kinds | None, given: Iterable[tuple[torch.Tensor, torch.Tensor]] = (), at_once: bool = False
    ) -> Iterator[None]:
        """Let ranks read in the block what others have given.  Collective.

        It follows the last exchange, also where the caller has changed streams.

        Args:
            kinds: of tensors.  None: this rank has refused its arguments, and joins one exchange of the other ranks.
            given: what this rank copies first: to, and from.
            at_once: GPUs: compare kinds in this call.  The host waits for the device.

        Raises:
            BadInput, Mismatch: a rank has refused its arguments, or has tensors of other kinds.  GPUs, but `at_once`:
                at the end of a later exchange, or in check().
            As Window.barrier().
        """
        with ExitStack() as undo:
            if self._done is not None:
                stream = torch.cuda.current_stream(self._window.device)
                stream.wait_event(self._done)
                undo.callback(self._done.record, stream)
            for to, source in given:
                to.copy_(source)
            error = self._compare(kinds, at_once)
            if error is None:
                yield
            self._window.barrier()
            if error is not None:
                raise error
            if not at_once:
                self._raise_pending()  # at the end: no rank waits for this one

    def check(self, masked: bool) -> None:
        """Wait for the exchanges so far, and raise the error of the first that went wrong.

        The wait ends in time even when one fails, because barriers have deadlines.  A failed barrier leaves the digests
        of earlier exchanges: mostly equal ones.  A lost rank ends the Window, but not rounds of ranks that mask it.
        """
        if self._done is not None:
            self._done.synchronize()
        self._raise_pending()
        if not masked:
            self._window.raise_failure()

    def abort(self) -> None:
        """End every wait of this rank at once, from any thread."""
        for exchange in list(self.by_kinds.values()):
            exchange.window.abort()

    def close(self) -> None:
        """Give the memory back."""
        for exchange in list(self.by_kinds.values()):
            exchange.close()

    def _raise_pending(self) -> None:
        """Raise the error of exchanges whose digests are copied, on GPUs."""
        while self._pending and self._pending[0][1].query():  # type: ignore[no-untyped-call]
            digests, _, posted = self._pending.popleft()
            if (error := _error(digests.tolist(), posted, self._texts)) is not None:
                self._window.raise_failure()
                raise error

    def _compare(self, kinds: _Kinds | None, at_once: bool) -> MoecommError | None:
        """Write this rank's digest to all ranks, and wait for theirs.  Return the error that they make, if known."""
        posted = _REFUSED if kinds is None else _digest(kinds)
        if kinds is not None:
            self._texts[posted] = _shown(kinds)
        if posted != self._posted:
            for place in self._places:
                place.fill_(posted)
            self._posted = posted
        self._window.barrier()
        if kinds is None:
            return None
        if self._done is None or at_once:
            return _error(self._digests.tolist(), posted, self._texts)
        digests = torch.empty(len(self._places), dtype=torch.int64, device="cpu", pin_memory=True)
        digests.copy_(self._digests, non_blocking=True)
        copied = torch.cuda.current_stream(self._window.device).record_event()
        self._pending.append((digests, copied, posted))
        return None


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
    found = [weight.new_empty(len(rounds.local_experts), *weight.shape[1:]) for weight in owned]
    elsewhere = {expert for rank, held in enumerate(experts.tolist()) if rank != me for expert in held}
    given = [expert - mine.start for expert in elsewhere.intersection(mine)]
    with _exchange(rounds, owned, given) as read:
        for first, count, owner, row in _runs(experts[me], rounds.placement.num_experts, rounds.num_ranks):
            for nth, weight in enumerate(found):
                if owner == NONE:
                    weight[first : first + count].zero_()
                else:
                    weight[first : first + count].copy_(read(owner)[nth][row : row + count])
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
    mine = _owned(rounds)
    found = [grad.new_zeros(len(mine), *grad.shape[1:]) for grad in grads]
    of_experts = defaultdict[int, list[int]](list)
    for slot, expert in enumerate(experts.flatten().tolist()):
        of_experts[expert].append(slot)
    of_experts.pop(NONE, None)
    _add_slots(rounds, grads, found, {expert - mine.start: of_experts.pop(expert, []) for expert in mine}, of_experts)
    return found


def add_copies(rounds: Rounds, grads: list[torch.Tensor], sources: torch.Tensor) -> list[torch.Tensor]:
    """Add the gradients of copies for a round to those of the slots that were copied, in the order of slots.

    Args:
        grads: `[slots, ...]` of each tensor.
        sources: the slot of which each slot is a copy, or -1; see moecomm.weights.copies.

    Returns:
        `[slots, ...]` of each tensor: sums in float32 or a wider dtype, rounded once; 0 for copies.
    """
    number, copied = sources.shape[1], defaultdict[int, list[int]](list)
    for slot, source in enumerate(sources.flatten().tolist()):
        copied[source].append(slot)
    copied.pop(NONE, None)
    if not copied:
        return grads
    found = [grad.clone() for grad in grads]
    mine = [source for source in copied if source // number == rounds.rank]
    held = {source % number: sorted([source, *copied.pop(source)]) for source in mine}
    _add_slots(rounds, grads, found, held, copied)
    for grad in found:
        grad[sources[rounds.rank] != NONE] = 0
    return found


def _add_slots(
    rounds: Rounds,
    grads: Sequence[torch.Tensor],
    found: list[torch.Tensor],
    held: Mapping[int, list[int]],
    others: Mapping[int, list[int]],
) -> None:
    """Add gradients of slots of all ranks.  Collective.

    Args:
        rounds: of the Buffer.
        grads: `[slots, ...]` of each tensor.
        found: written, a tensor for each of `grads`.
        held: by row of `found`, the slots of all ranks to add, in this order.
        others: slots that other ranks add.
    """
    number = len(rounds.local_experts)
    given = sorted(slot % number for slots in others.values() for slot in slots if slot // number == rounds.rank)
    with _exchange(rounds, grads, given) as read:
        for row, slots in held.items():
            for nth, total in enumerate(found):
                if terms := [read(slot // number)[nth][slot % number] for slot in slots]:
                    total[row].copy_(_sum(terms))


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
    """Return the experts that this rank owns.  Raises as refuse() for weights that can't be used."""
    _require(rounds)
    mine = _owned(rounds)
    if not owned:
        refuse(rounds, BadInput("weights", "none", "one or more"))
    for weight in owned:
        if weight.ndim == 0 or len(weight) != len(mine) or weight.device != rounds.device:
            got = f"{tuple(weight.shape)} on {weight.device}"
            want = (
                f"[{len(mine)}, ...] on {rounds.device}: experts {mine.start} to {mine.stop - 1}, which this rank owns"
            )
            refuse(rounds, BadInput("weights", got, want))
    return mine


def refuse(rounds: Rounds, error: BadInput) -> NoReturn:
    """Raise the error of this rank's weights, and on all other ranks a BadInput that names it.  Collective.

    Raises:
        BadInput: `error`.
        Unsupported: masked ranks.
        As Window.barrier().
    """
    _require(rounds)
    _agree(rounds, error)
    raise error


def _agree(rounds: Rounds, mine: _Kinds | BadInput) -> None:
    """Compare kinds of tensors with those of the other ranks, outside of an exchange.  Collective.

    `mine`: kinds, or why this rank refuses its arguments.

    Raises:
        BadInput, Mismatch: a rank refuses its arguments, or has tensors of other kinds.
    """
    if (exchanges := rounds.part(Exchanges)) is not None:  # the other ranks are at its barriers
        with exchanges.reading(None if isinstance(mine, BadInput) else mine, at_once=True):
            return
    with agreement(rounds, "slot_weights") as ranks:
        if isinstance(mine, BadInput):
            raise mine
        ranks.compare({"weights": _shown(mine)})
        ranks.settle()


def _require(rounds: Rounds) -> None:
    """Raise the error of what is the same on all ranks: BadInput, MemoryReleased, Unsupported."""
    if rounds.placement is None:
        raise BadInput("buffer", "one without a placement", "a Buffer that was opened with a placement")
    if rounds.released:
        raise MemoryReleased
    refuse_capture(rounds, "slot_weights")  # a graph would go on to copy by the placement of its capture
    if rounds.masked:
        raise Unsupported(f"weights of slots beside masked ranks {sorted(rounds.masked)}, which own experts")


def _kinds(tensors: Sequence[torch.Tensor]) -> _Kinds:
    return tuple((tensor.shape[1:], tensor.dtype) for tensor in tensors)


@functools.cache
def _digest(kinds: _Kinds) -> int:
    return int.from_bytes(hashlib.sha256(repr(kinds).encode()).digest()[:7], "little")


@functools.cache
def _shown(kinds: _Kinds) -> str:
    return ", ".join(f"{dtype} {('E/R', *shape)}" for shape, dtype in kinds)


def _error(digests: list[int], mine: int, texts: Mapping[int, str]) -> BadInput | Mismatch | None:
    """Return the error that the digests of all ranks show, or None.  `texts`: of the kinds that this rank knows."""
    if _REFUSED in digests:
        want = "weights that it accepts: see its own error"
        return BadInput("weights", "weights that this rank refused", want, digests.index(_REFUSED))
    other = next((rank for rank, digest in enumerate(digests) if digest != mine), None)
    return None if other is None else Mismatch("weights", texts[mine], texts.get(digests[other], "others"), other)


@contextmanager
def _exchange(rounds: Rounds, tensors: Sequence[torch.Tensor], given: Iterable[int]) -> Iterator[_Read]:
    """Let all ranks read these rows of each other's tensors.  Collective.

    The block gets a function that returns the tensors of a rank.  Raises as _exchange_of() and Exchanges.reading().
    """
    exchanges, exchange = _exchange_of(rounds, tensors)
    parts = list(zip(exchange.of(rounds.rank), tensors, strict=True))
    with exchanges.reading(_kinds(tensors), ((part[row], tensor[row]) for part, tensor in parts for row in given)):
        yield lambda rank: tensors if rank == rounds.rank else exchange.of(rank)


def _exchange_of(rounds: Rounds, tensors: Sequence[torch.Tensor]) -> tuple[Exchanges, Exchange]:
    """Return the exchange for tensors of these shapes.  Opens it, collectively, at the first use.

    It has as many rows as a rank has slots, or owns experts, whichever are more: after a loss these may be.

    Raises:
        Mismatch: ranks have tensors of different shapes or dtypes.
        MemoryReleased: by Buffer.release_memory().
        As Window.
    """
    if rounds.released:
        raise MemoryReleased
    kinds, exchanges = _kinds(tensors), rounds.part(Exchanges)
    if exchanges is not None and kinds in exchanges.by_kinds:
        return exchanges, exchanges.by_kinds[kinds]
    _agree(rounds, kinds)
    assert rounds.placement is not None
    rows = max(len(rounds.local_experts), most_experts(rounds.placement.num_experts, rounds.num_ranks))
    digests = 8 * rounds.num_ranks if exchanges is None else 0
    opened = Exchange(rounds, rows, {str(nth): kind for nth, kind in enumerate(kinds)}, digests)
    if exchanges is None:
        exchanges = rounds.add(Exchanges(opened))
    exchanges.by_kinds[kinds] = opened
    return exchanges, opened


def _runs(experts: torch.Tensor, num_experts: int, ranks: int) -> Iterator[tuple[int, int, int, int]]:
    """Yield slots that one copy fills: the first, how many, the owner of their experts, and the row of the first there.

    Args:
        experts: `[slots]` of a rank.  The owner of empty slots is NONE.
        num_experts, ranks: of the placement.
    """
    owners = owners_of(experts, num_experts, ranks).tolist()
    places = []  # of each slot: the owner, and how far its row there is from the slot
    for slot, (expert, owner) in enumerate(zip(experts.tolist(), owners, strict=True)):
        row = slot if owner == NONE else expert - experts_of(owner, num_experts, ranks).start
        places.append((owner, row - slot))
    for (owner, away), run in groupby(range(len(places)), key=places.__getitem__):
        first, *more = run
        yield first, 1 + len(more), owner, first + away
