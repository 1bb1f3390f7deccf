"""Limits of a Buffer: each is a named error when it opens, and stands in docs/limits.md with the number of the code."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any

import pytest
import torch

import moecomm
from moecomm import _native, backends
from moecomm.base import protocol
from moecomm.base.validation import check_alignment
from moecomm.buffer import elastic
from moecomm.compat.deep_ep.arguments import check_experts
from moecomm.fused import grouped_gemm, kernels, quantize_weights, weight_format
from moecomm.fused.kernels import unfit
from moecomm.gpu import limits
from moecomm.gpu.jit import KernelSpec, block_fields, packets_of
from moecomm.ranks.settings import Settings
from moecomm.window.settings import MAX_SIGNALS, WindowSettings

BF16 = int(_native.Type.bf16)
GPUS: dict[str, Any] = {
    "ranks": 8,
    "hidden": 7168,
    "num_experts": 256,
    "topk": 8,
    "max_tokens": 128,
    "dtype": torch.bfloat16,
    "backend": "lsa",
    "window_bytes": None,
}
MANY = {"topk": 32, "hidden": 16384}
# Multiples of sizes of experts, in the order of the table; tests below try each.
OF_EXPERTS = (8, 16, 32, 16, 16, 32, 32, 16, 8)
GEMM_ROWS, WINDOW_BYTES = 1 << 30, 1 << 46
# By argument: sizes that open, and sizes that do not.
BOUNDS: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("group", {"ranks": 64, "num_experts": 64}, {"ranks": 65, "num_experts": 65}),
    ("group", {"backend": "host", "ranks": 256}, {"backend": "host", "ranks": 257, "num_experts": 257}),
    ("topk", {"topk": 32}, {"topk": 33}),
    ("max_tokens", {"max_tokens": 8388607 // 8}, {"max_tokens": 8388607 // 8 + 1}),
    ("hidden", {"hidden": 7176}, {"hidden": 7170}),
    ("hidden", {"backend": "host", "hidden": 2147483647 // 4 // 8 * 8 - 8}, {"backend": "host", "hidden": 1 << 29}),
    ("num_experts", {"num_experts": 3304}, {"num_experts": 3312}),
    ("num_experts", {**MANY, "ranks": 64, "num_experts": 1152}, {**MANY, "ranks": 64, "num_experts": 1216}),
    ("num_experts", {"backend": "host", "num_experts": 2147483640}, {"backend": "host", "num_experts": 2147483648}),
]


def check(settings: Settings) -> None:
    """Check sizes as a Buffer that opens does."""
    settings.check()
    if settings.backend != "host":
        limits.check(settings)


@pytest.mark.parametrize(("argument", "good", "bad"), BOUNDS, ids=[name for name, _, _ in BOUNDS])
def test_a_limit_is_bad_input_when_a_buffer_opens(argument: str, good: dict[str, Any], bad: dict[str, Any]) -> None:
    check(Settings(**{**GPUS, **good}))
    with pytest.raises(moecomm.BadInput) as caught:
        check(Settings(**{**GPUS, **bad}))
    assert caught.value.argument == argument


@pytest.mark.parametrize(("argument", "size"), [("num_experts", 1 << 30), ("hidden", 1 << 28), ("max_tokens", 8388607)])
def test_a_window_larger_than_all_memory_is_bad_input(
    argument: str, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before any of it is taken."""
    if argument == "max_tokens":  # large machines have that much
        monkeypatch.setattr(elastic, "memory_bytes", lambda: 64 << 20)
    sizes = {"hidden": 64, "num_experts": 4, "topk": 32, "max_tokens": 8}
    monkeypatch.setattr(backends, "open_session", lambda *_: pytest.fail("memory is taken"))
    with pytest.raises(moecomm.BadInput, match=f"{size}; want sizes whose window fits") as caught:
        moecomm.Buffer("self", **{**sizes, argument: size}, device="cpu")
    assert caught.value.argument == argument


