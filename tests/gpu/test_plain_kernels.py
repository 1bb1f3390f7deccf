"""Small kernels beside rounds, each against what the same call does on a CPU."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from moecomm.base import formats
from moecomm.base.protocol import DTYPES
from moecomm.fused import quantize_weights
from moecomm.fused.activations import FORMULAS
from moecomm.gpu import budgets, expert_table, padding, quantize_rows, routing_map, used_rows
from moecomm.ops import swiglu
from moecomm.ops.combine_gradients import combine_gradients
from moecomm.ops.tidy import About, tidied
from moecomm.testing.layers import activations

from ..weight_transfers import CASTS, carried, check_carrier

# 16 bytes at a time, 4 and 1
COLUMNS = [(torch.bfloat16, 64), (torch.float32, 3), (torch.float8_e4m3fn, 56), (torch.float8_e4m3fn, 5)]
Told = dict[str, torch.Tensor]
# Activations whose gradients have a kernel.
SWIGLUS = {name: one for name, one in activations(0.5).items() if FORMULAS[one.name].of is torch.nn.functional.silu}


def padded(dtype: torch.dtype, columns: int, most: int) -> Iterator[tuple[torch.Tensor, Told]]:
    """Rows, and what is told of those that are empty."""
    g = torch.Generator().manual_seed(columns)
    for count in (1, 33, most):
        rows = torch.randint(1, 100, (count, columns * dtype.itemsize), generator=g, dtype=torch.uint8).view(dtype)
        src = torch.randint(-2, 3, (count, 2), generator=g, dtype=torch.int32)
        src[:, 0].clamp_(min=-1)
        end = torch.tensor([count * 2 // 3], dtype=torch.int32)
        for told in ({"src": src}, {"num_rows": end}, {"src": src, "num_rows": end}):
            yield rows.clone(), told
        counts = torch.tensor([0, count, count // 2], dtype=torch.int32)
        yield rows.unsqueeze(0).repeat(3, 1, 1), {"counts": counts}


def used(dtype: torch.dtype, columns: int, most: int) -> Iterator[tuple[torch.Tensor, Told]]:
    """Rows, and what is told of those in use; a failed round may tell any number."""
    for rows, told in padded(dtype, columns, most):
        if "src" not in told:
            yield rows, told
    yield rows, {"counts": torch.tensor([most, 1, 0], dtype=torch.int32)}
    yield rows[0], {"num_rows": torch.tensor([1 << 30], dtype=torch.int32)}
    yield rows[0], {"num_rows": torch.tensor([0], dtype=torch.int32)}


def maps(most: int) -> Iterator[tuple[torch.Tensor, torch.Tensor | None, int]]:
    """Maps, their probs, and the experts of a token, which some tokens have more of."""
    g = torch.Generator().manual_seed(1)
    for tokens, experts, topk in ((1, 8, 2), (most, 100, 8), (7, 256, 32), (3, 4, 4), (0, 8, 2)):
        for likely in (0.0, topk / experts / 2, 1.0):
            chosen = torch.rand(tokens, experts, generator=g) < likely
            for dtype in (torch.float32, torch.bfloat16, None):
                probs = None if dtype is None else torch.rand(tokens, experts, generator=g).to(dtype)
                yield chosen, probs, topk


def budgeted(dtype: torch.dtype, most: int) -> Iterator[tuple[torch.Tensor, torch.Tensor, budgets.Rule]]:
    """Yield ids of a rank, some that no expert has; the counts and budgets of all ranks; and the rule."""
    g = torch.Generator().manual_seed(6)
    for tokens, ranks, local, topk in ((1, 2, 4, 2), (most, 3, 33, 4), (7, 40, 2, 8), (700, 2, 3, 4), (0, 2, 2, 2)):
        experts, me = ranks * local, ranks // 2
        for alignment in (1, 4):
            ids = torch.randint(-1, experts + 1, (tokens, topk), generator=g).to(dtype)
            rule = budgets.Rule(me, ranks, experts, alignment, max(alignment, tokens))
            table = torch.randint(0, 3, (ranks, rule.columns), generator=g, dtype=torch.int32)
            table[me] = budgets.counted(ids, rule)[0][0]
            table[:, experts] = torch.randint(0, 4 * local * ranks, (ranks,), generator=g)
            yield ids, table, rule


def weighted(dtype: torch.dtype, most: int) -> Iterator[tuple[torch.Tensor, torch.Tensor, int]]:
    """Ids, their weights, whose sums are exact, and how many experts there are; some tokens have one twice."""
    g = torch.Generator().manual_seed(2)
    for tokens, experts, topk in ((1, 8, 2), (most, 100, 8), (7, 256, 32), (0, 4, 4)):
        ids = torch.randint(-1, experts + 1, (tokens, topk), generator=g).to(dtype)  # one more than there are
        yield ids, torch.randint(1, 100, (tokens, topk), generator=g) / 64, experts


def tables(dtype: torch.dtype, most: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Ids, some outside of the table, and a table of what they mean; some mean no expert."""
    g = torch.Generator().manual_seed(7)
    for shape, experts in (((1, 8), 2), ((most, 4), 100), ((0, 8), 3), ((33,), 1)):
        ids = torch.randint(-2, experts + 2, shape, generator=g).to(dtype)
        yield ids, torch.randint(-1, experts, (experts,), generator=g).to(dtype)
        yield torch.cat((ids.new_zeros(1), ids.flatten()))[1:].view(shape), torch.full((experts,), -1, dtype=dtype)


