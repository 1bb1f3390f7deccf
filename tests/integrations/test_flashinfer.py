"""FlashInfer's rank-major contract over CPU ranks: with a stub of its interface, and with its own where installed."""

from __future__ import annotations

import importlib.util
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from threading import Barrier
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

import moecomm
from moecomm import formats
from moecomm.base.experts import experts_of
from moecomm.ranks import settings
from moecomm.router import random_routing

INSTALLED = importlib.util.find_spec("flashinfer")
HIDDEN, EXPERTS, TOPK, MOST, RANKS = 128, 10, 3, 12, 4  # two ranks have three experts, and two have two
TOKENS = (5, 0, 12, 3)


@dataclass(frozen=True)
class MoEEpDispatchResult:
    hidden_states: torch.Tensor
    topk_ids: torch.Tensor
    topk_weights: torch.Tensor | None
    tokens_per_rank: int
    hidden_states_scale: torch.Tensor | None = None
    eplb_gathered_stats: torch.Tensor | None = None


@dataclass(frozen=True)
class MoEEpCommParams:
    num_experts: int
    top_k: int
    max_tokens_per_rank: int
    hidden_size: int
    dtype: torch.dtype | None = None
    dispatch_format: Any = None
    invalid_expert_id: int = -1

    @property
    def token_dtype(self) -> torch.dtype:
        return self.dtype or torch.bfloat16


class MoEEpCommunication(ABC):
    def __init__(self, bootstrap: Any, params: Any) -> None:
        self.bootstrap, self.params = bootstrap, params
        self.ep_rank, self.ep_size = bootstrap.rank, bootstrap.world_size
        self.num_local_experts = params.num_experts // self.ep_size

    @classmethod
    @abstractmethod
    def is_platform_supported(cls) -> bool: ...

    def is_workload_feasible(self, max_tokens_per_rank: int) -> bool:
        return max_tokens_per_rank <= self.params.max_tokens_per_rank

    @abstractmethod
    def dispatch(  # noqa: ANN201
        self,
        hidden_states: Any,
        topk_ids: Any,
        topk_weights: Any = None,
        *,
        hidden_states_scale: Any = None,
        max_tokens_per_rank: Any = None,
        eplb_local_stats: Any = None,
    ): ...

    @abstractmethod
    def combine(self, expert_output: Any, *, output: Any = None) -> Any: ...

    def get_combine_input_buffer(self, dtype: Any) -> Any:
        return None

    def destroy(self) -> None: ...  # noqa: B027


def _stub() -> ModuleType:
    module = ModuleType("flashinfer.moe_ep")
    registered: dict[str, Any] = {}
    module.__dict__.update(
        MoEEpDispatchResult=MoEEpDispatchResult,
        MoEEpCommParams=MoEEpCommParams,
        MoEEpCommunication=MoEEpCommunication,
        register_communication=lambda name: lambda kind: registered.setdefault(name, kind),
        create_communication=lambda bootstrap, params, backend, **more: registered[backend](bootstrap, params, **more),
    )
    return module


