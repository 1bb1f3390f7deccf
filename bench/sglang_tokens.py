"""Run SGLang's dispatchers and model runner, tensor and expert parallel, over moecomm: same experts, and tokens.

    python bench/sglang_tokens.py [--runs dispatchers,none,normal,auto,graphs] [--json FILE]

Each of `--runs` starts one process a rank.  `dispatchers` has SGLang's DeepEPDispatcher alone, in normal and
low-latency mode: what it combines must be a plain sum over experts, in bits.  The others build SGLang's ModelRunner, as
its benchmark/one_batch.py does, of a small Qwen3-MoE whose checkpoint of random bfloat16 weights is written first.
They run three prompts and decode them: `none` (SGLang's `--moe-a2a-backend none`, experts in Triton) and, over moecomm
with DeepGEMM's experts, `normal`, `auto` (low latency to decode) and `graphs` (`auto`, decoding captured).

Every run is fed the tokens of the first one, so that steps can be compared.  Two things must hold over moecomm (exit
status): each call of the layers' experts, its inputs as they came, is within `EXPERTS` of a sum over the checkpoint's
experts in float32 (but for `graphs`, whose calls are captured), and the median step's logits are within `LOGITS` of the
first run's.  A router that picks other experts where two are about as likely changes the logits of a step by more.

Needs GPUs, and of SGLang 0.5.23 what docs/sglang.md lists.  With fewer GPUs than ranks, ranks share them (NCCL 2.29).

Keys of a run: `run`, `experts` (class, dispatcher, backend), `calls` of deep_ep's Buffer, by name, `expert_calls` and
`expert_error` (the largest of a row, relative to it), `steps` (of all prompts), `same` (steps whose likeliest token is
the same), `logit_error` (relative, p50 and max), `bits` (of `dispatchers`: for each of `cases` whether they are
the same), `error`, if there was one.
"""

from __future__ import annotations

import argparse
import collections
import functools
import importlib.metadata
import json
import os
import random
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import engine_ranks
import torch

from moecomm_bench.results import write

LAYERS, HIDDEN, INTERMEDIATE, EXPERT_COUNT, TOPK, VOCABULARY = 2, 1024, 256, 16, 4, 1024
HEADS, KV_HEADS, HEAD_DIM = 8, 2, 128
PROMPTS = (5, 17, 64)  # their lengths
EXPERTS, LOGITS = 0.02, 0.05  # relative errors: of a row of experts' outputs, of a step's logits
DISPATCHERS = "SGLang's dispatchers, in both modes, with the bits of a plain sum"
METHODS = ("dispatch", "combine", "low_latency_dispatch", "low_latency_combine")
RUNS: dict[str, dict[str, Any]] = {
    "dispatchers": {"moe_a2a_backend": "deepep", "moe_runner_backend": "deep_gemm", "disable_cuda_graph": True},
    "none": {"moe_a2a_backend": "none", "moe_runner_backend": "triton", "disable_cuda_graph": True},
    "normal": {
        "moe_a2a_backend": "deepep",
        "moe_runner_backend": "deep_gemm",
        "deepep_mode": "normal",
        "disable_cuda_graph": True,
    },
    "auto": {"moe_a2a_backend": "deepep", "moe_runner_backend": "deep_gemm", "disable_cuda_graph": True},
    # Only decoding is captured, of captured_requests(): SGLang would capture 38 sizes of prompts.
    "graphs": {
        "moe_a2a_backend": "deepep",
        "moe_runner_backend": "deep_gemm",
        "cuda_graph_backend_prefill": "disabled",
    },
}


