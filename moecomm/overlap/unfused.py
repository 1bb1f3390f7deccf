"""The operators without fusion, on GPUs: a product of torch and an exchange, one after the other.

Exchanges are copies through the Window, except an all-reduce of at most a few MB, which is a kernel (all_reduce.cuh).

Each exchange by copies has two barriers: before peers read a rank's memory, and after they have read it.  Every call, a
fused one too, ends its use of the memory so, which is why none comes first.  A graph can capture it.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import torch

from moecomm.errors import BadInput
from moecomm.fused.fp8 import Fp8
from moecomm.overlap.local import bag_sums, product, sum_in_order
from moecomm.overlap.plans import Operators
from moecomm.overlap.sizes import GROUP, Matrix, Sizes
from moecomm.window import Window

_ONE_SHOT_BYTES = 256 << 10  # up to this size an all-reduce reads whole tensors, in one exchange instead of two

_Part = tuple[tuple[int, ...], torch.dtype]  # shape and dtype of a tensor
_Exchange = Callable[..., list[torch.Tensor]]


class UnfusedExecutor(Operators):
    """The unfused form.

    Args:
        window: of all ranks; CPU ranks will do as well.
        staging: bytes of its memory that copies use, from a multiple of 16 on.
        all_reduce: see moecomm.overlap.executors.FusedOperators; None: there is none.
    """

    def __init__(
        self,
        window: Window,
        staging: range,
        all_reduce: Callable[[torch.Tensor], torch.Tensor | None] | None = None,
    ) -> None:
        self._window, self._staging, self._all_reduce = window, staging, all_reduce
        self._rank, self.num_ranks = window.rank, window.num_ranks

    def plan(self, call: Sizes, gather: bool = False) -> Callable[..., Any]:
        """See Operators."""
        if call.operator == "all_gather_matmul":
            return self._all_gather_matmul(call, gather)
        return getattr(self, f"_{call.operator}")(call)  # type: ignore[no-any-return]

    def _all_gather_matmul(self, call: Sizes, gather: bool) -> Callable[..., Any]:
        rows, depth = call.dims["M"], call.dims["K"]
        parts: list[_Part] = [((rows, depth), call.given)]
        if call.fp8:
            parts.append(((rows, depth // GROUP), torch.float32))
        collect = self._all_gather(parts)

        def run(x: Matrix, w: Matrix) -> tuple[torch.Tensor, Matrix | None]:
            whole = [of.flatten(0, 1) for of in collect(*(x if isinstance(x, Fp8) else (x,)))]
            gathered = Fp8(*whole) if call.fp8 else whole[0]
            return product(gathered, w), gathered if gather else None

        return run

    def _matmul_reduce_scatter(self, call: Sizes) -> Callable[..., Any]:
        shape = (self.num_ranks, *call.result)
        send = self._all_to_all_of(shape, call.dtype)

        def run(x: Matrix, w: Matrix) -> torch.Tensor:
            return sum_in_order(send(product(x, w).view(shape))[0])

        return run

    def _matmul_all_reduce(self, call: Sizes) -> Callable[..., Any]:
        count, nbytes = call.result[0] * call.result[1], call.bytes_of("M", "N")
        if nbytes <= _ONE_SHOT_BYTES:
            collect = self._all_gather([(call.result, call.dtype)])

            def reduced(mine: torch.Tensor) -> torch.Tensor:
                return sum_in_order(collect(mine)[0])

        else:
            part = -(-count // self.num_ranks)
            send = self._all_to_all_of((self.num_ranks, part), call.dtype)
            collect = self._all_gather([((part,), call.dtype)])

            def reduced(mine: torch.Tensor) -> torch.Tensor:
                padded = torch.nn.functional.pad(mine.flatten(), (0, part * self.num_ranks - count))
                sums = sum_in_order(send(padded.view(self.num_ranks, part))[0])
                return collect(sums)[0].flatten()[:count].view_as(mine).clone()

        def run(x: Matrix, w: Matrix) -> torch.Tensor:
            mine = product(x, w)
            if self._all_reduce is not None and (found := self._all_reduce(mine)) is not None:
                return found
            return reduced(mine)

        return run

    def _matmul_all_to_all(self, call: Sizes) -> Callable[..., Any]:
        ranks, experts, rows, columns = call.result
        send = self._all_to_all_of(call.result, call.dtype)

        def run(x: Matrix, w: Matrix) -> torch.Tensor:
            flat = Fp8(*(of.flatten(1, 2) for of in x)) if isinstance(x, Fp8) else x.flatten(1, 2)
            y = product(flat, w).view(experts, ranks, rows, columns)
            return send(y.transpose(0, 1).contiguous())[0]

        return run

    def _embedding_all_to_all(self, call: Sizes) -> Callable[..., Any]:
        """Plan lookups.  An index of no row counts as -1: reading the values would wait for the GPU."""
        batch = call.dims["B"]
        send = self._all_to_all_of(call.result, call.dtype)

        def run(tables: torch.Tensor, indices: torch.Tensor, offsets: torch.Tensor | None = None) -> torch.Tensor:
            everybody = bag_sums(tables, indices, offsets, self.num_ranks * batch)
            parts = everybody.view(len(tables), self.num_ranks, batch, tables.shape[2])
            return send(parts.transpose(0, 1).contiguous())[0]

        return run

    def _all_to_all(self, call: Sizes) -> Callable[..., Any]:
        send = self._all_to_all_of(call.result, call.dtype)

        def run(x: torch.Tensor) -> torch.Tensor:
            return send(x)[0]

        return run

    def _all_gather(self, parts: Sequence[_Part]) -> _Exchange:
        """Plan an exchange whose tensors go whole to all ranks; it returns each of all ranks, `[R, ...]`."""
        found = [((self.num_ranks, *shape), dtype) for shape, dtype in parts]
        return self._exchange(parts, found, False)

    def _all_to_all_of(self, shape: tuple[int, ...], dtype: torch.dtype) -> _Exchange:
        """Plan an exchange whose part q of a tensor `[R, ...]` goes to rank q; it returns the parts for this rank."""
        part = [(shape, dtype)]
        return self._exchange(part, part, True)

    def _exchange(self, mine: Sequence[_Part], found: Sequence[_Part], parted: bool) -> _Exchange:
        """Plan an exchange: tensors like `mine` are published, one behind the other; `found` is read of all ranks.

        parted: read the part for this rank, and not all of a tensor.

        Without room it raises BadInput when it runs: an all-reduce may need no exchange.
        """
        window, ranks, staging = self._window, self.num_ranks, self._staging
        calls = window._opened.calls
        sizes = [_bytes_of(part) for part in mine]
        ends = list(itertools.accumulate(sizes))
        if ranks > 1 and (more := ends[-1] - len(staging)) > 0:

            def refuse(*given: torch.Tensor) -> NoReturn:
                raise BadInput("nbytes", window.nbytes, f"at least {window.nbytes + more} for these sizes")

            return refuse
        begins = [staging.start + end - size for end, size in zip(ends, sizes, strict=True)] if ranks > 1 else []
        published = [window.tensor(*part, offset=at) for part, at in zip(mine, begins, strict=False)]
        rotation = [(self._rank + step) % ranks for step in range(ranks)]
        copies: list[tuple[int, int, torch.Tensor]] = []  # tensor, rank, and where they are read
        for rank in rotation if ranks > 1 else ():
            for nth, ((shape, dtype), at) in enumerate(zip(found, begins, strict=True)):
                offset = self._rank * (sizes[nth] // ranks) if parted else 0
                copies.append((nth, rank, window.tensor(shape[1:], dtype, rank=rank, offset=at + offset)))

        def run(*given: torch.Tensor) -> list[torch.Tensor]:
            out = []
            for of, (shape, dtype) in zip(given, found, strict=True):
                out.append(of.new_empty(shape, dtype=dtype))
            if ranks == 1:
                for of, to in zip(given, out, strict=True):
                    to.view(of.shape).copy_(of)
                return out
            window._enter_barriers()
            try:
                for of, to in zip(given, published, strict=True):
                    to.copy_(of)
                come = calls.barrier()
                for nth, rank, of in copies if come else ():
                    out[nth][rank].copy_(of)
                if not (come and calls.barrier()):
                    window._raise_failure()
            finally:
                window._leave_barriers()
            return out

        return run


def _bytes_of(part: _Part) -> int:
    shape, dtype = part
    return math.prod(shape) * dtype.itemsize
