"""Tensors of the caller's: what their memory holds, what is written over, and what autograd is told of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import moecomm
from moecomm import ops
from moecomm.fused import grouped_gemm

T, H, E, K = 4, 32, 4, 2


@pytest.fixture(scope="module")
def buffer() -> Iterator[moecomm.Buffer]:
    sizes: dict[str, Any] = {"hidden": H, "num_experts": E, "topk": K, "max_tokens": 8, "dtype": torch.float32}
    with moecomm.Buffer(None, **sizes, backend="host") as opened:
        yield opened


def drawn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def routing() -> dict[str, torch.Tensor]:
    return {"topk_idx": torch.tensor([[0, 1], [2, 3], [1, 3], [0, 2]]), "topk_weights": drawn(T, K).abs()}


def experts() -> dict[str, torch.Tensor]:
    return {"w13": drawn(E, 2 * 16, H, seed=1), "w2": drawn(E, H, 16, seed=2)}


def shortened(tensor: torch.Tensor) -> torch.Tensor:
    """The same tensor, whose storage has since lost its last byte."""
    tensor = tensor.clone()
    tensor.untyped_storage().resize_(tensor.nbytes - 1)
    return tensor


def combined(buffer: moecomm.Buffer, **given: Any) -> Any:
    routed = buffer.dispatch(drawn(T, H), **routing(), layout="expert")
    if "own" in given:
        given["topk_weights"] = given.pop("own")
    return buffer.combine(**{"y": drawn(T * K, H), "handle": routed.handle, **given})


def multiplied(buffer: moecomm.Buffer, **given: Any) -> Any:
    operands = {"x": drawn(8, 16).bfloat16(), "w": drawn(E, 8, 16).bfloat16()}
    return grouped_gemm(**{**operands, "tokens_per_expert": torch.full((E,), 2, dtype=torch.int32), **given})


def dispatched(buffer: moecomm.Buffer, **given: Any) -> torch.Tensor:
    routed = buffer.dispatch(**{"x": drawn(T, H), **routing(), **given})
    return torch.cat([routed.x, routed.row_weights.unsqueeze(1)], dim=1)


def whole(buffer: moecomm.Buffer, **given: Any) -> Any:
    return buffer.moe(**{"x": drawn(T, H), **routing(), **experts(), **given})


def dispatched_op(buffer: moecomm.Buffer, **given: Any) -> torch.Tensor:
    routed = ops.dispatch(buffer, **{"x": drawn(T, H), **routing(), **given})
    return torch.cat([routed.x, routed.row_weights.unsqueeze(1)], dim=1)


def combined_op(buffer: moecomm.Buffer, **given: Any) -> torch.Tensor:
    routed = ops.dispatch(buffer, drawn(T, H), **routing(), max_rows=T * K)
    handle = routed.handle
    if "row_weights" in given:
        handle = handle._replace(row_weights=given.pop("row_weights"))
    return ops.combine(**{"y": drawn(T * K, H), "handle": handle, **given})


def whole_op(buffer: moecomm.Buffer, **given: Any) -> torch.Tensor:
    return ops.moe(buffer, **{"x": drawn(T, H), **routing(), **experts(), **given})


READ: list[tuple[Callable[..., Any], str, torch.Tensor]] = [
    (dispatched, "x", drawn(T, H)),
    (dispatched, "scales", drawn(T, 2)),
    *((dispatched, name, tensor) for name, tensor in routing().items()),
    (combined, "y", drawn(T * K, H)),
    (combined, "bias", drawn(T, H)),
    (combined, "bias", drawn(H)),
    (combined, "weight_grads", drawn(T * K)),
    (combined, "own", drawn(T, K)),
    *((whole, name, tensor) for name, tensor in {"x": drawn(T, H), **routing(), **experts(), "bias": drawn(H)}.items()),
    (multiplied, "x", drawn(8, 16).bfloat16()),
    (multiplied, "w", drawn(E, 8, 16).bfloat16()),
    (multiplied, "tokens_per_expert", torch.full((E,), 2, dtype=torch.int32)),
    (dispatched_op, "x", drawn(T, H)),
    (dispatched_op, "topk_idx", routing()["topk_idx"]),
    (dispatched_op, "topk_weights", routing()["topk_weights"]),
    (combined_op, "y", drawn(T * K, H)),
    (combined_op, "row_weights", drawn(T * K)),
    *((whole_op, name, tensor) for name, tensor in {"x": drawn(T, H), **routing(), **experts()}.items()),
]
CASES = pytest.mark.parametrize(("call", "name", "tensor"), READ, ids=lambda at: getattr(at, "__name__", str(at)[:12]))


@CASES
def test_a_storage_that_has_become_too_short(
    buffer: moecomm.Buffer, call: Callable[..., Any], name: str, tensor: torch.Tensor
) -> None:
    want = call(buffer, **{name: tensor})  # a plan is there, which must not take the other
    with pytest.raises(moecomm.BadInput, match="storage") as caught:
        call(buffer, **{name: shortened(tensor)})
    assert caught.value.argument == {"own": "topk_weights"}.get(name, name)
    again = call(buffer, **{name: tensor})
    for mine, theirs in zip(*(got if isinstance(got, tuple) else (got,) for got in (again, want)), strict=True):
        assert torch.equal(mine, theirs)


@CASES
def test_a_view_with_the_negative_bit(
    buffer: moecomm.Buffer, call: Callable[..., Any], name: str, tensor: torch.Tensor
) -> None:
    """It has the numbers of its memory with the other sign: as `imag` of a conjugate has."""
    want = call(buffer, **{name: tensor})
    view = torch._neg_view(-tensor)
    assert view.is_neg() and torch.equal(view, tensor)
    if call is multiplied:  # one tensor, or several, of which a copy would have to be kept
        with pytest.raises(moecomm.BadInput, match="negative bit"):
            call(buffer, **{name: view})
        return
    got = call(buffer, **{name: view})
    for mine, theirs in zip(*(x if isinstance(x, tuple) else (x,) for x in (got, want)), strict=True):
        assert torch.equal(mine, theirs)


@pytest.mark.parametrize(("call", "shape"), [(combined, (T, H)), (whole, (T, H)), (multiplied, (8, 8))])
def test_out(buffer: moecomm.Buffer, call: Callable[..., Any], shape: tuple[int, int]) -> None:
    want = call(buffer)
    out = torch.zeros(shape, dtype=want.dtype)
    leaf = torch.ones(shape, requires_grad=True)
    loss = (leaf * out).sum()  # keeps `out` for the gradient of the leaf
    assert call(buffer, out=out) is out and torch.equal(out, want)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
    with torch.inference_mode():
        assert torch.equal(call(buffer, out=torch.zeros(shape, dtype=want.dtype)), want)
    with pytest.raises(moecomm.BadInput, match="out: got a storage"):
        call(buffer, out=shortened(out))
    with pytest.raises(moecomm.BadInput, match="out: got a view with the negative bit"):
        call(buffer, out=torch._neg_view(out))
    wants_grad = torch.zeros(shape, dtype=want.dtype, requires_grad=True)
    with pytest.raises(moecomm.BadInput, match="out: got a tensor that requires grad"):
        call(buffer, out=wants_grad)
    with torch.no_grad():
        assert torch.equal(call(buffer, out=wants_grad), want)


@pytest.mark.parametrize("call", [combined, whole])
def test_out_over_what_is_read_meanwhile(buffer: moecomm.Buffer, call: Callable[..., Any]) -> None:
    memory = torch.zeros(4096)
    out, beside = memory[: T * H].view(T, H), memory[H : H + T * H].view(T, H)
    over: dict[str, list[torch.Tensor]] = {"bias": [beside, memory[8 : 8 + H]]}
    if call is combined:
        over["own"] = [memory[4 : 4 + T * K].view(T, K)]
        over["weight_grads"] = [memory[4 : 4 + T * K]]
        over["y"] = [memory[-4 - T * K * H : -4].view(T * K, H)]
        far = memory[-T * H :].view(T, H)
    for name, tensors in over.items():
        for tensor in tensors:
            call(buffer, **{name: tensor.clone()}, out=out)
            with pytest.raises(moecomm.BadInput, match="out: got memory of"):
                call(buffer, **{name: tensor}, out=far if name == "y" else out)
    bias = drawn(T, H, seed=5)
    out.copy_(bias)
    assert torch.equal(call(buffer, bias=out, out=out), call(buffer, bias=bias)), "a sum over its own bias"


@pytest.mark.parametrize(
    ("call", "names"),
    [
        (dispatched, ("x", "topk_weights")),
        (combined, ("y", "bias", "weight_grads", "own")),
        (whole, ("x", "topk_weights", "w13", "w2", "bias")),
    ],
)
def test_a_gradient_that_would_be_lost(
    buffer: moecomm.Buffer, call: Callable[..., Any], names: tuple[str, ...]
) -> None:
    tensors = {name: tensor for other, name, tensor in READ if other is call}
    for name in names:
        wants_grad = tensors[name].clone().requires_grad_()
        with torch.no_grad():
            torch.testing.assert_close(
                call(buffer, **{name: wants_grad}), call(buffer, **{name: tensors[name]}), rtol=0, atol=0
            )
        for given in (wants_grad, torch.nn.Parameter(wants_grad), wants_grad * 1):  # also by plans that are known
            with pytest.raises(moecomm.BadInput, match=r"requires grad; want moecomm\.ops") as raised:
                call(buffer, **{name: given})
            assert raised.value.argument == {"own": "topk_weights"}.get(name, name)
        with torch.inference_mode():
            call(buffer, **{name: tensors[name]})


def test_out_over_the_tables_of_the_handle() -> None:
    sizes: dict[str, Any] = {"hidden": 4, "num_experts": E, "topk": K, "max_tokens": 8, "dtype": torch.float32}
    with moecomm.Buffer(None, **sizes, backend="host") as small:
        routed = small.dispatch(drawn(1, 4), torch.tensor([[0, 2]]), layout="expert", sync=False)
        y, want = drawn(*routed.x.shape), routed.row_weights.clone()
        for table in (routed.row_weights, routed.src.view(torch.float32).flatten()):
            with pytest.raises(moecomm.BadInput, match="out: got memory of the handle"):
                small.combine(y, routed.handle, out=table[:4].view(1, 4))
        assert torch.equal(routed.row_weights, want)
        torch.testing.assert_close(small.combine(y, routed.handle), y[:1] + y[1:2])


def test_out_over_a_bias_of_another_dtype() -> None:
    sizes: dict[str, Any] = {"hidden": H, "num_experts": E, "topk": K, "max_tokens": 8, "dtype": torch.bfloat16}
    with moecomm.Buffer(None, **sizes, backend="host") as narrow:
        routed = narrow.dispatch(drawn(T, H).bfloat16(), **routing(), layout="expert")
        bias = drawn(T, H)
        over = bias.view(torch.bfloat16).view(-1)[: T * H].view(T, H)  # where it begins, with as many columns
        with pytest.raises(moecomm.BadInput, match="out: got memory of bias"):
            narrow.combine(routed.x, routed.handle, bias=bias, out=over)


def test_a_product_over_its_operands() -> None:
    x, counts = drawn(16, 16).bfloat16(), torch.full((E,), 4, dtype=torch.int32)
    for name, given in {"x": (x, drawn(E, 16, 16).bfloat16()), "w": (x, x.view(1, 16, 16).expand(1, 16, 16))}.items():
        counted = counts if name == "x" else torch.tensor([16], dtype=torch.int32)
        with pytest.raises(moecomm.BadInput, match="out: got memory of"):
            grouped_gemm(*given, counted, out=x)


def _replaced(tensor: torch.Tensor, values: torch.Tensor, how: str) -> torch.Tensor:
    """`values` in the place of an output of the window."""
    if how == "data":
        tensor.data = values
    elif how == "set_":
        tensor.set_(values)
    elif how == "storage":
        tensor.set_(values.untyped_storage(), values.storage_offset(), values.shape, values.stride())
    elif how == "another tensor over the window":
        other = torch.empty(0)
        other.set_(tensor)
        return other.copy_(values)
    else:
        tensor.copy_(values)
    return tensor


@pytest.mark.parametrize("how", ["in place", "data", "set_", "storage", "another tensor over the window"])
@pytest.mark.parametrize("layout", ["flat", "expert", "batched"])
def test_an_output_whose_memory_is_replaced(buffer: moecomm.Buffer, layout: Any, how: str) -> None:
    """Rows count as they are when combine is called.  Weights that are not those that it reads are named."""
    for arrived in (False, True):
        routed = buffer.dispatch(drawn(T, H), **routing(), layout=layout)
        values = drawn(*routed.handle.y_shape, seed=7)
        want = buffer.combine(values.clone(), routed.handle)
        y = routed.x if arrived else buffer.empty(routed.handle)
        assert torch.equal(buffer.combine(_replaced(y, values, how), routed.handle), want)
    if layout == "flat":
        return
    replaced = how in ("data", "set_", "storage")
    weights, plain = routed.row_weights, buffer.combine(values, routed.handle, weighted=False)
    weights = _replaced(weights, 2 * weights, how)
    assert torch.equal(buffer.combine(values, routed.handle, weighted=False), plain)
    if not replaced:
        assert torch.equal(buffer.combine(values, routed.handle), 2 * want)
        return
    with pytest.raises(moecomm.BadInput, match="row_weights: got a tensor whose memory has been replaced"):
        buffer.combine(values, routed.handle)
    own = {"topk_weights": routing()["topk_weights"]}
    assert torch.equal(buffer.combine(values, routed.handle, **own), want)


@pytest.mark.parametrize("how", ["in place", "data"])
def test_weights_that_are_changed_after_a_dispatch_in_chunks(how: str) -> None:
    sizes: dict[str, Any] = {"hidden": H, "num_experts": E, "topk": K, "max_tokens": 8, "dtype": torch.float32}
    with moecomm.Buffer(None, **sizes, backend="host", capacity_factor=0.2) as small:
        routed = small.dispatch(drawn(T, H), **routing(), layout="expert")
        want = small.combine(routed.x, routed.handle)
        _replaced(routed.row_weights, 2 * routed.row_weights, how)
        with pytest.raises(moecomm.BadInput, match="row_weights: got a tensor"):
            small.combine(routed.x, routed.handle)
        with torch.inference_mode():
            routed = small.dispatch(drawn(T, H), **routing(), layout="expert")
            assert torch.equal(small.combine(routed.x, routed.handle), want)
            assert torch.equal(routed.row_weights, routed.row_weights.clone())
            assert torch.equal(small.combine(routed.x, routed.handle), want)
