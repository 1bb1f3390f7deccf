"""moecomm as a token dispatcher of Megatron-core, by a layer spec, without a patched file.

Checked against 0.16.1 and 0.19.2.

    from moecomm.integrations.megatron import use_moecomm

    spec = use_moecomm(get_gpt_layer_with_transformer_engine_spec(num_experts=64, moe_grouped_gemm=True))
    model = GPTModel(config, spec, ...)

docs/megatron.md says which settings of Megatron-core work, and which do not.
"""

from __future__ import annotations

from moecomm.integrations.megatron.buffers import Limits
from moecomm.integrations.megatron.layer import MoELayer, TokenDispatcher, install_as_deepep, use_moecomm
from moecomm.integrations.megatron.manager import Manager

__all__ = ["Limits", "Manager", "MoELayer", "TokenDispatcher", "install_as_deepep", "use_moecomm"]
