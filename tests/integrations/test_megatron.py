"""Megatron-core's own MoE layer with moecomm's dispatcher, against the same layer with its all-to-all dispatcher."""

from __future__ import annotations

import functools
import inspect
import sys
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import moecomm

pytest.importorskip("tests.integrations.megatron_core", reason="needs megatron-core: pip install megatron-core")

from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.transformer.moe import moe_layer, token_dispatcher
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules

from moecomm.base import formats
from moecomm.integrations.megatron import Limits, Manager, MoELayer, TokenDispatcher, install_as_deepep, use_moecomm
from moecomm.integrations.megatron.exchange import ExpertExchange
from moecomm.integrations.megatron.padded import PaddedExchange
from moecomm.observe.tracing import reading
from moecomm.ranks.settings import Settings
from tests.integrations.megatron_on_cpu import EXPERTS, HIDDEN, built, config_of, parallel, spec, without_cuda
from tests.little_room import little_room

TOKENS = (5, 1, 8, 3)  # sequence lengths, of a batch of two


def drawn(layer: Any, rank: int, tokens: int, dtype: torch.dtype, seed: int = 0) -> list[torch.Tensor]:
    """An input, and what its output is multiplied with to make a loss."""
    g = torch.Generator().manual_seed(rank + 100 * seed)
    return list(torch.randn((2, tokens, 2, HIDDEN), generator=g).to(layer.router.weight.device, dtype))


def results(
    layer: Any, rank: int, tokens: int, dtype: torch.dtype, again: str = "", seed: int = 0
) -> list[torch.Tensor]:
    """Output, gradient of the input, gradients of all weights."""
    x, seen = drawn(layer, rank, tokens, dtype, seed)
    x.requires_grad_()
    layer.zero_grad()
    out = checkpoint(layer, x, use_reentrant=again == "reentrant")[0] if again else layer(x)[0]
    (out * seen).sum().backward()
    assert out.shape == x.shape
    return [out.detach(), x.grad, *(torch.zeros_like(p) if p.grad is None else p.grad for p in layer.parameters())]


def pair(settings: dict[str, Any], ranks: int, tensor_parallel: int = 1, **ours: Any) -> tuple[Any, Any]:
    """Their layer and ours, with the same weights."""
    settings = dict(settings)
    named = settings.pop("ours", "flex")
    torch.manual_seed(0)
    theirs = built(spec(), config_of(ranks, tensor_parallel, **settings))
    settings["moe_token_dispatcher_type"] = named
    mine = built(use_moecomm(spec(), **ours), config_of(ranks, tensor_parallel, **settings))
    mine.load_state_dict(theirs.state_dict())
    return theirs, mine


EXACT: dict[str, dict[str, Any]] = {
    "plain": {},
    "bfloat16": {"params_dtype": torch.bfloat16, "bf16": True, "moe_router_dtype": "fp32"},
    "router in float64": {"moe_router_dtype": "fp64"},
    "sigmoid": {"moe_router_score_function": "sigmoid"},
    "one expert a rank": {"num_moe_experts": 4},
    "top 1": {"moe_router_topk": 1, "moe_router_pre_softmax": True},
    "shared expert": {"moe_shared_expert_intermediate_size": 8},
    "dropped": {"moe_expert_capacity_factor": 0.5},
    "the all-to-all configuration": {"ours": "alltoall"},
}


def _exact(rank: int, group: Any) -> list[str]:
    without_cuda()
    parallel(4)
    differ = []
    for name, settings in EXACT.items():
        dtype = settings.get("params_dtype", torch.float32)
        theirs, mine = pair(settings, 4)
        assert type(mine.token_dispatcher) is TokenDispatcher
        for tokens in (TOKENS[rank], TOKENS[rank - 1] + 2):  # one rank has more the second time than there is room for
            want = results(theirs, rank, tokens, dtype)
            for again in ("", "reentrant", "plain"):
                found = results(mine, rank, tokens, dtype, again)
                differ += [f"{name}, {again}: {i}" for i, t in enumerate(found) if not torch.equal(t, want[i])]
    return differ


