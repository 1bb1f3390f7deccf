"""Arguments of Buffer.moe from checkpoints: four-bit weights of experts, and activations.

A loader takes tensors by name, such as safetensors.torch.load_file() returns them, and gives what
`buffer.moe(x, topk_idx, topk_weights, **given)` takes.  Every byte is copied once: rows into their order, experts below
each other.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from moecomm.base.placement import NONE
from moecomm.base.validation import check_dense, check_device, check_integer, is_integer
from moecomm.errors import BadInput
from moecomm.fused import Mxfp4, Nvfp4
from moecomm.fused.activations import check_activation

__all__ = ["activation", "deepseek_v4", "gpt_oss", "modelopt"]

_BYTES = torch.uint8, torch.int8
_EXPONENTS = torch.uint8, torch.float8_e8m0fnu
_NAN_EXPONENT, _NAN_E4M3 = 0xFF, 0x7F  # the latter without its sign
_NUMBERS = torch.bfloat16, torch.float16, torch.float32
_KEYS = "hidden_act", "hidden_activation", "model_type", "swiglu_limit", "swiglu_limits"
_ACTIVATIONS = {"silu": "swiglu", "swish": "swiglu", "gelu": "geglu", "gelu_pytorch_tanh": "geglu_tanh"}


def activation(config: Mapping[str, Any], layer: int | None = None) -> dict[str, Any]:
    """Return the activation of a model's experts, with its limit: arguments of Buffer.moe and of nn.ExpertParallel.

    A config with `swiglu_limit` limits gate and up before SiLU (DeepSeek-V4, GLM-5.3, HY-V4), one with `swiglu_limits`
    behind it, in some layers (Step-3.7).  gpt-oss and MiniMax-M3 have "swigluoai".

    Args:
        config: config.json of the checkpoint, or its part about the language model.
        layer: number of the layer among all layers of the model; only for a config with limits by layer.

    Raises:
        BadInput: no config of a model; an activation or a limit that no layer computes; no such layer.
    """
    text = config.get("text_config", config) if isinstance(config, Mapping) else None
    if not isinstance(text, Mapping) or not any(key in text for key in _KEYS):
        raise BadInput("config", f"{type(config).__name__} without {_KEYS[0]}", "config.json of a checkpoint")
    if layer is not None:
        check_integer("layer", layer, 0)
    found = next((text[key] for key in _KEYS[:2] if text.get(key) is not None), "silu")
    name, limit, alpha = _ACTIVATIONS.get(str(found), found), text.get("swiglu_limit"), text.get("swiglu_alpha")
    if text.get("model_type") == "gpt_oss" or alpha is not None:
        name = "swigluoai"
    if limits := text.get("swiglu_limits"):
        if layer is None or layer >= len(limits):
            raise BadInput("layer", repr(layer), f"0 to {len(limits) - 1}: this model has limits by layer")
        limit = limits[layer]
        name = "swiglustep" if limit and name == "swiglu" else name
    return check_activation(name, limit or None, alpha).arguments()


def gpt_oss(
    tensors: Mapping[str, torch.Tensor],
    experts: Sequence[int] | None = None,
    *,
    prefix: str = "",
    device: torch.device | str | None = None,
    config: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Return MXFP4 weights, biases and the activation of a layer of gpt-oss.

    The checkpoint has all experts in one tensor, and rows of gate and up in turn:

        given = checkpoints.gpt_oss(file, buffer.local_experts, prefix="model.layers.0.mlp.experts.", device="cuda")

    Args:
        tensors: `gate_up_proj_blocks` uint8 `[E, 2 I, H / 32, 16]`, `gate_up_proj_scales` uint8 `[E, 2 I, H / 32]`,
            `gate_up_proj_bias` `[E, 2 I]`, and `down_proj_...` likewise, by these names behind `prefix`.
        experts: of this rank, -1 for an empty slot, whose weights are 0.  None: all.
        prefix: of names.
        device: of the result.  None: that of the checkpoint's tensors.
        config: see activation().  None: that of the released models, with a limit of 7.0.

    Raises:
        BadInput: no such tensor, or one of another type; an expert that is not there; a scale that is NaN; as
            activation().
    """
    _check(tensors, experts, prefix, device)
    found = activation({"model_type": "gpt_oss"} if config is None else config)
    for w, name in (("w13", "gate_up_proj"), ("w2", "down_proj")):
        stacked = partial(_stacked, tensors, experts, device, rows_in_turn=w == "w13")
        blocks = stacked(f"{prefix}{name}_blocks", (torch.uint8,), 4)
        found[w] = Mxfp4(blocks.flatten(2), stacked(f"{prefix}{name}_scales", _EXPONENTS, 3, nan=_NAN_EXPONENT))
        found[f"{w}_bias"] = stacked(f"{prefix}{name}_bias", _NUMBERS, 2)
    return found


