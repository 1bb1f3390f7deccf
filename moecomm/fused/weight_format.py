"""Formats of the weights of experts.  Each is one object, which says how they are checked and multiplied."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import Any

import torch

from moecomm.base.arrays import check_tensor
from moecomm.base.choices import Quantize
from moecomm.dispatch.reference import GROUP
from moecomm.errors import BadInput
from moecomm.fused import kernels
from moecomm.rounds.rounds import Rounds

_MOST_DIMENSION = 1 << 31


class WeightFormat:
    """A format of weights.  This class is that of tensors in the dtype of the rows; others override what differs.

    Attributes:
        kind: a NamedTuple, the class of weights, which begins with `data` and `scales`; None: weights are tensors.
        values: dtype of `data`, by which a plain tuple of arrays becomes a `kind`.
        of_scales: dtypes of `scales`, of packed ones.
        packed: values in an element of `data`.
        quantize: format to which the dispatch of an unfused layer casts rows.
        casts: cast() casts rows ahead of each product, each row with one scale.
        product: dtype to which the first GEMM casts its result, with scales of 128 columns; None: it does not cast.
        tuned_as: dtype in the tuning table of fused layers; None: that of the rows.
        travels: format in which rows travel in a fused layer, by dtype of the weights; none: as they are.
        unfused: why a layer cannot run fused; empty: it can.
        slow: format of a warning where torch computes; it takes a reason.
    """

    kind: type[Any] | None = None
    values: torch.dtype | None = None
    of_scales: tuple[torch.dtype, ...] = ()
    packed = 1
    quantize: Quantize | None = None
    casts = False
    product: torch.dtype | None = None
    tuned_as: torch.dtype | None = None
    travels: Mapping[torch.dtype, str] = {}
    unfused = ""
    slow = "experts run in torch's grouped GEMM, not in moecomm's: %s"

    def check(self, rounds: Rounds, w13: Any, w2: Any, interleaved: bool) -> tuple[Any, Any]:
        """Check weights of Buffer.moe before any rank sends a row; return them as products take them.

        Raises BadInput or Unsupported, the same on all ranks.
        """
        about: dict[str, Any] = {"device": rounds.device, "dtypes": (rounds.dtype,)}
        local, hidden = len(rounds.local_experts), rounds.hidden
        check_tensor("w2", w2, **about, shape=(local, hidden, None))
        intermediate = w2.shape[2]
        if not 1 <= intermediate < _MOST_DIMENSION:
            raise BadInput("w2", tuple(w2.shape), "[E/R, H, I] with I at least 1")
        check_tensor("w13", w13, **about, shape=(local, 2 * intermediate, hidden))
        if interleaved and intermediate % 8:
            raise BadInput("w13", tuple(w13.shape), "I a multiple of 8, to be interleaved")
        for name, weights in (("w13", w13), ("w2", w2)):
            check_begin(name, weights)
        return w13, w2

    def lacks_kernel(self, x: torch.Tensor, w2: Any) -> str:
        """Return why torch computes such experts on the GPU of x; empty if kernels do, and on CPUs."""
        return ours_lacks(x.device.index, x.dtype, *parts(w2)[0].shape) if x.is_cuda else ""

    def cast(self, x: torch.Tensor, values: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """Return rows cast for a product with weights of this dtype, and their scales.  For formats that cast."""
        raise NotImplementedError

    @staticmethod
    def widen(w: Any, depth: int) -> Any:
        """Return the weights `[experts, N, depth]` that packed ones stand for: tensors, or FP8.  For packed formats."""
        raise NotImplementedError

    def check_parts(self, argument: str, w: Any) -> None:
        """Check the parts of packed weights beside each other.  Raises BadInput."""

    def check_scales(
        self, x: torch.Tensor, x_scales: torch.Tensor | None, w: torch.Tensor, w_scales: torch.Tensor | None
    ) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Check scales of a grouped GEMM's operands, and return them as kernels take them.  Raises BadInput."""
        wanted = {
            "x": (x_scales, (*x.shape[:-1], -(-x.shape[-1] // GROUP))),
            "w": (w_scales, (w.shape[0], -(-w.shape[1] // GROUP), -(-w.shape[2] // GROUP))),
        }
        for argument, (scales, shape) in wanted.items():
            if (scales is None) != (x.dtype != kernels.FP8):
                raise BadInput(
                    argument, "scales" if scales is not None else "no scales", "Fp8(data, scales) of e4m3, alone"
                )
            if scales is None:
                continue
            if scales.shape != shape or scales.dtype != torch.float32 or scales.device != x.device:
                raise BadInput(argument, f"scales {described(scales)}", f"float32 {shape} on {x.device}")
            if not scales.is_contiguous() and (argument == "w" or scales.dim() == 3):
                raise BadInput(argument, "scales with gaps", "contiguous ones; of x [rows, K] also by column")
        return x_scales, w_scales


PLAIN = WeightFormat()


def parts(operand: Any) -> tuple[Any, Any]:
    """Return values and scales of weights or rows; None: there are no scales."""
    return operand[:2] if isinstance(operand, tuple) else (operand, None)


def check_shapes(rounds: Rounds, w13: Any, w2: Any, dtypes: tuple[torch.dtype, ...]) -> int:
    """Check device, dtype and shape of the values of w13 and w2, which are not packed; return I.  Raises BadInput."""
    about: dict[str, Any] = {"device": rounds.device, "dtypes": dtypes}
    local, hidden = len(rounds.local_experts), rounds.hidden
    check_tensor("w2", w2.data, **about, shape=(local, hidden, None))
    intermediate = w2.data.shape[2]
    check_tensor("w13", w13.data, **about, shape=(local, 2 * intermediate, hidden))
    return int(intermediate)


def described(tensor: torch.Tensor) -> str:
    """Return a description of a tensor for error messages."""
    gaps = "" if tensor.is_contiguous() else " with gaps"
    return f"{tuple(tensor.shape)} of {tensor.dtype} on {tensor.device}{gaps}"


def check_begin(argument: str, data: torch.Tensor, *scales: torch.Tensor) -> None:
    """Raise BadInput unless TMA can read the values, and they and these scales have no gaps."""
    if data.data_ptr() % 16 or not all(tensor.is_contiguous() for tensor in (data, *scales)):
        raise BadInput(argument, f"strides {data.stride()}", "contiguous weights that begin at multiples of 16")


@lru_cache(maxsize=256)
def ours_lacks(device: int, dtype: torch.dtype, groups: int, hidden: int, intermediate: int) -> str:
    """Return why grouped_gemm cannot compute such experts on this GPU; empty if it can."""
    if why := not_hopper(device):
        return why
    if dtype not in kernels.TYPES:
        return f"experts compute in {dtype}, not in bfloat16 or float16"
    if hidden % 8 or intermediate % 8:
        return f"H = {hidden} or I = {intermediate} is no multiple of 8"
    if groups > kernels.MOST_GROUPS:
        return f"a rank has {groups} experts, more than {kernels.MOST_GROUPS}"
    return ""


def not_hopper(device: int | None) -> str:
    """Return why the kernels do not run on this GPU; empty if they do."""
    if torch.cuda.get_device_capability(device) == (9, 0):
        return ""
    return f"{torch.cuda.get_device_name(device)} is no GPU of compute capability 9.0 (Hopper)"
