"""Weights of experts move between GPUs of one domain: cast there, verified, to addresses that graphs have captured."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from moecomm import Placement
from moecomm.errors import CorruptWeights, PeerLost
from moecomm.testing.cases import random_placement
from moecomm.transfer import WeightTransfer
from moecomm.transfer.records import Leaving

from ..conftest import Ranks, gpu_count
from ..weight_transfers import CASTS, EXPERTS, Model, beside

pytestmark = pytest.mark.gpu2
SHAPES: dict[str, tuple[int, ...]] = {"w13": (1024, 512), "w2": (512, 392)}


def _room(model: Model, held: Any) -> dict[str, tuple[torch.Tensor, ...]]:
    return {name: tuple(part.cuda() for part in parts) for name, parts in model.room(held).items()}


def _check(model: Model, found: dict[str, tuple[torch.Tensor, ...]], held: Any, step: int) -> None:
    model.check({name: tuple(part.cpu() for part in parts) for name, parts in found.items()}, held, step)


def _given(model: Model, step: int, held: Any) -> dict[str, torch.Tensor] | None:
    given = model.given(step, held)
    return given and {name: tensor.cuda() for name, tensor in given.items()}


def _moves(rank: int, group: Any, case: int) -> None:
    ranks, model = group.size(), Model(SHAPES, torch.bfloat16, CASTS[case], case)
    if case % 2:  # the first half trains, the others serve
        trains, serves = range(ranks // 2), range(ranks // 2, ranks)
        source = beside(trains, ranks, case, -(-EXPERTS // len(trains)) + 1)
        target = beside(serves, ranks, case + 50, -(-EXPERTS // len(serves)) + 2)
    else:
        both = {"ranks": ranks, "num_experts": EXPERTS, "slots": EXPERTS}
        source, target = random_placement(case, **both), random_placement(case + 50, **both)
    have, want = source.held[rank], target.held[rank]
    serving = any(expert >= 0 for expert in want)
    found = _room(model, want)
    how: dict[str, Any] = {"source": source, "target": target, "cast": model.cast, "timeout_s": 30}
    with WeightTransfer(group, SHAPES, **how) as transfer:
        assert torch.device("cuda", torch.cuda.current_device()) == transfer._window.device
        copies = {name: parts[0].view(torch.uint8).clone() for name, parts in found.items()}
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for name, parts in found.items():
                copies[name].copy_(parts[0].view(torch.uint8))
        for step in (1, 2, 3):
            transfer.stage(_given(model, step, have))
            if step > 1:
                _check(model, found, want, step - 1)
            transfer.commit(found if serving else None)
            _check(model, found, want, step)
            graph.replay()
            for name, parts in found.items():
                assert torch.equal(copies[name], parts[0].view(torch.uint8))


@pytest.mark.timeout(300)
@pytest.mark.parametrize("case", range(len(CASTS)))
def test_gpus_get_what_the_specification_casts(gpu_ranks: Ranks, case: int) -> None:
    gpu_ranks.run(gpu_count(), _moves, case)


def _flipped(rank: int, group: Any) -> str:
    ranks, model = group.size(), Model(SHAPES, torch.bfloat16, "fp8", 0)
    source = Placement([range(EXPERTS), *[[]] * (ranks - 1)])
    target = Placement([*[[]] * (ranks - 1), range(EXPERTS)])
    found, serving = _room(model, target.held[rank]), rank == ranks - 1
    with WeightTransfer(group, SHAPES, source=source, target=target, cast="fp8", timeout_s=30) as transfer:
        transfer.stage(_given(model, 1, source.held[rank]))
        transfer.commit(found if serving else None)
        write = transfer._carrier.write

        def broken(leaving: Sequence[Leaving], number: int) -> None:
            write(leaving, number)
            leaving[0].record[1000] ^= 4

        if rank == 0:
            transfer._carrier.write = broken  # type: ignore[method-assign]
        with pytest.raises(CorruptWeights, match="'w13' of expert 0") as caught:
            transfer.stage(_given(model, 2, source.held[rank]))
        _check(model, found, target.held[rank], 1)
        if rank == 0:
            return str(caught.value)
        with pytest.raises(PeerLost, match="rank 0 is gone"):
            transfer.stage(None)
        _check(model, found, target.held[rank], 1)
    return str(caught.value)


@pytest.mark.timeout(300)
def test_a_flipped_byte_and_a_rank_that_closes_leave_the_old_weights(gpu_ranks: Ranks) -> None:
    count = gpu_count()
    said = gpu_ranks.run(count, _flipped)
    assert all(f"rank 0 sent to rank {count - 1}" in text for text in said)
