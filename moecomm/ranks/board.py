"""Boards: the few bytes that ranks leave each other while a Buffer opens, in a store of torch or in this process.

No call waits for a peer, and every call has a time limit: collectives of the group have timeouts of their own.
"""

from __future__ import annotations

import atexit
import queue
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from torch.distributed import DistNetworkError

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

_END_S = 2.0  # for the store, at the end of the process

# In place of outcomes that no rank has kept: of an opening so long ago, or of ranks that have become others since.
FORGOTTEN, OVERTAKEN = b"", b"-"

_SHORTEST_NAP_S, _LONGEST_NAP_S, _GROWTH = 5e-5, 1e-2, 1.5  # a nap is at most half as long as all before it


class Board(Protocol):
    """Named values that all ranks see.  Every call returns within `limit_s` seconds, look() for each of its keys.

    Raises:
        TimeoutError: the store did not answer in time.
        ConnectionError: the process that has the store can't be reached.
        RuntimeError: the store fails otherwise.
    """

    limit_s: float

    def write(self, key: str, value: bytes, instead_of: str = "") -> None:
        """Set a value, and remove another one that this rank has written; "": none."""
        ...

    def read(self, keys: Sequence[str]) -> list[bytes] | None:
        """Return the values; None while one of them has not been written."""
        ...

    def read_or(self, keys: Sequence[str], other: str) -> tuple[list[bytes] | None, bytes | None]:
        """Return the values, and None; while one of them has not been written, None and the other value, if any."""
        ...

    def look(self, keys: Sequence[str]) -> list[bytes | None]:
        """Return the values, one after the other; None for one that has not been written."""
        ...

    def decide(self, key: str, value: bytes) -> bytes:
        """Set a value unless it has been set; return the value that is set now."""
        ...

    def count(self, key: str, by: int) -> int:
        """Add to the number of a key, 0 at first; return the number before."""
        ...

    def erase(self, keys: Sequence[str]) -> None:
        """Remove values, at the latest before the next call; ignore those that have not been written."""
        ...

    def wait(self, limit_s: float) -> None:
        """Return when something may have changed since the last read, at the latest after `limit_s` seconds."""
        ...

    def close(self) -> None:
        """Free what this rank needs to reach the board.  Values stay."""
        ...


class Part:
    """A Board whose values have keys of their own on another board, which it closes.

    Args:
        board: the other one.
        prefix: the beginning of these keys.
    """

    def __init__(self, board: Board, prefix: str) -> None:
        self._board, self._prefix = board, prefix

    @property
    def limit_s(self) -> float:
        return self._board.limit_s

    @limit_s.setter
    def limit_s(self, limit_s: float) -> None:
        self._board.limit_s = limit_s

    def write(self, key: str, value: bytes, instead_of: str = "") -> None:
        self._board.write(self._prefix + key, value, instead_of and self._prefix + instead_of)

    def read(self, keys: Sequence[str]) -> list[bytes] | None:
        return self._board.read([self._prefix + key for key in keys])

    def read_or(self, keys: Sequence[str], other: str) -> tuple[list[bytes] | None, bytes | None]:
        return self._board.read_or([self._prefix + key for key in keys], self._prefix + other)

    def look(self, keys: Sequence[str]) -> list[bytes | None]:
        return self._board.look([self._prefix + key for key in keys])

    def decide(self, key: str, value: bytes) -> bytes:
        return self._board.decide(self._prefix + key, value)

    def count(self, key: str, by: int) -> int:
        return self._board.count(self._prefix + key, by)

    def erase(self, keys: Sequence[str]) -> None:
        self._board.erase([self._prefix + key for key in keys])

    def wait(self, limit_s: float) -> None:
        self._board.wait(limit_s)

    def close(self) -> None:
        self._board.close()


class SharedValues:
    """The values of a board whose ranks are threads of this process."""

    def __init__(self) -> None:
        self.values: dict[str, bytes] = {}
        self.changed = threading.Condition()
        self.version = 0


