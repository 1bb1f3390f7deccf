"""Kernels that choose experts to copy, and copy them, against the specification and CPU ranks."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

from moecomm import combine
from moecomm.backends.lsa_kernels import choice_of
from moecomm.base.placement import NONE, Placement, replicated
from moecomm.dispatch import Request, prepare
from moecomm.errors import BadInput, Mismatch
from moecomm.gpu import plain_kernel
from moecomm.testing import LocalBuffers
from moecomm.testing import ranks as local
from moecomm.testing.cases import random_placement
from moecomm.weights.copies import Copies

from ..few import few
from ..placed_rounds import check_random
from ..slot_weights import drawn_weights, opened_weights
from .machine import Call, Machine
from .test_plain_kernels import launcher

HIDDEN, INNER, TOKENS, TOPK = 64, 21, 40, 2
SIZES: dict[str, Any] = {"hidden": HIDDEN, "topk": TOPK, "max_tokens": TOKENS, "backend": "host", "timeout_s": 20}
# Ranks, experts, slots of a rank: experts that have no copy and several; more experts, or ranks, than lanes.
SHAPES = ((4, 10, 5), (5, 40, 12), (2, 3, 4), (3, 12, 9), (34, 40, 2))


def routing(seed: int, ranks: int, experts: int) -> list[torch.Tensor]:
    g = torch.Generator().manual_seed(seed)
    load = torch.rand(experts, generator=g) ** (1, 4, 12)[seed % 3] + 1e-6
    ids = [torch.multinomial(load.expand(TOKENS, -1), TOPK, generator=g) for _ in range(ranks)]
    return [
        torch.where(torch.rand(one.shape, generator=g) < 0.05, -1, one)[: 7 if seed % 4 == 3 else None] for one in ids
    ]


def counted(ids: list[torch.Tensor], experts: int) -> torch.Tensor:
    return torch.stack([torch.bincount(one[one >= 0], minlength=experts) for one in ids])


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("seeds", few((range(6), range(6, 60)), range(6)), ids=lambda seeds: f"{seeds.start}")
def test_choices_are_those_of_the_specification(seeds: range, shape: tuple[int, int, int], machine: Machine) -> None:
    check_choices(seeds, shape, machine)


def check_choices(seeds: range, shape: tuple[int, int, int], machine: Machine) -> None:
    """Compare the slots that are copies, and the rows that go to each slot, with the specification."""
    ranks, experts, slots = shape
    drawn: dict[str, Any] = {"ranks": ranks, "num_experts": experts, "slots": slots, "balanced": True}
    made = 0
    with (
        mock.patch.object(local, "_native", SimpleNamespace(host_run_all=machine.run_all)),
        LocalBuffers(ranks, **SIZES, num_experts=experts, placement=random_placement(seeds.start, **drawn)) as buffers,
    ):
        try:
            for seed in seeds:
                buffers.set_placement(placement := random_placement(seed, **drawn))
                ids = routing(seed, ranks, experts)
                counts = counted(ids, experts)
                after = replicated(placement, counts)
                routed = buffers.dispatch(
                    [
                        {
                            "x": torch.zeros(len(ids[rank]), HIDDEN).bfloat16(),
                            "topk_idx": ids[rank],
                            "copies": Copies(buffer.rounds, [], ()).run,
                        }
                        for rank, buffer in enumerate(buffers.buffers)
                    ]
                )
                chosen = torch.cat([after.slots_of(one, rank, counts=counts).flatten() for rank, one in enumerate(ids)])
                want = torch.bincount(chosen[chosen >= 0], minlength=ranks * slots).view(ranks, slots)
                copied = after.experts != placement.experts
                for rank, (buffer, here) in enumerate(zip(buffers.buffers, routed, strict=True)):
                    assert torch.equal(here.tokens_per_expert.long(), want[rank])
                    sources = Copies(buffer.rounds, [], ()).sources()
                    assert torch.equal(sources != NONE, copied), seed
                    of = placement.experts.flatten()[sources.clamp(min=0)]
                    assert torch.equal(of[copied], after.experts[copied])
                made += int(copied.sum())
                del routed, here
        finally:
            machine.forget()
    assert made > 0


def test_layers_have_the_bits_of_cpu_ranks(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel fills slots of even and uneven sizes, and no others."""
    ranks, experts, slots = 4, 10, 5
    launched: list[str] = []
    monkeypatch.setattr(plain_kernel, "launch_on", launcher(machine.scheduler, machine.library, launched))
    placement = random_placement(0, ranks=ranks, num_experts=experts, slots=slots, balanced=True)
    g = torch.Generator().manual_seed(0)
    whole = drawn_weights(g, experts, INNER, HIDDEN)
    sizes: dict[str, Any] = {**SIZES, "num_experts": experts, "placement": placement}
    with LocalBuffers(ranks, **sizes) as plain, LocalBuffers(ranks, **sizes) as emulated:
        sets, copied = (opened_weights(plain, whole), opened_weights(emulated, whole)), 0
        for seed in range(6):
            ids, outs = routing(seed, ranks, experts), []
            x = [torch.randn(len(one), HIDDEN, generator=g).bfloat16() for one in ids]
            for buffers, weights, by_kernel in ((plain, sets[0], False), (emulated, sets[1], True)):
                calls = [
                    {"x": x[rank], "topk_idx": ids[rank], "topk_weights": None, "balance": "replicate"}
                    | {name: weights[rank][name] for name in whole}
                    for rank in range(ranks)
                ]
                with monkeypatch.context() as patch:
                    if by_kernel:
                        patch.setattr(local, "_native", SimpleNamespace(host_run_all=machine.run_all))
                        patch.setattr(Copies, "run", Copies.run_kernel)
                    try:
                        outs.append(buffers.moe(calls))
                    finally:
                        machine.forget()
            assert all(torch.equal(*pair) for pair in zip(*outs, strict=True)), seed
            for name in whole:
                for one, other in zip(*sets, strict=True):
                    assert torch.equal(one[name].view(torch.int16), other[name].view(torch.int16)), (seed, name)
            after = replicated(placement, counted(ids, experts))
            copied += int((after.experts != placement.experts).sum())
        for one in (*sets[0], *sets[1]):
            one.close()
    assert copied > 0 and launched.count("copy_experts") == 6 * ranks


