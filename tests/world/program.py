"""The program of one rank: it makes the steps of a case, with what goes wrong in them, and goes on."""

from __future__ import annotations

import random
import re
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

import moecomm

from .calls import ROUND_CALLS, Rank, Skip, check_arrived
from .case import Case, Step
from .changes import CHANGES
from .expectations import expect
from .model import State

TRIES = 4  # of shrink(), after abort()
ENDING = ("bad one", "differ", "close", "kill", "abort", "interrupt")  # faults after which all ranks do something else
ENDED = (moecomm.PeerLost, moecomm.Aborted, moecomm.Timeout)  # of a round, when a rank is gone or aborts


@dataclass
class Failure:
    """What went wrong: in which step, on which member, and how."""

    step: int
    member: int
    text: str
    when: float = 0.0  # by the clock of all ranks

    @property
    def kind(self) -> str:
        """Return what says whether another failure is of the same kind."""
        words = self.text.partition(": ")[2].partition(" [")[0]
        return re.sub(r"[-\d.]+|[(\[{].*", "", words)[:60]

    def __str__(self) -> str:
        return f"step {self.step}, rank {self.member}: {self.text}"


class Gone(BaseException):
    """This rank is to end here."""


class Program(Rank):
    """Makes the steps of a case on one rank.

    Attributes:
        at: number of the step under way.
        slowest: seconds and number of the step that took longest.
        made: how many steps were made, by call and fault.
        outcomes: by step, of calls that may end in one of several ways, but in the same on all ranks.
    """

    def __init__(self, case: Case, member: int, executor: Any) -> None:
        super().__init__(member, State.of(case), executor)
        self.case, self.at, self.made = case, -1, dict[str, int]()
        self.outcomes: dict[int, str] = {}
        self.aborting: threading.Timer | None = None
        self.slowest = (0.0, -1)  # seconds, step

    def run(self) -> Failure | None:
        """Make all steps; return the first failure."""
        try:
            self.open()
            for at, step in enumerate(self.case.steps):
                self.at = at
                if self.executor.stopped():
                    return None
                begin = time.monotonic()
                self.step(step)
                self.slowest = max(self.slowest, (time.monotonic() - begin, self.at))
            self.at = len(self.case.steps)
            for kept in self.kept if self.inside else ():
                check_arrived(self, kept, self.rank)
        except Gone:
            return None
        except BaseException as error:  # noqa: BLE001 - reported with the case
            last = traceback.extract_tb(error.__traceback__)
            where = " < ".join(f"{frame.name}:{frame.lineno}" for frame in reversed(last[-4:]))
            about = f"lost {self.state.lost}, masked {self.state.masked}, members {self.state.members}: "
            return Failure(self.at, self.member, f"{about}{type(error).__name__}: {error} [{where}]", time.monotonic())
        finally:
            if self.buffer is not None:
                self.kept.clear()
                if self.weights is not None:
                    self.weights.close()
                self.buffer.close()
        return None

    # Which ranks there are.

    @property
    def inside(self) -> bool:
        """Return whether this rank takes part in rounds."""
        return self.member in self.state.members and self.rank in self.state.there

    def open(self) -> None:
        """Open the Buffer of the state."""
        state, sizes = self.state, dict(self.case.sizes)
        sizes["dtype"] = getattr(torch, sizes["dtype"])
        sizes.pop("placement", None)
        if state.choice is not None:
            sizes["placement"] = state.placement()
        if sizes.get("domain_ranks") and len(state.members) % sizes["domain_ranks"]:
            sizes.pop("domain_ranks")
            state.known_domains = False
        group = self.executor.group(f"open {state.opened}", state.members, self.member)
        self.buffer = self.executor.open(self, group, sizes)
        self.check_state()

    def reopen(self) -> None:
        """Close the Buffer, and open another over all ranks that live."""
        self.forget()
        if self.buffer is not None:
            self.buffer.close()
        members = sorted(self.state.alive)
        self.executor.meet(f"{self.at} reopen", members, self.member)
        self.state.open(members)
        self.open()

    def forget(self) -> None:
        """Let go of what belongs to the Buffer so far: handles and weights."""
        self.kept.clear()
        if self.weights is not None:
            self.weights.close()
        self.weights = None

    def check_state(self) -> None:
        """Raise AssertionError unless the Buffer says who is there as the model does."""
        state, buffer = self.state, self.buffer
        assert buffer.num_ranks == len(state.members) and buffer.rank == self.rank, "numbers of ranks"
        held = tuple(state.held[self.rank])
        assert tuple(buffer.local_experts) == held, f"local experts are {buffer.local_experts}, not {held}"
        assert set(buffer.masked) == state.masked, f"masked are {buffer.masked}, not {state.masked}"

    def meet(self, what: str) -> None:
        """Wait for all ranks that take part."""
        members = [self.state.members[rank] for rank in self.state.there]
        self.executor.meet(f"{self.at} {what}", members, self.member)

    # Steps.

    def step(self, step: Step) -> None:
        """Make a step, unless the state does not allow it."""
        try:
            if step.call in ROUND_CALLS:
                self.round(step)
            else:
                CHANGES[step.call](self, step)
        except Skip:
            return
        key = step.call + (f", {step.fault[0]} {step.fault[2]}".rstrip() if step.fault else "")
        self.made[key] = self.made.get(key, 0) + 1

    def victim_of(self, step: Step) -> int:
        """Return the rank of the Buffer to which the fault of a step happens."""
        assert step.fault is not None
        return self.state.there[step.fault[1] % len(self.state.there)]

    def round(self, step: Step) -> None:
        """Make a round, and what goes wrong in it."""
        if self.state.released:
            if self.inside:
                expect(lambda: self.buffer.dispatch(*self.tokens(step)), moecomm.MemoryReleased)
            return
        kind, member, what = step.fault or ("", 0, "")
        if not self.executor.rounds_fail and kind not in ("", "close", "kill"):
            kind = ""
        if kind and kind != "bad all" and len(self.state.there) < 2:
            kind = ""
        if not self.executor.processes:
            kind = {"kill": "close", "interrupt": "abort"}.get(kind, kind)
        if not self.inside and kind not in ENDING:
            return
        fault = {"": self.well, "bad all": self._bad_all, "bad one": self._bad_one, "bad id": self._bad_id}
        fault |= {"differ": self._differ, "close": self._gone, "kill": self._gone}
        fault |= {"abort": self._abort, "interrupt": self._abort}
        fault[kind](Step(step.call, step.seed, step.options, (kind, member, what), step.then), what)

    def _prepared(self, step: Step, twist: str = "", mine: bool = False, begin: bool = False) -> Any:
        """Return a call that may end the rounds, and its check; ranks that take no part hear whether it is made."""
        try:
            prepared = ROUND_CALLS[step.call].prepare(self, _plain(step, begin), twist, mine)
        except Skip:
            self.executor.tell(str(self.at), False)
            raise
        self.executor.tell(str(self.at), True)
        return prepared

    def hear(self) -> None:
        """On a rank that takes no part: raise Skip unless the others make this step."""
        if not self.executor.hear(str(self.at)):
            raise Skip

    def tokens(self, step: Step) -> tuple[torch.Tensor, torch.Tensor]:
        one = self.state.inputs(step, self.rank)
        return one.x, one.ids

    def well(self, step: Step, what: str) -> None:
        run, check = ROUND_CALLS[step.call].prepare(self, step)
        check(run())

    def _bad_all(self, step: Step, what: str) -> None:
        call = ROUND_CALLS[step.call]
        run, _ = call.prepare(self, step, call.bad[int(what or 0) % len(call.bad)], True)
        expect(run, moecomm.BadInput)

    def _bad_id(self, step: Step, what: str) -> None:
        """An id that is none on one rank: BadInput on every rank, and the Buffer goes on."""
        if step.call not in ("dispatch", "moe", "ops"):
            raise Skip
        victim = self.victim_of(step)
        if not len(self.state.inputs(step, victim).ids):
            raise Skip
        run, _ = ROUND_CALLS[step.call].prepare(self, _plain(step), "bad id", self.rank == victim)
        expect(run, moecomm.BadInput)

    def _bad_one(self, step: Step, what: str) -> None:
        """Bad input on one rank, or on two of several: BadInput there, then OutOfStep everywhere."""
        if self.inside:
            call, there, victim = ROUND_CALLS[step.call], self.state.there, self.victim_of(step)
            second = there[(there.index(victim) + 1) % len(there)] if step.seed % 4 == 0 and len(there) > 2 else victim
            mine = self.rank in (victim, second)
            run, _ = self._prepared(step, call.bad[int(what or 0) % len(call.bad)], mine, begin=True)
            calls, rng = [run], random.Random(step.seed)
            for nth in range(3):
                kind = rng.choice(list(ROUND_CALLS))
                calls.append(self._either_call(Step(kind, step.seed + nth, step.options)))
            expect(calls.pop(0), moecomm.BadInput if mine else moecomm.OutOfStep)
            for one in calls if mine else calls[1:]:
                expect(one, moecomm.OutOfStep)
        else:
            self.hear()
        self.reopen()

    def _either_call(self, step: Step) -> Callable[[], Any]:
        """Return this call, or a dispatch where the state does not allow it."""
        try:
            run: Callable[[], Any] = ROUND_CALLS[step.call].prepare(self, _plain(step, begin=True))[0]
        except Skip:
            return lambda: self.buffer.dispatch(*self.tokens(step))
        return run

    def _differ(self, step: Step, what: str) -> None:
        """Other options on one rank: Mismatch everywhere, and then OutOfStep."""
        call = ROUND_CALLS[step.call]
        if what not in call.differ:
            raise Skip
        if self.inside:
            run, _ = self._prepared(step, what, self.rank == self.victim_of(step))
            expect(run, moecomm.Mismatch)
            expect(lambda: self.buffer.dispatch(*self.tokens(step)), moecomm.OutOfStep)
        else:
            self.hear()
        self.reopen()

    def _gone(self, step: Step, what: str) -> None:
        """A rank that closes its Buffer or is killed: PeerLost on the others, which go on."""
        assert step.fault is not None
        state, rank = self.state, self.victim_of(step)
        victim, killed = state.members[rank], step.fault[0] == "kill" and self.executor.processes
        if self.inside:
            run, check = self._prepared(step)
            self.meet("gone")
            if self.member == victim:
                self.forget()
                if killed:
                    self.executor.kill(run, what == "later")
                    raise Gone
                self.buffer.close()
                self.buffer = None
            elif killed and what == "later":
                self._either(run, check, ENDED)
            elif self.executor.rounds_fail:
                expect(run, moecomm.PeerLost)
        else:
            self.hear()
        if killed:
            state.alive.discard(victim)
        state.gone.add(victim)
        self.go_on(step.then, {victim})

    def _either(
        self, run: Callable[[], Any], check: Callable[[Any], None], errors: tuple[type[BaseException], ...]
    ) -> None:
        try:
            result = run()
        except errors:
            return
        check(result)

    def _abort(self, step: Step, what: str) -> None:
        """abort() or Ctrl-C on one rank meanwhile: the right result, or an error that says so; then shrink()."""
        assert step.fault is not None
        masked = {self.state.members[rank] for rank in self.state.masked}
        if not self.inside:
            self.hear()
            self._left("shrink", masked)
            return
        run, check = self._prepared(step)
        mine = self.rank == self.victim_of(step)
        self.meet("abort")
        errors: tuple[type[BaseException], ...] = ENDED
        delay = float(what or 0) / 1000
        if mine and step.fault[0] == "interrupt":
            errors = (*ENDED, KeyboardInterrupt)
            run = self.executor.interrupted(run, delay)
        elif mine:
            timer = threading.Timer(delay, self.buffer.abort)
            timer.start()
            self.aborting = timer
        self._either(run, check, errors)
        if self.aborting is not None:
            self.aborting.join()
            self.aborting = None
        self.go_on("shrink", masked)

    def go_on(self, then: str, gone: set[int]) -> None:
        """Go on without members that are gone."""
        state = self.state
        if then == "reopen" and gone:
            if self.member in state.alive:
                self.reopen()
            return
        if self.member in gone or self.member not in state.members:
            self._left(then, gone)
            return
        if not self.inside:  # masked, and now left out
            self._left(then, gone)
            return
        if then == "mask" and gone:
            state.masked |= {state.members.index(member) for member in gone}
            masked = self.buffer.mask()
            assert set(masked) == state.masked, f"mask() returns {masked}, not {state.masked}"
            self.kept.clear()
            self.close_weights()
            self.check_state()
            return
        masked_too = gone | {state.members[rank] for rank in state.masked}
        keep_ids = "ids kept" in then
        members = list(state.members)
        found = self._shrink_now(keep_ids)
        lost = {members[rank] for rank in found.lost}
        assert lost == masked_too, f"shrink() has lost {lost}, not {masked_too}"
        state.shrink(masked_too, keep_ids)
        self.kept.clear()
        self.close_weights()
        self.check_state()

    def close_weights(self) -> None:
        if self.weights is not None:
            self.weights.close()
        self.weights = None

    def _shrink_now(self, keep_ids: bool) -> Any:
        for last in reversed(range(TRIES)):
            try:
                return self.buffer.shrink(keep_ids=keep_ids)
            except ENDED:
                if not last:
                    raise
        raise AssertionError

    def _left(self, then: str, gone: set[int]) -> None:
        """On a rank that takes no part: what the others do."""
        state = self.state
        if then == "mask" and gone:
            state.masked |= {state.members.index(member) for member in gone if member in state.members}
            return
        state.shrink(gone | {state.members[rank] for rank in state.masked}, "ids kept" in then)
        if self.member not in state.members and self.buffer is not None:
            self.forget()
            self.buffer.close()
            self.buffer = None


def _plain(step: Step, begin: bool = False) -> Step:
    """Return a step without options that would make its outcome another; in halves only if it may `begin`."""
    others = ("room", "between") if begin else ("room", "begin")
    options = {name: value for name, value in step.options.items() if name not in others}
    return Step(step.call, step.seed, options, step.fault, step.then)
