"""Limits that any cost model of this algorithm must keep."""

from __future__ import annotations

from dataclasses import replace
from math import inf, sqrt
from statistics import NormalDist, fmean

import pytest
import torch

from moecomm.errors import BadInput
from moecomm.router import MODELS
from moecomm_bench.ours import BF16_WIRE, FP32_WIRE
from moecomm_bench.simulate.direct import Crossing, DirectLine
from moecomm_bench.simulate.domain import Domain, DomainLoad, Line, Operation, load
from moecomm_bench.simulate.layer import gemm_us, layer
from moecomm_bench.simulate.model import Machine, Rows, cost, fan_out
from moecomm_bench.simulate.nic import ModelNic
from moecomm_bench.simulate.predict import SimulatedCase, row
from moecomm_bench.simulate.routing import DrawnGate, spread
from moecomm_bench.simulate.rows import bytes_of, lines_of, runs, slow_bytes_of

DISPATCH, COMBINE = Operation("dispatch", "flat"), Operation("combine", "flat", "y in the window")
EXACT = Operation("combine", "expert", FP32_WIRE)
OPERATIONS = (DISPATCH, COMBINE)
GATE = DrawnGate(256, 8, 8, 4)
ROWS = Rows(7392, lines_of(DISPATCH, "fp8", 7168, 8))
PLAIN = Rows(7392, joined=False, headers=False)  # of another library: nothing beside them
SIZES = (0, 1, 2, 7, 31, 32, 33, 64, 65, 128, 129, 255, 256, 257, 511, 512, 513, 600, 1024, 4096, 4097, 16384)
NO_LIMIT = ModelNic(inf, 0.0, inf)


@pytest.fixture(scope="module")
def domain() -> Domain:
    return load()


@pytest.mark.parametrize("operation", OPERATIONS)
def test_one_domain_is_the_line_of_the_domain(domain: Domain, operation: Operation) -> None:
    routed = spread(GATE, 1, 8)
    wanted = float(routed.ranks[0])
    words = 8 * (256 + 8) if operation.what == "dispatch" else 8
    for tokens in SIZES:
        found = cost(operation, routed, tokens, ROWS, Machine(domain, ModelNic(), num_sms=64))
        few = tokens <= 512
        assert ROWS.lines is not None and ROWS.lines.carry(tokens, 8, 8) == few
        sent = tokens * 7 * wanted * (64 * 128 if few else 7392)
        load_ = DomainLoad(tokens, sent, tokens * 8 * wanted, 7392, 0.0, 64, words, few)
        assert found.us == pytest.approx(domain.us(operation, load_)) and found.blocks == 64
        assert found.slow_us == found.slow_bytes == found.latency_us == 0


@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize("domains", [2, 4, 16])
def test_a_nic_without_limits_leaves_nvlink(domain: Domain, operation: Operation, domains: int) -> None:
    routed = spread(GATE, domains, 8)
    for tokens in SIZES:
        ht = cost(operation, routed, tokens, ROWS, Machine(domain, NO_LIMIT), algorithm="ht")
        assert ht.us == pytest.approx(domain.us(operation, fan_out(operation, routed, tokens, ROWS, ht.blocks)))
        ll = cost(operation, routed, tokens, PLAIN, Machine(domain, NO_LIMIT), algorithm="ll")
        assert ll.us == ll.nvlink_us
        ours = cost(operation, routed, tokens, ROWS, Machine(domain, NO_LIMIT), algorithm="ll")
        assert ours.slow_us == 0 and ours.us >= ours.latency_us + ours.nvlink_us


@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize("domains", [1, 2, 8, 128])
@pytest.mark.parametrize("algorithm", ["ht", "ll"])
def test_more_tokens_never_take_less(domain: Domain, operation: Operation, domains: int, algorithm: str) -> None:
    routed = spread(DrawnGate(256, 8), domains, 8)
    machine = Machine(domain, ModelNic(), num_sms=64)  # the table may give more tokens more blocks, or fewer
    times = [cost(operation, routed, t, ROWS, machine, algorithm=algorithm).us for t in SIZES]
    for (tokens, less), more in zip(zip(SIZES, times, strict=True), times[1:], strict=False):
        slack = 0.03 if tokens == 512 else 1e-12  # the most that packets carry, by another line
        assert more >= less * (1 - slack)


