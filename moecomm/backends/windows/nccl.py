"""Windows from NCCL 2.30 or newer: ncclMemAlloc, and a symmetric window whose peer pointers NCCL tells the host.

The communicator is ours alone: nothing is ever launched on it.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

import torch

from moecomm import config
from moecomm.errors import Unsupported
from moecomm.gpu.cuda_driver import no_room, wheel_suffix
from moecomm.ranks.collective import all_or_none
from moecomm.ranks.group import Rendezvous

_INSTALL = "pip install 'nccl4py==0.6.*'"  # as the extras pin it
_MINIMUM = (2, 30)  # ncclGetPeerDevicePointer
_NVLS_FIELD = (2, 32)  # ncclConfig_t::nvlsHostMode


def missing() -> str:
    """Return "" if NCCL can make windows in this process; else why not, as a sentence.  Loads NCCL."""
    try:
        import nccl.core
    except ImportError as error:
        return f"nccl4py can't be imported ({error}); {_INSTALL}"
    if not hasattr(nccl.core, "LibraryInfo"):
        return f"nccl4py {nccl.core.__version__} is installed and windows need 0.6; {_INSTALL}"
    library = nccl.core.get_version().libnccl
    if library is None:
        return f"nccl4py finds no libnccl.so.2; pip install 'nvidia-nccl-{wheel_suffix()}>=2.30.7'"
    if library.version.release[:2] < _MINIMUM:
        have = f"NCCL {library.version} is loaded ({library.path})"
        return f"{have} and windows need 2.30; pip install 'nvidia-nccl-{wheel_suffix()}>=2.30.7'"
    return ""


class Memory:
    """Memory of ncclMemAlloc; freed with the object."""

    def __init__(self, nbytes: int, device: torch.device) -> None:
        import nccl.core

        self.nbytes = nbytes
        try:
            self.buffer = nccl.core.mem_alloc(nbytes, device.index)
        except Exception as error:
            # NCCL says "unhandled CUDA error" for all of them.
            if torch.cuda.mem_get_info(device)[0] < nbytes:
                raise no_room(nbytes, device) from error
            raise
        self.address = int(self.buffer.handle)
        self.free = weakref.finalize(self, _free, self.buffer, device.index)
        self.free.atexit = False


def _free(buffer: Any, device: int) -> None:
    import nccl.core

    with suppress(RuntimeError):  # work that still reads the memory may have been enqueued; a broken context has none
        torch.cuda.synchronize(device)
    with suppress(Exception):  # there is nothing left to do about a failure
        nccl.core.mem_free(buffer)


class NcclWindow:
    """A Window of NCCL."""

    kind = "nccl"

    def __init__(self, memory: Memory, communicator: Any, peers: list[int]) -> None:
        self.owner: object = memory
        self.address, self.nbytes, self.peers = memory.address, memory.nbytes, peers
        self.communicator = communicator

    def close(self) -> None:
        """Drop the peers' memory."""
        communicator, self.communicator = self.communicator, None
        if communicator is not None:
            end(communicator)


def end(communicator: Any) -> None:
    """End a communicator, and deregister its windows.

    ncclCommDestroy may wait for the other ranks of the host; ncclCommAbort does not, and cuts nothing short here.
    """
    with suppress(Exception):
        communicator.abort()


def connect(ranks: Rendezvous) -> Any:
    """Make a communicator of these ranks.  Collective.  missing() must be empty on every rank.

    Raises:
        Unsupported: NCCL of some rank refuses; nothing is left behind.
    """
    import nccl.core

    with all_or_none(ranks):
        mine = bytes(nccl.core.get_unique_id()) if ranks.rank == 0 else bytes(128)
    unique_id = nccl.core.UniqueId.from_bytes(ranks.all_gather(mine)[0])
    with ExitStack() as undo:
        with all_or_none(ranks), _no_multicast(nccl.core.get_version().libnccl.version.release) as settings:
            communicator = nccl.core.Communicator.init(ranks.ranks, ranks.rank, unique_id, settings)
            undo.callback(end, communicator)
        undo.pop_all()
    return communicator


def register(ranks: Rendezvous, communicator: Any, nbytes: int, device: torch.device) -> tuple[Memory, Any]:
    """Allocate memory and register it as a symmetric window; return it and nccl4py's handle.  Collective.

    Raises:
        NoRoom: out of device memory on some rank.
        Unsupported: NCCL of some rank refuses; no memory is left behind, and the communicator has ended.
    """
    import nccl.core

    with ExitStack() as undo:
        with all_or_none(ranks):
            memory = Memory(-(-nbytes // (2 << 20)) * (2 << 20), device)
            undo.callback(memory.free)
        undo.callback(end, communicator)  # first: it still has the memory
        with all_or_none(ranks):
            window = communicator.register_window(memory.buffer, nccl.core.WindowFlag.COLL_SYMMETRIC)
            if not window.handle:
                raise Unsupported("NCCL has no symmetric windows here: it wants peer access between all GPUs")
        undo.pop_all()
    return memory, window


def open_window(ranks: Rendezvous, nbytes: int, device: torch.device) -> NcclWindow:
    """Open a window of NCCL.  Collective.  missing() must be empty on every rank.

    Raises:
        NoRoom: out of device memory on some rank.
        Unsupported: NCCL of some rank refuses, or a rank is in another NVLink domain; nothing is left behind.
    """
    with ExitStack() as undo:
        communicator = connect(ranks)
        undo.callback(end, communicator)
        memory, window = register(ranks, communicator, nbytes, device)
        undo.callback(memory.free)
        undo.callback(end, communicator)
        with all_or_none(ranks):
            peers = [peer_address(window, rank, ranks.rank, memory.address) for rank in range(ranks.ranks)]
            if (away := next((rank for rank, address in enumerate(peers) if not address), None)) is not None:
                raise Unsupported(f"the GPU of rank {away} is in another NVLink domain")
        undo.pop_all()
    return NcclWindow(memory, communicator, peers)


def peer_address(window: Any, rank: int, own_rank: int, own_address: int) -> int:
    """Return the address of a rank's memory as this GPU sees it; 0 where it does not."""
    # Our own memory always under one address: a GPU does not order accesses to the same bytes through two mappings.
    return own_address if rank == own_rank else int(window.get_peer_device_pointer(rank) or 0)


@contextmanager
def _no_multicast(version: tuple[int, ...]) -> Iterator[Any]:
    """The config of a communicator that leaves NVLink multicast (NVLS) alone: we never use it.

    NCCL before 2.32 can be told only by an environment variable, which it reads once a process, when the first
    communicator is made; if that is ours, NVLS stays off for later ones, too.  The variable itself is put back.
    """
    import nccl.core

    if version[:2] >= _NVLS_FIELD and "nvls_host_mode" in nccl.core.NCCLConfig.__dataclass_fields__:
        yield nccl.core.NCCLConfig(nvls_host_mode=nccl.core.NcclNvlsHostMode.DISABLE)
        return
    with config.variables({"NCCL_NVLS_ENABLE": "0"}, insist=True):
        yield None
