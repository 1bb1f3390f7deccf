"""`moecomm tune layers`: the bounds that follow from measured layers, and the table that Buffers read."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from moecomm.errors import BadInput, Unsupported
from moecomm.fused import forms
from moecomm.gpu import tuning
from moecomm.gpu.tuning import Entry, Table
from moecomm.gpu.tuning.layers import Bounds, Measured, never, of_measured
from moecomm.ranks.settings import Settings
from moecomm.router import MODELS
from moecomm_bench.moe import ModelsCase
from moecomm_bench.tune import layers as tune_layers

RESULTS = Path(__file__).parents[2] / "bench" / "results"
GPU = "GPU 9000"


pytestmark = pytest.mark.usefixtures("own_tables")


def bounds(*layers: tuple[float, int, float], tolerance: float = 0.004) -> tuple[int, int, int | None]:
    found = of_measured("bf16", 2, [Measured(*layer) for layer in layers], tolerance)
    assert (found.dtype, found.ranks) == ("bf16", 2)
    return found.least_rows_of_expert, found.least_rows_of_rank, found.most_rows_of_expert


def test_from_the_first_layer_that_gains_on_where_more_rows_gain_more() -> None:
    assert bounds((8, 256, 0.9), (16, 512, 0.99), (32, 1024, 1.02), (64, 2048, 1.1)) == (32, 1024, None)
    assert bounds((32, 1024, 1.02), (64, 2048, 1.1)) == (32, 1024, None), "and not from fewer than were measured"


def test_up_to_the_last_layer_that_gains_where_more_rows_lose() -> None:
    assert bounds((8, 256, 0.9), (32, 1024, 1.1), (64, 2048, 1.2), (128, 4096, 0.95)) == (32, 1024, 64)
    assert bounds((8, 256, 0.9), (32, 1024, 1.1), (64, 2048, 1.0)) == (32, 1024, 32), "nor where they gain nothing"


def test_where_gains_cross_losses_the_larger_gains_count() -> None:
    around = (16, 512, 1.05), (32, 1024, 0.98), (64, 2048, 1.1), (128, 4096, 1.2)
    assert bounds(*around) == (64, 2048, None)
    small = (16, 512, 1.5), (32, 1024, 0.98), (64, 2048, 1.1)
    assert bounds(*small) == (16, 512, 16)


def test_rows_of_an_expert_and_of_a_rank_are_bounds_of_their_own() -> None:
    """Few experts have many rows each when a rank has few."""
    assert bounds((128, 256, 0.9), (128, 8192, 1.2), (16, 1024, 0.9), (32, 1024, 1.1)) == (32, 1024, None)


def test_a_layer_measured_twice_must_not_lose_once() -> None:
    assert bounds((32, 1024, 1.1), (32, 1024, 0.9), (64, 2048, 1.1)) == (64, 2048, None)


def test_noise_within_the_tolerance_is_neither_gain_nor_loss() -> None:
    noisy = (8, 256, 1.003), (32, 1024, 1.1), (64, 2048, 0.997), (128, 4096, 1.1), (256, 8192, 1.002)
    assert bounds(*noisy) == (32, 1024, 128)
    assert bounds(*noisy, tolerance=0.001) == (8, 256, 32), "a smaller one takes noise for gains and losses"


def test_nothing_faster_is_never_fused() -> None:
    for layers in ([], [(8, 256, 0.9)], [(8, 256, 1.0), (64, 512, 1.003)], [(64, 512, 1.2), (64, 512, 0.8)]):
        found = of_measured("fp8", 4, [Measured(*layer) for layer in layers])
        assert found == never("fp8", 4)
        assert not any(found.cover(of_expert, 1 << 20) for of_expert in (0.5, 1, 64, 1e6))


def test_no_bounds_contain_a_layer_that_loses() -> None:
    generator = torch.Generator().manual_seed(1)
    for _ in range(300):
        drawn = torch.rand(6, 3, generator=generator).tolist()
        layers = [Measured(8 * 2 ** int(6 * a), 256 * 2 ** int(6 * b), 0.9 + 0.3 * c) for a, b, c in drawn]
        found = of_measured("bf16", 2, layers)
        inside = [layer.speedup for layer in layers if found.cover(layer.of_expert, layer.of_rank)]
        assert all(speedup >= 0.996 for speedup in inside)
        assert bool(inside) == any(
            gain.speedup > 1.004
            and all(
                loss.speedup >= 0.996
                for loss in layers
                if (loss.of_expert, loss.of_rank) == (gain.of_expert, gain.of_rank)
            )
            and not any(
                loss.speedup < 0.996 and loss.of_expert == gain.of_expert and loss.of_rank > gain.of_rank
                for loss in layers
            )
            for gain in layers
        )


def many(*layers: tuple[float, int, float]) -> int | None:
    return of_measured("fp8", 4, [Measured(*layer) for layer in layers]).many_experts


def test_many_experts_with_any_number_of_rows_if_few_rows_were_measured_and_gain() -> None:
    assert many((1, 32, 1.1), (2, 128, 1.05), (128, 256, 0.9)) == 32, "2 experts a rank lose, 32 and 64 gain"
    assert many((1, 32, 0.9), (2, 128, 1.05)) == 64
    assert many((1, 32, 0.995), (2, 64, 1.05), (16, 512, 0.995)) == 32, "less than SLIGHT is no loss"
    assert many((2, 128, 1.05), (16, 1024, 0.98)) is None, "with more rows they lose"
    assert many((3, 96, 1.1), (64, 2048, 1.2)) is None, "and from few rows nothing was measured"
    found = Bounds("fp8", 3, 1000, 1000, 200, many_experts=48)
    assert all(found.cover(rows * 3 / 144, rows) == (rows <= 9600) for rows in range(1, 20_000))
    assert not any(found.cover(rows * 3 / 141, rows) for rows in range(1, 20_000))


def measured_in(path: Path, ranks: int) -> Iterator[tuple[str, Measured]]:
    rows = json.loads(path.read_text())["rows"]
    for dtype, layers in tune_layers.layers_of(ranks, list(MODELS.values()), rows).items():
        yield from ((dtype, layer) for layer in layers)


def kept(ranks: int) -> list[Path]:
    """Results of which the shipped bounds are made."""
    paths = sorted(RESULTS.glob(f"moe-*-h200-{ranks}.json"))
    paths += [RESULTS / "layers-h200-2.json"] if ranks == 2 else []
    assert len(paths) >= 4
    return paths


@pytest.mark.parametrize("ranks", [2, 4])
def test_the_shipped_bounds_follow_from_the_kept_results(ranks: int) -> None:
    measured: dict[str, list[Measured]] = {"bf16": [], "fp8": []}
    for path in kept(ranks):
        for dtype, layer in measured_in(path, ranks):
            measured[dtype].append(layer)
    for dtype, layers in measured.items():
        assert tuning.fused_from("NVIDIA H200", dtype, ranks) == of_measured(dtype, ranks, layers)


def case(**other: Any) -> ModelsCase:
    given: dict[str, Any] = {"tokens": [128, 4096], "ranks": 2, "backend": "lsa", "mode": "graph", "replays": 3}
    return ModelsCase([MODELS["deepseek-v3"]], **{**given, **other})


@pytest.fixture
def jobs(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Two ranks on which layers of 4096 tokens in bfloat16 are faster fused, and of no others; and what they ran."""
    us = {"sequential": 10.0, "one launch": 8.0, "fp8": 6.0, "fp8, one launch": 9.0}
    found: list[dict[str, Any]] = []

    def on_ranks(target: str, job: dict[str, Any], ranks: int) -> list[Any]:
        found.append(job)
        rows = [
            {
                "model": "deepseek-v3",
                "tokens": tokens,
                "who": "moecomm",
                "what": "layer",
                "variant": variant,
                "us": [12.0 if tokens == 128 and variant == "one launch" else time] * 3,
                "flops": 1,
                "host_us": None,
            }
            for tokens in job["tokens"]
            for variant, time in us.items()
        ]
        return [{"backend": "lsa", "gpu": GPU, "rows": rows}] * ranks

    monkeypatch.setattr(tune_layers, "on_ranks", on_ranks)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)  # for the origin of a result
    return found


