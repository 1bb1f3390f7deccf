"""The host's part of a layer on GPUs, with nothing launched: how many Python functions it calls."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import pytest
import torch

from moecomm import Buffer, _native
from moecomm.backends.host import HostSession
from moecomm.fused import gemm, kernels, layer, pipeline
from moecomm.fused.operands import Operands
from moecomm.gpu import plain_kernel, tuning
from moecomm.gpu.structs import struct
from moecomm.gpu.tuning import Table
from moecomm.gpu.tuning.gemms import Rule

HIDDEN, INNER, EXPERTS, TOPK, TOKENS = 256, 64, 8, 4, 32


def experts_of_a_gpu(weights: Any, x: Any, w13: Any, w2: Any, counts: Any, **how: Any) -> Any:
    """Launch what apply_experts launches there."""
    inner, y, rows = x.new_empty(len(x), w2.shape[2]), torch.empty_like(x), how["expected_rows"]
    gemm.multiply(Operands(x, w13, counts), how["activation"], how["interleaved"], inner, None, rows)
    gemm.multiply(Operands(inner, w2, counts), None, False, y, None, rows)
    return y


class Gpu:
    """A GPU that takes launches and does nothing; its tensors are those of a CPU."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.launched: list[type] = []  # types of arguments
        self.entered = 0
        gemm_args = struct("GemmArgs")()
        for where, name, what in (
            (layer, "_why_unfused", lambda *about: ""),
            (layer, "apply_experts", experts_of_a_gpu),
            (gemm, "arguments_at", lambda *about, **more: gemm_args),  # as if the memory were that of the layer before
            (kernels, "multiprocessors", lambda device: 132),
            (plain_kernel, "load", lambda *about: 1),
            (pipeline, "load", lambda *about: 1),
            (torch.cuda, "current_device", lambda: None),  # number of the CPU
            (_native, "cuda_context", lambda: 1),
            (_native, "current_stream", lambda device: 1),
            (_native, "cuda_launch_packed", lambda *launch: self.launched.append(type(launch[5]))),
            (HostSession, "most_blocks", 132),
            (HostSession, "dispatcher", lambda session, args: self._round),
            (HostSession, "combiner", lambda session, args: self._round),
            (HostSession, "with_device", self._with_device),
        ):
            monkeypatch.setattr(where, name, what)

    def _round(self, args: Any) -> None:
        self.launched.append(type(args))

    def _with_device(self, enqueue: Callable[..., None], *args: object) -> None:
        self.entered += 1
        enqueue(*args)


@contextmanager
def layers_of_a_gpu() -> Iterator[tuple[Gpu, Callable[[bool], Any]]]:
    """Yield such a GPU, and what calls a layer on it, fused or not."""
    g = torch.Generator().manual_seed(0)
    x = torch.randn(TOKENS, HIDDEN, generator=g).bfloat16()
    ids = torch.rand(TOKENS, EXPERTS, generator=g).argsort(dim=1)[:, :TOPK].contiguous()
    weights = torch.rand(TOKENS, TOPK, generator=g)
    w13, w2 = (torch.zeros(EXPERTS, *shape, dtype=x.dtype) for shape in ((2 * INNER, HIDDEN), (HIDDEN, INNER)))
    with (
        pytest.MonkeyPatch.context() as patched,
        Buffer("self", hidden=HIDDEN, num_experts=EXPERTS, topk=TOPK, max_tokens=TOKENS, backend="host") as buffer,
    ):
        gpu = Gpu(patched)
        buffer.rounds.on_cpu = False
        yield gpu, lambda fused: buffer.moe(x, ids, weights, w13, w2, fused=fused)
    tuning.forget()  # plans for such a GPU


@pytest.fixture
def layers() -> Iterator[tuple[Gpu, Callable[[bool], Any]]]:
    with layers_of_a_gpu() as found:
        yield found


def test_a_layer_launches_on_the_device_of_its_rank(layers: tuple[Gpu, Callable[[bool], Any]]) -> None:
    gpu, call = layers
    call(True)
    layer_args, experts_args = struct("LayerArgs"), struct("ExpertLayerArgs")
    assert gpu.launched == [layer_args, _native.DispatchArgs, experts_args, layer_args]
    assert gpu.entered == 3, "the session puts its own rounds there"


def test_a_fused_layer_takes_no_more_calls_than_an_unfused_one(layers: tuple[Gpu, Callable[[bool], Any]]) -> None:
    """Else the host, and not the GPU, would decide how long an eager layer with few tokens takes."""
    call = layers[1]
    fused, unfused = (counted(lambda form=form: call(form)) for form in (True, False))  # type: ignore[misc]
    assert fused <= unfused


def products(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], Any]:
    """Return what multiplies rows that are a number, and returns the arguments of the launch."""
    w, counts, seen = torch.zeros(EXPERTS, INNER, HIDDEN).bfloat16(), torch.zeros(EXPERTS, dtype=torch.int32), []
    rows, out = torch.zeros(2, TOKENS, HIDDEN).bfloat16(), torch.zeros(TOKENS, INNER).bfloat16()

    def arguments(at: tuple[int, ...], *about: Any, **more: Any) -> Any:
        return struct("GemmArgs")(out=at[0])

    monkeypatch.setattr(gemm, "arguments_at", arguments)
    monkeypatch.setattr(_native, "cuda_launch_packed", lambda *launch: seen.append(launch[5]))
    tuning.forget()

    def call(of: int) -> Any:
        gemm.multiply(Operands(rows[of], w, counts), None, False, out, None, TOKENS)
        return seen[-1]

    return call


@pytest.mark.usefixtures("layers")
def test_each_product_with_a_dynamic_order_has_a_counter_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    call, zeros, made = products(monkeypatch), torch.zeros, []
    assert call(0).next_tile == 0 and call(0) is call(0), "the struct of another product is shared"
    monkeypatch.setattr(torch, "zeros", lambda *size, **how: made.append(zeros(*size, **how)) or made[-1])
    dynamic = Table(gemms=(Rule("bf16", "256x4c1d"),))
    with tuning.use(dynamic):
        launched = [call(0), call(0), call(1)]
    assert [one.next_tile for one in launched] == [counter.data_ptr() for counter in made]
    assert len({id(one) for one in launched}) == 3 and not any(int(counter) for counter in made)


@pytest.mark.usefixtures("layers")
def test_a_launch_whose_tensors_cannot_be_told_apart_is_made_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    call = products(monkeypatch)
    monkeypatch.setattr(_native, "tensor_words", lambda tensors: None)
    assert call(0).out != call(1).out


def counted(call: Callable[[], object]) -> int:
    """Return how many Python functions a call runs, once what is cached is there."""
    names: list[str] = []

    def note(frame: FrameType, event: str, arg: object) -> None:
        if event == "call" and frame.f_code.co_filename != __file__:
            names.append(frame.f_code.co_name)

    call()
    call()
    gc.collect()
    gc.disable()  # finalizers of other tests
    before = sys.getprofile()
    sys.setprofile(note)
    try:
        call()
    finally:
        sys.setprofile(before)
        gc.enable()
    return len(names)
