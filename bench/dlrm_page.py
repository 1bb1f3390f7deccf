"""docs/maintainers/dlrm.md: training a recommendation model on 2 to 128 nodes, beside a published prediction.

`bench/refit.py` fits the model to measured operators, and writes the result and the page.
"""

from __future__ import annotations

import re
import statistics
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from math import ceil, log2
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from moecomm_bench import result_file
from moecomm_bench.simulate.nic import ModelNic
from moecomm_bench.simulate.routing import Array
from moecomm_bench.simulate.solve import solve

ROOT = Path(__file__).parent.parent
RESULT, PAGE = ROOT / "bench" / "results" / "dlrm.json", ROOT / "docs" / "maintainers" / "dlrm.md"
NODES = [2, 4, 8, 16, 32, 64, 128]
# Punniyamurthy, Hamidouche, Beckmann: arXiv:2305.06942.  Savings: of an iteration on 128 simulated nodes, and of the
# operator between nodes: on average, and at most (version 1).
PAPER = {"iteration": 0.21, "operator": 0.31, "most": 0.58}
GPU, RANKS = "NVIDIA H100 80GB HBM3", 2  # of the measured rows
H100, MI210 = (3350.0, 989.0), (1600.0, 181.0)  # data sheets: GB/s of memory, dense 16-bit TFLOP/s
OLD_NIC_GBS = 25.0  # assumed
PIECES = 2 * 132 * 32  # of a fused lookup: two for each warp of the grid (moecomm/overlap/gpu.py); a put each
TORCH, UNFUSED, FUSED, BOTH = FORMS = ("torch", "unfused", "fused", "fused both ways")

Terms = dict[str, dict[str, float]]  # of a GPU, by part


class Lookups(NamedTuple):
    """Lookups of the busiest rank: `tables` tables for a `batch` of all ranks, in bags of `pooling` rows."""

    tables: int
    batch: int
    pooling: int
    columns: int
    item_bytes: int = 4

    @property
    def sums(self) -> int:
        """Numbers in all sums of bags."""
        return self.tables * self.batch * self.columns

    @property
    def out_bytes(self) -> int:
        """Bytes of all sums."""
        return self.sums * self.item_bytes

    @property
    def read_bytes(self) -> int:
        """Bytes of the rows and of their 64-bit indices."""
        return self.pooling * (self.out_bytes + 8 * self.tables * self.batch)


class Product(NamedTuple):
    """`experts` products of [rows, depth] and [depth, columns] matrices in 16 bits."""

    rows: int
    columns: int
    depth: int
    experts: int = 1

    @property
    def out_bytes(self) -> int:
        """Bytes of the results."""
        return 2 * self.experts * self.rows * self.columns


@dataclass(frozen=True)
class Dlrm:
    """Tables of all ranks, samples of one, and widths of the MLPs: the bottom one's with its input."""

    tables: int = 128
    columns: int = 128
    pooling: int = 100
    samples: int = 1024
    bottom: tuple[int, ...] = (2000, 1024, 1024, 128)
    top: tuple[int, ...] = (4096, 4096, 4096, 1)
    projection: int = 30
    dtype: str = "fp32"

    def forward(self) -> list[list[Product]]:
        """Return the products of the bottom and of the top MLP."""
        above = (self.columns + (self.tables + 1) * self.projection, *self.top)
        return [[Product(self.samples, n, k) for k, n in pairwise(widths)] for widths in (self.bottom, above)]


SMALL = Dlrm(bottom=(13, 512, 512, 512, 128), top=(512, 512, 512))  # ASTRA-Sim's MLPs


def together(*parts: float) -> float:
    """Return the time of parts that run concurrently: a little more than the longest."""
    return float(sum(part**4 for part in parts) ** (1 / 4))


def work_us(gpu: Terms, flops: float, moved: float) -> float:
    """Return the time of a kernel of cuBLAS, which is slower when it has run for `burst_us`."""
    of = gpu["products"]
    compute_us = flops / of["tflops"] / 1e6
    compute_us += max(0.0, compute_us - of["burst_us"]) * (1 / of["sustained"] - 1)
    return of["fixed_us"] + together(compute_us, moved / of["hbm_gbs"] / 1e3)


