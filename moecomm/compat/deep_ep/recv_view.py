"""deep_ep 2.5's DispatchRecvView: rows of a dispatch where they lie in the window, until they are released."""

from __future__ import annotations

from typing import Any

import torch

from moecomm.compat.deep_ep.event import EventHandle
from moecomm.errors import BadInput


class DispatchRecvView:
    """The result of `EPBuffer.dispatch(borrow_recv=True)`: row r of the dispatch is `slab[row_indices[r]]`.

    The buffer makes no other call until release().  After it the memory of `slab` is used again once no tensor refers
    to it.

    Args:
        owner: the EPBuffer.
        slab: `[rows, H]`.
        row_indices: int64 `[rows]`.
    """

    def __init__(self, owner: Any, slab: torch.Tensor, row_indices: torch.Tensor) -> None:
        self._owner = owner
        self._slab, self._row_indices = slab, row_indices
        self._ready: EventHandle | None = None  # None: the event of the dispatch has not been waited for

    def mark_ready(self) -> None:
        """Take note that the rows are there for what comes on the current stream."""
        self._ready = EventHandle()

    def wait(self) -> None:
        """Make the current stream wait for the rows.

        Raises:
            BadInput: released, or before a wait for the event of the dispatch.
        """
        if self._owner is None:
            raise BadInput("DispatchRecvView", "one that is released", "one of another dispatch")
        if self._ready is None:
            raise BadInput("DispatchRecvView", "the event of its dispatch not waited for", "event.wait() before it")
        self._ready.current_stream_wait()

    @property
    def slab(self) -> torch.Tensor:
        """The memory of the rows.  Raises BadInput as wait(), which it calls."""
        self.wait()
        return self._slab

    @property
    def row_indices(self) -> torch.Tensor:
        """Places of the rows in `slab`.  Raises BadInput as wait(), which it calls."""
        self.wait()
        return self._row_indices

    def release(self, *consumer_streams: torch.cuda.Stream) -> None:
        """Give the rows back, after all that reads them has been launched.

        Args:
            consumer_streams: that read rows; none: the current one.  The current stream waits for them.

        Raises:
            BadInput: as wait(); a stream of another device.
        """
        self.wait()
        device = self._slab.device
        for stream in consumer_streams:
            if stream.device != device:
                raise BadInput("consumer_streams", f"one of {stream.device}", f"streams of {device}")
        for stream in consumer_streams:
            torch.cuda.current_stream(device).wait_stream(stream)
        self._owner.view = None
        del self._slab, self._row_indices
        self._owner = None
