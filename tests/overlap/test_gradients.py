"""Gradients of the operators against autograd of one rank that has everything, in float64."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from moecomm import overlap
from moecomm.overlap import reference

from .cases import OPERATORS, PRODUCTS, Case, on_ranks, random_case

RANKS = (1, 2, 3, 5)


def leaves(case: Case) -> list[str]:
    return ["x", "w"] if case.operator in PRODUCTS else ["tables"]


def seen(case: Case, rank: int, shape: torch.Size) -> torch.Tensor:
    """Return the factors of a rank's result: small integers.  matmul_all_reduce: the same on all ranks."""
    g = torch.Generator().manual_seed(0 if case.operator == "matmul_all_reduce" else rank)
    return torch.randint(-7, 8, shape, generator=g).to(case.dtype)


def gradients(case: Case, workspace: overlap.Workspace) -> dict[str, torch.Tensor]:
    mine = {name: case.given[workspace.rank][name].clone().requires_grad_() for name in leaves(case)}
    out = case.run(workspace, **mine)
    found = torch.autograd.grad(out, list(mine.values()), seen(case, workspace.rank, out.shape))
    return dict(zip(mine, found, strict=True))


def expected(case: Case, *, magnitude: bool = False) -> list[dict[str, torch.Tensor]]:
    """Gradients of the sum of all losses; matmul_all_reduce: of one, which is the same on all ranks."""
    given = [
        {
            name: (tensor.abs() if magnitude else tensor).double().requires_grad_() if name in leaves(case) else tensor
            for name, tensor in one.items()
        }
        for one in case.given
    ]
    columns = {name: [one[name] for one in given] for name in given[0]}
    out = getattr(reference, case.operator)(**columns)
    if case.operator == "matmul_all_reduce":
        out = out[:1]
    weights = [seen(case, rank, result.shape).double() for rank, result in enumerate(out)]
    total = sum(((w.abs() if magnitude else w) * result).sum() for w, result in zip(weights, out, strict=True))
    flat = [one[name] for one in given for name in leaves(case)]
    grads = iter(torch.autograd.grad(total + sum(0 * leaf.sum() for leaf in flat), flat))  # all of them are used
    return [{name: next(grads) for name in leaves(case)} for one in given]


@pytest.mark.parametrize("operator", OPERATORS)
def test_gradients_are_those_of_one_rank(operator: str) -> None:
    """Integers: float32 sums are exact.  Parts of a sum over ranks, the sum and the result are rounded."""
    for seed in range(24):
        ranks = RANKS[seed % len(RANKS)]
        case = random_case(operator, ranks, seed)
        found = on_ranks(ranks, lambda workspace, case=case: gradients(case, workspace))
        sizes = expected(case, magnitude=True)
        for rank, (got, want) in enumerate(zip(found, expected(case), strict=True)):
            for name, value in want.items():
                assert got[name].dtype is case.dtype and got[name].shape == value.shape
                off = torch.finfo(case.dtype).eps * sizes[rank][name]  # two roundings, of half of it each
                assert ((got[name].double() - value).abs() <= off).all(), f"{name}, rank {rank}, seed {seed}"


@pytest.mark.parametrize("ranks", [1, 3])
def test_gathered_rows_have_a_gradient(ranks: int) -> None:
    case = random_case("all_gather_matmul", ranks, 12)

    def body(workspace: overlap.Workspace) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        x, w = (case.given[workspace.rank][name].clone().requires_grad_() for name in ("x", "w"))
        y, gathered = overlap.all_gather_matmul(x, w, workspace, return_gathered=True)
        assert torch.equal(gathered, torch.cat([given["x"] for given in case.given]))
        (alone,) = torch.autograd.grad(gathered, x, torch.full_like(gathered, workspace.rank + 1.0), retain_graph=True)
        of_y = torch.autograd.grad(y, (x, w), torch.ones_like(y), retain_graph=True)
        both = torch.autograd.grad((y, gathered), (x, w), (torch.ones_like(y), torch.ones_like(gathered)))
        assert torch.equal(both[1], of_y[1]) and torch.equal(both[0], (of_y[0].float() + ranks).to(x.dtype))
        return x, alone, of_y[0]

    for x, alone, _ in on_ranks(ranks, body):
        assert x.numel() and torch.equal(alone, torch.full_like(x, ranks * (ranks + 1) / 2))


def test_only_wanted_gradients_are_computed() -> None:
    """Whichever of x and w requires one, on all ranks alike."""

    def body(workspace: overlap.Workspace) -> None:
        for operator in PRODUCTS:
            case = random_case(operator, 2, 5)
            both = gradients(case, workspace)
            for name in ("x", "w"):
                leaf = case.given[workspace.rank][name].clone().requires_grad_()
                out = case.run(workspace, **{name: leaf})
                (grad,) = torch.autograd.grad(out, leaf, seen(case, workspace.rank, out.shape))
                assert torch.equal(grad, both[name]), f"{operator} {name}"

    on_ranks(2, body)


def test_the_gradient_of_a_gradient() -> None:
    """Backward passes consist of operators with gradients: y is bilinear in x and w."""

    def body(workspace: overlap.Workspace) -> None:
        x = torch.ones(2, 3, dtype=torch.bfloat16, requires_grad=True)
        w = torch.full((4, 3), 2.0, dtype=torch.bfloat16, requires_grad=True)
        y = overlap.all_gather_matmul(x, w, workspace)
        (grad_x,) = torch.autograd.grad(y.sum(), x, create_graph=True)
        assert torch.equal(grad_x, torch.full_like(x, 2 * 4 * 2))  # w has 4 rows, and 2 ranks have such
        (grad_w,) = torch.autograd.grad(grad_x.sum(), w)
        assert torch.equal(grad_w, torch.full_like(w, 2 * 2))  # each of 2 ranks has 2 rows of x

    on_ranks(2, body)


@pytest.mark.parametrize("kind", ["expanded", "transposed", "float32"])
def test_gradients_come_in_any_layout(kind: str) -> None:
    """Autograd hands over expanded and transposed tensors; a loss in float32 has its gradient cast."""

    def loss(y: torch.Tensor) -> torch.Tensor:
        scale: dict[str, Callable[[], torch.Tensor]] = {
            "expanded": lambda: y.sum(),
            "transposed": lambda: (y.t() * torch.ones(y.shape[::-1], dtype=y.dtype)).sum(),
            "float32": lambda: y.float().sum(),
        }
        return scale[kind]()

    def body(workspace: overlap.Workspace) -> None:
        case = random_case("matmul_reduce_scatter", 2, 5)
        given = case.given[workspace.rank]
        x, w = (given[name].clone().requires_grad_() for name in ("x", "w"))
        y = overlap.matmul_reduce_scatter(x, w, workspace)
        grads = torch.autograd.grad(y, (x, w), torch.ones_like(y), retain_graph=True)
        for got, want in zip(torch.autograd.grad(loss(y), (x, w)), grads, strict=True):
            assert torch.equal(got, want)

    on_ranks(2, body)
