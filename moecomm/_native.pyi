"""
Windows, rounds of CPU ranks and kernel launches of moecomm.
"""

from __future__ import annotations

import collections.abc
import enum
import typing

import torch
import typing_extensions

class Layout(enum.IntEnum):
    """Layout of csrc/protocol/args.h."""

    flat = 0
    expert = 1
    batched = 2

class Type(enum.IntEnum):
    """Type of csrc/protocol/args.h."""

    bf16 = 0
    fp16 = 1
    fp32 = 2
    e4m3 = 3
    int8 = 4

class Part(enum.IntEnum):
    """Part of csrc/protocol/args.h."""

    whole = 0
    begin = 1
    end = 2

class ScaleFormat(enum.IntEnum):
    """ScaleFormat of csrc/protocol/args.h."""

    fp32 = 0
    ue8m0 = 1

class Failure(enum.IntEnum):
    """Failure of csrc/protocol/record.h."""

    none = 0
    timeout = 1
    peer_lost = 2
    aborted = 3
    bad_input = 4
    mismatch = 5
    excluded = 6

class Phase(enum.IntEnum):
    """Phase of csrc/protocol/record.h."""

    header = 0
    payload = 1
    reduced = 2
    drained = 3
    grid = 4
    signal = 5
    barrier = 6

class Op(enum.IntEnum):
    """Op of csrc/protocol/record.h."""

    none = 0
    dispatch = 1
    combine = 2
    leave = 3
    window = 4

class Argument(enum.IntEnum):
    """Argument of csrc/protocol/record.h."""

    none = 0
    topk_idx = 1
    max_rows = 2
    batched = 3
    topk_weights = 4
    handle = 5
    rejected = 6

class Shape:
    """
    Sizes that all ranks of a Buffer have alike: Shape of csrc/protocol/layout.h.

    `named_experts`: of callers, with a placement; 0: those of rounds, as many as `slots`.
    ValueError unless `ring_tokens` is a positive multiple of 32 (kMaxChunk) and `domain_ranks` is 0 or divides `ranks`.
    """
    def __init__(
        self,
        ranks: int,
        slots: int,
        topk: int,
        max_tokens: int,
        ring_tokens: int,
        staged_row_bytes: int,
        heap_bytes: int,
        packet_bytes: int = 0,
        domain_ranks: int = 0,
        receive_bytes: int = 0,
        named_experts: int = 0,
    ) -> None: ...
    domain_ranks: int
    heap_and_experts: int
    heap_bytes: int
    """
        Room for outputs.
        """
    max_tokens: int
    named_experts: int
    """
        Experts that callers name; set to 0: `slots`.
        """
    packet_bytes: int
    ranks: int
    receive_bytes: int
    ring_tokens: int
    slots: int
    staged_row_bytes: int
    topk: int

class WindowLayout:
    """Byte offsets in a window: WindowLayout of csrc/protocol/layout.h."""

    abort: typing.Final[int]
    arrived: typing.Final[int]
    bytes: typing.Final[int]
    columns: typing.Final[int]
    counters: typing.Final[int]
    counting: typing.Final[int]
    credits: typing.Final[int]
    drained: typing.Final[int]
    heap: typing.Final[int]
    num_tagged_words: typing.Final[int]
    packets: typing.Final[int]
    @property
    def placement(self) -> int:
        """Offset of Placement: csrc/protocol/placement.h."""
    ranges: typing.Final[int]
    receive_buffer: typing.Final[int]
    reduced: typing.Final[int]
    @property
    def rejected(self) -> int:
        """Offset of State::rejected."""
    returned: typing.Final[int]
    signals: typing.Final[int]
    split_headers: typing.Final[int]
    staging: typing.Final[int]
    state: typing.Final[int]
    summed: typing.Final[int]
    tagged_words: typing.Final[int]

class Context:
    """Context of csrc/protocol/args.h.  Starts as zeros; copy.copy() copies it."""

    shape: Shape
    window: WindowLayout
    def __copy__(self) -> Context: ...
    def __deepcopy__(self, arg0: dict[int, typing.Any]) -> Context: ...
    def __init__(self) -> None: ...
    def in_heap(self, address: int) -> bool:
        """Return whether the address is in the heap of this rank's window."""
    def set_shape(self, shape: Shape) -> None:
        """Set `shape`, and `window` to its layout."""
    abort_host: int
    address: typing.Final[int]
    all_peers: int
    link: int
    nbytes: typing.Final[int]
    peers: list[int]
    """
        64 addresses, or those at `all_peers`.  A copy: assign a list (shorter ones are filled up with zeros).
        """
    placed: int
    rank: int
    record: int
    timeout_ns: int

class Route:
    """Route of csrc/protocol/args.h."""
    def __copy__(self) -> Route: ...
    def __deepcopy__(self, arg0: dict[int, typing.Any]) -> Route: ...
    def __init__(self) -> None: ...
    address: typing.Final[int]
    first_token: int
    forwarded: int
    key: int
    max_rows: int
    nbytes: typing.Final[int]
    ranges: int
    row_weights: int
    rows: int
    sent: int
    src: int
    token_owner: int
    token_rows: int
    token_slot: int

