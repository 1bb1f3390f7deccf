"""A generator of pages and plots from bench/results/*.json: python bench/readme.py.

It writes the pages of bench/pages.py, and the figures of README.md and docs/all_gather_matmul_study.md.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from functools import lru_cache
from pathlib import Path
from typing import Any

import equal_kernels
import launches

from moecomm_bench import beside, sources
from moecomm_bench.layers import BY_RANK

ROOT = Path(__file__).parent.parent
CSRC = ROOT / "csrc"
BEGIN, END = "<!-- figures: written by bench/readme.py -->", "<!-- end of figures -->"
OLDER = "†"
WINDOW = " | window"  # the end of the heads of a table
WINDOW_IS = (
    "*Window*: peer-visible memory of a rank of moecomm, of a Buffer that a caller opens for these sizes. The run had "
    "more open, for the outputs of all inputs that it rotates among; results so far do not say how much."
)
LEGEND = (
    f"{OLDER}: moecomm's kernels behind this time, or the blocks, chunks or schedules that the host chooses for them, "
    "have changed since the run, or are not shown to be the same. Today's time may be shorter or longer. Times of "
    "other libraries are not affected. Marks do not cover the Python that a call runs, on which eager times and host "
    "times depend."
)
MANY = ("dispatch", "combine")  # of one domain
FEW = tuple(f"{part}{equal_kernels.FEW}" for part in MANY)
ROUNDS = (*MANY, *FEW)
DOMAINS = ("dispatch between domains", "combine between domains")
# Further parts of rounds between domains, by what they put through.
THROUGH = {
    "lsa": ("puts",),
    "emulated NIC": ("puts", "NIC", "rounds by NIC"),
    "gin": ("gin", "RMA plugin", "rounds by gin"),
    "nvshmem": ("nvshmem", "rounds by nvshmem"),
}
LAYER = (*ROUNDS, "GEMM", "fused layer")
OPERATORS = (
    "all-gather-matmul",
    "matmul-reduce-scatter",
    "matmul-all-reduce",
    "matmul-all-to-all",
    "embedding-all-to-all",
)
# Results with pictures besides sweeps and those with other libraries.
PICTURES = ("ll-h200-4", "latency-backends-h100-4", "backends-domains-h100-4", "domain-counts-h100-4")
OVERLAP = tuple(f"overlap-{name}-h100-2" for name in OPERATORS)
OVERLAP_H200 = tuple(f"overlap-{name}-h200-2" for name in OPERATORS[:-1])


def load(name: str) -> dict[str, Any]:
    """Load one result of bench/results."""
    return dict(json.loads((ROOT / "bench" / "results" / f"{name}.json").read_text()))


def names() -> list[str]:
    """Return the names of all results."""
    return sorted(path.stem for path in (ROOT / "bench" / "results").glob("*.json"))


def older(found: dict[str, Any], parts: Iterable[str]) -> bool:
    """Return True if any of these parts (moecomm_bench.sources, bench/launches.py) has changed since the measurement.

    A part has changed if its source has, unless bench/equal_kernels.py has found the machine code to be the same, or if
    the host launches it otherwise.
    """
    now, launched, ranks = digests(), launches.digests(), found.get("case", {}).get("ranks")
    then = launches.noted(found.get("commit", ""))
    kernels, chosen = then.get("kernels", {}) | found["kernels"], then.get("launches", {})

    def changed(part: str) -> bool:
        source, choices = equal_kernels.source_of(part), launches.keys(part, ranks)
        if any(chosen.get(key) != launched[key] for key in choices):
            return True
        if source not in now:
            assert choices, f"no part: {part}"
            return False
        return kernels.get(source) not in (now[source], *equal_kernels.equal(part, now[source]))

    return any(map(changed, parts))


def round_parts(tokens: int, what: str = "pair") -> tuple[str, ...]:
    """Return the parts behind dispatches, combines or pairs of so many tokens a rank.

    128 tokens of 16-bit rows always go in packets (moecomm/base/packets.py), more than 512 never.
    """
    parts = FEW if tokens <= 128 else MANY if tokens > 512 else ROUNDS
    return parts if what == "pair" else tuple(part for part in parts if part.startswith(what))


def layer_parts(tokens: int) -> tuple[str, ...]:
    """Return the parts behind expert layers of so many tokens a rank.  Fused ones make row descriptors, no packets."""
    return (*(MANY if tokens > 512 else ROUNDS), "GEMM", "fused layer")


@lru_cache(maxsize=1)
def digests() -> dict[str, str]:
    """Return the digests of the current kernels."""
    return sources.digests(CSRC)


def line(
    found: dict[str, Any],
    parts: Iterable[str],
    *cells: str,
    beside: dict[str, Any] | None = None,
    at: Iterable[int] = (0,),
) -> str:
    """Return one row of a table, marked if its figures are older than the kernels they measure.

    Args:
        found: the result with the figures.
        parts: the parts of the kernels that it measures: see `older`.
        cells: the cells of the row.
        beside: a second result with figures in the row.
        at: the cells to mark; in rows with other libraries, the cells of moecomm.
    """
    if any(older(one, parts) for one in (found, beside) if one):
        cells = tuple(f"{cell} {OLDER}" if index in at and cell else cell for index, cell in enumerate(cells))
    return f"| {' | '.join(cells)} |"


def table(heads: str, rows: Iterable[str]) -> str:
    """Return a table of lines; `heads` has | between columns. Leave out a last column `window` that no row fills."""
    rows, unfilled = list(rows), "|  |"
    if heads.endswith(WINDOW) and all(row.endswith(unfilled) for row in rows):
        heads, rows = heads.removesuffix(WINDOW), [f"{row.removesuffix(unfilled)}|" for row in rows]
    return "\n".join([f"| {heads} |", "| --- |" + " --- |" * heads.count("|"), *rows])


def window_of(*rows: dict[str, Any]) -> str:
    """Format the largest window in these rows or entries of `memory`; empty if none has it."""
    sizes = [row[key] for row in rows for key in ("window_bytes", "window") if key in row]
    return f"{max(sizes) / 2**30:.1f} GiB" if sizes else ""


def window_in(found: dict[str, Any], tokens: int, layout: str) -> str:
    """Format the window of a rank in `memory` of a result, at one size in one layout; empty if the result lacks it."""
    of_size = (memory for memory in found.get("memory", ()) if memory["tokens"] == tokens)
    return window_of(*(memory for memory in of_size if memory.get("layout", layout) == layout))


def time_of(us: float) -> str:
    """Format a time."""
    return f"{us / 1e3:.2f} ms" if us >= 1e4 else f"{us:.0f} us" if us >= 100 else f"{us:.1f} us"


def figure(found: dict[str, Any], **wanted: Any) -> str:
    """Return the time of the row with these values, and the fraction of the wire that it reaches; empty if there is
    none.

    Rows are by default moecomm's, of flat layout, with the blocks of the tuning table.
    """
    wanted = {"who": "moecomm", "layout": "flat", "sms_asked": 0, "payload": "", "variant": "", **wanted}
    for row in found["rows"]:
        if "us" in row and all(row.get(key, value) == value for key, value in wanted.items()):
            wire = "" if row.get("of_wire") is None else f" ({row['of_wire']:.2f})"
            return time_of(row["us"]["p50"]) + wire
    return ""


PEERS = "peers-alone-h200"
WAYS = ("sequential", "one launch", "fp8, one launch")  # variants of a layer
LAYER_COLUMNS = (
    f"GPUs | model | tokens a rank | unfused | fused | over GEMMs alone | torch's over it | fused, FP8 weights{WINDOW}"
)
README_LAYERS = {"moe-deepseek-v3-h100-4": (128, 4096), "moe-qwen3-235b-h100-4": (128, 4096)}


def headlines() -> str:
    """Return the figures of README: rounds of moecomm and of other libraries, and a few expert layers."""
    import head_to_head  # which import this module
    import times

    shown = "\n\n".join([*head_to_head.front(), *times.front(), *layers()])
    more = "[Measurements](bench/README.md) says which times are marked."
    return f"{shown}\n\n{LEGEND} {more}" if OLDER in shown else shown


def peer_rows(gpus: int, tokens: int) -> list[str]:
    """Return rows of other libraries at one size: FP8 dispatches, or bf16 where there is no FP8."""
    times: dict[tuple[str, str], dict[tuple[str, str], str]] = {}
    for row in load(PEERS)["rows"]:
        if (row["gpus"], row["tokens"]) == (gpus, tokens):
            of_kernels = "-".join(f"{us:g}" for us in row["us"])
            epilogue = f" + {row['epilogue_us']:g}" if "epilogue_us" in row else ""
            times.setdefault((row["who"], row["layout"]), {})[row["what"], row["dtype"]] = f"{of_kernels}{epilogue} us"
    found = []
    for (who, layout), of_way in times.items():
        dispatch = of_way.get(("dispatch", "fp8")) or f"{of_way['dispatch', 'bf16']}, bf16"
        found.append(f"| {gpus} | {tokens} | {who}, {layout} | {dispatch} | {of_way['combine', 'bf16']} |")
    return found


def layers() -> list[str]:
    """Return a few complete expert layers on 4 GPUs, if there are results: heading, table and sources."""
    used = [name for name in names() if name in README_LAYERS]
    if not used:
        return []
    head = (
        "Whole expert layers (`buffer.moe`), bfloat16, in a captured graph; medians of the slowest rank. "
        "*Unfused*: dispatch, experts and combine as separate launches. *Fused*: rows travel while the GEMMs run. The "
        "first ratio divides the faster of these two layers by our two grouped GEMMs alone, which are separate "
        "launches: a fused layer can take a little less. The second divides torch's layer (all_to_all and grouped "
        f"GEMMs, same run, {torchs_rows(used)}) by the faster of ours. The last column is the fused layer with FP8 "
        "weights. *Window*: peer-visible memory of a rank of a Buffer with room for any routing; a Buffer takes "
        "[less](docs/memory.md) by default. No fused layer of another library (DeepGEMM's Mega MoE, FlashInfer) was "
        "measured:"
    )
    rows = [row for name in used for row in layer_rows(name, README_LAYERS[name])]
    return [head, table(LAYER_COLUMNS, rows), source(used)]


def torchs_rows(used: Iterable[str]) -> str:
    """Return words for the rows that torch's layers send. Older results lack the layer with a row for each rank."""
    with_fewer = all(map(has_rows_by_rank, used))
    rows = "a row for each (token, expert)"
    return f"the faster of {rows} and one for each (token, rank)" if with_fewer else rows


