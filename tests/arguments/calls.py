"""Every public callable of moecomm, with arguments that are right: each stands in one of its calls at least."""

from __future__ import annotations

import contextlib
import copy
import inspect
import os
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import patch

import torch

import moecomm
from moecomm import balance, checkpoints, compat, fused, nn, ops, overlap, router, routing, transfer
from moecomm.compat import deep_ep
from moecomm.ranks.rendezvous import Alone
from moecomm.tools import launch
from moecomm.tools.launch import RanksFailed

H, E, K, T, I = 64, 4, 2, 4, 32  # noqa: E741 - as the docstrings have them
SIZES: dict[str, Any] = {"hidden": H, "num_experts": E, "topk": K, "max_tokens": 8}
BF16 = torch.bfloat16
BEGUN = object()  # stands for what dispatch_begin has returned

MODULES: dict[str, ModuleType] = {
    "moecomm": moecomm,
    "launch": launch,
    "router": router,
    "ops": ops,
    "nn": nn,
    "fused": fused,
    "checkpoints": checkpoints,
    "overlap": overlap,
    "routing": routing,
    "balance": balance,
    "transfer": transfer,
    "compat": compat,
    "deep_ep": deep_ep,
}
# Objects that moecomm makes and callers only pass on or read, and functions that its own processes call.
NOT_CALLED = {
    "moecomm.Handle",
    "moecomm.Routed",
    "moecomm.Shrunk",
    "moecomm.doctor",  # no arguments
    "launch.Failure",
    "launch.run_child",
    "launch.run_program",
    "router.Model",
    "router.gate_weight",
    "router.drawn",
    "router.best",
    "ops.Dispatched",
    "ops.Handle",  # see tests/ops/test_handles.py
    "ops.ChunkedHandle",  # see tests/ops/test_overflow.py
    "nn.Gate.__call__",  # forward()
    "fused.Fp8",
    "fused.Int8",
    "fused.Mxfp4",
    "fused.Nvfp4",
    "fused.PackedMxfp4",
    "balance.Move",
    "routing.Load",
    "routing.Recorded",
    "overlap.Choice",
    "overlap.Workspace.call",  # of the operators
    "deep_ep.EPHandle",
    "deep_ep.EventHandle",
}


def public() -> dict[str, Callable[..., Any]]:
    """Every public function, constructor and method that takes arguments, by name."""
    found = dict(_public())
    return {
        name: call
        for name, call in found.items()
        if not any(name == left or name.startswith(f"{left}.") for left in NOT_CALLED) and parameters(call)
    }


def parameters(call: Callable[..., Any]) -> list[str]:
    """Names of the arguments, without self and those that stand for any."""
    kinds = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return [
        p.name
        for p in inspect.signature(call).parameters.values()
        if p.kind not in kinds and p.name not in ("self", "buffer" if call is moecomm.Buffer.moe else "self")
    ]


def _public() -> Iterator[tuple[str, Callable[..., Any]]]:
    for module_name, module in MODULES.items():
        own = [name for name, value in vars(module).items() if getattr(value, "__module__", "") == module.__name__]
        names = getattr(module, "__all__", [name for name in own if not name.startswith("_")])
        for name in names:
            thing = getattr(module, name)
            if inspect.isclass(thing):
                if not issubclass(thing, BaseException):
                    yield f"{module_name}.{name}", thing
                    yield from _methods(f"{module_name}.{name}", thing)
            elif inspect.isfunction(thing):
                yield f"{module_name}.{name}", thing


def _methods(prefix: str, kind: type) -> Iterator[tuple[str, Callable[..., Any]]]:
    for name in dir(kind):
        owner = next((base for base in kind.__mro__ if name in vars(base)), object)
        method = getattr(kind, name)
        shown = name == "__call__" or not name.startswith("_")
        if shown and owner.__module__.startswith("moecomm") and inspect.isfunction(method):
            yield f"{prefix}.{name}", method


@dataclass
class Call:
    """A call that succeeds, of a method with its object bound; `after` sees to what it leaves behind."""

    function: Callable[..., Any]
    arguments: dict[str, Any] = field(default_factory=dict)
    after: Callable[[Any], Any] = lambda result: None

    def __call__(self, **changed: Any) -> Any:
        result = self.function(**{**self.arguments, **changed})
        self.after(result)
        return result


def with_defaults(table: dict[str, list[Call]]) -> dict[str, list[Call]]:
    """Return the calls of a table, the first of each function with the defaults of arguments that no call of it has."""
    functions = public()
    for name, (first, *others) in table.items():
        given = set(first.arguments).union(*(call.arguments for call in others))
        every = inspect.signature(functions[name]).parameters.values()
        defaults = {one.name: one.default for one in every if one.default is not one.empty and one.name not in given}
        first.arguments = {**first.arguments, **defaults}
    return table


def _close(result: Any) -> None:
    result.close()


def _destroy(result: Any) -> None:
    result.destroy()


def not_started(**given: Any) -> None:
    """launch(), as far as the first process."""

    def start(*job: Any) -> Any:
        raise RanksFailed([])

    with patch.object(launch, "_start", start), contextlib.suppress(RanksFailed):
        launch.launch(**given)


