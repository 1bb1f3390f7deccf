"""A meeting of ranks over a store: they agree on a name for it that no earlier one had."""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Sequence
from typing import Any

from moecomm.errors import Timeout

_POLL_S = 2e-3


def meet(store: Any, rank: int, ranks: Sequence[int], timeout_s: float) -> str:
    """Wait until all of `ranks` have come, and return the meeting's name.  Collective among them.

    Each rank brings a ticket of its own making.  The first rank answers with a name and the tickets that it has seen,
    and calls again whenever it sees another ticket: one that it saw first may be of a process that has ended since.
    The name counts once every rank has found its own ticket beside it.

    Args:
        store: a torch.distributed.Store that outlives the ranks.
        rank: of this process, one of `ranks`.
        ranks: in order; alike on all of them.
        timeout_s: for the ranks to come.

    Raises:
        Timeout: a rank did not come.
    """
    here, first, deadline = f"moecomm/nixl_ep/{'-'.join(map(str, ranks))}", ranks[0], time.monotonic() + timeout_s
    seen: dict[int, str] = {}
    name, mine = "", uuid.uuid4().hex
    if rank != first:
        store.set(f"{here}/ticket/{rank}", mine)
    while True:
        if rank == first:
            tickets = {other: _read(store, f"{here}/ticket/{other}") for other in ranks if other != first}
            missing = [other for other, ticket in tickets.items() if not ticket]
            if not missing:
                if tickets != seen:
                    seen, name = tickets, f"{here}/{mine}/{uuid.uuid4().hex}"
                    store.set(f"{here}/call", json.dumps([name, seen]))
                missing = [other for other in seen if not _read(store, f"{name}/found/{other}")]
                if not missing:
                    for other in seen:
                        store.set(f"{here}/ticket/{other}", "")
                    store.set(f"{name}/met", "1")
                    return name
        else:
            missing = [first]
            called, tickets_there = json.loads(_read(store, f"{here}/call") or '["", {}]')
            if tickets_there.get(str(rank)) == mine:
                if called != name:
                    name = called
                    store.set(f"{name}/found/{rank}", "1")
                if _read(store, f"{name}/met"):
                    return name
        if time.monotonic() > deadline:
            raise Timeout(
                f"connect_ranks: rank {missing[0]} did not come within {timeout_s:g} s",
                rank=rank,
                peer=missing[0],
                phase="opening",
                op="connect_ranks",
                round=0,
            )
        time.sleep(_POLL_S)


def _read(store: Any, key: str) -> str:
    """Return a value, empty if there is none yet.  Does not wait."""
    return bytes(store.get(key)).decode() if store.check([key]) else ""
