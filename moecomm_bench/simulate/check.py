"""Errors of the model against measured times and against figures that others have published."""

from __future__ import annotations

import statistics
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from moecomm.errors import BadInput
from moecomm_bench.simulate.domain import Domain, NotMeasured
from moecomm_bench.simulate.fit import fitted_domain
from moecomm_bench.simulate.measured import MeasuredPart, MeasuredResult, Row, links, nic_of, read, rows_of
from moecomm_bench.simulate.model import HT, LL, Machine, cost
from moecomm_bench.simulate.nic import ModelNic
from moecomm_bench.simulate.published import against

HELD_OUT, EXCLUDED = "held out", "excluded"


def check(paths: Iterable[Path], domain: Domain, nic: ModelNic, fitted: dict[str, Any] | None = None) -> dict[str, Any]:
    """Compare the model with measured and published rows.

    An error is predicted / measured - 1. Every measured row is predicted twice: by `domain`, which knows it if it was
    fitted to (`error`), and by a fit to all other results in `paths` (`held_out_error`). Rows that the model does not
    describe, and rows of kernels that are gone, have a reason instead (`excluded`). Between domains, the NIC is the
    emulated one of the result.

    Args:
        paths: results of the benchmark.
        domain: the fitted terms of one domain.
        nic: the NIC of the published rows, and between domains where no NIC was emulated.
        fitted: what `moecomm simulate fit` says of NICs (published.fit_efficiency).

    Returns:
        {measured, left_out, published, errors}: measured rows; the number of rows whose operation or number of tokens
        has no line; published rows; the median, median signed and worst error of each kind.
    """
    paths = list(paths)
    measured_links, measured, left_out = links(paths), [], 0
    for path in paths:
        if not (results := [result for result in read(path) if any(rows_of(result))]):
            continue
        others = _others(paths, path)
        for result in results:
            own = nic_of(result, measured_links, nic) or nic
            for row in rows_of(result):
                found = _measured(row, result, domain, others, own)
                left_out += found is None
                measured += [found] if found else []
    published = against(domain, nic, fitted or {})
    return {"measured": measured, "left_out": left_out, "published": published, "errors": errors(measured, published)}


def _others(paths: list[Path], path: Path) -> Domain | None:
    """Return the domain fitted to all results but one, None if nothing is left."""
    try:
        return fitted_domain(paths, path.name)
    except BadInput:
        return None


def _measured(
    row: Row, result: MeasuredResult, domain: Domain, others: Domain | None, nic: ModelNic
) -> dict[str, Any] | None:
    try:
        us = _predicted(row, result, domain, nic)
    except NotMeasured:
        return None
    about = {key: getattr(row, key) for key in ("file", "what", "layout", "payload", "variant", "tokens", "sms_asked")}
    about |= {"domains": result.domains, "ranks": result.ranks, "kind": _kind(row, result)}
    found = {**about, "measured_us": row.us, "predicted_us": round(us, 3), "error": round(us / row.us - 1, 4)}
    if row.excluded:
        return {**found, "excluded": row.excluded}
    try:
        without = _predicted(row, result, others, nic) if others else None
    except NotMeasured:
        without = None
    return {**found, "held_out_error": round(without / row.us - 1, 4)} if without else found


def _predicted(row: Row, result: MeasuredResult, domain: Domain, nic: ModelNic) -> float:
    return sum(_part(part, row, result, domain, nic) for part in row.parts)


def _part(part: MeasuredPart, row: Row, result: MeasuredResult, domain: Domain, nic: ModelNic) -> float:
    what, case = part.operation.what, result.found["case"]
    if result.domains == 1:
        us = domain.us(part.operation, part.load)
        us += domain.cold_us.get(what, 0.0) if case["cold"] and part.load.packets else 0.0
    else:
        machine = Machine(domain, nic, part.chunk_tokens, part.load.blocks)
        way = LL if row.direct else HT
        us = cost(part.operation, result.spread, row.tokens, part.rows, machine, algorithm=way).us
        us += domain.direct_other_gpu_us if row.direct and result.machine != domain.name else 0.0
    return max(us, domain.host_us.get(what, 0.0)) if case["mode"] == "eager" else us


def _kind(row: Row, result: MeasuredResult) -> str:
    if row.excluded:
        return f"{EXCLUDED}: {row.excluded}"
    case = result.found["case"]
    about = [f"{result.ranks} ranks"]
    about += ["beside other backends"] if not result.alone else []
    about += ["skewed"] if case["skew"] else []
    about += ["caches flushed"] if case["cold"] else []
    about += ["eager"] if case["mode"] == "eager" else []
    about += ["blocks given"] if row.sms_asked else []
    about += ["batched"] if row.layout == "batched" else []
    about += ["pairs"] if row.what == "pair" else []
    where = "one domain" if result.domains == 1 else f"{result.domains} domains, {'LL' if row.direct else 'HT'}"
    return f"{where}: {', '.join(about)}"


def errors(measured: list[dict[str, Any]], published: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the errors of each kind, of all rows held out, of all rows fitted to, and of all published rows."""
    held = [row["held_out_error"] for row in measured if "held_out_error" in row]
    known = [row["error"] for row in measured if "excluded" not in row]
    counted = [row["error"] for row in published if not row["not_counted"]]
    all_of = {HELD_OUT: held, "with the fit to all results": known, "published, held out": counted}
    found = [_error(kind, some) for kind, some in all_of.items() if some]
    groups: dict[str, list[float]] = {}
    for row in measured:
        groups.setdefault(row["kind"], []).append(row.get("held_out_error", row["error"]))
    for row in published:
        kind = f"{row['kind']}, not counted" if row["not_counted"] else row["kind"]
        groups.setdefault(kind, []).append(row["error"])
    return found + [_error(kind, some) for kind, some in groups.items()]


def _error(kind: str, some: list[float]) -> dict[str, Any]:
    return {
        "kind": kind,
        "rows": len(some),
        "median": round(statistics.median(map(abs, some)), 4),
        "signed": round(statistics.median(some), 4),
        "worst": max(some, key=abs),
    }
