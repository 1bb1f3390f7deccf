"""Rounds whose rows and extras take more than a window's reserve, against what each token carries."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import torch

import moecomm
from moecomm.base.experts import experts_of

Kind = tuple[str, tuple[int, ...]]  # layout, and columns of each extra
DTYPES = (torch.int64, torch.int32, torch.uint8, torch.float32)
MOST = 48  # tokens of a rank


class Sent:
    """The tensors that all ranks send in one round; every rank makes all of them."""

    def __init__(self, buffer: moecomm.Buffer, seed: int, widths: tuple[int, ...], most: int = MOST) -> None:
        self._ranks, self._topk = buffer.num_ranks, buffer.topk
        self.x, self.ids, self.extras = [], [], []
        for rank in range(self._ranks):
            g = torch.Generator().manual_seed(1000 * seed + rank)
            tokens = int(torch.randint(0, most + 1, (1,), generator=g))
            self.x.append(torch.randn(tokens, buffer.hidden, generator=g).bfloat16())
            scores = torch.rand(tokens, buffer.num_experts, generator=g)
            self.ids.append(scores.argsort(dim=1)[:, : self._topk].contiguous())
            self.extras.append(
                tuple(
                    torch.randint(0, 100, (tokens, width), generator=g).to(DTYPES[(width + at) % len(DTYPES)])
                    for at, width in enumerate(widths)
                )
            )

    def given(self, rank: int, device: torch.device) -> dict[str, Any]:
        """Return the tensors of a rank's dispatch."""
        return {
            "x": self.x[rank].to(device),
            "topk_idx": self.ids[rank].to(device),
            "extras": tuple(extra.to(device) for extra in self.extras[rank]),
        }

    def again(self, seed: int, widths: tuple[int, ...]) -> Sent:
        """Return other rows and extras of the same tokens."""
        made = Sent.__new__(Sent)
        made._ranks, made._topk, made.ids = self._ranks, self._topk, self.ids
        made.x, made.extras = [-rows for rows in self.x], []
        for rank, ids in enumerate(self.ids):
            g = torch.Generator().manual_seed(1000 * seed + rank)
            made.extras.append(tuple(torch.randint(0, 1000, (len(ids), width), generator=g).int() for width in widths))
        return made

    def check(self, routed: Any) -> None:
        """Raise AssertionError unless each row is that of its token, and has come from where it says."""
        src, x, extras = routed.src, routed.x, routed.extras
        if x.ndim == 3:
            used = torch.arange(x.shape[1], device=x.device) < routed.tokens_per_expert[:, None]
            src, x, extras = src[used], x[used], [extra[used] for extra in extras]
        count = int(routed.tokens_per_expert.sum()) if routed.handle.layout != "flat" else int(routed.num_rows)
        valid = (src[:, 0] >= 0) & (torch.arange(len(src), device=src.device) < (len(src) if x.ndim == 3 else count))
        src = src[valid].cpu().long()
        assert len(src) == count, (len(src), count)
        starts = torch.tensor([0, *(len(rows) for rows in self.x)]).cumsum(0)
        token = starts[src[:, 0]] + src[:, 1]
        assert torch.equal(x[valid].cpu(), torch.cat(self.x)[token])
        for at, extra in enumerate(extras):
            assert torch.equal(extra[valid].cpu(), torch.cat([own[at] for own in self.extras])[token])

    def check_sums(self, buffer: moecomm.Buffer, routed: Any) -> None:
        """Combine the rows as they came; each token comes back as often as it was sent."""
        rank = buffer.rank
        out = buffer.combine(routed.x, routed.handle, weighted=False, wire="exact")
        ranges = torch.tensor([experts_of(one, buffer.num_experts, self._ranks).stop for one in range(self._ranks)])
        owners = torch.searchsorted(ranges, self.ids[rank], right=True).sort(dim=1).values
        owners_met = (owners.diff(dim=1) != 0).sum(dim=1, keepdim=True) + 1
        times = owners_met if routed.handle.layout == "flat" else self._topk
        assert torch.equal(out.cpu(), (self.x[rank].float() * times).bfloat16())


def random_rounds(buffer: moecomm.Buffer, seed: int, steps: int, kinds: Sequence[Kind] = ()) -> list[int]:
    """Make rounds of random widths and layouts, and keep their outputs, each rank others; return rounds before each.

    All that is alive is checked at each step.  `kinds`: of all rounds; else each draws its own.
    """
    drawn, own = random.Random(seed), random.Random(100 * seed + buffer.rank)
    kept: list[tuple[Sent, Any]] = []
    handles: list[tuple[Sent, Any]] = []
    counted = []
    for step in range(steps):
        widths = tuple(drawn.choice([1, 3, 40, 300]) for _ in range(drawn.choice([0, 1, 1, 2])))
        layout, sync = drawn.choice(["flat", "expert", "batched"]), drawn.random() < 0.5
        if kinds:
            layout, widths = drawn.choice(kinds)
        counted.append(buffer.rounds.flight.rounds)
        if handles and drawn.random() < 0.3:
            before, handle = drawn.choice(handles)
            if kinds:
                widths = next(widths for layout, widths in kinds if layout == handle.layout)
            sent = before.again(seed + step, widths)
            given = sent.given(buffer.rank, buffer.device)
            routed = buffer.dispatch(given["x"], handle=handle, extras=given["extras"], sync=sync)
        else:
            sent = Sent(buffer, 100 * seed + step, widths)
            how: dict[str, Any] = {"layout": layout, "sync": sync}
            if drawn.random() < 0.3:
                rows = buffer.num_ranks * buffer.max_tokens
                how["max_rows"] = rows * buffer.topk if layout == "expert" else rows
            routed = buffer.dispatch(**sent.given(buffer.rank, buffer.device), **how)
            handles.append((sent, routed.handle))
            handles = handles[-3:]
        buffer.check()
        sent.check(routed)
        if drawn.random() < 0.5 and (buffer.placement is None or routed.handle.layout != "flat"):  # ranks of a token
            sent.check_sums(buffer, routed)
        kept.append((sent, routed))
        for one, here in kept:
            one.check(here)
        kept = own.sample(kept, own.randrange(min(len(kept), 6) + 1))
        del routed
    return counted
