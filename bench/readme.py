"""python bench/readme.py: writes the README's figures and bench/README.md, and draws their plots, from
bench/results/*.json; every figure there comes from here.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import passes

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


def where(found: dict[str, Any]) -> str:
    """The machine, as a heading says it."""
    case, machine = found["case"], found["machine"]
    on_gpus = case["backend"] != "host"
    place = f"{case['ranks']} x {machine['gpus'][0]}" if on_gpus else f"{case['ranks']} CPU ranks ({machine['cpu']})"
    how = "caches flushed before each" if case["cold"] else "chained"
    skew = f", {case['skew']:.0%} of the tokens want one rank" if case["skew"] else ""
    return (
        f"{place}, `{found['backend']}`: {case['model'] or 'a layer'} (hidden {case['hidden']}, top-{case['topk']} of "
        f"{case['experts']} experts), whole operations, {case['mode']}, {how}{skew}; median of the slowest rank"
    )


def ceiling(found: dict[str, Any]) -> str:
    """What the wire carried in the same run."""
    if not found["ceiling"]:
        return ""
    best = found["ceiling"][0]
    all_counted = any("beside_bytes" in row for row in found["rows"])  # not so in files of before
    what = "of columns, scales, and what is handed out beside flat rows" if all_counted else "of columns and scales"
    return (
        f"; `wire`: wire time {what} at the all-to-all ceiling of the same run, {best['gbs']:.0f} GB/s a rank, over "
        "the time"
    )


def time_of(us: float) -> str:
    """A time as people read it."""
    return f"{us / 1e3:.2f} ms" if us >= 1e4 else f"{us:.0f} us" if us >= 100 else f"{us:.1f} us"


def dispatch_combine(found: dict[str, Any]) -> str:
    """The section of `moecomm bench dispatch-combine`; of many sizes (`sweep`) a plot.

    Of pairs only those with the first number of SMs.
    """
    head = f"{where(found)}{ceiling(found)}:"
    if is_sweep(found):
        return f"{head}\n\n![time and bandwidth over tokens](results/{found['what']}.svg)\n"
    beside = found["case"].get("overlap_gemm", False)
    lines = [
        head,
        "",
        f"| tokens a rank | by | operation | layout | SMs | time | wire |{' GEMM beside |' if beside else ''}",
        "| --- | --- | --- | --- | --- | --- | --- |" + " --- |" * beside,
    ]
    for row in found["rows"]:
        if "us" not in row or (row["what"] == "pair" and row["sms_asked"] != found["case"]["sms"][0]):
            continue
        what = ", ".join(filter(None, (row["what"], row["payload"], row["variant"])))
        wire = "" if row["of_wire"] is None else f"{row['of_wire']:.2f}"
        lines.append(
            f"| {row['tokens']} | {row['who']} | {what} | `{row['layout']}` | {row['sms'] or ''} "
            f"| {time_of(row['us']['p50'])}{_of_parts(row)} | {wire} |{kept_of(row) if beside else ''}"
        )
    return "\n".join([*lines, ""])


def backends(found: dict[str, Any]) -> str:
    """The section of `moecomm bench dispatch-combine` through several backends."""
    case, first = found["case"], found["ways"][0]["backend"]
    gpus = found["machine"]["gpus"]
    place = f"{case['ranks']} x {gpus[0]}" if gpus else f"{case['ranks']} CPU ranks"
    lines = [
        f"{place}: {case['model'] or 'a layer'} (hidden {case['hidden']}, top-{case['topk']} of {case['experts']} "
        f"experts) through one backend after the other, {case['mode']}; median of the slowest rank; bytes that leave a "
        "rank for others of its domain and for other domains, and GB/s of both:",
        "",
        f"| tokens a rank | through | domains | operation | layout | time | of {first} | inside | across |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for row in found["rows"]:
        if "us" not in row:
            continue
        what = ", ".join(filter(None, (row["what"], row["payload"], row["variant"])))
        domains = case["ranks"] // (row["domain_ranks"] or case["ranks"])
        crossing = " | ".join(
            f"{row[f'{where}_bytes'] / 1e6:.2f} MB, {row[f'{where}_gbs']:.1f} GB/s" if row[f"{where}_bytes"] else ""
            for where in ("inside", "across")
        )
        of_first = f"{row['of_first']:.2f}" if "of_first" in row else ""
        lines.append(
            f"| {row['tokens']} | `{row['through']}` | {domains} | {what} | `{row['layout']}` "
            f"| {time_of(row['us']['p50'])} | {of_first} | {crossing} |"
        )
    return "\n".join([*lines, *_lost(found), ""])


def _lost(found: dict[str, Any]) -> list[str]:
    """What of a run has no figures, and why."""
    lost = []
    for row in found["rows"]:
        if "why" in row:
            domains = f", domains of {row['domain_ranks']}" if row["domain_ranks"] else ""
            size = f", {row['tokens']} tokens" if row.get("tokens") else ""
            lost += ["", f"`{row['backend']}`{domains}{size}: {row['why']}"]
    return lost


def latency_backends(found: dict[str, Any]) -> str:
    """The section of `moecomm bench latency` through several backends."""
    from moecomm.bench import proxy_times

    names, gpus = [way["backend"] for way in found["ways"]], found["machine"]["gpus"]
    rows = {(row["bytes"], row["backend"]): row for row in found["rows"] if "us" in row}
    lines = [
        f"put + signal between two {f'GPUs ({gpus[0]})' if gpus else 'CPU ranks'}: half a round trip, median:",
        "",
        f"| bytes | {' | '.join(f'`{name}`' for name in names)} |",
        "| --- |" + " --- |" * len(names),
    ]
    for size in sorted({size for size, _ in rows}):
        here = [rows.get((size, name)) for name in names]
        cells = [f"{row['us']['p50']:.2f} us, {row['gbs']:.2f} GB/s" if row else "" for row in here]
        lines.append(f"| {size} | {' | '.join(cells)} |")
    return "\n".join([*lines, *_lost(found), *proxy_times.section(found["rows"]), ""])


def _of_parts(row: dict[str, Any]) -> str:
    return f", {row['of_sum']:.3f} of the two alone" if "of_sum" in row else ""


def kept_of(row: dict[str, Any]) -> str:
    """What a GEMM on the other SMs keeps of its speed beside such rounds one after the other."""
    if "kept" not in row.get("overlap", {}):
        return " |"
    kept, held = row["overlap"]["kept"], row["overlap"]["held"]
    text = f" {kept:.0%}; beside blocks that do nothing {held:.0%}"
    if "halves" in row:
        halves, gemm, together = (time_of(row["halves"][name]) for name in ("halves", "gemm", "together"))
        text += f"; begin and end {halves}, and {together} with a GEMM of {gemm} between them"
    return f"{text} |"


def is_sweep(found: dict[str, Any]) -> bool:
    """Whether a result has enough sizes to be drawn."""
    return found.get("benchmark") == "dispatch-combine" and len(found["case"]["tokens"]) > 4


def moe(found: dict[str, Any]) -> str:
    """The section of `moecomm bench moe`."""
    case = found["case"]
    place = (
        f"{case['ranks']} x {found['machine']['gpus'][0]}" if found["machine"]["gpus"] else f"{case['ranks']} CPU ranks"
    )
    lines = [
        f"{place}, `{found['backend']}`: expert layers in bf16, {case['mode']}, median of the slowest rank; `of GEMMs`:"
        " time over that of moecomm's GEMMs alone; `torch's`: the time of torch's over it:",
        "",
        "| model | tokens a rank | by | what | time | TFLOP/s | of GEMMs | torch's |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for row in found["rows"]:
        if "us" in row:
            ratios = " | ".join(f"{row[key]:.2f}" if row.get(key) else "" for key in ("of_gemms", "of_torch"))
            what = ", ".join(filter(None, (row["what"], row["variant"])))
            tflops = f"{row['tflops']:.0f}" if row.get("tflops") else ""
            cells = f"{row['who']} | {what} | {time_of(row['us']['p50'])} | {tflops} | {ratios}"
            lines.append(f"| {row['model']} | {row['tokens']} | {cells} |")
    return "\n".join([*lines, ""])


def deep_ep_layer(found: dict[str, Any]) -> str:
    """The section of `moecomm bench deep-ep-layer`."""
    lines = [
        f"{where(found)}: moecomm's own call and that of its deep_ep interface, and what that takes longer "
        "to return on the host, of the rank where it is most:",
        "",
        "| tokens a rank | operation | moecomm | deep_ep interface | ratio | host, moecomm | host, more |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for row in found["rows"]:
        if "us" in row:
            what = ", ".join(filter(None, (row["what"], row["payload"], row["variant"])))
            times = " | ".join(time_of(row["us"][name]["p50"]) for name in ("native", "compat"))
            more = row["host_more_us"] if found["case"]["mode"] == "eager" else None
            host = " | " if more is None else f"{row['host_us']['native']:.1f} us | {more:+.1f} us"
            lines.append(f"| {row['tokens']} | {what} | {times} | {row['of_native']:.3f} | {host} |")
    return "\n".join([*lines, ""])


def gemm(found: dict[str, Any]) -> str:
    """The section of `moecomm bench gemm`: the schedule that is chosen."""
    if "chosen" not in found["rows"][0]:
        return ""  # every schedule: what tests/fused/test_schedules.py reads
    lines = [
        f"One {found['machine']['gpus'][0]}: grouped GEMMs of a rank's experts, the first with SwiGLU and without; "
        "`torch's`: the time of torch's grouped GEMM over it, which has no activation:",
        "",
        "| model | tokens a rank, ranks | GEMM | time | TFLOP/s | TB/s | torch's |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for row in found["rows"]:
        what = ", ".join(filter(None, (str(row["gemm"]), row["activation"], row["dtype"])))
        figures = f"{time_of(row['us'][row['chosen']])} | {row['tflops']:.0f} | {row['tbs']:.2f}"
        torchs = f"{row['of_torch']:.2f}" if row["of_torch"] else ""
        lines.append(f"| {row['model']} | {row['tokens']}, {row['ranks']} | {what} | {figures} | {torchs} |")
    return "\n".join([*lines, ""])


def simulate(found: dict[str, Any]) -> str:
    """The section of `moecomm simulate`."""
    case, nic = found["case"], found["inputs"]["nic"]
    lines = [
        f"Predicted, not measured: {case['model'] or 'a layer'} over NVLink domains of {case['ranks']}, each as "
        f"{found['inputs']['domain']} was measured, a NIC of {nic['gbs']:g} GB/s a GPU; {case['payload']} dispatch, "
        f"`{case['layout']}`, sums between domains in {case['wire']}; in brackets what most of it waits for:",
        "",
        "| domains | GPUs | tokens a rank | dispatch | combine | GEMMs | layer | overlapped |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for row in found["rows"]:
        rounds = [f"{time_of(row[what]['us'])} ({row[what]['bound']})" for what in ("dispatch", "combine")]
        layer = [time_of(row["layer"][part]) for part in ("gemm_us", "serial_us", "overlapped_us")]
        where = [str(row[key]) for key in ("domains", "gpus", "tokens")]
        lines.append(f"| {' | '.join([*where, *rounds, *layer])} |")
    return "\n".join([*lines, ""])


def simulate_check(found: dict[str, Any]) -> str:
    """The section of `moecomm simulate check`."""
    left_out = found["left_out"]
    without = f"; {left_out} rows of operations that nothing was fitted to are left out" if left_out else ""
    lines = [
        "How far off the model is (predicted over measured, less one); rows that others published are of their "
        f"libraries, on their machines{without}:",
        "",
        "| rows | number | median error | worst |",
        "| --- | --- | --- | --- |",
    ]
    lines += [f"| {e['kind']} | {e['rows']} | {e['median']:.1%} | {e['worst']:+.1%} |" for e in found["errors"]]
    return "\n".join([*lines, ""])


Section = Callable[[dict[str, Any]], str]
BY_NAME: dict[str, Section] = {"host_vs_gloo": host_vs_gloo, "passes-h200": passes.section}
BY_BENCHMARK: dict[str, Section] = {
    "dispatch-combine": dispatch_combine,
    "backends": backends,
    "latency-backends": latency_backends,
    "deep-ep-layer": deep_ep_layer,
    "gemm": gemm,
    "moe": moe,
    "simulate": simulate,
    "simulate-check": simulate_check,
}


def results() -> list[Path]:
    """All results: those of the benchmark in the order of their names, then the others."""
    found = sorted((ROOT / "bench" / "results").glob("*.json"))
    return sorted(found, key=lambda path: list(BY_NAME).index(path.stem) if path.stem in BY_NAME else -1)


HEADLINES = {"1": ("ll", 1), "128": ("ll", 128), "4096": ("ht", 4096), "8192": ("ht", 8192)}
WAYS = ("sequential", "one launch", "fp8, one launch")  # of a layer
COLUMNS = (("dispatch", "fp8", ""), ("dispatch", "bf16", ""), ("combine", "", "y in the window"))


def headlines() -> str:
    """What a reader of the README sees first: flat rows, blocks as the table of moecomm.tuning says."""
    found = {path.stem: json.loads(path.read_text()) for path in results()}
    lines = [
        "DeepSeek-V3 (hidden 7168, top-8 of 256 experts), whole operations in a captured graph, median of the slowest "
        "rank; in brackets the time that the bytes alone take at the all-to-all ceiling of the same run, over it:",
        "",
        "| H200s | tokens a rank | dispatch, bf16 in, FP8 out | dispatch, bf16 | combine, bf16 |",
        "| --- | --- | --- | --- | --- |",
    ]
    used = []
    for gpus in (4, 8):
        for tokens, (stem, number) in HEADLINES.items():
            name = f"{stem}-h200-{gpus}"
            cells = [_cell(found.get(name), number, *column) for column in COLUMNS]
            if all(cells):
                lines.append(f"| {gpus} | {tokens} | {' | '.join(cells)} |")
                used.append(name)
    sources = ", ".join(f"[`{name}.json`](bench/results/{name}.json)" for name in dict.fromkeys(used))
    pictures = [f"![time and bandwidth over tokens](bench/results/{path.name})" for path in drawn()]
    return "\n\n".join(["\n".join(lines), f"Source: {sources}.", *layers(found), *pictures])


def layers(results: dict[str, dict[str, Any]]) -> list[str]:
    """Whole expert layers on 4 GPUs, if there are results of them: a table and its sources."""
    lines, used = [], []
    for name in (stem for stem in results if re.fullmatch(r"moe-.*-h200-4", stem)):
        rows = [row for row in results[name]["rows"] if row["who"] == "moecomm" and row["what"] == "layer"]
        for tokens in dict.fromkeys(row["tokens"] for row in rows):
            apart, fused, fp8 = (next(r for r in rows if (r["tokens"], r["variant"]) == (tokens, way)) for way in WAYS)
            best = min(apart, fused, key=lambda row: row["us"]["p50"])
            cells = [str(tokens), time_of(apart["us"]["p50"]), time_of(fused["us"]["p50"])]
            cells += [*(f"{best[key]:.2f}" for key in ("of_gemms", "of_torch")), time_of(fp8["us"]["p50"])]
            lines.append(f"| {best['model']} | {' | '.join(cells)} |")
        used.append(f"[`{name}.json`](bench/results/{name}.json)")
    if not lines:
        return []
    head = [
        "Whole expert layers (`buffer.moe`) on 4 H200s in bfloat16, in a captured graph, of the slowest rank: "
        "dispatch, experts and combine one after the other, and with rows that travel under the experts "
        "(`fused=True`); the faster of the two over our GEMMs alone, and the time of torch's all_to_all and grouped "
        "GEMMs over it, in the same run; and the fused layer with weights in FP8:",
        "",
        "| model | tokens a rank | one after the other | fused | of GEMMs | torch's | FP8 |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    return ["\n".join([*head, *lines]), f"Source: {', '.join(used)}."]


def _cell(found: dict[str, Any] | None, tokens: int, what: str, payload: str, variant: str) -> str:
    wanted = {"who": "moecomm", "tokens": tokens, "what": what, "layout": "flat", "payload": payload, "sms_asked": 0}
    for row in (found or {}).get("rows", []):
        if all(row[key] == value for key, value in {**wanted, "variant": variant}.items()):
            wire = "" if row["of_wire"] is None else f" ({row['of_wire']:.2f})"
            return time_of(row["us"]["p50"]) + wire
    return ""


def figures() -> str:
    """All sections whose JSON is there, each with its source."""
    parts = []
    for path in results():
        found = json.loads(path.read_text())
        section = BY_NAME.get(path.stem) or BY_BENCHMARK.get(found.get("benchmark", ""))
        if section is not None and (text := section(found)):
            source = f"Source: [`{path.name}`](results/{path.name}), `{found['command']}`, {found['date']}."
            parts.append(f"{text}\n{source}")
    return "\n\n".join(parts)


def drawn() -> dict[Path, Path]:
    """The pictures that the README shows, and the result that each is drawn from."""
    return {path.with_suffix(".svg"): path for path in results() if is_sweep(json.loads(path.read_text()))}


def filled(readme: str) -> str:
    """The README with its figures as they are now."""
    pattern = re.compile(re.escape(BEGIN) + ".*?" + re.escape(END), re.DOTALL)
    assert len(pattern.findall(readme)) == 1, "the README has no place for figures, or several"
    return pattern.sub(lambda _: f"{BEGIN}\n{headlines()}\n{END}", readme)


def page() -> str:
    """bench/README.md."""
    head = "# All figures\n\nWritten by `python bench/readme.py` from what lies in [`results`](results)."
    return f"{head}\n\n{figures()}\n"


if __name__ == "__main__":
    from moecomm.bench.plot import draw

    for picture, result in drawn().items():
        draw([result], picture)
    path = ROOT / "README.md"
    path.write_text(filled(path.read_text()))
    (ROOT / "bench" / "README.md").write_text(page())
