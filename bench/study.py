"""Figures of all_gather_matmul_study.md: the study's variants, and the fused operator at other sizes."""

from __future__ import annotations

from typing import Any

from tables import LEGEND, OVERLAP, ROOT, line, load, names, older, source, table, with_mark

from moecomm_bench.gather_study import VARIANTS

PAGE = ROOT / "docs" / "maintainers" / "all_gather_matmul_study.md"
RESULT = "all-gather-study-h100-2"
RESULTS = "../../bench/results"  # from the page
COMMAND = "moecomm bench all-gather-study"
# Parts of the variants that are moecomm's: see tables.older.  Variant 1 is NCCL and cuBLAS.
PARTS = {**dict.fromkeys((3, 4, 6), ("all-gather study",)), 8: ("overlap",)}
OF_FP8 = (
    "In FP8, the product alone and that behind NCCL are moecomm's grouped GEMM, which has the same scales; torch's is "
    "`torch._scaled_mm` behind NCCL, with one scale for each row, which is less work."
)


def figures() -> str:
    """Return both tables, with what they are of."""
    return "\n\n".join([*variants(), *sizes()])


def variants() -> list[str]:
    """Return the variants with the figures of the source, and with ours where they have been measured."""
    found = load(RESULT) if RESULT in names() else None
    heads = "| class | 8 H100s, published: ms | TFLOP/s | of 1"
    if found is None:
        ours = f"`{COMMAND}` measures ours; no result of it is kept yet."
    else:
        heads += f" | {found['ranks']} {_gpu(found)}s, ours: ms | TFLOP/s | of 1"
        ours = f"Ours: {source(RESULT, RESULTS)}, by `{COMMAND}`."
    rows = []
    for number, variant in VARIANTS.items():
        named = variant.name + (f" (`{variant.source}`)" if variant.source else "")
        row = [str(number), named, variant.kind, *cells(variant.published())]
        if found is None:
            rows.append(f"| {' | '.join(row)} |")
            continue
        of = found["rows"][number - 1]
        measured = {**of, "ms": of["us"]["p50"] / 1e3} if "us" in of else None
        at = [len(row)] if measured and number in PARTS else []
        rows.append(line(found, PARTS.get(number, ()), *row, *cells(measured), at=at))
    return [table(f"# | variant (name in the source) {heads}", rows), f"of 1: TFLOP/s over those of variant 1. {ours}"]


def sizes() -> list[str]:
    """Return TFLOP/s of squares by type and library."""
    found = load(OVERLAP[0])
    of_cases: dict[tuple[str, str], dict[str, float]] = {}
    for row in found["rows"]:
        if "^3" in row["case"] and "us" in row:
            case = (row["dtype"], row["case"].removesuffix("^3"))
            of_cases.setdefault(case, {})[row["who"]] = row["tflops"]
    rows = []
    for case, of in of_cases.items():
        ours, nccl, torchs, alone = (f"{of[who]:.1f}" for who in ("moecomm", "nccl", "torch", "alone"))
        if case[0] == "fp8" and older(found, ("GEMM",)):
            nccl, alone = with_mark(nccl), with_mark(alone)
        rows.append(line(found, ("overlap",), *case, ours, nccl, torchs, alone, at=(2,)))
    heads = "type | M = N = K | 8: one kernel, TFLOP/s | 1: NCCL and a product | torch's | the product alone"
    about = f"{found['ranks']} {_gpu(found)}s: {source(OVERLAP[0], RESULTS)}. torch's: its fused operator. {OF_FP8}"
    return [table(heads, rows), f"{about} {LEGEND}"]


def cells(figures: dict[str, Any] | None) -> list[str]:
    """Return ms, TFLOP/s and the ratio to variant 1 as text; dashes if there are none."""
    if figures is None:
        return ["-"] * 3
    ratio, tflops = figures["of_first"], figures["tflops"]
    digits = 2 if tflops < 10 else 1
    return [f"{figures['ms']:.3f}", f"{tflops:.{digits}f}", "-" if ratio is None else f"x{ratio:.2f}"]


def _gpu(found: dict) -> str:
    return "H100" if "H100" in found["machine"]["gpus"][0] else "H200"
