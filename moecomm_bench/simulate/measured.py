"""Rows of the benchmark in terms of the model: the operation, its predicted load, and its measured time."""

from __future__ import annotations

import hashlib
import math
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from moecomm.backends import emulated_nic
from moecomm_bench import result_file
from moecomm_bench.ours import FP8_WIRE, FP32_WIRE, INT8_WIRE
from moecomm_bench.result_file import reading
from moecomm_bench.simulate.blocks import blocks_of, direct_blocks_of
from moecomm_bench.simulate.domain import DomainLoad, Operation
from moecomm_bench.simulate.excluded import not_modelled, why_excluded
from moecomm_bench.simulate.model import Rows, fan_out
from moecomm_bench.simulate.nic import ModelNic
from moecomm_bench.simulate.routing import DrawnGate, Spread, spread
from moecomm_bench.simulate.rows import bytes_of, head_bytes, lines_of, slow_bytes_of

_NOT_MODELLED = (FP8_WIRE, INT8_WIRE)  # variants of combines that the model lacks
_MOST_SHARES, _MOST_TOPK = 1 << 24, 1 << 10  # experts of all ranks together; experts of a token
_CHUNK = 8  # tokens of a chunk in a combine of many, which results do not name


@dataclass(frozen=True, eq=False)
class MeasuredResult:
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
        return _spread(DrawnGate(case["experts"], case["topk"]), self.domains, self.ranks, case["skew"])

    @property
    def nic(self) -> str:
        """The emulated NIC between its domains, empty if there is none."""
        return str(self.found["case"].get("nic", ""))

    @property
    def through(self) -> str:
        """Connection between its domains: "nic" if a NIC was emulated, else the backend."""
        return "nic" if self.nic else self.backend

    @property
    def sends_single_rows(self) -> bool:
        """True if `exact` rows of one expert travelled in the dtype of y, as they do since commit 0ecf2e7."""
        case, routed = self.found["case"], self.spread
        if self.domains > 1 or self.ranks == 1:  # sums over several domains are float32
            return False
        others = float(routed.ranks.sum()) * (self.ranks - 1) / self.ranks
        widths = [
            row.get("ideal_bytes", row.get("moved_bytes", row["wire_bytes"]))
            / (row["tokens"] * others * case["hidden"])
            for row in self.found["rows"]
            if row.get("variant") == FP32_WIRE and row["what"] == "combine" and "wire_bytes" in row
        ]
        return bool(widths) and statistics.median(widths) < 3.8  # of 4 bytes a column; single rows have 2

    def overlaps(self) -> list[dict[str, float]]:
        """Return the `overlap` entries of rows with a concurrent GEMM."""
        beside = [row.get("overlap", {}) for row in self.found["rows"]]
        return [overlap for overlap in beside if "kept" in overlap]


@dataclass(frozen=True)
class MeasuredPart:
    """A dispatch or a combine: the bytes of its rows, its load inside a domain, and the tokens signaled together."""

    operation: Operation
    rows: Rows
    load: DomainLoad
    chunk_tokens: int


@dataclass(frozen=True)
class Row:
    """A row of a result: one part, or the two parts of a pair.

    `fits` marks rows that terms may be fitted to: those of H200s in one domain, and direct rows between domains.
    `excluded` says why a row is neither fitted to nor counted.
    """

    file: str
    what: str
    layout: str
    payload: str
    variant: str
    tokens: int
    sms_asked: int
    parts: tuple[MeasuredPart, ...]
    direct: bool  # rows go to other domains without a forwarder
    us: float
    host_us: float
    fits: bool
    excluded: str = ""


@lru_cache(maxsize=256)
def content(path: Path, data: bytes) -> dict[str, Any]:
    """Return the result in a file, which is not to be changed: a check reads each file once for every other one.

    Raises:
        BadInput: it is none.
    """
    return result_file.checked(path, data)


def read(path: Path) -> list[MeasuredResult]:
    """Read the results in a file: one for a single backend, else one for each backend and number of domains.

    Those of other benchmarks, of the host backend and of replayed routing give none.

    Raises:
        BadInput: the file is no result.
    """
    with reading(path):
        return list(_results(path, result_file.RESULT.bytes_of(path)))


@lru_cache(maxsize=256)
def _results(path: Path, data: bytes) -> Sequence[MeasuredResult]:
    found = content(path, data)
    alone, several = (found.get("benchmark") == name for name in ("dispatch-combine", "backends"))
    if not (alone or several) or not found["machine"]["gpus"] or not found["case"]:
        return []
    if found["case"].get("backend") == "host" or found["case"].get("routing_file"):
        return []
    _check_sizes(found["case"])
    digest = hashlib.sha256(data).hexdigest()
    if alone:
        return [MeasuredResult(path, found, digest)]
    parts = [(way, [row for row in found["rows"] if way.items() <= row.items()]) for way in found["ways"]]
    return [
        MeasuredResult(path, {**found, "case": {**found["case"], **way}, "rows": rows}, digest, alone=False)
        for way, rows in parts
        if way["backend"] != "host"
    ]


