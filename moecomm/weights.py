"""ExpertWeights: the weights of a Buffer's slots in memory that all ranks read, and their way to another placement."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from moecomm.base import placement as placements
from moecomm.base.placement import NONE, Placement
from moecomm.base.validation import check_dtype, check_shape
from moecomm.buffer import Buffer
from moecomm.errors import BadInput
from moecomm.window import Window

_ALIGNMENT = 256  # bytes; of a tensor in the window
_DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.uint8, torch.int8, torch.int32, torch.float8_e4m3fn)


class ExpertWeights:
    """Weights of the slots of a Buffer with a placement, in a Window.  Ranks copy experts from each other.

    A rank fills slots that are empty, while rounds go on, and all ranks then switch at once:

        weights = ExpertWeights(buffer, {"w13": (2 * I, H), "w2": (H, I)}, dtype=torch.bfloat16)
        weights["w13"][slot].copy_(...)  # of each slot that holds an expert
        while weights.prefetch(target) != buffer.placement:
            ...  # rounds by the placement so far
            weights.commit()

    Slots that are in use are never written, so where all slots are full nothing can move: leave some empty.  Opening
    is collective, and so are prefetch() and commit().

    Args:
        buffer: opened with a placement, in one domain.
        shapes: of an expert's tensors, by name.
        dtype: of all of them, or of each by name.

    Raises:
        BadInput: a Buffer without a placement, a shape or dtype that can't be.
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
        self._parts: dict[str, tuple[int, tuple[int, ...], torch.dtype]] = {}
        for name, shape in shapes.items():
            kind: Any = dtype.get(name) if isinstance(dtype, Mapping) else dtype
            check_dtype("dtype", kind, _DTYPES)
            whole = (slots, *check_shape("shapes", shape))
            self._parts[name] = at, whole, kind
            at += -(-math.prod(whole) * kind.itemsize // _ALIGNMENT) * _ALIGNMENT
        group, device = buffer.rounds.members.group, buffer.device
        backend: Any = buffer.rounds.settings.backend
        self._window = Window(group, at, backend=backend, device=device, timeout_s=buffer.timeout_s)
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]
        self._next: Placement | None = None

    def __getitem__(self, name: str) -> torch.Tensor:
        """Return `[slots, *shape]`, the tensor of that name of this rank."""
        return self._of(name, self._window.rank)

    def prefetch(self, target: Placement) -> Placement:
        """Start to copy the experts that a placement has in other slots, and return what commit() sets.

        That is `target` but for the order of a rank's slots, where ranks have empty slots enough; else a step towards
        it: experts that are needed no more are gone, and as many new ones are there as found an empty slot.  GPUs copy
        on a stream of their own, by copy engines, after the work of all ranks that is enqueued now; no host waits.

        Args:
            target: of the same experts, ranks and at most as many slots.

        Raises:
            BadInput: what can't be placed, or a Buffer that has shrunk: its ranks open other ExpertWeights.
            As Window.barrier().
        """
        if self._buffer.rounds is not self._rounds:
            raise BadInput("buffer", "one that has shrunk", "other ExpertWeights of the ranks that are left")
        before = self._buffer.placement
        assert before is not None
        after = step(before, target)
        if self._stream is None:
            self._window.barrier()
            self._copy(before, after)
        else:
            self._stream.wait_stream(torch.cuda.current_stream(self._buffer.device))
            with torch.cuda.stream(self._stream):
                self._window.barrier()
                self._copy(before, after)
        self._next = after
        return after

    def commit(self) -> None:
        """Wait for the copies of the last prefetch(), and let all ranks follow its placement from the next round on.

        Raises:
            BadInput: nothing was prefetched.
            As Buffer.set_placement() and Window.check().
        """
        if self._next is None:
            raise BadInput("commit", "nothing to commit", "prefetch() first")
        if self._stream is not None:
            self._stream.synchronize()
        self._window.check()
        self._buffer.set_placement(self._next)
        self._next = None

    def close(self) -> None:
        """Give the memory back.  Tensors that are still referenced stay valid."""
        self._window.close()

    def _of(self, name: str, rank: int) -> torch.Tensor:
        at, shape, dtype = self._parts[name]
        return self._window.tensor(shape, dtype, rank=rank, offset=at)

    def _copy(self, before: Placement, after: Placement) -> None:
        me = self._window.rank
        for slot, (old, new) in enumerate(zip(before.experts[me].tolist(), after.experts[me].tolist(), strict=True)):
            if new in (NONE, old):
                continue
            held = before.slots_by_expert[new]
            source = min(held, key=lambda one: (one // before.slots != me, (one // before.slots - me) % before.ranks))
            for name in self._parts:
                self._of(name, me)[slot].copy_(self._of(name, source // before.slots)[source % before.slots])


def step(before: Placement, target: Placement) -> Placement:
    """Return the placement nearest to `target` that fills only slots that are empty before, the same on all ranks.

    No expert is lost on the way: one stays where it is until another slot holds it.

    Raises:
        BadInput: other experts or ranks, or more slots.
    """
    if not isinstance(target, Placement) or (target.ranks, target.num_experts) != (before.ranks, before.num_experts):
        want = f"a placement of {before.num_experts} experts on {before.ranks} ranks"
        raise BadInput("target", repr(target), want)
    target = placements.with_slots(target, before.slots)
    found = []
    for held, wanted in zip(before.experts.tolist(), target.experts.tolist(), strict=True):
        left = [expert for expert in wanted if expert != NONE]
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
    for slots, held in zip(found, before.experts.tolist(), strict=True):
        for slot, expert in enumerate(held):
            if slots[slot] == NONE and expert != NONE and expert not in there:
                slots[slot] = expert
                there.add(expert)
    return Placement(found, num_experts=before.num_experts, slots=before.slots, choice=target.choice)
