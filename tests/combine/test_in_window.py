"""Rows that moecomm itself makes for a combine lie in the window where peers read them there, with the same results."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch

import moecomm
from moecomm.base.choices import Layout
from moecomm.combine import in_window
from moecomm.combine.options import Options
from moecomm.fused import Fp8, layer
from moecomm.testing import LayerCase, LocalBuffers, random_layer
from moecomm.testing.prepare import prepare_combine

from ..keeper import window_for
from ..little_room import agreeing_windows, fixed_windows, late_windows

SIZES: list[dict[str, Any]] = [
    {"ranks": 1, "hidden": 32, "intermediate": 16, "num_experts": 4, "topk": 2, "max_tokens": 40},
    {"ranks": 4, "hidden": 64, "intermediate": 24, "num_experts": 16, "topk": 8, "max_tokens": 33},
    {"ranks": 3, "hidden": 144, "intermediate": 64, "num_experts": 11, "topk": 3, "max_tokens": 9},
]
WIRES = (None, torch.bfloat16, "rows", "fp8")
NEVER = 1 << 60
LAYOUTS: tuple[Layout, ...] = ("flat", "expert", "batched")
ROUND: dict[str, Any] = {"hidden": 64, "num_experts": 8, "topk": 3, "max_tokens": 20}


def opened(sizes: dict[str, Any], **more: Any) -> LocalBuffers:
    of_buffer = {name: size for name, size in sizes.items() if name != "intermediate"}
    return LocalBuffers(**of_buffer, dtype=torch.bfloat16, backend="host", timeout_s=20, **more)


@pytest.fixture
def least(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Set the bytes from which on rows of a call lie in the window."""

    def put(nbytes: int) -> None:
        monkeypatch.setattr(in_window, "_LEAST", nbytes)
        layer._forms.clear()  # which know the number of before

    return put


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[torch.Tensor]:
    """The rows that experts of layers make, as they come."""
    found: list[torch.Tensor] = []
    experts = layer.apply_experts

    def noted(*given: Any, **how: Any) -> torch.Tensor:
        found.append(experts(*given, **how))
        return found[-1]

    monkeypatch.setattr(layer, "apply_experts", noted)
    return found


def inside(buffers: list[moecomm.Buffer], rows: list[torch.Tensor]) -> list[bool]:
    """Return of each of these rows whether they are in a window, and forget them."""
    found = [any(b.rounds.session.context.in_heap(y.data_ptr()) for b in buffers) for y in rows if y.numel()]
    rows.clear()
    return found


def outs_of(ranks: LocalBuffers, case: LayerCase, **more: Any) -> list[torch.Tensor]:
    return ranks.moe([{**case.call(rank), **more} for rank in range(len(case.x))])


RANKS: dict[str, tuple[dict[str, Any], dict[str, Any], bool]] = {  # sizes, more of the Buffer, weights in FP8
    "one rank": (SIZES[0], {}, False),
    "ranks": (SIZES[1], {}, False),
    "domains": (SIZES[1], {"domain_ranks": 2}, False),
    "verified": (SIZES[1], {"verify_every": 1}, False),
    "FP8": (SIZES[2], {}, True),
}


@pytest.mark.parametrize(
    ("name", "wire"),
    [(name, wire) for name in RANKS for wire in WIRES if (name, wire) != ("domains", "rows")],
)
def test_experts_of_a_layer_write_where_peers_read(name: str, wire: Any, least: Any, made: list[torch.Tensor]) -> None:
    sizes, more, fp8 = RANKS[name]
    with opened(sizes, **more) as ranks:
        for seed in range(6):
            case = random_layer(seed, **sizes, dtype=torch.bfloat16, fp8=fp8, experts=True)
            case.wire = wire
            least(0)
            outs = outs_of(ranks, case)
            assert all(each == (wire != "fp8") for each in inside(ranks.buffers, made))
            least(NEVER)
            again = outs_of(ranks, case)
            assert all(each == (wire == "rows") for each in inside(ranks.buffers, made))
            for rank, (out, same) in enumerate(zip(outs, again, strict=True)):
                assert torch.equal(out, same)
                if wire != "fp8":  # whose bound is another
                    case.check(rank, out)


