"""docs/maintainers/dlrm.md: training a recommendation model on 2 to 128 nodes, beside a published prediction.

`bench/refit.py` writes the result and the page.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from moecomm_bench.simulate.dlrm.cluster import Cluster
from moecomm_bench.simulate.dlrm.gpu import parse
from moecomm_bench.simulate.dlrm.iteration import BOTH, FORMS, FUSED, TORCH, UNFUSED, iteration
from moecomm_bench.simulate.dlrm.predict import predict
from moecomm_bench.simulate.dlrm.shape import Dlrm
from moecomm_bench.simulate.dlrm.table import ITERATION, phases
from moecomm_bench.simulate.nic import ModelNic

ROOT = Path(__file__).parent.parent
RESULT, PAGE = ROOT / "bench" / "results" / "dlrm.json", ROOT / "docs" / "maintainers" / "dlrm.md"
NODES = [2, 4, 8, 16, 32, 64, 128]
# Punniyamurthy, Hamidouche, Beckmann: arXiv:2305.06942.  Savings: of an iteration on 128 simulated nodes, and of the
# operator between nodes: on average, and at most (version 1).
PAPER = {"iteration": 0.21, "operator": 0.31, "most": 0.58}
MI210_GBS, MI210_TFLOPS = 1600.0, 181.0  # AMD's figures
OLD_NIC_GBS = 25.0  # assumed
SMALL_BOTTOM, SMALL_TOP = (13, 512, 512, 512, 128), (512, 512, 512)
OVER_TORCH = "over torch's bags and NCCL"
POOLINGS, NICS = [1, 16, 32, 64, 100, 200], [12.5, 25.0, 50.0, 100.0, 200.0]


@dataclass(frozen=True)
class _Setting:
    """A model on 128 GPUs, what is fused, and what that is compared with."""

    model: Dlrm
    nic: ModelNic
    mi210: bool = False
    form: str = FUSED
    base: str = UNFUSED
    ranks: int = 1  # of a domain


def measure(fitted: dict[str, Any], nic: ModelNic) -> dict[str, Any]:
    """Return the content of the result: predictions, steps from MI210s to ours, single changes, a grid."""
    model = Dlrm()
    ours = _Setting(model, nic)
    small = replace(model, bottom=SMALL_BOTTOM, top=SMALL_TOP)
    old_nic = replace(nic, gbs=OLD_NIC_GBS)
    first = _Setting(small, old_nic, mi210=True, form=BOTH)
    forward = replace(first, form=FUSED)
    steps = [
        ("MI210s, NICs of 25 GB/s, ASTRA-Sim's MLPs; both all-to-alls fused", first),
        ("only the forward all-to-all is fused", forward),
        ("MLPs of the distributed DLRM", replace(forward, model=model)),
        ("H100s", replace(forward, model=model, mi210=False)),
        ("NICs of 50 GB/s: the prediction above", ours),
    ]
    changes = [
        ("ASTRA-Sim's MLPs", replace(ours, model=small)),
        (f"ASTRA-Sim's MLPs, {OVER_TORCH}", replace(ours, model=small, base=TORCH)),
        ("ASTRA-Sim's MLPs, both all-to-alls fused", replace(ours, model=small, form=BOTH)),
        (OVER_TORCH, replace(ours, base=TORCH)),
        ("both all-to-alls fused", replace(ours, form=BOTH)),
        ("64 lookups a bag", replace(ours, model=replace(model, pooling=64))),
        ("bf16", replace(ours, model=replace(model, dtype="bf16"))),
        ("MI210s", replace(ours, mi210=True)),
        ("NICs of 25 GB/s", replace(ours, nic=old_nic)),
        ("8 GPUs a domain", replace(ours, ranks=8)),
    ]
    return {
        **predict(model, parse(fitted), nic, NODES),
        "fit": fitted,
        "paper": PAPER,
        "steps": [_setting(fitted, *one) for one in steps],
        "changes": [_setting(fitted, *one) for one in changes],
        "grid": [
            {
                "pooling": pooling,
                "nic_gbs": gbs,
                **{form: one["saving"] for form, one in _grid(fitted, small, replace(nic, gbs=gbs), pooling)},
            }
            for pooling in POOLINGS
            for gbs in NICS
        ],
    }


def _grid(fitted: dict[str, Any], model: Dlrm, nic: ModelNic, pooling: int) -> Iterable[tuple[str, dict[str, Any]]]:
    setting = _Setting(replace(model, pooling=pooling), nic)
    for form, base in ((FUSED, UNFUSED), (BOTH, UNFUSED), (FUSED, TORCH)):
        name = f"{form} over torch" if base == TORCH else form
        yield name, _setting(fitted, "", replace(setting, form=form, base=base))


def _setting(fitted: dict[str, Any], name: str, setting: _Setting) -> dict[str, Any]:
    """Return the iteration of a setting: {name, us, fused_us, saving, share, operator_saving}.

    `share` is the part of the unfused iteration that the fused operators replace, and `operator_saving` the part of
    that which they save.
    """
    gpu = parse(fitted)
    if setting.mi210:
        gpu = gpu.scaled(MI210_GBS, MI210_TFLOPS)
    cluster = Cluster(gpu, setting.nic, NODES[-1] // setting.ranks, setting.ranks)
    base, fused = (iteration(setting.model, cluster, form) for form in (setting.base, setting.form))
    gone, made = ({one.name: one.us for one in timeline.phases} for timeline in (base, fused))
    replaced = sum(us for phase, us in gone.items() if phase not in made)
    by = sum(us for phase, us in made.items() if phase not in gone)
    return {
        "name": name,
        "case": asdict(setting.model),
        "us": round(base.us, 3),
        "fused_us": round(fused.us, 3),
        "saving": round(1 - fused.us / base.us, 4),
        "share": round(replaced / base.us, 4),
        "operator_saving": round(1 - by / replaced, 4),
    }


def page(found: dict[str, Any]) -> str:
    """Return the page of a result."""
    case, nic, last = found["case"], found["inputs"]["nic"], found["rows"][-1]
    ours = found["steps"][-1]
    (over,) = (one for one in found["changes"] if one["name"] == OVER_TORCH)
    us = dict(phases(last))
    paper = found["paper"]
    forward = [one[FUSED] for one in found["grid"]]
    torch = [one[f"{FUSED} over torch"] for one in found["grid"]]
    both = [one[BOTH] for one in found["grid"]]
    parts = [
        "# Training a recommendation model",
        HEAD.format(
            gpu=found["inputs"]["gpu"]["name"].removesuffix(" 80GB HBM3"),
            saving=last["saving"],
            torch=last["saving_over_torch"],
            paper=paper["iteration"],
            gbs=nic["gbs"],
            latency=nic["latency_us"],
            share=nic["efficiency"],
        ),
        "## An iteration",
        CASE.format(**case | {"bottom": _widths(case["bottom"]), "top": _widths(case["top"])}),
        _savings(found["rows"]),
        f"The phases on {last['gpus']} nodes, in microseconds. Phases on the GPU and on the network overlap, so that\n"
        "an iteration is shorter than their sum.",
        _phases(last),
        f"## Beside the paper's {paper['iteration']:.0%}",
        PAPER_TEXT.format(
            ours=ours["operator_saving"],
            theirs=paper["operator"],
            share=ours["share"],
            needed=paper["iteration"] / paper["operator"],
            reduce=us["all-reduce of MLP gradients"][UNFUSED],
            update=us["update of tables"][UNFUSED],
            iteration=us[ITERATION][UNFUSED],
            saved=us[ITERATION][UNFUSED] - us[ITERATION][FUSED],
            most=paper["most"],
            over=over["operator_saving"],
            torch=over["saving"],
        ),
        BOUND.format(best=max(forward), both=max(both), torch=max(torch)),
        "### From MI210s to H100s",
        STEPS,
        _settings(found["steps"]),
        _reading(found),
        "### One change at a time",
        "The prediction above, with one change each:",
        _settings(found["changes"]),
        "### Lookups and NICs",
        GRID,
        _grid_table(found["grid"]),
        "## Fit",
        FIT.format(left_out=found["fit"]["left_out"]),
        _fit_table(found["fit"]),
        "`held out`: each row by a fit without its case. `moecomm simulate dlrm --check` prints all rows.",
        "## Assumptions",
        "\n".join(f"- {one}" for one in [*found["assumptions"], *NOT_FOUND]),
        f"Source: `bench/results/{RESULT.name}` ({found['date']}, {found['commit']}), written with this page by "
        f"`{found['command']}`.",
    ]
    return "\n\n".join(parts) + "\n"


HEAD = """Predicted, not measured. `embedding_all_to_all` runs inside one NVLink domain; no kernel of
`moecomm.overlap` has run through a NIC. This page says what a model expects of it in a training iteration of a
recommendation model (DLRM) on 2 to 128 nodes of one GPU: **{saving:.1%} less time on 128 nodes**, where a
published simulation has {paper:.0%}.