def of_windows() -> dict[str, list[Call]]:
    """Calls of moecomm.Window."""
    window = moecomm.Window("self", 4096, backend="host", timeout_s=5)

    def wait(**given: Any) -> None:
        """A call of a Window of its own, which a wait that fails ends."""
        with moecomm.Window("self", 64, backend="host", timeout_s=0.01) as short:
            short.wait(**given)

    opened = {"group": None, "nbytes": 64, "backend": "host", "device": None, "timeout_s": 5.0, "signals": 8}
    source = torch.ones(3, 4)
    return {
        "moecomm.Window": [Call(moecomm.Window, opened, _close)],
        "moecomm.Window.peer": [Call(window.peer, {"rank": 0})],
        "moecomm.Window.tensor": [Call(window.tensor, {"shape": (3, 4), "dtype": BF16, "rank": 0, "offset": 64})],
        "moecomm.Window.put": [Call(window.put, {"source": source, "rank": 0, "offset": 64, "signal": 1})],
        "moecomm.Window.signal": [Call(window.signal, {"rank": 0, "index": 0})],
        "moecomm.Window.set_signal": [Call(window.set_signal, {"rank": 0, "index": 0, "value": 1})],
        "moecomm.Window.signal_value": [Call(window.signal_value, {"index": 0})],
        "moecomm.Window.wait": [Call(wait, {"index": 0, "value": 0, "peer": 0})],
    }


def of_overlap() -> dict[str, list[Call]]:
    """Calls of moecomm.overlap."""
    workspace = overlap.Workspace("self", 1 << 16, backend="host", timeout_s=5)
    opened = {"group": None, "nbytes": 4096, "backend": "host", "device": None, "timeout_s": 5.0}
    x, w = torch.randn(T, H).to(BF16), torch.randn(I, H).to(BF16)
    product: dict[str, Any] = {"x": x, "w": w, "workspace": workspace, "fused": None}
    indices, offsets = torch.tensor([[[0, 1], [2, -1]]]), torch.tensor([0, 2, 3])
    lookup: dict[str, Any] = {"tables": torch.randn(1, 3, 5), "indices": indices, "workspace": workspace, "fused": None}
    ragged = {**lookup, "indices": torch.tensor([0, 1, 2]), "offsets": offsets}
    return {
        "overlap.Workspace": [Call(overlap.Workspace, opened, _close)],
        "overlap.all_gather_matmul": [Call(overlap.all_gather_matmul, product)],
        "overlap.matmul_reduce_scatter": [Call(overlap.matmul_reduce_scatter, product)],
        "overlap.matmul_all_reduce": [Call(overlap.matmul_all_reduce, product)],
        "overlap.matmul_all_to_all": [
            Call(overlap.matmul_all_to_all, {**product, "x": x.view(1, 1, T, H), "w": w.unsqueeze(0)})
        ],
        "overlap.embedding_all_to_all": [
            Call(overlap.embedding_all_to_all, {**lookup, "offsets": None}),
            Call(overlap.embedding_all_to_all, ragged),
        ],
    }


def of_routing() -> dict[str, list[Call]]:
    """Calls of moecomm.routing, which write no file."""
    drawn = routing.synthesize("mixtral-8x7b", 4, zipf=1.0)
    recorder = routing.RoutingRecorder("x", experts=E, watch=(), weights=True)
    made = {"path": "x", "model": "", "watch": None, "layers": 1, "weights": False, "experts": None, "max_tokens": 8}
    added = {"layer": "a", "topk_idx": torch.zeros(T, K, dtype=torch.int64), "topk_weights": torch.rand(T, K)}
    return {
        "routing.RoutingRecorder": [Call(routing.RoutingRecorder, made)],
        "routing.RoutingRecorder.add": [Call(recorder.add, {**added, "rank": 0, "ranks": 1})],
        "routing.join": [Call(routing.join, {"parts": [drawn, drawn]})],
        "routing.loads": [Call(routing.loads, {"recorded": drawn, "ranks": (4, 8)})],
        "routing.synthesize": [Call(routing.synthesize, {"model": "mixtral-8x7b", "tokens": 4, "zipf": 1.0})],
    }


def of_balance() -> dict[str, list[Call]]:
    """Calls of moecomm.balance."""
    load = torch.tensor([[1.0, 2.0, 4.0], [3.0, 1.0, 1.0]])
    before, after = (balance.plan(load, ranks=2, slots=4), balance.plan(load.flip(0), ranks=2, slots=4))
    made = {"log2phy": before.log2phy, "logcnt": before.logcnt, "phy2log": before.phy2log, "slots": (2, 2)}
    made["nodes"] = 1
    chosen = {"groups": None, "policy": "eplb", "choice": "even", "max_moves": None}
    none = {"ranks": None, "max_bytes": None, "expert_bytes": None}
    asked = {"load": load, "choice": "even"}
    return {
        "balance.Plan": [Call(balance.Plan, made)],
        "balance.Plan.placement": [Call(before.placement)],
        "balance.Plan.rank_loads": [Call(before.rank_loads, asked)],
        "balance.Plan.predicted": [Call(before.predicted, asked)],
        "balance.Plan.crossing": [Call(before.crossing, {"load": load})],
        "balance.moves": [Call(balance.moves, {"before": before, "after": after})],
        "balance.plan": [
            Call(balance.plan, {"load": load, **chosen, **none, "ranks": 2, "slots": 4, "nodes": 1, "previous": None}),
            Call(balance.plan, {"load": load, **chosen, **none, "slots": None, "nodes": None, "previous": before}),
            Call(balance.plan, {"load": load, "previous": before, "max_bytes": 8, "expert_bytes": 4}),
        ],
    }


