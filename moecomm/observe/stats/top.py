"""A view of the counters of a running job, from the files that its ranks keep writing (observe/stats/publish.py)."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
from rich.console import Console, Group
from rich.live import Live
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from moecomm.base.documents import Document
from moecomm.errors import BadInput
from moecomm.observe.stats.classify import classify
from moecomm.observe.stats.counters import WAITS, JobStats, Stats
from moecomm.observe.stats.publish import EVERY_S, FORMAT
from moecomm.observe.stats.reading import Rank, Ranks, Sample, Whole

_OLD_S = 5.0  # without a new sample, which comes every second: the rank is gone, or stopped


class _File(msgspec.Struct):
    """A file of moecomm.observe.stats.publish."""

    format: Literal[1]
    buffer: str
    rank: Rank
    ranks: Ranks
    host: str
    pid: Whole
    samples: Annotated[list[Sample], msgspec.Meta(min_length=2, max_length=2)]


assert FORMAT == 1, "the one that _File describes"
_FILE = Document("FOLDER", "a folder of MOECOMM_TOP_DIR", _File)


@dataclass(frozen=True)
class RankView:
    """Counters of one rank over the last seconds.

    Attributes:
        buffer: identity of the Buffer.
        rank, ranks: the rank, and the number of ranks, of the Buffer.
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
    found: dict[tuple[str, int], RankView] = {}
    sizes: dict[str, int] = {}
    for file in sorted(folder.glob("moecomm-top-*.json")):
        try:
            view = _view(file)
        except BadInput:
            if file.exists():
                raise
            continue  # its Buffer has been closed
        if sizes.setdefault(view.buffer, view.ranks) != view.ranks or (view.buffer, view.rank) in found:
            _FILE.refuse(file, f"rank {view.rank} of {view.ranks}, unlike other files of its Buffer")
        found[view.buffer, view.rank] = view
    return list(found.values())


def watch(folder: Path, console: Console) -> None:
    """Show a frame a second, until all Buffers are closed or the user presses Ctrl-C.

    On a terminal each frame takes the place of the last; a file gets them one below the other.

    Raises:
        BadInput: as read(), before the first frame; later, a file that has no counters.
    """
    views = read(folder)
    with contextlib.suppress(KeyboardInterrupt), _screen(console) as show:
        while views:
            show(frame(views))
            time.sleep(EVERY_S)
            views = _read(folder)
    if not views:
        console.print("all Buffers are closed")


@contextlib.contextmanager
def _screen(console: Console) -> Iterator[Callable[[Group], None]]:
    if not console.is_terminal:  # where Live shows nothing before the end
        yield console.print
        return
    with Live(console=console, auto_refresh=False) as live:
        yield lambda shown: live.update(shown, refresh=True)


def _view(file: Path) -> RankView:
    found = _FILE.read(file)
    first, last = found.samples
    try:
        if found.rank >= found.ranks:
            raise ValueError(f"rank {found.rank} of {found.ranks}")
        before, stats = (sample.stats.stats(found.ranks) for sample in (first, last))
        if before.rows_per_expert.shape != stats.rows_per_expert.shape:
            raise ValueError("rows_per_expert of two lengths")
    except ValueError as error:
        _FILE.refuse(file, error)
    where = f"{found.host}:{found.pid}"
    since = stats.since(before) if last.time_ns > first.time_ns else stats
    seconds = (last.time_ns - first.time_ns) / 1e9
    return RankView(found.buffer, found.rank, found.ranks, where, seconds, since, last.time_ns)


def frame(views: Sequence[RankView], now_ns: int | None = None) -> Group:
    """Return one frame: for each Buffer its findings in words, then a table of its ranks.

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
    """Return the findings on the ranks of one Buffer, in words."""
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
            escape(where),
            style="red" if old >= _OLD_S else None,
        )
    return table
