"""python -m tests.flips FLIPS [--clean ROUNDS] [--first SEED] [--json FILE]: flipped bits in rows that CPU ranks move.

A case opens Buffers of 2 to 6 ranks that verify every round, of random sizes, domains, dtypes and layouts.  In a random
round, a random bit of a random row flips after it was sent and before it is read: of a dispatch where it has arrived in
the window of its destination, of a combine where it has been stored for the rank that adds it up.  Every rank must
raise CorruptRow, with the round, the operation, both ranks and the token of the flipped row, and go on.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import random
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch

import moecomm
from moecomm import dispatch
from moecomm.dispatch import outputs, verify
from moecomm_bench import results

FLIPS = 12  # in the rounds of one case
# Outputs that are not verified, as docs/observing.md says.
COUNTS, ROUTING = ("tokens_per_expert", "rows_per_expert", "num_rows"), ("row_weights", "topk_idx", "topk_weights")


class Row(NamedTuple):
    """A row that was flipped, as CorruptRow names it."""

    op: str
    source: int
    destination: int
    token_rank: int
    token: int


class Case(NamedTuple):
    """Settings of the Buffers, and of the calls."""

    ranks: int
    settings: dict[str, Any]
    dispatch: dict[str, Any]
    combine: dict[str, Any]
    scales: torch.dtype | None
    split: bool
    in_place: bool
    weight_grads: bool

    @staticmethod
    def of(draw: random.Random) -> Case:
        ranks = draw.randint(2, 6)
        experts = draw.randint(ranks, 3 * ranks)
        dtype = draw.choice([torch.bfloat16, torch.float16, torch.float32])
        settings = {
            "hidden": draw.choice([16, 64, 144, 272]),
            "num_experts": experts,
            "topk": draw.randint(1, min(4, experts)),
            "max_tokens": draw.choice([1, 8, 24, 40]),
            "dtype": dtype,
            "domain_ranks": draw.choice([n for n in range(1, ranks + 1) if ranks % n == 0]),
        }
        quantize = draw.choice([None, None, "fp8"])
        scales = None if quantize or draw.random() < 0.7 else draw.choice([torch.float32, torch.uint8, torch.int16])
        columns = quantize or scales is torch.float32
        calls = {
            "layout": draw.choice(["flat", "expert", "batched"]),
            "quantize": quantize,
            "scale_format": draw.choice(["fp32", "ue8m0"]) if quantize else "fp32",
            "scale_layout": draw.choice(["row", "column"]) if columns else "row",
        }
        grads = draw.random() < 0.2
        wire = draw.choice([None, "exact"])
        split, in_place = draw.random() < 0.2, not grads and draw.random() < 0.3
        return Case(ranks, settings, calls, {"wire": wire}, scales, split, in_place, grads)


class Cluster:
    """The Buffers of a case, one a thread."""

    def __init__(self, case: Case, draw: random.Random, verify_every: int = 1) -> None:
        self.case, self.draw = case, draw
        self.pool = ThreadPoolExecutor(case.ranks)
        how = {**case.settings, "verify_every": verify_every, "backend": "host", "timeout_s": 20}
        groups = moecomm.local_ranks(case.ranks)
        self.buffers = list(self.pool.map(lambda group: moecomm.Buffer(group, **how), groups))

    def close(self) -> None:
        for buffer in self.buffers:
            buffer.close()
        self.pool.shutdown()

    def on_all(self, call: Callable[[moecomm.Buffer], Any]) -> list[Any]:
        """Call on every rank; an error of moecomm is a result."""

        def one(buffer: moecomm.Buffer) -> Any:
            try:
                return call(buffer)
            except moecomm.MoecommError as error:
                return error

        return list(self.pool.map(one, self.buffers))

    def dispatch(self, seed: int) -> list[Any]:
        return self.on_all(lambda buffer: self._dispatch(buffer, seed))

    def _dispatch(self, buffer: moecomm.Buffer, seed: int) -> Any:
        case, settings = self.case, self.case.settings
        generator = torch.Generator().manual_seed(64 * seed + buffer.rank)
        tokens = int(torch.randint(0, settings["max_tokens"] + 1, (1,), generator=generator))
        x = torch.randn(tokens, settings["hidden"], generator=generator).to(settings["dtype"])
        ids = torch.rand(tokens, settings["num_experts"], generator=generator).argsort(dim=1)[:, : settings["topk"]]
        ids[torch.rand(ids.shape, generator=generator) < 0.2] = -1
        scales = None
        if case.scales is not None:
            scales = torch.randint(0, 100, (tokens, 3), generator=generator).to(case.scales)
        if case.split:
            routed = buffer.dispatch_begin(x, ids, scales=scales, **case.dispatch)
            x.zero_()  # it has been sent
            return buffer.dispatch_end(routed)
        return buffer.dispatch(x, ids, scales=scales, **case.dispatch)

    def combine(self, routed: list[Any]) -> list[Any]:
        return self.on_all(lambda buffer: self._combine(buffer, routed[buffer.rank]))

    def _combine(self, buffer: moecomm.Buffer, routed: Any) -> Any:
        y = routed.x.float().to(buffer.dtype)
        given = dict(self.case.combine)
        if self.case.in_place:
            y = buffer.empty(routed.handle).copy_(y)
        if self.case.weight_grads:
            flat = routed.handle.layout == "flat"
            given["weight_grads"] = torch.ones((*y.shape[:-1], buffer.topk) if flat else y.shape[:-1])
        return buffer.combine(y, routed.handle, **given)

    def flip_in_dispatch(self, seed: int) -> Row | None:
        """Flip a bit of a row that has arrived, and check what the ranks raise; None: no row has."""
        destination = self.draw.randrange(self.case.ranks)
        made: list[Row] = []
        before = self._rounds()
        with flipping(destination, self.draw, made):
            found = self.dispatch(seed)
        self._check(found, made, before)
        return made[0] if made else None

    def flip_anywhere(self, seed: int) -> set[str]:
        """Flip a bit of anything that a dispatch has written in a window, once it is there and before it is compared.

        Return the outputs that differ, if no rank raises an error in the dispatch or in a combine.
        """
        clean = self.dispatch(seed)
        used = [verify.table_of_rows(here.handle)[1] for here in clean]
        want = [contents(here, rows) for here, rows in zip(clean, used, strict=True)]
        added = self.combine(clean)
        del clean
        made: list[int] = []
        with flipping_anywhere(self.draw.randrange(self.case.ranks), self.draw, made):
            found = self.dispatch(seed)
        if any(isinstance(here, BaseException) for here in found):
            assert made, found
            return set()
        seen = [contents(here, rows) for here, rows in zip(found, used, strict=True)]
        names = {name for mine, right in zip(seen, want, strict=True) for name in right if mine[name] != right[name]}
        again = self.combine(found)
        if any(isinstance(one, BaseException) for one in again):
            for buffer in self.buffers:
                buffer.rounds.recovered()  # of a Mismatch: the handle has another round
            return set()
        same = all(bytes_of(mine) == bytes_of(right) for mine, right in zip(again, added, strict=True))
        return names if same else names | {"combine"}

    def flip_in_combine(self, seed: int) -> Row | None:
        """Flip a bit of a row on its way back; None: no such row travels, for instance because a sum does."""
        size = self.case.settings["domain_ranks"]
        routed = self.dispatch(seed)
        assert not any(isinstance(one, BaseException) for one in routed), (routed, self.case)
        rows = [(source, *row) for source, here in enumerate(routed) for row in rows_of(here)]
        if not rows:
            return None
        source, token_rank, token = self.draw.choice(rows)
        destination = token_rank
        if source // size != token_rank // size and self.draw.random() < 0.5:  # in the sum of its domain
            source = source // size * size + token_rank % size
        elif (
            source // size != token_rank // size and self.draw.random() < 0.7
        ):  # on its way to the rank that adds it up
            destination = source // size * size + token_rank % size
        row = Row("combine", source, destination, token_rank, token)
        tables = self.buffers[destination].rounds.sampling.tables
        assert tables is not None
        tables.checks.flip_later(source, token_rank, row.token, self.draw.randrange(1 << 20))
        before = self._rounds()
        found = self.combine(routed)
        made = [row] if tables.checks.flipped else []
        tables.checks.flip_later(-1, -1, -1, 0)
        self._check(found, made, before)
        return made[0] if made else None

    def _rounds(self) -> int:
        (rounds,) = {buffer.rounds.flight.rounds for buffer in self.buffers}
        return rounds

    def _check(self, found: list[Any], made: list[Row], before: int) -> None:
        for result in found:
            if not made:
                assert not isinstance(result, BaseException), result
                continue
            assert type(result) is moecomm.CorruptRow, (result, made, self.case)
            row = Row(result.op, result.source, result.destination, result.token_rank, result.token)
            assert row == made[0], (result, made, self.case)
            assert result.round == before + 1
            size = self.case.settings["domain_ranks"]
            crosses = row.source // size != row.destination // size
            assert result.path == ("link between domains" if crosses else "shared memory")


@contextmanager
def flipping(destination: int, draw: random.Random, made: list[Row]) -> Iterator[None]:
    """Flip a bit of a row of the next verified dispatch on this rank, after it has arrived."""
    compare = verify.DispatchCheck._compare

    def flip_and_compare(check: verify.DispatchCheck) -> None:
        routed = check._routed
        if check._rounds.rank == destination and not made:
            src, in_use = verify.table_of_rows(routed.handle)
            rows = in_use.nonzero().flatten().tolist()
            if rows:
                row = draw.choice(rows)
                rank, token = src[row].tolist()
                flip(routed, row, draw)
                made.append(Row("dispatch", rank, destination, rank, token))
        compare(check)

    with mock.patch.object(verify.DispatchCheck, "_compare", flip_and_compare):
        yield


@contextmanager
def flipping_anywhere(rank: int, draw: random.Random, made: list[int]) -> Iterator[None]:
    """Flip a bit in one of the two blocks that the next verified dispatch has on this rank."""
    compare = verify.DispatchCheck._compare

    def flip_and_compare(check: verify.DispatchCheck) -> None:
        routed = check._routed
        block = draw.choice([routed.handle.block, routed.payload]) if check._rounds.rank == rank else None
        if block is not None and block.nbytes > 0 and not made:
            address = routed.handle.plan.base + block.offset + draw.randrange(block.nbytes)
            ctypes.c_uint8.from_address(address).value ^= 1 << draw.randrange(8)
            made.append(address)
        compare(check)

    with mock.patch.object(verify.DispatchCheck, "_compare", flip_and_compare):
        yield


def contents(routed: dispatch.Routed, used: torch.Tensor) -> dict[str, bytes]:
    """Return the bytes of the outputs by name, of the rows that are in use."""
    found = {name: bytes_of(getattr(routed, name)) for name in COUNTS}
    rows = used.nonzero().flatten()
    for name in ("x", "src", *ROUTING, *([] if routed.args.scale_columns else ["scales"])):
        tensor = getattr(routed, name)
        if tensor is not None:
            flat = tensor.flatten(0, tensor.ndim - 2) if name in ("x", "src", "scales") else tensor
            flat = flat.reshape(len(used), -1) if len(used) else flat
            found[name] = bytes_of(flat[rows])
    return found


def bytes_of(found: Any) -> bytes:
    """Return the bytes of a tensor, or of the tensors of a tuple."""
    if isinstance(found, tuple):
        return b"".join(map(bytes_of, found))
    return bytes(found.contiguous().view(-1).view(torch.uint8).numpy())


def rows_of(routed: dispatch.Routed) -> list[list[int]]:
    """Source rank and token of each row in use."""
    src, in_use = verify.table_of_rows(routed.handle)
    return src[in_use].tolist()


def flip(routed: dispatch.Routed, row: int, draw: random.Random) -> None:
    """Flip a bit of a row, or of its scales, in the window."""
    scales = outputs.scales(routed) if routed.args.scale_columns == 0 else None
    whole = scales if scales is not None and draw.random() < 0.3 else outputs.x(routed)
    data = whole.flatten(0, -2)[row : row + 1].view(torch.uint8).view(-1)
    bit = draw.randrange(8 * len(data))
    data[bit // 8] ^= 1 << bit % 8


class Count(NamedTuple):
    """Flips that were made, and verified rounds in which there was none."""

    flips: list[Row]
    clean: int


def check(seed: int, flips: int = FLIPS) -> Count:
    """Run a case: flips in random rounds, and after each a round without, which must raise nothing."""
    draw = random.Random(seed)
    cluster = Cluster(Case.of(draw), draw)
    made: list[Row] = []
    clean = 0
    try:
        for number in range(3 * flips):
            flip_in = cluster.flip_in_dispatch if draw.random() < 0.5 else cluster.flip_in_combine
            row = flip_in(2 * number)
            if row is not None:
                made.append(row)
            clean += clean_rounds(cluster, 2 * number + 1)
            if len(made) == flips:
                break
    finally:
        cluster.close()
    return Count(made, clean)


def clean_rounds(cluster: Cluster, seed: int) -> int:
    """Dispatch and combine without a flip; return how many rounds that were."""
    routed = cluster.dispatch(seed)
    found = cluster.combine(routed)
    for result in (*routed, *found):
        assert not isinstance(result, BaseException), (result, cluster.case)
    return 2


def more_clean_rounds(seed: int, rounds: int) -> int:
    """Run so many verified rounds of a case without a flip."""
    draw = random.Random(seed)
    cluster = Cluster(Case.of(draw), draw)
    try:
        return sum(clean_rounds(cluster, number) for number in range(rounds // 2))
    finally:
        cluster.close()


def main() -> None:
    parser = argparse.ArgumentParser("python -m tests.flips", description=__doc__)
    parser.add_argument("flips", type=int)
    parser.add_argument("--clean", type=int, default=0, help="least number of verified rounds without a flip")
    parser.add_argument("--first", type=int, default=0, help="seed of the first case")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    made: list[Row] = []
    clean, seed = 0, given.first
    while len(made) < given.flips:
        count = check(seed, min(FLIPS, given.flips - len(made)))
        made += count.flips
        clean += count.clean
        seed += 1
    while clean < given.clean:
        clean += more_clean_rounds(seed, 200)
        seed += 1
    row = {
        "kind": "flipped bits in rows of CPU ranks, all found and named",
        "flips": len(made),
        "flips_in_dispatch": sum(row.op == "dispatch" for row in made),
        "flips_in_combine": sum(row.op == "combine" for row in made),
        "clean_rounds": clean,
        "cases": seed - given.first,
    }
    print(json.dumps(row, indent=1))
    if given.json:
        results.write(given.json, {"rows": [row]})


if __name__ == "__main__":
    main()
