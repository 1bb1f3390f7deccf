"""WeightTransfer: stage() brings weights to the ranks that want them, commit() switches all of these ranks at once.

Bytes go through a Window.  Ranks agree on each step as they agree on opening a Buffer: a step ends in success on all
ranks, or in a named error on all.  A receiver has a second set of weights in its memory of the Window; only the last
step writes those in use.
"""

from __future__ import annotations

import secrets
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Any, NoReturn

import torch

from moecomm import _native
from moecomm.base.bound import Bound
from moecomm.base.choices import BackendName
from moecomm.base.placement import NONE, Placement
from moecomm.base.protocol import MAX_HOST_RANKS
from moecomm.base.validation import check_integer, seconds
from moecomm.errors import (
    Aborted,
    BadInput,
    Closed,
    ConcurrentCall,
    CorruptWeights,
    Mismatch,
    PeerLost,
    RoundFailed,
    Timeout,
)
from moecomm.membership.meeting import Survivors
from moecomm.ranks.board import KeptBoard, StoreBoard
from moecomm.ranks.group import Group
from moecomm.ranks.opening import Opening, abort, opening
from moecomm.ranks.rendezvous import rendezvous
from moecomm.rounds import failures
from moecomm.transfer.casts import Cast, checked, described, kinds_of
from moecomm.transfer.gpu import GpuCarrier
from moecomm.transfer.host import HostCarrier
from moecomm.transfer.records import Arriving, Carrier, Leaving, Records
from moecomm.transfer.routes import routes_of
from moecomm.window import Window

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

_WORD = 8  # bytes of a number that ranks compare
_COUNT_BITS = 32  # of a count of records, below the number of the stage()
_SHORTEST_NAP_S, _LONGEST_NAP_S, _GROWTH = 2e-5, 1e-3, 1.25  # between two looks for records
_LOOK_S = 0.05  # between two looks for failures
Into = Mapping[str, "torch.Tensor | tuple[torch.Tensor, ...]"]


