"""FP8 weights and rows: e4m3 values with float32 scales of 128 columns, and of weights also 128 rows."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch

from moecomm import _native
from moecomm.base.arrays import as_tensor, check_tensor, has_memory
from moecomm.base.choices import Quantize
from moecomm.base.protocol import DTYPES, TYPES
from moecomm.base.validation import check_dense
from moecomm.dispatch.reference import E4M3_MAX, GROUP
from moecomm.errors import BadInput, Unsupported
from moecomm.fused import kernels
from moecomm.fused.weight_format import WeightFormat, check_begin, check_shapes, not_hopper
from moecomm.gpu.quantize_rows import cast_blocks
from moecomm.rounds.rounds import Rounds


class Fp8(NamedTuple):
    """e4m3 values with scales; a pair stands for the values data * scale.

    Attributes:
        data: float8_e4m3fn, `[rows, K]` or `[experts, rows, K]`; of weights `[experts, N, K]`.
        scales: float32.  Of rows, one for 128 columns: `[..., ceil(K / 128)]`, row-major or column-major, as a dispatch
            with `quantize="fp8"` returns them.  Of weights, one for 128 rows and 128 columns:
            `[experts, ceil(N / 128), ceil(K / 128)]`.  Of gate rows over up rows also with the number of grids of
            blocks: `[experts, 1, ceil(2 I / 128), ceil(K / 128)]`, one grid for all rows, as quantize_weights(w13) has,
            or `[experts, 2, ceil(I / 128), ceil(K / 128)]`, a grid for gate and one for up, as checkpoints have.  Where
            I % 128 is above 64, the shape without that number would fit both, and is BadInput.
    """

    data: torch.Tensor
    scales: torch.Tensor


Operand = torch.Tensor | tuple[torch.Tensor, torch.Tensor]  # values, or values and scales (an Fp8)


def as_operand(argument: str, given: Any) -> torch.Tensor | Fp8:
    """Convert an array to a torch tensor over the same memory, or a pair of arrays to an Fp8.  Raises BadInput."""
    if not isinstance(given, tuple):
        return as_tensor(argument, given)[0]
    if len(given) != 2:
        raise BadInput(argument, f"a tuple of {len(given)}", "an array, or a pair of e4m3 values and their scales")
    return Fp8(*(as_tensor(argument, tensor)[0] for tensor in given))


class _Blocks(WeightFormat):
    kind, values = Fp8, kernels.FP8
    quantize: Quantize | None = "fp8"
    product = kernels.FP8
    travels: Mapping[torch.dtype, str] = {kernels.FP8: "fp8"}

    def check(self, rounds: Rounds, w13: Any, w2: Any, interleaved: bool) -> tuple[Any, Any]:
        if not isinstance(w13, Fp8) or not isinstance(w2, Fp8):
            argument = "w13" if isinstance(w2, Fp8) else "w2"
            raise BadInput(argument, "no pair of e4m3 weights and scales", "one, as the other weights are")
        intermediate = check_shapes(rounds, w13, w2, (kernels.FP8,))
        if not interleaved:
            w13 = Fp8(w13.data, in_one_grid("w13", w13.scales, intermediate))
        for argument, w in (("w13", w13), ("w2", w2)):
            wanted = (len(w.data), -(-w.data.shape[1] // GROUP), -(-w.data.shape[2] // GROUP))
            check_tensor(argument, w.scales, device=rounds.device, dtypes=(torch.float32,), shape=wanted)
            check_begin(argument, w.data, w.scales)
        if why := _lacks(rounds, rounds.settings.local_experts(), rounds.hidden, intermediate, interleaved):
            raise Unsupported(f"experts with weights in FP8: {why}")
        return w13, w2

    def lacks_kernel(self, x: torch.Tensor, w2: Any) -> str:
        return ""  # check() has refused such weights


BLOCKS = _Blocks()


def in_one_grid(argument: str, scales: torch.Tensor, intermediate: int) -> torch.Tensor:
    """Return scales of I gate rows over I up rows as those of one grid of blocks, whose shape the caller checks.

    Args:
        argument: whose scales they are, for messages.
        scales: `[experts, blocks, ...]`, or `[experts, grids, blocks, ...]`, see Fp8.
        intermediate: I.

    Raises:
        BadInput: the shape fits one grid and two, and does not say how many there are.
        Unsupported: two grids that are not one.
    """
    check_dense(argument, scales)
    half, last = -(-intermediate // GROUP), intermediate % GROUP
    is_said = scales.dim() == 4
    if is_said and scales.shape[1] == 1:
        return scales.squeeze(1)
    if is_said and scales.shape[1:3] == (2, half):
        scales = scales.flatten(1, 2)
    if scales.dim() != 3 or scales.shape[1] != 2 * half or last == 0:
        return scales
    if last > GROUP // 2 and not is_said:
        raise BadInput(
            argument,
            f"scales {tuple(scales.shape)} with I = {intermediate}, which one grid of blocks has and two have",
            f"scales.unsqueeze(1) if gate and up were quantized as one matrix, scales.unflatten(1, (2, {half})) if not",
        )
    raise Unsupported(
        f"{argument} with scales of gate and up by themselves, where I = {intermediate} is no multiple of {GROUP}: "
        f"append {-last % GROUP} rows of zeros to gate and to up, and as many columns to w2; the scales stay"
    )


def _lacks(rounds: Rounds, local: int, hidden: int, intermediate: int, interleaved: bool) -> str:
    """Return why grouped_gemm cannot compute such experts on this device; empty if it can."""
    if rounds.dtype not in kernels.TYPES:
        return f"the Buffer's {rounds.dtype} is neither bfloat16 nor float16"
    if hidden % 16:
        return f"H = {hidden} is no multiple of 16"
    if intermediate == 0 or kernels.unfit(2 * intermediate, hidden, True, True, interleaved) or intermediate % 16:
        return f"I = {intermediate} is no multiple of {16 if interleaved else 32}"
    if local > kernels.MOST_GROUPS:
        return f"a rank has {local} experts, more than {kernels.MOST_GROUPS}"
    return not_hopper(rounds.device.index) if rounds.device.type == "cuda" else ""


def quantize_weights(w: torch.Tensor) -> Fp8:
    """Cast weights to e4m3, with one scale for each block of 128 rows and 128 columns.

    With amax = max(largest magnitude of the block, 1e-4), scale = amax / 448 and data = e4m3(value * (448 / amax)), in
    float32.  This is the arithmetic of the dispatch's cast of rows.  No gradients.

    Args:
        w: `[..., N, K]`, bfloat16, float16 or float32; blocks at the lower and right edges may be smaller.

    Returns:
        data `[..., N, K]`, scales `[..., ceil(N / 128), ceil(K / 128)]`.

    Raises:
        BadInput: weights of another dtype, or with fewer than two dimensions.
    """
    check_dense("w", w)
    if w.dim() < 2 or w.dtype not in DTYPES:
        raise BadInput("w", f"{tuple(w.shape)} of {w.dtype}", f"[..., N, K] of {' or '.join(map(str, DTYPES))}")
    rows, columns = w.shape[-2:]
    down, across = -(-rows // GROUP), -(-columns // GROUP)
    data = w.new_empty(w.shape, dtype=torch.float8_e4m3fn)
    scales = w.new_empty((*w.shape[:-2], down, across), dtype=torch.float32)
    if w.numel() == 0:
        return Fp8(data, scales.fill_(1e-4 / E4M3_MAX))
    # Native code takes addresses, of memory that has the values themselves.
    plain = torch.compiler.is_compiling() or not has_memory(w) or w.is_neg()
    for matrix, to, scale in zip(
        *(tensor.view(-1, *tensor.shape[-2:]) for tensor in (w.detach().contiguous(), data, scales)), strict=True
    ):
        if plain:
            _quantize_blocks(matrix, to, scale)
        elif w.device.type == "cpu":
            addresses = to.data_ptr(), scale.data_ptr(), matrix.data_ptr()
            _native.cast_blocks(*addresses, TYPES[w.dtype], rows, columns)
        elif not cast_blocks(matrix, to, scale):
            _quantize_blocks(matrix, to, scale)
    return Fp8(data, scales)


def _quantize_blocks(matrix: torch.Tensor, to: torch.Tensor, scale: torch.Tensor) -> None:
    """Cast a matrix in plain torch: the specification.  The last blocks may be smaller."""
    (rows, columns), (down, across) = matrix.shape, scale.shape
    if (rows, columns) != (down * GROUP, across * GROUP):
        matrix = torch.nn.functional.pad(matrix, (0, across * GROUP - columns, 0, down * GROUP - rows))
    blocks = matrix.view(down, GROUP, across, GROUP)
    amax = blocks.abs().amax(dim=(1, 3)).float().clamp(min=1e-4)
    values = blocks * (amax.reciprocal() * E4M3_MAX)[:, None, :, None]  # in float32
    to.copy_(values.view(down * GROUP, across * GROUP)[:rows, :columns])
    scale.copy_(amax / torch.full_like(amax, E4M3_MAX))  # for a scalar, torch multiplies by 1 / 448 on GPUs


def widen(data: torch.Tensor, scales: torch.Tensor, rows: int) -> torch.Tensor:
    """Return data * scale in the dtype of scales; `rows` rows share a scale: 1, or 128 for weights."""
    scales = scales.repeat_interleave(GROUP, dim=-1)[..., : data.shape[-1]]
    if rows > 1:
        scales = scales.repeat_interleave(rows, dim=-2)[..., : data.shape[-2], :]
    return data.to(scales.dtype) * scales
