"""Flight records of ranks that were never there, for tests of what is read from them."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from moecomm.errors import Aborted, BadInput, MoecommError, PeerLost, Timeout
from moecomm.observe.flight.record import flight_record
from moecomm.rounds import signature
from moecomm.rounds.expert_tables import AbsentEntries
from moecomm.rounds.flight import FlightRecorder


class FakeRank:
    """One rank of a Buffer: calls are recorded, and nothing else happens."""

    def __init__(self, rank: int, ranks: int, *, on_host: bool = True, begun: int | None = None) -> None:
        self.captures = False
        self.flight = FlightRecorder(rank, lambda: self.captures, on_host)
        session = SimpleNamespace(
            name="host",
            context=SimpleNamespace(timeout_ns=3_000_000_000),
            round_begun=lambda: self.begun,
            dead_peers=lambda: self.gone,
            read_counters=lambda: self.counters,
        )
        self.counters: bytes | None = None
        self.gone: dict[int, str] = {}
        self.begun = begun
        self.rounds: Any = SimpleNamespace(
            flight=self.flight,
            session=session,
            origin=SimpleNamespace(identity="0123456789abcdef"),
            rank=rank,
            num_ranks=ranks,
            masked=frozenset(),
            local_experts=range(2),
            experts=SimpleNamespace(absent=AbsentEntries(torch.device("cpu"))),
            hidden=64,
            on_cpu=on_host,
            unraised=lambda: None,
        )
        self.rank = rank

    def begin(self, op: str, layout: int = 1, tokens: int = 5) -> int:
        call = signature.pack("combine" if op == "combine" else "dispatch", layout=layout)
        return self.flight.begin(self.flight.kind(op, call, torch.bfloat16, 128), tokens)

    def make(self, calls: Sequence[tuple[str, int]]) -> None:
        for op, layout in calls:
            self.flight.end(self.begin(op, layout))

    def reject(self) -> None:
        self.flight.reject("dispatch", BadInput("x", "double", "bfloat16"))

    def fail(self, kind: type[Timeout | PeerLost | Aborted], peer: int, waited_s: float = 0) -> None:
        """Fail in the last call."""
        op, number = "dispatch", self.flight.rounds
        error: MoecommError = kind("failed", rank=self.rank, peer=peer, phase="header", op=op, round=number)
        record = {"code": "timeout", "op": op, "phase": "header", "rank": self.rank, "peer": peer, "round": number}
        self.flight.failed(error, {**record, "waited_ns": int(waited_s * 1e9)})
        self.flight.reasons.append(kind.__name__)

    def raise_in_the_program(self) -> None:
        self.flight.raised = "ValueError: no such thing"
        self.flight.reasons.append("ValueError")

    def record(self) -> dict[str, Any]:
        return flight_record(self.rounds)

    def write(self, folder: Path) -> None:
        (folder / f"moecomm-{self.rounds.origin.identity}-rank{self.rank}.json").write_text(json.dumps(self.record()))


def random_calls(choose: random.Random, count: int) -> list[tuple[str, int]]:
    return [(choose.choice(["dispatch", "combine", "reduce"]), choose.randrange(3)) for _ in range(count)]
