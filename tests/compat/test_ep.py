"""EPBuffer by what deep_ep 2.5's own tests/ep check: dispatch and combine in every mode, and redundant experts."""

from __future__ import annotations

import os
from functools import partial
from typing import Any
from unittest.mock import patch

import pytest
import torch

import moecomm
from moecomm.compat import deep_ep
from moecomm.compat.deep_ep import BufferAllocator, EPBuffer, EPHandle
from tests.conftest import Ranks

from ..backends.conftest import all_ranks

TOKENS, HIDDEN = 14, 256  # num_max_tokens_per_rank; the cases have at most 12
MIB = 1 << 20


@pytest.fixture(autouse=True)
def on_cpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """Regions of redundant experts have no tensor to tell the device by."""
    monkeypatch.setenv("MOECOMM_BACKEND", "host")


def test_a_deferred_call_wants_an_event() -> None:
    x, ids = torch.ones(2, 128).bfloat16(), torch.tensor([[0], [1]])

    def body(group: Any) -> None:
        buffer = EPBuffer(group, num_max_tokens_per_rank=2)
        recv_x, _, _, handle, _ = buffer.dispatch(x, ids, num_experts=2)
        with pytest.raises(moecomm.BadInput, match="defer_epilogue"):
            buffer.dispatch(x, handle=handle, defer_epilogue=True)
        with pytest.raises(moecomm.BadInput, match="defer_epilogue"):
            buffer.combine(recv_x, handle, defer_epilogue=True)
        with pytest.raises(moecomm.BadInput, match="do_handle_copy"):
            buffer.dispatch(x, ids, num_experts=2, do_handle_copy=True)

    all_ranks(1, body)


def test_ids_of_a_handle_stay() -> None:
    x, ids = torch.ones(2, 128).bfloat16(), torch.tensor([[0], [1]])

    def body(group: Any) -> None:
        buffer = EPBuffer(group, num_max_tokens_per_rank=2)
        weights = torch.ones(2, 1)
        handle: EPHandle = buffer.dispatch(x, ids, weights, num_experts=2)[3]
        buffer.dispatch(x, handle=handle, topk_weights=weights)
        ids[0, 0] = 1
        for call in (lambda: handle.topk_idx, lambda: buffer.dispatch(x, handle=handle, topk_weights=weights)):
            with pytest.raises(moecomm.BadInput, match=r"topk_idx.*changed"):
                call()

    all_ranks(1, body)


def test_a_plan_is_where_the_region_is() -> None:
    def body(group: Any) -> None:
        plan = BufferAllocator()
        first, second = plan.allocate((3, 5), torch.float32), plan.allocate((7,), torch.bfloat16)
        assert first.is_meta and second.is_meta and plan.num_bytes == 2 * deep_ep.get_num_allocation_alignment()
        buffer = EPBuffer(group, lb_allocation_plan_or_num_bytes=plan, explicitly_destroy=True)
        assert plan.materialized and first.device.type == second.device.type == "cpu"
        assert first.shape == (3, 5) and second.shape == (7,) and second.dtype is torch.bfloat16
        storage = buffer.runtime.lb_storage
        assert storage.dtype is torch.uint8 and storage.numel() == plan.num_bytes == buffer.num_lb_bytes
        assert first.data_ptr() == storage.data_ptr() and second.data_ptr() == storage.data_ptr() + 2 * MIB
        first.fill_(buffer.rank_idx)
        second.fill_(buffer.rank_idx + 1)
        buffer.barrier()
        assert (first == buffer.rank_idx).all() and (second == buffer.rank_idx + 1).all()
        with pytest.raises(moecomm.BadInput, match="plan"):
            plan.allocate((1,), torch.int8)
        with pytest.raises(moecomm.BadInput, match="plan"):
            EPBuffer(group, lb_allocation_plan_or_num_bytes=plan)
        buffer.destroy()
        assert EPBuffer(group, lb_allocation_plan_or_num_bytes=2 * MIB).lb_storage.numel() == 2 * MIB

    all_ranks(2, body)


