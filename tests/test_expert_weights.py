"""Weights of slots: they follow placements, while layers go on."""

from __future__ import annotations

import itertools
import os
import random
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch

import moecomm
from moecomm import ExpertWeights, Placement
from moecomm.backends.host import HostSession
from moecomm.errors import Aborted, BadInput, Mismatch, PeerLost, Timeout
from moecomm.testing.cases import random_placement
from moecomm.weights.expert_weights import step
from moecomm.window.pace import Pace

from .backends.conftest import run_ranks
from .conftest import Ranks
from .few import few
from .ops.plain import formula
from .test_walks import walk_of

RANKS, HIDDEN, INNER, EXPERTS, SLOTS, TOKENS = 3, 16, 8, 7, 5, 9
SIZES: dict[str, Any] = {"hidden": HIDDEN, "num_experts": EXPERTS, "topk": 2, "max_tokens": TOKENS, "timeout_s": 20}


def drawn(seed: int) -> Placement:
    return random_placement(seed, ranks=RANKS, num_experts=EXPERTS, slots=SLOTS)


@pytest.mark.parametrize("seed", few(range(12), 2))
def test_layers_go_on_while_experts_move(seed: int) -> None:
    """Between any prefetch and its commit, and after it, each layer gives the sums of the whole model."""
    g = torch.Generator().manual_seed(seed)
    w13, w2 = torch.randn(EXPERTS, 2 * INNER, HIDDEN, generator=g), torch.randn(EXPERTS, HIDDEN, INNER, generator=g)
    scales = torch.randn(EXPERTS, 3, generator=g).bfloat16()

    def body(group: Any) -> int:
        mine = torch.Generator().manual_seed(100 + group.rank)
        x = torch.randn(TOKENS, HIDDEN, generator=mine)
        ids = torch.rand(TOKENS, EXPERTS, generator=mine).argsort(dim=1)[:, :2].contiguous()
        routing = torch.rand(TOKENS, 2, generator=mine)
        want = formula(x.double(), ids, routing.double(), w13.double(), w2.double())
        commits = 0
        with moecomm.Buffer(group, **SIZES, dtype=torch.float32, backend="host", placement=drawn(seed)) as buffer:
            shapes = {"w13": (2 * INNER, HIDDEN), "w2": (HIDDEN, INNER), "scales": (3,)}
            kinds = {"w13": torch.float32, "w2": torch.float32, "scales": torch.bfloat16}
            weights = ExpertWeights(buffer, shapes, dtype=kinds)

            def check() -> None:
                out = buffer.moe(x, ids, routing, weights["w13"], weights["w2"])
                torch.testing.assert_close(out.double(), want, rtol=1e-4, atol=1e-4)

            held = torch.tensor(list(buffer.local_experts))
            for name, whole in (("w13", w13), ("w2", w2), ("scales", scales)):
                weights[name][held >= 0] = whole[held[held >= 0]]
            for target in (drawn(seed + 50), drawn(seed + 51)):
                while weights.prefetch(target) != buffer.placement:
                    check()
                    weights.commit()
                    check()
                    commits += 1
                    assert torch.equal(weights["scales"][held >= 0], scales[held[held >= 0]]), "old ones stay"
                    held = torch.tensor(list(buffer.local_experts))
                    assert torch.equal(weights["scales"][held >= 0], scales[held[held >= 0]])
            weights.close()
            return commits

    commits = run_ranks(RANKS, body)
    assert len(set(commits)) == 1 and commits[0] >= 1


