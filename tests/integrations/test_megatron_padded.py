"""Experts padded to their capacity: moecomm's dispatcher against the all-to-all one in the same mode, on CPUs."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

import moecomm

pytest.importorskip("tests.integrations.megatron_core", reason="needs megatron-core: pip install megatron-core")

from moecomm.integrations.megatron import Limits
from moecomm.ops import rounds as operators
from tests.integrations.megatron_on_cpu import HIDDEN, parallel, without_cuda
from tests.integrations.test_megatron import EXACT, pair, results

CASES: dict[str, dict[str, Any]] = {
    "some are dropped": {"moe_expert_capacity_factor": 0.5},
    "bfloat16": {**EXACT["bfloat16"], "moe_expert_capacity_factor": 1.0},
    "three terms": {"moe_expert_capacity_factor": 1.5, "moe_router_topk": 3},
    "one expert a rank": {"moe_expert_capacity_factor": 2.0, "num_moe_experts": 4},
    "router in float64": {"moe_expert_capacity_factor": 1.0, "moe_router_dtype": "fp64"},
    "split experts": {"moe_expert_capacity_factor": 1.0},
}


def padded(settings: dict[str, Any]) -> dict[str, Any]:
    """Megatron-core has the mode for its all-to-all dispatcher, and moecomm's takes its place."""
    return {**settings, "moe_pad_expert_input_to_capacity": True, "ours": "alltoall"}


def capacity_of(config: Any, tokens: int) -> int:
    """Rows of an expert from a rank with so many tokens."""
    return math.ceil(tokens * config.moe_router_topk / config.num_moe_experts * config.moe_expert_capacity_factor)


def by_expert(given: list[torch.Tensor], sort: bool) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return each expert's rows that have a weight, and the weights; `sort`: in the order of their first columns."""
    rows, counts, probs = given
    found = []
    for x, weights in zip(rows.split(counts.tolist()), probs.split(counts.tolist()), strict=True):
        x, weights = x[weights != 0], weights[weights != 0]
        order = x[:, 0].argsort() if sort else torch.arange(len(x))
        found.append((x[order], weights[order]))
    return found


def _against_theirs(rank: int, group: Any, name: str) -> list[float]:
    without_cuda()
    tensor_parallel = 2 if name == "split experts" else 1
    parallel(4, tensor_parallel)
    dtype = CASES[name].get("params_dtype", torch.float32)
    theirs, mine = pair(padded(CASES[name]), 4, tensor_parallel, limits=Limits(num_sms=2))
    seen: list[list[torch.Tensor]] = []  # by experts
    for layer in (theirs, mine):
        layer.experts.register_forward_pre_hook(lambda _, args: seen.append([a.detach().clone() for a in args]))
    rounds, dispatch = [], operators.run_dispatch

    def dispatched(state: Any, request: Any, *tensors: Any, sync: bool, **others: Any) -> Any:
        rounds.append((sync, request.options.num_sms))
        return dispatch(state, request, *tensors, sync=sync, **others)

    operators.run_dispatch = dispatched
    manager, errors = mine.token_dispatcher._comm_manager, []
    for tokens in (6, 40, 9):  # of two sequences: the second time there is no room for them
        want, got = (results(layer, rank, tokens, dtype) for layer in (theirs, mine))
        most = max(float(t.abs().max()) for t in want)
        errors += [float((a.float() - b.float()).abs().max()) / most for a, b in zip(got, want, strict=True)]
        (their_rows, my_rows), seen[:] = seen[:], []
        rows, counts, probs = my_rows
        assert counts.tolist() == [4 * capacity_of(mine.config, 2 * tokens)] * mine.num_local_experts
        assert counts.dtype is torch.int64 and counts.device.type == "cpu" and len(rows) == len(probs) == sum(counts)
        # Those with a weight are theirs to the bit, in their order; what fills up is zeros.
        both = [by_expert(given, sort=tensor_parallel > 1) for given in (my_rows, their_rows)]
        for (x, weights), (their_x, their_weights) in zip(*both, strict=True):
            assert torch.equal(x, their_x) and torch.equal(weights, their_weights.to(weights.dtype))
        assert rows[probs != 0].any() and rows.isfinite().all()
        assert (probs[(rows == 0).all(dim=1)] == 0).all()
        assert manager.token_probs is None and manager.dispatched_probs is None, "a graph of autograd hangs on them"
        ((buffer, room),) = manager._exchange._buffers.values()
        assert buffer.max_tokens >= 2 * tokens and room >= int(counts[0])
        # Leftovers of an earlier round in the window.
        nan = torch.full((buffer.max_tokens, HIDDEN), torch.nan, dtype=dtype)
        ids = torch.full((len(nan), buffer.topk), -1)
        ids[:, 0] = torch.arange(len(nan)) % buffer.num_experts
        buffer.dispatch(nan, ids, torch.full(ids.shape, torch.nan), layout="batched")
    assert rounds == [(False, 2)] * 6, "three forward and three back, none of which waits"
    return errors