class WeightTransfer(Bound):
    """Move the weights of all experts from the ranks that train them to the ranks that serve them.

    One group holds both: some of its ranks have experts of `source`, some have slots of `target`, and a rank may have
    both.  stage() casts the weights, copies them to every rank that wants them and verifies them there, and leaves the
    weights in use alone.  commit() then switches all receivers (the ranks with slots of `target`) at one step:

        transfer = WeightTransfer(group, {"w13": (2 * I, H), "w2": (H, I)}, source=source, target=target, cast="fp8")
        transfer.stage({"w13": w13, "w2": w2})  # a trainer; a rank without experts of source: stage()
        transfer.commit({"w13": (data, scales), "w2": (data, scales)})  # a rank with slots of target, between two steps

    Opening is collective, and so is stage().  commit() is collective among receivers; on other ranks it does nothing.
    A call that fails leaves the weights in use as they were on all ranks, and can be made again.

    Ranks read from each other only experts that they do not have.  One rank casts such an expert, once for all of its
    readers.  A rank that has an expert in both placements casts its own.

    Args:
        group: as for a moecomm.Buffer; ranks_over() makes one for ranks of separate jobs.
        shapes: of an expert's tensors, by name.
        source: the experts of each rank that trains: row s of its tensors is the expert of its slot s.  Covers all
            ranks of the group; those that train nothing have no experts.
        target: likewise, the experts of each rank that serves.  An expert may be in several slots.
        dtype: of the tensors of `source`, one for all of them or by name.
        cast: the format that travels and arrives, one for all tensors or by name.  None: the tensors as they are.
            A dtype: rounded to it.  "fp8": e4m3 in blocks of 128 x 128, as fused.quantize_weights.  "fp8_token" and
            "int8_token": a scale for each channel, as fused.quantize_channels.  "int8_group", "mxfp8" and "mxfp4": as
            moecomm.formats casts rows.  "nvfp4": likewise, with a factor for each matrix, 1 / (2688 / amax).
        backend, device: see Window.
        timeout_s: how long a call waits for a rank.

    Attributes:
        rank: this rank's number in the group.
        num_ranks: ranks of the group.
        arrives: shapes and dtypes of one expert's tensors as they arrive, by name: values, then scales, then a factor.

    Raises:
        BadInput: an argument that can't be used, here or on the rank that it names.
        Mismatch: ranks passed different values; names the field.
        Unsupported: GPUs of several domains, or CPU ranks of several hosts, which a Window does not connect.
        Timeout, PeerLost, Aborted: a rank did not come, has ended, or was interrupted; then no rank has opened.
    """

    def __init__(
        self,
        group: Any,
        shapes: Mapping[str, Sequence[int]],
        *,
        source: Placement,
        target: Placement,
        dtype: torch.dtype | Mapping[str, torch.dtype] = torch.bfloat16,
        cast: Cast | Mapping[str, Cast] = None,
        backend: BackendName = "auto",
        device: torch.device | str | int | None = None,
        timeout_s: float = 30.0,
    ) -> None:
        ranks = rendezvous(group)
        with opening(ranks, timeout_s, of="WeightTransfer", note="WeightTransfer()") as agreement:
            for argument, given in (("source", source), ("target", target)):
                if not isinstance(given, Placement) or given.ranks != ranks.ranks:
                    raise BadInput(argument, repr(given), f"a moecomm.Placement of {ranks.ranks} ranks")
            self._kinds = kinds_of(shapes, dtype, cast)
            if target.num_experts > source.num_experts:
                raise BadInput("target", repr(target), f"a Placement of {source.num_experts} experts, as source")
            self._routes = routes_of(source, target)
            compared = {**described(self._kinds), "source": _shown(source), "target": _shown(target)}
            identity = agreement.compare(compared, secrets.token_bytes(4))[0].hex()
            agreement.settle()
        self.rank, self.num_ranks, self._timeout_s = ranks.rank, ranks.ranks, seconds(timeout_s)
        self._route = self._routes[ranks.rank]
        self.arrives = {name: kind.parts for name, kind in self._kinds.items()}
        self._rows = _rows(source.held[ranks.rank]), _rows(target.held[ranks.rank])
        self._records = Records(self._kinds)
        # Behind the records of a rank, each rank has a word, the number of experts that it has cast in a stage(), and a
        # byte, which it sets when it closes.
        self._progress = self._records.nbytes * max(len(route.places) for route in self._routes)
        self._flags = self._progress + _WORD * ranks.ranks
        about: dict[str, Any] = {"backend": backend, "device": device, "timeout_s": timeout_s, "signals": 1}
        try:
            self._window = Window(ranks, self._flags + ranks.ranks, **about)
        except BadInput as error:
            if error.argument != "nbytes":
                raise
            want = f"experts whose tensors fit twice: {error.want}"
            raise BadInput("shapes", f"{error.got} bytes on each rank", want, error.rank) from None
        self._memory: dict[int, torch.Tensor] = {}
        device = self._window.device  # to look what others have written, and to read it
        self._streams: list[torch.cuda.Stream] | None = None
        self._carrier: Carrier = HostCarrier(self._records)
        if device.type == "cuda":
            self._carrier = GpuCarrier(self._records, device)
            self._streams = [torch.cuda.Stream(device) for _ in range(2)]  # type: ignore[no-untyped-call]
        receivers = [rank for rank, route in enumerate(self._routes) if route.slots]
        name = f"transfer/{agreement.number}"
        self._board = KeptBoard(ranks.board)
        self._all = self._part(ranks, range(ranks.ranks), f"{name}/stage/")
        self._receivers = self._part(ranks, receivers, f"{name}/commit/") if self._route.slots else None
        self._members = {"stage": list(range(ranks.ranks)), "commit": receivers}
        self._of = f"WeightTransfer {agreement.number} of the group"
        self._name = f"WeightTransfer {agreement.number} ({identity})"  # of no other one, in any group
        self._staged = self._commits = 0  # number of the stage() that commit() takes; how many have been taken
        self.turn = _native.Turn()
        self._closing = self._closed = False

    def stage(self, tensors: Mapping[str, torch.Tensor] | None = None) -> None:
        """Bring the weights of all experts to the ranks that want them, beside the weights in use.  Collective.

        Returns when all ranks have theirs, verified; `tensors` may change then.  A call discards what has not been
        committed, even if it fails.

        Args:
            tensors: of this rank's experts, by name, each `[slots of source, *shape]` or longer; None on a rank without
                experts of `source`.

        Raises:
            BadInput: tensors that do not fit, here or on another rank.
            CorruptWeights: a tensor is not what its sender has hashed.
            Mismatch: receivers have made different numbers of commits, because one was interrupted.
            Timeout, PeerLost, Aborted: a rank did not come, has ended or closed its transfer, or was interrupted.
            ConcurrentCall: another thread is in a call.
            Closed: after close().
        """
        with self._call("stage"), self._agreement("stage", self._all) as ranks:
            self._staged = 0  # also if the call fails: other ranks may have begun to write
            given = self._given("tensors", tensors, self._rows[0], arriving=False)
            self._compare_commits(ranks.all_gather(_packed(self._commits if self._route.slots else -1)))
            number = ranks.number + 1
            try:
                self._write(ranks, given, number)
                self._read(ranks, number)
            finally:
                self._synchronize()  # `tensors` may change; no other rank begins a later stage() beside these copies
            ranks.settle()
        self._staged = number if self._receivers is not None else 0

    def commit(self, into: Into | None = None, *, also: Mapping[WeightTransfer, Into | None] | None = None) -> None:
        """Write the weights of the last stage() over those in use, on all receivers or on none.  Collective among them.

        Each receiver writes when all have called, so all that call between the same two steps switch at one step.
        Addresses stay, so captured graphs stay valid.  On GPUs, writes on the current stream, and waits for it.

        Args:
            into: tensors of this rank's slots, by name: `[slots of target, *shape]` or longer.  With a cast to a
                format, a tuple of values and scales, and for NVFP4 factors.  Empty slots stay as they are.  None on a
                rank without slots.
            also: other transfers of the same receivers, staged too, which switch at the same step: the `into` of each,
                in the same order on all receivers.

        Raises:
            BadInput: tensors that do not fit, or nothing is staged, here or on another rank; `also` has this transfer,
                one that is closed, or one of other receivers.
            Mismatch: ranks have staged different weights, or pass other transfers in `also`, or in another order.
            Timeout, PeerLost, Aborted: as stage(), for receivers alone; ranks are numbered among receivers.
            ConcurrentCall, Closed: as stage().
        """
        parts: list[tuple[WeightTransfer, Into | None]] = [(self, into)]
        with self._call("commit"), ExitStack() as stack:
            if self._receivers is None:
                parts += self._others(also, stack)
                for part, given in parts:
                    part._given("into", given, part._rows[1], arriving=True)
                return
            decided, slots = False, list[dict[str, list[torch.Tensor]]]()
            try:
                with self._agreement("commit", self._receivers) as ranks:
                    parts += self._others(also, stack)
                    for part, given in parts:
                        slots.append(part._given("into", given, part._rows[1], arriving=True))
                        if not part._staged:
                            raise BadInput("commit", "nothing to commit", "stage() first")
                    others, staged = [part._name for part, _ in parts[1:]], [part._staged for part, _ in parts]
                    ranks.compare({"also": others, "staged": staged})
                    try:
                        ranks.settle()
                    except BaseException as error:
                        decided = ranks.is_open_despite(error)
                        raise
                    decided = True
                _switch(parts, slots)
            except BaseException:
                if decided:  # all others switch: so does this rank, whatever has interrupted it
                    _switch(parts, slots)
                raise

    def close(self) -> None:
        """Give the memory back, and end waits of other ranks for this one.  Local and idempotent.

        Aborts a call of another thread, and waits for it.  In a signal handler that interrupts a call, that call closes
        at its end.
        """
        if self._closed:
            return
        self._closing = True
        with _native.AwaitedTurn(self.turn, lambda: None):
            if self.turn.running:
                self.turn.closing = True
            else:
                self._release()

    @property
    def staged(self) -> bool:
        """True on a receiver that has weights for commit()."""
        return self._staged > 0

    @property
    def closed(self) -> bool:
        """True once close() has been called."""
        return self._closing

    def __enter__(self) -> WeightTransfer:
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()

    def __repr__(self) -> str:
        if "_closed" not in vars(self):  # the last attribute that the constructor sets
            return "<moecomm.WeightTransfer, not open yet>"
        state = "closed" if self._closing else "staged" if self._staged else "open"
        return f"<moecomm.WeightTransfer {state}, rank {self.rank} of {self.num_ranks}, {', '.join(self._kinds)}>"

    def _part(self, ranks: Group, members: Sequence[int], prefix: str) -> Survivors:
        """Return some ranks as a Group that numbers its agreements separately."""
        number = list(members).index(ranks.rank)
        return Survivors(number, len(members), ranks.in_process, self._board.part, prefix, self._timeout_s)

    def _call(self, name: str) -> _native.Call:
        """Return the context of a call, which raises Closed or ConcurrentCall.  `name`: "": it has no agreement."""
        return _native.Call(self, int(name != ""), name)

    # What _native.Call asks of its owner.

    def _begin_call(self, rounds: int, nested: bool, note: object) -> None:
        if self._closing or self._window.closed:  # the second in a forked child
            raise Closed("WeightTransfer")

    def _refuse(self) -> NoReturn:
        raise Closed("WeightTransfer") if self._closing else ConcurrentCall("WeightTransfer")

    def _interrupted(self, error: BaseException | None, note: str) -> None:
        """Let peers know of a call that ends before its agreement, if a signal handler may have raised the error."""
        if error is not None and not failures.is_interrupt(error):
            return
        ranks = self._receivers if note == "commit" else self._all
        if ranks is not None:
            abort(ranks, note, self._of, error or KeyboardInterrupt())

    def _count_refused(self) -> None:
        while self.turn.uncounted > 0:
            self.turn.counted()

    def _call_failed(self, error: BaseException, missed: bool, note: object) -> None:
        """Count nothing: ranks agree in each call."""

    def _release(self) -> None:
        """Tell the other ranks, and free the memory."""
        if self._closed:
            return
        if not self._window.closed:
            for rank in range(self.num_ranks):
                if rank != self.rank:
                    self._bytes_of(rank)[self._flags + self.rank] = 1
            self._synchronize()
        self._memory.clear()
        self._board.close()
        self._window.close()
        self._closed = True

    def _others(self, also: Any, stack: ExitStack) -> list[tuple[WeightTransfer, Into | None]]:
        """Return the `also` of commit(), each in a call of `stack`.  Raises BadInput, ConcurrentCall."""
        if also is not None and not (isinstance(also, Mapping) and all(type(one) is type(self) for one in also)):
            raise BadInput("also", type(also).__name__, "tensors by WeightTransfer")
        for part in also or ():
            if part is self or part.closed:
                raise BadInput("also", "a closed one" if part.closed else "this one", "other, open transfers")
            if part._members["commit"] != self._members["commit"]:
                raise BadInput("also", f"receivers {part._members['commit']}", self._members["commit"])
            stack.enter_context(part._call(""))
        return list((also or {}).items())

    def _agreement(self, call: str, ranks: Group) -> Any:
        stopped = partial(self._stopped, call)
        return opening(ranks, self._timeout_s, call, self._of, stopped, note=f"{call}()", turn=self.turn)

    def _stopped(self, call: str) -> RoundFailed | None:
        """Return the error that ends waits of this rank, if there is one."""
        members = self._members[call]
        mine = members.index(self.rank)

        def error(kind: type[RoundFailed], rank: int, text: str) -> RoundFailed:
            return kind(text, rank=mine, peer=members.index(rank), phase="agreement", op=call, round=0)

        if self._closing:
            return error(Aborted, self.rank, f"rank {mine} has closed its WeightTransfer during {call}()")
        try:
            self._window.raise_failure()
        except RoundFailed as failure:
            if isinstance(failure, PeerLost) and failure.peer in members:
                lost = members.index(failure.peer)
                return error(PeerLost, failure.peer, f"rank {lost} is gone: its process has ended during {call}()")
        left = self._bytes_of(self.rank)[self._flags :].tolist()
        for number, rank in enumerate(members):
            if left[rank]:
                return error(PeerLost, rank, f"rank {number} is gone: it has closed its WeightTransfer")
        return None

    def _given(self, argument: str, given: Any, rows: int, *, arriving: bool) -> dict[str, list[torch.Tensor]]:
        """Return the tensors that a caller passed.  Raises BadInput."""
        if rows == 0:
            if given is not None:
                raise BadInput(argument, "tensors", "None on a rank without experts there")
            return {}
        leaving = {name: ((kind.shape, kind.dtype),) for name, kind in self._kinds.items()}
        sides = self.arrives if arriving else leaving
        return checked(argument, given, sides, rows, self._window.device, written=arriving)

    def _compare_commits(self, everybody: list[bytes]) -> None:
        for rank, theirs in enumerate(map(_unpacked, everybody)):
            if self._route.slots and theirs not in (-1, self._commits):
                raise Mismatch("commits", self._commits, theirs, rank)

    def _bytes_of(self, rank: int) -> torch.Tensor:
        if rank not in self._memory:
            with torch.inference_mode(False):  # else only that mode could write the tensor
                self._memory[rank] = self._window.peer(rank)
        return self._memory[rank]

    def _record(self, rank: int, expert: int) -> torch.Tensor:
        begin = self._routes[rank].places[expert] * self._records.nbytes
        return self._bytes_of(rank)[begin : begin + self._records.nbytes]

    def _write(self, ranks: Opening, given: Mapping[str, list[torch.Tensor]], number: int) -> None:
        """Cast the experts of this rank to where they are wanted, and tell their readers.

        Raises as ranks.check(), between two batches.
        """
        route, looked = self._route, time.monotonic()
        casts = list(route.casts.items())
        size = self._carrier.batch(len(casts))
        for begin in range(0, len(casts), size):
            some = casts[begin : begin + size]
            leaving = [
                Leaving(self._record(route.homes[expert], expert), [given[name][0][row] for name in self._kinds])
                for expert, row in some
            ]
            self._carrier.write(leaving, number)
            if readers := {rank for expert, _ in some for rank in route.readers.get(expert, ())}:
                words = [self._word(rank, self.rank) for rank in sorted(readers)]
                self._carrier.tell(words, number << _COUNT_BITS | begin + len(some))
            if time.monotonic() - looked >= _LOOK_S:
                ranks.check()
                looked = time.monotonic()

    def _read(self, ranks: Opening, number: int) -> None:
        """Copy the experts that this rank receives, unless they were written here, and compare their hashes.

        Raises CorruptWeights, or as ranks.all_gather().
        """
        reads = self._route.reads
        with self._beside():
            found = self._records.found(len(reads), self._window.device)
            rows = dict(zip(reads, found, strict=True))
            for experts in self._as_written(ranks, number):
                self._carrier.read([self._arriving(expert, rows[expert]) for expert in experts])
        with self._beside(behind=True):
            mine = [expert for expert, rank in reads.items() if rank == self.rank]
            self._carrier.read([self._arriving(expert, rows[expert]) for expert in mine])
            said = found.tolist()
        for (expert, rank), pair in zip(reads.items(), said, strict=True):
            if (name := self._records.differs(pair, number)) is not None:
                raise CorruptWeights(expert=expert, name=name, source=rank, destination=self.rank)

    def _arriving(self, expert: int, found: torch.Tensor) -> Arriving:
        record = self._record(self.rank, expert)
        home = self._routes[self._route.reads[expert]].homes[expert]
        return Arriving(record, record if home == self.rank else self._record(home, expert), found)

    def _as_written(self, ranks: Opening, number: int) -> Iterator[list[int]]:
        """Yield the experts that other ranks cast for this one, some at a time, as they are there.

        Raises as ranks.all_gather().
        """
        reads = self._route.reads
        left = {
            rank: deque(
                (nth, expert) for nth, expert in enumerate(self._routes[rank].casts, 1) if reads.get(expert) == rank
            )
            for rank in sorted(set(reads.values()) - {self.rank})
        }
        begun = looked = time.monotonic()
        nap = _SHORTEST_NAP_S
        while left:
            words, there = self._words(), list[int]()
            for rank, queue in list(left.items()):
                stage, written = divmod(words[rank], 1 << _COUNT_BITS)
                while stage == number and queue and queue[0][0] <= written:
                    there.append(queue.popleft()[1])
                if not queue:
                    del left[rank]
            if there:
                yield there
            now = time.monotonic()
            if now - looked > _LOOK_S:
                ranks.check()
                looked = now
            if there:
                begun, nap = now, _SHORTEST_NAP_S
                continue
            if now - begun > self._timeout_s:
                rank = next(iter(left))
                text = f"rank {self.rank} waited {self._timeout_s:g} s for rank {rank}, which has not cast its weights"
                raise ranks.failed(Timeout, rank, text)
            time.sleep(nap)
            nap = min(_GROWTH * nap, _LONGEST_NAP_S)

    def _word(self, rank: int, of: int) -> torch.Tensor:
        """Return the word in the memory of `rank` that `of` writes."""
        begin = self._progress + _WORD * of
        return self._bytes_of(rank)[begin : begin + _WORD].view(torch.int64)

    def _words(self) -> list[int]:
        """Return what each rank has told this one: the number of a stage(), and how many experts it has cast in it."""
        words = self._bytes_of(self.rank)[self._progress : self._flags].view(torch.int64)
        if self._streams is None:
            return _native.load_words(words.data_ptr(), len(words))
        with torch.cuda.stream(self._streams[0]):
            return [int(word) for word in words.tolist()]

    @contextmanager
    def _beside(self, *, behind: bool = False) -> Iterator[None]:
        """GPUs: enqueue on a stream beside the current one; `behind`: after what that has so far."""
        if self._streams is None:
            yield
            return
        if behind:
            self._streams[1].wait_stream(torch.cuda.current_stream(self._window.device))
        with torch.cuda.stream(self._streams[1]):
            yield

    def _switch(self, slots: Mapping[str, list[torch.Tensor]]) -> None:
        """Write the staged weights to the slots of this rank.  After an interrupt it can start again."""
        if not self._staged:
            return
        tensors = list(chain.from_iterable(slots.values()))
        with torch.inference_mode():  # can write tensors of that mode, and all others
            copies = []
            for expert, places in self._route.slots.items():
                parts = self._records.parts(self._record(self.rank, expert))
                copies += [(to[slot], part) for to, part in zip(tensors, parts, strict=True) for slot in places]
            self._carrier.switch(copies)
        self._synchronize()
        self._commits += 1
        self._staged = 0

    def _synchronize(self) -> None:
        if self._streams is not None:
            self._streams[1].synchronize()
            torch.cuda.current_stream(self._window.device).synchronize()


