"""Topics of docs/measurements.md: for each a short table."""

from __future__ import annotations

import statistics
from collections.abc import Iterable
from itertools import product
from typing import Any

import head_to_head
import layers_beside
import study
from tables import (
    CALLS,
    CASTING,
    DOMAINS,
    OPERATORS,
    OVERLAP,
    OVERLAP_H200,
    PLACED,
    ROUNDS,
    THROUGH,
    WINDOW,
    Topic,
    figure,
    gpu,
    layer_parts,
    line,
    load,
    names,
    of_kind,
    older,
    round_parts,
    split,
    table,
    time_of,
    where,
    window_in,
    window_of,
    with_mark,
)

from moecomm.base import formats
from moecomm_bench import beside
from moecomm_bench.layers import BY_RANK

PEERS = "peers-alone-h200"
DEEP_EP = "deep-ep-layer-h100-4 deep-ep-layer-eager-h100-4 deep-ep-layer-eager-h200-2"
WAYS = ("sequential", "one launch", "fp8, one launch")  # variants of a layer
ONE_GPU_MODELS = ("gpt-oss-120b", "mixtral-8x7b", "qwen3-30b-a3b")
# Sizes of each result of complete layers on 4 GPUs.
LAYER_SIZES = {
    "moe-deepseek-v3-h100-4": (128, 1024, 4096),
    "moe-qwen3-235b-h100-4": (128, 1024, 4096),
    "moe-gpt-oss-120b-h200-4": (128, 4096),
    "moe-mixtral-8x7b-h200-4": (128, 4096),
    "moe-qwen3-30b-a3b-h200-4": (128, 8192),
}


def whole_operations() -> str:
    """Dispatch and combine of many tokens."""
    ways: tuple[tuple[str, str, tuple[int, ...]], ...] = (
        ("times-many-h200-4", "flat", (4096,)),
        ("times-many-h200-4", "expert", (4096,)),
        ("ht-h200-4", "flat", (8192,)),
        ("qwen3-h200-4", "flat", (4096,)),
        ("cold-h100-4", "flat", (4096,)),
        ("rounds-h100-2", "flat", (4096,)),
        ("rounds-h100-2", "expert", (4096,)),
    )
    picture = _picture("time and bandwidth over tokens", "sweep-h200-4")
    return f"{table(_HEADS, (row for way in ways for row in _rounds(*way)))}\n\n{picture}"


_HEADS = "model | GPUs | layout | tokens a rank | dispatch, bf16 | dispatch, FP8 | combine | combine | window"
_LAYOUTS = {"times-many": ("flat", "expert"), **dict.fromkeys(("ht", "qwen3", "cold"), ("flat",))}


def whole_operations_of(some: list[str]) -> str:
    """Return the same of one machine: of the most tokens of each result."""
    ways = [(name, layout) for name in of_kind(some, *_LAYOUTS) for layout in _LAYOUTS[split(name)[0]]]
    rows = [row for name, layout in ways for row in _rounds(name, layout, load(name)["case"]["tokens"][-1:])]
    pictures = (_picture("time and bandwidth over tokens", name) for name in of_kind(some, "sweep"))
    return "\n\n".join([*[table(_HEADS, rows)] * bool(rows), *pictures])


def _picture(about: str, name: str) -> str:
    return f"![{about}](../bench/results/{name}.svg)"


def few_tokens() -> str:
    """Dispatch and combine of few tokens."""
    machines = ("h100-4", "h200-4")
    ways = [(f"times-few-{machine}", layout) for machine in machines for layout in ("flat", "expert")]
    later = [("rounds-h100-2", layout) for layout in ("flat", "expert", "batched")]
    rounds = table(
        _HEADS,
        (
            row
            for way, sizes in [*((w, (1, 128)) for w in ways), *((w, (128,)) for w in later)]
            for row in _rounds(*way, sizes)
        ),
    )
    found, rows = load("virtual-ranks-h200"), []
    for layout in ("flat", "expert"):
        alike = {"tokens": 1, "layout": layout, "what": "dispatch"}
        of_ranks = [row for row in found["rows"] if alike.items() <= row.items()]
        cells = [*(time_of(row["us"]) for row in of_ranks), window_of(found, *of_ranks)]
        rows.append(line(found, round_parts(1, "dispatch"), f"`{layout}`", *cells))
    heads = f"1 token, 2 blocks: dispatch of the last of so many ranks on one GPU | 4 | 8 | 16 | 32 | 64{WINDOW}"
    virtual = table(heads, rows)
    return f"{rounds}\n\n{virtual}"


def few_tokens_of(some: list[str]) -> str:
    """Return rounds of one machine."""
    layouts = ("flat", "expert", "batched")
    rows = [row for name in of_kind(some, "times-few") for layout in layouts for row in _rounds(name, layout, (1, 128))]
    return table(_HEADS, rows) if rows else ""


def _rounds(name: str, layout: str, sizes: Iterable[int]) -> list[str]:
    found, rows = load(name), []
    case = found["case"]
    for tokens in sizes:
        cells = [figure(found, tokens=tokens, what="dispatch", layout=layout, payload=p) for p in ("bf16", "fp8")]
        variants = ("y in the window", "y outside") if layout == "flat" else ("fp32 wire", "bf16 wire")
        for variant in variants:
            time = figure(found, tokens=tokens, what="combine", layout=layout, variant=variant)
            cells.append(f"{time}, {variant}" if time else "")
        how = ", ".join(
            [case["model"], *["H100s"] * ("H100" in found["machine"]["gpus"][0]), *["caches flushed"] * case["cold"]]
        )
        cells.append(window_in(found, tokens, layout))
        rows.append(line(found, round_parts(tokens), how, str(case["ranks"]), f"`{layout}`", str(tokens), *cells))
    return rows


def weights() -> str:
    """Return the table of grouped GEMMs of few tokens, which weights bound."""
    found, lines = load("gemm-few-h200"), {}
    for row in found["rows"]:
        what = ", ".join(filter(None, (str(row["gemm"]), row["activation"])))
        cells = lines.setdefault((row["model"], row["dtype"], what), [])
        cells.append(f"{row['us'][row['chosen']]:.0f} us ({row['tbs'] / found['read_tbs']:.2f})")
    rows = [line(found, ("GEMM",), *labels, *cells) for labels, cells in lines.items()]
    return table("model | dtype | GEMM | 16 tokens | 32 tokens | 64 tokens | 128 tokens", rows)


