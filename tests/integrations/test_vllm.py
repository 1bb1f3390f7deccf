"""Prepare and finalize as vLLM calls them, over CPU ranks: what arrives, and what returns, against formulas."""

from __future__ import annotations

import sys
from threading import Barrier
from typing import Any

import pytest
import torch

import moecomm
from moecomm import formats
from tests.integrations import vllm_stub as stub
from tests.integrations.vllm_ranks import EXPERTS, HIDDEN, MOST, TOPK, Rank, everybody, finalized, on_ranks
from tests.little_room import little_room

DELEGATE = stub.TopKWeightAndReduceDelegate


@pytest.mark.parametrize("kind", ["standard", "batched"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_tokens_come_home_weighted_and_added(batches: Any, kind: str, dtype: torch.dtype) -> None:
    def body(rank: Rank) -> bool:
        for _ in range(2):
            prepared = getattr(rank, kind).prepare(**rank.arguments())
            assert prepared[0].dtype is dtype and prepared[1] is None
            found = finalized(rank, kind, prepared)
        # Integers below 2^8, and so exact in all three; sums are rounded once more than once in 16 bits.
        unit = {torch.float32: 0, torch.bfloat16: 2.0**-7, torch.float16: 2.0**-10}[dtype]
        return bool(
            ((found.double() - rank.wanted().double()).abs() <= unit * rank.wanted().double().abs() + unit).all()
        )

    assert on_ranks(body, dtype=dtype) == [True] * 4


def test_standard_rows_are_those_of_each_rank_in_order_with_global_ids(batches: Any) -> None:
    given = everybody()

    def body(rank: Rank) -> None:
        x, scales, meta, ids, weights = rank.standard.prepare(**rank.arguments())
        first, last = rank.rank * rank.local, (rank.rank + 1) * rank.local
        rows = [
            (r, t)
            for r, (_, theirs, _) in enumerate(given)
            for t in range(len(theirs))
            if ((theirs[t] >= first) & (theirs[t] < last)).any()
        ]
        assert torch.equal(x, torch.stack([given[r][0][t] for r, t in rows]))
        assert scales is None and ids.dtype is torch.int64 and weights.dtype is torch.float32
        for row, (r, t) in enumerate(rows):
            for k, expert in enumerate(given[r][1][t].tolist()):
                if first <= expert < last:
                    assert ids[row, k] == expert and weights[row, k] == given[r][2][t, k]
                else:
                    assert 0 <= ids[row, k] < EXPERTS and not first <= ids[row, k] < last and weights[row, k] == 0
        counts = [sum(int((theirs == e).sum()) for _, theirs, _ in given) for e in range(first, last)]
        for tensor, device in ((meta.expert_num_tokens, x.device.type), (meta.expert_num_tokens_cpu, "cpu")):
            assert tensor.tolist() == counts and tensor.dtype is torch.int32 and tensor.device.type == device

    on_ranks(body)


def test_batched_rows_are_those_of_each_expert(batches: Any) -> None:
    given = everybody()

    def body(rank: Rank) -> None:
        x, scales, meta, ids, weights = rank.batched.prepare(**rank.arguments())
        assert scales is ids is weights is None and meta.expert_num_tokens_cpu is None
        assert x.shape == (rank.local, 4 * MOST, HIDDEN) and meta.expert_num_tokens.dtype is torch.int32
        for e in range(rank.local):
            want = [r[0][t] for r in given for t in range(len(r[0])) if (r[1][t] == rank.rank * rank.local + e).any()]
            assert int(meta.expert_num_tokens[e]) == len(want)
            assert torch.equal(x[e, : len(want)], torch.stack(want))

    on_ranks(body)


@pytest.mark.parametrize(
    "test",
    [
        lambda batches: test_tokens_come_home_weighted_and_added(batches, "standard", torch.float32),
        lambda batches: test_standard_rows_are_those_of_each_rank_in_order_with_global_ids(batches),
        lambda batches: test_two_micro_batches_are_on_the_way_at_a_time(batches, "standard"),
        lambda batches: test_standard_rows_in_blocks_of_fp8_travel_with_their_scales(batches),
        lambda batches: test_standard_takes_more_tokens_than_before(batches),
        *(
            lambda batches, name=name: test_standard_rows_that_are_cast_first_are_what_vllm_would_make_of_them_later(
                batches, name
            )
            for name in ("INT8 by token", "NVFP4 in blocks")
        ),
    ],
    ids=["weighted", "rows", "micro-batches", "scales", "more tokens", "INT8", "NVFP4"],
)
def test_standard_rows_that_have_no_room_go_in_several_rounds(batches: Any, test: Any) -> None:
    with little_room() as counted:
        test(batches)
    assert counted


@pytest.mark.parametrize("kind", ["standard", "batched"])
def test_one_expert_a_token_may_be_weighted_before(batches: Any, kind: str) -> None:
    def body(rank: Rank) -> tuple[bool, str]:
        prepared = getattr(rank, kind).prepare(**rank.arguments(apply_router_weight_on_input=True))
        same = torch.equal(finalized(rank, kind, prepared, apply=True), rank.wanted())
        twice = {"topk_weights": rank.weights.repeat(1, 2), "topk_ids": rank.ids.repeat(1, 2)}
        with pytest.raises(moecomm.Unsupported, match="apply_router_weight_on_input"):
            getattr(rank, kind).prepare(**rank.arguments(apply_router_weight_on_input=True, **twice))
        return same

    assert on_ranks(body, topk=1) == [True] * 4


@pytest.mark.parametrize("kind", ["standard", "batched"])
def test_no_tokens_and_no_experts_anywhere(batches: Any, kind: str) -> None:
    def body(rank: Rank) -> None:
        rank.ids = torch.full_like(rank.ids, -1)
        prepared = getattr(rank, kind).prepare(**rank.arguments())
        assert int(prepared[2].expert_num_tokens.sum()) == 0 and (kind == "batched" or prepared[0].shape == (0, HIDDEN))
        assert torch.equal(finalized(rank, kind, prepared), torch.zeros_like(rank.x))
        rank.x, rank.ids, rank.weights = rank.x[:0], rank.ids[:0], rank.weights[:0]
        assert finalized(rank, kind, getattr(rank, kind).prepare(**rank.arguments())).shape == (0, HIDDEN)

    on_ranks(body)


def test_experts_may_write_where_the_result_goes(batches: Any) -> None:
    """As vLLM's kernel lets them, where as many rows arrive as there are tokens."""

    def body(rank: Rank) -> bool:
        g = torch.Generator().manual_seed(rank.rank)
        rank.x = torch.randint(-8, 9, (MOST, HIDDEN), generator=g).float()
        first = (rank.rank + 1) % 4 * rank.local  # each rank's tokens go to one other rank
        rank.ids = torch.tensor([first, first + 1]).repeat(MOST, 1)
        rank.weights = torch.randint(1, 5, (MOST, TOPK), generator=g).float()
        x, _, _, ids, weights = rank.standard.prepare(**rank.arguments())
        out = torch.empty_like(rank.x)
        assert out.shape == x.shape
        out.copy_((rank.standard_experts(x, ids) * weights.unsqueeze(2)).sum(dim=1))
        rank.standard.finalize(out, out, weights, ids, False, stub.TopKWeightAndReduceNoOP())
        return torch.equal(out, rank.wanted())

    assert on_ranks(body) == [True] * 4


@pytest.mark.parametrize("kind", ["standard", "batched"])
@pytest.mark.parametrize("before", [0, 1], ids=["the first call", "a later call"])
def test_a_prepare_that_fails_on_one_rank_ends_the_next_one_on_all(batches: Any, kind: str, before: int) -> None:
    done = Barrier(4)

    def body(rank: Rank) -> None:
        prepare = getattr(rank, kind).prepare
        try:
            for _ in range(before):
                assert torch.equal(finalized(rank, kind, prepare(**rank.arguments())), rank.wanted())
            if rank.rank == 1:
                with pytest.raises(moecomm.Unsupported, match="apply_router_weight_on_input"):
                    prepare(**rank.arguments(apply_router_weight_on_input=True))
            with pytest.raises(moecomm.OutOfStep):
                finalized(rank, kind, prepare(**rank.arguments()))
        finally:
            done.wait(30)

    on_ranks(body)


class Refuses(stub.TopKWeightAndReduce):
    def apply(self, *args: Any, **named: Any) -> Any:
        raise moecomm.Unsupported("such experts")


@pytest.mark.parametrize("kind", ["standard", "batched"])
def test_a_finalize_that_fails_on_one_rank_ends_the_next_one_on_all(batches: Any, kind: str) -> None:
    done = Barrier(4)

    def body(rank: Rank) -> None:
        prepared = getattr(rank, kind).prepare(**rank.arguments())
        try:
            if rank.rank == 2:
                out, y, wrong = torch.empty_like(rank.x), prepared[0], Refuses()
                with pytest.raises(moecomm.Unsupported):
                    getattr(rank, kind).finalize(out, y, rank.weights, rank.ids, False, wrong)
            with pytest.raises(moecomm.OutOfStep):
                finalized(rank, kind, prepared)
        finally:
            done.wait(30)

    on_ranks(body)


def test_standard_takes_more_tokens_than_before(batches: Any) -> None:
    def body(rank: Rank) -> bool:
        same = []
        for times in (1, 40):  # the second Buffer is larger: the least one has room for 128 tokens
            if rank.rank == 2:
                rank.x, rank.ids, rank.weights = (t.repeat(times, 1) for t in (rank.x, rank.ids, rank.weights))
            same.append(
                torch.equal(finalized(rank, "standard", rank.standard.prepare(**rank.arguments())), rank.wanted())
            )
        return all(same)

    assert on_ranks(body) == [True] * 4


@pytest.mark.parametrize("kind", ["standard", "batched"])
def test_two_micro_batches_are_on_the_way_at_a_time(batches: Any, kind: str) -> None:
    """Their halves interleaved, with schedules told; the second one has its tokens in another order."""
    batches.enabled = True

    def body(rank: Rank) -> list[bool]:
        both = getattr(rank, kind)
        given = [(rank.x, rank.ids, rank.weights), (rank.x.flip(0), rank.ids.flip(0), rank.weights.flip(0))]
        prepared, outs, waits = [], [], []
        for number, (x, ids, weights) in enumerate(given):
            with batches.running(number):
                found = both.prepare_async(**rank.arguments(a1=x, topk_ids=ids, topk_weights=weights))
                if kind == "batched":
                    hook, receive = found
                    hook()
                    hook()  # does nothing more
                else:
                    receive = found
                prepared.append(receive())
        for number, (x, ids, weights) in enumerate(given):
            rows, _, meta, found_ids, found_weights = prepared[number]
            outs.append(torch.full_like(x, torch.nan))
            reduce = stub.TopKWeightAndReduceDelegate()
            with batches.running(number):
                if kind == "batched":
                    y = rank.batched_experts(rows, meta.expert_num_tokens)
                    waits.append(both.finalize_async(outs[-1], y, weights, ids, False, reduce)[0])
                else:
                    y = rank.standard_experts(rows, found_ids)
                    waits.append(both.finalize_async(outs[-1], y, found_weights, found_ids, False, reduce))
        for wait in waits:
            wait()
        told = batches.calls
        if kind == "standard":
            assert told[:2] == ["yield_and_switch_from_compute_to_comm", "switch_to_compute_sync"]
            assert told[4:6] == ["yield_and_switch_from_compute_to_comm", "switch_to_compute"]
            assert told[-2:] == ["switch_to_comm", "yield_and_switch_from_comm_to_compute"]
        else:
            assert told == ["maybe_run_recv_hook"] * 2
        return [torch.equal(outs[0], rank.wanted()), torch.equal(outs[1], rank.wanted().flip(0))]

    assert on_ranks(body) == [[True, True]] * 4


def _dequantized(x: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    return (x.float().unflatten(-1, (-1, 128)) * scales.float().unsqueeze(-1)).flatten(-2)


def test_standard_rows_in_blocks_of_fp8_travel_with_their_scales(batches: Any) -> None:
    config = stub.quant_config(quant_dtype=torch.float8_e4m3fn, block_shape=[128, 128])
    given = everybody()

    def body(rank: Rank) -> None:
        x, scales, *_ = rank.standard.prepare(**rank.arguments(quant_config=config))
        assert x.dtype is torch.float8_e4m3fn and scales.shape == (len(x), HIDDEN // 128)
        quantized, want = stub.quantized(torch.cat([r[0] for r in given]), None, torch.float8_e4m3fn, False, [128, 128])
        all_rows = _dequantized(quantized, want)
        for row in _dequantized(x, scales):
            assert (all_rows == row).all(dim=1).any()
        deferred = rank.standard.prepare(**rank.arguments(quant_config=config, defer_input_quant=True))
        assert deferred[0].dtype is torch.float32 and deferred[1] is None

    on_ranks(body)


def test_standard_rows_with_one_scale_are_quantized_where_they_arrive(batches: Any) -> None:
    config = stub.quant_config(quant_dtype=torch.float8_e4m3fn, a1_scale=torch.tensor([0.5]))

    def body(rank: Rank) -> None:
        plain = rank.standard.prepare(**rank.arguments())[0]
        x, scales, *_ = rank.standard.prepare(**rank.arguments(quant_config=config))
        assert torch.equal(x.float() * 0.5, plain) and scales.tolist() == [0.5]

    on_ranks(body)


FACTOR = torch.tensor([3.0])
CAST_FIRST: dict[str, tuple[torch.dtype, dict[str, Any]]] = {  # the dtype in which rows travel
    "FP8 by token": (torch.float8_e4m3fn, {"quant_dtype": torch.float8_e4m3fn, "per_act_token_quant": True}),
    "INT8 by token": (torch.float8_e4m3fn, {"quant_dtype": torch.int8, "per_act_token_quant": True}),  # as bytes
    "INT8 in blocks": (torch.float8_e4m3fn, {"quant_dtype": torch.int8, "block_shape": [128, 128]}),
    "FP8 in blocks": (torch.float8_e4m3fn, {"quant_dtype": torch.float8_e4m3fn, "block_shape": [128, 128]}),
    "FP8 with one scale": (torch.uint8, {"quant_dtype": torch.float8_e4m3fn, "a1_scale": FACTOR}),
    "INT8 with one scale": (torch.uint8, {"quant_dtype": torch.int8, "a1_scale": FACTOR}),
    "MXFP8": (torch.float8_e4m3fn, {"quant_dtype": "mxfp8", "is_scale_swizzled": False}),
    "MXFP8 in blocks": (torch.float8_e4m3fn, {"quant_dtype": "mxfp8"}),
    "NVFP4": (torch.uint8, {"quant_dtype": "nvfp4", "a1_gscale": FACTOR, "is_scale_swizzled": False}),
    "NVFP4 in blocks": (torch.uint8, {"quant_dtype": "nvfp4", "a1_gscale": FACTOR}),
}


def quantized(x: torch.Tensor, config: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """What vLLM's quantizer makes of rows that have arrived."""
    scale = config.a1_gscale if config.quant_dtype == "nvfp4" else config.a1_scale
    how = (config.quant_dtype, config.per_act_token_quant, config.block_shape, config.is_scale_swizzled)
    values, scales = stub.quantized(x, scale, *how)
    assert scales is not None
    return values, scales


def assert_bits(found: torch.Tensor, want: torch.Tensor) -> None:
    assert found.shape == want.shape and found.dtype is want.dtype
    assert torch.equal(found.contiguous().view(torch.uint8), want.contiguous().view(torch.uint8))


@pytest.mark.parametrize("name", CAST_FIRST)
def test_standard_rows_that_are_cast_first_are_what_vllm_would_make_of_them_later(batches: Any, name: str) -> None:
    travels, given = CAST_FIRST[name]
    config = stub.quant_config(**given)

    def body(rank: Rank) -> bool:
        for times in (1, 40):  # the second round has more tokens than the first Buffer takes
            if rank.rank == 2:
                rank.x, rank.ids, rank.weights = (t.repeat(times, 1) for t in (rank.x, rank.ids, rank.weights))
            plain = rank.standard.prepare(**rank.arguments())
            x, scales, *_ = rank.standard.prepare(**rank.arguments(quant_config=config))
            assert rank.standard._slots._sent[0].inputs[0].dtype is travels
            values, want = quantized(plain[0], config)
            assert_bits(x, values)
            assert_bits(scales, want)
            if not torch.equal(finalized(rank, "standard", plain), rank.wanted()):
                return False
        return True

    assert on_ranks(body) == [True] * 4


@pytest.mark.parametrize("name", [name for name in CAST_FIRST if "NVFP4" not in name])
def test_batched_rows_that_are_cast_first_are_what_vllm_would_make_of_them_later(batches: Any, name: str) -> None:
    travels, given = CAST_FIRST[name]
    config = stub.quant_config(**given)

    def body(rank: Rank) -> bool:
        plain = rank.batched.prepare(**rank.arguments())
        x, scales, meta, _, _ = rank.batched.prepare(**rank.arguments(quant_config=config))
        assert rank.batched._slots._sent[0].inputs[0].dtype is travels
        for expert, count in enumerate(meta.expert_num_tokens.tolist()):
            linear = stub.quant_config(**{**given, "is_scale_swizzled": False})
            values, want = quantized(plain[0][expert, :count], linear)
            assert_bits(x[expert, :count], values)
            found = scales[expert]
            if name == "MXFP8 in blocks":
                found = formats.unswizzle(found, x.shape[1], HIDDEN // 32)
            assert_bits(found if "one scale" in name else found[:count], want.view(1, 1) if want.numel() == 1 else want)
        return torch.equal(finalized(rank, "batched", plain), rank.wanted())

    assert on_ranks(body) == [True] * 4


@pytest.mark.parametrize("name", ["FP8 with one scale", "NVFP4", "NVFP4 in blocks"])
def test_scales_that_ranks_have_for_themselves_are_applied_where_rows_arrive(batches: Any, name: str) -> None:
    given = CAST_FIRST[name][1]
    scale = "a1_scale" if "FP8" in name else "a1_gscale"

    def body(rank: Rank) -> None:
        config = stub.quant_config(**{**given, scale: FACTOR + rank.rank})
        plain = rank.standard.prepare(**rank.arguments())[0]
        for _ in range(2):
            x, scales, *_ = rank.standard.prepare(**rank.arguments(quant_config=config))
            assert rank.standard._slots._sent[0].inputs[0].dtype is torch.float32
            values, want = quantized(plain, config)
            assert_bits(x, values)
            assert_bits(scales, want)

    on_ranks(body)


def test_batched_nvfp4_rows_travel_where_vllm_asks_for_it(batches: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    config = stub.quant_config(quant_dtype="nvfp4", a1_gscale=FACTOR.repeat(2))  # one an expert, all alike

    def plain_rows(rank: Rank) -> Any:
        x, scales, *_ = rank.batched.prepare(**rank.arguments(quant_config=config))
        assert scales is None  # experts quantize by themselves
        return x

    plain = on_ranks(plain_rows)
    monkeypatch.setattr(sys.modules["vllm.envs"], "VLLM_DEEPEPLL_NVFP4_DISPATCH", True)

    def body(rank: Rank) -> None:
        x, scales, meta, _, _ = rank.batched.prepare(**rank.arguments(quant_config=config))
        assert x.shape == (rank.local, 4 * MOST, HIDDEN // 2) and x.dtype is torch.uint8
        assert scales.shape == (32, 4, 1, 4, HIDDEN // 64, rank.local)
        stored = scales.permute(5, 2, 4, 0, 1, 3).reshape(rank.local, -1)
        for expert, count in enumerate(meta.expert_num_tokens.tolist()):
            values, want = formats.quantize(plain[rank.rank][expert, :count], "nvfp4", global_scale=FACTOR)
            assert_bits(x[expert, :count], values)
            assert want is not None
            assert_bits(formats.unswizzle(stored[expert], 4 * MOST, HIDDEN // 16)[:count], want)

    on_ranks(body)


@pytest.mark.parametrize("packed", [False, True])
def test_batched_rows_are_cast_on_the_way(batches: Any, packed: bool) -> None:
    def body(rank: Rank) -> bool:
        rank.batched.post_init_setup(type("Experts", (), {"supports_packed_ue8m0_act_scales": lambda self: packed})())
        config = stub.quant_config(quant_dtype=torch.float8_e4m3fn, block_shape=[128, 128])
        x, scales, meta, _, _ = rank.batched.prepare(**rank.arguments(quant_config=config))
        assert x.dtype is torch.float8_e4m3fn and scales.dtype is (torch.int32 if packed else torch.float32)
        assert scales.stride(-2) == 1, "a column is contiguous"
        if packed:
            scales = torch.ldexp(torch.tensor(1.0), (scales & 255) - 127)
        found = finalized(rank, "batched", (_dequantized(x, scales), None, meta, None, None))
        # FP8 has 4 bits: half a unit of the largest value of a row, 8, and then its products.
        return bool(((found - rank.wanted()).abs() <= 0.5 * (rank.weights * (rank.ids + 1)).sum(1, keepdim=True)).all())

    assert on_ranks(body, use_fp8_dispatch=True) == [True] * 4


def test_batched_rows_with_one_scale_are_quantized_where_they_arrive(batches: Any) -> None:
    config = stub.quant_config(quant_dtype=torch.float8_e4m3fn, a1_scale=torch.tensor([0.5]))
    many = stub.quant_config(quant_dtype=torch.float8_e4m3fn, a1_scale=torch.ones(3))

    def body(rank: Rank) -> None:
        plain = rank.batched.prepare(**rank.arguments())
        counts = plain[2].expert_num_tokens.tolist()
        x, scales, *_ = rank.batched.prepare(**rank.arguments(quant_config=config))
        assert scales.shape == (rank.local, 1, 1)
        for e, count in enumerate(counts):
            assert torch.equal(x[e, :count].float() * 0.5, plain[0][e, :count])
        with pytest.raises(moecomm.Unsupported, match="scales"):
            rank.batched.prepare(**rank.arguments(quant_config=many))
        with pytest.raises(moecomm.Unsupported, match="defer_input_quant"):
            rank.batched.prepare(**rank.arguments(defer_input_quant=True))
        with pytest.raises(moecomm.Unsupported, match="add"):
            rank.batched.finalize(rank.x, x, rank.weights, rank.ids, False, stub.TopKWeightAndReduceNoOP())

    on_ranks(body)


def test_experts_that_are_placed_elsewhere_are_found(batches: Any) -> None:
    placed = torch.arange(EXPERTS).flip(0)

    def body(rank: Rank) -> bool:
        x, _, meta, _, _ = rank.batched.prepare(**rank.arguments())
        y = torch.full_like(x, torch.nan)
        for slot, count in enumerate(meta.expert_num_tokens.tolist()):
            expert = EXPERTS - 1 - (rank.rank * rank.local + slot)
            y[slot, :count] = x[slot, :count] * (expert + 1)
        out = torch.empty_like(rank.x)
        rank.batched.finalize(out, y, rank.weights, rank.ids, False, stub.TopKWeightAndReduceDelegate())
        return torch.equal(out, rank.wanted())

    assert on_ranks(body, global_to_physical=placed.to(torch.int32)) == [True] * 4


def test_layers_that_place_experts_alike_share_a_buffer(batches: Any) -> None:
    """The map is the Buffer's placement, so that no pass over ids is needed; a map that is none is named."""
    placed = torch.arange(EXPERTS).roll(3)

    def body(rank: Rank) -> None:
        from moecomm.integrations.vllm.batched import BatchedPrepareAndFinalize

        shared = rank.managers[1].get_handle({})
        layers = [BatchedPrepareAndFinalize(shared, MOST, 4, global_to_physical=placed.clone()) for _ in range(2)]
        for layer in layers:
            layer.prepare(**rank.arguments())
            layer.finalize(rank.x, torch.zeros(2, 4 * MOST, HIDDEN), rank.weights, rank.ids, False, DELEGATE())
        (buffer,) = shared.pool.low_latency()
        assert buffer.placement is not None and buffer.placement.log2phy[:, 0].tolist() == placed.tolist()
        for bad in (torch.zeros(EXPERTS), torch.arange(EXPERTS) + 1):
            with pytest.raises(moecomm.BadInput, match="global_to_physical"):
                BatchedPrepareAndFinalize(shared, MOST, 4, global_to_physical=bad)

    on_ranks(body)


@pytest.mark.parametrize("kind", ["standard", "batched"])
def test_ids_that_eplb_has_rewritten(batches: Any, kind: str) -> None:
    """Its router passes physical ids, of replicas in turns: two of the six experts have two here."""
    logical = torch.tensor([0, 1, 2, 3, 4, 5, 0, 3])  # by physical id
    slots = moecomm.Placement(logical.view(4, 2), choice="token")

    def body(rank: Rank) -> bool:
        named = torch.where(rank.ids < 0, -1, rank.ids % 6)
        rank.ids = slots.slots_of(named, rank.rank)
        x, _, _, ids, weights = getattr(rank, kind).prepare(**rank.arguments())
        out = torch.empty_like(rank.x)
        if kind == "batched":
            held = logical.view(4, 2)[rank.rank]
            y = x * (held + 1)[:, None, None]
            rank.batched.finalize(out, y, rank.weights, rank.ids, False, DELEGATE())
        else:
            mine = ids // rank.local == rank.rank
            y = x.unsqueeze(1) * torch.where(mine, logical[ids] + 1, 0).unsqueeze(2)
            rank.standard.finalize(out, y, weights, ids, False, DELEGATE())
        scale = torch.where(named < 0, 0, named + 1) * rank.weights
        return torch.equal(out, rank.x * scale.sum(dim=1, keepdim=True))

    assert on_ranks(body) == [True] * 4


def test_experts_may_write_reduced_rows_where_peers_read_them(batches: Any) -> None:
    def body(rank: Rank) -> list[bool]:
        x, _, _, ids, weights = rank.standard.prepare(**rank.arguments())
        reduce = stub.TopKWeightAndReduceNoOP()
        assert (
            rank.standard.allocate_fused_expert_output((*x.shape[:1], TOPK, HIDDEN), x.dtype, x.device, reduce) is None
        )
        y = rank.standard.allocate_fused_expert_output(tuple(x.shape), x.dtype, x.device, reduce)
        y.copy_((rank.standard_experts(x, ids) * weights.unsqueeze(2)).sum(dim=1))
        out = torch.empty_like(rank.x)
        rank.standard.finalize(out, y, weights, ids, False, reduce)
        handle = rank.standard._slots.get()
        return [torch.equal(out, rank.wanted()), handle.rounds.session.context.in_heap(y.data_ptr())]

    assert on_ranks(body) == [[True, True]] * 4


def test_finalize_before_prepare_and_closed_managers_are_named(batches: Any) -> None:
    rank = Rank(moecomm.local_ranks(1)[0])
    with pytest.raises(moecomm.BadInput, match="prepare first"):
        finalized(rank, "standard", (rank.x, None, None, rank.ids, rank.weights))
    for manager in rank.managers:
        manager.set_num_sms(10**6)
        assert manager.get_handle({}).num_sms is None and manager.max_sms_used() is None
        for call in ("dispatch", "dispatch_router_logits", "combine"):
            with pytest.raises(moecomm.Unsupported, match=call):
                getattr(manager, call)(rank.x)
        for call in ("query_active_mask", "query_fault", "clean_buffers"):
            with pytest.raises(moecomm.Unsupported, match=call):
                getattr(manager, call)()
        manager.destroy()
        manager.destroy()
    for kind in ("standard", "batched"):
        with pytest.raises(moecomm.Closed):
            getattr(rank, kind).prepare(**rank.arguments())


@pytest.mark.parametrize("kind", ["standard", "batched"])
def test_ranks_with_different_numbers_of_experts(batches: Any, kind: str) -> None:
    """Ten experts on four ranks, of which the first two have one more; ids that ranks return are global ones."""

    def body(rank: Rank) -> bool:
        prepared = getattr(rank, kind).prepare(**rank.arguments())
        if kind == "batched":
            assert len(prepared[0]) == len(prepared[2].expert_num_tokens) == rank.local == (3, 3, 2, 2)[rank.rank]
        return torch.equal(finalized(rank, kind, prepared), rank.wanted())

    assert on_ranks(body, experts=10) == [True] * 4


def test_results_return_unsummed_where_vllm_is_batch_invariant(batches: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The bits of one rank's sums, in the order of k: rows are no integers here."""
    monkeypatch.setattr(sys.modules["vllm.envs"], "VLLM_BATCH_INVARIANT", True)

    def body(rank: Rank) -> bool:
        g = torch.Generator().manual_seed(rank.rank)
        rank.x, rank.weights = torch.randn(rank.x.shape, generator=g), torch.rand(rank.weights.shape, generator=g)
        found = finalized(rank, "batched", rank.batched.prepare(**rank.arguments()))
        assert torch.equal(found, _finalized_in_the_window(rank))
        wanted = torch.zeros_like(rank.x)
        for k in range(rank.ids.shape[1]):
            ids = rank.ids[:, k : k + 1]
            wanted += torch.where(ids < 0, 0.0, rank.weights[:, k : k + 1] * (rank.x * (ids + 1)))
        return torch.equal(found, wanted)

    assert on_ranks(body, topk=6) == [True] * 4


def _finalized_in_the_window(rank: Rank) -> torch.Tensor:
    """Return the results of experts that write where combine reads rows."""
    x, _, meta, _, _ = rank.batched.prepare(**rank.arguments())
    about: Any = (x.dtype, x.device, DELEGATE())
    assert rank.batched.allocate_fused_expert_output((*x.shape[:-1], HIDDEN + 8), *about) is None
    y = rank.batched.allocate_fused_expert_output(tuple(x.shape), *about)
    assert rank.batched._slots.get().rounds.session.context.in_heap(y.data_ptr())
    y.copy_(rank.batched_experts(x, meta.expert_num_tokens))
    out = torch.empty_like(rank.x)
    rank.batched.finalize(out, y, rank.weights, rank.ids, False, DELEGATE())
    return out


def test_batched_rows_that_are_added_up_first_may_lie_anywhere(batches: Any) -> None:
    def body(rank: Rank) -> None:
        x, *_ = prepared = rank.batched.prepare(**rank.arguments())
        assert rank.batched.allocate_fused_expert_output(tuple(x.shape), x.dtype, x.device, DELEGATE()) is None
        assert torch.equal(finalized(rank, "batched", prepared), rank.wanted())

    on_ranks(body)


@pytest.mark.parametrize("first", [0, 1])
def test_a_second_batched_prepare_may_come_before_the_hook_of_the_first(batches: Any, first: int) -> None:
    """Both hooks come after both dispatches, in either order, and may come again."""
    batches.enabled = True

    def body(rank: Rank) -> list[bool]:
        given = [(rank.x, rank.ids, rank.weights), (rank.x.flip(0), rank.ids.flip(0), rank.weights.flip(0))]
        found, same = [], []
        for number, (x, ids, weights) in enumerate(given):
            with batches.running(number):
                found.append(rank.batched.prepare_async(**rank.arguments(a1=x, topk_ids=ids, topk_weights=weights)))
        for number in (first, 1 - first, first):
            found[number][0]()
        for number, (x, ids, weights) in enumerate(given):
            rows, _, meta, _, _ = found[number][1]()
            out = torch.full_like(x, torch.nan)
            with batches.running(number):
                y = rank.batched_experts(rows, meta.expert_num_tokens)
                rank.batched.finalize(out, y, weights, ids, False, stub.TopKWeightAndReduceDelegate())
            same.append(torch.equal(out, rank.wanted().flip(0) if number else rank.wanted()))
        return same

    assert on_ranks(body) == [[True, True]] * 4


def test_memory_is_given_back_while_the_engine_sleeps(batches: Any) -> None:
    """In both formats, after steps of two layers; a second call does nothing."""

    def body(rank: Rank) -> list[bool]:
        same = []
        for _ in range(2):
            for kind in ("standard", "batched"):
                found = finalized(rank, kind, getattr(rank, kind).prepare(**rank.arguments()))
                same.append(torch.equal(found, rank.wanted()))
            for manager in rank.managers:
                manager.checkpoint_prepare()
                manager.checkpoint_prepare()
            with pytest.raises(moecomm.MemoryReleased):
                rank.batched.prepare(**rank.arguments())
            for manager in rank.managers:
                manager.checkpoint_restore()
                manager.checkpoint_restore()
        return same

    assert on_ranks(body) == [[True] * 4] * 4


def test_any_hidden_size_of_16_bytes_does(batches: Any) -> None:
    from moecomm.integrations.vllm.batched import BatchedPrepareAndFinalize
    from moecomm.integrations.vllm.standard import StandardPrepareAndFinalize

    for hidden in (2880, 7168, 8192, 10240):
        assert BatchedPrepareAndFinalize.maybe_roundup_layer_hidden_size(hidden) == hidden
        assert StandardPrepareAndFinalize.maybe_roundup_layer_hidden_size(hidden, torch.bfloat16) == hidden
    assert BatchedPrepareAndFinalize.maybe_roundup_layer_hidden_size(2881) == 2888
    assert StandardPrepareAndFinalize.maybe_roundup_layer_hidden_size(2881, torch.float32) == 2884