def product_us(gpu: Terms, product: Product) -> float:
    """Return the time of a product."""
    n, m, k, experts = product
    return work_us(gpu, 2 * experts * n * m * k, 2 * experts * (n * m + m * k + n * k))


def bags_us(gpu: Terms, work: Lookups, moved: float, *wires_us: float) -> float:
    """Return the time of a kernel that reads all rows, moves so many bytes in memory, and sends for `wires_us`."""
    of = gpu["bags"]
    rows_us = work.tables * work.batch * work.pooling * of["row_ns"] / 1e3
    return of["fixed_us"] + together((work.read_bytes + moved) / of["hbm_gbs"] / 1e3 + rows_us, *wires_us)


def torch_us(gpu: Terms, work: Lookups) -> float:
    """Return the time of embedding_bag, a call a table: calls, sums written, and the slower of bytes and additions."""
    of = gpu["torch_bags"]
    added_us = work.sums * work.pooling * of["element_ps"] / 1e6
    calls_us = work.tables * of["table_us"] + work.sums * of["output_ps"] / 1e6
    return calls_us + together(work.read_bytes / of["hbm_gbs"] / 1e3, added_us)


def copy_us(gpu: Terms, moved: float) -> float:
    """Return the time of torch's copy before an all-to-all."""
    return 2 * moved / gpu["all_to_all"]["copy_gbs"] / 1e3


# How one GPU and NVLink are fitted.


class Measured(NamedTuple):
    """The times of one case by each way ("moecomm", "nccl", "alone"), and its work on one rank."""

    operator: str
    us: dict[str, float]
    work: Any

    def us_of(self, part: str) -> float | None:
        """Return the measured time that a part of the terms predicts; None if it does not predict this case."""
        exchanges = self.operator == "matmul_all_to_all" and self.work.experts == 1
        large = self.operator == "matmul_all_reduce" and self.work.out_bytes >= 2 << 20  # smaller ones are faster
        nccl_us = self.us["nccl"] - self.us["alone"]
        if isinstance(self.work, Lookups):
            return {"bags": self.us["moecomm"], "torch_bags": self.us["alone"], "all_to_all": nccl_us}.get(part)
        known = {"products": True, "all_to_all": exchanges, "all_reduce": large}.get(part, False)
        return (self.us["alone"] if part == "products" else nccl_us) if known else None

    def predicted_us(self, part: str, gpu: Terms) -> float:
        """Return the time by the terms of a part, on two ranks over NVLink."""
        sent: float = self.work.out_bytes
        if part == "bags":  # sums pass through memory in the peer's staging, there and back, and in the result
            return bags_us(gpu, self.work, 2 * sent, sent / 2 / gpu[part]["wire_gbs"] / 1e3)
        if part in ("torch_bags", "products"):
            return torch_us(gpu, self.work) if part == "torch_bags" else product_us(gpu, self.work)
        if part == "all_reduce":
            return gpu[part]["fixed_us"] + sent / gpu[part]["gbs"] / 1e3
        copied_us = copy_us(gpu, sent) if isinstance(self.work, Lookups) else 0.0
        return gpu[part]["fixed_us"] + sent / 2 / gpu[part]["gbs"] / 1e3 + copied_us


# Expected values and the standard deviations of their logarithms: data sheets, and a few microseconds for a launch.
EXPECTED = {
    "bags": {"fixed_us": (15.0, 0.7), "hbm_gbs": (2600.0, 0.3), "row_ns": (0.01, 1.5), "wire_gbs": (260.0, 0.3)},
    "torch_bags": {"table_us": (10.0, 0.7), "output_ps": (5.0, 0.7), "hbm_gbs": (2700.0, 0.3)}
    | {"element_ps": (1.4, 0.7)},
    "products": {"fixed_us": (3.0, 0.7), "tflops": (760.0, 0.3), "hbm_gbs": (2900.0, 0.3)}
    | {"sustained": (0.9, 0.1), "burst_us": (1000.0, 0.7)},
    "all_to_all": {"fixed_us": (25.0, 0.7), "gbs": (290.0, 0.3), "copy_gbs": (3000.0, 0.3)},
    "all_reduce": {"fixed_us": (25.0, 0.7), "gbs": (290.0, 0.3)},
}


