"""The layer over several ranks against the textbook formula in float64: outputs, gradients, states, graphs."""

from __future__ import annotations

import copy
import gc
import io
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils._pytree import tree_map_only

import moecomm
from moecomm import formats
from moecomm.fused.activations import GatedActivation, check_activation
from moecomm.nn import ExpertParallel, Gate, gather_state, shard_state, shared_buffer
from moecomm.nn.state import is_sharded
from moecomm.router import Gating, Router, random_routing
from moecomm.testing.layers import activations
from tests.ops.plain import formula

from ..backends.conftest import all_ranks

HIDDEN, INTERMEDIATE, EXPERTS, TOPK, MOST = 32, 16, 8, 3, 12
TOKENS = (7, 0, 12, 5)
ACTIVATIONS = {**activations(0.5), "swigluoai": check_activation("swigluoai", 0.5, 1.5)}
SIZES: dict[str, Any] = {
    "hidden": HIDDEN,
    "intermediate": INTERMEDIATE,
    "num_experts": EXPERTS,
    "topk": TOPK,
    "max_tokens": MOST,
    "backend": "host",
    "device": "cpu",
}


def layer_of(group: Any, **settings: Any) -> ExpertParallel:
    return ExpertParallel(group, **{**SIZES, **settings})


def draw(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def assert_close(got: torch.Tensor, want: torch.Tensor, unit: float = 2.0**-24) -> None:
    """Within as many roundings of the largest value as the longest sum has terms."""
    assert got.shape == want.shape
    terms = HIDDEN + 2 * INTERMEDIATE + TOPK * sum(TOKENS)
    assert (got.double() - want).abs().max() <= terms * unit * want.abs().max()


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("routing", ["gate", "given"])
def test_outputs_and_gradients_are_those_of_one_rank(ranks: int, routing: str) -> None:
    xs = [draw(TOKENS[rank], HIDDEN, seed=rank) for rank in range(ranks)]
    seen = [draw(TOKENS[rank], HIDDEN, seed=10 + rank) for rank in range(ranks)]
    given = [
        random_routing(n, EXPERTS, TOPK, drop=0.3, duplicates=True, generator=torch.Generator().manual_seed(n))
        for n in TOKENS
    ]

    def body(group: Any) -> tuple[torch.Tensor, ...]:
        rank = group.rank
        layer = layer_of(group)
        x = xs[rank].clone().requires_grad_()
        idx, weights = given[rank] if routing == "given" else (None, None)
        out = layer(x, idx, weights)
        (out * seen[rank]).sum().backward()
        gate = layer.gate.weight.grad
        result = (out.detach(), x.grad, layer.experts.w13.grad, layer.experts.w2.grad)
        layer.open().close()
        return (*result, torch.zeros_like(layer.gate.weight) if gate is None else gate)

    got = all_ranks(ranks, body)
    one = layer_of(None).double()
    x = torch.cat(xs).double().requires_grad_()
    idx, weights = one.gate(x) if routing == "gate" else (torch.cat(t) for t in list(zip(*given, strict=True)))
    if routing == "given":
        idx, weights = idx[: len(x)], weights[: len(x)]
    out = formula(x, idx, weights.double(), one.experts.w13, one.experts.w2)
    (out * torch.cat(seen)).sum().backward()
    for i, want in enumerate((out, x.grad, one.experts.w13.grad, one.experts.w2.grad)):
        assert_close(torch.cat([g[i] for g in got]), want)
    if routing == "gate":
        assert_close(sum(g[4] for g in got), one.gate.weight.grad)
    else:
        assert not any(g[4].any() for g in got)


@pytest.mark.parametrize("activation", ACTIVATIONS.values(), ids=ACTIVATIONS)
@pytest.mark.parametrize("ranks", [1, 2])
def test_experts_with_biases_and_other_activations(ranks: int, activation: GatedActivation) -> None:
    """In training and in inference, and their states."""
    how: dict[str, Any] = {"bias": True, **activation.arguments()}
    xs, seen = ([draw(TOKENS[rank], HIDDEN, seed=s + rank) for rank in range(ranks)] for s in (0, 10))
    names = ("w13", "w2", "w13_bias", "w2_bias")
    biases = {"w13_bias": draw(EXPERTS, 2 * INTERMEDIATE), "w2_bias": draw(EXPERTS, HIDDEN)}

    def with_biases(layer: ExpertParallel) -> ExpertParallel:
        whole = layer_of(None, **how).state_dict()
        layer.load_state_dict({**whole, **{f"experts.{name}": value for name, value in biases.items()}})
        return layer

    def body(group: Any) -> tuple[list[torch.Tensor], dict[str, torch.Tensor]]:
        layer = with_biases(layer_of(group, **how))
        out = layer(xs[group.rank])
        (out * seen[group.rank]).sum().backward()
        with torch.no_grad():
            again = layer(xs[group.rank])
        state = layer.state_dict()
        layer.open().close()
        return [out.detach(), again, *(getattr(layer.experts, name).grad for name in names)], state

    found = all_ranks(ranks, body)
    one = with_biases(layer_of(None, **how)).double()
    x = torch.cat(xs).double()
    idx, weights = one.gate(x)
    w13, w2, w13_bias, w2_bias = (getattr(one.experts, name) for name in names)
    both = torch.einsum("th,eih->tei", x, w13) + w13_bias
    y = torch.einsum("tei,ehi->teh", activation.apply(*both.chunk(2, dim=-1)), w2) + w2_bias
    out = (y.gather(1, idx.unsqueeze(2).expand(-1, -1, HIDDEN)) * weights.double().unsqueeze(2)).sum(dim=1)
    (out * torch.cat(seen)).sum().backward()
    wanted = [out, out, w13.grad, w2.grad, w13_bias.grad, w2_bias.grad]
    for i, want in enumerate(wanted):
        assert_close(torch.cat([tensors[i] for tensors, _ in found]), want)
    for name, value in biases.items():
        assert is_sharded(f"experts.{name}")
        assert torch.equal(torch.cat([state[f"experts.{name}"] for _, state in found]), value)


def test_inference_is_one_call_and_experts_with_hooks_are_called() -> None:
    layer = layer_of(None)
    x = draw(2, 3, HIDDEN)
    calls: list[int] = []
    buffer = layer.open()
    buffer.moe = lambda *args, **options: calls.append(1) or type(buffer).moe(buffer, *args, **options)
    with torch.no_grad():
        out = layer(x)
        assert len(calls) == 1 and out.shape == x.shape
        one = layer_of(None).double()
        idx, weights = one.gate(x.view(6, HIDDEN).double())
        want = formula(x.view(6, HIDDEN).double(), idx, weights.double(), one.experts.w13, one.experts.w2)
        assert_close(out.view(6, HIDDEN), want)
        hook = layer.experts.register_forward_pre_hook(lambda module, args: calls.append(2))
        assert_close(layer(x).view(6, HIDDEN), want)
        assert calls == [1, 2]
        hook.remove()
        with torch.autocast("cpu", torch.bfloat16):
            layer(x)
        assert calls == [1, 2]
    layer(x)
    assert calls == [1, 2], "gradients are on"
    del buffer.moe
    buffer.close()


class Wrapped(torch.Tensor):
    """A tensor without memory of its own, as quantized weights and others are."""

    inner: torch.Tensor

    @staticmethod
    def __new__(cls: type[Wrapped], inner: torch.Tensor) -> Wrapped:
        made = torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype, strides=inner.stride())
        made.inner = inner
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        plain = tree_map_only(cls, lambda tensor: tensor.inner, (args, kwargs or {}))
        found = func(*plain[0], **plain[1])
        return cls(found) if func is torch.ops.aten.detach.default else found


