"""Transfers of weights in tests: placements of some ranks, a model of the weights, and what arrives of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from moecomm import Placement, formats
from moecomm.fused import quantize_channels, quantize_weights
from moecomm.testing.cases import random_placement
from moecomm.transfer import WeightTransfer

EXPERTS = 6


CASTS = (None, torch.float32, torch.float16, "fp8", "fp8_token", "int8_token", "int8_group", "mxfp8", "nvfp4", "mxfp4")


Tensors = dict[str, tuple[torch.Tensor, ...]]


def beside(ranks: Sequence[int], of: int, seed: int, slots: int) -> Placement:
    """A random placement of some of `of` ranks."""
    drawn = random_placement(seed, ranks=len(ranks), num_experts=EXPERTS, slots=slots)
    held: list[list[int]] = [[] for _ in range(of)]
    for rank, row in zip(ranks, drawn.experts.tolist(), strict=True):
        held[rank] = row
    return Placement(held, num_experts=EXPERTS)


def whole_cast(w: torch.Tensor, cast: Any) -> tuple[torch.Tensor, ...]:
    """Cast the tensors of all experts by the specification."""
    if cast is None or isinstance(cast, torch.dtype):
        return (w if cast is None else w.to(cast),)
    if cast == "fp8":
        return tuple(quantize_weights(w))
    if cast in ("fp8_token", "int8_token"):
        return tuple(quantize_channels(w, torch.int8 if cast == "int8_token" else torch.float8_e4m3fn))
    factors = w.float().flatten(1).abs().amax(1).clamp(min=1e-30) / 2688
    globals_ = [{"global_scale": 2688 / (2688 * float(f))} if cast == "nvfp4" else {} for f in factors]
    if cast == "nvfp4":
        amax = w.float().flatten(1).abs().amax(1).clamp(min=1e-30)
        given = torch.full_like(amax, 2688.0) / amax
        globals_ = [{"global_scale": given[n : n + 1]} for n in range(len(w))]
    cuts = [formats.quantize(m.flatten(0, -2), cast, **g) for m, g in zip(w, globals_, strict=True)]
    values, scales = (torch.stack([cut[n] for cut in cuts]) for n in range(2))
    values, scales = (t.view(*w.shape[:-1], -1) for t in (values, scales))
    return (values, scales, given.reciprocal()) if cast == "nvfp4" else (values, scales)


class Model:
    """The weights of all experts, which change from step to step, and what arrives of them."""

    def __init__(self, shapes: dict[str, tuple[int, ...]], dtype: torch.dtype, cast: Any, seed: int) -> None:
        self.shapes, self.dtype, self.cast, self.seed = shapes, dtype, cast, seed

    def weights(self, step: int) -> dict[str, torch.Tensor]:
        g = torch.Generator().manual_seed(1000 * self.seed + step)
        return {name: torch.randn(EXPERTS, *shape, generator=g).to(self.dtype) for name, shape in self.shapes.items()}

    def given(self, step: int, held: Sequence[int]) -> dict[str, torch.Tensor] | None:
        """The tensors of a trainer; slots without an expert hold anything."""
        if all(expert < 0 for expert in held):
            return None
        rows = torch.tensor(list(held)).clamp(min=0)
        return {name: w[rows] for name, w in self.weights(step).items()}

    def arrived(self, step: int) -> Tensors:
        return {name: whole_cast(w, self.cast) for name, w in self.weights(step).items()}

    def room(self, held: Sequence[int]) -> Tensors:
        """The tensors of a rank that serves, before the first weights."""
        return {
            name: tuple(torch.zeros(len(held), *part.shape[1:], dtype=part.dtype) for part in parts)
            for name, parts in self.arrived(0).items()
        }

    def check(self, found: Tensors, held: Sequence[int], step: int) -> None:
        for name, parts in self.arrived(step).items():
            for mine, whole in zip(found[name], parts, strict=True):
                for slot, expert in enumerate(held):
                    want = whole[expert] if expert >= 0 else torch.zeros_like(whole[0])
                    assert torch.equal(_bytes(mine[slot]), _bytes(want)), (name, slot, expert)


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def passed(held: Sequence[int], tensors: Tensors) -> Tensors | None:
    """`into=` of a rank: None if it has no slot in use."""
    return None if all(expert < 0 for expert in held) else tensors


APART = Placement([[0, 1, 2], [3, 4, 5], [], []]), Placement([[], [], [0, 1, 2, 3], [3, 4, 5, 0]])


SHAPES: dict[str, tuple[int, ...]] = {"w13": (6, 40), "w2": (40, 3)}


def opened(group: Any, **changes: Any) -> WeightTransfer:
    how: dict[str, Any] = {"shapes": SHAPES, "source": APART[0], "target": APART[1], "backend": "host", "timeout_s": 20}
    return WeightTransfer(group, **{**how, **changes})


@contextmanager
def transfers(group: Any, model: Model, source: Placement, target: Placement) -> Iterator[Any]:
    """Yield a call that stages and commits a step, and one that checks whose weights are there."""
    rank = group.rank() if callable(group.rank) else group.rank
    have, want = source.held[rank], target.held[rank]
    found = model.room(want)
    how: dict[str, Any] = {"source": source, "target": target, "backend": "host", "timeout_s": 10}
    with WeightTransfer(group, model.shapes, **how, dtype=model.dtype, cast=model.cast) as transfer:
        yield transfer, found, have, want


def once(transfer: WeightTransfer, name: str) -> None:
    """Interrupt the next call of a method."""

    def interrupted(*given: Any, **named: Any) -> Any:
        delattr(transfer, name)
        raise KeyboardInterrupt

    setattr(transfer, name, interrupted)


def error_of(call: Any, *given: Any) -> BaseException | None:
    """Make a call, and return its error."""
    try:
        call(*given)
    except BaseException as error:  # noqa: BLE001 - a test looks at it
        return error
    return None
