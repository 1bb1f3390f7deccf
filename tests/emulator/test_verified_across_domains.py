"""Verified combines of kernels across domains: rows, rows that are put, and sums on their way to another domain."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import moecomm
from moecomm.combine import verify
from moecomm.testing import LocalBuffers

from ..few import few
from .machine import Machine
from .test_verified_combines import TOKENS, Verified
from .test_verified_combines import hashing_machine as hashing_machine

RANKS, SIZE, EXPERTS, TOPK, FLIPS = 4, 2, 7, 3, 40
SIZES: dict[str, Any] = {"num_experts": EXPERTS, "topk": TOPK, "max_tokens": TOKENS, "dtype": torch.bfloat16}
CASES: dict[str, tuple[str, int, dict[str, Any], bool]] = {  # layout, hidden, options of the combine, direct
    "forwarded": ("expert", 1032, {}, False),
    "forwarded, exact": ("batched", 200, {"wire": "exact"}, False),
    "forwarded, flat": ("flat", 1032, {}, False),
    "forwarded, flat, exact": ("flat", 64, {"wire": "exact"}, False),
    "forwarded, in place": ("flat", 200, {"in_place": True}, False),
    "forwarded, gradients beside": ("flat", 64, {"weight_grads": None}, False),
    "forwarded, a rank without tokens": ("expert", 64, {"idle": 1}, False),
    "forwarded, fp8": ("expert", 1536, {"wire": "fp8"}, False),
    "forwarded, flat, int8": ("flat", 512, {"wire": "int8", "in_place": True}, False),
    "direct": ("expert", 200, {}, True),
    "direct, fp8": ("batched", 512, {"wire": "fp8"}, True),
    "direct, in place": ("flat", 64, {"in_place": True}, True),
}


class AcrossDomains(Verified):
    """Combines of one case by the machine.  `direct`: rows go to source ranks of another domain without a forwarder."""

    direct = False

    def named(self, pending: list[Any], address: int) -> tuple[int, int, int, int] | None:
        """Return the source and destination of a row, and its token, by where it lies; None: in memory of one rank."""
        for made, call in zip(pending, self.calls, strict=True):
            if made.args.y <= address < made.args.y + call["y"].nbytes:
                if not verify.reads_in_place(made.args):
                    return None  # about to be added up
                return self._of_row(*self.row_at(pending, address))
        context = pending[0].args.ctx
        window, shape = context.window, context.shape
        windows = self.windows(pending)
        here = max(range(self.count), key=lambda rank: (windows[rank] <= address, windows[rank]))
        at = address - windows[here]
        if at >= window.returned:  # a sum, at the rank of its token
            domain = 1 - here // SIZE
            return domain * SIZE + here % SIZE, here, here, -1
        if at < window.staging:  # put directly, likewise
            owner = (at - window.packets) // shape.packet_bytes % RANKS
            return owner, here, here, -1
        return self._of_row(*self.row_at(pending, address))

    def _of_row(self, owner: int, token_rank: int, token: int) -> tuple[int, int, int, int] | None:
        crosses = owner // SIZE != token_rank // SIZE
        if not crosses:
            return None if owner == token_rank else (owner, token_rank, token_rank, token)
        return owner, token_rank if self.direct else owner // SIZE * SIZE + token_rank % SIZE, token_rank, token


@pytest.fixture(params=few(CASES, "forwarded", "forwarded, in place", "direct"))
def verified(request: pytest.FixtureRequest, hashing_machine: Machine) -> Iterator[Verified]:
    *case, direct = CASES[request.param]
    if not direct:
        request.getfixturevalue("forwarded")
    sizes = {**SIZES, "hidden": case[1], "domain_ranks": SIZE, "backend": "host", "verify_every": 1}
    with LocalBuffers(RANKS, **sizes) as ranks:
        made = AcrossDomains(ranks, hashing_machine, (case[0], case[1], case[2]))
        made.direct = direct
        yield made


def test_rows_as_they_were_sent_are_no_error(verified: AcrossDomains) -> None:
    verified.check_clean()


def test_flipped_bits_are_found_and_named(verified: AcrossDomains) -> None:
    flipped = ctypes.c_void_p.in_dll(verified.machine.scheduler, "emulator_flipped")
    loads, seen = verified.count_loads(), set()
    for number in range(FLIPS):
        pending, _ = verified.run(1 + loads * number // FLIPS)
        assert flipped.value is not None
        wanted = verified.named(pending, flipped.value)
        if wanted is None:
            verified.ranks.check()
            continue
        source, destination, token_rank, token = wanted
        crosses = source // SIZE != destination // SIZE
        seen.add(crosses)
        for buffer in verified.ranks.buffers:
            with pytest.raises(moecomm.CorruptRow) as caught:
                buffer.check()
            found = caught.value
            assert (found.op, found.source, found.destination) == ("combine", source, destination)
            assert found.token_rank == token_rank and token in (-1, found.token)
            assert found.path == ("shared memory", "link between domains")[crosses]
    assert seen, "no row of another rank was flipped"
    verified.run()
    verified.ranks.check()
