"""The native part of moecomm: windows, rounds of CPU ranks, kernel launches.

Addresses are plain integers and are believed: whoever passes one keeps what is there alive.  Everything that can block
releases the GIL.
"""

from collections.abc import Sequence
from typing import Any, final

from typing_extensions import Self

@final
class Shape:
    """csrc/protocol/layout.h: what all ranks of a Buffer have alike."""

    ranks: int
    experts: int
    topk: int
    max_tokens: int
    staged_row_bytes: int
    heap_bytes: int
    def __init__(
        self, ranks: int, experts: int, topk: int, max_tokens: int, staged_row_bytes: int, heap_bytes: int
    ) -> None: ...

@final
class WindowLayout:
    """csrc/protocol/layout.h: byte offsets in a window."""

    @property
    def abort(self) -> int: ...
    @property
    def state(self) -> int: ...
    @property
    def notices(self) -> int: ...
    @property
    def counts(self) -> int: ...
    @property
    def arrived(self) -> int: ...
    @property
    def reduced(self) -> int: ...
    @property
    def drained(self) -> int: ...
    @property
    def chunk_counts(self) -> int: ...
    @property
    def staging(self) -> int: ...
    @property
    def heap(self) -> int: ...
    @property
    def bytes(self) -> int: ...
    @property
    def columns(self) -> int: ...
    @property
    def chunks(self) -> int: ...

def window_layout(shape: Shape) -> WindowLayout: ...

class _Struct:
    """A struct of csrc/protocol/args.h.  Starts as zeros; copy.copy() copies it."""

    def __copy__(self) -> Self: ...
    def __deepcopy__(self, memo: dict[Any, Any], /) -> Self: ...
    @property
    def address(self) -> int: ...
    @property
    def nbytes(self) -> int: ...

@final
class Context(_Struct):
    peers: list[int]
    """64 addresses.  A copy: assign a list (shorter ones are filled up with zeros), do not change it in place."""
    record: int
    abort_host: int
    timeout_ns: int
    shape: Shape
    window: WindowLayout
    rank: int
    def set_shape(self, shape: Shape) -> None:
        """Sets `shape`, and `window` to its layout."""

@final
class Route(_Struct):
    token_rows: int
    token_owner: int
    token_slot: int
    slot_base: int
    source_base: int
    rows: int
    row_weights: int

@final
class DispatchArgs(_Struct):
    ctx: Context
    """A part of this struct, not a copy: args.ctx.rank = 1 changes args; assigning copies.  So is `route`."""
    route: Route
    x: int
    in_scales: int
    topk_idx: int
    topk_weights: int
    x_stride: int
    in_scales_stride: int
    num_tokens: int
    idx_bytes: int
    hidden: int
    in_type: int
    row_bytes: int
    scale_bytes: int
    quantize: int
    layout: int
    alignment: int
    max_rows: int
    chunk_tokens: int
    repeat: int
    call: int
    check_weights: int
    workers: int
    out_x: int
    out_scales: int
    out_src: int
    out_topk_idx: int
    out_weights: int
    out_rows: int
    tokens_per_expert: int
    num_rows: int

@final
class CombineArgs(_Struct):
    ctx: Context
    route: Route
    y: int
    bias: int
    weight_grads: int
    y_stride: int
    bias_stride: int
    num_tokens: int
    hidden: int
    type: int
    wire: int
    layout: int
    weighted: int
    call: int
    workers: int
    out: int
    out_weight_grads: int
    out_stride: int

@final
class HostWindow:
    """Zeroed shared memory without a name, its size sealed.

    Raises:
        ValueError: nbytes is 0.
        OSError: there is not so much memory.
    """

    def __init__(self, nbytes: int) -> None: ...
    @staticmethod
    def attach(fd: int, nbytes: int) -> HostWindow:
        """Maps a peer's window.  Takes `fd`, also when it raises.

        Raises:
            ValueError: not a window of `nbytes`, or not sealed.
            OSError: it cannot be mapped.
        """
    @property
    def fd(self) -> int:
        """-1 once closed."""
    @property
    def address(self) -> int:
        """0 once closed."""
    @property
    def nbytes(self) -> int: ...
    def close(self) -> None:
        """Unmaps; nobody in this process may still use the memory.  Dropping the object does it too."""

@final
class Exchange:
    """Passes a file descriptor from every rank to every rank of this host, processes or threads.

    `nonce`: 16 bytes that only this job knows.

    Raises:
        ValueError: rank, ranks or nonce.
        OSError: no socket can be had.
    """

    def __init__(self, rank: int, ranks: int, nonce: bytes) -> None: ...
    @property
    def address(self) -> bytes:
        """At most 64 bytes, for the peers."""
    def share(self, fd: int, addresses: Sequence[bytes], timeout_s: float) -> list[int]:
        """Every rank's descriptor, by rank; the own entry is -1.  The caller closes them; `fd` stays the caller's.

        All ranks call it equally often.  After an error no descriptor is kept, and the Exchange is of no more use.

        Raises:
            TimeoutError: naming the ranks that are missing, and what was refused meanwhile.
            ConnectionRefusedError: a rank is gone.
            PermissionError: another user listens at a rank's address.
            ValueError: addresses or timeout_s.
            OSError: anything else; with ECANCELED, close() was called.
        """
    def close(self) -> None:
        """Ends a share() of another thread.  May be called again."""

