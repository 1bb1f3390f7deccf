"""A layer in two launches, without a GPU: what travels in the place of rows is enough for it; its kernels compile."""

from __future__ import annotations

import ctypes
import itertools
import re
from typing import Any

import pytest
import torch

from moecomm import _native
from moecomm.dispatch.plan import DESCRIPTOR_BYTES
from moecomm.fused import FP8_SCHEDULES, SCHEDULES, layer, two_launches
from moecomm.fused.kernels import FP8
from moecomm.fused.two_launches import LEAST_COUNTED, LayerArgs, early_tiles, row_pitch
from moecomm.jit import loader, plain_kernel
from moecomm.testing import LocalBuffers, random_layer

from ..compiled import check_kernel
from ..few import few

SIZES: list[dict[str, Any]] = [
    {"ranks": 1, "hidden": 32, "intermediate": 16, "num_experts": 4, "topk": 2, "max_tokens": 40},
    {"ranks": 3, "hidden": 72, "intermediate": 40, "num_experts": 12, "topk": 3, "max_tokens": 9},
    {"ranks": 4, "hidden": 64, "intermediate": 24, "num_experts": 16, "topk": 8, "max_tokens": 33},
]


def at(address: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """What lies at an address."""
    nbytes = max(1, torch.Size(shape).numel() * dtype.itemsize)
    memory = torch.frombuffer((ctypes.c_ubyte * nbytes).from_address(address), dtype=torch.uint8)
    return memory[: torch.Size(shape).numel() * dtype.itemsize].view(dtype).view(shape)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("sizes", SIZES, ids=lambda s: f"R{s['ranks']}-K{s['topk']}")
def test_slips_and_places_are_enough_and_the_bits_are_those_of_dispatch_and_combine(
    sizes: dict[str, Any], dtype: torch.dtype
) -> None:
    """The steps of csrc/fused/offer.cuh, fetch.cuh and home.cuh in torch, over windows that all ranks can read."""
    of_buffer = {name: size for name, size in sizes.items() if name != "intermediate"}
    hidden, topk, ranks = sizes["hidden"], sizes["topk"], sizes["ranks"]
    with LocalBuffers(**of_buffer, dtype=dtype, backend="host", timeout_s=20) as buffers:
        for seed in range(30):
            case = random_layer(seed, **sizes, dtype=dtype)
            case.wire = None
            calls = [case.call(rank) for rank in range(ranks)]
            want = buffers.moe(calls)
            peers = [buffer.session.context.peers[buffer.rank] for buffer in buffers.buffers]
            blocks, dispatches = [], []
            for buffer, call, window in zip(buffers.buffers, calls, peers, strict=True):  # offer.cuh
                tokens = len(call["x"])
                mine = buffer.memory.allocate(max(1, tokens) * 2 * hidden, max(1, tokens * topk) * 2 * hidden)
                at(window + mine[0].offset, (tokens, hidden), dtype).copy_(call["x"])
                places = torch.arange(tokens * topk, dtype=torch.int32).view(tokens, topk)
                blocks.append(mine)
                routing = {"topk_idx": call["topk_idx"], "topk_weights": places.view(torch.float32)}
                dispatches.append({"x": call["x"], **routing})
            arrived = buffers.dispatch(dispatches)
            for routed, call in zip(arrived, calls, strict=True):
                src, places = routed.src, routed.row_weights.view(torch.int32).long()
                rows = torch.empty(len(src), hidden, dtype=dtype)
                for row, (home, token) in enumerate(src.tolist()):  # fetch.cuh
                    rows[row] = at(peers[home] + blocks[home][0].offset + token * 2 * hidden, (hidden,), dtype)
                y = layer.apply_experts(
                    rows, call["w13"], call["w2"], routed.tokens_per_expert, interleaved=call["interleaved"]
                )
                for row, (home, token) in enumerate(src.tolist()):
                    assert int(places[row]) // topk == token
                    receive_buffer = peers[home] + blocks[home][1].offset + int(places[row]) * 2 * hidden
                    at(receive_buffer, (hidden,), dtype).copy_(y[row])
            for rank, (routed, call) in enumerate(zip(arrived, calls, strict=True)):  # home.cuh
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


def test_the_structs_are_packed_as_the_kernels_read_them() -> None:
    fused = loader.headers() / "fused"
    body = re.search(r"struct LayerArgs \{(.*?)\n\};", (fused / "layer.cuh").read_text(), re.DOTALL)
    assert body
    found = re.findall(r"(?:i32|u64|i64|Context) ([^;]+);", re.sub(r"//.*", "", body[1]))
    names = [name.strip() for line in found for name in line.split(",")]
    assert names == [name for name, *_ in LayerArgs._fields_]
    kernel = plain_kernel.PlainKernel("fused/two_launches", "sizes", "LayerGemmArgs", 32)
    sizes = (ctypes.sizeof(LayerArgs), ctypes.sizeof(two_launches.LayerGemmArgs))
    checked = (
        f"static_assert(sizeof(LayerArgs) == {sizes[0]} && sizeof(LayerGemmArgs) == {sizes[1]});\n"
        f"static_assert(kLeastCounted == {LEAST_COUNTED} && sizeof(RowDescriptor) == {DESCRIPTOR_BYTES});\n"
        "__device__ void sizes(const LayerGemmArgs&) {}\n"
    )
    for dtype, hidden in itertools.product((torch.float16, FP8), (16, 272, 2880, 7168)):
        config = two_launches.row_config(dtype, hidden)
        checked += f"static_assert({config}.pitch() == {row_pitch(dtype, hidden)});\n"
    core = pytest.importorskip("cuda.core", reason="kernels are compiled through cuda-core")
    options = core.ProgramOptions(std="c++20", arch="sm_90a", include_path=[str(loader.headers())])
    source = kernel.source.replace("using namespace moecomm;\n", f"using namespace moecomm;\n{checked}", 1)
    core.Program(source, "c++", options).compile("cubin")
    assert two_launches.LayerGemmArgs.layer.offset == ctypes.sizeof(two_launches.kernels.GemmArgs)
    assert ctypes.sizeof(LayerArgs) % 8 == 0 and LayerArgs.x.offset == _native.Context().nbytes


def kernels() -> dict[str, plain_kernel.PlainKernel]:
    bf16, fp16 = torch.bfloat16, torch.float16
    found: dict[str, plain_kernel.PlainKernel] = {
        "offer": two_launches.publish_kernel(bf16, bf16, 7168),
        "offer, cast": two_launches.publish_kernel(bf16, FP8, 7168),
        "offer, cast, a last group of 48 columns": two_launches.publish_kernel(fp16, FP8, 176),
        "home": two_launches.reduce_kernel(bf16, 7168, 8),
        "home, many": two_launches.reduce_kernel(fp16, 8, 32),
    }
    for name, schedule in SCHEDULES.items():
        found[f"fetch {name}"] = two_launches.fetch_kernel(bf16, True, schedule, 7168)
        found[f"send {name}"] = two_launches.send_kernel(fp16, schedule)
    for name, schedule in FP8_SCHEDULES.items():
        found[f"fetch FP8 {name}"] = two_launches.fetch_kernel(FP8, True, schedule, 7168)
        found[f"send FP8 {name}"] = two_launches.send_kernel(FP8, schedule, bf16)
    found["fetch, interleaved"] = two_launches.fetch_kernel(fp16, False, SCHEDULES["256x4c2u16"], 2880)
    found["fetch, small"] = two_launches.fetch_kernel(fp16, True, SCHEDULES["64x8c1"], 8)
    found["fetch, large"] = two_launches.fetch_kernel(bf16, True, SCHEDULES["64x8c2"], 16384)
    found["fetch FP8, interleaved"] = two_launches.fetch_kernel(FP8, False, FP8_SCHEDULES["128x4c1"], 2880)
    found["fetch FP8, small"] = two_launches.fetch_kernel(FP8, True, FP8_SCHEDULES["64x5c1"], 16)
    found["fetch FP8, large"] = two_launches.fetch_kernel(FP8, True, FP8_SCHEDULES["128x4c1"], 16384)
    found["send FP8, fp16"] = two_launches.send_kernel(FP8, FP8_SCHEDULES["128x4c1"], fp16)
    return found


KERNELS = kernels()


@pytest.mark.compiled(KERNELS)
@pytest.mark.parametrize("name", few(KERNELS, "offer, cast", "home", "fetch 64x8c1"))
def test_compiles_without_spills(name: str) -> None:
    check_kernel(KERNELS[name], calls="home" in name, awaits="last" if "home" in name else "first")  # report_failure


def test_tiles_are_split_by_what_fetching_takes() -> None:
    many, fp8 = early_tiles(1024, 7168, 2048, 4, 132), early_tiles(1024, 7168, 2048, 4, 132, FP8)
    assert 0.25 < many / 1024 < 0.5
    assert 0.6 < fp8 / many < 0.7  # about half of the bytes, and products a quarter faster
    assert early_tiles(1024, 7168, 2048, 8, 132) > many > early_tiles(1024, 4096, 14336, 4, 132)
    assert early_tiles(16, 7168, 2048, 4, 132) < many  # weights come from memory meanwhile
    assert early_tiles(4096, 2048, 768, 8, 132) == 1024  # links take longer than all products
