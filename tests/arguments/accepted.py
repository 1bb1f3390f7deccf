"""Values that arguments take beside those they are made for, and their meaning.  All else is an error of moecomm's."""

from __future__ import annotations

from typing import NamedTuple

from .values import GENERAL, LIKE


class Row(NamedTuple):
    """`arguments`: by name, or with the call they are of where others of that name take less."""

    meaning: str
    values: tuple[str, ...]
    arguments: tuple[str, ...]


def _of(call: str, *names: str) -> tuple[str, ...]:
    return tuple(f"{call}({name})" for name in names)


def _of_payloads(name: str) -> tuple[str, ...]:
    return tuple(f"moecomm.Buffer.{call}({name})" for call in ("dispatch", "dispatch_begin"))


_PERMUTED = "dispatch_with_permute", "combine_with_unpermute"
_LAYOUT = "deep_ep.Buffer.get_dispatch_layout(topk_idx)"
_LOW = "deep_ep.Buffer.low_latency_combine"
_TENSORS = (
    *("x", "y", "out", "bias", "topk_idx", "topk_weights", "scales", "weight_grads", "w13", "w2", "w", "weight"),
    *(
        "w13_bias",
        "w2_bias",
        "tokens_per_expert",
        "handle",
        "hidden",
        "probs",
        "routing_map",
        "scaling_factor",
        "is_token_in_rank",
    ),
    *("num_tokens_per_expert", "mask_status", "cumulative_local_expert_recv_stats"),
    *("dispatch_wait_recv_cost_stats", "combine_wait_recv_cost_stats"),
)
_SMALL = (  # read by small operations of torch, or copied first
    *("topk_idx", "topk_weights", "scales", "weight_grads", "bias", "weight", "tokens_per_expert", "w", "probs"),
    *("routing_map", "scaling_factor", "is_token_in_rank", "mask_status", "num_tokens_per_expert"),
    *("dispatch_wait_recv_cost_stats", "combine_wait_recv_cost_stats"),
    *("cumulative_local_expert_recv_stats", "deep_ep.Buffer.dispatch(x)", "deep_ep.ElasticBuffer.dispatch(x)"),
    "deep_ep.EPBuffer.dispatch(x)",
)
_OF_TORCH = (  # operations of torch
    *("ops.dispatch(x)", "ops.dispatch_again(x)", "ops.combine(y)", "ops.moe(x)", "nn.ExpertParallel.forward(x)"),
    *("nn.Experts.forward(x)", "nn.Gate.forward(x)", "router.Gating.__call__(x)", "router.Router.__call__(x)"),
)
_SCALES = ("ops.combine(handle)", "fused.grouped_gemm(x)")  # row_weights, and scales by column
_WIDENED = ("moecomm.Buffer.combine(y)",)  # an Fp8
_ROWS = (
    *_OF_TORCH[5:],
    "nn.ExpertParallel.forward(x)",
    "fused.quantize_weights(w)",
    "fused.quantize_channels(w)",
    "fused.quantize_rows(x)",
    "w13",
)
_HINTS = (
    *_of("deep_ep.ElasticBuffer", "num_max_tokens_per_rank", "hidden", "num_topk"),
    *_of("deep_ep.ElasticBuffer.get_buffer_size_hint", "num_max_tokens_per_rank", "hidden", "num_topk"),
    *_of("deep_ep.EPBuffer", "num_max_tokens_per_rank", "hidden", "num_topk"),
    *_of("deep_ep.EPBuffer.get_buffer_size_hint", "num_max_tokens_per_rank", "hidden", "num_topk"),
)
_REDUNDANT = (
    *_of("deep_ep.EPBuffer.lb_prefetch_weights", "redundant_expert_weights", "redundancy_mapping"),
    *_of("deep_ep.EPBuffer.lb_reduce_grads", "redundant_expert_grads", "redundancy_mapping"),
)
_OWN = (
    *_of("deep_ep.EPBuffer.lb_prefetch_weights", "expert_weights"),
    *_of("deep_ep.EPBuffer.lb_reduce_grads", "expert_grads"),
)

