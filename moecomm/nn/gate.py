"""The gate of a mixture-of-experts layer."""

from __future__ import annotations

from typing import Any

import torch

from moecomm.core.validation import check_dense, check_drawn, check_flag, check_same_device
from moecomm.errors import BadInput
from moecomm.router import Gating, gate_weight


class Gate(torch.nn.Module):
    """Hidden states [T, H] -> (topk_idx int64 [T, K], topk_weights float32 [T, K]); see moecomm.router.Gating.

    `weight` [E, H] is drawn from `seed`; every rank has all of it.  `bias` float32 [E], with `corrected=True`, is
    DeepSeek-V3's score correction, zeros at first: it chooses experts, has no gradient and is in the state.
    Computes in the dtype of `weight` and, from the logits on, in float32, whatever autocast says.

    Args:
        gating: how experts are chosen.
        corrected: there is a bias.
        seed, dtype, device: of the weight; device: default: torch's.
    """

    bias: torch.Tensor | None

    def __init__(
        self,
        gating: Gating,
        *,
        corrected: bool = False,
        seed: int = 0,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        if not isinstance(gating, Gating):
            raise BadInput("gating", type(gating).__name__, "a Gating")
        check_flag("corrected", corrected)
        check_drawn(seed, dtype, device)
        self.gating = gating
        device = torch.get_default_device() if device is None else device
        drawn = gate_weight(gating.num_experts, gating.hidden, seed=seed)
        self.weight = torch.nn.Parameter(drawn.to(device=device, dtype=dtype))
        bias = torch.zeros(gating.num_experts, dtype=torch.float32, device=device) if corrected else None
        self.register_buffer("bias", bias)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """See the class.  Raises BadInput for another shape."""
        check_dense("x", x)
        check_same_device(x=x, weight=self.weight)
        with torch.autocast(x.device.type, enabled=False):
            # A choice among near-equal scores must not depend on a dtype that a module's .to() gave the bias.
            bias = None if self.bias is None else self.bias.float()
            return self.gating(x, self.weight, bias)

    def extra_repr(self) -> str:
        """For print."""
        return repr(self.gating)

    def __call__(self, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """forward(), with hooks."""
        routing: tuple[torch.Tensor, torch.Tensor] = super().__call__(*args, **kwargs)
        return routing
