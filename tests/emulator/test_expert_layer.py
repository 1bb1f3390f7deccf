"""A fused layer on CPUs: its kernels, against dispatch, GEMMs and combine, bit for bit."""

from __future__ import annotations

import inspect
import math
import random
from collections.abc import Callable, Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import moecomm
from moecomm import _native
from moecomm.backends.host import HostSession
from moecomm.base.choices import ReplicaChoice
from moecomm.dispatch.reference import quantize
from moecomm.dispatch.routed import Routed
from moecomm.fused import (
    PACKED_SCHEDULES,
    Fp8,
    PackedMxfp4,
    compute,
    gemm,
    kernels,
    layer,
    pack_mxfp4,
    pipeline,
    plan,
    quantize_channels,
    quantize_weights,
    reference,
    schedules,
    tensor_maps,
)
from moecomm.fused.activations import SWIGLU
from moecomm.fused.formats import format_of
from moecomm.fused.kernels import row_pitch
from moecomm.fused.operands import check_operands
from moecomm.fused.schedules import FP8_SCHEDULES, SCHEDULES
from moecomm.gpu.structs import struct
from moecomm.testing import LayerCase, LocalBuffers, random_layer
from moecomm.testing import ranks as local
from moecomm.testing.prepare import prepare_moe
from moecomm.weights.copies import Copies

from ..few import few
from ..fused import test_packed_mxfp4 as packed_cases
from ..fused.test_pipeline import at
from .gemm_machine import encode, run
from .machine import Machine

SIZES: list[dict[str, Any]] = [
    {"ranks": 1, "hidden": 32, "intermediate": 32, "num_experts": 4, "topk": 2, "max_tokens": 40},
    {"ranks": 3, "hidden": 272, "intermediate": 224, "num_experts": 6, "topk": 3, "max_tokens": 90},
    # The first rank has an expert more than the others.
    {"ranks": 2, "hidden": 32, "intermediate": 32, "num_experts": 5, "topk": 2, "max_tokens": 20},
    # Rows that are fetched in several pieces.
    {"ranks": 2, "hidden": 7168, "intermediate": 32, "num_experts": 4, "topk": 2, "max_tokens": 40},
]
CASES = 2


