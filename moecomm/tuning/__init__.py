"""Block counts and chunk sizes of rounds: tables measured per GPU, shipped or written by `moecomm tune`.

A table is JSON: {"gpu": name, "entries": [{op, layout, ranks, tokens, blocks, chunk_tokens}, ...]}. An entry holds for
up to `tokens` tokens of a rank; the largest entry of its kind also holds for more. Numbers of ranks that were not
measured use the nearest one that was. The `chunk_tokens` of a combine equals that of the dispatch whose rows it
returns.

Tables do not decide which rounds use packets. All ranks must decide alike, whichever tables their users have, so that
choice depends only on the number of tokens and on room (moecomm/core/packets.py).
"""

from __future__ import annotations

import importlib.resources
import json
import re
import warnings
from bisect import bisect_left
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from moecomm.config import cache_dir
from moecomm.core.protocol import MAX_BLOCKS
from moecomm.jit import trusted_files
from moecomm.jit.trusted_files import Access

OPS, LAYOUTS = ("dispatch", "combine"), ("flat", "expert", "batched")
CHUNKS = (1, 2, 4, 8, 16, 32)
_DEFAULT = "h200"  # for a GPU without measurements
_MOST_BYTES = 1 << 20  # of a user's table; shipped tables have a few thousand


@dataclass(frozen=True)
class Choice:
    """The choice for a round: blocks (one per multiprocessor), and tokens of a chunk, which are signaled together."""

    blocks: int
    chunk_tokens: int


@dataclass(frozen=True)
class Entry:
    """A line of a table. Raises ValueError for values that no round can take."""

    op: str
    layout: str
    ranks: int
    tokens: int
    blocks: int
    chunk_tokens: int

    def __post_init__(self) -> None:
        if self.op not in OPS or self.layout not in LAYOUTS:
            raise ValueError(f"op={self.op!r}, layout={self.layout!r}: want {OPS}, {LAYOUTS}")
        numbers = (self.ranks, self.tokens, self.blocks, self.chunk_tokens)
        if not all(type(n) is int and n >= 1 for n in numbers):
            raise ValueError(f"ranks, tokens, blocks, chunk_tokens = {numbers}: want whole numbers, at least 1")
        if self.blocks > MAX_BLOCKS or self.chunk_tokens not in CHUNKS:
            raise ValueError(
                f"blocks={self.blocks}, chunk_tokens={self.chunk_tokens}: want at most {MAX_BLOCKS}, one of {CHUNKS}"
            )


Table = tuple[Entry, ...]
_Steps = tuple[list[int], list[Choice]]  # upper bounds in tokens, and the choice for each

_steps: dict[tuple[str, int, str, str], _Steps] = {}  # cache of choose(), which every round calls
_swapped_in: Table = ()


def choose(gpu: str, ranks: int, op: str, layout: str, num_tokens: int) -> Choice:
    """Return the choice for a round: from the table in use(), else from this user's table for the GPU, else from the
    shipped one.

    Args:
        gpu: name of the GPU.
        ranks: number of ranks.
        op: "dispatch" or "combine".
        layout: "flat", "expert" or "batched".
        num_tokens: tokens of this rank.

    Raises:
        ValueError: unknown `op` or `layout`.
    """
    steps = _steps.get((gpu, ranks, op, layout))
    if steps is None:
        steps = _steps[gpu, ranks, op, layout] = _look_up(gpu, ranks, op, layout)
    bounds, choices = steps
    return choices[min(bisect_left(bounds, num_tokens), len(choices) - 1)]


def _look_up(gpu: str, ranks: int, op: str, layout: str) -> _Steps:
    for table in (_swapped_in, users(gpu), shipped(gpu)):
        if lines := [entry for entry in table if (entry.op, entry.layout) == (op, layout)]:
            nearest = min((entry.ranks for entry in lines), key=lambda n: (abs(n - ranks), -n))
            lines = sorted((e for e in lines if e.ranks == nearest), key=lambda e: e.tokens)
            return [e.tokens for e in lines], [Choice(e.blocks, e.chunk_tokens) for e in lines]
    raise ValueError(f"op={op!r}, layout={layout!r}: want one of {OPS} and one of {LAYOUTS}")


@contextmanager
def use(table: Iterable[Entry]) -> Iterator[None]:
    """Prefer a table to all others in this process, for rounds that begin inside the `with` block."""
    global _swapped_in
    before, _swapped_in = _swapped_in, tuple(table)
    _steps.clear()
    try:
        yield
    finally:
        _swapped_in = before
        _steps.clear()


def slug(gpu: str) -> str:
    """Return the name of a GPU as part of a file name: "NVIDIA H200" becomes h200."""
    words = re.sub(r"[^a-z0-9]+", "-", gpu.lower()).strip("-")
    return words.removeprefix("nvidia-") or "gpu"


def users_path(gpu: str) -> Path:
    """Return the path of this user's own table for a GPU."""
    return cache_dir() / f"tuning-{slug(gpu)}.json"


def users(gpu: str) -> Table:
    """Return this user's own table for a GPU.

    Empty if there is none; empty, with a warning, if the file is invalid or another user could have written it.
    """
    path = users_path(gpu)
    try:
        return parse(trusted_files.read(path, Access.READ_ONLY, _MOST_BYTES))
    except FileNotFoundError:
        return ()
    except (OSError, ValueError) as error:
        warnings.warn(f"{path} is not used: {error}", RuntimeWarning, stacklevel=4)
        return ()


def shipped(gpu: str) -> Table:
    """Return the table shipped for this GPU, or else that of the H200."""
    folder = importlib.resources.files(__name__)
    file = folder / f"{slug(gpu)}.json"
    return parse((file if file.is_file() else folder / f"{_DEFAULT}.json").read_text())


def parse(text: str | bytes) -> Table:
    """Parse the JSON of a table. Raises ValueError if the text is not a table."""
    try:
        return tuple(Entry(**entry) for entry in json.loads(text)["entries"])
    except (KeyError, TypeError, RecursionError) as error:
        raise ValueError(f"not a table of entries: {error}") from error


def content(gpu: str, table: Iterable[Entry]) -> dict[str, Any]:
    """Return the JSON content of a table."""
    return {"gpu": gpu, "entries": [asdict(entry) for entry in table]}
