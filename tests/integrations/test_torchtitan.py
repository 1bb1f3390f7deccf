"""torchtitan's dispatcher contract over CPU ranks against a mixture of experts in plain torch, over a stub."""

from __future__ import annotations

import ast
import importlib.util
import inspect
import math
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

import moecomm
from moecomm.base.experts import experts_of
from moecomm.ops import chunks
from tests.integrations import torchtitan_stub as stub
from tests.integrations.plain_moe import (
    EXPERTS,
    HIDDEN,
    RANKS,
    TOKENS,
    TOPK,
    Tokens,
    experts,
    wanted,
    wanted_of_weights,
    weights_of,
)
from tests.little_room import little_room

INSTALLED = importlib.util.find_spec("torchtitan")
SIZES = {"num_experts": EXPERTS, "top_k": TOPK}


@pytest.fixture
def ours() -> Iterator[Any]:
    with stub.stubbed() as found:
        yield found


def run(dispatcher: Any, tokens: Tokens, weights: torch.Tensor) -> list[torch.Tensor]:
    """The output, and the gradients of tokens and scores; that of the weights is in weights.grad."""
    tokens.x.grad = tokens.scores.grad = None
    rows, counts, metadata = dispatcher.dispatch(*tokens.given())
    out = dispatcher.combine(experts(rows, counts, weights), metadata, tokens.x)
    (out * tokens.seen).sum().backward()
    assert tokens.x.grad is not None and tokens.scores.grad is not None
    return [out.detach(), tokens.x.grad, tokens.scores.grad]


def on_ranks(body: Callable[[int, Any], Any]) -> list[Any]:
    with ThreadPoolExecutor(RANKS) as pool:
        groups = moecomm.local_ranks(RANKS)
        return list(pool.map(lambda group: body(group.rank, stub.Mesh(group, RANKS)), groups))


def built(ours: Any, mesh: Any, **settings: Any) -> Any:
    dispatcher = ours.TokenDispatcher.Config(**SIZES, **settings).build()
    dispatcher.wire_meshes(ep_mesh=mesh)
    return dispatcher


CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "padded": {"pad_multiple": 8},
    "unsummed": {"wire": "rows"},
    "room for all": {"capacity_factor": math.inf},
    "room for all, padded": {"capacity_factor": math.inf, "pad_multiple": 8},
    "opened before": {"dtype": "float32", "hidden_dim": HIDDEN, "num_max_tokens_per_rank": 2 * TOKENS},
}


def _same(ours: Any, settings: dict[str, Any]) -> list[list[bool]]:
    all_weights = wanted_of_weights()

    def body(rank: int, mesh: Any) -> list[bool]:
        mine = experts_of(rank, EXPERTS, RANKS)
        dispatcher, tokens = built(ours, mesh, **settings), Tokens(rank)
        weights = weights_of(slice(mine.start, mine.stop))
        assert weights.any() and all_weights.any()
        found = run(dispatcher, tokens, weights)
        same = [torch.equal(a, b) for a, b in zip(found, wanted(tokens, weights_of(slice(None))), strict=True)]
        return [*same, torch.equal(weights.grad, all_weights[mine.start : mine.stop])]

    return on_ranks(body)


@pytest.mark.parametrize("settings", CASES.values(), ids=CASES)
def test_outputs_and_gradients_are_those_of_plain_torch(ours: Any, settings: dict[str, Any]) -> None:
    assert _same(ours, settings) == [[True] * 4] * RANKS


@pytest.mark.parametrize("name", ["plain", "unsummed", "padded"])
def test_rows_that_have_no_room_change_nothing(ours: Any, name: str) -> None:
    with little_room(), patch.object(chunks, "dispatch", wraps=chunks.dispatch) as chunked:
        assert _same(ours, CASES[name]) == [[True] * 4] * RANKS
    assert chunked.call_count == RANKS


