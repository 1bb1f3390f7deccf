"""The recorder sees what dispatches see, on CPU ranks: ids, weights, layers and steps; and what it leaves out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import moecomm
from moecomm import Buffer, nn, ops
from moecomm.errors import BadInput
from moecomm.router import random_routing
from moecomm.routing import Recorded, RoutingRecorder
from moecomm.routing.recorder import file_of

from ..backends.conftest import run_ranks
from ..conftest import Ranks
from ..live import ROOM_S

SIZES: dict[str, Any] = {"hidden": 16, "num_experts": 8, "topk": 3, "max_tokens": 12, "backend": "host"}


def routing(seed: int, tokens: int, dtype: torch.dtype = torch.int64) -> tuple[torch.Tensor, torch.Tensor]:
    ids, weights = random_routing(tokens, 8, 3, drop=0.3, generator=torch.Generator().manual_seed(seed))
    return ids.to(dtype), weights


def rows(tokens: int) -> torch.Tensor:
    return torch.ones(tokens, 16, dtype=torch.bfloat16)


def calls(found: Recorded) -> list[tuple[str, int, list[list[int]]]]:
    """(layer, step, ids) of each call."""
    ids = torch.split(found.topk_idx, found.records[:, 2].tolist())
    return [(found.layers[r[0]], r[1], part.tolist()) for r, part in zip(found.records.tolist(), ids, strict=True)]


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
def test_every_way_to_dispatch_is_recorded(dtype: torch.dtype, tmp_path: Path) -> None:
    """On two ranks: eager rounds of any kind, with -1 and without tokens; repeats along a handle are not recorded."""
    tokens = [(5, 0, 12, 3, 4), (2, 7, 0, 1, 4)]
    seen: list[list[tuple[torch.Tensor, torch.Tensor]]] = [
        [routing(10 * rank + n, count, dtype) for n, count in enumerate(tokens[rank])] for rank in range(2)
    ]

    def body(group: Any) -> None:
        x = [(rows(len(ids)), ids, weights) for ids, weights in seen[group.rank]]
        experts = torch.zeros(4, 64, 16, dtype=torch.bfloat16), torch.zeros(4, 16, 32, dtype=torch.bfloat16)
        with Buffer(group, **SIZES) as buffer:
            routed = buffer.dispatch(*x[0])
            buffer.combine(routed.x, routed.handle)
            buffer.dispatch(x[0][0], handle=routed.handle)
            buffer.dispatch_end(buffer.dispatch_begin(*x[1], layout="flat"))
            buffer.moe(*x[2], *experts)
            ops.combine((sent := ops.dispatch(buffer, *x[3])).x, sent.handle)
            buffer.dispatch(x[4][0], x[4][1].numpy())

    with RoutingRecorder(tmp_path / "run.routing", weights=True, model="m") as recorder:
        assert run_ranks(2, body) == [None, None]
    assert sorted(recorder.files) == [tmp_path / "run-rank0.routing", tmp_path / "run-rank1.routing"]
    for rank in range(2):
        found = Recorded.load(tmp_path / f"run-rank{rank}.routing")
        assert (found.experts, found.topk, found.rank, found.ranks, found.model) == (8, 3, rank, 2, "m")
        assert found.notes == {"moecomm": moecomm.__version__, "torch": str(torch.__version__)}
        assert calls(found) == [("buffer0", step, ids.tolist()) for step, (ids, _) in enumerate(seen[rank])]
        weights = [weights for _, weights in seen[rank]]
        weights[4] = torch.ones_like(weights[4])  # none were given
        assert found.topk_weights is not None and torch.equal(found.topk_weights, torch.cat(weights))


def test_dispatches_in_chunks_and_with_drops_are_recorded_as_they_are_called(tmp_path: Path) -> None:
    ids = torch.zeros(12, 3, dtype=torch.int64)  # all of the first expert: there is no room for so many rows
    how: dict[str, Any] = {**SIZES, "capacity_factor": 0.4}

    def body(group: Any) -> list[int]:
        experts = torch.zeros(4, 64, 16, dtype=torch.bfloat16), torch.zeros(4, 16, 32, dtype=torch.bfloat16)
        with Buffer(group, **how) as buffer:
            chunked: Any = buffer.dispatch(rows(12), ids).handle
            buffer.moe(rows(12), ids, None, *experts)
            sent: Any = ops.dispatch(buffer, rows(12), ids)
            dropped: Any = buffer.dispatch(rows(12), ids, overflow="drop").dropped
            return [len(chunked.chunks), len(sent.handle.chunks), int(dropped)]

    with RoutingRecorder(tmp_path / "x") as recorder:
        for found in run_ranks(2, body):
            assert min(found) > 1  # it was as the test has it
    for file in recorder.files:
        assert calls(Recorded.load(file)) == [("buffer0", step, ids.tolist()) for step in range(4)]


def test_a_backward_pass_is_not_recorded(tmp_path: Path) -> None:
    ids, weights = routing(1, 6)
    with Buffer(**{**SIZES, "dtype": torch.float32}) as buffer, RoutingRecorder(tmp_path / "x") as recorder:
        x = torch.randn(6, 16, requires_grad=True)
        w13, w2 = torch.randn(8, 64, 16), torch.randn(8, 16, 32)
        ops.moe(buffer, x, ids, weights, w13, w2).sum().backward()  # type: ignore[no-untyped-call]
        sent = ops.dispatch(buffer, x, ids, weights)
        ops.combine(sent.x, sent.handle).sum().backward()  # type: ignore[no-untyped-call]
    assert len(calls(Recorded.load(recorder.files[0]))) == 2


class _Model(torch.nn.Module):
    def __init__(self, group: Any) -> None:
        super().__init__()
        sizes = {**SIZES, "intermediate": 8}
        self.blocks = torch.nn.ModuleList(nn.ExpertParallel(group, **sizes, gate=None, seed=n) for n in range(2))

    def forward(self, x: torch.Tensor, ids: list[torch.Tensor]) -> torch.Tensor:
        for block, chosen in zip(self.blocks, ids, strict=True):
            x = x + block(x, chosen)
        return x


@pytest.mark.parametrize("grad", [False, True])
def test_layers_of_a_model_are_recorded_under_their_names(grad: bool, tmp_path: Path) -> None:
    """Both layers share one Buffer, whose other rounds are not recorded."""

    def body(group: Any) -> list[Any]:
        model = _Model(group)
        seen = [[routing(100 * group.rank + 10 * step + n, 4)[0] for n in range(2)] for step in range(3)]
        path = tmp_path / f"{group.rank}" / "x"
        with RoutingRecorder(path, watch=model) as recorder, torch.set_grad_enabled(grad):
            for step in seen:
                out = model(torch.ones(4, 16), step)
                if grad:
                    out.sum().backward()
            model.blocks[0].open().dispatch(torch.ones(4, 16), seen[0][0])  # type: ignore[operator]
        model(torch.ones(4, 16), seen[0])  # the hooks are gone
        assert [len(block._forward_hooks) + len(block._forward_pre_hooks) for block in model.blocks] == [0, 0]
        model.blocks[0].open().close()  # type: ignore[operator]
        return [recorder.files, seen]

    for rank, (files, seen) in enumerate(run_ranks(2, body)):
        assert files == [tmp_path / f"{rank}" / f"x-rank{rank}"]
        assert calls(Recorded.load(files[0])) == [
            (f"blocks.{n}", step, ids.tolist()) for step, chosen in enumerate(seen) for n, ids in enumerate(chosen)
        ]


def test_some_buffers_and_several_layers_of_one(tmp_path: Path) -> None:
    ids = [routing(n, 2)[0] for n in range(5)]
    with Buffer(**SIZES) as one, Buffer(**SIZES) as two:
        with (
            RoutingRecorder(tmp_path / "one", watch=one) as of_one,
            RoutingRecorder(tmp_path / "all", layers=2) as of_all,
            RoutingRecorder(tmp_path / "none", watch=()) as of_none,
        ):
            for n, buffer in enumerate((one, two, one, one, two)):
                buffer.dispatch(rows(2), ids[n])
        one.dispatch(rows(2), ids[0])
    assert [name[0] for name in calls(Recorded.load(of_one.files[0]))] == ["buffer0"] * 3
    found = calls(Recorded.load(of_all.files[0]))
    names = ["buffer0.0", "buffer1.0", "buffer0.1", "buffer0.0", "buffer1.1"]
    assert [name for name, *_ in found] == names and [step for _, step, _ in found] == [0, 0, 0, 1, 0]
    assert [chosen for *_, chosen in found] == [i.tolist() for i in ids]
    assert of_none.files == [] and not (tmp_path / "none").exists()


def test_other_shapes_and_rounds_that_are_refused_are_not_recorded(tmp_path: Path) -> None:
    ids = routing(1, 2)[0]
    with Buffer(**SIZES) as buffer, Buffer(**{**SIZES, "num_experts": 4}) as other:
        with RoutingRecorder(tmp_path / "x") as recorder:
            beyond = [ids.new_tensor([[0, 1, 2], [3, 4, bad]]) for bad in (8, -2)]
            for wrong in (ids[:, :2], ids.float(), ids.view(-1), ids + 100, None, *beyond):
                with pytest.raises(BadInput, match="topk_idx"):
                    buffer.dispatch(rows(2), wrong)
            buffer.dispatch(rows(2), ids)
            other.dispatch(rows(2), ids.clamp(max=3))
        assert calls(Recorded.load(recorder.files[0])) == [("buffer0", 0, ids.tolist())]


def test_a_program_of_ones_own_adds_what_it_routes(tmp_path: Path) -> None:
    ids, weights = routing(5, 6, torch.int32)
    with RoutingRecorder(tmp_path / "x", model="mixtral-8x7b", watch=(), weights=True) as recorder:
        recorder.add("a", ids[:, :2], weights[:, :2].double())
        recorder.add("b", ids[:2, :2].long().numpy())
        recorder.add("a", ids[:0, :2])
        ids.fill_(7)  # the recorder has its own copy
    ids = routing(5, 6)[0]
    found = Recorded.load(tmp_path / "x")
    assert (found.experts, found.topk, found.rank, found.ranks) == (8, 2, 0, 1)
    wanted = [("a", 0, ids[:, :2].tolist()), ("b", 0, ids[:2, :2].tolist()), ("a", 1, [])]
    assert calls(found) == wanted
    assert found.topk_weights is not None
    assert torch.equal(found.topk_weights, torch.cat([weights[:, :2], torch.ones(2, 2)]))


def _adds(rank: int, group: Any, path: str) -> list[str]:
    with RoutingRecorder(path, experts=4, watch=()) as recorder:
        recorder.add("a", torch.full((rank + 1, 1), rank))
    dist.barrier(group)  # a rank that has ended would fail the start of the other
    return [str(file) for file in recorder.files]


def test_processes_write_a_file_each(ranks: Ranks, tmp_path: Path) -> None:
    assert ranks.run(2, _adds, str(tmp_path / "x.y")) == [[str(tmp_path / f"x-rank{rank}.y")] for rank in range(2)]
    for rank in range(2):
        assert calls(Recorded.load(tmp_path / f"x-rank{rank}.y")) == [("a", 0, [[rank]] * (rank + 1))]


def test_recording_ends_after_so_many_tokens(tmp_path: Path) -> None:
    with RoutingRecorder(tmp_path / "x", experts=4, watch=(), max_tokens=5) as recorder:
        for tokens in (3, 2, 1, 0):
            recorder.add("a", torch.zeros(tokens, 1, dtype=torch.int64))
    assert Recorded.load(recorder.files[0]).records[:, 2].tolist() == [3, 2]


@pytest.mark.parametrize("weights", [False, True])
def test_a_rank_of_which_nothing_was_recorded_has_an_empty_file(weights: bool, tmp_path: Path) -> None:
    with RoutingRecorder(tmp_path / "x", experts=4, watch=(), max_tokens=5, weights=weights) as recorder:
        recorder.add("a", torch.zeros(6, 2, dtype=torch.int64))
    found = Recorded.load(recorder.files[0])
    assert (found.tokens, found.topk, found.layers) == (0, 2, ()) and (found.topk_weights is not None) == weights


def test_layers_of_a_compiled_model_are_recorded_by_their_buffer(tmp_path: Path) -> None:
    sizes = {**SIZES, "intermediate": 8}
    model = torch.nn.Sequential(*(nn.ExpertParallel("self", **sizes, seed=n) for n in range(2)))
    buffer, _ = (layer.open() for layer in model)  # type: ignore[operator]
    compiled = torch.compile(model, backend="eager")
    with pytest.raises(BadInput, match="compiled module"):
        RoutingRecorder(tmp_path / "x", watch=compiled)
    x = torch.randn(4, 16)
    with RoutingRecorder(tmp_path / "eager", watch=model):
        model(x)
    with RoutingRecorder(tmp_path / "compiled", watch=buffer, layers=2):
        compiled(x)
    eager, found = (calls(Recorded.load(tmp_path / name)) for name in ("eager", "compiled"))
    assert [name for name, *_ in eager] == ["0", "1"] and [name for name, *_ in found] == ["buffer0.0", "buffer0.1"]
    assert [ids for *_, ids in eager] == [ids for *_, ids in found]
    buffer.close()


def test_many_experts_have_ids_of_32_bits(tmp_path: Path) -> None:
    with RoutingRecorder(tmp_path / "x", experts=1 << 17, watch=()) as recorder:
        recorder.add("a", torch.tensor([[(1 << 17) - 1, -1]]))
    assert Recorded.load(recorder.files[0]).topk_idx.tolist() == [[(1 << 17) - 1, -1]]


def test_an_error_of_the_program_keeps_what_was_recorded(tmp_path: Path) -> None:
    def program() -> None:
        with RoutingRecorder(tmp_path / "x", experts=4, watch=()) as recorder:
            recorder.add("a", torch.zeros(1, 1, dtype=torch.int64))
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        program()
    assert Recorded.load(tmp_path / "x").tokens == 1


def test_shrunk_ranks_keep_their_file_and_the_ids_of_callers(tmp_path: Path) -> None:
    """Rank 0 leaves; rank 1 goes on as rank 0 with the ids that experts have always had."""
    ids = torch.tensor([[4, 5, 6], [7, 4, -1]])

    def body(group: Any) -> Any:
        buffer = Buffer(group, **SIZES, timeout_s=ROOM_S)
        with RoutingRecorder(tmp_path / f"{group.rank}" / "x", watch=buffer) as recorder:
            buffer.dispatch(rows(2), ids)
            if group.rank == 0:
                buffer.close()
                return recorder
            with pytest.raises(moecomm.PeerLost):
                buffer.dispatch(rows(2), ids)
            buffer.shrink(keep_ids=True)
            buffer.dispatch(rows(2), ids)
            buffer.close()
        return recorder

    _, found = run_ranks(2, body)
    (file,) = found.files
    assert file.name == "x-rank1"
    read = calls(Recorded.load(file))
    assert read[0] == ("buffer0", 0, ids.tolist()) and read[-1] == ("buffer1", 0, ids.tolist())


def test_the_number_of_experts_has_to_be_known(tmp_path: Path) -> None:
    with RoutingRecorder(tmp_path / "x", watch=()) as recorder, pytest.raises(BadInput, match="experts"):
        recorder.add("a", torch.zeros(1, 1, dtype=torch.int64))


@pytest.mark.parametrize(
    ("given", "argument"),
    [
        (("a", torch.zeros(2, 3)), "topk_idx"),
        (("a", torch.zeros(3, dtype=torch.int64)), "topk_idx"),
        (("a", torch.full((2, 3), 8)), "topk_idx"),
        (("a", torch.full((2, 3), -2)), "topk_idx"),
        (("a", torch.zeros(2, 2, dtype=torch.int64)), "topk_idx"),
        (("a", [[1, 2, 3]]), "topk_idx"),
        (("a", torch.zeros(2, 3, dtype=torch.int64), torch.zeros(2, 2)), "topk_weights"),
        (("a", torch.zeros(2, 3, dtype=torch.int64), torch.zeros(2, 3, dtype=torch.int64)), "topk_weights"),
        ((3, torch.zeros(2, 3, dtype=torch.int64)), "layer"),
    ],
)
def test_what_is_no_routing_is_not_added(given: tuple[Any, ...], argument: str, tmp_path: Path) -> None:
    with RoutingRecorder(tmp_path / "x", experts=8, watch=(), weights=True) as recorder:
        recorder.add("a", torch.zeros(1, 3, dtype=torch.int64))
        with pytest.raises(BadInput) as caught:
            recorder.add(*given)
        assert caught.value.argument == argument
    assert Recorded.load(recorder.files[0]).tokens == 1


def test_files_of_ranks() -> None:
    assert file_of(Path("a/run.tar.x"), 3, 8) == Path("a/run.tar-rank3.x") and file_of(Path("run"), 0, 1) == Path("run")
