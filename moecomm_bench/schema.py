"""The form of results: what their tables, plots and the model read of the JSON of each benchmark.

A result may come from anywhere, and may have more entries than these.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta
from typing_extensions import NotRequired, TypedDict

from moecomm.base.documents import Document

_MOST_ROWS = 100_000
# Names are printed in tables, where brackets are markup.
Name = Annotated[str, Meta(max_length=200, pattern=r"^[^\[\]\x00-\x1f\x7f]*\Z")]
Count = Annotated[int, Meta(ge=0, le=1 << 40)]
Many = Annotated[int, Meta(ge=1, le=1 << 40)]
Ranks = Annotated[int, Meta(ge=1, le=1 << 16)]
Experts = Annotated[int, Meta(ge=1, le=1 << 20)]
Tokens = Annotated[int, Meta(ge=0, le=1 << 31)]
Number = Annotated[float, Meta(ge=-1e15, le=1e15)]
Positive = Annotated[float, Meta(gt=0, le=1e15)]
Share = Annotated[float, Meta(ge=0, le=1)]
_Layout = Literal["flat", "expert", "batched"]


class Percentiles(TypedDict):
    """Microseconds."""

    p50: Positive
    p90: Positive
    p99: Positive


class MachineJson(TypedDict):
    """The machine of a result; no GPUs: CPU ranks."""

    cpu: Name
    gpus: list[Name]


class Origin(TypedDict):
    """The entries of every result."""

    what: str
    date: str
    commit: str
    command: str
    how: NotRequired[str]
    benchmark: NotRequired[Name]


class Plain(Origin):
    """A result without a benchmark's name: rows or medians, printed as they are."""

    rows: NotRequired[Annotated[list[dict[str, Any]], Meta(max_length=_MOST_ROWS)]]
    medians: NotRequired[dict[str, dict[str, Any]]]


class _RoutingJson(TypedDict):
    """A routing that was replayed."""

    source: str
    model: str
    tokens: Count
    layers: Count
    zipf: NotRequired[str]


class _Replayed(TypedDict):
    routing_file: NotRequired[str]
    routing: NotRequired[_RoutingJson]


class _SizesJson(_Replayed):
    model: Name
    hidden: Many
    topk: Annotated[int, Meta(ge=1, le=1 << 10)]
    experts: Experts
    ranks: Ranks
    tokens: Annotated[list[Tokens], Meta(min_length=1)]
    layouts: list[_Layout]
    sms: Annotated[list[Count], Meta(min_length=1)]
    mode: Name
    cold: bool
    skew: Share
    replays: Many


class _CaseJson(_SizesJson):
    backend: Name
    domain_ranks: NotRequired[Count]
    nic: NotRequired[str]


class _AloneJson(TypedDict):
    """Single calls, or why there are none."""

    why: NotRequired[str]


class _SingleCalls(TypedDict):
    calls: Count
    floor_us: Percentiles | None
    step_ns: Number


class _RowsJson(Origin):
    machine: MachineJson
    rows: Annotated[list[dict[str, Any]], Meta(max_length=_MOST_ROWS)]


class _Why(TypedDict):
    """The reason for which a row has no figures."""

    why: NotRequired[str]


class _RoundAbout(_Why):
    who: Name
    tokens: Tokens
    sms_asked: Count
    what: Name
    layout: Name
    payload: Name
    variant: Name
    straight: NotRequired[bool]


class _Halves(TypedDict):
    halves: Positive
    gemm: Positive
    together: Positive


class _OverlapJson(TypedDict):
    kept: NotRequired[Share]
    gemm_tflops: NotRequired[Positive]
    why: NotRequired[str]


class _RoundJson(_RoundAbout):
    sms: Count
    chunk_tokens: NotRequired[Annotated[int, Meta(ge=0, le=1 << 20)] | None]
    us: Percentiles
    host_us: Number | None
    wire_bytes: Number
    moved_bytes: NotRequired[Number]
    ideal_bytes: NotRequired[Number]
    wire_gbs: Number
    logical_gbs: Number
    of_wire: Number | None
    of_sum: NotRequired[Number]
    of_flat: NotRequired[Number]
    overlap: NotRequired[_OverlapJson]
    halves: NotRequired[_Halves]
    eager_us: NotRequired[Percentiles]
    alone_us: NotRequired[Percentiles]


