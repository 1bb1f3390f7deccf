"""Buffers that layers of the same sizes over the same ranks share, and the numbers by which ranks know the layers."""

from __future__ import annotations

import threading
import weakref
from collections import Counter
from collections.abc import Hashable
from typing import Any

from moecomm.buffer import Buffer
from moecomm.errors import BadInput
from moecomm.ranks.opening import opening
from moecomm.ranks.rendezvous import rendezvous
from moecomm.rounds.signature import LAYERS

_lock = threading.Lock()


class _Shared:
    """The Buffers over one group that layers share, and how many layers there have been."""

    def __init__(self) -> None:
        self.layers = 0
        self.is_open = False  # a Buffer has been opened: on all ranks, if on one
        # By settings; and the identity with which each was opened, which shrink() and grow() change.
        self.buffers: weakref.WeakValueDictionary[tuple[Any, ...], Buffer] = weakref.WeakValueDictionary()
        self.opened: weakref.WeakKeyDictionary[Buffer, str] = weakref.WeakKeyDictionary()


# By group.  Two calls of one rank with the same group have the same object, and no other group has it while it is here.
_of_groups: weakref.WeakKeyDictionary[Any, _Shared] = weakref.WeakKeyDictionary()
_of_names: dict[Any, _Shared] = {}  # of "self" and None
_layers: weakref.WeakKeyDictionary[Buffer, Counter[str]] = weakref.WeakKeyDictionary()  # by identity


def shared_buffer(group: Any, **settings: Any) -> Buffer:
    """Return the Buffer for `group` with these settings that all its ranks have open; if there is none, open one.

    Collective: the ranks agree in every call, so it does not matter which of them still refer to an earlier Buffer.
    The Buffer lives as long as it is referenced.

    Args:
        group: see Buffer.
        settings: the other arguments of Buffer; hashable.

    Raises:
        BadInput: a setting that is not hashable.
        As Buffer, also when none is opened.
    """
    for name, value in settings.items():
        if not isinstance(value, Hashable):
            raise BadInput(name, repr(value), "one value, and no list of them")
    key = tuple(sorted(settings.items(), key=lambda setting: setting[0]))
    ranks = rendezvous(group)
    with _lock:
        shared = _of(group)
        mine, is_open = shared.buffers.get(key), shared.is_open
        if mine is not None and (mine.closed or mine.failed):
            mine = None
    if mine is not None and mine.masked:
        return mine  # masked ranks can't agree
    # No lock from here on: the calls wait for peers, which may be threads.
    if is_open:  # else there is nothing to agree on, and this rank may be one that joins others in their grow()
        offer = b""
        if mine is not None:
            offer = mine.rounds.origin.identity.encode()
            if shared.opened[mine] != mine.rounds.origin.identity:
                ranks = mine.rounds.members.group  # it has shrunk or grown
        with opening(ranks, settings.get("timeout_s", 30.0), of="shared Buffer") as agreement:
            offers = agreement.all_gather(offer)
            agreement.settle()
        if mine is not None and set(offers) == {offer}:
            return mine
    buffer = Buffer(group, **settings)
    with _lock:
        shared.is_open = True
        shared.buffers[key] = buffer
        shared.opened[buffer] = buffer.rounds.origin.identity
    return buffer


def number_layer(group: Any, buffer: Buffer | None) -> int:
    """Return the number of a new layer, 1 to LAYERS: among those over a given Buffer, or over Buffers of `group`.

    Ranks that make their layers in the same order give each the same number.
    """
    with _lock:
        if buffer is None:
            shared = _of(group)
            before, shared.layers = shared.layers, shared.layers + 1
        else:  # by the ranks that it has now: a rank that joins them later counts from 1
            counts = _layers.setdefault(buffer, Counter())
            before = counts[buffer.rounds.origin.identity]
            counts[buffer.rounds.origin.identity] += 1
    return 1 + before % LAYERS


def _of(group: Any) -> _Shared:
    if hasattr(group, "get_group") and getattr(group, "ndim", 0) == 1:  # DeviceMesh: a new object at each mesh["ep"]
        group = group.get_group()
    if group is None or isinstance(group, str):
        return _of_names.setdefault(group, _Shared())
    return _of_groups.setdefault(group, _Shared())
