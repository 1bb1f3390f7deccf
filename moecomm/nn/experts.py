"""SwiGLU experts of one rank."""

from __future__ import annotations

import torch
from torch.nn.functional import silu

from moecomm.core.validation import MOST_SIZE, check_dense, check_drawn, check_same_device, check_sizes
from moecomm.errors import BadInput
from moecomm.ops.grouped import grouped_linear
from moecomm.tools.demo_layer import expert_weights


class Experts(torch.nn.Module):
    """SwiGLU experts, w2 (silu(w1 x) * w3 x), for rows that are grouped by expert.

    `w13` [experts, 2 I, H] (gate and up projections) and `w2` [experts, H, I] are drawn from `seed` and the expert's
    number, so they do not depend on the rank that owns it.

    Args:
        experts: numbers of the experts, among those of all ranks.
        hidden: H, columns of a row.
        intermediate: I, columns inside an expert; a multiple of 16 bytes.
        seed: of the weights.
        dtype: of the weights.
        device: of the weights; default: torch's.

    Raises:
        BadInput: sizes that grouped GEMMs do not support.
    """

    def __init__(
        self,
        experts: range,
        hidden: int,
        intermediate: int,
        *,
        seed: int = 0,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        if not isinstance(experts, range) or len(experts) == 0 or len(experts) > MOST_SIZE:
            raise BadInput("experts", repr(experts), "a range of one or more")
        check_sizes(hidden=hidden, intermediate=intermediate)
        check_drawn(seed, dtype, device)
        if intermediate * dtype.itemsize % 16:
            raise BadInput("intermediate", intermediate, f"rows of a multiple of 16 bytes, in {dtype}")
        device = torch.get_default_device() if device is None else device
        drawn = [expert_weights(e, hidden, intermediate, seed=seed, dtype=dtype) for e in experts]
        w13, w2 = (torch.stack(weights).to(device=device) for weights in zip(*drawn, strict=True))
        self.w13, self.w2 = torch.nn.Parameter(w13), torch.nn.Parameter(w2)

    def forward(self, x: torch.Tensor, tokens_per_expert: torch.Tensor) -> torch.Tensor:
        """Apply each expert to its group of rows.

        Args:
            x: `[rows, H]`, rows of the first expert first, and so on; rows after the last group may hold anything.
            tokens_per_expert: int32 or int64 `[experts]`, on the device of x: rows of each group.

        Returns:
            `[rows, H]` in the dtype of the weights or of autocast; rows after the last group are undefined.  Gradients
            of the weights are sums over the rows of the groups alone.

        Raises:
            BadInput: another shape, dtype or device.
        """
        check_dense("x", x)
        check_dense("tokens_per_expert", tokens_per_expert)
        check_same_device(x=x, tokens_per_expert=tokens_per_expert, w13=self.w13)
        if x.ndim != 2 or x.shape[1] != self.w13.shape[2] or not x.is_floating_point():
            raise BadInput("x", f"{x.dtype} {tuple(x.shape)}", f"floating [rows, {self.w13.shape[2]}]")
        if tokens_per_expert.shape != self.w13.shape[:1] or tokens_per_expert.dtype not in (torch.int32, torch.int64):
            got = f"{tokens_per_expert.dtype} {tuple(tokens_per_expert.shape)}"
            raise BadInput("tokens_per_expert", got, f"int32 ({self.w13.shape[0]},)")
        dtype = self.w13.dtype
        if torch.is_autocast_enabled(x.device.type):
            dtype = torch.get_autocast_dtype(x.device.type)
        ends = tokens_per_expert.cumsum(0, dtype=torch.int32)
        gate, up = grouped_linear(x.to(dtype), self.w13.to(dtype), ends).chunk(2, dim=-1)
        return grouped_linear(silu(gate) * up, self.w2.to(dtype), ends)
