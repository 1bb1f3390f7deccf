"""Memory that every rank can reach, at equal offsets of all windows, for raw measurements."""

from __future__ import annotations

from types import TracebackType

import torch
import torch.distributed as dist

from moecomm.backends.gin import spare_signal
from moecomm.backends.lsa import LsaSession
from moecomm.base.arrays import window_tensor
from moecomm.base.choices import BackendName
from moecomm.buffer import Buffer
from moecomm.errors import Mismatch
from moecomm.ranks.rendezvous import rendezvous

_ROOM = 1 << 20  # additional room, for meet()


class ReceiveBuffer:
    """`nbytes` of each rank's window. Collective; a context manager.

    Attributes:
        addresses: address of each rank's block, as mapped on this rank.
        tensor: our own block, uint8 [nbytes].
        shim: the library for puts where load and store are not used: see moecomm.gpu.linking. Otherwise empty.
    """

    def __init__(self, group: dist.ProcessGroup, nbytes: int, backend: BackendName, device: torch.device) -> None:
        ranks = rendezvous(group)
        self.buffer = Buffer(
            group,
            hidden=64,
            num_experts=ranks.ranks,
            topk=1,
            max_tokens=1,
            backend=backend,
            device=device,
            window_bytes=nbytes + _ROOM,
        )
        session = self.buffer.rounds.session
        context = session.context
        self.shim = session.reach.shim if isinstance(session, LsaSession) else ""
        block = self.buffer.rounds.memory.rows(nbytes)
        for rank, data in enumerate(ranks.all_gather(block.offset.to_bytes(8, "little"))):
            if (theirs := int.from_bytes(data, "little")) != block.offset:
                raise Mismatch("block", block.offset, theirs, rank)
        self.rank, self.ranks = ranks.rank, ranks.ranks
        self.addresses = [peer + block.offset for peer in context.peers[: ranks.ranks]]
        here = self.addresses[self.rank]
        self.tensor = window_tensor(block, here, (nbytes,), torch.uint8, device, self.buffer.rounds.session.owner)
        self.tensor.zero_()
        self._row = torch.zeros(1, 64, dtype=torch.bfloat16, device=device)
        self._expert = torch.zeros(1, 1, dtype=torch.int64, device=device)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        dist.barrier(group)

    def meet(self) -> None:
        """Make ranks wait for each other: on CPUs immediately, on GPUs on the current stream."""
        self.buffer.dispatch(self._row, self._expert, layout="flat")

    @property
    def puts(self) -> dict[str, int]:
        """Arguments of puts through a library, besides addresses: see PingPongArgs in csrc/bench/ping_pong.cuh."""
        context = self.buffer.rounds.session.context
        which = 0 if self.shim == "nvshmem" else spare_signal(context.window)  # nvshmem: a word of the block
        return {"window": context.peers[self.rank], "link": context.link, "which": which}

    @property
    def abort_words(self) -> tuple[int, int]:
        """Addresses of the abort words, nonzero once the Buffer is aborted: in our window, and in host memory."""
        context = self.buffer.rounds.session.context
        return context.peers[self.rank] + context.window.abort, context.abort_host

    def __enter__(self) -> ReceiveBuffer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.buffer.close()
