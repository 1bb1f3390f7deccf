"""Kernels as g++ compiles them: csrc with plain functions in place of those that are written in PTX."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

FOLDERS = ("protocol", "device", "transport", "dispatch", "combine", "elementwise", "host", "window", "include")
# Bulk copies are made when they are asked for.
COPY = (
    "if (bytes % 16 != 0 || (reinterpret_cast<u64>(to) | reinterpret_cast<u64>(from)) % 16 != 0) __builtin_trap(); "
    "memcpy(to, from, bytes);"
)
BODIES: dict[str, dict[str, str]] = {
    "device/bulk.cuh": {
        "shared_address": "return 0;",
        "barrier_init": "*barrier = 0;",
        "bulk_load": f"{COPY} emulator::emulator_flip(to, from, bytes); ++*barrier;",
        "bulk_load_both": f"{COPY} memcpy(to_too, from_too, bytes_too); emulator::emulator_flip(to, from, bytes); "
        "emulator::emulator_flip(to_too, from_too, 4); ++*barrier;",
        "copy_wait": "while ((*const_cast<volatile u64*>(barrier) & 1) == parity) emulator::emulator_yield();",
        "bulk_store": COPY,
        **dict.fromkeys(
            ("barrier_init_done", "bulk_commit", "bulk_wait_read", "bulk_wait", "fence_async", "fence_async_shared"), ""
        ),
    },
    "device/lanes.cuh": {
        "load_fresh": "return *const_cast<const volatile i32*>(from);",
        "lanes_below": "return (1u << threadIdx.x % 32) - 1;",
    },
    "device/launch.cuh": {
        "await_earlier_kernels": "emulator::await_earlier_launch();",
        "launch_dependents": "emulator::let_next_launch();",
    },
    "device/trace.cuh": {"store_pair": "to[0] = first, to[1] = second;"},
    "device/grid.cuh": {
        "arrive_last": "if (++*counter != gridDim.x) return false; *counter = 0; return true;",
        "barrier_sync": "emulator::meet(barrier, threads, false);",
        "barrier_arrive": "emulator::meet(barrier, threads, false, false);",
        "barrier_sync_any": "return emulator::meet(barrier, threads, here);",
    },
    "device/packet.cuh": {
        "store_line_words": "ulonglong2 mine = words; emulator::exchange_line(to, mine, true);",
        "load_line_words": "ulonglong2 words; emulator::exchange_line(from, words, false); return words;",
    },
    "combine/scaleout_source_rank.cuh": {"load_vector": "ulonglong2 words; memcpy(&words, from, 16); return words;"},
    "device/cast.cuh": {
        "e4m3_to_fp16": "u32 halves = host::Fp16::round(host::load_e4m3(both & 0xffu)); "
        "return halves | host::Fp16::round(host::load_e4m3(both >> 8)) << 16;",
        "narrow_e4m3": "return plain_e4m3(first) | plain_e4m3(second) << 8;",
        "near_reciprocal": "return 1.0f / amax;",
        "larger_magnitude": "return magnitude != magnitude || magnitude > fabsf(column) ? magnitude : fabsf(column);",
    },
    # Puts to other domains come late, in as bad an order as it may: see scheduler.cpp.  An add before settle() is lost.
    "transport/puts.cuh": {
        "channels": "return 2;",
        "prepare": "memset(&ring, 0, sizeof(PutRing));",
        "put_ahead": "if (lane_id() == 0) emulator::emulator_put(ctx.rank, peer, way, remote(peer, to), "
        "local<u8>(from), bytes); ahead = true; __syncwarp();",
        "settle": "ahead = false; __syncwarp();",
        "add": "if (!ahead) emulator::emulator_add(ctx.rank, peer, way, reinterpret_cast<unsigned long long*>("
        "remote(peer, signal_at(ctx.window, which))), amount);",
    },
    "device/globaltimer.cuh": {"doze": "emulator::emulator_yield();"},
}
SHARED = r"extern __shared__ .*? memory\[\];", "u8* memory = emulator::emulator_thread->of_block->shared;"
TEXTS: dict[str, list[tuple[str, str]]] = {
    "transport/puts.cuh": [
        (
            r"explicit Puts\(const Context& context, i32 = 0\) : Lsa\{context\} \{\}",
            "explicit Puts(const Context& context, i32 channel = 0) : Lsa{context}, way(channel) {} i32 way; "
            "mutable bool ahead = false;",
        )
    ],
    # Its messages cost as much as those of GIN's proxy, which cannot run here.  Puts use no ring here.
    "transport/nic.cuh": [
        (r"Puts\{context\}", "Puts{context, channel % 2}"),
        (r"struct Nic : Puts \{", "struct Nic : Puts { static constexpr i64 worth_a_message = 128 * 1024;"),
    ],
    "transport/nvshmem.cuh": [(r'"\.\./shims/shims\.h"', '"nvshmem.h"')],
    "device/step_counters.cuh": [
        (r'asm volatile\("atom\.acq_rel\.cta[^;]*?;[^;]*;', "before = (*counter)++;"),
        (r'asm volatile\("fence[^\n]*', ""),
    ],
    "device/cast.cuh": [
        (
            r'asm\("\{\\n\\t\.reg \.b16.*?\);\n',
            "_Float16 half[2]; memcpy(half, &word, 4); out[0] = half[0], out[1] = half[1];\n",
        ),
        (r'asm\("max\.u16x2[^;]*;[^;]*;', "both = max(a & 0xffffu, b & 0xffffu) | max(a >> 16, b >> 16) << 16;"),
        (r'asm\("cvt\.rn\.bf16x2[^;]*;[^;]*;', "word = host::Bf16::round(in[0]) | host::Bf16::round(in[1]) << 16;"),
        (r'asm\("cvt\.rn\.f16x2[^;]*;[^;]*;', "word = host::Fp16::round(in[0]) | host::Fp16::round(in[1]) << 16;"),
        (
            r"namespace moecomm \{\n",
            '#include "../host/casts.h"\nnamespace moecomm {\ninline u32 plain_e4m3(float f) '
            "{ return host::round_e4m3(f > 448.0f ? 448.0f : f < -448.0f ? -448.0f : f); }\n",
        ),
    ],
    "combine/pull.cuh": [(r'asm volatile\("fence[^\n]*', "")],
    "combine/scaleout_direct.cuh": [(r'asm volatile\("fence[^\n]*', "")],
    "dispatch/dispatch.cuh": [SHARED],
    "dispatch/choose.cuh": [SHARED],
    "elementwise/quantize_rows.cuh": [
        (
            r"__shared__ u32 of_warps(\[.*?\]);",
            r"auto& of_warps = *reinterpret_cast<u32(*)\1>(emulator::emulator_thread->of_block->shared);",
        )
    ],
    # Those of some warps take longer.
    "dispatch/descriptors.cuh": [
        (
            r"(?=const i64 id = )",
            "for (u32 left = (threadIdx.x / kWarp + 3 * blockIdx.x + c.me()) % 7 * 100; left != 0; --left) "
            "emulator::emulator_yield(); ",
        )
    ],
    "combine/combine.cuh": [SHARED],
}


def write(csrc: Path, into: Path) -> None:
    """A copy of csrc without PTX.  AssertionError names what is not as it was when this was written."""
    for folder in FOLDERS:
        shutil.copytree(csrc / folder, into / folder)
    replace(into, BODIES, TEXTS)


def replace(into: Path, bodies: dict[str, dict[str, str]], texts: dict[str, list[tuple[str, str]]]) -> None:
    """Functions do what `bodies` says, and texts become others; no PTX may be left."""
    for file in {*bodies, *texts}:
        text = (into / file).read_text()
        for name, body in bodies.get(file, {}).items():
            text = _with_body(text, name, body, file)
        for pattern, plain in texts.get(file, []):
            text, found = re.subn(pattern, plain, text, flags=re.DOTALL)
            assert found >= 1, f"{file}: no {pattern}"
        (into / file).write_text(text)
    left = [path for path in into.rglob("*.cuh") if re.search(r"\basm\b", path.read_text())]
    assert not left, f"PTX is left in {left}"


def _with_body(text: str, name: str, body: str, file: str) -> str:
    """The function of that name does `body` alone."""
    begin = re.search(rf"MOECOMM_FN [^;{{}}()]*\b{name}\(", text)
    assert begin is not None, f"{file}: no {name}"
    first = text.index("{", _end(text, begin.end(), "()"))
    return f"{text[:first]}{{ {body} {text[_end(text, first + 1, '{}') - 1 :]}"


def _end(text: str, at: int, pair: str) -> int:
    """Behind what closes the bracket that is open before `at`."""
    depth = 1
    while depth:
        depth += {pair[0]: 1, pair[1]: -1}.get(text[at], 0)
        at += 1
    return at
