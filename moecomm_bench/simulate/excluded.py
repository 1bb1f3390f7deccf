"""Measured rows that the check shows with a reason, but neither fits to nor counts."""

from __future__ import annotations

from typing import Any

from moecomm_bench.case import FORMATS, GIVEN
from moecomm_bench.ours import FP32_WIRE, OUTSIDE

# Commits of results in bench/results.
_BEFORE_COPIES = ("ca1808cf", "4151efa7", "6504ee79")  # before d33eebb6
_BEFORE_PACKETS = ("ca1808cf",)  # before 8 ranks had room for packets of 4-byte rows
_BEFORE_COUNTS = ("ca1808cf",)  # before counts were read as they are today
_BEFORE_RUNS = ("6504ee79",)  # before 0ecf2e7
_BEFORE_EARLY = ("d41ef155", "273846ca", "fbe86778")  # before 23a546fc
_NATIVE = ("c888219a",)  # eager calls
_SWEPT = ("4ccd1ad3",)  # by numbers of blocks
_BY_THREADS = ("9e01140f", "36bef0c9")  # before bulk copies to ranks that share NVSHMEM's memory

# Kernels that are gone.
COPIED = "y outside, of many tokens: the driver or an earlier kernel copied the rows (before d33eebb6)"
EXACT = "exact, 128 tokens of 8 ranks: did not travel in packets (before 8 ranks had room for them)"
COUNTS = "1 token of 8 ranks: a dispatch took 9.0 us, as counts were read then, and takes 7.4 (times-few-h200-8)"
PUTS = "2 domains: one put a token, and no NIC but a copy over NVLink or a proxy thread (before 0ecf2e7)"
LATE = "2 domains, few tokens: rows left after the ranks had agreed (before 23a546fc)"

# Today's kernels, without a NIC: the model lacks what takes most of their time.
RINGS = "2 domains without a NIC, many tokens: over NVLink, blocks and the places of their rings take longer than links"
THREADS = "2 domains through NVSHMEM, without a NIC: threads of the kernel copy the rows over NVLink"
PROXY = "2 domains through a GIN proxy: a thread of the host posts each message"
SINGLE = (
    "2 domains of one rank, few tokens: faster than domains of several, by steps that the model does not tell apart"
)
HOST = "eager: the host's time that the model has was measured before repeated calls were native"
FORMAT = "another format than fp8, or rows that are given"
SWEPT = "by numbers of blocks, beside formats that the model lacks"
GONE = (COPIED, EXACT, COUNTS, PUTS, LATE)


def not_modelled(commit: str, payload: str) -> str:
    """Return why the model has no such rows of a result at a commit, or an empty text."""
    if commit in _NATIVE:
        return HOST
    return FORMAT if payload.removesuffix(GIVEN) in FORMATS or payload.endswith(GIVEN) else ""


def why_excluded(commit: str, domains: int, ranks: int, through: str, row: dict[str, Any], in_packets: bool) -> str:
    """Return why a row of a result at a commit does not count, or an empty text.

    Args:
        commit: the commit of the result.
        domains: its number of domains.
        ranks: those of a domain.
        through: "nic" if an emulated NIC lay between its domains, else the backend.
        row: the row.
        in_packets: True if its combine would travel in packets today.
    """
    if domains > 1:
        if commit in _BEFORE_RUNS:
            return PUTS
        if through == "gin":
            return PROXY
        if through == "nvshmem" and commit in _BY_THREADS:
            return THREADS
        return _lsa(commit, ranks, through, bool(row.get("straight")))
    if commit in _BEFORE_COPIES and row["variant"] == OUTSIDE and not in_packets:
        return COPIED
    if commit in _BEFORE_PACKETS and row["variant"] == FP32_WIRE and row["tokens"] == 128:
        return EXACT
    if commit in _BEFORE_COUNTS and row["tokens"] == 1:
        return COUNTS
    if commit in _SWEPT:
        return SWEPT
    return ""


def _lsa(commit: str, ranks: int, through: str, direct: bool) -> str:
    if direct and commit in _BEFORE_EARLY:
        return LATE
    if direct:
        return SINGLE if ranks == 1 else ""
    return "" if through == "nic" else RINGS
