"""NIXL-EP's interface over moecomm: low-latency rounds whose ranks come and go.

    import moecomm.compat.nixl_ep as nixl_ep

or, for code that imports nixl_ep itself, `moecomm.compat.install_as_nixl_ep()`.

What NIXL-EP has and this has not; each raises Unsupported, or differs as it says:

| not supported | instead |
| --- | --- |
| `Buffer(comm=)`, metadata over etcd | `tcp_store_group=`, or the store of `group=` |
| `Buffer(low_latency_mode=False)`, `get_dispatch_layout`, `ht_*` | `moecomm.compat.deep_ep.Buffer` |
| `Buffer(disable_ll_nvlink=True)` | nothing |
| `connect_ranks` by some of the ranks | all that are connected then meet in their next round |
| a graph captured while this rank masks all others | capture before or after |
| a call that loses a rank goes on | if all lose it in one call; else, and on GPUs, an error, and the next call works |
| `dispatch_wait_recv_cost_stats`, `combine_wait_recv_cost_stats` | `Buffer.stats()` of moecomm |
| `R` of shapes: the capacity | the ranks that have met last: see `connect_ranks` |
"""

from __future__ import annotations

import json
import sys
import time
import uuid
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

import torch

from moecomm.base.bound import Bound
from moecomm.base.protocol import MAX_HOST_RANKS
from moecomm.base.validation import check_flag, check_integer, is_integer
from moecomm.buffer import Buffer as NativeBuffer
from moecomm.compat.deep_ep import event
from moecomm.compat.deep_ep.arguments import check_dimensions, not_here, refuse
from moecomm.compat.deep_ep.buffer import Buffer as DeepEP
from moecomm.compat.deep_ep.event import Config, EventHandle, EventOverlap, check_even_sms, uses_cuda
from moecomm.compat.deep_ep.low_latency import LOW_LATENCY_NAMES, LowLatency, LowLatencyHandle, write_mask
from moecomm.compat.deep_ep.pool import Pool
from moecomm.errors import BadInput, Closed, Timeout, Unsupported

topk_idx_t = torch.int64
__all__ = ["Buffer", "Config", "EventHandle", "EventOverlap", "topk_idx_t"]


DEFAULT_TIMEOUT_MS = 30_000
_MEETING_S = 300.0  # a rank that is added may only be starting
_INSTEAD = "moecomm.compat.deep_ep.Buffer has such rounds"


class _Pool(Pool):
    """A Pool whose users can take masked ranks out."""

    unless_masked = ": call connect_ranks([]) before"


class _Ranks(LowLatency):
    """The rounds of the ranks that have met: their numbers in order, and in the group of their moecomm.Buffers."""

    def __init__(self, store: Any, rank: int, ranks: list[int], most: int, timeout_s: float, name: str) -> None:
        from torch.distributed import PrefixStore, ProcessGroup  # type: ignore[attr-defined]

        group = ProcessGroup(PrefixStore(name, store), ranks.index(rank), len(ranks))
        self.ranks, self.group_size, self.store = ranks, len(ranks), store
        self._pool = _Pool(group, timeout_s=timeout_s, masks=True, names=LOW_LATENCY_NAMES)
        self._every = len(ranks) == most
        self._in_order = ranks == list(range(len(ranks)))
        self._tables: dict[tuple[torch.device, int], torch.Tensor] = {}

    def buffers(self) -> list[NativeBuffer]:
        return self._pool.low_latency()

    def masked(self) -> set[int]:
        """Return the masked ranks of those that have met, in this rank's view."""
        return {self.ranks[number] for number in self._pool.masked()}

    def mask(self, ranks: Collection[int], mask: bool) -> None:
        """Mask ranks, or take them in again, in this rank's view, until ranks agree on it in their next dispatch."""
        for masks in self._pool.pending.values():
            for rank in ranks:
                masks.want(self.ranks.index(rank), mask)

    def are_apart(self) -> bool:
        """Return whether this rank has masked all others, of which some live."""
        return any(masks.is_apart() for masks in self._pool.pending.values())

    def have(self, handle: Any) -> bool:
        """Return whether the handle is of a dispatch of these ranks."""
        return isinstance(handle, LowLatencyHandle) and handle.native.rounds in self._pool.opened

    def ids(self, topk_idx: torch.Tensor, experts_per_rank: int) -> torch.Tensor:
        """Return the ids in the numbers of the group.  Experts of ranks that are not in it count as -1."""
        if self._every:
            return topk_idx
        if self._in_order:
            return topk_idx.masked_fill(topk_idx >= len(self.ranks) * experts_per_rank, -1)
        key = (topk_idx.device, experts_per_rank)
        table = self._tables.get(key)
        if table is None:
            known = torch.full(((max(self.ranks) + 1) * experts_per_rank + 1,), -1)  # the last one: of an id of -1
            for number, rank in enumerate(self.ranks):
                first = torch.arange(experts_per_rank)
                known[rank * experts_per_rank + first] = number * experts_per_rank + first
            table = self._tables[key] = known.to(topk_idx.device)
        return table[topk_idx.clamp(-1, len(table) - 1)].to(topk_idx.dtype)

    def close(self) -> None:
        self._pool.close()