_LOADERS = ("checkpoints.gpt_oss", "checkpoints.deepseek_v4", "checkpoints.modelopt")
_PRODUCTS = tuple(
    f"overlap.{name}"
    for name in ("all_gather_matmul", "matmul_reduce_scatter", "matmul_all_reduce", "matmul_all_to_all")
)
_MATRICES = tuple(f"{name}({argument})" for name in _PRODUCTS for argument in ("x", "w"))
_LOOKUP = _of("overlap.embedding_all_to_all", "tables", "indices", "offsets")

TABLE = (
    Row(
        "a default, or nothing",
        ("None",),
        (
            *("bias", "buffer", "config", "cumulative_local_expert_recv_stats", "device", "domain_ranks", "dtype"),
            *("dispatch_wait_recv_cost_stats", "combine_wait_recv_cost_stats"),
            *("event", "expected_rows", "fused", "gate", "generator", "group", "max_rows", "num_bytes", "num_sms"),
            *("num_sms_combine_api", "num_sms_dispatch_api", "out", "out_dtype", "pad_multiple", "payload", "probs"),
            *("previous_event", "previous_event_before_epilogue", "quantize", "scales", "scaling_factor", "schedule"),
            *(
                "sync",
                "topk_weights",
                "use_host_meta",
                "do_cpu_sync",
                "verify_every",
                "weight_grads",
                "window_bytes",
                "wire",
                "grad_wire",
            ),
            "deep_ep.HybridEPBuffer.dispatch(num_dispatched_tokens)",
            *("num_of_experts_per_rank", "num_permuted_tokens", "deep_ep.ElasticBuffer.dispatch(expert_alignment)"),
            "deep_ep.EPBuffer.dispatch(expert_alignment)",
            *("activation_alpha", "activation_limit", "w13_bias", "w2_bias"),
            *("activation", "balance", "capacity_factor", "dropped", "offsets", "overflow", "nn.Experts(num_experts)"),
            *_of("routing.RoutingRecorder", "watch", "experts"),
            *_of("routing.RoutingRecorder.add", "rank", "ranks"),
            *_of("routing.join", "layer"),
            *_of("moecomm.trace", "model"),
        ),
    ),
    Row("names of files", ("'x'", "'2'"), ("path",)),
    Row("names of folders, and of layers", ("'x'", "'2'"), ("moecomm.trace(folder)", "moecomm.layer(name)")),
    Row(
        "flags, for which 0 and 1 will do",
        ("0", "True", "False"),
        (
            *(
                "allow_multiple_reduction",
                "async_finish",
                "enable_shrink",
                "async_with_compute_stream",
                "defer_epilogue",
                "check_weights",
                "corrected",
                "nn.Experts(bias)",
                "nn.ExpertParallel(bias)",
            ),
            "error_if_nonfinite",
            *(
                "do_cpu_sync",
                "do_expand",
                "do_handle_copy",
                "do_zero_padding",
                "duplicates",
                "dynamic",
                "fused",
                "interleaved",
                "mask",
            ),
            *(
                "non_blocking",
                "normalize",
                "prefer_overlap_with_compute",
                "release_handle",
                "replace",
                "return_gathered",
                "return_recv_hook",
            ),
            *(
                "round_scale",
                "swapped",
                "sync",
                "use_fp8",
                "use_host_meta",
                "use_tma_aligned_col_major_sf",
                "use_ue8m0",
            ),
            *(
                "gather",
                "reset",
                "keep_ids",
                "weighted",
                "zero_copy",
                "zero_padding",
                "dequantize",
                "routing.RoutingRecorder(weights)",
            ),
        ),
    ),
    Row(
        "not asked for; anything else is Unsupported",
        ("None", "0", "False"),
        (
            *("comm", "size", "offset", "use_nvfp4", "use_ue8m0_for_sf", "x_global_scale", "use_logfmt"),
            *("overlap", "src_signals", "src_signal_expect_value", "num_cpu_bytes", "borrow_recv"),
            *("packed_recv_count", "comp_signal", "block_m", "threshold"),
            *("deep_ep.Buffer.low_latency_dispatch(num_sms)", f"{_LOW}(num_sms)"),
        ),
    ),
    Row(
        "none, or as many as the round takes",
        ("0",),
        (
            *(
                "rank",
                "rank_to_mask",
                "num_worst_tokens",
                "num_nvl_bytes",
                "num_rdma_bytes",
                "num_bytes",
                "hidden_bytes",
            ),
            *("num_allocated_qps", "max_num_of_tokens_per_rank", "pad_multiple", "expected_rows", *_HINTS),
            "num_permuted_tokens",
            *("router.random_routing(tokens)", "nn.ExpertParallel(max_rows)", "deep_ep.Config(num_sms)"),
            *_of("deep_ep.ElasticBuffer.dispatch", "num_sms"),
            *_of("deep_ep.ElasticBuffer.combine", "num_sms"),
            *_of("deep_ep.EPBuffer.dispatch", "num_sms"),
            *_of("deep_ep.EPBuffer.combine", "num_sms"),
            "lb_allocation_plan_or_num_bytes",
            *(f"deep_ep.EPBuffer.{call}(num_sms)" for call in ("lb_prefetch_weights", "lb_reduce_grads")),
        ),
    ),
    Row(
        "more than there can be is what there can be; memory is taken when it is touched",
        ("2**31",),
        (
            *("max_rows", "window_bytes", "expected_rows", "hidden_bytes", "num_bytes", "num_nvl_bytes"),
            *("num_rdma_bytes", "num_allocated_qps", "deep_ep.Config(num_sms)"),
            *("num_max_nvl_chunked_recv_tokens", "num_max_rdma_chunked_recv_tokens"),
            *("deep_ep.Buffer.dispatch(expert_alignment)", "deep_ep.Config.get_nvl_buffer_size_hint(num_ranks)"),
        ),
    ),
    Row(
        "a name of any kind",
        ("'x'", "''", "'2'"),
        ("routing.RoutingRecorder(model)", "routing.RoutingRecorder.add(layer)"),
    ),
    Row("the first layer", ("0",), ("balance.Plan.placement(layer)", "checkpoints.activation(layer)")),
    Row("weights that are not packed", ("0",), ("fused.Schedule(packed_stages)",)),
    Row("a layer without a number", ("0",), ("ops.dispatch(layer)", "ops.moe(layer)")),
    Row("a path", ("'x'", "'2'"), ("path",)),
    Row("nothing that is watched", ("[]", "()"), ("routing.RoutingRecorder(watch)",)),
    Row("numbers of ranks, or none", ("[]", "()", "[1]", "(1, 2)"), ("routing.loads(ranks)",)),
    Row("no ranks", ("None", "[]", "()"), ("moecomm.Buffer.mask(ranks)",)),
    Row("no others", ("None", "{}"), ("transfer.WeightTransfer.commit(also)",)),
    Row("no cast, or one to a dtype", ("None", "{}", "torch.float64"), ("transfer.WeightTransfer(cast)",)),
    Row("no ranks", ("[]", "()"), ("moecomm.Buffer.unmask(ranks)",)),
    Row(
        "none",
        ("None",),
        (
            *("moecomm.Buffer(placement)", "nn.ExpertParallel(placement)"),
            *("moecomm.Placement(num_experts)", "moecomm.Placement(slots)"),
        ),
    ),
    Row(
        "read as they lie",
        ("by column", "with gaps", "rows that are one", "negated", "a parameter", "an array"),
        ("moecomm.Placement.by_expert(numbers)",),
    ),
    Row(
        "no other",
        (),
        (
            *(
                "moecomm.ExpertWeights(shapes)",
                "moecomm.ExpertWeights.prefetch(target)",
                *_of("transfer.WeightTransfer", "shapes", "source", "target"),
                *_of("transfer.WeightTransfer.stage", "tensors"),
                *_of("transfer.WeightTransfer.commit", "into"),
                *_of("transfer.ranks_over", "store", "rank", "ranks"),
                "balance.Plan.placement(layer)",
                "ops.slot_weights(weights)",
            ),
            *("moecomm.Buffer.grow(placement)", "moecomm.Buffer.set_placement(placement)"),
            *("moecomm.Placement(choice)", "moecomm.Placement(experts)"),
        ),
    ),
    Row("the replicas given before, or none", ("None", "{}"), ("moecomm.Buffer.mask(replicas)",)),
    Row("an exponent", ("0", "0.5", "2.0", "True", "False", "np.float64"), ("zipf",)),
    Row("as many tokens as there are", ("2**31",), ("routing.RoutingRecorder(max_tokens)",)),
    Row("a rate, or none", ("None", "0.5", "2.0", "True", "np.float64"), ("max_gbs",)),
    Row("seconds", ("0.5", "2.0", "True", "np.float64"), ("timeout_s", "num_gpu_timeout_secs", "limit_s")),
    Row(
        "as many rows as that, at most the worst case",
        ("2**31", "2**63", "2**70", "inf", "0.5", "2.0", "np.float64"),
        ("capacity_factor",),
    ),
    Row(
        "a positive number",
        ("2**31", "2**63", "2**70", "0.5", "2.0", "True", "np.float64"),
        ("activation_alpha", "activation_limit"),
    ),
    Row("seconds, without an end", ("0", "False", "2**31", "2**63", "2**70", "inf"), ("limit_s",)),
    Row(
        "any finite factor",
        ("-1", "0", "2**31", "2**63", "2**70", "-2**70", "0.5", "2.0", "True", "False", "np.int64(-3)", "np.float64"),
        ("scale",),
    ),
    Row("a norm", ("2**31", "2**63", "2**70", "inf", "0.5", "2.0", "True", "np.float64"), ("max_norm", "norm_type")),
    Row("a norm of nothing", ("0", "False"), ("max_norm",)),
    Row("memory is taken when it is touched", ("2**31",), ("nbytes", "lb_allocation_plan_or_num_bytes")),
    Row(
        "a number that is not looked at",
        ("2**31",),
        tuple(f"deep_ep.EPBuffer.{call}(num_sms)" for call in ("lb_prefetch_weights", "lb_reduce_grads")),
    ),
    Row("the first one, or none", ("0", "None"), ("context_idx", "checkpoints.modelopt(layer)")),
    Row("a layer, where none has a limit of its own", ("2**31",), ("checkpoints.modelopt(layer)",)),
    Row("any dtype", ("torch.int64", "torch.float64"), ("deep_ep.BufferAllocator.allocate(dtype)",)),
    Row(
        "where they are: a dimension of 1 has any stride", ("rows that are one", "a parameter", "by column"), _REDUNDANT
    ),
    Row("read by torch", ("with gaps",), _REDUNDANT[1::2]),
    Row("the same memory", ("one dimension more",), _REDUNDANT[:1]),
    Row(
        "any number of experts, of any type of that size",
        ("one row fewer", "one row more", "a parameter", "requires_grad", "int8", "bool"),
        _OWN,
    ),
    Row("in memory that is that of the plan", ("a parameter",), ("deep_ep.BufferAllocator.materialize(storage)",)),
    Row(
        "a number to count with",
        ("0", "2**31"),
        (*_of("moecomm.Window.signal", "amount"), "amount", "value", "verify_every"),
    ),
    Row("the first one, or none", ("0", "None"), ("index", "peer", "signal", "moecomm.Window.tensor(rank)")),
    Row("sizes, of which there may be none", ("[]", "()", "[1]", "(1, 2)"), ("shape",)),
    Row("any dtype", ("torch.int64", "torch.float64"), ("moecomm.Window.tensor(dtype)",)),
    Row(
        "any dense tensor",
        (
            *("a tensor", "a tensor of one", "an array", "double", "int8", "bool", "complex", "without memory"),
            *("one row fewer", "one row more", "no rows", "one column fewer", "one dimension more"),
            *("one dimension fewer", "by column", "with gaps", "rows that are one", "negated", "requires_grad"),
            "a parameter",
        ),
        ("source",),
    ),
    Row(
        "loads: numbers of any type and number of layers, and those of one for all",
        (
            *("a tensor", "double", "int8", "without memory", "one row fewer", "one row more", "one column fewer"),
            *("one dimension fewer", "by column", "with gaps", "rows that are one", "negated", "requires_grad"),
            "a parameter",
        ),
        ("load",),
    ),
    Row(
        "tables: of any type of integer",
        ("int8", "by column", "with gaps", "negated", "a parameter"),
        ("log2phy", "logcnt", "phy2log"),
    ),
    Row(
        "numbers that torch reads",
        ("by column", "with gaps", "rows that are one", "negated", "a parameter", "an array"),
        ("moecomm.Placement.slots_of(counts)",),
    ),
    Row("all, or some", ("None", "[]", "()", "[1]", "(1, 2)"), tuple(f"{load}(experts)" for load in _LOADERS)),
    Row("no prefix", ("''",), ("prefix",)),
    Row("as before", ("None",), _of("balance.plan", "groups", "nodes", "previous", "ranks", "slots")),
    Row("slots of two ranks", ("(1, 2)",), ("balance.plan(slots)",)),
    Row("any number of copies and bytes", ("None", "0", "2**31"), ("max_moves", "max_bytes", "expert_bytes")),
    Row("a part, 0 to 1", ("0", "0.5", "True", "False"), ("skew", "drop")),
    Row("any whole number", ("-1", "0", "2**31", "np.int64(-3)"), ("seed",)),
    Row("a dtype that weights are drawn in", ("torch.float64",), ("router.Router(dtype)", "router.router(dtype)")),
    Row("likewise", ("torch.float64",), ("nn.Experts(dtype)", "nn.Gate(dtype)")),
    Row("weights without memory, as torch's layers have", ("torch.device",), ("device",)),
    Row("any dtype", ("torch.int64", "torch.float64"), ("deep_ep.Buffer.get_local_buffer_tensor(dtype)",)),
    Row("True is 1, where a dispatch with 1 is known", ("True",), ("expert_alignment",)),
    Row("no weights, and no others", ("{}",), ("state", "job")),
    Row("what can be called", ("int", "a function"), ("hook_after_wait",)),
    Row("read and written as they lie", ("rows that are one", "requires_grad", "a parameter", "negated"), _TENSORS),
    Row(
        "likewise: one number, written by torch",
        ("rows that are one", "a parameter", "negated", "by column", "with gaps", "an array"),
        ("dropped",),
    ),
    Row("likewise: a dimension of 1 has any stride", ("by column",), ("out", "handle", "w13", "w2", "x", "y")),
    Row(
        "copied first, or read by torch",
        ("by column", "with gaps", "an array"),
        (*_SMALL, *_OF_TORCH, *_SCALES, *_WIDENED, "w13", "w2", "w13_bias", "w2_bias"),
    ),
    Row(
        "zeros, for torch",
        ("without memory",),
        (
            *(
                *_OF_TORCH,
                "ops.moe(bias)",
                "ops.combine(handle)",
                "ops.dispatch_again(handle)",
                "bias",
                "weight",
                "w13",
                "w",
            ),
            *("ops.dispatch(topk_idx)", "ops.moe(topk_idx)", "nn.ExpertParallel.forward(topk_idx)", "topk_weights"),
            *("tokens_per_expert", "is_token_in_rank", "num_tokens_per_expert", "routing_map", "probs"),
        ),
    ),
    Row(
        "copied where they do not lie as products and lookups need them, or zeros",
        ("by column", "with gaps", "rows that are one", "negated", "requires_grad", "a parameter", "without memory"),
        (*_MATRICES, *_LOOKUP),
    ),
    Row("likewise, of another library", ("an array",), _LOOKUP),
    Row("any number of rows on one rank", ("one row fewer", "one row more", "no rows"), _MATRICES[:6]),
    Row("any number of columns, and two tables of one bag each", ("one column fewer", "one row more"), _LOOKUP[:2]),
    Row(
        "converted",
        ("double",),
        (
            *(
                "ops.dispatch(topk_weights)",
                "ops.moe(topk_weights)",
                "nn.ExpertParallel.forward(topk_weights)",
                "routing.RoutingRecorder.add(topk_weights)",
                "probs",
            ),
            *(*_OF_TORCH[4:], "weight", "router.Router(bias)", "router.Gating.__call__(bias)"),
        ),
    ),
    Row("converted", ("int8", "bool"), ("router.Router(bias)", "router.Gating.__call__(bias)")),
    Row("bool is what it is", ("bool",), ("is_token_in_rank", "routing_map")),
    Row(
        "rows beside scales are bytes, as many as they are",
        ("int8", "bool", "one column fewer"),
        ("deep_ep.Buffer.dispatch(x)", "deep_ep.ElasticBuffer.dispatch(x)", "deep_ep.EPBuffer.dispatch(x)"),
    ),
    Row(
        "rows of any type and width, as those of moecomm.Buffer",
        ("int8", "bool", "one column fewer"),
        tuple(f"deep_ep.HybridEPBuffer.{call}(hidden)" for call in ("dispatch", "dispatch_with_permute")),
    ),
    Row(
        "as it was, or nothing",
        ("None", "0"),
        _of(
            "deep_ep.HybridEPBuffer.update_template_config",
            *("hidden_dim", "num_of_tokens_per_rank", "num_local_experts", "use_fp8"),
        ),
    ),
    Row("rows of any type and width", ("int8", "bool", "one column fewer", "with gaps"), _of_payloads("x")),
    Row(
        "tensors of any type, or none",
        (
            *("[]", "()", "an array", "double", "int8", "bool", "one column fewer", "with gaps", "by column"),
            *("rows that are one", "negated", "a parameter"),
        ),
        _of_payloads("extras"),
    ),
    Row("a row for all tokens, as `[H]` says", ("one dimension fewer",), ("bias",)),
    Row(
        "any number of rows",
        ("one row fewer", "one row more", "no rows"),
        (*_ROWS, "deep_ep.Buffer.get_dispatch_layout(topk_idx)", "moecomm.Placement.slots_of(topk_idx)"),
    ),
    Row("any number of columns", ("one column fewer",), (_LAYOUT, "moecomm.Placement.slots_of(topk_idx)")),
    Row("`[..., H]`", ("one dimension more", "one dimension fewer"), ("nn.ExpertParallel.forward(x)",)),
    Row(
        "any tensor of matrices, whose shape alone is known of some",
        ("meta", "fake", "one column fewer", "one dimension more", "one dimension fewer"),
        (
            *("fused.interleave(w13)", "fused.deinterleave(w13)", "fused.quantize_weights(w)"),
            *("fused.quantize_channels(w)", "fused.quantize_rows(x)"),
        ),
    ),
    Row(
        "rows, whose shape alone is known of some",
        ("a tensor", "a meta tensor", "without memory", "with gaps", "by column"),
        ("fused.quantize_rows(x)",),
    ),
    Row("any dtype", ("double", "int8", "bool", "complex"), ("fused.interleave(w13)", "fused.deinterleave(w13)")),
    Row("a FakeTensor of its own", ("fake",), ("router.Router(bias)",)),
    Row("bytes, of any shape", ("one dimension more",), ("ops.dispatch_again(handle)", "ops.combine(handle)")),
    Row("row_weights, which a repeat has no use for", tuple(LIKE), ("ops.dispatch_again(handle)",)),
    Row(
        "read for its shape alone, beside topk_idx; as many experts as it says",
        tuple(LIKE),
        ("deep_ep.Buffer.dispatch(num_tokens_per_expert)",),
    ),
    Row(
        "kept and not looked at: of deep_ep's own kernels and buffers, or alive until the wait",
        (*GENERAL, *LIKE),
        (
            *("allocate_on_comm_stream", "allow_hybrid_mode", "allow_mnnvl", "allow_nvlink_for_low_latency_mode"),
            "allow_nvlink_for_normal_mode",
            *("deterministic", "do_handle_copy", "enable_custom_allgather", "explicitly_destroy"),
            *("extra_tensors", "fuse_permute_dispatch", "fuse_unpermute_combine", "load_cached_kernels"),
            *("low_latency_mode", "num_blocks_permute", "num_blocks_unpermute", "num_cpu_timeout_secs"),
            *(f"deep_ep.HybridEPBuffer.{call}(num_dispatched_tokens)" for call in _PERMUTED),
            *(
                "num_dispatched_tokens_tensor",
                "num_of_hybrid_ep_ranks_per_nvlink_domain",
                "num_qps",
                "num_qps_per_rank",
            ),
            *("num_sms_preprocessing_api", "num_tokens_per_rank", "num_tokens_per_rdma_rank", "nvlink_gbs", "rdma_gbs"),
            *("num_scaleout_topk", "sequential", "sl_idx", "sm_read_gbs", "sm_write_gbs", "use_comm_stream"),
            "wait_comm_stream",
            *("use_fabric", "use_fp8_dispatch", "use_mnnvl", "use_rdma_buffer", "use_shared_buffer", "with_cpu_sync"),
            *("deep_ep.HybridEPBuffer(use_fp8)", "deep_ep.HybridEPBuffer.dispatch_with_permute(use_fp8)"),
            *("deep_ep.HybridEPBuffer.combine_with_unpermute(pad_multiple)",),
            *("deep_ep.Buffer.get_dispatch_config(num_ranks)", "deep_ep.Buffer.get_combine_config(num_ranks)"),
            *_of("deep_ep.Config.get_rdma_buffer_size_hint", "hidden_bytes", "num_ranks"),
            *_of("deep_ep.Buffer.clean_low_latency_buffer", "num_max_dispatch_tokens_per_rank", "hidden"),
            *_of("deep_ep.ElasticBuffer.get_theoretical_num_sms", "num_experts", "num_topk"),
            *_of("deep_ep.EPBuffer.get_theoretical_num_sms", "num_experts", "num_topk"),
            *_of("deep_ep.Buffer.low_latency_dispatch", "x_global_scale"),
            *_of("deep_ep.ElasticBuffer.get_theoretical_num_qps", "num_sms"),
            *_of("deep_ep.EPBuffer.get_theoretical_num_qps", "num_sms"),
            *_of("deep_ep.ElasticBuffer.get_buffer_size_hint", "allow_multiple_reduction"),
            *_of("deep_ep.EPBuffer.get_buffer_size_hint", "allow_multiple_reduction"),
        ),
    ),
    Row("a number, as Megatron's backward pass has it", ("a tensor of one",), ("num_permuted_tokens",)),
    Row(
        "nothing but what they are made for",
        (),
        (
            *(
                "alignment",
                "backend",
                "blocks_per_sm",
                "cluster",
                "columns",
                "depth",
                "experts",
                "gating",
                "groups",
                "num_of_tokens_per_rank",
                "hidden_dim",
            ),
            *("intermediate", "layout", "max_tokens", "model", "module", "most_rows", "multiprocessors", "new_num_sms"),
            *("on_timeout", "signals"),
            *("num_experts", "num_groups", "num_local_experts", "num_max_dispatch_tokens_per_rank"),
            *("num_max_nvl_chunked_send_tokens", "num_max_rdma_chunked_send_tokens", "num_of_experts", "num_ranks"),
            *("num_max_tokens_per_rank", "num_topk", "ranks", "routed", "row_unit", "scale_format", "scale_layout"),
            *("stages", "target", "tensors", "tokens", "topk", "topk_groups", "workspace", "x"),
            *("layers", "parts", "recorded"),
            *("after", "before", "choice", "policy", "nodes", "balance.Plan(slots)"),
        ),
    ),
)


def accepted(call: str, argument: str) -> set[str] | None:
    """Names of values; None: the argument is in no row."""
    rows = [row for row in TABLE if {argument, f"{call}({argument})"} & set(row.arguments)]
    return {value for row in rows for value in row.values} if rows else None
