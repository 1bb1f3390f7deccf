"""balance="replicate": experts that are copied to idle ranks for one layer."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import moecomm
from moecomm import ExpertWeights, Placement, formats, ops
from moecomm.base.placement import NONE, replicated
from moecomm.base.replicas import copies, shares
from moecomm.errors import Aborted, BadInput, Mismatch, PeerLost, Timeout, Unsupported
from moecomm.fused import pack_mxfp4, quantize_weights
from moecomm.testing.cases import random_placement
from moecomm.weights import copies as weight_copies

from .backends.conftest import run_ranks
from .conftest import Ranks
from .copied_gradients import CopiedGradients
from .few import few
from .ops.plain import formula

RANKS, HIDDEN, INNER, EXPERTS, SLOTS, TOKENS = 4, 16, 8, 9, 5, 24
SIZES: dict[str, Any] = {"hidden": HIDDEN, "num_experts": EXPERTS, "topk": 2, "max_tokens": TOKENS, "timeout_s": 20}
FLOAT: dict[str, Any] = {**SIZES, "dtype": torch.float32, "backend": "host"}
SHAPES = {"w13": (2 * INNER, HIDDEN), "w2": (HIDDEN, INNER)}
SKEWED = Placement([[0, 1, 2], [3, 4], [5, 6], [7, 8]], slots=SLOTS, choice="balanced")


def drawn(seed: int) -> Placement:
    return random_placement(seed, ranks=RANKS, num_experts=EXPERTS, slots=SLOTS, balanced=True)


def routing(seed: int) -> list[torch.Tensor]:
    """Ids of all ranks, of which a few experts, other ones for each seed, are in most tokens; some are -1."""
    rng, g = random.Random(f"routing {seed}"), torch.Generator().manual_seed(seed)
    load = torch.rand(EXPERTS, generator=g) ** rng.choice([1, 4, 12]) + 1e-6
    ids = [
        torch.multinomial(load.expand(TOKENS, -1), 2, generator=g)[: rng.choice([TOKENS, 7, 0])] for _ in range(RANKS)
    ]
    return [torch.where(torch.rand(one.shape, generator=g) < 0.05, -1, one) for one in ids]


def counted(ids: list[torch.Tensor]) -> torch.Tensor:
    return torch.stack([torch.bincount(one[one >= 0], minlength=EXPERTS) for one in ids])


class Model:
    """Weights of all experts."""

    def __init__(self, seed: int) -> None:
        g = torch.Generator().manual_seed(seed)
        self.w13 = torch.randn(EXPERTS, 2 * INNER, HIDDEN, generator=g)
        self.w2 = torch.randn(EXPERTS, HIDDEN, INNER, generator=g)

    def of(self, experts: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
        """Return those of a rank's slots; NaN in empty ones."""
        held = torch.tensor(experts)
        empty = (held < 0)[:, None, None]
        return self.w13[held].masked_fill(empty, torch.nan), self.w2[held].masked_fill(empty, torch.nan)

    def fill(self, buffer: moecomm.Buffer) -> ExpertWeights:
        weights = ExpertWeights(buffer, SHAPES, dtype=torch.float32)
        for name, value in zip(SHAPES, self.of(list(buffer.local_experts)), strict=True):
            weights[name].copy_(value)
        return weights


