"""moecomm bench show: the long table of each kept result."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
from rich.console import Console

from moecomm.errors import BadInput
from moecomm_bench import columns, show

RESULTS = sorted((Path(__file__).parents[2] / "bench" / "results").glob("*.json"))


@pytest.mark.parametrize("path", RESULTS, ids=lambda path: path.stem)
def test_every_result_has_a_table(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = Console(width=200, record=True, file=io.StringIO())
    monkeypatch.setattr(columns, "console", lambda: out)
    show.show([path])
    said, found = out.export_text(), json.loads(path.read_text())
    assert found["commit"] in said and found["command"] in said
    rows = found.get("rows") or found.get("errors") or found["medians"]
    assert len(said.splitlines()) > len(rows), "a line for each row, and the first"


@pytest.mark.parametrize(
    ("name", "line"),
    [
        ("all-gather-study-h100-2", "2 multicast all-gather, cuBLAS baseline - - - 0.093 23.2 x0.56"),
        ("training-h100-2", "4096 moecomm forward and backward 45987 51326 11497 323 x1.35"),
        ("decode-h200-4", "128 flat fp8 stand-in in step 5411 5420 5427 90.2 951 40.2"),
        ("ll-h200-2", "128 moecomm batched dispatch bf16 - - - - - - - - -"),
        ("gemm-h200", "deepseek-v3 1 swiglu bf16 4 16 133 64x8c2 749.8 10 5.02 1105.0 x1.47 33.4"),
    ],
)
def test_cells_are_those_of_the_result(name: str, line: str, monkeypatch: pytest.MonkeyPatch) -> None:
    out = Console(width=240, record=True, file=io.StringIO())
    monkeypatch.setattr(columns, "console", lambda: out)
    show.show([RESULTS[0].with_name(f"{name}.json")])
    assert line in [" ".join(shown.split()) for shown in out.export_text().splitlines()]


def test_rows_without_a_table_of_their_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = Console(width=200, record=True, file=io.StringIO())
    monkeypatch.setattr(columns, "console", lambda: out)
    about = {"what": "x", "date": "2026-01-02", "commit": "", "command": "c", "how": "as [told]"}
    path = tmp_path / "x.json"
    path.write_text(json.dumps({**about, "rows": [{"kind": "a [b]", "us": 1.5}, {"kind": "c", "note": "d"}]}))
    show.show([path])
    lines = [" ".join(line.split()) for line in out.export_text().splitlines()]
    assert lines == ["x: 2026-01-02, commit unknown; c", "as [told]", "kind us note", "a [b] 1.5", "c d"]


def test_a_result_that_lacks_an_entry_is_named_with_it(tmp_path: Path) -> None:
    result = json.loads(RESULTS[0].with_name("training-h100-2.json").read_text())
    del result["case"]["replays"]
    path = tmp_path / "x.json"
    path.write_text(json.dumps(result))
    with pytest.raises(BadInput, match=r"x\.json \(no entry 'replays'\)"):
        show.show([path])