def check_ids(got: tuple[Any, Any], wanted: tuple[Any, Any], experts: int) -> None:
    """Compare ids: of a token with too many experts only the first one."""
    fine = wanted[0][:, 0] < experts
    assert torch.equal(got[0][:, 0], wanted[0][:, 0]) and torch.equal(got[0][fine], wanted[0][fine])
    assert (got[1] is None) == (wanted[1] is None)
    assert got[1] is None or torch.equal(got[1][fine], wanted[1][fine])


def found(layout: str, most: int) -> Iterator[About]:
    """Yield what a dispatch says of its rows."""
    g = torch.Generator().manual_seed(3)
    for rows, groups, each, dtype in ((1, 1, 2, torch.int64), (most, 3, 4, torch.int32), (0, 2, 1, torch.int64)):
        shape = (groups, rows) if layout == "batched" else (rows,)
        entries = (*shape, each) if layout == "flat" else shape
        ids = torch.randint(-1, 9, entries, generator=g).to(dtype) if layout == "flat" else None
        src = torch.randint(-1, 4, (*shape, 2), generator=g, dtype=torch.int32)
        counts = torch.randint(0, rows + 1, (groups,), generator=g, dtype=torch.int32)
        end = torch.randint(0, rows + 1, (1,), generator=g, dtype=torch.int32)
        yield About(torch.rand(entries, generator=g), src, counts, end, ids)


def rows_of(about: About) -> Iterator[torch.Tensor]:
    """Yield rows of such a dispatch, in words of each size."""
    for nbytes in (48, 12, 7):
        yield torch.full((*about.src.shape[:-1], nbytes), 9, dtype=torch.uint8)


def gradients(dtype: torch.dtype, most: int) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]]:
    """Gradients of rows, weights, and y or nothing: numbers whose products and sums are exact."""
    g = torch.Generator().manual_seed(4)
    for shape in ((1, 8), (most, 264), (2, 5, 1024), (0, 8)):
        rows, y = (torch.randint(-8, 9, shape, generator=g).to(dtype) for _ in range(2))
        weights = torch.randint(0, 5, shape[:-1], generator=g) / 4
        yield rows, weights, y
        yield rows, weights, None
        yield rows, weights, torch.cat((y.new_empty(1), y.flatten()))[1:].view(shape)  # not where vectors can be


