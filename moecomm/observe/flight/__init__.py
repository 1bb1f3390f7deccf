"""Flight records: what every rank did last, as files, and which rank went astray first.

`moecomm.rounds.flight` has the ring of a Buffer; `record` turns it into a dictionary in the format of torch's flight
recorder, `files` writes that, and `explain` compares the files of all ranks.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from moecomm.errors import BadInput
from moecomm.observe import tracing
from moecomm.observe.flight import files
from moecomm.observe.flight.files import prepare
from moecomm.observe.flight.record import flight_record
from moecomm.rounds.rounds import Rounds

__all__ = ["Recorder", "prepare"]


class Recorder:
    """The recorder of a Buffer: its flight record and its trace.  Writes what rounds do, where somebody wants it.

    Args:
        rounds: of a Buffer that has just been opened.
        before: of the same Buffer, before shrink() or grow().
    """

    def __init__(self, rounds: Rounds, before: Rounds | None) -> None:
        self._rounds = rounds
        files.watch(rounds, before)
        tracing.watch(rounds, before)

    def record(self) -> dict[str, Any]:
        return flight_record(self._rounds)

    def dump(self, path: str | os.PathLike[str]) -> None:
        if not isinstance(path, (str, os.PathLike)) or isinstance(os.fspath(path), bytes):
            raise BadInput("path", repr(path), "a path")
        try:
            files.dump(self._rounds, Path(path))
        except (OSError, ValueError) as error:  # ValueError: a null character
            raise BadInput("path", repr(str(path)), f"a file that can be written ({error})") from error

    def left(self, error: BaseException) -> None:
        """Take note of the exception that closes the Buffer, here and for ranks that wait for this one."""
        files.left(self._rounds, error)
        self._rounds.leave_error(error)
