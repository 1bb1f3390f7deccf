"""Published figures of other libraries between domains whose inputs are known: published.json.

The model counts moecomm's bytes on an ideal NIC. Published rows are of other kernels on networks with headers,
congestion, incast and slow ranks. One number stands for these: the share of the line rate that rows reach, fitted so
that the median signed error of the published rows is 0. Each library is compared by the share that was fitted to the
others. Libraries whose CPUs post the messages (UCCL-EP) have a message rate as well, fitted to one machine and compared
with the others.
"""

from __future__ import annotations

import importlib.resources
import json
import statistics
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from math import log
from typing import Any

from moecomm_bench.ours import IN_WINDOW
from moecomm_bench.simulate.domain import Domain, NotMeasured, Operation
from moecomm_bench.simulate.model import LL, Cost, Machine, Rows, cost
from moecomm_bench.simulate.nic import ModelNic
from moecomm_bench.simulate.routing import DrawnGate, spread
from moecomm_bench.simulate.rows import bytes_of

_SHARES = [step / 1000 for step in range(300, 1001)]
_MEGA = [10 ** (step / 100) for step in range(-100, 250)]


@dataclass(frozen=True)
class Published:
    """A row of published.json.

    Either `us` is published, or `gbs`, the logical bandwidth over one row for each (token, domain), in LL for each
    (token, expert), rows that stay on the source rank included. `nvlink_gbs` is 0 if it is at least the bandwidth
    measured here. `by_cpu` is the machine if CPUs post the messages. `not_counted` says why a row is shown only.
    """

    library: str
    source: str
    algorithm: str
    what: str
    payload: str
    domains: int
    ranks: int
    tokens: int
    hidden: int
    topk: int
    experts: int
    groups: int
    topk_groups: int
    per_expert: bool
    nic_gbs: float
    nvlink_gbs: float
    us: float
    gbs: float
    note: str = ""
    by_cpu: str = ""
    not_counted: str = ""


def rows() -> list[Published]:
    """Return all rows of published.json."""
    file = importlib.resources.files(__package__) / "published.json"
    groups: list[dict[str, Any]] = json.loads(file.read_text())["groups"]
    return [Published(**{**group["of_all"], **row}) for group in groups for row in group["rows"]]


def compare(row: Published, domain: Domain, nic: ModelNic) -> tuple[float, Cost]:
    """Return (published microseconds, the model's cost of the same rows); the line rate is the row's."""
    operation = Operation(row.what, "flat", IN_WINDOW if row.what == "combine" else "")
    routed = spread(DrawnGate(row.experts, row.topk, row.groups, row.topk_groups), row.domains, row.ranks)
    row_bytes = bytes_of(operation, row.payload, row.hidden)
    inside = domain.with_nvlink(row.nvlink_gbs) if row.nvlink_gbs else domain
    machine = Machine(inside, replace(nic, gbs=row.nic_gbs))
    own = Rows(row_bytes, per_expert=row.per_expert, joined=False, headers=False)
    said = cost(operation, routed, row.tokens, own, machine, algorithm=row.algorithm)
    logical_rows = row.tokens * (row.topk if row.algorithm == LL else float(routed.domains.sum()))
    return row.us or logical_rows * row_bytes / row.gbs / 1e3, said


def fit_efficiency(domain: Domain, nic: ModelNic) -> dict[str, Any]:
    """Return what `moecomm simulate fit` says of NICs.

    {efficiency: the share of the line rate, fitted to all libraries whose GPUs post the messages; without: by library,
    the share fitted to the others; mega_messages: by machine whose CPUs post the messages, the rate fitted to it}.
    """
    counted = [row for row in rows() if not row.by_cpu and not row.not_counted]
    libraries = dict.fromkeys(row.library for row in counted)
    whole = _efficiency(counted, domain, nic)
    without = {one: _efficiency([r for r in counted if r.library != one], domain, nic) for one in libraries}
    by_cpu = [row for row in rows() if row.by_cpu and not row.not_counted and row.algorithm == LL]
    machines = dict.fromkeys(row.by_cpu for row in by_cpu)
    ours = replace(nic, efficiency=whole)
    rates = {one: _rate([row for row in by_cpu if row.by_cpu != one], domain, ours) for one in machines}
    return {"efficiency": whole, "without": without, "mega_messages_without": rates}


def _efficiency(some: list[Published], domain: Domain, nic: ModelNic) -> float:
    return _least(_SHARES, lambda share: replace(nic, efficiency=share), some, domain)


def _rate(some: list[Published], domain: Domain, nic: ModelNic) -> float:
    return round(_least(_MEGA, lambda rate: replace(nic, mega_messages=rate), some, domain), 3)


def _least(tried: Iterable[float], nic: Callable[[float], ModelNic], some: list[Published], domain: Domain) -> float:
    """Return the value with the median signed error next to 0; the error falls as the value grows."""
    values = list(tried)
    low, high = 0, len(values) - 1
    while low < high:
        middle = (low + high) // 2
        if _signed(some, domain, nic(values[middle])) > 0:
            low = middle + 1
        else:
            high = middle
    return values[low]


def _signed(some: list[Published], domain: Domain, nic: ModelNic) -> float:
    found = [compare(row, domain, nic) for row in some]
    return statistics.median(log(said.us / us) for us, said in found)


def against(domain: Domain, nic: ModelNic, known: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the published rows with predictions by what was fitted to other libraries, or other machines.

    `known` is the result of fit_efficiency(); without it `nic` is taken as it is.
    """
    found = []
    for row in rows():
        share = known["without"].get(row.library, known["efficiency"]) if known else nic.efficiency
        # HT puts several rows at once, so that the rate of messages does not bound it.
        rates = known["mega_messages_without"] if known and row.algorithm == LL else {}
        rate = rates.get(row.by_cpu, nic.mega_messages)
        one = replace(nic, efficiency=share, mega_messages=rate)
        try:
            us, said = compare(row, domain, one)
        except NotMeasured:
            continue
        found.append(_row(row, us, said, one))
    return found


def _row(row: Published, us: float, said: Cost, nic: ModelNic) -> dict[str, Any]:
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
        "efficiency": nic.efficiency,
        "mega_messages": nic.mega_messages,
        "bound": said.bound,
        "error": round(said.us / us - 1, 4),
        "source": row.source,
        "note": row.note,
        "by_cpu": row.by_cpu,
        "not_counted": row.not_counted,
    }
