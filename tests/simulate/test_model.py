"""Limits that any cost model of this algorithm must keep."""

from __future__ import annotations

from itertools import pairwise
from math import inf

import pytest

from moecomm.errors import BadInput
from moecomm.simulate.domain import MOST_FEW, Domain, Line, Load, Operation, load
from moecomm.simulate.layer import gemm_us, layer
from moecomm.simulate.model import Machine, cost, fan_out
from moecomm.simulate.nic import Nic
from moecomm.simulate.routing import Gate, spread

DISPATCH, COMBINE = Operation("dispatch", "flat"), Operation("combine", "flat", "y in the window")
OPERATIONS = (DISPATCH, COMBINE)
GATE = Gate(256, 8, 8, 4)
SIZES = (0, 1, 2, 7, 31, 32, 33, 64, 65, 128, 129, 255, 256, 257, 511, 512, 513, 600, 1024, 4096, 4097, 16384)
NO_LIMIT = Nic(inf, 0.0, inf)


@pytest.fixture(scope="module")
def domain() -> Domain:
    return load()


@pytest.mark.parametrize("operation", OPERATIONS)
def test_one_domain_is_the_line_of_the_domain(domain: Domain, operation: Operation) -> None:
    routed = spread(GATE, 1, 8)
    for tokens in SIZES:
        found = cost(operation, routed, tokens, 7392, Machine(domain, Nic()))
        sent = tokens * 7 * float(routed.ranks[0]) * 7392
        expected = domain.us(operation, Load(tokens, sent, tokens * 8 * float(routed.ranks[0])))
        assert found.us == pytest.approx(expected)
        assert found.slow_us == found.slow_bytes == found.latency_us == 0


@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize("domains", [2, 4, 16])
def test_a_nic_without_limits_leaves_nvlink(domain: Domain, operation: Operation, domains: int) -> None:
    routed = spread(GATE, domains, 8)
    for tokens in SIZES:
        ht = cost(operation, routed, tokens, 7392, Machine(domain, NO_LIMIT), algorithm="ht")
        assert ht.us == pytest.approx(domain.us(operation, fan_out(operation, routed, tokens, 7392)))
        ll = cost(operation, routed, tokens, 7392, Machine(domain, NO_LIMIT), algorithm="ll")
        assert ll.us == ll.nvlink_us


@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize("domains", [1, 2, 8, 128])
@pytest.mark.parametrize("algorithm", ["auto", "ht", "ll"])
def test_more_tokens_never_take_less(domain: Domain, operation: Operation, domains: int, algorithm: str) -> None:
    routed = spread(Gate(256, 8), domains, 8)
    times = [cost(operation, routed, t, 7392, Machine(domain, Nic()), algorithm=algorithm).us for t in SIZES]
    for less, more in pairwise(times):
        assert more >= less * (1 - 1e-12)


@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize("tokens", [1, 128, 4096])
def test_a_better_nic_never_takes_longer(domain: Domain, operation: Operation, tokens: int) -> None:
    routed = spread(GATE, 4, 8)

    def us(nic: Nic) -> float:
        return cost(operation, routed, tokens, 7392, Machine(domain, nic)).us

    by_speed = [us(Nic(gbs=gbs)) for gbs in (1, 12.5, 25, 50, 100, 400, inf)]
    by_messages = [us(Nic(mega_messages=rate)) for rate in (0.1, 1, 10, 215, inf)]
    by_latency = [us(Nic(latency_us=latency)) for latency in (100, 20, 8, 1, 0)]
    for times in (by_speed, by_messages, by_latency):
        assert times == sorted(times, reverse=True) and times[0] > times[-1]


@pytest.mark.parametrize("operation", OPERATIONS)
def test_no_tokens_cost_latencies_alone(domain: Domain, operation: Operation) -> None:
    routed = spread(GATE, 4, 8)
    for algorithm in ("ht", "ll"):
        found = cost(operation, routed, 0, 7392, Machine(domain, Nic()), algorithm=algorithm)
        start = domain.us(operation, Load(0, 0, 0))
        flights = 2 if (algorithm, operation.what) == ("ht", "dispatch") else 1
        assert found.slow_bytes == found.nvlink_bytes == found.slow_messages == 0
        assert found.us == pytest.approx(start + flights * Nic().latency_us, rel=1e-3)


