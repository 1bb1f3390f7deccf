"""Dispatches of short rows or none, which verify other rounds, or at which ranks meet."""

from __future__ import annotations

from collections.abc import Callable

import torch

from moecomm import _native
from moecomm.base.arrays import window_tensor
from moecomm.base.choices import Layout
from moecomm.base.protocol import LAYOUTS, TYPES
from moecomm.dispatch.routed import Handle
from moecomm.rounds import signature
from moecomm.rounds.rounds import Part, Rounds

_WORDS = 2  # int64 of a row, unless more are asked for; they travel as float32, of which only the bits count


class SmallDispatch:
    """Dispatches of one layout: by a handle, or of one token to all ranks.

    Args:
        layout: "flat" without `repeat`.
        repeat: by a handle.
        words: int64 of a row; even.
        grows: a round without rows of growth.py; False: one that verifies another round.
    """

    def __init__(self, rounds: Rounds, layout: Layout, repeat: bool, words: int, grows: bool) -> None:
        self._session, self._memory, self._flight = rounds.session, rounds.memory, rounds.flight
        self._device, self._words, self._topk = rounds.device, words, rounds.topk
        args = _native.DispatchArgs()
        args.ctx = rounds.session.context
        args.hidden, args.in_type, args.row_bytes = 2 * words, TYPES[torch.float32], 8 * words
        args.layout, args.alignment, args.repeat = LAYOUTS.index(layout), 1, int(repeat)
        args.idx_bytes = 0 if repeat else 8
        args.call = signature.pack(
            call=signature.DISPATCHES.index(signature.GROWTH if grows else "verification"),
            layout=args.layout,
            dtype=args.in_type,
            topk_idx_dtype=int(not repeat),
            handle_given=args.repeat,
        )
        x = torch.empty(1, 2 * words, device=rounds.device)
        ids = None if repeat else torch.empty(1, rounds.topk, dtype=torch.int64, device=rounds.device)
        self._native = _native.DispatchPlan(args, False, x, None, ids, None)
        self._layout, self._room = layout, rounds.num_ranks
        self._runs: dict[int, Callable[[_native.DispatchArgs], None]] = {}
        self._recorded = self._flight.kind("dispatch" if grows else "verify", args.call, torch.float32, 8 * words)

    def by_handle(self, handle: Handle, rows: torch.Tensor) -> tuple[_native.DispatchArgs, torch.Tensor]:
        """Make room for int64 `[T, words]` to travel as rows of a dispatch; return where: `[rows, words]`."""
        payload = self._memory.scratch(self._native.payload_bytes(handle.args.max_rows))
        self._schedule(len(rows))
        args = self._native.repeat(payload, handle.args, rows.view(torch.float32), None)
        assert args is not None, "as many tokens as the handle has"
        self._load(args)
        address = handle.plan.base + args.out_x
        shape = (handle.args.max_rows, self._words)
        return args, window_tensor(payload, address, shape, torch.int64, self._device, self._session.owner)

    def of_one_token(self, ids: torch.Tensor) -> tuple[_native.DispatchArgs, object]:
        """Prepare a dispatch of one token with these ids, int64 `[1, K]`.

        Returns:
            Its arguments, and the owner of its memory until it has been launched.
        """
        return self._of(torch.zeros(1, 2 * self._words, device=self._device), ids)

    def of_no_token(self) -> tuple[_native.DispatchArgs, object]:
        """Prepare a dispatch without tokens, as of_one_token()."""
        ids = torch.empty(0, self._topk, dtype=torch.int64, device=self._device)
        return self._of(torch.empty(0, 2 * self._words, device=self._device), ids)

    def _of(self, x: torch.Tensor, ids: torch.Tensor) -> tuple[_native.DispatchArgs, object]:
        sizes = (self._native.kept_bytes(self._room), self._native.payload_bytes(self._room))
        kept, payload = map(self._memory.scratch, sizes)
        self._schedule(len(x))
        args = self._native.bind(payload, kept, self._room, x, None, ids, None)
        assert args is not None, "the tensors that the plan was made for"
        self._load(args)
        return args, (kept, payload, x, ids)

    def run(self, args: _native.DispatchArgs) -> None:
        """Run it on the executor."""
        record = self._flight.begin(self._recorded, args.num_tokens)
        self._runs[args.num_tokens](args)
        self._flight.end(record)

    def _schedule(self, tokens: int) -> None:
        schedule = self._session.schedule("dispatch", num_tokens=tokens, layout=self._layout, num_sms=None)
        self._native.schedule(tokens, schedule.workers, schedule.chunk_tokens)

    def _load(self, args: _native.DispatchArgs) -> None:
        if args.num_tokens not in self._runs:
            self._runs[args.num_tokens] = self._session.dispatcher(args)


class _Kinds(Part):
    """The small dispatches of a Buffer."""

    def __init__(self) -> None:
        self.by_kind: dict[tuple[Layout, bool, int, bool], SmallDispatch] = {}


def small_dispatch(
    rounds: Rounds, layout: Layout, repeat: bool, words: int = _WORDS, grows: bool = False
) -> SmallDispatch:
    """Return the dispatches of this kind of a Buffer."""
    found = rounds.part(_Kinds) or rounds.add(_Kinds())
    key = layout, repeat, words, grows
    if key not in found.by_kind:
        found.by_kind[key] = SmallDispatch(rounds, *key)
    return found.by_kind[key]