def of_moecomm() -> dict[str, list[Call]]:
    """Return calls of all but compat."""
    torch.manual_seed(0)
    made = moecomm.Buffer(**SIZES, backend="host", timeout_s=5)
    x, idx = torch.randn(T, H).to(BF16), torch.tensor([[0, 1], [2, 3], [1, -1], [3, 0]])
    weights = torch.rand(T, K)
    w13, w2 = torch.randn(E, 2 * I, H).to(BF16), torch.randn(E, H, I).to(BF16)
    routed = made.dispatch(x, idx, weights)
    handle = routed.handle
    flat = made.dispatch(x, idx, weights, layout="flat")
    y = routed.x.clone()
    scales = torch.rand(T, 1)
    halves: dict[str, Any] = {
        "layout": "expert",
        "expert_alignment": 1,
        "num_sms": None,
        "check_weights": False,
        "overflow": None,
    }
    given: dict[str, Any] = {
        "x": x,
        "topk_idx": idx,
        "topk_weights": weights,
        **halves,
        "quantize": None,
        "scale_format": "fp32",
        "scale_layout": "row",
        "max_rows": 16,
    }
    beside = {"extras": (torch.rand(T, 2),), "x_global_scale": None}
    scaled = {"x": x, "topk_idx": idx, "scales": scales, "scale_layout": "row"}
    experts = {"topk_idx": idx, "topk_weights": weights, "w13": w13, "w2": w2, "activation": "swiglu"}
    how = {"interleaved": False, "max_rows": None, "wire": None, "num_sms": None, "check_weights": False}
    how |= {"balance": None}
    gates: dict[str, Any] = {"activation": "swigluoai", "activation_limit": 7.0, "activation_alpha": 1.702}
    gates |= {"w13_bias": torch.zeros(w13.shape[:2]), "w2_bias": torch.zeros(w2.shape[:2], dtype=BF16)}
    out, bias = torch.empty(T, H, dtype=BF16), torch.randn(T, H).to(BF16)
    dropping = {"overflow": "drop", "dropped": torch.zeros(1, dtype=torch.int32)}

    def half() -> Any:
        return made.dispatch_begin(x, idx, weights)

    def end(routed: Any, **more: Any) -> Any:
        """Begin a dispatch, and end it here, whatever is given."""
        begun = half()
        try:
            return made.dispatch_end(begun if routed is BEGUN else routed, **more)
        finally:
            if made.rounds.begun is not None:
                made.dispatch_end(begun)

    def end_of_none(routed: Any) -> Any:
        return None if routed is BEGUN else made.dispatch_end(routed)

    def write(path: Any) -> None:
        """A flight record; names go to a folder that is there no longer then."""
        with tempfile.TemporaryDirectory() as folder:
            made.dump_flight_record(Path(folder, path) if isinstance(path, str) else path)

    def write_trace(folder: Any, model: Any) -> None:
        """Spans; names of folders are below one that is there no longer then."""
        with (
            tempfile.TemporaryDirectory() as above,
            moecomm.trace(Path(above, folder) if isinstance(folder, str) and folder else folder, model=model),
        ):
            pass

    def name_layer(name: Any) -> None:
        with moecomm.layer(name):
            pass

    sent = ops.dispatch(made, x, idx, weights)
    op = {"buffer": made, "x": x, "topk_idx": idx, "topk_weights": weights}
    fp8 = fused.quantize_weights(torch.randn(2, 32, 64))
    gemm_x, gemm_w = torch.randn(6, 32).to(BF16), torch.randn(2, 16, 32).to(BF16)
    counts = torch.tensor([2, 3], dtype=torch.int32)
    four_bits = fused.Mxfp4(torch.zeros(2, 16, 16, dtype=torch.uint8), torch.ones(2, 16, 1, dtype=torch.uint8))
    fp8_x = fused.Fp8(torch.randn(6, 64).to(torch.float8_e4m3fn), torch.rand(6, 1))
    layer_sizes = {"hidden": H, "intermediate": I, "num_experts": E, "topk": K, "max_tokens": 8}
    layer = nn.ExpertParallel(**layer_sizes, backend="host")
    layer.open()
    state = layer.state_dict()
    gating = router.Gating(H, E, K)
    routing = router.Router(H, E, K)
    rows = torch.randn(T, H)
    gate_sizes = {"hidden": H, "num_experts": E, "topk": K}
    gate = {"gate": "softmax", "num_groups": 1, "topk_groups": 1, "scale": 1.0, "normalize": True}
    weights_of = {"seed": 0, "dtype": torch.float32, "device": "cpu"}
    gated = {"activation": "swigluoai", "activation_limit": 7.0, "activation_alpha": 1.702}
    four = nn.Experts(range(E), H, I)
    elastic = moecomm.Buffer(**SIZES, backend="host")
    placement = moecomm.Placement([range(E)])
    placed, grown = (moecomm.Buffer(**SIZES, backend="host", placement=placement) for _ in range(2))
    moved = moecomm.ExpertWeights(placed, {"w": (2,)})
    buffer_32 = moecomm.Buffer(**SIZES, backend="host", dtype=torch.float32)
    both: dict[str, Any] = {"source": placement, "target": placement, "backend": "host"}
    transferred = transfer.WeightTransfer("self", {"w": (2,)}, **both)
    cast = transfer.WeightTransfer("self", {"w": (2, 4)}, **both, cast="fp8")
    found = {
        "moecomm.Buffer": [
            Call(moecomm.Buffer, {**SIZES, "backend": "host", "timeout_s": 5.0, "placement": placement}, _close)
        ],
        "moecomm.Buffer.set_placement": [Call(placed.set_placement, {"placement": placement})],
        "moecomm.Placement": [
            Call(moecomm.Placement, {"experts": [list(range(E)), [0]], "num_experts": E, "slots": E, "choice": "token"})
        ],
        "moecomm.ExpertWeights": [
            Call(
                moecomm.ExpertWeights,
                {"buffer": placed, "shapes": {"w": (2,)}, "dtype": torch.float32},
                lambda weights: weights.close(),
            )
        ],
        "moecomm.ExpertWeights.prefetch": [Call(moved.prefetch, {"target": placement, "max_gbs": 1.5})],
        "transfer.WeightTransfer": [
            Call(
                transfer.WeightTransfer,
                {
                    "group": "self",
                    "shapes": {"w": (2, 4)},
                    "source": placement,
                    "target": placement,
                    "dtype": torch.float32,
                    "cast": "fp8",
                    "backend": "host",
                    "device": "cpu",
                    "timeout_s": 5.0,
                },
                _close,
            )
        ],
        "transfer.WeightTransfer.stage": [Call(transferred.stage, {"tensors": {"w": torch.zeros(E, 2).bfloat16()}})],
        "transfer.WeightTransfer.commit": [
            Call(
                lambda into, also: (cast.stage({"w": torch.zeros(E, 2, 4).bfloat16()}), cast.commit(into, also=also)),
                {"into": {"w": (torch.zeros(E, 2, 4, dtype=torch.float8_e4m3fn), torch.zeros(E, 1, 1))}, "also": {}},
            )
        ],
        "transfer.ranks_over": [
            Call(transfer.ranks_over, {"store": torch.distributed.HashStore(), "rank": 0, "ranks": 1, "timeout_s": 5.0})
        ],
        "moecomm.Placement.by_expert": [Call(placement.by_expert, {"numbers": torch.arange(E)})],
        "moecomm.Placement.slots_of": [
            Call(placement.slots_of, {"topk_idx": idx, "rank": 0, "domain_ranks": 1}),
            Call(
                moecomm.Placement([range(E)], choice="balanced").slots_of,
                {"topk_idx": idx, "rank": 0, "counts": torch.ones(1, E, dtype=torch.int64)},
            ),
        ],
        "moecomm.Buffer.dispatch": [
            Call(made.dispatch, {**given, "sync": None}),
            Call(made.dispatch, {"x": x, "topk_idx": idx, **beside}),
            Call(made.dispatch, {**scaled, "sync": True}),
            Call(made.dispatch, {"x": x, "handle": handle}),
        ],
        "moecomm.Buffer.dispatch_begin": [
            Call(made.dispatch_begin, given, made.dispatch_end),
            Call(made.dispatch_begin, {"x": x, "topk_idx": idx, **beside}, made.dispatch_end),
            Call(made.dispatch_begin, scaled, made.dispatch_end),
            Call(made.dispatch_begin, {"x": x, "handle": handle}, made.dispatch_end),
        ],
        "moecomm.Buffer.dispatch_end": [Call(end, {"routed": BEGUN}), Call(end_of_none, {"routed": BEGUN})],
        "moecomm.Buffer.combine": [
            Call(made.combine, {"y": y, "handle": handle, "out": out, "bias": bias}),
            Call(made.combine, {"y": y, "handle": handle, "weight_grads": torch.rand(len(y))}),
            Call(made.combine, {"y": y, "handle": handle, "topk_weights": weights}),
            Call(made.combine, {"y": flat.x.clone(), "handle": flat.handle, "bias": bias[0]}),
            Call(made.combine, {"y": fused.Fp8(y.to(torch.float8_e4m3fn), torch.rand(len(y), 1)), "handle": handle}),
        ],
        "moecomm.Buffer.shrink": [Call(elastic.shrink)],
        "moecomm.Buffer.mask": [Call(elastic.mask, {"ranks": (), "replicas": {0: 1}})],
        "moecomm.Buffer.unmask": [Call(elastic.unmask, {"ranks": ()})],
        "moecomm.Buffer.compile_for": [Call(elastic.compile_for, {"ranks": 2, "domain_ranks": 1})],
        "moecomm.Buffer.grow": [
            Call(elastic.grow, {"group": "self"}),
            Call(grown.grow, {"group": "self", "placement": placement}),
        ],
        "moecomm.Buffer.joining": [Call(elastic.joining, {"group": "self"})],
        "moecomm.Buffer.dump_flight_record": [Call(write, {"path": "record.json"})],
        "moecomm.Buffer.stats": [Call(made.stats)],
        "moecomm.Buffer.empty": [Call(made.empty, {"handle": handle, "dtype": BF16})],
        "moecomm.Buffer.moe": [
            Call(made.moe, {"x": x, **experts, **how, "out": out, "bias": bias, "overflow": None}),
            Call(made.moe, {"x": x, **experts, **dropping}),
            Call(made.moe, {"x": x, **experts, **gates}),
            Call(made.moe, {"x": x, **experts, "w13": fused.quantize_weights(w13), "w2": fused.quantize_weights(w2)}),
        ],
        **of_windows(),
        **of_overlap(),
        **of_routing(),
        **of_balance(),
        "moecomm.trace": [Call(write_trace, {"folder": "trace"})],
        "moecomm.layer": [Call(name_layer, {"name": "layers.3"})],
        "moecomm.local_ranks": [Call(moecomm.local_ranks, {"ranks": 2})],
        "launch.launch": [Call(not_started, {"target": "moecomm:none", "job": {}, "ranks": 1, "limit_s": 60.0})],
        "router.Gating": [Call(router.Gating, {**gate_sizes, **gate})],
        "router.Gating.__call__": [Call(gating, {"x": rows, "weight": routing.weight, "bias": torch.zeros(E)})],
        "router.Router": [Call(router.Router, {**gate_sizes, **gate, "bias": torch.zeros(E), **weights_of})],
        "router.Router.__call__": [Call(routing, {"x": rows})],
        "router.router": [Call(router.router, {"model": "mixtral-8x7b", **weights_of})],
        "router.random_routing": [Call(router.random_routing, {"tokens": T, "num_experts": E, "topk": K})],
        "ops.dispatch": [Call(ops.dispatch, {**op, "layer": 1, "quantize": "fp8"})],
        "ops.dispatch_again": [Call(ops.dispatch_again, {"x": x, "handle": sent.handle})],
        "ops.combine": [Call(ops.combine, {"y": sent.x.clone(), "handle": sent.handle})],
        "ops.moe": [
            Call(ops.moe, {"buffer": made, "x": x, **experts, **how, "bias": bias, "overflow": None}),
            Call(ops.moe, {"buffer": made, "x": x, **experts, **dropping, "layer": 1}),
            Call(ops.moe, {"buffer": made, "x": x, **experts, **gates}),
            Call(
                ops.moe,
                {
                    "buffer": made,
                    "x": x,
                    **experts,
                    "w13": fused.quantize_weights(w13),
                    "w2": fused.quantize_weights(w2),
                },
            ),
        ],
        "ops.slot_weights": [Call(ops.slot_weights, {"buffer": placed, "weights": [torch.ones(E, 2)]})],
        "nn.ExpertParallel": [
            Call(
                nn.ExpertParallel,
                {
                    **layer_sizes,
                    **gate,
                    "quantize": "fp8",
                    "buffer": None,
                    "placement": placement,
                    "backend": "host",
                    **weights_of,
                },
            ),
            Call(nn.ExpertParallel, {**layer_sizes, "buffer": buffer_32}),
            Call(nn.ExpertParallel, {**layer_sizes, **gated, "bias": True}),
        ],
        "nn.ExpertParallel.forward": [Call(layer.forward, {"x": rows, "topk_idx": idx, "topk_weights": weights})],
        "nn.Experts": [
            Call(nn.Experts, {"experts": range(2), "hidden": H, "intermediate": I, **gated, "bias": True}),
            Call(
                nn.Experts,
                {"experts": range(2), "hidden": H, "intermediate": I, "num_experts": 2, "group": "self", **weights_of},
            ),
        ],
        "nn.Experts.forward": [
            Call(four.forward, {"x": rows, "tokens_per_expert": torch.ones(E, dtype=torch.int32), "buffer": placed})
        ],
        "nn.Gate": [Call(nn.Gate, {"gating": gating, **weights_of})],
        "nn.Gate.forward": [Call(nn.Gate(gating).forward, {"x": rows})],
        "nn.clip_grad_norm_": [Call(nn.clip_grad_norm_, {"model": layer, "max_norm": 1.0})],
        "nn.expert_parameters": [Call(nn.expert_parameters, {"model": layer})],
        "nn.gather_state": [Call(nn.gather_state, {"state": state})],
        "nn.mark_experts": [
            Call(
                lambda module, **given: nn.mark_experts(copy.deepcopy(module), **given),  # each can be marked once
                {"module": torch.nn.Linear(H, 2), "group": "self", "num_experts": 2},
            )
        ],
        "nn.shard_state": [Call(nn.shard_state, {"state": state, "rank": 1, "num_ranks": 2})],
        "nn.shared_buffer": [
            Call(lambda **given: nn.shared_buffer(**{**SIZES, **given}), {"group": None, "backend": "host"})
        ],
        **_loaders(),
        "fused.Schedule": [Call(fused.Schedule, {"row_unit": 16, "most_rows": 64, "stages": 8, "cluster": 1})],
        "fused.choose": [Call(fused.choose, {"expected_rows": 16, "groups": 8, "columns": 256, "depth": 256})],
        "fused.choose_fp8": [Call(fused.choose_fp8, {"expected_rows": 16, "groups": 8, "columns": 256, "depth": 256})],
        "fused.interleave": [Call(fused.interleave, {"w13": w13})],
        "fused.deinterleave": [Call(fused.deinterleave, {"w13": w13})],
        "fused.pack_mxfp4": [Call(fused.pack_mxfp4, {"w": four_bits})],
        "fused.quantize_weights": [Call(fused.quantize_weights, {"w": w2})],
        "fused.quantize_channels": [Call(fused.quantize_channels, {"w": w2, "dtype": torch.int8})],
        "fused.quantize_rows": [Call(fused.quantize_rows, {"x": w2[0], "dtype": torch.int8})],
        "fused.grouped_gemm": [
            Call(
                fused.grouped_gemm,
                {
                    "x": gemm_x,
                    "w": gemm_w,
                    "tokens_per_expert": counts,
                    "activation": None,
                    "out": torch.empty(6, 16, dtype=BF16),
                    "quantize": None,
                },
            ),
            Call(
                fused.grouped_gemm,
                {
                    "x": gemm_x,
                    "w": gemm_w,
                    "tokens_per_expert": counts,
                    "activation": "swigluoai",
                    "activation_limit": 7.0,
                    "activation_alpha": 1.702,
                    "bias": torch.zeros(gemm_w.shape[:2]),
                    "out": torch.empty(6, 8, dtype=BF16),
                },
            ),
            Call(
                fused.grouped_gemm,
                {
                    "x": fp8_x,
                    "w": fp8,
                    "tokens_per_expert": counts,
                    "activation": "swiglu",
                    "quantize": "fp8",
                    "out": fused.Fp8(torch.empty(6, 16, dtype=torch.float8_e4m3fn), torch.empty(6, 1)),
                },
            ),
        ],
    }
    return with_defaults(found)


