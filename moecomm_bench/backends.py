"""A benchmark through several backends, each in its own processes and under its own time limit.

A backend that cannot run here, fails or hangs gets a row with the reason; the other backends keep their rows.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from rich.console import Console

from moecomm.errors import BadInput
from moecomm_bench import dispatch_combine as whole
from moecomm_bench import latency as put_signal
from moecomm_bench import replay
from moecomm_bench.case import RoundsCase
from moecomm_bench.clock import rounded
from moecomm_bench.ranks import on_ranks, plan, under_torchrun

Row = dict[str, Any]
Keep = Callable[[dict[str, Any]], None]  # called after each part with the result so far

_SAME = ("tokens", "what", "layout", "payload", "variant", "sms_asked")  # identify an operation across backends


@dataclass(frozen=True)
class Way:
    """A backend with a number of ranks per domain (see RoundsCase)."""

    backend: str
    domain_ranks: int = 0

    def __str__(self) -> str:
        return f"{self.backend}, domains of {self.domain_ranks}" if self.domain_ranks else self.backend


def ways(backends: str, domain_ranks: Sequence[int] = (0,)) -> list[Way]:
    """Return every backend with every number of ranks per domain.

    Raises:
        BadInput: there are several under torchrun, which cannot start separate processes for each.
    """
    found = [Way(name, near) for near in domain_ranks for name in backends.split(",")]
    if len(found) > 1 and under_torchrun():
        raise BadInput("backend, domain_ranks", ", ".join(map(str, found)), "one of each under torchrun")
    return found


def dispatch_combine(
    chosen: Sequence[Way], tokens: Sequence[int], case_of: Callable[[Way], RoundsCase], limit_s: float, keep: Keep
) -> None:
    """Measure dispatch-combine through several backends, and pass the growing result to `keep`.

    The result is {benchmark, case, ways, rows}. Rows are those of `dispatch_combine.merge`, without ceiling and peers,
    plus backend, domain_ranks, `through` (the full name of the opened backend), `window_bytes` and `opened_bytes` (the
    window of a rank as a caller opens it, and as opened here), and `of_first` (the time, divided by that of the same
    operation through the first of `chosen`). `case_of` may raise Unsupported. `limit_s` holds for one backend at one
    size.
    """
    case: dict[str, Any] = {}

    def measure(way: Way, size: int) -> list[Row]:
        one = replace(case_of(way), tokens=[size], ceiling=False, peers=False, singles=0)
        case.update(replay.shown(one) | {"tokens": list(tokens)})
        found = whole.run(one, limit_s)
        assert found is not None, "ranks are processes of our own"
        windows = {
            memory["layout"]: {"window_bytes": memory["window"], "opened_bytes": memory["opened"]}
            for memory in found["memory"]
        }
        about = {"through": found["backend"]}
        return [{**about, **windows[row["layout"]], **row} for row in found["rows"]]

    for rows in _measure(chosen, tokens, measure):
        about = {name: value for name, value in case.items() if name not in ("backend", "domain_ranks")}
        compared = [row | _of_first(row, rows, chosen[0]) for row in rows]
        keep({"benchmark": "backends", "case": about, "ways": [asdict(way) for way in chosen], "rows": compared})


def latency(chosen: Sequence[Way], job: dict[str, Any], limit_s: float, keep: Keep) -> None:
    """Measure put + signal through several backends, and pass the growing result to `keep`.

    The result is {benchmark, ways, rows}. Rows are those of `latency.merge` plus the backend. `job` holds the arguments
    of `latency.run_rank` except the backend.
    """

    def measure(way: Way, _: int) -> list[Row]:
        name, _ranks = plan(way.backend, 2)
        by_rank = on_ranks("moecomm_bench.latency:run_rank", {"backend": name, **job}, 2, limit_s)
        assert by_rank is not None, "ranks are processes of our own"
        return put_signal.merge(by_rank)

    for rows in _measure(chosen, [0], measure):
        keep({"benchmark": "latency-backends", "ways": [asdict(way) for way in chosen], "rows": rows})


def _measure(
    chosen: Sequence[Way], sizes: Sequence[int], measure: Callable[[Way, int], list[Row]]
) -> Iterator[list[Row]]:
    """Yield all rows so far after each part. A backend that has failed is not measured again."""
    rows: list[Row] = []
    for way in chosen:
        for size in sizes:
            begin, why = time.monotonic(), ""
            try:
                found = measure(way, size)
            except BadInput:
                raise
            except Exception as error:  # noqa: BLE001 - any exception becomes a row
                why = str(error).split("\n")[0] or type(error).__name__
                found = [{"tokens": size, "why": why}]
            rows += [{**asdict(way), **row} for row in found]
            told = why or f"{len(found)} rows"
            part = f"{way}, {size} tokens" if size else str(way)
            text = f"{part}: {told} ({time.monotonic() - begin:.0f} s)"
            Console(stderr=True).print(text, highlight=False, markup=False, soft_wrap=True)
            yield rows
            if why:
                break


def _of_first(row: Row, rows: list[Row], first: Way) -> Row:
    if "us" not in row:
        return {}
    wanted = asdict(first) | {name: row[name] for name in _SAME}
    like = [other["us"]["p50"] for other in rows if "us" in other and wanted.items() <= other.items()]
    return {"of_first": rounded(row["us"]["p50"] / like[0], 4)} if like else {}
