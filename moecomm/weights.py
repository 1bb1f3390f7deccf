"""ExpertWeights: the weights of a Buffer's slots in memory that all ranks read, and their way to another placement.

A slot is read by layers of its own rank, and by copies of others.  prefetch() writes slots that are empty.  It orders
these writes after both kinds of reads: its copies follow the last round of this rank and all work that is enqueued on
the current stream, which by then has no round of a placement that names the slot; and they follow a barrier of the
copies of all ranks.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch

from moecomm.base import placement as placements
from moecomm.base.placement import NONE, Placement
from moecomm.base.validation import check_dtype, check_real, check_shape
from moecomm.buffer import Buffer
from moecomm.errors import BadInput, Mismatch
from moecomm.fused.copies import SlotTensor
from moecomm.gpu import plain_kernel
from moecomm.membership.suspension import refuse_capture
from moecomm.ranks.opening import opening
from moecomm.window import Window
from moecomm.window.pace import PAUSE, Pace

_ALIGNMENT = 256  # bytes; of a tensor in the window
_RATES = 1e-3, 1e6  # GB/s
_DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.uint8, torch.int8, torch.int32, torch.float8_e4m3fn)


class ExpertWeights:
    """Weights of the slots of a Buffer with a placement, in a Window.  Ranks copy experts from each other.

    A rank fills slots that are empty, while rounds go on, and all ranks then switch at the same round:

        weights = ExpertWeights(buffer, {"w13": (2 * I, H), "w2": (H, I)}, dtype=torch.bfloat16)
        weights["w13"][slot].copy_(...)  # of each slot that holds an expert
        while weights.prefetch(target) != buffer.placement:
            ...  # rounds by the placement so far
            weights.commit()

    Slots that are in use are never written, so where all slots are full nothing can move: leave some empty.  Opening
    is collective, and so are prefetch() and commit().

    Weights of experts that a commit() takes away stay where they are until the next prefetch().  Enqueue what reads
    them before that, on the current stream.  Should a rank be lost, shrink() may go back to that placement.

    Args:
        buffer: opened with a placement.  GPUs: in one NVLink domain.
        shapes: of an expert's tensors, by name.
            All ranks pass the same in the same order.
        dtype: of all of them, or of each by name.

    Raises:
        BadInput: a Buffer without a placement, a shape or dtype that can't be, weights that no memory has room for.
        Mismatch: ranks passed other shapes, names or dtypes, or the same in another order.
        Unsupported, Timeout, PeerLost, Aborted: as opening a Window.
    """

    def __init__(
        self,
        buffer: Buffer,
        shapes: Mapping[str, Sequence[int]],
        *,
        dtype: torch.dtype | Mapping[str, torch.dtype] = torch.bfloat16,
    ) -> None:
        if not isinstance(buffer, Buffer) or buffer.placement is None:
            raise BadInput("buffer", repr(buffer), "a Buffer that was opened with a placement")
        if not isinstance(shapes, Mapping) or not shapes:
            raise BadInput("shapes", repr(shapes), "shapes by name")
        self._buffer, self._rounds, slots, at = buffer, buffer.rounds, buffer.placement.slots, 0
        parts: dict[str, tuple[tuple[int, ...], torch.dtype, int]] = {}
        for name, shape in shapes.items():
            kind: Any = dtype.get(name) if isinstance(dtype, Mapping) else dtype
            check_dtype("dtype", kind, _DTYPES)
            whole = (slots, *check_shape("shapes", shape))
            parts[name] = whole, kind, at
            at += -(-math.prod(whole) * kind.itemsize // _ALIGNMENT) * _ALIGNMENT
        group, device = buffer.rounds.members.group, buffer.device
        self._agree(parts)
        backend: Any = buffer.rounds.settings.backend
        try:
            self._window = Window(group, at, backend=backend, device=device, timeout_s=buffer.timeout_s)
        except BadInput as error:
            if error.argument != "nbytes":
                raise
            want = f"weights of {slots} slots in all that take {error.want}"
            raise BadInput("shapes", f"{at} bytes on each rank", want, error.rank) from None
        reach = self._window.pointers
        self._tensors = {
            name: SlotTensor(partial(_of, self._window, *part), reach, part[2], f"{name} at {part[2]}")
            for name, part in parts.items()
        }
        for tensor in self._tensors.values():
            self._rounds.slot_tensors.add(tensor.of(self._window.rank).data_ptr(), tensor)
        self._stream: torch.cuda.Stream | None = None
        if device.type == "cuda":
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
            plain_kernel.load(PAUSE, device.index)  # now: loading waits for kernels that are running
        self._next: Placement | None = None  # fills slots that are empty in the placement of generation `_since`
        self._since = 0

    def __getitem__(self, name: str) -> torch.Tensor:
        """Return `[slots, *shape]`, the tensor of that name of this rank.

        Raises:
            BadInput: no such name.
            Closed: after close().
        """
        if name not in self._tensors:
            raise BadInput("name", repr(name), " or ".join(map(repr, self._tensors)))
        return self._tensors[name].of(self._window.rank)

    def prefetch(self, target: Placement, *, max_gbs: float | None = None) -> Placement:
        """Start to copy the experts that a placement has in other slots, and return what commit() sets.

        That is `target` but for the order of a rank's slots, where ranks have empty slots enough; else a step towards
        it: experts that are needed no more are gone, and as many new ones are there as found an empty slot.  GPUs copy
        on a stream of their own, by copy engines, after the work of all ranks that is enqueued now; no host waits.

        Args:
            target: of the same experts, ranks and at most as many slots.  Experts that no rank holds since a loss get
                no slot: write their weights yourself, then call set_placement().
            max_gbs: copies of this rank take at most so many GB/s (10^9 bytes a second); None: all that they get.
                CPU ranks: the call takes as long.

        Raises:
            BadInput: what can't be placed, another `choice` that commit() would refuse, or a Buffer that has shrunk:
                its ranks open other ExpertWeights.
            Closed: the Buffer is closed.
            As Window.barrier().
        """
        self._require_same_ranks()
        self._rounds.require_usable()
        if max_gbs is not None:
            check_real("max_gbs", max_gbs, *_RATES)
        refuse_capture(self._rounds, "prefetch")
        before = self._buffer.placement
        assert before is not None
        after = step(before, target)
        if before.choice == "balanced":
            new = (after.experts != before.experts) & (after.experts != NONE)
            self._rounds.reserve(new.flatten().nonzero().flatten().tolist())
        self._rounds.session.order()
        if self._stream is None:
            self._fill(before, after, max_gbs)
        else:
            self._stream.wait_stream(torch.cuda.current_stream(self._buffer.device))
            with torch.cuda.stream(self._stream):
                self._fill(before, after, max_gbs)
        self._next, self._since = after, self._rounds.generation
        return after

    def commit(self) -> None:
        """Let all ranks follow the placement of the last prefetch() from the next round on: Buffer.set_placement().

        Waits for no rank and no round, but for copies of this rank that have not come yet.  GPUs: make some rounds
        between prefetch() and commit(), or the rounds that are enqueued may end during this wait.

        Raises:
            BadInput: nothing was prefetched, or the placement has changed since; a Buffer that has shrunk.
            As Buffer.set_placement() and Window.barrier().
        """
        self._require_same_ranks()
        if self._next is None or self._rounds.generation != self._since:
            raise BadInput("commit", "nothing to commit", "prefetch() first, by the placement that the Buffer has now")
        if self._stream is not None:
            self._stream.synchronize()
        self._window.raise_failure()
        reserved, self._rounds.reserved = self._rounds.reserved, frozenset()
        try:
            self._buffer.set_placement(self._next)
        except BaseException:
            self._rounds.reserved = reserved
            raise
        self._next = None

    def close(self) -> None:
        """Give the memory back.  Tensors that are still referenced stay valid."""
        self._window.close()

    def _agree(self, parts: Mapping[str, tuple[tuple[int, ...], torch.dtype, int]]) -> None:
        """Compare the tensors of all ranks, whose copies find them by place."""
        members = self._rounds.members
        mine = {
            "shapes": ", ".join(f"{name} {list(shape[1:])}" for name, (shape, _, _) in parts.items()),
            "dtype": ", ".join(f"{name} {dtype}" for name, (_, dtype, _) in parts.items()),
        }
        how: dict[str, Any] = {"of": "ExpertWeights", "note": "ExpertWeights()"}
        with opening(members.group, members.timeout_s, **how) as ranks:
            for rank, record in enumerate(ranks.all_gather(json.dumps(mine).encode())):
                for name, theirs in json.loads(record).items():
                    if theirs != mine[name]:
                        raise Mismatch(name, mine[name], theirs, rank)
            ranks.settle()

    def _require_same_ranks(self) -> None:
        if self._buffer.rounds is not self._rounds:
            raise BadInput("buffer", "one that has shrunk", "other ExpertWeights of the ranks that are left")

    def _fill(self, before: Placement, after: Placement, max_gbs: float | None) -> None:
        self._window.barrier()  # earlier copies of all ranks have ended
        pace = None if max_gbs is None else Pace(self._buffer.device, max_gbs)
        me, domain = self._window.rank, self._rounds.domain_ranks
        for slot, (old, new) in enumerate(zip(before.held[me], after.held[me], strict=True)):
            if new in (NONE, old):
                continue
            self._rounds.filled[slot] = self._rounds.generation + 1
            held = [divmod(one, before.slots) for one in before.slots_by_expert[new]]
            rank, source = min(
                held, key=lambda one: (one[0] != me, one[0] // domain != me // domain, (one[0] - me) % before.ranks)
            )
            for tensor in self._tensors.values():
                to, origin = tensor.of(me)[slot], tensor.of(rank)[source]
                if pace is None:
                    to.copy_(origin)
                else:
                    pace.copy(to, origin)


def _of(window: Window, shape: tuple[int, ...], dtype: torch.dtype, offset: int, rank: int) -> torch.Tensor:
    return window.tensor(shape, dtype, rank=rank, offset=offset)


def step(before: Placement, target: Placement) -> Placement:
    """Return the placement nearest to `target` that fills only slots that are empty before, the same on all ranks.

    No expert is lost on the way: one stays where it is until another slot holds it.  An expert that no slot holds
    before, since its ranks are lost, gets none: there are no weights to copy.

    Raises:
        BadInput: other experts or ranks, more slots, or another choice where that can't change.
    """
    target = placements.successor("target", before, target)
    found = []
    for held, wanted in zip(before.held, target.held, strict=True):
        left = [expert for expert in wanted if expert != NONE and before.slots_by_expert[expert]]
        slots = [NONE] * before.slots
        for slot, expert in enumerate(held):
            if expert in left:
                slots[slot] = expert
                left.remove(expert)
        for slot, expert in enumerate(held):
            if expert == NONE and left:
                slots[slot] = left.pop(0)
        found.append(slots)
    there = {expert for slots in found for expert in slots}
    for slots, held in zip(found, before.held, strict=True):
        for slot, expert in enumerate(held):
            if slots[slot] == NONE and expert != NONE and expert not in there:
                slots[slot] = expert
                there.add(expert)
    return placements.unchecked(before, found, target.choice)