def _check_sizes(case: dict[str, Any]) -> None:
    """Raise BadInput or ValueError for numbers that no result has, before arrays have their size."""
    DrawnGate(case["experts"], case["topk"]).check()
    if not 1 <= case["ranks"] * case["experts"] <= _MOST_SHARES or case["topk"] > _MOST_TOPK:
        raise ValueError(f"{case['ranks']} ranks, top-{case['topk']} of {case['experts']} experts")


def _typed(value: Any, name: str, kind: type) -> Any:
    if not isinstance(value, kind):
        raise TypeError(f"{name} is {value!r}")
    return value


def _positive(value: Any) -> float:
    if not 0 < value < math.inf:
        raise ValueError(f"{value} is not more than 0")
    return float(value)


def links(paths: Iterable[Path]) -> dict[tuple[str, str], tuple[float, float]]:
    """Return (GB/s, microseconds) of put + signal by (machine, backend), from results of latency over several backends.

    Bandwidth is that of the fastest size, latency that of the smallest.
    """
    found = {}
    for path in paths:
        result = content(path, result_file.RESULT.bytes_of(path))
        with reading(path):
            is_link = result.get("benchmark") == "latency-backends" and result["machine"]["gpus"]
            rows = result["rows"] if is_link else []
            for backend in {row["backend"] for row in rows if "us" in row}:
                own = [row for row in rows if row["backend"] == backend and "us" in row]
                smallest = min(own, key=lambda row: int(row["bytes"]))
                terms = max(_positive(row["gbs"]) for row in own), _positive(smallest["us"]["p50"])
                found[str(result["machine"]["gpus"][0]), str(backend)] = terms
    return found


def nic_of(
    result: MeasuredResult, measured: Mapping[tuple[str, str], tuple[float, float]], nic: ModelNic
) -> ModelNic | None:
    """Return the NIC between the domains of a result: the emulated one, or one with the measured `links` of its backend
    and the message rate of `nic`. None if that backend was not measured.
    """
    if result.nic:
        told = emulated_nic.parse("nic", result.nic)
        return ModelNic(told.gbs, told.latency_us, told.mega_messages)
    link = measured.get((result.machine, result.backend))
    return ModelNic(*link, nic.mega_messages) if link else None


@lru_cache(maxsize=512)
def rows_of(result: MeasuredResult) -> Sequence[Row]:
    """Return moecomm's own rows that have a time."""
    with reading(result.path):
        return tuple(_rows(result))


def _rows(result: MeasuredResult) -> Iterator[Row]:
    case = result.found["case"]
    chained = case["mode"] == "graph" and not case["skew"]
    one_domain = result.domains == 1 and result.alone and "H200" in result.machine
    for row in result.found["rows"]:
        if "us" not in row or row["who"] != "moecomm" or row["variant"] in _NOT_MODELLED:
            continue
        about = {key: _typed(row[key], key, str) for key in ("what", "layout", "payload", "variant")}
        about |= {key: _typed(row[key], key, int) for key in ("tokens", "sms_asked")}
        parts = tuple(_parts(row, result))
        reason = not_modelled(result.found["commit"], row["payload"]) or why_excluded(
            result.found["commit"], result.domains, result.ranks, result.through, row, parts[-1].load.packets
        )
        single = row["what"] != "pair" and row["layout"] != "batched" and not reason
        direct = bool(row.get("straight"))
        several = result.domains > 1 and direct and not case["cold"]
        yield Row(
            file=result.path.name,
            **about,
            parts=parts,
            direct=direct,
            us=_positive(row["us"]["p50"]),
            host_us=float(row.get("host_us") or 0.0),
            fits=chained and single and (one_domain or several),
            excluded=reason,
        )


def _parts(row: dict[str, Any], result: MeasuredResult) -> Iterator[MeasuredPart]:
    case, routed = result.found["case"], result.spread
    for what in ("dispatch", "combine") if row["what"] == "pair" else (row["what"],):
        operation = Operation(what, row["layout"], row["variant"] if what == "combine" else "")
        single = routed.single if result.sends_single_rows else 0.0
        row_bytes = bytes_of(operation, row["payload"], case["hidden"], single)
        rows = Rows(
            row_bytes,
            # Rows without `ideal_bytes` are older than packets that end with their content.
            lines_of(operation, row["payload"], case["hidden"], case["topk"], single, whole="ideal_bytes" not in row),
            slow_bytes_of(operation, row["payload"], case["hidden"]),
            head_bytes(case["topk"], result.ranks) if what == "dispatch" and result.domains > 1 else 0,
            2 * case["hidden"],
            joined=what == "combine" or row["payload"] == "bf16",
        )
        # The blocks that were launched; those of a pair are its dispatch's.
        given = row["sms_asked"] or (row.get("sms", 0) if row["what"] in ("dispatch", "combine") else 0)
        table = direct_blocks_of if row.get("straight") else blocks_of
        blocks = given or table(result.machine, result.ranks, operation, row["tokens"])
        load = fan_out(operation, routed, row["tokens"], rows, blocks)
        yield MeasuredPart(operation, rows, load, row.get("chunk_tokens") or _CHUNK)


@lru_cache(maxsize=64)
def _spread(gate: DrawnGate, domains: int, ranks: int, skew: float) -> Spread:
    return spread(gate, domains, ranks, skew)
