"""Argument structs of csrc/gemm and csrc/fused as ctypes structs."""

from __future__ import annotations

import ctypes

from moecomm.gpu.structs import fields_of


class TensorMap(ctypes.Structure):
    """CUtensorMap."""

    _fields_ = fields_of("TensorMap")


class Grouping(ctypes.Structure):
    """Grouping of csrc/gemm/tiles.h."""

    _fields_ = fields_of("Grouping")


class GemmArgs(ctypes.Structure):
    """GemmArgs of csrc/gemm/args.h."""

    _fields_ = fields_of("GemmArgs", TensorMap=TensorMap, Grouping=Grouping)


class LayerArgs(ctypes.Structure):
    """LayerArgs of csrc/fused/layer_args.h."""

    _fields_ = fields_of("LayerArgs")


class ExpertLayerArgs(ctypes.Structure):
    """ExpertLayerArgs of csrc/fused/layer_args.h."""

    _fields_ = fields_of("ExpertLayerArgs", GemmArgs=GemmArgs, LayerArgs=LayerArgs)
