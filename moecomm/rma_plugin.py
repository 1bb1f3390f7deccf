"""GIN on machines without an RDMA NIC: where our RMA plugin is, and what NCCL must be told before it loads it."""

from __future__ import annotations

import ctypes
import importlib.util
import itertools
from pathlib import Path

from moecomm.errors import Unsupported

# Version of rma_plugin/src/times.h.
_TIMES_VERSION = 1
SUMS = (
    *("clock_reads", "operations", "signals", "bytes", "ended", "until_ended_ns", "busy_ns", "posting_ns", "driver_ns"),
    *("polls", "empty_polls", "polling_ns", "words", "writing_ns"),
)


class _Taken(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_uint64) for name in ("version", "on", "since_ns")),
        *((name, ctypes.c_uint64) for name in SUMS),
    )


def path() -> Path:
    """Return the plugin, libmoecomm_rma.so.  Raises Unsupported where it is not installed."""
    package = importlib.util.find_spec("moecomm_rma")
    found = None if package is None or package.origin is None else Path(package.origin).with_name("libmoecomm_rma.so")
    if found is None or not found.is_file():
        raise Unsupported("The RMA plugin is not installed.  In a checkout of moecomm: pip install ./rma_plugin")
    return found


def environment(job: str | None = None, *, timeout_s: float | None = None) -> dict[str, str]:
    """Return the variables that NCCL (2.30.7 or later) needs in the environment of every rank before its first call.

    | variable | why |
    | --- | --- |
    | NCCL_RMA_PLUGIN | loads the plugin: since 2.30 GIN's proxy moves its bytes through an RMA plugin |
    | NCCL_GIN_PLUGIN=none | no other GIN plugin is looked for; those that NCCL has inside, among them the proxy, stay |
    | NCCL_GIN_TYPE=2 | the proxy, and not GDAKI, which would ask for a NIC |
    | NCCL_RMA_DISABLE=1 | NCCL's own host RMA does not register every window with the plugin, too |
    | NCCL_SYM_GIN_KERNELS_ENABLE=0 | NCCL's own collectives stay off the plugin: it is far slower than what they have |
    | NCCL_NVLS_ENABLE=0 | no NVLink multicast |
    | NCCL_RMA_PLUGIN_REF_COUNT=1 | the library stays loaded between communicators |
    | MOECOMM_RMA_JOB | `job`: the name under which watch() knows the communicators that are made meanwhile |
    | MOECOMM_RMA_TIMEOUT_MS | `timeout_s`: to connect, and until a silent peer is an error; else 60 s |

    GIN's proxy polls on a thread of each communicator.  `NCCL_LSA_TEAM_SIZE`, which splits the GPUs of one host into
    several domains, is the caller's choice.
    """
    found = {
        "NCCL_RMA_PLUGIN": str(path()),
        "NCCL_GIN_PLUGIN": "none",
        "NCCL_GIN_TYPE": "2",
        "NCCL_RMA_DISABLE": "1",
        "NCCL_SYM_GIN_KERNELS_ENABLE": "0",
        "NCCL_NVLS_ENABLE": "0",
        "NCCL_RMA_PLUGIN_REF_COUNT": "1",
    }
    if job is not None:
        found["MOECOMM_RMA_JOB"] = job
    if timeout_s is not None:
        found["MOECOMM_RMA_TIMEOUT_MS"] = str(max(1, round(timeout_s * 1000)))
    return found


def take_times() -> dict[str, int] | None:
    """Return the times that the plugin has added up in this process since the last call.

    None unless MOECOMM_RMA_TIMES=1 when a communicator was made.

    Numbers over all communicators; times in nanoseconds:

    | key | what |
    | --- | --- |
    | since_ns | since the last call, or since the plugin began |
    | operations, signals, bytes | puts and gets posted, those with a signal behind them, and what they move |
    | ended, until_ended_ns | those that a poll has seen done, signals and all, and from their posting until then |
    | busy_ns | while at least one was between the two |
    | posting_ns, driver_ns | inside the calls that post, and of that inside the CUDA driver |
    | polls, empty_polls, polling_ns | calls that look what is done, those that found nothing, and inside all of them |
    | words, writing_ns | signals written into memory of this rank, and while they were given to the driver |
    | clock_reads | for all of this |
    """
    taken = _Taken(version=_TIMES_VERSION)
    if _library().moecomm_rma_take_times(ctypes.byref(taken)) != 0:
        raise Unsupported(f"The RMA plugin {path()} is not of this moecomm.")
    return {name: int(getattr(taken, name)) for name in ("since_ns", *SUMS)} if taken.on else None


def watch(job: str, abort_word: int) -> None:
    """Store the abort word of a lost peer at an address, so that kernels that look there end their waits.  0: stop.

    Applies to communicators of this job: see environment().  While watched, puts to a lost peer are dropped, and
    NCCL's thread goes on for the others.
    """
    if _library().moecomm_rma_watch(job.encode(), ctypes.c_void_p(abort_word or None)) != 0:
        raise MemoryError


def ignore(job: str, rank: int, ignored: bool) -> None:
    """Stop ending waits when this peer is lost; False: end them again."""
    if _library().moecomm_rma_ignore(job.encode(), rank, int(ignored)) != 0:
        raise MemoryError


def losses(job: str) -> dict[int, str]:
    """Return the peers lost since watch(), with the plugin's reports.  This rank's number: a local failure."""
    text, found, numbers = ctypes.create_string_buffer(512), dict[int, str](), itertools.count()
    loss, size = _library().moecomm_rma_loss, ctypes.c_size_t(len(text))
    while (rank := int(loss(job.encode(), next(numbers), text, size))) >= 0:
        found.setdefault(rank, text.value.decode(errors="replace"))  # the first report is the cause
    return found


def _library() -> ctypes.CDLL:
    """Return the library that NCCL has opened: the loader keeps one of each file in a process."""
    return ctypes.CDLL(str(path()))
