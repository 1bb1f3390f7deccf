"""Options of an expert layer."""

from __future__ import annotations

from typing import Any, NamedTuple, TypedDict

from moecomm.base.choices import Activation, Balance, CombineWire, Overflow
from moecomm.dispatch.options import Gradients


class Options(NamedTuple):
    """Options of Buffer.moe, which documents them, except tensors."""

    activation: Activation = "swiglu"
    activation_limit: float | None = None
    activation_alpha: float | None = None
    interleaved: bool = False
    max_rows: int | None = None
    wire: CombineWire | None = None
    num_sms: int | None = None
    check_weights: bool = False
    fused: bool | None = None
    overflow: Overflow | None = None
    balance: Balance | None = None


class Request(NamedTuple):
    """What a layer asks for, apart from its tensors."""

    options: Options = Options()
    gradients: Gradients = Gradients.NONE  # that this rank wants, of moecomm.ops
    number: int = 0  # of the layer among those of the Buffer, which round headers carry; 0: it has none


# Of each rank.  Ranks compare all others.
NOT_COMPARED = frozenset({"max_rows", "num_sms", "check_weights", "overflow"})
# Of the experts of a rank, which alone computes them, unless balance="replicate" copies them: then ranks compare these.
OF_EXPERTS = frozenset({"activation", "activation_limit", "activation_alpha", "interleaved"})


class OptionsDict(TypedDict, total=False):
    """Options for type checkers, with the tensors on which the type of the result does not depend."""

    out: Any
    bias: Any
    dropped: Any
    w13_bias: Any
    w2_bias: Any
    activation: Activation
    activation_limit: float | None
    activation_alpha: float | None
    interleaved: bool
    max_rows: int | None
    wire: CombineWire | None
    num_sms: int | None
    check_weights: bool
    fused: bool | None
    overflow: Overflow | None
    balance: Balance | None
