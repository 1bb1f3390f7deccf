"""bench/collectivex/ep_moecomm.py on CPU ranks, beside a stand-in of the module that it extends there."""

from __future__ import annotations

import sys
import types
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

import moecomm
from moecomm import formats

FOLDER = Path(__file__).parents[2] / "bench" / "collectivex"
RANKS, HIDDEN, EXPERTS, TOPK = 4, 256, 16, 4
LADDER = (1, 7, 32)


class StandIn:
    """Stand-in of CollectiveX's EPBackend, with the calls of its driver, without CUDA."""

    name = ""
    receive_layout, combine_weight_semantics = "token-rank", "unweighted-rank-sum"
    dispatch_dtype, dispatch_value_bytes, dispatch_scale_bytes_per_copy = "bf16", 2, 0
    stage_device_work = requires_fresh_pair = False
    SUPPORTED_MODES: tuple[str, ...] = ("normal",)
    SUPPORTED_PRECISIONS: tuple[str, ...] = ("bf16",)

    def __init__(self, args: Any, rank: int, world_size: int, local_rank: int, device: torch.device) -> None:
        assert args.mode in self.SUPPORTED_MODES and args.precision in self.SUPPORTED_PRECISIONS
        self.args, self.rank, self.world_size, self.device = args, rank, world_size, device
        self.mode, self.precision = args.mode, args.precision

    def finalize(self, rc: int) -> int:
        return rc

    def semantic_payload(self, x: torch.Tensor) -> torch.Tensor:
        return x


# Of an adapter: abstract there.
REQUIRED = {"create_buffer", "dispatch", "stage", "combine", "recv_tokens", "inspect_dispatch", "combine_transformed"}