class Emulated:
    """Kernels of a GPU, on CPUs: layers whose rows travel launch there, and the experts of Unfused."""

    def __init__(self, rounds: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
        self._rounds = rounds
        self._monkeypatch, self._random = monkeypatch, random.Random(0)
        for where, name, what in (
            (tensor_maps, "encode", encode),
            (kernels, "multiprocessors", lambda device: 4),
            (compute, "FETCHERS", 2),
            (pipeline, "layer_plan", inspect.unwrap(plan.layer_plan)),  # not cached: it depends on what is patched
            (pipeline, "load", lambda kernel, device: 0),
            (pipeline.Fused, "_launch", lambda layer, *launch: self.launch(*launch)),
            (HostSession, "most_blocks", 4),
            (layer, "_why_unfused", lambda *about: ""),
            (reference, "grouped_gemm", self._grouped_gemm),
        ):
            monkeypatch.setattr(where, name, what)

    def launch(self, kernel: Any, blocks: int, args: Any) -> None:
        run(kernel, args, blocks, self._random.randrange(1 << 30))

    def _grouped_gemm(
        self,
        x: Any,
        w: Any,
        counts: Any,
        *,
        alignment: int,
        activation: Any,
        interleaved: bool,
        out: Any,
        bias: Any = None,
    ) -> None:
        bias = None if bias is None else bias.float()
        if isinstance(w, Fp8) and w.scales.dim() == 3 and activation is not None and not interleaved:
            w = Fp8(w.data, w.scales.unsqueeze(1))  # of one grid of blocks, as layers make them
        used = activation or SWIGLU
        given = check_operands(
            x, w, format_of(w), counts, alignment, used.name if activation else None, interleaved, bias
        )
        product, scales = out if isinstance(out, Fp8) else (out, None)
        dtype, gated = given.x.dtype, activation is not None
        epilogue = kernels.Epilogue(used.kernel, bias is not None, given.by_channel)
        in_blocks = dtype == kernels.FP8 and not given.by_channel
        schedule = FP8_SCHEDULES["64x5c1"] if in_blocks else SCHEDULES["64x8c1"]
        apart = gated and not interleaved
        args = gemm.arguments(given, apart, product.data_ptr(), scales, schedule, alignment, used)
        self.launch(kernels.gemm_kernel(dtype, gated, apart, schedule, product.dtype, epilogue), 2, args)

    def fused(self, ranks: LocalBuffers, calls: list[dict[str, Any]]) -> list[torch.Tensor]:
        ids = [b.rounds.experts.own_ids(call["topk_idx"]) for b, call in zip(ranks.buffers, calls, strict=True)]
        meant = [{**call, "topk_idx": own, "fused": True} for call, own in zip(calls, ids, strict=True)]
        given = [prepare_moe(b, **call) for b, call in zip(ranks.buffers, meant, strict=True)]
        self.run(ranks, given)
        return [mine.finish_reduce() for mine in given]

    def run(self, ranks: LocalBuffers, given: list[pipeline.Pipeline]) -> None:
        """All steps but the last."""
        for mine in given:
            mine.publish()
        for mine, routed in zip(given, self.dispatch(ranks, given), strict=True):
            mine.compute(routed)
        for mine in given:
            mine.prepare_reduce()
            mine.run_reduce()

    def dispatch(self, ranks: LocalBuffers, given: list[pipeline.Pipeline]) -> list[Routed]:
        """Dispatch row descriptors, which only kernels know."""
        with self._monkeypatch.context() as patched:
            patched.setattr(local, "_native", SimpleNamespace(host_run_all=self._rounds.run_all))
            try:
                return ranks.dispatch_layers(given)
            finally:
                self._rounds.forget()

    def check(self, ranks: LocalBuffers, case: LayerCase, cast: Callable[[torch.Tensor], Any] | None = None) -> None:
        """Compare both forms; `cast`: makes weights whose results have no reference here."""
        calls = [case.call(rank) for rank in range(len(ranks.buffers))]
        for call in calls if cast is not None else ():
            assert cast is not None
            call |= {name: cast(call[name]) for name in ("w13", "w2")}
        others = ranks.moe([{**call, "fused": False} for call in calls])
        outs = self.fused(ranks, calls)
        ranks.check()
        for rank, (out, other) in enumerate(zip(outs, others, strict=True)):
            if cast is None:
                case.check(rank, out)
            assert torch.equal(out.view(torch.int16), other.view(torch.int16)), (case.seed, rank)


@pytest.fixture(autouse=True)
def nothing_is_left_of_earlier_layers() -> Iterator[None]:
    """torch.empty gives NaNs."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("sizes", few(SIZES, SIZES[0], SIZES[2]), ids=lambda s: f"R{s['ranks']}-E{s['num_experts']}")
@pytest.mark.parametrize("fp8", [False, True], ids=["bf16", "fp8"])
def test_bits_are_those_of_an_unfused_layer(
    fp8: bool, sizes: dict[str, Any], machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    emulated = Emulated(machine, monkeypatch)
    if fp8 and sizes["ranks"] == 1:  # another schedule than the parts have that come one after the other
        monkeypatch.setattr(schedules, "schedule_of", lambda *shape, **_: FP8_SCHEDULES["128x4c1r"])
    of_buffer = {name: size for name, size in sizes.items() if name != "intermediate"}
    with LocalBuffers(**of_buffer, backend="host", timeout_s=20) as ranks:
        for seed in range(CASES):
            case = random_layer(seed, **sizes, dtype=torch.bfloat16, fp8=fp8)
            for case.wire in (None, "rows"):
                emulated.check(ranks, case)


@pytest.mark.parametrize("choice", ["token", "balanced"])
@pytest.mark.parametrize("published", [True, False], ids=["ids", "rows"])
def test_layers_follow_a_placement(
    published: bool, choice: ReplicaChoice, machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows of replicas and of experts anywhere: the ids that few tokens publish are those of slots."""
    emulated = Emulated(machine, monkeypatch)
    sizes: dict[str, Any] = {"ranks": 2, "hidden": 32, "topk": 2, "max_tokens": 20 if published else 2100}
    held = [[[3, 1, 0], [2, 1, 1]], [[0, 2], [3, 1, 2]]]
    placements = [moecomm.Placement(lists, num_experts=4, choice=choice) for lists in held]
    with LocalBuffers(**sizes, num_experts=4, backend="host", timeout_s=20, placement=placements[0]) as ranks:
        assert _native.takes_weights(ranks.buffers[0].rounds.session.context.shape) == published
        for seed, placement in enumerate(placements):
            ranks.set_placement(placement)
            case = random_layer(
                seed, **{**sizes, "max_tokens": 20}, num_experts=6, intermediate=32, dtype=torch.bfloat16
            )
            case.wire = None
            case.topk_idx = [torch.where(ids < 0, ids, ids % 4) for ids in case.topk_idx]
            calls = [case.call(rank) for rank in range(2)]
            others = ranks.moe([{**call, "fused": False} for call in calls])
            for out, other in zip(emulated.fused(ranks, calls), others, strict=True):
                assert torch.equal(out.view(torch.int16), other.view(torch.int16)), seed
            ranks.check()


@pytest.mark.parametrize("fp8", [False, True], ids=["bf16", "fp8"])
def test_layers_copy_experts(fp8: bool, machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights and their scales, at loads that change, in both forms.

    Rows that travel unsummed have the bits of a layer without copies.
    """
    emulated, copied = Emulated(machine, monkeypatch), 0
    sizes: dict[str, Any] = {"ranks": 3, "hidden": 32, "topk": 2, "max_tokens": 20}
    placement = moecomm.Placement([[3, 1], [0, 2], [4, 5]], slots=4, choice="balanced")
    with LocalBuffers(
        **sizes, num_experts=6, backend="host", timeout_s=20, placement=placement, capacity_factor=3.0
    ) as ranks:
        for seed in range(3):
            case = random_layer(seed, **sizes, num_experts=12, intermediate=32, dtype=torch.bfloat16, fp8=fp8)
            case.wire = None
            case.topk_idx = [torch.where(ids < 0, ids, ids % 2 + 4 * (ids % 7 == 6)) for ids in case.topk_idx]
            calls = [case.call(rank) for rank in range(3)]
            opened = _weights_of_slots(ranks, calls)
            for call in calls:
                call["balance"] = "replicate"
            others = ranks.moe([{**call, "fused": False} for call in calls])
            for out, other in zip(emulated.fused(ranks, calls), others, strict=True):
                assert torch.equal(out.view(torch.int16), other.view(torch.int16)), seed
            copied += sum(int((Copies(b.rounds, [], ()).sources() >= 0).sum()) for b in ranks.buffers)
            unsummed = [{**call, "fused": False, "wire": "rows"} for call in calls]
            plain = ranks.moe([{**call, "balance": None} for call in unsummed])
            for out, other in zip(ranks.moe(unsummed), plain, strict=True):
                assert torch.equal(out.view(torch.int16), other.view(torch.int16)), seed
            ranks.check()
            for weights in opened:
                weights.close()
    assert copied > 0


def _weights_of_slots(ranks: LocalBuffers, calls: list[dict[str, Any]]) -> list[moecomm.ExpertWeights]:
    """Let the weights of calls be tensors of ExpertWeights.  Bytes of empty slots are 255, NaN in any format."""
    first = {(name, nth): part for name in ("w13", "w2") for nth, part in enumerate(_parts(calls[0][name]))}
    shapes = {f"{name} {nth}": tuple(part.shape[1:]) for (name, nth), part in first.items()}
    kinds = {f"{name} {nth}": part.dtype for (name, nth), part in first.items()}
    opened = ranks._together([partial(moecomm.ExpertWeights, b, shapes, dtype=kinds) for b in ranks.buffers])
    for weights, buffer, call in zip(opened, ranks.buffers, calls, strict=True):
        for name in ("w13", "w2"):
            own = [weights[f"{name} {nth}"] for nth in range(len(_parts(call[name])))]
            for to, part in zip(own, _parts(call[name]), strict=True):
                to.view(torch.uint8).fill_(255)
                for slot, expert in enumerate(buffer.local_experts):
                    if expert >= 0:
                        to[slot] = part[slot]
            call[name] = tuple(own) if len(own) > 1 else own[0]
    return opened


def _parts(weights: Any) -> tuple[torch.Tensor, ...]:
    return weights if isinstance(weights, tuple) else (weights,)


@pytest.mark.parametrize("published", few((True, False), True), ids=["ids", "rows"])
def test_layers_of_ranks_without_experts_or_tokens(
    published: bool, machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows come from the first rank alone, and go to the second, which has all experts."""
    emulated = Emulated(machine, monkeypatch)
    sizes: dict[str, Any] = {"ranks": 2, "hidden": 32, "topk": 2, "max_tokens": 20 if published else 2100}
    apart = moecomm.Placement([[], [3, 1, 0, 2]])
    with LocalBuffers(**sizes, num_experts=4, backend="host", timeout_s=20, placement=apart) as ranks:
        case = random_layer(0, **{**sizes, "max_tokens": 20}, num_experts=8, intermediate=32, dtype=torch.bfloat16)
        case.wire = None
        case.topk_idx = [torch.where(ids < 0, ids, ids % 4) for ids in case.topk_idx]
        calls = [case.call(rank) for rank in range(2)]
        for name in ("x", "topk_idx", "topk_weights", "bias"):
            if (given := calls[1].get(name)) is not None and given.ndim > 1:
                calls[1][name] = given[:0]
        others = ranks.moe([{**call, "fused": False} for call in calls])
        assert len(others[0]) == len(calls[0]["x"]) > 0 and len(others[1]) == 0
        for out, other in zip(emulated.fused(ranks, calls), others, strict=True):
            assert torch.equal(out.view(torch.int16), other.view(torch.int16))
        ranks.check()


@pytest.mark.parametrize("sizes", few(SIZES, SIZES[2]), ids=lambda s: f"R{s['ranks']}-E{s['num_experts']}")
@pytest.mark.parametrize("kind", [kernels.FP8, torch.int8])
def test_layers_with_scales_of_channels_have_the_bits_of_unfused_ones(
    kind: torch.dtype, sizes: dict[str, Any], machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    emulated = Emulated(machine, monkeypatch)
    of_buffer = {name: size for name, size in sizes.items() if name != "intermediate"}
    with LocalBuffers(**of_buffer, backend="host", timeout_s=20) as ranks:
        for seed in range(CASES):
            monkeypatch.setattr(compute, "cast_rows_at_once", lambda rows, n=1 + 2 * seed: n)
            case = random_layer(seed, **sizes, dtype=torch.bfloat16, experts=seed % 2 == 1)
            case.wire = None
            emulated.check(ranks, case, partial(quantize_channels, dtype=kind))


# Schedule of the fused layer, sizes, and whether there are biases and other activations.
PACKED: dict[str, tuple[str, dict[str, Any], bool]] = {
    "several ranks": ("64x3c1", SIZES[1] | {"hidden": 288}, True),
    "uneven ranks": ("64x3c1", SIZES[2], True),
    "rows first": ("128x3c1r", SIZES[2] | {"hidden": 160, "intermediate": 96}, True),
    "rows first, several ranks": ("128x3c1r", SIZES[1] | {"hidden": 288}, False),
    "long rows": ("64x3c1", SIZES[3], False),
}


@pytest.mark.parametrize("name", few(PACKED, "uneven ranks", "rows first"))
def test_packed_weights_have_the_bits_of_fp8(name: str, machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    """The unfused layer multiplies the FP8 weights that they stand for."""
    schedule, sizes, experts = PACKED[name]
    emulated, packed, used = Emulated(machine, monkeypatch), PACKED_SCHEDULES[schedule], []
    monkeypatch.setattr(schedules, "packed_as", lambda of: used.append(of) or packed)
    of_buffer = {name: size for name, size in sizes.items() if name != "intermediate"}

    def drawn(w: torch.Tensor) -> PackedMxfp4:
        return pack_mxfp4(packed_cases.weights(int(w.float().sum()) % 1000, tuple(w.shape), 117, 121))

    with LocalBuffers(**of_buffer, backend="host", timeout_s=20) as ranks:
        for seed in range(CASES):
            case = random_layer(seed, **sizes, dtype=torch.bfloat16, experts=experts)
            for case.wire in (None, "rows"):
                emulated.check(ranks, case, drawn)
    assert len(used) == 2 * CASES * sizes["ranks"]


@pytest.mark.parametrize("seed", few(range(8), 0, 1))
@pytest.mark.parametrize("fp8", [False, True], ids=["bf16", "fp8"])
def test_biases_and_activations_have_the_bits_of_an_unfused_layer(
    fp8: bool, seed: int, machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    emulated = Emulated(machine, monkeypatch)
    if fp8 and seed % 2:  # x as operand A, in the fused form alone
        monkeypatch.setattr(schedules, "schedule_of_both", lambda *about: FP8_SCHEDULES["128x4c1r"])
    sizes = SIZES[2] | {"hidden": 144, "intermediate": 96}  # columns of both parts of a block
    of_buffer = {name: size for name, size in sizes.items() if name != "intermediate"}
    with LocalBuffers(**of_buffer, backend="host", timeout_s=20) as ranks:
        case = random_layer(seed, **sizes, dtype=torch.bfloat16, fp8=fp8, experts=True)
        case.wire = None
        emulated.check(ranks, case)


@pytest.mark.long
@pytest.mark.parametrize("fp8", [False, True], ids=["bf16", "fp8"])
def test_layers_without_a_masked_rank(fp8: bool, machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stand-in takes the masked rank's first expert; tokens for its others are as if they had never been."""
    emulated = Emulated(machine, monkeypatch)
    sizes = {"ranks": 3, "hidden": 32, "intermediate": 32, "num_experts": 6, "topk": 3, "max_tokens": 8}
    of_buffer = {name: size for name, size in sizes.items() if name != "intermediate"}
    case = random_layer(0, **sizes, dtype=torch.bfloat16, fp8=fp8)
    case.wire = None
    with LocalBuffers(**of_buffer, backend="host", timeout_s=20) as ranks:
        ranks.mask([1], replicas={2: 5})
        calls = [case.call(buffer.rank) for buffer in ranks.buffers]
        outs = emulated.fused(ranks, calls)
        others = ranks.moe([{**call, "fused": False} for call in calls])
        ranks.check()
    meant = torch.tensor([0, 1, 5, -1, 4, 5, -1])  # the last is that of an id of -1
    with LocalBuffers(**of_buffer, backend="host", timeout_s=20) as ranks:
        for rank, ids in enumerate(case.topk_idx):
            case.topk_idx[rank] = meant[ids].to(ids.dtype) if rank != 1 else torch.full_like(ids, -1)
        wanted = ranks.moe([{**case.call(rank), "fused": False} for rank in range(3)])
    for out, other, want in zip(outs, others, (wanted[0], wanted[2]), strict=True):
        assert torch.equal(out, other) and torch.equal(out, want)


@pytest.mark.parametrize("fp8", few([False, True], False), ids=lambda fp8: "fp8" if fp8 else "bf16")
def test_layers_whose_rows_have_no_room(fp8: bool, machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both forms drop alike; and tokens in parts, fused, have the bits of one launch with room for all."""
    emulated = Emulated(machine, monkeypatch)
    sizes = {"ranks": 2, "hidden": 32, "intermediate": 32, "num_experts": 4, "topk": 2, "max_tokens": 40}
    of_buffer = {name: size for name, size in sizes.items() if name != "intermediate"}
    case = random_layer(0, **sizes, dtype=torch.bfloat16, fp8=fp8)
    for rank in range(2):
        g = torch.Generator().manual_seed(rank)
        case.x[rank] = torch.randn(40, 32, generator=g).bfloat16()
        case.topk_idx[rank] = torch.tensor([0, 1]).repeat(40, 1)
        case.topk_weights[rank], case.bias[rank] = torch.rand(40, 2, generator=g), None
    case.wire = None
    calls = [case.call(rank) for rank in range(2)]
    with LocalBuffers(**of_buffer, backend="host", timeout_s=20, capacity_factor=math.inf) as ranks:
        whole = emulated.fused(ranks, calls)
        ranks.check()
    with LocalBuffers(**of_buffer, backend="host", timeout_s=20, capacity_factor=1.0) as ranks:
        counts = [torch.zeros(1, dtype=torch.int32) for _ in range(4)]
        with pytest.raises(moecomm.TooManyRows):
            emulated.fused(ranks, calls)
        for buffer in ranks.buffers[1:]:  # the first has raised its own
            with pytest.raises(moecomm.TooManyRows):
                buffer.check()

        def dropping(some: list[torch.Tensor]) -> list[dict[str, Any]]:
            return [{**call, "overflow": "drop", "dropped": n} for call, n in zip(calls, some, strict=True)]

        outs = emulated.fused(ranks, dropping(counts[:2]))
        others = ranks.moe([{**call, "fused": False} for call in dropping(counts[2:])])
        assert [int(n) for n in counts] == 4 * [40]  # of 80 entries
        assert all(torch.equal(out, other) for out, other in zip(outs, others, strict=True))
        parts = []
        for part in (slice(0, 20), slice(20, 40)):
            by_token = ("x", "topk_idx", "topk_weights")
            some = [{**call, **{name: call[name][part] for name in by_token}} for call in calls]
            parts.append(emulated.fused(ranks, [{**call, "first_token": part.start} for call in some]))
        ranks.check()
    for rank, out in enumerate(whole):
        case.check(rank, out)
        assert torch.equal(torch.cat([part[rank] for part in parts]), out)


@pytest.mark.long
def test_rows_that_are_here_already_are_copied_from_here(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every token has several experts on a rank.  No ids are published, so row descriptors name the token's first row
    (descriptors.cuh).
    """
    emulated = Emulated(machine, monkeypatch)
    sizes = {"ranks": 2, "hidden": 1024, "intermediate": 32, "num_experts": 8, "topk": 6, "max_tokens": 60}
    of_buffer = {name: size for name, size in sizes.items() if name != "intermediate"} | {"max_tokens": 700}
    assert of_buffer["max_tokens"] * of_buffer["topk"] > 4096
    with LocalBuffers(**of_buffer, backend="host", timeout_s=20) as ranks:
        for seed, fp8 in ((0, False), (5, True)):
            case = random_layer(seed, **sizes, dtype=torch.bfloat16, fp8=fp8)
            for rank, ids in enumerate(case.topk_idx):
                g = torch.Generator().manual_seed(seed + rank)
                case.topk_idx[rank] = torch.rand(len(ids), 8, generator=g).argsort(dim=1)[:, :6].to(ids.dtype)
            case.wire = None
            emulated.check(ranks, case)


@pytest.mark.long
def test_the_last_columns_of_a_cluster_may_be_those_of_one_block(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Check both products.  Both blocks take the same tiles all the same."""
    emulated = Emulated(machine, monkeypatch)
    monkeypatch.setattr(schedules, "schedule_of_both", lambda *about: FP8_SCHEDULES["64x5c2"])
    sizes = {"ranks": 2, "hidden": 528, "intermediate": 96, "num_experts": 4, "topk": 2, "max_tokens": 50}
    of_buffer = {name: size for name, size in sizes.items() if name != "intermediate"}
    with LocalBuffers(**of_buffer, backend="host", timeout_s=20) as ranks:
        case = random_layer(1, **sizes, dtype=torch.bfloat16, fp8=True)
        case.wire = None
        emulated.check(ranks, case)


@pytest.mark.parametrize("kind", [None, kernels.FP8], ids=["bf16", "scales of channels"])
@pytest.mark.parametrize(
    "why", few(("they do not come", "there are fewer than counted"), "there are fewer than counted")
)
def test_rows_that_are_not_there_end_a_launch_and_nothing_is_made_of_it(
    why: str, kind: torch.dtype | None, machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first rank lacks some blocks that should fetch; or some rows, of the last tile, which one block notices and
    another may send.  Where such a row goes has not been written, either.
    """
    emulated = Emulated(machine, monkeypatch)
    sizes = {"ranks": 2, "hidden": 32, "intermediate": 32, "num_experts": 8, "topk": 4, "max_tokens": 50}
    of_buffer = {name: size for name, size in sizes.items() if name != "intermediate"}
    case = random_layer(0, **sizes, dtype=torch.bfloat16)
    for rank in range(2):
        case.x[rank] = torch.ones(50, 32).bfloat16()
        case.topk_idx[rank] = torch.arange(200).view(50, 4) % 8
        case.topk_weights[rank], case.bias[rank] = None, None
    case.wire, launch, launched = None, emulated.launch, 0

    def without_some(kernel: Any, blocks: int, args: Any) -> None:
        nonlocal launched
        if isinstance(args, struct("ExpertLayerArgs")):
            launched += 1
            if launched == 1 and why == "they do not come":
                args.fetchers = args.together = 0
                args.layer.ctx[list(args.layer.ctx).index(20_000_000_000)] = 1_000_000
            elif launched == 1:
                args.layer.max_rows = 128
        launch(kernel, blocks, args)

    monkeypatch.setattr(emulated, "launch", without_some)
    for _ in range(2):
        launched = 0
        with LocalBuffers(**of_buffer, backend="host", timeout_s=20) as ranks:
            calls = [case.call(rank) for rank in range(2)]
            for call in calls if kind is not None else ():
                call |= {name: quantize_channels(call[name], kind) for name in ("w13", "w2")}
            given = [prepare_moe(buffer, **calls[rank], fused=True) for rank, buffer in enumerate(ranks.buffers)]
            emulated.run(ranks, given)
            for mine, buffer in zip(given, ranks.buffers, strict=True):
                assert bool(mine.finish_reduce().isnan().all())
                with pytest.raises(moecomm.Timeout):
                    buffer.check()


@pytest.mark.long
def test_scales_of_rows_that_are_not_there_yet_are_not_looked_at(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rows of the second expert end short of those of a counter, and its tile, in whole units, behind them.  One
    block multiplies, so that it has them all; in the emulator what it has looked at too early stays as it was.
    """
    emulated = Emulated(machine, monkeypatch)
    monkeypatch.setattr(kernels, "multiprocessors", lambda device: 3)
    counts = torch.tensor([5, 120, 150, 3])
    assert counts[:2].sum() < 4 * kernels.LEAST_COUNTED < 5 + 128
    sizes = SIZES[0] | {"topk": 1, "max_tokens": int(counts.sum())}
    case = random_layer(0, **sizes, dtype=torch.bfloat16, fp8=True)
    g = torch.Generator().manual_seed(0)
    case.x[0] = torch.randn(sizes["max_tokens"], sizes["hidden"], generator=g).bfloat16()
    case.topk_idx[0] = torch.arange(4).repeat_interleave(counts)[:, None]
    case.topk_weights, case.bias, case.wire = [None], [None], None
    del sizes["intermediate"]
    with LocalBuffers(**sizes, backend="host", timeout_s=20) as ranks:
        for _ in range(4):
            emulated.check(ranks, case)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_rows_are_published_as_a_dispatch_casts_them(
    dtype: torch.dtype, machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows of several pieces, whose last group of columns is not full, with gaps between them."""
    emulated, done = Emulated(machine, monkeypatch), []
    monkeypatch.setattr(emulated, "launch", lambda *given, run=emulated.launch: (done.append("publish"), run(*given)))
    monkeypatch.setattr(HostSession, "order", lambda session: done.append("order"))  # of streams, on GPUs
    tokens, hidden, g = 37, 4240, torch.Generator().manual_seed(0)
    wide = torch.randn(tokens, hidden + 8, generator=g) * torch.exp2(torch.randint(-20, 5, (tokens, 1), generator=g))
    x = wide.to(dtype)[:, :hidden]
    shapes = {"w13": (2, 64, hidden), "w2": (2, hidden, 32)}
    weights: dict[str, Any] = {name: quantize_weights(torch.ones(shape)) for name, shape in shapes.items()}
    routing: dict[str, Any] = {"topk_idx": torch.zeros(tokens, 1, dtype=torch.int64), "topk_weights": None}
    sizes: dict[str, Any] = {"hidden": hidden, "num_experts": 2, "topk": 1, "max_tokens": tokens, "dtype": dtype}
    with LocalBuffers(1, **sizes, backend="host", timeout_s=20) as ranks:
        (buffer,) = ranks.buffers
        given = prepare_moe(buffer, x=x, **routing, **weights, fused=True)
        assert isinstance(given, pipeline.Fused) and done == []
        given.publish()
        assert done == ["order", "publish"]
        pitch = row_pitch(kernels.FP8, hidden)
        descriptors = given.dispatch_call().others["descriptors"]
        assert descriptors.pitch == pitch
        published = at(buffer.rounds.session.context.peers[0] + descriptors.rows, (tokens, pitch), torch.uint8)
        data, scales = quantize(x)
        assert torch.equal(published[:, :hidden], data.view(torch.uint8))
        found = published[:, hidden : hidden + 4 * scales.shape[1]].view(torch.float32)
        assert torch.equal(found, scales)