def inside(
    dtype: torch.dtype, most: int
) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor, int, torch.Tensor]]:
    """Yield what SwiGLU experts have computed, for both ways that gate and up columns lie."""
    g = torch.Generator().manual_seed(5)
    for rows, columns, width in ((1, 8, 8), (most, 520, 8), (most, 520, 520), (0, 8, 8)):
        both, grad = (torch.randn(rows, n * columns, generator=g).to(dtype) for n in (2, 1))
        yield both, grad, torch.rand(rows, generator=g), width, torch.tensor([rows * 3 // 4], dtype=torch.int32)


def check_inside(got: swiglu.Gradients, wanted: swiglu.Gradients, end: int) -> None:
    """Sums are in another order, and numbers near the middle of two may be rounded to either."""
    for mine, other in zip(got, wanted, strict=True):
        ulp = torch.finfo(other.dtype).eps
        torch.testing.assert_close(mine[:end].cpu(), other[:end], rtol=max(ulp, 1e-5), atol=max(ulp, 1e-4))


def each_bf16(bits: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield values, each in a row of its own: alone in its group, and beside others."""
    values = bits.to(torch.uint16).view(torch.bfloat16)
    for column, others in ((0, [0.0]), (131, [1.7, -0.3]), (17, [1e30, -7e28]), (40, [1e-30, -1e-38, 0.0])):
        x = torch.tensor(others).bfloat16().repeat(144 // len(others))[:144].repeat(len(values), 1)
        x[:, column] = values
        yield x


def cast_rows(dtype: torch.dtype, most: int) -> Iterator[torch.Tensor]:
    """Ordinary rows and any bits at all, aligned and not, with groups that are not full, longer than registers hold."""
    g = torch.Generator().manual_seed(8)
    for rows, hidden in ((0, 64), (1, 2), (most, 130), (3, 512), (7, 1040), (2, 9000), (1, 8208)):
        yield (torch.randn(rows, hidden, generator=g) * torch.logspace(-4, 3, hidden)).to(dtype)
        yield torch.randint(0, 256, (rows, hidden * dtype.itemsize), generator=g, dtype=torch.uint8).view(dtype)
    yield torch.randn(3 * 64 + 1, generator=g).to(dtype)[1:].view(3, 64)  # begins in the middle of 16 bytes
    yield torch.randn(64, 2 * most, generator=g).to(dtype).T  # with gaps


def scales_of(name: str, device: str) -> list[float | torch.Tensor | None]:
    """Global scales that a format takes."""
    if name == "nvfp4":
        return [None, 1234.5, torch.full((1,), 3e38, device=device)]
    return [0.37, torch.full((1,), 1e-30, device=device)] if name == "fp8_tensor" else [None]


def check_cast(got: tuple[Any, Any], wanted: tuple[Any, Any]) -> None:
    for mine, other in zip(got, wanted, strict=True):
        assert (mine is None) == (other is None)
        if mine is not None:
            bits = torch.int32 if mine.dtype == torch.float32 else torch.uint8
            assert mine.dtype == other.dtype and torch.equal(mine.cpu().view(bits), other.cpu().view(bits))


def matrices(dtype: torch.dtype, most: int) -> Iterator[torch.Tensor]:
    """Matrices whose columns are a multiple of 16: whole blocks of 128 x 128, parts of blocks, and any bits at all."""
    g = torch.Generator().manual_seed(9)
    for rows, columns in ((1, 16), (128, 128), (130, 272), (300, 128), (5, 144), (most, 528)):
        w = torch.randn(rows, columns, generator=g).to(dtype) * 3
        w[0, 0] = 0
        w[rows // 2 :, columns // 2 :] *= 1e-6
        yield w
    bits = torch.randint(0, 256, (130, 144 * dtype.itemsize), generator=g, dtype=torch.uint8).view(dtype)
    yield bits.nan_to_num(1.0)


def check_blocks(w: torch.Tensor, data: torch.Tensor, scales: torch.Tensor) -> None:
    wanted = quantize_weights(w)
    assert torch.equal(data.cpu().view(torch.uint8), wanted.data.view(torch.uint8))
    assert torch.equal(scales.cpu(), wanted.scales)


def check_about(got: About, wanted: About) -> None:
    for mine, other in zip(got, wanted, strict=True):
        assert (mine is None) == (other is None)
        assert mine is None or (mine.dtype == other.dtype and torch.equal(mine.cpu(), other))


@pytest.mark.gpu1
@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
def test_budgets(dtype: torch.dtype) -> None:
    for ids, table, rule in budgeted(dtype, most=5000):
        counted = budgets.counted(ids.cuda(), rule)
        for mine, other in zip(counted[:2], budgets.counted(ids, rule)[:2], strict=True):
            assert torch.equal(mine.cpu(), other)
        for mine, other in zip(
            budgets.kept(ids.cuda(), table.cuda(), rule, counted.parts), budgets.kept(ids, table, rule), strict=True
        ):
            assert mine.dtype == other.dtype and torch.equal(mine.cpu(), other)


@pytest.mark.gpu1
@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
def test_tables(dtype: torch.dtype) -> None:
    for ids, table in tables(dtype, most=50_000):
        absent, wanted = (torch.ones(1, dtype=torch.int64, pin_memory=pinned) for pinned in (True, False))
        meant = expert_table.looked_up(ids.cuda(), table.cuda(), absent)
        assert torch.equal(meant.cpu(), expert_table.looked_up(ids, table, wanted))
        assert torch.equal(absent, wanted)


@pytest.mark.gpu1
@pytest.mark.parametrize("columns", COLUMNS, ids=str)
def test_padding(columns: tuple[torch.dtype, int]) -> None:
    for rows, told in padded(*columns, most=70_000):
        there = rows.cuda()
        padding.zero(rows, **told)
        padding.zero(there, **{name: tensor.cuda() for name, tensor in told.items()})
        assert torch.equal(there.cpu().view(torch.uint8), rows.view(torch.uint8))


@pytest.mark.gpu1
@pytest.mark.parametrize("columns", COLUMNS, ids=str)
def test_copies(columns: tuple[torch.dtype, int]) -> None:
    for rows, told in used(*columns, most=70_000):
        wanted, got = torch.zeros_like(rows), torch.zeros_like(rows).cuda()
        used_rows.copy(wanted, rows, **told)
        used_rows.copy(got, rows.cuda(), **{name: tensor.cuda() for name, tensor in told.items()})
        assert torch.equal(got.cpu().view(torch.uint8), wanted.view(torch.uint8))


@pytest.mark.gpu1
def test_maps() -> None:
    for chosen, probs, topk in maps(most=5000):
        there = routing_map.ids_of(chosen.cuda(), None if probs is None else probs.cuda(), topk)
        got = tuple(None if tensor is None else tensor.cpu() for tensor in there)
        check_ids((got[0], got[1]), routing_map.ids_of(chosen, probs, topk), chosen.shape[1])


@pytest.mark.gpu1
@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
def test_weights(dtype: torch.dtype) -> None:
    for ids, weights, experts in weighted(dtype, most=5000):
        there = routing_map.weights_at(ids.cuda(), weights.cuda(), experts)
        assert torch.equal(there.cpu(), routing_map.weights_at(ids, weights, experts))


@pytest.mark.gpu1
@pytest.mark.parametrize("layout", ["flat", "expert", "batched"])
def test_tidy(layout: str) -> None:
    for about in found(layout, most=50_000):
        there = About(*(None if tensor is None else tensor.cuda() for tensor in about))
        check_about(tidied(layout, there), tidied(layout, about))
        for rows in rows_of(about):
            padded = rows.cuda()
            check_about(tidied(layout, there, padded), tidied(layout, about, rows))
            assert torch.equal(padded.cpu(), rows)


@pytest.mark.gpu1
@pytest.mark.parametrize("dtype", DTYPES)
def test_gradients(dtype: torch.dtype) -> None:
    for rows, weights, y in gradients(dtype, most=5000):
        there = combine_gradients(rows.cuda(), weights.cuda(), None if y is None else y.cuda(), dtype)
        for got, wanted in zip(there, combine_gradients(rows, weights, y, dtype), strict=True):
            assert torch.equal(got.cpu(), wanted)


@pytest.mark.gpu1
@pytest.mark.parametrize("name", SWIGLUS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_swiglu(dtype: torch.dtype, name: str) -> None:
    for both, grad, weights, width, end in inside(dtype, most=3000):
        got = swiglu.gradients(both.cuda(), grad.cuda(), weights.cuda(), width, end.cuda(), SWIGLUS[name])
        check_inside(got, swiglu.gradients(both, grad, weights, width, end, SWIGLUS[name]), int(end))


@pytest.mark.gpu1
@pytest.mark.parametrize("name", quantize_rows.NAMES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_casts(name: str, dtype: torch.dtype) -> None:
    for x in cast_rows(dtype, most=3000):
        there = x.cuda()
        for here, scale in zip(scales_of(name, "cpu"), scales_of(name, "cuda"), strict=True):
            check_cast(
                quantize_rows.cast(there, name, global_scale=scale), formats.quantize(x, name, global_scale=here)
            )


@pytest.mark.gpu1
@pytest.mark.parametrize("name", formats.FORMATS)
def test_casts_of_every_bf16(name: str) -> None:
    """By kernels, and by torch on a GPU."""
    for x in each_bf16(torch.arange(1 << 16)):
        there = x.cuda()
        for here, scale in zip(scales_of(name, "cpu"), scales_of(name, "cuda"), strict=True):
            wanted = formats.quantize(x, name, global_scale=here)
            check_cast(quantize_rows.cast(there, name, global_scale=scale), wanted)
            check_cast(formats.quantize(there, name, global_scale=scale), wanted)


@pytest.mark.gpu1
@pytest.mark.parametrize("name", quantize_rows.NAMES)
def test_casts_in_a_graph(name: str) -> None:
    x, scale = torch.zeros(100, 7168, dtype=torch.bfloat16, device="cuda"), scales_of(name, "cuda")[-1]
    quantize_rows.load(x.get_device(), name, x.dtype, x.shape[1])
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        made = quantize_rows.cast(x, name, global_scale=scale)
    x.normal_()
    graph.replay()
    there = scale.cpu() if isinstance(scale, torch.Tensor) else scale
    check_cast(made, formats.quantize(x.cpu(), name, global_scale=there))


@pytest.mark.gpu1
@pytest.mark.parametrize("dtype", DTYPES)
def test_casts_of_blocks(dtype: torch.dtype) -> None:
    for w in matrices(dtype, most=3000):
        there = quantize_weights(w.cuda())
        check_blocks(w, there.data, there.scales)
        odd = w[:, :-1].contiguous()  # by torch
        there = quantize_weights(odd.cuda())
        check_blocks(odd, there.data, there.scales)


@pytest.mark.gpu1
@pytest.mark.parametrize("cast", CASTS, ids=str)
def test_weights_on_their_way(cast: Any) -> None:
    """The emulator has all dtypes."""
    dtype = torch.float32 if cast in ("int8_group", "fp8_token") else torch.bfloat16
    for shapes in carried(cast, dtype):
        check_carrier(torch.device("cuda", torch.cuda.current_device()), cast, dtype, shapes, 2)


@pytest.mark.gpu1
@pytest.mark.parametrize("cast", ["fp8", "mxfp4", "nvfp4", "int8_token", None], ids=str)
def test_weights_of_large_experts_and_of_many(cast: Any) -> None:
    for shape, experts in (((1024, 7168), 2), ((2, 32), 130)):
        check_carrier(torch.device("cuda", torch.cuda.current_device()), cast, torch.bfloat16, {"w": shape}, experts)
