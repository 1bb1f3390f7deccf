"""Buffers over several domains: against the reference in the order of the domains, and when ranks are lost."""

from __future__ import annotations

import itertools
import os
import signal
import time
from typing import Any

import pytest
import torch

import moecomm
from moecomm import ops
from moecomm.backends import host
from moecomm.combine import reference
from moecomm.dispatch import reference as dispatch_reference
from moecomm.testing import LocalBuffers, check_case, check_case_on_rank, random_case, random_sizes

from .backends.conftest import run_ranks
from .conftest import Ranks
from .few import few
from .live import FAR_S, ROOM_S

SIZES: dict[str, Any] = {"hidden": 64, "num_experts": 8, "topk": 4, "max_tokens": 40, "backend": "host"}
DOMAINS = [(4, 2), (8, 4), (8, 2), (3, 1), (2, 1)]  # ranks, of them in a domain
KILLED = [(0, "between"), (0, "any time"), (3, "between"), (3, "any time")]
CASES = 10  # of each set of sizes


@pytest.mark.parametrize("direct", ["all", "some", "none"])
@pytest.mark.parametrize(("count", "domain_ranks"), few(DOMAINS, (4, 2), (3, 1)))
def test_random_cases_match_the_reference(
    count: int, domain_ranks: int, direct: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows go direct to ranks of other domains, those of some ranks do, or all go through their forwarders."""
    room = host.direct_bytes
    if direct != "all":
        monkeypatch.setattr(host, "direct_bytes", lambda *sizes: room(*sizes) // 256 * 64 * (direct == "some"))
    for number in range(2):
        sizes = random_sizes(number, ranks=(count,))
        # The second set verifies every round.
        with LocalBuffers(**sizes, domain_ranks=domain_ranks, backend="host", verify_every=number) as ranks:
            assert {buffer.domain_ranks for buffer in ranks.buffers} == {domain_ranks}
            for seed in range(number * CASES, (number + 1) * CASES):
                check_case(ranks, random_case(seed, **sizes))


def routing(rank: int, tokens: int = 30) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    g = torch.Generator().manual_seed(rank)
    idx = torch.rand(tokens, 8, generator=g).argsort(dim=1)[:, :4]
    return torch.randn(tokens, 64, generator=g).bfloat16(), idx, torch.rand(tokens, 4, generator=g)


def _random_rounds(rank: int, group: Any) -> str:
    sizes = {**SIZES, "dtype": torch.bfloat16}
    with moecomm.Buffer(group, **sizes, domain_ranks=2) as buffer:
        case_sizes = {name: size for name, size in sizes.items() if name != "backend"}
        for seed in range(15):
            check_case_on_rank(buffer, random_case(seed, ranks=4, **case_sizes))
        x, idx, weights = routing(rank)
        routed = buffer.dispatch(x, idx, weights)
        again = buffer.dispatch(2 * x, handle=routed.handle)
        assert torch.equal(again.x, 2 * routed.x)
        with pytest.raises(moecomm.BadInput, match=r"rank 3.*expert 99"):
            buffer.dispatch(x, torch.full_like(idx, 99) if rank == 3 else idx)
        out = buffer.combine(again.x, routed.handle)
        torch.testing.assert_close(out.float(), 2 * x.float() * weights.sum(1, keepdim=True), rtol=2**-6, atol=2**-6)
    return "done"


def test_processes_match_the_reference(ranks: Ranks) -> None:
    assert ranks.run(4, _random_rounds) == ["done"] * 4


def _until_a_peer_dies(rank: int, group: Any, victim: int, kind: str, died: Any) -> tuple[str, int, float]:
    # Where a rank dies, the deadline is far: a rank that is merely late must not end the rounds first.
    buffer = moecomm.Buffer(group, **SIZES, domain_ranks=2, timeout_s=3 if kind == "idle" else FAR_S)
    if rank == victim and kind == "idle":
        time.sleep(FAR_S)
    begun = time.monotonic()
    try:
        for number in itertools.count():
            if rank == victim and kind == "between" and number == 30:
                died.value = time.monotonic()
                os.kill(os.getpid(), signal.SIGKILL)
            begun = time.monotonic()
            x, idx, weights = routing(rank)
            routed = buffer.dispatch(x, idx, weights)
            buffer.combine(routed.x, routed.handle, topk_weights=weights if number % 2 else None)
    except moecomm.RoundFailed as error:
        took = time.monotonic() - (died.value or begun)
        buffer.close()
        return type(error).__name__, error.peer, took
    raise AssertionError("not reached")


@pytest.mark.parametrize(("victim", "kind"), few(KILLED, (0, "between"), (3, "any time")))
def test_a_killed_forwarder_is_named_by_all(ranks: Ranks, victim: int, kind: str) -> None:
    ranks.start(4, _until_a_peer_dies, victim, kind, ranks.died)
    if kind == "any time":
        time.sleep(1.5)
        ranks.kill(victim)
    for name, peer, seconds in ranks.results(3).values():
        assert (name, peer) == ("PeerLost", victim)
        assert seconds < ROOM_S, "a death on the same host ends the wait, not the deadline"


@pytest.mark.long
def test_a_silent_forwarder_is_a_timeout_on_all(ranks: Ranks) -> None:
    ranks.start(4, _until_a_peer_dies, 1, "idle", ranks.died)
    for name, peer, seconds in ranks.results(3).values():
        assert (name, peer) == ("Timeout", 1)
        assert seconds < ROOM_S


def _close_early(rank: int, group: Any) -> tuple[str, int] | None:
    """Rank 0 has told everybody that it leaves before its process ends."""
    buffer = moecomm.Buffer(group, **SIZES, domain_ranks=2, timeout_s=20)
    buffer.dispatch(*routing(rank))
    if rank == 0:
        buffer.close()
        return None
    with pytest.raises(moecomm.PeerLost) as caught:
        buffer.dispatch(*routing(rank))
    return type(caught.value).__name__, caught.value.peer


def test_a_rank_that_closes_is_not_waited_for(ranks: Ranks) -> None:
    assert ranks.run(4, _close_early) == [None, *[("PeerLost", 0)] * 3]


def _fork(rank: int, group: Any) -> str:
    """A child has the Buffer, but not the thread of its link; to drop the one must not end the other."""
    buffer: Any = moecomm.Buffer(group, **SIZES, domain_ranks=1, timeout_s=20)
    buffer.dispatch(*routing(rank))
    if (child := os.fork()) == 0:
        del buffer
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    buffer.dispatch(*routing(rank))
    buffer.close()
    return "done"


def test_a_forked_child_may_drop_the_buffer(ranks: Ranks) -> None:
    assert ranks.run(2, _fork) == ["done"] * 2


@pytest.mark.parametrize("domain_ranks", [0, 2, 4, -1])
def test_domains_of_unequal_size(domain_ranks: int) -> None:
    with pytest.raises(moecomm.BadInput, match="domain_ranks"):
        LocalBuffers(3, **{**SIZES, "num_experts": 3}, domain_ranks=domain_ranks)


def test_scales_that_have_no_room_where_they_land() -> None:
    with LocalBuffers(2, **SIZES, domain_ranks=1) as ranks:
        x, idx, weights = routing(0)
        call = {"x": x, "topk_idx": idx, "topk_weights": weights, "scales": torch.zeros(30, 500)}
        with pytest.raises(moecomm.BadInput, match="2000 bytes; want at most"):
            ranks.dispatch([call, call])


@pytest.mark.parametrize("wire", [torch.float32, torch.bfloat16])
def test_the_sum_over_domains_is_within_the_bound(wire: torch.dtype) -> None:
    """Add ranks' rows of all sizes, against the sum in the order of one domain."""
    ranks, size, tokens, hidden = 8, 2, 50, 32
    g = torch.Generator().manual_seed(3)
    x = [torch.randn(tokens, hidden, generator=g) for _ in range(ranks)]
    idx = [torch.arange(ranks).repeat(tokens, 1) for _ in range(ranks)]
    arrived = dispatch_reference.dispatch(x, idx, [None] * ranks, num_experts=ranks, layout="flat", max_tokens=tokens)
    y = [torch.randn(a.x.shape, generator=g) * 2.0 ** torch.randint(-12, 12, a.x.shape, generator=g) for a in arrived]
    one = reference.combine(y, arrived, layout="flat")
    several = reference.combine(y, arrived, layout="flat", domain_ranks=size, wire=wire)
    magnitude = reference.combine([row.abs().double().float() for row in y], arrived, layout="flat")

    def gamma(additions: int) -> float:
        return additions * 2**-24 / (1 - additions * 2**-24)

    bound = gamma(ranks - 1) + gamma(min(ranks - 1, size + ranks // size - 2))
    if wire is not torch.float32:
        bound += 2**-8 * (1 + gamma(size - 1)) * (1 + gamma(ranks // size - 1))
    bound += 2 * 2**-24 + gamma(ranks)  # the rounding of both results, and of the magnitudes
    for a, b, total in zip(one, several, magnitude, strict=True):
        assert bool(((a - b).abs() <= bound * total).all())
    assert any(not torch.equal(a, b) for a, b in zip(one, several, strict=True))


@pytest.mark.parametrize("direct", [True, False])
@pytest.mark.parametrize("layout", ["flat", "expert", "batched"])
def test_tokens_with_experts_in_one_domain_have_the_bits_of_one_domain(
    layout: str, direct: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their own or another, direct or through forwarders; the sums of others differ somewhere."""
    if not direct:
        monkeypatch.setattr(host, "direct_bytes", lambda *sizes: 0)
    g = torch.Generator().manual_seed(5)
    drawn = [routing(rank, 40) for rank in range(4)]
    x, weights = [one[0].float() for one in drawn], [one[2] for one in drawn]
    within = [torch.rand(40, 4, generator=g).argsort(dim=1) + 4 * torch.randint(0, 2, (40, 1), generator=g) for _ in x]
    anywhere = [one[1] for one in drawn]
    outs: dict[int | None, list[list[torch.Tensor]]] = {}
    for domain_ranks in (None, 2):
        with LocalBuffers(4, **SIZES, dtype=torch.float32, domain_ranks=domain_ranks) as ranks:
            for ids in (within, anywhere):
                named = zip(x, ids, weights, strict=True)
                routed = ranks.dispatch(
                    [{"x": t, "topk_idx": i, "topk_weights": w, "layout": layout} for t, i, w in named]
                )
                calls = [{"y": r.x * (0.37 + rank / 7), "handle": r.handle} for rank, r in enumerate(routed)]
                outs.setdefault(domain_ranks, []).append(ranks.combine(calls))
    (one, others), (several, other_sums) = outs[None], outs[2]
    assert all(torch.equal(a, b) for a, b in zip(one, several, strict=True))
    assert any(not torch.equal(a, b) for a, b in zip(others, other_sums, strict=True))


def _everything(group: Any, domain_ranks: int | None) -> list[torch.Tensor]:
    """Gradients, weights of combine, both halves of a dispatch, and layers."""
    g = torch.Generator().manual_seed(group.rank)
    x = torch.randn(30, 64, generator=g).requires_grad_()
    idx, weights = torch.rand(30, 8, generator=g).argsort(dim=1)[:, :4], torch.rand(30, 4, generator=g).requires_grad_()
    w13, w2 = torch.randn(2, 32, 64, generator=g), torch.randn(2, 64, 16, generator=g)
    found: list[torch.Tensor] = []
    sizes = {**SIZES, "dtype": torch.float32}
    with moecomm.Buffer(group, **sizes, domain_ranks=domain_ranks, timeout_s=20) as buffer:
        for layout in ("flat", "expert", "batched"):
            sent = ops.dispatch(buffer, x, idx, weights, layout=layout)
            y = sent.x.sin() if sent.topk_weights is None else sent.x.sin() * sent.topk_weights.sum(1, keepdim=True)
            out = ops.combine(y, sent.handle)
            found += [out.detach(), *torch.autograd.grad(out.square().sum(), (x, weights))]
        plain, fixed = x.detach(), weights.detach()
        routed = buffer.dispatch(plain, idx, fixed)
        found.append(buffer.combine(routed.x, routed.handle, topk_weights=fixed.flip(1).contiguous()))
        begun = buffer.dispatch_begin(plain, idx, fixed)
        routed = buffer.dispatch_end(begun)
        found.append(buffer.combine(routed.x, routed.handle))
        found += [buffer.moe(plain, idx, fixed, w13, w2, fused=fused) for fused in (None, True)]
    return found


def test_gradients_weights_halves_and_layers_over_domains() -> None:
    """Sums are added in another order than in one domain, so bits differ."""
    one = run_ranks(4, lambda group: _everything(group, None))
    several = run_ranks(4, lambda group: _everything(group, 2))
    for want, got in zip(one, several, strict=True):
        assert len(want) == len(got) == 13
        for first, second in zip(want, got, strict=True):
            torch.testing.assert_close(second, first, rtol=1e-4, atol=1e-4)