class DispatchArgs:
    """
    DispatchArgs of csrc/protocol/args.h.

    `ctx` and `route` are parts of the struct, not copies: args.ctx.rank = 1 changes args; assigning copies.
    """

    ctx: Context
    route: Route
    def __copy__(self) -> DispatchArgs: ...
    def __deepcopy__(self, arg0: dict[int, typing.Any]) -> DispatchArgs: ...
    def __init__(self) -> None: ...
    address: typing.Final[int]
    alignment: int
    call: int
    check_weights: int
    chunk_tokens: int
    clear_rows: int
    compared: int
    descriptors: int
    hidden: int
    idx_bytes: int
    in_scales: int
    in_scales_stride: int
    in_type: int
    layout: int
    max_rows: int
    nbytes: typing.Final[int]
    num_rows: int
    num_tokens: int
    out_rows: int
    out_scales: int
    out_src: int
    out_topk_idx: int
    out_weights: int
    out_x: int
    part: int
    quantize: int
    repeat: int
    result_rows: int
    row_bytes: int
    rows_per_expert: int
    scale_bytes: int
    scale_columns: int
    scale_format: int
    scale_stride: int
    tokens_per_expert: int
    topk_idx: int
    topk_weights: int
    workers: int
    x: int
    x_stride: int

class CombineArgs:
    """CombineArgs of csrc/protocol/args.h."""

    ctx: Context
    route: Route
    def __copy__(self) -> CombineArgs: ...
    def __deepcopy__(self, arg0: dict[int, typing.Any]) -> CombineArgs: ...
    def __init__(self) -> None: ...
    added_hashes: int
    address: typing.Final[int]
    bias: int
    bias_first: int
    bias_stride: int
    bias_type: int
    call: int
    chunk_tokens: int
    hidden: int
    layout: int
    nbytes: typing.Final[int]
    num_tokens: int
    out: int
    out_stride: int
    out_weight_grads: int
    reduced_rows: int
    staged_hashes: int
    sum_grads: int
    topk_weights: int
    type: int
    unsummed: int
    weight_grads: int
    weighted: int
    wire: int
    workers: int
    y: int
    y_stride: int

class FailureRecordView:
    """FailureRecord of csrc/protocol/record.h, as it was when it was read."""

    argument: typing.Final[int]
    code: typing.Final[int]
    expected: typing.Final[int]
    op: typing.Final[int]
    peer: typing.Final[int]
    phase: typing.Final[int]
    rank: typing.Final[int]
    round: typing.Final[int]
    seen: typing.Final[int]
    waited_ns: typing.Final[int]

class Turn:
    """
    The threads in the calls of an object: see Call.

    `shared`: several threads may be in calls at once.  Else one.
    `made`: rounds of its calls.  `failed`: calls that failed before their last round, and are counted.
    `uncounted`: calls that were refused, or have failed so and are yet to be counted.
    `running`: calls under way that contain no other.  `depth`: those that consist of others.
    `several`: the call under way makes rounds whose number is not known ahead, and is yet to make the last of them.
    `closing`: the object closes when the calls under way end.
    """

    closing: bool
    several: bool
    def __init__(self, shared: bool = False) -> None: ...
    def counted(self) -> None:
        """Note that one of the calls to be counted has been."""
    def miss(self) -> None:
        """Note a call to be counted."""
    depth: typing.Final[int]
    failed: int
    made: int
    running: typing.Final[int]
    uncounted: typing.Final[int]

class Call:
    """
    Context of a call of an object: in its block, this thread has the object's turn.

    Another call, in another thread or below a signal handler, is refused meanwhile.  The turn is given back by whatever
    ends the block or its frame, an exception of a signal handler between any two instructions included.

    `owner`: an object with a `turn`, a Turn, and these methods:
        `_refuse()`: raise the error of a call that is refused.
        `_begin_call(rounds, nested, note)`: begin a call that has the turn.  `nested`: another one consists of it.
        `_count_refused()`: count the calls that Turn.uncounted says.
        `_raised()`: return the last error that a round has left behind, or None.
        `_interrupted(error, note)`: the call ends in an error and counts as failed.  If a signal handler has raised it,
            peers do not know, and their waits are to end.  None: of an error that is not known, between instructions.
        `_call_failed(error, missed, note)`: likewise, after that.  `missed`: it counts as failed.
        `_release()`: close the object.
    `rounds`: of the call.  An error before the last of them counts the call as failed, unless a call in it has.
    `note`: the owner gets it back.
    `outer`: the call consists of other calls of the same thread.  Of a shared turn: one such call at a time.
    """
    def __init__(self, owner: typing.Any, rounds: int, note: object = None, outer: bool = False, /) -> None: ...
    def __enter__(self) -> None: ...
    def __exit__(self, kind: typing.Any, error: typing.Any, trace: typing.Any) -> None: ...

class AwaitedTurn:
    """
    Context that takes a turn without a call, and waits until no other thread has it.

    `before`: called before the wait, if there is one.
    """
    def __enter__(self) -> None: ...
    def __exit__(self, kind: typing.Any, error: typing.Any, trace: typing.Any) -> None: ...
    def __init__(self, turn: Turn, before: typing.Any) -> None: ...

