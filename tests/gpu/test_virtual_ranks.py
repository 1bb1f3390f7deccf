"""Several ranks on one GPU: the kernels against the reference, bit for bit, and how they fail.

`pytest tests/gpu --gpu-cases 10000` runs more random cases; under compute-sanitizer fewer are enough.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, get_args

import pytest
import torch

import moecomm
from moecomm.backends import lsa
from moecomm.backends.windows import local, vmm
from moecomm.base import packets
from moecomm.base.choices import ReplicaChoice
from moecomm.base.placement import replicated
from moecomm.testing import LocalBuffers, check_case, random_case
from moecomm.testing.cases import placed, random_placement, without_tokens

from ..slot_weights import drawn_weights, fill_weights, opened_weights

pytestmark = pytest.mark.gpu1

# Sizes of models as kernels see them, and odd ones.  The reference computes on the CPU: large sizes get few cases.
SIZES: list[dict[str, Any]] = [
    {"ranks": 1, "hidden": 64, "num_experts": 4, "topk": 2, "max_tokens": 40, "dtype": torch.float16},
    {"ranks": 2, "hidden": 8, "num_experts": 2, "topk": 1, "max_tokens": 17, "dtype": torch.bfloat16},
    {"ranks": 3, "hidden": 20, "num_experts": 11, "topk": 3, "max_tokens": 9, "dtype": torch.float32},
    {"ranks": 4, "hidden": 144, "num_experts": 15, "topk": 6, "max_tokens": 50, "dtype": torch.bfloat16},
    {"ranks": 8, "hidden": 272, "num_experts": 64, "topk": 32, "max_tokens": 40, "dtype": torch.bfloat16},
    {"ranks": 4, "hidden": 1040, "num_experts": 1024, "topk": 13, "max_tokens": 100, "dtype": torch.float16},
    {"ranks": 2, "hidden": 16384, "num_experts": 8, "topk": 2, "max_tokens": 33, "dtype": torch.float32},
    {"ranks": 4, "hidden": 7168, "num_experts": 256, "topk": 8, "max_tokens": 64, "dtype": torch.bfloat16},
]
# Domains cut out of one: ranks of others are put to.
DOMAINS: list[dict[str, Any]] = [
    {
        "ranks": 4,
        "domain_ranks": 2,
        "hidden": 144,
        "num_experts": 15,
        "topk": 6,
        "max_tokens": 50,
        "dtype": torch.bfloat16,
    },
    {
        "ranks": 8,
        "domain_ranks": 4,
        "hidden": 272,
        "num_experts": 64,
        "topk": 8,
        "max_tokens": 40,
        "dtype": torch.float16,
    },
    {
        "ranks": 8,
        "domain_ranks": 2,
        "hidden": 64,
        "num_experts": 8,
        "topk": 3,
        "max_tokens": 100,
        "dtype": torch.float32,
    },
    {
        "ranks": 6,
        "domain_ranks": 2,
        "hidden": 64,
        "num_experts": 12,
        "topk": 12,
        "max_tokens": 40,
        "dtype": torch.bfloat16,
    },
]
PAIR: dict[str, Any] = {
    "ranks": 2,
    "hidden": 64,
    "num_experts": 4,
    "topk": 2,
    "max_tokens": 32,
    "dtype": torch.bfloat16,
}
LONG: dict[str, Any] = {
    "ranks": 2,
    "hidden": 512,
    "num_experts": 8,
    "topk": 2,
    "max_tokens": 500,
    "dtype": torch.bfloat16,
}
SMALL = 4  # the first of them take most of the cases
GOOD = 5  # the case of good_round


def random_seeds(sizes: dict[str, Any], cases: int, first: int = 0) -> range:
    """The cases that some sizes get, of `cases` in all."""
    share = 20 if sizes is LONG else SMALL if sizes in SIZES[:SMALL] else 50 * SMALL
    return range(first, first + cases // share + (share != SMALL))


def of_cases(sizes: dict[str, Any]) -> dict[str, Any]:
    """Return the sizes that a case depends on."""
    return {name: size for name, size in sizes.items() if name != "domain_ranks"}


_room = packets.room


def packet_room(sizes: dict[str, Any]) -> Callable[[int, int, int], int]:
    """Stand in for moecomm.base.packets.room: room for a third of the tokens, so that only some ranks send packets.

    With one or two ranks: room for all, or for none.
    """
    if sizes["ranks"] == 1:
        return _room
    if sizes["ranks"] == 2 and sizes["hidden"] < 16384:
        return lambda ranks, max_tokens, row: 0
    return lambda ranks, max_tokens, row: _room(ranks, -(-max_tokens // 3), row)


def direct_bytes(ranks: int, max_tokens: int, row: int) -> int:
    """In place of those of a backend: for half of the tokens."""
    return max_tokens // 2 * -(-(row + 16) // 128) * 128


def check_cases(sizes: dict[str, Any], numbers: Sequence[int], config: pytest.Config) -> None:
    """Check random cases on the same ranks; under a sanitizer, where no output is freed, each on ranks of its own."""
    alone = config.getoption("--under-sanitizer")
    for some in [[number] for number in numbers] if alone else [numbers]:
        with LocalBuffers(**sizes, backend="lsa", device=0, timeout_s=20) as ranks:
            for number in some:
                check_case(ranks, random_case(number, **of_cases(sizes), few_kernels=True))


@pytest.fixture(autouse=True)
def whole_windows(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make windows one mapping under a sanitizer, which takes a copy across two of them for an invalid one."""
    if request.config.getoption("--under-sanitizer"):
        parts_of = vmm.parts_of
        monkeypatch.setattr(local, "parts_of", lambda *window: vmm.Parts(sum(parts_of(*window)), 0))


