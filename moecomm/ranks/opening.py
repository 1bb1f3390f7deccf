"""Opening a Buffer: it ends in success on every rank, or in a named error on every rank, within the deadline.

The windows themselves are opened by moecomm/buffer/elastic.py (open_rounds) inside such an opening.  Releasing a
Buffer's memory and restoring it end likewise (moecomm/membership/suspension.py).

Ranks leave each other bytes on a board.  A failing rank writes its error into the outcome of the opening, which is
decided once: by the first rank that fails, or by the first rank that sees all ranks ready.  Waiting ranks read it.

The openings of a group have numbers.  A rank joins the next one, but none that its peers gave up because it did not
come: its call belongs to a later one.  So a call that a rank leaves out costs its peers that call alone.  Other errors
of an opening wait for ranks that are late.  A rank has left the call out if its peers give up a later one as well.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from typing import Any

from moecomm import _native, errors
from moecomm.base.processes import Deaths, pid_namespace
from moecomm.base.validation import seconds
from moecomm.errors import Aborted, BadInput, Mismatch, MoecommError, PeerLost, RoundFailed, Timeout, Unsupported
from moecomm.ranks import last_calls, messages, strays
from moecomm.ranks.board import FORGOTTEN, OVERTAKEN, Board
from moecomm.ranks.group import Group
from moecomm.ranks.messages import Failed, Opened

_OPEN = messages.pack(Opened())
_GRACE_S = 0.25  # for the store to answer after the deadline
_CALL = 64  # bytes
_IDENTITY = 36 + _CALL  # bytes
_LOOK_S = 0.05  # between two looks for an interruption
_TEXT = 2000  # characters of an error that peers repeat


@contextmanager
def opening(
    ranks: Group,
    timeout_s: Any,
    call: str = "open",
    of: str = "",
    interruption: Callable[[], RoundFailed | None] = lambda: None,
    *,
    note: str = "",
    others: Callable[[], str] = lambda: "",
    turn: _native.Turn | None = None,
) -> Iterator[Opening]:
    """Collective: exchange data between ranks until a Buffer is open.

    The block ends with Opening.settle().  An error that leaves the block is announced to the other ranks.

    Args:
        ranks: of the Buffer.
        timeout_s: how long to wait for a rank; checked here, so that peers learn of a bad value.
        call: "open", or the method of an open Buffer on which its ranks agree in this way.
        of: the Buffer of that call, as all ranks name it; "open": the kind of object, a Buffer unless it says another.
        interruption: returns the error that ends this rank's waits, if there is one.
        note: name of this call, with parentheses, for ranks that wait in another one; "": they know of it.
        others: returns where the other ranks are, as the end of the text of a Timeout.
        turn: of the _native.Call of one round that this is; an interrupt before that is made calls for abort().

    Raises:
        BadInput, Mismatch, Timeout, PeerLost, Aborted, Unsupported: the error of this rank, or one that another rank
            announced.  KeyboardInterrupt and other exceptions that are no Exception pass unchanged.
    """
    opened = Opening(ranks, call, of, interruption, others)
    try:
        if turn is not None:
            turn.made += 1  # between this and the beginning of the block no signal handler runs
        with last_calls.noted(ranks.board, ranks.rank, note) if note and ranks.ranks > 1 else nullcontext():
            opened.begin(timeout_s)
            yield opened
    except MoecommError as error:
        opened.announce(error)
        raise
    except Exception as error:
        named = Unsupported(str(error) or type(error).__name__)
        opened.announce(named, joins=True)
        raise named from error
    except BaseException as error:
        opened.abort(error)
        raise
    finally:
        opened.close()


def abort(ranks: Group, call: str, of: str, error: BaseException) -> None:
    """End a call for the ranks that wait in it, or will: an interrupt has ended it on this rank before its opening().

    The arguments are those of that opening(), and the interrupt.
    """
    opened = Opening(ranks, call, of)
    try:
        opened.abort(error)
    finally:
        opened.close()


def gather(ranks: Group, data: bytes, timeout_s: float) -> list[bytes]:
    """Return the data of every rank, by rank, within `timeout_s`.  Collective; any number of bytes.

    Raises:
        As opening().
    """
    with opening(ranks, timeout_s) as opened:
        everybody = opened.all_gather(data)
        opened.settle()
    return everybody


class Opening:
    """The ranks of a Buffer that opens: a Rendezvous whose waits end in named errors.  See opening()."""

    def __init__(
        self,
        ranks: Group,
        call: str = "open",
        of: str = "",
        interruption: Callable[[], RoundFailed | None] = lambda: None,
        others: Callable[[], str] = lambda: "",
    ) -> None:
        self.rank, self.ranks, self.in_process = ranks.rank, ranks.ranks, ranks.in_process
        self._call, self._of, self._interruption, self._others = call, of, interruption, others
        self._kind = of or "Buffer" if call == "open" else "Buffer"
        self.timeout_s = _GRACE_S
        self._make = ranks.board
        self._board: Board | None = None  # one rank needs none
        self._attempt = self._step = 0
        self._begun: int | None = None  # openings of this group that this rank had begun before this one
        self._joined = self._decided = self._is_open = False
        self._absent: list[int] = []  # ranks that this one has waited for in vain
        self._deaths = Deaths()
        self._global_ranks = ranks.global_ranks
        self._lookout: strays.Lookout | None = None

    @property
    def number(self) -> int:
        """Number of this opening of the group: the same on every rank."""
        return self._attempt

    @property
    def during(self) -> str:
        """Return the moment of this phase, as the end of a sentence."""
        return f"while the {self._kind} was opened" if self._call == "open" else f"during {self._call}()"

    def begin(self, timeout_s: Any) -> None:
        """Find out which opening of these ranks this is.  Goes on where an interrupt has ended it.

        Raises:
            BadInput: no time that can be waited; peers of this opening learn of it.
            As opening(), for the store.
        """
        refused: BadInput | None = None
        try:
            self.timeout_s = seconds(timeout_s)  # first: a busy store may need it
        except BadInput as error:
            refused = error
        if self._board is None and self.ranks > 1:
            self._board = self._make()
        if (board := self._board) is not None:
            if not self.in_process and strays.withdraw():
                self._global_ranks = list  # those of the others may be withdrawn later
            key = f"begun/{self.rank}"
            begun: int = self._ask(None, board.count, key, 0)
            if self._begun is None:
                self._begun = begun
            if begun == self._begun:  # else an interrupt came before the answer
                by = self._next(board, begun) + 1 - begun
                begun = self._ask(None, board.count, key, by) + by
            self._attempt = begun - 1
            self._joined = True
        if refused is not None:
            raise refused

    def waiting(self) -> list[int]:
        """Return the ranks that wait in the next opening, which this rank has not begun.  Not collective."""
        if self.ranks == 1:
            return []
        self._board = board = self._make()
        self._attempt = self._next(board, self._ask(None, board.count, f"begun/{self.rank}", 0))
        if self._outcome() is not None:
            return []
        missing = self._missing(self._keys("0"), None)
        return [rank for rank in range(self.ranks) if rank not in missing]

    def _next(self, board: Board, begun: int) -> int:
        """Return the opening that a call of this rank belongs to, which has begun so many.

        It is the next one, but behind the last that peers gave up because they waited for this rank in vain.  Errors of
        others are for this rank, too, which may be late.
        """
        found = self._attempt = begun
        while True:
            (stands,) = self._ask(None, board.look, [f"{self._attempt}/outcome"])
            if stands in (None, _OPEN, OVERTAKEN):
                return found
            self._attempt += 1
            if stands == FORGOTTEN or self.rank in messages.unpack(stands, Failed).absent:
                found = self._attempt

    def all_gather(self, data: bytes) -> list[bytes]:
        """Return the data of every rank, by rank.  The ranks may pass different numbers of bytes.

        Raises:
            Timeout: a rank did not come within `timeout_s`.
            PeerLost: the process of a rank has ended, or the store of the process group is gone.
            BadInput, Mismatch, Aborted, Unsupported: announced by another rank.
        """
        board = self._board
        if board is None:
            return [data]
        first = self._step == 0
        # Openings of one group are counted together, so a rank may join one of another call.
        mine = f"{self._call}|{self._of}".encode()[:_CALL].ljust(_CALL, b"\0") if first else b""
        everybody = self._exchange(str(self._step), self._identity() + mine + data if first else data)
        self._step += 1
        if not first:
            return everybody
        if not self.in_process:
            self._watch([record[: _IDENTITY - _CALL] for record in everybody])
        passed = []
        for rank, record in enumerate(everybody):
            if (label := record[_IDENTITY - _CALL : _IDENTITY]) != mine:
                raise Mismatch("call", _shown(mine), _shown(label), rank)
            passed.append(record[_IDENTITY:])
        return passed

    def compare(self, mine: Mapping[str, object], beside: bytes = b"") -> list[bytes]:
        """Compare values of all ranks, by name.  Collective.

        Args:
            mine: of this rank, as errors show them: texts, numbers, and lists of these; the same names on all ranks.
            beside: what travels with them and may differ.

        Returns `beside` of all ranks, by rank.

        Raises:
            Mismatch: on every rank, with the first name whose values differ.
            As all_gather().
        """
        everybody = list(map(json.loads, self.all_gather(json.dumps([mine, beside.hex()]).encode())))
        for rank, (theirs, _) in enumerate(everybody):
            for name, value in mine.items():
                if theirs.get(name) != value:
                    raise Mismatch(name, value, theirs.get(name), rank)
        return [bytes.fromhex(passed) for _, passed in everybody]

    def settle(self) -> None:
        """End the block: return if the Buffer is open on all ranks, raise on all ranks if it is not.

        Raises:
            As all_gather().
        """
        board = self._board
        if board is None:
            return
        try:
            self._exchange("ready", b"")
        except RoundFailed as error:  # if a peer saw all ranks ready first, the Buffer is open
            if self._decide(error) != _OPEN:
                raise
        if (stands := self._ask(None, board.decide, f"{self._attempt}/outcome", _OPEN)) != _OPEN:
            raise self._announced(stands)
        self._is_open = True
        self._decided = True
        # All ranks are in this opening, so all have left the previous one.
        done = [f"{self._attempt}/{self._step - 1}/{self.rank}", f"{self._attempt - 1}/ready/{self.rank}"]
        if self.rank == 0:
            done.append(f"{self._attempt - 1}/outcome")
        with suppress(MoecommError):  # the Buffer is open; a peer that has the store may be gone already
            self._ask(None, board.erase, done)

    def check(self) -> None:
        """Raise the error that another rank announced, or PeerLost for a process that has ended."""
        if self._board is None:
            return
        if (stands := self._outcome()) not in (None, _OPEN):
            raise self._announced(stands)
        if (gone := self._deaths.first()) is not None:
            raise self._lost(gone)
        self._raise_interruption()

    def posted(self) -> list[bytes]:
        """Return the data that other ranks have passed to the next all-gather."""
        if self._board is None:
            return []
        keys = self._keys(str(self._step))
        del keys[self.rank]
        found = self._ask(None, self._board.look, keys)
        return [data[0 if self._step else _IDENTITY :] for data in found if data is not None]

    def announce(self, error: MoecommError, *, joins: bool = False) -> None:
        """Make the opening fail on all ranks that have not failed yet.

        `joins`: also if an interrupt, say, has ended begin(); peers wait in the opening that it would have found.
        """
        if joins and not self._joined:
            with suppress(MoecommError):
                self.begin(_GRACE_S)
        if self._joined and not self._decided:
            self._decide(error)

    def abort(self, error: BaseException) -> None:
        """Announce that an interrupt has ended this rank's call, wherever it was."""
        text = f"rank {self.rank} was ended by {type(error).__name__} {self.during}"
        self.announce(self.failed(Aborted, self.rank, text), joins=True)

    def is_open_despite(self, error: BaseException) -> bool:
        """Return whether all other ranks go on, after settle() has raised an error on this one.  Announce it if not."""
        if not self._joined or self._is_open or self._decided:
            return self._is_open
        text = f"rank {self.rank} was ended by {type(error).__name__} {self.during}"
        return self._decide(self.failed(Aborted, self.rank, text)) == _OPEN

    def failed(self, kind: type[RoundFailed], peer: int, text: str) -> RoundFailed:
        """Make an error of this opening; `peer`: the rank it is about, -1: not known."""
        phase = "opening" if self._call == "open" else "agreement"
        return kind(text, rank=self.rank, peer=peer, phase=phase, op=self._call, round=0)

    def close(self) -> None:
        """Free the board and the process descriptors."""
        self._deaths.close()
        if self._board is not None:
            self._board.close()

    def _identity(self) -> bytes:
        """Return 36 bytes: where our process id means something, and that.  Threads of one process need neither."""
        return bytes(36) if self.in_process else pid_namespace() + os.getpid().to_bytes(4, "little")

    def _keys(self, step: str) -> list[str]:
        """Return the keys of all ranks in a step, by rank."""
        return list(map(f"{self._attempt}/{step}/".__add__, map(str, range(self.ranks))))

    def _exchange(self, step: str, mine: bytes) -> list[bytes]:
        """Exchange the data of a step.  Looks for data before failures: a rank with all data goes on, as others did."""
        board = self._board
        assert board is not None
        keys, outcome = self._keys(step), f"{self._attempt}/outcome"
        # All ranks have been in the previous step, so all have read the one before that.
        read = f"{self._attempt}/{self._step - 2}/{self.rank}" if self._step > 1 else ""
        left, waits, begun = self.timeout_s, False, time.monotonic()
        deadline, next_look = begun + left, begun + min(left, _LOOK_S)
        while True:
            board.limit_s = left + _GRACE_S / 2
            try:
                if waits:
                    board.wait(min(left, _LOOK_S))
                else:
                    board.write(keys[self.rank], mine, read)
                everybody, stands = board.read_or(keys, outcome)
            except (TimeoutError, ConnectionError, RuntimeError) as error:
                raise self._board_failed(error) from error
            if everybody is not None:
                return everybody
            if stands == _OPEN:
                return []
            if stands is not None:
                raise self._announced(stands)
            if (gone := self._deaths.first()) is not None:
                raise self._lost(gone)
            if (now := time.monotonic()) >= next_look:
                self._raise_interruption()
                next_look = min(deadline, now + _LOOK_S)
            if step == "0" and self._call == "open":
                self._look_for_strays(keys, deadline)
            if (left := deadline - now) <= 0:
                raise self._late(keys, deadline)
            waits = True

    def _raise_interruption(self) -> None:
        if (interruption := self._interruption()) is not None:
            try:
                raise interruption
            finally:
                del interruption  # else it is in a cycle with its traceback, whose frames hold on to windows

    def _late(self, keys: list[str], deadline: float) -> RoundFailed:
        missing = self._missing(keys, deadline)
        if self._step == 0:
            self._absent = missing
        names = ", ".join(map(str, missing))
        begun = f"begun to open its {self._kind}" if self._call == "open" else f"called {self._call}()"
        what = begun if self._step == 0 else "come so far"
        text = f"rank {self.rank} waited {self.timeout_s:g} s for rank {names}, which has not {what} ({self.where})"
        text += self._others()
        return self.failed(Timeout, missing[0] if missing else -1, text)

    def _missing(self, keys: list[str], deadline: float | None) -> list[int]:
        assert self._board is not None
        return [rank for rank, value in enumerate(self._ask(deadline, self._board.look, keys)) if value is None]

    def _look_for_strays(self, keys: list[str], deadline: float) -> None:
        """Raise for a rank that has not come because its group is bad."""
        if self._lookout is None:
            self._lookout = strays.Lookout(self._global_ranks())
        if not self._lookout.is_due():
            return
        if (found := self._lookout.find(self._missing(keys, deadline))) is not None:
            rank, said = found
            fields = {"argument": "group", "got": said.got, "want": said.want, "rank": rank}
            raise self._announced(self._set_outcome(messages.pack(Failed("BadInput", rank, "", fields, [rank]))))

    def _lost(self, rank: int) -> RoundFailed:
        return self.failed(PeerLost, rank, f"rank {rank} is gone: its process has ended {self.during}")

    @property
    def where(self) -> str:
        """The end of the text of an error."""
        return "opening" if self._call == "open" else self._call

    def _watch(self, identities: list[bytes]) -> None:
        here = self._identity()[:32]
        pids = [int.from_bytes(data[32:], "little") if data[:32] == here else 0 for data in identities]
        pids[self.rank] = 0
        self._deaths.watch(pids)

    def _outcome(self) -> bytes | None:
        assert self._board is not None
        found: list[bytes | None] = self._ask(None, self._board.look, [f"{self._attempt}/outcome"])
        return found[0]

    def _decide(self, error: MoecommError) -> bytes:
        """Decide the outcome, unless a peer has; return the outcome."""
        return self._set_outcome(messages.pack(_record(error, self.rank, self._absent)))

    def _set_outcome(self, record: bytes) -> bytes:
        """Write the outcome, if the store can still be reached."""
        assert self._board is not None
        self._decided = True
        deadline = time.monotonic() + _GRACE_S
        try:
            return bytes(self._ask(deadline, self._board.decide, f"{self._attempt}/outcome", record))
        except MoecommError:
            return record

    def _ask(self, deadline: float | None, call: Callable[..., Any], *args: Any) -> Any:
        """Make a call of the board, whose errors are those of this opening; None: within `timeout_s`."""
        assert self._board is not None
        left = self.timeout_s if deadline is None else deadline - time.monotonic()
        self._board.limit_s = max(left, 0.0) + _GRACE_S / 2
        try:
            return call(*args)
        except (TimeoutError, ConnectionError, RuntimeError) as error:
            raise self._board_failed(error) from error

    def _board_failed(self, error: Exception) -> MoecommError:
        if isinstance(error, TimeoutError):
            text = f"rank {self.rank} waited {self.timeout_s:g} s: {error} ({self.where})"
            return self.failed(Timeout, -1, text)
        if isinstance(error, ConnectionError):
            # A process that ends closes its connections first.
            if (gone := self._deaths.first(_GRACE_S)) is not None:
                return self._lost(gone)
            text = f"the process that has the store of the process group is gone, as rank {self.rank} found ({error})"
            return self.failed(PeerLost, -1, text)
        return Unsupported(f"the store of the process group fails: {error}")

    def _announced(self, record: bytes) -> MoecommError:
        """Make the error that another rank has announced, as this rank raises it."""
        self._decided = True
        if record in (FORGOTTEN, OVERTAKEN):
            text = f"the other ranks have gone on without rank {self.rank} ({self.where})"
            return self.failed(Timeout, self.rank, text)
        said = messages.unpack(record, Failed)
        rank, fields = said.rank, said.fields
        if said.kind == "BadInput":
            named = fields["rank"] if fields["rank"] is not None else rank
            return BadInput(fields["argument"], fields["got"], fields["want"], named)
        kind = getattr(errors, said.kind, Unsupported)
        text = said.text if said.text.startswith(f"rank {rank}") else f"rank {rank}: {said.text}"
        if issubclass(kind, RoundFailed):
            return self.failed(kind, fields["peer"], text)  # type: ignore[arg-type]
        error: MoecommError = kind.__new__(kind, text)
        error.__dict__.update(fields)
        return error


def _record(error: MoecommError, rank: int, absent: list[int]) -> Failed:
    fields = {
        name: value if value is None or isinstance(value, int) else str(value)[:_TEXT]
        for name, value in vars(error).items()
    }
    return Failed(type(error).__name__, rank, str(error)[:_TEXT], fields, absent)


def _shown(label: bytes) -> str:
    call, of = label.rstrip(b"\0").decode(errors="replace").split("|")
    return f"{call} of {of}" if of else call
