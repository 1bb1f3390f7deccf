"""What ranks must pass alike: for each call and each of its options, one rank differs, and every rank is told by name.

docs/failures.md has the list.  An option that may differ between ranks says so where it is defined, in NOT_COMPARED.
Settings of openings are in test_processes.py, operators of moecomm.overlap in overlap/test_failures.py.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import moecomm
from moecomm import ExpertWeights, Mismatch, Placement, fused, ops
from moecomm.combine import options as combining
from moecomm.dispatch import options as dispatching
from moecomm.fused import options as layers
from moecomm.ranks.settings import Settings
from moecomm.rounds import signature

from .backends.conftest import run_ranks
from .conftest import Ranks

PAGE = Path(__file__).parents[1] / "docs/maintainers/what_ranks_compare.md"
T, K, E, HIDDEN, INNER = 4, 2, 4, 128, 32
SIZES: dict[str, Any] = {"hidden": HIDDEN, "num_experts": E, "topk": K, "max_tokens": 8, "device": "cpu"}
X = torch.linspace(-1, 1, T * HIDDEN).view(T, HIDDEN).bfloat16()
IDS = torch.tensor([[0, 2], [1, 3], [2, 0], [3, 1]])
WEIGHTS = torch.ones(T, K)
U8, SCALES = torch.zeros(T, 8, dtype=torch.uint8), torch.ones(T, 1)
INTS, FLOATS = torch.arange(T), torch.arange(T).double()

Case = tuple[dict[str, Any], dict[str, Any], str]  # of rank 0, of the others, the field that is named


def alike(call: Callable[[moecomm.Buffer, int], Any], **sizes: Any) -> list[Any]:
    """Return what a call returned or raised on each of two ranks."""

    def body(group: Any) -> Any:
        with moecomm.Buffer(group, **{**SIZES, **sizes}, timeout_s=20) as buffer:
            return call(buffer, group.rank)

    return run_ranks(2, body)


def require_mismatch(found: list[Any], name: str) -> None:
    """Of every rank, with that name, and with the values the right way round."""
    assert [type(error) for error in found] == [Mismatch, Mismatch], found
    assert [error.field for error in found] == [name, name], found
    assert (found[0].mine, found[0].theirs) == (found[1].theirs, found[1].mine) and found[0].mine != found[0].theirs
    assert [error.rank for error in found] == [1, 0]


def two(option: str, one: Any, other: Any, **common: Any) -> Case:
    return {**common, option: one}, {**common, option: other}, option


DISPATCHES: dict[str, Case] = {
    "layout": two("layout", "expert", "flat"),
    "expert_alignment": two("expert_alignment", 1, 8),
    "expert_alignment, large": two("expert_alignment", 1, 1 << 13),
    "expert_alignment, of bytes": two("expert_alignment", 1, 2, x=U8),
    "expert_alignment, large, of bytes": two("expert_alignment", 1024, 2048, x=U8),
    "quantize": two("quantize", None, "fp8"),
    "quantize, of bytes": two("quantize", "fp8", "mxfp8"),
    "scale_format": two("scale_format", "fp32", "ue8m0", quantize="fp8"),
    "scale_layout": two("scale_layout", "row", "column", quantize="fp8"),
    "scale_layout, of bytes": two("scale_layout", "row", "swizzled", quantize="mxfp8"),
    "type of x": ({"x": X}, {"x": X.view(torch.int16)}, "dtype"),
    "type of bytes": ({"x": U8}, {"x": U8.view(torch.int8)}, "dtype"),
    "type of values with scales": (
        {"x": X.to(torch.float8_e4m3fn), "scales": SCALES},
        {"x": X.to(torch.int8), "scales": SCALES},
        "dtype",
    ),
    "width of x": ({"x": U8[:, :5]}, {"x": U8}, "row bytes"),
    "type of scales": ({"scales": SCALES}, {"scales": SCALES.int()}, "scales"),
    "type of scales of bytes": ({"x": U8, "scales": SCALES}, {"x": U8, "scales": SCALES.int()}, "scales"),
    "scales or none": ({"scales": SCALES}, {}, "scales"),
    "width of scales": ({"scales": SCALES}, {"scales": SCALES.repeat(1, 2)}, "scale bytes"),
    "width of scales of bytes": ({"x": U8, "scales": U8[:, :1]}, {"x": U8, "scales": U8[:, :3]}, "scale bytes"),
    "type of extras": ({"extras": (INTS,)}, {"extras": (FLOATS,)}, "extras"),
    "width of extras": ({"extras": (U8[:, :1],)}, {"extras": (U8[:, :3],)}, "extras"),
    "shape of extras": ({"extras": (U8,)}, {"extras": (U8.view(T, 2, 4),)}, "extras"),
    "order of extras": ({"extras": (INTS, FLOATS)}, {"extras": (FLOATS, INTS)}, "extras"),
    "extras beside a format": ({"extras": (INTS,), "quantize": "nvfp4"}, {"quantize": "nvfp4"}, "extras"),
    "type of topk_idx": ({"topk_idx": IDS}, {"topk_idx": IDS.int()}, "topk_idx dtype"),
    "scale of a tensor": two("x_global_scale", 0.5, 2.0, quantize="fp8_tensor"),
    "scale of a tensor, in one": (
        {"quantize": "nvfp4", "x_global_scale": torch.tensor([0.5])},
        {"quantize": "nvfp4"},  # 1
        "x_global_scale",
    ),
    "scale beside extras": two("x_global_scale", 0.5, 2.0, quantize="nvfp4", extras=(INTS,)),
}


def dispatched(buffer: moecomm.Buffer, **given: Any) -> moecomm.Routed:
    return buffer.dispatch(**{"x": X, "topk_idx": IDS, **given})


@pytest.mark.parametrize("name", DISPATCHES)
@pytest.mark.parametrize("call", ["dispatch", "dispatch_begin", "again"])
def test_a_dispatch(name: str, call: str) -> None:
    """Also after a call that was alike, when plans are known."""
    one, other, field = DISPATCHES[name]

    def act(buffer: moecomm.Buffer, rank: int) -> None:
        if call == "dispatch_begin":
            buffer.dispatch_begin(**{"x": X, "topk_idx": IDS, **(one if rank == 0 else other)})
            return
        for given in ((one, one), (other, other)) if call == "again" else ():
            dispatched(buffer, **given[rank])
        dispatched(buffer, **(one if rank == 0 else other))

    require_mismatch(alike(act), field)


def test_a_repeat() -> None:
    def act(buffer: moecomm.Buffer, rank: int) -> None:
        handle = dispatched(buffer).handle
        buffer.dispatch(X, **({"topk_idx": IDS} if rank else {"handle": handle}))

    require_mismatch(alike(act), "handle given")


def test_a_repeat_by_another_scale() -> None:
    def act(buffer: moecomm.Buffer, rank: int) -> None:
        given: dict[str, Any] = {"quantize": "nvfp4"}
        handle = dispatched(buffer, **given, x_global_scale=2.0).handle
        buffer.dispatch(X, handle=handle, **given, x_global_scale=3.0)  # of this call
        buffer.dispatch(X, handle=handle, **given, x_global_scale=4.0 + rank)

    require_mismatch(alike(act), "x_global_scale")


def test_the_scale_of_a_tensor_changes_from_call_to_call() -> None:
    """No plan for each value."""

    def act(buffer: moecomm.Buffer, rank: int) -> int:
        for scale in (0.5, 2.0, 3.0):
            dispatched(buffer, quantize="nvfp4", x_global_scale=scale)
        return len([plan for plans in buffer.rounds.plans.table.values() for plan in plans])

    assert alike(act) == [1, 1]


COMBINES: dict[str, Case] = {
    "weighted": two("weighted", True, False),
    "wire": two("wire", None, "exact"),
    "wire, unsummed": two("wire", None, "rows"),
    "type of y": ({"y": torch.bfloat16}, {"y": torch.float32}, "dtype"),
    "topk_weights": ({"topk_weights": WEIGHTS}, {}, "topk_weights given"),
    "weight_grads": ({"weight_grads": True}, {}, "weight_grads given"),
}


def combined(buffer: moecomm.Buffer, **given: Any) -> Any:
    routed = dispatched(buffer, topk_weights=WEIGHTS)
    if given.pop("weight_grads", False):
        given["weight_grads"] = torch.zeros(len(routed.x))
    return buffer.combine(routed.x.to(given.pop("y", torch.bfloat16)), routed.handle, **given)


@pytest.mark.parametrize("name", COMBINES)
def test_a_combine(name: str) -> None:
    one, other, field = COMBINES[name]
    require_mismatch(alike(lambda buffer, rank: combined(buffer, **(other if rank else one))), field)


def plain_experts(buffer: moecomm.Buffer) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.zeros(E // 2, 2 * INNER, HIDDEN).bfloat16(), torch.zeros(E // 2, HIDDEN, INNER).bfloat16()


def cast(weights: tuple[torch.Tensor, torch.Tensor], how: str | None) -> tuple[Any, Any]:
    casts = {"fp8": fused.quantize_weights, "int8": lambda w: fused.quantize_channels(w, torch.int8)}
    return tuple(map(casts[how], weights)) if how is not None else weights  # type: ignore[return-value]


LAYERS: dict[str, Case] = {
    "wire": two("wire", None, "fp8"),
    "weights in FP8": ({"cast": "fp8"}, {}, "quantize"),
    "weights in FP8 and INT8": ({"cast": "fp8"}, {"cast": "int8"}, "call"),
}


@pytest.mark.parametrize("name", LAYERS)
def test_a_layer(name: str) -> None:
    one, other, field = LAYERS[name]

    def act(buffer: moecomm.Buffer, rank: int) -> None:
        given = dict(other if rank else one)
        buffer.moe(X, IDS, WEIGHTS, *cast(plain_experts(buffer), given.pop("cast", None)), **given)

    require_mismatch(alike(act), field)


COPIED: dict[str, Case] = {
    "balance": two("balance", None, "replicate"),
    "activation": two("activation", "swiglu", "geglu"),
    "activation_limit": ({}, {"activation_limit": 8.0}, "activation"),
    "activation_alpha": (
        {"activation": "swigluoai", "activation_alpha": 1.0},
        {"activation": "swigluoai", "activation_alpha": 2.0},
        "activation",
    ),
    "interleaved": two("interleaved", False, True),
    "w13_bias": two("w13_bias", None, "b13"),
    "w2_bias": two("w2_bias", None, "b2"),
    "another tensor": two("w2", "w2", "v2"),
}
FIELDS_OF_COPIES = {"w13_bias": "experts", "w2_bias": "experts", "w2": "experts"}


@pytest.mark.parametrize("name", COPIED)
def test_a_layer_that_copies_experts(name: str) -> None:
    """A copy is computed by the rank that has it, as that rank was told."""
    one, other, field = COPIED[name]
    placement = Placement([[0, 1, -1], [2, 3, -1]], choice="balanced", num_experts=E)

    def act(buffer: moecomm.Buffer, rank: int) -> None:
        square = {"w2": (HIDDEN, INNER), "v2": (HIDDEN, INNER)}
        biases = {"b13": (2 * INNER,), "b2": (HIDDEN,)}
        weights = ExpertWeights(buffer, {"w13": (2 * INNER, HIDDEN), **square, **biases}, dtype=torch.bfloat16)
        for tensor in (*square, *biases, "w13"):
            weights[tensor].zero_()
        given: dict[str, Any] = {"balance": "replicate", "w2": "w2", **(other if rank else one)}
        for argument in ("w2", "w13_bias", "w2_bias"):
            given[argument] = None if given.get(argument) is None else weights[given[argument]]
        buffer.moe(X, IDS, WEIGHTS, weights["w13"], **given)

    require_mismatch(alike(act, placement=placement), FIELDS_OF_COPIES.get(field, field))


OPERATORS: dict[str, Case] = {
    "layer": two("layer", 1, 2),
    "quantize": two("quantize", "mxfp8", "nvfp4"),
    "x_global_scale": two("x_global_scale", 0.5, 2.0, quantize="nvfp4"),
    "gradients": two("wants", False, True),
    "routing weights' gradients": two("wants_weights", False, True, wants=True),
}
FIELDS_OF_OPERATORS = {"wants": "gradients wanted", "wants_weights": "weight_grads given"}


@pytest.mark.parametrize("name", OPERATORS)
def test_an_operator(name: str) -> None:
    one, other, field = OPERATORS[name]

    def act(buffer: moecomm.Buffer, rank: int) -> None:
        given = dict(other if rank else one)
        wants, of_weights = given.pop("wants", False), given.pop("wants_weights", False)
        x, weights = X.clone().requires_grad_(wants), WEIGHTS.clone().requires_grad_(of_weights)
        ops.dispatch(buffer, x, IDS, weights, **given)

    require_mismatch(alike(act), FIELDS_OF_OPERATORS.get(field, field))


PER_RANK: dict[str, dict[str, tuple[dict[str, Any], dict[str, Any]]]] = {
    "dispatch": {
        "num_sms": ({"num_sms": 1}, {"num_sms": 2}),
        "check_weights": ({"check_weights": True}, {}),
        "overflow": ({"overflow": "error"}, {"overflow": "chunks"}),
        "max_rows": ({"max_rows": 100}, {}),
        "topk_weights": ({"topk_weights": WEIGHTS}, {}),
        "sync": ({"sync": True}, {"sync": False}),
    },
    "combine": {"num_sms": ({"num_sms": 1}, {"num_sms": 2}), "bias": ({"bias": X[0]}, {})},
    "moe": {
        "num_sms": ({"num_sms": 1}, {"num_sms": 2}),
        "check_weights": ({"check_weights": True}, {}),
        "overflow": ({"overflow": "error"}, {"overflow": "chunks"}),
        "max_rows": ({"max_rows": 100}, {}),
        "activation": ({"activation": "geglu"}, {}),
        "activation_limit": ({"activation": "swigluoai", "activation_limit": 3.0}, {}),
        "activation_alpha": ({"activation": "swigluoai", "activation_alpha": 3.0}, {}),
        "interleaved": ({"interleaved": True}, {}),
        "w13_bias": ({"w13_bias": torch.zeros(E // 2, 2 * INNER)}, {}),
    },
}


@pytest.mark.parametrize(("call", "name"), [(call, name) for call, cases in PER_RANK.items() for name in cases])
def test_what_may_differ(call: str, name: str) -> None:
    def act(buffer: moecomm.Buffer, rank: int) -> bool:
        given = PER_RANK[call][name][rank]
        if call == "dispatch":
            dispatched(buffer, **given)
        elif call == "combine":
            combined(buffer, **given)
        else:
            buffer.moe(X, IDS, WEIGHTS, *plain_experts(buffer), **given)
        buffer.check()
        return True

    assert alike(act) == [True, True]


def names_of(cases: dict[str, Any]) -> set[str]:
    return {name.partition(",")[0] for name in cases}


def test_each_option_says_whether_ranks_compare_it() -> None:
    """A new option needs a case in this file, or the word in its definition that ranks may differ in it."""
    for options, cases, call in (
        (dispatching, DISPATCHES, "dispatch"),
        (combining, COMBINES, "combine"),
        (layers, {**LAYERS, **COPIED, "fused": None}, "moe"),  # fused: the word of the call, where it runs fused
    ):
        per_rank = options.NOT_COMPARED | getattr(options, "OF_EXPERTS", set())
        names = set(options.Options._fields)
        assert names > options.NOT_COMPARED and not options.NOT_COMPARED & names_of(cases)
        assert names - options.NOT_COMPARED <= names_of(cases), call
        assert names & per_rank <= names_of(PER_RANK[call]), call
    assert {"fused moe", "moe"} <= set(signature.DISPATCHES)


def tables() -> dict[str, dict[str, str]]:
    """Return how ranks compare each argument, by call, as the page for maintainers says it."""
    found: dict[str, dict[str, str]] = {}
    table: dict[str, str] = {}
    rows = re.findall(r"^\| (?:`(moecomm\.[\w.]+)` )?\| (`.*?) \| ([a-z ]+) \|", PAGE.read_text(), re.MULTILINE)
    for call, names, way in rows:
        table = found.setdefault(call, {}) if call else table
        said = dict.fromkeys(re.findall(r"`(\w+)`", names), way)
        assert not said.keys() & table.keys(), f"{call} has an argument twice"
        table |= said
    return found


def collective_calls() -> dict[str, Callable[..., Any]]:
    """Return those with arguments, by name: the docstring of a call says that it is collective."""
    owners = moecomm.Buffer, ExpertWeights, moecomm.transfer.WeightTransfer, moecomm.Window
    found: dict[str, Any] = {f"moecomm.ops.{name}": getattr(ops, name) for name in ops.__all__ if name.islower()}
    for owner in owners:
        name = f"moecomm.transfer.{owner.__name__}" if owner is owners[2] else f"moecomm.{owner.__name__}"
        found[name] = owner
        for nth, call in vars(owner).items():
            if inspect.isfunction(call) and re.search(r"\bCollective\b", call.__doc__ or ""):
                found[f"{name}.{nth}"] = call
    return {name: call for name, call in found.items() if arguments_of(call)}


def arguments_of(call: Callable[..., Any]) -> set[str]:
    return set(inspect.signature(call).parameters) - {"self"}


def test_the_page_has_each_argument_of_each_collective_call() -> None:
    said = tables()
    assert said.keys() == collective_calls().keys()
    for name, call in collective_calls().items():
        assert said[name].keys() == arguments_of(call), name
    ways = set(re.findall(r"^\| ([a-z][a-z ]+) \|", PAGE.read_text().partition("\n## ")[0], re.MULTILINE)) - {"by"}
    assert {way for table in said.values() for way in table.values()} == ways


def test_the_page_says_what_the_cases_of_this_file_show() -> None:
    said = tables()
    for options, cases, call in (
        (dispatching, DISPATCHES, "dispatch"),
        (combining, COMBINES, "combine"),
        (layers, LAYERS, "moe"),
    ):
        table = said[f"moecomm.Buffer.{call}"]
        of_rank = {name for name, way in table.items() if way == "nothing"}
        per_rank = options.NOT_COMPARED | getattr(options, "OF_EXPERTS", set())
        assert of_rank & set(options.Options._fields) == per_rank
        assert of_rank >= PER_RANK[call].keys() and not of_rank & names_of(cases)
    of_operators = said["moecomm.ops.dispatch"]
    assert {of_operators[name] for name in names_of(OPERATORS) if name in of_operators} == {"header"}
    settings = Settings(2, HIDDEN, E, K, 8, torch.bfloat16, "host", None).compared().keys() - {"magic", "version"}
    assert {name for name, way in said["moecomm.Buffer"].items() if way == "opening"} == settings


W: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "order": ({"a": (8,), "b": (4,)}, {"b": (4,), "a": (8,)}, "shapes"),
    "names": ({"a": (8,)}, {"b": (8,)}, "shapes"),
    "shapes": ({"a": (2, 4)}, {"a": (8,)}, "shapes"),
    "dtype": ({"a": (8,)}, {"a": (8,)}, "dtype"),
}


def opened_weights(buffer: moecomm.Buffer, rank: int, name: str) -> None:
    dtypes = (torch.int8, torch.uint8) if name == "dtype" else (torch.float32, torch.float32)
    ExpertWeights(buffer, W[name][rank], dtype=dtypes[rank])


@pytest.mark.parametrize("name", W)
def test_weights_of_slots(name: str) -> None:
    placement = Placement([[0, 1, -1], [2, 3, -1]], num_experts=E)
    require_mismatch(alike(lambda b, rank: opened_weights(b, rank, name), placement=placement), W[name][2])


def of_a_process(rank: int, group: Any, name: str) -> str:
    one, other, _ = DISPATCHES[name]
    signature._packed.clear()  # of the process that was forked
    with moecomm.Buffer(group, **SIZES, timeout_s=20) as buffer:
        try:
            dispatched(buffer, **(other if rank else one))
        except Mismatch as error:
            return f"{error.field}: {error.mine}"
    return "nothing"


@pytest.mark.parametrize(
    ("name", "texts"),
    [
        ("type of extras", ("payload: row bytes 256, extras int64 []", "payload: row bytes 256, extras float64 []")),
        ("width of scales of bytes", ("payload: scale bytes 1, row bytes 8", "payload: scale bytes 3, row bytes 8")),
        ("scale beside extras", ("x_global_scale: 0.5", "x_global_scale: 2.0")),
    ],
)
def test_processes(ranks: Ranks, name: str, texts: tuple[str, str]) -> None:
    """They do not know of what the digests of others are made: each names its own values."""
    ranks.start(2, of_a_process, name)
    assert ranks.results(2) == dict(enumerate(texts))
