"""Flight records: what every rank did last, as files, and which rank went astray first.

`moecomm.rounds.flight` has the ring of a Buffer; `record` turns it into a dictionary in the format of torch's flight
recorder, `files` writes that, and `explain` compares the files of all ranks.
"""

from __future__ import annotations

from moecomm.observe.flight.files import prepare
from moecomm.observe.flight.recorded import Recorder

__all__ = ["Recorder", "prepare"]
