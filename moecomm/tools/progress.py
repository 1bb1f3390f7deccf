"""Progress of a command."""

from __future__ import annotations

import itertools
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch.distributed as dist
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

Step = Callable[[str], None]  # called with the name of what comes next
_LINE_S = 5.0  # between lines of progress


@contextmanager
def progress(group: dist.ProcessGroup | None, total: int) -> Iterator[Step]:
    """Show the progress on standard error, from rank 0: a bar on a terminal, else a line now and then.

    Each step names the current measurement.  Without a group this process is alone.
    """
    console = Console(stderr=True)
    if group is not None and group.rank() != 0:
        yield lambda text: None
    elif not console.is_terminal:
        yield _lines(total)
    else:
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        with Progress(*columns, console=console, transient=True) as bar:
            task, done = bar.add_task("", total=total), itertools.count()
            yield lambda text: bar.update(task, completed=next(done), description=text)


def _lines(total: int) -> Step:
    """Return a step that prints a line, at most one every _LINE_S seconds."""
    done, begun, last = itertools.count(), time.monotonic(), -_LINE_S

    def step(text: str) -> None:
        nonlocal last
        number, elapsed = next(done), time.monotonic() - begun
        if elapsed - last >= _LINE_S:
            last = elapsed
            print(f"{number}/{total} after {elapsed:.0f} s: {text}", file=sys.stderr, flush=True)

    return step
