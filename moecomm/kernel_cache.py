"""Compiled kernels on disk: in a directory that nobody but this user can enter, a file an entry, its digest first.

Any doubt about the directory is said once, and kernels are then compiled and not kept.  An entry that is not whole, or
not this user's own, is never returned.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import secrets
import stat
import warnings
from functools import lru_cache
from pathlib import Path

_DIGEST_BYTES = 32


def read(directory: Path, key: str) -> bytes | None:
    """The entry, None if there is none that can be trusted."""
    try:
        with contextlib.closing(_Directory(directory)) as cache:
            return cache.read(f"{key}.cubin")
    except OSError as error:
        _warn_once(f"compiled kernels are not read from {directory}: {error}")
        return None


def write(directory: Path, key: str, content: bytes) -> None:
    """Keeps the entry.  Readers see an earlier one or this one, whole."""
    try:
        with contextlib.closing(_Directory(directory)) as cache:
            cache.write(f"{key}.cubin", content)
    except OSError as error:
        _warn_once(f"compiled kernels are not kept in {directory}: {error}")


class _Directory:
    """The open directory: made if it is missing; OSError unless it is this user's alone.

    Names are looked up in it, and not by path.
    """

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(FileExistsError):
            path.mkdir(mode=0o700)
        self._descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        if not _is_ours(self._descriptor, stat.S_IFDIR):
            self.close()
            raise PermissionError("it is not this user's alone (want this owner, and mode 0700)")

    def close(self) -> None:
        os.close(self._descriptor)

    def read(self, name: str) -> bytes | None:
        try:
            # Not blocking: a pipe of that name must not stop us.
            flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
            descriptor = os.open(name, flags, dir_fd=self._descriptor)
        except OSError:
            return None
        with os.fdopen(descriptor, "rb") as file:
            if not _is_ours(descriptor, stat.S_IFREG):
                return None
            digest, content = file.read(_DIGEST_BYTES), file.read()
        return content if content and hashlib.sha256(content).digest() == digest else None

    def write(self, name: str, content: bytes) -> None:
        unfinished = f".{name}.{secrets.token_hex(8)}"
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        descriptor = os.open(unfinished, flags, 0o600, dir_fd=self._descriptor)
        try:
            with os.fdopen(descriptor, "wb") as file:
                file.write(hashlib.sha256(content).digest() + content)
            os.rename(unfinished, name, src_dir_fd=self._descriptor, dst_dir_fd=self._descriptor)
        except BaseException:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(unfinished, dir_fd=self._descriptor)
            raise


def _is_ours(descriptor: int, kind: int) -> bool:
    status = os.fstat(descriptor)
    return stat.S_IFMT(status.st_mode) == kind and status.st_uid == os.geteuid() and status.st_mode & 0o077 == 0


@lru_cache(maxsize=8)
def _warn_once(message: str) -> None:
    warnings.warn(message, RuntimeWarning, stacklevel=4)
