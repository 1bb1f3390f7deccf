"""Argument structs of csrc/overlap as ctypes structs."""

from __future__ import annotations

import ctypes

from moecomm.fused.structs import GemmArgs, TensorMap
from moecomm.gpu.structs import fields_of
from moecomm.window.gpu_calls import Handle


class Overlap(ctypes.Structure):
    """Overlap of csrc/overlap/args.h: a workspace."""

    _fields_ = fields_of("Overlap", Window=Handle)


class GatherMatmulArgs(ctypes.Structure):
    """GatherMatmulArgs of csrc/overlap/args.h."""

    _fields_ = fields_of("GatherMatmulArgs", GemmArgs=GemmArgs, TensorMap=TensorMap, Overlap=Overlap)


class SendMatmulArgs(ctypes.Structure):
    """SendMatmulArgs of csrc/overlap/args.h."""

    _fields_ = fields_of("SendMatmulArgs", GemmArgs=GemmArgs, Overlap=Overlap)


class GemvArgs(ctypes.Structure):
    """GemvArgs of csrc/overlap/args.h."""

    _fields_ = fields_of("GemvArgs", Overlap=Overlap)


class AllReduceArgs(ctypes.Structure):
    """AllReduceArgs of csrc/overlap/args.h."""

    _fields_ = fields_of("AllReduceArgs", Overlap=Overlap)


class EmbeddingArgs(ctypes.Structure):
    """EmbeddingArgs of csrc/overlap/args.h."""

    _fields_ = fields_of("EmbeddingArgs", Overlap=Overlap)