def fit(paths: Iterable[Path]) -> dict[str, Any]:
    """Return {gpu, ranks, fitted_to, terms, errors}, from those results that are of moecomm.overlap on two H100s."""
    found: list[Measured] = []
    origins = []
    for path in paths:
        result = result_file.read(path)
        if result.get("benchmark") == "overlap" and (result["machine"]["gpus"][0], result["ranks"]) == (GPU, RANKS):
            found += _measured(result)
            origins.append({"file": path.name, "date": result["date"], "commit": result["commit"]})
    terms = {part: _fitted(part, found) for part in EXPECTED}
    errors = {}
    for part in EXPECTED:
        of = [abs(row.predicted_us(part, terms) / us - 1) for row in found if (us := row.us_of(part)) is not None]
        errors[part] = {"rows": len(of), "median": round(statistics.median(of), 4), "worst": round(max(of), 4)}
    terms = {part: {name: round(value, 5) for name, value in of.items()} for part, of in terms.items()}
    return {"gpu": GPU, "ranks": RANKS, "fitted_to": origins, "terms": terms, "errors": errors}


def _measured(result: dict[str, Any]) -> Iterable[Measured]:
    """Yield the cases of a result, without products in FP8 and without those of fewer rows than training has."""
    by_case: dict[tuple[str, ...], tuple[Any, dict[str, float]]] = {}
    for row in result["rows"]:
        if "us" in row and row["dtype"] != "fp8":
            key = row["operator"], row["case"], row["dtype"]
            by_case.setdefault(key, (row["shapes"], {}))[1][row["who"]] = row["us"]["p50"]
    for (operator, _, dtype), ((x, w), us) in by_case.items():
        work: Any = Product(x[0] * (RANKS if operator == "all_gather_matmul" else 1), *w)
        if operator == "embedding_all_to_all":
            work = Lookups(x[0], w[1], w[2], x[2], 4 if dtype == "fp32" else 2)
        elif operator == "matmul_all_to_all":
            work = Product(x[1] * x[2], w[1], w[2], x[0])
        if isinstance(work, Lookups) or work.rows >= 128:
            yield Measured(operator, us, work)


def _fitted(part: str, found: list[Measured]) -> dict[str, float]:
    points = [(row, us) for row in found if (us := row.us_of(part)) is not None]

    def errors(values: Array) -> Array:
        gpu = {part: dict(zip(EXPECTED[part], map(float, values), strict=True))}
        return np.asarray([np.log(row.predicted_us(part, gpu) / us) / 0.03 for row, us in points])  # noise of a row

    values = solve(errors, *np.array(list(EXPECTED[part].values())).T)
    return dict(zip(EXPECTED[part], map(float, values), strict=True))


# An iteration as a chain of operators on two streams: the GPU's, and the network's.


class Phase(NamedTuple):
    """An operator: its microseconds on the GPU and on the network, and the phases that it waits for."""

    name: str
    gpu_us: float
    net_us: float = 0.0
    after: tuple[str, ...] = ()


@dataclass(frozen=True)
class Setting:
    """A model on nodes of one GPU: what is fused, and what that is compared with."""

    model: Dlrm
    nic: ModelNic
    mi210: bool = False
    form: str = FUSED
    base: str = UNFUSED


def iteration(terms: Terms, setting: Setting, nodes: int, form: str) -> tuple[float, dict[str, float]]:
    """Return the microseconds of an iteration, and of each of its phases.

    A phase starts when its streams are free and what it waits for is done. UNFUSED looks up with the gather of the
    fused kernel, and then calls NCCL. TORCH calls embedding_bag for each table, and copies. FUSED is one kernel. BOTH
    fuses the update of the tables with the all-to-all of gradients as well.
    """
    gpu = mi210(terms) if setting.mi210 else terms
    free, ends, found = [0.0, 0.0], dict[str, float](), dict[str, float]()
    for name, *on_us, after in phases(gpu, setting.model, setting.nic, nodes, form):
        used = [stream for stream in (0, 1) if on_us[stream]]
        start = max([free[stream] for stream in used] + [ends[one] for one in after])
        found[name] = max(on_us)
        ends[name] = start + found[name]
        for stream in used:
            free[stream] = start + on_us[stream]
    return max(ends.values()), found


