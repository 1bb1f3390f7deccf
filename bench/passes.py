"""Elementwise passes next to a layer's rounds and GEMMs: our kernels, and torch operations with the same result.

    python bench/passes.py --json passes.json

Runs on one GPU, with the rows that 8192 tokens per rank of DeepSeek-V3 give each of 4 ranks: 65536 rows of 7168
columns, 2048 columns inside an expert; routing maps have 4096 tokens. A time is the median of 20, on the device, with a
warm cache. Results of both sides are compared first.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from moecomm.gpu import padding, routing_map
from moecomm.ops import combine_gradients, swiglu, tidy
from moecomm_bench.results import write

ROWS, HIDDEN, INNER, TOKENS, EXPERTS, TOPK = 65536, 7168, 2048, 4096, 256, 8
EMPTY = 17  # every 17th row is padding
BF16 = torch.bfloat16
Pass = tuple[str, Callable[[], Any], Callable[[], Any]]


def passes() -> list[Pass]:
    """Return (name, our call, torch's call) of each pass."""
    g = torch.Generator(device="cuda").manual_seed(0)

    def randn(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=g, device="cuda", dtype=BF16)

    rows, weights = randn(ROWS, HIDDEN), torch.rand(ROWS, generator=g, device="cuda")
    src = torch.zeros(ROWS, 2, dtype=torch.int32, device="cuda")
    src[::EMPTY] = -1
    end = torch.tensor([ROWS], dtype=torch.int32, device="cuda")
    counts = torch.full((EXPERTS // 4,), ROWS // (EXPERTS // 4), dtype=torch.int32, device="cuda")
    about = tidy.About(weights, None, src, counts, end)
    probs = torch.rand(TOKENS, EXPERTS, generator=g, device="cuda")
    chosen = torch.zeros_like(probs, dtype=torch.bool).scatter_(1, probs.topk(TOPK).indices, True)
    ids, of_ids = routing_map.ids_of(chosen, probs, TOPK)
    assert of_ids is not None
    y, both, inner = randn(ROWS, HIDDEN), randn(ROWS, 2 * INNER), randn(ROWS, INNER)

    def zeroed() -> torch.Tensor:
        return rows.masked_fill_(src[:, :1] < 0, 0)

    def said() -> tuple[torch.Tensor, ...]:
        has = (torch.arange(ROWS, dtype=torch.int32, device="cuda") < end) & (src[:, 0] >= 0)
        return torch.where(has, weights, 0.0), torch.where(has.unsqueeze(1), src, -1), counts.clone(), end.clone()

    def tidied() -> tuple[torch.Tensor, ...]:
        made = tidy.tidied("expert", about)
        return made.weights, made.src, made.tokens_per_expert, made.num_rows

    def picked() -> tuple[torch.Tensor, ...]:
        first = torch.where(chosen, torch.arange(EXPERTS, device="cuda"), EXPERTS).sort(dim=1).values[:, :TOPK]
        return torch.where(first < EXPERTS, first, -1), probs.gather(1, first.clamp(max=EXPERTS - 1))

    def dense() -> torch.Tensor:
        return torch.zeros_like(probs).scatter_add_(1, ids, of_ids)

    def combined() -> tuple[torch.Tensor, ...]:
        return (rows.float() * weights.unsqueeze(1)).to(BF16), (y.float() * rows.float()).sum(dim=1)

    def inside() -> tuple[torch.Tensor, ...]:
        gate, up = both.float().chunk(2, dim=1)
        sigmoid = gate.sigmoid()
        silu = gate * sigmoid
        made, grad = silu * up, inner.float()
        grad_h = grad * weights.unsqueeze(1)
        grads = torch.cat((grad_h * up * (sigmoid + silu * (1 - sigmoid)), grad_h * silu), dim=1)
        return grads.to(BF16), (made * grad).sum(dim=1), (made * weights.unsqueeze(1)).to(BF16)

    return [
        ("zeros in padding", lambda: padding.zero(rows, src=src), zeroed),
        ("what is said of rows", tidied, said),
        ("ids of a map", lambda: routing_map.ids_of(chosen, probs, TOPK), picked),
        ("weights to a map", lambda: routing_map.weights_at(ids, of_ids, EXPERTS), dense),
        ("gradients of a combine", lambda: combine_gradients.combine_gradients(rows, weights, y, BF16), combined),
        ("gradients of SwiGLU", lambda: swiglu.gradients(both, inner, weights, INNER, end), inside),
    ]


def microseconds(call: Callable[[], Any]) -> float:
    """Return the median microseconds on the device, which first waits until the host has enqueued the call."""
    times = []
    for _ in range(20):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(1_000_000)  # type: ignore[no-untyped-call]
        begin.record()
        call()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end) * 1000)
    return float(statistics.median(times))


def check(ours: Any, theirs: Any) -> None:
    """Compare two results, up to the order of sums and one rounding."""
    pair = ((x,) if isinstance(x, torch.Tensor) else x for x in (ours, theirs))
    for mine, other in zip(*pair, strict=True):
        close = 2.0**-7 if other.dtype is BF16 else 1e-3
        torch.testing.assert_close(mine, other, rtol=close, atol=close)


def main() -> None:
    """Measure, print, and write the JSON."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", type=Path, required=True)
    given = parser.parse_args()
    rows = []
    for what, ours, theirs in passes():
        made = ours()
        if made is not None:
            check(made, theirs())
        mine, others = microseconds(ours), microseconds(theirs)
        rows.append({"what": what, "us": round(mine, 2), "torch_us": round(others, 2)})
        print(f"{what:<24} {mine:8.1f} us, torch's operations {others:8.1f} us", flush=True)
    write(given.json, {"rows": rows})


if __name__ == "__main__":
    main()
