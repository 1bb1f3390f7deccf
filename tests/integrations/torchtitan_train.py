"""Trains torchtitan's small DeepSeek-V3 in its Trainer, over its own all-to-all and over moecomm, and compares losses.

    python -m tests.integrations.torchtitan_train [steps] [--gpus N] [--recipes N] [--json FILE]  # needs torchtitan

Expert parallelism is 2, and fully_shard shards the other parameters over all ranks, as torchtitan does.  The model is
that of its configuration deepseek_v3_debugmodel, with torch's scaled_dot_product_attention: the backward pass of
flex_attention needs a GPU and Triton.  Tokens follow a rule, because the wheel has no data set.

docs/torchtitan.md says how far the losses may be apart.  Ranks beyond the number of GPUs share them, which NCCL 2.29
and later allow with NCCL_MULTI_RANK_GPU_ENABLE=1; their times say nothing then.
"""

from __future__ import annotations

import gc
import importlib.util
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from types import ModuleType
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed import fsdp

from tests.integrations.torchtitan_stub import without_triton
from tests.integrations.trained import Program, Trained, main

EXPERT_RANKS, VOCABULARY = 2, 64
RATE = 1e-4  # eight times that, as in the configuration, makes of a rounding a difference of percents within 20 steps
LENGTH, BATCH = {"cpu": 32, "cuda": 1024}, {"cpu": 2, "cuda": 4}
WARM_UP = 5  # steps that are not timed
OVERRIDE = "moecomm.integrations.torchtitan.use_moecomm"


class Recipe(NamedTuple):
    """Work around the layer.

    Attributes:
        topk: experts a token.
        dtype: of activations and gathered parameters; experts compute in bfloat16 in any case.
        bound: how far a loss may be from that of the all-to-all on CPU ranks, relative.
        recompute: activations are computed again in the backward pass (FullAC).
        batches: whose gradients are added in a step.
    """

    topk: int
    dtype: str
    bound: float
    recompute: bool = False
    batches: int = 1


# Sums of two rows are the same in either order.  Of three, each side has an order of its own; in bfloat16 torchtitan's
# all-to-all also rounds more often.
RECIPES = {
    "2 experts a token": Recipe(2, "float32", 0.0),
    "2 experts a token, activations computed again, gradients of two batches added": Recipe(
        2, "float32", 0.0, recompute=True, batches=2
    ),
    "3 experts a token": Recipe(3, "float32", 1e-3),
    "3 experts a token, bfloat16": Recipe(3, "bfloat16", 1e-2),
}


