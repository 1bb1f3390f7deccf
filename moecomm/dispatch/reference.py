"""The specification of dispatch, for all ranks at once, in plain torch.  Every executor leaves the same bits."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from moecomm.base.experts import experts_of

GROUP = 128  # columns that share a scale
E4M3_MAX = 448.0


@dataclass
class Arrived:
    """The rows of a rank after a dispatch: the fields of Routed in exact sizes, and where each source's tokens are."""

    x: torch.Tensor
    scales: torch.Tensor | None
    src: torch.Tensor
    tokens_per_expert: torch.Tensor
    num_rows: int
    topk_idx: torch.Tensor | None
    topk_weights: torch.Tensor | None
    row_weights: torch.Tensor | None
    rows: list[
        torch.Tensor
    ]  # [T_s, K] for each source s: row here of the k-th expert's copy, -1 where it is elsewhere; flat: the flat row


def quantize(x: torch.Tensor, scale_format: str = "fp32") -> tuple[torch.Tensor, torch.Tensor]:
    """Cast [T, H] to float8_e4m3fn with one scale per 128 columns, [T, ceil(H / 128)].  amax is at least 1e-4.

    "fp32": scale = amax / 448 and q = e4m3(x * (448.0 / amax)), as DeepEP's per-token cast writes it; torch computes
    that quotient as (1 / amax) * 448, in float32, and so does moecomm.
    "ue8m0": the scale is the smallest power of two that is not below the float32 amax / 448, as float8_e8m0fnu, and
    q = e4m3(x / scale), exact but for the cast.  Infinity and NaN in x make it NaN, and finite values of its group 0.
    """
    tokens, hidden = x.shape
    groups = -(-hidden // GROUP)
    wide = torch.zeros(tokens, groups * GROUP, dtype=torch.float32, device=x.device)
    wide[:, :hidden] = x.float()
    wide = wide.view(tokens, groups, GROUP)
    amax = wide.abs().amax(dim=2).clamp(min=1e-4)
    scales = amax / torch.full_like(amax, E4M3_MAX)  # by a number torch would multiply with its reciprocal on GPUs
    if scale_format == "ue8m0":
        bits = scales.view(torch.int32)
        exponent = ((bits >> 23) + (bits & 0x7FFFFF != 0)).clamp(max=255).int()
        up = (exponent << 23).view(torch.float32).reciprocal()
        scales = exponent.to(torch.uint8).view(torch.float8_e8m0fnu)
    else:
        up, scales = amax.reciprocal() * E4M3_MAX, scales.masked_fill(scales.isnan(), torch.nan)
    values = wide * up.unsqueeze(2)
    q = values.masked_fill(values.isnan(), torch.nan).to(torch.float8_e4m3fn)  # one NaN, without a sign
    return q.view(torch.uint8).flatten(1)[:, :hidden].contiguous().view(torch.float8_e4m3fn), scales


def by_column(scales: torch.Tensor) -> torch.Tensor:
    """Return scales [..., rows, n] as grouped GEMMs load them by TMA: columns are contiguous, and ceil4(rows) apart.

    Scales of one byte become int32 [..., rows, ceil(n / 4)]: four in each, the first in the lowest byte, then 0.
    """
    *groups, rows, n = scales.shape
    if scales.element_size() == 1:
        packed = torch.zeros(*groups, rows, -(-n // 4) * 4, dtype=torch.uint8, device=scales.device)
        packed[..., :n] = _bytes(scales)
        scales = packed.view(torch.int32)
    columns = scales.new_zeros(*groups, scales.shape[-1], -(-rows // 4) * 4)
    columns[..., :rows] = scales.transpose(-1, -2)
    return columns.transpose(-1, -2)[..., :rows, :]


def dispatch(
    xs: list[torch.Tensor],
    topk_idx: list[torch.Tensor],
    topk_weights: list[torch.Tensor | None],
    *,
    num_experts: int,
    layout: str = "expert",
    expert_alignment: int = 1,
    max_tokens: int = 0,
    max_rows: list[int] | None = None,
    scales: list[torch.Tensor] | None = None,
) -> list[Arrived]:
    """Dispatch `xs[r]` [T_r, H], `topk_idx[r]` [T_r, K], `topk_weights[r]` [T_r, K] or None (ones) of every rank r.

    Returns every rank's Arrived.  Scales `scales[r]` [T_r, n] arrive as rows; by_column() makes the other layout.
    batched: rank r has `max_rows[r]` rows for each expert, or as many as all ranks with `max_tokens` tokens can send.
    """
    ranks = len(xs)
    topk = topk_idx[0].shape[1]
    source = torch.cat([torch.full((x.shape[0],), r) for r, x in enumerate(xs)])
    token = torch.cat([torch.arange(x.shape[0]) for x in xs])
    x, idx = torch.cat(xs), torch.cat(topk_idx).long()
    weights = torch.cat(
        [torch.ones(i.shape) if w is None else w for i, w in zip(topk_idx, topk_weights, strict=True)]
    ).float()
    row_scales = None if scales is None else torch.cat(scales)
    src = torch.stack([source, token], dim=1).int()
    sizes = [len(part) for part in xs]

    arrived = []
    for rank in range(ranks):
        experts = experts_of(rank, num_experts, ranks)
        local = len(experts)
        here = (idx >= experts.start) & (idx < experts.stop)
        local_idx = torch.where(here, idx - experts.start, -1)
        counts = torch.bincount(local_idx[here], minlength=local)
        if layout == "flat":
            pick = here.any(dim=1).nonzero().flatten()  # already by (source, token)
            row_of = torch.full((len(x), 1), -1)
            row_of[pick, 0] = torch.arange(len(pick))
            arrived.append(
                Arrived(
                    x=x[pick],
                    scales=None if row_scales is None else row_scales[pick],
                    src=src[pick],
                    tokens_per_expert=counts.int(),
                    num_rows=len(pick),
                    topk_idx=local_idx[pick].to(topk_idx[0].dtype),
                    topk_weights=torch.where(here, weights, 0.0)[pick],
                    row_weights=None,
                    rows=list(torch.split(torch.where(here, row_of, -1), sizes)),
                )
            )
            continue
        if layout == "expert":
            ends = (((counts + expert_alignment - 1) // expert_alignment) * expert_alignment).cumsum(0)
            starts, total = torch.cat([torch.zeros(1, dtype=torch.long), ends[:-1]]), int(ends[-1])
        else:
            group = ranks * max_tokens if max_rows is None else max_rows[rank]
            starts, total = torch.arange(local) * group, local * group
        entry = here.flatten().nonzero().flatten()  # (source, token, k) in order
        expert = local_idx.flatten()[entry]
        order = expert.argsort(stable=True)
        entry, expert = entry[order], expert[order]
        within = torch.arange(len(entry)) - (counts.cumsum(0) - counts)[expert]
        rows = starts[expert] + within
        row_of = torch.full((idx.numel(),), -1)
        row_of[entry] = rows
        out_x = torch.zeros(total, x.shape[1], dtype=x.dtype)
        _bytes(out_x)[rows] = _bytes(x)[entry // topk]
        out_src = torch.full((total, 2), -1, dtype=torch.int32)
        out_src[rows] = src[entry // topk]
        out_weights = torch.zeros(total)
        out_weights[rows] = weights.flatten()[entry]
        out_scales = None
        if row_scales is not None:
            out_scales = torch.zeros(total, row_scales.shape[1], dtype=row_scales.dtype)
            _bytes(out_scales)[rows] = _bytes(row_scales)[entry // topk]
        arrived.append(
            Arrived(
                x=out_x,
                scales=out_scales,
                src=out_src,
                tokens_per_expert=counts.int(),
                num_rows=total if layout == "expert" else int(counts.sum()),
                topk_idx=None,
                topk_weights=None,
                row_weights=out_weights,
                rows=list(torch.split(row_of.view(idx.shape), sizes)),
            )
        )
    return arrived


def unused(arrived: Arrived, max_rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Fill flat topk_idx and topk_weights up to `max_rows` rows: rows past num_rows have no expert, -1 and 0."""
    idx, weights = arrived.topk_idx, arrived.topk_weights
    assert idx is not None and weights is not None, "flat rows have them"
    spare = (max_rows - arrived.num_rows, idx.shape[1])
    return torch.cat([idx, idx.new_full(spare, -1)]), torch.cat([weights, weights.new_zeros(spare)])


def _bytes(t: torch.Tensor) -> torch.Tensor:
    return t.contiguous().view(torch.uint8)  # not all float8 tensors can be indexed
