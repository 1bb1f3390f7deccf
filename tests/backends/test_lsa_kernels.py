"""Which kernels a session asks for: those of its transport where there are several domains."""

from __future__ import annotations

import pytest
import torch

from moecomm import _native
from moecomm.backends.lsa_kernels import Kernels
from moecomm.gpu import jit


def call(domain_ranks: int) -> _native.CombineArgs:
    context, combine = _native.Context(), _native.CombineArgs()
    context.set_shape(
        _native.Shape(
            ranks=4,
            slots=4,
            topk=1,
            max_tokens=8,
            ring_tokens=32,
            staged_row_bytes=256,
            heap_bytes=4096,
            domain_ranks=domain_ranks,
        )
    )
    combine.ctx, combine.hidden, combine.num_tokens = context, 64, 8
    return combine


@pytest.mark.parametrize("transport", ["lsa", "nic", "gin_proxy", "nvshmem"])
def test_kernels_of_several_domains_are_linked_with_what_the_session_puts_through(
    monkeypatch: pytest.MonkeyPatch, transport: str
) -> None:
    asked: list[tuple[jit.KernelSpec, torch.device]] = []
    monkeypatch.setattr(jit, "load", lambda *what: asked.append(what))
    device = torch.device("cuda", 1)
    kernels = Kernels(device, transport)
    kernels.combine(call(domain_ranks=4))
    kernels.combine(call(domain_ranks=2))
    assert [spec.transport for spec, _ in asked] == ["lsa", "puts" if transport == "lsa" else transport]
    assert [spec.domain_ranks for spec, _ in asked] == [0, 2] and {to for _, to in asked} == {device}