def _loaders() -> dict[str, list[Call]]:
    def drawn(*names: str, experts: tuple[int, ...] = (), **kinds: tuple[tuple[int, ...], torch.dtype]) -> Any:
        return {
            f"{name}{kind}": torch.ones((*experts, *shape)).to(dtype)
            for name in names
            for kind, (shape, dtype) in kinds.items()
        }

    u8, i8, e8m0, e4m3, f32 = torch.uint8, torch.int8, torch.float8_e8m0fnu, torch.float8_e4m3fn, torch.float32
    ones: dict[str, Any] = {"_blocks": ((I, 1, 16), u8), "_scales": ((I, 1), u8), "_bias": ((I,), BF16)}
    four: dict[str, Any] = {".weight": ((I, 16), i8), ".scale": ((I, 1), e8m0)}
    nv: dict[str, Any] = {".weight": ((I, 16), u8), ".weight_scale": ((I, 2), e4m3), ".weight_scale_2": ((), f32)}
    parts = ("gate_proj", "up_proj", "down_proj")
    checkpoint = {
        "gpt_oss": drawn("gate_up_proj", "down_proj", experts=(3,), **ones),
        "deepseek_v4": drawn(*(f"{expert}.{part}" for expert in range(3) for part in ("w1", "w2", "w3")), **four),
        "modelopt": drawn(*(f"{expert}.{part}" for expert in range(3) for part in parts), **nv),
    }
    found = {
        f"checkpoints.{name}": [
            Call(getattr(checkpoints, name), {"tensors": tensors, "experts": [1, 0], "prefix": "", "device": "cpu"})
        ]
        for name, tensors in checkpoint.items()
    }
    config = {"swiglu_limits": [0.0, 7.0]}
    return {**found, "checkpoints.activation": [Call(checkpoints.activation, {"config": config, "layer": 1})]}


