"""A further call of its kind takes a short way, and it is the same call as the first."""

from __future__ import annotations

import gc
import os
import random
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import groupby
from typing import Any

import numpy as np
import pytest
import torch

import moecomm
from moecomm import ops
from moecomm.base import known as known_checks
from moecomm.dispatch import observers
from moecomm.dispatch.routed import Handle, Routed
from moecomm.fused import Mxfp4, Nvfp4, interleave, layer, pack_mxfp4, quantize_channels, quantize_weights
from moecomm.ops.handles import Routes
from moecomm.ops.operator import Operator

HIDDEN, EXPERTS, TOPK, TOKENS = 64, 4, 2, 6
CALLS, FILES = 5, 3  # of Python, before and after the native call
ROOT = os.path.dirname(moecomm.__file__)


def opened(**options: Any) -> moecomm.Buffer:
    sizes = {"hidden": HIDDEN, "num_experts": EXPERTS, "topk": TOPK, "max_tokens": TOKENS}
    return moecomm.Buffer("self", **sizes, backend="host", **options)


def tensors(tokens: int = TOKENS, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    g = torch.Generator().manual_seed(seed)
    ids = torch.rand(tokens, EXPERTS, generator=g).argsort(dim=1)[:, :TOPK].contiguous()
    return torch.randn(tokens, HIDDEN, generator=g).bfloat16(), ids, torch.rand(tokens, TOPK, generator=g)


def walk_of(call: Callable[[], object]) -> list[tuple[str, str]]:
    """Return the functions of moecomm that a call runs: file and name."""
    found = []

    def note(frame: Any, event: str, _: object) -> None:
        path = frame.f_code.co_filename
        if event == "call" and path.startswith(ROOT):
            found.append((os.path.relpath(path, ROOT), frame.f_code.co_name))

    sys.setprofile(note)
    try:
        call()
    finally:
        sys.setprofile(None)
    return found


@pytest.mark.parametrize("layout", ["flat", "expert", "batched"])
def test_a_repeated_call_passes_few_functions(layout: Any) -> None:
    x, ids, weights = tensors()
    with opened() as buffer:
        routed = buffer.dispatch(x, ids, weights, layout=layout)
        rows, out = routed.x, torch.empty_like(x)
        inside = buffer.empty(routed.handle)
        calls = {
            "dispatch": lambda: buffer.dispatch(x, ids, weights, layout=layout),
            "dispatch that does not wait": lambda: buffer.dispatch(x, ids, weights, layout=layout, sync=False),
            "dispatch by handle": lambda: buffer.dispatch(x, handle=routed.handle),
            "combine": lambda: buffer.combine(rows, routed.handle),
            "combine without weights": lambda: buffer.combine(rows, routed.handle, weighted=False),
            "combine of rows in the window": lambda: buffer.combine(inside, routed.handle),
            "combine into a tensor": lambda: buffer.combine(rows, routed.handle, out=out),
        }
        for name, call in calls.items():
            call()
            walk = walk_of(call)
            assert len(walk) <= CALLS, (name, walk)
            assert len({file for file, _ in walk}) <= FILES, (name, [file for file, _ in groupby(walk, lambda w: w[0])])


def test_a_repeated_layer_passes_few_functions() -> None:
    """Beside the activation, once an expert; the numbers are those of today and must not grow."""
    x, ids, weights = tensors()
    w13, w2 = torch.ones(EXPERTS, 32, HIDDEN).bfloat16(), torch.ones(EXPERTS, HIDDEN, 16).bfloat16()
    with_grads = [tensor.clone().requires_grad_() for tensor in (x, w13, w2)]
    with opened() as buffer:
        routed = moecomm.ops.dispatch(buffer, x, ids, weights)
        rows = routed.x.clone()

        def trained() -> torch.Tensor:
            return moecomm.ops.moe(buffer, with_grads[0], ids, weights, *with_grads[1:])

        calls = {
            "moe": (lambda: buffer.moe(x, ids, weights, w13, w2), 22, 8),
            "ops.dispatch": (lambda: moecomm.ops.dispatch(buffer, x, ids, weights), 40, 17),
            "ops.combine": (lambda: moecomm.ops.combine(rows, routed.handle), 40, 19),
            "ops.moe": (lambda: moecomm.ops.moe(buffer, x, ids, weights, w13, w2), 46, 17),
            "ops.moe with gradients": (trained, 46, 18),
            "ops.moe and its gradients": (lambda: trained().sum().backward(), 155, 31),
        }
        for name, (call, functions, files) in calls.items():
            for _ in range(3):
                call()
            walk = [step for step in walk_of(call) if step != ("fused/activations.py", "apply")]
            assert len(walk) <= functions, (name, len(walk), walk)
            assert len({file for file, _ in walk}) <= files, (name, [file for file, _ in groupby(walk, lambda w: w[0])])


def test_what_is_made_natively_has_every_attribute() -> None:
    x, ids, weights = tensors()
    with opened() as buffer:
        first, second = (buffer.dispatch(x, ids, weights) for _ in range(2))
        for made, like, kind in ((second, first, Routed), (second.handle, first.handle, Handle)):
            names = [name for name in kind.__slots__ if name != "__weakref__"]
            assert [type(getattr(made, name)) for name in names] == [type(getattr(like, name)) for name in names]


class NothingKnown:
    """KnownCalls that knows no call."""

    def dispatch(self, *_: object) -> tuple[None, bool]:
        return None, False

    combine = dispatch


class Known:
    """KnownCalls, and how many calls it has known."""

    def __init__(self, known: Any) -> None:
        self._known, self.calls = known, 0

    def dispatch(self, *given: Any) -> Any:
        found = self._known.dispatch(*given)
        self.calls += found[0] is not None
        return found

    def combine(self, *given: Any) -> Any:
        found = self._known.combine(*given)
        self.calls += found[0] is not None
        return found


class Rank:
    """A Buffer to which any call may be made; what each returned or raised."""

    def __init__(self, known: bool, **options: Any) -> None:
        self.buffer = opened(**options)
        self.other = opened()
        rounds: Any = self.buffer.rounds
        self.known: Any = Known(rounds.known_calls) if known else NothingKnown()
        rounds.known_calls = self.known
        self.kept: list[Routed] = []

    def call(self, choose: random.Random) -> object:
        try:
            return self._combine(choose) if self.kept and choose.random() < 0.5 else self._dispatch(choose)
        except moecomm.MoecommError as error:
            return type(error).__name__, str(error)

    def _dispatch(self, choose: random.Random) -> object:
        x, ids, weights = tensors(choose.choice((0, 1, TOKENS, TOKENS)), choose.randrange(3))
        given: dict[str, Any] = {"x": x, "topk_idx": ids, "topk_weights": weights}
        given["layout"] = choose.choice(("flat", "expert", "batched"))
        changes: list[Callable[[], dict[str, Any]]] = [
            lambda: {"topk_weights": None},
            lambda: {"topk_idx": ids.int()},
            lambda: {"x": x.to(torch.float8_e4m3fn), "scales": torch.ones(len(x), 1)},
            lambda: {"x": torch.randn(len(x), 2 * HIDDEN).bfloat16()[:, :HIDDEN].copy_(x)},
            lambda: {"x": x.clone().requires_grad_()},
            lambda: {"topk_weights": weights.clone().requires_grad_()},
            lambda: {"x": x.double()},
            lambda: {"x": None},
            lambda: {"x": x.view(torch.int16).numpy()},
            lambda: {"topk_idx": ids.numpy(), "topk_weights": weights.numpy()},
            lambda: {"topk_idx": torch.where(ids == 0, choose.choice((-1, EXPERTS)), ids)},
            lambda: {"topk_weights": torch.where(weights < 0.1, torch.nan, weights), "check_weights": True},
            lambda: {"topk_idx": ids[:, :1]},
            lambda: {"quantize": "fp8"},
            lambda: {"quantize": "fp8", "scale_format": "ue8m0", "scale_layout": "column"},
            lambda: {"expert_alignment": choose.choice((1, 4))},
            lambda: {"num_sms": choose.choice((1, 2, [1], 0))},
            lambda: {"sync": choose.choice((True, False, 1))},
            lambda: {"max_rows": choose.choice((0, 1, 12, 10**20, -1, True, 2.0))},
            lambda: {"max_rows": 12, "sync": False},
            lambda: {"overflow": choose.choice(("error", "chunks", "drop", "none"))},
        ]
        for change in choose.sample(changes, choose.choice((0, 0, 1, 1, 2))):
            given |= change()
        if self.kept and choose.random() < 0.3:
            handles = [choose.choice(self.kept).handle, choose.choice(self.kept).handle, self._of_another(), "handle"]
            given["handle"] = choose.choice(handles)
            if choose.random() < 0.9:
                given |= {"topk_idx": None, "topk_weights": None}
        routed = self.buffer.dispatch(**given)
        names = ("x", "scales", "tokens_per_expert", "num_rows", "src", "topk_idx", "topk_weights", "dropped")
        read = [getattr(routed, name) for name in choose.sample(names, 4)]
        if choose.random() < 0.2:
            read.append(routed.row_weights)
        self.kept.append(routed)
        while len(self.kept) > choose.randrange(1, 8):
            self.kept.pop(choose.randrange(len(self.kept)))
        used = int(torch.as_tensor(routed.num_rows))
        return [self._used(routed, tensor, used) for tensor in read]

    @staticmethod
    def _used(routed: Routed, tensor: Any, used: int) -> object:
        """A tensor, without the rows that are not initialized."""
        if tensor is None or routed.handle.layout == "batched" or len(tensor) in (1, EXPERTS):
            return None if tensor is None else (tuple(tensor.shape), str(tensor.dtype))
        return torch.as_tensor(tensor)[:used].clone()

    def _of_another(self) -> Handle:
        return self.other.dispatch(*tensors()).handle

    def _combine(self, choose: random.Random) -> object:
        routed = choose.choice(self.kept)
        handle, layout = routed.handle, routed.handle.layout
        g = torch.Generator().manual_seed(choose.randrange(3))
        dtype = choose.choice((torch.bfloat16, torch.bfloat16, torch.float32))
        y = torch.randn(handle.y_shape, generator=g).to(dtype)
        tokens = handle.num_tokens
        given: dict[str, Any] = {"y": y, "handle": handle}
        rows = handle.y_shape[:-1]
        changes: list[Callable[[], dict[str, Any]]] = [
            lambda: {"y": self.buffer.empty(handle, dtype).copy_(y)},
            lambda: {"out": torch.empty(tokens, HIDDEN, dtype=dtype)},
            lambda: {"out": torch.empty(tokens, 2 * HIDDEN, dtype=dtype)[:, :HIDDEN]},
            lambda: {"out": torch.empty(tokens, HIDDEN, dtype=dtype).requires_grad_()},
            lambda: {"out": torch.empty(tokens, HIDDEN).numpy()},
            lambda: {"out": y.flatten(0, -2)[:tokens]},
            lambda: {"bias": torch.ones(HIDDEN, dtype=dtype)},
            lambda: {"bias": torch.ones(tokens, HIDDEN)},
            lambda: {"bias": torch.ones(HIDDEN + 1)},
            lambda: {"weight_grads": torch.ones(*rows, TOPK) if layout == "flat" else torch.ones(rows)},
            lambda: {"topk_weights": torch.ones(tokens, TOPK)},
            lambda: {"y": y.clone().requires_grad_()},
            lambda: {"y": y[..., :-1]},
            lambda: {"y": y.float().numpy()},
            lambda: {"weighted": choose.choice((False, True, 0))},
            lambda: {"wire": choose.choice(("exact", "other", dtype))},
            lambda: {"handle": choose.choice((self._of_another(), None))},
        ]
        for change in choose.sample(changes, choose.choice((0, 0, 1, 1, 2))):
            given |= change()
        found = self.buffer.combine(**given)
        if (out := given.get("out")) is not None:
            assert (found[0] if isinstance(found, tuple) else found) is out
        return [torch.as_tensor(part).clone() for part in (found if isinstance(found, tuple) else (found,))]

    def counts(self) -> object:
        rounds = self.buffer.rounds
        entries = self.buffer.flight_record()["entries"]
        calls = [(e["profiling_name"], e["collective_seq_id"], e["round"], e["state"]) for e in entries]
        return calls[-3:], rounds.turn.made, rounds.turn.failed, rounds.flight.steps


def equal(a: Any, b: Any) -> bool:
    if isinstance(a, (list, tuple)):
        return type(a) is type(b) and len(a) == len(b) and all(map(equal, a, b))
    if isinstance(a, torch.Tensor):
        as_bytes = [tensor.contiguous().flatten().view(torch.uint8) for tensor in (a, b)]
        return a.dtype == b.dtype and a.shape == b.shape and torch.equal(*as_bytes)
    return bool(a == b)


@pytest.mark.filterwarnings("ignore:a window of")
@pytest.mark.parametrize("window_bytes", [None, 1 << 13])  # of the small one most outputs are copied
def test_known_calls_are_as_the_first(window_bytes: int | None) -> None:
    short, long = Rank(True, window_bytes=window_bytes), Rank(False, window_bytes=window_bytes)
    with short.buffer, long.buffer, short.other, long.other, np.errstate(all="ignore"):
        for seed in range(400):
            found, wanted = (rank.call(random.Random(seed)) for rank in (short, long))
            assert equal(found, wanted), (seed, found, wanted)
            assert short.counts() == long.counts(), seed
        assert short.known.calls > 40


INNER = 32


def weights_of(kind: str, experts: int = EXPERTS) -> tuple[Any, Any]:
    """w13 and w2 of one of the formats."""
    g = torch.Generator().manual_seed(0)
    shapes = (experts, 2 * INNER, HIDDEN), (experts, HIDDEN, INNER)
    if kind in ("mxfp4", "packed", "nvfp4"):
        block, of = (16, Nvfp4) if kind == "nvfp4" else (32, Mxfp4)
        found = []
        for e, rows, columns in shapes:
            data = torch.randint(0, 256, (e, rows, columns // 2), generator=g).to(torch.uint8)
            scales = torch.randint(120, 125, (e, rows, columns // block), generator=g).to(torch.uint8)
            if of is Nvfp4:
                scales = (scales / 120).to(torch.float8_e4m3fn)
            found.append(Mxfp4(data, scales) if of is Mxfp4 else Nvfp4(data, scales, torch.rand(e, generator=g) / 10))
        if kind == "packed":
            return pack_mxfp4(found[0]), pack_mxfp4(found[1])
        return found[0], found[1]
    w13, w2 = (torch.randn(shape, generator=g).bfloat16() / 8 for shape in shapes)
    if kind == "interleaved":
        return interleave(w13), w2
    casts: dict[str, Callable[[torch.Tensor], Any]] = {
        "fp8": quantize_weights,
        "fp8_token": lambda w: quantize_channels(w, torch.float8_e4m3fn),
        "int8_token": lambda w: quantize_channels(w, torch.int8),
    }
    cast = casts.get(kind, lambda w: w)
    return cast(w13), cast(w2)


KINDS = ("bf16", "interleaved", "fp8", "fp8_token", "int8_token", "mxfp4", "packed", "nvfp4")


def changed(part: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """Weights, the last tensor of which is changed."""
    made: Any = type(part)
    return made(*part[:-1], change(part[-1])) if isinstance(part, tuple) else change(part)


def resized(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy whose storage is too small."""
    found = tensor.clone()
    found.untyped_storage().resize_(tensor.element_size())
    return found


class LayerRank:
    """A Buffer to which any call of a layer or of an operator may be made.

    `both` chooses what ranks have to agree on, `mine` the rest.
    """

    def __init__(self, group: Any = "self", experts: int = EXPERTS, **options: Any) -> None:
        sizes = {"hidden": HIDDEN, "num_experts": EXPERTS, "topk": TOPK, "max_tokens": TOKENS, "timeout_s": 20}
        self.buffer = moecomm.Buffer(group, **(sizes | options), backend="host")
        self.weights = {kind: weights_of(kind, experts) for kind in KINDS}
        self.experts = experts  # of this rank
        self.kind = "bf16"  # of layers
        self.wire: str | None = None
        self.kept: list[ops.Handle] = []
        self.outputs: list[tuple[torch.Tensor, torch.Tensor]] = []

    def call(self, both: random.Random, mine: random.Random) -> object:
        calls = [self._moe, self._moe, self._moe, self._operator, self._dispatch, self._combine, self._again]
        before, call = self.buffer.rounds.turn.made, both.choice(calls)
        if both.random() < 0.05:
            self.kind, self.wire = both.choice(KINDS), both.choice((None, None, "rows", "fp8"))
        try:
            with [torch.enable_grad, torch.no_grad, torch.inference_mode][both.choice((0, 0, 0, 1, 2))]():
                found: object = call(both, mine)
        except (moecomm.MoecommError, RuntimeError) as error:  # torch's, of tensors of inference_mode
            text = re.sub("0x[0-9a-f]+", "address", str(error))
            found = (type(error).__name__, text.replace(self.buffer.name, "buffer"))
        assert all(equal(now, then) for now, then in self.outputs), "a later call has changed an output"
        return found, self.buffer.rounds.turn.made - before

    def counts(self) -> object:
        rounds, stats = self.buffer.rounds, self.buffer.stats()
        entries = self.buffer.flight_record()["entries"]
        calls = [(e["profiling_name"], e["collective_seq_id"], e["round"], e["state"]) for e in entries]
        return calls[-3:], rounds.turn.made, rounds.turn.failed, rounds.flight.steps, stats.rows_per_expert

    def free(self) -> int:
        """Bytes of the window, while nothing that the calls returned is kept."""
        self.kept.clear()
        self.outputs.clear()
        gc.collect()
        return int(self.buffer.rounds.memory.arena.largest_free)

    def _tokens(self, mine: random.Random) -> dict[str, Any]:
        x, ids, weights = tensors(mine.choice((0, 1, TOKENS, TOKENS)), mine.randrange(3) + 3 * self.buffer.rank)
        return {"x": x, "topk_idx": ids, "topk_weights": weights}

    def _routing(self, given: dict[str, Any], mine: random.Random) -> list[Callable[[], dict[str, Any]]]:
        x, ids, weights = given["x"], given["topk_idx"], given["topk_weights"]
        return [
            lambda: {"topk_weights": None},
            lambda: {"topk_idx": ids.int()},
            lambda: {"topk_idx": torch.where(ids == 0, mine.choice((-1, -1, EXPERTS)), ids)},
            lambda: {"topk_idx": torch.cat([ids, ids], 1)[:, ::2]},
            lambda: {"topk_weights": weights.to(mine.choice((torch.float64, torch.bfloat16)))},
            lambda: {"topk_weights": torch.cat([weights, weights], 1)[:, ::2]},
            lambda: {"x": torch.cat([x, x], 1)[:, :HIDDEN]},
            lambda: {"x": torch.cat([x, x], 1)[:, ::2]},
            lambda: {"x": x.clone().requires_grad_()},
            lambda: {"topk_weights": weights.clone().requires_grad_()},
            lambda: {"x": mine.choice((x.float(), x[:, :-1], x.flatten(), None, x.view(torch.int16).numpy()))},
            lambda: {"topk_idx": ids.numpy(), "topk_weights": weights.numpy()},
        ]

    def _layer(self, both: random.Random, mine: random.Random) -> dict[str, Any]:
        kind = self.kind
        w13, w2 = self.weights[kind]
        given = self._tokens(mine) | {"w13": w13, "w2": w2, "interleaved": kind == "interleaved"}
        x, experts, plain = given["x"], self.experts, kind in ("bf16", "interleaved")
        values = w2 if plain else w2[0]
        given["wire"] = self.wire if both.random() < 0.9 else both.choice((None, "exact", "rows", "fp8"))
        changes = [
            *self._routing(given, mine),
            lambda: {"bias": torch.full((HIDDEN,), 0.5).bfloat16()},
            lambda: {"bias": torch.full((len(x), HIDDEN), 0.5).bfloat16()},
            lambda: {"bias": torch.full((HIDDEN,), 0.5).bfloat16().requires_grad_()},
            lambda: {"bias": mine.choice((torch.zeros(HIDDEN), torch.zeros(1, HIDDEN).bfloat16()))},
            lambda: {"w13_bias": torch.ones(experts, 2 * INNER).to(mine.choice((torch.bfloat16, torch.float32)))},
            lambda: {"w2_bias": torch.ones(experts, HIDDEN, requires_grad=mine.random() < 0.5)},
            lambda: {"w2_bias": torch.ones(experts + 1, HIDDEN)},
            lambda: {"activation": mine.choice(("geglu", "geglu_tanh", "swigluoai", "swiglustep", "relu", 1))},
            lambda: {
                "activation": mine.choice(("swiglu", "swigluoai")),
                "activation_limit": mine.choice((7.0, 1.0, True, "x")),
            },
            lambda: {"interleaved": mine.choice((True, 1, 0, 2, not given["interleaved"]))},
            lambda: {"max_rows": mine.choice((TOKENS * TOPK * 4, TOKENS * TOPK * 4, 4, 0, 1, True, 2.0, -1))},
            lambda: {"num_sms": mine.choice((1, 2, True, 0, [1]))},
            lambda: {"check_weights": mine.choice((True, 1, 2))},
            lambda: {"check_weights": True, "topk_weights": torch.full((len(x), TOPK), torch.nan)},
            lambda: {"fused": mine.choice((False, False, 0, "x"))},
            lambda: {"overflow": mine.choice(("error", "chunks", "none"))},
            lambda: {"overflow": "drop", "max_rows": 4, "dropped": torch.zeros(1, dtype=torch.int32)},
            lambda: {"dropped": torch.zeros(1, dtype=torch.int32)},
            lambda: {"balance": "replicate"},
            lambda: {"w2": changed(w2, lambda part: part.clone())},
            lambda: {"w2": changed(w2, lambda part: part.clone().copy_(part.float() * 0.5))},
            lambda: {"w2": changed(w2, lambda part: part[:, : part.shape[1] - 1] if part.ndim > 1 else part)},
            lambda: {"w2": changed(w2, lambda part: part.float().requires_grad_())},
            lambda: {"w2": changed(w2, resized)},
            lambda: {"w13": tuple(w13) if isinstance(w13, tuple) else w13.clone().requires_grad_()},
            lambda: {"w13": w13[0] if isinstance(w13, tuple) else w13.float().numpy()},
            lambda: {"w13": Mxfp4(*w13[:2]) if isinstance(w13, tuple) else (w13, w13)},
        ]
        if mine.random() < 0.2:  # in place
            values.view(torch.uint8)[0, 0, :2].copy_(values.view(torch.uint8)[0, 1, :2].clone())
        for change in mine.sample(changes, mine.choice((0, 0, 0, 1, 1, 2))):
            given |= change()
        return given

    def _moe(self, both: random.Random, mine: random.Random) -> object:
        given = self._layer(both, mine)
        tokens = len(x) if getattr(x := given["x"], "ndim", 0) else TOKENS
        outs: list[Any] = [
            torch.empty(tokens, HIDDEN).bfloat16(),
            torch.empty(tokens, 2 * HIDDEN).bfloat16()[:, :HIDDEN],
            torch.empty(tokens, HIDDEN).bfloat16().requires_grad_(),
            torch.empty(tokens, HIDDEN),
            torch.empty(tokens + 1, HIDDEN).bfloat16(),
            x,
        ]
        out = mine.choice(outs) if mine.random() < 0.3 else None
        versions = [t._version for t in (out, x) if isinstance(t, torch.Tensor) and not t.is_inference()]
        try:
            found = self.buffer.moe(out=out, **given)
        finally:
            after = [t._version for t in (out, x) if isinstance(t, torch.Tensor) and not t.is_inference()]
            steps = [b - a for a, b in zip(versions, after, strict=True)]
        assert out is None or found is out
        return [self._keep(torch.as_tensor(found)), torch.tensor(steps), given.get("dropped")]

    def _keep(self, found: torch.Tensor) -> torch.Tensor:
        now = found.detach()
        then = now.clone()
        self.outputs.append((now, then))
        del self.outputs[:-3]
        return then

    def _operator(self, both: random.Random, mine: random.Random) -> object:
        given = self._layer(both, mine)
        out = ops.moe(self.buffer if mine.random() < 0.5 else self.buffer.name, **given)
        return [self._keep(out), *self._gradients(out, given.values(), both)]

    def _gradients(self, out: torch.Tensor, given: Any, both: random.Random, times: int = 1) -> list[Any]:
        parts = [part for value in given for part in (value if isinstance(value, tuple) else (value,))]
        leaves = [t for t in parts if isinstance(t, torch.Tensor) and t.requires_grad and t.is_leaf]
        found: list[Any] = [out.requires_grad, out.grad_fn is None]
        for nth in range(times * out.requires_grad):
            of = torch.autograd.grad(out, leaves, torch.full_like(out, 0.5), allow_unused=True, retain_graph=not nth)
            found += [None if one is None else one.clone() for one in of]
        return found

    def _dispatch(self, both: random.Random, mine: random.Random) -> object:
        given = self._tokens(mine)
        words: list[dict[str, Any]] = [{}, {}, {"quantize": "fp8"}, {"quantize": "mxfp8"}, {"expert_alignment": 4}]
        given |= {"layout": both.choice(("flat", "expert", "batched"))} | both.choice(words)
        room = TOKENS * TOPK * 4
        changes = [
            *self._routing(given, mine),
            lambda: {"max_rows": mine.choice((room, 2, True, -1, 1.0))},
            lambda: {"zero_padding": mine.choice((False, 0, 3))},
            lambda: {"num_sms": mine.choice((1, 0, True))},
            lambda: {"overflow": mine.choice(("chunks", "error", "x"))},
            lambda: {"overflow": "drop", "max_rows": 4},
            lambda: {"dequantize": False},
            lambda: {"layer": mine.choice((0, 0.0, -1, True))},
        ]
        for change in mine.sample(changes, mine.choice((0, 0, 1, 1, 2))):
            given |= change()
        found = ops.dispatch(self.buffer, **given)
        if isinstance(found.handle, ops.Handle):
            self.kept = [*self.kept[-4:], found.handle]
        used = int(found.num_rows)
        rows = None if given["layout"] == "batched" else found.x.detach()[:used].clone()
        counts = [found.tokens_per_expert, found.num_rows, rows, found.dropped]
        if found.x.requires_grad and both.random() < 0.5 and given.get("zero_padding", True):
            counts += self._gradients(ops.combine(found.x, found.handle), given.values(), both, both.choice((1, 2)))
        return counts

    def _handle(self, both: random.Random, mine: random.Random) -> Any:
        if not self.kept:
            return None
        handle = self.kept[both.randrange(len(self.kept))]
        handle = handle._replace(
            graph=None, row_weights=None if handle.row_weights is None else handle.row_weights.detach()
        )
        memory = handle.memory
        changes: list[Callable[[], dict[str, Any]]] = [
            lambda: {"memory": memory.clone()},
            lambda: {"memory": torch.cat([memory.new_zeros(16), memory])[16:]},
            lambda: {"memory": torch.cat([memory.new_zeros(1), memory])[1:]},
            lambda: {"memory": memory[:-1].clone()},
            lambda: {"memory": memory.view(torch.int8)},
            lambda: {"max_rows": handle.max_rows + 1},
            lambda: {"num_tokens": handle.num_tokens + 1},
            lambda: {"buffer": "none"},
            lambda: {"memory": torch.stack([memory, memory], 1)[:, 0]},
        ]
        return handle._replace(**mine.choice(changes)()) if mine.random() < 0.4 else handle

    def _combine(self, both: random.Random, mine: random.Random) -> object:
        handle = self._handle(both, mine)
        if handle is None:
            return None
        shape = (handle.max_rows, HIDDEN) if handle.layout != "batched" else (self.experts, handle.max_rows, HIDDEN)
        g = torch.Generator().manual_seed(mine.randrange(3))
        y = torch.randn(shape, generator=g).to(both.choice((torch.bfloat16, torch.bfloat16, torch.float32)))
        given: dict[str, Any] = {"y": y, "handle": handle}
        given |= both.choice(({}, {}, {"weighted": False}, {"wire": "exact"}, {"wire": "rows"}, {"wire": "fp8"}))
        changes: list[Callable[[], dict[str, Any]]] = [
            lambda: {"y": y.clone().requires_grad_()},
            lambda: {"y": mine.choice((y[..., :-1], y.double(), y.float().numpy(), None, "y"))},
            lambda: {"weighted": mine.choice((1, 2))},
            lambda: {"grad_wire": mine.choice(("fp8", "x"))},
            lambda: {"y": torch.stack([y, y], -1)[..., 0]},
        ]
        for change in mine.sample(changes, mine.choice((0, 0, 1, 1))):
            given |= change()
        out = ops.combine(**given)
        return [self._keep(out), *self._gradients(out, given.values(), both, 2)]

    def _again(self, both: random.Random, mine: random.Random) -> object:
        handle = self._handle(both, mine)
        if handle is None:
            return None
        x = torch.randn(
            handle.num_tokens, HIDDEN, generator=torch.Generator().manual_seed(mine.randrange(3))
        ).bfloat16()
        x = mine.choice((x, x, x, x.clone().requires_grad_(), x.float(), x[:, :-1], torch.stack([x, x], -1)[..., 0]))
        out = ops.dispatch_again(x, handle)
        return [None if not handle.zero_padding else out.detach().clone(), *self._gradients(out, [x], both, 2)]


@contextmanager
def nothing_known(rank: LayerRank) -> Iterator[None]:
    """Calls in this block, of this rank alone, take the long way."""
    rounds: Any = rank.buffer.rounds
    layer._forms.pop(rounds, None)
    kept, rounds.known_calls = rounds.known_calls, NothingKnown()
    for route in rounds.parts.get(Routes, Routes()).by_kind.values():
        route.moved.clear()
    known_checks._checked.cache_clear()
    short, Operator.plainly = Operator.plainly, lambda self, *given: self.registered(*given)  # type: ignore[method-assign]
    try:
        yield
    finally:
        rounds.known_calls, Operator.plainly = kept, short  # type: ignore[method-assign]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("options", [{}, {"window_bytes": 1 << 14}, {"capacity_factor": 0.5}], ids=str)
def test_known_layers_and_operators_are_as_the_first(options: dict[str, Any]) -> None:
    short, long = LayerRank(**options), LayerRank(**options)
    short.buffer.rounds.known_calls = known = Known(short.buffer.rounds.known_calls)  # type: ignore[assignment]
    with short.buffer, long.buffer, np.errstate(all="ignore"):
        for seed in range(200):
            choose = lambda: (random.Random(seed), random.Random(f"rank 0 {seed}"))  # noqa: E731, B023
            found = short.call(*choose())
            with nothing_known(long):
                wanted = long.call(*choose())
            assert equal(found, wanted), (seed, found, wanted)
            assert equal(short.counts(), long.counts()), (seed, short.counts(), long.counts())
        assert known.calls > 50, known.calls
        assert short.free() == long.free()


@pytest.mark.parametrize("argument", ["x", "topk_weights", "w2_bias", "bias", "out"])
@pytest.mark.parametrize("kind", KINDS)
def test_layers_refuse_gradients_each_time(kind: str, argument: str) -> None:
    """Before a round, where the argument is not that of the combine alone."""
    x, ids, weights = tensors()
    w13, w2 = weights_of(kind)
    given: dict[str, Any] = {"x": x, "topk_idx": ids, "topk_weights": weights, "w13": w13, "w2": w2}
    given |= {"w2_bias": torch.ones(EXPERTS, HIDDEN), "bias": x[0].clone(), "out": torch.empty_like(x)}
    given["interleaved"] = kind == "interleaved"
    wrong = given | {argument: given[argument].clone().requires_grad_()}
    with opened() as buffer:
        made = []
        for _ in range(3):
            before = buffer.rounds.turn.made
            with pytest.raises(moecomm.BadInput, match=f"{argument}: got a tensor that requires grad"):
                buffer.moe(**wrong)
            made.append(buffer.rounds.turn.made - before)
            with torch.no_grad():
                buffer.moe(**wrong)
            buffer.moe(**given)
        assert made == [int(argument == "out")] * 3


def test_a_pair_without_scales_is_refused_each_time() -> None:
    x, ids, weights = tensors()
    w13, w2 = weights_of("bf16")
    with opened() as buffer:
        for _ in range(3):
            for argument, given in {"w13": ((w13, None), w2), "w2": (w13, (w2, None))}.items():
                with pytest.raises(moecomm.BadInput, match=f"{argument}: got NoneType"):
                    buffer.moe(x, ids, weights, *given)
            buffer.moe(x, ids, weights, w13, w2)


@pytest.mark.parametrize("of_layer", [True, False])
def test_backward_passes_take_batches_of_gradients(of_layer: bool) -> None:
    """A round for each, as the operators make that torch's dispatcher runs."""
    x, ids, weights = tensors()
    experts = weights_of("bf16")
    with opened() as buffer:
        x.requires_grad_()
        if of_layer:
            out = ops.moe(buffer, x, ids, weights, *experts)
        else:
            routed = ops.dispatch(buffer, x, ids, weights)
            out = ops.combine(routed.x, routed.handle)
        grads = torch.randn(3, *out.shape, generator=torch.Generator().manual_seed(0)).bfloat16()
        each = [torch.autograd.grad(out, x, grad, retain_graph=True)[0] for grad in grads]
        (found,) = torch.autograd.grad(out, x, grads, is_grads_batched=True)
        assert equal(list(found), each)


@contextmanager
def observed(seen: list[object]) -> Iterator[None]:
    with observers.observing(lambda rounds, topk_idx, topk_weights: seen.append(topk_idx)):
        yield


def test_observers_see_known_calls() -> None:
    x, ids, weights = tensors()
    seen: list[object] = []
    with opened() as buffer:
        for _ in range(2):
            buffer.dispatch(x, ids, weights)
        with observed(seen):
            buffer.dispatch(x, ids, weights)
        buffer.dispatch(x, ids, weights)
    assert len(seen) == 1 and seen[0] is ids


@pytest.mark.parametrize("max_rows", ["x", -1, 1.5])
def test_a_number_of_rows_is_checked_along_a_handle_too(max_rows: Any) -> None:
    """Each time, not only in the first call of a kind; a good one changes nothing."""
    x, ids, weights = tensors()
    with opened() as buffer:
        handle = buffer.dispatch(x, ids, weights).handle
        for _ in range(2):
            with pytest.raises(moecomm.BadInput, match="max_rows"):
                buffer.dispatch(x, handle=handle, max_rows=max_rows)
            same = buffer.dispatch(x, handle=handle).x
            assert torch.equal(buffer.dispatch(x, handle=handle, max_rows=TOKENS * TOPK).x, same)