class LocalBoard:
    """A Board of threads: one for each rank, over the same SharedValues.  `prefix`: the beginning of its keys there."""

    limit_s = float("inf")

    def __init__(self, shared: SharedValues, prefix: str) -> None:
        self._shared, self._prefix, self._seen = shared, prefix, -1

    def write(self, key: str, value: bytes, instead_of: str = "") -> None:
        shared = self._shared
        with shared.changed:
            shared.values[self._prefix + key] = value
            if instead_of:
                shared.values.pop(self._prefix + instead_of, None)
            shared.version += 1
            shared.changed.notify_all()

    def read(self, keys: Sequence[str]) -> list[bytes] | None:
        found = self.look(keys)
        return None if None in found else found  # type: ignore[return-value]

    def read_or(self, keys: Sequence[str], other: str) -> tuple[list[bytes] | None, bytes | None]:
        shared = self._shared
        with shared.changed:
            self._seen = shared.version
            found = list(map(shared.values.get, map(self._prefix.__add__, keys)))
            return (None, shared.values.get(self._prefix + other)) if None in found else (found, None)  # type: ignore[return-value]

    def look(self, keys: Sequence[str]) -> list[bytes | None]:
        shared = self._shared
        with shared.changed:
            self._seen = shared.version
            return list(map(shared.values.get, map(self._prefix.__add__, keys)))

    def decide(self, key: str, value: bytes) -> bytes:
        shared = self._shared
        with shared.changed:
            shared.version += 1
            shared.changed.notify_all()
            return shared.values.setdefault(self._prefix + key, value)

    def count(self, key: str, by: int) -> int:
        values = self._shared.values
        with self._shared.changed:
            before = int(values.get(self._prefix + key, b"0"))
            values[self._prefix + key] = b"%d" % (before + by)
        return before

    def erase(self, keys: Sequence[str]) -> None:
        with self._shared.changed:
            for key in keys:
                self._shared.values.pop(self._prefix + key, None)

    def wait(self, limit_s: float) -> None:
        shared = self._shared
        with shared.changed:
            if shared.version == self._seen:
                shared.changed.wait(limit_s)

    def close(self) -> None:
        """Keep all: threads share it."""


class StoreBoard:
    """A Board over the store of a process group, which every kind of group has.

    A store may be another process, which may be stopped.  So an own thread makes the calls.  A call that does not
    return in time is left behind with its thread, which ends when the store answers or breaks.  Where no thread can be
    started, the caller's makes them: peers must learn of that, and `limit_s` holds as long as the store answers.
    """

    def __init__(self, store: Store, prefix: str) -> None:
        self.limit_s = float("inf")
        self._store, self._prefix = store, prefix
        self._nap_s = _SHORTEST_NAP_S
        self._calls: queue.SimpleQueue[tuple[Callable[..., Any], tuple[Any, ...], _Results] | None]
        self._calls = queue.SimpleQueue()
        self._stuck = False
        thread = threading.Thread(target=_serve, args=(self._calls,), name="moecomm-opening", daemon=True)
        self._thread: threading.Thread | None = thread
        try:
            thread.start()
            _serving[thread] = self._calls
        except RuntimeError:  # out of memory, or of processes
            self._thread = None

    def write(self, key: str, value: bytes, instead_of: str = "") -> None:
        self._call(self._store.set, self._prefix + key, value)
        if instead_of:
            self.erase([instead_of])

    def read(self, keys: Sequence[str]) -> list[bytes] | None:
        found: list[bytes] | None = self._call(_read, self._store, [self._prefix + key for key in keys])
        self._nap_s = min(_GROWTH * self._nap_s, _LONGEST_NAP_S) if found is None else _SHORTEST_NAP_S
        return found

    def read_or(self, keys: Sequence[str], other: str) -> tuple[list[bytes] | None, bytes | None]:
        keys = [self._prefix + key for key in keys]
        found: tuple[list[bytes] | None, bytes | None] = self._call(_read_or, self._store, keys, self._prefix + other)
        self._nap_s = min(_GROWTH * self._nap_s, _LONGEST_NAP_S) if found[0] is None else _SHORTEST_NAP_S
        return found

    def look(self, keys: Sequence[str]) -> list[bytes | None]:
        # A call for each, so that many keys have as many times `limit_s`.
        found: list[bytes | None] = [self._call(_value, self._store, self._prefix + key) for key in keys]
        self._nap_s = min(_GROWTH * self._nap_s, _LONGEST_NAP_S) if None in found[1:] else _SHORTEST_NAP_S
        return found

    def decide(self, key: str, value: bytes) -> bytes:
        stands = self._call(self._store.compare_set, self._prefix + key, "", value.decode())
        return bytes(stands)

    def count(self, key: str, by: int) -> int:
        return int(self._call(self._store.add, self._prefix + key, by)) - by

    def erase(self, keys: Sequence[str]) -> None:
        for key in keys:
            if self._thread is None:
                self._call(self._store.delete_key, self._prefix + key)
            else:  # nobody waits for the answer, only calls behind this one
                self._calls.put((self._store.delete_key, (self._prefix + key,), queue.SimpleQueue()))

    def replace(self, key: str, old: bytes, new: bytes) -> bool:
        """Set a value if it is `old`; return whether it was.  `new` must differ between callers."""
        stands = self._call(self._store.compare_set, self._prefix + key, old.decode(), new.decode())
        return bytes(stands) == new

    def wait(self, limit_s: float) -> None:
        """Nap.  A store's own waits can't be ended early, and block its other callers in this process."""
        time.sleep(max(0.0, min(limit_s, self._nap_s)))

    def close(self) -> None:
        self._calls.put(None)
        if self._thread is not None and not self._stuck:
            self._thread.join(self._left())  # values may be erased yet

    def __del__(self) -> None:
        self._calls.put(None)  # the thread holds the queue alone

    @property
    def stuck(self) -> bool:
        """True after a call that has not returned in time: calls behind it wait for it."""
        return self._stuck

    def _left(self) -> float | None:
        return None if self.limit_s == float("inf") else max(0.0, self.limit_s)

    def _call(self, function: Callable[..., Any], *args: Any) -> Any:
        results: _Results = queue.SimpleQueue()
        self._calls.put((function, args, results))
        if self._thread is None:
            self._calls.put(None)
            _serve(self._calls)
        try:
            value, error = results.get(timeout=self._left())
        except queue.Empty:
            self._stuck = True
            raise TimeoutError("the store of the process group does not answer") from None
        if isinstance(error, DistNetworkError):
            raise ConnectionError(str(error).splitlines()[0]) from error
        if error is not None:
            raise error
        return value


