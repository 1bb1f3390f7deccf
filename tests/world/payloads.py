"""What rows are made of: tensors of every documented kind that travel with tokens, and what must arrive of them."""

from __future__ import annotations

from typing import Any

import torch

from moecomm import formats

GLOBAL_SCALES = {"nvfp4": 100.0, "fp8_tensor": 0.02}
QUANTIZED = ("fp8", "fp8_token", "fp8_tensor", "int8_token", "int8_group", "mxfp8", "nvfp4", "mxfp4")
# How far a value may be from what was cast, as a part of the largest magnitude that shares its scale.
LOSS = {
    "fp8": 1 / 15,
    "fp8_token": 1 / 15,
    "fp8_tensor": 1 / 15,
    "int8_token": 1 / 120,
    "int8_group": 1 / 120,
    "mxfp8": 1 / 15,
    "nvfp4": 0.3,
    "mxfp4": 0.35,
}
GROUPS = {"fp8": 128, "int8_group": 128, "mxfp8": 32, "nvfp4": 16, "mxfp4": 32}


def numbers(rows: int, columns: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Draw bytes of a dtype; floating numbers are small and finite."""
    g = torch.Generator().manual_seed(seed)
    if dtype.is_floating_point:
        return torch.randint(-8, 9, (rows, columns), generator=g).to(dtype)
    return torch.randint(0, 100, (rows, columns), generator=g).to(dtype)


def rows_of(payload: str, x: torch.Tensor, seed: int) -> dict[str, Any]:
    """Return the arguments of a dispatch that carries these rows.

    Args:
        payload: "plain"; "quantize NAME [ue8m0]": cast by the call; "given NAME": cast before; "bytes DTYPE COLUMNS";
            "scaled DTYPE COLUMNS": plain rows beside scales; "as DTYPE": the bytes of x under another name.
        x: `[T, H]`.
        seed: of bytes and scales.
    """
    kind, *words = payload.split()
    if kind == "quantize":
        scale = {"x_global_scale": GLOBAL_SCALES[words[0]]} if words[0] in GLOBAL_SCALES else {}
        other = {"x_global_scale": 2 * GLOBAL_SCALES[words[0]]} if words[1:] == ["other"] else {}
        form = {"scale_format": "ue8m0"} if words[1:] == ["ue8m0"] else {}
        return {"x": x, "quantize": words[0], **scale, **form, **other}
    if kind == "given":
        values, scales = formats.quantize(x, words[0], global_scale=GLOBAL_SCALES.get(words[0]))
        return {"x": values, "scales": scales}
    if kind == "as":
        return {"x": x.view(getattr(torch, words[0]))}
    if kind == "bytes":
        return {"x": numbers(len(x), int(words[1]), getattr(torch, words[0]), seed)}
    if kind == "scaled":
        return {"x": x, "scales": numbers(len(x), int(words[1]), getattr(torch, words[0]), seed)}
    return {"x": x}


def extras_of(extras: list[str], tokens: int, seed: int) -> tuple[torch.Tensor, ...]:
    """Return further tensors: "DTYPE COLUMNS" each."""
    words = [one.split() for one in extras]
    return tuple(
        numbers(tokens, int(columns), getattr(torch, dtype), seed + 1 + nth)
        for nth, (dtype, columns) in enumerate(words)
    )


def check_rows(
    what: str,
    payload: str,
    got: torch.Tensor,
    scales: torch.Tensor | None,
    sent: list[dict[str, Any]],
    src: list[tuple[int, int]],
) -> None:
    """Raise AssertionError unless rows and their scales are those that ranks have sent.

    Args:
        what: names the rows.
        payload: see `rows_of`.
        got: `[rows, columns]`.
        scales: that arrived beside them.
        sent: by rank, from `rows_of`.
        src: source rank and token of each row.
    """
    assert len(got) == len(src), f"{what}: {len(got)} rows, not {len(src)}"
    if not src:
        return
    kind, *words = payload.split()
    x = torch.stack([sent[rank]["x"][token] for rank, token in src])
    given = [sent[rank].get("scales") for rank, _ in src]
    if kind != "quantize":
        same(what, got, x)
        if given[0] is not None:
            assert scales is not None, f"{what}: no scales"
            same(f"{what}: scales", scales, torch.stack([s[token] for s, (_, token) in zip(given, src, strict=True)]))
        return
    name, first = words[0], sent[0]
    scale_format, scale = first.get("scale_format", "fp32"), first.get("x_global_scale")
    values, cast = formats.quantize(x, name, scale_format=scale_format, global_scale=scale)
    same(f"{what}: values of {name}", got, values)
    if cast is not None:
        assert scales is not None, f"{what}: no scales"
        same(f"{what}: scales of {name}", scales, cast)
    back = formats.dequantize(got, scales, name, global_scale=scale).double()
    width = GROUPS.get(name, x.shape[1])
    parts = x.double().abs().split(width, dim=1)
    most = torch.cat([part.amax(dim=1, keepdim=True).expand_as(part) for part in parts], dim=1)
    wrong = ~((back - x.double()).abs() <= LOSS[name] * most + 1e-3)
    assert not bool(wrong.any()), f"{what}: {int(wrong.sum())} values are not those that {name} stands for"


def same(what: str, got: torch.Tensor, want: torch.Tensor) -> None:
    """Raise AssertionError unless tensors have the same bits, shape and dtype."""
    assert got.dtype == want.dtype, f"{what}: {got.dtype}, not {want.dtype}"
    assert got.shape == want.shape, f"{what}: shape {tuple(got.shape)}, not {tuple(want.shape)}"
    bits = [tensor.detach().contiguous().flatten().view(torch.uint8) for tensor in (got, want)]
    if not torch.equal(*bits):
        wrong = [nth for nth in range(len(got)) if not torch.equal(_bits(got[nth]), _bits(want[nth]))]
        raise AssertionError(f"{what}: rows {wrong[:8]} of {len(got)} differ")


def _bits(row: torch.Tensor) -> torch.Tensor:
    return row.detach().contiguous().reshape(-1).view(torch.uint8)
