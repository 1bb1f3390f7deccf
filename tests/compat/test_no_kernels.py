"""deep_ep's calls compute nothing on tensors that moecomm's own do not, but for what is listed here."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from moecomm.compat.deep_ep import Buffer, ElasticBuffer, EPBuffer, HybridEPBuffer, hybrid
from moecomm.gpu import padding
from moecomm.gpu.budgets import Kept
from moecomm_bench.case import RoundsCase
from moecomm_bench.deep_ep_layer import NOT_COPIED, DeepEpLayer

from ..backends.conftest import all_ranks

TOKENS, HIDDEN, TOPK, EXPERTS = 6, 256, 3, 8
CASE = RoundsCase("", HIDDEN, TOPK, EXPERTS, 2, "host", [TOKENS], ["flat"], ["bf16"], [0], "eager")
NOTHING_DROPPED = torch.zeros(1, dtype=torch.int32)  # of within_budgets(), whose kernels are documented


def all_of(ids: torch.Tensor) -> Kept:
    return Kept(ids, NOTHING_DROPPED, NOTHING_DROPPED)


# Make no kernel: another look at memory, or memory that is not initialised.
FREE = (
    "view",
    "slice",
    "select",
    "transpose",
    "unsqueeze",
    "expand",
    "alias",
    "detach",
    "t",
    "empty",
    "new_empty",
    "lift_fresh",
)


class Computed(TorchDispatchMode):
    """Names of the operations that run inside it, but for those that compute nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if name not in FREE:
            self.names.append(name)
        return func(*args, **(kwargs or {}))


def computed(call: Callable[[], Any]) -> list[str]:
    """Return the operations of a call, once it has been made before."""
    call()
    with Computed() as seen:
        call()
    return seen.names


def test_buffer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hybrid, "within_budgets", lambda pool, ids, *given: all_of(ids))

    def body(group: Any) -> None:
        with DeepEpLayer(CASE, group, torch.device("cpu"), TOKENS) as layer:
            for pair in layer.pairs():
                native, compat = computed(pair.native), computed(pair.compat)
                copies = ["clone"] if pair.what == "elastic dispatch" and NOT_COPIED not in pair.variant else []
                assert compat == native + copies, pair.about
                assert native == [] or pair.what.startswith("hybrid"), pair.about

    all_ranks(2, body)


def given(rank: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    g = torch.Generator().manual_seed(rank)
    ids = torch.rand(TOKENS, EXPERTS, generator=g).argsort(dim=1)[:, :TOPK].contiguous()
    return torch.randn(TOKENS, HIDDEN, generator=g).bfloat16(), ids, torch.rand(TOKENS, TOPK, generator=g)


def test_low_latency_and_what_it_does_beside() -> None:
    def body(group: Any) -> None:
        buffer = Buffer(group)
        x, ids, _ = given(buffer.rank)
        stats = torch.zeros(EXPERTS // 2, dtype=torch.int32)

        def dispatch(**options: Any) -> None:
            *_, hook = buffer.low_latency_dispatch(x, ids, TOKENS, EXPERTS, return_recv_hook=True, **options)
            hook()

        assert computed(dispatch) == []
        assert computed(lambda: dispatch(use_fp8=False)) == []
        assert computed(lambda: dispatch(use_ue8m0=True, round_scale=True)) == []
        assert computed(lambda: dispatch(round_scale=True)) == ["copy_", "bitwise_left_shift_"]
        assert computed(lambda: dispatch(cumulative_local_expert_recv_stats=stats)) == ["add_"]

    all_ranks(2, body)


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Record by name, and do not run, what is one kernel of ours on a GPU and several operations on a CPU."""
    names: list[str] = []

    def stand_in(name: str, *made: Any) -> Callable[..., Any]:
        return lambda *args, **options: (names.append(name), made)[1]

    monkeypatch.setattr(padding, "zero", stand_in("zero"))
    ids = torch.zeros(TOKENS, TOPK, dtype=torch.int64) - 1
    monkeypatch.setattr(
        hybrid, "within_budgets", lambda pool, ids, *given: (names.append("within_budgets"), all_of(ids))[1]
    )
    monkeypatch.setattr(hybrid, "ids_of", stand_in("ids_of", ids, torch.zeros(TOKENS, TOPK)))
    monkeypatch.setattr(hybrid, "weights_at", stand_in("weights_at"))
    return names


@pytest.mark.parametrize("expand", [False, True])
@pytest.mark.parametrize("kind", [ElasticBuffer, EPBuffer])
def test_elastic_buffer(kind: type[ElasticBuffer | EPBuffer], expand: bool, launches: list[str]) -> None:
    def body(group: Any) -> None:
        buffer = kind(group, num_max_tokens_per_rank=TOKENS, hidden=HIDDEN, num_topk=TOPK)
        x, ids, weights = given(buffer.rank_idx)
        options: dict[str, Any] = {"num_experts": EXPERTS, "do_expand": expand, "do_cpu_sync": False}
        options["do_handle_copy"] = False
        recv_x, _, _, handle, _ = buffer.dispatch(x, ids, weights, **options)
        y = recv_x.clone()
        assert computed(lambda: buffer.dispatch(x, ids, weights, **options)) == []
        assert computed(lambda: buffer.dispatch(x, handle=handle, do_expand=expand)) == []
        assert computed(lambda: buffer.combine(y, handle)) == []
        assert computed(lambda: buffer.combine(y, handle, bias=(x, x))) == ["_to_copy", "_to_copy", "add"]
        if expand:
            padded = {**options, "do_zero_padding": True}
            assert computed(lambda: buffer.dispatch(x, ids, weights, **padded)) == []

    all_ranks(2, body)
    assert launches == ["zero"] * 4 * expand  # two ranks, two calls


def test_hybrid_buffer(launches: list[str]) -> None:
    def body(group: Any) -> None:
        buffer = HybridEPBuffer(group, HIDDEN, TOKENS, EXPERTS // 2)
        x, ids, weights = given(buffer.rank)
        room = 2 * TOKENS * TOPK
        options: dict[str, Any] = {"num_of_experts": EXPERTS, "num_permuted_tokens": room, "non_blocking": True}

        def dispatch(**more: Any) -> Any:
            return buffer.dispatch_with_permute(hidden=x, topk_idx=ids, topk_weights=weights, **options, **more)

        rows, *_, handle = dispatch()
        rows = rows.clone()
        assert computed(dispatch) == []
        options["num_permuted_tokens"] = room + 4 * EXPERTS // 2
        assert computed(lambda: dispatch(pad_multiple=4)) == []
        repeat = {"num_permuted_tokens": room, "non_blocking": True}
        assert computed(lambda: buffer.dispatch_with_permute(hidden=x, handle=handle, **repeat)) == []
        assert computed(lambda: buffer.combine_with_unpermute(hidden=rows, handle=handle)) == []
        probs = torch.ones(len(rows))
        assert computed(lambda: buffer.combine_with_unpermute(hidden=rows, handle=handle, probs=probs)) == []
        call = {
            **repeat,
            "routing_map": torch.ones(TOKENS, EXPERTS, dtype=torch.bool),
            "probs": torch.ones(TOKENS, EXPERTS),
        }
        assert computed(lambda: buffer.dispatch_with_permute(hidden=x, **call)) == []

    all_ranks(2, body)
    assert sorted(launches) == ["ids_of"] * 4 + ["weights_at"] * 4 + ["within_budgets"] * 14 + ["zero"] * 4
