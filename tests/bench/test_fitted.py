"""Tables in a console of 80 columns: no line is longer, and no cell is lost or cut."""

from __future__ import annotations

import io
import re

import pytest
from rich.console import Console
from rich.table import Table

from moecomm.tools import fitted


def test_a_wide_table_is_printed_in_parts_that_name_their_rows() -> None:
    wide = Table(box=None, pad_edge=False)
    wide.add_column("name")
    for column in range(9):
        wide.add_column(f"figure {column}", justify="right", no_wrap=True)
    for row in ("a", "a much longer name than there is room for beside any figure at all, so that it goes on below"):
        wide.add_row(row, *(f"{column}.5" for column in range(9)))
    out = Console(width=80, record=True, file=io.StringIO())
    fitted.show_table(wide, out)
    text = out.export_text()
    assert max(map(len, text.splitlines())) <= 80
    assert all(text.count(f"figure {column}") == 1 and text.count(f"{column}.5") == 2 for column in range(9))
    assert text.count("name ") >= 2 and re.sub(r"\s", "", text).count("3.5") == 2


@pytest.mark.parametrize("width", [80, 30])
def test_columns_without_a_figure_are_left_out(width: int) -> None:
    found = fitted.new_table(("name", "note"), ("us", "host us", "GB/s"))
    for row in ("a", "b"):
        found.add_row(row, "", "1.5", "", "2.5")
    out = Console(width=width, record=True, file=io.StringIO())
    fitted.show_table(found, out)
    text = out.export_text()
    assert "host us" not in text and text.count("1.5") == text.count("2.5") == 2
    assert all(re.search(r"\d\.5|us|GB/s", line) for line in text.splitlines() if line.strip()), "no blank rows"
