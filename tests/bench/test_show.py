"""moecomm bench show: the long table of each kept result."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
from rich.console import Console

from moecomm.errors import BadInput
from moecomm_bench import show, table

RESULTS = sorted((Path(__file__).parents[2] / "bench" / "results").glob("*.json"))


@pytest.mark.parametrize(("of_wire", "kind"), [(1.04, "reference"), (0.98, "ceiling")])
def test_an_all_to_all_that_an_operation_beat_is_a_reference_also_in_results_without_a_word_for_it(
    of_wire: float, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (path,) = (path for path in RESULTS if path.stem == "ht-h200-8")
    found = json.loads(path.read_text())
    assert "ceiling_is" not in found
    found["rows"] = [{**found["rows"][0], "of_wire": of_wire}, {**found["rows"][0], "of_wire": None}]
    out = Console(width=200, record=True, file=io.StringIO())
    table.show_dispatch_combine(found, out)
    assert f"all-to-all {kind}: " in out.export_text()


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


@pytest.mark.parametrize(
    "name",
    [
        "decode-h100-4",
        "training-h100-2",
        "backends-h100-4",
        "deep-ep-layer-h100-4",
        "moe-deepseek-v3-h200-4",
        "at-work-h100-4",
        "virtual-ranks-h200",
    ],
)
def test_windows_are_shown_where_rows_have_them(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = json.loads((RESULTS[0].parent / f"{name}.json").read_text())
    rows = [row for row in kept["rows"] if "why" not in row]
    shown = []
    for nbytes in (1234 << 20, 5678 << 20, None):
        for row in rows:
            row["window_bytes"] = nbytes
            if nbytes is None:
                del row["window_bytes"]
        out = Console(width=400, record=True, file=io.StringIO())
        monkeypatch.setattr(table, "console", lambda out=out: out)
        (tmp_path / "x.json").write_text(json.dumps(kept))
        show.show([tmp_path / "x.json"])
        shown.append(out.export_text())
    for text, mib in zip(shown, (1234, 5678), strict=False):
        assert text.count(f" {mib}\n") + text.count(str(mib << 20)) == len(rows), "in MiB, or as they are"
    assert "1234" not in shown[2]


def test_rows_without_a_table_of_their_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = Console(width=200, record=True, file=io.StringIO())
    monkeypatch.setattr(table, "console", lambda: out)
    about = {"what": "x", "date": "2026-01-02", "commit": "", "command": "c", "how": "as [told]"}
    path = tmp_path / "x.json"
    path.write_text(json.dumps({**about, "rows": [{"kind": "a [b]", "us": 1.5}, {"kind": "c", "note": "d"}]}))
    show.show([path])
    lines = [" ".join(line.split()) for line in out.export_text().splitlines()]
    assert lines == ["x: 2026-01-02, commit unknown; c", "as [told]", "kind us note", "a [b] 1.5", "c d"]


def test_other_json_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    for text in ("[1]", "{}", "no JSON"):
        path.write_text(text)
        with pytest.raises(BadInput, match="results"):
            show.show([path])
