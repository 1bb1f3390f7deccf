"""Buffer.moe on CPU ranks, against float64; a layer's bits; what it refuses."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

import moecomm
from moecomm.errors import BadInput, Closed
from moecomm.fused import Fp8, experts, interleave, layer, quantize_weights, weight_format
from moecomm.fused.kernels import FP8
from moecomm.fused.weight_format import PLAIN
from moecomm.testing import LayerCase, LocalBuffers, random_layer
from moecomm.testing.layers import expected, selecting
from moecomm.testing.prepare import prepare_combine, prepare_moe
from moecomm.tools.demo_layer import MoELayer

SIZES: list[dict[str, Any]] = [
    {"ranks": 1, "hidden": 32, "intermediate": 16, "num_experts": 4, "topk": 2, "max_tokens": 40},
    {"ranks": 2, "hidden": 8, "intermediate": 5, "num_experts": 2, "topk": 1, "max_tokens": 17},
    {"ranks": 3, "hidden": 72, "intermediate": 40, "num_experts": 12, "topk": 3, "max_tokens": 9},
    {"ranks": 4, "hidden": 64, "intermediate": 24, "num_experts": 16, "topk": 8, "max_tokens": 33},
    {"ranks": 2, "hidden": 16, "intermediate": 8, "num_experts": 64, "topk": 32, "max_tokens": 12},
]
FP8_SIZES: list[dict[str, Any]] = [
    {"ranks": 1, "hidden": 32, "intermediate": 32, "num_experts": 4, "topk": 2, "max_tokens": 40},
    {"ranks": 2, "hidden": 16, "intermediate": 96, "num_experts": 2, "topk": 1, "max_tokens": 17},
    {"ranks": 3, "hidden": 272, "intermediate": 160, "num_experts": 12, "topk": 3, "max_tokens": 9},
    {"ranks": 4, "hidden": 144, "intermediate": 64, "num_experts": 16, "topk": 8, "max_tokens": 33},
]
PAIR = SIZES[0] | {"ranks": 2}
CASES = 40  # of each of SIZES and dtypes; a fourth of FP8 weights


def name_of(value: Any) -> str:
    """Return the name of a parameter."""
    return f"R{value['ranks']}-E{value['num_experts']}-K{value['topk']}" if isinstance(value, dict) else str(value)


LAYERS = [(sizes, dtype, False) for sizes in SIZES for dtype in (torch.bfloat16, torch.float16, torch.float32)]
LAYERS += [(sizes, dtype, True) for sizes in FP8_SIZES for dtype in (torch.bfloat16, torch.float16)]
of_layers = pytest.mark.parametrize(("sizes", "dtype", "fp8"), LAYERS, ids=name_of)


def opened(sizes: dict[str, Any], dtype: torch.dtype = torch.bfloat16, **more: Any) -> LocalBuffers:
    of_buffer = {name: size for name, size in sizes.items() if name != "intermediate"}
    return LocalBuffers(**of_buffer, dtype=dtype, backend="host", timeout_s=20, **more)


def on_threads(buffers: LocalBuffers, case: LayerCase) -> list[torch.Tensor]:
    """Buffer.moe itself, a thread a rank."""
    with ThreadPoolExecutor(len(buffers.buffers)) as pool:
        return list(pool.map(lambda buffer: buffer.moe(**case.call(buffer.rank)), buffers.buffers))


@of_layers
def test_random_layers_are_those_of_float64(sizes: dict[str, Any], dtype: torch.dtype, fp8: bool) -> None:
    with opened(sizes, dtype) as ranks:
        for seed in range(CASES // 4 if fp8 else CASES):
            case = random_layer(seed, **sizes, dtype=dtype, fp8=fp8)
            calls = [case.call(rank) for rank in range(sizes["ranks"])]
            outs = ranks.moe(calls)
            for rank, (out, again) in enumerate(zip(outs, ranks.moe(calls) if fp8 else outs, strict=True)):
                case.check(rank, out)
                assert torch.equal(out, again)


@pytest.mark.parametrize("sizes", SIZES, ids=name_of)
def test_rows_travel_unsummed(sizes: dict[str, Any]) -> None:
    """In one round, and in chunks, which leave the same bits."""
    with opened(sizes) as ranks, opened(sizes, capacity_factor=0.3) as small:
        for seed in range(8):
            case = random_layer(seed, **sizes, dtype=torch.bfloat16)
            case.wire = "rows"
            g = torch.Generator().manual_seed(seed)
            case.w13, case.w2 = (selecting(*w.shape, generator=g, dtype=w.dtype) for w in (case.w13, case.w2))
            outs = ranks.moe([case.call(rank) for rank in range(sizes["ranks"])])
            for rank, out in enumerate(outs):
                case.check(rank, out)
            for one, other in zip(outs, on_threads(small, case), strict=True):
                assert torch.equal(one, other)


@of_layers
def test_biases_and_activations_are_those_of_float64(sizes: dict[str, Any], dtype: torch.dtype, fp8: bool) -> None:
    drawn = set()
    with opened(sizes, dtype) as ranks:
        for seed in range(CASES // 8 if fp8 else CASES):
            case = random_layer(seed, **sizes, dtype=dtype, fp8=fp8, experts=True)
            drawn.add((case.activation.name, case.w13_bias is None, case.w2_bias is None))
            for rank, out in enumerate(ranks.moe([case.call(rank) for rank in range(sizes["ranks"])])):
                case.check(rank, out)
    assert len(drawn) > (2 if fp8 else 10)


@pytest.mark.parametrize("fp8", [False, True])
def test_several_domains(fp8: bool) -> None:
    sizes = (FP8_SIZES if fp8 else SIZES)[3]
    with opened(sizes, domain_ranks=2) as ranks:
        for seed in range(3 if fp8 else CASES):
            case = random_layer(seed, **sizes, dtype=torch.bfloat16, fp8=fp8)
            for rank, out in enumerate(ranks.moe([case.call(rank) for rank in range(4)])):
                case.check(rank, out)


def test_the_method_has_the_bits_of_its_parts_and_has_them_again() -> None:
    with opened(SIZES[3]) as ranks:
        for seed in range(8):
            case = random_layer(seed, **SIZES[3], dtype=torch.bfloat16)
            first, second = on_threads(ranks, case), on_threads(ranks, case)
            for rank, parts in enumerate(ranks.moe([case.call(rank) for rank in range(4)])):
                case.check(rank, first[rank])
                assert torch.equal(first[rank], second[rank]) and torch.equal(first[rank], parts)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_autocast_changes_no_bit(dtype: torch.dtype) -> None:
    g = torch.Generator().manual_seed(5)
    x, w13, w2 = (torch.randn(*shape, generator=g).to(dtype) for shape in ((9, 64), (4, 64, 64), (4, 64, 32)))
    idx = torch.randint(0, 4, (9, 2), generator=g)
    with moecomm.Buffer(None, hidden=64, num_experts=4, topk=2, max_tokens=9, dtype=dtype, backend="host") as buffer:
        layers = [(w13, w2)] if dtype is torch.float32 else [(w13, w2), (quantize_weights(w13), quantize_weights(w2))]
        for weights in layers:
            want = buffer.moe(x, idx, None, *weights)
            with torch.autocast("cpu", torch.bfloat16):
                assert torch.equal(buffer.moe(x, idx, None, *weights), want)


def test_order_of_w13_and_room_for_rows_change_no_bit() -> None:
    case = random_layer(3, **PAIR, dtype=torch.bfloat16)
    apart, woven = ([case.call(rank) for rank in range(2)] for _ in range(2))
    for plain, mine in zip(apart, woven, strict=True):
        plain["interleaved"], mine["interleaved"] = False, True
        plain["w13"] = layer.deinterleave(plain["w13"]) if case.interleaved else plain["w13"]
        mine["w13"] = interleave(plain["w13"])
        mine["max_rows"] = 2 * 40 * 2
    with opened(PAIR) as ranks:
        for one, other in zip(ranks.moe(apart), ranks.moe(woven), strict=True):
            assert torch.equal(one, other)


MISTAKES: dict[str, Callable[[dict[str, Any]], Any]] = {
    "activation": lambda call: "geglu",
    "w13_bias": lambda call: torch.full((4, 32), 0.1),
    "w2_bias": lambda call: torch.full((4, 32), 0.1),
    "topk_weights": lambda call: call["topk_weights"] * 1.1,
    "topk_idx": lambda call: call["topk_idx"].flip(1),
    "w2": lambda call: call["w2"] * 1.1,
    "w13": lambda call: torch.cat(call["w13"].chunk(2, dim=1)[::-1], dim=1),  # gate and up taken for each other
}
FP8_MISTAKES: dict[str, Callable[[dict[str, Any]], Any]] = {
    "topk_idx": MISTAKES["topk_idx"],
    "w2": lambda call: Fp8(call["w2"].data, call["w2"].scales * 1.5),
    "w13": lambda call: Fp8(call["w13"].data.view(torch.uint8).roll(32, dims=1).view(FP8), call["w13"].scales),
}


@pytest.mark.parametrize(
    ("argument", "fp8"), [(name, fp8) for fp8 in (False, True) for name in (FP8_MISTAKES if fp8 else MISTAKES)]
)
def test_the_bound_sees_a_mistake(argument: str, fp8: bool) -> None:
    sizes = FP8_SIZES[0] if fp8 else PAIR | {"ranks": 1}
    right = next(
        case
        for case in (random_layer(seed, **sizes, dtype=torch.bfloat16, fp8=fp8) for seed in range(1000))
        if len(case.x[0]) == 40 and case.topk_weights[0] is not None and len(case.topk_idx[0].unique()) == 4
    )
    right.interleaved = False
    call = right.call(0)
    call[argument] = (FP8_MISTAKES if fp8 else MISTAKES)[argument](call)
    with opened(sizes) as ranks:
        (out,) = ranks.moe([call])
    want = expected(right, 0)
    assert bool(((out.double() - want.out).abs() > want.bound).any(dim=1).float().mean() > 0.9)
    with pytest.raises(AssertionError, match=f"seed {right.seed}"):
        right.check(0, out)


def test_as_a_layer_of_torch_within_two_roundings() -> None:
    """Another implementation, experts in float32: the weights, the routing and the order of w13 mean the same."""
    case = random_layer(3, **PAIR | {"ranks": 1}, dtype=torch.float32)
    case.interleaved, case.bias, case.wire = False, [None], None
    call = case.call(0)
    with opened(PAIR | {"ranks": 1}, torch.float32) as ranks:
        (out,) = ranks.moe([call])
        model = MoELayer(lambda x: (call["topk_idx"], call["topk_weights"]), ranks.buffers[0], call["w13"], call["w2"])
        torch.testing.assert_close(out, model(call["x"]), rtol=1e-4, atol=1e-5)


def test_out_and_other_arrays() -> None:
    case = random_layer(4, **PAIR | {"ranks": 1}, dtype=torch.float32)
    with opened(PAIR | {"ranks": 1}, torch.float32) as ranks:
        (buffer,) = ranks.buffers
        call = case.call(0)
        out = torch.full_like(call["x"], float("nan"))
        assert buffer.moe(**call, out=out) is out
        case.check(0, out)
        arrays = {name: value.numpy() if isinstance(value, torch.Tensor) else value for name, value in call.items()}
        got = buffer.moe(**arrays)
        assert isinstance(got, np.ndarray) and np.array_equal(got, out.numpy())


def test_what_does_not_fit_is_named_before_a_row_is_sent() -> None:
    case = random_layer(3, **PAIR, dtype=torch.bfloat16)
    case.interleaved = False
    good = [case.call(rank) for rank in range(2)]
    w13, w2, x = good[0]["w13"], good[0]["w2"], good[0]["x"]
    refused: list[dict[str, Any]] = [
        {"activation": "gelu"},
        {"activation_limit": 7.0, "activation": "geglu_tanh"},
        {"activation_alpha": 1.702, "activation": "geglu"},
        {"activation_limit": -7.0, "activation": "swigluoai"},
        {"activation_alpha": "1", "activation": "swigluoai"},
        {"w13_bias": torch.zeros(2, 31)},
        {"w13_bias": torch.zeros(2, 32, dtype=torch.float64)},
        {"w13_bias": torch.zeros(32, 2).T},
        {"w2_bias": torch.zeros(2, 16)},
        {"w2_bias": "bias"},
        {"max_rows": 1.5},
        {"fused": "three launches"},
        {"wire": torch.float16},
        {"wire": ["rows"]},
        {"w13": w13[:1]},
        {"w13": w13.float()},
        {"w13": w13[:, :-2].contiguous()},
        {"w13": w13.transpose(1, 2).contiguous().transpose(1, 2)},
        {"w2": w2[:, :-1].contiguous()},
        {"w2": w2[..., :0].contiguous()},
        {"w2": "weights"},
        {"w2": w2[..., :12].contiguous(), "w13": w13[:, :24].contiguous(), "interleaved": True},
        {"x": x.float()},
        {"x": x[:, :16]},
        {"bias": torch.zeros(x.shape[1], dtype=torch.float32)},
        {"bias": torch.zeros(3, dtype=x.dtype)},
    ]
    with opened(PAIR) as ranks:
        for change in refused[:-1]:
            with pytest.raises(BadInput) as caught:
                ranks.buffers[0].moe(**good[0] | change)
            assert caught.value.argument in change, change
            ranks.buffers[1].rounds.count_rejected()  # as if the call had failed there as well: the ranks stay in step
        with pytest.raises(BadInput, match="bias"):  # seen by combine, by all ranks alike
            ranks.moe([call | refused[-1] for call in good])
        for rank, out in enumerate(ranks.moe(good)):
            case.check(rank, out)
    with pytest.raises(Closed):
        ranks.buffers[0].moe(**good[0])


def test_an_id_that_is_none_is_told_on_every_rank() -> None:
    case = random_layer(3, **PAIR, dtype=torch.bfloat16)
    calls = [case.call(rank) for rank in range(2)]
    with opened(PAIR) as ranks:
        wrong = [dict(call) for call in calls]
        wrong[1]["topk_idx"] = torch.full_like(wrong[1]["topk_idx"], 4)
        with ThreadPoolExecutor(2) as pool:
            told = list(pool.map(lambda buffer: _error(lambda: buffer.moe(**wrong[buffer.rank])), ranks.buffers))
        assert [type(error) for error in told] == ([BadInput] * 2 if len(calls[1]["x"]) else [type(None)] * 2)
        for rank, out in enumerate(on_threads(ranks, case)):
            case.check(rank, out)


def _error(call: Callable[[], Any]) -> BaseException | None:
    try:
        call()
    except BadInput as error:
        return error
    return None


def test_what_ours_lacks_is_said_once(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """Where there is no Hopper: torch's grouped GEMM, whose values a CPU's torch has as well, and one warning."""
    weight_format.ours_lacks.cache_clear()
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (10, 0) if device == 0 else (9, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "a newer GPU")
    assert "a newer GPU" in weight_format.ours_lacks(0, torch.bfloat16, 4, 64, 64)
    assert weight_format.ours_lacks(1, torch.bfloat16, 4, 64, 64) == ""
    for other in ((torch.float32, 4, 64, 64), (torch.bfloat16, 513, 64, 64), (torch.bfloat16, 4, 64, 60)):
        assert weight_format.ours_lacks(1, *other) != ""
    for _ in range(3):
        experts.say_once("why: %s", "a newer GPU, only here")
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    weight_format.ours_lacks.cache_clear()
    case = random_layer(3, **PAIR | {"ranks": 1}, dtype=torch.bfloat16)
    call, counts = case.call(0), torch.tensor([9, 0, 20, 3], dtype=torch.int32)
    x = torch.randn(40, 32, generator=torch.Generator().manual_seed(0)).bfloat16()
    w13 = case.w13
    got = experts.apply_experts(PLAIN, x, w13, call["w2"], counts, lacks="it is asked for")[:32]
    want = experts.apply_experts(PLAIN, x, w13, call["w2"], counts)[:32]
    torch.testing.assert_close(got, want, rtol=2**-6, atol=2**-6)


class OnGpu(NamedTuple):
    """A stand-in for the tokens of a GPU, with the attributes that the choice reads."""

    is_cuda: bool = True
    dtype: torch.dtype = torch.bfloat16
    device: torch.device = torch.device("cuda", 0)


@pytest.mark.parametrize("domain_ranks", [2, 4])
def test_a_fused_layer_over_domains_runs_unfused(
    domain_ranks: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """CPU ranks, as if on GPUs: over domains they say once why they do not fuse, and have the same bits."""
    found, real = [], layer._why_unfused

    def why(rounds: Any, x: torch.Tensor, *rest: Any) -> str:
        found.append(real(rounds, OnGpu(), *rest))  # type: ignore[arg-type]
        return found[-1] or "there is no GPU after all"

    experts.say_once.cache_clear()
    monkeypatch.setattr(layer, "_why_unfused", why)
    monkeypatch.setattr(weight_format, "ours_lacks", lambda *about: "")
    sizes = SIZES[3] | {"max_tokens": 9}
    case = random_layer(5, **sizes, dtype=torch.bfloat16)
    case.wire = None
    with opened(sizes, domain_ranks=domain_ranks) as buffers:
        calls = [case.call(rank) for rank in range(4)]
        apart = buffers.moe([{**given, "fused": False} for given in calls])
        assert found == []
        for _ in range(2):
            outs = buffers.moe([{**given, "fused": True} for given in calls])
            assert all(torch.equal(out, same) for out, same in zip(outs, apart, strict=True))
    several = "the ranks are in several domains"
    assert set(found) == ({several} if domain_ranks < 4 else {""}) and len(found) == 4, (
        "one look a rank: the second call is known"
    )
    said = [record.getMessage() for record in caplog.records if "unfused" in record.getMessage()]
    assert len(said) == 1 and said[0].endswith(several if domain_ranks < 4 else "there is no GPU after all")


@pytest.mark.parametrize(("intermediate", "dtype"), [(5, torch.float32), (12, torch.bfloat16), (60, torch.float16)])
def test_torch_multiplies_experts_of_any_width(intermediate: int, dtype: torch.dtype) -> None:
    """Its grouped GEMM wants rows of a multiple of 16 bytes."""
    g = torch.Generator().manual_seed(1)
    x, w13, w2 = (torch.randn(s, generator=g) for s in ((29, 32), (3, 2 * intermediate, 32), (3, 32, intermediate)))
    counts = torch.tensor([9, 0, 20], dtype=torch.int32)
    x, *given = x.to(dtype), w13.to(dtype) / 6, w2.to(dtype) / 6, counts
    got = experts.apply_experts(PLAIN, x, *given, lacks="it is asked for")
    torch.testing.assert_close(got, experts.apply_experts(PLAIN, x, *given), rtol=2**-5, atol=2**-5)


def test_what_the_dispatch_left_behind_keeps_no_rank_from_the_combine(monkeypatch: pytest.MonkeyPatch) -> None:
    """On GPUs one rank's host may know of a void dispatch when it comes to the combine, and another's may not yet."""
    case = random_layer(4, **PAIR | {"ranks": 1}, dtype=torch.float32)
    with opened(PAIR | {"ranks": 1}, torch.float32) as ranks:
        (buffer,) = ranks.buffers
        given, looked = prepare_moe(buffer, **case.call(0)), []
        (routed,) = ranks.dispatch_layers([given])
        given.compute(routed)
        with monkeypatch.context() as context:
            context.setattr(type(buffer.rounds), "require_usable", lambda self: looked.append(self))
            given.prepare_reduce()
            assert not looked
            prepare_combine(buffer, routed.x, routed.handle)
            assert looked
        given.run_reduce()
        case.check(0, given.finish_reduce())
