"""The tables of docs/performance.md: the most tokens that travel in packets, and direct between domains."""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from moecomm import _native, backends
from moecomm.base import packets
from moecomm.gpu.jit import KernelSpec, packets_of
from moecomm.ranks.settings import Settings

PAGE = (Path(__file__).parents[2] / "docs" / "performance.md").read_text()
HIDDEN, TOPK = 7168, 8
BF16, FP32 = int(_native.Type.bf16), int(_native.Type.fp32)
KERNELS: dict[str, dict[str, Any]] = {  # by column
    "dispatch bf16": {"row_bytes": 2 * HIDDEN},
    "dispatch fp32": {"row_bytes": 4 * HIDDEN, "type": FP32},
    "dispatch FP8": {"row_bytes": HIDDEN, "scale_bytes": 4 * 56, "quantize": True},
    "dispatch FP8, UE8M0": {"row_bytes": HIDDEN, "scale_bytes": 56, "quantize": True, "scale_format": 1},
    "combine bf16": {"wire": BF16},
    "combine bf16, exact": {"wire": FP32},
    "combine fp32": {"wire": FP32, "type": FP32},
    "combine FP8 or INT8 wire": {"wire": int(_native.Type.e4m3)},
}


def rows(*heads: str) -> list[dict[str, int]]:
    """Return the rows of the table of the page that begins with these headings."""
    first = re.escape(f"| {' | '.join(heads)} |")
    (table,) = re.findall(rf"(^{first}.*\n(?:\|.*\n)+)", PAGE, re.MULTILINE)
    named, _, *lines = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()]
    return [dict(zip(named, (int(cell.removesuffix(" MiB")) for cell in line), strict=True)) for line in lines]


PACKETS, DIRECT = rows("ranks", "memory"), rows("ranks", "of a domain", "memory")


def settings_of(ranks: int, dtype: torch.dtype, domain_ranks: int | None = None) -> Settings:
    return Settings(ranks, HIDDEN, 256, TOPK, 4096, dtype, "lsa", None, domain_ranks)


@pytest.mark.parametrize("row", PACKETS, ids=lambda row: f"{row['ranks']} ranks")
@pytest.mark.parametrize("layout", list(_native.Layout))
def test_kernels_send_as_many_tokens_in_packets_as_the_table_says(layout: _native.Layout, row: dict[str, int]) -> None:
    assert list(row) == ["ranks", "memory", *KERNELS]
    room = settings_of(row["ranks"], torch.bfloat16).packet_bytes(backends.load("lsa"))
    assert row["memory"] == 2 * row["ranks"] * room >> 20, "of either parity"
    sizes: dict[str, Any] = {"ranks": row["ranks"], "experts": 256, "topk": TOPK, "hidden": HIDDEN}
    for name, of_kernel in KERNELS.items():
        if layout == _native.Layout.flat and name == "combine bf16, exact":
            continue  # rows that the caller has added up are never exact
        spec = KernelSpec(op=name.split()[0], layout=int(layout), **{**sizes, "type": BF16, **of_kernel})
        cut = packets_of(spec)
        assert cut is not None and cut.most_tokens(TOPK, room) == row[name], name


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_buffers_of_every_dtype_have_the_limit_of_their_column(dtype: torch.dtype) -> None:
    name = "fp32" if dtype == torch.float32 else "bf16"  # float16 has the limits of bf16
    for row in PACKETS:
        room = settings_of(row["ranks"], dtype).packet_bytes(backends.load("lsa"))
        most, sent = row[f"dispatch {name}"], packets.of_dispatch(HIDDEN * dtype.itemsize, 0, TOPK)
        assert sent is not None and sent.carry(most, TOPK, room) and not sent.carry(most + 1, TOPK, room)
        most, staged = row[f"combine {name}"], HIDDEN * dtype.itemsize
        assert packets.fit_return_packets(staged, most, TOPK, room)
        assert not packets.fit_return_packets(staged, most + 1, TOPK, room)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_rows_go_direct_up_to_the_limit_of_the_table(dtype: torch.dtype) -> None:
    for row in DIRECT:
        settings = settings_of(row["ranks"], dtype, row["of a domain"])
        shape = settings.shape(backends.load("lsa"))
        most = row["rounds fp32" if dtype == torch.float32 else "rounds bf16"]
        assert _native.goes_direct(shape, most) and not _native.goes_direct(shape, most + 1)
        if dtype == torch.bfloat16:
            assert row["memory"] == 2 * row["ranks"] * shape.packet_bytes >> 20
        two = replace(settings, domain_ranks=row["ranks"] // 2).shape(backends.load("lsa"))
        assert _native.goes_direct(two, most - 1) and not _native.goes_direct(two, most + 2), "hardly by their number"
