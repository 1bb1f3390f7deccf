"""Buffer: the object that users hold.  It owns peer-visible memory and runs dispatch and combine over it."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from moecomm import combine, dispatch
from moecomm.base import choices
from moecomm.base.bound import Bound
from moecomm.base.keywords import unexpected
from moecomm.base.placement import Placement
from moecomm.buffer import elastic, overloads
from moecomm.combine import options as combine_options
from moecomm.dispatch import options as dispatch_options
from moecomm.dispatch.routed import Handle, Routed
from moecomm.errors import RoundFailed
from moecomm.fused import layer
from moecomm.fused import options as layer_options
from moecomm.membership import masking, placing
from moecomm.membership.meeting import Shrunk
from moecomm.observe.stats import JobStats, Stats
from moecomm.rounds import names
from moecomm.rounds.rounds import Rounds

_DISPATCH, _COMBINE = dispatch_options.Request(), combine_options.Request()  # made once: they are most calls'


class Buffer(Bound):
    """Peer-visible memory of an expert-parallel group, and the dispatch and combine over it.

    Opening is collective.  Rounds (a dispatch or a combine) are collective too: every rank makes the same calls in
    the same order, with as many tokens as it has (none is fine).  In a forked child its parent's Buffers are closed.

    One thread at a time: a collective call or check() while another one is under way raises ConcurrentCall, and the one
    under way goes on undisturbed.  Threads may take turns; abort() and close() work from any thread at any time.

    Rounds have no gradients: a tensor that requires grad is BadInput outside of torch.no_grad().  See moecomm.ops.

    Args:
        group: a torch.distributed process group of any backend, a sub-group, one dimension of a DeviceMesh, a rank of
            moecomm.local_ranks(), or "self" for one rank alone.  None is "self" in a program of one process; in one
            of several it is an error, because torch.distributed.group.WORLD is None before init_process_group().
        hidden: columns of a token; a row is a multiple of 16 bytes.
        num_experts: experts of all ranks together, at least one a rank.  `local_experts` are those of this rank: E/R
            in a row, in order of ranks (the first have one more each of a remainder), unless there is a `placement`.
        topk: experts a token picks, 1 to 32.
        max_tokens: the most tokens one rank passes to a dispatch.
        dtype: of tokens: bfloat16, float16 or float32.  Rows of float8_e4m3fn with scales may be passed as well.
        backend: "auto", "host" (CPU ranks), or for GPUs "lsa" (NVLink), "gin" (NCCL) or "nvshmem".
        timeout_s: how long any wait for a peer may take, in seconds.
        device: where the tensors live; default: the current GPU if a GPU backend can run, else the CPU.
        capacity_factor: rows a round makes room for, as a multiple of those of even routing, `max_tokens * topk`;
            math.inf: the worst case.  Default: 1.5, or as many as fit 512 MiB.  dispatch() says what becomes of more.
        window_bytes: room for the outputs of rounds that the window opens with, in bytes; default: two such rounds.
            It grows where outputs stay alive; where it can't, those that find no room are copied out of it.
        wire: None: the sums that ranks return in combine travel in the dtype of `y`, each rounded once; "exact": in
            float32; "fp8", "int8": in one byte, with scales.  combine(wire=) is for one call.
        domain_ranks: how many neighbouring ranks load and store each other's memory; those of other domains are
            reached by put and signal: a token crosses once a domain, or, of a rank with few (about 4 MB as float32),
            once for each of its ranks.  Default: all that can.
        verify_every: N: compare rows with what was sent in one of N rounds; one that differs is CorruptRow, see
            docs/observing.md.  0: in none.  None: as MOECOMM_VERIFY_EVERY says, else 0.
        on_timeout: "mask": after PeerLost or Timeout, mask() the ranks that are lost.  dispatch(), dispatch_begin() and
            moe() then run again, if all ranks failed in the same call (on GPUs a dispatch with `sync=True`, before
            any capture); else it raises, and the next call works.
        placement: which rank holds which experts, with replicas if wanted; the same on all ranks.  "E/R" of shapes is
            then its number of slots, and local ids are those of slots.  None: E/R experts in a row on each rank.

    Attributes:
        rank: this rank's number in the group.
        num_ranks: ranks of the group.
        domain_ranks: ranks that load and store each other's memory.
        why: the reason for the backend, in words.

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
        backend: choices.BackendName = "auto",
        timeout_s: float = 30.0,
        device: torch.device | str | int | None = None,
        window_bytes: int | None = None,
        domain_ranks: int | None = None,
        wire: choices.Wire | None = None,
        capacity_factor: float | None = None,
        verify_every: int | None = None,
        on_timeout: choices.OnTimeout = "raise",
        placement: Placement | None = None,
    ) -> None:
        sizes = {"hidden": hidden, "num_experts": num_experts, "topk": topk, "max_tokens": max_tokens, "dtype": dtype}
        room = {"window_bytes": window_bytes, "capacity_factor": capacity_factor, "domain_ranks": domain_ranks}
        more = {"wire": wire, "verify_every": verify_every, "on_timeout": on_timeout}
        rounds = elastic.open_first(group, backend, device, timeout_s, placement, {**sizes, **room, **more})
        self.dtype, self.timeout_s = dtype, rounds.members.timeout_s
        self.hidden, self.num_experts, self.topk, self.max_tokens = hidden, num_experts, topk, max_tokens
        self._take(rounds)

    def _take(self, rounds: Rounds) -> None:
        """Make these the rounds of this Buffer, and retire those before."""
        before: Rounds | None = vars(self).get("rounds")
        self.rounds, self._parts = rounds, elastic.Parts(rounds, before)
        self.rank, self.num_ranks, self.domain_ranks = rounds.rank, rounds.num_ranks, rounds.domain_ranks
        self.why, self.name = rounds.origin.why, names.give(rounds)  # by its name operators find it
        if before is not None:
            before.retire()

    @overloads.dispatch
    def dispatch(
        self,
        x: Any,
        topk_idx: Any = None,
        topk_weights: Any = None,
        *,
        scales: Any = None,
        extras: Sequence[Any] = (),
        x_global_scale: Any = None,
        max_rows: int | None = None,
        handle: Handle | None = None,
        sync: bool | None = None,
        **options: Any,
    ) -> Routed:
        """Move tokens to the ranks that own their experts.  Collective; on the current stream.

        Args:
            x: `[T, H]`, T <= max_tokens, of the Buffer's dtype, or float8_e4m3fn with `scales`; or `[T, B]` with
                elements of 1, 2 or 4 bytes, in all at most as many bytes as H elements of the Buffer's dtype.
            topk_idx: int64 or int32 `[T, K]`: expert ids; -1 picks none; the same id twice counts twice.
            topk_weights: float32 `[T, K]`; None: every weight is 1.
            scales: `[T, n]` of 1-, 2- or 4-byte elements, which travel with the rows.
            extras: further tensors `[T, ...]` that travel with the rows; see `Routed.extras`.
            x_global_scale: a number, or float32 `[1]` on the device; of "fp8_tensor" the scale, of "nvfp4" a factor.
                The same on all ranks.
            max_rows: rows to make room for; batched: of each expert, at most R * max_tokens; default: the Buffer's.
            handle: repeats an earlier dispatch with new rows, without `topk_idx` and `topk_weights`.
            sync: True: wait, and return exactly the rows that arrived.  False: never wait for the device; tensors have
                `max_rows` rows, and counts on the device say how many are valid.  None: True on CPUs, False on GPUs.
            **options: see moecomm.dispatch.options.Options.

        Raises:
            BadInput, Closed, ConcurrentCall: at once; of what only the device sees, later, on every rank.
            Timeout, PeerLost, Aborted, Mismatch: the round failed; raised likewise.
        """
        rounds = self.rounds
        try:
            request = dispatch_options.Request(dispatch_options.Options(**options)) if options else _DISPATCH
        except TypeError:
            raise unexpected(self.dispatch, options) from None
        how = (max_rows, handle, sync, extras, x_global_scale)
        while True:
            experts = rounds.experts
            ids = topk_idx if experts.ids is None and experts.live is None else experts.own_ids(topk_idx)
            try:
                return dispatch.dispatch(rounds, request, x, ids, topk_weights, scales, *how)
            except RoundFailed as error:
                masking.require_repeats(error, handle)

    @overloads.dispatch_begin
    def dispatch_begin(
        self,
        x: Any,
        topk_idx: Any = None,
        topk_weights: Any = None,
        *,
        scales: Any = None,
        extras: Sequence[Any] = (),
        x_global_scale: Any = None,
        max_rows: int | None = None,
        handle: Handle | None = None,
        **options: Any,
    ) -> Routed:
        """Run the first half of dispatch(): send, and do not wait for the rows of other ranks.  Collective.

        No SM is held from here to dispatch_end(), so computations on the stream run while rows travel.  Where ranks
        keep step, this hides nothing: the rows have arrived when the sends are done.  It pays where a rank lags.

        In between, handles of earlier dispatches may be combined; the next dispatch comes after the end.

        Args: those of dispatch(), without `sync` and `overflow="chunks"`.

        Returns what dispatch() returns.  Its tensors and its handle can be used after dispatch_end().

        Raises:
            As dispatch(); BadInput as well when one has begun and has not ended.
        """
        try:
            request = dispatch_options.Request(dispatch_options.Options(**options)) if options else _DISPATCH
        except TypeError:
            raise unexpected(self.dispatch_begin, options) from None
        more = {"extras": extras, "global_scale": x_global_scale}
        while True:
            tensors = (x, self.rounds.experts.own_ids(topk_idx), topk_weights, scales, max_rows, handle)
            try:
                return dispatch.dispatch_begin(self.rounds, request, *tensors, **more)
            except RoundFailed as error:
                masking.require_repeats(error, handle)

    def dispatch_end(self, routed: Routed, *, sync: bool | None = None) -> Routed:
        """Wait, on the current stream, for the rows of the dispatch that has begun.  Collective.

        Args:
            routed: the result of dispatch_begin().  sync: see dispatch().

        Returns `routed`, whose tensors can be read from now on.

        Raises:
            As dispatch(); BadInput as well when `routed` is not the dispatch that has begun.
        """
        return dispatch.dispatch_end(self.rounds, routed, sync=sync)

    @overloads.combine
    def combine(
        self,
        y: Any,
        handle: Handle,
        *,
        out: Any = None,
        bias: Any = None,
        weight_grads: Any = None,
        topk_weights: Any = None,
        **options: Any,
    ) -> Any:
        """Return the experts' rows to the ranks of their tokens, and add them up.  Collective; on the current stream.

        Args:
            y: rows as in `Routed.x` of the dispatch, in bfloat16, float16 or float32.  Or moecomm.fused.Fp8 with scales
                `[..., ceil(H / 128)]` or `[..., 1]`: a pass makes value * scale of them, rounded once to the Buffer's
                dtype, which then counts as that of `y`.
            handle: of that dispatch.
            out: `[T, H]` of the dtype of `y`, written in place; default: a new tensor.
            bias: `[T, H]` or `[H]` of the dtype of `y`, or float32, added before the rounding.
            weight_grads: float32, returned as well: `[rows]`, batched `[E/R, rows]`, flat `[rows, K]`.
            topk_weights: float32 `[T, K]` of this rank's tokens, in the place of those that dispatch carried; on all
                ranks or none.  Unsupported: flat rows, `weight_grads`, max_tokens * topk above 4096 (but for "rows").
            **options: see moecomm.combine.options.Options.

        Returns:
            `[T, H]`: sum over k of w_k * y_k (flat: the plain sum over ranks), in float32 in a fixed order, plus
            bias, rounded once; zeros (plus bias) for a token without an expert.  With `weight_grads`: a tuple of that
            and float32 `[T, K]`.  Over several domains, the sums of the domains are added, and travel in `wire`, flat
            ones too: moecomm/combine/reference.py bounds the difference from the order of one domain.

        Raises:
            As dispatch(); Unsupported for `topk_weights` as above; of `wire="rows"` flat rows, grads, several domains.
        """
        try:
            request = combine_options.Request(combine_options.Options(**options)) if options else _COMBINE
        except TypeError:
            raise unexpected(self.combine, options) from None
        return combine.combine(self.rounds, request, y, handle, out, bias, weight_grads, topk_weights)

    def empty(self, handle: Handle, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Return an uninitialized `y` for combine(y, handle), in the window, of `dtype` (default: the Buffer's).

        Combine reads such rows in place, unless it casts them: flat on GPUs (without `weight_grads`), all on CPUs.
        """
        return combine.empty(self.rounds, handle, self.dtype if dtype is None else dtype)

    @overloads.moe
    def moe(
        self,
        x: Any,
        topk_idx: Any,
        topk_weights: Any,
        w13: Any,
        w2: Any,
        *,
        out: Any = None,
        bias: Any = None,
        dropped: Any = None,
        w13_bias: Any = None,
        w2_bias: Any = None,
        **options: Any,
    ) -> Any:
        """Run every token through its experts: dispatch, two GEMMs, combine.  Collective; on the current stream.

        On GPUs nothing waits for the host, unless `overflow="chunks"`, and a captured graph replays with any routing.
        The first call of a kind compiles its kernels, so it can't be captured.  With `fused=None` it also waits, and
        measures which form is the faster one.

        Both GEMMs add in float32, in an order that depends on nothing but their sizes, then biases, and activate the
        sums.  The result and each expert's row are rounded once to the Buffer's dtype.  Combine multiplies rows by the
        routing weights in float32 as it adds them up.  The same inputs give the same bits.  moecomm.ops has gradients.

        On a Hopper GPU the GEMMs are moecomm.fused.grouped_gemm.  What that does not take (another GPU, float32, I that
        is no multiple of 8, more than 512 experts a rank) goes through torch's grouped GEMM; a warning says so once.

        Weights in FP8 make an FP8 layer: dispatch casts tokens to e4m3 (`quantize="fp8"`), both GEMMs multiply e4m3,
        the activated values are cast between them, and the experts' rows return in the Buffer's dtype.  Of weights with
        scales of channels, in INT8, MXFP4 and NVFP4, docs/formats.md has the arithmetic.

        Args:
            x: `[T, H]`, T <= max_tokens, of the Buffer's dtype.
            topk_idx: int64 or int32 `[T, K]`: expert ids; -1 picks none.
            topk_weights: float32 `[T, K]`; None: every weight is 1.
            w13: `[E/R, 2 I, H]` of the Buffer's dtype: I gate rows, then I up rows, of each expert of this rank.
            w2: `[E/R, H, I]`: the down projections.  Both in FP8: pairs of float8_e4m3fn values and float32 scales, one
                for 128 rows and 128 columns (moecomm.fused.quantize_weights; of w13 see moecomm.fused.Fp8); or of
                float8_e4m3fn or int8 values and scales `[E/R, N]` (quantize_channels) or `[E/R]`; or of MXFP4: uint8
                values `[E/R, N, K / 2]` and exponents `[E/R, N, K / 32]`; or of NVFP4: a triple, moecomm.fused.Nvfp4.
            out: `[T, H]` of the Buffer's dtype, written in place; default: a new tensor.
            bias: `[T, H]` or `[H]` of the Buffer's dtype, added before the rounding: a shared expert, say.
            w13_bias: `[E/R, 2 I]`, float32 or the Buffer's dtype, of the first GEMM: gate before up, also interleaved.
            w2_bias: `[E/R, H]`, of the second GEMM: added before an expert's row is rounded and weighted.
            dropped: with `overflow="drop"`: int32 `[1]`, where the entries of `topk_idx` without room are counted.
            **options: see moecomm.fused.options.Options.

        Returns:
            `[T, H]`: sum over k of w_k * (w2 activation(w13 x + w13_bias) + w2_bias), plus bias; an empty sum is 0.

        Raises:
            BadInput: what does not fit.
            Unsupported: FP8 on another GPU, with H no multiple of 16 or I of 32 (interleaved: 16), with more than 512
                experts a rank, or where the Buffer's dtype is float32, likewise scales of channels; MXFP4 with H or I
                no multiple of 32, NVFP4 of 16, or where the Buffer's dtype is not bfloat16.
            Closed, Timeout, PeerLost, Aborted, Mismatch: as in dispatch().
        """
        rounds, number = self.rounds, options.pop("_layer", 0)  # of nn.ExpertParallel, as in moecomm.ops.moe
        try:
            request = layer_options.Request(layer_options.Options(**options), layer=number)
        except TypeError:
            raise unexpected(self.moe, options) from None
        others = {"out": out, "bias": bias, "dropped": dropped, "w13_bias": w13_bias, "w2_bias": w2_bias}
        while True:
            experts = rounds.experts
            ids = topk_idx if experts.ids is None and experts.live is None else experts.own_ids(topk_idx)
            try:
                return layer.moe(rounds, request, x, ids, topk_weights, w13, w2, **others)
            except RoundFailed as error:
                masking.require_repeats(error)

    def shrink(self, group: Any = None, *, keep_ids: bool = False) -> Shrunk:
        """Go on with the ranks that are left, after PeerLost, Timeout or Aborted.  Collective among them.

        They agree on who is left, open new windows, and number themselves 0 to R-1 in the order they had.  A rank that
        others have named in a Timeout has 50 ms to come, one that waits in a round until that fails, any other
        `timeout_s`, unless its process has ended or has closed the Buffer.  Ranks that are lost meanwhile are left out,
        too.  Old windows are given back and not used again: a rank that was taken for lost may still write to them.

        Outputs of earlier rounds stay valid; handles can't be used any more, nor graphs that were captured.

        Args:
            group: a group of the ranks that are left, in the order they had: for ranks on several hosts whose store
                is lost.  None: no group is needed.
            keep_ids: True, and always with a `placement`: ranks keep their experts; those of lost ranks alone are not
                there, and ids of theirs count as -1.  False: all `num_experts` are there, shared anew among the ranks,
                and the caller moves weights to where `local_experts` says.

        Returns the ranks that go on and those that are lost, by their numbers before.

        Raises:
            Excluded: the others go on without this rank.
            BadInput: a call during a capture, or a `group` that can't be used.
            Mismatch: another rank calls mask() or unmask(), or has another `keep_ids`; nothing has changed.
            Timeout, PeerLost, Aborted, Unsupported: the Buffer could not be opened again; shrink() can be repeated.
            Closed, ConcurrentCall: as everywhere.
        """
        rounds, shrunk = self._parts.membership.shrink(group, keep_ids)
        self._take(rounds)
        return shrunk

    def grow(self, group: Any, *, placement: Placement | None = None) -> None:
        """Go on with more ranks, or others.  Collective among all of them.

        Ranks that join open a Buffer over this group, with the arguments of this one, and wait until the others call
        grow(), which make rounds meanwhile.  All `num_experts` are shared anew; the caller moves weights to where
        `local_experts` says.  Outputs, handles and graphs are as in shrink().  A rank that leaves closes its Buffer.

        Args:
            group: of all ranks that go on, as for opening a Buffer.  It sets their numbers.  It needs no backend:
                torch.distributed.ProcessGroup(store, rank, ranks) is enough, of a store that outlives the ranks.
            placement: of all these ranks, if the Buffer has one.  Those that join open with it.  Slots may be empty.

        Raises:
            As opening a Buffer does: this one then stays as it was, and goes on with rounds, or with shrink() if it has
                lost a rank.  PeerLost: also if a rank of this Buffer is lost before it comes; its `peer` is then -1.
            BadInput: also for a call during a capture.
            Closed, ConcurrentCall, Timeout, PeerLost, Aborted: as everywhere.
        """
        self._take(self._parts.membership.grow(group, placement))

    def compile_for(self, ranks: int, *, keep_ids: bool = False, domain_ranks: int | None = None) -> int:
        """Compile the kernels of the rounds so far for another number of ranks, so that shrink() or grow() need not.

        Each takes seconds, and goes to a cache on disk, so one rank of a host makes this call; peers learn nothing of
        it.  It may be repeated after rounds of other kinds, and run in a thread beside rounds.

        Args:
            ranks: as many as shrink() may leave, or as grow() makes.
            keep_ids: as for shrink().
            domain_ranks: with several domains: the ranks of one.  None: all.

        Returns the number of kernels: 0 on CPU ranks.

        Raises:
            BadInput: no such number of ranks.  Closed.  Unsupported: they can't be compiled.
        """
        return self._parts.membership.compile_for(ranks, keep_ids, domain_ranks)

    def set_placement(self, placement: Placement) -> None:
        """Let rounds from now on, and replays of captured graphs, follow another placement.  Collective.

        Waits for nothing: it takes its place among the rounds of a rank, on the current stream.  Weights are the
        caller's business: those of each slot are in place before.  Leave those of slots that change until a later round
        has ended: after a loss, shrink() goes on with the oldest placement that any rank has.  Handles stay valid.

        Args:
            placement: of the same experts and ranks as before, with at most as many slots a rank.

        Raises:
            BadInput: a Buffer that was opened without one, masked ranks, a call during a capture.
            Mismatch: in the next dispatch, if ranks passed different ones, or passed them between other rounds.
        """
        placing.set_placement(self.rounds, placement)

    @property
    def placement(self) -> Placement | None:
        """The placement of experts; None if the Buffer was opened without one."""
        return self.rounds.placement

    @property
    def local_experts(self) -> Sequence[int]:
        """The experts of this rank: a range; with a placement those of its slots, -1 where one is empty."""
        rounds = self.rounds
        if rounds.slots is not None:
            return rounds.slots.placement.held[rounds.rank]
        ids = rounds.experts.ids
        return rounds.local_experts if ids is None else ids.range_of(rounds.local_experts)

    def joining(self, group: Any) -> list[int]:
        """Return the ranks of a group that have come to open a Buffer, and wait for the others to call grow().

        Not collective: any rank may look, between two rounds.

        Args:
            group: as for grow().

        Raises:
            Closed; BadInput: no such group.  Timeout, PeerLost: its store does not answer.
        """
        return self._parts.membership.joining(group)

    def mask(self, ranks: Iterable[int] | None = None, *, replicas: Mapping[int, int] | None = None) -> tuple[int, ...]:
        """Go on without some ranks, in the same windows.  Collective among the ranks that stay.

        Nobody waits for a masked rank.  Ids of its experts mean their replicas or, without one, count as -1: their part
        of the sums is missing.  Numbers of ranks and experts, shapes and addresses stay as they are.  Handles of
        earlier dispatches can't be used any more, and a dispatch_begin() without its end is forgotten.

        The masked rank raises Excluded at its next call; over a network, if its whole domain is masked, Timeout.  A
        rank that is masked while it is in a round may write to the windows until it notices, unlike after shrink().

        Args:
            ranks: to mask, beside those that are masked already.  None: after PeerLost or Timeout, agree on who is lost
                as in shrink(), and mask these.  Empty: set `replicas` on this rank, and do nothing else.
            replicas: another expert for an expert id, used while the rank of the first is masked.  A replica whose rank
                is masked, too, is replaced by its own.  None: those given before.

        Returns the ranks that are masked now.

        Raises:
            Excluded: the others go on without this rank.
            BadInput: a call during a capture; ranks or replicas that can't be used.
            Mismatch: another rank calls shrink(); nothing has changed.
            MemoryReleased: restore() comes first; after a loss only shrink() goes on.
            Timeout, PeerLost: nothing over which the ranks could agree is left.  Closed, ConcurrentCall: as everywhere.
        """
        return self._parts.masks.mask(ranks, replicas)

    def unmask(self, ranks: Iterable[int]) -> tuple[int, ...]:
        """Take masked ranks in again.  Collective among the ranks that take part and these, which call it, too.

        Their experts are there again; their weights are the caller's business.  Handles are as in mask().

        Args:
            ranks: to take in; alike on all ranks.

        Returns the ranks that are masked now.

        Raises:
            PeerLost, Timeout: one of the ranks did not come, and stays masked; the Buffer can be used.  On a masked
                rank: no other one called unmask().
            Excluded, BadInput, Mismatch, MemoryReleased, Closed, ConcurrentCall: see mask().
        """
        return self._parts.masks.unmask(ranks)

    @property
    def masked(self) -> tuple[int, ...]:
        """The ranks that take no part in rounds."""
        return self._parts.masks.masked

    def release_memory(self) -> None:
        """Give the memory of outputs back until restore(), and keep its addresses: captured graphs stay valid.

        Collective.  Until restore(), rounds raise MemoryReleased, and no captured graph may be replayed.  Outputs of
        graphs lose their contents.

        Raises:
            BadInput: another output is still referenced, here or on the rank that it names.
            Unsupported: this kind of window (NCCL's or NVSHMEM's) can't give memory back.
            Timeout, PeerLost, Aborted, Mismatch: not all ranks came; the first three end the Buffer: see RoundFailed.
            As check(): a round or an exchange of weights went wrong.
        """
        self._parts.memory.release()

    def restore(self) -> None:
        """Take the memory that release_memory() has given back, zeroed, at the same addresses.  Collective.

        Raises:
            Unsupported: the memory is not free on some rank; the Buffer stays released, and restore() can be repeated.
            Timeout, PeerLost, Aborted, Mismatch: see release_memory().
        """
        self._parts.memory.restore()

    @property
    def released(self) -> bool:
        """Return whether release_memory() has given the memory of outputs back."""
        return self._parts.memory.released

    @overloads.stats
    def stats(self, *, gather: bool = False, reset: bool = False) -> Stats | JobStats:
        """Return the counters of this rank: rounds, rows, bytes, rows of each expert, and waits for each peer.

        Rounds of backward passes, of forward passes that are recomputed, and of replayed graphs count as well.  This
        call waits for the rounds so far, on this rank.  After a failed round it still works.

        Args:
            gather: True: those of all ranks.  Collective then, over the sockets of the group, not in rounds.
            reset: True: count from 0 again, after reading.

        Raises:
            Closed, ConcurrentCall: as everywhere.  BadInput: a call during a capture.
            Timeout: the device does not answer.  Of `gather`: Timeout, PeerLost, Aborted: not all ranks came.  Then
                nothing is reset, and the Buffer goes on.
        """
        return self._parts.counters.read(gather, reset)

    def reset_stats(self) -> None:
        """Count from 0 again on this rank, after the rounds so far.  Raises as stats()."""
        self._parts.counters.reset()

    def flight_record(self) -> dict[str, Any]:
        """Return the last 256 calls of this rank and the failures that it knows of.

        Waits for nothing, and works from any thread, and after close().  docs/observing.md has the format.
        """
        return self._parts.recorder.record()

    def dump_flight_record(self, path: str | os.PathLike[str]) -> None:
        """Write flight_record() to a file as JSON, mode 0600.  `moecomm explain` compares those of all ranks.

        Args:
            path: of the file, which is replaced if it is there.  Its folder is made if it is missing.  BadInput: no
                path, or a file that can't be written.
        """
        self._parts.recorder.dump(path)

    def check(self) -> None:
        """Wait for rounds and exchanges of weights so far, and raise the error of the first that went wrong, if any.

        Raises:
            As dispatch().  BadInput, Mismatch, Timeout, PeerLost, Aborted: of exchanges, see ops.slot_weights().
        """
        self.rounds.check()

    def close(self) -> None:
        """Give the memory back.  Idempotent.  Abort and await a call in another thread.  Outputs in use stay valid."""
        self.rounds.close()

    def abort(self) -> None:
        """End every wait of this rank at once, from any thread.  Then close() or shrink() the Buffer."""
        self.rounds.abort()

    @property
    def closed(self) -> bool:
        """True once close() has been called."""
        return self.rounds.closed

    @property
    def failed(self) -> bool:
        """True if a failed round is known to have ended the Buffer.  Does not look for a new failure."""
        return self.rounds.failed

    @property
    def backend(self) -> str:
        """Name of the backend, with the kind of window where there are several: "host", "lsa/vmm"."""
        return self.rounds.session.name

    @property
    def device(self) -> torch.device:
        """Device of all tensors."""
        return self.rounds.device

    @property
    def nbytes(self) -> int:
        """Memory of this rank's window in bytes, outputs included unless their memory is released."""
        return self.rounds.session.nbytes

    def __repr__(self) -> str:
        if "name" not in vars(self):  # the last attribute that the constructor sets
            return "<moecomm.Buffer, not open yet>"
        states = {"closed": self.closed, "failed": self.failed, "released": self.released, "open": True}
        state = next(name for name, holds in states.items() if holds)
        return (
            f"<moecomm.Buffer {state}, backend={self.backend!r}, rank {self.rank} of {self.num_ranks}, "
            f"hidden={self.hidden}, num_experts={self.num_experts}, topk={self.topk}, "
            f"max_tokens={self.max_tokens}, {self.dtype}, {self.device}, {self.nbytes / 2**20:.1f} MiB>"
        )

    def __enter__(self) -> Buffer:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is not None:
            self._parts.recorder.left(error)
        self.close()