def test_few_rows_are_copied(made: list[torch.Tensor]) -> None:
    """Experts of other sizes than those of the bound run in the same Buffer, and none of them keeps memory."""
    with moecomm.Buffer("self", hidden=1024, num_experts=2, topk=1, max_tokens=2000) as buffer:
        x, ids = torch.randn(2000, 1024).bfloat16(), torch.zeros(2000, 1, dtype=torch.int64)
        w13, w2 = torch.randn(2, 16, 1024).bfloat16(), torch.randn(2, 1024, 8).bfloat16()
        opened_with = buffer.nbytes
        for tokens in (1, 2000, 1023, 1024):
            for _ in range(2):
                buffer.moe(x[:tokens], ids[:tokens], None, w13, w2)
                assert inside([buffer], made) == [tokens >= 1024]
                assert buffer.rounds.memory.used == 0 and buffer.nbytes == opened_with


@pytest.fixture(params=["grows", "late", "agrees", "fixed"])
def windows(request: pytest.FixtureRequest) -> Iterator[str]:
    """Take windows that grow, and windows that do not."""
    how = {"grows": nullcontext, "late": late_windows, "agrees": agreeing_windows, "fixed": fixed_windows}
    with how[request.param]():
        yield request.param


@pytest.mark.filterwarnings("ignore:a window of:UserWarning")
@pytest.mark.parametrize("wire", [None, torch.bfloat16])
def test_layers_beside_outputs_that_fill_the_window(
    wire: Any, windows: str, least: Any, made: list[torch.Tensor]
) -> None:
    """Where the tables of the dispatch have no room, rows are not in the window either; results are the same."""
    sizes, kept, tables = SIZES[1], [], []
    of_buffer = {name: size for name, size in sizes.items() if name != "intermediate"}
    with opened(sizes, window_bytes=window_for(2, {**of_buffer, "dtype": torch.bfloat16})) as ranks:
        case = random_layer(3, **sizes, dtype=torch.bfloat16)
        case.wire = wire
        calls = [{k: case.call(rank)[k] for k in ("x", "topk_idx", "topk_weights")} for rank in range(4)]
        least(NEVER)
        wanted, seen = outs_of(ranks, case), set()
        made.clear()
        least(0)
        for _ in range(40):
            arrived = ranks.dispatch(calls)
            kept += [(here.x[: int(here.num_rows)], here.x[: int(here.num_rows)].clone()) for here in arrived]
            tables.append(arrived)
            assert all(map(torch.equal, outs_of(ranks, case), wanted))
            seen |= set(inside(ranks.buffers, made))
        assert all(torch.equal(rows, copied) for rows, copied in kept)
    assert True in seen
    if windows in ("grows", "fixed"):  # the others have no room until all peers have mapped it
        assert (False in seen) == (windows == "fixed")


def check_rows_in_fp8(layout: Layout, wire: Any, where: str) -> None:
    """Rows that a combine makes of FP8 lie `where` peers read them: "cpu" or "cuda"."""
    x, ids = torch.randn(20, 64).bfloat16().to(where), torch.rand(20, 8).topk(3).indices.to(where)
    with moecomm.Buffer("self", **ROUND, device=where) as buffer:
        routed = buffer.dispatch(x, ids, layout=layout, sync=True)
        data = torch.randn(routed.handle.y_shape).to(where, torch.float8_e4m3fn)
        y = Fp8(data, torch.rand(*data.shape[:-1], 1).to(where))
        combining = prepare_combine(buffer, y, routed.handle, wire=wire)
        reads = wire == "rows" or (wire != "fp8" and (layout == "flat" or where == "cpu"))
        assert buffer.rounds.session.context.in_heap(combining.args.y) == reads
        del combining
        found = buffer.combine(y, routed.handle, wire=wire)
        wide = (y.data.float() * y.scales).bfloat16()
        assert torch.equal(found, buffer.combine(wide, routed.handle, wire=wire))
        for bad in ("FP8", ["rows"], data.cpu().view(torch.uint8).numpy()):
            with pytest.raises(moecomm.BadInput, match="wire: got "):
                buffer.combine(y, routed.handle, wire=bad)  # type: ignore[arg-type]


LAYOUTS_AND_WIRES = [
    (layout, wire) for layout in LAYOUTS for wire in (*WIRES, "exact") if (layout, wire) != ("flat", "rows")
]


@pytest.mark.parametrize(("layout", "wire"), LAYOUTS_AND_WIRES)
def test_rows_in_fp8_are_dequantized_where_peers_read(layout: Layout, wire: Any, least: Any) -> None:
    least(0)
    check_rows_in_fp8(layout, wire, "cpu")


