"""When kernels are loaded: not beside rounds whose bytes a thread of the host moves."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from moecomm import _native, jit
from moecomm.backends import lsa
from moecomm.backends.lsa_kernels import Kernels


def call(num_tokens: int, layout: int) -> _native.CombineArgs:
    context, combine = _native.Context(), _native.CombineArgs()
    context.set_shape(
        _native.Shape(
            ranks=4,
            experts=4,
            topk=1,
            max_tokens=8,
            ring_tokens=32,
            staged_row_bytes=256,
            heap_bytes=4096,
            domain_ranks=2,
        )
    )
    combine.ctx, combine.hidden, combine.num_tokens, combine.layout = context, 64, num_tokens, layout
    return combine


def test_what_comes_before_a_load_comes_once_for_each_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []

    def load(spec: jit.KernelSpec, device: torch.device) -> jit.Kernel:
        said.append("load" if not jit.is_loaded(spec, device) else "known")
        return jit._loaded.setdefault((spec, device.index), jit.Kernel(1, 32, 0))

    monkeypatch.setattr(jit, "_loaded", {})
    monkeypatch.setattr(jit, "load", load)
    kernels = Kernels(torch.device("cuda", 1), "gin_proxy", lambda: said.append("rounds end"))
    kernels.combine(call(8, 0))
    kernels.combine(call(7, 0))
    kernels.combine(call(7, 1))
    assert said == ["rounds end", "load", "known", "rounds end", "load"]
    assert {spec.transport for spec, _ in jit._loaded} == {"gin_proxy"}


@pytest.mark.parametrize("captures", [False, True])
def test_rounds_are_waited_for_unless_they_are_captured(captures: bool) -> None:
    waited: list[bool] = []
    session: Any = SimpleNamespace(capturing=lambda: captures, synchronize=lambda: waited.append(True))
    lsa.LsaSession._end_rounds(session)
    assert bool(waited) != captures
