"""Several ranks in one process, driven from one thread: CPU ranks, or virtual ranks that share a GPU."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from types import TracebackType
from typing import Any

import torch

from moecomm import _native, combine, dispatch
from moecomm.base.placement import Placement
from moecomm.buffer import Buffer
from moecomm.combine.verify import HostCheck
from moecomm.dispatch.routed import Routed
from moecomm.fused.pipeline import Pipeline
from moecomm.ranks.rendezvous import local_ranks
from moecomm.rounds.rounds import Rounds
from moecomm.testing.prepare import prepare_combine, prepare_dispatch, prepare_moe

_STREAMS = 32


class LocalBuffers:
    """One Buffer for each of `ranks` ranks of this process, driven together from one thread.

    On a GPU each rank has its own stream, `streams[rank]`, because kernels of all ranks must run at the same time. For
    more than four ranks set CUDA_DEVICE_MAX_CONNECTIONS=32 before CUDA starts; otherwise streams share a hardware queue
    and wait for each other.

    Args:
        ranks: number of ranks.
        **settings: arguments of every Buffer but its group.

    Attributes:
        buffers: the Buffer of each rank that takes part.
        device: the device that all ranks share.
        streams: the stream of each of these; empty on CPUs.
    """

    def __init__(self, ranks: int, **settings: Any) -> None:
        opened = [partial(Buffer, group, **settings) for group in local_ranks(ranks)]
        self._drive(self._together(opened))

    @classmethod
    def of(cls, buffers: Sequence[Buffer]) -> LocalBuffers:
        """Drive Buffers of this process that are open, in rank order."""
        made = cls.__new__(cls)
        made._drive(list(buffers))
        return made

    def _drive(self, buffers: list[Buffer]) -> None:
        self.buffers = buffers
        self.device = self.buffers[0].device
        for buffer in buffers:
            buffer.rounds.driven = True
        count = len(buffers) if self.device.type == "cuda" else 0
        # torch has _STREAMS streams of each priority, and then hands them out again: ranks must not share one.
        self.streams = [
            torch.cuda.Stream(self.device, priority=-(rank // _STREAMS))  # type: ignore[no-untyped-call]
            for rank in range(count)
        ]
        self._all, self._all_streams = self.buffers, self.streams
        self._raised = False  # the last call has raised an error

    @staticmethod
    def _together(calls: Sequence[Callable[[], Any]]) -> list[Any]:
        """Make a collective call of the host: each rank's in a thread of its own."""
        made: list[Any] = [None] * len(calls)

        def run(rank: int) -> None:
            try:
                made[rank] = calls[rank]()
            except Exception as error:  # noqa: BLE001 - raised by the caller's thread
                made[rank] = error

        threads = [threading.Thread(target=run, args=(rank,)) for rank in range(len(calls))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for result in made:
            if isinstance(result, Exception):
                raise result
        return made

    def release_memory(self) -> None:
        """Call Buffer.release_memory() on every rank."""
        self._together([buffer.release_memory for buffer in self.buffers])

    def restore(self) -> None:
        """Call Buffer.restore() on every rank."""
        self._together([buffer.restore for buffer in self.buffers])

    def set_placement(self, placement: Placement) -> None:
        """Call Buffer.set_placement() on every rank."""
        for nth, buffer in enumerate(self.buffers):
            with torch.cuda.stream(self.streams[nth]) if self.streams else nullcontext():
                buffer.set_placement(placement)

    def mask(self, ranks: Collection[int], **options: Any) -> None:
        """Call Buffer.mask(ranks) on the other ranks. Later calls are of those that take part, in rank order."""
        self._keep([buffer for buffer in self.buffers if buffer.rank not in ranks])
        self._together([partial(buffer.mask, ranks, **options) for buffer in self.buffers])

    def unmask(self, ranks: Collection[int]) -> None:
        """Call Buffer.unmask(ranks) on the ranks that take part and on these."""
        there = {buffer.rank for buffer in self.buffers}
        self._keep([buffer for buffer in self._all if buffer.rank in there.union(ranks)])
        self._together([partial(buffer.unmask, ranks) for buffer in self.buffers])

    def _keep(self, buffers: list[Buffer]) -> None:
        self.buffers = buffers
        self.streams = [self._all_streams[buffer.rank] for buffer in buffers if self._all_streams]

    def dispatch(self, calls: Sequence[dict[str, Any]]) -> list[Routed]:
        """Call Buffer.dispatch(**calls[rank]) on every rank; raise the first error in rank order.

        Errors of other ranks stay in their Buffers, until those are called or the next call here clears them.
        """
        meant = self._with_own_ids(calls)  # rounds use these ids until they have run
        return self._run([partial(prepare_dispatch, **c) for c in meant], dispatch.launch, dispatch.finish)

    def dispatch_begin(self, calls: Sequence[dict[str, Any]]) -> list[Routed]:
        """Call Buffer.dispatch_begin(**calls[rank]) on every rank."""
        meant = self._with_own_ids(calls)
        return self._run([partial(prepare_dispatch, **c, begin=True) for c in meant], dispatch.launch, dispatch.finish)

    def dispatch_end(self, routed: Sequence[Routed], *, sync: bool | None = None) -> list[Routed]:
        """Call Buffer.dispatch_end(routed[rank]) on every rank."""

        def end(here: Routed, buffer: Buffer) -> dispatch.Ending:
            return dispatch.prepare_end(buffer.rounds, here, sync=sync)

        ends = [partial(end, here) for here in routed]
        return self._run(ends, dispatch.launch, dispatch.finish)

    def combine(self, calls: Sequence[dict[str, Any]]) -> list[Any]:
        """Call Buffer.combine(**calls[rank]) on every rank."""
        return self._run([partial(prepare_combine, **c) for c in calls], combine.launch, combine.finish)

    def _with_own_ids(self, calls: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        """Replace ids of experts as each Buffer does."""
        return [
            {**call, "topk_idx": buffer.rounds.experts.own_ids(call["topk_idx"])} if "topk_idx" in call else call
            for buffer, call in zip(self.buffers, calls, strict=True)
        ]

    @contextmanager
    def _call(self) -> Iterator[None]:
        """Clear the error of the last call, which has left it on the other ranks, too."""
        if self._raised:
            for buffer in self.buffers:
                buffer.rounds.failure()
        self._raised = True
        yield
        self._raised = False

    def _run(
        self,
        prepare: Sequence[Callable[[Buffer], Any]],
        run: Callable[[Any], None],
        finish: Callable[[Rounds, Any], Any],
    ) -> list[Any]:
        with self._call():
            return self._run_all(prepare, run, finish)

    def _run_all(
        self,
        prepare: Sequence[Callable[[Buffer], Any]],
        run: Callable[[Any], None],
        finish: Callable[[Rounds, Any], Any],
    ) -> list[Any]:
        for buffer in self.buffers:
            buffer.rounds.admit()
        if not self.streams:
            pending = [make(b) for make, b in zip(prepare, self.buffers, strict=True)]
            if any(isinstance(p, combine.Combining) and isinstance(p.check, HostCheck) for p in pending):
                self._together([partial(combine.run, p) for p in pending])
                return [finish(b.rounds, p) for b, p in zip(self.buffers, pending, strict=True)]
            records = [p.plan.record(p.args) for p in pending]
            _native.host_run_all([p.args for p in pending])
            for buffer, record in zip(self.buffers, records, strict=True):
                buffer.rounds.flight.end(record)
            for stages in _stages([p for p in pending if isinstance(p, Routed | dispatch.Ending)]):
                self._together(stages)
            return [finish(b.rounds, p) for b, p in zip(self.buffers, pending, strict=True)]
        current = torch.cuda.current_stream(self.device)
        pending = []
        for make, buffer, stream in zip(prepare, self.buffers, self.streams, strict=True):
            stream.wait_stream(current)
            with torch.cuda.stream(stream):
                pending.append(make(buffer))
        # Only launches follow: an allocation or a module load may wait for running kernels, and these may wait for a
        # rank that has not been launched yet.
        for p, stream in zip(pending, self.streams, strict=True):
            with torch.cuda.stream(stream):
                run(p)
        for stages in _stages(pending):
            for stage, stream in zip(stages, self.streams, strict=True):
                with torch.cuda.stream(stream):
                    stage()
        results = []
        for buffer, p, stream in zip(self.buffers, pending, self.streams, strict=True):
            with torch.cuda.stream(stream):
                results.append(finish(buffer.rounds, p))
            current.wait_stream(stream)
        return results

    def moe(self, calls: Sequence[dict[str, Any]]) -> list[Any]:
        """Call Buffer.moe(**calls[rank]) on every rank."""
        meant = self._with_own_ids(calls)
        with self._call():
            given = [prepare_moe(buffer, **c) for buffer, c in zip(self.buffers, meant, strict=True)]
        for g in given:
            g.publish()
        for g, routed in zip(given, self.dispatch_layers(given), strict=True):
            g.compute(routed)

        def prepared(g: Pipeline, buffer: Buffer) -> Pipeline:
            g.prepare_reduce()
            return g

        ends = [partial(prepared, g) for g in given]
        return self._run(ends, lambda g: g.run_reduce(), lambda rounds, g: g.finish_reduce())

    def dispatch_layers(self, layers: Sequence[Pipeline]) -> list[Routed]:
        """The dispatches of prepared layers, whose rows have been published."""

        def start(layer: Pipeline, buffer: Buffer) -> Routed:
            return layer.dispatch_call().prepare(buffer.rounds)

        return self._run([partial(start, layer) for layer in layers], dispatch.launch, dispatch.finish)

    def check(self) -> None:
        """Call Buffer.check() on every rank."""
        for buffer in self.buffers:
            buffer.check()

    def close(self) -> None:
        """Close every Buffer."""
        for buffer in self._all:
            buffer.close()

    def __enter__(self) -> LocalBuffers:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _stages(pending: Sequence[Any]) -> Iterator[Sequence[Callable[[], None]]]:
    """Yield each stage that verifies rounds, of all ranks."""
    yield from zip(*map(_stages_of, pending), strict=True)


def _stages_of(pending: Any) -> Sequence[Callable[[], None]]:
    if isinstance(pending, Routed | dispatch.Ending):
        return dispatch.stages(pending)
    if isinstance(pending, combine.Combining):
        return combine.stages(pending)
    stages: Sequence[Callable[[], None]] = pending.stages()  # of a layer
    return stages