def test_the_layer_is_the_one_with_all_to_all_to_the_bit(ranks: Any) -> None:
    """Two experts a token: sums of two terms, and of rows in the same order, are the same in either order."""
    assert ranks.run(4, _exact) == [[]] * 4


def _exact_in_chunks(rank: int, group: Any) -> tuple[list[str], bool]:
    with little_room() as counted:
        return _exact(rank, group), bool(counted)


def test_rows_that_have_no_room_change_no_bit(ranks: Any) -> None:
    """Nor those of gradients: all dispatches of more than a token of each rank go in several rounds."""
    assert ranks.run(4, _exact_in_chunks) == [([], True)] * 4


def _close(rank: int, group: Any, tensor_parallel: int, settings: dict[str, Any]) -> list[float]:
    without_cuda()
    parallel(4, tensor_parallel)
    alike = tensor_parallel > 1 or "moe_pad_expert_input_to_capacity" in settings
    tokens = 6 if alike else TOKENS[rank]
    theirs, mine = pair(settings, 4, tensor_parallel)
    want, found = results(theirs, rank, tokens, torch.float32), results(mine, rank, tokens, torch.float32)
    assert any(t.any() for t in want)
    most = max(float(t.abs().max()) for t in want if t.numel())
    return [float((a - b).abs().max()) / most for a, b in zip(found, want, strict=True) if a.numel()]


@pytest.mark.parametrize(
    ("tensor_parallel", "settings"),
    [
        (1, {"moe_router_topk": 3}),
        (1, {"moe_router_padding_for_quantization": True}),
        (1, {"moe_expert_capacity_factor": 0.5, "moe_pad_expert_input_to_capacity": True, "ours": "alltoall"}),
        # gloo gathers no ragged tensors: the dispatcher to compare with is the one that gathers all tokens.
        (2, {"moe_token_dispatcher_type": "allgather"}),
    ],
    ids=["three terms", "padded", "padded to capacity", "split experts"],
)
def test_the_layer_is_the_one_of_theirs_but_for_the_order_of_sums(
    ranks: Any, tensor_parallel: int, settings: dict[str, Any]
) -> None:
    for errors in ranks.run(4, _close, tensor_parallel, settings):
        assert errors and all(error <= 64 * 2.0**-24 for error in errors)


def _close_in_chunks(rank: int, group: Any, *how: Any) -> tuple[list[float], bool]:
    with little_room() as counted, patch.object(sys.modules[__name__], "TOKENS", (40, 1, 30, 3)):
        return _close(rank, group, *how), bool(counted)


@pytest.mark.parametrize(
    ("tensor_parallel", "settings"),
    [(1, {"moe_router_topk": 3}), (1, {"moe_router_padding_for_quantization": True})],
    ids=["three terms", "padded"],
)
def test_rows_that_have_no_room_with_other_orders_of_sums(
    ranks: Any, tensor_parallel: int, settings: dict[str, Any]
) -> None:
    for errors, chunked in ranks.run(4, _close_in_chunks, tensor_parallel, settings):
        assert chunked and errors and all(error <= 64 * 2.0**-24 for error in errors)


def _padded(rank: int, group: Any) -> tuple[Any, ...]:
    without_cuda()
    parallel(2)
    _, mine = pair({"moe_router_padding_for_quantization": True}, 2, limits=Limits(max_tokens=200))
    results(mine, rank, 1, torch.float32)
    # Leftovers of an earlier round in the window.
    exchange = mine.token_dispatcher._comm_manager._exchange
    ids = torch.arange(400).view(200, 2) % EXPERTS
    exchange.route(torch.full((200, HIDDEN), torch.nan), ids, torch.full((200, 2), torch.nan), 1, None)
    seen: list[Any] = []
    mine.experts.register_forward_pre_hook(lambda _, args: seen.extend(a.detach().clone() for a in args))
    assert all(t.isfinite().all() for t in results(mine, rank, 5, torch.float32))
    rows, counts, probs = seen
    empty = (rows == 0).all(dim=1)
    return counts.tolist(), len(rows), counts.dtype, counts.device.type, int(empty.sum()), bool(probs[empty].any())


