"""Rows of the benchmark as the model sees them: the operation, the load it predicts for it, and the time it took."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from moecomm.bench.case import Case
from moecomm.bench.ours import FP32_WIRE
from moecomm.simulate.domain import Load, Operation
from moecomm.simulate.model import fan_out
from moecomm.simulate.routing import Gate, Spread, spread


@dataclass(frozen=True)
class Result:
    """A result of dispatch-combine or sweep, on GPUs."""

    path: Path
    found: dict[str, Any]
    sha256: str

    @property
    def machine(self) -> str:
        """What it was measured on."""
        return str(self.found["machine"]["gpus"][0])

    @property
    def domains(self) -> int:
        """Of the ranks; results of one domain need not say so."""
        return int(self.found["case"].get("domains", 1))

    @property
    def ranks(self) -> int:
        """Of a domain."""
        return int(self.found["case"]["ranks"]) // self.domains

    @property
    def spread(self) -> Spread:
        """Of its tokens; the benchmark draws experts without groups."""
        case = self.found["case"]
        return _spread(Gate(case["experts"], case["topk"]), self.domains, self.ranks, case["skew"])

    def overlaps(self) -> list[dict[str, float]]:
        """Of rows with a GEMM beside them."""
        beside = [row.get("overlap", {}) for row in self.found["rows"]]
        return [overlap for overlap in beside if "kept" in overlap]


@dataclass(frozen=True)
class Part:
    """A dispatch or a combine, its row on the wire, and what the model says its busiest rank has to do."""

    operation: Operation
    row_bytes: int
    load: Load


@dataclass(frozen=True)
class Row:
    """A row of a result: one part, or the two of a pair.  `fits`: it is of the kind that lines are fitted to."""

    file: str
    what: str
    layout: str
    payload: str
    variant: str
    tokens: int
    sms_asked: int
    parts: tuple[Part, ...]
    us: float
    fits: bool


def read(path: Path) -> Result | None:
    """None for a file that is no such result."""
    data = path.read_bytes()
    try:
        found = json.loads(data)
        usable = found["benchmark"] == "dispatch-combine" and found["case"]["backend"] != "host"
    except (ValueError, KeyError, TypeError):
        return None
    return Result(path, found, hashlib.sha256(data).hexdigest()) if usable and found["machine"]["gpus"] else None


def rows_of(result: Result) -> Iterator[Row]:
    """moecomm's own rows that have a time."""
    case = result.found["case"]
    chained = case["mode"] == "graph" and not case["cold"] and not case["skew"] and result.domains == 1
    for row in result.found["rows"]:
        if row["who"] != "moecomm" or "us" not in row:
            continue
        about = {key: row[key] for key in ("what", "layout", "payload", "variant", "tokens", "sms_asked")}
        yield Row(
            file=result.path.name,
            **about,
            parts=tuple(_parts(row, case, result.spread)),
            us=row["us"]["p50"],
            fits=chained and row["what"] != "pair" and row["sms_asked"] == 0 and row["layout"] != "batched",
        )


def _parts(row: dict[str, Any], case: dict[str, Any], routed: Spread) -> Iterator[Part]:
    for what in ("dispatch", "combine") if row["what"] == "pair" else (row["what"],):
        operation = Operation(what, row["layout"], row["variant"] if what == "combine" else "")
        row_bytes = bytes_of(operation, row["payload"], case["hidden"])
        yield Part(operation, row_bytes, fan_out(operation, routed, row["tokens"], row_bytes))


def bytes_of(operation: Operation, payload: str, hidden: int) -> int:
    """Of a row on the wire, scales included: as the benchmark counts them."""
    if operation.what == "combine":
        return (4 if operation.variant == FP32_WIRE else 2) * hidden
    sizes = Case("", hidden, 1, 1, 1, "", [], [], [], [], "")
    return sizes.row_bytes(payload)


@lru_cache(maxsize=64)
def _spread(gate: Gate, domains: int, ranks: int, skew: float) -> Spread:
    return spread(gate, domains, ranks, skew)
