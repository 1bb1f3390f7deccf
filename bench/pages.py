"""Generated pages of measurements: docs/measurements.md, and two pages of secondary results for maintainers."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

import checks
import times
import topics
from tables import LEGEND, OPENED, ROOT, Topic, load, names, where

MEASUREMENTS = ROOT / "docs" / "measurements.md"
CALLS, CHECKED = (ROOT / "docs" / "maintainers" / f"measured_{what}.md" for what in ("calls", "checks"))

HEAD = f"""# Measurements

How fast moecomm is, measured on H100s and H200s, beside other libraries where they were there.  To measure your own
machine:

```bash
moecomm bench dispatch-combine --json mine.json
moecomm bench show mine.json
moecomm bench plot mine.json --out mine.svg
```

Times are medians of whole operations as a caller sees them, of the slowest rank: counts, layout, casts and waits
included.  In parentheses, where the text says nothing else: the time that the bytes alone take at the fastest
all-to-all of the same run, over the measured time; that is a reference and no ceiling, for some operations are faster.
Weights and activations are bfloat16 unless FP8 is named, sums travel as the table says, and DeepSeek-V3 is hidden 7168,
top-8 of 256 experts.  Below each table are the hosts, backend, model, mode, date and commit of its results, and a
command for long tables.  Figures move from machine to machine: compare ratios within one run.

{OPENED}

{LEGEND}

[Performance](performance.md) says how things are timed.  [Calls and steps](maintainers/measured_calls.md) and
[checks](maintainers/measured_checks.md) have pages of their own, and [bench](../bench/README.md) says how these pages
are written by `python bench/readme.py`."""

CALLS_HEAD = f"""# Measured calls and steps

Written by `python bench/readme.py`.  Single calls of moecomm, of NCCL and of torch, and steps of many layers.
[How things are timed](../performance.md).
{OPENED}  {LEGEND}  [bench](../../bench/README.md) says which times are marked.

UCCL-EP was not measured: the benchmark has no adapter for it, and its CPU proxies need a network, which these machines
lack."""

GPU_TESTS = "" if checks.GPU_TESTS in names() else "No run of `tests/gpu/run` is kept since the runner notes them.  "
CHECKED_HEAD = f"""# Measured checks

Written by `python bench/readme.py`.  Runs that compare every value with a reference, and the time that checks inside
kernels take.  {GPU_TESTS}{LEGEND}
[bench](../../bench/README.md) says which times are marked."""


def pages() -> dict[Path, str]:
    """Return the content of each page."""
    return {
        MEASUREMENTS: _page(MEASUREMENTS, HEAD, topics.TOPICS),
        CALLS: _page(CALLS, CALLS_HEAD, times.topics()),
        CHECKED: _page(CHECKED, CHECKED_HEAD, checks.TOPICS),
    }


def _page(path: Path, head: str, topics: Iterable[Topic]) -> str:
    results = os.path.relpath(ROOT / "bench" / "results", path.parent)
    return "\n\n".join([head, *(section(topic, results) for topic in topics)]) + "\n"


def conditions(name: str) -> str:
    """Return the machine, backend, model, mode, date and commit of a result."""
    found = load(name)
    case, machine = found.get("case", {}), found["machine"]
    on_gpus = machine["gpus"] and case.get("backend") != "host"
    ranks = case.get("ranks") or found.get("ranks")
    gpus = ranks if ranks and not found.get("shared_gpus") else len(machine["gpus"])
    place = f"{gpus} x {machine['gpus'][0]}" if on_gpus else f"{machine['cores']} cores, {machine['cpu']}"
    through = found.get("backend", "")
    how = ["caches flushed" if case.get("cold") else "", case.get("mode", "")]
    cells = [place, f"`{through}`" if through else "", case.get("model") or "", *how, found["date"], found["commit"]]
    return ", ".join(filter(None, cells))


def section(topic: Topic, results: str) -> str:
    """Return the section of one topic; `results` is the folder of results from its page."""
    parts = [f"## {topic.title}", topic.about, topic.table(), _sources(topic.named, results)]
    for some in topic.larger:
        parts += filter(None, [f"**{where(load(some[0]))}**", topic.tables_of(some), _sources(some, results)])
    return "\n\n".join(parts)


def _sources(some: list[str], results: str) -> str:
    """Return links to results, by their conditions, and the command that shows them."""
    alike: dict[str, list[str]] = {}
    for name in some:
        alike.setdefault(conditions(name), []).append(f"[`{name}`]({results}/{name}.json)")
    by_conditions = "; ".join(f"{', '.join(links)}: {said}" for said, links in alike.items())
    files = f"{{{','.join(some)}}}" if len(some) > 1 else some[0]
    command = f"`python -m moecomm_bench show bench/results/{files}.json`"
    return f"{by_conditions}.  Long tables: {command}."