@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize("tokens", [1, 128, 4096])
def test_a_better_nic_never_takes_longer(domain: Domain, operation: Operation, tokens: int) -> None:
    routed = spread(GATE, 4, 8)

    def us(nic: ModelNic) -> float:
        return cost(operation, routed, tokens, ROWS, Machine(domain, nic)).us

    by_speed = [us(ModelNic(gbs=gbs)) for gbs in (1, 12.5, 25, 50, 100, 400, inf)]
    by_messages = [us(ModelNic(mega_messages=rate)) for rate in (0.1, 1, 10, 215, inf)]
    by_latency = [us(ModelNic(latency_us=latency)) for latency in (100, 20, 8, 1, 0)]
    for times in (by_speed, by_messages, by_latency):
        assert times == sorted(times, reverse=True) and times[0] > times[-1]


@pytest.mark.parametrize("operation", OPERATIONS)
def test_no_tokens_cost_latencies_alone(domain: Domain, operation: Operation) -> None:
    routed = spread(GATE, 4, 8)
    for algorithm in ("ht", "ll"):
        machine = Machine(domain, ModelNic(), num_sms=64)
        found = cost(operation, routed, 0, PLAIN, machine, algorithm=algorithm)
        start = domain.us(operation, DomainLoad(0, 0, 0, packets=algorithm == "ll"))
        start += found.slow_messages / ModelNic().mega_messages  # signals of LL
        flights = 2 if (algorithm, operation.what) == ("ht", "dispatch") else 1
        assert found.slow_bytes == found.nvlink_bytes == 0 and found.slow_messages == (24 if algorithm == "ll" else 0)
        assert found.us == pytest.approx(start + flights * ModelNic().latency_us, rel=1e-3)


@pytest.mark.parametrize(("operation", "late"), [(DISPATCH, 10), (COMBINE, 3)])
def test_direct_rows_that_leave_late_take_a_second_latency(domain: Domain, operation: Operation, late: int) -> None:
    """A domain of 8 has places for the early rows of a dispatch to 8 other domains, and of a combine to one."""
    for domains in (2, 3, 9, 10):
        slow, fast = (
            cost(operation, spread(DrawnGate(256, 8), domains, 8), 128, ROWS, Machine(domain, nic), algorithm="ll")
            for nic in (ModelNic(latency_us=9.0), ModelNic(latency_us=4.0))
        )
        assert slow.us - fast.us == pytest.approx(10 if domains >= late else 5)


def test_direct_rows_overlap_the_shorter_of_blocks_and_wire() -> None:
    line = DirectLine(start_us=30.0, row_ns=500.0, block_gbs=10.0, copy_gbs=20.0, overlap=0.25)
    load_ = Crossing(640, 10_000, 1e6, 64, 0.0, 40.0, 3.0, 2.0, early=True)
    blocks = (640 * (500 + 10_000 / 10) + 1e6 / 20) / 64 / 1e3
    assert line.blocks_us(load_) == pytest.approx(blocks) and blocks < 40
    assert line.us(load_) == pytest.approx(30 + 3 + 40 + 0.75 * blocks), "headers agree beside the wire"
    assert line.us(replace(load_, early=False)) == pytest.approx(30 + 2 * 3 + 2 + 40 + 0.75 * blocks)
    assert line.us(replace(load_, wire_us=1.0)) == pytest.approx(30 + 3 + blocks + 0.75 * 2), "or the wire beside them"
    assert line.us(replace(load_, links_us=50.0)) == pytest.approx(30 + 3 + 50 + 0.75 * 40)


def test_a_block_has_a_token_or_none(domain: Domain) -> None:
    """Blocks without a token make a round no faster."""
    routed = spread(DrawnGate(256, 8), 2, 8)
    few, many = (
        cost(DISPATCH, routed, 8, ROWS, Machine(domain, ModelNic(), num_sms=sms), algorithm="ll") for sms in (8, 64)
    )
    assert few.us == many.us and (few.blocks, many.blocks) == (8, 64)
    assert cost(DISPATCH, routed, 1, ROWS, Machine(domain, ModelNic()), algorithm="ll").blocks == 64, (
        "the least of several"
    )


