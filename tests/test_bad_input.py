"""Bad inputs are refused by name, on every rank, and the Buffer goes on."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

import moecomm
from moecomm import _native
from moecomm.testing import LocalBuffers, check_case, random_case
from moecomm.testing.prepare import prepare_combine, prepare_dispatch

from .backends.conftest import run_ranks
from .little_room import fixed_windows

SIZES = {"ranks": 3, "hidden": 64, "num_experts": 12, "topk": 4, "max_tokens": 16, "dtype": torch.bfloat16}
T = 8


@pytest.fixture(scope="module")
def ranks() -> Iterator[LocalBuffers]:
    with LocalBuffers(**SIZES, backend="host", timeout_s=60) as buffers:
        yield buffers


def good_call() -> dict[str, Any]:
    return {
        "x": torch.randn(T, 64).bfloat16(),
        "topk_idx": torch.arange(T * 4).view(T, 4) % 12,
        "topk_weights": torch.rand(T, 4),
    }


REFUSED = {
    "x dtype": ("x", {"x": torch.zeros(T, 64)}),
    "x dimensions": ("x", {"x": torch.zeros(T, 8, 8).bfloat16()}),
    "x columns": ("x", {"x": torch.zeros(T, 72).bfloat16()}),
    "x too many tokens": ("x", {"x": torch.zeros(17, 64).bfloat16()}),
    "x device": ("x", {"x": torch.zeros(T, 64, device="meta").bfloat16()}),
    "x columns apart": ("x", {"x": torch.zeros(64, T).bfloat16().t()}),
    "x rows not aligned": ("x", {"x": torch.zeros(T, 68).bfloat16()[:, :64]}),
    "x start not aligned": ("x", {"x": torch.zeros(T * 64 + 1).bfloat16()[1:].view(T, 64)}),
    "x no tensor": ("x", {"x": [[0.0] * 64] * T}),
    "x nested": ("x", {"x": torch.nested.nested_tensor([torch.ones(T, 64).bfloat16()], layout=torch.jagged)}),
    "x without memory": ("x", {"x": torch._efficientzerotensor(T, 64, dtype=torch.bfloat16)}),
    "x backwards": ("x", {"x": np.zeros((T, 64), np.float16)[::-1]}),
    "x of objects": ("x", {"x": np.zeros((T, 64), object)}),
    "topk_idx missing": ("topk_idx", {"topk_idx": None}),
    "topk_idx dtype": ("topk_idx", {"topk_idx": torch.zeros(T, 4)}),
    "topk_idx rows": ("topk_idx", {"topk_idx": torch.zeros(T + 1, 4, dtype=torch.int64)}),
    "topk_idx columns": ("topk_idx", {"topk_idx": torch.zeros(T, 5, dtype=torch.int64)}),
    "topk_weights dtype": ("topk_weights", {"topk_weights": torch.zeros(T, 4).double()}),
    "topk_idx sparse": ("topk_idx", {"topk_idx": torch.ones(T, 4, dtype=torch.int64).to_sparse()}),
    "topk_weights shape": ("topk_weights", {"topk_weights": torch.zeros(T, 3)}),
    "topk_weights without memory": ("topk_weights", {"topk_weights": torch._efficientzerotensor(T, 4)}),
    "layout": ("layout", {"layout": "rows"}),
    "layouts": ("layout", {"layout": ["flat", "expert"]}),
    "a list beside a tuple": ("check_weights", {"layout": ("flat", "expert"), "check_weights": []}),
    "quantize": ("quantize", {"quantize": "fp4"}),
    "scale_format": ("scale_format", {"quantize": "fp8", "scale_format": "fp8"}),
    "scale_format of nothing": ("scale_format", {"scale_format": "ue8m0"}),
    "scale_layout": ("scale_layout", {"quantize": "fp8", "scale_layout": "diagonal"}),
    "scale_layout of nothing": ("scale_layout", {"scale_layout": "column"}),
    "columns of 2 bytes": ("scales", {"scales": torch.zeros(T, 2, dtype=torch.int16), "scale_layout": "column"}),
    "scales without columns": ("scales", {"scales": torch.zeros(T, 0)}),
    "scales columns apart": ("scales", {"scales": torch.zeros(2, T).t()}),
    "num_sms": ("num_sms", {"num_sms": 0}),
    "num_sms of a share": ("num_sms", {"num_sms": 1.5}),
    "quantize with scales": ("quantize", {"quantize": "fp8", "scales": torch.zeros(T, 1)}),
    "float8 without scales": ("scales", {"x": torch.zeros(T, 64).to(torch.float8_e4m3fn)}),
    "scales rows": ("scales", {"scales": torch.zeros(T - 1, 1)}),
    "scales sparse": ("scales", {"scales": torch.ones(T, 1).to_sparse()}),
    "scales dtype": ("scales", {"scales": torch.zeros(T, 1).double()}),
    "alignment": ("expert_alignment", {"expert_alignment": 0}),
    "alignment no number": ("expert_alignment", {"expert_alignment": "16"}),
    "max_rows": ("max_rows", {"max_rows": -1}),
    "max_rows of a capacity": ("max_rows", {"max_rows": 1.25 * T}),
    "max_rows in words": ("max_rows", {"max_rows": "16"}),
    "max_rows of each": ("max_rows", {"max_rows": np.array([8, 8])}),
    "handle": ("handle", {"handle": object(), "topk_idx": None, "topk_weights": None}),
}


@pytest.mark.parametrize("name", REFUSED)
def test_dispatch_refuses(ranks: LocalBuffers, name: str) -> None:
    argument, wrong = REFUSED[name]
    prepare_dispatch(ranks.buffers[0], **good_call())  # a good call is known, and must not stand in for a bad one
    for buffer in ranks.buffers:  # a call that fails on some ranks alone leaves them out of step
        with pytest.raises(moecomm.BadInput) as caught:
            buffer.dispatch(**{**good_call(), **wrong})
        assert caught.value.argument == argument
        assert str(caught.value).startswith(argument) and "want" in str(caught.value)
    check_case(ranks, random_case(1, **SIZES))


def test_rows_of_scales_have_less_than_a_mebibyte(ranks: LocalBuffers) -> None:
    most, call = (1 << 18) - 1, {**good_call(), "x": torch.zeros(1, 64).bfloat16(), "topk_weights": None}
    call["topk_idx"] = torch.tensor([[0, 4, 8, -1]])  # an expert of each rank
    scales = torch.arange(3.0).view(3, 1, 1) + torch.arange(most) / most
    for columns in (1, most):
        routed = ranks.dispatch([{**call, "scales": scales[rank, :, :columns]} for rank in range(3)])
        assert all(here.scales is not None and torch.equal(here.scales, scales[:, 0, :columns]) for here in routed)
    for buffer in ranks.buffers:
        with pytest.raises(moecomm.BadInput, match=r"scales: got 262144 columns; want .* less than 2\^20 bytes"):
            buffer.dispatch(**call, scales=torch.zeros(1, most + 1))


def test_combine_refuses(ranks: LocalBuffers) -> None:
    routed = ranks.dispatch([good_call() for _ in range(3)])
    first, y = ranks.buffers[0], torch.zeros_like(routed[0].x)
    for bias in (None, y[0]):
        prepare_combine(
            first, y, routed[0].handle, bias=bias
        )  # good calls are known, and must not stand in for bad ones
    read_only = np.zeros((T, 64), np.float16)
    read_only.flags.writeable = False
    in_window = first.empty(routed[0].handle)

    def refuses(match: str | None = None, /, **call: Any) -> moecomm.BadInput:
        for other in ranks.buffers[1:]:
            other.rounds.count_rejected()  # as if the call failed there as well: the ranks stay in step
        with pytest.raises(moecomm.BadInput, match=match) as caught:
            first.combine(**call)
        return caught.value

    refused = {
        "y": [
            y[:-1],
            y.double(),
            y[:, :32],
            torch.zeros(*y.shape, device="meta"),
            y.t().contiguous().t(),
            y.to_sparse(),
        ],
        "bias": [torch.zeros(T, 64).double(), torch.zeros(T - 1, 64).bfloat16(), torch.zeros(63).bfloat16()],
        "out": [
            torch.zeros(T, 64),
            torch.zeros(T + 1, 64).bfloat16(),
            torch.zeros(T).bfloat16(),
            torch.tensor(0.0),
            torch.zeros(T, 64).bfloat16().to_sparse(),
            torch.zeros(64).bfloat16().expand(T, 64),
            torch.zeros(T * 64).bfloat16().as_strided((T, 64), (32, 1)),
            read_only,
        ],
        "weight_grads": [torch.zeros(y.shape[0] - 1), torch.zeros(y.shape[0]).double()],
        "wire": [torch.float16, [torch.bfloat16]],
    }
    for argument, values in refused.items():
        for value in values:
            error = refuses(**{"y": y, "handle": routed[0].handle, argument: value})
            assert error.argument == argument
    for rows in (y, in_window):
        refuses("out: got memory of y", y=rows, handle=routed[0].handle, out=rows[1 : T + 1])
    for handle in (None, routed[1].handle):
        refuses("handle", y=y, handle=handle)
    check_case(ranks, random_case(2, **SIZES))


@pytest.mark.parametrize("bad", [12, -2, 1 << 40, -(1 << 40)])
@pytest.mark.parametrize("layout", ["flat", "expert", "batched"])
def test_a_bad_id_voids_the_round_on_every_rank(ranks: LocalBuffers, bad: int, layout: str) -> None:
    calls = [{**good_call(), "layout": layout} for _ in range(3)]
    calls[1]["topk_idx"][5, 2] = bad
    for error in (_raises(ranks, calls), *(_left_behind(b) for b in ranks.buffers[1:])):
        assert isinstance(error, moecomm.BadInput)
        assert (error.argument, error.rank) == ("topk_idx", 1) and str(bad) in str(error)
    check_case(ranks, random_case(3, **SIZES))


@pytest.mark.parametrize("workers", [1, 2])
def test_the_first_of_several_bad_entries_is_named(workers: int) -> None:
    """The first id that is bad, and a weight only where all ids are good; of several ranks that of the first.

    Workers look at chunks of 8 tokens in turn.
    """
    sizes: dict[str, Any] = {**SIZES, "max_tokens": 32}

    def call() -> dict[str, Any]:
        ids = torch.arange(32 * 4).view(32, 4) % 12
        x, weights = torch.zeros(32, 64).bfloat16(), torch.ones(32, 4)
        return {"x": x, "topk_idx": ids, "topk_weights": weights, "check_weights": True, "num_sms": workers}

    def told(calls: list[dict[str, Any]]) -> str:
        error = _raises(ranks, calls)
        for other in (error, *map(_left_behind, ranks.buffers[1:])):
            assert isinstance(other, moecomm.BadInput) and str(other) == str(error)
        return str(error)

    with LocalBuffers(**sizes, backend="host", timeout_s=60) as ranks:
        for first, later in itertools.pairwise(range(0, 32 * 4, 9)):
            calls = [call() for _ in range(3)]
            for rank, bad in ((1, 20), (2, 40)):
                flat, weights = (calls[rank][name].view(-1) for name in ("topk_idx", "topk_weights"))
                flat[first], flat[later], flat[-1] = bad, bad + 1, bad + 2
                weights[0] = weights[-1] = torch.nan
            assert told(calls).startswith("topk_idx (rank 1): got expert 20;")
        calls = [call() for _ in range(3)]
        calls[2]["topk_idx"][-1, -1], calls[1]["topk_weights"][0, 0] = 99, torch.nan
        assert told(calls).startswith("topk_weights (rank 1): got NaN;")
        check_case(ranks, random_case(3, **sizes))


def test_too_many_rows_void_the_round_on_every_rank(ranks: LocalBuffers) -> None:
    calls = [{**good_call(), "layout": "expert", "max_rows": 100} for _ in range(3)]
    for call in calls:
        call["topk_idx"] = torch.full((T, 4), 9)
    calls[2]["max_rows"] = 95  # rank 2 gets 3 * 8 * 4 = 96 rows
    for error in (_raises(ranks, calls), *(_left_behind(b) for b in ranks.buffers[1:])):
        assert isinstance(error, moecomm.BadInput)
        assert (error.argument, error.rank) == ("max_rows", 2) and "96" in str(error) and "95" in str(error)
    calls[2]["max_rows"] = 96
    routed = ranks.dispatch(calls)
    assert [len(r.x) for r in routed] == [0, 0, 96]


def test_rows_of_a_void_round_have_no_expert(ranks: LocalBuffers) -> None:
    calls = [{**good_call(), "layout": "flat", "max_rows": 3, "sync": False} for _ in range(3)]
    routed = [prepare_dispatch(buffer, **call) for buffer, call in zip(ranks.buffers, calls, strict=True)]
    _native.host_run_all([here.args for here in routed])  # without its end, which raises
    for buffer in ranks.buffers:
        assert isinstance(_left_behind(buffer), moecomm.BadInput)
    for here in routed:
        assert here.num_rows.item() == 0
        assert here.topk_idx.tolist() == [[-1] * 4] * 3 and here.topk_weights.tolist() == [[0.0] * 4] * 3


def test_too_many_rows_of_an_expert_void_the_round_on_every_rank(ranks: LocalBuffers) -> None:
    calls = [{**good_call(), "layout": "batched"} for _ in range(3)]
    for call in calls:
        call["topk_idx"] = torch.arange(T * 4).view(T, 4) % 4 + 8
    calls[2]["max_rows"] = 23  # rank 2 gets 3 * 8 rows for each of its experts
    for error in (_raises(ranks, calls), *(_left_behind(b) for b in ranks.buffers[1:])):
        assert isinstance(error, moecomm.BadInput)
        assert (error.argument, error.rank) == ("max_rows", 2) and "24" in str(error) and "23" in str(error)
    calls[0]["max_rows"], calls[1]["max_rows"], calls[2]["max_rows"] = 0, 100, 24
    routed = ranks.dispatch(calls)
    assert [r.x.shape for r in routed] == [(4, 0, 64), (4, 48, 64), (4, 24, 64)]
    x = torch.cat([call["x"] for call in calls])
    assert all(torch.equal(rows, x) for rows in routed[2].x)


def test_more_duplicates_than_batched_holds(ranks: LocalBuffers) -> None:
    calls = [
        {"x": torch.randn(16, 64).bfloat16(), "topk_idx": torch.full((16, 4), 3), "layout": "batched"} for _ in range(3)
    ]
    error = _raises(ranks, calls)
    assert isinstance(error, moecomm.BadInput) and "192" in str(error) and "48" in str(error)
    for buffer in ranks.buffers[1:]:
        assert isinstance(_left_behind(buffer), moecomm.BadInput)


def test_nan_weights_when_asked(ranks: LocalBuffers) -> None:
    calls = [{**good_call(), "check_weights": True} for _ in range(3)]
    ranks.dispatch(calls)
    calls[2]["topk_weights"][7, 3] = torch.nan
    for error in (_raises(ranks, calls), *(_left_behind(b) for b in ranks.buffers[1:])):
        assert isinstance(error, moecomm.BadInput) and (error.argument, error.rank) == ("topk_weights", 2)


FIELDS: dict[str, tuple[dict[str, Any], dict[str, Any], object, object]] = {
    "expert_alignment": ({"expert_alignment": 1}, {"expert_alignment": 2}, 1, 2),
    "scale_format": ({"quantize": "fp8"}, {"quantize": "fp8", "scale_format": "ue8m0"}, "fp32", "ue8m0"),
    "scale_layout": ({"quantize": "fp8"}, {"quantize": "fp8", "scale_layout": "column"}, "row", "column"),
    "quantize": ({}, {"quantize": "fp8"}, None, "fp8"),
    "layout": ({"layout": "flat"}, {"layout": "expert"}, "flat", "expert"),
    "quantize, cast before": ({"quantize": "mxfp8"}, {"quantize": "int8_group"}, "mxfp8", "int8_group"),
    "scale_layout, cast before": (
        {"quantize": "mxfp4"},
        {"quantize": "mxfp4", "scale_layout": "swizzled"},
        "row",
        "swizzled",
    ),
    "row bytes": ({"x": torch.zeros(T, 20).char()}, {"x": torch.zeros(T, 22).char()}, 20, 22),
    "extras": ({"extras": (torch.zeros(T, 2),)}, {"extras": (torch.zeros(T, 5),)}, "float32 [2]", "float32 [5]"),
    "dtype": ({"x": torch.zeros(T, 64).char()}, {}, torch.int8, torch.bfloat16),
}


@pytest.mark.parametrize("field", FIELDS)
def test_ranks_that_call_differently_are_told_the_field(field: str) -> None:
    one, other, mine, theirs = FIELDS[field]
    with LocalBuffers(**SIZES, backend="host", timeout_s=5) as ranks:
        error = _raises(ranks, [{**good_call(), **(other if rank == 1 else one)} for rank in range(3)])
        assert isinstance(error, moecomm.Mismatch)
        name = field.partition(",")[0]
        assert (error.field, error.mine, error.theirs, error.rank) == (name, mine, theirs, 1)
        for buffer in ranks.buffers[1:]:
            with pytest.raises(moecomm.Mismatch, match=name):
                buffer.check()
        for buffer in ranks.buffers:  # nobody knows whether the next calls of the ranks are the same
            with pytest.raises(moecomm.OutOfStep, match=f"calls: .*{name}: this rank has"):
                buffer.dispatch(**good_call())
            assert buffer.failed


def test_no_room_left_says_how_much_is_needed() -> None:
    with (
        fixed_windows(),
        LocalBuffers(**{**SIZES, "ranks": 1}, backend="host", window_bytes=4096) as ranks,
        pytest.raises(moecomm.BadInput, match="window_bytes"),
    ):
        ranks.dispatch([good_call()])


def test_out_may_lie_beside_y_in_wider_rows() -> None:
    with moecomm.Buffer(hidden=64, num_experts=4, topk=2, max_tokens=8, backend="host") as buffer:
        x = torch.randn(T, 64).bfloat16()
        routed = buffer.dispatch(x, torch.zeros(T, 2, dtype=torch.int64), layout="flat")
        y, out = torch.zeros(T, 128).bfloat16().chunk(2, dim=1)
        y.copy_(routed.x)
        for columns in (y, y.as_strided((T, 64), (128, 1))):
            assert torch.equal(buffer.combine(columns, routed.handle, out=out), x)
        with pytest.raises(moecomm.BadInput, match="out: got memory of y"):
            buffer.combine(y, routed.handle, out=out.as_strided((T, 64), (128, 1), 32))


def test_closed() -> None:
    buffer = moecomm.Buffer(hidden=64, num_experts=12, topk=4, max_tokens=16, backend="host")
    given = good_call()
    routed, unread = buffer.dispatch(**given), buffer.dispatch(**given)
    want = routed.x.clone()
    buffer.close()
    buffer.close()
    for act in (lambda: buffer.dispatch(**given), lambda: buffer.combine(routed.x, routed.handle), buffer.check):
        with pytest.raises(moecomm.Closed):
            act()
    assert torch.equal(routed.x, want), "outputs outlive the Buffer"
    assert torch.equal(unread.x, want), "also those that nobody had looked at"


OPEN_REFUSED = {
    "hidden": {"hidden": 7},
    "num_experts": {"num_experts": 0},
    "topk": {"topk": 33},
    "max_tokens": {"max_tokens": 0},
    "dtype": {"dtype": torch.float64},
    "timeout_s": {"timeout_s": "30"},
    "backend": {"backend": "carrier pigeon"},
    "group": {"group": "world"},
    "window_bytes": {"window_bytes": -1},
    "device": {"device": "toaster"},
    "domain_ranks": {"domain_ranks": 1.0},
}
NO_NUMBERS = {"hidden": 64.0, "num_experts": "4", "topk": None, "max_tokens": 8.5}


@pytest.mark.parametrize("argument", OPEN_REFUSED)
def test_open_refuses(argument: str) -> None:
    with pytest.raises(moecomm.BadInput) as caught:
        moecomm.Buffer(**{"hidden": 64, "num_experts": 4, "topk": 2, "max_tokens": 8, **OPEN_REFUSED[argument]})
    assert caught.value.argument == argument


@pytest.mark.parametrize("size", [0, -16, 1 << 31, 1 << 64])
@pytest.mark.parametrize("argument", ["hidden", "num_experts", "topk", "max_tokens", "window_bytes", "domain_ranks"])
def test_sizes_that_fit_nowhere(argument: str, size: int) -> None:
    size = 1 << 63 if (argument, size) == ("window_bytes", 1 << 31) else size
    sizes = {"hidden": 64, "num_experts": 4, "topk": 2, "max_tokens": 8} | {argument: size}
    with pytest.raises(moecomm.BadInput) as caught:
        moecomm.Buffer(**sizes, backend="host")
    assert caught.value.argument == argument


def test_ranks_on_cpus_take_no_other_device() -> None:
    for device in ("cuda", 0, "meta"):
        with pytest.raises(moecomm.BadInput, match=r"device: got .*; want the CPU"):
            moecomm.Buffer(hidden=64, num_experts=4, topk=2, max_tokens=8, backend="host", device=device)


@pytest.mark.parametrize("argument", NO_NUMBERS)
def test_sizes_are_whole_numbers(argument: str) -> None:
    sizes: dict[str, Any] = {"hidden": 64, "num_experts": 4, "topk": 2, "max_tokens": 8}
    with pytest.raises(moecomm.BadInput, match=rf"{argument}: got {NO_NUMBERS[argument]!r}; want a whole number"):
        moecomm.Buffer(**sizes | {argument: NO_NUMBERS[argument]})
    moecomm.Buffer(**{name: np.int32(size) for name, size in sizes.items()}).close()


@pytest.mark.parametrize("backend", ["lsa", "gin", "nvshmem"])
def test_a_backend_that_cannot_run_says_what_is_missing(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(moecomm.Unsupported, match=f"{backend}.*: .*[a-z]{{3}}"):
        moecomm.Buffer(hidden=64, num_experts=4, topk=2, max_tokens=8, backend=backend)


def test_a_backend_that_one_rank_lacks_keeps_nobody_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    sizes = {"hidden": 64, "num_experts": 4, "topk": 2, "max_tokens": 8}
    raised = run_ranks(2, lambda group: moecomm.Buffer(group, **sizes, backend=("host", "lsa")[group.rank]))
    assert isinstance(raised[0], moecomm.Unsupported) and str(raised[0]).startswith("rank 1: backend 'lsa' can't run")
    assert isinstance(raised[1], moecomm.Unsupported)


def test_fewer_experts_than_ranks() -> None:
    with pytest.raises(moecomm.BadInput, match="num_experts"):
        LocalBuffers(**{**SIZES, "num_experts": 2}, backend="host")


def _raises(ranks: LocalBuffers, calls: list[dict[str, Any]]) -> BaseException:
    """Return what the round raises on rank 0; the other ranks' errors are still to be seen."""
    with pytest.raises(moecomm.MoecommError) as caught:
        ranks.dispatch(calls)
    return caught.value


