"""combine(wire="rows"): rows travel as they are, and source ranks add them in the order of k."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

import moecomm
from moecomm.testing import LocalBuffers, check_case, random_case
from moecomm.testing.cases import Case, placed, random_placement, random_sizes

from ..few import few

SIZES: dict[str, Any] = {"hidden": 64, "num_experts": 8, "topk": 3, "max_tokens": 20, "dtype": torch.bfloat16}


def unsummed_cases(sizes: dict[str, Any], numbers: range, **options: Any) -> Iterator[Case]:
    """Random cases of experts' rows with this wire."""
    for number in numbers:
        case = random_case(number, **sizes, **options)
        if case.layout != "flat":
            yield replace(case, wire="rows", weight_grads=False)


@pytest.mark.parametrize("seed", few(range(12), 0, 1, 2))
def test_random_cases_match_the_reference(seed: int) -> None:
    sizes = random_sizes(seed)
    with LocalBuffers(**sizes, backend="host", timeout_s=60) as ranks:
        for case in unsummed_cases(sizes, range(20 * seed, 20 * seed + 20)):
            check_case(ranks, case)


@pytest.mark.parametrize("verify_every", [0, 1])
@pytest.mark.parametrize("balanced", [False, True])
def test_placements(balanced: bool, verify_every: int) -> None:
    """Four ranks with replicas; balanced ones are chosen by the counts of the round."""
    sizes = {"ranks": 4, **SIZES}
    placement = random_placement(0, **sizes, balanced=balanced)
    with LocalBuffers(**sizes, placement=placement, verify_every=verify_every, backend="host", timeout_s=60) as ranks:
        for case in unsummed_cases(sizes, range(20)):
            check_case(ranks, placed(case))


def test_rows_outside_of_the_window_are_copied_there() -> None:
    """So are rows of numpy, and a slice of longer rows; a call with rows inside finds the same plan."""
    x = torch.randn(20, 64, dtype=torch.float32)
    ids, weights = torch.rand(20, 8).topk(3).indices, torch.rand(20, 3)
    with moecomm.Buffer("self", **{**SIZES, "dtype": torch.float32}, device="cpu") as buffer:
        routed = buffer.dispatch(x, ids, weights)
        inside = buffer.empty(routed.handle)
        inside.copy_(routed.x)
        wanted = buffer.combine(inside, routed.handle, wire="rows")
        wide = torch.cat([routed.x, routed.x], dim=1)
        for y in (routed.x.clone(), wide[:, :64], routed.x.numpy()):
            assert torch.equal(torch.as_tensor(buffer.combine(y, routed.handle, wire="rows")), wanted)
        again = buffer.dispatch(x[:0], ids[:0], weights[:0])
        assert buffer.combine(again.x.clone(), again.handle, wire="rows").shape == (0, 64)
        assert torch.equal(buffer.combine(routed.x.clone(), routed.handle, wire="rows"), wanted)
        assert torch.equal(buffer.combine(inside, routed.handle, wire="rows"), wanted)


def test_chunks_match_one_round() -> None:
    """A dispatch whose tokens go in several rounds."""
    ids, weights = torch.randint(0, 2, (20, 3)), torch.rand(20, 3)
    x = torch.randn(20, 64).bfloat16()
    found = []
    for factor in (8.0, 0.2):
        with moecomm.Buffer("self", **SIZES, capacity_factor=factor, device="cpu") as buffer:
            routed = buffer.dispatch(x, ids, weights, overflow="chunks")
            assert hasattr(routed.handle, "chunks") == (factor < 1)
            found.append(buffer.combine(routed.x, routed.handle, wire="rows"))
    assert torch.equal(*found)


def test_no_limit_of_own_weights() -> None:
    """Weights of the source rank do not travel, so more than 4096 entries may have them."""
    sizes = {**SIZES, "max_tokens": 2000}
    x, ids = torch.randn(2000, 64).bfloat16(), torch.rand(2000, 8).topk(3).indices
    weights = torch.rand(2000, 3)
    with moecomm.Buffer("self", **sizes, device="cpu") as buffer:
        routed = buffer.dispatch(x, ids, weights)
        plain = buffer.dispatch(x, ids)
        with pytest.raises(moecomm.Unsupported, match="6000, more than 4096"):
            buffer.combine(plain.x, plain.handle, topk_weights=weights)
        found = buffer.combine(plain.x, plain.handle, topk_weights=weights, wire="rows")
        assert torch.equal(found, buffer.combine(routed.x, routed.handle, wire="rows"))


def test_what_can_not_travel_so() -> None:
    x, ids = torch.randn(4, 64).bfloat16(), torch.rand(4, 8).topk(3).indices
    with pytest.raises(moecomm.BadInput, match="wire: got 'rows'"):
        moecomm.Buffer("self", **SIZES, wire="rows", device="cpu")  # type: ignore[arg-type]
    with moecomm.Buffer("self", **SIZES, device="cpu") as buffer:
        flat = buffer.dispatch(x, ids, layout="flat")
        with pytest.raises(moecomm.Unsupported, match=r"'rows'.*flat rows"):
            buffer.combine(flat.x, flat.handle, wire="rows")
        routed = buffer.dispatch(x, ids)
        with pytest.raises(moecomm.Unsupported, match=r"'rows'.*weight_grads"):
            buffer.combine(routed.x, routed.handle, wire="rows", weight_grads=torch.zeros(len(routed.x)))
    with LocalBuffers(2, domain_ranks=1, **SIZES, backend="host") as ranks:
        here = ranks.dispatch([{"x": x, "topk_idx": ids}] * 2)
        with pytest.raises(moecomm.Unsupported, match=r"'rows'.*several domains"):
            ranks.combine([{"y": one.x, "handle": one.handle, "wire": "rows"} for one in here])


def test_ranks_that_differ_are_told() -> None:
    """Also about a wire of the same dtype."""
    x, ids = torch.randn(4, 64).bfloat16(), torch.rand(4, 8).topk(3).indices
    with LocalBuffers(2, **SIZES, backend="host") as ranks:
        here = ranks.dispatch([{"x": x, "topk_idx": ids}] * 2)
        calls = [
            {"y": one.x, "handle": one.handle, "wire": wire} for one, wire in zip(here, ("rows", None), strict=True)
        ]
        with pytest.raises(moecomm.Mismatch, match=r"wire.*rows"):
            ranks.combine(calls)
