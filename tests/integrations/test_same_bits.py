"""A trainer and an engine compute the same bits: another number of ranks, other batches, replicas, moved weights,
rows and weights in FP8.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch.nn.functional import linear, silu

import moecomm
from moecomm import Placement, formats, nn
from moecomm.fused import quantize_weights
from moecomm.transfer import WeightTransfer
from tests.backends.conftest import all_ranks
from tests.integrations import vllm_stub as stub

HIDDEN, INNER, EXPERTS, TOPK, TOKENS, TRAINERS = 256, 32, 8, 3, 7, 4
SHAPES = {"w13": (2 * INNER, HIDDEN), "w2": (HIDDEN, INNER)}
ENGINES = {
    "two ranks": [[0, 1, 2, 3], [4, 5, 6, 7]],
    "two ranks, replicas": [[3, 1, 0, 2, 7], [4, 5, 6, 7, 0]],
    "one rank": [[0, 1, 2, 3, 4, 5, 6, 7]],
    "one rank, replicas": [[7, 0, 1, 2, 3, 4, 5, 6, 7, 7]],
}


class Format(NamedTuple):
    """The dtype of a layer, and the formats of rows and weights on their way."""

    dtype: torch.dtype
    cast: Literal["fp8", "mxfp8"] | None = None


FORMATS = {
    "float32": Format(torch.float32),
    "bfloat16": Format(torch.bfloat16),
    "FP8": Format(torch.bfloat16, "fp8"),
    "MXFP8": Format(torch.bfloat16, "mxfp8"),
}


def values_of(w: Sequence[torch.Tensor], form: Format) -> torch.Tensor:
    """Return the weights that experts compute with, from those that have arrived."""
    if form.cast is None:
        return w[0]
    data, scales = w[0], w[1].float()
    down, across = (128, 128) if form.cast == "fp8" else (1, 32)
    scales = scales.repeat_interleave(down, -2).repeat_interleave(across, -1)
    return (data.float() * scales[..., : data.shape[-2], : data.shape[-1]]).to(form.dtype)


def rounded(w: torch.Tensor, form: Format) -> torch.Tensor:
    """The values of weights that are cast."""
    if form.cast == "fp8":
        return values_of(quantize_weights(w), form)
    data, scales = formats.quantize(w.reshape(-1, w.shape[-1]), "mxfp8")
    assert scales is not None
    return values_of((data.view(w.shape), scales.view(*w.shape[:-1], -1)), form)


class Seen(dict[tuple[int, bytes], bytes]):
    """The bits of experts' results, by the expert and the bits of its row."""

    def note(self, expert: int, rows: torch.Tensor, y: torch.Tensor) -> None:
        for row, result in zip(rows.detach(), y.detach(), strict=True):
            self.add((expert, bits_of(row)), bits_of(result))

    def add(self, key: tuple[int, bytes], bits: bytes) -> None:
        assert self.setdefault(key, bits) == bits


def bits_of(t: torch.Tensor) -> bytes:
    return t.contiguous().view(torch.uint8).numpy().tobytes()


def all_of(parts: Any) -> Seen:
    found = Seen()
    for part in parts:
        for key, bits in part.items():
            found.add(key, bits)
    return found


def row_by_row(x: torch.Tensor, w13: torch.Tensor, w2: torch.Tensor) -> torch.Tensor:
    """Products whose bits depend on the row alone; those of torch on CPUs may depend on the number of rows."""
    found = [x[:0]]
    for row in x:
        gate, up = linear(row[None], w13).chunk(2, dim=-1)
        found.append(linear(silu(gate) * up, w2))
    return torch.cat(found)


class RowByRow(nn.Experts):
    def forward(self, x: torch.Tensor, tokens_per_expert: torch.Tensor, buffer: Any = None) -> torch.Tensor:
        counts = tokens_per_expert.tolist()
        groups = x[: sum(counts)].split(counts)
        parts = [row_by_row(rows, self.w13[slot], self.w2[slot]) for slot, rows in enumerate(groups)]
        return torch.cat([*parts, torch.zeros_like(x[sum(counts) :])])


