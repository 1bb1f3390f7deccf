"""The parts of vLLM 0.33 that moecomm.integrations.vllm touches, with their signatures, and as little inside as does.

No code of vLLM: what each part has to do is written anew.  test_vllm_signatures.py compares the signatures with an
installed vLLM's.
"""

# Only names and defaults are compared, and theirs have types of their own.
# ruff: noqa: ANN001, ANN201
from __future__ import annotations

import enum
import sys
import threading
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import ModuleType, SimpleNamespace
from typing import Any

import torch

from moecomm import formats

MOE = "vllm.model_executor.layers.fused_moe"


class FusedMoEActivationFormat(enum.Enum):
    Standard = "standard"
    BatchedExperts = "batched_experts"


@dataclass
class ExpertTokensMetadata:
    expert_num_tokens: torch.Tensor | None
    expert_num_tokens_cpu: torch.Tensor | None
    psum_recv_per_rank: torch.Tensor | None = None
    rank_expert_offset: int | None = None


class TopKWeightAndReduce(ABC):
    @abstractmethod
    def apply(self, output, fused_expert_output, topk_weights, topk_ids, apply_router_weight_on_input): ...


class TopKWeightAndReduceDelegate(TopKWeightAndReduce):
    def apply(self, output, fused_expert_output, topk_weights, topk_ids, apply_router_weight_on_input):
        raise RuntimeError("whoever finalizes chooses")


class TopKWeightAndReduceNoOP(TopKWeightAndReduce):
    def apply(self, output, fused_expert_output, topk_weights, topk_ids, apply_router_weight_on_input):
        return fused_expert_output if output is None else output.copy_(fused_expert_output)


class TopKWeightAndReduceContiguous(TopKWeightAndReduce):
    def apply(self, output, fused_expert_output, topk_weights, topk_ids, apply_router_weight_on_input):
        rows, topk = topk_ids.shape
        y = fused_expert_output.view(rows, topk, -1)
        if not apply_router_weight_on_input:
            y = y * topk_weights.view(rows, topk, 1)
        total = y.sum(dim=1)
        return total if output is None else output.copy_(total)


class FusedMoEPrepareAndFinalize(ABC):
    def post_init_setup(self, fused_experts): ...  # noqa: B027

    def allocate_fused_expert_output(self, shape, dtype, device, weight_and_reduce_impl):
        return None

    @property
    @abstractmethod
    def activation_format(self): ...

    @abstractmethod
    def topk_indices_dtype(self): ...

    @abstractmethod
    def max_num_tokens_per_rank(self): ...

    @abstractmethod
    def num_dispatchers(self): ...

    @abstractmethod
    def output_is_reduced(self): ...

    def supports_async(self):
        return False

    def supports_dbo(self):
        return self.supports_async()

    def supports_deferred_moe_finalize(self):
        return False


class FusedMoEPrepareAndFinalizeModular(FusedMoEPrepareAndFinalize):
    @abstractmethod
    def prepare(
        self,
        a1,
        topk_weights,
        topk_ids,
        num_experts,
        expert_map,
        apply_router_weight_on_input,
        quant_config,
        defer_input_quant,
    ): ...

    def prepare_async(
        self,
        a1,
        topk_weights,
        topk_ids,
        num_experts,
        expert_map,
        apply_router_weight_on_input,
        quant_config,
        defer_input_quant,
    ):
        raise NotImplementedError

    @abstractmethod
    def finalize(
        self, output, fused_expert_output, topk_weights, topk_ids, apply_router_weight_on_input, weight_and_reduce_impl
    ): ...

    def finalize_async(
        self, output, fused_expert_output, topk_weights, topk_ids, apply_router_weight_on_input, weight_and_reduce_impl
    ):
        raise NotImplementedError


class All2AllManagerBase:
    def __init__(self, cpu_group, tcp_store_group=None) -> None:
        self.cpu_group, self.tcp_store_group = cpu_group, tcp_store_group
        self.support_fault_tolerance = False

    def get_handle(self, kwargs): ...

    def dispatch_router_logits(self, hidden_states, router_logits, is_sequence_parallel=False, extra_tensors=None): ...

    def dispatch(self, hidden_states, topk_weights, topk_ids, is_sequence_parallel=False, extra_tensors=None): ...

    def set_num_sms(self, num_sms): ...

    def max_sms_used(self):
        return None

    def combine(self, hidden_states, is_sequence_parallel=False): ...

    def query_active_mask(self): ...

    def query_fault(self): ...

    def clean_buffers(self): ...

    def checkpoint_prepare(self): ...

    def checkpoint_restore(self): ...

    def destroy(self): ...


class MicroBatches:
    """Which one runs in a thread, and what was asked of the schedule."""

    def __init__(self) -> None:
        self._local = threading.local()
        self.enabled = False

    @property
    def calls(self) -> list[str]:
        return self._local.__dict__.setdefault("calls", [])

    @contextmanager
    def running(self, number: int) -> Iterator[None]:
        self._local.number = number
        yield
        self._local.number = 0

    def module(self) -> ModuleType:
        def called(name: str) -> Any:
            return lambda *args: self.calls.append(name)

        names = [
            "yield_and_switch_from_compute_to_comm",
            "yield_and_switch_from_comm_to_compute",
            "maybe_run_recv_hook",
        ]
        names += ["switch_to_comm", "switch_to_compute", "switch_to_compute_sync"]
        parts = {f"dbo_{name}": called(name) for name in names}
        current = lambda: self._local.__dict__.get("number", 0)  # noqa: E731
        return _module(
            "vllm.v1.worker.ubatching", dbo_enabled=lambda: self.enabled, dbo_current_ubatch_id=current, **parts
        )


