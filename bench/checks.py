"""Topics of docs/maintainers/measured_checks.md: runs against a reference, and the time that checks take."""

from __future__ import annotations

from typing import Any

from tables import CALLS, DOMAINS, LAYER, ROUNDS, Topic, line, load, names, round_parts, table

GPU_TESTS = "gpu-tests"  # the result of tests/gpu/passed.py


def checks() -> str:
    """One rank without and with the checks."""
    found, rows = load("checks-h200"), []
    for tokens in (1, 128):
        for layout in ("expert", "flat"):
            cells = []
            for what in ("dispatch", "dispatch and combine"):
                row = next(r for r in found["rows"] if (r["tokens"], r["layout"], r["what"]) == (tokens, layout, what))
                cells.append(f"{row['us_before']:.1f}, {row['us']:.1f} us ({row['us'] / row['us_before']:.2f})")
            rows.append(line(found, round_parts(tokens), str(tokens), f"`{layout}`", *cells))
    return table("tokens | layout | dispatch: before, with checks | dispatch and combine", rows)


def recorder(name: str = "recorder-host-time-h100-4") -> str:
    """Return the table of rounds with the flight recorder and without."""
    found, rows = load(name), []
    for row in found["rows"]:
        cells = [f"{row[us][part]:.1f} us" for us in ("us", "us_off") for part in ("p50", "p99")]
        rows.append(line(found, CALLS, str(row["tokens"]), *cells, f"{row['a_call_us']:.1f} us"))
    return table("tokens | recorded, p50 | p99 | without, p50 | p99 | a call takes more", rows)


def counters(name: str = "counters-h100-4") -> str:
    """Return the table of pairs with counters, without, and of Buffers that mask ranks."""
    found, rows = load(name), []
    for row in found["rows"]:
        cells = [f"{row[which]['p50']:.1f} us" for which in ("off", "on", "mask")]
        ratios = (f"{row[one]:.3f}" for one in ("on_by_off", "again_by_on", "mask_by_on"))
        parts = round_parts(row["tokens"])
        rows.append(line(found, parts, str(row["tokens"]), f"`{row['layout']}`", *cells, *ratios))
    heads = "without counters | with | and a table of experts | with / without | with / with | table / with"
    return table(f"tokens | layout | {heads}", rows)


def instructions() -> str:
    """Basic blocks of a round of one token, by number of ranks."""
    found, rows = load("instructions-cpu"), []
    ranks = sorted({row["ranks"] for row in found["rows"]})
    for layout in ("flat", "expert"):
        for what in ("dispatch", "combine"):
            same = [r for r in found["rows"] if (r["layout"], r["what"], r["blocks"]) == (layout, what, 32)]
            by_ranks = {row["ranks"]: row for row in same}
            cells = [f"{by_ranks[n]['of_a_thread']:,}; {by_ranks[n]['of_a_block'] / 1e3:.0f}" for n in ranks]
            rows.append(line(found, round_parts(1, what), f"{what}, `{layout}`", *cells))
    return table(f"thread; block, thousands | {' | '.join(f'{n} ranks' for n in ranks)}", rows)


# Parts and what is counted, by result.
_COUNTED: dict[str, tuple[tuple[str, ...], str]] = {
    "random-cases-h200-4": ((*ROUNDS, *DOMAINS, "gin", "nvshmem"), "random_cases"),
    "random-cases-h200-2": ((*ROUNDS, *DOMAINS, "gin", "nvshmem", "RMA plugin"), "random_cases"),
    "random-cases-uneven-h200-2": ((*ROUNDS, *DOMAINS, "gin", "nvshmem", "RMA plugin"), "random_cases"),
    "random-layers-h200-4": (LAYER, "random_layers"),
    "random-layers-h200-2": (LAYER, "random_layers"),
    "random-rounds-cpu": (("host",), "random_cases"),
    "random-rounds-tsan-cpu": (("host",), "random_cases"),
    "random-cases-cpu": (("host",), "random_cases"),
    "random-arguments-cpu": (("host",), "random_cases"),
    "kill-plans-cpu": (("host",), "kills"),
    "kill-plans-counted-h100": (ROUNDS, "kills"),
    "kill-plans-gpus-h200-4": (ROUNDS, "kills"),
    "kill-plans-gpus-h200-8": (ROUNDS, "kills"),
    "kill-plans-gpus-h100-2": (ROUNDS, "kills"),
    "kill-plans-gpus-h100": (ROUNDS, "kills"),
    "kill-plans-h100-4": (ROUNDS, "kills"),
    "kill-plans-h100-2": (ROUNDS, "kills"),
    "soak-cpu": (("host",), "rounds"),
    "repeated-failures-cpu": (("host",), "repeats"),
    "flips-cpu": (("host",), "flips"),
    "post-mortem-cpu": (("host",), "faults"),
    "random-operators-cpu": (("host", "overlap"), "random_cases"),
    "megatron-training-cpu": (("host",), "steps"),
    "megatron-training-h200-2": (ROUNDS, "steps"),
    "torchtitan-training-cpu": (("host",), "steps"),
    "torchtitan-training-h200-2": (ROUNDS, "steps"),
    "transformers-generation-h200": (ROUNDS, "tokens"),
    "sglang-dispatchers-h200": (ROUNDS, "cases"),
}


