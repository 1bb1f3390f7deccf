"""pplx-kernels: called so that rows arrive as ours do and return weighted, by a stand-in that checks the turns."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import sys
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist

from moecomm.dispatch.reference import quantize
from moecomm_bench import beside, pplx
from moecomm_bench.ours import Input, Ours
from moecomm_bench.peers import OtherLibraries

from ..conftest import Ranks
from .test_case import OF_PEERS

TOKENS = 6
CASE = dataclasses.replace(OF_PEERS, layouts=["batched"], others=["pplx"])


class AllToAll:
    """The library by its interface, on CPUs: rows of an expert by source rank, each rank's by token."""

    made: list[AllToAll]

    def __init__(self, **sizes: Any) -> None:
        self.sizes, self.closed, self.between = sizes, False, False
        self.rows: list[tuple[int, int, int, int]] = []  # source, token, local expert, slot
        type(self).made.append(self)

    @classmethod
    def intranode(cls, **sizes: Any) -> AllToAll:
        return cls(**sizes)

    def _everybody(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        mine = tensor.contiguous().view(torch.uint8)
        found = [torch.empty_like(mine) for _ in range(self.sizes["world_size"])]
        dist.all_gather(found, mine)
        return [one.view(tensor.dtype) for one in found]

    def dispatch(
        self,
        *,
        out_expert_num_tokens: torch.Tensor,
        out_expert_x: torch.Tensor,
        out_expert_x_scale: torch.Tensor | None,
        dp_x: torch.Tensor,
        dp_x_scale: torch.Tensor | None,
        indices: torch.Tensor,
        bound_m: None,
    ) -> None:
        sizes, local = self.sizes, len(out_expert_num_tokens)
        assert not self.between and not self.closed, "a dispatch after a dispatch appends to its rows"
        self.between = True
        assert indices.dtype == torch.uint32 and out_expert_num_tokens.dtype == torch.int32
        assert dp_x.dtype == out_expert_x.dtype and dp_x.nbytes == len(dp_x) * sizes["hidden_dim_bytes"]
        assert all(tensor.is_contiguous() for tensor in (out_expert_x, dp_x, indices))
        sent = {out_expert_x: dp_x}
        if sizes["hidden_dim_scale_bytes"]:
            assert out_expert_x_scale is not None and dp_x_scale is not None
            assert dp_x_scale.nbytes == len(dp_x) * sizes["hidden_dim_scale_bytes"]
            sent[out_expert_x_scale] = dp_x_scale
        else:
            assert out_expert_x_scale is None and dp_x_scale is None
        out_expert_num_tokens.zero_()
        for source, ids in enumerate(self._everybody(indices)):
            for token, row in enumerate(ids.tolist()):
                for expert in row:
                    if expert // local == sizes["rank"]:
                        slot = int(out_expert_num_tokens[expert % local])
                        self.rows.append((source, token, expert % local, slot))
                        out_expert_num_tokens[expert % local] += 1
        for out, rows in sent.items():
            everybody = [one.view(torch.uint8) for one in self._everybody(rows)]
            for source, token, expert, slot in self.rows:
                out.view(torch.uint8)[expert, slot] = everybody[source][token]

    def combine(
        self,
        *,
        out_tokens: torch.Tensor,
        indices: torch.Tensor,
        weights: torch.Tensor,
        expert_y: torch.Tensor,
        bound_m: None,
    ) -> None:
        assert self.between and not self.closed, "a combine sends back the rows of a dispatch"
        assert weights.dtype == torch.float32 and expert_y.dtype == out_tokens.dtype == torch.bfloat16
        local, ids, total = len(expert_y), indices.tolist(), torch.zeros(out_tokens.shape)
        returned = expert_y.new_zeros(self.sizes["world_size"], len(ids), local, expert_y.shape[2])
        for source, token, expert, slot in self.rows:
            returned[source, token, expert] = expert_y[expert, slot]
        for rank, rows in enumerate(self._everybody(returned)):
            mine = rows[self.sizes["rank"]]
            for token, row in enumerate(ids):
                for choice, expert in enumerate(row):
                    if expert // local == rank:
                        total[token] += weights[token, choice] * mine[token, expert % local].float()
        out_tokens.copy_(total)
        self.rows, self.between = [], False

    def destroy(self) -> None:
        self.closed = True


def _package(*, loads: bool = True) -> Any:
    AllToAll.made = []
    package: Any = ModuleType("pplx_kernels")
    package.AllToAll = AllToAll
    package.ops = SimpleNamespace(_ops=SimpleNamespace(**{"all_to_all_intranode_create": None} if loads else {}))
    return package


def _installed(package: Any) -> Any:
    return patch.dict(sys.modules, {"pplx_kernels": package})


def _right(exchange: pplx.PplxExchange, ours: Ours, given: Input) -> list[bool]:
    """Call a pair, and say whether rows arrive as those of our layout `expert`, and sums return."""
    out, count = exchange.pair(given)(), exchange.counts.tolist()
    routed = ours.buffer.dispatch(given.x, given.topk_idx, given.topk_weights, layout="expert")
    want = routed.x[: int(routed.num_rows)]
    got = torch.cat([slots[:number] for slots, number in zip(exchange.rows, count, strict=True)])
    if exchange.scales is None:
        sums = given.x.float() * given.topk_weights.sum(1, keepdim=True)
        return [torch.equal(got, want), torch.allclose(out.float(), sums, rtol=2**-7)]
    scales = torch.cat([slots[:number] for slots, number in zip(exchange.scales, count, strict=True)])
    cast, narrow = quantize(want)
    return [torch.equal(got.float(), cast.float()), torch.equal(scales, torch.nn.functional.pad(narrow, (0, 2)))]


def _measured(rank: int, group: Any) -> list[Any]:
    device = torch.device("cpu")
    with (
        _installed(_package()),
        patch.object(importlib.metadata, "version", {"pplx-kernels": "1.2.3"}.get),
        Ours(CASE, group, device, TOKENS) as ours,
    ):
        peers = OtherLibraries(CASE, group, device)
        peers._ways = {name: calls for name, calls in peers._ways.items() if name == pplx.NAME}
        rows = [peers.rows(ours, lambda text: None) for _ in range(2)][1]
        abouts = [(row["what"], row["layout"], row["payload"], row.get("why", "")) for row in rows]
        of_rows = CASE.wire_bytes("dispatch", "fp8") + CASE.wire_bytes("combine", "")
        moved = rows[1]["moved_bytes"] == ours.traffic.wire(by_expert=True) * of_rows
        closed = [one.closed for one in AllToAll.made]
        fine = []
        for payload in CASE.payloads:
            exchange = pplx.PplxExchange(AllToAll, CASE, payload, TOKENS, device)
            fine += [_right(exchange, ours, given) for given in ours.inputs]
        sizes = [(one.sizes["hidden_dim_bytes"], one.sizes["hidden_dim_scale_bytes"]) for one in AllToAll.made[-2:]]
    return [abouts, moved, closed, fine, sizes, peers.versions]


def test_rows_arrive_as_ours_do_and_come_home_weighted(ranks: Ranks) -> None:
    for abouts, moved, closed, fine, sizes, versions in ranks.run(2, _measured):
        assert abouts == [("pair", "batched", payload, "") for payload in ("bf16", "fp8")]
        assert moved and versions == {"pplx": "1.2.3"}
        assert closed == [True, True, False, False]  # those of a size, when the next is opened
        assert fine == [[True, True]] * 2 * CASE.inputs
        assert sizes == [(512, 0), (256, 16)]  # scales in fours, of which 256 columns fill two


def _refused(rank: int, group: Any) -> list[Any]:
    device, found = torch.device("cpu"), []
    many = dataclasses.replace(CASE, tokens=[129])
    narrow = dataclasses.replace(CASE, hidden=264)
    for case, package in ((CASE, None), (CASE, _package(loads=False)), (narrow, _package()), (many, _package())):
        with (
            _installed(package),
            patch.object(importlib.metadata, "version", {"pplx-kernels": "1.2.3"}.get),
            Ours(case, group, device, max(case.tokens)) as ours,
        ):
            rows = OtherLibraries(case, group, device).rows(ours, lambda text: None)
            found.append([row["why"] for row in rows if row["who"] == pplx.NAME])
    return [found, AllToAll.made]


def test_what_is_absent_or_would_end_the_process_is_named(ranks: Ranks) -> None:
    for (absent, broken, narrow, many), made in ranks.run(2, _refused):
        assert len(absent) == 1 and absent[0].startswith("Unsupported: pplx: can't be imported")
        assert broken == ["Unsupported: pplx: its library can't be loaded"]
        assert narrow == [
            "Unsupported: pplx: takes at least 2 ranks and a multiple of 16 columns, not 2 ranks and 264 columns"
        ]
        assert many == [] and made == []


def test_its_pairs_stand_beside_ours_that_round_once() -> None:
    us = {"p50": 40.0, "p99": 41.0}
    about = {"tokens": 128, "layout": "batched", "what": "pair", "payload": "fp8", "us": us, "alone_us": us}
    about |= {"sms": 0, "sms_asked": 0}
    rows = [{**about, "who": "pplx", "variant": ""}, {**about, "who": "moecomm", "variant": "fp32 wire"}]
    case = {"tokens": [128], "layouts": ["batched"], "payloads": ["fp8"]}
    result = {"case": case, "rows": [*rows, {"who": "nccl_ep", "why": "absent"}]}
    (found,) = beside.operations(result)
    assert (found.variant, found.ratio, sorted(found.best)) == ("fp32 wire", 1.0, ["moecomm", "pplx-kernels"])
    assert beside.libraries(result) == ["moecomm", "pplx-kernels"] and found.ours is None


def test_the_number_of_sms_of_the_table_counts_and_the_fastest_is_beside_it() -> None:
    about = {"tokens": 4096, "layout": "flat", "what": "combine", "payload": ""}
    rows = [
        {
            **about,
            "who": who,
            "variant": variant,
            "sms": sms,
            "sms_asked": asked,
            "us": {"p50": us},
            "alone_us": {"p50": us},
        }
        for who, variant, sms, asked, us in (
            ("moecomm", "y outside", 64, 0, 50.0),
            ("moecomm", "y outside", 128, 128, 40.0),
            ("moecomm", "y in the window", 16, 16, 30.0),
            ("nccl_ep", "", 16, 0, 60.0),
            ("nccl_ep", "", 32, 0, 45.0),
        )
    ]
    case = {"tokens": [4096], "layouts": ["flat"], "payloads": ["bf16"]}
    (found,) = beside.operations({"case": case, "rows": rows})
    assert (found.variant, found.ratio, found.best["NCCL EP"].sms) == ("y outside", 0.9, 32)
    assert found.best["moecomm"].sms == 64 and found.ours == beside.Best(40.0, 40.0, 128)
