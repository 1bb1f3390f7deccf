"""Executors: who runs a call.  HostExecutor for CPU ranks; for GPUs the fused kernels, or the unfused form."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any, Protocol

import torch

from moecomm.errors import BadInput, MoecommError, Unsupported
from moecomm.overlap.agreement import FirstCalls
from moecomm.overlap.host import HostExecutor
from moecomm.overlap.plans import CallNumbers, Operators
from moecomm.overlap.sizes import Sizes
from moecomm.overlap.unfused import UnfusedExecutor
from moecomm.window import Window

_GPU = "moecomm.overlap.gpu"

COLUMNS = 8  # depths and numbers of columns of fused products are multiples of it
# The product of so few rows is bound by w, and torch's is faster than the fused kernel's by more than that hides.  With
# a kernel that adds up the products it takes 0.66 to 0.93 of NCCL's time, and the fused kernel 0.82 to 1.27
# (bench/results/overlap-matmul-all-reduce-h200-2.json).  Up to 16 rows there is a fused kernel of their own.
FEW_ROWS = range(17, 257)
# Elements of w from which an all-gather is a small part of the call, and the product decides: 2048 x 7168 x 8192 takes
# 515 us fused, 435 us unfused and 429 us with NCCL on 4 H200s; 8192^3 takes 1911, 1909 and 1933 us.  On two H200s both
# forms take 0.90 to 1.02 of NCCL's time (bench/results/overlap-all-gather-matmul-h200-2.json).
LARGE_WEIGHT = 1 << 25


class FusedOperators(Protocol):
    """The fused operators of a GPU: `GpuExecutor(window, offset, nbytes)` of moecomm.overlap.gpu.

    They raise Unsupported for sizes that they do not take, and BadInput where the Workspace has no room, before they
    reach other ranks.
    """

    staging: range  # bytes of the Window that hold nothing between calls of all ranks

    def plan(self, call: Sizes, gather: bool = False) -> Callable[..., Any]:
        """See Operators."""
        ...

    def can_sum(self, nbytes: int) -> bool:
        """Return whether all_reduce() takes a tensor of so many bytes."""
        ...

    def all_reduce(self, y: torch.Tensor) -> torch.Tensor | None:
        """Return the sum of y of all ranks, in rank order and rounded once; None: it takes no such tensor."""
        ...


class Executors(Protocol):
    """The executors that a Workspace has."""

    counted_ahead: int  # 1: choose() and later calls count themselves in CallNumbers.made; 0: their rounds do

    def choose(self, sizes: Sizes, fused: bool | None, gather: bool) -> tuple[Callable[..., Any], bool]:
        """Return what runs a call, and whether calls like it need not be chosen for again."""
        ...


class HostExecutors:
    """The executor of CPU ranks, which has one form of each operator."""

    counted_ahead = 0

    def __init__(self, window: Window, numbers: CallNumbers) -> None:
        self._host = HostExecutor(window, numbers)

    def choose(self, sizes: Sizes, fused: bool | None, gather: bool) -> tuple[Callable[..., Any], bool]:
        """See Executors.  Every call is compared."""
        return self._host.plan(sizes, gather), True


class FusedFirst(Operators):
    """The fused operators, and the unfused form of calls that those do not take.

    Sizes and room decide which, so all ranks take the same: see FirstCalls.
    """

    def __init__(self, fused: FusedOperators, unfused: UnfusedExecutor) -> None:
        self._fused, self._unfused = fused, unfused

    def plan(self, call: Sizes, gather: bool = False) -> Callable[..., Any]:
        """See Operators."""
        try:
            fused = self._fused.plan(call, gather)
        except (BadInput, Unsupported):
            return self._unfused.plan(call, gather)

        def run(*given: Any) -> Any:
            try:
                return fused(*given)
            except (BadInput, Unsupported):
                return self._unfused.plan(call, gather)(*given)

        return run


class GpuExecutors:
    """The executors of GPUs.  First calls are compared ahead of either.

    Args:
        window: of all ranks.
        nbytes: the first bytes of it, for executors; agreement.BYTES behind them are for comparing first calls.
        numbers: of the Workspace.
    """

    counted_ahead = 1

    def __init__(self, window: Window, nbytes: int, numbers: CallNumbers) -> None:
        self._ranks, self._numbers, self._first_calls = window.num_ranks, numbers, FirstCalls(window, nbytes)
        self._fused: FusedOperators | MoecommError  # why there are none
        try:
            self._fused = _fused_operators(window, nbytes)
        except (BadInput, Unsupported) as error:
            self._fused = error
            self._unfused = UnfusedExecutor(window, range(nbytes))
        else:
            self._unfused = UnfusedExecutor(window, self._fused.staging, self._fused.all_reduce)
            self._fused_first = FusedFirst(self._fused, self._unfused)

    def choose(self, sizes: Sizes, fused: bool | None, gather: bool) -> tuple[Callable[..., Any], bool]:
        """Return what runs a call, after comparing it with those of the other ranks if it is the first such.

        Raises:
            Mismatch: see FirstCalls.
            Unsupported, BadInput: `fused=True`, and there are no fused operators, or they do not take it.
        """
        operators: Any = self._unfused
        if isinstance(self._fused, MoecommError):
            if fused:
                raise self._fused
            fused = False
        elif fused:
            operators = self._fused
        elif fused is None and not is_slower(self._ranks, sizes, self._fused.can_sum):
            operators, fused = self._fused_first, True
        self._numbers.made += 1
        compared = self._first_calls.check(sizes, self._numbers.failed, fused)
        return operators.plan(sizes, gather), compared


def is_slower(num_ranks: int, sizes: Sizes, can_sum: Callable[[int], bool]) -> bool:
    """Return whether the fused form of a call is slower than the unfused one, or does not exist: for `fused=None`.

    A fused kernel is the default wherever it takes the sizes, on any GPU and with any number of ranks, because it hides
    communication that the unfused form adds.  One rank alone has nothing to hide; among several, two kinds of calls are
    the exception.

    Args:
        num_ranks: number of ranks.
        sizes: of the call.
        can_sum: returns whether there is a kernel that adds up products of so many bytes.
    """
    dims = sizes.dims
    if num_ranks == 1 or any(dims.get(name, 0) % COLUMNS for name in ("N", "K")):
        return True
    if sizes.operator == "matmul_all_reduce":
        return dims["M"] in FEW_ROWS and can_sum(2 * dims["M"] * dims["N"])
    return sizes.operator == "all_gather_matmul" and dims["N"] * dims["K"] >= LARGE_WEIGHT


def _fused_operators(window: Window, nbytes: int) -> FusedOperators:
    """Return the fused operators over the first `nbytes` of a Window.  Raises Unsupported, BadInput."""
    try:
        module: Any = importlib.import_module(_GPU)
    except ModuleNotFoundError as error:
        if error.name != _GPU:
            raise
        raise Unsupported("fused operators on GPUs: this version has none") from error
    executor: FusedOperators = module.GpuExecutor(window, 0, nbytes)
    return executor
