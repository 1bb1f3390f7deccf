"""docs/maintainers/wide_ep.md: predictions for 8 to 320 GPUs, and the times that other libraries have published.

`bench/refit.py` writes the result and the page.
"""

from __future__ import annotations

import json
import statistics
from dataclasses import replace
from pathlib import Path
from typing import Any

from moecomm.router import MODELS
from moecomm_bench.ours import IN_WINDOW
from moecomm_bench.simulate.domain import Domain, Operation
from moecomm_bench.simulate.model import Machine, Rows, cost
from moecomm_bench.simulate.nic import ModelNic
from moecomm_bench.simulate.predict import SimulatedCase, predict
from moecomm_bench.simulate.published import Published, against, rows
from moecomm_bench.simulate.routing import DrawnGate, spread
from moecomm_bench.simulate.rows import bytes_of, head_bytes, lines_of

ROOT = Path(__file__).parent.parent
RESULT, PAGE = ROOT / "bench" / "results" / "wide-ep.json", ROOT / "docs" / "maintainers" / "wide_ep.md"
DOMAINS, RANKS = [1, 2, 4, 8, 16, 32, 40], 8
TOKENS = {"decode": 128, "prefill": 4096}
ONE_DOMAIN = 64  # GPUs


def measure(domain: Domain, nic: ModelNic, fitted: dict[str, Any], checked: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the content of the result: predictions for domains of 8 and for one large domain, published rows, errors.

    The errors are those of few tokens between domains. `checked`: the measured rows of `moecomm simulate check`.
    """
    model = MODELS["deepseek-v3"]
    gate = DrawnGate(model.num_experts, model.topk, model.num_groups, model.topk_groups)
    sizes = (model.hidden, model.intermediate, gate)
    asked = SimulatedCase("deepseek-v3", *sizes, DOMAINS, RANKS, list(TOKENS.values()), layout="expert")
    machine = Machine(domain, nic)
    published = [
        {**row, "library": one.library, "moecomm_us": round(_ours(one, machine), 3)}
        for row, one in zip(against(domain, nic, fitted), rows(), strict=True)
    ]
    large = predict(replace(asked, domains=[1], ranks=ONE_DOMAIN), machine)["rows"]
    return {
        **predict(asked, machine),
        "one_domain": large,
        "published": published,
        "few_tokens": _few_tokens(asked, domain, checked),
    }


def _few_tokens(asked: SimulatedCase, domain: Domain, checked: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the errors of held-out rows of few tokens between domains, and the fitted steps of `asked`."""
    several = [row for row in checked if row["domains"] > 1 and row["tokens"] <= TOKENS["decode"]]
    counted = [row for row in several if "held_out_error" in row]
    errors = [row["held_out_error"] for row in counted]
    return {
        "start_us": [domain.direct_line(operation).start_us for operation in asked.operations],
        "rows": len(errors),
        "ranks": max(row["domains"] * row["ranks"] for row in counted),
        "domains": max(row["domains"] for row in counted),
        "median": round(statistics.median(map(abs, errors)), 4),
        "signed": round(statistics.median(errors), 4),
        "worst": max(errors, key=abs),
    }


def _ours(row: Published, machine: Machine) -> float:
    """Return the time that the model gives moecomm for the sizes of a published row, on H200s and 400 Gb/s."""
    operation = Operation(row.what, "flat", IN_WINDOW if row.what == "combine" else "")
    gate = DrawnGate(row.experts, row.topk, row.groups, row.topk_groups)
    dispatches = row.what == "dispatch"
    head = head_bytes(row.topk, row.ranks) if dispatches else 0
    joined = not dispatches or row.payload == "bf16"
    lines = lines_of(operation, row.payload, row.hidden, row.topk)
    own = Rows(bytes_of(operation, row.payload, row.hidden), lines, head_bytes=head, joined=joined)
    routed = spread(gate, row.domains, row.ranks)
    return cost(operation, routed, row.tokens, own, machine, most_direct=128).us


def page(found: dict[str, Any]) -> str:
    """Return the page of a result."""
    nic = found["inputs"]["nic"]
    return (
        "\n\n".join(
            [
                "# Wide expert parallelism",
                HEAD.format(
                    share=nic["efficiency"],
                    gbs=nic["gbs"],
                    latency=nic["latency_us"],
                    domain=found["inputs"]["domain"],
                ),
                "## DeepSeek-V3 on 8 to 320 GPUs",
                ROUTING.format(routing=found["inputs"]["routing"]),
                _predictions(found),
                FEW.format(late=RANKS + 2, **found["few_tokens"]) + "\n" + READING,
                "## Beside published times",
                PUBLISHED,
                _published(found["published"]),
                _not_counted(found["published"]),
                f"Source: `bench/results/{RESULT.name}` ({found['date']}, {found['commit']}), written with this page "
                f"by `{found['command']}`. The errors on measured rows are in [Measurements](../measurements.md).",
            ]
        )
        + "\n"
    )


HEAD = """Predicted, not measured. No moecomm kernel has run through a NIC, and a Buffer opens on at most 64 GPUs today.
This page says what the [model](../performance.md#predictions) expects of today's protocol at larger sizes, and how
far the model is from times that other libraries have published.

- Inside a domain: terms fitted to {domain}s, 8 of them or fewer.
- Between domains: a NIC for each GPU, {gbs:g} GB/s (400 Gb/s), {latency:g} us from a put to its signal.
- Rows reach {share:.1%} of that line rate. This one number stands for headers, congestion, incast and slow
  ranks. It is fitted to those published times below whose GPUs post to ConnectX-7, so that their median signed
  error is 0. No measurement of moecomm is in it.
- The NIC that receives most counts. With few tokens, random routing gives the busiest of many NICs clearly more
  rows than the mean."""

ROUTING = """Routing: {routing}. Layout `expert`;
the dispatch takes bf16 and sends FP8 with scales; combine sends bf16. 8
GPUs a domain, but for the row "64, one domain". Decode: 128 tokens a rank, which go direct between domains.
Prefill: 4096 tokens a rank, through forwarders. In parentheses: what takes most of the time."""

FEW = """- **Decode between domains**: without rows and latencies, a round of few tokens takes {start_us[0]:.0f} us in a
  dispatch and {start_us[1]:.0f} us in a combine. These terms are fitted to {ranks} H200s, and to {ranks} H100s, in
  {domains} domains, over NVLink and over an emulated NIC. {rows} measured rows of 128 tokens, each predicted by a fit
  to all other results, have a median error of {median:.1%} ({signed:+.1%} signed); the worst is {worst:+.1%}. More
  domains are extrapolated: the work of blocks grows with the rows of a token. A combine takes a second latency from 3
  domains on, and a dispatch from {late} domains on, because rows then leave after the headers of other ranks have
  come. No such round was measured."""

READING = """- **More than 64 GPUs**: a Buffer does not open. Ranks send each other counts by expert and by
  rank, so these messages grow with both. The time to read them was measured up to 64 virtual ranks on one GPU, with
  two blocks each, and is extrapolated in proportion to the words (in proportion to the ranks it would be half at
  320). Beyond 16 ranks blocks [share](measured_checks.md#work-of-a-block-by-number-of-ranks) that work, and a round
  has more than two, so the table has too much of it, most of all in a decode dispatch.
- **320 GPUs**: there are more ranks than experts. One expert a rank, so 64 of the 256 experts have a second
  copy, spread evenly over the domains; a token takes either. DeepSeek gives the 64 GPUs to hot and shared
  experts. Here all experts are equally likely, so copies do not unload the ranks whose expert has none.
- **64, one domain**: NVLink as between 8 H200s, not that of an NVL72. It says what one domain saves, not what
  that machine does."""

PUBLISHED = """Published times are of the sizes and the routing of their tests, mostly without groups, so they are not
comparable with the table above. "Model": the same rows (bytes, copies for each expert where the library sends
them), without headers of ours, by the share of the line rate that was fitted to the *other* libraries.
UCCL-EP's CPU threads post its messages over EFA; its low-latency kernels have a message rate besides, fitted to
its *other* machine. "moecomm": the prediction for the same sizes and routing on H200s with 400 Gb/s NICs, in
`flat`; within a domain it sends a row for each (token, rank), where these low-latency kernels send one for each
(token, expert)."""


def _predictions(found: dict[str, Any]) -> str:
    lines = [
        "| GPUs | tokens a rank | mean ranks per token | dispatch | combine |",
        "| ---: | ---: | ---: | ---: | ---: |",
    ]
    large = [{**row, "name": f"{row['gpus']}, one domain"} for row in found["one_domain"]]
    for phase, tokens in TOKENS.items():
        for row in [*found["rows"], *large]:
            if row["tokens"] == tokens:
                times = [f"{row[what]['us']:.0f} us ({row[what]['bound']})" for what in ("dispatch", "combine")]
                name = row.get("name", str(row["gpus"]))
                lines.append(f"| {name} | {tokens}, {phase} | {row['ranks_wanted']:.2f} | {times[0]} | {times[1]} |")
    return "\n".join(lines)


def _published(some: list[dict[str, Any]]) -> str:
    lines = [
        "| library | kernels | GPUs | tokens | operation | published | model | error | moecomm |",
        "| --- | --- | ---: | ---: | --- | ---: | ---: | ---: | ---: |",
    ]
    for row in some:
        algorithm = "low latency" if row["kind"].endswith("LL") else "throughput"
        what = " ".join(filter(None, (row["what"], row["payload"])))
        mark = " ‡" if row["not_counted"] else ""
        where = f"{row['library']}, {row['by_cpu']}" if row["by_cpu"] else row["library"]
        cells = [where, algorithm, str(row["domains"] * row["ranks"]), str(row["tokens"]), what]
        times = [f"{row[key]:.0f} us" for key in ("measured_us", "predicted_us")]
        cells += [*times, f"{row['error']:+.0%}{mark}", f"{row['moecomm_us']:.0f} us"]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _not_counted(some: list[dict[str, Any]]) -> str:
    reasons = dict.fromkeys(row["not_counted"] for row in some if row["not_counted"])
    sources = dict.fromkeys("; ".join(filter(None, (row["source"], row["note"]))) for row in some)
    marks = [f"‡: not counted; {reason}." for reason in reasons]
    listed = [f"- {one}." for one in sources]
    return "\n".join([*marks, "", "Where a bandwidth is published, the time follows from its definition:", "", *listed])


if __name__ == "__main__":
    PAGE.write_text(page(json.loads(RESULT.read_text())))
