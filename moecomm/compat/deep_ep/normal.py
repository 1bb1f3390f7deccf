"""deep_ep's normal ("high-throughput") dispatch and combine, over moecomm's flat layout."""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

import torch

from moecomm.base.validation import check_dense, check_same_device
from moecomm.buffer import Buffer
from moecomm.compat.deep_ep.pool import Pool, check_dimensions, described, grown
from moecomm.dispatch import Options, Request
from moecomm.dispatch import dispatch as run_dispatch
from moecomm.dispatch.routed import Routed
from moecomm.errors import BadInput

_PACKED = 8  # columns in an element of NVFP4 rows


class Given(NamedTuple):
    """The tensors of a dispatch, as moecomm takes them."""

    rows: torch.Tensor
    scales: torch.Tensor | None
    extras: tuple[torch.Tensor, ...] = ()
    combined: tuple[int, torch.dtype] | None = None  # columns and dtype of rows that return; None: those of `rows`
    dtype: torch.dtype | None = None  # of the caller's rows, where they travel in another

    def arrived(self, rows: Any, scales: Any, routed: Routed) -> Any:
        """Return rows, or a tuple of all that was given."""
        if scales is None:
            return rows
        return (rows if self.dtype is None else rows.view(self.dtype), scales, *routed.extras)


def unpack(x: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Rows, and scales if there are any, as moecomm takes them."""
    if isinstance(x, torch.Tensor) and x.layout is torch.strided and x.ndim == 2:
        return x, None
    rows, scales = x if isinstance(x, tuple) and len(x) == 2 else (x, None)
    if not isinstance(rows, torch.Tensor) or not (scales is None or isinstance(scales, torch.Tensor)):
        raise BadInput("x", type(rows).__name__, "a tensor, or a tuple of two: rows and scales")
    check_dense("x", rows)
    if scales is not None:
        check_dense("x", scales)
    if rows.ndim != 2:
        raise BadInput("x", f"shape {tuple(rows.shape)}", "(tokens, hidden)")
    if scales is not None and not scales.is_contiguous() and scales.stride(-1) != 1:
        scales = scales.contiguous()  # by column, as some quantizers make them
    return rows, scales


def unpack_all(x: Any) -> Given:
    """Return what deep_ep's dispatch takes: rows; rows of one byte an element and scales; NVFP4 rows, scales, factors.

    The third is of deep_ep's branch hybrid-ep: int32 `[T, H/8]`, int32 `[T, n]` and float32 `[T, m]`.
    """
    if not isinstance(x, tuple) or len(x) != 3:
        rows, scales = unpack(x)
        if scales is None or rows.dtype.itemsize != 1 or rows.dtype is torch.float8_e4m3fn:
            return Given(rows, scales)
        return Given(rows.view(torch.float8_e4m3fn), scales, dtype=rows.dtype)  # bytes are bytes
    rows, scales = unpack(x[:2])
    factors, _ = unpack(x[2])
    if not rows.dtype is scales.dtype is torch.int32 or factors.dtype is not torch.float32:  # type: ignore[union-attr]
        got = ", ".join(described(tensor) for tensor in x)
        raise BadInput("x", got, "int32 [tokens, hidden / 8], int32 [tokens, hidden / 64], float32 [tokens, n]")
    return Given(rows, scales, (factors,), (rows.shape[1] * _PACKED, torch.bfloat16))


def one_bias(bias: Any) -> Any:
    """None, a tensor, or the sum of two in float32: it is rounded with what it is added to."""
    if bias is None or isinstance(bias, torch.Tensor):
        return bias
    if not isinstance(bias, tuple) or len(bias) != 2:
        raise BadInput("bias", type(bias).__name__, "None, a tensor or a tuple of two")
    first, second = bias
    if first is None or second is None:
        return second if first is None else first
    if not isinstance(first, torch.Tensor) or not isinstance(second, torch.Tensor):
        raise BadInput("bias", f"{type(first).__name__} and {type(second).__name__}", "tensors or None")
    if first.shape != second.shape or first.dtype is not second.dtype or first.device != second.device:
        raise BadInput("bias", f"{described(first)} and {described(second)}", "two alike")
    check_same_device(bias=first, **{"the second bias": second})
    return first.float() + second.float()


def route(
    pool: Pool,
    given: Given,
    ids: torch.Tensor,
    weights: torch.Tensor | None,
    num_experts: int,
    worst: int,
    num_sms: int | None,
) -> Routed:
    """A flat dispatch; where a rank has more tokens than the Buffer takes, again with a larger one."""
    rows = given.rows
    buffer = pool.flat(rows, ids, num_experts, worst, combined=given.combined)
    pool.calls.begin(buffer.rounds)
    request = limited(num_sms)
    more: dict[str, Any] = {"scales": given.scales, "extras": given.extras}
    if worst:
        return run_dispatch(buffer.rounds, request, rows, ids, weights, max_rows=worst, sync=False, **more)
    return grown(
        buffer,
        rows,
        ids,
        lambda buffer: run_dispatch(buffer.rounds, request, rows, ids, weights, sync=True, **more),
        lambda: pool.flat(rows, ids, num_experts, worst, grow=True, combined=given.combined),
        **more,
    )


@lru_cache(maxsize=64)
def limited(num_sms: int | None) -> Request:
    """Return the request of a flat dispatch."""
    return Request(Options("flat", num_sms=num_sms))


def an_expert_of_each_rank(is_token_in_rank: torch.Tensor | None, num_experts: int, ranks: int) -> torch.Tensor:
    """Ids that send every token where `is_token_in_rank` says."""
    if is_token_in_rank is None:
        raise BadInput("topk_idx", "None", "expert ids, is_token_in_rank or handle=")
    check_dimensions("is_token_in_rank", is_token_in_rank, "tokens", "ranks")
    if is_token_in_rank.dtype is not torch.bool or is_token_in_rank.shape[1:] != (ranks,):
        raise BadInput("is_token_in_rank", f"{is_token_in_rank.dtype} {tuple(is_token_in_rank.shape)}", "bool [T, R]")
    first = torch.arange(ranks, device=is_token_in_rank.device) * (num_experts // ranks)
    return torch.where(is_token_in_rank, first, -1)


def exchange_counts(pool: Pool, num_tokens_per_expert: torch.Tensor) -> list[int]:
    """Everybody's tokens for our experts, as a small round of its own: rank r gets a row of counts from each."""
    ranks = pool.ranks.ranks
    local = len(num_tokens_per_expert) // ranks
    counts = torch.zeros((ranks, -(-local // 4) * 4), dtype=torch.float32, device=num_tokens_per_expert.device)
    counts[:, :local] = num_tokens_per_expert.view(ranks, local)  # float32 is exact up to 2^24
    ids = torch.arange(ranks, device=counts.device).unsqueeze(1)
    buffer: Buffer = pool.flat(counts, ids, ranks, 0)
    pool.calls.begin(buffer.rounds)
    rows = buffer.dispatch(counts, ids, layout="flat", sync=True).x
    return [int(count) for count in rows[:, :local].sum(dim=0).tolist()]


def aligned(counts: list[int], alignment: int) -> list[int]:
    """Return the counts, rounded up."""
    return counts if alignment == 1 else [-(-count // alignment) * alignment for count in counts]
