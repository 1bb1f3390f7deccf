"""Files that decide which code moecomm runs: trusted only where no other user can have written them, and bounded.

A file and its folder are checked through their open descriptors, so replacing a name in between has no effect.  An
OSError says what is wrong; FileNotFoundError: there is no such file.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import stat
from collections.abc import Iterator
from enum import Enum
from pathlib import Path

from moecomm.base import documents
from moecomm.errors import BadInput

_DIRECTORY_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_WRITE_FLAGS = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC


class Access(Enum):
    """The permissions that neither the group nor others may have, on a file and on its directory."""

    PRIVATE = 0o077  # owned by this user
    READ_ONLY = 0o022  # owned by this user or root
    ANY = 0  # a folder that the caller of moecomm has named


def read(path: Path, access: Access, most_bytes: int) -> bytes:
    """Read a complete file.  Raises OSError for one that is not regular, not safe, or larger than `most_bytes`."""
    with (
        _directory(path.parent, access) as directory,
        documents.opened(path.name, most_bytes, os.O_NOFOLLOW, directory) as file,
    ):
        status = os.fstat(file.fileno())
        _check(path.name, status, access)
        return file.read(status.st_size)


def write(path: Path, access: Access, content: bytes) -> None:
    """Write a file, mode 0600, and make its folder if it is missing.

    Readers see the previous file or this one, complete.
    """
    make_directory(path.parent, access)
    with _directory(path.parent, access) as directory:
        unfinished = f".{path.name}.{secrets.token_hex(8)}"
        descriptor = os.open(unfinished, _WRITE_FLAGS, 0o600, dir_fd=directory)
        try:
            with os.fdopen(descriptor, "wb") as file:
                file.write(content)
            os.rename(unfinished, path.name, src_dir_fd=directory, dst_dir_fd=directory)
        except BaseException:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(unfinished, dir_fd=directory)
            raise


def create(path: Path, access: Access) -> int:
    """Create an empty file, mode 0600, and return a descriptor to write to.  Raises OSError if it is there."""
    make_directory(path.parent, access)
    with _directory(path.parent, access) as directory:
        return os.open(path.name, _WRITE_FLAGS, 0o600, dir_fd=directory)


def make_directory(path: Path, access: Access) -> None:
    """Make a folder, mode 0700, if it is missing.  Raises OSError for one that is not safe."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with contextlib.suppress(FileExistsError):
        path.mkdir(mode=0o700)
    with _directory(path, access):
        pass


def prepare_directory(argument: str, path: Path) -> None:
    """Make the folder of an output that an argument or variable names, if it is missing.

    Raises:
        BadInput: a folder that cannot be made, or that another user owns or can write to.
    """
    try:
        make_directory(path, Access.READ_ONLY)
    except (OSError, ValueError) as error:  # ValueError: a null character
        raise BadInput(argument, repr(str(path)), f"a directory that only this user can write to ({error})") from error


@contextlib.contextmanager
def _directory(path: Path, access: Access) -> Iterator[int]:
    """Open the folder.  Names are looked up in it, and not by path."""
    descriptor = os.open(path, _DIRECTORY_FLAGS)
    try:
        _check("the directory", os.fstat(descriptor), access)
        yield descriptor
    finally:
        os.close(descriptor)


def _check(what: str, status: os.stat_result, access: Access) -> None:
    if access is Access.ANY:
        return
    private = access is Access.PRIVATE
    if status.st_uid not in ((os.geteuid(),) if private else (os.geteuid(), 0)):
        raise PermissionError(f"{what} belongs to another user")
    if status.st_mode & access.value:
        mode = f"mode {stat.S_IMODE(status.st_mode):04o}"
        raise PermissionError(f"{what} is open to other users ({mode}, want none of {access.value:04o})")
