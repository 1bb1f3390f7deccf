"""The calls of a deep_ep buffer, in the order in which all ranks make them.

Calls of other modes or sizes use other moecomm.Buffers.  Ranks that make different calls would wait in different ones,
each for the others.  Calls compares them before that, so that the error comes at once and names both.
"""

from __future__ import annotations

import ctypes
import re
import struct
import zlib
from collections.abc import Callable, Mapping
from contextlib import suppress

from moecomm.errors import BadInput, Mismatch, MoecommError, RoundFailed
from moecomm.ranks.group import Group
from moecomm.ranks.opening import opening
from moecomm.ranks.pages import CALLS, KEPT_CALLS
from moecomm.rounds.call_count import CallCount, Marks
from moecomm.rounds.rounds import Rounds

# A word has the number of a call, a hash of what it is, and two flags.
_NUMBER, _OPENS, _COMBINES, _FLAG_BITS = 32, 1, 2, 2
_HASHED = (1 << _NUMBER) - 1 - _OPENS - _COMBINES
_TOKENS = struct.Struct("<q")
_Words = ctypes.Array[ctypes.c_uint64]
AFTER_THE_HOOK = "a call of the dispatch's hook before"
_METHODS = {"dispatch_with_permute": "combine_with_unpermute", "dispatch": "combine"}


