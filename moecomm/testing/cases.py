"""Random cases from a seed: sizes, routings and options that dispatch and combine must handle."""

from __future__ import annotations

import random
from collections.abc import Collection
from dataclasses import dataclass, field, replace
from typing import Any, get_args

import torch

from moecomm.base import formats
from moecomm.base.choices import Quantize, ReplicaChoice, ScaleLayout, Wire
from moecomm.base.experts import experts_of
from moecomm.base.placement import Placement, of_ranks

PAYLOADS = (torch.uint8, torch.int8, torch.float8_e5m2, torch.int16, torch.int32)  # of rows that travel as bytes
DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def random_sizes(seed: int, *, ranks: tuple[int, ...] = (1, 2, 2, 2, 3, 3, 4, 4, 8)) -> dict[str, Any]:
    """Return small random arguments of LocalBuffers, which cover ragged sizes and all dtypes."""
    rng = random.Random(seed)
    count = rng.choice(ranks)
    dtype = rng.choice(DTYPES)
    unit = 16 // dtype.itemsize
    return {
        "ranks": count,
        "hidden": unit * rng.choice([1, 2, 3, 5, 8, 16, 17, 24, 40]),
        "num_experts": count * rng.choice([1, 1, 2, 3, 4, 8]) + rng.choice([0, 0, rng.randrange(count)]),
        "topk": rng.choice([1, 1, 2, 2, 2, 3, 3, 4, 4, 6, 8, 8, 13, 32]),
        "max_tokens": rng.choice([1, 3, 8, 9, 17, 40]),
        "dtype": dtype,
    }


@dataclass
class Case:
    """The inputs and options of one dispatch and one combine on all ranks; lists are indexed by rank."""

    seed: int
    layout: str
    alignment: int
    x: list[torch.Tensor]
    topk_idx: list[torch.Tensor]
    topk_weights: list[torch.Tensor | None]
    quantize: Quantize | None
    scale_format: str
    scale_layout: str
    scales: list[torch.Tensor] | None
    begin: bool  # dispatch_begin and dispatch_end, with a combine of another dispatch between them
    weighted: bool
    wire: Wire | None
    bias: list[torch.Tensor | None]
    weight_grads: bool
    workers: int | None
    in_window: bool  # `y` is a tensor from Buffer.empty
    again: bool  # the dispatch is repeated with other rows, from its handle
    own_weights: list[torch.Tensor] | None  # weights for combine, on backends that take them
    max_rows: list[int] | None  # by rank; batched: rows of an expert; flat: without sync; None: the worst case
    extras: list[tuple[torch.Tensor, ...]] = field(default_factory=list)  # none: []

    @property
    def global_scale(self) -> float | None:
        """Return `x_global_scale` of the format that rows are cast to."""
        return {"fp8_tensor": 0.02, "nvfp4": 300.0}.get(self.quantize or "")


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
    payloads: bool = True,
) -> Case:
    """Draw the case of a seed, on the CPU.

    Cases have ragged token counts (zero too), -1 entries, duplicates, all-to-one skew, and every option. With
    `few_kernels` they have int64 ids, scales of one width and fewer combinations of options, so that a GPU compiles
    about forty kernels for a set of sizes.  Without `payloads`, no rows travel as bytes.
    """
    rng = random.Random(seed)
    g = torch.Generator().manual_seed(seed)
    tokens = [rng.choice([0, 1, max_tokens, rng.randint(0, max_tokens)]) for _ in range(ranks)]
    idx_dtype = torch.int64 if few_kernels else rng.choice([torch.int64, torch.int32])
    kind = rng.choice(["plain", "plain", "drop", "duplicates", "one rank", "nothing"])
    idx = [ids.to(idx_dtype) for ids in draw_routing(kind, tokens, ranks, num_experts, topk, rng, g)]
    layouts = ["flat", "expert", "batched"]
    if few_kernels:  # even fewer with 1 or 3 ranks
        layouts = {1: ["expert"], 3: ["flat"]}.get(ranks, layouts)
    layout = rng.choice(layouts)
    if (
        layout == "batched"
        and max((torch.bincount(torch.cat(idx).flatten() + 1, minlength=1)[1:].tolist() or [0]), default=0)
        > ranks * max_tokens
    ):
        layout = "expert"  # more duplicates than batched has room for would be bad input, which other tests cover
    x = [torch.randn(t, hidden, generator=g).to(dtype) for t in tokens]
    payload = rng.choice(["plain", "plain", "quantize", "scales", "fp8"])
    scales = None
    if payload == "scales" or (payload == "fp8" and hidden % 16 == 0):
        width = 2 + ranks % 3 if few_kernels else rng.choice([1, 2, 3, 4, 7])
        scales = [torch.randn(t, width, generator=g) for t in tokens]
    if payload == "fp8" and hidden % 16 == 0:
        x = [t.to(torch.float8_e4m3fn) for t in x]
    quantize = payload == "quantize" and hidden % 16 == 0
    formats, layouts = ["fp32", "ue8m0"] if quantize else ["fp32"], ["row"]
    if quantize or scales is not None:
        layouts.append("column")
    if few_kernels:
        formats, layouts = _few_scales(layout, quantize, payload == "fp8" and scales is not None)
    scale_format, scale_layout = rng.choice(formats), rng.choice(layouts)
    begin, weighted = rng.random() < 0.2, rng.random() < 0.8
    wire: Wire | None = rng.choice([None, "exact"])
    if few_kernels:
        begin = (layout, payload) == ("expert", "plain") or (layout, scale_layout) == ("flat", "column")
        begin = begin and rng.random() < 0.7
        weighted, wire = (weighted, wire) if layout != "flat" else (True, None)  # flat ignores both
    casts = hidden % 16 == 0 and (weighted or not few_kernels)
    cast = random.Random(f"wire of {seed}")
    if casts and cast.random() < 0.3:
        wire = cast.choice(["fp8", "int8"])
    bias_kind = rng.choice(["none", "none", "rows", "one"])
    case = Case(
        seed=seed,
        layout=layout,
        alignment=rng.choice([1, 1, 2, 8, 13]),
        x=x,
        topk_idx=idx,
        topk_weights=[torch.rand(i.shape, generator=g) if rng.random() < 0.8 else None for i in idx],
        quantize="fp8" if quantize else None,
        scale_format=scale_format,
        scale_layout=scale_layout,
        scales=scales,
        begin=begin,
        weighted=weighted,
        wire=wire,
        bias=[
            None
            if bias_kind == "none"
            else torch.randn(*((t,) if bias_kind == "rows" else ()), hidden, generator=g).to(dtype)
            for t in tokens
        ],
        weight_grads=rng.random() < 0.3,
        workers=rng.choice([None, 1, 2, 3]),
        in_window=rng.random() < 0.3 and not begin,  # the window of a GPU has room for two rounds
        again=False,
        own_weights=None,
        max_rows=None,
    )
    again = rng.random() < 0.25 and not (case.begin or case.in_window)
    case = replace(case, again=again and (payload == "plain" or not few_kernels))
    more = random.Random(f"payload {seed}")
    if payloads and payload == "plain" and more.random() < (0.2 if few_kernels else 0.4):
        case = _with_payload(case, hidden * dtype.itemsize, more, g, few_kernels)
    if layout == "batched":
        case = replace(case, max_rows=_draw_rows(idx, num_experts, ranks * max_tokens, rng))
    elif layout == "flat" and not begin and rng.random() >= 0.5:
        case = replace(case, max_rows=[sum(tokens) + rng.choice([0, 1, 5])] * ranks)
    if layout == "flat" or not weighted or case.weight_grads or rng.random() < 0.5:
        return case
    return replace(case, own_weights=[torch.randn(*i.shape, generator=g) for i in idx])


