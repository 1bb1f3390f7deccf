"""The demo: an MoE layer with a model's routing over several ranks, in every layout, checked against one rank."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from moecomm import backends, config
from moecomm.base.choices import BackendName
from moecomm.base.experts import experts_of, owners_of
from moecomm.base.protocol import LAYOUTS
from moecomm.buffer import Buffer
from moecomm.errors import BadInput
from moecomm.fused.weights import expert_weights
from moecomm.ranks.settings import Settings
from moecomm.router import MODELS, router
from moecomm.tools.demo_layer import MoELayer, error_bound, reference
from moecomm.tools.launch import launch
from moecomm.tools.progress import Step, progress

CONTEXT = 8  # bytes of text that a hidden state is made from
_EXPERTS_A_STEP = 16  # of progress
REPEATS = 5  # timed rounds; the layer's own call before them is the untimed warm-up


@dataclass(frozen=True)
class Case:
    """Configuration of the demo: `tokens` per rank in bfloat16, experts of `intermediate` columns drawn from `seed`."""

    model: str
    ranks: int
    tokens: int
    intermediate: int
    backend: BackendName
    seed: int = 0


@dataclass(frozen=True)
class LayoutResult:
    """The figures of one layout.

    Bytes count the rows that go to another rank, summed over all ranks. Times are medians over rounds of the slowest
    rank.
    """

    layout: str
    rows: int
    dispatched_bytes: int
    combined_bytes: int
    dispatch_s: float
    combine_s: float
    error: float  # the largest |output - reference|
    of_bound: float  # the largest ratio of an error to its bound; at most 1 if the output is right


@dataclass(frozen=True)
class Result:
    """The result of the demo: the backend, why it was chosen, and the figures of each layout."""

    case: Case
    backend: str
    why: str
    layouts: list[LayoutResult]

    @property
    def ok(self) -> bool:
        """True if every element of every layout's output is within its error bound."""
        return all(layout.of_bound <= 1 for layout in self.layouts)


def demo(
    *,
    model: str = "deepseek-v3",
    ranks: int | None = None,
    tokens: int = 512,
    intermediate: int = 64,
    backend: str = "auto",
) -> Result:
    """Run the layer on `ranks` local processes and compare every layout with a single-rank layer.

    Args:
        model: name in `moecomm.router.MODELS`; sets hidden size, number of experts, top-k and gate.
        ranks: number of processes, at most one for each expert. Default: 4 on CPUs, one per GPU, at most 8.
        tokens: tokens of each rank.
        intermediate: columns inside an expert.
        backend: "auto", "host", "lsa", "gin" or "nvshmem".

    Returns:
        Times, traffic and errors of each layout.

    Raises:
        BadInput: an argument is out of range.
        Unsupported: the backend cannot run here.
        RanksFailed: at least one rank failed.
    """
    if model not in MODELS:
        raise BadInput("model", repr(model), f"one of {', '.join(MODELS)}")
    if tokens < 1 or intermediate < 1:
        raise BadInput("tokens, intermediate", (tokens, intermediate), "at least 1 each")
    name, why = backends.choose(config.asked_backend(backend), None)
    case = Case(model, _ranks(ranks, name, MODELS[model].num_experts), tokens, intermediate, name)
    shape = MODELS[model]
    Settings(case.ranks, shape.hidden, shape.num_experts, shape.topk, tokens, torch.bfloat16, name, None).check()
    by_rank = launch("moecomm.tools.demo:run_rank", asdict(case), case.ranks)
    layouts = []
    for layout in LAYOUTS:
        parts = [result["layouts"][layout] for result in by_rank]
        layouts.append(
            LayoutResult(
                layout,
                *(sum(part[key] for part in parts) for key in ("rows", "dispatched_bytes", "combined_bytes")),
                *(_median_of_slowest([part[key] for part in parts]) for key in ("dispatch_s", "combine_s")),
                *by_rank[0]["errors"][layout],
            )
        )
    return Result(case, by_rank[0]["backend"], why, layouts)


def _ranks(wanted: int | None, backend: str, num_experts: int) -> int:
    most = 64 if backend == "host" else torch.cuda.device_count()
    most = min(most, num_experts)
    if wanted is None:
        wanted = min(most, 4 if backend == "host" else 8)
    if not 1 <= wanted <= most:
        raise BadInput("ranks", wanted, f"1 to {most}")
    return wanted


def _median_of_slowest(times: list[list[float]]) -> float:
    slowest: list[float] = [max(round_) for round_ in zip(*times, strict=True)]
    return statistics.median(slowest)


