"""Kernels that are launched by themselves, on CPUs: against what the same calls do there without them."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import moecomm
from moecomm.base import formats
from moecomm.base.protocol import DTYPES
from moecomm.gpu import budgets, expert_table, padding, plain_kernel, quantize_rows, routing_map, used_rows
from moecomm.ops import combine_gradients, swiglu, tidy
from moecomm.window.pace import Pace
from tests.gpu import test_plain_kernels as cases
from tests.weight_transfers import CASTS, carried, check_carrier

from .machine import LIMIT, Launch, Machine, plain_unit

ENDS = torch.tensor([0, 1, 0x7F, 0x7F7F, 0x7F80, 0x7F81, 0x7FC0, 0x7FFF])  # bits of bf16
SHARED = 64  # bytes of static shared memory, at most


class _OnGpu(torch.Tensor):
    is_cuda = True
    __torch_function__ = torch._C._disabled_torch_function_impl


def on_gpu(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor as one that says it is on a GPU; what is made of it does not."""
    return tensor.as_subclass(_OnGpu)


def launcher(scheduler: ctypes.CDLL, library: Callable[[str], ctypes.CDLL], launched: list[str]) -> Callable[..., None]:
    """Return what stands in for plain_kernel.launch_on: launches end before they return, and `launched` gets names."""

    def launch_on(device: torch.device, kernel: plain_kernel.PlainKernel, blocks: int, args: ctypes.Structure) -> None:
        unit = library(plain_unit(kernel))
        address = ctypes.cast(unit.kernel, ctypes.c_void_p).value
        launch = Launch(address, ctypes.addressof(args), blocks, kernel.threads, SHARED, -1)
        assert scheduler.emulator_run(ctypes.addressof(launch), 1, LIMIT, len(launched)) == 0
        launched.append(kernel.entry)

    return launch_on