class Block:
    """A range of an Arena.  It goes back when the object and everything made by tensor() are gone."""
    def shrink(self, nbytes: int) -> None:
        """
        Give the tail back.  No tensor may reach past `nbytes`.

        Raises:
            ValueError: the block is smaller than that.
        """
    def tensor(
        self,
        address: int,
        shape: collections.abc.Sequence[int],
        code: int,
        bits: int,
        device_type: int,
        device_id: int,
        owner: typing.Any = None,
    ) -> typing.Any:
        """
        A DLPack capsule ("dltensor") of a C-contiguous tensor at `address`; keeps the block and `owner`.

        `code`, `bits`, `device_type` are DLPack's.

        Raises:
            ValueError: a bad shape, or more bytes than the block has.
        """
    def torch_tensor(
        self,
        address: int,
        shape: collections.abc.Sequence[int],
        code: int,
        bits: int,
        device_type: int,
        device_id: int,
        owner: typing.Any,
    ) -> torch.Tensor:
        """As tensor(), a torch tensor."""
    @property
    def end(self) -> int:
        """`offset + nbytes`."""
    nbytes: typing.Final[int]
    offset: typing.Final[int]

class Arena:
    """Allocator of ranges of [offset, offset + nbytes): 256-byte aligned, from any thread."""
    def __init__(self, offset: int, nbytes: int) -> None: ...
    def allocate(self, nbytes: int, at_least: int = 0) -> Block | None:
        """First fit at the offset `at_least` or above, else first fit.  None if no free range is long enough."""
    @property
    def begin(self) -> int:
        """The first offset, a multiple of 256."""
    @property
    def end(self) -> int:
        """The offset behind the last byte."""
    largest_free: typing.Final[int]
    @property
    def used(self) -> int:
        """Bytes allocated, in multiples of 256."""

class HeapParts:
    """
    Where blocks of a heap go: see moecomm.rounds.memory.

    `first_row`: rows begin there, where they can.  `end`: of blocks that stay in `arena`; the `reserve` follows.
    Blocks in extensions stay, too.
    """
    def __init__(self, arena: Arena) -> None: ...
    def allocate_rows(self, nbytes: int) -> Block | None:
        """As allocate_tables(), for rows."""
    def allocate_tables(self, nbytes: int) -> Block | None:
        """A block that stays; None if there is no such room."""
    def extend(self, arena: Arena, first_row: int) -> None:
        """Add memory behind the arena."""
    def stays(self, block: Block) -> bool:
        """Return whether a block may be in use when its call has returned."""
    end: int
    @property
    def extensions(self) -> list[Arena]:
        """The arenas of extend(): a copy."""
    first_row: int
    reserve: int

class HostMemory:
    """Zeroed memory at a multiple of 256, freed with the object."""

    address: typing.Final[int]
    nbytes: typing.Final[int]

class Balance:
    """
    Placement of the experts of layers on the slots of ranks (csrc/runtime/balance.h).

    Arguments of calls are addresses: `load` of float64 [layers, experts], `expert` of int64 [layers, slots].
    """
    def __init__(
        self, layers: int, experts: int, slots: collections.abc.Sequence[int], nodes: int, pinned: bool, nearest: bool
    ) -> None: ...
    def improve(self, load: int, most_copies: int, expert: int) -> list[list[tuple[list[int], list[int], int, float]]]:
        """
        Improve a placement in place.

        Returns:
            For each layer its steps: slots and their new experts, copies until then, and the largest load of a rank.
        """
    def keep_slots(self, before: int, renumber_ranks: bool, expert: int) -> None:
        """Renumber ranks and slots so that the fewest experts change their slot.  `before`: int64 [layers, slots]."""
    def remove_duplicates(self, load: int, most_copies: int, expert: int, layer: int) -> int:
        """Remove second replicas of an expert from ranks of one layer.  Returns the copies needed."""
    def spread(self, load: int, home: int, expert: int) -> None:
        """Write a new placement.  `home`: the node of each expert, int64 [layers, experts]; 0: any."""

class HostWindow:
    """
    Zeroed shared memory without a name, its size sealed.

    Raises:
        ValueError: nbytes is 0.
        OSError: there is not so much memory.
    """
    @staticmethod
    def attach(fd: int, nbytes: int) -> HostWindow:
        """
        Map a peer's window.  Takes `fd`, also when it raises.

        Raises:
            ValueError: no window of `nbytes`, or not sealed.
            OSError: it cannot be mapped.
        """
    def __init__(self, nbytes: int) -> None: ...
    def close(self) -> None:
        """Unmap.  No code of this process may still use the memory.  Dropping the object unmaps as well."""
    def release(self, offset: int) -> int:
        """
        Give the memory from `offset` on, in whole pages, back to the system.  Returns the bytes that stay.

        All mappings stay, those of peers as well.  They read zeros there, and take memory again where they are written.

        Raises:
            ValueError: no offset of the window, or it is closed.
            OSError: the kernel refuses.
        """
    @property
    def address(self) -> int:
        """0 once closed."""
    @property
    def fd(self) -> int:
        """-1 once closed."""
    nbytes: typing.Final[int]

class Link:
    """
    Route of a rank to ranks of other domains (csrc/host/scaleout_link.h).

    `windows`: by rank, addresses of the windows that loads and stores do not reach, 0 for the others.
    """
    def __init__(self, shape: Shape, windows: collections.abc.Sequence[int], disorder: int = 0) -> None: ...
    def close(self) -> None:
        """Move all pending puts first, then close.  Idempotent."""
    @property
    def address(self) -> int:
        """The value of Context.link."""

