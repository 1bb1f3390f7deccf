"""Casts in the kernels of a dispatch on a GPU: the bits of moecomm/base/formats.py."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

import moecomm
from moecomm.backends import lsa
from moecomm.base import formats, packets
from moecomm.testing import Case, LocalBuffers, check_case, random_case

from .test_plain_kernels import check_cast
from .test_virtual_ranks import direct_bytes, of_cases, packet_room

pytestmark = pytest.mark.gpu1
# Of random cases: the first have rows, the second packets of some ranks, the last two rows of several pieces.
SIZES: list[dict[str, Any]] = [
    {"ranks": 2, "hidden": 128, "num_experts": 4, "topk": 2, "max_tokens": 40, "dtype": torch.float16},
    {"ranks": 4, "hidden": 256, "num_experts": 15, "topk": 6, "max_tokens": 50, "dtype": torch.bfloat16},
    {"ranks": 4, "hidden": 384, "num_experts": 8, "topk": 3, "max_tokens": 40, "dtype": torch.float32},
    {"ranks": 2, "hidden": 7168, "num_experts": 16, "topk": 4, "max_tokens": 40, "dtype": torch.bfloat16},
    {"ranks": 4, "hidden": 2688, "num_experts": 8, "topk": 3, "max_tokens": 40, "dtype": torch.bfloat16},
]
SHARE = 50  # of so many random cases, each of these sizes and formats gets one
SIZES[2]["domain_ranks"] = SIZES[4]["domain_ranks"] = 2
NAMES = tuple(name for name, fmt in formats.FORMATS.items() if name != "fp8" and fmt.fits_warps(128))


def group_of(name: str) -> int:
    """Return the columns that share a scale; of a scale of all, any number."""
    group = formats.FORMATS[name].group
    return group if isinstance(group, int) else 16


def each_bf16_in_a_group(name: str, hidden: int, bits: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield rows in which each value is in a group of its own: alone, and beside others."""
    group = group_of(name)
    bits = torch.nn.functional.pad(bits, (0, -len(bits) % (hidden // group))).to(torch.uint16).view(torch.bfloat16)
    for column, others in ((0, [0.0]), (5, [1.7, -0.3]), (10, [1e30, -7e28]), (15, [1e-30, -1e-38, 0.0])):
        x = torch.tensor(others).bfloat16().repeat(group)[:group].repeat(len(bits), 1)
        x[:, column] = bits
        yield x.view(-1, hidden)


def global_scales(name: str, device: str) -> tuple[float | torch.Tensor | None, ...]:
    """Return global scales of the format."""
    if name == "fp8_tensor":
        return 0.37, torch.full((1,), 1e-30, device=device)
    return (None, 1234.5, torch.full((1,), 3e38, device=device)) if name == "nvfp4" else (None,)


def in_use(routed: Any, rows: int) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return the first rows, and their scales."""
    return routed.x[:rows], None if routed.scales is None else routed.scales[:rows]


def of_rows(
    cast: tuple[torch.Tensor, torch.Tensor | None], rows: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return some of the rows, and their scales."""
    values, scales = cast
    return values[rows], None if scales is None else scales[rows]


@pytest.mark.timeout(300)
@pytest.mark.parametrize("tokens", [4096, 64], ids=["rows", "packets"])
@pytest.mark.parametrize("name", NAMES)
def test_every_bf16(name: str, tokens: int) -> None:
    sizes: dict[str, Any] = {"hidden": 2048, "num_experts": 1, "topk": 1, "max_tokens": tokens}
    with moecomm.Buffer("self", **sizes, backend="lsa") as buffer:
        for x in each_bf16_in_a_group(name, 2048, torch.arange(1 << 16)):
            for some in x.split(tokens):
                ids = torch.zeros(len(some), 1, dtype=torch.int64, device="cuda")
                for here, there in zip(global_scales(name, "cpu"), global_scales(name, "cuda"), strict=True):
                    routed = buffer.dispatch(some.cuda(), ids, quantize=name, x_global_scale=there)  # type: ignore[call-overload]
                    buffer.check()
                    assert routed.args.quantize > 1
                    made = in_use(routed, int(routed.num_rows))
                    check_cast(made, formats.quantize(some, name, global_scale=here))


@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("layout", ["flat", "expert"])
def test_graphs_and_repeats(name: str, layout: str) -> None:
    """Rows and a global scale that change between replays; a scale that is a number; rows at any address."""
    sizes: dict[str, Any] = {"hidden": 7168, "num_experts": 4, "topk": 2, "max_tokens": 300}
    g = torch.Generator().manual_seed(0)
    x, scale = torch.randn(300, 7168, generator=g).bfloat16(), None
    ids = torch.rand(300, 4, generator=g).argsort(dim=1)[:, :2].cuda()
    there = x.cuda()
    if formats.FORMATS[name].takes_global:
        scale = torch.full((1,), 3.0, device="cuda")
    with moecomm.Buffer("self", **sizes, backend="lsa") as buffer:
        call: dict[str, Any] = {"quantize": name, "x_global_scale": scale}
        routed = buffer.dispatch(there, ids, layout=layout, **call)  # type: ignore[call-overload]
        buffer.dispatch(there, handle=routed.handle, **call)
        buffer.check()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=torch.cuda.Stream()):
            routed = buffer.dispatch(there, ids, layout=layout, max_rows=600, sync=False, **call)  # type: ignore[call-overload]
            again = buffer.dispatch(there.flip(0), handle=routed.handle, sync=False, **call)
        for factor in (1.0, -0.5):
            there.copy_(x * factor)
            if scale is not None:
                scale.fill_(3.0 * abs(factor))
            graph.replay()
            buffer.check()
            given = None if scale is None else scale.cpu()
            wanted, rows = formats.quantize(x * factor, name, global_scale=given), int(routed.num_rows)
            tokens = routed.src[:rows, 1].cpu().long()
            for made, order in ((routed, tokens), (again, 299 - tokens)):
                check_cast(in_use(made, rows), of_rows(wanted, order))
        if name == "nvfp4":
            shifted = torch.cat((torch.zeros(1), x.flatten())).bfloat16().cuda()[1:].view(300, 7168)
            routed = buffer.dispatch(shifted, ids, layout=layout, quantize="nvfp4", x_global_scale=0.7)  # type: ignore[call-overload]
            tokens = routed.src[:, 1].cpu().long()
            wanted = formats.quantize(x, name, global_scale=0.7)
            check_cast((routed.x, routed.scales), of_rows(wanted, tokens))


@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", NAMES)
def test_verified_rounds(name: str) -> None:
    """The hashes of a pass are those of rows that the kernel casts."""
    sizes: dict[str, Any] = {"ranks": 2, "hidden": 1024, "num_experts": 4, "topk": 2, "max_tokens": 40}
    g = torch.Generator().manual_seed(0)
    with LocalBuffers(**sizes, backend="lsa", device=0, verify_every=1) as ranks:
        for _ in range(2):
            calls = [
                {
                    "x": torch.randn(tokens, 1024, generator=g).bfloat16().cuda(),
                    "topk_idx": torch.rand(tokens, 4, generator=g).argsort(dim=1)[:, :2].cuda(),
                    "quantize": name,
                    "x_global_scale": 2.5 if formats.FORMATS[name].takes_global else None,
                }
                for tokens in (40, 13)
            ]
            routed = ranks.dispatch(calls)
            ranks.check()
            assert all(here.args.quantize > 1 for here in routed)


def cast_case(number: int, sizes: dict[str, Any], name: str) -> Case:
    """Return a random case whose rows are cast on the way."""
    rng = random.Random(f"cast {number}")
    drawn = (
        random_case(seed, **of_cases(sizes), few_kernels=True, payloads=False) for seed in itertools.count(100 * number)
    )
    case = next(case for case in drawn if case.scales is None and case.x[0].dtype is sizes["dtype"])
    layouts: list[Any] = ["row", "row", "column", "swizzled"]
    scales = formats.FORMATS[name].scales
    layout = "row" if scales is None else rng.choice(layouts if scales.itemsize == 1 else layouts[:3])
    return replace(case, quantize=name, scale_format="fp32", scale_layout=layout)  # type: ignore[arg-type]


@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    "sizes", SIZES, ids=lambda s: f"R{s['ranks']}-L{s.get('domain_ranks', s['ranks'])}-H{s['hidden']}"
)
def test_random_cases(
    sizes: dict[str, Any], name: str, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packets, "room", packet_room(sizes))
    monkeypatch.setattr(lsa, "direct_bytes", direct_bytes)
    first, cases = request.config.getoption("--seed") * 1_000_000, request.config.getoption("--gpu-cases") // SHARE
    with LocalBuffers(**sizes, backend="lsa", device=0, timeout_s=20) as ranks:
        for number in range(first, first + cases):
            check_case(ranks, cast_case(number, sizes, name))
