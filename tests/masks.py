"""Rounds without masked ranks, beside those of Buffers without a mask: ids of -1, and ranks without tokens."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import pytest
import torch

import moecomm
from moecomm.base.experts import experts_of
from moecomm.dispatch.routed import Routed
from moecomm.testing import LocalBuffers

LAYOUTS = ("expert", "batched", "flat")


class Twins:
    """Two jobs of equal Buffers in this process, of which `masked` masks ranks.

    Args:
        settings: of all Buffers, `ranks` among them.
    """

    def __init__(self, settings: dict[str, Any]) -> None:
        self.masked, self.plain = LocalBuffers(**settings), LocalBuffers(**settings)
        self._settings, self.meanings = settings, dict[int, int]()

    def mask(self, ranks: Sequence[int], replicas: dict[int, int] | None = None) -> None:
        self.masked.mask(ranks, replicas=replicas)
        self.meanings = replicas or self.meanings

    def close(self) -> None:
        self.masked.close()
        self.plain.close()

    def rounds(self, number: int, tokens: int, **options: Any) -> None:
        """Compare a dispatch, its repetition, and their combines, by all bits."""
        given = [self._call(rank, number, tokens, **options) for rank in range(self._settings["ranks"])]
        there = [buffer.rank for buffer in self.masked.buffers]
        plain = [self._without_mask(rank, call, rank in there) for rank, call in enumerate(given)]
        before = [buffer.stats().masked for buffer in self.masked.buffers]
        routed = self.masked.dispatch([given[rank] for rank in there])
        wanted = self.plain.dispatch(plain)
        self._compare(routed, [wanted[rank] for rank in there])
        again = self.masked.dispatch(
            [{"x": given[r]["x"] + 1, "handle": at.handle} for r, at in zip(there, routed, strict=True)]
        )
        wanted_again = self.plain.dispatch(
            [{"x": call["x"] + 1, "handle": at.handle} for call, at in zip(plain, wanted, strict=True)]
        )
        for here, want in zip(again, [wanted_again[rank] for rank in there], strict=True):
            assert torch.equal(_rows(here)[0], _rows(want)[0])
        combined = self.masked.combine([{"y": at.x, "handle": at.handle} for at in routed])
        expected = self.plain.combine([{"y": at.x, "handle": at.handle} for at in wanted])
        self.masked.check()
        self.plain.check()
        for rank, here in zip(there, combined, strict=True):
            assert torch.equal(here, expected[rank]), f"sums of rank {rank}"
        for buffer, earlier in zip(self.masked.buffers, before, strict=True):
            assert buffer.stats().masked - earlier == (plain[buffer.rank]["topk_idx"] < 0).sum()

    def rounds_while_masked(self, tokens: int, layout: str, replicas: dict[int, int]) -> None:
        """Compare rounds before a mask, without rank 2, without rank 0 as well, and with all ranks again."""
        self.rounds(0, tokens, layout=layout)
        self.mask([2])
        self.rounds(1, tokens, layout=layout)
        self.mask([0], replicas)
        self.rounds(2, tokens, layout=layout)
        self.masked.unmask([0, 2])
        self.rounds(3, tokens, layout=layout)

    def rounds_after_masks(
        self, steps: Sequence[Sequence[int]], tokens: int, replicas: dict[int, int], **options: Any
    ) -> None:
        """Compare rounds before the first mask, after each further one, and with all ranks again."""
        self.rounds(0, tokens, **options)
        gone: list[int] = []
        for number, step in enumerate(steps):
            self.mask(step, replicas)
            gone += step
            self.rounds(1 + number, tokens, **options)
        self.masked.unmask(gone)
        self.rounds(1 + len(steps), tokens, **options)

    def layers(self, number: int, tokens: int) -> None:
        """Compare a layer by all bits, fused where the ranks have GPUs."""
        given = [self._call(rank, number, tokens) for rank in range(self._settings["ranks"])]
        there = [buffer.rank for buffer in self.masked.buffers]
        hidden, experts = self._settings["hidden"], self._settings["num_experts"]
        for rank, call in enumerate(given):
            mine = len(experts_of(rank, experts, len(given)))
            generator = torch.Generator().manual_seed(rank)
            w13, w2 = (
                (torch.randn(mine, *shape, generator=generator) / 8).to(call["x"])
                for shape in ((256, hidden), (hidden, 128))
            )
            weights = torch.rand(call["topk_idx"].shape, generator=generator).to(call["x"].device)
            call |= {"topk_weights": weights, "w13": w13, "w2": w2, "fused": call["x"].is_cuda}
        plain = [self._without_mask(rank, call, rank in there) for rank, call in enumerate(given)]
        found, wanted = self.masked.moe([given[rank] for rank in there]), self.plain.moe(plain)
        self.masked.check()
        self.plain.check()
        for rank, here in zip(there, found, strict=True):
            assert torch.equal(here, wanted[rank]), f"layer of rank {rank}"

    def _call(self, rank: int, number: int, tokens: int, **options: Any) -> dict[str, Any]:
        sizes = self._settings
        generator = torch.Generator().manual_seed(1000 * number + rank)
        count = max(0, tokens - rank)
        x = torch.randn(count, sizes["hidden"], generator=generator).to(sizes["dtype"])
        ids = torch.rand(count, sizes["num_experts"], generator=generator).argsort(dim=1)[:, : sizes["topk"]]
        device = self.masked.device
        return {"x": x.to(device), "topk_idx": ids.to(device), **options}

    def _without_mask(self, rank: int, call: dict[str, Any], takes_part: bool) -> dict[str, Any]:
        """The call of a rank in a job without a mask."""
        count = len(call["x"]) if takes_part else 0
        ids = call["topk_idx"][:count].cpu()
        gone = set(range(self._settings["ranks"])) - {buffer.rank for buffer in self.masked.buffers}
        lost = {e for r in gone for e in experts_of(r, self._settings["num_experts"], self._settings["ranks"])}
        meant = ids.clone().apply_(lambda one: self.meanings.get(one, -1) if one in lost else one)
        changed = {"x": call["x"][:count], "topk_idx": meant.to(call["topk_idx"].device)}
        if "topk_weights" in call:
            changed["topk_weights"] = call["topk_weights"][:count]
        return {**call, **changed}

    def _compare(self, routed: Sequence[Routed], wanted: Sequence[Routed]) -> None:
        for here, want in zip(routed, wanted, strict=True):
            assert torch.equal(here.tokens_per_expert, want.tokens_per_expert)
            for found, expected in zip(_rows(here), _rows(want), strict=True):
                assert torch.equal(found, expected)


def _rows(routed: Routed) -> tuple[torch.Tensor, torch.Tensor]:
    """The rows in use, and the source rank and token of each."""
    assert routed.src is not None
    rows, src = routed.x.flatten(0, -2), routed.src.view(-1, 2)
    if routed.x.dim() == 3:
        places = torch.arange(routed.x.shape[1], device=rows.device) < routed.tokens_per_expert.view(-1, 1)
    else:
        places = torch.arange(len(rows), device=rows.device) < routed.num_rows
    return rows[places.flatten()], src[places.flatten()]


def refuses_earlier_handles(twins: Twins, ranks: Sequence[int]) -> None:
    """Masks ranks; a handle of before can't be used any more, and the job goes on."""
    calls = [twins._call(buffer.rank, 0, 4) for buffer in twins.masked.buffers]
    routed = twins.masked.dispatch(calls)
    twins.mask(ranks)
    earlier = [{"y": at.x.clone(), "handle": at.handle} for rank, at in enumerate(routed) if rank not in ranks]
    del routed, calls  # their room in the windows

    def combine() -> None:
        twins.masked.combine(earlier)
        twins.masked.check()

    with pytest.raises(moecomm.BadInput, match="handle"):
        combine()
    for buffer in twins.masked.buffers:  # whose errors wait for the next call
        with suppress(moecomm.BadInput):
            buffer.check()
    twins.rounds(1, 5)