class Model:
    """A layer in numbers that any rank can compute, and one rank's tokens.

    Args:
        seed: of the weights.
        rank: of the tokens.
    """

    def __init__(self, seed: int, rank: int) -> None:
        g, mine = torch.Generator().manual_seed(seed), torch.Generator().manual_seed(1000 * seed + rank)
        self.w13 = torch.randn(EXPERTS, 2 * INNER, HIDDEN, generator=g)
        self.w2 = torch.randn(EXPERTS, HIDDEN, INNER, generator=g)
        self.x = torch.randn(TOKENS, HIDDEN, generator=mine)
        self.ids = torch.rand(TOKENS, EXPERTS, generator=mine).argsort(dim=1)[:, :2].contiguous()
        self.routing = torch.rand(TOKENS, 2, generator=mine)

    def fill(self, buffer: moecomm.Buffer, weights: ExpertWeights) -> None:
        held = torch.tensor(list(buffer.local_experts))
        for name, whole in (("w13", self.w13), ("w2", self.w2)):
            weights[name][held >= 0] = whole[held[held >= 0]]

    def check(self, buffer: moecomm.Buffer, w13: torch.Tensor, w2: torch.Tensor) -> None:
        """Run a layer by these weights of slots, and compare it with the sums of the experts that are there."""
        assert buffer.placement is not None
        there = buffer.placement.logcnt > 0
        out = buffer.moe(self.x, self.ids, self.routing, w13, w2)
        whole = (self.ids, (self.routing * there[self.ids]).double(), self.w13.double(), self.w2.double())
        torch.testing.assert_close(out.double(), formula(self.x.double(), *whole), rtol=1e-4, atol=1e-4)


def amid_a_change(seed: int, group: Any, sizes: dict[str, Any]) -> tuple[int, str]:
    """Move experts towards random placements, with layers between any two steps.  At one step a rank goes, or lags.

    Returns the number of commits that this rank has made, and how it ended.
    """
    rng, model = random.Random(f"amid {seed}"), Model(seed, group.rank)
    victim, when, how = rng.randrange(group.ranks), rng.randint(1, 16), rng.choice(["goes", "goes", "lags", "skips"])
    behind = (victim + 1) % group.ranks  # if the victim goes while all commit, this rank comes to a round before it
    least = int(how != "lags")  # ranks that differ meet in a round before they meet in another call
    layers = [rng.randint(least, 2) for _ in range(100)]  # before each step, alike on all ranks
    commits = steps = 0
    with moecomm.Buffer(group, **sizes) as buffer:
        weights = ExpertWeights(buffer, {"w13": (2 * INNER, HIDDEN), "w2": (HIDDEN, INNER)}, dtype=torch.float32)
        model.fill(buffer, weights)
        kept = weights["w13"], weights["w2"]

        def is_time(commits: bool = False) -> bool:
            """Count a step; return whether this rank leaves out what it would do now."""
            nonlocal steps
            for _ in range(layers[steps]):
                model.check(buffer, *kept)
            steps += 1
            if commits and (group.rank, steps, how) == (behind, when, "goes"):
                model.check(buffer, *kept)
            if (group.rank, steps) != (victim, when):
                return False
            if how == "lags":
                time.sleep(0.2)
            elif how == "goes":
                raise KeyboardInterrupt
            return how == "skips"

        try:
            for target in (drawn(seed + nth) for nth in range(1, 6)):
                while True:
                    is_time()
                    if (group.rank, steps + 1, how) == (behind, when, "goes"):  # its copies will not have come
                        weights._fill = lambda *_: None  # type: ignore[method-assign]
                    after = weights.prefetch(target)
                    if after == buffer.placement:
                        break
                    if not is_time(commits=True):
                        weights.commit()
                        commits += 1
            model.check(buffer, *kept)
            return commits, "done"
        except KeyboardInterrupt:
            return commits, "gone"
        except (PeerLost, Aborted, Timeout, Mismatch) as error:
            if how != "goes":
                return commits, "skipped" if getattr(error, "field", "") == "placement" else str(error)
            buffer.shrink()
            for slot, expert in enumerate(buffer.local_experts):
                assert expert < 0 or torch.equal(kept[0][slot], model.w13[expert]), "a table names what has not arrived"
            for _ in range(3):
                model.check(buffer, *kept)
            return commits, "shrunk"
        finally:
            weights.close()


