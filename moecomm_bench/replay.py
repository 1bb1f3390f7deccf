"""Recorded routing in benchmarks: which tokens a rank replays, and what results and tables say about it."""

from __future__ import annotations

import hashlib
from dataclasses import asdict
from functools import lru_cache
from pathlib import Path
from typing import Any, ClassVar, Protocol

import torch

from moecomm.errors import BadInput
from moecomm.routing.recorded import Recorded


class Replaying(Protocol):
    """A dataclass with the settings of a benchmark or of a prediction."""

    __dataclass_fields__: ClassVar[dict[str, Any]]

    @property
    def routing_file(self) -> str: ...


@lru_cache(maxsize=2)
def recorded(path: str) -> Recorded:
    """Read a file of moecomm.routing, once per process. Raises BadInput for any other."""
    return Recorded.load(path)


def check(path: str, experts: int, topk: int, model: str = "") -> None:
    """Raise BadInput unless a file has tokens for so many experts and topk; `model` names who asks for them."""
    found = recorded(path)
    if (found.experts, found.topk) != (experts, topk):
        got = f"{path!r}: top-{found.topk} of {found.experts} experts{_of(found.model)}"
        raise BadInput("routing", got, f"top-{topk} of {experts} experts{_of(model)}")
    if not found.tokens:
        raise BadInput("routing", f"{path!r}: no tokens", "a file with tokens to replay")


def rows(path: str, tokens: int, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return expert ids [T, K] and weights [T, K] of a rank's tokens: see Recorded.dealt."""
    return recorded(path).dealt(tokens, rank)


def shown(of: Replaying) -> dict[str, Any]:
    """Return a case as results have it: with the name of its file, and `routing`, which says what is in the file."""
    found = asdict(of)
    if of.routing_file:
        path, about = Path(of.routing_file), recorded(of.routing_file)
        found["routing_file"] = path.name
        found["routing"] = {
            **about.notes,
            "source": about.source,
            "model": about.model,
            "tokens": about.tokens,
            "layers": len(about.layers),
            "sha256": hashlib.sha256(path.read_bytes()).hexdigest()[:16],
        }
    return found


def said(of: dict[str, Any]) -> str:
    """Return the end of a table's heading: the routing that the case of a result has replayed; empty without one."""
    if not of.get("routing_file"):
        return ""
    about = of["routing"]
    zipf = f", Zipf exponent {about['zipf']}" if "zipf" in about else ""
    whose = f"{about['source']}{_of(about['model'])}{zipf}, {about['tokens']} tokens, layers: {about['layers']}"
    return f"; routing of {of['routing_file']} ({whose})"


def _of(model: str) -> str:
    return f" of {model}" if model else ""