def correctness(counted: dict[str, tuple[tuple[str, ...], str]] = _COUNTED) -> str:
    """Random cases against the reference, and ranks that were killed."""
    rows = []
    for name, (parts, number) in counted.items():
        found = load(name)
        kinds = list(dict.fromkeys(r.get("kind") or r.get("dtype", "domains of CPU ranks") for r in found["rows"]))
        total = sum(row[number] for row in found["rows"])
        cells = [number.replace("_", " "), f"{total:,}", "; ".join(kinds)]
        rows.append(line(found, parts, f"`{name}`", *cells))
    return table("result | what | number, none failed | kinds", rows)


def correctness_of(some: list[str]) -> str:
    """Return the kills of one machine."""
    return correctness(dict.fromkeys(some, (ROUNDS, "kills")))


def quantized_training() -> str:
    """Losses of runs whose rows travel in formats."""
    found, rows = load("quantized-training-cpu"), []
    plain = found["rows"][0]["losses"][-1]
    for row in found["rows"]:
        shown = [row["losses"][at] for at in (0, 4, 9)]
        cells = [row["forward"], row["backward"], "others" if row["sequences"] else "the same"]
        cells += [f"{loss:.3f}" for loss in shown]
        rows.append(line(found, ("host",), *cells, f"{shown[-1] - plain:+.4f}"))
    heads = "steps 1 to 20 | 81 to 100 | 181 to 200 | over bf16"
    return table(f"tokens travel in | gradients of results in | sequences | {heads}", rows)


_SERVED = {
    "ll": "moecomm, `deepep_low_latency`",
    "ht": "moecomm, `deepep_high_throughput`",
    "vllm": "vLLM, `allgather_reducescatter`",
}


def _of_vllm() -> list[str]:
    """Return results of ranks that share a GPU.  Their times say nothing, and none is shown."""
    return [name for name in names() if name.startswith("vllm-") and load(name)["shared_gpus"]]


def served() -> str:
    """Return the table of tokens that vLLM serves over each backend, beside those of one rank."""
    rows = []
    for name in _of_vllm():
        found = load(name)
        for row in found["rows"][1:]:
            graphs = "no" if row["graphs"] == "NONE" else "yes"
            cells = [row["model"], row["dtype"], str(row["layers"]), _SERVED[row["backend"]], graphs]
            of = [f"{row['same']} of {row['tokens']}", f"{row['logprob_difference']:.6f}".rstrip("0")]
            at = () if row["backend"] == "vllm" else (0,)
            rows.append(line(found, ROUNDS, *cells, *of, at=at))
    heads = "same tokens | log probabilities apart"
    return table(f"model | dtype | layers | over | graphs | {heads}", rows)


def sglang() -> str:
    """Return the table of what SGLang's model runner computes over moecomm."""
    found, rows = load("sglang-model-h200"), []
    for row in found["rows"][1:]:
        cells = [", ".join(f"{count} `{call}`" for call, count in row["calls"].items())]
        cells += [f"{100 * row['expert_error']:.2f} %" if "expert_error" in row else ""]
        cells += [f"{row['same']} of {row['steps']}", f"{100 * row['logit_error']['p50']:.2f} %"]
        rows.append(line(found, ROUNDS, f"`{row['run']}`", *cells))
    return table("run | calls of `deep_ep` | experts apart | same tokens | logits apart", rows)