def gemms_beside() -> str:
    """Return the table of grouped GEMMs beside torch's and deep_gemm's."""
    rows = []
    for name in gemm_peers():
        found = load(name)
        for row in found["rows"]:
            what = ", ".join(filter(None, (str(row["gemm"]), row["activation"])))
            ours = row["us"][row["chosen"]]
            others = [row["us"].get(name) for name in ("torch", "deep_gemm", "deep_gemm masked")]
            cells = [f"{time_of(other)} ({other / ours:.2f})" if other else "" for other in others]
            model = row["model"] or name.removeprefix("gemm-peers-").removesuffix("-h200")
            labels = (model, row["dtype"], what, str(row["rows"] // row["experts"]))
            rows.append(line(found, ("GEMM",), *labels, time_of(ours), *cells, at=(4,)))
    return table("model | dtype | GEMM | rows an expert | moecomm | torch | deep_gemm, contiguous | masked", rows)


def gemm_peers() -> list[str]:
    """Return the names of results of grouped GEMMs beside deep_gemm's."""
    return [name for name in names() if name.startswith("gemm-peers-")]


def four_bits() -> str:
    """Return the tables of packed MXFP4 weights: grouped GEMMs, and layers of one rank."""
    found, times = load("gemm-packed-mxfp4-h200"), dict[tuple[str, str, int], dict[str, float]]()
    for row in found["rows"]:
        if row["gemm"] == 2 or row["activation"]:
            what = ", ".join(filter(None, (str(row["gemm"]), row["activation"])))
            each = row["tokens"] * row["topk"] // row["experts"]
            times.setdefault((row["model"], what, each), {})[row["dtype"]] = row["us"][row["chosen"]]
    rows = []
    for (model, what, each), of in times.items():
        ratios = [f"{of['packed-mxfp4'] / of[other]:.2f}" for other in ("fp8", "bf16")]
        rows.append(line(found, ("GEMM",), model, what, str(each), *map(time_of, of.values()), *ratios))
    weights = "bf16 | FP8 | MXFP4 | packed MXFP4 | over FP8 | over bf16"
    gemms = table(f"model | GEMM | rows an expert | {weights}", rows)
    rows = []
    for model in ONE_GPU_MODELS:
        layers = load(f"moe-{model}-h200-1")
        for tokens in layers["case"]["tokens"]:
            of = {r["variant"]: r["us"]["p50"] for r in layers["rows"] if (r["tokens"], r["what"]) == (tokens, "layer")}
            us = [of[kind + "default"] for kind in ("", "fp8, ", "mxfp4, ", "packed mxfp4, ")]
            ratios = [f"{us[3] / other:.2f}" for other in (us[1], us[0])]
            rows.append(line(layers, layer_parts(tokens), model, str(tokens), *map(time_of, us), *ratios))
    return f"{gemms}\n\n{table(f'model | tokens | {weights}', rows)}"


def fp8() -> str:
    """Grouped GEMMs in bf16 and FP8."""
    found, rows = load("gemm-fp8-h100"), []
    for row in found["rows"]:
        if row["dtype"] != "fp8" or (row["gemm"] == 1 and not row["activation"]):
            continue
        alike = ("tokens", "gemm", "activation")
        bf16 = next(r for r in found["rows"] if r["dtype"] == "bf16" and all(r[key] == row[key] for key in alike))
        times = [r["us"][r["chosen"]] for r in (bf16, row)]
        cells = [time_of(times[0]), f"{bf16['tflops']:.0f}", time_of(times[1]), f"{row['tflops']:.0f}"]
        what = ", ".join(filter(None, (str(row["gemm"]), row["activation"])))
        ratios = [f"{bf16['of_torch']:.2f}", f"{times[0] / times[1]:.2f}"]
        rows.append(line(found, ("GEMM",), what, str(row["tokens"]), *cells, *ratios))
    return table("GEMM | tokens | bf16 | TFLOP/s | FP8 | TFLOP/s | torch's bf16 over bf16 | bf16 over FP8", rows)


def payloads() -> str:
    """Dispatches of each format beside bf16."""
    found = load("formats-h200-2")
    timed = {
        (row["tokens"], row["layout"], row["payload"]): row["us"]["p50"]
        for row in found["rows"]
        if row["what"] == "dispatch" and row["who"] == "moecomm" and "us" in row
    }
    rows = []
    for layout, payload in product(("flat", "expert"), ("bf16", *formats.FORMATS)):
        cells = [payload, f"`{layout}`"]
        for tokens in (128, 8192):
            bf16, given = timed[tokens, layout, "bf16"], timed.get((tokens, layout, f"{payload}-given"))
            cast = timed.get((tokens, layout, payload))
            for us in (given, cast):
                cells += [time_of(us), f"{us / bf16:.2f}"] if us else ["", ""]
        if any(cells[2:]):
            rows.append(line(found, (*round_parts(128, "dispatch"), "dispatch"), *cells, at=(2, 4, 6, 8)))
    given, cast = ("rows given | over bf16", "sent as bf16, cast | over bf16")
    heads = [f"{head.replace(' |', f', {tokens} |')}" for tokens in (128, 8192) for head in (given, cast)]
    dispatches = table(f"payload | layout | {' | '.join(heads)}", rows)
    return f"{dispatches}\n\n{_fp8_sums(found)}"


def placed_experts(name: str = "placed-layers-h200-2") -> str:
    """Layers and dispatches with placements."""
    found = load(name)
    layers = {(row["model"], row["zipf"], row["placed"]): row for row in found["rows"] if row["what"] == "layer"}
    copied = ["replicate"] * any(choice == "replicate" for _, _, choice in layers)
    rows, choices = [], ("", "token", "nearest")
    for model, zipf, placed in layers:
        if zipf and not placed:
            even = layers[model, 0.0, ""]["us"]["p50"]
            cells = [f"{model}, 4096 tokens", f"Zipf {zipf:g}"]
            for choice in (*choices, *copied):
                us = layers[model, zipf, choice]["us"]["p50"]
                cells += [time_of(us), f"{us / even:.2f}"]
            cells += [f"{layers[model, zipf, choice]['busiest']:.2f}" for choice in ("", "token", *copied)]
            times = range(2, 2 * len((*choices, *copied)) + 2, 2)
            parts = (*layer_parts(4096), "forms")
            rows.append(line(found, parts, *cells, at=times, eager=times[1:], called=PLACED))
    heads = "experts in a row | over even | placed, `token` | over even | placed, `nearest` | over even"
    ends = "busiest | busiest, placed"
    if copied:
        heads, ends = f"{heads} | copied in the call | over even", f"{ends} | busiest, copied"
    first = table(f"layer | routing | {heads} | {ends}", rows)
    dispatches = {
        (row["model"], row["layout"], row["tokens"], row["placed"]): row["us"]["p50"]
        for row in found["rows"]
        if row["what"] == "dispatch"
    }
    balanced = ["balanced"] * any(choice == "balanced" for *_, choice in dispatches)
    rows = [
        line(
            found,
            round_parts(tokens, "dispatch"),
            *(model, f"`{layout}`", str(tokens)),
            *(time_of(dispatches[model, layout, tokens, choice]) for choice in (*choices, *balanced)),
            at=range(3, 3 + len((*choices, *balanced))),
            eager=range(4, 3 + len((*choices, *balanced))),
            called=PLACED,
        )
        for model, layout, tokens, placed in dispatches
        if not placed
    ]
    heads = " | ".join(["experts in a row", *(f"replicas, `{choice}`" for choice in (*choices[1:], *balanced))])
    return f"{first}\n\n{table(f'dispatch | layout | tokens | {heads}', rows)}"


def placed_experts_of(some: list[str]) -> str:
    """Return the same of one machine, and weights that move."""
    return "\n\n".join(
        [*map(placed_experts, of_kind(some, "placed-layers")), *map(moving_weights, of_kind(some, "moving-weights"))]
    )


def moving_weights(name: str) -> str:
    """Rounds and steps while weights of experts move."""
    found, rows = load(name), []
    for row in found["rows"]:
        if row["what"] == "copies":
            cells = [f"a move of {row['held']} experts", "", "", f"{row['gbs']:.1f} GB/s"]
        elif row["what"] == "rounds":
            cells = [f"rounds of {row['tokens']} tokens", time_of(row["us"]), time_of(row["beside_us"]), ""]
        else:
            what = f"steps of {row['layers']} layers, {row['tokens']} tokens"
            cells = [what, *(time_of(1e3 * row[which]["p50"]) for which in ("quiet", "moving")), ""]
        rows.append(line(found, () if row["what"] == "copies" else round_parts(4096), *cells, at=(1, 2)))
    return table("weights that move | alone | beside copies | copies alone", rows)


def _fp8_sums(found: dict[str, Any]) -> str:
    rows = []
    for layout, default in (("flat", "y outside"), ("expert", "bf16 wire")):
        cells = [f"`{layout}`"]
        for tokens in (128, 8192):
            us = [
                next(
                    row["us"]["p50"]
                    for row in found["rows"]
                    if "us" in row
                    and (row["what"], row["tokens"], row["layout"], row["variant"])
                    == ("combine", tokens, layout, variant)
                )
                for variant in (default, "fp8 wire", "int8 wire")
            ]
            cells += [*map(time_of, us), f"{us[1] / us[0]:.2f}"]
        parts = (*round_parts(128, "combine"), "combine")
        marked = [*(1, 5) * older(found, parts), *(2, 3, 6, 7) * older(found, CASTING)]
        rows.append(f"| {' | '.join(with_mark(cell) if at in marked else cell for at, cell in enumerate(cells))} |")
    heads = [f"combine, {tokens} | in FP8, {tokens} | in INT8, {tokens} | FP8 over it" for tokens in (128, 8192)]
    return table(f"layout | {' | '.join(heads)}", rows)


def accuracy() -> str:
    """Logits with each format and wire."""
    found = load("accuracy")
    rows = [
        line(found, (), row["format"], row["wire"], *(f"{row[name]:.{places}f}" for name, places in _ACCURACY.items()))
        for row in found["rows"]
    ]
    return table("rows | wire | loss | divergence | another byte", rows)


_ACCURACY = {"loss": 4, "divergence": 6, "other_byte": 4}  # places


def few_sms(few: str = "few-sms-h200-4", many: str = "ht-h200-4") -> str:
    """Rounds by few blocks."""
    found, fast = load(few), load(many)
    rows = []
    for sms in (16, 64, 0):
        bf16 = figure(found, tokens=4096, what="dispatch", payload="bf16", sms_asked=sms)
        cast = figure(fast, tokens=4096, what="dispatch", payload="fp8", sms_asked=sms)
        ways = ("y in the window", "y outside")
        cells = [figure(found, tokens=4096, what="combine", variant=way, sms_asked=sms) for way in ways]
        cells.append(window_in(found, 4096, "flat"))
        rows.append(line(found, round_parts(4096), str(sms or "default"), bf16, cast, *cells, beside=fast))
    heads = "blocks | dispatch, bf16 | dispatch, FP8 | combine, y in the window | combine, y outside"
    return table(heads + WINDOW, rows)


def few_sms_of(some: list[str]) -> str:
    """Return the same of one machine, where both results are there."""
    used = of_kind(some, "few-sms", "ht")
    return few_sms(*used) if len(used) == 2 else ""


def skew(
    some: tuple[str, ...] = ("skew-h200-4", "ht-h200-4"), laws: tuple[str, ...] = ("zipf-h200-4", "times-many-h200-4")
) -> str:
    """Rounds with skewed routing."""
    cells = []
    for name in some:
        found = load(name)
        times = [figure(found, tokens=4096, what="dispatch", payload=p) for p in ("bf16", "fp8")]
        times += [figure(found, tokens=4096, what="combine", variant=v) for v in ("y in the window", "y outside")]
        share = f"{found['case']['skew']:.0%} of the tokens want one rank" if found["case"]["skew"] else "even"
        cells.append(line(found, round_parts(4096), share, *times, window_in(found, 4096, "flat")))
    heads = "routing | dispatch, bf16 | dispatch, FP8 | combine, y in the window | combine, y outside"
    return "\n\n".join([table(heads + WINDOW, cells), *[by_law(*laws)] * (len(laws) == 2)])


def skew_of(some: list[str]) -> str:
    """Return the same of one machine."""
    return skew((*of_kind(some, "skew", "ht"),), (*of_kind(some, "zipf", "times-many"),))


def by_law(skewed: str, evenly: str) -> str:
    """Rounds whose experts are drawn by Zipf's law, beside even ones of another run."""
    zipf, even = load(skewed), load(evenly)
    keys = ("who", "tokens", "layout", "what", "payload", "variant", "sms_asked")
    lines = []
    for row in zipf["rows"]:
        alike = {key: row[key] for key in keys}
        other = next((one for one in even["rows"] if alike.items() <= one.items()), {})
        if row["who"] != "moecomm" or row["what"] == "pair" or not ("us" in row and "us" in other):
            continue
        what = ", ".join(filter(None, (row["what"], row["payload"], row["variant"])))
        us, even_us = row["us"]["p50"], other["us"]["p50"]
        cells = (f"`{row['layout']}`", what, time_of(even_us), time_of(us), f"{us / even_us:.2f}")
        cells = (*cells, window_in(zipf, row["tokens"], row["layout"]))
        lines.append(line(zipf, round_parts(row["tokens"], row["what"]), *cells, beside=even))
    heads = f"layout | operation | even routing | Zipf {zipf['case']['routing']['zipf']} | ratio{WINDOW}"
    return table(heads, lines)


def has_rows_by_rank(name: str) -> bool:
    """Return True if torch's layer with a row for each (token, rank) was measured in a result."""
    return any(row.get("variant") == BY_RANK for row in load(name)["rows"])


def torchs_forms(used: Iterable[str]) -> str:
    """Say which results have torch's faster form, with a row for each (token, rank), and which the first form alone."""
    kinds: dict[bool, list[str]] = {}
    for name in used:
        kinds.setdefault(has_rows_by_rank(name), []).append(f"`{name}`")
    words = {
        True: "torch's faster form, of a row for each (token, expert) and one for each (token, rank)",
        False: "torch's first form alone, which favors moecomm",
    }
    return "  ".join(f"{', '.join(names)}: {words[both]}." for both, names in kinds.items())


def layer_rows(name: str, sizes: Iterable[int] = ()) -> list[str]:
    """Return rows of the layers in one result of `moecomm bench moe`, for these numbers of tokens or for all."""
    found, lines = load(name), []
    rows = [row for row in found["rows"] if row["who"] == "moecomm" and row["what"] == "layer"]
    for tokens in sizes or dict.fromkeys(row["tokens"] for row in rows):
        apart, fused, fp8 = (next(r for r in rows if (r["tokens"], r["variant"]) == (tokens, way)) for way in WAYS)
        best = min(apart, fused, key=lambda row: row["us"]["p50"])
        ratios = [f"{best[key]:.2f}" if best.get(key) else "" for key in ("of_gemms", "of_torch")]
        window = window_of(found, apart, fused, fp8)
        *both, eight = (time_of(row["us"]["p50"]) for row in (apart, fused, fp8))
        called = (r for r in rows if (r["tokens"], r["variant"]) == (tokens, "default"))
        default = next((f"{time_of(r['us']['p50'])} ({time_of(r['sustained_us'])})" for r in called), "")
        cells = (where(found), best["model"], str(tokens), *both, default, *ratios, eight, window)
        lines.append(line(found, layer_parts(tokens), *cells, at=(1,)))
    return lines


_LAYER_HEADS = (
    "GPUs | model | tokens a rank | unfused | fused | default (sustained) | over GEMMs alone | torch's over it | "
    "fused, FP8 weights"
)


def expert_layers() -> str:
    """Complete layers on 4 ranks, and sustained layers."""
    four = table(_LAYER_HEADS + WINDOW, (row for name, sizes in LAYER_SIZES.items() for row in layer_rows(name, sizes)))
    return f"{four}\n\n{sustained(['at-work-h100-4', 'at-work-fp8-h100-4'])}"


def sustained(some: list[str]) -> str:
    """Layers without a pause, at the limit of power."""
    rows = []
    for name in some:
        found = load(name)
        for model in dict.fromkeys(row["model"] for row in found["rows"] if row["tokens"] == 8192):
            of_model = {r["what"]: r for r in found["rows"] if (r["model"], r["tokens"]) == (model, 8192)}
            turns = min((r for w, r in of_model.items() if w.startswith("turns")), key=lambda r: r["at_work_us"])
            ways = [of_model["GEMMs"], of_model["one after the other"], turns]
            cells = [time_of(r["at_work_us"]) for r in ways]
            power = f"{turns['mhz']} MHz, {turns['watts']} W"
            rows.append(line(found, layer_parts(8192), model, turns["dtype"], *cells, power, window_of(found, turns)))
    heads = "weights | GEMMs | one after the other | fused, best order | clock, power"
    return table(f"model, {where(load(some[0]))}, 8192 tokens | {heads}{WINDOW}", rows)


def expert_layers_of(some: list[str]) -> str:
    """Return the same of one machine, of all sizes."""
    layers = [name for name in some if name.startswith("moe-")]
    tables = [table(_LAYER_HEADS + WINDOW, (row for name in layers for row in layer_rows(name)))] * bool(layers)
    work, beside_others = of_kind(some, "at-work", "at-work-fp8"), of_kind(some, *layers_beside.KINDS)
    every_form = [layers_beside.every_form(beside_others)] * bool(beside_others)
    return "\n\n".join([*tables, *every_form, *([sustained(work)] if work else [])])


def backends() -> str:
    """Rounds through all backends, and put + signal."""
    ways = (
        ("domains-h200-4", 0),
        ("domains-h100-4", 0),
        ("domains-nvshmem-h200-2", 0),
        ("domains-nvshmem-h200-2", -1),
        ("nic-h200-4", 0),
        ("gin-domains-h200-2", 0),
    )
    rows = [_between_domains(name, load(name)["rows"][nth].get("through", "")) for name, nth in ways]
    rows += [row for name in ("backends-h100-4", "backends-domains-h100-4") for row in _by_backend(name)]
    return f"{table(_BACKEND_HEADS, rows)}\n\n{_put_and_signal('latency-backends-h100-4')}"


_BACKEND_HEADS = f"through | domains | dispatch of 128 tokens, bf16 | of 4096 | combine of 128 | of 4096{WINDOW}"
_DOMAIN_KINDS = ("domains", "four-domains", "domains-nvshmem", "nic", "four-domains-nic", "gin-domains")
_BACKEND_KINDS = ("backends", "backends-domains", "domain-counts")


def backends_of(some: list[str]) -> str:
    """Return the same of one machine."""
    rows = []
    for name in of_kind(some, *_DOMAIN_KINDS):
        ways = dict.fromkeys(row.get("through", "") for row in load(name)["rows"])
        rows += [_between_domains(name, through) for through in ways]
    rows += [row for name in of_kind(some, *_BACKEND_KINDS) for row in _by_backend(name)]
    tables = [table(_BACKEND_HEADS, rows)] * bool(rows)
    return "\n\n".join([*tables, *map(_put_and_signal, of_kind(some, "latency-backends"))])


def _between_domains(name: str, through: str) -> str:
    """Return the row of one backend between domains."""
    found = load(name)
    case, through = found["case"], through or found["backend"].split(",")[0]
    columns = ({"what": "dispatch", "payload": "bf16"}, {"what": "combine", "variant": "y in the window"})
    sms = 32 if 32 in case["sms"] else 0  # GIN's queues allow no more than 32
    cells = [
        figure(found, tokens=tokens, sms_asked=sms, through=through, **which)
        for which in columns
        for tokens in (128, 4096)
    ]
    nic = f", NIC of {case['nic']}" if case["nic"] else ""
    ranks, kind = case.get("domain_ranks") or found["rows"][0]["domain_ranks"], gpu(found)
    each = f"{ranks} {kind}" if ranks > 1 else f"one {kind[:-1]}"
    return line(
        found,
        (*DOMAINS, *THROUGH["emulated NIC" if nic else through.split("/")[0]]),
        f"`{through}`{nic}",
        f"{case['ranks'] // ranks}, {each} each, 32 SMs",
        *cells,
        window_of(found, *found.get("memory", found["rows"])),
    )


def _by_backend(name: str) -> list[str]:
    """Return a row for each backend and number of domains of a result that compares them."""
    found, rows = load(name), []
    for way in dict.fromkeys((row["backend"], row["through"], row["domain_ranks"]) for row in found["rows"]):
        backend, through, ranks = way
        of_way = {"layout": "flat", "through": through, "domain_ranks": ranks}
        cells = [
            figure(found, tokens=tokens, **of_way, **columns)
            for columns in ({"what": "dispatch", "payload": "bf16"}, {"what": "combine", "variant": "y in the window"})
            for tokens in (128, 4096)
        ]
        domains = found["case"]["ranks"] // (ranks or found["case"]["ranks"])
        parts = ROUNDS if domains == 1 else (*DOMAINS, *THROUGH[backend])
        machine = f"{domains}, {found['case']['ranks'] // domains} {gpu(found)}{' each' * (domains > 1)}"
        window = window_of(found, *(row for row in found["rows"] if of_way.items() <= row.items()))
        rows.append(line(found, parts, f"`{through}`", machine, *cells, window))
    return rows


def _put_and_signal(name: str) -> str:
    """Return the table of half round trips."""
    found, rows = load(name), []
    for size in (4, 4096, 65536, 4194304):
        cells = []
        for backend in ("lsa", "nvshmem", "gin"):
            of_backend = (r for r in found["rows"] if (r["backend"], r.get("bytes")) == (backend, size))
            cells.append(next((time_of(r["us"]["p50"]) for r in of_backend), ""))
        rows.append(line(found, ("put + signal", "gin", "nvshmem", "RMA plugin"), str(size), *cells))
    return table("put + signal, bytes | `lsa` | `nvshmem` | `gin`, proxy on one host", rows)


def concurrent() -> str:
    """A concurrent GEMM on the multiprocessors that 16 blocks leave free, and overlapped operators."""
    return f"{_beside_gemms(['beside-h200-4', 'beside-h200-2'])}\n\n{_operators([*OVERLAP_H200])}"


def concurrent_of(some: list[str]) -> str:
    """Return the same of one machine."""
    used = {make: of_kind(some, *kinds) for make, kinds in ((_beside_gemms, ("beside",)), (_operators, OVERLAP_KINDS))}
    return "\n\n".join(make(names) for make, names in used.items() if names)


OVERLAP_KINDS = tuple(f"overlap-{name}" for name in OPERATORS)


def _beside_gemms(some: list[str]) -> str:
    rows = []
    for name in some:
        found = load(name)
        cells = [
            f"{time_of(row['us']['p50'])}; {row['overlap']['kept']:.0%}, {row['overlap']['held']:.0%}"
            for row in found["rows"]
            if "kept" in row.get("overlap", {}) and row["payload"] != "bf16"
        ]
        cells.append(window_in(found, 4096, "flat"))
        rows.append(line(found, round_parts(4096), str(found["case"]["ranks"]), *cells))
    heads = f"{gpu(load(some[0]))} | dispatch, FP8 | combine, y in the window | combine, y outside{WINDOW}"
    return table(heads, rows)


def _operators(some: list[str]) -> str:
    """Return times of NCCL and torch over ours, for each operator."""
    ratios: dict[str, list[str]] = {"nccl": [], "torch": []}
    for name in some:
        of_cases: dict[tuple[str, str], dict[str, float]] = {}
        for row in load(name)["rows"]:
            if "us" in row:
                of_cases.setdefault((row["case"], row["dtype"]), {})[row["who"]] = row["us"]["p50"]
        for who, cells in ratios.items():
            of_kinds: dict[str, list[float]] = {}
            for (_, dtype), of in of_cases.items():
                if who in of:
                    of_kinds.setdefault("FP8: " if dtype == "fp8" else "", []).append(of[who] / of["moecomm"])
            cell = "; ".join(f"{kind}{min(over):.2f} to {max(over):.2f}" for kind, over in of_kinds.items())
            cells.append(with_mark(cell) if older(load(name), ("overlap",)) else cell)
    operators = (f"`{split(name)[0].removeprefix('overlap-').replace('-', '_')}`" for name in some)
    rows = [f"| {' | '.join((who, *cells))} |" for who, cells in ratios.items()]
    heads = " | ".join((f"{where(load(some[0]))}, time over that of our fused kernel", *operators))
    return table(heads, rows)


def peer_rows(gpus: int, tokens: int) -> list[str]:
    """Return rows of other libraries at one size: FP8 dispatches, or bf16 where there is no FP8."""
    times: dict[tuple[str, str], dict[tuple[str, str], str]] = {}
    for row in load(PEERS)["rows"]:
        if (row["gpus"], row["tokens"]) == (gpus, tokens):
            of_kernels = "-".join(f"{us:g}" for us in row["us"])
            epilogue = f" + {row['epilogue_us']:g}" if "epilogue_us" in row else ""
            times.setdefault((row["who"], row["layout"]), {})[row["what"], row["dtype"]] = f"{of_kernels}{epilogue} us"
    found = []
    for (who, layout), of_way in times.items():
        dispatch = of_way.get(("dispatch", "fp8")) or f"{of_way['dispatch', 'bf16']}, bf16"
        found.append(f"| {gpus} | {tokens} | {who}, {layout} | {dispatch} | {of_way['combine', 'bf16']} |")
    return found


def peers() -> str:
    """NCCL in the same run, DeepEP alone, the interface of deep_ep over our own calls, and torch's passes."""
    alone = table(
        "H200s | tokens a rank | library, layout | dispatch, FP8 | combine",
        (row for tokens in (128, 4096) for row in peer_rows(8, tokens)),
    )
    passes = load("passes-h100")
    own = [
        line(passes, ("passes",), r["what"], f"{r['us']:.1f} us", f"{r['torch_us']:.1f} us", at=(1,))
        for r in passes["rows"]
    ]
    first = [head_to_head.others("peers-h200-4"), beside_nccl("peers-h200-4"), alone, interface(DEEP_EP.split())]
    return "\n\n".join([*first, table("pass, one H100 | ours | torch operations", own)])


PEER_KINDS = ("peers", "peers-one", "peers-qwen3", "peers-qwen3-one", "formats-peers")
INTERFACE_KINDS = ("deep-ep-layer", "deep-ep-layer-eager")


def peers_of(some: list[str]) -> str:
    """Return the same of one machine, without what is alone."""
    found = [name for name in of_kind(some, *PEER_KINDS) if beside.has_peers(load(name))]
    parts = [_picture("time of other libraries over that of moecomm", name) for name in found]
    parts += map(head_to_head.shown, found)
    parts += map(beside_nccl, of_kind(found, "peers"))
    layers = of_kind(some, *INTERFACE_KINDS)
    return "\n\n".join([*parts, *[interface(layers)] * bool(layers)])


def beside_nccl(name: str) -> str:
    """Return rounds of ours and the same rows by NCCL's all_to_all_single."""
    found, rows = load(name), []
    for layout, variant in (("flat", "y in the window"), ("expert", "bf16 wire")):
        for tokens in (128, 4096):
            same = {"tokens": tokens, "layout": layout}
            cells = [
                figure(found, **same, what="dispatch", payload="bf16"),
                figure(found, **same, what="dispatch", payload="bf16", who="nccl"),
                figure(found, **same, what="combine", variant=variant),
                figure(found, **same, what="combine", who="nccl"),
            ]
            cells = [*(cell.partition(" (")[0] for cell in cells), window_in(found, tokens, layout)]
            rows.append(line(found, round_parts(tokens), f"`{layout}`, {variant}", str(tokens), *cells, at=(2, 4)))
    return table(f"layout | tokens a rank | dispatch, bf16 | NCCL | combine | NCCL{WINDOW}", rows)


def interface(some: list[str]) -> str:
    """Return what `moecomm.compat.deep_ep` adds to our own calls."""
    rows = []
    for name in some:
        found = load(name)
        ratios = sorted(row["of_native"] for row in found["rows"] if "us" in row)
        cells = [found["case"]["mode"], str(len(ratios)), f"{statistics.median(ratios):.3f}", f"{ratios[-1]:.3f}"]
        cells += _more_on_the_host(found["rows"])
        parts = (*ROUNDS, *CALLS, "deep_ep")
        rows.append(line(found, parts, where(found), *cells, window_of(found, *found["rows"])))
    heads = (
        "`moecomm.compat.deep_ep` over our own calls, GPUs | mode | operations | median ratio | largest"
        f" | added host time, median | with a clone of `topk_idx` | with a budget{WINDOW}"
    )
    return table(heads, rows)


def _more_on_the_host(rows: list[dict[str, Any]]) -> list[str]:
    """Medians of the host time of DeepEP's calls less ours: all calls, those that clone ids, those with budgets."""
    timed = [row for row in rows if row.get("host_more_us") is not None]
    if not timed:
        return ["-"] * 3
    of_budgets = [row for row in timed if row["what"] == "hybrid dispatch"]
    copying = [row for row in timed if row["what"] == "elastic dispatch" and "not copied" not in row["variant"]]
    return [f"{statistics.median(row['host_more_us'] for row in some):.0f} us" for some in (timed, copying, of_budgets)]


def verified() -> str:
    """Rounds of CPU ranks that are verified."""
    found, rows = load("verified-cpu"), []
    for row in found["rows"]:
        times = [f"{row[key]:.1f} ms" for key in ("ms_every_0", "ms_every_1", "ms_unverified_mean", "ms_every_100")]
        rows.append(line(found, ("host",), row["layout"], *times))
    return table("rounds that are verified | none | each | none, mean | one of 100, mean", rows)


def balance() -> str:
    """Plans of expert placement."""
    found, plans, changes = load("balance-cpu"), [], []
    for row in found["rows"]:
        what = f"{row['model']}, Zipf {row['zipf']:g}"
        for name, policy in (("eplb", "`eplb`"), ("spread", "`spread`"), ("nearest", "`spread` for nearest")):
            figures = row[name]
            cells = [f"{row['none']:.2f}", *(f"{figures[key]:.3f}" for key in ("even", "nearest", "crossing"))]
            plans.append(line(found, ("balance",), what, policy, *cells, f"{figures['ms']:.1f} ms"))
        within = [f"{budget['even']:.3f}" for budget in row["budgets"]]
        others = [f"{row[name][key]:{form}}" for name in ("renumbered", "anew") for key, form in _CHANGES.items()]
        most = max(budget["ms"] for budget in row["budgets"])
        changes.append(line(found, ("balance",), what, f"{row['kept']:.2f}", *within, *others, f"{most:.0f} ms"))
    heads = "model | policy | no replicas | even choice | nearest | rows to other nodes | time"
    copies = " | ".join(f"{budget['copies']} copies a layer" for budget in found["rows"][0]["budgets"])
    later = f"model, later | kept | {copies} | renumbered | copies a layer | `eplb` | copies a layer | longest time"
    return f"{table(heads, plans)}\n\n{table(later, changes)}"


def balanced_rounds() -> str:
    """Rows of ranks by the choice of replicas."""
    found, rows = load("balanced-rounds-cpu"), []
    choices = ("none", "token", "nearest", "balanced")
    for row in found["rows"]:
        figures = (f"{row[choice]['mean']:.3f}" for choice in choices)
        rows.append(line(found, (), row["favorites"], f"{row['zipf']:g}", str(row["slots"]), *figures))
    return table('favorites | Zipf | slots | no replicas | "token" | "nearest" | "balanced"', rows)


_CHANGES = {"even": ".3f", "made": ".0f"}


def cpu() -> str:
    """CPU ranks and gloo."""
    found, rows = load("host_vs_gloo"), []
    for what, way in (
        ("a row for each (token, rank)", "gloo_by_rank"),
        ("the same", "flat"),
        ("a row for each (token, expert)", "gloo_by_expert"),
        ("the same", "expert"),
        ("the same", "batched"),
    ):
        times = [f"{found['medians'][way][key]:.1f} ms" for key in ("dispatch_ms", "combine_ms", "both_ms")]
        ratio = f"{found['ratios'][way]:.1f}" if way in found["ratios"] else ""
        gloos = way.startswith("gloo")
        rows.append(line(found, () if gloos else ("host",), what, "gloo" if gloos else f"`{way}`", *times, ratio))
    return "\n\n".join((table("rows | by | dispatch | combine | both | gloo over it", rows), verified()))


_ERRORS = {"median": ".1%", "signed": "+.1%", "worst": "+.1%"}


def predicted() -> str:
    """The model against measurements, and its predictions for many domains."""
    found = load("simulate-check")["errors"]
    cells = [
        (error["kind"], str(error["rows"]), *(f"{error[key]:{form}}" for key, form in _ERRORS.items()))
        for error in found
        if not error["kind"].startswith(("one domain", "2 domains", "published:", "excluded:"))  # in the long table
    ]
    off = table("rows | number | median error | signed | worst", (f"| {' | '.join(row)} |" for row in cells))
    rows = []
    for row in load("simulate")["rows"]:
        if row["domains"] in (8, 128) and row["tokens"] > 1:
            rounds = [f"{time_of(row[what]['us'])} ({row[what]['bound']})" for what in ("dispatch", "combine")]
            layer = [time_of(row["layer"][part]) for part in ("serial_us", "overlapped_us")]
            rows.append(f"| {' | '.join([str(row['gpus']), str(row['tokens']), *rounds, *layer])} |")
    heads = "GPUs, 8 a domain | tokens a rank | dispatch | combine | layer | overlapped"
    return f"{off}\n\n{table(heads, rows)}"


TOPICS = (
    Topic(
        "Other libraries",
        "DeepSeek-V3 on 4 H200s.  NCCL, in the second table: the same rows by all_to_all_single.  DeepEP on 8 H200s: "
        "times of its kernels alone, in runs of its own; launches and gaps between kernels come on top.\n\n"
        "![Time of other libraries over that of moecomm, 4 H200s](../bench/results/peers-h200-4.svg)\n"
        "![the same on 2 H200s](../bench/results/peers-h200-2.svg)\n"
        "![the same on 2 H100s](../bench/results/peers-h100-2.svg)",
        f"peers-h200-4 peers-h200-2 peers-h100-2 {PEERS} {DEEP_EP} passes-h100",
        peers,
        " ".join((*PEER_KINDS, *INTERFACE_KINDS)),
        peers_of,
    ),
    Topic(
        "Whole operations by layout",
        "Many tokens, blocks as the table of `moecomm.gpu.tuning` says.  Rows of `expert` are summed before they "
        "travel, in the type of `wire`.  Caches flushed: the time of the flush is subtracted.  "
        "The picture is a sweep over tokens of `flat`.",
        (
            "times-many-h200-4 ht-h200-4 layouts-h200-4 qwen3-h200-4 cold-h100-4 cold-h200-2 rounds-h100-2 "
            "sweep-h200-4 all-to-all-h200-4"
        ),
        whole_operations,
        "times-many ht qwen3 cold sweep all-to-all",
        whole_operations_of,
    ),
    Topic(
        "Few tokens",
        "Rows go in packets, without waiting for counts.  `ll-h200-2` has `batched` as well; `ll-handles-h200-4` was "
        "measured after round headers had got the round of a handle, `eager-h200-2` has host times of eager calls.  "
        "The second table shows what agreement adds.  "
        "![Times of few tokens, in a graph, alone and eager](../bench/results/ll-h200-4.svg)",
        (
            "times-few-h100-4 times-few-h200-4 ll-h200-4 ll-h200-2 ll-handles-h200-4 "
            "rounds-h100-2 virtual-ranks-h200 eager-h200-2"
        ),
        few_tokens,
        "times-few ll eager",
        few_tokens_of,
    ),
    Topic(
        "FP8",
        "Grouped GEMMs of a rank's experts on an H100, DeepSeek-V3 on 4 ranks, first with SwiGLU, then back.  "
        "Dispatches that cast are in the tables of rounds.  The results of H200s are those that the choice of "
        "schedules is fitted to, and a run of `moecomm tune gemms`, in which the chosen ones take at most 1.04 "
        "times as long as the fastest.  `gemm-orders-h200` has both orders of tiles; it is of a program that is not "
        "kept.",
        (
            "gemm-fp8-h100 gemm-h100 gemm-fp8-h200 gemm-h200 gemm-fp8-rows-h200 gemm-fp8-schedules-h200 "
            "gemm-fp8-clusters-h200 gemm-fp8-every-deepseek-v3-h200 gemm-fp8-every-qwen3-235b-h200 gemm-orders-h200 "
            "gemm-tune-h200"
        ),
        fp8,
    ),
    Topic(
        "Grouped GEMMs beside deep_gemm",
        "One H200, the experts of one of 4 ranks, a model in one run.  glm: 5120 x 1536, 160 experts, top-8, as in "
        "GLM-4.5; v4-pro: 7168 x 3072, 384 experts, top-6, as in DeepSeek-V4-Pro.  In parentheses: over moecomm's "
        "time.  The first GEMM of others has no SwiGLU.",
        " ".join(gemm_peers()),
        gemms_beside,
    ),
    Topic(
        "Weights of few tokens",
        "Grouped GEMMs of a rank's experts on an H200, 4 ranks.  In parentheses: bytes a second, over those that "
        "torch's sum of a large tensor reads in the same run.",
        "gemm-few-h200",
        weights,
    ),
    Topic(
        "Packed MXFP4 weights",
        "One H200.  Rows are in FP8 beside FP8 and packed MXFP4 weights (`moecomm.fused.pack_mxfp4`), else in bf16.  "
        "Grouped GEMMs of one of 8 ranks.  Then layers on one rank, by default; MXFP4 beside bf16 is never fused.",
        f"gemm-packed-mxfp4-h200 {' '.join(f'moe-{model}-h200-1' for model in ONE_GPU_MODELS)}",
        four_bits,
    ),
    Topic(
        "Formats",
        "On 2 H200s, in a graph, 128 and 8192 tokens a rank.  `fp8_token` and `int8_token` are cast by a pass ahead of "
        "the dispatch, the other formats by the kernel that sends.  Then combines of `y` outside the window, with sums "
        "in the dtype of `y`, in FP8 and in INT8.  `formats-blocks-h200-4` has some of them on 4 H200s by the number "
        "of blocks, before sums in FP8 went through rings.",
        "formats-h200-2 formats-blocks-h200-4",
        payloads,
    ),
    Topic(
        "Accuracy",
        "A small language model over bytes, trained in float32, with three layers of 128 experts, reads text that was "
        "held out.  Rows of its layers travel over 4 ranks: in bfloat16, or cast to a "
        "format; sums return exact, in another wire, or, rounded by operations of torch, in formats that combine does "
        "not offer: `fp8_token` and `nvfp4`.  `loss`: nats a byte.  `divergence`: of the predicted bytes from those "
        "of the first row, nats (Kullback-Leibler).  `another byte`: share of the bytes of which another one is the "
        "most likely.",
        "accuracy",
        accuracy,
    ),
    Topic(
        "Few SMs",
        "4096 tokens a rank, `flat`, with so many blocks, a multiprocessor each.",
        "few-sms-h200-4 ht-h200-4",
        few_sms,
        "few-sms ht",
        few_sms_of,
        "few-sms",
    ),
    Topic(
        "Skew",
        "4096 tokens a rank on 4 H200s, in a graph.  First `flat`, with one rank that many tokens want.  Then experts "
        "are drawn by Zipf's law, and times of even routing are from another run; the ratio divides skewed by even, "
        "and includes the longer transfer to the busiest rank.",
        "skew-h200-4 ht-h200-4 zipf-h200-4 times-many-h200-4",
        skew,
        "skew ht zipf times-many",
        skew_of,
        "skew",
    ),
    Topic(
        "Balance",
        "Predicted load of the busiest rank over the mean, means over layers, of plans of [`moecomm.balance`]"
        "(balance.md): 58 layers of DeepSeek-V3 on 32 ranks of 4 nodes, 94 layers of "
        "Qwen3-235B on 16 ranks of 2; an eighth more slots than experts.  Loads are counts of 8192 tokens a layer that "
        "are drawn by Zipf's law.  `no replicas`: experts as a Buffer shares them.  Then tokens choose evenly among "
        "replicas, or a replica on their node.  Times are CPU time on one core.  Second table: a quarter of the tokens "
        "has other favorites.  `kept`: the plan of `spread` from before; then it is changed within budgets, made anew "
        "and renumbered, and made anew by `eplb`.",
        "balance-cpu",
        balance,
    ),
    Topic(
        "Balanced rounds",
        "Rows of the busiest rank over the mean, by the [choice](placement.md#which-replica) of replicas: "
        "64 CPU ranks, 256 experts, top-8, 512 tokens a rank, drawn by Zipf's law; means "
        "of four rounds.  Experts are placed by `spread`, for other tokens of the same law.  `changed`: half of the "
        "tokens have other favorites than those that the plan knew.",
        "balanced-rounds-cpu",
        balanced_rounds,
    ),
    Topic(
        "Placed experts",
        "2 H200s, DeepSeek-V3, bf16 (`python bench/placed_layers.py`).  Layers by their defaults, whole in a graph, "
        "with routing that is drawn by Zipf's law: experts in a row, and where a plan of that routing puts them in an "
        "eighth more slots; over the same layer with even routing.  `busiest`: rows of the busiest rank over the mean. "
        " Then dispatches of even routing, in a graph, without and with such a placement.",
        "placed-layers-h200-2",
        placed_experts,
        "placed-layers moving-weights",
        placed_experts_of,
    ),
    Topic(
        "Expert layers",
        "`buffer.moe`, bfloat16, in a captured graph.  Unfused: dispatch, experts and combine as separate launches.  "
        "Fused: rows travel while the GEMMs run.  Default: `fused=None`, which takes one of these forms; in "
        "parentheses, without a pause between layers, at the limit of power.  The first ratio divides the faster of "
        "the first two by our two grouped GEMMs alone, which are separate launches: a fused layer can take a little "
        "less.  The second divides "
        "torch's layer (all_to_all and grouped GEMMs, same run) by the faster of ours.  Windows have "
        "room for any routing; a Buffer takes [less](memory.md) by default.  No result of four GPUs has a fused layer "
        f"of another library (DeepGEMM's, FlashInfer's).  {torchs_forms(LAYER_SIZES)}  "
        "The second table: replays without a pause, at the limit of power.  `layers-h200-2` and `tune-layers-h200-2` "
        "have 2 ranks again, later; `one-launch-schedules-h200-4` is what the schedules of fused layers are fitted to; "
        "`moe-channels-h200-2` and `moe-mxfp4-h200-2` have layers with other weights.",
        (
            f"{' '.join(LAYER_SIZES)} "
            "moe-deepseek-v3-h200-4 moe-qwen3-235b-h200-4 moe-gpt-oss-120b-h200-2 moe-mixtral-8x7b-h200-2 "
            "moe-qwen3-235b-h200-2 "
            "at-work-h100-4 at-work-fp8-h100-4 at-work-h200-4 at-work-fp8-h200-4 "
            "layers-h200-2 tune-layers-h200-2 one-launch-schedules-h200-4 moe-channels-h200-2 moe-mxfp4-h200-2"
        ),
        expert_layers,
        " ".join(
            (
                *{split(name)[0]: 0 for name in LAYER_SIZES},
                *layers_beside.KINDS,
                "at-work",
                "at-work-fp8",
                "tune-layers",
            )
        ),
        expert_layers_of,
    ),
    Topic(
        "Backends and domains",
        "`flat` rows, `y` in the window.  No NIC was there: domains of 2 ranks (of 1: 2 GPUs) reach each other by "
        "puts over NVLink, NVSHMEM, or GIN's proxy with the RMA plugin.  Without a number of SMs: the default.  Put + "
        "signal: half a round trip between two H100s.  "
        "![Put + signal over bytes, by backend](../bench/results/latency-backends-h100-4.svg) "
        "![Rounds between two domains over tokens, by backend](../bench/results/backends-domains-h100-4.svg) "
        "![4096 tokens over the number of domains](../bench/results/domain-counts-h100-4.svg)",
        (
            "backends-h100-4 backends-domains-h100-4 backends-h200-4 backends-domains-h200-4 domains-h200-4 "
            "domains-h100-4 domains-h200-2 domains-h100-2 domain-counts-h100-4 domains-nvshmem-h200-2 nic-h100-4 "
            "nic-h200-4 nic-h200-2 nic-h100-2 gin-domains-h200-2 rings-h200-4 rings-h100-2 latency-backends-h100-4 "
            "latency-backends-h200-4"
        ),
        backends,
        " ".join((*_DOMAIN_KINDS, *_BACKEND_KINDS, "latency-backends")),
        backends_of,
    ),
    Topic(
        "Concurrent with a GEMM",
        "4096 tokens a rank, `flat`, 16 blocks: time alone; the share of its speed that a GEMM on another stream "
        "keeps, and the share it keeps beside 16 blocks that do nothing.  Then the operators of `moecomm.overlap`: "
        "more than 1 is slower than ours.  NCCL with cuBLAS (or torch's bags), torch's own fused operators; graphs.  "
        f"{study.OF_FP8}  "
        "[Overlapped operators](overlap.md) has those of two H100s, and [a "
        "study](maintainers/all_gather_matmul_study.md) seven more ways to one of them.  All "
        "sizes: ![time of fused operators, and over that with NCCL](../bench/results/overlap-h100-2.svg)",
        " ".join(("beside-h200-4", "beside-h200-2", *OVERLAP, *OVERLAP_H200, study.RESULT)),
        concurrent,
        " ".join(("beside", *OVERLAP_KINDS, "all-gather-study")),
        concurrent_of,
    ),
    Topic(
        "CPU ranks",
        "`y` lies in the window (`Buffer.empty`); gloo: all_to_all_single and the weighted sum, of rows as ours.  "
        "Verified: a dispatch and its combine of two ranks, 256 tokens each of Qwen3-30B-A3B; medians but for means.",
        "host_vs_gloo verified-cpu",
        cpu,
    ),
    Topic(
        "How far off the model is",
        "`moecomm simulate check`: predicted over measured, less one.  `held out`: each result by a fit to all other "
        "results, each library's published rows by a share of the NIC's rate fitted to the other libraries.  The rows "
        "below these three are the same ones by kind; the long table also has the kinds of measured rows.  Rows of "
        "kernels that are gone are excluded.  So are rows between domains without a NIC, except few tokens over "
        "NVLink.  `python bench/refit.py` repeats it all.  Below: predicted, not measured, for a NIC of 50 GB/s a "
        "GPU, with what most of the time goes to; [wide expert parallelism](maintainers/wide_ep.md) has more, and "
        "[a page](maintainers/dlrm.md) a training iteration of a recommendation model.",
        "simulate-check simulate wide-ep dlrm",
        predicted,
    ),
)
