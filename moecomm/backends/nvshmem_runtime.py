"""NVSHMEM in this process: there is one, with all ranks of whoever has initialised it, and its heap.

Its symmetric heap takes memory as it grows, where the driver has virtual memory management, in steps of
NVSHMEM_CUMEM_GRANULARITY (512 MiB).  Taking and giving back is collective, and so waits for every rank: a Buffer that
closes can't, because peers may be gone.  What it had is given back when the next one opens, or with the process.
"""

from __future__ import annotations

import ctypes
import weakref
from contextlib import suppress
from typing import Any

import torch

from moecomm import config
from moecomm.backends import nic
from moecomm.errors import Unsupported
from moecomm.gpu import linking
from moecomm.gpu.cuda_driver import no_room, wheel_suffix
from moecomm.ranks.collective import all_or_none
from moecomm.ranks.group import Rendezvous

_OLDEST = (3, 4, 5)
_ALIGNMENT = 512
_NOT_INITIALIZED = 0


def missing() -> str:
    """Return "" if NVSHMEM can be initialized in this process; else why not, as a sentence.  Loads it."""
    try:
        import nvshmem.core
    except ImportError as error:
        return f"nvshmem4py can't be imported ({error}); pip install nvshmem4py-{wheel_suffix()}"
    try:
        version = str(nvshmem.core.get_version().libnvshmem_version)
    except Exception as error:  # noqa: BLE001 - whichever the loader of libraries has for one that is not there
        said = str(error).splitlines() or [type(error).__name__]
        return f"libnvshmem_host.so.3 can't be loaded ({said[0]}); pip install nvidia-nvshmem-{wheel_suffix()}"
    if tuple(int(number) for number in version.split(".")) < _OLDEST:
        return f"NVSHMEM {version} is loaded and 3.4.5 is wanted; pip install 'nvidia-nvshmem-{wheel_suffix()}>=3.4.5'"
    return ""


class Block:
    """A piece of the symmetric heap: at `address` here, and at symmetric ones of all ranks.

    Given up with the object, see above.
    """

    def __init__(self, number: int, address: int, nbytes: int) -> None:
        self.address, self.nbytes = address, nbytes
        weakref.finalize(self, _given_up.add, number).atexit = False


_blocks: dict[int, tuple[int, int]] = {}  # taken and not given back: (address, bytes) by number, alike on all ranks
_given_up: set[int] = set()
_taken = 0  # blocks ever
_grown = 0  # bytes that were taken at a time: the heap does not shrink


def start(ranks: Rendezvous, device: torch.device) -> None:
    """Initialise NVSHMEM by a unique id, or use it if it is initialised.  Collective.  missing() must be empty.

    Environment variables tell NVSHMEM, unless the user has set them: no NVLink multicast, no transport to
    other hosts where there is no RDMA NIC, and puts from kernels where there is one.

    Raises:
        Unsupported: it is initialised with other ranks than these, or on some of them alone, or refuses.
    """
    import nvshmem.bindings as bindings
    import nvshmem.core
    from cuda.core import Device

    running = int(bindings.init_status()) != _NOT_INITIALIZED
    everywhere = [data == b"\1" for data in ranks.all_gather(bytes([running]))]
    with all_or_none(ranks):
        if running and (bindings.my_pe(), bindings.n_pes()) != (ranks.rank, ranks.ranks):
            raise Unsupported(
                f"NVSHMEM is initialised in this process with this rank as {bindings.my_pe()} of {bindings.n_pes()}, "
                f"and the Buffer has it as {ranks.rank} of {ranks.ranks}; a process has one NVSHMEM: open the Buffer "
                "over the same ranks in the same order, or initialise NVSHMEM with those of the Buffer"
            )
        if running and not all(everywhere):
            raise Unsupported(f"NVSHMEM is initialised here, and not on rank {everywhere.index(False)}")
    if running:
        return
    size = bindings.uniqueid_dtype.itemsize
    with config.variables(_variables()):  # whichever call it is that reads them, once
        with all_or_none(ranks):
            identity = nvshmem.core.get_unique_id(empty=ranks.rank != 0)
        mine = ctypes.string_at(identity.ptr, size) if ranks.rank == 0 else bytes(size)
        ctypes.memmove(identity.ptr, ranks.all_gather(mine)[0], size)
        with all_or_none(ranks):
            here = Device(device.index)
            here.set_current()
            nvshmem.core.init(device=here, uid=identity, rank=ranks.rank, nranks=ranks.ranks, initializer_method="uid")
            linking.register_modules_again()


def _variables() -> dict[str, str]:
    remote = {"NVSHMEM_IB_ENABLE_IBGDA": "1"} if nic.has_rdma() else {"NVSHMEM_REMOTE_TRANSPORT": "none"}
    return {"NVSHMEM_DISABLE_NVLS": "1", **remote}


def scaleup_ranks() -> int:
    """Return how many ranks, this one among them, load from and store to each other."""
    import nvshmem.bindings as bindings

    return int(bindings.team_n_pes(int(bindings.Team_id.TEAM_SHARED)))


def take(ranks: Rendezvous, nbytes: int, device: torch.device) -> Block:
    """Free the blocks that all ranks have given up, then take a block.  Collective, after start().

    Raises:
        NoRoom: out of device memory on some rank.
        Unsupported: NVSHMEM refuses.
    """
    global _taken, _grown
    import nvshmem.bindings as bindings

    _give_back(ranks, device)
    wanted = nbytes + sum(size for _, size in _blocks.values())
    with all_or_none(ranks):  # asked first: NVSHMEM may not come back from a rank that has no memory
        if torch.cuda.mem_get_info(device)[0] < wanted - _grown:
            raise no_room(nbytes, device)
    with all_or_none(ranks):
        address = int(bindings.align(_ALIGNMENT, nbytes) or 0)
        if address == 0:
            raise Unsupported(
                f"NVSHMEM's heap has no room for {nbytes} bytes; NVSHMEM_SYMMETRIC_SIZE, or with virtual memory "
                "management NVSHMEM_MAX_MEMORY_PER_GPU, makes it larger"
            )
    _taken, _grown = _taken + 1, max(_grown, wanted)
    _blocks[_taken] = address, nbytes
    return Block(_taken, address, nbytes)


def _give_back(ranks: Rendezvous, device: torch.device) -> None:
    import nvshmem.bindings as bindings

    numbers = sorted(_blocks)
    mine = bytes(number in _given_up for number in numbers)
    everybody = ranks.all_gather(mine or b"\0")
    for index, number in enumerate(numbers):
        if all(data[index] for data in everybody):
            with suppress(RuntimeError):  # work that still reads it may have been enqueued; a broken context has none
                torch.cuda.synchronize(device)
            bindings.free(_blocks.pop(number)[0])
            _given_up.discard(number)


def address_of(block: Block, rank: int) -> int:
    """Return the address of a rank's block as this GPU sees it; 0 where loads and stores do not reach it."""
    import nvshmem.bindings as bindings

    found: Any = bindings.ptr(block.address, rank)
    return int(found or 0)
