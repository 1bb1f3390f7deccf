"""State of a Buffer between rounds: its failure, the call under way, and calls that failed on this rank alone."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any, NoReturn, TypeVar, cast

from moecomm import _native
from moecomm.base import bound
from moecomm.errors import (
    Closed,
    ConcurrentCall,
    CorruptRow,
    Excluded,
    MemoryReleased,
    Mismatch,
    MoecommError,
    OutOfStep,
    RoundFailed,
    Timeout,
)
from moecomm.ranks import last_calls
from moecomm.ranks.group import Members
from moecomm.ranks.session import Session
from moecomm.rounds import corruption, failures, signature
from moecomm.rounds.flight import Failure, FlightRecorder, shown
from moecomm.rounds.spans import span

_Function = TypeVar("_Function", bound=Callable[..., Any])
_Result = TypeVar("_Result")
_Call = _native.Call

NOT_TRACED = (
    "dispatch, combine and moe of a moecomm.Buffer cannot be part of a graph of torch.compile: use moecomm.ops, whose "
    "operators can"
)


class RoundState:
    """Base of Rounds: the failure that ended a Buffer, and how many of its calls have reached the other ranks."""

    members: Members  # the ranks, as they agree on later calls

    def __init__(self, session: Session) -> None:
        self.session = session  # that the backend has opened
        self._record = session.context.record
        self.flight = FlightRecorder(session.context.rank, session.capturing, session.synchronous)
        self._failure: MoecommError | None = None  # has ended this Buffer
        self.offers, self._admitted = session.offers, 0
        self._close: weakref.finalize[..., Any] = bound.closer(self, session)
        self._open = True
        self.plain = False  # nothing but the arguments of the call under way may ask for more than KnownCalls does
        self._forked = False  # this is a child's copy, whose locks may be held by threads that are not there
        self.released = False  # the memory of outputs, by release_memory()
        self._what = "Buffer"
        self.turn = _native.Turn()  # of the thread that is in a collective call
        self.calls = 0  # with rounds, since ranks last agreed on a mask
        self._before = 0  # number of the last round before the call under way
        self.attempts = 0  # to agree with the ranks that are left: see moecomm.membership.meeting
        self.masked: frozenset[int] = frozenset()  # ranks that take no part, see moecomm.membership.masking
        self.recover: Callable[[RoundFailed], None] | None = None  # after a rank is lost: on_timeout="mask"
        self.unfinished: list[object] = []  # memory that peers write to in a dispatch that is under way or has failed
        self._raised: Callable[[], MoecommError | None] = lambda: None  # the last error that a round left behind

    def _begin_call(self, rounds: int, nested: bool, note: object) -> None:
        if rounds and not nested:
            if self._failure is None:
                self.unfinished.clear()
            self.calls += 1
            self._before = self.flight.rounds
        self.plain = self._open and self._failure is None and not self.released and self.flight.spans is None

    def _interrupted(self, error: BaseException | None, note: object = None) -> None:
        """End the waits of peers for a call that ends without its rounds, if a signal handler may have raised `error`.

        None: an error that is not known, between two instructions.
        """
        if not self._open or self._failure is not None or self.session.context.shape.ranks - len(self.masked) < 2:
            return
        if error is None or failures.is_interrupt(error):
            self.session.abort_all()

    def _call_failed(self, error: BaseException, missed: bool, note: str | None) -> None:
        """Count a call that missed its round, for _native.Call.  `note`: the name of the call."""
        if missed:
            self.count_rejected(error, note or "")

    def count_round(self) -> None:
        """Count a round that has been started, whose error every rank raises.  A call that has made all is complete."""
        self.turn.made += 1

    def expect_more(self, more: bool = True) -> None:
        """Say whether the call under way is yet to make rounds beyond those that it has announced.

        It counts as failed if it ends meanwhile.
        """
        self.turn.several = more

    def admit(self) -> None:
        """Map memory that peers have taken since, if any, for later rounds."""
        if self.offers is None or not self._open or self.released or self.offers.value == self._admitted:
            return
        if not self.session.capturing():
            self._admitted = self.session.admit()

    def close(self) -> None:
        """Give the memory back.  Idempotent; outputs that are still referenced stay valid.

        A call in another thread is aborted and awaited.  In a signal handler, the interrupted call is aborted, and
        closes the Buffer when it ends.
        """
        if self._forked:
            return
        with _native.AwaitedTurn(self.turn, self.abort):
            if self.turn.running:
                self.turn.closing = True
                self.abort()
            else:
                self._release()

    def retire(self) -> None:
        """Close, and let go of the failure: its traceback refers to frames, and these to outputs in the window."""
        self.close()
        self._failure = None

    def abort(self) -> None:
        """End every wait of this rank at once, from any thread."""
        if self._open:
            self.session.abort(failures.Failure.aborted, self.session.context.rank)

    def _release(self) -> None:
        self._open = False
        self.flight.closed = True
        if self.flight.spans is not None:
            self.flight.spans.finish()
        bound.run(self._close)

    def _refuse(self) -> NoReturn:
        if self._forked:
            raise Closed(self._what)
        raise ConcurrentCall

    def _count_refused(self) -> None:
        while self.turn.uncounted > 0:
            if self._open and self._failure is None:
                self.flight.reject("", None)
                self.session.count_rejected()
            self.turn.counted()

    def count_rejected(self, error: BaseException | None = None, call: str = "") -> None:
        """Count a collective call that fails on this rank before all its rounds are made.

        The round headers of later rounds carry the count.  Where counts differ, every rank raises OutOfStep.

        Args:
            error: why it fails, where that is known.
            call: its name, likewise.
        """
        if self._open and self._failure is None and not isinstance(error, RoundFailed):  # ranks have agreed since
            self.flight.reject(call, error)
            self.session.count_rejected()
            self.turn.failed += 1  # last: an interrupt may let a call count twice, but not never
            if error is not None:
                self.leave_error(error)

    def leave_error(self, error: BaseException) -> None:
        """Leave an error for ranks that will wait for this one in vain."""
        if self._open and self.session.pages is not None:
            self.session.pages.leave_error(shown(error), self.flight.rounds)

    def count_failed(self) -> None:
        """Count a rejected call, outside of any call; if another call is under way, the next call counts it."""
        try:
            with _Call(self, 0):
                self.count_rejected()
        except (ConcurrentCall, Closed):
            self.turn.miss()

    def require_usable(self) -> None:
        """Raise Closed, or the error that earlier rounds left behind.  Does not wait for the device."""
        if not self._open or self._failure is not None or self.released:
            self.require_open()
        if _native.record(self._record) is not None:
            self.raise_failure()

    def require_open(self) -> None:
        """Raise Closed, MemoryReleased, or the failure that has ended the Buffer."""
        self.require_alive()
        if self.released:
            raise MemoryReleased

    def require_alive(self) -> None:
        """Raise Closed, or the failure that has ended the Buffer."""
        if not self._open:
            raise Closed(self._what)
        if self._failure is not None:
            raise self._failure

    def fail(self, error: MoecommError) -> None:
        """End the Buffer: its ranks no longer agree on its state."""
        self._failure = error
        self.flight.failed(error)
        self.flight.announce(error)

    def raise_failure(self, *, recovers: bool = True) -> None:
        """Raise the error that the last rounds left behind: once, unless a failed round has ended the Buffer.

        `recovers`: first mask the lost ranks, if the Buffer has on_timeout="mask".
        """
        if self._failure is not None:
            raise self._recovered(self._failure) if recovers else self._failure
        record = _native.record(self._record)
        if record is None:
            return
        error = self._error_of(record)
        if isinstance(error, Timeout):
            error.args = (f"{error}{last_calls.others(self.ranks, in_rounds=False)}",)
        self.flight.failed(error, failures.fields(record))
        if isinstance(error, (RoundFailed, OutOfStep, Excluded)):
            self._failure = error
        else:
            _native.clear_record(self._record)
            self.unfinished.clear()  # no rank writes to it any more
            if isinstance(error, Mismatch) and error.field != signature.GROW:
                self._failure = OutOfStep.after(error)  # the next calls of the ranks may differ by one
        if isinstance(error, (RoundFailed, CorruptRow)) or (
            isinstance(error, Mismatch) and error.field != signature.GROW
        ):
            self.flight.announce(error)
        self._raised = weakref.ref(error)
        try:
            raise self._recovered(error) if recovers else error
        finally:
            del error  # else it is in a cycle with its traceback, whose frames hold on to the window

    def _recovered(self, error: MoecommError) -> MoecommError:
        """Mask the ranks that are lost, if that is wanted and can be done now; return the error."""
        if self.recover is not None and isinstance(error, RoundFailed) and not self.session.capturing():
            recover, self.recover = self.recover, None  # it looks for failures itself
            try:
                recover(error)
            finally:
                self.recover = recover
        return error

    def recovered(self) -> None:
        """Forget the failure: the ranks have agreed to go on."""
        self._failure = None

    @property
    def repeatable(self) -> bool:
        """True if a call under way can be made again: all its rounds have ended, and no earlier one has failed.

        On GPUs a call may raise the failure of rounds before it, which nobody has waited for.  Replays are not counted.
        """
        if not (self.turn.running or self.turn.depth > 0) or not isinstance(self._failure, RoundFailed):
            return False
        return not self.flight.replays and self._failure.round > self._before

    def unraised(self) -> Failure | None:
        """Return the failure that rounds have left behind and no call has raised yet.  Leaves it there."""
        record = None if self._failure is not None or not self._open else _native.record(self._record)
        if record is None:
            return None
        error = self._error_of(record)
        return self.flight.failure_of(error, failures.fields(record))

    def _error_of(self, record: _native.FailureRecordView) -> MoecommError:
        found = corruption.error_of(record, self.session, self.masked)
        if found is not None:
            return found
        pages, peer = self.session.pages, record.peer
        last = "" if pages is None or peer == record.rank else pages.error_before(peer, record.round)
        return failures.error_of(record, self.session.dead_peers(), last)

    def failure(self) -> MoecommError | None:
        """Return the error that raise_failure() would raise, if any."""
        try:
            self.raise_failure(recovers=False)
        except MoecommError as error:
            return error
        return None

    @property
    def ranks(self) -> last_calls.Ranks:
        """The ranks as they are now."""
        return last_calls.Ranks(self.session, self.members, self.masked)

    @property
    def closed(self) -> bool:
        """Return whether close() has been called."""
        return not self._open

    @property
    def failed(self) -> bool:
        """Return whether a failed round is known to have ended the Buffer.  Does not look for a new failure."""
        return self._failure is not None

    def disown(self) -> None:
        """Close a parent's Buffer in a forked child, without a word to peers."""
        self._open, self._forked, self.flight.closed = False, True, True
        if self._close.detach() is not None:
            self._what = "Buffer, opened before this process was forked,"


