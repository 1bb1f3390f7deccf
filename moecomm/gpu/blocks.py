"""The block of a kernel: its warps, and the buffers in its shared memory."""

from __future__ import annotations

from moecomm import _native
from moecomm.base import formats, packets
from moecomm.base.experts import most_experts
from moecomm.base.protocol import MAX_BLOCKS, ROUND_HEADER_BYTES, TYPE_BYTES, WANTED_WORDS
from moecomm.gpu.spec import KernelSpec, align, packets_of, staged_type

CHOOSE_WARPS = 16  # kChooseWarps
_FLAT, _BEGIN, _END = _native.Layout.flat, _native.Part.begin, _native.Part.end
# Room for DispatchArgs or CombineArgs, and for a RoundHeader, in shared memory.
_ARGS_BYTES, _HEADER_BYTES = 1920, 104
assert max(_native.DispatchArgs().nbytes, _native.CombineArgs().nbytes) <= _ARGS_BYTES
assert ROUND_HEADER_BYTES <= _HEADER_BYTES
SHARED_LIMIT = 227 * 1024  # of a block on sm_90
_LINE = 128  # bytes of a cache line: a piece that begins inside of a line touches one line more
_MOST_SLOTS = 8
_SCALED_COLUMNS = 512  # kScaledColumns: a piece of a row with scales has complete ones
_PACKET_REDUCE_SLOTS = 4  # pieces of a reduce warp where most rows travel in packets
_FORWARD_SLOTS = 4  # pieces of a forward warp; rows have as many, or more
_PULL_BLOCKS = 48  # see CombineConfig::pull_blocks
# Warps of a block that makes row descriptors, and the most bytes of their counters.
_DESCRIPTOR_WARPS, _DESCRIPTOR_COUNTERS = 16, 64 * 1024


def _tables(spec: KernelSpec) -> int:
    """Upper bound, in bytes, of shared memory for arguments, per-expert tables and one header per rank."""
    words = 4 * (spec.experts + spec.ranks) + most_experts(spec.experts, spec.ranks)
    if spec.placed and not spec.balanced:
        words += 4 + spec.named_experts + spec.experts + 1  # placement_words
    of_rank = 8 + _HEADER_BYTES + 8 + 4 + 4 + 2 * 4 * WANTED_WORDS
    return _ARGS_BYTES + 4 * words + spec.ranks * of_rank + _HEADER_BYTES + 512


def choice_shared_bytes(ranks: int, slots: int, experts: int, *, replicates: bool) -> int:
    """Upper bound, in bytes, of the slot choice's shared memory: ChooseShared and, with copies, CopyShared.

    `experts`: Shape.named_experts.
    """
    words = (1 + CHOOSE_WARPS + 5) * experts + 2 * slots + 2 + ranks
    words += (experts + slots + 3 * ranks) * replicates
    return 4 * words + ROUND_HEADER_BYTES + 64


def _before_sources(spec: KernelSpec) -> int:
    """Bytes of shared memory for the rows of earlier sources, by source and local expert."""
    return 4 * spec.ranks * most_experts(spec.experts, spec.ranks)


def _put_ring(spec: KernelSpec) -> int:
    """Bytes of shared memory of a warp that puts: the Ring of its transport."""
    if spec.transport == "gin_proxy":
        return 128
    return align(4 * (3712 + 8) + 4, 128) if spec.transport in ("puts", "nic") else 0


