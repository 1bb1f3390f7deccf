from __future__ import annotations

import copy
import ctypes
import re
from pathlib import Path
from typing import Any

import pytest

from moecomm import _native

ROOT = Path(__file__).parents[2]
STRUCTS = ("Context", "Route", "DispatchArgs", "CombineArgs")
RANGES = {"i32": (-(1 << 31), (1 << 31) - 1), "i64": (-(1 << 63), (1 << 63) - 1), "u64": (0, (1 << 64) - 1)}


def declared(struct: str, header: str = "args.h") -> dict[str, str]:
    """The scalar fields of a struct in csrc/protocol, with their types."""
    text = (ROOT / "csrc" / "protocol" / header).read_text()
    body = re.search(rf"struct {struct} \{{(.*?)\n\}};", text, re.DOTALL)
    assert body is not None
    lines = (line.partition("//")[0].strip() for line in body[1].splitlines())
    found = [match for match in map(re.compile(r"(u64|i64|i32) ([\w, ]+);").fullmatch, lines) if match]
    fields = {name: match[1] for match in found for name in match[2].split(", ")}
    fields.pop("pad", None)
    return fields


FIELDS = [(struct, name, kind) for struct in STRUCTS for name, kind in declared(struct).items()]


def memory_of(struct: Any) -> bytes:
    return ctypes.string_at(struct.address, struct.nbytes)


def test_the_header_was_read() -> None:
    assert len(FIELDS) > 50
    assert ("DispatchArgs", "in_scales_stride", "i64") in FIELDS
    assert ("Context", "rank", "i32") in FIELDS


@pytest.mark.parametrize("struct", STRUCTS)
def test_starts_as_zeros(struct: str) -> None:
    args = getattr(_native, struct)()
    assert args.nbytes > 0
    assert memory_of(args) == bytes(args.nbytes)
    assert all(getattr(args, name) == 0 for name in declared(struct))


@pytest.mark.parametrize(("struct", "name", "kind"), FIELDS)
def test_every_field_round_trips(struct: str, name: str, kind: str) -> None:
    args = getattr(_native, struct)()
    low, high = RANGES[kind]
    width = 4 if kind == "i32" else 8
    for value in (low, high, 0x1234567):
        setattr(args, name, value)
        assert getattr(args, name) == value
        others = [other for other in declared(struct) if other != name]
        assert all(getattr(args, other) == 0 for other in others)
    raw = memory_of(args)
    assert raw.count(0) == len(raw) - 4
    at = raw.index((0x1234567).to_bytes(4, "little"))
    assert raw[at : at + width] == (0x1234567).to_bytes(width, "little")
    for bad in (low - 1, high + 1):
        with pytest.raises(TypeError):
            setattr(args, name, bad)


def test_ctx_and_route_are_parts_of_the_struct() -> None:
    for args in (_native.DispatchArgs(), _native.CombineArgs()):
        args.ctx.rank = 3
        args.route.rows = 99
        assert (args.ctx.rank, args.route.rows) == (3, 99)
        assert args.address <= args.ctx.address < args.address + args.nbytes
        assert args.address < args.route.address < args.address + args.nbytes
        context = _native.Context()
        context.rank = 5
        args.ctx = context
        context.rank = 6
        assert args.ctx.rank == 5
        part = args.ctx
        del args
        assert part.rank == 5  # keeps the whole alive


def test_copies_are_apart() -> None:
    args = _native.DispatchArgs()
    args.ctx.peers = [1, 2]
    args.hidden = 7
    for twin in (copy.copy(args), copy.deepcopy(args)):
        assert memory_of(twin) == memory_of(args)
        twin.hidden = 8
        twin.ctx.rank = 1
        assert (args.hidden, args.ctx.rank) == (7, 0)
    context = copy.copy(args.ctx)
    context.rank = 2
    assert (args.ctx.rank, context.peers[:3]) == (0, [1, 2, 0])


def test_peers() -> None:
    context = _native.Context()
    assert context.peers == [0] * 64
    context.peers = list(range(1, 65))
    assert context.peers == list(range(1, 65))
    context.peers = [1 << 63]
    assert context.peers == [1 << 63] + [0] * 63
    with pytest.raises(ValueError, match="at most 64"):
        context.peers = [0] * 65
    assert memory_of(context)[:8] == (1 << 63).to_bytes(8, "little")


def check_parts(layout: _native.WindowLayout, sizes: dict[str, int]) -> None:
    """Each begins on a line of its own, and none reaches into the next."""
    parts = sorted((getattr(layout, name), size) for name, size in sizes.items())
    ends = [*(start for start, _ in parts[1:]), layout.bytes]
    assert all(start % 256 == 0 and start + size <= end for (start, size), end in zip(parts, ends, strict=True))