@pytest.mark.parametrize("bias", [False, True])
def test_experts_of_a_subclass_of_tensor_compute_with_gradients_and_without(bias: bool) -> None:
    layer, x = layer_of(None, bias=bias), draw(5, HIDDEN)
    with torch.no_grad():
        want = layer(x)
    for name in ("w2_bias",) if bias else ("w13", "w2"):
        setattr(layer.experts, name, torch.nn.Parameter(Wrapped(getattr(layer.experts, name).detach())))
    out = layer(x)
    with torch.no_grad():
        inferred = layer(x)
    assert_close(out, want)
    assert torch.equal(inferred, out)


def test_rows_may_lie_anywhere_with_gradients_or_without() -> None:
    layer = layer_of(None)
    x = draw(3, HIDDEN)
    want = layer(x)
    for rows in (x.T.contiguous().T, torch.cat([x[:, :1], x], dim=1)[:, 1:], x[0].expand(3, HIDDEN)):
        with torch.no_grad():
            inferred = layer(rows)
        assert_close(inferred, layer(rows))
        assert_close(inferred[0], want[0])


def test_torch_defaults_do_not_matter_to_weights_and_none_is_its_device() -> None:
    want = layer_of(None, corrected=True).state_dict()
    torch.set_default_dtype(torch.bfloat16)
    try:
        for name, tensor in layer_of(None, corrected=True).state_dict().items():
            assert torch.equal(tensor, want[name]), name
        with torch.device("meta"):
            made = layer_of(None, corrected=True, device=None)
            assert {p.device.type for p in made.state_dict().values()} == {"meta"}
            there = layer_of(None, corrected=True, device="cpu")
        assert all(torch.equal(tensor, want[name]) for name, tensor in there.state_dict().items())
    finally:
        torch.set_default_dtype(torch.float32)