def deepseek_v4(
    tensors: Mapping[str, torch.Tensor],
    experts: Sequence[int] | None = None,
    *,
    prefix: str = "",
    device: torch.device | str | None = None,
    config: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Return MXFP4 weights and the activation of a layer of DeepSeek-V4.

    The checkpoint has tensors for each expert: `w1` is gate, `w3` up, `w2` down.

        given = checkpoints.deepseek_v4(file, buffer.local_experts, prefix="layers.3.ffn.experts.")

    Args:
        tensors: `{expert}.{part}.weight` int8 `[N, K / 2]`, the even column in the low four bits, and
            `{expert}.{part}.scale` float8_e8m0fnu `[N, K / 32]`, by these names behind `prefix`.
        experts: of this rank, -1 for an empty slot, whose weights are 0.  None: 0 to the last one in a row.
        prefix, device: see gpt_oss().
        config: see activation().  None: that of the released models, with a limit of 10.0.

    Raises:
        BadInput: as gpt_oss().
    """
    _check(tensors, experts, prefix, device)
    found = activation({"swiglu_limit": 10.0} if config is None else config)
    for w, parts in (("w13", ("w1", "w3")), ("w2", ("w2",))):
        some = _Experts(tensors, prefix, experts, parts, device)
        scales = some.rows("scale", _EXPONENTS, nan=_NAN_EXPONENT)
        found[w] = Mxfp4(some.rows("weight", _BYTES), scales.view(torch.float8_e8m0fnu))
    return found


def modelopt(
    tensors: Mapping[str, torch.Tensor],
    experts: Sequence[int] | None = None,
    *,
    prefix: str = "",
    device: torch.device | str | None = None,
    config: Mapping[str, Any] | None = None,
    layer: int | None = None,
) -> dict[str, Any]:
    """Return NVFP4 weights and the activation of a layer as ModelOpt writes it.

    The checkpoint has tensors for each expert: `gate_proj`, `up_proj` and `down_proj`.  Gate and up have factors of
    their own, so `w13` gets one for each row.

        given = checkpoints.modelopt(file, buffer.local_experts, prefix="model.layers.3.mlp.experts.")

    Args:
        tensors: `{expert}.{part}.weight` uint8 `[N, K / 2]`, `{expert}.{part}.weight_scale` float8_e4m3fn `[N, K / 16]`
            and `{expert}.{part}.weight_scale_2` float32 of one element, by these names behind `prefix`.
        experts: see deepseek_v4().
        prefix, device: see gpt_oss().
        config, layer: see activation().  None: "swiglu" without a limit, which not all models have.

    Raises:
        BadInput: as gpt_oss(); a `weight_scale_2` that is no finite number above 0.
    """
    _check(tensors, experts, prefix, device)
    found = activation({"hidden_act": "silu"} if config is None else config, layer)
    for w, parts in (("w13", ("gate_proj", "up_proj")), ("w2", ("down_proj",))):
        some = _Experts(tensors, prefix, experts, parts, device)
        data, scales = some.rows("weight", _BYTES), some.rows("weight_scale", (torch.float8_e4m3fn,), nan=_NAN_E4M3)
        factors = some.numbers("weight_scale_2")
        if len(parts) > 1:
            factors = factors.repeat_interleave(data.shape[1] // len(parts), dim=1)
        found[w] = Nvfp4(data, scales.view(torch.float8_e4m3fn), factors)
    return found


def _stacked(
    tensors: Mapping[str, torch.Tensor],
    experts: Sequence[int] | None,
    device: torch.device | str | None,
    name: str,
    dtypes: tuple[torch.dtype, ...],
    dims: int,
    *,
    rows_in_turn: bool,
    nan: int | None = None,
) -> torch.Tensor:
    """Return some experts of a tensor that has all of them.

    Args:
        tensors, experts, device: see gpt_oss().
        name, dtypes, dims: of the tensor.
        rows_in_turn: its even rows come first, and then the others.
        nan: the byte that is refused, see _refuse_nan().
    """
    whole = _tensor(tensors, name, dtypes, dims)
    ids = list(range(len(whole)) if experts is None else experts)
    if max(ids, default=NONE) >= len(whole):
        raise BadInput("experts", max(ids), f"-1 to {len(whole) - 1}, as {name} has")
    if rows_in_turn and whole.shape[1] % 2:
        raise BadInput("tensors", f"{name} {tuple(whole.shape)}", "an even number of rows")
    if rows_in_turn:
        whole = whole.reshape(len(whole), -1, 2, *whole.shape[2:]).transpose(1, 2)
    made = whole.index_select(0, torch.tensor(ids, dtype=torch.int64, device=whole.device).clamp(min=0))
    if NONE in ids:
        made[[slot for slot, expert in enumerate(ids) if expert == NONE]] = 0
    if nan is not None:
        _refuse_nan(name, made, nan)
    return (made.flatten(1, 2) if rows_in_turn else made).to(device)


class _Experts:
    """Tensors that a checkpoint has for each expert: some parts, whose rows go below each other.

    Args:
        tensors, prefix, experts, device: see gpt_oss().
        parts: of an expert.
    """

    def __init__(
        self,
        tensors: Mapping[str, torch.Tensor],
        prefix: str,
        experts: Sequence[int] | None,
        parts: Sequence[str],
        device: torch.device | str | None,
    ) -> None:
        self._tensors, self._prefix, self._parts = tensors, prefix, parts
        if experts is None:
            last = 0
            while f"{prefix}{last}.{parts[0]}.weight" in tensors:
                last += 1
            experts = range(max(last, 1))  # of expert 0 the first name is looked for, and named
        self._experts = list(experts)
        self._some = next((expert for expert in experts if expert != NONE), 0)
        first = _tensor(tensors, self._name(self._some, parts[0], "weight"), _BYTES, 2)
        self._device = first.device if device is None else device

    def rows(self, name: str, dtypes: tuple[torch.dtype, ...], nan: int | None = None) -> torch.Tensor:
        """Return bytes `[experts, parts * N, columns]` of tensors `[N, columns]` with one byte an element.

        `nan`: the byte that is refused, see _refuse_nan().
        """
        shape = _tensor(self._tensors, self._name(self._some, self._parts[0], name), dtypes, 2).shape
        sizes = len(self._experts), len(self._parts), *shape
        made = torch.zeros(sizes, dtype=torch.uint8, device=self._device)
        for slot, nth, found in self._each(name, dtypes, shape):
            made[slot, nth].copy_(found.view(torch.uint8))
            if nan is not None:
                _refuse_nan(self._name(self._experts[slot], self._parts[nth], name), found, nan)
        return made.flatten(1, 2)

    def numbers(self, name: str) -> torch.Tensor:
        """Return float32 `[experts, parts]` of tensors with one element, a finite number above 0."""
        made = torch.zeros(len(self._experts), len(self._parts))
        for slot, nth, found in self._each(name, (torch.float32,), None):
            made[slot, nth] = value = found.item()
            if not 0 < value < math.inf:
                named = self._name(self._experts[slot], self._parts[nth], name)
                raise BadInput("tensors", f"{named} of {value}", "a finite number above 0")
        return made.to(self._device)

    def _each(
        self, name: str, dtypes: tuple[torch.dtype, ...], shape: tuple[int, ...] | None
    ) -> Iterator[tuple[int, int, torch.Tensor]]:
        """Yield the slot, the number of the part, and the tensor; `shape`: None for one element."""
        for slot, expert in enumerate(self._experts):
            for nth, part in enumerate(self._parts):
                if expert == NONE:
                    continue
                found = _tensor(self._tensors, named := self._name(expert, part, name), dtypes, None)
                if (found.numel() != 1) if shape is None else (found.shape != shape):
                    want = "one element" if shape is None else f"{tuple(shape)}, as expert {self._some} has"
                    raise BadInput("tensors", f"{named} {tuple(found.shape)}", want)
                yield slot, nth, found

    def _name(self, expert: int, part: str, name: str) -> str:
        return f"{self._prefix}{expert}.{part}.{name}"


def _refuse_nan(name: str, scales: torch.Tensor, nan: int) -> None:
    """Raise BadInput if a scale is NaN: `nan`, or with another sign where that is one of e4m3."""
    if not scales.is_meta and bool((scales.view(torch.uint8) & nan == nan).any()):
        raise BadInput("tensors", f"{name} with NaN", "scales that are numbers")


def _check(tensors: object, experts: object, prefix: object, device: object) -> None:
    """Raise BadInput for what is no mapping, no list of experts, no text, or no device."""
    if not isinstance(tensors, Mapping):
        raise BadInput("tensors", type(tensors).__name__, "tensors by name")
    if not isinstance(prefix, str):
        raise BadInput("prefix", type(prefix).__name__, "text")
    check_device(device)
    if experts is None:
        return
    if not isinstance(experts, Sequence) or isinstance(experts, (str, bytes)):
        raise BadInput("experts", type(experts).__name__, "a list of experts, or None")
    for expert in experts:
        if not is_integer(expert) or expert < NONE:
            raise BadInput("experts", repr(expert), "-1, or the number of an expert")


def _tensor(
    tensors: Mapping[str, torch.Tensor], name: str, dtypes: tuple[torch.dtype, ...], dims: int | None
) -> torch.Tensor:
    """Return the tensor of that name.  Raises BadInput."""
    if name not in tensors:
        raise BadInput("tensors", f"no {name}", "the tensors of a layer's experts")
    found = tensors[name]
    check_dense("tensors", found)
    if found.dtype not in dtypes or (dims is not None and found.dim() != dims):
        want = " or ".join(map(str, dtypes)) + ("" if dims is None else f" of {dims} dimensions")
        raise BadInput("tensors", f"{name} of {found.dtype} {tuple(found.shape)}", want)
    return found.detach()