@pytest.mark.parametrize("seed", few(range(60), 4))
def test_a_rank_goes_or_lags_amid_a_change(seed: int) -> None:
    """No layer is ever wrong: it follows the placement of its round, or the ranks raise an error."""
    sizes = {**SIZES, "dtype": torch.float32, "backend": "host", "placement": drawn(seed), "timeout_s": 6}
    found = run_ranks(RANKS, lambda group: amid_a_change(seed, group, sizes))
    for one in found:
        if isinstance(one, BaseException):
            raise one
    commits, ends = zip(*found, strict=True)
    assert max(commits) - min(commits) <= 1
    assert set(ends) in ({"done"}, {"gone", "shrunk"}, {"skipped"}), ends


def _killed(rank: int, group: Any, seed: int) -> str:
    """Move experts without an end, until a rank is killed.  Returns how many changes its placement has seen."""
    rng, model = random.Random(f"killed {seed}"), Model(seed, rank)
    victim, after_s = rng.randrange(RANKS), rng.uniform(0.0, 1.5)
    sizes = {**SIZES, "dtype": torch.float32, "backend": "host", "placement": drawn(seed)}
    with moecomm.Buffer(group, **sizes) as buffer:
        weights = ExpertWeights(buffer, {"w13": (2 * INNER, HIDDEN), "w2": (HIDDEN, INNER)}, dtype=torch.float32)
        model.fill(buffer, weights)
        kept = weights["w13"], weights["w2"]
        if rank == victim:
            threading.Timer(after_s, os.kill, (os.getpid(), signal.SIGKILL)).start()
        try:
            for nth in itertools.count(1):
                target = drawn(100 * seed + nth)
                while weights.prefetch(target) != buffer.placement:
                    for _ in range(rng.randint(0, 2)):
                        model.check(buffer, *kept)
                    weights.commit()
                    for _ in range(rng.randint(0, 2)):
                        model.check(buffer, *kept)
        except (PeerLost, Aborted, Mismatch) as error:
            said, generation = type(error).__name__, buffer.rounds.slots.generation
        buffer.shrink()
        for slot, expert in enumerate(buffer.local_experts):
            assert expert < 0 or torch.equal(kept[0][slot], model.w13[expert]), "a table names what has not arrived"
        for _ in range(3):
            model.check(buffer, *kept)
        weights.close()
    return f"{said} at {generation}"


@pytest.mark.parametrize("seed", few(range(40), 0))
def test_a_rank_is_killed_amid_a_change(seed: int, ranks: Ranks) -> None:
    """Wherever it is: in a round, in its copies, or between them."""
    ranks.start(RANKS, _killed, seed)
    for result in ranks.results(RANKS - 1).values():
        assert isinstance(result, str), result


def test_steps_lose_no_expert_and_come_to_an_end() -> None:
    reached, of = 0, 300
    for seed in range(of):
        rng = random.Random(seed)
        slots = rng.randint(4, 6)
        sizes = {"ranks": rng.randint(2, 5), "num_experts": 8, "slots": slots}
        at, target = (random_placement(2 * seed + nth, **sizes) for nth in range(2))
        seen = [at]
        while (following := step(at, target)) != at:
            assert following.logcnt.min() >= 1
            for before, after in zip(at.experts.flatten().tolist(), following.experts.flatten().tolist(), strict=True):
                assert after == before or before == -1 or after == -1, "a slot in use is not written"
            at = following
            seen.append(at)
            assert len(seen) < 20
        sorted_rows = [[sorted(row) for row in one.experts.tolist()] for one in (at, target)]
        reached += sorted_rows[0] == sorted_rows[1]
    assert reached > of // 2  # the others have too few empty slots


def test_copies_between_domains_and_at_a_rate() -> None:
    """Experts come from a rank of the same domain, if one has them, and take their time."""
    placements = [Placement(held, slots=3) for held in ([[0, 1], [2], [1], [0]], [[0, 1], [2, 1], [1, 2], [0]])]
    nbytes, gbs = 4 * 50_000, 1e-3

    def body(group: Any) -> tuple[list[int], float]:
        sizes = {**SIZES, "num_experts": 3, "dtype": torch.float32, "backend": "host", "domain_ranks": 2}
        with moecomm.Buffer(group, **sizes, placement=placements[0]) as buffer:
            weights = ExpertWeights(buffer, {"w": (50_000,)}, dtype=torch.float32)
            for slot, expert in enumerate(buffer.local_experts):
                weights["w"][slot] = 10 * group.rank + expert
            begin = time.monotonic()
            weights.prefetch(placements[1], max_gbs=gbs)
            took = time.monotonic() - begin
            weights.commit()
            found = weights["w"].clone()
            weights.close()
        assert torch.equal(found.min(1).values, found.max(1).values)
        return found[:, 0].tolist(), took

    found = run_ranks(4, body)
    assert [rows[:2] for rows, _ in found] == [[0, 1], [12, 1], [21, 12], [30, 29]]
    assert [took >= nbytes / (gbs * 1e9) for _, took in found][1:3] == [True, True]


