"""A fit of the terms of one domain to results of the benchmark, with the error of each row."""

from __future__ import annotations

import hashlib
import json
import statistics
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from moecomm.errors import BadInput
from moecomm_bench import result_file
from moecomm_bench.ours import IN_WINDOW
from moecomm_bench.simulate.domain import FEW, MANY, TERMS, Domain, DomainLoad, Key, Line, Operation, parse
from moecomm_bench.simulate.fit_direct import direct_points, written
from moecomm_bench.simulate.measured import MeasuredPart, Row, content, links, read, rows_of
from moecomm_bench.simulate.nic import ModelNic
from moecomm_bench.simulate.published import fit_efficiency
from moecomm_bench.simulate.routing import Array
from moecomm_bench.simulate.solve import solve
from moecomm_bench.simulate.virtual import Slope, slopes, word_ns

_NOISE = 0.03  # relative standard deviation of a measured row around the model
# Expected terms, and the standard deviations of their logarithms.  Links: the all-to-all ceiling.  Blocks: what a block
# copies with 8 warps.  Other layouts, and y outside, are expected to be much as flat is.
_EXPECTED = {FEW: (4.0, 3.0, 330.0, 800.0, 40.0, 17.0), MANY: (0.1, 25.0, 330.0, 70.0, 40.0, 17.0)}
_SPREAD, _SPREAD_LIKE = (0.5, 0.7, 0.1, 0.7, 0.5, 0.5), (0.3, 0.3, 0.1, 0.3, 0.3, 0.3)
_SPREAD_WORD = 0.7  # wide: the expected time of a tagged word is that of ranks that share a GPU
_COLD_US = {"dispatch": (1.5, 0.5), "combine": (1.5, 0.5)}  # misses of the first loads; logarithmic deviation
_HOST_US = 15.0


@dataclass(frozen=True)
class Point:
    """A load and its measured microseconds."""

    load: DomainLoad
    us: float


@dataclass(frozen=True)
class Fitted:
    """A line, the number of rows that it was fitted to, and the time of a tagged word in every block."""

    line: Line
    rows: int
    word_ns: float


def fit_line(
    points: list[Point],
    regime: str,
    what: str,
    like: Line | None = None,
    slopes: Iterable[Slope] = (),
    word_ns: float = 0.0,
    is_word_known: bool = True,
) -> Fitted:
    """Fit a line by least squares of relative errors.

    Terms that the points cannot determine stay near those of `like`, the line of `flat`, or near expected values.
    `slopes` are times of rows in few blocks (`virtual`). `word_ns` is the time of a tagged word in every block, or what
    is expected of it.
    """
    slopes, words = list(slopes), () if is_word_known else (word_ns,)
    expected = (*(_EXPECTED[regime] if like is None else (getattr(like, term) for term in TERMS)), *words)
    spread = (*(_SPREAD if like is None else _SPREAD_LIKE), *(_SPREAD_WORD for _ in words))

    def split(terms: Array) -> tuple[Line, float]:
        count = len(TERMS)
        return Line.of(what, terms[:count]), word_ns if is_word_known else float(terms[count])

    def errors(terms: Array) -> Array:
        now, word = split(terms)
        ratios = [(now.us(point.load) + point.load.words * word / 1e3) / point.us for point in points]
        ratios += [slope.predicted_us(now) / slope.us for slope in slopes]
        return np.asarray(np.log(np.maximum(ratios, 1e-9)) / _NOISE)

    line, word = split(solve(errors, np.array(expected), np.array(spread)))
    return Fitted(line, len(points), word)


def fit(paths: Iterable[Path], without: str = "") -> dict[str, Any]:
    """Return the content of `moecomm simulate fit`: terms, the results they were fitted to, and the error of each row.

    The fit uses moecomm's own dispatches and combines in graphs, with any number of blocks: those of H200s in one
    domain, those of virtual ranks, and those of few tokens between domains. Pairs, `batched`, skewed routing and many
    tokens between domains remain for the check.

    Args:
        paths: results of the benchmark, and of bench/virtual_ranks.py; others are passed over.
        without: name of a file whose rows are not used.
    """
    used = [path for path in paths if path.name != without]
    results = [result for path in used for result in read(path)]
    fitting = [(row, result) for result in results for row in rows_of(result) if row.fits]
    rows = [(row, result) for row, result in fitting if result.domains == 1]
    if not rows:
        raise BadInput("results", [str(path) for path in used], "JSON of moecomm bench dispatch-combine or sweep")
    warm = [row for row, result in rows if not result.found["case"]["cold"]]
    lines, words = _lines(warm, word_ns(used), slopes(used))
    domain = Domain("", {key: one.line for key, one in lines.items()}, 1.0, 1.0, word_ns=words)
    cold = [row for row, result in rows if result.found["case"]["cold"]]
    errors = [_error(row, domain) for row in warm]
    direct = direct_points([one for one in fitting if one[1].domains > 1], links(used), domain)
    names = {row.file for row, _ in rows} | {result.path.name for result in results if result.overlaps()}
    names |= {point.file for point in direct}
    machines = {point.machine for point in direct}
    sources = [
        path
        for path in used
        if path.name in names or slopes([path]) or machines & {machine for machine, _ in links([path])}
    ]
    return {
        "domain": rows[0][1].machine,
        "ranks": sorted({result.ranks for _, result in rows}),
        "fitted_to": [{"file": path.name, **_origin(path)} for path in sources],
        "gemm": _gemm([overlap for result in results for overlap in result.overlaps()]),
        "word_ns": words,
        "cold_us": _cold(cold, domain),
        "host_us": {what: _host(warm, what) for what in ("dispatch", "combine")},
        "lines": [_written(key, one, errors) for key, one in lines.items()],
        "rows": errors,
        **written(direct, rows[0][1].machine),
    }


