"""Growth by agreement: windows whose peers map further memory late get room for a larger round before it begins.

Memory that a rank adds to its window can be used when all peers have mapped it, in calls after those in which they do.
So before a round that takes more than the reserve, all ranks make three rounds without rows.  After the first, each
rank knows what every rank needs; after the second, each has offered its memory; after the third, each knows whether all
have mapped it.  A rank that is lost, interrupted or closed, or that makes another call, ends them as it ends any round.

All ranks come, because each works out by itself what the rank that needs most takes (DispatchPlan.largest_bytes) unless
a caller bounds the rows.  `max_rows=` may differ between ranks, so it is no reason to come: in a window of the default
size ranks agree on the room for all rows all the same, and where `window_bytes=` is given, or `max_rows=` is for more
rows than there is room for by default, a rank first looks for room of its own.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TypeVar

from moecomm.dispatch.small import small_dispatch
from moecomm.errors import BadInput
from moecomm.rounds.rounds import Rounds

_Blocks = TypeVar("_Blocks")


def grow(rounds: Rounds, nbytes: int) -> bool:
    """Make room on all ranks for a round of so many bytes, of the rank that needs most.  Collective.

    Returns:
        False: the window can't grow by agreement, for instance in a capture or beside masked ranks.  Nothing has
            happened then.

    Raises:
        BadInput: some rank has no memory for it; on every rank alike.
        MoecommError: as any round.
    """
    session, memory = rounds.session, rounds.memory
    if not session.agrees or rounds.masked or session.capturing():
        return False
    alone = rounds.driven  # the other ranks launch their rounds later
    ranks = (rounds.rank,) if alone else range(rounds.num_ranks)
    meet = (lambda: None) if alone else partial(_meet, rounds)
    more = memory.next_size  # else rounds that get larger step by step would take all memory
    found = session.grow(max(nbytes, more), memory, ranks, meet)
    if found is None and more > 0:  # on all ranks, whatever each needs
        found = session.grow(nbytes, memory, ranks, meet)
    if found is None:
        raise memory.no_room(nbytes)
    memory.grown(*found)
    return True


def room(rounds: Rounds, nbytes: int, allocate: Callable[[], _Blocks]) -> _Blocks:
    """Return blocks for a round that takes `nbytes`; where there are none, agree on a larger window first.

    Raises:
        BadInput, MoecommError: see grow(); BadInput on this rank alone where the window can't grow by agreement.
    """
    try:
        return allocate()
    except BadInput:
        if not grow(rounds, nbytes):
            raise
    return allocate()


def _meet(rounds: Rounds) -> None:
    """Make a round without rows, and wait for it: no rank returns before all have come."""
    small = small_dispatch(rounds, "flat", repeat=False, grows=True)
    args, owner = small.of_no_token()  # which holds the memory of the round until it has ended
    small.run(args)
    rounds.wait()
    rounds.raise_failure()
    del owner
