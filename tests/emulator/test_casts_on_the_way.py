"""Casts in the kernels of a dispatch, run on CPUs: rows, scales and metadata are those of rows that a pass casts."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from moecomm.backends import host
from moecomm.base import formats, packets
from moecomm.testing import LocalBuffers
from moecomm.testing import ranks as local

from ..few import few
from .machine import Machine
from .test_kernels import DOMAINS
from .test_kernels import pytestmark as of_emulator

pytestmark = of_emulator
NAMES = tuple(name for name, fmt in formats.FORMATS.items() if name != "fp8" and fmt.fits_warps(128))
# Rows of several pieces, the last one shorter, and groups that do not fill a step of a warp.
HIDDEN = 2048 + 512 + 128
WAYS: dict[str, dict[str, Any]] = {
    "packets": {"ranks": 2, "packet_bytes": packets.room},
    "rows": {"ranks": 2, "packet_bytes": lambda *_: 0},
    "forwarders": {**DOMAINS, "direct_bytes": lambda *_: 0},
    "direct": DOMAINS,
}


def values(tokens: int, hidden: int, seed: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """Ordinary rows, rows of any bits at all, and a row of zeros."""
    g = torch.Generator().manual_seed(seed)
    x = (torch.randn(tokens, hidden, generator=g) * torch.logspace(-4, 3, hidden)).to(dtype)
    bits = torch.randint(0, 256, (tokens, hidden * dtype.itemsize), generator=g, dtype=torch.uint8).view(dtype)
    x[1::3], x[2:3] = bits[1::3], 0
    return x


def check_rounds(
    machine: Machine,
    monkeypatch: pytest.MonkeyPatch,
    way: str,
    name: str,
    x: list[torch.Tensor],
    scale: float | torch.Tensor | None = None,
    **options: Any,
) -> None:
    """Compare a dispatch, and a repeat of it, by kernels that cast with the host executor's after a pass."""
    sizes = dict(WAYS[way])
    for room in ("packet_bytes", "direct_bytes"):
        monkeypatch.setattr(host, room, sizes.pop(room, getattr(host, room)))
    sizes |= {"hidden": x[0].shape[1], "num_experts": 10, "topk": 3, "max_tokens": 40, "dtype": x[0].dtype}
    x = [x[rank % len(x)][rank // len(x) :] for rank in range(sizes["ranks"])]
    calls, g = [], torch.Generator().manual_seed(3)
    for rows in x:
        ids = torch.rand(len(rows), 10, generator=g).argsort(dim=1)[:, :3].contiguous()
        calls.append({"topk_idx": ids, "topk_weights": torch.rand(len(rows), 3, generator=g)})
    how = {"quantize": name, "x_global_scale": scale}
    found: list[list[Any]] = []
    for casts in (True, False):
        with LocalBuffers(**sizes, backend="host") as ranks, monkeypatch.context() as patch:
            if casts:
                patch.setattr(local, "_native", SimpleNamespace(host_run_all=machine.run_all))
            for buffer in ranks.buffers:
                patch.setattr(buffer.rounds.session, "casts_formats", casts)
            try:
                routed = ranks.dispatch([{"x": rows, **call, **how, **options} for rows, call in zip(x, calls, strict=True)])
                again = ranks.dispatch([
                    {"x": rows.flip(0), "handle": here.handle, **how} for rows, here in zip(x, routed, strict=True)
                ])
                assert all((here.args.quantize > 1) == casts for here in (*routed, *again))
                found.append([tensors(here) for here in (*routed, *again)])
            finally:
                machine.forget()
    for mine, other in zip(*found, strict=True):
        for one, two in zip(mine, other, strict=True):
            assert one.dtype == two.dtype and one.shape == two.shape
            assert torch.equal(one.contiguous().view(torch.uint8), two.contiguous().view(torch.uint8))


def tensors(routed: Any) -> list[torch.Tensor]:
    """Return copies of the rows in use, their scales and where they come from."""
    rows, scales, src = routed.x, routed.scales, routed.src
    if routed.plan.layout == "batched":
        used = torch.arange(rows.shape[1]) < routed.tokens_per_expert[:, None]
    else:
        used = torch.arange(len(rows)) < int(routed.num_rows)
    kept = [src.view(torch.uint8).view(*src.shape[:-1], -1)[used & (src[..., 0] >= 0)]]
    used = used & (src[..., 0] >= 0)
    kept += [tensor.contiguous().view(torch.uint8)[used].clone() for tensor in (rows, scales) if tensor.shape[: used.ndim] == used.shape]
    return [src.clone(), *kept]


@pytest.mark.parametrize("way", few(tuple(WAYS), "rows"))
@pytest.mark.parametrize("name", NAMES)
def test_rows_and_scales(name: str, way: str, machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    x = [values(17, HIDDEN, 0), values(23, HIDDEN, 1)]
    scale = torch.full((1,), 0.01) if name == "nvfp4" else None
    check_rounds(machine, monkeypatch, way, name, x, scale, layout="expert")
