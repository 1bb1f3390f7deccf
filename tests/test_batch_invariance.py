"""The bits of a token while other tokens, ranks, placements and layouts change: docs/batch_invariance.md."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from moecomm import Placement, _native, formats
from moecomm.backends import host
from moecomm.testing import LocalBuffers

from .few import few

HIDDEN, EXPERTS, TOPK, MOST = 272, 12, 5, 96
SIZES: dict[str, Any] = {"hidden": HIDDEN, "num_experts": EXPERTS, "topk": TOPK, "max_tokens": MOST}
HOST: dict[str, Any] = {"backend": "host", "timeout_s": 60}
Token = tuple[torch.Tensor, torch.Tensor, torch.Tensor]  # rows, ids, weights


def tokens(count: int, seed: int, dtype: torch.dtype = torch.bfloat16) -> Token:
    g = torch.Generator().manual_seed(seed)
    ids = torch.rand(count, EXPERTS, generator=g).argsort(dim=1)[:, :TOPK]
    ids[torch.rand(count, TOPK, generator=g) < 0.1] = -1
    return torch.randn(count, HIDDEN, generator=g).to(dtype), ids, torch.rand(count, TOPK, generator=g)


def expert(x: torch.Tensor, number: torch.Tensor) -> torch.Tensor:
    """Results of experts, whose bits depend on the row alone, and are the same on all devices."""
    return (x.float() * (1 + number.unsqueeze(-1) * 0.375) + number.unsqueeze(-1)).to(x.dtype)


def plain(given: Token) -> torch.Tensor:
    """The layer in plain torch, in one process: the sum over k, in float32."""
    x, ids, weights = given
    out = torch.zeros(x.shape)
    for k in range(TOPK):
        row = weights[:, k : k + 1] * expert(x, ids[:, k]).float()
        out += torch.where(ids[:, k : k + 1] >= 0, row, 0.0)
    return out.to(x.dtype)


def rows_by_entry(ranks: LocalBuffers, routed: list[Any], calls: list[Any]) -> list[dict[tuple[int, ...], bytes]]:
    """Return the bytes of each row that arrived, by source rank, of (token, k); flat: of (token, rank)."""
    found: list[dict[tuple[int, ...], bytes]] = [{} for _ in calls]
    for rank, here in enumerate(routed):
        local = list(ranks.buffers[rank].local_experts)
        src, x = here.src.cpu(), here.x.cpu()
        if here.handle.layout == "batched":
            per = x.shape[1]
            numbers = [(e, e * per + i) for e, n in enumerate(here.tokens_per_expert.tolist()) for i in range(n)]
            src, x = src.flatten(0, 1), x.flatten(0, 1)
        elif here.handle.layout == "flat":
            numbers = [(-1, i) for i in range(len(x))]
        else:
            ends = here.rows_per_expert.cumsum(0).tolist()
            numbers = [
                (e, (ends[e - 1] if e else 0) + i)
                for e, n in enumerate(here.tokens_per_expert.tolist())
                for i in range(n)
            ]
        for number, row in numbers:
            source, token = src[row].tolist()
            k = calls[source]["topk_idx"][token].tolist().index(local[number]) if number >= 0 else TOPK + rank
            found[source][token, k] = x[row].contiguous().view(torch.uint8).numpy().tobytes()
    return found


def results(ranks: LocalBuffers, given: list[Token], layout: str, quantize: str | None = None, **how: Any) -> Any:
    """Run a layer of such experts.  Return its outputs, and the rows that arrived, by source rank.

    `quantize`: rows arrive in this format, and experts take them as they are dequantized.
    """
    device = ranks.device
    calls: list[dict[str, Any]] = [
        {"x": x.to(device), "topk_idx": ids.to(device), "topk_weights": w.to(device), "layout": layout, "sync": True}
        for x, ids, w in given
    ]
    num_sms = how.pop("num_sms", None)
    routed = ranks.dispatch([{**call, "quantize": quantize, "num_sms": num_sms} for call in calls])
    ys = []
    for rank, here in enumerate(routed):
        local = torch.tensor(list(ranks.buffers[rank].local_experts), device=device)
        x = here.x
        if quantize is not None:
            flat = (here.x.flatten(0, -2), here.scales.flatten(0, -2))
            x = formats.dequantize(*flat, quantize, dtype=torch.bfloat16).view(*x.shape[:-1], HIDDEN)
        if layout == "flat":  # experts weight and add up the rows of their rank, in the order of k
            y = torch.zeros(x.shape, device=device)
            for k in range(TOPK):
                mine = here.topk_idx[:, k : k + 1]
                row = here.topk_weights[:, k : k + 1] * expert(x, local[mine[:, 0].clamp(min=0)]).float()
                y += torch.where(mine >= 0, row, 0.0)
            y = y.to(x.dtype)
        elif layout == "batched":
            y = expert(x, local.unsqueeze(1))
        else:
            numbers = torch.repeat_interleave(local, here.rows_per_expert.to(device))
            y = expert(x[: len(numbers)], numbers)
            y = torch.cat([y, y.new_zeros(len(x) - len(y), HIDDEN)])
        ys.append(y)
    options = {name: value for name, value in how.items() if name != "in_window"}
    combined = []
    for buffer, here, y in zip(ranks.buffers, routed, ys, strict=True):
        if how.get("in_window"):
            y = buffer.empty(here.handle).copy_(y)
        combined.append({"y": y, "handle": here.handle, "num_sms": num_sms, **options})
    outs = [out.cpu() for out in ranks.combine(combined)]
    return outs, rows_by_entry(ranks, routed, calls)


def batches(token: Token, count: int) -> list[tuple[list[Token], int]]:
    """Batches of `count` ranks with these tokens on rank 1, and where they begin there."""
    none = tokens(0, 0)

    def joined(*parts: Token) -> Token:
        return torch.cat([p[0] for p in parts]), torch.cat([p[1] for p in parts]), torch.cat([p[2] for p in parts])

    alone = [none, token, *[none] * (count - 2)]
    some = [tokens(7 * rank, rank) for rank in range(count)]
    some[1] = joined(tokens(3, 50), token)
    many = [tokens(MOST - rank, 60 + rank) for rank in range(count)]
    many[1] = joined(tokens(MOST - len(token[0]) - 5, 70), token, tokens(5, 71))
    return [(alone, 0), (some, 3), (many, MOST - len(token[0]) - 5)]


def check_other_tokens(layout: str, quantize: str | None, where: dict[str, Any], wires: Any, **sizes: Any) -> None:
    """The bits of rank 1's tokens, alone and among others, by few threads or blocks, with results in the window."""
    token, count = tokens(8, 1), 4
    for wire in wires:
        found = []
        with LocalBuffers(count, **SIZES, **sizes, **where) as ranks:
            if sizes.get("domain_ranks") is not None:
                shape = ranks.buffers[0].rounds.session.context.shape
                assert _native.goes_direct(shape, len(token[0])) and not _native.goes_direct(shape, MOST - 5)
            for number, (batch, first) in enumerate(batches(token, count)):
                how = {"num_sms": (None, 1, 3)[number], "in_window": number == 2, "wire": wire}
                outs, rows = results(ranks, batch, layout, quantize, **how)
                mine = {(t - first, k): row for (t, k), row in rows[1].items() if first <= t < first + 8}
                found.append((outs[1][first : first + 8], mine))
        for out, mine in found[1:]:
            assert torch.equal(out, found[0][0]), (layout, wire)
            assert mine == found[0][1] and len(mine) > 8, (layout, wire)