class Calls(CallCount):
    """The calls of one deep_ep buffer.

    A call that opens a window is compared over the group.  Later ones are compared through the pages of the first
    Buffer, which all ranks of a host map: each has the last calls of its rank, by number.  A call stores its word and
    reads those of the two neighbouring ranks, so of two neighbours that differ the later one knows.  It closes its
    Buffers; ranks that wait in one of them then raise PeerLost, and find the word that differs.

    Args:
        ranks: of the buffer.
        timeout_s: of a wait.
        close: closes the Buffers.
        compared: False: calls are compared only where they open a window, because ranks may be masked.
        names: arguments of these calls, by moecomm's name for them: see in_names().
    """

    def __init__(
        self,
        ranks: Group,
        timeout_s: float,
        close: Callable[[], None],
        compared: bool = True,
        names: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__()
        self._names = {} if names is None else names
        self._ranks, self._timeout_s, self._close, self._compared = ranks, timeout_s, close, compared
        self._begun = self._last = self._word = self._at = 0
        self._texts: dict[int, str] = {}  # by hash
        self._hashes: dict[Rounds, int] = {}
        self._rounds: Rounds | None = None  # in whose pages the words are
        self._words: list[_Words] = []  # by rank
        self._neighbours: list[_Words] = []

    def agree(self, method: str, sizes: str | Callable[[], str], tokens: int = 0) -> int:
        """Return the most tokens that a rank has, once all ranks make this call.  Collective.

        Args:
            method: name of the call.
            sizes: text of the sizes or arguments of the call; alike on all ranks.  A function returns the text, and
                what it raises is raised on all ranks.
            tokens: number of tokens of this rank.

        Raises:
            Mismatch: a rank makes another call, or has other sizes; names both.
            Timeout, PeerLost, Aborted: a rank did not come.
        """
        text = f"{method}({sizes if isinstance(sizes, str) else ''})"
        self._last = self._noted(text)
        self._store(self._last | _OPENS)
        if any(self._differs(words) for words in self._words):
            self._fail(begun=False)
        try:
            with opening(self._ranks, self._timeout_s, of=f"window of {method}") as opened:
                if not isinstance(sizes, str):
                    text = f"{method}({sizes()})"
                everybody = opened.compare({"call": text}, _TOKENS.pack(tokens))
                opened.settle()
        except Mismatch:
            if any(self._differs(words) and not words[self._at] & _OPENS for words in self._words):
                self._close()  # as the rank has that makes a call without a window to open
            raise
        return max(int(_TOKENS.unpack(passed)[0]) for passed in everybody)

    def opened(self, rounds: Rounds) -> None:
        """Take note of a Buffer that has been opened, by the call that agree() has seen last."""
        self.add(rounds)
        self._hashes[rounds] = self._last
        pages = rounds.session.pages
        if not self._compared or pages is None or self._rounds is not None:
            return
        ring = ctypes.c_uint64 * KEPT_CALLS
        self._rounds, self._words = rounds, [ring.from_address(page + CALLS) for page in pages.addresses]
        rank, ranks = self._ranks.rank, self._ranks.ranks
        self._neighbours = [self._words[other] for other in {(rank + 1) % ranks, (rank - 1) % ranks} - {rank}]
        for text in list(self._texts.values()):
            self._noted(text)

    def begin(self, rounds: Rounds, combines: bool = False) -> None:
        """Compare the next round with those of neighbours.

        Raises:
            Mismatch: a rank makes another call; names both.
        """
        if not self._words:
            self._begun += 1
            return
        self._store(self._hashes[rounds] | _COMBINES if combines else self._hashes[rounds])
        for words in self._neighbours:
            if words[self._at] != self._word and self._differs(words):
                self._fail(begun=False)

    def count_failure(self, marks: Marks, error: BaseException | None) -> None:
        """Count a failed call: CallCount.count_failure().  A BadInput gets the names of the interface.

        Raises:
            Mismatch: instead of RoundFailed, if a neighbour makes another call; names both calls.
        """
        if isinstance(error, BadInput):
            in_names(error, self._names)
        super().count_failure(marks, error)
        if isinstance(error, RoundFailed) and self._difference() is not None:
            self._fail(begun=self._word & _OPENS != 0, cause=error)

    def stop(self) -> None:
        """Forget the words: their memory goes with the Buffers."""
        self._rounds, self._words, self._neighbours = None, [], []

    def _store(self, kind_of_call: int) -> None:
        """Number the call and store its word."""
        self._begun += 1
        if self._rounds is None:
            return
        if self._rounds.closed:  # in the child of a fork, which has no part in the calls of its parent
            return self.stop()
        number = self._begun + self.failed
        self._at, self._word = number % KEPT_CALLS, number << _NUMBER | kind_of_call
        self._words[self._ranks.rank][self._at] = self._word

    def _differs(self, words: _Words) -> bool:
        """Return whether another rank makes another call of this number."""
        word = words[self._at]
        return word >> _NUMBER == self._word >> _NUMBER and (word ^ self._word) & ~_COMBINES != 0

    def _fail(self, begun: bool, cause: BaseException | None = None) -> None:
        """Raise Mismatch once the ranks that wait for this one are told.  `begun`: it has begun an opening itself."""
        difference = self._difference()
        assert difference is not None, "the words are still there"
        number, error = difference
        opens = any(words[number % KEPT_CALLS] & _OPENS for words in self._words if _is(number, words))
        if opens and not begun:  # ranks count the openings of a group: either all have begun this one, or none
            with suppress(MoecommError), opening(self._ranks, self._timeout_s):
                raise error
        self._close()
        raise error from cause

    def _difference(self) -> tuple[int, Mismatch] | None:
        """Return the first call in which a rank differs from this one, and the error; None if none is known."""
        if not self._words:
            return None
        last, own = self._word >> _NUMBER, self._words[self._ranks.rank]
        for number in range(max(1, last - KEPT_CALLS + 1), last + 1):
            for rank, words in enumerate(self._words):
                mine, theirs = own[number % KEPT_CALLS], words[number % KEPT_CALLS]
                if _is(number, own) and _is(number, words) and (mine ^ theirs) & ~_COMBINES:
                    return number, Mismatch("call", self._named(mine), self._named(theirs), rank)
        return None

    def _noted(self, text: str) -> int:
        """Return the hash of a call, and let other ranks know what it means."""
        hashed = zlib.crc32(text.encode()) & _HASHED
        self._texts[hashed] = text
        if self._rounds is not None and self._rounds.session.pages is not None:
            self._rounds.session.pages.write(f"call/{hashed}", text.encode())
        return hashed

    def _named(self, word: int) -> str:
        hashed, text = word & _HASHED, "another call"
        assert self._rounds is not None and self._rounds.session.pages is not None, "there are words"
        if (noted := self._rounds.session.pages.read([f"call/{hashed}"])) is not None:
            text = noted[0].decode(errors="replace")
        if word & _COMBINES:
            name = next(name for name in _METHODS if name in text)
            text = text.replace(name, _METHODS[name], 1)
        return text


def in_names(error: BadInput, names: Mapping[str, str]) -> None:
    """Put an interface's names of arguments in the place of moecomm's: `names`, by those."""
    want = str(error.want).replace("dispatch_end(routed) first", AFTER_THE_HOOK)
    rows, window = (f"{names[name]}=" if name in names else "" for name in ("max_rows", "window_bytes"))
    want = want.replace("max_rows=, or capacity_factor= of the Buffer, makes more", f"a larger {rows} makes more")
    larger = rf", or open the buffer with {window}\1" if window else ""
    want = re.sub(r", pass max_rows=, or open the Buffer with window_bytes=(\d+)", larger, want)
    want = re.sub(r"max_tokens = (\d+)", r"\1, the room that the first call with these sizes made", want)
    argument = names.get(error.argument, error.argument)
    if (argument, want) != (error.argument, str(error.want)):
        BadInput.__init__(error, argument, error.got, want, error.rank)


def _is(number: int, words: _Words) -> bool:
    """Return whether a rank has made the call of that number, and its word is not overwritten yet."""
    return words[number % KEPT_CALLS] >> _NUMBER == number
