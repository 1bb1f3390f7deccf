"""Trains a small GPT of Megatron-core for 100 steps on CPU ranks, with its all-to-all dispatcher and over moecomm.  The
losses have to be the same, to the bit.

    python -m tests.integrations.megatron_train [steps] [--json FILE]  # some minutes; needs megatron-core
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import sys
import tempfile
import time
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from moecomm_bench import results

RANKS, STEPS, VOCABULARY, LENGTH, BATCH, LAYERS = 4, 100, 64, 16, 2, 2


def losses_of(over_moecomm: bool, rank: int, steps: int) -> list[float]:
    """The mean loss of all ranks in each step: SGD on the next token of sequences that repeat."""
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec

    from moecomm.integrations.megatron import TokenDispatcher, use_moecomm
    from tests.integrations.megatron_on_cpu import EXPERTS, config_of

    torch.manual_seed(0)
    spec = get_gpt_layer_local_spec(num_experts=EXPERTS, moe_grouped_gemm=False, normalization="LayerNorm")
    config = config_of(RANKS, num_layers=LAYERS)
    model = GPTModel(config, use_moecomm(spec) if over_moecomm else spec, VOCABULARY, LENGTH)
    made = [layer.mlp.token_dispatcher for layer in model.decoder.layers]
    assert all(isinstance(dispatcher, TokenDispatcher) is over_moecomm for dispatcher in made)
    weights = list(model.named_parameters())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    g = torch.Generator().manual_seed(rank)
    found = []
    for _ in range(steps):
        first = torch.randint(0, VOCABULARY, (BATCH, 1), generator=g)
        tokens = (first + 5 * torch.arange(LENGTH + 1)) % VOCABULARY
        position = torch.arange(LENGTH).expand(BATCH, -1)
        mask = torch.ones(1, 1, LENGTH, LENGTH).triu(1).bool()
        loss = model(tokens[:, :-1], position, mask, labels=tokens[:, 1:]).mean()
        optimizer.zero_grad()
        (loss / RANKS).backward()
        for name, weight in weights:
            if ".experts." not in name and weight.grad is not None:  # those of experts are of all ranks' tokens
                dist.all_reduce(weight.grad)
        optimizer.step()
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        found.append(float(mean) / RANKS)
    return found


def train(rank: int, folder: Path, steps: int, queue: Any) -> None:
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(str(folder / "store"), RANKS), rank=rank, world_size=RANKS)
    import tests.integrations.megatron_core  # noqa: F401 - before the rest of Megatron
    from tests.integrations.megatron_on_cpu import parallel, without_cuda

    without_cuda()
    parallel(RANKS)
    found = [losses_of(over_moecomm, rank, steps) for over_moecomm in (False, True)]
    if rank == 0:
        queue.put(found)
    dist.barrier()
    os._exit(0)


def both(steps: int) -> list[list[float]]:
    """Return the losses over the all-to-all dispatcher, then those over moecomm; empty if a rank failed."""
    context = multiprocessing.get_context("spawn")
    found = context.SimpleQueue()
    with tempfile.TemporaryDirectory() as folder:
        given = [(rank, Path(folder), steps, found) for rank in range(RANKS)]
        processes = [context.Process(target=train, args=args) for args in given]
        for process in processes:
            process.start()
        for process in processes:
            process.join()
        return [] if found.empty() else found.get()


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser("python -m tests.integrations.megatron_train", description=__doc__)
    parser.add_argument("steps", type=int, nargs="?", default=STEPS)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args(arguments)
    begin = time.monotonic()
    if not (losses := both(given.steps)):
        return 1
    theirs, ours = losses
    print(
        f"{given.steps} steps on {RANKS} ranks: loss {theirs[0]:.4f} to {theirs[-1]:.4f}; over moecomm {ours[-1]:.4f}"
    )
    differ = [step for step, (a, b) in enumerate(zip(theirs, ours, strict=True)) if a != b]
    print(f"the losses differ from step {differ[0]} on" if differ else "all losses are the same, to the bit")
    if given.json and not differ:
        row = {
            "kind": f"training of a small Megatron GPT on {RANKS} CPU ranks, losses of the all-to-all dispatcher",
            "steps": given.steps,
            "ranks": RANKS,
            "megatron-core": metadata.version("megatron-core"),
            "first_loss": theirs[0],
            "last_loss": ours[-1],
            "seconds": round(time.monotonic() - begin),
        }
        results.write(given.json, {"rows": [row]})
    return 1 if differ else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
