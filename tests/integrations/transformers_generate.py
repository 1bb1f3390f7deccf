"""Generate with a model of Hugging Face transformers over its own all-to-all and over moecomm, and compare.

    torchrun --nproc_per_node 2 -m tests.integrations.transformers_generate [MODEL] [--json FILE]

MODEL is a name or a folder; without it, a small one of random weights is made.  Runs on GPUs, or on CPUs without them.
Ranks with the same LOCAL_RANK share a GPU, which NCCL 2.29 and later allow with NCCL_MULTI_RANK_GPU_ENABLE=1.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from importlib import metadata
from pathlib import Path

import torch
import torch.distributed as dist

from moecomm_bench import results

PROMPTS, NEW_TOKENS = (4, 32), 16  # prompts and their tokens
MOST = 1e-4  # largest difference of logits, over the largest logit


def generated(name: str, implementation: str) -> tuple[torch.Tensor, torch.Tensor]:
    """The logits of the prompts, and the tokens that follow."""
    from transformers import AutoModelForCausalLM
    from transformers.distributed import DistributedConfig

    ranks = dist.get_world_size()
    config = DistributedConfig(tp_size=ranks, ep_size=ranks, ep_implementation=implementation)
    # In float32: in bfloat16 another order of sums may choose other experts.
    how = {"dtype": torch.float32, "experts_implementation": "eager", "distributed_config": config}
    model = AutoModelForCausalLM.from_pretrained(name, **how)
    g = torch.Generator().manual_seed(1)
    ids = torch.randint(0, model.config.vocab_size, PROMPTS, generator=g).to(model.device)
    with torch.no_grad():
        logits = model(ids).logits.float().cpu()
    options = {"max_new_tokens": NEW_TOKENS, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    return logits, model.generate(ids, **options)[:, ids.shape[1] :].cpu()


def main(arguments: list[str]) -> int:
    from moecomm.integrations.transformers import register

    parser = argparse.ArgumentParser("python -m tests.integrations.transformers_generate", description=__doc__)
    parser.add_argument("model", nargs="?")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args(arguments)
    on_gpus = torch.cuda.is_available()
    if on_gpus:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    register()
    with tempfile.TemporaryDirectory() as folder:
        if given.model is None:
            from tests.integrations.test_transformers import make

            make(Path(folder))  # before the group opens: with a group, rank 0 alone would write it
        dist.init_process_group("nccl" if on_gpus else "gloo")
        (theirs, their_tokens), (ours, our_tokens) = (
            generated(given.model or folder, how) for how in ("all_to_all", "moecomm")
        )
        dist.barrier()
    error = float((ours - theirs).abs().max() / theirs.abs().max())
    if dist.get_rank() == 0:
        same, total, ranks = int((our_tokens == their_tokens).sum()), their_tokens.numel(), dist.get_world_size()
        print(f"{same} of {total} tokens are the same; logits differ by {error:.1e} of the largest")
        if given.json and error <= MOST:
            where = "GPU" if on_gpus else "CPU"
            row = {
                "kind": f"transformers generates on {ranks} {where} ranks, the tokens of its own all-to-all",
                "ranks": ranks,
                "tokens": total,
                "same": same,
                "largest_difference": error,
                "transformers": metadata.version("transformers"),
            }
            results.write(given.json, {"rows": [row]})
    dist.destroy_process_group()
    return 0 if error <= MOST else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
