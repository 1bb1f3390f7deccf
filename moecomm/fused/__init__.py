"""Experts in kernels of our own: the grouped GEMM."""

from moecomm.fused.gemm import grouped_gemm
from moecomm.fused.schedules import SCHEDULES, Schedule, choose
from moecomm.fused.weights import deinterleave, interleave

__all__ = ["SCHEDULES", "Schedule", "choose", "deinterleave", "grouped_gemm", "interleave"]
