"""Compiled kernels on disk: a file an entry, its digest first, in a folder that only this user can enter.

The digest covers the key and the content, so an entry is valid under its own name only.  Any doubt about the folder or
a file is logged once, and kernels are then compiled again.  An incomplete entry, or one of another user, is never
returned.
"""

from __future__ import annotations

import hashlib
import warnings
from functools import lru_cache
from pathlib import Path

from moecomm.base import trusted_files
from moecomm.base.trusted_files import Access

_DIGEST_BYTES = 32
_MOST_BYTES = 64 << 20  # of an entry; the largest cubins, linked with NVSHMEM, have a few MB


def read(directory: Path, key: str) -> bytes | None:
    """Return the entry, or None if there is none that can be trusted."""
    try:
        entry = trusted_files.read(_path(directory, key), Access.PRIVATE, _MOST_BYTES)
    except FileNotFoundError:
        return None
    except OSError as error:
        _warn_once(f"compiled kernels are not read from {directory}: {error}")
        return None
    digest, content = entry[:_DIGEST_BYTES], entry[_DIGEST_BYTES:]
    return content if content and digest == _digest(key, content) else None


def write(directory: Path, key: str, content: bytes) -> None:
    """Store the entry.  Readers see the previous one or this one, complete."""
    try:
        trusted_files.write(_path(directory, key), Access.PRIVATE, _digest(key, content) + content)
    except OSError as error:
        _warn_once(f"compiled kernels are not kept in {directory}: {error}")


def _path(directory: Path, key: str) -> Path:
    return directory / f"{key}.cubin"


def _digest(key: str, content: bytes) -> bytes:
    return hashlib.sha256(f"{key}\n".encode() + content).digest()


@lru_cache(maxsize=8)
def _warn_once(message: str) -> None:
    warnings.warn(message, RuntimeWarning, stacklevel=4)