def test_rows_arrive_padded_with_zeros(ranks: Any) -> None:
    found = ranks.run(2, _padded)
    arrived = 0
    for counts, rows, dtype, device, empty, weighted in found:
        assert len(counts) == EXPERTS // 2 and all(count % 16 == 0 for count in counts)
        assert sum(counts) == rows and dtype is torch.int64 and device == "cpu"
        arrived += rows - empty
        assert not weighted
    assert arrived == 2 * 2 * 10  # two experts of ten tokens of two ranks


def _dispatchers(rank: int, group: Any) -> list[bool]:
    """The six steps by themselves; nothing chosen by some tokens, no tokens at all on a rank, a prob that is 0."""
    without_cuda()
    parallel(2)
    theirs, mine = pair({}, 2)
    theirs.config.moe_expert_capacity_factor = 1.0  # else it takes the top-k for what all tokens have
    tokens = (6, 0)[rank]
    g = torch.Generator().manual_seed(rank)
    x, seen = torch.randint(-8, 9, (2, tokens, 1, HIDDEN), generator=g).float()
    probs = torch.randint(0, 5, (tokens, EXPERTS), generator=g).float()
    chosen = torch.zeros(tokens, EXPERTS, dtype=torch.bool)
    for token in range(tokens):
        chosen[token, torch.randperm(EXPERTS, generator=g)[: (2, 2, 0, 1, 2, 2)[token]]] = True
    probs = probs * chosen
    probs[:1] = 0
    both = []
    for layer, given in ((theirs, x), (mine, x)):
        dispatcher = layer.token_dispatcher
        given, weights = given.clone().requires_grad_(), probs.clone().requires_grad_()
        rows, sent = dispatcher.dispatch_preprocess(given, chosen.clone(), weights)
        rows, sent = dispatcher.token_dispatch(rows, sent)
        rows, counts, row_probs = dispatcher.dispatch_postprocess(rows, sent)
        y = rows * row_probs.unsqueeze(1) + rows
        out = dispatcher.combine_postprocess(dispatcher.token_combine(dispatcher.combine_preprocess(y)))
        (out * seen).sum().backward()
        both.append((rows.detach(), counts, row_probs.detach(), out.detach(), given.grad, weights.grad))
    assert both[0][1].sum() > 0 and (rank == 1 or both[0][-1].any())
    return [torch.equal(a, b) for a, b in zip(*both, strict=True)]


def test_the_dispatcher_takes_and_gives_what_theirs_does(ranks: Any) -> None:
    """Sums of small integers are exact."""
    assert ranks.run(2, _dispatchers) == [[True] * 6] * 2


def _starved(rank: int, group: Any, padded: bool) -> list[float]:
    """No token picks an expert of the last rank, whose rows then have no graph."""
    limits, x = Limits(timeout_s=20), torch.ones(4, HIDDEN, requires_grad=True)
    weights, ids = torch.ones(4, 1), torch.zeros(4, 1, dtype=torch.int64)
    exchange = PaddedExchange(group, EXPERTS, 1, limits) if padded else ExpertExchange(group, EXPERTS, 1, limits)
    found = exchange.dispatch(x, ids, weights, 8 if padded else 1)
    y = torch.zeros_like(found.x) if rank else 3 * found.x
    (exchange.combine(y, found.way).sum() + x.sum()).backward()
    assert x.grad is not None
    return x.grad.unique().tolist()


