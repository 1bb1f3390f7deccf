"""Files of spans: one for each rank of a Buffer, written as the spans end, so that a killed rank leaves what it did.

`moecomm-<identity of the Buffer>-rank<rank>-<number>.spans`, mode 0600, has a line of JSON for each span, and a header
line before them.  A span is written with one system call when it ends.
"""

from __future__ import annotations

import json
import os
import secrets
import socket
import weakref
from contextlib import suppress
from pathlib import Path
from typing import Any

from moecomm import _native
from moecomm.core.processes import clock_domain
from moecomm.core.rounds import Rounds
from moecomm.core.spans import now_ns
from moecomm.jit import trusted_files
from moecomm.jit.trusted_files import Access

FORMAT = 1
SUFFIX = ".spans"


class SpanFile:
    """The file of one rank of a Buffer: a Sink.

    Raises:
        OSError: it can't be written.
    """

    def __init__(self, folder: Path, rounds: Rounds, before: Rounds | None) -> None:
        number = secrets.token_hex(4)  # a Buffer may be traced several times
        path = folder / f"moecomm-{rounds.identity}-rank{rounds.rank}-{number}{SUFFIX}"
        self._file = trusted_files.create(path, Access.READ_ONLY)
        weakref.finalize(self, os.close, self._file)
        self._record = rounds.session.context.record if rounds.on_cpu else 0
        self._put(_header(rounds, before))
        if self._record:
            _native.trace_rounds(self._record, True)
            self._untrace = weakref.finalize(self, _native.trace_rounds, self._record, False)

    def write(self, name: str, track: str, begin_ns: int, end_ns: int, args: dict[str, Any]) -> None:
        """See Sink."""
        self._put([name, track, begin_ns, end_ns, args])

    def drain(self) -> None:
        """See Sink."""
        if self._record:
            steps, dropped = _native.take_steps(self._record)
            if steps:
                self._put(*(_step(*step) for step in steps))
            if dropped:
                self._put({"dropped": dropped})

    def finish(self) -> None:
        """See Sink."""
        self.drain()
        if self._record:
            self._record = 0
            self._untrace()

    def _put(self, *lines: Any) -> None:
        text = "".join(f"{json.dumps(line, separators=(',', ':'))}\n" for line in lines)
        with suppress(OSError):  # a full disk is no reason for a round to fail
            os.write(self._file, text.encode())


def _step(begin_ns: int, end_ns: int, round_number: int, worker: int, peer: int, name: str) -> list[Any]:
    """Return the line of a step of a round on CPU ranks; `peer`: the rank that was waited for, -1: none."""
    args = {"round": round_number} if peer < 0 else {"round": round_number, "peer": peer}
    return [name if peer < 0 else f"wait for rank {peer}: {name}", f"thread {worker}", begin_ns, end_ns, args]


def _header(rounds: Rounds, before: Rounds | None) -> dict[str, Any]:
    return {
        "format": FORMAT,
        "buffer": rounds.identity,
        "before": None if before is None else {"buffer": before.identity, "rank": before.rank},
        "rank": rounds.rank,
        "ranks": rounds.num_ranks,
        "host": socket.gethostname(),
        "clock": clock_domain().hex(),
        "pid": os.getpid(),
        "backend": rounds.session.name,
        "barrier": list(rounds.barrier),
        "began_ns": now_ns(),
    }
