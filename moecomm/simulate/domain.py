"""What a dispatch or combine takes inside one NVLink domain: lines fitted to measurements."""

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
    """An operation, or a number of tokens, that no line was fitted to."""


@dataclass(frozen=True)
class Load:
    """What the busiest rank of a domain has to do in one operation.

    `tokens` of a rank; `sent`: bytes over its busier direction of NVLink; `rows`: that it hands out, one a (token,
    rank) for `flat`, one a (token, expert) for the other layouts, its own included.
    """

    tokens: float
    sent: float
    rows: float


@dataclass(frozen=True)
class Line:
    """max(floor_us, alpha_us + sent / gbs + rows * row_ns): microseconds of a whole operation."""

    floor_us: float
    alpha_us: float
    gbs: float
    row_ns: float

    def us(self, load: Load) -> float:
        """Of a load."""
        return max(self.floor_us, self.alpha_us + load.sent / self.gbs / 1e3 + load.rows * self.row_ns / 1e3)


@dataclass(frozen=True)
class Operation:
    """dispatch or combine, of a layout; `variant` as the benchmark names it, empty for dispatch."""

    what: str
    layout: str
    variant: str = ""


Key = tuple[Operation, str]  # and FEW or MANY


@dataclass(frozen=True)
class Domain:
    """Lines by operation and number of tokens; `gemm_tflops` alone, and the part `gemm_kept` of it beside rounds;
    `ranks`: numbers of ranks that this was measured with.
    """

    name: str
    lines: dict[Key, Line]
    gemm_tflops: float
    gemm_kept: float
    ranks: tuple[int, ...] = ()

    def us(self, operation: Operation, load: Load) -> float:
        """Microseconds; few tokens take the faster of the two ways, many have one."""
        found = self.line(operation, MANY).us(load)
        return min(found, self.few_us(operation, load)) if load.tokens <= MOST_FEW else found

    def few_us(self, operation: Operation, load: Load) -> float:
        """Microseconds the way that few tokens go, however many they are."""
        return self.line(operation, FEW).us(load)

    def line(self, operation: Operation, regime: str) -> Line:
        """Raises NotMeasured."""
        if (operation, regime) not in self.lines:
            known = sorted(_named(*key) for key in self.lines)
            raise NotMeasured("operation", _named(operation, regime), f"one that was measured: {', '.join(known)}")
        return self.lines[operation, regime]

    def with_nvlink(self, gbs: float) -> Domain:
        """The same with NVLink of so many GB/s, where that is less than was measured; other terms as they were."""
        if not gbs > 0:
            raise BadInput("nvlink_gbs", gbs, "more than 0")
        slower = {key: replace(line, gbs=min(line.gbs, gbs)) for key, line in self.lines.items()}
        return replace(self, lines=slower)


def _named(operation: Operation, regime: str) -> str:
    name = " ".join(filter(None, (operation.what, operation.layout, operation.variant)))
    return f"{name} of {regime} tokens"


def load(path: Path | None = None) -> Domain:
    """What `moecomm simulate fit` has written; without a path what the package ships.  Raises BadInput."""
    file = path or importlib.resources.files(__package__) / SHIPPED
    try:
        return parse(json.loads(file.read_text()))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise BadInput("parameters", str(file), f"JSON that moecomm simulate fit has written ({error})") from error


def parse(found: dict[str, Any]) -> Domain:
    """The domain in such JSON."""
    lines = {
        (Operation(line["what"], line["layout"], line["variant"]), line["regime"]): Line(
            *(float(line[part]) for part in ("floor_us", "alpha_us", "gbs", "row_ns"))
        )
        for line in found["lines"]
    }
    gemm = found["gemm"]
    return Domain(str(found["domain"]), lines, float(gemm["tflops"]), float(gemm["kept"]), tuple(found["ranks"]))
