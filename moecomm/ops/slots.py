"""Weights of the slots of a placement, copied from the ranks that own the experts; gradients take the way back.

The owner of an expert does not depend on the placement: rank r owns the experts that it would hold without one.  So
parameters, optimizers and checkpoints are those of a layer without a placement, and every slot is a copy.  The ranks
that are left after a loss own all experts, too.  An expert that was lost has an owner and no slot: its weights are not
read, and its gradients are 0, until set_placement() gives it a slot.

Ranks exchange weights and gradients over a Window, which layers of the same shapes share, and which ends with the
Buffer, or with a release of its memory.  A rank writes what others need into its own memory there, and reads theirs
after a barrier.  A second barrier lets the next exchange write.

Both are barriers of the first Window, whatever the shapes: ranks that pass other shapes join the same barriers.  A rank
that refuses its arguments joins them, too, so none waits for it.  Any other error of one rank ends in a Timeout.
"""

from __future__ import annotations

import functools
import hashlib
import math
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, NoReturn

import torch

from moecomm.base import tangents
from moecomm.base.experts import experts_of, most_experts, owners_of
from moecomm.base.placement import NONE
from moecomm.errors import BadInput, MemoryReleased, Mismatch, MoecommError, Unsupported
from moecomm.membership.suspension import agreement, refuse_capture
from moecomm.ranks.settings import compare
from moecomm.rounds import names
from moecomm.rounds.rounds import Rounds
from moecomm.window import Window

_ALIGNMENT = 256  # bytes; of a tensor in the window
_REFUSED = -1  # in the place of a digest: a rank's arguments can't be used
_Kinds = tuple[tuple[torch.Size, torch.dtype], ...]  # shape and dtype of each tensor of an expert


class _Pending(NamedTuple):
    """Digests of an exchange of GPUs, which the host compares once they are copied.

    Attributes:
        digests: of all ranks, in pinned memory.
        copied: the end of the copy.
        posted: the digest of this rank.
    """

    digests: torch.Tensor
    copied: torch.cuda.Event
    posted: int


class _Barriers:
    """Barriers of all exchanges of a Buffer.  Each rank posts a digest of its shapes and dtypes.

    CPU ranks compare digests in each exchange.  GPUs do it later, so that no host waits for its device.

    Args:
        window: of all ranks.
        offset: in its memory, of the digests of all ranks.
    """

    def __init__(self, window: Window, offset: int) -> None:
        self._window = window
        ranks, me = range(window.num_ranks), window.rank
        self._digests = window.tensor((len(ranks),), torch.int64, offset=offset)
        self._places = [window.tensor((1,), torch.int64, rank=rank, offset=offset + 8 * me) for rank in ranks]
        self._texts: dict[int, str] = {}  # of the kinds that this rank has passed, by their digests
        self._posted: int | None = None  # what all ranks have of this one
        self._pending: deque[_Pending] = deque()
        self._done: torch.cuda.Event | None = None  # the end of the last exchange, on GPUs
        if window.device.type == "cuda":
            self._done = torch.cuda.Event()  # type: ignore[no-untyped-call]

    @contextmanager
    def in_turn(self) -> Iterator[None]:
        """Order an exchange behind the last one, also where the caller has changed streams."""
        if self._done is None:
            yield
            return
        stream = torch.cuda.current_stream(self._window.device)
        stream.wait_event(self._done)
        try:
            yield
        finally:
            self._done.record(stream)

    @contextmanager
    def reading(self, kinds: _Kinds) -> Iterator[None]:
        """Let ranks read in the block what others have written before it.  Collective.

        Raises:
            BadInput, Mismatch: a rank has refused its arguments, or has tensors of other kinds.  GPUs: at the end of
                a later exchange, or in Rounds.check_exchanges().
            As Window.barrier().
        """
        posted, error = self._post(kinds), None
        if self._done is None:
            error = self._error(self._digests.tolist(), posted)
        else:
            digests = torch.empty(len(self._places), dtype=torch.int64, device="cpu", pin_memory=True)
            digests.copy_(self._digests, non_blocking=True)
            copied = torch.cuda.current_stream(self._window.device).record_event()
            self._pending.append(_Pending(digests, copied, posted))
        if error is None:
            yield
        self._window.barrier()
        if error is not None:
            raise error
        self.raise_pending()  # at the end: no rank waits for this one

    def open(self, kinds: _Kinds) -> None:
        """Compare kinds for which no exchange is open.  The host waits for the device.  Collective.

        Raises:
            As reading(), on all ranks.
        """
        with self.in_turn():
            posted = self._post(kinds)
            error = self._error(self._digests.tolist(), posted)
            self._window.barrier()
        if error is not None:
            raise error

    def refuse(self) -> None:
        """Join one exchange of the other ranks, and post that this rank refused its arguments.  Collective."""
        with self.in_turn():
            self._post(None)
            self._window.barrier()

    def wait(self) -> None:
        """Wait for the exchanges so far.  Returns in time even when one fails, because barriers have deadlines."""
        if self._done is not None:
            self._done.synchronize()

    def raise_pending(self) -> None:
        """Raise the error of exchanges whose digests are copied, on GPUs."""
        while self._pending and self._pending[0].copied.query():  # type: ignore[no-untyped-call]
            first = self._pending.popleft()
            if (error := self._error(first.digests.tolist(), first.posted)) is not None:
                self.raise_failure()
                raise error

    def raise_failure(self) -> None:
        """Raise the error of a failed barrier, which leaves the digests of earlier exchanges: mostly equal ones."""
        self._window.raise_failure()

    def _post(self, kinds: _Kinds | None) -> int:
        """Write this rank's digest to all ranks, wait for theirs, and return it.  `kinds`: None to refuse."""
        digest = _REFUSED if kinds is None else _digest(kinds)
        if kinds is not None:
            self._texts[digest] = _shown(kinds)
        if digest != self._posted:
            for place in self._places:
                place.fill_(digest)
            self._posted = digest
        self._window.barrier()
        return digest

    def _error(self, digests: list[int], posted: int) -> MoecommError | None:
        """Return the error that the digests of all ranks make, or None."""
        if _REFUSED in digests:
            want = "weights that it accepts: see its own error"
            return BadInput("weights", "weights that this rank refused", want, digests.index(_REFUSED))
        other = next((rank for rank, digest in enumerate(digests) if digest != posted), None)
        if other is None:
            return None
        return Mismatch("weights", self._texts[posted], self._texts.get(digests[other], "others"), other)


