"""Trains a small GPT of Megatron-core, with its all-to-all dispatcher and over moecomm, and compares the losses.

    python -m tests.integrations.megatron_train [steps] [--gpus N] [--recipes N] [--json FILE]  # needs megatron-core

The losses have to be the same, to the bit; on GPUs torch takes its deterministic algorithms, because Megatron's
dispatcher would add rows in any order.  Ranks beyond the number of GPUs share them, which NCCL 2.29 and later allow
with NCCL_MULTI_RANK_GPU_ENABLE=1; their times say nothing then.
"""

from __future__ import annotations

import os
import sys
import time
from typing import Any

import torch
import torch.distributed as dist

from tests.integrations.trained import Program, Trained, main

VOCABULARY, LAYERS = 64, 2
LENGTH, BATCH = {"cpu": 16, "cuda": 512}, {"cpu": 2, "cuda": 4}
RATE = {"cpu": 0.5, "cuda": 0.02}  # of SGD; a larger model would diverge, and then no two losses are alike
ON_GPUS = {"hidden_size": 1024, "ffn_hidden_size": 1408, "num_attention_heads": 8}
# What goes on around the layer, and the settings of Megatron that ask for it.
RECIPES: dict[str, dict[str, Any]] = {
    "plain": {},
    "activations computed again": {"recompute_granularity": "selective", "recompute_modules": ["moe"]},
    "gradients of two batches added, DistributedDataParallel": {},
}
WARM_UP = 5  # steps that are not timed


def train_once(over_moecomm: bool, recipe: str, device: str, ranks: int, steps: int) -> Trained:
    """Return the mean loss of all ranks in each step, and tokens per second of all: SGD on the next token of sequences
    that repeat.
    """
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec

    from moecomm.integrations.megatron import TokenDispatcher, use_moecomm
    from tests.integrations.megatron_on_cpu import EXPERTS, config_of

    torch.manual_seed(0)
    if device == "cuda":
        from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

        model_parallel_cuda_manual_seed(1)  # the weights of each model are the same
    length, batch, rank = LENGTH[device], BATCH[device], dist.get_rank()
    spec = get_gpt_layer_local_spec(num_experts=EXPERTS, moe_grouped_gemm=False, normalization="LayerNorm")
    config = config_of(ranks, num_layers=LAYERS, **RECIPES[recipe], **(ON_GPUS if device == "cuda" else {}))
    model = GPTModel(config, use_moecomm(spec) if over_moecomm else spec, VOCABULARY, length).to(device)
    made = [layer.mlp.token_dispatcher for layer in model.decoder.layers]
    assert all(isinstance(dispatcher, TokenDispatcher) is over_moecomm for dispatcher in made)
    ddp = "DistributedDataParallel" in recipe
    batches = 2 if ddp else 1
    whole = DistributedDataParallel(config, DistributedDataParallelConfig(), model) if ddp else model
    weights = list(model.named_parameters())
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE[device])
    g = torch.Generator().manual_seed(rank)
    position = torch.arange(length, device=device).expand(batch, -1)
    mask = torch.ones(1, 1, length, length, device=device).triu(1).bool()
    found, begin = [], 0.0
    for step in range(steps):
        if step == min(WARM_UP, steps - 1):
            float(torch.zeros(1, device=device))  # waits for the device
            begin = time.monotonic()
        optimizer.zero_grad()
        if ddp:
            whole.zero_grad_buffer()
        mean = torch.zeros((), device=device)
        for _ in range(batches):
            first = torch.randint(0, VOCABULARY, (batch, 1), generator=g)
            tokens = ((first + 5 * torch.arange(length + 1)) % VOCABULARY).to(device)
            loss = whole(tokens[:, :-1], position, mask, labels=tokens[:, 1:]).mean() / batches
            (loss if ddp else loss / ranks).backward()
            mean += loss.detach()
        if ddp:
            whole.finish_grad_sync()
        for name, weight in weights:
            if ddp:  # in buffers of its own, divided by the ranks
                weight.grad = weight.main_grad
            elif ".experts." not in name and weight.grad is not None:  # those of experts are of all ranks' tokens
                dist.all_reduce(weight.grad)
        optimizer.step()
        dist.all_reduce(mean)
        found.append(float(mean) / ranks)
    seconds = time.monotonic() - begin
    timed = steps - min(WARM_UP, steps - 1)
    return found, timed * batches * batch * length * ranks / seconds


def open_group(rank: int, ranks: int, device: str, port: int) -> None:
    """See trained.Program."""
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    if device == "cuda":
        torch.cuda.set_device(rank % torch.cuda.device_count())
    how: dict[str, Any] = {"init_method": f"tcp://127.0.0.1:{port}", "rank": rank, "world_size": ranks}
    dist.init_process_group("nccl" if device == "cuda" else "gloo", **how)
    import tests.integrations.megatron_core  # noqa: F401 - before the rest of Megatron
    from tests.integrations.megatron_on_cpu import parallel, without_cuda, without_transformer_engine

    if device == "cuda":
        without_transformer_engine()
        os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
        torch.use_deterministic_algorithms(True)
        torch._dynamo.config.disable = True  # compiling what it wants compiled takes longer than the rest
    else:
        without_cuda()
    parallel(ranks)


PROGRAM = Program(
    name="tests.integrations.megatron_train",
    what="a small Megatron GPT",
    package="megatron-core",
    ranks=4,
    open=open_group,
    train=train_once,
    bounds=dict.fromkeys(RECIPES, 0.0),
    bound=0.0,
)


if __name__ == "__main__":
    sys.exit(main(PROGRAM, __doc__, sys.argv[1:]))
