"""Buffer: the one object a user holds.  It owns the peer-visible memory and runs rounds over it."""

from __future__ import annotations

import logging
from contextlib import ExitStack
from typing import Any

import torch

from moecomm import _native, backends, combine, config, dispatch
from moecomm.core import names, overloads, shown
from moecomm.core.choices import BackendName, Layout, Quantize, ScaleFormat, ScaleLayout
from moecomm.core.memory import WindowMemory
from moecomm.core.opening import opening
from moecomm.core.rendezvous import rendezvous
from moecomm.core.settings import Settings, seconds, wanted_device
from moecomm.core.state import BufferState, collective
from moecomm.fused import layer
from moecomm.routed import Handle, Routed

log = logging.getLogger("moecomm")


class Buffer(BufferState):
    """Peer-visible memory of an expert-parallel group, and the dispatch and combine over it.

    Opening is collective.  Rounds (a dispatch or a combine) are collective too: every rank makes the same calls in
    the same order, with as many tokens as it has (none is fine).  In a forked child its parent's Buffers are closed.

    One thread at a time: a collective call or check() while another one is under way raises ConcurrentCall, and the one
    under way goes on undisturbed.  Threads may take turns; abort() and close() work from any thread at any time.

    Args:
        group: a torch.distributed process group of any backend, a sub-group, one dimension of a DeviceMesh, a rank of
            moecomm.local_ranks(), or "self" for one rank alone.  None is "self" in a program of one process; in one
            of several it is an error, because torch.distributed.group.WORLD is None before init_process_group().
        hidden: columns of a token; a row is a multiple of 16 bytes.
        num_experts: experts of all ranks together, a multiple of the number of ranks; rank r owns
            `[r * E/R, (r + 1) * E/R)`.
        topk: experts a token picks, 1 to 32.
        max_tokens: the most tokens one rank passes to a dispatch.
        dtype: bfloat16, float16 or float32: what tokens are made of (float8_e4m3fn rows with scales may be passed as
            well).
        backend: "auto", "host" (CPU ranks), or for GPUs "lsa" (NVLink), "gin" (NCCL) or "nvshmem".
        timeout_s: how long any wait for a peer may take, in seconds.
        device: where the tensors live; default: the current GPU if a GPU backend can run, else the CPU.
        window_bytes: room for the outputs of rounds, in bytes; default: two rounds of the worst case (four on CPUs,
            where memory is taken when touched).  On GPUs combine is faster with room for a row of each token beside it.
        domain_ranks: how many neighbouring ranks load and store each other's memory; those of other domains are
            reached by put and signal: a token crosses once a domain, or, of a rank with few (about 4 MB as float32),
            once for each of its ranks.  Default: all that can.

    Raises:
        BadInput: a value that can't be used, here or on the rank that it names.
        Mismatch: ranks passed different values; names the field.
        Unsupported: a backend asked for by name can't run on some rank; names what is missing.
        Timeout, PeerLost, Aborted: a rank did not come, has ended, or was interrupted.  No rank has opened then.
    """

    def __init__(
        self,
        group: Any = None,
        *,
        hidden: int,
        num_experts: int,
        topk: int,
        max_tokens: int,
        dtype: torch.dtype = torch.bfloat16,
        backend: BackendName = "auto",
        timeout_s: float = 30.0,
        device: torch.device | str | int | None = None,
        window_bytes: int | None = None,
        domain_ranks: int | None = None,
    ) -> None:
        with opening(rendezvous(group), timeout_s) as ranks:
            wanted, timeout_s = wanted_device(device), seconds(timeout_s)
            name, self.why = backends.choose(config.asked_backend(backend), wanted)
            self.settings = Settings(
                ranks.ranks, hidden, num_experts, topk, max_tokens, dtype, name, window_bytes, domain_ranks
            )
            self.settings.agree(ranks)
            self.settings.check()
            backend_module = backends.load(name)
            shape = _native.Shape(
                ranks=ranks.ranks,
                experts=num_experts,
                topk=topk,
                max_tokens=max_tokens,
                ring_tokens=self.settings.ring_tokens(backend_module),
                packet_bytes=self.settings.packet_bytes(backend_module),
                staged_row_bytes=self.settings.staged_row_bytes,
                heap_bytes=window_bytes or self.settings.default_heap(),
                domain_ranks=domain_ranks or 0,
            )
            shape.receive_bytes = _native.landed_bytes(shape, *self.settings.receive_payload_bytes)
            session, self.why = backends.open_session(name, self.why, ranks, shape, wanted, timeout_s)
            with ExitStack() as undo:
                undo.callback(session.close)
                ranks.settle()
                undo.pop_all()
        session.context.timeout_ns = int(timeout_s * 1e9)
        super().__init__(session)
        self.packet_room = shape.packet_bytes if shape.domain_ranks in (0, ranks.ranks) else 0
        self.memory = WindowMemory(self._session.arena, self._session.capturing)
        self.dispatch_plans: dict[tuple[Any, ...], list[dispatch.Plan]] = {}
        self.combine_plans: dict[tuple[Any, ...], list[combine.Plan]] = {}
        self.routes: dict[tuple[str, int, int], Any] = {}  # of the dispatches of operators, see moecomm.ops.handles
        self.begun: Routed | None = None  # by dispatch_begin, and not ended yet
        self.on_cpu = self._session.device.type == "cpu"
        self.rank, self.num_ranks, self.dtype, self.timeout_s = ranks.rank, ranks.ranks, dtype, timeout_s
        self.hidden, self.num_experts, self.topk, self.max_tokens = hidden, num_experts, topk, max_tokens
        self.domain_ranks = self._session.context.shape.domain_ranks or ranks.ranks
        self.name = names.give(self)  # what operators call it
        log.info(
            "rank %d of %d: %s (%s), %.1f MiB", self.rank, self.num_ranks, self.backend, self.why, self.nbytes / 2**20
        )

    @overloads.typed(overloads.Dispatch)
    @collective()
    def dispatch(
        self,
        x: Any,
        topk_idx: Any = None,
        topk_weights: Any = None,
        *,
        layout: Layout = "expert",
        expert_alignment: int = 1,
        quantize: Quantize | None = None,
        scale_format: ScaleFormat = "fp32",
        scale_layout: ScaleLayout = "row",
        scales: Any = None,
        max_rows: int | None = None,
        sync: bool | None = None,
        handle: Handle | None = None,
        num_sms: int | None = None,
        check_weights: bool = False,
    ) -> Routed:
        """Moves tokens to the ranks that own their experts.  Collective; on the current stream.

        Args:
            x: `[T, H]`, T <= max_tokens, of the Buffer's dtype, or float8_e4m3fn with `scales`.
            topk_idx: int64 or int32 `[T, K]`: expert ids; -1 picks none; the same id twice counts twice.
            topk_weights: float32 `[T, K]`; None: every weight is 1.
            layout: "expert": one row a (token, expert here), by (expert, source rank, token, k), each expert's group
                starting at a multiple of `expert_alignment`; "flat": one row a (token, this rank), by (source rank,
                token); "batched": `[E/R, max_rows, H]`, each expert's rows first, in the order of "expert".
            quantize: "fp8": rows travel and arrive as float8_e4m3fn with a scale for every 128 columns.
            scale_format: of "fp8": "fp32": amax / 448; "ue8m0": the power of two that is not below it.
            scale_layout: "row": a row of scales beside each row of x; "column": column-major and padded as grouped
                GEMMs load them by TMA, see Routed; scales that are given then have elements of 4 bytes.
            scales: `[T, n]` of 1-, 2- or 4-byte elements, travelling beside the rows.
            max_rows: rows to make room for, batched: of each expert, at most R * max_tokens; default: the worst case.
            sync: True: wait, and return exactly the rows that arrived; False: never wait for the device, tensors
                have `max_rows` rows and the device counts say how many are valid.  None: True on CPUs, False on GPUs.
            handle: repeats an earlier dispatch with new rows, without routing; `topk_idx` and `topk_weights` are
                then not given.
            num_sms: blocks (GPUs: one an SM) or threads (CPUs) to use; default: the table of the backend.
            check_weights: NaN in `topk_weights` is bad input.

        Raises:
            BadInput, Closed, ConcurrentCall: at once; what only the device can see at the next host-visible point, on
                every rank.
            Timeout, PeerLost, Aborted, Mismatch: the round failed; likewise.
        """
        routed = dispatch.prepare(
            self,
            x,
            topk_idx,
            topk_weights,
            layout=layout,
            expert_alignment=expert_alignment,
            quantize=quantize,
            scale_format=scale_format,
            scale_layout=scale_layout,
            scales=scales,
            max_rows=max_rows,
            sync=sync,
            handle=handle,
            num_sms=num_sms,
            check_weights=check_weights,
        )
        dispatch.run(routed)
        self.made += 1
        return dispatch.finish(self, routed)

    @overloads.typed(overloads.DispatchBegin)
    @collective()
    def dispatch_begin(
        self,
        x: Any,
        topk_idx: Any = None,
        topk_weights: Any = None,
        *,
        layout: Layout = "expert",
        expert_alignment: int = 1,
        quantize: Quantize | None = None,
        scale_format: ScaleFormat = "fp32",
        scale_layout: ScaleLayout = "row",
        scales: Any = None,
        max_rows: int | None = None,
        handle: Handle | None = None,
        num_sms: int | None = None,
        check_weights: bool = False,
    ) -> Routed:
        """The first half of dispatch(): sends, and does not wait for the rows of the others.  Collective.

        No SM is held from here to dispatch_end(), so that computations on the stream run while rows travel:

            routed = buffer.dispatch_begin(x, topk_idx, topk_weights)
            shared = shared_expert(x)
            buffer.dispatch_end(routed)

        Who wants a hook to call makes one: `hook = functools.partial(buffer.dispatch_end, routed)`.  In between,
        handles of earlier dispatches may be combined; the next dispatch comes after the end.

        Args: those of dispatch(), without `sync`.

        Returns:
            What dispatch() returns; its tensors can be read after dispatch_end(), and its handle used.

        Raises:
            As dispatch(); BadInput as well when one has begun and has not ended.
        """
        routed = dispatch.prepare(
            self,
            x,
            topk_idx,
            topk_weights,
            layout=layout,
            expert_alignment=expert_alignment,
            quantize=quantize,
            scale_format=scale_format,
            scale_layout=scale_layout,
            scales=scales,
            max_rows=max_rows,
            handle=handle,
            num_sms=num_sms,
            check_weights=check_weights,
            begin=True,
        )
        dispatch.run(routed)
        self.made += 1
        return dispatch.finish(self, routed)

    @collective(rounds=0)
    def dispatch_end(self, routed: Routed, *, sync: bool | None = None) -> Routed:
        """The second half: waits, on the current stream, for the rows of the dispatch that has begun.  Collective.

        Args:
            routed: what dispatch_begin() returned.
            sync: see dispatch().

        Returns:
            `routed`, whose tensors can be read from now on.

        Raises:
            As dispatch(); BadInput as well when `routed` is not what has begun.
        """
        dispatch.prepare_end(self, routed, sync=sync)
        dispatch.run(routed)
        return dispatch.finish(self, routed)

    @overloads.typed(overloads.Combine)
    @collective()
    def combine(
        self,
        y: Any,
        handle: Handle,
        *,
        out: Any = None,
        bias: Any = None,
        weighted: bool = True,
        weight_grads: Any = None,
        wire: torch.dtype | None = None,
        num_sms: int | None = None,
        topk_weights: Any = None,
    ) -> Any:
        """Brings the experts' rows home.  Collective; on the current stream.

        Args:
            y: rows as in `Routed.x` of the dispatch, in bfloat16, float16 or float32.
            handle: of that dispatch.
            out: `[T, H]` of the dtype of `y`, written in place; default: a new tensor.
            bias: `[T, H]` or `[H]` of the dtype of `y`, or float32, added before the rounding.
            weighted: expert, batched: multiply each row by the routing weight that dispatch carried.
            weight_grads: float32, a number a row (`[rows]`, batched `[E/R, rows]`; flat `[rows, K]`):
                brought home as well.
            wire: None: rows of "expert" and "batched" are added in float32 and travel so, and the result is rounded
                once.  The dtype of `y`: each rank's sum is rounded before it travels: half the bytes, one more
                rounding of 2^-8 (bfloat16) or 2^-11 (float16) relative to each rank's sum.
            topk_weights: float32 `[T, K]` of our own tokens, in the place of those that dispatch carried; on all ranks
                or none.  Unsupported: flat rows, `weight_grads`, max_tokens * topk above 4096.

        Returns:
            `[T, H]`: sum over k of w_k * y_k (flat: the plain sum over ranks), in float32 in a fixed order, plus
            bias, rounded once; zeros (plus bias) for a token with no expert.  With `weight_grads`: that and float32
            `[T, K]`.  Over several domains the sums of the domains are added, and cross in `wire`, flat ones too:
            moecomm/combine/reference.py says how far that may be from the order of one domain.
        """
        combining = combine.prepare(
            self,
            y,
            handle,
            out=out,
            bias=bias,
            weighted=weighted,
            weight_grads=weight_grads,
            wire=wire,
            num_sms=num_sms,
            topk_weights=topk_weights,
        )
        combine.run(combining)
        self.made += 1
        return combine.finish(self, combining)

    def empty(self, handle: Handle, dtype: torch.dtype | None = None) -> torch.Tensor:
        """An uninitialised `y` for combine(y, handle), in the window, of `dtype` (default: the Buffer's).

        Such rows are read where they are, without a copy: flat on GPUs (without `weight_grads`), all layouts on CPUs.
        """
        return combine.empty(self, handle, self.dtype if dtype is None else dtype)

    moe = overloads.typed(overloads.Moe)(layer.moe)  # dispatch, experts, combine

    @collective(rounds=0)
    def check(self) -> None:
        """Waits for every round so far and raises what went wrong in them, if anything."""
        self.require_usable()
        self._session.synchronize()
        self.raise_failure()

    def _release(self) -> None:
        super()._release()
        self.dispatch_plans.clear()  # they refer to the window
        self.combine_plans.clear()
        self.routes.clear()

    @property
    def backend(self) -> str:
        """How peers are reached, with the kind of window where there are several: "host", "lsa/vmm"."""
        return self._session.name

    @property
    def device(self) -> torch.device:
        """Where tensors must be."""
        return self._session.device

    @property
    def nbytes(self) -> int:
        """Memory of this rank's window, outputs included, in bytes."""
        return self._session.nbytes

    def __repr__(self) -> str:
        return shown.of_buffer(self)

    def __enter__(self) -> Buffer:
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()