def of_compat() -> dict[str, list[Call]]:
    """Return calls of moecomm.compat."""
    torch.manual_seed(0)
    group, hidden = Alone(), 128
    x, idx = torch.randn(T, hidden).to(BF16), torch.tensor([[0, 1], [2, 3], [1, -1], [3, 0]])
    weights = torch.rand(T, K)
    per_expert = torch.bincount(idx[idx >= 0], minlength=E).int()
    in_rank = torch.ones(T, 1, dtype=torch.bool)
    normal, low, elastic = deep_ep.Buffer(group), deep_ep.Buffer(group), deep_ep.ElasticBuffer(group)
    hybrid = deep_ep.HybridEPBuffer(group, hidden, 8, E)
    plan = deep_ep.BufferAllocator()
    redundant, redundant_grads = plan.allocate((1, 32), torch.uint8), plan.allocate((1, 8), torch.float32)
    with patch.dict(os.environ, MOECOMM_BACKEND="host"):
        ep = deep_ep.EPBuffer(group, lb_allocation_plan_or_num_bytes=plan)
    recv, _, _, _, handle, _ = normal.dispatch(x, topk_idx=idx, topk_weights=weights, num_tokens_per_expert=per_expert)
    rows, _, low_handle, _, _ = low.low_latency_dispatch(x, idx, 8, E, use_fp8=False)
    low.get_next_low_latency_combine_buffer(low_handle)
    elastic_x, _, _, elastic_handle, _ = elastic.dispatch(x, idx, weights, num_experts=E, num_max_tokens_per_rank=8)
    ep_x, _, _, ep_handle, _ = ep.dispatch(x, idx, weights, num_experts=E, num_max_tokens_per_rank=8)
    hybrid_x, hybrid_probs, _, _, hybrid_handle = hybrid.dispatch_with_permute(
        hidden=x, topk_idx=idx, topk_weights=weights, num_of_experts=E
    )
    flat_x, flat_probs, _, flat_handle = hybrid.dispatch(x, topk_idx=idx, topk_weights=weights, num_of_experts=E)
    assert flat_probs is not None
    chosen = torch.zeros(T, E, dtype=torch.bool).index_put_((torch.arange(T), idx[:, 0]), torch.tensor(True))
    event = deep_ep.EventOverlap()
    events = {"previous_event": None, "async_finish": False, "allocate_on_comm_stream": False}
    elastic_events = {
        "previous_event": None,
        "previous_event_before_epilogue": None,
        "async_with_compute_stream": False,
        "allocate_on_comm_stream": False,
    }
    ep_events = {name: value for name, value in elastic_events.items() if name != "previous_event_before_epilogue"}
    mapping = torch.full((1, 1), -1, dtype=torch.int32)
    nothing = {"overlap": False, "src_signals": None, "src_signal_expect_value": None, "packed_recv_count": None}
    nothing |= {"comp_signal": None, "block_m": None, "threshold": None, "num_sms": None}
    config = deep_ep.Config()
    hint = {"num_max_tokens_per_rank": 8, "hidden": hidden, "num_topk": K, "use_fp8_dispatch": False}
    hint |= {"allow_hybrid_mode": True, "allow_multiple_reduction": True}

    def hook() -> None:
        return None

    def settle(result: Any) -> None:
        """Raises what only the device sees, which the next call would."""
        result[4].native.rounds.check()

    found = {
        "compat.install_as_deep_ep": [Call(compat.install_as_deep_ep, {"replace": True})],
        "compat.install_as_nixl_ep": [Call(compat.install_as_nixl_ep, {"replace": True})],
        "deep_ep.get_physical_domain_size": [Call(deep_ep.get_physical_domain_size, {"group": group})],
        "deep_ep.get_logical_domain_size": [Call(deep_ep.get_logical_domain_size, {"group": group})],
        "deep_ep.Config": [
            Call(
                deep_ep.Config,
                {
                    **{f"num_max_{kind}_chunked_send_tokens": 6 for kind in ("nvl", "rdma")},
                    **{f"num_max_{kind}_chunked_recv_tokens": 256 for kind in ("nvl", "rdma")},
                },
            )
        ],
        "deep_ep.Config.get_nvl_buffer_size_hint": [
            Call(config.get_nvl_buffer_size_hint, {"hidden_bytes": 256, "num_ranks": 2})
        ],
        "deep_ep.Config.get_rdma_buffer_size_hint": [
            Call(config.get_rdma_buffer_size_hint, {"hidden_bytes": 256, "num_ranks": 2})
        ],
        "deep_ep.Buffer": [Call(deep_ep.Buffer, {"group": group}, _destroy)],
        "deep_ep.Buffer.set_num_sms": [Call(deep_ep.Buffer.set_num_sms, {"new_num_sms": 20})],
        "deep_ep.Buffer.get_low_latency_rdma_size_hint": [
            Call(
                deep_ep.Buffer.get_low_latency_rdma_size_hint,
                {"num_max_dispatch_tokens_per_rank": 8, "hidden": hidden, "num_ranks": 2, "num_experts": E},
            )
        ],
        "deep_ep.Buffer.get_dispatch_config": [Call(deep_ep.Buffer.get_dispatch_config, {"num_ranks": 2})],
        "deep_ep.Buffer.get_combine_config": [Call(deep_ep.Buffer.get_combine_config, {"num_ranks": 2})],
        "deep_ep.Buffer.get_local_buffer_tensor": [Call(normal.get_local_buffer_tensor, {"dtype": torch.int8})],
        "deep_ep.Buffer.get_dispatch_layout": [
            Call(normal.get_dispatch_layout, {"topk_idx": idx, "num_experts": E, **events})
        ],
        "deep_ep.Buffer.dispatch": [
            Call(
                normal.dispatch,
                {
                    "x": x,
                    "num_tokens_per_rank": torch.tensor([T]),
                    "num_tokens_per_expert": per_expert,
                    "topk_idx": idx,
                    "topk_weights": weights,
                    **events,
                },
            ),
            Call(normal.dispatch, {"x": (x, torch.rand(T, 1)), "handle": handle}),
            Call(normal.dispatch, {"x": x, "is_token_in_rank": in_rank, "num_tokens_per_expert": per_expert}),
        ],
        "deep_ep.Buffer.combine": [
            Call(
                normal.combine,
                {
                    "x": recv.clone(),
                    "handle": handle,
                    "topk_weights": torch.rand(len(recv), K),
                    "bias": (x.clone(), x.clone()),
                    **events,
                },
            )
        ],
        "deep_ep.Buffer.clean_low_latency_buffer": [
            Call(
                low.clean_low_latency_buffer,
                {"num_max_dispatch_tokens_per_rank": 8, "hidden": hidden, "num_experts": E},
            )
        ],
        "deep_ep.Buffer.low_latency_dispatch": [
            Call(
                low.low_latency_dispatch,
                {
                    "x": x,
                    "topk_idx": idx,
                    "num_max_dispatch_tokens_per_rank": 8,
                    "num_experts": E,
                    "cumulative_local_expert_recv_stats": torch.zeros(E, dtype=torch.int32),
                    "dispatch_wait_recv_cost_stats": torch.zeros(1, dtype=torch.int64),
                    "topk_weights": weights,
                },
            )
        ],
        "deep_ep.Buffer.low_latency_combine": [
            Call(
                low.low_latency_combine,
                {
                    "x": rows.clone(),
                    "topk_idx": idx,
                    "topk_weights": weights,
                    "handle": low_handle,
                    "out": torch.empty(T, hidden, dtype=BF16),
                    "combine_wait_recv_cost_stats": torch.zeros(1, dtype=torch.int64),
                    **nothing,
                },
            )
        ],
        "deep_ep.Buffer.get_next_low_latency_combine_buffer": [
            Call(low.get_next_low_latency_combine_buffer, {"handle": low_handle})
        ],
        "deep_ep.Buffer.low_latency_update_mask_buffer": [
            Call(low.low_latency_update_mask_buffer, {"rank_to_mask": 0})
        ],
        "deep_ep.Buffer.low_latency_query_mask_buffer": [
            Call(low.low_latency_query_mask_buffer, {"mask_status": torch.zeros(1, dtype=torch.int32)})
        ],
        "deep_ep.EventOverlap": [Call(deep_ep.EventOverlap)],
        "deep_ep.EventOverlap.__call__": [Call(event)],
        "deep_ep.EventOverlap.current_stream_wait": [
            Call(lambda **given: deep_ep.EventOverlap(deep_ep.EventHandle()).current_stream_wait(**given))
        ],
        "deep_ep.EventOverlap.register_hook_after_wait": [
            Call(lambda **given: deep_ep.EventOverlap().register_hook_after_wait(**given), {"hook_after_wait": hook})
        ],
        "deep_ep.ElasticBuffer": [Call(deep_ep.ElasticBuffer, {"group": group, **hint}, _destroy)],
        "deep_ep.ElasticBuffer.get_buffer_size_hint": [
            Call(deep_ep.ElasticBuffer.get_buffer_size_hint, {"group": group, **hint})
        ],
        "deep_ep.ElasticBuffer.barrier": [Call(elastic.barrier)],
        "deep_ep.ElasticBuffer.get_theoretical_num_sms": [
            Call(elastic.get_theoretical_num_sms, {"num_experts": E, "num_topk": K})
        ],
        "deep_ep.ElasticBuffer.get_theoretical_num_qps": [Call(elastic.get_theoretical_num_qps, {"num_sms": 16})],
        "deep_ep.ElasticBuffer.dispatch": [
            Call(
                elastic.dispatch,
                {
                    "x": x,
                    "topk_idx": idx,
                    "topk_weights": weights,
                    "cumulative_local_expert_recv_stats": torch.zeros(E, dtype=torch.int32),
                    "num_experts": E,
                    "num_max_tokens_per_rank": 8,
                    "expert_alignment": 1,
                    **elastic_events,
                    "do_expand": True,
                    "do_zero_padding": True,
                },
            ),
            Call(elastic.dispatch, {"x": (x, torch.rand(T, 1)), "handle": elastic_handle, "topk_weights": weights}),
        ],
        "deep_ep.ElasticBuffer.combine": [
            Call(
                elastic.combine,
                {
                    "x": elastic_x.clone(),
                    "handle": elastic_handle,
                    "bias": (x.clone(), x.clone()),
                    "topk_weights": torch.rand(len(elastic_x), K),
                    **elastic_events,
                },
            )
        ],
        "deep_ep.EPBuffer": [Call(deep_ep.EPBuffer, {"group": group, **hint}, _destroy)],
        "deep_ep.EPBuffer.get_buffer_size_hint": [
            Call(deep_ep.EPBuffer.get_buffer_size_hint, {"group": group, **hint})
        ],
        "deep_ep.EPBuffer.barrier": [Call(ep.barrier)],
        "deep_ep.EPBuffer.get_theoretical_num_sms": [
            Call(ep.get_theoretical_num_sms, {"num_experts": E, "num_topk": K})
        ],
        "deep_ep.EPBuffer.get_theoretical_num_qps": [Call(ep.get_theoretical_num_qps, {"num_sms": 16})],
        "deep_ep.EPBuffer.dispatch": [
            Call(
                ep.dispatch,
                {
                    "x": x,
                    "topk_idx": idx,
                    "topk_weights": weights,
                    "cumulative_local_expert_recv_stats": torch.zeros(E, dtype=torch.int32),
                    "num_experts": E,
                    "num_max_tokens_per_rank": 8,
                    "expert_alignment": 1,
                    **ep_events,
                    "async_with_compute_stream": True,
                    "do_expand": True,
                    "do_zero_padding": True,
                    "defer_epilogue": True,
                    "borrow_recv": False,
                },
            ),
            Call(ep.dispatch, {"x": (x, torch.rand(T, 1)), "handle": ep_handle, "topk_weights": weights}),
        ],
        "deep_ep.EPBuffer.combine": [
            Call(
                ep.combine,
                {
                    "x": ep_x.clone(),
                    "handle": ep_handle,
                    "bias": (x.clone(), x.clone()),
                    "topk_weights": torch.rand(len(ep_x), K),
                    **ep_events,
                    "async_with_compute_stream": True,
                    "defer_epilogue": True,
                },
            )
        ],
        "deep_ep.EPBuffer.lb_prefetch_weights": [
            Call(
                ep.lb_prefetch_weights,
                {
                    "redundant_expert_weights": redundant,
                    "expert_weights": torch.zeros(E, 32, dtype=torch.uint8),
                    "redundancy_mapping": mapping,
                },
            )
        ],
        "deep_ep.EPBuffer.lb_reduce_grads": [
            Call(
                ep.lb_reduce_grads,
                {
                    "redundant_expert_grads": redundant_grads,
                    "expert_grads": torch.zeros(E, 8),
                    "redundancy_mapping": mapping,
                },
            )
        ],
        "deep_ep.BufferAllocator.allocate": [
            Call(lambda **given: deep_ep.BufferAllocator().allocate(**given), {"shape": (3, 5), "dtype": torch.float32})
        ],
        "deep_ep.BufferAllocator.materialize": [
            Call(lambda **given: deep_ep.BufferAllocator().materialize(**given), {"storage": torch.empty(0).byte()})
        ],
        "deep_ep.HybridEPBuffer": [
            Call(
                deep_ep.HybridEPBuffer,
                {"group": group, "hidden_dim": hidden, "max_num_of_tokens_per_rank": 8, "num_local_experts": E},
            )
        ],
        "deep_ep.HybridEPBuffer.update_template_config": [
            Call(
                hybrid.update_template_config,
                {
                    "hidden_dim": hidden,
                    "num_of_tokens_per_rank": 8,
                    "num_local_experts": E,
                    "pad_multiple": 1,
                    "use_fp8": False,
                },
            )
        ],
        "deep_ep.HybridEPBuffer.dispatch": [
            Call(
                hybrid.dispatch,
                {
                    "hidden": x,
                    "topk_idx": idx,
                    "topk_weights": weights,
                    "num_of_experts": E,
                    "num_dispatched_tokens_tensor": None,
                    "num_dispatched_tokens": 16,
                    "scaling_factor": torch.rand(T, 1),
                },
                lambda result: result[3].native.rounds.check(),
            ),
            Call(hybrid.dispatch, {"hidden": x, "routing_map": chosen, "probs": torch.rand(T, E)}),
            Call(hybrid.dispatch, {"hidden": x, "handle": flat_handle}),
        ],
        "deep_ep.HybridEPBuffer.combine": [
            Call(hybrid.combine, {"hidden": flat_x.clone(), "probs": flat_probs.clone(), "handle": flat_handle})
        ],
        "deep_ep.HybridEPBuffer.dispatch_with_permute": [
            Call(
                hybrid.dispatch_with_permute,
                {
                    "hidden": x,
                    "topk_idx": idx,
                    "topk_weights": weights,
                    "num_of_experts_per_rank": E,
                    "num_of_experts": E,
                    "use_fp8": False,
                    "num_permuted_tokens": 16,
                    "pad_multiple": 1,
                    "scaling_factor": torch.rand(T, 1),
                },
                settle,
            ),
            Call(hybrid.dispatch_with_permute, {"hidden": x, "routing_map": chosen, "probs": torch.rand(T, E)}),
            Call(hybrid.dispatch_with_permute, {"hidden": x, "handle": hybrid_handle}),
        ],
        "deep_ep.HybridEPBuffer.combine_with_unpermute": [
            Call(
                hybrid.combine_with_unpermute,
                {"hidden": hybrid_x.clone(), "probs": hybrid_probs.clone(), "handle": hybrid_handle},
            )
        ],
    }
    return with_defaults(found)