class _OwnRound(TypedDict):
    """A row of moecomm's own, which the model predicts."""

    what: Literal["dispatch", "combine", "pair"]
    layout: _Layout
    payload: str  # of PAYLOADS, or "" of a combine


class _Ceiling(TypedDict):
    gbs: Positive
    method: Name
    sms: Count


class _MemoryJson(TypedDict):
    tokens: Tokens
    window: Count
    beyond_outputs: Count
    layout: NotRequired[Name]
    opened: NotRequired[Count]


class _DispatchCombine(_RowsJson):
    case: _CaseJson
    backend: Name
    ceiling: list[_Ceiling]
    memory: list[_MemoryJson]
    alone: NotRequired[_AloneJson]


class _WayJson(TypedDict):
    backend: Name
    domain_ranks: Count


class _WayRow(_Why):
    backend: Name
    domain_ranks: Count


class _RoundOfWay(_RoundJson):
    backend: Name
    domain_ranks: Count
    through: Name
    inside_bytes: Number
    across_bytes: Number
    inside_gbs: Number
    across_gbs: Number
    of_first: NotRequired[Number]
    window_bytes: NotRequired[Count]
    opened_bytes: NotRequired[Count]


class _Ways(_RowsJson):
    ways: Annotated[list[_WayJson], Meta(min_length=1)]


class _Put(TypedDict):
    method: Name
    sms: Count
    us: Percentiles
    gbs: Positive


class _Plugin(TypedDict):
    one_way_us: Number | None
    posting_us: Number | None
    driver_us: Number | None
    copying_us: Number | None
    word_us: Number | None
    rest_us: Number | None
    operations: Number
    polling: Number
    empty: Number
    a_poll_us: Number


class _PutOfBytes(_Put):
    bytes: Many
    plugin: NotRequired[_Plugin]


class _PutOfWay(_PutOfBytes):
    backend: Name
    domain_ranks: Count


class _OfRanks(_RowsJson):
    backend: Name
    ranks: Ranks


class _Latency(_RowsJson):
    backend: Name


class _GemmJson(_RowsJson):
    device: Name
    dtype: Name
    replays: Many
    read_tbs: NotRequired[Positive]


class _GemmRow(TypedDict):
    tokens: Tokens
    model: Name
    ranks: Ranks
    gemm: Count
    activation: Name | None
    dtype: Name
    rows: Count
    chosen: Name
    us: dict[Name, Positive]
    tflops: Number
    tbs: Number
    of_torch: Number | None
    host_us: dict[Name, Number] | None
    error: NotRequired[dict[Name, Number]]
    why: NotRequired[dict[Name, str]]


class _MoeCase(_Replayed):
    ranks: Ranks
    backend: Name
    mode: Name
    replays: Many
    tokens: Annotated[list[Tokens], Meta(min_length=1)]


class _MoeJson(_RowsJson):
    case: _MoeCase
    backend: Name
    alone: NotRequired[_AloneJson]


class _LayerAbout(_Why):
    model: Name
    tokens: Tokens
    who: Name
    what: Name
    variant: Name


class _LayerJson(_LayerAbout):
    us: Percentiles
    host_us: Number | None
    tflops: Number | None
    sustained_us: NotRequired[Number]
    of_gemms: NotRequired[Positive]
    of_torch: NotRequired[Number]
    error: NotRequired[Number]
    window_bytes: NotRequired[Count]
    opened_bytes: NotRequired[Count]
    eager_us: NotRequired[Percentiles]
    alone_us: NotRequired[Percentiles]


class _OperatorsJson(_OfRanks):
    replays: Many


class _OperatorAbout(_Why):
    operator: Name
    case: Name
    dtype: Name
    who: Name
    form: NotRequired[Name]


class _Operator(_OperatorAbout):
    us: Percentiles
    tflops: Number | None
    speedup: Number | None
    of_alone: Number | None


