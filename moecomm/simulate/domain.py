"""Time of dispatch and combine inside one NVLink domain: lines fitted to measurements."""

from __future__ import annotations

import importlib.resources
import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from moecomm.errors import BadInput

FEW, MANY = "few", "many"
MOST_FEW = 512  # tokens of a rank that may go in packets: moecomm/core/packets.py
SHIPPED = "h200.json"


class NotMeasured(BadInput):
    """No line was fitted to this operation or number of tokens."""


@dataclass(frozen=True)
class Load:
    """The load of the busiest rank of a domain in one operation.

    `tokens` of a rank; `sent` bytes over its busier direction of NVLink; `rows` that it hands out, its own included:
    one for each (token, rank) with `flat`, one for each (token, expert) with the other layouts.
    """

    tokens: float
    sent: float
    rows: float


@dataclass(frozen=True)
class Line:
    """A fitted cost: max(floor_us, alpha_us + sent / gbs + rows * row_ns), in microseconds of a whole operation."""

    floor_us: float
    alpha_us: float
    gbs: float
    row_ns: float

    def us(self, load: Load) -> float:
        """Return the microseconds of a load."""
        return max(self.floor_us, self.alpha_us + load.sent / self.gbs / 1e3 + load.rows * self.row_ns / 1e3)


@dataclass(frozen=True)
class Operation:
    """Dispatch or combine in one layout; `variant` is named as in the benchmark, empty for dispatch."""

    what: str
    layout: str
    variant: str = ""


Key = tuple[Operation, str]  # the second item is FEW or MANY


@dataclass(frozen=True)
class Domain:
    """The fitted lines of one NVLink domain, by operation and FEW or MANY tokens.

    `gemm_tflops` is the speed of a GEMM alone, `gemm_kept` the fraction of it next to rounds. `ranks` were measured.
    """

    name: str
    lines: dict[Key, Line]
    gemm_tflops: float
    gemm_kept: float
    ranks: tuple[int, ...] = ()

    def us(self, operation: Operation, load: Load) -> float:
        """Return the microseconds of a load; few tokens take the faster of both lines, many tokens have one."""
        found = self.line(operation, MANY).us(load)
        return min(found, self.few_us(operation, load)) if load.tokens <= MOST_FEW else found

    def few_us(self, operation: Operation, load: Load) -> float:
        """Return the microseconds on the path for few tokens, for any number of tokens."""
        return self.line(operation, FEW).us(load)

    def line(self, operation: Operation, regime: str) -> Line:
        """Return the line of an operation. Raises NotMeasured if there is none."""
        if (operation, regime) not in self.lines:
            known = sorted(_named(*key) for key in self.lines)
            raise NotMeasured("operation", _named(operation, regime), f"one that was measured: {', '.join(known)}")
        return self.lines[operation, regime]

    def with_nvlink(self, gbs: float) -> Domain:
        """Return a copy with NVLink limited to `gbs` GB/s; lines that are slower already, and other terms, stay."""
        if not gbs > 0:
            raise BadInput("nvlink_gbs", gbs, "more than 0")
        slower = {key: replace(line, gbs=min(line.gbs, gbs)) for key, line in self.lines.items()}
        return replace(self, lines=slower)


def _named(operation: Operation, regime: str) -> str:
    name = " ".join(filter(None, (operation.what, operation.layout, operation.variant)))
    return f"{name} of {regime} tokens"


def load(path: Path | None = None) -> Domain:
    """Load the JSON of `moecomm simulate fit`, by default the one in the package. Raises BadInput."""
    file = path or importlib.resources.files(__package__) / SHIPPED
    try:
        return parse(json.loads(file.read_text()))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise BadInput("parameters", str(file), f"JSON that moecomm simulate fit has written ({error})") from error


def parse(found: dict[str, Any]) -> Domain:
    """Return the domain that the JSON of `moecomm simulate fit` describes."""
    lines = {
        (Operation(line["what"], line["layout"], line["variant"]), line["regime"]): Line(
            *(float(line[part]) for part in ("floor_us", "alpha_us", "gbs", "row_ns"))
        )
        for line in found["lines"]
    }
    gemm = found["gemm"]
    return Domain(str(found["domain"]), lines, float(gemm["tflops"]), float(gemm["kept"]), tuple(found["ranks"]))
