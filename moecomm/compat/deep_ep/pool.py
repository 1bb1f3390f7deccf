"""The moecomm.Buffers behind one deep_ep buffer: opened, collectively, by the first call with their sizes.

deep_ep learns the hidden size, the experts, K and the number of tokens call by call.  All ranks make the same calls,
so all of them are here with the same sizes at the same time; only the number of tokens may differ, and is gathered.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial
from operator import attrgetter
from typing import Any, NamedTuple, Protocol, TypeVar

import torch

from moecomm.base.bound import Bound
from moecomm.base.choices import Layout, OnTimeout
from moecomm.base.placement import Placement
from moecomm.base.validation import check_integer
from moecomm.buffer import Buffer
from moecomm.compat.deep_ep.absent import Presence
from moecomm.compat.deep_ep.arguments import check_experts, described
from moecomm.compat.deep_ep.calls import Calls
from moecomm.compat.deep_ep.event import comm_stream
from moecomm.dispatch import Options, Request, dispatch
from moecomm.dispatch.options import Gradients
from moecomm.dispatch.routed import Handle
from moecomm.errors import BadInput, Closed, Mismatch, Unsupported
from moecomm.gpu import budgets
from moecomm.membership.pending import PendingMasks
from moecomm.ranks.group import Group
from moecomm.ranks.rendezvous import rendezvous
from moecomm.ranks.settings import MAX_FLAT_ROWS, Settings
from moecomm.rounds.call_count import counted
from moecomm.rounds.rounds import Rounds
from moecomm.rounds.signature import GROW

# Rounds with room in a window, one of them in the reserve.  The outputs of the others stay: those of two micro-batches
# and, in "flat", what a combine copies; in "batched" rows for a combine without a copy.
_ROUNDS: dict[Layout, int] = {"flat": 4, "expert": 2, "batched": 4}
_HANDLES = 64  # that may be alive at a time
_ENTRY_BYTES = 8 + 4  # of each k of a row in a handle: its expert, and its weight or the row of the expert
_ROW_BYTES = 8 + 4 + 4  # of a row: source rank and token, weight, and alignment of the tables
_ALIGNMENT = 128


class Room(NamedTuple):
    """Bytes of a window for outputs, and of those the bytes for tables, and of the reserve: see WindowMemory."""

    window: int
    tables: int
    reserve: int


def room_for(settings: Settings, layout: Layout, max_rows: int | None = None) -> Room:
    """Return the room for rounds of a layout.

    Args:
        settings: of the Buffer; its capacity factor says which rows are expected, math.inf: the worst case.
        layout: "flat" or "expert".
        max_rows: rows of a round, in the place of those.
    """
    rows = settings.capacity_rows(layout, _ALIGNMENT if layout == "expert" else 1) if max_rows is None else max_rows
    round_bytes = settings.round_bytes(layout, rows)
    handle = rows * (_ENTRY_BYTES * settings.topk + _ROW_BYTES) + settings.max_tokens * settings.tables_bytes
    handles = min(_HANDLES * handle, 4 * round_bytes)
    return Room(_ROUNDS[layout] * round_bytes + handles, handles, round_bytes)


def batched_room(settings: Settings) -> Room:
    """Return the room for low-latency rounds, whose rows have the worst case's shape."""
    round_bytes = settings.round_bytes("batched")
    tables = round_bytes - settings.worst_rows("batched") * settings.hidden * settings.dtype.itemsize
    rounds = _ROUNDS["batched"]
    return Room(rounds * round_bytes, (rounds - 1) * tables, round_bytes)


_FLAT = Request(Options("flat"))
_LOW_LATENCY = "Buffer.low_latency_dispatch"
_TIMEOUT_S = 100.0  # of a wait, as in DeepEP's kernels (NUM_TIMEOUT_CYCLES)
_LEAST_TOKENS = 128
_MORE_TOKENS = 128  # than a rank has: padding to any expert_alignment then fits what moecomm takes for the worst case
_MORE_ROWS = 4  # times those that the first caller asks for


_Result = TypeVar("_Result")


class _Handle(Protocol):
    native: Handle


class _Sizes(NamedTuple):
    hidden: int
    num_experts: int
    topk: int
    dtype: torch.dtype


