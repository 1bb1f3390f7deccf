"""GPUs that load from and store to each other's memory (NVLink): one kernel an operation, on the current stream."""

from __future__ import annotations

import contextlib
import importlib.util
import threading
import time
import warnings
from typing import TYPE_CHECKING

import torch

from moecomm import _native, failures
from moecomm.backends import cuda_driver, leave, windows
from moecomm.backends.collective import all_or_none
from moecomm.backends.lsa_kernels import Kernels
from moecomm.backends.presence import Presence
from moecomm.errors import BadInput, Unsupported
from moecomm.rendezvous import Rendezvous

if TYPE_CHECKING:
    from moecomm import jit

_CAPABILITY = (9, 0)  # bulk copies (TMA) and mbarriers
_INSTALL = "pip install moecomm[cu13] (or [cu12] for a driver of CUDA 12)"

# Offsets in the pinned control memory.
_RECORD, _ABORT, _ROUND, _NOTICE, _CONTROL_BYTES = 0, 64, 128, 256, 512

# Blocks of a round: up to 64, where on 4 H200 dispatch and combine of 4096 tokens come nearest to the links' speed and
# those of 128 tokens take the least time (bench/results/nvlink-vmm-4.json); no more than one for two tokens.
_TOKENS, _FEWEST, _MOST = 2, 8, 64

_SPIN_S, _NAP_S = 2e-3, 1e-4  # a wait for the device spins for a while, then looks now and then
_NOTHING = contextlib.nullcontext()


def missing() -> str:
    """Empty if a GPU that fits and what compiles the kernels are here; else the first thing missing, as a sentence."""
    if reason := _missing_gpu():
        return reason
    for module in ("cuda.bindings", "cuda.core", "cuda.pathfinder"):
        if not _installed(module):
            return f"the Python package {module.replace('.', '-')} is not installed; {_INSTALL}"
    return _missing_compiler()


def _missing_gpu() -> str:
    if torch.version.cuda is None:
        return "this torch is built without CUDA; install a CUDA build from https://pytorch.org"
    with warnings.catch_warnings(record=True) as told:  # of a driver that is too old torch says why in a warning
        warnings.simplefilter("always")
        available = torch.cuda.is_available()
    if not available:
        no_gpu = "torch sees no GPU; look at nvidia-smi and CUDA_VISIBLE_DEVICES"
        return _native.cuda_available() or (str(told[0].message).split("\n")[0] if told else no_gpu)
    if reason := _native.cuda_available():
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
            f"update the driver or pip install moecomm[cu{driver_major}]"
        )
    try:
        load_nvidia_dynamic_lib("nvrtc")
    except (DynamicLibNotFoundError, RuntimeError):
        return f"libnvrtc, which compiles the kernels, is not installed; {_INSTALL}"
    return ""


