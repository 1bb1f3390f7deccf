"""fused=None on GPUs: forms are measured once, and all ranks take one.  Over CPU ranks, with times from tables."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable
from itertools import islice
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import moecomm
from moecomm import overlap
from moecomm.overlap import exchanges, measured, sizes
from moecomm.overlap import workspace as workspaces
from moecomm.overlap.agreement import BYTES, FirstCalls
from moecomm.overlap.exchanges import Copies
from moecomm.overlap.executors import GpuExecutors
from moecomm.overlap.measured import Choice, Choices
from moecomm.overlap.plans import CallNumbers
from moecomm.overlap.unfused import UnfusedExecutor
from moecomm.window.calls import HostCalls

from ..conftest import Ranks
from ..live import ROOM_S
from .cases import HOST, OPERATORS, random_case, same
from .cases import on_ranks as on_workspaces
from .test_unfused import ROOM, on_windows

BF16 = torch.bfloat16


class Fused:
    """Stands for the fused operators of a GPU.  It takes no depth of 16, and raises for one of 24 when it runs."""

    def __init__(self, window: moecomm.Window, offset: int, nbytes: int) -> None:
        if window.num_signals == 1:
            raise moecomm.BadInput("nbytes", nbytes, "more")
        self.staging = range(1024, nbytes)
        self._unfused = UnfusedExecutor(Copies(window, self.staging))
        self.runs = self.sums = 0

    def all_reduce(self, y: torch.Tensor) -> torch.Tensor:
        self.sums += 1
        return self._unfused._exchange.all_reduce(tuple(y.shape), y.dtype)(y)

    def can_sum(self, nbytes: int) -> bool:
        return nbytes < 1024

    def plan(self, call: sizes.Sizes, gather: bool = False) -> Any:
        if call.dims.get("K") == 16:
            raise moecomm.Unsupported("a depth of 16")
        plain = self._unfused.plan(call, gather)

        def run(*given: Any) -> Any:
            if call.dims.get("K") == 24:
                raise moecomm.BadInput("nbytes", 0, "more")
            self.runs += 1
            return plain(*given)

        return run


class FakeClock:
    """A clock that calls set forward."""

    def __init__(self) -> None:
        self.now = 0.0

    def delay(self) -> None:
        pass

    def mark(self) -> float:
        return self.now

    def passed(self, mark: float) -> bool:
        return True

    def us(self, begin: float, end: float) -> float:
        return end - begin


Costs = dict[str, float]


def set_costs(set_attribute: Callable[..., None], costs: Callable[[int], Costs]) -> list[int]:
    """Let calls take this long in each form on a rank, by the clock.  Return ranks, one for each measurement."""
    measure, measurements = Choices._times, list[int]()

    def times(self: Choices, calls: dict[str, Any]) -> Costs:
        rank, clock = self._window.rank, FakeClock()
        self._clock = clock  # type: ignore[assignment]
        measurements.append(rank)

        def costly(form: str, call: Callable[[], Any]) -> Callable[[], Any]:
            def run() -> Any:
                call()
                clock.now += costs(rank)[form]

            return run

        return measure(self, {form: costly(form, call) for form, call in calls.items()})

    set_attribute(Choices, "_times", times)
    return measurements


@pytest.fixture
def fused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "moecomm.overlap.gpu", SimpleNamespace(GpuExecutor=Fused))  # type: ignore[arg-type]


def gather_of(rows: int, depth: int, ranks: int = 2) -> tuple[sizes.Sizes, tuple[torch.Tensor, torch.Tensor]]:
    x, w = torch.ones(rows, depth).bfloat16(), torch.ones(8, depth).bfloat16()
    return sizes.all_gather_matmul(ranks, x, w), (x, w)


@pytest.mark.usefixtures("fused")
def test_what_runs_a_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """The fused form is the fastest, and does not take each depth."""
    set_costs(monkeypatch.setattr, lambda rank: {"fused": 1.0, "copies": 2.0})

    def body(window: moecomm.Window) -> None:
        executors: Any = GpuExecutors(window, ROOM, CallNumbers())
        for depth, fits in ((8, True), (16, False), (24, False), (12, True)):
            call, given = gather_of(3, depth)
            right = torch.full((6, 8), float(depth)).bfloat16()
            run, again = executors.choose(call, None, False, given)
            before = executors.fused.runs
            assert again and torch.equal(run(*given)[0], right) and executors.fused.runs - before == fits
            before = executors.fused.runs
            assert torch.equal(executors.choose(call, False, False, given)[0](*given)[0], right)
            assert executors.fused.runs == before
            if fits:
                executors.choose(call, True, False, given)[0](*given)
                assert executors.fused.runs == before + 1
            else:
                with pytest.raises((moecomm.Unsupported, moecomm.BadInput)):
                    executors.choose(call, True, False, given)[0](*given)

    on_windows(2, body)


def test_without_fused_operators_nothing_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "moecomm.overlap.gpu", None)
    measurements = set_costs(monkeypatch.setattr, lambda rank: {})

    def body(window: moecomm.Window) -> None:
        executors = GpuExecutors(window, ROOM, numbers := CallNumbers())
        call, given = gather_of(3, 8)
        run, again = executors.choose(call, None, False, given)
        assert again and torch.equal(run(*given)[0], torch.full((6, 8), 8.0).bfloat16())
        made = numbers.made
        with pytest.raises(moecomm.Unsupported, match="fused operators on GPUs"):
            executors.choose(call, True, False, given)
        assert numbers.made == made and executors.choices == ()  # it has not reached the other ranks

    on_windows(2, body)
    assert not measurements


def test_too_little_memory_for_fused_operators_is_said_when_they_are_asked_for(fused: None) -> None:
    with moecomm.Window("self", ROOM + BYTES, signals=1, **HOST) as window:
        executors = GpuExecutors(window, ROOM, CallNumbers())
        x = torch.ones(1, 3, dtype=BF16)
        call = sizes.all_to_all(1, x)
        assert torch.equal(executors.choose(call, None, False, (x,))[0](x), x)
        with pytest.raises(moecomm.BadInput, match="nbytes: got 65536; want more"):
            executors.choose(call, True, False, (x,))


@pytest.mark.usefixtures("fused")
@pytest.mark.parametrize(
    ("first", "second", "form"),
    [
        ({"fused": 1.0, "copies": 2.0}, {"fused": 5.0, "copies": 4.0}, "copies"),
        ({"fused": 4.0, "copies": 1.0}, {"fused": 1.0, "copies": 5.0}, "fused"),
        ({"fused": 2.03, "copies": 2.0}, {"fused": 1.0, "copies": 1.0}, "fused"),  # no more than noise
        ({"fused": 2.05, "copies": 2.0}, {"fused": 1.0, "copies": 1.0}, "copies"),
    ],
)
def test_the_slowest_rank_decides_for_all(
    first: Costs, second: Costs, form: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_costs(monkeypatch.setattr, lambda rank: (first, second)[rank])

    def body(window: moecomm.Window) -> tuple[Choice, ...]:
        executors: Any = GpuExecutors(window, ROOM, CallNumbers())
        call, given = gather_of(3, 8)
        run, _ = executors.choose(call, None, False, given)
        before = executors.fused.runs
        run(*given)
        assert executors.fused.runs - before == (form == "fused")
        return executors.choices  # type: ignore[no-any-return]

    us = {name: max(first[name], second[name]) for name in first}
    wanted = Choice("all_gather_matmul", BF16, {"M": 3, "K": 8, "N": 8}, us, form)
    assert on_windows(2, body) == [(wanted,)] * 2


@pytest.mark.usefixtures("fused")
def test_calls_with_about_as_many_rows_are_measured_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """One choice for a rank that wants the gathered rows and for one that does not: the others do not know."""
    measurements = set_costs(monkeypatch.setattr, lambda rank: {"fused": 1.0, "copies": 2.0})

    def body(window: moecomm.Window) -> list[dict[str, int]]:
        executors = GpuExecutors(window, ROOM, CallNumbers())
        for rows, depth, gather in (
            (3, 8, False),
            (3, 8, window.rank == 1),
            (4, 8, True),
            (5, 8, False),
            (3, 40, False),
        ):
            call, given = gather_of(rows, depth)
            executors.choose(call, None, gather, given)
        return [choice.sizes for choice in executors.choices]

    of_rank = [{"M": 3, "K": 8, "N": 8}, {"M": 5, "K": 8, "N": 8}, {"M": 3, "K": 40, "N": 8}]
    assert on_windows(2, body) == [of_rank] * 2
    assert sorted(measurements) == [0, 0, 0, 1, 1, 1]


@pytest.mark.usefixtures("fused")
def test_a_capture_takes_what_has_been_measured_or_the_rule(monkeypatch: pytest.MonkeyPatch) -> None:
    capturing = False
    monkeypatch.setattr(HostCalls, "capturing", lambda calls: capturing)
    measurements = set_costs(monkeypatch.setattr, lambda rank: {"fused": 2.0, "copies": 1.0})

    def taken(executors: Any, rows: int) -> tuple[bool, bool]:
        call, given = gather_of(rows, 8)
        run, again = executors.choose(call, None, False, given)
        before = executors.fused.runs
        run(*given)
        return executors.fused.runs > before, again

    def body(window: moecomm.Window) -> list[tuple[bool, bool]]:
        nonlocal capturing
        executors, found = GpuExecutors(window, ROOM, CallNumbers()), []
        for captured, rows in ((True, 3), (False, 3), (True, 3), (True, 4)):
            window.barrier()
            capturing = captured
            window.barrier()
            found.append(taken(executors, rows))
        return found

    # The plan of a call that no eager call has compared is not kept.
    assert on_windows(2, body) == [[(True, False), (False, True), (False, True), (False, False)]] * 2
    assert sorted(measurements) == [0, 1]


@pytest.mark.usefixtures("fused")
def test_ranks_that_pass_another_fused_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    measurements = set_costs(monkeypatch.setattr, lambda rank: {"fused": 1.0, "copies": 2.0})

    def body(window: moecomm.Window) -> Any:
        executors = GpuExecutors(window, ROOM, CallNumbers())
        call, given = gather_of(3, 8)
        with pytest.raises(moecomm.Mismatch) as caught:
            executors.choose(call, (None, True)[window.rank], False, given)
        return caught.value.field, caught.value.mine

    assert on_windows(2, body) == [("fused", None), ("fused", True)] and not measurements


@pytest.mark.usefixtures("fused")
def test_the_first_call_of_each_kind_compares_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    """A later one makes no exchange; and one measurement serves calls with and without gradients."""
    measurements = set_costs(monkeypatch.setattr, lambda rank: {"fused": 1.0, "copies": 2.0})
    exchanges = list[int]()
    exchange = FirstCalls.exchange

    def counted(self: FirstCalls, mine: list[int]) -> list[list[int]]:
        exchanges.append(mine[0])
        return exchange(self, mine)

    monkeypatch.setattr(FirstCalls, "exchange", counted)

    def body(window: moecomm.Window) -> Any:
        executors = GpuExecutors(window, ROOM, CallNumbers())
        call, given = gather_of(3, 8)
        made = []
        for gradient in (False, True, False, True):
            executors.choose(call._replace(gradient=gradient), None, False, given)
            window.barrier()
            made.append(len(exchanges))
            window.barrier()
        call, given = gather_of(3, 16)
        with pytest.raises(moecomm.Mismatch) as caught:
            executors.choose(call._replace(gradient=window.rank == 1), None, False, given)
        return made, caught.value.field, caught.value.mine, caught.value.theirs

    # Of the first call, both ranks exchange headers and times.
    assert on_windows(2, body) == [([4, 6, 6, 6], "gradients wanted", *both) for both in ((False, True), (True, False))]
    assert sorted(measurements) == [0, 1]


def shapes(given: dict[str, torch.Tensor]) -> list[torch.Size]:
    """Return the sizes that ranks must have alike: those of weights, too, whose form is chosen."""
    return [tensor.shape for name, tensor in given.items() if name in ("x", "w")]


@pytest.mark.usefixtures("fused")
@pytest.mark.parametrize("inference", [False, True])
@pytest.mark.parametrize("form", ["fused", "copies"])
@pytest.mark.parametrize("operator", OPERATORS)
def test_a_measured_call_has_the_bits_of_the_reference(
    operator: str, form: str, inference: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Inputs stay as they are, and repeated calls are not measured again."""
    monkeypatch.setattr(workspaces, "HostExecutors", GpuExecutors)
    costs = dict.fromkeys(("fused", "kernel", "copies"), 2.0) | {form: 1.0}
    measurements = set_costs(monkeypatch.setattr, lambda rank: costs)
    drawn = (random_case(operator, 2, seed) for seed in range(400))
    cases = list(islice((case for case in drawn if shapes(case.given[0]) == shapes(case.given[1])), 6))

    def body(workspace: overlap.Workspace) -> None:
        for case in cases:
            with torch.inference_mode(inference):
                mine = {name: tensor.clone() for name, tensor in case.given[workspace.rank].items()}
                before = {name: tensor.clone() for name, tensor in mine.items()}
                for _ in range(3):
                    assert same(case.run(workspace, **mine), case.want()[workspace.rank], case.dtype)
            assert all(torch.equal(before[name], tensor) for name, tensor in mine.items())
        assert {choice.form for choice in workspace.choices} == {form}

    on_workspaces(2, body, (1 << 20) + 4096)
    assert 2 <= len(measurements) <= 2 * len(cases)