def run_rank(group: dist.ProcessGroup, **job: Any) -> dict[str, Any]:
    """Run one rank of the demo; rank 0 also computes the reference for the tokens of all ranks."""
    case = Case(**job)
    model, rank = MODELS[case.model], group.rank()
    device = torch.device("cpu" if case.backend == "host" else f"cuda:{rank}")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    x = hidden_states(case.tokens, model.hidden, first=rank * case.tokens, seed=case.seed).to(device)
    gate = router(case.model, device=device, seed=case.seed)
    topk_idx, topk_weights = gate(x)
    layouts, outputs = {}, {}
    with progress(group, len(LAYOUTS) + 2 + -(-model.num_experts // _EXPERTS_A_STEP)) as step:
        step("weights of the experts")
        mine = [_expert(case, expert, device) for expert in experts_of(rank, model.num_experts, case.ranks)]
        w13, w2 = (torch.stack(weights) for weights in zip(*mine, strict=True))
        del mine
        with Buffer(
            group,
            hidden=model.hidden,
            num_experts=model.num_experts,
            topk=model.topk,
            max_tokens=case.tokens,
            backend=case.backend,
            device=device,
        ) as buffer:
            backend = buffer.backend
            for layout in LAYOUTS:
                step(f"{layout} layout")
                layer = MoELayer(gate, buffer, w13, w2, layout=layout)
                outputs[layout] = layer(x)
                layouts[layout] = _time_rounds(layer, x, topk_idx, topk_weights, group)
                layouts[layout] |= _traffic(case, rank, layout, topk_idx)
            buffer.check()
        del w13, w2
        step("the rows of all ranks to a single one")
        whole = [_gather(t, group) for t in (x, topk_idx, topk_weights, *outputs.values())]
        by_layout: dict[str, torch.Tensor] = dict(zip(outputs, whole[3:], strict=True))
        errors = {} if rank else _errors(case, device, whole[0], whole[1], whole[2], by_layout, step)
    return {"backend": backend, "layouts": layouts, "errors": errors}


def hidden_states(tokens: int, hidden: int, *, first: int = 0, seed: int = 0) -> torch.Tensor:
    """Return bfloat16 [tokens, hidden] made from real text, the source code of moecomm.

    Token t stands for byte `first + t` of that text (cyclic). Its state is the sum of one random vector for each of the
    last CONTEXT bytes, weighted by 0.8^distance, then RMS-normalized. Random vectors of thousands of columns are nearly
    orthogonal, so equal contexts have equal states, similar contexts have similar states, and common bytes appear
    often, as in a model.
    """
    source = b"".join(path.read_bytes() for path in sorted(Path(__file__).parents[1].glob("*/*.py")))
    text = torch.frombuffer(bytearray(source), dtype=torch.uint8).long()
    at = torch.arange(first, first + tokens)
    states = torch.zeros(tokens, hidden)
    generator = torch.Generator().manual_seed(seed)
    for distance in range(CONTEXT):
        vectors = torch.randn(256, hidden, generator=generator)
        states += 0.8**distance * vectors[text[(at - distance) % len(text)]]
    return torch.nn.functional.rms_norm(states, (hidden,)).to(torch.bfloat16)


def _expert(case: Case, expert: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    return expert_weights(expert, MODELS[case.model].hidden, case.intermediate, seed=case.seed, device=device)


def _time_rounds(
    layer: MoELayer, x: torch.Tensor, topk_idx: torch.Tensor, topk_weights: torch.Tensor, group: dist.ProcessGroup
) -> dict[str, Any]:
    """Time REPEATS rounds on this rank, in seconds as the caller sees them; combine takes the rows of dispatch."""

    def timed(call: Callable[[], Any]) -> tuple[Any, float]:
        dist.barrier(group)
        begin = time.perf_counter()
        result = call()
        if x.is_cuda:
            torch.cuda.synchronize()
        return result, time.perf_counter() - begin

    times: dict[str, Any] = {"dispatch_s": [], "combine_s": []}
    for _ in range(REPEATS):
        routed, seconds = timed(
            lambda: layer.buffer.dispatch(x, topk_idx, topk_weights, layout=layer.layout, sync=True)
        )
        times["dispatch_s"].append(seconds)
        times["combine_s"].append(timed(partial(layer.buffer.combine, routed.x, routed.handle))[1])
        times["rows"] = int(routed.num_rows)
        del routed  # frees its rows in the window for the next round
    return times


def _traffic(case: Case, rank: int, layout: str, topk_idx: torch.Tensor) -> dict[str, int]:
    """Count the bytes of this rank's tokens that go to other ranks and back: one row for each token and owner rank.

    Dispatch carries bfloat16. Combine carries bfloat16 rows for `flat`, and float32 reduced rows for the other layouts.
    """
    model = MODELS[case.model]
    owner = owners_of(topk_idx, model.num_experts, case.ranks)
    tokens = [int((owner == peer).any(dim=1).sum()) for peer in range(case.ranks)]
    remote = (sum(tokens) - tokens[rank]) * model.hidden
    return {"dispatched_bytes": remote * 2, "combined_bytes": remote * (2 if layout == "flat" else 4)}


def _gather(tensor: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Concatenate the rows of all ranks at rank 0; the result on other ranks is unspecified."""
    mine = tensor.cpu().contiguous()
    parts = [torch.empty_like(mine) for _ in range(group.size())] if group.rank() == 0 else None
    sent = [p.view(torch.uint8) for p in parts] if parts else None
    dist.gather(mine.view(torch.uint8), sent, group_dst=0, group=group)
    return torch.cat(parts) if parts else mine


def _errors(
    case: Case,
    device: torch.device,
    x: torch.Tensor,
    topk_idx: torch.Tensor,
    topk_weights: torch.Tensor,
    outputs: dict[str, torch.Tensor],
    step: Step,
) -> dict[str, tuple[float, float]]:
    """Return for each layout the largest error against the single rank, and the largest ratio of error to bound.

    On one thread: products of one expert are small, and threads on busy cores wait longer for each other.
    """
    count = MODELS[case.model].num_experts

    def experts() -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        for expert in range(count):
            if expert % _EXPERTS_A_STEP == 0:
                step(f"the same layer on a single rank, expert {expert} of {count}")
            yield _expert(case, expert, device)

    expected = reference(x.to(device), topk_idx.to(device), topk_weights.to(device), experts())
    bound = error_bound(expected, x.dtype)
    errors = {}
    for layout, out in outputs.items():
        error = (out.to(device).float() - expected.out).abs().nan_to_num(nan=float("inf"))
        errors[layout] = (float(error.max()), float((error / bound).max()))
    return errors
