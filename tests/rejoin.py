"""A job of CPU ranks that are killed and replaced: memory shared with its supervisor, and a process of the job.

No process group exists.  The supervisor invites: it writes the ids of the processes that are to be the ranks, by rank,
and calls those that are new, which may have waited for that.  Ranks make rounds until rank 0 finds that all new
processes wait to join; it then names the round after which all ranks call grow().  They meet over a store of the
supervisor, with a prefix for each invitation.
"""

from __future__ import annotations

import json
import mmap
import os
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

import moecomm

NOT_JOINED, EXCLUDED = 3, 4  # exit codes
NAP_S = 1e-3
STOP = -1  # in place of an invitation: close, and end
_COMMON = ("invited", "acts", "act", "stopping")
_OF_PROCESS = ("called", "died_ns", "waits_for", "waits_ns", "life", "number", "ranks", "rounds", "shrinking")


class Invitation(NamedTuple):
    """Attributes:
    number: of this invitation, from 1.
    members: ids of the processes that are to be the ranks, by rank.
    sizes: of the Buffer.
    reopen: True: close the Buffer, and open another of these sizes.
    """

    number: int
    members: list[int]
    sizes: dict[str, Any]
    reopen: bool


class Job:
    """State that all processes of a job see.

    Args:
        folder: for invitations and events.
        processes: the most that it may have, one after the other.
        port: of the store.
    """

    def __init__(self, folder: Path, processes: int, port: int) -> None:
        self.folder, self.processes, self.port = folder, processes, port
        self._store: dist.TCPStore | None = None
        self._words = memoryview(mmap.mmap(-1, 8 * (len(_COMMON) + processes * len(_OF_PROCESS)))).cast("q")

    def get(self, name: str, process: int = -1) -> int:
        """Return a word, of a process or common to all."""
        return self._words[self._place(name, process)]

    def set(self, name: str, value: int, process: int = -1) -> None:
        """Store a word."""
        self._words[self._place(name, process)] = value

    def _place(self, name: str, process: int) -> int:
        if process < 0:
            return _COMMON.index(name)
        return len(_COMMON) + process * len(_OF_PROCESS) + _OF_PROCESS.index(name)

    def invite(self, members: list[int], sizes: dict[str, Any], reopen: bool = False) -> Invitation:
        """Write an invitation."""
        made = Invitation(self.get("invited") + 1, members, sizes, reopen)
        named = {**sizes, "dtype": str(sizes.get("dtype", torch.bfloat16)).removeprefix("torch.")}
        (self.folder / f"invitation{made.number}").write_text(json.dumps(made._replace(sizes=named)))
        self.set("invited", made.number)
        return made

    def invitation(self, number: int) -> Invitation:
        """Read an invitation."""
        made = Invitation(*json.loads((self.folder / f"invitation{number}").read_text()))
        return made._replace(sizes={**made.sizes, "dtype": getattr(torch, made.sizes["dtype"])})

    def group(self, invitation: Invitation, process: int) -> dist.ProcessGroup:
        """Make the group of an invitation."""
        if self._store is None:  # one connection of this process, so that it has the same descriptors in each life
            self._store = dist.TCPStore("127.0.0.1", self.port, is_master=False)
        store = dist.PrefixStore(f"{invitation.number}/", self._store)
        return dist.ProcessGroup(store, invitation.members.index(process), len(invitation.members))

    def note(self, process: int, **event: Any) -> None:
        """Append an event of a process to its file."""
        with (self.folder / f"events{process}").open("a") as file:
            file.write(json.dumps(event) + "\n")

    def events(self, process: int) -> list[dict[str, Any]]:
        """Return the events of a process."""
        path = self.folder / f"events{process}"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