@pytest.mark.parametrize("on_cpu", [True, False])
def test_where_peers_read_in_place(on_cpu: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """GPUs add up rows before they travel, except those of `flat` and those that travel unsummed."""
    with moecomm.Buffer("self", **ROUND) as buffer, moecomm.Buffer("self", **ROUND, wire="int8") as casting:
        for each in (buffer, casting):
            each.rounds.on_cpu = on_cpu
        for layout in LAYOUTS:
            for wire in (*WIRES, "exact"):
                found = in_window.reads_in_place(buffer.rounds, layout, Options(wire=wire), torch.bfloat16)
                assert found == (wire == "rows" or (wire != "fp8" and (on_cpu or layout == "flat")))
                least = in_window.least_bytes(buffer.rounds, layout, Options(wire=wire))
                assert least == ((0 if wire == "rows" else in_window._LEAST) if found else math.inf)
            assert not in_window.reads_in_place(casting.rounds, layout, Options(), torch.bfloat16)


def check_rows_in_use(layout: Layout, dtype: torch.dtype, where: str) -> None:
    """A combine with wire="rows" copies the rows in use alone to `where` peers read them: "cpu" or "cuda"."""
    g = torch.Generator().manual_seed(0)
    x, ids = torch.randn(20, 64, generator=g).to(where, dtype), torch.rand(20, 8, generator=g).topk(3).indices.to(where)
    with moecomm.Buffer("self", **ROUND, dtype=dtype, device=where) as buffer:
        routed = buffer.dispatch(x, ids, layout=layout, expert_alignment=8 if layout == "expert" else 1, sync=False)
        wanted = buffer.combine(routed.x, routed.handle, wire="rows")
        filled = [buffer.empty(routed.handle).fill_(7) for _ in range(8)]
        del filled
        if layout == "expert":  # rows of longer ones
            rows = torch.full((*routed.handle.y_shape[:-1], 128), 9.0, dtype=dtype, device=where)[..., :64]
            places, counts = torch.arange(len(rows), device=where), routed.num_rows
        else:
            rows = torch.full(routed.handle.y_shape, 9.0, dtype=dtype, device=where)
            places, counts = torch.arange(rows.shape[1], device=where), routed.tokens_per_expert.unsqueeze(1)
        used = places < counts
        rows[used] = routed.x[used]
        combining = prepare_combine(buffer, rows, routed.handle, wire="rows")
        copied = combining.inputs.y
        assert buffer.rounds.session.context.in_heap(copied.data_ptr())
        assert torch.equal(copied[used].view(torch.uint8), rows[used].view(torch.uint8))  # of padding, too
        assert (copied[~used] == 7).all() and not used.all()
        del combining, copied
        assert torch.equal(buffer.combine(rows, routed.handle, wire="rows"), wanted)


@pytest.mark.parametrize("layout", ["expert", "batched"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_only_rows_in_use_are_copied_there(layout: Layout, dtype: torch.dtype) -> None:
    """`batched` has room for many more, which a combine would read and write for nothing."""
    check_rows_in_use(layout, dtype, "cpu")


@pytest.mark.filterwarnings("ignore:a window of:UserWarning")
@pytest.mark.parametrize("layout", ["expert", "batched"])
def test_rows_of_handles_whose_tables_lie_outside_are_copied_there(layout: Layout) -> None:
    """So are rows of operators, whose handles are made of tensors."""
    x, ids, weights = torch.randn(20, 64).bfloat16(), torch.rand(20, 8).topk(3).indices, torch.rand(20, 3)
    with fixed_windows(), moecomm.Buffer("self", **ROUND, window_bytes=120_000) as buffer:
        wanted, kept = None, []
        for _ in range(12):
            routed = buffer.dispatch(x, ids, weights, layout=layout)
            sent = moecomm.ops.dispatch(buffer, x, ids, weights, layout=layout)
            found = buffer.combine(routed.x.clone(), routed.handle, wire="rows")
            wanted = found if wanted is None else wanted
            assert torch.equal(found, wanted)
            assert torch.equal(moecomm.ops.combine(sent.x.clone(), sent.handle, wire="rows"), wanted)
            kept.append(routed)
        assert isinstance(kept[-1].handle.block, torch.Tensor)
