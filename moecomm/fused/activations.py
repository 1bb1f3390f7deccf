"""Activations of gated experts: names, formulas, parameters, and their arithmetic in plain torch."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple, cast, get_args

import torch
from torch.nn.functional import gelu, silu

from moecomm.base.choices import Activation
from moecomm.base.validation import check_name, check_real
from moecomm.errors import BadInput

LIMIT, ALPHA = 7.0, 1.702  # of gpt-oss
UNLIMITED = math.inf
_CUBIC, _SLOPE = 0.044715, math.sqrt(2 / math.pi)  # of the tanh approximation of GELU


class Formula(NamedTuple):
    """An activation by name: the activated gate times up.  A limit bounds up from both sides, and gate from above.

    Attributes:
        of: the activated gate, by gate and, if there is one, alpha.
        slope: the activated gate and its derivative, by gate and alpha.
        offset: added to up, behind its limit.
        limit: default of `activation_limit`; UNLIMITED: none.  None: it cannot have one.
        limits_activated: the limit bounds the activated gate, and not the gate.
        alpha: default of `activation_alpha`; None: it has none.
    """

    of: Callable[..., torch.Tensor]
    slope: Callable[[torch.Tensor, float], tuple[torch.Tensor, torch.Tensor]]
    offset: int = 0
    limit: float | None = None
    limits_activated: bool = False
    alpha: float | None = None


def _swish_slope(gate: torch.Tensor, alpha: float) -> tuple[torch.Tensor, torch.Tensor]:
    sigmoid = torch.sigmoid(alpha * gate)
    one = gate * sigmoid
    return one, sigmoid + alpha * one * (1 - sigmoid)


def _gelu_slope(gate: torch.Tensor, _: float) -> tuple[torch.Tensor, torch.Tensor]:
    half = (1 + torch.erf(gate * math.sqrt(0.5))) / 2
    return gate * half, half + gate * torch.exp(-gate.square() / 2) / math.sqrt(2 * math.pi)


def _gelu_tanh_slope(gate: torch.Tensor, _: float) -> tuple[torch.Tensor, torch.Tensor]:
    tanh = torch.tanh(_SLOPE * (gate + _CUBIC * gate**3))
    slope = (1 + tanh) / 2 + gate * (1 - tanh.square()) / 2 * _SLOPE * (1 + 3 * _CUBIC * gate.square())
    return gate * (1 + tanh) / 2, slope


FORMULAS: dict[Activation, Formula] = {
    "swiglu": Formula(silu, _swish_slope, limit=UNLIMITED),
    "geglu": Formula(gelu, _gelu_slope),
    "geglu_tanh": Formula(lambda gate: gelu(gate, approximate="tanh"), _gelu_tanh_slope),
    "swigluoai": Formula(
        lambda gate, alpha: gate * torch.sigmoid(alpha * gate), _swish_slope, offset=1, limit=LIMIT, alpha=ALPHA
    ),
    "swiglustep": Formula(silu, _swish_slope, limit=LIMIT, limits_activated=True),
}


class GatedActivation(NamedTuple):
    """An activation of two halves of a product, gate and up columns, as check_activation() makes it.

    Attributes:
        name: of FORMULAS; see Buffer.moe.
        limit: UNLIMITED: none.
        alpha: 1.0 where the activation has none.
    """

    name: Activation = "swiglu"
    limit: float = UNLIMITED
    alpha: float = 1.0

    @property
    def kernel(self) -> str:
        """Name in Activation of csrc/gemm/config.cuh: kernels of SwiGLU without a limit have no code for one."""
        return "swiglu_limited" if self.name == "swiglu" and self.limit != UNLIMITED else self.name

    def arguments(self) -> dict[str, Any]:
        """Return the arguments of Buffer.moe that ask for this activation."""
        about: dict[str, Any] = {"activation": self.name}
        if self.limit != UNLIMITED:
            about["activation_limit"] = self.limit
        if FORMULAS[self.name].alpha is not None:
            about["activation_alpha"] = self.alpha
        return about

    def apply(self, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        """Return the activated values, in the dtype of gate and up."""
        formula, limited = FORMULAS[self.name], self.limit != UNLIMITED
        if limited:
            up = up.clamp(-self.limit, self.limit)
            gate = gate if formula.limits_activated else gate.clamp(max=self.limit)
        one = formula.of(gate) if formula.alpha is None else formula.of(gate, self.alpha)
        if limited and formula.limits_activated:
            one = one.clamp(max=self.limit)
        return one * (up + formula.offset if formula.offset else up)

    def derivatives(self, gate: torch.Tensor, up: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return the activated values, and their derivatives by gate and by up.

        A derivative is 0 beyond the limit, and not at it.
        """
        formula = FORMULAS[self.name]
        if self.limit == UNLIMITED:
            one, slope = formula.slope(gate, self.alpha)
            factor = up + formula.offset if formula.offset else up
            return factor * one, factor * slope, one
        low = gate if formula.limits_activated else gate.clamp(max=self.limit)
        one, slope = formula.slope(low, self.alpha)
        slope = slope * ((one if formula.limits_activated else gate) <= self.limit)
        one = one.clamp(max=self.limit) if formula.limits_activated else one
        factor = up.clamp(-self.limit, self.limit) + formula.offset
        return factor * one, factor * slope, one * (up.abs() <= self.limit)


SWIGLU = GatedActivation()


def check_activation(activation: Any, limit: Any, alpha: Any) -> GatedActivation:
    """Return an activation by the arguments of Buffer.moe.

    Raises:
        BadInput: an unknown activation; a limit or alpha that is no positive number, or that the activation cannot
            have.
    """
    check_name("activation", activation, get_args(Activation))
    formula = FORMULAS[cast("Activation", activation)]
    for parameter, value in (("limit", limit), ("alpha", alpha)):
        if value is None:
            continue
        having = [name for name, one in FORMULAS.items() if getattr(one, parameter) is not None]
        if activation not in having:
            raise BadInput(f"activation_{parameter}", repr(value), f"None: only {', '.join(having)} can have one")
        check_real(f"activation_{parameter}", value, 2.0**-100, 2.0**100)
    if limit is None:
        limit = UNLIMITED if formula.limit is None else formula.limit
    if alpha is None:
        alpha = 1.0 if formula.alpha is None else formula.alpha
    return GatedActivation(cast("Activation", activation), float(limit), float(alpha))
