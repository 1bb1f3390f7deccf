"""Files that a user names, read with bounds: regular files alone, of limited size, with JSON of a known schema.

Opening never waits, so a FIFO or a device of that name cannot stop the caller.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Generic, NoReturn, TypeVar

from moecomm.errors import BadInput

_T = TypeVar("_T")
_FLAGS = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC


@contextmanager
def opened(name: str | Path, most_bytes: int, flags: int = 0, folder: int | None = None) -> Iterator[BinaryIO]:
    """Open a regular file to read.

    Args:
        name: of the file.
        most_bytes: the largest size.
        flags: of os.open, beside those for reading.
        folder: descriptor of the folder in which to look `name` up; default: the current one.

    Raises:
        OSError: it can't be opened, is not a regular file, or is larger.
        ValueError: a null character in the name.
    """
    descriptor = os.open(name, _FLAGS | flags, dir_fd=folder)
    with os.fdopen(descriptor, "rb") as file:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise OSError("not a regular file")
        if status.st_size > most_bytes:
            raise OSError(f"{status.st_size} bytes, at most {most_bytes} are read")
        yield file


@dataclass(frozen=True)
class Document(Generic[_T]):
    """A sort of file.

    Attributes:
        argument: the argument that names such a file, for errors.
        want: the sort in words.
        schema: the type that its JSON has, as msgspec knows types.
        most_bytes: the largest size that is read.
    """

    argument: str
    want: str
    schema: type[_T]
    most_bytes: int = 64 << 20

    def read(self, path: Path) -> _T:
        """Return the content of a file.  Raises BadInput."""
        return self.decode(path, self.bytes_of(path))

    def bytes_of(self, path: Path) -> bytes:
        """Return the bytes of a file.  Raises BadInput."""
        try:
            with opened(path, self.most_bytes) as file:
                return file.read(os.fstat(file.fileno()).st_size)
        except (OSError, ValueError) as error:
            self.refuse(path, error)

    def decode(self, path: Path, data: bytes) -> _T:
        """Return bytes of the file at `path` as an object of the schema.  Raises BadInput."""
        import msgspec

        try:
            return msgspec.json.decode(data, type=self.schema)
        except (ValueError, RecursionError) as error:
            self.refuse(path, error)

    def refuse(self, path: Path | str, why: object) -> NoReturn:
        """Raise BadInput for a file."""
        said = (why.strerror or why) if isinstance(why, OSError) else why
        raise BadInput(self.argument, f"{path} ({said})", self.want) from None
