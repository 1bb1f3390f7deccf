"""Expert layers of other libraries, and the error of any layer against float64.

Written for the published interface of deep_gemm's layer for Hopper, as in its wheels sgl-deep-gemm 0.1.5 and 0.2.5.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch.nn.functional import silu

from moecomm.fused import Fp8
from moecomm.ranks.rendezvous import rendezvous
from moecomm.router import Model
from moecomm_bench.clock import Call

LIBRARIES = ("deep_gemm",)
_COMPARED_TOKENS = 8  # of a rank


class DeepGemmLayer:
    """deep_gemm's fused layer of FP8 weights: its cast of the rows, and one launch.  Collective; close() ends it.

    Raises whatever the library raises, and ImportError where it cannot be imported.
    """

    def __init__(self, group: dist.ProcessGroup, model: Model, tokens: int, w13: Fp8, w2: Fp8) -> None:
        self._library = importlib.import_module("deep_gemm")
        sizes = model.num_experts, tokens, model.topk, model.hidden, model.intermediate
        self._buffer = self._library.get_symm_buffer_for_sm90_mega_moe(group, *sizes)
        self._weights = self._library.transform_weights_for_mega_moe_sm90(tuple(w13), tuple(w2))

    def close(self) -> None:
        """Free its buffer."""
        self._buffer.destroy()

    def call(self, x: torch.Tensor, topk_idx: torch.Tensor, topk_weights: torch.Tensor) -> Call:
        """Return a call on one input; it returns its output, which the next call overwrites."""
        buffer, out, idx, weights = self._buffer, torch.empty_like(x), topk_idx.int(), topk_weights.float()

        def layer() -> torch.Tensor:
            places = buffer.x, buffer.x_sf, buffer.topk_idx, buffer.topk_weights
            self._library.mega_moe_pre_dispatch_sm90(x, idx, weights, *places, len(x))
            self._library.fp8_mega_moe(out, *self._weights, buffer)
            return out

        return layer


def compared_tokens(tokens: int) -> list[int]:
    """Return the tokens of an input that are compared with float64."""
    return list(range(0, tokens, max(1, tokens // _COMPARED_TOKENS)))


def true_outputs(
    group: dist.ProcessGroup, given: dict[str, torch.Tensor], w13: torch.Tensor, w2: torch.Tensor
) -> torch.Tensor:
    """Return the layer's float64 outputs of this rank's compared tokens, of weights in bfloat16. Collective.

    Each rank computes what its own experts add to the tokens of all ranks.
    """
    at = compared_tokens(len(given["x"]))
    asked = (_gathered(group, given[name][at]) for name in ("x", "topk_idx", "topk_weights"))
    first = dist.get_rank(group) * len(w13)
    added = []
    for x, idx, weights in zip(*asked, strict=True):
        sums = torch.zeros(x.shape, dtype=torch.float64, device=w13.device)
        for token, k in ((idx >= first) & (idx < first + len(w13))).nonzero().tolist():
            expert = int(idx[token, k]) - first
            gate, up = (w13[expert].double() @ x[token].to(w13.device).double()).chunk(2)
            sums[token] += float(weights[token, k]) * (w2[expert].double() @ (silu(gate) * up))
        added.append(sums)
    by_rank = _gathered(group, torch.stack(added))
    return torch.stack([of_rank[dist.get_rank(group)] for of_rank in by_rank]).sum(dim=0)


def error(layer: Callable[[], torch.Tensor], true: torch.Tensor, tokens: int) -> float:
    """Return the norm of the difference of a layer's outputs to float64, over that of float64, for compared tokens."""
    out = layer()[compared_tokens(tokens)].double().cpu()
    return float((out - true).norm() / true.norm())


def _gathered(group: dist.ProcessGroup, mine: torch.Tensor) -> list[torch.Tensor]:
    """Return the tensors of all ranks, of one shape and dtype, on the CPU."""
    data = rendezvous(group).all_gather(mine.cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return [torch.frombuffer(bytearray(one), dtype=mine.dtype).view(mine.shape) for one in data]
