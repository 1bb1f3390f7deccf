"""Exchanges of the unfused form: collectives of the Window's process group, or copies through the Window."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NoReturn, Protocol

import torch

from moecomm.errors import BadInput
from moecomm.overlap.agreement import EveryCall
from moecomm.overlap.local import sum_in_order
from moecomm.overlap.sizes import FP8
from moecomm.ranks.rendezvous import ProcessGroup
from moecomm.window import Window

_ONE_SHOT_BYTES = 256 << 10  # up to this size an all-reduce by copies reads whole tensors, in one exchange, not two
UNIT = 256  # bytes: a Workspace uses a multiple of it
_LIBRARIES = {"cuda": "nccl"}  # whose collectives are used, by kind of device

Part = tuple[tuple[int, ...], torch.dtype]  # shape and dtype of a tensor


class UnfusedExchange(Protocol):
    """Plans of exchanges, the same on all ranks, R of them.  Tensors are contiguous."""

    num_ranks: int

    def all_gather(self, parts: Sequence[Part]) -> Callable[..., list[torch.Tensor]]:
        """Plan an exchange whose tensors go whole to all ranks.  Its run returns each of all ranks, `[R, ...]`."""
        ...

    def all_to_all(self, shape: tuple[int, ...], dtype: torch.dtype) -> Callable[[torch.Tensor], torch.Tensor]:
        """Plan an exchange whose part q of a tensor `[R, ...]` goes to rank q.

        Its run returns the parts for this rank, by the rank that sent them.
        """
        ...

    def reduce_scatter(self, shape: tuple[int, ...], dtype: torch.dtype) -> Callable[[torch.Tensor], torch.Tensor]:
        """Plan a sum over ranks of tensors `[R, ...]`, of which rank q gets part q."""
        ...

    def all_reduce(self, shape: tuple[int, ...], dtype: torch.dtype) -> Callable[[torch.Tensor], torch.Tensor]:
        """Plan a sum over ranks, which all get.  Its run may write to its argument, and return it."""
        ...


class Collectives:
    """Collectives of torch.distributed.  Sums have their order and roundings.

    A rank that does not come holds up the others until the process group ends the collective: the deadline of the
    Window does not apply, nor does its abort().

    Attributes:
        used: a collective has been made, so that the process group has its communicator.

    Args:
        window: of all ranks.  Once it is closed or has failed, runs raise what its calls do.
        group: process group of the same ranks in the same order, with collectives for the device of the Window.
    """

    def __init__(self, window: Window, group: Any) -> None:
        self._window, self._group = window, group
        self.num_ranks, self.used = window.num_ranks, False

    def all_gather(self, parts: Sequence[Part]) -> Callable[..., list[torch.Tensor]]:
        gather = _collective("all_gather_single", "all_gather_into_tensor")

        def run(*given: torch.Tensor) -> list[torch.Tensor]:
            whole = [of.new_empty((self.num_ranks, *of.shape)) for of in given]
            for to, of in zip(whole, given, strict=True):
                self._run(gather, to, of)
            return whole

        return run

    def all_to_all(self, shape: tuple[int, ...], dtype: torch.dtype) -> Callable[[torch.Tensor], torch.Tensor]:
        send = _collective("all_to_all_single")
        return lambda given: self._run(send, torch.empty_like(given), given)

    def reduce_scatter(self, shape: tuple[int, ...], dtype: torch.dtype) -> Callable[[torch.Tensor], torch.Tensor]:
        scatter = _collective("reduce_scatter_single", "reduce_scatter_tensor")
        return lambda given: self._run(scatter, given.new_empty(shape[1:]), given)

    def all_reduce(self, shape: tuple[int, ...], dtype: torch.dtype) -> Callable[[torch.Tensor], torch.Tensor]:
        reduce = _collective("all_reduce")
        return lambda given: self._run(reduce, given)

    def _run(self, collective: Callable[..., Any], to: torch.Tensor, *given: torch.Tensor) -> torch.Tensor:
        """Run a collective on flat tensors, unless they are empty; return its result.  Raises as a call of a Window."""
        with self._window._call():
            if to.numel():
                collective(*(_numbers(of) for of in (to, *given)), group=self._group)
                self.used = True
        return to


def collectives_of(window: Window) -> Collectives | None:
    """Return the collectives of a Window's process group; None: a rank alone, or there are none for its device."""
    group = window._group
    if window.num_ranks == 1 or not isinstance(group, ProcessGroup) or not group.global_ranks():
        return None
    try:
        library = group.process_group._get_backend(window.device).name()
    except RuntimeError:  # none for this kind of device
        return None
    return Collectives(window, group.process_group) if library == _LIBRARIES.get(window.device.type) else None


def _collective(*names: str) -> Callable[..., Any]:
    """Return a function of torch.distributed: the first of these names that this torch has."""
    import torch.distributed as dist

    found: Callable[..., Any] = getattr(dist, next(name for name in names if hasattr(dist, name)))
    return found


def _numbers(tensor: torch.Tensor) -> torch.Tensor:
    """Return a flat view of what collectives take: they move FP8 as bytes."""
    return (tensor.view(torch.uint8) if tensor.dtype == FP8 else tensor).view(-1)


def _whole(parts: torch.Tensor) -> torch.Tensor:
    return parts