def test_payload_and_autocast_choose_dtypes() -> None:
    layer = layer_of(None, payload=torch.bfloat16)
    x = draw(2, 3, HIDDEN).requires_grad_()
    seen: list[torch.dtype] = []
    layer.experts.register_forward_hook(lambda _, args, y: seen.extend((args[0].dtype, y.dtype)))
    with torch.autocast("cpu", torch.bfloat16):
        out = layer(x)
    plain = layer(x)
    assert seen == [torch.bfloat16, torch.bfloat16, torch.bfloat16, torch.float32]
    assert out.dtype == plain.dtype == torch.float32 and out.shape == x.shape
    plain.sum().backward()
    assert layer.experts.w13.grad is not None and layer.experts.w13.grad.dtype == torch.float32
    flat = x.detach().view(-1, HIDDEN)
    idx, weights = layer.gate(flat)
    want = formula(flat, idx, weights, layer.experts.w13, layer.experts.w2).detach().view(x.shape)
    for result, unit in ((plain, 2.0**-8), (out, 2.0**-8)):
        assert (result - want).abs().max() <= 8 * unit * want.abs().max()
    assert layer.gate(flat.bfloat16())[1].dtype == torch.float32


def test_the_gate_is_that_of_deepseek_v3() -> None:
    gate: dict[str, Any] = {"gate": "sigmoid", "num_groups": 4, "topk_groups": 2, "scale": 2.5}
    theirs = Router(HIDDEN, EXPERTS, TOPK, **gate, bias=draw(EXPERTS) * 0.1, seed=3)
    layer = layer_of(None, **gate, corrected=True)
    assert theirs.bias is not None and layer.gate is not None and layer.gate.bias is not None
    layer.load_state_dict({"gate.weight": theirs.weight, "gate.bias": theirs.bias}, strict=False)
    x = draw(50, HIDDEN)
    for mine, want in zip(layer.gate(x), theirs(x), strict=True):
        assert torch.equal(mine, want)
    assert layer.gate.weight.requires_grad and not layer.gate.bias.requires_grad


def corrected_gate() -> Gate:
    gate = Gate(Gating(HIDDEN, EXPERTS, TOPK, "sigmoid"), corrected=True, device="cpu")
    assert gate.bias is not None
    gate.bias.copy_(6 + 0.01 * draw(EXPERTS))  # bfloat16 would round all of them to few values
    return gate


def _loaded(gate: Gate, assign: bool = False, dtype: torch.dtype = torch.float32) -> Gate:
    made = Gate(gate.gating, corrected=True, device="cpu").half()
    made.load_state_dict({name: tensor.to(dtype) for name, tensor in gate.state_dict().items()}, assign=assign)
    return made