class Exchange:
    """
    Passes a file descriptor from every rank to every rank of this host, processes or threads.

    `nonce`: 16 bytes that only this job knows.

    Raises:
        ValueError: rank, ranks or nonce.
        OSError: no socket can be made.
    """
    def __init__(self, rank: int, ranks: int, nonce: bytes) -> None: ...
    def close(self) -> None:
        """End a share() of another thread.  May be called again."""
    def share(
        self,
        fd: int,
        addresses: collections.abc.Sequence[bytes],
        timeout_s: float,
        check: collections.abc.Callable[[], None] | None = None,
    ) -> list[int]:
        """
        Every rank's descriptor, by rank; the own entry is -1.  The caller closes them; `fd` stays the caller's.

        All ranks call it equally often.  `check` is called every 50 ms; an exception that it raises ends the wait.
        After an error no descriptor is kept, and the Exchange can't be used again.

        Raises:
            TimeoutError: naming the ranks that are missing, and the connections that were refused.
            ConnectionRefusedError: a rank is gone.
            PermissionError: another user listens at a rank's address.
            ValueError: addresses or timeout_s.
            OSError: anything else; with ECANCELED, close() was called.
        """
    @property
    def address(self) -> bytes:
        """At most 64 bytes, for the peers."""

class Watcher:
    """
    Watches the processes of the other ranks.  A pid that is 0 or our own is not watched.

    When one ends, every abort word (addresses of u32) that is 0 becomes (peer_lost, its rank), unless the word
    `left[rank]` (0 or absent: none) is not 0 by then: that rank has announced that it leaves.  Words must live until
    close().
    `pidfds=False`: look every 100 ms, as is done on kernels without pidfds.
    `passed`: by rank, descriptors that peers opened of themselves with pidfd_open(), -1: none.  The Watcher takes
    them, also when it raises, and uses them instead of the pid, which may mean another process here.
    """
    def __init__(
        self,
        pids: collections.abc.Sequence[int],
        own_rank: int,
        *args: int,
        left: collections.abc.Sequence[int] = [],
        pidfds: bool = True,
        passed: collections.abc.Sequence[int] = [],
    ) -> None: ...
    def close(self) -> None:
        """Stop watching."""
    def dead(self) -> list[int]:
        """Ranks, in the order in which they were found dead."""
    def ignore(self, rank: int, ignored: bool) -> None:
        """
        From now on, set no abort words when the process of a rank ends, or set them again.

        Raises:
            IndexError: no such rank.
        """

class CallKind:
    """
    Calls of one operation with the same options, and how many there were.

    `op`: "dispatch", "dispatch_begin", "dispatch_end", "combine" or "reduce" (the second half of a fused layer).
    `call`: the options that all ranks pass alike, as moecomm.rounds.signature packs them.  `dtype`: of the rows.
    `row_bytes`: bytes of a token on this rank, scales included.
    """
    def __init__(self, op: str, call: int, dtype: typing.Any, row_bytes: int) -> None: ...
    begins_round: typing.Final[bool]
    call: typing.Final[int]
    calls: int
    dispatches: typing.Final[bool]
    @property
    def dtype(self) -> typing.Any: ...
    op: typing.Final[str]
    row_bytes: typing.Final[int]
    tokens: int

class CallRing:
    """
    The ring of the flight recorder: see moecomm.rounds.flight.

    `on_host`: rounds are over when the call that runs them returns.
    """

    LENGTH: typing.ClassVar[int] = 256
    replays: bool
    def __init__(self, on_host: bool) -> None: ...
    def begin_call(self, kind: typing.Any, tokens: int, captured: bool) -> int:
        """Record a call that is about to be made; return its number for end_call()."""
    def calls(self) -> list[typing.Any]:
        """The fields of moecomm.rounds.flight.Entry of each call, the oldest first."""
    def end_call(self, record: int) -> None:
        """Record that a call has returned."""
    def reject_call(self, what: typing.Any) -> None:
        """Record a call that failed before it reached the other ranks."""
    def round_of(self, kind: CallKind) -> int:
        """The round that the last call belongs to, which is of this kind; 0: not known."""
    def settle(self) -> None:
        """Record that every call so far is over, because the host has waited for it.  Not captured ones."""
    @property
    def rejected(self) -> int:
        """Calls that failed on this rank before they reached the others."""
    rounds: int
    steps: int