def _switch(parts: Sequence[tuple[WeightTransfer, object]], slots: Sequence[Mapping[str, list[torch.Tensor]]]) -> None:
    for (part, _), of_part in zip(parts, slots, strict=True):
        part._switch(of_part)


def ranks_over(store: Store, rank: int, ranks: int, *, timeout_s: float = 30.0) -> Group:
    """Return the group of ranks that share a torch store, such as a TCPStore.

    The ranks may be of separate jobs, each with process groups of its own.  A store serves one such group;
    torch.distributed.PrefixStore makes several stores of one.

    Args:
        store: that all of these ranks can reach.
        rank: this rank, 0 to ranks - 1.
        ranks: their number.
        timeout_s: limit of exchanges over the store itself.

    Raises:
        BadInput: no store, or no such rank.
    """
    import torch.distributed as dist

    if not isinstance(store, dist.Store):  # type: ignore[attr-defined]
        raise BadInput("store", type(store).__name__, "a store of torch.distributed")
    check_integer("ranks", ranks, 1, MAX_HOST_RANKS)
    check_integer("rank", rank, 0, ranks - 1)
    make: Callable[[str], StoreBoard] = lambda prefix: StoreBoard(store, f"moecomm/{prefix}")  # noqa: E731
    return Survivors(rank, ranks, False, make, "", seconds(timeout_s))


def _rows(held: Sequence[int]) -> int:
    """Return the least rows of a rank's tensors: up to its last slot with an expert."""
    return max((slot + 1 for slot, expert in enumerate(held) if expert != NONE), default=0)


def _shown(placement: Placement) -> str:
    return f"{placement} with the digest {placement.digest:#x}"


def _packed(number: int) -> bytes:
    return number.to_bytes(_WORD, "little", signed=True)


def _unpacked(data: bytes) -> int:
    return int.from_bytes(data, "little", signed=True)
