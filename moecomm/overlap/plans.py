"""Plans of calls: what a call need not find out again that is like an earlier one of the same Workspace.

A plan is made after the checks of a first call, by the executor that runs it.  A later call compares a key: the
operator, its options, whether its backward pass has a round, and of each tensor the class, shape, strides, dtype,
device and dispatch keys.  Dispatch keys stand for what a first call refuses: quantization, wrappers of torch.func, the
negative bit.  A key leaves out what may change in a tensor: its address and the size of its storage, which every call
looks at.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch.autograd import forward_ad

from moecomm import _native
from moecomm.overlap import sizes
from moecomm.overlap.sizes import Matrix, Sizes

MOST_PLANS = 256  # of a Workspace; they are all dropped then
_ROUNDS_BACK = {  # how many of the first operands have a gradient that takes a round; of others, ranks compute it alone
    "all_gather_matmul": 1,
    "matmul_reduce_scatter": 2,
    "matmul_all_reduce": 0,
    "matmul_all_to_all": 2,
    "embedding_all_to_all": 1,
    "all_to_all": 1,
}
_PLAIN = (torch.Tensor, torch.nn.Parameter)
_OPTIONS = (bool, type(None))


class CallPlan(NamedTuple):
    """The run of calls of one key.

    Attributes:
        run: called with matrices or tensors that are contiguous and aligned to 16 bytes; see Operators.plan.
        spans: bytes from the first element of each tensor to the end of its last.
        contiguous: of each tensor, whether it is.
    """

    run: Callable[..., Any]
    spans: tuple[int, ...]
    contiguous: tuple[bool, ...]


class CallNumbers(_native.Turn):
    """The turn of a Workspace, and the numbers of its calls.

    Attributes:
        made: calls that have begun, and may have reached the other ranks.
        failed: calls that failed before they reached the other ranks: headers that are compared say so.
        of: number of the call whose gradient the current one computes: see Workspace.call.
    """

    def __init__(self) -> None:
        super().__init__()
        self.of = 0


class Operators:
    """Base of executors: the operators of one rank, each made up of a plan and its run.

    Tensors are checked (moecomm/overlap/sizes.py), contiguous, aligned to 16 bytes, and on the device of the Window.
    Matrices in FP8 are pairs of values and scales, and their products are bfloat16.  Results are new tensors.  Shapes
    and values are those of the functions of moecomm.overlap.
    """

    num_ranks: int

    def plan(self, call: Sizes, gather: bool = False) -> Callable[..., Any]:
        """Return the function for calls of these sizes, one at a time; it takes and returns what the operator does.

        `gather`: of all_gather_matmul.
        """
        raise NotImplementedError

    def all_gather_matmul(self, x: Matrix, w: Matrix, gather: bool) -> tuple[torch.Tensor, Matrix | None]:
        """Return the product, and x of all ranks `[R*M, K]`, or None without `gather`."""
        found: tuple[torch.Tensor, Matrix | None]
        found = self.plan(sizes.all_gather_matmul(self.num_ranks, x, w), gather)(x, w)
        return found

    def matmul_reduce_scatter(self, x: Matrix, w: Matrix) -> torch.Tensor:
        """Return this rank's rows of the sum of all products."""
        return self._run(sizes.matmul_reduce_scatter(self.num_ranks, x, w), x, w)

    def matmul_all_reduce(self, x: Matrix, w: Matrix) -> torch.Tensor:
        """Return the sum of all products."""
        return self._run(sizes.matmul_all_reduce(self.num_ranks, x, w), x, w)

    def matmul_all_to_all(self, x: Matrix, w: Matrix) -> torch.Tensor:
        """Return what every rank has computed for this one."""
        return self._run(sizes.matmul_all_to_all(self.num_ranks, x, w), x, w)

    def embedding_all_to_all(
        self, tables: torch.Tensor, indices: torch.Tensor, offsets: torch.Tensor | None
    ) -> torch.Tensor:
        """Return the bags of this rank's samples from the tables of every rank."""
        given = (tables, indices, offsets)
        return self._run(sizes.embedding_all_to_all(self.num_ranks, *given), *given)

    def all_to_all(self, x: torch.Tensor) -> torch.Tensor:
        """Send part q of x `[R, ...]` to rank q; return the parts for this rank, by the rank that sent them."""
        return self._run(sizes.all_to_all(self.num_ranks, x), x)

    def _run(self, call: Sizes, *given: Any) -> torch.Tensor:
        y: torch.Tensor = self.plan(call)(*given)
        return y


class CallKey(NamedTuple):
    """The key of a call's plan, its tensors, whether a gradient may be wanted, and the `gradient` of Sizes."""

    key: tuple[Any, ...]
    tensors: list[torch.Tensor]
    has_gradient: bool
    gradient: bool | None


def has_round_back(operator: str, *operands: object) -> bool:
    """Return whether the backward pass of a call has a round.  Only the caller of an operator of torch can ask."""
    operands = operands[: _ROUNDS_BACK[operator]]
    return torch.is_grad_enabled() and any(isinstance(of, torch.Tensor) and of.requires_grad for of in operands)


def key_of(operator: str, options: Sequence[Any], operands: Sequence[Any], *known: bool | None) -> CallKey | None:
    """Return the key of a call, or None for one that has no plan.

    Args:
        operator: its name.
        options: those that are not tensors, True, False or None each.
        operands: tensors, and pairs of values and scales.
        known: in an operator of torch, its `gradient`.
    """
    if forward_ad._current_level >= 0:  # tangents are refused
        return None
    key: list[Any] = [operator]
    for option in options:
        if type(option) not in _OPTIONS:
            return None
        key.append(option)
    tensors: list[torch.Tensor] = []
    has_gradient, is_enabled = False, torch.is_grad_enabled()
    for operand in operands:
        parts = operand if isinstance(operand, tuple) and len(operand) == 2 else (operand,)
        key.append(len(parts))
        for tensor in parts:
            if type(tensor) not in _PLAIN or tensor.layout is not torch.strided or tensor.is_nested:
                return None
            where = tensor.get_device(), torch._C._dispatch_keys(tensor).raw_repr()
            key += (type(tensor), tensor.shape, tensor.stride(), tensor.dtype, *where)
            tensors.append(tensor)
            has_gradient = has_gradient or (is_enabled and tensor.requires_grad)
    gradient = known[0] if known else has_gradient and has_round_back(operator, *operands)
    key.append(gradient)
    return CallKey(tuple(key), tensors, has_gradient, gradient)


def new_plan(run: Callable[..., Any], tensors: Sequence[torch.Tensor]) -> CallPlan:
    """Make the plan of calls with such tensors."""
    spans = []
    for tensor in tensors:
        last = sum((n - 1) * stride for n, stride in zip(tensor.shape, tensor.stride(), strict=True))
        spans.append((last + 1) * tensor.element_size() if tensor.numel() else 0)
    return CallPlan(run, tuple(spans), tuple(tensor.is_contiguous() for tensor in tensors))
