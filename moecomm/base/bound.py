"""Objects that belong to this process: they refer to memory that it shares with other ranks, or to a process group."""

from __future__ import annotations

from typing import ClassVar, NoReturn

from moecomm.errors import Unsupported


class Bound:
    """Base of such objects, which are neither copied nor pickled.

    Attributes:
        _instead: what to save or to copy in their place.
    """

    __slots__ = ()
    _instead: ClassVar[str] = "the arguments it was opened with, and open another on every rank"

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        """Refuse the copy module and pickle, and with it torch.save.  Raises Unsupported."""
        name = type(self).__name__
        raise Unsupported(f"a copy or pickle of a {name}, which belongs to this process: save {self._instead}")
