"""Routers of published models, and random routing: topk_idx and topk_weights for demo, tests and benchmarks."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from moecomm.base.choices import GateKind
from moecomm.base.experts import experts_of
from moecomm.base.validation import (
    MOST_SIZE,
    check_dense,
    check_drawn,
    check_flag,
    check_integer,
    check_name,
    check_real,
    check_same_device,
    check_sizes,
)
from moecomm.errors import BadInput

_MOST_SCALE = 1e30  # of float32


@dataclass(frozen=True)
class Model:
    """The MoE layer of a published model: columns of a token, columns inside an expert, and its gate."""

    name: str
    hidden: int
    intermediate: int
    num_experts: int
    topk: int
    gate: GateKind = "softmax"
    num_groups: int = 1
    topk_groups: int = 1
    scale: float = 1.0
    corrected: bool = False  # the gate has a score-correction bias


MODELS = {
    model.name: model
    for model in (
        Model("deepseek-v3", 7168, 2048, 256, 8, "sigmoid", num_groups=8, topk_groups=4, scale=2.5, corrected=True),
        Model("kimi-k2", 7168, 2048, 384, 8, "sigmoid", scale=2.827, corrected=True),
        Model("qwen3-235b", 4096, 1536, 128, 8),
        Model("qwen3-30b-a3b", 2048, 768, 128, 8),
        Model("gpt-oss-120b", 2880, 2880, 128, 4),
        Model("mixtral-8x7b", 4096, 14336, 8, 2),
    )
}


@dataclass(frozen=True)
class Gating:
    """Rules by which experts are chosen and weighted: a Router without its tensors.

    scores = gate(x @ weight.T) in float32.  Experts are chosen by scores + bias; with several groups, only inside the
    `topk_groups` best groups, whose score is the sum of their two best experts.  Their weights are the scores without
    the
    bias, divided by their sum if `normalize`, times `scale`.  Ties go to the lower expert id, on every device.
    """

    hidden: int
    num_experts: int
    topk: int
    gate: GateKind = "softmax"
    num_groups: int = 1
    topk_groups: int = 1
    scale: float = 1.0
    normalize: bool = True

    def __post_init__(self) -> None:
        check_sizes(hidden=self.hidden, num_experts=self.num_experts, topk=self.topk)
        check_sizes(num_groups=self.num_groups, topk_groups=self.topk_groups)
        check_name("gate", self.gate, ("softmax", "sigmoid"))
        check_real("scale", self.scale, -_MOST_SCALE, _MOST_SCALE)
        check_flag("normalize", self.normalize)
        if self.num_experts % self.num_groups:
            raise BadInput("num_groups", self.num_groups, f"a divisor of num_experts = {self.num_experts}")
        if self.topk_groups > self.num_groups:
            raise BadInput("topk_groups", self.topk_groups, f"1 to num_groups = {self.num_groups}")
        choosable = self.num_experts // self.num_groups * self.topk_groups
        if self.topk > choosable:
            groups = f"{self.topk_groups} of {self.num_groups} groups"
            raise BadInput("topk", self.topk, f"1 to {choosable}, the experts of {groups}")

    def __call__(
        self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """[T, H], weight [E, H], bias float32 [E] -> topk_idx int64 [T, K], topk_weights float32 [T, K].

        The weights have gradients, for x and `weight`.
        """
        check_dense("x", x)
        check_dense("weight", weight)
        check_same_device(x=x, weight=weight, bias=bias)
        if x.ndim != 2 or x.shape[1] != self.hidden or not x.is_floating_point():
            raise BadInput("x", f"{x.dtype} {tuple(x.shape)}", f"floating [tokens, {self.hidden}]")
        if weight.shape != (self.num_experts, self.hidden) or not weight.is_floating_point():
            got = f"{weight.dtype} {tuple(weight.shape)}"
            raise BadInput("weight", got, f"floating [{self.num_experts}, {self.hidden}]")
        if bias is not None:
            _check_bias(bias, self.num_experts)
        logits = torch.nn.functional.linear(x.to(weight.dtype), weight).float()
        scores = logits.softmax(dim=1) if self.gate == "softmax" else logits.sigmoid()
        choice = scores.detach() if bias is None else scores.detach() + bias
        if self.num_groups > 1:
            choice = self._keep_best_groups(choice)
        topk_idx = best(choice, self.topk)
        weights = scores.gather(1, topk_idx)
        if self.normalize:
            weights = weights / (weights.sum(dim=1, keepdim=True) + 1e-20)
        return topk_idx, weights * self.scale

    def _keep_best_groups(self, choice: torch.Tensor) -> torch.Tensor:
        """-inf outside the `topk_groups` best groups of each token."""
        groups = choice.view(len(choice), self.num_groups, self.num_experts // self.num_groups)
        pair = min(2, groups.shape[2])
        chosen = best(groups.topk(pair, dim=2).values.sum(dim=2), self.topk_groups)
        kept = torch.zeros(groups.shape[:2], dtype=torch.bool, device=choice.device).scatter_(1, chosen, True)
        return groups.masked_fill(~kept.unsqueeze(2), float("-inf")).view_as(choice)


class Router:
    """Hidden states [T, H] -> (topk_idx int64 [T, K], topk_weights float32 [T, K]), highest score first; see Gating.

    `weight` [E, H] is drawn from `seed`, the same on every device; `bias` float32 [E] is DeepSeek-V3's
    e_score_correction_bias.  Both are plain tensors: copy a model's own into them.
    """

    def __init__(
        self,
        hidden: int,
        num_experts: int,
        topk: int,
        *,
        gate: GateKind = "softmax",
        num_groups: int = 1,
        topk_groups: int = 1,
        bias: torch.Tensor | None = None,
        scale: float = 1.0,
        normalize: bool = True,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        seed: int = 0,
    ) -> None:
        self.hidden, self.num_experts, self.topk = hidden, num_experts, topk
        self.gating = Gating(hidden, num_experts, topk, gate, num_groups, topk_groups, scale, normalize)
        check_drawn(seed, dtype, device)
        if bias is not None:
            check_same_device(bias=bias)
            _check_bias(bias, num_experts)
        self.weight = gate_weight(num_experts, hidden, seed=seed).to(device=device, dtype=dtype)
        self.bias = None if bias is None else bias.to(device=device, dtype=torch.float32)

    def __call__(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.gating(x, self.weight, self.bias)


def _check_bias(bias: torch.Tensor, num_experts: int) -> None:
    if bias.shape != (num_experts,) or bias.is_complex():
        raise BadInput("bias", f"{bias.dtype} {tuple(bias.shape)}", f"({num_experts},)")


def gate_weight(num_experts: int, hidden: int, *, seed: int = 0) -> torch.Tensor:
    """Draw float32 [E, H] on the CPU from `seed`.  All ranks draw the same."""
    return drawn(torch.Generator().manual_seed(int(seed)), num_experts, hidden) / float(hidden**0.5)


def drawn(generator: torch.Generator, *shape: int) -> torch.Tensor:
    """Draw float32 on the CPU, whatever torch's default device and dtype are."""
    return torch.randn(*shape, generator=generator, device="cpu", dtype=torch.float32)


