"""Workspace: the symmetric memory and the counters of the operators, over a Window."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, NoReturn, TypeVar

import torch
from torch._C import _functorch

from moecomm import _native
from moecomm.base.bound import Bound
from moecomm.base.choices import BackendName
from moecomm.base.weak import WeakTable
from moecomm.errors import BadInput, Closed, ConcurrentCall, Mismatch, OutOfStep
from moecomm.fused.fp8 import Fp8
from moecomm.overlap import agreement
from moecomm.overlap.exchanges import UNIT
from moecomm.overlap.executors import Executors, GpuExecutors, HostExecutors
from moecomm.overlap.measured import Choice
from moecomm.overlap.plans import MOST_PLANS, CallKey, CallNumbers, CallPlan, key_of, new_plan
from moecomm.rounds.failures import is_interrupt
from moecomm.window import Window

_Result = TypeVar("_Result")

_PREFIX = "moecomm_workspace_"
_SIGNALS = 16384
_opened = itertools.count()
_named: WeakTable[str, Workspace] = WeakTable()


class Workspace(Bound):
    """Memory and counters of the operators of moecomm.overlap.  Opening is collective.

    One thread at a time uses a Workspace.  All ranks make the same calls in the same order, those of backward passes
    included.

    Args:
        group: as of a moecomm.Window; or an open Window, whose memory and signals nothing else uses from then on.
            Its other ranks open a Workspace over it at the same time.  close() leaves such a Window open.
        nbytes: memory of each rank, the same on all ranks; none with a Window.  On CPUs a call needs what a rank
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
        self._owns, self.turn = not isinstance(group, Window), CallNumbers()
        if isinstance(group, Window):
            if nbytes is not None or backend != "auto" or device is not None:
                raise BadInput("group", "a Window", "no nbytes, backend or device beside it: it has its own")
            self.window = group
        else:
            options: dict[str, Any] = {"nbytes": nbytes, "backend": backend, "device": device, "timeout_s": timeout_s}
            self.window = Window(group, signals=_SIGNALS, **options)  # it checks them
        try:
            with torch.inference_mode(False):  # executors keep tensors, for calls in either mode
                self._executors: Executors | None = self._open()
        except BaseException:
            if self._owns:
                self.window.close()
            raise
        self._device_type, self._counted_ahead = self.device.type, self.executors.counted_ahead
        self._plans: dict[tuple[Any, ...], CallPlan] = {}
        self._ended: OutOfStep | None = None  # ranks have made different calls
        self.name = f"{_PREFIX}{next(_opened)}"
        _named.add(self.name, self)

    def _open(self) -> Executors:
        if self.executor_bytes <= 0:
            raise BadInput("nbytes", self.window.nbytes, "512 or more")
        executors = HostExecutors if self.device.type == "cpu" else GpuExecutors
        return executors(self.window, self.executor_bytes, self.turn)

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
        """Bytes at the begin of the Window that executors use; headers of calls follow."""
        return self.window.nbytes // UNIT * UNIT - agreement.BYTES

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

    @property
    def choices(self) -> tuple[Choice, ...]:
        """Forms that calls with `fused=None` have chosen by a measurement, which this Workspace keeps.  CPUs: none.

        Raises Closed.
        """
        return self.executors.choices

    def call(self, of: int = agreement.FORWARD, *, outer: bool = False) -> _native.Call:
        """Return the context of a call, for the operators' own use.

        Args:
            of: number of the call whose gradient this one computes, the same on all ranks; see agreement.FORWARD.
            outer: it consists of others.

        Raises, at its begin:
            OutOfStep: ranks have made different calls.
            ConcurrentCall: another call is under way, in another thread or below a signal handler.  The refused call
                counts as failed.
            Closed: the Workspace is closed.
        """
        return _native.Call(self, 1, of, outer)

    def _begin_call(self, rounds: int, nested: bool, of: int) -> None:
        if self._executors is None or self.window.closed or self._ended is not None:
            if self._ended is None or self.closed:
                raise Closed("Workspace")
            raise self._ended.with_traceback(None)
        self.turn.of = of

    def _refuse(self) -> NoReturn:
        raise ConcurrentCall("Workspace")

    def _count_refused(self) -> None:
        while self.turn.uncounted > 0:
            self.turn.failed += 1
            self.turn.counted()

    def _interrupted(self, error: BaseException | None, of: int) -> None:
        if self.window.num_ranks > 1 and (error is None or is_interrupt(error)):
            self.window.abort()

    def _call_failed(self, error: BaseException, missed: bool, of: int) -> None:
        if missed:
            self.turn.failed += 1
        if isinstance(error, Mismatch) and not isinstance(error, OutOfStep):
            self._ended = OutOfStep.after(error, "Workspace")

    def check(self) -> None:
        """Wait for the device, and raise the error of a wait that has failed, if any.  See Window.check."""
        self.window.check()

    def abort(self) -> None:
        """End every wait of all ranks at once, from any thread.  The Workspace can then only be closed."""
        self.window.abort()

    def close(self) -> None:
        """Let go of the memory.  Local and idempotent."""
        _named.pop(self.name)
        self._executors = None  # its views keep memory mapped, and so do those of plans
        self._plans.clear()
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
    if type(output) is not torch.Tensor:
        return agreement.UNKNOWN
    return (_named.get(workspace) or find(workspace)).turn.made