def trained(group: Any, transfer: WeightTransfer, form: Format) -> tuple[torch.Tensor, ...]:
    """Train for a step over four ranks, send the weights, and return tokens, ids, weights and results of the next."""
    sizes: dict[str, Any] = {"hidden": HIDDEN, "intermediate": INNER, "num_experts": EXPERTS, "topk": TOPK}
    about: dict[str, Any] = {"gate": None, "wire": "rows", "quantize": form.cast, "dtype": form.dtype}
    layer = nn.ExpertParallel(group, **sizes, **about, max_tokens=16, backend="host")
    layer.experts = RowByRow(range(2 * group.rank, 2 * group.rank + 2), HIDDEN, INNER, dtype=form.dtype)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.5)
    g = torch.Generator().manual_seed(group.rank)
    x = torch.randn(TOKENS + group.rank, HIDDEN, generator=g).to(form.dtype)
    ids = torch.rand(len(x), EXPERTS, generator=g).argsort(dim=1)[:, :TOPK].contiguous()
    weights = torch.rand(len(x), TOPK, generator=g)
    layer(x, ids, weights).float().square().mean().backward()
    optimizer.step()
    transfer.stage({"w13": layer.experts.w13, "w2": layer.experts.w2})
    with torch.no_grad():
        if form.cast is not None:
            for w in layer.experts.parameters():
                w.copy_(rounded(w, form))
        return x, ids, weights, layer(x, ids, weights)


def arrived_rows(x: torch.Tensor, scales: torch.Tensor | None, form: Format) -> torch.Tensor:
    """The rows of an expert as the trainer's experts get them."""
    if form.cast is None:
        return x
    assert scales is not None
    scales = scales.view(torch.float8_e8m0fnu) if form.cast == "mxfp8" else scales
    return formats.dequantize(x, scales, form.cast, dtype=form.dtype)


def served(
    group: Any, transfer: WeightTransfer, held: list[list[int]], given: Callable[[], Any], form: Format
) -> tuple[torch.Tensor, Seen]:
    """Run the tokens of this rank through vLLM's batched format, in batches of another size; return the results, and
    those of experts.
    """
    from moecomm.integrations.vllm.batched import BatchedPrepareAndFinalize
    from moecomm.integrations.vllm.managers import BatchedManager

    logical, slots = torch.tensor(held), len(held[0])
    into = {
        name: [torch.zeros(slots, *shape, dtype=dtype) for shape, dtype in parts]
        for name, parts in transfer.arrives.items()
    }
    transfer.stage()
    transfer.commit({name: tuple(parts) if form.cast else parts[0] for name, parts in into.items()})
    w = {name: values_of(parts, form) for name, parts in into.items()}
    x, ids, weights = (tensor[group.rank :: group.ranks].contiguous() for tensor in given())
    placed = Placement(logical, choice="token")
    manager = BatchedManager(group, None)
    handle = manager.get_handle({"max_num_tokens_per_dp_rank": 16})
    steps = BatchedPrepareAndFinalize(
        handle, max_tokens_per_rank=16, num_dispatchers=group.ranks, use_fp8_dispatch=form.cast == "fp8"
    )
    config = stub.quant_config(is_scale_swizzled=False, quant_dtype="mxfp8" if form.cast == "mxfp8" else None)
    outs, seen = [], Seen()
    for at in range(0, 40, 5):  # batches end on all ranks at once
        some = slice(at, at + 5)
        physical = placed.slots_of(ids[some], group.rank)
        about = (logical.numel(), None, False, config, False)
        rows, scales, meta, _, _ = steps.prepare(x[some], weights[some], physical, *about)
        y = torch.full(rows.shape, torch.nan, dtype=form.dtype)
        for slot, count in enumerate(meta.expert_num_tokens.tolist()):
            here = arrived_rows(rows[slot, :count], None if scales is None else scales[slot, :count], form)
            y[slot, :count] = row_by_row(here, w["w13"][slot], w["w2"][slot])
            seen.note(held[group.rank][slot], here, y[slot, :count])
        out = torch.empty_like(x[some])
        steps.finalize(out, y, weights[some], physical, False, stub.TopKWeightAndReduceDelegate())
        outs.append(out)
    manager.destroy()
    return torch.cat(outs), seen


