"""Rows of the benchmark in terms of the model: the operation, its predicted load, and its measured time."""

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
    """A result of dispatch-combine or sweep on GPUs, or the rows of one backend in a result of several.

    `alone` is False in the second case.
    """

    path: Path
    found: dict[str, Any]
    sha256: str
    alone: bool = True

    @property
    def machine(self) -> str:
        """Name of the GPU."""
        return str(self.found["machine"]["gpus"][0])

    @property
    def domains(self) -> int:
        """Number of domains; results of one domain may omit it."""
        case = self.found["case"]
        return int(case["ranks"] // (case.get("domain_ranks") or case["ranks"]))

    @property
    def backend(self) -> str:
        """Name of the backend."""
        return str(self.found["case"]["backend"])

    @property
    def ranks(self) -> int:
        """Number of ranks of a domain."""
        return int(self.found["case"]["ranks"]) // self.domains

    @property
    def spread(self) -> Spread:
        """The routing of its tokens; the benchmark draws experts without groups."""
        case = self.found["case"]
        return _spread(Gate(case["experts"], case["topk"]), self.domains, self.ranks, case["skew"])

    def overlaps(self) -> list[dict[str, float]]:
        """Return the `overlap` entries of rows with a concurrent GEMM."""
        beside = [row.get("overlap", {}) for row in self.found["rows"]]
        return [overlap for overlap in beside if "kept" in overlap]


@dataclass(frozen=True)
class Part:
    """A dispatch or a combine, with the bytes of a row inside a domain and between domains, and its predicted load."""

    operation: Operation
    row_bytes: int
    slow_row_bytes: int
    load: Load


@dataclass(frozen=True)
class Row:
    """A row of a result: one part, or the two parts of a pair. `fits` marks rows that lines are fitted to."""

    file: str
    what: str
    layout: str
    payload: str
    variant: str
    tokens: int
    sms_asked: int
    parts: tuple[Part, ...]
    straight: bool  # rows go to other domains without a forwarder
    us: float
    fits: bool


def read(path: Path) -> list[Result]:
    """Read the results in a file: one for a single backend, else one for each backend and number of domains.

    Other JSON, and results of the host backend, give none.

    Raises:
        BadInput: the file is not JSON.
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
    """Return (GB/s, microseconds) of put + signal by (machine, backend), from results of latency over several backends.

    Bandwidth is that of the fastest size, latency that of the smallest.
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
    """Yield moecomm's own rows that have a time."""
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
    """Return the bytes of a row on the wire, scales included, without its metadata (Case.beside_bytes)."""
    if operation.what == "combine":
        return (4 if operation.variant == FP32_WIRE else 2) * hidden
    sizes = Case("", hidden, 1, 1, 1, "host", [], [], [], [], "")
    return sizes.row_bytes(payload)


def slow_bytes_of(operation: Operation, payload: str, hidden: int, wire: str = "fp32") -> int:
    """Return the bytes of a row that a forwarder puts to another domain; combine puts reduced rows, also for flat."""
    if operation == Operation("combine", "flat", operation.variant):
        return (4 if wire == "fp32" else 2) * hidden
    return bytes_of(operation, payload, hidden)


@lru_cache(maxsize=64)
def _spread(gate: Gate, domains: int, ranks: int, skew: float) -> Spread:
    return spread(gate, domains, ranks, skew)
