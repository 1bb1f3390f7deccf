"""Tables that fit the console: a table that is too wide is printed in parts, each with the columns that name rows."""

from __future__ import annotations

from collections.abc import Iterable
from copy import copy
from itertools import compress

from rich.console import Console
from rich.table import Column, Table
from rich.text import Text

_GAP = 2  # between columns
_LEAST = 24  # columns of the console reserved for figures next to names


def new_table(names: Iterable[str], figures: Iterable[str] = ()) -> Table:
    """Return a table without rows: columns of names on the left, then columns of figures."""
    table = Table(box=None, pad_edge=False, header_style="dim")
    for column in names:
        table.add_column(column, no_wrap=True)
    for column in figures:
        table.add_column(column, justify="right", no_wrap=True)
    return table


def show_table(table: Table, out: Console, names: int | None = None) -> None:
    """Print a table, without the columns of figures that are empty in all rows.

    Args:
        table: a table without a box.
        out: the console.
        names: number of leading columns that name a row; default: those before the first right-aligned column.
    """
    if names is None:
        names = next((n for n, column in enumerate(table.columns) if column.justify == "right"), 1) or 1
    filled = [n < names or not table.row_count or any(column.cells) for n, column in enumerate(table.columns)]
    table.columns = list(compress(table.columns, filled))
    widths = [max(map(_width, (column.header, *column.cells)), default=0) for column in table.columns]
    if sum(widths) + _GAP * (len(widths) - 1) <= out.width:
        out.print(table)
        return
    named = _narrowed(widths[:names], out.width - _LEAST)
    room = out.width - sum(named) - _GAP * names
    parts: list[list[int]] = [[]]
    used = 0
    for number in range(names, len(widths)):
        widths[number] = min(widths[number], room)
        if parts[-1] and used + widths[number] > room:
            parts.append([])
            used = 0
        parts[-1].append(number)
        used += widths[number] + _GAP
    widths[:names] = named
    for number, part in enumerate(parts):
        if number:
            out.print()
        out.print(_part(table, [*range(names), *part], widths))


def _width(cell: object) -> int:
    """Return the width of a cell in console columns; for several lines, that of the widest."""
    text = cell if isinstance(cell, Text) else Text.from_markup(str(cell))
    return max((line.cell_len for line in text.split("\n")), default=0)


def _narrowed(widths: list[int], room: int) -> list[int]:
    """Reduce the widest of the widths until all fit into `room`."""
    found = list(widths)
    while sum(found) + _GAP * (len(found) - 1) > room:
        found[found.index(max(found))] -= 1
    return found


def _part(table: Table, chosen: list[int], widths: list[int]) -> Table:
    """Return a table of some columns with given widths. Wider cells wrap."""
    part = Table(box=None, pad_edge=False, header_style=table.header_style)
    cells = [list(table.columns[number].cells) for number in chosen]
    for number in chosen:
        column: Column = copy(table.columns[number])
        part.add_column(column.header, justify=column.justify, width=widths[number], overflow="fold")
    for row in zip(*cells, strict=True):
        part.add_row(*row)
    return part
