"""moecomm plan: rows and memory counted by hand, the choice, and what is missing."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from moecomm.errors import BadInput
from moecomm.fused import quantize_weights
from moecomm.routing import Recorded
from moecomm_bench import plot_results, schema
from moecomm_bench.plan.case import PlannedCase, expert_bytes
from moecomm_bench.plan.cli import app
from moecomm_bench.plan.search import plan, window
from moecomm_bench.plan.slots import Slots, ways
from moecomm_bench.show import show
from moecomm_bench.simulate.domain import fitted_efficiency, load, worst_error
from moecomm_bench.simulate.model import Machine, Operation
from moecomm_bench.simulate.nic import ModelNic
from moecomm_bench.simulate.predict import SimulatedCase, predict
from moecomm_bench.simulate.routing import DrawnGate

MACHINE = Machine(load(), ModelNic(efficiency=fitted_efficiency()))
GPT = PlannedCase(
    model="gpt-oss-120b",
    hidden=2880,
    intermediate=2880,
    gate=DrawnGate(128, 4),
    memory_gib=80.0,
    tokens=128,
    target_us=0.0,
    layers=36,
    ranks=[2, 4, 8, 16],
    domain_ranks=8,
    formats=["bf16", "fp8"],
    layouts=["expert"],
)
DEEPSEEK = replace(
    GPT, model="deepseek-v3", hidden=7168, intermediate=2048, gate=DrawnGate(256, 8, 8, 4), tokens=4096, layers=1
)


def recording(path: Path, layers: list[torch.Tensor], experts: int) -> str:
    """A file of a name of its own, for a file is read once, with these ids, a call each."""
    records = torch.tensor([[n, 0, len(ids)] for n, ids in enumerate(layers)], dtype=torch.int32)
    names = tuple(map(str, range(len(layers))))
    ids = torch.cat(layers).to(torch.int16)
    return str(Recorded(experts, ids.shape[1], names, records, ids).save(path / f"{len(list(path.iterdir()))}.routing"))


def skewed(experts: int, topk: int, tokens: int, layers: int) -> list[torch.Tensor]:
    generator = np.random.default_rng(1)
    shares = np.arange(1, experts + 1) ** -1.0
    found = []
    for _ in range(layers):
        ranked = generator.permutation(experts)
        drawn = [generator.choice(ranked, topk, replace=False, p=shares / shares.sum()) for _ in range(tokens)]
        found.append(torch.tensor(np.array(drawn)))
    found[0][3, 0] = -1
    return found


def small(path: Path, **more: Any) -> PlannedCase:
    """Two layers of 12 experts over 4 ranks in one domain or two, with a recording."""
    file = recording(path, skewed(12, 3, 90, 2), 12)
    sizes: dict[str, Any] = {"model": "", "hidden": 64, "intermediate": 32, "gate": DrawnGate(12, 3), "layers": 2}
    return replace(GPT, **{**sizes, "ranks": [4], "tokens": 16, "routing_file": file, **more})


def counted(ids: list[list[int]], way: Slots, layer: int, ranks: int, experts: int) -> dict[str, list[float]]:
    """By loops: of the tokens, the share that wants a rank, and the entries of a rank and of the busiest slot."""
    rank_of = [rank for rank in range(ranks) for _ in range(experts // ranks)]
    wants, entries, slots = [0] * ranks, [0] * ranks, dict[int, int]()
    for token, row in enumerate(ids):
        there = set()
        for k, expert in enumerate(row):
            if expert < 0:
                continue
            slot, rank = expert, rank_of[expert]
            if way.placement is not None and layer == 0:  # that of the first layer is kept
                held = [s for s, e in enumerate(e for one in way.placement.held for e in one) if e == expert]
                slot = held[(token + k) % len(held)]
                rank = slot // way.of_rank
            there.add(rank)
            entries[rank] += 1
            slots[slot] = slots.get(slot, 0) + 1
        for rank in there:
            wants[rank] += 1
    tokens = len(ids)
    return {
        "ranks": [n / tokens for n in wants],
        "entries": [n / tokens for n in entries],
        "slot": [max(slots.values()) / tokens],
    }


@pytest.mark.parametrize("domain_ranks", [8, 2])
def test_rows_of_ranks_are_those_that_loops_count_in_the_second_half(domain_ranks: int, tmp_path: Path) -> None:
    case = small(tmp_path, domain_ranks=domain_ranks)
    found = list(ways(case, 4))
    assert [way.of_rank for way in found] == [3, 3, 4, 5, 7, 11]
    assert [way.replicas for way in found] == [0, 0, 4, 8, 16, 32]
    layers = skewed(12, 3, 90, 2)
    for way in found:
        for layer in range(1 if way.placement else 2):
            later = layers[layer][45:].tolist()
            by_hand, routed = counted(later, way, layer, 4, 12), way.layers[layer]
            assert routed.spread.ranks == pytest.approx(by_hand["ranks"])
            assert routed.spread.entries == pytest.approx(by_hand["entries"])
            assert routed.busiest_slot == pytest.approx(by_hand["slot"][0])
        most = max(float(one.spread.entries.max()) for one in way.layers)
        assert window(case, 4, way, "expert").needed == pytest.approx(16 * 4 * most)
        most = max(float(one.spread.ranks.max()) for one in way.layers)
        assert window(case, 4, way, "flat").needed == pytest.approx(16 * 4 * most)
        most = max(one.busiest_slot for one in way.layers)
        assert window(case, 4, way, "batched").needed == pytest.approx(16 * 4 * most * way.of_rank)
    busiest = [max(float(one.spread.entries.max()) for one in way.layers) for way in found]
    assert min(busiest[1:]) < busiest[0]


def test_a_placement_is_made_by_the_first_half_of_the_tokens(tmp_path: Path) -> None:
    first, second = torch.tensor([[0, 1]] * 8), torch.tensor([[2, 3]] * 8)
    file = recording(tmp_path, [torch.cat([first, second])], 4)
    case = replace(small(tmp_path), gate=DrawnGate(4, 2), ranks=[2], routing_file=file, layers=1)
    neighbors, placed = list(ways(case, 2))[:2]
    assert neighbors.layers[0].spread.entries.tolist() == [0, 2]
    assert placed.placement is not None  # parts 0 from 1, and says nothing of 2 and 3
    assert {tuple(sorted(set(held) & {0, 1})) for held in placed.placement.held} == {(0,), (1,)}


@pytest.mark.parametrize(("hidden", "intermediate"), [(256, 128), (320, 192), (2880, 96)])
def test_bytes_of_an_expert_are_those_of_its_tensors(hidden: int, intermediate: int) -> None:
    w13, w2 = torch.zeros(2 * intermediate, hidden).bfloat16(), torch.zeros(hidden, intermediate).bfloat16()
    assert expert_bytes("bf16", hidden, intermediate) == w13.nbytes + w2.nbytes
    fp8 = [part.nbytes for w in (w13, w2) for part in quantize_weights(w)]
    assert expert_bytes("fp8", hidden, intermediate) == sum(fp8)


def test_memory_is_that_of_weights_and_of_the_window_in_the_documents() -> None:
    """Compare DeepSeek-V3: docs/memory.md has the windows, to a tenth of a GiB."""
    by_ranks = {4: "1.4", 8: "1.4", 16: "1.5", 32: "1.6", 64: "1.7"}
    case = replace(DEEPSEEK, ranks=list(by_ranks), domain_ranks=64, layers=58, formats=["bf16"])
    for row in plan(case, MACHINE)["rows"]:
        assert f"{row['window_gib']:.1f}" == by_ranks[row["gpus"]]
        weights = 58 * (256 // row["gpus"]) * 3 * 7168 * 2048 * 2 / 2**30
        assert row["weights_gib"] == pytest.approx(weights, abs=1e-3)
        assert row["memory_gib"] == pytest.approx(row["weights_gib"] + row["window_gib"], abs=1e-3)
        assert row["memory_margin_gib"] == pytest.approx(80 - row["memory_gib"], abs=1e-3)
        assert row["rows"] == 4096 * 8 * 3 // 2 and row["rows_needed"] == 4096 * 8
        assert row["capacity_factor"] is None and row["window_bytes"] is None


def test_the_window_grows_for_a_rank_that_gets_more_than_even_routing_gives(tmp_path: Path) -> None:
    """All tokens choose the experts of rank 0.  A placement spreads these over the ranks."""
    file = recording(tmp_path, [torch.arange(8).repeat(16, 1)], 256)
    case = replace(DEEPSEEK, ranks=[8], routing_file=file)
    alike, placed = list(ways(case, 8))[:2]
    rooms = [window(case, 8, way, "expert") for way in (alike, placed)]
    assert [room.needed for room in rooms] == [8 * 4096 * 8, 4096 * 8]
    assert rooms[0].rows == 8 * 4096 * 8 and rooms[0].capacity_factor is not None  # the worst case
    assert rooms[0].nbytes > rooms[1].nbytes and rooms[1].capacity_factor is None
    assert rooms[1].rows == 4096 * 8 * 3 // 2


def test_a_batched_round_beyond_the_default_window_names_the_bytes_that_it_takes(tmp_path: Path) -> None:
    ids = skewed(128, 4, 400, 1)
    case = replace(GPT, tokens=4096, ranks=[8], routing_file=recording(tmp_path, ids, 128))
    alike = next(iter(ways(case, 8)))
    room = window(case, 8, alike, "batched")
    assert room.rows * 2 * 2880 > 2 << 30 and room.window_bytes is not None
    assert room.nbytes > room.window_bytes > 2 * room.rows * 2 * 2880


def test_times_are_those_of_simulate() -> None:
    for row in plan(replace(GPT, formats=["bf16"], domain_ranks=4), MACHINE)["rows"]:
        domains, width = max(1, row["gpus"] // 4), min(4, row["gpus"])
        asked = SimulatedCase("", 2880, 2880, GPT.gate, [domains], width, [128], layout="expert", payload="bf16")
        (simulated,) = predict(asked, MACHINE)["rows"]
        assert row["us"] == simulated["layer"]["serial_us"] and row["gemm_us"] == simulated["layer"]["gemm_us"]
        assert (row["dispatch_us"], row["combine_us"]) == (simulated["dispatch"]["us"], simulated["combine"]["us"])


def test_few_tokens_read_weights_of_the_format() -> None:
    bf16, fp8 = (plan(replace(GPT, formats=[name]), MACHINE)["rows"][0] for name in ("bf16", "fp8"))
    ratio = expert_bytes("bf16", 2880, 2880) / expert_bytes("fp8", 2880, 2880)
    assert bf16["gemm_us"] / fp8["gemm_us"] == pytest.approx(ratio, rel=1e-3)


def test_a_slot_more_is_read_only_if_tokens_want_it(tmp_path: Path) -> None:
    """Many replicas cost no time that their rows do not."""
    case = small(tmp_path, tokens=4096)
    rows = [plan(replace(case, target_us=0, memory_gib=gib), MACHINE)["rows"][0] for gib in (0.5, 100)]
    assert rows[1]["us"] <= rows[0]["us"]


def test_times_at_worst_have_the_largest_errors_of_the_fit() -> None:
    result = plan(replace(GPT, formats=["bf16"], ranks=[1, 2, 4, 6, 8, 16]), MACHINE)
    for row in result["rows"]:
        if row["gpus"] not in (2, 4, 8):  # a number that was not measured, or two domains: no such error is known
            assert row["at_worst_us"] is None
            continue
        worst = {what: worst_error(Operation(what, "expert", "bf16 wire" * (what == "combine"))) for what in _ROUNDS}
        rounds = sum(row[f"{what}_us"] / (1 - worst[what]) for what in _ROUNDS)
        assert row["at_worst_us"] == pytest.approx(row["gemm_us"] + rounds, abs=0.01)
    found = json.loads((Path(load.__code__.co_filename).parent / "h200.json").read_text())["lines"]
    errors = [line["worst_error"] for line in found if (line["what"], line["layout"]) == ("dispatch", "expert")]
    assert worst_error(Operation("dispatch", "expert")) == max(errors) > 0


_ROUNDS = ("dispatch", "combine")


def cases(tmp_path: Path) -> list[PlannedCase]:
    return [
        replace(GPT, formats=["bf16"]),
        replace(DEEPSEEK, tokens=128, layers=58, ranks=[4, 8, 16, 32]),
        small(tmp_path, tokens=2048, ranks=[2, 4], layers=2, hidden=512, intermediate=512),
    ]


@pytest.mark.parametrize("which", range(3))
def test_more_memory_is_never_worse(which: int, tmp_path: Path) -> None:
    case = cases(tmp_path)[which]
    rows = plan(replace(case, memory_gib=1e6), MACHINE)["rows"]
    sizes = sorted({0.01, 1e6, *(row["memory_gib"] * part for row in rows for part in (0.99, 1.01))})
    times = sorted(row["us"] for row in rows)
    for target in (0.0, times[0] * 1.01):
        before = math.inf, math.inf
        for size in sizes:
            chosen = plan(replace(case, memory_gib=size, target_us=target), MACHINE)["plan"]
            if chosen is None:
                assert before == (math.inf, math.inf)
                continue
            now = chosen["gpus"] if target else 0, chosen["us"]
            assert now <= before and chosen["memory_gib"] <= size
            before = now
        assert before[1] < math.inf


@pytest.mark.parametrize("which", range(3))
def test_a_stricter_target_never_takes_a_slower_plan(which: int, tmp_path: Path) -> None:
    case = replace(cases(tmp_path)[which], memory_gib=300.0)
    times = [row["us"] for row in plan(case, MACHINE)["rows"]]
    before = math.inf
    for target in sorted({time * part for time in times for part in (0.5, 0.99, 1.01, 2)}, reverse=True):
        chosen = plan(replace(case, target_us=target), MACHINE)["plan"]
        if chosen is None:
            before = -1.0
            continue
        assert chosen["us"] <= min(before, target)
        assert chosen["time_margin_us"] == pytest.approx(target - chosen["us"], abs=0.01)
        before = chosen["us"]
    assert before == -1.0  # half of the least


def test_a_target_is_met_on_the_fewest_gpus() -> None:
    case = replace(GPT, ranks=[2, 4, 8], memory_gib=300.0)
    times = {row["gpus"]: row["us"] for row in plan(case, MACHINE)["rows"]}
    assert times[8] < times[4] < times[2]
    for gpus in (2, 4, 8):
        chosen = plan(replace(case, target_us=times[gpus] + 0.01), MACHINE)["plan"]
        assert chosen["gpus"] == gpus
    assert plan(case, MACHINE)["plan"]["gpus"] == 8


def test_the_missing_resource_is_named() -> None:
    result = plan(replace(GPT, memory_gib=3.0, ranks=[4, 8], formats=["bf16"]), MACHINE)
    least = result["rows"][1]
    assert result["plan"] is None and [row["fits"] for row in result["rows"]] == [False, False]
    more = least["memory_gib"] - 3
    assert result["lacks"] == (
        f"memory: 8 GPUs take the least, {least['memory_gib']:.2f} GiB each, {more:.2f} GiB more than 3 GiB"
    )
    result = plan(replace(GPT, ranks=[4, 8], target_us=50.0), MACHINE)
    assert result["plan"] is None and result["lacks"].startswith("time: 8 GPUs are the fastest that have the memory")
    assert "us more than 50 us" in result["lacks"] and "meet it" not in result["lacks"]
    times = {row["gpus"]: row for row in plan(replace(GPT, ranks=[4, 8], formats=["bf16"]), MACHINE)["rows"]}
    most = (times[4]["memory_gib"] + times[8]["memory_gib"]) / 2
    other = replace(GPT, ranks=[4, 8], formats=["bf16"], tokens=8192, memory_gib=most)
    rows = {row["gpus"]: row for row in plan(other, MACHINE)["rows"]}
    target = (rows[4]["us"] + rows[8]["us"]) / 2
    result = plan(replace(other, target_us=target), MACHINE)
    if rows[4]["us"] < rows[8]["us"]:  # fewer ranks are faster, and do not have the memory
        assert result["plan"] is None and "; 4 GPUs meet it with " in result["lacks"]


@pytest.mark.parametrize(
    "change",
    [
        {"memory_gib": 0.0},
        {"ranks": [0]},
        {"ranks": [65]},
        {"ranks": [12]},
        {"tokens": 1 << 23},
        {"formats": ["fp4"]},
        {"formats": []},
        {"layouts": ["x"]},
        {"hidden": 12},
        {"gate": DrawnGate(128, 129)},
        {"gate": DrawnGate((1 << 16) + 1, 1)},
    ],
    ids=str,
)
def test_a_case_that_makes_no_sense(change: dict[str, Any]) -> None:
    with pytest.raises(BadInput):
        plan(replace(GPT, **change), MACHINE)


def test_more_ranks_than_experts_have_a_slot_each(tmp_path: Path) -> None:
    case = replace(GPT, gate=DrawnGate(8, 2), ranks=[16], model="")
    (row,) = plan(case, MACHINE)["rows"]
    assert (row["slots"], row["replicas"], row["placed"]) == (1, 8, True)
    case = replace(case, routing_file=recording(tmp_path, skewed(8, 2, 64, 1), 8))
    assert all(way.placement is not None for way in ways(case, 16))


def invoke(*words: str) -> tuple[int, str]:
    told = CliRunner().invoke(app, list(words), catch_exceptions=False)
    return told.exit_code, told.output


def test_the_command_prints_keeps_and_draws_one_result(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    kept, drawn = tmp_path / "x.json", tmp_path / "x.svg"
    words = "--memory", "80", "--model", "gpt-oss-120b", "--layers", "36", "--us", "400", "--ranks", "4,16"
    code, said = invoke(*words, "--json", str(kept), "--plot", str(drawn))
    assert code == 0 and "not measured" in said and "Take" in said and "below the target" in said
    assert "never compared" in said and "never measured through a NIC" in said and "equally likely" in said
    result = schema.read(kept)
    assert result["plan"] in result["rows"] and f"{result['plan']['us']:.1f} us a layer" in " ".join(said.split())
    show([kept])
    table, first = capsys.readouterr().out, said.splitlines()[0]
    assert first in table
    (times, memory), *_ = plot_results.rows_of(result)
    labels = [line.label for panel in (times, memory) for line in panel.lines]  # type: ignore[union-attr]
    assert labels == ["layer", "dispatch and combine", "GEMMs", "target", "in all", "weights", "GPU"]
    assert "sha256 of rows" in drawn.read_text()


def test_a_plan_that_there_is_not_ends_with_1_and_is_kept(tmp_path: Path) -> None:
    kept = tmp_path / "x.json"
    code, said = invoke("--memory", "1", "--ranks", "8", "--json", str(kept))
    assert code == 1 and "No plan. Not enough memory: 8 GPUs take the least" in " ".join(said.split())
    assert schema.read(kept)["plan"] is None


def test_the_layers_of_a_recording_count(tmp_path: Path) -> None:
    file, kept = recording(tmp_path, skewed(12, 3, 40, 2), 12), tmp_path / "x.json"
    words = "--hidden", "64", "--intermediate", "32", "--topk", "3", "--experts", "12", "--ranks", "2"
    code, said = invoke("--memory", "8", "--routing", file, *words, "--json", str(kept))
    assert code == 0 and "second half" in " ".join(said.split())
    assert schema.read(kept)["case"]["layers"] == 2
