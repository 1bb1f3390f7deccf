"""Derivatives that there are not are refused, and are no zeros."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.autograd import forward_ad

import moecomm
from moecomm import ops
from moecomm.ops.grouped import grouped_linear, grouped_outer
from tests.ops.ranks import case

Call = Callable[[torch.Tensor], torch.Tensor]


def calls(buffer: moecomm.Buffer, hidden: int) -> dict[str, tuple[Call, torch.Tensor]]:
    """Operators as functions of one tensor, and that tensor."""
    x, idx, weights = torch.ones(2, hidden), torch.tensor([[0, 1, 2], [3, 2, 1]]), torch.rand(2, 3)
    w13, w2 = torch.ones(4, 32, hidden), torch.ones(4, hidden, 16)
    routed = ops.dispatch(buffer, x, idx, weights, max_rows=6)
    handle, ends = routed.handle, torch.tensor([1, 2], dtype=torch.int32)
    assert handle.row_weights is not None
    return {
        "dispatch of x": (lambda t: ops.dispatch(buffer, t, idx, weights).x, x),
        "dispatch of weights": (lambda t: ops.dispatch(buffer, x, idx, t).row_weights, weights),
        "dispatch_again": (lambda t: ops.dispatch_again(t, handle), x),
        "combine of y": (lambda t: ops.combine(t, handle), routed.x),
        "combine of weights": (lambda t: ops.combine(routed.x, handle._replace(row_weights=t)), handle.row_weights),
        "moe of x": (lambda t: ops.moe(buffer, t, idx, weights, w13, w2), x),
        "moe of weights": (lambda t: ops.moe(buffer, x, idx, t, w13, w2), weights),
        "moe of experts": (lambda t: ops.moe(buffer, x, idx, weights, t, w2), w13),
        "moe of a bias": (lambda t: ops.moe(buffer, x, idx, weights, w13, w2, bias=t), x),
        "grouped_linear": (lambda t: grouped_linear(t, w13[:2, :, :hidden], ends), x),
        "grouped_outer": (lambda t: grouped_outer(t, x, ends), x),
    }


def by_duals(call: Call, at: torch.Tensor) -> None:
    with forward_ad.dual_level():
        call(forward_ad.make_dual(at, torch.ones_like(at)))


def by_duals_that_require_grad(call: Call, at: torch.Tensor) -> None:
    by_duals(call, at.clone().requires_grad_())


def by_jvp(call: Call, at: torch.Tensor) -> None:
    torch.func.jvp(call, (at,), (torch.ones_like(at),))


def by_jacfwd(call: Call, at: torch.Tensor) -> None:
    torch.func.jacfwd(call)(at)


def by_func_grad(call: Call, at: torch.Tensor) -> None:
    torch.func.grad(lambda t: call(t).sum())(at)


@pytest.mark.parametrize("how", [by_duals, by_duals_that_require_grad, by_jvp, by_jacfwd, by_func_grad])
def test_forward_mode_is_refused(how: Callable[[Call, torch.Tensor], None]) -> None:
    c = case(1)
    with c.buffer(None) as buffer:
        for name, (call, at) in calls(buffer, c.hidden).items():
            want = call(at)
            with pytest.raises(moecomm.Unsupported, match="forward-mode AD"):
                how(call, at)
            assert torch.equal(call(at), want), name


def test_a_backward_pass_over_duals_is_refused() -> None:
    c = case(1)
    with c.buffer(None) as buffer:
        every = calls(buffer, c.hidden)
        del every["moe of a bias"]  # no round: its gradient is that of the output
        for name, (call, at) in every.items():
            leaf = at.detach().clone().requires_grad_()
            out = call(leaf)
            with forward_ad.dual_level(), pytest.raises(moecomm.Unsupported, match="forward-mode AD"):
                torch.autograd.grad(out, leaf, forward_ad.make_dual(torch.ones_like(out), torch.ones_like(out)))
            assert torch.autograd.grad(call(leaf).sum(), leaf)[0].shape == at.shape, name


def test_what_has_no_tangent_goes_on_beside_what_has() -> None:
    c = case(1)
    with c.buffer(None) as buffer:
        every = calls(buffer, c.hidden)

        def beside(scale: torch.Tensor) -> torch.Tensor:
            return scale * sum(call(at).sum() for call, at in every.values())

        one = torch.ones(())
        value, tangent = torch.func.jvp(beside, (one,), (one,))
        assert torch.equal(value, tangent)


def test_a_compiled_tangent_is_refused() -> None:
    c = case(1)
    with c.buffer(None) as buffer:
        call, at = calls(buffer, c.hidden)["dispatch of x"]
        compiled: Any = torch.compile(lambda x: torch.func.jvp(call, (x,), (torch.ones_like(x),)), backend="eager")
        with pytest.raises(Exception, match="forward-mode AD"):
            compiled(at)
