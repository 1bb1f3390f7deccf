"""Processes on this machine: whether ids of others are valid here, whether they have ended, what memory they share."""

from __future__ import annotations

import functools
import hashlib
import os
import re
import select
import sys
import threading
from collections.abc import Sequence
from contextlib import suppress

from moecomm import _native


def pid_namespace() -> bytes:
    """32 bytes that are the same for two processes if and only if each can use the other's process id."""
    parts = _boot_and_namespace("pid")
    # Without both, no other process is known to share our ids.
    return hashlib.sha256("\0".join(parts).encode()).digest() if len(parts) == 2 else os.urandom(32)


def clock_domain() -> bytes:
    """32 bytes that are the same for two processes if and only if they share CLOCK_MONOTONIC."""
    parts = _boot_and_namespace("time")
    # Kernels before 5.6 have no namespaces of time.
    return hashlib.sha256("\0".join(parts).encode()).digest() if parts else os.urandom(32)


def _boot_and_namespace(kind: str) -> list[str]:
    """Return the ids of this boot and of this process's namespace, each if the kernel tells it."""
    parts: list[str] = []
    with suppress(OSError), open("/proc/sys/kernel/random/boot_id") as file:
        parts.append(file.read().strip())
    with suppress(OSError):
        parts.append(os.readlink(f"/proc/self/ns/{kind}"))
    return parts


@functools.cache
def memory_bytes() -> int:
    """Return the memory and swap of this machine."""
    with open("/proc/meminfo") as file:
        sizes = re.findall(r"^(?:Mem|Swap)Total: *(\d+) kB$", file.read(), re.MULTILINE)
    return sum(map(int, sizes)) << 10


def pidfd(pid: int) -> int | None:
    """Open a descriptor of a process, which is readable once that has ended.  None where the kernel gives none.

    Raises:
        ProcessLookupError: there is no such process.
    """
    try:
        return _native.pidfd_open(pid)
    except ProcessLookupError:
        raise
    except OSError:  # an old kernel, a sandbox that forbids it, or no descriptors left
        return None


class Deaths:
    """Ranks whose processes have ended, as far as this process can see them."""

    def __init__(self) -> None:
        self._pidfds: dict[int, int] = {}  # rank of each descriptor
        self._poll = select.poll()
        self._gone: list[int] = []

    def watch(self, pids: Sequence[int]) -> None:
        """Watch the process of each rank from now on; 0: not that rank's."""
        for rank, pid in enumerate(pids):
            if pid == 0:
                continue
            try:
                descriptor = pidfd(pid)
            except ProcessLookupError:
                self._gone.append(rank)
                continue
            if descriptor is not None:
                self._pidfds[descriptor] = rank
                self._poll.register(descriptor, select.POLLIN)

    def first(self, wait_s: float = 0) -> int | None:
        """Return a rank whose process has ended, or None if there is none within `wait_s`."""
        if not self._gone and self._pidfds:
            self._gone += [self._pidfds[descriptor] for descriptor, _ in self._poll.poll(1000 * wait_s)]
        return self._gone[0] if self._gone else None

    def close(self) -> None:
        """Close the descriptors."""
        for descriptor in self._pidfds:
            os.close(descriptor)
        self._pidfds = {}


def exit_error() -> BaseException | None:
    """Return the exception that has ended the main thread, while the interpreter exits."""
    error: BaseException | None = getattr(sys, "last_value", None)
    return None if threading.main_thread().is_alive() else error