def test_experts_that_are_lost_are_not_copied() -> None:
    """After a loss, prefetch() fills what it can; expert 0 has no weights, so it gets no slot."""
    before = Placement([[1, -1], [2, 1], [0, -1]], choice="token")
    groups, target = moecomm.local_ranks(2), Placement([[1, 2], [2, 0]], choice="token")

    def body(group: Any) -> None:
        sizes = {"hidden": 16, "num_experts": 3, "topk": 1, "max_tokens": 4, "backend": "host"}
        with moecomm.Buffer(group, **sizes, timeout_s=20, placement=before) as buffer:
            if group.rank == 2:
                return
            buffer.shrink(groups[group.rank])
            weights = ExpertWeights(buffer, {"w": (2,)}, dtype=torch.float32)
            weights["w"].copy_(torch.tensor(buffer.local_experts)[:, None])
            while weights.prefetch(target) != buffer.placement:
                weights.commit()
            assert buffer.placement.held == ((1, 2), (2, -1))
            held = torch.tensor(buffer.local_experts)
            assert torch.equal(weights["w"][held >= 0, 0], held[held >= 0].float())
            buffer.set_placement(target)
            assert list(buffer.local_experts) == target.experts[buffer.rank].tolist()
            weights.close()

    assert run_ranks(3, body) == [None] * 3


def test_what_cannot_be_moved() -> None:
    sizes = {**SIZES, "dtype": torch.float32, "backend": "host"}
    with moecomm.Buffer("self", **sizes) as buffer, pytest.raises(BadInput, match="placement"):
        ExpertWeights(buffer, {"w": (2,)})
    with moecomm.Buffer("self", **sizes, placement=Placement([range(EXPERTS)])) as buffer:
        for shapes, dtype in (({}, torch.float32), ({"w": 3}, torch.float32), ({"w": (2,)}, torch.complex64)):
            with pytest.raises(BadInput, match=r"shapes|dtype"):
                ExpertWeights(buffer, shapes, dtype=dtype)  # type: ignore[arg-type]
        weights = ExpertWeights(buffer, {"w": (2,)})
        with pytest.raises(BadInput, match="prefetch"):
            weights.commit()
        assert weights.prefetch(Placement([range(EXPERTS)])) == buffer.placement
        buffer.set_placement(Placement([range(EXPERTS)]))
        with pytest.raises(BadInput, match="prefetch"):
            weights.commit()
        for target in (Placement([[0, 1]]), Placement([range(EXPERTS)] * 2), None):
            with pytest.raises(BadInput, match="target"):
                weights.prefetch(target)  # type: ignore[arg-type]
        with pytest.raises(BadInput, match="choice"):
            weights.prefetch(Placement([range(EXPERTS)], choice="balanced"))
        with pytest.raises(BadInput, match="name: got 'v'; want 'w'"):
            weights["v"]
        with pytest.raises(BadInput, match=r"shapes: got .* bytes on each rank; want .* this machine"):
            ExpertWeights(buffer, {"w": (2**31, 64)})
        for gbs in (0, -1.0, "1"):
            with pytest.raises(BadInput, match="max_gbs"):
                weights.prefetch(Placement([range(EXPERTS)]), max_gbs=gbs)  # type: ignore[arg-type]
        buffer.shrink()
        with pytest.raises(BadInput, match="shrunk"):
            weights.prefetch(Placement([range(EXPERTS)]))
        with pytest.raises(BadInput, match="shrunk"):
            weights.commit()
        weights.close()
    with pytest.raises(moecomm.Closed):
        weights["w"]