def test_rows_of_an_expert_are_padded_with_zeros(ours: Any) -> None:
    def body(rank: int, mesh: Any) -> list[int]:
        dispatcher = built(ours, mesh, pad_multiple=8)
        rows, counts, metadata = dispatcher.dispatch(*Tokens(rank).given())
        ends = counts.cumsum(0).tolist()
        for expert, count, end in zip(experts_of(rank, EXPERTS, RANKS), counts.tolist(), ends, strict=True):
            real = sum(int(Tokens(other).counts()[expert]) for other in range(RANKS))
            assert count == -(-real // 8) * 8
            group = rows[end - count : end]
            assert group[:real].any(1).all() and not group[real:].any()
        assert not rows[ends[-1] :].any()
        dispatcher.combine(rows, metadata, None)
        return counts.tolist()

    for counts in on_ranks(body):
        assert all(count % 8 == 0 for count in counts) and any(counts)


def test_more_tokens_than_at_first(ours: Any) -> None:
    """The backward pass of the first comes after the second has opened a larger Buffer."""

    def body(rank: int, mesh: Any) -> list[bool]:
        dispatcher, mine = built(ours, mesh), experts_of(rank, EXPERTS, RANKS)
        weights = weights_of(slice(mine.start, mine.stop))
        few = Tokens(rank, 2)
        rows, counts, metadata = dispatcher.dispatch(*few.given())
        many, every = Tokens(rank, 40), weights_of(slice(None))
        same = [torch.equal(a, b) for a, b in zip(run(dispatcher, many, weights), wanted(many, every), strict=True)]
        out = dispatcher.combine(experts(rows, counts, weights), metadata, few.x)
        (out * few.seen).sum().backward()
        found = [out.detach(), few.x.grad, few.scores.grad]
        return same + [torch.equal(a, b) for a, b in zip(found, wanted(few, every), strict=True)]

    assert on_ranks(body) == [[True] * 6] * RANKS


def test_layers_of_the_same_sizes_share_a_buffer(ours: Any) -> None:
    def body(rank: int, mesh: Any) -> bool:
        first, second = (built(ours, mesh, **CASES["opened before"]) for _ in range(2))
        (one,), (other,) = first._buffers.values(), second._buffers.values()
        return one is other and one.max_tokens == 2 * TOKENS and one.dtype is torch.float32

    assert on_ranks(body) == [True] * RANKS


@pytest.mark.parametrize("mesh", [None, stub.Mesh(None, 1)], ids=["no mesh", "one rank"])
def test_without_expert_parallelism_it_is_the_local_dispatcher(ours: Any, mesh: Any) -> None:
    dispatcher, tokens = built(ours, mesh, **CASES["opened before"]), Tokens(0)
    weights, every = weights_of(slice(None)), weights_of(slice(None))
    found = run(dispatcher, tokens, weights)
    assert all(torch.equal(a, b) for a, b in zip(found, wanted(tokens, every), strict=True))
    assert torch.equal(weights.grad, every.grad) and not dispatcher._buffers


def test_too_many_rows_for_a_capacity_are_an_error_on_every_rank(ours: Any) -> None:
    def body(rank: int, mesh: Any) -> None:
        tokens = Tokens(rank, 400)
        tokens.ids[:] = torch.arange(TOPK)  # all to two of the ranks
        with pytest.raises(moecomm.TooManyRows):
            built(ours, mesh, capacity_factor=1.0, timeout_s=30).dispatch(*tokens.given())

    on_ranks(body)


def _compiled(rank: int, group: Any) -> list[bool]:
    with stub.stubbed() as ours:
        ranks = group.size()
        mine = experts_of(rank, EXPERTS, ranks)
        settings = CASES["opened before"] | {"capacity_factor": math.inf}
        dispatcher, tokens = built(ours, stub.Mesh(group, ranks), **settings), Tokens(rank)
        scale = torch.arange(1.0, EXPERTS + 1)[mine.start : mine.stop]

        @torch.compile(fullgraph=True, backend="aot_eager")
        def layer(x: torch.Tensor, scores: torch.Tensor, ids: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
            rows, arrived, metadata = dispatcher.dispatch(x, scores, ids, counts)
            ends, row = arrived.cumsum(0), torch.arange(len(rows))
            expert = (row.unsqueeze(1) >= ends).sum(1).clamp(max=len(scale) - 1)
            out: torch.Tensor = dispatcher.combine(rows * scale[expert].unsqueeze(1), metadata, x)
            return out

        out = layer(*tokens.given())
        (out * tokens.seen).sum().backward()
        factor = (tokens.scores.detach() * (tokens.ids + 1)).sum(1, keepdim=True)
        x = tokens.x.detach()
        of_scores = (x * tokens.seen).sum(1, keepdim=True) * (tokens.ids + 1)
        assert tokens.x.grad is not None and tokens.scores.grad is not None
        same = [torch.equal(out, x * factor), torch.equal(tokens.x.grad, tokens.seen * factor)]
        with pytest.raises(Exception, match="set dtype, hidden_dim and num_max_tokens_per_rank"):
            torch.compile(built(ours, stub.Mesh(group, ranks)).dispatch, fullgraph=True, backend="eager")(
                *tokens.given()
            )
        return [*same, torch.equal(tokens.scores.grad, of_scores)]


def test_a_graph_of_torch_compile_holds_both_rounds(ranks: Any) -> None:
    assert ranks.run(2, _compiled) == [[True] * 3] * 2


def test_the_override_takes_over_what_a_configuration_says(ours: Any) -> None:
    theirs = stub.HybridEPTokenDispatcher.Config(**SIZES, pad_multiple=32, hidden_dim=64, num_max_tokens_per_rank=512)
    options = {"dtype": "bfloat16", "capacity_factor": 2.0, "timeout_s": 5.0, "backend": "host", "wire": "rows"}
    found = ours.use_moecomm(theirs, **options)
    assert type(found) is ours.TokenDispatcher.Config
    want = {"pad_multiple": 32, "hidden_dim": 64, "num_max_tokens_per_rank": 512}
    assert all(getattr(found, name) == value for name, value in {**SIZES, **want, **options}.items())
    assert type(found.build()) is ours.TokenDispatcher
    for wrong in ({"dtype": "float8"}, {"wire": "row"}):
        with pytest.raises(moecomm.BadInput, match=next(iter(wrong))):
            ours.use_moecomm(theirs, **wrong).build()


def test_a_torchtitan_without_the_interface_is_named() -> None:
    with stub.stubbed(), stub.without("override"), pytest.raises(moecomm.Unsupported, match=r"torchtitan .* 0\.3\.0"):
        importlib.import_module("moecomm.integrations.torchtitan")


def _source(module: str) -> ast.Module:
    if INSTALLED is None or not INSTALLED.submodule_search_locations:
        pytest.skip("needs torchtitan, installed; its source is read")
    path = Path(next(iter(INSTALLED.submodule_search_locations))).joinpath(*module.split(".")[1:]).with_suffix(".py")
    return ast.parse(path.read_text())


@pytest.mark.parametrize("kind", [stub.LocalTokenDispatcher, stub.BaseEPTokenDispatcher])
def test_the_stub_has_the_signatures_of_torchtitan(kind: type) -> None:
    (found,) = [
        node for node in _source(stub.DISPATCHERS).body if isinstance(node, ast.ClassDef) and node.name == kind.__name__
    ]
    theirs = {node.name: node for node in found.body if isinstance(node, ast.FunctionDef)}
    for name, function in vars(kind).items():
        if inspect.isfunction(function):
            arguments = theirs[name].args
            given = [argument.arg for argument in (*arguments.args, *arguments.kwonlyargs)]
            assert list(inspect.signature(function).parameters) == given, name
    abstract = {name for name, node in theirs.items() if "abstractmethod" in ast.unparse(node)}
    assert abstract == getattr(kind, "__abstractmethods__", frozenset())


def test_the_overrides_of_torchtitan_are_called_as_the_stubs_are() -> None:
    theirs = {node.name: node.args for node in _source(stub.OVERRIDES).body if isinstance(node, ast.FunctionDef)}
    assert {"target", "fqns", "description", "exact"} == {arg.arg for arg in theirs["override"].kwonlyargs}
    assert [arg.arg for arg in theirs["derive"].args] == ["source", "target_cls"] and theirs["derive"].kwarg