class Buffer(Bound):
    """Low-latency dispatch and combine among the ranks that are connected; see NIXL-EP's documentation, and the package
    for differences.

    Expert e belongs to rank e // num_experts_per_rank.  Memory is taken by the first round with new sizes, on all ranks
    alike.

    Args:
        rank: the number of this process.
        tcp_store_group: a torch.distributed.Store that outlives the ranks.
        group: a process group with such a store, if there is no `tcp_store_group`.
        timeout_ms: for a peer in a round.
        explicitly_destroy: accepted; destroy() is always allowed.
    """

    num_sms: int = 20  # of the calls that are not here

    def __init__(
        self,
        disable_ll_nvlink: bool = False,
        explicitly_destroy: bool = False,
        rank: int = 0,
        low_latency_mode: bool = True,
        group: Any = None,
        comm: Any = None,
        tcp_store_group: Any = None,
        timeout_ms: int = DEFAULT_TIMEOUT_MS,
    ) -> None:
        refuse("nixl_ep", disable_ll_nvlink=disable_ll_nvlink, comm=comm)
        check_integer("rank", rank, 0, MAX_HOST_RANKS - 1)
        check_integer("timeout_ms", timeout_ms, 1)
        check_flag("low_latency_mode", low_latency_mode)
        if not low_latency_mode:
            raise Unsupported("nixl_ep.Buffer(low_latency_mode=False): moecomm.compat.deep_ep.Buffer has such rounds")
        if tcp_store_group is None and group is None:
            raise Unsupported("nixl_ep.Buffer without a store: pass tcp_store_group= or group=")
        _check_store(tcp_store_group)
        if tcp_store_group is None and not hasattr(group, "get_group_store"):
            raise BadInput("group", type(group).__name__, "a process group")
        self.rank, self.group_size, self.low_latency_mode = rank, 0, low_latency_mode
        self.group, self.comm, self.tcp_store_group = group, comm, tcp_store_group
        self.num_rdma_bytes = self.num_nvl_bytes = 0
        self.timeout_ms, self.explicitly_destroy = timeout_ms, explicitly_destroy
        self._experts_per_rank = 0
        self._connected: set[int] = set()
        self._standby: set[int] = set()  # connected by connect_ranks(activate=False)
        self._store_of_standby: Any = None
        self._apart: set[int] = set()  # masked by this rank alone before the connected ranks have met
        self._alone: _Ranks | None = None  # this rank, for rounds in which it has masked all others
        self._met: _Ranks | None = None
        self._coming: Any = None  # the store in which the connected ranks meet next; None: they have met
        self._destroyed = False

    @property
    def runtime(self) -> Buffer | None:
        """The Buffer itself, which has the calls of nixl_ep's runtime; None after destroy()."""
        return None if self._destroyed else self

    is_sm90_compiled = staticmethod(DeepEP.is_sm90_compiled)
    capture = staticmethod(DeepEP.capture)
    get_dispatch_config = staticmethod(DeepEP.get_dispatch_config)
    get_combine_config = staticmethod(DeepEP.get_combine_config)
    get_comm_stream = DeepEP.get_comm_stream
    get_local_buffer_tensor = DeepEP.get_local_buffer_tensor

    @staticmethod
    def set_num_sms(new_num_sms: int) -> None:
        """Set `num_sms`, which low-latency rounds do not use."""
        check_even_sms(new_num_sms)
        Buffer.num_sms = new_num_sms

    @staticmethod
    def get_low_latency_buffer_size_hint(
        num_max_dispatch_tokens_per_rank: int, hidden: int, num_ranks: int, num_experts: int
    ) -> int:
        """Return moecomm.compat.deep_ep.Buffer.get_low_latency_rdma_size_hint() of these sizes."""
        return DeepEP.get_low_latency_rdma_size_hint(num_max_dispatch_tokens_per_rank, hidden, num_ranks, num_experts)

    get_rdma_size_hint = get_low_latency_buffer_size_hint

    def update_memory_buffers(
        self, num_ranks: int, num_experts_per_rank: int, num_rdma_bytes: int, num_nvl_bytes: int = 0
    ) -> None:
        """Set the most ranks, and the experts of each.  Bytes are accepted and change nothing."""
        check_integer("num_ranks", num_ranks, self.rank + 1, MAX_HOST_RANKS)
        check_integer("num_experts_per_rank", num_experts_per_rank, 1)
        check_integer("num_rdma_bytes", num_rdma_bytes, 0)
        check_integer("num_nvl_bytes", num_nvl_bytes, 0)
        if self._connected:
            raise BadInput("update_memory_buffers", "a call with connected ranks", "one before connect_ranks()")
        self.group_size, self._experts_per_rank = num_ranks, num_experts_per_rank
        self.num_rdma_bytes, self.num_nvl_bytes = num_rdma_bytes, num_nvl_bytes

    def set_tcp_store_group(self, tcp_store_group: Any) -> None:
        """Take another store for later meetings."""
        _check_store(tcp_store_group)
        self.tcp_store_group = tcp_store_group

    def connect_ranks(self, remote_ranks: Iterable[int], activate: bool = True) -> None:
        """Go on with more ranks, or with others of the same numbers.

        Does not wait: all ranks that are connected then meet in their next round.  Those that are masked or
        disconnected, and not named, are left out; with no rank named, that is all it does.  A rank whose process has
        been replaced is named again once it is masked or disconnected.  Handles of earlier dispatches can't be used any
        more, nor graphs that were captured.

        Args:
            remote_ranks: this rank may be among them.
            activate: False: rounds go on without these ranks, until update_mask_buffer(rank, False) has named them.

        Raises:
            BadInput: a rank beyond those of update_memory_buffers().
        """
        check_flag("activate", activate)
        named = self._checked(remote_ranks)
        if activate:
            self._take_in(named)
        else:
            self._standby |= named - self._connected
            self._store_of_standby = self._store()

    def disconnect_ranks(self, remote_ranks: Iterable[int]) -> None:
        """Go on without some ranks, from the next dispatch on; ids of their experts count as -1."""
        named = self._checked(remote_ranks)
        if self.rank in named & self._connected:
            raise BadInput("remote_ranks", f"this rank, {self.rank}", "others: the ranks that stay call it")
        self._standby -= named
        self._apart -= named
        named &= self._connected
        self._connected -= named
        if named and self._have_met() and self._connected != {self.rank}:
            assert self._met is not None
            self._met.mask(named, True)
        elif named:
            self._coming = self._coming or self._store()

    def low_latency_dispatch(
        self,
        x: torch.Tensor,
        topk_idx: torch.Tensor,
        num_max_dispatch_tokens_per_rank: int,
        num_experts: int | None = None,
        cumulative_local_expert_recv_stats: torch.Tensor | None = None,
        dispatch_wait_recv_cost_stats: torch.Tensor | None = None,
        use_fp8: bool = True,
        round_scale: bool = False,
        use_ue8m0: bool = False,
        async_finish: bool = False,
        return_recv_hook: bool = False,
    ) -> tuple[Any, torch.Tensor, LowLatencyHandle, EventOverlap, Callable[[], None] | None]:
        """recv_x or (recv_x, scales), recv_count, handle, event, hook, as deep_ep's; R is the ranks that have met.

        `num_experts`: no less than those of the connected ranks.
        """
        refuse("nixl_ep", dispatch_wait_recv_cost_stats=dispatch_wait_recv_cost_stats)
        experts, met, most = self._experts_per_rank, self._ranks(), num_max_dispatch_tokens_per_rank
        check_dimensions("topk_idx", topk_idx, "tokens", "topk")
        if num_experts is not None:
            least = (max(self._connected) + 1) * experts
            check_integer("num_experts", num_experts, least, self.group_size * experts)
        if met is self._alone:  # shapes are those of rounds with the others
            check_integer("num_max_dispatch_tokens_per_rank", most, 1)
            most *= len(self._connected) if self._met is None or self._coming else self._met.group_size
        result = met.low_latency_dispatch(
            x,
            met.ids(topk_idx, experts),
            most,
            met.group_size * experts,
            cumulative_local_expert_recv_stats,
            None,
            use_fp8,
            round_scale,
            use_ue8m0,
            async_finish,
            return_recv_hook,
        )
        result[2].given = topk_idx  # type: ignore[attr-defined]
        return result

    def low_latency_combine(
        self,
        x: torch.Tensor,
        topk_idx: torch.Tensor,
        topk_weights: torch.Tensor,
        handle: Any,
        use_logfmt: bool = False,
        zero_copy: bool = False,
        async_finish: bool = False,
        return_recv_hook: bool = False,
        out: torch.Tensor | None = None,
        combine_wait_recv_cost_stats: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, EventOverlap, Callable[[], None] | None]:
        """combined_x, event, hook, as deep_ep's."""
        refuse("nixl_ep", combine_wait_recv_cost_stats=combine_wait_recv_cost_stats)
        if topk_idx is getattr(handle, "given", None):
            topk_idx = handle.topk_idx
        return self._ranks_of(handle).low_latency_combine(
            x, topk_idx, topk_weights, handle, use_logfmt, zero_copy, async_finish, return_recv_hook, out
        )

    dispatch, combine = low_latency_dispatch, low_latency_combine
    get_dispatch_layout = staticmethod(not_here("get_dispatch_layout", _INSTEAD))
    ht_dispatch = staticmethod(not_here("ht_dispatch", _INSTEAD))
    ht_combine = staticmethod(not_here("ht_combine", _INSTEAD))

    def get_next_combine_buffer(self, handle: Any) -> torch.Tensor:
        """`[E/R, R * Tmax, H]` in the window, for combine(zero_copy=True); the same one for one handle."""
        return self._ranks_of(handle).get_next_low_latency_combine_buffer(handle)

    def update_mask_buffer(self, rank_to_mask: int, mask: bool = False) -> None:
        """Mask a connected rank, or take it in again: that rank then makes this call, too.

        A rank alone makes this call.  It changes what query_mask_buffer() says at once.  The ranks that stay agree on
        it in their next dispatch, whether they have made it as well or not.  A rank that masks all others makes its
        rounds alone until it takes one in again; nobody is told.  A rank that was connected with `activate=False` is
        taken in as connect_ranks() does.  One that is masked before ranks have met is left out of their meeting.

        Raises:
            BadInput: no connected rank, or this one is to be masked.
        """
        check_flag("mask", mask)
        named = self._checked([rank_to_mask])
        if not mask and named <= self._standby:
            self._take_in(named, self._store_of_standby)
            return
        if not named <= self._connected:
            raise BadInput("rank_to_mask", rank_to_mask, f"a connected rank: {sorted(self._connected)}")
        if mask and self.rank in named:
            raise BadInput("rank_to_mask", f"this rank, {self.rank}", "another one")
        if self._have_met():
            assert self._met is not None
            self._met.mask(named, mask)
        elif mask:
            self._apart |= named
        else:
            self._apart -= named

    def query_mask_buffer(self, mask_status: torch.Tensor) -> None:
        """Write 1 for each rank that is masked or not connected, and 0 for others; int32 [most ranks]."""
        active = self._connected - self._masked() - self._apart
        write_mask(mask_status, [rank not in active for rank in range(self.group_size)])

    def clean_mask_buffer(self) -> None:
        """Take all connected ranks in again that are masked, of which each makes this call."""
        self._apart.clear()
        if self._have_met():
            assert self._met is not None
            self._met.mask(self._connected, False)
        if self._standby:
            self._take_in(self._standby, self._store_of_standby)

    def barrier(self) -> None:
        """Wait for the current stream, and for all ranks that are connected and not masked.

        Raises:
            Timeout: a rank did not come within `timeout_ms`.
        """
        if uses_cuda():
            torch.cuda.current_stream().synchronize()
        met = self._ranks()
        active = self._connected - self._masked() - self._apart
        meet(met.store, self.rank, sorted(active), self.timeout_ms / 1e3)

    def destroy(self) -> None:
        """Give the memory back.  Idempotent."""
        self._destroyed = True
        for ranks in (self._met, self._alone):
            if ranks is not None:
                ranks.close()

    def _have_met(self) -> bool:
        """Return whether the connected ranks have met and made a dispatch."""
        return self._met is not None and self._coming is None and bool(self._met.buffers())

    def _ranks_of(self, handle: Any) -> _Ranks:
        """Return the ranks of a handle's dispatch, else those of the next one."""
        alone = self._alone
        return alone if alone is not None and not self._destroyed and alone.have(handle) else self._ranks()

    def _ranks(self) -> _Ranks:
        if self._destroyed:
            raise Closed("nixl_ep buffer")
        if not self._connected:
            if not self._experts_per_rank:
                raise BadInput("Buffer", "no connected ranks", "update_memory_buffers() and connect_ranks() before")
            self._take_in(set())  # this rank alone
        others = self._connected - {self.rank}
        met = self._met if self._coming is None else None
        if (others and others <= self._apart) or (met is not None and met.are_apart()):
            return self._by_itself()
        if self._apart:  # they stand by
            self._standby |= self._apart
            self._store_of_standby = self._store()
            self._connected -= self._apart
            self._apart, self._coming = set(), self._coming or self._store()
        if self._coming is not None:
            self._meet(self._coming)
        assert self._met is not None
        return self._met

    def _by_itself(self) -> _Ranks:
        if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
            raise Unsupported("a graph captured while all other ranks are masked: it would be of this rank alone")
        if self._alone is None:
            from torch.distributed import HashStore  # type: ignore[attr-defined]

            self._alone = _Ranks(HashStore(), self.rank, [self.rank], self.group_size, self.timeout_ms / 1e3, "alone")
        return self._alone

    def _masked(self) -> set[int]:
        return set() if self._met is None or self._coming is not None else self._met.masked()

    def _take_in(self, named: set[int], store: Any = None) -> None:
        """Go on with these ranks as well, from the next meeting on; without those that are masked and not named."""
        masked = self._masked()
        wanted = (self._connected - masked) | named | {self.rank}
        self._standby -= wanted
        self._apart -= named
        if self._met is None or wanted != set(self._met.ranks) or named & masked or self._coming is not None:
            self._connected, self._coming = wanted, store or self._store()

    def _store(self) -> Any:
        if self.tcp_store_group is not None:
            return self.tcp_store_group
        if self.group is None:
            raise BadInput("tcp_store_group", "None", "a store: set_tcp_store_group()")
        return self.group.get_group_store()

    def _meet(self, store: Any) -> None:
        ranks = sorted(self._connected)
        name = meet(store, self.rank, ranks, max(_MEETING_S, self.timeout_ms / 1e3))
        if self._met is not None:
            self._met.close()
        self._met, self._coming = _Ranks(store, self.rank, ranks, self.group_size, self.timeout_ms / 1e3, name), None

    def _checked(self, ranks: Iterable[int]) -> set[int]:
        if self._destroyed:
            raise Closed("nixl_ep buffer")
        if not self._experts_per_rank:
            raise BadInput("Buffer", "no sizes", "update_memory_buffers() before")
        if not isinstance(ranks, Iterable):
            raise BadInput("remote_ranks", type(ranks).__name__, f"ranks, 0 to {self.group_size - 1}")
        numbers = list(ranks)
        for rank in numbers:
            if not is_integer(rank) or not 0 <= rank < self.group_size:
                raise BadInput("remote_ranks", rank, f"0 to {self.group_size - 1}")
        return set(numbers)


