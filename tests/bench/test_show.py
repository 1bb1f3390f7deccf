"""moecomm bench show: the long table of each kept result."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
from rich.console import Console

from moecomm_bench import show, table

RESULTS = sorted((Path(__file__).parents[2] / "bench" / "results").glob("*.json"))


@pytest.mark.parametrize("path", RESULTS, ids=lambda path: path.stem)
def test_every_result_has_a_table(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = Console(width=200, record=True, file=io.StringIO())
    monkeypatch.setattr(table, "console", lambda: out)
    show.show([path])
    said, found = out.export_text(), json.loads(path.read_text())
    assert found["commit"] in said and found["command"] in said
    rows = found.get("rows") or found.get("errors") or found["medians"]
    if found.get("benchmark") == "latency-backends":  # a column for each backend
        rows = {row["bytes"] for row in rows if "bytes" in row}
    assert len(said.splitlines()) > len(rows), "a line for each row, and the first"


def test_rows_without_a_table_of_their_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = Console(width=200, record=True, file=io.StringIO())
    monkeypatch.setattr(table, "console", lambda: out)
    about = {"what": "x", "date": "2026-01-02", "commit": "", "command": "c", "how": "as [told]"}
    path = tmp_path / "x.json"
    path.write_text(json.dumps({**about, "rows": [{"kind": "a [b]", "us": 1.5}, {"kind": "c", "note": "d"}]}))
    show.show([path])
    lines = [" ".join(line.split()) for line in out.export_text().splitlines()]
    assert lines == ["x: 2026-01-02, commit unknown; c", "as [told]", "kind us note", "a [b] 1.5", "c d"]