def _cast_rows(rank: int, group: Any, padded: bool) -> list[bool]:
    """Return whether rows, and gradients of the experts' results, are those that MXFP8 makes of them."""
    without_cuda()
    parallel(2)
    to_capacity = {"moe_expert_capacity_factor": 4.0, "moe_pad_expert_input_to_capacity": True}
    config = config_of(2, **(to_capacity if padded else {}))
    config.moe_dispatch_fwd_dtype = config.moe_combine_bwd_dtype = "mxfp8"  # fields of newer versions
    manager = Manager(group, EXPERTS // 2, 1, EXPERTS, config, Limits(timeout_s=20))
    g = torch.Generator().manual_seed(rank)
    x, seen = torch.randn((2, 4, HIDDEN), generator=g)
    x.requires_grad_()
    here = torch.zeros(4, EXPERTS)
    here[:, rank * EXPERTS // 2] = 1.0  # each rank keeps its tokens
    manager.setup_metadata(here.bool().view(4, 2, -1), here.view(4, 2, -1))
    rows = manager.dispatch(x)
    rows.retain_grad()
    manager.combine(rows * 1.0).backward(seen)
    assert rows.grad is not None
    wanted = [formats.dequantize(*formats.quantize(t.detach(), "mxfp8"), "mxfp8") for t in (x, seen)]
    return [torch.equal(found[:4], want) for found, want in zip((rows.detach(), rows.grad), wanted, strict=True)]


@pytest.mark.parametrize("padded", [False, True])
def test_rows_and_gradients_travel_in_mxfp8_where_the_configuration_says_so(ranks: Any, padded: bool) -> None:
    assert ranks.run(2, _cast_rows, padded) == [[True, True]] * 2


@pytest.mark.parametrize("padded", [False, True])
def test_a_rank_whose_experts_got_no_token_has_its_backward_pass(ranks: Any, padded: bool) -> None:
    assert ranks.run(2, _starved, padded) == [[4.0]] * 2


def _schedules(rank: int, group: Any) -> list[bool]:
    """As schedules do that overlap micro-batches: each stage on inputs cut off from the one before, backward by hand;
    two micro-batches on the way.
    """
    without_cuda()
    parallel(2)
    theirs, mine = pair({}, 2)
    want = results(theirs, rank, 4, torch.float32)
    layers = [results(mine, rank, 4, torch.float32)]
    g = torch.Generator().manual_seed(rank)
    x, seen = torch.randn((2, 4, 2, HIDDEN), generator=g)
    mine.zero_grad()

    def cut(t: torch.Tensor) -> torch.Tensor:
        return t.detach().requires_grad_()

    stages = []
    for _ in range(2):
        x = cut(x)
        tokens, probs = mine.preprocess(x, *mine.route(x))
        tokens_in, probs_in = cut(tokens), cut(probs)
        rows, row_probs = mine.dispatch(tokens_in, probs_in)
        rows_in, row_probs_in = cut(rows), cut(row_probs)
        y, _ = mine.routed_experts_compute(rows_in, row_probs_in)
        y_in = cut(y)
        out = mine.postprocess(mine.combine(y_in), None)
        stages.append((x, tokens, probs, tokens_in, probs_in, rows, row_probs, rows_in, row_probs_in, y, y_in, out))
    grads = []
    for x, tokens, probs, tokens_in, probs_in, rows, row_probs, rows_in, row_probs_in, y, y_in, out in stages:
        mine.zero_grad()
        (out * seen).sum().backward()
        y.backward(y_in.grad)
        torch.autograd.backward((rows, row_probs), (rows_in.grad, row_probs_in.grad))
        torch.autograd.backward((tokens, probs), (tokens_in.grad, probs_in.grad))
        grads.append([out.detach(), x.grad, *(p.grad.clone() for p in mine.parameters())])
    return [torch.equal(a, b) for found in (*layers, *grads) for a, b in zip(found, want, strict=True)]


def _named(rank: int, group: Any, folder: str) -> None:
    without_cuda()
    parallel(2)
    model = torch.nn.ModuleDict({"mlp": built(use_moecomm(spec()), config_of(2))})
    with moecomm.trace(folder, model=model):
        results(model["mlp"], rank, 3, torch.float32)


def test_a_trace_has_the_names_of_layers(ranks: Any, tmp_path: Path) -> None:
    ranks.run(2, _named, str(tmp_path))
    files = reading.read([tmp_path])
    assert {file.rank for file in files} == {0, 1}
    for file in files:
        rounds = [span.args.get("layer") for span in file.spans if " round " in span.name]
        assert rounds[:2] == ["mlp", "mlp"] and len(rounds) > 2  # and backwards


def _in_transformer_layers(rank: int, group: Any) -> list[bool]:
    """Megatron-core's layer builds it, from the form of spec that it has, and calls it."""
    without_cuda()
    parallel(2)
    layers = []
    for change in (lambda given: given, use_moecomm):
        torch.manual_seed(0)
        given = change(get_gpt_layer_local_spec(num_experts=EXPERTS, moe_grouped_gemm=False))
        layers.append(TransformerLayer(config_of(2, attention_dropout=0.0, hidden_dropout=0.0), given.submodules))
    theirs, mine = layers
    assert type(mine.mlp) is MoELayer and type(mine.mlp.token_dispatcher) is TokenDispatcher
    mine.load_state_dict(theirs.state_dict())
    both = []
    g = torch.Generator().manual_seed(rank)
    x, seen = torch.randn((2, 3 + rank, 2, HIDDEN), generator=g)
    for layer in layers:
        given = x.clone().requires_grad_()
        out, _ = layer(given, attention_mask=torch.zeros(1, 1, len(x), len(x), dtype=torch.bool))
        (out * seen).sum().backward()
        both.append([out.detach(), given.grad, *(p.grad for p in layer.parameters() if p.grad is not None)])
    assert len(both[0]) > 6
    return [torch.equal(a, b) for a, b in zip(*both, strict=True)]


def test_megatrons_transformer_layer_builds_and_calls_it(ranks: Any) -> None:
    assert all(all(same) for same in ranks.run(2, _in_transformer_layers))


def test_stages_may_be_cut_apart_and_micro_batches_interleaved(ranks: Any) -> None:
    assert all(all(same) for same in ranks.run(2, _schedules))


def _deep(rank: int, group: Any, max_rows: int | None) -> list[bool]:
    """Twenty passes forward, and then all of them back, in a window of two rounds."""
    without_cuda()
    parallel(2)
    sizes = Settings(2, HIDDEN, EXPERTS, 2, 1000, torch.float32, "host", None)
    worst = 2 * sizes.round_bytes("expert")
    limits = Limits(max_tokens=1000, window_bytes=worst if max_rows is None else None, max_rows=max_rows)
    theirs, mine = pair({"moe_router_padding_for_quantization": True}, 2, limits=limits)
    want = results(theirs, rank, 500, torch.float32)
    g = torch.Generator().manual_seed(rank)
    x, seen = torch.randn((2, 500, 2, HIDDEN), generator=g)
    given = [x.clone().requires_grad_() for _ in range(20)]
    outs = [mine(x)[0] for x in given]
    (buffer,) = mine.token_dispatcher._comm_manager._exchange._buffers.values()
    heap = buffer.rounds.memory.arena
    same = [heap.end - heap.begin < worst - 2 * 1000 * HIDDEN * 4 or max_rows is None]
    for x, out in zip(given, outs, strict=True):
        mine.zero_grad()
        (out * seen).sum().backward()
        found = [out.detach(), x.grad, *(p.grad for p in mine.parameters())]
        # Their padding is of tokens with a weight of 0, ours of zeros: sums of another number of terms.
        same += [bool(((a - b).abs() <= 2.0**-20 * b.abs().max()).all()) for a, b in zip(found, want, strict=True)]
    return same


@pytest.mark.parametrize("max_rows", [None, 3000])
def test_deep_models_need_no_window_for_all_of_their_layers(ranks: Any, max_rows: int | None) -> None:
    assert all(all(same) for same in ranks.run(2, _deep, max_rows))


def _as_deepep(rank: int, group: Any) -> list[bool]:
    without_cuda()
    parallel(2)
    install_as_deepep()
    torch.manual_seed(0)
    theirs = built(spec(), config_of(2))
    config = config_of(2, moe_token_dispatcher_type="flex", moe_flex_dispatcher_backend="deepep")
    flex = built(spec(), config)
    assert type(flex) is moe_layer.MoELayer and type(flex.token_dispatcher._comm_manager) is Manager
    flex.load_state_dict(theirs.state_dict())
    found, want = (results(layer, rank, 3 + rank, torch.float32) for layer in (flex, theirs))
    return [torch.equal(a, b) for a, b in zip(found, want, strict=True)]


def test_models_out_of_reach_get_it_in_deepeps_place(ranks: Any) -> None:
    assert all(all(same) for same in ranks.run(2, _as_deepep))


def _shared(rank: int, group: Any) -> list[Any]:
    without_cuda()
    parallel(2)
    limits = Limits(max_tokens=100)
    layers = [built(use_moecomm(spec(), limits=limits), config_of(2)) for _ in range(2)]
    for layer in layers:
        results(layer, rank, 4, torch.float32)
    first, second = (layer.token_dispatcher._comm_manager._exchange for layer in layers)
    (buffer,) = first._buffers.values()
    told = [first is second, buffer.max_tokens]
    try:
        built(use_moecomm(spec(), limits=Limits(max_rows=1)), config_of(2))(torch.randn(4, 2, HIDDEN))
    except moecomm.BadInput as error:
        told.append(error.argument)
    return told


def test_layers_share_a_buffer_with_the_limits_that_were_given(ranks: Any) -> None:
    assert ranks.run(2, _shared) == [[True, 100, "max_rows"]] * 2


def _fails_on_one_rank(rank: int, group: Any, step: str, before: int) -> tuple[str, str]:
    """Return what rank 1 has caught, and what everybody's next call raised."""
    without_cuda()
    parallel(2)
    _, mine = pair({}, 2)
    manager = mine.token_dispatcher._comm_manager
    x = torch.randn(4, HIDDEN)
    chosen = torch.zeros(4, 2, EXPERTS // 2, dtype=torch.bool)
    chosen[:, :, 0] = True

    def dispatch() -> torch.Tensor:
        manager.setup_metadata(chosen, chosen.float())
        rows: torch.Tensor = manager.dispatch(x)
        return rows

    def twice() -> bool:
        return torch.equal(manager.combine(dispatch()), 2 * x)

    caught = later = ""
    assert all(twice() for _ in range(before))
    rows = dispatch() if step == "combine" else x
    try:
        if rank == 1:
            if step == "combine":
                manager.combine(rows.to_sparse())
            else:
                manager.token_indices = None
                manager.dispatch(x)
    except (moecomm.BadInput, AttributeError, RuntimeError) as error:
        caught = type(error).__name__
    try:
        manager.combine(rows) if step == "combine" and rank == 0 else twice()
    except moecomm.MoecommError as error:
        later = type(error).__name__
    torch.distributed.barrier()
    return caught, later


@pytest.mark.parametrize(("step", "before"), [("dispatch", 0), ("dispatch", 1), ("combine", 1)])
def test_a_call_that_fails_on_one_rank_ends_the_next_one_on_all(ranks: Any, step: str, before: int) -> None:
    (_, first), (caught, second) = ranks.run(2, _fails_on_one_rank, step, before)
    assert caught and first == second == "OutOfStep"


def test_the_manager_has_what_theirs_has() -> None:
    theirs = token_dispatcher._DeepepManager
    assert issubclass(Manager, token_dispatcher._DispatchManager) and not Manager.__abstractmethods__
    public = {name for name, f in inspect.getmembers(theirs, inspect.isfunction) if not name.startswith("_")}
    for name in {*public, "__init__"}:
        mine, want = (inspect.signature(getattr(cls, name)).parameters for cls in (Manager, theirs))
        assert list(mine)[: len(want)] == list(want), name
        assert [p.default for p in mine.values()][: len(want)] == [p.default for p in want.values()], name
    (base,) = TokenDispatcher.__bases__
    names = [name for name, f in vars(TokenDispatcher).items() if inspect.isfunction(f)]
    for name in names:
        mine, want = (list(inspect.signature(getattr(c, name)).parameters) for c in (TokenDispatcher, base))
        assert mine[: len(want)] == want, name
    theirs = inspect.signature(moe_layer.MoELayer).parameters
    inspect.signature(MoELayer).bind(**dict.fromkeys(theirs), limits=None)
    assert list(inspect.signature(MoELayer).parameters)[:4] == list(theirs)[:4]


def _module_of(spec: Any) -> Any:
    return spec.func if isinstance(spec, functools.partial) else spec.module


def _params_of(spec: Any) -> dict[str, Any]:
    """Return the arguments of a spec for its module, beside the submodules."""
    given = spec.keywords if isinstance(spec, functools.partial) else spec.params
    return {name: value for name, value in given.items() if name != "submodules"}


def _submodules_of(spec: Any) -> Any:
    return spec.keywords["submodules"] if isinstance(spec, functools.partial) else spec.submodules


def _spec_by_partial() -> ModuleSpec:
    """A layer's spec in the form of 0.18 and later, also where the installed version has another."""
    mlp = functools.partial(moe_layer.MoELayer, submodules=_submodules_of(spec()))
    return ModuleSpec(module=TransformerLayer, submodules=TransformerLayerSubmodules(mlp=mlp))


@pytest.mark.parametrize(
    "before",
    [
        get_gpt_layer_local_spec(num_experts=4, moe_grouped_gemm=False),
        _spec_by_partial(),
        functools.partial(TransformerLayer, submodules=_spec_by_partial().submodules),
    ],
    ids=["installed", "partial", "partial of partial"],
)
def test_a_spec_gets_the_layer_wherever_it_has_one_and_stays_as_it_was(before: Any) -> None:
    groups = object()
    after = use_moecomm(before, pg_collection=groups, limits=Limits(num_sms=8))
    first, mlp = (_submodules_of(layer).mlp for layer in (before, after))
    assert type(after) is type(before) and type(mlp) is type(first)
    assert _module_of(mlp) is MoELayer and _params_of(mlp) == {"pg_collection": groups, "limits": Limits(num_sms=8)}
    assert _module_of(first) is moe_layer.MoELayer and _params_of(first) == {}
    experts, wanted = (_submodules_of(m).experts for m in (mlp, first))
    assert experts == wanted or (experts.func, experts.keywords) == (wanted.func, wanted.keywords)
    assert _submodules_of(after).self_attention == _submodules_of(before).self_attention
    both = use_moecomm([before, before])
    assert [_module_of(_submodules_of(layer).mlp) for layer in both] == [MoELayer, MoELayer]
    with pytest.raises(moecomm.BadInput, match="MoELayer"):
        use_moecomm(get_gpt_layer_local_spec(num_experts=None))


def test_what_does_not_work_is_named() -> None:
    settings = {"moe_shared_expert_intermediate_size": 8, "moe_shared_expert_overlap": True}
    with pytest.raises(moecomm.Unsupported, match="moe_shared_expert_overlap"):
        MoELayer(config_of(2, **settings))
