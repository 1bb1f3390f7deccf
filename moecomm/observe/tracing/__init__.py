"""Traces: what every rank does when, as spans in files, and those of all ranks merged into one for Perfetto.

`moecomm.rounds.spans` has the spans of a call; `files` writes them, one file a rank of a Buffer; `reading` reads them
back, `clocks` aligns those of several hosts, and `merge` makes one Chrome trace of them.
"""

from __future__ import annotations

from moecomm.observe.tracing.control import prepare, trace, watch

__all__ = ["prepare", "trace", "watch"]
