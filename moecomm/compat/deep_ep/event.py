"""deep_ep's events and Config.

moecomm works on the current stream, so an event is a mark on that stream; CPU ranks need none.  It takes the number of
SMs from a Config, whose chunk sizes are kept, checked and not needed.
"""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType
from typing import Any

import torch

from moecomm.base.validation import check_flag, check_integer, is_integer
from moecomm.errors import BadInput, Unsupported


def uses_cuda() -> bool:
    """Return whether this process has used CUDA; asking does not start it."""
    return bool(torch.cuda.is_initialized())  # type: ignore[no-untyped-call]


def comm_stream() -> torch.cuda.Stream:
    """Return the current stream, which is where moecomm works.  Raises Unsupported: CPU ranks have no stream."""
    if not uses_cuda():
        raise Unsupported("get_comm_stream: CPU ranks have no stream")
    return torch.cuda.current_stream()


class EventHandle:
    """A mark on the current CUDA stream, made where this is constructed; without CUDA there is nothing to mark."""

    __slots__ = ("_event",)

    def __init__(self) -> None:
        self._event: torch.cuda.Event | None = None
        if uses_cuda():
            self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._event.record()

    def current_stream_wait(self) -> None:
        """Make the current stream wait for what was on the marked one."""
        if self._event is not None:
            torch.cuda.current_stream().wait_event(self._event)


class EventOverlap:
    """An event with the objects to keep alive and the callbacks to run after it.

    `with overlap:` waits at the end of the block, so that the block's work runs beside what the event stands for.
    """

    event: EventHandle | None = None
    extra_tensors: tuple[Any, ...] | None = None
    hook_after_wait: Callable[[], Any] | None = None
    _release_at_exit = False

    def __init__(self, event: EventHandle | None = None, extra_tensors: tuple[Any, ...] | None = None) -> None:
        if event is not None and not isinstance(event, EventHandle):
            raise BadInput("event", type(event).__name__, "an EventHandle, or None")
        self.event = event
        self.extra_tensors = extra_tensors

    def current_stream_wait(self, release_handle: bool = False) -> Any:
        """Make the current stream wait, then run the registered hook, if any, and return its result."""
        check_flag("release_handle", release_handle)
        if self.event is None:
            raise BadInput("event", "None: the call was not asynchronous", "async_finish=True, or no wait")
        self.event.current_stream_wait()
        hook, self.hook_after_wait = self.hook_after_wait, None
        result = None if hook is None else hook()
        if release_handle:
            self.event = None
        return result

    def wait(self) -> Any:
        """current_stream_wait()."""
        return self.current_stream_wait()

    def register_hook_after_wait(self, hook_after_wait: Callable[[], Any]) -> None:
        """Run `hook_after_wait` once, after the next wait."""
        if not callable(hook_after_wait):
            raise BadInput("hook_after_wait", type(hook_after_wait).__name__, "a function")
        if self.hook_after_wait is not None:
            raise BadInput("hook_after_wait", "a second hook", "one, after the wait that runs the first")
        self.hook_after_wait = hook_after_wait

    def __call__(self, release_handle: bool = False) -> EventOverlap:
        check_flag("release_handle", release_handle)
        self._release_at_exit = release_handle
        return self

    def __enter__(self) -> EventOverlap:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.event is not None:
            self.current_stream_wait(self._release_at_exit)
        self._release_at_exit = False


def wait_for(previous_event: Any) -> None:
    """Make the current stream wait for an EventOverlap or EventHandle that a caller passed; None is none."""
    if previous_event is None:
        return
    if isinstance(previous_event, EventOverlap):
        previous_event = previous_event.event
        if previous_event is None:
            return
    if not isinstance(previous_event, EventHandle):
        raise BadInput("previous_event", type(previous_event).__name__, "what capture() or an earlier call returned")
    previous_event.current_stream_wait()


def finished(asynchronous: bool, tensors: tuple[Any, ...] | None = None) -> EventOverlap:
    """The event that a call returns: a mark on the current stream if it was asked for."""
    return EventOverlap(EventHandle(), tensors) if asynchronous else EventOverlap()


_METADATA = 128 * (8 + 4 + 4) + 8  # bytes beside a row, as deep_ep plans: 128 ids, weights and scales, and its source
_NVL_PEERS = 8


class Config:
    """SMs that a call may use, and the sizes of deep_ep's queues."""

    def __init__(
        self,
        num_sms: int = 20,
        num_max_nvl_chunked_send_tokens: int = 6,
        num_max_nvl_chunked_recv_tokens: int = 256,
        num_max_rdma_chunked_send_tokens: int = 6,
        num_max_rdma_chunked_recv_tokens: int = 256,
    ) -> None:
        check_integer("num_sms", num_sms, 0)
        for kind, send, receive in (
            ("nvl", num_max_nvl_chunked_send_tokens, num_max_nvl_chunked_recv_tokens),
            ("rdma", num_max_rdma_chunked_send_tokens, num_max_rdma_chunked_recv_tokens),
        ):
            check_integer(f"num_max_{kind}_chunked_send_tokens", send, 1)
            check_integer(f"num_max_{kind}_chunked_recv_tokens", receive, 2)
            if send >= receive:
                raise BadInput(f"num_max_{kind}_chunked_send_tokens", send, f"1 to {receive - 1}")
        self.num_sms = num_sms
        self.num_max_nvl_chunked_send_tokens = num_max_nvl_chunked_send_tokens
        self.num_max_nvl_chunked_recv_tokens = num_max_nvl_chunked_recv_tokens
        self.num_max_rdma_chunked_send_tokens = num_max_rdma_chunked_send_tokens
        self.num_max_rdma_chunked_recv_tokens = num_max_rdma_chunked_recv_tokens

    def get_nvl_buffer_size_hint(self, hidden_bytes: int, num_ranks: int) -> int:
        """Estimate the bytes of deep_ep's queues, for callers that compare sizes; moecomm sizes its windows itself."""
        check_integer("hidden_bytes", hidden_bytes, 0)
        check_integer("num_ranks", num_ranks, 1)
        slots = self.num_sms // 2 * min(num_ranks, _NVL_PEERS) * self.num_max_nvl_chunked_recv_tokens
        return -(-slots * (hidden_bytes + _METADATA) // 128) * 128

    def get_rdma_buffer_size_hint(self, hidden_bytes: int, num_ranks: int) -> int:
        """0: no rank is behind RDMA."""
        return 0


def check_even_sms(new_num_sms: int) -> None:
    """Raise BadInput unless set_num_sms() takes it."""
    if not is_integer(new_num_sms) or not 2 <= new_num_sms <= 1024 or new_num_sms % 2:
        raise BadInput("new_num_sms", repr(new_num_sms), "an even number, 2 to 1024")
