"""GPUs that load from and store to each other's memory (NVLink): one kernel an operation, on the current stream.

Several domains (`domain_ranks`) are parts of one: rows between them are put, by a transport that stores.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib.util
import time
import warnings
from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import TYPE_CHECKING

import torch

from moecomm import _native
from moecomm.backends import between_rounds, emulated_nic, gpu_counters, gpu_peers, windows
from moecomm.backends.gpu_counters import GpuCounters
from moecomm.backends.gpu_masks import GpuMasks
from moecomm.backends.gpu_peers import CONTROL, GpuPeers, gpu_of
from moecomm.backends.lsa_kernels import Choice, Kernels, choice_of, cluster, is_multi_domain, scaleout_blocks
from moecomm.backends.presence import leave_exit_error
from moecomm.backends.reach import Reach
from moecomm.backends.windows.extensions import Extensions
from moecomm.base import packets
from moecomm.base.protocol import MAX_BLOCKS, MAX_CHUNK, REPLICATED
from moecomm.gpu import cuda_driver, expert_table, plain_kernel, tuning
from moecomm.ranks.collective import all_or_none
from moecomm.ranks.group import Rendezvous
from moecomm.ranks.pages import EXTENSIONS
from moecomm.ranks.session import Heap, RowTables, Schedule
from moecomm.rounds import failures

if TYPE_CHECKING:
    from moecomm.gpu import jit

_CAPABILITY = (9, 0)  # bulk copies (TMA) and mbarriers

_ROUND, _SIGNAL, _TAGGED_WORDS = CONTROL, CONTROL + 64, CONTROL + 128  # offsets in the pinned control memory

_ADDRESSES = 128 << 30  # behind a window, for extensions

# Bytes of a window for packets and the staging ring, which gets at least half.
_STAGING_BYTES = 62 << 20
_DIRECT_BYTES = 512 << 20  # with several domains: room for rows that are put directly, of 64 ranks

_SCALEOUT_CHUNK = 4  # most tokens of a chunk between domains, where one warp forwards a chunk token by token

_SPIN_S, _NAP_S = 2e-3, 1e-4  # a wait for the device polls for a while, then naps between polls
_PEEK_S = 0.02  # for a copy of a few bytes, which other work may hold up


def missing() -> str:
    """Return "" if a suitable GPU and the packages that compile kernels are here; else the first thing missing."""
    if reason := _missing_gpu():
        return reason
    for module in ("cuda.bindings", "cuda.core", "cuda.pathfinder"):
        if not _installed(module):
            return f"the Python package {module.replace('.', '-')} is not installed; {_install()}"
    return _missing_compiler()


def _install() -> str:
    return f"pip install 'moecomm[{cuda_driver.wheel_suffix()}]'"


def _missing_gpu() -> str:
    if torch.version.cuda is None:
        return "this torch is built without CUDA; install a CUDA build from https://pytorch.org"
    with warnings.catch_warnings(record=True) as told:  # torch's warning says that a driver is too old
        warnings.simplefilter("always")
        available = torch.cuda.is_available()
    if not available:
        no_gpu = "torch sees no GPU; look at nvidia-smi and CUDA_VISIBLE_DEVICES"
        return _native.cuda_missing() or (str(told[0].message).split("\n")[0] if told else no_gpu)
    if reason := _native.cuda_missing():
        return reason
    if torch.cuda.get_device_capability() < _CAPABILITY:
        have = ".".join(map(str, torch.cuda.get_device_capability()))
        return f"{torch.cuda.get_device_name()} has compute capability {have}; the kernels need 9.0 (Hopper) or newer"
    return ""


def _installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # there is no package `cuda` at all
        return False


def _missing_compiler() -> str:
    import cuda.bindings
    from cuda.pathfinder import DynamicLibNotFoundError, load_nvidia_dynamic_lib

    driver_major = int(cuda_driver.call("cuDriverGetVersion")) // 1000
    if driver_major < int(cuda.bindings.__version__.split(".")[0]):
        return (
            f"the driver is of CUDA {driver_major}, too old for cuda-bindings {cuda.bindings.__version__}; "
            f"update the driver or pip install 'moecomm[cu{driver_major}]'"
        )
    try:
        load_nvidia_dynamic_lib("nvrtc")
    except (DynamicLibNotFoundError, RuntimeError):
        return f"libnvrtc, which compiles the kernels, is not installed; {_install()}"
    return ""


def ring_tokens(ranks: int, max_tokens: int, staged_row_bytes: int) -> int:
    """Return the rows that fit _STAGING_BYTES next to packets, or half of it, in whole chunks: at most all tokens."""
    left = _STAGING_BYTES - 2 * ranks * packet_bytes(ranks, max_tokens, staged_row_bytes)
    fit = max(_STAGING_BYTES // 2, left) // (ranks * staged_row_bytes) // MAX_CHUNK
    return max(1, min(fit, -(-max_tokens // MAX_CHUNK))) * MAX_CHUNK


def packet_bytes(ranks: int, max_tokens: int, staged_row_bytes: int) -> int:
    """Return the bytes of the packets that one rank sends another in one round."""
    return packets.room(ranks, max_tokens, staged_row_bytes)


def direct_bytes(ranks: int, max_tokens: int, staged_row_bytes: int) -> int:
    """Return the room for 128 tokens of 7168 columns, or as many bytes, for any number of ranks."""
    return packets.room(ranks, max_tokens, staged_row_bytes, of_all=_DIRECT_BYTES)


class LsaSession:
    """A Session of GPUs; see moecomm.ranks.session.Session."""

    casts_formats = True
    synchronous = peers_read_weights = False
    _extensions: Extensions | None = None

    def __init__(
        self,
        ranks: Rendezvous,
        shape: _native.Shape,
        device: torch.device,
        timeout_s: float,
        reach: type[Reach] = Reach,
    ) -> None:
        self.device = device
        self._captured = False
        self._cuda_context = _native.cuda_context()
        self._last: torch.cuda.Stream | None = None  # of the last round
        self._queue = _native.LaunchQueue(device.index, self._cuda_context)  # has its cudaStream_t
        layout = _native.window_layout(shape)
        counters = _TAGGED_WORDS + layout.num_tagged_words * 8
        room = counters + gpu_counters.nbytes(layout) - CONTROL
        mapped = {"domain_ranks": shape.domain_ranks, "control_bytes": room}
        self._peers = peers = GpuPeers(ranks, device, timeout_s, reach, **mapped)
        self.reach, self._control, self._copies = peers.reach, peers.control, peers.copies
        shape.domain_ranks = self.reach.domain_ranks or shape.domain_ranks
        layout = _native.window_layout(shape)
        self._nic = emulated_nic.asked() if is_multi_domain(shape) and self.reach.backend == "lsa" else None
        self._kernels = Kernels(device, "nic" if self._nic else self.reach.transport)
        self.compile_for = self._kernels.compile_for
        self.reduced_rows_in_heap = not is_multi_domain(shape)
        self.reach.more = _ADDRESSES
        zero = [(0, layout.staging)]
        if is_multi_domain(shape):  # no word there looks like a token of this Buffer
            zero.append((layout.receive_buffer, layout.returned - layout.receive_buffer))
        self._window: windows.Window | None = peers.open(layout, zero, self._prepare)
        self.pages = peers.pages
        try:
            self.name = peers.name + (f", {self._nic}" if self._nic else "")
            self.nbytes = self._window.nbytes
            extensible = windows.extensible(self._window)
            self.extensible = 0 if extensible is None else extensible.more
            shape.heap_bytes += self.extensible
            if extensible is not None:
                words = None if self.pages is None else [page + EXTENSIONS for page in self.pages.addresses]
                self._extensions = Extensions(extensible, ranks, words, timeout_s, self._await_launched)
            self.context = self._make_context(ranks.rank, shape, self._window.peers)
            self._counters = GpuCounters(peers, self._window.address, self.context.window, counters)
            self._masks = GpuMasks(peers, self.context, self._window)
        except BaseException:
            if self._extensions is not None:
                self._extensions.close()
            peers.close()
            raise
        # Kernels wait for each other, so those of all ranks of a GPU must be resident at once.
        self._sms = sms = torch.cuda.get_device_properties(device).multi_processor_count
        self._most_blocks = max(1, min(sms // peers.ranks_of_gpu, MAX_BLOCKS, self.reach.most_blocks))
        # A round may be launched while the one before it ends, and in clusters, unless its blocks would then take the
        # places of another rank's: of 132 multiprocessors two times 64 may find room, and two times 16 clusters not.
        self.exclusive_gpu = peers.ranks_of_gpu == 1
        self._gpu, self._ranks = torch.cuda.get_device_name(device), shape.ranks

    def _prepare(self) -> None:
        """Load the kernels that a mask needs at once, and those that put between rounds."""
        between = (between_rounds.leave_kernel, between_rounds.quiesce_kernel) if self.reach.puts else ()
        for kernel in (expert_table.KERNEL, *(of(self.reach.shim) for of in between)):
            plain_kernel.load(kernel, self.device.index)

    def _make_context(self, rank: int, shape: _native.Shape, peers: list[int]) -> _native.Context:
        context = _native.Context()
        context.set_shape(shape)
        context.rank = rank
        near = shape.domain_ranks or shape.ranks
        context.peers = [peer if other // near == rank // near else 0 for other, peer in enumerate(peers)]
        context.link = self.reach.link
        if is_multi_domain(shape) and not self.reach.puts:
            self._everybody = emulated_nic.link(self._nic, peers, self.device)
            context.link = self._everybody.data_ptr()
        context.record, context.abort_host = self._peers.record, self._peers.abort_host
        return context

    @property
    def most_blocks(self) -> int:
        return self._most_blocks

    @property
    def owner(self) -> object:
        """The object that must outlive every tensor in the window; None after close()."""
        return None if self._window is None else self._window.owner

    def schedule(self, op: str, *, num_tokens: int, layout: str, num_sms: int | None, casts: bool = False) -> Schedule:
        """Choose blocks by the table of this GPU, never more than are resident at once."""
        choice = tuning.choose(self._gpu, self._ranks, op, layout, num_tokens, casts=casts)
        blocks, chunk = num_sms or choice.blocks, choice.chunk_tokens
        if is_multi_domain(self.context.shape):
            blocks = num_sms or scaleout_blocks(op, blocks, num_tokens, self.context.shape.ring_tokens)
            chunk = min(chunk, _SCALEOUT_CHUNK, _native.most_chunk_tokens(self.context.shape))
            chunk = max([chunk, *(size for tokens, size in self.reach.least_chunks if num_tokens >= tokens)])
        return Schedule(max(1, min(blocks, self._most_blocks)), chunk)

    def synchronize(self) -> None:
        """Wait for every round enqueued so far."""
        if self._captured:  # a graph may have been replayed on any stream
            torch.cuda.synchronize(self.device)
        else:
            self._await_last()

    def _await_launched(self) -> None:
        """Wait for the rounds of this rank.  Those of threads that share the GPU may wait for its next one."""
        if self._peers.in_process and self._peers.ranks_of_gpu > 1:
            self._await_last()
        else:
            self.synchronize()

    def _await_last(self) -> None:
        """Wait for the stream of the last round.

        Polls an event instead of blocking in the driver, so that signal handlers run.  An exception of a handler, as
        Ctrl-C raises, ends the rounds as well.
        """
        if self._last is None:
            return
        begin, event = time.perf_counter(), self._last.record_event()
        try:
            while not event.query():
                if time.perf_counter() - begin > _SPIN_S:
                    time.sleep(_NAP_S)
        except BaseException:
            self.abort(failures.Failure.aborted, self.context.rank)
            raise

    def abort(self, cause: int, culprit: int) -> None:
        """End every wait of this rank."""
        self._peers.abort(cause, culprit)

    def abort_all(self) -> None:
        """End the waits of all ranks; not for a call in a capture, which makes no round."""
        if self._window is not None and not self.capturing():
            self.abort(failures.Failure.aborted, self.context.rank)
            self._masks.abort_others()

    def dead_peers(self) -> dict[int, str]:
        """Return the ranks whose process has ended, or that can't be reached any more."""
        return self._peers.dead_peers()

    def last_round(self) -> int:
        return self._masks.last_round()

    def begun(self) -> list[str]:
        return self._masks.begun()

    def excluded(self) -> bool:
        return self._masks.excluded()

    def exclude(self, rank: int) -> None:
        self._masks.exclude(rank)

    def interrupt(self, rank: int) -> None:
        self._masks.interrupt(rank)

    def forget_interrupts(self) -> None:
        self._masks.forget_interrupts()

    def resume(self, last_round: int, masked: Collection[int], agreement: int) -> set[int]:
        return self._masks.resume(last_round, masked, agreement)

    def counters(self) -> torch.Tensor:
        return self._counters.tensor()

    def place(self, words: Sequence[int]) -> None:
        assert self._window is not None, "the session is open"
        self.order()
        self.with_device(between_rounds.set_placement, words, self._window.address + self.context.window.placement)

    def read_counters(self) -> bytes | None:
        """Read the counters; None while this thread captures a graph, into which the copy would go."""
        return None if self._window is None or self.capturing() else self._counters.read()

    def relax_captures(self) -> None:
        cuda_driver.relax_captures()

    def row_tables(self, ranks: Rendezvous, timeout_s: float) -> RowTables | None:
        """Return None: a combine sends hashes back by the handle."""
        return None

    @property
    def offers(self) -> ctypes.c_uint64 | None:
        return None if self._extensions is None else self._extensions.offers

    @property
    def extending(self) -> bool:
        return self._extensions is not None and self._extensions.pending

    def extend(self, nbytes: int, heap: Heap) -> tuple[int, int] | None:
        if self._extensions is None or self._window is None:
            return None
        with torch.cuda.device(self.device), cuda_driver.relaxed_captures():
            found = self._extensions.extend(nbytes, heap)
        self.nbytes = self._window.nbytes
        return found

    @property
    def agrees(self) -> bool:
        return self._extensions is not None and self._ranks > 1

    def grow(
        self, nbytes: int, heap: Heap, ranks: Collection[int], meet: Callable[[], None]
    ) -> tuple[int, tuple[int, int] | None] | None:
        assert self._extensions is not None and self._window is not None, "ranks agree"
        with torch.cuda.device(self.device), cuda_driver.relaxed_captures():
            found = self._extensions.grow(nbytes, heap, ranks, meet)
        self.nbytes = self._window.nbytes
        return found

    def admit(self) -> int:
        assert self._extensions is not None, "there is an offer"
        with torch.cuda.device(self.device), cuda_driver.relaxed_captures():
            return self._extensions.admit()

    def require_releasable(self) -> None:
        windows.releasable(self._window)

    def release(self, ranks: Rendezvous) -> None:
        """Unmap the parts of all windows from `staging` on; see Session."""
        window = windows.releasable(self._window)
        with all_or_none(ranks), torch.cuda.device(self.device):
            torch.cuda.synchronize(self.device)  # a graph may have been replayed on any stream
            window.release()
            if self._extensions is not None:
                self._extensions.release()
        self.nbytes = window.nbytes

    def restore(self, ranks: Rendezvous) -> None:
        """Map memory at the same addresses, and zero it: no word there may look like one of a round; see Session."""
        window = windows.releasable(self._window)
        with torch.cuda.device(self.device):
            cuda_driver.bind_thread(self.device.index)
            own = window.restore(ranks)
            with all_or_none(ranks):
                self._copies.zero(*own)
                self._copies.wait()
                if self._extensions is not None:
                    self._extensions.publish()
        self.nbytes = window.nbytes

    def close(self) -> None:
        """Wait for this rank's rounds, announce to peers that it leaves, and unmap their windows.

        This rank's window goes with its last tensor.
        """
        if not self._counters.close():
            return
        if (presence := self._peers.presence) is not None:
            leave_exit_error(presence.pages)
        try:
            with contextlib.suppress(RuntimeError), torch.cuda.device(self.device):  # a broken context ends all waiting
                self.synchronize()
                self._leave()
        except BaseException:  # Ctrl-C: kernels may still use the windows
            self.reach.watch(0)
            raise
        self._window = None
        extensions, self._extensions = self._extensions, None
        if extensions is not None:
            extensions.close()
        self._masks.close()
        self._peers.close()

    def dispatcher(self, args: _native.DispatchArgs) -> Callable[[_native.DispatchArgs], None]:
        """Return the function that enqueues a dispatch on the current stream: with copies, without its choice."""
        choice = choice_of(args)
        if choice is not None and args.ctx.placed == REPLICATED:
            self._ahead(choice)
            choice = None
        return self._runner(self._kernels.dispatch(args), args.workers, choice)

    def choose(self, args: _native.DispatchArgs) -> None:
        choice = choice_of(args)
        assert choice is not None

        def enqueue() -> None:
            stream = _native.current_stream(self.device.index)
            self._order(stream)
            _native.cuda_launch_choice(*self._ahead(choice), stream, args, self.exclusive_gpu)

        self.with_device(enqueue)

    def combiner(self, args: _native.CombineArgs) -> Callable[[_native.CombineArgs], None]:
        """Return the function that enqueues a combine on the current stream."""
        return self._runner(self._kernels.combine(args), args.workers)

    def _runner(self, kernel: jit.Kernel, blocks: int, choice: Choice | None = None) -> _native.GpuRunner:
        launch = (kernel.function, blocks, kernel.block, kernel.shared_bytes, *self._together(blocks))
        ahead = (0, 0, 0) if choice is None else self._ahead(choice)
        return _native.GpuRunner(self._queue, partial(self.with_device, self._enqueue, kernel, ahead), *launch, ahead)

    def _ahead(self, choice: Choice) -> tuple[int, int, int]:
        """Return the function, threads and shared memory of the kernel that chooses slots, loaded."""
        return plain_kernel.load(choice, self.device.index), choice.threads, choice.shared_bytes

    def _together(self, blocks: int) -> tuple[bool, int]:
        """Return whether a launch may begin while the one before it ends, and the blocks of its clusters."""
        return self.exclusive_gpu, cluster(blocks, self._sms) if self.exclusive_gpu else 1

    def round_begun(self) -> int | None:
        """Return the round that has begun last; None in a capture, which must not see the copy."""
        if self._window is None or self.capturing():
            return None
        word = self._peers.peek(_ROUND, self._window.address + self.context.window.state, 4, _PEEK_S)
        return None if word is None else int.from_bytes(word, "little")

    def capturing(self) -> bool:
        if _native.cuda_context() == 0:
            cuda_driver.bind_thread(self.device.index)
        return _native.cuda_capturing(_native.current_stream(self.device.index))

    def count_rejected(self) -> None:
        if self._window is not None:
            self.order()
            cuda_driver.int32_at(self._window.address + self.context.window.rejected, self.device).add_(1)

    def order(self) -> None:
        self.with_device(lambda: self._order(_native.current_stream(self.device.index)))

    def with_device(self, enqueue: Callable[..., None], *args: object) -> None:
        if _native.cuda_context() == self._cuda_context:
            enqueue(*args)
            return
        with torch.cuda.device(self.device):  # another GPU is current, or none is yet in this thread
            cuda_driver.bind_thread(self.device.index)
            enqueue(*args)

    def _enqueue(
        self, kernel: jit.Kernel, ahead: tuple[int, int, int], args: _native.DispatchArgs | _native.CombineArgs
    ) -> None:
        stream = _native.current_stream(self.device.index)
        self._order(stream)
        together = self._together(args.workers)
        if isinstance(args, _native.DispatchArgs) and ahead[0] != 0:
            _native.cuda_launch_choice(*ahead, stream, args, self.exclusive_gpu)
        _native.cuda_launch(kernel.function, kernel.block, kernel.shared_bytes, stream, args, *together)

    def _order(self, stream: int) -> None:
        """Make this round start after the last one, even if the caller has changed streams.

        In a capture the order of streams is the caller's.
        """
        if _native.cuda_capturing(stream):
            self._captured = True
        elif self._last is None or stream != self._queue.last_stream:
            current = torch.cuda.current_stream(self.device)
            if self._last is not None:
                current.wait_event(self._last.record_event())
            self._last, self._queue.last_stream, self._queue.used = current, stream, True

    def _leave(self) -> None:
        """Write the last round header into the peers' windows; not after a failed round, which failed there as well."""
        window, layout, rank = self._window, self.context.window, self.context.rank
        if window is None or failures.round_failed(self.context):
            return
        cuda_driver.bind_thread(self.device.index)
        if self.excluded():  # the others answer for this rank
            return
        at, copies = self._control.address, self._copies
        copies.to_host(at + _ROUND, window.address + layout.state, 4)
        copies.wait()
        last_round = int.from_bytes(self._control.read(_ROUND, 4), "little")
        tagged_words = between_rounds.tagged_words(last_round, layout.num_tagged_words)
        self._control.write(_TAGGED_WORDS, tagged_words)
        self._control.write(_SIGNAL, _native.leave_signal(last_round))
        offset = _native.leave_offset(layout, len(window.peers), last_round, rank)
        for other, peer in enumerate(window.peers):
            if other == rank or peer == 0:
                continue
            copies.to_device(peer + offset, at + _TAGGED_WORDS, len(tagged_words))
            if self.context.peers[other] == 0:
                copies.to_device(peer + between_rounds.signal_offset(layout, rank), at + _SIGNAL, between_rounds.WORD)
        if self.reach.puts:
            copies.to_device(window.address + offset, at + _TAGGED_WORDS, len(tagged_words))
        copies.wait()
        if self.reach.puts:
            between_rounds.put_leave(self.reach.shim, self.context, self._masks.masked, offset, len(tagged_words))
        if self._peers.presence is None:
            self._linger(last_round)

    def _linger(self, last_round: int) -> None:
        """Wait for the last headers of all peers, for a limited time, if processes can't see each other."""
        window, at = self._window, self._control.address + _TAGGED_WORDS
        assert window is not None
        deadline = time.monotonic() + self.reach.linger_s
        waiting = [rank for rank in range(len(window.peers)) if rank not in {self.context.rank, *self._masks.masked}]
        while waiting and time.monotonic() < deadline:
            offset = _native.leave_offset(self.context.window, len(window.peers), last_round, waiting[-1])
            self._copies.to_host(at, window.address + offset, between_rounds.WORD)
            self._copies.wait()
            if between_rounds.is_last(self._control.read(_TAGGED_WORDS, between_rounds.WORD), last_round):
                waiting.pop()
            else:
                time.sleep(_NAP_S)


def open(  # noqa: A001
    ranks: Rendezvous, shape: _native.Shape, device: torch.device | None, timeout_s: float
) -> LsaSession:
    """Open a session.  Collective: see moecomm.ranks.session.Backend."""
    return open_session(ranks, shape, device, timeout_s, Reach, missing())


def open_peers(ranks: Rendezvous, nbytes: int, device: torch.device | None, timeout_s: float) -> GpuPeers:
    """Open memory of all ranks, without a session.  Collective: see moecomm.ranks.session.Backend."""
    return gpu_peers.open_peers(ranks, nbytes, device, timeout_s, Reach, missing())


def open_session(
    ranks: Rendezvous,
    shape: _native.Shape,
    device: torch.device | None,
    timeout_s: float,
    reach: type[Reach],
    lacking: str,
) -> LsaSession:
    """Open a session of a GPU backend whose ranks reach each other by `reach`.  Collective."""
    device = gpu_of(device, reach.backend, lacking)
    with torch.cuda.device(device):
        torch.cuda.synchronize(device)  # makes torch create its context, which the driver calls here share
        cuda_driver.bind_thread(device.index)
        return LsaSession(ranks, shape, device, timeout_s, reach)
