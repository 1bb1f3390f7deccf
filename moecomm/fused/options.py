"""Options of an expert layer."""

from __future__ import annotations

from typing import NamedTuple

from moecomm.base.choices import Activation, Balance, CombineWire, Overflow
from moecomm.dispatch.options import Gradients


class Options(NamedTuple):
    """Options of Buffer.moe, except tensors.

    Args:
        activation: "swiglu": silu(gate) * up.  "geglu": gelu(gate) * up, with the error function; "geglu_tanh":
            with the tanh approximation.  "swigluoai", that of gpt-oss: (up + 1) * gate * sigmoid(alpha * gate).
            "swiglustep", that of Step-3.7: as "swiglu", with a limit behind silu.
        activation_limit: gate is at most, and up within +-, this limit; with "swiglustep" silu(gate) is at most this
            limit, and gate has none.  None: "swiglu" has no limit, "swigluoai" and "swiglustep" 7.0.  "geglu" and
            "geglu_tanh" cannot have one.
        activation_alpha: of "swigluoai"; None: 1.702.
        interleaved: w13 is `moecomm.fused.interleave(w13)`; in FP8, quantized after that.
        max_rows: rows of tokens to make room for; default: by the Buffer's `capacity_factor`.
        wire: see combine(); None: "exact".
        num_sms, check_weights: see dispatch(); blocks of both rounds.
        fused: True: rows travel while the experts compute.  It needs a Hopper GPU, one domain, no `wire` but "rows"
            and no `check_weights`; else the layer runs unfused, after one warning.  False: rows travel before and
            after.  None: the faster of the two, which the first call of a kind measures, outside of captures: the host
            waits, on all ranks (docs/tuning.md).  The same on all ranks; the bits are the same.
        overflow: as in dispatch().  "chunks", not in a capture: the host waits for the dispatch, and sums have the
            bits of one round of moecomm's GEMMs.  "drop": `dropped` counts; combine does not scale the remaining
            weights.  None: on CPUs without `max_rows` "chunks", else "error".
        balance: "replicate": experts of busy ranks are copied to empty slots of idle ranks for this layer.  Their
            tensors are those of ExpertWeights; see docs/placement.md.  None: no copies.
    """

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
    """All that a call of a layer asks for, apart from its tensors.

    The layer makes the requests of its dispatch and its combine of it.
    """

    options: Options = Options()
    gradients: Gradients = Gradients.NONE  # of moecomm.ops: those that this rank wants
    layer: int = 0  # its number, which round headers carry; 0: it has none


# Of each rank.  Ranks compare all others.
NOT_COMPARED = frozenset({"max_rows", "num_sms", "check_weights", "overflow"})
# Of the experts of a rank, which alone computes them, unless balance="replicate" copies them: then ranks compare these.
OF_EXPERTS = frozenset({"activation", "activation_limit", "activation_alpha", "interleaved"})
