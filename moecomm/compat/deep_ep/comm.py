"""deep_ep.comm and BufferBase, of deep_ep 2.5: calls on groups and buffers.

There is no communicator of NCCL beneath them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import torch

from moecomm.base.validation import check_integer
from moecomm.compat.deep_ep.event import comm_stream
from moecomm.compat.deep_ep.pool import OverPool
from moecomm.errors import BadInput
from moecomm.ranks.rendezvous import rendezvous

__all__ = [
    "barrier",
    "destroy_all_managed_nccl_comm",
    "get_comm_stream",
    "get_logical_domain_size",
    "get_physical_domain_size",
]


def destroy_all_managed_nccl_comm() -> None:
    """Do nothing: no communicator is kept for a group."""


def barrier(
    buffer: Any,
    wait_comm_stream: bool = True,
    with_cpu_sync: bool = False,
    sequential: bool = True,
    context_idx: int | None = None,
) -> None:
    """Return when the work before it is done on every rank.  Collective; the host always waits.

    Raises:
        BadInput: no EPBuffer, or an index of another context than the first.
        As EPBuffer.barrier().
    """
    if not isinstance(buffer, BufferBase):
        raise BadInput("buffer", type(buffer).__name__, "an EPBuffer")
    check_context(context_idx)
    ep_buffer: Any = buffer
    ep_buffer.barrier(wait_comm_stream, with_cpu_sync, sequential)


def check_context(context_idx: int | None) -> None:
    """Raise BadInput unless a buffer of one group has this context."""
    if context_idx is not None:
        check_integer("context_idx", context_idx, 0, 0)


def get_comm_stream(buffer: Any) -> torch.cuda.Stream:
    """Return the current stream, which is where moecomm works.

    Raises:
        Unsupported: CPU ranks have no stream.
    """
    return comm_stream()


def get_physical_domain_size(group_or_buffer: Any) -> tuple[int, int]:
    """Return the numbers of RDMA ranks (1) and of NVLink ranks (all)."""
    return 1, _ranks(group_or_buffer)


def get_logical_domain_size(group_or_buffer: Any, allow_hybrid_mode: bool | None = None) -> tuple[int, int]:
    """Return the numbers of scale-out ranks (1) and of scale-up ranks (all)."""
    return 1, _ranks(group_or_buffer)


def _ranks(group_or_buffer: Any) -> int:
    if isinstance(group_or_buffer, BufferBase):
        return group_or_buffer.num_ranks
    return rendezvous(group_or_buffer).ranks


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
