"""The operators without fusion: a product or a lookup of torch and an exchange, one after the other."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from moecomm.fused.fp8 import Fp8
from moecomm.overlap.exchanges import Part, UnfusedExchange
from moecomm.overlap.local import bag_sums, check_bags, product
from moecomm.overlap.plans import Operators
from moecomm.overlap.sizes import GROUP, Matrix, Sizes


class UnfusedExecutor(Operators):
    """The unfused form.

    Args:
        exchange: between the ranks.
        all_reduce: used for sums instead, where it takes them: see moecomm.overlap.executors.FusedOperators.
    """

    def __init__(
        self, exchange: UnfusedExchange, all_reduce: Callable[[torch.Tensor], torch.Tensor | None] | None = None
    ) -> None:
        self._exchange, self._all_reduce = exchange, all_reduce
        self.num_ranks = exchange.num_ranks

    def plan(self, call: Sizes, gather: bool = False) -> Callable[..., Any]:
        if call.operator == "all_gather_matmul":
            return self._all_gather_matmul(call, gather)
        return getattr(self, f"_{call.operator}")(call)  # type: ignore[no-any-return]

    def _all_gather_matmul(self, call: Sizes, gather: bool) -> Callable[..., Any]:
        rows, depth = call.dims["M"], call.dims["K"]
        parts: list[Part] = [((rows, depth), call.given)]
        if call.fp8:
            parts.append(((rows, depth // GROUP), torch.float32))
        collect = self._exchange.all_gather(parts)

        def run(x: Matrix, w: Matrix) -> tuple[torch.Tensor, Matrix | None]:
            whole = [of.flatten(0, 1) for of in collect(*(x if isinstance(x, Fp8) else (x,)))]
            gathered = Fp8(*whole) if call.fp8 else whole[0]
            return product(gathered, w), gathered if gather else None

        return run

    def _matmul_reduce_scatter(self, call: Sizes) -> Callable[..., Any]:
        shape = (self.num_ranks, *call.result)
        scatter = self._exchange.reduce_scatter(shape, call.dtype)

        def run(x: Matrix, w: Matrix) -> torch.Tensor:
            return scatter(product(x, w).view(shape))

        return run

    def _matmul_all_reduce(self, call: Sizes) -> Callable[..., Any]:
        reduced = self._exchange.all_reduce(call.result, call.dtype)

        def run(x: Matrix, w: Matrix) -> torch.Tensor:
            mine = product(x, w)
            if self._all_reduce is not None and (total := self._all_reduce(mine)) is not None:
                return total
            return reduced(mine)

        return run

    def _matmul_all_to_all(self, call: Sizes) -> Callable[..., Any]:
        ranks, experts, rows, columns = call.result
        send = self._exchange.all_to_all(call.result, call.dtype)

        def run(x: Matrix, w: Matrix) -> torch.Tensor:
            flat = Fp8(x.data.flatten(1, 2), x.scales.flatten(1, 2)) if isinstance(x, Fp8) else x.flatten(1, 2)
            y = product(flat, w).view(experts, ranks, rows, columns)
            return send(y.transpose(0, 1).contiguous())

        return run

    def _embedding_all_to_all(self, call: Sizes) -> Callable[..., Any]:
        """Plan lookups.  On GPUs an index of no row counts as -1: reading the values would wait for the device."""
        batch, rows = call.dims["B"], call.dims["V"]
        send = self._exchange.all_to_all(call.result, call.dtype)

        def run(tables: torch.Tensor, indices: torch.Tensor, offsets: torch.Tensor | None = None) -> torch.Tensor:
            if not indices.is_cuda:
                check_bags(indices, offsets, rows)
            everybody = bag_sums(tables, indices, offsets, self.num_ranks * batch)
            parts = everybody.view(len(tables), self.num_ranks, batch, tables.shape[2])
            return send(parts.transpose(0, 1).contiguous())

        return run

    def _all_to_all(self, call: Sizes) -> Callable[..., Any]:
        return self._exchange.all_to_all(call.result, call.dtype)