def _from_meta(gate: Gate) -> Gate:
    with torch.device("meta"):
        made = Gate(gate.gating, corrected=True).bfloat16().to_empty(device="cpu")
    made.load_state_dict(gate.state_dict())
    return made


def _swapped(gate: Gate) -> Gate:
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        return _loaded(gate.bfloat16(), assign=True, dtype=torch.float64)
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)


def _pickled_earlier(gate: Gate) -> Gate:
    gate._buffers["bias"] = gate.bias.double()  # as versions that did not keep it in float32 left it
    return copy.copy(gate)


def _sharded(gate: Gate) -> Gate:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, cast_forward_inputs=True)
        sharded = fully_shard(gate.to(torch.bfloat16), mesh=init_device_mesh("cpu", (1,)), mp_policy=policy)
        sharded(draw(3, HIDDEN))
        return sharded
    finally:
        dist.destroy_process_group()


DTYPE_CHANGES: dict[str, Callable[[Gate], Any]] = {
    "bfloat16": lambda gate: gate.bfloat16(),
    "half in a model": lambda gate: torch.nn.Sequential(gate).half()[0],
    "double": lambda gate: gate.double(),
    "to": lambda gate: gate.to("cpu", torch.bfloat16, non_blocking=True),
    "type": lambda gate: gate.type(torch.float16),
    "load": _loaded,
    "assign": lambda gate: _loaded(gate, assign=True),
    "assign float64": lambda gate: _loaded(gate, assign=True, dtype=torch.float64),
    "swap": _swapped,
    "deepcopy": lambda gate: copy.deepcopy(gate.bfloat16()),
    "pickle": lambda gate: copy.copy(gate.bfloat16()),  # by __reduce_ex__, as what is saved comes back
    "pickle of an earlier version": _pickled_earlier,
    "meta": _from_meta,
    "FSDP2": _sharded,
}


@pytest.mark.parametrize("change", DTYPE_CHANGES)
def test_the_bias_of_a_gate_stays_float32(change: str) -> None:
    want = corrected_gate().bias
    changed = DTYPE_CHANGES[change](corrected_gate())
    assert changed.bias.dtype is torch.float32 and torch.equal(changed.bias, want)
    changed.bias += 1e-3
    assert torch.equal(changed.bias, want + 1e-3), "updates are not lost"


def test_a_bias_of_another_dtype_is_refused() -> None:
    gate = corrected_gate()
    assert gate.bfloat16().to("meta").bias.dtype is torch.float32
    gate = corrected_gate()
    gate.bias.data = gate.bias.bfloat16()  # as FSDP1 casts buffers
    with pytest.raises(moecomm.BadInput, match=r"gate\.bias: got torch\.bfloat16; want torch\.float32"):
        gate(draw(3, HIDDEN))


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_a_compiled_layer_is_one_graph_with_the_same_bits(backend: str) -> None:
    layer = layer_of(None, max_rows=30)
    layer.open()
    compiled = torch.compile(layer, fullgraph=True, backend=backend)
    for tokens in (7, 9, 0):
        results = []
        for call in (compiled, layer):
            x = draw(tokens, HIDDEN).requires_grad_()
            out = call(x)
            out.square().sum().backward()
            results.append((out.detach(), x.grad, *(p.grad.clone() for p in layer.parameters())))
            layer.zero_grad()
        for got, want in zip(*results, strict=True):
            assert torch.equal(got, want)
    torch.compiler.reset()


