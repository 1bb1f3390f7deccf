"""FlashInfer's communicator, called in turn with rows, scales and routing as its interface wants, by a stand-in."""

from __future__ import annotations

import dataclasses
import sys
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch

from moecomm.base import formats
from moecomm_bench import flashinfer
from moecomm_bench.case import FORMATS, GIVEN
from moecomm_bench.ours import _OF_ALL, Ours
from moecomm_bench.peers import OtherLibraries

from ..conftest import Ranks
from .test_case import OF_PEERS

TOKENS = 6
PAYLOADS = ["bf16", "fp8", f"fp8{GIVEN}", *(name + GIVEN for name in FORMATS)]
CASE = dataclasses.replace(OF_PEERS, layouts=["flat"], others=["flashinfer"], payloads=[*PAYLOADS, "mxfp8"])


class Communicator:
    """A communicator that keeps the rows of each dispatch: a combine adds nothing."""

    def __init__(self, bootstrap: Any, params: Any, backend: str) -> None:
        assert (bootstrap.world_size, bootstrap.rank, backend) == (
            2,
            bootstrap.process_group.rank(),
            "nvlink_one_sided",
        )
        assert (params.num_experts, params.top_k, params.hidden_size) == (CASE.experts, CASE.topk, CASE.hidden)
        self.slots, self.dtype = torch.zeros(2 * params.max_tokens_per_rank, params.hidden_size), params.dtype
        self.rows: list[tuple[torch.Tensor, Any]] = []
        self.between = False

    def dispatch(
        self, rows: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, *, hidden_states_scale: Any
    ) -> Any:
        assert not self.between and ids.dtype == torch.int32 and weights.dtype == torch.float32
        self.between = True
        assert all(one.is_contiguous() and one.dim() == 2 for one in (rows, hidden_states_scale) if one is not None)
        self.rows.append((rows, hidden_states_scale))
        return SimpleNamespace(hidden_states=self.slots)

    def get_combine_input_buffer(self, dtype: torch.dtype) -> torch.Tensor:
        assert self.between and dtype == self.dtype
        return self.slots

    def combine(self, y: torch.Tensor, *, output: torch.Tensor) -> torch.Tensor:
        assert self.between and y is self.slots
        self.between = False
        return output.zero_()


def _cast(x: torch.Tensor, name: str) -> tuple[torch.Tensor, torch.Tensor | None]:
    return formats.quantize(x, name, global_scale=_OF_ALL.get(name))


def _measured(rank: int, group: Any) -> tuple[list[tuple[str, str, str]], dict[str, str]]:
    made: list[Communicator] = []

    def create(*given: Any) -> Communicator:
        made.append(Communicator(*given))
        return made[-1]

    module, interface = ModuleType("flashinfer"), ModuleType("flashinfer.moe_ep")
    module.__version__ = "9.8.7"  # type: ignore[attr-defined]
    module.moe_ep = interface  # type: ignore[attr-defined]
    interface.BootstrapConfig = interface.MoEEpCommParams = SimpleNamespace  # type: ignore[attr-defined]
    interface.create_communication = create  # type: ignore[attr-defined]
    device = torch.device("cpu")
    with (
        patch.dict(sys.modules, {"flashinfer": module, "flashinfer.moe_ep": interface}),
        patch.object(torch.cuda, "current_device", lambda: rank),
        Ours(CASE, group, device, TOKENS) as ours,
    ):
        peers = OtherLibraries(CASE, group, device)
        peers._ways = {name: calls for name, calls in peers._ways.items() if name == flashinfer.NAME}
        rows = peers.rows(ours, lambda text: None)
        (communicator,) = made
        for given in ours.inputs:
            for payload in PAYLOADS:
                out = flashinfer.pair(communicator, given, payload)()
                sent, scales = communicator.rows[-1]
                name = payload.removesuffix(GIVEN)
                cast = (given.x, None) if payload == "bf16" else _cast(given.x, name)
                assert torch.equal(sent.view(torch.uint8), cast[0].view(torch.uint8)) and out.dtype == torch.bfloat16
                assert (scales is None) == (cast[1] is None)
                assert scales is None or torch.equal(scales.view(torch.uint8), cast[1].view(torch.uint8))
        for row in rows:
            of_rows = CASE.wire_bytes("dispatch", row["payload"]) + CASE.wire_bytes("combine", "")
            assert row["wire_bytes"] == ours.traffic.wire() * of_rows
        return [(row["what"], row["payload"], row.get("why", "")) for row in rows], peers.versions


def test_pairs_are_timed_in_turn(ranks: Ranks) -> None:
    for found in ranks.run(2, _measured):
        assert found == ([("pair", payload, "") for payload in PAYLOADS], {"flashinfer": "9.8.7"})


def _absent(rank: int, group: Any) -> list[str]:
    device = torch.device("cpu")
    with patch.dict(sys.modules, {"flashinfer": None}), Ours(CASE, group, device, TOKENS) as ours:
        return [row["why"] for row in OtherLibraries(CASE, group, device).rows(ours, lambda text: None) if "why" in row]


def test_without_flashinfer_the_row_says_so(ranks: Ranks) -> None:
    for whys in ranks.run(2, _absent):
        assert len(whys) == 1 and whys[0].startswith("Unsupported: flashinfer: can't be imported")
