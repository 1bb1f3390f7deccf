"""Flight records: what every rank did last, as files, and which rank went astray first.

`moecomm.rounds.flight` has the ring of a Buffer; `record` turns it into a dictionary in the format of torch's flight
recorder, `reading` reads files of it back, and `explain` compares those of all ranks.  This module writes them: when a
round fails, when SIGTERM comes, and when an exception ends the use of a Buffer.

They go to the folder that MOECOMM_FLIGHT_DIR names; without it nothing is written and no signal handler installed.  A
rank has one file a Buffer, `moecomm-<identity of the Buffer>-rank<rank>.json`, mode 0600, which is replaced whenever
there is a new reason to write it.
"""

from __future__ import annotations

import atexit
import json
import logging
import os
import signal
import sys
import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

from moecomm import config
from moecomm.base import trusted_files
from moecomm.base.trusted_files import Access
from moecomm.errors import BadInput
from moecomm.observe import tracing
from moecomm.observe.flight.record import flight_record
from moecomm.rounds.flight import shown
from moecomm.rounds.rounds import Rounds

__all__ = ["Recorder", "prepare"]

log = logging.getLogger("moecomm")

_watched: dict[int, weakref.ref[Rounds]] = {}  # by id; a handler may run while another thread adds to it
_installed = False


class Recorder:
    """The recorder of a Buffer: its flight record and its trace.  Writes what rounds do, where somebody wants it.

    Args:
        rounds: of a Buffer that has just been opened.
        before: of the same Buffer, before shrink() or grow().
    """

    def __init__(self, rounds: Rounds, before: Rounds | None) -> None:
        self._rounds = rounds
        watch(rounds, before)
        tracing.watch(rounds, before)

    def record(self) -> dict[str, Any]:
        return flight_record(self._rounds)

    def dump(self, path: str | os.PathLike[str]) -> None:
        if not isinstance(path, (str, os.PathLike)) or isinstance(os.fspath(path), bytes):
            raise BadInput("path", repr(path), "a path")
        try:
            trusted_files.write(Path(path), Access.ANY, _content(self._rounds))
        except (OSError, ValueError) as error:  # ValueError: a null character
            raise BadInput("path", repr(str(path)), f"a file that can be written ({error})") from error

    def left(self, error: BaseException) -> None:
        """Take note of the exception that closes the Buffer, here and for ranks that wait for this one."""
        left(self._rounds, error)
        self._rounds.leave_error(error)


def prepare() -> None:
    """Check the folder of MOECOMM_FLIGHT_DIR, and make it if it is missing.  Raises BadInput."""
    if (folder := config.flight_directory()) is not None:
        trusted_files.prepare_directory("MOECOMM_FLIGHT_DIR", folder)


def watch(rounds: Rounds, before: Rounds | None) -> None:
    """Write the flight record of these rounds when there is a reason to, if there is a folder.

    Args:
        rounds: of a Buffer that has just been opened.
        before: of the same Buffer, before shrink() or grow().
    """
    if before is not None:
        rounds.flight.before = before.origin.identity, before.rank
    folder = config.flight_directory()
    if folder is None:
        return
    reference, place = weakref.ref(rounds, _forget(id(rounds))), _file(folder, rounds)

    def write(reason: str) -> None:
        if (found := reference()) is not None:
            _write(found, place, reason)

    rounds.flight.on_failure = write
    _watched[id(rounds)] = reference
    _install()


def left(rounds: Rounds, error: BaseException) -> None:
    """Write the record of a Buffer that an exception closes, unless a failure of its own has been written."""
    flight = rounds.flight
    if flight.on_failure is not None and not flight.reasons and not rounds.closed:
        flight.raised = shown(error)
        flight.on_failure(type(error).__name__)


def _content(rounds: Rounds) -> bytes:
    return json.dumps(flight_record(rounds), indent=1).encode()


def _file(folder: Path, rounds: Rounds) -> Path:
    return folder / f"moecomm-{rounds.origin.identity}-rank{rounds.rank}.json"


def _write(rounds: Rounds, path: Path, reason: str) -> None:
    rounds.flight.reasons.append(reason)
    try:
        trusted_files.write(path, Access.READ_ONLY, _content(rounds))
    except OSError as error:  # the error that is about to be raised must not be lost
        log.warning("rank %d: no flight record was written to %s: %s", rounds.rank, path, error)


def _forget(key: int) -> Callable[[weakref.ref[Rounds]], None]:
    def forget(reference: weakref.ref[Rounds]) -> None:
        if _watched.get(key) is reference:
            del _watched[key]

    return forget


def _open() -> list[Rounds]:
    """Return the watched rounds of all open Buffers of this process."""
    found = [reference() for reference in list(_watched.values())]
    return [rounds for rounds in found if rounds is not None and not rounds.closed]


def _install() -> None:
    """Install the handler of SIGTERM and the one of the end of the process, once in a process."""
    global _installed
    if _installed:
        return
    process = os.getpid()

    def at_exit() -> None:
        # The interpreter has printed the exception that ends the main thread, and keeps it here.
        error = getattr(sys, "last_value", None)
        if error is not None and os.getpid() == process:
            for rounds in _open():
                left(rounds, error)

    if threading.current_thread() is not threading.main_thread():
        log.info("flight records are not written on SIGTERM: a thread beside the main one has opened the first Buffer")
        return
    _installed = True
    atexit.register(at_exit)
    before = signal.getsignal(signal.SIGTERM)
    if before is None:
        log.info("flight records are not written on SIGTERM: a handler that Python does not know is installed")
        return

    def handle(number: int, frame: FrameType | None) -> None:
        for rounds in _open():
            if rounds.flight.on_failure is not None:
                rounds.flight.on_failure("SIGTERM")
        if callable(before):
            before(number, frame)
        elif before == signal.SIG_DFL:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGTERM)

    signal.signal(signal.SIGTERM, handle)