def test_nothing_moves_once_the_buffer_is_closed() -> None:
    placement = Placement([range(EXPERTS)], slots=EXPERTS + 1)
    with moecomm.Buffer("self", **SIZES, backend="host", placement=placement) as buffer:
        weights = ExpertWeights(buffer, {"w": (2,)})
    with pytest.raises(moecomm.Closed):
        weights.prefetch(placement)
    weights.close()


@pytest.mark.parametrize("tensors", [1, 6])
def test_experts_move_by_few_calls_of_python(tensors: int) -> None:
    """However many tensors and experts there are, once the memory of the ranks has been seen."""
    ranks, experts = 3, 24
    apart = [list(range(rank, experts, ranks)) for rank in range(ranks)]
    more = Placement([[*held, *apart[rank - 1][:4]] for rank, held in enumerate(apart)], slots=12)
    targets = [more, Placement(apart, slots=12)] * 2

    def body(group: Any) -> list[list[int]]:
        sizes = {**SIZES, "num_experts": experts, "backend": "host"}
        with moecomm.Buffer(group, **sizes, placement=targets[1]) as buffer:
            weights = ExpertWeights(buffer, {f"w{nth}": (HIDDEN,) for nth in range(tensors)})
            found = [[len(walk_of(partial(weights.prefetch, one))), len(walk_of(weights.commit))] for one in targets]
            weights.close()
        return found

    for _, *repeated in run_ranks(ranks, body):
        for prefetch, commit in repeated:
            assert prefetch <= 60 and commit <= 20, repeated


def test_gpus_copy_on_a_stream_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Behind rounds and the work of the current stream, and behind earlier copies of all ranks; commit() waits."""
    done: list[str] = []

    class Stream:
        def wait_stream(self, other: object) -> None:
            done.append(f"wait for {other}")

        def synchronize(self) -> None:
            done.append("synchronize")

    @contextmanager
    def on_stream(stream: Stream) -> Iterator[None]:
        done.append("begin")
        yield
        done.append("end")

    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: "current stream")
    monkeypatch.setattr(torch.cuda, "stream", on_stream)
    placements = [Placement([[0, 1, expert]]) for expert in (-1, 1)]
    with moecomm.Buffer("self", **{**SIZES, "num_experts": 2}, backend="host", placement=placements[0]) as buffer:
        weights = ExpertWeights(buffer, {"v": (2,), "w": (3,)}, dtype=torch.float32)
        weights["v"].copy_(torch.tensor([[1.0], [2.0], [0.0]]))
        weights._stream = Stream()  # type: ignore[assignment]
        for where, name in (
            (HostSession, "order"),
            (HostSession, "place"),
            (moecomm.Window, "barrier"),
            (Pace, "copy"),
        ):
            step_of = getattr(where, name)

            def noted(*given: Any, step_of: Any = step_of, name: str = name) -> None:
                done.append(name)
                step_of(*given)

            monkeypatch.setattr(where, name, noted)
        weights.prefetch(placements[1], max_gbs=1.0)
        weights.commit()
        before = ["order", "wait for current stream", "begin", "barrier"]
        assert done == [*before, "copy", "copy", "end", "synchronize", "place"]
        assert weights["v"][:, 0].tolist() == [1, 2, 2]
        weights.close()


def test_weights_move_in_inference_mode_and_outside() -> None:
    placements = [Placement([[0, 1, expert]]) for expert in (-1, 1)]
    with moecomm.Buffer("self", **{**SIZES, "num_experts": 2}, backend="host", placement=placements[0]) as buffer:
        weights = ExpertWeights(buffer, {"w": (2,)}, dtype=torch.float32)
        for nth in range(4):
            with torch.inference_mode(nth % 2 == 0):
                weights["w"][:2] = torch.tensor([[nth], [nth + 1]])
                weights.prefetch(placements[1 - nth % 2])
                weights.commit()
                assert weights["w"][:2, 0].tolist() == [nth, nth + 1]
        weights.close()