# Placements of `EXPERTS` experts: elsewhere, and with replicas.
def placements(count: int) -> list[Placement | None]:
    g = torch.Generator().manual_seed(count)
    order = torch.randperm(EXPERTS, generator=g).tolist()
    each = EXPERTS // count
    moved = [order[rank * each : (rank + 1) * each] for rank in range(count)]
    twice = [[*held, held[0], (held[0] + 5) % EXPERTS] for held in moved]
    return [None, Placement(moved), *(Placement(twice, choice=choice) for choice in ("token", "balanced"))]


def check_everything(layout: str, dtype: torch.dtype, where: dict[str, Any], counts: tuple[int, ...]) -> None:
    """The bits of tokens on other ranks, of other numbers of ranks, with experts elsewhere: those of plain torch."""
    given = tokens(24, 2, dtype)
    wanted = plain(given)
    for count in counts:
        for number, placement in enumerate(placements(count)):
            with LocalBuffers(count, **SIZES, **where, dtype=dtype, placement=placement) as ranks:
                shares = [number % count] * 24 if number % 2 else [t % count for t in range(24)]
                at = [[t for t in range(24) if shares[t] == rank] for rank in range(count)]
                mine = [(given[0][part], given[1][part], given[2][part]) for part in at]
                outs, _ = results(ranks, mine, layout, wire="rows", in_window=number == 2)
            for out, part in zip(outs, at, strict=True):
                assert torch.equal(out, wanted[part]), (layout, count, number)


WIRES = (None, "exact", "fp8", "int8")


@pytest.mark.parametrize("domain_ranks", few([None, 2], None))
@pytest.mark.parametrize(
    ("layout", "quantize"),
    few([("expert", None), ("batched", "fp8"), ("flat", None), ("expert", "mxfp8"), ("flat", "fp8")], ("expert", None)),
)
def test_other_tokens_change_nothing(
    layout: str, quantize: str | None, domain_ranks: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Across domains, rows of few tokens go direct, and those of many in turns through a ring."""
    monkeypatch.setattr(host, "ring_tokens", lambda *_: 32)
    monkeypatch.setattr(host, "direct_bytes", lambda *_: 32 << 10)
    wires = WIRES if layout == "flat" or domain_ranks is not None else (*WIRES, "rows")
    check_other_tokens(layout, quantize, HOST, wires, domain_ranks=domain_ranks)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("layout", ["expert", "batched"])
def test_nothing_changes_a_token_whose_rows_travel_unsummed(layout: str, dtype: torch.dtype) -> None:
    check_everything(layout, dtype, HOST, (1, 2, 4, 6))


@pytest.mark.parametrize("layout", ["expert", "batched", "flat"])
def test_the_rank_of_a_token_changes_nothing(layout: str) -> None:
    given, none = tokens(24, 2), tokens(0, 0)
    with LocalBuffers(4, **SIZES, **HOST) as ranks:
        for wire in WIRES:
            outs = []
            for rank in (0, 3):
                batch = [given if other == rank else none for other in range(4)]
                outs.append(results(ranks, batch, layout, wire=wire)[0][rank])
            assert torch.equal(*outs), wire


@pytest.mark.parametrize(("wire", "dtype"), [(None, torch.bfloat16), ("exact", torch.float32)])
def test_sums_of_ranks_depend_on_the_ranks(wire: str | None, dtype: torch.dtype) -> None:
    """Else the tests above would show nothing."""
    given, outs = tokens(24, 2, dtype), []
    for count in (1, 4):
        with LocalBuffers(count, **SIZES, **HOST, dtype=dtype) as ranks:
            batch = [given, *[tokens(0, 0, dtype)] * (count - 1)]
            outs.append(results(ranks, batch, "expert", wire=wire)[0][0])
    assert not torch.equal(*outs)