def test_an_asked_window_larger_than_all_memory_is_bad_input() -> None:
    with pytest.raises(moecomm.BadInput, match="window_bytes: got"):
        moecomm.Buffer("self", hidden=64, num_experts=4, topk=1, max_tokens=8, device="cpu", window_bytes=1 << 50)


def test_a_domain_of_more_ranks_than_a_warp_has_lanes_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Half of 64 ranks is the most that several domains can have, so the limit can't be passed yet."""
    monkeypatch.setattr(limits, "MAX_DOMAIN_RANKS", 16)
    with pytest.raises(moecomm.BadInput, match="domain_ranks: got 32; want at most 16"):
        check(Settings(**{**GPUS, "ranks": 64, "domain_ranks": 32}))


@pytest.mark.parametrize(("ranks", "topk", "hidden", "domain"), [(8, 8, 7168, 0), (64, 32, 16384, 0), (64, 8, 7168, 8)])
def test_every_dispatch_kernel_fits_up_to_the_limit_and_one_does_not_beyond(
    ranks: int, topk: int, hidden: int, domain: int
) -> None:
    most = limits.most_experts(ranks, topk, hidden, BF16, domain)

    def all_fit(experts: int) -> bool:
        try:
            for spec in every_kernel(ranks, experts, topk, hidden, domain):
                block_fields(spec)
        except ValueError:
            return False
        return True

    assert all_fit(most) and not all_fit(most + ranks)


