"""moecomm as an expert-parallel implementation of Hugging Face transformers (5.23 and later), by its registry.

    moecomm.integrations.transformers.register()
    config = DistributedConfig(tp_size=8, ep_size=8, ep_implementation="moecomm")

docs/transformers.md says what works.
"""

from __future__ import annotations

import struct
from typing import Any

import torch

from moecomm import ops
from moecomm.buffer import Buffer
from moecomm.core.choices import BackendName
from moecomm.core.opening import gather
from moecomm.core.rendezvous import rendezvous
from moecomm.errors import Unsupported
from moecomm.nn.buffers import shared_buffer

try:
    from transformers.distributed.expert_parallel import EPImplementation, EPImplementationInterface
except ImportError as error:
    raise Unsupported(
        f"this transformers has no registry of expert-parallel implementations ({error}): install transformers 5.23 or "
        "later"
    ) from error

__all__ = ["ExpertParallel", "register"]

_LEAST_TOKENS = 128  # so that a short first batch is no limit


class ExpertParallel(EPImplementation):  # type: ignore[misc]
    """A row for each (token, rank): a rank's experts run on it and add up its outputs, and combine adds those of ranks.

    Ranks that share a batch (tensor parallelism) send disjoint slices of it and gather the results.

    Args:
        experts, ep_mesh, tp_mesh: of EPImplementation.

    Attributes:
        max_tokens: of a rank and a call; None: at least those of the first call on any rank.
        timeout_s: how long a rank waits for another, in seconds.
        backend: see Buffer; None: "host" for tensors on the CPU, else "auto".
    """

    max_tokens: int | None = None
    timeout_s: float = 600.0
    backend: BackendName | None = None

    def __init__(self, experts: Any, ep_mesh: Any, tp_mesh: Any) -> None:
        super().__init__(experts, ep_mesh, tp_mesh)
        self._buffers: dict[tuple[int, int, torch.dtype, torch.device], Buffer] = {}

    def __call__(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        """`[T, H]`: the weighted sum of each token's experts.  Collective.  Gradients: tokens and weights.

        Args:
            hidden_states: `[T, H]`.
            top_k_index: int64 `[T, K]`, of all experts.
            top_k_weights: floating `[T, K]`.

        Raises:
            BadInput: more tokens than `max_tokens`, or than at first.
            As moecomm.ops.dispatch.
        """
        tokens = len(hidden_states)
        x, ids, weights = (self._own(tensor) for tensor in (hidden_states, top_k_index, top_k_weights))
        routed = ops.dispatch(self._buffer(x, ids), x, ids, weights, layout="flat", overflow="chunks")
        assert routed.topk_idx is not None and routed.topk_weights is not None
        elsewhere = routed.topk_idx < 0
        local = torch.where(elsewhere, self.num_local_experts, routed.topk_idx)  # which experts leave out
        y = self.experts_forward(routed.x, local, routed.topk_weights.to(x.dtype))
        return self._whole(ops.combine(y, routed.handle), tokens)

    def _own(self, tensor: torch.Tensor) -> torch.Tensor:
        """Our slice of what the ranks of tensor parallelism share; its backward pass gathers the slices."""
        if self.tp_mesh.size() == 1:
            return tensor.contiguous()
        from torch.distributed.tensor import DTensor, Replicate, Shard

        shared = DTensor.from_local(tensor, self.tp_mesh, [Replicate()], run_check=False)
        return shared.redistribute(self.tp_mesh, [Shard(0)]).to_local().contiguous()

    def _whole(self, rows: torch.Tensor, tokens: int) -> torch.Tensor:
        """The results of all slices."""
        if self.tp_mesh.size() == 1:
            return rows
        from torch.distributed.tensor import DTensor, Shard

        shape = torch.Size((tokens, rows.shape[1]))
        parts = DTensor.from_local(rows, self.tp_mesh, [Shard(0)], shape=shape, stride=(rows.shape[1], 1))
        return parts.full_tensor()

    def _buffer(self, x: torch.Tensor, ids: torch.Tensor) -> Buffer:
        key = (x.shape[1], ids.shape[1], x.dtype, x.device)
        buffer = self._buffers.get(key)
        if buffer is None or buffer.closed:
            buffer = self._buffers[key] = self._open(x, ids.shape[1])
        return buffer

    def _open(self, x: torch.Tensor, topk: int) -> Buffer:
        """Open one, or take that of another layer of the same sizes.  Collective."""
        group, most = self.ep_mesh.get_group(), self.max_tokens
        if most is None:
            everybody = gather(rendezvous(group), struct.pack("<q", len(x)), self.timeout_s)
            most = max(_LEAST_TOKENS, *(int(struct.unpack("<q", theirs)[0]) for theirs in everybody))
        return shared_buffer(
            group,
            hidden=x.shape[1],
            num_experts=self.num_local_experts * self.ep_mesh.size(),
            topk=topk,
            max_tokens=most,
            dtype=x.dtype,
            device=x.device,
            backend=self.backend or ("host" if x.device.type == "cpu" else "auto"),
            timeout_s=self.timeout_s,
        )


def register(
    name: str = "moecomm",
    *,
    max_tokens: int | None = None,
    timeout_s: float = 600.0,
    backend: BackendName | None = None,
) -> None:
    """Make `ep_implementation=name` of DistributedConfig mean moecomm.  Call it before a model is loaded.

    Args:
        name: for the registry.
        max_tokens, timeout_s, backend: see ExpertParallel; alike on all ranks.
    """
    settings = {"max_tokens": max_tokens, "timeout_s": timeout_s, "backend": backend}
    EPImplementationInterface.register(name, type("ExpertParallel", (ExpertParallel,), settings))