@final
class Watcher:
    """Watches the processes of the other ranks; a pid that is 0 or our own is not watched.

    When one ends, every abort word (the addresses of u32) that is 0 becomes (peer_lost, its rank), unless the word
    `left[rank]` (0 or absent: none) is not 0 by then: that rank had said that it leaves.  Words must live until
    close().
    `pidfds=False`: look every 100 ms, as is done on kernels without pidfds.
    """

    def __init__(
        self,
        pids: Sequence[int],
        own_rank: int,
        *abort_addresses: int,
        left: Sequence[int] = ...,
        pidfds: bool = True,
    ) -> None: ...
    def dead(self) -> list[int]:
        """Ranks, in the order in which they were found dead."""
    def close(self) -> None: ...

@final
class Block:
    """A range of an Arena.  It goes back when the object and everything made by tensor() are gone."""

    @property
    def offset(self) -> int: ...
    @property
    def nbytes(self) -> int: ...
    def shrink(self, nbytes: int) -> None:
        """Gives the tail back; nothing made by tensor() may reach past `nbytes`.

        Raises:
            ValueError: the block is smaller than that.
        """
    def tensor(
        self,
        address: int,
        shape: Sequence[int],
        code: int,
        bits: int,
        device_type: int,
        device_id: int,
        owner: object | None = None,
    ) -> Any:
        """A DLPack capsule ("dltensor") of a C-contiguous tensor at `address`; keeps the block and `owner`.

        `code`, `bits`, `device_type` are DLPack's.

        Raises:
            ValueError: a bad shape, or more bytes than the block has.
        """

@final
class Arena:
    """Hands out ranges of [offset, offset + nbytes): first fit, 256-byte aligned, from any thread."""

    def __init__(self, offset: int, nbytes: int) -> None: ...
    def allocate(self, nbytes: int) -> Block | None:
        """None if no free range is long enough."""
    @property
    def used(self) -> int:
        """Bytes handed out, in whole units of 256."""
    @property
    def largest_free(self) -> int: ...

@final
class HostMemory:
    """Zeroed memory at a multiple of 256, freed with the object."""

    @property
    def address(self) -> int: ...
    @property
    def nbytes(self) -> int: ...

def host_alloc(nbytes: int) -> HostMemory: ...
def host_dispatch(args: DispatchArgs) -> None:
    """Blocks until this rank's part of the round is over; if it failed, record() has something to say.

    In the main thread Ctrl-C aborts the round on every rank and raises KeyboardInterrupt.

    Raises:
        ValueError: rank, shape, record or peers of `args.ctx` are not set.
    """

def host_combine(args: CombineArgs) -> None:
    """As host_dispatch."""

def host_run_all(rounds: Sequence[DispatchArgs | CombineArgs]) -> None:
    """Runs the rounds of several ranks of this process at once, each in a thread of its own.  Else as host_dispatch."""

def leave(context: Context) -> None:
    """Tells the peers that this rank takes part in no further host round.  Never waits."""

@final
class FailureRecordView:
    """csrc/protocol/record.h, as it was when it was read."""

    @property
    def code(self) -> int: ...
    @property
    def op(self) -> int: ...
    @property
    def phase(self) -> int: ...
    @property
    def argument(self) -> int: ...
    @property
    def rank(self) -> int: ...
    @property
    def peer(self) -> int: ...
    @property
    def round(self) -> int: ...
    @property
    def expected(self) -> int: ...
    @property
    def seen(self) -> int: ...
    @property
    def waited_ns(self) -> int: ...

def record(address: int) -> FailureRecordView | None:
    """What is left of a failed round; None while nothing has failed."""

def clear_record(address: int) -> None: ...
def set_abort(address: int, cause: int, culprit: int) -> bool:
    """Sets an abort word, unless it is set already: then False."""

def store_word(address: int, value: int) -> None:
    """Stores a u32 there, after all that this thread has written before."""

def read_word(address: int) -> int:
    """The u32 there."""

def cuda_launch(
    function: int, grid: int, block: int, shared_bytes: int, stream: int, args: DispatchArgs | CombineArgs
) -> None:
    """cuLaunchKernel of a CUfunction that takes the struct by value, in the current context.

    Raises:
        RuntimeError: with the driver's name of the error, or there is no driver.
    """

def cuda_available() -> str:
    """Empty if there is a GPU to use, else a sentence that names the first thing missing.  Initialises the driver."""
