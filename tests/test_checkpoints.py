"""Layers with weights of made-up checkpoints, against their sums in float64, of numbers that a table here decodes."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn.functional import silu

from moecomm import BadInput, Placement, checkpoints
from moecomm.dispatch.reference import GROUP
from moecomm.fused import fp4, fp8, pack_mxfp4, packed_mxfp4
from moecomm.testing import LocalBuffers

HIDDEN, INNER, EXPERTS, TOPK, TOKENS, RANKS = 96, 64, 6, 2, 17, 2
E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], dtype=torch.float64)
# Slots of two ranks: empty ones, experts in another order, and one with a replica.
HELD = [[5, -1, 0, 2], [1, 3, 4, 0]]


class Checkpoint:
    """Tensors by name, and what they stand for: gate, up `[E, I, H]` and down `[E, H, I]`, and biases, in float64."""

    def __init__(self, seed: int) -> None:
        self.g = torch.Generator().manual_seed(seed)
        self.tensors: dict[str, torch.Tensor] = {}
        self.biases: tuple[Any, Any, Any] = (0.0, 0.0, 0.0)

    def packed(self, rows: int, columns: int, group: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Draw bytes, and exponents of about 1 / sqrt(columns) for groups; return them and the values."""
        data = torch.randint(0, 256, (rows, columns // 2), generator=self.g, dtype=torch.uint8)
        exponents = torch.randint(121, 124, (rows, columns // group), generator=self.g, dtype=torch.uint8)
        codes = torch.stack((data % 16, data // 16), 2).flatten(1)
        return data, exponents, E2M1[codes.long()]


def of_gpt_oss() -> tuple[Checkpoint, torch.Tensor, torch.Tensor, torch.Tensor]:
    made, values = Checkpoint(0), {}
    for name, rows, columns in (("gate_up_proj", 2 * INNER, HIDDEN), ("down_proj", HIDDEN, INNER)):
        data, exponents, numbers = made.packed(EXPERTS * rows, columns, 32)
        shape = (EXPERTS, rows, columns // 32)
        made.tensors[f"x.{name}_blocks"] = data.view(*shape, 16)
        made.tensors[f"x.{name}_scales"] = exponents.view(shape)
        made.tensors[f"x.{name}_bias"] = torch.randn(EXPERTS, rows, generator=made.g).bfloat16()
        factors = 2.0 ** (exponents.double() - 127)
        values[name] = (numbers * factors.repeat_interleave(32, 1)).view(EXPERTS, rows, columns)
    both, down = (made.tensors[f"x.{name}_bias"].double() for name in values)
    made.biases = both[:, 0::2], both[:, 1::2], down
    return made, values["gate_up_proj"][:, 0::2], values["gate_up_proj"][:, 1::2], values["down_proj"]


def of_deepseek() -> tuple[Checkpoint, torch.Tensor, torch.Tensor, torch.Tensor]:
    made = Checkpoint(1)

    def drawn(part: str, rows: int, columns: int) -> torch.Tensor:
        found = []
        for expert in range(EXPERTS):
            data, exponents, numbers = made.packed(rows, columns, 32)
            made.tensors[f"x.{expert}.{part}.weight"] = data.view(torch.int8)
            made.tensors[f"x.{expert}.{part}.scale"] = exponents.view(torch.float8_e8m0fnu)
            found.append(numbers * (2.0 ** (exponents.double() - 127)).repeat_interleave(32, 1))
        return torch.stack(found)

    return made, drawn("w1", INNER, HIDDEN), drawn("w3", INNER, HIDDEN), drawn("w2", HIDDEN, INNER)


def of_modelopt() -> tuple[Checkpoint, torch.Tensor, torch.Tensor, torch.Tensor]:
    made = Checkpoint(2)

    def drawn(part: str, rows: int, columns: int) -> torch.Tensor:
        found = []
        for expert in range(EXPERTS):
            data, _, numbers = made.packed(rows, columns, 32)
            scales = (0.5 + torch.rand(rows, columns // 16, generator=made.g)).to(torch.float8_e4m3fn)
            factor = 0.02 + 0.02 * torch.rand((), generator=made.g)
            for name, tensor in (("weight", data), ("weight_scale", scales), ("weight_scale_2", factor)):
                made.tensors[f"x.{expert}.{part}_proj.{name}"] = tensor
            found.append(numbers * scales.double().repeat_interleave(16, 1) * factor.double())
        return torch.stack(found)

    return made, drawn("gate", INNER, HIDDEN), drawn("up", INNER, HIDDEN), drawn("down", HIDDEN, INNER)


def swigluoai(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    low = gate.clamp(max=7.0)
    return (up.clamp(-7.0, 7.0) + 1) * low * torch.sigmoid(1.702 * low)


ACTIVATED: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "gpt-oss": swigluoai,
    "DeepSeek-V4": lambda gate, up: silu(gate.clamp(max=10.0)) * up.clamp(-10.0, 10.0),
    "ModelOpt": lambda gate, up: silu(gate) * up,
}


LOADERS: dict[str, tuple[Callable[..., dict[str, Any]], Callable[[], Any]]] = {
    "gpt-oss": (checkpoints.gpt_oss, of_gpt_oss),
    "DeepSeek-V4": (checkpoints.deepseek_v4, of_deepseek),
    "ModelOpt": (checkpoints.modelopt, of_modelopt),
}


@pytest.mark.parametrize("placed", [False, True])
@pytest.mark.parametrize("name", LOADERS)
def test_a_layer_has_the_sums_of_its_checkpoint(name: str, placed: bool) -> None:
    load, make = LOADERS[name]
    made, gate, up, down = make()
    about = {"placement": Placement(HELD)} if placed else {}
    sizes: dict[str, Any] = {"hidden": HIDDEN, "num_experts": EXPERTS, "topk": TOPK, "max_tokens": TOKENS}
    with LocalBuffers(RANKS, **sizes, backend="host", timeout_s=20, **about) as ranks:
        calls, wants = [], []
        for buffer in ranks.buffers:
            x = 4 * torch.randn(TOKENS, HIDDEN, generator=made.g).bfloat16()  # some are beyond the limits
            ids = torch.rand(TOKENS, EXPERTS, generator=made.g).argsort(dim=1)[:, :TOPK].contiguous()
            weights = torch.rand(TOKENS, TOPK, generator=made.g)
            given = load(made.tensors, buffer.local_experts, prefix="x.")
            calls.append({"x": x, "topk_idx": ids, "topk_weights": weights, **given})
            left, right = (torch.einsum("th,eih->tei", x.double(), one) for one in (gate, up))
            left, right = left + made.biases[0], right + made.biases[1]
            inner = ACTIVATED[name](left, right)
            y = torch.einsum("tei,ehi->teh", inner, down) + made.biases[2]
            chosen = y.gather(1, ids.unsqueeze(2).expand(-1, -1, HIDDEN))
            wants.append((chosen * weights.double().unsqueeze(2)).sum(1))
        for out, want in zip(ranks.moe(calls), wants, strict=True):
            assert (out.double() - want).abs().max() <= 2**-5 * want.abs().max()


@pytest.mark.parametrize("name", ["gpt-oss", "DeepSeek-V4"])
def test_packed_weights_of_a_checkpoint_stand_for_its_values(name: str) -> None:
    """Also those of empty slots, which are 0."""
    load, make = LOADERS[name]
    given = load(make()[0].tensors, HELD[0], prefix="x.")
    for argument, depth in (("w13", HIDDEN), ("w2", INNER)):
        packed = pack_mxfp4(given[argument])
        wide = fp8.widen(*packed_mxfp4.unpack(packed), GROUP)
        assert torch.equal(wide[:, :, :depth], fp4.dequantize(given[argument]).float())
        assert not bool(wide[1].any() or wide[:, :, depth:].any())


@pytest.mark.parametrize("name", LOADERS)
def test_all_experts_are_those_of_any_ranks(name: str) -> None:
    """Bytes are those of the checkpoint, in memory of their own; empty slots have zeros."""
    load, make = LOADERS[name]
    made = make()[0]
    whole = load(made.tensors, prefix="x.")
    some = load(made.tensors, (4, -1, 1), prefix="x.", device="cpu")
    assert whole.keys() == some.keys()
    for argument, all_experts in whole.items():
        if argument.startswith("activation"):
            continue
        packed = isinstance(all_experts, tuple)
        for one, few in zip(all_experts, some[argument], strict=True) if packed else [(all_experts, some[argument])]:
            assert one.is_contiguous() and few.is_contiguous() and len(one) == EXPERTS and one.dtype is few.dtype
            one, few = (t.view(torch.uint8) if t.element_size() == 1 else t for t in (one, few))
            assert torch.equal(few, torch.stack((one[4], torch.zeros_like(one[0]), one[1])))
            assert not any(one.data_ptr() == tensor.data_ptr() for tensor in made.tensors.values())


@pytest.mark.parametrize("name", LOADERS)
def test_what_is_no_such_checkpoint(name: str) -> None:
    load, make = LOADERS[name]
    tensors = make()[0].tensors
    some = next(iter(tensors))
    for changed in (
        {},
        {other: tensor for other, tensor in tensors.items() if other != some},
        {**tensors, some: tensors[some].double()},
        {**tensors, some: tensors[some][0]},
        {**tensors, some: tensors[some].to_sparse() if name != "ModelOpt" else tensors[some].float()},
    ):
        with pytest.raises(BadInput, match=r"tensors: got .*(x\.|sparse)"):
            load(changed, prefix="x.")
    for experts in ("0", 1, [0.0], [-2], [EXPERTS], [True]):
        with pytest.raises(BadInput, match=r"experts: got|tensors: got no x\.6"):
            load(tensors, experts, prefix="x.")
    with pytest.raises(BadInput, match="prefix"):
        load(tensors, prefix=3)
    with pytest.raises(BadInput, match="tensors"):
        load(list(tensors), prefix="x.")


def test_experts_of_other_shapes_are_named() -> None:
    tensors = of_deepseek()[0].tensors
    with pytest.raises(BadInput, match=r"x\.3\.w3\.weight \(1, 48\); want \(64, 48\), as expert 0 has"):
        checkpoints.deepseek_v4({**tensors, "x.3.w3.weight": tensors["x.3.w3.weight"][:1]}, prefix="x.")
    factors = of_modelopt()[0].tensors
    with pytest.raises(BadInput, match=r"x\.2\.up_proj\.weight_scale_2 \(2,\); want one element"):
        checkpoints.modelopt({**factors, "x.2.up_proj.weight_scale_2": torch.ones(2)}, prefix="x.")
    blocks = of_gpt_oss()[0].tensors
    with pytest.raises(BadInput, match="an even number of rows"):
        checkpoints.gpt_oss({**blocks, "x.gate_up_proj_bias": torch.ones(EXPERTS, 3)}, prefix="x.")


CONFIGS: dict[str, tuple[dict[str, Any], int | None, tuple[Any, ...]]] = {
    "plain": ({"hidden_act": "silu"}, None, ("swiglu",)),
    "no activation, no limit": ({"swiglu_limit": 0.0}, None, ("swiglu",)),
    "Gemma 4": ({"hidden_activation": "gelu_pytorch_tanh"}, None, ("geglu_tanh",)),
    "DeepSeek-V4": ({"hidden_act": "silu", "swiglu_limit": 10.0}, 3, ("swiglu", 10.0)),
    "GLM-5.3": ({"text_config": {"hidden_act": "silu", "swiglu_limit": 10.0}}, None, ("swiglu", 10.0)),
    "Step-3.7, a layer without": ({"swiglu_limits": [0.0, None, 7]}, 1, ("swiglu",)),
    "Step-3.7": ({"swiglu_limits": [0.0, None, 7]}, 2, ("swiglustep", 7.0)),
    "gpt-oss": (
        {"model_type": "gpt_oss", "hidden_act": "silu", "swiglu_limit": 6.0},
        None,
        ("swigluoai", 6.0, 1.702),
    ),
    "MiniMax-M3": (
        {"hidden_act": "swigluoai", "swiglu_limit": 7.0, "swiglu_alpha": 1.5},
        None,
        ("swigluoai", 7.0, 1.5),
    ),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_an_activation_is_that_of_the_config(name: str) -> None:
    config, layer, want = CONFIGS[name]
    found = checkpoints.activation(config, layer)
    assert tuple(found.values()) == want
    assert list(found) == ["activation", "activation_limit", "activation_alpha"][: len(want)]
    given = checkpoints.modelopt(of_modelopt()[0].tensors, prefix="x.", config=config, layer=layer)
    assert found.items() <= given.items()
    for load, make in (LOADERS["gpt-oss"], LOADERS["DeepSeek-V4"]):
        if layer is None:
            assert found.items() <= load(make()[0].tensors, prefix="x.", config=config).items()


@pytest.mark.parametrize(
    ("config", "layer", "argument"),
    [
        ({"hidden_act": "relu2"}, None, "activation"),
        ({"hidden_act": "gelu", "swiglu_limit": 7.0}, None, "activation_limit"),
        ({"swiglu_limits": [0.0, 7.0]}, None, "layer"),
        ({"swiglu_limits": [0.0, 7.0]}, 2, "layer"),
        ("config.json", None, "config"),
        ({"vocab_size": 129280}, None, "config"),
        ({"text_config": "silu"}, None, "config"),
        ({"hidden_act": "silu"}, -1, "layer"),
    ],
)
def test_configs_that_no_layer_computes(config: Any, layer: int | None, argument: str) -> None:
    with pytest.raises(BadInput) as caught:
        checkpoints.activation(config, layer)
    assert caught.value.argument == argument


def test_scales_that_are_no_numbers_are_named() -> None:
    factors = of_modelopt()[0].tensors
    for value in (0.0, -1.0, float("inf"), float("nan")):
        changed = {**factors, "x.2.up_proj.weight_scale_2": torch.tensor(value)}
        with pytest.raises(BadInput, match=rf"x\.2\.up_proj\.weight_scale_2 of {value}; want a finite number above 0"):
            checkpoints.modelopt(changed, prefix="x.")
        assert checkpoints.modelopt(changed, [0, -1, 1], prefix="x.")
    for load, made, name, nans in (
        (checkpoints.modelopt, of_modelopt, "x.3.down_proj.weight_scale", (0x7F, 0xFF)),
        (checkpoints.deepseek_v4, of_deepseek, "x.3.w3.scale", (0xFF,)),
        (checkpoints.gpt_oss, of_gpt_oss, "x.down_proj_scales", (0xFF,)),
    ):
        tensors = made()[0].tensors
        for nan in nans:
            scales = tensors[name].clone()
            scales.view(torch.uint8).flatten()[-1] = nan
            with pytest.raises(BadInput, match=rf"{re.escape(name)} with NaN; want scales that are numbers"):
                load({**tensors, name: scales}, prefix="x.")
            load({**tensors, name: scales}, [0, -1, 4], prefix="x.", device="meta")  # of other experts