def tokens(seed: int, rank: int, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    g = torch.Generator().manual_seed(1000 * seed + rank)
    return torch.randn(len(ids), HIDDEN, generator=g), ids, torch.rand(len(ids), 2, generator=g)


def test_copies_go_from_the_busiest_to_the_idlest() -> None:
    """Loads 32, 8, 8 and 0 become 20, 20, 8, and then 16 on three ranks.  Rank 3 has no expert, and gets none."""
    held = [[0], [4], [9], []]
    assert copies([32, 8, 8, 4], held, [2, 5, 6, 10, 12], 4, 4) == [(0, 5), (0, 10)]
    assert copies([32, 8, 8, 4], held, [], 4, 4) == copies([0, 0, 0, 0], held, [2, 5, 6], 4, 4) == []
    assert copies([3200, 32, 1, 1], [[0], [3], [6], [7]], [4, 5, 8], 3, 3) == [(0, 8), (0, 4)]
    assert copies([100, 98, 97, 99], [[0], [4], [8], [12]], [1, 5, 9, 13], 4, 4) == [], "nothing to win"


@pytest.mark.parametrize("seed", few(range(200), *range(20)))
def test_copies_make_ranks_more_even(seed: int) -> None:
    placement, counts = drawn(seed), counted(routing(seed))
    after = replicated(placement, counts)
    new = (after.experts != placement.experts).nonzero().tolist()
    assert all(placement.experts[rank, slot] == NONE for rank, slot in new)
    assert all(placement.experts[rank].max() >= 0 for rank, _ in new), "ranks without experts stay without"
    assert all(after.experts[rank, slot] not in placement.experts[rank] for rank, slot in new)
    most = []
    for one in (placement, after):
        lists = [list({slot // SLOTS: slot for slot in reversed(held)}.values())[::-1] for held in one.slots_by_expert]
        loads = torch.zeros(RANKS, dtype=torch.int64)
        for slots, given in zip(lists, shares(counts.sum(0).tolist(), lists, RANKS, SLOTS), strict=True):
            loads.index_add_(0, torch.tensor([slot // SLOTS for slot in slots]), torch.tensor(given))
        most.append(int(loads.max()))
    assert most[1] <= most[0]


@pytest.mark.parametrize("seed", few(range(60), *range(5)))
def test_layers_are_those_of_the_replicated_placement(seed: int) -> None:
    """The bits of layers in a Buffer that has the copies all along, at loads that change from round to round."""
    model, made = Model(seed), 0
    rounds = [routing(seed + 100 * nth) for nth in range(4)]

    def body(group: Any) -> int:
        with moecomm.Buffer(group, **FLOAT, placement=drawn(seed)) as buffer:
            weights, copied = model.fill(buffer), 0
            for nth, ids in enumerate(rounds):
                given = tokens(seed + nth, group.rank, ids[group.rank])
                before = buffer.stats().rows_per_expert
                out = buffer.moe(*given, weights["w13"], weights["w2"], balance="replicate")
                rows = buffer.stats().rows_per_expert - before
                after = replicated(drawn(seed), counted(ids))
                with moecomm.Buffer(group, **FLOAT, placement=after) as other:
                    assert torch.equal(out, other.moe(*given, *model.of(list(other.local_experts))))
                    assert torch.equal(rows, other.stats().rows_per_expert)
                whole = (given[1], given[2].double(), model.w13.double(), model.w2.double())
                torch.testing.assert_close(out.double(), formula(given[0].double(), *whole), rtol=1e-4, atol=1e-4)
                copied += int((after.experts != drawn(seed).experts).sum())
            plain = buffer.moe(*given, weights["w13"], weights["w2"])
            torch.testing.assert_close(plain, out, rtol=1e-4, atol=1e-4)
            weights.close()
            return copied

    found = run_ranks(RANKS, body)
    for one in found:
        if isinstance(one, BaseException):
            raise one
    made += found[0]
    assert len(set(found)) == 1 and made >= 0


def test_weights_change_as_soon_as_a_layer_has_ended() -> None:
    """Owners write them right after each layer, and some ranks are late: no copy has weights of another step."""
    model, steps = Model(3), 30

    def body(group: Any) -> int:
        rng, wrong = random.Random(group.rank), 0
        with moecomm.Buffer(group, **FLOAT, placement=SKEWED) as buffer:
            weights = model.fill(buffer)
            for step in range(steps):
                ids = torch.tensor([[step % 3, 2 - step % 2]]).repeat(TOKENS, 1)
                ids = torch.where(ids[:, :1] == ids, torch.tensor([step % 3, 3]), ids)
                x, _, scale = tokens(step, group.rank, ids)
                if rng.random() < 0.2:
                    time.sleep(0.01)
                out = buffer.moe(x, ids, scale, weights["w13"], weights["w2"], balance="replicate")
                weights["w2"].mul_(-0.75)
                w2 = model.w2.double() * (-0.75) ** step
                want = formula(x.double(), ids, scale.double(), model.w13.double(), w2)
                wrong += not torch.allclose(out.double(), want, rtol=1e-3, atol=1e-3 * 0.75**step)
            weights.close()
            return wrong

    assert run_ranks(RANKS, body) == [0] * RANKS


@pytest.mark.parametrize("seed", few(range(40), *range(4)))
def test_gradients_are_sums_in_the_order_of_slots(seed: int) -> None:
    """Those of a Buffer that has the copies all along, of which an owner's slot gets the sum; biases, too."""
    case = CopiedGradients(drawn(seed), routing(seed), INNER, seed % 2 == 1, SIZES | {"backend": "host"}, seed=seed)
    results = run_ranks(RANKS, case.run)
    for one in results:
        if isinstance(one, BaseException):
            raise one
    case.check(results)


def in_mxfp4(w: torch.Tensor) -> tuple[torch.Tensor, ...]:
    values, scales = formats.quantize(w.flatten(0, 1), "mxfp4")
    assert scales is not None and scales.dtype is torch.float8_e8m0fnu
    return values.view(*w.shape[:2], -1), scales.view(*w.shape[:2], -1)


def as_bytes(part: torch.Tensor) -> torch.Tensor:
    """Return it in a dtype that torch can index."""
    return part.view(torch.uint8) if part.itemsize == 1 else part


def in_packed_mxfp4(w: torch.Tensor) -> tuple[torch.Tensor, ...]:
    values, scales = in_mxfp4(w)
    return pack_mxfp4((values, scales))


@pytest.mark.parametrize("quantized", [quantize_weights, in_mxfp4, in_packed_mxfp4])
def test_quantized_weights(quantized: Callable[[torch.Tensor], tuple[torch.Tensor, ...]]) -> None:
    """Scales are copied, too."""
    hidden, inner = 128, 128
    sizes = {**FLOAT, "hidden": hidden, "dtype": torch.bfloat16}
    g = torch.Generator().manual_seed(1)
    whole = {
        "w13": quantized(torch.randn(EXPERTS, 2 * inner, hidden, generator=g) / 8),
        "w2": quantized(torch.randn(EXPERTS, hidden, inner, generator=g) / 8),
    }

    def body(group: Any) -> torch.Tensor:
        ids = torch.tensor([[0, 1]]).repeat(TOKENS, 1)
        x = torch.randn(TOKENS, hidden, generator=torch.Generator().manual_seed(group.rank)).bfloat16()
        with moecomm.Buffer(group, **sizes, placement=SKEWED) as buffer:
            shapes, kinds = dict[str, Any](), dict[str, torch.dtype]()
            for name, pair in whole.items():
                for at, part in zip(("", " scales"), pair, strict=True):
                    shapes[name + at], kinds[name + at] = tuple(part.shape[1:]), part.dtype
            weights = ExpertWeights(buffer, shapes, dtype=kinds)
            held = torch.tensor(list(buffer.local_experts))
            for name, pair in whole.items():
                for at, part in zip(("", " scales"), pair, strict=True):
                    as_bytes(weights[name + at])[held >= 0] = as_bytes(part)[held[held >= 0]]
            pairs = [(weights[name], weights[f"{name} scales"]) for name in whole]
            out = buffer.moe(x, ids, None, *pairs, balance="replicate")
            assert int((buffer.stats().rows_per_expert > 0).sum()) > 0
            plain = buffer.moe(x, ids, None, *pairs)
            weights.close()
            assert torch.equal(out.isfinite(), torch.ones_like(out, dtype=torch.bool))
            torch.testing.assert_close(out, plain, rtol=1e-2, atol=1e-2)
            return out

    for one in run_ranks(RANKS, body):
        assert isinstance(one, torch.Tensor), one


def test_rows_without_room_go_in_parts_with_copies_of_their_own() -> None:
    model = Model(5)

    def body(group: Any) -> int:
        ids = torch.tensor([[0, 1]]).repeat(TOKENS, 1)
        x, _, scale = tokens(5, group.rank, ids)
        with moecomm.Buffer(group, **FLOAT, placement=SKEWED, capacity_factor=0.1) as buffer:
            weights = model.fill(buffer)
            out = buffer.moe(x, ids, scale, weights["w13"], weights["w2"], balance="replicate")
            whole = (ids, scale.double(), model.w13.double(), model.w2.double())
            torch.testing.assert_close(out.double(), formula(x.double(), *whole), rtol=1e-4, atol=1e-4)
            weights.close()
            return buffer.stats().rounds

    assert min(run_ranks(RANKS, body)) > 2


def test_ranks_that_differ() -> None:
    model = Model(6)

    def body(group: Any) -> str:
        ids = torch.tensor([[0, 1]]).repeat(TOKENS, 1)
        with moecomm.Buffer(group, **FLOAT, placement=SKEWED) as buffer:
            weights = model.fill(buffer)
            given = (*tokens(6, group.rank, ids), weights["w13"], weights["w2"])
            with pytest.raises(Mismatch) as raised:
                buffer.moe(*given, balance=None if group.rank == 2 else "replicate")
            weights.close()
            return str(raised.value.field)

    assert run_ranks(RANKS, body) == ["balance"] * RANKS


def test_masked_ranks_get_no_copies() -> None:
    model = Model(7)

    def body(group: Any) -> torch.Tensor | None:
        ids = torch.tensor([[0, 1]]).repeat(TOKENS, 1)
        x, _, scale = tokens(7, group.rank, ids)
        with moecomm.Buffer(group, **FLOAT, placement=SKEWED) as buffer:
            weights = model.fill(buffer)
            given = (x, ids, scale, weights["w13"], weights["w2"])
            buffer.moe(*given, balance="replicate")
            if group.rank == 3:
                return None
            buffer.mask([3])
            out = buffer.moe(*given, balance="replicate")
            whole = (ids, scale.double(), model.w13.double(), model.w2.double())
            torch.testing.assert_close(out.double(), formula(x.double(), *whole), rtol=1e-4, atol=1e-4)
            leaves = [torch.nn.Parameter(weights[name]) for name in SHAPES]
            with pytest.raises(Unsupported, match="masked"):
                ops.moe(buffer, x, ids, scale, *leaves, balance="replicate")
            return out

    for rank, one in enumerate(run_ranks(RANKS, body)):
        assert isinstance(one, torch.Tensor) or (rank == 3 and one is None), one


def test_what_cannot_be_replicated() -> None:
    ids, x = torch.zeros(2, 2, dtype=torch.int64), torch.zeros(2, HIDDEN)
    ids[:, 1] = 1
    w13, w2 = torch.zeros(EXPERTS, 2 * INNER, HIDDEN), torch.zeros(EXPERTS, HIDDEN, INNER)
    whole = Placement([range(EXPERTS)], choice="balanced")
    for more in ({}, {"placement": Placement([range(EXPERTS)])}):
        with moecomm.Buffer("self", **FLOAT, **more) as buffer, pytest.raises(BadInput, match="balance"):
            buffer.moe(x, ids, None, w13, w2, balance="replicate")
    with moecomm.Buffer("self", **FLOAT, placement=whole) as buffer:
        with pytest.raises(BadInput, match="balance"):
            buffer.moe(x, ids, None, w13, w2, balance="even")  # type: ignore[call-overload]
        with pytest.raises(BadInput, match=r"w13.*ExpertWeights"):
            buffer.moe(x, ids, None, w13, w2, balance="replicate")
        weights = ExpertWeights(buffer, SHAPES, dtype=torch.float32)
        with pytest.raises(BadInput, match=r"w2.*ExpertWeights"):
            buffer.moe(x, ids, None, weights["w13"], w2, balance="replicate")
        assert buffer.moe(x, ids, None, weights["w13"].zero_(), weights["w2"].zero_(), balance="replicate").sum() == 0
        weights.close()


def test_slots_that_are_filled_get_no_copies() -> None:
    """Between prefetch() and commit(), also where a rank is late to its copies."""
    model, target = Model(8), Placement([[0, 1], [3, 4, 2], [5, 6], [7, 8]], slots=4, choice="balanced")
    before = Placement([[0, 1, 2], [3, 4], [5, 6], [7, 8]], slots=4, choice="balanced")

    def body(group: Any) -> list[list[int]]:
        ids, made = torch.tensor([[0, 1]]).repeat(TOKENS, 1), []
        x, _, scale = tokens(8, group.rank, ids)
        with moecomm.Buffer(group, **FLOAT, placement=before) as buffer:
            weights = model.fill(buffer)
            given = (x, ids, scale, weights["w13"], weights["w2"])
            want = buffer.moe(*given)

            def layer() -> None:
                out = buffer.moe(*given, balance="replicate")
                torch.testing.assert_close(out, want, rtol=1e-4, atol=1e-4)
                sources = weight_copies.Copies(buffer.rounds, [], ()).sources()
                made.append((sources[1] != NONE).nonzero().flatten().tolist())

            layer()
            assert weights.prefetch(target) != buffer.placement
            assert weights.prefetch(target) != buffer.placement, "which changes nothing"
            layer()
            assert torch.equal(weights["w13"][2], model.w13[2]) or group.rank != 1
            weights.commit()
            layer()
            assert torch.equal(weights["w13"][2], model.w13[2]) or group.rank != 1
            weights.close()
            return made

    assert run_ranks(RANKS, body) == [[[2], [3], [3]]] * RANKS


def test_no_weights_are_taken_for_those_of_an_older_placement() -> None:
    """Slots that copies may have overwritten count as replaced, also where graphs of an earlier capture write them."""
    placements = [Placement([held], slots=4, num_experts=3, choice="balanced") for held in ([0, 1, 2], [0, -1, 1, 2])]
    sizes = {**FLOAT, "num_experts": 3}
    with moecomm.Buffer("self", **sizes, placement=placements[0]) as buffer:
        weights = ExpertWeights(buffer, SHAPES, dtype=torch.float32)
        for name in SHAPES:
            weights[name].zero_()
        buffer.set_placement(placements[1])
        assert buffer.rounds.slots.filled == {}, "no layer copies"
        buffer.set_placement(placements[0])
        given = (torch.zeros(2, HIDDEN), torch.tensor([[0, 1], [1, 2]]), None, weights["w13"], weights["w2"])
        buffer.moe(*given, balance="replicate")
        assert buffer.rounds.slots.filled == {3: 3}
        buffer.set_placement(placements[1])
        assert buffer.rounds.slots.filled == {3: 3, 1: 4}
        weights.close()


@pytest.mark.parametrize("end", ["close", "abort"])
def test_a_rank_goes_during_its_copies(end: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The others raise an error, and go on without it by the placement that they had."""
    model, run = Model(9), weight_copies.Copies.run
    gone: list[bool] = []

    def ends(self: weight_copies.Copies) -> None:
        if self.rounds.rank == 3 and gone:
            raise KeyboardInterrupt
        run(self)

    monkeypatch.setattr(weight_copies.Copies, "run", ends)

    def body(group: Any) -> str:
        ids = torch.tensor([[0, 1]]).repeat(TOKENS, 1)
        x, _, scale = tokens(9, group.rank, ids)
        with moecomm.Buffer(group, **{**FLOAT, "timeout_s": 6}, placement=SKEWED) as buffer:
            weights = model.fill(buffer)
            given = (x, ids, scale, weights["w13"], weights["w2"])
            buffer.moe(*given, balance="replicate")
            if group.rank == 3:
                gone.append(True)
                with pytest.raises(KeyboardInterrupt):
                    buffer.moe(*given, balance="replicate")
                getattr(buffer, end)()
                return "gone"
            with pytest.raises((PeerLost, Aborted, Timeout)):
                [buffer.moe(*given, balance="replicate") for _ in range(100)]
            buffer.shrink()
            out = buffer.moe(x, ids, scale, weights["w13"], weights["w2"])
            whole = (ids, scale.double(), model.w13.double(), model.w2.double())
            torch.testing.assert_close(out.double(), formula(x.double(), *whole), rtol=1e-4, atol=1e-4)
            return "shrunk"

    assert run_ranks(RANKS, body) == ["shrunk"] * 3 + ["gone"]


def _killed(rank: int, group: Any, seed: int) -> str:
    """Make layers with copies until a rank is killed in one of its copies."""
    model, run = Model(seed), weight_copies.Copies.run
    rng = random.Random(f"killed {seed}")
    victim, when = rng.randrange(RANKS), rng.randint(1, 5)
    steps = iter(range(1000))

    def ends(self: weight_copies.Copies) -> None:
        if rank == victim and next(steps) == when:
            os.kill(os.getpid(), signal.SIGKILL)
        run(self)

    weight_copies.Copies.run = ends  # type: ignore[method-assign]
    with moecomm.Buffer(group, **{**FLOAT, "timeout_s": 30}, placement=SKEWED) as buffer:
        weights = model.fill(buffer)
        try:
            for nth in range(1000):
                x, ids, scale = tokens(seed + nth, rank, routing(seed + nth)[rank])
                out = buffer.moe(x, ids, scale, weights["w13"], weights["w2"], balance="replicate")
                whole = (ids, scale.double(), model.w13.double(), model.w2.double())
                torch.testing.assert_close(out.double(), formula(x.double(), *whole), rtol=1e-4, atol=1e-4)
        except (PeerLost, Aborted) as error:
            said = type(error).__name__
        buffer.shrink()
        there = buffer.placement.logcnt > 0  # type: ignore[union-attr]
        out = buffer.moe(x, ids, scale, weights["w13"], weights["w2"])
        whole = (ids, (scale * there[ids.clamp(min=0)]).double(), model.w13.double(), model.w2.double())
        torch.testing.assert_close(out.double(), formula(x.double(), *whole), rtol=1e-4, atol=1e-4)
        weights.close()
    return said


@pytest.mark.parametrize("seed", few(range(20), 0))
def test_a_rank_is_killed_during_its_copies(seed: int, computing_ranks: Ranks) -> None:
    computing_ranks.start(RANKS, _killed, seed)
    for result in computing_ranks.results(RANKS - 1).values():
        assert isinstance(result, str), result


def test_seeds_have_copies() -> None:
    """Most of the cases above copy experts."""

    def made(seed: int) -> Iterator[int]:
        for nth in range(4):
            after = replicated(drawn(seed), counted(routing(seed + 100 * nth)))
            yield int((after.experts != drawn(seed).experts).sum())

    found = [sum(made(seed)) for seed in range(60)]
    assert sum(one > 0 for one in found) > 40 and max(found) > 8