def test_the_table_is_written_and_decides(jobs: list[dict[str, Any]], tmp_path: Path) -> None:
    path = tune_layers.tune(case(room=9999, peers=True), measurements=tmp_path / "times.json")
    assert path == tuning.users_path(GPU) and path.stat().st_mode & 0o777 == 0o600
    (job,) = jobs
    assert job["fp8"] and not job["peers"] and not job["parts"] and job["room"] == 0, "full Buffers, layers alone"
    assert tuning.users(GPU).layers == (Bounds("bf16", 2, 256, 32768), never("fp8", 2))  # 8 rows of a token
    assert len(json.loads((tmp_path / "times.json").read_text())["rows"]) == 8

    def fused(tokens: int, gpu: str) -> list[bool]:
        sizes = Settings(2, 7168, 256, 8, tokens, torch.bfloat16, "lsa", None)
        return list(forms.faster(gpu, sizes).values())

    assert fused(4096, GPU) == fused(8192, GPU) == [True, True, False]
    assert fused(4095, GPU) == [False, False, False]
    assert fused(4095, "another GPU") == [True, True, True]


def test_what_is_not_measured_again_is_kept(jobs: list[dict[str, Any]], tmp_path: Path) -> None:
    older = Table((Entry("dispatch", "flat", 2, 8, 4, 1),), layers=(Bounds("bf16", 2, 1, 1), Bounds("bf16", 4, 1, 1)))
    path = tmp_path / "table.json"
    path.write_text(json.dumps(tuning.content(GPU, older)))
    assert tune_layers.tune(case(), path) == path
    found = tuning.parse(path.read_text())
    kept_layers = (Bounds("bf16", 2, 256, 32768), Bounds("bf16", 4, 1, 1), never("fp8", 2))
    assert found == replace(older, layers=kept_layers)
    assert tuning.users(GPU) == Table()


