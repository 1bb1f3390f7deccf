"""Files of results: of one that is complete, and of one that grows."""

from __future__ import annotations

from pathlib import Path
from typing import Any


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
