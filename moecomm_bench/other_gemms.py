"""Grouped GEMMs of another library, where it can be imported.

Written for its published interface (deep_gemm 2.x, and its wheel sgl-deep-gemm). If it raises, it has no figure, and
the result has the reason.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch

Call = Callable[[int], Any]
ALIGNMENT = 128  # deep_gemm's groups begin at multiples of this many rows
LIBRARIES = ("deep_gemm",)
_MASKED_ROWS = 128  # of an expert, at most, for which the masked form is measured too


class OtherGemm(NamedTuple):
    """A GEMM of a library on a layout of its own: its call, and the rows of its last product in the order of x."""

    call: Call
    rows: Callable[[], torch.Tensor]


def calls(x: Any, weights: list[Any], counts: torch.Tensor) -> tuple[dict[str, OtherGemm], dict[str, str]]:
    """Return GEMMs by library and form that multiply x with one of the weights, and the reasons of those that fail.

    The layout of x is converted in advance.  x and the weights are in bfloat16, or pairs of FP8 data and scales.
    """
    try:
        library = importlib.import_module("deep_gemm")
    except (ImportError, OSError) as error:
        return {}, {"deep_gemm": str(error)}
    forms = {"deep_gemm": _contiguous} | ({"deep_gemm masked": _masked} if int(counts.max()) <= _MASKED_ROWS else {})
    found: dict[str, OtherGemm] = {}
    failed: dict[str, str] = {}
    for name, make in forms.items():
        try:
            gemm = make(library, x, weights, counts)
            gemm.call(0)
        except (AssertionError, AttributeError, OSError, RuntimeError, TypeError, ValueError) as error:
            failed[name] = f"{type(error).__name__}: {error}"
        else:
            found[name] = gemm
    return found, failed


def padded_rows(counts: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Pad groups to multiples of ALIGNMENT: int64 [rows], the new place of each row; int32, the group of each place."""
    counts = counts.long()
    padded = (counts + ALIGNMENT - 1) // ALIGNMENT * ALIGNMENT
    group = torch.arange(len(counts), device=counts.device)
    return _places(counts, padded.cumsum(0) - padded), group.repeat_interleave(padded).int()


def _places(counts: torch.Tensor, begins: torch.Tensor) -> torch.Tensor:
    shift = begins - (counts.cumsum(0) - counts)
    return torch.arange(int(counts.sum()), device=counts.device) + shift.repeat_interleave(counts)


def _laid_out(library: Any, x: Any, place: torch.Tensor, shape: tuple[int, ...]) -> Any:
    """Return x with each row at its place in `[*shape, K]`, and scales as the library wants them."""
    if isinstance(x, torch.Tensor):
        rows = x.new_zeros(*shape, x.shape[-1])
        rows.view(-1, x.shape[-1])[place] = x
        return rows
    data = torch.zeros(*shape, x[0].shape[1], dtype=torch.uint8, device=place.device)
    data.view(-1, x[0].shape[1])[place] = x[0].view(torch.uint8)
    scales = x[1].new_ones(*shape, x[1].shape[1])
    scales.view(-1, x[1].shape[1])[place] = x[1]
    if (turn := getattr(library, "get_mn_major_tma_aligned_tensor", None)) is not None:
        scales = turn(scales)
    return data.view(torch.float8_e4m3fn), scales


def _named(library: Any, *names: str) -> Callable[..., Any]:
    """Return the function that the library has under one of these names, or raise AttributeError."""
    name = next(filter(partial(hasattr, library), names), names[0])
    function: Callable[..., Any] = getattr(library, name)
    return function


def _matrix(w: Any) -> torch.Tensor:
    matrix: torch.Tensor = w if isinstance(w, torch.Tensor) else w[0]
    return matrix


def _of(weights: list[Any], i: int) -> Any:
    w = weights[i % len(weights)]
    return w if isinstance(w, torch.Tensor) else tuple(w)


def _contiguous(library: Any, x: Any, weights: list[Any], counts: torch.Tensor) -> OtherGemm:
    place, group = padded_rows(counts)
    rows = _laid_out(library, x, place, (len(group),))
    out = torch.empty(len(group), _matrix(weights[0]).shape[1], dtype=torch.bfloat16, device=counts.device)
    kind = "bf16" if isinstance(x, torch.Tensor) else "fp8"
    multiply = getattr(library, f"m_grouped_{kind}_gemm_nt_contiguous")
    return OtherGemm(lambda i: multiply(rows, _of(weights, i), out, group), lambda: out[place])


def _masked(library: Any, x: Any, weights: list[Any], counts: torch.Tensor) -> OtherGemm:
    # Tiles are stored whole: where groups do not begin at tiles, one overwrites the first rows of the next group.
    groups, most = len(counts), -(-max(1, int(counts.max())) // ALIGNMENT) * ALIGNMENT
    place = _places(counts.long(), most * torch.arange(groups, device=counts.device))
    rows = _laid_out(library, x, place, (groups, most))
    columns, expected = _matrix(weights[0]).shape[1], max(1, int(counts.sum()) // groups)
    out = torch.empty(groups, most, columns, dtype=torch.bfloat16, device=counts.device)
    kind = "bf16" if isinstance(x, torch.Tensor) else "fp8"
    multiply = _named(library, f"m_grouped_{kind}_gemm_nt_masked", f"{kind}_m_grouped_gemm_nt_masked")
    return OtherGemm(
        lambda i: multiply(rows, _of(weights, i), out, counts, expected), lambda: out.view(-1, columns)[place]
    )
