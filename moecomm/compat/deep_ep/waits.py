"""deep_ep's statistics of waits for peers, which DeepXTrace reads, from the counters of rounds.

deep_ep adds up the cycles that its warps wait for each source rank.  Here they are nanoseconds, of one thread a peer,
for its round header and for its rows.  DeepXTrace compares ranks with each other, so it needs no unit.
"""

from __future__ import annotations

from typing import Literal

import torch

from moecomm.base.arrays import check_tensor
from moecomm.base.protocol import PEER_COUNTERS, SCALAR_COUNTERS
from moecomm.compat.deep_ep.pool import check_dimensions
from moecomm.errors import BadInput
from moecomm.observe.stats.counters import WAITS
from moecomm.rounds.rounds import Rounds

_FIRST_WAIT = PEER_COUNTERS - len(WAITS)


class WaitCost:
    """Adds to a caller's tensor what rounds wait for each peer.  On the current stream; a graph can capture it.

    Args:
        name: of the argument.
        total: int64 `[R]`.
        ranks: of the group.
        device: of the rounds.
    """

    def __init__(self, name: str, total: torch.Tensor, ranks: int, device: torch.device) -> None:
        check_dimensions(name, total, "ranks")
        check_tensor(name, total, device=device, dtypes=(torch.int64,), shape=(ranks,))
        if not total.is_contiguous():
            raise BadInput(name, "a tensor with gaps", "a contiguous one")
        self._total = total

    def before(self, rounds: Rounds, phase: Literal["dispatch", "combine"]) -> None:
        """Note the waits before a round, or a half of one."""
        self._begun = _waited(rounds, phase)

    def after(self, rounds: Rounds, phase: Literal["dispatch", "combine"]) -> None:
        """Add the waits of the round."""
        self._total.add_(_waited(rounds, phase) - self._begun)


def _waited(rounds: Rounds, phase: Literal["dispatch", "combine"]) -> torch.Tensor:
    """Return a new tensor, int64 `[R]`: the time that this rank has waited for headers and for such rows."""
    ranks = rounds.num_ranks
    peers = rounds.session.counters()[SCALAR_COUNTERS : SCALAR_COUNTERS + PEER_COUNTERS * ranks].view(-1, ranks)
    return peers[_FIRST_WAIT] + peers[_FIRST_WAIT + WAITS.index(phase)]