def best(scores: torch.Tensor, count: int) -> torch.Tensor:
    """Return the columns of the `count` largest scores of a row, largest first, ties by column.

    torch.topk leaves the order of ties open.
    """
    return scores.sort(dim=1, descending=True, stable=True).indices[:, :count]


def router(
    model: str,
    *,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    seed: int = 0,
) -> Router:
    """Make the router of a published model (a name of MODELS) with weights drawn from `seed`.

    A score-correction bias is drawn too, small beside the scores, as load balancing leaves it.  gpt-oss's gate also has
    a
    linear bias, which is left out.
    """
    check_name("model", model, tuple(MODELS))
    check_drawn(seed, dtype, device)
    shape = MODELS[model]
    bias = drawn(torch.Generator().manual_seed(int(seed) + 1), shape.num_experts) * 0.02 if shape.corrected else None
    return Router(
        shape.hidden,
        shape.num_experts,
        shape.topk,
        gate=shape.gate,
        num_groups=shape.num_groups,
        topk_groups=shape.topk_groups,
        bias=bias,
        scale=shape.scale,
        dtype=dtype,
        device=device,
        seed=seed,
    )


def random_routing(
    tokens: int,
    num_experts: int,
    topk: int,
    *,
    ranks: int = 1,
    skew: float = 0.0,
    drop: float = 0.0,
    duplicates: bool = False,
    generator: torch.Generator | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw a routing without hidden states: (topk_idx int64 [T, K], topk_weights float32 [T, K] that sum to 1).

    A fraction `skew` of the tokens picks experts of one rank of `ranks`, the same rank for all (and others only where
    that
    rank has too few).  A fraction `drop` of the entries is -1; their weights are left in place and must not matter.
    `duplicates`: a token may pick an expert more than once.  On the generator's device.
    """
    check_integer("tokens", tokens, 0, MOST_SIZE)
    check_sizes(num_experts=num_experts, topk=topk, ranks=ranks)
    check_real("skew", skew, 0, 1)
    check_real("drop", drop, 0, 1)
    check_flag("duplicates", duplicates)
    if generator is not None and not isinstance(generator, torch.Generator):
        raise BadInput("generator", type(generator).__name__, "a torch.Generator, or None")
    if not duplicates and topk > num_experts:
        raise BadInput("topk", topk, f"at most num_experts = {num_experts} without duplicates")
    if num_experts < ranks:
        raise BadInput("ranks", ranks, f"at most num_experts = {num_experts}")
    generator = torch.Generator().manual_seed(0) if generator is None else generator
    device = generator.device

    def uniform(*shape: int) -> torch.Tensor:
        return torch.rand(*shape, generator=generator, device=device)

    mine = experts_of(int(uniform(1).mul(ranks).item()), num_experts, ranks)
    first, local = mine.start, len(mine)
    skewed = uniform(tokens, 1) < skew
    if duplicates:
        anywhere, there = (uniform(tokens, topk) * num_experts).long(), first + (uniform(tokens, topk) * local).long()
        topk_idx = torch.where(skewed, there, anywhere)
    else:
        expert = torch.arange(num_experts, device=device)
        wanted = (expert >= first) & (expert < first + local)
        topk_idx = best(uniform(tokens, num_experts) + (skewed & wanted).float(), topk)
    weights = uniform(tokens, topk) + 0.1
    topk_idx = topk_idx.masked_fill(uniform(tokens, topk) < drop, -1)
    return topk_idx, weights / weights.sum(dim=1, keepdim=True)