@pytest.mark.parametrize("wrong", [{"tokens": []}, {"tokens": [0]}, {"replays": 0}, {"ranks": 3}])
def test_cases_that_cannot_be_measured_are_refused(wrong: dict[str, Any], jobs: list[dict[str, Any]]) -> None:
    with pytest.raises(BadInput):
        tune_layers.tune(case(**wrong))
    assert jobs == []


def test_cpu_ranks_are_not_a_wrong_argument(jobs: list[dict[str, Any]]) -> None:
    """`--backend auto` is one, too, where there is no GPU."""
    with pytest.raises(Unsupported, match="moecomm tune layers needs GPUs"):
        tune_layers.tune(case(backend="host", mode="eager"))
    assert jobs == []


@pytest.mark.parametrize(
    "wrong",
    [
        {"dtype": "fp16"},
        {"ranks": 0},
        {"ranks": 2.0},
        {"least_rows_of_expert": 0},
        {"least_rows_of_rank": "1"},
        {"most_rows_of_expert": -1},
        {"most_rows_of_expert": True},
        {"many_experts": 0},
        {"many_experts": 2.0},
        {"speed": 7},
    ],
)
def test_bounds_that_are_none_are_refused(wrong: dict[str, Any]) -> None:
    line = {"dtype": "bf16", "ranks": 2, "least_rows_of_expert": 32, "least_rows_of_rank": 64}
    assert tuning.parse(json.dumps({"layers": [line]})).layers[0].most_rows_of_expert is None
    with pytest.raises(ValueError, match=r"want|not a table"):
        tuning.parse(json.dumps({"layers": [line | wrong]}))


def _layers_alone(rank: int, group: Any, parts: bool) -> list[tuple[str, str]]:
    model = replace(MODELS["mixtral-8x7b"], hidden=64, intermediate=32)
    of_layers = ModelsCase([model], [5], 1, "host", "eager", replays=1, peers=False, fp8=True, parts=parts)
    found = tune_layers.run_rank(group, **asdict(of_layers))
    assert found["gpu"] == "cpu"
    return [(row["what"], row["variant"]) for row in found["rows"]]


def test_layers_are_measured_without_their_parts(ranks: Any) -> None:
    alone, beside_parts = (ranks.run(1, _layers_alone, parts)[0] for parts in (False, True))
    assert alone == [("layer", "sequential"), ("layer", "fp8")]
    assert {what for what, _ in beside_parts} == {"layer", "dispatch", "GEMMs", "combine"}
