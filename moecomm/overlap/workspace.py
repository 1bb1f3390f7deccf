"""Workspace: the symmetric memory and the counters of the operators, over a Window."""

from __future__ import annotations

import functools
import itertools
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NoReturn, ParamSpec, TypeVar

import torch

from moecomm.base.bound import Bound
from moecomm.base.choices import BackendName
from moecomm.errors import BadInput, Closed, ConcurrentCall, Mismatch, OutOfStep
from moecomm.overlap import agreement
from moecomm.overlap.executors import Executors, GpuExecutors, HostExecutors
from moecomm.window import Window

_Arguments = ParamSpec("_Arguments")
_Result = TypeVar("_Result")

_PREFIX = "moecomm_workspace_"
_SIGNALS = 16384
_numbers = itertools.count()
_named: weakref.WeakValueDictionary[str, Workspace] = weakref.WeakValueDictionary()


class Workspace(Bound):
    """Memory and counters of the operators of moecomm.overlap.  Opening is collective.

    One thread at a time uses a Workspace.  All ranks make the same calls in the same order, those of backward passes
    included.

    Args:
        group: as of a moecomm.Window; or an open Window, whose memory and signals nothing else uses from then on.
            Its other ranks open a Workspace over it at the same time.  close() leaves such a Window open.
        nbytes: memory of each rank, the same on all ranks; none with a Window.  On CPUs a call needs twice what a rank
            publishes in it, on GPUs more (docs/overlap.md, Limits).  Its error names the bytes if there are fewer.
        backend: as of a Window.
        device: as of a Window.
        timeout_s: how long any wait for a peer may take, in seconds.

    Raises:
        BadInput: a value that can't be used, or a Window with options of another.
        Mismatch, Unsupported, Timeout, PeerLost, Aborted: as a Window.
    """

    def __init__(
        self,
        group: Any,
        nbytes: int | None = None,
        *,
        backend: BackendName = "auto",
        device: torch.device | str | int | None = None,
        timeout_s: float = 30.0,
    ) -> None:
        self._owns = not isinstance(group, Window)
        if isinstance(group, Window):
            if nbytes is not None or backend != "auto" or device is not None:
                raise BadInput("group", "a Window", "no nbytes, backend or device beside it: it has its own")
            self.window = group
        else:
            options: dict[str, Any] = {"backend": backend, "device": device, "timeout_s": timeout_s}
            self.window = Window(group, nbytes, signals=_SIGNALS, **options)  # it checks them
        try:
            self._executors: Executors | None = self._open()
        except BaseException:
            if self._owns:
                self.window.close()
            raise
        self._turn = threading.RLock()  # held by the thread that is in a call
        self._depth = 0  # of that thread's calls
        self._running = False  # a call that contains no other
        self._refused: list[None] = []  # an entry for each call that was refused and is not counted yet
        self._ended: OutOfStep | None = None  # ranks have made different calls
        self.name = f"{_PREFIX}{next(_numbers)}"
        _named[self.name] = self

    def _open(self) -> Executors:
        if self.executor_bytes <= 0:
            raise BadInput("nbytes", self.window.nbytes, "512 or more")
        if self.device.type == "cpu":
            return HostExecutors(self.window)
        return GpuExecutors(self.window, self.executor_bytes)

    @property
    def rank(self) -> int:
        """This rank."""
        return self.window.rank

    @property
    def num_ranks(self) -> int:
        """Number of ranks."""
        return self.window.num_ranks

    @property
    def device(self) -> torch.device:
        """Device of the memory, on which all tensors must be."""
        return self.window.device

    @property
    def executor_bytes(self) -> int:
        """Bytes at the begin of the Window that executors use; the rest is for comparing first calls on GPUs."""
        return self.window.nbytes // 256 * 256 - agreement.BYTES

    @property
    def closed(self) -> bool:
        """True once close() has been called, or the Window is closed."""
        return self._executors is None or self.window.closed

    @property
    def executors(self) -> Executors:
        """The executors, for the operators' own use.  Raises Closed."""
        if self._executors is None:
            raise Closed("Workspace")
        return self._executors

    @contextmanager
    def call(self, *, outer: bool = False, of: int = agreement.FORWARD) -> Iterator[Workspace]:
        """Count a call, for the operators' own use.

        Args:
            outer: the call contains another one, of the same thread.
            of: number of the call whose gradient this one computes, the same on all ranks; see agreement.FORWARD.

        Raises:
            OutOfStep: ranks have made different calls.
            ConcurrentCall: another call is under way, in another thread or below a signal handler.  The refused call
                counts as failed.
            Closed: the Workspace is closed.
        """
        if not self._turn.acquire(blocking=False):
            self._refuse()
        try:
            if self._running:
                self._refuse()
            executors = self.executors
            if self.window.closed:
                raise Closed("Workspace")
            if self._ended is not None:
                raise self._ended.with_traceback(None)
            executors.begin(of)
            while self._refused:
                self._refused.pop()
                executors.count_failed()
            first, before = self._depth == 0, executors.made
            self._depth += 1
            self._running = not outer
            try:
                with torch.autocast(self.device.type, enabled=False):  # it would choose other dtypes
                    yield self
            except Exception as error:
                if first and executors.made == before:
                    executors.count_failed()
                if isinstance(error, Mismatch) and not isinstance(error, OutOfStep):
                    self._ended = OutOfStep.after(error, "Workspace")
                raise
            finally:
                self._depth -= 1
                self._running = False
        finally:
            self._turn.release()

    def _refuse(self) -> NoReturn:
        self._refused.append(None)
        raise ConcurrentCall("Workspace")

    def check(self) -> None:
        """Wait for the device, and raise the error of a wait that has failed, if any.  See Window.check."""
        self.window.check()

    def abort(self) -> None:
        """End every wait of all ranks at once, from any thread.  The Workspace can then only be closed."""
        self.window.abort()

    def close(self) -> None:
        """Let go of the memory.  Local and idempotent."""
        _named.pop(self.name, None)
        self._executors = None  # its views keep memory mapped
        if self._owns:
            self.window.close()

    def __repr__(self) -> str:
        if "name" not in vars(self):  # the last attribute that the constructor sets
            return "<moecomm.overlap.Workspace, not open yet>"
        state = "closed" if self.closed else "open"
        return f"<moecomm.overlap.Workspace {state}, {self.window!r}>"

    def __enter__(self) -> Workspace:
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()


