"""Accuracy of formats and wires: python bench/accuracy.py [--steps 1500].

Trains the byte model of bench/trained_routing.py, then reads held-out text with its layers over 4 ranks of this
process.  Rows travel in bfloat16, or cast to a format and dequantized where they arrive; sums return in each wire, and,
rounded by operations of torch, in formats that combine does not offer.  The logits are compared with those of rows in
bfloat16 and the exact wire: the loss, the mean divergence of the predicted bytes (Kullback-Leibler, in nats), and the
share of bytes of which another one is the most likely.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import cross_entropy, kl_div, log_softmax
from trained_routing import EXPERTS, HIDDEN, LENGTH, TOPK, Model, texts, train

from moecomm.base import formats
from moecomm.nn import ExpertParallel
from moecomm.testing import LocalBuffers
from moecomm_bench.results import write

RANKS, SEQUENCES = 4, 16
RESULT = Path(__file__).parent / "results" / "accuracy.json"
WIRES: dict[str, Any] = {"exact": "exact", "bf16": torch.bfloat16, "fp8": "fp8", "int8": "int8"}
NOT_OFFERED = ("fp8_token", "nvfp4")  # the formats of wires that combine lacks; nvfp4 with the best scale of all sums
_LARGEST = 20.0  # amax of all rows, for the formats that take a scale of all: the norm of a row is sqrt(HIDDEN)
_OF_ALL = {"fp8_tensor": _LARGEST / 448, "nvfp4": 2688 / _LARGEST}

Forward = Callable[[torch.Tensor], torch.Tensor]


def layer(ranks: LocalBuffers, of: ExpertParallel, quantize: str | None, wire: str) -> Forward:
    """Return the layer over several ranks, which divide the tokens evenly."""

    def forward(x: torch.Tensor) -> torch.Tensor:
        rows = x.flatten(0, -2)
        ids, weights = of.gate(rows)
        how = {} if quantize is None else {"quantize": quantize, "x_global_scale": _OF_ALL.get(quantize)}
        parts = zip(rows.bfloat16().chunk(RANKS), ids.chunk(RANKS), weights.chunk(RANKS), strict=True)
        calls = [{"x": x, "topk_idx": i, "topk_weights": w, **how} for x, i, w in parts]
        combines = []
        for rank, routed in enumerate(ranks.dispatch(calls)):
            arrived = routed.x
            if quantize is not None:
                of_all = _OF_ALL.get(quantize)
                arrived = formats.dequantize(routed.x, routed.scales, quantize, global_scale=of_all)
            here = slice(rank * EXPERTS // RANKS, (rank + 1) * EXPERTS // RANKS)
            y = _experts(arrived.float(), routed.tokens_per_expert, of.experts.w13[here], of.experts.w2[here])
            combines.append({"y": y.bfloat16(), "handle": routed.handle, "wire": WIRES.get(wire, "exact")})
        outs = ranks.combine(combines) if wire in WIRES else _rounded_sums(ranks, combines, wire)
        return torch.cat(outs).float().view_as(x)

    return forward


def _rounded_sums(ranks: LocalBuffers, combines: list[dict[str, Any]], name: str) -> list[torch.Tensor]:
    """Return what combines give whose sums travel in a format: of one rank after the other, rounded, and added."""
    totals: list[torch.Tensor] = []
    for rank in range(RANKS):
        alone = [{**one, "y": one["y"].float() * (number == rank)} for number, one in enumerate(combines)]
        for number, sums in enumerate(ranks.combine(alone)):
            of_all = {"global_scale": 2688 / sums.abs().max()} if formats.FORMATS[name].takes_global else {}
            sums = formats.dequantize(*formats.quantize(sums, name, **of_all), name, **of_all)
            if rank == 0:
                totals.append(sums)
            else:
                totals[number] += sums
    return [total.bfloat16() for total in totals]


def _experts(rows: torch.Tensor, counts: torch.Tensor, w13: torch.Tensor, w2: torch.Tensor) -> torch.Tensor:
    found = []
    for mine, up, down in zip(rows.split(counts.tolist()), w13, w2, strict=True):
        gate, value = (mine @ up.T).chunk(2, dim=1)
        found.append((torch.nn.functional.silu(gate) * value) @ down.T)
    return torch.cat(found)


@torch.no_grad()
def logits(model: Model, text: torch.Tensor, quantize: str | None, wire: str) -> torch.Tensor:
    """Return the logits of the next bytes of text [sequences, LENGTH + 1]: [sequences * LENGTH, 256]."""
    sizes: dict[str, Any] = {"hidden": HIDDEN, "num_experts": EXPERTS, "topk": TOPK, "dtype": torch.bfloat16}
    found: list[torch.Tensor] = []
    with LocalBuffers(**sizes, ranks=RANKS, max_tokens=len(text) * LENGTH // RANKS, backend="host") as ranks:
        forwards = [layer(ranks, moe, quantize, wire) for moe in model.moe]
        hooks = [
            moe.register_forward_hook(lambda _, given, __, forward=forward: forward(given[0]))
            for moe, forward in zip(model.moe, forwards, strict=True)
        ]
        hooks.append(model.head.register_forward_hook(lambda _, __, out: found.append(out.flatten(0, 1))))
        model(text)
        for hook in hooks:
            hook.remove()
    return found[0]


def main() -> None:
    """Train, compare, print, and write bench/results/accuracy.json."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=1500)
    steps = parser.parse_args().steps
    torch.manual_seed(0)
    model, (text, held_out) = Model(), texts()
    train(model, text, steps)
    model.eval()
    sequences = held_out.unfold(0, LENGTH + 1, LENGTH)
    chosen = sequences[torch.linspace(0, len(sequences) - 1, SEQUENCES).long()]
    meant, rows = chosen[:, 1:].flatten(), []
    base = log_softmax(logits(model, chosen, None, "exact"), dim=1)
    wires = [(None, wire) for wire in (*WIRES, *NOT_OFFERED)]
    for quantize, wire in wires + [(name, "exact") for name in formats.FORMATS]:
        found = log_softmax(logits(model, chosen, quantize, wire), dim=1)
        rows.append(
            {
                "format": quantize or "bf16",
                "wire": wire,
                "loss": float(cross_entropy(found, meant)),
                "divergence": float(kl_div(found, base, reduction="batchmean", log_target=True)),
                "other_byte": float((found.argmax(1) != base.argmax(1)).float().mean()),
            }
        )
        print(rows[-1], flush=True)
    case = {"steps": steps, "ranks": RANKS, "tokens": SEQUENCES * LENGTH, "hidden": HIDDEN, "experts": EXPERTS}
    print(write(RESULT, {"case": case, "rows": rows}))


if __name__ == "__main__":
    main()
