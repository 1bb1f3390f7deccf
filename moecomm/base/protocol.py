"""Constants and enumerations of csrc/protocol, as the native module exports them, with torch's dtypes."""

from __future__ import annotations

from typing import cast, get_args

import torch

from moecomm import _native
from moecomm.base.choices import CAST_WIRES, Layout, ScaleFormat

_CONSTANTS = _native.constants()
MAX_RANKS, MAX_TOPK = _CONSTANTS["max_ranks"], _CONSTANTS["max_topk"]  # ranks of GPUs
MAX_HOST_RANKS = _CONSTANTS["max_host_ranks"]
MAX_CHUNK = _CONSTANTS["max_chunk"]  # tokens
MAX_BLOCKS = _CONSTANTS["max_blocks"]  # of a launch
MOST_WEIGHTS = _CONSTANTS["most_weights"]  # routing weights of a source rank that combine takes
QUANT_GROUP = _CONSTANTS["quant_group"]  # columns that share a scale
PACKET_TOKENS, PACKET_ENTRIES = _CONSTANTS["packet_tokens"], _CONSTANTS["most_packet_entries"]  # of a rank, at most
LINE_BYTES, LINE_WORDS, PACKET_LINES = (_CONSTANTS[name] for name in ("line_bytes", "line_words", "packet_lines"))
WANTED_WORDS = _CONSTANTS["wanted_words"]
PASS_THREADS = _CONSTANTS["pass_threads"]
DESCRIPTOR_BYTES = _CONSTANTS["descriptor_bytes"]
ROUND_HEADER_BYTES = _CONSTANTS["round_header_bytes"]
SCALAR_COUNTERS, PEER_COUNTERS = _CONSTANTS["scalar_counters"], _CONSTANTS["peer_counters"]  # csrc/protocol/counters.h
ROUNDS, DROPPED = range(SCALAR_COUNTERS)
MOST_HEAP_BYTES = _CONSTANTS["most_heap_bytes"]
MOST_SLOTS, MOST_REPLICAS = _CONSTANTS["most_slots"], _CONSTANTS["most_replicas"]
GENERATION, DIGEST_BITS = _CONSTANTS["generation"], _CONSTANTS["digest_bits"]  # csrc/protocol/placement.h
BY_TABLE, BALANCED, REPLICATED = (_CONSTANTS[name] for name in ("by_table", "balanced", "replicated"))
SHARE_PASSES, COPY_PART = _CONSTANTS["share_passes"], _CONSTANTS["copy_part"]

TYPES = {  # Type by dtype
    torch.bfloat16: _native.Type.bf16,
    torch.float16: _native.Type.fp16,
    torch.float32: _native.Type.fp32,
    torch.float8_e4m3fn: _native.Type.e4m3,
    torch.int8: _native.Type.int8,  # on the wire of a combine alone
}
CAST_TYPES = tuple(int(TYPES[dtype]) for dtype in CAST_WIRES)  # wires that combines cast sums to
TYPE_BYTES = {int(kind): dtype.itemsize for dtype, kind in TYPES.items()}
DTYPES = tuple(dtype for dtype in TYPES if dtype.itemsize > 1)  # of rows that combine adds up
LAYOUTS = cast("tuple[Layout, ...]", tuple(layout.name for layout in _native.Layout))
SCALE_FORMATS = cast("tuple[ScaleFormat, ...]", tuple(kind.name for kind in _native.ScaleFormat))
if (get_args(Layout), get_args(ScaleFormat)) != (LAYOUTS, SCALE_FORMATS):
    raise ImportError(
        "moecomm/base/choices.py and csrc/protocol/args.h differ: was the native module built from this version?"
    )


def reads_in_place(args: _native.CombineArgs) -> bool:
    """Return whether peers with many tokens read y in place: flat rows in this rank's window, neither cast nor with
    gradients; and rows that travel unsummed.

    Other rows of other layouts are added up first: over NVLink a row a (token, expert) is more bytes than a sum.
    """
    if args.unsummed:
        return True
    return (
        LAYOUTS[args.layout] == "flat"
        and args.wire not in CAST_TYPES
        and args.weight_grads == 0
        and args.ctx.in_heap(args.y)
    )


def hash_words(ranks: int, domains: int) -> int:
    """Return the number of int64 words of a token's hashes in a verified combine of GPUs: CombineCall::kHashWords."""
    words = ranks + (2 * domains if domains > 1 else 0)
    return words + words % 2


def told_bytes(domain_ranks: int) -> int:
    """Return the bytes of hashes that travel with a reduced row of a domain: CombineCall::kToldBytes."""
    return -(-8 * (1 + domain_ranks) // 16) * 16
