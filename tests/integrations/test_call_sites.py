"""Every call that a framework makes of deep_ep, and SGLang of nixl_ep, fits moecomm's, by name: as its newest version
writes it, and as the source of an installed one does.  test_bad_use.py has what is then refused, by name.
"""

from __future__ import annotations

import ast
import importlib.util
import inspect
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from moecomm.compat import deep_ep, nixl_ep

EVENT = "previous_event async_finish allocate_on_comm_stream"
LAYOUT = "num_tokens_per_rank num_tokens_per_rdma_rank is_token_in_rank num_tokens_per_expert"
ELASTIC = "num_max_tokens_per_rank hidden num_topk use_fp8_dispatch"
# vLLM 0.33, SGLang 0.5.23, torchtitan 0.3.0, Megatron-core 0.19.2: file, then call, positional arguments, keywords.
CALLS: dict[str, list[tuple[str, int, str]]] = {
    "vllm/model_executor/layers/fused_moe/prepare_finalize/deepep_ht.py": [
        ("Buffer.get_dispatch_layout", 0, f"topk_idx num_experts {EVENT}"),
        ("Buffer.dispatch", 0, f"x handle {LAYOUT} topk_idx topk_weights expert_alignment config {EVENT}"),
        ("Buffer.combine", 0, f"x handle topk_weights config {EVENT}"),
        ("Buffer.get_dispatch_config", 1, ""),
        ("Buffer.get_combine_config", 1, ""),
    ],
    "vllm/model_executor/layers/fused_moe/prepare_finalize/deepep_ll.py": [
        ("Buffer.low_latency_dispatch", 4, "use_fp8 round_scale use_ue8m0 async_finish return_recv_hook"),
        ("Buffer.low_latency_dispatch", 4, "use_nvfp4 x_global_scale"),
        ("Buffer.low_latency_combine", 4, "async_finish zero_copy return_recv_hook out"),
    ],
    "vllm/model_executor/layers/fused_moe/prepare_finalize/deepep_v2.py": [
        (
            "ElasticBuffer.dispatch",
            0,
            "x topk_idx topk_weights num_experts num_max_tokens_per_rank do_expand do_cpu_sync"
            " async_with_compute_stream",
        ),
        ("ElasticBuffer.combine", 0, "x handle topk_weights async_with_compute_stream allocate_on_comm_stream"),
    ],
    "vllm/distributed/device_communicators/all2all.py": [
        (
            "ElasticBuffer",
            0,
            f"group {ELASTIC} allow_hybrid_mode prefer_overlap_with_compute allow_multiple_reduction"
            " explicitly_destroy",
        ),
        ("ElasticBuffer.get_theoretical_num_sms", 0, "num_experts num_topk"),
        ("Buffer.get_low_latency_rdma_size_hint", 0, "num_max_dispatch_tokens_per_rank hidden num_ranks num_experts"),
    ],
    "sglang/srt/layers/moe/token_dispatcher/deepep.py": [
        ("Buffer.get_dispatch_layout", 2, EVENT),
        ("Buffer.dispatch", 1, f"topk_idx topk_weights {LAYOUT} expert_alignment config {EVENT}"),
        ("Buffer.combine", 2, f"topk_weights config {EVENT}"),
        ("Buffer.low_latency_dispatch", 4, "use_fp8 async_finish return_recv_hook round_scale use_ue8m0"),
        ("Buffer.low_latency_dispatch", 4, "use_nvfp4 x_global_scale topk_weights"),
        ("Buffer.low_latency_combine", 0, "x topk_idx topk_weights handle async_finish return_recv_hook"),
        # Its overlap within a batch, on Blackwell and on Hopper.
        ("Buffer.low_latency_combine", 0, "x topk_idx topk_weights handle overlap src_signals src_signal_expect_value"),
        (
            "Buffer.low_latency_combine",
            0,
            "x topk_idx topk_weights handle overlap packed_recv_count comp_signal block_m threshold num_sms",
        ),
    ],
    "sglang/srt/layers/moe/token_dispatcher/deepep_v2.py": [
        ("ElasticBuffer", 1, f"{ELASTIC} allow_hybrid_mode sl_idx prefer_overlap_with_compute"),
        (
            "ElasticBuffer.dispatch",
            1,
            "topk_idx topk_weights num_experts num_max_tokens_per_rank expert_alignment num_sms"
            " use_tma_aligned_col_major_sf do_cpu_sync do_expand",
        ),
        ("ElasticBuffer.combine", 1, "handle topk_weights"),
    ],
    "sglang/srt/layers/moe/token_dispatcher/nixl.py": [
        ("NixlBuffer", 0, "rank tcp_store_group"),
        ("NixlBuffer.update_memory_buffers", 0, "num_ranks num_experts_per_rank num_rdma_bytes"),
        ("NixlBuffer.get_rdma_size_hint", 4, ""),
        ("NixlBuffer.set_tcp_store_group", 1, ""),
        ("NixlBuffer.connect_ranks", 1, ""),
        ("NixlBuffer.dispatch", 4, "use_fp8 async_finish return_recv_hook round_scale use_ue8m0"),
        ("NixlBuffer.combine", 0, "x topk_idx topk_weights handle async_finish return_recv_hook"),
        ("NixlBuffer.query_mask_buffer", 1, ""),
    ],
    "torchtitan/distributed/deepep/deepep.py": [
        ("ElasticBuffer", 1, f"num_bytes {ELASTIC} deterministic explicitly_destroy"),
        ("ElasticBuffer.get_buffer_size_hint", 3, "num_topk use_fp8_dispatch"),
        (
            "ElasticBuffer.dispatch",
            1,
            "topk_idx topk_weights num_experts num_max_tokens_per_rank num_sms do_expand do_cpu_sync",
        ),
        ("ElasticBuffer.dispatch", 1, "handle num_sms do_cpu_sync"),
        ("ElasticBuffer.combine", 1, "handle topk_weights async_with_compute_stream"),
    ],
    "torchtitan/distributed/deepep/hybridep.py": [
        (
            "HybridEPBuffer",
            0,
            "group hidden_dim max_num_of_tokens_per_rank num_local_experts use_fp8 num_sms_dispatch_api"
            " num_sms_combine_api load_cached_kernels use_shared_buffer enable_custom_allgather",
        ),
        (
            "HybridEPBuffer.dispatch_with_permute",
            0,
            "hidden routing_map probs scaling_factor num_of_experts_per_rank pad_multiple num_permuted_tokens"
            " non_blocking",
        ),
        ("HybridEPBuffer.combine_with_unpermute", 0, "hidden probs handle"),
    ],
    "megatron/core/transformer/moe/fused_a2a.py": [
        ("Buffer.get_dispatch_layout", 2, EVENT),
        ("Buffer.dispatch", 1, f"topk_idx topk_weights {LAYOUT} {EVENT}"),
        ("Buffer.combine", 2, f"topk_weights {EVENT}"),
        ("HybridEPBuffer.dispatch_with_permute", 0, "hidden scaling_factor handle pad_multiple num_permuted_tokens"),
        ("HybridEPBuffer.combine_with_unpermute", 0, "hidden probs handle pad_multiple"),
    ],
}
WRITTEN = [(file, *call) for file, calls in CALLS.items() for call in calls]
KINDS = {"Buffer": deep_ep.Buffer, "ElasticBuffer": deep_ep.ElasticBuffer, "HybridEPBuffer": deep_ep.HybridEPBuffer}
KINDS |= {"NixlBuffer": nixl_ep.Buffer}


