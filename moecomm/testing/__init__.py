"""Helpers for tests of moecomm and of code on top of it: local ranks, random cases, checks against the reference."""

from moecomm.testing.cases import Case, random_case, random_sizes
from moecomm.testing.check import check_case, check_case_on_rank
from moecomm.testing.layers import LayerCase, random_layer
from moecomm.testing.ranks import LocalBuffers

__all__ = [
    "Case",
    "LayerCase",
    "LocalBuffers",
    "check_case",
    "check_case_on_rank",
    "random_case",
    "random_layer",
    "random_sizes",
]