def engines_of(
    held: list[list[int]], train: Callable[[int, WeightTransfer], None], given: Callable[[], Any], form: Format
) -> list[tuple[torch.Tensor, Seen]]:
    """Trainers, which send their weights, beside the ranks of an engine; return what these have."""
    engines = moecomm.local_ranks(len(held))
    none: list[list[int]] = [[]]
    source = Placement([[0, 1], [2, 3], [4, 5], [6, 7], *none * len(held)])
    target = Placement([*none * TRAINERS, *held])

    def body(group: Any) -> Any:
        about: dict[str, Any] = {"source": source, "target": target, "cast": form.cast, "dtype": form.dtype}
        with WeightTransfer(group, SHAPES, **about, backend="host") as transfer:
            if group.rank < TRAINERS:
                train(group.rank, transfer)
                group.all_gather(b"")
                return None

            def arrived() -> Any:
                group.all_gather(b"")  # all trainers have their results
                return given()

            return served(engines[group.rank - TRAINERS], transfer, held, arrived, form)

    return all_ranks(TRAINERS + len(held), body)[TRAINERS:]


IN_MEGATRON = ("float32", "bfloat16", "MXFP8")  # it has no other FP8 rows


def shuffled(everybody: torch.Tensor) -> torch.Tensor:
    """Return the rows of all trainers in the order in which an engine gets them."""
    return everybody[torch.randperm(len(everybody), generator=torch.Generator().manual_seed(1))]


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("engine", ENGINES)
def test_an_engine_gives_the_bits_of_the_trainer(
    batches: Any, monkeypatch: pytest.MonkeyPatch, engine: str, form: str
) -> None:
    monkeypatch.setattr(sys.modules["vllm.envs"], "VLLM_BATCH_INVARIANT", True)
    held, trainers = ENGINES[engine], moecomm.local_ranks(TRAINERS)
    everybody: list[Any] = [None] * TRAINERS

    def train(rank: int, transfer: WeightTransfer) -> None:
        everybody[rank] = trained(trainers[rank], transfer, FORMATS[form])

    def given() -> list[torch.Tensor]:
        return [shuffled(torch.cat(parts)) for parts in zip(*everybody, strict=True)]

    outs = engines_of(held, train, lambda: given()[:3], FORMATS[form])
    wanted = given()[3]
    for rank, (out, _) in enumerate(outs):
        assert torch.equal(out, wanted[rank :: len(held)]) and out.isfinite().all() and out.any()


def _in_megatron(rank: int, group: Any) -> dict[str, tuple[Seen, dict[str, Any]]]:
    """In each format, by its name."""
    import tests.integrations.megatron_core  # noqa: F401 - before the rest of Megatron
    from tests.integrations.megatron_on_cpu import parallel, without_cuda

    without_cuda()
    parallel(TRAINERS)
    return {name: _trained_in_megatron(rank, group, FORMATS[name]) for name in IN_MEGATRON}