def mapping_of(ranks: int, slots: int, experts: int, seed: int) -> torch.Tensor:
    """A redundancy mapping that has no expert on its own rank, and some empty slots."""
    g, local = torch.Generator().manual_seed(seed), experts // ranks
    table = torch.randint(0, experts - local, (ranks, slots), generator=g, dtype=torch.int32)
    table += (table >= (torch.arange(ranks) * local).view(-1, 1)).int() * local
    return table.masked_fill(torch.rand(ranks, slots, generator=g) < 0.25, -1)


def blob(key: int, size: int) -> torch.Tensor:
    return ((torch.arange(size) + key) % 251).to(torch.uint8)


@pytest.mark.parametrize("sizes", [(64, 32, 32), (1152, 544, 288), (12320, 12256, 32)])
@pytest.mark.parametrize("seed", range(3))
def test_weights_come_to_redundant_slots(seed: int, sizes: tuple[int, ...]) -> None:
    """Slots without an expert are not written, nor are tensors that were not passed."""
    ranks, slots, local = 2 + seed, 4, 2

    def body(group: Any) -> None:
        plan = BufferAllocator()
        redundant = [plan.allocate((slots, size), torch.uint8) for size in sizes]
        buffer = EPBuffer(group, num_bytes=2 * MIB, lb_allocation_plan_or_num_bytes=plan)
        first = buffer.rank_idx * local
        own = [torch.stack([blob(3 * (first + e) + i, n) for e in range(local)]) for i, n in enumerate(sizes)]
        for turn, passed in enumerate((3, 1)):
            mapping = mapping_of(ranks, slots, ranks * local, seed + turn)
            for tensor in redundant:
                tensor.fill_(0xA5)
            buffer.barrier()
            there: Any = [t.unflatten(1, (-1, 2, 8)) for t in redundant[:passed]] if turn == 0 else redundant[0]
            here: Any = [t.unflatten(1, (-1, 16)) for t in own[:passed]] if turn == 0 else own[0]
            buffer.lb_prefetch_weights(there, here, mapping, previous_event=buffer.capture()).wait()
            for i, (tensor, size) in enumerate(zip(redundant, sizes, strict=True)):
                for row, expert in zip(tensor, mapping[buffer.rank_idx].tolist(), strict=True):
                    written = expert >= 0 and i < passed
                    assert torch.equal(row, blob(3 * expert + i, size) if written else torch.full_like(row, 0xA5))
            buffer.barrier()
        buffer.destroy()

    all_ranks(ranks, body)


@pytest.mark.parametrize("n", [8, 24, 3080])
@pytest.mark.parametrize("seed", range(3))
def test_gradients_of_redundant_slots_are_added(seed: int, n: int) -> None:
    """In the order of ranks and slots, to the bit; slots stay as they are."""
    ranks, slots, local = 2 + seed, 5, 2
    g = torch.Generator().manual_seed(seed)
    there, here = torch.randn(ranks, slots, n, generator=g), torch.randn(ranks, local, n, generator=g)
    mapping = mapping_of(ranks, slots, ranks * local, seed)

    def body(group: Any) -> None:
        plan = BufferAllocator()
        redundant = plan.allocate((slots, n), torch.float32)
        buffer = EPBuffer(group, lb_allocation_plan_or_num_bytes=plan)
        rank = buffer.rank_idx
        redundant.copy_(there[rank])
        grads, want = here[rank].clone(), here[rank].clone()
        buffer.lb_reduce_grads(redundant, grads, mapping).wait()
        for source, row in enumerate(mapping.tolist()):
            for slot, expert in enumerate(row):
                if expert >= 0 and expert // local == rank:
                    want[expert % local] += there[source, slot]
        assert torch.equal(grads, want) and torch.equal(redundant, there[rank])
        buffer.destroy()

    all_ranks(ranks, body)


