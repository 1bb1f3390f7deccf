"""Suspension: a Buffer gives its memory back while its ranks do other work, and takes it again at the same addresses.

Both calls are collective and end like an opening (moecomm/ranks/opening.py).  A rank gives its memory back only when
all ranks have finished their rounds, because peers read and write it in a round.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from moecomm import _native
from moecomm.errors import Aborted, BadInput, MoecommError, PeerLost, RoundFailed
from moecomm.ranks import last_calls
from moecomm.ranks.opening import Opening, opening
from moecomm.rounds.failures import Failure
from moecomm.rounds.rounds import Rounds
from moecomm.rounds.state import collective

_CULPRIT = 1 << 16  # an abort word is the cause times this, plus the culprit's rank plus 1: csrc/protocol/record.h


class Suspension:
    """Release and restore of a Buffer's memory of outputs."""

    def __init__(self, rounds: Rounds) -> None:
        self._rounds = rounds

    @property
    def released(self) -> bool:
        return self._rounds.released

    def release(self) -> None:
        _release(self._rounds)

    def restore(self) -> None:
        _restore(self._rounds)


@collective(rounds=0)
def _release(rounds: Rounds) -> None:
    rounds.require_alive()
    if rounds.released:
        return
    session = rounds.session
    session.require_releasable()
    if rounds.masked:
        raise BadInput("release_memory", f"masked ranks {sorted(rounds.masked)}", "no masked rank: all take part")
    with agreement(rounds, "release_memory") as ranks:
        refuse_capture(rounds, "release_memory")
        session.synchronize()
        rounds.raise_failure()
        rounds.check_parts()
        _require_no_outputs(rounds)
        ranks.all_gather(b"")  # no rank is in a round any more, and none begins one
        rounds.released = True
        rounds.release_parts()
        session.release(ranks)
        ranks.settle()


@collective(rounds=0)
def _restore(rounds: Rounds) -> None:
    rounds.require_alive()
    if not rounds.released:
        return
    with agreement(rounds, "restore") as ranks:
        ranks.all_gather(b"")
        rounds.session.restore(ranks)
        ranks.settle()
    rounds.released = False


def refuse_capture(rounds: Rounds, call: str) -> None:
    """Raise BadInput for a call of a Buffer during a capture."""
    if rounds.session.capturing():
        raise BadInput(call, "a call during a capture", "a call outside of it")


def exchange(rounds: Rounds, call: str) -> AbstractContextManager[Opening]:
    """Open the agreement on a call that changes nothing that rounds need: if it fails, the Buffer goes on."""
    return opening(
        rounds.members.group,
        rounds.members.timeout_s,
        call,
        f"Buffer {rounds.members.number} of the group",
        lambda: interruption(rounds, call),
        note=f"{call}()",
        others=lambda: last_calls.others(rounds.ranks),
    )


@contextmanager
def agreement(rounds: Rounds, call: str) -> Iterator[Opening]:
    """Open the agreement on a call that changes what rounds need.

    If it fails so that some ranks may have released or restored memory, and others not, the Buffer ends.  A refusal is
    no such failure: it comes before the first exchange, or all ranks undo what they have done.
    """
    before = rounds.released
    try:
        with exchange(rounds, call) as ranks:
            yield ranks
    except MoecommError as error:
        if isinstance(error, RoundFailed) or rounds.released != before:
            rounds.fail(error)
        raise
    except BaseException:  # an interrupt, which the opening announces to the other ranks
        rounds.abort()
        raise


def _require_no_outputs(rounds: Rounds) -> None:
    if rounds.memory.held:
        gc.collect()  # outputs may be in cycles, with the traceback of an error for instance
    if held := rounds.memory.held:
        want = "none: delete the tensors and handles of earlier rounds first"
        raise BadInput("outputs", f"{held} bytes of the window that are still referenced", want)


def interruption(rounds: Rounds, call: str) -> RoundFailed | None:
    """Return the error that the abort word asks for: abort() of this rank, or the end of a peer's process."""
    context = rounds.session.context
    word = _native.read_word(context.abort_host)
    if word == 0:
        return None
    cause, culprit = word // _CULPRIT, word % _CULPRIT - 1
    known: dict[str, Any] = {"rank": context.rank, "peer": culprit, "phase": "agreement", "op": call, "round": 0}
    if cause == Failure.peer_lost:
        why = rounds.session.dead_peers().get(culprit, "its process has ended")
        return PeerLost(f"rank {culprit} is gone (noticed by rank {context.rank} in {call}): {why}", **known)
    by = "abort() or an interrupt" if culprit == context.rank else f"rank {culprit}"
    return Aborted(f"rank {context.rank} was stopped by {by} ({call})", **known)
