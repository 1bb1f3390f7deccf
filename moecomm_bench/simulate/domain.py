"""Time of dispatch and combine inside one NVLink domain: terms fitted to measurements."""

from __future__ import annotations

import importlib.resources
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
from typing_extensions import NotRequired, TypedDict

from moecomm.base.documents import Document
from moecomm.errors import BadInput
from moecomm_bench.simulate import direct
from moecomm_bench.simulate.direct import DirectLine

FEW, MANY = "few", "many"
MOST_FEW = 512  # tokens of a rank that may go in packets: moecomm/base/packets.py
SHIPPED = "h200.json"
TERMS = ("floor_us", "alpha_us", "gbs", "row_ns", "block_gbs", "copy_gbs")
_SHARPNESS = 4  # of the largest of three concurrent stages; a measured round is slower than the slowest stage alone


class NotMeasured(BadInput):
    """No line was fitted to this operation or number of tokens."""


@dataclass(frozen=True)
class DomainLoad:
    """The load of the busiest rank of a domain in one operation.

    Attributes:
        tokens: tokens of a rank.
        sent: bytes over its busier direction of NVLink; of few tokens, those of the lines that kernels store.
        rows: rows that its blocks send or pull, its own included: one for each (token, rank).
        row_bytes: bytes of such a row.
        copied: bytes of rows that its blocks copy in their own memory: replicas of a dispatch, rows that a combine
            stages.
        blocks: blocks of the launch.
        words: tagged words that every block reads: counts of all ranks in a dispatch, headers in a combine.
        packets: True if rows travel in packets, so that the line of few tokens applies.
    """

    tokens: float
    sent: float
    rows: float
    row_bytes: float = 0.0
    copied: float = 0.0
    blocks: int = 128
    words: float = 0.0
    packets: bool = False


@dataclass(frozen=True)
class Line:
    """The fitted terms of an operation, in microseconds.

    max(floor, alpha + sum of stages), where links, blocks and (in combine) copies run concurrently: the fourth root of
    the sum of the fourth powers of
        sent / gbs,
        rows / blocks * (row_ns + row_bytes / block_gbs), and
        copied / blocks / copy_gbs.
    Dispatch replicates rows after they arrived, so there the last stage is added instead.
    """

    floor_us: float
    alpha_us: float
    gbs: float
    row_ns: float
    block_gbs: float
    copy_gbs: float
    copies_after: bool = False

    @classmethod
    def of(cls, what: str, terms: Iterable[float]) -> Line:
        """Return the line of a dispatch or a combine; `terms` are in the order of TERMS."""
        floor_us, alpha_us, gbs, row_ns, block_gbs, copy_gbs = map(float, terms)
        return cls(floor_us, alpha_us, gbs, row_ns, block_gbs, copy_gbs, what == "dispatch")

    def us(self, load: DomainLoad) -> float:
        """Return the microseconds of a load, without agreement."""
        links = load.sent / self.gbs / 1e3
        blocks = load.rows / load.blocks * (self.row_ns + load.row_bytes / self.block_gbs) / 1e3
        copies = load.copied / load.blocks / self.copy_gbs / 1e3
        beside, after = (0.0, copies) if self.copies_after else (copies, 0.0)
        stages = (links**_SHARPNESS + blocks**_SHARPNESS + beside**_SHARPNESS) ** (1 / _SHARPNESS)
        return max(self.floor_us, float(self.alpha_us + stages + after))


@dataclass(frozen=True)
class Operation:
    """Dispatch or combine in one layout; `variant` is named as in the benchmark, empty for dispatch."""

    what: str
    layout: str
    variant: str = ""

    @property
    def fitted_as(self) -> Operation:
        """The operation whose line this one has: batched rows are replicated and reduced as those of expert are."""
        return replace(self, layout="expert") if self.layout == "batched" else self


Key = tuple[Operation, str]  # the second item is FEW or MANY


