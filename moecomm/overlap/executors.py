"""Executors: who runs an operator.  HostExecutor for CPU ranks; for GPUs the fused kernels, or the unfused form."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from typing import Any, Protocol

import torch

from moecomm.errors import BadInput, MoecommError, Unsupported
from moecomm.overlap import table
from moecomm.overlap.agreement import FirstCalls
from moecomm.overlap.host import HostExecutor
from moecomm.overlap.sizes import Matrix, Sizes
from moecomm.overlap.unfused import UnfusedExecutor
from moecomm.window import Window

_GPU = "moecomm.overlap.gpu"


class Operators(Protocol):
    """The operators of one rank.

    Tensors are checked (moecomm/overlap/sizes.py), contiguous, aligned to 16 bytes, and on the device of the Window.
    Matrices in FP8 are pairs of values and scales, and their products are bfloat16.  Results are new tensors.  Shapes
    and values are those of the functions of moecomm.overlap.
    """

    def all_gather_matmul(self, x: Matrix, w: Matrix, gather: bool) -> tuple[torch.Tensor, Matrix | None]:
        """Return the product, and x of all ranks `[R*M, K]`, or None without `gather`."""
        ...

    def matmul_reduce_scatter(self, x: Matrix, w: Matrix) -> torch.Tensor:
        """Return this rank's rows of the sum of all products."""
        ...

    def matmul_all_reduce(self, x: Matrix, w: Matrix) -> torch.Tensor:
        """Return the sum of all products."""
        ...

    def matmul_all_to_all(self, x: Matrix, w: Matrix) -> torch.Tensor:
        """Return what every rank has computed for this one."""
        ...

    def embedding_all_to_all(
        self, tables: torch.Tensor, indices: torch.Tensor, offsets: torch.Tensor | None
    ) -> torch.Tensor:
        """Return the bags of this rank's samples from the tables of every rank."""
        ...


class FusedOperators(Operators, Protocol):
    """The fused operators of a GPU: `GpuExecutor(window, offset, nbytes)` of moecomm.overlap.gpu.

    They raise Unsupported for sizes that they do not take, and BadInput where the Workspace has no room, before they
    reach other ranks.
    """

    staging: range  # bytes of the Window that hold nothing between calls of all ranks

    def can_sum(self, nbytes: int) -> bool:
        """Return whether all_reduce() takes a tensor of so many bytes."""
        ...

    def all_reduce(self, y: torch.Tensor) -> torch.Tensor | None:
        """Return the sum of y of all ranks, in rank order and rounded once; None: it takes no such tensor."""
        ...


class Executor(Operators, Protocol):
    """The operators, and the exchange that gradients need beside them."""

    def all_to_all(self, x: torch.Tensor) -> torch.Tensor:
        """Send part q of x `[R, ...]` to rank q; return the parts for this rank, by the rank that sent them."""
        ...


class Executors(Protocol):
    """The executors that a Workspace has."""

    @property
    def made(self) -> int:
        """Calls that have begun, and may have reached the other ranks."""
        ...

    def choose(self, sizes: Sizes, fused: bool | None) -> Operators:
        """Return the executor of a call."""
        ...

    def exchange(self, sizes: Sizes) -> Executor:
        """Return the executor of an exchange."""
        ...

    def count_failed(self) -> None:
        """Count a call that failed before it reached the other ranks: headers that are compared say so."""
        ...

    def begin(self, of: int) -> None:
        """Take note of the call whose gradient the next one computes: see Workspace.call."""
        ...


class HostExecutors:
    """The executor of CPU ranks, which has one form of each operator."""

    def __init__(self, window: Window) -> None:
        self._host = HostExecutor(window)

    def choose(self, sizes: Sizes, fused: bool | None) -> Operators:
        """Return it."""
        return self._host

    def exchange(self, sizes: Sizes) -> Executor:
        """Return it."""
        return self._host

    def count_failed(self) -> None:
        """See Executors."""
        self._host.rounds.failed_calls += 1

    def begin(self, of: int) -> None:
        """See Executors."""
        self._host.rounds.of = of

    @property
    def made(self) -> int:
        """See Executors."""
        return self._host.rounds.count


class FusedFirst:
    """The fused operators, and the unfused form of calls that those do not take.

    Sizes and room decide which, so all ranks take the same: see FirstCalls.
    """

    def __init__(self, fused: FusedOperators, unfused: UnfusedExecutor) -> None:
        self._fused, self._unfused = fused, unfused

    def __getattr__(self, operator: str) -> Any:
        """Return an operator."""
        return functools.partial(self._run, getattr(self._fused, operator), getattr(self._unfused, operator))

    @staticmethod
    def _run(fused: Callable[..., Any], unfused: Callable[..., Any], *given: Any) -> Any:
        try:
            return fused(*given)
        except (BadInput, Unsupported):
            return unfused(*given)


class GpuExecutors:
    """The executors of GPUs.  First calls are compared ahead of either.

    Args:
        window: of all ranks.
        nbytes: the first bytes of it, for executors; agreement.BYTES behind them are for comparing first calls.
    """

    def __init__(self, window: Window, nbytes: int) -> None:
        self._ranks, self._first_calls = window.num_ranks, FirstCalls(window, nbytes)
        self._fused: FusedOperators | MoecommError  # why there are none
        try:
            self._fused = _fused_operators(window, nbytes)
        except (BadInput, Unsupported) as error:
            self._fused = error
            self._unfused = UnfusedExecutor(window, range(nbytes))
        else:
            self._unfused = UnfusedExecutor(window, self._fused.staging, self._fused.all_reduce)
            self._fused_first = FusedFirst(self._fused, self._unfused)
        self._made = self._failed_calls = 0

    def choose(self, sizes: Sizes, fused: bool | None) -> Operators:
        """Return the executor of a call, after comparing it with those of the other ranks if it is the first such.

        Raises:
            Mismatch: see FirstCalls.
            Unsupported, BadInput: `fused=True`, and there are no fused operators.
        """
        operators: Any = self._unfused
        if isinstance(self._fused, MoecommError):
            if fused:
                raise self._fused
            fused = False
        elif fused:
            operators = self._fused
        elif fused is None and not table.is_slower(self._ranks, sizes, self._fused.can_sum):
            operators, fused = self._fused_first, True
        self._made += 1
        self._first_calls.check(sizes, self._failed_calls, fused)
        chosen: Operators = operators
        return chosen

    def exchange(self, sizes: Sizes) -> Executor:
        """Return the unfused executor, likewise."""
        self._made += 1
        self._first_calls.check(sizes, self._failed_calls)
        return self._unfused

    def count_failed(self) -> None:
        """See Executors."""
        self._failed_calls += 1

    def begin(self, of: int) -> None:
        """Do nothing: what differs from call to call is not compared."""

    @property
    def made(self) -> int:
        """See Executors."""
        return self._made


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
