"""Megatron-core's MoE layer on CPU ranks: its groups, a configuration, and the few calls of CUDA that it makes."""

from __future__ import annotations

import functools
import importlib
import sys
from contextlib import nullcontext
from types import ModuleType
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.models.gpt.moe_module_specs import get_moe_module_spec
from megatron.core.tensor_parallel import random
from megatron.core.tensor_parallel.random import CudaRNGStatesTracker
from megatron.core.transformer.moe import fused_a2a, moe_utils, token_dispatcher
from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher
from megatron.core.transformer.spec_utils import build_module
from megatron.core.transformer.transformer_config import TransformerConfig

from moecomm.compat import install_as_deep_ep
from moecomm.compat.te_ep import install_as_te_ep
from moecomm.integrations.megatron import manager

HIDDEN, INTERMEDIATE, EXPERTS = 16, 24, 8


def without_cuda() -> None:
    """In a process of its own.  The layer asks where to put tensors, and its all-to-all dispatcher for a stream on
    which sizes go to the host; compiling what it wants compiled would take longer than the tests.
    """
    torch._dynamo.config.disable = True
    torch.cuda.current_device = lambda: torch.device("cpu")  # type: ignore[assignment,return-value]
    torch.zeros = functools.partial(_zeros_on_cpu, torch.zeros)  # the HybridEP manager of 0.19 names "cuda"
    MoEAlltoAllTokenDispatcher.cuda_dtoh_stream = "none"
    without_transformer_engine()
    MoEAlltoAllTokenDispatcher._maybe_dtoh_and_synchronize = _sizes_as_lists
    CudaRNGStatesTracker.fork = lambda self, *name: nullcontext()  # attention drops nothing out
    random._get_cuda_rng_state = lambda *where, **how: torch.empty(0)  # what is computed again asks for it
    random._set_cuda_rng_state = lambda *where, **how: None
    for module in (token_dispatcher, manager):  # 0.18 and later pad beside FP8 only, which needs TransformerEngine
        module.get_align_size_for_quantization = lambda config: 16


def _zeros_on_cpu(zeros: Any, *shape: Any, **options: Any) -> torch.Tensor:
    return zeros(*shape, **{**options, "device": "cpu"} if options.get("device") == "cuda" else options)


def without_transformer_engine() -> None:
    """The router of 0.16.1 asks for this name, and forgets to set it where there is no TransformerEngine."""
    if not hasattr(moe_utils, "te_general_gemm"):
        moe_utils.te_general_gemm = None


def over_deep_ep() -> None:
    """In a process of its own.  Megatron finds moecomm as deep_ep; it has looked already, when it was imported."""
    install_as_deep_ep(replace=True)
    importlib.reload(fused_a2a)
    assert fused_a2a.HAVE_DEEP_EP and fused_a2a.HAVE_HYBRIDEP
    for name in (
        "fused_dispatch",
        "fused_combine",
        "set_deepep_num_sms",
        "hybrid_ep_dispatch",
        "hybrid_ep_combine",
    ):
        setattr(token_dispatcher, name, getattr(fused_a2a, name))


def over_te_ep() -> None:
    """In a process of its own.  Megatron finds moecomm as TransformerEngine's ep; of the rest there is nothing."""
    package = ModuleType("transformer_engine.pytorch")
    sys.modules |= {"transformer_engine": ModuleType("transformer_engine"), package.__name__: package}
    install_as_te_ep()
    importlib.reload(fused_a2a)
    for name in [name for name in sys.modules if name.split(".")[0] == "transformer_engine"]:
        del sys.modules[name]
    for name in ("ensure_nccl_ep_bootstrapped", "is_nccl_ep_bootstrapped", "nccl_ep_finalize"):
        setattr(token_dispatcher, name, getattr(fused_a2a, name))
    for name in ("new_nccl_ep_buffer", "nccl_ep_dispatch", "nccl_ep_combine"):
        setattr(token_dispatcher, name, getattr(fused_a2a, name))
    token_dispatcher.get_align_size_for_quantization = lambda config: 0  # 16 is what without_cuda() says


def _sizes_as_lists(self: Any, point: str, tokens_per_expert: Any = None) -> Any:
    for name in ("input_splits", "output_splits"):
        if isinstance(sizes := getattr(self, name), torch.Tensor):
            setattr(self, name, sizes.tolist())
    return tokens_per_expert


def parallel(ranks: int, tensor_parallel: int = 1) -> None:
    """Experts over all ranks; each of them split over neighbours with `tensor_parallel`; attention not split."""
    parallel_state.initialize_model_parallel(
        expert_model_parallel_size=ranks // tensor_parallel, expert_tensor_parallel_size=tensor_parallel
    )


def config_of(ranks: int, tensor_parallel: int = 1, **settings: Any) -> TransformerConfig:
    given: dict[str, Any] = {
        "num_layers": 1,
        "hidden_size": HIDDEN,
        "num_attention_heads": 2,
        "ffn_hidden_size": INTERMEDIATE,
        "num_moe_experts": EXPERTS,
        "moe_router_topk": 2,
        "moe_router_load_balancing_type": "none",
        "moe_token_dispatcher_type": "alltoall",
        "expert_model_parallel_size": ranks // tensor_parallel,
        "expert_tensor_parallel_size": tensor_parallel,
        "add_bias_linear": False,
        "gated_linear_unit": True,
        "activation_func": torch.nn.functional.silu,
        "use_cpu_initialization": True,
        "bias_activation_fusion": False,
    }
    padded = settings.pop("moe_router_padding_for_quantization", False)
    config = TransformerConfig(**{**given, **settings})
    config.moe_router_padding_for_quantization = padded  # asked for beside FP8 only, which needs TransformerEngine
    return config


def spec() -> Any:
    return get_moe_module_spec(use_te=False, num_experts=EXPERTS, moe_grouped_gemm=False)


def built(given: Any, config: TransformerConfig) -> Any:
    """The layer of a spec: a ModuleSpec in 0.16, a functools.partial in 0.18 and later."""
    return given(config=config) if isinstance(given, functools.partial) else build_module(given, config=config)
