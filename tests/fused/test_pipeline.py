"""The steps of a fused layer, without a GPU: row descriptors are enough; kernels that publish and reduce compile."""

from __future__ import annotations

import ctypes
import inspect
import itertools
from typing import Any

import pytest
import torch

from moecomm.fused import kernels as fused_kernels
from moecomm.fused import layer, pipeline, quantize_channels, quantize_weights
from moecomm.fused.experts import apply_experts
from moecomm.fused.kernels import FP8, publish_kernel, reduce_kernel, row_config, row_pitch
from moecomm.fused.plan import layer_plan
from moecomm.fused.weight_format import PLAIN
from moecomm.gpu import loader, plain_kernel
from moecomm.rounds.signature import difference, shown
from moecomm.testing import LocalBuffers, random_layer
from moecomm.testing.prepare import prepare_moe

from ..compiled import check_kernel
from ..few import few

SIZES: list[dict[str, Any]] = [
    {"ranks": 1, "hidden": 32, "intermediate": 16, "num_experts": 4, "topk": 2, "max_tokens": 40},
    {"ranks": 3, "hidden": 72, "intermediate": 40, "num_experts": 12, "topk": 3, "max_tokens": 9},
    {"ranks": 4, "hidden": 64, "intermediate": 24, "num_experts": 16, "topk": 8, "max_tokens": 33},
    {"ranks": 4, "hidden": 64, "intermediate": 24, "num_experts": 14, "topk": 4, "max_tokens": 33},
]


