"""Columns of a benchmark: heading with the unit, the entry of a row, and its format. Tables are made of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from rich.console import Console
from rich.markup import escape

from moecomm.tools.fitted import new_table, show_table

Row = dict[str, Any]
Result = dict[str, Any]
_WIDE = 132  # columns of a table in a file or a pipe


class Column(NamedTuple):
    """A column.

    Attributes:
        head: heading, with the unit.
        entry: name of the entry, with dots into nested ones (`us.p50`); or a function that takes a row and returns the
            value. A cell is empty where the entry is missing or None.
        form: how the value is written, as of str.format.
    """

    head: str
    entry: str | Callable[[Row], Any]
    form: str = "{}"

    def text(self, row: Row) -> str:
        """Return the cell of a row, with brackets that are no markup."""
        return escape(self.plain(row))

    def plain(self, row: Row) -> str:
        """Return the text of the cell of a row."""
        value = self.entry(row) if callable(self.entry) else entry_of(row, self.entry)
        return "" if value is None else self.form.format(value)


class Table(NamedTuple):
    """The table of a benchmark.

    Attributes:
        heading: what is printed above it, from the result.
        labels: columns that name a row.
        figures: the other columns. A row with `why` has dashes there but for entries that it has, and its reason is
            printed below the table.
        more: prints what follows.
        rows: the rows of a result.
    """

    heading: Callable[[Result], str]
    labels: Sequence[Column]
    figures: Sequence[Column]
    more: Callable[[Result, Console], None] = lambda result, out: None
    rows: Callable[[Result], list[Row]] = lambda result: list(result["rows"])

    def show(self, result: Result, out: Console) -> None:
        """Print it."""
        out.print(self.heading(result), highlight=False, markup=False)
        rows = self.rows(result)
        show_rows(rows, self.labels, self.figures, out)
        for row in rows:
            if not has_figures(row):
                name = " ".join(filter(None, (label.plain(row) for label in self.labels)))
                out.print(f"{name}: {row['why']}", style="dim", highlight=False, markup=False)
        self.more(result, out)


def console() -> Console:
    """Return standard output, as wide as the terminal; without one, wide enough for a table."""
    out = Console()
    return out if out.is_terminal else Console(width=max(out.width, _WIDE))


def entry_of(row: Row, path: str) -> Any:
    """Return an entry, None where it is missing; `path` has dots into nested entries."""
    value: Any = row
    for name in path.split("."):
        value = value.get(name) if value is not None else None
    return value


def has_figures(row: Row) -> bool:
    """Return False for a row that has a reason in the place of figures; some rows have both."""
    return "why" not in row or "us" in row


def joined(*names: str) -> Callable[[Row], str]:
    """Return a function that takes a row and returns these entries as words."""
    return lambda row: " ".join(str(row[name]) for name in names if row.get(name))


def show_rows(rows: list[Row], labels: Sequence[Column], figures: Sequence[Column], out: Console) -> None:
    """Print rows as a table."""
    table = new_table((label.head for label in labels), (figure.head for figure in figures))
    for row in rows:
        lacking = not has_figures(row)
        cells = ["-" if lacking and callable(figure.entry) else figure.text(row) or "-" * lacking for figure in figures]
        table.add_row(*(label.text(row) for label in labels), *cells)
    show_table(table, out, names=len(labels))


def show_plain(rows: list[Row], out: Console) -> None:
    """Print rows of a benchmark that declares no table, with a column for each entry but nested ones."""
    nested = {key for row in rows for key, of in row.items() if isinstance(of, dict) and dict in map(type, of.values())}
    keys = [key for key in dict.fromkeys(key for row in rows for key in row) if key not in nested]
    table = new_table(())
    for key in keys:
        figures = all(isinstance(row.get(key, 0), (int, float)) for row in rows)
        table.add_column(key, justify="right" if figures else "left", no_wrap=figures)
    for row in rows:
        table.add_row(*(escape(str(row.get(key, ""))) for key in keys))
    show_table(table, out)
