"""Random cases from a seed: sizes, routings and options that a dispatch and a combine must survive."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import torch

DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def random_sizes(seed: int, *, ranks: tuple[int, ...] = (1, 2, 2, 2, 3, 3, 4, 4, 8)) -> dict[str, Any]:
    """Arguments of LocalBuffers: small, of every kind."""
    rng = random.Random(seed)
    count = rng.choice(ranks)
    dtype = rng.choice(DTYPES)
    unit = 16 // dtype.itemsize
    return {
        "ranks": count,
        "hidden": unit * rng.choice([1, 2, 3, 5, 8, 16, 17, 24, 40]),
        "num_experts": count * rng.choice([1, 1, 2, 3, 4, 8]),
        "topk": rng.choice([1, 1, 2, 2, 2, 3, 3, 4, 4, 6, 8, 8, 13, 32]),
        "max_tokens": rng.choice([1, 3, 8, 9, 17, 40]),
        "dtype": dtype,
    }


@dataclass
class Case:
    """One dispatch and combine of all ranks."""

    seed: int
    layout: str
    alignment: int
    x: list[torch.Tensor]
    topk_idx: list[torch.Tensor]
    topk_weights: list[torch.Tensor | None]
    quantize: bool
    scales: list[torch.Tensor] | None
    weighted: bool
    wire: torch.dtype | None
    bias: list[torch.Tensor | None]
    weight_grads: bool
    workers: int | None
    in_window: bool  # CPUs: experts write into Buffer.empty


def random_case(
    seed: int,
    *,
    ranks: int,
    hidden: int,
    num_experts: int,
    topk: int,
    max_tokens: int,
    dtype: torch.dtype,
    few_kernels: bool = False,
) -> Case:
    """The case of a seed, on the CPU.  Ragged token counts (zero too), -1 entries, duplicates, all-to-one skew,
    every option.

    few_kernels: int64 ids and scales of three columns only, so that a GPU compiles some twenty kernels for a set of
        sizes.
    """
    rng = random.Random(seed)
    g = torch.Generator().manual_seed(seed)
    tokens = [rng.choice([0, 1, max_tokens, rng.randint(0, max_tokens)]) for _ in range(ranks)]
    idx_dtype = torch.int64 if few_kernels else rng.choice([torch.int64, torch.int32])
    kind = rng.choice(["plain", "plain", "drop", "duplicates", "one rank", "nothing"])
    low, high = 0, num_experts
    if kind == "one rank":
        low = rng.randrange(ranks) * (num_experts // ranks)
        high = low + num_experts // ranks
    idx = []
    for t in tokens:
        if kind in ("duplicates", "one rank") or topk > num_experts:
            ids = torch.randint(low, high, (t, topk), generator=g)
        else:
            ids = torch.rand(t, num_experts, generator=g).argsort(dim=1)[:, :topk]
        if kind == "drop":
            ids = torch.where(torch.rand(t, topk, generator=g) < 0.4, -1, ids)
        elif kind == "nothing":
            ids = torch.full_like(ids, -1)
        idx.append(ids.to(idx_dtype))
    layout = rng.choice(["flat", "expert", "batched"])
    if (
        layout == "batched"
        and max((torch.bincount(torch.cat(idx).flatten() + 1, minlength=1)[1:].tolist() or [0]), default=0)
        > ranks * max_tokens
    ):
        layout = "expert"  # more duplicates than batched has room for: that is bad input, tested elsewhere
    x = [torch.randn(t, hidden, generator=g).to(dtype) for t in tokens]
    payload = rng.choice(["plain", "plain", "quantize", "scales", "fp8"])
    scales = None
    if payload == "scales" or (payload == "fp8" and hidden % 16 == 0):
        width = 3 if few_kernels else rng.choice([1, 2, 3, 7])
        scales = [torch.randn(t, width, generator=g) for t in tokens]
    if payload == "fp8" and hidden % 16 == 0:
        x = [t.to(torch.float8_e4m3fn) for t in x]
    bias_kind = rng.choice(["none", "none", "rows", "one"])
    return Case(
        seed=seed,
        layout=layout,
        alignment=rng.choice([1, 1, 2, 8, 13]),
        x=x,
        topk_idx=idx,
        topk_weights=[torch.rand(i.shape, generator=g) if rng.random() < 0.8 else None for i in idx],
        quantize=payload == "quantize" and hidden % 16 == 0,
        scales=scales,
        weighted=rng.random() < 0.8,
        wire=rng.choice([None, None, dtype]),
        bias=[
            None
            if bias_kind == "none"
            else torch.randn(*((t,) if bias_kind == "rows" else ()), hidden, generator=g).to(dtype)
            for t in tokens
        ],
        weight_grads=rng.random() < 0.3,
        workers=rng.choice([None, 1, 2, 3]),
        in_window=rng.random() < 0.3,
    )