def at(address: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Return the tensor that lies at an address."""
    nbytes = max(1, torch.Size(shape).numel() * dtype.itemsize)
    memory = torch.frombuffer((ctypes.c_ubyte * nbytes).from_address(address), dtype=torch.uint8)
    return memory[: torch.Size(shape).numel() * dtype.itemsize].view(dtype).view(shape)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("sizes", SIZES, ids=lambda s: f"R{s['ranks']}-E{s['num_experts']}-K{s['topk']}")
def test_row_descriptors_are_enough_and_the_bits_are_those_of_dispatch_and_combine(
    sizes: dict[str, Any], dtype: torch.dtype
) -> None:
    """The steps of csrc/fused/publish.cuh, fetch.cuh and reduce.cuh in torch, over windows that all ranks can read."""
    of_buffer = {name: size for name, size in sizes.items() if name != "intermediate"}
    hidden, topk, ranks = sizes["hidden"], sizes["topk"], sizes["ranks"]
    with LocalBuffers(**of_buffer, dtype=dtype, backend="host", timeout_s=20) as buffers:
        for seed in range(30):
            case = random_layer(seed, **sizes, dtype=dtype)
            case.wire = None
            calls = [case.call(rank) for rank in range(ranks)]
            want = buffers.moe(calls)
            peers = [buffer.rounds.session.context.peers[buffer.rank] for buffer in buffers.buffers]
            blocks, dispatches = [], []
            for buffer, call, window in zip(buffers.buffers, calls, peers, strict=True):  # publish.cuh
                tokens = len(call["x"])
                mine = buffer.rounds.memory.allocate(max(1, tokens) * 2 * hidden, max(1, tokens * topk) * 2 * hidden)
                at(window + mine[0].offset, (tokens, hidden), dtype).copy_(call["x"])
                places = torch.arange(tokens * topk, dtype=torch.int32).view(tokens, topk)
                blocks.append(mine)
                routing = {"topk_idx": call["topk_idx"], "topk_weights": places.view(torch.float32)}
                dispatches.append({"x": call["x"], **routing})
            arrived = buffers.dispatch(dispatches)
            for routed, call in zip(arrived, calls, strict=True):
                src, places = routed.src, routed.row_weights.view(torch.int32).long()
                rows = torch.empty(len(src), hidden, dtype=dtype)
                for row, (source, token) in enumerate(src.tolist()):  # fetch.cuh
                    rows[row] = at(peers[source] + blocks[source][0].offset + token * 2 * hidden, (hidden,), dtype)
                counts, how = routed.tokens_per_expert, {"interleaved": call["interleaved"]}
                y = apply_experts(PLAIN, rows, call["w13"], call["w2"], counts, **how)
                for row, (source, token) in enumerate(src.tolist()):
                    assert int(places[row]) // topk == token
                    receive_buffer = peers[source] + blocks[source][1].offset + int(places[row]) * 2 * hidden
                    at(receive_buffer, (hidden,), dtype).copy_(y[row])
            for rank, (routed, call) in enumerate(zip(arrived, calls, strict=True)):  # reduce.cuh
                tokens = len(call["x"])
                landed = at(peers[rank] + blocks[rank][1].offset, (tokens, topk, hidden), dtype)
                owners = at(routed.handle.args.route.token_owner, (tokens, topk), torch.int32)
                got = added_up(landed, owners, call["topk_weights"], call["bias"], ranks)
                assert torch.equal(got.view(torch.int16), want[rank].view(torch.int16)), (seed, rank)


def added_up(
    landed: torch.Tensor, owners: torch.Tensor, weights: torch.Tensor | None, bias: torch.Tensor | None, ranks: int
) -> torch.Tensor:
    """In the order of the ranks and, of each, of k; a rank's part by itself."""
    scale = torch.ones(owners.shape) if weights is None else weights
    total = torch.zeros(landed.shape[0], landed.shape[2])
    for rank in range(ranks):
        part = torch.zeros_like(total)
        for k in range(landed.shape[1]):
            here = (owners[:, k] == rank).unsqueeze(1)
            part = torch.where(here, part + scale[:, k : k + 1] * landed[:, k].float(), part)
        total = torch.where((owners == rank).any(dim=1, keepdim=True), total + part, total)
    if bias is not None:
        total = total + bias.float()
    return total.to(landed.dtype)


def kernels() -> dict[str, plain_kernel.PlainKernel]:
    bf16, fp16 = torch.bfloat16, torch.float16
    found: dict[str, plain_kernel.PlainKernel] = {
        "publish": publish_kernel(bf16, bf16, 7168),
        "publish, cast": publish_kernel(bf16, FP8, 7168),
        "publish, cast, a last group of 48 columns": publish_kernel(fp16, FP8, 176),
        "publish, cast whole rows": publish_kernel(bf16, FP8, 7168, True),
        "publish, cast whole rows to INT8": publish_kernel(fp16, torch.int8, 176, True),
        "reduce": reduce_kernel(bf16, 7168, 8),
        "reduce, many": reduce_kernel(fp16, 8, 32),
        "reduce, in the order of k": reduce_kernel(bf16, 7168, 8, by_k=True),
    }
    return found


KERNELS = kernels()


@pytest.mark.compiled(KERNELS)
@pytest.mark.parametrize("name", few(KERNELS, "publish, cast", "publish, cast whole rows", "reduce"))
def test_compiles_without_spills(name: str) -> None:
    check_kernel(
        KERNELS[name], calls="reduce" in name, awaits="last" if "reduce" in name else "first"
    )  # report_failure


def test_rows_are_as_far_apart_as_kernels_have_them() -> None:
    core = pytest.importorskip("cuda.core", reason="kernels are compiled through cuda-core")
    kernel = plain_kernel.PlainKernel("fused/expert_layer", "sizes", "ExpertLayerArgs", 32)
    checked = "__device__ void sizes(const ExpertLayerArgs&) {}\n"
    for dtype, hidden in itertools.product((torch.float16, FP8), (16, 272, 2880, 7168)):
        for whole in (False, True) if dtype == FP8 else (False,):
            config = row_config(dtype, hidden, whole=whole)
            checked += f"static_assert({config}.pitch() == {row_pitch(dtype, hidden, whole)});\n"
    options = core.ProgramOptions(std="c++20", arch="sm_90a", include_path=[str(loader.headers())])
    source = kernel.source.replace("using namespace moecomm;\n", f"using namespace moecomm;\n{checked}", 1)
    core.Program(source, "c++", options).compile("cubin")


def test_a_pipeline_takes_no_memory_and_launches_nothing_before_it_publishes(monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[str] = []
    monkeypatch.setattr(fused_kernels, "multiprocessors", lambda device: 4)
    monkeypatch.setattr(pipeline, "layer_plan", inspect.unwrap(layer_plan))  # not cached
    monkeypatch.setattr(layer, "_why_unfused", lambda *about: "")
    monkeypatch.setattr(pipeline.Fused, "_launch", lambda self, kernel, *rest: done.append(kernel.header))
    sizes = SIZES[0] | {"ranks": 1}
    case = random_layer(1, **sizes, dtype=torch.bfloat16)
    case.wire = None
    with LocalBuffers(
        **{name: size for name, size in sizes.items() if name != "intermediate"}, backend="host"
    ) as ranks:
        (buffer,) = ranks.buffers
        with monkeypatch.context() as context:
            context.setattr(type(buffer.rounds.memory), "allocate", lambda *about: pytest.fail("memory of the window"))
            context.setattr(type(buffer.rounds.session), "order", lambda self: done.append("order"))
            made = prepare_moe(buffer, **case.call(0), fused=True)
        assert isinstance(made, pipeline.Fused) and done == []
        made.publish()
        assert done == ["fused/publish"]


def test_the_header_says_how_rows_travel(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that ranks whose weights have other formats are told."""
    monkeypatch.setattr(fused_kernels, "multiprocessors", lambda device: 4)
    monkeypatch.setattr(pipeline, "layer_plan", inspect.unwrap(layer_plan))  # not cached
    monkeypatch.setattr(layer, "_why_unfused", lambda *about: "")
    monkeypatch.setattr(pipeline.Fused, "_launch", lambda self, *rest: None)
    sizes: dict[str, Any] = SIZES[0] | {"intermediate": 32}
    call = random_layer(1, **sizes, dtype=torch.bfloat16).call(0) | {"wire": None}
    casts: dict[str | None, Any] = {
        None: lambda w: w,
        "fp8": quantize_weights,
        "fp8_token": quantize_channels,
        "int8_token": lambda w: quantize_channels(w, torch.int8),
    }
    with LocalBuffers(
        **{name: size for name, size in sizes.items() if name != "intermediate"}, backend="host"
    ) as ranks:
        (buffer,) = ranks.buffers
        words = {}
        for name, cast in casts.items():
            made = prepare_moe(buffer, **call | {w: cast(call[w]) for w in ("w13", "w2")}, fused=True)
            made.publish()
            words[name] = made.dispatch_call().prepare(buffer.rounds).args.call
            assert shown(words[name]).get("quantize") == name and shown(words[name])["call"] == "fused moe"
    assert difference(words["fp8_token"], words["int8_token"]) == ("quantize", "fp8_token", "int8_token")
