"""Limits of a Buffer: each is a named error when it opens, and stands in docs/limits.md with the number of the code."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any

import pytest
import torch

import moecomm
from moecomm import _native
from moecomm.core import protocol
from moecomm.core.integers import check_alignment
from moecomm.core.settings import Settings
from moecomm.jit import KernelSpec, block_fields, limits, packets_of

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
    ]
    check_alignment("expert_alignment", (1 << 20) - 1)
    with pytest.raises(moecomm.BadInput):
        check_alignment("expert_alignment", 1 << 20)
