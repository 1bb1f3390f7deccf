"""A further call of its kind takes a short way, and it is the same call as the first."""

from __future__ import annotations

import os
import random
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import groupby
from typing import Any

import numpy as np
import pytest
import torch

import moecomm
from moecomm.dispatch import observers
from moecomm.routed import Handle, Routed

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
    if isinstance(a, list):
        return len(a) == len(b) and all(map(equal, a, b))
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
