"""Window: symmetric memory of a group as torch tensors, with signals and a barrier."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from functools import partial
from typing import Any, NoReturn

import torch
from torch._subclasses.fake_tensor import FakeTensor

from moecomm import _native, backends, config
from moecomm.base import bound
from moecomm.base.arrays import as_tensor, check_memory
from moecomm.base.bound import Bound
from moecomm.base.choices import BackendName
from moecomm.base.validation import check_dense, check_integer, check_shape, seconds
from moecomm.errors import BadInput, Closed, ConcurrentCall, MoecommError, Unsupported
from moecomm.ranks import last_calls
from moecomm.ranks.collective import all_or_none
from moecomm.ranks.group import Group
from moecomm.ranks.opening import opening
from moecomm.ranks.peers import Peers
from moecomm.ranks.rendezvous import rendezvous
from moecomm.ranks.settings import wanted_device
from moecomm.rounds import names
from moecomm.window import failures
from moecomm.window.calls import HostCalls, WindowCalls
from moecomm.window.opened import OpenedWindow
from moecomm.window.settings import WindowSettings

_MOST_VALUE = (1 << 63) - 1
_OPEN = "open"  # note of a call that a failure does not refuse


class Window(Bound):
    """Symmetric memory: as many bytes on every rank of a group, which all ranks load from and store to.

    Opening is collective, and so is barrier().  The memory and the signals are zero at first.  On CPUs a call has
    happened when it returns; on GPUs it is enqueued on the current stream.  A wait that fails ends the waits of all
    ranks, and the Window can then only be closed.  In a forked child its parent's Windows are closed.

    Calls of several threads may run at once; one thread at a time calls barrier().

    Args:
        group: as of a moecomm.Buffer.
        nbytes: memory of each rank; the same on all ranks.
        backend: "auto", "host" (CPU ranks), or for GPUs "lsa" (NVLink), "gin" (NCCL) or "nvshmem".
        device: where the memory is; default: the current GPU if a GPU backend can run, else the CPU.
        timeout_s: how long any wait for a peer may take, in seconds.
        signals: counters of each rank, 1 to 65536.

    Attributes:
        rank: this rank's number in the group.
        num_ranks: ranks of the group.
        nbytes: memory of each rank.

    Raises:
        BadInput: a value that can't be used, here or on the rank that it names.
        Mismatch: ranks passed different values; names the field.
        Unsupported: the backend can't run on some rank, or a rank is in another NVLink domain.
        Timeout, PeerLost, Aborted: a rank did not come, has ended, or was interrupted.  No rank has opened then.
    """

    def __init__(
        self,
        group: Any,
        nbytes: int,
        *,
        backend: BackendName = "auto",
        device: torch.device | str | int | None = None,
        timeout_s: float = 30.0,
        signals: int = 256,
    ) -> None:
        group = rendezvous(group)
        others = partial(_others_over, group)
        with opening(group, timeout_s, of="Window", note="Window()", others=others) as ranks:
            wanted, timeout_s = wanted_device(device), seconds(timeout_s)
            name, self.why = backends.choose(config.asked_backend(backend), wanted)
            settings = WindowSettings(ranks.ranks, nbytes, signals, name)
            settings.agree(ranks)
            settings.check()
            handle = _native.WindowHandle(ranks.rank, ranks.ranks, int(signals), int(nbytes))
            handle.timeout_ns = int(timeout_s * 1e9)
            with ExitStack() as undo:
                peers, self.why = backends.open_peers(name, self.why, ranks, handle.total_bytes, wanted, timeout_s)
                undo.callback(peers.close)
                with all_or_none(ranks):
                    calls = _calls_of(peers, handle)
                ranks.settle()
                undo.pop_all()
        self.rank, self.num_ranks, self.timeout_s = ranks.rank, ranks.ranks, timeout_s
        self.nbytes, self.num_signals = handle.nbytes, handle.num_signals
        self._group = group
        self._opened = OpenedWindow(peers, handle, calls)
        self.turn = self._opened.turn
        self._failure: MoecommError | None = None
        self._closed, self._what = False, "Window"
        self._close: weakref.finalize[..., Any] = bound.closer(self, self._opened)

    @property
    def local(self) -> torch.Tensor:
        """uint8 `[nbytes]`: the memory of this rank.  It stays valid as long as it is referenced."""
        return self.peer(self.rank)

    def peer(self, rank: int) -> torch.Tensor:
        """Return uint8 `[nbytes]`: the memory of a rank, which stays mapped here as long as the tensor is referenced.

        Raises:
            BadInput: no such rank.
            Closed: the Window is closed.
        """
        self._require_open()
        self._check_rank("rank", rank)
        with self._while_open():
            return self._opened.bytes_of(rank)

    def tensor(
        self, shape: Sequence[int], dtype: torch.dtype, *, rank: int | None = None, offset: int = 0
    ) -> torch.Tensor:
        """Return a contiguous view of a rank's memory.

        Args:
            shape: of the view.
            dtype: of its elements.
            rank: whose memory; default: this rank's.
            offset: of the first element, in bytes; a multiple of the size of an element.

        Raises:
            BadInput: no such rank, or a view that does not fit.
            Closed: the Window is closed.
        """
        if not isinstance(dtype, torch.dtype):
            raise BadInput("dtype", repr(dtype), "a dtype of torch")
        sizes = check_shape("shape", shape)
        size = dtype.itemsize
        for length in sizes:
            size *= length
        check_integer("offset", offset, 0)
        if offset % dtype.itemsize:
            raise BadInput("offset", offset, f"a multiple of {dtype.itemsize}, the bytes of an element")
        if offset + size > self.nbytes:
            raise BadInput("shape", f"{size} bytes from byte {offset}", f"a view inside the {self.nbytes} bytes")
        memory = self.peer(self.rank if rank is None else rank)
        return memory[offset : offset + size].view(dtype).view(sizes)

    def put(self, source: Any, rank: int, *, offset: int = 0, signal: int | None = None, amount: int = 1) -> None:
        """Copy a tensor into the memory of a rank; then add to its signal, if one is given.

        Args:
            source: of any shape and dtype, on the device of the Window.
            rank: that receives it; this rank, too.
            offset: of its first element in the memory of that rank, in bytes.
            signal: of that rank.  A rank that has seen it sees the bytes.
            amount: to add to it, 0 to 2^63 - 1.

        Raises:
            BadInput: it does not fit, or is on another device.
            Closed, Timeout, PeerLost, Aborted: the Window is closed, or has failed.
        """
        given, _ = as_tensor("source", source)
        check_dense("source", given)
        if given.device != self.device or isinstance(given, FakeTensor):
            raise BadInput("source", f"a tensor on {given.device}", f"one with memory on {self.device}")
        check_memory("source", given)
        self._check_rank("rank", rank)
        if signal is not None:
            self._check_signal("signal", signal)
            check_integer("amount", amount, 0, _MOST_VALUE)
        with self._call():
            self.tensor(given.shape, given.dtype, rank=rank, offset=offset).copy_(given.detach())
            if signal is not None:
                self._opened.calls.signal(rank, signal, amount)

    def signal(self, rank: int, index: int, amount: int = 1) -> None:
        """Add to a signal of a rank, after all earlier writes of this rank (GPUs: of the current stream).

        Raises:
            BadInput: no such rank or signal.
            Closed, Timeout, PeerLost, Aborted: as put().
        """
        self._check_rank("rank", rank)
        self._check_signal("index", index)
        check_integer("amount", amount, 0, _MOST_VALUE)
        with self._call():
            self._opened.calls.signal(rank, index, amount)

    def set_signal(self, rank: int, index: int, value: int) -> None:
        """Store a signal of a rank, in the order of signal().  No other rank may change it at the same time.

        Raises:
            As signal().
        """
        self._check_rank("rank", rank)
        self._check_signal("index", index)
        check_integer("value", value, 0, _MOST_VALUE)
        with self._call():
            self._opened.calls.set_signal(rank, index, value)

    def signal_value(self, index: int) -> int:
        """Return a signal of this rank.  GPUs: wait for the current stream first.

        Raises:
            BadInput: no such signal, or a CUDA graph is being captured.
            Closed, Timeout, PeerLost, Aborted: as put().
        """
        self._check_signal("index", index)
        with self._call():
            self._require_no_capture("signal_value")
            return self._opened.calls.signal_value(index)

    def wait(self, index: int, value: int, *, peer: int | None = None) -> None:
        """Wait until a signal of this rank is at least `value`.  GPUs: the current stream waits.

        Args:
            index: of the signal.
            value: 0 to 2^63 - 1; 0 has come already.
            peer: the rank that will raise it.  The wait then ends as soon as that rank has closed its Window, and
                errors name it.

        Raises:
            BadInput: no such signal or rank.
            Timeout, PeerLost, Aborted: it did not come.  GPUs: raised by a later call, or by check().
            Closed: the Window is closed.
        """
        self._check_signal("index", index)
        check_integer("value", value, 0, _MOST_VALUE)
        if peer is not None:
            self._check_rank("peer", peer)
        with self._call():
            if not self._opened.calls.wait(index, value, -1 if peer is None else peer):
                self._raise_failure()

    def barrier(self) -> None:
        """Wait until all ranks have come; each then sees what any of them wrote before.  Collective.

        Raises:
            ConcurrentCall: another thread of this rank is in barrier().
            Closed, Timeout, PeerLost, Aborted: as wait().
        """
        with self._barriers():
            if not self._opened.calls.barrier():
                self._raise_failure()
            self.turn.made += 1

    def check(self) -> None:
        """Wait for the device, and raise the error of a wait that has failed, if any.

        Raises:
            BadInput: a CUDA graph is being captured.
            Closed, Timeout, PeerLost, Aborted: the Window is closed, or has failed.
        """
        with self._call():
            self._require_no_capture("check")
            self._opened.calls.synchronize()
            self._raise_failure()

    def raise_failure(self) -> None:
        """Raise the error of a wait that has failed, if any.  GPUs: do not wait for waits that are enqueued.

        Raises:
            Closed, Timeout, PeerLost, Aborted: as put().
        """
        with self._call():
            pass

    def abort(self) -> None:
        """End every wait of all ranks at once, from any thread.  The Window can then only be closed."""
        with suppress(Closed), self._while_open():
            self._opened.calls.abort(_native.Failure.aborted)

    def close(self) -> None:
        """Let go of the memory.  Local and idempotent; tensors that are still referenced stay valid.

        Calls of other threads are aborted and awaited.  In a signal handler, the interrupted call is aborted, and
        closes the Window when it ends.  GPUs: wait for the device first; waits that are enqueued there end as they
        would without it, or at once after abort().
        """
        self._closed = True
        bound.run(self._close)

    def disown(self) -> None:
        """Close a parent's Window in a forked child, without a word to peers."""
        self._closed = True
        if self._close.detach() is not None:
            self._what = "Window, opened before this process was forked,"

    @property
    def handle(self) -> bytes:
        """The struct moecomm::Window, as a kernel takes it by value (csrc/window/window.h)."""
        self._require_open()
        return self._opened.handle.content

    @property
    def handle_address(self) -> int:
        """Address of that struct in memory that kernels of this device, or code of this process, can read."""
        self._require_open()
        return self._opened.calls.handle_address

    @property
    def pointers(self) -> torch.Tensor:
        """int64 `[num_ranks]` on the device: the address of every rank's memory, as this rank reaches it."""
        self._require_open()
        return self._opened.calls.pointers

    @property
    def closed(self) -> bool:
        """True once close() has been called."""
        return self._closed

    @property
    def failed(self) -> bool:
        """True if a failed wait is known to have ended the Window.  Does not look for a new failure."""
        return self._failure is not None

    @property
    def backend(self) -> str:
        """Name of the backend, with the kind of memory where there are several: "host", "lsa/vmm"."""
        return self._opened.peers.name

    @property
    def device(self) -> torch.device:
        """Device of the memory."""
        return self._opened.peers.device

    def __repr__(self) -> str:
        if "_close" not in vars(self):  # the last attribute that the constructor sets
            return "<moecomm.Window, not open yet>"
        state = "closed" if self._closed else "failed" if self.failed else "open"
        return (
            f"<moecomm.Window {state}, backend={self.backend!r}, rank {self.rank} of {self.num_ranks}, "
            f"{self.nbytes} bytes, {self.num_signals} signals, {self.device}>"
        )

    def __enter__(self) -> Window:
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()

    def _call(self, rounds: int = 0) -> _native.Call:
        """Return the context of a call.  Entering it raises the error of a call that is impossible.

        `rounds`: number of rounds in which peers wait for this rank.  A complete call adds them to `turn.made`.  An
        exception that is no error of moecomm ends the waits of all ranks.
        """
        return _native.Call(self, rounds)

    def _barriers(self) -> _native.Call:
        """Return the context of a call with barriers, which is a round.  Entering it raises as barrier()."""
        return _native.Call(self, 1, None, True)

    def _while_open(self) -> _native.Call:
        """Return a context that holds up the end of close(), so that memory stays mapped.

        Raises Closed at its begin if close() has begun.
        """
        return _native.Call(self, 0, _OPEN)

    # What _native.Call asks of its owner.

    def _begin_call(self, rounds: int, nested: bool, note: object) -> None:
        self._require_open()
        if note is not _OPEN:
            self._raise_failure()

    def _refuse(self) -> NoReturn:
        raise ConcurrentCall("Window")

    def _interrupted(self, error: BaseException | None, note: object) -> None:
        if self.num_ranks > 1 and not isinstance(error, MoecommError):
            self.abort()

    def _call_failed(self, error: BaseException, missed: bool, note: object) -> None:
        """Count nothing: a call that ends before its round is known to all ranks."""

    def _count_refused(self) -> None:
        while self.turn.uncounted > 0:
            self.turn.counted()

    def _release(self) -> None:
        self._opened.end()

    def _check_rank(self, argument: str, rank: int) -> None:
        check_integer(argument, rank, 0, self.num_ranks - 1)

    def _check_signal(self, argument: str, index: int) -> None:
        check_integer(argument, index, 0, self.num_signals - 1)

    def _require_no_capture(self, call: str) -> None:
        """Raise BadInput for a call that waits for the device, which would make the capture invalid."""
        if self._opened.calls.capturing():
            raise BadInput(call, "a call during a capture", "a call outside of it")

    def _require_open(self) -> None:
        if self._closed or self._opened.closed:
            raise Closed(self._what)

    def _raise_failure(self) -> None:
        """Raise the error that a failed wait has left behind, if there is one."""
        if self._failure is None:
            peers = self._opened.peers
            if (record := _native.record(peers.record)) is not None:
                self._failure = failures.error_of(record, peers.dead_peers())
            elif word := self._opened.calls.abort_word():
                self._failure = failures.error_of_word(word, self.rank, peers.dead_peers())
        if self._failure is not None:
            raise self._failure


def _others_over(group: Group) -> str:
    return last_calls.others_over(group, names.ranks())


def _calls_of(peers: Peers, handle: _native.WindowHandle) -> WindowCalls:
    """Fill in the addresses of the handle; return the calls on it.

    Raises:
        Unsupported: loads and stores do not reach a rank.
    """
    if 0 in peers.addresses:
        away = peers.addresses.index(0)
        raise Unsupported(f"rank {away} is in another domain; a Window reaches all ranks by loads and stores")
    handle.record, handle.abort_host = peers.record, peers.abort_host
    if peers.device.type == "cpu":
        return HostCalls(peers, handle)
    from moecomm.window.gpu_calls import calls_of  # it brings cuda.core

    return calls_of(peers, handle)
