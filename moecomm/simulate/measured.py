"""Rows of the benchmark as the model sees them: the operation, the load it predicts for it, and the time it took."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from moecomm.bench.case import Case
from moecomm.bench.ours import FP32_WIRE
from moecomm.errors import BadInput
from moecomm.simulate.domain import Load, Operation
from moecomm.simulate.model import fan_out
from moecomm.simulate.routing import Gate, Spread, spread


@dataclass(frozen=True)
class Result:
    """A result of dispatch-combine or sweep, on GPUs; or what one of several backends has of a result.

    `alone`: there is no other in it.
    """

    path: Path
    found: dict[str, Any]
    sha256: str
    alone: bool = True

    @property
    def machine(self) -> str:
        """What it was measured on."""
        return str(self.found["machine"]["gpus"][0])

    @property
    def domains(self) -> int:
        """Of the ranks; results of one domain need not say so."""
        case = self.found["case"]
        return int(case["ranks"] // (case.get("domain_ranks") or case["ranks"]))

    @property
    def backend(self) -> str:
        """By its first name."""
        return str(self.found["case"]["backend"])

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
    """A dispatch or a combine, its row on the wire and that of a relay, and what the model says its busiest rank has to
    do.
    """

    operation: Operation
    row_bytes: int
    slow_row_bytes: int
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
    straight: bool  # it leaves its domain without relays
    us: float
    fits: bool


def read(path: Path) -> list[Result]:
    """One of a file of one backend, one a backend and number of domains of a file of several; none of other JSON.

    Raises BadInput for what is no JSON.
    """
    data = path.read_bytes()
    try:
        found = json.loads(data)
    except ValueError:
        raise BadInput("results", str(path), "JSON of the benchmark") from None
    try:
        alone, several = (found["benchmark"] == name for name in ("dispatch-combine", "backends"))
        if not (alone or several) or not found["machine"]["gpus"] or found["case"].get("backend") == "host":
            return []
    except (KeyError, TypeError):
        return []
    digest = hashlib.sha256(data).hexdigest()
    if alone:
        return [Result(path, found, digest)]
    parts = [(way, [row for row in found["rows"] if way.items() <= row.items()]) for way in found["ways"]]
    return [
        Result(path, {**found, "case": {**found["case"], **way}, "rows": rows}, digest, alone=False)
        for way, rows in parts
        if way["backend"] != "host"
    ]


def links(paths: Iterable[Path]) -> dict[tuple[str, str], tuple[float, float]]:
    """(GB/s, microseconds) of put + signal by machine and backend: of the fastest size, and of the smallest.

    From results of latency through several backends.
    """
    found = {}
    for path in paths:
        try:
            result = json.loads(path.read_bytes())
            rows = result["rows"] if result["benchmark"] == "latency-backends" and result["machine"]["gpus"] else []
        except (ValueError, KeyError, TypeError):
            continue
        for backend in {row["backend"] for row in rows if "us" in row}:
            own = [row for row in rows if row["backend"] == backend and "us" in row]
            smallest = min(own, key=lambda row: int(row["bytes"]))
            terms = max(float(row["gbs"]) for row in own), float(smallest["us"]["p50"])
            found[str(result["machine"]["gpus"][0]), str(backend)] = terms
    return found


def rows_of(result: Result) -> Iterator[Row]:
    """moecomm's own rows that have a time."""
    case = result.found["case"]
    chained = case["mode"] == "graph" and not case["cold"] and not case["skew"] and result.domains == 1 and result.alone
    for row in result.found["rows"]:
        if "us" not in row or row["who"] != "moecomm":
            continue
        about = {key: row[key] for key in ("what", "layout", "payload", "variant", "tokens", "sms_asked")}
        yield Row(
            file=result.path.name,
            **about,
            parts=tuple(_parts(row, case, result.spread)),
            straight=row.get("straight", False),
            us=row["us"]["p50"],
            fits=chained and row["what"] != "pair" and row["sms_asked"] == 0 and row["layout"] != "batched",
        )


def _parts(row: dict[str, Any], case: dict[str, Any], routed: Spread) -> Iterator[Part]:
    for what in ("dispatch", "combine") if row["what"] == "pair" else (row["what"],):
        operation = Operation(what, row["layout"], row["variant"] if what == "combine" else "")
        row_bytes = bytes_of(operation, row["payload"], case["hidden"])
        slow = slow_bytes_of(operation, row["payload"], case["hidden"])
        yield Part(operation, row_bytes, slow, fan_out(operation, routed, row["tokens"], row_bytes))


def bytes_of(operation: Operation, payload: str, hidden: int) -> int:
    """Of a row on the wire, scales included; not what goes beside it (Case.beside_bytes)."""
    if operation.what == "combine":
        return (4 if operation.variant == FP32_WIRE else 2) * hidden
    sizes = Case("", hidden, 1, 1, 1, "host", [], [], [], [], "")
    return sizes.row_bytes(payload)


def slow_bytes_of(operation: Operation, payload: str, hidden: int, wire: str = "fp32") -> int:
    """The same of what a relay sends to another domain: of combine a sum, of flat rows as well."""
    if operation == Operation("combine", "flat", operation.variant):
        return (4 if wire == "fp32" else 2) * hidden
    return bytes_of(operation, payload, hidden)


@lru_cache(maxsize=64)
def _spread(gate: Gate, domains: int, ranks: int, skew: float) -> Spread:
    return spread(gate, domains, ranks, skew)
