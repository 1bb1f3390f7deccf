"""Kernels compiled before a Buffer shrinks or grows are those that its rounds then ask for."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import moecomm
from moecomm import _native
from moecomm.backends.lsa_kernels import Kernels
from moecomm.gpu import jit, loader
from moecomm.testing import LocalBuffers
from moecomm.testing.prepare import prepare_combine, prepare_dispatch

SIZES: dict[str, Any] = {"hidden": 64, "num_experts": 13, "topk": 3, "max_tokens": 600, "backend": "host"}


@pytest.fixture
def used(monkeypatch: pytest.MonkeyPatch) -> list[jit.KernelSpec]:
    """Specs of kernels that are loaded or compiled."""
    found: list[jit.KernelSpec] = []
    monkeypatch.setattr(jit, "load", lambda spec, device: found.append(spec))
    monkeypatch.setattr(jit, "compile", lambda spec, arch: found.append(spec))
    monkeypatch.setattr(loader, "architecture", lambda capability: "sm_90a")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    return found


def rounds(buffer: moecomm.Buffer, unsummed: bool) -> Iterator[tuple[_native.DispatchArgs, _native.CombineArgs]]:
    """Arguments of rounds with few tokens and with many, of all kinds in which a kernel depends on ranks.

    `unsummed`: also with rows that travel so.
    """
    for tokens, layout in itertools.product((8, 500, 600), ("flat", "expert")):
        ids = torch.zeros(tokens, 3, dtype=torch.int64)
        routed = prepare_dispatch(buffer, torch.zeros(tokens, 64).bfloat16(), ids, max_rows=64, layout=layout)
        y = torch.empty(routed.handle.y_shape, dtype=torch.bfloat16)
        for wire in (None, "exact", "fp8", *["rows"] * (unsummed and layout != "flat")):
            yield routed.args, prepare_combine(buffer, y, routed.handle, wire=wire).args
        grads = torch.empty(*y.shape[:-1], *((3,) if layout == "flat" else ()))
        yield routed.args, prepare_combine(buffer, y, routed.handle, weight_grads=grads).args


def ask(kernels: Kernels, ranks: int, near: int, unsummed: bool) -> _native.Shape:
    with LocalBuffers(**SIZES, ranks=ranks, domain_ranks=near) as buffers:
        for dispatch, combine in rounds(buffers.buffers[0], unsummed):
            kernels.dispatch(dispatch)
            kernels.combine(combine)
        return buffers.buffers[0].rounds.session.context.shape


@pytest.mark.parametrize("ranks", [(4, 4), (6, 3), (13, 13)])
@pytest.mark.parametrize("others", [(3, 3), (5, 5), (4, 2)])
def test_kernels_of_other_ranks(used: list[jit.KernelSpec], ranks: tuple[int, int], others: tuple[int, int]) -> None:
    """Rows do not travel unsummed between domains, so kernels of these have no other form there."""
    kernels, newer = (Kernels(torch.device("cuda", 0)) for _ in range(2))
    unsummed = ranks[0] == ranks[1]
    ask(kernels, *ranks, unsummed)
    used.clear()
    shape = ask(newer, *others, unsummed and others[0] == others[1])
    wanted = set(used)
    used.clear()
    assert kernels.compile_for(shape) == len(used) == len(set(used)) and set(used) == wanted


def test_the_experts_that_are_left(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[int, int, int]] = []

    def compile_for(shape: _native.Shape) -> int:
        asked.append((shape.ranks, shape.slots, shape.domain_ranks))
        return 5

    with LocalBuffers(**SIZES, ranks=4) as ranks:
        buffer = ranks.buffers[0]
        assert buffer.compile_for(3) == 0, "on CPU ranks there is nothing to compile"
        monkeypatch.setattr(buffer.rounds.session, "compile_for", compile_for)
        assert buffer.compile_for(6, domain_ranks=3) == 5
        assert buffer.compile_for(3, keep_ids=True) == 10
        assert asked == [(6, 13, 3), (3, 9, 0), (3, 10, 0)], "the first of four ranks has an expert more"
        for wrong in (0, 14, "3"):
            with pytest.raises(moecomm.BadInput):
                buffer.compile_for(wrong)  # type: ignore[arg-type]
    with pytest.raises(moecomm.Closed):
        buffer.compile_for(3)
