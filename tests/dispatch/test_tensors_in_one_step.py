"""The tensors of a dispatch that are made in one step are those that are made one by one."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

import moecomm
from moecomm.dispatch import outputs
from moecomm.dispatch.reference import quantize
from moecomm.ranks.rendezvous import Alone

TOKENS, HIDDEN, TOPK, EXPERTS = 5, 256, 2, 4
IDX = torch.tensor([[0, 1], [2, -1], [-1, -1], [3, 0], [1, 2]])
WEIGHTS = torch.rand(TOKENS, TOPK)
X = torch.randn(TOKENS, HIDDEN).bfloat16()
F8, SCALES = quantize(X)


@pytest.fixture
def buffer() -> Iterator[moecomm.Buffer]:
    sizes: dict[str, Any] = {"hidden": HIDDEN, "num_experts": EXPERTS, "topk": TOPK, "max_tokens": 8}
    with moecomm.Buffer(Alone(), **sizes, backend="host") as made:
        yield made


def check_same(made: tuple[Any, ...], alone: tuple[Any, ...]) -> None:
    for mine, theirs in zip(made, alone, strict=True):
        if mine is None or theirs is None:
            assert mine is theirs
            continue
        same = ("data_ptr", "size", "stride")
        assert [getattr(mine, name)() for name in same] == [getattr(theirs, name)() for name in same]
        assert (mine.dtype, mine.device) == (theirs.dtype, theirs.device)


@pytest.mark.parametrize("sync", [False, True])
@pytest.mark.parametrize("scales", [None, SCALES, SCALES.to(torch.float8_e8m0fnu), SCALES.view(torch.int32)])
@pytest.mark.parametrize("ids", [IDX, IDX.int()])
def test_flat(buffer: moecomm.Buffer, ids: torch.Tensor, scales: torch.Tensor | None, sync: bool) -> None:
    before = buffer.rounds.memory.used
    x = X if scales is None else F8
    routed = buffer.dispatch(x, ids, WEIGHTS, layout="flat", scales=scales, sync=sync)
    made = routed.plan.flat_tensors(routed)
    assert (made[1] is None) == (scales is None)
    alone = (outputs.x(routed), outputs.scales(routed), outputs.topk_idx(routed), outputs.topk_weights(routed))
    check_same(made, alone)
    arrive = (0, 1, 3, 4)
    assert torch.equal(made[0].float()[: len(arrive)], x[list(arrive)].float())
    assert torch.equal(made[2][: len(arrive)], ids[list(arrive)])
    del routed, alone
    assert buffer.rounds.memory.used > before
    del made
    assert buffer.rounds.memory.used == before


@pytest.mark.parametrize("sync", [False, True])
@pytest.mark.parametrize("scales", [None, SCALES, SCALES.view(torch.int32)])
def test_rows_of_experts(buffer: moecomm.Buffer, scales: torch.Tensor | None, sync: bool) -> None:
    before = buffer.rounds.memory.used
    x = X if scales is None else F8
    routed = buffer.dispatch(x, IDX, WEIGHTS, layout="expert", expert_alignment=4, scales=scales, sync=sync)
    made = routed.plan.expert_tensors(routed)
    same = (outputs.x(routed), outputs.scales(routed), outputs.row_weights(routed))
    check_same(made, same)
    counted = routed.plan.expert_tensors(routed, counted=True)
    check_same(counted, (*same, outputs.rows_per_expert(routed)))
    assert counted[3].tolist() == [4, 4, 4, 4]
    del counted, same
    came = (routed.src[: routed.num_rows, 1] >= 0).nonzero().flatten()
    tokens = routed.src[came, 1]
    assert len(came) == 7 and torch.equal(made[0][came].float(), x[tokens].float())
    assert all(weight in WEIGHTS[token] for token, weight in zip(tokens, made[2][came], strict=True))
    if scales is not None:
        assert torch.equal(made[1][came], scales[tokens])
    del routed
    assert buffer.rounds.memory.used > before
    del made
    assert buffer.rounds.memory.used == before


@pytest.mark.parametrize("begin", [False, True])
@pytest.mark.parametrize("quantized", [None, "fp8"])
def test_batched(buffer: moecomm.Buffer, quantized: str | None, begin: bool) -> None:
    before = buffer.rounds.memory.used
    call = buffer.dispatch_begin if begin else buffer.dispatch
    routed = call(X, IDX, WEIGHTS, layout="batched", quantize=quantized)
    made = routed.plan.batched_tensors(routed)
    if begin:
        buffer.dispatch_end(routed)
    check_same(made, (outputs.x(routed), outputs.tokens_per_expert(routed)))
    rows = X if quantized is None else F8
    assert made[1].tolist() == [2, 2, 2, 1]
    assert torch.equal(made[0][2, :2].float(), rows[[1, 4]].float())
    del routed
    assert buffer.rounds.memory.used > before
    del made
    assert buffer.rounds.memory.used == before


def test_others_are_not_made_so(buffer: moecomm.Buffer) -> None:
    made = {"flat": "flat_tensors", "expert": "expert_tensors", "batched": "batched_tensors"}
    refuse = pytest.raises(ValueError, match=r"as they were given|not batched")
    for options in ({"layout": "expert"}, {"layout": "flat"}, {"layout": "flat", "quantize": "fp8"}):
        routed = buffer.dispatch(X, IDX, WEIGHTS, **options)  # type: ignore[arg-type]
        for layout, name in made.items():
            if layout != options["layout"] or "quantize" in options:
                with refuse:
                    getattr(routed.plan, name)(routed)
    for layout in ("flat", "expert"):
        by_column = buffer.dispatch(F8, IDX, WEIGHTS, layout=layout, scales=SCALES, scale_layout="column")
        with refuse:
            getattr(by_column.plan, made[layout])(by_column)
