"""A growing result, kept in a file as it grows."""

from __future__ import annotations

from pathlib import Path
from typing import Any


class Kept:
    """The latest state of a growing result, also written to the JSON file."""

    def __init__(self, json: Path | None) -> None:
        self.result: dict[str, Any] = {}
        self._json = json

    def __call__(self, result: dict[str, Any]) -> None:
        from moecomm.bench.results import write

        self.result = result
        if self._json is not None:
            write(self._json, result)
