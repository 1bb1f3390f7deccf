"""Layers whose routing is skewed, with experts in a row and where a plan puts them, and dispatches with replicas.

    python bench/placed_layers.py [--models deepseek-v3,qwen3-235b] [--json bench/results/placed-layers-h200-2.json]

A plan is moecomm.balance's ("spread"), for the routing that is then measured, in an eighth more slots than there are
experts.  Layers are those of Buffer.moe in bf16, by its defaults, whole in a graph; routing is moecomm.routing's, even
or by Zipf's law.  Dispatches have even routing and, with a placement, replicas of some experts.  `balanced` adds the
step in which ranks choose.

Keys of a row: `what`, `zipf`, `placed` ("" for experts in a row, "replicate" for these with as many empty slots beside
them and balance="replicate", else the choice of replicas), `tokens`, `us` of the slowest rank, `busiest`: rows of the
busiest rank over the mean, `copies`: of experts in a layer.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from moecomm import Buffer, ExpertWeights, Placement
from moecomm.balance import plan
from moecomm.base.choices import ReplicaChoice
from moecomm.base.placement import replicated
from moecomm.router import MODELS, Model
from moecomm.routing import synthesize
from moecomm_bench.clock import Call, Clock
from moecomm_bench.ranks import device_of, on_ranks
from moecomm_bench.results import write

ZIPF = (0.0, 0.8, 1.2)
LAYER_TOKENS, FEW_AND_MANY = 4096, (1, 128, 4096)
CHOICES: tuple[ReplicaChoice, ...] = ("token", "nearest")


def planned(ids: torch.Tensor, model: Model, ranks: int, choice: ReplicaChoice) -> Placement:
    """Return the placement that a plan has for a routing of all ranks."""
    load = torch.bincount(ids.flatten(), minlength=model.num_experts)
    found = plan(load, ranks=ranks, slots=model.num_experts * 9 // 8, policy="spread")
    return found.placement(choice=choice)


def run_rank(group: dist.ProcessGroup, models: list[str], replays: int) -> list[dict[str, Any]]:
    """Return the rows of this rank."""
    device = device_of(group, "auto" if torch.cuda.is_available() else "host")
    return [
        row
        for name in models
        for row in (*_layers(group, device, name, replays), *_dispatches(group, device, name, replays))
    ]


def _clock(group: dist.ProcessGroup, device: torch.device, chain: int, replays: int) -> Clock:
    return Clock(group, device, graph=device.type == "cuda", cold=False, chain=chain, replays=replays)


def _open(group: dist.ProcessGroup, device: torch.device, model: Model, tokens: int, **more: Any) -> Buffer:
    sizes = {"hidden": model.hidden, "num_experts": model.num_experts, "topk": model.topk, "max_tokens": tokens}
    return Buffer(group, **sizes, device=device, **more)


def _layers(group: dist.ProcessGroup, device: torch.device, name: str, replays: int) -> list[dict[str, Any]]:
    model, ranks, me = MODELS[name], group.size(), group.rank()
    rows, calls, buffers = [], dict[str, Call](), []
    slots = -(-model.num_experts * 9 // 8 // ranks) + 1
    w13 = torch.randn(slots, 2 * model.intermediate, model.hidden, device=device, dtype=torch.bfloat16) / 64
    w2 = torch.randn(slots, model.hidden, model.intermediate, device=device, dtype=torch.bfloat16) / 64
    x = torch.randn(LAYER_TOKENS, model.hidden, device=device, dtype=torch.bfloat16)
    for zipf in ZIPF:
        every = synthesize(name, LAYER_TOKENS * ranks, zipf=zipf).topk_idx.long().view(ranks, LAYER_TOKENS, -1)
        for choice in ("", *CHOICES) if zipf else ("",):
            placement = planned(every, model, ranks, choice) if choice else None  # type: ignore[arg-type]
            buffer = _open(group, device, model, LAYER_TOKENS, placement=placement, capacity_factor=float(ranks))
            local, per = len(buffer.local_experts), model.num_experts // ranks
            sent = every // per
            if placement is not None:
                sent = torch.stack([placement.slots_of(ids, rank) for rank, ids in enumerate(every)]) // placement.slots
            busiest = float(torch.bincount(sent.flatten(), minlength=ranks).max() * ranks / sent.numel())
            given = (x, every[me].to(device), torch.rand(every.shape[1:], device=device), w13[:local], w2[:local])
            key = f"layer {zipf} {choice}"
            calls[key] = lambda b=buffer, g=given: b.moe(*g)  # type: ignore[misc]
            buffers.append(buffer)
            rows.append({"what": "layer", "model": name, "tokens": LAYER_TOKENS, "zipf": zipf, "placed": choice})
            rows[-1] |= {"busiest": round(busiest, 4), "key": key}
    buffer, weights = _with_copies(group, device, name, slots, calls, rows)
    found = _timed(group, device, rows, calls, [*buffers, buffer], 4, replays)
    weights.close()
    return found


def _with_copies(
    group: dist.ProcessGroup,
    device: torch.device,
    name: str,
    slots: int,
    calls: dict[str, Call],
    rows: list[dict[str, Any]],
) -> tuple[Buffer, ExpertWeights]:
    """Add layers whose experts are copied, of one Buffer with experts in a row."""
    model, ranks, me = MODELS[name], group.size(), group.rank()
    per, experts = model.num_experts // ranks, model.num_experts
    held = [range(rank * per, (rank + 1) * per) for rank in range(ranks)]
    placement = Placement(held, slots=slots, choice="balanced")
    buffer = _open(group, device, model, LAYER_TOKENS, placement=placement, capacity_factor=float(ranks))
    weights = ExpertWeights(
        buffer, {"w13": (2 * model.intermediate, model.hidden), "w2": (model.hidden, model.intermediate)}
    )
    for one in (weights["w13"], weights["w2"]):
        one.normal_(std=1 / 64)
    x = torch.randn(LAYER_TOKENS, model.hidden, device=device, dtype=torch.bfloat16)
    for zipf in ZIPF:
        every = synthesize(name, LAYER_TOKENS * ranks, zipf=zipf).topk_idx.long().view(ranks, LAYER_TOKENS, -1)
        counts = torch.stack([torch.bincount(ids.flatten(), minlength=experts) for ids in every])
        after = replicated(placement, counts)
        sent = torch.stack([after.slots_of(ids, rank, counts=counts) for rank, ids in enumerate(every)]) // slots
        busiest = float(torch.bincount(sent.flatten(), minlength=ranks).max() * ranks / sent.numel())
        given = (x, every[me].to(device), torch.rand(every.shape[1:], device=device), weights["w13"], weights["w2"])
        key = f"layer {zipf} replicate"
        calls[key] = lambda g=given: buffer.moe(*g, balance="replicate")  # type: ignore[misc]
        rows.append({"what": "layer", "model": name, "tokens": LAYER_TOKENS, "zipf": zipf, "placed": "replicate"})
        copies = int((after.experts != placement.experts).sum())
        rows[-1] |= {"busiest": round(busiest, 4), "copies": copies, "key": key}
    return buffer, weights


def _dispatches(group: dist.ProcessGroup, device: torch.device, name: str, replays: int) -> list[dict[str, Any]]:
    model, ranks, found = MODELS[name], group.size(), []
    for tokens in FEW_AND_MANY:
        rows, calls, buffers = [], dict[str, Call](), []
        every = synthesize(name, tokens * ranks, zipf=0.0).topk_idx.long().view(ranks, tokens, -1)
        x = torch.randn(tokens, model.hidden, device=device, dtype=torch.bfloat16)
        ids, weights = every[group.rank()].to(device), torch.rand(every.shape[1:], device=device)
        for choice in ("", *CHOICES, "balanced"):
            placement = planned(every, model, ranks, choice) if choice else None  # type: ignore[arg-type]
            buffer = _open(group, device, model, tokens, placement=placement)
            for layout in ("flat", "expert"):
                key = f"dispatch {tokens} {layout} {choice}"
                calls[key] = lambda b=buffer, at=layout: b.dispatch(x, ids, weights, layout=at, sync=False)  # type: ignore[misc]  # noqa: B023
                rows.append({"what": "dispatch", "layout": layout, "model": name, "tokens": tokens, "zipf": 0.0})
                rows[-1] |= {"placed": choice, "key": key}
            buffers.append(buffer)
        found += _timed(group, device, rows, calls, buffers, 4 if tokens > 1000 else 20, replays)
    return found


def _timed(
    group: dist.ProcessGroup,
    device: torch.device,
    rows: list[dict[str, Any]],
    calls: dict[str, Call],
    buffers: list[Buffer],
    chain: int,
    replays: int,
) -> list[dict[str, Any]]:
    for call in calls.values():
        call()
    times = _clock(group, device, chain, replays).alternately(calls, next(iter(calls.values())))
    for row in rows:
        row["us"] = times[row.pop("key")]
    for buffer in buffers:
        buffer.check()
        buffer.close()
    return rows


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default="deepseek-v3,qwen3-235b")
    parser.add_argument("--replays", type=int, default=11)
    parser.add_argument("--ranks", type=int, default=torch.cuda.device_count())
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    job = {"models": options.models.split(","), "replays": options.replays}
    by_rank = on_ranks("placed_layers:run_rank", job, options.ranks)
    rows = []
    for same in zip(*by_rank, strict=True):
        slowest = [max(replay) for replay in zip(*(row["us"] for row in same), strict=True)]
        rows.append(same[0] | {"us": {"p50": round(float(torch.tensor(slowest).median()), 3)}})
        print(*(str(value) for value in rows[-1].values()))
    if options.json:
        print(write(options.json, {"ranks": options.ranks, "rows": rows}))


if __name__ == "__main__":
    main()
