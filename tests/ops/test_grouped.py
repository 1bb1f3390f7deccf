"""Grouped products against plain ones, group by group."""

from __future__ import annotations

import pytest
import torch

from moecomm.ops.grouped import grouped_linear

COUNTS = torch.tensor([3, 0, 5, 1], dtype=torch.int32)


def operands(dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    g = torch.Generator().manual_seed(0)
    x, weight = torch.randn(12, 8, generator=g).to(dtype), torch.randn(4, 6, 8, generator=g).to(dtype)
    return x.requires_grad_(), weight.requires_grad_(), COUNTS.cumsum(0, dtype=torch.int32)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_values_and_gradients_are_those_of_each_product(dtype: torch.dtype) -> None:
    x, weight, ends = operands(dtype)
    seen = torch.randn(9, 6, generator=torch.Generator().manual_seed(1)).to(dtype)
    out = grouped_linear(x, weight, ends)[:9]
    grads = torch.autograd.grad(out, (x, weight), seen)
    again = operands(dtype)
    parts = again[0][:9].split(COUNTS.tolist())
    want = torch.cat([part @ matrix.T for part, matrix in zip(parts, again[1], strict=True)])
    assert torch.equal(out, want)
    for got, expected in zip(grads, torch.autograd.grad(want, again[:2], seen), strict=True):
        torch.testing.assert_close(got, expected)
    assert not grads[0][9:].any() and not grads[1][1].any()


def test_gradients_are_differences_and_so_are_theirs() -> None:
    x, weight, ends = (t.double() if t.is_floating_point() else t for t in operands())
    x, weight = x.detach().requires_grad_(), weight.detach().requires_grad_()
    assert torch.autograd.gradcheck(grouped_linear, (x, weight, ends))
    assert torch.autograd.gradgradcheck(grouped_linear, (x, weight, ends))


def test_rows_that_are_not_a_numbers_do_not_spread() -> None:
    x, weight, ends = operands()
    dirty = x.detach().clone()
    dirty[9:] = torch.nan
    grad = torch.full((12, 6), torch.nan)
    grad[:9] = 1.0
    dirty.requires_grad_()
    got = torch.autograd.grad(grouped_linear(dirty, weight, ends), (dirty, weight), grad)
    want = torch.autograd.grad(grouped_linear(x, weight, ends)[:9].sum(), (x, weight))
    assert torch.equal(got[0][:9], want[0][:9]) and torch.equal(got[1], want[1])


def test_torch_finds_nothing_wrong_with_the_operators() -> None:
    x, weight, ends = operands()
    torch.library.opcheck(torch.ops.moecomm.grouped_linear.default, (x, weight, ends))
    left = torch.randn(12, 6, requires_grad=True)
    torch.library.opcheck(torch.ops.moecomm.grouped_outer.default, (left, x, ends))
