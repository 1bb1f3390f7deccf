"""Verified dispatches.

The source rank hashes each row as it travels.  The hashes follow in a dispatch of their own, by the same handle, as
rows of 16 bytes.  The destination hashes the rows that arrived, and compares.  A last dispatch, of one token, tells all
ranks what was found: see moecomm/rounds/corruption.py.  Nothing waits for a GPU, and a graph can capture it all.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from moecomm import _native
from moecomm.base.arrays import as_tensor
from moecomm.dispatch import outputs, reference
from moecomm.dispatch.arguments import is_cast_to_bytes
from moecomm.dispatch.options import Options
from moecomm.dispatch.payloads import as_they_travel
from moecomm.dispatch.routed import Handle, Routed
from moecomm.dispatch.row_hash import hash_rows
from moecomm.dispatch.small import small_dispatch
from moecomm.dispatch.tables import table
from moecomm.rounds import corruption
from moecomm.rounds.rounds import Rounds


def checked(rounds: Rounds, routed: Routed, options: Options, x: Any, scales: Any) -> DispatchCheck | None:
    """Return the check of a prepared dispatch that is verified; None for others."""
    assert rounds.sampling is not None, "rounds are verified"
    if not rounds.sampling.due("dispatch", rounds.session.capturing()):
        return None
    try:
        return DispatchCheck(rounds, routed, options, as_tensor("x", x)[0], scales)
    except BaseException:
        rounds.sampling.forget("dispatch")
        raise


def failed(rounds: Rounds) -> bool:
    """Return whether a round of CPU ranks has left a failure behind, so that there is nothing to compare."""
    return rounds.on_cpu and _native.record(rounds.session.context.record) is not None


class Verdict:
    """The round that tells all ranks which row was not as sent, if one was.  Prepared before the round it is about."""

    def __init__(self, rounds: Rounds, op: str) -> None:
        self._rounds, self._op = rounds, op
        self._round = rounds.flight.rounds + 1
        self._ids = torch.full((1, rounds.topk), -1, dtype=torch.int64, device=rounds.device)
        self._small = small_dispatch(rounds, "flat", False)
        self._args, self._memory = self._small.of_one_token(self._ids)
        rounds.unfinished.append(self._memory)

    def say(self, is_bad: torch.Tensor, row: torch.Tensor) -> None:
        """Name a row if `is_bad`; `row`: int64, corruption.row_bits().  Does not wait for the device."""
        fixed = corruption.fixed_bits(self._op, self._rounds.flight.rounds + 1 - self._round)
        self._ids[0, 0] = torch.where(is_bad, row.view(()) | fixed, -1)

    def run(self) -> None:
        """Run the round."""
        if not failed(self._rounds):
            self._small.run(self._args)


class DispatchCheck:
    """The check of one dispatch."""

    def __init__(
        self, rounds: Rounds, routed: Routed, options: Options, x: torch.Tensor, scales: torch.Tensor | None
    ) -> None:
        self._rounds, self._routed = rounds, routed
        self._small = small_dispatch(rounds, routed.handle.layout, True)
        sent = torch.empty(len(x), 2, dtype=torch.int64, device=rounds.device)
        sent[:, 0] = hash_rows(*_as_they_travel(options, x.detach(), scales))
        sent[:, 1] = torch.arange(len(x), device=rounds.device) + rounds.rank * rounds.max_tokens
        self._sent = sent
        self._args, self._arrived = self._small.by_handle(routed.handle, sent)
        rounds.unfinished.append(self._arrived)
        self._verdict = Verdict(rounds, "dispatch")

    def stages(self) -> tuple[Callable[[], None], ...]:
        """Return the steps that verify the dispatch, in order.

        Ranks that one thread drives run each stage on all of them: then no kernel waits for one that is not launched.
        """
        return self._send, self._compare, self._verdict.run

    def _send(self) -> None:
        if not failed(self._rounds):
            self._small.run(self._args)

    def _compare(self) -> None:
        if failed(self._rounds) or len(self._arrived) == 0:
            return
        rounds, routed = self._rounds, self._routed
        outputs.fill(routed)  # its tables may have a place outside of the window since it began
        src, in_use = table_of_rows(routed.handle)
        rows, scales = outputs.x(routed).flatten(0, -2), outputs.scales(routed)
        scales = None if scales is None else scales.flatten(0, -2)
        arrived, places = self._arrived, None
        if rounds.on_cpu:  # most of the room may be empty
            places = in_use.nonzero().flatten()
            src, arrived, in_use = src[places], arrived[places], in_use[places]
            if len(places) == 0:
                return
        tokens = src[:, 0].long() * rounds.max_tokens + src[:, 1]
        bad = in_use & ((hash_rows(rows, scales, places) != arrived[:, 0]) | (tokens != arrived[:, 1]))
        first = bad.int().argmax().view(1)
        source = src[first, 0].long().clamp(0, rounds.num_ranks - 1)
        token = tokens[first].clamp(0, rounds.num_ranks * rounds.max_tokens - 1)
        self._verdict.say(bad.any(), corruption.row_bits(source, token))


def _as_they_travel(options: Options, x: torch.Tensor, scales: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return the rows and scales of this rank as the executor sends them."""
    if is_cast_to_bytes(options, x):
        return as_they_travel(options, x, scales)
    if options.quantize is None or x.dtype is torch.uint8:  # cast before
        return x, None if scales is None else as_tensor("scales", scales)[0]
    rows, made = reference.quantize(x, options.scale_format)
    return rows, reference.by_column(made) if options.scale_layout == "column" else made


def table_of_rows(handle: Handle) -> tuple[torch.Tensor, torch.Tensor]:
    """Return source rank and token of each row, int32 `[rows, 2]`, and which rows are in use."""
    args = handle.args
    shape = handle.plan.rows_shape(args)
    src = table(handle, args.route.src, (*shape, 2), torch.int32).flatten(0, -2)
    rows = torch.arange(shape[-1], device=src.device)
    if handle.layout == "batched":
        counts = table(handle, args.tokens_per_expert, (handle.plan.local_experts,), torch.int32)
        return src, (rows < counts[:, None]).flatten()
    return src, (rows < table(handle, args.num_rows, (1,), torch.int32)) & (src[:, 0] >= 0)