def has_rows_by_rank(name: str) -> bool:
    """Return True if torch's layer with a row for each (token, rank) was measured in a result."""
    return any(row.get("variant") == BY_RANK for row in load(name)["rows"])


def layer_rows(name: str, sizes: Iterable[int] = ()) -> list[str]:
    """Return rows of the layers in one result of `moecomm bench moe`, for these numbers of tokens or for all."""
    import times  # which imports this module

    found, lines = load(name), []
    gpus = f"{len(found['machine']['gpus'])} {times.gpu(found)}"
    rows = [row for row in found["rows"] if row["who"] == "moecomm" and row["what"] == "layer"]
    for tokens in sizes or dict.fromkeys(row["tokens"] for row in rows):
        apart, fused, fp8 = (next(r for r in rows if (r["tokens"], r["variant"]) == (tokens, way)) for way in WAYS)
        best = min(apart, fused, key=lambda row: row["us"]["p50"])
        ratios = [f"{best[key]:.2f}" if best.get(key) else "" for key in ("of_gemms", "of_torch")]
        window = window_of(apart, fused, fp8)
        *both, eight = (time_of(row["us"]["p50"]) for row in (apart, fused, fp8))
        cells = (gpus, best["model"], str(tokens), *both, *ratios, eight, window)
        lines.append(line(found, layer_parts(tokens), *cells, at=(1,)))
    return lines


