"""FlashInfer's communicator, called in turn with rows, scales and routing as its interface wants, by a stand-in."""

from __future__ import annotations

import dataclasses
import sys
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch

from moecomm.dispatch.reference import quantize
from moecomm_bench import flashinfer
from moecomm_bench.ours import Ours
from moecomm_bench.peers import OtherLibraries

from ..conftest import Ranks
from .test_case import OF_PEERS

TOKENS = 6
CASE = dataclasses.replace(OF_PEERS, layouts=["flat"], others=["flashinfer"])


class Communicator:
    """A communicator whose ranks keep their rows: a combine adds nothing."""

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
        self.rows.append((rows, hidden_states_scale))
        return SimpleNamespace(hidden_states=self.slots)

    def get_combine_input_buffer(self, dtype: torch.dtype) -> torch.Tensor:
        assert self.between and dtype == self.dtype
        return self.slots

    def combine(self, y: torch.Tensor, *, output: torch.Tensor) -> torch.Tensor:
        assert self.between and y is self.slots
        self.between = False
        return output.copy_(self.rows[-1][0])


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
            for payload in CASE.payloads:
                out = flashinfer.pair(communicator, given, payload)()
                sent, scales = communicator.rows[-1]
                cast = (given.x, None) if payload == "bf16" else quantize(given.x)
                assert torch.equal(sent.float(), cast[0].float()) and out.dtype == torch.bfloat16
                assert (scales is None) == (payload == "bf16") and (scales is None or torch.equal(scales, cast[1]))
        of_rows = CASE.wire_bytes("dispatch", "fp8") + CASE.wire_bytes("combine", "")
        assert rows[1]["wire_bytes"] == ours.traffic.wire() * of_rows
        return [(row["what"], row["payload"], row.get("why", "")) for row in rows], peers.versions


def test_pairs_are_timed_in_turn(ranks: Ranks) -> None:
    for found in ranks.run(2, _measured):
        assert found == ([("pair", "bf16", ""), ("pair", "fp8", "")], {"flashinfer": "9.8.7"})


def _absent(rank: int, group: Any) -> list[str]:
    device = torch.device("cpu")
    with patch.dict(sys.modules, {"flashinfer": None}), Ours(CASE, group, device, TOKENS) as ours:
        return [row["why"] for row in OtherLibraries(CASE, group, device).rows(ours, lambda text: None) if "why" in row]


def test_without_flashinfer_the_row_says_so(ranks: Ranks) -> None:
    for whys in ranks.run(2, _absent):
        assert len(whys) == 1 and whys[0].startswith("Unsupported: flashinfer: can't be imported")
