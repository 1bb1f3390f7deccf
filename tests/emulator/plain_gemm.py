"""csrc/fused and csrc/overlap as g++ compiles them: plain functions in place of PTX."""

from __future__ import annotations

import shutil
from pathlib import Path

from . import plain

BODIES: dict[str, dict[str, str]] = {
    "device/bulk.cuh": {
        "shared_address": "return emulator::offset_of(p);",
        "barrier_init": "emulator::init_barrier(barrier, arrivals);",
        # Those of some warps take longer.
        "bulk_load": "emulator::require_no_barriers(*emulator::emulator_thread->of_block, emulator::offset_of(to), "
        f"bytes); {plain.COPY} for (u32 left = threadIdx.x / kWarp % 7 * 16; left != 0; --left) "
        "emulator::emulator_yield(); emulator::bring(*barrier, 1, 0);",
        "bulk_load_both": "bulk_load(to, from, bytes, barrier); memcpy(to_too, from_too, bytes_too);",
        # A group each, written when it must have been.
        "bulk_store": "emulator::store_later(to, from, bytes);",
        "bulk_wait": "emulator::finish_stores(groups);",
    },
    "gemm/tensor.cuh": {
        "prefetch_map": "emulator::forget_lines();",  # when a block begins
        **dict.fromkeys(("reg_alloc", "reg_dealloc"), ""),
        "expect_bytes": "emulator::bring(*barrier, 1, -bytes);",
        "load_box": "emulator::load_box(to, &map, {column, row, matrix}, barrier, 1, 0, 1);",
        "load_pairs": "emulator::load_box(to, &map, {column, 0, 0, pair, matrix}, barrier, 1, 0, 1);",
        "load_box_for_all": "emulator::load_box(to, &map, {column, row}, barrier, cluster, 0, cluster);",
        "cluster_rank": "return blockIdx.x % 2;",
        "arrive_at": "emulator::bring(*reinterpret_cast<u64*>(emulator::of_cluster(2, rank)->shared + "
        "emulator::offset_of(barrier)), 1, 0);",
        "arrive": "emulator::bring(*barrier, 1, 0);",
        "sync_cluster": "emulator::sync_cluster(cluster);",
    },
    "gemm/wgmma.cuh": {
        **dict.fromkeys(("wgmma_begin", "wgmma_commit"), ""),
        "wgmma_wait": "__syncwarp();",  # who releases a slot has waited for the products of all lanes
        "wgmma_registers": "emulator::multiply_registers<n>(accum, a, b, keep != 0);",
        "wgmma": "emulator::multiply<static_cast<int>(type), n>(accum, a, b, keep != 0);",
        "wgmma_integers": "emulator::multiply_integers<n>(accum, a, b, keep != 0);",
    },
    "gemm/scales.cuh": {
        "load_scale": "memcpy(emulator::shared_at(to), emulator::in_first_level(from), 4);",
        "arrive_when_loaded": "emulator::bring(*barrier, 1, 0);",
        "finish_scales": "emulator::forget_lines();",  # the acquire that follows does
    },
    "gemm/mxfp4.cuh": {
        "multiply_pairs": "u32 out = 0; for (i32 half = 0; half < 32; half += 16) out |= host::Bf16::round("
        "__uint_as_float(a >> half << 16) * __uint_as_float(b >> half << 16)) << half; return out;",
    },
    "gemm/widen.cuh": {
        "look_up": "return __byte_perm(low, high, places);",
        # Some warps take longer.
        "load_shared_word": "for (u32 left = threadIdx.x / kWarp % 4 * 3; left != 0; --left) "
        "emulator::emulator_yield(); u32 v; memcpy(&v, emulator::shared_at(address), 4); return v;",
        "store_shared": "memcpy(emulator::shared_at(address), &v, 16);",
    },
    "gemm/scaled.cuh": {
        "load_shared_pair": "float2 v; memcpy(&v, emulator::shared_at(address), 8); return v;",
        **dict.fromkeys(("pin_registers", "pin_integers"), ""),
    },
    "fused/fetch.cuh": {
        "fence_gpu": "",
        "load_acquire_shared": "const i32 v = *const_cast<const volatile i32*>(&word); "
        "emulator::emulator_yield(); return v;",
        "store_release_shared": "word = v;",
    },
    "gemm/tile_counter.cuh": {
        "next_of": "return static_cast<i32>((*counter)++);",
        "send_word": "const emulator::Block& block = *emulator::of_cluster(2, rank); "
        "memcpy(block.shared + emulator::offset_of(to), &value, 4); "
        "emulator::bring(*reinterpret_cast<u64*>(block.shared + emulator::offset_of(barrier)), 0, 4);",
    },
    "gemm/scaled_rows.cuh": {"load_shared_float": "float v; memcpy(&v, emulator::shared_at(address), 4); return v;"},
    "gemm/epilogue_rows.cuh": {
        "store_matrices": "emulator::store_matrices(address, {m0, m1, m2, m3});",
        "store_shared_words": "const u32 words[2] = {first, second}; memcpy(emulator::shared_at(address), words, 8);",
    },
    "overlap/split_depth.cuh": {
        "release_at": "emulator::bring(*reinterpret_cast<u64*>(emulator::of_cluster(2, rank)->shared + "
        "emulator::offset_of(barrier)), 1, 0);",
        "acquire_wait": "copy_wait(barrier, parity);",
        "load_of_block": "float4 v; memcpy(&v, emulator::of_cluster(2, rank)->shared + emulator::offset_of(from), 16); "
        "return v;",
    },
    "overlap/gemv_all_reduce.cuh": {
        "load_streamed": "uint4 v; memcpy(&v, reinterpret_cast<const void*>(from), 16); return v;",
        "multiply_small": "emulator::multiply_small<static_cast<int>(type)>(d, {a0, a1, a2, a3}, {b0, b1});",
    },
    "overlap/vectors.cuh": {
        # Now and then a lane takes as long as a round: its rank falls behind.
        "load_vector": "static u32 loads = 0; for (u32 left = ++loads % 307 == 0 ? 4000 : 0; left != 0; --left) "
        "emulator::emulator_yield(); uint4 v; memcpy(&v, reinterpret_cast<const void*>(from), 16); return v;",
        "store_vector": "memcpy(reinterpret_cast<void*>(to), &v, 16);",
    },
    "fused/whole_rows.cuh": {"load_vector_fresh": "uint4 v; memcpy(&v, from, 16); return v;"},
    "fused/expert_layer.cuh": {"count_cast": "reinterpret_cast<u32*>(args.cast_done)[nth] += static_cast<u32>(rows);"},
    "gemm/epilogue.cuh": {
        "store_turned": "emulator::store_turned(address, {m0, m1, m2, m3});",
        "load_shared": "uint4 v; memcpy(&v, emulator::shared_at(address), 16); return v;",
        "load_shared_words": "uint2 v; memcpy(&v, emulator::shared_at(address), 8); return v;",
    },
}
TEXTS: dict[str, list[tuple[str, str]]] = {
    "gemm/wgmma.cuh": [
        (r"#define MOECOMM_WGMMA_OF.*?(?=#define MOECOMM_WGMMA\()", ""),
        (r"#define MOECOMM_WGMMA\(.*?\n    \}\n", ""),
        (r"#define MOECOMM_WGMMA_INTEGERS.*?(?=\n// Issues)", ""),
    ],
    "gemm/policies.cuh": [
        (
            rf'asm volatile\("st\.global\.v{words}.*?"l"\((.*?)\), "r"\(values.*?"memory"\);',
            rf"memcpy((void*)(\1), &values, {4 * words});",
        )
        for words in (2, 4)
    ],
    "gemm/gemm.cuh": [plain.SHARED],
    "overlap/all_gather_matmul.cuh": [plain.SHARED],
    "overlap/matmul_send.cuh": [plain.SHARED],
    "overlap/gemv_all_reduce.cuh": [plain.SHARED],
    "fused/reduce.cuh": [plain.SHARED],
    # Those of some warps take longer than a dispatch.
    "fused/publish.cuh": [
        (
            r"(?=u8\* const published)",
            "for (u32 left = threadIdx.x / kWarp % 3 * 1000; left != 0; --left) emulator::emulator_yield(); ",
        )
    ],
    "fused/fetch.cuh": [(r'asm volatile\("red\.relaxed.*?"memory"\);', "++*counter;")],
    "fused/expert_layer.cuh": [
        (r'asm volatile\("st\.global\.v4.*?"memory"\);', "memcpy(reinterpret_cast<void*>(to), &values, 16);"),
        plain.SHARED,
        (r'asm volatile\("red\.release.*?"memory"\);', "++*counter;"),
    ],
}


def write(csrc: Path, into: Path) -> None:
    """A copy of csrc without PTX: that of plain.write, the experts and the fused operators."""
    plain.write(csrc, into)
    for folder in ("gemm", "fused", "overlap"):
        shutil.copytree(csrc / folder, into / folder)
    plain.replace(into, BODIES, TEXTS)