def source(used: Iterable[str]) -> str:
    """Return the files behind a table, each with its date and commit."""
    files = (
        f"[`{name}.json`](bench/results/{name}.json) ({load(name)['date']}, {load(name)['commit']})"
        for name in dict.fromkeys(used)
    )
    return f"Source: {', '.join(files)}."


def is_sweep(found: dict[str, Any]) -> bool:
    """Return True if a result has enough sizes to be drawn."""
    return found.get("benchmark") == "dispatch-combine" and len(found["case"]["tokens"]) > 4


def drawn() -> dict[Path, list[Path]]:
    """Return the pictures of bench/README.md, and the results that each is drawn from."""
    folder = ROOT / "bench" / "results"
    alone = [name for name in names() if is_sweep(load(name)) or beside.has_peers(load(name))]
    of_pictures = {name: (name,) for name in (*alone, *PICTURES)} | {"overlap-h100-2": OVERLAP}
    return {
        folder / f"{picture}.svg": [folder / f"{name}.json" for name in found] for picture, found in of_pictures.items()
    }


def filled(page: str, figures: str) -> str:
    """Return a page with its current figures."""
    pattern = re.compile(re.escape(BEGIN) + ".*?" + re.escape(END), re.DOTALL)
    assert len(pattern.findall(page)) == 1, "the page has no place for figures, or several"
    return pattern.sub(lambda _: f"{BEGIN}\n{figures}\n{END}", page)


if __name__ == "__main__":
    import pages
    import study

    from moecomm_bench.plot import draw

    for picture, drawn_from in drawn().items():
        draw(drawn_from, picture)
    for path, figures in ((ROOT / "README.md", headlines()), (study.PAGE, study.figures())):
        path.write_text(filled(path.read_text(), figures))
    pages.write_pages()