# Other work on the GPUs and cores of the timed ranks, for each row of a result.
_SHARED = {
    "kill-plans-h100-4": ("3 survivors, 4 GPUs to themselves",),
    "kill-plans-h100-2": ("one survivor, GPUs to itself",),
    "kill-plans-gpus-h100-2": ("one survivor, beside processes that start",),
    "kill-plans-gpus-h100": (
        "2 plans on one GPU, `CUDA_DEVICE_MAX_CONNECTIONS=32`",
        "4 plans on one GPU",
        *["8 plans on one GPU"] * 3,
    ),
    "kill-plans-counted-h100": ("2 plans on one GPU",),
    "kill-plans-gpus-h200-4": ("3 plans on 4 GPUs",),
    "kill-plans-gpus-h200-8": ("4 plans on 8 GPUs",),
    "kill-plans-cpu": ("one plan on 2 cores",),
}
_STEPS = ("noticed", "mask", "first_round_after_mask", "shrink", "first_round_after_shrink", "grow", "join")


def after_kills(conditions: dict[str, tuple[str, ...]] = _SHARED) -> str:
    """Times until ranks notice a loss and go on, by what shares their GPUs and cores."""
    rows = []
    for name, shared in conditions.items():
        found = load(name)
        for row, beside in zip(found["rows"], shared, strict=True):
            times = [row.get(f"{step}_ms") for step in _STEPS]
            cells = ["" if ms is None else f"{ms['p50']:,.0f}; {ms['p99']:,.0f}" for ms in times]
            parts = ("membership", *(("host",) if name.endswith("cpu") else ROUNDS))
            rows.append(line(found, parts, f"`{name}`", beside, *cells))
    heads = "noticed | `mask()` | first round | `shrink()` | first round | `grow()` | joined"
    return table(f"result | conditions | {heads}", rows)


def after_kills_of(some: list[str]) -> str:
    """Return the same of one machine."""
    return after_kills({name: (_conditions(load(name)),) for name in some})


def _conditions(found: dict[str, Any]) -> str:
    """Return what shares the GPUs, of a result of tests.kill_plans or tests.gpu.kills."""
    gpus, words = len(found["machine"]["gpus"]), found["command"].split()
    if "--jobs" not in words:
        return f"{gpus - 1} survivors, {gpus} GPUs to themselves"
    plans, ranks = (words[words.index(option) + 1] for option in ("--jobs", "--most-ranks"))
    return f"{plans} plans of at most {ranks} ranks on {gpus} GPUs"


KILL_KINDS = "kill-plans kill-plans-all-gpus"


def gpu_tests() -> str:
    """Which steps of tests/gpu/run passed when, and which failed since."""
    last: dict[tuple[str, str], dict[str, dict[str, Any]]] = {}
    for row in load(GPU_TESTS)["rows"]:
        of = last.setdefault((row["step"], row["on"]), {})
        of.pop(row["outcome"], None)
        of[row["outcome"]] = row  # the latest is the last
    rows = []
    for (step, on), of in sorted(last.items()):
        passed, outcome = of.get("passed"), next(reversed(of))
        when = [f"{passed['date']}", f"`{passed['commit']}`", str(passed["tests"] or "")] if passed else [""] * 3
        since = "" if outcome == "passed" else f"{outcome}, {of[outcome]['date']}, `{of[outcome]['commit']}`"
        rows.append(f"| {' | '.join((f'`{step}`', on, *when, since))} |")
    return table("step | on | passed | at | tests | since", rows)


