"""Windows in Triton kernels: the device interface of csrc/window/window.h as functions of Triton.

A kernel takes `handle(window)` as its first argument.  Every function is called by a whole program; addresses are
int64, for `.to(tl.pointer_type(...))`.  Where Triton is not installed, importing this module raises ImportError.
"""

# Triton compiles the functions below, and takes neither types of Python nor `and`.
# ruff: noqa: ANN001, ANN201, ANN202, SIM102
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"

from __future__ import annotations

import ctypes
from types import SimpleNamespace

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import globaltimer

from moecomm import _native
from moecomm.window import Window

_WORDS = {name: offset // 8 for name, _, offset, _, _ in _native.structs()["Window"][1]}
_PEERS, _CONTROL = (tl.constexpr(_WORDS[name]) for name in ("peers", "control"))
_ABORT_HOST, _TIMEOUT = (tl.constexpr(_WORDS[name]) for name in ("abort_host", "timeout_ns"))
_ABORT, _LEFT, _BARRIERS = (tl.constexpr(_WORDS[name]) for name in ("abort", "left", "barriers"))
_SIGNALS, _RANKS = (tl.constexpr(_WORDS[name]) for name in ("signals", "rank"))  # `rank` and `ranks` share a word
_TIMED_OUT, _LOST = (tl.constexpr(int(cause) << 16) for cause in (_native.Failure.timeout, _native.Failure.peer_lost))
_SELDOM = tl.constexpr(256)  # polls between two looks at the clock and the abort words: the host's is behind PCIe


def handle(window: Window) -> torch.Tensor:
    """Return int64 `[14]` on the device of the Window: its handle, valid as long as the Window is open."""
    if window.device.type == "cpu":
        content = (ctypes.c_int64 * len(_WORDS)).from_address(window.handle_address)
        return torch.frombuffer(content, dtype=torch.int64)[: len(window.handle) // 8]
    words = {
        "shape": (len(window.handle) // 8,),
        "typestr": "<i8",
        "data": (window.handle_address, False),
        "version": 3,
    }
    return torch.as_tensor(SimpleNamespace(__cuda_array_interface__=words), device=window.device)


@triton.jit
def rank_of(handle):
    """Return this rank."""
    return (tl.load(handle + _RANKS) & 0xFFFFFFFF).to(tl.int32)


@triton.jit
def ranks_of(handle):
    """Return the number of ranks."""
    return (tl.load(handle + _RANKS) >> 32).to(tl.int32)


@triton.jit
def peer(handle, rank):
    """Return the address of a rank's memory."""
    return tl.load(tl.load(handle + _PEERS).to(tl.pointer_type(tl.int64)) + rank)


@triton.jit
def local(handle):
    """Return the address of this rank's memory."""
    return peer(handle, rank_of(handle))


@triton.jit
def _control(handle, rank):
    """Return the address of a rank's control words."""
    return tl.load(tl.load(handle + _CONTROL).to(tl.pointer_type(tl.int64)) + rank)


@triton.jit
def signal(handle, rank, index, amount):
    """Add to a signal of a rank.  Release: all that the program has stored or acquired comes first."""
    tl.debug_barrier()
    word = (_control(handle, rank) + tl.load(handle + _SIGNALS) + index * 8).to(tl.pointer_type(tl.int64))
    tl.atomic_add(word, tl.cast(amount, tl.int64), sem="release", scope="sys")


@triton.jit
def wait(handle, index, value, source):
    """Wait until a signal of this rank is at least `value`; return False on failure.  Acquire.

    `source`: the rank that raises it, or -1.  A failure ends the waits of all ranks, and Window.check() raises it.
    """
    word = (_control(handle, rank_of(handle)) + tl.load(handle + _SIGNALS) + index * 8).to(tl.pointer_type(tl.int64))
    return _await(handle, word, tl.cast(value, tl.int64), source)


@triton.jit
def barrier(handle, slot):
    """Wait until all ranks have come to the barrier of this slot, 0 to 255; return False on failure.

    Release and acquire.  One program of a rank uses a slot at a time.
    """
    rank, ranks, at = rank_of(handle), ranks_of(handle), tl.load(handle + _BARRIERS)
    words = at + slot * ranks * 8
    mine = _control(handle, rank) + words
    own = (mine + rank * 8).to(tl.pointer_type(tl.int64))
    number = tl.load(own, volatile=True) + 1
    tl.debug_barrier()
    for step in range(ranks):
        other = (rank + 1 + step) % ranks
        theirs = (_control(handle, other) + words + rank * 8).to(tl.pointer_type(tl.int64))
        tl.atomic_xchg(theirs, number, sem="release", scope="sys")
    here = number > 0
    for step in range(ranks):
        other = (rank + 1 + step) % ranks
        if here:
            here = _await(handle, (mine + other * 8).to(tl.pointer_type(tl.int64)), number, other)
    return here


@triton.jit
def _await(handle, word, value, source):
    rank = rank_of(handle)
    mine = _control(handle, rank)
    here = (mine + tl.load(handle + _ABORT)).to(tl.pointer_type(tl.int32))
    host = tl.load(handle + _ABORT_HOST).to(tl.pointer_type(tl.int32))
    named = (source >= 0) & (source != rank)
    gone = (mine + tl.load(handle + _LEFT) + tl.where(named, source, rank) * 4).to(tl.pointer_type(tl.int32))
    timeout, begin = tl.load(handle + _TIMEOUT), globaltimer()
    cause, polls = rank * 0, rank * 0
    seen = tl.atomic_add(word, tl.cast(0, tl.int64), sem="acquire", scope="sys")
    while (seen < value) & (cause == 0):
        polls += 1
        if polls % _SELDOM == 0:
            cause = tl.load(here, volatile=True)
            if cause == 0:
                cause = tl.load(host, volatile=True)
            if (cause == 0) & (globaltimer() - begin > timeout):
                cause = _TIMED_OUT + source + 1
            if (cause == 0) & named:
                # Before the word: what the peer stored before it left is there.
                if tl.atomic_add(gone, 0, sem="acquire", scope="sys") != 0:
                    cause = _LOST + source + 1
        seen = tl.atomic_add(word, tl.cast(0, tl.int64), sem="acquire", scope="sys")
    if seen < value:
        _report(handle, cause)
    tl.debug_barrier()
    return seen >= value


@triton.jit
def _report(handle, cause):
    """Set the abort words of all ranks, and the one that the host of this rank reads."""
    host = tl.load(handle + _ABORT_HOST).to(tl.pointer_type(tl.int32))
    if tl.load(host, volatile=True) == 0:
        tl.store(host, cause)
    for other in range(ranks_of(handle)):
        word = (_control(handle, other) + tl.load(handle + _ABORT)).to(tl.pointer_type(tl.int32))
        tl.atomic_cas(word, 0, cause, sem="relaxed", scope="sys")
