"""Transfers of weights in tests: placements of some ranks, a model of the weights, and what arrives of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from moecomm import Placement, formats
from moecomm.dispatch import row_hash
from moecomm.fused import quantize_channels, quantize_weights
from moecomm.testing.cases import random_placement
from moecomm.transfer import WeightTransfer
from moecomm.transfer.casts import kinds_of
from moecomm.transfer.gpu import GpuCarrier
from moecomm.transfer.records import Arriving, Leaving, Records

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
    return tensor.clone(memory_format=torch.contiguous_format).reshape(-1).view(torch.uint8)


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


def carried(cast: Any, dtype: torch.dtype) -> Iterator[dict[str, tuple[int, ...]]]:
    """Shapes of an expert's tensors: aligned to pieces of a kernel's threads and not, several matrices, empty ones."""
    yield {"w13": (130, 272), "w2": (5, 144), "w3": (2, 128, 64)}
    yield {"odd": (3, 34), "parts": (2, 13, 48), "wide": (1, 8208), "one": (1, 2)}
    if not isinstance(cast, str):
        yield {"bias": (9,), "scalar": (), "empty": (0, 3), "long": (20_001,)}
    elif formats.FORMATS[cast].bits == 8:
        yield {"odd": (3, 17), "wide": (2, 9001)}


def check_carrier(device: torch.device, cast: Any, dtype: torch.dtype, shapes: Any, experts: int) -> None:
    """A carrier of GPUs writes what Kind.apply() leaves, hashes it, tells readers, copies, and finds a flipped bit."""
    g = torch.Generator().manual_seed(11)
    kinds = kinds_of(shapes, dtype, cast)
    records = Records(kinds)
    carrier = GpuCarrier(records, device)
    weights = []
    for shape in shapes.values():
        w = (torch.randn(experts, *shape, generator=g) * 3).to(dtype)
        bits = torch.randint(0, 256, (*w.shape[1:], dtype.itemsize), generator=g, dtype=torch.uint8)
        any_bits = bits.view(dtype).view(w.shape[1:])
        w[-1] = any_bits.nan_to_num(1.0) if cast in ("fp8", "nvfp4") or not isinstance(cast, str) else any_bits
        w[0] = 0
        weights.append(w)
    there = torch.full((2, experts + 1, records.nbytes), 7, dtype=torch.uint8, device=device)
    words = torch.zeros(3, dtype=torch.int64, device=device)
    given = [w.to(device) for w in weights]
    leaving = [Leaving(there[0, nth], [w[nth] for w in given]) for nth in range(experts)]
    carrier.write(leaving, 42)
    carrier.tell([words[0:1], words[2:3]], 42 << 32 | experts)
    assert words.tolist() == [42 << 32 | experts, 0, 42 << 32 | experts]
    found = records.found(2 * experts, device)
    carrier.read([Arriving(there[0, nth], there[0, nth], found[nth]) for nth in range(experts)])
    carrier.read([Arriving(there[1, nth], there[0, nth], found[experts + nth]) for nth in range(experts)])
    hashes, here = found.tolist(), there.cpu()
    assert (here[:, experts] == 7).all()  # what lies behind
    for nth in range(experts):
        for way in range(2):
            assert records.differs(hashes[way * experts + nth], 42) is None
            assert records.differs(hashes[way * experts + nth], 41) == next(iter(shapes))
        parts = [part for kind, w in zip(kinds.values(), weights, strict=True) for part in kind.apply(w[nth])]
        for at, (piece, part) in enumerate(zip(records.pieces, parts, strict=True)):
            wanted = _bytes(part)
            assert torch.equal(here[0, nth, piece.begin : piece.end], wanted), (piece, nth)
            assert torch.equal(here[1, nth, piece.begin : piece.end], wanted), (piece, nth)
            if len(wanted):
                assert hashes[nth][0][at] == int(row_hash._by_words([row_hash._words(wanted[None].clone())]))
    last = next(piece for piece in reversed(records.pieces) if piece.end > piece.begin)
    there[0, 0, last.end - 1] ^= 128
    found.zero_()
    carrier.read([Arriving(there[0, 0], there[0, 0], found[0])])
    assert records.differs(found[0].tolist(), 42) == last.name
    into = [torch.zeros(part.shape, dtype=part.dtype, device=device) for part in records.parts(there[1, -2])]
    gaps = [torch.zeros(*part.shape, 3, dtype=part.dtype, device=device)[..., 1] for part in into]
    carrier.switch(
        [(to, part) for some in (into, gaps) for to, part in zip(some, records.parts(there[1, -2]), strict=True)]
    )
    for piece, to, gap in zip(records.pieces, into, gaps, strict=True):
        assert torch.equal(_bytes(to).cpu(), here[1, -2, piece.begin : piece.end])
        assert torch.equal(_bytes(gap), _bytes(to))