@pytest.mark.timeout(900)
@pytest.mark.parametrize("sizes", SIZES, ids=lambda s: f"R{s['ranks']}-H{s['hidden']}-E{s['num_experts']}-K{s['topk']}")
def test_random_cases_match_the_reference(
    sizes: dict[str, Any], request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packets, "room", packet_room(sizes))
    cases, seed = request.config.getoption("--gpu-cases"), request.config.getoption("--seed")
    check_cases(sizes, random_seeds(sizes, cases, seed * 1_000_000), request.config)


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("sizes", "balanced"),
    [(SIZES[3], False), (SIZES[7], False), (DOMAINS[0], False), (SIZES[3], True), (SIZES[7], True)],
    ids=["small", "model", "domains", "small-balanced", "model-balanced"],
)
def test_placements(
    sizes: dict[str, Any], balanced: bool, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Experts anywhere, with replicas, and elsewhere in every third round."""
    if "domain_ranks" not in sizes:
        monkeypatch.setattr(packets, "room", packet_room(sizes))
    slots = -(-sizes["num_experts"] // sizes["ranks"]) + 2
    drawn: dict[str, Any] = {"ranks": sizes["ranks"], "num_experts": sizes["num_experts"], "slots": slots}
    drawn["balanced"] = balanced
    options = {"backend": "lsa", "device": 0, "timeout_s": 20}
    with LocalBuffers(**sizes, **options, placement=random_placement(0, **drawn)) as ranks:
        for number in random_seeds(sizes, request.config.getoption("--gpu-cases")):
            check_case(ranks, placed(random_case(number, **of_cases(sizes), few_kernels=True)))
            if number % 3 == 2:
                ranks.set_placement(random_placement(number, **drawn))


def skewed(seed: int, ranks: int, experts: int, tokens: int, topk: int) -> list[torch.Tensor]:
    """Ids of all ranks, of which a few experts are in most tokens."""
    g = torch.Generator().manual_seed(seed)
    load = torch.rand(experts, generator=g) ** (1, 4, 12)[seed % 3] + 1e-6
    return [torch.multinomial(load.expand(tokens, -1), topk, generator=g) for _ in range(ranks)]


@pytest.mark.timeout(900)
@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize(
    ("count", "experts", "slots", "hidden"), [(4, 15, 6, 144), (4, 256, 70, 512), (8, 64, 12, 256)]
)
def test_layers_with_copies_are_those_of_the_replicated_placement(
    count: int, experts: int, slots: int, hidden: int, fused: bool
) -> None:
    """A Buffer that has the copies all along gives the same bits, at loads that change from round to round."""
    tokens, topk, inner = 100, 4, 72
    sizes: dict[str, Any] = {"ranks": count, "hidden": hidden, "num_experts": experts, "topk": topk}
    sizes |= {"max_tokens": tokens, "backend": "lsa", "device": 0, "timeout_s": 20, "capacity_factor": float(count)}
    g = torch.Generator().manual_seed(0)
    whole = drawn_weights(g, experts, inner, hidden)
    placement = random_placement(0, ranks=count, num_experts=experts, slots=slots, balanced=True)
    made = 0
    with LocalBuffers(**sizes, placement=placement) as ranks, LocalBuffers(**sizes, placement=placement) as others:
        weights, theirs = opened_weights(ranks, whole), opened_weights(others, whole)
        for seed in range(12):
            ids = skewed(seed, count, experts, tokens, topk)
            counts = torch.stack([torch.bincount(one.flatten(), minlength=experts) for one in ids])
            after = replicated(placement, counts)
            made += int((after.experts != placement.experts).sum())
            others.set_placement(after)
            for rank, one in enumerate(theirs):
                fill_weights(one, whole, after.experts[rank].tolist())
            x = [torch.randn(tokens, hidden, generator=g).bfloat16().cuda() for _ in ids]
            outs = [
                of.moe(
                    [
                        {"x": x[rank], "topk_idx": ids[rank].cuda(), "topk_weights": None, "fused": fused, **how}
                        | {name: held[rank][name] for name in whole}
                        for rank in range(count)
                    ]
                )
                for of, held, how in ((ranks, weights, {"balance": "replicate"}), (others, theirs, {}))
            ]
            ranks.check(), others.check()
            for rank, (out, want) in enumerate(zip(*outs, strict=True)):
                assert torch.equal(out, want), (seed, rank)
                for name in whole:
                    got = weights[rank][name].view(torch.int16)[(after.experts[rank] >= 0).cuda()]
                    expected = theirs[rank][name].view(torch.int16)[(after.experts[rank] >= 0).cuda()]
                    assert torch.equal(got, expected), (seed, rank, name)
        for one in (*weights, *theirs):
            one.close()
    assert made > 0


@pytest.mark.parametrize("fused", [True, False])
def test_graphs_copy_experts_and_write_weights_anew(fused: bool) -> None:
    """Replays with other ids, of a layer behind which each rank changes its weights at once."""
    count, experts, hidden, inner, tokens = 2, 6, 64, 32, 40
    placement = moecomm.Placement([[0, 1, 2], [3, 4, 5]], slots=5, choice="balanced")
    sizes: dict[str, Any] = {"ranks": count, "hidden": hidden, "num_experts": experts, "topk": 1, "max_tokens": tokens}
    g = torch.Generator().manual_seed(1)
    whole = {
        "w13": torch.randn(experts, 2 * inner, hidden, generator=g).bfloat16() / 8,
        "w2": torch.randn(experts, hidden, inner, generator=g).bfloat16() / 8,
    }
    x = [torch.randn(tokens, hidden, generator=g).bfloat16().cuda() for _ in range(count)]
    ids = [torch.zeros(tokens, 1, dtype=torch.int64).cuda() for _ in range(count)]
    with LocalBuffers(
        **sizes, backend="lsa", device=0, timeout_s=20, placement=placement, capacity_factor=2.0
    ) as ranks:
        weights = opened_weights(ranks, whole)
        given = [
            {"x": x[rank], "topk_idx": ids[rank], "topk_weights": None, "fused": fused, "balance": "replicate"}
            | {name: weights[rank][name] for name in whole}
            for rank in range(count)
        ]
        ranks.moe(given)
        torch.cuda.synchronize()
        graphs, outs = [], []
        for rank, (buffer, stream) in enumerate(zip(ranks.buffers, ranks.streams, strict=True)):
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, stream=stream):
                outs.append(buffer.moe(**given[rank]))
                weights[rank]["w2"].mul_(-1)
            graphs.append(graph)
        for nth in range(20):
            for rank, one in enumerate(skewed(nth, count, experts, tokens, 1)):
                ids[rank].copy_(one)
            torch.cuda.synchronize()
            for graph, stream in zip(graphs, ranks.streams, strict=True):
                with torch.cuda.stream(stream):
                    graph.replay()
            torch.cuda.synchronize()
            for rank, out in enumerate(outs):
                w13, w2 = (whole[name].cuda().float()[ids[rank][:, 0]] for name in ("w13", "w2"))
                gate, up = torch.einsum("th,tih->ti", x[rank].float(), w13).chunk(2, dim=1)
                want = torch.einsum("ti,thi->th", torch.nn.functional.silu(gate) * up, w2) * (-1) ** nth
                torch.testing.assert_close(out.float(), want, rtol=2**-5, atol=2**-5)
        ranks.check()
        del graphs, outs
        for one in weights:
            one.close()


@pytest.mark.timeout(900)
@pytest.mark.parametrize("sizes", [SIZES[3], SIZES[7], DOMAINS[0]], ids=["small", "model", "domains"])
def test_ranks_without_experts_or_tokens(
    sizes: dict[str, Any], request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tokens on two ranks and experts on the two others."""
    if "domain_ranks" not in sizes:
        monkeypatch.setattr(packets, "room", packet_room(sizes))
    half = sizes["num_experts"] // 2
    apart = moecomm.Placement([[], range(half), [], range(half, sizes["num_experts"])])
    with LocalBuffers(**sizes, backend="lsa", device=0, timeout_s=20, placement=apart) as ranks:
        for number in random_seeds(sizes, request.config.getoption("--gpu-cases")):
            case = placed(random_case(number, **of_cases(sizes), few_kernels=True))
            check_case(ranks, without_tokens(case, (1, 3)))


# Kernels of all ranks are resident at once: of 132 multiprocessors, each of 64 ranks has two.
MANY: list[dict[str, Any]] = [
    {"ranks": ranks, "hidden": 64, "num_experts": 2 * ranks, "topk": 4, "max_tokens": 8, "dtype": torch.bfloat16}
    for ranks in (16, 32, 64)
]


@pytest.mark.timeout(900)
@pytest.mark.parametrize("domains", [1, 4])
@pytest.mark.parametrize("sizes", MANY, ids=lambda s: f"R{s['ranks']}")
def test_many_ranks_match_the_reference(sizes: dict[str, Any], domains: int) -> None:
    near = sizes["ranks"] // domains
    with LocalBuffers(
        **sizes, domain_ranks=near, window_bytes=16 << 20, backend="lsa", device=0, timeout_s=60
    ) as ranks:
        seen: set[str] = set()
        for number in range(40):
            case = random_case(number, **sizes, few_kernels=True)
            if case.layout not in seen:
                check_case(ranks, case)
                seen.add(case.layout)
        assert seen == {"flat", "expert", "batched"}


@pytest.mark.timeout(900)
def test_an_emulated_nic_delays_what_crosses(monkeypatch: pytest.MonkeyPatch) -> None:
    """The bits are the reference's, and no round takes less than the latency, here 1 ms."""
    monkeypatch.setenv("MOECOMM_NIC", "50,1000,10")
    sizes = DOMAINS[0]
    with LocalBuffers(**sizes, backend="lsa", device=0, timeout_s=60) as ranks:
        assert "emulated NIC of 50 GB/s, 1000 us, 10 M messages/s" in ranks.buffers[0].backend
        for number in range(10):
            begin = time.perf_counter()
            check_case(ranks, random_case(number, **of_cases(sizes), few_kernels=True))
            assert time.perf_counter() - begin > 1e-3


@pytest.mark.timeout(300)
def test_staging_goes_around_a_small_ring(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    monkeypatch.setattr(lsa, "_STAGING_BYTES", 1)
    monkeypatch.setattr(packets, "room", packet_room(LONG))
    with LocalBuffers(**LONG, backend="lsa", device=0, timeout_s=20) as ranks:
        assert ranks.buffers[0].rounds.session.context.shape.ring_tokens == 32
        for buffer in ranks.buffers:
            monkeypatch.setattr(buffer.rounds.session, "reduced_rows_in_heap", False)
        for number in random_seeds(LONG, request.config.getoption("--gpu-cases")):
            check_case(ranks, random_case(number, **LONG, few_kernels=True))


@pytest.mark.timeout(900)
@pytest.mark.parametrize("sizes", DOMAINS, ids=lambda s: f"R{s['ranks']}-L{s['domain_ranks']}")
def test_random_cases_across_domains(
    sizes: dict[str, Any], request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows of some ranks go direct to those of other domains, of others through their forwarders."""
    monkeypatch.setattr(lsa, "direct_bytes", direct_bytes)
    cases, seed = request.config.getoption("--gpu-cases"), request.config.getoption("--seed") * 1_000_000
    check_cases(sizes, range(seed, seed + cases // len(DOMAINS)), request.config)


@pytest.mark.timeout(300)
def test_rings_across_domains(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    monkeypatch.setattr(lsa, "_STAGING_BYTES", 1)
    monkeypatch.setattr(lsa, "direct_bytes", lambda *sizes: 0)  # else a ring has room for what goes straight
    with LocalBuffers(**LONG, domain_ranks=1, backend="lsa", device=0, timeout_s=20) as ranks:
        assert ranks.buffers[0].rounds.session.context.shape.ring_tokens < LONG["max_tokens"] / 4
        for number in random_seeds(LONG, request.config.getoption("--gpu-cases")):
            check_case(ranks, random_case(number, **LONG, few_kernels=True))


@pytest.fixture(params=[2, 1], ids=["one-domain", "two-domains"])
def pair(request: pytest.FixtureRequest) -> Any:
    with LocalBuffers(**PAIR, domain_ranks=request.param, backend="lsa", device=0, timeout_s=2) as ranks:
        yield ranks


def call(seed: int, tokens: int = 20) -> dict[str, Any]:
    g = torch.Generator().manual_seed(seed)
    return {
        "x": torch.randn(tokens, 64, generator=g).bfloat16().cuda(),
        "topk_idx": torch.rand(tokens, 4, generator=g).argsort(dim=1)[:, :2].cuda(),
        "topk_weights": torch.rand(tokens, 2, generator=g).cuda(),
    }


def good_round(ranks: LocalBuffers) -> None:
    check_case(ranks, random_case(GOOD, **PAIR, few_kernels=True))


@pytest.mark.parametrize("bad", [4, -2, 1 << 40])
def test_a_bad_id_is_reported_on_every_rank_and_stored_nowhere(pair: LocalBuffers, bad: int) -> None:
    calls = [call(0), call(1)]
    calls[1]["topk_idx"][3, 1] = bad
    routed = pair.dispatch(calls)  # no wait: the error comes later
    for buffer, here in zip(pair.buffers, routed, strict=True):
        with pytest.raises(moecomm.BadInput) as caught:
            buffer.check()
        assert (caught.value.argument, caught.value.rank) == ("topk_idx", 1) and str(bad) in str(caught.value)
        assert int(here.num_rows) == 0 and here.tokens_per_expert.tolist() == [0, 0]
        buffer.check()
    good_round(pair)


def test_too_many_rows_are_reported(pair: LocalBuffers) -> None:
    calls = [{**call(0), "max_rows": 100}, {**call(1), "max_rows": 11}]
    pair.dispatch(calls)
    for buffer in pair.buffers:
        with pytest.raises(moecomm.BadInput) as caught:
            buffer.check()
        assert (caught.value.argument, caught.value.rank) == ("max_rows", 1)
    good_round(pair)


def test_handles_of_different_dispatches_are_reported(pair: LocalBuffers) -> None:
    calls = [call(0), call(1)]
    first, second = pair.dispatch(calls), pair.dispatch(calls)
    mixed = [first[0], second[1]]
    for run, given in (
        (pair.combine, [{"y": here.x, "handle": here.handle} for here in mixed]),
        (pair.dispatch, [{"x": c["x"], "handle": here.handle} for c, here in zip(calls, mixed, strict=True)]),
    ):
        run(given)
        for rank, buffer in enumerate(pair.buffers):
            with pytest.raises(moecomm.Mismatch) as caught:
                buffer.check()
            assert (caught.value.field, caught.value.rank) == ("handle", 1 - rank)
            with pytest.raises(moecomm.OutOfStep):
                buffer.check()
            buffer.rounds.recovered()  # as if the ranks had agreed where they are
    good_round(pair)


def test_a_rank_that_does_not_come_is_a_timeout_and_the_context_lives(pair: LocalBuffers) -> None:
    start = time.monotonic()
    with pytest.raises(moecomm.Timeout) as caught:
        pair.buffers[0].dispatch(**call(0), sync=True)
    assert time.monotonic() - start < 3, "timeout_s + 1 s"
    assert (caught.value.rank, caught.value.peer, caught.value.phase, caught.value.op) == (0, 1, "header", "dispatch")
    with pytest.raises(moecomm.Timeout):
        pair.buffers[0].dispatch(**call(0))
    assert torch.ones(5, device="cuda").sum().item() == 5, "the CUDA context lives"
    with LocalBuffers(**PAIR, backend="lsa", device=0, timeout_s=2) as fresh:
        good_round(fresh)


@pytest.mark.timeout(300)
def test_rounds_are_exact_after_each_of_a_hundred_timeouts() -> None:
    with LocalBuffers(**PAIR, backend="lsa", device=0, timeout_s=20) as beside:
        good_round(beside)
        for _ in range(100):
            with LocalBuffers(**PAIR, backend="lsa", device=0, timeout_s=1) as late, pytest.raises(moecomm.Timeout):
                late.buffers[0].dispatch(**call(0), sync=True)
            assert torch.ones(5, device="cuda").sum().item() == 5, "the CUDA context lives"
            good_round(beside)
    with LocalBuffers(**PAIR, backend="lsa", device=0, timeout_s=2) as fresh:
        good_round(fresh)


def test_abort_ends_a_waiting_kernel(pair: LocalBuffers) -> None:
    pair.buffers[0].dispatch(**call(0))
    time.sleep(0.2)
    start = time.monotonic()
    pair.buffers[0].abort()
    with pytest.raises(moecomm.Aborted):
        pair.buffers[0].check()
    assert time.monotonic() - start < 0.5


def test_a_graph_replays_with_other_inputs(pair: LocalBuffers) -> None:
    given = [call(0), call(1)]
    for buffer, mine in zip(pair.buffers, given, strict=True):  # compile before the capture
        del buffer, mine
    routed = pair.dispatch(given)
    pair.combine([{"y": r.x, "handle": r.handle} for r in routed])
    torch.cuda.synchronize()
    graphs, outs = [], []
    for buffer, mine, stream in zip(pair.buffers, given, pair.streams, strict=True):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            here = buffer.dispatch(**mine)
            outs.append(buffer.combine(here.x, here.handle))
        graphs.append(graph)
    for seed in range(200):
        fresh = [call(2 * seed), call(2 * seed + 1)]
        for mine, other in zip(given, fresh, strict=True):
            for name, value in mine.items():
                value.copy_(other[name])
        torch.cuda.synchronize()
        for graph, stream in zip(graphs, pair.streams, strict=True):
            with torch.cuda.stream(stream):
                graph.replay()
        torch.cuda.synchronize()
        if seed % 10 == 0:  # eager rounds between replays must not disturb them, nor be disturbed
            eager = pair.dispatch(fresh)
            eager_outs = pair.combine([{"y": r.x, "handle": r.handle} for r in eager])
            torch.cuda.synchronize()
            for out, want in zip(outs, eager_outs, strict=True):
                assert torch.equal(out, want)
        for buffer, out, mine in zip(pair.buffers, outs, fresh, strict=True):
            want = mine["x"].float() * mine["topk_weights"].sum(dim=1, keepdim=True)
            torch.testing.assert_close(out.float(), want, rtol=2**-7, atol=2**-7)
            buffer.check()


@pytest.mark.parametrize("choice", get_args(ReplicaChoice))
def test_a_graph_replays_with_other_placements(choice: ReplicaChoice) -> None:
    """Rows go where experts are at the replay, and sums stay."""
    held = [[[0, 1, 2], [3]], [[3, 2], [0, 1, 1]], [[2, 0, 2], [1, 3, 0]], [[], [0, 1, 2, 3]]]
    placements = [moecomm.Placement(lists, slots=4, choice=choice) for lists in held]
    with LocalBuffers(**PAIR, backend="lsa", device=0, timeout_s=20, placement=placements[0]) as pair:
        given = [call(0), call(1)]
        routed = pair.dispatch(given)
        pair.combine([{"y": r.x, "handle": r.handle} for r in routed])
        torch.cuda.synchronize()
        graphs, heres, outs = [], [], []
        for buffer, mine, stream in zip(pair.buffers, given, pair.streams, strict=True):
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, stream=stream):
                heres.append(buffer.dispatch(**mine))
                outs.append(buffer.combine(heres[-1].x, heres[-1].handle))
            graphs.append(graph)
        for nth in range(12):
            pair.set_placement(placement := placements[nth % 4])
            for graph, stream in zip(graphs, pair.streams, strict=True):
                with torch.cuda.stream(stream):
                    graph.replay()
            torch.cuda.synchronize()
            ids = [mine["topk_idx"].cpu() for mine in given]
            sent = torch.stack([torch.bincount(one[one >= 0], minlength=4) for one in ids])
            told = {"counts": sent} if choice == "balanced" else {}
            slots = torch.cat([placement.slots_of(one, rank, **told).flatten() for rank, one in enumerate(ids)])
            counts = torch.cat([here.tokens_per_expert.cpu() for here in heres])
            assert counts.tolist() == torch.bincount(slots[slots >= 0], minlength=8).tolist()
            for out, mine in zip(outs, given, strict=True):
                want = mine["x"].float() * mine["topk_weights"].sum(dim=1, keepdim=True)
                torch.testing.assert_close(out.float(), want, rtol=2**-7, atol=2**-7)
        pair.check()


def test_graphs_of_ranks_without_experts_or_tokens() -> None:
    """Two micro-batches in flight: the rows of one are at the experts while those of the other leave."""
    apart = moecomm.Placement([[], [0, 1, 2, 3]])
    with LocalBuffers(**PAIR, backend="lsa", device=0, timeout_s=20, placement=apart) as pair:
        given = [[call(0), call(1, 0)], [call(2), call(3, 0)]]
        for _ in range(2):  # compiles before the capture
            first = pair.dispatch_end(pair.dispatch_begin(given[0]))
            second = pair.dispatch_begin(given[1])
            pair.combine([{"y": r.x, "handle": r.handle} for r in first])
            pair.combine([{"y": r.x, "handle": r.handle} for r in pair.dispatch_end(second)])
        torch.cuda.synchronize()
        graphs, outs = [], []
        for rank, (buffer, stream) in enumerate(zip(pair.buffers, pair.streams, strict=True)):
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, stream=stream):
                here = buffer.dispatch_end(buffer.dispatch_begin(**given[0][rank]))
                other = buffer.dispatch_begin(**given[1][rank])
                out = buffer.combine(here.x, here.handle)
                other = buffer.dispatch_end(other)
                outs.append((out, buffer.combine(other.x, other.handle)))
            assert (len(here.x) == 1) == (rank == 0)
            graphs.append(graph)
        for seed in range(50):
            for batch, calls in enumerate(given):
                for name, value in call(2 * seed + batch).items():
                    calls[0][name].copy_(value)
            torch.cuda.synchronize()
            for graph, stream in zip(graphs, pair.streams, strict=True):
                with torch.cuda.stream(stream):
                    graph.replay()
            torch.cuda.synchronize()
            for found, (mine, _) in zip(outs[0], given, strict=True):
                want = mine["x"].float() * mine["topk_weights"].sum(dim=1, keepdim=True)
                torch.testing.assert_close(found.float(), want, rtol=2**-7, atol=2**-7)
        assert [len(found) for found in outs[1]] == [0, 0]
        pair.check()


def test_rows_that_are_not_in_use_say_so_in_every_replay(pair: LocalBuffers) -> None:
    def fresh(seed: int) -> dict[str, Any]:
        g, made = torch.Generator().manual_seed(seed), call(seed)
        dropped = (torch.rand(20, 2, generator=g) < seed % 10 / 9).cuda()  # of all tokens, of some, of none
        return {**made, "topk_idx": torch.where(dropped, -1, made["topk_idx"]).contiguous()}

    given = [fresh(0), fresh(1)]
    options: dict[str, Any] = {"layout": "flat", "max_rows": 40, "sync": False}
    pair.dispatch([{**mine, **options} for mine in given])  # compiles before the capture
    torch.cuda.synchronize()
    graphs, routed = [], []
    for buffer, mine, stream in zip(pair.buffers, given, pair.streams, strict=True):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            routed.append(buffer.dispatch(**mine, **options))
        graphs.append(graph)
    seen = set()
    for seed in range(100):
        for rank, mine in enumerate(given):
            for name, value in fresh(2 * seed + rank).items():
                mine[name].copy_(value)
        torch.cuda.synchronize()
        for graph, stream in zip(graphs, pair.streams, strict=True):
            with torch.cuda.stream(stream):
                graph.replay()
        torch.cuda.synchronize()
        for here in routed:
            used = int(here.num_rows)
            assert bool((here.topk_idx[:used] >= 0).any(dim=1).all())
            assert bool((here.topk_idx[used:] == -1).all()) and not here.topk_weights[used:].any()
            seen.add(used)
    assert len(seen) > 5 and max(seen) > 0


def test_combines_one_after_the_other_with_a_rank_that_wants_nothing(pair: LocalBuffers) -> None:
    """A rank without tokens is through with a combine before its peer has looked whether the last one was drained."""
    mine = [call(0), call(1, 0)]
    routed = pair.dispatch(mine)
    want = mine[0]["x"].float() * mine[0]["topk_weights"].sum(dim=1, keepdim=True)
    for _ in range(300):
        outs = [pair.combine([{"y": r.x, "handle": r.handle} for r in routed]) for _ in range(3)]
        pair.check()
        for out in outs:
            torch.testing.assert_close(out[0].float(), want, rtol=2**-7, atol=2**-7)
            assert torch.equal(out[0], outs[0][0])


@pytest.mark.parametrize("few", [True, False])
def test_weights_of_the_source_ranks(few: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Other weights in every combine, and those of the dispatch; then a source rank that does not come."""
    if not few:
        monkeypatch.setattr(packets, "room", lambda ranks, max_tokens, row: 0)
    with LocalBuffers(**PAIR, backend="lsa", device=0, timeout_s=2) as ranks:
        mine = [call(0), call(1, 7)]
        routed = ranks.dispatch(mine)
        rows = [{"y": r.x, "handle": r.handle} for r in routed]
        first = ranks.combine(rows)
        for seed in range(100):
            g = torch.Generator().manual_seed(seed)
            given = [torch.randn(c["topk_weights"].shape, generator=g).cuda() for c in mine]
            by_source_rank = ranks.combine([{**r, "topk_weights": w} for r, w in zip(rows, given, strict=True)])
            by_dispatch = ranks.combine(rows)
            carried = ranks.dispatch([{**c, "topk_weights": w} for c, w in zip(mine, given, strict=True)])
            want = ranks.combine([{"y": r.x, "handle": c.handle} for r, c in zip(routed, carried, strict=True)])
            for out, right, same, before in zip(by_source_rank, want, by_dispatch, first, strict=True):
                assert torch.equal(out, right) and torch.equal(same, before)
        ranks.check()
        ranks.buffers[0].combine(**rows[0], topk_weights=mine[0]["topk_weights"])
        with pytest.raises(moecomm.Timeout) as caught:
            ranks.buffers[0].check()
        assert (caught.value.peer, caught.value.phase, caught.value.op) == (1, "header", "combine")


def test_cupy_arrays_come_back_as_cupy_arrays(pair: LocalBuffers) -> None:
    cupy = pytest.importorskip("cupy")
    with moecomm.Buffer(
        hidden=64, num_experts=4, topk=2, max_tokens=32, dtype=torch.float32, backend="lsa", device=0
    ) as buffer:
        mine = call(0)
        given = {name: cupy.from_dlpack(value.float() if name == "x" else value) for name, value in mine.items()}
        routed = buffer.dispatch(**given, sync=True)
        assert isinstance(routed.x, cupy.ndarray)
        out = buffer.combine(routed.x, routed.handle)
        assert isinstance(out, cupy.ndarray)
        want = mine["x"].float() * mine["topk_weights"].sum(dim=1, keepdim=True)
        torch.testing.assert_close(torch.from_dlpack(out), want)


def test_two_rounds_in_flight_and_other_streams(pair: LocalBuffers) -> None:
    for seed in range(20):
        a = pair.dispatch([call(seed), call(seed + 1)])
        b = pair.dispatch([call(seed + 2, 7), call(seed + 3, 0)])
        out_a = pair.combine([{"y": r.x, "handle": r.handle} for r in a])
        out_b = pair.combine([{"y": r.x, "handle": r.handle} for r in b])
        pair.streams = [torch.cuda.Stream() for _ in range(2)]  # on another stream rounds stay in order
        torch.cuda.synchronize()
        for outs, calls in ((out_a, (call(seed), call(seed + 1))), (out_b, (call(seed + 2, 7), call(seed + 3, 0)))):
            for out, mine in zip(outs, calls, strict=True):
                want = mine["x"].float() * mine["topk_weights"].sum(dim=1, keepdim=True)
                torch.testing.assert_close(out.float(), want, rtol=2**-7, atol=2**-7)