def _left_behind(buffer: moecomm.Buffer) -> BaseException:
    with pytest.raises(moecomm.MoecommError) as caught:
        buffer.check()
    buffer.check()  # told once
    return caught.value


def test_what_is_mixed_up_is_said_by_its_name() -> None:
    """Errors of mistakes that everybody makes once say what was passed, in the words of the call."""
    with moecomm.Buffer("self", hidden=64, num_experts=4, topk=2, max_tokens=8, device="cpu") as buffer:
        x, ids = torch.zeros(8, 64).bfloat16(), torch.zeros(8, 2, dtype=torch.int64)
        routed, arrived = buffer.dispatch(x, ids), moecomm.ops.dispatch(buffer, x, ids)
        mistakes: dict[str, Any] = {
            r"x: got 64 columns of torch\.float32, 256 bytes; want 64 of torch\.bfloat16, those of the Buffer": (
                lambda: buffer.dispatch(x.float(), ids)
            ),
            r"y: got Routed; want .* such as its \.x": lambda: buffer.combine(routed, routed.handle),
            r"y: got Dispatched; want .* such as its \.x": lambda: moecomm.ops.combine(arrived, arrived.handle),
            r"handle: got one of Buffer\.dispatch; want": lambda: moecomm.ops.combine(routed.x, routed.handle),
            r"handle: got one of moecomm\.ops\.dispatch; want": lambda: buffer.combine(arrived.x, arrived.handle),
        }
        for told, mistake in mistakes.items():
            with pytest.raises(moecomm.BadInput, match=told):
                mistake()


@pytest.mark.parametrize("call", ["dispatch", "moe"])
def test_local_buffers_raise_an_error_of_all_ranks_once(call: str, ranks: LocalBuffers) -> None:
    good = good_call()
    if call == "moe":
        good |= {"w13": torch.zeros(4, 16, 64).bfloat16(), "w2": torch.zeros(4, 64, 8).bfloat16()}
    with pytest.raises(moecomm.BadInput, match="expert 99"):
        getattr(ranks, call)([{**good, "topk_idx": torch.full((T, 4), 99)}] * 3)
    getattr(ranks, call)([good] * 3)
    ranks.check()
    check_case(ranks, random_case(3, **SIZES))
