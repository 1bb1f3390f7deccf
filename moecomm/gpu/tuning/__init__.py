"""Choices that depend on the GPU: tables measured per GPU, shipped or written by `moecomm tune`.

A table is JSON: {"gpu": name, "entries": [...], "gemms": [...], "fused_gemms": [...], "layers": [...], "forms": [...]},
each list of which may be missing.

- `entries`: block counts and chunk sizes of rounds, as {op, layout, ranks, tokens, blocks, chunk_tokens}. An entry
  holds for up to `tokens` tokens of a rank; the largest entry of its kind also holds for more. Numbers of ranks that
  were not measured use the nearest one that was. The `chunk_tokens` of a combine equals that of the dispatch whose
  rows it returns.
- `gemms`, `fused_gemms`: schedules of grouped GEMMs, and of the two GEMMs of a fused layer (gpu/tuning/gemms.py).
- `layers`: sizes from which on layers run fused, unless they have been measured (moecomm/gpu/tuning/layers.py).
- `forms`: layers that first calls have measured, the last one at the end.  Users' tables alone have them.

What a user's table lacks comes from the shipped one. Ranks may have different tables:

- Tables do not decide which rounds use packets. All ranks must decide alike, so that choice depends only on the number
  of tokens and on room (moecomm/base/packets.py).
- All ranks must run a layer in the same form. The table of rank 0 decides when a Buffer opens
  (moecomm/fused/forms.py).
- No result depends on the schedule of a GEMM.
"""

from __future__ import annotations

import importlib.resources
import json
import re
import warnings
from bisect import bisect_left
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal, TypeVar, cast

import torch

from moecomm.base import trusted_files
from moecomm.base.protocol import MAX_BLOCKS
from moecomm.base.trusted_files import Access
from moecomm.config import cache_dir
from moecomm.gpu.tuning.gemms import Rule, Shape, first_match
from moecomm.gpu.tuning.layers import Bounds, Form, Kind

_Function = TypeVar("_Function", bound=Callable[..., Any])

OPS, LAYOUTS = ("dispatch", "combine"), ("flat", "expert", "batched")
CHUNKS = (1, 2, 4, 8, 16, 32)
DEFAULT_GPU = "NVIDIA H200"  # whose table holds for a GPU without one
_FEW_TOKENS = 16  # whose pieces are fewer than the warps of all multiprocessors
MOST_BYTES = 1 << 20  # of a user's table; shipped tables have a few thousand
_MOST_FORMS = 512  # of a user's table: layers that first calls have measured


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


@dataclass(frozen=True)
class Table:
    """A table: see the module."""

    entries: tuple[Entry, ...] = ()
    gemms: tuple[Rule, ...] = ()
    fused_gemms: tuple[Rule, ...] = ()
    layers: tuple[Bounds, ...] = ()
    forms: tuple[Form, ...] = ()

    def __post_init__(self) -> None:
        """Raise ValueError for a rule of both GEMMs of a layer that asks for more than their rows and columns."""
        for rule in self.fused_gemms:
            if other := {*rule.least, *rule.most} - {"rows", "columns"} or isinstance(rule.schedule, dict):
                raise ValueError(f"fused_gemms: {other!r} of {rule}: want bounds of rows and columns, and a name")


_Steps = tuple[list[int], list[Choice]]  # upper bounds in tokens, and the choice for each

_steps: dict[tuple[str, int, str, str], _Steps] = {}  # cache of choose(), which every round calls
_caches: list[Callable[[], None]] = []  # what empties the caches of other functions
_swapped_in = Table()


def until_forgotten(function: _Function) -> _Function:
    """Cache what a function returns, until tables are read again; a decorator."""
    cached = lru_cache(maxsize=1024)(function)
    _caches.append(cached.cache_clear)
    return cast(_Function, cached)


def choose(gpu: str, ranks: int, op: str, layout: str, num_tokens: int, *, casts: bool = False) -> Choice:
    """Return the choice for a round: from the table in use(), else from this user's table for the GPU, else from the
    shipped one.

    A combine that casts its sums takes the chunks of the table and, of more than 16 tokens, all multiprocessors: to
    cast and to add takes longer there than the links do, on any number of ranks.  Fewer tokens have too few pieces.

    Args:
        gpu: name of the GPU.
        ranks: number of ranks.
        op: "dispatch" or "combine".
        layout: "flat", "expert" or "batched".
        num_tokens: tokens of this rank.
        casts: sums travel with scales.

    Raises:
        ValueError: unknown `op` or `layout`.
    """
    steps = _steps.get((gpu, ranks, op, layout))
    if steps is None:
        steps = _steps[gpu, ranks, op, layout] = _look_up(gpu, ranks, op, layout)
    bounds, choices = steps
    choice = choices[min(bisect_left(bounds, num_tokens), len(choices) - 1)]
    return replace(choice, blocks=MAX_BLOCKS) if casts and num_tokens > _FEW_TOKENS else choice


def _look_up(gpu: str, ranks: int, op: str, layout: str) -> _Steps:
    for table in _tables(gpu):
        if lines := [entry for entry in table.entries if (entry.op, entry.layout) == (op, layout)]:
            nearest = min((entry.ranks for entry in lines), key=lambda n: (abs(n - ranks), -n))
            lines = sorted((e for e in lines if e.ranks == nearest), key=lambda e: e.tokens)
            return [e.tokens for e in lines], [Choice(e.blocks, e.chunk_tokens) for e in lines]
    raise ValueError(f"op={op!r}, layout={layout!r}: want one of {OPS} and one of {LAYOUTS}")


