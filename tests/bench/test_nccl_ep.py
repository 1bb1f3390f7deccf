"""NCCL EP: called so that rows arrive as ours do and return summed, by a stand-in that reads the C structs."""

from __future__ import annotations

import ctypes
import dataclasses
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from moecomm.base import formats
from moecomm.dispatch.reference import quantize
from moecomm.errors import Unsupported
from moecomm_bench import nccl_ep, nccl_ep_library
from moecomm_bench.case import FORMATS, GIVEN
from moecomm_bench.nccl_ep import MODES, Mode
from moecomm_bench.ours import _OF_ALL, Ours
from moecomm_bench.peers import OtherLibraries

from ..conftest import Ranks
from .test_case import OF_PEERS

TOKENS = 6
FORWARDED = [f"fp8{GIVEN}", *(name + GIVEN for name in FORMATS if name != "fp8_tensor")]
CASE = dataclasses.replace(
    OF_PEERS,
    hidden=512,
    experts=8,
    layouts=["flat", "expert", "batched"],
    payloads=["bf16", "fp8", *FORWARDED, f"fp8_tensor{GIVEN}", "mxfp8"],
    others=["nccl_ep"],
)
_DTYPES = {code: dtype for dtype, code in nccl_ep_library._DTYPES.items()}


def _tensor(pointer: Any) -> torch.Tensor:
    """The tensor that a struct describes: a copy of nothing."""
    about = pointer.contents if hasattr(pointer, "contents") else pointer._obj
    assert (about.size, about.magic) == (48, 0xCAFECAFE)
    shape, dtype = about.sizes[: about.ndim], _DTYPES[about.datatype]
    nbytes = torch.empty(shape, dtype=dtype, device="meta").nbytes
    return nccl_ep_library._bytes_at(about.data, nbytes, torch.device("cpu")).view(dtype).view(shape)


def _given(reference: Any, *names: str) -> dict[str, torch.Tensor]:
    """The tensors of a struct that are there."""
    struct = reference._obj
    assert (struct.size, struct.magic) == (ctypes.sizeof(struct), 0xC00FFFEE)
    return {name: _tensor(getattr(struct, name)) for name in names if getattr(struct, name)}