def _descriptor_fields(spec: KernelSpec) -> dict[str, int]:
    """Fields of a block that makes row descriptors: all warps count and store, with own counters where they fit."""
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
        "shared_bytes": align(_tables(spec) + _before_sources(spec) + beside + 1024, 128),
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
        piece = 4096 if spec.hidden * size > 4096 else align(spec.hidden * size, 128 * size)
    else:
        piece = _piece(spec.hidden * size, 7168, 16)
    cast = spec.row_bytes if spec.quantize else 16
    cast_scales = 4 * -(-spec.hidden // 128) if spec.format == "fp8" else spec.scale_bytes
    replicate = _piece(spec.row_bytes, 3584, 16) if replicates else 16
    tables = _tables(spec)
    if packet:
        tables += _before_sources(spec)
    replicate_slots = 2
    # a ring for each receive warp, and the rows of a chunk's tokens
    replicate_total = (
        receive_warps * (align(replicate_slots * (replicate + 8) + 4 * 32 * spec.topk, 128) + 128)
        if replicates
        else 256
    )
    # One put warp cannot fill its share of a link.  16 warps leave a thread 128 registers, 17 only 96.
    put_warps = (2 if receive_warps else 4) if several and not ends else 0
    forward_warps, forward = (4, _piece(spec.row_bytes, 3584, 16)) if several else (0, 0)
    forward_total = (
        forward_warps * align(_FORWARD_SLOTS * (forward + 8) + 128, 128) + 128 * several + put_warps * _put_ring(spec)
    )
    few = ((8, 2), (6, 2), (4, 2), (2, 2), (1, 2))[2 * several :]
    if spec.format != "fp8":  # packets of 4-bit values take more room than those for which limits.py looks
        few += ((1, 1),)
    many = () if spec.packets or replicates or several else ((8, 3), (7, 3), (6, 3))
    for send_warps, slots in ((0, 2),) if ends else (*many, *few):
        of_scales = 2 * (cast_scales + 16)
        warp, count_warps = slots * (max(piece, 16) + 8) + 2 * cast + of_scales, 0
        if spec.packets and packet is not None:
            raw = packet.row_bytes * 8 // formats.FORMATS[spec.format].bits * size if spec.quantize else 16
            warp = slots * (align(raw, 128) + align(packet.lines * 120, 128) + 8) + 128
        elif spec.quantize:  # their counters use memory that no copy uses at first, if there is room
            count_warps = send_warps if cast >= 4 * columns else 0
        else:
            count_warps = min(send_warps, send_warps * (slots - slots // 2) * piece // (4 * columns))
        fixed = tables + replicate_total + forward_total + max(send_warps, 1) * warp + 256
        beside = 4 * columns if count_warps == 0 and not ends else 0
        count_warps, fixed = max(count_warps, int(not ends)), fixed + beside
        if fixed <= SHARED_LIMIT:
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
                "shared_bytes": align(fixed, 128),
            }
    raise ValueError(f"{spec.experts} experts: their counters do not fit {SHARED_LIMIT} bytes of shared memory")


def _combine_roles_of_domains(spec: KernelSpec) -> tuple[int, int, int]:
    """Reduce, pull and return-forward warps of a block of a combine across domains.

    All of them add through rings, so a byte takes a warp of any role about as long, and a role has warps in proportion
    to the bytes that it adds and puts.  Of 4096 tokens of DeepSeek-V3, a rank reduces 32768 rows.  With two domains of
    one rank, it pulls 8192 and returns 4096, each the only row of its token here; with two domains of four ranks, it
    pulls 15000 and adds 11000 to return 4096.  A wider wire doubles what is pulled and returned, and of flat rows a
    rank copies one for each token in place of adding several.  16 warps, one of them the flag warp, leave a thread 128
    registers.
    """
    if spec.in_place:
        return 0, 6, 5
    if spec.casts and spec.verifies and spec.ranks > 2 * spec.domain_ranks:  # 8 warps with the flag warp
        return 3, 2, 2
    if spec.casts or spec.verifies:  # 12 warps with the flag warp: casts and hashes take registers, and time
        return 5, 3, 3
    if spec.ranks == 2 and spec.layout != _FLAT:
        return 8, 4, 3
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
    elif spec.casts:  # casts take registers, and time (docs/maintainers/decisions.md)
        reduce_warps, pull_warps, return_forward_warps = (7, 4, 0) if spec.verifies else (10, 5, 0)
    else:  # flat rows are copied: as many bytes are pulled as reduced; of others fewer (docs/maintainers/decisions.md)
        reduce_warps, pull_warps, return_forward_warps = (7, 8, 0) if spec.layout == _FLAT else (12, 3, 0)
        if spec.verifies:  # hashes take registers, and time
            reduce_warps = 7
    # A piece is summed in registers: 56 fp32 columns a lane, or 32 where a block has more warps.
    summed = {2: 3584, 4: 4096} if spec.in_place else {1: 1024, 2: 2048, 4: 3584}
    staged, cast = staged_type(spec), spec.casts
    most_slots = _MOST_SLOTS
    if cast:  # of half as many bytes each; in one domain all blocks pull, and few pieces of each fill the links
        most_slots = 2 * _MOST_SLOTS if spec.domain_ranks else 4
    if spec.domain_ranks:  # next to the sums of other domains; of three domains or more, two sums at a time
        several = spec.ranks > 2 * spec.domain_ranks
        summed = {1: 512, 2: 1024, 4: 1536} if several else {1: 512, 2: 1536, 4: 2560}
        if spec.in_place:
            summed = {2: 2048, 4: 4096}
        spills = several or spec.layout == _FLAT or spec.own_weights or spec.wire != spec.type
        if not (spec.in_place or spills):  # reduce warps, which have most to load, get what four slots leave
            summed[2], most_slots = 2048, 4
    unit = _LINE if not cast or spec.hidden <= summed[1] else _SCALED_COLUMNS
    pull_bytes = _piece(spec.hidden * TYPE_BYTES[staged], summed[TYPE_BYTES[staged]], unit)
    places = max(most_slots, _MOST_SLOTS)
    beside = align(8 * places + 8 * 24, 128) + 128  # barriers and items of a ring, and alignment
    has_reduce_rings = not spec.in_place and (cast or spec.domain_ranks != 0)
    rings = pull_warps + return_forward_warps + (reduce_warps if has_reduce_rings else 0)
    if TYPE_BYTES[staged] > TYPE_BYTES[spec.type] or spec.domain_ranks or cast or spec.unsummed:
        beside += 16 * _MOST_SLOTS  # weights of single rows, or of those that reduce warps add, or of unsummed rows
    beside += 8 * places * spec.verifies  # where hashes go
    fixed = rings * beside + spec.ranks * (_HEADER_BYTES + 16) + _HEADER_BYTES + 512 + _ARGS_BYTES
    fixed += (8 * 8 * pull_warps + 384) * bool(spec.domain_ranks) + return_forward_warps * _put_ring(spec)
    packet = packets_of(spec) or packets.of_combine(spec.hidden * TYPE_BYTES[staged])
    if cast and not spec.domain_ranks:  # by warp that pushes
        fixed += reduce_warps * (align(packet.lines, 4) * _LINE + 16)
    left = SHARED_LIMIT - fixed
    if spec.packets:  # returned packets do not pass through a ring
        pull_bytes = 16
    slot_bytes = pull_bytes + cast * align(4 * -(-pull_bytes // 128), 16)
    pull_slots = 1 if spec.packets else min(most_slots, left // (rings * slot_bytes))
    used = pull_slots * (pull_warps + return_forward_warps) * slot_bytes
    reduce_bytes, reduce_slots = 16, 0
    if has_reduce_rings:  # pieces of 32 fp32 columns a lane; the rings get what the others leave
        unit = 128 * TYPE_BYTES[spec.type] if cast else _LINE  # complete groups of columns
        reduce_bytes = _piece(spec.hidden * TYPE_BYTES[spec.type], 2048, unit)
        most = _PACKET_REDUCE_SLOTS if spec.packets else _MOST_SLOTS
        reduce_slots = min(most, (left - used) // (reduce_warps * reduce_bytes))
        used += reduce_slots * reduce_warps * reduce_bytes
    return {
        "packet_row_bytes": packet.row_bytes,
        "packet_lines": packet.lines,
        "reduce_warps": reduce_warps,
        "pull_warps": pull_warps,
        "return_forward_warps": return_forward_warps,
        "flag_warps": int((reduce_warps > 0 or spec.domain_ranks != 0) and not spec.packets),
        "pull_bytes": pull_bytes,
        "pull_slots": pull_slots,
        "pull_blocks": _PULL_BLOCKS if spec.layout == _FLAT and not (spec.in_place or cast) else MAX_BLOCKS,
        "reduce_bytes": reduce_bytes,
        "reduce_slots": reduce_slots,
        "shared_bytes": align(used + fixed, 128),
    }


def block_fields(spec: KernelSpec) -> dict[str, int]:
    """Return the warps and buffers of a kernel's block, by names of config.cuh.  ValueError where it does not fit."""
    return _dispatch_fields(spec) if spec.op == "dispatch" else _combine_fields(spec)


def block_threads(fields: dict[str, int]) -> int:
    """Return the threads of a block with these fields."""
    return 32 * sum(n for name, n in fields.items() if name.endswith("_warps") and name != "count_warps")


def _piece(row_bytes: int, most: int, unit: int) -> int:
    """Bytes of the pieces in which a row is moved: as even as possible, multiples of `unit`, at most `most`."""
    pieces = -(-row_bytes // most)
    return align(-(-row_bytes // pieces), unit)
