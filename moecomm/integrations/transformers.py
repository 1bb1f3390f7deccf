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
from moecomm.base.choices import BackendName
from moecomm.buffer import Buffer
from moecomm.compat.deep_ep.pool import grown
from moecomm.errors import Unsupported
from moecomm.nn.buffers import shared_buffer
from moecomm.ops.rounds import wanted_gradients
from moecomm.ranks.opening import gather
from moecomm.ranks.rendezvous import rendezvous

try:
    from transformers.distributed.expert_parallel import EPImplementation, EPImplementationInterface
except ImportError as error:
    raise Unsupported(
        f"this transformers has no registry of expert-parallel implementations ({error}): install transformers 5.23 or "
        "later"
    ) from error

__all__ = ["ExpertParallel", "register"]

_LEAST_TOKENS = 128  # so that not every batch takes a larger Buffer than a short first one


class ExpertParallel(EPImplementation):  # type: ignore[misc]
    """A row for each (token, expert), on which experts run with a weight of 1; combine weights and adds their results.

    Ranks that share a batch (tensor parallelism) send disjoint slices of it and gather the results.

    Args:
        experts, ep_mesh, tp_mesh: of EPImplementation.

    Attributes:
        max_tokens: room for so many tokens of a rank from the start; None: for those of the first call on any rank.
            Ranks that have more take a larger Buffer, all together.
        timeout_s: how long a rank waits for another, in seconds.
        backend: see Buffer; None: "host" for tensors on the CPU, else "auto".
    """

    max_tokens: int | None = None
    timeout_s: float = 600.0
    backend: BackendName | None = None

    def __init__(self, experts: Any, ep_mesh: Any, tp_mesh: Any) -> None:
        super().__init__(experts, ep_mesh, tp_mesh)
        self._buffers: dict[tuple[int, int, torch.dtype, torch.device], Buffer] = {}
        self._outgrown: list[Buffer] = []  # backward passes may still need them

    # A graph of torch.compile breaks here: it cannot open a Buffer, nor wait for the number of rounds.
    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def __call__(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        """`[T, H]`: the weighted sum of each token's experts.  Collective.  Gradients: tokens and weights.

        Args:
            hidden_states: `[T, H]`.
            top_k_index: int64 `[T, K]`, of all experts.
            top_k_weights: floating `[T, K]`.

        Raises:
            As Buffer and moecomm.ops.dispatch.
        """
        tokens = len(hidden_states)
        routed = self._route(*(self._own(tensor) for tensor in (hidden_states, top_k_index, top_k_weights)))
        y = self._experts(routed.x, routed.tokens_per_expert)
        return self._whole(ops.combine(y, routed.handle), tokens)

    def _experts(self, x: torch.Tensor, tokens_per_expert: torch.Tensor) -> torch.Tensor:
        """Apply the experts to their rows; return zeros behind them, as not all kinds of experts skip rows."""
        counts = tokens_per_expert.long()
        rows = int(counts.sum())
        # Without rows, the experts run on one of zeros, so that their parameters have gradients on every rank.
        given = x[:rows] if rows else x.new_zeros((1, x.shape[1]))
        ids = torch.arange(len(counts), device=x.device).repeat_interleave(counts, output_size=rows)
        ids = ids if rows else ids.new_zeros(1)
        y: torch.Tensor = self.experts_forward(given, ids.unsqueeze(1), given.new_ones((len(given), 1)))
        return torch.nn.functional.pad(y[:rows], (0, 0, 0, len(x) - rows))

    def _own(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return this rank's slice of a tensor that tensor-parallel ranks share; the backward pass gathers slices."""
        if self.tp_mesh.size() == 1:
            return tensor.contiguous()
        from torch.distributed.tensor import DTensor, Replicate, Shard

        shared = DTensor.from_local(tensor, self.tp_mesh, [Replicate()], run_check=False)
        return shared.redistribute(self.tp_mesh, [Shard(0)]).to_local().contiguous()

    def _whole(self, rows: torch.Tensor, tokens: int) -> torch.Tensor:
        """Gather the results of all slices."""
        if self.tp_mesh.size() == 1:
            return rows
        from torch.distributed.tensor import DTensor, Shard

        shape = torch.Size((tokens, rows.shape[1]))
        parts = DTensor.from_local(rows, self.tp_mesh, [Shard(0)], shape=shape, stride=(rows.shape[1], 1))
        return parts.full_tensor()

    def _route(self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> ops.Dispatched:
        """ops.dispatch; where a rank has more tokens than the Buffer takes, again with a larger one."""
        key = (x.shape[1], ids.shape[1], x.dtype, x.device)
        buffer = self._buffers.get(key)
        if buffer is None or buffer.closed:
            buffer = self._buffers[key] = self._open(x, ids.shape[1], self.max_tokens)

        def larger() -> Buffer:
            self._outgrown.append(buffer)
            least = buffer.max_tokens + buffer.max_tokens // 4
            self._buffers[key] = self._open(x, ids.shape[1], None, least)
            return self._buffers[key]

        return grown(
            buffer,
            x,
            ids.long(),
            lambda buffer: self._dispatch(buffer, x, ids, weights),
            larger,
            layout="expert",
            gradients=wanted_gradients(x, weights),
        )

    def _dispatch(self, buffer: Buffer, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> ops.Dispatched:
        # The experts read only rows that the counts cover.
        return ops.dispatch(buffer, x, ids, weights, layout="expert", overflow="chunks", zero_padding=False)

    def _open(self, x: torch.Tensor, topk: int, most: int | None, least: int = _LEAST_TOKENS) -> Buffer:
        """Open a Buffer for `most` tokens, or take that of another layer of the same sizes.  Collective.

        None: as many as a rank has, and at least `least`.
        """
        group = self.ep_mesh.get_group()
        if most is None:
            everybody = gather(rendezvous(group), struct.pack("<q", len(x)), self.timeout_s)
            most = max(least, *(int(struct.unpack("<q", theirs)[0]) for theirs in everybody))
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
