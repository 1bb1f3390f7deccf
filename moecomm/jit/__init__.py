"""Kernels compiled for the shape at hand: NVRTC through cuda.core, once, then from a disk cache of this user.

    kernel = jit.load(jit.KernelSpec(op="dispatch", ranks=4, experts=256, topk=8, hidden=7168, ...), device)
    launch(kernel.function, blocks, kernel.block, kernel.shared_bytes)

Nothing of the CUDA packages is imported before the first kernel is wanted.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import Any

from moecomm import _native
from moecomm.core import packets
from moecomm.core.experts import most_experts
from moecomm.core.protocol import MAX_BLOCKS, MAX_RANKS, MAX_TOPK, ROUND_HEADER_BYTES, TYPE_BYTES, WANTED_WORDS
from moecomm.jit import linking, loader, span_ring

_FLAT, _BEGIN, _END = _native.Layout.flat, _native.Part.begin, _native.Part.end
# Room for DispatchArgs or CombineArgs, and for a RoundHeader, in shared memory.
_ARGS_BYTES, _HEADER_BYTES = 1920, 104
assert max(_native.DispatchArgs().nbytes, _native.CombineArgs().nbytes) <= _ARGS_BYTES
assert ROUND_HEADER_BYTES <= _HEADER_BYTES
_SHARED_LIMIT = 227 * 1024  # of a block on sm_90
_LINE = 128  # bytes of a cache line: a piece that begins inside of a line touches one line more
_MOST_SLOTS = 8
_FORWARD_SLOTS = 4  # pieces of a forward warp; rows have as many, or more
_PULL_BLOCKS = 48  # see CombineConfig::pull_blocks
# Warps of a block that makes row descriptors, and the most bytes of their counters.
_DESCRIPTOR_WARPS, _DESCRIPTOR_COUNTERS = 16, 64 * 1024


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
    scale_format: int = 0
    repeat: bool = False
    descriptors: bool = False
    part: int = 0
    packets: bool = False  # of few tokens: see packets_of
    wire: int = 2
    weighted: bool = True
    own_weights: bool = False  # by weights that each source rank passes to combine
    in_place: bool = False
    sum_grads: bool = False  # CombineArgs.sum_grads
    verifies: bool = False  # CombineArgs.added_hashes
    wide_bias: bool = False  # the bias is float32, and not of `type`
    transport: str = "lsa"  # one of linking.TRANSPORTS: how the kernel reaches its peers
    domain_ranks: int = 0  # Shape.domain_ranks; 0, all, with "lsa" and no other
    traced: bool = False  # with spans: see span_ring

    def __post_init__(self) -> None:
        for name, value in vars(self).items():  # they become source text
            _want(isinstance(value, str if name in ("op", "transport") else int), f"{name}={value!r}: want a number")
        row = self.hidden * TYPE_BYTES[self.type]
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
        _want(row > 0 and row % 16 == 0, f"hidden={self.hidden}: rows of {row} bytes; want a multiple of 16 bytes")
        if self.op == "dispatch":
            sent = self.hidden if self.quantize else row
            _want(sent % 16 == 0, f"hidden={self.hidden}: e4m3 rows of {sent} bytes; want a multiple of 16 bytes")
            _want(self.descriptors or self.row_bytes == sent, f"row_bytes={self.row_bytes}: want {sent}")
            scales = -(-self.hidden // 128) * (4 if self.scale_format == 0 else 1)
            scales = _align(scales, 4) if self.scale_columns else scales
            _want(not self.quantize or self.scale_bytes == scales, f"scale_bytes={self.scale_bytes}: want {scales}")
            _want(not self.scale_columns or self.scale_bytes % 4 == 0, f"scale_bytes={self.scale_bytes}: want words")
            _want(self.idx_bytes in (4, 8), f"idx_bytes={self.idx_bytes}: want 4 or 8")
            _want(not self.packets or packets_of(self) is not None, "packets of a row that can't be cut into them")
        else:
            _want(
                not self.own_weights or (self.weighted and self.layout != _FLAT),
                "own_weights: want weighted rows of experts",
            )
            staged = self.hidden * TYPE_BYTES[self.type if self.layout == _FLAT else self.wire]
            _want(not self.verifies or not (self.packets or self.domain_ranks), "verified rows are pulled in a domain")
            _want(self.type < 3 and self.wire < 3, "combine of e4m3: want bf16, fp16 or fp32")
            _want(
                staged % 16 == 0, f"hidden={self.hidden}: reduced rows of {staged} bytes; want a multiple of 16 bytes"
            )


@dataclass(frozen=True)
class Kernel:
    """A loaded kernel: `function`, a CUfunction; `block`, its threads; `shared_bytes`, dynamic shared memory."""

    function: int
    block: int
    shared_bytes: int


def _want(holds: bool, why: str) -> None:
    if not holds:
        raise ValueError(why)


def _bool(value: bool) -> str:
    return str(value).lower()


def _align(n: int, to: int) -> int:
    return -(-n // to) * to


def _piece(row_bytes: int, most: int, unit: int) -> int:
    """Bytes of the pieces in which a row is moved: as even as possible, multiples of `unit`, at most `most`."""
    pieces = -(-row_bytes // most)
    return _align(-(-row_bytes // pieces), unit)


def packets_of(spec: KernelSpec) -> packets.Packets | None:
    """Packets in which rows of few tokens travel between kernels of this kind, on all ranks; None if they can't."""
    if spec.domain_ranks:
        return None
    if spec.op == "combine":
        return packets.of_combine(spec.hidden * TYPE_BYTES[spec.type if spec.layout == _FLAT else spec.wire])
    if spec.part != 0 or spec.repeat or spec.descriptors:
        return None
    scale_size = (4, 1)[spec.scale_format] if spec.quantize else 0
    return packets.of_dispatch(spec.row_bytes, spec.scale_bytes, spec.topk, scale_size=scale_size)


