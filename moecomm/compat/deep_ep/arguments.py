"""Checks of deep_ep's arguments, and refusals of what moecomm does not have."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from moecomm.base.arrays import check_tensor
from moecomm.base.validation import MOST_SIZE, check_alignment, check_integer, is_integer
from moecomm.dispatch.options import check_num_sms
from moecomm.errors import BadInput, Unsupported


def not_here(name: str, instead: str = "see moecomm.compat.deep_ep for what is not supported") -> Callable[..., Any]:
    """Return a function that raises Unsupported and names a call of deep_ep."""

    def refuse(*args: Any, **named: Any) -> Any:
        raise Unsupported(f"{name}: {instead}")

    return refuse


def refuse(module: str, **options: object) -> None:
    """Raise Unsupported for an option that is given (not None, False or 0) and that moecomm.compat's module lacks."""
    for name, value in options.items():
        if value is not None and value is not False and not (isinstance(value, int) and value == 0):
            raise Unsupported(f"{name}: see moecomm.compat.{module} for what is not supported")


def described(value: Any) -> str:
    """Describe a value that was passed in the place of a tensor."""
    if not isinstance(value, torch.Tensor):
        return type(value).__name__
    if value.layout is not torch.strided:
        return f"a tensor of {value.layout}"
    return f"{value.dtype} {tuple(value.shape)} on {value.device}"


def check_dimensions(argument: str, value: Any, *dimensions: str) -> None:
    """Raise BadInput unless a value is a tensor with these dimensions."""
    if not isinstance(value, torch.Tensor) or value.layout is not torch.strided or value.ndim != len(dimensions):
        raise BadInput(argument, described(value), f"a tensor [{', '.join(dimensions)}]")


def check_stats(stats: Any, experts: int, device: torch.device) -> None:
    """Raise BadInput unless each local expert's tokens can be added to a tensor."""
    name = "cumulative_local_expert_recv_stats"
    check_dimensions(name, stats, "local experts")
    check_tensor(name, stats, device=device, dtypes=(torch.int32,), shape=(experts,))
    if not stats.is_contiguous():
        raise BadInput(name, "a tensor with gaps", "a contiguous one")


def limit_of(rows: torch.Tensor, num_sms: int | None) -> int | None:
    """Return the SMs that a call may use; None for 0, and always on CPUs: moecomm's own choice.

    Raises BadInput on CPUs, as the rounds of GPUs do.
    """
    if num_sms is not None and not is_integer(num_sms):
        check_num_sms(num_sms)
    if rows.is_cuda:
        return num_sms or None
    check_num_sms(num_sms or None)
    return None


def check_experts(num_experts: int, ranks: int) -> None:
    """Raise BadInput unless every rank has as many."""
    if not is_integer(num_experts) or not 1 <= num_experts <= MOST_SIZE or num_experts % ranks:
        raise BadInput("num_experts", num_experts, f"a multiple of the number of ranks, {ranks}")


def check_hint(num_max_tokens_per_rank: int, hidden: int, num_topk: int) -> None:
    """Raise BadInput unless sizes can be told from these; 0: not known."""
    for name, value in (
        ("num_max_tokens_per_rank", num_max_tokens_per_rank),
        ("hidden", hidden),
        ("num_topk", num_topk),
    ):
        check_integer(name, value, 0, MOST_SIZE)


def check_dispatch_sizes(num_experts: int, most: int, align: int, ranks: int) -> None:
    """Raise BadInput unless a Buffer can have these."""
    check_experts(num_experts, ranks)
    check_integer("num_max_tokens_per_rank", most, 1, MOST_SIZE)  # here or of the buffer
    check_alignment("expert_alignment", align)
