"""Routing that is drawn from a distribution of the experts' popularity, for benchmarks without a recording."""

from __future__ import annotations

import torch

import moecomm
from moecomm.base.validation import check_integer, check_name, check_real
from moecomm.router import MODELS
from moecomm.routing.recorded import SYNTHETIC, Recorded, id_dtype

MOST_TOKENS = 1 << 24
MOST_ZIPF = 8.0  # the busiest of 256 experts then is chosen first by 99.6 % of the tokens
_AT_ONCE = 1 << 24  # scores


def synthesize(model: str, tokens: int, *, zipf: float, seed: int = 0) -> Recorded:
    """Draw a routing whose experts are as popular as Zipf's law says, without hidden states and without a gate.

    The first expert of a token is the r-th most popular with probability proportional to r**-zipf. The others are
    drawn likewise among those that are left (Gumbel noise on the logarithm of the popularity, and the K largest). The
    order of popularity is drawn from `seed`. Groups of experts (DeepSeek-V3) are not heeded. The file is marked
    "synthetic".

    Exponents in use:

    - 0.8: the default of TensorRT-LLM's `bench_moe --expert_pattern powerlaw`, made to match observed traces
      (github.com/NVIDIA/TensorRT-LLM/pull/19148).
    - 1: vLLM's benchmark_moe.py (github.com/vllm-project/vllm/pull/57100).
    - 0.6 to 1.2: examples of NVIDIA's aiconfigurator (github.com/ai-dynamo/aiconfigurator/pull/134).

    A recording is better than any exponent: a log-normal distribution fits the ranks' loads of DeepSeek-V3 best
    (github.com/deepseek-ai/DeepEP/pull/393), and real text loads experts more evenly than random tokens do
    (arxiv.org/abs/2605.20982).

    Args:
        model: a name of moecomm.router.MODELS.
        tokens: 1 to 2^24.
        zipf: the exponent, 0 to 8; 0 is even.
        seed: of the draw, which is the same in every run.

    Returns:
        Tokens of one layer, without weights.

    Raises:
        BadInput: an argument out of range.
    """
    check_name("model", model, tuple(MODELS))
    check_integer("tokens", tokens, 1, MOST_TOKENS)
    check_real("zipf", zipf, 0, MOST_ZIPF)
    check_integer("seed", seed, 0)
    shape, generator = MODELS[model], torch.Generator().manual_seed(int(seed))
    popularity = -float(zipf) * torch.arange(1, shape.num_experts + 1, dtype=torch.float64).log()
    popularity = popularity[torch.randperm(shape.num_experts, generator=generator)]
    at_once = _AT_ONCE // shape.num_experts
    parts = [
        _drawn(popularity, min(at_once, tokens - first), shape.topk, generator) for first in range(0, tokens, at_once)
    ]
    return Recorded(
        shape.num_experts,
        shape.topk,
        ("synthetic",),
        torch.tensor([[0, 0, tokens]], dtype=torch.int32),
        torch.cat(parts).to(id_dtype(shape.num_experts)),
        model=model,
        source=SYNTHETIC,
        notes={
            "zipf": f"{float(zipf):g}",
            "seed": str(int(seed)),
            "moecomm": moecomm.__version__,
            "torch": str(torch.__version__),
        },
    )


def _drawn(popularity: torch.Tensor, tokens: int, topk: int, generator: torch.Generator) -> torch.Tensor:
    """Draw ids `[tokens, topk]`, in the order in which they were drawn."""
    exponential = torch.empty(tokens, len(popularity), dtype=torch.float64).exponential_(generator=generator)
    return (popularity - exponential.log()).topk(topk, dim=1).indices  # -log of an exponential is Gumbel noise