def test_a_token_crosses_once_a_domain_or_once_a_rank(domain: Domain) -> None:
    routed = spread(GATE, 4, 8)
    machine = Machine(domain, ModelNic())
    ht, ll, per_expert = (
        cost(DISPATCH, routed, 128, replace(PLAIN, per_expert=each), machine, algorithm=algorithm)
        for algorithm, each in (("ht", False), ("ll", False), ("ll", True))
    )
    deviations = NormalDist().inv_cdf((32 - 0.375) / 32.25)  # of the busiest of 32 NICs
    for found, wanted, sources in ((ht, routed.domains[0], 3), (ll, routed.ranks[0], 24)):
        mean = 128 * sources * float(wanted)
        assert found.slow_bytes == pytest.approx((mean + deviations * sqrt(mean * (1 - float(wanted)))) * 7392)
    mean = 128 * 8 * 3 / 4
    assert per_expert.slow_bytes == pytest.approx((mean + deviations * sqrt(mean * (1 - 1 / 32))) * 7392)
    assert ht.slow_bytes < ll.slow_bytes < per_expert.slow_bytes
    assert ll.slow_messages == pytest.approx(ll.slow_bytes / 7392 + 24)  # a signal to each rank


def test_the_busiest_of_random_routings() -> None:
    """Blom's formula against drawn routings: entries of 128 tokens a rank that arrive from other domains."""
    generator = torch.Generator().manual_seed(0)
    drawn = []
    for _ in range(20):
        topk_idx = torch.rand(32 * 128, 256, generator=generator).topk(8).indices
        counts = torch.zeros(4, 32)
        for source in range(4):
            owners = topk_idx[source * 1024 : (source + 1) * 1024] // 8
            counts[source] = torch.bincount(owners.flatten(), minlength=32)
        own = torch.stack([counts[rank // 8, rank] for rank in range(32)])
        drawn.append(float((counts.sum(dim=0) - own).max()))
    machine = Machine(load(), ModelNic())
    per_expert = Rows(1, joined=False, headers=False, per_expert=True)
    found = cost(DISPATCH, spread(DrawnGate(256, 8), 4, 8), 128, per_expert, machine, algorithm="ll")
    assert found.slow_bytes == pytest.approx(fmean(drawn), rel=0.02)
    assert found.slow_bytes > 1.05 * 128 * 8 * 3 / 4


def test_runs_are_those_of_drawn_tokens() -> None:
    generator = torch.Generator().manual_seed(0)
    for wanted in (0.1, 0.5, 0.9, 1.0):
        hits = (torch.rand(2000, 32, generator=generator) < wanted).int()
        starts = hits[:, :1].sum() + (hits.diff(dim=1) == 1).sum()
        assert runs(2000 * 32, 32, wanted) == pytest.approx(float(starts), rel=0.03)
    assert runs(0, 32, 0.5) == 0 and runs(64, 32, 1.0) == 2 and runs(8, 32, 1.0) == pytest.approx(1)


def test_puts_are_runs_signals_credits_and_headers(domain: Domain) -> None:
    routed, machine = spread(DrawnGate(256, 8), 4, 8), Machine(domain, ModelNic())
    share = float(routed.domains[0])
    joined, single = (
        cost(DISPATCH, routed, 4096, replace(ROWS, joined=each), machine, algorithm="ht") for each in (True, False)
    )
    beside = 2 * 3 * 4096 / 32 + 2 * 24  # a signal and a credit for each chunk and domain; headers
    assert joined.slow_messages == pytest.approx(3 * runs(4096, 32, share) + beside)
    assert single.slow_messages > 4096 * 3 * share + beside
    assert joined.slow_bytes == single.slow_bytes


def test_round_headers_cross_to_every_rank(domain: Domain) -> None:
    routed, machine = spread(DrawnGate(256, 8), 4, 8), Machine(domain, ModelNic())
    ours, theirs = (
        cost(DISPATCH, routed, 128, replace(ROWS, headers=each), machine, algorithm="ll") for each in (True, False)
    )
    assert ours.us > theirs.us, "steps of rounds, which another library's need not have"
    assert ours.slow_bytes - theirs.slow_bytes == pytest.approx(24 * 8 * (24 + 256 + 32))
    assert ours.slow_messages - theirs.slow_messages == pytest.approx(2 * 24)


def test_exact_rows_are_one_or_two_rows_of_y() -> None:
    exact, rounded = EXACT, Operation("combine", "expert", BF16_WIRE)
    single = spread(DrawnGate(256, 8), 1, 8).single
    assert bytes_of(rounded, "", 7168) == 14336 and bytes_of(exact, "", 7168) == 28672
    assert bytes_of(exact, "", 7168, 1.0) == 14336
    assert bytes_of(exact, "", 7168, single) == round(14336 * (2 - single)) and 0.5 < single < 0.7
    assert slow_bytes_of(exact, "", 7168) == 28672, "sums of a domain stay float32"
    assert slow_bytes_of(COMBINE, "", 7168) == 14336 and slow_bytes_of(COMBINE, "", 7168, "fp32") == 28672
    assert slow_bytes_of(DISPATCH, "fp8", 7168) == 7392


@pytest.mark.parametrize(
    ("ranks", "tokens"), [(8, (256, 512, 273, 136)), (32, (256, 512, 273, 136)), (64, (128, 256, 136, 68))]
)
def test_packets_carry_what_the_page_says(ranks: int, tokens: tuple[int, ...]) -> None:
    """The columns dispatch bf16 and FP8, combine bf16 and exact of docs/performance.md."""
    columns = [(DISPATCH, "bf16"), (DISPATCH, "fp8"), (COMBINE, ""), (EXACT, "")]
    for (operation, payload), most in zip(columns, tokens, strict=True):
        lines = lines_of(operation, payload, 7168, 8)
        assert lines is not None and lines.carry(most, 8, ranks) and not lines.carry(most + 1, 8, ranks)


@pytest.mark.parametrize(
    ("layout", "payload", "hidden", "topk", "whole", "stored"),
    [
        ("flat", "bf16", 7168, 8, 128, 121),
        ("expert", "bf16", 7168, 8, 128, 121),
        ("flat", "fp8", 7168, 8, 64, 64),
        ("flat", "fp8", 4096, 8, 42, 37),
        ("expert", "fp8", 4096, 8, 42, 38),
        ("batched", "fp8", 5120, 8, 48, 46),
        ("expert", "fp8-ue8m0-column", 7168, 8, 70, 64),
    ],
)
def test_a_row_of_few_tokens_takes_the_lines_that_kernels_store(
    layout: str, payload: str, hidden: int, topk: int, whole: int, stored: int
) -> None:
    """Lines of docs/maintainers/decisions.md, today and as long as all packets of a row were equally long."""
    dispatch = Operation("dispatch", layout)
    for lines, equal in ((stored, False), (whole, True)):
        found = lines_of(dispatch, payload, hidden, topk, whole=equal)
        assert found is not None and found.nbytes == 128 * lines
    for single, nbytes in ((0.0, 240), (1.0, 120), (0.6, 168)):
        exact = lines_of(EXACT, "", 7168, 8, single)
        assert exact is not None and exact.nbytes == pytest.approx(128 * nbytes), "half of the lines of a single row"


@pytest.mark.parametrize("payload", ["bf16", "fp8", "fp8-given", "mxfp8", "int8_token-given", "nvfp4"])
def test_predicted_rounds_of_few_tokens_move_the_lines_of_their_rows(domain: Domain, payload: str) -> None:
    model = MODELS["qwen3-235b"]
    gate, dispatch = DrawnGate(model.num_experts, model.topk), Operation("dispatch", "expert")
    case = SimulatedCase("", model.hidden, 1536, gate, [1], 8, [128], "expert", payload)
    moved = row(case, Machine(domain, ModelNic()), case.spread(1), 128)["dispatch"]["nvlink_bytes"]
    lines = lines_of(dispatch, payload, model.hidden, model.topk)
    assert lines is not None and moved == pytest.approx(128 * 7 * case.spread(1).ranks[0] * lines.nbytes, abs=1e-2)


def test_rows_that_cannot_be_cut_take_no_lines() -> None:
    assert lines_of(DISPATCH, "bf16", 100, 8) is None


def test_skew_loads_the_busiest(domain: Domain) -> None:
    machine = Machine(domain, ModelNic())
    times = [
        cost(DISPATCH, spread(DrawnGate(256, 8), 4, 8, skew), 4096, ROWS, machine).us for skew in (0, 0.25, 0.5, 1)
    ]
    assert times == sorted(times) and times[-1] > 1.1 * times[0]
    everything = cost(DISPATCH, spread(DrawnGate(256, 8), 4, 8, 1.0), 4096, ROWS, machine)
    assert everything.nvlink_bytes == pytest.approx(4096 * 4 * 7 * 7392)  # into rank 0, from the 7 beside it


def test_auto_is_what_moecomm_does(domain: Domain) -> None:
    """Direct as long as there is room, even where forwarders would take less."""
    routed, machine = spread(DrawnGate(256, 8), 8, 8), Machine(domain, ModelNic())
    for tokens in SIZES:
        ht, ll, auto = (
            cost(DISPATCH, routed, tokens, ROWS, machine, algorithm=a, most_direct=128) for a in ("ht", "ll", "auto")
        )
        assert auto == (ll if tokens <= 128 else ht)


@pytest.mark.parametrize("layout", ["expert", "batched"])
def test_fewer_blocks_never_take_less(domain: Domain, layout: str) -> None:
    routed = spread(DrawnGate(256, 8), 1, 8)
    for operation in (Operation("dispatch", layout), Operation("combine", layout, BF16_WIRE)):
        for tokens in (1, 128, 4096):
            times = [
                cost(operation, routed, tokens, ROWS, Machine(domain, ModelNic(), num_sms=sms)).us
                for sms in (8, 16, 24, 64, 128)
            ]
            assert times == sorted(times, reverse=True), (operation, tokens)


def test_layer() -> None:
    domain = Domain("", {}, gemm_tflops=500.0, gemm_kept=0.75)
    found = layer(domain, 100, 200, 1000, parts=4)
    slowed = 1000 + 0.25 * 300
    assert (found.serial_us, found.overlapped_us) == (1300, pytest.approx(slowed + 300 / 4))
    assert layer(domain, 100, 200, 0).overlapped_us == 300
    assert layer(domain, 100, 200, 1000, parts=1).overlapped_us == 1300  # no overlap rather than a loss
    routed = spread(DrawnGate(256, 8), 1, 8)
    many = gemm_us(domain, routed, 256, 4096, 7168, 2048)
    assert many == pytest.approx(4096 * 8 * 6 * 7168 * 2048 / 500e6)
    all_weights = 32 * 3 * 7168 * 2048 * 2 / 4800e3
    assert gemm_us(domain, routed, 256, 64, 7168, 2048) == pytest.approx(all_weights, rel=1e-3)
    one = gemm_us(domain, spread(DrawnGate(256, 8), 1, 1), 256, 1, 7168, 2048)
    assert one == pytest.approx(8 * 3 * 7168 * 2048 * 2 / 4800e3)
    assert gemm_us(domain, routed, 256, 0, 7168, 2048) == 0


def test_a_slower_nvlink_counts_and_a_faster_one_does_not(domain: Domain) -> None:
    routed = spread(GATE, 1, 8)
    times = [
        cost(DISPATCH, routed, 4096, ROWS, Machine(domain.with_nvlink(gbs), ModelNic())).us for gbs in (100, 160, 1e4)
    ]
    assert times[0] > times[1] > times[2] == cost(DISPATCH, routed, 4096, ROWS, Machine(domain, ModelNic())).us


def test_operations_that_were_not_measured_are_refused() -> None:
    lines = {(DISPATCH, regime): Line(1.0, 1.0, 1.0, 1.0, 1.0, 1.0) for regime in ("few", "many")}
    with pytest.raises(BadInput, match="dispatch flat"):
        cost(COMBINE, spread(GATE, 1, 8), 1, ROWS, Machine(Domain("", lines, 1.0, 1.0), ModelNic()))
