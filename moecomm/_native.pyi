"""The native part of moecomm: windows, rounds of CPU ranks, kernel launches.

Addresses are plain integers and are believed: whoever passes one keeps what is there alive.  Everything that can block
releases the GIL.
"""

from collections.abc import Callable, Sequence
from typing import Any, final

from torch import Tensor
from typing_extensions import Buffer, Self

@final
class Shape:
    """csrc/protocol/layout.h: what all ranks of a Buffer have alike."""

    ranks: int
    experts: int
    topk: int
    max_tokens: int
    ring_tokens: int
    packet_bytes: int
    staged_row_bytes: int
    heap_bytes: int
    domain_ranks: int
    receive_bytes: int
    def __init__(
        self,
        ranks: int,
        experts: int,
        topk: int,
        max_tokens: int,
        ring_tokens: int,
        staged_row_bytes: int,
        heap_bytes: int,
        packet_bytes: int = 0,
        domain_ranks: int = 0,
        receive_bytes: int = 0,
    ) -> None:
        """ValueError unless `ring_tokens` is a multiple of 32 (kMaxChunk), and at least that, and domains are equal."""

@final
class WindowLayout:
    """csrc/protocol/layout.h: byte offsets in a window."""

    @property
    def abort(self) -> int: ...
    @property
    def state(self) -> int: ...
    @property
    def rejected(self) -> int:
        """State::rejected."""
    @property
    def tagged_words(self) -> int: ...
    @property
    def arrived(self) -> int: ...
    @property
    def reduced(self) -> int: ...
    @property
    def credits(self) -> int: ...
    @property
    def drained(self) -> int: ...
    @property
    def ranges(self) -> int: ...
    @property
    def counting(self) -> int: ...
    @property
    def summed(self) -> int: ...
    @property
    def packets(self) -> int: ...
    @property
    def begun(self) -> int: ...
    @property
    def signals(self) -> int: ...
    @property
    def staging(self) -> int: ...
    @property
    def receive_buffer(self) -> int: ...
    @property
    def returned(self) -> int: ...
    @property
    def heap(self) -> int: ...
    @property
    def bytes(self) -> int: ...
    @property
    def columns(self) -> int: ...
    @property
    def num_tagged_words(self) -> int: ...

def goes_direct(shape: Shape, num_tokens: int) -> bool:
    """Whether rows of a rank with so many tokens reach other domains without a relay."""

def takes_weights(shape: Shape) -> bool:
    """Whether homes may give a combine routing weights of their own."""

def landed_bytes(shape: Shape, row_bytes: int, scale_bytes: int) -> int:
    """What a token takes that lands in another domain."""

def window_layout(shape: Shape) -> WindowLayout: ...
def fused_structs() -> dict[str, tuple[int, list[tuple[str, str, int, int, int]]]]:
    """The argument structs of csrc/fused: size, and of each field name, type, offset, size, and length of an array.

    A type is the name of a struct (`Context` is in no table), or a scalar as Python's struct module writes it.
    """

def fused_constants() -> dict[str, int]: ...
def gemm_shared_bytes(scaled: bool, most_rows: int, stages: int) -> int: ...
def expert_layer_shared_bytes(scaled: bool, most_rows: int, stages: int) -> int: ...
def reduce_slot_bytes(topk: int, piece_bytes: int) -> int: ...

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
    link: int
    shape: Shape
    window: WindowLayout
    rank: int
    def set_shape(self, shape: Shape) -> None:
        """Sets `shape`, and `window` to its layout."""
    def in_heap(self, address: int) -> bool:
        """Whether it is in the heap of our own window."""

@final
class Route(_Struct):
    token_rows: int
    token_owner: int
    token_slot: int
    sent: int
    ranges: int
    rows: int
    row_weights: int
    src: int
    forwarded: int
    key: int
    max_rows: int

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
    scale_format: int
    layout: int
    alignment: int
    max_rows: int
    clear_rows: int
    chunk_tokens: int
    repeat: int
    descriptors: int
    call: int
    check_weights: int
    workers: int
    part: int
    out_x: int
    out_scales: int
    out_src: int
    out_topk_idx: int
    out_weights: int
    out_rows: int
    tokens_per_expert: int
    rows_per_expert: int
    num_rows: int
    scale_columns: int
    scale_stride: int
    receive_buffer: int

