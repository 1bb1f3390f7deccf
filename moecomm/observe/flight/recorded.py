"""The part of a Buffer that returns and writes its flight record."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from moecomm.errors import BadInput
from moecomm.observe.flight import files
from moecomm.observe.flight.record import flight_record
from moecomm.rounds.rounds import Rounds


class Recorded:
    """Calls of a Buffer about its flight record."""

    rounds: Rounds

    def flight_record(self) -> dict[str, Any]:
        """Return the last 256 calls of this rank and the failures that it knows of.

        Waits for nothing, and works from any thread, during a call of another one, and after close().  The format is
        that of torch's flight recorder, with more names: see "Observing" in the documentation.
        """
        return flight_record(self.rounds)

    def dump_flight_record(self, path: str | os.PathLike[str]) -> None:
        """Write flight_record() to a file as JSON, mode 0600.  `moecomm explain` compares those of all ranks.

        Args:
            path: of the file, which is replaced if it is there.  Its folder is made if it is missing.

        Raises:
            BadInput: no path, or a file that can't be written.
        """
        if not isinstance(path, (str, os.PathLike)) or isinstance(os.fspath(path), bytes):
            raise BadInput("path", repr(path), "a path")
        try:
            files.dump(self.rounds, Path(path))
        except (OSError, ValueError) as error:  # ValueError: a null character
            raise BadInput("path", repr(str(path)), f"a file that can be written ({error})") from error
