"""Whole expert layers beside those of other libraries, in one run: the first table of README, and all forms.

They are made of results of the kind `layers-peers`: `moecomm bench moe --fp8 --others deep_gemm`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tables import (
    AGED,
    OLDER,
    WINDOW,
    layer_parts,
    line,
    load,
    names,
    of_kind,
    source,
    table,
    time_of,
    where,
    window_of,
)

KIND = "layers-peers"  # of DeepSeek-V3's sizes: README's table
KINDS = (KIND, f"{KIND}-v4-pro")  # the page's table
FORMS = ("fp8, default", "fp8, one launch", "fp8", "default")  # of moecomm's layer, as results name them


def found() -> list[str]:
    """Return the names of the results, that of the most GPUs first."""
    return sorted(of_kind(names(), KIND), key=lambda name: -load(name)["case"]["ranks"])


def front() -> list[str]:
    """Return paragraphs of the main README, of the result of the most GPUs; none without a result."""
    if not found():
        return []
    used = found()[0]
    result, lines = load(used), []
    for tokens, ours, theirs in _sizes(result):
        times = [ours["fp8, default"], theirs["deep_gemm"], ours["default"], theirs.get("torch")]
        cells = (str(tokens), *(time_of(_us(row)) if row else "" for row in times))
        lines.append(line(result, layer_parts(tokens), *cells, at=(1, 3)))
    case = result["case"]
    model = case["models"][0]
    apart = case["ranks"] > 1
    head = (
        f"A whole expert layer (`Buffer.moe`) on {where(result)}{'' if apart else ', with nothing to send to others'}, "
        f"{result['date']}: DeepSeek-V3's sizes with {model['num_experts'] // case['ranks']} experts a GPU, in a CUDA "
        f"graph, alternating in one run{', time of the slowest GPU' if apart else ''}. FP8: weights with scales of "
        "128x128, the cast of the rows included; DeepGEMM's is its fused layer for Hopper."
    )
    heads = "tokens a GPU | moecomm, FP8 | DeepGEMM, FP8 | moecomm, bf16 | torch, bf16"
    shown = table(heads, lines)
    return [head, shown, f"Source: {source(used, 'bench/results')}.{f' {AGED}' if OLDER in shown else ''}"]


def every_form(some: Sequence[str]) -> str:
    """Return the table of all forms, with errors, of some results."""
    lines = []
    for name in some:
        result = load(name)
        model = result["case"]["models"][0]
        experts = model["num_experts"] // result["case"]["ranks"]
        sizes = f"{model['hidden']} / {model['intermediate']}, {experts} a rank, top-{model['topk']}"
        for tokens, ours, theirs in _sizes(result):
            first, plain = ours["fp8, default"], ours["default"]
            eight = [time_of(_us(ours[form])) for form in FORMS[:3]]
            beside = _beside(theirs["deep_gemm"], first), (time_of(_us(plain)), *_beside(theirs.get("torch"), plain))
            errors = (f"{row['error']:.2%}" for row in (first, theirs["deep_gemm"]))
            cells = (where(result), sizes, str(tokens), *eight, *beside[0], *beside[1], *errors)
            cells = (*cells, window_of(result, *ours.values()))
            lines.append(line(result, layer_parts(tokens), *cells, at=(3, 4, 5, 8)))
    heads = (
        "GPUs | hidden / intermediate, experts | tokens a rank | FP8: default | fused | unfused | DeepGEMM | "
        f"over default | bf16: default | torch | over default | error, FP8 | DeepGEMM's{WINDOW}"
    )
    return table(heads, lines)


def _sizes(result: dict[str, Any]) -> list[tuple[int, dict[str, Any], dict[str, Any]]]:
    """Return for each number of tokens moecomm's layers by form, and the fastest layer of each other library."""
    sizes = []
    for tokens in result["case"]["tokens"]:
        rows = [row for row in result["rows"] if (row["tokens"], row["what"]) == (tokens, "layer") and "us" in row]
        ours = {row["variant"]: row for row in rows if row["who"] == "moecomm" and row["variant"] in FORMS}
        others: dict[str, Any] = {}
        for row in sorted((row for row in rows if row["who"] != "moecomm"), key=_us, reverse=True):
            others[row["who"]] = row
        if ours.keys() == set(FORMS) and "deep_gemm" in others:
            sizes.append((tokens, ours, others))
    return sizes


def _beside(other: dict[str, Any] | None, ours: dict[str, Any]) -> tuple[str, str]:
    """Return the time of another library's layer, and over that of ours; empty without one."""
    return (time_of(_us(other)), f"{_us(other) / _us(ours):.2f}") if other else ("", "")


def _us(row: dict[str, Any]) -> float:
    return float(row["us"]["p50"])
