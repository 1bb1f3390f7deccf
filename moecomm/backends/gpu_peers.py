"""Memory of ranks on GPUs: windows by one of the ways to reach peers, and a watch on the processes of the ranks."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from moecomm import _native
from moecomm.backends import windows
from moecomm.backends.presence import Presence
from moecomm.backends.reach import Reach
from moecomm.errors import BadInput, Unsupported
from moecomm.gpu import cuda_driver
from moecomm.ranks.collective import all_or_none
from moecomm.ranks.group import Rendezvous

CONTROL = 128  # bytes of the control memory that GpuPeers uses itself: FailureRecord, then the abort word
_ABORT = 64


class Extent(NamedTuple):
    """Layout (moecomm.backends.reach) of memory without signals, no part of which is released."""

    bytes: int
    signals: int
    staging: int

    @property
    def counters(self) -> int:
        """Offset of the counters, of which there are none; nor are there signals."""
        return self.signals


class GpuPeers:
    """The Peers of ranks on GPUs.  The constructor connects the ranks, and open() makes the memory; both collective.

    Args:
        ranks: of the group.
        device: the GPU of this rank, whose context is current.
        timeout_s: how long a wait for a rank may take.
        reach: how ranks access each other's memory.
        domain_ranks: what was asked for; 0: whatever loads and stores reach.
        control_bytes: pinned memory that the caller uses, behind CONTROL bytes.

    Raises:
        Unsupported, NoRoom, Mismatch: on every rank alike.
        Timeout, PeerLost, Aborted: the opening has failed on all ranks.
    """

    def __init__(
        self,
        ranks: Rendezvous,
        device: torch.device,
        timeout_s: float,
        reach: type[Reach] = Reach,
        *,
        domain_ranks: int = 0,
        control_bytes: int = 0,
    ) -> None:
        self._ranks, self._timeout_s = ranks, timeout_s
        self.rank, self.in_process, self.device = ranks.rank, ranks.in_process, device
        with all_or_none(ranks):
            self.control = cuda_driver.PinnedMemory(CONTROL + control_bytes)
            self.copies = cuda_driver.CopyStream()
        self.record, self.abort_host = self.control.address, self.control.address + _ABORT
        self.places = windows.meet(ranks, device, near=reach.near)
        self.reach = reach(ranks, self.places, device, timeout_s, domain_ranks)

    def open(
        self, layout: _native.WindowLayout | Extent, zero: Sequence[tuple[int, int]], prepare: Callable[[], None]
    ) -> windows.Window:
        """Make the memory, zero ranges of it (offset, bytes), and call `prepare` before any rank goes on."""
        window = self.reach.open_window(layout)
        try:
            with all_or_none(self._ranks):  # no peer writes to a window before it is zero
                for offset, nbytes in zero:
                    self.copies.zero(window.address + offset, nbytes)
                self.copies.wait()
                prepare()
            self.name, self.addresses = f"{self.reach.backend}/{window.kind}", window.peers
            one_host = all(place.host == self.places[0].host for place in self.places)
            watched = not self.in_process and one_host
            self.presence: Presence | None = None
            if watched:
                self.presence = Presence(self._ranks, self.abort_host, self._timeout_s)
        except BaseException:
            window.close()
            raise
        self.pages = None if self.presence is None else self.presence.pages
        self._owner: object = window.owner
        self.nbytes = window.nbytes
        self._mapping: _Mapping | None = _Mapping(window)
        self.reach.watch(self.abort_host)
        return window

    @property
    def ranks_of_gpu(self) -> int:
        """Return the number of ranks that share this GPU."""
        return sum(place.gpu == self.places[self.rank].gpu for place in self.places)

    def owner(self, rank: int) -> object:
        """Return the object that keeps the memory of a rank.  It or this object keeps memory of peers mapped."""
        return self._owner if rank == self.rank else self._mapping

    def abort(self, cause: int, culprit: int) -> None:
        _native.set_abort(self.abort_host, cause, culprit)

    def peek(self, offset: int, address: int, nbytes: int, within_s: float) -> bytes | None:
        """Read some bytes of device memory beside running kernels, by way of the control memory at `offset`.

        None if that takes longer than `within_s`.  Raises RuntimeError if the context is broken.
        """
        with torch.cuda.device(self.device):
            return self.copies.peek(self.control, offset, address, nbytes, within_s)

    def dead_peers(self) -> dict[int, str]:
        """Return why peers are lost, and with this rank's number, why its own rounds can't run."""
        return self.reach.losses() | ({} if self.presence is None else self.presence.dead_peers())

    def ignore(self, rank: int, ignored: bool) -> None:
        """Stop ending waits when this rank is lost; False: end them again."""
        self.reach.ignore(rank, ignored)
        if self.presence is not None:
            self.presence.ignore(rank, ignored)

    def close(self) -> None:
        """Give the memory back.  No kernel of ours may be running."""
        try:
            if self.presence is not None:
                self.presence.leave(self.reach.linger_s)
            self._mapping = self._owner = None
        finally:  # after Ctrl-C as well: the abort word is freed with this object
            self.reach.watch(0)


class _Mapping:
    """The memory of the peers, which is unmapped with the object."""

    def __init__(self, window: windows.Window) -> None:
        weakref.finalize(self, window.close).atexit = False


def gpu_of(device: torch.device | None, backend: str, lacking: str) -> torch.device:
    """Return the GPU that a caller means, the current one for None.

    Raises:
        BadInput: it is no GPU.
        Unsupported: the backend lacks something here.
    """
    if device is not None and device.type != "cuda":
        raise BadInput("device", device, f"a CUDA device, which is where backend={backend!r} runs")
    if lacking:
        raise Unsupported(f"backend {backend!r} can't run here: {lacking}")
    index = torch.cuda.current_device() if device is None or device.index is None else device.index
    return torch.device("cuda", index)


def open_peers(
    ranks: Rendezvous, nbytes: int, device: torch.device | None, timeout_s: float, reach: type[Reach], lacking: str
) -> GpuPeers:
    """Open zeroed memory of `nbytes` on every rank.  Collective: see moecomm.ranks.session.Backend.open_peers."""
    gpu = gpu_of(device, reach.backend, lacking)
    with torch.cuda.device(gpu):
        torch.cuda.synchronize(gpu)  # makes torch create its context, which the driver calls here share
        cuda_driver.bind_thread(gpu.index)
        peers = GpuPeers(ranks, gpu, timeout_s, reach, control_bytes=CONTROL)
        peers.open(Extent(nbytes, nbytes, nbytes), [(0, nbytes)], lambda: None)
    return peers