def on_cpu() -> None:
    """Name the CPU as torchtitan's device, before the rest of it is imported: without GPUs it would name "cuda"."""
    from torchtitan.tools import utils

    module = ModuleType("cpu")
    module.__dict__.update({name: value for name, value in vars(torch.cpu).items() if not name.startswith("__")})
    memory = type("Memory", (), {"total_memory": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")})
    module.__dict__.update(
        device_count=lambda: 1,
        current_device=lambda: 0,
        get_device_name=lambda device=None: "CPU",
        get_device_properties=lambda device=None: memory,
        memory_stats=lambda device=None: {},
        reset_peak_memory_stats=lambda: None,
        empty_cache=lambda: None,
    )
    utils.device_type, utils.device_module = "cpu", module


def stand_in() -> None:
    """Name what torchtitan imports and this training doesn't use, where it is not installed: kernels that need Triton,
    the package `datasets`, and parts of torch that 2.11 lacks.  set_timeout() is the newer name of a function.
    """
    without_triton()
    if importlib.util.find_spec("datasets") is None:
        for name in ("datasets", "datasets.distributed"):
            sys.modules[name] = ModuleType(name)
            sys.modules[name].__getattr__ = lambda name: None  # type: ignore[method-assign]
    if not hasattr(fsdp, "DataParallelMeshDims"):
        fsdp.DataParallelMeshDims = type("DataParallelMeshDims", (), {})  # type: ignore[attr-defined,misc]
    if not hasattr(torch.compiler, "_is_non_strict_tracing"):
        torch.compiler._is_non_strict_tracing = lambda: False  # type: ignore[attr-defined]
    if not hasattr(dist, "set_timeout"):
        dist.set_timeout = dist.distributed_c10d._set_pg_timeout  # type: ignore[attr-defined]


def shards_by_parameter() -> bool:
    """Return whether fully_shard takes a mesh for each parameter, which torchtitan's parallelize_deepseekv3 needs."""
    return hasattr(importlib.import_module("torch.distributed.fsdp._fully_shard._fsdp_common"), "ShardPlacementResult")


def parallelize(model: Any, *, parallel_dims: Any, training: Any, ac_config: Any, dump_folder: str, **_: Any) -> Any:
    """Do what parallelize_deepseekv3 does, for older torch: experts are sharded as modules of their own."""
    from torchtitan.config import TORCH_DTYPE_MAP
    from torchtitan.distributed.fsdp import apply_fsdp_to_decoder

    model.parallelize(parallel_dims)
    if ac_config is not None:
        ac_config.build(dump_folder=dump_folder).apply(model)
    dtypes = {
        "param_dtype": TORCH_DTYPE_MAP[training.mixed_precision_param],
        "reduce_dtype": TORCH_DTYPE_MAP[training.mixed_precision_reduce],
    }
    policy = fsdp.MixedPrecisionPolicy(**dtypes, cast_forward_inputs=False)
    mesh = parallel_dims.get_optional_mesh(["efsdp"])
    for layer in model.layers.values():
        if layer.moe_enabled:
            fsdp.fully_shard(layer.moe.routed_experts.inner_experts, mesh=mesh, mp_policy=policy)
    apply_fsdp_to_decoder(model, parallel_dims.get_mesh(["fsdp"]), **dtypes, pp_enabled=False)
    return model


def config_of(
    recipe: Recipe, over_moecomm: bool, device: str, ranks: int, steps: int, folder: str
) -> tuple[Any, list[tuple[float, float]]]:
    """Return a Trainer.Config, and a list to which training adds each step's loss and time."""
    from torchtitan.components.dataloader import BaseDataLoader
    from torchtitan.components.metrics import MetricsProcessor
    from torchtitan.components.optimizer import default_adamw
    from torchtitan.components.tokenizer import BaseTokenizer
    from torchtitan.distributed.activation_checkpoint import FullAC
    from torchtitan.models.common.attention import ScaledDotProductAttention
    from torchtitan.models.deepseek_v3.config_registry import deepseek_v3_debugmodel

    logged: list[tuple[float, float]] = []
    length, batch = LENGTH[device], BATCH[device]

    class Tokenizer(BaseTokenizer):
        @dataclass(kw_only=True, slots=True)
        class Config(BaseTokenizer.Config):
            pass

        def __init__(self, config: Config, **options: Any) -> None:
            super().__init__()

        def encode(self, *args: Any, **options: Any) -> list[int]:
            raise NotImplementedError

        def decode(self, *args: Any, **options: Any) -> str:
            raise NotImplementedError

        def get_vocab_size(self) -> int:
            return VOCABULARY

    class DataLoader(BaseDataLoader):
        """Sequences of random steps of four kinds, whose loss ends near log(4), and not near zero."""

        @dataclass(kw_only=True, slots=True)
        class Config(BaseDataLoader.Config):
            pass

        def __init__(self, config: Config, *, dp_rank: int, **options: Any) -> None:
            self.generator = torch.Generator().manual_seed(dp_rank)

        def __iter__(self) -> Iterator[tuple[dict[str, torch.Tensor], torch.Tensor]]:
            while True:
                steps = torch.randint(5, 9, (batch, length + 1), generator=self.generator)
                tokens = steps.cumsum(1) % VOCABULARY
                yield {"input": tokens[:, :-1].contiguous()}, tokens[:, 1:].contiguous()

        def state_dict(self) -> dict[str, Any]:
            return {}

        def load_state_dict(self, state_dict: dict[str, Any]) -> None: ...

    class Metrics(MetricsProcessor):
        @dataclass(kw_only=True, slots=True)
        class Config(MetricsProcessor.Config):
            pass

        def log(self, step: int, global_avg_loss: float, *args: Any, **options: Any) -> None:
            logged.append((global_avg_loss, time.monotonic()))
            super().log(step, global_avg_loss, *args, **options)

    config = deepseek_v3_debugmodel()
    if not shards_by_parameter():
        config.model_spec.parallelize_fn = parallelize
    for layer in config.model_spec.model.layers:
        layer.attention.inner_attention = ScaledDotProductAttention.Config()
        if layer.moe is not None:
            layer.moe.router.top_k = layer.moe.routed_experts.token_dispatcher.top_k = recipe.topk
    config.loss = config.loss.loss_fn  # not by chunks, whose backward passes free norm's weight under torch 2.11
    config.tokenizer, config.dataloader = Tokenizer.Config(), DataLoader.Config()
    config.metrics = Metrics.Config(log_freq=1, disable_color_printing=True)
    config.optimizer = default_adamw(lr=RATE)
    config.dump_folder = folder
    training = config.training
    training.steps, training.local_batch_size, training.seq_len = steps, batch, length
    training.global_batch_size = batch * ranks * recipe.batches
    training.mixed_precision_param = recipe.dtype
    training.disable_cuda_graphs = True
    config.parallelism.expert_parallel_degree = EXPERT_RANKS
    config.parallelism.spmd_backend = "partial_dtensor"  # the others name meshes to FSDP in a way newer than torch 2.11
    config.activation_checkpoint = FullAC.Config() if recipe.recompute else None
    config.debug.seed, config.debug.deterministic = 0, True
    config.debug.enable_structured_logging = False
    if over_moecomm:
        config.override.imports.append(OVERRIDE)
    return config, logged


def train_once(over_moecomm: bool, name: str, device: str, ranks: int, steps: int) -> Trained:
    """Train a model by a recipe, and return the mean loss of all ranks in each step and tokens per second."""
    from torchtitan.models.common.token_dispatcher import AllToAllTokenDispatcher

    from moecomm.integrations.torchtitan import TokenDispatcher

    recipe = RECIPES[name]
    with tempfile.TemporaryDirectory() as folder:
        config, logged = config_of(recipe, over_moecomm, device, ranks, steps, folder)
        trainer = config.build()
        (model,) = trainer.model_parts
        made = {type(module.token_dispatcher) for module in model.modules() if hasattr(module, "token_dispatcher")}
        assert made == {TokenDispatcher if over_moecomm else AllToAllTokenDispatcher}, made
        if device == "cpu":  # gloo can't multiply before it adds
            for module in model.modules():
                if isinstance(module, fsdp.FSDPModule):
                    module.set_force_sum_reduction_for_comms(True)
        trainer.train()
        trainer.close()
    del trainer, model
    gc.collect()  # torchtitan switches the automatic one off
    begin = min(WARM_UP, steps - 1)
    seconds = logged[-1][1] - logged[begin - 1][1]
    rate = (steps - begin) * recipe.batches * BATCH[device] * LENGTH[device] * ranks / seconds
    return [loss for loss, _ in logged], rate


def prepare(rank: int, ranks: int, device: str, port: int) -> None:
    """See trained.Program.  torchtitan itself opens the process group."""
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    local = rank % torch.cuda.device_count() if device == "cuda" else 0
    names = {"RANK": rank, "LOCAL_RANK": local, "WORLD_SIZE": ranks, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    os.environ.update({name: str(value) for name, value in names.items()})
    stand_in()
    if device == "cpu":
        on_cpu()


PROGRAM = Program(
    name="tests.integrations.torchtitan_train",
    what="torchtitan's small DeepSeek-V3",
    package="torchtitan",
    ranks=2,
    open=prepare,
    train=train_once,
    bounds={name: recipe.bound for name, recipe in RECIPES.items()},
    bound=1e-2,  # torch's grouped matrix products may add in another order
)


if __name__ == "__main__":
    sys.exit(main(PROGRAM, __doc__, sys.argv[1:]))
