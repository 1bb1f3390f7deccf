"""A MoELayer whose tokens moecomm moves, and how it comes into a model."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from megatron.core.transformer.moe import moe_layer, token_dispatcher
from megatron.core.transformer.moe.moe_utils import get_default_pg_collection
from megatron.core.transformer.spec_utils import ModuleSpec

from moecomm.errors import BadInput, Unsupported
from moecomm.integrations.megatron.buffers import Limits
from moecomm.integrations.megatron.manager import Manager


class TokenDispatcher(token_dispatcher.MoEFlexTokenDispatcher):  # type: ignore[misc]
    """Megatron-core's flex dispatcher over moecomm, whichever backend the configuration names.

    Args:
        num_local_experts, local_expert_indices, config, pg_collection: of MoEFlexTokenDispatcher.
        limits: see Limits.
    """

    def __init__(
        self,
        num_local_experts: int,
        local_expert_indices: list[int],
        config: Any,
        pg_collection: Any = None,
        limits: Limits | None = None,
    ) -> None:
        # Not that of the flex dispatcher, which looks for DeepEP.
        token_dispatcher.MoETokenDispatcher.__init__(self, config=config, pg_collection=pg_collection)
        self.num_local_experts, self.local_expert_indices = num_local_experts, local_expert_indices
        self._comm_manager = Manager(
            group=self.tp_ep_group,
            num_local_experts=num_local_experts,
            router_topk=self.tp_size * config.moe_router_topk,
            num_experts=self.tp_size * config.num_moe_experts,
            config=config,
            limits=limits,
        )
        self.cudagraph_attrs = ["_comm_manager.token_probs", "_comm_manager.token_indices"]

    def set_shared_experts(self, shared_experts: Any) -> None:
        """Unsupported."""
        raise Unsupported("moe_shared_expert_overlap: shared experts run before or after, not inside, the dispatch")

    def token_dispatch(
        self,
        hidden_states: torch.Tensor,
        probs: torch.Tensor | None = None,
        async_finish: bool = True,
        allocate_on_comm_stream: bool = True,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """`[T, H]` and probs `[T, K]` -> rows by expert and their probs.  Collective."""
        if probs is not None:  # schedules that overlap micro-batches pass them cut off from what was before
            self._comm_manager.token_probs = probs
        found: tuple[torch.Tensor, torch.Tensor] = super().token_dispatch(
            hidden_states, probs, async_finish, allocate_on_comm_stream
        )
        return found

    def dispatch_postprocess(
        self, hidden_states: torch.Tensor, probs: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Rows, tokens_per_expert int64 `[E/R]` on the CPU, and probs of the rows."""
        if probs is not None:  # as above
            self._comm_manager.dispatched_probs = probs
        found: tuple[torch.Tensor, torch.Tensor, torch.Tensor] = super().dispatch_postprocess(hidden_states, probs)
        # A graph of autograd lives no longer than its tensors: one made outside has no place in a capture.
        self._comm_manager.token_probs = self._comm_manager.dispatched_probs = None
        return found


class MoELayer(moe_layer.MoELayer):  # type: ignore[misc]
    """Megatron-core's MoELayer with a TokenDispatcher of moecomm, whichever one the configuration names.

    Args:
        config, submodules, layer_number, pg_collection: of Megatron-core's MoELayer.
        limits: see Limits.
        newer: further arguments of the installed version's MoELayer, such as `is_mtp_layer` and `name`.

    Raises:
        Unsupported: moe_shared_expert_overlap; the layers of 0.18 and later that are optimized for inference, which
            choose dispatchers by themselves.
    """

    _makes_rounds = True  # see moecomm.base.layers

    def __init__(
        self,
        config: Any,
        submodules: Any = None,
        layer_number: int | None = None,
        pg_collection: Any = None,
        *,
        limits: Limits | None = None,
        **newer: Any,
    ) -> None:
        if config.moe_shared_expert_overlap:
            raise Unsupported("moe_shared_expert_overlap: turn it off; shared experts run outside of the dispatch")
        groups = get_default_pg_collection() if pg_collection is None else pg_collection
        with _cheapest_dispatcher(config):
            super().__init__(config, submodules=submodules, layer_number=layer_number, pg_collection=groups, **newer)
        if hasattr(self, "_training_token_dispatcher"):
            raise Unsupported("transformer_impl='inference_optimized': its layers choose dispatchers by themselves")
        self.token_dispatcher = TokenDispatcher(
            self.num_local_experts, self.local_expert_indices, config=config, pg_collection=groups, limits=limits
        )


@contextmanager
def _cheapest_dispatcher(config: Any) -> Iterator[None]:
    """Megatron-core's constructor makes a dispatcher: one that asks for nothing, and is thrown away."""
    named = config.moe_token_dispatcher_type
    config.moe_token_dispatcher_type = "allgather"
    try:
        yield
    finally:
        config.moe_token_dispatcher_type = named


def use_moecomm(spec: Any, *, pg_collection: Any = None, limits: Limits | None = None) -> Any:
    """A layer or block spec with moecomm's MoELayer in the place of Megatron-core's; `spec` stays as it is.

    Args:
        spec: ModuleSpec, functools.partial, or the submodules of a block.
        pg_collection: where the model is built with one: TransformerLayer of 0.16 hands it to Megatron-core's own
            MoELayer only; that of 0.18 and later hands it to every layer.  None: the groups of parallel_state.
        limits: see Limits.

    Raises:
        BadInput: no MoELayer in it.
    """
    params = {
        name: value for name, value in (("pg_collection", pg_collection), ("limits", limits)) if value is not None
    }
    found = 0

    def replaced(node: Any) -> Any:
        nonlocal found
        if isinstance(node, (list, tuple)) and not hasattr(node, "_fields"):
            return type(node)(replaced(item) for item in node)
        if isinstance(node, functools.partial):
            named = {name: replaced(value) for name, value in node.keywords.items()}
            if node.func is not moe_layer.MoELayer:
                return functools.partial(node.func, *map(replaced, node.args), **named)
            found += 1
            return functools.partial(MoELayer, *node.args, **{**named, **params})
        if not dataclasses.is_dataclass(node) or isinstance(node, type):
            return node
        fields = {field.name: replaced(getattr(node, field.name)) for field in dataclasses.fields(node) if field.init}
        if isinstance(node, ModuleSpec) and node.module is moe_layer.MoELayer:
            found += 1
            fields |= {"module": MoELayer, "params": {**node.params, **params}}
        return dataclasses.replace(node, **fields)

    result = replaced(spec)
    if not found:
        raise BadInput("spec", type(spec).__name__, "one with Megatron-core's MoELayer in it")
    return result


def install_as_deepep() -> None:
    """Make every flex dispatcher that is built from now on with `moe_flex_dispatcher_backend="deepep"` use moecomm.

    For models whose specs are out of reach.  Changes one name of Megatron-core's module; no file.
    """
    token_dispatcher._DeepepManager = Manager
