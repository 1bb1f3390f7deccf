"""moecomm as a token dispatcher of torchtitan (checked against 0.3.0), by its overrides of configurations.

    --override.imports moecomm.integrations.torchtitan.use_moecomm

docs/torchtitan.md says which settings of torchtitan work, and which do not.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from moecomm import ops
from moecomm.base.choices import WIRES, BackendName, CombineWireName
from moecomm.base.validation import check_name
from moecomm.buffer import Buffer
from moecomm.errors import BadInput, Unsupported
from moecomm.nn.buffers import shared_buffer

try:
    from torchtitan.config.override import derive, override
    from torchtitan.models.common.token_dispatcher import BaseEPTokenDispatcher, LocalTokenDispatcher
except ImportError as error:
    raise Unsupported(
        f"this torchtitan has no overrides of configurations or no such dispatchers ({error}): install torchtitan "
        "0.3.0 or later"
    ) from error

__all__ = ["Metadata", "TokenDispatcher", "use_moecomm"]

Key = tuple[int, torch.dtype, torch.device]  # columns of a token, and what and where it is
_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


class Metadata(NamedTuple):
    """The result of a dispatch that its combine takes: the handle, which holds the routing weights of the rows."""

    handle: ops.Handle | ops.ChunkedHandle


class TokenDispatcher(BaseEPTokenDispatcher):  # type: ignore[misc]
    """Dispatch in one round to rows by expert, and a combine that applies the routing weights, over moecomm.ops.

    Without expert parallelism (no mesh, or one of a single rank) it does what LocalTokenDispatcher does.

    Args:
        config: a TokenDispatcher.Config.

    Raises:
        BadInput: `dtype` is not bfloat16, float16 or float32.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(BaseEPTokenDispatcher.Config):  # type: ignore[misc]
        """Settings, alike on all ranks.

        Attributes:
            hidden_dim: columns of a token.
            num_max_tokens_per_rank: the most tokens that a rank passes.
            dtype: of tokens, by name.  With it, `hidden_dim` and `num_max_tokens_per_rank` the Buffer is opened before
                the first pass, as torch.compile needs it; else by the first dispatch, for the most tokens that a rank
                has then.  A dispatch of more opens a larger one.
            pad_multiple: rows of an expert are filled up with zeros to a multiple of it; None: not.
            capacity_factor: None: rows that have no room go in several rounds, and the host waits for their number, as
                it does with torchtitan's own all-to-all.  A number: room for so many times the rows of even routing
                (math.inf: all that can arrive); the host waits for nothing, and more rows raise TooManyRows on every
                rank.
            timeout_s: how long a rank waits for another, in seconds.
            backend: see Buffer; None: "host" for tensors on the CPU, else "auto".
            wire: see Buffer.combine, by name; None: rows are added up on their rank, and travel in their dtype.
        """

        hidden_dim: int | None = None
        num_max_tokens_per_rank: int | None = None
        dtype: str | None = None
        pad_multiple: int | None = None
        capacity_factor: float | None = None
        timeout_s: float = 600.0
        backend: BackendName | None = None
        wire: CombineWireName | None = None

    def __init__(self, config: TokenDispatcher.Config) -> None:
        super().__init__(config)
        if config.dtype is not None and config.dtype not in _DTYPES:
            raise BadInput("dtype", config.dtype, ", ".join(_DTYPES))
        if config.wire is not None:
            check_name("wire", config.wire, (*WIRES, "rows"))
        self._config = config
        self._buffers: dict[Key, Buffer] = {}
        self._outgrown: list[Buffer] = []  # backward passes may still need them

    def init_buffer(self) -> None:
        """Open the Buffer if the configuration tells its sizes.  Collective."""
        hidden, tokens, dtype = self._config.hidden_dim, self._config.num_max_tokens_per_rank, self._config.dtype
        if self._local or hidden is None or tokens is None or dtype is None:
            return
        assert self.ep_mesh is not None
        kind = self.ep_mesh.device_type
        device = torch.device("cuda", torch.cuda.current_device()) if kind == "cuda" else torch.device(kind)
        self._open((hidden, _DTYPES[dtype], device), tokens)

    def dispatch(
        self,
        x_TD: torch.Tensor,
        topk_scores_TK: torch.Tensor,
        topk_expert_ids_TK: torch.Tensor,
        num_local_tokens_per_expert_E: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor, Any]:
        """Send tokens to the ranks of their experts.  Collective.  Gradients: x_TD, topk_scores_TK.

        Args:
            x_TD: `[T, D]`.
            topk_scores_TK: floating `[T, K]`.
            topk_expert_ids_TK: int64 `[T, K]`.
            num_local_tokens_per_expert_E: not read, unless there is no expert parallelism.

        Returns:
            Rows `[R, D]` by expert, and zeros behind them; int32 `[E/R]`, the rows of each expert, padding included;
            and the Metadata that combine() takes.

        Raises:
            As Buffer and moecomm.ops.dispatch; Unsupported in a graph of torch.compile if no Buffer is open.
        """
        if self._local:
            found: tuple[torch.Tensor, torch.Tensor, Any] = LocalTokenDispatcher.dispatch(
                self, x_TD, topk_scores_TK, topk_expert_ids_TK, num_local_tokens_per_expert_E
            )
            return found
        alignment = self._config.pad_multiple or 1
        # In a graph nothing waits: there, and with a capacity of the user's, too many rows are an error.
        waits = self._config.capacity_factor is None and not torch.compiler.is_compiling()
        routed = ops.dispatch(
            self._name(x_TD),
            x_TD.contiguous(),
            topk_expert_ids_TK,
            topk_scores_TK,
            layout="expert",
            expert_alignment=alignment,
            overflow="chunks" if waits else "error",
        )
        counts = routed.tokens_per_expert
        if alignment > 1:
            counts = (counts + (alignment - 1)) // alignment * alignment
        return routed.x, counts, Metadata(routed.handle)

    def combine(self, routed_output_RD: torch.Tensor, metadata: Any, x_TD: torch.Tensor) -> torch.Tensor:
        """`[T, D]`: the sum of each token's rows times their scores, in float32, rounded once.  Collective.

        Gradients: routed_output_RD, and topk_scores_TK of the dispatch.

        Args:
            routed_output_RD: `[R, D]`, in the order of dispatch().
            metadata: of dispatch().
            x_TD: not read, unless there is no expert parallelism.

        Raises:
            As moecomm.ops.combine.
        """
        if self._local:
            out: torch.Tensor = LocalTokenDispatcher.combine(self, routed_output_RD, metadata, x_TD)
            return out
        return ops.combine(routed_output_RD, metadata.handle, wire=self._config.wire)

    @property
    def _local(self) -> bool:
        return self.ep_mesh is None or self.ep_mesh.size() == 1

    def _name(self, x: torch.Tensor) -> str:
        """The name of a Buffer with room for these tokens.  All ranks have as many, and open a larger one together."""
        key = (x.shape[1], x.dtype, x.device)
        buffer = self._buffers.get(key)
        if torch.compiler.is_compiling():
            if buffer is None:
                raise Unsupported(
                    "torch.compile before a Buffer is open: set dtype, hidden_dim and num_max_tokens_per_rank"
                )
            return buffer.name
        if buffer is None or buffer.closed:
            buffer = self._open(key, max(len(x), self._config.num_max_tokens_per_rank or 1))
        elif len(x) > buffer.max_tokens:
            self._outgrown.append(buffer)
            buffer = self._open(key, max(len(x), buffer.max_tokens + buffer.max_tokens // 4))
        return buffer.name

    def _open(self, key: Key, tokens: int) -> Buffer:
        """Open a Buffer for as many tokens, or take that of another layer of the same sizes.  Collective."""
        assert self.ep_mesh is not None
        hidden, dtype, device = key
        buffer = self._buffers[key] = shared_buffer(
            self.ep_mesh.get_group(),
            hidden=hidden,
            num_experts=self.num_experts,
            topk=self.top_k,
            max_tokens=tokens,
            dtype=dtype,
            device=device,
            backend=self._config.backend or ("host" if device.type == "cpu" else "auto"),
            timeout_s=self._config.timeout_s,
            capacity_factor=self._config.capacity_factor,
        )
        return buffer


@override(target=BaseEPTokenDispatcher.Config, description="Expert-parallel dispatch and combine over moecomm.")  # type: ignore[untyped-decorator,unused-ignore]
def use_moecomm(
    cfg: BaseEPTokenDispatcher.Config,
    *,
    dtype: str | None = None,
    capacity_factor: float | None = None,
    timeout_s: float = 600.0,
    backend: BackendName | None = None,
    wire: CombineWireName | None = None,
) -> TokenDispatcher.Config:
    """Configure moecomm in the place of the dispatcher of every MoE layer, whichever one its configuration names.

    An override of torchtitan, to name in `override.imports`.

    Args:
        cfg: of torchtitan's dispatcher; its sizes and `pad_multiple` are taken over.
        dtype, capacity_factor, timeout_s, backend, wire: see TokenDispatcher.Config.
    """
    options: dict[str, Any] = {"dtype": dtype, "capacity_factor": capacity_factor, "timeout_s": timeout_s}
    options |= {"backend": backend, "wire": wire}
    chosen: TokenDispatcher.Config = derive(cfg, TokenDispatcher.Config, **options)
    return chosen
