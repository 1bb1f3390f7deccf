"""Pages: shared memory of the ranks of one host, over which they agree when the store of their group may be gone.

Each rank has a page, which all ranks map, so that it outlives its process.  A rank writes its own page alone, but for
the word of decisions in the page of rank 0.
"""

from __future__ import annotations

import ctypes
import struct
import time
from collections.abc import Iterator, Sequence

from moecomm import _native
from moecomm.errors import Unsupported
from moecomm.ranks.board import FORGOTTEN, OVERTAKEN

PAGE_BYTES = 128 << 10
EXTENSIONS = PAGE_BYTES - 1024  # offset of what windows that grow use: moecomm.backends.windows.extensions
LEFT = 0  # a word: its rank has announced that it leaves
CALLS, KEPT_CALLS = 256, 64  # words of 8 bytes: what calls of several Buffers its rank has made last
_DECISION, _VERSION, _ERROR, _VALUES = 64, 128, CALLS + 8 * KEPT_CALLS, 1536  # offsets
_ERROR_TEXT = _ERROR + 8  # behind the number of bytes, and of the last round before
_ROOM = (EXTENSIONS - _VALUES) // 2  # of each of two copies of a rank's values; version v is in copy v % 2
_ENTRY = struct.Struct("<II")  # bytes of a key, and of its value
_SHORTEST_NAP_S, _LONGEST_NAP_S = 1e-4, 2e-3
_RANK_BITS = 10
_KEPT = 32  # decisions of a rank's page


