"""Operations of moecomm beside those of other libraries, of one result: the best setting of each library."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

LIBRARIES = {  # by what their rows are called
    "moecomm": "moecomm",
    "deep_ep": "DeepEP V1",
    "deep_ep low-latency": "DeepEP V1",
    "deep_ep elastic": "DeepEP V2",
    "nccl_ep": "NCCL EP",
    "nccl_ep expert-major": "NCCL EP",
    "nccl_ep low-latency": "NCCL EP",
    "flashinfer": "FlashInfer",
}
MAIN = ("", "fp8")  # payloads in pictures and short tables
_OURS = {"flat": ("y in the window", "y outside"), "expert": ("bf16 wire",), "batched": ("bf16 wire",)}  # of combine
_PAIRS = {"flat": "y in the window", "expert": "fp32 wire", "batched": "fp32 wire"}

REGISTERED = ("NCCL EP", "FlashInfer")  # libraries that read registered memory alone


class Best(NamedTuple):
    """The fastest setting of a library: microseconds in a graph, and of a call alone; its SMs, 0 if it does not say."""

    us: float
    alone_us: float
    sms: int


class SizedOperation(NamedTuple):
    """An operation of one size in one layout.

    Attributes:
        variant: of moecomm's combine: where `y` lies, or the wire.
        best: by library; those that lack it are not there.  moecomm's is with the SMs of its table.
        ours: moecomm's fastest number of SMs; None if no other number was measured.
        ratios: as `ratio`, of calls alone and of eager ones; None where one of both lacks the time.
    """

    tokens: int
    layout: str
    what: str
    payload: str
    variant: str
    best: dict[str, Best]
    ours: Best | None
    ratios: tuple[float | None, float | None]

    @property
    def able(self) -> dict[str, Best]:
        """`best`, without libraries that need registered memory where moecomm reads any tensor."""
        any_tensor = self.what == "combine" and self.variant == "y outside"
        return {name: best for name, best in self.best.items() if not (any_tensor and name in REGISTERED)}

    @property
    def ratio(self) -> float:
        """Time in a graph of the fastest other library over that of moecomm."""
        return min(best.us for name, best in self.best.items() if name != "moecomm") / self.best["moecomm"].us


def words(one: SizedOperation) -> str:
    """Return an operation in words that need no glossary."""
    what = "dispatch and combine" if one.what == "pair" else one.what
    payload = f" in {one.payload.upper()}" if one.payload else ""
    rows = {"flat": "", "expert": ", rows grouped by expert", "batched": ", a batch for each expert"}[one.layout]
    place = {"y in the window": ", registered memory", "y outside": ", any tensor"}.get(one.variant, "")
    return what + payload + rows + (place if one.what == "combine" else "")


def ceiling_is(rows: list[dict[str, Any]]) -> str:
    """Return "reference" if an operation was faster than the fastest all-to-all, which then is no ceiling."""
    return "reference" if any((row.get("of_wire") or 0.0) > 1 for row in rows) else "ceiling"


def has_peers(result: dict[str, Any]) -> bool:
    """Return True if other libraries were measured beside moecomm in this result, with calls alone."""
    return result.get("benchmark") == "dispatch-combine" and any(
        LIBRARIES.get(row["who"], "moecomm") != "moecomm" and "alone_us" in row for row in result["rows"]
    )


def libraries(result: dict[str, Any]) -> list[str]:
    """Return the names of the libraries that have times in a result."""
    there = {LIBRARIES.get(row["who"]) for row in result["rows"] if "us" in row}
    return [name for name in dict.fromkeys(LIBRARIES.values()) if name in there]


def operations(result: dict[str, Any]) -> Iterator[SizedOperation]:
    """Yield the operations that moecomm and another library have."""
    with_times = [row for row in result["rows"] if {"us", "alone_us"} <= row.keys()]
    for tokens in result["case"]["tokens"]:
        for layout in result["case"]["layouts"]:
            for what, payload in _parts(result["case"]["payloads"]):
                about = {"tokens": tokens, "layout": layout, "what": what, "payload": payload}
                rows = [row for row in with_times if about.items() <= row.items()]
                for variant in {"dispatch": ("",), "combine": _OURS[layout], "pair": (_PAIRS[layout],)}[what]:
                    best = _best(rows, variant)
                    if len(best) > 1 and "moecomm" in best:
                        ours = _fastest(rows, variant)
                        ratios = _ratio(rows, variant, "alone_us"), _ratio(rows, variant, "eager_us")
                        yield SizedOperation(**about, variant=variant, best=best, ours=ours, ratios=ratios)


def _parts(payloads: list[str]) -> Iterator[tuple[str, str]]:
    """Yield operations and their payloads."""
    yield from (("dispatch", payload) for payload in payloads)
    yield "combine", ""
    yield from (("pair", payload) for payload in payloads)


def _ratio(rows: Iterable[dict[str, Any]], variant: str, time: str) -> float | None:
    """Return this time of the fastest other library over that of moecomm with the SMs of its table."""
    ours: list[float] = []
    others: list[float] = []
    for row in rows:
        name = LIBRARIES.get(row["who"])
        if name is None or time not in row or (name == "moecomm" and (row["variant"] != variant or row["sms_asked"])):
            continue
        (ours if name == "moecomm" else others).append(row[time]["p50"])
    return min(others) / min(ours) if ours and others else None


def _best(rows: Iterable[dict[str, Any]], variant: str) -> dict[str, Best]:
    best: dict[str, Best] = {}
    for row in rows:
        name = LIBRARIES.get(row["who"])
        if name is not None and (name != "moecomm" or (row["variant"] == variant and not row["sms_asked"])):
            found = _of(row)
            best[name] = min(found, best.get(name, found))
    return best


def _fastest(rows: Iterable[dict[str, Any]], variant: str) -> Best | None:
    ours = [row for row in rows if (row["who"], row["variant"]) == ("moecomm", variant)]
    return min(map(_of, ours)) if any(row["sms_asked"] for row in ours) else None


def _of(row: dict[str, Any]) -> Best:
    return Best(row["us"]["p50"], row["alone_us"]["p50"], row["sms"])
