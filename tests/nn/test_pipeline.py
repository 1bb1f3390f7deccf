"""Layers in the stages of a pipeline, with different tokens a rank, against the same layers one after the other."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

from moecomm.nn import ExpertParallel

from ..conftest import Ranks

HIDDEN, STAGES, EXPERT_RANKS, BATCHES, STEPS = 16, 2, 2, 4, 2
TOKENS = (6, 3)  # of a batch, by the rank within a stage
SCHEDULES = {"1F1B": Schedule1F1B, "GPipe": ScheduleGPipe}
Found = tuple[list[list[float]], list[list[Any]]]  # losses of the batches of each step; weights of each layer


class Layer(torch.nn.Module):
    """A stage: a layer of experts beside its input."""

    def __init__(self, group: Any, stage: int) -> None:
        super().__init__()
        self.experts = ExpertParallel(
            group,
            hidden=HIDDEN,
            intermediate=8,
            num_experts=6,
            topk=2,
            max_tokens=max(TOKENS),
            backend="host",
            device="cpu",
            seed=stage,
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.experts(x)


def loss_of(out: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return (out - target).square().mean()


def tokens_of(rank: int) -> torch.Tensor:
    return torch.randn(BATCHES * TOKENS[rank], HIDDEN, generator=torch.Generator().manual_seed(rank))


def weights_of(layer: Layer) -> list[Any]:
    return [weight.tolist() for weight in layer.parameters()]


def apply(layers: list[Layer], group: Any) -> None:
    for layer in layers:
        for name, weight in layer.named_parameters():
            assert weight.grad is not None
            if "gate" in name:
                dist.all_reduce(weight.grad, group=group)
            weight.data -= 0.1 * weight.grad
            weight.grad = None


def in_stages(rank: int, world: Any, name: str) -> Found:
    stage, own = divmod(rank, EXPERT_RANKS)
    of_stages = [dist.new_group([at * EXPERT_RANKS + k for k in range(EXPERT_RANKS)]) for at in range(STAGES)]
    lines = [dist.new_group([at * EXPERT_RANKS + k for at in range(STAGES)]) for k in range(EXPERT_RANKS)]
    layer, x = Layer(of_stages[stage], stage), tokens_of(own)
    batch = torch.empty(TOKENS[own], HIDDEN)  # what a stage takes and returns
    sizes = {"input_args": (batch.clone().requires_grad_(stage > 0),), "output_args": (batch.requires_grad_(),)}
    part = PipelineStage(layer, stage, STAGES, torch.device("cpu"), group=lines[own], **sizes)
    schedule = SCHEDULES[name](part, BATCHES, loss_fn=loss_of)
    found: list[list[float]] = []
    for _ in range(STEPS):
        losses: list[torch.Tensor] = []
        if stage == 0:
            schedule.step(x)
        else:
            schedule.step(target=torch.ones_like(x), losses=losses)
        found.append([loss.item() for loss in losses])
        apply([layer], of_stages[stage])
    return found, [weights_of(layer)]


def in_turn(rank: int, world: Any) -> Found:
    layers, x = [Layer(world, stage) for stage in range(STAGES)], tokens_of(rank)
    found: list[list[float]] = []
    for _ in range(STEPS):
        losses = [loss_of(layers[1](layers[0](batch)), torch.ones_like(batch)) for batch in x.chunk(BATCHES)]
        for loss in losses:
            loss.backward()
        for weight in (weight for layer in layers for weight in layer.parameters()):
            weight.grad /= BATCHES
        found.append([loss.item() for loss in losses])
        apply(layers, world)
    return found, [weights_of(layer) for layer in layers]


@pytest.mark.parametrize("name", SCHEDULES)
def test_stages_of_a_pipeline_have_the_bits_of_layers_in_turn(ranks: Ranks, name: str) -> None:
    """While one stage computes a batch forward, another has an earlier one backward."""
    staged = ranks.run(STAGES * EXPERT_RANKS, in_stages, name)
    plain = ranks.run(EXPERT_RANKS, in_turn)
    for own, (losses, weights) in enumerate(plain):
        assert staged[(STAGES - 1) * EXPERT_RANKS + own][0] == losses and losses[0] != losses[1]
        for stage in range(STAGES):
            assert staged[stage * EXPERT_RANKS + own][1] == [weights[stage]]