def test_ranks_agree_on_redundant_experts() -> None:
    def body(group: Any) -> None:
        plan = BufferAllocator()
        redundant, own = plan.allocate((2, 32), torch.uint8), torch.zeros(2, 32, dtype=torch.uint8)
        buffer = EPBuffer(group, lb_allocation_plan_or_num_bytes=plan, num_gpu_timeout_secs=20)
        mapping = torch.tensor([[2, -1], [0, buffer.rank_idx]], dtype=torch.int32)
        with pytest.raises(moecomm.Mismatch, match=r"lb_prefetch_weights.*redundancy_mapping"):
            buffer.lb_prefetch_weights(redundant, own, mapping)
        assert (redundant == 0).all()
        same = torch.tensor([[2, -1], [0, 1]], dtype=torch.int32)
        buffer.lb_prefetch_weights(redundant, own + 1 + buffer.rank_idx, same).wait()
        assert redundant[:, 0].tolist() == ([2, 0] if buffer.rank_idx == 0 else [1, 1])

    all_ranks(2, body)


def test_all_ranks_learn_of_a_bad_mapping() -> None:
    """And stay in step."""
    x, ids = torch.ones(2, 128).bfloat16(), torch.tensor([[0], [1]])

    def body(group: Any) -> None:
        plan = BufferAllocator()
        redundant, own = plan.allocate((1, 32), torch.uint8), torch.ones(1, 32, dtype=torch.uint8)
        buffer = EPBuffer(group, num_max_tokens_per_rank=2, lb_allocation_plan_or_num_bytes=plan)
        buffer.dispatch(x, ids, num_experts=2)
        mapping = torch.tensor([[1], [-1]], dtype=torch.int32)
        with pytest.raises(moecomm.BadInput, match="redundancy_mapping"):
            buffer.lb_prefetch_weights(redundant, own, mapping + 2 * buffer.rank_idx)
        rows, _, _, handle, _ = buffer.dispatch(x, ids, num_experts=2)
        assert torch.equal(buffer.combine(rows, handle)[0], x)
        buffer.lb_prefetch_weights(redundant, own, mapping)
        assert redundant[0, 0] == 1 - buffer.rank_idx

    all_ranks(2, body)


def different_calls(rank: int, group: Any) -> None:
    x, ids = torch.ones(2, 128).bfloat16(), torch.tensor([[0], [1]])
    plan = BufferAllocator()
    redundant, own = plan.allocate((1, 32), torch.uint8), torch.zeros(1, 32, dtype=torch.uint8)
    with patch.dict(os.environ, MOECOMM_BACKEND="host"):
        buffer = EPBuffer(group, num_max_tokens_per_rank=2, lb_allocation_plan_or_num_bytes=plan)
    buffer.dispatch(x, ids, num_experts=2)
    mapping = torch.tensor([[-1], [-1]], dtype=torch.int32)
    exchange = partial(buffer.lb_prefetch_weights, redundant, own, mapping)
    call = partial(buffer.dispatch, x, ids, num_experts=2) if rank == 1 else exchange
    with pytest.raises(moecomm.Mismatch, match=r"EPBuffer\.(dispatch.*lb_prefetch|lb_prefetch.*dispatch)"):
        call()


def test_ranks_that_make_different_calls_are_told(ranks: Ranks) -> None:
    ranks.run(2, different_calls)


def test_regions_have_one_size() -> None:
    def body(group: Any) -> None:
        with pytest.raises(moecomm.Mismatch, match="nbytes"):
            EPBuffer(group, lb_allocation_plan_or_num_bytes=(1 + group.rank) * 2 * MIB)

    all_ranks(2, body)


