"""Configuration of a kernel."""

from __future__ import annotations

from dataclasses import dataclass

from moecomm import _native
from moecomm.base import formats, packets
from moecomm.base.choices import CAST_WIRES
from moecomm.base.protocol import MAX_RANKS, MAX_TOPK, TYPE_BYTES, TYPES
from moecomm.gpu import linking

_FLAT = _native.Layout.flat
_SCALED = tuple(int(TYPES[dtype]) for dtype in CAST_WIRES)  # types of rows that a combine casts


@dataclass(frozen=True)
class KernelSpec:
    """The configuration that a kernel is compiled for.  Names and codes are those of csrc/protocol/args.h.

    A field that only the other `op` needs keeps its default.
    """

    op: str  # "dispatch" or "combine"
    ranks: int
    experts: int
    topk: int
    hidden: int
    layout: int
    type: int  # of x, or of y
    idx_bytes: int = 8
    row_bytes: int = 0
    scale_bytes: int = 0
    scale_columns: bool = False
    quantize: bool = False
    scale_format: int = 0  # of "fp8"
    format: str = "fp8"  # to which `quantize` casts
    repeat: bool = False
    descriptors: bool = False
    placed: bool = False  # Context.placed is not 0; `experts` are then slots
    named_experts: int = 0  # of a placement that is looked up: Shape.named_experts
    balanced: bool = False  # it is BALANCED
    compares: bool = False  # DispatchArgs.compared is not 0
    part: int = 0
    packets: bool = False  # of few tokens: see packets_of
    wire: int = 2
    weighted: bool = True
    own_weights: bool = False  # by weights that each source rank passes to combine
    in_place: bool = False
    unsummed: bool = False  # CombineArgs.unsummed
    sum_grads: bool = False  # CombineArgs.sum_grads
    verifies: bool = False  # CombineArgs.staged_hashes
    wide_bias: bool = False  # the bias is float32, and not of `type`
    bias_first: bool = False  # CombineArgs.bias_first
    transport: str = "lsa"  # one of linking.TRANSPORTS: how the kernel reaches its peers
    domain_ranks: int = 0  # Shape.domain_ranks; 0, all, with "lsa" and no other
    traced: bool = False  # with spans: see span_ring

    def __post_init__(self) -> None:
        for name, value in vars(self).items():  # they become source text
            _want(
                isinstance(value, str if name in ("op", "transport", "format") else int),
                f"{name}={value!r}: want a number",
            )
        row = self.hidden * TYPE_BYTES[self.type]
        _want(self.format in formats.FORMATS, f"format={self.format!r}: want {', '.join(formats.FORMATS)}")
        _want(self.op in ("dispatch", "combine"), f"op={self.op!r}: want dispatch or combine")
        _want(
            self.transport in linking.TRANSPORTS, f"transport={self.transport!r}: want {', '.join(linking.TRANSPORTS)}"
        )
        _want(1 <= self.ranks <= MAX_RANKS, f"{self.ranks} ranks: want 1 to {MAX_RANKS}")
        near = self.domain_ranks or self.ranks
        _want(
            self.ranks % near == 0 and (near < self.ranks) == (self.transport != "lsa"),
            f"domain_ranks={self.domain_ranks}, {self.ranks} ranks: want several domains where a transport puts",
        )
        _want(not self.packets or self.transport == "lsa", "packets do not cross to other domains")
        _want(1 <= self.topk <= MAX_TOPK, f"topk={self.topk}: want 1 to {MAX_TOPK}")
        _want(self.experts >= self.ranks, f"{self.experts} experts: want at least {self.ranks}, the number of ranks")
        looks_up = self.placed and not self.balanced
        _want(looks_up == (self.named_experts > 0), f"named_experts={self.named_experts}: want those of a table")
        _want(row > 0 and row % 16 == 0, f"hidden={self.hidden}: rows of {row} bytes; want a multiple of 16 bytes")
        if self.op == "dispatch":
            fmt, others = formats.FORMATS[self.format], self.quantize and self.format != "fp8"
            _want(not others or fmt.fits_warps(self.hidden), f"hidden={self.hidden}: rows that a pass casts")
            sent = fmt.row_bytes(self.hidden) if self.quantize else row
            _want(sent % 16 == 0, f"hidden={self.hidden}: e4m3 rows of {sent} bytes; want a multiple of 16 bytes")
            _want(self.descriptors or self.row_bytes == sent, f"row_bytes={self.row_bytes}: want {sent}")
            scales = -(-self.hidden // 128) * (4 if self.scale_format == 0 else 1)
            scales = align(scales, 4) if self.scale_columns else scales
            scales = fmt.scale_bytes(self.hidden) if others else scales
            _want(not self.quantize or self.scale_bytes == scales, f"scale_bytes={self.scale_bytes}: want {scales}")
            _want(not self.scale_columns or self.scale_bytes % 4 == 0, f"scale_bytes={self.scale_bytes}: want words")
            _want(self.idx_bytes in (4, 8), f"idx_bytes={self.idx_bytes}: want 4 or 8")
            _want(not self.packets or packets_of(self) is not None, "packets of a row that can't be cut into them")
        else:
            _want(
                not self.own_weights or (self.weighted and self.layout != _FLAT),
                "own_weights: want weighted rows of experts",
            )
            staged = _native.staged_bytes(staged_type(self), self.hidden)
            _want(
                not self.casts or self.hidden % 16 == 0, f"hidden={self.hidden}: want a multiple of 16 columns to cast"
            )
            _want(not (self.casts and self.in_place), "rows that are cast are staged")
            _want(
                not self.unsummed or (self.in_place and self.layout != _FLAT and not self.domain_ranks),
                "unsummed: want rows of experts, in place, in one domain",
            )
            _want(
                not self.unsummed or (self.wire == self.type and not self.packets), "unsummed rows travel as they are"
            )
            _want(not self.verifies or not self.packets, "verified rows are pulled or put, not in packets")
            _want(self.type < 3, "combine of a type of one byte: want bf16, fp16 or fp32")
            _want(
                staged % 16 == 0, f"hidden={self.hidden}: reduced rows of {staged} bytes; want a multiple of 16 bytes"
            )

    @property
    def casts(self) -> bool:
        """True if rows travel with scales: CombineConfig::casts."""
        return self.wire in _SCALED


def staged_type(spec: KernelSpec) -> int:
    """Type of a row as a combine stages it: CombineConfig::staged."""
    return spec.type if spec.layout == _FLAT and not spec.casts else spec.wire


def packets_of(spec: KernelSpec) -> packets.Packets | None:
    """Packets in which rows of few tokens travel between kernels of this kind, on all ranks; None if they can't."""
    if spec.domain_ranks:
        return None
    if spec.op == "combine":
        staged = staged_type(spec)
        return packets.of_combine(spec.hidden * TYPE_BYTES[staged], scaled=spec.casts)
    if spec.part != 0 or spec.repeat or spec.descriptors:
        return None
    how = {}
    if spec.quantize:
        fmt = formats.FORMATS[spec.format]
        if isinstance(fmt.group, int) and fmt.scales is not None:
            scale_size = (4, 1)[spec.scale_format] if spec.format == "fp8" else fmt.scales.itemsize
            how = {"scale_size": scale_size, "group_bytes": fmt.row_bytes(fmt.group)}
    return packets.of_dispatch(spec.row_bytes, spec.scale_bytes, spec.topk, **how)


def align(n: int, to: int) -> int:
    """Round up to a multiple."""
    return -(-n // to) * to


def _want(holds: bool, why: str) -> None:
    if not holds:
        raise ValueError(why)
