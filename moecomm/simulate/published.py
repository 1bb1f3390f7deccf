"""Published figures of other libraries between domains whose inputs are known: published.json."""

from __future__ import annotations

import importlib.resources
import json
from dataclasses import dataclass
from typing import Any

from moecomm.bench.ours import IN_WINDOW
from moecomm.simulate.domain import Domain, Operation
from moecomm.simulate.measured import bytes_of
from moecomm.simulate.model import Cost, Machine, cost
from moecomm.simulate.nic import Nic
from moecomm.simulate.routing import Gate, spread


@dataclass(frozen=True)
class Published:
    """A row of published.json.

    Either `us` is published, or `gbs`, the logical bandwidth over one row for each (token, domain), in LL for each
    (token, expert), rows that stay on the source rank included. `nvlink_gbs` is 0 if it is at least the bandwidth
    measured here.
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


def rows() -> list[Published]:
    """Return all rows of published.json."""
    file = importlib.resources.files(__package__) / "published.json"
    groups: list[dict[str, Any]] = json.loads(file.read_text())["groups"]
    return [Published(**{**group["of_all"], **row}) for group in groups for row in group["rows"]]


def compare(row: Published, domain: Domain, latency_us: float = Nic.latency_us) -> tuple[float, Cost]:
    """Return (published microseconds, the model's cost of the same operation)."""
    operation = Operation(row.what, "flat", IN_WINDOW if row.what == "combine" else "")
    routed = spread(Gate(row.experts, row.topk, row.groups, row.topk_groups), row.domains, row.ranks)
    row_bytes = bytes_of(operation, row.payload, row.hidden)
    inside = domain.with_nvlink(row.nvlink_gbs) if row.nvlink_gbs else domain
    machine = Machine(inside, Nic(gbs=row.nic_gbs, latency_us=latency_us))
    said = cost(operation, routed, row.tokens, row_bytes, machine, algorithm=row.algorithm, per_expert=row.per_expert)
    logical_rows = row.tokens * (row.topk if row.algorithm == "ll" else float(routed.domains.sum()))
    return row.us or logical_rows * row_bytes / row.gbs / 1e3, said
