"""One Buffer for all layers of the same sizes over the same ranks."""

from __future__ import annotations

import threading
import weakref
from typing import Any

from moecomm.buffer import Buffer

_lock = threading.Lock()
_shared: weakref.WeakValueDictionary[tuple[Any, ...], Buffer] = weakref.WeakValueDictionary()
# A group is told by its identity, which must not become another group's while its Buffer lives.
_groups: weakref.WeakKeyDictionary[Buffer, Any] = weakref.WeakKeyDictionary()


def shared_buffer(group: Any, **settings: Any) -> Buffer:
    """The Buffer of this process for `group` with these settings: opened, collectively, if there is none open.

    It lives as long as somebody refers to it.

    Args:
        group: see Buffer.
        settings: the other arguments of Buffer.

    Raises:
        As Buffer.
    """
    if hasattr(group, "get_group") and getattr(group, "ndim", 0) == 1:  # DeviceMesh: another object at each mesh["ep"]
        group = group.get_group()
    key = (group if isinstance(group, str) else id(group), *sorted(settings.items(), key=lambda setting: setting[0]))
    with _lock:
        buffer = _shared.get(key)
    if buffer is not None and not buffer.closed:
        return buffer
    buffer = Buffer(group, **settings)  # outside of the lock: ranks that are threads open theirs together
    with _lock:
        _shared[key] = buffer
        _groups[buffer] = group
    return buffer