def mi210(gpu: Terms) -> Terms:
    """Return the terms of a GPU that reaches the same shares of another data sheet."""
    memory, arithmetic = (other / measured for other, measured in zip(MI210, H100, strict=True))
    by = {"hbm_gbs": memory, "copy_gbs": memory, "row_ns": 1 / memory, "tflops": arithmetic, "burst_us": 1 / arithmetic}
    return {part: {name: value * by.get(name, 1.0) for name, value in of.items()} for part, of in gpu.items()}


def phases(gpu: Terms, model: Dlrm, nic: ModelNic, nodes: int, form: str) -> list[Phase]:
    """Return the phases of the busiest node in the order in which they are called."""
    work = Lookups(ceil(model.tables / nodes), model.samples * nodes, model.pooling, model.columns)
    sent = work.out_bytes
    far = sent * (nodes - 1) / nodes
    updated = work.pooling * sent + sent  # rows written, and gradients of bags
    wire_us, exchange_us = nic.us(far, PIECES * far / sent), nic.us(far, nodes - 1) + nic.latency_us
    exchange_us += gpu["all_to_all"]["fixed_us"]

    def fused(name: str, moved: float) -> Phase:  # its warps wait for arrivals, so that it has the GPU to its end
        us = bags_us(gpu, work, moved + 4 * far, wire_us) + nic.latency_us  # bytes that are sent pass memory 5 times
        return Phase(name, us, min(us, wire_us))

    bottom, top = model.forward()
    weights = sum(layer.columns * layer.depth for layer in (*bottom, *top))
    dots = model.samples * (model.tables + 1) * model.projection
    read, written = 4 * model.samples * (model.tables + 1) * model.columns, 4 * dots
    dots_us = 2 * work_us(gpu, 2 * dots * model.columns, read + written / 2)
    bottom_us, top_us = (sum(product_us(gpu, one) for one in layers) for layers in (bottom, top))
    back_us = [
        sum(product_us(gpu, Product(one.columns, one.depth, one.rows)) for one in layers)
        + sum(product_us(gpu, Product(one.rows, one.depth, one.columns)) for one in needed)
        for layers, needed in ((bottom, bottom[1:]), (top, top))  # the input of the bottom MLP has no gradient
    ]
    first = [Phase("bottom MLP", bottom_us)]
    if form in (FUSED, BOTH):
        first.append(fused("lookups + all-to-all", sent))
    else:  # the bottom MLP runs while sums travel, as in facebookresearch/dlrm
        gather_us = torch_us(gpu, work) + copy_us(gpu, sent) if form == TORCH else bags_us(gpu, work, sent)
        first[:0] = [Phase("lookups", gather_us), Phase("all-to-all", 0.0, exchange_us, ("lookups",))]
    back = Phase("bottom MLP, backward", back_us[0])
    last = [back, fused("all-to-all of gradients + update", updated)]
    if form != BOTH:
        gradients = Phase("all-to-all of gradients", 0.0, exchange_us, ("interactions, backward",))
        last = [gradients, back, Phase("update of tables", bags_us(gpu, work, updated), 0.0, (gradients.name,))]
    reduce_us = gpu["all_reduce"]["fixed_us"] + nic.us(2 * (nodes - 1) / nodes * 4 * weights, 0)
    reduce_us += 2 * ceil(log2(nodes)) * nic.latency_us
    return [
        *first,
        Phase("interactions", dots_us, 0.0, tuple(one.name for one in first)),
        Phase("top MLP", top_us),
        Phase("top MLP, backward", back_us[1]),
        Phase("interactions, backward", 2 * dots_us),
        *last,
        Phase("all-reduce of MLP gradients", 0.0, reduce_us, ("top MLP, backward", back.name)),
        # A weight is read and written, and its gradient read, in fp32.
        Phase("update of MLPs", work_us(gpu, 0, 12 * weights), 0.0, ("all-reduce of MLP gradients",)),
    ]


# The result and the page.