class KeptBoard:
    """One board for agreements that follow each other, each of which closes only its part.

    A StoreBoard starts a thread, which takes longer than its calls.

    Args:
        make: makes the board, at the first use and after a call that has not returned in time.
    """

    def __init__(self, make: Callable[[], Board]) -> None:
        self._make = make
        self._board: Board | None = None

    def part(self, prefix: str) -> Board:
        """Return a board whose values have keys with a prefix.  One thread at a time may use all parts."""
        board = self._board
        if isinstance(board, StoreBoard) and board.stuck:
            board.close()
            board = None
        if board is None:
            board = self._board = self._make()
        return _Lent(board, prefix)

    def close(self) -> None:
        """Close the board."""
        if self._board is not None:
            self._board.close()
            self._board = None


class _Lent(Part):
    def close(self) -> None:
        """Leave the other board open."""


_Results = queue.SimpleQueue[tuple[Any, "Exception | None"]]


# Threads of boards, with their calls.
_serving: weakref.WeakKeyDictionary[threading.Thread, queue.SimpleQueue[Any]] = weakref.WeakKeyDictionary()


@atexit.register
def _end_threads() -> None:
    """End the threads of boards, at the end of the process.

    Python ends a thread that comes back from a call of C++ later, and the unwinding of its stack aborts the process.
    """
    deadline = time.monotonic() + _END_S
    for calls in list(_serving.values()):
        calls.put(None)
    for thread in list(_serving):
        thread.join(max(0.0, deadline - time.monotonic()))


def _serve(calls: queue.SimpleQueue[tuple[Callable[..., Any], tuple[Any, ...], _Results] | None]) -> None:
    while (call := calls.get()) is not None:
        function, args, results = call
        try:
            results.put((function(*args), None))
        except Exception as error:  # noqa: BLE001 - raised by the thread that asked
            results.put((None, error))


def _read(store: Store, keys: list[str]) -> list[bytes] | None:
    if not store.check(keys):
        return None
    # get() of a store waits for a missing key.  No key is missing: a peer erases only values that all ranks have read.
    return [bytes(value) for value in (store.multi_get(keys) if _has_multi_get(store) else map(store.get, keys))]


def _read_or(store: Store, keys: list[str], other: str) -> tuple[list[bytes] | None, bytes | None]:
    if (found := _read(store, keys)) is not None:
        return found, None
    return None, _value(store, other)


def _value(store: Store, key: str) -> bytes | None:
    return bytes(store.get(key)) if store.check([key]) else None


def _has_multi_get(store: Any) -> bool:
    return bool(store.has_extended_api())
