"""TransformerEngine's expert-parallel interface over CPU ranks, against a mixture of experts in plain torch."""

from __future__ import annotations

import ast
import importlib.util
import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

import moecomm
from moecomm import formats
from moecomm.base.experts import experts_of
from moecomm.compat import te_ep
from tests.integrations.plain_moe import (
    EXPERTS,
    HIDDEN,
    TOKENS,
    TOPK,
    Tokens,
    experts,
    wanted,
    wanted_of_weights,
    weights_of,
)
from tests.little_room import little_room

RANKS = 2
ROOM = RANKS * TOKENS * TOPK + 100  # more than can arrive, padded too
CASES: dict[str, dict[str, Any]] = {
    "as many as arrive": {},
    "as many, padded": {"alignment": 8},
    "room for all": {"rows": ROOM},
    "room for all, padded": {"rows": ROOM, "alignment": 8},
    "room for all, or dropped": {"rows": ROOM, "alignment": 8, "drops": True},
}


def opened(group: Any, rows: int | None = None, alignment: int = 0, drops: bool = False) -> te_ep.EpBuffer:
    te_ep.ep_finalize()
    te_ep.ep_bootstrap(
        group,
        num_experts=EXPERTS,
        max_tokens_per_rank=TOKENS + 2,
        recv_capacity_per_rank=rows,
        hidden_dim=HIDDEN,
        num_topk=TOPK,
        max_num_sms=0,
        zero_copy=False,
        drop_on_overflow=drops,
    )
    return te_ep.EpBuffer(
        top_k=TOPK,
        max_tokens_per_rank=TOKENS + 2,
        recv_capacity_per_rank=rows,
        hidden_dim=HIDDEN,
        num_local_experts=EXPERTS // RANKS,
        alignment=alignment,
    )