@pytest.fixture
def adapter(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The class of the adapter, imported as CollectiveX imports it."""
    module: Any = types.ModuleType("ep_backend")
    module.EPBackend = StandIn
    monkeypatch.setitem(sys.modules, "ep_backend", module)
    monkeypatch.syspath_prepend(str(FOLDER))
    monkeypatch.delitem(sys.modules, "ep_moecomm", raising=False)
    from ep_moecomm import MoecommBackend

    yield MoecommBackend
    sys.modules.pop("ep_moecomm", None)


def problem_of(rank: int, tokens: int) -> Any:
    """The tokens of a rank. The first columns of a row say whose it is."""
    generator = torch.Generator().manual_seed(1000 * tokens + rank)
    x = torch.randn(tokens, HIDDEN, generator=generator).bfloat16()
    source = torch.arange(tokens) + rank * tokens
    x[:, :16] = (((source[:, None] >> torch.arange(16)) & 1) * 2 - 1).bfloat16()
    ids = torch.rand(tokens, EXPERTS, generator=generator).argsort(1)[:, :TOPK].contiguous()
    weights = torch.rand(tokens, TOPK, generator=generator)
    weights /= weights.sum(1, keepdim=True)
    return types.SimpleNamespace(T=tokens, x=x, dispatch_x=x, topk_idx=ids, topk_weights=weights)


def source_of(payload: torch.Tensor) -> torch.Tensor:
    return ((payload[:, :16] > 0).long() << torch.arange(16)).sum(1)


def scale(expert: torch.Tensor) -> torch.Tensor:
    """Return the factor by which an expert multiplies a row."""
    return 0.5 + expert.double() / 8


def expected(problems: list[Any], rank: int, payload: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    """The layer in float64."""
    own = problems[rank]
    factor = (own.topk_weights.double() * scale(own.topk_idx)).sum(1, keepdim=True)
    return payload(own.x).double() * factor


def check(backend: Any, problem: Any, problems: list[Any]) -> None:
    """One dispatch and combine, as the driver's oracles look at them."""
    handle = backend.dispatch(problem)
    view = backend.inspect_dispatch(problem, handle)
    per_rank = EXPERTS // RANKS
    x = torch.cat([one.x for one in problems])
    ids, weights = (torch.cat([getattr(one, name) for one in problems]) for name in ("topk_idx", "topk_weights"))
    local = ids // per_rank == backend.rank
    source = source_of(view.payload)
    assert torch.equal(view.payload, backend.semantic_payload(x)[source])
    assert torch.equal(
        view.local_expert_counts, torch.bincount(ids[local] - backend.rank * per_rank, minlength=per_rank)
    )
    if backend.receive_layout == "token-rank":
        assert sorted(source.tolist()) == local.any(1).nonzero()[:, 0].tolist()
        for row, token in enumerate(source.tolist()):
            there = {int(e): float(w) for e, w in zip(view.expert_ids[row], view.weights[row], strict=True) if e >= 0}
            assert there == {
                int(e): float(w)
                for e, w in zip(ids[token], weights[token], strict=True)
                if e // per_rank == backend.rank
            }
        factor = (view.weights.double() * scale(view.expert_ids) * (view.expert_ids >= 0)).sum(1)
    else:
        pairs = sorted(zip(source.tolist(), view.expert_ids.tolist(), strict=True))
        token, column = local.nonzero(as_tuple=True)
        assert pairs == sorted(zip(token.tolist(), ids[token, column].tolist(), strict=True))
        factor = scale(view.expert_ids)
    assert backend.recv_tokens(handle) == len(view.payload)
    transformed = (view.payload.double() * factor[:, None]).bfloat16()
    found = backend.combine_transformed(problem, handle, transformed)
    want = expected(problems, backend.rank, backend.semantic_payload)
    error = (found.double() - want).abs() / want.abs().clamp(min=2e-2)
    most = 8 if backend.receive_layout == "token-rank" else 2  # of the 8 that the benchmark allows
    assert found.shape == problem.x.shape and float(error.max()) < most * 2.0**-8


def pairs(backend: Any, problem: Any) -> None:
    """Pairs as the timed chain has them: the first stages, and later ones reuse its rows where staging is work."""
    staged, outputs = None, []
    for _ in range(5):
        handle = backend.dispatch(problem)
        if staged is None or not backend.stage_device_work:
            backend.stage(problem, handle)
            staged = handle.combine_input
        handle.combine_input = staged if backend.stage_device_work else handle.combine_input
        outputs.append(backend.combine(problem, handle))
    handle = backend.dispatch(problem)  # a handle is combined more than once
    backend.stage(problem, handle)
    outputs += [backend.combine(problem, handle) for _ in range(2)]
    assert all(torch.equal(out, outputs[0]) for out in outputs)


@pytest.mark.parametrize("precision", ["bf16", "fp8"])
@pytest.mark.parametrize(("mode", "domain"), [("normal", RANKS), ("normal", 2), ("low-latency", RANKS)])
def test_rows_weights_and_sums_are_those_of_the_benchmark(mode: str, precision: str, domain: int, adapter: Any) -> None:
    args = types.SimpleNamespace(
        mode=mode, precision=precision, experts=EXPERTS, topk=TOPK, hidden=HIDDEN, scale_up_domain=domain
    )
    groups, spec = moecomm.local_ranks(RANKS), types.SimpleNamespace(max_tokens_per_rank=max(LADDER))

    def run(rank: int) -> str:
        backend = adapter(args, rank, RANKS, rank, torch.device("cpu"))
        backend.group = groups[rank]
        backend.create_buffer(spec)
        for tokens in LADDER:
            problems = [problem_of(other, tokens) for other in range(RANKS)]
            check(backend, problems[rank], problems)
            pairs(backend, problems[rank])
        assert backend.finalize(0) == 0
        return f"{backend.name} {backend.kernel_generation} {backend.dispatch_dtype}"

    with ThreadPoolExecutor(RANKS) as ranks:
        told = {future.result() for future in [ranks.submit(run, rank) for rank in range(RANKS)]}
    layout, dtype = {"normal": "flat"}.get(mode, "batched"), {"fp8": "fp8-e4m3fn"}.get(precision, "bf16")
    assert told == {f"moecomm moecomm-{layout} {dtype}"}


def test_the_bytes_of_a_row_are_those_that_travel(adapter: Any) -> None:
    args = types.SimpleNamespace(mode="normal", precision="fp8", experts=8, topk=2, hidden=7168, scale_up_domain=8)
    backend = adapter(args, 0, 1, 0, torch.device("cpu"))
    rows, scales = formats.quantize(torch.zeros(1, 7168).bfloat16(), "fp8")
    assert backend.dispatch_value_bytes * 7168 == rows.nbytes
    assert backend.dispatch_scale_bytes_per_copy == scales.nbytes


def test_an_adapter_has_all_that_the_benchmark_asks_for(adapter: Any) -> None:
    assert set(vars(adapter)) >= REQUIRED and adapter.maturity == "candidate"
    contracts = {("token-rank", "unweighted-rank-sum"), ("token-expert", "weighted-kernel-sum")}  # those with an oracle
    for mode in adapter.SUPPORTED_MODES:
        args = types.SimpleNamespace(mode=mode, precision="bf16", experts=8, topk=2, hidden=64, scale_up_domain=8)
        backend = adapter(args, 0, 1, 0, torch.device("cpu"))
        assert (backend.receive_layout, backend.combine_weight_semantics) in contracts
