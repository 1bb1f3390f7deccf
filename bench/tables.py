"""Results of bench/results, and rows of tables made from them: times, windows, and marks of times that are too old."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import equal_kernels
import launches

from moecomm_bench import sources

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "bench" / "results"
CSRC = ROOT / "csrc"
OLDER = "†"
_LAYERS_AS_CALLED = "2026-11-28"  # since then layers note a caller's window
WINDOW = " | window"  # the end of the heads of a table
LEGEND = (
    f"{OLDER}: moecomm's kernels behind this time, or the blocks, chunks or schedules that the host chooses for them, "
    "have changed since the run, or are not shown to be the same; behind eager times and host times, also the Python "
    "and C++ that a call runs. Today's time may be shorter or longer. Times of other libraries are not affected."
)
OPENED = (
    "`window`: peer-visible memory of a rank in the run; behind >, that of a Buffer that a caller opens for these "
    "sizes: the run had more open, for the rows of several inputs, and did not note it. Empty: the result lacks it."
)
AGED = f"{OLDER}: moecomm's kernel has changed since the run, so its time today may be another."
MANY = ("dispatch", "combine")  # of one domain
FEW = tuple(f"{part}{equal_kernels.FEW}" for part in MANY)
ROUNDS = (*MANY, *FEW)
CASTING = (launches.CASTING,)
PLACED = (f"dispatch{equal_kernels.PLACED}",)
DOMAINS = ("dispatch between domains", "combine between domains")
# Further parts of rounds between domains, by what they put through.
THROUGH = {
    "lsa": ("puts",),
    "emulated NIC": ("puts", "NIC", "rounds by NIC"),
    "gin": ("gin", "RMA plugin", "rounds by gin"),
    "nvshmem": ("puts", "rounds by nvshmem"),
}
LAYER = (*ROUNDS, "GEMM", "fused layer")
CALLS, LAYER_CALLS = ("calls",), ("calls", "layer calls")  # what the host runs for eager rounds and layers
# Overlapped operators, and their results.
OPERATORS = (
    "all-gather-matmul",
    "matmul-reduce-scatter",
    "matmul-all-reduce",
    "matmul-all-to-all",
    "embedding-all-to-all",
)
OVERLAP = tuple(f"overlap-{name}-h100-2" for name in OPERATORS)
OVERLAP_H200 = tuple(f"overlap-{name}-h200-2" for name in OPERATORS[:-1])


class Topic(NamedTuple):
    """A section of a page: heading, description, names of the results, and the function that makes the table.

    Results of `kinds` on more GPUs get a table for each machine, by `tables_of`.  `needed`: one of these kinds, without
    whose result a machine gets none.
    """

    title: str
    about: str
    results: str  # names, blanks between them
    table: Callable[[], str]
    kinds: str = ""  # names without the machine, blanks between them
    tables_of: Callable[[list[str]], str] = lambda some: ""
    needed: str = ""

    @property
    def named(self) -> list[str]:
        """Names of the results of the first table."""
        return self.results.split()

    @property
    def larger(self) -> list[list[str]]:
        """Names of results on more GPUs, a list for each machine."""
        most: dict[str, int] = {}
        for kind, _, gpus in map(split, self.named):
            most[kind] = max(gpus, most.get(kind, 0))
        found: dict[tuple[int, str], list[str]] = {}
        for name in names():
            kind, card, gpus = split(name)
            if kind in self.kinds.split() and gpus > most.get(kind, 0):
                found.setdefault((gpus, card), []).append(name)
        every = (found[machine] for machine in sorted(found))
        return [some for some in every if not self.needed or of_kind(some, self.needed)]

    @property
    def names(self) -> list[str]:
        """Names of all results."""
        return [*self.named, *(name for some in self.larger for name in some)]


def split(name: str) -> tuple[str, str, int]:
    """Return kind, card and number of GPUs of a result; no card and 0 where its name has none."""
    found = re.fullmatch(r"(.+)-([a-z]+\d+)-(\d+)", name)
    return (found[1], found[2], int(found[3])) if found else (name, "", 0)


def of_kind(names: Iterable[str], *kinds: str) -> list[str]:
    """Return those of the results that are of these kinds, in the order of the kinds."""
    return [name for kind in kinds for name in names if split(name)[0] == kind]


def where(found: dict[str, Any]) -> str:
    """Return the number of ranks with a GPU each, and the name of the GPUs."""
    ranks = found.get("case", {}).get("ranks") or found.get("ranks") or len(found["machine"]["gpus"])
    return f"{ranks} {gpu(found).removesuffix('s') if ranks == 1 else gpu(found)}"


def load(name: str) -> dict[str, Any]:
    """Load one result of bench/results."""
    return dict(json.loads((RESULTS / f"{name}.json").read_text()))


def names() -> list[str]:
    """Return the names of all results."""
    return sorted(path.stem for path in RESULTS.glob("*.json"))


def older(found: dict[str, Any], parts: Iterable[str]) -> bool:
    """Return True if any of these parts (moecomm_bench.sources, bench/launches.py) has changed since the measurement.

    A part has changed if its source has, unless bench/equal_kernels.py has found the machine code to be the same, if
    the host launches it otherwise, if the tuning table decides otherwise for it, or if the host runs other code.
    """
    now, launched, ranks = digests(), launches.digests(), found.get("case", {}).get("ranks")
    decided, then = launches.decided(), launches.noted(found.get("commit", ""))
    kernels, chosen, tables = (then.get(kind, {}) for kind in ("kernels", "launches", "tables"))
    kernels = kernels | found["kernels"]

    def changed(part: str) -> bool:
        source, choices = equal_kernels.source_of(part), launches.keys(part, ranks)
        assert choices or source in now or part in decided, f"no part: {part}"
        if any(chosen.get(key) != launched[key] for key in choices):
            return True
        if part in decided and tables.get(part) != decided[part]:
            return True
        return source in now and kernels.get(source) not in (now[source], *equal_kernels.equal(part, now[source]))

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
    eager: Iterable[int] = (),
    called: Iterable[str] = CALLS,
) -> str:
    """Return one row of a table, marked if its figures are older than what they measure.

    Args:
        found: the result with the figures.
        parts: the parts of the kernels that it measures: see `older`.
        cells: the cells of the row.
        beside: a second result with figures in the row.
        at: the cells to mark; in rows with other libraries, the cells of moecomm.
        eager: the cells that depend on further parts, such as eager times, which are marked by themselves if `parts`
            are as they were.
        called: these parts, by default what the host runs for eager times and host times.
    """
    if any(older(one, parts) for one in (found, beside) if one):
        marked = at
    else:
        marked = eager if eager and older(found, called) else ()
    return f"| {' | '.join(with_mark(cell) if index in marked else cell for index, cell in enumerate(cells))} |"


def with_mark(cell: str) -> str:
    """Mark a cell, unless it is empty."""
    return f"{cell} {OLDER}" if cell else cell


def table(heads: str, rows: Iterable[str]) -> str:
    """Return a table of lines; `heads` has | between columns. Leave out a last column `window` that no row fills."""
    rows, unfilled = list(rows), "|  |"
    if heads.endswith(WINDOW) and all(row.endswith(unfilled) for row in rows):
        heads, rows = heads.removesuffix(WINDOW), [f"{row.removesuffix(unfilled)}|" for row in rows]
    return "\n".join([f"| {heads} |", "| --- |" + " --- |" * heads.count("|"), *rows])


def window_of(found: dict[str, Any], *rows: dict[str, Any]) -> str:
    """Format the largest window in these rows or entries of `memory` of a result; empty if none has it.

    Behind `>` is a caller's window, which the run, in order to rotate among inputs, exceeded by what it did not note.
    """
    for keys, least in ((("opened_bytes", "opened"), ""), (("window_bytes", "window"), _least(found))):
        if sizes := [row[key] for row in rows for key in keys if key in row]:
            return f"{least}{max(sizes) / 2**30:.1f} GiB"
    return ""


def _least(found: dict[str, Any]) -> str:
    """Return ">" and a blank for a result whose windows are a caller's, and empty text if they were open in the run."""
    if found.get("benchmark") == "moe":
        return "> " if found["date"] >= _LAYERS_AS_CALLED else ""
    return "> " if found.get("case", {}).get("inputs", 1) > 1 else ""


def window_in(found: dict[str, Any], tokens: int, layout: str) -> str:
    """Format the window of a rank in `memory` of a result, at one size in one layout; empty if the result lacks it."""
    of_size = (memory for memory in found.get("memory", ()) if memory["tokens"] == tokens)
    return window_of(found, *(memory for memory in of_size if memory.get("layout", layout) == layout))


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


def gpu(found: dict[str, Any]) -> str:
    """Return the name of the machine's GPUs, short."""
    gpus = found["machine"]["gpus"]
    return next((word for word in gpus[0].split() if word[1:].isdigit()), gpus[0]) + "s" if gpus else "CPU ranks"


def source(name: str, results: str) -> str:
    """Return a link to a result, with its date and commit; `results` is the folder of results from the page."""
    found = load(name)
    return f"[`{name}.json`]({results}/{name}.json) ({found['date']}, {found['commit']})"