@final
class CombineArgs(_Struct):
    ctx: Context
    route: Route
    y: int
    bias: int
    weight_grads: int
    y_stride: int
    reduced_rows: int
    bias_stride: int
    bias_type: int
    sum_grads: int
    num_tokens: int
    hidden: int
    type: int
    wire: int
    layout: int
    weighted: int
    call: int
    workers: int
    chunk_tokens: int
    out: int
    out_weight_grads: int
    out_stride: int
    topk_weights: int

@final
class DispatchPlan:
    """Dispatches of one kind, prepared: `args` has all that is neither a tensor's nor an output's.

    Raises:
        ValueError: what stands for a tensor is none of torch's.
    """

    def __init__(
        self,
        args: DispatchArgs,
        scale_columns: bool,
        x: Tensor | None,
        scales: Tensor | None,
        topk_idx: Tensor | None,
        topk_weights: Tensor | None,
    ) -> None:
        """`x` and the others: of the types, on the devices that later ones will have."""
    def schedule(self, num_tokens: int, workers: int, chunk_tokens: int) -> None:
        """How rounds of so many tokens are run."""
    def payload_bytes(self, max_rows: int) -> int:
        """Of the block for what arrives."""
    def kept_bytes(self, max_rows: int) -> int:
        """Of the block for what combine and a repeat need as well."""
    def bind(
        self,
        payload: Block,
        kept: Block,
        max_rows: int,
        x: object,
        scales: object,
        topk_idx: object,
        topk_weights: object,
    ) -> DispatchArgs | None:
        """None unless these are tensors that the plan is for, can be used, and are of a number with a schedule."""
    def repeat(self, payload: Block, earlier: DispatchArgs, x: object, scales: object) -> DispatchArgs | None:
        """The same with the route and the room of an earlier dispatch."""
    def flat_outputs(
        self, args: DispatchArgs, payload: Block, kept: Block, owner: object | None
    ) -> tuple[Tensor, Tensor | None, Tensor, Tensor]:
        """x, scales, topk_idx and topk_weights of a flat dispatch that was bound; each keeps its block and `owner`.

        Raises:
            ValueError: another layout, or scales that were made, or go by column.
        """
    def expert_outputs(
        self, args: DispatchArgs, payload: Block, kept: Block, owner: object | None, counted: bool
    ) -> tuple[Tensor | None, ...]:
        """x, scales and row_weights of rows of experts; `counted`: and rows_per_expert.  See flat_outputs."""
    def batched_outputs(
        self, args: DispatchArgs, payload: Block, kept: Block, owner: object | None
    ) -> tuple[Tensor, Tensor]:
        """x and tokens_per_expert of a batched dispatch; see flat_outputs."""

@final
class CombinePlan:
    """Combines of one kind, prepared; see DispatchPlan."""

    def __init__(
        self,
        args: CombineArgs,
        y: Tensor,
        bias: Tensor | None,
        weight_grads: Tensor | None,
        topk_weights: Tensor | None = None,
    ) -> None: ...
    def schedule(self, num_tokens: int, workers: int, chunk_tokens: int) -> None:
        """How rounds of so many tokens are run."""
    def bind(
        self,
        dispatch: DispatchArgs,
        y: object,
        out: object,
        bias: object,
        weight_grads: object,
        out_weight_grads: object,
        reduced_rows: int = 0,
        topk_weights: object = None,
    ) -> CombineArgs | None:
        """None unless these are tensors that the plan is for and that fit the dispatch.

        `reduced_rows`: see CombineArgs.
        """

def current_stream(device: int) -> int:
    """torch's current stream of a GPU: a cudaStream_t."""

