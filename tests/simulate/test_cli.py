"""moecomm simulate, as it is typed."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from moecomm.errors import BadInput
from moecomm.routing import synthesize
from moecomm_bench.results import origin
from moecomm_bench.simulate import cli
from moecomm_bench.simulate.cli import app
from moecomm_bench.simulate.domain import load
from moecomm_bench.simulate.nic import SOURCES, ModelNic
from moecomm_bench.simulate.options import NIC

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "bench" / "results"


def run(*words: str) -> str:
    told = CliRunner().invoke(app, list(words), catch_exceptions=False)
    assert told.exit_code == 0, told.output
    return told.output


def test_predicts_and_writes_json(tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    said = run("--domains", "1,2,128", "--ranks", "8", "--tokens", "0,1,4096", "--skew", "0.25", "--json", str(path))
    assert "not measured" in said and "128 x 8" in said
    found = json.loads(path.read_text())
    assert set(origin()) < set(found) and found["what"] == "out"
    assert found["benchmark"] == "simulate" and found["prediction"]
    assert set(found["inputs"]["nic_defaults_from"]) == set(SOURCES) == set(found["inputs"]["nic"])
    assert [(row["domains"], row["gpus"], row["tokens"]) for row in found["rows"]] == [
        (domains, 8 * domains, tokens) for domains in (1, 2, 128) for tokens in (0, 1, 4096)
    ]
    figures = {"us", "latency_us", "slow_us", "nvlink_us", "slow_bytes", "slow_messages", "nvlink_bytes", "blocks"}
    routing = "top-8 of 256 experts, all equally likely, from 4 of 8 groups; 25% of the tokens want rank 0 first"
    assert found["inputs"]["routing"] == routing and f"routing: {routing}" in said and found["inputs"]["num_sms"] == 0
    for row in found["rows"]:
        for what in ("dispatch", "combine"):
            assert set(row[what]) == figures | {"algorithm", "bound"}
            assert row[what]["algorithm"] in ("ht", "ll") and row[what]["bound"] in ("nic", "nvlink", "latency")
            assert all(row[what][figure] >= 0 for figure in figures)
        assert set(row["layer"]) == {"gemm_us", "serial_us", "overlapped_us"}
        assert row["layer"]["overlapped_us"] <= row["layer"]["serial_us"] + 1e-3


def test_draws_the_same_each_time(tmp_path: Path) -> None:
    for name in ("a.svg", "b.svg"):
        run("--domains", "1,2", "--tokens", "1,128", "--plot", str(tmp_path / name))
    first = (tmp_path / "a.svg").read_text()
    assert first == (tmp_path / "b.svg").read_text() and "sha256 of rows" in first


def test_a_picture_is_kept_where_it_is_wanted_or_refused(tmp_path: Path) -> None:
    run("--domains", "1", "--tokens", "1", "--plot", str(tmp_path / "new" / "a.png"))
    assert (tmp_path / "new" / "a.png").exists()
    with pytest.raises(BadInput, match=r"a\.gif"):
        run("--domains", "1", "--tokens", "1", "--plot", str(tmp_path / "a.gif"))


def test_the_check_says_that_it_found_nothing_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cli, "__file__", str(tmp_path / "site" / "moecomm" / "simulate" / "cli.py"))  # of a wheel
    assert "No measured rows: name JSON" in run("check") and "measured in" not in run("check")


def test_figures_of_the_check_are_whole() -> None:
    """However long the names beside them are."""
    said = run("check", *(str(RESULTS / f"{name}-h200-4.json") for name in ("ht", "ll", "beside")))
    first = said.partition("\n\n")[0]  # of the parts of a table that is too wide
    rows = [line for line in first.splitlines() if line.startswith("ht-h200-4")]
    figures = r" +[0-9.]+ +[0-9.]+ +[+-][0-9.]+%"
    assert rows and all(re.search(rf" (128|4096|8192){figures}", row) for row in rows), said
    assert "held out" in said and "…" not in said


def test_checks_and_fits(tmp_path: Path) -> None:
    said = run("check", str(RESULTS / "ll-h200-4.json"), "--json", str(tmp_path / "check.json"))
    assert "NCCL EP LL" in said and "median error" in said
    found = json.loads((tmp_path / "check.json").read_text())
    assert {"measured", "published", "errors", "machine", "versions", "date", "command"} <= set(found)
    assert all(row["source"] for row in found["published"])
    files = [str(path) for path in sorted(RESULTS.glob("*.json"))]
    assert "flat dispatch" in run("fit", *files, "--out", str(tmp_path / "new" / "fit.json"))
    fitted, shipped = (load(path) for path in (tmp_path / "new" / "fit.json", None))
    assert fitted.ranks == shipped.ranks and fitted.lines.keys() == shipped.lines.keys()
    assert run("--parameters", str(tmp_path / "new" / "fit.json")) != ""


def test_blocks_count(tmp_path: Path) -> None:
    """16 blocks take longer to stage the rows of an expert combine than the links take."""
    path, times = tmp_path / "out.json", []
    asked = ("--domains", "1", "--ranks", "4", "--tokens", "4096", "--layout", "expert", "--json", str(path))
    for blocks in (16, 128):
        run(*asked, "--num-sms", str(blocks))
        found = json.loads(path.read_text())
        assert found["inputs"]["num_sms"] == found["rows"][0]["combine"]["blocks"] == blocks
        times.append(found["rows"][0]["combine"]["us"])
    assert times[0] > 2 * times[1]


def test_options_are_heard() -> None:
    table = [line.split() for line in run("--domains", "2", "--tokens", "4096").splitlines()]
    for options in (
        ["--nic-gbs", "25"],
        ["--nic-efficiency", "0.5"],
        ["--num-sms", "16"],
        ["--nic-latency-us", "50"],
        ["--nic-mega-messages", "1"],
        ["--nvlink-gbs", "50"],
        ["--payload", "bf16"],
        ["--layout", "expert"],
        ["--layout", "expert", "--wire", "bf16"],
        ["--model", "qwen3-235b"],
        ["--hidden", "4096"],
        ["--intermediate", "1024"],
        ["--topk", "4"],
        ["--experts", "512"],
        ["--ungrouped"],
        ["--skew", "0.5"],
        ["--algorithm", "ll"],
        ["--chunk-tokens", "4096"],
        ["--gemm-us", "1"],
        ["--gemm-tflops", "100"],
        ["--parts", "8"],
    ):
        assert [line.split() for line in run("--domains", "2", "--tokens", "4096", *options).splitlines()] != table
    assert run("--tokens", "1", "--hbm-gbs", "100") != run("--tokens", "1")


def test_the_fewest_gpus_within_memory_and_time_are_named(tmp_path: Path) -> None:
    """Windows are those of docs/memory.md, to a tenth of a GiB; weights are counted by hand."""
    path = tmp_path / "out.json"
    words = ["--gpus", "4,8,64,128", "--ranks", "64", "--tokens", "4096", "--layers", "58", "--payload", "bf16"]
    said = run(*words, "--memory", "200", "--json", str(path))
    assert "4096 tokens a rank: 8 GPUs are the fewest within 200 GiB" in said
    rows = {row["gpus"]: row for row in json.loads(path.read_text())["rows"]}
    assert [(row["domains"], row["ranks"]) for row in rows.values()] == [(1, 4), (1, 8), (1, 64), (2, 64)]
    assert [f"{rows[gpus]['memory']['window_gib']:.1f}" for gpus in (4, 8, 64)] == ["1.4", "1.4", "1.7"]
    assert rows[128]["memory"]["window_gib"] is None, "no Buffer opens on so many"
    for gpus, row in rows.items():
        weights = 58 * (256 // gpus) * 3 * 7168 * 2048 * 2 / 2**30
        assert row["memory"]["weights_gib"] == pytest.approx(weights, abs=1e-3)
    fastest = min(rows.values(), key=lambda row: float(row["layer"]["serial_us"]))
    said = run(*words, "--us", str(fastest["layer"]["serial_us"] + 0.001))
    assert f"{fastest['gpus']} GPUs are the fewest within" in said
    assert "no number of GPUs in the table is within" in run(*words, "--memory", "200", "--us", "1")
    with pytest.raises(BadInput, match="a multiple of its 8"):
        run("--gpus", "12")


def test_defaults_of_the_command_are_those_of_a_nic() -> None:
    assert ModelNic(*NIC) == ModelNic()


def test_the_command_of_the_page_runs() -> None:
    commands = re.findall(r"`moecomm (simulate --[^`]*)`", (ROOT / "docs" / "performance.md").read_text())
    assert commands
    for command in commands:
        run(*command.split()[1:])


def test_a_recorded_routing_takes_the_place_of_the_gates(tmp_path: Path) -> None:
    for zipf in (0, 1.5):
        synthesize("qwen3-235b", 20000, zipf=zipf).save(tmp_path / f"{zipf}.routing")
    words = ["--model", "qwen3-235b", "--domains", "1,2", "--tokens", "4096", "--json", str(tmp_path / "out.json")]
    run(*words)
    gate = json.loads((tmp_path / "out.json").read_text())["rows"]
    run(*words, "--routing", str(tmp_path / "0.routing"))
    for row, like in zip(json.loads((tmp_path / "out.json").read_text())["rows"], gate, strict=True):
        assert row["dispatch"]["us"] == pytest.approx(like["dispatch"]["us"], rel=0.02)
    said = run(*words, "--routing", str(tmp_path / "1.5.routing"))
    found = json.loads((tmp_path / "out.json").read_text())
    wanted = "top-8 of 128 experts; routing of 1.5.routing (synthetic of qwen3-235b, Zipf exponent 1.5, 20000 tokens"
    assert found["inputs"]["routing"].startswith(wanted) and wanted in " ".join(said.split())
    assert found["case"]["routing_file"] == "1.5.routing" and found["case"]["routing"]["zipf"] == "1.5"
    for row, like in zip(found["rows"], gate, strict=True):
        assert row["combine"]["us"] > 1.1 * like["combine"]["us"], "the busiest rank has more rows"


@pytest.mark.parametrize(
    ("words", "argument"),
    [([], "routing"), (["--model", "qwen3-235b", "--skew", "0.1"], "skew"), (["--domains", "17"], "domains, ranks")],
)
def test_a_recorded_routing_must_fit(words: list[str], argument: str, tmp_path: Path) -> None:
    """To the model, without skew, and with an expert for each rank."""
    file = synthesize("qwen3-235b", 100, zipf=0).save(tmp_path / "x")
    model = ["--model", "qwen3-235b"] if argument != "routing" else []
    with pytest.raises(BadInput) as caught:
        run("--routing", str(file), *model, *words)
    assert caught.value.argument == argument
