"""Buffer.moe with weights in NVFP4 on CPU ranks: the bits of a layer with the weights that they stand for."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from moecomm import ops
from moecomm.errors import BadInput, Unsupported
from moecomm.fused import Nvfp4
from moecomm.fused.fp4 import dequantize
from moecomm.testing import LocalBuffers, random_layer

SIZES: dict[str, Any] = {"ranks": 2, "hidden": 80, "num_experts": 4, "topk": 2, "max_tokens": 33}
INTERMEDIATE = 48


def drawn(seed: int, rows: int, columns: int, *factors: int) -> Nvfp4:
    """Weights of about 1 / sqrt(columns) of 4 experts."""
    g = torch.Generator().manual_seed(seed)
    data = torch.randint(0, 256, (4, rows, columns // 2), generator=g).to(torch.uint8)
    scales = (0.5 + torch.rand(4, rows, columns // 16, generator=g)).to(torch.float8_e4m3fn)
    return Nvfp4(data, scales, 0.03 + 0.03 * torch.rand(4, *factors, generator=g))


def opened(dtype: torch.dtype = torch.bfloat16, ranks: int = 2) -> LocalBuffers:
    return LocalBuffers(**SIZES | {"ranks": ranks}, dtype=dtype, backend="host", timeout_s=20)


@pytest.mark.parametrize("activation", ["swiglu", "swigluoai"])
@pytest.mark.parametrize("factors", [(), (1,), (2 * INTERMEDIATE,)])
def test_a_layer_has_the_bits_of_one_with_bf16_weights(activation: str, factors: tuple[int, ...]) -> None:
    w13, w2 = drawn(1, 2 * INTERMEDIATE, 80, *factors), drawn(2, 80, INTERMEDIATE)
    case = random_layer(3, **SIZES, intermediate=INTERMEDIATE, dtype=torch.bfloat16, experts=True)
    case.w13, case.w2, case.interleaved = dequantize(w13), dequantize(w2), False
    biases = torch.randn(4, 2 * INTERMEDIATE), torch.randn(4, 80)
    calls, given = [], []
    for rank in range(2):
        mine = slice(2 * rank, 2 * rank + 2)
        more = {"activation": activation, "w13_bias": biases[0][mine], "w2_bias": biases[1][mine]}
        calls.append(case.call(rank) | more)
        packed = {name: tuple(part[mine] for part in w) for name, w in (("w13", w13), ("w2", w2))}
        given.append(calls[-1] | packed)
    with opened() as ranks:
        for _ in range(2):  # a layer that is known, too
            for out, want in zip(ranks.moe(given), ranks.moe(calls), strict=True):
                assert torch.equal(out, want)


def test_a_layer_is_that_of_a_float64_model_of_the_widened_weights() -> None:
    w13, w2 = drawn(1, 2 * INTERMEDIATE, 80), drawn(2, 80, INTERMEDIATE)
    case = random_layer(3, **SIZES, intermediate=INTERMEDIATE, dtype=torch.bfloat16, experts=True)
    case.w13, case.w2, case.interleaved = dequantize(w13), dequantize(w2), False
    with opened() as ranks:
        of_rank = [slice(0, 2), slice(2, 4)]
        given = [
            case.call(rank) | {"w13": Nvfp4(*(p[mine] for p in w13)), "w2": Nvfp4(*(p[mine] for p in w2))}
            for rank, mine in enumerate(of_rank)
        ]
        for rank, out in enumerate(ranks.moe(given)):
            case.check(rank, out)


def test_what_does_not_fit_is_named_before_a_row_is_sent() -> None:
    case = random_layer(3, **SIZES | {"ranks": 1}, intermediate=INTERMEDIATE, dtype=torch.bfloat16)
    w13, w2 = drawn(1, 2 * INTERMEDIATE, 80), drawn(2, 80, INTERMEDIATE)
    good = case.call(0) | {"w13": w13, "w2": w2, "interleaved": False}
    refused: list[dict[str, Any]] = [
        {"w13": case.w13},
        {"w2": case.w2},
        {"w2": (w2.data, torch.zeros(4, 80, 3, dtype=torch.uint8))},  # MXFP4
        {"w13": (*w13, w13.factors)},
        {"w13": w13._replace(scales=w13.scales[:, :, :-1])},
        {"w2": w2._replace(scales=w2.scales.view(torch.uint8))},
        {"w2": w2._replace(factors=w2.factors.double())},
        {"w13": w13._replace(factors=w13.factors[:3])},
        {"w2": w2._replace(data=w2.data[:3])},
    ]
    with opened(ranks=1) as ranks:
        (buffer,) = ranks.buffers
        for change in refused:
            for call in (buffer.moe, lambda **given: ops.moe(buffer, **given)):
                with pytest.raises(BadInput) as caught:
                    call(**good | change)
                assert caught.value.argument in ("w13", "w2"), change
        with pytest.raises(Unsupported, match="multiple of 16"):
            buffer.moe(**good | {"w2": w2._replace(data=w2.data[:, :, :20].contiguous())})
        with pytest.raises(Unsupported, match="quantized"):
            ops.moe(buffer, **good | {"x": good["x"].clone().requires_grad_()})
        assert torch.equal(buffer.moe(**good), ops.moe(buffer, **good))
    with opened(torch.float16, ranks=1) as ranks, pytest.raises(Unsupported, match="bfloat16"):
        ranks.buffers[0].moe(**good | {"x": good["x"].half(), "bias": None})
