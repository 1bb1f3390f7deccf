"""Counters of a running job in small files, for `moecomm top`.

A thread of the process reads the counters of its Buffers once a second, beside the rounds, and replaces one file for
each.  A file holds two samples, at most WINDOW seconds apart, so that one look shows rates.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import logging
import os
import socket
import threading
import time
from collections import deque
from pathlib import Path
from typing import Any, NamedTuple

from moecomm import config
from moecomm.base import trusted_files
from moecomm.base.trusted_files import Access
from moecomm.observe.stats.counters import Beside, Stats
from moecomm.rounds import names
from moecomm.rounds.rounds import Part, Rounds

log = logging.getLogger("moecomm")

FORMAT = 1
WINDOW, EVERY_S = 10, 1.0  # samples; between two

_lock = threading.Lock()
_publishing = False


class Sample(NamedTuple):
    """Counters at a moment, wall clock."""

    time_ns: int
    stats: Stats


class Publisher:
    """Writer of the counters of the Buffers of this process to a folder."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._process = folder, os.getpid()
        self._samples: dict[str, deque[Sample]] = {}  # by file
        self._files = threading.RLock()  # held while one is written or removed; a signal handler may close a Buffer
        self._ended = False

    def publish(self, opened: list[Rounds]) -> None:
        """Write one file for each Buffer, and remove those of Buffers that are gone.  Raises OSError.

        close() of a Buffer removes its file by itself: the process may end before the next call.
        """
        there = set()
        for rounds in opened:
            rounds.session.relax_captures()
            if (stats := own_stats(rounds)) is None:
                continue
            name = f"moecomm-top-{rounds.origin.identity}-rank{rounds.rank}.json"
            there.add(name)
            samples = self._samples.setdefault(name, deque(maxlen=WINDOW + 1))
            samples.append(Sample(time.time_ns(), stats))
            content = json.dumps(_content(rounds, samples)).encode()
            with self._files:
                if not (rounds.closed or self._ended):
                    rounds.add(_Published(self, name))
                    trusted_files.write(self._folder / name, Access.READ_ONLY, content)
        for name in self._samples.keys() - there:
            del self._samples[name]
            self.remove(name)

    def end(self) -> None:
        """Remove all files, and write no more.  A forked child leaves those of its parent."""
        if os.getpid() == self._process:
            with self._files:
                self._ended = True
                for name in list(self._samples):
                    self.remove(name)

    def remove(self, name: str) -> None:
        """Remove a file, if it is there."""
        with self._files, contextlib.suppress(OSError):  # close() does not fail for a folder that is gone
            (self._folder / name).unlink()


class _Published(Part):
    """The file of a Buffer, which ends with it."""

    def __init__(self, publisher: Publisher, name: str) -> None:
        self._publisher, self._name = publisher, name

    def close(self) -> None:
        self._publisher.remove(self._name)


def own_stats(rounds: Rounds) -> Stats | None:
    """Return the counters of this rank without waiting for rounds; None: not known now."""
    try:
        words = rounds.session.read_counters()
    except RuntimeError:  # of a broken CUDA context
        return None
    if words is None:
        return None
    beside = Beside(rounds.flight.retries, rounds.experts.absent.read())
    return Stats.of_words(words, rounds.num_ranks, len(rounds.local_experts), beside)


def publish() -> None:
    """Begin to publish, once in a process, where MOECOMM_TOP_DIR names a folder.  Raises BadInput."""
    global _publishing
    folder = config.top_directory()
    if folder is None or _publishing:
        return
    trusted_files.prepare_directory("MOECOMM_TOP_DIR", folder)
    with _lock:
        if not _publishing:
            _publishing, publisher = True, Publisher(folder)
            atexit.register(publisher.end)  # of Buffers that nobody has closed
            threading.Thread(target=_run, args=(publisher,), name="moecomm-top", daemon=True).start()


def _run(publisher: Publisher) -> None:
    warned = False
    while True:
        opened = names.opened()
        try:
            publisher.publish(opened)
        except OSError as error:
            if not warned:
                log.warning("no counters were written for moecomm top: %s", error)
            warned = True
        del opened  # or this thread keeps closed Buffers
        time.sleep(EVERY_S)


def _content(rounds: Rounds, samples: deque[Sample]) -> dict[str, Any]:
    return {
        "format": FORMAT,
        "buffer": rounds.origin.identity,
        "rank": rounds.rank,
        "ranks": rounds.num_ranks,
        "backend": rounds.session.name,
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "samples": [{"time_ns": s.time_ns, "stats": s.stats.lists()} for s in (samples[0], samples[-1])],
    }


def _after_fork() -> None:
    """Forget the publishing thread, which a forked child does not have."""
    global _publishing
    _publishing = False


os.register_at_fork(after_in_child=_after_fork)
