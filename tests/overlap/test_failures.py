"""Failures of operators: bad inputs, ranks that differ or are out of step, silent ranks, closed Workspaces."""

from __future__ import annotations

import gc
import importlib
import threading
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch

import moecomm
from moecomm import overlap
from moecomm.fused import Fp8
from moecomm.overlap import local
from moecomm.overlap.local import multiply

from ..backends.conftest import run_ranks
from ..core.test_opening import left_behind
from ..live import shorten
from .cases import HOST, OPERATORS, on_ranks, random_case, same

BF16, FP8 = torch.bfloat16, torch.float8_e4m3fn


def zeros(*shape: int, dtype: torch.dtype = BF16) -> torch.Tensor:
    return torch.zeros(shape, dtype=dtype)


def scales(*shape: int) -> torch.Tensor:
    return torch.ones(shape)


def fp8(*shape: int) -> Fp8:
    return Fp8(zeros(*shape, dtype=FP8), scales(*shape[:-1], shape[-1] // 128))


def weights(*shape: int) -> Fp8:
    """At most 128 of them."""
    return Fp8(zeros(*shape, dtype=FP8), scales(*shape[:-2], 1, shape[-1] // 128))


def ids(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.int64)


def ends(*values: int) -> torch.Tensor:
    return torch.tensor(values)


AGM, MRS, MAR, MAA, EMB = (getattr(overlap, name) for name in OPERATORS)
BAD: dict[str, tuple[Callable[[overlap.Workspace], Any], str]] = {
    "x of one dimension": (lambda s: AGM(zeros(3), zeros(4, 3), s), "x"),
    "x of float32": (lambda s: AGM(zeros(2, 3, dtype=torch.float32), zeros(4, 3), s), "x"),
    "x of none": (lambda s: AGM(None, zeros(4, 3), s), "x"),
    "w of another dtype": (lambda s: MRS(zeros(2, 3), zeros(4, 3, dtype=torch.float16), s), "w"),
    "w of other columns": (lambda s: MAR(zeros(2, 3), zeros(3, 4), s), "w"),
    "w of three dimensions": (lambda s: MAR(zeros(2, 3), zeros(1, 4, 3), s), "w"),
    "w elsewhere": (lambda s: MAR(zeros(2, 3), zeros(4, 3).to("meta"), s), "w"),
    "odd rows": (lambda s: MRS(zeros(3, 3), zeros(4, 3), s), "x"),
    "other ranks": (lambda s: MAA(zeros(1, 3, 4, 5), zeros(1, 4, 5), s), "x"),
    "other experts": (lambda s: MAA(zeros(1, 2, 4, 5), zeros(2, 4, 5), s), "w"),
    "tables of two dimensions": (lambda s: EMB(zeros(4, 3), ids(1, 2, 3), s), "tables"),
    "tables of integers": (lambda s: EMB(ids(1, 4, 3), ids(1, 2, 3), s), "tables"),
    "indices of int32": (lambda s: EMB(zeros(1, 4, 3), ids(1, 2, 3).int(), s), "indices"),
    "indices of other tables": (lambda s: EMB(zeros(1, 4, 3), ids(2, 2, 3), s), "indices"),
    "an odd batch": (lambda s: EMB(zeros(1, 4, 3), ids(1, 3, 3), s), "indices"),
    "an index too large": (lambda s: EMB(zeros(1, 4, 3), ids(1, 2, 3) + 4, s), "indices"),
    "an index too small": (lambda s: EMB(zeros(1, 4, 3), ids(1, 2, 3) - 2, s), "indices"),
    "indices and offsets": (lambda s: EMB(zeros(1, 4, 3), ids(1, 2, 3), s, offsets=ends(0, 3, 6)), "indices"),
    "no offsets": (lambda s: EMB(zeros(1, 4, 3), ids(6), s, offsets=ends()), "offsets"),
    "offsets of other tables": (lambda s: EMB(zeros(2, 4, 3), ids(6), s, offsets=ends(0, 3, 4, 6)), "offsets"),
    "offsets of an odd batch": (lambda s: EMB(zeros(1, 4, 3), ids(6), s, offsets=ends(0, 3, 4, 6)), "offsets"),
    "offsets from 1": (lambda s: EMB(zeros(1, 4, 3), ids(6), s, offsets=ends(1, 3, 6)), "offsets"),
    "offsets beyond": (lambda s: EMB(zeros(1, 4, 3), ids(6), s, offsets=ends(0, 3, 7)), "offsets"),
    "offsets that decrease": (lambda s: EMB(zeros(1, 4, 3), ids(6), s, offsets=ends(0, 7, 6)), "offsets"),
    "offsets of no table": (lambda s: EMB(zeros(0, 4, 3), ids(0), s, offsets=ends(0, 0, 0)), "offsets"),
    "fused": (lambda s: AGM(zeros(2, 3), zeros(4, 3), s, fused="yes"), "fused"),
    "return_gathered": (lambda s: AGM(zeros(2, 3), zeros(4, 3), s, return_gathered=2), "return_gathered"),
    "no workspace": (lambda s: AGM(zeros(2, 3), zeros(4, 3), None), "workspace"),
    "a window": (lambda s: AGM(zeros(2, 3), zeros(4, 3), s.window), "workspace"),
    "another name": (lambda s: AGM(zeros(2, 3), zeros(4, 3), "mine"), "workspace"),
    "FP8 without scales": (lambda s: MAR(zeros(2, 128, dtype=FP8), zeros(8, 128, dtype=FP8), s), "x"),
    "scales of x alone": (lambda s: MAR(fp8(2, 128), zeros(8, 128), s), "w"),
    "scales of w alone": (lambda s: MAR(zeros(2, 128), weights(8, 128), s), "x"),
    "values of bfloat16": (lambda s: MAR((zeros(2, 128), scales(2, 1)), weights(8, 128), s), "x"),
    "a pair of three": (lambda s: MAR((*fp8(2, 128), scales(2, 1)), weights(8, 128), s), "x"),
    "no tensor of scales": (lambda s: MAR(fp8(2, 128), (zeros(8, 128, dtype=FP8), None), s), "w"),
    "FP8 of other columns": (lambda s: AGM(fp8(2, 128), weights(8, 256), s), "w"),
    "FP8 of few columns": (lambda s: AGM(Fp8(zeros(2, 64, dtype=FP8), scales(2, 1)), weights(8, 64), s), "x"),
    "FP8 of three dimensions": (lambda s: AGM(fp8(2, 2, 128), weights(8, 128), s), "x"),
    "scales of other rows": (lambda s: AGM(Fp8(zeros(2, 128, dtype=FP8), scales(3, 1)), weights(8, 128), s), "x"),
    "scales of float16": (lambda s: AGM(Fp8(zeros(2, 128, dtype=FP8), zeros(2, 1)), weights(8, 128), s), "x"),
    "scales of each row of w": (lambda s: AGM(fp8(2, 128), Fp8(zeros(8, 128, dtype=FP8), scales(8, 1)), s), "w"),
    "scales of x elsewhere": (lambda s: AGM(Fp8(fp8(2, 128).data, scales(2, 1).to("meta")), weights(8, 128), s), "x"),
    "scales of w elsewhere": (lambda s: AGM(fp8(2, 128), Fp8(weights(8, 128).data, scales(1, 1).to("meta")), s), "w"),
    "odd rows of FP8": (lambda s: MRS(fp8(3, 128), weights(8, 128), s), "x"),
    "other experts in FP8": (lambda s: MAA(fp8(1, 2, 4, 128), weights(2, 8, 128), s), "w"),
    "no room": (lambda s: MAR(zeros(1000, 1), zeros(1000, 1), s), "nbytes"),
}


def test_bad_arguments_are_named_and_change_nothing() -> None:
    """All ranks make the same bad calls; then a good one."""
    case = random_case("matmul_all_reduce", 2, 3)

    def body(workspace: overlap.Workspace) -> torch.Tensor:
        for name, (call, argument) in BAD.items():
            with pytest.raises(moecomm.BadInput) as caught:
                call(workspace)
            assert caught.value.argument == argument, name
        return case.run(workspace)

    for got, want in zip(on_ranks(2, body), case.want(), strict=True):
        assert same(got, want, case.dtype)


def test_no_room_names_the_bytes_that_are_enough() -> None:
    def body(group: Any) -> None:
        x, w = torch.ones(50, 3, dtype=BF16), torch.ones(40, 3, dtype=BF16)
        with overlap.Workspace(group, 4096, **HOST) as workspace:
            with pytest.raises(moecomm.BadInput, match=r"nbytes: got 4096; want at least \d+ for these") as caught:
                overlap.matmul_all_reduce(x, w, workspace)
            enough = int(str(caught.value.want).split()[2])
        with overlap.Workspace(group, enough, **HOST) as workspace:
            assert (overlap.matmul_all_reduce(x, w, workspace) == 6).all()
        with overlap.Workspace(group, enough - 1, **HOST) as workspace, pytest.raises(moecomm.BadInput):
            overlap.matmul_all_reduce(x, w, workspace)

    assert run_ranks(2, body) == [None, None]


DIFFERENT: dict[str, tuple[Callable[[overlap.Workspace], Any], str]] = {
    "rows": (lambda s: AGM(zeros(3, 4), zeros(5, 4), s), "M"),
    "columns": (lambda s: AGM(zeros(6, 5), zeros(5, 5), s), "K"),
    "FP8": (lambda s: AGM(fp8(6, 128), weights(5, 128), s), "dtype"),
    "dtype": (lambda s: AGM(zeros(6, 4, dtype=torch.float16), zeros(5, 4, dtype=torch.float16), s), "dtype"),
    "operator": (lambda s: MAR(zeros(6, 4), zeros(5, 4), s), "operator"),
    "exchange": (lambda s: EMB(zeros(1, 5, 6), ids(1, 3, 2), s), "operator"),
}


@pytest.mark.parametrize("which", DIFFERENT)
@pytest.mark.parametrize("odd", [0, 1, 2])
def test_ranks_that_differ_all_raise_and_are_out_of_step(which: str, odd: int) -> None:
    call, field = DIFFERENT[which]

    def body(workspace: overlap.Workspace) -> None:
        def alike(workspace: overlap.Workspace) -> None:
            AGM(zeros(6, 4), zeros(5, 4), workspace)

        mine = call if workspace.rank == odd else alike
        with pytest.raises(moecomm.Mismatch) as caught:
            mine(workspace)
        assert caught.value.field == field
        assert caught.value.rank == (odd if workspace.rank != odd else min({0, 1, 2} - {odd}))
        for _ in range(2):
            with pytest.raises(moecomm.OutOfStep, match=f"{field}: this rank has .*close this Workspace"):
                alike(workspace)

    on_ranks(3, body)


def test_after_an_error_between_two_operators_no_call_is_paired_with_another() -> None:
    """Each layer has its own weights, and all the same sizes."""

    def body(workspace: overlap.Workspace) -> list[str]:
        found, rows = [], torch.ones(2, 3, dtype=BF16)
        for layer in range(4):
            try:
                out = AGM(rows, torch.full((4, 3), layer + 1.0, dtype=BF16), workspace)
                if workspace.rank == 1 and layer == 1:
                    raise ZeroDivisionError
                out = MAR(out, torch.full((5, 4), layer + 1.0, dtype=BF16), workspace)
                found.append("right" if (out == 36 * (layer + 1) ** 2).all() else "wrong")
            except (moecomm.MoecommError, ZeroDivisionError) as error:
                found.append(type(error).__name__)
        return found

    first, second, third = on_ranks(3, body)
    assert first == third == ["right", "Mismatch", "OutOfStep", "OutOfStep"]
    assert second == ["right", "ZeroDivisionError", "Mismatch", "OutOfStep"]


def loss_of(name: str, workspace: overlap.Workspace, layer: int) -> torch.Tensor:
    """Make a call whose backward pass has a round; the number of ranks is 3."""
    w, about = torch.full((3, 4), layer + 1.0, dtype=BF16), {"dtype": BF16, "requires_grad": True}
    if name == "embedding_all_to_all":
        return EMB(torch.full((1, 5, 6), layer + 1.0, requires_grad=True), ids(1, 3, 2), workspace).sum()
    if name == "matmul_all_to_all":
        return MAA(torch.ones(2, 3, 2, 4, **about), torch.ones(2, 3, 4, dtype=BF16), workspace).sum()
    return getattr(overlap, name)(torch.ones(6, 4, **about), w, workspace).sum()


@pytest.mark.parametrize("name", [name for name in OPERATORS if name != "matmul_all_reduce"])
def test_backward_passes_in_another_order_are_told(name: str) -> None:
    def body(workspace: overlap.Workspace) -> tuple[object, ...]:
        losses = [loss_of(name, workspace, layer) for layer in range(2)]
        with pytest.raises(moecomm.Mismatch) as caught:
            losses[workspace.rank == 2].backward()
        return caught.value.field, caught.value.mine, caught.value.theirs

    first, second = ("that of call 1", "that of call 2"), ("that of call 2", "that of call 1")
    assert on_ranks(3, body) == [("backward pass", *values) for values in (first, first, second)]


ROUNDS_BACK: dict[str, tuple[str, ...]] = {  # by operator, the arguments whose gradient takes a round
    "all_gather_matmul": ("x",),
    "matmul_reduce_scatter": ("x", "w"),
    "matmul_all_to_all": ("x", "w"),
    "embedding_all_to_all": ("tables",),
}
WANTS = [(name, argument) for name, arguments in ROUNDS_BACK.items() for argument in arguments]


def wanting(workspace: overlap.Workspace, name: str, *wanted: str, compiled: bool = False) -> torch.Tensor:
    """Make a call, the same on all ranks but for the gradients that it wants."""
    given: dict[str, Any] = random_case(name, 3, 5, dtype=BF16).given[workspace.rank]
    leaves = {argument: given[argument].clone().requires_grad_() for argument in wanted}
    call: Callable[..., torch.Tensor] = getattr(overlap, name)
    if compiled:
        call = torch.compile(call, backend="aot_eager", fullgraph=True)
    return call(**given | leaves, workspace=workspace.name)


@pytest.fixture
def compiler() -> None:
    """Import torch's compiler ahead of ranks, which are threads: some found parts of it while one imported it."""
    importlib.import_module("torch._dynamo")


@pytest.mark.parametrize("calls", ["first", "known", "compiled"])
@pytest.mark.parametrize("odd", [0, 2])
@pytest.mark.parametrize(("name", "argument"), WANTS)
def test_a_gradient_that_one_rank_alone_wants_is_told(
    name: str, argument: str, odd: int, calls: str, request: pytest.FixtureRequest
) -> None:
    """Before any backward pass, in which that rank would wait: in a first call, in one that all ranks have made with
    and without gradients before, and where one rank has compiled it.
    """
    if calls == "compiled":
        request.getfixturevalue("compiler")

    def body(workspace: overlap.Workspace) -> tuple[object, ...]:
        alone = workspace.rank == odd
        compiled = calls == "compiled" and workspace.rank == 1
        for wanted in ((), (argument,)) if calls != "first" else ():
            wanting(workspace, name, *wanted, compiled=compiled)
        if calls == "known":
            with torch.no_grad():
                wanting(workspace, name, *((argument,) if alone else ()))
        with pytest.raises(moecomm.Mismatch) as caught:
            wanting(workspace, name, *((argument,) if alone else ()), compiled=compiled)
        with pytest.raises(moecomm.OutOfStep, match="gradients wanted"):
            wanting(workspace, name)
        return caught.value.field, caught.value.mine, caught.value.theirs

    assert on_ranks(3, body) == [("gradients wanted", rank == odd, rank != odd) for rank in range(3)]


def test_ranks_want_other_gradients_where_no_round_depends_on_it() -> None:
    def body(workspace: overlap.Workspace) -> None:
        for name, gradients in {
            "all_gather_matmul": ((), ("w",)),
            "matmul_reduce_scatter": (("x",), ("w",), ("x", "w")),
            "matmul_all_reduce": ((), ("x",), ("x", "w")),
            "matmul_all_to_all": (("x",), ("x", "w"), ("w",)),
        }.items():
            for turn in range(6):
                y = wanting(workspace, name, *gradients[(turn + workspace.rank) % len(gradients)])
                if y.requires_grad:
                    y.sum().backward()

    on_ranks(3, body)


@pytest.mark.usefixtures("compiler")
@pytest.mark.parametrize("where", ["function", "operator"])
def test_a_compiled_backward_pass_meets_one_that_is_not_compiled(where: str) -> None:
    """A graph does not know the number of its call, and an operator that is called directly not who wants gradients."""

    def body(workspace: overlap.Workspace) -> torch.Tensor:
        x, w, name = torch.ones(2, 3, dtype=BF16, requires_grad=True), torch.ones(4, 3, dtype=BF16), workspace.name

        def run(x: torch.Tensor) -> torch.Tensor:
            if where == "function":
                return AGM(x, w, name).sum()
            return torch.ops.moecomm.all_gather_matmul(x, w, name, False, None)[0].sum()

        here = torch.compile(run, backend="aot_eager") if workspace.rank == 0 else run
        for _ in range(3):
            here(x).backward()
        assert x.grad is not None
        return x.grad

    for grad in on_ranks(2, body):
        assert torch.equal(grad, torch.full((2, 3), 3 * 2 * 4.0, dtype=BF16))


@pytest.mark.parametrize("where", ["function", "operator"])
def test_ranks_out_of_step_are_told_so(where: str) -> None:
    """A call fails on one rank alone, in checks of the function or of the operator of torch."""

    def body(workspace: overlap.Workspace) -> None:
        x, w = zeros(2, 3), zeros(4, 3)
        wrong: dict[str, Callable[[], Any]] = {
            "function": lambda: overlap.matmul_all_reduce(x, w, workspace, fused=3),  # type: ignore[arg-type]
            "operator": lambda: torch.ops.moecomm.matmul_all_reduce(x, w[:, 1:], workspace.name, None),
        }
        if workspace.rank == 1:
            with pytest.raises(moecomm.BadInput):
                wrong[where]()
        for _ in range(2):
            with pytest.raises(moecomm.OutOfStep, match="close this Workspace on every rank"):
                overlap.matmul_all_reduce(x, w, workspace)

    on_ranks(3, body)


def test_a_silent_rank_is_a_timeout_that_names_it() -> None:
    done = threading.Barrier(3)

    def run(group: Any) -> Any:
        with overlap.Workspace(group, 4096, backend="host") as workspace:
            shorten(workspace.window, 0.3)
            if group.rank == 2:
                done.wait()
                return None
            with pytest.raises(moecomm.Timeout) as caught:
                overlap.matmul_all_reduce(zeros(2, 3), zeros(4, 3), workspace)
            done.wait()
            with pytest.raises(moecomm.Timeout):
                overlap.matmul_all_reduce(zeros(2, 3), zeros(4, 3), workspace)
            return caught.value.peer

    assert run_ranks(3, run) == [2, 2, None]


def test_a_rank_may_close_as_soon_as_its_last_call_returns() -> None:
    """Peers that are still in the call have what they need of it."""
    case = random_case("all_gather_matmul", 3, 4)
    for _ in range(30):
        for got, want in zip(on_ranks(3, case.run), case.want(), strict=True):
            assert same(got, want, case.dtype)


def test_who_waits_for_a_rank_that_has_closed_is_told_at_once() -> None:
    called = threading.Barrier(3)

    def run(group: Any) -> Any:
        case = random_case("all_gather_matmul", 3, 4)
        workspace = overlap.Workspace(group, 1 << 16, **HOST)
        case.run(workspace)
        called.wait()  # the first failure ends the calls of all ranks
        if group.rank == 1:
            workspace.close()
            return None
        with pytest.raises(moecomm.PeerLost, match="rank 1 is gone") as caught:
            case.run(workspace)
        workspace.close()
        return caught.value.peer

    assert run_ranks(3, run) == [1, None, 1]


def test_an_error_of_torch_ends_the_waits_of_all(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(x: torch.Tensor, w: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        if threading.current_thread().name == "rank1":
            raise RuntimeError("no memory")
        return multiply(x, w, dtype)

    monkeypatch.setattr(local, "multiply", fails)

    together = threading.Barrier(3)

    def body(workspace: overlap.Workspace) -> str:
        together.wait()  # none is in a barrier of opening
        kind = RuntimeError if workspace.rank == 1 else moecomm.Aborted
        with pytest.raises(kind) as caught:
            overlap.matmul_reduce_scatter(zeros(6, 3), zeros(4, 3), workspace)
        together.wait()  # a rank that has closed is lost, whatever it did before
        return str(caught.value)

    first, second, third = on_ranks(3, body)
    assert "stopped by rank 1" in first and second == "no memory" and "stopped by rank 1" in third


def test_abort_ends_calls_of_all_ranks() -> None:
    together = threading.Barrier(3)

    def body(workspace: overlap.Workspace) -> Any:
        together.wait()  # none is in a barrier of opening
        if workspace.rank == 0:
            workspace.abort()
        with pytest.raises(moecomm.Aborted) as caught:
            overlap.matmul_all_reduce(zeros(2, 3), zeros(4, 3), workspace)
        with pytest.raises(moecomm.Aborted):
            workspace.check()
        together.wait()  # a rank that has closed is lost, whatever it did before
        return caught.value.peer

    assert on_ranks(3, body) == [0] * 3


def test_one_call_at_a_time() -> None:
    """Another thread, or a signal handler, is refused; the call under way goes on, and the refused one is counted."""
    x, w = zeros(2, 3), zeros(4, 3)

    def body(workspace: overlap.Workspace) -> None:
        inside, leave = threading.Event(), threading.Event()

        def stay() -> None:
            with workspace.call():
                with pytest.raises(moecomm.ConcurrentCall):
                    overlap.matmul_all_reduce(x, w, workspace)
                inside.set()
                leave.wait()

        if workspace.rank == 1:
            thread = threading.Thread(target=stay)
            thread.start()
            inside.wait()
            with pytest.raises(moecomm.ConcurrentCall, match="this Workspace is in another call"):
                overlap.matmul_all_reduce(x, w, workspace)
            leave.set()
            thread.join()
        with pytest.raises(moecomm.OutOfStep) as caught:
            overlap.matmul_all_reduce(x, w, workspace)
        assert (caught.value.mine, caught.value.theirs) == ((0, 2), (2, 0))[workspace.rank]

    on_ranks(2, body)


def test_after_close_nothing_runs() -> None:
    workspace = overlap.Workspace("self", 4096, **HOST)
    workspace.close()
    workspace.close()
    for call in (
        lambda: overlap.matmul_all_reduce(zeros(2, 3), zeros(4, 3), workspace),
        lambda: overlap.matmul_all_reduce(zeros(2, 3), zeros(4, 3), workspace.name),
        workspace.check,
    ):
        with pytest.raises(moecomm.Closed):
            call()
    assert "closed" in repr(workspace)


def test_nothing_is_left_when_all_is_gone() -> None:
    gc.collect()
    before = left_behind()

    def run(group: Any) -> Any:
        workspace = overlap.Workspace(group, 1 << 20, **HOST)
        overlap.matmul_all_reduce(zeros(2, 3), zeros(4, 3), workspace)
        return workspace

    found = run_ranks(2, run)
    reference = weakref.ref(found[0])
    found[0].close()
    found[1].close()
    gc.collect()
    assert left_behind() == before  # although they are still referenced
    del found
    assert reference() is None
    found = run_ranks(2, run)
    del found
    gc.collect()
    assert left_behind() == before  # although nobody has closed them


@pytest.mark.parametrize(
    ("given", "kind", "text"),
    [
        ({"nbytes": 4097}, moecomm.Mismatch, "nbytes"),
        ({"nbytes": 100}, moecomm.Mismatch, "nbytes"),
        ({"nbytes": None}, moecomm.BadInput, "nbytes"),
        ({"backend": "tcp"}, moecomm.BadInput, "backend"),
        ({"timeout_s": 0}, moecomm.BadInput, "timeout_s"),
    ],
)
def test_ranks_that_open_otherwise_raise_the_same_error(
    given: dict[str, Any], kind: type[Exception], text: str
) -> None:
    def run(group: Any) -> None:
        asked: dict[str, Any] = {"nbytes": 4096, **HOST, **(given if group.rank == 1 else {})}
        overlap.Workspace(group, **asked)

    found = run_ranks(3, run)
    assert [type(error) for error in found] == [kind] * 3 and all(text in str(error) for error in found), found


def test_a_workspace_needs_some_memory() -> None:
    with pytest.raises(moecomm.BadInput, match="nbytes: got 255; want 512 or more"):
        overlap.Workspace("self", 255, **HOST)
