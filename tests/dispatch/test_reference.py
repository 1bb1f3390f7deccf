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


def test_batched_has_as_many_rows_as_a_rank_wants() -> None:
    first, second = reference.dispatch(
        X, IDX, list(WEIGHTS), num_experts=4, layout="batched", max_tokens=2, max_rows=[1, 3]
    )
    assert first.x.view(2, 1).tolist() == [[1.0], [0]]
    assert second.num_rows == 4 and second.x.view(2, 3).tolist() == [[5.0, 0, 0], [1.0, 2.0, 2.0]]
    assert second.src.view(2, 3, 2)[0].tolist() == [[1, 0], [-1, -1], [-1, -1]]
    assert [r.tolist() for r in second.rows] == [[[3, -1], [4, 5]], [[0, -1]]]


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


def test_scales_that_are_powers_of_two() -> None:
    x = torch.zeros(1, 4 * 128 + 16)
    # The first scale is 1 as it is, the second a little more than 1 and so 2; -3 / 448 is above 2^-8.
    x[0, [0, 128, 256, 257]] = torch.tensor([448.0, 449.0, -3.0, 1.0])
    x[0, [384, 385]] = torch.tensor([torch.inf, 1.0])
    q, scales = reference.quantize(x, "ue8m0")
    assert (q.dtype, scales.dtype) == (torch.float8_e4m3fn, torch.float8_e8m0fnu)
    assert scales.view(torch.uint8).tolist() == [[127, 128, 120, 255, 105]]  # 2^-22 is the first above 1e-4 / 448
    assert q.float()[0, [0, 128, 256, 257, 385]].tolist() == [448.0, 224.0, -384.0, 128.0, 0.0]
    assert q.float()[0, 384].isnan()


def test_a_row_of_scales_as_columns() -> None:
    scales = torch.arange(1.0, 11).view(5, 2)
    columns = reference.by_column(scales)
    assert torch.equal(columns, scales)
    assert columns.stride() == (1, 8)
    exponents = torch.arange(1, 11, dtype=torch.uint8).view(2, 5).view(torch.float8_e8m0fnu)
    packed = reference.by_column(exponents)
    assert packed.dtype is torch.int32
    assert packed.tolist() == [[0x04030201, 5], [0x09080706, 10]]
    assert packed.stride() == (1, 4)
    assert reference.by_column(torch.zeros(0, 3)).shape == (0, 3)


def test_scales_arrive_beside_their_rows() -> None:
    x = [torch.zeros(2, 16), torch.zeros(1, 16)]
    exponents = [torch.tensor([[1], [2]], dtype=torch.uint8), torch.tensor([[3]], dtype=torch.uint8)]
    scales = [e.view(torch.float8_e8m0fnu) for e in exponents]
    for layout, want in [("flat", [[1], [2], [3]]), ("expert", [[3], [1], [2], [2]])]:
        second = reference.dispatch(x, IDX, list(WEIGHTS), num_experts=4, layout=layout, scales=scales)[1]
        assert second.scales is not None and second.scales.dtype is torch.float8_e8m0fnu
        assert second.scales.view(torch.uint8).tolist() == want