def every_kernel(ranks: int, experts: int, topk: int, hidden: int, domain: int) -> list[KernelSpec]:
    specs = []
    for layout in _native.Layout:
        for part in _native.Part:
            for quantize in (False, True):
                spec = KernelSpec(
                    op="dispatch",
                    ranks=ranks,
                    experts=experts,
                    topk=topk,
                    hidden=hidden,
                    layout=int(layout),
                    type=BF16,
                    part=int(part),
                    quantize=quantize,
                    row_bytes=hidden if quantize else 2 * hidden,
                    scale_bytes=-(-hidden // 128) * 4 if quantize else 0,
                    transport="puts" if domain else "lsa",
                    domain_ranks=domain,
                )
                specs.append(spec)
                if packets_of(spec) is not None:
                    specs.append(dataclasses.replace(spec, packets=True))
    return specs


def test_the_table_in_the_documents_has_the_numbers_of_the_code() -> None:
    text = (Path(__file__).parents[2] / "docs" / "limits.md").read_text()
    found = [int(number) for number in re.findall(r"^\|.*?\| (\d+) \|", text, re.MULTILINE)]
    sizes = 2**31 - 1
    assert found == [
        protocol.MAX_RANKS,
        protocol.MAX_HOST_RANKS,
        limits.MAX_DOMAIN_RANKS,
        protocol.MAX_TOPK,
        (1 << 23) - 1,
        16,
        sizes,
        sizes,
        limits.most_experts(8, 8, 7168, BF16),
        limits.most_experts(64, 32, 16384, BF16),
        (1 << 20) - 1,
        protocol.MAX_BLOCKS,
        protocol.PACKET_TOKENS,
        protocol.MOST_WEIGHTS,
        *(kernels.MOST_GROUPS, kernels.MOST_GROUPS, *OF_EXPERTS),
        GEMM_ROWS,
        *(WINDOW_BYTES, MAX_SIGNALS),
    ]
    check_alignment("expert_alignment", (1 << 20) - 1)
    with pytest.raises(moecomm.BadInput):
        check_alignment("expert_alignment", 1 << 20)


def run_layer(hidden: int, intermediate: int, experts: int = 1, fp8: bool = True, interleaved: bool = False) -> None:
    """Run Buffer.moe for one token, with weights of 0."""
    w13, w2 = torch.zeros(experts, 2 * intermediate, hidden), torch.zeros(experts, hidden, intermediate)
    sizes: dict[str, Any] = {"hidden": hidden, "num_experts": experts, "topk": 1, "max_tokens": 1}
    ids = torch.zeros(1, 1, dtype=torch.int64)
    with moecomm.Buffer("self", **sizes, device="cpu") as buffer:
        weights: list[Any] = [quantize_weights(w) if fp8 else w.bfloat16() for w in (w13, w2)]
        if fp8 and not interleaved:
            weights[0] = (weights[0].data, weights[0].scales.unsqueeze(1))
        buffer.moe(torch.zeros(1, hidden).bfloat16(), ids, None, *weights, interleaved=interleaved)


@pytest.mark.parametrize(
    ("good", "bad", "error"),
    [
        ({"experts": 512}, {"experts": 513}, moecomm.Unsupported),
        ({"hidden": 48}, {"hidden": 40}, moecomm.Unsupported),
        ({"intermediate": 96}, {"intermediate": 80}, moecomm.Unsupported),
        ({"intermediate": 48, "interleaved": True}, {"intermediate": 40, "interleaved": True}, moecomm.Unsupported),
        ({"intermediate": 8, "interleaved": True}, {"intermediate": 4, "interleaved": True}, moecomm.BadInput),
    ],
)
def test_sizes_of_experts_have_the_multiples_of_the_table(
    good: dict[str, Any], bad: dict[str, Any], error: type[Exception]
) -> None:
    """The last case has weights of 16 bits, because FP8 weights that are interleaved want a multiple of 16."""
    sizes: dict[str, Any] = {"hidden": 32, "intermediate": 32, "fp8": error is moecomm.Unsupported}
    run_layer(**sizes | good)
    with pytest.raises(error):
        run_layer(**sizes | bad)


def test_experts_that_ours_cannot_compute_go_through_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    lacks = weight_format.ours_lacks.__wrapped__
    assert lacks(0, torch.bfloat16, 512, 8, 8) == ""
    assert all(lacks(0, torch.bfloat16, *sizes) for sizes in ((513, 8, 8), (512, 12, 8), (512, 8, 12)))


def test_a_grouped_gemm_has_as_many_rows_as_the_table_says() -> None:
    """Rows of no column take no memory; what follows the check of rows refuses the weights."""
    counts, w = torch.zeros(1, dtype=torch.int32), torch.zeros(1, 0, 0).bfloat16()
    for rows, argument in ((GEMM_ROWS, "w"), (GEMM_ROWS + 1, "x")):
        with pytest.raises(moecomm.BadInput) as caught:
            grouped_gemm(torch.empty(rows, 0, dtype=torch.bfloat16), w, counts)
        assert caught.value.argument == argument


@pytest.mark.parametrize(
    ("how", "columns", "depth"),
    [
        ({}, 8, 8),
        ({"gated": True}, 16, 8),
        ({"fp8": True}, 8, 16),
        ({"fp8": True, "gated": True}, 64, 16),
        ({"fp8": True, "gated": True, "interleaved": True}, 16, 16),
    ],
)
def test_matrices_of_a_grouped_gemm_have_the_multiples_of_the_table(
    how: dict[str, bool], columns: int, depth: int
) -> None:
    given = {"fp8": False, "gated": False, "interleaved": False, **how}
    assert unfit(3 * columns, 3 * depth, **given) == ""
    assert unfit(columns * 3 // 2, depth, **given) and unfit(columns, depth * 3 // 2, **given)


def test_a_window_has_the_limits_of_the_table() -> None:
    most: dict[str, Any] = {"ranks": 64, "nbytes": WINDOW_BYTES, "signals": MAX_SIGNALS}
    WindowSettings(**most, backend="lsa").check()
    WindowSettings(**{**most, "nbytes": 1 << 20, "ranks": 256}, backend="host").check()
    for name in ("nbytes", "signals"):
        with pytest.raises(moecomm.BadInput, match=name):
            WindowSettings(**{**most, name: most[name] + 1}, backend="lsa").check()
    for ranks, backend in ((65, "lsa"), (257, "host")):
        with pytest.raises(moecomm.BadInput, match="group"):
            WindowSettings(**{**most, "nbytes": 1 << 20, "ranks": ranks}, backend=backend).check()


def test_experts_of_deep_ep_are_a_multiple_of_the_ranks() -> None:
    check_experts(8, 4)
    with pytest.raises(moecomm.BadInput, match="num_experts"):
        check_experts(9, 4)
