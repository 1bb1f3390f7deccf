"""Verified combines of kernels: rows are hashed where they are stored and where they are added up (row_hash.cuh)."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import moecomm
from moecomm import combine
from moecomm.backends.lsa_kernels import combine_spec
from moecomm.combine import verify
from moecomm.dispatch import row_hash
from moecomm.dispatch.verify import table_of_rows
from moecomm.rounds.sampling import Sampling
from moecomm.testing import LocalBuffers
from moecomm.testing import ranks as local
from moecomm.testing.prepare import prepare_combine

from ..few import few
from .machine import Call, Machine

RANKS, EXPERTS, TOPK, TOKENS, FLIPS, MANY = 3, 7, 3, 20, 12, 1 << 40
SIZES: dict[str, Any] = {"num_experts": EXPERTS, "topk": TOPK, "max_tokens": TOKENS, "dtype": torch.bfloat16}
# Layout, hidden, and options of the combine.  Rows that are cast have complete blocks of scales: nothing reads others.
CASES: dict[str, tuple[str, int, dict[str, Any]]] = {
    "sums and single rows": ("expert", 1032, {"wire": "exact"}),
    "sums in bfloat16": ("batched", 200, {}),
    "sums in fp8": ("expert", 1536, {"wire": "fp8"}),
    "sums in int8": ("batched", 512, {"wire": "int8"}),
    "flat in fp8": ("flat", 512, {"wire": "fp8", "in_place": True}),
    "flat in int8": ("flat", 1536, {"wire": "int8"}),
    "without weights": ("expert", 64, {"wire": "exact", "weighted": False}),
    "weights of the source ranks": ("expert", 64, {"topk_weights": None}),
    "flat": ("flat", 200, {}),
    "unsummed": ("expert", 1032, {"wire": "rows"}),
    "flat, in place": ("flat", 1032, {"in_place": True}),
    "gradients beside": ("flat", 64, {"weight_grads": None}),
    "a rank without tokens": ("flat", 64, {"idle": 1}),
}


def by_words(rows: torch.Tensor, scales: None) -> torch.Tensor:
    """Hash rows as on GPUs."""
    return row_hash._by_words([row_hash._words(rows)])


class Verified:
    """Combines of one case by the machine."""

    def __init__(self, ranks: LocalBuffers, machine: Machine, case: tuple[str, int, dict[str, Any]]) -> None:
        layout, hidden, how = case
        self.ranks, self.machine, self.layout, self.count = ranks, machine, layout, len(ranks.buffers)
        calls = [self._tokens(rank, layout, hidden, rank == how.get("idle")) for rank in range(self.count)]
        routed = ranks.dispatch(calls)
        self.calls = []
        for buffer, call, here in zip(ranks.buffers, calls, routed, strict=True):
            options, y = {name: value for name, value in how.items() if name != "idle"}, here.x.clone()
            if options.pop("in_place", False):
                y = buffer.empty(here.handle, y.dtype)
                y.copy_(here.x)
            if "topk_weights" in options:
                options["topk_weights"] = call["topk_weights"].flip(0).contiguous()
            if "weight_grads" in options:
                options["weight_grads"] = torch.rand(len(y), TOPK)
            self.calls.append({"y": y, "handle": here.handle, **options})

    @staticmethod
    def _tokens(rank: int, layout: str, hidden: int, idle: bool) -> dict[str, Any]:
        g = torch.Generator().manual_seed(rank)
        ids = torch.rand(TOKENS - rank, EXPERTS, generator=g).argsort(dim=1)[:, :TOPK].contiguous()
        ids[0, 1:] = -1
        ids = ids[: 0 if idle else None]
        x = torch.randn(len(ids), hidden, generator=g).bfloat16()
        return {"x": x, "topk_idx": ids, "topk_weights": torch.rand(len(x), TOPK, generator=g), "layout": layout}

    def run(self, flip_in: int = 0) -> tuple[list[Any], list[Any]]:
        """Combine, and verify; return what was prepared, and the results.  `flip_in`: a bit of this bulk load flips."""
        pending, checks = [], []
        for buffer, call in zip(self.ranks.buffers, self.calls, strict=True):
            made = prepare_combine(buffer, **call)
            checks.append(verify.DeviceCheck(buffer.rounds, made, call["handle"], call["y"]))
            pending.append(made)
        assert all(combine_spec(p.args).verifies for p in pending)
        outs = [combine.finish(buffer.rounds, p) for buffer, p in zip(self.ranks.buffers, pending, strict=True)]
        turn = ctypes.c_long.in_dll(self.machine.scheduler, "emulator_flip_in")
        turn.value = flip_in
        self.machine.run([Call(p.args, self.machine.sizes) for p in pending], self.count)
        assert turn.value == 0, "the combine has fewer loads"
        sent: list[Any] = []
        for check in checks:  # a handle of kernels is none of the host executor's, nor are signals between domains
            check._small = check._verdict._small = SimpleNamespace(run=sent.append)
            check._send()
        self.machine.run([Call(args, self.machine.sizes) for args in sent], self.count)
        sent.clear()
        for check in checks:
            check._compare()
            check._verdict.run()
        self.machine.run([Call(args, self.machine.sizes) for args in sent], self.count)
        return pending, outs

    def count_loads(self) -> int:
        """Return the bulk loads of a combine."""
        turn = ctypes.c_long.in_dll(self.machine.scheduler, "emulator_flip_in")
        with pytest.raises(AssertionError, match="fewer loads"):
            self.run(MANY)
        loads, turn.value = MANY - turn.value, 0
        self.ranks.check()
        return loads

    def check_clean(self) -> None:
        """Combine twice, and compare the results with those of rounds that are not verified."""
        outs = [self.run()[1] for _ in range(2)][-1]
        self.ranks.check()
        for rank, (out, want) in enumerate(zip(outs, self.ranks.combine(self.calls), strict=True)):
            pairs = zip(out, want, strict=True) if isinstance(out, tuple) else [(out, want)]
            assert all(torch.equal(*pair) for pair in pairs), rank

    @staticmethod
    def windows(pending: list[Any]) -> list[int]:
        """Return where the windows are, by rank."""
        return [made.args.ctx.peers[rank] for rank, made in enumerate(pending)]

    def is_of_y(self, pending: list[Any], address: int) -> bool:
        """Return whether an address is of a row that is about to be cast, in memory of one rank."""
        return any(
            combine_spec(made.args).casts and made.args.y <= address < made.args.y + call["y"].nbytes
            for made, call in zip(pending, self.calls, strict=True)
        )

    def row_at(self, pending: list[Any], address: int) -> tuple[int, int, int]:
        """Return the rank that stored a row, and the rank of its token and the token, by where it lies."""
        for owner, (made, call) in enumerate(zip(pending, self.calls, strict=True)):
            first, end = made.args.y, made.args.y + len(call["y"]) * made.args.y_stride
            if (self.layout == "flat" or made.args.unsummed) and first <= address < end:  # read where it is
                src, _ = table_of_rows(call["handle"])
                return owner, *map(int, src[(address - first) // made.args.y_stride])
        context = pending[0].args.ctx
        windows = self.windows(pending)
        owner = max(range(self.count), key=lambda rank: (windows[rank] <= address, windows[rank]))
        place = (address - windows[owner] - context.window.staging) // context.shape.staged_row_bytes
        return owner, *divmod(place, context.shape.ring_tokens)


@pytest.fixture
def hashing_machine(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> Iterator[Machine]:
    """The machine in the place of CPU ranks, whose own checks it leaves out."""
    monkeypatch.setattr(local, "_native", SimpleNamespace(host_run_all=machine.run_all))
    monkeypatch.setattr(verify, "hash_rows", by_words)
    monkeypatch.setattr(Sampling, "due", lambda *_: False)
    yield machine
    machine.forget()


@pytest.fixture(params=few(CASES, "sums and single rows", "unsummed", "flat, in place", "a rank without tokens"))
def verified(request: pytest.FixtureRequest, hashing_machine: Machine) -> Iterator[Verified]:
    hidden = CASES[request.param][1]
    with LocalBuffers(RANKS, hidden=hidden, **SIZES, backend="host", verify_every=1) as ranks:
        yield Verified(ranks, hashing_machine, CASES[request.param])


def test_rows_as_they_were_sent_are_no_error(verified: Verified) -> None:
    verified.check_clean()


def test_flipped_bits_are_found_and_named(verified: Verified) -> None:
    flipped = ctypes.c_void_p.in_dll(verified.machine.scheduler, "emulator_flipped")
    loads, own = verified.count_loads(), 0
    for number in range(FLIPS):
        pending, _ = verified.run(1 + loads * number // FLIPS)
        assert flipped.value is not None
        owner, token_rank, token = verified.row_at(pending, flipped.value)
        if owner == token_rank or verified.is_of_y(pending, flipped.value):  # in the memory of one rank
            own += 1
            verified.ranks.check()
            continue
        for buffer in verified.ranks.buffers:
            with pytest.raises(moecomm.CorruptRow) as caught:
                buffer.check()
            found = caught.value
            named = (found.op, found.source, found.destination, found.token_rank, found.token, found.path)
            assert named == ("combine", owner, token_rank, token_rank, token, "shared memory")
    assert own < FLIPS
    verified.run()
    verified.ranks.check()