class Copies:
    """Copies through the Window.  Sums are in float32, in rank order, and rounded once.

    Each exchange has two barriers: before peers read a rank's memory, and after they have read it.  Every call, a fused
    one too, ends its use of the memory so, which is why none comes first.  A graph can capture it.  Without room an
    exchange raises BadInput when it runs: an all-reduce may need none.

    Args:
        window: of all ranks.
        staging: bytes of its memory that copies use, from a multiple of 16 on.
        agreement: CPU ranks: compares every call, in its first exchange, which then raises its Mismatch on all ranks.
            Exchanges are then part of a call of the Window; without, each is one.
    """

    def __init__(self, window: Window, staging: range, agreement: EveryCall | None = None) -> None:
        self._window, self._staging, self._agreement = window, staging, agreement
        self._rank, self.num_ranks = window.rank, window.num_ranks

    def all_gather(self, parts: Sequence[Part]) -> Callable[..., list[torch.Tensor]]:
        return self._exchange(parts, [((self.num_ranks, *shape), dtype) for shape, dtype in parts])

    def all_to_all(self, shape: tuple[int, ...], dtype: torch.dtype) -> Callable[[torch.Tensor], torch.Tensor]:
        return self._exchange([(shape, dtype)], [(shape, dtype)], _whole)

    def reduce_scatter(self, shape: tuple[int, ...], dtype: torch.dtype) -> Callable[[torch.Tensor], torch.Tensor]:
        return self._exchange([(shape, dtype)], [(shape, dtype)], sum_in_order)

    def all_reduce(self, shape: tuple[int, ...], dtype: torch.dtype) -> Callable[[torch.Tensor], torch.Tensor]:
        count = math.prod(shape)
        if count * dtype.itemsize <= _ONE_SHOT_BYTES:
            collect = self.all_gather([(shape, dtype)])
            return lambda given: sum_in_order(collect(given)[0])
        part = -(-count // self.num_ranks)
        scatter = self.reduce_scatter((self.num_ranks, part), dtype)
        collect = Copies(self._window, self._staging).all_gather([((part,), dtype)])

        def run(given: torch.Tensor) -> torch.Tensor:
            padded = torch.nn.functional.pad(given.flatten(), (0, part * self.num_ranks - count))
            sums = scatter(padded.view(self.num_ranks, part))
            return collect(sums)[0].flatten()[:count].view_as(given).clone()

        return run

    def _exchange(
        self,
        published: Sequence[Part],
        collected: Sequence[Part],
        parted: Callable[[torch.Tensor], torch.Tensor] | None = None,
    ) -> Callable[..., Any]:
        """Plan an exchange: tensors like `published` lie one behind the other; `collected` is read of all ranks.

        parted: read the part for this rank, and not all of a tensor; the run then returns what this makes of the one
            tensor, else a list.
        """
        window, ranks, staging, agreement = self._window, self.num_ranks, self._staging, self._agreement
        calls = window._opened.calls
        context: Callable[[], AbstractContextManager[None]] = window._barriers if agreement is None else nullcontext
        sizes = [math.prod(shape) * dtype.itemsize for shape, dtype in published]
        ends = list(itertools.accumulate(sizes))
        if ranks > 1 and (more := ends[-1] - len(staging)) > 0:
            enough = (window.nbytes // UNIT + -(-more // UNIT)) * UNIT

            def refuse(*tensors: torch.Tensor) -> NoReturn:
                raise BadInput("nbytes", window.nbytes, f"at least {enough} for these sizes")

            return refuse
        begins = [staging.start + end - size for end, size in zip(ends, sizes, strict=True)] if ranks > 1 else []
        own = [window.tensor(*part, offset=begin) for part, begin in zip(published, begins, strict=False)]
        rotation = [(self._rank + step) % ranks for step in range(ranks)]
        copies: list[tuple[int, int, torch.Tensor]] = []  # tensor, rank, and where they are read
        for rank in rotation if ranks > 1 else ():
            for nth, ((shape, dtype), begin) in enumerate(zip(collected, begins, strict=True)):
                offset = 0 if parted is None else self._rank * (sizes[nth] // ranks)
                copies.append((nth, rank, window.tensor(shape[1:], dtype, rank=rank, offset=begin + offset)))

        def run(*tensors: torch.Tensor) -> Any:
            if agreement is not None:
                agreement.publish()
            whole = []
            if ranks == 1:
                for tensor, (shape, _) in zip(tensors, collected, strict=True):
                    whole.append(tensor.clone().view(shape))
                return whole if parted is None else parted(whole[0])
            for tensor, (shape, dtype) in zip(tensors, collected, strict=True):
                whole.append(tensor.new_empty(shape, dtype=dtype))
            with context():
                for tensor, target in zip(tensors, own, strict=True):
                    target.copy_(tensor)
                are_complete = calls.barrier()
                error = agreement.difference() if are_complete and agreement is not None else None
                for nth, rank, source in copies if are_complete and error is None else ():
                    whole[nth][rank].copy_(source)
                if not (are_complete and calls.barrier()):
                    window._raise_failure()
                window.turn.made += 1
                if error is not None:  # all ranks have read the headers
                    raise error
            return whole if parted is None else parted(whole[0])

        return run
