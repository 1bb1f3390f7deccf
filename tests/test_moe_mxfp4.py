"""Buffer.moe with weights in MXFP4 on CPU ranks: the bits of a layer with the weights that they stand for."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from moecomm import ops
from moecomm.errors import BadInput, Unsupported
from moecomm.fused import Fp8, Mxfp4
from moecomm.fused.fp4 import dequantize
from moecomm.testing import LocalBuffers, random_layer

SIZES: dict[str, Any] = {
    "ranks": 2,
    "hidden": 96,
    "intermediate": 64,
    "num_experts": 4,
    "topk": 2,
    "max_tokens": 33,
}


def drawn(seed: int, experts: int, rows: int, columns: int) -> Mxfp4:
    """Weights of about 1 / sqrt(columns)."""
    g = torch.Generator().manual_seed(seed)
    data = torch.randint(0, 256, (experts, rows, columns // 2), generator=g)
    scales = torch.randint(120, 125, (experts, rows, columns // 32), generator=g)
    return Mxfp4(data.to(torch.uint8), scales.to(torch.uint8))


def opened(dtype: torch.dtype = torch.bfloat16, **more: Any) -> LocalBuffers:
    sizes = {name: size for name, size in {**SIZES, **more}.items() if name != "intermediate"}
    return LocalBuffers(**sizes, dtype=dtype, backend="host", timeout_s=20)


def test_a_layer_has_the_bits_of_one_with_bf16_weights() -> None:
    with opened() as ranks:
        for seed in range(6):
            case = random_layer(seed, **SIZES, dtype=torch.bfloat16, experts=True)
            w13, w2 = drawn(seed, 4, 128, 96), drawn(seed + 1, 4, 96, 64)
            case.w13, case.w2, case.interleaved = dequantize(w13), dequantize(w2), False
            calls = [case.call(rank) for rank in range(2)]
            given = []
            for rank, call in enumerate(calls):
                mine = slice(2 * rank, 2 * rank + 2)
                pairs = {name: (w.data[mine], w.scales[mine]) for name, w in (("w13", w13), ("w2", w2))}
                given.append(call | pairs)
            if seed % 2:
                for call in given:
                    for name in ("w13", "w2"):
                        call[name] = call[name][0], call[name][1].view(torch.float8_e8m0fnu)
            for rank, (out, want) in enumerate(zip(ranks.moe(given), ranks.moe(calls), strict=True)):
                case.check(rank, out)
                assert torch.equal(out, want)


def test_what_does_not_fit_is_named_before_a_row_is_sent() -> None:
    case = random_layer(3, **SIZES | {"ranks": 1}, dtype=torch.bfloat16)
    w13, w2 = drawn(1, 4, 128, 96), drawn(2, 4, 96, 64)
    good = case.call(0) | {"w13": w13, "w2": w2, "interleaved": False}
    refused: list[dict[str, Any]] = [
        {"w13": case.w13},
        {"w2": case.w2},
        {"w2": Fp8(torch.zeros(4, 96, 64).to(torch.float8_e4m3fn), torch.ones(4, 96))},
        {"w13": (w13.data[:, :-2], w13.scales)},
        {"w13": (torch.cat((w13.data, w13.data), 2)[:, :, :48], w13.scales)},  # with gaps
        {"w13": (w13.data, w13.scales[:, :, :-1])},
        {"w2": (w2.data, w2.scales.int())},
        {"w2": (w2.data[:3], w2.scales[:3])},
    ]
    with opened(ranks=1) as ranks:
        (buffer,) = ranks.buffers
        for change in refused:
            with pytest.raises(BadInput) as caught:
                buffer.moe(**good | change)
            assert caught.value.argument in ("w13", "w2"), change
        with pytest.raises(Unsupported, match="multiple of 32"):
            buffer.moe(**good | {"w2": (w2.data[:, :, :24].contiguous(), w2.scales)})
        with pytest.raises(Unsupported, match="quantized"):
            ops.moe(buffer, **good | {"x": good["x"].clone().requires_grad_()})
        assert torch.equal(buffer.moe(**good), ops.moe(buffer, **good))
    with opened(torch.float16, ranks=1) as ranks, pytest.raises(Unsupported, match="bfloat16"):
        ranks.buffers[0].moe(**good | {"x": good["x"].half(), "bias": None})
