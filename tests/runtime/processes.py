"""Starts tests/runtime/child.py, and counts what a process holds."""

from __future__ import annotations

import gc
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from moecomm import _native


class Child:
    """A process that runs one function of child.py."""

    def __init__(self, function: str, *arguments: Any) -> None:
        command = [
            sys.executable,
            str(Path(__file__).parent / "child.py"),
            _native.__file__,
            function,
            json.dumps(arguments),
        ]
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(
            command, stdin=pipe, stdout=pipe, stderr=pipe, text=True, start_new_session=True
        )

    def say(self, value: Any) -> None:
        assert self.process.stdin is not None
        print(json.dumps(value), file=self.process.stdin, flush=True)

    def hear(self) -> Any:
        assert self.process.stdout is not None
        assert self.process.stderr is not None
        line = self.process.stdout.readline()
        assert line, self.process.stderr.read()
        return json.loads(line)


@contextmanager
def children(function: str, *argument_lists: tuple[Any, ...]) -> Iterator[list[Child]]:
    """One child a tuple of arguments; none outlives the block."""
    started: list[Child] = []
    try:
        for arguments in argument_lists:
            started.append(Child(function, *arguments))
        yield started
    finally:
        for child in started:
            with suppress(ProcessLookupError):
                os.killpg(child.process.pid, signal.SIGKILL)  # it may have children of its own
            child.process.communicate()


def open_fds() -> int:
    """File descriptors of this process, without those of garbage."""
    gc.collect()
    return len(os.listdir("/proc/self/fd"))