def test_a_compiled_layer_without_gradients_is_one_operator_with_the_bits_of_eager_mode() -> None:
    layer, graphs = layer_of(None, max_rows=30), []
    layer.open()

    def kept(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        graphs.append({str(node.target) for node in graph.graph.nodes if "moecomm" in str(node.target)})
        return graph

    compiled = torch.compile(layer, fullgraph=True, backend=kept)
    x = draw(7, HIDDEN)
    with torch.no_grad():
        assert torch.equal(compiled(x), layer(x))
        assert graphs == [{"moecomm.moe.default"}]
    assert torch.equal(compiled(x), layer(x))
    assert "moecomm.moe.default" not in graphs[1], "gradients are on"
    torch.compiler.reset()


def test_a_compiled_layer_without_a_buffer_says_what_to_do() -> None:
    with pytest.raises(Exception, match=r"layer\.open\(\) before"):
        torch.compile(layer_of(None), fullgraph=True, backend="eager")(draw(3, HIDDEN))
    torch.compiler.reset()


def test_layers_of_the_same_sizes_share_a_buffer_that_lives_as_long_as_they_do() -> None:
    first, second, larger = layer_of(None), layer_of(None), layer_of(None, max_tokens=MOST + 1)
    shared = first.open()
    second(draw(3, HIDDEN))
    assert second.open() is shared and larger.open() is not shared
    copied = copy.deepcopy(first)
    assert copied.open() is shared
    assert copied.experts.w2 is not first.experts.w2 and torch.equal(copied.experts.w2, first.experts.w2)
    shared.close()
    with pytest.raises(moecomm.Closed):
        first(draw(3, HIDDEN))
    assert first.open() is not shared and second.open() is first.open()
    gone = weakref.ref(first.open())
    del first, second, copied, shared
    gc.collect()
    assert gone() is None, "nobody needs it any more"


def test_an_open_layer_is_saved_as_one_that_is_not_and_goes_on() -> None:
    layer, x = layer_of(None, max_rows=30, corrected=True), draw(4, HIDDEN)
    want = layer(x)
    torch.save(torch.nn.Sequential(layer), io.BytesIO())
    again = copy.copy(layer)  # by __reduce_ex__, as what is saved comes back
    layer.open().close()
    assert torch.equal(again(x), want)
    assert again.max_rows == 30 and again.open() is layer.open()
    for name, tensor in layer.state_dict().items():
        assert torch.equal(again.state_dict()[name], tensor), name


def test_a_given_buffer_is_used() -> None:
    sizes = {"hidden": HIDDEN, "num_experts": EXPERTS, "topk": TOPK, "max_tokens": MOST, "backend": "host"}
    with moecomm.Buffer(None, **sizes, dtype=torch.float32) as buffer:
        layer = layer_of(None, buffer=buffer)
        assert layer.open() is buffer
        x = draw(4, HIDDEN)
        assert torch.equal(layer(x), layer_of(None)(x))
    with pytest.raises(moecomm.Closed):
        layer(x)
    assert layer.open() is buffer
    assert "gate.weight" not in layer_of(None, gate=None).state_dict()
    with pytest.raises(moecomm.BadInput, match="topk"):
        layer_of(None, buffer=buffer, topk=TOPK + 1)
    with pytest.raises(moecomm.BadInput, match="payload"):
        layer_of(None, buffer=buffer, payload=torch.bfloat16)


def _share_and_gather(rank: int, group: Any) -> list[Any]:
    whole = torch.nn.Sequential(layer_of("self", seed=1), layer_of("self", seed=2)).state_dict()
    model = torch.nn.Sequential(layer_of(group, seed=5), layer_of(group, seed=6))
    model.load_state_dict(shard_state(whole, rank, group.size()))
    again = gather_state(model.state_dict(), group)
    same = list(again) == list(whole) and all(torch.equal(again[name], whole[name]) for name in whole)
    x = draw(3, HIDDEN, seed=rank)
    with torch.no_grad():
        out = model(x)
    shared = model[0].open() is model[1].open() is shared_buffer(group, **_settings(model[0]))
    return [same, shared, out.tolist()]


def _settings(layer: ExpertParallel) -> dict[str, Any]:
    names = ("hidden", "num_experts", "topk", "max_tokens", "dtype", "device")
    return {name: getattr(layer.open(), name) for name in names} | {"backend": "host"}


def test_a_state_goes_from_one_rank_to_several_and_back(ranks: Any) -> None:
    found = ranks.run(2, _share_and_gather)
    one = torch.nn.Sequential(layer_of(None, seed=1), layer_of(None, seed=2))
    for rank, (same, shared, out) in enumerate(found):
        assert same and shared
        torch.testing.assert_close(torch.tensor(out), one(draw(3, HIDDEN, seed=rank)).detach(), rtol=1e-5, atol=1e-6)


def test_what_is_cut_is_told_by_its_name() -> None:
    layer = layer_of(None)
    names = layer.state_dict()
    assert set(names) == {"gate.weight", "experts.w13", "experts.w2"}
    assert [name for name in names if is_sharded(name)] == ["experts.w13", "experts.w2"]
    assert not is_sharded("shared_experts.w2") and is_sharded("layers.3.moe.experts.w2")
    with pytest.raises(moecomm.BadInput, match="state"):
        shard_state(names, 0, 9)
    for argument, rank, ranks in (("rank", 2, 2), ("rank", 0.0, 2), ("num_ranks", 0, 0), ("num_ranks", 0, 2.0)):
        with pytest.raises(moecomm.BadInput) as caught:
            shard_state(names, rank, ranks)
        assert caught.value.argument == argument


@pytest.mark.parametrize(
    ("argument", "make"),
    [
        ("intermediate", lambda: layer_of(None, intermediate=15)),
        ("topk", lambda: layer_of(None, topk=9)),
        ("num_experts", lambda: layer_of(moecomm.local_ranks(9)[0])),
        ("x", lambda: layer_of(None)(draw(3, 16))),
        ("topk_idx", lambda: layer_of(None, gate=None)(draw(3, HIDDEN))),
        ("topk_weights", lambda: layer_of(None)(draw(3, HIDDEN), topk_weights=torch.ones(3, TOPK))),
        ("x", lambda: layer_of(None)(draw(MOST + 1, HIDDEN))),
        ("x", lambda: layer_of(None)(draw(3, HIDDEN).long())),
        ("x", lambda: layer_of(None)(draw(3, HIDDEN).double())),
        ("x", lambda: layer_of(None)(torch.tensor(1.0))),
        ("x", lambda: layer_of(None)([1.0])),
    ],
)
def test_bad_input_names_the_argument(argument: str, make: Callable[[], Any]) -> None:
    with pytest.raises(moecomm.BadInput) as caught:
        make()
    assert caught.value.argument == argument


@pytest.mark.parametrize("payload", [torch.float32, torch.bfloat16])
def test_a_layer_whose_rows_travel_in_formats_is_one_of_rows_that_were_cast(payload: torch.dtype) -> None:
    """Also without gradients, where a layer without formats is Buffer.moe."""

    def cast(x: torch.Tensor, name: str) -> torch.Tensor:
        x = x.to(payload)
        return formats.dequantize(*formats.quantize(x, name), name, dtype=payload)

    def body(group: Any) -> None:
        x, seen = (draw(TOKENS[group.rank], HIDDEN, seed=group.rank + at).to(payload) for at in (0, 10))
        g = torch.Generator().manual_seed(group.rank)
        idx, weights = random_routing(len(x), EXPERTS, TOPK, drop=0.3, duplicates=True, generator=g)
        settings: dict[str, Any] = {"gate": None, "payload": payload}
        plain = layer_of(group, **settings)
        quantized = layer_of(group, **settings, quantize="mxfp8", grad_wire="fp8")
        found = []
        for layer, tokens, grad in ((plain, cast(x, "mxfp8"), cast(seen, "fp8")), (quantized, x, seen)):
            leaf, leaf_weights = tokens.clone().requires_grad_(), weights.clone().requires_grad_()
            out = layer(leaf, idx, leaf_weights)
            out.backward(grad)
            found.append([out.detach(), leaf.grad, leaf_weights.grad, *(p.grad for p in layer.parameters())])
        assert all(map(torch.equal, *found))
        with torch.no_grad():
            assert torch.equal(quantized(x, idx, weights), found[0][0])

    all_ranks(2, body)


def test_formats_that_a_layer_does_not_take() -> None:
    for name, word in (("quantize", "fp8_tensor"), ("grad_wire", "nvfp4"), ("quantize", "fp9")):
        with pytest.raises(moecomm.BadInput, match=name):
            layer_of("self", **{name: word})