class Member:
    """A process of a job, which makes rounds until the supervisor stops the job or it is killed.

    Args:
        job: of the process.
        process: its id.
        make_round: makes a round, and checks it: called with the Buffer and a number, the same on all ranks.
        at_rest: called with the Member after each round.
    """

    def __init__(
        self,
        job: Job,
        process: int,
        make_round: Callable[[moecomm.Buffer, int], None],
        at_rest: Callable[[Member], None] = lambda member: None,
    ) -> None:
        self.job, self.process = job, process
        self._make_round, self._at_rest = make_round, at_rest
        self.members: list[int] = []
        self.number = self.rounds = self._shrinks = self._tried = self._failed = 0
        self.buffer: moecomm.Buffer
        # When the Buffer that has not made a round yet began to grow, all that join it were there, or it had shrunk.
        self._begun = 0.0

    def run(self, number: int) -> None:
        """Join by that invitation, and make rounds."""
        made = self.job.invitation(number)
        self.job.set("waits_ns", time.monotonic_ns(), self.process)
        self.job.set("waits_for", number, self.process)
        try:
            self.buffer = moecomm.Buffer(self.job.group(made, self.process), **made.sizes)
        except moecomm.RoundFailed as error:
            self.job.note(self.process, kind="not joined", error=type(error).__name__)
            os._exit(NOT_JOINED)
        self._take(made, "join")
        # Nobody joins before the last of those that join together is there.
        new = (one for one in self.members if self.job.get("waits_for", one) == number)
        self._begun = max(self.job.get("waits_ns", one) for one in new) / 1e9
        while self._go_on():
            pass
        self.buffer.close()

    @property
    def life(self) -> int:
        """The number of this membership, the same on all its ranks."""
        return self._tried << 16 | self._shrinks

    def _take(self, made: Invitation, kind: str) -> None:
        self.members, self._tried, self._shrinks = made.members, made.number, 0
        assert self.buffer.num_ranks == len(self.members) and self.members[self.buffer.rank] == self.process
        self._begin(0)
        self._kind = kind

    def _begin(self, number: int) -> None:
        self.number = number
        for name, value in (("number", number), ("ranks", len(self.members)), ("life", self.life)):
            self.job.set(name, value, self.process)

    def _go_on(self) -> bool:
        try:
            self._make_round(self.buffer, self.life * 1_000_003 + self.number)
        except moecomm.RoundFailed as error:
            self._shrink(error)
            return True
        if self._begun:
            self.job.note(self.process, kind=self._kind, ms=1e3 * (time.monotonic() - self._begun))
            self._begun = 0.0
        done, self.number, self.rounds = self.number, self.number + 1, self.rounds + 1
        self.job.set("number", self.number, self.process)
        self.job.set("rounds", self.rounds, self.process)
        self._at_rest(self)
        # Rank 0 stored the words before the round that has ended, which no rank finishes without it.
        if self.job.get("acts") != self.life << 24 | done:
            if self.buffer.rank == 0:
                self._lead()
            return True
        if self.job.get("act") == STOP:
            return False
        self._grow(self.job.invitation(self.job.get("act")))
        return True

    def _lead(self) -> None:
        """Name the round after which all ranks act, once new processes wait."""
        if self.job.get("stopping"):
            act = STOP
        elif (act := self.job.get("invited")) > max(self._tried, self._failed):
            made = self.job.invitation(act)
            if not set(self.members) <= set(made.members):
                return
            come = {made.members[rank] for rank in self.buffer.joining(self.job.group(made, self.process))}
            if come != set(made.members) - set(self.members):
                return
        else:
            return
        self.job.set("act", act)
        self.job.set("acts", self.life << 24 | self.number)

    def _grow(self, made: Invitation) -> None:
        begin = time.monotonic()
        group = self.job.group(made, self.process)
        try:
            if made.reopen:
                self.buffer.close()
                self.buffer = moecomm.Buffer(group, **made.sizes)
            else:
                self.buffer.grow(group)
        except moecomm.RoundFailed as error:
            if made.reopen:
                raise
            took = 1e3 * (time.monotonic() - begin)
            self.job.note(self.process, kind="not grown", error=type(error).__name__, ms=took)
            self._failed = made.number
            return  # the Buffer is as it was; if it has lost a rank, the next round says so
        self._begun = begin
        self._take(made, "reopen" if made.reopen else "grow")

    def _shrink(self, error: moecomm.RoundFailed) -> None:
        begin = time.monotonic()
        self.job.set("shrinking", self.life + 1, self.process)  # the life that follows
        named = self.members[error.peer] if 0 <= error.peer < len(self.members) else -1
        died_ns = self.job.get("died_ns", named) if named >= 0 else 0
        try:
            found = self.buffer.shrink()
        except moecomm.Excluded:
            self.job.note(self.process, kind="excluded", error=type(error).__name__)
            os._exit(EXCLUDED)
        took = 1e3 * (time.monotonic() - begin)
        lost = [self.members[place] for place in found.lost]
        self.members = [self.members[place] for place in found.ranks]
        self._shrinks += 1
        assert self.buffer.num_ranks == len(self.members) and self.members[self.buffer.rank] == self.process
        self.job.note(
            self.process,
            kind="shrink",
            error=type(error).__name__,
            peer=named,
            noticed_ms=1e3 * begin - died_ns / 1e6 if died_ns else None,
            ms=took,
            lost=lost,
        )
        self._begin(0)
        self._begun, self._kind = time.monotonic(), "first_round_after_shrink"


def main(job: Job, process: int, member: Callable[[Job, int], Member]) -> None:
    """The body of a process.  It is ready, and waits, before the supervisor says by which invitation to join."""
    torch.set_num_threads(1)
    code = 1
    try:
        made = member(job, process)
        parent = os.getppid()
        while not (number := job.get("called", process)):
            if os.getppid() != parent:
                os._exit(0)
            time.sleep(NAP_S)
        made.run(number)
        code = 0
    except BaseException as error:  # noqa: BLE001 - the supervisor reports it, whatever it is
        job.note(process, kind="failed", error=f"{error!r}", text=traceback.format_exc())
    os._exit(code)