- On a GPU and over NVLink: terms fitted to two {gpu}s.
- Between nodes: a NIC for each GPU, {gbs:g} GB/s, {latency:g} us, of which {share:.1%} is reached: the share that
  [wide expert parallelism](wide_ep.md) uses.
- Fused: lookups and their all-to-all in one kernel. Unfused: the same lookups in a kernel of their own, then NCCL.
- torch: a call of `embedding_bag` for each table, a copy, then NCCL. Fused saves {torch:.1%} of it on 128 nodes."""

CASE = """{tables} tables of {columns} columns in {dtype}, {pooling} lookups a bag, {samples} samples a rank;
bottom MLP {bottom}, top MLP {top} above {projection} projected features. Lookups, layers and projection are those
of the example of the [distributed DLRM](https://github.com/facebookresearch/dlrm/pull/127). Its 64 tables would
leave half of 128 GPUs without one, and its 2048 samples would be 16 a GPU, so tables are 128 and samples 1024 a
rank. Tables stay 128 at every size, so that a GPU looks up as much on 2 nodes as on 128.

```bash
moecomm simulate dlrm
moecomm simulate dlrm --domains 16 --ranks 8 --nic-gbs 100 --dtype bf16
```"""

PAPER_TEXT = """"Optimizing Distributed ML Communication with Fused Computation-Collective Operations"
([arXiv:2305.06942](https://arxiv.org/abs/2305.06942)) fuses the same two operators on AMD GPUs, and simulates an
iteration on 128 nodes with ASTRA-Sim.

**The operator is not the difference.** Here the fused kernel takes {ours:.0%} less than lookups and all-to-all
one after the other. The paper has {theirs:.0%} on average between nodes.

**Its share of an iteration is.** Here the two operators are {share:.0%} of the unfused iteration. A saving of 21%
by an operator that saves {theirs:.0%} needs a share of {needed:.0%}; in this chain, with its backward pass, the
share of the two stays below 50%. The rest of our {iteration:.0f} us goes mostly to the all-reduce of the MLPs'
gradients ({reduce:.0f} us), beside which the tables are updated ({update:.0f} us). Fusing saves {saved:.0f} us,
whatever follows.

**The unfused form counts, too.** Hiding can't save more than half of two operators, and the paper's first version
has up to {most:.0%}: its unfused form had further costs, or slower lookups. Ours has neither: it is the fused
kernel's own gather, then NCCL. Over torch's bags and NCCL the operator saves {over:.0%} here, and the iteration
{torch:.1%}."""

BOUND = """**A fused forward pass alone can't save as much in this chain.** Let lookups take G and an all-to-all W.
The forward pass takes G + W, and fusing hides at most the shorter of the two (and NCCL's fixed time). The backward
pass takes W for gradients and about 2 G for the update, which reads and writes each row. So the saving is at most
min(G, W) / (3 G + 2 W): 20%, at G = W, without any MLP. With the overlap that was measured, the best entry of the
grid below has {best:.1%}. Two things exceed 21% there: fusing both all-to-alls (up to {both:.0%}), and torch's bags
as the unfused form (up to {torch:.1%}). An update as short as the lookups, G, would move the limit to 25%."""

STEPS = """The first row is the nearest to the paper's setting that we could find. Each later row keeps the
changes before it. `share`: of the operators that are fused, in the unfused iteration. `operator`: what they save
of their own time.

- MI210: AMD's memory bandwidth and 16-bit arithmetic (1.6 TB/s, 181 TFLOP/s), of which the shares are reached that
  the H100s reach of theirs.
- NICs of 25 GB/s (200 Gb/s): assumed.
- ASTRA-Sim's MLPs: those of the [workload](https://github.com/astra-sim/astra-sim) `DLRM_HybridParallel` that comes
  with the simulator, read from its gradients' bytes as 16-bit: 13-512-512-512 below and 512-512-512 above. The
  last layer below has the columns of our tables.
- Both all-to-alls fused: the update of tables overlaps the arrival of gradients. moecomm has no such kernel."""

READING = """The paper's {paper:.0%} lies between the first two rows. The last row saves {all:.1f} points less than
the first: {backward:.1f} are the backward pass, and {mlps:.1f} the MLPs. GPUs and NICs together change
{machines:+.1f} points: memory and NICs are both about twice as fast, so that lookups and wire stay comparable."""

GRID = """ASTRA-Sim's MLPs, 128 nodes: saving with the forward all-to-all fused / with both / forward, over
torch's bags and NCCL. A bag of few lookups leaves nothing to hide the wire behind; a fast NIC leaves nothing to
hide."""

FIT = """Terms of each group, fitted to `bench/results/overlap-*-h100-2.json` (two H100s, NVLink, cases of 128
rows or more). `bags`: the fused kernel, by a fixed time, memory bandwidth, a time for each row, and the wire.
Memory and wire work at the same time, for the fourth root of the sum of the fourth powers of their times.
`torch_bags`: `embedding_bag`. `products`: cuBLAS; after `burst_us` of arithmetic a kernel goes on at the share
`sustained` of its speed, because the GPU is at its limit of power. `all_to_all`, `all_reduce`: what NCCL adds to
them, and torch's copy before an all-to-all. Not used: {left_out}."""

NOT_FOUND = (
    "Of the paper we know the GPUs (MI210), the simulator (ASTRA-Sim), 128 nodes of one GPU, and the savings. We could "
    "not find its model, batch, NICs, topology, or which passes it fuses. The rows of MI210s are not a reproduction.",
)


def _savings(rows: list[dict[str, Any]]) -> str:
    lines = [
        "| nodes | torch | unfused | fused | saving | saving over torch |",
        "| ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for row in rows:
        times = [f"{row['forms'][form]['us']:.0f} us" for form in FORMS[:3]]
        torch, unfused, fused = (row["forms"][form]["us"] for form in FORMS[:3])
        savings = [f"{1 - fused / us:.1%}" for us in (unfused, torch)]  # the row's own are rounded
        lines.append(f"| {' | '.join([str(row['gpus']), *times, *savings])} |")
    return "\n".join(lines)


def _phases(row: dict[str, Any]) -> str:
    lines = ["| phase | torch | unfused | fused |", "| --- | ---: | ---: | ---: |"]
    for name, us in phases(row):
        cells = [f"{us[form]:.0f}" if form in us else "" for form in FORMS[:3]]
        lines.append(f"| {' | '.join([name, *cells])} |")
    return "\n".join(lines)


def _settings(some: list[dict[str, Any]]) -> str:
    lines = [
        "| setting | unfused | fused | share | operator | saving |",
        "| --- | ---: | ---: | ---: | ---: | ---: |",
    ]
    for one in some:
        times = [f"{one[name]:.0f} us" for name in ("us", "fused_us")]
        parts = [f"{one[name]:.0%}" for name in ("share", "operator_saving")]
        saving = 1 - one["fused_us"] / one["us"]  # its own is rounded
        lines.append(f"| {' | '.join([one['name'], *times, *parts])} | {saving:.1%} |")
    return "\n".join(lines)


def _reading(found: dict[str, Any]) -> str:
    """Return the paper's figure between two of the steps, and the largest step."""
    steps, paper = found["steps"], found["paper"]["iteration"]
    (both, forward, example) = (steps[number]["saving"] for number in range(3))
    assert forward < paper < both
    moved = {
        "all": both - steps[-1]["saving"],
        "backward": both - forward,
        "mlps": forward - example,
        "machines": steps[-1]["saving"] - example,
    }
    return READING.format(paper=paper, **{name: 100 * part for name, part in moved.items()})


def _grid_table(some: list[dict[str, Any]]) -> str:
    lines = [
        "| lookups a bag | " + " | ".join(f"{gbs:g} GB/s" for gbs in NICS) + " |",
        "| ---: |" + " --- |" * len(NICS),
    ]
    for pooling in POOLINGS:
        cells = [
            " / ".join(f"{one[name]:.0%}" for name in (FUSED, BOTH, f"{FUSED} over torch"))
            for one in some
            if one["pooling"] == pooling
        ]
        lines.append(f"| {pooling} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _fit_table(fitted: dict[str, Any]) -> str:
    lines = [
        "| terms | fitted | rows | median error | worst | held out | worst |",
        "| --- | --- | ---: | ---: | ---: | ---: | ---: |",
    ]
    for one in fitted["errors"]:
        terms = ", ".join(f"{name} {value:.4g}" for name, value in fitted["terms"][one["terms"]].items())
        errors = [f"{one[kind][name]:.1%}" for kind in ("error", "held_out_error") for name in ("median", "worst")]
        lines.append(f"| `{one['terms']}` | {terms} | {one['rows']} | {' | '.join(errors)} |")
    return "\n".join(lines)


def _widths(widths: list[int]) -> str:
    return "-".join(map(str, widths))


if __name__ == "__main__":
    PAGE.write_text(page(json.loads(RESULT.read_text())))
