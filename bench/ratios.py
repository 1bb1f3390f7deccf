"""Tables of ratios on pages for users.

Overlapped operators over NCCL and torch, shares of a NIC's line rate, transfers of weights over the time of their
bytes, and rows that return unsummed over sums.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from tables import (
    AGED,
    DOMAINS,
    OVERLAP,
    ROOT,
    THROUGH,
    gpu,
    layer_parts,
    line,
    load,
    names,
    round_parts,
    source,
    table,
    where,
)

OPERATORS_PAGE, NETWORKS_PAGE = ROOT / "docs" / "overlap.md", ROOT / "docs" / "backends.md"
TRANSFERS_PAGE, UNSUMMED_PAGE = ROOT / "docs" / "weight_transfer.md", ROOT / "docs" / "batch_invariance.md"
RESULTS = "../bench/results"  # from the pages
_FEW_ROWS = ", batch "  # in the names of cases of at most 16 rows


def speeds() -> str:
    """Return the range of the times of NCCL and torch over ours, for each operator."""
    rows = []
    for name in OVERLAP:
        found = load(name)
        times: dict[tuple[str, str], dict[str, float]] = {}
        for row in found["rows"]:
            if "us" in row:
                times.setdefault((row["case"], row["dtype"]), {})[row["who"]] = row["us"]["p50"]
        kinds: dict[str, list[tuple[str, dict[str, float]]]] = {}
        for (case, dtype), of in times.items():
            kinds.setdefault(_kind(found["rows"][0]["operator"], case, dtype), []).append((case, of))
        for kind, cases in kinds.items():
            over = [[of[who] / of["moecomm"] for _, of in cases if who in of] for who in ("nccl", "torch")]
            behind = [case for case, of in cases if of["nccl"] < of["moecomm"]]
            cells = (
                *(f"{min(some):.2f} to {max(some):.2f}" if some else "-" for some in over),
                "; ".join(behind) or "-",
            )
            parts = ("overlap", *["GEMM"] * ("FP8" in kind))  # in FP8 NCCL is beside moecomm's grouped GEMM
            rows.append(line(found, parts, kind, *cells))
    sources = "; ".join(source(name, RESULTS) for name in OVERLAP)
    return f"{table('operator | over NCCL | over torch | slower than NCCL', rows)}\n\n{sources}. {AGED}"


def _kind(operator: str, case: str, dtype: str) -> str:
    rows = ""
    if operator == "matmul_all_reduce":
        rows = ", up to 16 rows" if _FEW_ROWS in case else ", more rows"
    return f"`{operator}`{rows}{', FP8' if dtype == 'fp8' else ''}"


def shares() -> str:
    """Return the share of an emulated NIC's line rate that each round of 4096 tokens reaches."""
    rows = []
    for name in sorted((name for name in names() if name.startswith("nic-")), key=lambda name: (gpu(load(name)), name)):
        found = load(name)
        gbs = float(found["case"]["nic"].split(",")[0])
        cells = []
        for round_ in _ROUNDS:
            asked = {"who": "moecomm", "tokens": 4096, "sms_asked": 32, "payload": "", "variant": "", **round_}
            (row,) = (row for row in found["rows"] if asked.items() <= row.items())
            cells.append(f"{row['across_bytes'] / (gbs * 1e3) / row['us']['p50']:.2f}")
        each = found["case"]["ranks"] // 2
        kind = gpu(found) if each > 1 else gpu(found)[:-1]
        rows.append(line(found, (*DOMAINS, *THROUGH["emulated NIC"]), f"{each} {kind}", *cells, f"`{name}`"))
    heads = (
        "GPUs a domain | dispatch, `flat` | `expert` | combine, `flat`, rows in the window | rows outside | `expert`"
    )
    sources = "; ".join(source(name, RESULTS) for name in names() if name.startswith("nic-"))
    return f"{table(f'{heads} | result', rows)}\n\n{sources}. {AGED}"


_ROUNDS: tuple[dict[str, Any], ...] = (
    {"what": "dispatch", "layout": "flat", "payload": "bf16"},
    {"what": "dispatch", "layout": "expert", "payload": "bf16"},
    {"what": "combine", "layout": "flat", "variant": "y in the window"},
    {"what": "combine", "layout": "flat", "variant": "y outside"},
    {"what": "combine", "layout": "expert", "variant": "bf16 wire"},
)


def transfer_results() -> list[str]:
    """Return the names of results of `moecomm bench transfer`, which no page but weight_transfer.md shows."""
    return [name for name in names() if name.startswith("transfer-")]


def transfers() -> str:
    """Return times of transfers over that of their bytes alone, and torch's over those, by cast and set of ranks."""
    rows, some = [], transfer_results()
    for name in some:
        found = load(name)
        parts = ("transfer",) if found["machine"]["gpus"] else ("transfer by CPUs",)
        for cast in dict.fromkeys(row["cast"] for row in found["rows"]):
            of = {row["sets"]: row for row in found["rows"] if row["cast"] == cast}
            cells = [f"{of[sets][what]:.2f}" for sets in ("apart", "overlap") for what in ("of_bytes", "of_torch")]
            rows.append(line(found, parts, where(found), "none" if cast == "bf16" else f'`"{cast}"`', *cells))
    heads = "on | cast | apart: over bytes alone | torch over it | overlapping: over bytes alone | torch over it"
    return f"{table(heads, rows)}\n\n{'; '.join(source(name, RESULTS) for name in some)}. {AGED}"


def unsummed_results() -> list[str]:
    """Return the names of results of `moecomm bench moe --rows-wire`, which no page but batch_invariance.md shows."""
    return [name for name in names() if name.startswith("rows-wire-")]


_CALLS = (  # heading, what is measured, and its variants with sums and with rows
    ("`combine`", "combine", "", "rows wire"),
    ("`moe(fused=False)`", "layer", "sequential", "sequential, rows wire"),
    ("`moe(fused=True)`", "layer", "one launch", "one launch, rows wire"),
)


def unsummed() -> str:
    """Return the time of calls whose results return as rows over that of the same calls with sums."""
    rows, some = [], unsummed_results()
    for name in some:
        found = load(name)
        ours = [row for row in found["rows"] if row["who"] == "moecomm" and "us" in row]
        times = {(row["model"], row["tokens"], row["what"], row["variant"]): row["us"]["p50"] for row in ours}
        for model, tokens in dict.fromkeys(key[:2] for key in times):
            cells = []
            for _, what, sums, unsummed in _CALLS:
                both = [times.get((model, tokens, what, variant), 0) for variant in (sums, unsummed)]
                cells.append(f"{both[1] / both[0]:.2f}" if all(both) else "")  # CPU ranks have no fused layer
            parts = (*layer_parts(tokens), *round_parts(tokens, "combine"))
            rows.append(line(found, parts, where(found), model, str(tokens), *cells, at=(3, 4, 5)))
    if not rows:
        return "No result is kept yet."
    heads = " | ".join(["on | model | tokens of a rank", *(heading for heading, *_ in _CALLS)])
    return f"{table(heads, rows)}\n\n{'; '.join(source(name, RESULTS) for name in some)}. {AGED}"


FIGURES: dict[Path, Callable[[], str]] = {
    OPERATORS_PAGE: speeds,
    NETWORKS_PAGE: shares,
    TRANSFERS_PAGE: transfers,
    UNSUMMED_PAGE: unsummed,
}
