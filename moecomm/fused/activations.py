"""Activations of gated experts: names, parameters, and their arithmetic in plain torch."""

from __future__ import annotations

import math
from typing import Any, NamedTuple, cast, get_args

import torch
from torch.nn.functional import gelu, silu

from moecomm.base.choices import Activation
from moecomm.base.validation import check_name, check_real
from moecomm.errors import BadInput

LIMIT, ALPHA = 7.0, 1.702  # of gpt-oss
_CUBIC, _SLOPE = 0.044715, math.sqrt(2 / math.pi)  # of the tanh approximation of GELU


class GatedActivation(NamedTuple):
    """An activation of two halves of a product, gate and up columns.

    Attributes:
        name: see Buffer.moe, which has the formulas.
        limit, alpha: of "swigluoai".
    """

    name: Activation = "swiglu"
    limit: float = LIMIT
    alpha: float = ALPHA

    def apply(self, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        """Return the activated values, in the dtype of gate and up."""
        if self.name == "swiglu":
            return silu(gate) * up
        if self.name != "swigluoai":
            return gelu(gate, approximate="tanh" if self.name == "geglu_tanh" else "none") * up
        gate, up = gate.clamp(max=self.limit), up.clamp(-self.limit, self.limit)
        return (up + 1) * (gate * torch.sigmoid(self.alpha * gate))

    def derivatives(self, gate: torch.Tensor, up: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return the activated values, and their derivatives by gate and by up."""
        if self.name == "swigluoai":
            low, clipped = gate.clamp(max=self.limit), up.clamp(-self.limit, self.limit)
            sigmoid = torch.sigmoid(self.alpha * low)
            one, factor = low * sigmoid, clipped + 1
            slope = (sigmoid + self.alpha * one * (1 - sigmoid)) * (gate <= self.limit)
            return factor * one, factor * slope, one * (up.abs() <= self.limit)
        if self.name == "swiglu":
            sigmoid = gate.sigmoid()
            one = gate * sigmoid
            slope = sigmoid + one * (1 - sigmoid)
        elif self.name == "geglu":
            half = (1 + torch.erf(gate * math.sqrt(0.5))) / 2
            one = gate * half
            slope = half + gate * torch.exp(-gate.square() / 2) / math.sqrt(2 * math.pi)
        else:
            tanh = torch.tanh(_SLOPE * (gate + _CUBIC * gate**3))
            one = gate * (1 + tanh) / 2
            slope = (1 + tanh) / 2 + gate * (1 - tanh.square()) / 2 * _SLOPE * (1 + 3 * _CUBIC * gate.square())
        return one * up, slope * up, one


SWIGLU = GatedActivation()


def check_activation(activation: Any, limit: Any, alpha: Any) -> GatedActivation:
    """Return an activation by the arguments of Buffer.moe.

    Raises:
        BadInput: an unknown activation; a limit or alpha that is no positive number, or of another activation.
    """
    check_name("activation", activation, get_args(Activation))
    for argument, value in (("activation_limit", limit), ("activation_alpha", alpha)):
        if value is None:
            continue
        if activation != "swigluoai":
            raise BadInput(argument, repr(value), "None: only activation='swigluoai' has one")
        check_real(argument, value, 2.0**-100, 2.0**100)
    given = LIMIT if limit is None else float(limit), ALPHA if alpha is None else float(alpha)
    return GatedActivation(cast("Activation", activation), *given)
