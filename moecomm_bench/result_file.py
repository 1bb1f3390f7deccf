"""Results read from files. What a file lacks, or has otherwise, becomes BadInput here."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from moecomm.base.documents import Document
from moecomm.errors import MoecommError

RESULT: Document[dict[str, Any]] = Document("results", "JSON that a benchmark has written", dict[str, Any])
_MOST = 1e15  # of a number
_ORIGIN = ("what", "date", "commit", "command")
_READING = (LookupError, TypeError, ValueError, AttributeError, ArithmeticError)  # errors of code that reads entries


def read(path: Path) -> dict[str, Any]:
    """Return a result.  Raises BadInput for a file that is none."""
    return checked(path, RESULT.bytes_of(path))


def checked(path: Path, data: bytes) -> dict[str, Any]:
    """Return the result in the bytes of a file.  Raises BadInput."""
    result = RESULT.decode(path, data)
    with reading(path):
        for name in _ORIGIN:
            if not isinstance(result[name], str):
                raise TypeError(f"{name} is no text")
        _check(result)
    return result


@contextmanager
def reading(*paths: Path | str) -> Iterator[None]:
    """Raise BadInput, which names the files, where code inside finds an entry missing or of another type."""
    try:
        yield
    except MoecommError:
        raise
    except _READING as error:
        why = f"no entry {error}" if isinstance(error, KeyError) else error
        RESULT.refuse(", ".join(map(str, paths)) if len(paths) < 4 else f"one of {len(paths)} files", why)


def _check(value: Any) -> None:
    """Raise ValueError for a number or a text that no benchmark writes."""
    if isinstance(value, dict):
        _check([*value, *value.values()])
    elif isinstance(value, list):
        for part in value:
            _check(part)
    elif isinstance(value, str):
        if not value.replace("\n", "").isprintable():
            raise ValueError("control characters in a text")
    elif value is not None and not -_MOST <= value <= _MOST:
        raise ValueError(f"{value} is too large")
