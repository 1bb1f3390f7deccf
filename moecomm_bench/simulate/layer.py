"""Model of the MoE layer: dispatch, the experts' GEMMs, combine; sequential or overlapped."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from moecomm.errors import BadInput
from moecomm_bench.simulate.domain import Domain
from moecomm_bench.simulate.routing import Spread, owned

HBM_GBS = 4800.0  # NVIDIA H200 data sheet: 4.8 TB/s
_WEIGHT_BYTES = 2  # bf16


@dataclass(frozen=True)
class Layer:
    """Microseconds of a layer: its GEMMs, the sequential layer, and the overlapped layer."""

    gemm_us: float
    serial_us: float
    overlapped_us: float


def gemm_us(
    domain: Domain,
    spread: Spread,
    experts: int,
    tokens: int,
    hidden: int,
    intermediate: int,
    *,
    tflops: float | None = None,
    hbm_gbs: float = HBM_GBS,
) -> float:
    """Return a roofline of the busiest rank's two grouped GEMMs in bf16: the slower of arithmetic and weight loads.

    Arithmetic counts 6 x hidden x intermediate per row (gate, up and down; one multiplication and one addition each),
    at `tflops`, by default the measured speed of a dense GEMM. Weights count 3 x hidden x intermediate x 2 bytes for
    each local expert, weighted by the probability that some token of any rank wants the expert, at `hbm_gbs`.
    """
    speed = domain.gemm_tflops if tflops is None else tflops
    if not (speed > 0 and hbm_gbs > 0 and intermediate > 0):
        raise BadInput("gemm_tflops, hbm_gbs, intermediate", (speed, hbm_gbs, intermediate), "more than 0")
    everywhere = tokens * len(spread.ranks)
    rows = everywhere * float(spread.entries.max())
    local = int((owned(experts, len(spread.ranks))[0] > 0).sum())
    # For equally likely experts, the probability that no token wants a given one is (1 - entries / local) ^ tokens.
    part = float(np.clip(spread.entries.max() / local, 0, 1))
    read = local * (1 - (1 - part) ** everywhere)
    arithmetic_us = rows * 6 * hidden * intermediate / speed / 1e6
    weights_us = read * 3 * hidden * intermediate * _WEIGHT_BYTES / hbm_gbs / 1e3
    return max(arithmetic_us, weights_us)


def layer(domain: Domain, dispatch_us: float, combine_us: float, experts_us: float, parts: int = 2) -> Layer:
    """Return the time of a layer, sequential and overlapped.

    Overlapped, the tokens are cut into `parts`, and the GEMMs of one part run next to the rounds of another, as a
    pipeline of two stages: max(rounds, GEMMs) + min(rounds, GEMMs) / parts. Dispatch and combine share the links and do
    not overlap each other. GEMMs next to rounds keep the measured fraction of their speed. Each part pays for its
    bytes, but not again for latencies. Where overlap would lose, the result is the sequential time.
    """
    if parts < 1 or experts_us < 0:
        raise BadInput("parts, gemm_us", (parts, experts_us), "at least 1; 0 or more")
    rounds_us = dispatch_us + combine_us
    serial_us = rounds_us + experts_us
    beside = min(rounds_us, experts_us / domain.gemm_kept)
    slowed_us = experts_us + (1 - domain.gemm_kept) * beside
    overlapped_us = max(rounds_us, slowed_us) + min(rounds_us, slowed_us) / parts
    return Layer(experts_us, serial_us, min(serial_us, overlapped_us))