def _installed() -> ModuleType:
    """Its own module, by itself: the rest imports what only GPU machines have."""
    if INSTALLED is None or not INSTALLED.submodule_search_locations:
        pytest.skip("needs flashinfer-python, installed")
    path = Path(next(iter(INSTALLED.submodule_search_locations))) / "moe_ep" / "core" / "comm" / "communication.py"
    spec = importlib.util.spec_from_file_location("flashinfer.moe_ep", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["flashinfer.moe_ep"] = module  # its dataclasses look themselves up
    spec.loader.exec_module(module)
    return module


@pytest.fixture(params=[_stub, _installed], ids=["stub", "installed"])
def moe_ep(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    for name in [name for name in sys.modules if name.split(".")[0] == "flashinfer"]:
        monkeypatch.delitem(sys.modules, name)
    parent = ModuleType("flashinfer")
    parent.__path__ = []  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "flashinfer", parent)
    monkeypatch.setitem(sys.modules, "flashinfer.moe_ep", ModuleType("flashinfer.moe_ep"))
    found = request.param()
    monkeypatch.setitem(sys.modules, "flashinfer.moe_ep", found)
    if request.param is _installed:  # which wants equally many experts on all ranks
        monkeypatch.setattr(sys.modules[__name__], "EXPERTS", 3 * RANKS)
    sys.modules.pop("moecomm.integrations.flashinfer", None)
    importlib.import_module("moecomm.integrations.flashinfer")
    yield found
    sys.modules.pop("moecomm.integrations.flashinfer", None)


class Rank:
    def __init__(self, group: Any, moe_ep: Any, dtype: torch.dtype = torch.float32, **options: Any) -> None:
        self.rank, self.mine = group.rank, experts_of(group.rank, EXPERTS, group.ranks)
        bootstrap = SimpleNamespace(rank=group.rank, world_size=group.ranks, process_group=group)
        params = moe_ep.MoEEpCommParams(EXPERTS, TOPK, MOST, HIDDEN, dtype=dtype, invalid_expert_id=EXPERTS + 5)
        self.comm = moe_ep.create_communication(bootstrap, params, "moecomm", moecomm_backend="host", **options)
        g = torch.Generator().manual_seed(self.rank)
        self.x = torch.randint(-8, 9, (TOKENS[self.rank], HIDDEN), generator=g).to(dtype)
        self.ids, _ = random_routing(len(self.x), EXPERTS, TOPK, drop=0.2, generator=g)
        self.weights = torch.randint(1, 5, (len(self.x), TOPK), generator=g).float()

    def experts(self, got: Any) -> torch.Tensor:
        """Expert e multiplies by e + 1; rows without experts give nonsense, which nobody may read."""
        here = (got.topk_ids >= self.mine.start) & (got.topk_ids < self.mine.stop)
        assert ((got.topk_ids == EXPERTS + 5) | here).all()
        mine = got.topk_ids < EXPERTS
        scale = torch.where(mine, got.topk_ids + 1, 0) * (1 if got.topk_weights is None else got.topk_weights)
        y = got.hidden_states.float() * scale.sum(dim=1, keepdim=True)
        return torch.where(mine.any(dim=1, keepdim=True), y, torch.nan).to(self.x.dtype)

    def wanted(self, masked: tuple[int, ...] = ()) -> torch.Tensor:
        gone = [expert for rank in masked for expert in experts_of(rank, EXPERTS, RANKS)]
        there = (self.ids >= 0) & ~torch.isin(self.ids, torch.tensor(gone, dtype=torch.int64))
        scale = torch.where(there, self.ids + 1, 0) * self.weights
        return self.x * scale.sum(dim=1, keepdim=True).to(self.x.dtype)


def on_ranks(body: Callable[[Rank], Any], moe_ep: Any, **options: Any) -> list[Any]:
    def run(group: Any) -> Any:
        rank = Rank(group, moe_ep, **options)
        try:
            return body(rank)
        finally:
            rank.comm.destroy()
            rank.comm.destroy()

    with ThreadPoolExecutor(RANKS) as pool:
        return list(pool.map(run, moecomm.local_ranks(RANKS)))


@pytest.mark.parametrize("ids_dtype", [torch.int64, torch.int32])
def test_tokens_return(moe_ep: Any, ids_dtype: torch.dtype) -> None:
    def body(rank: Rank) -> bool:
        got = rank.comm.dispatch(rank.x, rank.ids.to(ids_dtype), rank.weights)
        assert got.tokens_per_rank == MOST and len(got.hidden_states) == len(got.topk_ids) == RANKS * MOST
        assert got.topk_ids.dtype is ids_dtype and got.hidden_states_scale is None
        assert got.topk_weights[got.topk_ids > EXPERTS].eq(0).all()
        first = torch.equal(rank.comm.combine(rank.experts(got)), rank.wanted())
        # Fewer rows, into a tensor of the caller's, out of rows in the window.
        name = "max_tokens_per_rank" if ids_dtype is torch.int64 else "runtime_max_tokens_per_rank"  # in other versions
        got = rank.comm.dispatch(rank.x, rank.ids.to(ids_dtype), rank.weights, **{name: 12})
        y, out = rank.comm.get_combine_input_buffer(rank.x.dtype), torch.empty_like(rank.x)
        y.copy_(rank.experts(got))
        assert rank.comm.combine(y.view(RANKS, 12, HIDDEN), output=out) is out
        return first and torch.equal(out, rank.wanted())

    assert on_ranks(body, moe_ep) == [True] * RANKS


def test_combines_of_low_precision_travel_in_fp8(moe_ep: Any) -> None:
    def body(rank: Rank) -> bool:
        got = rank.comm.dispatch(rank.x, rank.ids, rank.weights)
        found, want = rank.comm.combine(rank.experts(got)), rank.wanted()
        if len(want) == 0:
            return True
        off = (found - want).abs().max() / want.abs().max()
        return bool(0 < off < RANKS / 16)  # each rank's sum is off by half a unit of e4m3's last place

    assert on_ranks(body, moe_ep, use_low_precision_combine=True) == [True] * RANKS


def test_a_window_has_room_for_the_shapes_of_the_contract(moe_ep: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Results have as many rows as there can be: the window does not follow what is expected."""
    monkeypatch.setattr(settings, "CAPACITY_FACTOR", 0.01)
    monkeypatch.setattr(settings, "_ROOM", 1)
    test_tokens_return(moe_ep, torch.int64)


def test_fp8_rows_travel_with_scales(moe_ep: Any) -> None:
    def body(rank: Rank) -> bool:
        x, scales = rank.x.to(torch.float8_e4m3fn), torch.full((len(rank.x), HIDDEN // 32), 3, dtype=torch.uint8)
        got = rank.comm.dispatch(x, rank.ids, rank.weights, hidden_states_scale=scales)
        here = (got.topk_ids < EXPERTS).any(dim=1)
        assert got.hidden_states.dtype is torch.float8_e4m3fn and got.hidden_states_scale[here].eq(3).all()
        return torch.equal(rank.comm.combine(rank.experts(got)), rank.wanted())  # integers to 8 are exact

    assert on_ranks(body, moe_ep) == [True] * RANKS


FORMATS = ["fp8", "fp8_token", "fp8_tensor", "int8_token", "mxfp8", "nvfp4", "mxfp4"]


@pytest.mark.parametrize("name", FORMATS)
def test_quantized_rows_arrive_as_they_are(moe_ep: Any, name: str) -> None:
    def body(rank: Rank) -> bool:
        factor = None if name != "fp8_tensor" else 0.5
        values, scales = formats.quantize(rank.x, name, global_scale=factor)
        shapes: list[Any] = [None] if scales is None else [scales.shape, (*scales.shape, 1)]
        if scales is not None and scales.shape[1] == 1:
            shapes.append(scales.shape[:1])
        for shape in shapes:
            given = None if scales is None else scales.view(shape)
            got = rank.comm.dispatch(values, rank.ids, rank.weights, hidden_states_scale=given)
            here = (got.topk_ids < EXPERTS).any(dim=1)
            rows = sent_rows(rank, lambda x, _: formats.quantize(x, name, global_scale=factor)[0])
            assert got.hidden_states.dtype is values.dtype
            assert bytes_of(got.hidden_states[here]) == bytes_of(rows)
            assert (got.hidden_states_scale is None) == (given is None)
            if given is not None:
                rows = sent_rows(rank, lambda x, _: formats.quantize(x, name)[1])
                found = got.hidden_states_scale
                assert found.shape[1:] == given.shape[1:] and found.dtype is given.dtype
                assert bytes_of(found[here]) == bytes_of(rows)
            y = torch.zeros(len(here), HIDDEN)
            y[here] = sent_rows(rank, lambda x, _: x)
            out = rank.comm.combine(rank.experts(MoEEpDispatchResult(y, got.topk_ids, got.topk_weights, MOST)))
            if not torch.equal(out, rank.wanted()):
                return False
        return True

    assert on_ranks(body, moe_ep) == [True] * RANKS


def sent_rows(rank: Rank, of: Callable[[torch.Tensor, torch.Tensor], Any]) -> torch.Tensor:
    """`of` each rank's x and ids: the rows that arrive at this rank, in order."""
    rows = []
    for other in range(RANKS):
        x, ids = inputs_of(other, rank.x.dtype)
        made = of(x, ids)
        rows.append(made[((ids >= rank.mine.start) & (ids < rank.mine.stop)).any(dim=1)])
    return torch.cat(rows) if rows[0].ndim == 1 else torch.cat([r.view(torch.uint8) for r in rows]).view(rows[0].dtype)


def bytes_of(tensor: torch.Tensor) -> list[int]:
    found: list[int] = tensor.contiguous().flatten().view(torch.uint8).tolist()
    return found


def inputs_of(rank: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    g = torch.Generator().manual_seed(rank)
    x = torch.randint(-8, 9, (TOKENS[rank], HIDDEN), generator=g).to(dtype)
    return x, random_routing(len(x), EXPERTS, TOPK, drop=0.2, generator=g)[0]


@pytest.mark.parametrize("first", ["x", "fp8", "ids", "three dimensions"])
def test_any_list_of_payloads(moe_ep: Any, first: str) -> None:
    """As MoeAlltoAll takes them: ids and weights are payloads, too."""

    def payloads(x: torch.Tensor, ids: torch.Tensor) -> list[torch.Tensor]:
        rows = {
            "x": x,
            "fp8": x.to(torch.float8_e4m3fn),
            "ids": ids.int(),
            "three dimensions": x.unflatten(1, (4, -1)).to(torch.int8),
        }[first]
        more = [ids.int(), x[:, 0].double(), x[:, :6].view(len(x), 2, 3).bfloat16(), x[:, :5] > 0]
        return [rows, *more]

    def body(rank: Rank) -> bool:
        given = payloads(rank.x, rank.ids)
        got = rank.comm.dispatch_payloads(rank.ids.int(), given, 12, EXPERTS + 5, 1)
        rows = len(sent_rows(rank, lambda x, _: x))
        for at, (found, sent) in enumerate(zip(got, given, strict=True)):
            assert found.shape == (RANKS, 12, *sent.shape[1:]) and found.is_contiguous() and found.dtype is sent.dtype
            want = sent_rows(rank, lambda x, ids, at=at: payloads(x, ids)[at])
            assert bytes_of(found.flatten(0, 1)[:rows]) == bytes_of(want)
        ids = got[1].flatten(0, 1)
        assert ids[rows:].eq(EXPERTS + 5).all()
        here = (ids >= rank.mine.start) & (ids < rank.mine.stop)
        y = torch.zeros(len(ids), HIDDEN)
        y[:rows] = sent_rows(rank, lambda x, _: x) * here[:rows].sum(dim=1, keepdim=True)
        out = rank.comm.combine(y.view(RANKS, 12, HIDDEN))
        return torch.equal(out, rank.x * (rank.ids >= 0).sum(dim=1, keepdim=True))

    assert on_ranks(body, moe_ep) == [True] * RANKS


@pytest.mark.parametrize("hidden", [HIDDEN, 4])  # EXPERTS words are wider than a row of four
@pytest.mark.parametrize("payloads", [False, True])
def test_statistics_are_gathered(moe_ep: Any, monkeypatch: pytest.MonkeyPatch, payloads: bool, hidden: int) -> None:
    """Each rank's row arrives at all ranks, also while one is masked; a dispatch without them gathers none."""
    monkeypatch.setattr(sys.modules[__name__], "HIDDEN", hidden)

    def body(rank: Rank) -> None:
        comm = rank.comm

        def gathered(stats: torch.Tensor | None) -> torch.Tensor | None:
            if payloads:
                comm.dispatch_payloads(rank.ids, [rank.x, rank.ids.int()], MOST, eplb_local_stats=stats)
                comm.combine(torch.zeros(RANKS, MOST, HIDDEN))
                return comm.eplb_gathered_stats
            got = comm.dispatch(rank.x, rank.ids, rank.weights, eplb_local_stats=stats)
            assert torch.equal(comm.combine(rank.experts(got)), rank.wanted())
            assert got.eplb_gathered_stats is comm.eplb_gathered_stats
            return got.eplb_gathered_stats

        for words in (EXPERTS, 3, 1):
            found = gathered(torch.arange(words).int() + 100 * rank.rank)
            assert found is not None and found.dtype is torch.int32
            assert found.tolist() == [[100 * source + word for word in range(words)] for source in range(RANKS)]
        assert gathered(None) is None
        if rank.rank != 1:
            mask = torch.tensor([0b1101], dtype=torch.uint64)
            comm.dispatch(rank.x, rank.ids, eplb_local_stats=torch.full((2,), rank.rank).int(), active_rank_mask=mask)
            assert comm.eplb_gathered_stats.tolist() == [[0, 0], [0, 0], [2, 2], [3, 3]]

    on_ranks(body, moe_ep)


def test_ranks_with_different_payloads_are_told(moe_ep: Any) -> None:
    def body(rank: Rank) -> None:
        more = [rank.ids.int()] if rank.rank == 2 else []
        with pytest.raises(moecomm.Mismatch):
            rank.comm.dispatch_payloads(rank.ids, [rank.x.bfloat16(), rank.weights, *more], MOST)

    on_ranks(body, moe_ep)


def test_what_is_out_of_turn_or_unsupported_is_named(moe_ep: Any) -> None:
    rank = Rank(moecomm.local_ranks(1)[0], moe_ep)
    comm, given = rank.comm, (rank.x, rank.ids, rank.weights)
    with pytest.raises(moecomm.BadInput, match="dispatch"):
        comm.combine(rank.x)
    with pytest.raises(moecomm.BadInput, match="dispatch"):
        comm.get_combine_input_buffer(torch.float32)
    for most in (4, MOST + 1):
        with pytest.raises(moecomm.BadInput, match="max_tokens_per_rank"):
            comm.dispatch(*given, max_tokens_per_rank=most)
    for stats in (torch.zeros(EXPERTS), torch.zeros(EXPERTS + 1).int(), torch.zeros(0).int(), torch.zeros(2, 3).int()):
        with pytest.raises(moecomm.BadInput, match="eplb_local_stats"):
            comm.dispatch(*given, eplb_local_stats=stats)
    with pytest.raises(moecomm.BadInput, match="bytes"):
        comm.dispatch(torch.zeros(5, 4 * HIDDEN + 16, dtype=torch.uint8), *given[1:])
    with pytest.raises(moecomm.BadInput, match="float64"):
        comm.dispatch(rank.x.double(), *given[1:])
    for payloads in ([], [torch.tensor(1.0)], [rank.x[:3]], [rank.x, rank.x[:3]], [rank.x, 3]):
        with pytest.raises(moecomm.BadInput):
            comm.dispatch_payloads(rank.ids, payloads, MOST)
    for at in (None, 1):
        with pytest.raises(moecomm.BadInput, match="expert_id_payload_index"):
            comm.dispatch_payloads(rank.ids, [rank.x], MOST, EXPERTS, at)
    with pytest.raises(moecomm.BadInput):
        comm.dispatch(rank.x, rank.ids + EXPERTS, rank.weights)
    comm.dispatch(rank.x, rank.ids)
    with pytest.raises(moecomm.BadInput, match="second"):
        comm.dispatch(*given)
    comm.destroy()
    with pytest.raises(moecomm.Closed):
        comm.dispatch(*given)


@pytest.mark.parametrize("step", ["dispatch", "combine"])
def test_a_call_that_fails_on_one_rank_ends_the_next_one_on_all(moe_ep: Any, step: str) -> None:
    done = Barrier(RANKS)

    def body(rank: Rank) -> None:
        comm, given = rank.comm, (rank.x, rank.ids, rank.weights)
        assert torch.equal(comm.combine(rank.experts(comm.dispatch(*given))), rank.wanted())
        try:
            if step == "dispatch":
                if rank.rank == 1:
                    with pytest.raises(moecomm.BadInput, match="eplb_local_stats"):
                        comm.dispatch(*given, eplb_local_stats=torch.zeros(EXPERTS))
                with pytest.raises(moecomm.OutOfStep):
                    comm.dispatch(*given)
                return
            got = comm.dispatch(*given)
            if rank.rank == 1:
                with pytest.raises(moecomm.BadInput, match="second"):
                    comm.dispatch(*given)
            with pytest.raises(moecomm.OutOfStep):
                comm.combine(rank.experts(got))
        finally:
            done.wait(30)

    on_ranks(body, moe_ep)


def bits(*ranks: int) -> torch.Tensor:
    return torch.tensor([sum(1 << rank for rank in ranks)], dtype=torch.uint64)


def test_a_mask_comes_with_the_calls(moe_ep: Any) -> None:
    idle = Barrier(RANKS)

    def body(rank: Rank) -> None:
        comm, given = rank.comm, (rank.x, rank.ids, rank.weights)
        idle.wait(30)
        if rank.rank != 2:
            for mask in (bits(0, 1, 3), None):  # None: as before
                got = comm.dispatch(*given, active_rank_mask=mask)
                with pytest.raises(moecomm.BadInput, match="active_rank_mask"):
                    comm.combine(rank.experts(got), active_rank_mask=bits(0, 1, 2, 3))
                out = comm.combine(rank.experts(got), active_rank_mask=mask)
                assert torch.equal(out, rank.wanted((2,))) and comm.query_active_mask().tolist() == [1, 1, 0, 1]
        idle.wait(30)
        everybody = bits(0, 1, 2, 3)
        got = comm.dispatch(*given, active_rank_mask=everybody)
        assert torch.equal(comm.combine(rank.experts(got), active_rank_mask=everybody), rank.wanted())
        assert not comm.query_fault()

    on_ranks(body, moe_ep)


def test_a_mask_that_stays_is_not_looked_up(moe_ep: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """On GPUs a look waits for the device, and a capture can't have it."""
    rank = Rank(moecomm.local_ranks(1)[0], moe_ep)
    given = (rank.x, rank.ids, rank.weights)
    rank.comm.combine(rank.experts(rank.comm.dispatch(*given, active_rank_mask=bits(0))))
    module = sys.modules["moecomm.integrations.flashinfer_masks"]
    monkeypatch.setattr(module, "is_masked", lambda *_: pytest.fail("a look at the device"))
    rank.comm.combine(rank.experts(rank.comm.dispatch(*given, active_rank_mask=bits(0))), active_rank_mask=bits(0))
    rank.comm.destroy()


@pytest.mark.parametrize(
    "mask", [torch.tensor([3]), [3], bits(1), bits(0, 1), torch.tensor([1, 0], dtype=torch.uint64)]
)
def test_a_bad_mask_is_named(moe_ep: Any, mask: Any) -> None:
    rank = Rank(moecomm.local_ranks(1)[0], moe_ep)
    with pytest.raises(moecomm.BadInput, match="mask"):
        rank.comm.dispatch(rank.x, rank.ids, rank.weights, active_rank_mask=mask)
    rank.comm.destroy()


@pytest.mark.parametrize("on_timeout", ["raise", "mask"])
def test_the_fault_tolerance_of_a_fleet(moe_ep: Any, on_timeout: str) -> None:
    """Rank 2 leaves: the others find the fault, agree, and go on; then they, or it, name the mask."""
    idle, left = Barrier(RANKS), Barrier(RANKS - 1)

    def exact_round(rank: Rank, masked: tuple[int, ...]) -> None:
        got = rank.comm.dispatch(rank.x, rank.ids, rank.weights)
        assert torch.equal(rank.comm.combine(rank.experts(got)), rank.wanted(masked))

    def body(rank: Rank) -> None:
        comm = rank.comm
        assert comm.supports_fault_tolerance and not comm.query_fault() and comm.query_active_mask().tolist() == [1] * 4
        epoch = comm.active_mask_epoch
        exact_round(rank, ())
        idle.wait(30)
        if rank.rank == 2:
            comm.destroy()
            return
        if on_timeout == "raise":
            with pytest.raises((moecomm.PeerLost, moecomm.Timeout)):
                exact_round(rank, ())
        else:
            exact_round(rank, (2,))
        left.wait(30)
        assert comm.query_fault()
        assert comm.reconcile_active_mask().tolist() == [1, 1, 0, 1] and comm.active_mask_epoch > epoch
        assert not comm.query_fault()
        exact_round(rank, (2,))
        left.wait(30)
        if rank.rank != 3:
            comm.set_active_mask([1, 1, 0, 0])
            exact_round(rank, (2, 3))
            out = torch.zeros(4, dtype=torch.int32)
            assert comm.query_active_mask(out) is out and out.tolist() == [1, 1, 0, 0]
            assert not comm.query_fault()
        left.wait(30)
        comm.set_active_mask([1, 1, 0, 1])
        exact_round(rank, (2,))
        for wrong in ([0, 0, 0, 0], [1, 1, 1], [1, 1, 2, 1], 5, "1111", torch.tensor(1)):
            with pytest.raises(moecomm.BadInput, match="mask"):
                comm.set_active_mask(wrong)
        with pytest.raises(moecomm.Unsupported, match="timeout_s"):
            comm.reconcile_active_mask(timeout_s=1.0)

    on_ranks(body, moe_ep, on_timeout=on_timeout)


def test_ranks_are_taken_in_again(moe_ep: Any) -> None:
    idle = Barrier(RANKS)

    def body(rank: Rank) -> None:
        comm = rank.comm
        idle.wait(30)
        if rank.rank != 2:
            comm.set_active_mask(torch.tensor([1, 1, 0, 1]))
        idle.wait(30)
        comm.clear_faults(readmit=True)
        got = comm.dispatch(rank.x, rank.ids, rank.weights)
        assert torch.equal(comm.combine(rank.experts(got)), rank.wanted()) and not comm.query_fault()
        comm.clear_faults()

    on_ranks(body, moe_ep)


@pytest.mark.parametrize("has", [True, False], ids=["without its registry", "without moe_ep"])
def test_a_flashinfer_without_the_registry_is_named(moe_ep: Any, monkeypatch: pytest.MonkeyPatch, has: bool) -> None:
    del sys.modules["moecomm.integrations.flashinfer"]
    sys.modules["flashinfer"].__version__ = "0.7.1"  # type: ignore[attr-defined]
    if has:
        monkeypatch.delattr(moe_ep, "register_communication")
    else:
        monkeypatch.delitem(sys.modules, "flashinfer.moe_ep")
    with pytest.raises(moecomm.Unsupported, match=r"flashinfer 0\.7\.1 .* install flashinfer-python 0\.7\.2 or later"):
        importlib.import_module("moecomm.integrations.flashinfer")