def test_shape_and_layout() -> None:
    shape = _native.Shape(4, 16, 2, 100, ring_tokens=64, staged_row_bytes=48, heap_bytes=1000, packet_bytes=512)
    names = ("ranks", "slots", "topk", "max_tokens", "ring_tokens", "staged_row_bytes", "heap_bytes", "packet_bytes")
    assert [getattr(shape, name) for name in names] == [4, 16, 2, 100, 64, 48, 1000, 512]
    layout = _native.window_layout(shape)
    assert (layout.columns, layout.num_tagged_words, layout.abort) == (20, 24 + 20 + 16, 0)
    sizes = {
        "abort": 4,
        "state": 24,
        "tagged_words": 2 * 4 * 60 * 8,
        "arrived": 4 * 100 * 8,
        "reduced": 4 * 100 * 8,
        "credits": 4 * 64 * 8,
        "drained": 4 * 8,
        "ranges": 4 * 100 * 4,
        "counting": 256 * 21 * 8,
        "summed": 256 * 21 * 8,
        "packets": 2 * 4 * 512,
        "split_headers": 0,
        "signals": 0,
        "counters": (2 + 7 * 4 + 4) * 8,
        "staging": 4 * 64 * 48,
        "receive_buffer": 0,
        "returned": 0,
        "heap": 1000,
    }
    check_parts(layout, sizes)
    shape.domain_ranks, shape.receive_bytes = 2, 80
    crossing = {
        "split_headers": 2 * 96,
        "signals": 2 * (3 * 4 + 4 * 2 * 64) * 8,
        "reduced": 4 * 2 * 100 * 8,
        "receive_buffer": 2 * 2 * 64 * 80,
        "returned": 2 * 2 * 64 * 48,
    }
    check_parts(_native.window_layout(shape), sizes | crossing)
    shape.domain_ranks = 0
    context = _native.Context()
    context.set_shape(shape)
    assert (context.shape.max_tokens, context.window.heap, context.window.bytes) == (100, layout.heap, layout.bytes)
    shape.ranks = 2
    assert context.shape.ranks == 4


@pytest.mark.parametrize("ring_tokens", [-32, 0, 16, 33])
def test_rings_that_chunks_do_not_fit(ring_tokens: int) -> None:
    with pytest.raises(ValueError, match="ring_tokens: want a multiple of 32"):
        _native.Shape(4, 16, 2, 100, ring_tokens=ring_tokens, staged_row_bytes=48, heap_bytes=1000)


def test_record() -> None:
    memory = _native.host_alloc(256)
    assert memory.address % 256 == 0
    assert _native.record(memory.address) is None
    fields = {
        "code": 5, "op": 2, "phase": 1, "argument": 3, "rank": 6, "peer": -1, "round": 1 << 31,
        "expected": -5, "seen": 1 << 40, "waited_ns": 1 << 63,
    }  # fmt: skip
    raw = b"".join(
        fields[name].to_bytes(width, "little", signed=signed)
        for name, width, signed in [
            ("code", 4, False), ("op", 4, False), ("phase", 4, False), ("argument", 4, False), ("rank", 4, True),
            ("peer", 4, True), ("round", 8, False), ("expected", 8, True), ("seen", 8, True), ("waited_ns", 8, False),
        ]
    )  # fmt: skip
    ctypes.memmove(memory.address, raw, len(raw))
    view = _native.record(memory.address)
    assert view is not None
    assert {name: getattr(view, name) for name in fields} == fields
    _native.clear_record(memory.address)
    assert _native.record(memory.address) is None
    assert view.code == 5
    assert ctypes.string_at(memory.address, 256) == bytes(256)


def test_addresses_that_cannot_be() -> None:
    for bad in (0, 3):
        for function in (_native.record, _native.clear_record, _native.read_word):
            with pytest.raises(ValueError, match="address"):
                function(bad)
    with pytest.raises(ValueError, match="address"):
        _native.set_abort(0, 1, 1)


def test_host_alloc() -> None:
    for nbytes in (0, 1, 256, 100_000):
        memory = _native.host_alloc(nbytes)
        assert (memory.nbytes, memory.address % 256) == (nbytes, 0)
        assert ctypes.string_at(memory.address, nbytes) == bytes(nbytes)
    with pytest.raises(MemoryError):
        _native.host_alloc((1 << 64) - 1)


@pytest.mark.parametrize("domain_ranks", [-1, 3, 5])
def test_domains_of_unequal_size(domain_ranks: int) -> None:
    with pytest.raises(ValueError, match="domain_ranks: want 0 or a divisor of ranks"):
        _native.Shape(4, 16, 2, 100, ring_tokens=32, staged_row_bytes=48, heap_bytes=1000, domain_ranks=domain_ranks)
