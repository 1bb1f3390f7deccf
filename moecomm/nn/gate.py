"""The gate of a mixture-of-experts layer."""

from __future__ import annotations

from typing import Any

import torch

from moecomm.base.validation import check_dense, check_drawn, check_flag, check_same_device
from moecomm.errors import BadInput
from moecomm.router import Gating, gate_weight


class Gate(torch.nn.Module):
    """The gate: hidden states [T, H] -> (topk_idx int64 [T, K], topk_weights float32 [T, K]).

    See moecomm.router.Gating for the arithmetic.  `weight` [E, H] is drawn from `seed`; every rank has all of it.
    `bias` float32 [E], with `corrected=True`, is DeepSeek-V3's score correction, initially zeros.  It takes part in the
    choice of experts only, has no gradient and is part of the state.  The logits are computed in the dtype of `weight`,
    everything after them in float32; autocast has no effect.  `bias` stays float32 when a module's dtype changes, as by
    bfloat16() or to(), and when a state is loaded.

    Args:
        gating: sizes and the rule by which experts are chosen.
        corrected: the gate has a `bias`.
        seed: of the weight.
        dtype: of the weight.
        device: of the weight; default: torch's.

    Raises:
        BadInput: arguments of other types.
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
        """Return topk_idx int64 `[T, K]` and topk_weights float32 `[T, K]` of x `[T, H]`.

        Raises:
            BadInput: arguments that do not fit; a `bias` that was cast, as FSDP1 does with a buffer_dtype.
        """
        check_dense("x", x)
        check_same_device(x=x, weight=self.weight)
        if self.bias is not None and self.bias.dtype is not torch.float32:
            want = "torch.float32, whose updates are not lost: no buffer_dtype in mixed precision, or a float32 tensor"
            raise BadInput("gate.bias", self.bias.dtype, want)
        with torch.autocast(x.device.type, enabled=False):
            return self.gating(x, self.weight, self.bias)

    def _apply(self, fn: Any, recurse: bool = True) -> Gate:
        before = self.bias
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        after = self._buffers["bias"]
        if before is not None and after is not None and after.dtype is not torch.float32:
            # From `before`, as `after` is rounded.
            self._buffers["bias"] = after.float() if before.is_meta else before.to(after.device)
        return self

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        if self.bias is not None:  # earlier versions pickled it in other dtypes
            self._buffers["bias"] = self.bias.float()

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        state, name = dict(state_dict), f"{prefix}bias"
        if isinstance(bias := state.get(name), torch.Tensor):
            state[name] = bias.float()  # load_state_dict(assign=True) takes tensors as they are
        super()._load_from_state_dict(state, prefix, *args)

    def extra_repr(self) -> str:
        """Return the gating, for repr()."""
        return repr(self.gating)

    def __call__(self, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """Call forward() with hooks; overridden for its return type."""
        routing: tuple[torch.Tensor, torch.Tensor] = super().__call__(*args, **kwargs)
        return routing
