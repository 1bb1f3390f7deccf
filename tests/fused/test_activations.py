"""Activations of gated experts, by formulas written out, and the grouped GEMM with biases."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

from moecomm.errors import BadInput
from moecomm.fused import Fp8, grouped_gemm, interleave, quantize_weights
from moecomm.fused.activations import ALPHA, LIMIT, SWIGLU, GatedActivation, check_activation
from moecomm.fused.biases import add_bias, group_of_rows
from moecomm.testing.layers import activations

ACTIVATIONS = activations(1.5)
every_activation = pytest.mark.parametrize("activation", ACTIVATIONS.values(), ids=ACTIVATIONS)


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x))


def within(x: float) -> float:
    return max(-1.5, min(x, 1.5))


FORMULAS: dict[str, Callable[[float, float], float]] = {
    "swiglu": lambda gate, up: gate * sigmoid(gate) * up,
    "geglu": lambda gate, up: gate * (1 + math.erf(gate / math.sqrt(2))) / 2 * up,
    "geglu_tanh": lambda gate, up: (
        gate * (1 + math.tanh(math.sqrt(2 / math.pi) * (gate + 0.044715 * gate**3))) / 2 * up
    ),
    "swiglu_limited": lambda gate, up: min(gate, 1.5) * sigmoid(min(gate, 1.5)) * within(up),
    "swigluoai": lambda gate, up: (within(up) + 1) * min(gate, 1.5) * sigmoid(1.702 * min(gate, 1.5)),
    "swiglustep": lambda gate, up: min(gate * sigmoid(gate), 1.5) * within(up),
}


def drawn(*shape: int, scale: float = 1.0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))) * scale


@every_activation
def test_values_are_those_of_the_formula(activation: GatedActivation) -> None:
    gate, up = drawn(400, scale=6).double(), drawn(401, scale=6)[1:].double()
    got = activation.apply(gate, up)
    for value, one, other in zip(got.tolist(), gate.tolist(), up.tolist(), strict=True):
        assert value == pytest.approx(FORMULAS[activation.kernel](one, other), rel=1e-12, abs=1e-12)


@every_activation
def test_derivatives_are_those_of_autograd(activation: GatedActivation) -> None:
    gate, up = (drawn(n, scale=2).double().requires_grad_() for n in (300, 299))
    gate, up = gate[:299], up
    want = activation.apply(gate, up)
    by_gate, by_up = torch.autograd.grad(want.sum(), (gate, up))
    for got, wanted in zip(activation.derivatives(gate, up), (want, by_gate, by_up), strict=True):
        torch.testing.assert_close(got, wanted)


@every_activation
def test_numbers_that_are_none_pass_the_limits(activation: GatedActivation) -> None:
    nan, one = torch.tensor([math.nan]), torch.ones(1)
    for gate, up in ((nan, one), (one, nan)):
        assert bool(activation.apply(gate, up).isnan().all())


@pytest.mark.parametrize(
    ("given", "argument"),
    [
        (("gelu", None, None), "activation"),
        ((None, None, None), "activation"),
        (("geglu", 7.0, None), "activation_limit"),
        (("geglu", None, 1.702), "activation_alpha"),
        (("swiglustep", 7.0, 1.702), "activation_alpha"),
        (("swiglu", 0.0, None), "activation_limit"),
        (("swigluoai", 0, None), "activation_limit"),
        (("swigluoai", math.inf, None), "activation_limit"),
        (("swigluoai", None, "1.702"), "activation_alpha"),
    ],
)
def test_what_does_not_fit_is_named(given: tuple[Any, Any, Any], argument: str) -> None:
    with pytest.raises(BadInput) as caught:
        check_activation(*given)
    assert caught.value.argument == argument


def test_defaults_are_those_of_models() -> None:
    assert check_activation("swiglu", None, None) == SWIGLU == ("swiglu", math.inf, 1.0)
    assert check_activation("swigluoai", None, None) == ("swigluoai", LIMIT, ALPHA) == ("swigluoai", 7.0, 1.702)
    assert check_activation("swiglustep", None, None) == ("swiglustep", 7.0, 1.0)


@every_activation
def test_the_arguments_of_an_activation_ask_for_it(activation: GatedActivation) -> None:
    about = dict.fromkeys(("activation", "activation_limit", "activation_alpha")) | activation.arguments()
    assert check_activation(*about.values()) == activation


def test_rows_find_their_group() -> None:
    ends = torch.tensor([2, 2, 5], dtype=torch.int32)
    assert group_of_rows(ends, 7).tolist() == [0, 0, 2, 2, 2, 3, 3]
    rows, bias = drawn(7, 8).bfloat16(), drawn(3, 8)
    want = (rows[:2].float() + bias[0]).bfloat16()
    got = add_bias(rows, bias, ends)
    assert torch.equal(got[:2], want) and torch.equal(got[5:], rows[5:]) and add_bias(rows, None, ends) is rows


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("activation", [None, *ACTIVATIONS.values()])
def test_a_bias_is_added_before_the_activation(activation: GatedActivation | None, interleaved: bool) -> None:
    x, w, bias = drawn(9, 24).bfloat16(), drawn(2, 32, 24).bfloat16(), drawn(2, 32).bfloat16()
    counts, given = torch.tensor([4, 5], dtype=torch.int32), interleave(w) if activation and interleaved else w
    about = {} if activation is None else activation.arguments()
    out = grouped_gemm(x, given, counts, **about, bias=bias, interleaved=interleaved)
    for group, rows in enumerate((slice(0, 4), slice(4, 9))):
        want = x[rows].float() @ w[group].float().T + bias[group].float()
        if activation is not None:
            want = activation.apply(*want.chunk(2, dim=1))
        assert torch.equal(out[rows], want.bfloat16())


def test_a_bias_of_fp8_products_is_added_to_them_in_float32() -> None:
    x, w, bias = drawn(9, 32), drawn(2, 64, 32), drawn(2, 64)
    pair = quantize_weights(x.unsqueeze(0))
    rows = Fp8(pair.data[0], pair.scales[0].expand(9, 1).contiguous())
    counts, weights = torch.tensor([9, 0], dtype=torch.int32), quantize_weights(w)
    how: dict[str, Any] = {"activation": "swigluoai", "activation_limit": 1.0, "interleaved": False}
    out = grouped_gemm(rows, weights, counts, **how, bias=bias)
    left = rows.data.float() * rows.scales
    right = weights.data[0].float() * weights.scales[0, 0, 0]
    want = check_activation("swigluoai", 1.0, None).apply(*(left @ right.T + bias[0]).chunk(2, dim=1))
    assert torch.equal(out, want.bfloat16())


@pytest.mark.parametrize(
    "bias",
    [torch.zeros(2, 16), torch.zeros(3, 32), torch.zeros(2, 32).double(), torch.zeros(32, 2).T, "bias"],
    ids=["columns", "experts", "dtype", "gaps", "no tensor"],
)
def test_biases_that_do_not_fit_are_named(bias: Any) -> None:
    x, w, counts = torch.zeros(9, 24).bfloat16(), torch.zeros(2, 32, 24).bfloat16(), torch.zeros(2, dtype=torch.int32)
    with pytest.raises(BadInput, match="bias"):
        grouped_gemm(x, w, counts, bias=bias)
