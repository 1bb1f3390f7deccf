"""A caller that keeps outputs: random cases, of which each rank keeps others for a while, against the reference."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from moecomm import Routed
from moecomm.base.protocol import LAYOUTS
from moecomm.ranks.settings import Settings
from moecomm.testing import LocalBuffers, random_case
from moecomm.testing.check import Wanted, again_call, dispatch_call


@dataclass
class Kept:
    """The outputs of one dispatch that are still alive, by rank; None: this rank has dropped them."""

    wanted: Wanted
    call: list[dict[str, Any]]
    routed: list[Routed | None]

    def everywhere(self) -> list[Routed]:
        """The outputs of all ranks, or none."""
        found = [here for here in self.routed if here is not None]
        return found if len(found) == len(self.routed) else []

    def check(self) -> None:
        """Raise AssertionError if what is alive has changed."""
        for rank, here in enumerate(self.routed):
            if here is not None:
                self.wanted.check_routed(rank, here)


class Keeper:
    """Makes rounds and keeps up to `most` outputs on each rank.

    Attributes:
        inside, outside: kept rows that lay in the window, and that were copied out of it.
    """

    def __init__(self, ranks: LocalBuffers, seed: int, most: int) -> None:
        self._ranks, self._rng, self._most = ranks, random.Random(seed), most
        self._kept: list[Kept] = []
        self.inside = self.outside = 0

    def run(self, numbers: Iterable[int], **sizes: Any) -> None:
        """Make the rounds of random cases; check each, and what is still alive."""
        for number in numbers:
            self._round(random_case(number, **sizes))
            for kept in self._kept:
                kept.check()

    def _round(self, case: Any) -> None:
        ranks, rng = self._ranks, self._rng
        wanted = Wanted(case, ranks.buffers[0])
        calls = [dispatch_call(case, rank, ranks.device) for rank in range(len(case.x))]
        if case.begin:
            routed = ranks.dispatch_begin(calls)
            self._combine(*rng.choices(self._kept, k=len(self._kept) > 0))  # between the halves
            routed = ranks.dispatch_end(routed)
        else:
            routed = ranks.dispatch(calls)
        self._kept.append(Kept(wanted, calls, list(routed)))
        for here in routed:
            if here.x.numel() > 0:
                in_window = here.handle.rounds.session.context.in_heap(here.x.data_ptr())
                self.inside, self.outside = self.inside + in_window, self.outside + (not in_window)
        del routed
        self._combine(self._kept[-1])
        self._combine(*rng.choices(self._kept, k=1))
        self._repeat(rng.choice(self._kept))
        for rank in range(len(case.x)):
            alive = [kept for kept in self._kept if kept.routed[rank] is not None]
            for kept in rng.sample(alive, max(0, len(alive) - rng.randint(0, self._most))):
                kept.routed[rank] = None
        self._kept = [kept for kept in self._kept if any(here is not None for here in kept.routed)]

    def _combine(self, *of: Kept) -> None:
        for kept in of:
            if routed := kept.everywhere():
                calls = [kept.wanted.combine_call(rank, here) for rank, here in enumerate(routed)]
                for rank, result in enumerate(self._ranks.combine(calls)):
                    kept.wanted.check_combined(rank, result)

    def _repeat(self, kept: Kept) -> None:
        if not kept.wanted.case.again or not (routed := kept.everywhere()):
            return
        again = self._ranks.dispatch([again_call(*both) for both in zip(kept.call, routed, strict=True)])
        for rank, here in enumerate(again):
            kept.wanted.check_again(rank, here)


def window_for(rounds: float, sizes: dict[str, Any], layouts: Sequence[str] = LAYOUTS) -> int:
    """Bytes of a heap for so many rounds of the layout that takes the most, without the slack of a default."""
    settings = Settings(**sizes, backend="host", window_bytes=None)
    return int(rounds * (max(settings.round_bytes(layout) for layout in layouts) - (1 << 16) + 4096))


def draw(tokens: int, hidden: int, experts: int, topk: int, seed: int) -> dict[str, torch.Tensor]:
    """Rows, distinct experts of each, and their weights."""
    g = torch.Generator().manual_seed(seed)
    ids = torch.rand(tokens, experts, generator=g).topk(topk).indices
    x = torch.randn(tokens, hidden, generator=g).bfloat16()
    return {"x": x, "topk_idx": ids, "topk_weights": torch.rand(tokens, topk, generator=g)}
