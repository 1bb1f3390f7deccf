"""Buffers that are about to wrap the tags of their rounds, as after days of work."""

from __future__ import annotations

import ctypes

from moecomm.testing import LocalBuffers

ROUNDS = 1 << 31  # after so many tags begin again: csrc/protocol/signal.h


def wrap_after(ranks: LocalBuffers, rounds: int, *, kernels: bool = False) -> None:
    """Leaves so many rounds before the tags wrap, at least two; before the first round of CPU ranks.

    `kernels`: they add to the signals of mail what a round is worth; a link adds what is missing to the value it sets.
    """
    begun = ROUNDS - 1 - rounds
    for buffer in ranks.buffers:
        context = buffer.rounds.session.context
        window = context.peers[buffer.rank]
        ctypes.c_uint32.from_address(window + context.window.state).value = begun
        if kernels and buffer.domain_ranks < buffer.num_ranks:  # tagged_words_value of the last round, by sender
            values = (ctypes.c_uint64 * buffer.num_ranks).from_address(window + context.window.signals)
            values[:] = [(2 * begun) << 32] * buffer.num_ranks


def rounds_since_wrap(ranks: LocalBuffers) -> list[int]:
    """How many rounds each rank has begun after the one whose tag was the last; less than 0 before that."""
    contexts = [buffer.rounds.session.context for buffer in ranks.buffers]
    begun = [ctypes.c_uint32.from_address(c.peers[c.rank] + c.window.state).value for c in contexts]
    return [(number + ROUNDS // 2) % ROUNDS - ROUNDS // 2 for number in begun]