def _trained_in_megatron(rank: int, group: Any, form: Format) -> tuple[Seen, dict[str, Any]]:
    """As trained(), by Megatron-core's layer; also return results of its experts, and their weights."""
    from moecomm.integrations.megatron import use_moecomm
    from tests.integrations.megatron_on_cpu import built, config_of, spec

    sizes: dict[str, Any] = {"hidden_size": HIDDEN, "ffn_hidden_size": INNER, "moe_router_topk": TOPK}
    narrow = form.dtype is torch.bfloat16
    config = config_of(TRAINERS, **sizes, params_dtype=form.dtype, bf16=narrow, moe_router_dtype="fp32")
    if form.cast is not None:
        config.moe_dispatch_fwd_dtype = form.cast  # a field of newer versions
    torch.manual_seed(0)  # routers are alike
    layer = built(use_moecomm(spec()), config)
    g, seen, local = torch.Generator().manual_seed(rank), Seen(), layer.experts.local_experts
    for w in layer.experts.parameters():
        torch.nn.init.normal_(w, std=0.1, generator=g)

    def by_row(rows: torch.Tensor, counts: torch.Tensor, probs: torch.Tensor) -> tuple[torch.Tensor, None]:
        sizes, parts = counts.tolist(), []
        for slot, (some, weights) in enumerate(zip(rows.split(sizes), probs.split(sizes), strict=True)):
            y = torch.cat([some[:0], *(local[slot](row[None])[0] for row in some)])
            seen.note(2 * rank + slot, some, y)
            parts.append((y * weights[:, None]).to(y.dtype))
        return torch.cat(parts), None

    layer.experts.forward = by_row
    x = torch.randn(TOKENS + rank, 1, HIDDEN, generator=g).to(form.dtype)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.5)
    layer(x)[0].float().square().mean().backward()
    dist.all_reduce(layer.router.weight.grad, group=group)
    optimizer.step()
    seen.clear()
    w13, w2 = (torch.stack([getattr(e, n).weight.detach() for e in local]) for n in ("linear_fc1", "linear_fc2"))
    with torch.no_grad():
        if form.cast is not None:
            for w in layer.experts.parameters():
                w.copy_(rounded(w, form))
        probs, chosen = layer.route(x)
        ids = chosen.int().topk(TOPK).indices
        results = {"x": x[:, 0], "weights": probs.gather(1, ids), "out": layer(x)[0][:, 0], "w13": w13, "w2": w2}
    return seen, {"ids": ids.numpy(), **{name: t.float().numpy() for name, t in results.items()}}


def test_experts_in_an_engine_give_the_bits_of_those_in_megatron(
    batches: Any, monkeypatch: pytest.MonkeyPatch, computing_ranks: Any
) -> None:
    """Sums have other bits: Megatron weights rows in experts, and each rank adds up its own."""
    if importlib.util.find_spec("megatron") is None:  # not imported here, beside the parts of vLLM
        pytest.skip("needs megatron-core: pip install megatron-core")
    monkeypatch.setattr(sys.modules["vllm.envs"], "VLLM_BATCH_INVARIANT", True)
    everybody = computing_ranks.run(TRAINERS, _in_megatron)
    for name in IN_MEGATRON:
        _check_engines(FORMATS[name], [found[name] for found in everybody], sums=False)


