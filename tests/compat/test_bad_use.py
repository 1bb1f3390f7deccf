"""Arguments that can't be used raise moecomm's errors; those not supported raise Unsupported and are in the table."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import moecomm
from moecomm.compat import deep_ep
from moecomm.compat.deep_ep import Buffer, Config, ElasticBuffer, HybridEPBuffer
from moecomm.ranks.rendezvous import Alone

STATS = torch.zeros(1, dtype=torch.int64)
X = torch.zeros(2, 128, dtype=torch.bfloat16)
IDX = torch.tensor([[0, 1], [1, -1]])
PER_EXPERT = torch.zeros(2, dtype=torch.int32)


@pytest.fixture
def buffer() -> Iterator[Buffer]:
    made = Buffer(Alone())
    yield made
    made.destroy()


def low_latency(buffer: Buffer, **more: Any) -> Any:
    return buffer.low_latency_dispatch(X, IDX, 4, 2, **more)


def combine(buffer: Buffer, rows: int = 4, **more: Any) -> Any:
    recv_x, _, handle, *_ = low_latency(buffer, use_fp8=False)
    return buffer.low_latency_combine(recv_x[:, :rows], IDX, torch.ones(2, 2), handle, **more)


def expand_what_was_not(buffer: ElasticBuffer) -> Any:
    *_, handle, _ = buffer.dispatch(X, IDX, num_experts=2, num_max_tokens_per_rank=4)
    return buffer.dispatch(X, handle=handle, do_expand=True)


def weights_beside_a_handle(name: str) -> Any:
    call = getattr(HybridEPBuffer(Alone(), 128, 4, 2), name)
    *_, handle = call(hidden=X, topk_idx=IDX, num_of_experts=2)
    return call(hidden=X, handle=handle, topk_weights=torch.ones(2, 2))


UNSUPPORTED: dict[str, Callable[[Buffer], Any]] = {
    "Buffer(comm=)": lambda b: Buffer(None, comm=object()),
    "Buffer.internode_dispatch": lambda b: b.internode_dispatch(X),
    "internode_combine": lambda b: b.internode_combine(X, None),
    "Buffer.dispatch_pcie": lambda b: b.dispatch_pcie(X),
    "combine_pcie": lambda b: b.combine_pcie(X, None),
    "get_local_buffer_tensor(size=)": lambda b: b.get_local_buffer_tensor(torch.int8, torch.Size([4])),
    "(offset=)": lambda b: b.get_local_buffer_tensor(torch.int8, offset=1),
    "low_latency_dispatch(use_ue8m0_for_sf=True)": lambda b: low_latency(b, use_ue8m0_for_sf=True),
    "low_latency_dispatch(num_sms=)": lambda b: low_latency(b, num_sms=8),
    "low_latency_combine(num_sms=)": lambda b: combine(b, num_sms=3),
    "low_latency_combine(overlap=True)": lambda b: combine(b, overlap=True),
    "(src_signals=)": lambda b: combine(b, src_signals=STATS),
    "(src_signal_expect_value=)": lambda b: combine(b, src_signal_expect_value=1),
    "(packed_recv_count=)": lambda b: combine(b, packed_recv_count=STATS),
    "(comp_signal=)": lambda b: combine(b, comp_signal=STATS),
    "(block_m=)": lambda b: combine(b, block_m=64),
    "(threshold=)": lambda b: combine(b, threshold=1),
    "low_latency_combine(use_logfmt=True)": lambda b: combine(b, use_logfmt=True),
    "ElasticBuffer(num_cpu_bytes=)": lambda b: ElasticBuffer(Alone(), num_cpu_bytes=1 << 21),
    "ElasticBuffer.engram_*": lambda b: ElasticBuffer(Alone()).engram_fetch(IDX),
    "pp_*": lambda b: ElasticBuffer(Alone()).pp_send(X, 0),
    "agrs_*": lambda b: ElasticBuffer.get_agrs_buffer_size_hint(Alone(), 1),
    "all_gather": lambda b: ElasticBuffer(Alone()).all_gather(X),
    "ElasticBuffer.dispatch(handle=)": lambda b: expand_what_was_not(ElasticBuffer(Alone())),
    "EPBuffer.dispatch(borrow_recv=True)": lambda b: deep_ep.EPBuffer(Alone()).dispatch(X, IDX, borrow_recv=True),
    "DispatchRecvView": lambda b: deep_ep.MODULES["buffers.recv_view"].DispatchRecvView(b, X, IDX),
    "EngramBuffer": lambda b: deep_ep.MODULES["buffers.engram"].EngramBuffer(Alone(), 1 << 21, 1 << 21, False, 1, 1),
    "PPBuffer": lambda b: deep_ep.MODULES["buffers.pp"].PPBuffer(Alone(), 1 << 21, 1),
    "BucketBuffer": lambda b: deep_ep.MODULES["buffers.bucket"].BucketBuffer(Alone(), 1 << 21),
    "BucketSession": lambda b: deep_ep.MODULES["buffers.bucket"].BucketSession(b),
    "comm.NCCLCommHandle": lambda b: deep_ep.MODULES["comm"].NCCLCommHandle(0, managed=True),
    "comm.get_nccl_comm_handle": lambda b: deep_ep.MODULES["comm"].get_nccl_comm_handle(Alone()),
    "HybridEPBuffer.dispatch(handle=)": lambda b: weights_beside_a_handle("dispatch"),
    "dispatch_with_permute(handle=)": lambda b: weights_beside_a_handle("dispatch_with_permute"),
}
OTHERWISE = {  # rows of the table that say what is different, tested where the calls are
    "dispatch_wait_recv_cost_stats",
    "combine_wait_recv_cost_stats",
    "handles taken apart, or made by hand",
    "rank_prefix_matrix",
    "recv_topk_idx == -1",
    "recv_topk_weights",
    "do_expand",
    "probs",
    "topk_weights",
    "low_latency_update_mask_buffer",
    "low_latency_clean_mask_buffer",
    "routing_map",
    "ElasticBuffer",
    "lb_prefetch_weights",
    "lb_reduce_grads",
    *("utils.envs", "utils.find_pkgs", "utils.gate", "utils.math", "utils.refs", "utils.semantic", "utils.testing"),
    *("check_nccl_so", "find_cuda_home", "find_nccl_root", "init_jit"),
}


@pytest.mark.parametrize("name", UNSUPPORTED)
def test_what_is_not_supported_says_so(buffer: Buffer, name: str) -> None:
    with pytest.raises(moecomm.Unsupported) as error:
        UNSUPPORTED[name](buffer)
    if name.startswith("("):
        assert name[1:].split("=")[0] in str(error.value)


def test_what_newer_ones_have_may_be_given_as_nothing(buffer: Buffer) -> None:
    low_latency(buffer, use_nvfp4=False, x_global_scale=None, num_sms=0)
    low_latency(buffer, use_nvfp4=False, x_global_scale=torch.ones(1))  # as deep_ep's own test does
    combined, _, _ = combine(buffer, overlap=False, src_signals=None, comp_signal=None, threshold=0, num_sms=None)
    assert combined.shape == X.shape


def table(text: str) -> list[str]:
    rows = re.findall(r"^\| (?!not supported|---)(.*?) \| (.*) \|$", text, re.MULTILINE)
    assert rows
    return [f"{left} | {right}" for left, right in rows]


def test_the_table_says_what_is_not_supported() -> None:
    left = [row.split(" | ")[0] for row in table(deep_ep.__doc__ or "")]
    names = {name for row in left for name in (re.findall(r"`([^`]+)`", row) or [row])}
    assert names == set(UNSUPPORTED) | OTHERWISE


def test_the_page_has_the_table() -> None:
    page = (Path(__file__).parent.parent.parent / "docs" / "deepep.md").read_text()
    section = page.split("## Not supported\n")[1].split("\n## ")[0]
    assert table(section) == table(deep_ep.__doc__ or "")
    (lines,) = re.findall(r"^```diff\n(.*?)^```$", page, re.DOTALL | re.MULTILINE)
    names: dict[str, Any] = {}
    for line in lines.splitlines():
        if line.startswith("+"):
            exec(line[1:], names)
    assert names["Buffer"] is Buffer


def test_a_handle_goes_back_as_it_is(buffer: Buffer) -> None:
    recv_x, *_, handle, _ = buffer.dispatch(X, topk_idx=IDX, num_tokens_per_expert=PER_EXPERT)
    other = Buffer(Alone())
    for wrong in (tuple(handle), None, 3):
        with pytest.raises(moecomm.BadInput, match="handle"):
            buffer.combine(recv_x, wrong)
        with pytest.raises(moecomm.BadInput, match="handle"):
            buffer.low_latency_combine(recv_x, IDX, torch.ones(2, 2), wrong)
    with pytest.raises(moecomm.BadInput, match="another buffer"):
        other.combine(recv_x, handle)
    with pytest.raises(moecomm.BadInput, match="handle"):
        buffer.low_latency_combine(recv_x, IDX, torch.ones(2, 2), handle)
    buffer.destroy()
    buffer.destroy()
    for call in (
        lambda: buffer.combine(recv_x, handle),
        lambda: buffer.dispatch(X, handle=handle),
        lambda: buffer.dispatch(X, topk_idx=IDX, num_tokens_per_expert=PER_EXPERT),
        lambda: low_latency(buffer),
    ):
        with pytest.raises(moecomm.Closed):
            call()


def dispatch(buffer: Buffer, x: Any = X, **more: Any) -> Any:
    return buffer.dispatch(x, **{"topk_idx": IDX, "num_tokens_per_expert": PER_EXPERT, **more})


def biased(buffer: Buffer, bias: Any) -> Any:
    recv_x, *_, handle, _ = dispatch(buffer)
    return buffer.combine(recv_x, handle, bias=bias)


def combined(buffer: Buffer, topk_idx: Any, topk_weights: Any) -> Any:
    recv_x, _, handle, *_ = low_latency(buffer, use_fp8=False)
    return buffer.low_latency_combine(recv_x, topk_idx, topk_weights, handle)


def before_the_hook(buffer: Buffer, call: Callable[[Buffer, Any, Any], Any]) -> Any:
    recv_x, _, handle, *_ = low_latency(buffer, use_fp8=False, return_recv_hook=True)
    return call(buffer, recv_x, handle)


def without_room(buffer: Buffer) -> Any:
    dispatch(buffer)
    for opened in buffer._pool.opened.values():
        buffer._pool.calls.count_failure(buffer._pool.calls.marks(), error := opened.rounds.memory.no_room(1 << 20))
        raise error


def hybrid_combined(name: str, rows: int, **more: Any) -> Any:
    buffer, suffix = HybridEPBuffer(Alone(), 128, 4, 2), name.removeprefix("dispatch")
    recv_x, *_, handle = getattr(buffer, name)(hidden=X, topk_idx=IDX, num_of_experts=2)
    call = buffer.combine_with_unpermute if suffix else buffer.combine
    return call(hidden=recv_x[:rows], handle=handle, **more)


def elastic(_: Buffer, topk_idx: Any = IDX, **more: Any) -> Any:
    return ElasticBuffer(Alone(), num_max_tokens_per_rank=4).dispatch(X, topk_idx, num_experts=2, **more)


def elastic_combined(num_sms: Any, rows: int = 2) -> Any:
    buffer = ElasticBuffer(Alone(), num_max_tokens_per_rank=4)
    recv_x, *_, handle, _ = buffer.dispatch(X, IDX, num_experts=2)
    return buffer.combine(recv_x[:rows], handle, num_sms=num_sms)


def hybrid(**more: Any) -> Any:
    buffer = HybridEPBuffer(Alone(), 128, 4, 2, **more)
    recv_x, *_, handle = buffer.dispatch_with_permute(hidden=X, topk_idx=IDX, num_of_experts=2)
    return buffer.combine_with_unpermute(hidden=recv_x, handle=handle)


BAD: dict[str, Callable[[Buffer], Any]] = {
    "num_experts": lambda b: b.get_dispatch_layout(IDX, 0),
    "topk_idx": lambda b: b.get_dispatch_layout(IDX.float(), 2),
    "num_tokens_per_expert": lambda b: b.dispatch(X, topk_idx=IDX),
    "topk_idx none": lambda b: b.dispatch(X, num_tokens_per_expert=PER_EXPERT),
    "is_token_in_rank": lambda b: b.dispatch(X, num_tokens_per_expert=PER_EXPERT, is_token_in_rank=IDX),
    "expert_alignment": lambda b: b.dispatch(X, num_tokens_per_expert=PER_EXPERT, topk_idx=IDX, expert_alignment=0),
    "scales": lambda b: b.dispatch(X.to(torch.float8_e4m3fn), num_tokens_per_expert=PER_EXPERT, topk_idx=IDX),
    "x": lambda b: b.dispatch(X[0], num_tokens_per_expert=PER_EXPERT, topk_idx=IDX),
    "x device": lambda b: (low_latency(b), b.low_latency_dispatch(X.to("meta"), IDX, 4, 2)),
    "x device of another call": lambda b: (
        b.dispatch(X, num_tokens_per_expert=PER_EXPERT, topk_idx=IDX),
        b.dispatch(X.to("meta"), num_tokens_per_expert=PER_EXPERT, topk_idx=IDX),
    ),
    "x on no device": lambda b: b.dispatch(X.to("meta"), num_tokens_per_expert=PER_EXPERT, topk_idx=IDX),
    "topk_weights": lambda b: b.low_latency_combine(X, IDX, None, low_latency(b, use_fp8=False)[2]),
    "use_ue8m0": lambda b: low_latency(b, use_ue8m0=True),
    "use_nvfp4": lambda b: low_latency(b, use_nvfp4=True, x_global_scale=torch.ones(1)),
    "use_nvfp4 in words": lambda b: low_latency(b, use_fp8=False, use_nvfp4="yes"),
    "x_global_scale": lambda b: low_latency(b, use_fp8=False, use_nvfp4=True),
    "x_global_scale of integers": lambda b: low_latency(
        b, use_fp8=False, use_nvfp4=True, x_global_scale=torch.ones(1).int()
    ),
    "x_global_scale of nothing": lambda b: low_latency(b, use_fp8=False, use_nvfp4=True, x_global_scale=torch.ones(0)),
    "async_finish": lambda b: low_latency(b, async_finish=True, return_recv_hook=True),
    "topk_idx of another length": lambda b: b.low_latency_combine(
        X, IDX[:1], torch.ones(1, 2), low_latency(b, use_fp8=False)[2]
    ),
    "zero_copy": lambda b: combine(b, zero_copy=True),
    "rank_to_mask": lambda b: b.low_latency_update_mask_buffer(7),
    "num_sms": lambda b: Config(-1),
    "num_max_nvl_chunked_send_tokens": lambda b: Config(20, 256, 256),
    "new_num_sms": lambda b: Buffer.set_num_sms(3),
    "previous_event": lambda b: b.dispatch(X, previous_event=3),
    "bias": lambda b: b.combine(X, b.dispatch(X, topk_idx=IDX, num_tokens_per_expert=PER_EXPERT)[4], bias=(X,)),
    "group": lambda b: Buffer(None),
    "bias of another shape": lambda b: biased(b, (X, X[:1])),
    "bias of another dtype": lambda b: biased(b, (X, X.float())),
    "bias on another device": lambda b: biased(b, (X, X.to("meta"))),
    "bias of numbers": lambda b: biased(b, (1, 2)),
    "bias of a number": lambda b: biased(b, (None, 2)),
    "config": lambda b: dispatch(b, config=3),
    "config of a combine": lambda b: b.combine(X, dispatch(b)[4], config=3),
    "x of three": lambda b: dispatch(b, (X, X, X)),
    "x of one": lambda b: dispatch(b, (X,)),
    "x none": lambda b: dispatch(b, None),
    "topk_idx of one dimension": lambda b: dispatch(b, topk_idx=IDX[0]),
    "topk_idx listed": lambda b: dispatch(b, topk_idx=IDX.tolist()),
    "topk_idx listed for a layout": lambda b: b.get_dispatch_layout(IDX.tolist(), 2),
    "num_tokens_per_expert of no dimension": lambda b: dispatch(b, num_tokens_per_expert=torch.tensor(2)),
    "num_tokens_per_expert listed": lambda b: dispatch(b, num_tokens_per_expert=[0, 0]),
    "is_token_in_rank listed": lambda b: b.dispatch(
        X, num_tokens_per_expert=PER_EXPERT, is_token_in_rank=[[True], [True]]
    ),
    "x of no low latency": lambda b: b.low_latency_dispatch(None, IDX, 4, 2),
    "x of another kind": lambda b: b.low_latency_dispatch(X.float().numpy(), IDX, 4, 2),
    "x of one dimension": lambda b: b.low_latency_dispatch(X[0], IDX, 4, 2),
    "topk_idx of no low latency": lambda b: b.low_latency_dispatch(X, None, 4, 2),
    "topk_idx none for a combine": lambda b: combined(b, None, torch.ones(2, 2)),
    "topk_idx of floats": lambda b: combined(b, IDX.float(), torch.ones(2, 2)),
    "topk_weights beside other ids": lambda b: combined(b, IDX.clone(), torch.ones(2, 1)),
    "topk_weights listed": lambda b: combined(b, IDX.clone(), [1.0]),
    "mask_status": lambda b: b.low_latency_query_mask_buffer([0]),
    **{
        f"cumulative_local_expert_recv_stats {call.__name__} {n}": lambda b, call=call, stats=stats: call(
            b, cumulative_local_expert_recv_stats=stats
        )
        for call in (low_latency, elastic)
        for n, stats in enumerate(
            (
                torch.zeros(2),
                torch.zeros(3, dtype=torch.int32),
                torch.zeros(2, dtype=torch.int32, device="meta"),
                torch.zeros(4, dtype=torch.int32)[::2],
                3,
            )
        )
    },
    "num_experts of half": lambda b: b.get_dispatch_layout(IDX, 2.5),
    "num_experts in words": lambda b: b.low_latency_dispatch(X, IDX, 4, "2"),
    "expert_alignment of half": lambda b: dispatch(b, expert_alignment=1.5),
    "expert_alignment in words": lambda b: elastic(b, expert_alignment="4"),
    "num_worst_tokens of half": lambda b: dispatch(b, num_worst_tokens=4.5),
    "num_worst_tokens below none": lambda b: dispatch(b, num_worst_tokens=-4),
    "num_max_dispatch_tokens_per_rank in words": lambda b: b.low_latency_dispatch(X, IDX, "4", 2),
    "num_max_tokens_per_rank in words": lambda b: elastic(b, num_max_tokens_per_rank="4"),
    "num_sms of half": lambda b: Config(1.5),
    "num_sms below none": lambda b: elastic(b, num_sms=-1),
    "num_sms too many": lambda b: elastic(b, num_sms=1025),
    "num_sms below none of a combine": lambda b: elastic_combined(-1),
    "num_sms in words of a combine": lambda b: elastic_combined("4"),
    "num_sms of the hybrid one": lambda b: hybrid(num_sms_dispatch_api=-1),
    "num_sms of its combine": lambda b: hybrid(num_sms_combine_api=1.5),
    "new_num_sms in words": lambda b: Buffer.set_num_sms("4"),
    "topk_idx listed for the elastic one": lambda b: elastic(b, topk_idx=IDX.tolist()),
    # Errors of moecomm's own calls, in the names of these.
    "handle before its hook": lambda b: before_the_hook(
        b, lambda b, y, handle: b.low_latency_combine(y, IDX, torch.ones(2, 2), handle)
    ),
    "handle before its hook, without a copy": lambda b: before_the_hook(
        b, lambda b, _, handle: b.get_next_low_latency_combine_buffer(handle)
    ),
    "handle read before its hook": lambda b: before_the_hook(b, lambda *_: _[2][0]),
    "x with fewer rows": lambda b: combine(b, rows=3),
    "x with fewer rows of a normal combine": lambda b: b.combine(X[:1], dispatch(b)[4]),
    "topk_weights with fewer rows": lambda b: b.combine(X, dispatch(b)[4], topk_weights=torch.ones(1, 2)),
    "x with fewer rows of an elastic combine": lambda b: elastic_combined(0, rows=1),
    "x of more tokens than there is room for": lambda b: (
        dispatch(b, num_worst_tokens=2),
        dispatch(b, X.repeat(99, 1), topk_idx=IDX.repeat(99, 1), num_worst_tokens=2),
    ),
    "num_worst_tokens below what comes": lambda b: dispatch(b, num_worst_tokens=1),
    "num_nvl_bytes for all that is kept": without_room,
    "num_dispatched_tokens below what comes": lambda b: HybridEPBuffer(Alone(), 128, 4, 2).dispatch(
        hidden=X, topk_idx=IDX, num_of_experts=2, num_dispatched_tokens=1
    ),
    "hidden with fewer rows": lambda b: hybrid_combined("dispatch", 1),
    "probs with fewer rows": lambda b: hybrid_combined("dispatch_with_permute", 3, probs=torch.ones(1)),
    "scaling_factor of bfloat16": lambda b: HybridEPBuffer(Alone(), 128, 4, 2).dispatch(
        hidden=X.to(torch.float8_e4m3fn), scaling_factor=X, topk_idx=IDX, num_of_experts=2
    ),
}
# Names of moecomm's calls and arguments that none of these interfaces has.
MOECOMMS = r"dispatch_(begin|end)|max_rows|window_bytes|capacity_factor|max_tokens\b|weight_grads|\by\b"


@pytest.mark.parametrize("name", BAD)
def test_bad_use_names_the_argument(buffer: Buffer, name: str) -> None:
    with pytest.raises(moecomm.BadInput) as error:
        BAD[name](buffer)
    assert error.value.argument.startswith(name.split()[0])
    assert not re.search(MOECOMMS, str(error.value)), error.value


def test_a_config_limits_nothing_on_cpus_and_hints_grow_with_sizes() -> None:
    assert Config(24).get_nvl_buffer_size_hint(14336, 8) > Config(20).get_nvl_buffer_size_hint(14336, 4) > 0
    assert Config(24).get_rdma_buffer_size_hint(14336, 8) == 0
    for ranks in (1, 3, 7, 160):
        assert Buffer.get_dispatch_config(ranks).num_sms == Buffer.get_combine_config(ranks).num_sms == Buffer.num_sms
    hint = Buffer.get_low_latency_rdma_size_hint
    assert hint(128, 7168, 8, 256) > hint(64, 7168, 8, 256) > 64 * 256 * 7168 * 2


def test_a_number_of_sms_can_be_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Buffer, "num_sms", 20)
    monkeypatch.setattr(Buffer, "_num_sms_was_set", False)
    Buffer.set_num_sms(24)
    assert Buffer.num_sms == 24 == Buffer.get_dispatch_config(8).num_sms


def test_torch_defaults_do_not_matter(buffer: Buffer) -> None:
    """deep_ep's own tests set them."""
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device("meta"):
            *layout, _ = buffer.get_dispatch_layout(IDX, 2)
            recv_x, idx, weights, _, handle, _ = buffer.dispatch(
                X,
                topk_idx=IDX,
                topk_weights=torch.ones(2, 2, device="cpu", dtype=torch.float32),
                num_tokens_per_expert=layout[2],
                num_worst_tokens=4,
            )
            assert all(item.device.type == "cpu" for item in (*handle, idx, weights, recv_x) if item is not None)
            recv_x, *_, handle, _ = buffer.dispatch(X, is_token_in_rank=layout[3], num_tokens_per_expert=layout[2])
            buffer.combine(recv_x, handle)
            recv_x, _, handle, *_ = low_latency(buffer, round_scale=True)
            assert recv_x[1].dtype is torch.float32 and recv_x[1].device.type == "cpu"
            y = torch.zeros(handle[1].shape[0], 4, 128, dtype=torch.bfloat16, device="cpu")
            buffer.low_latency_combine(y, IDX, torch.ones(2, 2, device="cpu", dtype=torch.float32), handle)
    finally:
        torch.set_default_dtype(torch.float32)
