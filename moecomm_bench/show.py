"""`moecomm bench show`: the origin of each result, and its table."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from moecomm_bench import columns, declared, result_file


def show(paths: Iterable[Path]) -> None:
    """Print each result.  Raises BadInput for a file that is none."""
    out = columns.console()
    for path in paths:
        result = result_file.read(path)
        about = f"{result['what']}: {result['date']}, commit {result['commit'] or 'unknown'}; {result['command']}"
        out.print(about, style="bold", highlight=False, markup=False, soft_wrap=True)
        if "how" in result:
            out.print(result["how"], highlight=False, markup=False)
        with result_file.reading(path):
            declared.show(result, out)
