"""The only file that reads the environment, and the only one that changes it, for as long as a library looks.

| variable | meaning |
| --- | --- |
| MOECOMM_BACKEND | backend of every Buffer opened with backend="auto" |
| MOECOMM_CACHE_DIR | where compiled kernels and tuned tables are kept (default: the user's cache directory) |
| MOECOMM_WINDOW | how the lsa backend makes windows: "nccl" or "vmm" (default: vmm; between hosts nccl where it can) |
| MOECOMM_NIC | an emulated NIC between domains of lsa, for tests and benchmarks: GB/s, us, M messages/s, as "50,3,10" |
| MOECOMM_FLIGHT_DIR | where each rank writes its flight record when a round fails, or on SIGTERM (default: nowhere) |
| MOECOMM_TOP_DIR | where each rank keeps its counters for `moecomm top`, once a second (default: nowhere) |
| MOECOMM_TRACE_DIR | where each rank writes the spans of its rounds, see "Traces" (default: nowhere) |
| MOECOMM_VERIFY_EVERY | one of how many rounds is verified, in Buffers opened without verify_every (default: 0, none) |
| MOECOMM_VLLM | moecomm in the place of DeepEP in vLLM: "always" or "never" (default: where there is no deep_ep) |
| MOECOMM_SGLANG | likewise in SGLang |
| MOECOMM_RMA_JOB | what a gin Buffer calls its communicator, to watch it; the RMA plugin reads these three itself |
| MOECOMM_RMA_TIMEOUT_MS | how long it waits for a connection, or for a silent peer |
| MOECOMM_RMA_TIMES | "1": it adds up where time goes, for moecomm.rma_plugin.take_times() |
| WORLD_SIZE | set by torchrun: with more than 1, group=None is an error |

A variable that starts with MOECOMM_ and is not listed is an error: a misspelt setting must not pass in silence.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from moecomm.errors import BadInput

_KNOWN = {
    "MOECOMM_BACKEND": ("auto", "host", "lsa", "gin", "nvshmem"),
    "MOECOMM_CACHE_DIR": None,
    "MOECOMM_WINDOW": ("nccl", "vmm"),
    "MOECOMM_NIC": None,
    "MOECOMM_FLIGHT_DIR": None,
    "MOECOMM_TOP_DIR": None,
    "MOECOMM_TRACE_DIR": None,
    "MOECOMM_VLLM": ("always", "never"),
    "MOECOMM_SGLANG": ("always", "never"),
    "MOECOMM_VERIFY_EVERY": None,
    "MOECOMM_RMA_JOB": None,
    "MOECOMM_RMA_TIMEOUT_MS": None,
    "MOECOMM_RMA_TIMES": ("0", "1"),
}


def check_environment() -> None:
    """Raise ValueError for an unknown MOECOMM_ variable or a value that it can't have."""
    for name, value in os.environ.items():
        if not name.startswith("MOECOMM_"):
            continue
        if name not in _KNOWN:
            raise BadInput(name, repr(value), f"no such variable; there are {', '.join(sorted(_KNOWN))}")
        allowed = _KNOWN[name]
        if allowed is not None and value not in allowed:
            raise BadInput(name, repr(value), f"one of {', '.join(allowed)}")


def asked_backend(name: object) -> str:
    """Return the backend of a name.  For "auto" the environment decides, which may say "auto" itself."""
    if not isinstance(name, str):
        raise BadInput("backend", repr(name), "a name")
    if name != "auto":
        return name
    check_environment()
    return os.environ.get("MOECOMM_BACKEND", "auto")


def window_kind() -> str | None:
    """Return how the lsa backend makes its windows; None: its own choice."""
    check_environment()
    return os.environ.get("MOECOMM_WINDOW")


def emulated_nic() -> str | None:
    """Return the figures of an emulated NIC between domains; None: there is none."""
    check_environment()
    return os.environ.get("MOECOMM_NIC")


def flight_directory() -> Path | None:
    """Return the folder of flight records; None: none are written.

    Raises BadInput where it is below a home directory that does not exist.
    """
    check_environment()
    chosen = os.environ.get("MOECOMM_FLIGHT_DIR")
    return _path("MOECOMM_FLIGHT_DIR", chosen) if chosen else None


def top_directory() -> Path | None:
    """Return the folder of counters for `moecomm top`; None: none are kept.  Raises BadInput as flight_directory()."""
    check_environment()
    chosen = os.environ.get("MOECOMM_TOP_DIR")
    return _path("MOECOMM_TOP_DIR", chosen) if chosen else None


def trace_directory() -> Path | None:
    """Return the folder of traces; None: none are written.  Raises BadInput as flight_directory()."""
    check_environment()
    chosen = os.environ.get("MOECOMM_TRACE_DIR")
    return _path("MOECOMM_TRACE_DIR", chosen) if chosen else None


def verify_every(asked: int | None) -> int:
    """Return how many rounds one that is verified stands for.  For None the environment decides; 0: none is."""
    if asked is not None:
        return asked
    check_environment()
    words = os.environ.get("MOECOMM_VERIFY_EVERY", "0")
    if not words.isdecimal():
        raise BadInput("MOECOMM_VERIFY_EVERY", repr(words), "a number of rounds, or 0")
    return int(words)


def in_vllm() -> str | None:
    """Return whether moecomm takes the place of DeepEP in vLLM; None: where that is not installed."""
    check_environment()
    return os.environ.get("MOECOMM_VLLM")


def in_sglang() -> str | None:
    """Return whether moecomm takes the place of DeepEP in SGLang; None: where that is not installed."""
    check_environment()
    return os.environ.get("MOECOMM_SGLANG")


def launched_ranks() -> int:
    """Return how many processes a launcher has started, according to the environment; 1 without one."""
    words = os.environ.get("WORLD_SIZE", "1")
    if not words.isdecimal():
        raise BadInput("WORLD_SIZE", repr(words), "a number of processes")
    return int(words)


@contextmanager
def variables(wanted: Mapping[str, str], *, insist: bool = False) -> Iterator[None]:
    """Set the variables `wanted` while a library reads the environment.  Variables set by the user take precedence.

    Afterwards the environment is as it was.  `insist`: the user's variables are hidden instead.
    """
    before = {name: os.environ.get(name) for name in wanted}
    os.environ.update({name: value for name, value in wanted.items() if insist or before[name] is None})
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def cache_dir() -> Path:
    """Return the folder of compiled kernels.  Code that writes there makes it private to the user.

    Raises BadInput where it is below a home directory that does not exist.
    """
    check_environment()
    chosen = os.environ.get("MOECOMM_CACHE_DIR") or f"{os.environ.get('XDG_CACHE_HOME') or '~/.cache'}/moecomm"
    return _path("MOECOMM_CACHE_DIR", chosen)


def _path(name: str, chosen: str) -> Path:
    try:
        return Path(chosen).expanduser().absolute()
    except RuntimeError as error:
        raise BadInput(name, repr(chosen), f"a directory that can be found ({error})") from None
