"""The specification of combine by hand, on the example of tests/dispatch/test_reference.py."""

from __future__ import annotations

import torch

from moecomm.combine import reference

from ..dispatch.test_reference import arrived


def test_expert_rows_are_weighted_and_added() -> None:
    here = arrived("expert")
    ys = [torch.tensor([[10.0]]), torch.tensor([[1.0], [100.0], [200.0], [400.0]])]  # rank 1: expert 2, then expert 3
    out = reference.combine(ys, here)
    torch.testing.assert_close(out[0], torch.tensor([[0.7 * 10 + 0.3 * 100], [0.6 * 200 + 0.4 * 400]]))
    torch.testing.assert_close(out[1], torch.tensor([[0.9]]))
    plain = reference.combine(ys, here, weighted=False, bias=[torch.tensor([[0.5], [0.25]]), None])
    assert [o.flatten().tolist() for o in plain] == [[110.5, 600.25], [1.0]]


def test_flat_rows_are_added_over_ranks() -> None:
    ys = [torch.tensor([[10.0]]), torch.tensor([[1.0], [2.0], [4.0]])]
    out = reference.combine(ys, arrived("flat"), layout="flat")
    assert [o.flatten().tolist() for o in out] == [[11.0, 2.0], [4.0]]


def test_the_wire_rounds_each_ranks_sum() -> None:
    here = arrived("expert")
    y = 1 + 2**-7
    ys = [torch.full((1, 1), y).bfloat16(), torch.full((4, 1), y).bfloat16()]
    exact = (torch.tensor(0.7) * y + torch.tensor(0.3) * y).bfloat16()
    rounded = ((torch.tensor(0.7) * y).bfloat16().float() + (torch.tensor(0.3) * y).bfloat16().float()).bfloat16()
    assert reference.combine(ys, here)[0][0] == exact
    assert reference.combine(ys, here, wire=torch.bfloat16)[0][0] == rounded


def test_gradients_of_weights_return() -> None:
    grads = [torch.tensor([1.0]), torch.tensor([2.0, 3.0, 4.0, 5.0])]
    out = reference.combine_weight_grads(grads, arrived("expert"))
    assert out[0].tolist() == [[3.0, 1.0], [4.0, 5.0]]
    assert out[1].tolist() == [[2.0, 0.0]]
    flat = [torch.tensor([[9.0, 1.0]]), torch.tensor([[3.0, 9.0], [4.0, 5.0], [2.0, 9.0]])]
    out = reference.combine_weight_grads(flat, arrived("flat"), layout="flat")
    assert out[0].tolist() == [[3.0, 1.0], [4.0, 5.0]]
