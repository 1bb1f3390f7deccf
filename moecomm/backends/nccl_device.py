"""NCCL's device communicators, in the layout of the headers that the gin shim was compiled from.

nccl4py asks for them in the layout of its own headers: an older library refuses those, and a shim can't read them.
So these three functions are called here, with structs of NCCL 2.30.7, which later libraries take as well: they read as
many bytes of a struct as it says it has, and write a device communicator as `version` wants it.
"""

from __future__ import annotations

import ctypes
from functools import lru_cache
from typing import Any, NamedTuple

_MAGIC = 0xCAFEBEEF  # NCCL_API_MAGIC
_FULL = 1  # NCCL_GIN_CONNECTION_FULL
_MOST_BYTES = 4096  # of a ncclDevComm: it has 240 in 2.30.7 and 248 in 2.32.3
_UNDEFINED = -(1 << 31)  # NCCL_CONFIG_UNDEF_INT


class _Properties(ctypes.Structure):
    """ncclCommProperties of NCCL 2.30.7."""

    _fields_ = (
        ("size", ctypes.c_size_t),
        ("magic", ctypes.c_uint),
        ("version", ctypes.c_uint),
        *((name, ctypes.c_int) for name in ("rank", "ranks", "cuda_device", "nvml_device")),
        ("device_api", ctypes.c_bool),
        ("multimem", ctypes.c_bool),
        ("gin_type", ctypes.c_int),
        ("lsa_teams", ctypes.c_int),
        ("host_rma", ctypes.c_bool),
        ("railed_gin_type", ctypes.c_int),
    )


class _Requirements(ctypes.Structure):
    """ncclDevCommRequirements of NCCL 2.30.7."""

    _fields_ = (
        ("size", ctypes.c_size_t),
        ("magic", ctypes.c_uint),
        ("version", ctypes.c_uint),
        ("resources", ctypes.c_void_p),
        ("teams", ctypes.c_void_p),
        ("lsa_multimem", ctypes.c_bool),
        *((name, ctypes.c_int) for name in ("barriers", "lsa_barriers", "rail_gin_barriers")),
        *((name, ctypes.c_int) for name in ("lsa_ll_a2a_blocks", "lsa_ll_a2a_slots")),
        ("gin_force", ctypes.c_bool),
        *((name, ctypes.c_int) for name in ("gin_contexts", "gin_signals", "gin_counters", "gin_connection")),
        ("gin_exclusive_contexts", ctypes.c_bool),
        *((name, ctypes.c_int) for name in ("gin_queue_depth", "gin_traffic_class", "world_gin_barriers")),
        ("gin_strong_signals", ctypes.c_bool),
        ("gin_va_signals", ctypes.c_bool),
    )


class Properties(NamedTuple):
    """The properties that NCCL reports of a communicator."""

    device_api: bool  # it has symmetric windows and device communicators
    gin_type: int  # 0: it has no GIN; 2: the proxy; others put without the host
    lsa_teams: int


def code(version: tuple[int, ...]) -> int:
    """NCCL_VERSION_CODE of a version: 23007 of (2, 30, 7)."""
    major, minor, patch = version
    return 10000 * major + 100 * minor + patch


def properties(communicator: Any) -> Properties:
    """Return the properties of a communicator of nccl4py, with NCCL 2.30.7 or later.  Raises RuntimeError."""
    # Room for what a later library may write behind it.
    room = ctypes.create_string_buffer(_MOST_BYTES)
    found = _Properties.from_buffer(room)
    found.size, found.magic, found.version = ctypes.sizeof(_Properties), _MAGIC, code((2, 30, 7))
    _call("ncclCommQueryProperties", communicator, room)
    return Properties(found.device_api, found.gin_type, found.lsa_teams)


class DeviceCommunicator:
    """Device communicator of NCCL with GIN connections to all ranks.  Collective to make, local to close.

    Attributes:
        data: bytes of the communicator; kernels read a copy in memory of their GPU.
    """

    def __init__(self, communicator: Any, version: tuple[int, ...], *, signals: int, contexts: int) -> None:
        wanted = _Requirements(ctypes.sizeof(_Requirements), _MAGIC, code(version))
        wanted.gin_connection, wanted.gin_traffic_class = _FULL, _UNDEFINED
        wanted.gin_signals, wanted.gin_contexts = signals, contexts
        wanted.gin_strong_signals, wanted.gin_va_signals = True, False
        self._communicator, self._made = communicator, ctypes.create_string_buffer(_MOST_BYTES)
        _call("ncclDevCommCreate", communicator, ctypes.byref(wanted), self._made)
        self.data = self._made.raw

    def close(self) -> None:
        """Close it before its communicator ends.  Raises RuntimeError."""
        _call("ncclDevCommDestroy", self._communicator, self._made)


@lru_cache(maxsize=1)
def _library() -> ctypes.CDLL:
    import nccl.core

    library = ctypes.CDLL(str(nccl.core.get_version().libnccl.path))
    for name in ("ncclGetErrorString", "ncclGetLastError"):
        function = getattr(library, name)
        function.restype = ctypes.c_char_p
    library.ncclGetLastError.argtypes = [ctypes.c_void_p]
    return library


def _call(name: str, communicator: Any, *arguments: Any) -> None:
    library = _library()
    if (result := getattr(library, name)(ctypes.c_void_p(int(communicator.ptr)), *arguments)) != 0:
        said = library.ncclGetLastError(None) or b""
        raise RuntimeError(f"{name}: {library.ncclGetErrorString(result).decode()} ({said.decode(errors='replace')})")
