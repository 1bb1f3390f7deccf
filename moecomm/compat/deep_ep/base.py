"""deep_ep 2.5's BufferBase: what all of its buffers have."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

from moecomm.compat.deep_ep.pool import OverPool


class BufferBase(OverPool, ABC):
    """Base of the buffers of deep_ep 2."""

    num_ranks: int
    explicitly_destroy: bool

    @property
    def main_context(self) -> Any:
        """The buffer itself, which has the calls of deep_ep's context; None after it is destroyed."""
        return self.runtime

    @property
    def context(self) -> Any:
        """`main_context`: a buffer has one group."""
        return self.runtime

    def print_memory_usage(self) -> None:
        """Print the bytes of this rank's windows.

        Raises:
            Closed: the buffer is destroyed.
        """
        self._pool.require_open()
        of_kinds = ", ".join(f"{kind} {size / (1 << 20):.1f} MiB" for kind, size in self._memory().items())
        print(
            f"{type(self).__name__}, rank {self._pool.ranks.rank} of {self._pool.ranks.ranks}: {of_kinds}", flush=True
        )

    def _memory(self) -> dict[str, int]:
        """Bytes of this rank's windows, by what they are for."""
        return {"windows of rounds": self._pool.nbytes}

    @abstractmethod
    def destroy(self) -> None:
        """Give the memory back."""
