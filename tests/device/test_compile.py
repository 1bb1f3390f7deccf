"""Every family of kernels compiles for sm_90a, without a GPU, within its registers and its shared memory."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import pytest

from moecomm.base import formats
from moecomm.gpu import jit, loader

from ..compiled import check_awaits, check_compiled, compile_beside
from ..few import few

pytest.importorskip("cuda.core", reason="kernels are compiled through cuda-core")

FLAT, EXPERT, BATCHED = 0, 1, 2
BF16, FP16, FP32, E4M3, INT8 = 0, 1, 2, 3, 4
BYTES = (2, 2, 4, 1)
FP32_SCALES, UE8M0 = 0, 1
BEGIN, END = 1, 2
DEEPSEEK: dict[str, Any] = {"ranks": 4, "experts": 256, "topk": 8, "hidden": 7168, "layout": EXPERT, "type": BF16}


def dispatch(**fields: Any) -> jit.KernelSpec:
    """DeepSeek-V3's shape but for `fields`; the bytes of rows and scales follow from them."""
    fields = DEEPSEEK | fields
    if fields.get("placed", False):
        fields.setdefault("named_experts", fields["experts"] - 16)
    quantize, hidden = fields.get("quantize", False), fields["hidden"]
    if "format" in fields:
        fmt = formats.FORMATS[fields["format"]]
        fields |= {"quantize": True, "row_bytes": fmt.row_bytes(hidden), "scale_bytes": fmt.scale_bytes(hidden)}
    fields.setdefault("row_bytes", hidden * (1 if quantize else BYTES[fields["type"]]))
    groups = -(-hidden // 128)
    scale_bytes = 4 * groups if fields.get("scale_format", FP32_SCALES) == FP32_SCALES else groups
    if fields.get("scale_columns", False):
        scale_bytes = -(-scale_bytes // 4) * 4
    fields.setdefault("scale_bytes", scale_bytes if quantize else 0)
    return jit.KernelSpec(op="dispatch", **fields)


def combine(**fields: Any) -> jit.KernelSpec:
    return jit.KernelSpec(op="combine", **DEEPSEEK | fields)


ACROSS: dict[str, Any] = {"transport": "puts", "domain_ranks": 4, "ranks": 8}


SPECS = {
    "dispatch": dispatch(),
    "dispatch flat": dispatch(layout=FLAT, idx_bytes=4),
    "dispatch batched, 8 ranks": dispatch(layout=BATCHED, ranks=8),
    "dispatch casts to e4m3": dispatch(quantize=True),
    "dispatch flat casts a last group of 48 columns": dispatch(layout=FLAT, type=FP16, hidden=176, quantize=True),
    "dispatch casts fp32, 16384 columns": dispatch(layout=BATCHED, type=FP32, hidden=16384, quantize=True),
    "dispatch casts to nvfp4": dispatch(format="nvfp4"),
    "dispatch casts to nvfp4 by a scale in device memory": dispatch(format="nvfp4", compares=True),
    "dispatch casts to mxfp8, flat": dispatch(format="mxfp8", layout=FLAT),
    "dispatch casts to mxfp4, 2880 columns of fp16": dispatch(format="mxfp4", hidden=2880, type=FP16),
    "dispatch casts to int8_group, 16384 columns of fp32": dispatch(
        format="int8_group", layout=BATCHED, hidden=16384, type=FP32
    ),
    "dispatch casts to nvfp4 across domains": dispatch(format="nvfp4", **ACROSS),
    "dispatch casts to mxfp8 across domains, begins": dispatch(format="mxfp8", part=BEGIN, **ACROSS),
    "dispatch casts to nvfp4, repeat": dispatch(format="nvfp4", repeat=True, layout=FLAT),
    "dispatch few tokens, casts to nvfp4": dispatch(format="nvfp4", packets=True),
    "dispatch few tokens, casts to mxfp8, flat": dispatch(format="mxfp8", packets=True, layout=FLAT),
    "dispatch few tokens, casts to mxfp4": dispatch(format="mxfp4", packets=True, layout=BATCHED),
    "dispatch casts to fp8_tensor": dispatch(format="fp8_tensor"),
    "dispatch few tokens, casts to fp8_tensor, flat": dispatch(format="fp8_tensor", layout=FLAT, packets=True),
    "dispatch few tokens, casts to int8_group, 8 ranks": dispatch(format="int8_group", packets=True, ranks=8),
    "dispatch e4m3 with scales of 57 bytes": dispatch(type=E4M3, scale_bytes=57),
    "dispatch repeat": dispatch(repeat=True),
    "dispatch repeat flat": dispatch(repeat=True, layout=FLAT),
    "dispatch repeat of 16 bytes, verifies": dispatch(repeat=True, type=FP32, hidden=4),
    "dispatch repeat of 16 bytes, batched": dispatch(repeat=True, layout=BATCHED, type=FP32, hidden=4),
    "dispatch of 16 bytes, says what was found": dispatch(layout=FLAT, type=FP32, hidden=4),
    "dispatch alone, 8 columns": dispatch(ranks=1, experts=1, topk=1, hidden=8),
    "dispatch top-32, 24 columns": dispatch(ranks=2, experts=64, topk=32, hidden=24, type=FP16),
    "dispatch 64 ranks, top-5 of 1024": dispatch(ranks=64, experts=1024, topk=5, hidden=4096),
    "dispatch batched, 67 experts of 6 ranks": dispatch(layout=BATCHED, ranks=6, experts=67),
    "dispatch few tokens, 13 experts of 5 ranks": dispatch(packets=True, ranks=5, experts=13),
    "dispatch of row descriptors": dispatch(descriptors=True, row_bytes=16),
    "dispatch of row descriptors, 64 ranks, top-32": dispatch(
        descriptors=True, row_bytes=16, ranks=64, topk=32, experts=4096
    ),
    "dispatch few tokens": dispatch(packets=True),
    "dispatch few tokens, flat, casts": dispatch(packets=True, layout=FLAT, quantize=True),
    "dispatch few tokens, ue8m0 by column": dispatch(
        packets=True, quantize=True, scale_format=UE8M0, scale_columns=True
    ),
    "dispatch few tokens, casts 22.5 groups of columns": dispatch(packets=True, quantize=True, hidden=2880),
    "dispatch few tokens, casts 4096 columns": dispatch(packets=True, quantize=True, hidden=4096),
    "dispatch few tokens, 16 ranks": dispatch(packets=True, ranks=16),
    "dispatch few tokens, 32 ranks": dispatch(packets=True, ranks=32),
    "dispatch few tokens, 64 ranks, top-32": dispatch(packets=True, ranks=64, topk=32, type=FP32),
    "dispatch flat, ue8m0 by column": dispatch(layout=FLAT, quantize=True, scale_format=UE8M0, scale_columns=True),
    "dispatch batched, fp32 by column": dispatch(layout=BATCHED, quantize=True, scale_columns=True),
    "dispatch begins": dispatch(part=BEGIN, quantize=True, scale_columns=True),
    "dispatch ends": dispatch(part=END, quantize=True, scale_columns=True),
    "dispatch ends, flat, 64 ranks": dispatch(part=END, layout=FLAT, ranks=64),
    "dispatch across domains, flat": dispatch(layout=FLAT, **ACROSS),
    "dispatch across domains, ue8m0 by column": dispatch(
        quantize=True, scale_format=UE8M0, scale_columns=True, **ACROSS
    ),
    "dispatch across domains ends": dispatch(part=END, **ACROSS),
    "dispatch across domains, 64 ranks, top-32": dispatch(
        ranks=64, domain_ranks=8, transport="puts", topk=32, experts=1024, repeat=True
    ),
    "dispatch across an emulated NIC": dispatch(**ACROSS | {"transport": "nic"}),
    "combine across an emulated NIC": combine(**ACROSS | {"transport": "nic"}),
    "combine across domains": combine(**ACROSS),
    "combine across domains, bf16 on the wire": combine(wire=BF16, **ACROSS),
    "combine across domains, flat": combine(layout=FLAT, **ACROSS),
    "combine across domains, in place, bf16 on the wire": combine(layout=FLAT, in_place=True, wire=BF16, **ACROSS),
    "combine across domains by weights of the source ranks": combine(own_weights=True, **ACROSS),
    "combine across domains by weights of the source ranks, batched fp32, 64 ranks": combine(
        own_weights=True, layout=BATCHED, type=FP32, ranks=64, domain_ranks=8, transport="puts"
    ),
    "combine across domains by weights of the source ranks, fp16 on the wire": combine(
        own_weights=True, type=FP16, wire=FP16, **ACROSS
    ),
    "combine across domains verifies, bf16 on the wire": combine(wire=BF16, verifies=True, **ACROSS),
    "combine across domains verifies, flat": combine(layout=FLAT, verifies=True, **ACROSS),
    "combine across domains verifies, in place": combine(
        layout=FLAT, in_place=True, wire=BF16, verifies=True, **ACROSS
    ),
    "combine across domains verifies, batched fp32, 64 ranks": combine(
        verifies=True, layout=BATCHED, type=FP32, ranks=64, domain_ranks=8, transport="puts"
    ),
    "combine": combine(),
    "combine verifies": combine(verifies=True),
    "combine batched verifies, 3584 columns of fp16": combine(
        layout=BATCHED, type=FP16, wire=FP16, hidden=3584, verifies=True
    ),
    "combine flat verifies": combine(layout=FLAT, verifies=True),
    "combine in place verifies, 64 ranks": combine(layout=FLAT, in_place=True, ranks=64, verifies=True),
    "combine in place": combine(layout=FLAT, in_place=True),
    "combine in place, fp32": combine(layout=FLAT, in_place=True, type=FP32, ranks=8),
    "combine flat": combine(layout=FLAT),
    "combine batched, bf16 on the wire": combine(layout=BATCHED, wire=BF16, weighted=False),
    "combine fp32, 16384 columns": combine(type=FP32, hidden=16384, ranks=8),
    "combine alone, 8 columns": combine(ranks=1, experts=1, topk=1, hidden=8),
    "combine fp16 top-32, 24 columns": combine(ranks=2, experts=64, topk=32, hidden=24, type=FP16, wire=FP16),
    "combine few tokens": combine(packets=True),
    "combine few tokens, flat": combine(packets=True, layout=FLAT),
    "combine by weights of the source ranks": combine(own_weights=True),
    "combine fp32 by weights of the source ranks, 16384 columns": combine(
        own_weights=True, type=FP32, hidden=16384, ranks=8
    ),
    "combine few tokens by weights of the source ranks": combine(packets=True, own_weights=True),
    "combine few tokens, fp32, by weights of the source ranks": combine(packets=True, own_weights=True, type=FP32),
    "combine few tokens by weights of the source ranks, 64 ranks, bf16 on the wire": combine(
        packets=True, own_weights=True, ranks=64, wire=BF16
    ),
    "combine few tokens, 64 ranks, bf16 on the wire": combine(packets=True, ranks=64, wire=BF16),
    "combine unsummed": combine(unsummed=True, in_place=True, wire=BF16),
    "combine unsummed, fp32 by weights of the source ranks, bias first, 64 ranks": combine(
        unsummed=True, in_place=True, type=FP32, wire=FP32, own_weights=True, bias_first=True, ranks=64
    ),
    "combine unsummed fp16 top-32 verifies, float32 bias": combine(
        unsummed=True, in_place=True, type=FP16, wire=FP16, topk=32, experts=64, verifies=True, wide_bias=True
    ),
    "combine unsummed, not weighted": combine(unsummed=True, in_place=True, wire=BF16, weighted=False),
    "combine flat, sums of gradients, float32 bias": combine(layout=FLAT, sum_grads=True, wide_bias=True),
    "combine flat, bias first": combine(layout=FLAT, bias_first=True),
    "combine in place, float32 bias first": combine(layout=FLAT, in_place=True, wide_bias=True, bias_first=True),
    "combine bias first": combine(bias_first=True, weighted=False),
    "combine few tokens, bf16 on the wire, float32 bias first": combine(
        packets=True, wire=BF16, wide_bias=True, bias_first=True
    ),
    "combine across domains, flat, sums of gradients": combine(layout=FLAT, sum_grads=True, **ACROSS),
    "combine, e4m3 on the wire": combine(wire=E4M3),
    "combine few tokens, e4m3 on the wire, 4096 columns": combine(packets=True, wire=E4M3, hidden=4096),
    "combine verifies, e4m3 on the wire": combine(wire=E4M3, verifies=True),
    "combine flat, e4m3 on the wire": combine(wire=E4M3, layout=FLAT),
    "combine fp32 by weights of the source ranks, 16384 columns, e4m3 on the wire": combine(
        wire=E4M3, own_weights=True, type=FP32, hidden=16384, ranks=8
    ),
    "combine fp16 top-32, 176 columns, e4m3 on the wire": combine(
        wire=E4M3, ranks=2, experts=64, topk=32, hidden=176, type=FP16, bias_first=True
    ),
    "combine few tokens, e4m3 on the wire": combine(wire=E4M3, packets=True),
    "combine few tokens, flat, e4m3 on the wire": combine(wire=E4M3, packets=True, layout=FLAT),
    "combine few tokens, fp32, by weights of the source ranks, 64 ranks, e4m3 on the wire": combine(
        wire=E4M3, packets=True, own_weights=True, type=FP32, ranks=64, bias_first=True
    ),
    "combine across domains, e4m3 on the wire": combine(wire=E4M3, **ACROSS),
    "combine across domains, flat, sums of gradients, e4m3 on the wire": combine(
        wire=E4M3, layout=FLAT, sum_grads=True, **ACROSS
    ),
    "combine across domains verifies, e4m3 on the wire": combine(wire=E4M3, verifies=True, **ACROSS),
    "combine across domains by weights of the source ranks, fp32, 64 ranks, e4m3 on the wire": combine(
        wire=E4M3, own_weights=True, layout=BATCHED, type=FP32, ranks=64, domain_ranks=8, transport="puts"
    ),
    "combine across domains, flat, 64 ranks of 2 domains, e4m3 on the wire": combine(
        wire=E4M3, layout=FLAT, ranks=64, domain_ranks=32, transport="puts"
    ),
    "combine 64 ranks": combine(ranks=64, experts=128, topk=5, hidden=4096),
}
SPECS |= {
    name.replace("e4m3", "int8"): dataclasses.replace(spec, wire=INT8)
    for name, spec in SPECS.items()
    if spec.wire == E4M3
}

SPECS |= {
    "dispatch of a placement": dispatch(placed=True),
    "dispatch of a placement, 64 ranks, 1024 slots": dispatch(placed=True, ranks=64, experts=1024, hidden=4096),
    "dispatch of a placement, 8 ranks, more experts than slots": dispatch(
        placed=True, ranks=8, experts=16, named_experts=384, hidden=4096
    ),
    "dispatch of a placement, few tokens": dispatch(placed=True, packets=True),
    "dispatch of a placement, row descriptors": dispatch(placed=True, descriptors=True, row_bytes=16),
    "dispatch of a placement across domains": dispatch(placed=True, **ACROSS),
}

PLAIN_RUN = (
    *(
        "dispatch flat, ue8m0 by column",
        "dispatch of row descriptors",
        "dispatch few tokens",
        "dispatch of a placement, few tokens",
        "dispatch across domains, flat",
    ),
    *("combine", "combine few tokens by weights of the source ranks", "combine unsummed"),
    *("combine, e4m3 on the wire", "combine few tokens, e4m3 on the wire"),
    *("combine, int8 on the wire", "combine few tokens, int8 on the wire"),
)


@pytest.mark.compiled(SPECS)
@pytest.mark.parametrize("name", few(SPECS, *PLAIN_RUN))
def test_compiles_within_its_bounds(name: str) -> None:
    spec, fields = SPECS[name], jit.block_fields(SPECS[name])
    compiled = compile_beside(spec).result()
    assert f"moecomm_{spec.op}".encode() in compiled.cubin
    assert fields["shared_bytes"] <= 227 * 1024
    # Without a stack frame: a function that is called, and takes a reference to a part of what a kernel knows, puts all
    # of it into local memory; then every access to shared memory goes by a generic address, loaded from there first.
    check_compiled(compiled, jit.block_threads(fields))
    if spec.descriptors:
        check_awaits(compiled, "last")


def test_source_holds_named_numbers_alone() -> None:
    text = jit.source(dispatch(hidden=4096))
    config = re.search(r"config\{(.*)\}", text)
    assert config is not None
    for field in config.group(1).split(", "):
        assert re.fullmatch(r"\.[a-z_]+ = (\d+|true|false|(Layout|Type|ScaleFormat|Part)::[a-z0-9]+)", field)
    assert ".hidden = 4096" in text and ".row_bytes = 8192" in text


@pytest.mark.parametrize(
    ("spec", "limit"),
    [
        (lambda: dispatch(hidden=12), "multiple of 16 bytes"),
        (lambda: dispatch(hidden=24, quantize=True), "e4m3 rows of 24 bytes"),
        (lambda: dispatch(topk=33), "topk=33"),
        (lambda: dispatch(ranks=65, experts=65), "65 ranks"),
        (lambda: dispatch(experts=3), "3 experts"),
        (lambda: dispatch(scale_bytes=8, quantize=True), "scale_bytes=8"),
        (lambda: jit.source(dispatch(experts=1 << 16)), "65536 experts"),
        (lambda: combine(type=E4M3), "one byte"),
        (lambda: combine(own_weights=True, layout=FLAT), "own_weights"),
        (lambda: combine(own_weights=True, weighted=False), "own_weights"),
        (lambda: combine(unsummed=True, wire=BF16), "unsummed: want rows of experts, in place"),
        (lambda: combine(unsummed=True, in_place=True, wire=FP32), "unsummed rows travel as they are"),
        (lambda: combine(type=FP32, wire=BF16, hidden=12), "reduced rows of 24 bytes"),
        (lambda: dataclasses.replace(dispatch(), op="gather"), "gather"),
    ],
)
def test_a_limit_is_named(spec: Any, limit: str) -> None:
    with pytest.raises(ValueError, match=re.escape(limit)):
        spec()


def test_every_shape_has_room() -> None:
    """The block is made up for any shape: at least two pieces in each ring, and no more shared memory than there is."""
    for hidden in (8, 24, 128, 2048, 2880, 5120, 7168, 16384, 65536):
        for ranks, experts in ((1, 8), (2, 16), (4, 256), (8, 1024), (64, 4096)):
            for layout in (FLAT, EXPERT):
                fields = jit.block_fields(dispatch(hidden=hidden, ranks=ranks, experts=experts, layout=layout))
                assert fields["ring_slots"] >= 2 and fields["count_warps"] >= 1
                assert fields["shared_bytes"] <= 227 * 1024
                fields = jit.block_fields(combine(hidden=hidden, ranks=ranks, experts=experts, layout=layout))
                assert fields["pull_slots"] >= 2 and fields["shared_bytes"] <= 227 * 1024
                if ranks == 1:
                    continue
                for type_, wire in ((BF16, BF16), (BF16, FP32), (FP32, FP32)):
                    several = {"domain_ranks": ranks // 2, "transport": "puts", "type": type_, "wire": wire}
                    fields = jit.block_fields(
                        combine(hidden=hidden, ranks=ranks, experts=experts, layout=layout, **several)
                    )
                    assert min(fields["pull_slots"], fields["reduce_slots"]) >= 2
                    assert fields["shared_bytes"] <= 227 * 1024 and jit.block_threads(fields) == 512


def test_the_descriptor_of_memory_is_where_it_is_looked_for() -> None:
    assert loader._descriptor_is_known()