# Without a kept run there is no table.
_GPU_TESTS = (
    Topic(
        "GPU tests",
        "Steps of `tests/gpu/run` ([testing](testing.md#on-gpus)): when each passed last, at which commit, on what, "
        "and what became of it since.  Written by the runner.",
        GPU_TESTS,
        gpu_tests,
    ),
)
TOPICS = (
    *(_GPU_TESTS if GPU_TESTS in names() else ()),
    Topic(
        "What checks take",
        "One rank alone, so without links: before kernels knew of failed calls, seals of handles, tags that wrap and "
        "ids that change, and with all of that.",
        "checks-h200",
        checks,
    ),
    Topic(
        "What the flight recorder takes",
        "Host time of an eager dispatch and its combine on 4 H100s, DeepSeek-V3, `flat`, over the rounds of all ranks; "
        "rounds with and without the recorder alternate.  The last column is what the recorder adds to a "
        "call: half of the median difference.",
        "recorder-host-time-h100-4",
        recorder,
        "recorder-host-time",
        lambda some: recorder(*some),
    ),
    Topic(
        "What the counters take",
        "A dispatch and its combine in a captured graph on 4 H100s, DeepSeek-V3, bf16, y in the window, medians.  "
        "Kernels without counters are of the same sources, with all taken out that counts.  The last Buffer is opened "
        'with `on_timeout="mask"`, and looks each routing up in a table of experts, by a kernel of its own.  '
        "Windows have 4 GiB.  They alternate in one run; with / with: two Buffers with the same kernels, so "
        "this is noise.",
        "counters-h100-4",
        counters,
        "counters",
        lambda some: counters(*some),
    ),
    Topic(
        "Work of a block, by number of ranks",
        "Basic blocks of code that the busiest thread runs, and all threads of a block, in a round of one token a rank "
        "with 256 experts and 32 blocks a rank: emulated kernels, without polls in vain.  Ranks tell each other counts "
        "by expert and by rank: up to 16 ranks every block reads all of them, beyond its share and the sums of the "
        "others'.",
        "instructions-cpu",
        instructions,
    ),
    Topic(
        "Correctness runs",
        "Rounds of every layout, payload and option that a seed draws, against the reference; layers also bit for bit "
        "against their parts one after the other.  Killed ranks: the others shrink, and new ones join; all ranks make "
        "exact rounds.  Wrong arguments end in a named error.  Trained steps have the losses of Megatron's own "
        "dispatcher to the bit.  "
        "In `kill-plans-gpus-h200-4` and `-8` three and four plans at a time share the GPUs, "
        "in `kill-plans-gpus-h100` two to eight share one, in `kill-plans-counted-h100` two.",
        " ".join(_COUNTED),
        correctness,
        KILL_KINDS,
        correctness_of,
    ),
    Topic(
        "Losses of rows that travel in formats",
        "A language model over bytes with 3 layers of 128 experts, trained for 200 steps on 2 CPU ranks "
        "(`bench/quantized_training.py`): nats a byte, means of 20 steps.  Tokens are cast by `quantize=` of the "
        "dispatch, gradients of the experts' results by `grad_wire=` of the combine.  All runs start from the same "
        "weights; the last has other sequences, so its difference is one that needs no cast.",
        "quantized-training-cpu",
        quantized_training,
    ),
    Topic(
        "Tokens of models that vLLM serves",
        "Two ranks, data and expert parallel, that share one H200, beside one rank without expert parallelism: the "
        "likeliest tokens of the same prompts (`bench/vllm_tokens.py`), those up to the first difference of each "
        "prompt.  Models have random weights, those of DeepSeek-V3 in FP8 with scales of blocks, of gpt-oss-120b in "
        "MXFP4.  In float32 all are the same.  In other formats each backend rounds sums "
        "in other places, vLLM's own too, so a token changes where two are about as likely.",
        " ".join(_of_vllm()),
        served,
    ),
    Topic(
        "Experts of a model that SGLang runs",
        "A small Qwen3-MoE of random bfloat16 weights in SGLang's model runner, two ranks that share one H200, tensor "
        "and expert parallel (`bench/sglang_tokens.py`).  `auto` decodes in low latency, `graphs` in CUDA graphs, "
        "whose calls are those of the capture.  Experts: the largest difference of a row from a sum over the "
        "checkpoint's experts in float32.  Tokens and logits (those of the median step): beside "
        "`--moe-a2a-backend none`, fed the same tokens; bfloat16 rounds in other places there.",
        "sglang-model-h200",
        sglang,
    ),
    Topic(
        "How soon ranks go on after a kill",
        "Milliseconds, p50; p99.  Noticed: from the kill to `PeerLost` on a survivor.  First round: the one after "
        "`mask()` or `shrink()`.  Joined: opening of a Buffer by a rank that takes a lost one's place, counted "
        "from the last that joins; in `kill-plans-gpus-h200-4` and `-8`, which are older, from the first.  A plan "
        "has at most 4 ranks on GPUs, and 6 on CPUs.  `kill-plans-h100-4` has several survivors, GPUs to "
        "themselves, and NVLink.  In `kill-plans-h100-2` and `kill-plans-gpus-h100-2` one rank is left, so it "
        "agrees with nobody and maps no peer.  Plans that share GPUs also share the cores of the host and its "
        "driver, which makes CUDA contexts one after the other.  Those runs show that ranks agree and that rounds "
        "are exact; their times are not those of a job that has its GPUs alone.  Ranks notice the end of a "
        "process when the driver has freed its memory, which takes longest with "
        "`CUDA_DEVICE_MAX_CONNECTIONS=32`.  A first round after `shrink()` took seconds in one of six cases of "
        "`kill-plans-h100-2`: it compiled the kernels for one rank, which `tests.gpu.kills` now compiles before "
        "the kill.",
        " ".join(_SHARED),
        after_kills,
        KILL_KINDS,
        after_kills_of,
    ),
)
