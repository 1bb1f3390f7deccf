"""Results of deep_ep's calls by its documentation, for all ranks at once, in loops over plain torch."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import torch


@dataclass
class Case:
    """The inputs of all ranks."""

    num_experts: int
    x: list[torch.Tensor]
    topk_idx: list[torch.Tensor]
    topk_weights: list[torch.Tensor]

    @property
    def ranks(self) -> int:
        return len(self.x)

    @property
    def local_experts(self) -> int:
        return self.num_experts // self.ranks

    def owner(self, expert: int) -> int:
        return -1 if expert < 0 else expert // self.local_experts


def random_case(seed: int, *, ranks: int, hidden: int = 256, most: int = 12, topk: int | None = None) -> Case:
    """Ragged token counts, none too; ids that pick nothing, or the same expert twice."""
    rng, g = random.Random(seed), torch.Generator().manual_seed(seed)
    num_experts, topk = ranks * rng.choice([1, 2, 3]), topk or rng.choice([1, 2, 4])
    tokens = [rng.choice([0, 1, rng.randint(0, most), most]) for _ in range(ranks)]
    return Case(
        num_experts,
        [torch.randn(t, hidden, generator=g).bfloat16() for t in tokens],
        [torch.randint(-1, num_experts, (t, topk), generator=g) for t in tokens],
        [torch.rand(t, topk, generator=g) for t in tokens],
    )


@dataclass
class Normal:
    """Results of get_dispatch_layout, dispatch and combine on one rank."""

    num_tokens_per_rank: torch.Tensor
    num_tokens_per_expert: torch.Tensor
    is_token_in_rank: torch.Tensor
    src: list[tuple[int, int]] = field(default_factory=list)  # source rank and token of each row
    recv_topk_idx: list[list[int]] = field(default_factory=list)
    recv_topk_weights: list[list[float]] = field(default_factory=list)
    num_recv_tokens_per_expert: list[int] = field(default_factory=list)
    rank_prefix: list[int] = field(default_factory=list)  # the column of this rank


def normal(case: Case) -> list[Normal]:
    """Every rank's."""
    ranks, local = case.ranks, case.local_experts
    out = []
    for rank in range(ranks):
        ids = case.topk_idx[rank].tolist()
        is_in = torch.tensor([[any(case.owner(e) == r for e in row) for r in range(ranks)] for row in ids])
        is_in = is_in.view(len(ids), ranks).bool()
        per_expert = torch.tensor([sum(row.count(e) for row in ids) for e in range(case.num_experts)])
        out.append(Normal(is_in.sum(0).int(), per_expert.int(), is_in))
    for rank, mine in enumerate(out):
        for source, theirs in enumerate(out):
            for token in range(len(case.x[source])):
                if not theirs.is_token_in_rank[token, rank]:
                    continue
                mine.src.append((source, token))
                here = [case.owner(e) == rank for e in case.topk_idx[source][token].tolist()]
                ids, weights = case.topk_idx[source][token].tolist(), case.topk_weights[source][token].tolist()
                mine.recv_topk_idx.append([e - rank * local if h else -1 for e, h in zip(ids, here, strict=True)])
                mine.recv_topk_weights.append([w if h else 0.0 for w, h in zip(weights, here, strict=True)])
            mine.rank_prefix.append(len(mine.src))
        flat = [e for row in mine.recv_topk_idx for e in row]
        mine.num_recv_tokens_per_expert = [flat.count(e) for e in range(local)]
    return out


def rows(case: Case, src: list[tuple[int, int]], of: list[torch.Tensor] | None = None) -> torch.Tensor:
    """The sources' rows."""
    of = case.x if of is None else of
    return torch.stack([of[s][t] for s, t in src]) if src else of[0][:0]


@dataclass
class LowLatency:
    """Result of low_latency_dispatch on one rank: for each local expert the rows it gets from each rank."""

    src: list[list[list[int]]]  # [expert][rank]: tokens

    def count(self, expert: int) -> int:
        return sum(len(tokens) for tokens in self.src[expert])


def low_latency(case: Case) -> list[LowLatency]:
    """Every rank's."""

    def tokens(expert: int, source: int) -> list[int]:
        return [t for t, ids in enumerate(case.topk_idx[source].tolist()) for e in ids if e == expert]

    local = case.local_experts
    return [
        LowLatency([[tokens(rank * local + e, source) for source in range(case.ranks)] for e in range(local)])
        for rank in range(case.ranks)
    ]


def cast_to_fp8(x: torch.Tensor, round_scale: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """[T, H] -> float8_e4m3fn and a float32 scale for every 128 columns: amax / 448, or the power of two above."""
    groups = x.float().view(len(x), x.shape[1] // 128, 128)
    scales = groups.abs().amax(dim=2).clamp(min=1e-4) / 448.0
    if round_scale:
        scales = torch.exp2(torch.ceil(torch.log2(scales)))
    return (groups / scales.unsqueeze(2)).to(torch.float8_e4m3fn).view_as(x), scales


@dataclass
class Expanded:
    """Result of ElasticBuffer.dispatch(do_expand=True) on one rank."""

    rows: list[tuple[int, int, int] | None]  # source rank, token and k of each row; None: padding
    counts: list[int]  # of each local expert, without padding
    slots: list[list[int]]  # of each token that came, by source rank and token: the row of each k, or -1


def expanded(case: Case, alignment: int) -> list[Expanded]:
    """Every rank's."""
    out = []
    for rank, mine in enumerate(normal(case)):
        result = Expanded([], [], [[-1] * case.topk_idx[0].shape[1] for _ in mine.src])
        for expert in range(case.local_experts):
            picks = [
                (source, token, k)
                for source in range(case.ranks)
                for token, ids in enumerate(case.topk_idx[source].tolist())
                for k, e in enumerate(ids)
                if e == rank * case.local_experts + expert
            ]
            for source, token, k in picks:
                result.slots[mine.src.index((source, token))][k] = len(result.rows)
                result.rows.append((source, token, k))
            result.counts.append(len(picks))
            result.rows += [None] * (-len(picks) % alignment)
        out.append(result)
    return out
