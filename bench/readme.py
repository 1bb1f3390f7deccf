"""Writes the README's figures from bench/results/*.json; every figure there comes from here.

python bench/readme.py
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
BEGIN, END = "<!-- figures: written by bench/readme.py -->", "<!-- end of figures -->"


def host_vs_gloo(found: dict[str, Any]) -> str:
    """The section of bench/host_vs_gloo.py."""
    case, machine, medians, ratios = found["case"], found["machine"], found["medians"], found["ratios"]
    lines = [
        f"CPU ranks: {case['ranks']} processes on {machine['cores']} cores ({machine['cpu']}), "
        f"{case['tokens']} tokens x {case['hidden']} bfloat16 each, top-{case['topk']} of {case['experts']} experts, "
        "beside the same rows through `all_to_all_single` over gloo plus the weighted sum:",
        "",
        "| rows | by | dispatch | combine | both | ratio |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for rows, way in (
        ("one a (token, rank)", "gloo_by_rank"),
        ("", "flat"),
        ("", "flat, copied"),
        ("one a (token, expert)", "gloo_by_expert"),
        ("", "expert"),
        ("", "expert, copied"),
        ("", "batched"),
        ("", "batched, copied"),
    ):
        times = " | ".join(f"{medians[way][key]:.1f} ms" for key in ("dispatch_ms", "combine_ms", "both_ms"))
        ratio = f"{ratios[way]:.1f}" if way in ratios else ""
        lines.append(f"| {rows} | {'gloo' if way.startswith('gloo') else f'`{way}`'} | {times} | {ratio} |")
    lines += [
        "",
        "Combine reads rows that lie in the window (`Buffer.empty`) there; `copied`: rows that lie elsewhere.",
        "",
    ]
    return "\n".join(lines)


def nvlink(found: dict[str, Any]) -> str:
    """The section of bench/nvlink.py."""
    case, machine = found["case"], found["machine"]
    blocks = {row["sms"] for row in found["rows"]} & {DEFAULT_BLOCKS}
    lines = [
        f"{case['ranks']} x {machine['gpus'][0]}, windows by `{found['backend'].split('/')[1]}`: hidden "
        f"{case['hidden']}, top-{case['topk']} of {case['experts']} experts, {max(blocks)} blocks (the default), whole "
        "operations inside a captured graph, slowest rank; `wire`: remote bytes at 320 GB/s over the time:",
        "",
        "| tokens a rank | operation | layout | time | remote bytes | wire |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for row in found["rows"]:
        if row["sms"] in blocks:
            lines.append(
                f"| {row['tokens']} | {row['what']} | `{row['layout']}` | {row['us']:.0f} us | "
                f"{row['remote_bytes'] / 1e6:.1f} MB | {row['of_320']:.2f} |"
            )
    lines += [
        "",
        "`combine` of `expert` rows carries float32 sums, one rounding in all; `bf16 wire` rounds each rank's sum.",
        "",
    ]
    return "\n".join(lines)


DEFAULT_BLOCKS = 64
SECTIONS: dict[str, Callable[[dict[str, Any]], str]] = {"nvlink-vmm-4": nvlink, "host_vs_gloo": host_vs_gloo}


def figures() -> str:
    """All sections whose JSON is there, each with its source."""
    parts = []
    for name, section in SECTIONS.items():
        path = ROOT / "bench" / "results" / f"{name}.json"
        if path.exists():
            found = json.loads(path.read_text())
            source = f"Source: [`{path.name}`](bench/results/{path.name}), `{found['command']}`, {found['date']}."
            parts.append(f"{section(found)}\n{source}")
    return "\n\n".join(parts)


def filled(readme: str) -> str:
    """The README with its figures as they are now."""
    pattern = re.compile(re.escape(BEGIN) + ".*?" + re.escape(END), re.DOTALL)
    assert len(pattern.findall(readme)) == 1, "the README has no place for figures, or several"
    return pattern.sub(lambda _: f"{BEGIN}\n{figures()}\n{END}", readme)


if __name__ == "__main__":
    path = ROOT / "README.md"
    path.write_text(filled(path.read_text()))
