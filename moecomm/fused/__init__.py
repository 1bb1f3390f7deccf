"""Expert layers: layer.py is Buffer.moe, pipeline.py its steps; the grouped GEMM, its weights and its schedules."""

from moecomm.fused.channels import Int8, quantize_channels, quantize_rows
from moecomm.fused.fp4 import Mxfp4, Nvfp4
from moecomm.fused.fp8 import Fp8, quantize_weights
from moecomm.fused.gemm import grouped_gemm
from moecomm.fused.packed_mxfp4 import PackedMxfp4, pack_mxfp4
from moecomm.fused.schedules import (
    FP8_SCHEDULES,
    MXFP4_SCHEDULES,
    PACKED_SCHEDULES,
    SCHEDULES,
    Schedule,
    choose,
    choose_fp8,
)
from moecomm.fused.weights import deinterleave, interleave

__all__ = [
    "FP8_SCHEDULES",
    "MXFP4_SCHEDULES",
    "PACKED_SCHEDULES",
    "SCHEDULES",
    "Fp8",
    "Int8",
    "Mxfp4",
    "Nvfp4",
    "PackedMxfp4",
    "Schedule",
    "choose",
    "choose_fp8",
    "deinterleave",
    "grouped_gemm",
    "interleave",
    "pack_mxfp4",
    "quantize_channels",
    "quantize_rows",
    "quantize_weights",
]
