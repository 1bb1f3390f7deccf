"""Choice of the layers that `Buffer.moe` runs fused by default: by measurements, and by bounds on sizes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, NamedTuple, get_type_hints

from moecomm.gpu.tuning.gemms import DTYPES

# Two forms whose times differ by less are equally fast. Fitted: up to 0.004 the rule derives from bench/results what
# was chosen there by hand, or bounds that hold for one layer more. With 0.005 those of bfloat16 on 2 ranks would start
# at 8 rows.
TOLERANCE = 0.004
# Layers of so few rows of an expert stand for those of fewer: their time is that of reading the weights.
FEW_ROWS = 2
# The largest loss of a layer that `many_experts` tolerates.
SLIGHT = 0.01


@dataclass(frozen=True)
class Bounds:
    """Rows in a full Buffer for which `fused=None` means True. Raises ValueError for values that bound nothing.

    Attributes:
        dtype: of the weights; "bf16" holds for float16 as well.
        ranks: number of ranks; other numbers have bounds of their own.
        least_rows_of_expert: rows that experts have on average.
        least_rows_of_rank: rows that a rank sends.
        most_rows_of_expert: None: no bound; 0: never fused.
        many_experts: experts of a rank from which on the least rows do not count; None: they always do.
    """

    dtype: str
    ranks: int
    least_rows_of_expert: int
    least_rows_of_rank: int
    most_rows_of_expert: int | None = None
    many_experts: int | None = None

    def __post_init__(self) -> None:
        if self.dtype not in DTYPES:
            raise ValueError(f"dtype={self.dtype!r}: want one of {DTYPES}")
        least = (self.ranks, self.least_rows_of_expert, self.least_rows_of_rank)
        if not all(type(n) is int and n >= 1 for n in least):
            raise ValueError(
                f"ranks, least_rows_of_expert, least_rows_of_rank = {least}: want whole numbers, at least 1"
            )
        most = self.most_rows_of_expert
        if most is not None and not (type(most) is int and most >= 0):
            raise ValueError(f"most_rows_of_expert={most!r}: want a whole number, or null")
        many = self.many_experts
        if many is not None and not (type(many) is int and many >= 1):
            raise ValueError(f"many_experts={many!r}: want a whole number, at least 1, or null")

    def cover(self, of_expert: float, of_rank: int) -> bool:
        """Return whether a Buffer with so many rows of an expert and of a rank is within the bounds."""
        most = math.inf if self.most_rows_of_expert is None else self.most_rows_of_expert
        many = self.many_experts is not None and _experts(of_expert, of_rank) >= self.many_experts
        enough = of_rank >= self.least_rows_of_rank and of_expert >= self.least_rows_of_expert
        return (many or enough) and of_expert <= most

    def line(self) -> dict[str, Any]:
        """Return the bounds as JSON."""
        return asdict(self)


class Kind(NamedTuple):
    """Key of a layer that is measured at its first call, the same on all ranks.

    Attributes:
        version: version of moecomm.
        backend: backend of the Buffer.
        dtype: dtype of the rows.
        weights: dtype of the weights, and their kind of scales if the dtype does not settle it.
        ranks: number of ranks.
        experts: number of slots, of all ranks, that hold an expert.
        topk, hidden, intermediate: sizes.
        tokens: tokens of a rank, rounded up: `max_tokens` of the Buffer, or, on one rank, the tokens of the call.
    """

    version: str
    backend: str
    dtype: str
    weights: str
    ranks: int
    experts: int
    topk: int
    hidden: int
    intermediate: int
    tokens: int


@dataclass(frozen=True)
class Form:
    """The faster form of a layer, as a first call has measured it.  Raises ValueError for a line that is none.

    Attributes:
        kind: of the layer, by name; see Kind.
        fused: the form that ranks take.
        us: microseconds of both forms on the slowest rank.
    """

    kind: dict[str, Any]
    fused: bool
    us: dict[str, float]

    def __post_init__(self) -> None:
        hints = get_type_hints(Kind)
        kind = self.kind if isinstance(self.kind, dict) else {}
        if kind.keys() != hints.keys() or any(type(kind[name]) is not hint for name, hint in hints.items()):
            raise ValueError(f"kind={self.kind!r}: want {tuple(hints)}")
        if type(self.fused) is not bool or not isinstance(self.us, dict):
            raise ValueError(f"fused={self.fused!r}, us={self.us!r}: want true or false, and times by form")

    def line(self) -> dict[str, Any]:
        """Return the form as JSON."""
        return asdict(self)


class Measured(NamedTuple):
    """Times of one layer: rows of an expert, rows of a rank, and how many times as fast it is fused as unfused."""

    of_expert: float
    of_rank: int
    speedup: float


def of_measured(dtype: str, ranks: int, layers: Sequence[Measured], tolerance: float = TOLERANCE) -> Bounds:
    """Derive the bounds of one dtype and number of ranks.

    No measured layer inside the bounds is slower fused than unfused by more than the tolerance. Of all such bounds the
    function takes those with the largest gain: the product of the speedups inside that exceed the tolerance. Ties go
    to the narrowest bounds, so that bounds end at layers that gain. There is no upper bound if the layers with the
    most rows of an expert gain.

    Beside these, `many_experts` is the fewest experts of a rank from which on no measured layer is slower fused by more
    than SLIGHT, where layers with FEW_ROWS rows of an expert, or fewer, were measured and gain.

    Args:
        dtype, ranks: of the layers.
        layers: measured; a layer may be there several times.
        tolerance: a fraction.

    Returns:
        The bounds; those of `never` if no layer gains.
    """
    gains = [layer for layer in layers if layer.speedup > 1 + tolerance]
    losses = [layer for layer in layers if layer.speedup < 1 - tolerance]
    found: tuple[tuple[float, ...], Bounds] | None = None
    for least in sorted({math.ceil(layer.of_expert) for layer in gains}):
        for of_rank in sorted({layer.of_rank for layer in gains}):
            for most in sorted({math.floor(layer.of_expert) for layer in gains}):
                bounds = Bounds(dtype, ranks, max(1, least), of_rank, most)
                if any(bounds.cover(layer.of_expert, layer.of_rank) for layer in losses):
                    continue
                inside = [layer for layer in gains if bounds.cover(layer.of_expert, layer.of_rank)]
                gained = round(math.fsum(math.log(layer.speedup) for layer in inside), 9)
                order = (gained, least, of_rank, -most)
                if inside and (found is None or order > found[0]):
                    found = order, bounds
    if found is None:
        return never(dtype, ranks)
    bounds = found[1]
    unbounded = Bounds(dtype, ranks, bounds.least_rows_of_expert, bounds.least_rows_of_rank)
    beyond = [layer for layer in layers if unbounded.cover(layer.of_expert, layer.of_rank)]
    largest = max(layer.of_expert for layer in beyond)
    chosen = unbounded if bounds.cover(largest, bounds.least_rows_of_rank) else bounds
    return replace(chosen, many_experts=_many(layers, gains))


def _many(layers: Sequence[Measured], gains: Sequence[Measured]) -> int | None:
    too_few = max((_experts(*layer[:2]) for layer in layers if layer.speedup < 1 - SLIGHT), default=0.0)
    found = [_experts(*layer[:2]) for layer in gains if layer.of_expert <= FEW_ROWS]
    return min((math.ceil(experts) for experts in found if experts > too_few), default=None)


def _experts(of_expert: float, of_rank: int) -> float:
    """Return the experts of a rank.  Rounded, because `of_expert` is a quotient."""
    return round(of_rank / of_expert, 6)


def never(dtype: str, ranks: int) -> Bounds:
    """Return bounds that cover nothing."""
    return Bounds(dtype, ranks, 1, 1, 0)
