"""Errors of the model against measured times and against figures that others have published."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

from moecomm.bench.ours import OUTSIDE
from moecomm.simulate.domain import Domain, NotMeasured
from moecomm.simulate.measured import Result, Row, links, read, rows_of
from moecomm.simulate.model import AUTO, HT, LL, Machine, cost
from moecomm.simulate.nic import Nic
from moecomm.simulate.published import Published, compare, rows

_LIMITS = {"mega_messages": "rate of messages", "gbs": "bandwidth"}  # the limits of a NIC that may be fitted
_TRIED = [10 ** (step / 20) for step in range(-60, 61)]


def check(paths: Iterable[Path], domain: Domain, nic: Nic) -> dict[str, Any]:
    """Compare the model with measured and published rows.

    An error is predicted / measured - 1. The `kind` of a measured row is "fitted to", or names the difference from the
    fitted rows.

    Between domains, the bandwidth and latency of the NIC are those of put + signal on the same machine, if `paths`
    include them. One more number is fitted to the rows between domains, because no benchmark measures it: the message
    rate; or the bandwidth, if that gives smaller errors, because the warps that put in a round may be slower than the
    best put + signal. LL and HT each have their own fit, because other warps put in HT (`joined`). The prediction of a
    row uses the fit to all other rows.

    Args:
        paths: results of the benchmark.
        domain: the fitted lines of one domain.
        nic: the NIC where `paths` have no put + signal of the machine.

    Returns:
        {measured, left_out, published, joined, errors}: measured rows with predicted_us and error; the number of rows
        whose operation or number of tokens has no line; published rows; the fitted NICs; the median and worst error of
        each kind.
    """
    paths = list(paths)
    measured_links, measured, joined = links(paths), [], []
    for result in (result for path in paths for result in read(path)):
        link = measured_links.get((result.machine, result.backend))
        machine = Machine(domain, Nic(*link, nic.mega_messages) if link else nic)
        for algorithm, some in _by_algorithm(result).items():
            alike = [_measured(row, result, machine) for row in some]
            if not (link and result.domains > 1 and any(alike)):
                measured += alike
                continue
            told, limit = _with_one_fitted(some, result, machine)
            about = {"machine": result.machine, "backend": result.backend, "domains": result.domains}
            joined.append({**about, "algorithm": algorithm, **vars(told.nic), "fitted": limit})
            for row in some:
                others = [other for other in some if other is not row and _measured(other, result, machine)]
                found = _with_one_fitted(others, result, machine)[0] if others else machine
                measured.append(_measured(row, result, found, fitted=bool(others)))
    published = [_published(row, domain, nic) for row in rows()]
    here, others_said = ([row for row in found if row is not None] for found in (measured, published))
    left_out = len(measured) + len(published) - len(here) - len(others_said)
    errors = _errors([*here, *others_said])
    return {"measured": here, "left_out": left_out, "published": others_said, "joined": joined, "errors": errors}


def _by_algorithm(result: Result) -> dict[str, list[Row]]:
    found: dict[str, list[Row]] = {}
    for row in rows_of(result):
        found.setdefault(_algorithm(row, result), []).append(row)
    return found


def _algorithm(row: Row, result: Result) -> str:
    return AUTO if result.domains == 1 else LL if row.straight else HT


def _with_one_fitted(some: list[Row], result: Result, machine: Machine) -> tuple[Machine, str]:
    """Fit one limit of the NIC, by the mean of |log ratio| over the rows; returns the machine and the limit's name."""

    def off(told: Machine) -> float:
        found = [_measured(row, result, told) for row in some]
        ratios = [abs(math.log(row["predicted_us"] / row["measured_us"])) for row in found if row]
        return statistics.fmean(ratios or [0.0])  # no ratios if no operation has a line

    tried = {
        (name, value): replace(machine, nic=replace(machine.nic, **{name: round(value, 4)}))
        for name in _LIMITS
        for value in _TRIED
    }
    best = min(tried, key=lambda key: off(tried[key]))
    return tried[best], _LIMITS[best[0]]


def _measured(row: Row, result: Result, machine: Machine, fitted: bool = False) -> dict[str, Any] | None:
    try:
        us = sum(
            cost(
                part.operation,
                result.spread,
                row.tokens,
                part.row_bytes,
                machine,
                algorithm=_algorithm(row, result),
                slow_row_bytes=part.slow_row_bytes,
            ).us
            for part in row.parts
        )
    except NotMeasured:
        return None
    about = {key: getattr(row, key) for key in ("file", "what", "layout", "payload", "variant", "tokens", "sms_asked")}
    where = {"domains": result.domains, "ranks": result.ranks, "kind": _kind(row, result, machine.domain, fitted)}
    return {**about, **where, "measured_us": row.us, "predicted_us": round(us, 3), "error": round(us / row.us - 1, 4)}


def _kind(row: Row, result: Result, known: Domain, fitted: bool) -> str:
    if result.domains > 1:
        across = f"{result.domains} domains: {result.backend} {_algorithm(row, result).upper()}"
        return f"{across}, a limit fitted to the others" if fitted else across
    if not result.alone:
        return f"one domain: {result.backend} beside others"
    if row.fits and result.ranks in known.ranks:
        return "one domain: fitted to"
    about = [] if result.ranks in known.ranks else [f"{result.ranks} ranks"]
    case = result.found["case"]
    about += ["skewed"] if case["skew"] else []
    about += ["caches flushed"] if case["cold"] else []
    about += ["eager"] if case["mode"] == "eager" else []
    about += ["blocks given"] if row.sms_asked else []
    # The model does not cover that few blocks take longer to copy rows than peers take to pull them.
    about += ["rows copied"] if row.sms_asked and row.variant == OUTSIDE else []
    return "one domain: " + ", ".join([*about, row.what if row.what == "pair" else "alone"])


def _published(row: Published, domain: Domain, nic: Nic) -> dict[str, Any] | None:
    try:
        us, said = compare(row, domain, nic.latency_us)
    except NotMeasured:
        return None
    return {
        "kind": f"published: {row.library} {row.algorithm.upper()}",
        "what": row.what,
        "payload": row.payload,
        "domains": row.domains,
        "ranks": row.ranks,
        "tokens": row.tokens,
        "published_gbs": row.gbs or None,
        "measured_us": round(us, 3),
        "predicted_us": round(said.us, 3),
        "bound": said.bound,
        "error": round(said.us / us - 1, 4),
        "source": row.source,
        "note": row.note,
    }


def _errors(found: list[dict[str, Any]]) -> list[dict[str, Any]]:
    kinds = dict.fromkeys(row["kind"] for row in found)
    return [_error(kind, [row["error"] for row in found if row["kind"] == kind]) for kind in kinds]


def _error(kind: str, errors: list[float]) -> dict[str, Any]:
    sizes = [abs(error) for error in errors]
    worst = max(errors, key=abs)
    return {"kind": kind, "rows": len(errors), "median": round(statistics.median(sizes), 4), "worst": worst}