def not_traced(function: Callable[..., Any]) -> None:
    """Mark a function at which torch.compile breaks the graph, with a reason that names moecomm.ops.

    torch.compiler.disable sets these attributes on a wrapper, whose time every call would pay.
    """
    function._torchdynamo_disable = True  # type: ignore[attr-defined]
    function._torchdynamo_disable_msg = NOT_TRACED  # type: ignore[attr-defined]


def collective(rounds: int = 1) -> Callable[[_Function], _Function]:
    """Decorate a function of Rounds, its first argument, that makes `rounds` dispatches and combines.

    It raises ConcurrentCall while another call is under way, and is counted if it fails before its last round.
    """

    def decorate(function: _Function) -> _Function:
        name = function.__name__

        @functools.wraps(function)
        def call(state: RoundState, *args: Any, **kwargs: Any) -> Any:
            with _Call(state, rounds, name):
                if state.flight.spans is not None:
                    with span(state.flight.spans, name):
                        state.admit()
                        return function(state, *args, **kwargs)
                if state.offers is not None:
                    state.admit()
                return function(state, *args, **kwargs)

        not_traced(call)
        return cast("_Function", call)

    return decorate


def CollectiveCall(state: RoundState, rounds: int = 1) -> _native.Call:
    """Return the context of a call that consists of others, with `rounds` dispatches and combines in all.

    As collective().  A call inside that fails counts itself.
    """
    return _native.Call(state, rounds, None, True)


def several_rounds(state: RoundState, make: Callable[[], _Result]) -> _Result:
    """Make rounds whose number is not known ahead, in a call, which counts as failed if it ends before the last one.

    Not if a round has left the error behind, because every rank raises that.
    """
    state.expect_more()
    found = make()
    state.expect_more(False)
    return found
