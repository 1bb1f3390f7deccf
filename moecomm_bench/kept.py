"""Results of commands: printed, and kept in files, when they are complete or while they grow."""

from __future__ import annotations

from pathlib import Path
from typing import Any


def finish(result: dict[str, Any] | None, json: Path | None) -> None:
    """Print the table of a result and keep it; nothing in a process that has nothing to report."""
    from moecomm_bench import columns, declared

    if result is not None:
        declared.show(result, columns.console())
        keep(result, json)


def keep(result: dict[str, Any], json: Path | None) -> None:
    """Write a result to the file, if there is one, and print its path."""
    if json is not None:
        from rich.console import Console

        from moecomm_bench.results import write

        Console().print(str(write(json, result)), highlight=False)


class KeptResult:
    """The latest state of a growing result, also written to the JSON file."""

    def __init__(self, json: Path | None) -> None:
        self.result: dict[str, Any] = {}
        self._json = json

    def __call__(self, result: dict[str, Any]) -> None:
        from moecomm_bench.results import write

        self.result = result
        if self._json is not None:
            write(self._json, result)

    def show(self, rows: list[dict[str, Any]] | None = None) -> None:
        """Print the table; `rows`: only of these."""
        finish(self.result if rows is None else {**self.result, "rows": rows}, None)
