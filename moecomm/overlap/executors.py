"""Executors of a Workspace: they choose the form of each call.  CPU ranks have the unfused form by copies alone."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any, Protocol

import torch

from moecomm.errors import BadInput, MoecommError, Unsupported
from moecomm.overlap.agreement import EveryCall, FirstCalls
from moecomm.overlap.exchanges import Copies, collectives_of
from moecomm.overlap.measured import Choice, Choices, Run
from moecomm.overlap.plans import CallNumbers, Operators
from moecomm.overlap.sizes import Sizes
from moecomm.overlap.unfused import UnfusedExecutor
from moecomm.window import Window

_GPU = "moecomm.overlap.gpu"

_ROUNDS = 3  # of a call of CPU ranks, as its Window counts: more than it has exchanges, so that it ends with its result
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

    def plan(self, call: Sizes, gather: bool = False) -> Callable[..., Any]: ...

    def can_sum(self, nbytes: int) -> bool:
        """Return whether all_reduce() takes a tensor of so many bytes."""
        ...

    def all_reduce(self, y: torch.Tensor) -> torch.Tensor | None:
        """Return the sum of y of all ranks, in rank order and rounded once; None: it takes no such tensor."""
        ...


class Executors(Protocol):
    """The executors that a Workspace has."""

    counted_ahead: int  # 1: choose() and later calls count themselves in CallNumbers.made; 0: their rounds do

    @property
    def choices(self) -> tuple[Choice, ...]:
        """Forms that have been chosen by a measurement."""
        ...

    def choose(self, sizes: Sizes, fused: bool | None, gather: bool, given: tuple[Any, ...]) -> tuple[Run, bool]:
        """Return the function that runs a call, and whether later calls of the same kind may reuse it."""
        ...


class HostExecutors:
    """The executors of CPU ranks, which have one form of each operator.  Opening is collective.

    Args:
        window: of all ranks.
        nbytes: the first bytes of it, for copies; agreement.BYTES behind them are for headers.
        numbers: of the Workspace.
    """

    counted_ahead = 0
    choices = ()

    def __init__(self, window: Window, nbytes: int, numbers: CallNumbers) -> None:
        self._window, self._nbytes, self._numbers = window, nbytes, numbers
        window.barrier()  # earlier writes of all ranks have come

    def choose(self, sizes: Sizes, fused: bool | None, gather: bool, given: tuple[Any, ...]) -> tuple[Run, bool]:
        """Return the only form.  Ranks compare every call.

        An error in a call, but for those of moecomm, ends the waits of all ranks.
        """
        window = self._window
        agreement = EveryCall(window, self._nbytes, self._numbers, sizes)
        unfused = UnfusedExecutor(Copies(window, range(self._nbytes), agreement)).plan(sizes, gather)

        def run(*operands: Any) -> Any:
            with window._call(_ROUNDS):
                result = unfused(*operands)
                window.turn.made += _ROUNDS
            return result

        return run, True


class GpuExecutors:
    """The executors of GPUs.  First calls are compared ahead of any.

    Attributes:
        fused: the fused operators, or the error that says why there are none.

    Args:
        window: of all ranks.
        nbytes: the first bytes of it, for executors; agreement.BYTES behind them are for agreements.
        numbers: of the Workspace.
    """

    counted_ahead = 1

    def __init__(self, window: Window, nbytes: int, numbers: CallNumbers) -> None:
        self._window, self._numbers = window, numbers
        self._first_calls = FirstCalls(window, nbytes)
        self._choices = Choices(window, self._first_calls)
        self._collectives = collectives_of(window)
        self.fused: FusedOperators | MoecommError
        staging = range(nbytes)
        try:
            self.fused = _fused_operators(window, nbytes)
            staging = self.fused.staging
        except (BadInput, Unsupported) as error:
            self.fused = error
        self._copies = Copies(window, staging)

    @property
    def choices(self) -> tuple[Choice, ...]:
        return self._choices.made

    def choose(self, sizes: Sizes, fused: bool | None, gather: bool, given: tuple[Any, ...]) -> tuple[Run, bool]:
        """Return the function that runs a call.  Compares the first call of each kind with those of the other ranks.

        With `fused=None` the forms of the call are measured, unless they have been, or a graph is captured.

        Raises:
            Mismatch: see FirstCalls.
            Unsupported, BadInput: `fused=True`, and there are no fused operators, or they do not take it.
            Timeout, PeerLost, Aborted: a rank does not take part in a measurement.
        """
        if isinstance(self.fused, MoecommError):
            if fused:
                raise self.fused
            fused = False
        self._numbers.made += 1
        compared = self._first_calls.check(sizes, self._numbers.failed, fused)
        if fused:
            return self.forms(sizes)["fused"].plan(sizes, gather), compared
        forms = self.forms(sizes)
        if fused is False or self._window.num_ranks == 1:  # one rank alone has nothing to hide
            forms.pop("fused", None)
            return next(iter(forms.values())).plan(sizes, gather), compared
        runs: dict[str, Run] = {}
        for form, operators in forms.items():
            with suppress(BadInput, Unsupported):  # it depends on sizes and room alone, so that all ranks have the same
                runs[form] = operators.plan(sizes, gather)
        if len(runs) == 1:
            return next(iter(runs.values())), compared
        if (known := self._choices.find(sizes, runs)) is not None:
            return runs[known], compared
        if self._window._opened.calls.capturing():
            return runs[self._unmeasured(sizes, runs)], False
        return runs[self._choices.measure(sizes, runs, given)], compared

    def forms(self, sizes: Sizes) -> dict[str, Operators | FusedOperators]:
        """Return the forms that a call may have, those with the fewest roundings first.

        - fused: one kernel.
        - kernel: a product of torch, and a kernel that adds up the products.
        - collectives: a product or a lookup of torch, and a collective of the process group.
        - copies: the same with copies through the Window, where there are no collectives.
        """
        forms: dict[str, Operators | FusedOperators] = {}
        if not isinstance(self.fused, MoecommError):
            forms["fused"] = self.fused
            if sizes.operator == "matmul_all_reduce" and self.fused.can_sum(sizes.bytes_of("M", "N")):
                forms["kernel"] = UnfusedExecutor(self._copies, self.fused.all_reduce)
        # A communicator can't be made while a graph is captured.
        if (of := self._collectives) is not None and (of.used or not self._window._opened.calls.capturing()):
            forms["collectives"] = UnfusedExecutor(of)
        else:
            forms["copies"] = UnfusedExecutor(self._copies)
        return forms

    def _unmeasured(self, sizes: Sizes, forms: Iterable[str]) -> str:
        """Return the form of a call that can't be measured now."""
        assert not isinstance(self.fused, MoecommError)
        slower = is_slower(self._window.num_ranks, sizes, self.fused.can_sum)
        return next(form for form in forms if form != "fused" or not slower)


def is_slower(num_ranks: int, sizes: Sizes, can_sum: Callable[[int], bool]) -> bool:
    """Return whether the fused form of a call is slower than the unfused one, or does not exist.

    It decides where a call is captured that has not been measured.  A fused kernel is faster wherever it takes the
    sizes, because it hides communication that the unfused form adds.  One rank alone has nothing to hide; among
    several, two kinds of calls are the exception.

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
