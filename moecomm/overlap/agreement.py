"""Comparison of a call on all ranks: headers that say which operator, and with which sizes."""

from __future__ import annotations

import ctypes
from typing import Any

import torch

from moecomm.base.protocol import DTYPES
from moecomm.errors import Mismatch, OutOfStep
from moecomm.overlap.plans import CallNumbers
from moecomm.overlap.sizes import FP8, Sizes
from moecomm.window import Window

OPERATORS = (
    "all_gather_matmul",
    "matmul_reduce_scatter",
    "matmul_all_reduce",
    "matmul_all_to_all",
    "embedding_all_to_all",
    "all_to_all",
)
_DTYPES = (*DTYPES, FP8)
WORDS = 16  # int64, of a header
BYTES = 8 * WORDS
FAILED, OF = 1, 4  # words of a header that differ from call to call
_FIRST = 6  # words ahead of the sizes
FORWARD, UNKNOWN = 0, -1  # in the place of the number of the call whose gradient is computed; UNKNOWN: in a graph
_FUSED = _GRADIENT = (False, True, None)


def header(sizes: Sizes, failed_calls: int = 0, fused: bool | None = False, of: int = FORWARD) -> list[int]:
    """Return the words by which ranks compare a call, WORDS of them.

    Args:
        sizes: of the call; those in compared_names() are compared.
        failed_calls: calls of the Workspace that have failed on this rank alone.
        fused: as the caller passes it.
        of: see Workspace.call.
    """
    dims = [sizes.dims[name] for name in compared_names(sizes, fused)]
    words = [OPERATORS.index(sizes.operator), failed_calls, _DTYPES.index(sizes.given), _FUSED.index(fused), of]
    words += [_GRADIENT.index(sizes.gradient), *dims]
    return words + [0] * (WORDS - len(words))


def compared_names(sizes: Sizes, fused: bool | None) -> tuple[str, ...]:
    """Return the names of the sizes in a header.

    Those of a product decide its form, unless that is given as unfused: all of them must then be the same on all ranks.
    """
    more = () if fused is False else tuple(name for name in ("N", "K") if name in sizes.dims)
    return tuple(dict.fromkeys((*sizes.agreed, *more)))


def difference(
    sizes: Sizes, mine: list[int], theirs: list[int], rank: int, fused: bool | None = False
) -> Mismatch | None:
    """Return the error of this rank for a header of `rank`, or None if it is the same."""
    if mine == theirs:
        return None
    if mine[1] != theirs[1]:
        return OutOfStep(mine[1], theirs[1], rank, "Workspace")
    if mine[0] != theirs[0]:
        return Mismatch("operator", sizes.operator, OPERATORS[theirs[0]], rank)
    if mine[2] != theirs[2]:
        return Mismatch("dtype", sizes.given, _DTYPES[theirs[2]], rank)
    if mine[3] != theirs[3]:
        return Mismatch("fused", fused, _FUSED[theirs[3]], rank)
    if mine[4] != theirs[4] and UNKNOWN not in (mine[4], theirs[4]):
        return Mismatch("backward pass", _pass(mine[4]), _pass(theirs[4]), rank)
    ours, other = _GRADIENT[mine[5]], _GRADIENT[theirs[5]]
    if ours is not other and None not in (ours, other):
        return Mismatch("gradients wanted", ours, other, rank)
    at = next((at for at in range(_FIRST, WORDS) if mine[at] != theirs[at]), None)
    return None if at is None else Mismatch(compared_names(sizes, fused)[at - _FIRST], mine[at], theirs[at], rank)


def _pass(of: int) -> str:
    return "none" if of == FORWARD else f"that of call {of}"


class EveryCall:
    """Agreement on every call of some sizes, on CPUs.  An exchange carries the headers beside its tensors.

    Args:
        window: of all ranks.
        offset: in its memory, of BYTES that nothing else uses.
        numbers: of the Workspace.
        sizes: of the calls.
    """

    def __init__(self, window: Window, offset: int, numbers: CallNumbers, sizes: Sizes) -> None:
        self._memory = _headers_of(window, offset)  # keeps it mapped
        self._headers: list[Any] = [(ctypes.c_int64 * WORDS).from_address(words.data_ptr()) for words in self._memory]
        self._published, self._numbers, self._sizes = self._headers[window.rank], numbers, sizes
        self._mine = header(sizes)

    def publish(self) -> None:
        """Number the call, and publish its header.  Peers may read it after the next barrier."""
        self._numbers.made += 1
        self._mine[FAILED], self._mine[OF] = self._numbers.failed, self._numbers.of
        self._published[:] = self._mine

    def difference(self) -> Mismatch | None:
        """Return the error for the first rank whose call differs, if any.  All ranks have published theirs."""
        for rank, published in enumerate(self._headers):
            theirs = published[:]
            if theirs != self._mine and (error := difference(self._sizes, self._mine, theirs, rank)) is not None:
                return error
        return None


class FirstCalls:
    """Agreement on the first call of each kind, on GPUs, where comparing every call would cost too much.

    Args:
        window: of all ranks.
        offset: in its memory, of BYTES that nothing else uses.
    """

    def __init__(self, window: Window, offset: int) -> None:
        self._window = window
        self._headers = _headers_of(window, offset)
        self._seen: set[tuple[int, ...]] = set()

    def check(self, sizes: Sizes, failed_calls: int, fused: bool | None = False) -> bool:
        """Compare this call if it is the first of its kind, and not part of a capture.  Collective.

        The host waits for the device.

        Returns:
            True, or False in a capture: then a later call of its kind is compared.

        Raises:
            Mismatch: on all ranks, if they differ.
            Timeout: another rank has made this call before, or does not make it.
        """
        mine = header(sizes, failed_calls, fused)
        key = (mine[0], *mine[2:])
        if key in self._seen:
            return True
        if self._window._opened.calls.capturing():
            return False
        for rank, theirs in enumerate(self.exchange(mine)):
            if (error := difference(sizes, mine, theirs, rank, fused)) is not None:
                raise error
        self._seen.add(key)
        return True

    def exchange(self, mine: list[int]) -> list[list[int]]:
        """Return the WORDS numbers of every rank, by rank.  Collective.  The host waits for the device."""
        window = self._window
        self._headers[window.rank].copy_(torch.tensor(mine))
        window.barrier()
        found: list[list[int]] = [theirs.tolist() for theirs in self._headers]
        window.barrier()  # every rank has read them
        window.check()
        return found


def _headers_of(window: Window, offset: int) -> list[torch.Tensor]:
    """Return the header in the memory of each rank."""
    return [window.tensor((WORDS,), torch.int64, rank=rank, offset=offset) for rank in range(window.num_ranks)]