def _in_torchtitan(rank: int, group: Any) -> tuple[Seen, dict[str, Any]]:
    """As _trained_in_megatron(), by the expert layer of torchtitan, whose experts compute in bfloat16."""
    from tests.integrations.torchtitan_stub import without_triton

    without_triton()
    from torch.distributed.device_mesh import init_device_mesh
    from torchtitan.distributed.utils import set_spmd_backend
    from torchtitan.models.common.moe import GroupedExperts, RoutedExperts

    from moecomm.integrations.torchtitan import TokenDispatcher

    set_spmd_backend("default")  # the other one takes groups from meshes that only its trainer registers
    layer = RoutedExperts.Config(
        inner_experts=GroupedExperts.Config(dim=HIDDEN, hidden_dim=INNER, num_experts=EXPERTS // TRAINERS),
        token_dispatcher=TokenDispatcher.Config(num_experts=EXPERTS, top_k=TOPK, wire="rows"),
    ).build()
    layer.token_dispatcher.wire_meshes(ep_mesh=init_device_mesh("cpu", (TRAINERS,)))
    g, seen, experts = torch.Generator().manual_seed(rank), Seen(), layer.inner_experts
    for w in layer.parameters():
        torch.nn.init.normal_(w, std=0.1, generator=g)
    whole = experts.forward

    def products(*, A: torch.Tensor, B_t: torch.Tensor, offs: torch.Tensor) -> torch.Tensor:
        """Their grouped product, row by row."""
        ends = offs.tolist()
        parts = [linear(A[at, None], w.mT) for w, *of in zip(B_t, [0, *ends], ends, strict=False) for at in range(*of)]
        return torch.cat([*parts, A.new_zeros(len(A) - len(parts), B_t.shape[-1])])

    def noted(rows: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = whole(rows, counts)
        sizes = counts.tolist()
        groups = (t[: sum(sizes)].split(sizes) for t in (rows, y))
        for slot, of in enumerate(zip(*groups, strict=True)):
            seen.note(2 * rank + slot, *of)
        return y

    experts._grouped_mm, experts.forward = products, noted
    x = torch.randn(1, TOKENS + 1, HIDDEN, generator=g).bfloat16()
    ids = torch.rand(len(x[0]), EXPERTS, generator=g).argsort(dim=1)[:, :TOPK].contiguous()
    weights = torch.rand(len(ids), TOPK, generator=g)
    given = (x, weights[None], ids[None], torch.bincount(ids.flatten(), minlength=EXPERTS))
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.5)
    layer(*given).float().square().mean().backward()
    optimizer.step()
    seen.clear()
    with torch.no_grad():
        w13 = torch.cat([experts.w1_EFD, experts.w3_EFD], dim=1)
        results = {"x": x[0], "weights": weights, "out": layer(*given)[0], "w13": w13, "w2": experts.w2_EDF}
    return seen, {"ids": ids.numpy(), **{name: t.detach().float().numpy() for name, t in results.items()}}


def test_an_engine_gives_the_bits_of_torchtitan(
    batches: Any, monkeypatch: pytest.MonkeyPatch, computing_ranks: Any
) -> None:
    if importlib.util.find_spec("torchtitan") is None:
        pytest.skip("needs torchtitan, installed: python -m tests.integrations.versions torchtitan")
    monkeypatch.setattr(sys.modules["vllm.envs"], "VLLM_BATCH_INVARIANT", True)
    _check_engines(FORMATS["bfloat16"], computing_ranks.run(TRAINERS, _in_torchtitan), sums=True)


def _check_engines(form: Format, everybody: list[tuple[Seen, dict[str, Any]]], *, sums: bool) -> None:
    """Compare what engines compute with a trainer's results of experts and, with `sums`, of the layer."""
    wanted = all_of(seen for seen, _ in everybody)
    assert len(wanted) == sum(found["ids"].size for _, found in everybody)

    def of(name: str, rank: int) -> torch.Tensor:
        t = torch.from_numpy(everybody[rank][1][name])
        return t if name in ("ids", "weights") else t.to(form.dtype)

    def given(name: str) -> torch.Tensor:
        return shuffled(torch.cat([of(name, rank) for rank in range(TRAINERS)]))

    def send(rank: int, transfer: WeightTransfer) -> None:
        transfer.stage({name: of(name, rank) for name in SHAPES})

    for held in ENGINES.values():
        outs = engines_of(held, send, lambda: [given(name) for name in ("x", "ids", "weights")], form)
        found = all_of(seen for _, seen in outs)
        assert found.keys() == wanted.keys()
        assert found == wanted
        for rank, (out, _) in enumerate(outs):
            theirs = given("out")[rank :: len(held)]
            most = 0 if sums else 8 * torch.finfo(form.dtype).eps * float(theirs.abs().max())
            torch.testing.assert_close(out, theirs, rtol=0, atol=most)