class _Exchange(NamedTuple):
    """A Window with room for a rank's slots or owned experts, `[rows, ...]` of each tensor one after the other.

    Attributes:
        window: of all ranks.
        slots: of a rank.
        rows: as many as a rank has slots, or owns experts, whichever are more: after a loss these may be.
        kinds: of the tensors.
        barriers: of the Buffer.
    """

    window: Window
    slots: int
    rows: int
    kinds: _Kinds
    barriers: _Barriers

    def of(self, rank: int) -> list[torch.Tensor]:
        """Return a rank's tensors."""
        found, at = [], 0
        for shape, dtype in self.kinds:
            found.append(self.window.tensor((self.rows, *shape), dtype, rank=rank, offset=at))
            at += _room(self.rows, shape, dtype)
        return found


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
    with exchange.barriers.in_turn():
        elsewhere = {expert for rank, held in enumerate(experts.tolist()) if rank != me for expert in held}
        for part, weight in zip(exchange.of(me), owned, strict=True):
            for expert in elsewhere.intersection(mine):
                part[expert - mine.start].copy_(weight[expert - mine.start])
        with exchange.barriers.reading(exchange.kinds):
            for first, count, owner, row in _runs(experts[me], rounds.placement.num_experts, rounds.num_ranks):
                filled = [weight[first : first + count] for weight in found]
                if owner == NONE:
                    for weight in filled:
                        weight.zero_()
                    continue
                for weight, source in zip(filled, owned if owner == me else exchange.of(owner), strict=True):
                    weight.copy_(source[row : row + count])
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
    with exchange.barriers.in_turn():
        for slot in given:
            for part, grad in zip(exchange.of(me), grads, strict=True):
                part[slot].copy_(grad[slot])
        with exchange.barriers.reading(exchange.kinds):
            of_ranks = [grads if rank == me else exchange.of(rank) for rank in range(exchange.window.num_ranks)]
            for row, slots in held.items():
                for nth, total in enumerate(found):
                    terms = [of_ranks[slot // exchange.slots][nth][slot % exchange.slots] for slot in slots]
                    if terms:
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
    if rounds.exchange_barriers is not None:
        rounds.exchange_barriers.refuse()
        raise error
    with agreement(rounds, "slot_weights"):
        raise error


def _require(rounds: Rounds) -> None:
    """Raise the error of what is the same on all ranks: BadInput, MemoryReleased, Unsupported."""
    if rounds.placement is None:
        raise BadInput("buffer", "one without a placement", "a Buffer that was opened with a placement")
    if rounds.released:
        raise MemoryReleased
    refuse_capture(rounds, "slot_weights")  # a graph would go on to copy by the placement of its capture
    if rounds.masked:
        raise Unsupported(f"weights of slots beside masked ranks {sorted(rounds.masked)}, which own experts")


def _room(rows: int, shape: torch.Size, dtype: torch.dtype) -> int:
    return -(-rows * math.prod(shape) * dtype.itemsize // _ALIGNMENT) * _ALIGNMENT


@functools.cache
def _digest(kinds: _Kinds) -> int:
    return int.from_bytes(hashlib.sha256(repr(kinds).encode()).digest()[:7], "little")


@functools.cache
def _shown(kinds: _Kinds) -> str:
    return ", ".join(f"{dtype} {('E/R', *shape)}" for shape, dtype in kinds)


def _exchange_of(rounds: Rounds, tensors: Sequence[torch.Tensor]) -> _Exchange:
    """Return the exchange for tensors of these shapes.  Opens it, collectively, at the first use.

    Raises:
        Mismatch: ranks have tensors of different shapes or dtypes.
        MemoryReleased: by Buffer.release_memory().
        As Window.
    """
    if rounds.released:
        raise MemoryReleased
    kinds = tuple((tensor.shape[1:], tensor.dtype) for tensor in tensors)
    opened: dict[_Kinds, _Exchange] = rounds.exchanges
    if kinds not in opened:
        barriers: _Barriers | None = rounds.exchange_barriers
        if barriers is None:
            with agreement(rounds, "slot_weights") as ranks:
                shown = {_digest(kinds): _shown(kinds)}
                backend = rounds.settings.backend
                compare(ranks, {"weights": _digest(kinds)}, backend, lambda _, other: shown.get(other, "others"))
                ranks.settle()
        else:
            barriers.open(kinds)
        slots, placement = len(rounds.local_experts), rounds.placement
        assert placement is not None
        rows = max(slots, most_experts(placement.num_experts, rounds.num_ranks))
        about: dict[str, Any] = {"backend": rounds.settings.backend, "device": rounds.device}
        nbytes = sum(_room(rows, *kind) for kind in kinds)
        digests = 8 * rounds.num_ranks if barriers is None else 0
        window = Window(rounds.members.group, nbytes + digests, **about, timeout_s=rounds.members.timeout_s)
        if barriers is None:
            barriers = rounds.exchange_barriers = _Barriers(window, nbytes)
        opened[kinds] = _Exchange(window, slots, rows, kinds, barriers)
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
