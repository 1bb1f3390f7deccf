"""The errors of moecomm, with the action that each asks for."""

from __future__ import annotations

from typing import Any


class MoecommError(RuntimeError):
    """Base of all errors of moecomm.  pickle keeps their text and fields, so they can travel between processes."""

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (type(self), self.args), self.__dict__


def _rebuild(kind: type[MoecommError], args: tuple[Any, ...]) -> MoecommError:
    return kind.__new__(kind, *args)


class BadInput(MoecommError, ValueError):
    """An argument can't be used.  Names the argument, the value, and the values that can be used.

    Raised where it is found: at once for errors that the host can see, at the next host-visible point for errors that
    only the device can see (expert ids, rows that do not fit).  The Buffer stays usable.
    """

    def __init__(self, argument: str, got: object, want: object, rank: int | None = None) -> None:
        where = "" if rank is None else f" (rank {rank})"
        super().__init__(f"{argument}{where}: got {got}; want {want}")
        self.argument, self.got, self.want, self.rank = argument, got, want, rank


class TooManyRows(BadInput):
    """More rows arrived at a rank than its output has room for.  No row has moved, and the Buffer stays usable.

    Attributes:
        rows: that would have arrived; batched: for one expert.
        room: for rows.
        round: number of the round.
    """

    def __init__(self, rows: int, room: int, round: int, rank: int) -> None:  # noqa: A002
        want = f"at most the {room} there is room for: max_rows=, or capacity_factor= of the Buffer, makes more"
        super().__init__("max_rows", f"{rows} rows arriving", want, rank)
        self.rows, self.room, self.round = rows, room, round


class Mismatch(MoecommError):
    """Ranks disagree on a setting or are out of step."""

    def __init__(self, field: str, mine: object, theirs: object, rank: int) -> None:
        super().__init__(f"{field}: this rank has {mine}, rank {rank} has {theirs}; all ranks must agree")
        self.field, self.mine, self.theirs, self.rank = field, mine, theirs, rank


class OutOfStep(Mismatch):
    """Later rounds would pair calls that do not belong together: a call failed on some ranks only, or calls differed.

    No output of such a round is returned, and the Buffer can only be closed.
    """

    def __init__(self, mine: int, theirs: int, rank: int, what: str = "Buffer") -> None:
        super().__init__("calls", mine, theirs, rank)
        self.args = (
            f"calls: {mine} failed on this rank before they reached the others, {theirs} on rank {rank}, so the ranks "
            f"are out of step; close this {what} on every rank and open another",
        )

    @classmethod
    def after(cls, error: Mismatch, what: str = "Buffer") -> OutOfStep:
        """Make the error of calls after a round in which those of the ranks differed."""
        found = cls(0, 0, error.rank, what)
        found.field, found.mine, found.theirs = error.field, error.mine, error.theirs
        found.args = (
            f"calls: an earlier round failed, because the ranks made different calls ({error}); they may be out of "
            f"step since; close this {what} on every rank and open another",
        )
        return found


class ConcurrentCall(MoecommError):
    """A Buffer is for one thread at a time, and another call of it is under way, which goes on.

    The refused call counts as one that failed on this rank: unless it was refused on every rank, the next round raises
    OutOfStep.  check() and dispatch_end() do not count, and can be called again.
    """

    def __init__(self, what: str = "Buffer") -> None:
        super().__init__(
            f"this {what} is in another call; let one thread at a time use it, or open a {what} for each thread"
        )


class RoundFailed(MoecommError):
    """A round did not finish.  No output of it is returned.  Close the Buffer, or go on: shrink(), mask()."""

    repeats = False  # all ranks that are left make the call again: Buffer(on_timeout="mask")

    def __init__(self, text: str, *, rank: int, peer: int, phase: str, op: str, round: int) -> None:  # noqa: A002
        super().__init__(text)
        self.rank, self.peer, self.phase, self.op, self.round = rank, peer, phase, op, round


class Timeout(RoundFailed):
    """A peer did not do its part before the deadline."""


class PeerLost(RoundFailed):
    """A peer is known to be gone: its process ended, or it closed its Buffer."""


class Aborted(RoundFailed):
    """abort() was called, or Ctrl-C pressed, on this rank or a peer."""


class CorruptRow(MoecommError):
    """A row is not what its source rank sent, as a verified round found: see `verify_every` of Buffer.

    Raised on every rank.  No output of the round is returned, and the Buffer stays usable.

    Attributes:
        op, round: the operation, and the number of its round.
        source: the rank that sent the row; of a combine between domains, that may be a forwarder.
        destination: the rank at which it arrived.
        token_rank, token: the rank of the row's token, and its number there.
        path: how rows go from `source` to `destination`.
    """

    def __init__(
        self,
        *,
        op: str,
        round: int,  # noqa: A002
        source: int,
        destination: int,
        token_rank: int,
        token: int,
        path: str,
    ) -> None:
        super().__init__(
            f"{op}, round {round}: the row of token {token} of rank {token_rank} is not what rank {source} sent to "
            f"rank {destination} ({path})"
        )
        self.op, self.round, self.source, self.destination = op, round, source, destination
        self.token_rank, self.token, self.path = token_rank, token, path


class CorruptWeights(MoecommError):
    """A tensor of an expert is not what its rank sent, as the receiver's hash shows: see WeightTransfer.stage.

    Raised on every rank.  No rank has other weights than before, and stage() can be called again.

    Attributes:
        expert, name: of the tensor.
        source: the rank that sent it.
        destination: the rank at which it arrived.
    """

    def __init__(self, *, expert: int, name: str, source: int, destination: int) -> None:
        super().__init__(
            f"tensor {name!r} of expert {expert} is not what rank {source} sent to rank {destination}; the weights in "
            "use are as before"
        )
        self.expert, self.name, self.source, self.destination = expert, name, source, destination


class Excluded(MoecommError):
    """The other ranks have gone on without this one, which was late or was taken for lost.  The Buffer can be closed.

    If they have masked this rank, unmask() takes it in again.

    Attributes:
        rank: this one.
        ranks: those that go on, by their numbers before; empty if not known.
    """

    def __init__(self, rank: int, ranks: tuple[int, ...]) -> None:
        others = f"with ranks {', '.join(map(str, ranks))}" if ranks else "without it"
        super().__init__(f"rank {rank} is no longer of this Buffer, which goes on {others}")
        self.rank, self.ranks = rank, ranks


class Closed(MoecommError):
    """The Buffer, or the handle's Buffer, has been closed, or was opened before this process was forked."""

    def __init__(self, what: str = "Buffer") -> None:
        super().__init__(f"this {what} is closed; open a new one")


class MemoryReleased(MoecommError):
    """release_memory() has given the Buffer's memory back, and restore() has not been called since."""

    def __init__(self) -> None:
        super().__init__(
            "the memory of this Buffer is released; call restore() on every rank first, or shrink() if one is lost"
        )


class Unsupported(MoecommError):
    """The request can't run here.  Names the first thing that is missing."""
