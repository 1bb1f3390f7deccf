"""Growth by agreement: all ranks enlarge their windows ahead of a round that takes more than the reserve.

A rank can use memory that it adds to its window only after all peers have mapped it.  So the ranks first make three
rounds without rows:

1. After the first round, each rank knows how many bytes every rank needs.  It takes memory and offers it to its peers.
2. After the second, all offers are there.  Each rank maps them.
3. After the third, each rank knows whether all ranks have memory and have mapped that of their peers.

A rank that is lost, interrupted or closed, or that makes another call, ends these rounds as it ends any round.

Every rank has to make them.  No rank asks for them: each computes the bytes of the rank that needs most
(DispatchPlan.largest_bytes), and all get the same number.  `max_rows=` does not count, because ranks may pass different
ones.  In a window of the default size, ranks agree on room for all rows whatever `max_rows=` says.  Where the caller
gives `window_bytes=`, or a `max_rows=` above the default room, a rank looks for room in its own window first.
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
    """Make room on all ranks for a round of `nbytes`, those of the rank that needs most.  Collective.

    Returns:
        True if there is room.  False, with nothing changed, if this window cannot grow by agreement, for instance in a
        capture or beside masked ranks.

    Raises:
        BadInput: some rank has no memory, or cannot map that of a peer; on every rank alike.
        MoecommError: as any round.
    """
    session, memory = rounds.session, rounds.memory
    if not session.agrees or rounds.masked or session.capturing():
        return False
    alone = rounds.driven  # no meetings: one thread makes the calls of all ranks, one rank after the other
    ranks = (rounds.rank,) if alone else range(rounds.num_ranks)
    meet = (lambda: None) if alone else partial(_meet, rounds)
    more = memory.next_size  # larger than needed, so that sizes that rise step by step need few agreements
    found = session.grow(max(nbytes, more), memory, ranks, meet)
    if found is None and more > 0:  # `more` is the same on all ranks, so all of them try again
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
    args, owner = small.of_no_token()  # `owner` holds the memory of the round until it has ended
    small.run(args)
    rounds.wait()
    rounds.raise_failure()
    del owner