@pytest.mark.usefixtures("fused")
def test_backward_passes_are_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workspaces, "HostExecutors", GpuExecutors)
    set_costs(monkeypatch.setattr, lambda rank: {"fused": 2.0, "copies": 1.0})

    def body(workspace: overlap.Workspace) -> list[str]:
        x, w = torch.ones(4, 8, dtype=BF16, requires_grad=True), torch.ones(8, 8, dtype=BF16)
        overlap.all_gather_matmul(x, w, workspace).float().sum().backward()
        assert x.grad is not None and (x.grad == 16).all()
        return [f"{choice.operator} {choice.form}" for choice in workspace.choices]

    found = on_workspaces(2, body, (1 << 20) + 4096)
    assert found == [["all_gather_matmul copies", "matmul_reduce_scatter copies"]] * 2


@pytest.mark.usefixtures("fused")
@pytest.mark.parametrize("error", [moecomm.Unsupported("no such kernel"), torch.cuda.OutOfMemoryError("no memory")])
def test_a_form_that_does_not_run_is_not_taken(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    set_costs(monkeypatch.setattr, lambda rank: {"copies": 2.0})

    def fail(*given: Any) -> None:
        raise error

    def body(window: moecomm.Window) -> list[Choice]:
        choices = GpuExecutors(window, ROOM, CallNumbers())._choices
        call, given = gather_of(3, 8)
        copies = UnfusedExecutor(Copies(window, range(ROOM))).plan(call)
        assert choices.measure(call, {"fused": fail, "copies": copies}, given) == "copies"
        return [choice for choice in choices.made if choice.us == {"copies": 2.0}]

    assert [len(found) for found in on_windows(2, body)] == [1, 1]


def test_cpu_ranks_choose_nothing() -> None:
    with overlap.Workspace("self", 4096, **HOST) as workspace:
        x = torch.ones(2, 3, dtype=BF16)
        overlap.matmul_all_reduce(x, x, workspace)
        assert workspace.choices == ()
    with pytest.raises(moecomm.Closed):
        _ = workspace.choices


@pytest.mark.usefixtures("fused")
def test_an_error_of_torch_ends_the_measurement_of_all(monkeypatch: pytest.MonkeyPatch) -> None:
    def costs(rank: int) -> Costs:
        if rank == 1:
            raise RuntimeError("an error of torch")
        return {"fused": 1.0, "copies": 1.0}

    set_costs(monkeypatch.setattr, costs)

    def body(window: moecomm.Window) -> str:
        executors = GpuExecutors(window, ROOM, CallNumbers())
        call, given = gather_of(3, 8)
        with pytest.raises((RuntimeError, moecomm.Aborted)) as caught:
            executors.choose(call, None, False, given)
        return caught.type.__name__

    assert on_windows(2, body) == ["Aborted", "RuntimeError"]


def test_a_measurement_waits_no_longer_than_the_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    """A collective that hangs has no deadline of its own."""
    monkeypatch.setattr(measured, "_GRACE_S", 0.0)
    monkeypatch.setattr(FakeClock, "passed", lambda clock, mark: False)
    with moecomm.Window("self", 4096, backend="host", timeout_s=0.2) as window:
        choices = Choices(window, None)  # type: ignore[arg-type]
        choices._clock = FakeClock()  # type: ignore[assignment]
        with pytest.raises(moecomm.Timeout, match="rank 0 measured the forms of a call, and waited for the device"):
            choices._times({"collectives": lambda: None})
        with pytest.raises(moecomm.Aborted):
            window.barrier()


def _killed(rank: int, group: Any) -> Any:
    sys.modules["moecomm.overlap.gpu"] = SimpleNamespace(GpuExecutor=Fused)  # type: ignore[assignment]

    def costs(rank: int) -> Costs:
        if rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return {"fused": 1.0, "copies": 1.0}

    set_costs(setattr, costs)
    started = time.monotonic()
    with moecomm.Window(group, ROOM + BYTES, **HOST) as window:
        executors = GpuExecutors(window, ROOM, CallNumbers())
        call, given = gather_of(3, 8, 3)
        try:
            executors.choose(call, None, False, given)
        except moecomm.PeerLost as error:
            return error.peer, error.rank, time.monotonic() - started
    return None


def test_survivors_name_a_rank_that_is_killed_in_a_measurement(ranks: Ranks) -> None:
    ranks.start(3, _killed)
    found = ranks.results(2)
    assert sorted(found) == [0, 2]
    for rank, (peer, noticed_by, seconds) in found.items():
        assert (peer, noticed_by) == (1, rank) and seconds < ROOM_S, found


def _by_forms(rank: int, group: Any) -> list[Any]:
    """Take each form of a sum in turn, beside the collectives of gloo."""
    exchanges._LIBRARIES["cpu"] = "gloo"
    sys.modules["moecomm.overlap.gpu"] = SimpleNamespace(GpuExecutor=Fused)  # type: ignore[assignment]
    capturing, fastest, found = False, "", list[Any]()
    HostCalls.capturing = lambda calls: capturing  # type: ignore[method-assign]
    every = ("fused", "kernel", "collectives")
    set_costs(setattr, lambda rank: dict.fromkeys(every, 2.0) | {fastest: 1.0})
    x, w = torch.full((4, 8), rank + 1.0).bfloat16(), torch.ones(8, 8).bfloat16()
    with moecomm.Window(group, ROOM + BYTES, **HOST) as window:
        executors: Any = GpuExecutors(window, ROOM, CallNumbers())
        capturing = True
        call = sizes.matmul_all_reduce(2, x, w)
        found.append(list(executors.forms(call)))
        capturing = False
        for form in every:
            fastest, x = form, x.repeat(2, 1)  # another size, which is measured
            call = sizes.matmul_all_reduce(2, x, w)
            run, _ = executors.choose(call, None, False, (x, w))
            before = executors.fused.runs, executors.fused.sums
            assert (run(x, w) == 24).all()
            found.append((executors.fused.runs - before[0], executors.fused.sums - before[1]))
        capturing = True
        found.append(list(executors.forms(call)))
        found.append([choice.form for choice in executors.choices])
        large = sizes.matmul_all_reduce(2, x.repeat(32, 1), w)  # no kernel of its own adds up so much
        found.append(list(executors.forms(large)))
    return found


def _trains(rank: int, group: Any) -> tuple[list[float], list[str]]:
    """Run a forward and a backward pass by collectives, with leaves as arguments."""
    exchanges._LIBRARIES["cpu"] = "gloo"
    sys.modules["moecomm.overlap.gpu"] = SimpleNamespace(GpuExecutor=Fused)  # type: ignore[assignment]
    workspaces.HostExecutors = GpuExecutors  # type: ignore
    set_costs(setattr, lambda rank: {"fused": 2.0, "kernel": 2.0, "collectives": 1.0})
    x, w1, w2 = (torch.full((4, 4), value, dtype=BF16, requires_grad=True) for value in (rank + 1.0, 1.0, 2.0))
    with overlap.Workspace(group, ROOM + 4096, **HOST) as workspace:
        inner = overlap.all_gather_matmul(x, w1, workspace)
        y = overlap.matmul_reduce_scatter(inner, w2, workspace)
        (overlap.matmul_all_reduce(y, w2, workspace).float().sum() + inner.float().sum()).backward()
        chosen = [f"{choice.operator} {choice.form}" for choice in workspace.choices]
    return [float(of.grad[0, 0]) for of in (x, w1, w2) if of.grad is not None], chosen


def test_leaves_are_arguments_of_a_measurement(ranks: Ranks) -> None:
    operators = ("all_gather_matmul", "matmul_reduce_scatter", "matmul_all_reduce")
    chosen = [f"{operator} collectives" for operator in operators]  # those of the backward pass have the same sizes
    inner = 8 * 2 * 4 + 1  # the gradient of inner; that of y is 8, and y is 64 on rank 0 and 128 on rank 1
    of_x, of_w1, of_sum = 2 * 4 * inner, (4 * 1 + 4 * 2) * inner, 8 * (4 * 4 + 4 * 8)
    assert ranks.run(2, _trains) == [([of_x, of_w1, of_sum + 4 * y], chosen) for y in (64, 128)]


def test_sums_have_three_forms(ranks: Ranks) -> None:
    """Copies take the place of collectives in a capture before the process group has connected its ranks."""
    every = ["fused", "kernel", "collectives"]
    want = [["fused", "kernel", "copies"], (1, 0), (0, 1), (0, 0), every, every, ["fused", "collectives"]]
    assert ranks.run(2, _by_forms) == [want] * 2