class Pool:
    """The moecomm.Buffers of a group, opened when wanted.  `num_bytes`: the least window of one with normal rounds;
    `masks`: low-latency rounds mask ranks that are lost, and a rank alone may change its masks; `round_s`: how long
    these rounds wait for a peer, else `timeout_s`; `method`: that makes rounds which are not low-latency ones;
    `uneven`: in low-latency and normal rounds, ranks may have different numbers of experts; `names`: see Calls.
    """

    unless_masked = ""  # what a caller can do before

    def __init__(
        self,
        group: Any,
        num_bytes: int = 0,
        timeout_s: float = _TIMEOUT_S,
        masks: bool = False,
        method: str = "Buffer.dispatch",
        uneven: bool = False,
        round_s: float | None = None,
        names: Mapping[str, str] | None = None,
    ) -> None:
        self.ranks: Group = rendezvous(group)
        self.closed = False
        self.receiving: dict[int, Callable[[], None]] = {}  # hooks of dispatches that have begun, by id of the Buffer
        self._num_bytes, self._timeout_s, self.masks = num_bytes, timeout_s, masks
        self._members = list(range(self.ranks.ranks))  # ranks that have come to the opening of low-latency rounds
        self._presence = Presence(self.ranks, timeout_s) if masks and self.ranks.ranks > 1 else None
        self._least_experts = 1 if uneven else self.ranks.ranks
        self._by_sizes: dict[tuple[Any, ...], Buffer] = {}
        self.calls, self._method = Calls(self.ranks, timeout_s, self.close, not masks, names), method
        self.opened: dict[Rounds, Buffer] = {}  # all of them: handles of one that was too small stay good
        self._round_s = timeout_s if round_s is None else round_s
        self.pending: dict[Rounds, PendingMasks] = {}  # of low-latency rounds, with `masks`
        self.kinds: dict[tuple[Any, ...], Any] = {}  # what repeated calls need, by their sizes and options

    def require_open(self) -> None:
        """Raise Closed after close()."""
        if self.closed:
            raise Closed("deep_ep buffer")

    def close(self) -> None:
        """Give all memory back.  Idempotent."""
        if self._presence is not None and not self.opened and not self.closed:
            self._presence.leave()
        self.closed = True
        self.calls.stop()
        for buffer in self.opened.values():
            buffer.close()
        self._by_sizes.clear()
        self.kinds.clear()
        self.receiving.clear()
        self.pending.clear()

    def release_memory(self) -> None:
        """Give the memory of outputs back until restore(): Buffer.release_memory() of each Buffer.  Collective."""
        self.require_open()
        for buffer in self.opened.values():
            buffer.release_memory()

    def restore(self) -> None:
        """Take the memory again.  Collective."""
        self.require_open()
        for buffer in self.opened.values():
            buffer.restore()

    @property
    def nbytes(self) -> int:
        """Bytes of this rank's windows."""
        return sum(buffer.nbytes for buffer in self.opened.values())

    def receive(self, buffer: Buffer) -> None:
        """End a dispatch of the Buffer that has begun and whose hook has not been called."""
        hook = self.receiving.pop(id(buffer), None)
        if hook is not None:
            hook()

    def native_of(self, handle: Any, kind: type[_Handle], want: str) -> Handle:
        """Return moecomm's handle in a handle of deep_ep.

        Raises:
            BadInput: not of this kind, for which the text has `want`, or of another buffer.
            Closed: this buffer, or the other one.
        """
        if not isinstance(handle, kind):
            raise BadInput("handle", type(handle).__name__, want)
        if self.closed:
            raise Closed("deep_ep buffer")
        native: Handle = handle.native
        if native.rounds not in self.opened:
            if native.rounds.closed:
                raise Closed("handle's buffer")
            raise BadInput("handle", "one of another buffer", "one of this buffer")
        return native

    def flat(
        self,
        x: torch.Tensor,
        topk_idx: torch.Tensor,
        num_experts: int,
        worst: int,
        grow: bool = False,
        combined: tuple[int, torch.dtype] | None = None,
    ) -> Buffer:
        """Return the Buffer for normal rounds.

        `worst`: rows that the caller always receives into; 0: as many as arrive, for which the host waits.  `grow`: a
        new Buffer, with room for the tokens that all ranks have now.  `combined`: columns and dtype of the rows that
        return; None: those of x, in bfloat16 for FP8.
        """
        hidden, dtype = (x.shape[1], x.dtype) if combined is None else combined
        if dtype is torch.float8_e4m3fn:
            dtype = torch.bfloat16
        try:
            sizes = _Sizes(hidden, num_experts, topk_idx.shape[1], dtype)
        except (AttributeError, IndexError):
            raise BadInput("topk_idx", described(topk_idx), "a tensor [tokens, topk]") from None
        key = (*sizes, worst)
        if grow:
            del self._by_sizes[key]
        buffer = self._by_sizes.get(key)
        if buffer is not None:
            return buffer
        self.require_open()
        check_experts(num_experts, self._least_experts)
        tokens = self._agreed(sizes, x.shape[0], num_worst_tokens=worst)
        if worst:
            tokens = max(tokens, -(-worst // self.ranks.ranks))
        most = (MAX_FLAT_ROWS - 1) // self.ranks.ranks
        tokens = max(tokens, min(most, max(_LEAST_TOKENS, 1 << (tokens - 1).bit_length() if tokens else 0)))
        settings = self._settings(sizes, tokens, math.inf if worst else None)
        return self._open(key, x.device, settings, room_for(settings, "flat"))

    def batched(
        self,
        device: torch.device,
        hidden: int,
        num_experts: int,
        topk: int,
        tokens: int,
        dtype: torch.dtype,
        placement: Placement | None = None,
    ) -> Buffer:
        """Return the Buffer for low-latency rounds; `placement`: see Buffer, of as many slots as experts."""
        sizes = _Sizes(hidden, num_experts, topk, dtype)
        key = ("batched", *sizes, tokens, placement)
        buffer = self._by_sizes.get(key)
        if buffer is not None:
            return buffer
        self.require_open()
        check_experts(num_experts, self._least_experts)
        check_integer("num_max_dispatch_tokens_per_rank", tokens, 1)
        self._agreed(sizes, method=_LOW_LATENCY, num_max_dispatch_tokens_per_rank=tokens)
        settings = self._settings(sizes, tokens).placed(placement)
        return self._open(key, device, settings, batched_room(settings), "mask" if self.masks else "raise")

    def low_latency(self) -> list[Buffer]:
        """Return the Buffers for low-latency rounds."""
        return [buffer for key, buffer in self._by_sizes.items() if key[0] == "batched"]

    def masked(self) -> set[int]:
        """Return the ranks that are masked in low-latency rounds, in this rank's view."""
        if self.masks:
            return set().union(*(masks.view() for masks in self.pending.values()))
        return set().union(*(buffer.masked for buffer in self.low_latency()))

    def agree(self, buffer: Buffer) -> None:
        """Agree on pending masks, ahead of a dispatch.  Raises as PendingMasks.agree()."""
        if self.pending:
            self.pending[buffer.rounds].agree()

    def elastic(
        self,
        device: torch.device,
        hidden: int,
        num_experts: int,
        topk: int,
        tokens: int,
        dtype: torch.dtype,
        expand: bool,
        rows: int | None = None,
        waits: bool = False,
        method: str | None = None,
    ) -> Buffer:
        """Return the Buffer for rounds of deep_ep 2, whose callers say how many tokens a rank has at most.

        `rows`: the rows that the first caller asks for, where far fewer arrive than `topk` experts for every
        token would make; ranks may differ.  `waits`: the host waits for the rows.  `method`: see _agreed().
        """
        sizes = _Sizes(hidden, num_experts, topk, dtype)
        key = ("expand" if expand else "flat", *sizes, tokens, rows is None, waits)
        buffer = self._by_sizes.get(key)
        if buffer is not None:
            return buffer
        self.require_open()
        options = {"num_max_tokens_per_rank": tokens, "do_expand": expand, "waits": waits, "few_rows": rows is not None}
        most = self._agreed(sizes, rows or 0, method, **options)
        settings = self._settings(sizes, tokens + _MORE_TOKENS, None if waits else math.inf)
        room = None if rows is None else max(_MORE_ROWS * most, self.ranks.ranks * settings.max_tokens)
        return self._open(key, device, settings, room_for(settings, "expert" if expand else "flat", room))

    def _settings(self, sizes: _Sizes, tokens: int, factor: float | None = math.inf) -> Settings:
        hidden, num_experts, topk, dtype = sizes
        return Settings(self.ranks.ranks, hidden, num_experts, topk, tokens, dtype, "", None, capacity_factor=factor)

    def _open(
        self,
        key: tuple[Any, ...],
        device: torch.device,
        settings: Settings,
        room: Room,
        on_timeout: OnTimeout = "raise",
    ) -> Buffer:
        """Open the Buffer of a key.  Collective; raises as moecomm.Buffer."""
        if device.type not in ("cpu", "cuda"):
            raise BadInput("x", f"a tensor on {device}", "one on a CPU or a GPU")
        window_bytes = room.window if key[0] == "batched" else max(self._num_bytes, room.window)
        open_one = partial(
            Buffer,
            hidden=settings.hidden,
            num_experts=settings.named_experts,
            topk=settings.topk,
            max_tokens=settings.max_tokens,
            dtype=settings.dtype,
            backend="host" if device.type == "cpu" else "auto",
            device=device,
            timeout_s=self._round_s if on_timeout == "mask" else self._timeout_s,
            window_bytes=-(-window_bytes // 4096) * 4096,
            capacity_factor=settings.capacity_factor,
            on_timeout=on_timeout,
            placement=settings.placement,
        )
        if on_timeout == "mask" and len(self._members) < self.ranks.ranks:
            assert self._presence is not None, "it has told who is there"
            buffer = self._presence.open_without(self._members, open_one)
        else:
            buffer = open_one(self.ranks)
        self.opened[buffer.rounds] = self._by_sizes[key] = buffer
        if on_timeout == "mask":
            self.pending[buffer.rounds] = PendingMasks(buffer.rounds)
        self.calls.opened(buffer.rounds)
        buffer.rounds.memory.divide(room.tables, room.reserve)
        return buffer

    def _agreed(self, sizes: _Sizes, tokens: int = 0, method: str | None = None, **options: object) -> int:
        """Return the most tokens that a rank has, once all ranks make this call, with such sizes.  Collective.

        Raises:
            Unsupported: a rank is masked, which would have to come.
            As Calls.agree.
        """
        if self.masked():
            raise Unsupported(f"rounds of new sizes while ranks are masked{self.unless_masked}")
        options = {**sizes._asdict(), **options}
        shown = ", ".join(f"{name}={value}" for name, value in options.items() if value is not False)
        if self._presence is not None and method == _LOW_LATENCY:  # ranks may be lost already
            self._members = self._presence.meet(f"{method}({shown})")
            return tokens
        return self.calls.agree(method or self._method, shown, tokens)


class OverPool(Bound):
    """Base of the buffers of deep_ep."""

    _pool: Pool

    def get_comm_stream(self) -> torch.cuda.Stream:
        """The current stream, which is where moecomm works."""
        return comm_stream()

    @property
    def runtime(self) -> Any:
        """The buffer itself, which has the calls of deep_ep's runtime; None after it is destroyed."""
        return None if self._pool.closed else self


counted_by_pool = counted(attrgetter("_pool.calls"))  # decorates collective methods


def grown(
    buffer: Buffer,
    x: torch.Tensor,
    topk_idx: torch.Tensor,
    dispatch_in: Callable[[Buffer], _Result],
    larger: Callable[[], Buffer],
    *,
    scales: torch.Tensor | None = None,
    layout: Layout = "flat",
    alignment: int = 1,
    gradients: Gradients = Gradients.NONE,
    extras: tuple[torch.Tensor, ...] = (),
) -> _Result:
    """Dispatch; where a rank has more tokens than the Buffer takes, again with a larger one.

    Args:
        buffer: that all ranks have.
        dispatch_in: dispatches in a Buffer, and waits.
        larger: opens a larger Buffer.  Collective.
        x, topk_idx, scales, layout, alignment, gradients, extras: of the dispatch.
    """
    try:
        if x.shape[0] <= buffer.max_tokens:
            return dispatch_in(buffer)
        options = Options(layout, alignment)  # those of the ranks that wait: a difference would be told first
        dispatch(
            buffer.rounds,
            Request(options, gradients=gradients, grow=True),
            x[:0].detach(),
            topk_idx[:0],
            scales=None if scales is None else scales[:0],
            extras=tuple(extra[:0] for extra in extras),
            max_rows=1,
            sync=True,
        )
    except Mismatch as error:  # a rank has asked for a larger Buffer; where all have, there is none
        if error.field != GROW:
            raise
    return dispatch_in(larger())


def within_budgets(pool: Pool, ids: torch.Tensor, num_experts: int, rows: int, alignment: int) -> budgets.Kept:
    """Return the entries that their ranks have room for.

    The rule is deep_ep's: see moecomm.gpu.budgets.kept().  A budget counts in multiples of `alignment`.  Every rank
    knows all counts and budgets from a small round, so nothing waits for the device.

    Args:
        ids: int32 or int64 `[T, K]`; ids that no expert has are left to the dispatch, which names them.
        rows: this rank's budget; ranks may differ.
    """
    rule = budgets.Rule(pool.ranks.rank, pool.ranks.ranks, num_experts, alignment, rows // alignment * alignment)
    counted = budgets.counted(ids, rule)
    words = counted.rows.view(torch.float32)  # rows travel as bits
    buffer: Buffer = pool.flat(words, counted.to, rule.ranks, rule.ranks)
    pool.calls.begin(buffer.rounds)
    routed = dispatch(buffer.rounds, _FLAT, words, counted.to, max_rows=rule.ranks, sync=False)
    return budgets.kept(ids, routed.x.view(torch.int32), rule, counted.parts)
