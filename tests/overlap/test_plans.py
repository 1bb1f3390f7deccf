"""Repeated calls, which run by a plan: few calls of Python, and the results and errors of a first call."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import lru_cache, partial
from pathlib import Path
from types import FrameType, SimpleNamespace
from typing import Any

import pytest
import torch

import moecomm
from moecomm import _native, overlap
from moecomm.fused import tensor_maps
from moecomm.gpu import plain_kernel
from moecomm.gpu.structs import struct
from moecomm.overlap import plans
from moecomm.overlap import workspace as workspaces
from moecomm.overlap.executors import GpuExecutors

from .cases import FP8, HOST, OPERATORS, PRODUCTS, Case, on_ranks, random_case, same

ROOT = str(Path(moecomm.__file__).parent)
MOST_CALLS = 25


def calls_of(run: Callable[[], Any]) -> list[str]:
    """Return the functions of moecomm that are called meanwhile."""
    found: list[str] = []

    def profile(frame: FrameType, event: str, argument: Any) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(ROOT):
            found.append(f"{Path(frame.f_code.co_filename).name} {frame.f_code.co_name}")

    sys.setprofile(profile)
    try:
        run()
    finally:
        sys.setprofile(None)
    return found


def with_values(operator: str, dtype: torch.dtype | None = None) -> Case:
    """Draw a call with rows, for two ranks."""
    for seed in range(100):
        case = random_case(operator, 2, seed, dtype=dtype)
        if all(part.numel() for part in case.want()):
            return case
    raise AssertionError


@pytest.mark.parametrize(
    ("operator", "dtype"), [*((name, None) for name in OPERATORS), *((name, FP8) for name in PRODUCTS)]
)
def test_a_repeated_call_is_short(operator: str, dtype: torch.dtype | None) -> None:
    case = with_values(operator, dtype)

    def body(workspace: overlap.Workspace) -> list[str]:
        call = partial(getattr(overlap, operator), **case.given[workspace.rank], workspace=workspace)
        for _ in range(2):
            call()
        return calls_of(call)

    for found in on_ranks(2, body):
        assert len(found) <= MOST_CALLS, found


@pytest.mark.parametrize("operator", OPERATORS)
def test_repeated_calls_have_the_bits_of_the_reference(operator: str) -> None:
    """Values change, and so do places in memory: aligned or not, contiguous or not; with and without inference mode."""
    cases = [with_values(operator)]
    shapes = [{name: value.shape for name, value in given.items()} for given in cases[0].given]
    for seed in range(100, 400):
        case = random_case(operator, 2, seed, dtype=cases[0].dtype)
        if [{name: value.shape for name, value in given.items()} for given in case.given] == shapes:
            cases.append(case)
    cases.append(Case(operator, cases[0].dtype, [{n: v.clone() for n, v in g.items()} for g in cases[0].given]))
    leaf = "tables" if operator == "embedding_all_to_all" else "x"
    for given in cases[-1].given:
        given[leaf] = -given[leaf]

    def moved(tensor: torch.Tensor) -> torch.Tensor:
        return torch.cat([tensor.flatten()[:1], tensor.flatten()])[1:].view(tensor.shape)

    def turned(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.transpose(-1, -2).contiguous().transpose(-1, -2)

    def body(workspace: overlap.Workspace) -> None:
        for case in cases * 2:
            want, mine = case.want()[workspace.rank], case.given[workspace.rank]
            for change in (torch.clone, moved, turned):
                for inference in (True, False):
                    with torch.inference_mode(inference):
                        got = case.run(workspace, **{leaf: change(mine[leaf])})
                    assert same(got, want, case.dtype) and got.is_inference() is inference
        assert 0 < len(workspace._plans) <= 8

    on_ranks(2, body)


def test_a_repeated_call_raises_what_a_first_call_does() -> None:
    case = with_values("matmul_all_reduce")

    def body(workspace: overlap.Workspace) -> None:
        case.run(workspace)
        x, w = (case.given[workspace.rank][name] for name in ("x", "w"))
        small = x.clone()
        small.untyped_storage().resize_(x.nbytes - 1)
        wrong: list[tuple[dict[str, Any], type[Exception], str]] = [
            ({"x": small}, moecomm.BadInput, f"x: got a storage of {x.nbytes - 1} bytes"),
            ({"fused": 0.0}, moecomm.BadInput, "fused: got 0.0"),
            ({"x": x.to_sparse()}, moecomm.BadInput, "x: got a tensor that is sparse"),
            ({"x": (x, w, x)}, moecomm.BadInput, "x: got a tuple of 3"),
        ]
        for given, kind, text in wrong:
            with pytest.raises(kind, match=text):
                case.run(workspace, **given)
        assert same(case.run(workspace), case.want()[workspace.rank], case.dtype)
        negative = torch.complex(torch.zeros(x.shape), -x.float()).conj().imag.to(x.dtype)
        assert same(case.run(workspace, x=negative), case.want()[workspace.rank], case.dtype)

    on_ranks(2, body)


def test_transforms_of_repeated_calls_are_refused() -> None:
    with overlap.Workspace("self", 4096, **HOST) as workspace:
        x = torch.ones(2, 3, dtype=torch.bfloat16)
        overlap.matmul_all_reduce(x, x, workspace)
        with pytest.raises(moecomm.Unsupported, match=r"x under torch\.func\.vmap"):
            torch.func.vmap(lambda one: overlap.matmul_all_reduce(one, x, workspace))(x.unsqueeze(0))
        with torch.autograd.forward_ad.dual_level():
            dual = torch.autograd.forward_ad.make_dual(x, torch.ones_like(x))
            with pytest.raises(moecomm.Unsupported, match="in forward-mode AD"):
                overlap.matmul_all_reduce(dual, x, workspace)
            assert (overlap.matmul_all_reduce(x, x, workspace) == 3).all()


@pytest.mark.parametrize("opened_in", [False, True])
@pytest.mark.parametrize("first_in", [False, True])
@pytest.mark.parametrize("operator", PRODUCTS)
def test_a_plan_of_inference_mode_serves_other_calls(operator: str, first_in: bool, opened_in: bool) -> None:
    shape = (1, 1, 8, 32) if operator == "matmul_all_to_all" else (8, 32)
    x, w = torch.randn(shape).bfloat16(), torch.randn(*shape[:-3], 16, 32).bfloat16()
    call = getattr(overlap, operator)
    with torch.inference_mode(opened_in):
        workspace = overlap.Workspace("self", 1 << 20)
    with workspace:
        found = []
        for inference in (first_in, not first_in, first_in):
            with torch.inference_mode(inference):
                found.append(call(x, w, workspace))
        assert all(torch.equal(one, found[0]) for one in found)
        call(x.requires_grad_(), w, workspace).float().sum().backward()
        assert x.grad is not None


def test_a_tuple_of_one_tensor_is_refused_each_time() -> None:
    x, w = torch.randn(8, 32).bfloat16(), torch.randn(16, 32).bfloat16()
    with overlap.Workspace("self", 1 << 20) as workspace:
        for _ in range(2):
            with pytest.raises(moecomm.BadInput):
                overlap.matmul_all_reduce((x,), (w,), workspace)  # type: ignore[arg-type]
            overlap.matmul_all_reduce(x, w, workspace)


def test_failures_of_repeated_calls_are_counted() -> None:
    """A call of CPU ranks that fails on one rank alone, in its plan, puts the ranks out of step."""
    case = with_values("embedding_all_to_all")

    def body(workspace: overlap.Workspace) -> None:
        case.run(workspace)
        mine = case.given[workspace.rank]
        if workspace.rank == 1:
            with pytest.raises(moecomm.BadInput, match="indices"):
                case.run(workspace, indices=torch.full_like(mine["indices"], 1000))
        with pytest.raises(moecomm.OutOfStep):
            case.run(workspace)

    on_ranks(2, body)


def test_a_profiler_sees_the_operator() -> None:
    with overlap.Workspace("self", 4096, **HOST) as workspace:
        x = torch.ones(2, 3, dtype=torch.bfloat16)
        overlap.matmul_all_reduce(x, x, workspace)
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
            overlap.matmul_all_reduce(x, x, workspace)
        assert "moecomm::matmul_all_reduce" in {event.key for event in profiler.key_averages()}


def test_plans_do_not_pile_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("moecomm.overlap.workspace.MOST_PLANS", 4)
    assert plans.MOST_PLANS > 4
    with overlap.Workspace("self", 1 << 16, **HOST) as workspace:
        for rows in (*range(1, 10), 1):
            x = torch.ones(rows, 3, dtype=torch.bfloat16)
            assert (overlap.matmul_all_reduce(x, x, workspace) == 3).all()
            assert len(workspace._plans) <= 4
    assert not workspace._plans


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("operator", OPERATORS)
def test_a_repeated_call_is_short_on_gpus(operator: str, fused: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run executors of GPUs over Windows of CPU ranks, and launch nothing.  A barrier of GPUs makes one call more."""
    monkeypatch.setattr(workspaces, "HostExecutors", GpuExecutors)
    monkeypatch.setattr(tensor_maps, "encode", lru_cache(lambda *about: struct("TensorMap")()))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: None)
    for name, value in (("cuda_context", 1), ("current_stream", 7), ("cuda_launch_packed", None)):
        monkeypatch.setattr(_native, name, lambda *given, value=value: value)
    monkeypatch.setattr(plain_kernel, "_functions", SimpleNamespace(get=lambda key: 7))
    g, x, w = torch.Generator().manual_seed(0), torch.ones(16, 64).bfloat16(), torch.ones(64, 64).bfloat16()
    given: tuple[torch.Tensor, ...] = x, w
    if operator == "matmul_all_to_all":
        given = x.view(2, 2, 4, 64), w.expand(2, 64, 64).contiguous()
    elif operator == "embedding_all_to_all":
        given = torch.ones(2, 9, 8), torch.randint(-1, 9, (2, 8, 3), generator=g)

    def body(workspace: overlap.Workspace) -> list[str]:
        call = partial(getattr(overlap, operator), *given, workspace, fused=fused)
        for _ in range(2):
            call()
        return calls_of(call)

    for found in on_ranks(2, body, (1 << 25) + 4096):
        assert len(found) + found.count("calls.py barrier") <= MOST_CALLS, found
