"""Windows of the lsa backend: memory of every rank's GPU that all of them load from and store to, and who makes it."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch

from moecomm import config
from moecomm.backends.windows import local, nccl, vmm
from moecomm.errors import Mismatch, Unsupported
from moecomm.gpu.cuda_driver import attribute, unreachable, uuid
from moecomm.ranks.collective import NoRoom, all_or_none, host_identity
from moecomm.ranks.group import Rendezvous

log = logging.getLogger("moecomm")
_KINDS = (None, "nccl", "vmm")


class Window(Protocol):
    """Memory of this rank that its peers have mapped, and theirs that we have mapped; as many bytes on every rank."""

    kind: str
    address: int  # of our own memory
    peers: list[int]  # addresses of every rank's memory as our GPU sees them, our own among them; 0: it does not
    owner: object  # keeps our own memory mapped as long as it lives: tensors in the window refer to it

    @property
    def nbytes(self) -> int:
        """Device memory held; at least what was asked for, unless a part of it is released."""
        ...

    def close(self) -> None:
        """Drop the peers' memory.  Local, idempotent.  Our own goes with the last reference to `owner`.

        No kernel of ours may be running.
        """
        ...


class ReleasableWindow(Window, Protocol):
    """A Window that can give back the memory behind its resident part, on every rank, and keeps its addresses."""

    def release(self) -> None:
        """Give back our memory, and unmap the peers'.  No kernel of any rank may be running."""
        ...

    def restore(self, ranks: Rendezvous) -> tuple[int, int]:
        """Map memory of every rank at the same addresses.  Collective.  Returns the address and the size of our own.

        Raises:
            NoRoom, Unsupported: on every rank alike; the window is released as before.
        """
        ...


class ExtensibleWindow(Window, Protocol):
    """A Window with addresses behind it, where a rank maps further memory by itself: see Extensions."""

    more: int  # bytes of these addresses, as many on every rank

    def extend(self, nbytes: int, kept: ExitStack) -> tuple[int, int, int | None]:
        """Map at least `nbytes` more of our own memory behind extent(), beside kernels that use the window.

        Memory that is there already goes: an interrupt has come before take().  `kept` closes the file descriptor.

        Returns:
            Offset and bytes, and a file descriptor of the memory; None: peers need none.

        Raises:
            NoRoom: out of device memory, or of addresses.
            RuntimeError: the driver refuses.
        """
        ...

    def take(self, end: int) -> None:
        """Let the extent of our own window be `end`, up to which extend() has mapped it."""
        ...

    def extend_peer(self, rank: int, begin: int, nbytes: int, descriptor: int) -> None:
        """Map what extend() of a peer has returned.  Raises RuntimeError if the driver refuses."""
        ...

    def extent(self, rank: int) -> int:
        """Return the bytes of a rank's window that are mapped here, with its extensions."""
        ...


def extensible(window: Window | None) -> ExtensibleWindow | None:
    """Return a window that can be extended, or None."""
    return window if isinstance(window, (vmm.VmmWindow, local.LocalWindow)) and window.more else None


def releasable(window: Window | None) -> ReleasableWindow:
    """Return a window that can be released.

    Raises:
        Unsupported: a library has registered the memory for as long as the window is open.
    """
    if isinstance(window, (vmm.VmmWindow, local.LocalWindow)):
        return window
    assert window is not None
    raise Unsupported(
        f"memory of a window of kind {window.kind!r} is registered with NCCL or NVSHMEM and can't be released; "
        "backend 'lsa' with MOECOMM_WINDOW=vmm, which stands for windows of CUDA VMM, can release its memory"
    )


@dataclass(frozen=True)
class Peer:
    """The place where a rank runs."""

    host: bytes  # equal for ranks that can pass file descriptors to each other
    gpu: bytes  # the GPU's UUID
    window: str | None  # its MOECOMM_WINDOW


def meet(ranks: Rendezvous, device: torch.device, *, near: bool = True) -> list[Peer]:
    """Return the place of every rank, by rank.  Collective.  `near`: all must load from and store to each other.

    Raises:
        Mismatch: MOECOMM_WINDOW is not the same everywhere.
        Unsupported: a GPU can't load from and store to another.
    """
    with all_or_none(ranks):
        kind = config.window_kind()
        mine = host_identity() + uuid(device.index) + bytes([_KINDS.index(kind)])
    peers = [Peer(data[:32], data[32:48], _KINDS[data[48]]) for data in ranks.all_gather(mine)]
    for rank, peer in enumerate(peers):
        if peer.window != kind:
            raise Mismatch("MOECOMM_WINDOW", kind or "unset", peer.window or "unset", rank)
    with all_or_none(ranks):
        if near and (reason := unreachable(device.index, [peer.gpu for peer in peers])):
            raise Unsupported(reason)
    return peers


def open_window(
    ranks: Rendezvous,
    peers: list[Peer],
    nbytes: int,
    device: torch.device,
    timeout_s: float,
    *,
    resident: int,
    more: int = 0,
) -> Window:
    """A window of at least `nbytes` on every rank, of which at least `resident` are never released.  Collective.

    `more`: addresses behind it, where its kind has such and all ranks can have so many: see extensible().

    Ranks of one process share addresses.  Otherwise MOECOMM_WINDOW decides, and without it CUDA VMM makes windows of
    one host, and NCCL those of several where it can.

    Raises:
        NoRoom: out of device memory on some rank.
        Unsupported: no kind of window works, or the one asked for does not.
    """
    if ranks.in_process or ranks.ranks == 1:
        return _with_addresses(more, partial(local.open_window, ranks, nbytes, device, resident=resident))
    wanted, one_host = peers[ranks.rank].window, len({peer.host for peer in peers}) == 1
    if wanted == "nccl" or (wanted is None and not one_host):
        try:
            with all_or_none(ranks):
                if reason := nccl_missing(peers):
                    raise Unsupported(reason)
            return nccl.open_window(ranks, nbytes, device)
        except NoRoom:
            raise
        except Unsupported as error:
            if wanted == "nccl":
                raise
            log.info("rank %d: windows from CUDA VMM, because NCCL can't make them: %s", ranks.rank, error)
    with all_or_none(ranks):
        if not one_host and not attribute("HANDLE_TYPE_FABRIC_SUPPORTED", device.index):
            away = next(rank for rank, peer in enumerate(peers) if peer.host != peers[ranks.rank].host)
            raise Unsupported(
                f"rank {away} runs on another host or in another container, where file descriptors can't be passed, "
                f"and the driver has no FABRIC memory handles for {torch.cuda.get_device_name(device)}"
            )
    sizes, fabric = (ranks, nbytes, device, timeout_s), not one_host
    return _with_addresses(more, partial(vmm.open_window, *sizes, resident=resident, fabric=fabric))


def _with_addresses(more: int, open_one: Callable[..., Window]) -> Window:
    """Open a window with `more` addresses, or without where some rank can't have so many.  Collective."""
    try:
        return open_one(more=more)
    except NoRoom:
        raise
    except Unsupported:
        if more == 0:
            raise
        return open_one(more=0)


def nccl_missing(peers: list[Peer]) -> str:
    """Say why NCCL can't make a communicator of these ranks, or its windows; empty if it can."""
    for rank, peer in enumerate(peers):
        first = next(other for other in range(rank + 1) if peers[other].gpu == peer.gpu)
        if first != rank:
            return f"ranks {first} and {rank} share a GPU, which NCCL refuses"
    return nccl.missing()