class _Figures(TypedDict):
    ms: Number
    tflops: Number
    of_first: Number | None


class _StudyJson(_OperatorsJson):
    size: Many
    dtype: Name


class _VariantAbout(_Why):
    variant: Count
    name: Name
    kind: Name
    source: _Figures | None


class _VariantJson(_VariantAbout):
    us: Percentiles
    tflops: Number
    of_first: Number | None


class _CallsJson(TypedDict):
    calls: Count


class _DecodeJson(_RowsJson):
    case: _CaseJson
    backend: Name
    layers: Many
    expert_us: Number
    delay_us: Number
    waits_us: Number
    alone: _CallsJson


class _DecodeAbout(_Why):
    tokens: Tokens
    layout: Name
    payload: Name
    experts: Name
    delays: bool


class _DecodeStepJson(_DecodeAbout):
    us: Percentiles
    layer_us: Number
    beside_us: NotRequired[Number]
    window_bytes: NotRequired[Count]
    opened_bytes: NotRequired[Count]


class _TrainingJson(_RowsJson):
    case: _CaseJson
    backend: Name
    layers: Many
    intermediate: Many


class _StepAbout(_Why):
    tokens: Tokens
    who: Name
    what: Name


class _Step(_StepAbout):
    us: Percentiles
    layer_us: Number
    tflops: Number
    of_torch: NotRequired[Number]
    window_bytes: NotRequired[Count]
    opened_bytes: NotRequired[Count]


class _DeepEp(_RowsJson):
    case: _CaseJson
    backend: Name


class _InterfaceAbout(_Why):
    tokens: Tokens
    what: Name
    payload: Name
    variant: Name


class _Both(TypedDict):
    native: Percentiles
    compat: Percentiles


class _HostOfBoth(TypedDict):
    native: Number | None
    compat: Number | None


class _Interface(_InterfaceAbout):
    us: _Both
    host_us: _HostOfBoth
    of_native: Number
    host_more_us: Number | None
    host_p99_more_us: Number | None
    host_p99_again_us: NotRequired[Number | None]
    window_bytes: NotRequired[Count]


class _NicJson(TypedDict):
    gbs: Number
    latency_us: Number
    mega_messages: Number
    efficiency: Number


class _PredictedCase(TypedDict):
    model: Name
    hidden: Many
    ranks: Ranks
    layout: Name
    payload: Name


class _Inputs(TypedDict):
    domain: Name
    nic: _NicJson
    num_sms: Count
    routing: Name


class _Simulate(_RowsJson):
    case: _PredictedCase
    inputs: _Inputs


class _PredictedRound(TypedDict):
    algorithm: Name
    us: Positive
    slow_bytes: Number
    blocks: Count
    bound: Name


class _PredictedLayer(TypedDict):
    gemm_us: Number
    serial_us: Number
    overlapped_us: Number


class _Predicted(TypedDict):
    domains: Many
    ranks: Ranks
    gpus: Many
    tokens: Tokens
    ranks_wanted: Number
    dispatch: _PredictedRound
    combine: _PredictedRound
    layer: _PredictedLayer


class _Compared(TypedDict):
    what: Name
    payload: Name
    domains: Many
    ranks: Ranks
    tokens: Tokens
    kind: Name
    measured_us: Number
    predicted_us: Number
    error: Number


class _CheckedRow(_Compared):
    file: Name
    layout: Name
    variant: Name
    held_out_error: NotRequired[Number]
    excluded: NotRequired[str]


class _PublishedRow(_Compared):
    bound: Name
    source: str
    note: str


class _Error(TypedDict):
    kind: Name
    rows: Count
    median: Number
    signed: Number
    worst: Number


class _CheckJson(Origin):
    measured: Annotated[list[_CheckedRow], Meta(max_length=_MOST_ROWS)]
    left_out: Count
    published: list[_PublishedRow]
    errors: list[_Error]


class VirtualRow(TypedDict):
    """A row of bench/virtual_ranks.py."""

    ranks: Ranks
    tokens: Tokens
    layout: Name
    what: Name
    blocks: Many
    us: Positive


