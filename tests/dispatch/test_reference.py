"""The specification of dispatch by hand: two ranks, four experts, three tokens."""

from __future__ import annotations

import torch

from moecomm.dispatch import reference

# rank 0: token 0 -> experts 3 and 0; token 1 -> expert 3 twice.  rank 1: token 0 -> expert 2 and none.
X = [torch.tensor([[1.0], [2.0]]), torch.tensor([[5.0]])]
IDX = [torch.tensor([[3, 0], [3, 3]]), torch.tensor([[2, -1]])]
WEIGHTS = [torch.tensor([[0.3, 0.7], [0.6, 0.4]]), torch.tensor([[0.9, 0.1]])]


def arrived(layout: str, alignment: int = 1) -> list[reference.Arrived]:
    return reference.dispatch(
        X, IDX, list(WEIGHTS), num_experts=4, layout=layout, expert_alignment=alignment, max_tokens=2
    )


def test_flat_has_one_row_a_token_and_rank() -> None:
    first, second = arrived("flat")
    assert first.x.tolist() == [[1.0]]
    assert first.src.tolist() == [[0, 0]]
    assert first.topk_idx.tolist() == [[-1, 0]]
    torch.testing.assert_close(first.topk_weights, torch.tensor([[0.0, 0.7]]))
    assert second.x.tolist() == [[1.0], [2.0], [5.0]]
    assert second.src.tolist() == [[0, 0], [0, 1], [1, 0]]
    assert second.topk_idx.tolist() == [[1, -1], [1, 1], [0, -1]]
    torch.testing.assert_close(second.topk_weights, torch.tensor([[0.3, 0.0], [0.6, 0.4], [0.9, 0.0]]))
    assert second.tokens_per_expert.tolist() == [1, 3]
    assert [r.tolist() for r in second.rows] == [[[0, -1], [1, 1]], [[2, -1]]]


def test_expert_groups_rows_by_expert_then_source_token_and_k() -> None:
    second = arrived("expert", alignment=4)[1]
    assert second.num_rows == 8
    assert second.x.flatten().tolist() == [5.0, 0, 0, 0, 1.0, 2.0, 2.0, 0]
    assert second.src.tolist() == [[1, 0], [-1, -1], [-1, -1], [-1, -1], [0, 0], [0, 1], [0, 1], [-1, -1]]
    torch.testing.assert_close(second.row_weights, torch.tensor([0.9, 0, 0, 0, 0.3, 0.6, 0.4, 0]))
    assert [r.tolist() for r in second.rows] == [[[4, -1], [5, 6]], [[0, -1]]]


def test_batched_gives_each_expert_its_own_rows() -> None:
    second = arrived("batched")[1]
    assert second.num_rows == 4
    assert second.x.view(2, 4).tolist() == [[5.0, 0, 0, 0], [1.0, 2.0, 2.0, 0]]


def test_quantize_scales_groups_of_128_columns() -> None:
    x = torch.zeros(1, 144)
    x[0, :3] = torch.tensor([896.0, -448.0, 2.0])
    x[0, 128] = 1.0
    q, scales = reference.quantize(x)
    torch.testing.assert_close(scales, torch.tensor([[2.0, 1.0 / 448]]))
    assert q.dtype is torch.float8_e4m3fn and q.shape == (1, 144)
    assert q.float()[0, [0, 1, 2, 3, 128]].tolist() == [448.0, -224.0, 1.0, 0.0, 448.0]
    assert reference.quantize(torch.zeros(1, 16))[1].item() == torch.tensor(1e-4).div(448).item(), (
        "amax is at least 1e-4"
    )
