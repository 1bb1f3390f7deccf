"""Metrics of all Buffers of a process for Prometheus, through its client library (the extra `metrics`).

moecomm opens no port and writes no file: the program exposes its registry as it does for its own metrics.  Labels are
the rank in the Buffer's group, the operation, the phase and the name of an error, so the number of series does not
grow with experts, layers or calls.  Reading them waits for nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

from moecomm.errors import BadInput, Unsupported
from moecomm.observe.stats.counters import WAITS
from moecomm.observe.stats.publish import own_stats
from moecomm.rounds import names, tally

__all__ = ["register"]

_COUNTERS = (  # name, meaning, labels, unit of the count: in the order of tally.Totals
    (
        "moecomm_calls",
        "Calls that this rank has made with its peers, replays of graphs not counted.",
        ("rank", "op"),
        1,
    ),
    ("moecomm_tokens", "Tokens of this rank in these calls.", ("rank", "op"), 1),
    ("moecomm_token_bytes", "Bytes of these tokens, as this rank passes them or gets them back.", ("rank", "op"), 1),
    ("moecomm_rejected_calls", "Calls that failed on this rank before they reached the other ranks.", ("rank",), 1),
    ("moecomm_failures", "Rounds that failed on this rank, by the error that was raised.", ("rank", "error"), 1),
    ("moecomm_wait_seconds", "Waits of this rank for others in rounds, by phase.", ("rank", "phase"), 1e-9),
)
_GAUGES = (
    ("moecomm_open_buffers", "Buffers that are open."),
    ("moecomm_window_bytes", "Memory of the windows of open Buffers in bytes."),
)


def register(registry: Any = None) -> Any:
    """Add the metrics of this process to a registry of prometheus_client.

    Args:
        registry: a `prometheus_client.CollectorRegistry`; default: `prometheus_client.REGISTRY`.

    Returns:
        The collector, for `registry.unregister()`.

    Raises:
        Unsupported: prometheus_client is not installed.
        BadInput: no registry, or one that has these metrics already.
    """
    try:
        import prometheus_client
    except ImportError as error:
        raise Unsupported('metrics need prometheus-client; pip install "moecomm[metrics]"') from error
    if registry is None:
        registry = prometheus_client.REGISTRY
    if not isinstance(registry, prometheus_client.CollectorRegistry):
        raise BadInput("registry", type(registry).__name__, "a CollectorRegistry of prometheus_client")
    collector = _Collector()
    try:
        registry.register(collector)  # type: ignore[arg-type, unused-ignore]
    except ValueError as error:
        raise BadInput("registry", f"one that has these metrics already ({error})", "another") from error
    return collector


class _Collector:
    """A Collector of prometheus_client."""

    def describe(self) -> Iterator[Any]:
        """Yield the metrics without values."""
        return self.collect()

    def collect(self) -> Iterator[Any]:
        """Yield the metrics."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        for rounds in names.opened():
            if (stats := own_stats(rounds)) is not None:
                rounds.flight.waited(dict(zip(WAITS, stats.wait_ns.sum(dim=1).tolist(), strict=True)))
        totals: tuple[Counter[Any], ...] = tally.totals()
        for (name, meaning, labels, unit), counts in zip(_COUNTERS, totals, strict=True):
            counter = CounterMetricFamily(name, meaning, labels=labels)
            for key, value in sorted(counts.items()):
                counter.add_metric([str(part) for part in (key if isinstance(key, tuple) else (key,))], value * unit)
            yield counter
        of_ranks: tuple[Counter[int], Counter[int]] = Counter(), Counter()
        for rounds in names.opened():
            of_ranks[0][rounds.rank] += 1
            of_ranks[1][rounds.rank] += rounds.session.nbytes
        for (name, meaning), values in zip(_GAUGES, of_ranks, strict=True):
            gauge = GaugeMetricFamily(name, meaning, labels=("rank",))
            for rank, value in sorted(values.items()):
                gauge.add_metric([str(rank)], value)
            yield gauge