def test_masked_ranks_get_no_copies(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local, "_native", SimpleNamespace(host_run_all=machine.run_all))
    held, experts = [[0, 1, 2], [3, 4], [5, 6], [7, 8]], 9
    placement = Placement(held, slots=5, choice="balanced")
    with LocalBuffers(4, **SIZES, num_experts=experts, placement=placement) as buffers:
        try:
            buffers.mask([1])
            ids = torch.zeros(TOKENS, TOPK, dtype=torch.int64)
            ids[:, 1] = 1
            x = torch.zeros(TOKENS, HIDDEN).bfloat16()
            buffers.dispatch(
                [{"x": x, "topk_idx": ids, "copies": Copies(buffer.rounds, [], ()).run} for buffer in buffers.buffers]
            )
            counts = counted([ids, ids[:0], ids, ids], experts)
            want = replicated(placement, counts, masked=[1]).experts != placement.experts
            for buffer in buffers.buffers:
                assert torch.equal(Copies(buffer.rounds, [], ()).sources() != NONE, want)
            assert not want[1].any() and want.any()
        finally:
            machine.forget()


@pytest.mark.parametrize("seed", few(range(12), 0, 3))
def test_slots_after_losses_moves_and_masks(seed: int, machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tables, balanced choices and copies where slots and experts are different numbers, as on CPU ranks."""
    monkeypatch.setattr(local, "_native", SimpleNamespace(host_run_all=machine.run_all))
    try:
        check_random(seed, rounds=4)
    finally:
        machine.forget()


def test_a_choice_that_does_not_end_is_not_judged(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    """After a bad id of all ranks, a peer that combines makes a Mismatch of the dispatch, and no good id is bad."""
    monkeypatch.setattr(local, "_native", SimpleNamespace(host_run_all=machine.run_all))
    placement = Placement([[0, 1, 3], [2, 3, 0]], choice="balanced")
    ids = torch.tensor([[0, 1], [2, 3], [1, 3], [2, 0]])
    bad = ids.clone()
    bad[:, 0] = -2
    x = torch.zeros(4, HIDDEN).bfloat16()
    good = {"x": x, "topk_idx": ids}
    with LocalBuffers(2, **SIZES, num_experts=4, placement=placement) as buffers:
        try:
            first = buffers.dispatch([good, good])
            with pytest.raises(BadInput, match="-2"):
                buffers.dispatch([{"x": x, "topk_idx": bad}, good])
            with pytest.raises(BadInput, match="-2"):
                buffers.buffers[1].check()
            here, there = (buffer.rounds for buffer in buffers.buffers)
            for rounds in (here, there):
                rounds.admit()
            dispatching = prepare(here, Request(), **good)
            combining = combine.prepare(there, combine.Request(), first[1].x, first[1].handle)
            asked = dispatching.args
            calls = [Call(asked, machine.sizes, choice_of(asked)), Call(combining.args, machine.sizes)]
            machine.run([*calls, Call(asked, machine.sizes)], 2)
            for rounds in (here, there):
                with pytest.raises(Mismatch):
                    rounds.raise_failure()
        finally:
            machine.forget()