def find(name: str) -> Workspace:
    """Return the open Workspace of that name.

    Raises:
        Closed: it has been closed, or is gone.
        BadInput: no Workspace's name.
    """
    found = _named.get(name)
    if found is None or found.closed:
        if not name.startswith(_PREFIX):
            raise BadInput("workspace", repr(name), "a Workspace, or the .name of one of this process")
        raise Closed("Workspace")
    return found


def number_of_call(workspace: str, output: torch.Tensor) -> int:
    """Return the number of the call that has just made this output, by which its backward pass is known."""
    return find(workspace).executors.made if type(output) is torch.Tensor else agreement.UNKNOWN


def name_of(workspace: Workspace | str) -> str:
    """Return the name of a Workspace, or the name that is given.  Raises BadInput for anything else."""
    if not isinstance(workspace, (Workspace, str)):
        raise BadInput("workspace", type(workspace).__name__, "a Workspace, or its .name")
    return workspace if isinstance(workspace, str) else workspace.name


def counted(function: Callable[_Arguments, _Result]) -> Callable[_Arguments, _Result]:
    """Decorate a collective function, whose third argument is `workspace`, so that a call that fails is counted.

    While torch.compile traces, the function is called directly: graphs contain only the operators, which count their
    own calls.
    """

    @functools.wraps(function)
    def call(*args: _Arguments.args, **kwargs: _Arguments.kwargs) -> _Result:
        if torch.compiler.is_compiling():
            return function(*args, **kwargs)
        given = kwargs.get("workspace", args[2] if len(args) > 2 else None)
        if not isinstance(given, (Workspace, str)):
            return function(*args, **kwargs)  # which says so
        with find(name_of(given)).call(outer=True):
            return function(*args, **kwargs)

    return call