def same_as_plain(rank: int, group: Any, settings: dict[str, Any]) -> list[bool]:
    buffer, mine, tokens = opened(group, **settings), experts_of(rank, EXPERTS, RANKS), Tokens(rank)
    weights, alignment = weights_of(slice(mine.start, mine.stop)), settings.get("alignment") or 1
    rows, row_weights, counts = te_ep.ep_dispatch(buffer, tokens.x, tokens.ids, tokens.scores)
    real = sum(Tokens(other).counts() for other in range(RANKS))[mine.start : mine.stop]
    assert torch.equal(counts, -(-real // alignment) * alignment) and counts.dtype is torch.int64
    assert len(rows) == len(row_weights) == settings.get("rows", int(counts.sum()))
    assert buffer.total_recv_tokens is not None and int(buffer.total_recv_tokens) == int(counts.sum())
    y = experts(rows, counts, weights) * row_weights.unsqueeze(1)
    out = te_ep.ep_combine(buffer, y, num_local_tokens=TOKENS)
    (out * tokens.seen).sum().backward()
    found = [out, tokens.x.grad, tokens.scores.grad]
    same = [torch.equal(a, b) for a, b in zip(found, wanted(tokens, weights_of(slice(None))), strict=True)]
    assert len(te_ep.ep_combine(buffer, y)) == TOKENS + 2
    same.append(torch.equal(weights.grad, wanted_of_weights(RANKS)[mine.start : mine.stop]))
    te_ep.ep_finalize()
    assert not te_ep.is_ep_bootstrapped()
    return same


def _in_given_memory(rank: int, group: Any, alignment: int) -> list[bool]:
    """Results are those of calls without it, and lie in it; what was there before is gone."""
    tokens, found = Tokens(rank), []
    for given in (False, True):
        buffer, x, scores = opened(group, ROOM, alignment), tokens.x.detach().requires_grad_(), tokens.scores.detach()
        scores.requires_grad_()
        memory = [torch.full((ROOM, *shape), torch.nan) if given else None for shape in ((HIDDEN,), (), (HIDDEN,))]
        dispatched = {"recv_tokens": memory[0], "recv_topk_weights": memory[1]}
        rows, weights, _ = te_ep.ep_dispatch(buffer, x, tokens.ids, scores, **dispatched)
        y = rows.detach().requires_grad_()
        out = te_ep.ep_combine(buffer, y, num_local_tokens=TOKENS, grad_out=memory[2])
        (out * tokens.seen).sum().backward()
        ((rows * rows).sum() + (weights * weights).sum()).backward()
        for tensor, result in zip(memory, (rows, weights, y.grad), strict=True):
            assert result is not None and (tensor is None or tensor.data_ptr() == result.data_ptr())
        found.append([rows.detach().clone(), weights.detach().clone(), out.detach(), y.grad, x.grad, scores.grad])
        te_ep.ep_finalize()
    return [torch.equal(a, b) for a, b in zip(*found, strict=True)]


@pytest.mark.parametrize("alignment", [0, 8])
def test_results_lie_in_the_callers_memory(ranks: Any, alignment: int) -> None:
    assert ranks.run(RANKS, _in_given_memory, alignment) == [[True] * 6] * RANKS


def _same(rank: int, group: Any) -> dict[str, list[bool]]:
    return {name: same_as_plain(rank, group, settings) for name, settings in CASES.items()}


def _same_in_chunks(rank: int, group: Any) -> tuple[list[bool], bool]:
    with little_room() as counted:
        return same_as_plain(rank, group, {"alignment": 8}), bool(counted)


def test_outputs_and_gradients_are_those_of_plain_torch(ranks: Any) -> None:
    for found in ranks.run(RANKS, _same):
        assert found == dict.fromkeys(CASES, [True] * 4)


def _starved(rank: int, group: Any, rows: int | None) -> list[float]:
    """No token picks an expert of the last rank, whose rows then have no graph."""
    buffer, x = opened(group, rows), torch.ones(TOKENS, HIDDEN, requires_grad=True)
    weights, ids = torch.ones(TOKENS, TOPK), torch.zeros(TOKENS, TOPK, dtype=torch.int64)
    found, _, counts = te_ep.ep_dispatch(buffer, x, ids, weights)
    y = 3 * found if int(counts.sum()) else torch.zeros_like(found)
    (te_ep.ep_combine(buffer, y, num_local_tokens=TOKENS).sum() + x.sum()).backward()
    te_ep.ep_finalize()
    assert x.grad is not None
    return x.grad.unique().tolist()


@pytest.mark.parametrize("rows", [None, ROOM])
def test_a_rank_whose_experts_got_no_token_has_its_backward_pass(ranks: Any, rows: int | None) -> None:
    assert ranks.run(RANKS, _starved, rows) == [[3.0 * TOPK + 1]] * RANKS


def test_rows_that_have_no_room_change_nothing(ranks: Any) -> None:
    assert ranks.run(RANKS, _same_in_chunks) == [([True] * 4, True)] * RANKS


def _dropped(rank: int, group: Any) -> tuple[bool, bool]:
    tokens, alignment, room = Tokens(rank), 4, 16
    buffer = opened(group, ROOM, alignment, drops=True)
    every, _, counts = te_ep.ep_dispatch(buffer, tokens.x, tokens.ids, tokens.scores)
    total = int(counts.sum())
    assert total > room
    few = opened(group, room, alignment, drops=True)
    rows, weights, counts = te_ep.ep_dispatch(few, tokens.x, tokens.ids, tokens.scores)
    assert few.total_recv_tokens is not None and int(few.total_recv_tokens) == total
    assert len(rows) == room and int(counts.sum()) == room
    out = te_ep.ep_combine(few, rows * weights.unsqueeze(1), num_local_tokens=TOKENS)
    out.sum().backward()
    assert tokens.scores.grad is not None
    return torch.equal(rows, every[:room]), bool(tokens.scores.grad.eq(0).any())


def test_rows_behind_the_capacity_are_dropped(ranks: Any) -> None:
    """Those kept are the first; how many there were is told, and what was dropped has no gradient."""
    assert ranks.run(RANKS, _dropped) == [(True, True)] * RANKS


def _refused(rank: int, group: Any) -> list[str]:
    """Return what is raised, in words; the last call on all ranks together."""

    def words(call: Callable[[], Any]) -> str:
        with pytest.raises(moecomm.MoecommError) as raised:
            call()
        return f"{type(raised.value).__name__} {raised.value}"

    sizes = (group, EXPERTS, TOKENS, HIDDEN, TOPK)
    found = [
        words(lambda: te_ep.EpBuffer(TOPK, TOKENS, HIDDEN, 4)),
        words(lambda: te_ep.ep_bootstrap(*sizes, zero_copy=True)),
        words(lambda: te_ep.ep_bootstrap(*sizes, drop_on_overflow=True)),
    ]
    buffer, tokens = opened(group, 8), Tokens(rank)
    given = (buffer, tokens.x, tokens.ids, tokens.scores)
    rows = torch.zeros(8, HIDDEN)
    local = EXPERTS // RANKS
    found += [
        words(lambda: te_ep.ep_bootstrap(*sizes)),
        words(lambda: te_ep.EpBuffer(TOPK, TOKENS, HIDDEN, local + 1, 8)),
        words(lambda: te_ep.EpBuffer(TOPK, TOKENS, HIDDEN, local)),
        words(lambda: te_ep.EpBuffer(TOPK, TOKENS, HIDDEN, local, 8, dispatch_fwd_quant_recipe=object())),
        words(lambda: te_ep.EpBuffer(TOPK, TOKENS, HIDDEN, local, 8, combine_bwd_quant_recipe=object())),
        words(lambda: te_ep.ep_dispatch(*given, recv_tokens=rows[:-1])),
        words(lambda: te_ep.ep_dispatch(*given, recv_topk_weights=rows[:, 0])),
        words(lambda: te_ep.ep_combine(buffer, rows)),
        words(lambda: te_ep.symm_mem_alloc((1,), torch.float32, group)),
        words(lambda: te_ep.is_symm_backed(rows)),
        words(lambda: te_ep.ep_dispatch(*given)),
    ]
    eager = opened(group)
    found.append(words(lambda: te_ep.ep_dispatch(eager, tokens.x, tokens.ids, tokens.scores, recv_tokens=rows)))
    return found


def test_what_is_not_supported_is_named(ranks: Any) -> None:
    names = [
        "BadInput EpBuffer",
        "Unsupported zero_copy",
        "BadInput drop_on_overflow",
        "BadInput ep_bootstrap",
        "BadInput num_local_experts",
        "BadInput recv_capacity_per_rank",
        "Unsupported dispatch_fwd_quant_recipe",
        "Unsupported combine_bwd_quant_recipe",
        "BadInput recv_tokens",
        "BadInput recv_topk_weights",
        "BadInput ep_combine",
        "Unsupported symm_mem_alloc",
        "Unsupported is_symm_backed",
        "TooManyRows recv_capacity_per_rank",
        "BadInput recv_tokens: got a tensor; want None, or recv_capacity_per_rank in ep_bootstrap",
    ]
    for found in ranks.run(RANKS, _refused):
        assert [words[: len(name)] for words, name in zip(found, names, strict=True)] == names


class _GroupedTensor(torch.Tensor):
    """The arguments of TransformerEngine's, and a tensor of their shape."""

    arguments: dict[str, Any]

    @staticmethod
    def __new__(cls: Any, shape: tuple[int, ...], dtype: torch.dtype, **arguments: Any) -> Any:
        made = torch.full(shape, torch.nan, dtype=dtype).as_subclass(cls)
        made.arguments = arguments
        return made

    __torch_function__ = torch._C._disabled_torch_function_impl


@contextmanager
def _as_transformer_engine() -> Iterator[Any]:
    """Stand in for its classes, in this process; gives the recipe of MXFP8."""
    recipe = type("MXFP8BlockScaling", (), {})
    quantizer = type("MXFP8Quantizer", (), {"__init__": lambda self, dtype, **how: vars(self).update(how, dtype=dtype)})
    parts: dict[str, dict[str, Any]] = {
        "transformer_engine.common.recipe": {"MXFP8BlockScaling": recipe},
        "transformer_engine.pytorch.tensor.mxfp8_tensor": {"MXFP8Quantizer": quantizer},
        "transformer_engine.pytorch.tensor.grouped_tensor": {"GroupedTensor": _GroupedTensor},
        "transformer_engine_torch": {
            "DType": type("DType", (), {"kFloat8E4M3": "e4m3"}),
            "splits_to_offsets": lambda counts, columns: torch.nn.functional.pad(counts.cumsum(0) * columns, (1, 0)),
        },
    }
    made: dict[str, ModuleType] = {}
    for name, values in parts.items():
        while name:
            module = made.setdefault(name, ModuleType(name))
            module.__path__ = []
            vars(module).update(values)
            name, values = name.rpartition(".")[0], {}
    before = {name: sys.modules.get(name) for name in made}
    sys.modules.update(made)
    yield recipe()
    for name, module in before.items():
        if module is None:
            del sys.modules[name]
        else:
            sys.modules[name] = module


WIDE = 256  # columns
ROOM_WIDE = EXPERTS // RANKS * 128 + 40


def _wide(rank: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Tokens, gradients of outputs, and ids of a rank."""
    g = torch.Generator().manual_seed(rank + 50)
    x, grad = (torch.randn(TOKENS, WIDE, generator=g).bfloat16() for _ in range(2))
    return x, grad, Tokens(rank).ids


def _by_expert(of: int, mine: range, alignment: int, length: int) -> list[torch.Tensor]:
    """`_wide(...)[of]` by expert, cast, with zeros between and behind: values and scales, as bytes."""
    sent = [(formats.quantize(_wide(rank)[of], "mxfp8"), _wide(rank)[2]) for rank in range(RANKS)]
    parts: list[list[torch.Tensor]] = [[], []]
    for expert in mine:
        rows = 0
        for cast, ids in sent:
            picked = (ids == expert).any(dim=1)
            rows += int(picked.sum())
            for at, tensor in enumerate(cast):
                assert tensor is not None
                parts[at].append(tensor.view(torch.uint8)[picked])
        for part in parts:
            part.append(part[-1].new_zeros((-rows % alignment, part[-1].shape[1])))
    return [torch.cat([*p, p[0].new_zeros((length - sum(map(len, p)), p[0].shape[1]))]) for p in parts]


class _Grads(torch.autograd.Function):
    """Experts that give what they are told, and their gradients as they come, as plain numbers."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, y: torch.Tensor, seen: list[Any]) -> torch.Tensor:
        ctx.seen = seen
        return y.clone()

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        ctx.seen.append(grad)
        if not isinstance(grad, _GroupedTensor):
            return grad, None, None
        values = grad.arguments["data"].view(torch.float8_e4m3fn).view(-1, WIDE)
        scales = grad.arguments["scale_inv"].view(torch.float8_e8m0fnu).view(-1, WIDE // 32)
        return formats.dequantize(values, scales, "mxfp8", dtype=torch.bfloat16), None, None


def _mxfp8(rank: int, group: Any, *how: Any) -> list[bool]:
    with _as_transformer_engine() as recipe:
        return _mxfp8_step(rank, group, recipe, *how)


def _mxfp8_step(
    rank: int, group: Any, recipe: Any, rows: int | None, forward: bool, backward: bool, given_memory: bool = False
) -> list[bool]:
    te_ep.ep_finalize()
    te_ep.ep_bootstrap(group, EXPERTS, TOKENS, WIDE, TOPK, rows)
    sizes: dict[str, Any] = {"recv_capacity_per_rank": rows, "alignment": 128}
    local = EXPERTS // RANKS
    recipes = {"dispatch_fwd_quant_recipe": forward, "combine_bwd_quant_recipe": backward}
    given = {name: recipe for name, wanted in recipes.items() if wanted}
    for wrong in ({"hidden_dim": 96}, {"alignment": 64}):
        with pytest.raises(moecomm.BadInput, match=next(iter(wrong))):
            te_ep.EpBuffer(
                **{"top_k": TOPK, "max_tokens_per_rank": TOKENS, "hidden_dim": WIDE, **sizes}
                | {"num_local_experts": local, **given, **wrong}
            )
    buffer = te_ep.EpBuffer(TOPK, TOKENS, WIDE, local, **sizes, **given)
    mine, (x, grad, ids) = experts_of(rank, EXPERTS, RANKS), _wide(rank)
    x.requires_grad_()
    of_row = WIDE + WIDE // 32
    memory = [torch.full((ROOM_WIDE * of_row + 1,), 7, dtype=torch.uint8) if given_memory else None for _ in range(2)]
    got, _, counts = te_ep.ep_dispatch(buffer, x, ids, torch.ones(ids.shape), recv_tokens=memory[0])
    length = int(counts.sum()) if rows is None else rows
    same, seen = [], []

    def is_grouped(found: Any, of: int) -> bool:
        values, scales = _by_expert(of, mine, 128, length)
        about = found.arguments
        assert found.shape == (length, WIDE) and found.dtype is torch.bfloat16
        assert about["num_tensors"] == local and torch.equal(about["first_dims"], counts)
        assert about["tensor_offsets"].tolist() == [0, *(counts.cumsum(0) * WIDE).tolist()]
        assert vars(about["quantizer"]) == {"dtype": "e4m3", "rowwise": True, "columnwise": False}
        return torch.equal(about["data"], values.flatten()) and torch.equal(about["scale_inv"], scales.flatten())

    assert isinstance(got, _GroupedTensor) == forward and len(got) == length
    if forward:
        same.append(is_grouped(got, 0))
    values, scales = _by_expert(0, mine, 128, length)
    whole = values.view(torch.float8_e4m3fn), scales.view(torch.float8_e8m0fnu)
    y = formats.dequantize(*whole, "mxfp8", dtype=torch.bfloat16)
    out = te_ep.ep_combine(buffer, _Grads.apply(got, y, seen), num_local_tokens=TOKENS, grad_out=memory[1])
    picks = (ids >= 0).sum(dim=1, keepdim=True)
    sent = formats.dequantize(*formats.quantize(x.detach(), "mxfp8"), "mxfp8")
    same.append(torch.equal(out.detach(), (picks * sent).bfloat16()))
    out.backward(grad)
    assert isinstance(seen[0], _GroupedTensor) == backward
    if backward:
        same.append(is_grouped(seen[0], 1))
        back = formats.dequantize(*formats.quantize(grad, "mxfp8"), "mxfp8")
        assert x.grad is not None
        same.append(torch.equal(x.grad, (picks * back).bfloat16()))
    for tensor, grouped in zip(memory, (got, seen[0]), strict=True):
        if tensor is not None:
            assert tensor.data_ptr() == grouped.arguments["data"].data_ptr() and int(tensor[-1]) == 7
            assert tensor.data_ptr() + length * WIDE == grouped.arguments["scale_inv"].data_ptr()
    te_ep.ep_finalize()
    return same


def test_mxfp8_rows_and_scales_lie_in_the_callers_memory(ranks: Any) -> None:
    assert ranks.run(RANKS, _mxfp8, ROOM_WIDE, True, True, True) == [[True] * 4] * RANKS


@pytest.mark.parametrize("rows", [None, ROOM_WIDE])
@pytest.mark.parametrize(("forward", "backward"), [(True, True), (True, False), (False, True)])
def test_mxfp8_rows_are_grouped_tensors(ranks: Any, rows: int | None, forward: bool, backward: bool) -> None:
    """With stand-ins for TransformerEngine's classes, which need a GPU."""
    want = [True] * (1 + forward + 2 * backward)
    assert ranks.run(RANKS, _mxfp8, rows, forward, backward) == [want] * RANKS


# TransformerEngine 2.20.2, transformer_engine/pytorch/ep.py: the names, in their order.
SIGNATURES = {
    "ep_bootstrap": "ep_group num_experts max_tokens_per_rank hidden_dim num_topk recv_capacity_per_rank max_num_sms"
    " zero_copy drop_on_overflow max_token_dtype",
    "is_ep_bootstrapped": "",
    "ep_finalize": "",
    "ep_dispatch": "buffer tokens topk_idx topk_weights recv_tokens recv_topk_weights",
    "ep_combine": "buffer expert_out num_local_tokens grad_out",
    "is_symm_backed": "t",
    "EpBuffer": "top_k max_tokens_per_rank hidden_dim num_local_experts recv_capacity_per_rank alignment payload_dtype"
    " device dispatch_fwd_quant_recipe combine_bwd_quant_recipe",
}


@pytest.mark.parametrize("name", SIGNATURES)
def test_a_call_is_written_as_there(name: str) -> None:
    assert list(inspect.signature(getattr(te_ep, name)).parameters) == SIGNATURES[name].split()


def test_an_installed_transformer_engine_has_these_calls() -> None:
    found = importlib.util.find_spec("transformer_engine")
    paths = [Path(folder, "pytorch", "ep.py") for folder in (found and found.submodule_search_locations) or []]
    if not paths or not paths[0].is_file():
        pytest.skip("needs transformer-engine, installed, with pytorch/ep.py; its source is read")
    theirs: dict[str, ast.FunctionDef] = {}
    for node in ast.parse(paths[0].read_text()).body:
        if isinstance(node, ast.FunctionDef):
            theirs[node.name] = node
        if isinstance(node, ast.ClassDef) and node.name == "EpBuffer":
            theirs["EpBuffer"] = next(f for f in node.body if isinstance(f, ast.FunctionDef) and f.name == "__init__")
    for name, ours in SIGNATURES.items():
        arguments = theirs[name].args
        given = [a.arg for a in (*arguments.args, *arguments.kwonlyargs) if a.arg != "self"]
        assert given == ours.split(), name


def test_it_takes_the_place_of_the_installed_one(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.split(".")[0] == "transformer_engine"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "transformer_engine", None)  # type: ignore[arg-type]
    with pytest.raises(moecomm.Unsupported, match=r"transformer_engine\.pytorch"):
        te_ep.install_as_te_ep()
    package = ModuleType("transformer_engine.pytorch")
    monkeypatch.setitem(sys.modules, "transformer_engine", ModuleType("transformer_engine"))
    monkeypatch.setitem(sys.modules, "transformer_engine.pytorch", package)
    monkeypatch.setitem(sys.modules, "transformer_engine.pytorch.ep", ModuleType("transformer_engine.pytorch.ep"))
    te_ep.install_as_te_ep()
    assert package.ep is te_ep and sys.modules["transformer_engine.pytorch.ep"] is te_ep