def _check_store(store: object) -> None:
    if store is not None and not all(hasattr(store, name) for name in ("set", "get", "check")):
        raise BadInput("tcp_store_group", type(store).__name__, "a torch.distributed.Store")


_POLL_S = 2e-3


def meet(store: Any, rank: int, ranks: Sequence[int], timeout_s: float) -> str:
    """Wait until all of `ranks` have come, and return the meeting's name.  Collective among them.

    Each rank brings a ticket of its own making.  The first rank answers with a name and the tickets that it has seen,
    and calls again whenever it sees another ticket: one that it saw first may be of a process that has ended since.
    The name counts once every rank has found its own ticket beside it.

    Args:
        store: a torch.distributed.Store that outlives the ranks.
        rank: of this process, one of `ranks`.
        ranks: in order; alike on all of them.
        timeout_s: for the ranks to come.

    Raises:
        Timeout: a rank did not come.
    """
    prefix, first, deadline = f"moecomm/nixl_ep/{'-'.join(map(str, ranks))}", ranks[0], time.monotonic() + timeout_s
    seen: dict[int, str] = {}
    name, mine = "", uuid.uuid4().hex
    if rank != first:
        store.set(f"{prefix}/ticket/{rank}", mine)
    while True:
        if rank == first:
            tickets = {other: _read(store, f"{prefix}/ticket/{other}") for other in ranks if other != first}
            missing = [other for other, ticket in tickets.items() if not ticket]
            if not missing:
                if tickets != seen:
                    seen, name = tickets, f"{prefix}/{mine}/{uuid.uuid4().hex}"
                    store.set(f"{prefix}/call", json.dumps([name, seen]))
                missing = [other for other in seen if not _read(store, f"{name}/found/{other}")]
                if not missing:
                    for other in seen:
                        store.set(f"{prefix}/ticket/{other}", "")
                    store.set(f"{name}/met", "1")
                    return name
        else:
            missing = [first]
            called, tickets_there = json.loads(_read(store, f"{prefix}/call") or '["", {}]')
            if tickets_there.get(str(rank)) == mine:
                if called != name:
                    name = called
                    store.set(f"{name}/found/{rank}", "1")
                if _read(store, f"{name}/met"):
                    return name
        if time.monotonic() > deadline:
            raise Timeout(
                f"connect_ranks: rank {missing[0]} did not come within {timeout_s:g} s",
                rank=rank,
                peer=missing[0],
                phase="opening",
                op="connect_ranks",
                round=0,
            )
        time.sleep(_POLL_S)


def _read(store: Any, key: str) -> str:
    """Return a value, empty if there is none yet.  Does not wait."""
    return bytes(store.get(key)).decode() if store.check([key]) else ""


buffer = sys.modules[__name__]
MODULES = {"buffer": buffer, "utils": event}  # import paths below nixl_ep