def fit_all(paths: Iterable[Path]) -> dict[str, Any]:
    """Return the content that `moecomm simulate fit` writes: fit(), and what published times say of NICs."""
    found = fit(paths)
    return {**found, "nic": fit_efficiency(parse(found), ModelNic())}


def fitted_domain(paths: Iterable[Path], without: str) -> Domain:
    """Return the domain fitted to all results but one."""
    return parse(fit(paths, without))


def _origin(path: Path) -> dict[str, str]:
    data = result_file.RESULT.bytes_of(path)
    return {"date": content(path, data)["date"], "sha256": hashlib.sha256(data).hexdigest()}


def _lines(
    rows: list[Row], expected_word_ns: dict[str, float], measured: list[Slope]
) -> tuple[dict[Key, Fitted], dict[str, float]]:
    """Return the lines by operation and regime, and the times of words, which the first lines of few tokens decide."""
    of_key: dict[Key, list[Point]] = {}
    for row in rows:
        (part,) = row.parts
        of_key.setdefault((part.operation, _regime(part)), []).append(Point(part.load, row.us))
    found: dict[Key, Fitted] = {}
    known: dict[str, float] = {}
    # Few tokens first, of which the time of words is a part that counts; y in the window first, then flat, because the
    # other lines are expected to be as those are.
    for operation, regime in sorted(
        of_key, key=lambda k: (k[1] != FEW, k[0].layout != "flat", k[0].variant != IN_WINDOW, _text(k))
    ):
        variant = IN_WINDOW if operation.what == "combine" else ""
        like = found.get((Operation(operation.what, "flat", variant), regime))
        of = [s for s in measured if (s.what, s.layout) == (operation.what, operation.layout) and regime == FEW]
        name = f"{operation.what} {operation.layout}"
        found[operation, regime] = fit_line(
            of_key[operation, regime],
            regime,
            operation.what,
            like.line if like else None,
            of,
            known.get(name, expected_word_ns[name]),
            name in known or regime != FEW,
        )
        known[name] = found[operation, regime].word_ns
    return found, expected_word_ns | {name: round(word, 4) for name, word in known.items()}


def _text(key: Key) -> tuple[str, str, str]:
    return key[0].what, key[0].variant, key[1]


def _regime(part: MeasuredPart) -> str:
    return FEW if part.load.packets else MANY


def _cold(rows: list[Row], domain: Domain) -> dict[str, float]:
    """Return what operations of few tokens take longer after caches were flushed; those of many tokens do not."""
    found = {}
    for what, (expected, spread) in _COLD_US.items():
        few = [row for row in rows if row.what == what and row.parts[0].load.packets]
        warm = np.array([domain.us(row.parts[0].operation, row.parts[0].load) for row in few])
        us = np.array([row.us for row in few])

        def errors(terms: Array, warm: Array = warm, us: Array = us) -> Array:
            return np.asarray(np.log((warm + terms[0]) / us) / _NOISE)

        found[what] = round(float(solve(errors, np.array([expected]), np.array([spread]))[0]), 4)
    return found


def _host(rows: list[Row], what: str) -> float:
    """Return the median of the host's time for a call; it depends on the CPU, and on what else runs there."""
    found = [row.host_us for row in rows if row.what == what and row.host_us > 0]
    return round(statistics.median(found), 3) if found else _HOST_US


def _error(row: Row, domain: Domain) -> dict[str, Any]:
    (part,) = row.parts
    us = domain.us(part.operation, part.load)
    about = {**asdict(part.operation), "regime": _regime(part), "payload": row.payload, "tokens": row.tokens}
    return {
        "file": row.file,
        **about,
        "blocks": part.load.blocks,
        "measured_us": row.us,
        "fitted_us": round(us, 3),
        "error": round(us / row.us - 1, 4),
    }


def _written(key: Key, fitted: Fitted, errors: list[dict[str, Any]]) -> dict[str, Any]:
    operation, regime = key
    own = [abs(e["error"]) for e in errors if (Operation(e["what"], e["layout"], e["variant"]), e["regime"]) == key]
    return {
        **asdict(operation),
        "regime": regime,
        **{term: round(getattr(fitted.line, term), 4) for term in TERMS},
        "rows": fitted.rows,
        "median_error": round(statistics.median(own), 4),
        "worst_error": round(max(own), 4),
    }


def _gemm(overlaps: list[dict[str, float]]) -> dict[str, float]:
    if not overlaps:
        raise BadInput("results", "no row with a GEMM beside it", "one result of --overlap-gemm among them")
    return {
        "tflops": statistics.median(overlap["gemm_tflops"] for overlap in overlaps),
        "kept": statistics.median(overlap["kept"] for overlap in overlaps),
    }


def write(path: Path, fitted: dict[str, Any]) -> None:
    """Write the fit as JSON, with one text line for each line and row."""
    parts = []
    for name, value in fitted.items():
        listed = isinstance(value, list) and value and isinstance(value[0], dict)
        inside = ",\n".join(f"  {json.dumps(one)}" for one in value) if listed else ""
        parts.append(f' "{name}": ' + (f"[\n{inside}\n ]" if listed else json.dumps(value)))
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("{\n" + ",\n".join(parts) + "\n}\n")
