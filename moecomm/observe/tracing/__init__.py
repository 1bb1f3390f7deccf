"""Traces: what every rank does when, as spans in files, and those of all ranks merged into one for Perfetto.

`moecomm.rounds.spans` has the spans of a call; `files` writes them, one file a rank of a Buffer; `reading` reads them
back, and `merge` aligns the clocks of several hosts and makes one Chrome trace.  This module has the switch:
MOECOMM_TRACE_DIR, or a block of moecomm.trace().  Calls of traced Buffers are NVTX ranges, too.
"""

from __future__ import annotations

import importlib
import logging
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

from moecomm import config
from moecomm.base import layers, trusted_files
from moecomm.errors import BadInput
from moecomm.gpu import span_ring
from moecomm.observe.tracing.files import SpanFile
from moecomm.rounds import names
from moecomm.rounds.rounds import Rounds
from moecomm.rounds.spans import Ranges, Spans

__all__ = ["prepare", "trace", "watch"]

log = logging.getLogger("moecomm")

_DOMAIN = "moecomm"  # of NVTX

_lock = threading.Lock()
_folder: Path | None = None  # of the blocks of trace() that are open
_blocks = 0  # how many there are: ranks that are threads open one each


@contextmanager
def trace(folder: str | os.PathLike[str], *, model: torch.nn.Module | None = None) -> Iterator[None]:
    """Write the spans of all Buffers of this process to files, for as long as the block lasts.

    Each rank writes what it does: calls, rounds, waits of the host, steps of rounds on CPUs, roles of warps on GPUs.
    `moecomm trace merge` makes one file of those of all ranks, for https://ui.perfetto.dev.  Calls and rounds are NVTX
    ranges as well, where NVTX is there.  MOECOMM_TRACE_DIR is for programs without such a block.

    A rank that is a thread may open a block of its own, for the same folder.  Without a trace a round tests one
    pointer, and kernels are the same.

    Args:
        folder: of the files; made if it is missing.
        model: name spans and NVTX ranges of rounds by the layers of this model.  These are layers of
            nn.ExpertParallel and of Megatron's adapter; moecomm.layer() names any other.  Rounds of a backward pass
            have no layer.

    Raises:
        BadInput: a folder that can't be written, or that other users can write to; another folder than that of a trace
            that has begun; a model without such layers, or a compiled one, whose layers run no hooks.
    """
    if not isinstance(folder, (str, os.PathLike)) or not isinstance(os.fspath(folder), str) or not os.fspath(folder):
        raise BadInput("folder", repr(folder), "a path")
    path = Path(folder).absolute()
    with nullcontext() if model is None else layers.naming(model):
        trusted_files.prepare_directory("folder", path)
        _begin(path)
        try:
            yield
        finally:
            _end()


def prepare() -> None:
    """Check the folder of MOECOMM_TRACE_DIR, and make it if it is missing.  Raises BadInput."""
    if (folder := config.trace_directory()) is not None:
        trusted_files.prepare_directory("MOECOMM_TRACE_DIR", folder)


def watch(rounds: Rounds, before: Rounds | None) -> None:
    """Trace these rounds from now on, if there is a trace.

    Args:
        rounds: of a Buffer that has just been opened.
        before: of the same Buffer, before shrink() or grow().
    """
    with _lock:
        folder = _folder or config.trace_directory()
        if folder is not None:
            span_ring.wanted = True
            _start(rounds, folder, before)


def _begin(folder: Path) -> None:
    global _folder, _blocks
    with _lock:
        going_on = _folder or config.trace_directory()
        if going_on not in (None, folder):
            raise BadInput("folder", repr(str(folder)), f"{str(going_on)!r}, where a trace has begun")
        _folder = folder
        _blocks += 1
        span_ring.wanted = True
        for rounds in names.opened():
            _start(rounds, folder, None)


def _end() -> None:
    global _folder, _blocks
    with _lock:
        _blocks -= 1
        if _blocks > 0:
            return
        _folder = None
        if config.trace_directory() is not None:
            return
        span_ring.wanted = False
        for rounds in names.opened():
            if (spans := rounds.flight.spans) is not None:
                rounds.flight.spans = None
                spans.finish()
                rounds.plans.clear()  # they have kernels that write spans


def _start(rounds: Rounds, folder: Path, before: Rounds | None) -> None:
    if rounds.flight.spans is not None:
        return
    try:
        file = SpanFile(folder, rounds, before)
    except (OSError, RuntimeError) as error:  # of a disk, or a driver; a trace is no reason for a job to end
        log.warning("rank %d: no trace is written to %s: %s", rounds.rank, folder, error)
        return
    rounds.flight.spans = Spans(file, nvtx_ranges())
    rounds.plans.clear()  # they have kernels that write no spans


class _OfPackage:
    """NVTX ranges through the package nvtx."""

    def __init__(self, nvtx: Any) -> None:
        self._nvtx = nvtx

    def push(self, name: str) -> None:
        self._nvtx.push_range(name, domain=_DOMAIN)

    def pop(self) -> None:
        self._nvtx.pop_range(domain=_DOMAIN)


class _OfTorch:
    """NVTX ranges through torch."""

    def push(self, name: str) -> None:
        torch.cuda.nvtx.range_push(name)  # type: ignore[no-untyped-call]

    def pop(self) -> None:
        torch.cuda.nvtx.range_pop()  # type: ignore[no-untyped-call]


@lru_cache(maxsize=1)
def nvtx_ranges() -> Ranges | None:
    """Return the ranges of a profiler, which cost little where none listens; None: NVTX is not there."""
    try:
        return _OfPackage(importlib.import_module("nvtx"))
    except ImportError:
        return _OfTorch() if torch.version.cuda is not None else None