def quantized(a, a_scale, quant_dtype, per_act_token_quant, block_shape=None, is_scale_swizzled=True, mx_alignment=0):
    """As their quantizer: FP8 and INT8 in blocks of 128 columns, by token, or with one scale; NVFP4, MXFP8."""
    if quant_dtype is None:
        return a, None
    if quant_dtype in ("nvfp4", "mxfp8"):
        values, scales = formats.quantize(a, quant_dtype, global_scale=a_scale)
        if not is_scale_swizzled:
            return values, scales if quant_dtype == "nvfp4" else scales.view(torch.uint8)
        blocks = formats.swizzle(scales)
        return values, blocks.view(-(-len(a) // 128) * 128, -1) if quant_dtype == "nvfp4" else blocks.view(torch.uint8)
    kind = {torch.float8_e4m3fn: "fp8", torch.int8: "int8"}[quant_dtype]
    if block_shape is None and (a_scale is not None or not per_act_token_quant):
        scale = torch.ones(1) if a_scale is None else a_scale
        q = a.float() / scale
        return (q.round().clamp(-128, 127) if quant_dtype is torch.int8 else q).to(quant_dtype), scale
    if block_shape is None:
        return formats.quantize(a, f"{kind}_token")
    if quant_dtype is torch.int8:
        return formats.quantize(a, "int8_group")
    x = a.float()
    scale = x.view(len(x), -1, 128).abs().amax(dim=2).clamp(min=1e-10) / 448
    return (x.view(len(x), -1, 128) / scale.unsqueeze(2)).view(x.shape).to(quant_dtype), scale


def batched_scales(scales, num_experts):
    if scales is not None and scales.numel() == 1:
        return scales.view(1, 1, 1).expand(num_experts, 1, 1)
    return scales


def quant_config(**given: Any) -> SimpleNamespace:
    """Return the fields that prepare reads of FusedMoEQuantConfig."""
    settings = {
        "quant_dtype": None,
        "block_shape": None,
        "per_act_token_quant": False,
        "a1_scale": None,
        "a2_scale": None,
        "a1_gscale": None,
        "is_scale_swizzled": True,
        **given,
    }
    return SimpleNamespace(**settings, is_block_quantized=settings["block_shape"] is not None)


class DeepEPHTAll2AllManager:
    """The class that moecomm's replaces."""


class DeepEPLLAll2AllManager:
    """Likewise."""


def modules(batches: MicroBatches) -> dict[str, ModuleType]:
    """For sys.modules.  A test sets the fields of `vllm.config.parallel`, which vLLM has in its configuration."""
    parallel = SimpleNamespace(enable_fault_tolerance=False, all2all_backend="deepep_low_latency")
    reducers = [TopKWeightAndReduceDelegate, TopKWeightAndReduceNoOP, TopKWeightAndReduceContiguous]
    kernel = [FusedMoEActivationFormat, ExpertTokensMetadata, TopKWeightAndReduce]
    kernel += [FusedMoEPrepareAndFinalize, FusedMoEPrepareAndFinalizeModular]
    places = _module(f"{MOE}.all2all_utils")
    exec(
        # Their factory looks its classes up when it is called.
        "def maybe_make_prepare_finalize(kind, **args):\n"
        "    return (DeepEPHTPrepareAndFinalize if kind == 'standard' else DeepEPLLPrepareAndFinalize)(**args)\n",
        places.__dict__,
    )
    communicators = "vllm.distributed.device_communicators"
    made = [
        _module(f"{MOE}.modular_kernel", **{kind.__name__: kind for kind in kernel}),
        _module(f"{MOE}.topk_weight_and_reduce", **{kind.__name__: kind for kind in reducers}),
        _module(f"{MOE}.utils", moe_kernel_quantize_input=quantized, normalize_batched_scales_shape=batched_scales),
        places,
        _module(
            f"{communicators}.all2all",
            DeepEPHTAll2AllManager=DeepEPHTAll2AllManager,
            DeepEPLLAll2AllManager=DeepEPLLAll2AllManager,
        ),
        _module(f"{communicators}.base_device_communicator", All2AllManagerBase=All2AllManagerBase),
        _module(
            "vllm.config",
            parallel=parallel,
            get_current_vllm_config=lambda: SimpleNamespace(parallel_config=parallel),
        ),
        batches.module(),
        _module("vllm.envs", VLLM_DEEPEPLL_NVFP4_DISPATCH=False, VLLM_BATCH_INVARIANT=False),
        _module("vllm.platforms", current_platform=SimpleNamespace(is_cpu=lambda: False)),
    ]
    found = {module.__name__: module for module in made}
    for name in list(found):
        while "." in name:
            below = found[name]
            name, _, leaf = name.rpartition(".")
            setattr(found.setdefault(name, _module(name)), leaf, below)
    return found


def _module(name: str, **parts: Any) -> ModuleType:
    module = ModuleType(name)
    module.__dict__.update(parts)
    module.__path__ = []
    return module


def forget_integration() -> None:
    """The next import of moecomm.integrations.vllm finds another vLLM."""
    for name in [name for name in sys.modules if name.startswith("moecomm.integrations.vllm")]:
        del sys.modules[name]