def test_a_token_crosses_once_a_domain_or_once_a_rank(domain: Domain) -> None:
    routed = spread(GATE, 4, 8)
    machine = Machine(domain, Nic())
    ht, ll, per_expert = (
        cost(DISPATCH, routed, 128, 7392, machine, algorithm=algorithm, per_expert=each)
        for algorithm, each in (("ht", False), ("ll", False), ("ll", True))
    )
    assert ht.slow_bytes == pytest.approx(128 * 3 * float(routed.domains[0]) * 7392)
    assert ll.slow_bytes == pytest.approx(128 * 24 * float(routed.ranks[0]) * 7392)
    assert per_expert.slow_bytes == pytest.approx(128 * 8 * 3 / 4 * 7392)
    assert ht.slow_bytes < ll.slow_bytes < per_expert.slow_bytes
    assert ll.slow_messages == pytest.approx(2 * ll.slow_bytes / 7392)


def test_skew_loads_the_busiest(domain: Domain) -> None:
    machine = Machine(domain, Nic())
    times = [cost(DISPATCH, spread(Gate(256, 8), 4, 8, skew), 4096, 7392, machine).us for skew in (0, 0.25, 0.5, 1)]
    assert times == sorted(times) and times[-1] > 1.1 * times[0]
    everything = cost(DISPATCH, spread(Gate(256, 8), 4, 8, 1.0), 4096, 7392, machine)
    assert everything.nvlink_bytes == pytest.approx(4096 * 4 * 7 * 7392)  # into rank 0, from the 7 beside it


def test_auto_is_the_faster_for_few_and_ht_for_many(domain: Domain) -> None:
    routed, machine = spread(Gate(256, 8), 8, 8), Machine(domain, Nic())
    for tokens in SIZES:
        ht, ll, auto = (cost(DISPATCH, routed, tokens, 7392, machine, algorithm=a).us for a in ("ht", "ll", "auto"))
        assert auto == (min(ht, ll) if tokens <= MOST_FEW else ht)


def test_layer() -> None:
    domain = Domain("", {}, gemm_tflops=500.0, gemm_kept=0.75)
    found = layer(domain, 100, 200, 1000, parts=4)
    slowed = 1000 + 0.25 * 300
    assert (found.serial_us, found.overlapped_us) == (1300, pytest.approx(slowed + 300 / 4))
    assert layer(domain, 100, 200, 0).overlapped_us == 300
    assert layer(domain, 100, 200, 1000, parts=1).overlapped_us == 1300  # no overlap rather than a loss
    routed = spread(Gate(256, 8), 1, 8)
    many = gemm_us(domain, routed, 256, 4096, 7168, 2048)
    assert many == pytest.approx(4096 * 8 * 6 * 7168 * 2048 / 500e6)
    all_weights = 32 * 3 * 7168 * 2048 * 2 / 4800e3
    assert gemm_us(domain, routed, 256, 64, 7168, 2048) == pytest.approx(all_weights, rel=1e-3)
    one = gemm_us(domain, spread(Gate(256, 8), 1, 1), 256, 1, 7168, 2048)
    assert one == pytest.approx(8 * 3 * 7168 * 2048 * 2 / 4800e3)
    assert gemm_us(domain, routed, 256, 0, 7168, 2048) == 0


def test_a_slower_nvlink_counts_and_a_faster_one_does_not(domain: Domain) -> None:
    routed = spread(GATE, 1, 8)
    times = [cost(DISPATCH, routed, 4096, 7392, Machine(domain.with_nvlink(gbs), Nic())).us for gbs in (100, 160, 1e4)]
    assert times[0] > times[1] > times[2] == cost(DISPATCH, routed, 4096, 7392, Machine(domain, Nic())).us


@pytest.mark.parametrize("nic", [Nic(gbs=0), Nic(gbs=float("nan")), Nic(latency_us=-1), Nic(mega_messages=0)])
def test_no_such_nic(domain: Domain, nic: Nic) -> None:
    with pytest.raises(BadInput):
        cost(DISPATCH, spread(GATE, 2, 8), 1, 7392, Machine(domain, nic))


def test_operations_that_were_not_measured_are_refused() -> None:
    lines = {(DISPATCH, regime): Line(1.0, 1.0, 1.0, 0.0) for regime in ("few", "many")}
    with pytest.raises(BadInput, match="dispatch flat"):
        cost(COMBINE, spread(GATE, 1, 8), 1, 7392, Machine(Domain("", lines, 1.0, 1.0), Nic()))
