"""The specification of combine, for all ranks at once, in plain torch: the order of sums, and their roundings."""

from __future__ import annotations

import torch

from moecomm.base import formats
from moecomm.base.choices import CAST_WIRES, CombineWire
from moecomm.combine.options import wire_dtype
from moecomm.dispatch.reference import Arrived


def combine(
    ys: list[torch.Tensor],
    arrived: list[Arrived],
    *,
    layout: str = "expert",
    weighted: bool = True,
    bias: list[torch.Tensor | None] | None = None,
    wire: CombineWire | None = None,
    domain_ranks: int | None = None,
    topk_weights: list[torch.Tensor] | None = None,
    bias_first: bool = False,
) -> list[torch.Tensor]:
    """Combine experts' outputs `ys[p]` (rows as in `arrived[p].x`, [rows, H]) to [T_r, H] of every rank r.

    expert, batched: partial_p = sum over k ascending of w_k * y_k, each product and each sum rounded to float32,
    then to `wire` (None: the dtype of `ys`; "exact": float32; "fp8", "int8": see travelled()); w_k is that of
    `topk_weights`, [T_r, K] of each rank, or else the weight that dispatch carried.
    wire="rows", expert, batched: out = sum over k ascending of w_k * y_k, whichever ranks own the experts, each product
    and each sum rounded to float32, plus bias, rounded once.
    flat: partial_p = the row of rank p; with "fp8" and "int8" rounded to it, as the sums of other layouts.
    out = sum over p ascending of partial_p in float32, plus bias, rounded once to the dtype of `ys`.
    bias_first, in one domain: ((bias + partial_0) + partial_1) + ..., as DeepEP adds.

    domain_ranks: with several domains, the partial sums of the ranks of each domain are added; the sum of a domain that
    is not the token's own is rounded to `wire`; then the sums of the domains are added, ascending.  Before the rounding
    of the result, this differs from the order of one domain by at most (g(n - 1) + g(min(n - 1, L + D' - 2))) A: with n
    ranks that have the token, in D' domains of L ranks, u = 2^-24, g(n) = n u / (1 - n u), A = the sum of |partial_p|.
    A `wire` of 16 bits adds w (1 + g(L - 1)) (1 + g(D' - 1)) A, w = 2^-8 (bfloat16) or, above underflow, 2^-11
    (float16).
    csrc/protocol/domains.h derives it.  With "fp8" and "int8", too, each partial_p is rounded, flat ones as well, and
    the sum of another domain is rounded again.
    """
    size = domain_ranks or len(ys)
    dtype = ys[0].dtype
    unsummed = wire == "rows"
    wire = wire_dtype(wire, dtype)
    out = []
    for source in range(len(ys)):
        tokens, topk = arrived[0].rows[source].shape
        reduced_rows = torch.zeros(len(ys) // size, tokens, ys[0].shape[1])  # by domain
        added = None if bias is None else bias[source]
        starts = bias_first and size == len(ys)
        if added is not None and starts:
            reduced_rows += added.float()
        addends = torch.zeros(topk, tokens, ys[0].shape[1])  # unsummed: by k
        for p, (y, here) in enumerate(zip(ys, arrived, strict=True)):
            rows = here.rows[source]
            on = rows >= 0
            if not on.any():
                continue
            if layout == "flat":
                partial = y[rows.max(dim=1).values.clamp(min=0)].float()
            else:
                terms = y[rows.clamp(min=0)].float()  # [T, K, H]
                if weighted:
                    assert here.row_weights is not None
                    carried = here.row_weights[rows.clamp(min=0)]
                    terms = (carried if topk_weights is None else topk_weights[source]).unsqueeze(2) * terms
                if unsummed:
                    addends = torch.where(on.T.unsqueeze(2), terms.transpose(0, 1), addends)
                    continue
                partial = torch.zeros_like(reduced_rows[0])
                for k in range(topk):
                    partial += torch.where(on[:, k : k + 1], terms[:, k], 0.0)
            if layout != "flat" or wire in CAST_WIRES:
                partial = travelled(partial, wire)
            reduced_rows[p // size] += torch.where(on.any(dim=1, keepdim=True), partial, 0.0)
        if unsummed:
            for k in range(topk):
                reduced_rows[0] += addends[k]
        total = torch.zeros_like(reduced_rows[0])
        for domain, part in enumerate(reduced_rows):
            total += part if domain == source // size else travelled(part, wire)
        if added is not None and not starts:
            total = total + added.float()
        out.append(total.to(dtype))
    return out


def travelled(sums: torch.Tensor, wire: torch.dtype) -> torch.Tensor:
    """Return float32 sums [T, H] as they are after they have travelled in `wire`.

    float8_e4m3fn and int8: values are cast with a float32 scale for 128 columns, as the formats "fp8" and "int8_group"
    of moecomm/base/formats.py, and come back as value * scale, rounded to float32.

    e4m3: let A = max(1e-4, the largest magnitude of the group), at most 2^126.  The scale, the factor, both products
    and the quotient are rounded to float32, so that a normal e4m3 value is off by half an ulp, 2^-4 of itself, and 5
    such roundings; a subnormal one by half of the smallest value, 2^-10, times the scale A / 448.  So

        |travelled(s) - s| <= (2^-4 + 2^-21) |s| + (1 + 2^-21) 2^-10 A / 448

    int8: let A = max(1e-10, the largest magnitude of the group).  The scale, the quotient and the product are rounded
    to float32, and the quotient to an integer, by half of one at most.  So

        |travelled(s) - s| <= (1 + 2^-22) A / 254 + 2^-22 |s|

    A group with an infinity or a NaN comes back as NaN.
    """
    if wire not in CAST_WIRES:
        return sums.to(wire).float()
    name = CAST_WIRES[wire]
    return formats.dequantize(*formats.quantize(sums, name), name)


def combine_weight_grads(
    grads: list[torch.Tensor], arrived: list[Arrived], *, layout: str = "expert"
) -> list[torch.Tensor]:
    """Return gradients of the rows' weights ([rows]; flat: [rows, K]) to every rank: [T_r, K], 0 beside -1."""
    out = []
    for source in range(len(grads)):
        home = torch.zeros(arrived[0].rows[source].shape)
        for grad, here in zip(grads, arrived, strict=True):
            rows = here.rows[source]
            token, k = (rows >= 0).nonzero(as_tuple=True)
            home[token, k] = grad[rows[token, k], k] if layout == "flat" else grad[rows[token, k]]
        out.append(home)
    return out