def _tables(spec: KernelSpec) -> int:
    """A bound of the shared memory of the arguments, of several words a column, and of what each rank sends."""
    words = 4 * (spec.experts + spec.ranks) + most_experts(spec.experts, spec.ranks)
    of_rank = 8 + _HEADER_BYTES + 8 + 4 + 4 + 2 * 4 * WANTED_WORDS
    return _ARGS_BYTES + 4 * words + spec.ranks * of_rank + _HEADER_BYTES + 512


def _before_sources(spec: KernelSpec) -> int:
    """Shared memory for the rows of earlier sources, by source and expert here."""
    return 4 * spec.ranks * most_experts(spec.experts, spec.ranks)


def _put_ring(spec: KernelSpec) -> int:
    """Shared memory of a warp that puts by bulk copies: PutRing of csrc/transport/puts.cuh."""
    return _align(4 * (3712 + 8) + 4, 128) if spec.transport in ("puts", "nic") else 0


def _descriptor_fields(spec: KernelSpec) -> dict[str, int]:
    """A block that makes row descriptors: all warps count and store, with counters of their own where there is room."""
    columns = 4 * (spec.experts + spec.ranks)
    count_warps = max(1, min(_DESCRIPTOR_WARPS, _DESCRIPTOR_COUNTERS // columns))
    beside = count_warps * columns
    no_packets = dict.fromkeys(("packet_row_bytes", "packet_scale_bytes", "packet_lines"), 0)
    no_others = dict.fromkeys(("receive_warps", "metadata_warps", "flag_warps", "put_warps", "forward_warps"), 0)
    no_ring = {"piece_columns": spec.hidden, "ring_slots": 1, "replicate_bytes": 16, "replicate_slots": 1}
    return {
        **no_packets,
        "send_warps": _DESCRIPTOR_WARPS,
        **no_others,
        **no_ring,
        "forward_bytes": 0,
        "forward_slots": 0,
        "count_warps": count_warps,
        "count_bytes": beside,
        "shared_bytes": _align(_tables(spec) + _before_sources(spec) + beside + 1024, 128),
    }


def _dispatch_fields(spec: KernelSpec) -> dict[str, int]:
    """The warps and buffers of a block of a dispatch kernel; shared_bytes bounds DispatchShared from above."""
    if spec.descriptors:
        return _descriptor_fields(spec)
    size, columns, ends = TYPE_BYTES[spec.type], spec.experts + spec.ranks, spec.part == _END
    replicates = spec.layout != _FLAT and spec.part != _BEGIN
    several = spec.domain_ranks != 0
    receive_warps = 8 if replicates or ends or (spec.scale_columns and spec.part != _BEGIN) else 0
    if several and not ends:
        receive_warps //= 2
    if spec.packets:
        receive_warps = 16 if replicates else 12
    packet = packets_of(spec)
    if spec.quantize:  # whole steps of the cast, kStepColumns of quantize.cuh
        piece = 4096 if spec.hidden * size > 4096 else _align(spec.hidden * size, 128 * size)
    else:
        piece = _piece(spec.hidden * size, 7168, 16)
    cast = spec.hidden if spec.quantize else 16
    replicate = _piece(spec.row_bytes, 3584, 16) if replicates else 16
    tables = _tables(spec)
    if packet:
        tables += _before_sources(spec)
    replicate_slots = 2
    # a ring for each receive warp, and the rows of a chunk's tokens
    replicate_total = (
        receive_warps * (_align(replicate_slots * (replicate + 8) + 4 * 32 * spec.topk, 128) + 128)
        if replicates
        else 256
    )
    # One put warp cannot fill its share of a link.  16 warps leave a thread 128 registers, 17 only 96.
    put_warps = (2 if receive_warps else 4) if several and not ends else 0
    forward_warps, forward = (4, _piece(spec.row_bytes, 3584, 16)) if several else (0, 0)
    forward_total = (
        forward_warps * _align(_FORWARD_SLOTS * (forward + 8) + 128, 128) + 128 * several + put_warps * _put_ring(spec)
    )
    few = ((8, 2), (6, 2), (4, 2), (2, 2), (1, 2))[2 * several :]
    many = () if spec.packets or replicates or several else ((8, 3), (7, 3), (6, 3))
    for send_warps, slots in ((0, 2),) if ends else (*many, *few):
        of_scales = 2 * (4 * -(-spec.hidden // 128) + 16)
        warp, count_warps = slots * (max(piece, 16) + 8) + 2 * cast + of_scales, 0
        if spec.packets and packet is not None:
            raw = packet.row_bytes * size if spec.quantize else 16
            warp = slots * (_align(raw, 128) + _align(packet.lines * 120, 128) + 8) + 128
        elif spec.quantize:  # their counters use memory that no copy uses at first, if there is room
            count_warps = send_warps if cast >= 4 * columns else 0
        else:
            count_warps = min(send_warps, send_warps * (slots - slots // 2) * piece // (4 * columns))
        fixed = tables + replicate_total + forward_total + max(send_warps, 1) * warp + 256
        beside = 4 * columns if count_warps == 0 and not ends else 0
        count_warps, fixed = max(count_warps, int(not ends)), fixed + beside
        if fixed <= _SHARED_LIMIT:
            return {
                "packet_row_bytes": packet.row_bytes if packet else 0,
                "packet_scale_bytes": packet.scale_bytes if packet else 0,
                "packet_lines": packet.lines if packet else 0,
                "send_warps": send_warps,
                "receive_warps": receive_warps,
                "metadata_warps": int(not ends and (several or not spec.repeat) and not spec.packets),
                "flag_warps": int(not ends and not spec.packets),
                "put_warps": put_warps,
                "forward_warps": forward_warps,
                "piece_columns": piece // size,
                "ring_slots": slots,
                "replicate_bytes": replicate,
                "replicate_slots": replicate_slots,
                "forward_bytes": forward,
                "forward_slots": _FORWARD_SLOTS * several,
                "count_warps": count_warps,
                "count_bytes": beside,
                "shared_bytes": _align(fixed, 128),
            }
    raise ValueError(f"{spec.experts} experts: their counters do not fit {_SHARED_LIMIT} bytes of shared memory")


def _combine_roles_of_domains(spec: KernelSpec) -> tuple[int, int, int]:
    """Reduce, pull and return-forward warps of a block of a combine across domains.

    All of them add through rings, so a byte takes a warp of any role about as long, and a role has warps in proportion
    to the bytes that it adds and puts.  Of 4096 tokens of DeepSeek-V3, a rank reduces 32768 rows.  With two domains of
    one rank, it pulls 8192 and returns the sums of 4096; with two domains of four ranks, it pulls 15000 and adds 11000
    to return 4096.  A wider wire doubles what is pulled and returned, and of flat rows a rank copies one for each token
    in place of adding several.  16 warps, one of them the flag warp, leave a thread 128 registers.
    """
    if spec.in_place:
        return 0, 7, 5
    wide = spec.layout == _FLAT or TYPE_BYTES[spec.wire] > TYPE_BYTES[spec.type]
    return (6, 4, 5) if wide else (7, 4, 4)


def _combine_fields(spec: KernelSpec) -> dict[str, int]:
    """The warps and buffers of a block of a combine kernel; shared_bytes bounds CombineShared from above."""
    if spec.packets:
        reduce_warps, pull_warps, return_forward_warps = 8, 8, 0
    elif spec.domain_ranks:
        reduce_warps, pull_warps, return_forward_warps = _combine_roles_of_domains(spec)
    elif spec.in_place:
        reduce_warps, pull_warps, return_forward_warps = 0, 12, 0
    else:  # flat rows are copied: as many bytes are pulled as reduced; of others fewer (docs/decisions.md)
        reduce_warps, pull_warps, return_forward_warps = (7, 8, 0) if spec.layout == _FLAT else (12, 3, 0)
        if spec.verifies:  # hashes take registers, and time
            reduce_warps = 7
    # A piece is summed in registers: 56 fp32 columns a lane, or 32 where a block has more warps.
    summed = {2: 3584, 4: 4096} if spec.in_place else {2: 2048, 4: 3584}
    staged = spec.type if spec.layout == _FLAT else spec.wire
    if spec.domain_ranks:  # next to the sums of other domains; of three domains or more, two sums at a time
        several = spec.ranks > 2 * spec.domain_ranks
        summed = {2: 2048, 4: 4096} if spec.in_place else {2: 1024, 4: 2048} if several else {2: 1536, 4: 3072}
    pull_bytes = _piece(spec.hidden * TYPE_BYTES[staged], summed[TYPE_BYTES[staged]], _LINE)
    beside = _align(8 * _MOST_SLOTS + 8 * 24, 128) + 128  # barriers and items of a ring, and alignment
    rings = pull_warps + return_forward_warps + (reduce_warps if spec.domain_ranks else 0)
    if TYPE_BYTES[staged] > TYPE_BYTES[spec.type] or spec.domain_ranks:
        beside += 16 * _MOST_SLOTS  # weights of single rows, or of those that reduce warps add
    beside += 8 * _MOST_SLOTS * spec.verifies  # where hashes go
    fixed = rings * beside + spec.ranks * (_HEADER_BYTES + 16) + _HEADER_BYTES + 512 + _ARGS_BYTES
    fixed += (8 * 8 * pull_warps + 384) * bool(spec.domain_ranks) + return_forward_warps * _put_ring(spec)
    left = _SHARED_LIMIT - fixed
    if spec.packets:  # returned packets do not pass through a ring
        pull_bytes = 16
    pull_slots = 1 if spec.packets else min(_MOST_SLOTS, left // (rings * pull_bytes))
    used = pull_slots * (pull_warps + return_forward_warps) * pull_bytes
    reduce_bytes, reduce_slots = 16, 0
    if spec.domain_ranks and not spec.in_place:  # pieces of 32 fp32 columns a lane; the rings get what the others leave
        reduce_bytes = _piece(spec.hidden * TYPE_BYTES[spec.type], 2048, _LINE)
        reduce_slots = min(_MOST_SLOTS, (left - used) // (reduce_warps * reduce_bytes))
        used += reduce_slots * reduce_warps * reduce_bytes
    packet = packets.of_combine(spec.hidden * TYPE_BYTES[staged])
    return {
        "packet_row_bytes": packet.row_bytes,
        "packet_lines": packet.lines,
        "reduce_warps": reduce_warps,
        "pull_warps": pull_warps,
        "return_forward_warps": return_forward_warps,
        "flag_warps": int(reduce_warps > 0 and not spec.packets),
        "pull_bytes": pull_bytes,
        "pull_slots": pull_slots,
        "pull_blocks": _PULL_BLOCKS if spec.layout == _FLAT and not spec.in_place else MAX_BLOCKS,
        "reduce_bytes": reduce_bytes,
        "reduce_slots": reduce_slots,
        "shared_bytes": _align(used + fixed, 128),
    }


def block_fields(spec: KernelSpec) -> dict[str, int]:
    """Return the warps and buffers of a kernel's block, by names of config.cuh.  ValueError where it does not fit."""
    return _dispatch_fields(spec) if spec.op == "dispatch" else _combine_fields(spec)


def block_threads(fields: dict[str, int]) -> int:
    """Return the threads of a block with these fields."""
    return 32 * sum(n for name, n in fields.items() if name.endswith("_warps") and name != "count_warps")


def source(spec: KernelSpec) -> str:
    """Return the translation unit of a kernel: its configuration, by named fields, and an unmangled entry."""
    shape = f".ranks = {spec.ranks}, .experts = {spec.experts}, .topk = {spec.topk}, .hidden = {spec.hidden}"
    if spec.domain_ranks:
        shape += f", .domain_ranks = {spec.domain_ranks}"
    kind = f".layout = Layout::{_native.Layout(spec.layout).name}, .type = Type::{_native.Type(spec.type).name}"
    if spec.op == "dispatch":
        kind += f", .idx_bytes = {spec.idx_bytes}, .row_bytes = {spec.row_bytes}, .scale_bytes = {spec.scale_bytes}"
        kind += f", .scale_columns = {_bool(spec.scale_columns)}, .quantize = {_bool(spec.quantize)}"
        kind += f", .scale_format = ScaleFormat::{_native.ScaleFormat(spec.scale_format).name}"
        kind += f", .repeat = {_bool(spec.repeat)}"
        kind += f", .descriptors = {_bool(spec.descriptors)}"
        kind += f", .part = Part::{_native.Part(spec.part).name}, .packets = {_bool(spec.packets)}"
    else:
        kind += f", .wide_bias = {_bool(spec.wide_bias)}"
        kind += f", .wire = Type::{_native.Type(spec.wire).name}, .weighted = {_bool(spec.weighted)}"
        kind += f", .own_weights = {_bool(spec.own_weights)}, .in_place = {_bool(spec.in_place)}"
        kind += f", .sum_grads = {_bool(spec.sum_grads)}, .verifies = {_bool(spec.verifies)}"
        kind += f", .packets = {_bool(spec.packets)}"
    fields = block_fields(spec)
    block = ", ".join(f".{name} = {value}" for name, value in fields.items())
    name, function = spec.op.capitalize(), "dispatch_end" if spec.part == _END else spec.op
    transport = linking.TRANSPORTS[spec.transport]
    return span_ring.DEFINITION * spec.traced + (
        f'#include "{spec.op}/{spec.op}.cuh"\n{linking.included(spec.transport)}'
        "using namespace moecomm;\n"
        f"constexpr {name}Config config{{{shape}, {kind}, {block}}};\n"
        f'extern "C" __global__ void __launch_bounds__({block_threads(fields)}, 1)\n'
        f"moecomm_{spec.op}(const __grid_constant__ {name}Args args) {{ {function}<config, {transport}>(args); }}\n"
    )


def build(spec: KernelSpec, arch: str = "sm_90a") -> tuple[bytes, str]:
    """Compile, and link if the transport has a shim, without the cache.  Return the cubin and ptxas's messages."""
    return loader.build(source(spec), spec.transport, arch)


def compile(spec: KernelSpec, arch: str = "sm_90a") -> bytes:  # noqa: A001
    """Return the cubin of a kernel, from the cache or compiled.  Needs no GPU.

    Raises:
        ValueError: names a limit that the kernel exceeds.
        Unsupported: the transport is not "lsa", and the library that it is linked with is missing.
    """
    return loader.cubin_of(source(spec), spec.transport, arch, lambda: build(spec, arch))


_loaded: dict[tuple[KernelSpec, int], Kernel] = {}
_loading = threading.Lock()


def load(spec: KernelSpec, device: Any) -> Kernel:
    """Return the kernel on a CUDA device (a torch.device with an index, or the index), compiled if need be."""
    index = int(getattr(device, "index", device))
    if (kernel := _loaded.get((spec, index))) is None:
        with _loading:
            if (kernel := _loaded.get((spec, index))) is None:
                kernel = _loaded[spec, index] = _load(spec, index)
    return kernel


def _load(spec: KernelSpec, index: int) -> Kernel:
    fields = block_fields(spec)
    entry, shared_bytes = f"moecomm_{spec.op}", fields["shared_bytes"]
    function = loader.load(index, lambda arch: compile(spec, arch), entry, spec.transport, shared_bytes, spec.traced)
    return Kernel(function, block_threads(fields), shared_bytes)