class LsaSession:
    """See moecomm.backends.Session."""

    def __init__(self, ranks: Rendezvous, shape: _native.Shape, device: torch.device, timeout_s: float) -> None:
        self.device = device
        self._closed = False
        self._threads = threading.local()
        self._last: torch.cuda.Stream | None = None
        self._captured = False
        self._kernels = Kernels(device)
        layout = _native.window_layout(shape)
        with all_or_none(ranks):
            self._control = cuda_driver.PinnedMemory(_CONTROL_BYTES)
            self._copies = cuda_driver.CopyStream()
        peers = windows.meet(ranks, device)
        self._window: windows.Window | None = windows.open_window(ranks, peers, layout.bytes, device, timeout_s)
        try:
            with all_or_none(ranks):  # nobody writes to a window before it is zero
                self._copies.zero(self._window.address, layout.staging)
                self._copies.wait()
        except BaseException:
            self._window.close()
            raise
        self.name = f"lsa/{self._window.kind}"
        self.nbytes = self._window.nbytes
        self.context = self._make_context(ranks.rank, shape)
        self.arena = _native.Arena(layout.heap, shape.heap_bytes)
        one_host = all(peer.host == peers[0].host for peer in peers)
        watched = one_host and not ranks.in_process
        self._presence = Presence(ranks, self.context.abort_host, timeout_s) if watched else None
        # Kernels wait for each other, so those of all ranks of a GPU must be resident at once.
        sharing = sum(peer.gpu == peers[ranks.rank].gpu for peer in peers)
        self._most_blocks = max(1, torch.cuda.get_device_properties(device).multi_processor_count // sharing)

    def _make_context(self, rank: int, shape: _native.Shape) -> _native.Context:
        assert self._window is not None
        context = _native.Context()
        context.set_shape(shape)
        context.rank = rank
        context.peers = self._window.peers
        context.record = self._control.address + _RECORD
        context.abort_host = self._control.address + _ABORT
        return context

    @property
    def owner(self) -> object:
        """What must outlive every tensor in the window; None after close()."""
        return None if self._window is None else self._window.owner

    def workers(self, requested: int | None, num_tokens: int) -> int:
        """Blocks of a round: those requested, or by the number of tokens; never more than are resident at once."""
        blocks = requested if requested is not None else min(_MOST, max(_FEWEST, -(-num_tokens // _TOKENS)))
        return max(1, min(blocks, self._most_blocks))

    def synchronize(self) -> None:
        """Waits for every round enqueued so far."""
        if self._captured:  # a graph may have been replayed on any stream
            torch.cuda.synchronize(self.device)
        elif self._last is not None:
            self._await(self._last.record_event())

    def _await(self, event: torch.cuda.Event) -> None:
        """Looks at the event instead of blocking in the driver, so that Ctrl-C is not put off until a deadline."""
        begin = time.perf_counter()
        try:
            while not event.query():  # type: ignore[no-untyped-call]
                if time.perf_counter() - begin > _SPIN_S:
                    time.sleep(_NAP_S)
        except KeyboardInterrupt:
            self.abort(failures.ABORTED, self.context.rank)
            raise

    def abort(self, cause: int, culprit: int) -> None:
        """Makes every wait of this rank end."""
        _native.set_abort(self.context.abort_host, cause, culprit)

    def dead_peers(self) -> list[int]:
        """Ranks whose process has ended."""
        return [] if self._presence is None else self._presence.dead_peers()

    def close(self) -> None:
        """Waits for our rounds, tells the peers that we left, drops their memory.  Ours goes with its last tensor."""
        if self._closed:
            return
        self._closed = True
        with contextlib.suppress(RuntimeError), torch.cuda.device(self.device):  # a broken context ends all waiting
            self.synchronize()
            self._leave()
        if self._presence is not None:
            self._presence.leave()
        if self._window is not None:
            self._window.close()
        self._window = None

    def dispatch(self, args: _native.DispatchArgs) -> None:
        """Enqueues a dispatch on the current stream."""
        self._launch(self._kernels.dispatch(args), args)

    def combine(self, args: _native.CombineArgs) -> None:
        """Enqueues a combine on the current stream."""
        self._launch(self._kernels.combine(args), args)

    def _launch(self, kernel: jit.Kernel, args: _native.DispatchArgs | _native.CombineArgs) -> None:
        stream = torch.cuda.current_stream(self.device)
        with torch.cuda.device(self.device) if torch.cuda.current_device() != self.device.index else _NOTHING:
            if not hasattr(self._threads, "bound"):
                cuda_driver.bind_thread(self.device.index)
                self._threads.bound = True
            self._order(stream)
            handle = stream.cuda_stream
            _native.cuda_launch(kernel.function, args.workers, kernel.block, kernel.shared_bytes, handle, args)

    def _order(self, stream: torch.cuda.Stream) -> None:
        """Makes this round start after the last one even if the caller has changed streams.

        In a capture the order of streams is the caller's.
        """
        if torch.cuda.is_current_stream_capturing():
            self._captured = True
            return
        if self._last is not None and self._last.cuda_stream != stream.cuda_stream:
            stream.wait_event(self._last.record_event())
        self._last = stream

    def _leave(self) -> None:
        """Writes our last notice into the peers' windows; not after a failed round, which is theirs as well."""
        window, layout, rank = self._window, self.context.window, self.context.rank
        if window is None or failures.round_failed(self.context):
            return
        cuda_driver.bind_thread(self.device.index)
        at, copies = self._control.address, self._copies
        copies.to_host(at + _ROUND, window.address + layout.state, 4)
        copies.wait()
        last_round = int.from_bytes(self._control.read(_ROUND, 4), "little")
        self._control.write(_NOTICE, leave.notice(last_round))
        offset = leave.notice_offset(layout, len(window.peers), last_round, rank)
        theirs = [peer + offset for other, peer in enumerate(window.peers) if other != rank]
        for there in theirs:
            copies.to_device(there + 8, at + _NOTICE + 8, leave.NOTICE_BYTES - 8)
        for there in theirs:  # the tag publishes what was copied before it
            copies.to_device(there, at + _NOTICE, 8)
        copies.wait()


def open(  # noqa: A001
    ranks: Rendezvous, shape: _native.Shape, device: torch.device | None, timeout_s: float
) -> LsaSession:
    """Collective: see moecomm.backends.Backend."""
    if device is not None and device.type != "cuda":
        raise BadInput("device", device, "a CUDA device, which is where backend='lsa' runs")
    if reason := missing():
        raise Unsupported(f"backend 'lsa' can't run here: {reason}")
    index = torch.cuda.current_device() if device is None or device.index is None else device.index
    device = torch.device("cuda", index)
    with torch.cuda.device(device):
        torch.cuda.synchronize(device)  # makes torch create its context, which the driver calls here share
        cuda_driver.bind_thread(index)
        return LsaSession(ranks, shape, device, timeout_s)
