"""Options of a dispatch.  docs/maintainers/adding_an_option.md lists what a new one takes."""

from __future__ import annotations

import enum
from typing import Any, NamedTuple, get_args

from moecomm.base.choices import Layout, Overflow, Quantize, ScaleFormat, ScaleLayout
from moecomm.base.protocol import LAYOUTS, SCALE_FORMATS
from moecomm.base.validation import check_alignment, check_flag, check_name, is_integer
from moecomm.errors import BadInput
from moecomm.rounds.signature import DISPATCHES, QUANTIZED

SCALE_LAYOUTS = get_args(ScaleLayout)
OVERFLOWS = get_args(Overflow)


class Options(NamedTuple):
    """Options of Buffer.dispatch, except tensors, `max_rows`, `handle` and `sync`.

    Args:
        layout: "expert": a row for each (token, expert of this rank), ordered by (expert, source rank, token, k);
            each expert's group starts at a multiple of `expert_alignment`.  "flat": a row for each token that
            picked an expert of this rank, ordered by (source rank, token).  "batched": `[E/R, max_rows, H]`, each
            expert's rows first, in the order of "expert".
        expert_alignment: rows, 1 to 2^20 - 1.
        quantize: "fp8": rows travel as float8_e4m3fn with a scale for 128 columns; or a name of moecomm.formats.
        scale_format: of "fp8": "fp32": amax / 448; "ue8m0": the smallest power of two that is not below it.
        scale_layout: "row": a row of scales for each row of x; "column": column-major and padded as grouped GEMMs
            load them by TMA, see Routed (beside rows in bf16 or FP8, of elements of 4 bytes); "swizzled":
            formats.swizzle() of scales of one byte.
        num_sms: blocks (GPUs: one an SM) or threads (CPUs) to use; default: the table of the backend.
        check_weights: NaN in `topk_weights` is bad input.
        overflow: what becomes of rows that have no room.  "error": TooManyRows on every rank.  "chunks", which
            takes `sync=True` and no `max_rows`: the tokens go in several rounds, and the rows to memory outside of
            the window.  "drop": each rank keeps R-th parts of the room at other ranks (batched: at experts), for
            the largest weights; `Routed.dropped` counts the rest.  None: "chunks" where it can be, else "error".
    """

    layout: Layout = "expert"
    expert_alignment: int = 1
    quantize: Quantize | None = None
    scale_format: ScaleFormat = "fp32"
    scale_layout: ScaleLayout = "row"
    num_sms: int | None = None
    check_weights: bool = False
    overflow: Overflow | None = None


# Of each rank.  Ranks compare all others: moecomm/rounds/signature.py has the list.
NOT_COMPARED = frozenset({"num_sms", "check_weights", "overflow"})


class Gradients(enum.IntEnum):
    """Gradients that a rank wants of a round of moecomm.ops: the rounds of its backward pass, on which ranks agree."""

    NONE = 0
    ROWS = 1
    WEIGHTS = 2  # those of topk_weights, too


class Request(NamedTuple):
    """All that a dispatch asks for, apart from its tensors.

    Whoever starts a round (a Buffer, a layer, an operator, an interface of compat) makes it, and all below pass it on.
    It is the larger part of the Key by which the plan is found.
    """

    options: Options = Options()
    # The call of the user that the round belongs to: "dispatch", "moe", "moe in INT8", "backward of combine" or
    # "backward of moe"; with row descriptors "moe" or, where published rows are cast, "moe in " and their format.
    call: str = "dispatch"
    layer: int = 0  # number of the layer that makes the call, up to signature.LAYERS; 0: none
    gradients: Gradients = Gradients.NONE
    begin: bool = False  # the first half of a split dispatch
    row_descriptors: bool = False  # row descriptors travel in the place of rows
    # This rank asks for a larger Buffer, and has no tokens: the round ends in a Mismatch of the field signature.GROW on
    # every rank, unless all ask.
    grow: bool = False
    replicates: bool = False  # experts are copied to empty slots for this round
    experts: tuple[tuple[str, str], ...] = ()  # what ranks must pass alike to copy experts, by name

    def quantized(self) -> int:
        """Return the index in signature.QUANTIZED of the format of rows, also of those that row descriptors name."""
        if not self.row_descriptors:
            return QUANTIZED.index(self.options.quantize)
        return QUANTIZED.index(self.call.partition(" in ")[2] or None)


class Key(NamedTuple):
    """Everything that dispatches of one plan have in common, except the types of their tensors.

    csrc/bindings/known_calls.cpp makes it as well.
    """

    layout: Layout  # a repeat has that of its handle
    repeat: bool  # by a handle, without routing
    chunk: bool  # a part of a dispatch whose rows had no room: see chunks.py
    payload: Any  # payloads.Payload of rows that travel as bytes
    compares: bool  # a global scale on the GPU by which rows have been cast: DispatchArgs.compared
    request: Request

    def described(self) -> int:
        """Return the index of the call in signature.DISPATCHES."""
        request = self.request
        call = "dispatch_begin" if request.begin else "fused moe" if request.row_descriptors else request.call
        return DISPATCHES.index(f"{call} in chunks" if self.chunk else call)


def check_options(options: Options) -> None:
    """Raise BadInput that names the first option that can't be used."""
    check_name("layout", options.layout, LAYOUTS)
    check_alignment("expert_alignment", options.expert_alignment)
    check_name("scale_format", options.scale_format, SCALE_FORMATS)
    check_name("scale_layout", options.scale_layout, SCALE_LAYOUTS)
    if options.quantize is not None:
        check_name("quantize", options.quantize, QUANTIZED[1:])
    if options.quantize != "fp8" and options.scale_format != "fp32":
        raise BadInput("scale_format", repr(options.scale_format), "'fp32', or pass quantize='fp8'")
    check_flag("check_weights", options.check_weights)
    check_num_sms(options.num_sms)
    check_overflow(options.overflow)


def check_types(options: Options) -> None:
    """Raise BadInput for options that are equal to those of a known call, which would find its plan, as 1.0 and 1 are.

    Not called where types are right: a repeated call passes few functions.
    """
    check_flag("check_weights", options.check_weights)
    check_alignment("expert_alignment", options.expert_alignment)
    check_num_sms(options.num_sms)


def check_overflow(overflow: Overflow | None, max_rows: int | None = None) -> None:
    """Raise BadInput unless `overflow` is None or a word of OVERFLOWS, and fits `max_rows`."""
    if overflow is not None:
        check_name("overflow", overflow, OVERFLOWS)
    if overflow == "chunks" and max_rows is not None:
        raise BadInput("overflow", "'chunks' beside max_rows", "one of them: chunks take the room that the Buffer has")


def check_num_sms(num_sms: int | None) -> None:
    """Raise BadInput unless `num_sms` is None or 1 to 1024."""
    if num_sms is not None and not (is_integer(num_sms) and 1 <= num_sms <= 1024):
        raise BadInput("num_sms", repr(num_sms), "a whole number, 1 to 1024, or None")