def name_of(workspace: Workspace | str) -> str:
    """Return the name of a Workspace, or the name that is given.  Raises BadInput for anything else."""
    if not isinstance(workspace, (Workspace, str)):
        raise BadInput("workspace", type(workspace).__name__, "a Workspace, or its .name")
    return workspace if isinstance(workspace, str) else workspace.name


class Repeated(NamedTuple):
    """A call that has a plan.

    Attributes:
        owner: its Workspace.
        plan: the function that runs the call.
        tensors: its tensors; those of pairs one by one.
        gradient: see Sizes.
        direct: the plan may run without the operator: no gradient is wanted, and no mode, transform or profiler is on.
    """

    owner: Workspace
    plan: CallPlan
    tensors: list[torch.Tensor]
    gradient: bool | None
    direct: bool

    def arguments(self, *options: Any) -> tuple[Any, ...]:
        """Return the arguments of an operator of torch of two matrices, with these options."""
        parts = len(self.tensors) // 2
        x, w = self.tensors[0], self.tensors[parts]
        scales = (self.tensors[1], self.tensors[3]) if parts == 2 else (None, None)
        return x, w, self.owner.name, *options, *scales


def run_plan(call: Repeated, of: int = agreement.FORWARD) -> Any:
    """Run a call by its plan.  `of`: see Workspace.call.  Raises as that, and as the operator."""
    owner, plan = call.owner, call.plan
    with owner.call(of):
        owner.turn.made += owner._counted_ahead
        given: list[Any] = []
        for tensor, contiguous in zip(call.tensors, plan.contiguous, strict=True):
            tensor = tensor if contiguous else tensor.contiguous()
            given.append(tensor.clone() if tensor.data_ptr() % 16 else tensor)
        if len(given) == 4:
            given = [Fp8(*given[:2]), Fp8(*given[2:])]
        if torch.is_autocast_enabled(owner._device_type):
            with torch.autocast(owner._device_type, enabled=False):
                return plan.run(*given)
        return plan.run(*given)


def outer(owner: Workspace, function: Callable[..., _Result], *given: Any, **how: Any) -> _Result:
    """Call a function that makes a call of this thread, and count it if it fails before that.  Raises as call()."""
    with owner.call(outer=True):
        return function(*given, **how)


def first(workspace: Any, function: Callable[..., _Result], *given: Any) -> _Result:
    """Make a call of a collective function that checks its arguments, so that it is counted if it fails."""
    if not isinstance(workspace, (Workspace, str)):
        return function(*given)  # which says so
    return outer(find(name_of(workspace)), function, *given)


def repeated(
    operator: str, workspace: Workspace | str, options: Sequence[Any], operands: Sequence[Any], *known: bool | None
) -> Repeated | None:
    """Return a call with its plan; None: it is the first of its kind, or has none.  For arguments see key_of()."""
    owner = _named.get(workspace) if isinstance(workspace, str) else workspace
    if not isinstance(owner, Workspace) or (found := key_of(operator, options, operands, *known)) is None:
        return None
    if (plan := owner._plans.get(found.key)) is None:
        return None
    for tensor, span in zip(found.tensors, plan.spans, strict=True):
        begin = tensor.storage_offset() * tensor.element_size()
        if span and begin + span > tensor.untyped_storage().nbytes():  # it has been resized
            return None
    watched = (
        torch._C._len_torch_dispatch_stack()
        or torch._C._len_torch_function_stack()
        or _functorch.maybe_current_level() is not None
        or torch._C._autograd._profiler_enabled()
    )
    return Repeated(owner, plan, found.tensors, found.gradient, not (watched or found.has_gradient))


def keep(owner: Workspace, found: CallKey | None, run: Callable[..., Any]) -> None:
    """Keep what runs calls with this key."""
    if found is not None and owner._executors is not None:
        if len(owner._plans) >= MOST_PLANS:
            owner._plans.clear()
        owner._plans[found.key] = new_plan(run, found.tensors)
