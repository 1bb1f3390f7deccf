"""ops.moe on CPU ranks: the bits of Buffer.moe, gradients against float64, what it refuses."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import moecomm
from moecomm import ops
from moecomm.fused import interleave, quantize_weights
from moecomm.testing import LayerCase, random_layer
from moecomm.testing.layers import activations
from tests.ops import plain
from tests.ops.plain import grads_of, seen_by, wanting

from ..backends.conftest import all_ranks
from ..few import few

SIZES: dict[str, Any] = {"hidden": 32, "intermediate": 16, "num_experts": 8, "topk": 3, "max_tokens": 12}
ACTIVATIONS = activations(0.5)
WIDE = SIZES | {"intermediate": 32}  # as FP8 wants it
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def layer_of(seed: int, ranks: int, dtype: torch.dtype = torch.float32, **more: Any) -> LayerCase:
    return random_layer(seed, **{**SIZES, "ranks": ranks, "dtype": dtype, **more})


def full_layer(seed: int = 0, dtype: torch.dtype = torch.float32, **more: Any) -> LayerCase:
    """Make a layer of one rank with all tokens and every option that may be None, ids of which some are -1."""
    case, g = layer_of(seed, 1, dtype, **more), torch.Generator().manual_seed(seed)
    tokens, hidden = SIZES["max_tokens"], SIZES["hidden"]
    case.x, case.bias = ([torch.randn(tokens, hidden, generator=g).to(dtype)] for _ in range(2))
    case.topk_idx = [torch.randint(-1, SIZES["num_experts"], (tokens, SIZES["topk"]), generator=g)]
    case.topk_weights, case.wire = [torch.rand(tokens, SIZES["topk"], generator=g)], None
    return case


def opened(group: Any, dtype: torch.dtype = torch.float32, **more: Any) -> moecomm.Buffer:
    sizes = {name: size for name, size in SIZES.items() if name != "intermediate"}
    return moecomm.Buffer(group, **sizes, dtype=dtype, backend="host", timeout_s=20, **more)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("ranks", few([1, 2, 4], 1, 4))
def test_values_are_the_bits_of_buffer_moe(ranks: int, dtype: torch.dtype) -> None:
    cases = [layer_of(seed, ranks, dtype) for seed in range(8)]
    if dtype is not torch.float32:
        cases += [random_layer(seed, **WIDE, ranks=ranks, dtype=dtype, fp8=True) for seed in range(8)]

    def body(group: Any) -> list[tuple[torch.Tensor, torch.Tensor]]:
        with opened(group, dtype) as buffer:
            calls = [case.call(group.rank) for case in cases]
            return [(ops.moe(buffer, **call), buffer.moe(**call)) for call in calls]

    for rank, outs in enumerate(all_ranks(ranks, body)):
        for case, (out, theirs) in zip(cases, outs, strict=True):
            case.check(rank, out)
            assert torch.equal(out, theirs)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("ranks", "domain_ranks"), few([(1, 1), (2, 2), (4, 4), (4, 2)], (1, 1), (4, 2)))
def test_gradients_are_those_of_one_rank(ranks: int, domain_ranks: int, dtype: torch.dtype) -> None:
    cases = [layer_of(seed, ranks, dtype) for seed in range(16)]
    assert {case.interleaved for case in cases} == {False, True}

    def body(group: Any) -> list[dict[str, torch.Tensor]]:
        found = []
        with opened(group, dtype, domain_ranks=domain_ranks) as buffer:
            for case in cases:
                call = wanting(case.call(group.rank))
                out = ops.moe(buffer, **call)
                assert buffer.rounds.memory.used == 0, "something of the forward pass is kept"
                found.append(grads_of(out, call, seen_by(case)[group.rank]))
            gc.collect()
            assert buffer.rounds.memory.used == 0
        return found

    for got in zip(cases, *all_ranks(ranks, body), strict=True):
        case, *found = got
        for rank, want in enumerate(plain.gradients(case, seen_by(case))):
            plain.check(found[rank], want, f"layer of seed {case.seed}, rank {rank}")


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_gradients_of_activations_and_biases(name: str, interleaved: bool) -> None:
    case = full_layer()
    case.activation, case.interleaved, g = ACTIVATIONS[name], interleaved, torch.Generator().manual_seed(1)
    experts, hidden, inner = SIZES["num_experts"], SIZES["hidden"], SIZES["intermediate"]
    case.w13_bias = torch.randn(experts, 2 * inner, generator=g)
    case.w2_bias = torch.randn(experts, hidden, generator=g)
    seen, names = seen_by(case)[0], ("x", "topk_weights", "w13", "w2", "w13_bias", "w2_bias")
    with opened(None) as buffer:
        call = case.call(0)
        leaves = {leaf: call[leaf].clone().requires_grad_() for leaf in names}
        out = ops.moe(buffer, **{**call, **leaves})
        case.check(0, out.detach())
        got = dict(zip(names, torch.autograd.grad(out, list(leaves.values()), seen), strict=True))
    given = (case.x[0], case.topk_weights[0], case.w13, case.w2, case.w13_bias, case.w2_bias)
    x, weights, w13, w2, b13, b2 = (tensor.double().requires_grad_() for tensor in given)
    both = torch.einsum("th,eih->tei", x, w13) + b13
    y = torch.einsum("tei,ehi->teh", case.activation.apply(*both.chunk(2, dim=-1)), w2) + b2
    ids = case.topk_idx[0].long()
    chosen = y.gather(1, ids.clamp(min=0).unsqueeze(2).expand(-1, -1, hidden))
    total = (chosen * torch.where(ids >= 0, weights, 0.0).unsqueeze(2)).sum(dim=1)
    want = dict(zip(names, torch.autograd.grad(total, (x, weights, w13, w2, b13, b2), seen.double()), strict=True))
    if interleaved:
        want["w13"] = interleave(want["w13"])
    for leaf in names:
        assert got[leaf].dtype == given[names.index(leaf)].dtype
        torch.testing.assert_close(got[leaf].double(), want[leaf], rtol=1e-4, atol=1e-4, msg=leaf)


def test_a_bias_of_experts_alone_has_a_gradient() -> None:
    case = full_layer()
    case.w2_bias = torch.zeros(SIZES["num_experts"], SIZES["hidden"])
    seen = seen_by(case)[0]
    with opened(None) as buffer:
        call = case.call(0)
        call["w2_bias"].requires_grad_()
        (got,) = torch.autograd.grad(ops.moe(buffer, **call), call["w2_bias"], seen)
    want = torch.zeros_like(got)
    for token, (ids, weights) in enumerate(zip(case.topk_idx[0].tolist(), case.topk_weights[0], strict=True)):
        for expert, weight in zip(ids, weights, strict=True):
            if expert >= 0:
                want[expert] += weight * seen[token]
    torch.testing.assert_close(got, want)


MISTAKES: dict[str, Callable[[dict[str, torch.Tensor]], torch.Tensor]] = {
    "x": lambda grads: grads["x"].roll(1, dims=0),
    "topk_weights": lambda grads: grads["topk_weights"].flip(1),
    "w13": lambda grads: torch.cat(grads["w13"].chunk(2, dim=1)[::-1], dim=1),
    "w2": lambda grads: grads["w2"] * 1.001,
    "bias": lambda grads: grads["bias"] * 1.001,
}


@pytest.mark.parametrize("name", MISTAKES)
def test_the_bound_sees_a_mistake(name: str) -> None:
    case = full_layer()
    (want,) = plain.gradients(case, seen_by(case))
    call = wanting(case.call(0))
    with opened(None) as buffer:
        got = grads_of(ops.moe(buffer, **call), call, seen_by(case)[0])
    plain.check(got, want, "as it is")
    with pytest.raises(AssertionError, match=f"^{name}, with a mistake"):
        plain.check({**got, name: MISTAKES[name](got)}, want, "with a mistake")


def test_ranks_may_want_other_gradients_and_run_the_same_rounds() -> None:
    case = layer_of(5, 4)
    wanted = (("x",), ("topk_weights", "w2"), ("w13",), ("w2", "bias"))
    case.topk_weights = [torch.rand(ids.shape) for ids in case.topk_idx]
    case.bias = [torch.zeros_like(x) for x in case.x]

    def body(group: Any) -> dict[str, torch.Tensor]:
        with opened(group) as buffer:
            call = wanting(case.call(group.rank), *wanted[group.rank])
            return grads_of(ops.moe(buffer, **call), call, seen_by(case)[group.rank])

    found = all_ranks(4, body)
    for rank, want in enumerate(plain.gradients(case, seen_by(case))):
        assert set(found[rank]) == set(wanted[rank])
        plain.check(found[rank], {name: want[name] for name in wanted[rank]}, f"rank {rank}")


def test_a_bias_alone_needs_no_round() -> None:
    """The ranks that have none are not waited for."""
    case = layer_of(5, 2)
    case.bias = [torch.zeros(SIZES["hidden"]), None]

    def body(group: Any) -> torch.Tensor | None:
        with opened(group) as buffer:
            call = wanting(case.call(group.rank), "bias")
            out = ops.moe(buffer, **call)
            return grads_of(out, call, seen_by(case)[0])["bias"] if group.rank == 0 else None

    torch.testing.assert_close(all_ranks(2, body)[0], seen_by(case)[0].sum(dim=0), rtol=0, atol=0)


@pytest.mark.parametrize("ids", ["none of any expert", "no tokens"])
def test_nothing_to_do_is_done(ids: str) -> None:
    case = full_layer()
    if ids == "no tokens":
        for tensors in (case.x, case.topk_idx, case.topk_weights, case.bias):
            tensors[0] = tensors[0][:0]
    case.topk_idx[0] = torch.full_like(case.topk_idx[0], -1)
    call = wanting(case.call(0))
    with opened(None) as buffer:
        out = ops.moe(buffer, **call)
        assert torch.equal(out, call["bias"])
        grads = grads_of(out, call, seen_by(case)[0])
    assert torch.equal(grads.pop("bias"), seen_by(case)[0])
    for name, grad in grads.items():
        assert grad.shape == call[name].shape and not grad.any()


@pytest.mark.parametrize("reentrant", [False, True])
def test_recomputed_layers_have_the_same_gradients(reentrant: bool) -> None:
    cases = [layer_of(seed, 2) for seed in (2, 3)]

    def stacked(buffer: moecomm.Buffer, x: torch.Tensor, calls: list[dict[str, Any]], recomputed: bool) -> torch.Tensor:
        for call in calls:
            others = {name: value for name, value in call.items() if name not in ("x", "bias")}

            def one(x: torch.Tensor, others: dict[str, Any] = others) -> torch.Tensor:
                return x + ops.moe(buffer, x, **others)

            x = checkpoint(one, x, use_reentrant=reentrant) if recomputed else one(x)
        return x

    def body(group: Any) -> list[list[torch.Tensor]]:
        results = []
        with opened(group) as buffer:
            for recomputed in (False, True):
                calls = [wanting(case.call(group.rank)) for case in cases]
                for call in calls:  # as many tokens in both
                    call["topk_idx"] = calls[0]["topk_idx"]
                    call["topk_weights"] = None
                out = stacked(buffer, calls[0]["x"], calls, recomputed)
                out.backward(seen_by(cases[0])[group.rank])
                results.append([out.detach(), calls[0]["x"].grad, *(c[w].grad for c in calls for w in ("w13", "w2"))])
        return results

    for kept, recomputed in all_ranks(2, body):
        assert all(torch.equal(one, other) for one, other in zip(kept, recomputed, strict=True))


def test_torch_finds_nothing_wrong_with_the_operators() -> None:
    case = full_layer()
    call = wanting(case.call(0))
    x, idx, weights, w13, w2, bias = (call[name] for name in ("x", "topk_idx", "topk_weights", "w13", "w2", "bias"))
    with opened(None) as buffer:
        how = (buffer.name, "swiglu", case.interleaved, None, None, None, False, None, None)
        moe, backward = torch.ops.moecomm.moe.default, torch.ops.moecomm.moe_backward.default
        torch.library.opcheck(moe, (x, idx, weights, w13, None, w2, None, bias, None, None, *how))
        torch.library.opcheck(moe, (x, idx, None, w13.detach(), None, w2, None, bias.detach()[0], None, None, *how))
        grad, plain_tensors = torch.randn(x.shape), (x.detach(), idx, weights.detach(), w13.detach(), w2.detach())
        for wants in ((True, True), (False, True), (False, False)):
            torch.library.opcheck(
                backward, (grad, *plain_tensors, None, None, buffer.name, case.interleaved, None, None, *wants)
            )
        biases = torch.ones(SIZES["num_experts"], 2 * SIZES["intermediate"]), torch.ones(w2.shape[:2])
        given = (x, idx, weights, w13, None, w2, None, bias, *biases, buffer.name, "swigluoai", *how[2:])
        torch.library.opcheck(moe, (*given, False, 0, 0.5, None))
        about = (*biases, buffer.name, case.interleaved, None, None, True, True, 0, "swigluoai", 0.5, None)
        torch.library.opcheck(backward, (grad, *plain_tensors, *about))


def test_torch_finds_nothing_wrong_in_fp8() -> None:
    case = full_layer(dtype=torch.bfloat16, intermediate=32, fp8=True)
    call = case.call(0)
    with opened(None, torch.bfloat16) as buffer:
        how = (buffer.name, "swiglu", case.interleaved, None, None, None, False, None, None)
        given = (call["x"], call["topk_idx"], call["topk_weights"], *call["w13"], *call["w2"], call["bias"], None, None)
        tests = ("test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
        # Not its schema: torch looks there for what an operator changes by sums, which it has not of e4m3.
        torch.library.opcheck(torch.ops.moecomm.moe.default, (*given, *how), test_utils=tests)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_a_compiled_layer_has_no_break_and_the_same_bits(backend: str) -> None:
    case = full_layer()
    case.interleaved = False
    seen = seen_by(case)[0]
    with opened(None) as buffer:
        compiled = torch.compile(ops.moe, fullgraph=True, backend=backend)
        for tokens in (9, 7, 1, 0):
            results = []
            for function in (compiled, ops.moe):
                call = wanting(case.call(0))
                for name in ("x", "topk_idx", "topk_weights", "bias"):
                    call[name] = call[name].detach()[:tokens].clone().requires_grad_(name != "topk_idx")
                out = function(buffer, **call)
                results.append((out.detach(), *grads_of(out, call, seen[:tokens]).values()))
            for got, want in zip(*results, strict=True):
                assert torch.equal(got, want), f"{tokens} tokens"
        gc.collect()
        assert buffer.rounds.memory.used == 0
    torch.compiler.reset()


def test_a_compiled_layer_in_fp8_has_the_same_bits_and_no_gradients() -> None:
    case = full_layer(dtype=torch.bfloat16, intermediate=32, fp8=True)
    call = case.call(0)
    with opened(None, torch.bfloat16) as buffer:
        compiled = torch.compile(ops.moe, fullgraph=True, backend="aot_eager")
        want = buffer.moe(**call)
        assert torch.equal(compiled(buffer, **call), want)
        call["x"].requires_grad_()
        with pytest.raises(Exception, match="weights in FP8"):
            compiled(buffer, **call)
        with torch.no_grad():
            assert torch.equal(compiled(buffer, **call), want)
    torch.compiler.reset()


@pytest.mark.parametrize("name", ["x", "topk_weights", "bias"])
def test_a_gradient_through_fp8_is_refused_at_once(name: str) -> None:
    """On a rank that wants one; the others are not held up."""
    case = random_layer(5, **WIDE, ranks=2, dtype=torch.bfloat16, fp8=True)
    case.bias = [torch.zeros_like(x) for x in case.x]
    case.topk_weights = [torch.rand(ids.shape) for ids in case.topk_idx]

    def body(group: Any) -> list[torch.Tensor]:
        call = case.call(group.rank)
        with opened(group, torch.bfloat16) as buffer:
            outs = []
            if group.rank == 0:
                call[name].requires_grad_()
                with pytest.raises(moecomm.Unsupported, match="weights in FP8"):
                    ops.moe(buffer, **call)
            else:
                outs.append(ops.moe(buffer, **call))
            with torch.no_grad():
                return [*outs, ops.moe(buffer, **call)]

    for rank, outs in enumerate(all_ranks(2, body)):
        for out in outs:
            case.check(rank, out)


def test_what_does_not_fit_is_said_as_buffer_moe_says_it() -> None:
    good = full_layer(dtype=torch.bfloat16).call(0)
    good["interleaved"] = False
    x, w13, w2 = good["x"], good["w13"], good["w2"]
    refused: list[tuple[str, dict[str, Any]]] = [
        ("activation", {"activation": "gelu"}),
        ("fused", {"fused": "three launches"}),
        ("x", {"x": x.float()}),
        ("x", {"x": x[:, :16]}),
        ("x", {"x": x.tolist()}),
        ("topk_idx", {"topk_idx": good["topk_idx"].tolist()}),
        ("topk_weights", {"topk_weights": 1.0}),
        ("bias", {"bias": 1.0}),
        ("max_rows", {"max_rows": "2"}),
        ("num_sms", {"num_sms": 1.5}),
        ("topk_idx", {"topk_idx": good["topk_idx"][:3]}),
        ("topk_idx", {"topk_idx": good["topk_idx"] + 99}),
        ("topk_weights", {"topk_weights": good["topk_weights"][:, :2]}),
        ("topk_weights", {"topk_weights": good["topk_weights"] * torch.nan, "check_weights": True}),
        ("w13", {"w13": w13.transpose(1, 2).contiguous().transpose(1, 2)}),
        ("w2", {"w2": w2[:, :-1].contiguous()}),
        ("w2", {"w13": quantize_weights(w13)}),
        ("w13", {"w13": (*quantize_weights(w13), w13)}),
        ("w2", {"w2": "weights"}),
        ("bias", {"bias": torch.zeros(3)}),
        ("max_rows", {"max_rows": 2}),
        ("wire", {"wire": torch.float64}),
        ("num_sms", {"num_sms": -1}),
    ]
    with opened(None, torch.bfloat16) as buffer:
        for argument, change in refused:
            said = []
            for call in (buffer.moe, lambda **given: ops.moe(buffer, **given)):
                with pytest.raises(moecomm.BadInput) as caught:
                    call(**good | change)
                said.append(caught.value)
            assert str(said[0]) == str(said[1]) and said[1].argument == argument, change
        with pytest.raises(moecomm.BadInput, match="buffer"):
            ops.moe("mine", **good)
        assert torch.equal(ops.moe(buffer.name, **good), buffer.moe(**good))
        out = ops.moe(buffer, **wanting(good))
    with pytest.raises(moecomm.Closed):
        ops.moe(buffer, **good)
    with pytest.raises(moecomm.Closed):
        out.sum().backward()


def test_second_order_says_that_there_is_none() -> None:
    call = wanting(full_layer().call(0))
    with opened(None) as buffer:
        (grad,) = torch.autograd.grad(ops.moe(buffer, **call).square().sum(), call["x"], create_graph=True)
        with pytest.raises(moecomm.Unsupported, match="differentiated again"):
            grad.sum().backward()
