"""Casts in the kernels of a dispatch, run on CPUs: rows, scales and metadata are those of rows that a pass casts."""

from __future__ import annotations

import itertools
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from moecomm.backends import host
from moecomm.backends.lsa_kernels import dispatch_spec
from moecomm.base import formats, packets
from moecomm.dispatch.payloads import Packed, pack
from moecomm.errors import Mismatch
from moecomm.gpu import jit, limits
from moecomm.testing import LocalBuffers, check_case, prepare
from moecomm.testing import ranks as local
from moecomm.testing.prepare import prepare_dispatch

from ..few import few
from ..gpu import test_casts_on_the_way as cases
from ..gpu.test_casts_on_the_way import NAMES
from ..gpu.test_plain_kernels import check_cast
from ..gpu.test_virtual_ranks import packet_room
from .machine import Machine
from .test_kernels import DOMAINS
from .test_plain_kernels import ENDS

# Rows of several pieces, the last one shorter, and groups that do not fill a step of a warp.
HIDDEN = 2048 + 512 + 128
_BITS = {1: torch.uint8, 4: torch.int32}
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
                routed = ranks.dispatch(
                    [{"x": rows, **call, **how, **options} for rows, call in zip(x, calls, strict=True)]
                )
                again = ranks.dispatch(
                    [{"x": rows.flip(0), "handle": here.handle, **how} for rows, here in zip(x, routed, strict=True)]
                )
                assert all((here.args.quantize > 1) == casts for here in (*routed, *again))
                found.append([tensors(here) for here in (*routed, *again)])
            finally:
                machine.forget()
    for mine, other in zip(*found, strict=True):
        for one, two in zip(mine, other, strict=True):
            assert one.dtype == two.dtype and one.shape == two.shape
            assert torch.equal(one, two)


def tensors(routed: Any) -> list[torch.Tensor]:
    """Return copies of the rows in use, their scales and where they come from."""
    rows, scales, src = routed.x, routed.scales, routed.src
    if routed.plan.layout == "batched":
        used = torch.arange(rows.shape[1]) < routed.tokens_per_expert[:, None]
    else:
        used = torch.arange(len(rows)) < int(routed.num_rows)
    used = used & (src[..., 0] >= 0)
    kept = [
        t.view(_BITS[t.itemsize])[used] for t in (rows, scales) if t is not None and t.shape[: used.ndim] == used.shape
    ]
    return [src[used], *kept]