def measure(fitted: dict[str, Any], nic: ModelNic) -> dict[str, Any]:
    """Return the content of the result: predictions, and steps from the paper's setting to ours on 128 nodes."""
    ours = Setting(Dlrm(), nic)
    first = replace(ours, model=SMALL, nic=replace(nic, gbs=OLD_NIC_GBS), mi210=True, form=BOTH)
    steps = {
        "MI210s, NICs of 25 GB/s, ASTRA-Sim's MLPs; both all-to-alls fused": first,
        "only the forward all-to-all is fused": replace(first, form=FUSED),
        "MLPs of the distributed DLRM": replace(first, form=FUSED, model=ours.model),
        "H100s": replace(ours, nic=first.nic),
        "NICs of 50 GB/s: the prediction above": ours,
    }
    return {
        "prediction": "by a model, not measured",
        "case": asdict(ours.model),
        "inputs": {"nic": asdict(nic)},
        "rows": [_row(fitted["terms"], ours, nodes) for nodes in NODES],
        "fit": fitted,
        "paper": PAPER,
        "steps": [_step(fitted["terms"], *one) for one in steps.items()],
        "changes": [_step(fitted["terms"], "the same, over torch's bags and NCCL", replace(ours, base=TORCH))],
    }


def _row(terms: Terms, setting: Setting, nodes: int) -> dict[str, Any]:
    forms = {}
    for form in FORMS[:3]:
        us, by_phase = iteration(terms, setting, nodes, form)
        listed = [{"name": name, "us": round(took, 3)} for name, took in by_phase.items()]
        forms[form] = {"us": round(us, 3), "phases": listed}
    torch, unfused, fused = (form["us"] for form in forms.values())
    savings = {"saving": round(1 - fused / unfused, 4), "saving_over_torch": round(1 - fused / torch, 4)}
    return {"gpus": nodes, **savings, "forms": forms}


def _step(terms: Terms, name: str, setting: Setting) -> dict[str, Any]:
    """Return the iteration of a setting: {name, us, fused_us, saving, share, operator_saving}.

    `share` is the part of the unfused iteration that the fused operators replace, and `operator_saving` the part of
    that which they save.
    """
    (us, gone), (fused_us, made) = (iteration(terms, setting, NODES[-1], form) for form in (setting.base, setting.form))
    replaced = sum(took for phase, took in gone.items() if phase not in made)
    by = sum(took for phase, took in made.items() if phase not in gone)
    found = {"us": round(us, 3), "fused_us": round(fused_us, 3), "saving": round(1 - fused_us / us, 4)}
    return {"name": name, **found, "share": round(replaced / us, 4), "operator_saving": round(1 - by / replaced, 4)}


def page(found: dict[str, Any], text: str) -> str:
    """Return the text of the page with the tables of a result."""
    savings = [
        [str(row["gpus"]), *(f"{us:.0f} us" for us in times), *(f"{1 - times[2] / us:.1%}" for us in times[1::-1])]
        for row in found["rows"]
        for times in [[row["forms"][form]["us"] for form in FORMS[:3]]]
    ]
    last = found["rows"][-1]["forms"]
    us = [{one["name"]: one["us"] for one in form["phases"]} | {"iteration": form["us"]} for form in last.values()]
    names = list(us[1])
    names[2:2] = [name for name in us[2] if name not in names]  # lookups and their all-to-all first
    times = [[name, *(f"{of[name]:.0f}" if name in of else "" for of in us)] for name in names]
    steps = [
        [one["name"], f"{one['us']:.0f} us", f"{one['fused_us']:.0f} us", *(f"{part:.0%}" for part in parts), saving]
        for one in (*found["steps"], *found["changes"])
        for parts, saving in [((one["share"], one["operator_saving"]), f"{1 - one['fused_us'] / one['us']:.1%}")]
    ]
    for head, rows in (("nodes", savings), ("phase", times), ("setting", steps)):
        lines = "".join(f"| {' | '.join(row)} |\n" for row in rows)
        text, written = re.subn(rf"(?<=\n)(\| {head} \|.*\n.*\n)(?:\|.*\n)*", rf"\g<1>{lines}", text)
        assert written == 1, f"{PAGE} has no table of {head}"
    return text