@pytest.mark.parametrize("name", CASES)
def test_the_layer_is_the_one_of_theirs(ranks: Any, name: str) -> None:
    """But for the order of sums."""
    for errors in ranks.run(4, _against_theirs, name):
        assert all(error <= (8 * 2.0**-8 if name == "bfloat16" else 64 * 2.0**-24) for error in errors), errors


def _aligned(rank: int, group: Any) -> tuple[list[int], int, bool]:
    without_cuda()
    parallel(2)
    settings = padded({"moe_expert_capacity_factor": 1.0})
    theirs, mine = pair(settings, 2)
    manager = mine.token_dispatcher._comm_manager
    manager.alignment = 16  # as with FP8, which needs TransformerEngine
    seen: list[Any] = []
    mine.experts.register_forward_pre_hook(lambda _, args: seen.extend(args))
    want, got = (results(layer, rank, 3, torch.float32) for layer in (theirs, mine))
    close = all(bool(((a - b).abs() <= 2.0**-18 * b.abs().max()).all()) for a, b in zip(got, want, strict=True))
    return seen[1].tolist(), len(seen[0]), close


def test_rows_of_an_expert_are_a_multiple_of_what_quantization_wants(ranks: Any) -> None:
    assert ranks.run(2, _aligned) == [([16] * 4, 64, True)] * 2  # 2 * 2 rows of an expert are filled up to 16


def _deep(rank: int, group: Any) -> list[bool]:
    """Twenty passes forward, and then all of them back, in a window of three rounds."""
    without_cuda()
    parallel(2)
    limits = Limits(max_tokens=1000)
    theirs, mine = pair(padded({"moe_expert_capacity_factor": 1.0}), 2, limits=limits)
    want = results(theirs, rank, 500, torch.float32)
    g = torch.Generator().manual_seed(rank)
    x, seen = torch.randn((2, 500, 2, HIDDEN), generator=g)
    given = [x.clone().requires_grad_() for _ in range(20)]
    outs = [mine(x)[0] for x in given]
    ((buffer, _),) = mine.token_dispatcher._comm_manager._exchange._buffers.values()
    rows = 2 * capacity_of(mine.config, 1000)
    heap = buffer.rounds.memory.arena
    same = [heap.end - heap.begin < 3 * buffer.rounds.settings.round_bytes("batched", rows) + 4096]
    for x, out in zip(given, outs, strict=True):
        mine.zero_grad()
        (out * seen).sum().backward()
        found = [out.detach(), x.grad, *(p.grad for p in mine.parameters())]
        same += [bool(((a - b).abs() <= 2.0**-18 * b.abs().max()).all()) for a, b in zip(found, want, strict=True)]
    return same


def test_deep_models_need_no_window_for_all_of_their_layers(ranks: Any) -> None:
    assert all(all(same) for same in ranks.run(2, _deep))


def _in_a_capture(rank: int, group: Any) -> tuple[str, list[bool]]:
    without_cuda()
    parallel(2)
    _, mine = pair(padded({"moe_expert_capacity_factor": 1.0}), 2)
    exchange = mine.token_dispatcher._comm_manager._exchange
    results(mine, rank, 4, torch.float32)
    ((first, _),) = exchange._buffers.values()
    type(first.rounds.session).capturing = lambda self: True
    results(mine, rank, 4, torch.float32)
    type(first.rounds.session).capturing = lambda self: False
    results(mine, rank, 40, torch.float32)
    ((second, _),) = exchange._buffers.values()
    stays = [second is not first, exchange._captured == [first], not first.closed]
    torch.cuda.is_current_stream_capturing = lambda: True

    class OnGpu(torch.Tensor):
        is_cuda = True

    try:
        exchange._buffer(torch.zeros(800, HIDDEN).as_subclass(OnGpu), 8)
    except moecomm.Unsupported as error:
        return str(error), stays
    return "", stays


def test_a_capture_keeps_its_buffer_and_opens_none(ranks: Any) -> None:
    for said, stays in ranks.run(2, _in_a_capture):
        assert "800 tokens" in said and stays == [True] * 3
