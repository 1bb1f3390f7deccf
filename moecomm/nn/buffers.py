"""Buffers that layers of the same sizes over the same ranks share."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Hashable
from typing import Any

from moecomm.buffer import Buffer
from moecomm.errors import BadInput

_lock = threading.Lock()
_shared: weakref.WeakValueDictionary[tuple[Any, ...], Buffer] = weakref.WeakValueDictionary()
# Keys contain the id() of a group.  Keeping the group alive as long as its Buffer prevents another from getting its id.
_groups: weakref.WeakKeyDictionary[Buffer, Any] = weakref.WeakKeyDictionary()


def shared_buffer(group: Any, **settings: Any) -> Buffer:
    """Return this process's Buffer for `group` with these settings; open one, collectively, if there is none.

    The Buffer lives as long as it is referenced.

    Args:
        group: see Buffer.
        settings: the other arguments of Buffer; hashable.

    Raises:
        BadInput: a setting that is not hashable.
        As Buffer, when one is opened.
    """
    if hasattr(group, "get_group") and getattr(group, "ndim", 0) == 1:  # DeviceMesh: a new object at each mesh["ep"]
        group = group.get_group()
    for name, value in settings.items():
        if not isinstance(value, Hashable):
            raise BadInput(name, repr(value), "one value, and no list of them")
    key = (group if isinstance(group, str) else id(group), *sorted(settings.items(), key=lambda setting: setting[0]))
    with _lock:
        buffer = _shared.get(key)
    if buffer is not None and not buffer.closed:
        return buffer
    buffer = Buffer(group, **settings)  # not under the lock: opening waits for peers, which may be threads
    with _lock:
        _shared[key] = buffer
        _groups[buffer] = group
    return buffer