@dataclass(frozen=True)
class _ResultTypes:
    """The types of a benchmark's result, of a row with figures, and of a row that may have a reason instead."""

    result: Any
    row: Any = None
    about: Any = None


_KINDS = {
    "dispatch-combine": _ResultTypes(_DispatchCombine, _RoundJson, _RoundAbout),
    "backends": _ResultTypes(_Ways, _RoundOfWay, _WayRow),
    "latency": _ResultTypes(_Latency, _PutOfBytes),
    "latency-backends": _ResultTypes(_Ways, _PutOfWay, _WayRow),
    "all-to-all": _ResultTypes(_OfRanks, _Put),
    "gemm": _ResultTypes(_GemmJson, _GemmRow),
    "moe": _ResultTypes(_MoeJson, _LayerJson, _LayerAbout),
    "overlap": _ResultTypes(_OperatorsJson, _Operator, _OperatorAbout),
    "all-gather-study": _ResultTypes(_StudyJson, _VariantJson, _VariantAbout),
    "decode": _ResultTypes(_DecodeJson, _DecodeStepJson, _DecodeAbout),
    "training": _ResultTypes(_TrainingJson, _Step, _StepAbout),
    "deep-ep-layer": _ResultTypes(_DeepEp, _Interface, _InterfaceAbout),
    "simulate": _ResultTypes(_Simulate, _Predicted),
    "simulate-check": _ResultTypes(_CheckJson),
}
RESULT: Document[dict[str, Any]] = Document("results", "JSON that a benchmark has written", dict[str, Any])


def read(path: Path) -> dict[str, Any]:
    """Return a result.  Raises BadInput for a file that is none, or lacks what its benchmark writes."""
    return checked(path, RESULT.bytes_of(path))


def checked(path: Path, data: bytes) -> dict[str, Any]:
    """Return the result in the bytes of a file.  Raises BadInput."""
    found = RESULT.decode(path, data)
    try:
        _check(found)
    except ValueError as error:
        RESULT.refuse(path, error)
    return found


def _check(found: dict[str, Any]) -> None:
    """Raise ValueError that names the entry that is missing or wrong."""
    msgspec.convert(found, Origin)
    kind = _KINDS.get(found.get("benchmark", ""))
    if kind is None:
        msgspec.convert(found, Plain)
        return
    msgspec.convert(found, kind.result)
    if kind.row is not None:
        for number, row in enumerate(found["rows"]):
            has_figures = kind.about is None or "us" in row or "why" not in row
            _convert(f"rows[{number}]", row, kind.row if has_figures else kind.about)
            _agrees(f"rows[{number}]", row, found)
    case = found.get("case")
    if isinstance(case, dict) and case.get("routing_file") and "routing" not in case:
        raise ValueError("case: a routing_file without routing")
    if found["benchmark"] == "backends" and (case or any("us" in row for row in found["rows"])):
        _convert("case", case, _SizesJson)


def _agrees(where: str, row: Mapping[str, Any], found: dict[str, Any]) -> None:
    """Check a row by other entries.  Raises ValueError."""
    if "us" in row and row.get("who") == "moecomm" and found["benchmark"] in ("dispatch-combine", "backends"):
        _convert(where, row, _OwnRound)
    if "alone_us" in row:
        _convert("alone", found.get("alone"), _SingleCalls)
    if "chosen" in row:
        times = [("us", row["us"]), *([("host_us", row["host_us"])] if row["host_us"] else [])]
        if missing := next((name for name, by in times if row["chosen"] not in by), None):
            raise ValueError(f"{where}: {missing} has no {row['chosen']}")
        if "torch" in row["us"] and row["of_torch"] is None:
            raise ValueError(f"{where}: no of_torch beside a time of torch")
    if row.get("host_more_us") is not None and None in row["host_us"].values():
        raise ValueError(f"{where}: host_more_us of an unknown host_us")


def _convert(where: str, value: Any, kind: Any) -> None:
    try:
        msgspec.convert(value, kind)
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None
