"""The message of torch.compile for calls that it cannot trace."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

NOT_TRACED = (
    "dispatch, combine and moe of a moecomm.Buffer cannot be part of a graph of torch.compile: use moecomm.ops, whose "
    "operators can"
)


def not_traced(function: Callable[..., Any]) -> None:
    """Mark a function at which torch.compile breaks the graph, with a reason that names moecomm.ops.

    torch.compiler.disable sets these attributes on a wrapper, whose time every call would pay.
    """
    function._torchdynamo_disable = True  # type: ignore[attr-defined]
    function._torchdynamo_disable_msg = NOT_TRACED  # type: ignore[attr-defined]
