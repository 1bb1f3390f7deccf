"""Buffer: lifetimes, two rounds in flight, repeats, arrays of other libraries, shapes on demand."""

from __future__ import annotations

import gc
import os
import time
import weakref
from types import ModuleType

import numpy as np
import pytest
import torch

import moecomm
from moecomm import combine, dispatch
from moecomm.testing import LocalBuffers, check_case, random_case

from .few import few
from .live import ROOM_S

SIZES = {"hidden": 32, "num_experts": 12, "topk": 2, "max_tokens": 16, "dtype": torch.float32}


def call(rank: int, tokens: int = 10) -> dict[str, torch.Tensor]:
    g = torch.Generator().manual_seed(rank)
    return {
        "x": torch.randn(tokens, 32, generator=g),
        "topk_idx": torch.rand(tokens, 12, generator=g).argsort(dim=1)[:, :2],
        "topk_weights": torch.rand(tokens, 2, generator=g),
    }


@pytest.mark.parametrize("layout", ["flat", "expert", "batched"])
def test_nobody_comes_where_there_is_no_room(layout: str) -> None:
    with moecomm.Buffer(**SIZES, backend="host") as buffer:
        routed = buffer.dispatch(**call(0, tokens=0), layout=layout, max_rows=0, sync=True)
        assert routed.num_rows.item() == 0 and routed.tokens_per_expert.tolist() == [0] * 12
        assert buffer.combine(routed.x, routed.handle).shape == (0, 32)


def test_a_buffer_can_be_dropped_and_weakly_referenced() -> None:
    buffer = moecomm.Buffer(**SIZES, backend="host")
    seen = weakref.ref(buffer)
    routed = buffer.dispatch(**call(0))
    x, want = routed.x, routed.x.clone()
    del buffer, routed
    gc.collect()
    assert seen() is None
    assert torch.equal(x, want), "a tensor keeps its memory"


@pytest.mark.parametrize("times", few((200, 1000), 200))
def test_opening_and_closing_leaks_no_descriptor_thread_or_mapping(times: int, pytestconfig: pytest.Config) -> None:
    times = pytestconfig.getoption("--repeats") or times

    def entries(of: str) -> int:
        return len(os.listdir(f"/proc/self/{of}"))

    def maps() -> int:
        with open("/proc/self/maps") as lines:
            return sum("moecomm" in line for line in lines)

    with LocalBuffers(2, **SIZES, backend="host"):
        pass
    before, threads = (entries("fd"), maps()), entries("task")
    for _ in range(times):
        with LocalBuffers(2, **SIZES, backend="host") as ranks:
            ranks.dispatch([call(0), call(1)])
    gc.collect()
    assert (entries("fd"), maps()) == before
    end = time.monotonic() + ROOM_S
    while entries("task") > threads:  # one that has been joined may be in the kernel's books for a moment
        assert time.monotonic() < end


def test_memory_of_dropped_outputs_is_used_again() -> None:
    with LocalBuffers(2, **SIZES, backend="host") as ranks:
        for _ in range(300):
            routed = ranks.dispatch([call(0), call(1)])
            ranks.combine([{"y": r.x, "handle": r.handle} for r in routed])
        del routed
        gc.collect()
        assert all(b.rounds.memory.used == 0 for b in ranks.buffers)


@pytest.mark.parametrize("quantize", [None, "fp8"])
def test_rows_that_did_not_come_give_their_memory_back(quantize: str | None) -> None:
    with moecomm.Buffer(hidden=1024, num_experts=2, topk=2, max_tokens=512, backend="host") as buffer:
        x, idx = torch.randn(8, 1024).bfloat16(), torch.zeros(8, 2, dtype=torch.int64)
        loose = buffer.dispatch(x, idx, quantize=quantize, sync=False)
        worst = buffer.rounds.memory.used
        del loose
        exact = buffer.dispatch(x, idx, quantize=quantize, sync=True)
        assert len(exact.x) == 16
        assert worst - buffer.rounds.memory.used == (512 * 2 - 16) * 1024 * exact.x.element_size()
        other = buffer.dispatch(x, idx, quantize=quantize)  # takes what was given back
        assert torch.equal(exact.x.view(torch.uint8), other.x.view(torch.uint8))


