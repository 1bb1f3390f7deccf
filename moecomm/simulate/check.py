"""How far off the model is: predicted beside measured, and beside what others have published."""

from __future__ import annotations

import statistics
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from moecomm.simulate.domain import Domain
from moecomm.simulate.measured import Result, Row, links, read, rows_of
from moecomm.simulate.model import AUTO, HT, LL, Machine, cost
from moecomm.simulate.nic import Nic
from moecomm.simulate.published import Published, compare, rows


def check(paths: Iterable[Path], domain: Domain, nic: Nic) -> dict[str, Any]:
    """{measured, left_out, published, errors}: rows with predicted_us and error, the number of rows of operations that
    have no line, and the median and worst error of each kind.

    An error is predicted / measured - 1.  `kind` of a measured row: "fitted to", or what is else about it.  Between
    domains of a machine a NIC has the bandwidth and latency of put + signal there, where `paths` have those.
    """
    paths = list(paths)
    results, measured_links = [result for path in paths for result in read(path)], links(paths)
    measured = []
    for result in results:
        link = measured_links.get((result.machine, result.backend))
        machine = Machine(domain, Nic(*link, nic.mega_messages) if link else nic)
        measured += [_measured(row, result, machine) for row in rows_of(result)]
    known = [row for row in measured if row is not None]
    left_out = len(measured) - len(known)
    published = [_published(row, domain, nic) for row in rows()]
    return {"measured": known, "left_out": left_out, "published": published, "errors": _errors([*known, *published])}


def _measured(row: Row, result: Result, machine: Machine) -> dict[str, Any] | None:
    if any((part.operation, "many") not in machine.domain.lines for part in row.parts):
        return None
    algorithm = AUTO if result.domains == 1 else LL if row.straight else HT
    us = sum(
        cost(
            part.operation,
            result.spread,
            row.tokens,
            part.row_bytes,
            machine,
            algorithm=algorithm,
            slow_row_bytes=part.slow_row_bytes,
        ).us
        for part in row.parts
    )
    about = {key: getattr(row, key) for key in ("file", "what", "layout", "payload", "variant", "tokens", "sms_asked")}
    where = {"domains": result.domains, "ranks": result.ranks, "kind": _kind(row, result, machine.domain)}
    return {**about, **where, "measured_us": row.us, "predicted_us": round(us, 3), "error": round(us / row.us - 1, 4)}


def _kind(row: Row, result: Result, fitted: Domain) -> str:
    if result.domains > 1:
        return f"{result.domains} domains: {result.backend}"
    if not result.alone:
        return f"one domain: {result.backend} beside others"
    if row.fits and result.ranks in fitted.ranks:
        return "one domain: fitted to"
    about = [] if result.ranks in fitted.ranks else [f"{result.ranks} ranks"]
    about += ["skewed"] if result.found["case"]["skew"] else []
    about += ["blocks given"] if row.sms_asked else []
    return "one domain: " + ", ".join([*about, row.what if row.what == "pair" else "alone"])


def _published(row: Published, domain: Domain, nic: Nic) -> dict[str, Any]:
    us, said = compare(row, domain, nic.latency_us)
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
