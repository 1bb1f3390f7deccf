"""Tuning tables as `moecomm tune` writes them: new lines, and those of the older table that were not measured again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from moecomm.base import trusted_files
from moecomm.base.documents import opened
from moecomm.base.trusted_files import Access
from moecomm.config import cache_dir
from moecomm.errors import BadInput
from moecomm.gpu import tuning
from moecomm.gpu.tuning import Table
from moecomm.gpu.tuning.gemms import Rule
from moecomm_bench import results


def gpu_name(device: torch.device) -> str:
    """Return the name by which tables are found."""
    return torch.cuda.get_device_properties(device).name if device.type == "cuda" else "cpu"


def make_folder(path: Path | None) -> None:
    """Create the folder of the table before measuring, so that a result cannot be lost.

    Args:
        path: file of the table; None: the file in which this user's processes look for it.

    Raises:
        BadInput: the folder cannot be created, or other users can write to it.
    """
    argument, folder = ("MOECOMM_CACHE_DIR", cache_dir()) if path is None else ("out", path.parent)
    try:
        if path is None:
            trusted_files.make_directory(folder, Access.READ_ONLY)
        else:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise BadInput(argument, str(folder), f"a directory that is there or can be made ({error})") from None


def store(gpu: str, measured: Table, path: Path | None) -> Path:
    """Write a table of what was measured and the other lines of the older table; returns its path."""
    older = tuning.users(gpu) if path is None else _table_in(path)
    content = tuning.content(gpu, merged(older, measured))
    if path is not None:
        return results.write(path, content)
    path = tuning.users_path(gpu)
    trusted_files.write(path, Access.READ_ONLY, results.document(path.stem, content).encode())
    return path


def _table_in(path: Path) -> Table:
    """Return the table in a file that the caller named; an empty one if it holds none."""
    try:
        with opened(path, tuning.MOST_BYTES) as file:
            return tuning.parse(file.read())
    except (OSError, ValueError):
        return Table()


def merged(older: Table, measured: Table) -> Table:
    """Return the lines of `measured`, and those of `older` for other rounds, shapes, dtypes and numbers of ranks.

    Where layers were measured, first calls measure theirs again: forms go.
    """
    rounds = {(e.op, e.layout, e.ranks, e.tokens): e for e in (*older.entries, *measured.entries)}
    layers = {(line.dtype, line.ranks): line for line in (*older.layers, *measured.layers)}
    return Table(
        entries=tuple(rounds[place] for place in sorted(rounds)),
        gemms=(*measured.gemms, *_not_in(measured.gemms, older.gemms)),
        fused_gemms=(*measured.fused_gemms, *_not_in(measured.fused_gemms, older.fused_gemms)),
        layers=tuple(layers[place] for place in sorted(layers)),
        forms=() if measured.layers else older.forms,
    )


def _not_in(measured: tuple[Rule, ...], older: tuple[Rule, ...]) -> list[Rule]:
    """Return the older rules whose shape was not measured again, among them all general ones."""
    shapes: set[Any] = {rule.shape for rule in measured} - {None}
    return [rule for rule in older if rule.shape not in shapes]