class Library:
    """NCCL EP by nccl_ep.h: rows of a source in order of its tokens, sources in order."""

    version = "1.2.3"

    def __init__(self, group: Any) -> None:
        self.ranks, self.names = group, []
        self.groups: list[Any] = []
        self.handles: list[dict[str, Any]] = []
        self.memory: dict[int, Any] = {}

    def __call__(self, name: str, *given: Any) -> None:
        self.names.append(name)
        getattr(self, name)(*given)

    def ncclMemAlloc(self, out: Any, size: Any) -> None:
        made = (ctypes.c_uint8 * size.value)()
        self.memory[ctypes.addressof(made)] = made
        out._obj.value = ctypes.addressof(made)

    def ncclMemFree(self, memory: Any) -> None:
        del self.memory[memory.value]

    def ncclCommWindowRegister(self, comm: Any, memory: Any, size: Any, out: Any, flags: int) -> None:
        assert (comm.value, flags) == (7, 1)
        out._obj.value = memory.value

    def ncclCommWindowDeregister(self, comm: Any, window: Any) -> None:
        assert window.value in self.memory

    def ncclEpCreateGroup(self, out: Any, comm: Any, config: Any) -> None:
        self.groups.append(config._obj)
        out._obj.value = len(self.groups)

    def ncclEpGroupDestroy(self, group: Any) -> None:
        assert group.value == len(self.groups)

    def ncclEpCreateHandle(
        self, out: Any, group: Any, layout: int, ids: Any, info: Any, config: Any, stream: Any
    ) -> None:
        about = self.groups[group.value - 1]
        assert (info is None) == (about.algorithm == 0)  # low-latency takes it at dispatch
        self.handles.append({"config": about, "layout": layout})
        out._obj.value = len(self.handles)
        self.ncclEpUpdateHandle(out._obj, ids, info, stream)

    def ncclEpHandleDestroy(self, handle: Any) -> None:
        self.handles[handle.value - 1]["config"] = None

    def ncclEpUpdateHandle(self, handle: Any, ids: Any, info: Any, stream: Any) -> None:
        self.handles[handle.value - 1] |= {"ids": _tensor(ids)} | ({} if info is None else {"info": info})

    def _everybody(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        mine = tensor.contiguous().view(torch.uint8)
        found = [torch.empty_like(mine) for _ in range(self.ranks.size())]
        dist.all_gather(found, mine, group=self.ranks)
        return [one.view(tensor.dtype) for one in found]

    def _places(self, handle: dict[str, Any], rank: int, ids: list[torch.Tensor]) -> list[tuple[int, int, int, Any]]:
        """(source, token, expert or -1, index of the row) of all rows of a rank."""
        config, local = handle["config"], CASE.experts // self.ranks.size()
        most, by_expert = config.max_dispatch_tokens_per_rank, handle["layout"] == nccl_ep_library.EXPERT_MAJOR
        entries = [
            (source, token, int(expert) % local)
            for source, theirs in enumerate(ids)
            for token, row in enumerate(theirs)
            for expert in row
            if int(expert) // local == rank
        ]
        if not by_expert:
            rows = sorted({(source, token) for source, token, _ in entries})
            places: list[Any] = list(range(len(rows)))
            if config.algorithm == 0:
                before = [sum(source < other for source, _ in rows) for other in range(len(ids))]
                places = [(source, at - before[source]) for at, (source, _) in enumerate(rows)]
            return [(*row, -1, place) for row, place in zip(rows, places, strict=True)]
        entries.sort(key=lambda entry: (entry[2], entry[:2]))
        if config.algorithm == 1:
            return [(*entry, at) for at, entry in enumerate(entries)]
        starts = {expert: sum(entry[2] < expert for entry in entries) for expert in range(local)}
        assert most == TOKENS
        return [(*entry, (entry[2], at - starts[entry[2]])) for at, entry in enumerate(entries)]

    def ncclEpDispatch(self, handle: Any, given: Any, arriving: Any, info: Any, config: Any, stream: Any) -> None:
        about = self.handles[handle.value - 1]
        low_latency, recipe = about["config"].algorithm == 0, config._obj.quant_recipe
        sent = _given(given, "tokens", "topk_weights", "scales")
        out = _given(arriving, "tokens", "topk_weights", "scales", "topk_idx")
        by_expert = about["layout"] == nccl_ep_library.EXPERT_MAJOR
        assert ("topk_weights" in sent) == (not (low_latency and by_expert))
        assert ("topk_idx" in out) == (not by_expert)
        assert ("scales" in sent) == (recipe == 1) and ("scales" in out) == (recipe != 0)
        assert (info is not None) == low_latency
        assert arriving._obj.tokens.contents.window is not None or low_latency  # high throughput: windows alone
        if recipe == 2:
            sent["tokens"], sent["scales"] = quantize(sent["tokens"])
        if recipe == 1:
            _check_forwarded(sent, out)
            sent, out = _as_bytes(sent), _as_bytes(out)
        everybody = {name: self._everybody(sent[name]) for name in sent if name != "topk_weights"}
        ids = self._everybody(about["ids"])
        places = self._places(about, self.ranks.rank(), ids)
        for source, token, _, place in places:
            for name, rows in everybody.items():
                out[name][place] = rows[source][token]
        counts = _given(info if low_latency else about["info"], "expert_counters", "src_rank_counters")
        local = CASE.experts // self.ranks.size()
        owned = torch.cat(ids).flatten() - self.ranks.rank() * local
        if low_latency and not by_expert:
            sources = torch.tensor([source for source, *_ in places])
            counts["src_rank_counters"].copy_(sources.bincount(minlength=self.ranks.size()))
        else:
            counts["expert_counters"].copy_(owned[(owned >= 0) & (owned < local)].bincount(minlength=local))

    def ncclEpCombine(self, handle: Any, given: Any, sums: Any, config: Any, stream: Any) -> None:
        about = self.handles[handle.value - 1]
        out = _given(sums, "tokens", "topk_weights")
        weighs = about["config"].algorithm == 0 and about["layout"] == nccl_ep_library.EXPERT_MAJOR
        assert ("topk_weights" in out) == weighs
        rows, ids = self._everybody(_given(given, "tokens")["tokens"]), self._everybody(about["ids"])
        total = torch.zeros(out["tokens"].shape)
        local, me = CASE.experts // self.ranks.size(), self.ranks.rank()
        for rank, theirs in enumerate(rows):
            for source, token, expert, place in self._places(about, rank, ids):
                if source == me:
                    row = theirs[place].float()
                    if weighs:
                        row = row * out["topk_weights"][token][ids[me][token] == rank * local + expert]
                    total[token] += row
        out["tokens"].copy_(total)


def _check_forwarded(sent: dict[str, torch.Tensor], out: dict[str, torch.Tensor]) -> None:
    """Check what nccl_ep.h wants of rows and scales that are forwarded."""
    floats = {torch.float32, torch.bfloat16, torch.float8_e4m3fn}
    assert sent["tokens"].dtype in floats | {torch.float4_e2m1fn_x2} and sent["scales"].dtype in floats | {torch.uint8}
    for name in ("tokens", "scales"):
        assert sent[name].dtype == out[name].dtype and sent[name].shape[-1] == out[name].shape[-1]
        assert sent[name].shape[-1] * sent[name].itemsize % 16 == 0


def _as_bytes(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: one if one.dtype == torch.int64 else one.view(torch.uint8) for name, one in tensors.items()}


def _values(mode: Mode, one: Any, payload: str) -> torch.Tensor:
    """The rows that have arrived, in order, without empty slots."""
    if payload in FORWARDED:
        return _dequantized(mode, one, payload)
    rows = one.rows[payload].held.float()
    if payload == "fp8":
        rows = (rows.view(*rows.shape[:-1], -1, 128) * one.scales["fp8"].held.unsqueeze(-1)).view(rows.shape)
    return _arrived(mode, one, rows)


def _dequantized(mode: Mode, one: Any, payload: str) -> torch.Tensor:
    name = payload.removesuffix(GIVEN)
    fmt = formats.FORMATS[name]
    assert fmt.scales is not None
    rows = _arrived(mode, one, one.rows[payload].held.view(torch.uint8)).contiguous().view(fmt.values)
    scales = _arrived(mode, one, one.scales[payload].held.view(torch.uint8))[
        :, : fmt.scale_columns(512) * fmt.scales.itemsize
    ]
    return formats.dequantize(rows, scales.contiguous().view(fmt.scales), name, global_scale=_OF_ALL.get(name))


def _arrived(mode: Mode, one: Any, rows: torch.Tensor) -> torch.Tensor:
    counts = one.counts.held.tolist()
    if mode.low_latency:
        return torch.cat([slots[:count] for slots, count in zip(rows, counts, strict=True)])
    return rows


def _round(rank: int, group: Any, name: str) -> list[Any]:
    mode, library = MODES[name], Library(group)
    with (
        patch.object(nccl_ep, "Library", lambda: library),
        patch.object(nccl_ep, "nccl_group", lambda: group),
        patch.object(nccl_ep, "_communicator", lambda ranks, device: 7),
        Ours(CASE, group, torch.device("cpu"), TOKENS) as ours,
    ):
        peer = nccl_ep.NcclEP(CASE)
        ways = peer.ways()
        assert [sms for sms in (32, 64, 128) if f"{name} {sms} SMs" in ways] == (
            [] if mode.low_latency else [32, 64, 128]
        )
        with_32 = [] if mode.low_latency else ways[f"{name} 32 SMs"](ours)
        assert {(one.about["who"], one.about["sms"]) for one in with_32} == ({(name, 32)} if with_32 else set())
        timed = ways[name](ours)
        abouts = [(one.about["what"], one.about["payload"], one.about["layout"], one.by_expert) for one in timed]
        fine = []
        for given, one in zip(ours.inputs, peer.rounds(mode, ours.inputs), strict=True):
            layout = "flat" if mode.ours == "flat" else "expert"  # the rows of batched, without its empty slots
            routed = ours.buffer.dispatch(given.x, given.topk_idx, given.topk_weights, layout=layout)
            sent = routed.x[: int(routed.num_rows)]
            for payload in ("fp8", *FORWARDED, "bf16"):
                name = payload.removesuffix(GIVEN)
                of_all = {"global_scale": _OF_ALL.get(name)}
                cast = () if payload == "bf16" else formats.quantize(sent, name, **of_all)
                want = formats.dequantize(*cast, name, **of_all) if cast else sent.float()
                one.dispatch(payload)
                fine.append(torch.equal(_values(mode, one, payload)[: len(want)], want))
            local = CASE.experts // CASE.ranks
            ranks = (given.topk_idx.unsqueeze(2) // local == torch.arange(CASE.ranks)).any(1).sum(1, keepdim=True)
            weight = given.topk_weights.sum(1, keepdim=True) if mode.low_latency else CASE.topk
            wanted = given.x.float() * (ranks if mode.ours == "flat" else weight)
            fine.append(torch.allclose(one.combine().float(), wanted, rtol=2**-8))
    configs = [
        (one.algorithm, one.max_dispatch_tokens_per_rank, one.zero_copy, one.max_num_sms) for one in library.groups
    ]
    closed = [library.names.count(call) for call in ("ncclEpCreateGroup", "ncclEpGroupDestroy")]
    return [abouts, fine, configs, closed, timed[0].about["version"]]


@pytest.mark.parametrize("name", MODES)
def test_rows_arrive_as_ours_do_and_come_home_summed(ranks: Ranks, name: str) -> None:
    mode = MODES[name]
    config = (0, 6, 0, 0) if mode.low_latency else (1, 8, 2, 0)  # high throughput: tokens in fours
    before = [] if mode.low_latency else [(*config[:3], 32)]
    for abouts, fine, configs, closed, version in ranks.run(2, _round, name):
        assert abouts == [
            *(("dispatch", payload, mode.ours, False) for payload in ("bf16", "fp8", *FORWARDED)),
            ("combine", "", mode.ours, name == "nccl_ep low-latency"),
        ]
        assert fine == [True] * 2 * (3 + len(FORWARDED))
        assert configs == [*before, *[config] * 2]
        assert closed == [len(configs), len(configs) - 1]  # one at a time
        assert version == "1.2.3"


def _absent(rank: int, group: Any) -> list[tuple[str, str]]:
    peers = OtherLibraries(CASE, group, torch.device("cpu"))
    with Ours(CASE, group, torch.device("cpu"), TOKENS) as ours:
        return [(row["who"], row["why"]) for row in peers.rows(ours, lambda text: None) if "why" in row]


def test_a_library_that_is_absent_is_named(ranks: Ranks) -> None:
    for found in ranks.run(2, _absent):
        more = [f"{name} {sms} SMs" for name in list(MODES)[1:] for sms in (32, 64, 128)]
        assert sorted(who for who, _ in found) == sorted([*MODES, *more])
        assert all(why.startswith("Unsupported: nccl_ep: libnccl_ep.so: cannot open") for _, why in found)


@pytest.mark.parametrize(
    ("name", "sizes", "why"),
    [
        ("nccl_ep low-latency", {"hidden": 2880}, "128 columns"),
        ("nccl_ep", {"experts": 6}, "4 experts"),
        ("nccl_ep expert-major", {"experts": 384}, "power of two"),
    ],
)
def test_sizes_that_would_end_the_process_are_unsupported(name: str, sizes: dict[str, int], why: str) -> None:
    with pytest.raises(Unsupported, match=why):
        MODES[name].check(dataclasses.replace(CASE, **sizes))


def test_structs_have_the_sizes_of_the_header() -> None:
    names = ("NcclEpTensor", "GroupConfig", "LayoutInfo", "DispatchInputs", "DispatchOutputs", "DispatchConfig")
    sizes = [ctypes.sizeof(getattr(nccl_ep_library, name)) for name in (*names, "CombineInputs", "CombineOutputs")]
    assert sizes == [48, 112, 48, 32, 40, 24, 32, 24]
    assert nccl_ep_library.GroupConfig.timeout_ns.offset == 88


def test_a_status_that_is_not_success_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    class Functions:
        def __getattr__(self, name: str) -> Any:
            def function(*given: Any) -> Any:
                return b"invalid usage" if name == "ncclGetErrorString" else 5

            return function

    monkeypatch.setattr(nccl_ep_library.ctypes, "CDLL", lambda name: Functions())
    with pytest.raises(RuntimeError, match="ncclEpGetVersion: invalid usage"):
        nccl_ep_library.Library()