class Pages:
    """A Board (moecomm.ranks.board) in the pages of ranks.

    A reader copies the values of a rank, and does it again if a newer version has been stored meanwhile.

    Decisions are numbered, in the order in which ranks come to them.  A word holds the number of the last and the rank
    whose proposal stands.  A rank proposes in its own page, then replaces the word by compare-and-swap.  Before that it
    copies the decision that stands to its own page, so that late ranks find it.

    Args:
        addresses: of each rank's page, by rank.
        rank: this one.
    """

    limit_s = float("inf")

    def __init__(self, addresses: Sequence[int], rank: int) -> None:
        self.addresses, self._rank = addresses, rank
        self._mine: dict[str, bytes] = {}
        self._version = 0
        self._seen: list[tuple[int, dict[str, bytes]]] = [(0, {})] * len(addresses)
        self._nap_s = _SHORTEST_NAP_S

    def left(self) -> set[int]:
        """Return the ranks that have announced that they leave."""
        return {rank for rank, address in enumerate(self.addresses) if _native.read_word(address + LEFT)}

    def leave_error(self, text: str, last_round: int) -> None:
        """Leave an error of this rank after its round `last_round`, for ranks that wait for it in a later one."""
        own = self.addresses[self._rank]
        data = text.encode(errors="replace")[: _VALUES - _ERROR_TEXT]
        _native.store_word(own + _ERROR, 0)
        ctypes.memmove(own + _ERROR_TEXT, data, len(data))
        _native.store_word(own + _ERROR + 4, last_round)
        _native.store_word(own + _ERROR, len(data))

    def error_before(self, rank: int, number: int) -> str:
        """Return the error after which a rank has made no round before `number`; "": it has left none."""
        if not 0 <= rank < len(self.addresses):
            return ""
        address = self.addresses[rank]
        length = min(_native.read_word(address + _ERROR), _VALUES - _ERROR_TEXT)
        last_round = _native.read_word(address + _ERROR + 4)
        data = ctypes.string_at(address + _ERROR_TEXT, length)
        if last_round + 1 < number or _native.read_word(address + _ERROR) != length:
            return ""
        return data.decode(errors="replace")

    def write(self, key: str, value: bytes, instead_of: str = "") -> None:
        self._mine[key] = value
        self._mine.pop(instead_of, None)
        self._publish()

    def read(self, keys: Sequence[str]) -> list[bytes] | None:
        """Read values; a key that ends in "/outcome" or "/members" is that of a decision."""
        found = [self._decided(key) if _is_decision(key) else self._first(key) for key in keys]
        self._nap_s = min(2 * self._nap_s, _LONGEST_NAP_S) if None in found else _SHORTEST_NAP_S
        return None if None in found else found  # type: ignore[return-value]

    def read_or(self, keys: Sequence[str], other: str) -> tuple[list[bytes] | None, bytes | None]:
        if (found := self.read(keys)) is not None:
            return found, None
        return None, self._decided(other) if _is_decision(other) else self._first(other)

    def look(self, keys: Sequence[str]) -> list[bytes | None]:
        found = [self._decided(key) if _is_decision(key) else self._first(key) for key in keys]
        self._nap_s = min(2 * self._nap_s, _LONGEST_NAP_S) if None in found[1:] else _SHORTEST_NAP_S
        return found

    def decide(self, key: str, value: bytes) -> bytes:
        number = _number(key)
        self.write(f"?{number}", value)
        while True:
            stands = _native.read_long_word(self.addresses[0] + _DECISION)
            if stands >> _RANK_BITS >= number:
                decided = self._decided(key)
                if decided in (None, FORGOTTEN, OVERTAKEN):  # so many decisions ago that no rank has kept it
                    raise ConnectionError("the other ranks have gone on")
                return decided
            if stands:
                self.write(f"={stands >> _RANK_BITS}", self._proposal(stands))
            mine = number << _RANK_BITS | self._rank
            if _native.replace_word(self.addresses[0] + _DECISION, stands, mine):
                self._forget()
                return value

    def _forget(self) -> None:
        """Remove decisions that are so old that no rank asks for them any more."""
        kept = sorted({int(name[1:]) for name in self._mine if name[0] in "?="})
        self.erase([f"{kind}{number}" for number in kept[:-_KEPT] for kind in "?="])

    def count(self, key: str, by: int) -> int:
        """Count a key that only this rank counts."""
        before = int(self._mine.get(key, b"0"))
        if by:
            self.write(key, b"%d" % (before + by))
        return before

    def erase(self, keys: Sequence[str]) -> None:
        """Remove this rank's values; the last decisions stay."""
        if there := self._mine.keys() & set(keys):
            for key in there:
                del self._mine[key]
            self._publish()

    def wait(self, limit_s: float) -> None:
        """Nap."""
        time.sleep(max(0.0, min(limit_s, self._nap_s)))

    def close(self) -> None:
        """Keep the memory: its owner closes it."""

    def _decided(self, key: str) -> bytes | None:
        number = _number(key)
        stands = _native.read_long_word(self.addresses[0] + _DECISION)
        if stands >> _RANK_BITS < number:
            return None
        if stands >> _RANK_BITS == number:
            return self._proposal(stands)
        if (kept := self._first(f"={number}")) is not None or not key.endswith("/outcome"):
            return kept
        return OVERTAKEN if stands >> _RANK_BITS >> 32 > number >> 32 else FORGOTTEN

    def _first(self, key: str) -> bytes | None:
        """Return the value of the lowest rank that has one of this key."""
        for rank in range(len(self.addresses)):
            if (value := self._values(rank).get(key)) is not None:
                return value
        return None

    def _proposal(self, stands: int) -> bytes:
        number, rank = stands >> _RANK_BITS, stands & ((1 << _RANK_BITS) - 1)
        return self._values(rank)[f"?{number}"]  # written before the word

    def _publish(self) -> None:
        packed = b"".join(_packed(self._mine))
        if len(packed) + 4 > _ROOM:
            raise Unsupported(f"{len(packed)} bytes of values, for which the page of a rank has no room")
        self._version += 1
        own = self.addresses[self._rank]
        where = own + _VALUES + self._version % 2 * _ROOM
        ctypes.memmove(where, len(packed).to_bytes(4, "little") + packed, 4 + len(packed))
        _native.store_word(own + _VERSION, self._version)

    def _values(self, rank: int) -> dict[str, bytes]:
        if rank == self._rank:
            return self._mine
        address = self.addresses[rank]
        while (version := _native.read_word(address + _VERSION)) != self._seen[rank][0]:
            where = address + _VALUES + version % 2 * _ROOM
            nbytes = min(int.from_bytes(ctypes.string_at(where, 4), "little"), _ROOM - 4)
            packed = ctypes.string_at(where + 4, nbytes)
            # Version v + 2 overwrites this copy, and its writer begins it only after it has stored v + 1.
            if _native.read_word(address + _VERSION) == version:
                self._seen[rank] = version, dict(_unpacked(packed))
        return self._seen[rank][1]


def _is_decision(key: str) -> bool:
    return key.endswith(("/outcome", "/members"))


def _number(key: str) -> int:
    """Number a decision: "G/members" is the first of generation G, and "G/N/outcome" that of its opening N."""
    generation, *opening = key.split("/")[:-1]
    return int(generation) << 32 | (int(opening[0]) + 1 if opening else 0)


def _packed(values: dict[str, bytes]) -> Iterator[bytes]:
    for key, value in values.items():
        name = key.encode()
        yield _ENTRY.pack(len(name), len(value)) + name + value


def _unpacked(packed: bytes) -> Iterator[tuple[str, bytes]]:
    at = 0
    while at + _ENTRY.size <= len(packed):
        name, value = _ENTRY.unpack_from(packed, at)
        at += _ENTRY.size
        yield packed[at : at + name].decode(errors="replace"), packed[at + name : at + name + value]
        at += name + value