@pytest.fixture(autouse=True)
def emulated(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """The names of what has been launched."""
    launched: list[str] = []
    monkeypatch.setattr(plain_kernel, "launch_on", launcher(machine.scheduler, machine.library, launched))
    yield launched
    assert launched


@pytest.mark.parametrize("columns", cases.COLUMNS, ids=str)
def test_padding(columns: tuple[torch.dtype, int]) -> None:
    for rows, told in cases.padded(*columns, most=60):
        wanted = rows.clone()
        padding.zero(wanted, **told)
        padding.zero(on_gpu(rows), **told)
        assert torch.equal(rows.view(torch.uint8), wanted.view(torch.uint8))


@pytest.mark.parametrize("columns", cases.COLUMNS, ids=str)
def test_copies(columns: tuple[torch.dtype, int]) -> None:
    for rows, told in cases.used(*columns, most=60):
        wanted, got = torch.zeros_like(rows), torch.zeros_like(rows)
        used_rows.copy(wanted, rows, **told)
        used_rows.copy(got, on_gpu(rows), **told)
        assert torch.equal(got.view(torch.uint8), wanted.view(torch.uint8))


def test_maps() -> None:
    for chosen, probs, topk in cases.maps(most=20):
        wanted, got = (routing_map.ids_of(given, probs, topk) for given in (chosen, on_gpu(chosen)))
        cases.check_ids(got, wanted, chosen.shape[1])


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
def test_budgets(dtype: torch.dtype) -> None:
    for ids, table, rule in cases.budgeted(dtype, most=20):
        counted, wanted = budgets.counted(on_gpu(ids), rule), budgets.counted(ids, rule)
        assert torch.equal(counted.rows, wanted.rows) and torch.equal(counted.to, wanted.to)
        kept = budgets.kept(ids, table, rule, counted.parts)
        for mine, other in zip(kept, budgets.kept(ids, table, rule), strict=True):
            assert mine.dtype == other.dtype and torch.equal(mine, other)


def test_budgets_of_later_calls_of_the_same_size() -> None:
    """Calls share cached sizes, but each has its own ranks, budgets and addresses."""
    g = torch.Generator().manual_seed(0)
    for budget, rank in ((3, 0), (9, 0), (3, 1)):
        rule = budgets.Rule(rank, 2, 8, 1, budget)
        ids = torch.randint(-1, 8, (3, 20), generator=g).T  # with gaps
        table = torch.randint(0, 5, (2, rule.columns), generator=g, dtype=torch.int32)
        counted = budgets.counted(on_gpu(ids), rule)
        assert torch.equal(counted.rows, budgets.counted(ids, rule).rows)
        kept = budgets.kept(ids, table, rule, counted.parts)
        assert all(torch.equal(*pair) for pair in zip(kept, budgets.kept(ids, table, rule), strict=True))
        ids.untyped_storage().resize_(8)
        with pytest.raises(moecomm.BadInput, match="topk_idx"):
            budgets.counted(on_gpu(ids), rule)


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
def test_tables(dtype: torch.dtype) -> None:
    for ids, table in cases.tables(dtype, most=20):
        absent, wanted = (torch.ones(1, dtype=torch.int64) for _ in range(2))
        meant = expert_table.looked_up(on_gpu(ids), table, absent)
        assert torch.equal(meant, expert_table.looked_up(ids, table, wanted))
        assert torch.equal(absent, wanted)


def test_copies_at_a_rate(machine: Machine) -> None:
    """In pieces of 20 us: a pause ends when the copies so far may have ended, and slow copies are not made up for."""
    pace = Pace(torch.device("cpu"), 1.0)  # a byte in a nanosecond
    pace._device, begin = torch.device("cuda"), machine.now()
    pace._pause(0)
    due = int(pace._due)
    assert begin <= due <= machine.now()
    source, to = torch.rand(3, 20_000), torch.zeros(3, 20_000)
    pace.copy(to, source)
    assert torch.equal(to, source) and int(pace._due) == due + source.nbytes <= machine.now()
    pace._due.fill_(due)  # copies have taken longer than they had to
    pace.copy(to[0, :1], source[1, :1])
    assert due + source.nbytes <= int(pace._due) <= machine.now() and to[0, 0] == source[1, 0]


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
def test_weights(dtype: torch.dtype) -> None:
    for ids, weights, experts in cases.weighted(dtype, most=20):
        wanted = routing_map.weights_at(ids, weights, experts)
        assert torch.equal(routing_map.weights_at(on_gpu(ids), weights, experts), wanted)


@pytest.mark.parametrize("layout", ["flat", "expert", "batched"])
def test_tidy(layout: str) -> None:
    for found in cases.found(layout, most=40):
        there = found._replace(src=on_gpu(found.src))
        cases.check_about(tidy.tidied(layout, there), tidy.tidied(layout, found))
        for rows in cases.rows_of(found):
            padded = rows.clone()
            cases.check_about(tidy.tidied(layout, there, padded), tidy.tidied(layout, found, rows))
            assert torch.equal(padded, rows)


@pytest.mark.parametrize("dtype", DTYPES)
def test_gradients(dtype: torch.dtype) -> None:
    for rows, weights, y in cases.gradients(dtype, most=20):
        wanted = combine_gradients.combine_gradients(rows, weights, y, dtype)
        for mine, other in zip(
            combine_gradients.combine_gradients.run(on_gpu(rows), weights, y, dtype), wanted, strict=True
        ):
            assert torch.equal(mine, other)


@pytest.mark.parametrize("name", cases.SWIGLUS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_swiglu(dtype: torch.dtype, name: str) -> None:
    for both, grad, *about in cases.inside(dtype, most=20):
        got = swiglu.gradients(on_gpu(both), grad, *about, cases.SWIGLUS[name])
        cases.check_inside(got, swiglu.gradients(both, grad, *about, cases.SWIGLUS[name]), int(about[-1]))


@pytest.mark.parametrize("name", quantize_rows.NAMES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_casts(name: str, dtype: torch.dtype) -> None:
    for x in cases.cast_rows(dtype, most=20):
        for scale in cases.scales_of(name, "cpu"):
            wanted = formats.quantize(x, name, global_scale=scale)
            cases.check_cast(quantize_rows.cast(on_gpu(x), name, global_scale=scale), wanted)


@pytest.mark.parametrize("name", quantize_rows.NAMES)
def test_casts_of_many_bf16(name: str) -> None:
    """Every 509th value there is, zeros, subnormal numbers, infinities and NaNs; tests/gpu has all values."""
    for x in cases.each_bf16(torch.cat((torch.arange(0, 1 << 16, 509), ENDS, ENDS + 0x8000))):
        scale = cases.scales_of(name, "cpu")[0]
        wanted = formats.quantize(x, name, global_scale=scale)
        cases.check_cast(quantize_rows.cast(on_gpu(x), name, global_scale=scale), wanted)


@pytest.mark.parametrize("dtype", DTYPES)
def test_casts_of_blocks(dtype: torch.dtype) -> None:
    for w in cases.matrices(dtype, most=140):
        (rows, columns), (down, across) = w.shape, (-(-w.shape[0] // 128), -(-w.shape[1] // 128))
        data, scales = torch.empty(rows, columns, dtype=torch.float8_e4m3fn), torch.empty(down, across)
        assert quantize_rows.cast_blocks(on_gpu(w), data, scales)
        cases.check_blocks(w, data, scales)
    assert not quantize_rows.cast_blocks(on_gpu(torch.zeros(3, 17)), data, scales)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("cast", CASTS, ids=str)
def test_weights_on_their_way(cast: Any, dtype: torch.dtype) -> None:
    for shapes in carried(cast, dtype):
        check_carrier(torch.device("cpu"), cast, dtype, shapes, 2)


def test_more_weights_than_a_launch_takes(emulated: list[str]) -> None:
    check_carrier(torch.device("cpu"), None, torch.bfloat16, {"a": (1,), "b": (20,)}, 70)
    check_carrier(torch.device("cpu"), "mxfp8", torch.bfloat16, {"a": (1, 32)}, 70)
    assert emulated.count("copy_weights") > 4 and emulated.count("tell_readers") == 2
