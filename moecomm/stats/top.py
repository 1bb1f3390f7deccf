"""A view of the counters of a running job, from the files that its ranks keep writing (moecomm/stats/publish.py)."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from moecomm.core.protocol import MAX_HOST_RANKS
from moecomm.errors import BadInput
from moecomm.stats.classify import classify
from moecomm.stats.counters import WAITS, JobStats, Stats
from moecomm.stats.publish import EVERY_S, FORMAT

_MOST_BYTES = 16 << 20
_OLD_S = 5.0  # without a new sample, which comes every second: the rank is gone, or stopped


@dataclass(frozen=True)
class RankView:
    """One rank: its counters of the last seconds.

    Attributes:
        buffer: identity of the Buffer.
        rank, ranks: of it.
        where: "host:pid".
        seconds: between the two samples; 0: there is one, and `stats` is what was counted before.
        stats: what was counted in that time.
        written_ns: wall clock.
    """

    buffer: str
    rank: int
    ranks: int
    where: str
    seconds: float
    stats: Stats
    written_ns: int


def read(folder: Path) -> list[RankView]:
    """Read the files of a folder.

    Raises:
        BadInput: there is none, or one that is no file of counters.
    """
    if not (found := _read(folder)):
        raise BadInput("FOLDER", repr(str(folder)), "one in which a job with MOECOMM_TOP_DIR keeps its counters")
    return found


def _read(folder: Path) -> list[RankView]:
    found = []
    for file in sorted(folder.glob("moecomm-top-*.json")):
        try:
            if (size := file.stat().st_size) > _MOST_BYTES:
                raise ValueError(f"{size} bytes")
            found.append(_view(json.loads(file.read_bytes())))
        except FileNotFoundError:  # its Buffer has been closed
            continue
        except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
            raise BadInput("FOLDER", f"{file} ({error})", "a folder of MOECOMM_TOP_DIR") from error
    return found


def watch(folder: Path, console: Console) -> None:
    """Show a frame a second, each in place of the last, until all Buffers are closed or the user presses Ctrl-C.

    Raises:
        BadInput: as read(), before the first frame; later, a file that has no counters.
    """
    views = read(folder)
    with contextlib.suppress(KeyboardInterrupt), Live(console=console, auto_refresh=False) as live:
        while views:
            live.update(frame(views), refresh=True)
            time.sleep(EVERY_S)
            views = _read(folder)
    if not views:
        console.print("all Buffers are closed")


def _view(found: Any) -> RankView:
    if found["format"] != FORMAT:
        raise ValueError(f"format {found['format']}, not {FORMAT}")
    rank, ranks = int(found["rank"]), int(found["ranks"])
    if not 0 <= rank < ranks <= MAX_HOST_RANKS:
        raise ValueError(f"rank {rank} of {ranks}")
    first, last = found["samples"]
    begun, ended = int(first["time_ns"]), int(last["time_ns"])
    before, stats = (Stats.of_lists(sample["stats"], ranks) for sample in (first, last))
    where = f"{found['host']}:{int(found['pid'])}"
    since = stats.since(before) if ended > begun else stats
    return RankView(str(found["buffer"]), rank, ranks, where, (ended - begun) / 1e9, since, ended)


def frame(views: Sequence[RankView], now_ns: int | None = None) -> Group:
    """Return one frame: for each Buffer what stands out, in words, then a table of its ranks.

    The terminal cuts the end of a frame that is too tall, so the words come first.
    """
    now_ns = time.time_ns() if now_ns is None else now_ns
    buffers: dict[str, list[RankView]] = {}
    for view in views:
        buffers.setdefault(view.buffer, []).append(view)
    parts: list[Any] = []
    for identity, ranks in buffers.items():
        ranks.sort(key=lambda view: view.rank)
        title = f"Buffer {identity}, {len(ranks)} of {ranks[0].ranks} ranks"
        parts += [Text(title, style="bold"), *(Text(f"  {line}") for line in words(ranks)), _table(ranks, now_ns)]
    return Group(*parts)


def words(ranks: Sequence[RankView]) -> list[str]:
    """Return what stands out among the ranks of one Buffer."""
    missing = sorted(set(range(ranks[0].ranks)) - {view.rank for view in ranks})
    if missing:
        return [f"no counters of rank {', '.join(map(str, missing))}: its files are elsewhere, or it is gone"]
    found = classify(JobStats.of_ranks([view.stats for view in ranks]))
    return [finding.text for finding in found] or ["nothing stands out"]


def _table(ranks: Sequence[RankView], now_ns: int) -> Table:
    # Numbers stay whole in a terminal of 80 columns; the name of the process gets the rest.
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0), header_style="dim")
    heads = ("rank", "rounds/s", "rows/s\nin", "rows/s\nout", "MB/s\nin", "MB/s\nout", *(f"{x}\nwait" for x in WAITS))
    for head in heads:
        table.add_column(head, justify="right", no_wrap=True, min_width=max(map(len, head.splitlines())))
    table.add_column("waits\nfor", no_wrap=True, min_width=6)
    table.add_column("process", no_wrap=True, overflow="ellipsis")
    for view in ranks:
        stats, seconds = view.stats, view.seconds or 1.0
        others = [int(n.sum()) for n in (stats.rows_from, stats.rows_to, stats.bytes_from, stats.bytes_to)]
        rates = [stats.rounds / seconds, others[0] / seconds, others[1] / seconds]
        megabytes = [n / seconds / 1e6 for n in others[2:]]
        waits = [float(row.max()) / 1e9 / seconds if row.numel() else 0.0 for row in stats.wait_ns]
        total = stats.wait_ns.sum(dim=0)
        longest = f"rank {int(total.argmax())}" if int(total.max()) > 0 else "-"
        old = (now_ns - view.written_ns) / 1e9
        where = view.where if old < _OLD_S else f"silent for {old:.0f} s, {view.where}"
        table.add_row(
            str(view.rank),
            *(f"{rate:.0f}" for rate in rates),
            *(f"{rate:.1f}" for rate in megabytes),
            *(f"{share:.0%}" for share in waits),
            longest,
            where,
            style="red" if old >= _OLD_S else None,
        )
    return table
