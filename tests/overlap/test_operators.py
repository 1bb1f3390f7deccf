"""The operators of torch: what torch checks of any operator, graphs, and transforms that are refused."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import moecomm
from moecomm import overlap
from moecomm.fused import Fp8

from ..few import few
from .cases import FP8, HOST, OPERATORS, PRODUCTS, Case, gathers, on_ranks, random_case, same

pytestmark = pytest.mark.usefixtures("fresh_compiler")


@pytest.fixture
def workspace() -> Iterator[overlap.Workspace]:
    with overlap.Workspace("self", 1 << 20, **HOST) as opened:
        yield opened


def leaf(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(shape).to(dtype).requires_grad_()


def test_torch_finds_nothing_wrong_with_the_operators(workspace: overlap.Workspace) -> None:
    operators, name = torch.ops.moecomm, workspace.name
    x, w = leaf(6, 5), leaf(3, 5)
    ragged = torch.tensor([0, 1, -1, 3]), torch.tensor([0, 2, 2, 3, 4])
    calls: list[tuple[Any, tuple[Any, ...]]] = [
        (operators.all_gather_matmul, (x, w, name, True, None)),
        (operators.all_gather_matmul, (x, w.detach(), name, False, False)),
        (operators.matmul_reduce_scatter, (x, w, name, None)),
        (operators.matmul_all_reduce, (x, w, name, True)),
        (operators.matmul_all_to_all, (leaf(2, 1, 3, 5), leaf(2, 4, 5), name, None)),
        (operators.embedding_all_to_all, (leaf(2, 4, 3), torch.randint(-1, 4, (2, 5, 3)), None, name, None)),
        (operators.embedding_all_to_all, (leaf(2, 4, 3, dtype=torch.float32), *ragged, name, None)),
        (operators.all_to_all, (leaf(1, 3, 2), name)),
    ]
    for operator, arguments in calls:
        torch.library.opcheck(operator.default, arguments)


@pytest.mark.parametrize("operator", PRODUCTS)
def test_torch_finds_nothing_wrong_with_the_operators_in_fp8(operator: str, workspace: overlap.Workspace) -> None:
    (given,) = random_case(operator, 1, 2, dtype=FP8).given
    (x, x_scales), (w, w_scales) = given["x"], given["w"]
    # test_schema multiplies tensors, for which torch has no FP8.
    checks = ("test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
    for gather in ((False,), (True,)) if operator == "all_gather_matmul" else ((),):
        arguments = (x, w, workspace.name, *gather, None, x_scales, w_scales)
        torch.library.opcheck(getattr(torch.ops.moecomm, operator).default, arguments, test_utils=checks)


def layer(x: torch.Tensor, w1: torch.Tensor, w2: torch.Tensor, workspace: overlap.Workspace) -> torch.Tensor:
    """Every operator of products, one after the other."""
    inner, rows = overlap.all_gather_matmul(x, w1, workspace, return_gathered=True)
    y = overlap.matmul_reduce_scatter(torch.relu(inner), w2, workspace)
    both = overlap.matmul_all_reduce(y + x, w1, workspace)
    sent = both.unflatten(0, (1, workspace.num_ranks, -1))
    return overlap.matmul_all_to_all(sent, w2.unsqueeze(0), workspace).sum(dim=0) + rows.sum()


def lookup(
    tables: torch.Tensor, indices: torch.Tensor, offsets: torch.Tensor | None, workspace: overlap.Workspace
) -> torch.Tensor:
    return overlap.embedding_all_to_all(tables, indices, workspace, offsets=offsets).tanh()


def run(function: Callable[..., torch.Tensor], leaves: list[torch.Tensor], *others: Any) -> list[torch.Tensor]:
    mine = [value.clone().requires_grad_() for value in leaves]
    out = function(*mine, *others)
    return [out.detach(), *torch.autograd.grad(out.float().square().sum(), mine)]


@pytest.mark.parametrize("backend", few(("eager", "aot_eager"), "aot_eager"))
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_compiled_layer_has_no_break_and_the_same_bits(ranks: int, backend: str) -> None:
    def body(workspace: overlap.Workspace) -> None:
        g = torch.Generator().manual_seed(workspace.rank)
        compiled = torch.compile(layer, fullgraph=True, backend=backend)
        for rows in (4, 6, 8):  # the first number, then a symbol
            shapes = ((rows, 5), (7, 5), (5, 7))
            leaves = [torch.randint(-2, 3, shape, generator=g).bfloat16() for shape in shapes]
            for got, want in zip(run(compiled, leaves, workspace), run(layer, leaves, workspace), strict=True):
                assert torch.equal(got, want), f"{rows} rows"

    on_ranks(ranks, body)


@pytest.mark.parametrize("ragged", [False, True])
def test_a_compiled_lookup_has_no_break_and_the_same_bits(ragged: bool, workspace: overlap.Workspace) -> None:
    compiled = torch.compile(lookup, fullgraph=True, backend="aot_eager")
    for batch in (3, 5, 6):
        tables, indices, offsets = torch.randn(2, 9, 4), torch.randint(-1, 9, (2, batch, 3)), None
        if ragged:
            indices, offsets = indices.flatten(), torch.arange(2 * batch + 1) * 3
        given = (indices, offsets, workspace)
        for got, want in zip(run(compiled, [tables], *given), run(lookup, [tables], *given), strict=True):
            assert torch.equal(got, want), f"a batch of {batch}"


@pytest.mark.parametrize("operator", OPERATORS)
def test_fake_tensors_have_the_shapes_of_real_ones(operator: str, workspace: overlap.Workspace) -> None:
    case = random_case(operator, 1, 3)
    want = case.run(workspace)
    mode = torch._subclasses.FakeTensorMode()
    case = Case(operator, case.dtype, [{name: mode.from_tensor(value) for name, value in case.given[0].items()}])
    with mode:
        found = case.run(workspace)
    assert (found.shape, found.dtype) == (want.shape, want.dtype)


@pytest.mark.parametrize("operator", PRODUCTS)
def test_a_compiled_product_in_fp8_has_no_break_and_the_same_bits(operator: str, workspace: overlap.Workspace) -> None:
    case = random_case(operator, 1, 2, dtype=FP8, exact=False)
    call = getattr(overlap, operator)
    compiled = torch.compile(lambda x, w: call(Fp8(*x), Fp8(*w), workspace) * 2, fullgraph=True, backend="aot_eager")
    x, w = (tuple(case.given[0][name]) for name in ("x", "w"))
    assert torch.equal(compiled(x, w), case.run(workspace) * 2) and compiled(x, w).dtype is torch.bfloat16


def test_gathered_rows_in_fp8_have_their_scales() -> None:
    case = random_case("all_gather_matmul", 3, 2, dtype=FP8)

    def body(workspace: overlap.Workspace) -> None:
        given = case.given[workspace.rank]
        y, gathered = overlap.all_gather_matmul(**given, workspace=workspace, return_gathered=True)
        assert isinstance(gathered, Fp8) and gathers(gathered, case)
        assert same(y, case.want()[workspace.rank], torch.bfloat16)

    on_ranks(3, body)


def test_rows_and_scales_may_have_any_strides() -> None:
    for seed in range(8):
        case = random_case("matmul_all_reduce", 2, seed, dtype=FP8)
        for given in case.given:
            for name, (data, scales) in given.items():
                given[name] = Fp8(data, scales.mT.contiguous().mT)  # by column
            given["x"] = Fp8(torch.cat([given["x"].data] * 2, dim=1)[:, : given["x"].data.shape[1]], given["x"].scales)
        for got, want in zip(on_ranks(2, case.run), case.want(), strict=True):
            assert same(got, want, case.dtype)


@pytest.mark.parametrize("operator", PRODUCTS)
@pytest.mark.parametrize("part", ["x", "w", "scales"])
def test_gradients_in_fp8_are_refused_by_name(operator: str, part: str, workspace: overlap.Workspace) -> None:
    (given,) = random_case(operator, 1, 2, dtype=FP8).given
    wants = given["x"].scales if part == "scales" else given[part].data
    wants.requires_grad_()
    call = getattr(overlap, operator)
    with pytest.raises(moecomm.Unsupported, match=f"{operator} in FP8"):
        call(**given, workspace=workspace)
    with torch.no_grad():
        assert not call(**given, workspace=workspace).requires_grad


def test_a_graph_of_a_closed_workspace_says_closed() -> None:
    compiled = torch.compile(overlap.matmul_all_reduce, fullgraph=True, backend="eager")
    x, w = leaf(2, 3).detach(), leaf(4, 3).detach()
    with overlap.Workspace("self", 4096, **HOST) as workspace:
        compiled(x, w, workspace)
    with pytest.raises(moecomm.Closed, match="this Workspace is closed"):
        compiled(x, w, workspace)


def test_the_name_of_a_workspace_stands_for_it(workspace: overlap.Workspace) -> None:
    case = random_case("matmul_all_reduce", 1, 3)
    want = case.run(workspace)
    assert torch.equal(overlap.matmul_all_reduce(**case.given[0], workspace=workspace.name), want)


def test_transforms_of_torch_func_are_refused_by_name(workspace: overlap.Workspace) -> None:
    for operator in PRODUCTS:
        given = random_case(operator, 1, 5).given[0]
        call = getattr(overlap, operator)
        with pytest.raises(moecomm.Unsupported, match=r"x.* under torch\.func"):
            torch.func.grad(lambda x, call=call, w=given["w"]: call(x, w, workspace).float().sum())(given["x"])
        with pytest.raises(moecomm.Unsupported, match=r"x.* under torch\.func\.vmap"):
            torch.func.vmap(lambda x, call=call, w=given["w"]: call(x, w, workspace))(given["x"].unsqueeze(0))


def test_autocast_changes_nothing(workspace: overlap.Workspace) -> None:
    for operator in OPERATORS:
        case = random_case(operator, 1, 5, dtype=torch.float16)
        want = case.run(workspace)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert torch.equal(case.run(workspace), want)


def test_gradients_of_w_need_the_gathered_rows(workspace: overlap.Workspace) -> None:
    """The operator of torch, called without the function of moecomm.overlap."""
    with pytest.raises(moecomm.Unsupported, match="gather=True"):
        torch.ops.moecomm.all_gather_matmul(leaf(2, 3).detach(), leaf(4, 3), workspace.name, False, None)