def write_model(folder: Path) -> None:
    """Write the checkpoint that SGLang loads."""
    from safetensors.torch import save_file

    config = {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "hidden_size": HIDDEN,
        "intermediate_size": 3 * HIDDEN,
        "moe_intermediate_size": INTERMEDIATE,
        "num_experts": EXPERT_COUNT,
        "num_experts_per_tok": TOPK,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "vocab_size": VOCABULARY,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "torch_dtype": "bfloat16",
    }
    (folder / "config.json").write_text(json.dumps(config))
    generator = torch.Generator().manual_seed(0)

    def drawn(rows: int, columns: int, gain: float = 1.0) -> torch.Tensor:
        return (torch.randn(rows, columns, generator=generator) * gain / columns**0.5).bfloat16()

    weights = {"model.norm.weight": torch.ones(HIDDEN), "lm_head.weight": drawn(VOCABULARY, HIDDEN)}
    weights["model.embed_tokens.weight"] = drawn(VOCABULARY, HIDDEN, HIDDEN**0.5)
    for layer in range(LAYERS):
        at, heads = f"model.layers.{layer}.", HEADS * HEAD_DIM
        weights |= {f"{at}{name}_layernorm.weight": torch.ones(HIDDEN) for name in ("input", "post_attention")}
        weights |= {f"{at}self_attn.{name}_norm.weight": torch.ones(HEAD_DIM) for name in "qk"}
        for name, rows in (("q", heads), ("k", KV_HEADS * HEAD_DIM), ("v", KV_HEADS * HEAD_DIM)):
            weights[f"{at}self_attn.{name}_proj.weight"] = drawn(rows, HIDDEN)
        weights[f"{at}self_attn.o_proj.weight"] = drawn(HIDDEN, heads)
        weights[f"{at}mlp.gate.weight"] = drawn(EXPERT_COUNT, HIDDEN)
        for expert in range(EXPERT_COUNT):
            for name in ("gate", "up"):
                weights[f"{at}mlp.experts.{expert}.{name}_proj.weight"] = drawn(INTERMEDIATE, HIDDEN)
            weights[f"{at}mlp.experts.{expert}.down_proj.weight"] = drawn(HIDDEN, INTERMEDIATE, 4.0)
    save_file(
        {name: weight.bfloat16() for name, weight in weights.items()},
        folder / "model.safetensors",
        metadata={"format": "pt"},
    )


def environment(job: dict[str, Any], rank: int) -> dict[str, str]:
    """Return the variables of a rank, each of which sees one GPU."""
    return {
        "CUDA_VISIBLE_DEVICES": str(rank % job["gpus"]),
        "SGLANG_ONE_VISIBLE_DEVICE_PER_PROCESS": "1",
        "SGLANG_SKIP_SGL_KERNEL_VERSION_CHECK": "1",  # the newest build for a torch may be an older one
        "SGLANG_ENABLE_TP_MEMORY_INBALANCE_CHECK": "0",
        "SGLANG_JIT_DEEPGEMM_PRECOMPILE": "0",  # it compiles for every number of tokens
        "NCCL_MULTI_RANK_GPU_ENABLE": str(int(job["shared"])),
        "MOECOMM_SGLANG": "always",
        "GLOO_SOCKET_IFNAME": "lo",
    }