@dataclass(frozen=True)
class Domain:
    """The fitted terms of one NVLink domain.

    Attributes:
        name: name of the GPU.
        lines: terms by operation and FEW or MANY tokens.
        gemm_tflops: speed of a GEMM alone.
        gemm_kept: the fraction of it next to rounds.
        ranks: numbers of ranks that were measured.
        word_ns: time of a tagged word in every block, by operation and layout ("dispatch flat").
        cold_us: what an operation takes longer after caches were flushed, by operation.
        host_us: time of the host for a call, by operation.
        direct: terms of rows that go direct to other domains, by operation.
        direct_other_gpu_us: what their rounds take longer on the other GPU that was measured.
    """

    name: str
    lines: dict[Key, Line]
    gemm_tflops: float
    gemm_kept: float
    ranks: tuple[int, ...] = ()
    word_ns: Mapping[str, float] = field(default_factory=dict)
    cold_us: Mapping[str, float] = field(default_factory=dict)
    host_us: Mapping[str, float] = field(default_factory=dict)
    direct: Mapping[Operation, DirectLine] = field(default_factory=dict)
    direct_other_gpu_us: float = 0.0

    def us(self, operation: Operation, load: DomainLoad) -> float:
        """Return the microseconds of a load: agreement, and the line of few or many tokens."""
        line = self.line(operation, FEW if load.packets else MANY)
        return self.agreement_us(operation, load) + line.us(load)

    def agreement_us(self, operation: Operation, load: DomainLoad) -> float:
        """Return the time in which every block reads the words of all ranks."""
        of = operation.fitted_as
        return load.words * self.word_ns.get(f"{of.what} {of.layout}", 0.0) / 1e3

    def line(self, operation: Operation, regime: str) -> Line:
        """Return the line of an operation. Raises NotMeasured if there is none."""
        of = operation.fitted_as
        if (of, regime) not in self.lines:
            known = sorted(_named(*key) for key in self.lines)
            raise NotMeasured("operation", _named(operation, regime), f"one that was measured: {', '.join(known)}")
        return self.lines[of, regime]

    def direct_line(self, operation: Operation) -> DirectLine:
        """Return the line of direct rows; an operation that was not measured has the terms that a fit begins with."""
        return self.direct.get(operation.fitted_as, direct.EXPECTED)

    def with_nvlink(self, gbs: float) -> Domain:
        """Return a copy with NVLink limited to `gbs` GB/s; lines that are slower already, and other terms, stay."""
        if not gbs > 0:
            raise BadInput("nvlink_gbs", gbs, "more than 0")
        slower = {key: replace(line, gbs=min(line.gbs, gbs)) for key, line in self.lines.items()}
        return replace(self, lines=slower)


def _named(operation: Operation, regime: str) -> str:
    name = " ".join(filter(None, (operation.what, operation.layout, operation.variant)))
    return f"{name} of {regime} tokens"


_Time = Annotated[float, msgspec.Meta(ge=0, le=1e12)]
_Positive = Annotated[float, msgspec.Meta(gt=0, le=1e12)]


class _OperationJson(TypedDict):
    what: Literal["dispatch", "combine"]
    layout: str
    variant: str


class _LineJson(_OperationJson):
    regime: Literal["few", "many"]
    floor_us: _Time
    alpha_us: _Time
    gbs: _Positive
    row_ns: _Time
    block_gbs: _Positive
    copy_gbs: _Positive


class _Direct(_OperationJson):
    start_us: _Time
    row_ns: _Time
    block_gbs: _Positive
    copy_gbs: _Positive
    overlap: Annotated[float, msgspec.Meta(ge=0, le=1)]


class _GemmTerms(TypedDict):
    tflops: _Positive
    kept: _Positive


class _NicTerms(TypedDict):
    efficiency: NotRequired[_Positive]


class _Parameters(TypedDict):
    """The form of a fit, as far as the model reads it."""

    domain: str
    ranks: list[int]
    lines: list[_LineJson]
    direct: NotRequired[list[_Direct]]
    direct_other_gpu_us: NotRequired[Annotated[float, msgspec.Meta(ge=-1e12, le=1e12)]]
    gemm: _GemmTerms
    word_ns: dict[str, _Time]
    cold_us: dict[str, _Time]
    host_us: dict[str, _Time]
    nic: NotRequired[_NicTerms]


PARAMETERS = Document("parameters", "JSON that moecomm simulate fit has written", dict[str, Any])


def load(path: Path | None = None) -> Domain:
    """Load the JSON of `moecomm simulate fit`, by default the one in the package. Raises BadInput."""
    return parse(content(path), str(path or SHIPPED))


def content(path: Path | None = None) -> dict[str, Any]:
    """Return the JSON of `moecomm simulate fit`. Raises BadInput."""
    if path is None:
        found: dict[str, Any] = json.loads((importlib.resources.files(__package__) / SHIPPED).read_text())
        return found
    found = PARAMETERS.read(path)
    _check(found, str(path))
    return found


def fitted_efficiency(path: Path | None = None) -> float:
    """Return the share of a NIC's bandwidth that was fitted to published times; parameters may lack it."""
    return float(content(path).get("nic", {}).get("efficiency", 1.0))


def parse(found: dict[str, Any], name: str = "") -> Domain:
    """Return the domain that the JSON of `moecomm simulate fit` describes. Raises BadInput."""
    _check(found, name)
    lines = {
        (Operation(line["what"], line["layout"], line["variant"]), line["regime"]): Line.of(
            line["what"], (line[term] for term in TERMS)
        )
        for line in found["lines"]
    }
    known = {
        Operation(line["what"], line["layout"], line["variant"]): DirectLine(
            *(float(line[term]) for term in direct.TERMS)
        )
        for line in found.get("direct", [])
    }
    gemm = found["gemm"]
    word_ns, cold_us, host_us = (dict(found[part]) for part in ("word_ns", "cold_us", "host_us"))
    other_gpu_us, ranks = found.get("direct_other_gpu_us", 0.0), tuple(found["ranks"])
    speeds = float(gemm["tflops"]), float(gemm["kept"])
    return Domain(found["domain"], lines, *speeds, ranks, word_ns, cold_us, host_us, known, other_gpu_us)


def _check(found: dict[str, Any], name: str) -> None:
    """Raise BadInput unless these are parameters."""
    try:
        msgspec.convert(found, _Parameters)
    except ValueError as error:
        PARAMETERS.refuse(name, error)