def gemm_schedule(gpu: str, kind: Literal["gemms", "fused_gemms"], dtype: str, shape: Shape) -> str:
    """Return the name of a GEMM's schedule: by the first rule that covers it, those of the user's table first.

    Args:
        gpu: name of the GPU.
        kind: "gemms", or "fused_gemms" for both GEMMs of a fused layer.
        dtype: "bf16" (also for float16) or "fp8".
        shape: sizes of the GEMM.
    """
    return first_match(_rules(gpu, kind), dtype, shape)


@until_forgotten
def _rules(gpu: str, kind: str) -> tuple[Rule, ...]:
    return tuple(rule for table in _tables(gpu) for rule in getattr(table, kind))


def fused_from(gpu: str, dtype: str, ranks: int) -> Bounds | None:
    """Return the sizes for which layers run fused by default; None where neither table has the number of ranks.

    Args:
        gpu: name of the GPU.
        dtype: of the weights: "bf16" (also for float16) or "fp8".
        ranks: number of ranks.
    """
    bounds = (line for table in _tables(gpu) for line in table.layers)
    return next((line for line in bounds if (line.dtype, line.ranks) == (dtype, ranks)), None)


def measured_forms(gpu: str) -> dict[Kind, bool]:
    """Return the layers that first calls have measured, and whether they run fused."""
    lines = (line for table in reversed([*_tables(gpu)]) for line in table.forms)
    return {Kind(**line.kind): line.fused for line in lines}


def keep_form(gpu: str, form: Form) -> None:
    """Add a form to this user's table, in the place of an older one of its kind.

    A table that is written meanwhile may be lost, and so may this line: then the layer is measured again.

    Raises OSError or ValueError: the table can't be read or written, and stays as it is.
    """
    path = users_path(gpu)
    try:
        data = trusted_files.read(path, Access.READ_ONLY, MOST_BYTES)
        found, forms = json.loads(data), parse(data).forms
    except FileNotFoundError:
        found, forms = {"gpu": gpu}, ()
    others = [line for line in forms if line.kind != form.kind]
    found["forms"] = [line.line() for line in (*others, form)][-_MOST_FORMS:]
    trusted_files.write(path, Access.READ_ONLY, json.dumps(found, indent=1).encode())


def _tables(gpu: str) -> Iterator[Table]:
    """Return the tables in the order in which they count. Later ones are read only if asked for."""
    yield _swapped_in
    yield users(gpu)
    yield shipped(gpu)


@contextmanager
def use(table: Table) -> Iterator[None]:
    """Prefer a table to all others in this process, for rounds that begin inside the `with` block."""
    global _swapped_in
    before, _swapped_in = _swapped_in, table
    forget()
    try:
        yield
    finally:
        _swapped_in = before
        forget()


def forget() -> None:
    """Forget what was looked up, so that tables are read again."""
    _steps.clear()
    for clear in _caches:
        clear()


def name_of(dtype: torch.dtype) -> str:
    """Return the name of a dtype of weights in tables: what holds for bfloat16 holds for float16."""
    return "fp8" if dtype == torch.float8_e4m3fn else "bf16"


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
        return parse(trusted_files.read(path, Access.READ_ONLY, MOST_BYTES))
    except FileNotFoundError:
        return Table()
    except (OSError, ValueError) as error:
        warnings.warn(f"{path} is not used: {error}", RuntimeWarning, stacklevel=4)
        return Table()


def shipped(gpu: str) -> Table:
    """Return the table shipped for this GPU, or else that of the H200."""
    folder = importlib.resources.files(__name__)
    file = folder / f"{slug(gpu)}.json"
    return parse((file if file.is_file() else folder / f"{slug(DEFAULT_GPU)}.json").read_text())


def source(gpu: str) -> str:
    """Return which tables count for a GPU, as text."""
    exact = (importlib.resources.files(__name__) / f"{slug(gpu)}.json").is_file()
    named = "shipped" if exact else f"shipped of the {DEFAULT_GPU}, because {gpu} has none"
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        try:
            own = users(gpu)
        except RuntimeWarning as refused:
            return f"{named}; {refused}"
    if own == Table():
        return named
    counts = ", ".join(f"{kind}: {len(lines)}" for kind, lines in vars(own).items() if lines)
    return f"{users_path(gpu)} ({counts}), then {named}"


def parse(text: str | bytes) -> Table:
    """Parse the JSON of a table; lists that older tables do not have are empty. Raises ValueError if it is no table."""
    try:
        found = json.loads(text)
        lines: dict[str, tuple[Any, ...]] = {
            name: tuple(kind(**line) for line in found.get(name, [])) for name, kind in _KINDS.items()
        }
        if not any(name in found for name in _KINDS):
            raise ValueError(f"not a table: want a list of {', '.join(_KINDS)}")
        return Table(**lines)
    except (AttributeError, KeyError, TypeError, RecursionError) as error:
        raise ValueError(f"not a table of entries: {error}") from error


_KINDS: dict[str, Any] = {"entries": Entry, "gemms": Rule, "fused_gemms": Rule, "layers": Bounds, "forms": Form}


def content(gpu: str, table: Table) -> dict[str, Any]:
    """Return the JSON content of a table."""
    rounds = [asdict(entry) for entry in table.entries]
    others = {name: [line.line() for line in getattr(table, name)] for name in _KINDS if name != "entries"}
    return {"gpu": gpu, "entries": rounds, **{name: lines for name, lines in others.items() if lines}}