def captured_requests(ranks: int) -> int:
    """Return the number of requests whose decoding is captured; SGLang captures none that ranks do not share evenly."""
    return -(-len(PROMPTS) // ranks) * ranks


def publish(job: dict[str, Any], rank: int) -> tuple[Any, Any]:
    """Publish the arguments of SGLang's server in this process; return them, and its ports."""
    from sglang.srt.entrypoints.engine import _set_envs_and_config
    from sglang.srt.runtime_context import SpawnRanks, publish, spawn_world_rank
    from sglang.srt.server_args import PortArgs, ServerArgs

    arguments = ServerArgs(
        model_path=job["folder"],
        skip_tokenizer_init=True,
        tp_size=job["ranks"],
        ep_size=job["ranks"],
        attention_backend="triton",
        sampling_backend="pytorch",
        grammar_backend="none",
        mem_fraction_static=0.3,
        max_total_tokens=4096,
        max_running_requests=4,
        chunked_prefill_size=-1,
        disable_custom_all_reduce=True,
        disable_radix_cache=True,
        random_seed=1,
        cuda_graph_bs_decode=[captured_requests(job["ranks"])],
        **RUNS[job["run"]],
    )
    arguments.resolve_once()
    _set_envs_and_config(arguments)
    ports = PortArgs.init_new(arguments)
    ports.nccl_port = job["port"]
    ranks = SpawnRanks(world_rank=spawn_world_rank(arguments, tp_rank=rank, pp_rank=0), gpu_id=0)
    publish(arguments, role="scheduler", ranks=ranks)
    return arguments, ports


def count_calls() -> collections.Counter[str]:
    """Return a count of the calls of deep_ep's Buffer, which is moecomm's."""
    import deep_ep

    from moecomm.compat import deep_ep as ours

    if deep_ep.Buffer is not ours.Buffer:
        raise RuntimeError("deep_ep is not moecomm's")
    calls: collections.Counter[str] = collections.Counter()

    def counted(name: str, method: Any) -> Any:
        @functools.wraps(method)  # its signature: SGLang looks at it
        def call(*args: Any, **kwargs: Any) -> Any:
            calls[name] += 1
            return method(*args, **kwargs)

        return call

    for name in METHODS:
        setattr(ours.Buffer, name, counted(name, getattr(ours.Buffer, name)))
    return calls


def compare_dispatchers(job: dict[str, Any], rank: int) -> dict[str, bool]:
    """Return whether each mode's combine has the bits of a plain sum over experts.  Collective."""
    from sglang.benchmark import one_batch
    from sglang.srt.configs.model_config import ModelConfig
    from sglang.srt.distributed import bootstrap
    from sglang.srt.layers.dp_attention import set_is_extend_in_batch
    from sglang.srt.layers.moe.token_dispatcher import deepep
    from sglang.srt.layers.moe.topk import StandardTopKOutput
    from sglang.srt.layers.moe.utils import DeepEPMode
    from sglang.srt.runtime_context import get_parallel

    arguments, ports = publish(job, rank)
    one_batch._init_process_global_configs()
    bootstrap.init_parallel_runtime(server_args=arguments, device="cuda", dist_port=ports.nccl_port)
    bootstrap.init_layer_runtime(model_config=ModelConfig.from_server_args(arguments))
    local = EXPERT_COUNT // job["ranks"]
    dispatcher = deepep.DeepEPDispatcher(
        group=get_parallel().tp_group.device_group,
        router_topk=TOPK,
        permute_fusion=True,
        num_experts=EXPERT_COUNT,
        num_local_experts=local,
        hidden_size=HIDDEN,
        params_dtype=torch.bfloat16,
        deepep_mode=DeepEPMode.AUTO,
        async_finish=True,
        return_recv_hook=True,
    )
    dispatcher.set_quant_config({"dispatcher_output_dtype": "bf16"})
    factor = 1.0 + torch.arange(EXPERT_COUNT, device="cuda") % 2  # of an expert; all sums are exact in bfloat16
    mine = factor[rank * local : (rank + 1) * local]
    same = {}
    for turn, tokens in enumerate((33, 1, 0, 128)):
        for mode in ("normal", "low_latency"):
            generator = torch.Generator().manual_seed(100 * turn + rank)
            x = torch.randint(-4, 5, (tokens, HIDDEN), generator=generator).bfloat16().cuda()
            ids = torch.rand(tokens, EXPERT_COUNT, generator=generator).argsort(1)[:, :TOPK].int().cuda()
            weights = torch.full((tokens, TOPK), 0.25, device="cuda")
            wanted = (x.float() * (weights * factor[ids.long()]).sum(1, keepdim=True)).bfloat16()
            logits = torch.zeros(tokens, EXPERT_COUNT, device="cuda")
            set_is_extend_in_batch(mode == "normal")
            out = dispatcher.dispatch(hidden_states=x, topk_output=StandardTopKOutput(weights, ids, logits))
            combine: Any
            if mode == "normal":
                here = out.topk_ids >= 0
                scale = torch.where(here, out.topk_weights * mine[out.topk_ids.clamp(min=0)], 0.0).sum(1, keepdim=True)
                combine, y = deepep.DeepEPNormalCombineInput, (out.hidden_states.float() * scale).bfloat16()
            else:
                combine, y = deepep.DeepEPLLCombineInput, (out.hidden_states * mine.view(-1, 1, 1)).bfloat16()
            got = dispatcher.combine(
                combine_input=combine(hidden_states=y, topk_ids=out.topk_ids, topk_weights=out.topk_weights)
            )
            torch.cuda.synchronize()
            same[f"{mode} {tokens}"] = torch.equal(got, wanted)
    return same


class Experts:
    """Compare each call of a model's experts with a sum over the checkpoint's experts in float32."""

    def __init__(self, model: torch.nn.Module, folder: str) -> None:
        from safetensors.torch import load_file
        from sglang.srt.layers.moe.fused_moe_triton.layer import FusedMoE

        self.calls, self.error = 0, 0.0
        weights = load_file(Path(folder, "model.safetensors"))
        self._weights = {name: one.cuda() for name, one in weights.items() if ".experts." in name}
        self._inputs: Any = None
        self.layers = [one for one in model.modules() if isinstance(one, FusedMoE)]
        for layer, one in enumerate(self.layers):
            one.register_forward_pre_hook(self._before, with_kwargs=True)
            one.register_forward_hook(functools.partial(self._after, layer))

    def _before(self, module: torch.nn.Module, args: Any, named: dict[str, Any]) -> None:
        """Keep the inputs: SGLang may free them."""
        x, topk = (*args, *(named[name] for name in ("hidden_states", "topk_output") if name in named))
        self._inputs = x.clone(), topk.topk_ids.clone(), topk.topk_weights.clone()

    def _after(self, layer: int, module: torch.nn.Module, args: Any, out: torch.Tensor) -> None:
        x, ids, weights = self._inputs
        wanted = torch.zeros(x.shape, device=x.device)
        for expert in range(EXPERT_COUNT):
            gate, up, down = (
                self._weights[f"model.layers.{layer}.mlp.experts.{expert}.{name}_proj.weight"].float()
                for name in ("gate", "up", "down")
            )
            y = (torch.nn.functional.silu(x.float() @ gate.T) * (x.float() @ up.T)) @ down.T
            wanted += y * torch.where(ids == expert, weights.float(), 0.0).sum(1, keepdim=True)
        self.calls += 1
        if len(x):
            error = (out.float() - wanted).norm(dim=1) / wanted.norm(dim=1).clamp(min=1e-3)
            self.error = max(self.error, float(error.nan_to_num(nan=torch.inf).max()))


def run_model(job: dict[str, Any], rank: int) -> dict[str, Any]:
    """Return the logits of each step of each prompt, and what ran.  Collective."""
    from sglang.benchmark import one_batch

    arguments, ports = publish(job, rank)
    one_batch._init_process_global_configs()
    one_batch.get_tokenizer = lambda *args, **named: None  # prompts are token ids
    runner, _ = one_batch.load_model(arguments, ports, 0, rank)
    over_moecomm = RUNS[job["run"]]["moe_a2a_backend"] == "deepep"
    checked = over_moecomm and job["run"] != "graphs"  # without experts over ranks, an output is a part of the sum
    experts = Experts(runner.torch_runner.model, job["folder"]) if checked else None
    draw = random.Random(0)
    prompts = [[draw.randrange(2, VOCABULARY) for _ in range(length)] for length in PROMPTS]
    reqs = one_batch.prepare_synthetic_inputs_for_latency_test(len(prompts), 0, custom_inputs=prompts)
    for req in reqs:
        req.rid = str(req.rid)  # a number, of which 0.5.23 asks how it begins
    tokens, logits, batch = runner.extend(reqs)
    steps = [logits.float().cpu()]
    for step in range(1, job["steps"]):
        fed = torch.tensor(job["fed"][step - 1], device="cuda") if job["fed"] else tokens
        tokens, logits = runner.decode(fed, batch)
        steps.append(logits.float().cpu())
    torch.cuda.synchronize()
    found: dict[str, Any] = {"logits": torch.stack(steps)}
    if experts:
        found |= {"expert_calls": experts.calls, "expert_error": experts.error, "experts": described(experts.layers[0])}
    return found


def described(experts: Any) -> dict[str, str]:
    """Return the names of the experts' class, its dispatcher's, and the backend that computes them."""
    kind = type(experts)
    dispatcher = type(experts.dispatcher)
    names = {
        name: f"{one.__module__.removeprefix('sglang.srt.layers.moe.')}.{one.__name__}"
        for name, one in (("class", kind), ("dispatcher", dispatcher))
    }
    return names | {"backend": str(getattr(experts.runner_backend, "value", experts.runner_backend))}


def serve(rank: int, job: dict[str, Any]) -> dict[str, Any]:
    """Return what a rank finds, and how often it called deep_ep's Buffer."""
    os.environ |= environment(job, rank)
    from moecomm.integrations.sglang import register

    register()
    calls = count_calls()
    found = {"bits": compare_dispatchers(job, rank)} if job["run"] == "dispatchers" else run_model(job, rank)
    return found | {"calls": dict(calls)}


def compared(wanted: torch.Tensor, got: torch.Tensor) -> dict[str, Any]:
    """Compare logits `(steps, prompts, vocabulary)`."""
    error = ((got - wanted).norm(dim=-1) / wanted.norm(dim=-1)).flatten().nan_to_num(nan=torch.inf)
    same = int((got.argmax(-1) == wanted.argmax(-1)).sum())
    named = {"p50": round(float(error.median()), 5), "max": round(float(error.max()), 5)}
    return {"steps": error.numel(), "same": same, "logit_error": named}


def judged(row: dict[str, Any]) -> bool:
    """Return whether a run is as it must be."""
    calls = row["calls"]
    if row["run"] == "none":
        return not calls
    modes = {"normal": METHODS[:2], "auto": METHODS, "graphs": METHODS, "dispatchers": METHODS}[row["run"]]
    good = set(modes) == set(calls) and all(row.get("bits", {}).values())
    if "logit_error" in row:
        good &= row["logit_error"]["p50"] <= LOGITS
    if "expert_error" in row:
        good &= row["expert_calls"] > 0 and row["expert_error"] <= EXPERTS
    return bool(good)


def main() -> int:
    """Run, compare, print and write; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", default=",".join(RUNS), help="the first one of a model is the reference")
    parser.add_argument("--ranks", type=int, default=max(2, torch.cuda.device_count()))
    parser.add_argument("--steps", type=int, default=16, help="that are compared, of each prompt")
    parser.add_argument("--limit", type=float, default=180, help="seconds for a run")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    gpus = torch.cuda.device_count()
    if not gpus:
        parser.error("needs a GPU")
    about: dict[str, Any] = {"ranks": options.ranks, "shared_gpus": gpus < options.ranks}
    about |= {name: importlib.metadata.version(name) for name in ("sglang", "sglang-kernel", "sgl-deep-gemm", "torch")}
    rows, failed = [], False
    with tempfile.TemporaryDirectory() as folder:
        write_model(Path(folder))
        job = {"folder": folder, "ranks": options.ranks, "gpus": gpus, "shared": about["shared_gpus"]}
        job |= {"steps": options.steps, "fed": None}
        reference = None
        for name in options.runs.split(","):
            row: dict[str, Any] = {"run": name}
            start = time.monotonic()
            try:
                found = engine_ranks.run(serve, job | {"run": name}, name, options.limit)
                row |= {key: value for key, value in found[0].items() if key != "logits"}
                for key in ("expert_error", "bits"):
                    if key in row:
                        row[key] = _worst([one[key] for one in found])
                if name == "dispatchers":
                    row |= {"kind": f"{DISPATCHERS} on {options.ranks} GPU ranks", "cases": len(row["bits"])}
                elif reference is None:
                    reference = found[0]["logits"]
                    job["fed"] = reference.argmax(-1).tolist()
                else:
                    row |= compared(reference, found[0]["logits"])
                failed |= not judged(row)
            except (TimeoutError, RuntimeError) as error:
                row["error"] = str(error)
                failed = True
            row["run_s"] = round(time.monotonic() - start, 1)
            rows.append(row)
            print(json.dumps(row), flush=True)
            if options.json:
                write(options.json, about | {"rows": rows})
    return int(failed)


def _worst(of_ranks: list[Any]) -> Any:
    """Return the worst of ranks: the largest error, or whether all have the same bits."""
    if isinstance(of_ranks[0], dict):
        return {name: all(one[name] for one in of_ranks) for name in of_ranks[0]}
    return float(f"{max(of_ranks):.3g}")


if __name__ == "__main__":
    sys.exit(main())
