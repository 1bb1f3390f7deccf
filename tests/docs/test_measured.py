"""Measured figures on pages that people write are those of the results that they name."""

from __future__ import annotations

import json
import re
import statistics
from collections.abc import Iterable
from functools import cache
from math import comb
from pathlib import Path
from typing import Any

import pytest

from moecomm.base import packets
from moecomm_bench import beside, stored
from moecomm_bench.simulate.excluded import FORMAT, GONE, HOST, PROXY, RINGS, SINGLE, SWEPT, THREADS
from moecomm_bench.simulate.routing import DrawnGate, spread

from ..overlap import test_table

ROOT = Path(__file__).parent.parent.parent
MOECOMM = {"who": "moecomm"}
RESULTS = ROOT / "bench" / "results"
DECISIONS = (ROOT / "docs" / "maintainers" / "decisions.md").read_text()


@cache
def content(result: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((RESULTS / f"{result}.json").read_text())
    return found


def row_of(result: str, **named: Any) -> dict[str, Any]:
    """Return the only row of a result with these values."""
    (row,) = (row for row in content(result)["rows"] if (MOECOMM | named).items() <= row.items())
    found: dict[str, Any] = row
    return found


def aim(begin: str) -> list[str]:
    """Return measurement and reason of a row of "Aims that are not reached"."""
    (line,) = (line for line in DECISIONS.splitlines() if line.startswith(f"| {begin}"))
    return line.strip("| ").split(" | ")[1:]


# Rounds in the order of the table's columns.
ROUNDS: list[dict[str, Any]] = [
    {"what": "dispatch", "layout": "flat"},
    {"what": "dispatch", "layout": "expert"},
    {"what": "combine", "layout": "flat", "variant": "y in the window"},
    {"what": "combine", "layout": "flat", "variant": "y outside"},
    {"what": "combine", "layout": "expert", "variant": "bf16 wire"},
]


def test_shares_of_the_line_rate_of_an_emulated_nic() -> None:
    """Sentences have the range of the table's cells, of which tests/docs/test_tables.py looks one up."""
    text = (ROOT / "docs" / "backends.md").read_text()
    found = re.findall(r"^\| (\d H\d+)s?[ †]* \|((?: [\d.]+ \|){5}) `(nic-.*)` \|$", text, re.MULTILINE)
    assert {result for _, _, result in found} == {path.stem for path in RESULTS.glob("nic-*.json")}
    shares: dict[str, list[str]] = {"dispatch": [], "combine": []}
    for _, cells, _ in found:
        dispatches, combines = re.findall(r"[\d.]+", cells)[:2], re.findall(r"[\d.]+", cells)[2:]
        shares["dispatch"] += dispatches
        shares["combine"] += combines
    ranges = {what: f"{min(of_what)} to {max(of_what)}" for what, of_what in shares.items()}
    measured = aim("An emulated NIC at 0.93 of its line rate")[0]
    assert measured.startswith(f"Dispatch {ranges['dispatch']}, combine {ranges['combine']} ")
    of_h200 = [share for (gpus, cells, _) in found if "H200" in gpus for share in re.findall(r"[\d.]+", cells)[2:]]
    assert f"on H200s a combine reaches {max(of_h200)} at most" in measured


def test_nvshmem_takes_longer_than_lsa_by_as_much_as_the_results_say() -> None:
    """The longest rounds of one GPU a domain; of two, the three that miss the aim, and the range of the others."""
    sentence = aim("NVSHMEM within 1.3 times")[0]
    rounds: list[dict[str, Any]] = [
        {"what": "dispatch", "payload": "bf16"},
        {"what": "dispatch", "payload": "fp8"},
        {"what": "combine", "variant": "y in the window"},
        {"what": "combine", "variant": "y outside"},
    ]

    def ratios(result: str) -> list[float]:
        assert content(result)["case"]["layouts"] == ["flat"]
        times = [
            [row_of(result, backend=backend, tokens=tokens, **named)["us"]["p50"] for named in rounds]
            for tokens in (128, 4096)
            for backend in ("nvshmem", "lsa")
        ]
        few, many = ([n / lsa for n, lsa in zip(*pair, strict=True)] for pair in (times[:2], times[2:]))
        return [ratio for both in zip(few, many, strict=True) for ratio in both]

    of_two, of_one = sentence.split("Two domains of one H200, 32 blocks: up to ")
    assert of_one.startswith(f"{max(ratios('domains-nvshmem-h200-2')):.2f} ")
    bf16_few, bf16, fp8_few, fp8, inside_few, inside, outside_few, outside = ratios("backends-domains-h100-4")
    others = (bf16_few, bf16, fp8_few, inside_few, inside)
    want = [outside_few, outside, fp8, min(others), max(others)]
    assert [float(number) for number in re.findall(r"\b\d\.\d\d\b", of_two)] == [round(ratio, 2) for ratio in want]
    assert min(outside_few, outside, fp8) > 1.3 > max(others)


def test_rounds_of_128_tokens_over_two_domains_take_as_long_as_the_result_says() -> None:
    sentence = aim("Two domains of two H200s, 128 tokens")[0]
    order = [ROUNDS[index] for index in (0, 2, 3, 1, 4)]  # all of `flat` first
    want = []
    for named in order:
        payload = {"payload": "bf16"} if named["what"] == "dispatch" else {}
        row = row_of("domains-h200-4", tokens=128, sms_asked=0, **named, **payload)
        want.append(f"{row['us']['p50']:.0f}")
    assert re.findall(r"\d+(?= us)", sentence.partition(" (")[0]) == want


def test_errors_of_predictions_are_those_of_the_check() -> None:
    """Published rows, all and by who posts the messages; rows of many tokens over an emulated NIC."""
    checked = content("simulate-check")
    (published,) = (error for error in checked["errors"] if error["kind"] == "published, held out")
    by_cpu, by_gpu = (
        statistics.median(
            row["error"] for row in checked["published"] if not row["not_counted"] and bool(row["by_cpu"]) is cpu
        )
        for cpu in (True, False)
    )
    nic = [
        row["held_out_error"]
        for row in checked["measured"]
        if row["file"].startswith("nic-") and row["tokens"] == 4096 and "excluded" not in row
    ]
    assert len(nic) == 32 and max(nic) < 0
    measured, reason = aim("Predictions of `moecomm simulate` without a bias")
    sizes = (published["signed"], -max(nic), -min(nic), -statistics.median(nic))
    assert re.findall(r"-?\d+\.\d+", measured) == [f"{100 * size:.1f}" for size in sizes]
    assert re.findall(r"-\d+\.\d+", reason) == [f"{100 * size:.1f}" for size in (by_cpu, by_gpu)]


def test_rows_that_do_not_count_are_as_many_as_the_check_says() -> None:
    sentence = aim("Predictions within 25 % of all measured rows")[0]
    measured = content("simulate-check")["measured"]
    reasons = [row["excluded"] for row in measured if "excluded" in row]
    gone = sum(reason in GONE for reason in reasons)
    assert re.findall(r"\d+", sentence) == [f"{len(reasons)}", f"{len(measured)}", f"{gone}"]
    assert set(reasons) == {*GONE, RINGS, THREADS, PROXY, SINGLE, HOST, FORMAT, SWEPT}


def test_results_with_clocks_are_as_many_as_there_are() -> None:
    found = [json.loads(path.read_text()) for path in RESULTS.glob("*.json")]
    of_gpus = [one for one in found if isinstance(one, dict) and one.get("machine", {}).get("gpus")]
    clocks = sum(bool(one.get("conditions", {}).get("gpus")) for one in of_gpus)
    assert f"{clocks} of {len(of_gpus)} results of GPUs have clocks" in aim("Every table from current code")[0]


def test_ranks_that_share_gpus_shrink_as_slowly_as_the_results_say() -> None:
    measured, reason = aim("`shrink()` within 0.1 s")
    named = re.findall(r"`(kill-plans[\w-]+)\.json`", measured)
    p99 = {name: [round(row["shrink_ms"]["p99"]) for row in content(name)["rows"]] for name in named}
    every = [ms for of_result in p99.values() for ms in of_result]
    assert f"{min(every)} to {max(every)} ms" in measured
    (alone,) = {round(row["shrink_ms"]["p99"]) for row in content("kill-plans-h100-4")["rows"]}
    assert f"{alone} ms" in reason


def test_agreement_beyond_16_ranks_takes_as_long_as_the_result_says() -> None:
    sentence = aim("Agreement beyond 16 ranks")[0]
    rows = content("virtual-ranks-h200")["rows"]
    named = {"tokens": 1, "layout": "flat", "blocks": 2, "what": "dispatch"}
    times = {row["ranks"]: f"{row['us']:.0f}" for row in rows if named.items() <= row.items()}
    assert f"{times[32]} us at 32 ranks and {times[64]} at 64" in sentence


def test_counters_take_as_long_as_the_result_says() -> None:
    sentence = aim("Counters whose cost cannot be measured")[0].partition(" one token")[2]
    want = []
    for row in [row for row in content("counters-h100-4")["rows"] if row["tokens"] == 1]:
        p50 = {which: row[which]["p50"] for which in ("on", "off", "again")}
        want += [f"{abs(p50['on'] - p50['off']):.2f}", f"{abs(p50['again'] - p50['on']):.2f}"]
    assert re.findall(r"\d\.\d\d(?= us)", sentence) == want


def test_exact_sums_travel_at_the_share_of_the_fastest_copy_that_the_results_say() -> None:
    """A rank with one of a token's experts sends a row; one with more a float32 sum, of the size of two rows."""
    (sentence,) = re.findall(r"moves its bytes at ([^`]*) of the rate of the fastest copy", DECISIONS)
    want = []
    for ranks in (4, 8):
        found = content(f"times-many-h200-{ranks}")
        none, one = (comb(256 // ranks, n) * comb(256 - 256 // ranks, 8 - n) / comb(256, 8) for n in (0, 1))
        row = row_of(f"times-many-h200-{ranks}", tokens=4096, what="combine", layout="expert", variant="fp32 wire")
        in_bytes = row["wire_bytes"] * (one + 2 * (1 - none - one)) / (1 - none)  # wire_bytes: a bfloat16 row each
        want.append(f"{in_bytes / (row['us']['p50'] * 1e3) / max(copy['gbs'] for copy in found['ceiling']):.2f}")
    assert re.findall(r"\d\.\d\d", sentence) == want


def test_the_study_says_where_torch_and_nccl_are_ahead() -> None:
    text = (ROOT / "docs" / "maintainers" / "all_gather_matmul_study.md").read_text()
    ahead: dict[tuple[str, str], list[int]] = {}
    times: dict[tuple[str, int], dict[str, float]] = {}
    for row in content("overlap-all-gather-matmul-h100-2")["rows"]:
        if "^3" in row["case"]:
            size = int(row["case"].removesuffix("^3"))
            times.setdefault((row["dtype"], size), {})[row["who"]] = row["us"]["p50"]
    for (dtype, size), of in times.items():
        for who in ("nccl", "torch"):
            if of[who] < of["moecomm"]:
                ahead.setdefault((dtype, who), []).append(size)
    assert ahead == {("fp16", "torch"): [4096, 8192], ("fp16", "nccl"): [8192], ("fp8", "torch"): [8192]}
    said = "In float16 torch's fused operator is ahead of it from 4096 on, and NCCL with cuBLAS at 8192."
    assert f"{said} In FP8 torch's product behind NCCL is ahead at 8192." in " ".join(text.split())


def test_recorded_routing_takes_as_much_longer_as_the_results_say() -> None:
    """Pairs with recorded routing beside those with drawn routing, of another run."""
    keys = ("tokens", "layout", "payload", "variant")
    even = {tuple(row[key] for key in keys): row for row in _pairs("recorded-even-h200-4")}
    shares = [
        100 * (row["us"]["p50"] / even[tuple(row[key] for key in keys)]["us"]["p50"] - 1)
        for row in _pairs("recorded-h200-4")
    ]
    text = (ROOT / "docs" / "routing.md").read_text()
    assert f"between {-min(shares):.1f} % less and {max(shares):.1f} % more than with drawn routing" in text
    assert f"take {max(shares):.1f} % more at most than with drawn routing" in aim("Routing of a large model")[0]


def _pairs(result: str) -> list[dict[str, Any]]:
    return [
        row for row in content(result)["rows"] if "us" in row and (MOECOMM | {"what": "pair"}).items() <= row.items()
    ]


def test_a_window_is_that_of_the_run_or_more_than_a_callers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "bench"))
    import tables

    several, one = ({"benchmark": "dispatch-combine", "case": {"inputs": inputs}} for inputs in (4, 1))
    assert tables.window_of(several, {"window": 2 << 30}, {"window": 1 << 30}) == "> 2.0 GiB"
    assert tables.window_of(several, {"window": 2 << 30, "opened": 3 << 30}) == "3.0 GiB"
    assert tables.window_of(several, {"window_bytes": 2 << 30, "opened_bytes": 3 << 30}) == "3.0 GiB"
    assert tables.window_of(one, {"window": 2 << 30}) == "2.0 GiB" and tables.window_of(one, {}) == ""
    layers = [tables.load(name) for name in ("moe-deepseek-v3-h100-4", "moe-mixtral-8x7b-h200-4")]
    assert [tables.window_of(found, *found["rows"])[0] for found in layers] == ["3", ">"]


def beside_others(result: str = "peers-h200-4") -> dict[tuple[int, str, str, str, str], beside.SizedOperation]:
    found = beside.operations(content(result))
    return {(one.tokens, one.layout, one.what, one.payload, one.variant): one for one in found}


def test_pairs_are_as_far_from_another_library_as_the_result_says() -> None:
    few, many = (
        [beside_others()[tokens, "flat", "pair", payload, "y in the window"] for payload in ("bf16", "fp8")]
        for tokens in (128, 4096)
    )
    measured, reason = aim("A dispatch and a combine together 1.05 times")
    (graph,), (alone,) = {f"{one.ratio:.2f}" for one in few}, {f"{one.ratios[0]:.2f}" for one in few}
    assert re.findall(r"\d\.\d\d", measured) == [graph, alone, *(f"{one.ratio:.2f}" for one in many)]
    longer = [one.best["moecomm"].us - one.best["FlashInfer"].us for one in few]
    assert re.findall(r"\d\.\d", reason) == [f"{us:.1f}" for us in longer]


def test_lines_and_shares_of_layouts_that_are_not_built_follow_from_what_there_is() -> None:
    """Lines hold 15 words beside a tag, and would hold 16 without."""
    (line,) = (line for line in DECISIONS.splitlines() if line.startswith("| Lines of packets without tags"))
    shorter, today = [], []
    for payload in ("bf16", "fp8"):
        row = stored.row_of(payload, 7168, 8)
        assert row is not None
        today.append(stored.dispatch_bytes(*row, 8, flat=True) // 128)
        words = (row.cut.row_bytes + row.cut.scale_bytes) // 8
        shorter.append(-(-(words + 8) // 16) + (row.cut.number - 1) * -(-words // 16))  # entries in the first packet
    cut = packets.of_combine(2 * 7168)
    today.append(stored.combine_bytes(cut, 2 * 7168) // 128)
    shorter.append(cut.number * -(-cut.row_bytes // 8 // 16))
    said = re.findall(r"(\d+)(?: lines)? in place of (\d+)", line.split(" | ")[0])
    assert said == [(f"{fewer}", f"{lines}") for fewer, lines in zip(shorter, today, strict=True)]
    (ranked,) = (
        line for line in DECISIONS.splitlines() if line.startswith("| A layout whose rows stay where they land")
    )
    pairs = {
        key[0]: one.best["moecomm"].us for key, one in beside_others().items() if key[1:4] == ("flat", "pair", "fp8")
    }
    shares = 100 * 0.8 / pairs[128], 100 * 8 / pairs[4096], 100 * 12 / pairs[4096]  # estimates: 0.8 and 8 to 12 us
    assert f"of {pairs[4096]:.0f} us" in ranked
    assert "of {:.0f} % and of {:.1f} to {:.1f} % of the time in FP8".format(*shares) in ranked
    even = float(spread(DrawnGate(256, 8), 1, 64).ranks[0])
    assert f"on 64 ranks {1 / even:.1f} times the rows of even routing" in ranked


def test_a_combine_of_rows_outside_is_as_far_behind_as_the_result_says() -> None:
    inside, outside = (
        beside_others()[4096, "flat", "combine", "", variant].best for variant in ("y in the window", "y outside")
    )
    measured, reason = aim("`flat` combine of 4096 tokens")
    want = [outside[who].us for who in ("moecomm", "DeepEP V1", "NCCL EP")]
    assert re.findall(r"(\d+) us", measured) == [f"{us:.0f}" for us in want]
    assert re.findall(r"(\d+) us", reason) == [f"{inside['moecomm'].us:.0f}"]


def test_calls_alone_are_as_far_ahead_as_the_result_says() -> None:
    of_128 = {key[1:]: f"{one.ratios[0]:.2f}" for key, one in beside_others().items() if key[0] == 128}
    few = {key: ratio for key, ratio in of_128.items() if float(ratio) < 1.25}
    assert {key[:2] for key in few} == {
        ("flat", "dispatch"),
        ("flat", "combine"),
        ("flat", "pair"),
        ("expert", "dispatch"),
    }
    dispatches, combines = ([few[key] for key in few if key[:2] == ("flat", what)] for what in ("dispatch", "combine"))
    (combine,), others = set(combines), sorted(ratio for key, ratio in of_128.items() if key not in few)
    want = [*dispatches, combine, few["expert", "dispatch", "bf16", ""], others[0], others[-1]]
    assert re.findall(r"\d\.\d\d", aim("A call alone")[0]) == want


def test_a_decode_step_takes_as_long_as_the_results_say() -> None:
    def layer(tokens: int) -> float:
        named = {"tokens": tokens, "layout": "flat", "delays": False}
        (row,) = (row for row in content("decode-h200-4")["rows"] if named.items() <= row.items())
        return float(row["beside_us"])

    def apart(tokens: int) -> float:
        named = {"tokens": tokens, "layout": "flat"}
        calls = {"what": "dispatch", "payload": "fp8"}, {"what": "combine", "variant": "y in the window"}
        return sum(float(row_of("times-few-h200-4", **named, **call)["us"]["p50"]) for call in calls)

    want = [f"{of(tokens):.1f}" for of in (layer, apart) for tokens in (1, 128)]
    assert re.findall(r"([\d.]+) us", aim("Decode step of DeepSeek-V3")[0]) == want


def test_grouped_gemms_of_few_tokens_read_as_fast_as_the_result_says() -> None:
    found = content("gemm-few-h200")
    shares = {
        (row["model"], row["dtype"], row["gemm"], row["activation"], row["tokens"]): row["tbs"] / found["read_tbs"]
        for row in found["rows"]
    }
    measured, reason = aim("Grouped GEMMs of 16 to 128 tokens")
    assert re.findall(r"\d\.\d\d", measured) == [f"{of(shares.values()):.2f}" for of in (min, max)]
    slow = [key for key, share in shares.items() if share < 0.9]
    assert len({key[:4] for key in slow}) == 1 and [key[4] for key in slow] == [16, 128]
    of_deepseek = [share for key, share in shares.items() if key[0] == "deepseek-v3"]
    assert reason.split(". ")[-1] == f"DeepSeek-V3's GEMMs reach {min(of_deepseek):.2f} to {max(of_deepseek):.2f}."


def test_host_times_of_eager_calls_are_those_of_the_results() -> None:
    measured, _ = aim("Host time of eager calls")
    layers = [row for row in content("moe-gpt-oss-120b-h200-1")["rows"] if row["what"] == "layer"]
    fused = [row["host_us"] for row in layers if row["variant"].endswith("one launch")]
    unfused = [row["host_us"] for row in layers if row["variant"] in ("sequential", "fp8", "mxfp4", "packed mxfp4")]
    for times in (unfused, fused):
        assert f"{min(times):.0f} to {max(times):.0f} us {'un' * (times is unfused)}fused" in measured
    gemms = [row["host_us"] | {"": row["host_us"][row["chosen"]]} for row in content("gemm-packed-mxfp4-h200")["rows"]]
    torchs = [of["torch"] for of in gemms if "torch" in of]
    assert f"{statistics.median(of[''] for of in gemms):.0f} us in the median" in measured
    assert f"torch's in the same run {min(torchs):.0f} to {max(torchs):.0f}." in measured


def span(some: Iterable[float]) -> str:
    """Return the least and the greatest of some ratios, once if they read alike."""
    low, high = (f"{of(some):.2f}" for of in (min, max))
    return low if low == high else f"{low} to {high}"


def test_grouped_gemms_beside_deep_gemm_are_those_of_the_results() -> None:
    """The faster form of deep_gemm over ours, by rows an expert; of all models."""
    few, many, bf16 = list[float](), list[float](), list[float]()
    names = [path.stem for path in RESULTS.glob("gemm-peers-*.json")]
    for row in (row for name in names for row in content(name)["rows"]):
        theirs = min(time for name, time in row["us"].items() if name.startswith("deep_gemm"))
        each = row["rows"] // row["experts"]
        if row["dtype"] == "bf16" or each >= 62:
            (bf16 if row["dtype"] == "bf16" else many if each > 128 else few).append(theirs / row["us"][row["chosen"]])
    measured, _ = aim("FP8 grouped GEMMs with scales of blocks")
    assert len(names) == 5 and "five models" in measured
    assert re.findall(r"\d\.\d\d", measured) == [f"{of(some):.2f}" for some in (few, many, bf16) for of in (min, max)]


@pytest.mark.parametrize("name", ["layers-peers-h200-1", "layers-peers-v4-pro-h200-1"])
def test_layers_beside_deep_gemm_are_those_of_the_result(name: str) -> None:
    layers: dict[int, dict[str, float]] = {}
    for row in content(name)["rows"]:
        if row["what"] == "layer":
            layers.setdefault(row["tokens"], {})[f"{row['who']} {row['variant']}"] = row["us"]["p50"]
    measured, _ = aim("FP8 layers at 1.05 times the pace")
    faster = [of["deep_gemm fp8, one launch"] / of["moecomm fp8, default"] for of in layers.values()]
    assert f"{min(faster):.2f} to {max(faster):.2f} (`{name}.json`" in measured


def test_transfers_take_as_long_as_the_results_say() -> None:
    measured, _ = aim("Weights of a trainer reach an engine")
    for name, verb in (("transfer-h200-2", "takes"), ("transfer-cpu", "takes")):
        rows = content(name)["rows"]
        plain = [row["of_bytes"] for row in rows if row["cast"] in ("bf16", "bfloat16")]
        cast = [row["of_bytes"] for row in rows if row["cast"] not in ("bf16", "bfloat16")]
        ours = [row["of_torch"] for row in rows]
        assert f"{min(plain):.1f} to {max(plain):.1f}" in measured and f"{min(cast):.1f} to {max(cast):.1f}" in measured
        assert f"{verb} {min(ours):.2f} to {max(ours):.2f} of ours" in measured


def test_packed_mxfp4_weights_are_as_fast_as_the_result_says() -> None:
    """Over FP8 and over bf16, by rows an expert."""
    us: dict[tuple[Any, ...], dict[str, float]] = {}
    for row in content("gemm-packed-mxfp4-h200")["rows"]:
        key = row["model"], row["gemm"], row["activation"], row["tokens"] * row["topk"] // row["experts"]
        us.setdefault(key, {})[row["dtype"]] = row["us"][row["chosen"]]
    over: dict[str, dict[int, list[float]]] = {"fp8": {}, "bf16": {}}
    for (_, gemm, activation, each), of in us.items():
        for other, ratios in over.items():
            if gemm == 2 or activation:
                ratios.setdefault(each, []).append(of["packed-mxfp4"] / of[other])
    assert max(ratio for each in (4, 16, 32) for ratio in over["fp8"][each]) < 1 < min(over["fp8"][128])
    few = [[ratio for each in (4, 16) for ratio in over[other][each]] for other in ("fp8", "bf16")]
    measured, _ = aim("MXFP4 weights beside FP8 rows")
    want = [
        *(of(ratios) for ratios in few for of in (min, max)),
        *(of(over["fp8"][n]) for n in (64, 128) for of in (min, max)),
    ]
    assert re.findall(r"\d\.\d\d", measured) == [f"{one:.2f}" for one in want]
    measured, _ = aim("Layers of gpt-oss-120b with MXFP4")
    shares = [of(packed_over("gpt-oss-120b", other)) for other in ("", "fp8, ") for of in (min, max)]
    assert re.findall(r"\d\.\d\d", measured.partition("Packed")[2]) == [f"{share:.2f}" for share in shares]


def layer_times(name: str) -> dict[int, dict[str, float]]:
    """Return microseconds of our layers by tokens and variant."""
    found: dict[int, dict[str, float]] = {}
    for row in content(name)["rows"]:
        if (row["who"], row["what"]) == ("moecomm", "layer"):
            found.setdefault(row["tokens"], {})[row["variant"]] = row["us"]["p50"]
    return found


def packed_over(model: str, other: str) -> list[float]:
    """Return what layers of packed weights take of the time of others, by tokens."""
    return [of["packed mxfp4, default"] / of[f"{other}default"] for of in layer_times(f"moe-{model}-h200-1").values()]


@pytest.mark.parametrize(
    ("name", "at_most"),
    [
        ("moe-gpt-oss-120b-h200-1", [0.5]),
        ("moe-qwen3-30b-a3b-h200-1", [0.3]),
        ("moe-mixtral-8x7b-h200-1", [6.5, 3.3]),
        ("layers-peers-h200-1", [0.9]),
        ("layers-peers-v4-pro-h200-1", [3.1, 0.6]),
    ],
)
def test_defaults_are_as_much_slower_as_the_page_says(name: str, at_most: list[float]) -> None:
    """Percent over the better form, the worst first."""
    slower = []
    for of in layer_times(name).values():
        for kind in ("", "fp8, ", "packed mxfp4, "):
            if f"{kind}one launch" in of:
                better = min(of[f"{kind}one launch"], of[kind.removesuffix(", ") or "sequential"])
                slower.append(round(100 * (of[f"{kind}default"] / better - 1), 1))
    assert sorted(slower, reverse=True)[: len(at_most)] == at_most
    measured, _ = aim("`fused=None` at most 2 % slower")
    assert f"`{name}.json`" in measured and all(f"{percent} %" in measured for percent in at_most)


def test_losses_of_torchtitan_are_as_far_apart_as_the_page_says() -> None:
    apart = max(row["largest_difference"] for row in content("torchtitan-training-h200-2")["rows"])
    for page in ("torchtitan.md", "maintainers/decisions.md"):
        assert f"{apart:.0e}".replace("e-0", "e-") + " apart at most" in (ROOT / "docs" / page).read_text()


def test_tokens_per_second_of_trainers_are_those_of_the_results() -> None:
    measured, _ = aim("A framework that serves or trains")
    for name, word in (("megatron", "to"), ("torchtitan", "and")):
        rows = content(f"{name}-training-h200-2")["rows"]
        ratios = sorted(row["tokens_per_s"] / row["their_tokens_per_s"] for row in rows)
        assert f"{ratios[0]:.2f} {word} {ratios[-1]:.2f} times as many tokens" in measured, name


def test_combines_of_128_tokens_take_as_long_as_the_result_says() -> None:
    measured = aim("4 H200s, 128 tokens, `expert` and `batched`")[0]
    for layout in ("expert", "batched"):
        wires = ("bf16 wire", "fp32 wire")
        rows = [
            row_of("times-few-h200-4", tokens=128, what="combine", layout=layout, variant=wire, sms_asked=0)
            for wire in wires
        ]
        assert re.findall(r"\d+\.\d(?= us)", measured) == [f"{row['us']['p50']:.1f}" for row in rows]


def test_operators_are_as_far_behind_as_the_results_say() -> None:
    """The time of the default form over that of NCCL and of torch, on two H200s."""
    measured = aim("Overlapped operators never slower")[0]
    ratios: dict[str, list[float]] = {"nccl": [], "torch": []}
    for ranks, sizes, times in test_table.measured(RESULTS.glob("overlap-*-h200-2.json")):
        chosen = times["moecomm unfused"] if test_table.is_slower(ranks, sizes) else times["moecomm"]
        for who in ratios.keys() & times.keys():
            ratios[who].append(chosen / times[who])
    assert f"NCCL with cuBLAS: {min(ratios['nccl']):.2f} to {max(ratios['nccl']):.2f}, and over torch's" in measured
    assert f"operators up to {max(ratios['torch']):.2f} (" in measured


def test_batched_rows_are_measured_inside_one_domain_alone() -> None:
    """The aim names every kind of result that lacks them."""
    measured = aim("`batched` wherever")[0]
    layouts: dict[str, set[str]] = {}
    for path in RESULTS.glob("*.json"):
        found = json.loads(path.read_text())
        if isinstance(found, dict) and found.get("benchmark") in ("dispatch-combine", "backends"):
            layouts[path.stem] = {row["layout"] for row in found["rows"] if "us" in row and row["who"] == "moecomm"}
    with_it = {name for name, of in layouts.items() if "batched" in of}
    assert with_it >= {path.stem for kind in ("few", "many") for path in RESULTS.glob(f"times-{kind}-*.json")}
    lacking = ("domains", "nic", "backends", "gin", "zipf", "skew", "recorded", "few-sms", "ht")
    assert not any(name.startswith(lacking) for name in with_it)
    assert all(word in measured for word in ("Between domains", "NIC", "NVSHMEM and GIN", "skewed", "blocks"))