def share_memory(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors, of contiguous rows each, have bytes in common."""

def shares_tables(dispatch: DispatchArgs, tensor: Tensor) -> bool:
    """Whether a tensor of contiguous rows has bytes in common with the tables of a dispatch, or its row weights."""

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
class Link:
    """csrc/host/scaleout/link.h: how a rank reaches ranks of other domains."""

    def __init__(self, shape: Shape, windows: list[int], disorder: int = 0) -> None:
        """`windows`: by rank, addresses of those that loads and stores do not reach, 0 for the others."""

    @property
    def address(self) -> int:
        """Context.link."""

    def close(self) -> None:
        """Moves what was given to it first.  Idempotent."""

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
    def share(
        self, fd: int, addresses: Sequence[bytes], timeout_s: float, check: Callable[[], None] | None = None
    ) -> list[int]:
        """Every rank's descriptor, by rank; the own entry is -1.  The caller closes them; `fd` stays the caller's.

        All ranks call it equally often.  `check` is called every 50 ms of waiting; what it raises ends the wait.
        After an error no descriptor is kept, and the Exchange is of no more use.

        Raises:
            TimeoutError: naming the ranks that are missing, and what was refused meanwhile.
            ConnectionRefusedError: a rank is gone.
            PermissionError: another user listens at a rank's address.
            ValueError: addresses or timeout_s.
            OSError: anything else; with ECANCELED, close() was called.
        """
    def close(self) -> None:
        """Ends a share() of another thread.  May be called again."""

def pidfd_open(pid: int) -> int:
    """A descriptor of a process, readable once it has ended.  The caller closes it.

    Raises:
        ProcessLookupError: there is no such process.
        OSError: the kernel or a sandbox refuses, or no descriptor is left.
    """

@final
class Watcher:
    """Watches the processes of the other ranks; a pid that is 0 or our own is not watched.

    When one ends, every abort word (the addresses of u32) that is 0 becomes (peer_lost, its rank), unless the word
    `left[rank]` (0 or absent: none) is not 0 by then: that rank had said that it leaves.  Words must live until
    close().
    `pidfds=False`: look every 100 ms, as is done on kernels without pidfds.
    `passed`: by rank, descriptors that peers opened of themselves with pidfd_open(), -1: none.  The Watcher takes
    them, also when it raises, and uses them instead of the pid, which may mean another process here.
    """

    def __init__(
        self,
        pids: Sequence[int],
        own_rank: int,
        *abort_addresses: int,
        left: Sequence[int] = ...,
        pidfds: bool = True,
        passed: Sequence[int] = ...,
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
    def torch_tensor(
        self,
        address: int,
        shape: Sequence[int],
        code: int,
        bits: int,
        device_type: int,
        device_id: int,
        owner: object | None,
    ) -> Tensor:
        """The same, as torch's tensor."""

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

    In the main thread handlers of signals run while it waits.  What one raises, as Ctrl-C does, aborts the round on
    every rank and is raised here.

    Raises:
        ValueError: rank, shape, record or peers of `args.ctx` are not set.
    """

def host_combine(args: CombineArgs) -> None:
    """As host_dispatch."""

def host_run_all(rounds: Sequence[DispatchArgs | CombineArgs]) -> None:
    """Runs the rounds of several ranks of this process at once, each in a thread of its own.  Else as host_dispatch."""

def count_rejected(context: Context) -> None:
    """Counts a host call that failed before its rounds were made, in State::rejected of this rank's window."""

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

def host_ping_pong(
    *,
    here: int,
    there: int,
    source: int,
    nbytes: int,
    before: int,
    warmup: int,
    rounds: int,
    starts: bool,
    timeout_ns: int,
    abort_here: int,
    abort_host: int,
) -> int | None:
    """Puts `nbytes` from `source` behind the signal (u64) of the peer's block `there`, in turn with the peer.

    `before`: what both signals count already.  Returns the nanoseconds of `rounds` round trips after `warmup` others;
    None if the peer did not come in time, or an abort word was set.  The payload lies 256 bytes on in a block.

    Raises:
        ValueError: addresses or numbers that can't be.
    """

def cuda_launch(
    function: int,
    block: int,
    shared_bytes: int,
    stream: int,
    args: DispatchArgs | CombineArgs,
    overlap: bool = False,
    cluster: int = 1,
) -> None:
    """Launches a CUfunction that takes the struct by value, in the current context: `args.workers` blocks.

    `overlap`: the kernel may begin while the one before it on the stream ends (programmatic stream serialization); the
    two say when with griddepcontrol.  `cluster`: so many blocks at a time, which divide them, run
    on neighbouring multiprocessors.  A driver that knows neither launches the same blocks without.

    Raises:
        RuntimeError: with the driver's name of the error, or there is no driver.
    """

def cuda_launch_packed(
    function: int, grid: int, block: int, shared_bytes: int, stream: int, args: Buffer, overlap: bool = False
) -> None:
    """Launches a CUfunction that takes a struct by value, in the current context.

    `args`: the bytes of the struct, such as a ctypes.Structure: as many as the function reads.
    `overlap`: see cuda_launch.

    Raises:
        RuntimeError: with the driver's name of the error, or there is no driver.
    """

def cuda_context() -> int:
    """The calling thread's current CUcontext; 0: none.  RuntimeError as cuda_launch."""

def cuda_capturing(stream: int) -> bool:
    """Whether what is enqueued on this stream becomes part of a graph.  RuntimeError as cuda_launch."""

def cuda_available() -> str:
    """Empty if there is a GPU to use, else a sentence that names the first thing missing.  Initialises the driver."""