def test_bad_redundant_experts_are_named() -> None:
    def body(group: Any) -> None:
        plan = BufferAllocator()
        there, grads = plan.allocate((2, 32), torch.uint8), plan.allocate((2, 8), torch.float32)
        own, own_grads = torch.zeros(3, 32, dtype=torch.uint8), torch.zeros(3, 8)
        empty = torch.full((1, 2), -1, dtype=torch.int32)
        buffer = EPBuffer(group, lb_allocation_plan_or_num_bytes=plan)
        weights, reduce = buffer.lb_prefetch_weights, buffer.lb_reduce_grads
        for argument, call in (
            ("expert_weights", lambda: weights([], [], empty)),
            ("expert_weights", lambda: weights([there], [own, own], empty)),
            ("expert_weights", lambda: weights(there, None, empty)),
            ("expert_weights", lambda: weights(there, own[:, ::2], empty)),
            ("expert_weights", lambda: weights(there, own[:, :31].contiguous(), empty)),
            ("redundant_expert_weights", lambda: weights(there.view(4, 16), own, empty)),
            ("redundant_expert_weights", lambda: weights(there[:, :16].contiguous(), own, empty)),
            ("redundant_expert_weights", lambda: weights(there.clone(), own, empty)),
            ("redundancy_mapping", lambda: weights(there, own, empty.long())),
            ("redundancy_mapping", lambda: weights(there, own, empty[0])),
            ("redundancy_mapping", lambda: weights(there, own, empty + 1)),  # expert 0 on its own rank
            ("redundancy_mapping", lambda: weights(there, own, empty + 4)),
            ("redundancy_mapping", lambda: weights(there, own, empty - 1)),
            ("num_sms", lambda: weights(there, own, empty, num_sms=-1)),
            ("expert_grads", lambda: reduce(grads, own_grads.double(), empty)),
            ("redundant_expert_grads", lambda: reduce(grads.bfloat16(), own_grads, empty)),
            ("expert_grads", lambda: reduce(grads, own_grads.view(3, 2, 4), empty)),
            ("lb_allocation_plan_or_num_bytes", lambda: EPBuffer(group).lb_reduce_grads(grads, own_grads, empty)),
            ("lb_allocation_plan_or_num_bytes", lambda: EPBuffer(group, lb_allocation_plan_or_num_bytes=7)),
            ("lb_allocation_plan_or_num_bytes", lambda: EPBuffer(group, lb_allocation_plan_or_num_bytes=-1)),
        ):
            with pytest.raises(moecomm.BadInput, match=argument):
                call()
        buffer.destroy()
        with pytest.raises(moecomm.Closed):
            weights(there, own, empty)

    all_ranks(1, body)


def test_what_a_buffer_says_of_itself(capsys: pytest.CaptureFixture[str]) -> None:
    def body(group: Any) -> None:
        comm = deep_ep.comm
        buffer = EPBuffer(group, num_max_tokens_per_rank=128, hidden=7168, lb_allocation_plan_or_num_bytes=4 * MIB)
        assert isinstance(buffer, deep_ep.BufferBase) and not isinstance(buffer, deep_ep.ElasticBuffer)
        for of in (buffer, group):
            assert comm.get_physical_domain_size(of) == comm.get_logical_domain_size(of) == (1, 2)
            assert deep_ep.get_physical_domain_size(of) == deep_ep.get_logical_domain_size(of) == (1, 2)
        assert buffer.main_context.get_physical_domain_size() == buffer.context.get_logical_domain_size() == (1, 2)
        comm.barrier(buffer, context_idx=0)
        with pytest.raises(moecomm.BadInput, match="context_idx"):
            buffer.barrier(context_idx=1)
        with pytest.raises(moecomm.BadInput, match="buffer"):
            comm.barrier(group)
        with pytest.raises(moecomm.Unsupported, match="stream"):
            comm.get_comm_stream(buffer)
        comm.destroy_all_managed_nccl_comm()
        assert buffer.get_theoretical_num_sms(256, 8) % 2 == buffer.lb_get_theoretical_num_sms() % 2 == 0
        if buffer.rank_idx == 0:
            buffer.print_memory_usage()
        buffer.destroy()
        assert buffer.main_context is None and buffer.runtime is None
        with pytest.raises(moecomm.Closed):
            buffer.print_memory_usage()

    all_ranks(2, body)
    assert "EPBuffer, rank 0 of 2: windows of rounds 0.0 MiB, redundant experts 4.0 MiB" in capsys.readouterr().out
    assert (deep_ep.get_num_rdma_alignment(), deep_ep.get_num_tma_alignment()) == (64, 32)
