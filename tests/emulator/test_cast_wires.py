"""Combines whose sums are cast, by kernels: the bits of the host executor, which are those of the reference."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from moecomm import combine
from moecomm.backends import host
from moecomm.backends.lsa_kernels import combine_spec
from moecomm.base import packets
from moecomm.testing import LocalBuffers
from moecomm.testing import ranks as local
from moecomm.testing.prepare import prepare_combine

from ..few import few
from .machine import Call, Machine

EXPERTS, TOPK, TOKENS = 6, 3, 20
PLACES: dict[str, tuple[int, int]] = {  # ranks, and those of a domain
    "heap": (3, 3),
    "ring": (3, 3),
    "packets": (3, 3),
    "direct": (4, 2),
    "forwarders": (4, 2),
    "direct, three domains": (6, 2),
    "forwarders, three domains": (6, 2),
}
SIZES: dict[str, Any] = {"num_experts": EXPERTS, "topk": TOPK, "max_tokens": TOKENS}
# layout, hidden, dtype, options of the combine; None: of each rank's tokens.  1040 columns are two pieces, in the ring
# and in packets; 896 fill a packet.
CASES: dict[str, Any] = {
    "expert": ("expert", 1040, torch.bfloat16, {}),
    "flat": ("flat", 1040, torch.bfloat16, {}),
    "batched, a bias": ("batched", 896, torch.float16, {"weighted": False, "bias": None}),
    "fp32, a bias": ("expert", 208, torch.float32, {"bias": None}),
    "fp32, weights of the source ranks": ("expert", 1040, torch.float32, {"topk_weights": None}),
    "flat fp32 in the window": ("flat", 2064, torch.float32, {"in_window": True}),
    "flat in the window, bias first": (
        "flat",
        16,
        torch.float16,
        {"in_window": True, "bias": None, "bias_first": True},
    ),
    "bias first, weights of the source ranks": (
        "expert",
        2064,
        torch.float16,
        {"topk_weights": None, "bias": None, "bias_first": True},
    ),
    "gradients": ("expert", 1040, torch.bfloat16, {"weight_grads": None}),
    "flat, gradients": ("flat", 208, torch.bfloat16, {"weight_grads": None}),
}


def tokens(rank: int, hidden: int, dtype: torch.dtype, layout: str) -> dict[str, Any]:
    """Make tokens of any magnitude, with a group of zeros, one with small values, a NaN and an infinity."""
    g = torch.Generator().manual_seed(rank)
    count = TOKENS - 2 * rank
    ids = torch.rand(count, EXPERTS, generator=g).argsort(dim=1)[:, :TOPK].contiguous()
    ids[0, 1:], ids[1] = -1, torch.tensor([4, 4, 5])
    x = torch.randn(count, hidden, generator=g) * 10.0 ** torch.randint(-4, 4, (count, 1), generator=g)
    x[2], x[3, ::2], x[4, 0], x[5, -1] = 0.0, x[3, ::2] * 2**-8, torch.nan, torch.inf
    return {
        "x": x.to(dtype),
        "topk_idx": ids,
        "topk_weights": torch.rand(count, TOPK, generator=g),
        "layout": layout,
    }


def calls_of(ranks: LocalBuffers, case: Any, wire: str) -> list[dict[str, Any]]:
    """Dispatch the tokens of a case, and return the arguments of its combine on each rank."""
    layout, hidden, dtype, how = case
    given = [tokens(rank, hidden, dtype, layout) for rank in range(len(ranks.buffers))]
    found = []
    for buffer, call, here in zip(ranks.buffers, given, ranks.dispatch(given), strict=True):
        one, y = {"wire": wire, **how}, here.x.clone()
        if one.pop("in_window", False):
            y = buffer.empty(here.handle, y.dtype)
            y.copy_(here.x)
        g = torch.Generator().manual_seed(7 + buffer.rank)
        made = {
            "bias": torch.randn(len(call["x"]), hidden, generator=g).to(dtype),
            "topk_weights": torch.rand(call["topk_idx"].shape, generator=g),
            "weight_grads": torch.randn(len(y), *(TOPK,) * (layout == "flat"), generator=g),
        }
        found.append({"y": y, "handle": here.handle, **one, **{name: made[name] for name in made.keys() & one.keys()}})
    return found


def equal(out: Any, want: Any) -> bool:
    if isinstance(out, tuple):
        return all(map(equal, out, want))
    return torch.equal(out.isnan(), want.isnan()) and torch.equal(out.nan_to_num(), want.nan_to_num())


@pytest.mark.parametrize("place", few(PLACES, "heap", "packets", "direct", "forwarders"))
@pytest.mark.parametrize("name", few(CASES, "expert", "flat"))
@pytest.mark.parametrize("wire", ["fp8", "int8"])
def test_sums_are_cast(wire: str, name: str, place: str, machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    case, (count, near) = CASES[name], PLACES[place]
    sizes = {**SIZES, "hidden": case[1], "dtype": case[2], "backend": "host", "domain_ranks": near}
    if place.startswith("forwarders"):
        monkeypatch.setattr(host, "direct_bytes", lambda *_: 0)
    with LocalBuffers(count, **sizes) as ranks:
        want = ranks.combine(calls_of(ranks, case, wire))
    monkeypatch.setattr(local, "_native", SimpleNamespace(host_run_all=machine.run_all))
    monkeypatch.setattr(host, "packet_bytes", packets.room if place == "packets" else lambda *_: 0)
    with LocalBuffers(count, **sizes) as ranks:
        for buffer in ranks.buffers:
            monkeypatch.setattr(buffer.rounds.session, "reduced_rows_in_heap", place == "heap")
        calls = calls_of(ranks, case, wire)
        for _ in range(2):
            pending = [prepare_combine(buffer, **call) for buffer, call in zip(ranks.buffers, calls, strict=True)]
            specs = [combine_spec(p.args) for p in pending]
            outs = [combine.finish(buffer.rounds, p) for buffer, p in zip(ranks.buffers, pending, strict=True)]
            try:
                machine.run([Call(p.args, machine.sizes) for p in pending], count)
            finally:
                machine.forget()
            ranks.check()
            assert all(map(equal, outs, want))
            given = [p.args.topk_weights == 0 for p in pending]
            assert [p.args.reduced_rows != 0 for p in pending] == [place == "heap" and its for its in given]
            grads = "weight_grads" in case[3]
            assert all(spec.packets == (place == "packets" and not grads) and not spec.in_place for spec in specs)
