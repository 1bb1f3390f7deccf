"""python bench/readme.py: writes README's figures and bench/README.md from bench/results/*.json, and draws plots."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from functools import lru_cache
from pathlib import Path
from typing import Any

from moecomm.bench import sources

ROOT = Path(__file__).parent.parent
CSRC = ROOT / "csrc"
BEGIN, END = "<!-- figures: written by bench/readme.py -->", "<!-- end of figures -->"
OLDER = "†"
LEGEND = f"{OLDER}: measured before later changes to the kernels."
ROUNDS = ("dispatch", "combine")
LAYER = (*ROUNDS, "GEMM", "fused layer")


def load(name: str) -> dict[str, Any]:
    """One result of bench/results."""
    return dict(json.loads((ROOT / "bench" / "results" / f"{name}.json").read_text()))


def names() -> list[str]:
    """All results of this repository."""
    return sorted(path.stem for path in (ROOT / "bench" / "results").glob("*.json"))


def older(found: dict[str, Any], parts: Iterable[str]) -> bool:
    """True if the source of any of these parts (moecomm.bench.sources) has changed since the measurement."""
    now = digests()
    return any(found["kernels"].get(part) != now[part] for part in parts)


@lru_cache(maxsize=1)
def digests() -> dict[str, str]:
    """The digests of the kernels of this repository as they are."""
    return sources.digests(CSRC)


def line(found: dict[str, Any], parts: Iterable[str], *cells: str, beside: dict[str, Any] | None = None) -> str:
    """One row of a table, marked if its figures are older than the kernels they measure.

    beside: a second result that the row has figures of.
    """
    first, *rest = cells
    marked = any(older(one, parts) for one in (found, beside) if one)
    return f"| {' | '.join([f'{first} {OLDER}' if marked else first, *rest])} |"


def table(heads: str, rows: Iterable[str]) -> str:
    """A table of lines; `heads` has | between columns."""
    return "\n".join([f"| {heads} |", "| --- |" + " --- |" * heads.count("|"), *rows])


def time_of(us: float) -> str:
    """A time as people read it."""
    return f"{us / 1e3:.2f} ms" if us >= 1e4 else f"{us:.0f} us" if us >= 100 else f"{us:.1f} us"


def figure(found: dict[str, Any], **wanted: Any) -> str:
    """The time of the row that has these values, and the part of the wire that it reaches; empty if there is none.

    Rows are moecomm's, of flat layout, with the blocks of the table of moecomm.tuning, unless said otherwise.
    """
    wanted = {"who": "moecomm", "layout": "flat", "sms_asked": 0, "payload": "", "variant": "", **wanted}
    for row in found["rows"]:
        if "us" in row and all(row.get(key, value) == value for key, value in wanted.items()):
            wire = "" if row.get("of_wire") is None else f" ({row['of_wire']:.2f})"
            return time_of(row["us"]["p50"]) + wire
    return ""


HEADLINES = {"1": ("ll", 1), "128": ("ll", 128), "4096": ("ht", 4096), "8192": ("ht", 8192)}
WAYS = ("sequential", "one launch", "fp8, one launch")  # of a layer
COLUMNS: tuple[dict[str, str], ...] = (
    {"what": "dispatch", "payload": "fp8"},
    {"what": "dispatch", "payload": "bf16"},
    {"what": "combine", "variant": "y in the window"},
)


def headlines() -> str:
    """The first figures of README: flat rows, blocks as the table of moecomm.tuning says."""
    rows, used = [], []
    for gpus in (4, 8):
        for tokens, (stem, number) in HEADLINES.items():
            name = f"{stem}-h200-{gpus}"
            if name not in names():
                continue
            cells = [figure(load(name), tokens=number, **column) for column in COLUMNS]
            if all(cells):
                rows.append(line(load(name), ROUNDS, str(gpus), tokens, *cells))
                used.append(name)
    head = (
        "DeepSeek-V3 (hidden 7168, top-8 of 256 experts), `flat` layout, `y` in the window, whole operations in a "
        "captured graph, median of the slowest rank; in brackets the time that the bytes alone take at the all-to-all "
        f"ceiling of the same run, over it.  {LEGEND}"
    )
    columns = "H200s | tokens a rank | dispatch, bf16 in, FP8 out | dispatch, bf16 | combine, bf16"
    pictures = [f"![time and bandwidth over tokens](bench/results/{path.name})" for path in drawn()]
    return "\n\n".join([head, table(columns, rows), source(used), *layers(), *pictures])


def layers() -> list[str]:
    """Whole expert layers on 4 GPUs, if there are results of them: a table and its sources."""
    used = [name for name in names() if re.fullmatch(r"moe-.*-h200-4", name)]
    if not used:
        return []
    head = (
        "Whole expert layers (`buffer.moe`) on 4 H200s in bfloat16, in a captured graph, of the slowest rank: "
        "dispatch, experts and combine one after the other, and with rows that travel under the experts "
        "(`fused=True`); the faster of the two over our GEMMs alone, and the time of torch's all_to_all and grouped "
        "GEMMs over it, in the same run; and the fused layer with weights in FP8:"
    )
    columns = "model | tokens a rank | one after the other | fused | of GEMMs | torch's | FP8"
    return [head, table(columns, (row for name in used for row in layer_rows(name))), source(used)]


def layer_rows(name: str) -> list[str]:
    """The layers of one result of `moecomm bench moe`."""
    found, lines = load(name), []
    rows = [row for row in found["rows"] if row["who"] == "moecomm" and row["what"] == "layer"]
    for tokens in dict.fromkeys(row["tokens"] for row in rows):
        apart, fused, fp8 = (next(r for r in rows if (r["tokens"], r["variant"]) == (tokens, way)) for way in WAYS)
        best = min(apart, fused, key=lambda row: row["us"]["p50"])
        ratios = [f"{best[key]:.2f}" if best.get(key) else "" for key in ("of_gemms", "of_torch")]
        times = [time_of(row["us"]["p50"]) for row in (apart, fused, fp8)]
        lines.append(line(found, LAYER, best["model"], str(tokens), *times[:2], *ratios, times[2]))
    return lines


def source(used: Iterable[str]) -> str:
    """The files that a table is made of, each with its date and commit."""
    files = (
        f"[`{name}.json`](bench/results/{name}.json) ({load(name)['date']}, {load(name)['commit']})"
        for name in dict.fromkeys(used)
    )
    return f"Source: {', '.join(files)}."


def is_sweep(found: dict[str, Any]) -> bool:
    """True if a result has enough sizes to be drawn."""
    return found.get("benchmark") == "dispatch-combine" and len(found["case"]["tokens"]) > 4


def drawn() -> dict[Path, Path]:
    """The pictures that README shows, and the result that each is drawn from."""
    folder = ROOT / "bench" / "results"
    return {folder / f"{name}.svg": folder / f"{name}.json" for name in names() if is_sweep(load(name))}


def filled(readme: str) -> str:
    """README with its figures as they are now."""
    pattern = re.compile(re.escape(BEGIN) + ".*?" + re.escape(END), re.DOTALL)
    assert len(pattern.findall(readme)) == 1, "the README has no place for figures, or several"
    return pattern.sub(lambda _: f"{BEGIN}\n{headlines()}\n{END}", readme)


if __name__ == "__main__":
    import topics

    from moecomm.bench.plot import draw

    for picture, drawn_from in drawn().items():
        draw([drawn_from], picture)
    path = ROOT / "README.md"
    path.write_text(filled(path.read_text()))
    (ROOT / "bench" / "README.md").write_text(topics.page())