@pytest.mark.parametrize("way", few(tuple(WAYS), "rows", "packets"))
@pytest.mark.parametrize("name", NAMES)
def test_rows_and_scales(name: str, way: str, machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    x = [values(17, HIDDEN, 0), values(23, HIDDEN, 1)]
    scale = torch.full((1,), 0.01) if formats.FORMATS[name].takes_global else None
    check_rounds(machine, monkeypatch, way, name, x, scale, layout="expert")


@pytest.mark.parametrize("way", few(("packets", "rows"), "rows"))
@pytest.mark.parametrize("layout", ["flat", "batched"])
@pytest.mark.parametrize("name", few(NAMES, "nvfp4"))
def test_layouts(name: str, layout: str, way: str, machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also rows of one group, or little more, and scales that fill no word."""
    group = cases.group_of(name)
    scale = 0.01 if name == "fp8_tensor" else None
    for hidden, by in ((max(group, 32), "row"), (max(group, 32) * 3, "column")):
        x = [values(17, hidden, 0), values(23, hidden, 1)]
        by = by if formats.FORMATS[name].scales is not None else "row"
        check_rounds(machine, monkeypatch, way, name, x, scale, layout=layout, scale_layout=by)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize("name", few(NAMES, "mxfp8"))
def test_rows_of_other_types(name: str, dtype: torch.dtype, machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows that do not begin at multiples of 16 bytes are copied first."""
    x = [values(9, 1152, 0, dtype), values(5, 1153, 1, dtype)[:, 1:]]
    check_rounds(
        machine, monkeypatch, "rows", name, x, 0.3 if formats.FORMATS[name].takes_global else None, layout="expert"
    )


@pytest.mark.parametrize("step", few((1, 61), 61))
@pytest.mark.parametrize("name", ["fp8", *NAMES])
def test_every_bf16(name: str, step: int, machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    bits = torch.cat((torch.arange(0, 1 << 16, step), ENDS, ENDS + 0x8000))
    check_every_bf16(machine, monkeypatch, name, bits)


def check_every_bf16(machine: Machine, monkeypatch: pytest.MonkeyPatch, name: str, bits: torch.Tensor) -> None:
    """Compare rows by a kernel that casts with the specification."""
    monkeypatch.setattr(local, "_native", SimpleNamespace(host_run_all=machine.run_all))
    monkeypatch.setattr(host, "packet_bytes", lambda *_: 0)
    rows = list(cases.each_bf16_in_a_group(name, 1024, bits))
    sizes: dict[str, Any] = {"ranks": 1, "hidden": 1024, "num_experts": 1, "topk": 1, "max_tokens": len(rows[0])}
    with LocalBuffers(**sizes, dtype=torch.bfloat16, backend="host") as ranks:
        monkeypatch.setattr(ranks.buffers[0].rounds.session, "casts_formats", True)
        ids = torch.zeros(len(rows[0]), 1, dtype=torch.int64)
        for x, scale in itertools.product(rows, cases.global_scales(name, "cpu")):
            try:
                (routed,) = ranks.dispatch([{"x": x, "topk_idx": ids, "quantize": name, "x_global_scale": scale}])
            finally:
                machine.forget()
            check_cast((routed.x, routed.scales), formats.quantize(x, name, global_scale=scale))


@pytest.mark.parametrize("way", ["rows", "packets"])
def test_rings_of_one_piece(way: str, machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    """As with thousands of experts, whose counters leave no more room."""
    fields = jit.block_fields
    monkeypatch.setattr(jit, "block_fields", lambda spec: {**fields(spec), "ring_slots": 1})
    check_rounds(machine, monkeypatch, way, "nvfp4", [values(17, HIDDEN, 0), values(23, HIDDEN, 1)], layout="flat")


def test_every_kernel_fits_that_limits_allow() -> None:
    for (ranks, hidden, kind), name in itertools.product(itertools.product((4, 64), (7168, 16384), (0, 2)), NAMES):
        experts, fmt = limits.most_experts(ranks, 8, hidden, kind), formats.FORMATS[name]
        spec = jit.KernelSpec(
            op="dispatch",
            ranks=ranks,
            experts=experts,
            topk=8,
            hidden=hidden,
            layout=1,
            type=kind,
            quantize=True,
            format=name,
            row_bytes=fmt.row_bytes(hidden),
            scale_bytes=fmt.scale_bytes(hidden),
        )
        jit.block_fields(spec)
        jit.block_fields(replace(spec, packets=True))


@pytest.mark.parametrize("cases_of_each", few((1, 8), 1))
@pytest.mark.parametrize("sizes", cases.SIZES[:3], ids=["rows", "packets", "domains"])
def test_random_cases(
    sizes: dict[str, Any], cases_of_each: int, machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local, "_native", SimpleNamespace(host_run_all=machine.run_all))
    monkeypatch.setattr(host, "packet_bytes", packet_room(sizes))
    with LocalBuffers(**sizes, backend="host") as ranks:
        for buffer in ranks.buffers:
            monkeypatch.setattr(buffer.rounds.session, "casts_formats", True)
        try:
            for number, name in itertools.product(range(cases_of_each), NAMES):
                check_case(ranks, cases.cast_case(number, sizes, name))
        finally:
            machine.forget()


def test_tensors_in_one_step() -> None:
    """Those of a plan, which adapters read, have the bytes that a payload reads."""
    with LocalBuffers(ranks=1, hidden=64, num_experts=2, topk=1, max_tokens=8, backend="host") as ranks:
        (buffer,) = ranks.buffers
        buffer.rounds.session.casts_formats = True
        x, ids = torch.ones(8, 64).bfloat16(), torch.zeros(8, 1, dtype=torch.int64)
        for layout, sizes in (("flat", (8,)), ("expert", (8,)), ("batched", (2, 8))):
            routed = prepare_dispatch(buffer, x, ids, layout=layout, quantize="nvfp4")
            rows, scales = getattr(routed.plan, f"{layout}_tensors")(routed)[:2]
            assert rows.dtype == torch.uint8 and rows.shape[:-1] == sizes and rows.shape[-1] == 32
            assert layout == "batched" or (scales.dtype == torch.uint8 and scales.shape == (8, 4))
            assert routed.plan.tensor("x", routed).data_ptr() == rows.data_ptr()
            assert str([*sizes, 32]) in repr(routed)


@pytest.mark.parametrize("way", few(tuple(WAYS), "rows", "packets"))
def test_global_scales_in_device_memory_are_compared(
    way: str, machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel reads them: no host knows their values."""

    def packed(*given: Any) -> Packed:
        found = pack(*given)
        assert found.global_scale is not None
        return found._replace(global_scale=torch.tensor([found.global_scale]))

    sizes = dict(WAYS[way])
    for room in ("packet_bytes", "direct_bytes"):
        monkeypatch.setattr(host, room, sizes.pop(room, getattr(host, room)))
    monkeypatch.setattr(prepare, "pack", packed)
    x, ids = torch.full((4, 64), 6.0).bfloat16(), torch.arange(4)[:, None]
    how = {"x": x, "topk_idx": ids, "quantize": "nvfp4"}
    sizes |= {"hidden": 64, "num_experts": 8, "topk": 1, "max_tokens": 4}
    with LocalBuffers(**sizes, backend="host") as ranks, monkeypatch.context() as patch:
        patch.setattr(local, "_native", SimpleNamespace(host_run_all=machine.run_all))
        try:
            for scale in (2.0, 3.0):
                for routed in ranks.dispatch([{**how, "x_global_scale": scale} for _ in ranks.buffers]):
                    assert routed.args.compared != 0 and dispatch_spec(routed.args).compares
                    values = formats.dequantize(routed.x, routed.scales, "nvfp4", global_scale=scale)
                    assert torch.equal(values, torch.full((len(routed.x), 64), 6.0))
            with pytest.raises(Mismatch, match=r"x_global_scale: this rank has 2\.0, rank 1 has 3\.0"):
                ranks.dispatch([{**how, "x_global_scale": 3.0 if rank == 1 else 2.0} for rank in range(sizes["ranks"])])
        finally:
            machine.forget()


@pytest.mark.parametrize("hidden", [1024, 1040])
def test_what_keeps_the_pass(hidden: int) -> None:
    """Incomplete groups, scales of a whole row or of all, and rows with extras."""
    with LocalBuffers(ranks=1, hidden=hidden, num_experts=1, topk=1, max_tokens=8, backend="host") as ranks:
        (buffer,) = ranks.buffers
        buffer.rounds.session.casts_formats = True
        x, ids = torch.ones(8, hidden).bfloat16(), torch.zeros(8, 1, dtype=torch.int64)
        for name, extras in itertools.product(formats.FORMATS, ((), (torch.ones(8, 3),))):
            scale = 1.0 if name == "fp8_tensor" else None
            args = prepare_dispatch(buffer, x, ids, quantize=name, x_global_scale=scale, extras=extras).args
            casts = not extras and (name == "fp8" or (name in NAMES and hidden == 1024))
            assert (args.quantize != 0) == casts
