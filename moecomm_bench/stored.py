"""Lines that kernels store for rows of few tokens: packets with their tags, entries and padding.

The twin of `Packets` in csrc/dispatch/packets.cuh and `Packing` in csrc/combine/push.cuh.
"""

from __future__ import annotations

from typing import NamedTuple

from moecomm import _native
from moecomm.backends.lsa_kernels import dispatch_spec, is_multi_domain
from moecomm.base import packets
from moecomm.base.formats import FORMATS
from moecomm.base.packets import Packets
from moecomm.base.protocol import LINE_BYTES, LINE_WORDS, QUANT_GROUP
from moecomm_bench.case import GIVEN

_WORD = 8  # bytes
_STEP = 4  # lines that a warp stores at once


class Row(NamedTuple):
    """A row that dispatch sends in packets: how it is cut, and the bytes of its columns and of its scales."""

    cut: Packets
    row_bytes: int
    scale_bytes: int


def row_of(payload: str, hidden: int, topk: int) -> Row | None:
    """Return the row of a payload (moecomm_bench.case.PAYLOADS) inside one domain; None if it can't be cut."""
    name, cast = payload.removesuffix(GIVEN).partition("-")[0], {}
    if name == "bf16":
        row_bytes, scale_bytes = 2 * hidden, 0
    else:
        fmt = FORMATS[name]
        size = 1 if "ue8m0" in payload else 0 if fmt.scales is None else fmt.scales.itemsize
        row_bytes, scale_bytes = fmt.row_bytes(hidden), -(-fmt.scale_columns(hidden) * size // 4) * 4
        if isinstance(fmt.group, int) and size and not payload.endswith(GIVEN):
            cast = {"scale_size": size, "group_bytes": fmt.row_bytes(fmt.group)}
    cut = packets.of_dispatch(row_bytes, scale_bytes, topk, **cast)
    return None if cut is None else Row(cut, row_bytes, scale_bytes)


def of_dispatch(args: _native.DispatchArgs) -> int | None:
    """Return the bytes that are stored for a row of a dispatch at one rank; None: its rows do not travel in packets."""
    if args.ctx.shape.packet_bytes == 0:
        return None
    from moecomm.gpu.spec import packets_of

    spec = dispatch_spec(args)
    cut, flat = packets_of(spec), spec.layout == _native.Layout.flat
    if cut is None or not spec.packets:
        return None
    return dispatch_bytes(cut, spec.row_bytes, spec.scale_bytes, spec.topk, flat=flat)


def of_combine(
    shape: _native.Shape, tokens: int, row_bytes: int, *, scaled: bool, exact: bool, single: float
) -> float | None:
    """Return the mean bytes that are stored for a row of 16-bit columns that returns to a rank with so many tokens.

    None: it does not travel in packets. `row_bytes`: as it travels, without scales; `scaled`, `exact`: see
    combine_bytes(); `single`: the share of rows that are the only one of their token on a rank.
    """
    cut = packets.of_combine(row_bytes, scaled=scaled)
    if is_multi_domain(shape) or not cut.carry(tokens, shape.topk, shape.packet_bytes):
        return None
    sums = combine_bytes(cut, row_bytes, scaled=scaled, exact=exact)
    return single * single_bytes(cut) + (1 - single) * sums if exact else sums


def dispatch_bytes(cut: Packets, row_bytes: int, scale_bytes: int, topk: int, *, flat: bool) -> int:
    """Return the bytes of the lines of a row of a dispatch."""
    rest = cut.number - 1
    last = _last(cut, row_bytes) // _WORD + _words(max(0, scale_bytes - rest * cut.scale_bytes))
    words = [(cut.row_bytes + cut.scale_bytes) // _WORD] * rest + [last]
    entries, shared = [topk] * cut.number, _lines(words[0]) + _lines(topk) <= cut.lines
    if rest and (flat or shared):
        entries = [topk] + [0] * rest
    if rest and shared and not flat:  # in lines of their own
        words[0] = _lines(words[0]) * LINE_WORDS
    return LINE_BYTES * sum(map(_lines, map(sum, zip(words, entries, strict=True))))


def combine_bytes(cut: Packets, row_bytes: int, *, scaled: bool = False, exact: bool = False) -> int:
    """Return the bytes of the lines of a row that returns.

    `scaled`: it is cast, with scales; `exact`: its sums have float32, and its last packet is as long as the others.
    """
    last = _last(cut, row_bytes)
    words = last // _WORD + (_words(4 * -(-last // QUANT_GROUP)) if scaled else 0)
    return LINE_BYTES * ((cut.number - 1) * cut.lines + (cut.lines if exact else _lines(words)))


def single_bytes(cut: Packets) -> int:
    """Return the bytes of the lines of the only row of a token, in place of an exact sum: half of its steps."""
    return LINE_BYTES * cut.number * sum(line // _STEP % 2 == 0 for line in range(cut.lines))


def _last(cut: Packets, row_bytes: int) -> int:
    return row_bytes - (cut.number - 1) * cut.row_bytes


def _words(bytes_: int) -> int:
    return -(-bytes_ // _WORD)


def _lines(words: int) -> int:
    return -(-words // LINE_WORDS)
