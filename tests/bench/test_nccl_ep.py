"""NCCL EP: called so that rows arrive as ours do and return summed, by a stand-in that reads the C structs."""

from __future__ import annotations

import ctypes
import dataclasses
from typing import Any

import pytest
import torch

from moecomm.errors import Unsupported
from moecomm_bench import nccl_ep_library
from moecomm_bench.case import FORMATS, GIVEN
from moecomm_bench.nccl_ep import MODES
from moecomm_bench.ours import Ours
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