def random_placement(
    seed: int,
    *,
    ranks: int,
    num_experts: int,
    slots: int | None = None,
    balanced: bool = False,
    lost: int = 0,
    **others: Any,
) -> Placement:
    """Draw a placement of a Buffer of these sizes: with replicas, empty slots and ranks that have none.

    Args:
        slots: of a rank; default: some more than there have to be.
        lost: further ranks that the Buffer has lost: as after shrink(), experts that only they had have no slot.
        balanced: the choice, which no other placement of the Buffer changes; else one of the others is drawn.
    """
    del others  # sizes of a Buffer that do not matter
    rng, left = random.Random(f"placement {seed}"), range(ranks)
    ranks += lost
    slots = -(-num_experts // ranks) + rng.choice([0, 1, 1, 2, 5]) if slots is None else slots
    held: list[list[int]] = [[] for _ in range(ranks)]
    for expert in rng.sample(range(num_experts), num_experts):
        room = [rank for rank in range(ranks) if len(held[rank]) < slots]
        held[rng.choice(room[:1] if rng.random() < 0.3 else room)].append(expert)
    for rank in range(ranks):
        for _ in range(rng.randint(0, slots - len(held[rank]))):
            held[rank].append(rng.choice([-1, rng.randrange(num_experts), 0]))
        rng.shuffle(held[rank])
    choice: ReplicaChoice = "balanced" if balanced else rng.choice(("token", "nearest"))
    return of_ranks(Placement(held, num_experts=num_experts, slots=slots, choice=choice), left)


def placed(case: Case) -> Case:
    """Return a case whose batched rows have room wherever experts are."""
    if case.layout != "batched" or case.max_rows is None:
        return case
    return replace(case, max_rows=[max(case.max_rows)] * len(case.max_rows))


def without_tokens(case: Case, ranks: Collection[int]) -> Case:
    """Return a case in which these ranks pass no tokens, and only compute for the others."""
    lists: dict[str, Any] = {}
    for name in ("x", "topk_idx", "topk_weights", "scales", "bias", "own_weights"):
        if (given := getattr(case, name)) is not None:
            lists[name] = [
                one[:0] if rank in ranks and one is not None and one.ndim > 1 else one for rank, one in enumerate(given)
            ]
    extras = [tuple(one[:0] for one in of) if rank in ranks else of for rank, of in enumerate(case.extras)]
    return replace(case, **lists, extras=extras)


def _with_payload(case: Case, most: int, rng: random.Random, g: torch.Generator, few_kernels: bool) -> Case:
    """Replace the rows by others of up to `most` bytes, or cast them; maybe with scales and extras beside them."""
    kind = torch.uint8 if few_kernels else rng.choice(PAYLOADS)
    width = most if few_kernels else rng.randint(1, most // kind.itemsize)
    beside = "extras" if few_kernels else rng.choice(["nothing", "scales", "extras", "both"])
    tokens = [len(ids) for ids in case.topk_idx]
    if not few_kernels and rng.random() < 0.5:
        name: Quantize = rng.choice(get_args(Quantize))
        layouts: list[ScaleLayout] = ["row", "row"]
        if (of_scales := formats.FORMATS[name].scales) is not None:
            layouts += ["column", "swizzled"] if of_scales.itemsize == 1 else ["column"]
        return replace(case, quantize=name, scale_layout=rng.choice(layouts))

    def bytes_of(rows: int, *shape: int, dtype: torch.dtype) -> torch.Tensor:
        drawn = torch.randint(0, 256, (rows, *shape[:-1], shape[-1] * dtype.itemsize), generator=g)
        return drawn.to(torch.uint8).view(dtype)

    scales = None
    if beside in ("scales", "both"):
        kind_of_scales, columns = rng.choice(PAYLOADS), rng.choice([1, 2, 3, 4, 7])
        scales = [bytes_of(t, columns, dtype=kind_of_scales) for t in tokens]
    extras: list[tuple[torch.Tensor, ...]] = []
    if beside in ("extras", "both"):
        extras = [(bytes_of(t, 2, dtype=torch.float32), bytes_of(t, 1, dtype=torch.int16)[:, 0]) for t in tokens]
    return replace(
        case,
        x=[bytes_of(t, width, dtype=kind) for t in tokens],
        scales=scales,
        scale_layout="row" if scales is None else rng.choice(["row", "column"]),
        extras=extras,
    )


def _draw_rows(idx: list[torch.Tensor], num_experts: int, worst: int, rng: random.Random) -> list[int] | None:
    """Draw max_rows of each rank (batched: rows of an expert), from what is needed up to the worst case, or None."""
    if rng.random() < 0.4:
        return None
    counts = torch.bincount(torch.cat(idx).flatten() + 1, minlength=num_experts + 1)[1:]
    most = [int(counts[list(experts_of(rank, num_experts, len(idx)))].max()) for rank in range(len(idx))]
    return [rng.choice([rows, rng.randint(rows, worst)]) for rows in most]


def draw_routing(
    kind: str, tokens: list[int], ranks: int, num_experts: int, topk: int, rng: random.Random, g: torch.Generator
) -> list[torch.Tensor]:
    """Draw expert ids of each rank, int64 [T, K].

    `kind`: "plain", "drop" (some ids are -1), "duplicates", "one rank", "one expert", or "nothing" (all ids are -1).
    """
    low, high, idx = 0, num_experts, []
    if kind in ("one rank", "one expert"):
        experts = experts_of(rng.randrange(ranks), num_experts, ranks)
        low, high = experts.start, experts.stop
        if kind == "one expert":
            low = rng.randrange(num_experts)
            high = low + 1
    for t in tokens:
        if kind in ("duplicates", "one rank", "one expert") or topk > num_experts:
            ids = torch.randint(low, high, (t, topk), generator=g)
        else:
            ids = torch.rand(t, num_experts, generator=g).argsort(dim=1)[:, :topk]
        if kind == "drop":
            ids = torch.where(torch.rand(t, topk, generator=g) < 0.4, -1, ids)
        elif kind == "nothing":
            ids = torch.full_like(ids, -1)
        idx.append(ids)
    return idx


def _few_scales(layout: str, quantize: bool, fp8: bool) -> tuple[list[str], list[str]]:
    """Return formats and layouts of scales for `few_kernels`; over all layouts of rows every pair occurs."""
    if quantize:
        return {
            "flat": (["fp32"], ["row", "column"]),
            "expert": (["ue8m0"], ["row", "column"]),
            "batched": (["ue8m0"], ["column"]),
        }[layout]
    return ["fp32"], ["column" if fp8 and layout == "expert" else "row"]