class DispatchPlan:
    """
    Dispatches of one kind, prepared.  `args` has everything but tensors and outputs.

    x, scales, topk_idx and topk_weights have the types, and are on the devices, of those of later calls.

    Raises:
        ValueError: an argument in the place of a tensor is none of torch's.
    """
    def __init__(
        self,
        args: DispatchArgs,
        scale_columns: bool,
        x: typing.Any,
        scales: typing.Any,
        topk_idx: typing.Any,
        topk_weights: typing.Any,
    ) -> None: ...
    def batched_outputs(
        self, args: DispatchArgs, payload: Block, kept: Block, owner: typing.Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """x and tokens_per_expert of a bound batched dispatch.  See flat_outputs."""
    def bind(
        self,
        payload: Block,
        kept: Block,
        max_rows: int,
        x: typing.Any,
        scales: typing.Any,
        topk_idx: typing.Any,
        topk_weights: typing.Any,
    ) -> DispatchArgs | None:
        """
        The arguments of a dispatch of these tensors.

        None unless the plan is for such tensors, they can be used, and their number of tokens has a schedule.
        """
    def expert_outputs(
        self, args: DispatchArgs, payload: Block, kept: Block, owner: typing.Any, counted: bool
    ) -> tuple[torch.Tensor | None, ...]:
        """x, scales and row_weights of a bound expert dispatch; `counted`: and rows_per_expert.  See flat_outputs."""
    def flat_outputs(
        self, args: DispatchArgs, payload: Block, kept: Block, owner: typing.Any
    ) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor, torch.Tensor]:
        """
        x, scales, topk_idx and topk_weights of a bound flat dispatch.  Each keeps its block and `owner`.

        Raises:
            ValueError: another layout, or scales that dispatch makes or that go by column.
        """
    def kept_bytes(self, max_rows: int) -> int:
        """Bytes of the block that combine and repeats need as well."""
    def layer_outputs(
        self, args: DispatchArgs, payload: Block, kept: Block, owner: typing.Any
    ) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]:
        """x, scales and tokens_per_expert of an expert dispatch, also of rows cast to FP8.  See flat_outputs."""
    def load(self, num_tokens: int, run: typing.Any) -> None:
        """Set the function that runs rounds of so many tokens: see Session.dispatcher."""
    def loaded(self, num_tokens: int) -> bool:
        """Return whether load() has been called for so many tokens."""
    def payload_bytes(self, max_rows: int) -> int:
        """Bytes of the block for the rows that arrive."""
    def prepare(self, kind: typing.Any, rows: int, most_rows: int, groups: int) -> None:
        """
        Set what calls need beside tensors.

        `kind`: theirs in the flight recorder.
        `rows`: room for so many, unless `max_rows` is given; never more than `most_rows`.
        `groups`: with `max_rows` each.
        """
    def repeat(self, payload: Block, earlier: DispatchArgs, x: typing.Any, scales: typing.Any) -> DispatchArgs | None:
        """bind() with the route and the room of an earlier dispatch."""
    def rows_output(self, args: DispatchArgs, payload: Block, owner: typing.Any) -> torch.Tensor:
        """The rows of a bound dispatch of any layout.  See flat_outputs."""
    def run(self, args: typing.Any) -> None:
        """Run a round by the function for its number of tokens."""
    def schedule(self, num_tokens: int, workers: int, chunk_tokens: int) -> None:
        """Set workers and chunks of rounds of so many tokens."""
    def table_outputs(
        self, args: DispatchArgs, kept: Block, owner: typing.Any
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """
        topk_weights (flat) or row_weights, src, tokens_per_expert, num_rows and, flat, topk_idx of a bound dispatch.

        Each keeps its block and `owner`.
        """

class CombinePlan:
    """Combines of one kind, prepared; see DispatchPlan."""
    def __init__(
        self,
        args: CombineArgs,
        y: typing.Any,
        bias: typing.Any,
        weight_grads: typing.Any,
        topk_weights: typing.Any = None,
    ) -> None: ...
    def bind(
        self,
        dispatch: DispatchArgs,
        y: typing.Any,
        out: typing.Any,
        bias: typing.Any,
        weight_grads: typing.Any,
        out_weight_grads: typing.Any,
        reduced_rows: int = 0,
        topk_weights: typing.Any = None,
    ) -> CombineArgs | None:
        """The arguments of a combine, or None: see DispatchPlan.bind.  `reduced_rows` is of CombineArgs."""
    def load(self, num_tokens: int, run: typing.Any) -> None:
        """Set the function that runs rounds of so many tokens: see Session.dispatcher."""
    def loaded(self, num_tokens: int) -> bool:
        """Return whether load() has been called for so many tokens."""
    def prepare(
        self,
        kind: typing.Any,
        reduced_row_bytes: int,
        most_reduced_rows: int,
        peers_read_weights: bool,
        like_out: typing.Any,
        like_grads: typing.Any,
    ) -> None:
        """
        Set what calls need beside tensors.

        `kind`: theirs in the flight recorder.  `reduced_row_bytes`, `most_reduced_rows`: see reduced_bytes().
        `peers_read_weights`: the weights of rows lie in the window.
        `like_out`, `like_grads`: tensors whose new_empty() makes the outputs.
        """
    def reduced_bytes(self, dispatch: DispatchArgs) -> int:
        """Bytes of a place for each reduced row; 0: they go through the ring, as few tokens do."""
    def run(self, args: typing.Any) -> None:
        """Run a round by the function for its number of tokens."""
    def schedule(self, num_tokens: int, workers: int, chunk_tokens: int, in_packets: bool = True) -> None:
        """Set workers and chunks of rounds of so many tokens; `in_packets`: their rows return in packets."""

class KnownCalls:
    """
    Dispatches and combines of kinds that there were before.

    Plain calls: no graph is captured, no round is verified or traced, and outputs stay in the window.
    The arguments are those of moecomm.dispatch.dispatch and moecomm.combine.combine.

    `plans`: lists of plans by what a call asks for: moecomm.rounds.plans.
    `ring`: the flight recorder's.
    `turn`: of the calls; its `made` counts the rounds.
    `record`: address of the failure record.
    `on_host`: of a CPU rank.
    """
    def __init__(
        self,
        plans: dict[typing.Any, typing.Any],
        heap: HeapParts,
        ring: typing.Any,
        turn: Turn,
        record: int,
        on_host: bool,
    ) -> None: ...
    def combine(
        self,
        rounds: typing.Any,
        request: typing.Any,
        y: typing.Any,
        handle: typing.Any,
        out: typing.Any,
        bias: typing.Any,
        weight_grads: typing.Any,
        topk_weights: typing.Any,
    ) -> tuple[typing.Any, bool]:
        """Run a combine.  Returns its result, and whether it is over; None as dispatch()."""
    def dispatch(
        self,
        rounds: typing.Any,
        request: typing.Any,
        x: typing.Any,
        topk_idx: typing.Any,
        topk_weights: typing.Any,
        scales: typing.Any,
        max_rows: typing.Any,
        handle: typing.Any,
        sync: typing.Any,
        payload: typing.Any = None,
    ) -> tuple[typing.Any, bool]:
        """
        Run a dispatch.  Returns a Routed, and whether the call is over.

        The Routed is None, and nothing has been done, if this is no plain call, there is no plan for it, or an
        argument can't be used.
        """

class RowChecks:
    """
    Hashes of the rows that combines of CPU ranks move (csrc/host/row_checks.h).

    `tables`: by rank, the address of its table, of table_bytes(shape).
    """
    @staticmethod
    def table_bytes(shape: Shape) -> int:
        """Bytes of the table of a rank."""
    def __init__(self, shape: Shape, rank: int, tables: collections.abc.Sequence[int]) -> None: ...
    def flip_later(self, sender: int, source_rank: int, token: int, bit: int) -> None:
        """For tests: flip a bit of this row once, where it has arrived."""
    def take(self) -> tuple[int, int, int] | None:
        """
        The first row since the last call that was not as sent; None: all were.

        Returns:
            The rank that sent it, the rank of its token, and the token.
        """
    @property
    def flipped(self) -> bool:
        """No flip is left to be made."""

class Runner:
    """Runs rounds of a session: see Session.dispatcher."""

class HostRunner(Runner):
    """
    Runs rounds of a CPU rank while it has `turn`, which close() takes as well.

    Raises:
        Closed: `closed` is set, or another thread has the turn.
    """

    closed: bool
    @typing.overload
    def __call__(self, args: DispatchArgs) -> None:
        """See host_dispatch."""
    @typing.overload
    def __call__(self, args: CombineArgs) -> None:
        """See host_combine."""
    def __init__(self, turn: Turn) -> None: ...
    def combine_checked(self, args: CombineArgs, checks: RowChecks) -> None:
        """Run a combine, and check the rows.  All ranks do."""

class LaunchQueue:
    """
    The stream of a session's last round.

    `used`: there was one.
    """

    used: bool
    def __init__(self, device: int, context: int) -> None: ...
    last_stream: int

class GpuRunner(Runner):
    """
    Enqueues rounds by one kernel on a GPU.

    `otherwise`: does it where the stream, the context or the number of blocks differ, or a graph is captured.
    `choice`: function, threads and shared memory of the kernel that chooses slots ahead of a dispatch; 0: none.
    """
    def __call__(self, args: typing.Any) -> None:
        """Call `otherwise`."""
    def __init__(
        self,
        queue: LaunchQueue,
        otherwise: typing.Any,
        function: int,
        blocks: int,
        block: int,
        shared_bytes: int,
        overlap: bool,
        cluster: int,
        choice: tuple[int, int, int] = (0, 0, 0),
    ) -> None: ...

class WindowHandle:
    """
    Window of csrc/window/window.h: offsets for `nbytes` on each rank; addresses are set by the caller.

    `adopted`: the user's bytes are in other memory than the control words, of which `total_bytes` is the size.

    Raises ValueError for numbers that can't be, and in every call before all addresses are set.
    """
    def __init__(self, rank: int, ranks: int, num_signals: int, nbytes: int, adopted: bool = False) -> None: ...
    def barrier(self) -> bool:
        """Wait until all ranks have come.  Else as wait()."""
    def leave(self) -> None:
        """Tell every peer that this rank has left.  Never waits."""
    def set_signal(self, rank: int, index: int, value: int) -> None:
        """Store a signal of a rank, after all earlier writes of this thread."""
    def signal(self, rank: int, index: int, amount: int) -> None:
        """Add to a signal of a rank, after all earlier writes of this thread."""
    def signal_value(self, index: int) -> int:
        """Load a signal of this rank."""
    def wait(self, index: int, value: int, peer: int = -1) -> bool:
        """
        Wait until a signal of this rank is at least `value`.  False on failure: record() then has the record.

        In the main thread, signal handlers run during the wait.  An exception of a handler aborts it and is raised.
        """
    abort: typing.Final[int]
    abort_host: int
    @property
    def address(self) -> int:
        """Address of the struct itself."""
    @property
    def content(self) -> bytes:
        """The bytes of the struct."""
    control: int
    left: typing.Final[int]
    nbytes: typing.Final[int]
    num_signals: typing.Final[int]
    peers: int
    rank: typing.Final[int]
    ranks: typing.Final[int]
    record: int
    signals: typing.Final[int]
    timeout_ns: int
    total_bytes: typing.Final[int]

def abort_all(context: Context) -> None:
    """End the next host round on every rank, none of whose waits this rank is in.  Leaves a failure record here."""

def aborted_word(rank: int) -> bytes:
    """The abort word of ranks that a rank has stopped."""

def choice_bytes(shape: Shape) -> int:
    """Bytes at the begin of a heap for the choice of balanced replicas: csrc/protocol/placement.h."""

def clear_record(address: int) -> None:
    """Make the record that of no failure."""

def constants() -> dict[str, int]:
    """Constants and sizes of csrc/protocol by name."""

def copied_at(window: WindowLayout, shape: Shape) -> int:
    """Offset in a window of the table of copies for a round: csrc/protocol/placement.h."""

def count_rejected(context: Context) -> None:
    """Count a host call that failed before its rounds were made, in State::rejected of this rank's window."""

def cuda_capturing(stream: int) -> bool:
    """Return whether the stream is being captured into a graph.  RuntimeError as cuda_launch."""

def cuda_context() -> int:
    """The calling thread's current CUcontext; 0: none.  RuntimeError as cuda_launch."""

@typing.overload
def cuda_launch(
    function: int,
    block: int,
    shared_bytes: int,
    stream: int,
    args: DispatchArgs,
    overlap: bool = False,
    cluster: int = 1,
) -> None:
    """
    Launch a CUfunction that takes the struct by value, in the current context: `args.workers` blocks.

    `overlap`: the kernel may begin while its predecessor on the stream ends (programmatic stream serialization); both
    use griddepcontrol.  `cluster`: blocks of a cluster, a divisor of the blocks; they run on neighboring
    multiprocessors.  A driver that supports neither launches the same blocks without.

    Raises:
        RuntimeError: with the driver's name of the error, or there is no driver.
    """

@typing.overload
def cuda_launch(
    function: int,
    block: int,
    shared_bytes: int,
    stream: int,
    args: CombineArgs,
    overlap: bool = False,
    cluster: int = 1,
) -> None:
    """
    Launch a CUfunction that takes the struct by value, in the current context: `args.workers` blocks.

    `overlap`: the kernel may begin while its predecessor on the stream ends (programmatic stream serialization); both
    use griddepcontrol.  `cluster`: blocks of a cluster, a divisor of the blocks; they run on neighboring
    multiprocessors.  A driver that supports neither launches the same blocks without.

    Raises:
        RuntimeError: with the driver's name of the error, or there is no driver.
    """

def cuda_launch_choice(
    function: int, block: int, shared_bytes: int, stream: int, args: DispatchArgs, overlap: bool = False
) -> None:
    """
    Launch the kernel that chooses the slots of a dispatch, by as many blocks as its entries need.

    `overlap`: see cuda_launch.  RuntimeError as cuda_launch.
    """

def cuda_launch_packed(
    function: int,
    grid: int,
    block: int,
    shared_bytes: int,
    stream: int,
    args: typing_extensions.Buffer,
    overlap: bool = False,
) -> None:
    """
    Launch a CUfunction that takes a struct by value, in the current context.

    `args`: the bytes of the struct, such as a ctypes.Structure: as many as the function reads.
    `overlap`: see cuda_launch.

    Raises:
        RuntimeError: with the driver's name of the error, or there is no driver.
    """

def cuda_missing() -> str:
    """Empty if there is a GPU to use, else a sentence that names the first thing missing.  Initializes the driver."""

def current_stream(device: int) -> int:
    """torch's current stream of a GPU: a cudaStream_t."""

def exclude(context: Context, rank: int) -> None:
    """
    Mask this host rank at a peer: `rank` takes part in no round until it resumes.

    Raises:
        ValueError: no such rank.
    """

def excluded_word(rank: int) -> bytes:
    """The abort word of a rank that others have masked."""

def expert_layer_shared_bytes(scaled: bool, most_rows: int, stages: int) -> int:
    """Dynamic shared memory of a block of the fused layer."""

def forget_failure(context: Context) -> None:
    """Clear the failure record and the host's abort word, when no round of this rank runs."""

def fused_constants() -> dict[str, int]:
    """Constants of csrc/gemm and csrc/fused by name."""

def gemm_shared_bytes(scaled: bool, most_rows: int, stages: int, mxfp4: bool = False) -> int:
    """Dynamic shared memory of a block of the grouped GEMM."""

def gemv_lines(most_rows: int) -> int:
    """Lines of a packet of the GEMV, for 8 or 16 rows."""

def gemv_shared_bytes(most_rows: int) -> int:
    """Dynamic shared memory of a block of the GEMV."""

def goes_direct(shape: Shape, num_tokens: int) -> bool:
    """Return whether rows of a rank with so many tokens reach other domains without a forwarder."""

def hash_rows(hashes: int, rows: int, pitch: int, width: int, places: int, count: int) -> None:
    """
    Hash rows in the memory of CPU ranks.  Arguments are addresses, and numbers of bytes.

    `hashes`: u64[count], which are continued.  `places`: i64[count], the number of each row; 0: they follow each other.
    """

def host_alloc(nbytes: int) -> HostMemory:
    """Allocate zeroed memory."""

def host_combine(args: CombineArgs) -> None:
    """As host_dispatch."""

def host_dispatch(args: DispatchArgs) -> None:
    """
    Run this rank's part of a dispatch.  Blocks until it is over; after a failure, record() returns the record.

    In the main thread, signal handlers run while it waits.  An exception of a handler, as Ctrl-C raises, aborts the
    round on every rank and is raised here.

    Raises:
        ValueError: rank, shape, record or peers of `args.ctx` are not set.
    """

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
    """
    Put `nbytes` from `source` behind the signal (u64) of the peer's block `there`, in turn with the peer.

    `before`: the count of both signals at the start.  The payload begins 256 bytes into a block.  Returns the
    nanoseconds of `rounds` round trips after `warmup` others; None if the peer did not come in time, or an abort word
    was set.

    Raises:
        ValueError: addresses or numbers that can't be.
    """

def host_round(context: Context) -> int:
    """The number of the last round that has ended on this host rank, once its puts have arrived."""

def host_run_all(rounds: collections.abc.Sequence[DispatchArgs | CombineArgs]) -> None:
    """Run the rounds of several ranks of this process at once, each in a thread of its own.  Else as host_dispatch."""

def leave(context: Context) -> None:
    """Announce to the peers that this rank takes part in no further host round.  Never waits."""

def leave_offset(window: WindowLayout, ranks: int, last_round: int, sender: int) -> int:
    """Offset in a peer's window at which the words of `sender` belong."""

def leave_signal(last_round: int) -> bytes:
    """The value of the signal of these words in a window of another domain."""

def leave_words(last_round: int, words: int) -> bytes:
    """The tagged words of a rank that leaves after `last_round`: `words` of 8 bytes, each valid by itself."""

def most_chunk_tokens(shape: Shape) -> int:
    """Return the most tokens of a chunk, such that rings have room for one whoever is masked."""

def overlap_constants() -> dict[str, int]:
    """Constants of csrc/overlap by name."""

def pack_items(
    load: int, rows: int, items: int, capacity: collections.abc.Sequence[int], pack: int, place: int
) -> None:
    """
    Pack items, heaviest first, each to the lightest pack that is not full.  Arguments are addresses.

    `load`: float32 [rows, items].  `pack`, `place`: int64 [rows, items].
    """

def pidfd_open(pid: int) -> int:
    """
    A descriptor of a process, readable once it has ended.  The caller closes it.

    Raises:
        ProcessLookupError: there is no such process.
        OSError: the kernel or a sandbox refuses, or no descriptor is left.
    """

def read_long_word(address: int) -> int:
    """Load a u64."""

def read_word(address: int) -> int:
    """Load a u32."""

def received_token_bytes(shape: Shape, row_bytes: int, scale_bytes: int) -> int:
    """Bytes of a token in the receive buffer of another domain."""

def record(address: int) -> FailureRecordView | None:
    """The record of a failed round; None while nothing has failed."""

def reduce_slot_bytes(topk: int, piece_bytes: int) -> int:
    """Shared memory of a slot of the fused layer's reduction."""

def replace_word(address: int, old: int, value: int) -> bool:
    """Store a u64 in place of `old`, after all earlier writes of this thread; return whether that stood there."""

def replicate_experts(load: int, rows: int, experts: int, physical: int, expert: int, replica: int, count: int) -> None:
    """
    Replicate experts greedily (csrc/runtime/balance.h).  Arguments are addresses.

    `load`: float32 [rows, experts].  `expert`, `replica`: int64 [rows, physical].  `count`: int64 [rows, experts].
    """

def resume(context: Context, last_round: int, masked: collections.abc.Sequence[int]) -> None:
    """
    Begin anew after a round, without these ranks, when no rank of this Buffer is in a round.  Host ranks.

    Raises:
        ValueError: no such rank.
    """

def resumed_signals(shape: Shape, last_round: int) -> bytes:
    """The first words at WindowLayout.signals of a rank that goes on after a round; the others are 0."""

def resumed_state(last_round: int, masked: collections.abc.Sequence[int]) -> bytes:
    """The words at WindowLayout.state of a rank that goes on after a round without the masked ranks."""

def set_abort(address: int, cause: int, culprit: int) -> bool:
    """Set an abort word unless it is set already; return whether it was set."""

def share_memory(a: typing.Any, b: typing.Any) -> bool:
    """Return whether two tensors of contiguous rows have bytes in common."""

def shares_tables(dispatch: DispatchArgs, tensor: typing.Any) -> bool:
    """Return whether a tensor of contiguous rows has bytes in common with the tables or row weights of a dispatch."""

def split_sums_bytes(most_rows: int) -> int:
    """Dynamic shared memory for the sums of a block of split products."""

def staged_bytes(kind: int, hidden: int) -> int:
    """Bytes of a row of a Type that combine stages, with its scales."""

def stand_in(shape: Shape, masked: collections.abc.Sequence[int], forwarder: int) -> int:
    """
    Return who forwards in the place of a rank while these are masked: itself if it is not; -1: nobody is left.

    ValueError: no such rank.
    """

def store_word(address: int, value: int) -> None:
    """Store a u32, after all earlier writes of this thread."""

def structs() -> dict[str, tuple[int, list[tuple[str, str, int, int, int]]]]:
    """
    The argument structs of kernels: size, and name, type, offset, size and array length (0: none) of each field.

    A type is the name of a struct (`Context` is in no table), or a scalar as Python's struct module writes it.
    """

def take_steps(record: int) -> tuple[list[tuple[int, int, int, int, int, str]], int]:
    """
    Return the steps since the last call, and how many had no room.

    A step: begin and end on CLOCK_MONOTONIC in ns, round, thread of the rank's team, rank that was waited for (-1: no
    wait), name.
    """

def takes_weights(shape: Shape) -> bool:
    """Return whether source ranks may give a combine routing weights of their own."""

def tensor_words(tensors: tuple[torch.Tensor | None, ...], addresses: bool = True) -> bytes | None:
    """
    Devices, dtypes, shapes, strides and addresses of torch's tensors, of which some may be None, as bytes to compare.

    None if one is no dense tensor of torch, or its memory does not hold what it promises.
    """

def trace_rounds(record: int, on: bool) -> None:
    """Begin or end to time the steps of host rounds whose context has this record."""

def window_layout(shape: Shape) -> WindowLayout:
    """The layout of a window of this shape."""
