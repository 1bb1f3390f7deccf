"""Options of a combine.  docs/maintainers/adding_an_option.md lists what a new one takes."""

from __future__ import annotations

from typing import NamedTuple

import torch

from moecomm.base.choices import CAST_WIRES, CombineWire, Layout, dtype_of_wire, is_unsummed
from moecomm.base.validation import check_flag
from moecomm.dispatch.options import check_num_sms
from moecomm.errors import BadInput
from moecomm.rounds.plans import check_hashable


class Options(NamedTuple):
    """Options of Buffer.combine, except tensors.

    Args:
        weighted: expert, batched: multiply each row by the routing weight that dispatch carried.
        wire: of "expert" and "batched", where each rank adds up its rows of a token in float32.  The dtype of `y`:
            this sum is rounded before it travels, as in DeepEP: an error of 2^-8 (bfloat16) or 2^-11 (float16)
            relative to it.  "exact" (or torch.float32): nothing is rounded but the result; a sum of several
            rows travels in float32, a single row as it is (one domain).  "fp8" (or torch.float8_e4m3fn), of flat
            rows as well: cast once to e4m3 with a float32 scale for 128 columns, as dispatch does; off by at most
            2^-4 of a value and 2^-18 of the largest of the 128 (moecomm/combine/reference.py).  "int8" (or
            torch.int8): likewise as "int8_group"; off by at most 1 / 254 of the largest of the 128.  Of both,
            `hidden` is a multiple of 16.  "rows": every row travels as it is, and a token's are added in the order
            of k, see docs/batch_invariance.md.  None: as the Buffer was opened; by default the dtype of `y`.
        num_sms: see dispatch().
    """

    weighted: bool = True
    wire: CombineWire | None = None
    num_sms: int | None = None

    @property
    def unsummed(self) -> bool:
        """CombineArgs::unsummed."""
        return is_unsummed(self.wire)


NOT_COMPARED = frozenset({"num_sms"})  # of each rank; ranks compare all others


class Request(NamedTuple):
    """All that a combine asks for, apart from its tensors: see moecomm.dispatch.options.Request."""

    options: Options = Options()
    call: str = "combine"  # the call of the user that the round belongs to: a word of signature.COMBINES
    layer: int = 0  # number of the layer that makes the call, up to signature.LAYERS; 0: none
    gradients: bool = False  # of moecomm.ops: this rank wants some, and takes part in the backward pass
    sum_grads: bool = False  # flat: add up the weight_grads of every rank for a token, not those of its experts' owners
    bias_first: bool = False  # one domain: the sum of a token starts from its bias, which is not added last


class Key(NamedTuple):
    """Everything that combines of one plan have in common, except the types of their other tensors.

    csrc/bindings/known_calls.cpp makes it as well.
    """

    layout: Layout  # of the dispatch
    dtype: torch.dtype  # of y
    request: Request


def check_options(options: Options, dtype: torch.dtype) -> None:
    """Raise BadInput that names the first option that can't be used with `y` of this dtype."""
    check_hashable((options,))
    check_num_sms(options.num_sms)
    check_flag("weighted", options.weighted)
    if options.wire is None or options.unsummed:
        return
    if dtype_of_wire(options.wire) not in (*CAST_WIRES, torch.float32, dtype):
        raise BadInput("wire", options.wire, f"None, 'exact', 'rows', 'fp8', 'int8' or the dtype of y, {dtype}")


def wire_dtype(wire: CombineWire | None, dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of a reduced row on the wire, or with "rows" of a row, for a `y` of `dtype`."""
    found: torch.dtype = dtype if wire is None or is_unsummed(wire) else dtype_of_wire(wire)
    return found