def test_two_rounds_in_flight() -> None:
    with LocalBuffers(3, **SIZES, backend="host") as ranks:
        a = ranks.dispatch([call(r) for r in range(3)])
        b = ranks.dispatch(
            [call(r + 7, 5) for r in range(3)],
        )
        out_a = ranks.combine([{"y": r.x, "handle": r.handle} for r in a])
        out_b = ranks.combine([{"y": r.x * 2, "handle": r.handle} for r in b])
        for rank in range(3):
            for out, factor, given in ((out_a[rank], 1, call(rank)), (out_b[rank], 2, call(rank + 7, 5))):
                want = given["x"] * factor * given["topk_weights"].sum(dim=1, keepdim=True)
                torch.testing.assert_close(out, want)


@pytest.mark.parametrize("layout", ["flat", "expert", "batched"])
def test_a_handle_repeats_the_layout_with_other_rows(layout: str) -> None:
    with LocalBuffers(3, **SIZES, backend="host") as ranks:
        first = ranks.dispatch([{**call(r), "layout": layout, "expert_alignment": 4} for r in range(3)])
        again = ranks.dispatch([{"x": call(r)["x"] * 3, "handle": first[r].handle} for r in range(3)])
        for one, two in zip(first, again, strict=True):
            valid = one.src[..., 0] >= 0
            assert torch.equal(two.x[valid], one.x[valid] * 3)
            assert two.src is one.src or torch.equal(two.src, one.src)
            assert torch.equal(two.tokens_per_expert, one.tokens_per_expert)
        out = ranks.combine([{"y": r.x, "handle": r.handle, "weighted": False} for r in again])
        for rank in range(3):
            idx = call(rank)["topk_idx"]
            ranks_of_token = torch.stack([(idx // 4 == p).any(dim=1) for p in range(3)]).sum(dim=0)
            times = ranks_of_token.unsqueeze(1) if layout == "flat" else 2
            torch.testing.assert_close(out[rank], call(rank)["x"] * 3 * times)


def test_without_sync_the_counts_tell() -> None:
    with LocalBuffers(2, **SIZES, backend="host") as ranks:
        exact = ranks.dispatch([call(0), call(1)])
        loose = ranks.dispatch([{**call(0), "sync": False, "max_rows": 50}, {**call(1), "sync": False}])
        assert (len(loose[0].x), len(loose[1].x)) == (50, 64)  # 64: 2 ranks * max_tokens * topk
        for one, two in zip(exact, loose, strict=True):
            rows = int(two.num_rows)
            assert rows == len(one.x)
            assert torch.equal(two.x[:rows], one.x) and torch.equal(two.src[:rows], one.src)
        for out, want in zip(
            ranks.combine([{"y": r.x, "handle": r.handle} for r in loose]),
            ranks.combine([{"y": r.x, "handle": r.handle} for r in exact]),
            strict=True,
        ):
            assert torch.equal(out, want)


def test_numpy_arrays_come_back_as_numpy_arrays() -> None:
    with moecomm.Buffer(**SIZES, backend="host") as buffer:
        given = {name: value.numpy() for name, value in call(0).items()}
        routed = buffer.dispatch(**given)
        assert isinstance(routed.x, np.ndarray) and isinstance(routed.tokens_per_expert, np.ndarray)
        assert routed.src.shape == (20, 2) and (routed.x == given["x"][routed.src[:, 1]]).all()
        out = buffer.combine(routed.x, routed.handle)
        assert isinstance(out, np.ndarray)
        np.testing.assert_allclose(out, given["x"] * given["topk_weights"].sum(axis=1, keepdims=True), rtol=1e-6)


class Grid(np.ndarray):
    """An array of a module that makes no arrays."""


class Foreign:
    """As of a library whose classes are of one package and whose functions are of another."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor

    def __dlpack__(self, **options: object) -> object:
        return self.tensor.__dlpack__()

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.tensor.__dlpack_device__()


class ForeignWithFunctions(Foreign):
    @staticmethod
    def __array_namespace__() -> type:
        class Functions:
            from_dlpack = Foreign

        return Functions


def test_arrays_come_back_by_the_library_that_they_are_of() -> None:
    with moecomm.Buffer(**SIZES, backend="host") as buffer:
        given = call(0)
        for x, kind in (
            (given["x"].numpy().view(Grid), np.ndarray),
            (Foreign(given["x"]), torch.Tensor),
            (ForeignWithFunctions(given["x"]), Foreign),
        ):
            assert type(buffer.dispatch(x, given["topk_idx"]).x) is kind


@pytest.mark.parametrize("layout", ["flat", "expert", "batched"])
def test_rows_written_in_the_window_are_read_there(layout: str) -> None:
    with LocalBuffers(2, **SIZES, backend="host") as ranks:
        routed = ranks.dispatch([{**call(r), "layout": layout} for r in range(2)])
        want = ranks.combine([{"y": r.x * 3, "handle": r.handle} for r in routed])
        rows = [b.empty(r.handle).copy_(r.x * 3) for b, r in zip(ranks.buffers, routed, strict=True)]
        for y, here in zip(rows, routed, strict=True):
            assert y.shape == here.x.shape and y.dtype is torch.float32
        got = ranks.combine([{"y": y, "handle": r.handle} for y, r in zip(rows, routed, strict=True)])
        for y in rows:
            y.fill_(torch.nan)  # ours again
        assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
        with pytest.raises(moecomm.BadInput, match="dtype"):
            ranks.buffers[0].empty(routed[0].handle, torch.float64)


def test_arguments_are_checked_once_for_each_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    """A call that is like an earlier one takes a shorter way, and comes to the same."""
    checks: list[str] = []

    def counting(module: ModuleType) -> None:
        check = module.check
        monkeypatch.setattr(module, "check", lambda *given: (checks.append(module.__name__), check(*given))[1])

    counting(dispatch)
    counting(combine)
    calls = [
        (call(0), True),
        (call(1), False),
        (call(2, 3), True),  # another number of tokens
        (call(3), False),
        ({**call(4), "topk_idx": call(4)["topk_idx"].int()}, True),
        ({**call(5), "topk_weights": None}, True),
        ({**call(6), "layout": "flat"}, True),
        ({**call(7), "max_rows": 25}, False),
        ({**call(8, 3), "topk_idx": call(8, 3)["topk_idx"].int()}, True),
        (call(9, 3), False),
    ]
    with moecomm.Buffer(**SIZES, backend="host") as buffer:
        for given, new in calls:
            checks.clear()
            given["topk_idx"] = given["topk_idx"].contiguous()
            routed = buffer.dispatch(**given)
            assert checks == (["moecomm.dispatch"] if new else [])
            out = buffer.combine(routed.x, routed.handle)
            if given.get("layout") == "flat":
                factor: float | torch.Tensor = 1.0  # one row a token here, and no weights
            elif given["topk_weights"] is None:
                factor = 2.0
            else:
                factor = given["topk_weights"].sum(dim=1, keepdim=True)
            torch.testing.assert_close(out, given["x"] * factor)
        checks.clear()
        for _ in range(2):
            buffer.combine(routed.x, routed.handle, out=torch.empty_like(out))
        assert checks == []


def test_parameters_and_tensors_with_gradients_are_tensors() -> None:
    with moecomm.Buffer(**SIZES, backend="host") as buffer:
        given = call(0)
        want = buffer.dispatch(**given).x.clone()
        for x in (torch.nn.Parameter(given["x"]), (given["x"].requires_grad_() * 1)):
            for _ in range(2):
                with torch.no_grad():
                    assert torch.equal(buffer.dispatch(**{**given, "x": x}).x, want)


def test_many_ranks() -> None:
    sizes = {"ranks": 64, "hidden": 16, "num_experts": 128, "topk": 8, "max_tokens": 4, "dtype": torch.bfloat16}
    with LocalBuffers(**sizes, backend="host") as ranks:
        for seed in range(5):
            check_case(ranks, random_case(seed, **sizes))


def test_same_inputs_same_bits() -> None:
    sizes = {"ranks": 4, "hidden": 128, "num_experts": 16, "topk": 8, "max_tokens": 64, "dtype": torch.bfloat16}
    with LocalBuffers(**sizes, backend="host") as ranks:
        calls = []
        for rank in range(4):
            g = torch.Generator().manual_seed(rank)
            calls.append(
                {
                    "x": torch.randn(64, 128, generator=g).bfloat16(),
                    "topk_idx": torch.rand(64, 16, generator=g).argsort(dim=1)[:, :8],
                    "topk_weights": torch.rand(64, 8, generator=g),
                }
            )
        seen = None
        for workers in (1, 2, 3, 1, 2):
            routed = ranks.dispatch([{**c, "num_sms": workers} for c in calls])
            outs = ranks.combine([{"y": r.x, "handle": r.handle, "num_sms": workers} for r in routed])
            bits = [t.view(torch.int16).clone() for t in (*(r.x for r in routed), *outs)]
            assert seen is None or all(torch.equal(a, b) for a, b in zip(seen, bits, strict=True))
            seen = bits
