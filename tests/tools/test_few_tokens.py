"""The tables of the most tokens that travel in packets, and direct between domains."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from moecomm import _native, backends
from moecomm.base import packets
from moecomm.gpu.jit import KernelSpec, packets_of
from moecomm.ranks.settings import Settings
from moecomm.tools.few_tokens import RANKS, few_tokens, lines

PAGE = Path(__file__).parents[2] / "docs" / "performance.md"
ROWS = few_tokens()


def settings_of(ranks: int, dtype: torch.dtype, domain_ranks: int | None = None) -> Settings:
    return Settings(ranks, 7168, 256, 8, 4096, dtype, "lsa", None, domain_ranks)


def test_the_document_has_the_table_of_packets() -> None:
    cells: list[list[object]] = [
        ["ranks", "memory", *ROWS[0].tokens],
        *([r.ranks, f"{r.nbytes >> 20} MiB", *r.tokens.values()] for r in ROWS),
    ]
    heading, *table = [f"| {' | '.join(map(str, row))} |" for row in cells]
    assert f"{heading}\n" in PAGE.read_text()
    assert "\n".join(table) in PAGE.read_text()


def test_the_document_has_the_table_of_direct_rows() -> None:
    cells: list[list[object]] = [
        ["ranks", "of a domain", "memory", *ROWS[0].direct],
        *([r.ranks, r.domain_ranks, f"{r.direct_nbytes >> 20} MiB", *r.direct.values()] for r in ROWS),
    ]
    heading, *table = [f"| {' | '.join(map(str, row))} |" for row in cells]
    assert f"{heading}\n" in PAGE.read_text()
    assert "\n".join(table) in PAGE.read_text()


def test_128_tokens_go_in_packets_both_ways_at_64_ranks() -> None:
    widest = ROWS[-1]
    assert widest.ranks == 64 and widest.nbytes == 256 << 20
    assert widest.tokens["dispatch bf16"] >= 128 and widest.tokens["combine bf16"] >= 128
    assert all(most >= 128 for most in widest.direct.values())
    assert len(lines([widest])) == 4


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_every_dtype_and_wire_has_the_limit_of_its_column(dtype: torch.dtype) -> None:
    """As a Buffer of that dtype decides: float16 has no column of its own."""
    name = "fp32" if dtype == torch.float32 else "bf16"
    for row in ROWS:
        settings = settings_of(row.ranks, dtype)
        room = settings.packet_bytes(backends.load("lsa"))
        sent = packets.of_dispatch(7168 * dtype.itemsize, 0, 8)
        exact = f"combine {name}, exact" if name == "bf16" else "combine fp32"
        assert sent is not None
        most = row.tokens[f"dispatch {name}"]
        assert sent.carry(most, 8, room) and not sent.carry(most + 1, 8, room)
        for column, size in ((f"combine {name}", dtype.itemsize), (exact, 4)):
            most, staged = row.tokens[column], 7168 * size
            assert packets.fit_return_packets(staged, most, 8, room)
            assert not packets.fit_return_packets(staged, most + 1, 8, room)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_rows_go_direct_up_to_the_limit_of_the_table(dtype: torch.dtype) -> None:
    name = "rounds fp32" if dtype == torch.float32 else "rounds bf16"
    for row in ROWS:
        settings = settings_of(row.ranks, dtype, row.domain_ranks)
        shape = settings.shape(backends.load("lsa"))
        most = row.direct[name]
        assert _native.goes_direct(shape, most) and not _native.goes_direct(shape, most + 1)
        two = replace(settings, domain_ranks=row.ranks // 2).shape(backends.load("lsa"))
        assert _native.goes_direct(two, most - 1) and not _native.goes_direct(two, most + 2), "hardly by their number"


@pytest.mark.parametrize("layout", list(_native.Layout))
def test_the_limits_hold_for_every_layout(layout: _native.Layout) -> None:
    """As the titles of doctor's tables say: a kernel of any layout sends, or returns, the packets of the columns."""
    titles = [line for line in lines(ROWS) if not line.startswith(" ")]
    assert len(titles) == 2 and all("every layout" in title for title in titles)
    bf16, fp32 = int(_native.Type.bf16), int(_native.Type.fp32)
    kernels: dict[str, dict[str, Any]] = {
        "dispatch bf16": {"row_bytes": 2 * 7168},
        "dispatch fp32": {"row_bytes": 4 * 7168, "type": fp32},
        "dispatch FP8": {"row_bytes": 7168, "scale_bytes": 4 * 56, "quantize": True},
        "dispatch FP8, UE8M0": {"row_bytes": 7168, "scale_bytes": 56, "quantize": True, "scale_format": 1},
        "combine bf16": {"wire": bf16},
        "combine bf16, exact": {"wire": fp32},
        "combine fp32": {"wire": fp32, "type": fp32},
        "combine FP8 or INT8 wire": {"wire": int(_native.Type.e4m3)},
    }
    if layout == _native.Layout.flat:  # rows that the caller has added up are never exact
        del kernels["combine bf16, exact"]
    room = settings_of(8, torch.bfloat16).packet_bytes(backends.load("lsa"))
    sizes: dict[str, Any] = {"ranks": 8, "experts": 256, "topk": 8, "hidden": 7168, "layout": int(layout)}
    for name, of_kernel in kernels.items():
        cut = packets_of(KernelSpec(op=name.split()[0], **{**sizes, "type": bf16, **of_kernel}))
        assert cut is not None and cut.most_tokens(8, room) == ROWS[RANKS.index(8)].tokens[name], name