def parameters(call: str) -> list[str]:
    """The names that a call takes, without self."""
    kind, _, method = call.partition(".")
    found: Any = getattr(KINDS[kind], method) if method else KINDS[kind]
    names = list(inspect.signature(found).parameters)
    return names[1:] if names[:1] == ["self"] else names


@pytest.mark.parametrize(("file", "call", "positional", "keywords"), WRITTEN)
def test_a_call_fits_ours(file: str, call: str, positional: int, keywords: str) -> None:
    names = parameters(call)
    assert positional <= len(names), call
    assert set(keywords.split()) <= set(names[positional:]), (file, call)


class Call(NamedTuple):
    """A call in a source: what it is of, where it is written, positional arguments, and keywords."""

    name: str
    line: int
    positional: int
    keywords: set[str]


def called(tree: ast.Module, names: set[str]) -> Iterator[Call]:
    """Calls of these names, with the keywords of dictionaries that are made within their functions for `**`."""
    for function in ast.walk(tree):
        if not isinstance(function, ast.FunctionDef):
            continue
        calls = [node for node in ast.walk(function) if isinstance(node, ast.Call)]
        for node in calls:
            name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            if name not in names or (isinstance(node.func, ast.Attribute) and "torch.ops" in ast.unparse(node.func)):
                continue
            keywords = {keyword.arg for keyword in node.keywords if keyword.arg is not None}
            if any(keyword.arg is None for keyword in node.keywords):
                made = [made for made in calls if getattr(made.func, "id", "") == "dict"]
                keywords |= {keyword.arg for call in made for keyword in call.keywords if keyword.arg is not None}
            yield Call(name, node.lineno, len(node.args), keywords)


def source(file: str) -> ast.Module:
    """The source of an installed framework: read, not imported."""
    package, _, rest = file.partition("/")
    try:
        found = importlib.util.find_spec(package)
    except ValueError:  # a stub stands in its place
        found = None
    for folder in (found.submodule_search_locations or []) if found else []:
        if (path := Path(folder, rest)).is_file():
            return ast.parse(path.read_text())
    pytest.skip(f"needs {package}, installed, with {rest}; its source is read")


@pytest.mark.parametrize("file", CALLS)
def test_the_calls_of_an_installed_framework_fit_ours(file: str) -> None:
    kinds = {call.partition(".")[0] for call, _, _ in CALLS[file]}
    ways = {call.rpartition(".")[2]: [] for call, _, _ in CALLS[file]}
    for kind in kinds:
        for name in ways:
            if name == kind or hasattr(KINDS[kind], name):
                ways[name].append(parameters(kind if name == kind else f"{kind}.{name}"))
    found = [call for call in called(source(file), set(ways)) if call.keywords or call.positional]
    assert found
    for call in found:
        fits = [set(way[call.positional :]) for way in ways[call.name] if call.positional <= len(way)]
        missing = min((call.keywords - names for names in fits), key=len)
        assert not missing, f"{file}:{call.line}: {call.name}({', '.join(sorted(missing))}=)"
